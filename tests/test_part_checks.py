"Checks of the parts: attention, heads, masks and layers. Correct ones pass by every convention, wrong ones fail where they should."
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from annotated_transformer.attention import MultiHeadAttention, attention, causal_mask, padding_mask
from annotated_transformer.layers import DecoderLayer, EncoderLayer, Residual
from annotated_transformer.part_checks import check_attention, check_layer, check_mask, check_multi_head


# --- attention

def sdpa(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

def true_means_masked(query, key, value, mask):
    return sdpa(query, key, value, None if mask is None else ~mask)

def additive_mask(query, key, value, mask):
    logits = query @ key.mT / math.sqrt(query.size(-1))
    return (logits if mask is None else logits + mask).softmax(-1) @ value


@pytest.mark.parametrize('attend, convention', [
    (attention, 'True: may attend'), (sdpa, 'True: may attend'), (true_means_masked, 'True: masked'),
    (additive_mask, 'added to the logits')])
def test_correct_attention_passes_and_its_convention_is_found(attend, convention):
    report = check_attention(attend, fully_masked=attend is attention).raise_if_failed()
    assert report['mask'].observed.startswith(convention)


def test_no_two_axes_of_the_inputs_have_the_same_length():
    shapes = []

    def attend(query, key, value, mask):
        shapes.append((*query.shape, *value.shape[2:]))
        return attention(query, key, value, mask)
    check_attention(attend)
    assert len(set(shapes[0])) == len(shapes[0]) == 6


def test_torch_module_with_one_head_and_three_axes_passes():
    class OneHead(nn.MultiheadAttention):
        def forward(self, query, key, value, mask):
            self.to(query.dtype)
            mask = None if mask is None else mask.expand(2, 5, 7)
            return super().forward(query, key, value, attn_mask=mask)

    module = OneHead(4, 1, bias=False, batch_first=True)
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(4).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(4))
    check_attention(module, heads=False, d_v=4).raise_if_failed()


def no_scale(q, k, v, mask):
    return attention(q * 2, k, v, mask)
def scale_of_the_heads(q, k, v, mask):
    return attention(q * (q.size(-1) / q.size(1)) ** 0.5, k, v, mask)
def softmax_over_queries(q, k, v, mask):
    logits = q @ k.mT / 2
    return (logits if mask is None else logits.masked_fill(~mask, -1e9)).softmax(-2) @ v
def in_place(q, k, v, mask):
    return attention(q, k.zero_(), v, mask)
def fill_of_minus_1e9(q, k, v, mask):
    logits = q @ k.mT / 2
    return (logits if mask is None else logits.masked_fill(~mask, -1e9)).softmax(-1) @ v
def without_maximum(q, k, v, mask):
    weights = (q @ k.mT / 2).exp()
    weights = weights if mask is None else weights * mask
    return weights / weights.sum(-1, keepdim=True) @ v
def masked_after_softmax(q, k, v, mask):
    weights = attention(q, k, v)[1]
    weights = weights if mask is None else weights * mask
    return weights @ v, weights
def small_fill(q, k, v, mask):
    logits = q @ k.mT / 2
    return (logits if mask is None else logits - 30 * ~mask).softmax(-1) @ v
def wrong_weights(q, k, v, mask):
    output, weights = attention(q, k, v, mask)
    return output, weights * 0.9


@pytest.mark.parametrize('attend, failed', [
    (no_scale, ['equation', 'mask', 'large logits']), (scale_of_the_heads, ['equation', 'mask', 'large logits']),
    (softmax_over_queries, ['equation', 'mask', 'large logits']), (in_place, ['runs']),
    (fill_of_minus_1e9, ['half precision']), (without_maximum, ['masked values', 'large logits']),
    (masked_after_softmax, ['mask']), (small_fill, ['masked values']), (wrong_weights, ['weights'])])
def test_wrong_attention_fails(attend, failed):
    assert check_attention(attend).failed == failed


def test_the_wrong_scale_is_named():
    assert 'the scale is missing' in check_attention(no_scale)['equation'].observed
    assert 'over the queries' in check_attention(softmax_over_queries)['equation'].observed


def test_fully_masked_queries():
    assert check_attention(sdpa, fully_masked=True).failed in ([], ['fully masked'])
    assert check_attention(fill_of_minus_1e9, fully_masked=True).failed == ['half precision', 'fully masked']
    assert 'fully masked' in check_attention(sdpa).not_applicable


def test_checks_that_do_not_apply_can_be_skipped():
    check_attention(sdpa, skip=['weights', 'fully masked']).raise_if_failed(strict=True)
    torch_heads = nn.MultiheadAttention(24, 4, batch_first=True)
    check_multi_head(torch_heads, 24, 4, skip=['equation']).raise_if_failed(strict=True)
    with pytest.raises(ValueError, match='unknown checks'):
        check_attention(sdpa, skip=['weight'])


# --- heads

def module(change=None):
    torch.manual_seed(0)
    heads = MultiHeadAttention(24, 4)
    if change:
        change(heads)
    return heads, (heads.q_proj, heads.k_proj, heads.v_proj, heads.out_proj)


def test_correct_heads_pass():
    heads, projections = module()
    check_multi_head(heads, 24, 4, projections=projections).raise_if_failed(strict=True)
    torch_heads = nn.MultiheadAttention(24, 4, batch_first=True)
    assert check_multi_head(torch_heads, 24, 4).raise_if_failed().not_applicable == ['equation']
    thirds = [partial(F.linear, weight=weight, bias=bias)
              for weight, bias in zip(torch_heads.in_proj_weight.chunk(3), torch_heads.in_proj_bias.chunk(3))]
    projections = (*thirds, torch_heads.out_proj)
    check_multi_head(torch_heads, 24, 4, projections=projections).raise_if_failed(strict=True)
    assert not check_multi_head(torch_heads, 24, 4, projections=(thirds[1], thirds[0], *projections[2:]))


def view_only(heads):
    heads.split_heads = lambda x: x.reshape(len(x), 4, x.size(1), -1)
def merged_by_view(heads):
    heads.merge_heads = lambda x: x.reshape(len(x), x.size(2), -1)
def scale_of_d_model(heads):
    heads.attention_fn = lambda q, k, v, mask: attention(q / 2, k, v, mask)
def swapped(heads):
    heads.q_proj, heads.k_proj = heads.k_proj, heads.q_proj


@pytest.mark.parametrize('change, failed', [
    (view_only, {'one query', 'order of keys', 'equation'}), (merged_by_view, {'one query', 'equation'}),
    (scale_of_d_model, {'equation'})])
def test_wrong_heads_fail(change, failed):
    heads, projections = module(change)
    assert set(check_multi_head(heads, 24, 4, projections=projections).failed) == failed


def test_swapped_projections_and_wrong_number_of_heads_fail():
    heads, projections = module()
    swapped(heads)
    assert check_multi_head(heads, 24, 4, projections=projections).failed == ['equation']
    heads, projections = module()
    assert check_multi_head(heads, 24, 2, projections=projections).failed == ['equation']


# --- masks

def ours(ids):
    return padding_mask(ids, 0) & causal_mask(ids.size(1))
def inverted(ids):
    return ~ours(ids)
def added(ids):
    return torch.zeros(3, 1, 5, 5).masked_fill(~ours(ids), -math.inf)


@pytest.mark.parametrize('make_mask, convention', [
    (ours, 'True: may attend'), (inverted, 'True: masked'), (added, 'added to the logits')])
def test_correct_masks_pass_and_their_convention_is_reported(make_mask, convention):
    report = check_mask(make_mask, causal=True).raise_if_failed(strict=True)
    assert report['runs'].observed.endswith(convention)


def test_masks_of_one_kind_pass():
    check_mask(lambda ids: causal_mask(ids.size(1)), causal=True, padding=False).raise_if_failed()
    check_mask(lambda ids: padding_mask(ids, 0), causal=False).raise_if_failed()
    check_mask(lambda ids: padding_mask(ids, 7), causal=False, pad=7).raise_if_failed()
    check_mask(lambda ids: nn.Transformer.generate_square_subsequent_mask(5), causal=True,
               padding=False).raise_if_failed()


@pytest.mark.parametrize('make_mask, failed', [
    (lambda ids: torch.ones(5, 5).tril(1).bool() & padding_mask(ids, 0), ['future']),
    (lambda ids: torch.ones(5, 5).tril(-1).bool() & padding_mask(ids, 0), ['own position']),
    (lambda ids: causal_mask(5) | padding_mask(ids, 0), ['future', 'past']),
    (lambda ids: causal_mask(5) & padding_mask(ids, 0)[:1], ['own position', 'past']),
    (lambda ids: causal_mask(5), ['past']),
    (lambda ids: padding_mask(ids, 0)[:, 0], ['future']),
    (lambda ids: causal_mask(4), ['runs'])])
def test_wrong_masks_fail(make_mask, failed):
    assert check_mask(make_mask, causal=True).failed == failed


@pytest.mark.parametrize('causal', [False, True])
def test_padded_queries_may_be_masked_completely(causal):
    def both_axes(ids):
        mask = padding_mask(ids, 0) & padding_mask(ids, 0).mT
        return mask & causal_mask(5) if causal else mask
    check_mask(both_axes, causal=causal).raise_if_failed(strict=True)
    check_mask(lambda ids: ~both_axes(ids), causal=causal).raise_if_failed(strict=True)
    assert check_mask(both_axes, causal=causal, padding=False).failed
    assert check_mask(lambda ids: padding_mask(ids, 0).mT, causal=False).failed


# --- layers

@pytest.mark.parametrize('norm', ['post', 'pre'])
def test_correct_layers_pass(norm):
    check_layer(EncoderLayer(24, 4, 40, 0.1, norm), 24, norm).raise_if_failed()
    encoder_output = torch.randn(3, 7, 24)

    def call(layer, x): return layer(x, encoder_output[:len(x)])
    check_layer(DecoderLayer(24, 4, 40, 0.1, norm), 24, norm, call).raise_if_failed()
    torch_layer = nn.TransformerEncoderLayer(24, 4, 40, batch_first=True, norm_first=norm == 'pre')
    check_layer(torch_layer, 24, norm).raise_if_failed()


class DivideByN1(nn.LayerNorm):
    "Layer norm with a variance over n - 1 features."
    def forward(self, x):
        centered = x - x.mean(-1, keepdim=True)
        return centered / (x.std(-1, keepdim=True) + 1e-6) * self.weight + self.bias


@pytest.mark.parametrize('kind', [nn.RMSNorm, DivideByN1])
@pytest.mark.parametrize('norm', ['post', 'pre'])
def test_layers_with_other_norms_pass(kind, norm):
    layer = EncoderLayer(24, 4, 40, 0.1, norm)
    layer.residual1.norm = kind(24)
    layer.residual2.norm = kind(24)
    check_layer(layer, 24, norm).raise_if_failed()
    assert not check_layer(layer, 24, 'pre' if norm == 'post' else 'post')


def test_a_layer_with_a_large_epsilon_passes():
    "Keras adds 1e-3."
    layer = EncoderLayer(24, 4, 40, 0.1)
    layer.residual1.norm = nn.LayerNorm(24, eps=1e-3)
    layer.residual2.norm = nn.LayerNorm(24, eps=1e-3)
    check_layer(layer, 24, 'post').raise_if_failed(strict=True)


class AfterTheNorm(Residual):
    def forward(self, x, sublayer):
        x = self.norm(x)
        return x + self.dropout(sublayer(x))

class Missing(Residual):
    def forward(self, x, sublayer):
        return self.norm(self.dropout(sublayer(x)))

class BeforeAdding(Residual):
    def forward(self, x, sublayer):
        return x + self.norm(self.dropout(sublayer(x)))


@pytest.mark.parametrize('kind, norm, failed', [
    (AfterTheNorm, 'post', ['normalized']), (AfterTheNorm, 'pre', ['residual']), (Missing, 'post', ['residual']),
    (BeforeAdding, 'post', ['residual', 'normalized'])])
def test_wrong_residual_connections_fail(kind, norm, failed):
    layer = EncoderLayer(24, 4, 40, 0.1)
    layer.residual1 = kind(24, 0.1)
    layer.residual2 = kind(24, 0.1)
    assert check_layer(layer, 24, norm).failed == failed


def test_layers_that_mix_rows_or_positions_fail():
    assert 'rows' in check_layer(nn.TransformerEncoderLayer(24, 4, 40), 24, 'post').failed
    layer = EncoderLayer(24, 4, 40, 0.1)
    view_only(layer.self_attention)
    assert check_layer(layer, 24, 'post').failed == ['order']
    assert not check_layer(layer, 24, 'post', skip=['order']).failed
