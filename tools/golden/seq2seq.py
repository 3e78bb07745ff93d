"""Make tests-data/seq2seq: pairs of texts, a vocabulary, and the losses of transformers' own fine-tuning on them.

    HF_HUB_OFFLINE=1 python tools/golden/seq2seq.py [OUTPUT_DIR]

The models are those of tests-data/writers, without dropout. Words are single tokens, and a text is `[CLS] words [SEP]`, where [SEP]
has the id of the model's end token. A source with two targets is two pairs. All pairs are one batch, padded here; golden.json has for
each model and label smoothing the loss before each of five updates (AdamW, lr 1e-3 falling in a line to 0, eps 1e-6, no decay, clip
1.0), where the loss is the mean over all tokens of all targets. GPT-2 reads source and target in one sequence.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests-data"
OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA / "seq2seq"
STEPS, LR = 5, 1e-3

WORDS = (
    "the cat sat on dog a woman ran who was jim child is not small puppets sing and play by old man sea walk in new "
    "die katze sass auf hund eine frau lief wer war kind ist nicht klein puppen singen und spielen am alter mann meer gang im neu "
    "see : translate end"
).split()
PAIRS = [
    ("the cat sat on the dog", ["die katze sass auf hund"]),
    ("a woman ran", ["eine frau lief", "frau lief und lief"]),
    ("who was jim", ["wer war jim"]),
    ("the child is not small and the old man is not small", ["das kind ist nicht klein und alter mann ist nicht klein"]),
    ("sea", ["meer"]),
]
# The end token is 2 in all three; BART begins with <s>, which is 0 there.
SPECIAL = {"t5": ["[PAD]", "[CLS]", "[SEP]", "[UNK]"], "bart": ["[CLS]", "[PAD]", "[SEP]", "[UNK]"]}
assert len(WORDS) == len(set(WORDS)) == 55, len(WORDS)

OUT.mkdir(parents=True, exist_ok=True)
(OUT / "pairs.jsonl").write_text("".join(json.dumps({"source": s, "target": t if len(t) > 1 else t[0]}) + "\n" for s, t in PAIRS))
(OUT / "words.txt").write_text("\n".join(WORDS) + "\n")


def ids(kind, text):
    vocabulary = SPECIAL[kind] + WORDS
    number = lambda word: vocabulary.index(word) if word in vocabulary else vocabulary.index("[UNK]")
    return [number("[CLS]"), *map(number, text.split()), number("[SEP]")]


def padded(rows, filler):
    longest = max(map(len, rows))
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])


def updates(model, inputs, mask, labels, smoothing, shift=0):
    """The losses before each update. `shift` is by how much logits stand before what they predict."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-6, weight_decay=0.0)
    found = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - step / STEPS)
        output = model(input_ids=inputs, attention_mask=mask, labels=labels)
        logits = output.logits[:, : output.logits.shape[1] - shift]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, shift:].flatten(), label_smoothing=smoothing)
        assert smoothing > 0 or abs(loss.item() - output.loss.item()) < 1e-5
        found.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return found


def losses(name, smoothing):
    kind = "bart" if name == "bart" else "t5"
    keys = {"dropout": 0.0} if kind == "bart" else {"dropout_rate": 0.0}
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(DATA / "writers" / name, **keys).train()
    pairs = [(ids(kind, source), ids(kind, target)) for source, targets in PAIRS for target in targets]
    pad = SPECIAL[kind].index("[PAD]")
    inputs = padded([source for source, _ in pairs], pad)
    labels = padded([target for _, target in pairs], -100)
    return updates(model, inputs, (inputs != pad).long(), labels, smoothing)


def losses_of_one(name, smoothing):
    """The same of a language model over source and target."""
    keys = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    model = transformers.AutoModelForCausalLM.from_pretrained(DATA / "writers" / name, **keys).train()
    pairs = [(ids("t5", source), ids("t5", target)) for source, targets in PAIRS for target in targets]
    inputs = padded([source + target for source, target in pairs], 0)
    mask = padded([[1] * len(source + target) for source, target in pairs], 0)
    labels = padded([[-100] * len(source) + target for source, target in pairs], -100)
    return updates(model, inputs, mask, labels, smoothing, shift=1)


cases = [
    {"model": name, "special": SPECIAL["bart" if name == "bart" else "t5"], "smoothing": smoothing, "losses": losses(name, smoothing)}
    for name in ["t5", "t5-v1_1", "bart"]
    for smoothing in [0.0, 0.1]
]
cases += [{"model": "gpt2", "special": SPECIAL["t5"], "smoothing": s, "losses": losses_of_one("gpt2", s)} for s in [0.0, 0.1]]
(OUT / "golden.json").write_text(json.dumps(cases, indent=1) + "\n")
