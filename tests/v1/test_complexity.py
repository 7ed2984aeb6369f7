"Restricted attention beside a mask and beside a loop; counters beside numbers worked out by hand."
import pytest, torch
from torch import nn
from torch.testing import assert_close

from annotated_transformer.v1.attention import MultiHeadAttention, attention
from annotated_transformer.v1.complexity import (
    LocalAttention, count_operations, fitted_exponent, held_bytes, layer_functions, local_attention,
    local_mask, longest_chain, path_length, reached, walk)

@pytest.mark.parametrize('n, r', [(1, 1), (1, 5), (2, 3), (9, 3), (9, 9), (9, 25), (40, 11)])
def test_restricted_attention_and_its_gradients_are_those_under_the_mask(n, r):
    torch.manual_seed(n * r)
    ours, theirs = ([x.clone().requires_grad_() for x in same]
                    for same in [torch.randn(3, 2, 3, n, 5).double().unbind(0)]*2)
    found, expected = local_attention(*ours, r), attention(*theirs, local_mask(n, r))[0]
    assert_close(found, expected)
    direction = torch.randn_like(found)
    for a, b in zip(torch.autograd.grad(found, ours, direction),
                    torch.autograd.grad(expected, theirs, direction)):
        assert_close(a, b)

def test_restricted_attention_beside_a_loop():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 7, 4).unbind(0)
    for i, out in enumerate(local_attention(q, k, v, 3)[0, 0]):
        near = [j for j in (i - 1, i, i + 1) if 0 <= j < 7]
        weights = torch.tensor([(q[0, 0, i] @ k[0, 0, j] / 2).item() for j in near]).softmax(0)
        assert_close(out, sum(w * v[0, 0, j] for w, j in zip(weights, near)))

def test_restricted_attention_costs_what_table_1_says():
    def operations(n, r):
        q = torch.randn(1, 2, n, 8)
        return count_operations(lambda: local_attention(q, q, q, r))
    # three blocks of two keys, two products, two heads, two operations
    assert operations(64, 5) == 2 * operations(32, 5) == 64 * 6 * 2 * 8 * 4
    assert operations(32, 17) == 4 * operations(32, 5)

def test_memory_of_restricted_attention_is_a_straight_line():
    def held(n):
        q = torch.randn(1, 2, n, 8, requires_grad=True)
        return (held_bytes(lambda: local_attention(q, q, q, 5)),
                held_bytes(lambda: attention(q, q, q, local_mask(n, 5))[0]))
    (few, few_masked), (many, many_masked) = held(64), held(256)
    assert many < 4.5 * few and many_masked > 10 * few_masked

@pytest.mark.parametrize('r', [0, -1, 2, 4])
def test_a_neighbourhood_has_a_middle(r):
    with pytest.raises(ValueError, match=f'r={r} must be odd and positive'): local_mask(5, r)
    with pytest.raises(ValueError, match=f'r={r} must be odd and positive'): LocalAttention(8, 2, r)

def test_the_walk_is_torchs_lstm_gradients_too():
    torch.manual_seed(0)
    lstm, x = nn.LSTM(6, 6, batch_first=True).double(), torch.randn(3, 8, 6).double().requires_grad_()
    direction = torch.randn(3, 8, 6).double()
    assert_close(walk(lstm, x), lstm(x)[0])
    assert_close(*(torch.autograd.grad(f(x), x, direction) for f in (lambda x: walk(lstm, x), lambda x: lstm(x)[0])))

def test_the_counter_sees_through_fused_kernels():
    counts = {name: count_operations(f) for name, f in layer_functions(20, 8, 3, 3, n_heads=2).items()}
    assert counts == {'self-attention': 4*20*20*8, 'recurrent': 16*20*64,
                      'convolutional': 2*3*20*64, 'self-attention, restricted': 4*3*20*8}

def test_chains_and_paths():
    x = torch.randn(1, 5, 4).double()
    assert longest_chain((x.requires_grad_() * 2).sum() * 3) == 4 # the leaf, two products, a sum
    past = reached(lambda x: x.cumsum(1), x)
    assert past.equal(torch.ones(5, 5, dtype=torch.bool).tril())
    assert path_length(lambda count: lambda x: x.cumsum(1), x, past) == 1
    with pytest.raises(ValueError, match='5 layers are too few'): path_length(lambda count: lambda x: x.cumsum(1), x)

def test_parameters_do_not_count_as_held():
    layer, x = MultiHeadAttention(8, 2), torch.randn(1, 6, 8, requires_grad=True)
    wide = MultiHeadAttention(8, 2, d_k=64)
    assert held_bytes(lambda: nn.Linear(8, 500, bias=False)(x)) == 6 * 8 * 4
    assert held_bytes(lambda: layer(x, x, x)) < held_bytes(lambda: wide(x, x, x))

def test_exponents():
    assert fitted_exponent([1, 10, 100], [5, 500, 50_000]) == pytest.approx(2)
    for sizes, amounts in [([1], [2]), ([3, 3], [1, 2]), ([1, 2], [1])]:
        with pytest.raises(ValueError, match='two different sizes'): fitted_exponent(sizes, amounts)
