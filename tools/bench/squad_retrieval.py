"""Questions and paragraphs of SQuAD or PolicyQA as a retrieval set: a collection as BEIR has it, and pairs to train on, of other articles.

    python tools/bench/squad_retrieval.py DATA OUT [--source squad|policyqa] [--queries 200] [--pairs 2000]

DATA holds squad/devsplit-{train,eval}-v1.1.json.gz, or policyqa/dev.json.gz, of which every other policy is to train on. Writes
OUT/corpus.jsonl (all paragraphs of the articles to score), OUT/queries.jsonl and OUT/qrels/test.tsv (so many questions, evenly spaced; all
paragraphs where a question is asked count, for PolicyQA asks the same of many), OUT/pairs.jsonl (questions and paragraphs to train on).
"""

import argparse
import gzip
import json
import pathlib


def articles(path):
    return json.load(gzip.open(path))["data"]


def paragraphs(articles):
    return [paragraph for article in articles for paragraph in article["paragraphs"]]


def spaced(items, count):
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def lines(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


parser = argparse.ArgumentParser()
parser.add_argument("data", type=pathlib.Path)
parser.add_argument("out", type=pathlib.Path)
parser.add_argument("--source", choices=["squad", "policyqa"], default="squad")
parser.add_argument("--queries", type=int, default=200)
parser.add_argument("--pairs", type=int, default=2000)
flags = parser.parse_args()
(flags.out / "qrels").mkdir(parents=True, exist_ok=True)
if flags.source == "squad":
    train, held_out = (articles(flags.data / f"squad/devsplit-{split}-v1.1.json.gz") for split in ("train", "eval"))
else:
    policies = articles(flags.data / "policyqa/dev.json.gz")
    train, held_out = policies[::2], policies[1::2]
corpus = paragraphs(held_out)
lines(flags.out / "corpus.jsonl", ({"_id": f"p{i}", "text": paragraph["context"]} for i, paragraph in enumerate(corpus)))
answered = {}
for i, paragraph in enumerate(corpus):
    for qa in paragraph["qas"]:
        answered.setdefault(qa["question"].strip(), []).append(i)
asked = spaced(list(answered.items()), flags.queries)
lines(flags.out / "queries.jsonl", ({"_id": f"q{i}", "text": question} for i, (question, _) in enumerate(asked)))
judged = "".join(f"q{i}\tp{paragraph}\t1\n" for i, (_, where) in enumerate(asked) for paragraph in dict.fromkeys(where))
(flags.out / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
pairs = [{"anchor": qa["question"].strip(), "positive": paragraph["context"]} for paragraph in paragraphs(train) for qa in paragraph["qas"]]
lines(flags.out / "pairs.jsonl", spaced(pairs, flags.pairs))
