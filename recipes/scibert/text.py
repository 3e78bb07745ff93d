"""Writes scientific text for pre-training: abstracts of SciTLDR, and the papers of a CoNLL file that entities are learned from.

    python recipes/scibert/text.py SCITLDR.jsonl.gz TRAIN.conll > science.txt

One sentence a line, an empty line between documents. The dev papers of the entities are not read, so that no model has seen them.
A CoNLL file has no borders between papers: every 200 sentences count as a document.
"""

import gzip
import json
import sys

abstracts, papers = sys.argv[1:]
with gzip.open(abstracts, "rt", encoding="utf-8") as lines:
    for line in lines:
        print("\n".join(sentence.strip() for sentence in json.loads(line)["source"]), end="\n\n")
with open(papers, encoding="utf-8") as file:
    sentences = [block.strip() for block in file.read().split("\n\n") if block.strip()]
for number, sentence in enumerate(sentences, 1):
    print(" ".join(line.split()[0] for line in sentence.splitlines()))
    if number % 200 == 0:
        print()
