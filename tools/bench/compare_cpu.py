#!/usr/bin/env python3
"""henson beside PyTorch and ONNX Runtime on the CPU, in one run: alternating, medians, ratios.

  compare_cpu.py --henson target/release/henson --peers DIR [--rounds 3] [--train] [--infer] [--minilm DIR] [--base DIR]

--peers is the folder with torch_bert.py and onnx_infer.py (PyTorch, transformers and onnxruntime must be installed in
the Python that runs this). --minilm and --base are model directories for the inference peers. --kernels forces a kernel
set on henson, and AVX2 on PyTorch where the set is avx2. Prints one Markdown table a part.
"""
import argparse, json, os, statistics, subprocess, sys

TRAIN = [('tiny', 16, 128), ('mini', 16, 128), ('small', 16, 128), ('base', 8, 128)]

a = argparse.ArgumentParser()
a.add_argument('--henson', default='target/release/henson')
a.add_argument('--peers', required=True)
a.add_argument('--rounds', type=int, default=3)
a.add_argument('--train', action='store_true')
a.add_argument('--infer', action='store_true')
a.add_argument('--sizes', nargs='+', default=[s for s, *_ in TRAIN])
a.add_argument('--dtypes', nargs='+', default=['f32', 'bf16'])
a.add_argument('--minilm')
a.add_argument('--base')
a.add_argument('--kernels')
o = a.parse_args()

env = dict(os.environ, HF_HUB_OFFLINE='1')
if o.kernels == 'avx2':
    env.update(ATEN_CPU_CAPABILITY='avx2', ONEDNN_MAX_CPU_ISA='AVX2', MKL_ENABLE_INSTRUCTIONS='AVX2', DNNL_MAX_CPU_ISA='AVX2')
kernels = ['--kernels', o.kernels] if o.kernels else []


def run(*command):
    out = subprocess.run(command, env=env, capture_output=True, text=True)
    if out.returncode:
        sys.exit(f'{command} failed:\n{out.stderr}')
    return [json.loads(line) for line in out.stdout.splitlines() if line.startswith('{')]


def peer(script, *arguments):
    return run(sys.executable, os.path.join(o.peers, script), *arguments)


def henson(mode, model, batch, seq, dtype, *more):
    return run(o.henson, 'bench', mode, '--model', model, '--batch', str(batch), '--seq', str(seq), '--dtype', dtype,
               '--json', *more, *kernels)[0]


def median(rows, key):
    return statistics.median(row[key] for row in rows)


if o.train:
    print('| training step | dtype | PyTorch tok/s | henson tok/s | ratio (each round) | henson TFLOP/s | of peak | MiB |')
    print('|---|---|---|---|---|---|---|---|', flush=True)
    for size, batch, seq in TRAIN:
        if size not in o.sizes:
            continue
        for dtype in o.dtypes:
            ours, theirs = [], []
            for _ in range(o.rounds):
                theirs += peer('torch_bert.py', '--device', 'cpu', '--model', size, '--batch', str(batch), '--seq', str(seq), '--dtype', dtype)
                ours.append(henson('train', f'bert-{size}', batch, seq, dtype))
            rates = [x['tokens_per_s'] / y['tokens_per_s'] for x, y in zip(ours, theirs)]
            t, h = median(theirs, 'tokens_per_s'), median(ours, 'tokens_per_s')
            print(f'| {size} {batch}×{seq} | {dtype} | {t:,.0f} | {h:,.0f} | **{h / t:.2f}×** ({", ".join(f"{r:.2f}" for r in rates)}) '
                  f'| {median(ours, "tflops"):.3f} | {median(ours, "share_of_peak"):.0%} | {median(ours, "peak_mib"):.0f} |', flush=True)

if o.infer:
    print('\n| inference | ONNX Runtime f32 ms | PyTorch f32 / bf16 ms | henson f32 ms | henson bf16 ms | f32 vs ONNX | bf16 vs ONNX | bf16 vs PyTorch bf16 |')
    print('|---|---|---|---|---|---|---|---|', flush=True)
    for name, directory, shapes in [('MiniLM', o.minilm, ['1x8', '1x16', '1x32', '1x128', '16x128']), ('base', o.base, ['1x16', '1x128', '16x128'])]:
        if not directory:
            continue
        theirs, ours = {s: [] for s in shapes}, {(s, d): [] for s in shapes for d in o.dtypes}
        for _ in range(o.rounds):
            for row in peer('onnx_infer.py', '--model', directory, '--shapes', *shapes):
                theirs[row['shape']].append(row)
            for shape in shapes:
                batch, seq = map(int, shape.split('x'))
                for dtype in o.dtypes:
                    steps = '9' if batch * seq > 64 else '201'
                    ours[shape, dtype].append(henson('infer', directory, batch, seq, dtype, '--steps', steps))
        for shape in shapes:
            onnx, t32, t16 = (median(theirs[shape], k) for k in ('onnxruntime_f32_ms', 'torch_f32_ms', 'torch_bf16_ms'))
            f32, bf16 = (median(ours[shape, d], 'ms') if d in o.dtypes else float('nan') for d in ('f32', 'bf16'))
            print(f'| {name} {shape} | {onnx:.2f} | {t32:.2f} / {t16:.2f} | {f32:.2f} | {bf16:.2f} | **{onnx / f32:.2f}×** | **{onnx / bf16:.2f}×** | {t16 / bf16:.2f}× |', flush=True)
