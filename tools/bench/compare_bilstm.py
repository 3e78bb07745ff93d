"""A bidirectional LSTM trained by henson and by PyTorch: the same texts, batches of the same size, alternating, tokens a second of each.

    python tools/bench/compare_bilstm.py --henson target/release/henson --data DATA [--rows 2000] [--hidden 512] [--layers 2] \
        [--batch 32] [--rounds 3] [--threads 2] [--device cpu|cuda] [--dtype f32|bf16] [--equal WORDS] [--work DIR]

DATA holds glue/SST-2: texts are SST-2's sentences of three words and more, evenly spaced, with their natural lengths, or with --equal the
words of them all in a row, cut into texts of so many. Both sides train two epochs with AdamW and clipping at 1, word vectors of 100, dropout
0.5 before and between layers and before the classifier, and the mean of the last layer; the second epoch is measured. PyTorch's LSTM (cuDNN's
on a GPU, with TF32 in f32 and autocast in bf16) gets packed sequences (`packed`), sorted beforehand, or padded ones with a masked mean
(`padded`, which reads the padding backwards first; its speed is what counts here). Its batches lie on the device before it starts. Prints the
medians and their ratios to the better of both.
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
torch.set_float32_matmul_precision("high")
torch.manual_seed(0)
device = flags["device"]
rows = [json.loads(line) for line in open(flags["file"])]
words = {}
texts = [[words.setdefault(word, len(words) + 1) for word in row["text"].split()] for row in rows]
table = nn.Embedding(len(words) + 1, 100, padding_idx=0)
lstm = nn.LSTM(100, flags["hidden"], flags["layers"], bidirectional=True, batch_first=True, dropout=0.5)
head = nn.Linear(2 * flags["hidden"], 2)
parameters = [p for module in (table, lstm, head) for p in module.to(device).parameters()]
optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
drop = nn.Dropout(0.5)

def prepared(batch):
    batch = sorted(batch, key=lambda i: -len(texts[i]))
    lengths = torch.tensor([len(texts[i]) for i in batch])
    ids = nn.utils.rnn.pad_sequence([torch.tensor(texts[i]) for i in batch], batch_first=True)
    return ids.to(device), lengths, lengths.to(device), torch.tensor([int(rows[i]["label"]) for i in batch], device=device)

def step(batch):
    ids, lengths, on_device, labels = batch
    with torch.autocast(device, torch.bfloat16, enabled=flags["dtype"] == "bf16"):
        x = drop(table(ids))
        if flags["way"] == "packed":
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            x = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)[0]
        else:
            x = lstm(x)[0]
        mask = torch.arange(x.shape[1], device=device)[None, :] < on_device[:, None]
        mean = (x * mask[:, :, None]).sum(1) / on_device[:, None]
        loss = nn.functional.cross_entropy(head(drop(mean)).float(), labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()

order = torch.randperm(len(rows)).tolist()
batches = [prepared(order[i:i + flags["batch"]]) for i in range(0, len(order), flags["batch"])]
sync = torch.cuda.synchronize if device == "cuda" else lambda: None
# On a CPU a step is warm at once.
for batch in batches if device == "cuda" else batches[:1]:
    step(batch)
sync()
start = time.perf_counter()
for batch in batches:
    step(batch)
sync()
print(json.dumps({"tokens_per_s": sum(map(len, texts)) / (time.perf_counter() - start)}))
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--henson", default="target/release/henson")
    parser.add_argument("--data", type=pathlib.Path, required=True)
    for name, default in (("rows", 2000), ("hidden", 512), ("layers", 2), ("batch", 32), ("rounds", 3), ("threads", 2)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--equal", type=int, metavar="WORDS")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("local/compare-bilstm"))
    flags = parser.parse_args()
    flags.work.mkdir(parents=True, exist_ok=True)
    with open(flags.data / "glue/SST-2/train.tsv", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if len(row["sentence"].split()) > 2]
    rows = [rows[i * len(rows) // flags.rows] for i in range(flags.rows)]
    texts = [row["sentence"].strip() for row in rows]
    if flags.equal:
        words = [word for text in texts for word in text.split()]
        texts = [" ".join(words[i:i + flags.equal]) for i in range(0, len(words) - flags.equal + 1, flags.equal)]
    train = flags.work / "train.jsonl"
    train.write_text("".join(json.dumps({"text": text, "label": row["label"]}) + "\n" for text, row in zip(texts, rows)))

    def henson():
        out = flags.work / "henson"
        shutil.rmtree(out, ignore_errors=True)
        sets = {"config.hidden_size": flags.hidden, "config.num_hidden_layers": flags.layers, "config.embedding_size": 100, "config.dropout": 0.5,
                "batch_size": flags.batch, "epochs": 2, "learning_rate": 1e-3, "log_every": 1}
        command = [flags.henson, "finetune", "--task", "classify", "--model", "bilstm", "--train", train, "--dev", "none", "--out", out]
        command += ["--threads", flags.threads, "--device", flags.device, "--dtype", flags.dtype, *(part for key, value in sets.items() for part in ("--set", f"{key}={value}"))]
        subprocess.run([str(part) for part in command], check=True, capture_output=True)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if line["kind"] == "train"]
        first, last = steps[len(steps) // 2 - 1], steps[-1]
        return (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])

    def peer(way):
        settings = {name: getattr(flags, name) for name in ("hidden", "layers", "batch", "threads", "device", "dtype")} | {"file": str(train), "way": way}
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
