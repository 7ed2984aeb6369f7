"What the batches page cannot show: many random corpora, the model's view of padding, and real text where it is at hand."
import json
import os
import random
import warnings
from pathlib import Path

import pytest
import torch

from annotated_transformer.batches import Batch, BatchLoader, collate, encode_pairs, pad_rows, padding_share, token_batches
from annotated_transformer.corpora import load_corpus
from annotated_transformer.transformer import Transformer, TransformerConfig
from annotated_transformer.vocabulary import BOS, EOS, PAD, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get('ANNOTATED_TRANSFORMER_MULTI30K') or ROOT.parent/'shared/data/multi30k')
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason='no Multi30k: set ANNOTATED_TRANSFORMER_MULTI30K to its folder')


def random_pairs(seed, n=300, longest=40):
    rng = random.Random(seed)
    return [tuple([4 + rng.randrange(50) for _ in range(rng.randrange(longest))] for _ in range(2)) for _ in range(n)]


@pytest.mark.parametrize('seed', range(6))
@pytest.mark.parametrize('max_tokens', [40, 64, 500, 100_000])
def test_each_pair_once_within_the_budget(seed, max_tokens):
    loader = BatchLoader(random_pairs(seed), max_tokens, seed=seed)
    for epoch in range(3):
        batches = loader.index_batches(epoch)
        assert sorted(sum(batches, [])) == list(range(300)) and len(batches) == len(loader)
        assert all(len(rows)*max(max(loader.lengths[i]) for i in rows) <= max_tokens for rows in batches)
        assert batches == BatchLoader(loader.pairs, max_tokens, seed).index_batches(epoch)
    if max_tokens == 500: assert loader.index_batches(0) != loader.index_batches(1) != loader.index_batches(2)


def test_an_epoch_does_not_depend_on_the_one_before():
    pairs = random_pairs(1)
    used, fresh = BatchLoader(pairs, 200, seed=5), BatchLoader(pairs, 200, seed=5)
    list(used.epoch(0)); random.seed(3); torch.manual_seed(3); list(used.epoch(1))
    for a, b in zip(used.epoch(2, start=4), list(fresh.epoch(2))[4:], strict=True):
        assert torch.equal(a.src, b.src) and torch.equal(a.tgt, b.tgt) and a.n_tokens == b.n_tokens


def test_validation_is_the_same_each_time():
    loader = BatchLoader(random_pairs(2), 200, shuffle=False)
    assert loader.index_batches(0) == loader.index_batches(7)
    widths = [max(max(loader.lengths[i]) for i in rows) for rows in loader.index_batches(0)]
    assert widths == sorted(widths)


def test_a_batch_holds_its_pairs():
    pairs = random_pairs(3, n=50)
    loader = BatchLoader(pairs, 300)
    for rows, batch in zip(loader.index_batches(0), loader.epoch(0), strict=True):
        assert len(batch) == len(rows) and batch.src.dtype == batch.tgt.dtype == torch.long
        for i, src, tgt in zip(rows, batch.src.tolist(), batch.tgt.tolist()):
            assert [t for t in src if t != PAD] == [*pairs[i][0], EOS] and [t for t in tgt if t != PAD] == [BOS, *pairs[i][1], EOS]
        assert batch.n_tokens == sum(len(pairs[i][1]) + 1 for i in rows) == (batch.tgt_out != PAD).sum()
        assert torch.equal(batch.tgt_in, batch.tgt[:, :-1]) and torch.equal(batch.tgt_out, batch.tgt[:, 1:])
        assert (batch.src[:, -1] != PAD).any() and (batch.tgt_out[:, -1] != PAD).any()      # no wider than needed


def test_empty_sentences_and_empty_corpora():
    batch = collate([([], []), ([5], [])])
    assert batch.src.tolist() == [[EOS, PAD], [5, EOS]] and batch.tgt.tolist() == [[BOS, EOS], [BOS, EOS]] and batch.n_tokens == 2
    assert len(BatchLoader([], 10)) == 0 and list(BatchLoader([], 10).epoch(0)) == []
    assert collate([]).src.shape == (0, 0) and pad_rows([]).dtype == torch.long


@pytest.mark.parametrize('max_tokens', [0, -5, 3])
def test_budgets_that_cannot_be(max_tokens):
    with pytest.raises(ValueError, match='max_tokens'): token_batches([(2, 4)], max_tokens)


def test_a_tokenizer_may_give_numpy_free_lists_only():
    "Rows are copied, so a batch that is changed does not change the corpus."
    pairs = [([5, 6], [7])]
    batch = collate(pairs)
    batch.src.zero_()
    assert pairs == [([5, 6], [7])]


def test_padding_cannot_change_what_a_model_says():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocab_size=60, n_layers=2, d_model=16, d_ff=32, n_heads=4)).eval()
    pairs = random_pairs(4, n=7, longest=12)
    with torch.no_grad():
        together = collate(pairs)
        logits = model(together.src, together.tgt_in)
        for i, pair in enumerate(pairs):
            alone = collate([pair])
            torch.testing.assert_close(logits[i, :alone.tgt_in.size(1)], model(alone.src, alone.tgt_in)[0], rtol=1e-4, atol=1e-5)
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
    if torch.cuda.is_available():
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
    needed = sum(max(lengths) for lengths in loader.lengths)/4096
    assert len(loader) < 1.02*needed + 1


@needs_data
def test_the_pages_table_is_of_these_lengths(multi30k):
    cells = json.loads((ROOT/'nbs/13_batches.ipynb').read_text('utf-8'))['cells']
    [table] = [''.join(c['source']) for c in cells if ''.join(c['source']).startswith('MULTI30K = ')]
    names, lengths = {}, []
    exec(table, names)
    for row in names['MULTI30K']:
        first, *counts = row.split()
        n, m = map(int, first.split(':'))
        lengths += [(n, m + i) for i, count in enumerate(counts) for _ in range(int(count))]
    assert sorted(lengths) == sorted(BatchLoader(multi30k, 4096).lengths)
