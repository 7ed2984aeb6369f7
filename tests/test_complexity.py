"Restricted attention beside a mask and a loop, and counters beside numbers worked out by hand."
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from annotated_transformer.attention import attention, causal_mask
from annotated_transformer.complexity import (count_multiplications, information_flow, lstm_steps, path_length,
                                              restricted_attention, sequential_operations, table_1_layers,
                                              window_mask)


@pytest.mark.parametrize('n, r', [(1, 1), (1, 5), (2, 3), (9, 3), (9, 9), (9, 25), (40, 11)])
def test_restricted_attention_equals_the_mask(n, r):
    "Outputs and gradients."
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, n, size, dtype=torch.float64, requires_grad=True) for size in (5, 5, 4)]
    blocks = restricted_attention(*inputs, r)
    masked, _ = attention(*inputs, window_mask(n, r))
    assert_close(blocks, masked)
    direction = torch.randn_like(blocks)
    assert_close(torch.autograd.grad(blocks, inputs, direction), torch.autograd.grad(masked, inputs, direction))


def test_restricted_attention_equals_a_loop():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 7, 4)
    for i, output in enumerate(restricted_attention(q, k, v, 3)[0, 0]):
        near = [j for j in (i - 1, i, i + 1) if 0 <= j < 7]
        weights = torch.stack([q[0, 0, i] @ k[0, 0, j] / math.sqrt(4) for j in near]).softmax(0)
        assert_close(output, sum(weight * v[0, 0, j] for weight, j in zip(weights, near)))


def test_restricted_attention_costs_n_times_r():
    def cost(n, r):
        q = torch.randn(1, 2, n, 8)
        return count_multiplications(lambda: restricted_attention(q, q, q, r))
    assert cost(64, 5) == 2 * cost(32, 5) == 64 * 5 * 8 * 2 * 2 # queries, keys, features, heads, products
    assert cost(32, 15) == 3 * cost(32, 5)


@pytest.mark.parametrize('r', [0, -1, 2, 4])
def test_window_needs_a_middle(r):
    with pytest.raises(ValueError, match=f'r={r} must be odd and positive'):
        window_mask(5, r)
    with pytest.raises(ValueError, match=f'r={r} must be odd and positive'):
        restricted_attention(*torch.randn(3, 1, 1, 5, 4), r)


def test_lstm_steps_equal_pytorch():
    torch.manual_seed(0)
    lstm = nn.LSTM(6, 6, batch_first=True).double()
    x = torch.randn(3, 8, 6, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(x)
    ours, theirs = lstm_steps(lstm, x), lstm(x)[0]
    assert_close(ours, theirs)
    assert_close(torch.autograd.grad(ours, x, direction), torch.autograd.grad(theirs, x, direction))


def test_multiplications_of_table_1():
    counts = {name: count_multiplications(f) for name, f in table_1_layers(n=20, d=8, r=3, k=3).items()}
    assert counts == {'self-attention': 2 * 20 * 20 * 8, 'recurrent': 8 * 20 * 8 * 8,
                      'convolutional': 3 * 20 * 8 * 8, 'restricted': 2 * 3 * 20 * 8}


def test_only_matrix_products_are_counted():
    a, b = torch.randn(7, 5), torch.randn(5, 3)
    assert count_multiplications(lambda: a @ b) == 7 * 5 * 3
    assert count_multiplications(lambda: a + a) == 0


def test_sequential_operations():
    x = torch.ones(1, requires_grad=True)
    assert sequential_operations((x * 2).sum() * 3) == 4         # the input, two products, a sum
    assert sequential_operations(x * 2 + x * 3) == sequential_operations(x * 2) + 1 # side by side
    y = x
    for _ in range(3000):                                        # deeper than Python's stack
        y = y * 2
    assert sequential_operations(y) == 3001


def test_only_the_recurrent_chain_grows():
    def chains(n):
        return {name: sequential_operations(f()) for name, f in table_1_layers(n, d=8, r=3, k=3).items()}
    short, long = chains(6), chains(16)
    assert long.pop('recurrent') - short.pop('recurrent') == 8 * 10
    assert long == short


def test_information_flow():
    x = torch.randn(1, 5, 4, dtype=torch.float64)
    assert torch.equal(information_flow(lambda x: x.cumsum(1), x), causal_mask(5))
    opposite = information_flow(lambda x: torch.cat([x[..., :2], -x[..., :2]], -1), x) # each row sums to 0
    assert torch.equal(opposite, torch.eye(5, dtype=torch.bool))


def test_path_length():
    "From the first input to the last output, in the direction of the information flow."
    earlier = causal_mask(5)
    assert path_length([earlier]) == 1
    assert path_length([window_mask(5, 3)] * 9) == 4
    assert path_length([torch.eye(5, dtype=torch.bool), torch.ones(5, 5, dtype=torch.bool)]) == 2
    with pytest.raises(ValueError, match='too few layers'):
        path_length([window_mask(5, 3)] * 3)
    with pytest.raises(ValueError, match='too few layers'):
        path_length([earlier.mT] * 9)
