#!/usr/bin/env python3
"""Count the errors in recorded translations that a rule can find, and score the sentences that are likely to be hard.

    python benchmarks/errors.py --data-dir DIR

It compares the translations of three seeds, which are in results/, with sources, references and training text. The
record errors.json holds a share of sentences for each kind of error, with an example; and BLEU by the length of the
source, by its rare words, and by its names and numbers; and the share of the references' words that the translations
have, by their frequency in the training text. The rules see words, not meaning.
"""
import argparse
import json
import re
import statistics
from bisect import bisect_left
from collections import Counter
from pathlib import Path

import numpy as np

from annotated_transformer.corpora import CorpusConfig, load_corpus
from annotated_transformer.experiments import bootstrap_interval
from annotated_transformer.files import atomic_write
from annotated_transformer.scoring import score
from record import RESULTS, about, bleu_counts, bleu_of

NAME = 'errors'
RARE = 5 # a rare word occurs fewer times than this in the training text
SHORT, LONG = 0.75, 1.25 # of the reference's number of words
MIN_LETTERS = 4 # of a copied source word
N_FREQUENT = 100 # so many German words may occur several times in a sentence
FREQUENCIES = 0, 1, 5, 20, 100 # where the groups of words start, by occurrences in the training text
NUMBERS = 'null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf'.split()
RULES = {
    'equal to the reference': 'the same words in the same order, without regard to capitals and punctuation',
    'far too short': f'fewer than {SHORT:.0%} of the words of the reference',
    'far too long': f'more than {LONG:.0%} of the words of the reference',
    'repeated word': f'a word, except the {N_FREQUENT} most frequent ones, occurs twice or more, and more often than in '
                     'the reference',
    'unknown word': 'a word that occurs neither in the German training text nor in the reference',
    'copied source word': f'a source word of {MIN_LETTERS} or more letters that the translation has and the reference does '
                          'not, and that is rare in the German training text',
    'lost name': 'a capitalized source word inside the sentence that the reference has and the translation does not',
    'wrong number': 'the digits and number words from 2 to 12 differ from those of the reference',
}

def words(text: str) -> list[str]:
    return re.findall(r"\w+(?:['’-]\w+)*", text)

def lower_words(text: str) -> list[str]:
    return words(text.lower())

def names_of(source: str) -> list[str]:
    "Return the capitalized words inside a sentence that has lower-case words, too."
    if source.upper() == source:
        return []
    return [word for word in words(source)[1:] if word[0].isupper() and len(word) > 1]

def numbers_of(text: str) -> Counter:
    "Return the numbers of a German text but 1, whose words are those of the article; small ones may be words."
    found = ['2' if word in ('beide', 'beiden') else str(NUMBERS.index(word)) if word in NUMBERS else word
             for word in lower_words(text)]
    return Counter(word for word in found if word.isdigit() and word != '1')

def kinds(source: str, translation: str, reference: str, train_counts: Counter, frequent: set[str]) -> dict[str, str]:
    "Return what each rule finds in a translation: the kind, and the words concerned."
    ours, theirs = lower_words(translation), lower_words(reference)
    our_counts, their_counts = Counter(ours), Counter(theirs)
    found = {}
    if ours == theirs:
        return {'equal to the reference': ''}
    if len(ours) < SHORT * len(theirs):
        found['far too short'] = f'{len(ours)} of {len(theirs)} words'
    if len(ours) > LONG * len(theirs):
        found['far too long'] = f'{len(ours)} instead of {len(theirs)} words'
    matches = {
        'repeated word': [w for w, n in our_counts.items() if w not in frequent and n > max(1, their_counts[w])],
        'unknown word': [w for w in our_counts if w not in train_counts and w not in their_counts],
        'copied source word': [w for w in set(lower_words(source)) & set(ours) - set(theirs)
                               if len(w) >= MIN_LETTERS and train_counts[w] < RARE],
        'lost name': [w for w in names_of(source) if w.lower() in their_counts and w.lower() not in our_counts],
    }
    found |= {kind: ', '.join(sorted(matched)) for kind, matched in matches.items() if matched}
    ours, theirs = numbers_of(translation), numbers_of(reference)
    if ours != theirs:
        found['wrong number'] = f"{' '.join(ours.elements()) or '–'} instead of {' '.join(theirs.elements()) or '–'}"
    return found

def group_scores(members: list[int], sources: list[str], counts: list[np.ndarray]) -> dict:
    "Return the mean BLEU of the seeds on some sentences, with its 95% interval over these sentences."
    width = counts[0].shape[1]

    def mean_bleu(rows):
        return statistics.mean(bleu_of(rows[:, i:i + width]) for i in range(0, rows.shape[1], width))

    rows = np.hstack([c[members] for c in counts])
    low, high = bootstrap_interval(rows, mean_bleu, samples=1000)
    return {'sentences': len(members), 'mean_words': statistics.mean(len(sources[i].split()) for i in members),
            'bleu': mean_bleu(rows), 'low': low, 'high': high}

def length_groups(sources: list[str], n_groups: int = 4) -> dict[str, list[int]]:
    "Divide sentences into groups of nearly equal size, from the shortest sources to the longest."
    lengths = [len(source.split()) for source in sources]
    edges = statistics.quantiles(lengths, n=n_groups)
    found = {}
    for i in sorted(range(len(sources)), key=lengths.__getitem__):
        found.setdefault(bisect_left(edges, lengths[i]), []).append(i)
    return {f'{lengths[members[0]]} to {lengths[members[-1]]} words': members for members in found.values()}

def hard_groups(sources: list[str], train_counts: Counter) -> dict[str, dict[str, list[int]]]:
    "Divide sentences by their rare words, and by their names and numbers."
    rare = {'no rare word': [], '1 rare word': [], '2 or more': []}
    special = {'neither': [], 'a name': [], 'a number': []}
    for i, source in enumerate(sources):
        n_rare = sum(train_counts[word] < RARE for word in lower_words(source))
        rare[list(rare)[min(n_rare, 2)]].append(i)
        if names_of(source):
            special['a name'].append(i)
        if re.search(r'\d', source):
            special['a number'].append(i)
        if not names_of(source) and not re.search(r'\d', source):
            special['neither'].append(i)
    return {'source length': length_groups(sources), 'rare source words': rare, 'names and numbers': special}

def recall(texts: list[list[str]], references: list[str], train_counts: Counter, frequent: set[str]) -> dict[str, dict]:
    "Return the share of the references' words that the translations have, by their frequency in the training text."
    total, matched = Counter(), Counter()
    for text in texts:
        for translation, reference in zip(text, references):
            ours = Counter(lower_words(translation))
            for word, n in Counter(lower_words(reference)).items():
                if word not in frequent:
                    start = max(start for start in FREQUENCIES if start <= train_counts[word])
                    total[start] += n
                    matched[start] += min(n, ours[word])
    return {str(start): {'words': total[start] // len(texts), 'recall': matched[start] / total[start]}
            for start in FREQUENCIES}

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-dir', type=Path, required=True, help='folder with the files of Multi30k')
    parser.add_argument('--records', nargs='+', default=[f'gpu-en-de-wide-seed{seed}' for seed in (1, 2, 3)],
                        help='records whose translations are compared with the references')
    parser.add_argument('--split', default='test_2016_flickr')
    parser.add_argument('--out', type=Path, default=RESULTS / f'{NAME}.json', help='the record')
    args = parser.parse_args()
    corpus = load_corpus(CorpusConfig('multi30k', data_dir=args.data_dir))
    train = corpus['train']
    source_counts = Counter(word for src, _ in train for word in lower_words(src))
    target_counts = Counter(word for _, tgt in train for word in lower_words(tgt))
    pairs = corpus[args.split]
    sources, references = [src for src, _ in pairs], [tgt for _, tgt in pairs]
    texts = [(RESULTS / f'{name}.{args.split}.txt').read_text('utf-8').splitlines() for name in args.records]

    frequent = {word for word, _ in target_counts.most_common(N_FREQUENT)}
    found = [[kinds(*row, target_counts, frequent) for row in zip(sources, text, references, strict=True)] for text in texts]
    rows = {}
    for kind, rule in RULES.items():
        shares = [statistics.mean(kind in row for row in seed) for seed in found]
        members = [[i for i, row in enumerate(seed) if kind in row] for seed in found]
        pure = [i for i in members[0] if len(found[0][i]) == 1 and len(sources[i].split()) <= 16] or members[0]
        i = pure[len(pure) // 2]
        chrf = [score([text[i] for i in ids], [references[i] for i in ids]).chrf for text, ids in zip(texts, members)]
        rows[kind] = {'rule': rule, 'shares': shares, 'chrf': statistics.mean(chrf), 'found': found[0][i].get(kind),
                      'source': sources[i], 'translation': texts[0][i], 'reference': references[i]}
    none = [statistics.mean(not row for row in seed) for seed in found]
    counts = [bleu_counts(text, references) for text in texts]
    groups = {name: {part: group_scores(members, sources, counts) for part, members in parts.items()}
              for name, parts in hard_groups(sources, source_counts).items()}
    record = about() | {
        'name': NAME, 'command': 'python benchmarks/errors.py --data-dir DIR', 'records': args.records,
        'split': args.split, 'seeds': [1, 2, 3], 'rare': RARE, 'kinds': rows, 'none_of_them': none, 'bleu': groups,
        'recall_by_frequency': recall(texts, references, target_counts, frequent),
        'rare_words': statistics.mean(source_counts[word] < RARE for src in sources for word in lower_words(src)),
        'length_ratios': [score(text, references).length_ratio for text in texts]}
    atomic_write(args.out, json.dumps(record, indent=2, ensure_ascii=False) + '\n')
    for kind, row in rows.items():
        print(f"{kind:24} {statistics.mean(row['shares']):6.1%}  {row['found']} | {row['source']} | {row['translation']}"
              f" | {row['reference']}")
    print('none', none, json.dumps({name: record[name] for name in ('recall_by_frequency', 'bleu')}))

if __name__ == '__main__':
    main()
