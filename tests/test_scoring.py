"Scores: BLEU and chrF by definition, intervals and p-values by simulation, Moses' rules on published data."
import gzip
import math
import random
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from annotated_transformer.score_report import (lowercased_tokenized,
                                                lowercased_tokenized_bleu, score_by_length, score_groups,
                                                tokenized_bleu)
from annotated_transformer.scoring import bleu_counts, bleu_interval, bleu_of_counts, compare, score

DATA = Path(__file__).resolve().parents[2] / 'shared' / 'data'
NEEDS_DATA = pytest.mark.skipif(not (DATA / 'multi30k-tok').is_dir(), reason='needs Multi30k in ../shared/data')
WORDS = 'der die das Hund Katze Haus schläft läuft sieht nicht heute morgen , und auf unter'.split()


def sentences(n, seed):
    "Random words that end with a full stop."
    rng = random.Random(seed)
    return [' '.join(rng.choices(WORDS, k=rng.randint(4, 12))).replace(' ,', ',') + '.' for _ in range(n)]


def noisy(texts, seed):
    "The same sentences with some words replaced, left out and added."
    rng = random.Random(seed)

    def change(text):
        words = text.split()
        if rng.random() < 0.5:
            words[rng.randrange(len(words))] = rng.choice(WORDS)
        if rng.random() < 0.5 and len(words) > 2:
            del words[rng.randrange(len(words))]
        if rng.random() < 0.3:
            words.insert(rng.randrange(len(words)), rng.choice(WORDS))
        return ' '.join(words)
    return [change(text) for text in texts]


def matches(translations, references, n):
    "Matching n-grams, n-grams of the translations, n-grams of the references."
    total = [0, 0, 0]
    for pair in zip(translations, references):
        ours, theirs = [Counter(zip(*(tokens[i:] for i in range(n)))) for tokens in pair]
        found = sum(min(count, theirs[ngram]) for ngram, count in ours.items())
        total = [a + b for a, b in zip(total, (found, sum(ours.values()), sum(theirs.values())))]
    return total


@pytest.mark.parametrize('seed', range(4))
def test_bleu_is_its_definition(seed):
    references = sentences(30, seed)
    translations = noisy(references, seed)
    ours, theirs = [[re.sub(r'([.,])', r' \1 ', text).split() for text in side] for side in (translations, references)]
    c, r = [sum(map(len, side)) for side in (ours, theirs)]
    precisions = [found / total for found, total, _ in (matches(ours, theirs, n) for n in (1, 2, 3, 4))]
    expected = 100 * min(1, math.exp(1 - r / c)) * math.prod(precisions) ** 0.25
    found = score(translations, references)
    assert found.bleu == pytest.approx(expected)
    assert found.length_ratio == pytest.approx(c / r)


@pytest.mark.parametrize('seed', range(4))
def test_chrf_is_its_definition(seed):
    references = sentences(30, seed)
    translations = noisy(references, seed)
    ours, theirs = [[''.join(text.split()) for text in side] for side in (translations, references)]
    counts = [matches(ours, theirs, n) for n in range(1, 7)]
    precision = sum(found / total for found, total, _ in counts) / 6
    recall = sum(found / total for found, _, total in counts) / 6
    assert score(translations, references).chrf == pytest.approx(500 * precision * recall / (4 * precision + recall))


def test_scores_of_perfect_translations_and_their_signatures():
    references = sentences(5, 0)
    found = score(tuple(references), references)
    assert (found.bleu, found.chrf, found.length_ratio, found.sentences) == pytest.approx((100, 100, 1, 5))
    assert 'nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:' in found.signature
    assert 'nc:6|nw:0|space:no' in found.chrf_signature
    assert str(found).startswith(f'BLEU 100.00 ({found.signature}), chrF 100.00 ({found.chrf_signature}), 5 sent')


def test_empty_translations_lower_the_score():
    references = sentences(5, 0)
    found = score(['', *references[1:]], references)
    assert 0 < found.bleu < 100
    assert score([''] * 5, references).bleu == 0


@pytest.mark.parametrize('translations, references, message', [
    (['a'], ['a', 'b'], '1 translations and 2 references'), ([], [], 'at least one'),
    ('a', ['a'], 'put it in a list'), (['a'], 'a', 'put it in a list')])
def test_unusable_corpora_are_rejected(translations, references, message):
    for function in (score, tokenized_bleu, lowercased_tokenized_bleu, bleu_interval, score_by_length):
        with pytest.raises(ValueError, match=message):
            function(translations, references)
    with pytest.raises(ValueError, match=message):
        compare(translations, translations, references)
    with pytest.raises(ValueError, match='2 translations and 1 references'):
        compare(['a'], ['a', 'b'], ['a'])


# --- intervals and comparisons

@pytest.mark.parametrize('options', [{}, {'lowercase': True, 'tokenize': 'none'}])
def test_the_interval_is_that_of_sacrebleu(options):
    from sacrebleu.metrics import BLEU
    references = sentences(60, 0)
    translations = noisy(references, 0)
    found = bleu_interval(translations, references, 200, **options)
    expected = BLEU(**options, force=True).corpus_score(translations, [references], n_bootstrap=200)
    assert (found.mean, found.half_width) == pytest.approx((expected._mean, expected._ci), abs=1e-6)
    assert '|bs:200|seed:12345|' in found.signature
    assert ('tok:none' in found.signature) == bool(options)
    assert bleu_interval(tuple(translations), tuple(references), 200, **options) == found


def test_four_times_as_many_sentences_halve_the_interval():
    references = sentences(1600, 1)
    translations = noisy(references, 1)
    widths = [bleu_interval(translations[:n], references[:n], 200).half_width for n in (100, 400, 1600)]
    assert all(1.5 < wide / narrow < 2.7 for wide, narrow in zip(widths, widths[1:])), widths


def test_a_comparison_tells_better_from_equal():
    references = sentences(300, 2)
    good, as_good = noisy(references, 2), noisy(references, 3)
    bad = noisy(noisy(good, 5), 6)
    found = compare(good, bad, references)
    assert (found.bleu, found.against) == pytest.approx((score(good, references).bleu, score(bad, references).bleu))
    assert found.bleu - found.against > 5
    assert found.p_value < 0.005
    assert compare(good, as_good, references).p_value > 0.05
    assert compare(good, as_good, references).p_value == compare(as_good, good, references).p_value
    assert compare(good, list(good), references).p_value == 1
    assert compare(good, [text + ' ' for text in good], references).p_value == 1


@pytest.mark.slow
def test_of_equal_systems_one_pair_in_twenty_has_a_p_value_below_5_percent():
    references = sentences(80, 9)
    systems = [noisy(references, seed) for seed in range(400)]
    pairs = zip(systems[::2], systems[1::2])
    p_values = [compare(ours, theirs, references, 59).p_value for ours, theirs in pairs]
    assert 3 <= sum(p < 0.05 for p in p_values) <= 20   # of 200
    assert 70 <= sum(p > 0.5 for p in p_values) <= 130


def test_the_p_value_counts_ties():
    "One sentence differs, so that every swap gives the same absolute difference: chance explains it."
    references = sentences(30, 4)
    translations = noisy(references, 4)
    assert compare(translations, [references[0], *translations[1:]], references).p_value == 1


def test_two_different_sentences_need_equal_coins():
    "If both differences have one sign, a half of the swaps are as extreme as the measured difference."
    references = sentences(30, 4)
    found = compare(references, [*references[:28], 'nein', 'nein'], references)
    assert found.p_value == pytest.approx(0.5, abs=0.05)


def test_counts_give_the_score():
    references = sentences(60, 0)
    for translations in (noisy(references, 0), ['', *references[1:]], ['nein'] * 60):
        counts = bleu_counts(translations, references)
        assert counts.shape == (60, 10)
        assert bleu_of_counts(counts.sum(0)) == pytest.approx(score(translations, references).bleu, abs=1e-9)


def test_few_samples_are_rejected():
    references = sentences(5, 0)
    with pytest.raises(ValueError, match='samples=39 is too small'):
        bleu_interval(references, references, 39)


# --- groups

def test_groups_are_scored_alone():
    references = sentences(12, 3)
    translations = noisy(references, 3)
    groups = [['even' if i % 2 == 0 else 'odd', 'all'] for i in range(12)]
    found = score_groups(translations, references, groups)
    assert list(found) == ['all', 'even', 'odd']
    assert found['all'] == score(translations, references)
    assert found['odd'] == score(translations[1::2], references[1::2])
    assert score_groups(translations, references, [()] * 12) == {}
    assert score_groups(translations, references, ['all'] * 12) == {'all': found['all']}
    with pytest.raises(ValueError, match='12 translations, 12 references and 11 groups'):
        score_groups(translations, references, groups[1:])


def test_groups_by_length():
    references = ['', 'a', 'a b', 'a b c', ' '.join('abcde'), ' '.join('abcdefgh')]
    found = score_by_length(references, references, edges=(1, 3, 5, 6, 7))
    assert {name: part.sentences for name, part in found.items()} == {'1-1': 2, '2-3': 2, '4-5': 1, '8+': 1}
    assert list(found) == ['1-1', '2-3', '4-5', '8+']
    assert list(score_by_length(['a'] * 2, [' '.join('a' * 11), ' '.join('a' * 7)])) == ['6-10', '11-15']
    for edges in ((), (5, 5), (5, 3), (0, 5)):
        with pytest.raises(ValueError, match='must ascend'):
            score_by_length(references, references, edges)


# --- BLEU of tokenized text

@pytest.mark.parametrize('text, lang, expected', [
    ('', 'en', ''), ('   ', 'de', ''),
    ("The dogs' ball isn't 'here'.", 'en', "the dogs &apos; ball isn &apos;t &apos; here &apos; ."),
    ('1,000 of 3, or 4', 'en', '1,000 of 3 , or 4'), ('so... what?!', 'en', 'so ... what ? !'),
    ('a_b [c] <d> | e & f', 'en', 'a _ b &#91; c &#93; &lt; d &gt; &#124; e &amp; f'),
    ("L'été, c'est \u00ab bien \u00bb.", 'fr', "l&apos; été , c&apos; est &quot; bien &quot; ."),
    ('Am 5. Mai um 5.', 'de', 'am 5. mai um 5.'), ('z.B. heute.', 'de', 'z.b. heute .')])
def test_rules_of_moses(text, lang, expected):
    assert lowercased_tokenized([text], lang) == [expected]


@NEEDS_DATA
@pytest.mark.parametrize('lang', ['en', 'de'])
def test_tokenization_equals_the_published_one(lang):
    plain, published = [gzip.open(DATA / name, 'rt', encoding='utf-8').read().split('\n')[:-1] for name in
                        (f'multi30k/val.{lang}.gz', f'multi30k-tok/val.lc.norm.tok.{lang}.gz')]
    different = [(a, b) for a, b in zip(lowercased_tokenized(plain, lang), published, strict=True) if a != b]
    assert len(plain) > 1000
    assert len(different) <= (2 if lang == 'de' else 1), different[:5]


def test_bleu_of_tokenized_text_ignores_capitals_and_says_so():
    references = sentences(20, 4)
    translations = [text.lower() for text in references]
    bleu, signature = lowercased_tokenized_bleu(translations, references, 'de')
    assert bleu == pytest.approx(100)
    assert score(translations, references).bleu < 90
    assert 'sacremoses' in signature and 'tok:none' in signature and 'case:lc' in signature
    translations = noisy(references, 4)
    tokenized = [lowercased_tokenized(side, 'de') for side in (translations, references)]
    bleu, signature = lowercased_tokenized_bleu(translations, references, 'de')
    assert (bleu, signature.split(': ')[1]) == tokenized_bleu(*tokenized)


def test_missing_sacremoses_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, 'sacremoses', None)
    with pytest.raises(ImportError, match='pip install sacremoses'):
        lowercased_tokenized(['a'])
