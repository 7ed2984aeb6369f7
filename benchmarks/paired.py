#!/usr/bin/env python3
"""Compare settings by the translations of their seeds: a paired bootstrap and a randomization test over sentences.

    python benchmarks/paired.py --data-dir DIR

DIR holds multi30k-tok. The statistic is the difference between the mean BLEU (and mean chrF) of the seeds of two
settings, on text that is lower-cased and tokenized already. Both tests keep the trained models fixed: they say how much
the difference depends on the test sentences, not on the seeds. The record is paired.json; it also holds, for each seed,
chrF with its precision and recall, the n-gram precisions of BLEU, and the length of the translations. What BLEU counts in
each sentence goes to NAME-seedS.test.counts.txt, for page 46 to draw sentences and seeds; --counts-only writes nothing else.
"""
import argparse
import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
from sacrebleu.metrics import CHRF

from annotated_transformer.experiments import bootstrap_interval
from annotated_transformer.files import atomic_write
from record import MAX_ORDER, RESULTS, about, bleu_counts, bleu_of

NAME = 'paired'
SEEDS = 1, 2, 3
PAIRS = [('gpu-tok-r-drop', 'gpu-tok-control')]
SAMPLES = 10_000 # of the bootstrap, and random swaps
MAX_CHARACTERS = 6 # of the longest n-grams that chrF counts

def translations_of(name: str) -> list[list[str]]:
    "Return the translations of each seed."
    return [(RESULTS / f'{name}-seed{seed}.test.txt').read_text('utf-8').splitlines() for seed in SEEDS]

def counts_of(name: str, references: list[str]) -> np.ndarray: # (seeds, sentences, counts)
    "Return what BLEU sums, for each sentence and seed."
    return np.array([bleu_counts(translations, references, tokenized=True) for translations in translations_of(name)])

def write_counts(name: str, counts: np.ndarray):
    "Write what BLEU counts in each sentence: a file for each seed. The number of n-grams follows from the length."
    for seed, rows in zip(SEEDS, counts):
        matches, ngrams, lengths = np.split(rows, [MAX_ORDER, 2 * MAX_ORDER], axis=1)
        np.testing.assert_array_equal(ngrams, np.maximum(lengths[:, :1] - np.arange(MAX_ORDER), 0))
        lines = ['# of each sentence: matching 1-, 2-, 3- and 4-grams, tokens, reference tokens (benchmarks/paired.py)']
        lines += [' '.join(map(str, row)) for row in np.hstack([matches, lengths]).tolist()]
        atomic_write(RESULTS / f'{name}-seed{seed}.test.counts.txt', '\n'.join(lines) + '\n')

def mean_bleu(counts: np.ndarray) -> float:
    "Return the mean BLEU of some systems."
    return float(np.mean([bleu_of(rows) for rows in counts]))

def character_ngrams(text: str) -> list[Counter]:
    "Count a text's n-grams of 1 to 6 characters, without spaces."
    letters = ''.join(text.split())
    return [Counter(letters[i:i + n] for i in range(len(letters) - n + 1)) for n in range(1, MAX_CHARACTERS + 1)]

def chrf_counts(translations: list[str], references: list[str]) -> np.ndarray: # (sentences, 3 * 6)
    "Return a row for each sentence with what chrF sums: matching n-grams, those of the translation, of the reference."
    rows = []
    for translation, reference in zip(translations, references, strict=True):
        ours, theirs = character_ngrams(translation), character_ngrams(reference)
        matches = [(a & b).total() for a, b in zip(ours, theirs)]
        rows.append(matches + [part.total() for part in ours + theirs])
    return np.array(rows)

def chrf_parts(counts: np.ndarray) -> tuple[float, float, float]:
    "Return chrF, and the mean precision and recall of the character n-grams, all in percent."
    matches, ours, theirs = counts.sum(axis=0).reshape(3, MAX_CHARACTERS)
    precision, recall = 100 * (matches / ours).mean(), 100 * (matches / theirs).mean()
    return 5 * precision * recall / (4 * precision + recall), precision, recall # F with beta = 2: recall weighs 4 times as much

def mean_chrf(counts: np.ndarray) -> float:
    "Return the mean chrF of some systems."
    return float(np.mean([chrf_parts(rows)[0] for rows in counts]))

def compare(ours: np.ndarray, theirs: np.ndarray, mean_score=mean_bleu, samples: int = SAMPLES) -> dict:
    """Return the difference of the mean scores, its 95% interval over sentences, and the p-value of random swaps.

    Both have the shape (seeds, sentences, counts), with equally many seeds.
    """
    n_seeds = len(ours)
    def difference(rows):
        rows = rows.transpose(1, 0, 2)
        return mean_score(rows[:n_seeds]) - mean_score(rows[n_seeds:])

    both = np.concatenate([ours, theirs]).transpose(1, 0, 2) # (sentences, systems, counts)
    found = difference(both)
    low, high = bootstrap_interval(both, difference, samples=samples)
    rng = np.random.default_rng(12345)
    n_as_large = 0
    for _ in range(samples):
        swapped = rng.integers(2, size=len(both)).astype(bool)
        mixed = np.where(swapped[:, None, None], np.roll(both, n_seeds, axis=1), both)
        n_as_large += abs(difference(mixed)) >= abs(found)
    return {'difference': found, 'low': low, 'high': high, 'p_value': (n_as_large + 1) / (samples + 1)}

def describe(bleu_rows: np.ndarray, chrf_rows: np.ndarray) -> dict:
    "Return what a record holds of a setting: a list with a value for each seed."
    found = {'bleu': [bleu_of(rows) for rows in bleu_rows]}
    parts = zip(*(map(float, chrf_parts(rows)) for rows in chrf_rows))
    found |= dict(zip(('chrf', 'chrf_precision', 'chrf_recall'), map(list, parts)))
    sums = bleu_rows.sum(axis=1) # (seeds, counts): matches and n-grams of each order, then both lengths
    found['ngram_precisions'] = (100 * sums[:, :MAX_ORDER] / sums[:, MAX_ORDER:2 * MAX_ORDER]).tolist()
    found['length_ratio'] = (sums[:, -2] / sums[:, -1]).tolist()
    return found

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-dir', type=Path, required=True, help='folder with multi30k-tok')
    parser.add_argument('--out', type=Path, default=RESULTS / f'{NAME}.json', help='the record')
    parser.add_argument('--counts-only', action='store_true', help='write the counts of each sentence, and no record')
    args = parser.parse_args()
    path = args.data_dir / 'multi30k-tok' / 'test_2016_flickr.lc.norm.tok.de.gz'
    with gzip.open(path, 'rt', encoding='utf-8') as file:
        references = file.read().splitlines()
    names = list(dict.fromkeys(sum(PAIRS, ())))
    counts = {name: counts_of(name, references) for name in names}
    for name, rows in counts.items():
        write_counts(name, rows)
    if args.counts_only:
        return
    characters = {name: np.array([chrf_counts(texts, references) for texts in translations_of(name)]) for name in names}
    metric = CHRF()
    for name in names: # our counts give sacreBLEU's chrF
        expected = [metric.corpus_score(texts, [references]).score for texts in translations_of(name)]
        np.testing.assert_allclose([chrf_parts(rows)[0] for rows in characters[name]], expected, atol=1e-6)
    comparisons = [{'a': a, 'b': b} | compare(counts[a], counts[b])
                   | {'chrf': compare(characters[a], characters[b], mean_chrf)} for a, b in PAIRS]
    record = about() | {'name': NAME, 'command': 'python benchmarks/paired.py --data-dir DIR', 'seeds': list(SEEDS),
                        'split': 'test_2016_flickr', 'sentences': len(references), 'samples': SAMPLES,
                        'reference_tokens': int(counts[names[0]][0, :, -1].sum()),
                        'chrf_signature': str(metric.get_signature()),
                        'bleu': {name: mean_bleu(rows) for name, rows in counts.items()},
                        'settings': {name: describe(counts[name], characters[name]) for name in names},
                        'comparisons': comparisons}
    atomic_write(args.out, json.dumps(record, indent=2) + '\n')
    print(json.dumps(record['bleu']), *comparisons, sep='\n')

if __name__ == '__main__':
    main()
