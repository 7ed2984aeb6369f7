"""Positions inside attention: other people's rotary and ALiBi, every type of number, both paths,
the cache, longer sentences, mirrors.
"""
import copy
import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from annotated_transformer.v1.attention import (MultiHeadAttention, attention, causal_mask, fast_attention,
                                             padding_mask, record_attention)
from annotated_transformer.v1.layers import DecoderCache
from annotated_transformer.v1.positions import AlibiPositions, RotaryPositions, alibi_slopes, sinusoids
from annotated_transformer.v1.transformer import Transformer, TransformerConfig
from annotated_transformer.v1.vocabulary import BOS, EOS, PAD

SMALL = TransformerConfig(vocab_size=23, n_layers=2, d_model=16, d_ff=28, n_heads=4, dropout=0.0, max_len=12)
SRC = torch.tensor([[11, 12, 13, 14, 15, 16, EOS], [7, 8, 9, EOS, PAD, PAD, PAD]])
TGT = torch.tensor([[BOS, 17, 18, 19, 20], [BOS, 21, 22, PAD, PAD]])
TYPES = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}
inside = pytest.mark.parametrize('kind', ['alibi', 'rotary'])

def module(kind, n_heads=4, d_k=4, max_len=12):
    return AlibiPositions(n_heads) if kind == 'alibi' else RotaryPositions(d_k, max_len)

def model_of(kind, **changes):
    torch.manual_seed(0)
    return Transformer(replace(SMALL, positions=kind, **changes)).eval()

def heads(n, d_k, n_heads=4, b=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(b, n_heads, n, d_k, generator=generator).to(dtype) for _ in range(3)]


# --- other people's

@pytest.mark.parametrize('d_k', [2, 8, 64])
def test_rotary_equals_the_authors_own_arrangement(d_k):
    roformer = pytest.importorskip('transformers.models.roformer.modeling_roformer')
    q, k, _ = heads(50, d_k)
    table = sinusoids(50, d_k)
    theirs = roformer.RoFormerSelfAttention.apply_rotary_position_embeddings(
        torch.cat([table[:, ::2], table[:, 1::2]], -1)[None, None], q, k)
    for mine, other in zip(RotaryPositions(d_k, 50)(q, k), theirs): assert_close(mine, other)

@pytest.mark.parametrize('d_k', [2, 8, 64])
def test_rotary_scores_equal_those_of_llama(d_k):
    "It pairs column i with column i + d_k/2: the same scores for columns in another order."
    llama = pytest.importorskip('transformers.models.llama.modeling_llama')
    config = llama.LlamaConfig(hidden_size=4*d_k, num_attention_heads=4, max_position_embeddings=60)
    q, k, _ = heads(50, d_k)
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, torch.arange(7, 57)[None])
    order = [*range(0, d_k, 2), *range(1, d_k, 2)]
    their_q, their_k = llama.apply_rotary_pos_emb(q[..., order], k[..., order], cos, sin)
    my_q, my_k, bias = RotaryPositions(d_k, 60)(q, k, start=7)
    assert bias is None
    assert_close(my_q @ my_k.mT, their_q @ their_k.mT, atol=1e-4*d_k**0.5, rtol=1e-4)

@pytest.mark.parametrize('n_heads', [1, 2, 4, 8, 16])
def test_alibi_equals_bloom_and_mpt_in_a_decoder(n_heads):
    "Theirs are one number for each key, which softmax cannot tell from a distance under a causal mask."
    bloom = pytest.importorskip('transformers.models.bloom.modeling_bloom')
    mpt = pytest.importorskip('transformers.models.mpt.modeling_mpt')
    q, k, v = heads(20, 8, n_heads)
    _, _, bias = AlibiPositions(n_heads)(q, k)
    mine = attention(q, k, v, causal_mask(20), bias)[1]
    by_key = (bloom.build_alibi_tensor(torch.ones(1, 20, dtype=torch.long), n_heads, torch.float32)[None],
              mpt.build_mpt_alibi_tensor(n_heads, 20)[None])
    for theirs in by_key: assert_close(mine, attention(q, k, v, causal_mask(20), theirs.expand(1, n_heads, 20, 20))[1])


# --- by themselves

@pytest.mark.parametrize('dtype', TYPES, ids=str)
def test_rotary_is_a_matter_of_distance(dtype):
    "The same queries and keys further on: the same scores."
    q, k, _ = heads(9, 16, dtype=dtype)
    rotary = RotaryPositions(16, 600).to(dtype)
    here, there = (a @ b.mT for a, b, _ in (rotary(q, k), rotary(q, k, start=500)))
    assert here.dtype == dtype
    assert_close(here.double(), there.double(), atol=8*TYPES[dtype], rtol=8*TYPES[dtype])

@pytest.mark.parametrize('dtype', TYPES, ids=str)
@pytest.mark.parametrize('n_heads', [1, 3, 4])
def test_alibi_entry_by_entry(n_heads, dtype):
    q, k, _ = heads(3, 4, n_heads, dtype=dtype)
    same_q, same_k, bias = AlibiPositions(n_heads).to(dtype)(q, k, start=6)
    assert same_q is q and same_k is k and bias.shape == (1, n_heads, 3, 9) and bias.dtype == dtype
    for h in range(n_heads):
        slope = 2**(-8*(h + 1)/n_heads)
        for i in range(3):
            for j in range(9):
                steps = j - (6 + i)
                wanted = slope*steps if steps <= 0 else -slope*steps*(0.5 if h % 2 else 2)
                assert math.isclose(bias[0, h, i, j].item(), wanted,
                                    rel_tol=2e-2 if dtype.itemsize == 2 else 1e-5), (h, i, j)

def test_slopes_go_down_by_equal_factors():
    for h in (1, 3, 8, 12):
        slopes = alibi_slopes(h)
        assert len(slopes) == h and math.isclose(slopes[-1].item(), 2**-8, rel_tol=1e-5)
        assert_close(slopes[1:]/slopes[:-1], torch.full((h - 1,), 2**(-8/h)))

@pytest.mark.parametrize('d_k', [0, 1, 5, -2])
def test_rotary_wants_pairs(d_k):
    with pytest.raises(ValueError, match=f'd_k={d_k}: rotary positions turn pairs'): RotaryPositions(d_k, 9)

@pytest.mark.parametrize('settings, d_k', [
    (dict(d_k=3), 3), (dict(d_model=12), 3), (dict(d_model=20, d_v=8), 5)], ids=str)
def test_a_rotary_model_wants_pairs(settings, d_k):
    with pytest.raises(ValueError, match=f'd_k={d_k} is odd: rotary positions'):
        replace(SMALL, positions='rotary', **settings)
    replace(SMALL, positions='alibi', **settings)                  # nobody else minds

@inside
def test_far_positions_are_exact_in_half_precision(kind):
    """A table or distances kept in 16 bits would be off by whole steps out here;
    queries are ones, so nothing else rounds much.
    """
    x = torch.ones(1, 4, 2, 8)
    exact, half = module(kind, 4, 8, 3000).double(), module(kind, 4, 8, 3000).bfloat16()
    for a, b in zip(exact(x.double(), x.double(), 2900), half(x.bfloat16(), x.bfloat16(), 2900)):
        if a is not None: assert_close(b.double(), a, atol=2e-2, rtol=1e-2)


# --- in attention

@inside
@pytest.mark.parametrize('masked', [False, True])
def test_both_paths_agree_and_so_do_their_gradients(kind, masked):
    torch.manual_seed(0)
    mha, x = MultiHeadAttention(16, 4, positions=module(kind)), torch.randn(2, 7, 16)
    mask = padding_mask(SRC, PAD) & causal_mask(7) if masked else None
    if masked: mask = mask.clone(); mask[1, :, 2] = False           # a query that may look nowhere
    quiet = mha(x, x, x, mask)
    with record_attention(mha) as maps: watched = mha(x, x, x, mask)
    assert_close(quiet, watched)
    if masked: assert not (maps[''][0] * ~mask).any() and not maps[''][0][1, :, 2].any()
    grads = [torch.autograd.grad(out.square().sum(), list(mha.parameters())) for out in (quiet, watched)]
    for fast, explicit in zip(*grads): assert fast.isfinite().all(); assert_close(fast, explicit, atol=1e-5, rtol=1e-4)

@pytest.mark.parametrize('dtype', TYPES, ids=str)
def test_a_bias_in_every_type(dtype):
    q, k, v = heads(6, 4, dtype=dtype)
    mask, (_, _, bias) = causal_mask(6).clone(), AlibiPositions(4).to(dtype)(q, k)
    mask[..., 3, :] = False
    for at in (None, mask):
        fast, explicit = fast_attention(q, k, v, at, bias), attention(q, k, v, at, bias)[0]
        assert fast.dtype == explicit.dtype == dtype
        assert_close(fast.double(), explicit.double(), atol=TYPES[dtype], rtol=TYPES[dtype])

@inside
def test_mixed_precision(kind):
    torch.manual_seed(0)
    mha, x = MultiHeadAttention(16, 4, positions=module(kind)), torch.randn(2, 5, 16)
    for watched in (mha, nn.Identity()):
        with torch.autocast('cpu', torch.bfloat16), record_attention(watched): out = mha(x, x, x, causal_mask(5))
        assert out.dtype == torch.bfloat16
        assert_close(out.float(), mha(x, x, x, causal_mask(5)), atol=3e-2, rtol=3e-2)

def test_without_positions_nothing_is_turned_and_no_bias_made(monkeypatch):
    import annotated_transformer.v1.attention as page
    seen = []
    monkeypatch.setattr(page, 'fast_attention',
                        lambda *args: seen.append(args) or torch.zeros(2, 4, args[0].size(2), 4))
    model_of('sinusoidal')(SRC, TGT)
    assert len(seen) == 6 and all(bias is None for *_, bias in seen)


# --- in the model

def test_only_self_attention_has_them():
    for kind in ('alibi', 'rotary'):
        model = model_of(kind)
        layers = [*model.encoder.layers, *model.decoder.layers]
        assert len({id(layer.self_attention.positions) for layer in layers}) == 1     # one for all
        assert all(layer.cross_attention.positions is None for layer in model.decoder.layers)

@inside
@pytest.mark.parametrize('seed', range(3))
def test_cached_decoding_while_a_beam_reorders(kind, seed):
    torch.manual_seed(seed)
    model, n = model_of(kind), 10
    tgt = torch.randint(4, 23, (3, n))
    memory, mask = model.encode(SRC[[0, 1, 0]]), padding_mask(SRC[[0, 1, 0]], PAD)
    cache, rows = DecoderCache(2), torch.arange(3)
    for start, stop in ((0, 1), (1, 4), (4, 5), (5, 10)):
        out = model.decode(tgt[rows, start:stop], memory[rows], mask[rows], cache)
        assert_close(out, model.decode(tgt, memory, mask)[rows, start:stop], atol=1e-5, rtol=1e-5)
        choice = torch.randint(len(rows), (4,))
        rows = rows[choice]
        cache.select(choice)

@inside
def test_who_bites_whom(kind):
    "A sentence and its mirror image are different things, already to an untrained model."
    model, src = model_of(kind), torch.tensor([[5, 6, 7, 8]])
    assert (model(src, TGT[:1]) - model(src.flip(1), TGT[:1])).abs().max() > 1e-4

@pytest.mark.parametrize('kind', ['sinusoidal', 'alibi', 'rotary'])
def test_more_room_without_training(kind):
    "`max_len` is a limit of one's choosing: with a larger one the same weights say the same, and go further."
    model, roomy = model_of(kind), model_of(kind, max_len=80)
    roomy.load_state_dict(model.state_dict())
    assert_close(roomy(SRC, TGT), model(SRC, TGT))
    long = torch.full((1, 80), 5)
    assert roomy(long, long).shape == (1, 80, 23)
    with pytest.raises(ValueError, match='13 positions are asked for and max_len=12'): model(long[:, :13], TGT[:1])
    with pytest.raises(ValueError, match='13 positions are asked for and max_len=12'): model(SRC[:1], long[:, :13])

def test_the_same_weights_whatever_the_kind():
    "Nothing about sinusoids, ALiBi or rotary positions is saved."
    states = {kind: model_of(kind).state_dict() for kind in ('sinusoidal', 'alibi', 'rotary')}
    for state in states.values():
        assert state.keys() == states['sinusoidal'].keys()
        assert all(torch.equal(state[name], p) for name, p in states['sinusoidal'].items())
    logits = [model_of(kind)(SRC, TGT) for kind in states]
    assert (logits[0] - logits[1]).abs().max() > 1e-3 < (logits[1] - logits[2]).abs().max()

@inside
def test_a_model_can_be_copied_moved_and_made_half(kind):
    model = model_of(kind)
    assert_close(copy.deepcopy(model)(SRC, TGT), model(SRC, TGT))
    assert copy.deepcopy(model).to('meta')(SRC.to('meta'), TGT.to('meta')).device.type == 'meta'
    assert_close(copy.deepcopy(model).bfloat16()(SRC, TGT).float(), model(SRC, TGT), atol=0.15, rtol=0.1)
    assert_close(copy.deepcopy(model).double()(SRC, TGT).float(), model(SRC, TGT), atol=1e-4, rtol=1e-4)

def test_settings_from_before_these_existed():
    "A folder's config.json without `init` is one of a Glorot model."
    old = {name: value for name, value in asdict(SMALL).items() if name != 'init'}
    assert TransformerConfig(**json.loads(json.dumps(old))) == SMALL


# --- how the matrices begin

@pytest.mark.parametrize('norm', ['post', 'pre'])
def test_scaled_is_glorot_with_smaller_contributions(norm):
    "Divided by the square root of the stack's sublayers, exactly there where a sublayer ends, and nowhere else."
    plain, scaled = (dict(model_of('sinusoidal', norm=norm, init=init).named_parameters())
                     for init in ('glorot', 'scaled'))
    for name, p in plain.items():
        ends = '_attention.output.' in name or 'feed_forward.outer.' in name
        factor = (2*2 if name.startswith('encoder') else 3*2)**-0.5 if ends else 1
        assert_close(scaled[name], p*factor, msg=name)
