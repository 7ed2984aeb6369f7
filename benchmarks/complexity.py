#!/usr/bin/env python3
"""Measure time and memory of one layer by sentence length, for the kinds of layer in Table 1.

    python benchmarks/complexity.py
    python benchmarks/complexity.py --lengths 16 64 256 --repeats 5 --out /dev/null

Attention includes its projections. Each round runs every layer once on one sentence, forward and backward; the record
has the medians over rounds. Memory is what a layer keeps for its backward pass, counted exactly.
"""
import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import tqdm

from annotated_transformer.attention import MultiHeadAttention
from annotated_transformer.complexity import restricted_attention
from annotated_transformer.files import atomic_write
from record import RESULTS, about

SEED = 1

def layers(d, n_heads, r, k):
    "Return the layers as functions of x (1, n, d)."
    def attention_layer(attention_fn=None):
        layer = MultiHeadAttention(d, n_heads)
        if attention_fn:
            layer.attention_fn = lambda query, key, value, mask=None: (attention_fn(query, key, value), None)
        return lambda x: layer(x, x, x)

    lstm = nn.LSTM(d, d, batch_first=True)
    convolution = nn.Conv1d(d, d, k, padding='same')
    return {'self-attention, equation 1': attention_layer(),
            'self-attention, fused': attention_layer(nn.functional.scaled_dot_product_attention),
            'recurrent': lambda x: lstm(x)[0],
            'convolutional': lambda x: convolution(x.mT).mT,
            'self-attention, restricted': attention_layer(partial(restricted_attention, r=r))}

def held_bytes(f):
    "Return the bytes that autograd keeps for the backward pass, without parameters; each storage counts once."
    kept = {}
    def keep(tensor):
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = (storage.nbytes(), tensor) # the reference keeps its address from being reused
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = f() # holds the graph until the sum is made
    return sum(size for size, _ in kept.values()) if result.requires_grad else 0

def once(f, x):
    "Return the seconds of the forward and of the backward pass."
    began = time.perf_counter()
    y = f(x)
    between = time.perf_counter()
    y.backward(torch.ones_like(y))
    return between - began, time.perf_counter() - between

def measure(kinds, n, d, repeats):
    "Return the measurements of each kind of layer for one length."
    x = torch.randn(1, n, d, requires_grad=True)
    took = {name: [] for name in kinds}
    for i in range(repeats + 2): # two rounds to warm up
        for name, f in kinds.items():
            found = once(f, x)
            if i > 1: took[name].append(found)
    return {name: dict(n=n, forward_ms=round(1000*statistics.median(t for t, _ in took[name]), 4),
                       backward_ms=round(1000*statistics.median(t for _, t in took[name]), 4),
                       held_mib=round(held_bytes(lambda: f(x)) / 2**20, 4)) for name, f in kinds.items()}

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--lengths', type=int, nargs='+', default=[16, 32, 64, 128, 256, 512, 1024, 2048],
                        help='words in the sentence')
    parser.add_argument('--d', type=int, default=128, help='width of the layers (128)')
    parser.add_argument('--heads', type=int, default=4, help='of attention (4)')
    parser.add_argument('--r', type=int, default=33, help='neighbourhood of restricted attention (33)')
    parser.add_argument('--k', type=int, default=3, help="width of the convolution's kernel (3)")
    parser.add_argument('--repeats', type=int, default=15, help='rounds that count (15)')
    parser.add_argument('--threads', type=int, default=0, help='of torch; its own choice unless given')
    parser.add_argument('--out', type=Path, default=RESULTS/'complexity.json', help='of the record')
    args = parser.parse_args()
    if args.threads: torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    kinds = layers(args.d, args.heads, args.r, args.k)
    rows = [measure(kinds, n, args.d, args.repeats) for n in tqdm(args.lengths, unit='length')]
    record = dict(name='complexity', **about(), seed=SEED, lengths=args.lengths,
                  d=args.d, n_heads=args.heads, r=args.r, k=args.k, repeats=args.repeats,
                  metrics={name: [row[name] for row in rows] for name in kinds})
    atomic_write(args.out, json.dumps(record, indent=2) + '\n')
    for name in kinds:
        print(f'{name:28}',
              '  '.join(f"{row[name]['forward_ms'] + row[name]['backward_ms']:8.2f} ms" for row in rows))

if __name__ == '__main__':
    main()
