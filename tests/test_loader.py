"Batches for long runs: every pair once per epoch, the same after a resume, shared among processes."
import numpy as np
import pytest
import torch

from annotated_transformer import loader as module
from annotated_transformer.batches import token_batches
from annotated_transformer.loader import TrainingLoader, bucket, to_device, windows
from annotated_transformer.trainer import global_tokens, n_batches, next_step
from annotated_transformer.vocabulary import PAD


def make_pairs(n=700, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 25, size=(n, 2))
    return [(rng.integers(4, 50, a).tolist(), rng.integers(4, 50, b).tolist()) for a, b in lengths]


def rows_of(batch):
    return [tuple(row[row != PAD].tolist()) for row in batch.tgt]


@pytest.mark.parametrize('shuffle', [False, True])
def test_every_pair_is_in_one_batch(shuffle):
    loader = TrainingLoader(make_pairs(), 256, shuffle=shuffle)
    batches = list(loader.index_batches(3))
    assert sorted(np.concatenate(batches).tolist()) == list(range(700))
    assert len(batches) == len(loader)


def test_batches_are_cut_like_those_of_the_reference():
    "`bucket` without shuffling gives `token_batches`' lengths; it orders equal lengths by the other side."
    lengths = np.array([(len(src) + 1, len(tgt) + 1) for src, tgt in make_pairs()])
    expected = token_batches([tuple(row) for row in lengths.tolist()], 256, shuffle=False)
    for found, rows in zip(bucket(lengths, 256), expected, strict=True):
        assert sorted(lengths[found].max(1)) == sorted(lengths[rows].max(1))
    assert sum(map(len, bucket(lengths, 256))) == len(lengths)


def test_a_pair_that_is_too_long_is_refused():
    lengths = np.array([(3, 4), (9, 2)])
    with pytest.raises(ValueError, match='the longest sentence has 9 tokens, more than max_tokens=8'):
        bucket(lengths, 8)
    with pytest.raises(ValueError, match='10 when padded to a multiple of 5'):
        bucket(lengths, 9, pad_to_multiple_of=5)
    assert bucket(np.zeros((0, 2), dtype=int), 8) == []


def test_no_pairs_make_no_batches():
    assert sum(map(len, windows(0))) == 0
    assert len(TrainingLoader([], 256)) == 0 and list(TrainingLoader([], 256).epoch(0)) == []


def test_to_device_keeps_batches_and_their_order():
    loader = TrainingLoader(make_pairs(), 256)
    moved = list(to_device(loader.epoch(0), torch.device('cpu')))
    for found, expected in zip(moved, loader.epoch(0), strict=True):
        assert torch.equal(found.src, expected.src) and torch.equal(found.tgt, expected.tgt)
        assert found.global_tokens == expected.global_tokens


def test_budget_holds_with_padding():
    for batch in TrainingLoader(make_pairs(), 256).epoch(0):
        assert batch.src.numel() <= 256 and batch.tgt_in.numel() <= 256


def test_order_depends_on_seed_and_epoch_alone():
    def order(seed, epoch):
        return [rows.tolist() for rows in TrainingLoader(make_pairs(), 256, seed=seed).index_batches(epoch)]
    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3) and order(1, 2) != order(2, 2)


def test_resuming_skips_batches():
    loader = TrainingLoader(make_pairs(), 256)
    whole = [batch.src for batch in loader.epoch(1)]
    for resumed, expected in zip(loader.epoch(1, start=7), whole[7:], strict=True):
        assert torch.equal(resumed.src, expected)


@pytest.mark.parametrize('size', [2, 3])
def test_processes_share_each_batch(size):
    parts = [TrainingLoader(make_pairs(), 256, rank=rank, world_size=size).epoch(0) for rank in range(size)]
    for whole, *shares in zip(TrainingLoader(make_pairs(), 256).epoch(0), *parts, strict=True):
        assert sorted(row for share in shares for row in rows_of(share)) == sorted(rows_of(whole))
        assert all(share.global_tokens == whole.n_tokens for share in shares)


@pytest.mark.parametrize('size, n', [(2, 4), (4, 4), (2, 3), (3, 4)])
def test_processes_get_whole_batches_if_a_step_has_enough(size, n, monkeypatch):
    "The steps are those of one process, also at the end of a window and of the epoch, and after a resume."
    monkeypatch.setattr(module, 'WINDOW', 300)
    monkeypatch.setattr(module, 'BLOCK', 50)
    whole = list(TrainingLoader(make_pairs(), 256).epoch(0, start=2 * n))
    loaders = [TrainingLoader(make_pairs(), 256, rank=rank, world_size=size, batches_per_step=n) for rank in range(size)]
    parts = [loader.epoch(0, start=2 * n) for loader in loaders]
    shapes = {batch.src.shape for batch in whole}
    for i in range(0, len(whole), n):
        steps = [next_step(part, n) for part in parts]
        expected = whole[i:i + n]
        assert sorted(row for step in steps for batch in step for row in rows_of(batch)) == \
            sorted(row for batch in expected for row in rows_of(batch))
        for step in steps:
            assert n_batches(step) == len(expected)
            assert sum(map(global_tokens, step)) == sum(batch.n_tokens for batch in expected)
            if len(expected) % size == 0:
                assert len(step) == len(expected) // size and all(batch.src.shape in shapes for batch in step)
    assert all(next_step(part, n) == [] for part in parts)


def test_few_shapes_for_a_compiled_model():
    shapes = {tuple(batch.src.shape) for batch in TrainingLoader(make_pairs(), 256, pad_to_multiple_of=8).epoch(0)}
    assert {length % 8 for _, length in shapes} == {0}
    assert all(n_rows == 256 // length for n_rows, length in shapes)


def test_pairs_that_change_each_epoch():
    calls = []
    def pairs(epoch):
        calls.append(epoch)
        return make_pairs(50, seed=epoch)
    loader = TrainingLoader(pairs, 256)
    for epoch in (0, 1):
        found = sorted(row for batch in loader.epoch(epoch) for row in rows_of(batch))
        expected = sorted((1, *tgt, 2) for _, tgt in make_pairs(50, seed=epoch))
        assert found == expected
    assert calls == [0, 1]


def test_large_corpora_are_sorted_in_windows(monkeypatch):
    monkeypatch.setattr(module, 'WINDOW', 64)
    monkeypatch.setattr(module, 'BLOCK', 8)
    parts = list(windows(300, seed=1, epoch=2))
    assert max(map(len, parts)) <= 64
    assert sorted(np.concatenate(parts).tolist()) == list(range(300))
    loader = TrainingLoader(make_pairs(300), 256)
    assert sorted(np.concatenate(list(loader.index_batches(0))).tolist()) == list(range(300))


def test_bucketing_saves_padding():
    lengths = np.array([(len(src) + 1, len(tgt) + 1) for src, tgt in make_pairs()])
    def padding(batches):
        padded = sum(len(rows) * lengths[rows].max(0).sum() for rows in batches)
        return 1 - lengths.sum() / padded
    in_order = [np.arange(start, min(start + 10, 700)) for start in range(0, 700, 10)]
    assert padding(bucket(lengths, 256, np.random.default_rng(0))) < padding(in_order) / 2


@pytest.mark.parametrize('options, message', [
    ({'max_tokens': 10}, 'more than max_tokens=10'), ({'max_tokens': 0}, 'max_tokens=0'),
    ({'max_tokens': 256, 'rank': 2, 'world_size': 2}, 'rank=2'),
    ({'max_tokens': 256, 'pad_to_multiple_of': 0}, 'pad_to_multiple_of=0')])
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        TrainingLoader(make_pairs(), **options)
