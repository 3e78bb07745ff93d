"""henson beside sentence-transformers: the same training of sentence vectors, alternating, with the time and the score of each.

    python tools/bench/compare_sentences.py --henson target/release/henson --model MINILM --data DATA [--task pairs|scores|sick|retrieval] \
        [--steps 30] [--batch 32] [--length 128] [--rounds 3] [--threads 2] [--seeds 0] [--lr 2e-5] [--dtype f32] [--device cpu|cuda] [--work DIR] \
        [--set SET]

MINILM is a directory of sentence-transformers (`cargo xtask minilm` prints one), DATA holds glue/STS-B, sick and squad. `pairs`: questions and
paragraphs of SQuAD (--questions of each paragraph at most) by MultipleNegativesRankingLoss (`loss=ranking`); `scores`: STS-B's training file by CosineSimilarityLoss; `sick`: SICK's.
Both sides train for the same number of steps in f32, or in bf16 (the peer by autocast), on the same rows, with AdamW, a linear rate with 10% warm-up and clipping at 1, and
score STS-B's dev file afterwards (Spearman), with `sick` SICK's test file. `retrieval` trains on SET/pairs.jsonl as `pairs` does and scores by nDCG@10 how
SET's queries find their paragraphs (tools/bench/squad_retrieval.py makes a SET). The peer is a plain loop over the losses of sentence-transformers, without
its Trainer. `train_s` is the training itself, `seconds` the whole process. `steps_s` is the second half of the steps, which on a GPU is
without what is compiled and recorded at the start. Prints a JSON line for each run; at the end the medians of the times
and their quotients, and the means of the scores with their standard deviations.

Quality, an epoch and five seeds:    --task scores --steps 180 --length 64 --rounds 1 --seeds 0,1,2,3,4    (and --task sick --steps 141)
Time, on a machine that does nothing else:    --task pairs --steps 30 --length 128 --rounds 5 --threads 2    (and --task scores)
"""

import argparse
import gzip
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import time


def table(path, columns, scale):
    """Pairs with scores from 0 to 1; GLUE's and SICK's files quote nothing."""
    lines = [line.rstrip("\n").split("\t") for line in open(path, encoding="utf-8-sig")][1:]
    first, second, score = columns
    return [{"sentence1": line[first], "sentence2": line[second], "score": scale(float(line[score]))} for line in lines]


def rows(flags):
    """Those to train on and those to score."""
    data = pathlib.Path(flags.data)
    stsb = lambda name: table(data / "glue/STS-B" / name, (7, 8, 9), lambda score: score / 5)
    sick = lambda name: table(data / "sick" / name, (1, 2, 3), lambda score: (score - 1) / 4)
    if flags.task == "retrieval":
        found = [json.loads(line) for line in (flags.set / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    elif flags.task == "pairs":
        articles = json.load(gzip.open(data / "squad/devsplit-train-v1.1.json.gz"))["data"]
        found = [{"anchor": question["question"].strip(), "positive": paragraph["context"]}
                 for article in articles for paragraph in article["paragraphs"] for question in paragraph["qas"][:flags.questions]]
    else:
        found = sick("SICK_train.txt") if flags.task == "sick" else stsb("train.tsv")
    dev = sick("SICK_test_annotated.txt") if flags.task == "sick" else stsb("dev.tsv")
    count = min(flags.steps * flags.batch, len(found))
    return [found[i * len(found) // count] for i in range(count)], dev


def henson(flags, train, dev, seed):
    out = pathlib.Path(flags.work) / "henson"
    shutil.rmtree(out, ignore_errors=True)
    loss = "ranking" if flags.task in ("pairs", "retrieval") else "cosine"
    sets = {"batch_size": flags.batch, "epochs": 1, "learning_rate": flags.lr, "max_length": flags.length, "warmup": 0.1,
            "weight_decay": 0.0, "epsilon": 1e-8, "evals_per_epoch": 1, "log_every": 1}
    # On the device where it can be: that is what users get without `loss`.
    command = [flags.henson, "finetune", "--task", "embed", "--model", flags.model, "--train", str(train), "--out", str(out)]
    command += ["--dev", "none" if flags.task == "retrieval" else str(dev), "--seed", str(seed), "--threads", str(flags.threads), "--dtype", flags.dtype, "--device", flags.device, "--json"]
    command += [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    start = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds = time.time() - start
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    if flags.task == "retrieval":
        scored = [flags.henson, "eval", "--task", "retrieval", "--model", str(out), "--data", str(flags.set), "--threads", str(flags.threads), "--dtype", flags.dtype, "--device", flags.device, "--json"]
        score = json.loads(subprocess.run(scored, check=True, capture_output=True, text=True).stdout)["ndcg@10"]
        seconds = time.time() - start
    else:
        score = [line for line in lines if line["kind"] == "eval"][-1]["metrics"]["spearman"]
    results = json.loads((out / "results.json").read_text())
    logged = [line for line in lines if line["kind"] == "train"]
    steps_s = logged[-1]["seconds"] - logged[len(logged) // 2 - 1]["seconds"]
    return {"who": "henson", "steps_s": steps_s, "loss": loss, "seed": seed, "score": score, "train_s": results["seconds"], "seconds": seconds}


PEER = r"""
import json, sys, time
flags = json.loads(sys.argv[1])
import torch
torch.set_num_threads(flags["threads"])
torch.manual_seed(flags["seed"])
torch.set_float32_matmul_precision("high")
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from scipy.stats import spearmanr
model = SentenceTransformer(flags["model"], device=flags["device"])
model.max_seq_length = flags["length"]
rows = [json.loads(line) for line in open(flags["train"])]
order = torch.randperm(len(rows)).tolist()
scores = flags["task"] in ("scores", "sick")
loss = (losses.CosineSimilarityLoss if scores else losses.MultipleNegativesRankingLoss)(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=flags["lr"], weight_decay=0.0, fused=True)
sync = torch.cuda.synchronize if flags["device"] == "cuda" else lambda: None
steps = -(-len(rows) // flags["batch"])
warm = int(0.1 * steps)
rate = lambda step: step / max(1, warm) if step < warm else max(0.0, (steps - step) / max(1, steps - warm))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
model.train()
start = time.time()
for step in range(steps):
    if step == steps // 2:
        sync()
        half = time.time()
    batch = [rows[i] for i in order[step * flags["batch"]:(step + 1) * flags["batch"]]]
    columns = ("sentence1", "sentence2") if scores else ("anchor", "positive")
    features = [model.preprocess([row[column] for row in batch]) for column in columns]
    features = [{name: x.to(flags["device"]) if hasattr(x, "to") else x for name, x in one.items()} for one in features]
    labels = torch.tensor([row["score"] for row in batch], device=flags["device"]) if scores else None
    with torch.autocast(flags["device"], torch.bfloat16, enabled=flags["dtype"] == "bf16"):
        value = loss(features, labels)
    optimizer.zero_grad()
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
sync()
trained, second_half = time.time() - start, time.time() - half
model.eval()
if flags["task"] == "retrieval":
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    read = lambda name: {row["_id"]: row["text"] for row in map(json.loads, open(flags["set"] + "/" + name))}
    judged = {}
    for line in list(open(flags["set"] + "/qrels/test.tsv"))[1:]:
        judged.setdefault(line.split("\t")[0], set()).add(line.split("\t")[1])
    with torch.autocast(flags["device"], torch.bfloat16, enabled=flags["dtype"] == "bf16"):
        found = InformationRetrievalEvaluator(read("queries.jsonl"), read("corpus.jsonl"), judged, write_csv=False)(model)
    print(json.dumps({"score": next(value for name, value in found.items() if name.endswith("cosine_ndcg@10")), "train_s": trained, "steps_s": second_half, "steps": steps}))
    sys.exit()
dev = [json.loads(line) for line in open(flags["dev"])]
first, second = (model.encode([row[column] for row in dev], normalize_embeddings=True) for column in ("sentence1", "sentence2"))
cosines = (first * second).sum(1)
print(json.dumps({"score": float(spearmanr(cosines, [row["score"] for row in dev])[0]), "train_s": trained, "steps_s": second_half, "steps": steps}))
"""


def peer(flags, train, dev, seed):
    settings = {name: getattr(flags, name) for name in ("model", "task", "batch", "length", "threads", "lr", "dtype", "device")}
    settings |= {"train": str(train), "seed": seed, "dev": str(dev), "set": str(flags.set)}
    start = time.time()
    done = subprocess.run([sys.executable, "-c", PEER, json.dumps(settings)], check=True, capture_output=True, text=True).stdout
    found = json.loads(done.strip().splitlines()[-1])
    return {"who": "sentence-transformers", "seed": seed, **found, "seconds": time.time() - start}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--henson", default="target/release/henson")
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--task", choices=["pairs", "scores", "sick", "retrieval"], default="pairs")
    for name, default in (("steps", 30), ("batch", 32), ("length", 128), ("rounds", 3), ("threads", 2), ("questions", 1)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--work", default="local/compare-sentences")
    parser.add_argument("--set", type=pathlib.Path)
    flags = parser.parse_args()
    if (flags.task == "retrieval") != (flags.set is not None):
        parser.error("--set goes with --task retrieval")
    pathlib.Path(flags.work).mkdir(parents=True, exist_ok=True)
    files = [pathlib.Path(flags.work) / f"{flags.task}-{name}.jsonl" for name in ("train", "dev")]
    for path, found in zip(files, rows(flags)):
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
    runs = []
    for _ in range(flags.rounds):
        for seed in map(int, flags.seeds.split(",")):
            for run in (henson, peer):
                runs.append(run(flags, *files, seed))
                print(json.dumps(runs[-1]), flush=True)
    medians = {}
    for who in ("henson", "sentence-transformers"):
        own = [run for run in runs if run["who"] == who]
        medians[who] = {name: statistics.median(run[name] for run in own) for name in ("steps_s", "train_s", "seconds")}
        scores = [run["score"] for run in own]
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        print(who, medians[who], f"score {statistics.mean(scores):.4f} ± {spread:.4f} of {len(scores)}")
    for name in ("steps_s", "train_s", "seconds"):
        print(f"{name}: {medians['sentence-transformers'][name] / medians['henson'][name]:.2f}x")


main()
