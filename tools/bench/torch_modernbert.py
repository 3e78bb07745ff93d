"""The strongest plain-PyTorch ModernBERT that we know how to write: the peer of `henson bench train --model modernbert-base`.

    python tools/bench/torch_modernbert.py --batch 64 --seq 1024 --compile
    python tools/bench/torch_modernbert.py --batch 8 --seq 8192 --compile --attention flex

Fused QKV, attention by FlexAttention with block masks (or flash-attn's kernels where that package is there, or PyTorch's own with
a dense mask), bf16 autocast, the vocabulary's logits at the masked positions alone (15%, as in `henson bench`), fused AdamW,
clipped gradients. Dropout is 0 everywhere, as in the model. Prints one JSON line. `--check` compares the network with
`transformers`' on the CPU, with the same weights.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from torch import nn

SIZES = {"mini": (7, 320, 5, 480), "base": (22, 768, 12, 1152), "large": (28, 1024, 16, 2624)}  # L, H, A, I
VOCABULARY, WINDOW, EVERY = 50368, 128, 3
THETAS = {True: 160_000.0, False: 10_000.0}  # by whether a layer sees all tokens


def angles(theta, size, length, device):
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2, device=device).float() / size)
    turns = torch.outer(torch.arange(length, device=device).float(), frequencies)
    return turns.cos()[None, :, None], turns.sin()[None, :, None]  # 1, S, 1, D/2


def rotate(x, turns):
    cos, sin = turns
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def attention_of(name, length, device):
    """q, k, v: B, S, A, D, and whether a layer sees all tokens."""
    half = WINDOW // 2
    if name == "flash":
        from flash_attn import flash_attn_func

        return lambda q, k, v, full: flash_attn_func(q, k, v, window_size=(-1, -1) if full else (half, half))
    swap = lambda x: x.transpose(1, 2)
    plain = lambda q, k, v: swap(F.scaled_dot_product_attention(swap(q), swap(k), swap(v)))
    if name == "flex":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        near = lambda b, h, q, k: (q - k).abs() <= half
        mask = create_block_mask(near, None, None, length, length, device=device)
        local = lambda q, k, v: swap(flex_attention(swap(q), swap(k), swap(v), block_mask=mask))
    else:
        place = torch.arange(length, device=device)
        mask = (place[:, None] - place).abs() <= half
        local = lambda q, k, v: swap(F.scaled_dot_product_attention(swap(q), swap(k), swap(v), attn_mask=mask))
    return lambda q, k, v, full: plain(q, k, v) if full else local(q, k, v)


def norm(size):
    return nn.LayerNorm(size, eps=1e-5, bias=False)


class Attention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.Wqkv, self.Wo = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x, turns, attend, full):
        q, k, v = self.Wqkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.Wo(attend(rotate(q, turns), rotate(k, turns), v, full).flatten(2))


class Mlp(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.Wi, self.Wo = nn.Linear(hidden, 2 * inner, bias=False), nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        gate, gated = self.Wi(x).chunk(2, -1)
        return self.Wo(F.gelu(gate) * gated)


class Layer(nn.Module):
    def __init__(self, i, hidden, heads, inner):
        super().__init__()
        self.full = i % EVERY == 0
        self.attn_norm = norm(hidden) if i else nn.Identity()
        self.attn, self.mlp_norm, self.mlp = Attention(hidden, heads), norm(hidden), Mlp(hidden, inner)

    def forward(self, x, turns, attend):
        x = x + self.attn(self.attn_norm(x), turns[self.full], attend, self.full)
        return x + self.mlp(self.mlp_norm(x))


class ModernBert(nn.Module):
    """Under transformers' names, so that weights can be taken from there."""

    def __init__(self, layers, hidden, heads, inner, attend):
        super().__init__()
        self.size, self.attend = hidden // heads, attend
        self.model = nn.Module()
        self.model.embeddings = nn.Module()
        self.model.embeddings.tok_embeddings, self.model.embeddings.norm = nn.Embedding(VOCABULARY, hidden), norm(hidden)
        self.model.layers = nn.ModuleList(Layer(i, hidden, heads, inner) for i in range(layers))
        self.model.final_norm = norm(hidden)
        self.head = nn.Module()
        self.head.dense, self.head.norm = nn.Linear(hidden, hidden, bias=False), norm(hidden)
        self.decoder = nn.Linear(hidden, VOCABULARY)
        for matrix in [m for m in self.modules() if isinstance(m, (nn.Linear, nn.Embedding))]:
            nn.init.trunc_normal_(matrix.weight, std=0.02, a=-0.04, b=0.04)
        self.decoder.weight = self.model.embeddings.tok_embeddings.weight

    def encode(self, ids):
        model, length = self.model, ids.shape[1]
        turns = {full: angles(theta, self.size, length, ids.device) for full, theta in THETAS.items()}
        x = model.embeddings.norm(model.embeddings.tok_embeddings(ids))
        for layer in model.layers:
            x = layer(x, turns, self.attend)
        return model.final_norm(x)

    def logits(self, x):
        return self.decoder(self.head.norm(F.gelu(self.head.dense(x))))

    def forward(self, ids, rows, targets):
        return F.cross_entropy(self.logits(self.encode(ids).flatten(0, 1)[rows]).float(), targets)


def check():
    """The same logits as transformers' with the same weights, on a text longer than twice the window."""
    import transformers

    layers, hidden, heads, inner = sizes = (4, 128, 2, 96)
    config = transformers.ModernBertConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, intermediate_size=inner
    )
    theirs = transformers.ModernBertForMaskedLM(config).eval()
    ours = ModernBert(*sizes, attention_of("sdpa", 300, "cpu")).eval()
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(0, VOCABULARY, (2, 300))
    with torch.no_grad():
        difference = (ours.logits(ours.encode(ids)) - theirs(ids).logits).abs().max()
    print(f"largest difference from transformers: {difference:.1e}")
    assert difference < 1e-5


def multiply_adds(sizes, tokens, length, predicted):
    """Of matrix products, counted as `henson bench` does."""
    layers, hidden, _, inner = sizes
    window = min(WINDOW + 1, length)
    seen = sum(length if i % EVERY == 0 else window for i in range(layers))
    encoder = tokens * (layers * (4 * hidden**2 + 3 * hidden * inner) + 2 * hidden * seen)
    return encoder, predicted * (hidden**2 + hidden * VOCABULARY)


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--device", default="cuda")
    flags.add_argument("--model", default="base", choices=SIZES)
    flags.add_argument("--mode", default="train", choices=["train", "infer"])
    flags.add_argument("--batch", type=int, default=64)
    flags.add_argument("--seq", type=int, default=1024)
    flags.add_argument("--dtype", default="bf16", choices=["f32", "bf16"])
    flags.add_argument("--attention", default="flex", choices=["flex", "flash", "sdpa"])
    flags.add_argument("--compile", action="store_true")
    flags.add_argument("--compile-mode", default="default")
    flags.add_argument("--steps", type=int, default=20)
    flags.add_argument("--warmup", type=int, default=6)
    flags.add_argument("--check", action="store_true")
    flags = flags.parse_args()
    if flags.check:
        return check()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    sizes, (batch, length, device) = SIZES[flags.model], (flags.batch, flags.seq, flags.device)
    network = ModernBert(*sizes, attention_of(flags.attention, length, device)).to(device)
    ids = torch.randint(0, VOCABULARY, (batch, length), device=device)
    predicted = max(1, round(length * 0.15))
    rows = torch.cat([torch.randperm(length, device=device)[:predicted].sort().values + b * length for b in range(batch)])
    targets = ids.flatten()[rows]
    autocast = torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=flags.dtype == "bf16")
    compiled = (lambda f: torch.compile(f, mode=flags.compile_mode)) if flags.compile else (lambda f: f)
    if flags.mode == "train":
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
        forward = compiled(network)

        def step():
            optimizer.zero_grad(set_to_none=True)
            with autocast:
                loss = forward(ids, rows, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
    else:
        encode = compiled(network.encode)

        def step():
            with torch.no_grad(), autocast:
                encode(ids)

    wait = torch.cuda.synchronize if "cuda" in device else (lambda: None)
    for _ in range(flags.warmup):
        step()
    times = []
    for _ in range(flags.steps):
        wait()
        start = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - start)
    seconds = sorted(times)[len(times) // 2]
    encoder, vocabulary = multiply_adds(sizes, batch * length, length, batch * predicted)
    flops = 6 * (encoder + vocabulary) if flags.mode == "train" else 2 * encoder
    print(json.dumps({
        "peer": "torch", "mode": flags.mode, "device": device, "model": f"modernbert-{flags.model}", "batch": batch,
        "seq": length, "dtype": flags.dtype, "attention": flags.attention,
        "compile": flags.compile_mode if flags.compile else None, "ms": round(seconds * 1e3, 3),
        "tokens_per_s": round(batch * length / seconds), "tflops": round(flops / seconds / 1e12, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if "cuda" in device else None,
    }))


if __name__ == "__main__":
    main()
