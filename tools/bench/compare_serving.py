#!/usr/bin/env python3
"""henson serve against ONNX Runtime behind HTTP (onnx_server.py, dynamic batching), by turns on the same machine.

  compare_serving.py --henson target/release/henson --model MINILM --peer peers/onnx_server.py --python venv/bin/python \
    --text TEXTFILE [--seconds 6] [--rounds 1] [--only f32,bf16,onnx] [--connections 1,8,64] [--kinds short,mixed,long]

Needs wrk on the PATH. Bodies are cut from the words of TEXTFILE: short (6 to 12 words), long (about 240 tokens), mixed (4 to
160 words, short ones more often). Prints a table in Markdown, and one JSON object for each measurement on standard error.
"""
import argparse, json, os, random, signal, statistics, subprocess, sys, tempfile, time, urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument('--henson', required=True)
    parser.add_argument('--model', required=True)
    parser.add_argument('--peer', required=True)
    parser.add_argument('--python', default=sys.executable)
    parser.add_argument('--text', required=True)
    parser.add_argument('--seconds', type=int, default=6)
    parser.add_argument('--rounds', type=int, default=1)
    parser.add_argument('--only', default='onnx,f32,bf16')
    parser.add_argument('--connections', default='1,8,64')
    parser.add_argument('--kinds', default='short,mixed,long')
    parser.add_argument('--flags', default='', help='more flags for henson serve')
    return parser.parse_args()


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


def start(name, options, port):
    if name == 'onnx':
        command = [options.python, options.peer, '--model', options.model, '--port', str(port)]
    else:
        command = [options.henson, 'serve', '--model', options.model, '--port', str(port), '--dtype', name, *options.flags.split()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):
        try:
            urllib.request.urlopen(f'http://127.0.0.1:{port}/health', timeout=1)
            return process
        except Exception:
            if process.poll() is not None:
                sys.exit(f'{name} ended before it was ready: {" ".join(command)}')
            time.sleep(0.1)
    sys.exit(f'{name} is not ready after a minute')


def wrk(port, connections, seconds, file):
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
        servers = {name: (18080 + i, start(name, options, 18080 + i)) for i, name in enumerate(names)}
        try:
            for name in names:
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


main()
