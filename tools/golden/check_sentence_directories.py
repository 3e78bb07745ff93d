"""Compare what henson and sentence-transformers read from the same directories: those that henson saved, and those that sentence-transformers
saved. Bi-encoders by every pooling and in several families, with dense layers, and cross-encoders.

    HF_HUB_OFFLINE=1 python tools/golden/check_sentence_directories.py --henson target/release/henson --model MINILM

MINILM is a directory of sentence-transformers (`cargo xtask minilm` prints one). The families are the golden models whose tokenizer is a
vocab.txt in `transformers`, too. henson trains a step before it saves. Prints the largest difference of each, and fails above 1e-5 (logits of
cross-encoders: 1e-4).
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import tempfile

import numpy as np
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests-data"
POOLINGS = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", '["mean", "max"]']
TEXTS = ["The cat sat on the mat.", "Who was Jim Henson?", "a", "A small child walked by the sea, and the old man watched it for a while."]
PAIRS = [("the cat sat", "a cat"), ("who was jim", "jim henson"), ("a woman", "the woman ran"), ("the old man", "a man")]
FAMILIES = ("distilbert", "electra", "mpnet")


def henson(flags, *arguments):
    done = subprocess.run([str(part) for part in (flags.henson, *arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def trained(flags, place, task, model, **settings):
    """A directory that henson saved."""
    train, out = place / f"{task}.jsonl", place / f"henson-{len(list(place.iterdir()))}"
    rows = [{"anchor": a, "positive": b, "negatives": [PAIRS[(i + 1) % 4][1]]} for i, (a, b) in enumerate(PAIRS)]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    sets += ["--set", "max_length=32", "--set", "epochs=1", "--set", "batch_size=4"]
    henson(flags, "finetune", "--task", task, "--model", model, "--train", train, "--out", out, "--dev", "none", *sets)
    return out


def vectors(flags, directory):
    lines = henson(flags, "embed", "--model", directory, "--json", *TEXTS).splitlines()
    own = np.array([json.loads(line)["embedding"] for line in lines])
    there = SentenceTransformer(str(directory), device="cpu").encode(TEXTS)
    return own.shape, float(np.abs(own - there).max()), 1e-5


def scores(flags, directory):
    """Logits, and the scores that both show by themselves."""
    model, worst = CrossEncoder(str(directory), device="cpu"), 0.0
    for raw in (True, False):
        lines = henson(flags, "rerank", "--model", directory, "--query", TEXTS[1], "--json", *(["--raw-scores"] if raw else []), *TEXTS)
        found = sorted((json.loads(line) for line in lines.splitlines()), key=lambda line: line["index"])
        own = np.array([line["score"] for line in found])
        activation = {"activation_fn": torch.nn.Identity()} if raw else {}
        there = model.predict([(TEXTS[1], text) for text in TEXTS], **activation)
        worst = max(worst, float(np.abs(own - there).max()))
    return own.shape, worst, 1e-4


def family(place, name):
    directory = place / name
    shutil.copytree(GOLDEN / "relatives-golden" / name / "sequence", directory)
    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    words = (GOLDEN / "likelihood/vocab.txt").read_text().splitlines()[:size]
    if name == "mpnet":
        words[:5] = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]
    (directory / "vocab.txt").write_text("\n".join(words) + "\n")
    return directory


def saved_there(flags):
    """Directories that sentence-transformers saved: by pooling, with dense layers, and a cross-encoder."""
    torch.manual_seed(3)
    for modes in POOLINGS:
        modes = json.loads(modes) if modes.startswith("[") else modes
        transformer = Transformer(flags.model, max_seq_length=32)
        pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode=modes)
        yield f"saved there, {modes}", vectors, SentenceTransformer(modules=[transformer, pooling, Normalize()], device="cpu")
    transformer = Transformer(flags.model, max_seq_length=32)
    pooling = Pooling(transformer.get_embedding_dimension())
    width = pooling.get_embedding_dimension()
    layers = [Dense(width, 48, activation_function=torch.nn.Tanh()), Dense(48, 16, bias=False, activation_function=torch.nn.Identity())]
    yield "saved there, dense", vectors, SentenceTransformer(modules=[transformer, pooling, *layers], device="cpu")
    yield "saved there, cross-encoder", scores, CrossEncoder(flags.model, num_labels=1, max_length=32, device="cpu")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--henson", default="target/release/henson")
    parser.add_argument("--model", required=True)
    parser.add_argument("--only", default="", help="what the names of checks must contain")
    flags = parser.parse_args()
    wrong = []

    def check(name, compare, directory):
        shape, off, most = compare(flags, directory)
        print(name, shape, f"{off:.1e}", "" if off <= most else "TOO FAR", flush=True)
        wrong.extend([name] if off > most else [])

    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        cases = [(f"MiniLM, {pooling}", vectors, "embed", flags.model, {"pooling": pooling}) for pooling in POOLINGS]
        cases += [("MiniLM, not normalised", vectors, "embed", flags.model, {"normalize": "false"})]
        cases += [("MiniLM, cross-encoder", scores, "rerank", flags.model, {})]
        for name in FAMILIES:
            directory = family(place, name)
            cases += [(name, vectors, "embed", directory, {"pooling": "mean"}), (f"{name}, cross-encoder", scores, "rerank", directory, {})]
        for name, compare, task, model, settings in cases:
            if flags.only in name:
                check(name, compare, trained(flags, place, task, model, **settings))
        for number, (name, compare, model) in enumerate(saved_there(flags) if flags.only in "saved there" else ()):
            directory = place / f"there-{number}"
            model.save_pretrained(str(directory))
            check(name, compare, directory)
    assert not wrong, wrong


main()
