"""Where encoders know what: edge probes on parts of speech, chunks, dependencies and entities, for several encoders, as a table.

    python tools/bench/probing_table.py --henson target/release/henson --data DATA --work DIR --model MINILM --model henson-12m --model ELMO \
        [--rows 4000] [--tasks pos,chunks,dependencies,entities] [--epochs 5] [--threads 2] [--dtype f32] [--device cpu|cuda]

DATA holds ud-english-ewt, conll2000-chunking and ner-wikiann-en. Of each training file so many sentences, evenly spaced, of each dev file a
quarter of that. Printed are, for each task and encoder, F1, that of a random encoder of the same shape, selectivity against the control task,
the centre of gravity and the expected layer, and the tasks in the order of both (Tenney et al. 2019b).
"""

import argparse
import json
import pathlib
import subprocess

SETS = {
    "pos": ("ud-english-ewt/en_ewt-ud-train.conllu.gz", "ud-english-ewt/en_ewt-ud-dev.conllu.gz"),
    "chunks": ("conll2000-chunking/train.txt.gz", "conll2000-chunking/test.txt.gz"),
    "dependencies": ("ud-english-ewt/en_ewt-ud-train.conllu.gz", "ud-english-ewt/en_ewt-ud-dev.conllu.gz"),
    "entities": ("ner-wikiann-en/train.txt.gz", "ner-wikiann-en/testa.txt.gz"),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--henson", default="target/release/henson")
    for name in ("data", "work"):
        parser.add_argument("--" + name, type=pathlib.Path, required=True)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--tasks", default=",".join(SETS))
    for name, default in (("rows", 4000), ("epochs", 5), ("threads", 2)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    flags = parser.parse_args()
    print("| encoder | task | F1 | random encoder | selectivity | centre of gravity | expected layer |\n|---|---|---|---|---|---|---|")
    orders = []
    for model in flags.model:
        name, found = pathlib.Path(model).name, {}
        for task in flags.tasks.split(","):
            out = flags.work / f"{name}-{task}"
            if not (out / "results.json").exists():
                train, dev = (flags.data / file for file in SETS[task])
                command = [flags.henson, "probe", "--model", model, "--task", task, "--train", train, "--dev", dev, "--out", out, "--random-encoder"]
                command += ["--epochs", flags.epochs, "--limit", flags.rows, "--set", f"dev_limit={flags.rows // 4}"]
                command += ["--threads", flags.threads, "--dtype", flags.dtype, "--device", flags.device]
                subprocess.run([str(part) for part in command], check=True, capture_output=True)
            found[task] = result = json.loads((out / "results.json").read_text())
            number = lambda value: "–" if value is None else f"{value:.2f}"
            percent = lambda value: "–" if value is None else f"{100 * value:.1f}"
            row = [percent(result["f1"]), percent(result["random_encoder"]["f1"]), percent(result["control"]["selectivity"]), number(result["centre_of_gravity"]), number(result["cumulative"]["expected_layer"])]
            print(f"| {name} | {task} | " + " | ".join(row) + " |", flush=True)
        for key, value in (("centre of gravity", lambda r: r["centre_of_gravity"]), ("expected layer", lambda r: r["cumulative"]["expected_layer"])):
            known = [task for task in found if value(found[task]) is not None]
            orders.append(f"{name}, {key}: " + " < ".join(sorted(known, key=lambda task: value(found[task]))))
    print("\n" + "\n".join(orders))


main()
