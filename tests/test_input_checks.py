"Checks of the model's input: positions, embeddings, batches, vocabulary."
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from annotated_transformer.batches import collate
from annotated_transformer.input_checks import check_batch, check_embedding, check_positions, check_vocabulary
from annotated_transformer.layers import FeedForward
from annotated_transformer.positions import LearnedPositions, SinusoidalPositions, sinusoids
from annotated_transformer.vocabulary import EOS, PAD, SPECIALS, train_tokenizer

TABLE = sinusoids(64, 16)


def test_correct_positions_pass():
    check_positions(SinusoidalPositions(16, 64), 16).raise_if_failed(strict=True)
    check_positions(LearnedPositions(16, 64), 16, sinusoidal=False).raise_if_failed()

    def other_order(x): return 4 * x + torch.cat([TABLE[:, 0::2], TABLE[:, 1::2]], dim=1)[:x.size(1)]
    check_positions(other_order, 16).raise_if_failed(strict=True)


@pytest.mark.parametrize('positions, failed', [
    (lambda x: x, ['distinct']),
    (lambda x: x + sinusoids(x.size(1), 16), ['stored']),
    (lambda x: x + torch.tensor([math.sin(i) for i in range(x.size(1))])[:, None], ['stored']),
    (lambda x: x + TABLE[:x.size(0), None], ['same rows', 'distinct']),
    (lambda x: x + TABLE[:x.size(1)] / x.size(1), ['any length']),
    (lambda x: x + torch.linspace(0, 1, x.size(1))[:, None], ['any length']),
    (lambda x: x.relu() + TABLE[:x.size(1)], ['added']),
    (LearnedPositions(16, 20), ['runs']),
    (FeedForward(16, 20), ['added', 'distinct'])])
def test_wrong_positions_fail(positions, failed):
    assert check_positions(positions, 16, sinusoidal=False).failed == failed


@pytest.mark.parametrize('table', [2 * TABLE, sinusoids(64, 18)[:, :16], TABLE.cos()])
def test_sinusoids_that_differ_from_the_formula_fail(table):
    assert check_positions(lambda x: x + table[:x.size(1)], 16).failed == ['formula']


def test_one_length_cannot_be_compared_with_itself():
    with pytest.raises(ValueError, match='n=5 must be more than 5'):
        check_positions(SinusoidalPositions(16, 64), 16, n=5)


def test_slow_positions_may_be_allowed():
    report = check_positions(lambda x: x + sinusoids(x.size(1), 16), 16, sinusoidal=False, stored=False)
    assert not report.failed and report.not_applicable == ['formula', 'stored']


@pytest.mark.parametrize('embed, failed', [
    (lambda x, position: 4 * x + position, []),
    (lambda x, position: x + position, ['scale']),
    (lambda x, position: 4 * (x + position), ['positions']),
    (lambda x, position: 4 * x + 2 * position, ['positions']),
    (lambda x, position: 4 * x, ['positions']),
    (lambda x, position: F.dropout(4 * x + position, 0.5), ['rows']),
    (lambda x, position: x / 4 + position, ['scale'])])
def test_embeddings(embed, failed):
    embedding = nn.Embedding(30, 16)
    report = check_embedding(lambda ids: embed(embedding(ids), TABLE[:ids.size(1)]), embedding.weight)
    assert set(failed) <= set(report.failed) and bool(failed) == bool(report.failed), report


def test_embedding_of_our_model_and_without_positions():
    embedding = nn.Embedding(30, 16)
    check_embedding(embedding, embedding.weight, scale=1.0, sinusoidal=False).raise_if_failed()
    wide = nn.Embedding(30, 48) # the product with the root of 48 is rounded
    check_embedding(lambda ids: 48 ** 0.5 * wide(ids), wide.weight, sinusoidal=False).raise_if_failed()
    other = torch.randn(30, 16)
    assert 'rows' in check_embedding(embedding, other, scale=1.0, sinusoidal=False).failed


def test_batches():
    batch = collate([([5, 6], [7, 8, 9]), ([5], [4])])
    check_batch(batch.src, batch.tgt_in, batch.tgt_out).raise_if_failed()
    input_without_eos = batch.tgt_in.masked_fill(batch.tgt_in == EOS, PAD)
    check_batch(batch.src, input_without_eos, batch.tgt_out).raise_if_failed()
    assert check_batch(batch.src, batch.tgt_out, batch.tgt_out).failed == ['shifted', 'begin']
    assert check_batch(F.pad(batch.src, (0, 3)), batch.tgt_in, batch.tgt_out).failed == ['width']
    without_eos = batch.tgt_out.masked_fill(batch.tgt_out == EOS, PAD)
    assert 'end' in check_batch(batch.src, batch.tgt_in, without_eos).failed


def test_targets_padded_with_an_index_that_the_loss_ignores():
    src = torch.tensor([[5, 6, EOS], [5, EOS, PAD]])
    tgt_in = torch.tensor([[1, 7, 8, 9], [1, 4, EOS, PAD]])
    tgt_out = torch.tensor([[7, 8, 9, EOS], [4, EOS, -100, -100]])
    check_batch(src, tgt_in, tgt_out).raise_if_failed()
    check_batch(src, tgt_in, tgt_out.masked_fill(tgt_out == -100, -1), ignore_index=-1).raise_if_failed()
    assert check_batch(src, tgt_in, tgt_out, ignore_index=-1).failed
    without_eos = tgt_out.masked_fill(tgt_out == EOS, -100)
    assert 'end' in check_batch(src, tgt_in, without_eos).failed


def test_batches_padded_to_a_multiple():
    src = torch.tensor([[5, 6, 7, 8, 2, 0, 0, 0]])
    tgt = torch.tensor([[7, 8, 2, 0]])
    tgt_in = torch.tensor([[1, 7, 8, 0]])
    assert check_batch(src, tgt_in, tgt).failed == ['width']
    check_batch(src, tgt_in, tgt, pad_to_multiple_of=4).raise_if_failed()
    assert check_batch(F.pad(src, (0, 4)), tgt_in, tgt, pad_to_multiple_of=4).failed == ['width']


@pytest.mark.parametrize('bos', [PAD, EOS])
def test_batches_that_begin_with_padding_or_eos(bos):
    src = torch.tensor([[5, 2], [6, 2]])
    tgt_in = torch.tensor([[bos, 7, 8], [bos, 9, PAD]])
    tgt_out = torch.tensor([[7, 8, EOS], [9, EOS, PAD]])
    check_batch(src, tgt_in, tgt_out, bos=bos).raise_if_failed()
    assert 'begin' in check_batch(src, tgt_out, tgt_out, bos=bos).failed


def test_vocabulary_of_subwords():
    pairs = [('the lower house', 'das niedrigere Haus'), ('the lowest tower', 'der niedrigste Turm')] * 3
    tokenizer = train_tokenizer('bpe', pairs, ('en', 'de'), 80)
    tokens = tokenizer.model.get_vocab()
    encoded = [tokenizer.model.encode(text).tokens for pair in pairs for text in pair]
    assert set(tokens) - set(SPECIALS) - {token for sentence in encoded for token in sentence} # replaced by merges
    check_vocabulary(set(tokens) - set(SPECIALS), encoded).raise_if_failed()
    assert check_vocabulary([*tokens.keys() - set(SPECIALS), 'Katze'], encoded).failed == ['training']


def test_vocabulary_from_training_sentences_alone():
    assert check_vocabulary(['a', 'b'], [['a'], ['b', 'c']])
    assert check_vocabulary(['a', 'd', 'a'], [['a'], ['b', 'c']]).failed == ['training', 'once']


def test_a_word_inside_another_word_was_not_seen():
    train = [['das', 'Haus']]
    assert check_vocabulary(['das', 'Haus', 'as'], train, subwords=False).failed == ['training']
    assert 'as' in check_vocabulary(['as'], train, subwords=False)['training'].observed
    check_vocabulary(['das', 'Haus'], train, subwords=False).raise_if_failed()
    check_vocabulary(['das', 'Haus', 'as'], train).raise_if_failed()
