"""Word vectors from running text, in GloVe's text format, where none can be downloaded.

    python tools/bench/word_vectors.py --out vectors.txt [--words 30000] [--size 100] [--window 4] [--million 20] TEXT.zst...

Counts which words stand near each other, takes positive pointwise mutual information with contexts smoothed by 0.75, and its singular vectors
times the square root of the singular values (Levy, Goldberg and Dagan 2015), which is about as good as GloVe for text of this size. Words are
told apart at white space and punctuation, in small letters. Needs numpy, scipy, scikit-learn, and `zstd` on the PATH.
"""

import argparse
import collections
import re
import subprocess

import numpy as np
from scipy import sparse
from sklearn.utils.extmath import randomized_svd

parser = argparse.ArgumentParser()
parser.add_argument("files", nargs="+")
parser.add_argument("--out", required=True)
for name, default in (("words", 30_000), ("size", 100), ("window", 4), ("million", 20)):
    parser.add_argument("--" + name, type=int, default=default, help="running words in millions" if name == "million" else None)
flags = parser.parse_args()

word = re.compile(r"\w+|[^\w\s]")
running = []
for file in flags.files:
    text = subprocess.run(["zstd", "-dc", file], check=True, capture_output=True).stdout.decode()
    running += word.findall(text.lower())
    if len(running) >= flags.million * 1_000_000:
        break
running = running[: flags.million * 1_000_000]
counted = collections.Counter(running).most_common(flags.words)
number = {text: i for i, (text, _) in enumerate(counted)}
# The last is for all other words, which stay where they are.
V = len(number)
ids = np.fromiter((number.get(text, V) for text in running), dtype=np.int64, count=len(running))
del running
near = sparse.csr_matrix((V + 1, V + 1), dtype=np.float32)
for distance in range(1, flags.window + 1):
    # Closer words count more, as in word2vec.
    weight = np.full(len(ids) - distance, (flags.window + 1 - distance) / flags.window, dtype=np.float32)
    near = near + sparse.coo_matrix((weight, (ids[:-distance], ids[distance:])), shape=near.shape).tocsr()
near = (near + near.T)[:V, :V].tocoo()
rows, columns = np.asarray(near.sum(1)).ravel(), np.asarray(near.sum(0)).ravel() ** 0.75
information = np.log(near.data * columns.sum() / (rows[near.row] * columns[near.col]))
kept = information > 0
matrix = sparse.csr_matrix((information[kept], (near.row[kept], near.col[kept])), shape=(V, V))
left, values, _ = randomized_svd(matrix, flags.size, n_iter=4, random_state=0)
vectors = left * np.sqrt(values)
vectors /= vectors.std()
with open(flags.out, "w", encoding="utf-8") as file:
    for (text, _), vector in zip(counted, vectors):
        print(text, *(f"{x:.4f}" for x in 0.4 * vector), file=file)
