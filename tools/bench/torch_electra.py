"""PyTorch training ELECTRA with its generator in one step: the peer of `henson bench train --model electra-base`.

    python tools/bench/torch_electra.py [--model base] [--batch 256] [--seq 128] [--steps 20] [--warmup 6] [--no-compile]
    henson bench train --device cuda --model electra-base --batch 256 --seq 128 --dtype bf16 --json

The strongest form that PyTorch has: fused QKV, flash attention through scaled_dot_product_attention, the generator's softmax at the
predicted tokens alone, Gumbel draws inside of the compiled graph, one table for both networks, bf16 autocast, torch.compile over
both networks with their losses, fused AdamW, clipping by the global norm. All sequences are full, so there is no mask. Prints one
JSON line with the keys of tools/bench/compare_gpu.py. `--check` runs a few steps on the CPU in f32 and prints their losses.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

# name: layers, hidden, heads, columns of the tables, the generator's width
SIZES = {"small": (12, 256, 4, 128, 64), "base": (12, 768, 12, 768, 256), "large": (24, 1024, 16, 1024, 256)}


class Layer(nn.Module):
    def __init__(self, hidden, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(hidden, eps=1e-12), nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        a = self.out(a.transpose(1, 2).reshape(b, s, h))
        x = self.norm1(x + F.dropout(a, self.dropout, True))
        return self.norm2(x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout, True))


class Encoder(nn.Module):
    """All but the tables."""

    def __init__(self, layers, hidden, heads, width, dropout):
        super().__init__()
        self.dropout = dropout
        self.project = nn.Linear(width, hidden) if width != hidden else nn.Identity()
        self.layers = nn.ModuleList(Layer(hidden, heads, dropout) for _ in range(layers))

    def forward(self, x):
        x = self.project(F.dropout(x, self.dropout, True))
        for layer in self.layers:
            x = layer(x)
        return x


class Electra(nn.Module):
    def __init__(self, layers, hidden, heads, width, of_generator, vocabulary=30522, dropout=0.1):
        super().__init__()
        self.word, self.position = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.segment, self.norm = nn.Embedding(2, width), nn.LayerNorm(width, eps=1e-12)
        self.discriminator = Encoder(layers, hidden, heads, width, dropout)
        self.generator = Encoder(layers, of_generator, max(1, of_generator // 64), width, dropout)
        self.dense, self.dense_norm = nn.Linear(of_generator, width), nn.LayerNorm(width, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.hidden, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, 1)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def embed(self, ids, segments):
        return self.norm(self.word(ids) + self.position.weight[: ids.shape[1]] + self.segment(segments))

    def forward(self, original, masked, segments, rows, noise):
        """`rows` are P places in the flat batch; `noise` are uniform numbers, P×V, or none to draw them here."""
        targets = original.view(-1)[rows]
        x = self.generator(self.embed(masked, segments))
        x = self.dense_norm(F.gelu(self.dense(x.flatten(0, 1)[rows])))
        logits = F.linear(x, self.word.weight, self.bias).float()
        mlm = F.cross_entropy(logits, targets)
        with torch.no_grad():
            uniform = torch.rand_like(logits) if noise is None else noise
            drawn = (logits - torch.log(-torch.log(uniform + 1e-9) + 1e-9)).argmax(-1)
            ids = original.view(-1).scatter(0, rows, drawn).view_as(original)
            labels = (ids != original).float()
        x = self.discriminator(self.embed(ids, segments))
        found = self.out(F.gelu(self.hidden(x))).squeeze(-1).float()
        rtd = F.binary_cross_entropy_with_logits(found, labels)
        return mlm + 50.0 * rtd, mlm.detach(), rtd.detach()


def batch_of(flags, vocabulary, device):
    rng = torch.Generator().manual_seed(0)
    b, s = flags.batch, flags.seq
    original = torch.randint(0, vocabulary, (b, s), generator=rng)
    predicted = max(1, round(0.15 * s))
    places = torch.rand(b, s, generator=rng).argsort(1)[:, :predicted].sort(1).values
    rows = (places + s * torch.arange(b)[:, None]).flatten()
    masked = original.view(-1).scatter(0, rows, torch.zeros_like(rows)).view(b, s)
    segments = (torch.arange(s) >= s // 2).long().expand(b, s).contiguous()
    tensors = [original, masked, segments, rows]
    return [tensor.pin_memory() if device == "cuda" else tensor for tensor in tensors]


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--model", default="base", choices=SIZES)
    for name, default in (("batch", 256), ("seq", 128), ("steps", 20), ("warmup", 6)):
        flags.add_argument("--" + name, type=int, default=default)
    flags.add_argument("--compile-mode", default="max-autotune-no-cudagraphs")
    flags.add_argument("--no-compile", action="store_true")
    flags.add_argument("--check", action="store_true")
    # Flags that compare_gpu.py gives to every peer.
    flags.add_argument("--mode", default="train", choices=["train"])
    flags.add_argument("--device", default="cuda")
    flags.add_argument("--dtype", default="bf16", choices=["bf16"])
    flags.add_argument("--compile", action="store_true")
    flags = flags.parse_args()
    device = "cpu" if flags.check else flags.device
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    layers, hidden, heads, width, of_generator = SIZES[flags.model]
    model = Electra(layers, hidden, heads, width, of_generator).to(device).train()
    host = batch_of(flags, model.word.num_embeddings, device)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.999), eps=1e-6, fused=True)
    run = model if flags.no_compile or flags.check else torch.compile(model, mode=flags.compile_mode)

    def step():
        # Every step takes its batch from the host, as henson's does.
        batch = [tensor.to(device, non_blocking=True) for tensor in host]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=not flags.check):
            loss, mlm, rtd = run(*batch, None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        return mlm, rtd

    if flags.check:
        for number in range(flags.steps):
            mlm, rtd = step()
            print(number, round(mlm.item(), 4), round(rtd.item(), 4))
        return
    for _ in range(flags.warmup):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(flags.steps + 1)]
    start = time.perf_counter()
    for event in events[:-1]:
        event.record()
        step()
    events[-1].record()
    torch.cuda.synchronize()
    mean = (time.perf_counter() - start) / flags.steps * 1e3
    ms = statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:]))
    print(json.dumps({
        "peer": "torch", "mode": "train", "model": f"electra-{flags.model}", "batch": flags.batch, "seq": flags.seq,
        "dtype": "bf16", "ms": round(ms, 3), "ms_mean": round(mean, 3),
        "tokens_per_s": round(flags.batch * flags.seq / ms * 1e3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2), "torch": torch.__version__,
    }))


main()
