"""What distillation gives: three tasks, four ways to make a small student, several seeds, beside the teacher.

    python tools/bench/distil_table.py --henson target/release/henson --teacher MINILM --student DIR --data DATA --work DIR \
        [--seeds 0,1,2] [--tasks trec,sst2,sick] [--labels 2000] [--transfer 3000] [--test 1500] [--threads 1] [--dtype f32] [--device cpu|cuda] [--svg FILE]

MINILM is the model that teachers are fine-tuned from, DIR a small pre-trained student; the student from random weights has its config and
tokenizer. DATA holds trec-question-class, glue/SST-2 and sick. Of each training file so many rows have labels, for teacher and students, and
so many others are read without theirs. Ways: `fine-tuned` on the labels; `distilled` by the teacher on the texts without labels, then
fine-tuned on the labels (Turc et al. 2019); each from pre-trained and from random weights, with the same settings. Scores are the last
evaluation's on the test file (SST-2: the dev file). What is finished in the work directory is not run again. Prints a JSON line for each run,
then the table, and draws it.
"""

import argparse
import csv
import json
import pathlib
import random
import shutil
import statistics
import subprocess
import time

LENGTH = 64
TEACHER = {"epochs": 3, "learning_rate": 5e-5, "batch_size": 32, "max_length": LENGTH, "dropout": 0.1, "evals_per_epoch": 1 / 3}
STUDENT = {"epochs": 4, "learning_rate": 3e-4, "batch_size": 32, "max_length": LENGTH, "dropout": 0.1, "evals_per_epoch": 1 / 4,
           "distil.epochs": 4, "distil.learning_rate": 3e-4, "distil.temperature": 2.0}
WAYS = ["pre-trained, fine-tuned", "pre-trained, distilled", "random, fine-tuned", "random, distilled"]


def spaced(items, count):
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def table(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def trec(data):
    """Six classes of questions; those that are left out have no labels."""
    def rows(name):
        for line in open(data / "trec-question-class" / name, encoding="utf-8"):
            label, text = line.rstrip("\n").split(" ", 1)
            yield {"text": text, "label": label.split(":")[0]}
    return "classify", list(rows("train.txt")), list(rows("test.txt"))


def sst2(data):
    """Phrases with a sentiment."""
    rows = lambda name: [{"text": row["sentence"], "label": row["label"]} for row in table(data / "glue/SST-2" / name)]
    return "classify", rows("train.tsv"), rows("dev.tsv")


def sick(data):
    """Three classes of pairs."""
    def rows(name):
        for row in table(data / "sick" / name):
            yield {"sentence1": row["sentence_A"], "sentence2": row["sentence_B"], "label": row["entailment_judgment"]}
    return "pair", list(rows("SICK_train.txt")), list(rows("SICK_test_annotated.txt"))


TASKS = {"trec": trec, "sst2": sst2, "sick": sick}
NAMES = {"trec": "TREC questions", "sst2": "SST-2", "sick": "SICK entailment"}


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def plain_name(name):
    """A directory's: several models are told apart by commas."""
    return name.replace(", ", "-")


def run(flags, command, name, task, files, settings, seed, more=()):
    """One training run, and its score on the test file."""
    out = flags.work / task / plain_name(name)
    if not (out / "results.json").exists():
        arguments = [flags.henson, command, "--task", files["task"], "--out", out, "--seed", seed, "--threads", flags.threads, "--dtype", flags.dtype, "--device", flags.device, "--json"]
        arguments += ["--train", files["train"], "--dev", files["test"], *more]
        arguments += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        start = time.time()
        subprocess.run([str(part) for part in arguments], check=True, stdout=subprocess.DEVNULL)
        (out / "seconds.txt").write_text(str(time.time() - start))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    # The last evaluation: choosing the best of several would be choosing on the test file.
    accuracy = [line for line in lines if line["kind"] == "eval"][-1]["metrics"]["accuracy"]
    found = {"task": task, "way": name.rsplit("-", 1)[0], "seed": seed, "accuracy": accuracy, "seconds": float((out / "seconds.txt").read_text())}
    print(json.dumps(found), flush=True)
    return found


def speed(flags, model, files):
    """Texts a second, the median of three goes over the texts without labels, start and loading included."""
    seconds = []
    for _ in range(3):
        out = flags.work / "predictions"
        shutil.rmtree(out, ignore_errors=True)
        start = time.time()
        command = [flags.henson, "predict", "--model", model, "--data", files["transfer"], "--task", files["task"], "--out", out, "--threads", flags.threads, "--dtype", flags.dtype, "--device", flags.device]
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds.append(time.time() - start)
    return files["texts"] / statistics.median(seconds)


def one_task(flags, task):
    place = flags.work / task
    place.mkdir(parents=True, exist_ok=True)
    kind, rows, test = TASKS[task](flags.data)
    # In an order that does not depend on the file's; the rest is read without its labels.
    random.Random(0).shuffle(rows)
    train, rest = rows[:flags.labels], rows[flags.labels:flags.labels + flags.transfer]
    transfer = [{key: value for key, value in row.items() if key != "label"} for row in rest]
    test = spaced(test, flags.test)
    files = {"task": kind, "texts": len(transfer)}
    for name, rows in (("train", train), ("test", test), ("transfer", transfer)):
        files[name] = place / f"{name}.jsonl"
        write(files[name], rows)
    teacher = run(flags, "finetune", "teacher-0", task, files, TEACHER, 0, ["--model", flags.teacher])
    config = json.loads((flags.student / "config.json").read_text())
    sizes = {f"config.{key}": config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
    new = ["--model", "bert-tiny", "--tokenizer", flags.student]
    taught = ["--teacher", place / "teacher-0", "--transfer", files["transfer"], "--cache", place / "cache"]
    plain = {key: value for key, value in STUDENT.items() if not key.startswith("distil.")}
    runs = []
    for seed in flags.seeds:
        runs.append(run(flags, "finetune", f"pre-trained, fine-tuned-{seed}", task, files, plain, seed, ["--model", flags.student]))
        runs.append(run(flags, "distil", f"pre-trained, distilled-{seed}", task, files, STUDENT, seed, ["--model", flags.student, *taught]))
        runs.append(run(flags, "finetune", f"random, fine-tuned-{seed}", task, files, plain | sizes, seed, new))
        runs.append(run(flags, "distil", f"random, distilled-{seed}", task, files, STUDENT | sizes, seed, [*new, *taught]))
    return teacher, runs, files


def draw(path, rows):
    """Bars of the four ways for each task, with whiskers of a standard deviation, and a line where the teacher is."""
    colours = ["#9ecae1", "#08519c", "#fdd0a2", "#d94801"]
    width, height, left, bottom, group = 720, 300, 50, 240, 215
    low = 10 * int(10 * min(accuracy for _, _, ways in rows for accuracy, _ in ways) - 0.2)
    y = lambda accuracy: bottom - (bottom - 30) * (100 * accuracy - low) / (100 - low)
    text = lambda x, at, words, anchor="middle": f'<text x="{x}" y="{at}" text-anchor="{anchor}">{words}</text>'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
             f'<rect width="{width}" height="{height}" fill="white"/>']
    for tick in range(low, 101, 10):
        parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{y(tick / 100):.1f}" y2="{y(tick / 100):.1f}" stroke="#ddd"/>')
        parts.append(text(left - 6, f"{y(tick / 100) + 4:.1f}", tick, "end"))
    for i, (name, teacher, ways) in enumerate(rows):
        start = left + 15 + i * group
        for j, (accuracy, spread) in enumerate(ways):
            x = start + j * 42
            parts.append(f'<rect x="{x}" y="{y(accuracy):.1f}" width="36" height="{bottom - y(accuracy):.1f}" fill="{colours[j]}"/>')
            parts.append(f'<line x1="{x + 18}" x2="{x + 18}" y1="{y(accuracy - spread):.1f}" y2="{y(accuracy + spread):.1f}" stroke="black"/>')
        parts.append(f'<line x1="{start - 5}" x2="{start + 167}" y1="{y(teacher):.1f}" y2="{y(teacher):.1f}" stroke="black" stroke-dasharray="5 3"/>')
        parts.append(text(start + 81, bottom + 18, name))
    for j, way in enumerate(WAYS):
        x = left + j * 165
        parts.append(f'<rect x="{x}" y="{bottom + 32}" width="12" height="12" fill="{colours[j]}"/>' + text(x + 17, bottom + 43, way, "start"))
    parts.append(text(left, 18, "Accuracy in per cent; the broken line is the teacher", "start") + "</svg>")
    path.write_text("\n".join(parts) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--henson", default="target/release/henson")
    for name in ("teacher", "student", "data", "work"):
        parser.add_argument("--" + name, type=pathlib.Path, required=True)
    parser.add_argument("--seeds", default="0,1,2", type=lambda text: [int(seed) for seed in text.split(",")])
    parser.add_argument("--tasks", default="trec,sst2,sick")
    for name, default in (("labels", 2000), ("transfer", 3000), ("test", 1500), ("threads", 1)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--svg", type=pathlib.Path)
    flags = parser.parse_args()
    rows, lines = [], []
    for task in flags.tasks.split(","):
        teacher, runs, files = one_task(flags, task)
        ways = []
        for way in WAYS:
            own = [run["accuracy"] for run in runs if run["way"] == way]
            ways.append((statistics.mean(own), statistics.stdev(own) if len(own) > 1 else 0.0))
        rows.append((NAMES[task], teacher["accuracy"], ways))
        kept = ways[1][0] / teacher["accuracy"]
        fast = [speed(flags, flags.work / task / plain_name(name), files) for name in ("teacher-0", f"pre-trained, distilled-{flags.seeds[0]}")]
        cells = [f"{100 * mean:.1f} ± {100 * spread:.1f}" for mean, spread in ways]
        lines.append(f"| {NAMES[task]} | {100 * teacher['accuracy']:.1f} | " + " | ".join(cells) + f" | {100 * kept:.0f} % | {fast[1] / fast[0]:.1f}× |")
    print("| task | teacher | " + " | ".join(WAYS) + " | share kept | texts a second |")
    print("|---|---" + "|---" * 6 + "|")
    print("\n".join(lines))
    if flags.svg:
        draw(flags.svg, rows)


main()
