#!/usr/bin/env python3
"""Train the model that ships with the package: toy EN-DE by its recipe, scored on all test splits.

    python benchmarks/shipped_model.py # a few minutes on two cores; writes annotated_transformer/data/toy-ende
    python benchmarks/shipped_model.py --out /tmp/again # the same in another folder, to compare

The record is the folder's training.json, with results/shipped-model.log.jsonl beside it. The same command gives
the same losses again, up to rounding.
"""
import argparse
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from annotated_transformer.checkpoints import read_log
from annotated_transformer.corpora import load_corpus
from annotated_transformer.recipe import default_run, evaluate, train_translator
from annotated_transformer.files import atomic_write
from record import RESULTS, about

SHIPPED = Path(__file__).parents[1] / 'annotated_transformer/data/toy-ende'

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=SHIPPED, help='the model folder')
    parser.add_argument('--max-steps', type=int, help='stop after so many steps, to try the script')
    args = parser.parse_args()
    run = default_run()
    if args.max_steps:
        if args.out == SHIPPED:
            parser.error('--max-steps needs another --out, to keep the shipped model')
        run = replace(run, training=replace(run.training, max_steps=args.max_steps))
    with tempfile.TemporaryDirectory() as folder:
        translator = train_translator(run, Path(folder) / 'run')
        log = read_log(Path(folder) / 'run/log.jsonl')
    corpus = load_corpus(run.corpus)
    scores = {split: evaluate(translator, corpus[split])[0] for split in ('test', 'test_long', 'test_combinations')}
    translator.training |= {split: asdict(found) for split, found in scores.items()} | about()
    translator.save(args.out, overwrite=True)
    if args.out == SHIPPED:
        atomic_write(RESULTS / 'shipped-model.log.jsonl', ''.join(json.dumps(row) + '\n' for row in log))
    for split, found in scores.items():
        print(f'{split}: {found}')

if __name__ == '__main__':
    main()
