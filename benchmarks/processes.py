#!/usr/bin/env python3
"""Measure a training step on one process and on two, with one thread each, on the CPU of this machine.

    python benchmarks/processes.py                                     # about 7 minutes; the record is results/processes.json
    python benchmarks/processes.py --sizes tiny --rounds 1 --steps 2 --out /tmp/quick.json     # try it

How it measures:

- `torchrun` starts new processes for each measurement. They train with the library's `Trainer` and exchange gradients
  through PyTorch's DistributedDataParallel and gloo. All sentences are equally long, so no process waits for a longer batch.
- Three launches: `one` process with a batch; `weak`, two processes with such a batch each; `strong`, two processes with half
  of it each. `one` also measures `half` of the batch, and `weak` two processes that train `apart`, without communication.
- The rounds alternate in time, each starting with another launch. The first steps of a launch are not counted. The record
  holds every round: seconds of a step, the median of the launch.
- Bytes on the wire are counted in two further steps of `weak`, by a communication hook; so are the collectives.
- Memory is the largest resident memory of each process until its first measurement ends (on Linux, from /proc).
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from annotated_transformer.batches import collate
from annotated_transformer.distributed import Processes, destroy_process_group, init_process_group
from annotated_transformer.files import atomic_write, to_json
from annotated_transformer.kernels import accelerate
from annotated_transformer.loader import TrainingLoader
from annotated_transformer.train_config import TrainConfig
from annotated_transformer.trainer import Trainer
from annotated_transformer.transformer import PRESETS, Transformer, TransformerConfig, count_parameters

TINY = PRESETS['tiny']
SIZES = {
    'tiny': TransformerConfig(4000, TINY.n_layers, TINY.d_model, TINY.d_ff, TINY.n_heads),
    'small': TransformerConfig(8000, n_layers=3, d_model=256, d_ff=1024, n_heads=4),
}
LAUNCHES = {'one': 1, 'weak': 2, 'strong': 2} # number of processes
MAX_TOKENS = 1024
LENGTH = 16     # tokens of each sentence, a special token included
N_PAIRS = 2048
WARM_UP = 2     # steps that are not counted: the first ones allocate memory and arrange the gradients in buckets
SEED = 1
MESSAGES = (4, 2**20, 25 * 2**20) # bytes: one number, and the sizes of DistributedDataParallel's buckets
COLLECTIVES = ('all_gather', 'all_gather_object', 'all_reduce', 'barrier', 'broadcast', 'broadcast_object_list', 'reduce')


# --- a launch: what each process does

class TimedTrainer(Trainer):
    "Notes when each step ends, and ends a run after its last step."
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.ends = []

    def update_clock(self):
        stop_requested = super().update_clock() # the last collective of a step
        self.ends.append(time.perf_counter())
        return stop_requested

    def finish(self):
        return self.model

    def seconds(self):
        "Seconds of each step that counts."
        ends = self.ends[WARM_UP - 1:]
        return [end - start for start, end in zip(ends, ends[1:])]

class CountingTrainer(TimedTrainer):
    "Notes the bytes of each bucket, and all collectives of a step."
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.calls = []
        for name in COLLECTIVES:
            setattr(dist, name, self.counted(getattr(dist, name)))

    def counted(self, function):
        def call(*args, **options):
            self.calls.append(function.__name__)
            return function(*args, **options)
        return call

    def prepare(self):
        super().prepare()
        self.loss_module.register_comm_hook(None, self.count_bytes)

    def count_bytes(self, group, bucket):
        "Sum the gradients of a bucket as usual, and note its size."
        self.bucket_bytes.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    def step(self, batches):
        self.calls.clear()
        self.bucket_bytes = []
        super().step(batches)

def train(trainer_class, label, folder, n_steps, processes, max_tokens=MAX_TOKENS, global_tokens=None):
    "Train a new model for some steps; return the trainer."
    config = TrainConfig(max_tokens, global_tokens, max_steps=n_steps, save_every=n_steps + 1, seed=SEED)
    generator = torch.Generator().manual_seed(SEED)
    rows = torch.randint(4, SIZES[label].vocab_size, (N_PAIRS, 2, LENGTH - 1), generator=generator).tolist()
    pairs = [tuple(pair) for pair in rows]
    torch.manual_seed(SEED)
    model = accelerate(Transformer(SIZES[label]))
    loader = TrainingLoader(pairs, max_tokens, SEED, rank=processes.rank, world_size=processes.size,
                            batches_per_step=config.batches_per_step)
    trainer = trainer_class(model, loader, [collate(pairs[:1])], config, folder, progress_bar=False, processes=processes)
    trainer.fit()
    return trainer

def peak_mib():
    "The largest resident memory of this process until now."
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith('VmHWM:'))

def all_reduce_seconds(n_bytes, repeats=9):
    "Median seconds to all-reduce float32 numbers that all processes have."
    numbers = torch.zeros(n_bytes // 4)
    found = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(numbers)
        found.append(time.perf_counter() - start)
    return statistics.median(found)

def work(args):
    "Measure one launch, and write what rank 0 found."
    launch = args.worker
    label = args.sizes[0]
    processes = init_process_group()
    folder = args.out.parent
    n_steps = WARM_UP + args.steps
    global_tokens = processes.size * MAX_TOKENS if launch == 'weak' else None
    trainer = train(TimedTrainer, label, folder / 'run', n_steps, processes, global_tokens=global_tokens)
    found = {'parameters': count_parameters(trainer.model), 'peak_mib': processes.gather([peak_mib()]),
             'seconds': {launch: statistics.median(trainer.seconds())}}
    if launch == 'one':
        half = train(TimedTrainer, label, folder / 'half', n_steps, processes, max_tokens=MAX_TOKENS // 2)
        found['seconds']['half'] = statistics.median(half.seconds())
    if launch == 'weak':
        found['all_reduce_seconds'] = [all_reduce_seconds(n_bytes) for n_bytes in MESSAGES]
        processes.barrier()
        alone = train(TimedTrainer, label, folder / f'apart-{processes.rank}', n_steps, Processes())
        found['seconds']['apart'] = statistics.mean(processes.gather([statistics.median(alone.seconds())]))
        counting = train(CountingTrainer, label, folder / 'counted', 2, processes, global_tokens=global_tokens)
        found['bucket_bytes'] = counting.bucket_bytes
        found['collectives'] = counting.calls
    if processes.is_main_process:
        atomic_write(args.out, to_json(found))
    destroy_process_group(processes)


# --- the measurement

def run(launch, label, args):
    "Start the processes of a launch; return what rank 0 found."
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / 'found.json'
        command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(LAUNCHES[launch]),
                   __file__, '--worker', launch, '--sizes', label, '--steps', str(args.steps), '--out', str(out)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {'OMP_NUM_THREADS': '1'})
        if done.returncode:
            raise RuntimeError(f'{" ".join(command)}\n{done.stderr[-3000:]}')
        return json.loads(out.read_text('utf-8'))

def measure(label, args):
    "All rounds of one model."
    names = list(LAUNCHES)
    seconds = {}
    peaks = {}
    all_reduces = []
    for i in range(args.rounds):
        start = i % len(names)
        for launch in names[start:] + names[:start]:
            found = run(launch, label, args)
            for name, value in found['seconds'].items():
                seconds.setdefault(name, []).append(round(value, 5))
            peaks.setdefault(launch, []).append(found['peak_mib'])
            if launch == 'weak':
                counted = found
                all_reduces.append(found['all_reduce_seconds'])
        print(f'{label}, round {i + 1}: ' + ', '.join(f'{name} {1000 * values[-1]:.0f} ms' for name, values in seconds.items()),
              flush=True)
    summary = {name: {'median': statistics.median(values), 'low': min(values), 'high': max(values)}
               for name, values in seconds.items()}
    return {'parameters': counted['parameters'], 'bytes_per_step': sum(counted['bucket_bytes']),
            'bucket_bytes': counted['bucket_bytes'], 'collectives_per_step': len(counted['collectives']),
            'step_seconds': summary, 'rounds': seconds,
            'peak_mib': {launch: [max(ranks) for ranks in zip(*values)] for launch, values in peaks.items()},
            'all_reduce_rounds': all_reduces, 'model': asdict(SIZES[label])}

def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--sizes', nargs='+', choices=SIZES, default=list(SIZES), help='models to train (all)')
    parser.add_argument('--rounds', type=int, default=5, help='launches of each kind (5)')
    parser.add_argument('--steps', type=int, default=4, help='steps that count, in each launch (4)')
    parser.add_argument('--out', type=Path, help='the record (default: benchmarks/results/processes.json)')
    parser.add_argument('--worker', choices=LAUNCHES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in ('rounds', 'steps'):
        if getattr(args, name) < 1:
            parser.error(f'--{name} {getattr(args, name)} must be at least 1')
    return args

def main():
    args = arguments()
    if args.worker:
        return work(args)
    from record import RESULTS, about
    record = {'name': 'processes', **about(), 'seed': SEED,
              'settings': {'rounds': args.rounds, 'steps': args.steps, 'threads_per_process': 1, 'max_tokens': MAX_TOKENS,
                           'sentence_length': LENGTH, 'backend': 'gloo', 'precision': 'float32', 'message_bytes': MESSAGES},
              'metrics': {label: measure(label, args) for label in args.sizes}}
    atomic_write(args.out or RESULTS / 'processes.json', to_json(record))


if __name__ == '__main__':
    main()
