"""Train a step of `finetune --task embed` by every pooling and in several families, and compare the vectors that henson and
sentence-transformers read from the saved directories.

    HF_HUB_OFFLINE=1 python tools/golden/check_sentence_directories.py --henson target/release/henson --model MINILM

MINILM is a directory of sentence-transformers (`cargo xtask minilm` prints one). The families are the golden models whose tokenizer is a
vocab.txt in `transformers`, too. Prints the largest difference of each, and fails above 1e-5.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import tempfile

import numpy as np
from sentence_transformers import SentenceTransformer

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests-data"
POOLINGS = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", '["mean", "max"]']
TEXTS = ["The cat sat on the mat.", "Who was Jim Henson?", "a", "A small child walked by the sea, and the old man watched it for a while."]
PAIRS = [("the cat sat", "a cat"), ("who was jim", "jim henson"), ("a woman", "the woman ran"), ("the old man", "a man")]

parser = argparse.ArgumentParser()
parser.add_argument("--henson", default="target/release/henson")
parser.add_argument("--model", required=True)
flags = parser.parse_args()
worst = 0.0
with tempfile.TemporaryDirectory() as place:
    place = pathlib.Path(place)
    train = place / "pairs.jsonl"
    train.write_text("".join(json.dumps({"anchor": a, "positive": b}) + "\n" for a, b in PAIRS))
    cases = [(flags.model, pooling) for pooling in POOLINGS]
    for family in ("distilbert", "electra", "mpnet"):
        directory = place / family
        shutil.copytree(GOLDEN / "relatives-golden" / family / "sequence", directory)
        size = json.loads((directory / "config.json").read_text())["vocab_size"]
        words = (GOLDEN / "likelihood/vocab.txt").read_text().splitlines()[:size]
        (directory / "vocab.txt").write_text("\n".join(words) + "\n")
        cases.append((directory, "mean"))
    for number, (model, pooling) in enumerate(cases):
        out = place / f"out-{number}"
        command = [flags.henson, "finetune", "--task", "embed", "--model", str(model), "--train", str(train), "--out", str(out), "--dev", "none"]
        command += ["--set", f"pooling={pooling}", "--set", "max_length=32", "--set", "epochs=1", "--set", "batch_size=4"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        said = subprocess.run([flags.henson, "embed", "--model", str(out), "--json", *TEXTS], check=True, capture_output=True, text=True).stdout
        own = np.array([json.loads(line)["embedding"] for line in said.splitlines()])
        there = SentenceTransformer(str(out), device="cpu").encode(TEXTS)
        off = float(np.abs(own - there).max())
        worst = max(worst, off)
        print(pathlib.Path(model).name, pooling, own.shape, f"{off:.1e}")
assert worst < 1e-5, worst
