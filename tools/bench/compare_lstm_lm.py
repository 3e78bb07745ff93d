"""An LSTM language model trained by henson and by PyTorch: the sizes of Zaremba et al. (2014), alternating, tokens a second of each.

    python tools/bench/compare_lstm_lm.py --henson target/release/henson --text FILE [--model lstm-medium] [--steps 60] \
        [--batch 20] [--unroll 35] [--vocabulary 10000] [--rounds 3] [--threads 2] [--device cpu|cuda] [--dtype f32|bf16] \
        [--optimizer sgd|adamw] [--work DIR]

henson makes a tokenizer and a corpus of FILE and trains by the model's recipe (running text, carried states, clipped gradient descent, dropout
before, between and behind the layers), PyTorch does the same on random tokens: `nn.LSTM`, dropout, a softmax over the vocabulary,
`clip_grad_norm_`, SGD or fused AdamW, states carried and detached; on a GPU that is cuDNN's LSTM, with TF32 in f32 and autocast in bf16. Both
rates are those of the second half of the steps. `--compile` gives the peer `torch.compile`. Prints the medians over the rounds and their ratio.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys

# Layers' width and dropout.
SIZES = {"lstm-small": (200, 0.0), "lstm-medium": (650, 0.5), "lstm-large": (1500, 0.65)}

PEER = r"""
import json, sys, time
import torch
from torch import nn
flags = json.loads(sys.argv[1])
device = flags["device"]
torch.set_num_threads(flags["threads"])
torch.set_float32_matmul_precision("high")
torch.manual_seed(0)
H, V, B, L = flags["hidden"], flags["vocabulary"], flags["batch"], flags["unroll"]
table, lstm, head = nn.Embedding(V, H), nn.LSTM(H, H, 2, dropout=flags["dropout"]), nn.Linear(H, V)
drop = nn.Dropout(flags["dropout"])
parameters = [p for module in (table, lstm, head) for p in module.to(device).parameters()]
plain = flags["optimizer"] == "sgd"
optimizer = torch.optim.SGD(parameters, lr=1.0, fused=True) if plain else torch.optim.AdamW(parameters, lr=1e-3, fused=True)
text = torch.randint(0, V, (flags["steps"] * L + 1, B), device=device)
states = (torch.zeros(2, B, H, device=device), torch.zeros(2, B, H, device=device))
sync = torch.cuda.synchronize if device == "cuda" else lambda: None

def loss_of(inputs, targets, states):
    with torch.autocast(device, torch.bfloat16, enabled=flags["dtype"] == "bf16"):
        x, states = lstm(drop(table(inputs)), states)
        logits = head(drop(x))
    return nn.functional.cross_entropy(logits.float().view(-1, V), targets.reshape(-1)) * L, states

if flags["compile"]:
    loss_of = torch.compile(loss_of)
for i in range(flags["steps"]):
    if i == flags["steps"] // 2:
        sync()
        start = time.perf_counter()
    loss, states = loss_of(text[i * L : (i + 1) * L], text[i * L + 1 : (i + 1) * L + 1], states)
    states = tuple(state.detach() for state in states)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 5.0)
    optimizer.step()
sync()
print(json.dumps({"tokens_per_s": B * L * (flags["steps"] - flags["steps"] // 2) / (time.perf_counter() - start)}))
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--henson", default="target/release/henson")
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--model", default="lstm-medium", choices=SIZES)
    for name, default in (("steps", 60), ("batch", 20), ("unroll", 35), ("vocabulary", 10000), ("rounds", 3), ("threads", 2)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--dtype", default="f32", choices=("f32", "bf16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--optimizer", default="sgd", choices=("sgd", "adamw"))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("local/compare-lstm-lm"))
    flags = parser.parse_args()
    flags.work.mkdir(parents=True, exist_ok=True)

    def run(*arguments):
        subprocess.run([str(part) for part in (flags.henson, *arguments)], check=True, stdout=subprocess.DEVNULL)

    tokenizer, corpus = flags.work / f"tokenizer-{flags.vocabulary}", flags.work / f"corpus-{flags.vocabulary}"
    if not corpus.exists():
        run("tokenizer", "train", "--kind", "wordpiece", "--vocab-size", flags.vocabulary, "--out", tokenizer, flags.text)
        run("data", "build", "--tokenizer", tokenizer, "--out", corpus, flags.text)

    def henson():
        out = flags.work / "henson"
        shutil.rmtree(out, ignore_errors=True)
        recipe = flags.work / "recipe.toml"
        recipe.write_text(
            f'model = "{flags.model}"\nobjective = "causal"\npacking = "stream"\nsequence_length = {flags.unroll}\nsteps = {flags.steps}\n'
            f'batch_size = {flags.batch}\noptimizer = "{flags.optimizer}"\nlearning_rate = {1.0 if flags.optimizer == "sgd" else 1e-3}\nschedule = "constant"\nwarmup_steps = 0\nweight_decay = 0.0\nclip = 5.0\n'
            f'log_every = {flags.steps // 2}\ndtype = "{flags.dtype}"\n')
        run("pretrain", recipe, "--data", corpus, "--out", out, "--threads", flags.threads, "--device", flags.device)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return [line["tokens_per_s"] for line in lines if "tokens_per_s" in line][-1]

    def peer():
        hidden, dropout = SIZES[flags.model]
        settings = {name: getattr(flags, name) for name in ("steps", "batch", "unroll", "vocabulary", "threads", "dtype", "device", "optimizer", "compile")}
        settings |= {"hidden": hidden, "dropout": dropout}
        done = subprocess.run([sys.executable, "-c", PEER, json.dumps(settings)], check=True, capture_output=True, text=True).stdout
        return json.loads(done)["tokens_per_s"]

    found = {"henson": [], "PyTorch": []}
    for _ in range(flags.rounds):
        found["henson"].append(henson())
        found["PyTorch"].append(peer())
    medians = {name: statistics.median(values) for name, values in found.items()}
    for name, value in medians.items():
        print(f"{name:8} {value:9.1f} tokens/s  {value / medians['PyTorch']:.2f}x  ({', '.join(f'{one:.0f}' for one in found[name])})")


main()
