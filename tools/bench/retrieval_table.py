"""A table of ways to search: BM25, bi-encoders and cross-encoders with and without mined negatives, on questions and paragraphs of SQuAD.

    python tools/bench/squad_retrieval.py DATA SET --queries 200 --pairs 600
    python tools/bench/retrieval_table.py --henson target/release/henson --model MINILM --set SET --work DIR [--seeds 0] [--threads 2] \
        [--device cpu|cuda] [--dtype f32|bf16]

MINILM is a bi-encoder (`cargo xtask minilm` prints one). It is scored as it is and trained on the pairs (`loss=ranking`), alone and with
negatives that `henson mine` finds with it; a cross-encoder starts from the same weights, learns from the same pairs with other pairs'
paragraphs as negatives or with the mined ones, and sorts the first 20 of the bi-encoder as it is. What is finished is not run again.
"""

import argparse
import json
import pathlib
import random
import statistics
import subprocess


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--henson", default="target/release/henson")
    for name in ("model", "set", "work"):
        parser.add_argument("--" + name, type=pathlib.Path, required=True)
    parser.add_argument("--seeds", default="0", type=lambda text: [int(seed) for seed in text.split(",")])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--depth", type=int, default=20)
    flags = parser.parse_args()
    flags.work.mkdir(parents=True, exist_ok=True)
    compute = ["--threads", flags.threads, "--device", flags.device, "--dtype", flags.dtype]

    def henson(*arguments):
        # BM25 computes nothing on a device.
        machine = compute[:2] if "--bm25" in arguments else compute
        command = [str(part) for part in (flags.henson, *arguments, *machine)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def train(name, task, file, seed, **settings):
        out = flags.work / name
        if not (out / "results.json").exists():
            settings = {"epochs": 1, "batch_size": 32, "max_length": flags.length, **settings}
            sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
            henson("finetune", "--task", task, "--model", flags.model, "--train", file, "--dev", "none", "--out", out, "--seed", seed, *sets)
        return out

    def scored(way, *arguments):
        path = flags.work / (way.replace(" ", "-").replace(",", "") + ".json")
        if not path.exists():
            path.write_text(henson("eval", "--task", "retrieval", "--data", flags.set, "--json", *arguments))
        found = json.loads(path.read_text())
        print(json.dumps({"way": way, **found}), flush=True)
        return found

    # A paragraph of another pair, for each pair, from the same seed as the run.
    mined = flags.work / "mined.jsonl"
    if not mined.exists():
        henson("mine", "--model", flags.model, "--train", flags.set / "pairs.jsonl", "--out", mined, "--negatives", 3)
    pairs = [json.loads(line) for line in (flags.set / "pairs.jsonl").read_text().splitlines()]
    shown = lambda scores: f"{statistics.mean(scores):.1f}" + (f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else "")
    table = {}
    table["BM25"] = [scored("BM25", "--bm25")]
    table["bi-encoder as it is"] = [scored("bi-encoder as it is", "--model", flags.model)]
    for seed in flags.seeds:
        draw = random.Random(seed)
        others = flags.work / f"random-{seed}.jsonl"
        rows = [pair | {"negatives": [draw.choice(pairs)["positive"] for _ in range(3)]} for pair in pairs]
        rows = [row | {"negatives": [text for text in row["negatives"] if text != row["positive"]]} for row in rows]
        others.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for way, file in (("", flags.set / "pairs.jsonl"), (", mined negatives", mined)):
            model = train(f"bi-{seed}{way.replace(', ', '-').replace(' ', '-')}", "embed", file, seed, loss="ranking", learning_rate=2e-5)
            table.setdefault("bi-encoder, trained" + way, []).append(scored(f"bi-encoder trained{way} {seed}", "--model", model))
        for way, file in ((", random negatives", others), (", mined negatives", mined)):
            model = train(f"cross-{seed}{way.replace(', ', '-').replace(' ', '-')}", "rerank", file, seed, learning_rate=5e-5)
            name = f"cross-encoder{way} {seed}"
            found = scored(name, "--model", flags.model, "--rerank", model, "--candidates", flags.depth)
            table.setdefault("cross-encoder" + way, []).append(found)
    names = ["ndcg@10", "mrr@10", "recall@1", "recall@10"]
    print("| way | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for way, found in table.items():
        print(f"| {way} | " + " | ".join(f"{shown([100 * run[name] for run in found])}" for name in names) + " |")


main()
