"""Make tests-data/retrieval/golden.json: scores of rankings and of pairs by the evaluators of sentence-transformers.

    HF_HUB_OFFLINE=1 python tools/golden/retrieval_scores.py [OUTPUT_FILE]

`rankings`: for each query the relevance of what was found, best first, and of all that is relevant; `scores` are those of
InformationRetrievalEvaluator, for which any relevance above 0 is 1, and `ndcg` with the relevance itself as trec_eval has it
(gain by the number, discount by log2 of the rank and one, the ideal over all that is relevant).
`trec`: odd queries, with trec_eval's nDCG. `reranked`: for each query scores and relevances of documents, with the results of CrossEncoderRerankingEvaluator (and scikit-learn's nDCG by
grades). `mined`: pairs by their scores, with the results of ParaphraseMiningEvaluator.
`pairs`: labels and cosines, with the results of BinaryClassificationEvaluator and scikit-learn's average precision.
"""

import json
import math
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytrec_eval
from sentence_transformers.sentence_transformer.evaluation import BinaryClassificationEvaluator, InformationRetrievalEvaluator, ParaphraseMiningEvaluator
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from sklearn.metrics import average_precision_score, ndcg_score

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


def reranked(seed, graded=False, ties=False):
    """Documents with scores and relevances, and what CrossEncoderRerankingEvaluator.compute_metrics says. Where scores are equal, its
    reciprocal rank depends on how numpy sorts, and is left out."""
    draws = np.random.default_rng(seed)
    evaluator = CrossEncoderRerankingEvaluator([], at_k=10)
    queries, all_scores = [], []
    for i in range(6):
        count = 4 + 3 * i
        relevance = draws.integers(0, 4 if graded else 2, count) * (draws.random(count) < 0.5)
        relevance[draws.integers(count)] = 1
        scores = draws.integers(0, 5, count) / 8 if ties else draws.permutation(count) / 64
        mrr = evaluator.compute_metrics((relevance > 0).astype(int), scores)[0]
        all_scores.append((ndcg_score([relevance], [scores], k=10), mrr, average_precision_score(relevance > 0, scores)))
        queries.append([[float(score), float(grade)] for score, grade in zip(scores, relevance)])
    ndcg, mrr, map_ = (float(x) for x in np.mean(all_scores, axis=0))
    return {"queries": queries, "ndcg": ndcg, "mrr": None if ties else mrr, "map": map_}


def trec():
    """nDCG of trec_eval itself (pytrec_eval) where it is odd: grades up to 3 and below 0, documents that nobody judged, relevant ones that
    were not found, less found than the cutoff, nothing relevant found, and a query that nothing is relevant to, which is left out."""
    qrels = {
        "a": {"d1": 3, "d2": 1, "d3": 0, "d9": 2},
        "b": {"d1": -1, "d2": 2},
        "c": {"d7": 1, "d8": 3},
        "d": {"d4": 2, "d5": 2, "d6": 1, "d1": 0},
        "e": {"d1": 0, "d2": 0},
    }
    found = {"a": ["d5", "d2", "d1", "d3"], "b": ["d1", "d2"], "c": ["d1", "d2", "d3"], "d": ["d6", "d1", "d5", "d4", "d2", "d3", "d7"], "e": ["d2"]}
    run = {query: {document: 1.0 - 0.1 * rank for rank, document in enumerate(documents)} for query, documents in found.items()}
    scores = pytrec_eval.RelevanceEvaluator(qrels, {f"ndcg_cut.{','.join(map(str, CUTOFFS))}"}).evaluate(run)
    judged = [query for query in qrels if max(qrels[query].values()) > 0]
    return {
        "queries": [{"found": [qrels[query].get(document, 0) for document in found[query]], "relevant": list(qrels[query].values())} for query in qrels],
        "ndcg": {k: float(np.mean([scores[query][f"ndcg_cut_{k}"] for query in judged])) for k in CUTOFFS},
    }


def mined(seed, count, missed):
    """Pairs as paraphrase_mining gives them, and what ParaphraseMiningEvaluator says; `missed` duplicates are not among them."""
    draws = np.random.default_rng(seed)
    ids = [f"s{i}" for i in range(2 * (count + missed))]
    scores = np.sort(np.round(draws.random(count), 1 if seed % 2 else 6))[::-1]
    labels = draws.integers(0, 2, count)
    labels[-1] = 1
    pairs = [[float(score), 2 * i, 2 * i + 1] for i, score in enumerate(scores)]
    duplicates = [(ids[2 * i], ids[2 * i + 1]) for i in range(count) if labels[i]] + [(ids[2 * i], ids[2 * i + 1]) for i in range(count, count + missed)]
    evaluator = ParaphraseMiningEvaluator({i: i for i in ids}, duplicates_list=duplicates, write_csv=False)
    evaluator.store_metrics_in_model_card_data = lambda *_: None
    with mock.patch("sentence_transformers.sentence_transformer.evaluation.paraphrase_mining.paraphrase_mining", lambda *_, **__: pairs):
        found = evaluator(None)
    return {"labels": labels.tolist(), "scores": scores.tolist(), "duplicates": len(duplicates), **{name: float(value) for name, value in found.items()}}


OUT.parent.mkdir(parents=True, exist_ok=True)
OUT.write_text(json.dumps({"rankings": rankings(), "trec": trec(), "pairs": [pairs(25, 1), pairs(40, 2), pairs(7, 3)],
                           "reranked": [reranked(1), reranked(2, graded=True), reranked(3, ties=True), reranked(4, graded=True, ties=True)],
                           "mined": [mined(1, 30, 0), mined(2, 30, 4), mined(3, 9, 2)]}, indent=None) + "\n")
