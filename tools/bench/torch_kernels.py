"""PyTorch on the shapes of the `cuda` test's `bench`: eager and compiled, bf16, the sum of the kernels' times.

Prints one line a measurement. Forward and backward are timed apart where that is simple (the backward of a compiled
function is timed as the difference between forward + backward and forward)."""

import sys
import time

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

T, S, H, I, V, P = 32768, 128, 768, 3072, 30528, 4915
device, dtype = "cuda", torch.bfloat16
torch.manual_seed(0)


def timed(run, runs=10):
    """Microseconds of one run on the GPU: the sum of its kernels' times by the profiler, so that the host's share does not
    count."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(runs):
            run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiled.key_averages()) / runs


def line(name, us, work=None, unit="GB/s"):
    rate = "" if work is None else f"{work / us * 1e-3:10.0f} {unit}" if unit == "GB/s" else f"{work / us * 1e-6:10.0f} {unit}"
    print(f"torch {name:<60} {us:9.1f} us {rate}", flush=True)


def pair(name, function, inputs, bytes_forward=None, bytes_backward=None, compiled=True):
    """Forward, and forward + backward minus forward, eager and compiled."""
    kinds = [("eager", function)] + ([("compiled", torch.compile(function))] if compiled else [])
    for kind, f in kinds:
        out = f(*inputs)
        gradient = torch.randn_like(out)
        needs = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]

        def forward():
            f(*inputs)

        def both():
            torch.autograd.grad(f(*inputs), needs, gradient)

        a = timed(forward)
        b = timed(both)
        line(f"{name}, forward, {kind}", a, bytes_forward)
        line(f"{name}, backward (difference), {kind}", b - a, bytes_backward)


def main():
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    quick = "--quick" in sys.argv
    n = 1 << 29
    a, b = torch.randn(n, device=device), torch.empty(n, device=device)
    line("copy", timed(lambda: b.copy_(a)), 8 * n)
    del a, b

    x = torch.randn(T, H, device=device, dtype=dtype, requires_grad=True)
    r = torch.randn(T, H, device=device, dtype=dtype, requires_grad=True)
    g = torch.randn(H, device=device, requires_grad=True)
    beta = torch.randn(H, device=device, requires_grad=True)

    def norm(x, r, g, b):
        return F.layer_norm(r + F.dropout(x, 0.1, True), (H,), g.to(dtype), b.to(dtype), 1e-12)

    pair("dropout + residual + LayerNorm", norm, (x, r, g, beta), 4 * 2 * T * H, 4 * 2 * T * H)

    z = torch.randn(T, I, device=device, dtype=dtype, requires_grad=True)
    bias = torch.randn(I, device=device, dtype=dtype, requires_grad=True)
    pair("bias + GELU (erf)", lambda z, b: F.gelu(z + b), (z, bias), 2 * 2 * T * I, 3 * 2 * T * I)
    del z

    logits = torch.randn(P, V - 6, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, V - 6, (P,), device=device)
    pair(
        "cross-entropy P×V",
        lambda x, t: F.cross_entropy(x.float(), t, reduction="sum"),
        (logits, targets),
        2 * P * V,
        2 * 2 * P * V,
    )
    del logits

    word = torch.nn.Embedding(V, H, device=device)
    ids = torch.randint(0, V, (T,), device=device)
    gradient = torch.randn(T, H, device=device, dtype=dtype)
    line("gradient of the word table (embedding_dense_backward)", timed(
        lambda: torch.ops.aten.embedding_dense_backward(gradient, ids, V, -1, False)))
    del word

    parameters = [torch.randn(s, device=device) * 0.02 for s in [V * H] + [H] * 100 + [H * H] * 48 + [H * I] * 24]
    for p in parameters:
        p.grad = torch.randn_like(p) * 1e-3
    for kind in ["fused", "foreach"]:
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, **{kind: True})
        count = sum(p.numel() for p in parameters)
        line(f"AdamW, {kind}, {count / 1e6:.0f}M (no bf16 copy)", timed(optimizer.step), 28 * count)
        del optimizer
    line("clip_grad_norm_, foreach", timed(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)))
    del parameters
    if quick:
        return
    for name, t, n, k in [("QKV", T, 3 * H, H), ("attention output", T, H, H), ("up", T, I, H), ("down", T, H, I), ("decoder", P, V, H)]:
        x = torch.randn(t, k, device=device, dtype=dtype)
        w = torch.randn(n, k, device=device, dtype=dtype) * 0.02
        b = torch.randn(n, device=device, dtype=dtype)
        dy = torch.randn(t, n, device=device, dtype=dtype)
        work = 2 * t * n * k
        line(f"{name} {t}×{n}×{k}, forward with bias", timed(lambda: F.linear(x, w, b)), work, "TFLOP/s")
        line(f"{name}, input gradient", timed(lambda: dy @ w), work, "TFLOP/s")
        line(f"{name}, weight gradient bf16", timed(lambda: dy.t() @ x), work, "TFLOP/s")
        line(f"{name}, bias gradient", timed(lambda: dy.sum(0)), 2 * t * n)


start = time.time()
main()
print(f"torch bench took {time.time() - start:.0f} s", flush=True)
