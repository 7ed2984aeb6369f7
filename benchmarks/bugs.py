#!/usr/bin/env python3
"""Train a model with every bug that page 33 plants, as if nothing were wrong, and let it write:
results/bugs.json, which the page plots.

    python benchmarks/bugs.py                     # all of it: about seven minutes of one core
    python benchmarks/bugs.py --only 'batch norm' # one bug; its runs take their place in the record

The bugs, the task and the training are those of the page's cells.
"""
import argparse, json, time
from contextlib import ExitStack
from pathlib import Path

import torch

from annotated_transformer.v1 import checks
from annotated_transformer.v1.vocabulary import write_whole
from record import RESULTS, about

PAGE = Path(__file__).parents[1] / 'nbs/v1_33_finding_bugs.ipynb'
SEEDS, EVERY = (1, 2), 20  # EVERY: so many steps are one point of a curve

def page() -> dict:
    "The names that the page's cells about bugs, task and training define."
    cells = [''.join(c['source']) for c in json.loads(PAGE.read_text('utf-8'))['cells'] if c['cell_type'] == 'code']
    names = dict(vars(checks))
    for source in cells:
        if any(mark in source for mark in ('\nGALLERY = {}', '@planted(', 'def task(')): exec(source, names)
    return names

def run(names: dict, bug: str | None, seed: int, steps: int) -> dict:
    "Losses and the share that is written right; None where it did not run."
    losses, share = [], None
    with names['GALLERY'][bug]['open']() if bug else ExitStack():
        try:
            model = names['new'](bug, seed)
            losses = names['train'](model, steps, seed)
            share = names['written'](names['loaded'](model, bug))
        except (RuntimeError, UnboundLocalError) as error: print(f'{bug}: {type(error).__name__}: {str(error)[:90]}')
    means = torch.tensor(losses)[:len(losses)//EVERY*EVERY].view(-1, EVERY).mean(1)
    return dict(seed=seed, losses=[round(x, 4) for x in means.tolist()], written=share)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', action='append', help='a bug; may be repeated')
    parser.add_argument('--steps', type=int, default=500, help='of every training (500)')
    parser.add_argument('--out', type=Path, default=RESULTS / 'bugs.json', help='the record (results/bugs.json)')
    args = parser.parse_args()
    torch.set_num_threads(1)
    names, began = page(), time.process_time()
    if unknown := set(args.only or []) - {'right', *names['GALLERY']}:
        parser.error(f'no bug is called {sorted(unknown)}')
    earlier = json.loads(args.out.read_text('utf-8')) if args.only and args.out.is_file() else {}
    if earlier and earlier['steps'] != args.steps:
        parser.error(f"{args.out} holds runs of {earlier['steps']} steps: give as many, or another --out")
    bugs = earlier.get('bugs', {})
    for bug in (None, *names['GALLERY']):
        name = bug or 'right'
        if args.only and name not in args.only: continue
        bugs[name] = [run(names, bug, seed, args.steps) for seed in SEEDS]
        print(name, [(r['losses'][-1:], r['written']) for r in bugs[name]], flush=True)
    record = earlier or about() | dict(
        name='bugs', seeds=SEEDS, steps=args.steps, every=EVERY, cpu_seconds=round(time.process_time() - began))
    write_whole(args.out, json.dumps(record | dict(bugs=bugs), indent=1) + '\n')

if __name__ == '__main__': main()
