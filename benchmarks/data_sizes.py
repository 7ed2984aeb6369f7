#!/usr/bin/env python3
"""Measure how BLEU grows with the number of sentence pairs: `train --recipe small` on 2,500 to 29,000 captions.

    python benchmarks/data_sizes.py --data-dir DIR --runs runs/data-sizes --jobs 2

DIR holds Multi30k. Every run is the command of the guide "Your own data" with the first N training pairs, the
same number of steps and one thread; `val` chooses the weights, test_2016_flickr is scored. Run the same command
again to resume. The record is data-sizes.json.
"""
import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from annotated_transformer.checkpoints import read_log
from annotated_transformer.corpora import load_corpus
from annotated_transformer.files import atomic_write
from annotated_transformer.recipe import evaluate
from annotated_transformer.scoring import bleu_interval
from annotated_transformer.translator import Translator
from record import RESULTS, about

NAME = 'data-sizes'
PAIR = 'en-fr'
SIZES = 2_500, 5_000, 10_000, 20_000, 29_000
SEEDS = (1,)
TEST = 'test_2016_flickr'

def write_table(path: Path, pairs: list[tuple[str, str]]) -> Path:
    "Write a table of sentence pairs."
    atomic_write(path, ''.join(f'{src}\t{tgt}\n' for src, tgt in pairs))
    return path

def command(n_pairs: int, seed: int, steps: int, tables: Path, out: Path) -> list[str]:
    "Return the command that trains one model."
    return ['annotated-transformer', 'train', '--tsv', str(tables / f'train-{n_pairs}.tsv'),
            '--val-tsv', str(tables / 'val.tsv'), '--test-tsv', str(tables / 'test.tsv'), '--pair', PAIR,
            '--recipe', 'small', '--max-steps', str(steps), '--seed', str(seed), '--threads', '1', '--out', str(out)]

def measure(n_pairs: int, seed: int, steps: int, folder: Path, test: list[tuple[str, str]]) -> dict:
    "Train one model, and score it on `test`."
    out = folder / f'{n_pairs}-seed{seed}'
    typed = command(n_pairs, seed, steps, folder / 'tables', out)
    done = subprocess.run([sys.executable, '-m', 'annotated_transformer', *typed[1:]], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f'{out}: {done.stderr[-2000:]}')
    translator = Translator.load(out, 'cpu', engine='pytorch')
    progress = translator.training['progress']
    scores, translations = evaluate(translator, test)
    interval = bleu_interval(translations, [tgt for _, tgt in test])
    log = read_log(out / 'log.jsonl')
    losses = [row['val_loss'] for row in log if 'val_loss' in row]
    print(f'{n_pairs:,} pairs, seed {seed}: BLEU {scores.bleu:.2f}', flush=True)
    return {'pairs': n_pairs, 'seed': seed, 'bleu': scores.bleu, 'bleu_half_width': interval.half_width,
            'chrf': scores.chrf, 'signature': scores.signature, 'epochs': progress.get('epochs', progress['epoch']),
            'minutes': progress['minutes'], 'best_val_loss': min(losses), 'last_val_loss': losses[-1],
            'best_val_step': next(row['step'] for row in log if row.get('val_loss') == min(losses))}

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-dir', type=Path, required=True, help='folder with the files of Multi30k')
    parser.add_argument('--runs', type=Path, default=Path('runs/data-sizes'), help='folder of the runs')
    parser.add_argument('--steps', type=int, default=2400, help='steps of every run (2400)')
    parser.add_argument('--seeds', type=int, nargs='+', default=SEEDS, help='seeds (1)')
    parser.add_argument('--jobs', type=int, default=2, help='runs at the same time (2)')
    parser.add_argument('--out', type=Path, default=RESULTS / f'{NAME}.json', help='the record')
    args = parser.parse_args()

    corpus = load_corpus('multi30k', pair=PAIR, data_dir=args.data_dir)
    tables = args.runs / 'tables'
    tables.mkdir(parents=True, exist_ok=True)
    write_table(tables / 'val.tsv', corpus['val'])
    write_table(tables / 'test.tsv', corpus[TEST])
    for n_pairs in SIZES:
        write_table(tables / f'train-{n_pairs}.tsv', list(corpus['train'])[:n_pairs])
    jobs = [(n_pairs, seed) for seed in args.seeds for n_pairs in SIZES]
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = list(pool.map(lambda job: measure(*job, args.steps, args.runs, corpus[TEST]), jobs))
    record = about() | {'name': NAME, 'command': 'python benchmarks/data_sizes.py --data-dir DIR', 'pair': PAIR,
                        'split': TEST, 'sentences': len(corpus[TEST]), 'steps': args.steps, 'seeds': list(args.seeds),
                        'training_command': ' '.join(command(20_000, 1, args.steps, Path('tables'), Path('runs/20000'))),
                        'runs': sorted(runs, key=lambda run: (run['pairs'], run['seed']))}
    atomic_write(args.out, json.dumps(record, indent=2) + '\n')

if __name__ == '__main__':
    main()
