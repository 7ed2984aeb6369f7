"Attention beyond the page: every dtype, many shapes, random masks, fully masked queries, gradients, PyTorch's module."
import copy
import math

import jaxtyping
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from annotated_transformer.attention import MultiHeadAttention, attention, causal_mask, padding_mask

# batch, heads, m, n, d_k, d_v
SHAPES = [(2, 3, 5, 7, 4, 6), (1, 1, 1, 9, 8, 8), (3, 2, 6, 6, 16, 2), (2, 1, 17, 3, 5, 5)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
every_shape = pytest.mark.parametrize('shape', SHAPES, ids=str)
every_dtype = pytest.mark.parametrize('dtype', TOLERANCE, ids=str)


def inputs(shape, dtype=torch.float32, seed=0):
    "Random query, key and value that require gradients."
    batch, heads, m, n, d_k, d_v = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [(m, d_k), (n, d_k), (n, d_v)]
    return [torch.randn(batch, heads, *size, generator=generator).to(dtype).requires_grad_() for size in sizes]


def random_mask(shape, seed=0, per_head=True):
    "A mask that allows about half of the keys; the first query of every sentence is fully masked."
    batch, heads, m, n, _, _ = shape
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(batch, heads if per_head else 1, m, n, generator=generator) > 0.5
    mask[:, :, 0] = False
    return mask


def reference(query, key, value, mask):
    "One query at a time, with only the keys that it may attend to, in float64."
    query, key, value = (x.detach().double() for x in (query, key, value))
    batch, heads, m, _ = query.shape
    mask = mask.expand(batch, heads, m, key.size(2))
    output = query.new_zeros(batch, heads, m, value.size(3))
    for b in range(batch):
        for h in range(heads):
            for i in range(m):
                keep = mask[b, h, i]
                logits = key[b, h][keep] @ query[b, h, i] / math.sqrt(query.size(-1))
                output[b, h, i] = logits.softmax(0) @ value[b, h][keep]
    return output


# attention

@every_dtype
@every_shape
@pytest.mark.parametrize('per_head', [True, False])
def test_masked_keys_count_as_absent(shape, dtype, per_head):
    query, key, value = inputs(shape, dtype)
    mask = random_mask(shape, per_head=per_head)
    output, weights = attention(query, key, value, mask)
    assert output.dtype == weights.dtype == dtype
    assert_close(output.double(), reference(query, key, value, mask), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@every_dtype
@every_shape
def test_a_fully_masked_query_gets_zeros_and_finite_gradients(shape, dtype):
    query, key, value = inputs(shape, dtype)
    with pytest.warns(UserWarning, match='Anomaly'), torch.autograd.detect_anomaly():
        output, _ = attention(query, key, value, random_mask(shape))
        output.float().square().sum().backward()
    assert not output[:, :, 0].any()
    assert not query.grad[:, :, 0].any()
    for x in (query, key, value):
        assert x.grad.isfinite().all()


@every_dtype
def test_weights_sum_to_one_and_are_zero_where_masked(dtype):
    query, key, value = inputs(SHAPES[0], dtype)
    mask = random_mask(SHAPES[0])
    _, weights = attention(query, key, value, mask)
    assert (weights >= 0).all()
    assert not (weights * ~mask).any()
    assert_close(weights.sum(-1).double(), mask.any(-1).double(), atol=TOLERANCE[dtype], rtol=0)


def test_masked_keys_and_values_change_no_bit_of_the_output():
    query, key, value = (x.detach() for x in inputs(SHAPES[0]))
    mask = random_mask(SHAPES[0])
    mask[..., -2:] = False
    other_key = key.clone()
    other_value = value.clone()
    other_key[:, :, -2:] = 1e4
    other_value[:, :, -2:] = -1e6
    assert torch.equal(attention(query, other_key, other_value, mask)[0], attention(query, key, value, mask)[0])


def test_without_batch_and_with_many_leading_axes():
    query, key, value = (x.detach() for x in inputs((1, 1, 5, 5, 4, 6)))
    alone, _ = attention(query[0, 0], key[0, 0], value[0, 0], causal_mask(5))
    assert_close(alone, attention(query, key, value, causal_mask(5))[0][0, 0])
    many = [x.expand(2, 3, *x.shape) for x in (query, key, value)]
    assert attention(*many)[0].shape == (2, 3, 1, 1, 5, 6)


@pytest.mark.parametrize('change, name', [
    (dict(key=torch.randn(2, 7, 9)), 'key'),                          # d_k of keys differs from that of queries
    (dict(value=torch.randn(2, 6, 6)), 'value'),                      # fewer values than keys
    (dict(mask=torch.ones(5, 4, dtype=torch.bool)), 'mask'),          # a column too few
    (dict(mask=torch.ones(5, 7)), 'mask'),                            # not boolean
])
def test_the_type_checker_names_a_wrong_argument(change, name):
    arguments = dict(query=torch.randn(2, 5, 8), key=torch.randn(2, 7, 8), value=torch.randn(2, 7, 6)) | change
    with pytest.raises(jaxtyping.TypeCheckError, match=f"parameter '{name}'"):
        attention(**arguments)


# masks

def test_causal_mask_allows_each_position_and_those_before_it():
    mask = causal_mask(5)
    assert mask.dtype == torch.bool
    for i in range(5):
        for j in range(5):
            assert mask[i, j] == (j <= i)


def test_padding_mask_allows_every_token_but_padding():
    mask = padding_mask(torch.tensor([[4, 3, 1], [2, 3, 3]]), pad=3)
    assert mask.shape == (2, 1, 1, 3)
    assert mask[:, 0, 0].tolist() == [[True, False, True], [True, False, False]]


def test_masks_are_made_on_the_wanted_device():
    assert causal_mask(3, device='meta').device.type == 'meta'
    assert padding_mask(torch.zeros(2, 3, dtype=torch.long, device='meta'), 0).device.type == 'meta'


# multi-head attention

def torch_module(ours, d_model):
    "PyTorch's module with the same weights."
    theirs = nn.MultiheadAttention(d_model, ours.n_heads, batch_first=True)
    projections = [ours.q_proj, ours.k_proj, ours.v_proj]
    theirs.load_state_dict({
        'in_proj_weight': torch.cat([p.weight for p in projections]),
        'in_proj_bias': torch.cat([p.bias for p in projections]),
        'out_proj.weight': ours.out_proj.weight,
        'out_proj.bias': ours.out_proj.bias,
    })
    return theirs


@pytest.mark.parametrize('n_heads', [1, 3, 4, 12])
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('padded', [False, True])
def test_outputs_and_gradients_equal_pytorch(n_heads, causal, padded):
    torch.manual_seed(n_heads)
    ours = MultiHeadAttention(12, n_heads)
    for name, parameter in ours.named_parameters():
        if name.endswith('bias'):
            nn.init.normal_(parameter)
    theirs = torch_module(ours, 12)
    query, key, value = torch.randn(3, 6, 12), torch.randn(3, 6, 12), torch.randn(3, 6, 12)
    allowed = torch.ones(3, 6, dtype=torch.bool)
    if padded:
        allowed[0, 2:] = False
        allowed[1, 4:] = False
    mask = allowed[:, None, None] & causal_mask(6) if causal else allowed[:, None, None]
    output = ours(query, key, value, mask)
    expected, _ = theirs(query, key, value, key_padding_mask=~allowed, attn_mask=~causal_mask(6) if causal else None)
    assert_close(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    for kind in ('weight', 'bias'):
        stacked = torch.cat([getattr(p, kind).grad for p in (ours.q_proj, ours.k_proj, ours.v_proj)])
        assert_close(stacked, getattr(theirs, f'in_proj_{kind}').grad)
        assert_close(getattr(ours.out_proj, kind).grad, getattr(theirs.out_proj, kind).grad)


@pytest.mark.parametrize('d_k, d_v', [(4, 2), (3, None), (None, 7), (1, 1)])
def test_head_sizes_of_table_3(d_k, d_v):
    "Each head attends with its own rows of the projections; d_k and d_v need not be d_model / n_heads."
    torch.manual_seed(0)
    mha = MultiHeadAttention(12, 3, d_k, d_v)
    query, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    d_k = d_k or 4
    d_v = d_v or 4
    heads = []
    for i in range(3):
        q = mha.q_proj(query)[..., i * d_k:(i + 1) * d_k]
        k = mha.k_proj(memory)[..., i * d_k:(i + 1) * d_k]
        v = mha.v_proj(memory)[..., i * d_v:(i + 1) * d_v]
        heads.append((q @ k.mT / d_k ** 0.5).softmax(-1) @ v)
    assert_close(mha(query, memory, memory), mha.out_proj(torch.cat(heads, -1)))


def test_head_sizes_need_not_divide_d_model():
    assert MultiHeadAttention(12, 5, d_k=2, d_v=3).out_proj.in_features == 15


@pytest.mark.parametrize('sizes', [(512, 7), (512, 7, 64), (512, 7, None, 64)], ids=str)
def test_sizes_that_do_not_divide_evenly(sizes):
    with pytest.raises(ValueError, match='d_model=512 is not divisible by n_heads=7: choose sizes'):
        MultiHeadAttention(*sizes)


def test_no_heads():
    with pytest.raises(ValueError, match='n_heads=0 must be at least 1'):
        MultiHeadAttention(512, 0)


def test_a_mask_without_an_axis_for_heads_is_refused():
    "Of shape (batch, m, n) it would align with the heads: with as many heads as sentences, no shape tells."
    x = torch.randn(3, 5, 12)
    with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'mask'"):
        MultiHeadAttention(12, 3)(x, x, x, torch.ones(3, 5, 5, dtype=torch.bool))


def test_merging_undoes_splitting():
    x = torch.randn(2, 5, 12)
    for n_heads in (1, 2, 3, 12):
        mha = MultiHeadAttention(12, n_heads)
        assert mha.split_heads(x).shape == (2, n_heads, 5, 12 // n_heads)
        assert torch.equal(mha.merge_heads(mha.split_heads(x)), x)


def test_attention_fn_can_be_replaced():
    "A replacement gets the heads' queries, keys and values and the mask; it need not return weights."
    torch.manual_seed(0)
    mha = MultiHeadAttention(12, 3, d_k=2, d_v=5)
    assert mha.attention_fn is attention
    calls = []

    def replacement(query, key, value, mask):
        calls.append((query.shape, key.shape, value.shape, mask))
        return attention(query, key, value, mask)[0], None

    query, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    mask = torch.rand(2, 1, 5, 7) > 0.5
    expected = mha(query, memory, memory, mask)
    mha.attention_fn = replacement
    assert torch.equal(mha(query, memory, memory, mask), expected)
    shapes = calls[0][:3]
    assert shapes == ((2, 3, 5, 2), (2, 3, 7, 2), (2, 3, 7, 5))
    assert calls[0][3] is mask


def test_a_sentence_of_padding_alone():
    "Its outputs are the bias of the last projection, and no gradient becomes NaN."
    torch.manual_seed(0)
    mha = MultiHeadAttention(12, 3)
    x = torch.randn(2, 5, 12, requires_grad=True)
    output = mha(x, x, x, padding_mask(torch.tensor([[0, 0, 0, 0, 0], [4, 5, 6, 0, 0]]), 0))
    output.square().sum().backward()
    assert_close(output[0], mha.out_proj.bias.expand(5, 12))
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in mha.parameters())


def test_padding_does_not_change_a_sentence():
    torch.manual_seed(0)
    mha = MultiHeadAttention(12, 3)
    x = torch.randn(1, 7, 12)
    mask = padding_mask(torch.tensor([[4, 5, 6, 7, 0, 0, 0]]), 0)
    short = x[:, :4]
    assert_close(mha(x, x, x, mask)[:, :4], mha(short, short, short))


def test_mixed_precision():
    torch.manual_seed(0)
    mha = MultiHeadAttention(12, 3)
    x = torch.randn(2, 5, 12)
    mask = causal_mask(5) & padding_mask(torch.tensor([[0, 0, 5, 6, 7], [4, 5, 6, 0, 0]]), 0)
    with torch.autocast('cpu', torch.bfloat16):
        output = mha(x, x, x, mask)
    assert_close(output.float(), mha(x, x, x, mask), atol=2e-2, rtol=2e-2)


def test_the_number_of_heads_changes_no_parameter_count_and_names_are_fixed():
    names = {f'{x}_proj.{kind}' for x in ('q', 'k', 'v', 'out') for kind in ('weight', 'bias')}
    counts = set()
    for n_heads in (1, 8, 32):
        state = copy.deepcopy(MultiHeadAttention(512, n_heads)).state_dict()
        assert set(state) == names
        counts.add(sum(p.numel() for p in state.values()))
    assert counts == {4 * 512 * 512 + 4 * 512}
