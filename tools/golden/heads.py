"""Make tests-data/heads/golden.json: what the tiny BERTs of tests-data/bert-golden say to texts, under every head.

    HF_HUB_OFFLINE=1 python tools/golden/heads.py [OUTPUT_FILE]

The tokenizer is tests-data/likelihood/vocab.txt. One sequence at a time, without padding, in f64; the models have 40
positions, so that some of the texts take windows:

- classify: logits and scores of texts and pairs under `sequence`, `regression` and `multilabel`; of a text in windows
  (`windows`) the logits are the mean over windows that begin half a window apart, weighted by their tokens;
- tag: the logits of the first piece of every word, each from the window where it has most context;
- answer: candidates as task_features.py finds them, windows 10 pieces apart;
- choose: the logits of choices;
- attention: the probabilities of every layer and head for one text and one pair.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from task_features import predict

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests-data/bert-golden"
OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests-data/heads/golden.json"
POSITIONS = 40

TEXTS = [
    "The cat sat on the puppet.",
    "Jim Henson was a puppeteer.",
    "",
    "zebra?",
    "Who is the small child, and what was the old man's dog?",
    ["The cat sat.", "The dog ran."],
    ["a man is a man", ""],
    ["", "cats"],
]
LONG = (
    "The old man and the small child walked with the dog, and the dog ran, and the cat sat, and Jim Henson was "
    "singing. The puppets were new, and the puppeteers were old."
)
LONG_PAIR = ["Who was singing?", LONG]

TAGGED = [
    ["Jim", "Henson", "was", "a", "puppeteer", "."],
    ["The", "dogs", "walked", "newly", ",", "zebra", "man's"],
    [],
    LONG.replace(",", " ,").replace(".", " .").split(),
]

QUESTIONS = [
    ("Who was singing?", LONG),
    ("What ran?", "The dog ran, and the cat sat."),
    ("Who?", "Jim Henson"),
]
OVERLAP_STEP = 10

CHOICES = [
    ("The cat", ["sat on the dog.", "ran.", "was a puppeteer, and the old man was singing!"]),
    ("Who?", ["Jim", "Jim"]),
    (LONG[:150], ["the cat sat and the man ran.", "a"]),
]


def load(head, kind):
    return kind.from_pretrained(GOLDEN / head, attn_implementation="eager").double().eval()


def spans(count, room, step):
    found, start = [], 0
    while True:
        found.append((start, min(count, start + room)))
        if found[-1][1] == count:
            return found
        start += step


def most_context(found, piece):
    shown = [(min(piece - a, b - 1 - piece) + 0.01 * (b - a), -i) for i, (a, b) in enumerate(found) if a <= piece < b]
    return -max(shown)[1]


def main():
    OUT.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = transformers.BertTokenizer(vocab=str(ROOT / "tests-data/likelihood/vocab.txt"), do_lower_case=True)
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    pieces = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]

    def run(model, first, second=None):
        """One sequence of ids."""
        ids = [cls, *first, sep, *([] if second is None else [*second, sep])]
        segments = [0] * (len(first) + 2) + [1] * (len(ids) - len(first) - 2)
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([segments]), output_attentions=True)

    classify = {}
    for head in ["sequence", "regression", "multilabel"]:
        model = load(head, transformers.BertForSequenceClassification)
        scores = {
            "sequence": lambda x: x.softmax(-1),
            "regression": lambda x: x,
            "multilabel": lambda x: x.sigmoid(),
        }[head]
        classify[head] = []

        def add(text, logits, windows):
            entry = {"text": text, "windows": windows, "logits": logits.tolist(), "scores": scores(logits).tolist()}
            classify[head].append(entry)

        for text in TEXTS:
            first, second = (text, None) if isinstance(text, str) else text
            # As lists: a single call takes an empty second text for none at all.
            encoded = tokenizer([first], None if second is None else [second])
            result = run(model, pieces(first), None if second is None else pieces(second))
            with torch.no_grad():
                own = model(**{k: torch.tensor(v) for k, v in encoded.items()}).logits
            assert torch.allclose(own, result.logits), text
            add(text, result.logits[0], False)
        add(LONG, run(model, pieces(LONG)[: POSITIONS - 2]).logits[0], False)
        for text in [LONG, LONG_PAIR]:
            before = [] if isinstance(text, str) else [pieces(text[0])]
            ids = pieces(text if isinstance(text, str) else text[1])
            room = POSITIONS - 2 - (1 + len(before[0]) if before else 0)
            step = room // 2 if not before else room - room // 2
            rows, weights = [], []
            for a, b in spans(len(ids), room, step):
                rows.append(run(model, *before, ids[a:b]).logits[0])
                weights.append(b - a + POSITIONS - room)
            weights = torch.tensor(weights, dtype=torch.float64)
            add(text, (torch.stack(rows) * weights[:, None]).sum(0) / weights.sum(), True)

    model = load("token", transformers.BertForTokenClassification)
    tag = []
    for words in TAGGED:
        encoded = tokenizer(words, is_split_into_words=True, add_special_tokens=False)
        ids, of_words = encoded["input_ids"], encoded.word_ids()
        found = spans(len(ids), POSITIONS - 2, (POSITIONS - 2) // 2)
        results = [run(model, ids[a:b]).logits[0] for a, b in found]
        rows = []
        for word in range(len(words)):
            piece = of_words.index(word)
            window = most_context(found, piece)
            rows.append(results[window][1 + piece - found[window][0]].tolist())
        tag.append({"words": words, "logits": rows})

    model = load("qa", transformers.BertForQuestionAnswering)
    answer = []
    for question, passage in QUESTIONS:
        encoded = tokenizer(passage, add_special_tokens=False, return_offsets_mapping=True)
        ids, asked = encoded["input_ids"], pieces(question)
        room = POSITIONS - 3 - len(asked)
        found = spans(len(ids), room, min(OVERLAP_STEP, room))
        windows = []
        for i, (a, b) in enumerate(found):
            result = run(model, asked, ids[a:b])
            outside = len(asked) + 2
            windows.append(
                {
                    "offsets": [None] * outside + [list(o) for o in encoded["offset_mapping"][a:b]] + [None],
                    "most_context": [False] * outside + [most_context(found, p) == i for p in range(a, b)] + [False],
                    "start": result.start_logits[0].tolist(),
                    "end": result.end_logits[0].tolist(),
                }
            )
        entry = {"question": question, "passage": passage, "step": OVERLAP_STEP}
        entry["must"] = predict(windows, passage, 20, 30, None)
        entry["may"] = predict(windows, passage, 20, 30, -3.0)
        answer.append(entry)

    model = load("choice", transformers.BertForMultipleChoice)
    choose = []
    for context, choices in CHOICES:
        encoded = tokenizer([context] * len(choices), choices, truncation="longest_first", max_length=POSITIONS)
        rows = []
        for i in range(len(choices)):
            with torch.no_grad():
                call = {key: torch.tensor([[encoded[key][i]]]) for key in encoded}
                rows.append(float(model(**call).logits))
        choose.append({"context": context, "choices": choices, "logits": rows})

    model = load("model", transformers.BertModel)
    attention = []
    for first, second in [("Jim Henson was a puppeteer.", None), ("The cat sat.", "cats")]:
        result = run(model, pieces(first), None if second is None else pieces(second))
        ids = tokenizer(first, second)["input_ids"]
        layers = [[round(x, 8) for x in layer[0].flatten().tolist()] for layer in result.attentions]
        tokens = tokenizer.convert_ids_to_tokens(ids)
        attention.append({"first": first, "second": second, "tokens": tokens, "layers": layers})

    about = {"torch": torch.__version__, "transformers": transformers.__version__}
    golden = {"about": about, "classify": classify, "tag": tag, "answer": answer, "choose": choose}
    text = json.dumps(golden | {"attention": attention}, separators=(",", ":"))
    for key in ["text", "words", "question", "context", "first"]:
        text = text.replace('{"%s"' % key, '\n{"%s"' % key)
    OUT.write_text(text + "\n")
    print(len(text), "bytes")
    for entry in answer:
        print([entry[k]["answer"] for k in ("must", "may")], entry["may"]["odds"])


main()
