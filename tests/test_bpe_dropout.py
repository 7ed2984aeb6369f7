"BPE-dropout: the library's tokens without dropout, the paper's probabilities with it, the same in every process."
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from annotated_transformer.batches import encode_pairs
from annotated_transformer.bpe_dropout import BytePairDropout, dropout_pairs
from annotated_transformer.toy_languages import toy_ende
from annotated_transformer.vocabulary import SPECIALS, UNK, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
LANGS = ('en', 'de')


@pytest.fixture(scope='module')
def pairs():
    return [(pair.src, pair.tgt) for pair in toy_ende('train', n=600)]


@pytest.fixture(scope='module')
def bpe():
    return train_tokenizer('bpe', [(pair.src, pair.tgt) for pair in toy_ende('train', n=3000)], LANGS, 800)


def test_without_dropout_it_is_the_library_on_any_string(bpe):
    rng = random.Random(0)
    ranges = [range(0x80), range(0x250), range(0x3000), range(0xd700, 0xe100), range(0x1f300, 0x1f700),
              range(sys.maxunicode + 1)]
    strings = [''.join(chr(rng.choice(r)) for _ in range(rng.randrange(30))) for r in ranges for _ in range(60)]
    strings += ['', ' ', '▁', '▁▁a', '_', 'a▁b', '中中文', 'x中x文中x', 'aaaaaaa', 'Ha' * 50, ' '.join(SPECIALS),
                '<eos>' * 3, 'e\u0301', '\0']
    strings += [text for pair in toy_ende('test', n=200) for text in (pair.src, pair.tgt)]
    rows = bpe.encode_batch(strings)
    assert BytePairDropout(bpe, 0.0).encode_batch(strings) == rows
    characters = BytePairDropout(bpe, 1.0).encode_batch(strings)
    assert all(i == UNK or len(bpe.token(i)) == 1 for row in characters for i in row)
    for row, sampled in zip(rows, BytePairDropout(bpe, 0.3).encode_batch(strings)):
        assert bpe.decode(sampled) == bpe.decode(row) # the text stays
        assert UNK <= min(sampled, default=UNK) and sampled.count(UNK) == row.count(UNK)


def algorithm_1(word, merges, p):
    "The probability of every segmentation by Provilkov et al. (2020), computed along all paths."
    possible = sorted((merges[pair], i) for i, pair in enumerate(zip(word, word[1:])) if pair in merges)
    found = Counter({word: p ** len(possible)})
    for j, ((_, merged), i) in enumerate(possible):
        successor = word[:i] + (merged,) + word[i + 2:]
        for end, q in algorithm_1(successor, merges, p).items():
            found[end] += p ** j * (1 - p) * q
    return found


def distance(counts, expected):
    "Chi-square minus its mean, in standard deviations; rare segmentations count as one."
    n = counts.total()
    rows = [(counts[end], n * q) for end, q in expected.items() if n * q >= 10]
    rest = (n - sum(count for count, _ in rows), n - sum(e for _, e in rows))
    if rest[1] >= 1:
        rows.append(rest)
    chi_square = sum((count - e) ** 2 / e for count, e in rows)
    return (chi_square - len(rows) + 1) / (2 * (len(rows) - 1)) ** 0.5


@pytest.mark.parametrize('p', [0.1, 0.5])
def test_the_probabilities_are_those_of_the_paper(bpe, p):
    dropout = BytePairDropout(bpe, p)
    n = 5000
    for text in ('gardens', 'gegangen', 'sleeping', 'Häuser'):
        [word] = dropout.split(text)
        expected = algorithm_1(word, dropout.merges, p)
        assert abs(sum(expected.values()) - 1) < 1e-9 and len(expected) > 3
        counts = Counter(map(tuple, dropout.encode_batch([text] * n, seed=text)))
        assert set(counts) <= set(expected)
        assert distance(counts, expected) < 6
        wrong = algorithm_1(word, dropout.merges, p + 0.05) # the test would notice another probability
        assert distance(counts, wrong) > 6


def test_the_same_in_every_process(bpe, tmp_path):
    bpe.save(tmp_path / 'bpe.json')
    code = '''if True:
        import sys
        from annotated_transformer.bpe_dropout import dropout_pairs
        from annotated_transformer.toy_languages import toy_ende
        from annotated_transformer.vocabulary import load_tokenizer
        pairs = [(pair.src, pair.tgt) for pair in toy_ende('train', n=200)]
        encode_epoch = dropout_pairs(pairs, load_tokenizer(sys.argv[1]), ('en', 'de'), 40, 0.2, seed=3)
        for epoch in map(int, sys.argv[2].split()): ids = encode_epoch(epoch)
        print(ids)
    '''
    runs = [subprocess.run([sys.executable, '-c', code, tmp_path / 'bpe.json', epochs], capture_output=True, text=True,
                           cwd=ROOT, env={**os.environ, 'PYTHONHASHSEED': seed})
            for epochs, seed in (('0 1 2', '0'), ('2', '7'), ('1', '0'))]
    assert all(run.returncode == 0 for run in runs), runs[0].stderr
    assert runs[0].stdout == runs[1].stdout != runs[2].stdout # epoch 2 does not depend on the epochs before it


def test_pairs_without_dropout_are_encoded_pairs(bpe, pairs):
    assert dropout_pairs(pairs, bpe, LANGS, dropout=0.0)(7) == encode_pairs(pairs, bpe, LANGS)
    with pytest.warns(UserWarning, match='longer than 6 positions'):
        short = dropout_pairs(pairs, bpe, LANGS, 6, 0.0)(0)
    assert short == [(src[:5], tgt[:5]) for src, tgt in encode_pairs(pairs, bpe, LANGS)]
    assert dropout_pairs([], bpe, LANGS)(0) == []


def test_a_small_cache_changes_nothing(bpe, pairs):
    texts = [text for pair in pairs[:40] for text in pair]
    large = BytePairDropout(bpe, 0.4)
    small = BytePairDropout(bpe, 0.4, max_cached=20)
    assert large.encode_batch(texts, seed=1) == small.encode_batch(texts, seed=1)
    assert len(small.successors) <= 20 and len(small.characters) <= 20 < len(large.successors)


def test_unusable_settings(bpe, pairs):
    with pytest.raises(ValueError, match="kind 'words' has none"):
        dropout_pairs(pairs, train_tokenizer('words', pairs, LANGS), LANGS)
    for p in (-0.1, 1.5, float('nan')):
        with pytest.raises(ValueError, match='must be from 0 to 1'):
            BytePairDropout(bpe, p)
    with pytest.raises(ValueError, match='max_len=1 must be at least 2'):
        dropout_pairs(pairs, bpe, LANGS, 1)
