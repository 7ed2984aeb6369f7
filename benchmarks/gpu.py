#!/usr/bin/env python3
"""Train many models at the same time on one GPU, and score them. The models are small, so one alone leaves a GPU idle.

    python benchmarks/gpu.py rates --data-dir DIR --jobs 1 8 15     # steps per second of 1, 8 and 15 runs together
    python benchmarks/gpu.py train --data-dir DIR --minutes 8       # the models of page 46

All runs start together, each in a process of its own. Those that end within --minutes have a record.
DIR holds the folders multi30k and multi30k-tok. Settings are chosen on `val` alone. Matrix products use TF32.
With CUDA's multi-process service (nvidia-cuda-mps-control), the kernels of several processes run at the same time;
without it, the processes take turns.
"""
import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SEEDS = 1, 2, 3
DECODING_TOKENS = 30_000 # that are decoded at once
WARM_UP = 30 # steps before a measurement
TOKENIZED = ('--recipe multi30k-en-de --corpus files --pair en-de '
             '--src {data}/multi30k-tok/train.lc.norm.tok.en.gz --tgt {data}/multi30k-tok/train.lc.norm.tok.de.gz '
             '--val-src {data}/multi30k-tok/val.lc.norm.tok.en.gz --val-tgt {data}/multi30k-tok/val.lc.norm.tok.de.gz '
             '--test-src {data}/multi30k-tok/test_2016_flickr.lc.norm.tok.en.gz '
             '--test-tgt {data}/multi30k-tok/test_2016_flickr.lc.norm.tok.de.gz')
RAW = '--recipe multi30k-en-de --data-dir {data}/multi30k'
BATCHES = '--max-tokens 4096 --max-epochs 45 --save-every 300 --average-checkpoints 5 --val-sentences 200'
R_DROP = '--r-drop 5 --compile-loss'
SETTINGS = { # of the published size: a Transformer of width 128
    'tok-recipe': '--peak-lr 5e-3',
    'tok-r-drop': f'--peak-lr 5e-3 {R_DROP}',
    'tok-r-drop-less-dropout': f'--peak-lr 5e-3 {R_DROP} --dropout 0.2',
}
WIDE = '--d-model 256 --d-ff 512 --peak-lr 2.5e-3' # 7.8 million parameters
PENALTIES = '0.6', '1.0', '1.4', '1.8'

@dataclass(frozen=True)
class Run:
    "A model to train: its record's name, the options of `annotated-transformer train`, and the test splits to score."
    name: str
    options: str
    splits: tuple[str, ...] = ()

def all_runs() -> list[Run]:
    "Three seeds of every setting."
    flickr = 'test_2016_flickr'
    both = (flickr, 'test_2017_mscoco')
    found = []
    for seed in SEEDS:
        for name, options in SETTINGS.items():
            found.append(Run(f'gpu-{name}-seed{seed}', f'{TOKENIZED} {BATCHES} {options} --seed {seed}', ('test',)))
        found.append(Run(f'gpu-en-de-wide-seed{seed}', f'{RAW} {BATCHES} {R_DROP} {WIDE} --seed {seed}', both))
    return found

def start_sharing() -> bool:
    "Let the kernels of several processes run at the same time, where CUDA's service for that is installed."
    if not shutil.which('nvidia-cuda-mps-control'):
        return False
    os.environ['CUDA_MPS_PIPE_DIRECTORY'] = '/tmp/mps'
    os.environ['CUDA_MPS_LOG_DIRECTORY'] = '/tmp/mps-log'
    started = subprocess.run(['nvidia-cuda-mps-control', '-d'])
    return started.returncode == 0

def stop_sharing() -> None:
    subprocess.run(['nvidia-cuda-mps-control'], input='quit\n', text=True)
    del os.environ['CUDA_MPS_PIPE_DIRECTORY']

def start(run: Run, args: argparse.Namespace, more: str = '') -> subprocess.Popen:
    "Start to train."
    options = run.options.replace('{data}', str(args.data_dir))
    command = [sys.executable, '-m', 'annotated_transformer', 'train', *shlex.split(options), *shlex.split(more),
               '--device', args.device, '--threads', '1', '--out', str(args.runs / run.name)]
    log = open(args.runs / f'{run.name}.txt', 'w')
    environment = os.environ | {'TORCH_ALLOW_TF32_CUBLAS_OVERRIDE': '1'}
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

def score(run: Run, args: argparse.Namespace) -> subprocess.Popen:
    "Start to write a run's record: val, with several length penalties, and the test splits."
    options = run.options.replace('{data}', 'DIR')
    trained = f'TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 annotated-transformer train {options} {args.more}'.rstrip()
    command = [sys.executable, str(HERE / 'record.py'), str(args.runs / run.name), run.name, '--command', trained,
               '--beam-size', '5', '--length-penalty', *PENALTIES, '--batch-tokens', str(DECODING_TOKENS)]
    for split in run.splits:
        command += ['--split', split]
    if TOKENIZED in run.options:
        command += ['--tokenized']
    log = open(args.runs / f'{run.name}.txt', 'a')
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

def last_line(path: Path) -> str:
    lines = path.read_text(errors='replace').replace('\r', '\n').splitlines()
    return lines[-1][:200] if lines else ''

def train_all(runs: list[Run], args: argparse.Namespace) -> None:
    "Train all runs together; score each as soon as it ends."
    end = time.monotonic() + 60 * args.minutes
    training = {run: start(run, args, args.more) for run in runs}
    scoring = {}
    shown = time.monotonic()
    while (training or scoring) and time.monotonic() < end:
        time.sleep(0.5)
        for run, process in list(training.items()):
            if process.poll() is not None:
                del training[run]
                if process.returncode:
                    print(run.name, 'failed:', (args.runs / f'{run.name}.txt').read_text()[-1500:], flush=True)
                else:
                    scoring[run] = score(run, args)
        for run, process in list(scoring.items()):
            if process.poll() is not None:
                del scoring[run]
                text = (args.runs / f'{run.name}.txt').read_text().split('\n')
                print(run.name, 'failed' if process.returncode else 'scored', ' '.join(text[-6:]), flush=True)
        if time.monotonic() - shown > 30:
            shown = time.monotonic()
            for run in list(training)[:2]:
                print(f'{end - shown:.0f} s left', run.name, last_line(args.runs / f'{run.name}.txt'), flush=True)
    for process in [*training.values(), *scoring.values()]:
        process.kill()
        print('stopped at the time limit', flush=True)

def n_steps(folder: Path) -> int:
    log = folder / 'log.jsonl'
    lines = log.read_text().splitlines() if log.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith('}')]
    return max((row['step'] for row in rows), default=0)

def rates(runs: list[Run], args: argparse.Namespace) -> None:
    "Print the steps per second of several runs at the same time, once all have taken some steps."
    for jobs in args.jobs:
        together = runs[:jobs]
        folders = [args.runs / run.name for run in together]
        processes = [start(run, args, f'--overwrite --log-every 5 --save-every 100000 {args.more}')
                     for run in together]
        start_time = time.monotonic()
        while time.monotonic() - start_time < args.wait and min(map(n_steps, folders)) < WARM_UP:
            time.sleep(0.5)
        waited = time.monotonic() - start_time
        before = [n_steps(folder) for folder in folders]
        time.sleep(args.seconds)
        after = [n_steps(folder) for folder in folders]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        found = [round((b - a) / args.seconds, 1) for a, b in zip(before, after)]
        print(f'{jobs} runs, {args.more}: {waited:.0f} s to start, steps per second {found}', flush=True)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('part', choices=['rates', 'train'])
    parser.add_argument('--data-dir', type=Path, required=True, help='folder with multi30k and multi30k-tok')
    parser.add_argument('--runs', type=Path, default=Path('runs/gpu'), help='folder of the runs')
    parser.add_argument('--minutes', type=float, default=8, help='time for training and scoring (8)')
    parser.add_argument('--only', nargs='+', help='names of runs (default: all)')
    parser.add_argument('--more', default='', help='more options of train for every run, such as "--max-epochs 2"')
    parser.add_argument('--jobs', type=int, nargs='+', default=[1, 8, 15], help='rates: runs at the same time')
    parser.add_argument('--seconds', type=float, default=10, help='rates: length of a measurement (10)')
    parser.add_argument('--wait', type=float, default=60, help='rates: seconds in which all runs must start (60)')
    parser.add_argument('--no-sharing', action='store_true', help='do not use the multi-process service')
    parser.add_argument('--device', default='cuda', choices=['cuda', 'cpu'])
    args = parser.parse_args()
    runs = [run for run in all_runs() if not args.only or run.name in args.only]
    args.runs.mkdir(parents=True, exist_ok=True)
    sharing = start_sharing() if args.device == 'cuda' and not args.no_sharing else False
    print('multi-process service:', sharing, flush=True)
    try:
        if args.part == 'rates':
            return rates(runs, args)
        train_all(runs, args)
    finally:
        if sharing:
            stop_sharing()

if __name__ == '__main__':
    main()
