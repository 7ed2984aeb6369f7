#!/usr/bin/env python3
"""What each setting of the Multi30k recipe is worth: one change at a time, scored on `val` alone.

    python benchmarks/recipe.py --data-dir DIR # on one GPU with --jobs 6: about a quarter of an hour
    python benchmarks/recipe.py --data-dir DIR --epochs 6 --only dropout 'R-Drop'

Every variant is `annotated-transformer train --recipe multi30k-en-de` with other flags, all for as many
epochs, in a folder of its own under --runs: what was stopped goes on when the same command is given again. The
recipe itself is trained with three seeds, whose spread says which differences mean something. How to average
and how to search cost no training and are tried on the recipe's first seed. The test splits are not looked at.
"""
import argparse, json, shlex, statistics, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

from annotated_transformer.checkpoints import average_checkpoints, checkpoints
from annotated_transformer.corpora import CorpusConfig, load_corpus
from annotated_transformer.recipe import evaluate, versions
from annotated_transformer.translator import Translator
from annotated_transformer.vocabulary import write_whole
from record import RESULTS, machine

RECIPE = 'multi30k-en-de'
SEEDS = {f'the recipe, seed {seed}': f'--seed {seed}' for seed in (1, 2, 3)}
FIRST = next(iter(SEEDS))
VARIANTS = {
    'vocabulary 4,000': '--vocab-size 4000', 'vocabulary 16,000': '--vocab-size 16000',
    'dropout 0.1': '--dropout 0.1', 'dropout 0.2': '--dropout 0.2',
    'peak rate 2e-3': '--peak-rate 2e-3', 'peak rate 6e-3': '--peak-rate 6e-3',
    'warm-up 200': '--warmup 200', 'warm-up 1,000': '--warmup 1000',
    'batches of 1,024 tokens': '--max-tokens 1024', 'batches of 4,096 tokens': '--max-tokens 4096',
    'BPE-dropout 0.1': '--bpe-dropout 0.1', 'R-Drop 1': '--r-drop 1', 'R-Drop 5': '--r-drop 5',
    'BPE-dropout 0.1, dropout 0.2': '--bpe-dropout 0.1 --dropout 0.2',
    'no label smoothing': '--label-smoothing 0', 'moving average of weights': '--ema 0.999',
    'post-norm': '--norm post --init scaled',
    'width 256': '--d-model 256 --d-ff 512 --peak-rate 2e-3',
}
SEARCHES = {f'beam {beam}, alpha {alpha}': dict(beam_size=beam, alpha=alpha)
            for beam in (1, 4, 5, 8) for alpha in (0.6, 1.0, 1.4, 1.7)}

def train(name: str, flags: str, args) -> dict:
    "One variant, trained to its end, and its score on val."
    out = args.runs / name.replace(' ', '-').replace(',', '')
    command = [sys.executable, '-m', 'annotated_transformer', 'train', '--recipe', RECIPE,
               '--data-dir', str(args.data_dir), '--max-epochs', str(args.epochs),
               *shlex.split(args.flags), *shlex.split(flags), '--out', str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode: raise SystemExit(f'{name}: {done.stderr[-2000:]}')
    made = json.loads((out / 'training.json').read_text('utf-8'))
    print(f"{name:<42} val BLEU {made['val']['bleu']:.2f}, {made['progress']['minutes']:.1f} minutes", flush=True)
    return dict(flags=flags,
                val_bleu=made['val']['bleu'], val_chrf=made['val']['chrf'], signature=made['val']['signature'],
                minutes=made['progress']['minutes'], steps=made['progress']['step'], folder=str(out))

def after(folder: Path, pairs) -> tuple[dict, dict]:
    "What averaging and searching are worth, on one trained run."
    kept, averages = checkpoints(folder), {}
    with tempfile.TemporaryDirectory() as room:
        for n in sorted({1, 5, min(10, len(kept))}):
            model = Translator.load(average_checkpoints(kept[-n:], Path(room, str(n))))
            averages[f'average of {n}'] = evaluate(model, pairs)[0].bleu
    model = Translator.load(folder)
    return averages, {name: evaluate(model, pairs, **search)[0].bleu for name, search in SEARCHES.items()}

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-dir', type=Path, required=True, help='holds the files of Multi30k')
    parser.add_argument('--epochs', type=int, default=40, help='of every variant')
    parser.add_argument('--flags', default='', help="further flags of every variant: '--precision bfloat16', say")
    parser.add_argument('--only', nargs='*', default=[],
                        help='variants whose name contains one of these, besides the recipe itself')
    parser.add_argument('--jobs', type=int, default=1, help='variants trained at the same time')
    parser.add_argument('--runs', type=Path, default=Path('runs/recipe'), help='folder of the runs')
    parser.add_argument('--out', type=Path, default=RESULTS / 'recipe.json', help='the record')
    args = parser.parse_args()
    wanted = SEEDS | {name: flags for name, flags in VARIANTS.items()
                      if not args.only or any(part in name for part in args.only)}
    with ThreadPoolExecutor(args.jobs) as pool:
        found = dict(zip(wanted, pool.map(lambda item: train(*item, args), wanted.items())))
    seeds = [found[name]['val_bleu'] for name in SEEDS]
    folders = {name: Path(row.pop('folder')) for name, row in found.items()}
    averages, searches = after(folders[FIRST], load_corpus(CorpusConfig('multi30k', data_dir=args.data_dir))['val'])
    record = dict(name='recipe',
                  command=shlex.join(['python', 'benchmarks/recipe.py',
                                      *('DIR' if arg == str(args.data_dir) else arg for arg in sys.argv[1:])]),
                  seed=1, machine=machine(), date=str(date.today()), versions=versions(),
                  epochs=args.epochs, averages=averages, searches=searches,
                  metrics=dict(mean=statistics.mean(seeds), spread=statistics.stdev(seeds), variants=found))
    write_whole(args.out, json.dumps(record, indent=2) + '\n')
    print(f'the recipe, three seeds: {statistics.mean(seeds):.2f} ± {statistics.stdev(seeds):.2f}')
    for name, bleu in (averages | searches).items(): print(f'{name:<42} val BLEU {bleu:.2f}')

if __name__ == '__main__': main()
