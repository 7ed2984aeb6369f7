"Layers and stacks against torch's, over sizes, norms and masks; padding, neighbours, caches and empty sentences."
import importlib.util

import pytest
import torch
from torch import nn

from annotated_transformer.v1 import layers
from annotated_transformer.v1.attention import MultiHeadAttention, causal_mask, padding_mask
from annotated_transformer.v1.layers import (AddNorm, Decoder, DecoderCache, DecoderLayer, Encoder, EncoderLayer,
                                          FeedForward)

both_norms = pytest.mark.parametrize('norm', ['post', 'pre'])
SRC = torch.tensor([[7, 6, 5, 9, 8, 4], [6, 5, 4, 0, 0, 0], [3, 0, 0, 0, 0, 0]])


def stirred(module):
    "Gains and biases away from their neutral start, so that a mix-up shows."
    for p in module.parameters():
        if p.dim() == 1: nn.init.normal_(p, std=0.5)
    return module


def copy_attention(ours, theirs):
    parts = ours.query, ours.key, ours.value
    theirs.load_state_dict({'in_proj_weight': torch.cat([p.weight for p in parts]),
                            'in_proj_bias': torch.cat([p.bias for p in parts]),
                            'out_proj.weight': ours.output.weight, 'out_proj.bias': ours.output.bias})


def copy_stack(ours, theirs):
    for mine, other in zip(ours.layers, theirs.layers):
        copy_attention(mine.self_attention, other.self_attn)
        if isinstance(mine, DecoderLayer): copy_attention(mine.cross_attention, other.multihead_attn)
        other.linear1.load_state_dict(mine.feed_forward.inner.state_dict())
        other.linear2.load_state_dict(mine.feed_forward.outer.state_dict())
        for i, add_norm in enumerate(mine.add_norms, 1):
            getattr(other, f'norm{i}').load_state_dict(add_norm.norm.state_dict())
    if theirs.norm is not None: theirs.norm.load_state_dict(ours.norm.state_dict())


def gradients(out, x): return torch.autograd.grad(out.square().sum(), x, retain_graph=True)[0]


@both_norms
@pytest.mark.parametrize('n_layers, d_model, n_heads, d_ff, activation', [
    (1, 8, 1, 5, 'relu'), (3, 12, 3, 20, 'relu'), (2, 16, 16, 64, 'relu'),
    (2, 12, 3, 20, 'swish'), (2, 12, 3, 20, 'gelu')])
def test_stacks_equal_torch(norm, n_layers, d_model, n_heads, d_ff, activation):
    "Outputs and the gradients of both inputs, through whole stacks, under the masks of a ragged batch."
    torch.manual_seed(0)
    sizes, first = (d_model, n_heads, d_ff), norm == 'pre'
    encoder = stirred(Encoder(n_layers, *sizes, 0., norm=norm, activation=activation))
    decoder = stirred(Decoder(n_layers, *sizes, 0., norm=norm, activation=activation))
    bend = {'relu': torch.relu, 'swish': nn.functional.silu, 'gelu': nn.functional.gelu}[activation]
    final = lambda: nn.LayerNorm(d_model) if first else None
    their_encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(*sizes, 0., bend, batch_first=True, norm_first=first), n_layers, final(),
        enable_nested_tensor=False)
    their_decoder = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(*sizes, 0., bend, batch_first=True, norm_first=first), n_layers, final())
    copy_stack(encoder, their_encoder), copy_stack(decoder, their_decoder)
    src = torch.randn(3, 6, d_model, requires_grad=True)
    tgt = torch.randn(3, 4, d_model, requires_grad=True)
    mask, past, pad = padding_mask(SRC, 0), causal_mask(4), SRC == 0
    memory, their_memory = encoder(src, mask), their_encoder(src, src_key_padding_mask=pad)
    torch.testing.assert_close(memory[~pad], their_memory[~pad])
    out = decoder(tgt, memory, past, mask)
    judged = their_decoder(tgt, their_memory, tgt_mask=~past[0, 0], memory_key_padding_mask=pad)
    torch.testing.assert_close(out, judged)
    for x in (src, tgt): torch.testing.assert_close(gradients(out, x), gradients(judged, x), atol=1e-4, rtol=1e-4)


@both_norms
@pytest.mark.parametrize('seed', range(3))
def test_padding_and_neighbours_change_nothing(norm, seed):
    "A sentence of a ragged batch gets what it gets alone, whatever stands in the padding."
    torch.manual_seed(seed)
    encoder, decoder = Encoder(3, 12, 3, 20, 0., norm=norm), Decoder(3, 12, 3, 20, 0., norm=norm)
    src, tgt, mask = torch.randn(3, 6, 12), torch.randn(3, 4, 12), padding_mask(SRC, 0)
    noisy = torch.where((SRC == 0)[..., None], 100 * torch.randn_like(src), src)
    memory, noisy_memory = encoder(src, mask), encoder(noisy, mask)
    out = decoder(tgt, memory, causal_mask(4), mask)
    assert torch.equal(decoder(tgt, noisy_memory, causal_mask(4), mask), out)
    for i, n in enumerate((SRC != 0).sum(-1).tolist()):
        alone = encoder(src[i:i+1, :n])
        torch.testing.assert_close(memory[i:i+1, :n], alone)
        assert torch.equal(noisy_memory[i, :n], memory[i, :n])
        torch.testing.assert_close(out[i:i+1], decoder(tgt[i:i+1], alone, causal_mask(4)))


@both_norms
def test_an_empty_sentence_spoils_nothing(norm):
    "A source without a single word: finite outputs and gradients, for it and for its neighbours."
    torch.manual_seed(0)
    encoder, decoder = Encoder(2, 12, 3, 20, 0., norm=norm), Decoder(2, 12, 3, 20, 0., norm=norm)
    src, tgt = torch.randn(2, 6, 12, requires_grad=True), torch.randn(2, 4, 12)
    mask = padding_mask(torch.tensor([[5, 6, 7, 0, 0, 0], [0, 0, 0, 0, 0, 0]]), 0)
    out = decoder(tgt, encoder(src, mask), causal_mask(4), mask)
    out.square().sum().backward()
    assert out.isfinite().all() and src.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for m in (encoder, decoder) for p in m.parameters())
    assert not src.grad[1].any()                                        # and nobody heard what is not there


@both_norms
@pytest.mark.parametrize('seed', range(4))
def test_the_cached_decoder_at_random_cuts(norm, seed):
    "Cached equals uncached while rows are dropped, doubled and reordered, the memory's among them."
    generator = torch.manual_seed(seed)
    decoder, n = Decoder(3, 12, 3, 20, 0., norm=norm, d_k=5, d_v=2), 8
    tgt, memory, mask = torch.randn(3, n, 12), torch.randn(3, 6, 12), padding_mask(SRC, 0)
    whole, cache, rows = decoder(tgt, memory, causal_mask(n), mask), DecoderCache(3), torch.arange(3)
    cuts = sorted(torch.randperm(n - 1, generator=generator)[:3].add(1).tolist())
    for start, stop in zip([0, *cuts], [*cuts, n]):
        assert len(cache) == start
        out = decoder(tgt[rows, start:stop], memory[rows], causal_mask(stop - start, stop), mask[rows], cache)
        torch.testing.assert_close(out, whole[rows, start:stop])
        choice = torch.randint(len(rows), (len(rows) + 1,), generator=generator)
        rows = rows[choice]
        cache.select(choice)


def test_the_memory_is_projected_once_a_layer():
    decoder, tgt, memory = Decoder(3, 12, 3, 20, 0.), torch.randn(2, 5, 12), torch.randn(2, 6, 12)
    rows = {'key': 0, 'value': 0}
    for layer in decoder.layers:
        for name in rows:
            def add(module, args, out, name=name): rows[name] += args[0].shape[:-1].numel()
            getattr(layer.cross_attention, name).register_forward_hook(add)
    cache = DecoderCache(3)
    for t in range(5): decoder(tgt[:, t:t+1], memory, None, None, cache)
    assert rows == {'key': 3 * 2 * 6, 'value': 3 * 2 * 6}


def test_selecting_before_the_first_step():
    cache = DecoderCache(2)
    cache.select(torch.tensor([0, 0]))
    assert len(cache) == 0


@pytest.mark.parametrize('make', [
    lambda layers: layers.AddNorm(8, norm='middle'),
    lambda layers: layers.Encoder(2, 8, 2, 16, norm='Pre'),
    lambda layers: layers.Decoder(2, 8, 2, 16, norm=None),
], ids=['AddNorm', 'Encoder', 'Decoder'])
def test_an_unknown_norm(make):
    "Users run without shape checking, so the module is loaded once more, without it."
    spec = importlib.util.spec_from_file_location('annotated_transformer.v1.layers_as_users_get_it', layers.__file__)
    unchecked = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unchecked)
    with pytest.raises(ValueError, match="unknown: choose 'post' or 'pre'"): make(unchecked)


@both_norms
def test_dropout_acts_on_sublayers_in_training_only(norm):
    torch.manual_seed(0)
    add_norm, x = AddNorm(8, 0.25, norm), torch.randn(4, 50, 8)
    added = add_norm.dropout(torch.ones(40_000))
    assert abs((added == 0).float().mean() - 0.25) < 0.02 and added.max() == 1 / 0.75
    layer = EncoderLayer(8, 2, 16, 0.25, norm)
    assert [m.p for m in layer.modules() if isinstance(m, nn.Dropout)] == [0.25] * 2     # nowhere else (5.4)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_dropout_spares_what_was_there():
    "With everything dropped that a sublayer adds, pre-norm returns its input; post-norm, the default, normalizes it."
    x, ff = torch.randn(2, 5, 8) + 3, FeedForward(8, 16)
    assert torch.equal(AddNorm(8, 1., 'pre')(x, ff), x)
    torch.testing.assert_close(AddNorm(8, 1.)(x, ff), nn.functional.layer_norm(x, (8,)))


def test_head_sizes_reach_every_attention():
    for stack, per_layer in ((Encoder(2, 12, 5, 20, d_k=4, d_v=3), 1), (Decoder(2, 12, 5, 20, d_k=4, d_v=3), 2)):
        attentions = [m for m in stack.modules() if isinstance(m, MultiHeadAttention)]
        assert len(attentions) == 2 * per_layer
        assert {(a.query.out_features, a.key.out_features, a.value.out_features, a.output.in_features)
                for a in attentions} == {(20, 20, 15, 15)}


@both_norms
def test_feed_forward_needs_no_batch_and_layers_keep_the_type(norm):
    ff = FeedForward(8, 16)
    x = torch.randn(8)
    torch.testing.assert_close(ff(x), ff(x.expand(2, 3, 8))[1, 2])
    half = EncoderLayer(8, 2, 16, 0., norm).to(torch.bfloat16)
    assert half(torch.randn(2, 5, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
