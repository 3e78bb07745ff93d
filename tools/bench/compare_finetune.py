"""henson beside transformers: the same fine-tuning, the scores and the time.

    python tools/bench/compare_finetune.py --henson target/release/henson --model DIR --data GLUE --peer finetune_transformers.py \
        [--tasks mrpc,stsb,cola,rte] [--seeds 0,1,2] [--batch 16] [--epochs 3] [--lr 5e-5] [--out DIR] [--skip-peer] [-- --set …]

Both compute in bf16 on the CPU, with the same batches' sizes, learning rates and lengths; the peer is any script that prints one
JSON line with its scores, `train_s` and `eval_s`. henson's score is that after the last epoch, as the peer's, and `best` that of
the model that it keeps. Its time is the whole command: reading, training, an evaluation an epoch, checkpoints. The peer's is
training and one evaluation alone. Prints one JSON line a run and a table at the end. A run of henson that is there is not
repeated.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

METRIC = {"mrpc": "f1", "stsb": "pearson", "cola": "matthews", "rte": "accuracy", "sst2": "accuracy"}


def henson(flags, task, seed, out):
    command = [flags.henson, "finetune", "--task", task, "--model", flags.model, "--data", flags.data, "--out", str(out)]
    command += ["--dtype", "bf16", "--seed", str(seed), "--threads", str(flags.threads)]
    command += ["--set", f"batch_size={flags.batch}", "--set", f"epochs={flags.epochs}", "--set", f"learning_rate={flags.lr}"]
    start = time.time()
    if not (out / "results.json").exists():
        subprocess.run(command + flags.more, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds = time.time() - start
    results = json.loads((out / "results.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]["metrics"]
    return {
        "who": "henson", "task": task, "seed": seed, "score": last[METRIC[task]], "best": results["value"],
        "train_s": results["seconds"], "seconds": seconds, "tokens_per_s": results["tokens"] / results["seconds"],
    }


def peer(flags, task, seed):
    command = [sys.executable, flags.peer, "--model", flags.model, "--data", flags.data, "--task", task, "--seed", str(seed)]
    command += ["--batch", str(flags.batch), "--epochs", str(flags.epochs), "--lr", str(flags.lr), "--bf16", "--threads", str(flags.threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(done.strip().splitlines()[-1])
    return {
        "who": "transformers", "task": task, "seed": seed, "score": found[METRIC[task]], "train_s": found["train_s"],
        "seconds": found["train_s"] + found["eval_s"], "tokens_per_s": found["real_tokens_per_s"],
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--henson", default="target/release/henson")
    for name in ("model", "data", "peer"):
        parser.add_argument("--" + name, required=name != "peer")
    parser.add_argument("--tasks", default="mrpc,stsb,cola,rte")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--skip-peer", action="store_true")
    parser.add_argument("more", nargs="*", help="further flags for henson, after --")
    flags = parser.parse_args()
    out = flags.out or pathlib.Path(tempfile.mkdtemp())
    table = []
    for task in flags.tasks.split(","):
        runs = []
        for seed in map(int, flags.seeds.split(",")):
            runs.append(henson(flags, task, seed, out / f"{task}-{seed}"))
            print(json.dumps(runs[-1]), flush=True)
            if flags.peer and not flags.skip_peer:
                runs.append(peer(flags, task, seed))
                print(json.dumps(runs[-1]), flush=True)
        for who in ("henson", "transformers"):
            own = [run for run in runs if run["who"] == who]
            if own:
                scores = [100 * run["score"] for run in own]
                best = [100 * run["best"] for run in own if "best" in run]
                table.append(
                    f"| {task} {METRIC[task]} | {who} | {statistics.mean(scores):.1f} ({min(scores):.1f}–{max(scores):.1f}) | "
                    f"{f'{statistics.mean(best):.1f}' if best else '–'} | {statistics.mean(run['seconds'] for run in own):.0f} s |"
                )
    print("\n| task | | last epoch | best epoch | time |\n|---|---|---|---|---|\n" + "\n".join(table))


main()
