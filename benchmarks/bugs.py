#!/usr/bin/env python3
"""Plant bugs in Transformers, check each with `check_transformer`, and train each as if nothing were wrong.

Writes results/bugs.json: the failed checks in the order in which a report shows them, the training losses and the
share of sequences that the trained model reverses correctly, for each bug. The page 45_finding_bugs plots it.

    python benchmarks/bugs.py                     # all bugs: about ten minutes of one core
    python benchmarks/bugs.py --only 'batch norm' # one bug, the others stay as recorded
    python benchmarks/bugs.py --no-training       # the checks alone: about two minutes

A bug is a function that returns a context manager: while it is open, some function of the library is wrong, and
models built inside are wrong. The `HELD_OUT` bugs are planted in models of another design. They were written after the
checks and tried once. Details of three checks changed afterwards; the verdicts on these bugs did not. Beside each stand
the checks whose hint names the faulty code, judged by hand. `more_bugs.py` has a third set of bugs. In the record,
`command` and `machine` are those of the training, `checked` has those of the checks.
"""
import argparse
import json
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

from annotated_transformer import attention as attention_module
from annotated_transformer import transformer as transformer_module
from annotated_transformer.attention import MultiHeadAttention, attention, causal_mask, padding_mask
from annotated_transformer.checks import CHECKS, check_transformer
from annotated_transformer.files import atomic_write
from annotated_transformer.layers import DecoderLayer, Encoder, EncoderLayer, Residual
from annotated_transformer.positions import SinusoidalPositions, sinusoids
from annotated_transformer.transformer import Transformer, TransformerConfig
from annotated_transformer.vocabulary import BOS, EOS, PAD

CONFIG = TransformerConfig(vocab_size=14, n_layers=1, d_model=32, d_ff=64, n_heads=4, max_len=32)
SEEDS = (1, 2)
EVERY = 20 # training steps for each recorded loss


@dataclass(frozen=True)
class Bug:
    "A bug to plant in our own model."
    family: str
    found_by: str       # the check that is meant to find it; its hint names the faulty code
    plant: Callable     # returns a context manager
    config: TransformerConfig = CONFIG


BUGS = {}


def planted(name, family, found_by, **changes):
    "Register a function that plants a bug; `changes` are the config's."
    def register(plant):
        BUGS[name] = Bug(family, found_by, plant, replace(CONFIG, **changes))
        return plant
    return register


def build(name=None, seed=0):
    "Return a new model. The bug's context must be open."
    torch.manual_seed(seed)
    return Transformer(BUGS[name].config if name else CONFIG)


def context(name=None):
    "Return the bug's context, or one that does nothing."
    return BUGS[name].plant() if name else ExitStack()


def check(name=None, **options):
    "Check a model with a bug, or the correct one."
    with context(name):
        return check_transformer(build(name), make=lambda: build(name, seed=1), tied=True, **options)


# --- masks

def decode_with(mask):
    "Replace the decoder's self-attention mask by `mask(tgt)`."
    def decode(self, tgt, encoder_output, src_mask):
        x = self.tgt_embed(tgt) * math.sqrt(self.config.d_model)
        x = self.dropout(self.tgt_positions(x))
        return self.decoder(x, encoder_output, mask(tgt), src_mask)
    return patch.object(Transformer, 'decode', decode)


def attend_with(function):
    "Replace the attention function of new models; `function` returns the weights."
    def wrong(query, key, value, mask=None):
        weights = function(query, key, mask)
        return weights @ value, weights
    return patch.object(attention_module, 'attention', wrong)


def attention_logits(query, key):
    return query @ key.mT / math.sqrt(query.size(-1))


@planted('masks combined with |', 'mask', 'future')
def _():
    return decode_with(lambda tgt: causal_mask(tgt.size(1)).to(tgt.device) | padding_mask(tgt, PAD))

@planted('decoder without causal mask', 'mask', 'future')
def _():
    return decode_with(lambda tgt: None)

@planted('diagonal off by one', 'mask', 'future')
def _():
    return decode_with(lambda tgt: torch.ones(tgt.size(1), tgt.size(1), device=tgt.device).tril(1).bool())

@planted('causal mask transposed', 'mask', 'future')
def _():
    return decode_with(lambda tgt: causal_mask(tgt.size(1), tgt.device).mT)

@planted('weights zeroed after softmax', 'mask', 'future')
def _():
    return attend_with(lambda q, k, mask: attention_logits(q, k).softmax(-1).masked_fill(~mask, 0))

@planted('1e-9 instead of -1e9', 'mask', 'future')
def _():
    return attend_with(lambda q, k, mask: attention_logits(q, k).masked_fill(~mask, 1e-9).softmax(-1))

@planted('padding not masked', 'mask', 'source padding')
def _():
    return patch.object(transformer_module, 'padding_mask', lambda ids, pad: (ids == ids)[:, None, None])

@planted('padding mask inverted', 'mask', 'source')
def _():
    return patch.object(transformer_module, 'padding_mask', lambda ids, pad: (ids == pad)[:, None, None])

@planted('padding mask of the first row', 'mask', 'source padding')
def _():
    return patch.object(transformer_module, 'padding_mask', lambda ids, pad: (ids != pad)[:1, None, None])

@planted('mask fits only if n = m', 'mask', 'runs')
def _():
    return patch.object(transformer_module, 'padding_mask', lambda ids, pad: (ids != pad)[:, None, :, None])

@planted('encoder under a causal mask', 'mask', 'encoder')
def _():
    def encode(self, src):
        x = self.src_embed(src) * math.sqrt(self.config.d_model)
        mask = padding_mask(src, PAD) & causal_mask(src.size(1), src.device)
        return self.encoder(self.dropout(self.src_positions(x)), mask)
    return patch.object(Transformer, 'encode', encode)


# --- axes

@planted('attention over the batch', 'axis', 'batch')
def _():
    forward = Encoder.forward
    return patch.object(Encoder, 'forward', lambda self, x, mask: forward(self, x.transpose(0, 1)).transpose(0, 1))

class BatchNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)

@planted('batch norm', 'axis', 'batch')
def _():
    return patch.object(nn, 'LayerNorm', BatchNorm)

class SentenceNorm(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, x.shape[1:]) * self.weight + self.bias

@planted('norm over the sentence', 'axis', 'future')
def _():
    return patch.object(nn, 'LayerNorm', SentenceNorm)

@planted('heads split by view', 'axis', 'without positions')
def _():
    def split_heads(self, x):
        return x.reshape(len(x), self.n_heads, x.size(1), -1)
    return patch.object(MultiHeadAttention, 'split_heads', split_heads)

@planted('heads merged without transpose', 'axis', 'without positions')
def _():
    def merge_heads(self, x):
        return x.reshape(len(x), x.size(2), -1)
    return patch.object(MultiHeadAttention, 'merge_heads', merge_heads)

@planted('d_k from the wrong axis', 'axis', 'prefix')
def _():
    def weights(query, key, mask):
        return attention(query * math.sqrt(query.size(-1) / query.size(-2)), key, key, mask)[1]
    return attend_with(weights)

@planted('softmax over queries', 'axis', 'future')
def _():
    def weights(query, key, mask):
        logits = attention_logits(query, key)
        return logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-2)
    return attend_with(weights)


# --- layers

def decoder_layer(cross_attention):
    "Replace the cross-attention of a decoder layer by `cross_attention(layer, x, encoder_output, mask)`."
    def forward(self, x, encoder_output, tgt_mask=None, src_mask=None):
        x = self.residual1(x, lambda y: self.self_attention(y, y, y, tgt_mask))
        x = self.residual2(x, lambda y: cross_attention(self, y, encoder_output, tgt_mask))
        return self.residual3(x, self.feed_forward)
    return patch.object(DecoderLayer, 'forward', forward)

@planted('cross-attention to the target', 'layer', 'source')
def _():
    return decoder_layer(lambda self, y, source, mask: self.cross_attention(y, y, y, mask))

@planted('target mask in cross-attention', 'layer', 'without positions')
def _():
    return decoder_layer(lambda self, y, source, mask: self.cross_attention(
        y, source, source, torch.ones(y.size(1), source.size(1), device=y.device).tril().bool()))

@planted('one layer used twice', 'layer', 'separate weights', n_layers=2)
def _():
    init = Encoder.__init__
    def repeated(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.layers = nn.ModuleList([self.layers[0]] * len(self.layers))
    return patch.object(Encoder, '__init__', repeated)

@planted('one norm for all sublayers', 'layer', 'separate weights')
def _():
    init = EncoderLayer.__init__
    def shared(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.residual2 = self.residual1
    return patch.object(EncoderLayer, '__init__', shared)

@planted('feed-forward never called', 'layer', 'gradients')
def _():
    def forward(self, x, src_mask=None):
        return self.residual2(x, lambda y: self.self_attention(y, y, y, src_mask))
    return patch.object(EncoderLayer, 'forward', forward)


# --- positions

@planted('positions and network swapped', 'positions', 'target order')
def _():
    def decode(self, tgt, encoder_output, src_mask):
        x = self.tgt_embed(tgt) * math.sqrt(self.config.d_model)
        x = self.dropout(self.decoder.layers[0].feed_forward(x))
        return self.decoder(x, encoder_output, causal_mask(tgt.size(1), tgt.device), src_mask)
    def forward(self, x, encoder_output, tgt_mask=None, src_mask=None):
        x = self.residual1(x, lambda y: self.self_attention(y, y, y, tgt_mask))
        x = self.residual2(x, lambda y: self.cross_attention(y, encoder_output, encoder_output, src_mask))
        return self.residual3(x, lambda y: sinusoids(y.size(1), y.size(2)).to(y).expand_as(y))
    stack = ExitStack()
    stack.enter_context(patch.object(Transformer, 'decode', decode))
    stack.enter_context(patch.object(DecoderLayer, 'forward', forward))
    return stack

@planted('decoder without positions', 'positions', 'target order')
def _():
    def decode(self, tgt, encoder_output, src_mask):
        x = self.dropout(self.tgt_embed(tgt) * math.sqrt(self.config.d_model))
        return self.decoder(x, encoder_output, causal_mask(tgt.size(1), tgt.device), src_mask)
    return patch.object(Transformer, 'decode', decode)

@planted('encoder without positions', 'positions', 'source order')
def _():
    def encode(self, src):
        x = self.dropout(self.src_embed(src) * math.sqrt(self.config.d_model))
        return self.encoder(x, padding_mask(src, PAD))
    return patch.object(Transformer, 'encode', encode)

@planted('positions along the batch', 'positions', 'batch')
def _():
    return patch.object(SinusoidalPositions, 'forward', lambda self, x: x + self.table[:x.size(0), None])

@planted('positions symmetric about the middle', 'positions', 'source order')
def _():
    def forward(self, x):
        n = x.size(1)
        distance = torch.minimum(torch.arange(n), torch.arange(n).flip(0)).to(x.device)
        return x + self.table[distance]
    return patch.object(SinusoidalPositions, 'forward', forward)


# --- parameters

@planted('new output layer in each call', 'parameters', 'parameters')
def _():
    def forward(self, src, tgt):
        return nn.Linear(32, 14, device=src.device)(self.hidden_states(src, tgt).float())
    return patch.object(Transformer, 'forward', forward)

@planted('layers in a Python list', 'parameters', 'parameters')
def _():
    init = Encoder.__init__
    def listed(self, *args, **kwargs):
        init(self, *args, **kwargs)
        layers = list(self.layers)
        del self.layers
        self.layers = layers
    return patch.object(Encoder, '__init__', listed)

@planted('no_grad around the encoder', 'parameters', 'gradients')
def _():
    return patch.object(Transformer, 'encode', torch.no_grad()(Transformer.encode))

@planted('tied by copying', 'parameters', 'tied')
def _():
    init = Transformer.__init__
    def copied(self, config):
        init(self, config)
        self.lm_head.weight = nn.Parameter(self.src_embed.weight.data.clone())
    return patch.object(Transformer, '__init__', copied)

@planted('table stays on the CPU', 'parameters', 'device')
def _():
    def init(self, d_model, max_len):
        nn.Module.__init__(self)
        self.table = sinusoids(max_len, d_model)
    return patch.object(SinusoidalPositions, '__init__', init)

@planted('random table, not saved', 'parameters', 'state dict')
def _():
    def init(self, d_model, max_len):
        nn.Module.__init__(self)
        self.register_buffer('table', 0.7 * torch.randn(max_len, d_model), persistent=False)
    return patch.object(SinusoidalPositions, '__init__', init)


# --- training

class AlwaysDropout(nn.Dropout):
    def forward(self, x):
        return F.dropout(x, self.p)

class NeverDropout(nn.Dropout):
    def forward(self, x):
        return F.dropout(x, self.p, training=False)

@planted('dropout in eval mode', 'training', 'evaluation')
def _():
    return patch.object(nn, 'Dropout', AlwaysDropout)

@planted('dropout never on', 'training', 'dropout')
def _():
    return patch.object(nn, 'Dropout', NeverDropout)

def applied_to_logits(function):
    forward = Transformer.forward
    return patch.object(Transformer, 'forward', lambda self, src, tgt: function(forward(self, src, tgt)))

@planted('softmax twice', 'training', 'logits')
def _():
    return applied_to_logits(lambda logits: logits.softmax(-1))

@planted('activation on the logits', 'training', 'overfit')
def _():
    return applied_to_logits(torch.tanh)

@planted('tied, with standard deviation 1', 'training', 'initial loss')
def _():
    init_weights = Transformer.init_weights
    def wide(self):
        init_weights(self)
        nn.init.normal_(self.lm_head.weight)
    return patch.object(Transformer, 'init_weights', wide)

@planted('-1e9 in 16 bits', 'training', 'mixed precision')
def _():
    return attend_with(lambda q, k, mask: attention_logits(q, k).masked_fill(~mask, -1e9).softmax(-1))

@planted('used before assigned', 'training', 'runs')
def _():
    def forward(self, src, tgt):
        hidden = self.decode(embedded, self.encode(src), padding_mask(src, PAD))
        embedded = self.tgt_embed(tgt)
        return self.lm_head(hidden)
    return patch.object(Transformer, 'forward', forward)


# --- out of reach: no call of the whole model can know the intended value

@planted('no division by sqrt(d_k)', 'out of reach', '')
def _():
    return attend_with(lambda q, k, mask: attention(q * math.sqrt(q.size(-1)), k, k, mask)[1])

@planted('embeddings not scaled', 'out of reach', '')
def _():
    return patch.object(transformer_module, 'math', SimpleNamespace(sqrt=lambda x: 1.0))

@planted('positions added twice', 'out of reach', '')
def _():
    return patch.object(SinusoidalPositions, 'forward', lambda self, x: x + 2 * self.table[:x.size(1)])

@planted('residual taken after the norm', 'out of reach', '')
def _():
    def forward(self, x, sublayer):
        x = self.norm(x)
        return x + self.dropout(sublayer(x))
    return patch.object(Residual, 'forward', forward)

@planted('diagonal masked, too', 'out of reach', '')
def _():
    return decode_with(lambda tgt: torch.ones(tgt.size(1), tgt.size(1), device=tgt.device).tril(-1).bool())


# --- held-out bugs, in models of another design

class PlainAttention(nn.Module):
    "Attention in the style of nanoGPT: one projection for queries, keys and values, a fused kernel."
    def __init__(self, d, n_heads, bug):
        super().__init__()
        self.c_attn = nn.Linear(d, 3 * d)
        self.c_proj = nn.Linear(d, d)
        self.n_heads = n_heads
        self.bug = bug

    def forward(self, x, memory=None, padding=None, causal=False):
        b, m, d = x.shape
        q = self.c_attn(x)[..., :d]
        k, v = self.c_attn(x if memory is None else memory)[..., d:].split(d, dim=2)
        q, k, v = [y.view(b, y.size(1), self.n_heads, -1).transpose(1, 2) for y in (q, k, v)]
        if self.bug == 'scale of d_model':
            q = q * (q.size(-1) / d) ** 0.5
        mask = None
        if padding is not None:
            mask = padding[:, None, None, :]
        elif causal:
            mask = torch.ones(m, m, dtype=torch.bool, device=x.device).tril()
        p = 0.1 if self.training or self.bug == 'dropout_p in eval mode' else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        if self.bug != 'merged without transpose':
            y = y.transpose(1, 2)
        return self.c_proj(y.reshape(b, m, d))


class PlainBlock(nn.Module):
    "A pre-norm layer of encoder or decoder."
    def __init__(self, d, n_heads, bug, cross):
        super().__init__()
        self.bug = bug
        self.ln_1 = nn.LayerNorm(d)
        self.attn = PlainAttention(d, n_heads, bug)
        if cross:
            self.ln_x = nn.LayerNorm(d)
            self.cross = PlainAttention(d, n_heads, bug)
        self.ln_2 = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(0.1))

    def forward(self, x, memory=None, padding=None, causal=False):
        x = x + self.attn(self.ln_1(x), None, None if causal else padding, causal)
        if memory is not None:
            x = x + self.cross(self.ln_x(x), memory, padding)
        if self.bug == 'no residual around the network':
            return self.mlp(self.ln_2(x))
        return x + self.mlp(self.ln_2(x))


class Plain(nn.Module):
    "An encoder-decoder in the style of nanoGPT: pre-norm, learned positions, GELU, tied output layer."
    def __init__(self, bug=None, d=24, n_layers=2, vocab_size=17):
        super().__init__()
        self.bug = bug
        self.wte = nn.Embedding(vocab_size, d)
        self.wpe = nn.Embedding(16, d)
        self.enc = nn.ModuleList(PlainBlock(d, 3, bug, False) for _ in range(n_layers))
        self.dec = nn.ModuleList(PlainBlock(d, 3, bug, True) for _ in range(n_layers))
        if bug == 'decoder blocks in a tuple':
            del self.dec
            self.dec = tuple(PlainBlock(d, 3, bug, True) for _ in range(n_layers))
        if bug == 'blocks multiplied':
            self.enc = nn.ModuleList([PlainBlock(d, 3, bug, False)] * n_layers)
        self.ln_e = nn.LayerNorm(d)
        self.ln_f = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, vocab_size, bias=False)
        nn.init.normal_(self.wte.weight, std=0.3)
        nn.init.normal_(self.wpe.weight, std=0.3)
        if bug == 'output layer copied':
            self.lm_head.weight.data = self.wte.weight.data.clone()
        else:
            self.lm_head.weight = self.wte.weight

    def embed(self, ids):
        n = ids.size(0) if self.bug == 'positions from the batch axis' else ids.size(1)
        position = torch.arange(n, device=ids.device)
        if self.bug == 'positions from the batch axis':
            return self.wte(ids) + self.wpe(position)[:, None]
        if self.bug == 'one position for all':
            return self.wte(ids) + self.wpe(torch.zeros_like(ids))
        return self.wte(ids) + self.wpe(position)

    def forward(self, src, tgt):
        padding = src == 0 if self.bug == 'padding mask inverted' else src != 0
        memory = embedded = self.embed(src)
        for block in self.enc:
            memory = block(memory, None, padding, self.bug == 'is_causal in the encoder')
            if self.bug == 'detached between blocks':
                memory = memory.detach()
        memory = self.ln_e(memory)
        if self.bug == 'cross-attention to the embeddings':
            memory = embedded
        y = self.embed(tgt)
        if self.bug == 'mean of the source added':
            y = y + memory.mean(1, keepdim=True)
        for i, block in enumerate(self.dec):
            y = block(y, memory, padding, not (self.bug == 'second block not causal' and i == 1))
        if self.bug == 'norm over positions':
            y = F.layer_norm(y.transpose(1, 2), y.shape[1:2]).transpose(1, 2)
        logits = self.lm_head(self.ln_f(y))
        return logits.relu() if self.bug == 'ReLU on the logits' else logits


class Sinusoids(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.register_buffer('table', sinusoids(20, d), persistent=False)

    def forward(self, x, batch_axis=1):
        return x + (self.table[:x.size(1)] if batch_axis else self.table[:x.size(0), None])


class TorchModel(nn.Module):
    "nn.Transformer between embeddings, sinusoids and an output layer, as in many tutorials."
    def __init__(self, bug=None, d=24, vocab_size=17):
        super().__init__()
        self.bug = bug
        self.src_embed = nn.Embedding(vocab_size, d)
        self.tgt_embed = nn.Embedding(vocab_size, d)
        self.positions = Sinusoids(d)
        self.core = nn.Transformer(d, 4, 2, 2, 40, batch_first=bug != 'batch_first left out')
        self.out = nn.Linear(d, vocab_size)
        nn.init.normal_(self.src_embed.weight, std=d ** -0.5)
        nn.init.normal_(self.tgt_embed.weight, std=d ** -0.5)

    def forward(self, src, tgt):
        embed_tgt = self.src_embed if self.bug == 'source embedding for the target' else self.tgt_embed
        x = self.positions(self.src_embed(src) * 24 ** 0.5, self.bug != 'sinusoids along the batch')
        y = self.positions(embed_tgt(tgt) * 24 ** 0.5, self.bug != 'sinusoids along the batch')
        future = torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool, device=tgt.device).triu(1)
        masked = src == 0
        masks = dict(tgt_mask=future, src_key_padding_mask=masked, memory_key_padding_mask=masked)
        if self.bug == 'memory_key_padding_mask left out':
            del masks['memory_key_padding_mask']
        if self.bug == 'src_key_padding_mask left out':
            del masks['src_key_padding_mask']
        if self.bug == 'tgt_mask left out':
            del masks['tgt_mask']
        if self.bug == 'tgt_mask as for attn_mask of SDPA':
            masks['tgt_mask'] = ~future
        if self.bug == 'src_mask causal':
            masks['src_mask'] = torch.ones(src.size(1), src.size(1), dtype=torch.bool, device=src.device).triu(1)
        return self.out(self.core(x, y, **masks))


HELD_OUT = {
    Plain: {
        'scale of d_model': (),
        'dropout_p in eval mode': ('evaluation',),
        'merged without transpose': ('future', 'without positions'),
        'no residual around the network': (),
        'decoder blocks in a tuple': ('parameters',),
        'blocks multiplied': ('separate weights',),
        'output layer copied': ('tied',),
        'positions from the batch axis': ('batch',),
        'one position for all': ('source order', 'target order'),
        'padding mask inverted': ('source', 'source padding'),
        'is_causal in the encoder': (),
        'detached between blocks': ('gradients',),
        'cross-attention to the embeddings': (),
        'mean of the source added': (),
        'second block not causal': (),
        'norm over positions': ('prefix',),
        'ReLU on the logits': ('overfit',),
    },
    TorchModel: {
        'batch_first left out': (),
        'source embedding for the target': ('gradients',),
        'sinusoids along the batch': ('batch',),
        'memory_key_padding_mask left out': ('source padding',),
        'src_key_padding_mask left out': ('source padding',),
        'tgt_mask left out': ('future',),
        'tgt_mask as for attn_mask of SDPA': (),
        'src_mask causal': ('encoder', 'without positions'),
    },
}


def check_held_out(model_class, bug=None):
    torch.manual_seed(0)
    return check_transformer(model_class(bug), make=lambda: model_class(bug), tied=model_class is Plain)


# --- training

def task(n_pairs, generator, longest=6):
    "Return random sequences and their reversals: source + EOS, and BOS + target + EOS."
    src = torch.full((n_pairs, longest + 1), PAD)
    tgt = torch.full((n_pairs, longest + 2), PAD)
    for i, n in enumerate(torch.randint(2, longest + 1, (n_pairs,), generator=generator).tolist()):
        tokens = torch.randint(4, 14, (n,), generator=generator)
        src[i, :n] = tokens
        src[i, n] = EOS
        tgt[i, 0] = BOS
        tgt[i, 1:n + 1] = tokens.flip(0)
        tgt[i, n + 1] = EOS
    return src, tgt


def train(model, steps, seed, peak_lr=5e-3):
    "Return the training loss of every step."
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98))
    losses = []
    model.train()
    for step in range(1, steps + 1):
        src, tgt = task(48, generator)
        loss = F.cross_entropy(model(src, tgt[:, :-1]).flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]['lr'] = peak_lr * min(1, step / 30)
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def share_correct(model, n_pairs=200):
    "Return the share of new sequences that greedy decoding reverses correctly."
    src, tgt = task(n_pairs, torch.Generator().manual_seed(99))
    output = tgt[:, :1]
    for _ in range(tgt.size(1) - 1):
        output = torch.cat([output, model(src, output)[:, -1:].argmax(-1)], 1)
    return ((output == tgt) | (tgt == PAD)).all(1).float().mean().item()


def train_and_test(name, seed, steps):
    "Train a model, save and load its weights, and decode. What raises an error is recorded as None."
    losses = []
    share = None
    with context(name):
        try:
            model = build(name, seed)
            losses = train(model, steps, seed)
            reloaded = build(name, seed=99)
            reloaded.load_state_dict(model.state_dict())
            share = share_correct(reloaded.eval())
        except (RuntimeError, UnboundLocalError) as error:
            print(f'{name}: {type(error).__name__}: {str(error)[:90]}')
    means = torch.tensor(losses)[:len(losses) // EVERY * EVERY].view(-1, EVERY).mean(1)
    return {'seed': seed, 'losses': [round(x, 4) for x in means.tolist()],
            'correct': None if share is None else round(share, 4)}


def main():
    from record import RESULTS, about
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', action='append', help='name of a bug, or correct; may be repeated')
    parser.add_argument('--steps', type=int, default=500, help='of each training run (500)')
    parser.add_argument('--no-training', action='store_true', help='keep the recorded training runs')
    args = parser.parse_args()
    path = RESULTS / 'bugs.json'
    old = json.loads(path.read_text('utf-8')) if path.is_file() else {}
    torch.set_num_threads(1)
    started = time.process_time()
    if unknown := set(args.only or []) - {'correct', *BUGS}:
        parser.error(f'unknown bugs: {sorted(unknown)}')
    rows = {}
    for name in (None, *BUGS):
        label = name or 'correct'
        row = old.get('bugs', {}).get(label, {}) if 'checks' in old else {} # not from version 0.1.0
        if not args.only or label in args.only:
            report = check(name)
            row = {'family': BUGS[name].family if name else '', 'found_by': BUGS[name].found_by if name else '',
                   'failed': report.failed, 'not_applicable': report.not_applicable, 'runs': row.get('runs', [])}
            if not args.no_training:
                row['runs'] = [train_and_test(name, seed, args.steps) for seed in SEEDS]
            print(label, row['failed'], [(run['losses'][-1:], run['correct']) for run in row['runs']], flush=True)
        rows[label] = row
    held_out = {}
    for model_class, bugs in HELD_OUT.items():
        for bug in (None, *bugs):
            held_out[f'{model_class.__name__}: {bug or "correct"}'] = {
                'failed': check_held_out(model_class, bug).failed, 'named_by': bugs.get(bug, ())}
    now = about()
    trained = {name: old.get(name) for name in now} if args.no_training and 'command' in old else now
    record = {'name': 'bugs', **trained, 'checked': now, 'seeds': SEEDS, 'steps': args.steps, 'every': EVERY,
              'cpu_seconds': old['cpu_seconds'] if trained is not now else round(time.process_time() - started),
              'checks': list(CHECKS),
              'bugs': rows, 'held_out': held_out}
    atomic_write(path, json.dumps(record, indent=1) + '\n')


if __name__ == '__main__':
    main()
