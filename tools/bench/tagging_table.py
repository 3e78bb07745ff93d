"""Section 5.3 of Devlin et al. (2019) with what came before: one tagging set, from a BiLSTM-CRF on random vectors to a fine-tuned BERT.

    python tools/bench/tagging_table.py --henson target/release/henson --data DATA --work DIR --elmo ELMO --bert henson-12m --bert MINILM \
        [--word-vectors FILE] [--seeds 0,1,2] [--rows 5000] [--threads 2] [--dtype f32] [--device cpu|cuda] [--only WAY]

DATA holds ner-wikiann-en. ELMO is a directory that `henson pretrain recipes/elmo-tiny.toml` wrote (any size), FILE word vectors
(tools/bench/word_vectors.py makes some). So many sentences of the training file, evenly spaced, 2,000 of the dev file to choose the best epoch by,
5,000 of the test file to score. Fine-tuning has the defaults that henson chooses by size. What is finished in the work directory is not run again. Prints a JSON line for each run, then the table.
"""

import argparse
import gzip
import json
import pathlib
import statistics
import subprocess
import time


def sentences(path):
    blocks = gzip.open(path, "rt", encoding="utf-8").read().split("\n\n")
    return [block.strip("\n") for block in blocks if block.strip() and not block.startswith("-DOCSTART-")]


def spaced(items, count):
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def ways(flags):
    """Each with what `finetune` gets."""
    tagger = ["--frozen", "--head", "bilstm", "--crf", "--set", "hidden_size=400", "--epochs", "10"]
    yield "BiLSTM-CRF, random vectors", ["--model", "bilstm-crf"]
    yield "the same with characters", ["--model", "bilstm-cnn-crf"]
    if flags.word_vectors:
        yield "BiLSTM-CRF, word vectors", ["--model", "bilstm-crf", "--word-vectors", flags.word_vectors]
        yield "the same with characters, word vectors", ["--model", "bilstm-cnn-crf", "--word-vectors", flags.word_vectors]
    if flags.elmo:
        yield "ELMo frozen, layers mixed", ["--model", flags.elmo, "--layers", "mix-whole", *tagger]
    for bert in flags.bert:
        name = pathlib.Path(bert).name
        yield f"{name} frozen, last four layers", ["--model", bert, "--layers", "concat-last-4", *tagger]
        yield f"{name} fine-tuned", ["--model", bert]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--henson", default="target/release/henson")
    for name in ("data", "work"):
        parser.add_argument("--" + name, type=pathlib.Path, required=True)
    parser.add_argument("--elmo")
    parser.add_argument("--bert", action="append", default=[])
    parser.add_argument("--word-vectors")
    parser.add_argument("--seeds", default="0,1,2", type=lambda text: [int(seed) for seed in text.split(",")])
    for name, default in (("rows", 5000), ("threads", 2)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only")
    flags = parser.parse_args()
    flags.work.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, source, count in (("train", "train", flags.rows), ("dev", "testa", 2000), ("test", "testb", 5000)):
        files[name] = flags.work / f"{name}.txt"
        kept = spaced(sentences(flags.data / f"ner-wikiann-en/{source}.txt.gz"), count)
        files[name].write_text("\n\n".join(kept) + "\n", encoding="utf-8")
    compute = ["--threads", flags.threads, "--device", flags.device, "--dtype", flags.dtype]
    lines = []
    for way, arguments in ways(flags):
        if flags.only and flags.only not in way:
            continue
        scores, seconds = [], []
        for seed in flags.seeds:
            out = flags.work / f"{way.replace(', ', '-').replace(' ', '-')}-{seed}"
            if not (out / "score.json").exists():
                start = time.time()
                command = [flags.henson, "finetune", "--task", "ner", "--train", files["train"], "--dev", files["dev"], "--out", out, "--seed", seed, *arguments, *compute]
                subprocess.run([str(part) for part in command], check=True, capture_output=True)
                took = time.time() - start
                command = [flags.henson, "eval", "--task", "ner", "--model", out, "--data", files["test"], "--json", *compute]
                found = json.loads(subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout)
                (out / "score.json").write_text(json.dumps({"f1": found["f1"], "seconds": took}))
            found = json.loads((out / "score.json").read_text())
            print(json.dumps({"way": way, "seed": seed, **found}), flush=True)
            scores.append(100 * found["f1"])
            seconds.append(found["seconds"])
        spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
        lines.append(f"| {way} | {statistics.mean(scores):.1f}{spread} | {statistics.median(seconds):.0f} |")
    print("| | test F1 | seconds |\n|---|---|---|\n" + "\n".join(lines))


main()
