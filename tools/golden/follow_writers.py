"""Follows a pre-training run of a model that writes with transformers: the same initial weights, batches, rates and optimizer.

    SETS="--set dropout=0.0 --set log_every=1 --set steps=300 --set batch_size=8 --set sequence_length=128 --set eval_every=0 …"
    henson pretrain --model gpt2-tiny --data SHARDS --out RUN $SETS --set objective=causal --set packing=blocks --stop-at 0
    henson pretrain (the same, without --stop-at)
    henson data export SHARDS --out BATCHES.safetensors --batches 300 --batch-size 8 --sequence-length 128 \
        --objective causal --packing blocks --short-sequences 0
    python tools/golden/follow_writers.py RUN BATCHES.safetensors

The optimizer is AdamW, or Adafactor with adafactor.min_side=1. Prints both losses of some steps, the largest difference, and the
time of a step here and there; exits 1 if the losses of the last tenth differ by more than 1% on average.
"""

import json
import sys
import time
import tomllib

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.optimization import Adafactor


def main(run: str, batches: str) -> int:
    recipe = tomllib.load(open(f"{run}/recipe.toml", "rb"))
    start = f"{run}/checkpoints/step-0"
    writes = AutoConfig.from_pretrained(start).is_encoder_decoder
    model = (AutoModelForSeq2SeqLM if writes else AutoModelForCausalLM).from_pretrained(start)
    model.train()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": recipe["weight_decay"]}, {"params": rest, "weight_decay": 0.0}]
    if recipe["optimizer"] == "adafactor":
        own = recipe["adafactor"]
        assert own["min_side"] == 1, "transformers divides every matrix"
        optimizer = Adafactor(groups, lr=1.0, scale_parameter=own["scale_parameter"], relative_step=False)
    else:
        betas = (recipe["beta1"], recipe["beta2"])
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=recipe["epsilon"])
    ours = {}
    for line in map(json.loads, open(f"{run}/metrics.jsonl")):
        if line["kind"] == "train":
            ours[line["step"]] = line
    data = load_file(batches)
    worst, differences, seconds = 0.0, [], []
    steps = recipe["steps"]
    for step in range(1, steps + 1):
        batch = {key: data[f"batch.{step - 1:04}.{key}"] for key in ("input_ids", "attention_mask", "labels")}
        begin = time.perf_counter()
        output = model(**batch)
        loss, smoothing = output.loss, recipe["label_smoothing"]
        if smoothing > 0:
            logits, labels = output.logits.flatten(0, 1), batch["labels"].flatten()
            loss = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing, ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        if recipe["clip"] > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["clip"])
        for group in optimizer.param_groups:
            group["lr"] = ours[step]["learning_rate"]
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        difference = abs(loss.item() - ours[step]["loss"])
        worst = max(worst, difference)
        differences.append((loss.item(), ours[step]["loss"]))
        if step <= 3 or step % max(1, steps // 10) == 0:
            print(f"step {step:4}  transformers {loss.item():.5f}  henson {ours[step]['loss']:.5f}  difference {difference:.1e}")
    last = differences[-max(1, steps // 10) :]
    theirs, own = (sum(pair[i] for pair in last) / len(last) for i in (0, 1))
    print(f"largest difference over {steps} steps: {worst:.2e}; means of the last {len(last)}: {theirs:.4f} and {own:.4f}")
    print(f"median of a step in PyTorch: {sorted(seconds)[len(seconds) // 2] * 1e3:.1f} ms on {torch.get_num_threads()} threads")
    return int(abs(own / theirs - 1) > 0.01)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
