"""Make tests-data/features: what transformers makes of the examples of tasks, and answers from fixed logits.

    python tools/golden/task_features.py [OUTPUT_DIR]

features.json: questions with passages in windows, words with tags, pairs and choices, with BERT's two vocabularies: ids,
token_type_ids, offsets (code points) and labels as transformers' own examples make them.

answers.json: questions with windows, logits drawn here (multiples of 1/8, so that many are equal), and what the procedure
of Google's run_squad.py makes of them, written down once more below. Answers are cut out of the passage by offsets.
"""

import gzip
import json
import os
import random
import sys
import tempfile
from math import exp
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests-data/features"

PASSAGE = (
    "Jim Henson (September 24, 1936 \u2013 May 16, 1990) was an American puppeteer. He cre\u00e1ted the Muppets in 1955, "
    "\u201cSam and Friends\u201d, and co-founded The Jim Henson Foundation; the show's na\u00efve fr\u00f4g \U0001f438, Kermit, "
    "sang \u4e2d\u6587 at 3.5% of all antidisestablishmentarianism-free parties in Washington, D.C."
)
EMOJI = "\U0001f600\U0001f600 caf\u00e9 \U0001f468\u200d\U0001f469\u200d\U0001f467 na\u0308ive \ufffd e\u0301t\u00e9"

# question, passage, answer or None, which occurrence, max_length, overlap of windows
QUESTIONS = [
    ("Who was an American puppeteer?", PASSAGE, "Jim Henson", 0, 384, 128),
    ("Who was an American puppeteer?", PASSAGE, "Jim Henson", 1, 32, 8),
    ("When did Henson die?", PASSAGE, "May 16, 1990", 0, 24, 5),
    ("When was he born?", PASSAGE, "1936", 0, 20, 4),
    ("What did he create?", PASSAGE, "the Muppets", 0, 26, 6),
    ("Which animal?", PASSAGE, "fr\u00f4g", 0, 40, 10),
    # Inside of words and of pieces.
    ("Free of what?", PASSAGE, "establishment", 0, 64, 16),
    ("How much?", PASSAGE, "3.5", 0, 64, 16),
    ("What is half a puppet?", PASSAGE, "pupp", 0, 64, 16),
    ("Which letters?", PASSAGE, "\u6587", 0, 64, 16),
    ("Which picture?", PASSAGE, "\U0001f438", 0, 30, 9),
    ("Where?", PASSAGE, "Washington, D.C.", 0, 22, 3),
    ("Where to?", PASSAGE, "D.C", 0, 22, 3),
    # No answer, a long question, windows without overlap, small windows.
    ("Who was Kermit's father?", PASSAGE, None, 0, 48, 12),
    ("who " * 80 + "?", PASSAGE, "Kermit", 0, 100, 20),
    ("When?", PASSAGE, "in 1955", 0, 16, 0),
    ("What?", PASSAGE, "Muppets in 1955, \u201cSam and Friends\u201d", 0, 30, 12),
    ("Caf\u00e9?", EMOJI, "caf\u00e9", 0, 384, 128),
    ("Naive?", EMOJI, "na\u0308ive", 0, 20, 4),
    ("\u00c9t\u00e9?", EMOJI, "e\u0301t\u00e9", 0, 20, 4),
    ("\U0001f600?", EMOJI, "\U0001f600\U0001f600", 0, 20, 4),
    ("Anything?", "", None, 0, 384, 128),
    ("", "Short.", "Short", 0, 384, 128),
]

TAGGED = [
    (["Jim", "Henson", "was", "a", "puppeteer", "."], [1, 2, 0, 0, 0, 0], 128),
    (["Caf\u00e9", "na\u00efve", "\U0001f438", "U.S.", "O'Neill", "co-founded", "3.5%"], [3, 0, 0, 1, 2, 0, 4], 128),
    (["antidisestablishmentarianism", "in", "\u4e2d\u6587", "(", "1955", ")"], [0, 1, 2, 3, 4, 0], 128),
    # Words that leave nothing, and an end that is cut off inside of a word.
    (["\u200b", "a", "\ufffd", "b", "\x01"], [1, 2, 3, 4, 1], 128),
    (["the", "puppeteers", "antidisestablishmentarianism", "end"], [0, 1, 2, 3], 10),
    (["na\u0308ive", "e\u0301t\u00e9", "\u0301x"], [1, 2, 3], 128),
]

PAIRS = [
    ("A man inspects the uniform of a figure.", "The man is sleeping.", 128),
    ("A man inspects the uniform of a figure in some East Asian country.", "The man is sleeping.", 16),
    ("Sleeping.", "A man inspects the uniform of a figure in some East Asian country.", 12),
    ("One two three four five six seven.", "Eight nine ten eleven twelve thirteen.", 11),
    ("Na\u00efve \U0001f438!", "", 128),
]

CHOICES = [
    ("Students lower their eyes nervously. She", ["pats her shoulder.", "turns with two students.", "\u00e9coute.", ""], 64),
    ("Students lower their eyes nervously, and then they look up again. She", ["pats.", "turns with two students."], 14),
]


def tokenizers():
    found = {}
    for name, lower in [("bert-base-uncased", True), ("bert-base-cased", False)]:
        packed = ROOT / f"crates/text/tests/data/{name}.vocab.txt.gz"
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "vocab.txt"
            path.write_bytes(gzip.decompress(packed.read_bytes()))
            found[name] = transformers.BertTokenizer(vocab=str(path), do_lower_case=lower)
    return found


def window_targets(ids, offsets, sequence_ids, cls, start_char, end_char):
    """The labels of transformers' run_qa.py. Its search for the start runs past the passage when the answer begins at
    the window's last piece, and then returns the final position of the (padded) sequence; here it stops at the passage."""
    null = ids.index(cls)
    inside = [i for i, s in enumerate(sequence_ids) if s == 1]
    if start_char is None or not inside:
        return null, null
    first, last = inside[0], inside[-1]
    if not (offsets[first][0] <= start_char and offsets[last][1] >= end_char):
        return null, null
    while first <= last and offsets[first][0] <= start_char:
        first += 1
    while offsets[last][1] >= end_char:
        last -= 1
    return first - 1, last + 1


def question_windows(tokenizer, question, passage, max_length, overlap):
    """What run_qa.py does, with the question cut to 64 pieces as in run_squad.py."""
    pieces = tokenizer(question, add_special_tokens=False)["input_ids"]
    if len(pieces) > 64:
        question = question[: tokenizer(question, add_special_tokens=False).token_to_chars(63).end]
    # As lists: a single call takes an empty second text for none at all.
    return tokenizer(
        [question],
        [passage],
        truncation="only_second",
        max_length=max_length,
        stride=overlap,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )


def make_features(tokenizer):
    out = {"questions": [], "tagged": [], "pairs": [], "choices": []}
    for question, passage, answer, occurrence, max_length, overlap in QUESTIONS:
        encoded = question_windows(tokenizer, question, passage, max_length, overlap)
        start = end = None
        if answer is not None:
            start = -1
            for _ in range(occurrence + 1):
                start = passage.index(answer, start + 1)
            end = start + len(answer)
        windows = []
        for i, ids in enumerate(encoded["input_ids"]):
            sequence_ids, offsets = encoded.sequence_ids(i), encoded["offset_mapping"][i]
            targets = window_targets(ids, offsets, sequence_ids, tokenizer.cls_token_id, start, end)
            windows.append(
                {
                    "ids": ids,
                    "segments": encoded["token_type_ids"][i],
                    "offsets": [list(o) if s is not None else None for o, s in zip(offsets, sequence_ids)],
                    "targets": targets,
                }
            )
        entry = {"question": question, "passage": passage, "max_length": max_length, "overlap": overlap}
        out["questions"].append(entry | {"answer": [start, end] if answer else None, "windows": windows})
    for words, labels, max_length in TAGGED:
        encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=max_length)
        of_pieces, before = [], None
        for word in encoded.word_ids():
            of_pieces.append(-100 if word is None or word == before else labels[word])
            before = word
        entry = {"words": words, "labels": labels, "max_length": max_length}
        out["tagged"].append(entry | {"ids": encoded["input_ids"], "of_pieces": of_pieces})
    for first, second, max_length in PAIRS:
        encoded = tokenizer([first], [second], truncation="longest_first", max_length=max_length)
        entry = {"first": first, "second": second, "max_length": max_length}
        out["pairs"].append(entry | {"ids": encoded["input_ids"][0], "segments": encoded["token_type_ids"][0]})
    for context, endings, max_length in CHOICES:
        encoded = tokenizer([context] * len(endings), endings, truncation="longest_first", max_length=max_length)
        entry = {"context": context, "choices": endings, "max_length": max_length}
        out["choices"].append(entry | {"ids": encoded["input_ids"], "segments": encoded["token_type_ids"]})
    return out




def predict(windows, passage, n_best, longest, threshold):
    """From logits to answers, step by step as in run_squad.py. `windows` hold tokens' offsets (None outside of the
    passage), whether a token has most context there, and logits. `threshold` is None for SQuAD 1.1."""
    found, null = [], None
    for window in windows:
        best = lambda side: sorted(range(len(window[side])), key=lambda i: window[side][i], reverse=True)[:n_best]
        score = window["start"][0] + window["end"][0]
        if null is None or score < null[0] + null[1]:
            null = (window["start"][0], window["end"][0])
        for start in best("start"):
            for end in best("end"):
                if window["offsets"][start] is None or window["offsets"][end] is None:
                    continue
                if not window["most_context"][start] or end < start or end - start + 1 > longest:
                    continue
                text = passage[window["offsets"][start][0] : window["offsets"][end][1]]
                found.append((text, window["start"][start], window["end"][end]))
    if threshold is not None:
        found.append(("", *null))
    found.sort(key=lambda f: f[1] + f[2], reverse=True)
    kept = []
    for candidate in found:
        if len(kept) >= n_best:
            break
        if candidate[0] not in [k[0] for k in kept]:
            kept.append(candidate)
    if threshold is not None and "" not in [k[0] for k in kept]:
        kept.append(("", *null))
    highest = max(k[1] + k[2] for k in kept)
    weights = [exp(k[1] + k[2] - highest) for k in kept]
    n_best_list = [[k[0], k[1], k[2], w / sum(weights)] for k, w in zip(kept, weights)]
    answer = next(k for k in kept if k[0])
    result = {"n_best": n_best_list, "answer": answer[0], "odds": None}
    if threshold is not None:
        result["odds"] = null[0] + null[1] - answer[1] - answer[2]
        if result["odds"] > threshold:
            result["answer"] = ""
    return result


def make_answers(tokenizer):
    rng = random.Random(7)
    cases = [
        # question, passage, max_length, overlap, n_best, longest, threshold, how much [CLS] is favoured
        ("Who was he?", PASSAGE, 30, 12, 20, 30, None, 0),
        ("Who was he?", PASSAGE, 30, 12, 5, 4, None, 0),
        ("Who was he?", PASSAGE, 26, 13, 20, 30, 0.0, 0),
        ("Who was he?", PASSAGE, 26, 13, 20, 30, 0.0, 8),
        ("Who was he?", PASSAGE, 26, 13, 20, 30, 3.0, 10),
        ("Who was he?", PASSAGE, 22, 9, 6, 3, -2.5, 7),
        ("Who was he?", PASSAGE, 384, 128, 20, 30, 0.0, 2),
        ("Caf\u00e9?", EMOJI, 18, 4, 20, 30, None, 0),
        # The same text over and over: duplicates.
        ("What?", "the show the show the show the show the show the show", 13, 3, 8, 3, -1.0, 1),
    ]
    out = []
    for question, passage, max_length, overlap, n_best, longest, threshold, favour in cases:
        encoded = question_windows(tokenizer, question, passage, max_length, overlap)
        offsets = encoded["offset_mapping"]
        shown = [[i for i, s in enumerate(encoded.sequence_ids(w)) if s == 1] for w in range(len(offsets))]
        room = len(shown[0])
        windows = []
        for w, positions in enumerate(shown):
            first = w * (room - overlap)
            most = []
            for i in range(len(offsets[w])):
                if i not in positions:
                    most.append(False)
                    continue
                piece, best = first + positions.index(i), None
                for other, theirs in enumerate(shown):
                    begin = other * (room - overlap)
                    if begin <= piece < begin + len(theirs):
                        context = min(piece - begin, begin + len(theirs) - 1 - piece) + 0.01 * len(theirs)
                        if best is None or context > best[0]:
                            best = (context, other)
                most.append(best[1] == w)
            draw = lambda: [rng.randint(-40, 40) / 8 for _ in offsets[w]]
            start, end = draw(), draw()
            start[0] += favour
            end[0] += favour
            # Some logits of the question and of [SEP] among the best, too.
            inside = [list(o) if i in positions else None for i, o in enumerate(offsets[w])]
            windows.append({"offsets": inside, "most_context": most, "start": start, "end": end})
        expected = predict(windows, passage, n_best, longest, threshold)
        case = {"question": question, "passage": passage, "max_length": max_length, "overlap": overlap}
        case |= {"n_best": n_best, "longest": longest, "threshold": threshold, "expected": expected}
        out.append(case | {"logits": [[w["start"], w["end"]] for w in windows]})
    return out


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    found = tokenizers()
    features = {name: make_features(tokenizer) for name, tokenizer in found.items()}
    text = json.dumps(features, ensure_ascii=False, separators=(",", ":"))
    (OUT / "features.json").write_text(text.replace('{"question"', '\n{"question"') + "\n")
    answers = json.dumps(make_answers(found["bert-base-uncased"]), ensure_ascii=False, separators=(",", ":"))
    (OUT / "answers.json").write_text(answers.replace('{"question"', '\n{"question"') + "\n")
    for name, made in features.items():
        print(name, {kind: len(entries) for kind, entries in made.items()})
        print("  windows", sum(len(q["windows"]) for q in made["questions"]))
    for case in json.loads(answers):
        print(case["expected"]["answer"], case["expected"]["odds"], len(case["expected"]["n_best"]), len(case["logits"]))


if __name__ == "__main__":
    main()
