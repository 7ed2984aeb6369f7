#!/usr/bin/env python3
"""Compare settings by the translations of their seeds: a paired bootstrap and a randomization test over sentences.

    python benchmarks/paired.py --data-dir DIR

DIR holds multi30k-tok. The statistic is the difference between the mean BLEU of the seeds of two settings, on text that
is lower-cased and tokenized already. Both tests keep the trained models fixed: they say how much the difference depends
on the test sentences, not on the seeds. The record is paired.json.
"""
import argparse
import gzip
import json
from pathlib import Path

import numpy as np
from sacrebleu.metrics import BLEU

from annotated_transformer.experiments import bootstrap_interval
from annotated_transformer.files import atomic_write
from record import RESULTS, about, bleu_of

NAME = 'paired'
SEEDS = 1, 2, 3
PAIRS = [('gpu-tok-r-drop', 'gpu-tok-recipe'), ('gpu-tok-r-drop-less-dropout', 'gpu-tok-recipe'),
         ('gpu-tok-r-drop-less-dropout', 'gpu-tok-r-drop')]
SAMPLES = 1000

def counts_of(name: str, references: list[str]) -> np.ndarray: # (seeds, sentences, counts)
    "Return what BLEU sums, for each sentence and seed."
    metric = BLEU(lowercase=True, tokenize='none', force=True, effective_order=True)
    found = []
    for seed in SEEDS:
        translations = (RESULTS / f'{name}-seed{seed}.test.txt').read_text('utf-8').splitlines()
        scores = [metric.sentence_score(translation, [reference])
                  for translation, reference in zip(translations, references, strict=True)]
        found.append([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores])
    return np.array(found)

def mean_bleu(counts: np.ndarray) -> float:
    "Return the mean BLEU of some systems."
    return float(np.mean([bleu_of(rows) for rows in counts]))

def compare(ours: np.ndarray, theirs: np.ndarray) -> dict:
    "Return the difference in mean BLEU, its 95% interval over sentences, and the p-value of random swaps."
    def difference(rows):
        rows = rows.transpose(1, 0, 2)
        return mean_bleu(rows[:len(SEEDS)]) - mean_bleu(rows[len(SEEDS):])

    both = np.concatenate([ours, theirs]).transpose(1, 0, 2) # (sentences, systems, counts)
    found = difference(both)
    low, high = bootstrap_interval(both, difference, samples=SAMPLES)
    rng = np.random.default_rng(12345)
    n_as_large = 0
    for _ in range(SAMPLES):
        swapped = rng.integers(2, size=len(both)).astype(bool)
        mixed = np.where(swapped[:, None, None], np.roll(both, len(SEEDS), axis=1), both)
        n_as_large += abs(difference(mixed)) >= abs(found)
    return {'difference': found, 'low': low, 'high': high, 'p_value': (n_as_large + 1) / (SAMPLES + 1)}

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-dir', type=Path, required=True, help='folder with multi30k-tok')
    parser.add_argument('--out', type=Path, default=RESULTS / f'{NAME}.json', help='the record')
    args = parser.parse_args()
    path = args.data_dir / 'multi30k-tok' / 'test_2016_flickr.lc.norm.tok.de.gz'
    with gzip.open(path, 'rt', encoding='utf-8') as file:
        references = file.read().splitlines()
    counts = {name: counts_of(name, references) for name in dict.fromkeys(sum(PAIRS, ()))}
    comparisons = [{'a': a, 'b': b} | compare(counts[a], counts[b]) for a, b in PAIRS]
    record = about() | {'name': NAME, 'command': 'python benchmarks/paired.py --data-dir DIR', 'seeds': list(SEEDS),
                        'split': 'test_2016_flickr', 'sentences': len(references), 'samples': SAMPLES,
                        'bleu': {name: mean_bleu(rows) for name, rows in counts.items()}, 'comparisons': comparisons}
    atomic_write(args.out, json.dumps(record, indent=2) + '\n')
    print(json.dumps(record['bleu']), *comparisons, sep='\n')

if __name__ == '__main__':
    main()
