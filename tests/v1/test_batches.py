"""What the batches page cannot show: many random corpora, the model's view of padding,
and real text where it is at hand."""
import os
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from annotated_transformer.v1 import batches as batches_module
from annotated_transformer.v1.batches import (
    Batch, BatchLoader, collate, encode_pairs, pad_rows, padding_share, token_batches)
from annotated_transformer.v1.corpora import load_corpus
from annotated_transformer.v1.losses import linear_cross_entropy
from annotated_transformer.v1.transformer import Transformer, TransformerConfig
from annotated_transformer.v1.vocabulary import BOS, EOS, PAD, train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get('ANNOTATED_TRANSFORMER_MULTI30K') or ROOT.parent/'shared/data/multi30k')
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason='no Multi30k: set ANNOTATED_TRANSFORMER_MULTI30K to its folder')


def random_pairs(seed, n=300, longest=40):
    rng = random.Random(seed)
    return [tuple([4 + rng.randrange(50) for _ in range(rng.randrange(longest))] for _ in range(2)) for _ in range(n)]


def rows_of(loader, epoch=0): return [rows.tolist() for rows in loader.index_batches(epoch)]


@pytest.fixture(params=[None, 8], ids=['one window', 'many windows'])
def small_windows(request, monkeypatch):
    "Windows of 64 pairs in blocks of 8, so that 300 pairs are a corpus of several."
    if request.param is None: return False
    monkeypatch.setattr(batches_module, 'BLOCK', 8)
    monkeypatch.setattr(batches_module, 'WINDOW', 64)
    return True


@pytest.mark.parametrize('seed', range(6))
@pytest.mark.parametrize('max_tokens', [40, 64, 500, 100_000])
@pytest.mark.parametrize('multiple', [1, 4])
def test_each_pair_once_within_the_budget(seed, max_tokens, multiple, small_windows):
    loader = BatchLoader(random_pairs(seed), max_tokens, seed=seed, multiple=multiple)
    for epoch in range(3):
        batches = rows_of(loader, epoch)
        assert sorted(sum(batches, [])) == list(range(300))
        assert small_windows or len(batches) == len(loader)
        assert epoch or len(batches) == len(loader)
        assert all(len(rows)*-(-loader.lengths[rows].max()//multiple)*multiple <= max_tokens for rows in batches)
        assert batches == rows_of(BatchLoader(loader.pairs, max_tokens, seed, multiple=multiple), epoch)
    if max_tokens == 500: assert rows_of(loader, 0) != rows_of(loader, 1) != rows_of(loader, 2)


@pytest.mark.parametrize('world', [2, 3, 7, 50])
@pytest.mark.parametrize('multiple', [1, 8])
def test_ranks_are_disjoint_and_complete(world, multiple, small_windows):
    # the first id says which pair it is
    pairs = [([i, *src], [i, *tgt]) for i, (src, tgt) in enumerate(random_pairs(9), 100)]
    whole = BatchLoader(pairs, 400, seed=2, multiple=multiple)
    parts = [BatchLoader(pairs, 400, seed=2, rank=rank, world_size=world, multiple=multiple) for rank in range(world)]
    for epoch, start in ((0, 0), (1, 0), (1, 5)):
        seen = []
        for rows, batch, *shares in zip(rows_of(whole, epoch)[start:], whole.epoch(epoch, start),
                                        *(part.epoch(epoch, start) for part in parts), strict=True):
            firsts = [i for share in shares for i in share.tgt[:, 1].tolist() if i]
            assert sorted(firsts) == sorted(100 + row for row in rows)
            assert sum(share.n_tokens for share in shares) == batch.n_tokens
            assert {share.global_tokens for share in shares} == {batch.global_tokens} == {batch.n_tokens}
            if multiple > 1: assert len({share.src.shape for share in shares}) == 1
            seen += rows
        if not start: assert sorted(seen) == list(range(300))


def test_an_empty_share_goes_through_model_and_loss():
    """Forward and backward of a batch without rows, and of rows without tokens:
    the loss is 0, the gradients are 0 and not NaN."""
    for norm in ('post', 'pre'):
        model = Transformer(TransformerConfig(vocab_size=60, n_layers=2, d_model=16, d_ff=32, n_heads=4, norm=norm))
        for batch in (collate([]), collate([], height=3, width=5)):
            real = batch.tgt_out != PAD
            states = model.states(batch.src, batch.tgt_in)
            assert states.shape == (*batch.tgt_in.shape, 16) and states.isfinite().all()
            for smoothing in (0., 0.1):
                model.zero_grad()
                loss = linear_cross_entropy(model.states(batch.src, batch.tgt_in)[real], model.output.weight,
                                            batch.tgt_out[real], smoothing)
                loss.backward()
                assert loss.item() == 0 and batch.n_tokens == 0
                assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


def test_rows_of_filler_change_nothing():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocab_size=60, n_layers=2, d_model=16, d_ff=32, n_heads=4, dropout=0.))
    found = []
    for options in ({}, dict(height=9, width=16)):
        batch = collate(random_pairs(4, n=7, longest=12), **options)
        real = batch.tgt_out != PAD
        model.zero_grad()
        loss = linear_cross_entropy(model.states(batch.src, batch.tgt_in)[real], model.output.weight,
                                    batch.tgt_out[real])
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
        assert batch.n_tokens == real.sum()
    for a, b in zip(*found): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_lengths_are_asked_for_and_rows_left_alone():
    class Costly(list):
        reads = 0
        def __iter__(self): raise AssertionError('read through')
        def __getitem__(self, i):
            Costly.reads += 1
            return super().__getitem__(i)
    pairs = Costly(random_pairs(3))
    pairs.lengths = np.array([(len(s) + 1, len(t) + 1) for s, t in random_pairs(3)])
    loader = BatchLoader(pairs, 500, seed=1)
    batches = rows_of(loader)
    assert len(loader) and not Costly.reads
    assert [len(b) for b in loader.epoch(0, start=3)] == [len(rows) for rows in batches[3:]]
    assert Costly.reads == sum(map(len, batches[3:]))


def test_pairs_that_are_a_function_of_the_epoch():
    asked = []
    def pairs(epoch):
        asked.append(epoch)
        return random_pairs(epoch, n=50 + epoch)
    loader = BatchLoader(pairs, 200, seed=1)
    assert not asked
    for epoch in (0, 3):
        same = BatchLoader(random_pairs(epoch, n=50 + epoch), 200, seed=1)
        for a, b in zip(loader.epoch(epoch), same.epoch(epoch), strict=True):
            assert torch.equal(a.src, b.src) and torch.equal(a.tgt, b.tgt)
        assert len(loader) == len(same)
    assert asked == [0, 3]
    with pytest.raises(ValueError, match='more than max_tokens=5'): len(BatchLoader(pairs, 5))


def test_windows_mix_the_whole_corpus(monkeypatch):
    monkeypatch.setattr(batches_module, 'BLOCK', 8)
    monkeypatch.setattr(batches_module, 'WINDOW', 800)
    parts = list(batches_module.windows(8000, seed=1))
    assert sorted(np.concatenate(parts).tolist()) == list(range(8000)) and {len(part) for part in parts} == {800}
    for part in parts: assert 3000 < part.mean() < 5000 and part.min() < 1000 and part.max() > 7000
    assert not np.array_equal(parts[0], next(batches_module.windows(8000, 1, 1)))
    for n in (0, 1, 7, 8, 801, 805): assert sum(map(len, batches_module.windows(n))) == n


@pytest.mark.parametrize('multiple', [1, 8])
@pytest.mark.parametrize('dtype', [np.uint8, np.uint16, np.int32])
def test_the_type_of_lengths_does_not_matter(dtype, multiple):
    lengths = [(len(s) + 1, len(t) + 1) for s, t in random_pairs(8)]
    for a, b in zip(token_batches(lengths, 500, 1, 2, multiple=multiple),
                    token_batches(np.array(lengths, dtype), 500, 1, 2, multiple=multiple), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize('rank, world', [(-1, 2), (2, 2), (0, 0)])
def test_ranks_that_cannot_be(rank, world):
    with pytest.raises(ValueError, match='rank='): BatchLoader([], 10, rank=rank, world_size=world)


@pytest.mark.full
def test_tens_of_millions(monkeypatch):
    "Thirty million pairs: the plan of an epoch, in memory of a few bytes a pair."
    lengths = np.random.default_rng(0).integers(4, 60, size=(30_000_000, 2), dtype=np.uint8)
    pairs = type('Pairs', (list,), dict(lengths=lengths))()
    seen = np.zeros(len(lengths), dtype=bool)
    for rows in BatchLoader(pairs, 25_000).index_batches(0):
        assert not seen[rows].any()
        seen[rows] = True
    assert seen.all()


def test_an_epoch_does_not_depend_on_the_one_before():
    pairs = random_pairs(1)
    used, fresh = BatchLoader(pairs, 200, seed=5), BatchLoader(pairs, 200, seed=5)
    list(used.epoch(0)); random.seed(3); torch.manual_seed(3); list(used.epoch(1))
    for a, b in zip(used.epoch(2, start=4), list(fresh.epoch(2))[4:], strict=True):
        assert torch.equal(a.src, b.src) and torch.equal(a.tgt, b.tgt) and a.n_tokens == b.n_tokens


def test_validation_is_the_same_each_time():
    loader = BatchLoader(random_pairs(2), 200, shuffle=False)
    assert rows_of(loader, 0) == rows_of(loader, 7)
    widths = [loader.lengths[rows].max() for rows in rows_of(loader)]
    assert widths == sorted(widths)


def test_a_batch_holds_its_pairs():
    pairs = random_pairs(3, n=50)
    loader = BatchLoader(pairs, 300)
    for rows, batch in zip(loader.index_batches(0), loader.epoch(0), strict=True):
        assert len(batch) == len(rows) and batch.src.dtype == batch.tgt.dtype == torch.long
        for i, src, tgt in zip(rows, batch.src.tolist(), batch.tgt.tolist()):
            assert ([t for t in src if t != PAD] == [*pairs[i][0], EOS]
                    and [t for t in tgt if t != PAD] == [BOS, *pairs[i][1], EOS])
        assert batch.n_tokens == sum(len(pairs[i][1]) + 1 for i in rows) == (batch.tgt_out != PAD).sum()
        assert torch.equal(batch.tgt_in, batch.tgt[:, :-1]) and torch.equal(batch.tgt_out, batch.tgt[:, 1:])
        assert (batch.src[:, -1] != PAD).any() and (batch.tgt_out[:, -1] != PAD).any()      # no wider than needed


def test_empty_sentences_and_empty_corpora():
    batch = collate([([], []), ([5], [])])
    assert (batch.src.tolist() == [[EOS, PAD], [5, EOS]]
            and batch.tgt.tolist() == [[BOS, EOS], [BOS, EOS]] and batch.n_tokens == 2)
    assert len(BatchLoader([], 10)) == 0 and list(BatchLoader([], 10).epoch(0)) == []
    assert collate([]).src.shape == (0, 1) and collate([]).tgt_in.shape == (0, 1) and pad_rows([]).dtype == torch.long
    assert pad_rows([], BOS, EOS).shape == (0, 2)


@pytest.mark.parametrize('max_tokens', [0, -5, 3])
def test_budgets_that_cannot_be(max_tokens):
    with pytest.raises(ValueError, match='max_tokens'): token_batches([(2, 4)], max_tokens)


def test_rows_are_copied():
    "A batch that is changed does not change the corpus."
    for pairs in ([([5, 6], [7])], [(np.array([5, 6], dtype=np.uint16), np.array([7], dtype=np.int64))]):
        batch = collate(pairs)
        assert batch.src.tolist() == [[5, 6, EOS]] and batch.tgt.tolist() == [[BOS, 7, EOS]]
        batch.src.zero_(); batch.tgt.zero_()
        assert [list(ids) for ids in pairs[0]] == [[5, 6], [7]]


def test_padding_cannot_change_what_a_model_says():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocab_size=60, n_layers=2, d_model=16, d_ff=32, n_heads=4)).eval()
    pairs = random_pairs(4, n=7, longest=12)
    with torch.no_grad():
        together = collate(pairs)
        logits = model(together.src, together.tgt_in)
        for i, pair in enumerate(pairs):
            alone = collate([pair])
            torch.testing.assert_close(logits[i, :alone.tgt_in.size(1)], model(alone.src, alone.tgt_in)[0],
                                       rtol=1e-4, atol=1e-5)
    assert padding_share([together]) > 0.2


def test_long_sentences_are_cut_with_one_warning():
    pairs = [('one two three four', 'eins'), ('one', 'eins zwei drei vier fünf'), ('one', 'eins'), ('', '')]*30
    words = train_tokenizer('words', pairs[:-1], ('en', 'de'))
    with pytest.warns(UserWarning, match='60 of 120 sentence pairs are longer than 4 positions') as heard:
        ids = encode_pairs(pairs, words, ('en', 'de'), max_len=4)
    assert len(heard) == 1
    batch = collate(ids)
    assert batch.src.size(1) == batch.tgt_in.size(1) == 4             # EOS and BOS counted
    assert words.decode(ids[0][0]) == 'one two three' and words.decode(ids[1][1]) == 'eins zwei drei'
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert max(len(s) for s, _ in encode_pairs(pairs, words, ('en', 'de'), max_len=6)) == 4
        assert encode_pairs([], words, ('en', 'de'), max_len=6) == []
    with pytest.raises(ValueError, match='max_len=1'): encode_pairs(pairs, words, ('en', 'de'), max_len=1)


def test_to_a_device():
    batch = collate(random_pairs(5, n=3)).to('meta')
    assert batch.src.device.type == batch.tgt.device.type == 'meta' and isinstance(batch.n_tokens, int)
    assert (Batch(batch.src, batch.tgt, 5, 70).to('meta').global_tokens
            == Batch(batch.src, batch.tgt, 5, 70).pin_memory().global_tokens == 70)
    if torch.cuda.is_available():
        assert collate(random_pairs(5, n=3)).pin_memory().src.is_pinned()
        here = collate(random_pairs(5, n=3))
        there = here.to('cuda', non_blocking=True)
        assert torch.equal(there.src.cpu(), here.src) and there.n_tokens == here.n_tokens


@pytest.fixture(scope='module')
def multi30k():
    corpus = load_corpus('multi30k', data_dir=DATA)
    return encode_pairs(corpus['train'], train_tokenizer('bpe', corpus['train'], corpus.langs, 8000), corpus.langs, 256)


@needs_data
def test_padding_on_multi30k(multi30k):
    "Issue's figure: under 10 % at a budget of 4,096 tokens; and no more batches than the tokens need, within 2 %."
    loader = BatchLoader(multi30k, 4096)
    for epoch in range(2):
        batches = list(loader.epoch(epoch))
        assert padding_share(batches) < 0.06
        assert max(max(batch.src.numel(), batch.tgt_in.numel()) for batch in batches) <= 4096
    needed = loader.lengths.max(1).sum()/4096
    assert len(loader) < 1.02*needed + 1


@needs_data
def test_few_shapes_on_multi30k(multi30k):
    batches = list(BatchLoader(multi30k, 4096, multiple=4).epoch(0))
    shapes = {(batch.src.shape, batch.tgt_in.shape) for batch in batches}
    assert len(shapes) <= 12 and all(src == tgt for src, tgt in shapes)
    assert padding_share(batches) < 0.2
