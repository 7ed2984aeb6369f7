#!/usr/bin/env python3
"""Measure the memory of a training run in bfloat16 on a CPU, with and without the bound on oneDNN's caches.

    python benchmarks/memory.py --data-dir data/multi30k    # 4 minutes for each; the record is results/memory.json
    python benchmarks/memory.py --minutes 0.2 --record /dev/null --corpus toy-ende # try it

Each run is the command `train` in a separate process, with one thread. `kernels.bound_onednn_caches` leaves the
variables of the environment as they are: a capacity of 1024, the default of oneDNN and PyTorch, takes the bound away.
Every few seconds, the record gets the number of steps in the log and the resident memory (on Linux, from /proc).
"""
import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from annotated_transformer.checkpoints import read_log
from annotated_transformer.files import atomic_write, to_json
from annotated_transformer.kernels import CACHE_CAPACITY, ONEDNN_CACHES
from record import RESULTS, about

UNBOUNDED = 1024
MAX_TOKENS = 1024 # small batches: more steps, and so more shapes, in a minute

def resident_mib(process: int) -> int:
    "Return the resident memory of a process in MiB; 0 if it has ended."
    try:
        lines = Path(f'/proc/{process}/status').read_text().splitlines()
    except FileNotFoundError:
        return 0
    sizes = [line.split()[1] for line in lines if line.startswith('VmRSS:')] # in kB; absent once it has ended
    return int(sizes[0]) // 1024 if sizes else 0

def last_step(log: Path) -> int:
    "Return the last step in the log of a run; 0 before there is one."
    rows = read_log(log) if log.exists() else []
    return max((row.get('step', 0) for row in rows), default=0)

def run(capacity: int | None, args: argparse.Namespace) -> dict[str, list]:
    "Train with this capacity of the caches (None: what the library sets), and return the curve."
    environment = {name: value for name, value in os.environ.items() if name not in ONEDNN_CACHES}
    environment |= {'OMP_NUM_THREADS': '1'}
    if capacity is not None:
        environment |= {name: str(capacity) for name in ONEDNN_CACHES}
    curve = {'seconds': [], 'steps': [], 'resident_mib': []}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, '-m', 'annotated_transformer', 'train', '--corpus', args.corpus,
                   '--precision', args.precision, '--max-minutes', str(args.minutes), '--log-every', '5',
                   '--max-tokens', str(MAX_TOKENS), '--threads', '1', '--device', 'cpu', '--out', folder + '/run']
        if args.data_dir:
            command += ['--data-dir', str(args.data_dir)]
        with open(folder + '/output', 'w') as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        start = time.monotonic()
        while process.poll() is None:
            time.sleep(args.every)
            step = last_step(Path(folder) / 'run' / 'log.jsonl')
            mib = resident_mib(process.pid)
            if step and mib:
                curve['seconds'].append(round(time.monotonic() - start, 1))
                curve['steps'].append(step)
                curve['resident_mib'].append(mib)
        if process.returncode:
            raise RuntimeError(Path(folder + '/output').read_text())
    return curve

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--minutes', type=float, default=4, help='of training in each run')
    parser.add_argument('--every', type=float, default=5, help='seconds between two measurements')
    parser.add_argument('--corpus', default='multi30k', choices=['multi30k', 'toy-ende'])
    parser.add_argument('--data-dir', type=Path, help='folder of Multi30k')
    parser.add_argument('--precision', default='bfloat16', choices=['float32', 'bfloat16'])
    parser.add_argument('--capacities', type=int, nargs='*', help='to try instead of the library\'s')
    parser.add_argument('--record', type=Path, default=RESULTS / 'memory.json')
    args = parser.parse_args()
    runs = {}
    for capacity in [UNBOUNDED, *(args.capacities or [None])]:
        name = str(capacity or CACHE_CAPACITY)
        runs[name] = run(capacity, args)
        print(f'capacity {name}: {runs[name]["steps"][-1]:,} steps, at last {runs[name]["resident_mib"][-1]:,} MiB',
              flush=True)
    settings = {'corpus': args.corpus, 'precision': args.precision, 'minutes': args.minutes, 'max_tokens': MAX_TOKENS,
                'threads': 1}
    atomic_write(args.record, to_json({**about(), 'settings': settings, 'runs': runs}))


if __name__ == '__main__':
    main()
