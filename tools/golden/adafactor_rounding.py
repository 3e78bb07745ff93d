"""Whether a run with Adafactor leaves transformers' because of rounding: the run is followed in f64 and in f32, with gradients that were
moved by their last bit, and then step by step from henson's own weights.

    henson pretrain --model t5-v1_1-mini --data SHARDS --out RUN --set optimizer=adafactor --set adafactor.min_side=1 --set dropout=0.0 \
        --set objective=span-corruption --set packing=blocks --set schedule=constant --set learning_rate=1e-2 --set warmup_steps=0 \
        --set weight_decay=0.0 --set clip=0.0 --set log_every=1 --set steps=12 --set batch_size=8 --set sequence_length=128 \
        --set short_sequences=0.0 --set checkpoint_every=1 --set keep_checkpoints=20 --set eval_every=0 [--stop-at 0, then again without]
    henson data export SHARDS --out BATCHES.safetensors --batches 12 --batch-size 8 --sequence-length 128 --objective span-corruption \
        --packing blocks --short-sequences 0
    python tools/golden/adafactor_rounding.py RUN BATCHES.safetensors

Prints a line for each step: how far the losses of f32, of f32 with moved gradients, and of henson are from those of f64; then what one
update from henson's weights of the step before differs by from f64's, relative to the update (root mean squares, the worst tensor), for
henson and for transformers in f32. Exits 1 where an update of henson's is more than ten times as far off as that of transformers in f32,
which holds for t5-v1_1-mini. With ReLU (t5-mini) it need not: see "ReLU's kink" in docs/tolerances.md.
"""

import json
import sys
import tomllib

import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM
from transformers.optimization import Adafactor

NAMES = ("input_ids", "attention_mask", "labels")


class Follower:
    """A model with its optimizer, in a dtype; gradients are moved by their last bit where a seed is given."""

    def __init__(self, start, recipe, dtype, seed=None):
        self.model = AutoModelForSeq2SeqLM.from_pretrained(start).to(dtype).train()
        scale = recipe["adafactor"]["scale_parameter"]
        self.optimizer = Adafactor(self.model.parameters(), lr=1.0, scale_parameter=scale, relative_step=False)
        self.draws = None if seed is None else torch.Generator().manual_seed(seed)

    def step(self, batch, rate):
        loss = self.model(**batch).loss
        self.optimizer.zero_grad()
        loss.backward()
        if self.draws is not None:
            for p in self.model.parameters():
                sign = torch.randint(0, 2, p.grad.shape, generator=self.draws) * 2 - 1
                p.grad = torch.nextafter(p.grad, p.grad * (1 + 0.5 * sign))
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        return loss.item()

    def take(self, directory):
        self.model.load_state_dict(load_file(f"{directory}/model.safetensors"), strict=False)

    def weights(self):
        return {name: p.detach().double().clone() for name, p in self.model.named_parameters()}


def worst(before, truth, found):
    """The largest |found − truth| / |truth − before| of a tensor, and its name."""
    off = lambda name: ((found[name] - truth[name]).norm() / (truth[name] - before[name]).norm()).item()
    return max((off(name), name) for name in truth)


def main(run: str, batches: str) -> int:
    recipe = tomllib.load(open(f"{run}/recipe.toml", "rb"))
    assert recipe["optimizer"] == "adafactor" and recipe["adafactor"]["min_side"] == 1
    assert recipe["clip"] == 0 and recipe["weight_decay"] == 0 and recipe["label_smoothing"] == 0 and recipe["dropout"] == 0
    data = load_file(batches)
    batch = lambda step: {key: data[f"batch.{step - 1:04}.{key}"] for key in NAMES}
    lines = [line for line in map(json.loads, open(f"{run}/metrics.jsonl")) if line["kind"] == "train"]
    start = f"{run}/checkpoints/step-0"
    free = {"f64": Follower(start, recipe, torch.float64), "f32": Follower(start, recipe, torch.float32)}
    free["moved"] = Follower(start, recipe, torch.float32, seed=1)
    for line in lines:
        losses = {name: follower.step(batch(line["step"]), line["learning_rate"]) for name, follower in free.items()}
        losses["henson"] = line["loss"]
        off = "  ".join(f"{name} {abs(loss - losses['f64']):.1e}" for name, loss in losses.items() if name != "f64")
        print(f"step {line['step']:3}  loss {losses['f64']:.5f}; off by: {off}", flush=True)
    wide, narrow = Follower(start, recipe, torch.float64), Follower(start, recipe, torch.float32)
    bad = 0
    for line in lines:
        step = line["step"]
        for follower in (wide, narrow):
            follower.take(f"{run}/checkpoints/step-{step - 1}")
        before = wide.weights()
        for follower in (wide, narrow):
            follower.step(batch(step), line["learning_rate"])
        truth, theirs = wide.weights(), narrow.weights()
        wide.take(f"{run}/checkpoints/step-{step}")
        ours = wide.weights()
        (own, name), (other, _) = worst(before, truth, ours), worst(before, truth, theirs)
        print(f"update {step:3} from henson's weights: henson off by {own:.1e} ({name}), transformers in f32 by {other:.1e}", flush=True)
        bad += own > 10 * other
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
