"""Train an encoder-decoder in PyTorch as `henson finetune --task seq2seq` did, from scratch, and write what it says to a dev file.

    python tools/bench/follow_seq2seq.py RUN TRAIN.tsv DEV.tsv OUT.txt [--threads 2] [--device cuda]

RUN is the directory of a finished run: its config.json, tokenizer.json and recipe.toml say what to build and how to train it. Files
have no header: a source, then one or several targets. Batches are drawn by another generator than henson's and padded; weights start
from transformers' initial values. There is no averaging of checkpoints. OUT.txt has a line for each row of DEV.tsv, for `henson eval --task seq2seq --predictions`.
"""

import argparse
import json
import os
import time
import tomllib
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
parser.add_argument("run", type=Path)
parser.add_argument("train", type=Path)
parser.add_argument("dev", type=Path)
parser.add_argument("out", type=Path)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
flags = parser.parse_args()
torch.set_num_threads(flags.threads)
torch.manual_seed(0)
torch.set_float32_matmul_precision("high")

recipe = tomllib.loads((flags.run / "recipe.toml").read_text())
config = transformers.AutoConfig.from_pretrained(flags.run)
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(flags.run / "tokenizer.json"))
pad, end = config.pad_token_id, config.eos_token_id


def ids(text, limit):
    found = tokenizer(text)["input_ids"][:limit]
    return found if found[-1] == end else found[: limit - 1] + [end]


def rows(path):
    return [line.split("\t") for line in path.read_text().splitlines()]


def padded(sequences, filler):
    longest = max(map(len, sequences))
    return torch.tensor([sequence + [filler] * (longest - len(sequence)) for sequence in sequences])


limit, target_limit = recipe.get("max_length", 512), recipe.get("max_target_length", 128)
pairs = [(ids(source, limit), ids(target, target_limit)) for source, *targets in rows(flags.train) for target in targets]
model = transformers.AutoModelForSeq2SeqLM.from_config(config).to(flags.device).train()
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(pairs):,} pairs")

matrices = [p for p in model.parameters() if p.dim() > 1]
vectors = [p for p in model.parameters() if p.dim() == 1]
optimizer = torch.optim.AdamW(
    [{"params": matrices, "weight_decay": recipe["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}],
    lr=recipe["learning_rate"], betas=(recipe["beta1"], recipe["beta2"]), eps=recipe["epsilon"], fused=True,
)
size = recipe["batch_size"]
steps = round(-(-len(pairs) // size) * recipe["epochs"])
warmup = int(steps * recipe["warmup"])
late = {"inverse-sqrt": lambda step: (max(warmup, 1) / step) ** 0.5, "linear": lambda step: (steps - step) / max(steps - warmup, 1)}
after = late[recipe.get("schedule", "linear")]
rate = lambda step: step / max(warmup, 1) if step < warmup else after(max(step, 1))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
order, start, seconds, total = [], time.time(), 0.0, 0.0
for step in range(steps):
    if not order:
        order = torch.randperm(len(pairs)).tolist()
    batch = [pairs[i] for i in order[:size]]
    order = order[size:]
    begin = time.time()
    inputs, labels = padded([s for s, _ in batch], pad), padded([t for _, t in batch], -100)
    inputs, labels = inputs.to(flags.device), labels.to(flags.device)
    with torch.autocast(flags.device, torch.bfloat16, enabled=recipe.get("dtype") == "bf16"):
        logits = model(input_ids=inputs, attention_mask=(inputs != pad).long(), labels=labels).logits
    loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=recipe["label_smoothing"])
    optimizer.zero_grad()
    loss.backward()
    # 0 is none.
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["clip"] or float("inf"))
    optimizer.step()
    schedule.step()
    seconds += time.time() - begin
    total += loss.detach()
    if (step + 1) % 100 == 0:
        print(f"step {step + 1} of {steps}: loss {total / 100:.4f}, {seconds:.0f} s", flush=True)
        total = 0.0
print(json.dumps({"steps": steps, "seconds": round(seconds, 1)}))

model.eval()
texts = []
with torch.no_grad():
    dev = [ids(source, limit) for source, *_ in rows(flags.dev)]
    for i in range(0, len(dev), 64):
        inputs = padded(dev[i : i + 64], pad).to(flags.device)
        written = model.generate(
            input_ids=inputs, attention_mask=(inputs != pad).long(), max_new_tokens=target_limit, num_beams=recipe["beams"],
            length_penalty=recipe["length_penalty"], do_sample=False,
        )
        texts += tokenizer.batch_decode(written, skip_special_tokens=True)
flags.out.write_text("".join(text.replace("\n", " ") + "\n" for text in texts))
