"""Make tests-data/finetune: small labelled files of every kind, and the losses of transformers' own fine-tuning on them.

    HF_HUB_OFFLINE=1 python tools/golden/finetune.py [OUTPUT_DIR]

The models are those of tests-data/bert-golden with the vocabulary of tests-data/likelihood, without dropout. All examples of a
file are one batch, so that their order does not matter; golden.json has for each case the loss before each of five updates
(AdamW, lr 1e-3 falling in a line to 0, eps 1e-6, decay 0.01 off biases and LayerNorm, clip 1.0), computed from the files by
transformers' tokenizer and models. `settings` are what henson needs to do the same.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch.nn.functional import cross_entropy, normalize

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests-data"
OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA / "finetune"
STEPS, LR, LENGTH, STRIDE = 5, 1e-3, 40, 9

TEXTS = [
    "the cat sat on the dog.", "a woman ran", "who was jim henson?", "the child is not small!", "puppeteer",
    "new puppets sing and play by the old man, and the old man sings and plays with the new puppets in the end of the walk by the sea",
]
SECOND = ["cats are dogs", "the man walked.", "jim", "play", "who", "a cat sat, a dog ran, a child sang, a man walked, and not one was seen"]
CLASSES = ["good", "bad", "good", "fair", "good", "bad"]
SCORES = [0.5, 2.25, 4.0, 5.0, 0.0, 3.5]
SEVERAL = [["a"], ["b", "d"], [], ["a", "b", "c"], ["d"], ["c"]]
TAGGED = [
    [("jim", "B-PER"), ("henson", "I-PER"), ("was", "O"), ("in", "O"), ("newland", "B-LOC"), (".", "O")],
    [("the", "O"), ("old", "B-LOC"), ("sea", "I-LOC")],
    [("who", "O"), ("sings", "O"), ("?", "O")],
    [(w, "O" if i % 3 else "B-PER") for i, w in enumerate("the puppets play and sing and walk and see the cats and dogs and men and women in the walk of the child by the sea and not in the old puppeteer".split())],
]
QUESTIONS = [
    ("who was a puppeteer?", "jim henson was a puppeteer.", "jim henson"),
    ("what ran?", "the dog sat. the cat ran. the man sat and the woman sat and the child sat and the dog sat and the puppet ran and the old man sat by the sea", "the puppet"),
    ("who is old?", "the child is small.", None),
]
UNLIKE = [None, "the old sea", None, "a child sings", "the cat sat on the dog.", None]
CHOICES = [
    ("the man sat on", ["the dog.", "walked", "jim"], 0),
    ("who sings?", ["the puppets sing", "a cat, not small", "the old woman, with the child", "new"], 2),
    ("a child", ["plays", "was the sea", "who?", "ran by the man and the woman and the dog"], 0),
]


def write(name, text):
    (OUT / name).write_text(text, encoding="utf-8")


def jsonl(name, rows):
    write(name, "".join(json.dumps(row) + "\n" for row in rows))


OUT.mkdir(parents=True, exist_ok=True)
jsonl("classify.jsonl", [{"text": t, "label": c} for t, c in zip(TEXTS, CLASSES)])
jsonl("pair.jsonl", [{"sentence1": t, "sentence2": s, "label": c} for t, s, c in zip(TEXTS, SECOND, CLASSES)])
jsonl("regress.jsonl", [{"sentence1": t, "sentence2": s, "score": n} for t, s, n in zip(TEXTS, SECOND, SCORES)])
jsonl("multilabel.jsonl", [{"text": t, "labels": s} for t, s in zip(TEXTS, SEVERAL)])
write("tag.conll", "".join("".join(f"{w} {t}\n" for w, t in s) + "\n" for s in TAGGED))
paragraphs = []
for i, (question, passage, answer) in enumerate(QUESTIONS):
    answers = [] if answer is None else [{"text": answer, "answer_start": passage.index(answer)}]
    paragraphs.append({"context": passage, "qas": [{"id": f"q{i}", "question": question, "answers": answers, "is_impossible": answer is None}]})
write("qa.json", json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}, indent=1) + "\n")
jsonl("choice.jsonl", [{"context": c, "choices": e, "label": n} for c, e, n in CHOICES])

jsonl("embed.jsonl", [{"sentence1": t, "sentence2": s} for t, s in zip(TEXTS, SECOND)])
# Some have a text that means something else; the last two say once more what others said.
UNLIKE_ROWS = list(zip(TEXTS, SECOND, UNLIKE)) + [(TEXTS[0], "a dog, a cat", None), (SECOND[1], TEXTS[1], None)]
jsonl("embed-unlike.jsonl", [{"anchor": t, "positive": s, "negative": u} for t, s, u in UNLIKE_ROWS])
jsonl("embed-scores.jsonl", [{"sentence1": t, "sentence2": s, "score": n} for t, s, n in zip(TEXTS, SECOND, SCORES)])

tokenizer = transformers.BertTokenizer(vocab=str(DATA / "likelihood/vocab.txt"), do_lower_case=True)
assert tokenizer.vocab_size == 71, tokenizer.vocab_size


def model(head):
    classes = {
        "sequence": "BertForSequenceClassification", "regression": "BertForSequenceClassification",
        "multilabel": "BertForSequenceClassification", "token": "BertForTokenClassification",
        "qa": "BertForQuestionAnswering", "choice": "BertForMultipleChoice",
    }
    classes["encoder"] = "BertModel"
    m = getattr(transformers, classes[head]).from_pretrained(
        DATA / "bert-golden" / ("sequence" if head == "encoder" else head), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return m.train()


def encoded(first, second=None):
    return tokenizer(first, second, truncation="longest_first", max_length=LENGTH, padding=True, return_tensors="pt")


LABELS = sorted(set(CLASSES))
CLASS_IDS = torch.tensor([LABELS.index(c) for c in CLASSES])
COUNTS = torch.bincount(CLASS_IDS, minlength=3)


def classify(m):
    return m(**encoded(TEXTS), labels=CLASS_IDS).loss


def weighted(m):
    weights = len(CLASSES) / (3 * COUNTS.float())
    return cross_entropy(m(**encoded(TEXTS)).logits, CLASS_IDS, weight=weights)


def pair(m):
    return m(**encoded(TEXTS, SECOND), labels=CLASS_IDS).loss


def regress(m):
    return m(**encoded(TEXTS, SECOND), labels=torch.tensor(SCORES)).loss


def multilabel(m):
    several = torch.tensor([[float(label in s) for label in "abcd"] for s in SEVERAL])
    return m(**encoded(TEXTS), labels=several).loss


def multilabel_weighted(m):
    several = torch.tensor([[float(label in s) for label in "abcd"] for s in SEVERAL])
    right = several.sum(0)
    return torch.nn.BCEWithLogitsLoss(pos_weight=(len(SEVERAL) - right) / right)(m(**encoded(TEXTS)).logits, several)


def tag(m):
    labels = sorted({t for s in TAGGED for _, t in s})
    assert len(labels) == 5
    x = tokenizer([[w for w, _ in s] for s in TAGGED], is_split_into_words=True, padding=True, return_tensors="pt")
    assert x["input_ids"].shape[1] <= LENGTH, x["input_ids"].shape
    y = torch.full(x["input_ids"].shape, -100)
    for i, s in enumerate(TAGGED):
        before = None
        for j, word in enumerate(x.word_ids(i)):
            if word is not None and word != before:
                y[i, j] = labels.index(s[word][1])
            before = word
    return m(**x, labels=y).loss


def qa(m):
    losses = []
    for question, passage, answer in QUESTIONS:
        room = LENGTH - 3 - len(tokenizer(question, add_special_tokens=False)["input_ids"])
        x = tokenizer(
            question, passage, truncation="only_second", max_length=LENGTH, stride=room - STRIDE,
            return_overflowing_tokens=True, return_offsets_mapping=True,
        )
        for i, ids in enumerate(x["input_ids"]):
            start = end = 0
            if answer is not None:
                a, b = passage.index(answer), passage.index(answer) + len(answer)
                inside = [j for j, s in enumerate(x.sequence_ids(i)) if s == 1]
                offsets = x["offset_mapping"][i]
                if offsets[inside[0]][0] <= a and offsets[inside[-1]][1] >= b:
                    start = next(j for j in inside if offsets[j][1] > a)
                    end = next(j for j in reversed(inside) if offsets[j][0] < b)
            # One at a time: a padded batch would give padding a share of the softmax.
            out = m(
                input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([x["token_type_ids"][i]]),
                start_positions=torch.tensor([start]), end_positions=torch.tensor([end]),
            )
            losses.append(out.loss)
    assert len(losses) > len(QUESTIONS)
    return torch.stack(losses).mean()


def choice(m):
    losses = []
    for context, endings, label in CHOICES:
        x = {k: v[None] for k, v in encoded([context] * len(endings), endings).items()}
        losses.append(m(**x, labels=torch.tensor([label])).loss)
    return torch.stack(losses).mean()


def vectors(m, texts):
    x = encoded(texts)
    mask = x["attention_mask"][:, :, None].float()
    return normalize((m(**x).last_hidden_state * mask).sum(1) / mask.sum(1), dim=1)


def contrast(m, rows, temperature):
    """Ranks the partner among all second texts and all that mean something else, leaving out what is not wrong."""
    first, second = [a for a, _, _ in rows], [b for _, b, _ in rows]
    others = second + [c for _, _, c in rows if c is not None]
    scores = vectors(m, first) @ vectors(m, others).T / temperature
    for i, (a, b, _) in enumerate(rows):
        for j, text in enumerate(others):
            if j != i and (text in (a, b) or j < len(rows) and first[j] == a):
                scores[i, j] = float("-inf")
    return cross_entropy(scores, torch.arange(len(rows)))


def embed(m):
    return contrast(m, [(a, b, None) for a, b in zip(TEXTS, SECOND)], 0.05)


def embed_scores(m):
    cosines = (vectors(m, TEXTS) * vectors(m, SECOND)).sum(1)
    low, high = min(SCORES), max(SCORES)
    return ((cosines - torch.tensor([(s - low) / (high - low) for s in SCORES])) ** 2).mean()


def embed_unlike(m):
    return contrast(m, UNLIKE_ROWS, 0.1)


def losses(m, loss_of, rate=lambda name: 1.0, frozen=lambda name: False):
    groups = []
    for name, parameter in m.named_parameters():
        if frozen(name):
            parameter.requires_grad_(False)
            continue
        decay = 0.0 if "bias" in name or "LayerNorm" in name else 0.01
        groups.append({"params": [parameter], "weight_decay": decay, "rate": rate(name), "lr": 0.0})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-6)
    out = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * group["rate"] * (STEPS - step) / STEPS
        loss = loss_of(m)
        out.append(float(loss))
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in m.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return out


def layer_rate(name):
    if name.startswith("bert.encoder.layer."):
        return 0.5 ** (2 - int(name.split(".")[3]))
    return 0.5**3 if name.startswith("bert.embeddings.") else 1.0


def encoder(name):
    return name.startswith(("bert.embeddings.", "bert.encoder."))


CASES = [
    ("classify", "sequence", "classify.jsonl", [], classify, {}),
    ("classify", "sequence", "classify.jsonl", ["class_weights=true"], weighted, {}),
    ("classify", "sequence", "classify.jsonl", ["layer_decay=0.5"], classify, {"rate": layer_rate}),
    ("classify", "sequence", "classify.jsonl", ["freeze=true"], classify, {"frozen": encoder}),
    ("classify", "sequence", "classify.jsonl", ["accumulation=3"], classify, {}),
    ("pair", "sequence", "pair.jsonl", [], pair, {}),
    ("regress", "regression", "regress.jsonl", [], regress, {}),
    ("multilabel", "multilabel", "multilabel.jsonl", [], multilabel, {}),
    ("multilabel", "multilabel", "multilabel.jsonl", ["class_weights=true"], multilabel_weighted, {}),
    ("tag", "token", "tag.conll", [], tag, {}),
    ("qa", "qa", "qa.json", [f"stride={STRIDE}"], qa, {}),
    ("choice", "choice", "choice.jsonl", [], choice, {}),
    ("embed", "encoder", "embed.jsonl", [], embed, {}),
    ("embed", "encoder", "embed-unlike.jsonl", ["temperature=0.1"], embed_unlike, {}),
    ("embed", "encoder", "embed-scores.jsonl", [], embed_scores, {}),
]
golden = []
for task, head, file, settings, loss_of, how in CASES:
    found = losses(model(head), loss_of, **how)
    head = "sequence" if head == "encoder" else head
    golden.append({"task": task, "head": head, "file": file, "settings": settings, "losses": found})
    print(task, settings, [round(x, 5) for x in found])
write("golden.json", json.dumps(golden, indent=1) + "\n")
