#!/usr/bin/env python3
"""Train a small model, kill the process (SIGKILL) at random moments and restart it each time, until it is done.
Then compare every byte of weights, optimizer state and log with those of a run that was never killed.

    python benchmarks/kills.py                            # 20 kills; the record is results/kills.json
    python benchmarks/kills.py --kills 4 --record /dev/null

Every other kill strikes just before a sync or a rename of a file, chosen at random. The kills between strike at
any moment; each sync and rename is slowed down by some milliseconds, so that these kills hit saves, too. The files
that a killed run left show what it was doing.
"""
import argparse
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from tqdm.auto import tqdm

from annotated_transformer.checkpoints import list_checkpoints, read_log
from annotated_transformer.files import atomic_write
from annotated_transformer.loader import TrainingLoader
from annotated_transformer.trainer import TrainConfig, Trainer
from annotated_transformer.transformer import Transformer, TransformerConfig
from record import RESULTS, about

MODEL = TransformerConfig(40, n_layers=1, d_model=32, d_ff=64, n_heads=2, max_len=16, dropout=0.1)
SETTINGS = TrainConfig(max_tokens=60, warmup_steps=20, peak_lr=1e-2, log_every=3, save_every=5, average_checkpoints=3,
                       gradient_accumulation_steps=2, ema_decay=0.9)
PAIRS = [([4 + (7 * i + j) % 36 for j in range(2 + i % 6)],
          [4 + (5 * i + j) % 36 for j in range(2 + i % 5)]) for i in range(300)]

def train(out: Path, steps: int) -> None:
    "Train, or resume from the folder's last checkpoint."
    torch.manual_seed(SETTINGS.seed)
    batches = TrainingLoader(PAIRS[:280], SETTINGS.max_tokens, seed=SETTINGS.seed)
    val_batches = list(TrainingLoader(PAIRS[280:], 500, shuffle=False).epoch(0))
    Trainer(Transformer(MODEL), batches, val_batches, replace(SETTINGS, max_steps=steps), out, progress_bar=False).fit()

def slow_disk(pause: float, fuse: int | None) -> None:
    "Slow down every sync and rename of this process; kill it before the one with number `fuse`."
    count = itertools.count(1)
    def late(f):
        def slow(*args, **options):
            if next(count) == fuse: os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(pause)
            return f(*args, **options)
        return slow
    os.fsync, os.replace = late(os.fsync), late(os.replace)

def start(out: Path, steps: int, pause: float, fuse: int | None = None) -> int:
    "Start the run in a forked process, which need not import torch again."
    child = os.fork()
    if child: return child
    try:
        tqdm.set_lock(threading.RLock())                # a killed process would keep the lock that forks share
        slow_disk(pause, fuse)
        train(out, steps)
        os._exit(0)
    except BaseException as error:
        print(f'{type(error).__name__}: {error}', file=sys.stderr, flush=True)
        os._exit(1)

def ended(child: int, seconds: float) -> bool:
    "Wait for the run to end, or kill it after some seconds; return whether it ended. Raises RuntimeError if it failed."
    until = time.monotonic() + seconds
    while not (left := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until: time.sleep(0.001)
    if not left[0]:
        os.kill(child, signal.SIGKILL)
        left = os.waitpid(child, 0)
    if os.WIFSIGNALED(left[1]): return False
    if left[1]: raise RuntimeError('the run failed instead of resuming')
    return True

def phase(out: Path, since: float) -> str:
    "Return what a run was doing when it was killed, from the files that changed after `since`."
    changed = {p.name: p for folder in (out, out / 'checkpoints') for p in folder.glob('*')
               if p.stat().st_ctime >= since}
    last, log = max((p.name for p in list_checkpoints(out)), default=''), out / 'log.jsonl'
    for name, folder in changed.items():
        if not name.endswith('.partial'): continue
        if name < last: return 'removing an old checkpoint'
        files = [p.name for p in folder.iterdir()]
        if 'manifest.json' in files: return 'saving: complete, without its name'
        return 'saving: in a file' if any(file.endswith('.tmp') for file in files) else 'saving: between two files'
    if any(name.endswith('.tmp') for name in changed): return 'rewriting the log, or writing the finished model'
    rows = read_log(log) if log.exists() else []
    if last in changed and rows[-1]['step'] == int(last[5:]): return 'just saved'
    if any('val_loss' in row and row['step'] > int(last[5:] or 0) for row in rows):
        return 'saving: before the first file'
    return 'training'

def result(out: Path) -> dict[str, bytes]:
    "Return the content of all files that must be equal, without times."
    files = [out / name for name in ('log.jsonl', 'config.json', 'model.safetensors')]
    names = ('config.json', 'model.safetensors', 'state.pt')
    files += [folder / name for folder in list_checkpoints(out) for name in names]
    progress = {folder: json.loads((folder / 'progress.json').read_text()) | dict(minutes=0)
                for folder in list_checkpoints(out)}
    return ({str(p.relative_to(out)): p.read_bytes() for p in files}
            | {f'{folder.name}/progress.json': json.dumps(at).encode() for folder, at in progress.items()})

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kills', type=int, default=20)
    parser.add_argument('--seed', type=int, default=1, help='seed of the random moments')
    parser.add_argument('--steps', type=int, default=160, help='steps of the run')
    parser.add_argument('--pause', type=float, default=0.004, help='seconds added to each sync and rename')
    parser.add_argument('--record', type=Path, default=RESULTS / 'kills.json')
    args = parser.parse_args()
    torch.set_num_threads(1)
    moments, place, kills, runs = random.Random(args.seed), Path(tempfile.mkdtemp()), [], 0
    # what torch imports late is imported here once, and not in every fork
    train(place / 'warm', 1)
    began = time.monotonic()
    assert ended(start(place / 'whole', args.steps, args.pause), 600)
    lasted, wanted = time.monotonic() - began, result(place / 'whole')
    while len(kills) < args.kills:                      # if a run ends before all kills, start another
        runs += 1
        out, done = place / f'killed-{runs}', False
        while not done:
            after, fuse, since = 600.0, None, time.time()
            before = list_checkpoints(out)[-1].name if list_checkpoints(out) else None
            if len(kills) < args.kills and len(kills) % 2: after = moments.uniform(0, lasted / args.kills)
            elif len(kills) < args.kills: fuse = moments.randrange(1, 60)
            if not (done := ended(start(out, args.steps, args.pause, fuse), after)):
                kills.append(dict(run=runs, started_from=before, seconds=round(time.time() - since, 3),
                                  aimed_at=fuse, during=phase(out, since)))
                print(f'kill {len(kills)}: {kills[-1]}', flush=True)
        found = result(out)
        parted = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        if parted:
            raise SystemExit(f'run {runs}, killed {sum(k["run"] == runs for k in kills)} times, '
                             f'differs from the run that was never killed in {parted}; see {place}')
        print(f'run {runs}: {len(found)} files, all equal to those of the run never killed', flush=True)
    during = dict(Counter(kill['during'] for kill in kills).most_common())
    record = dict(name='kills', **about(), seed=args.seed,
                  result=dict(
                      kills=len(kills),
                      while_saving=sum(n for what, n in during.items() if what.startswith('saving')),
                      runs=runs, steps=args.steps, seconds_never_killed=round(lasted, 1),
                      files_compared=len(wanted), files_that_differ=0),
                  during=during, kills=kills)
    if args.record != Path(os.devnull):
        atomic_write(args.record, json.dumps(record, indent=2) + '\n')
    shutil.rmtree(place)

if __name__ == '__main__':
    main()
