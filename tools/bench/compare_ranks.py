#!/usr/bin/env python3
"""Two processes against one: henson over MPI, PyTorch with DistributedDataParallel over Gloo, on the same work and machine.

  compare_ranks.py --henson target/release/henson --peer torch_bert.py --model small --batch 8 --rounds 3 [--compile]

Every process has one thread and a batch of its own, so that with as many cores as processes a step would take as long as alone if
the exchange cost nothing. henson and PyTorch take turns in every round; the median of each counts. Further
lines: what one rank costs over none (`mpirun -n 1`, `--ranks 1`), what `henson bench exchange` measures, and what `henson plan` makes of it
for 1, 2 and 4 ranks, beside the measured steps. --peer is a script with torch_bert.py's class Bert; the interpreter that runs this one
must have torch. Prints one JSON line for every result, and a table at the end.
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
a.add_argument('--ranks', type=int, default=2)
a.add_argument('--four', action='store_true', help='measure four henson ranks, too: for four cores or more')
a.add_argument('--mpirun', default='mpirun')
a.add_argument('--compile', action='store_true', help="torch.compile for PyTorch's processes")
a.add_argument('--torch', nargs=3, metavar=('RANK', 'SIZE', 'PORT'), help='be one of the PyTorch processes')
o = a.parse_args()


def torch_process(rank, size, port):
    """One rank of PyTorch's: prints the median of its steps on rank 0."""
    import torch
    import torch.distributed as dist
    from peer import load
    torch.set_num_threads(1)
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
    batch, length, predicted = o.batch, o.seq, round(o.seq * 0.15)
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


def main():
    model = f'bert-{o.model}'
    train = ['bench', 'train', '--model', model, '--batch', str(o.batch), '--seq', str(o.seq), '--threads', '1', '--steps', str(o.steps)]
    cases = {
        'henson alone': lambda: henson(*train)['ms'],
        'henson --ranks 1': lambda: henson(*train, '--ranks', '1')['ms'],
        'henson mpirun -n 1': lambda: henson(*train, ranks=1)['ms'],
        f'henson {o.ranks} ranks': lambda: henson(*train, ranks=o.ranks)['ms'],
        'torch alone': lambda: torch_run(1),
        f'torch {o.ranks} ranks': lambda: torch_run(o.ranks),
    }
    if o.four:
        cases['henson 4 ranks'] = lambda: henson(*train, ranks=4)['ms']
    found = {}
    for number in range(o.rounds):
        for name, case in cases.items():
            ms = case()
            print(json.dumps({'round': number, 'case': name, 'ms': round(ms, 3)}), flush=True)
            found.setdefault(name, []).append(ms)
    medians = {name: statistics.median(times) for name, times in found.items()}
    profiled = henson(*train, '--profile')
    exchange = henson('bench', 'exchange', '--model', model, '--threads', '1', '--steps', str(o.steps), ranks=o.ranks)
    print(json.dumps(exchange), flush=True)
    # What is planned has the same vocabulary and work as what was measured: a batch that grows with the ranks.
    planned = {}
    with tempfile.NamedTemporaryFile('w', suffix='.jsonl') as rates:
        rates.write(json.dumps(profiled) + '\n' + json.dumps(exchange) + '\n')
        rates.flush()
        for ranks in (1, 2, 4):
            sets = [f'steps=1', f'batch_size={ranks * o.batch}', f'sequence_length={o.seq}', f'accumulation={ranks}']
            sets = [word for setting in sets for word in ('--set', setting)]
            plan = henson('plan', '--model', model, '--ranks', f'{ranks},{ranks}', '--per-node', '4', '--rates', rates.name, *sets)
            planned[ranks] = plan['rows'][0]['step_ms']
    print(json.dumps({'planned_ms': planned}), flush=True)
    base = {'henson': medians['henson alone'], 'torch': medians['torch alone']}
    print(f'\n{model}, {o.batch}×{o.seq} tokens and one thread for each process; ms of a step, medians of {o.rounds} rounds of medians')
    for name, ms in medians.items():
        print(f'  {name:<20} {ms:>9.2f}   efficiency {100 * base[name.split()[0]] / ms:>4.0f}%')
    for ranks, ms in planned.items():
        measured = medians.get('henson alone' if ranks == 1 else f'henson {ranks} ranks')
        beside = f'measured {measured:.2f}, {100 * (ms / measured - 1):+.0f}%' if measured else 'not measured'
        print(f'  planned for {ranks} ranks  {ms:>9.2f}   {beside}')


if o.torch:
    torch_process(*map(int, o.torch))
else:
    main()
