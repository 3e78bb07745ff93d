"""Make tests-data/retrieval/golden.json: scores of rankings and of pairs by the evaluators of sentence-transformers.

    HF_HUB_OFFLINE=1 python tools/golden/retrieval_scores.py [OUTPUT_FILE]

`rankings`: for each query the relevance of what was found, best first, and of all that is relevant; `scores` are those of
InformationRetrievalEvaluator, for which any relevance above 0 is 1, and `ndcg` with the relevance itself as trec_eval has it
(gain by the number, discount by log2 of the rank and one, the ideal over all that is relevant).
`pairs`: labels and cosines, with the results of BinaryClassificationEvaluator and scikit-learn's average precision.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
from sentence_transformers.sentence_transformer.evaluation import BinaryClassificationEvaluator, InformationRetrievalEvaluator
from sklearn.metrics import average_precision_score

OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "tests-data/retrieval/golden.json"
CUTOFFS = [1, 3, 5, 10]


def rankings():
    draws = np.random.default_rng(5)
    queries, documents = 9, 40
    relevance = {f"q{i}": {f"d{j}": int(draws.integers(1, 4)) for j in draws.choice(documents, size=1 + 2 * (i % 4), replace=False)}
                 for i in range(queries)}
    found = []
    for i in range(queries):
        order = draws.permutation(documents)[:12]
        if i % 3:
            # Some that are relevant, so that there is something to score.
            order[: 1 + i % 2] = [int(d[1:]) for d in list(relevance[f"q{i}"])[: 1 + i % 2]][: 1 + i % 2] + [39] * max(0, 1 + i % 2 - len(relevance[f"q{i}"]))
            order = np.array(list(dict.fromkeys(order.tolist())))
        found.append([{"corpus_id": f"d{d}", "score": 1.0 - 0.01 * rank} for rank, d in enumerate(order)])
    evaluator = InformationRetrievalEvaluator(
        {q: q for q in relevance}, {f"d{d}": "" for d in range(documents)}, {q: set(docs) for q, docs in relevance.items()},
        mrr_at_k=CUTOFFS, ndcg_at_k=CUTOFFS, accuracy_at_k=CUTOFFS, precision_recall_at_k=CUTOFFS, map_at_k=CUTOFFS)
    scores = evaluator.compute_metrics(found)
    graded = {}
    for k in CUTOFFS:
        values = []
        for query, hits in zip(relevance, found):
            gains = [relevance[query].get(hit["corpus_id"], 0) for hit in hits[:k]]
            dcg = lambda gains: sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains))
            values.append(dcg(gains) / dcg(sorted(relevance[query].values(), reverse=True)[:k]))
        graded[k] = float(np.mean(values))
    return {
        "queries": [{"found": [relevance[q].get(hit["corpus_id"], 0) for hit in hits], "relevant": list(relevance[q].values())}
                    for q, hits in zip(relevance, found)],
        "scores": {name[:-1] + str(k): float(value) for name, values in scores.items() for k, value in values.items()},
        "ndcg": graded,
    }


def pairs(count, seed):
    draws = np.random.default_rng(seed)
    labels = draws.integers(0, 2, count)
    scores = np.round(np.clip(0.4 * labels + draws.normal(0.3, 0.3, count), -1, 1), 2)
    accuracy, accuracy_threshold = BinaryClassificationEvaluator.find_best_acc_and_threshold(scores, labels, True)
    f1, precision, recall, f1_threshold = BinaryClassificationEvaluator.find_best_f1_and_threshold(scores, labels, True)
    numbers = dict(accuracy=accuracy, accuracy_threshold=accuracy_threshold, f1=f1, precision=precision, recall=recall,
                   f1_threshold=f1_threshold, ap=average_precision_score(labels, scores))
    return {"labels": labels.tolist(), "scores": scores.tolist(), **{name: float(value) for name, value in numbers.items()}}


OUT.parent.mkdir(parents=True, exist_ok=True)
OUT.write_text(json.dumps({"rankings": rankings(), "pairs": [pairs(25, 1), pairs(40, 2), pairs(7, 3)]}, indent=None) + "\n")
