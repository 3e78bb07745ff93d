"""Make the golden values of marked spans in tests-data/finetune: wic.jsonl, wsc.jsonl and span-golden.json.

    HF_HUB_OFFLINE=1 python tools/golden/span_form.py [OUTPUT_DIR]

The encoder is that of tests-data/bert-golden/token with the vocabulary of tests-data/likelihood, without dropout; the head is
drawn here and written into span-golden.json. What is checked first: the baselines' classifier, a linear layer on the vectors of
[CLS] and of both spans side by side, has the same loss as the sum over the roles of the mean logits of a token classifier with a
label for each role and class. The losses are those of the second before each of five updates, as in finetune.py.
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
OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA / "finetune"
STEPS, LR, LENGTH, ROLES, CLASSES = 5, 1e-3, 40, 3, 2

WIC = [
    ("play", "the puppets play by the sea", "play", "a child sang in the play", "play", False),
    ("puppeteer", "jim was a puppeteer", "puppeteer", "who is the old puppeteer?", "puppeteer", True),
    ("walk", "the dogs walked", "walked", "a walk by the sea and the old man", "walk", False),
    ("man", "the man sat.", "man", "the man and the woman ran", "man", True),
]
WSC = [
    ("jim sat by the old man, and he sang.", (0, "jim"), (7, "he"), False),
    ("the cat ran, and the dog saw the cat by the sea.", (4, "The dog"), (7, "the cat"), True),
    ("a woman and a child: she is not small!", (0, "A woman"), (5, "she"), True),
]


def spans_of_wic(row):
    _, first, word1, second, word2, _ = row
    (a, b), (c, d) = ((t.index(w), t.index(w) + len(w)) for t, w in ((first, word1), (second, word2)))
    return a, b, c, d


wic = [
    {"word": r[0], "sentence1": r[1], "sentence2": r[3], "idx": i, "label": r[5],
     **dict(zip(("start1", "end1", "start2", "end2"), spans_of_wic(r)))}
    for i, r in enumerate(WIC)
]
wsc = [
    {"text": t, "target": {"span1_index": i, "span1_text": a, "span2_index": j, "span2_text": b}, "idx": n, "label": y}
    for n, (t, (i, a), (j, b), y) in enumerate(WSC)
]
for name, rows in (("wic", wic), ("wsc", wsc)):
    (OUT / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

tokenizer = transformers.BertTokenizer(vocab=str(DATA / "likelihood/vocab.txt"), do_lower_case=True)


def laid_out(first, second, spans):
    """One sequence, and the positions of [CLS] and of both spans, given as (text, start, end) in characters."""
    x = tokenizer(first, second, return_offsets_mapping=True, return_tensors="pt")
    offsets, texts = x.pop("offset_mapping")[0].tolist(), x.sequence_ids(0)
    roles = [[0]]
    for text, start, end in spans:
        roles.append([j for j, s in enumerate(texts) if s == text and offsets[j][0] < end and start < offsets[j][1]])
        assert roles[-1]
    assert x["input_ids"].shape[1] <= LENGTH
    return x, roles


def word_span(text, index, span):
    start = sum(len(w) + 1 for w in text.split()[:index])
    assert text[start:start + len(span)].lower() == span.lower(), (text[start:], span)
    return 0, start, start + len(span)


EXAMPLES = {
    "wic": [(*laid_out(r["sentence1"], r["sentence2"], [(0, r["start1"], r["end1"]), (1, r["start2"], r["end2"])]), r["label"]) for r in wic],
    "wsc": [(*laid_out(r["text"], None, [word_span(r["text"], r["target"][f"span{k}_index"], r["target"][f"span{k}_text"]) for k in (1, 2)]), r["label"]) for r in wsc],
}


def model(weight, bias):
    m = transformers.BertForTokenClassification.from_pretrained(
        DATA / "bert-golden/token", num_labels=ROLES * CLASSES, ignore_mismatched_sizes=True,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    with torch.no_grad():
        m.classifier.weight.copy_(weight)
        m.classifier.bias.copy_(bias)
    return m.train()


def loss_of(m, examples):
    """The sum over the roles of their mean logits."""
    rows = []
    for x, roles, _ in examples:
        logits = m(**x).logits[0].view(-1, ROLES, CLASSES)
        rows.append(sum(logits[positions, role].mean(0) for role, positions in enumerate(roles)))
    return cross_entropy(torch.stack(rows), torch.tensor([int(y) for *_, y in examples]))


def loss_side_by_side(m, examples):
    """The baselines' form: vectors side by side under one linear layer."""
    w = torch.cat(m.classifier.weight.view(ROLES, CLASSES, -1).unbind(0), dim=1)
    b = m.classifier.bias.view(ROLES, CLASSES).sum(0)
    rows = []
    for x, roles, _ in examples:
        h = m.bert(**x).last_hidden_state[0]
        rows.append(w @ torch.cat([h[positions].mean(0) for positions in roles]) + b)
    return cross_entropy(torch.stack(rows), torch.tensor([int(y) for *_, y in examples]))


draws = torch.Generator().manual_seed(5)
hidden = transformers.AutoConfig.from_pretrained(DATA / "bert-golden/token").hidden_size
weight = torch.randn(ROLES * CLASSES, hidden, generator=draws) * 0.2
bias = torch.randn(ROLES * CLASSES, generator=draws) * 0.1
golden = {"weight": weight.flatten().tolist(), "bias": bias.tolist(), "losses": {}}
for name, examples in EXAMPLES.items():
    m = model(weight, bias)
    assert abs(float(loss_of(m, examples)) - float(loss_side_by_side(m, examples))) < 1e-6
    groups = [
        {"params": [p], "weight_decay": 0.0 if "bias" in n or "LayerNorm" in n else 0.01} for n, p in m.named_parameters()
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-6)
    out = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * (STEPS - step) / STEPS
        loss = loss_of(m, examples)
        out.append(float(loss))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    golden["losses"][name] = out
    print(name, [round(x, 5) for x in out])
(OUT / "span-golden.json").write_text(json.dumps(golden) + "\n", encoding="utf-8")
