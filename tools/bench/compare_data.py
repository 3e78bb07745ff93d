#!/usr/bin/env python3
"""`henson data build` beside the tokenizers library's batch encoding alone, on the same text: alternating, medians.

  compare_data.py --henson target/release/henson --tokenizer DIR [--rounds 3] [--threads 2] FILES.txt.zst…

The peer gets the lines in memory and only encodes them, without offsets and without special tokens
(`encode_batch_fast`); henson reads, decompresses, hashes, encodes and writes shards. Needs `tokenizers` in the Python
that runs this, and `zstd` on the path. Prints one Markdown table; --parts also builds from a part of the files, to show
that memory does not grow.
"""
import argparse, json, os, resource, shutil, statistics, subprocess, sys, tempfile, time

a = argparse.ArgumentParser()
a.add_argument('--henson', default='target/release/henson')
a.add_argument('--tokenizer', required=True, help='a directory with vocab.txt, as of bert-base-uncased')
a.add_argument('--rounds', type=int, default=3)
a.add_argument('--threads', type=int, default=2)
a.add_argument('--parts', type=int, default=10, help='also build from one of so many parts')
a.add_argument('--out', default=None, help='where to write corpora [default: a temporary directory]')
a.add_argument('--peer', action='store_true', help=argparse.SUPPRESS)
a.add_argument('files', nargs='+')
o = a.parse_args()


def text(path):
    if path.endswith('.zst'):
        return subprocess.run(['zstd', '-dc', path], capture_output=True, check=True).stdout.decode()
    return open(path, encoding='utf-8').read()


def peer():
    """In a process of its own, so that its threads and its memory are its own."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    vocabulary = {line.rstrip('\n'): i for i, line in enumerate(open(os.path.join(o.tokenizer, 'vocab.txt'), encoding='utf-8'))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token='[UNK]', max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    seconds = size = tokens = 0
    for path in o.files:
        content = text(path)
        lines = [line for line in content.split('\n') if line]
        size += len(content.encode())
        for i in range(0, len(lines), 10_000):
            batch = lines[i:i + 10_000]
            start = time.perf_counter()
            encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            seconds += time.perf_counter() - start
            tokens += sum(len(e.ids) for e in encoded)
    print(json.dumps({'seconds': seconds, 'mb_per_s': size / 1e6 / seconds, 'tokens': tokens,
                      'peak_mib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def run(*command):
    env = dict(os.environ, RAYON_NUM_THREADS=str(o.threads), TOKENIZERS_PARALLELISM='true')
    out = subprocess.run(command, env=env, capture_output=True, text=True)
    if out.returncode:
        sys.exit(f'{command} failed:\n{out.stderr}')
    return json.loads(out.stdout.splitlines()[-1])


def build(out, files):
    shutil.rmtree(out, ignore_errors=True)
    return run(o.henson, 'data', 'build', '--json', '--tokenizer', o.tokenizer, '--out', out, '--threads',
               str(o.threads), *files)


if o.peer:
    peer()
    sys.exit()

place = tempfile.mkdtemp(dir=o.out)
ours, theirs = [], []
for _ in range(o.rounds):
    theirs.append(run(sys.executable, __file__, '--peer', '--tokenizer', o.tokenizer, *o.files))
    ours.append(build(os.path.join(place, 'all'), o.files))
tokens = ours[0]['train']['pieces'] + ours[0]['held_out']['pieces']
ratios = [h['mb_per_s'] / t['mb_per_s'] for h, t in zip(ours, theirs)]
median = lambda rows, key: statistics.median(row[key] for row in rows)
print('| | MB/s | tokens | peak MiB | ratio (each round) |')
print('|---|---|---|---|---|')
print(f"| tokenizers, `encode_batch_fast` alone | {median(theirs, 'mb_per_s'):.2f} | {theirs[0]['tokens']:,} "
      f"| {median(theirs, 'peak_mib'):.0f} | 1 |")
print(f"| henson data build, all of it | {median(ours, 'mb_per_s'):.2f} | {tokens:,} | {median(ours, 'peak_mib'):.0f} "
      f"| {statistics.median(ratios):.2f} ({', '.join(f'{r:.2f}' for r in ratios)}) |")

# The same files cut down to a part of their lines: as many sources, less text.
if o.parts > 1:
    files = []
    for path in o.files:
        content = text(path)
        end = content.find('\n\n', len(content) // o.parts)
        files.append(os.path.join(place, os.path.basename(path) + '.part.txt.zst'))
        subprocess.run(['zstd', '-q', '-19', '-o', files[-1]], input=content[:end + 2].encode(), check=True)
    part = build(os.path.join(place, 'part'), files)
    print(f"| henson data build, 1/{o.parts} of it | {part['mb_per_s']:.2f} | "
          f"{part['train']['pieces'] + part['held_out']['pieces']:,} | {part['peak_mib']:.0f} | |")
shutil.rmtree(place)
