"Layers and stacks: equal to PyTorch's, blind to padding and to other sentences, with dropout where the paper puts it."
import functools
import importlib.util
import re

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from annotated_transformer import layers
from annotated_transformer.attention import MultiHeadAttention, causal_mask, padding_mask
from annotated_transformer.layers import Decoder, DecoderLayer, Encoder, EncoderLayer, FeedForward, Residual

both_norms = pytest.mark.parametrize('norm', ['post', 'pre'])
SRC = torch.tensor([[7, 6, 5, 9, 8, 4], [6, 5, 4, 0, 0, 0], [3, 0, 0, 0, 0, 0]])
SRC_MASK = padding_mask(SRC, pad=0)


def randomize(module):
    "Draw gains and biases at random: with the initial ones and zeros, a swap would go unnoticed."
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.5)
    return module


def pytorch_names(state):
    "Our parameters under PyTorch's names, which stack the projections of query, key and value."
    renamed = {}
    for name, parameter in state.items():
        name = re.sub(r'[qkv]_proj\.', 'in_proj_', name)
        name = re.sub(r'residual(\d)\.norm', r'norm\1', name)
        name = name.replace('self_attention', 'self_attn').replace('feed_forward.', '')
        name = name.replace('cross_attention', 'multihead_attn')
        renamed.setdefault(name, []).append(parameter)
    return {name: torch.cat(parameters) for name, parameters in renamed.items()}


@both_norms
@pytest.mark.parametrize('n_layers, d_model, n_heads, d_ff', [(1, 8, 1, 5), (3, 12, 3, 20), (2, 16, 16, 64)])
def test_stacks_equal_pytorch(norm, n_layers, d_model, n_heads, d_ff):
    "Outputs and gradients of both inputs through whole stacks, under the masks of a padded batch."
    torch.manual_seed(0)
    sizes = (d_model, n_heads, d_ff, 0.0)
    options = dict(batch_first=True, norm_first=norm == 'pre')
    def final_norm():
        return nn.LayerNorm(d_model) if norm == 'pre' else None

    encoder = randomize(Encoder(n_layers, *sizes, norm))
    decoder = randomize(Decoder(n_layers, *sizes, norm))
    their_encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(*sizes, **options), n_layers, final_norm(),
                                          enable_nested_tensor=False)
    their_decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(*sizes, **options), n_layers, final_norm())
    their_encoder.load_state_dict(pytorch_names(encoder.state_dict()))
    their_decoder.load_state_dict(pytorch_names(decoder.state_dict()))

    src = torch.randn(3, 6, d_model, requires_grad=True)
    tgt = torch.randn(3, 4, d_model, requires_grad=True)
    padding = SRC == 0
    encoder_output = encoder(src, SRC_MASK)
    their_encoder_output = their_encoder(src, src_key_padding_mask=padding)
    assert_close(encoder_output[~padding], their_encoder_output[~padding])
    ours = decoder(tgt, encoder_output, causal_mask(4), SRC_MASK)
    theirs = their_decoder(tgt, their_encoder_output, tgt_mask=~causal_mask(4), memory_key_padding_mask=padding)
    assert_close(ours, theirs)
    direction = torch.randn_like(ours)
    for x in (src, tgt):
        our_gradient = torch.autograd.grad(ours, x, direction, retain_graph=True)[0]
        their_gradient = torch.autograd.grad(theirs, x, direction, retain_graph=True)[0]
        assert_close(our_gradient, their_gradient, atol=1e-4, rtol=1e-4)


@both_norms
def test_padding_and_other_sentences_change_nothing(norm):
    "A sentence gets the same output in a padded batch as alone, whatever the padded positions hold."
    torch.manual_seed(0)
    encoder = Encoder(3, 12, 3, 20, 0.0, norm)
    decoder = Decoder(3, 12, 3, 20, 0.0, norm)
    src, tgt = torch.randn(3, 6, 12), torch.randn(3, 4, 12)
    noisy = torch.where((SRC == 0)[..., None], 100 * torch.randn_like(src), src)
    encoder_output, noisy_output = encoder(src, SRC_MASK), encoder(noisy, SRC_MASK)
    output = decoder(tgt, encoder_output, causal_mask(4), SRC_MASK)
    assert_close(decoder(tgt, noisy_output, causal_mask(4), SRC_MASK), output)
    for i, n in enumerate((SRC != 0).sum(-1).tolist()):
        alone = encoder(src[i:i+1, :n])
        assert_close(encoder_output[i:i+1, :n], alone)
        assert_close(output[i:i+1], decoder(tgt[i:i+1], alone, causal_mask(4)))


@both_norms
@pytest.mark.parametrize('offset, n_leaked', [(0, 0), (1, 3), (2, 6)])
def test_decoder_depends_on_the_positions_that_the_mask_allows(norm, offset, n_leaked):
    "A causal mask that is off by one leaks one more position with each of three layers."
    torch.manual_seed(0)
    decoder = Decoder(3, 8, 2, 16, 0.0, norm)
    encoder_output = torch.randn(1, 5, 8)
    tgt_mask = torch.ones(9, 9).tril(offset).bool()
    def run(x):
        return decoder(x[None], encoder_output, tgt_mask)[0]
    jacobian = torch.autograd.functional.jacobian(run, torch.randn(9, 8))
    flow = jacobian.abs().sum((1, 3)) > 0
    assert torch.equal(flow, torch.ones(9, 9).tril(n_leaked).bool())


@both_norms
def test_empty_sentence_gives_finite_outputs_and_gradients(norm):
    torch.manual_seed(0)
    encoder = Encoder(2, 12, 3, 20, 0.0, norm)
    decoder = Decoder(2, 12, 3, 20, 0.0, norm)
    src, tgt = torch.randn(2, 6, 12, requires_grad=True), torch.randn(2, 4, 12)
    src_mask = padding_mask(torch.tensor([[5, 6, 7, 0, 0, 0], [0, 0, 0, 0, 0, 0]]), 0)
    output = decoder(tgt, encoder(src, src_mask), causal_mask(4), src_mask)
    output.square().sum().backward()
    assert output.isfinite().all() and src.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for stack in (encoder, decoder) for p in stack.parameters())
    assert not src.grad[1].any() # nothing depends on padding


@pytest.mark.parametrize('make', [
    lambda module: module.Residual(8, 0.1, norm='middle'),
    lambda module: module.Encoder(2, 8, 2, 16, 0.1, norm='Pre'),
    lambda module: module.Decoder(2, 8, 2, 16, 0.1, norm=None),
], ids=['Residual', 'Encoder', 'Decoder'])
def test_unknown_norm_is_refused(make):
    "Users run without type checking, so load the module once more without it."
    spec = importlib.util.spec_from_file_location('annotated_transformer.unchecked_layers', layers.__file__)
    unchecked = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unchecked)
    with pytest.raises(ValueError, match="is unknown: choose 'post' or 'pre'"):
        make(unchecked)


def test_dropout_acts_on_the_sublayer_alone():
    "If everything a sublayer adds is dropped, pre-norm returns its input, and post-norm normalizes it."
    x, feed_forward = torch.randn(2, 5, 8) + 3, FeedForward(8, 16)
    assert torch.equal(Residual(8, 1.0, 'pre')(x, feed_forward), x)
    assert_close(Residual(8, 1.0)(x, feed_forward), nn.functional.layer_norm(x, (8,)))


@both_norms
def test_dropout_stands_in_every_residual_connection_and_nowhere_else(norm):
    layer, x = DecoderLayer(8, 2, 16, 0.25, norm), torch.randn(4, 5, 8)
    names = [name for name, module in layer.named_modules() if isinstance(module, nn.Dropout)]
    assert names == ['residual1.dropout', 'residual2.dropout', 'residual3.dropout']
    assert {module.p for module in layer.modules() if isinstance(module, nn.Dropout)} == {0.25}
    assert not torch.equal(layer(x, x), layer(x, x))
    layer.eval()
    assert torch.equal(layer(x, x), layer(x, x))


@pytest.mark.parametrize('stack', [Encoder, Decoder])
def test_layers_do_not_share_weights_and_pre_norm_adds_a_final_norm(stack):
    post, pre = stack(2, 8, 2, 16, 0.0), stack(2, 8, 2, 16, 0.0, 'pre')
    first, second = post.layers
    assert not torch.equal(first.feed_forward.linear1.weight, second.feed_forward.linear1.weight)
    assert isinstance(post.norm, nn.Identity) and isinstance(pre.norm, nn.LayerNorm)


def test_layer_norm_by_hand():
    "The example of the page: mean 8, variance 25; twice the features give the same result."
    rows = torch.tensor([[1., 7., 9., 15.], [2., 14., 18., 30.]])
    expected = torch.tensor([-1.4, -0.2, 0.2, 1.4])
    assert_close(EncoderLayer(4, 2, 8, 0.0).residual1.norm(rows), expected.expand(2, 4))


@pytest.mark.parametrize('init, variant, low, high', [
    (nn.init.xavier_uniform_, lambda norm, x, f: f(x), 0, 0.3),
    (nn.init.xavier_uniform_, lambda norm, x, f: x + f(x), 1e4, 1e6),
    (nn.init.xavier_uniform_, lambda norm, x, f: norm(x + f(x)), 0.95, 1.05),
    (nn.init.xavier_uniform_, lambda norm, x, f: x + f(norm(x)), 3, 8),
    (nn.init.kaiming_uniform_, lambda norm, x, f: f(x), 1e6, float('inf')),
    (nn.Identity(), lambda norm, x, f: x + f(x), 2, 4),
], ids=['bare', 'residual', 'post', 'pre', 'bare, He', "residual, PyTorch's"])
def test_layer_norm_keeps_the_scale_that_residual_connections_alone_do_not(init, variant, low, high):
    "What the page says about the norm after 24 layers, by variant and initialization."
    torch.manual_seed(0)
    encoder = Encoder(24, 64, 2, 256, 0.0)
    for module in encoder.modules():
        if isinstance(module, nn.Linear):
            init(module.weight)
        if isinstance(module, Residual):
            module.forward = functools.partial(variant, module.norm)
    x = torch.randn(8, 10, 64)
    assert low <= encoder(x).norm() / x.norm() <= high


@pytest.mark.parametrize('stack, n_attentions', [(Encoder, 1), (Decoder, 2)])
def test_head_sizes_reach_every_attention(stack, n_attentions):
    attentions = [module for module in stack(2, 12, 5, 20, 0.0, d_k=4, d_v=3).modules()
                  if isinstance(module, MultiHeadAttention)]
    assert len(attentions) == 2 * n_attentions
    assert {(a.q_proj.out_features, a.k_proj.out_features, a.v_proj.out_features, a.out_proj.in_features)
            for a in attentions} == {(20, 20, 15, 15)}


@both_norms
def test_layers_keep_bfloat16(norm):
    layer = EncoderLayer(8, 2, 16, 0.0, norm).to(torch.bfloat16)
    assert layer(torch.randn(2, 5, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
