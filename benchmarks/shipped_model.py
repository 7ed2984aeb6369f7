#!/usr/bin/env python3
"""Train the model that ships inside the package: toy EN-DE by its recipe, scored on all of its test splits.

    python benchmarks/shipped_model.py                 # about three minutes on two cores; into annotated_transformer/data/toy-ende
    python benchmarks/shipped_model.py --out /tmp/again # the same elsewhere, to compare
"""
import argparse, shlex, sys, tempfile
from dataclasses import asdict
from datetime import date
from pathlib import Path

from annotated_transformer.corpora import load_corpus
from annotated_transformer.recipe import default_run, evaluate, train_translator
from record import machine

SHIPPED = Path(__file__).parents[1] / 'annotated_transformer/data/toy-ende'

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=SHIPPED, help='the model folder')
    args, run = parser.parse_args(), default_run()
    with tempfile.TemporaryDirectory() as folder: translator = train_translator(run, Path(folder) / 'run')
    corpus, splits = load_corpus(run.corpus), ('test', 'test_long', 'test_combinations')
    scores = {split: evaluate(translator, corpus[split])[0] for split in splits}
    translator.training |= {split: asdict(found) for split, found in scores.items()} | dict(
        command=shlex.join(['python', 'benchmarks/shipped_model.py', *sys.argv[1:]]), machine=machine(), date=str(date.today()))
    translator.save(args.out)
    for split, found in scores.items(): print(f'{split}: {found}')

if __name__ == '__main__': main()
