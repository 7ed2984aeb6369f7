#!/usr/bin/env python3
"""Measure what each setting of the Multi30k recipe is worth: one change at a time, scored on `val` only.

    python benchmarks/recipe.py --data-dir DIR # --jobs 6 trains six at a time, for example on a GPU
    python benchmarks/recipe.py --data-dir DIR --epochs 6 --only dropout 'R-Drop'
    python benchmarks/recipe.py --data-dir DIR --epochs 6 --paired --out benchmarks/results/recipe-paired.json

Every variant is `annotated-transformer train --recipe multi30k-en-de` with other flags and the same number of
epochs, in a folder under --runs. Run the same command again to resume; variants that are in the record are not
trained again. The recipe itself is trained with three seeds, whose spread shows how much two runs differ by chance.
With --paired, so is every variant, and the record also holds its differences from the recipe, seed by seed.

Three differences are few. So --paired takes all runs together (a randomized block design): a score is the sum of a part
of the setting, a part of the seed and noise, and the noise has the same spread for all settings. A difference then has the
interval ± t · s · √(2 / number of seeds), where s is that spread and t has (settings - 1) · (seeds - 1) degrees of freedom.
The corrected interval has the confidence 1 - 5% / 22, as if all 22 variants had been trained (Bonferroni). BLEU on `val` is
the main score, chrF the second one: a variant is told apart from the recipe if its corrected interval leaves out 0.

Averaging and decoding settings need no training: without --paired, they are tried with the recipe's first seed. No test
split is used.
On a GPU, `gpu.py sweep` makes such a record within one short loan.
"""
import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import numpy as np

from annotated_transformer.checkpoints import average_checkpoints, list_checkpoints
from annotated_transformer.corpora import CorpusConfig, load_corpus
from annotated_transformer.experiments import t_interval, t_quantile
from annotated_transformer.files import atomic_write
from annotated_transformer.recipe import RECIPES, evaluate
from annotated_transformer.translator import Translator
from record import RESULTS, about, machine

RECIPE = 'multi30k-en-de'
SEEDS = {f'the recipe, seed {seed}': f'--seed {seed}' for seed in (1, 2, 3)}
FIRST = next(iter(SEEDS))
VARIANTS = {
    'vocabulary 4,000': '--vocab-size 4000', 'vocabulary 16,000': '--vocab-size 16000',
    'dropout 0.1': '--dropout 0.1', 'dropout 0.2': '--dropout 0.2',
    'peak learning rate 2e-3': '--peak-lr 2e-3', 'peak learning rate 6e-3': '--peak-lr 6e-3',
    'warm-up 200': '--warmup-steps 200', 'warm-up 1,000': '--warmup-steps 1000',
    'batches of 1,024 tokens': '--max-tokens 1024', 'batches of 4,096 tokens': '--max-tokens 4096',
    'BPE-dropout 0.1': '--bpe-dropout 0.1', 'R-Drop 1': '--r-drop 1', 'R-Drop 5': '--r-drop 5',
    'no label smoothing': '--label-smoothing 0', 'moving average of weights': '--ema-decay 0.998',
    'sinusoidal positions': '--positions sinusoidal', 'ALiBi': '--positions alibi',
    'scaled initialisation': '--init scaled', 'post-norm, scaled initialisation': '--norm post --init scaled',
    'post-norm': '--norm post', 'd_ff 512': '--d-ff 512',
    'wide model (d_model 256)': '--d-model 256 --d-ff 512 --peak-lr 2e-3',
}
METRICS = 'val_bleu', 'val_chrf'
CORRECTED = 1 - 0.05 / len(VARIANTS) # confidence of the corrected intervals
AVERAGES = 1, 5, 10
SEARCH = {'beam_size': 5, 'length_penalty': 1.0} # of every score but those of SEARCHES
SEARCHES = {'greedy': dict(beam_size=1)} | {
    f'beam {beam}, length penalty {penalty}': dict(beam_size=beam, length_penalty=penalty)
    for beam in (4, 5, 8) for penalty in (0.6, 1.0, 1.4, 1.7)}

def folder_name(name: str) -> str:
    "Return a run's name without spaces and commas."
    return name.replace(' ', '-').replace(',', '')

def train(name: str, flags: str, args) -> Path:
    "Train one variant, and return its folder."
    out = args.runs / folder_name(name)
    command = [sys.executable, '-m', 'annotated_transformer', 'train', '--recipe', RECIPE,
               '--data-dir', str(args.data_dir), '--max-epochs', str(args.epochs),
               *shlex.split(args.flags), *shlex.split(flags), '--out', str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode: raise SystemExit(f'{name}: {done.stderr[-2000:]}')
    return out

def scored(folder: Path, flags: str, pairs) -> dict:
    "Score a trained variant: its row of the record."
    translator = Translator.load(folder)
    found, progress = evaluate(translator, pairs, **SEARCH)[0], translator.training['progress']
    return dict(flags=flags, val_bleu=found.bleu, val_chrf=found.chrf, signature=found.signature,
                minutes=progress['minutes'], steps=progress['step'], date=str(date.today()))

def averaged(folder: Path, pairs) -> dict[str, float]:
    "Return BLEU of a run's last checkpoint, and of averages of its last checkpoints."
    kept, found = list_checkpoints(folder), {}
    if len(kept) < max(AVERAGES): raise SystemExit(f'{folder} has {len(kept)} checkpoints left, not {max(AVERAGES)}')
    with tempfile.TemporaryDirectory() as room:
        for n in AVERAGES:
            model = Translator.load(average_checkpoints(kept[-n:], Path(room, str(n))))
            found[f'average of {n}' if n > 1 else 'last checkpoint'] = evaluate(model, pairs, **SEARCH)[0].bleu
    return found

def searched(folder: Path, pairs) -> dict[str, float]:
    "Return BLEU of a trained model for each decoding setting."
    model = Translator.load(folder)
    return {name: evaluate(model, pairs, **search)[0].bleu for name, search in SEARCHES.items()}

def recorded(args) -> dict:
    "Return the record so far, or an empty one. Exits if its recipe, settings or machine differ."
    same = {'epochs': args.epochs, 'flags': args.flags, 'search': SEARCH, 'recipe': RECIPES[RECIPE],
            'machine': machine()}
    if not args.out.exists(): return same
    record = json.loads(args.out.read_text('utf-8'))
    other = [key for key in same if record.get(key) != same[key]]
    if other: raise SystemExit(f'{args.out} has another {" and ".join(other)}: choose another --out')
    return record

def wanted(name: str, only: list[str]) -> bool:
    "Return whether a variant is selected, by its name or by a part that is not another variant's name."
    return not only or name in only or any(part in name for part in only if part not in VARIANTS)

def run_names(variant: str) -> list[str]:
    "Return the names of a variant's runs, one for each seed of the recipe. Seed 1 is the default."
    return [variant, *(f'{variant}, seed {seed}' for seed in range(2, len(SEEDS) + 1))]

def planned(only: list[str], with_seeds: bool, variants: dict[str, str] = VARIANTS) -> dict[str, str]:
    "Return the flags of each run by its name: the recipe with three seeds, each selected variant with one or three."
    found = dict(SEEDS)
    for variant, flags in variants.items():
        if wanted(variant, only):
            found[variant] = flags
            if with_seeds:
                found |= {name: f'{flags} --seed {seed}' for seed, name in enumerate(run_names(variant)[1:], 2)}
    return found

def block_noise(scores: np.ndarray) -> tuple[float, int]:
    """Return the noise of a randomized block design: its standard deviation and degrees of freedom.

    :param scores: (settings, seeds)
    """
    expected = scores.mean(1, keepdims=True) + scores.mean(0) - scores.mean()
    df = (scores.shape[0] - 1) * (scores.shape[1] - 1)
    return float(np.sqrt(((scores - expected) ** 2).sum() / df)), df

def paired(rows: dict[str, dict], variants: Iterable[str] = VARIANTS) -> tuple[dict[str, dict], dict[str, dict]]:
    """Compare each variant that has a run for each seed with the recipe, seed by seed.

    Return for each variant, in BLEU and chrF: the differences, their interval and corrected interval in a block design, and
    Student's interval of these differences alone. And for both scores: spread and degrees of freedom of the noise.
    """
    complete = [name for name in variants if all(run in rows for run in run_names(name))]
    found = {name: {} for name in complete}
    noise = {}
    for metric in METRICS if complete else ():
        names = [list(SEEDS), *map(run_names, complete)]
        scores = np.array([[rows[run][metric] for run in runs] for runs in names])
        spread, df = block_noise(scores)
        noise[metric] = {'spread': spread, 'degrees_of_freedom': df}
        standard_error = spread * math.sqrt(2 / len(SEEDS))
        half_width = t_quantile(df) * standard_error
        corrected = t_quantile(df, CORRECTED) * standard_error
        for name, differences in zip(complete, scores[1:] - scores[0]):
            mean = differences.mean()
            found[name][metric] = {'differences': differences.tolist(), 'interval': (mean - half_width, mean + half_width),
                                   'corrected': (mean - corrected, mean + corrected), 'alone': t_interval(differences)}
    return found, noise

def comparison(rows: dict[str, dict], variants: Iterable[str] = VARIANTS) -> dict:
    "Return what a record says about its runs: the recipe's mean and spread, all rows, the comparisons, what is missing."
    seeds = [rows[name]['val_bleu'] for name in SEEDS]
    differences, noise = paired(rows, variants)
    metrics = dict(mean=statistics.mean(seeds), spread=statistics.stdev(seeds), variants=rows, paired=differences, noise=noise)
    return dict(metrics=metrics, left_out=[name for name in variants if name not in rows])

def show(metrics: dict) -> None:
    "Print the recipe's mean and spread, and the interval of each difference."
    print(f"the recipe, three seeds: {metrics['mean']:.2f} ± {metrics['spread']:.2f}")
    for name, found in metrics['paired'].items():
        low, high = found['val_bleu']['interval']
        print(f'{name:<28} {low:+.2f} to {high:+.2f} BLEU compared with the recipe')

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-dir', type=Path, required=True, help='folder with the files of Multi30k')
    parser.add_argument('--epochs', type=int, default=40, help='epochs of every variant')
    parser.add_argument('--flags', default='', help="more flags for every variant, for example '--precision bfloat16'")
    parser.add_argument('--only', nargs='*', default=[],
                        help='train only variants with these words in their names, and the recipe itself')
    parser.add_argument('--paired', action='store_true',
                        help='train every variant with the three seeds of the recipe, and compare them seed by seed')
    parser.add_argument('--jobs', type=int, default=1, help='variants trained at the same time')
    parser.add_argument('--runs', type=Path, default=Path('runs/recipe'), help='folder of the runs')
    parser.add_argument('--out', type=Path, default=RESULTS / 'recipe.json', help='the record')
    args = parser.parse_args()
    record, val = recorded(args), load_corpus(CorpusConfig('multi30k', data_dir=args.data_dir))['val']
    rows = {name: row for name, row in record.get('metrics', {}).get('variants', {}).items()
            if row['flags'] == planned([], True).get(name)}
    missing = {name: flags for name, flags in planned(args.only, args.paired).items() if name not in rows}
    with ThreadPoolExecutor(args.jobs) as pool:
        for name, out in zip(missing, pool.map(lambda item: train(*item, args), missing.items())):
            rows[name] = scored(out, missing[name], val)
            print(f"{name:<28} val BLEU {rows[name]['val_bleu']:.2f}, {rows[name]['minutes']:.1f} minutes", flush=True)
            if name == FIRST and not args.paired: record |= dict(averages=averaged(out, val))
    if not args.paired and (FIRST in missing or record['searches'].keys() != SEARCHES.keys()):
        record |= dict(searches=searched(train(FIRST, SEEDS[FIRST], args), val)) # a finished run is not trained again
    rows = {name: rows[name] for name in planned([], True) if name in rows}
    trained = [name for name in VARIANTS if name in rows]
    only = ['--only', *trained] if len(trained) < len(VARIANTS) else []
    found = comparison(rows)
    command = ['python', 'benchmarks/recipe.py', '--data-dir', 'DIR', '--epochs', str(args.epochs),
               f'--flags={args.flags}', '--jobs', str(args.jobs), '--out', f'benchmarks/results/{args.out.name}', *only]
    more = dict(seed=1)
    if found['metrics']['paired']:
        command.append('--paired')
        record.pop('seed', None) # of a record that was begun without pairs
        more = dict(seeds=list(range(1, len(SEEDS) + 1)))
    if args.jobs > 1:
        more['note'] = f'{args.jobs} runs at a time: their minutes include waiting for each other and for other programs'
    record |= about() | dict(name=args.out.stem, command=shlex.join(command)) | more | found
    atomic_write(args.out, json.dumps(record, indent=2) + '\n')
    show(found['metrics'])
    for name, bleu in (record.get('averages', {}) | record.get('searches', {})).items(): print(f'{name:<28} val BLEU {bleu:.2f}')

if __name__ == '__main__':
    main()
