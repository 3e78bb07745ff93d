#!/usr/bin/env python3
"""Writes tests-data/tasks/*-named.*: tables as the `datasets` library writes them, whose labels are
numbers and whose names stand in the file's metadata (the key `huggingface`). Next to each parquet is
its twin in JSON lines with the names in place; henson must read the same from both.

Needs datasets and pyarrow.
"""
import json, pathlib

import pyarrow.parquet as parquet
from datasets import ClassLabel, Dataset, Features, Sequence, Value

OUT = pathlib.Path(__file__).resolve().parents[2] / "tests-data" / "tasks"
TOPICS = ["sport", "arts", "news"]  # not in alphabetical order, and the last one is never used
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def write(name, features, rows):
    table = Dataset.from_dict({key: [row[key] for row in rows] for key in features}, features=features)
    path = OUT / f"{name}-named.parquet"
    table.to_parquet(path)
    # The same without what names the labels: all that is left is numbers.
    plain = parquet.read_table(path).replace_schema_metadata(None)
    if name == "tags":
        parquet.write_table(plain, OUT / "tags-nameless.parquet", store_schema=False)

    def named(feature, value):
        if isinstance(feature, ClassLabel):
            return None if value == -1 else feature.names[value]
        inner = getattr(feature, "feature", None)
        return [named(inner, item) for item in value] if inner is not None else value

    with open(OUT / f"{name}-named.jsonl", "w") as out:
        for row in rows:
            out.write(json.dumps({key: named(features[key], row[key]) for key in features}) + "\n")


write("topics", Features({"text": Value("string"), "label": ClassLabel(names=TOPICS)}),
      [dict(text="a goal", label=0), dict(text="a song", label=1), dict(text="a late goal", label=0)])
write("tags", Features({"id": Value("string"), "tokens": Sequence(Value("string")), "ner_tags": Sequence(ClassLabel(names=TAGS))}),
      [dict(id="7", tokens=["Jim", "Henson", "sings"], ner_tags=[1, 2, 0]), dict(id="8", tokens=["in", "Leland"], ner_tags=[0, 3])])
write("moods", Features({"text": Value("string"), "labels": Sequence(ClassLabel(names=["joy", "anger", "fear"]))}),
      [dict(text="oh", labels=[2, 0]), dict(text="well", labels=[])])
