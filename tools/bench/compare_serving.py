#!/usr/bin/env python3
"""henson serve against ONNX Runtime behind HTTP (onnx_server.py, dynamic batching), by turns on the same machine.

  compare_serving.py --henson target/release/henson --model MINILM --peer peers/onnx_server.py --python venv/bin/python \
    --text TEXTFILE [--seconds 6] [--rounds 1] [--only f32,bf16,onnx] [--connections 1,8,64] [--kinds short,mixed,long]

On a GPU, without the peer (and without wrk, if it is not there; then processes of this script make the load):

  compare_serving.py --henson target/release/henson --model MINILM --text TEXTFILE --device cuda --only f32,bf16 --check \
    --connections 1,64,256

--check first compares what each server answers with `--device cpu --dtype f32`, and fails beyond 1e-4 (f32) or 1e-2 (bf16): vectors
of length 1, number by number, and the probabilities of filled blanks where the model can fill.

Uses wrk where it is on the PATH. Bodies are cut from the words of TEXTFILE: short (6 to 12 words), long (about 240 tokens), mixed (4 to
160 words, short ones more often). Prints a table in Markdown, and one JSON object for each measurement on standard error.
"""
import argparse, asyncio, concurrent.futures, json, multiprocessing, os, random, shutil, signal, statistics, subprocess, sys, tempfile
import time, urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument('--henson', required=True)
    parser.add_argument('--model', required=True)
    parser.add_argument('--peer', help='needed for onnx')
    parser.add_argument('--python', default=sys.executable)
    parser.add_argument('--text', required=True)
    parser.add_argument('--seconds', type=int, default=6)
    parser.add_argument('--rounds', type=int, default=1)
    parser.add_argument('--only', default='onnx,f32,bf16')
    parser.add_argument('--connections', default='1,8,64')
    parser.add_argument('--kinds', default='short,mixed,long')
    parser.add_argument('--device', default='cpu', choices=['cpu', 'cuda'])
    parser.add_argument('--check', action='store_true', help='compare the answers with those of the CPU in f32')
    parser.add_argument('--flags', default='', help='more flags for henson serve')
    options = parser.parse_args()
    if 'onnx' in options.only.split(',') and not options.peer:
        parser.error('--peer is missing; or leave onnx out with --only f32,bf16')
    return options


def bodies(text, directory):
    """One file of request bodies for each kind."""
    words = open(text, encoding='utf-8').read().split()
    draw = random.Random(0)

    def cut(count):
        start = draw.randrange(len(words) - count)
        return json.dumps({'inputs': ' '.join(words[start:start + count])})
    lengths = {
        'short': lambda: draw.randint(6, 12),
        'mixed': lambda: min(160, 4 + int(draw.expovariate(1 / 36))),
        'long': lambda: 178,
    }
    files = {}
    for kind, length in lengths.items():
        files[kind] = os.path.join(directory, f'{kind}.jsonl')
        with open(files[kind], 'w', encoding='utf-8') as out:
            out.write('\n'.join(cut(length()) for _ in range(2000)) + '\n')
    return files


def start(name, options, port, device=None):
    if name == 'onnx':
        command = [options.python, options.peer, '--model', options.model, '--port', str(port)]
    else:
        command = [options.henson, 'serve', '--model', options.model, '--port', str(port), '--dtype', name,
                   '--device', device or options.device, *options.flags.split()]
    # What henson says of failures is worth reading.
    errors = subprocess.DEVNULL if name == 'onnx' else None
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
    for _ in range(600):
        try:
            urllib.request.urlopen(f'http://127.0.0.1:{port}/health', timeout=1)
            return process
        except Exception:
            if process.poll() is not None:
                sys.exit(f'{name} ended before it was ready: {" ".join(command)}')
            time.sleep(0.1)
    sys.exit(f'{name} is not ready after a minute')


def post(port, route, body):
    request = urllib.request.Request(f'http://127.0.0.1:{port}{route}', json.dumps(body).encode(), {'Content-Type': 'application/json'})
    return json.load(urllib.request.urlopen(request, timeout=120))


def answers(port, file):
    """Vectors of texts of all lengths, asked for by many at once so that batches differ, and words for blanks."""
    texts = [json.loads(line)['inputs'] for line in open(file, encoding='utf-8')][:256]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        vectors = [row for rows in pool.map(lambda i: post(port, '/embed', {'inputs': texts[i:i + 8]}), range(0, 256, 8)) for row in rows]
        info = json.load(urllib.request.urlopen(f'http://127.0.0.1:{port}/info', timeout=30))
        if 'fill' not in info['abilities']:
            return vectors, []
        blanks = [' '.join(text.split()[:3] + [info['mask_token']] + text.split()[4:20]) for text in texts[:64] if len(text.split()) > 4]
        filled = list(pool.map(lambda text: post(port, '/fill', {'inputs': text, 'top': 1000})[0]['masks'][0]['predictions'], blanks))
    return vectors, [{guess['id']: guess['probability'] for guess in guesses} for guesses in filled]


def check(name, got, expected):
    limit = 1e-4 if name == 'f32' else 1e-2
    worst = max(abs(a - b) for one, other in zip(got[0], expected[0], strict=True) for a, b in zip(one, other, strict=True))
    likely = [(one.get(id, 0), p) for one, other in zip(got[1], expected[1], strict=True) for id, p in other.items() if p > 1e-3]
    blanks = max((abs(a - b) for a, b in likely), default=0)
    print(json.dumps({'server': name, 'vectors': len(got[0]), 'worst_difference': worst, 'blanks': len(got[1]), 'worst_probability': blanks}),
          file=sys.stderr, flush=True)
    if worst > limit or blanks > (limit if name == 'f32' else 5 * limit):
        sys.exit(f'{name}: answers differ from the CPU\'s by more than {limit}')


def load(port, connections, seconds, file):
    """What wrk does, by processes of this script."""
    workers = min(connections, max(1, (os.cpu_count() or 2) // 2))
    shares = [connections // workers + (i < connections % workers) for i in range(workers)]
    with multiprocessing.Pool(workers) as pool:
        parts = pool.starmap(clients, [(port, share, seconds, file, i) for i, share in enumerate(shares)])
    times = sorted(t for part, _ in parts for t in part)
    at = lambda share: 1e3 * times[min(len(times) - 1, int(share * len(times)))] if times else float('nan')
    return {'requests_per_s': len(times) / seconds, 'p50_ms': at(0.5), 'p99_ms': at(0.99), 'failed': sum(failed for _, failed in parts)}


def clients(port, connections, seconds, file, number):
    bodies = [line.rstrip('\n').encode() for line in open(file, encoding='utf-8')]
    times, failed = [], 0

    async def client(place):
        nonlocal failed
        draw = random.Random(place)
        reader, writer = await asyncio.open_connection('127.0.0.1', port)
        while (begin := time.perf_counter()) < end:
            body = draw.choice(bodies)
            writer.write(b'POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n' % len(body) + body)
            head = await reader.readuntil(b'\r\n\r\n')
            length = next(int(line.split(b':')[1]) for line in head.split(b'\r\n') if line.lower().startswith(b'content-length'))
            await reader.readexactly(length)
            if b' 200 ' in head.split(b'\r\n')[0]:
                times.append(time.perf_counter() - begin)
            else:
                failed += 1
        writer.close()

    async def all_of_them():
        await asyncio.gather(*(client(1000 * number + i) for i in range(connections)))

    end = time.perf_counter() + seconds
    asyncio.run(all_of_them())
    return times, failed


def wrk(port, connections, seconds, file):
    if not shutil.which('wrk'):
        return load(port, connections, seconds, file)
    command = ['wrk', '-t1', f'-c{connections}', f'-d{seconds}s', '--timeout', '30s', '-s', os.path.join(HERE, 'wrk_bodies.lua'),
               f'http://127.0.0.1:{port}/embed', '--', file]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in out.splitlines() if line.startswith('RESULT'))
    requests, micro, failed, p50, p99, size = line.split()[1:]
    return {'requests_per_s': int(requests) / (int(micro) / 1e6), 'p50_ms': float(p50), 'p99_ms': float(p99), 'failed': int(failed)}


def main():
    options = arguments()
    names = options.only.split(',')
    with tempfile.TemporaryDirectory() as directory:
        files = bodies(options.text, directory)
        if options.check:
            process = start('f32', options, 18079, 'cpu')
            expected = answers(18079, files['mixed'])
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=40)
        servers = {name: (18080 + i, start(name, options, 18080 + i)) for i, name in enumerate(names)}
        try:
            for name in names:
                if options.check and name != 'onnx':
                    check(name, answers(servers[name][0], files['mixed']), expected)
                wrk(servers[name][0], 8, 2, files['mixed'])
            print('| texts | connections | ' + ' | '.join(f'{name}: requests/s, p50, p99 ms' for name in names) + ' |')
            print('|---|---|' + '---|' * len(names))
            for kind in options.kinds.split(','):
                for connections in map(int, options.connections.split(',')):
                    cells = {name: [] for name in names}
                    for _ in range(options.rounds):
                        for name in names:
                            result = wrk(servers[name][0], connections, options.seconds, files[kind])
                            print(json.dumps({'server': name, 'texts': kind, 'connections': connections, **result}), file=sys.stderr, flush=True)
                            cells[name].append(result)
                            time.sleep(2)  # a server may still be at work on what nobody waits for
                    middle = lambda name, key: statistics.median(result[key] for result in cells[name])
                    row = [f"{middle(n, 'requests_per_s'):.0f}, {middle(n, 'p50_ms'):.1f}, {middle(n, 'p99_ms'):.1f}"
                           + (f" ({sum(r['failed'] for r in cells[n])} failed)" if any(r['failed'] for r in cells[n]) else '') for n in names]
                    print(f'| {kind} | {connections} | ' + ' | '.join(row) + ' |', flush=True)
        finally:
            for _, process in servers.values():
                process.send_signal(signal.SIGTERM)
            for _, process in servers.values():
                process.wait(timeout=40)


if __name__ == '__main__':
    main()
