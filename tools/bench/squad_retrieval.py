"""Questions and paragraphs of SQuAD as a retrieval set: a collection as BEIR has it, and pairs to train on, of other articles.

    python tools/bench/squad_retrieval.py DATA OUT [--queries 200] [--pairs 2000]

DATA holds squad/devsplit-{train,eval}-v1.1.json.gz. Writes OUT/corpus.jsonl (all paragraphs of the articles of the eval split),
OUT/queries.jsonl and OUT/qrels/test.tsv (so many questions, evenly spaced), OUT/pairs.jsonl (questions and paragraphs of the train split).
"""

import argparse
import gzip
import json
import pathlib


def paragraphs(path):
    for article in json.load(gzip.open(path))["data"]:
        yield from article["paragraphs"]


def spaced(items, count):
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def lines(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


parser = argparse.ArgumentParser()
parser.add_argument("data", type=pathlib.Path)
parser.add_argument("out", type=pathlib.Path)
parser.add_argument("--queries", type=int, default=200)
parser.add_argument("--pairs", type=int, default=2000)
flags = parser.parse_args()
(flags.out / "qrels").mkdir(parents=True, exist_ok=True)
corpus = list(paragraphs(flags.data / "squad/devsplit-eval-v1.1.json.gz"))
lines(flags.out / "corpus.jsonl", ({"_id": f"p{i}", "text": paragraph["context"]} for i, paragraph in enumerate(corpus)))
questions = [(qa["question"].strip(), i) for i, paragraph in enumerate(corpus) for qa in paragraph["qas"]]
asked = spaced(questions, flags.queries)
lines(flags.out / "queries.jsonl", ({"_id": f"q{i}", "text": question} for i, (question, _) in enumerate(asked)))
judged = "".join(f"q{i}\tp{paragraph}\t1\n" for i, (_, paragraph) in enumerate(asked))
(flags.out / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
pairs = [{"anchor": qa["question"].strip(), "positive": paragraph["context"]}
         for paragraph in paragraphs(flags.data / "squad/devsplit-train-v1.1.json.gz") for qa in paragraph["qas"]]
lines(flags.out / "pairs.jsonl", spaced(pairs, flags.pairs))
