"""PyTorch training GPT-2, T5 and BART: the peer of `henson bench train --model gpt2|t5-base|bart-base`.

    python tools/bench/torch_writers.py --model gpt2 --batch 64 --seq 1024 [--steps 15] [--warmup 5] [--dropout 0.0]
    python tools/bench/torch_writers.py --model t5-base --batch 128 --seq 512 --target 114 --dropout 0.1 [--attention sdpa|math]
    python tools/bench/torch_writers.py --model bart-base --batch 64 --seq 512 --target 512 --dropout 0.1
    python tools/bench/torch_writers.py --model gpt2 --check [--transformers]

The strongest plain form that we know how to write: one matmul for query, key and value, flash attention through
scaled_dot_product_attention, a vocabulary padded to a multiple of 128, bf16 autocast, torch.compile over network and loss, fused AdamW,
clipping by the global norm, gradients set to none. T5's bias of distances cannot go through flash attention: `sdpa` gives it to
scaled_dot_product_attention as a mask (its memory-efficient kernel), `math` leaves matmul, softmax and dropout to the compiler. All
sequences are full, so there is no padding. Prints one JSON line. `--check` takes five steps of a tiny network on the CPU in f32 and prints
their losses; with `--transformers` it compares the loss with transformers' for the same weights instead.
"""

import argparse
import json
import math
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

# name: layers of the encoder, of the decoder, hidden, heads, inner, vocabulary, positions
SIZES = {
    "gpt2": (0, 12, 768, 12, 3072, 50257, 1024),
    "t5-base": (12, 12, 768, 12, 3072, 32128, 0),
    "bart-base": (6, 6, 768, 12, 3072, 50265, 1024),
}


class RmsNorm(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, 1e-6).to(x.dtype)


def attend(q, k, v, dropout, causal, bias, scale, way):
    """B×A×S×D each; the bias is A×S×K, with -inf where a causal network must not look."""
    if bias is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal, scale=scale)
    if way == "sdpa":
        mask = bias.to(q.dtype)[None].expand(q.shape[0], -1, -1, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale + bias[None]
    return torch.matmul(F.dropout(scores.float().softmax(-1).to(v.dtype), dropout, True), v)


class Attention(nn.Module):
    """Of a stream to itself; the queries' matmul has the keys' and values' in it."""

    def __init__(self, o):
        super().__init__()
        self.o = o
        self.qkv, self.out = nn.Linear(o.hidden, 3 * o.hidden, bias=o.biases), nn.Linear(o.hidden, o.hidden, bias=o.biases)

    def forward(self, x, causal, bias):
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.o.heads, -1).permute(2, 0, 3, 1, 4)
        a = attend(q, k, v, self.o.attention_dropout, causal, bias, self.o.scale, self.o.way)
        return self.out(a.transpose(1, 2).reshape(b, s, h))


class Cross(nn.Module):
    """Of a target to its source."""

    def __init__(self, o):
        super().__init__()
        self.o = o
        self.q, self.kv = nn.Linear(o.hidden, o.hidden, bias=o.biases), nn.Linear(o.hidden, 2 * o.hidden, bias=o.biases)
        self.out = nn.Linear(o.hidden, o.hidden, bias=o.biases)

    def forward(self, x, source):
        b, s, h = x.shape
        q = self.q(x).view(b, s, self.o.heads, -1).transpose(1, 2)
        k, v = self.kv(source).view(b, source.shape[1], 2, self.o.heads, -1).permute(2, 0, 3, 1, 4)
        a = attend(q, k, v, self.o.attention_dropout, False, None, self.o.scale, self.o.way)
        return self.out(a.transpose(1, 2).reshape(b, s, h))


class Layer(nn.Module):
    def __init__(self, o, crosses):
        super().__init__()
        norm = RmsNorm if o.kind == "t5" else lambda hidden: nn.LayerNorm(hidden, eps=1e-5)
        self.o, self.attention, self.norm1 = o, Attention(o), norm(o.hidden)
        if crosses:
            self.cross, self.norm_cross = Cross(o), norm(o.hidden)
        self.up, self.down = nn.Linear(o.hidden, o.inner, bias=o.biases), nn.Linear(o.inner, o.hidden, bias=o.biases)
        self.norm2 = norm(o.hidden)

    def feed(self, x):
        inner = self.up(x)
        if self.o.kind == "t5":
            return self.down(F.dropout(F.relu(inner), self.o.dropout, True))
        return self.down(F.gelu(inner, approximate="tanh" if self.o.kind == "gpt2" else "none"))

    def forward(self, x, causal, bias, source=None):
        drop = lambda y: F.dropout(y, self.o.dropout, True)
        if self.o.kind == "bart":
            x = self.norm1(x + drop(self.attention(x, causal, bias)))
            if source is not None:
                x = self.norm_cross(x + drop(self.cross(x, source)))
            return self.norm2(x + drop(self.feed(x)))
        x = x + drop(self.attention(self.norm1(x), causal, bias))
        if source is not None:
            x = x + drop(self.cross(self.norm_cross(x), source))
        return x + drop(self.feed(self.norm2(x)))


def buckets(queries, keys, both, device):
    """T5's: half of 32 for near distances, the other half by logarithms up to 128; both directions share them in an encoder."""
    distance = torch.arange(keys, device=device)[None, :] - torch.arange(queries, device=device)[:, None]
    count, base = (16, (distance > 0).long() * 16) if both else (32, torch.zeros_like(distance))
    far = distance.abs() if both else -distance.clamp(max=0)
    near = count // 2
    large = near + (torch.log(far.clamp(min=1).float() / near) / math.log(128 / near) * (count - near)).long()
    return base + torch.where(far < near, far, large.clamp(max=count - 1))


class Writer(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.o = o
        padded = -(-o.vocabulary // 128) * 128
        self.words = nn.Embedding(padded, o.hidden)
        if o.kind == "t5":
            self.encoder_distances, self.decoder_distances = nn.Embedding(32, o.heads), nn.Embedding(32, o.heads)
            self.encoder_norm, self.decoder_norm = RmsNorm(o.hidden), RmsNorm(o.hidden)
        else:
            self.positions = nn.ModuleList(nn.Embedding(o.positions, o.hidden) for _ in range(2 if o.kind == "bart" else 1))
            self.norms = nn.ModuleList(nn.LayerNorm(o.hidden, eps=1e-5) for _ in range(2 if o.kind == "bart" else 1))
        self.encoder = nn.ModuleList(Layer(o, False) for _ in range(o.encoder_layers))
        self.decoder = nn.ModuleList(Layer(o, o.encoder_layers > 0) for _ in range(o.decoder_layers))
        if o.kind == "bart":
            self.register_buffer("final_bias", torch.zeros(padded))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def embed(self, ids, number):
        x = self.words(ids)
        if self.o.kind == "gpt2":
            x = x + self.positions[0].weight[: ids.shape[1]]
        if self.o.kind == "bart":
            x = self.norms[number](x + self.positions[number].weight[: ids.shape[1]])
        return F.dropout(x, self.o.dropout, True)

    def bias_of(self, table, length, both):
        if self.o.kind != "t5":
            return None
        bias = table(buckets(length, length, both, table.weight.device)).permute(2, 0, 1)
        if both:
            return bias
        hidden = torch.ones(length, length, dtype=torch.bool, device=bias.device).triu(1)
        return bias.masked_fill(hidden, float("-inf"))

    def forward(self, source, read, targets):
        """A model without an encoder reads `read` alone."""
        seen = None
        if self.encoder:
            seen = self.embed(source, 0)
            bias = self.bias_of(self.encoder_distances, source.shape[1], True) if self.o.kind == "t5" else None
            for layer in self.encoder:
                seen = layer(seen, False, bias)
            if self.o.kind == "t5":
                seen = F.dropout(self.encoder_norm(seen), self.o.dropout, True)
        x = self.embed(read, 1)
        bias = self.bias_of(self.decoder_distances, read.shape[1], False) if self.o.kind == "t5" else None
        for layer in self.decoder:
            x = layer(x, True, bias, seen)
        if self.o.kind == "t5":
            x = F.dropout(self.decoder_norm(x), self.o.dropout, True) * self.o.hidden**-0.5
        if self.o.kind == "gpt2":
            x = self.norms[0](x)
        logits = F.linear(x, self.words.weight)
        if self.o.kind == "bart":
            logits = logits + self.final_bias
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def options(flags):
    o = argparse.Namespace()
    sizes = (2, 2, 64, 4, 128, 500, 64) if flags.check else SIZES[flags.model]
    o.encoder_layers, o.decoder_layers, o.hidden, o.heads, o.inner, o.vocabulary, o.positions = sizes
    o.kind = flags.model.split("-")[0]
    if o.kind == "gpt2":
        o.encoder_layers = 0
    o.biases = o.kind != "t5"
    o.scale = 1.0 if o.kind == "t5" else None
    o.dropout = o.attention_dropout = flags.dropout
    # BART's own has none on attention.
    if o.kind == "bart":
        o.attention_dropout = 0.0
    o.way = flags.attention
    return o


def against_transformers(flags, o, batch):
    """The loss of both with the same weights, without dropout."""
    import transformers

    model = Writer(o)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    common = dict(vocab_size=model.words.num_embeddings)
    state, own = {}, model.state_dict()

    def attention(prefix, name, kind):
        h = o.hidden
        if kind == "gpt2":
            state[f"{prefix}.attn.c_attn.weight"], state[f"{prefix}.attn.c_attn.bias"] = own[f"{name}.qkv.weight"].T, own[f"{name}.qkv.bias"]
            state[f"{prefix}.attn.c_proj.weight"], state[f"{prefix}.attn.c_proj.bias"] = own[f"{name}.out.weight"].T, own[f"{name}.out.bias"]
            return
        names = ("q", "k", "v", "o") if kind == "t5" else ("q_proj", "k_proj", "v_proj", "out_proj")
        for part in ("weight", "bias") if o.biases else ("weight",):
            qkv = own[f"{name}.qkv.{part}"] if f"{name}.qkv.{part}" in own else torch.cat([own[f"{name}.q.{part}"], own[f"{name}.kv.{part}"]])
            for i in range(3):
                state[f"{prefix}.{names[i]}.{part}"] = qkv[i * h : (i + 1) * h]
            state[f"{prefix}.{names[3]}.{part}"] = own[f"{name}.out.{part}"]

    def copy(target, name, transposed=False):
        for part in ("weight", "bias"):
            if f"{name}.{part}" in own:
                value = own[f"{name}.{part}"]
                state[f"{target}.{part}"] = value.T if transposed and part == "weight" else value

    if o.kind == "gpt2":
        config = transformers.GPT2Config(n_embd=o.hidden, n_layer=o.decoder_layers, n_head=o.heads, n_inner=o.inner, n_positions=o.positions,
                                         resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **common)
        theirs = transformers.GPT2LMHeadModel(config)
        copy("transformer.wte", "words"), copy("transformer.wpe", "positions.0"), copy("transformer.ln_f", "norms.0")
        for i in range(o.decoder_layers):
            to, of = f"transformer.h.{i}", f"decoder.{i}"
            attention(to, f"{of}.attention", "gpt2"), copy(f"{to}.ln_1", f"{of}.norm1"), copy(f"{to}.ln_2", f"{of}.norm2")
            copy(f"{to}.mlp.c_fc", f"{of}.up", True), copy(f"{to}.mlp.c_proj", f"{of}.down", True)
    elif o.kind == "t5":
        config = transformers.T5Config(d_model=o.hidden, d_kv=o.hidden // o.heads, d_ff=o.inner, num_layers=o.encoder_layers,
                                       num_decoder_layers=o.decoder_layers, num_heads=o.heads, dropout_rate=0.0, **common)
        theirs = transformers.T5ForConditionalGeneration(config)
        state["shared.weight"] = own["words.weight"]
        for side in ("encoder", "decoder"):
            copy(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias", f"{side}_distances")
            copy(f"{side}.final_layer_norm", f"{side}_norm")
            for i in range(o.encoder_layers):
                to, of, last = f"{side}.block.{i}.layer", f"{side}.{i}", 1 if side == "encoder" else 2
                attention(f"{to}.0.SelfAttention", f"{of}.attention", "t5"), copy(f"{to}.0.layer_norm", f"{of}.norm1")
                if side == "decoder":
                    attention(f"{to}.1.EncDecAttention", f"{of}.cross", "t5"), copy(f"{to}.1.layer_norm", f"{of}.norm_cross")
                copy(f"{to}.{last}.DenseReluDense.wi", f"{of}.up"), copy(f"{to}.{last}.DenseReluDense.wo", f"{of}.down")
                copy(f"{to}.{last}.layer_norm", f"{of}.norm2")
    else:
        config = transformers.BartConfig(d_model=o.hidden, encoder_layers=o.encoder_layers, decoder_layers=o.decoder_layers,
                                         encoder_attention_heads=o.heads, decoder_attention_heads=o.heads, encoder_ffn_dim=o.inner,
                                         decoder_ffn_dim=o.inner, max_position_embeddings=o.positions, dropout=0.0, **common)
        theirs = transformers.BartForConditionalGeneration(config)
        copy("model.shared", "words")
        for number, side in enumerate(("encoder", "decoder")):
            rows = torch.zeros(o.positions + 2, o.hidden)
            rows[2:] = own[f"positions.{number}.weight"]
            state[f"model.{side}.embed_positions.weight"] = rows
            copy(f"model.{side}.layernorm_embedding", f"norms.{number}")
            for i in range(o.encoder_layers):
                to, of = f"model.{side}.layers.{i}", f"{side}.{i}"
                attention(f"{to}.self_attn", f"{of}.attention", "bart"), copy(f"{to}.self_attn_layer_norm", f"{of}.norm1")
                if side == "decoder":
                    attention(f"{to}.encoder_attn", f"{of}.cross", "bart"), copy(f"{to}.encoder_attn_layer_norm", f"{of}.norm_cross")
                copy(f"{to}.fc1", f"{of}.up"), copy(f"{to}.fc2", f"{of}.down"), copy(f"{to}.final_layer_norm", f"{of}.norm2")
    _, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    theirs.tie_weights()
    source, read, targets = batch
    inputs = dict(input_ids=read) if o.kind == "gpt2" else dict(input_ids=source, decoder_input_ids=read)
    with torch.no_grad():
        logits = theirs.eval()(**inputs).logits
        expected, found = F.cross_entropy(logits.flatten(0, 1), targets.flatten()), model(*batch)
    print(f"{flags.model}: {found:.6f}, transformers {expected:.6f}")
    assert abs(found - expected) < 1e-4 * expected


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--model", default="gpt2", choices=SIZES)
    for name, default in (("batch", 64), ("seq", 1024), ("target", 114), ("steps", 15), ("warmup", 5)):
        flags.add_argument("--" + name, type=int, default=default)
    flags.add_argument("--dropout", type=float, default=0.0)
    flags.add_argument("--attention", default="sdpa", choices=["sdpa", "math"])
    flags.add_argument("--compile-mode", default="default")
    flags.add_argument("--check", action="store_true")
    flags.add_argument("--transformers", action="store_true")
    flags = flags.parse_args()
    if flags.check:
        flags.batch, flags.seq, flags.target, flags.steps = 2, 48, 20, 5
    device = "cpu" if flags.check else "cuda"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    o = options(flags)
    target = flags.target if o.encoder_layers else flags.seq
    draw = lambda length: torch.randint(3, o.vocabulary, (flags.batch, length))
    batch = (draw(flags.seq), draw(target), draw(target))
    if flags.transformers:
        o.dropout = o.attention_dropout = 0.0
        return against_transformers(flags, o, batch)
    model = Writer(o).to(device).train()
    host = batch if flags.check else [tensor.pin_memory() for tensor in batch]
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.999), eps=1e-6, fused=True)
    run = model if flags.check else torch.compile(model, mode=flags.compile_mode)

    def step():
        # Every step takes its batch from the host, as henson's does.
        inputs = [tensor.to(device, non_blocking=True) for tensor in host]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=not flags.check):
            loss = run(*inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        return loss

    if flags.check:
        print(flags.model, flags.attention, [round(step().item(), 4) for _ in range(flags.steps)])
        return
    begun = time.perf_counter()
    for _ in range(flags.warmup):
        step()
    torch.cuda.synchronize()
    compiled = time.perf_counter() - begun
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(flags.steps + 1)]
    for event in events[:-1]:
        event.record()
        step()
    events[-1].record()
    torch.cuda.synchronize()
    ms = statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:]))
    tokens = flags.batch * (flags.seq + (target if o.encoder_layers else 0))
    print(json.dumps({
        "peer": "torch", "mode": "train", "model": flags.model, "batch": flags.batch, "seq": flags.seq,
        "target": target if o.encoder_layers else None, "attention": flags.attention, "dropout": flags.dropout, "ms": round(ms, 3),
        "tokens_per_s": round(tokens / ms * 1e3), "warmup_s": round(compiled, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2), "torch": torch.__version__,
    }))


main()
