"""Make tests-data/likelihood: how likely the tiny BERT of tests-data/bert-golden/mlm finds some texts.

    HF_HUB_OFFLINE=1 python tools/golden/likelihood.py [OUTPUT_DIR]

Writes vocab.txt (71 pieces, as many as the model has, several of them parts of words) and golden.json: for each text its
ids and, three times, the logarithm of each piece's probability and how many pieces had the highest logit:

- `piece`: pseudo-log-likelihood (Salazar et al. 2020), one piece masked at a time;
- `word`: the same with the later pieces of the word masked too (Kauf and Ivanova 2023, "PLL-word-l2r");
- `left_to_right`: the same weights as a causal model (is_decoder), each piece from those before it.

One sequence at a time, without padding, in f64. A text that is longer than the model's 40 positions is divided into
windows that begin 19 pieces apart (half of the room); a masked piece is scored where it has most context, as in BERT's
run_squad.py, a causal one in the first window that shows it, where most pieces stand before it.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests-data/bert-golden/mlm"
OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests-data/likelihood"
POSITIONS = 40

WORDS = (
    "the a cat dog puppet man woman child who what was is were are sat ran walk play sing see hen jim new old small "
    "on in by with and not , . ? ' !"
)
PARTS = "##s ##ed ##ing ##er ##eer ##son ##ly ##un ##et ##th ##a ##e ##i ##o ##n ##t ##r ##k ##d ##p ##y ##l ##m ##ch"
FAVOURITES = {"the": 20, "cat": 11, "##s": 18, ".": 64, "sat": 51}

TEXTS = [
    "The cat sat on the puppet.",
    "the cat sat on the puppet",
    "Jim Henson was a puppeteer.",
    "The dogs were walking, and the old man was singing!",
    "Who is the small child by the dog?",
    "What was the cat not?",
    "The women ran.",
    "cats",
    "a",
    "",
    "?",
    "Newly walked, newly played: the puppeteers' new hens.",
    "The zebra sat on the xylophone.",
    "the the the the the the",
    "a man is a man is a man",
    "Jim's dog sings with the child.",
    "the cat [MASK] on the dog",
    "The cat sat on the puppet.",
    # Longer than the model: two windows, and several.
    "The old man and the small child walked with the dog, and the dog ran, and the cat sat, and Jim Henson was singing. "
    "The puppets were new, and the puppeteers were old.",
    "Who sat on the cat? " * 20 + "Jim Henson.",
]


def windows(count):
    """Ranges of pieces."""
    room = POSITIONS - 2
    spans, start = [], 0
    while True:
        end = min(count, start + room)
        spans.append((start, end))
        if end == count:
            return spans
        start += room // 2


def most_context(spans, piece):
    shown = [(min(piece - a, b - 1 - piece) + 0.01 * (b - a), -i) for i, (a, b) in enumerate(spans) if a <= piece < b]
    return spans[-max(shown)[1]]


def logs(model, ids, position, target):
    """(ln P(target), whether it is the first with the highest logit) at a position of one sequence."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, position]
    return float(logits.log_softmax(-1)[target]), int(logits.argmax()) == target


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split(), *PARTS.split()]
    vocabulary += [f"[unused{i}]" for i in range(71 - len(vocabulary))]
    assert len(vocabulary) == len(set(vocabulary)) == 71
    # Frequent pieces get ids that the random weights favour; otherwise hardly a prediction would be correct.
    for piece, id in FAVOURITES.items():
        old = vocabulary.index(piece)
        vocabulary[old], vocabulary[id] = vocabulary[id], piece
    (OUT / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    tokenizer = transformers.BertTokenizer(vocab=str(OUT / "vocab.txt"), do_lower_case=True)
    assert tokenizer.convert_tokens_to_ids("##son") == vocabulary.index("##son")

    masked = transformers.BertForMaskedLM.from_pretrained(MODEL, attn_implementation="eager").double().eval()
    causal = transformers.BertLMHeadModel.from_pretrained(MODEL, is_decoder=True, attn_implementation="eager")
    causal = causal.double().eval()
    cls, sep, mask = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id

    entries = []
    for text in TEXTS:
        encoded = tokenizer(text, add_special_tokens=False)
        ids, words = encoded["input_ids"], encoded.word_ids()
        spans = windows(len(ids))
        scores = {"piece": [], "word": [], "left_to_right": []}
        for i, target in enumerate(ids):
            start, end = most_context(spans, i)
            same_word = [j for j in range(i, end) if j == i or (words[j] is not None and words[j] == words[i])]
            for kind, hidden in [("piece", [i]), ("word", same_word)]:
                sequence = [cls, *(mask if j in hidden else ids[j] for j in range(start, end)), sep]
                scores[kind].append(logs(masked, sequence, 1 + i - start, target))
            start, end = next((a, b) for a, b in spans if a <= i < b)
            # Everything from the piece itself on is there, too: a causal model must not look at it.
            scores["left_to_right"].append(logs(causal, [cls, *ids[start:end], sep], i - start, target))
        entry = {"text": text, "ids": ids}
        for kind, found in scores.items():
            entry[kind] = {"logs": [log for log, _ in found], "correct": sum(hit for _, hit in found)}
        entries.append(entry)
    about = {"torch": torch.__version__, "transformers": transformers.__version__}
    golden = json.dumps({"about": about, "texts": entries}, indent=None, separators=(",", ":"))
    (OUT / "golden.json").write_text(golden.replace('{"text"', '\n{"text"') + "\n")
    print(f"{len(entries)} texts, {sum(len(e['ids']) for e in entries)} pieces in {OUT}")
    for e in entries:
        print(tokenizer.convert_ids_to_tokens(e["ids"]), {k: round(sum(e[k]["logs"]), 3) for k in scores},
              {k: e[k]["correct"] for k in scores})


main()
