"""Pairs of texts that mean the same, out of public sets, for `henson finetune --task embed`: how models/henson-12m-sentences was
tuned. Prints JSON lines with `anchor`, `positive` and, where there is one, `negative`.

    python tools/sentence_pairs.py DATA > pairs.jsonl

DATA holds glue/ (QQP, MRPC, STS-B's training files), snli-devtest/, sick/. Nothing of STS-B's dev file is read.
"""

import collections
import gzip
import json
import pathlib
import sys

data = pathlib.Path(sys.argv[1])


def rows(path):
    opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8-sig")
    with opened as lines:
        return [line.rstrip("\n").split("\t") for line in lines]


pairs = [(row[3], row[4], None) for row in rows(data / "glue/QQP/train-subset.tsv")[1:] if row[5] == "1"]
pairs += [(row[3], row[4], None) for row in rows(data / "glue/MRPC/train.tsv")[1:] if row[0] == "1"]
pairs += [(row[7], row[8], None) for row in rows(data / "glue/STS-B/train.tsv")[1:] if float(row[9]) >= 4]
inference = [row[:3] for name in ("dev", "test") for row in rows(data / f"snli-devtest/{name}.tsv.gz")[1:]]
inference += [(row[1], row[2], row[4].lower()) for row in rows(data / "sick/SICK_train.txt")[1:]]
by_premise = collections.defaultdict(lambda: collections.defaultdict(list))
for premise, hypothesis, label in inference:
    by_premise[premise][label].append(hypothesis)
for premise, found in by_premise.items():
    for i, hypothesis in enumerate(found["entailment"]):
        negatives = found["contradiction"]
        pairs.append((premise, hypothesis, negatives[i % len(negatives)] if negatives else None))
for anchor, positive, negative in pairs:
    row = {"anchor": anchor, "positive": positive}
    print(json.dumps(row | {"negative": negative} if negative else row, ensure_ascii=False))
