#!/usr/bin/env python3
"""Writes tests-data/tasks: what scikit-learn, SciPy, seqeval and SQuAD's definition
give for edge cases of every metric, a small part of SQuAD with real predictions, and parquet files.

  make_task_golden.py --squad DIR   (the folder with dev-v1.1.json.gz, dev-v2.0.json.gz and predictions/)

Needs scikit-learn, scipy, seqeval and pyarrow. SQuAD's scores are computed here from their definition, with Python's own regular
expressions and counters; over the whole dev sets this gives what the official program printed (checked below).
"""
import argparse, collections, gzip, json, math, pathlib, random, re, string, warnings

import numpy as np
from scipy.stats import pearsonr, spearmanr
from seqeval.metrics import accuracy_score as token_accuracy
from seqeval.metrics import f1_score as entity_f1
from seqeval.metrics import precision_score as entity_precision
from seqeval.metrics import recall_score as entity_recall
from seqeval.metrics import classification_report
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

warnings.simplefilter("ignore")
OUT = pathlib.Path(__file__).resolve().parents[2] / "tests-data" / "tasks"


def number(value):
    value = float(value)
    return None if math.isnan(value) else value


def classes():
    draw = random.Random(1)
    random_pairs = [(draw.randrange(4), draw.randrange(4)) for _ in range(200)]
    cases = {
        "mixed": (2, [0, 1, 1, 0, 1], [0, 1, 0, 0, 1]),
        "no positives expected": (2, [0, 0, 0], [0, 1, 0]),
        "no positives predicted": (2, [0, 1, 1], [0, 0, 0]),
        "no positives at all": (2, [0, 0], [0, 0]),
        "all wrong": (2, [0, 1, 0, 1], [1, 0, 1, 0]),
        "constant": (2, [1, 1, 1], [1, 1, 1]),
        "three": (3, [0, 1, 2, 2, 1, 0, 2], [0, 2, 2, 1, 1, 0, 2]),
        "a class that never occurs": (4, [0, 1, 3, 3], [0, 1, 3, 0]),
        "random": (4, [a for a, _ in random_pairs], [b for _, b in random_pairs]),
    }
    for name, (count, y, p) in cases.items():
        yield dict(name=name, classes=count, expected=y, predicted=p, accuracy=accuracy_score(y, p),
                   f1=number(f1_score(y, p, zero_division=0)) if count == 2 else None,
                   macro_f1=f1_score(y, p, average="macro", zero_division=0), matthews=matthews_corrcoef(y, p))


def multilabel():
    draw = random.Random(2)
    rows = lambda n, k: [sorted(draw.sample(range(k), draw.randrange(k + 1))) for _ in range(n)]
    cases = {
        "random": (5, rows(60, 5), rows(60, 5)),
        "nothing predicted": (3, [[0], [1, 2], []], [[], [], []]),
        "nothing expected": (2, [[], []], [[0], []]),
        "a class that never occurs": (3, [[0], [1]], [[0], [0, 1]]),
    }
    for name, (count, y, p) in cases.items():
        matrix = lambda rows: np.array([[int(c in row) for c in range(count)] for row in rows])
        a, b = matrix(y), matrix(p)
        yield dict(name=name, classes=count, expected=y, predicted=p, accuracy=accuracy_score(a, b),
                   micro_f1=f1_score(a, b, average="micro", zero_division=0),
                   macro_f1=f1_score(a, b, average="macro", zero_division=0))


def numbers():
    draw = random.Random(3)
    x = [draw.gauss(2, 1) for _ in range(100)]
    cases = {
        "random": (x, [a + draw.gauss(0, 0.7) for a in x]),
        "ties": ([0, 0, 1, 1, 2, 5, 5, 5], [1.5, 1.5, 1.5, 0, 3, 3, 9, -1]),
        "reversed": ([1, 2, 3, 4], [4, 3, 2, 1]),
        "constant predictions": ([1, 2, 3], [0.1, 0.1, 0.1]),
        "constant labels": ([2, 2, 2], [1, 2, 3]),
        "monotone": ([1, 2, 3, 4, 5], [1, 10, 100, 1000, 10000]),
        "large offset": ([1e6 + i for i in range(6)], [1e6 + i * i for i in range(6)]),
    }
    for name, (y, p) in cases.items():
        yield dict(name=name, expected=list(map(float, y)), predicted=list(map(float, p)), pearson=number(pearsonr(y, p)[0]),
                   spearman=number(spearmanr(y, p)[0]))


def tags():
    words = lambda text: [sentence.split() for sentence in text.split("|")]
    draw = random.Random(4)
    pool = ["O", "O", "B-PER", "I-PER", "B-LOC", "I-LOC", "I-PER"]
    bioes = ["O", "B-X", "I-X", "E-X", "S-X", "E-Y", "I-Y", "S-Y"]
    noise = lambda pool: [[draw.choice(pool) for _ in range(draw.randrange(1, 12))] for _ in range(60)]
    a, c = noise(pool), noise(bioes)
    other = lambda rows, pool: [[t if draw.random() < 0.7 else draw.choice(pool) for t in row] for row in rows]
    cases = {
        "right": (words("B-PER I-PER O|O B-LOC"), words("B-PER I-PER O|O B-LOC")),
        "kind and border": (words("B-PER I-PER O B-LOC|B-ORG I-ORG O"), words("B-PER O O B-ORG|B-ORG I-ORG I-ORG")),
        "none predicted": (words("B-PER O|O O"), words("O O|O O")),
        "none expected": (words("O O"), words("B-PER O")),
        "none at all": (words("O O"), words("O O")),
        "inside without begin": (words("O B-PER I-PER|B-LOC I-LOC"), words("O I-PER I-PER|B-PER I-LOC")),
        "iob1": (words("I-PER I-PER B-PER O I-LOC"), words("I-PER I-PER I-PER O I-LOC")),
        "ill-formed": (a, other(a, pool)),
        "ill-formed bioes": (c, other(c, bioes)),
    }
    for name, (y, p) in cases.items():
        report = classification_report(y, p, output_dict=True, zero_division=0) if any(t != "O" for r in y + p for t in r) else {}
        kinds = {k: dict(precision=v["precision"], recall=v["recall"], f1=v["f1-score"], expected=int(v["support"]))
                 for k, v in report.items() if not k.endswith(" avg")}
        yield dict(name=name, expected=y, predicted=p, accuracy=token_accuracy(y, p), kinds=kinds,
                   precision=float(entity_precision(y, p, zero_division=0)), recall=float(entity_recall(y, p, zero_division=0)),
                   f1=float(entity_f1(y, p, zero_division=0)), # seqeval's mean over no kinds is undefined; ours is 0, as its other scores are then.
                   macro_f1=number(entity_f1(y, p, average="macro", zero_division=0)) or 0.0)


def normalise(text):
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text, flags=re.UNICODE).split())


def exact_of(gold, said):
    return int(normalise(gold) == normalise(said))


def f1_of(gold, said):
    gold, said = normalise(gold).split(), normalise(said).split()
    if not gold or not said:
        return float(gold == said)
    same = sum((collections.Counter(gold) & collections.Counter(said)).values())
    if not same:
        return 0.0
    precision, recall = same / len(said), same / len(gold)
    return 2 * precision * recall / (precision + recall)


def squad_scores(data, predictions, odds=None, threshold=None):
    """Percentages over all questions, and parts of them; with odds also the best that a threshold could give."""
    rows = []
    for article in data["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                golds = [a["text"] for a in qa.get("answers", []) if normalise(a["text"])] or [""]
                said = predictions[qa["id"]]
                row = dict(has=bool(qa.get("answers")), said=said, odds=odds and odds[qa["id"]],
                           exact=max(exact_of(g, said) for g in golds), f1=max(f1_of(g, said) for g in golds))
                row["raw"] = dict(exact=row["exact"], f1=row["f1"])
                if threshold is not None and row["odds"] > threshold:
                    row["exact"] = row["f1"] = float(not row["has"])
                rows.append(row)
    mean = lambda key, rows: 100.0 * sum(r[key] for r in rows) / len(rows) if rows else None
    has, none = [r for r in rows if r["has"]], [r for r in rows if not r["has"]]
    scores = dict(exact_match=mean("exact", rows), f1=mean("f1", rows))
    if none:
        scores |= dict(has_answer_exact_match=mean("exact", has), has_answer_f1=mean("f1", has),
                       no_answer_exact_match=mean("exact", none), no_answer_f1=mean("f1", none))
    if odds:
        for key, name in (("exact", "best_exact_match"), ("f1", "best_f1")):
            score = best = len(none)
            at = 0.0
            for r in sorted(rows, key=lambda r: r["odds"]):
                score += r["raw"][key] if r["has"] else (-1 if r["said"] else 0)
                if score > best:
                    best, at = score, r["odds"]
            scores |= {name: 100.0 * best / len(rows), name + "_threshold": at}
    return scores


def answers():
    texts = ["The Normans", "an  apple, a pear & the plum", "A.B. the-end", "É the É", "", "the", "a an the", "10\u201311%", "it's",
             "Straße the STRASSE", "ΟΔΟΣ", "theatre a1 a_b", "x\u00a0the\u00a0y", "\x1cthe\x1f cat", "a\u0301 a\u0300b", "İstanbul"]
    pairs = [("the cat", "cat"), ("", ""), ("", "cat"), ("cat", ""), ("the", ""), ("a b c", "b c d"), ("b b b c", "b b x"),
             ("cat", "the Cat!"), ("x y", "y x"), ("10 percent", "10%")]
    return dict(normalised=[[t, normalise(t)] for t in texts],
                scores=[[g, s, exact_of(g, s), f1_of(g, s)] for g, s in pairs])


def parquet():
    """Typed tables as the `datasets` library writes them: lists, structs, nulls, labels as numbers."""
    import pyarrow, pyarrow.parquet
    write = lambda name, columns: pyarrow.parquet.write_table(pyarrow.table(columns), OUT / name)
    write("rte.parquet", dict(sentence1=["Jim has a frog.", "It \"is\" green."], sentence2=["Jim has a pet.", "It is red."],
                              label=[0, 1], idx=[7, 8]))
    write("rte-test.parquet", dict(sentence1=["Jim."], sentence2=["Frog."], label=[-1], idx=[0]))
    write("tokens.parquet", dict(tokens=[["Jim", "Henson", "sings"], ["É", "!"]], ner_tags=[["B-PER", "I-PER", "O"], ["O", "O"]]))
    write("squad.parquet", dict(
        id=["a", "b"], question=["Who sings?", "Who dances?"], context=["É, Jim sings."] * 2,
        answers=[dict(text=["Jim"], answer_start=[3]), dict(text=[], answer_start=[])]))
    write("arc.parquet", dict(id=["q"], question=["What is green?"], answerKey=["2"],
                              choices=[dict(text=["a stone", "a frog", "a cloud"], label=["1", "2", "3"])]))


def load(path):
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def squad(folder):
    expected = json.load(open(folder / "predictions" / "expected-scores.json"))
    for name, entry in expected.items():
        mine = squad_scores(load(folder / entry["dataset"]), load(folder / "predictions" / name))
        assert abs(mine["exact_match"] - entry["scores"]["exact"]) < 1e-9 and abs(mine["f1"] - entry["scores"]["f1"]) < 1e-9, name
    (OUT / "squad").mkdir(exist_ok=True)
    write = lambda name, value: (OUT / "squad" / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")
    scores = {}
    for version, system in (("1.1", "match-lstm-with-ans-ptr-boundary-ensembl"), ("2.0", "nlnet-single-model-microsoft-research-as")):
        data, said = load(folder / f"dev-v{version}.json.gz"), load(folder / "predictions" / f"{version}-{system}.json.gz")
        # Two paragraphs of three articles.
        data["data"] = [dict(article, paragraphs=article["paragraphs"][:2]) for article in data["data"][3:30:10]]
        ids = [qa["id"] for article in data["data"] for p in article["paragraphs"] for qa in p["qas"]]
        said = {i: said[i] for i in ids}
        write(f"dev-v{version}.json", data)
        write(f"predictions-{version}.json", said)
        scores[version] = squad_scores(data, said)
        if version == "2.0":
            draw = random.Random(5)
            # Rounded, so that some are the same.
            answered = {qa["id"]: bool(qa["answers"]) for a in data["data"] for p in a["paragraphs"] for qa in p["qas"]}
            odds = {i: round(draw.gauss(-1.5 if answered[i] else 1.5, 1.5), 1) for i in ids}
            write("null_odds-2.0.json", odds)
            scores["2.0 with odds"] = squad_scores(data, said, odds)
            scores["2.0 at 0.5"] = squad_scores(data, said, odds, 0.5)
    write("scores.json", scores)


if __name__ == "__main__":
    flags = argparse.ArgumentParser()
    flags.add_argument("--squad", type=pathlib.Path, required=True)
    squad(flags.parse_args().squad)
    parquet()
    golden = dict(classes=list(classes()), multilabel=list(multilabel()), numbers=list(numbers()), tags=list(tags()), answers=answers())
    (OUT / "metrics.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n")
