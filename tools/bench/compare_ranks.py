#!/usr/bin/env python3
"""Two processes against one: henson over MPI, PyTorch with DistributedDataParallel over Gloo, on the same work and machine.

  compare_ranks.py --henson target/release/henson --peer torch_bert.py --model small --batch 8 --rounds 3 [--compile]

Every process has --threads threads and a batch of its own, so that with cores enough for all a step would take as long as alone if the
exchange cost nothing. With --cores, the work of a step and the cores are fixed instead, and divided among 1, 2, 4, … processes: --batch is then that of
all together. henson and PyTorch take turns in every round; the median of each counts. Further
lines: what one rank costs over none (`mpirun -n 1`, `--ranks 1`), what `henson bench exchange` measures, and what `henson plan` makes of it
beside the measured steps. --peer is a script with torch_bert.py's class Bert; the interpreter that runs this one
must have torch. Prints one JSON line for every result, and a table at the end.

  compare_ranks.py --peer torch_bert.py --model small --batch 32 --cores 16 --ranks 2 4 8 --rounds 2
"""
import argparse, json, os, socket, statistics, subprocess, sys, tempfile, time

SIZES = {'tiny': (2, 128, 2), 'mini': (4, 256, 4), 'small': (4, 512, 8), 'medium': (8, 512, 8), 'base': (12, 768, 12)}

a = argparse.ArgumentParser()
a.add_argument('--henson', default='target/release/henson')
a.add_argument('--peer', required=True)
a.add_argument('--model', default='small', choices=SIZES)
a.add_argument('--batch', type=int, default=8, help='sequences of each process')
a.add_argument('--seq', type=int, default=128)
a.add_argument('--steps', type=int, default=10)
a.add_argument('--rounds', type=int, default=3)
a.add_argument('--ranks', type=int, nargs='+', default=[2], help='numbers of processes beside one')
a.add_argument('--threads', type=int, default=1, help='threads of each process')
a.add_argument('--cores', type=int, help='divide these cores, and a batch of --batch, among the processes')
a.add_argument('--mpirun', default='mpirun')
a.add_argument('--compile', action='store_true', help="torch.compile for PyTorch's processes")
a.add_argument('--torch', nargs=3, metavar=('RANK', 'SIZE', 'PORT'), help='be one of the PyTorch processes')
o = a.parse_args()


def threads(size):
    """Those of each of `size` processes."""
    return o.cores // size if o.cores else o.threads


def sequences(size):
    return o.batch // size if o.cores else o.batch


def torch_process(rank, size, port):
    """One rank of PyTorch's: prints the median of its steps on rank 0."""
    import torch
    import torch.distributed as dist
    from peer import load
    torch.set_num_threads(threads(size))
    torch.manual_seed(0)
    layers, hidden, heads = SIZES[o.model]
    model = load(o.peer).Bert(layers, hidden, heads).train()
    parameters = list(model.parameters())
    if size > 1:
        os.environ |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}
        dist.init_process_group('gloo', rank=rank, world_size=size)
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if o.compile:
        model = torch.compile(model)
    batch, length, predicted = sequences(size), o.seq, round(o.seq * 0.15)
    ids = torch.randint(0, 30522, (batch, length))
    segments = (torch.arange(length) >= length // 2).long().expand(batch, length).contiguous()
    rows = torch.cat([torch.randperm(length)[:predicted].sort().values + i * length for i in range(batch)])
    targets, labels = ids.reshape(-1)[rows], torch.randint(0, 2, (batch,))
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, fused=True)

    def step():
        optimizer.zero_grad(set_to_none=size == 1)
        model(ids, segments, rows, targets, labels).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    for _ in range(4):
        step()
    times = []
    for _ in range(o.steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    if rank == 0:
        print(json.dumps({'ms': 1e3 * statistics.median(times)}), flush=True)
    if size > 1:
        dist.destroy_process_group()


def torch_run(size):
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    own = [sys.executable, __file__, *sys.argv[1:]]
    children = [subprocess.Popen([*own, '--torch', str(rank), str(size), str(port)], stdout=subprocess.PIPE, text=True) for rank in range(size)]
    printed = [child.communicate()[0] for child in children]
    assert all(child.returncode == 0 for child in children), 'a PyTorch process failed'
    return json.loads(printed[0].splitlines()[-1])['ms']


def henson(*arguments, ranks=None):
    """The JSON of a henson command, under mpirun where `ranks` says so."""
    command = [o.henson, *arguments, '--json']
    if ranks:
        version = subprocess.run([o.mpirun, '--version'], capture_output=True, text=True).stdout
        more = ['--oversubscribe', '--bind-to', 'none'] if 'Open MPI' in version else []
        command = [o.mpirun, '-n', str(ranks), *more, *command]
    allowed = {'OMPI_ALLOW_RUN_AS_ROOT': '1', 'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1'}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | allowed)
    assert done.returncode == 0, f'{command}: {done.stderr}'
    return json.loads(done.stdout.splitlines()[-1])


def train(size):
    work = ['--batch', str(sequences(size)), '--seq', str(o.seq), '--threads', str(threads(size)), '--steps', str(o.steps)]
    return ['bench', 'train', '--model', f'bert-{o.model}', *work]


def plan(size, rates):
    """What `henson plan` predicts for a step of `size` processes. It has the same vocabulary and work as what is measured."""
    sets = ['steps=1', f'batch_size={size * sequences(size)}', f'sequence_length={o.seq}', f'accumulation={size}']
    sets = [word for setting in sets for word in ('--set', setting)]
    nodes = str(max(4, size))
    planned = henson('plan', '--model', f'bert-{o.model}', '--ranks', f'{size},{size}', '--per-node', nodes, '--rates', rates, *sets)
    return planned['rows'][0]['step_ms']


def main():
    cases = {
        'henson alone': lambda: henson(*train(1))['ms'],
        'henson --ranks 1': lambda: henson(*train(1), '--ranks', '1')['ms'],
        'henson mpirun -n 1': lambda: henson(*train(1), ranks=1)['ms'],
        'torch alone': lambda: torch_run(1),
    }
    for size in o.ranks:
        cases[f'henson {size} ranks'] = lambda size=size: henson(*train(size), ranks=size)['ms']
        cases[f'torch {size} ranks'] = lambda size=size: torch_run(size)
    found = {}
    for number in range(o.rounds):
        for name, case in cases.items():
            ms = case()
            print(json.dumps({'round': number, 'case': name, 'ms': round(ms, 3)}), flush=True)
            found.setdefault(name, []).append(ms)
    medians = {name: statistics.median(times) for name, times in found.items()}
    exchanges, planned = {}, {}
    for size in o.ranks:
        arguments = ['bench', 'exchange', '--model', f'bert-{o.model}', '--threads', str(threads(size)), '--steps', str(o.steps)]
        exchanges[size] = henson(*arguments, ranks=size)
        print(json.dumps({'ranks': size} | exchanges[size]), flush=True)
    # What a process computes alone, with the threads that it has among `size`, and what the exchange of the first number of ranks gave.
    for size in [1, *o.ranks]:
        with tempfile.NamedTemporaryFile('w', suffix='.jsonl') as rates:
            profiled = henson(*train(size), '--profile')
            rates.write(json.dumps(profiled) + '\n' + json.dumps(exchanges[o.ranks[0]]) + '\n')
            rates.flush()
            planned[size] = plan(size, rates.name)
    print(json.dumps({'planned_ms': planned}), flush=True)
    base = {'henson': medians['henson alone'], 'torch': medians['torch alone']}
    divided = f'{o.batch}×{o.seq} tokens and {o.cores} cores for all processes together' if o.cores else f'{o.batch}×{o.seq} tokens and {o.threads} threads for each process'
    print(f'\nbert-{o.model}, {divided}; ms of a step, medians of {o.rounds} rounds of medians')
    for name, ms in medians.items():
        print(f'  {name:<20} {ms:>9.2f}   efficiency {100 * base[name.split()[0]] / ms:>4.0f}%')
    for ranks, ms in planned.items():
        measured = medians['henson alone' if ranks == 1 else f'henson {ranks} ranks']
        print(f'  planned for {ranks} ranks  {ms:>9.2f}   measured {measured:.2f}, {100 * (ms / measured - 1):+.0f}%')


if o.torch:
    torch_process(*map(int, o.torch))
else:
    main()
