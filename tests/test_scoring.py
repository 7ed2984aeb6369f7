"Scores: BLEU from its definition beside sacreBLEU's, groups, perplexity, and the mean of checkpoints."
import math
import random
import re
from collections import Counter

import pytest
import safetensors.torch
import torch

from annotated_transformer.scoring import Scores, average_weights, perplexity, score, score_groups

WORDS = 'der die das Hund Katze Haus schläft läuft sieht nicht heute morgen , und auf unter'.split()


def sentences(n, seed):
    "Random word salad that ends with a full stop, as normal text."
    rng = random.Random(seed)
    return [' '.join(rng.choices(WORDS, k=rng.randint(4, 12))).replace(' ,', ',') + '.' for _ in range(n)]


def noisy(texts, seed):
    "The same with words changed, left out and moved: enough in common for every n-gram length."
    rng = random.Random(seed)
    def change(text):
        words = text.split()
        if rng.random() < 0.5: words[rng.randrange(len(words))] = rng.choice(WORDS)
        if rng.random() < 0.5 and len(words) > 2: del words[rng.randrange(len(words))]
        if rng.random() < 0.3: words.insert(rng.randrange(len(words)), rng.choice(WORDS))
        return ' '.join(words)
    return [change(text) for text in texts]


def tokens(text): return re.sub(r'([.,])', r' \1 ', text).split()


def bleu(translations, references):
    "Papineni et al. (2002), for corpora in which no n-gram length is without a match."
    found, total, c, r = [0] * 4, [0] * 4, 0, 0
    for t, ref in zip(map(tokens, translations), map(tokens, references)):
        c, r = c + len(t), r + len(ref)
        for n in range(4):
            grams = [Counter(zip(*(s[i:] for i in range(n + 1)))) for s in (t, ref)]
            found[n] += sum((grams[0] & grams[1]).values())
            total[n] += sum(grams[0].values())
    brevity = 1 if c > r else math.exp(1 - r / c)
    return 100 * brevity * math.prod(f / t for f, t in zip(found, total)) ** 0.25


@pytest.mark.parametrize('seed', range(8))
def test_bleu_is_its_definition(seed):
    references = sentences(30, seed)
    translations = noisy(references, seed)
    assert score(translations, references).bleu == pytest.approx(bleu(translations, references), abs=1e-9)


def test_signatures_say_how_it_was_counted():
    scores = score(['Der Hund schläft.'], ['Der Hund schläft.'])
    assert scores.bleu == pytest.approx(100) and scores.chrf == pytest.approx(100) and scores.sentences == 1
    assert scores.signature.startswith('nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:')
    assert scores.chrf_signature.startswith('nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:')
    assert scores.signature in str(scores) and scores.chrf_signature in str(scores) and '1 sentences' in str(scores)


def test_score_is_of_the_corpus_and_of_its_order():
    references = sentences(20, 3)
    translations = noisy(references, 3)
    together = score(translations, references)
    assert together == score(tuple(translations), tuple(references))
    assert together == score(translations[::-1], references[::-1])
    assert together.bleu > score(translations[1:] + translations[:1], references).bleu
    assert together.bleu != pytest.approx(sum(score([t], [r]).bleu for t, r in zip(translations, references)) / 20, abs=0.1)


@pytest.mark.parametrize('translations, references, message', [
    ([], [], 'nothing to score'),
    (['a'], ['a', 'b'], '1 translations cannot be scored against 2 references'),
    (['a'], [], '1 translations cannot be scored against 0 references'),
    ('abc', ['a', 'b', 'c'], 'list of sentences'),
    (['a', 'b', 'c'], 'abc', 'list of sentences'),
])
def test_what_cannot_be_scored(translations, references, message):
    with pytest.raises(ValueError, match=message): score(translations, references)


def test_empty_translations_count():
    assert score(['', ''], ['Der Hund.', 'Die Katze.']).bleu == 0
    assert 0 < score(['Der Hund schläft heute.', ''], ['Der Hund schläft heute.', 'Die Katze.']).bleu < 100


def test_groups_are_scored_alone():
    references = sentences(12, 5)
    translations = noisy(references, 5)
    groups = [{'even'} if i % 2 == 0 else ['odd', 'late'] if i > 6 else ('odd',) for i in range(12)]
    scores = score_groups(translations, references, groups)
    assert list(scores) == ['even', 'late', 'odd'] and all(isinstance(s, Scores) for s in scores.values())
    for name in scores:
        members = [i for i, names in enumerate(groups) if name in names]
        assert scores[name] == score([translations[i] for i in members], [references[i] for i in members])
    assert score_groups(translations, references, [()] * 12) == {}


@pytest.mark.parametrize('sizes', [(2, 2, 1), (2, 1, 2), (1, 2, 2), (0, 0, 1)])
def test_groups_must_fit(sizes):
    t, r, g = (['x'] * n for n in sizes)
    with pytest.raises(ValueError, match='one of each'): score_groups(t, r, g)


@pytest.mark.parametrize('v', [1, 2, 37, 8000])
def test_perplexity_of_a_uniform_model_is_its_vocabulary(v): assert perplexity(math.log(v)) == pytest.approx(v)


def test_perplexity_at_its_ends():
    assert perplexity(0.) == 1 and perplexity(math.inf) == math.inf and perplexity(1e9) == math.inf
    assert math.isnan(perplexity(math.nan))
    assert perplexity(699.9) < math.inf


def write(folder, *checkpoints):
    paths = [folder / f'{i}.safetensors' for i in range(len(checkpoints))]
    for weights, path in zip(checkpoints, paths): safetensors.torch.save_file(weights, path)
    return paths


@pytest.mark.parametrize('n', [1, 2, 5])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_average_is_the_mean(tmp_path, n, dtype):
    torch.manual_seed(n)
    checkpoints = [{'a': torch.randn(3, 4, dtype=dtype), 'b.c': torch.randn(5, dtype=dtype)} for _ in range(n)]
    mean = average_weights(write(tmp_path, *checkpoints))
    assert set(mean) == {'a', 'b.c'}
    for name, w in mean.items():
        assert w.dtype == torch.float32
        torch.testing.assert_close(w, torch.stack([c[name].double() for c in checkpoints]).mean(0).float())


def test_average_of_equals_is_exact(tmp_path):
    w = torch.randn(1000) * 1e3
    assert torch.equal(average_weights(write(tmp_path, *[{'w': w}] * 20))['w'], w)


@pytest.mark.parametrize('other, differs', [({'a': torch.ones(2)}, 'b'), ({'a': torch.ones(2), 'b': torch.ones(2)}, 'b'),
                                            ({'a': torch.ones(2), 'b': torch.ones(3), 'c': torch.ones(1)}, 'c')])
def test_unlike_checkpoints_have_no_mean(tmp_path, other, differs):
    paths = write(tmp_path, {'a': torch.ones(2), 'b': torch.ones(3)}, other)
    with pytest.raises(ValueError, match=rf"1.safetensors cannot be averaged .* \['{differs}'\]"): average_weights(paths)
    with pytest.raises(ValueError, match='cannot be averaged'): average_weights(paths[::-1])


def test_nothing_to_average(tmp_path):
    with pytest.raises(ValueError, match='no checkpoints'): average_weights([])
    with pytest.raises(FileNotFoundError): average_weights([tmp_path / 'absent.safetensors'])
