"Rotary positions and ALiBi equal independent implementations, and know distance and direction as they should."
import math
from dataclasses import asdict

import pytest
import torch
from torch.testing import assert_close

from annotated_transformer import decoding, inference
from annotated_transformer.attention import attention, causal_mask
from annotated_transformer.checkpoints import load_model, save_model
from annotated_transformer.checks import check_transformer
from annotated_transformer.inference import DecodingConfig
from annotated_transformer.positions import sinusoids
from annotated_transformer.recipe import model_config
from annotated_transformer.relative_positions import (
    RELATIVE_POSITIONS, AlibiAttention, RelativeConfig, RelativeTransformer, RotaryAttention, alibi_slopes, rotate)
from annotated_transformer.transformer import PRESETS, Transformer, TransformerConfig
from annotated_transformer.vocabulary import BOS, EOS, PAD

SIZES = {'vocab_size': 23, 'n_layers': 2, 'd_model': 16, 'd_ff': 28, 'n_heads': 4, 'dropout': 0.0, 'max_len': 24}
SRC = torch.tensor([[11, 12, 13, 14, 15, 16, EOS], [7, 8, 9, EOS, PAD, PAD, PAD]])
TGT = torch.tensor([[BOS, 17, 18, 19, 20], [BOS, 21, 22, PAD, PAD]])


def heads(n, d_k, n_heads=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, n_heads, n, d_k, generator=generator).to(dtype).unbind()


def new_model(positions, **changes):
    torch.manual_seed(0)
    return RelativeTransformer(RelativeConfig(**SIZES | changes, positions=positions)).eval()


# --- other implementations

@pytest.mark.parametrize('d_k', [2, 8, 64])
def test_rotation_is_that_of_roformer(d_k):
    roformer = pytest.importorskip('transformers.models.roformer.modeling_roformer', reason='an extra')
    query, key, _ = heads(50, d_k)
    table = sinusoids(50, d_k)
    theirs = roformer.RoFormerSelfAttention.apply_rotary_position_embeddings(
        torch.cat([table[:, ::2], table[:, 1::2]], -1)[None, None], query, key)
    assert_close(rotate(query, table), theirs[0])
    assert_close(rotate(key, table), theirs[1])


@pytest.mark.parametrize('d_k', [2, 8, 64])
def test_rotary_logits_are_those_of_llama(d_k):
    "Llama pairs feature i with feature i + d_k / 2: the same logits for features in another order."
    llama = pytest.importorskip('transformers.models.llama.modeling_llama', reason='an extra')
    config = llama.LlamaConfig(hidden_size=4 * d_k, num_attention_heads=4, max_position_embeddings=60)
    query, key, _ = heads(50, d_k)
    cos, sin = llama.LlamaRotaryEmbedding(config)(query, torch.arange(7, 57)[None])
    order = [*range(0, d_k, 2), *range(1, d_k, 2)]
    their_query, their_key = llama.apply_rotary_pos_emb(query[..., order], key[..., order], cos, sin)
    rotary = RotaryAttention(d_k, 60)
    logits = rotary.rotate(query, 7) @ rotary.rotate(key, 7).mT
    assert_close(logits, their_query @ their_key.mT, atol=1e-4 * d_k**0.5, rtol=1e-4)


@pytest.mark.parametrize('n_heads', [1, 2, 4, 8, 16])
def test_causal_alibi_is_that_of_bloom(n_heads):
    "Bloom adds one number for each key: under a causal mask, the softmax makes the same of it."
    bloom = pytest.importorskip('transformers.models.bloom.modeling_bloom', reason='an extra')
    query, key, value = heads(20, 8, n_heads)
    mask = causal_mask(20)
    by_key = bloom.build_alibi_tensor(torch.ones(1, 20, dtype=torch.long), n_heads, torch.float32) # (heads, 1, 20)
    logits = (query @ key.mT / math.sqrt(8) + by_key).masked_fill(~mask, -math.inf)
    assert_close(AlibiAttention(n_heads)(query, key, value, mask)[1], logits.softmax(-1))


# --- distances

@pytest.mark.parametrize('dtype, tolerance', [
    (torch.float64, 1e-5), (torch.float32, 1e-4), (torch.bfloat16, 0.3)], ids=str)
def test_rotary_logits_depend_on_distance_only(dtype, tolerance):
    query, key, _ = heads(9, 16, dtype=dtype)
    rotary = RotaryAttention(16, 600)
    here = rotary.rotate(query) @ rotary.rotate(key).mT
    there = rotary.rotate(query, 500) @ rotary.rotate(key, 500).mT
    assert here.dtype == dtype
    assert_close(here, there, atol=tolerance, rtol=tolerance)
    if dtype != torch.bfloat16:
        nearer = rotary.rotate(query, 1) @ rotary.rotate(key).mT
        assert (here - nearer).abs().max() > 0.1


@pytest.mark.parametrize('n_heads', [1, 3, 4, 12])
def test_slopes_fall_by_equal_factors_to_2_to_the_minus_8(n_heads):
    slopes = alibi_slopes(n_heads)
    assert len(slopes) == n_heads and math.isclose(slopes[-1], 2**-8, rel_tol=1e-5)
    assert_close(slopes[1:] / slopes[:-1], torch.full((n_heads - 1,), 2 ** (-8 / n_heads)))


@pytest.mark.parametrize('directional', [False, True])
def test_alibi_weights_one_by_one(directional):
    "The 3 queries are the last of 7 positions; the second key is masked."
    query = torch.zeros(1, 4, 3, 5)
    key = torch.zeros(1, 4, 7, 5)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[:, 1] = False
    _, weights = AlibiAttention(4, directional)(query, key, key, mask)
    for head in range(4):
        slope = [2**-4, 2**-8, 2**-4, 2**-8][head] if directional else 2 ** (-2 * (head + 1))
        for i in range(3):
            expected = torch.zeros(7)
            for j in range(7):
                hidden = directional and (j > 4 + i if head < 2 else j < 4 + i)
                if j != 1 and not hidden:
                    expected[j] = math.exp(-slope * abs(4 + i - j))
            assert_close(weights[0, head, i], expected / expected.sum())


def test_fully_masked_query_gets_zeros():
    query, key, value = heads(5, 8)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    for attention_fn in (RotaryAttention(8, 5), AlibiAttention(4), AlibiAttention(4, directional=True)):
        output, weights = attention_fn(query, key, value, mask)
        assert (output[:, :, 2] == 0).all() and (weights[:, :, 2] == 0).all() and output[:, :, 1].abs().max() > 0


# --- models

@pytest.mark.parametrize('positions, sees_reversal', [('rotary', True), ('alibi', False), ('directional-alibi', True)])
def test_which_models_see_a_reversed_source(positions, sees_reversal):
    "Symmetric ALiBi does not: a property of the published method without a causal mask, which page 40 states."
    model = new_model(positions).double()
    src = SRC[:1, :6]
    change = (model.encode(src.flip(1)).flip(1) - model.encode(src)).abs().max()
    assert (change > 0.05) == sees_reversal
    if not sees_reversal:
        assert change < 1e-12
    swapped = src[:, [1, 0, 2, 3, 4, 5]]
    assert (model.encode(swapped)[:, [1, 0, 2, 3, 4, 5]] - model.encode(src)).abs().max() > 0.01


def test_directional_alibi_passes_the_checks_that_symmetric_alibi_fails():
    flow = ['future', 'prefix', 'source padding', 'source order', 'past']
    report = check_transformer(new_model('directional-alibi'), positions='relative', tied=True, only=flow)
    assert not report.failed, report
    report = check_transformer(new_model('alibi'), positions='relative', tied=True, only=flow)
    assert report.failed == ['source order']


@pytest.mark.parametrize('positions', list(RELATIVE_POSITIONS))
def test_only_self_attention_has_positions_and_only_the_encoder_has_directions(positions):
    model = new_model(positions)
    for layer in model.decoder.layers:
        assert layer.cross_attention.attention_fn is attention
        assert not getattr(layer.self_attention.attention_fn, 'directional', False)
    for layer in model.encoder.layers:
        in_encoder = layer.self_attention.attention_fn
        assert getattr(in_encoder, 'directional', False) == (positions == 'directional-alibi')
    assert model(SRC, TGT).isfinite().all()


@pytest.mark.parametrize('positions', list(RELATIVE_POSITIONS))
def test_cached_search_returns_what_the_reference_search_returns(positions):
    model = new_model(positions)
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    config = DecodingConfig(beam_size=3, max_extra_tokens=5)
    found = inference.beam_search(model, SRC, config)
    for row, hypotheses in zip(SRC, found):
        expected = decoding.beam_search(model, row[None, row != PAD], beam_size=3, max_extra_tokens=5)
        assert hypotheses[0].ids == expected[0].ids


@pytest.mark.parametrize('positions', list(RELATIVE_POSITIONS))
def test_folders_load(positions, tmp_path):
    model = new_model(positions)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config and loaded.config.positions == positions
    assert_close(loaded(SRC, TGT), model(SRC, TGT), rtol=0, atol=0)


# --- the registry

def test_one_line_registers_a_kind_of_relative_positions(monkeypatch):
    "It is not taken for one of the others."
    def twice(query, key, value, mask=None):
        output, weights = attention(query, key, value, mask)
        return 2 * output, weights
    monkeypatch.setitem(RELATIVE_POSITIONS, 'mine', lambda config: (twice, attention))
    model = new_model('mine')
    assert [layer.self_attention.attention_fn for layer in model.encoder.layers] == [twice] * 2
    assert [layer.self_attention.attention_fn for layer in model.decoder.layers] == [attention] * 2
    assert model_config('toy', positions='mine') == RelativeConfig(**asdict(PRESETS['toy']) | {'positions': 'mine'})


# --- errors

def test_unknown_positions_are_refused():
    with pytest.raises(ValueError, match="'mine' is unknown: choose one of rotary, alibi, directional-alibi"):
        RelativeConfig(**SIZES, positions='mine')
    with pytest.raises(ValueError, match="'rotary' is unknown: choose one of sinusoidal, learned, none"):
        Transformer(TransformerConfig(**SIZES, positions='rotary'))


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match='d_k=5 is odd: rotary positions rotate pairs'):
        RelativeConfig(**SIZES | {'d_k': 5})
    with pytest.raises(ValueError, match='n_heads=1 is odd: half of the heads attend to each side'):
        RelativeConfig(**SIZES | {'n_heads': 1}, positions='directional-alibi')
    with pytest.raises(ValueError, match='n_heads=3 is odd: half of the heads attend to each side'):
        AlibiAttention(3, directional=True)
    with pytest.raises(ValueError, match='the input has 9 positions, but max_len=8'):
        RotaryAttention(4, 8).rotate(torch.zeros(1, 9, 4))
