"""PyTorch's attention on the shapes of the `cuda` test's `bench --only described`: scaled_dot_product_attention with its flash and cuDNN
kernels, FlexAttention (compiled) for a window and for T5's bias. bf16, 16,384 tokens of 2,048 numbers, forward and backward.

Prints `name | form | head size | tokens | dropout | forward us | TFLOP/s | backward us | TFLOP/s`, TFLOP/s by what queries see."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

TOKENS, WIDTH = 16384, 2048


def timed(run):
    """The median time of one call, in microseconds."""
    for _ in range(3):
        run()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 100)
    return sorted(times)[len(times) // 2]


def pairs(form, s):
    if form == "causal":
        return s * (s + 1) // 2
    if form == "window 64+64":
        return sum(min(s - 1, i + 64) - max(0, i - 64) + 1 for i in range(s))
    return s * s


def report(name, form, d, s, p, attend, inputs):
    flops = 4 * pairs(form, s) * (TOKENS // s) * WIDTH
    try:
        out = attend(*inputs)
        gradient = torch.randn_like(out)
        forward = timed(lambda: attend(*inputs))
        backward = timed(lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True))
    except (RuntimeError, torch.OutOfMemoryError) as error:
        print(f"{name} | {form} | {d} | {s} | {p} | failed: {str(error).splitlines()[0][:80]}", flush=True)
        return
    rates = flops / forward * 1e-6, 2.5 * flops / backward * 1e-6
    print(f"{name} | {form} | {d} | {s} | {p} | {forward:.1f} | {rates[0]:.0f} | {backward:.1f} | {rates[1]:.0f}", flush=True)


def buckets(distance):
    """T5's, for encoders: 32 buckets up to 128 tokens."""
    far = distance.abs()
    grown = 8 + (torch.log(far.float() / 8) / math.log(128 / 8) * 8).long()
    return torch.where(distance > 0, 16, 0) + torch.where(far < 8, far, grown.clamp(max=15))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--flex", nargs="*", type=int, default=[512, 2048, 8192], help="tokens to run FlexAttention with")
    chosen = parser.parse_args()
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    for d in (64, 128):
        for s in (128, 256, 512, 1024, 2048, 4096, 8192):
            shape = (TOKENS // s, WIDTH // d, s, d)
            # As views of one projection lie: B×S×A×D.
            inputs = [
                torch.randn(shape[0], s, shape[1], d, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
                for _ in range(3)
            ]
            for form in ("full", "causal"):
                for p in (0.0, 0.1):
                    for name, backend in backends.items():
                        def attend(q, k, v):
                            with sdpa_kernel(backend):
                                return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=form == "causal")

                        report(name, form, d, s, p, attend, inputs)
            if s not in chosen.flex:
                continue
            torch._dynamo.reset()
            flex = torch.compile(flex_attention, dynamic=False)
            local = create_block_mask(lambda b, h, i, j: (i - j).abs() <= 64, None, None, s, s)
            report("Flex", "window 64+64", d, s, 0.0, lambda q, k, v: flex(q, k, v, block_mask=local), inputs)
            # By distance, for the buckets' logarithms would be computed for every score.
            table = torch.randn(32, WIDTH // d, device="cuda")
            near = table[buckets(torch.arange(-128, 129, device="cuda"))]

            def biased(score, b, h, i, j):
                return score + near[(j - i).clamp(-128, 128) + 128, h]

            # Its own choice of blocks does not fit the shared memory for heads of 64.
            blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_M1": 32, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 32}
            options = blocks if d == 64 else None
            report("Flex", "T5 bias", d, s, 0.0, lambda q, k, v: flex(q, k, v, score_mod=biased, kernel_options=options), inputs)


if __name__ == "__main__":
    main()
