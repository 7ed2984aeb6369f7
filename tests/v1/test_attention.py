"Attention where a page cannot go: every type and many shapes, random masks, empty rows, other people's modules."
import copy
import math

import jaxtyping
import pytest
import torch
from torch import nn

from annotated_transformer.v1.attention import (KeyValueCache, MultiHeadAttention, attention, causal_mask,
                                                fast_attention, join_heads, padding_mask, record_attention, split_heads)

SHAPES = [(2, 3, 5, 7, 4, 6), (1, 1, 1, 9, 8, 8), (3, 2, 6, 6, 16, 2), (2, 1, 17, 3, 5, 5), (1, 4, 20, 65, 64, 64)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def inputs(shape, dtype=torch.float32, seed=0):
    b, h, m, n, d_k, d_v = shape
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(b, h, *size, generator=generator).to(dtype).requires_grad_()
            for size in ((m, d_k), (n, d_k), (n, d_v))]


def random_mask(shape, seed, *, heads=True, empty=True):
    "About half visible; the first query of every row may look nowhere if `empty`, else sees the first key."
    b, h, m, n, *_ = shape
    mask = torch.rand(b, h if heads else 1, m, n, generator=torch.Generator().manual_seed(seed)) > 0.5
    if empty: mask[:, :, 0] = False
    else: mask[..., 0] = True
    return mask


def reference(query, key, value, mask):
    "One query of one head at a time, only over the keys that it may see, in float64."
    query, key, value = (x.detach().double() for x in (query, key, value))
    out = query.new_zeros(*query.shape[:-1], value.size(-1))
    for where in torch.cartesian_prod(*(torch.arange(s) for s in query.shape[:-1])).tolist():
        b, h, i = where
        keep = mask.expand(*query.shape[:-1], key.size(-2))[b, h, i]
        if keep.any():
            scores = key[b, h][keep] @ query[b, h, i] / math.sqrt(query.size(-1))
            out[b, h, i] = scores.softmax(0) @ value[b, h][keep]
    return out


def both_paths(): return pytest.mark.parametrize('attend', [lambda *args: attention(*args)[0], fast_attention],
                                                 ids=['explicit', 'fast'])


@both_paths()
@pytest.mark.parametrize('dtype', TOLERANCE, ids=str)
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_equals_loops_over_what_is_visible(shape, dtype, attend):
    for seed, heads in ((0, True), (1, False)):
        q, k, v = inputs(shape, dtype, seed)
        mask = random_mask(shape, seed, heads=heads)
        out = attend(q, k, v, mask)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), reference(q, k, v, mask), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@both_paths()
@pytest.mark.parametrize('dtype', TOLERANCE, ids=str)
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_a_query_that_may_look_nowhere(shape, dtype, attend):
    "Exactly zero, no gradient for the query, and nothing but finite numbers on the whole way back."
    q, k, v = inputs(shape, dtype)
    with pytest.warns(UserWarning, match='Anomaly'), torch.autograd.detect_anomaly():
        out = attend(q, k, v, random_mask(shape, 0))
        out.float().square().sum().backward()
    assert not out[:, :, 0].any() and not q.grad[:, :, 0].any()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@both_paths()
def test_nobody_may_look_anywhere(attend):
    q, k, v = inputs(SHAPES[0])
    out = attend(q, k, v, torch.zeros(1, 1, 1, 7, dtype=torch.bool))
    out.sum().backward()
    assert not out.any() and not any(x.grad.any() for x in (q, k, v))


@pytest.mark.parametrize('dtype', TOLERANCE, ids=str)
def test_weights_are_shares_of_one_or_nothing(dtype):
    for seed in range(5):
        q, k, v = inputs(SHAPES[0], dtype, seed)
        mask = random_mask(SHAPES[0], seed)
        weights = attention(q, k, v, mask)[1]
        assert weights.dtype == dtype and (weights >= 0).all() and not (weights * ~mask).any()
        torch.testing.assert_close(weights.sum(-1).double(), mask.any(-1).double(), atol=TOLERANCE[dtype], rtol=0)


@both_paths()
def test_hidden_keys_and_values_do_not_matter(attend):
    "However large they are: not one bit of the output changes."
    q, k, v = inputs(SHAPES[0])
    mask = random_mask(SHAPES[0], 0, heads=False, empty=False)
    mask[..., -2:] = False
    loud_k, loud_v = k.detach().clone(), v.detach().clone()
    loud_k[:, :, -2:], loud_v[:, :, -2:] = 1e4, -1e6
    assert torch.equal(attend(q, loud_k, loud_v, mask), attend(q, k, v, mask))


def test_gradients_of_both_paths_agree():
    q, k, v = inputs(SHAPES[0], torch.float64)
    mask = random_mask(SHAPES[0], 3)
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v))
             for out in (attention(q, k, v, mask)[0], fast_attention(q, k, v, mask))]
    for explicit, fast in zip(*grads): torch.testing.assert_close(explicit, fast)


@both_paths()
def test_without_leading_axes_and_with_many(attend):
    q, k, v = (x.detach() for x in inputs((1, 1, 5, 7, 4, 6)))
    alone = attend(q[0, 0], k[0, 0], v[0, 0], causal_mask(5, 7)[0, 0])
    torch.testing.assert_close(alone, attend(q, k, v, causal_mask(5, 7))[0, 0])
    assert attend(*(x.expand(2, 3, *x.shape) for x in (q, k, v))).shape == (2, 3, 1, 1, 5, 6)


@pytest.mark.parametrize('m, n', [(1, 1), (1, 6), (4, 4), (3, 8)])
def test_causal_mask_is_the_end_of_the_whole(m, n):
    mask = causal_mask(m, n)
    assert mask.shape == (1, 1, m, n) and mask.dtype == torch.bool and mask.any(-1).all()
    for i in range(m):
        for j in range(n): assert mask[0, 0, i, j] == (j <= n - m + i)


def test_masks_stay_on_their_device():
    assert causal_mask(3, device='meta').device.type == 'meta'
    assert padding_mask(torch.zeros(2, 3, dtype=torch.long, device='meta'), 0).device.type == 'meta'


def test_heads_survive_the_round_trip():
    x = torch.randn(2, 5, 12)
    for h in (1, 2, 3, 12): assert torch.equal(join_heads(split_heads(x, h)), x)


@pytest.mark.parametrize('sizes', [(512, 7), (512, 0), (512, -8), (512, 7, 64), (512, 7, None, 64)], ids=str)
def test_sizes_that_do_not_fit(sizes):
    with pytest.raises(ValueError, match=f'd_model=512 is not divisible by n_heads={sizes[1]}'):
        MultiHeadAttention(*sizes)


def torch_twin(ours, d_model):
    theirs = nn.MultiheadAttention(d_model, ours.n_heads, batch_first=True)
    parts = ours.query, ours.key, ours.value
    theirs.load_state_dict({'in_proj_weight': torch.cat([p.weight for p in parts]),
                            'in_proj_bias': torch.cat([p.bias for p in parts]),
                            'out_proj.weight': ours.output.weight, 'out_proj.bias': ours.output.bias})
    return theirs


@pytest.mark.parametrize('n_heads', [1, 3, 4, 12])
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('padded', [False, True])
def test_equals_torch(n_heads, causal, padded):
    torch.manual_seed(n_heads)
    ours, (b, m, n) = MultiHeadAttention(12, n_heads), (3, 5, 7)
    for bias in (ours.query.bias, ours.key.bias, ours.value.bias, ours.output.bias): nn.init.normal_(bias)
    theirs = torch_twin(ours, 12)
    x, memory = torch.randn(b, m, 12), torch.randn(b, n, 12)
    keep, past = torch.ones(b, n, dtype=torch.bool), causal_mask(m, n)
    if padded: keep[0, 2:], keep[1, 4:] = False, False
    mask = keep[:, None, None] & past if causal else keep[:, None, None]
    with record_attention(ours) as maps: watched = ours(x, memory, memory, mask)
    out, weights = theirs(x, memory, memory, key_padding_mask=~keep, average_attn_weights=False,
                          attn_mask=~past[0, 0] if causal else None)
    torch.testing.assert_close(watched, out)
    torch.testing.assert_close(ours(x, memory, memory, mask), out)
    torch.testing.assert_close(maps[''][0], weights)


def test_keys_and_values_from_different_places():
    torch.manual_seed(0)
    ours = MultiHeadAttention(12, 3)
    x, keys, values = torch.randn(2, 5, 12), torch.randn(2, 7, 12), torch.randn(2, 7, 12)
    torch.testing.assert_close(ours(x, keys, values), torch_twin(ours, 12)(x, keys, values)[0])


@pytest.mark.parametrize('watched', [False, True])
def test_an_empty_sentence_in_training(watched):
    "Its outputs are the bias of the last projection, and no parameter gets a NaN."
    torch.manual_seed(0)
    mha, x = MultiHeadAttention(12, 3), torch.randn(2, 5, 12, requires_grad=True)
    mask = padding_mask(torch.tensor([[0, 0, 0, 0, 0], [4, 5, 6, 0, 0]]), 0)
    with record_attention(mha if watched else nn.Identity()):
        out = mha(x, x, x, mask)
        out.square().sum().backward()
    torch.testing.assert_close(out[0], mha.output.bias.expand(5, 12))
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in mha.parameters())


@pytest.mark.parametrize('watched', [False, True])
def test_mixed_precision(watched):
    torch.manual_seed(0)
    mha, x = MultiHeadAttention(12, 3), torch.randn(2, 5, 12)
    mask = causal_mask(5) & padding_mask(torch.tensor([[0, 0, 5, 6, 7], [4, 5, 6, 0, 0]]), 0)   # with empty rows
    with torch.autocast('cpu', torch.bfloat16), record_attention(mha if watched else nn.Identity()):
        out = mha(x, x, x, mask)
    torch.testing.assert_close(out.float(), mha(x, x, x, mask), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize('sizes', [(12, 3, None, None), (12, 5, 4, 2), (8, 1, 3, 9)], ids=str)
@pytest.mark.parametrize('seed', range(4))
def test_any_split_into_chunks_gives_the_same(sizes, seed):
    "Cached equals uncached, at random cuts, with rows dropped and doubled in between."
    d_model, torch_seed = sizes[0], torch.manual_seed(seed)
    mha, n = MultiHeadAttention(*sizes), 9
    x, cache, rows = torch.randn(3, n, d_model), KeyValueCache(), torch.arange(3)
    cuts = sorted(torch.randperm(n - 1, generator=torch_seed)[:3].add(1).tolist())
    for start, stop in zip([0, *cuts], [*cuts, n]):
        piece = x[rows, start:stop]
        out = mha(piece, piece, piece, causal_mask(stop - start, stop), cache)
        whole = mha(x, x, x, causal_mask(n))
        torch.testing.assert_close(out, whole[rows, start:stop])
        choice = torch.randint(len(rows), (len(rows) + 1,))
        rows = rows[choice]
        cache.select(choice)
    assert len(cache) == n


@pytest.mark.parametrize('sizes', [[1]*20, [3, 1, 1, 9, 2, 1], [1, 40, 1]], ids=str)
def test_places_to_spare(sizes):
    """What is handed out stays as it was while the cache grows, and is copied seldom;
    rows are chosen with places to spare."""
    torch.manual_seed(0)
    pieces = [(torch.randn(3, 2, n, 4), torch.randn(3, 2, n, 5)) for n in sizes]
    cache, given, rooms = KeyValueCache(), [], set()
    for key, value in pieces:
        held = cache.append(key, value)
        given.append((held, [x.clone() for x in held]))
        rooms.add(id(cache.room))
    keys, values = (torch.cat(parts, 2) for parts in zip(*pieces))
    assert torch.equal(cache.key, keys) and torch.equal(cache.value, values) and len(cache) == sum(sizes)
    assert all(torch.equal(a, b) for now, then in given for a, b in zip(now, then))
    assert cache.room[0].size(2) < 2 * sum(sizes) and len(rooms) <= 2 + math.log2(sum(sizes))
    cache.select(torch.tensor([2, 0]))
    extra = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 1, 5)
    cache.append(*extra)
    assert (torch.equal(cache.key, torch.cat([keys[[2, 0]], extra[0]], 2))
            and torch.equal(cache.value, torch.cat([values[[2, 0]], extra[1]], 2)))


def test_a_fixed_cache_keeps_the_first_memory():
    torch.manual_seed(0)
    mha, x, memory = MultiHeadAttention(12, 3), torch.randn(2, 1, 12), torch.randn(2, 7, 12)
    cache = KeyValueCache(fixed=True)
    first = mha(x, memory, memory, None, cache)
    assert torch.equal(mha(x, memory + 1, memory + 1, None, cache), first)     # not even looked at
    assert len(cache) == 7


def test_selecting_from_an_empty_cache():
    cache = KeyValueCache()
    cache.select(torch.tensor([1, 0]))
    assert len(cache) == 0


def test_recording_leaves_nothing_behind():
    "Neither an attribute, nor weights kept alive, nor anything in the state; not even when the block fails."
    heads = nn.ModuleDict({'a': MultiHeadAttention(12, 3), 'b': MultiHeadAttention(12, 2)})
    model = nn.Sequential(heads, nn.Linear(1, 1))
    a, x = model[0]['a'], torch.randn(2, 5, 12)
    before, state = copy.copy(vars(a)), model.state_dict()
    with pytest.raises(KeyError):
        with record_attention(model) as maps:
            a(x, x, x)
            raise KeyError
    assert vars(a) == before and model.state_dict().keys() == state.keys()
    assert list(maps) == ['0.a', '0.b'] and len(maps['0.a']) == 1 and maps['0.b'] == []
    assert not maps['0.a'][0].requires_grad
    a(x, x, x)
    assert len(maps['0.a']) == 1


def test_recording_inside_recording():
    mha, x = MultiHeadAttention(12, 3), torch.randn(2, 5, 12)
    with record_attention(mha) as outer:
        with record_attention(mha) as inner: mha(x, x, x)
        mha(x, x, x)
    assert len(inner['']) == len(outer['']) == 1
    assert mha._seen is None


def test_recording_does_not_change_what_is_learned():
    torch.manual_seed(0)
    mha, x, mask = MultiHeadAttention(12, 3), torch.randn(2, 5, 12), causal_mask(5)
    quiet = torch.autograd.grad(mha(x, x, x, mask).square().sum(), list(mha.parameters()))
    with record_attention(mha): loud = torch.autograd.grad(mha(x, x, x, mask).square().sum(), list(mha.parameters()))
    for q, l in zip(quiet, loud): torch.testing.assert_close(q, l)


@pytest.mark.parametrize('call, name', [
    (lambda x: attention(x, torch.randn(2, 7, 9), torch.randn(2, 7, 6)), 'key'),           # keys of another width
    (lambda x: attention(x, torch.randn(2, 7, 8), torch.randn(2, 6, 6)), 'value'),          # fewer values than keys
    (lambda x: attention(x, x, x, torch.ones(5, 4, dtype=torch.bool)), 'mask'),            # a mask of another length
    (lambda x: attention(x, x, x, torch.ones(5, 5)), 'mask'),                              # a mask that is no yes or no
])
def test_a_wrong_shape_is_named(call, name):
    with pytest.raises(jaxtyping.TypeCheckError, match=f"parameter '{name}'"): call(torch.randn(2, 5, 8))
