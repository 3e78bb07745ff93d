"""Follows a pre-training run of henson with transformers: the same initial weights, the same batches, the same optimizer.

    henson pretrain --model bert-tiny --data SHARDS --out RUN --set dropout=0.0 --set log_every=1 --set steps=50 \
        --set batch_size=16 --set learning_rate=1e-3 --set eval_every=0 --stop-at 0
    henson data export SHARDS --out BATCHES.safetensors --batches 50 --batch-size 16
    henson pretrain (the same, without --stop-at)
    python tools/golden/follow_pretraining.py RUN BATCHES.safetensors

Prints both losses of every step and the largest difference; exits 1 if that is above 1e-3.
"""

import json
import sys
import tomllib

import torch
from safetensors.torch import load_file
from transformers import BertForPreTraining, get_linear_schedule_with_warmup


def main(run: str, batches: str) -> int:
    recipe = tomllib.load(open(f"{run}/recipe.toml", "rb"))
    model = BertForPreTraining.from_pretrained(f"{run}/checkpoints/step-0")
    model.train()
    decay, rest = [], []
    for name, parameter in model.named_parameters():
        (rest if "LayerNorm" in name or "bias" in name else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": recipe["weight_decay"]}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=recipe["learning_rate"], betas=(recipe["beta1"], recipe["beta2"]), eps=recipe["epsilon"]
    )
    steps = recipe["steps"]
    scheduler = get_linear_schedule_with_warmup(optimizer, recipe.get("warmup_steps", steps // 10), steps)
    ours = {}
    for line in map(json.loads, open(f"{run}/metrics.jsonl")):
        if line["kind"] == "train":
            ours[line["step"]] = line["loss"]
    data = load_file(batches)
    worst = 0.0
    for step in range(steps):
        keys = ["input_ids", "token_type_ids", "attention_mask", "labels", "next_sentence_label"]
        batch = {key: data[f"batch.{step:04}.{key}"].long() for key in keys}
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["clip"])
        optimizer.step()
        scheduler.step()
        difference = abs(loss.item() - ours[step + 1])
        worst = max(worst, difference)
        print(f"step {step + 1:3}  transformers {loss.item():.6f}  henson {ours[step + 1]:.6f}  difference {difference:.1e}")
    print(f"largest difference over {steps} steps: {worst:.2e}")
    return int(worst > 1e-3)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
