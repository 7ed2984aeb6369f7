#!/usr/bin/env python3
"""Train small models together on one GPU, in parts of at most nine minutes, and score them.

    python benchmarks/gpu.py full --data-dir DIR    # DIR holds the folders multi30k and multi30k-tok
    python benchmarks/gpu.py full --data-dir DIR    # again: continue with what has no record yet

One small model leaves a GPU idle, so all runs of a part start together, each in a separate process; every setting has
three seeds. A run that ends is scored, and gets its record in results/. After --minutes, the other runs save a
checkpoint in --runs and stop: the same command resumes them. With --max-minutes, a run that has trained for so long ends
as it is.

    full           to the end: tokenized text with dropout 0.2, with R-Drop and without it (the control); raw EN-DE with the
                   wide model and R-Drop; raw DE-EN and EN-FR
    baseline       to the end: tokenized text with dropout 0.3, without R-Drop and with it; raw EN-DE with the recipe
    sweep          what each setting of the Multi30k recipe is worth: 12 epochs, three seeds of the recipe and of each change,
                   scored on val; writes gpu-recipe-paired.json
    speed          tokens per second of base and big beside nn.Transformer (train_speed.py)
    rates          steps per second of 1, 8 and 15 runs together; writes no record

On an H200, the fifteen runs of full made about 160 steps per second together. They took a part of 9 and one of 4.6 minutes
(--max-minutes 11.5 in the second, so that it ends in time). With speed, that is less than 25 minutes of a GPU; baseline and
sweep are extras, which need as long again.

sweep keeps 15 runs going, the most important changes first; from the steps per second of full, its 54 runs need about 11
minutes. It takes two parts on the same machine, which keep unfinished runs in --runs:

    python benchmarks/gpu.py sweep --data-dir DIR --minutes 9
    python benchmarks/gpu.py sweep --data-dir DIR --minutes 4

The record holds the changes that all three seeds have finished, and names the others. A finished run is its training.json in
--runs: on another machine, copy these files there, and the same command trains what is missing.

Weights and length penalties are chosen on `val`. The settings of full were not: when they were chosen, the test scores of
earlier runs of six minutes were known (gpu-six-minutes.json, page 78).

Matrix products use TF32. With CUDA's multi-process service (nvidia-cuda-mps-control), the kernels of several processes run at
the same time; without it, the processes take turns.
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
from datetime import date
from pathlib import Path

import recipe
from annotated_transformer.files import atomic_write
from annotated_transformer.inference import DecodingConfig
from record import RESULTS, about

HERE = Path(__file__).parent
SEEDS = 1, 2, 3
MAX_MINUTES = 9
JOBS = 15 # runs at the same time
STOPPING = 15 # seconds of a part in which its runs save a checkpoint and end
DECODING_TOKENS = 30_000 # that are decoded at once
WARM_UP = 30 # steps before a measurement
FLICKR, COCO = 'test_2016_flickr', 'test_2017_mscoco'
TOKENIZED = ('--recipe multi30k-en-de --corpus files --pair en-de '
             '--src {data}/multi30k-tok/train.lc.norm.tok.en.gz --tgt {data}/multi30k-tok/train.lc.norm.tok.de.gz '
             '--val-src {data}/multi30k-tok/val.lc.norm.tok.en.gz --val-tgt {data}/multi30k-tok/val.lc.norm.tok.de.gz '
             '--test-src {data}/multi30k-tok/test_2016_flickr.lc.norm.tok.en.gz '
             '--test-tgt {data}/multi30k-tok/test_2016_flickr.lc.norm.tok.de.gz')
RAW = '--recipe multi30k-en-de --data-dir {data}/multi30k'
BATCHES = '--max-tokens 4096 --save-every 300 --average-checkpoints 5 --val-sentences 200'
EPOCHS_45 = '--max-epochs 45'
EPOCHS_55 = '--max-epochs 55' # as many as in the recipe
STEPS_8000 = '--max-steps 8000 --max-epochs 70' # as many steps as the published model took
RATE = '--peak-lr 5e-3' # of the published size: a Transformer of width 128
R_DROP = '--r-drop 5 --compile-loss'
LESS_DROPOUT = '--dropout 0.2'
WIDE = '--d-model 256 --d-ff 512 --peak-lr 2.5e-3' # 7.8 million parameters
AVERAGED = '--ema-decay 0.998' # a moving average over about 500 steps
PENALTIES = '0.6', '0.8', '1.0', '1.2', '1.4'
SPEED = {size: ['--sizes', size, '--device', 'cuda', '--precision', 'bfloat16', '--rounds', '5', '--steps', '4', '--threads',
                '2', '--systems', 'annotated_transformer', 'nn.Transformer, real logits',
                '--name', f'train-speed-gpu-{size}'] for size in ('base', 'big')}

@dataclass(frozen=True)
class Run:
    "A model to train: its record's name, options of `annotated-transformer train`, test splits to score; a sweep has none."
    name: str
    options: str
    splits: tuple[str, ...]

def seeds_of(name: str, splits: tuple[str, ...], *options: str) -> list[Run]:
    "Return a setting's run for each seed."
    return [Run(f'{name}-seed{seed}', ' '.join([*options, f'--seed {seed}']), splits) for seed in SEEDS]

def tokenized(name: str, *options: str) -> list[Run]:
    return seeds_of(name, ('test',), TOKENIZED, BATCHES, RATE, *options)

PARTS = {
    'full': [
        *tokenized('gpu-tok-r-drop', R_DROP, LESS_DROPOUT, AVERAGED, STEPS_8000),
        *tokenized('gpu-tok-control', LESS_DROPOUT, AVERAGED, STEPS_8000),
        *seeds_of('gpu-en-de-wide', (FLICKR, COCO), RAW, BATCHES, R_DROP, WIDE, AVERAGED, EPOCHS_55),
        *seeds_of('gpu-de-en', (FLICKR, COCO), RAW.replace('en-de', 'de-en'), BATCHES, RATE, EPOCHS_45),
        *seeds_of('gpu-en-fr', (FLICKR,), RAW.replace('en-de', 'en-fr'), BATCHES, RATE, EPOCHS_45)],
    'baseline': [
        *tokenized('gpu-tok-more-dropout', AVERAGED, STEPS_8000),
        *tokenized('gpu-tok-r-drop-more-dropout', R_DROP, AVERAGED, STEPS_8000),
        *seeds_of('gpu-en-de', (FLICKR, COCO), RAW, BATCHES, RATE, EPOCHS_45)],
}

# Of a sweep, only the last weights: too few steps for an average of checkpoints. --compile-loss concerns R-Drop alone.
SWEEP_FLAGS = '--max-tokens 4096 --max-epochs 12 --save-every 10000 --average-checkpoints 1 --compile-loss'
SWEEP = {name: (recipe.VARIANTS | {'batches of 2,048 tokens': '--max-tokens 2048'})[name] for name in ( # by importance
    'dropout 0.2', 'R-Drop 5', 'dropout 0.1', 'R-Drop 1', 'vocabulary 4,000', 'BPE-dropout 0.1', 'batches of 2,048 tokens',
    'peak learning rate 2e-3', 'peak learning rate 6e-3', 'no label smoothing', 'sinusoidal positions',
    'moving average of weights', 'wide model (d_model 256)', 'post-norm', 'd_ff 512', 'warm-up 200',
    'warm-up 1,000')}
SWEEP_RUNS = {name: Run(f'sweep-{recipe.folder_name(name)}', f'{RAW} {SWEEP_FLAGS} {flags}', ())
              for name, flags in recipe.planned([], True, SWEEP).items()} # by the names that recipe.py gives its rows

def has_record(name: str) -> bool:
    return (RESULTS / f'{name}.json').exists()

def is_done(run: Run, args: argparse.Namespace) -> bool:
    "Return whether a run has its record; in a sweep, where training scores val, whether it has ended."
    return has_record(run.name) if run.splits else (args.runs / run.name / 'training.json').exists()

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

def train_arguments(run: Run, folder: Path, args: argparse.Namespace) -> list[str]:
    "Return the arguments of `annotated-transformer` that train a model in a folder, or resume it."
    options = [word.replace('{data}', str(args.data_dir)) for word in shlex.split(run.options)]
    if args.max_minutes:
        options += ['--max-minutes', str(args.max_minutes)]
    return ['train', *options, '--device', args.device, '--threads', '1', '--out', str(folder)]

def score_arguments(run: Run, args: argparse.Namespace) -> list[str]:
    "Return the arguments of record.py that write a run's record: val, with several length penalties, and the test splits."
    options = run.options.replace('{data}', 'DIR')
    if args.max_minutes:
        options += f' --max-minutes {args.max_minutes}'
    trained = f'TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 annotated-transformer train {options}'
    found = [str(args.runs / run.name), run.name, '--command', trained, '--beam-size', '5',
             '--length-penalty', *PENALTIES, '--batch-tokens', str(DECODING_TOKENS),
             '--note', f'{len(PARTS[args.part])} runs shared one GPU (benchmarks/gpu.py {args.part})']
    for split in run.splits:
        found += ['--split', split]
    return [*found, '--tokenized'] if TOKENIZED in run.options else found

def start(command: list[str], log: Path) -> subprocess.Popen:
    "Start a Python program whose output goes to the end of a file."
    environment = os.environ | {'TORCH_ALLOW_TF32_CUBLAS_OVERRIDE': '1'}
    with log.open('a') as file:
        return subprocess.Popen([sys.executable, *command], stdout=file, stderr=subprocess.STDOUT, env=environment)

def train(run: Run, args: argparse.Namespace) -> subprocess.Popen:
    command = ['-m', 'annotated_transformer', *train_arguments(run, args.runs / run.name, args)]
    return start(command, args.runs / f'{run.name}.txt')

def score(run: Run, args: argparse.Namespace) -> subprocess.Popen:
    return start([str(HERE / 'record.py'), *score_arguments(run, args)], args.runs / f'{run.name}.txt')

def stop(processes: list[subprocess.Popen]) -> None:
    "End processes: those that train save a checkpoint first, if they do so in time."
    for process in processes:
        process.terminate()
    end = time.monotonic() + STOPPING
    for process in processes:
        try:
            process.wait(max(0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

def last_lines(path: Path, n: int = 1) -> str:
    lines = path.read_text(errors='replace').replace('\r', '\n').splitlines()
    return ' '.join(line[:200] for line in lines[-n:])

def train_part(runs: list[Run], args: argparse.Namespace) -> None:
    "Train the runs that are not done, 15 at a time; score each as soon as it ends."
    end = time.monotonic() + 60 * args.minutes - STOPPING
    waiting = [run for run in runs if not is_done(run, args)]
    training = {}
    scoring = {}
    shown = time.monotonic()
    while (waiting or training or scoring) and time.monotonic() < end:
        while waiting and len(training) + len(scoring) < JOBS:
            run = waiting.pop(0)
            training[run] = train(run, args)
        time.sleep(0.5)
        for run, process in list(training.items()):
            if process.poll() is not None:
                del training[run]
                if process.returncode:
                    print(run.name, 'failed:', last_lines(args.runs / f'{run.name}.txt', 20), flush=True)
                elif run.splits:
                    scoring[run] = score(run, args)
                else:
                    print(f'{end - time.monotonic():.0f} s left,', run.name, 'is done', flush=True)
        for run, process in list(scoring.items()):
            if process.poll() is not None:
                del scoring[run]
                result = 'failed:' if process.returncode else 'scored:'
                print(run.name, result, last_lines(args.runs / f'{run.name}.txt', 6), flush=True)
        if time.monotonic() - shown > 30:
            shown = time.monotonic()
            for run in list(training)[:2]:
                print(f'{end - shown:.0f} s left,', run.name, last_lines(args.runs / f'{run.name}.txt'), flush=True)
    stop([*training.values(), *scoring.values()])
    missing = [run.name for run in runs if not is_done(run, args)]
    print(f'{len(runs) - len(missing)} of {len(runs)} runs are done', flush=True)
    if missing:
        print('run the same command again to continue with', *missing, flush=True)

def sweep_row(name: str, args: argparse.Namespace) -> dict:
    "Return the row of a finished run, with the scores on val that training wrote."
    training = json.loads((args.runs / SWEEP_RUNS[name].name / 'training.json').read_text('utf-8'))
    val = training['val']
    progress = training['progress']
    return {'flags': recipe.planned([], True, SWEEP)[name], 'val_bleu': val['bleu'], 'val_chrf': val['chrf'],
            'signature': val['signature'], 'minutes': progress['minutes'], 'steps': progress['step'],
            'date': str(date.today())}

def write_sweep(args: argparse.Namespace) -> None:
    "Write the record of the changes whose runs have all ended, if those of the recipe have."
    complete = [names for names in ([*recipe.SEEDS], *map(recipe.run_names, SWEEP))
                if all(is_done(SWEEP_RUNS[name], args) for name in names)]
    rows = {name: sweep_row(name, args) for names in complete for name in names}
    if not rows.keys() >= recipe.SEEDS.keys():
        print('no record yet: the recipe itself has not been trained with three seeds')
        return
    found = recipe.comparison(rows, SWEEP)
    search = DecodingConfig()
    record = about() | {
        'name': 'gpu-recipe-paired', 'command': 'python benchmarks/gpu.py sweep --data-dir DIR', 'flags': SWEEP_FLAGS, 'epochs': 12,
        'recipe': recipe.RECIPES[recipe.RECIPE], 'seeds': list(SEEDS),
        'search': {'beam_size': search.beam_size, 'length_penalty': search.length_penalty},
        'note': f'{JOBS} runs at a time shared one GPU; matrix products used TF32'} | found
    atomic_write(RESULTS / 'gpu-recipe-paired.json', json.dumps(record, indent=2) + '\n')
    recipe.show(found['metrics'])
    print('left out:', ', '.join(found['left_out']) or 'nothing')

def measure_speed(args: argparse.Namespace) -> None:
    "Measure the training speed of the sizes without a record."
    end = time.monotonic() + 60 * args.minutes
    for size, options in SPEED.items():
        if has_record(f'train-speed-gpu-{size}'):
            continue
        command = [sys.executable, str(HERE / 'train_speed.py'), *options, '--data-dir', str(args.data_dir / 'multi30k')]
        try:
            subprocess.run(command, check=True, timeout=max(1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            print('run the same command again to measure', size, flush=True)

def n_steps(folder: Path) -> int:
    log = folder / 'log.jsonl'
    lines = log.read_text().splitlines() if log.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith('}')]
    return max((row['step'] for row in rows), default=0)

def rates(runs: list[Run], args: argparse.Namespace) -> None:
    "Print the steps per second of several runs at the same time, once all have taken some steps."
    folder = args.runs / 'rates'
    folder.mkdir(exist_ok=True)
    more = ['--overwrite', '--log-every', '5', '--save-every', '100000', *shlex.split(args.more)]
    for jobs in args.jobs:
        folders = [folder / run.name for run in runs[:jobs]]
        processes = [start(['-m', 'annotated_transformer', *train_arguments(run, out, args), *more], folder / f'{run.name}.txt')
                     for run, out in zip(runs, folders)]
        start_time = time.monotonic()
        while time.monotonic() - start_time < args.wait and min(map(n_steps, folders)) < WARM_UP:
            time.sleep(0.5)
        waited = time.monotonic() - start_time
        before = [n_steps(out) for out in folders]
        time.sleep(args.seconds)
        after = [n_steps(out) for out in folders]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        found = [round((b - a) / args.seconds, 1) for a, b in zip(before, after)]
        print(f'{len(folders)} runs, {args.more}: {waited:.0f} s to start, steps per second {found}', flush=True)

def part_minutes(text: str) -> float:
    minutes = float(text)
    if not 1 <= minutes <= MAX_MINUTES:
        raise argparse.ArgumentTypeError(f'{text} minutes: choose from 1 to {MAX_MINUTES}')
    return minutes

def arguments(args: list[str] | None = None) -> argparse.Namespace:
    "Return the values of the options on the command line, or of `args`."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('part', choices=[*PARTS, 'sweep', 'speed', 'rates'])
    parser.add_argument('--data-dir', type=Path, required=True, help='folder with multi30k and multi30k-tok')
    parser.add_argument('--runs', type=Path, default=Path('runs/gpu'), help='folder of the runs (runs/gpu)')
    parser.add_argument('--minutes', type=part_minutes, default=8.5, help='time for training and scoring, at most 9 (8.5)')
    parser.add_argument('--max-minutes', type=float, help='end and score every run after this many minutes of training')
    parser.add_argument('--more', default='', help='rates: more options of train, such as "--compile"')
    parser.add_argument('--jobs', type=int, nargs='+', default=[1, 8, 15], help='rates: runs at the same time')
    parser.add_argument('--seconds', type=float, default=10, help='rates: length of a measurement (10)')
    parser.add_argument('--wait', type=float, default=60, help='rates: seconds in which all runs must start (60)')
    parser.add_argument('--no-sharing', action='store_true', help='do not use the multi-process service')
    parser.add_argument('--device', default='cuda', choices=['cuda', 'cpu'])
    found = parser.parse_args(args)
    for name in ('multi30k', 'multi30k-tok'):
        if not (found.data_dir / name).is_dir():
            parser.error(f'{found.data_dir} has no folder {name}: --data-dir needs multi30k and multi30k-tok')
    if found.part == 'sweep' and found.max_minutes:
        parser.error('the runs of sweep are compared at the same length: leave --max-minutes out')
    return found

def main():
    args = arguments()
    if args.part == 'speed':
        return measure_speed(args)
    args.runs.mkdir(parents=True, exist_ok=True)
    sharing = start_sharing() if args.device == 'cuda' and not args.no_sharing else False
    print('multi-process service:', sharing, flush=True)
    try:
        if args.part == 'rates':
            rates(sum(PARTS.values(), []), args)
        elif args.part == 'sweep':
            train_part(list(SWEEP_RUNS.values()), args)
            write_sweep(args)
        else:
            train_part(PARTS[args.part], args)
    finally:
        if sharing:
            stop_sharing()

if __name__ == '__main__':
    main()
