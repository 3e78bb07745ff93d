"""transformers fine-tuning a BERT on sentences, tagging or SQuAD: the peer of `henson finetune --task stsb|mrpc|…|ner|pos|squad1|squad2`.

    python tools/bench/torch_tasks.py --task ner --model DIR --train train.txt --dev testa.txt --out predictions [--seed 0] [--bf16]

Decoupled weight decay off biases and LayerNorm, 10% warm-up, linear decay, clip 1.0, padding to the longest of a batch, as in
GLUE's own baselines. Writes what `henson eval --predictions` scores, so that both sides have one scorer: predictions.tsv for
sentences, CoNLL columns for tags, predictions.json and null_odds.json for questions. Prints one JSON line with the times. Files may be gzipped.
"""

import argparse
import collections
import gzip
import json
import pathlib
import time

import numpy as np
import torch
from transformers import (
    AutoModelForQuestionAnswering, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer,
    get_linear_schedule_with_warmup,
)

# Of GLUE's files: the columns of the texts and of the label, and whether a header comes first.
GLUE = {
    "cola": ((3,), 1, False), "sst2": ((0,), 1, True), "mrpc": ((3, 4), 0, True), "stsb": ((7, 8), 9, True),
    "rte": ((1, 2), 3, True), "qqp": ((3, 4), 5, True),
}


def opened(path):
    return gzip.open(path, "rt", encoding="utf-8") if str(path).endswith(".gz") else open(path, encoding="utf-8")


def sentences(path, task):
    """Words and tags: the first and the last column; of CoNLL-U, the form and the universal part of speech."""
    words, tags = [], []
    for line in opened(path):
        cells = line.rstrip("\n").split("\t" if task == "pos" else None)
        if not line.strip():
            if words:
                yield words, tags
            words, tags = [], []
        elif line.startswith("-DOCSTART-") or (task == "pos" and (line.startswith("#") or not cells[0].isdigit())):
            continue
        else:
            words.append(cells[1] if task == "pos" else cells[0])
            tags.append(cells[3] if task == "pos" else cells[-1])
    if words:
        yield words, tags


def questions(path):
    for article in json.load(opened(path))["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                yield question["id"], question["question"].strip(), paragraph["context"], question["answers"]


class Sentences:
    """One text or two, with a class or a number."""

    def __init__(self, flags, tokenizer):
        self.tokenizer, self.length = tokenizer, flags.max_length
        self.texts, self.label, self.header = GLUE[flags.task]
        self.number = flags.task == "stsb"
        train, self.dev = self.rows(flags.train), self.rows(flags.dev)
        self.names = sorted({row[self.label] for row in train})
        self.items = [(self.encode(row), self.target(row)) for row in train]

    def rows(self, path):
        lines = [line.rstrip("\n").split("\t") for line in opened(path)]
        return [row for row in lines[self.header :] if len(row) > max(*self.texts, self.label)]

    def model(self, path):
        return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1 if self.number else len(self.names))

    def encode(self, row):
        return dict(self.tokenizer(*(row[i] for i in self.texts), truncation=True, max_length=self.length))

    def target(self, row):
        return float(row[self.label]) if self.number else self.names.index(row[self.label])

    def batch(self, items):
        x = self.tokenizer.pad([item[0] for item in items], return_tensors="pt")
        return x, {"labels": torch.tensor([item[1] for item in items])}

    def predict(self, forward, out):
        with open(out / "predictions.tsv", "w", encoding="utf-8") as file:
            file.write("index\tprediction\n")
            for i in range(0, len(self.dev), 64):
                x = self.tokenizer.pad([self.encode(row) for row in self.dev[i : i + 64]], return_tensors="pt")
                for j, row in enumerate(forward(x).logits.float().cpu().numpy()):
                    file.write(f"{i + j}\t{row[0] if self.number else self.names[row.argmax()]}\n")


class Tagging:
    def __init__(self, flags, tokenizer):
        self.tokenizer, self.length = tokenizer, flags.max_length
        self.train, self.dev = list(sentences(flags.train, flags.task)), list(sentences(flags.dev, flags.task))
        self.labels = sorted({tag for _, tags in self.train + self.dev for tag in tags})
        self.number = {label: i for i, label in enumerate(self.labels)}
        self.items = [self.encode(words, tags) for words, tags in self.train]

    def model(self, path):
        return AutoModelForTokenClassification.from_pretrained(path, num_labels=len(self.labels))

    def encode(self, words, tags):
        found = self.tokenizer(words, is_split_into_words=True, truncation=True, max_length=self.length)
        before, labels = None, []
        for word in found.word_ids():
            labels.append(-100 if word is None or word == before else self.number[tags[word]])
            before = word
        return dict(found), labels

    def batch(self, items):
        x = self.tokenizer.pad([item[0] for item in items], return_tensors="pt")
        wide = x["input_ids"].shape[1]
        return x, {"labels": torch.tensor([item[1] + [-100] * (wide - len(item[1])) for item in items])}

    def predict(self, forward, out):
        with open(out / "predictions.txt", "w", encoding="utf-8") as file:
            for i in range(0, len(self.dev), 64):
                part = self.dev[i : i + 64]
                items = [self.encode(words, tags) for words, tags in part]
                x, _ = self.batch(items)
                best = forward(x).logits.float().argmax(-1).cpu().numpy()
                for row, (words, _), (_, labels) in zip(best, part, items):
                    said = [self.labels[row[j]] for j, label in enumerate(labels) if label != -100]
                    # Words beyond the length have no prediction.
                    said += ["O"] * (len(words) - len(said))
                    for word, tag in zip(words, said):
                        file.write(f"{word} {tag}\n")
                    file.write("\n")


class Questions:
    def __init__(self, flags, tokenizer):
        self.tokenizer, self.length, self.two = tokenizer, flags.max_length, flags.task == "squad2"
        self.dev = list(questions(flags.dev))
        self.items = [item for example in questions(flags.train) for item in self.windows(example, True)]

    def model(self, path):
        return AutoModelForQuestionAnswering.from_pretrained(path)

    def windows(self, example, labelled):
        _, question, context, answers = example
        found = self.tokenizer(
            question, context, truncation="only_second", max_length=self.length, stride=128, return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        for i in range(len(found["input_ids"])):
            x = {key: found[key][i] for key in ("input_ids", "token_type_ids", "attention_mask")}
            offsets, parts = found["offset_mapping"][i], found.sequence_ids(i)
            inside = [j for j, part in enumerate(parts) if part == 1]
            span = (0, 0)
            if labelled and answers:
                start = answers[0]["answer_start"]
                end = start + len(answers[0]["text"])
                if offsets[inside[0]][0] <= start and offsets[inside[-1]][1] >= end:
                    span = (
                        max(j for j in inside if offsets[j][0] <= start),
                        min(j for j in inside if offsets[j][1] >= end),
                    )
            yield x, span, offsets, set(inside)

    def batch(self, items):
        x = self.tokenizer.pad([item[0] for item in items], return_tensors="pt")
        spans = torch.tensor([item[1] for item in items])
        return x, {"start_positions": spans[:, 0], "end_positions": spans[:, 1]}

    def predict(self, forward, out):
        items = [(i, window) for i, example in enumerate(self.dev) for window in self.windows(example, False)]
        spans, null = collections.defaultdict(list), {}
        for first in range(0, len(items), 64):
            part = items[first : first + 64]
            x, _ = self.batch([window for _, window in part])
            y = forward(x)
            starts, ends = y.start_logits.float().cpu().numpy(), y.end_logits.float().cpu().numpy()
            for row, (i, (_, _, offsets, inside)) in enumerate(part):
                s, e = starts[row][: len(offsets)], ends[row][: len(offsets)]
                null[i] = min(null.get(i, np.inf), float(s[0] + e[0]))
                for a in np.argsort(-s)[:20]:
                    for b in np.argsort(-e)[:20]:
                        if a in inside and b in inside and a <= b < a + 30:
                            spans[i].append((float(s[a] + e[b]), offsets[a][0], offsets[b][1]))
        said, odds = {}, {}
        for i, (name, _, context, _) in enumerate(self.dev):
            best = max(spans[i], default=(-1e9, 0, 0))
            said[name], odds[name] = context[best[1] : best[2]], null[i] - best[0]
        (out / "predictions.json").write_text(json.dumps(said))
        (out / "null_odds.json").write_text(json.dumps(odds))


def main():
    flags = argparse.ArgumentParser()
    for name in ("task", "model", "train", "dev", "out"):
        flags.add_argument("--" + name, required=True)
    flags.add_argument("--epochs", type=int, default=3)
    flags.add_argument("--lr", type=float, default=5e-5)
    flags.add_argument("--batch", type=int, default=16)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--epsilon", type=float, default=1e-8)
    flags.add_argument("--max-length", type=int, default=0)
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--bf16", action="store_true")
    flags = flags.parse_args()
    asks = flags.task.startswith("squad")
    flags.max_length = flags.max_length or (384 if asks else 128)
    torch.set_num_threads(flags.threads)
    torch.manual_seed(flags.seed)
    draws = np.random.default_rng(flags.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = pathlib.Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    start = time.time()
    kind = Questions if asks else Sentences if flags.task in GLUE else Tagging
    task = kind(flags, AutoTokenizer.from_pretrained(flags.model))
    model = task.model(flags.model).to(device).train()
    plain = [p for n, p in model.named_parameters() if "bias" in n or "LayerNorm" in n]
    decayed = [p for n, p in model.named_parameters() if not ("bias" in n or "LayerNorm" in n)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=flags.lr, eps=flags.epsilon
    )
    steps = flags.epochs * -(-len(task.items) // flags.batch)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)

    def forward(x, **labels):
        move = lambda values: {key: value.to(device, non_blocking=True) for key, value in values.items()}
        with torch.autocast(device, dtype=torch.bfloat16, enabled=flags.bf16):
            return model(**move(x), **move(labels))

    for _ in range(flags.epochs):
        order = draws.permutation(len(task.items))
        for i in range(0, len(order), flags.batch):
            x, labels = task.batch([task.items[j] for j in order[i : i + flags.batch]])
            forward(x, **labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
    trained = time.time()
    model.eval()
    with torch.inference_mode():
        task.predict(forward, out)
    print(json.dumps({
        "peer": "transformers", "task": flags.task, "seed": flags.seed, "steps": steps,
        "train_s": round(trained - start, 1), "eval_s": round(time.time() - trained, 1),
    }))


main()
