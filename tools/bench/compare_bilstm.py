"""A bidirectional LSTM trained by henson and by PyTorch: the same texts, batches of the same size, alternating, tokens a second of each.

    python tools/bench/compare_bilstm.py --henson target/release/henson --data DATA [--rows 2000] [--hidden 512] [--layers 2] \
        [--batch 32] [--rounds 3] [--threads 2] [--work DIR]

DATA holds glue/SST-2: texts are SST-2's sentences of three words and more, evenly spaced, with their natural lengths. Both sides train one
epoch in f32 with AdamW and clipping at 1, word vectors of 100, dropout 0.5 before and between layers and before the classifier, and the mean of
the last layer. PyTorch's LSTM gets packed sequences (`packed`) or padded ones with a masked mean (`padded`, which reads the padding backwards
first; its speed is what counts here). Prints the medians and their ratios to the better of both.
"""

import argparse
import csv
import json
import pathlib
import shutil
import statistics
import subprocess
import sys

PEER = r"""
import json, sys, time
import torch
from torch import nn
flags = json.loads(sys.argv[1])
torch.set_num_threads(flags["threads"])
torch.manual_seed(0)
rows = [json.loads(line) for line in open(flags["file"])]
words = {}
texts = [[words.setdefault(word, len(words) + 1) for word in row["text"].split()] for row in rows]
labels = [int(row["label"]) for row in rows]
table = nn.Embedding(len(words) + 1, 100, padding_idx=0)
lstm = nn.LSTM(100, flags["hidden"], flags["layers"], bidirectional=True, batch_first=True, dropout=0.5)
head = nn.Linear(2 * flags["hidden"], 2)
parameters = [p for module in (table, lstm, head) for p in module.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
drop = nn.Dropout(0.5)

def step(batch):
    lengths = torch.tensor([len(texts[i]) for i in batch])
    ids = nn.utils.rnn.pad_sequence([torch.tensor(texts[i]) for i in batch], batch_first=True)
    x = drop(table(ids))
    if flags["way"] == "packed":
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        x = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)[0]
    else:
        x = lstm(x)[0]
    mask = torch.arange(x.shape[1])[None, :] < lengths[:, None]
    mean = (x * mask[:, :, None]).sum(1) / lengths[:, None]
    loss = nn.functional.cross_entropy(head(drop(mean)), torch.tensor([labels[i] for i in batch]))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    return int(lengths.sum())

order = torch.randperm(len(rows)).tolist()
batches = [order[i:i + flags["batch"]] for i in range(0, len(order), flags["batch"])]
step(batches[0])
start = time.perf_counter()
tokens = sum(step(batch) for batch in batches)
print(json.dumps({"tokens_per_s": tokens / (time.perf_counter() - start)}))
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--henson", default="target/release/henson")
    parser.add_argument("--data", type=pathlib.Path, required=True)
    for name, default in (("rows", 2000), ("hidden", 512), ("layers", 2), ("batch", 32), ("rounds", 3), ("threads", 2)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("local/compare-bilstm"))
    flags = parser.parse_args()
    flags.work.mkdir(parents=True, exist_ok=True)
    with open(flags.data / "glue/SST-2/train.tsv", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if len(row["sentence"].split()) > 2]
    rows = [rows[i * len(rows) // flags.rows] for i in range(flags.rows)]
    train = flags.work / "train.jsonl"
    train.write_text("".join(json.dumps({"text": row["sentence"].strip(), "label": row["label"]}) + "\n" for row in rows))
    tokens = sum(len(row["sentence"].split()) for row in rows)

    def henson():
        out = flags.work / "henson"
        shutil.rmtree(out, ignore_errors=True)
        sets = {"config.hidden_size": flags.hidden, "config.num_hidden_layers": flags.layers, "config.embedding_size": 100, "config.dropout": 0.5,
                "batch_size": flags.batch, "epochs": 1, "learning_rate": 1e-3}
        command = [flags.henson, "finetune", "--task", "classify", "--model", "bilstm", "--train", train, "--dev", "none", "--out", out]
        command += ["--threads", flags.threads, *(part for key, value in sets.items() for part in ("--set", f"{key}={value}"))]
        subprocess.run([str(part) for part in command], check=True, capture_output=True)
        return tokens / json.loads((out / "results.json").read_text())["seconds"]

    def peer(way):
        settings = {name: getattr(flags, name) for name in ("hidden", "layers", "batch", "threads")} | {"file": str(train), "way": way}
        done = subprocess.run([sys.executable, "-c", PEER, json.dumps(settings)], check=True, capture_output=True, text=True).stdout
        return json.loads(done)["tokens_per_s"]

    sides = {"henson": henson, "PyTorch, packed": lambda: peer("packed"), "PyTorch, padded": lambda: peer("padded")}
    found = {name: [] for name in sides}
    for _ in range(flags.rounds):
        for name, run in sides.items():
            found[name].append(run())
    medians = {name: statistics.median(values) for name, values in found.items()}
    best = max(value for name, value in medians.items() if name != "henson")
    for name, value in medians.items():
        print(f"{name:16} {value:9.1f} tokens/s  {value / best:.2f}x  ({', '.join(f'{one:.0f}' for one in found[name])})")


main()
