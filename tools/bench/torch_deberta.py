"""PyTorch on DeBERTa-v3: the peer of `henson bench train` and `henson bench infer --model deberta-v3-base`, on one GPU.

    python tools/bench/torch_deberta.py [--model base] [--batch 32] [--seq 128] [--mode train|infer|both] [--eager]

The model is `transformers`' DebertaV2 with random weights, in bf16 autocast and compiled (torch.compile, one graph of kernels per
shape). As in henson's benchmark, every sequence has the full length, 15% of the tokens are predicted, the vocabulary's logits are
computed at these alone, dropout is on in training, and a step is forward, backward, clipping and fused AdamW. Inference is the encoder
in bf16 without a head. Prints one JSON line per measurement: the median of --repeat steps, each waited for, and of steps that follow
each other without waiting.
"""

import argparse
import json
import statistics
import time

import torch
import transformers

# layers, hidden, heads
SIZES = {"xsmall": (12, 384, 6), "small": (6, 768, 12), "base": (12, 768, 12), "large": (24, 1024, 16)}


def make(size, dropout):
    layers, hidden, heads = SIZES[size]
    config = transformers.DebertaV2Config(
        vocab_size=128100, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * hidden, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True,
        pos_att_type=["p2c", "c2p"], position_biased_input=False, type_vocab_size=0,
    )
    return transformers.DebertaV2ForMaskedLM(config).cuda()


def measure(step, warm, repeat):
    """Milliseconds of a step that is waited for (median), and of one among many."""
    for _ in range(warm):
        step()
    alone = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        alone.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(repeat):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / repeat, 1e3 * statistics.median(alone)


def training(flags, ids, rows, targets):
    model = make(flags.model, flags.dropout).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-6, weight_decay=0.01, fused=True)

    def forward(ids, rows, targets):
        last = model.deberta(input_ids=ids).last_hidden_state
        logits = model.cls(last.flatten(0, 1)[rows])
        return torch.nn.functional.cross_entropy(logits.float(), targets)

    forward = forward if flags.eager else torch.compile(forward, dynamic=False)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = forward(ids, rows, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()

    return measure(step, flags.warm, flags.repeat)


def inference(flags, ids):
    model = make(flags.model, 0.0).eval().to(torch.bfloat16)
    forward = lambda ids: model.deberta(input_ids=ids).last_hidden_state
    forward = forward if flags.eager else torch.compile(forward, dynamic=False)

    @torch.inference_mode()
    def step():
        forward(ids)

    return measure(step, flags.warm, flags.repeat)


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--model", choices=SIZES, default="base")
    flags.add_argument("--mode", choices=["train", "infer", "both"], default="both")
    for name, default in (("batch", 32), ("seq", 128), ("warm", 10), ("repeat", 30)):
        flags.add_argument("--" + name, type=int, default=default)
    flags.add_argument("--dropout", type=float, default=0.1)
    flags.add_argument("--eager", action="store_true")
    flags = flags.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    tokens = flags.batch * flags.seq
    ids = torch.randint(1, 128000, (flags.batch, flags.seq), device="cuda")
    rows = torch.randperm(tokens, device="cuda")[: int(0.15 * tokens)].sort().values
    targets = torch.randint(0, 128000, (len(rows),), device="cuda")
    for mode in ["train", "infer"] if flags.mode == "both" else [flags.mode]:
        ms, alone = training(flags, ids, rows, targets) if mode == "train" else inference(flags, ids)
        print(json.dumps({
            "mode": mode, "model": f"deberta-v3-{flags.model}", "batch": flags.batch, "seq": flags.seq, "dtype": "bf16",
            "compiled": not flags.eager, "ms": round(ms, 3), "ms_alone": round(alone, 3),
            "tokens_per_s": round(1e3 * tokens / ms), "torch": torch.__version__, "transformers": transformers.__version__,
        }))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
