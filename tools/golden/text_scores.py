#!/usr/bin/env python3
"""Writes tests-data/texts/scores.json: what sacreBLEU and rouge-score give for several hundred made lines, alone and as corpora, and
the stems of words. Word and phone errors are computed here from their definition.

Needs sacrebleu 2.6.0 and rouge-score 0.1.2 (with nltk 3.10).

`lines`: text, references, [bleu, chrf, rouge1, rouge2, rougeL, rougeLsum, exact, edits, length of the nearest reference] of each alone.
`corpora`: first and last line, all scores, and sacreBLEU's signatures. `stems`: words with their stems.
"""
import json, pathlib, random

import sacrebleu
from nltk.stem.porter import PorterStemmer
from rouge_score import rouge_scorer

OUT = pathlib.Path(__file__).resolve().parents[2] / "tests-data" / "texts"
KINDS = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
ROUGE = rouge_scorer.RougeScorer(KINDS, use_stemmer=True)

ENGLISH = """the a cat dogs sat running on mat relational conditional rationality happily skies dying news innings proceed
generalizations oscillators hopefulness triplicate formalize electrical adjustment adoption controlling rolled agreed feed
hopping fizzed filing sized conflated troubled enjoy enjoyment spied died archaeology geology logically fully usefully bled""".split()
GERMAN = "der Hund schläft größer Straße Übung isst Äpfel nicht weiß größten Käse".split()
OTHERS = "кошка сидела 犬が 好き です ㈱ naïve café e\u0301te\u0301 👩‍👩‍👧 İstanbul K5 ﬁne ΣΊΣΥΦΟΣ ½ ٣٤".split()
MARKS = """. , ! ? ... ,. .. 3.14 1,000 a.b U.S. 5-3 x-ray - -- 3- & &amp; &quot; &lt;b&gt; <skipped> (so) [1] {2} 'tis don't
"quoted" $5 50% a/b #1 @home ~x ^y _z `w` 1. .5 ,5 5,""".split()
SPACES = [" "] * 20 + ["  ", "\t", "\u00a0", "\u2009", "\u3000", "\x1c", "\n", "-\n", "\u200b"]


def made(draw):
    words = []
    for _ in range(draw.choice([0, 1, 2, 3, 4, 5, 7, 9, 12, 20])):
        words.append(draw.choice(draw.choice([ENGLISH, ENGLISH, ENGLISH, GERMAN, MARKS, OTHERS])))
    return "".join(word + draw.choice(SPACES) for word in words).rstrip(" ") if draw.random() < 0.8 else " ".join(words)


def changed(draw, text):
    words = text.split(" ")
    for _ in range(draw.randrange(4)):
        at = draw.randrange(len(words) + 1)
        kind = draw.randrange(5)
        if kind == 0:
            words.insert(at, draw.choice(ENGLISH + MARKS))
        elif kind == 1 and words:
            words.pop(at % len(words))
        elif kind == 2 and words:
            words[at % len(words)] = draw.choice(ENGLISH + OTHERS)
        elif kind == 3:
            draw.shuffle(words)
        elif words:
            words[at % len(words)] = words[at % len(words)].upper()
    return " ".join(words)


def distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(before + (x != y), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def streams(lines):
    most = max(len(line["references"]) for line in lines)
    return [[(line["references"] + [None] * most)[i] for line in lines] for i in range(most)]


def rouge(line):
    return [ROUGE.score_multi(line["references"], line["text"])[kind].fmeasure for kind in KINDS]


def nearest(line):
    text = line["text"].split()
    found = [(distance(text, reference.split()), len(reference.split())) for reference in line["references"]]
    return min(found, key=lambda pair: pair[0])


def exact(line):
    return int(line["text"].strip() in [reference.strip() for reference in line["references"]])


def alone(line):
    references = [[reference] for reference in line["references"]]
    bleu = sacrebleu.BLEU(force=True).corpus_score([line["text"]], references).score
    chrf = sacrebleu.CHRF().corpus_score([line["text"]], references).score
    return [bleu, chrf, *rouge(line), exact(line), *nearest(line)]


def corpus(lines, first, last):
    lines = lines[first:last]
    bleu, chrf = sacrebleu.BLEU(force=True), sacrebleu.CHRF()
    texts = [line["text"] for line in lines]
    scores = {"bleu": bleu.corpus_score(texts, streams(lines)).score, "chrf": chrf.corpus_score(texts, streams(lines)).score}
    each = [rouge(line) for line in lines]
    scores |= {kind: sum(row[i] for row in each) / len(lines) for i, kind in enumerate(KINDS)}
    near = [nearest(line) for line in lines]
    scores["exact_match"] = sum(map(exact, lines)) / len(lines)
    scores["wer"] = sum(edits > 0 for edits, _ in near) / len(lines)
    scores["per"] = sum(edits for edits, _ in near) / max(1, sum(length for _, length in near))
    signatures = {"bleu": str(bleu.get_signature()), "chrf": str(chrf.get_signature())}
    return {"first": first, "last": last, "scores": scores, "signatures": signatures}


def main():
    draw = random.Random(5)
    lines = []
    for number in range(400):
        reference = made(draw)
        count = 1 if number < 150 else 3 if number < 200 else draw.randrange(1, 5)
        references = [reference] + [changed(draw, reference) if draw.random() < 0.8 else made(draw) for _ in range(count - 1)]
        draw.shuffle(references)
        text = "" if number % 29 == 0 else changed(draw, reference) if draw.random() < 0.8 else made(draw)
        lines.append({"text": text, "references": references})
    sentences = ["The cats sat.\nDogs were running on mats.", "Dogs run on a mat.\n\nThe cat sat there.", "the cat\nthe cat\nthe cat"]
    lines += [{"text": a, "references": [b, sentences[0]]} for a in sentences for b in sentences]
    for line in lines:
        line["scores"] = alone(line)
    borders = [(0, 150), (150, 200), (200, 400), (0, len(lines)), (0, 1), (29, 30), (60, 66), (400, len(lines))]
    endings = """s es ies sses ied ed ing eed ational tional enci anci izer bli alli entli eli ousli ization ation ator alism iveness fulness
    ousness aliti iviti biliti fulli logi icate ative alize iciti ical ful ness al ance ence er ic able ible ant ement ment ent ion ou ism
    ate iti ous ive ize e ll y ly""".split()
    stems = """b cr tr hop hopp fall hiss fizz fil sky cri rel condit radic differ vile analog adopt control feed agre conflat troubl siz enjoy
    happ yy yyy toy syzyg th theo geo archaeo philo 1990 a1 hydr tax wax owe""".split()
    words = [stem + ending for stem in stems for ending in endings]
    words = sorted(set(draw.sample(words, 900) + ENGLISH + "howe lying tying outings cannings exceed succeed proceed inning".split()))
    stemmer = PorterStemmer()
    golden = {
        "lines": lines,
        "corpora": [corpus(lines, first, last) for first, last in borders],
        "stems": {word: stemmer.stem(word) for word in words},
    }
    OUT.mkdir(exist_ok=True)
    text = json.dumps(golden, ensure_ascii=False, separators=(",", ":"))
    text = text.replace('},{"text"', '},\n{"text"').replace('"corpora":', '\n"corpora":').replace('"stems":', '\n"stems":')
    (OUT / "scores.json").write_text(text + "\n")


main()
