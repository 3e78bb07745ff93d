#!/usr/bin/env python3
"""A crowd at /v1/completions: clients of unequal prompts and lengths that stream at once, clients that leave, requests beyond the limits.

  load_completions.py --henson target/release/henson --model DIR [--clients 64] [--tokens 16,128] [--dtype f32] [--rounds 3]

Where DIR is not there, it is made: a GPT-2 of random weights (--size tiny|small; small is GPT-2-small) with byte-level BPE that is trained on the
documents of this repository. That needs torch, transformers and tokenizers; the rest needs nothing.

It starts henson serve with as many --streams as clients, and checks what must hold: no client fails, each gets as many tokens as it asked for, a
client that leaves gives its place to one that waits within a second, what is beyond the limits gets 413 or 429 at once, /health answers meanwhile.
Prints one JSON object for each measurement, and a line of a table in Markdown.
"""
import argparse, asyncio, glob, json, os, random, statistics, subprocess, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))
SIZES = {'tiny': dict(n_embd=128, n_layer=4, n_head=4, vocab_size=4096), 'small': dict(vocab_size=50257)}

# New tokens of streams that shall not end: 64 of them with their prompts fit into the cache that henson serve takes by default.
LONG = 200


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument('--henson', required=True)
    parser.add_argument('--model', required=True)
    parser.add_argument('--size', default='small', choices=SIZES)
    parser.add_argument('--clients', type=int, default=64)
    parser.add_argument('--tokens', default='16,128', help='least and most new tokens')
    parser.add_argument('--prompt', default='8,64', help='least and most tokens of prompts')
    parser.add_argument('--dtype', default='f32')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--flags', default='', help='more flags for henson serve')
    return parser.parse_args()


def make(directory, size):
    import tokenizers, torch, transformers
    torch.manual_seed(0)
    config = transformers.GPT2Config(**SIZES[size])
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    documents = sorted(glob.glob(os.path.join(HERE, '../../**/*.md'), recursive=True))
    tokenizer.train(documents, vocab_size=4096, min_frequency=1, special_tokens=['<|endoftext|>'])
    # Tokens that no text has: every id that the model can choose must be one.
    tokenizer.add_tokens([f' w{i}' for i in range(tokenizer.get_vocab_size(), config.vocab_size)])
    end = tokenizer.token_to_id('<|endoftext|>')
    config.bos_token_id = config.eos_token_id = end
    transformers.GPT2LMHeadModel(config).save_pretrained(directory)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token='<|endoftext|>').save_pretrained(directory)


class Server:
    def __init__(self, options):
        self.clients = options.clients
        command = [options.henson, 'serve', '--json', '--port', '0', '--model', f'gpt={options.model}', '--dtype', options.dtype,
                   '--device', options.device, '--streams', str(options.clients), *options.flags.split()]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f'henson serve ended: {" ".join(command)}')
        self.host, self.port = json.loads(line)['address'].removeprefix('http://').split(':')

    def memory(self):
        status = open(f'/proc/{self.process.pid}/status').read()
        return int(status.split('VmRSS:')[1].split()[0]) / 1024

    def stop(self):
        self.process.terminate()
        return self.process.wait(60)

    async def send(self, path, body):
        reader, writer = await asyncio.open_connection(self.host, self.port)
        data = json.dumps(body).encode()
        head = f'POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n'
        writer.write(head.encode() + data)
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        return status, reader, writer

    async def get(self, path):
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(f'GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n'.encode())
        answer = (await reader.read()).decode()
        writer.close()
        return answer

    async def metric(self, name):
        for line in (await self.get('/metrics')).splitlines():
            if line.startswith(f'henson_{name}{{model="gpt"}} '):
                return float(line.split()[-1])
        return 0.0


async def events(reader):
    """The data of server-sent events; the frames of chunked bodies are lines between them."""
    while line := await reader.readline():
        if line.startswith(b'data: '):
            yield line[6:].strip()


def body(draw, prompt, tokens, more={}):
    ids = [draw.randrange(300, 3000) for _ in range(prompt)]
    return {'prompt': ids, 'max_tokens': tokens, 'seed': draw.randrange(1 << 30), 'logit_bias': {'0': -100}, 'stream': True,
            'stream_options': {'include_usage': True}, **more}


async def client(server, request):
    """One stream: its status, when each token came, and how many there were."""
    begin = time.perf_counter()
    status, reader, writer = await server.send('/v1/completions', request)
    times, usage, done = [], None, False
    if status == 200:
        async for data in events(reader):
            if data == b'[DONE]':
                done = True
                break
            event = json.loads(data)
            if 'error' in event:
                break
            usage = event.get('usage') or usage
            if event['choices']:
                times.append(time.perf_counter() - begin)
    writer.close()
    complete = done and usage and usage['completion_tokens'] == request['max_tokens']
    return {'ok': status == 200 and bool(complete), 'times': times, 'tokens': usage['completion_tokens'] if usage else 0}


async def until(holds, seconds=60):
    """Waits until something holds."""
    begin = time.perf_counter()
    while not await holds():
        assert time.perf_counter() - begin < seconds, 'it took too long'
        await asyncio.sleep(0.02)


async def idle(server):
    return await server.metric('streams_running') + await server.metric('streams_waiting') == 0


def quantile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def crowd(server, options, round_number):
    draw = random.Random(round_number)
    least, most = map(int, options.tokens.split(','))
    shortest, longest = map(int, options.prompt.split(','))
    requests = [body(draw, draw.randint(shortest, longest), draw.randint(least, most)) for _ in range(options.clients)]
    health = []

    async def ask_health():
        while True:
            begin = time.perf_counter()
            await server.get('/health')
            health.append(time.perf_counter() - begin)
            await asyncio.sleep(0.1)
    watching = asyncio.create_task(ask_health())
    begin = time.perf_counter()
    results = await asyncio.gather(*(client(server, request) for request in requests))
    seconds = time.perf_counter() - begin
    watching.cancel()
    first = [result['times'][0] for result in results if result['times']]
    # A token without a whole character comes with the next one, so that there are fewer events than tokens.
    rates = [(result['tokens'] - 1) / (result['times'][-1] - result['times'][0]) for result in results if len(result['times']) > 1]
    return {'clients': options.clients, 'failed': sum(not result['ok'] for result in results), 'seconds': seconds,
            'tokens': sum(result['tokens'] for result in results), 'tokens_per_s': sum(result['tokens'] for result in results) / seconds,
            'first_token_ms': {share: 1e3 * quantile(first, share / 100) for share in (50, 99)}, 'first_token_max_ms': 1e3 * max(first),
            'stream_tokens_per_s': {'median': statistics.median(rates), 'least': min(rates)}, 'health_max_ms': 1e3 * max(health, default=0)}


async def leaving(server):
    """All places are taken by long streams, one more waits; one leaves."""
    draw = random.Random(0)

    async def all_run():
        return await server.metric('streams_running') == server.clients

    async def one_waits():
        return await server.metric('streams_waiting') == 1
    running = await asyncio.gather(*(server.send('/v1/completions', body(draw, 8, LONG)) for _ in range(server.clients)))
    await until(all_run)
    status, reader, waiting = await server.send('/v1/completions', body(draw, 8, 5))
    assert status == 200, status
    await until(one_waits)
    begin = time.perf_counter()
    running[0][2].transport.abort()
    async for _ in events(reader):
        break
    seconds = time.perf_counter() - begin
    waiting.close()
    for _, _, writer in running[1:]:
        writer.transport.abort()
    begin = time.perf_counter()
    await until(lambda: idle(server))
    return {'left_to_first_token_s': seconds, 'all_left_s': time.perf_counter() - begin}


async def limits(server):
    """What can never be, and more than can wait."""
    draw = random.Random(0)
    answers = {}
    for name, request in {'too_many_tokens': body(draw, 8, 1000, {'n': 100}), 'too_long': body(draw, 1000, 100),
                          'bomb': body(draw, 8, 8, {'n': 10 ** 9})}.items():
        begin = time.perf_counter()
        status, _, writer = await server.send('/v1/completions', request)
        answers[name] = status
        assert time.perf_counter() - begin < 1, name
        writer.close()
    sent = await asyncio.gather(*(server.send('/v1/completions', body(draw, 8, 900)) for _ in range(2 * server.clients)))
    statuses = [status for status, _, _ in sent]
    for _, _, writer in sent:
        writer.transport.abort()
    await until(lambda: idle(server))
    return {**answers, 'flood': {str(status): statuses.count(status) for status in sorted(set(statuses))}}


async def measure(server, options):
    print(json.dumps({'memory_mb': server.memory(), 'when': 'before'}))
    rounds = []
    for number in range(options.rounds):
        rounds.append(await crowd(server, options, number))
        print(json.dumps(rounds[-1]), flush=True)
    left = await leaving(server)
    print(json.dumps(left), flush=True)
    refused = await limits(server)
    print(json.dumps(refused), flush=True)
    alone = [await client(server, body(random.Random(9), 32, 64)) for _ in range(3)]
    rate = statistics.median((one['tokens'] - 1) / (one['times'][-1] - one['times'][0]) for one in alone)
    first = statistics.median(one['times'][0] for one in alone)
    print(json.dumps({'alone': {'tokens_per_s': rate, 'first_token_ms': 1e3 * first}, 'memory_mb': server.memory(), 'when': 'after'}))
    middle = lambda pick: statistics.median(pick(one) for one in rounds)
    print(f"| {options.dtype} | {options.clients} | {middle(lambda r: r['tokens_per_s']):.0f} | {middle(lambda r: r['first_token_ms'][50]):.0f}, "
          f"{middle(lambda r: r['first_token_max_ms']):.0f} | {middle(lambda r: r['stream_tokens_per_s']['median']):.1f}, "
          f"{middle(lambda r: r['stream_tokens_per_s']['least']):.1f} | {1e3 * left['left_to_first_token_s']:.0f} |")
    failed = sum(one['failed'] for one in rounds)
    assert failed == 0, f'{failed} clients failed'
    assert left['left_to_first_token_s'] < 1, left
    assert refused['too_many_tokens'] == 413 and refused['too_long'] == 422 and refused['bomb'] == 422, refused
    assert set(refused['flood']) == {'200', '429'}, refused


def main():
    options = arguments()
    if not os.path.exists(options.model):
        make(options.model, options.size)
    server = Server(options)
    try:
        asyncio.run(measure(server, options))
    finally:
        ended = server.stop()
    assert ended == 0, f'henson serve ended with {ended}'


main()
