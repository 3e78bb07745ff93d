"""henson beside PyTorch on one GPU: the table of docs/performance.md, both sides alternating in one run.

    python tools/bench/compare_gpu.py --henson target/release/henson --peer torch_bert.py [--rounds 2] [--only base]

`--peer` is a script with torch_bert.py's flags that prints one JSON line. Prints a Markdown table and writes every
measurement to --out as JSON lines.
"""

import argparse
import json
import statistics
import subprocess
import sys

CASES = [
    # mode, model, batch, tokens, the peer's best way, the ratio that is aimed at
    ("train", "base", 256, 128, ["--compile"], 1.35),
    ("train", "base", 64, 512, ["--compile"], 1.35),
    ("train", "large", 64, 128, ["--compile"], 1.35),
    ("train", "small", 256, 128, ["--compile"], 1.6),
    ("train", "mini", 512, 128, ["--compile", "--compile-mode", "reduce-overhead"], 1.5),
    ("infer", "base", 256, 128, ["--compile"], 1.25),
]


def run(command):
    result = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode != 0 or not lines:
        sys.exit(f"{' '.join(command)} failed:\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")
    return json.loads(lines[-1])


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--henson", required=True)
    flags.add_argument("--peer", required=True)
    flags.add_argument("--rounds", type=int, default=2)
    flags.add_argument("--steps", type=int, default=20)
    flags.add_argument("--only", default="")
    flags.add_argument("--out")
    flags = flags.parse_args()
    print("| | PyTorch tok/s (ms, GiB) | henson tok/s (ms, GiB) | henson alone, ms | TFLOP/s | ratio | aim |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for mode, model, batch, tokens, best, aim in CASES:
        name = f"{mode} {model} {batch}×{tokens}"
        if flags.only not in name:
            continue
        shape = ["--batch", str(batch), "--seq", str(tokens), "--steps", str(flags.steps), "--dtype", "bf16"]
        ours, theirs = [], []
        for _ in range(flags.rounds):
            peer = [sys.executable, flags.peer, "--device", "cuda", "--model", model, "--mode", mode, "--warmup", "6"]
            theirs.append(run(peer + shape + best))
            bench = [flags.henson, "bench", mode, "--device", "cuda", "--model", f"bert-{model}", "--json"]
            ours.append(run(bench + shape))
            if flags.out:
                with open(flags.out, "a") as out:
                    for measured in (theirs[-1], ours[-1]):
                        out.write(json.dumps({"case": name, **measured}) + "\n")
        median = lambda measured, key: statistics.median(m[key] for m in measured)
        them, us = median(theirs, "tokens_per_s"), median(ours, "tokens_per_s")
        print(
            f"| {name} | {them:,.0f} ({median(theirs, 'ms'):.2f}, {median(theirs, 'peak_gib'):.1f}) "
            f"| {us:,.0f} ({median(ours, 'ms'):.2f}, {median(ours, 'peak_mib') / 1024:.1f}) "
            f"| {median(ours, 'ms_alone'):.2f} | {median(ours, 'tflops'):.0f} | {us / them:.2f}× | {aim}× |",
            flush=True,
        )


if __name__ == "__main__":
    main()
