"Positions beyond the page: exact values far out, every dtype, limits, what is saved and what is trained."
import copy
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from annotated_transformer.positions import LearnedPositions, NoPositions, SinusoidalPositions, sinusoids

both = pytest.mark.parametrize('kind', [SinusoidalPositions, LearnedPositions])


@pytest.mark.parametrize('d_model', [2, 6, 512])
def test_sinusoids_follow_the_printed_formula_even_far_out(d_model):
    table = sinusoids(20_000, d_model)
    assert table.shape == (20_000, d_model)
    for pos in (0, 1, 99, 19_999):
        for i in {0, 1, d_model // 4, d_model // 2 - 1} & set(range(d_model // 2)):
            angle = pos / 10000 ** (2 * i / d_model)
            assert abs(table[pos, 2 * i].item() - math.sin(angle)) < 1e-6
            assert abs(table[pos, 2 * i + 1].item() - math.cos(angle)) < 1e-6


def test_all_position_vectors_have_the_same_length():
    assert_close(sinusoids(5000, 64).norm(dim=-1), torch.full((5000,), 32 ** 0.5))


@pytest.mark.parametrize('d_model', [1, 7, 511])
def test_an_odd_size_is_refused(d_model):
    with pytest.raises(ValueError, match=f'd_model={d_model} is odd: choose an even size'):
        sinusoids(10, d_model)


def test_a_table_may_be_empty():
    assert sinusoids(0, 4).shape == (0, 4)


def test_far_positions_are_exact_in_bfloat16():
    "The table is computed in double precision, and rounded once."
    module = SinusoidalPositions(16, 3000).bfloat16()
    assert torch.equal(module.table, sinusoids(3000, 16).bfloat16())
    x = torch.zeros(1, 3000, 16, dtype=torch.bfloat16)
    assert module(x).dtype == torch.bfloat16


@both
def test_every_sentence_gets_the_same_vectors(kind):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6)
    module = kind(6, 10)
    assert_close(module(x) - x, module.table[:4].expand(3, 4, 6))


@both
def test_the_whole_table_comes_out_of_zeros(kind):
    "This is how cached decoding reads the vectors of single positions."
    module = kind(6, 10)
    assert torch.equal(module(torch.zeros(1, 10, 6))[0], module.table)


@both
def test_max_len_is_the_limit(kind):
    module = kind(6, 10)
    assert module(torch.randn(2, 10, 6)).shape == (2, 10, 6)
    with pytest.raises(ValueError, match='the input has 11 positions, but max_len=10: shorten the input'):
        module(torch.randn(2, 11, 6))


def test_sinusoids_are_neither_trained_nor_saved_but_move_with_the_model():
    module = SinusoidalPositions(6, 10)
    assert list(module.parameters()) == []
    assert module.state_dict() == {}
    assert [name for name, _ in module.named_buffers()] == ['table']
    assert copy.deepcopy(module).to('meta').table.device.type == 'meta'


def test_a_model_with_sinusoids_loads_into_a_longer_one():
    short = nn.Sequential(nn.Linear(6, 6), SinusoidalPositions(6, 10))
    long = nn.Sequential(nn.Linear(6, 6), SinusoidalPositions(6, 40))
    long.load_state_dict(short.state_dict())
    x = torch.randn(1, 10, 6)
    assert_close(long(x), short(x))
    assert long(torch.randn(1, 40, 6)).shape == (1, 40, 6)


def test_learned_positions_are_trained_where_sentences_reach():
    module = LearnedPositions(6, 10)
    module(torch.randn(2, 4, 6)).square().sum().backward()
    assert (module.table.grad.abs().sum(-1) > 0).tolist() == [True] * 4 + [False] * 6
    assert list(module.state_dict()) == ['table']
    assert sum(p.numel() for p in module.parameters()) == 60


def test_learned_positions_start_as_large_as_sinusoids():
    torch.manual_seed(0)
    assert abs(LearnedPositions(64, 500).table.square().mean() - 0.5) < 0.02
    assert abs(sinusoids(500, 64).square().mean() - 0.5) < 0.02


def test_no_positions_takes_the_same_arguments_and_does_nothing():
    module = NoPositions(d_model=6, max_len=10)
    x = torch.randn(2, 30, 6)
    assert module(x) is x
    assert list(module.parameters()) == []
