#!/usr/bin/env python3
"""Plant a second set of held-out bugs, in two models that no check was written for: Marian from Hugging Face, and a
Transformer in the style of "Dive into Deep Learning" (d2l). Page 45 reads the record.

    python benchmarks/more_bugs.py     # a minute of one core; needs the extra transformers

All bugs were written before any of them was run, and then tried once. `OUT_OF_REACH` names those that we expected to
be missed, also before the run. Each is planted as a user would write it: in the call of the model, or in one of its
parts.
"""
import argparse
import json
import math
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from annotated_transformer.checks import CHECKS, check_transformer
from annotated_transformer.files import atomic_write
from record import RESULTS, about

PAD = 22           # of Marian; the other model has 0
VOCAB_SIZE = 23


# --- Marian from Hugging Face

MARIAN_BUGS = ('attention_mask left out', 'attention_mask inverted', 'mask of the source reversed in the batch',
               'decoder without causal mask', 'encoder without positions', 'positions of the decoder shifted',
               'bias of the logits not saved', 'output layer untied', 'embeddings scaled twice',
               'encoder output detached', 'dropout always on')

def marian(bug=None):
    "Return a new model, with a bug that lies in one of its parts."
    from transformers import MarianConfig, MarianMTModel
    config = MarianConfig(
        vocab_size=VOCAB_SIZE, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=16,
        pad_token_id=PAD, decoder_start_token_id=PAD, eos_token_id=0, scale_embedding=True,
        tie_word_embeddings=bug != 'output layer untied')
    model = MarianMTModel(config)
    encoder = model.model.encoder
    decoder = model.model.decoder
    if bug == 'encoder without positions':
        nn.init.zeros_(encoder.embed_positions.weight)
    if bug == 'positions of the decoder shifted':
        decoder.embed_positions.register_forward_hook(lambda module, args, output: module.weight[1:1 + len(output)])
    if bug == 'bias of the logits not saved':
        del model.final_logits_bias
        model.register_buffer('final_logits_bias', torch.randn(1, VOCAB_SIZE), persistent=False)
    if bug == 'embeddings scaled twice':
        encoder.embed_scale *= 2
        decoder.embed_scale *= 2
    if bug == 'encoder output detached':
        encoder.register_forward_hook(detached)
    if bug == 'dropout always on':
        encoder.layers[0].fc2.register_forward_hook(lambda module, args, output: F.dropout(output, 0.1))
    if bug == 'decoder without causal mask':
        for layer in decoder.layers:
            layer.self_attn.register_forward_pre_hook(without_mask, with_kwargs=True)
            layer.self_attn.is_causal = False
    return model

def without_mask(module, args, kwargs):
    return args, kwargs | {'attention_mask': None}

def detached(module, args, output):
    output.last_hidden_state = output.last_hidden_state.detach()
    return output

def call_marian(bug, model, src, tgt):
    "Return the logits, with a bug that lies in the call."
    mask = src.ne(PAD).long()
    if bug == 'attention_mask left out':
        mask = None
    if bug == 'attention_mask inverted':
        mask = src.eq(PAD).long()
    if bug == 'mask of the source reversed in the batch':
        mask = mask.flip(0)
    return model(input_ids=src, attention_mask=mask, decoder_input_ids=tgt, use_cache=False).logits


# --- in the style of d2l: valid lengths in place of masks, heads in the batch axis, AddNorm

D2L_BUGS = ('valid lengths of the longest sentence', 'lengths repeated in the wrong order', 'causal in train mode only',
            'heads joined without permute', 'filled with -1e6', 'norm before the sum', 'table of positions not a buffer',
            'causal lengths from 0', 'mask on the queries', 'one AddNorm for the whole block',
            'positions added after the dropout, without scale', 'encoder output of the first block')

def masked_softmax(logits, valid_lens, bug):
    "Softmax over the first `valid_lens` keys: one length for each row of the batch, or for each query."
    if valid_lens is None:
        return logits.softmax(-1)
    if valid_lens.dim() == 1:
        valid_lens = valid_lens[:, None].expand(-1, logits.size(1))
    keys = torch.arange(logits.size(2), device=logits.device)
    masked = keys >= valid_lens[:, :, None]
    if bug == 'mask on the queries':
        queries = torch.arange(logits.size(1), device=logits.device)
        masked = queries[None, :, None] >= valid_lens[:, :, None]
    fill = -1e6 if bug == 'filled with -1e6' else torch.finfo(logits.dtype).min
    return logits.masked_fill(masked, fill).softmax(-1)

class MultiHead(nn.Module):
    "Attention whose heads lie in the batch axis."
    def __init__(self, d, n_heads, bug):
        super().__init__()
        self.n_heads = n_heads
        self.bug = bug
        self.W_q = nn.Linear(d, d, bias=False)
        self.W_k = nn.Linear(d, d, bias=False)
        self.W_v = nn.Linear(d, d, bias=False)
        self.W_o = nn.Linear(d, d, bias=False)
        self.dropout = nn.Dropout(0.1)

    def split(self, x):
        b, n, d = x.shape
        return x.reshape(b, n, self.n_heads, -1).permute(0, 2, 1, 3).reshape(b * self.n_heads, n, -1)

    def join(self, x):
        bh, n, d = x.shape
        x = x.reshape(-1, self.n_heads, n, d)
        if self.bug != 'heads joined without permute':
            x = x.permute(0, 2, 1, 3)
        return x.reshape(-1, n, self.n_heads * d)

    def forward(self, queries, keys, values, valid_lens):
        q = self.split(self.W_q(queries))
        k = self.split(self.W_k(keys))
        v = self.split(self.W_v(values))
        if valid_lens is not None:
            if self.bug == 'lengths repeated in the wrong order':
                valid_lens = valid_lens.repeat(self.n_heads, *[1] * (valid_lens.dim() - 1))
            else:
                valid_lens = valid_lens.repeat_interleave(self.n_heads, 0)
        weights = masked_softmax(q @ k.mT / math.sqrt(q.size(-1)), valid_lens, self.bug)
        return self.W_o(self.join(self.dropout(weights) @ v))

class AddNorm(nn.Module):
    def __init__(self, d, bug):
        super().__init__()
        self.bug = bug
        self.dropout = nn.Dropout(0.1)
        self.ln = nn.LayerNorm(d)

    def forward(self, x, y):
        if self.bug == 'norm before the sum':
            return x + self.ln(self.dropout(y))
        return self.ln(x + self.dropout(y))

class PositionalEncoding(nn.Module):
    def __init__(self, d, bug):
        super().__init__()
        self.bug = bug
        self.dropout = nn.Dropout(0.1)
        angles = torch.arange(20.0)[:, None] / 10_000 ** (torch.arange(0, d, 2) / d)
        table = torch.stack([angles.sin(), angles.cos()], 2).flatten(1)
        if bug == 'table of positions not a buffer':
            self.P = table
        else:
            self.register_buffer('P', table, persistent=False)

    def forward(self, x):
        if self.bug == 'positions added after the dropout, without scale':
            return self.dropout(x) + self.P[:x.size(1)].to(x.dtype)
        return self.dropout(x + self.P[:x.size(1)].to(x.dtype))

class Block(nn.Module):
    "A block of encoder or decoder."
    def __init__(self, d, n_heads, bug, cross):
        super().__init__()
        self.bug = bug
        self.attention = MultiHead(d, n_heads, bug)
        self.addnorm1 = AddNorm(d, bug)
        if cross:
            self.cross_attention = MultiHead(d, n_heads, bug)
            self.addnorm2 = AddNorm(d, bug)
        self.ffn = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))
        self.addnorm3 = self.addnorm1 if bug == 'one AddNorm for the whole block' else AddNorm(d, bug)

    def forward(self, x, valid_lens, memory=None, memory_lens=None):
        x = self.addnorm1(x, self.attention(x, x, x, valid_lens))
        if memory is not None:
            x = self.addnorm2(x, self.cross_attention(x, memory, memory, memory_lens))
        return self.addnorm3(x, self.ffn(x))

class D2lStyle(nn.Module):
    "An encoder-decoder in the style of d2l: untied, post-norm, valid lengths in place of masks."
    def __init__(self, bug=None, d=24, n_heads=4):
        super().__init__()
        self.bug = bug
        self.d = d
        self.src_embedding = nn.Embedding(VOCAB_SIZE, d)
        self.tgt_embedding = nn.Embedding(VOCAB_SIZE, d)
        nn.init.normal_(self.src_embedding.weight, std=d ** -0.5)
        nn.init.normal_(self.tgt_embedding.weight, std=d ** -0.5)
        self.pos_encoding = PositionalEncoding(d, bug)
        self.encoder_blks = nn.ModuleList(Block(d, n_heads, bug, False) for _ in range(2))
        self.decoder_blks = nn.ModuleList(Block(d, n_heads, bug, True) for _ in range(2))
        self.dense = nn.Linear(d, VOCAB_SIZE)

    def embed(self, embedding, ids):
        scale = 1.0 if self.bug == 'positions added after the dropout, without scale' else math.sqrt(self.d)
        return self.pos_encoding(embedding(ids) * scale)

    def forward(self, src, tgt, src_valid_len):
        x = self.embed(self.src_embedding, src)
        if self.bug == 'valid lengths of the longest sentence':
            src_valid_len = src_valid_len.max().expand_as(src_valid_len)
        outputs = []
        for block in self.encoder_blks:
            x = block(x, src_valid_len)
            outputs.append(x)
        memory = outputs[0] if self.bug == 'encoder output of the first block' else outputs[-1]
        first = 0 if self.bug == 'causal lengths from 0' else 1
        steps = torch.arange(first, first + tgt.size(1), device=tgt.device).expand(len(tgt), -1)
        if self.bug == 'causal in train mode only' and not self.training:
            steps = None
        y = self.embed(self.tgt_embedding, tgt)
        for block in self.decoder_blks:
            y = block(y, steps, memory, src_valid_len)
        return self.dense(y)

def call_d2l(model, src, tgt):
    return model(src, tgt, (src != 0).sum(1))


OUT_OF_REACH = ('positions of the decoder shifted', 'embeddings scaled twice', 'norm before the sum',
                'positions added after the dropout, without scale')

def check_marian(bug=None, **options):
    "Check Marian with a bug, or the correct one."
    torch.manual_seed(0)
    call = partial(call_marian, bug)
    return check_transformer(marian(bug), call, pad=PAD, tied=True, make=partial(marian, bug), **options)

def check_d2l(bug=None, **options):
    "Check the model in the style of d2l with a bug, or the correct one."
    torch.manual_seed(0)
    return check_transformer(D2lStyle(bug), call_d2l, tied=False, make=partial(D2lStyle, bug), **options)

MODELS = {'Marian': (check_marian, MARIAN_BUGS), 'd2l style': (check_d2l, D2L_BUGS)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--correct', action='store_true', help='check only the correct models, and write nothing')
    parser.add_argument('--out', type=Path, default=RESULTS / 'more-bugs.json', help='the record (results/more-bugs.json)')
    args = parser.parse_args()
    torch.set_num_threads(1)
    started = time.process_time()
    rows = {}
    for model, (check, bugs) in MODELS.items():
        for bug in (None, *bugs):
            report = check(bug)
            name = f'{model}: {bug or "correct"}'
            rows[name] = {'failed': report.failed, 'not_applicable': report.not_applicable,
                          'expected': bool(bug) and bug not in OUT_OF_REACH}
            print(name, report.failed, '   n/a:', report.not_applicable, flush=True)
            if args.correct:
                break
    if args.correct:
        return
    record = {'name': 'more-bugs', **about(), 'cpu_seconds': round(time.process_time() - started),
              'checks': list(CHECKS), 'bugs': rows}
    atomic_write(args.out, json.dumps(record, indent=1) + '\n')


if __name__ == '__main__':
    main()
