#!/usr/bin/env python3
"""Fine-tuning with default settings on few rows, beside what a practitioner would try first.

Draws 16, 50 and at most 200 questions a class of TREC's six coarse classes, and takes all; trains `henson finetune` with nothing
but the model and the file, and scores it on TREC's test file. Its peers on the same draws: TF-IDF of words and pairs of words
with logistic regression, and logistic regression on the vectors of the same model (`henson embed`). Needs NumPy; logistic
regression is scikit-learn's where it is installed, else L-BFGS of PyTorch on the same objective.

    python3 tools/bench/trec.py --henson target/release/henson --data trec-question-class \
        --model box=models/henson-12m --model minilm=all-MiniLM-L6-v2 [--sizes 16 50 200 all] [--draws 5] [--seeds 3]

Every run prints a line of JSON; the table comes last. `--out FILE` keeps the lines and skips what is already in it.
"""

import argparse
import json
import math
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def questions(path):
    """(text, coarse class) of each line `COARSE:fine text`."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        label, text = line.split(" ", 1)
        rows.append((text.strip(), label.split(":")[0]))
    return rows


def drawn(rows, size, draw):
    """At most `size` rows of each class, the same for a draw on every machine."""
    if size == "all":
        return rows
    random_rows = random.Random(1000 * int(size) + draw)
    kept = []
    for label in sorted({label for _, label in rows}):
        own = [row for row in rows if row[1] == label]
        random_rows.shuffle(own)
        kept += own[: int(size)]
    random_rows.shuffle(kept)
    return kept


def write_rows(path, rows):
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))


def fitted(features, labels):
    """Multinomial logistic regression with scikit-learn's defaults (L2, C = 1): a function from features to labels."""
    names = sorted(set(labels))
    try:
        from sklearn.linear_model import LogisticRegression

        return LogisticRegression(max_iter=5000).fit(features, labels).predict
    except ImportError:
        import torch

    x = torch.tensor(features, dtype=torch.float64)
    y = torch.tensor([names.index(label) for label in labels])
    weight = torch.zeros(len(names), x.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(len(names), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=1000, line_search_fn="strong_wolfe", tolerance_grad=1e-6)

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(x @ weight.T + bias, y, reduction="sum") + weight.square().sum() / 2
        loss.backward()
        return loss

    optimizer.step(closure)
    return lambda more: [names[i] for i in (torch.tensor(more, dtype=torch.float64) @ weight.T + bias).argmax(1)]


def tf_idf(texts, more):
    """Words and pairs of neighbours, tf · smoothed idf, each row of length 1: scikit-learn's, or the same in NumPy."""
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer

        vectorizer = TfidfVectorizer(ngram_range=(1, 2)).fit(texts)
        return vectorizer.transform(texts), vectorizer.transform(more)
    except ImportError:
        pass

    def terms(text):
        words = re.findall(r"(?u)\b\w\w+\b", text.lower())
        return words + [" ".join(pair) for pair in zip(words, words[1:])]

    counted = [terms(text) for text in texts]
    vocabulary = {term: i for i, term in enumerate(sorted({term for row in counted for term in row}))}
    found = np.zeros(len(vocabulary))
    for row in counted:
        for term in set(row):
            found[vocabulary[term]] += 1
    idf = np.log((1 + len(texts)) / (1 + found)) + 1

    def matrix(rows):
        values = np.zeros((len(rows), len(vocabulary)))
        for i, row in enumerate(rows):
            for term in row:
                if term in vocabulary:
                    values[i, vocabulary[term]] += 1
        values *= idf
        return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)

    return matrix(counted), matrix([terms(text) for text in more])


def accuracy(predicted, labels):
    return 100 * sum(a == b for a, b in zip(predicted, labels)) / len(labels)


class Bench:
    def __init__(self, flags):
        self.flags = flags
        self.train, self.test = questions(Path(flags.data) / "train.txt"), questions(Path(flags.data) / "test.txt")
        self.labels = [label for _, label in self.test]
        self.vectors = {}
        self.done = {}
        if flags.out and Path(flags.out).exists():
            for line in Path(flags.out).read_text().splitlines():
                row = json.loads(line)
                self.done[self.key(row)] = row

    @staticmethod
    def key(row):
        return (row["what"], str(row["size"]), row["draw"], row["seed"])

    def note(self, what, size, draw, seed, measure):
        """Measures once, or takes what was measured before."""
        key = (what, str(size), draw, seed)
        if key not in self.done:
            row = {"what": what, "size": str(size), "draw": draw, "seed": seed, **measure()}
            self.done[key] = row
            line = json.dumps(row)
            print(line, flush=True)
            if self.flags.out:
                with open(self.flags.out, "a") as file:
                    file.write(line + "\n")

    def henson(self, *arguments, **more):
        return subprocess.run([self.flags.henson, *arguments], capture_output=True, text=True, check=True, **more).stdout

    def embedded(self, name, directory):
        """Vectors of all questions, as `henson embed` gives them."""
        if name not in self.vectors:
            texts = [text for text, _ in self.train + self.test]
            lines = self.henson("embed", "--json", "--model", directory, input="\n".join(texts)).splitlines()
            vectors = np.array([json.loads(line)["embedding"] for line in lines])
            self.vectors[name] = (dict(zip(texts, vectors)), vectors[len(self.train) :])
        return self.vectors[name]

    def finetuned(self, directory, rows, seed):
        """Default settings: the model, the file, a seed. The score is that on the test file, which henson does not see."""
        place = Path(tempfile.mkdtemp(prefix="trec-", dir=self.flags.scratch))
        try:
            write_rows(place / "train.jsonl", rows)
            write_rows(place / "test.jsonl", self.test)
            run = str(place / "run")
            begun = time.time()
            command = ["finetune", "--task", "classify", "--model", directory, "--train", str(place / "train.jsonl")]
            self.henson(*command, "--out", run, "--seed", str(seed), *self.flags.more.split())
            seconds = time.time() - begun
            more = [flag for flag in self.flags.more.split() if flag in ("--device", "cpu", "cuda")]
            scored = self.henson("eval", "--task", "classify", "--model", run, "--data", str(place / "test.jsonl"), "--json", *more)
            results = json.loads((place / "run" / "results.json").read_text())
            value = 100 * json.loads(scored.splitlines()[-1])["accuracy"]
            return {
                "accuracy": value,
                "estimate": results["value"] and 100 * results["value"],
                "linear_head": results.get("linear_head"),
                "seconds": round(seconds, 1),
            }
        except subprocess.CalledProcessError as error:
            sys.exit(f"{' '.join(error.cmd)}\n{error.stderr}")
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def run(self):
        models = dict(model.split("=", 1) for model in self.flags.model)
        for size in self.flags.sizes:
            for draw in range(1 if size == "all" else self.flags.draws):
                rows = drawn(self.train, size, draw)
                texts, labels = [text for text, _ in rows], [label for _, label in rows]
                tested = [text for text, _ in self.test]

                def of_words():
                    features, more = tf_idf(texts, tested)
                    return {"accuracy": accuracy(fitted(features, labels)(more), self.labels)}

                self.note("tf-idf", size, draw, 0, of_words)
                for name, directory in models.items():

                    def of_vectors():
                        vectors, more = self.embedded(name, directory)
                        predict = fitted(np.array([vectors[text] for text in texts]), labels)
                        return {"accuracy": accuracy(predict(more), self.labels)}

                    self.note(f"{name} linear", size, draw, 0, of_vectors)
                    for seed in range(self.flags.seeds):
                        self.note(f"{name} henson", size, draw, seed, lambda: self.finetuned(directory, rows, seed))
        self.table(models)

    def table(self, models):
        """Means over draws and seeds; the standard error is of the means of the draws, or of the seeds where there is one draw."""

        def cell(what, size):
            rows = [row for row in self.done.values() if row["what"] == what and row["size"] == str(size)]
            by_draw = {}
            for row in rows:
                by_draw.setdefault(row["draw"], []).append(row["accuracy"])
            means = [sum(values) / len(values) for values in by_draw.values()]
            if len(means) == 1:
                means = next(iter(by_draw.values()))
            if not means:
                return "–"
            mean = sum(means) / len(means)
            if len(means) == 1:
                return f"{mean:.1f}"
            deviation = math.sqrt(sum((value - mean) ** 2 for value in means) / (len(means) - 1))
            return f"{mean:.1f} ± {deviation / math.sqrt(len(means)):.1f}"

        columns = ["tf-idf"] + [f"{name} {kind}" for name in models for kind in ("linear", "henson")]
        print("| rows a class | " + " | ".join(columns) + " |\n|---" + "|---" * len(columns) + "|")
        for size in self.flags.sizes:
            print(f"| {size} | " + " | ".join(cell(column, size) for column in columns) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--henson", default="henson", help="the binary")
    parser.add_argument("--data", required=True, help="the directory with train.txt and test.txt")
    parser.add_argument("--model", action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--sizes", nargs="+", default=["16", "50", "200", "all"])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", help="a file with all results, to continue with")
    parser.add_argument("--scratch", help="where runs are written and deleted again")
    parser.add_argument("--more", default="", help="more flags for finetune, such as '--device cuda' or '--threads 2'")
    Bench(parser.parse_args()).run()


if __name__ == "__main__":
    main()
