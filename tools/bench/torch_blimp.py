#!/usr/bin/env python3
"""Minimal pairs by pseudo-log-likelihood in PyTorch and transformers: the peer of `henson eval --task blimp`.

  torch_blimp.py --model DIR --data blimp.jsonl[.zst] [--limit N] [--dtype f32|bf16] [--tokens 4096] [--threads 2]
  torch_blimp.py … --henson target/release/henson [--rounds 3]

What a careful user would write: sentences sorted by length, so that little is padded; one row for each masked piece;
the encoder once, and the vocabulary's logits at the masked positions alone (transformers' own BertForMaskedLM computes
them everywhere, which --everywhere does). --limit takes the first N pairs of each paradigm, as henson does. Prints one
JSON object; with --henson both in turn, and the ratio of each round. On a busy machine compare `cpu_seconds` with
--threads 1 against what `time henson eval --threads 1` spends.
"""
import argparse, collections, json, os, statistics, subprocess, sys, time

a = argparse.ArgumentParser()
a.add_argument('--model', required=True)
a.add_argument('--data', required=True)
a.add_argument('--limit', type=int, default=10**9)
a.add_argument('--dtype', choices=['f32', 'bf16'], default='f32')
a.add_argument('--tokens', type=int, default=4096)
a.add_argument('--threads', type=int, default=2)
a.add_argument('--everywhere', action='store_true')
a.add_argument('--henson')
a.add_argument('--rounds', type=int, default=3)
o = a.parse_args()


def pairs():
    if o.data.endswith('.zst'):
        text = subprocess.run(['zstd', '-dc', o.data], capture_output=True, check=True, text=True).stdout
    else:
        text = open(o.data, encoding='utf-8').read()
    seen = collections.Counter()
    for line in text.splitlines():
        pair = json.loads(line)
        seen[pair['UID']] += 1
        if seen[pair['UID']] <= o.limit:
            yield pair['sentence_good'], pair['sentence_bad']


def measure():
    os.environ['HF_HUB_OFFLINE'] = '1'
    import torch, transformers
    torch.set_num_threads(o.threads)
    tokenizer = transformers.BertTokenizer(vocab=os.path.join(o.model, 'vocab.txt'), do_lower_case=True)
    model = transformers.BertForMaskedLM.from_pretrained(o.model, attn_implementation='sdpa').eval()
    if o.dtype == 'bf16':
        model = model.bfloat16()
    mask, pad = tokenizer.mask_token_id, tokenizer.pad_token_id
    data = list(pairs())
    start, cpu = time.perf_counter(), time.process_time()
    rows = []
    for number, ids in enumerate(tokenizer([s for pair in data for s in pair])['input_ids']):
        rows += [(ids, number, i) for i in range(1, len(ids) - 1)]
    rows.sort(key=lambda row: len(row[0]))
    scores, tokens, at = [0.0] * (2 * len(data)), 0, 0
    with torch.inference_mode():
        while at < len(rows):
            end = at
            while end < len(rows) and len(rows[end][0]) * (end + 1 - at) <= o.tokens:
                end += 1
            some, at = rows[at:max(end, at + 1)], max(end, at + 1)
            width = len(some[-1][0])
            ids = torch.full((len(some), width), pad)
            real = torch.zeros((len(some), width), dtype=torch.long)
            for r, (row, _, _) in enumerate(some):
                ids[r, :len(row)] = torch.tensor(row)
                real[r, :len(row)] = 1
            line, place = torch.arange(len(some)), torch.tensor([i for _, _, i in some])
            targets = ids[line, place]
            ids[line, place] = mask
            if o.everywhere:
                logits = model(input_ids=ids, attention_mask=real).logits[line, place]
            else:
                logits = model.cls(model.bert(input_ids=ids, attention_mask=real).last_hidden_state[line, place])
            logs = logits.float().log_softmax(-1)[line, targets]
            for (row, number, _), log in zip(some, logs.tolist()):
                scores[number] += log
                tokens += len(row)
    seconds = time.perf_counter() - start
    right = sum(good > bad for good, bad in zip(scores[::2], scores[1::2]))
    return {'accuracy': right / len(data), 'correct': right, 'pairs': len(data), 'tokens': tokens, 'seconds': seconds,
            'cpu_seconds': time.process_time() - cpu, 'tokens_per_s': round(tokens / seconds)}


def run(command):
    out = subprocess.run(command, capture_output=True, text=True)
    if out.returncode:
        sys.exit(f'{command} failed:\n{out.stderr}')
    return json.loads(out.stdout.splitlines()[-1])


if not o.henson:
    print(json.dumps(measure()))
    sys.exit()

same = ['--model', o.model, '--data', o.data, '--dtype', o.dtype, '--threads', str(o.threads)]
limit = ['--limit', str(o.limit)] if o.limit < 10**9 else []
ratios = []
for _ in range(o.rounds):
    theirs = run([sys.executable, __file__, *same, *limit, '--tokens', str(o.tokens), *(['--everywhere'] if o.everywhere else [])])
    ours = run([o.henson, 'eval', '--task', 'blimp', *same, *limit, '--json'])
    ratios.append(theirs['seconds'] / ours['seconds'])
    print(f"PyTorch {theirs['seconds']:.1f} s, henson {ours['seconds']:.1f} s: {ratios[-1]:.2f}×; "
          f"right {theirs['correct']} and {ours['correct']} of {ours['pairs']}", flush=True)
print(f'median {statistics.median(ratios):.2f}×')
