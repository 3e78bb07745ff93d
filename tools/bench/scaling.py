#!/usr/bin/env python3
"""How henson's cost grows: tokens/s against batch size, sequence length, model size and threads, as one SVG.

  scaling.py --henson target/release/henson --out docs/scaling.svg

Only Python's standard library. Every point is a `henson bench … --json`, a median over steps.
"""
import argparse, json, math, subprocess

a = argparse.ArgumentParser()
a.add_argument('--henson', default='target/release/henson')
a.add_argument('--out', default='docs/scaling.svg')
o = a.parse_args()

COLOURS = {'train f32': '#c44', 'train bf16': '#e90', 'infer f32': '#26a', 'infer bf16': '#3a6'}


def bench(mode, model, batch, seq, dtype, threads=2):
    work = batch * seq * {'bert-tiny': 1, 'bert-mini': 5, 'bert-small': 15, 'bert-base': 80}[model]
    steps = 5 if work > 20000 else 15
    out = subprocess.run([o.henson, 'bench', mode, '--model', model, '--batch', str(batch), '--seq', str(seq), '--dtype', dtype,
                          '--threads', str(threads), '--steps', str(steps), '--warmup', '2', '--json'], capture_output=True, text=True, check=True)
    row = json.loads(out.stdout)
    print(mode, model, batch, seq, dtype, threads, row['tokens_per_s'], flush=True)
    return row['tokens_per_s']


def series(points):
    return {f'{mode} {dtype}': [bench(mode, *point[:3], dtype, *point[3:]) for point in points]
            for mode in ('train', 'infer') for dtype in ('f32', 'bf16')}


batches, lengths = [1, 2, 4, 8, 16, 32, 64], [64, 128, 192, 256, 320, 384, 448, 512]
sizes = ['bert-tiny', 'bert-mini', 'bert-small', 'bert-base']
panels = [
    ('bert-mini, sequences of 128: batch size', batches, series([('bert-mini', b, 128) for b in batches])),
    ('bert-mini, 4096 tokens a batch: sequence length', lengths, series([('bert-mini', 4096 // s, s) for s in lengths])),
    ('8×128 tokens: model size', [s.removeprefix('bert-') for s in sizes], series([(s, 8, 128) for s in sizes])),
    ('bert-small, 8×128 tokens: threads', [1, 2], series([('bert-small', 8, 128, t) for t in (1, 2)])),
]

W, H, L, T = 430, 300, 62, 34
svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * W} {2 * H + 30}" font-family="sans-serif" font-size="11">',
       '<rect width="100%" height="100%" fill="white"/>']
for n, (title, xs, lines) in enumerate(panels):
    x0, y0 = (n % 2) * W + L, (n // 2) * H + T
    w, h = W - L - 16, H - T - 44
    log = 'model size' in title
    scale = (lambda v: math.log10(v)) if log else (lambda v: v)
    high = max(max(v) for v in lines.values())
    top = scale(high * 1.1)
    low = scale(min(min(v) for v in lines.values()) * 0.8) if log else 0
    px = lambda i: x0 + w * i / max(1, len(xs) - 1)
    py = lambda v: y0 + h - h * (scale(v) - low) / (top - low)
    svg.append(f'<text x="{x0}" y="{y0 - 12}" font-size="12" font-weight="bold">{title}</text>')
    svg.append(f'<rect x="{x0}" y="{y0}" width="{w}" height="{h}" fill="none" stroke="#ccc"/>')
    ticks = [10 ** e * m for e in range(1, 7) for m in (1, 3) if low <= scale(10 ** e * m) <= top] if log else [high * k / 4 for k in range(5)]
    for tick in ticks:
        svg.append(f'<text x="{x0 - 5}" y="{py(tick) + 4:.1f}" text-anchor="end">{tick:,.0f}</text>'
                   f'<line x1="{x0}" x2="{x0 + w}" y1="{py(tick):.1f}" y2="{py(tick):.1f}" stroke="#eee"/>')
    for i, x in enumerate(xs):
        svg.append(f'<text x="{px(i):.1f}" y="{y0 + h + 15}" text-anchor="middle">{x}</text>')
    for name, values in lines.items():
        points = ' '.join(f'{px(i):.1f},{py(v):.1f}' for i, v in enumerate(values))
        svg.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.8"/>')
        svg += [f'<circle cx="{px(i):.1f}" cy="{py(v):.1f}" r="2.4" fill="{COLOURS[name]}"/>' for i, v in enumerate(values)]
for i, (name, colour) in enumerate(COLOURS.items()):
    svg.append(f'<rect x="{L + i * 130}" y="{2 * H + 6}" width="14" height="4" fill="{colour}"/><text x="{L + 20 + i * 130}" y="{2 * H + 12}">{name}</text>')
svg.append(f'<text x="{2 * W - 16}" y="{2 * H + 12}" text-anchor="end" fill="#666">tokens/s</text></svg>')
open(o.out, 'w').write('\n'.join(svg) + '\n')
