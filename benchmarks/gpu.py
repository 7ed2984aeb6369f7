#!/usr/bin/env python3
"""Train many models at the same time on one GPU, and score them. The models are small, so one alone leaves a GPU idle.

    python benchmarks/gpu.py rates --data-dir DIR --jobs 1 8 15     # steps per second of 1, 8 and 15 runs together
    python benchmarks/gpu.py settings --data-dir DIR --minutes 8    # one change at a time, three seeds each
    python benchmarks/gpu.py final --data-dir DIR --minutes 8       # the models of page 46

A part starts its runs together, each in a process of its own, and writes the records of those that end within --minutes.
DIR holds the folders multi30k and multi30k-tok. Settings are compared on `val` alone: `settings` scores no test split.
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
WARM_UP = 30 # steps before a measurement
TOKENIZED = ('--recipe multi30k-en-de --corpus files --pair en-de '
             '--src {data}/multi30k-tok/train.lc.norm.tok.en.gz --tgt {data}/multi30k-tok/train.lc.norm.tok.de.gz '
             '--val-src {data}/multi30k-tok/val.lc.norm.tok.en.gz --val-tgt {data}/multi30k-tok/val.lc.norm.tok.de.gz '
             '--test-src {data}/multi30k-tok/test_2016_flickr.lc.norm.tok.en.gz '
             '--test-tgt {data}/multi30k-tok/test_2016_flickr.lc.norm.tok.de.gz')
RAW = '--recipe multi30k-{pair} --data-dir {data}/multi30k'
SETTINGS = {
    'tok-recipe': '',
    'tok-rdrop1': '--r-drop 1',
    'tok-rdrop5': '--r-drop 5',
    'tok-rdrop5-dropout02': '--r-drop 5 --dropout 0.2',
    'tok-rdrop5-sinusoidal': '--r-drop 5 --positions sinusoidal',
}
PENALTIES = '0.6', '1.0', '1.4', '1.8'

@dataclass(frozen=True)
class Run:
    "A model to train: its record's name, the options of `annotated-transformer train`, and the test splits to score."
    name: str
    options: str
    splits: tuple[str, ...] = ()

def runs_of(part: str, options: str) -> list[Run]:
    "The runs of a part."
    if part == 'settings':
        return [Run(f'{name}-seed{seed}', f'{TOKENIZED} {change} --seed {seed}')
                for seed in SEEDS for name, change in SETTINGS.items()]
    flickr = 'test_2016_flickr'
    both = (flickr, 'test_2017_mscoco')
    found = []
    for seed in SEEDS:
        found.append(Run(f'gpu-tok-en-de-seed{seed}', f'{TOKENIZED} {options} --seed {seed}', ('test',)))
        for pair, splits in (('en-de', both), ('de-en', both), ('en-fr', (flickr,))):
            found.append(Run(f'gpu-{pair}-seed{seed}', f'{RAW} {options} --seed {seed}'.replace('{pair}', pair), splits))
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
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

def score(run: Run, args: argparse.Namespace) -> subprocess.Popen:
    "Start to write a run's record: val, with several length penalties, and the test splits."
    published = run.options.replace('{data}', 'DIR')
    command = [sys.executable, str(HERE / 'record.py'), str(args.runs / run.name), run.name,
               '--command', f'annotated-transformer train {published}', '--beam-size', '5', '--length-penalty', *PENALTIES]
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

def rates(args: argparse.Namespace) -> None:
    "Print the steps per second of several runs at the same time, once all have taken some steps."
    for jobs in args.jobs:
        runs = runs_of('settings', '')[:jobs]
        folders = [args.runs / run.name for run in runs]
        processes = [start(run, args, f'--overwrite --log-every 5 --save-every 100000 {args.more}') for run in runs]
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
    parser.add_argument('part', choices=['rates', 'settings', 'final'])
    parser.add_argument('--data-dir', type=Path, required=True, help='folder with multi30k and multi30k-tok')
    parser.add_argument('--runs', type=Path, default=Path('runs/gpu'), help='folder of the runs')
    parser.add_argument('--minutes', type=float, default=8, help='time for training and scoring (8)')
    parser.add_argument('--options', default='', help='part final: options of train for every run')
    parser.add_argument('--more', default='', help='more options of train for every run, such as "--max-epochs 2"')
    parser.add_argument('--jobs', type=int, nargs='+', default=[1, 8, 15], help='part rates: runs at the same time')
    parser.add_argument('--seconds', type=float, default=10, help='part rates: length of a measurement (10)')
    parser.add_argument('--wait', type=float, default=60, help='part rates: at most so many seconds until the runs have started (60)')
    parser.add_argument('--no-sharing', action='store_true', help='do not use the multi-process service')
    parser.add_argument('--device', default='cuda', choices=['cuda', 'cpu'])
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    sharing = start_sharing() if args.device == 'cuda' and not args.no_sharing else False
    print('multi-process service:', sharing, flush=True)
    try:
        if args.part == 'rates':
            return rates(args)
        train_all(runs_of(args.part, args.options), args)
    finally:
        if sharing:
            stop_sharing()

if __name__ == '__main__':
    main()
