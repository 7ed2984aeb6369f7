#!/usr/bin/env python3
"""Move the cross-attention weights of the shipped toy model as far as possible while its output stays:
results/attention-adversaries.json, which the page on what attention shows plots.

    python benchmarks/attention_adversaries.py        # about two minutes of one core

Layer 1 only, on 30 test sentences. `points`: for each adversary, penalty and seed, the mean distance (total variation) of
the weights and of the outputs, and the alignment error of head 1.2, the one that aligns best:

- `permuted`: each row of weights is shuffled,
- `free`: an optimizer looks for new weights in every row of every sentence,
- `trained`: the query and key projections of a copy are trained on other sentences, with the same objective.

The objective rewards the distance of the weights, and penalizes a changed output (Kullback-Leibler divergence).
`by_sentence`: the distances of each sentence, and of each head, for the largest penalty and the first seed of `free`.
"""
import argparse
import copy
import time
from pathlib import Path

import numpy as np
import torch

from annotated_transformer.attention_maps import (
    alignment_error_rate, alignment_links, change_attention, strongest_links, word_indices, word_maps)
from annotated_transformer.batches import BatchLoader, collate, encode_pairs
from annotated_transformer.files import atomic_write, to_json
from annotated_transformer.toy_languages import toy_ende
from annotated_transformer.translator import Translator
from annotated_transformer.vocabulary import PAD
from record import RESULTS, about

CROSS = 'decoder.layers.1.cross_attention'
ALIGNING_HEAD = 2

def run(model, batch, edit=lambda weights: weights):
    "Return the attention weights (batch, heads, m, n) and the log-probabilities of the next tokens."
    kept = []
    def keep(weights):
        kept.append(edit(weights))
        return kept[0]
    with change_attention(model.get_submodule(CROSS), keep):
        log_probs = model(batch.src, batch.tgt_in).log_softmax(-1)
    return kept[0], log_probs

def distance(p, q):
    "Return the total variation: the share of the probability that must move."
    return (p - q).abs().sum(-1) / 2

def movement(batch, old, new):
    "Return, for each sentence, the distance of each head's weights, that of the outputs, and the KL divergence."
    is_token = (batch.tgt_out != PAD).float()
    def mean(x):
        return (x * is_token).sum(-1) / is_token.sum(-1)
    of_weights = torch.stack([mean(head) for head in distance(new[0], old[0]).unbind(1)], dim=1)
    of_output = mean(distance(new[1].exp(), old[1].exp()))
    kl = mean((old[1].exp() * (old[1] - new[1])).sum(-1))
    return of_weights, of_output, kl

def objective(batch, old, new, penalty):
    of_weights, _, kl = movement(batch, old, new)
    return (penalty * kl - of_weights.mean(1)).mean()

def permuted(model, batch):
    "Shuffle each row over the sentence's own positions."
    def permute(weights):
        noise = torch.rand_like(weights).masked_fill(batch.src[:, None, None] == PAD, 2)
        return weights.gather(-1, noise.argsort(-1))
    with torch.no_grad():
        return run(model, batch, permute)

def free(model, batch, old, penalty, args):
    "Find new weights for every row by gradient."
    shift = (0.1 * torch.randn_like(old[0])).requires_grad_()
    optimizer = torch.optim.Adam([shift], lr=0.5)
    is_key = (batch.src != PAD)[:, None, None]
    def edit(weights):
        return (weights.clamp(min=1e-9).log() + shift).masked_fill(~is_key, -1e9).softmax(-1)
    for _ in range(args.free_steps):
        optimizer.zero_grad()
        objective(batch, old, run(model, batch, edit), penalty).backward()
        optimizer.step()
    with torch.no_grad():
        return run(model, batch, edit)

def trained(model, batches, outputs, held_out, penalty, seed, steps):
    "Train the query and key projections of a copy; return {step: its output on the held-out batch}."
    rival = copy.deepcopy(model).requires_grad_(False)
    mha = rival.get_submodule(CROSS)
    projections = [*mha.q_proj.parameters(), *mha.k_proj.parameters()]
    for parameter in projections:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(projections, lr=3e-3)
    order = np.random.default_rng(seed).permutation(len(batches))
    found = {}
    for step in range(1, max(steps) + 1):
        i = order[step % len(order)]
        optimizer.zero_grad()
        objective(batches[i], outputs[i], run(rival, batches[i]), penalty).backward()
        optimizer.step()
        if step in steps:
            with torch.no_grad():
                found[step] = run(rival, held_out)
    return found

def alignment_error(pairs, translator, weights):
    "Return the alignment error rate of the head that aligns best, with these weights (batch, heads, m, n)."
    found = []
    for pair, rows in zip(pairs, weights[:, ALIGNING_HEAD]):
        src = translator.tokenizer.tokens(translator.encode([pair.src])[0])
        tgt = translator.tokenizer.tokens(translator.encode([pair.tgt], 'tgt')[0]) + ['<eos>']
        queries, keys = word_indices(tgt, pair.tgt_words), word_indices(src, pair.src_words)
        found.append(strongest_links(word_maps(rows[:len(queries), :len(keys)], queries, keys)))
    return alignment_error_rate(found, [alignment_links(pair.alignment) for pair in pairs])

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--sentences', type=int, default=30, help='of test (30)')
    parser.add_argument('--penalties', type=float, nargs='+', default=[10.0, 30.0, 100.0])
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--free-steps', type=int, default=30, help='of the free adversary (30)')
    parser.add_argument('--steps', type=int, nargs='+', default=[30, 100], help='of the trained one (30 100)')
    parser.add_argument('--out', type=Path, default=RESULTS / 'attention-adversaries.json')
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.process_time()
    translator = Translator.load(device='cpu')
    model = translator.model
    langs = translator.tokenizer.langs
    pairs = toy_ende('test', n=args.sentences)
    held_out = collate(encode_pairs([(pair.src, pair.tgt) for pair in pairs], translator.tokenizer, langs))
    train_ids = encode_pairs([(pair.src, pair.tgt) for pair in toy_ende('train', n=3000)], translator.tokenizer, langs)
    batches = list(BatchLoader(train_ids, 600, seed=0).epoch(0))
    with torch.no_grad():
        old = run(model, held_out)
        outputs = [run(model, batch) for batch in batches]
    points = {}
    def add(name, penalty, seed, new):
        of_weights, of_output, _ = movement(held_out, old, new)
        row = {'penalty': penalty, 'seed': seed, 'weights': round(of_weights.mean().item(), 4),
               'output': round(of_output.mean().item(), 5),
               'alignment_error': round(alignment_error(pairs, translator, new[0]), 4)}
        points.setdefault(name, []).append(row)
        print(name, row, flush=True)
        return of_weights, of_output
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        add('permuted', None, seed, permuted(model, held_out))
        for penalty in args.penalties:
            moved = add('free', penalty, seed, free(model, held_out, old, penalty, args))
            if seed == 0:
                of_weights, of_output = moved # of the last penalty in the end
            for step, new in trained(model, batches, outputs, held_out, penalty, seed, args.steps).items():
                add(f'trained, {step} steps', penalty, seed, new)
    by_sentence = {'output': of_output} | {f'head 1.{i}': x for i, x in enumerate(of_weights.unbind(1))}
    settings = {name: value for name, value in vars(args).items() if name != 'out'}
    record = about() | {
        'name': 'attention-adversaries', 'settings': settings, 'points': points,
        'alignment_error': round(alignment_error(pairs, translator, old[0]), 4),
        'by_sentence': {name: [round(v, 5) for v in x.tolist()] for name, x in by_sentence.items()},
        'cpu_seconds': round(time.process_time() - start)}
    atomic_write(args.out, to_json(record))

if __name__ == '__main__':
    main()
