#!/usr/bin/env python3
"""Train the model that ships inside the package: toy EN-DE by its recipe, scored on all of its test splits.

    python benchmarks/shipped_model.py # some minutes on two cores; into annotated_transformer/v1/data/toy-ende
    python benchmarks/shipped_model.py --out /tmp/again # the same elsewhere, to compare

The record is the folder's own training.json, and results/shipped-model.log.jsonl beside it:
the losses that the same command gives again, but for what a change of the code since has rounded otherwise.
"""
import argparse, json, tempfile
from dataclasses import asdict
from pathlib import Path

from annotated_transformer.v1.checkpoints import read_log
from annotated_transformer.v1.corpora import load_corpus
from annotated_transformer.v1.recipe import default_run, evaluate, train_translator
from annotated_transformer.v1.vocabulary import write_whole
from record import RESULTS, about

SHIPPED = Path(__file__).parents[1] / 'annotated_transformer/v1/data/toy-ende'

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=SHIPPED, help='the model folder')
    args, run = parser.parse_args(), default_run()
    with tempfile.TemporaryDirectory() as folder:
        translator, log = train_translator(run, Path(folder) / 'run'), read_log(Path(folder) / 'run/log.jsonl')
    corpus, splits = load_corpus(run.corpus), ('test', 'test_long', 'test_combinations')
    scores = {split: evaluate(translator, corpus[split])[0] for split in splits}
    translator.training |= {split: asdict(found) for split, found in scores.items()} | about()
    translator.save(args.out)
    if args.out == SHIPPED:
        write_whole(RESULTS / 'shipped-model.log.jsonl', ''.join(json.dumps(row) + '\n' for row in log))
    for split, found in scores.items(): print(f'{split}: {found}')

if __name__ == '__main__': main()
