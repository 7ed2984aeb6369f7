"Batches: complete, within their limit, reproducible, with little padding; and what padding must not change."
import gzip
import os
import random
import warnings
from pathlib import Path

import pytest
import torch

from annotated_transformer.batches import (
    Batch, BatchLoader, collate, encode_pairs, pad_rows, token_batches)
from annotated_transformer.training import batch_loss
from annotated_transformer.transformer import Transformer, TransformerConfig
from annotated_transformer.vocabulary import BOS, EOS, PAD, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
MULTI30K = Path(os.environ.get('ANNOTATED_TRANSFORMER_MULTI30K') or ROOT.parent / 'shared/data/multi30k')


def random_pairs(seed, n=300, longest=40):
    "Pairs of random ids; some sentences are empty."
    rng = random.Random(seed)

    def sentence():
        return [4 + rng.randrange(50) for _ in range(rng.randrange(longest))]

    return [(sentence(), sentence()) for _ in range(n)]


def lengths_of(pairs):
    return [(len(src) + 1, len(tgt) + 1) for src, tgt in pairs]


def padding_share(batches):
    ids = [side for batch in batches for side in (batch.src, batch.tgt_out)]
    return 1 - sum((rows != PAD).sum().item() for rows in ids) / sum(rows.numel() for rows in ids)


def test_rows_are_padded_on_the_right():
    assert pad_rows([[4, 5], [6], []]).tolist() == [[4, 5], [6, PAD], [PAD, PAD]]
    assert pad_rows([[4, 5], []], BOS, EOS).tolist() == [[BOS, 4, 5, EOS], [BOS, EOS, PAD, PAD]]
    assert pad_rows([(4, 5)], last=EOS).tolist() == [[4, 5, EOS]]
    assert pad_rows([]).shape == (0, 0)
    assert pad_rows([[], []]).shape == (2, 0)


def test_special_tokens_and_shift():
    batch = collate([([11, 12, 13], [21, 22]), ([14], [23, 24, 25, 26]), ([], [])])
    assert batch.src.tolist() == [[11, 12, 13, EOS], [14, EOS, PAD, PAD], [EOS, PAD, PAD, PAD]]
    assert batch.tgt_in.tolist() == [[BOS, 21, 22, EOS, PAD], [BOS, 23, 24, 25, 26], [BOS, EOS, PAD, PAD, PAD]]
    assert batch.tgt_out.tolist() == [[21, 22, EOS, PAD, PAD], [23, 24, 25, 26, EOS], [EOS, PAD, PAD, PAD, PAD]]
    assert batch.n_tokens == 3 + 5 + 1
    assert len(batch) == 3
    moved = batch.to('cpu')
    assert isinstance(moved, Batch)
    assert torch.equal(moved.src, batch.src) and torch.equal(moved.tgt, batch.tgt)


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('max_tokens', [40, 64, 500, 100_000])
@pytest.mark.parametrize('shuffle', [True, False])
def test_each_pair_once_within_the_limit(seed, max_tokens, shuffle):
    lengths = lengths_of(random_pairs(seed))
    for epoch in range(3):
        batches = token_batches(lengths, max_tokens, seed, epoch, shuffle)
        assert sorted(i for batch in batches for i in batch) == list(range(300))
        for batch in batches:
            assert len(batch) * max(max(lengths[i]) for i in batch) <= max_tokens


def test_batches_are_as_full_as_the_limit_allows():
    lengths = lengths_of(random_pairs(1))
    batches = token_batches(lengths, 200, shuffle=False)
    for batch, following in zip(batches, batches[1:]):
        assert (len(batch) + 1) * max(lengths[following[0]]) > 200 # the next pair did not fit


def test_no_pairs_make_no_batches():
    assert token_batches([], 100) == []
    assert len(BatchLoader([], 100)) == 0
    assert list(BatchLoader([], 100).epoch(0)) == []


def test_seed_and_epoch_decide_the_order():
    lengths = lengths_of(random_pairs(2))
    assert token_batches(lengths, 300, 1, 5) == token_batches(lengths, 300, 1, 5)
    assert token_batches(lengths, 300, 1, 5) != token_batches(lengths, 300, 1, 6)
    assert token_batches(lengths, 300, 1, 5) != token_batches(lengths, 300, 2, 5)
    assert token_batches(lengths, 300, 1, 2) != token_batches(lengths, 300, 2, 1)
    assert token_batches(lengths, 300, 1, 5, shuffle=False) == token_batches(lengths, 300, 2, 6, shuffle=False)


def test_without_shuffling_short_pairs_come_first():
    lengths = lengths_of(random_pairs(3))
    longest = [max(max(lengths[i]) for i in batch) for batch in token_batches(lengths, 300, shuffle=False)]
    assert longest == sorted(longest)
    shuffled = [max(max(lengths[i]) for i in batch) for batch in token_batches(lengths, 300)]
    assert shuffled != sorted(shuffled)


def test_pairs_of_equal_length_meet_others_in_the_next_epoch():
    lengths = [(9, 9)] * 400
    first, second = (token_batches(lengths, 90, epoch=epoch) for epoch in (0, 1))
    assert {frozenset(batch) for batch in first}.isdisjoint(frozenset(batch) for batch in second)


def test_too_long_a_pair_is_an_error_that_says_what_to_do():
    pairs = [([4], [5]), ([4] * 3, [5] * 9)]
    for make in (lambda: token_batches(lengths_of(pairs), 9), lambda: BatchLoader(pairs, 9)):
        with pytest.raises(ValueError, match='pair 1 has 10 tokens, more than max_tokens=9: raise max_tokens'):
            make()
    assert len(BatchLoader(pairs, 10)) == 2


def test_loader_yields_the_batches_of_token_batches():
    pairs = random_pairs(4)
    for shuffle in (True, False):
        loader = BatchLoader(pairs, 400, seed=7, shuffle=shuffle)
        for epoch in range(3):
            indices = token_batches(lengths_of(pairs), 400, 7, epoch, shuffle)
            batches = list(loader.epoch(epoch))
            assert len(loader) == len(indices) == len(batches)
            for rows, batch in zip(indices, batches):
                expected = collate([pairs[i] for i in rows])
                assert torch.equal(batch.src, expected.src) and torch.equal(batch.tgt, expected.tgt)


def test_padding_changes_neither_loss_nor_gradient():
    "The loss of a padded batch is the mean over its tokens; each sentence alone gives the same sum."
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocab_size=60, n_layers=2, d_model=16, d_ff=32, n_heads=4)).eval()
    pairs = random_pairs(5, n=6, longest=12)
    batch = collate(pairs)
    assert padding_share([batch]) > 0.2
    together = batch_loss(model, batch)
    gradient = torch.autograd.grad(together, list(model.parameters()))
    alone = sum(batch_loss(model, collate([pair])) * (len(pair[1]) + 1) for pair in pairs) / batch.n_tokens
    torch.testing.assert_close(alone, together)
    for a, b in zip(torch.autograd.grad(alone, list(model.parameters())), gradient):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_pairs_are_encoded_and_truncated_with_a_warning():
    pairs = [('a b c d', 'A B'), ('a', 'A B C D E')]
    tokenizer = train_tokenizer('words', pairs, ('xx', 'xx'), vocab_size=50, min_freq=1)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        ids = encode_pairs(pairs, tokenizer, ('xx', 'xx'))
        assert encode_pairs(pairs, tokenizer, ('xx', 'xx'), max_len=6) == ids
    assert [(tokenizer.decode(src), tokenizer.decode(tgt)) for src, tgt in ids] == pairs
    with pytest.warns(UserWarning, match='sentence pairs truncated to 4 positions: 2 of 2'):
        cut = encode_pairs(pairs, tokenizer, ('xx', 'xx'), max_len=4)
    assert cut == [(src[:3], tgt[:3]) for src, tgt in ids]
    batch = collate(cut)
    assert batch.src.size(1) == batch.tgt_in.size(1) == 4


@pytest.mark.slow
@pytest.mark.skipif(not (MULTI30K / 'train.de.gz').exists(),
                    reason='no Multi30k: set ANNOTATED_TRANSFORMER_MULTI30K to its folder')
def test_padding_of_multi30k_is_as_the_page_says():
    "Random batches of 64: 52 % padding. Buckets of 1,024 tokens: 6 %."
    sides = [gzip.decompress((MULTI30K / f'train.{lang}.gz').read_bytes()).decode().splitlines()
             for lang in ('en', 'de')]
    pairs = list(zip(*sides, strict=True))
    assert len(pairs) == 29_000
    tokenizer = train_tokenizer('bpe', pairs, ('en', 'de'), vocab_size=8000)
    ids = encode_pairs(pairs, tokenizer, ('en', 'de'))
    order = random.Random(0).sample(range(len(ids)), len(ids))
    at_random = [collate([ids[i] for i in order[k:k + 64]]) for k in range(0, len(ids), 64)]
    assert abs(padding_share(at_random) - 0.52) < 0.01
    assert abs(padding_share(BatchLoader(ids, 1024).epoch(0)) - 0.06) < 0.005


def test_pytorchs_data_loader_gives_the_same_batches():
    pairs = random_pairs(2)
    indices = token_batches(lengths_of(pairs), 200, seed=3, epoch=1)
    theirs = list(torch.utils.data.DataLoader(pairs, batch_sampler=indices, collate_fn=collate))
    ours = list(BatchLoader(pairs, 200, seed=3).epoch(1))
    assert len(theirs) == len(ours) > 1
    for a, b in zip(theirs, ours):
        assert torch.equal(a.src, b.src) and torch.equal(a.tgt, b.tgt)
