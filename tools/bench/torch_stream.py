"""PyTorch's BERT on sequences of natural lengths, padded to the longest of each batch: the peer of `henson pretrain` where
lengths vary. The model and its options are those of a script with torch_bert.py's classes (--peer); attention gets a mask.

    python tools/bench/torch_stream.py --peer torch_bert.py --lengths stream.json --model base

`--lengths` is a JSON list of batches, each {"lengths": [...], "predictions": [...]} (see docs/performance.md on how to make
it from `henson data export`). Prints one JSON line with real tokens per second: padding does not count.
"""

import argparse
import json
import random
import statistics
import time

import torch
import torch.nn.functional as F

from peer import load


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--peer", required=True)
    flags.add_argument("--lengths", required=True)
    flags.add_argument("--model", default="base")
    flags.add_argument("--skip", type=int, default=10)
    flags = flags.parse_args()
    peer = load(flags.peer)
    torch.manual_seed(0)

    def forward(layer, x, mask):
        B, S, H = x.shape
        q, k, v = layer.qkv(x).view(B, S, 3, layer.A, H // layer.A).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=layer.p).transpose(1, 2).reshape(B, S, H)
        x = layer.ln1(x + F.dropout(layer.out(a), layer.p, True))
        return layer.ln2(x + F.dropout(layer.down(F.gelu(layer.up(x))), layer.p, True))

    model = peer.Bert(*peer.SIZES[flags.model]).cuda().train()

    def loss_of(ids, segments, mask, rows, targets, labels):
        x = model.tok(ids) + model.pos.weight[: ids.shape[1]] + model.seg(segments)
        x = F.dropout(model.ln(x), model.p, True)
        for layer in model.layers:
            x = forward(layer, x, mask)
        h = model.ln_head(F.gelu(model.dense(x.reshape(-1, x.shape[-1])[rows])))
        masked = F.cross_entropy(F.linear(h, model.tok.weight, model.bias).float(), targets)
        return masked + F.cross_entropy(model.nsp(torch.tanh(model.pool(x[:, 0]))).float(), labels)

    compiled = torch.compile(loss_of, dynamic=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    draws = random.Random(0)
    batches = []
    for batch in json.load(open(flags.lengths)):
        lengths, predictions = batch["lengths"], batch["predictions"]
        B, S = len(lengths), max(lengths)
        ids = torch.randint(1000, 30000, (B, S), device="cuda")
        keep = torch.arange(S, device="cuda")[None, :] < torch.tensor(lengths, device="cuda")[:, None]
        rows = [b * S + i for b in range(B) for i in sorted(draws.sample(range(lengths[b]), predictions[b]))]
        rows = torch.tensor(rows, device="cuda")
        segments = torch.zeros_like(ids)
        labels = torch.randint(0, 2, (B,), device="cuda")
        batches.append((sum(lengths), (ids, segments, keep[:, None, None, :], rows, ids.reshape(-1)[rows], labels)))

    times, tokens = [], []
    for i, (real, inputs) in enumerate(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(*inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        torch.cuda.synchronize()
        if i >= flags.skip:
            times.append(time.perf_counter() - start)
            tokens.append(real)
    print(json.dumps({
        "peer": "torch", "model": flags.model, "ms": round(statistics.median(times) * 1e3, 2),
        "tokens_per_s": round(sum(tokens) / sum(times)), "median_tokens": statistics.median(tokens),
    }))


if __name__ == "__main__":
    main()
