#!/usr/bin/env python3
"""Remove heads of the shipped toy model in several orders, and train gates with several seeds:
results/head-orders.json, which the page on pruning heads plots.

    python benchmarks/head_orders.py        # about 13 minutes of one core
    python benchmarks/head_orders.py --add  # keep what the record has, and measure what it lacks

`orders`: for each order and number of removed heads, which test sentences are still translated exactly right
(a string of 0 and 1). Importance is measured on the first training sentences, except by *other sentences*; *one by
one* measures again after each removal. The random orders differ by their seed. `removed_heads`: the orders, the first removed head
first.
`gates`: for each seed and penalty for an open head, the share of exact translations

- `learned`: of the model that was trained with gates,
- `by_gates_trained`: with the heads that the gates left open, but trained from the original weights, without gates,
- `by_ablation_trained`, `by_gradient_trained`, `random_trained`: the same with as many heads, chosen by zero
  ablation, by gradient or at random,
- `by_gradient`: with the heads chosen by gradient, without training.

All training takes the same number of steps on the same batches.
"""
import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

from annotated_transformer.batches import BatchLoader, encode_pairs
from annotated_transformer.causal_tests import head_outputs
from annotated_transformer.files import atomic_write, to_json
from annotated_transformer.heads import (
    gradient_importance, heads_of, leave_one_out, normalized, prune_heads, tune_gates)
from annotated_transformer.toy_languages import toy_ende
from annotated_transformer.training import validate
from annotated_transformer.translator import Translator
from record import RESULTS, about

def exact(translator: Translator, model, pairs) -> str:
    "Return a 1 for each sentence whose greedy translation equals the reference, and a 0 for each other."
    translations = Translator(model, translator.tokenizer).translate([pair.src for pair in pairs], beam_size=1)
    return ''.join(str(int(found == pair.tgt)) for found, pair in zip(translations, pairs))

def share(bits: str) -> float:
    return round(bits.count('1') / len(bits), 4)

def batches(translator: Translator, pairs, max_tokens: int, **options) -> list:
    pairs = [(pair.src, pair.tgt) for pair in pairs]
    ids = encode_pairs(pairs, translator.tokenizer, translator.tokenizer.langs)
    return list(BatchLoader(ids, max_tokens, **options).epoch(0))

def shuffled(heads: list, seed: int) -> list:
    order = list(heads)
    random.Random(seed).shuffle(order)
    return order

def label(head) -> str:
    "Name a head as the record does, such as 'cross 1.2'; the page writes cross L1H2."
    return f'{head.kind} {head.layer}.{head.number}'

def one_by_one(model, n: int, measure) -> list:
    "Remove the head whose ablation costs least, measure the others again, and so on; return the removed heads."
    removed = []
    for _ in range(n):
        worth = leave_one_out(model, measure)
        removed.append(min(worth, key=worth.get))
        model = prune_heads(model, removed[-1:])
    return removed

def measure_gates(translator, args, earlier) -> list[dict]:
    "Return a row for each seed and penalty; of earlier rows, measure only what they lack."
    model = translator.model
    heads = heads_of(model)
    some = batches(translator, toy_ende('train', n=args.pairs), 2048, shuffle=False)
    by_gradient = sorted(heads, key=gradient_importance(model, some).get)
    by_ablation = sorted(heads, key=leave_one_out(model, lambda model: validate(model, some)).get)
    train = toy_ende('train', n=20_000)
    pairs = toy_ende('test', n=args.sentences)
    rows = []
    for seed in range(1, args.seeds + 1):
        steps = batches(translator, train, args.max_tokens, seed=seed)[:args.steps]
        for penalty in args.penalties:
            row = next((row for row in earlier if (row['seed'], row['penalty']) == (seed, penalty)), None)
            if row is None:
                learned = tune_gates(model, steps, heads, penalty, seed=seed)
                row = {'seed': seed, 'penalty': penalty, 'kept': len(heads_of(learned)),
                       'learned': share(exact(translator, learned, pairs)), 'kept_heads': learned.config.kept_heads}
            n_removed = len(heads) - row['kept']
            closed = [head for head in heads if head.number not in row['kept_heads'].get(head.attention, [head.number])]
            removed = {'by_gates': closed, 'by_ablation': by_ablation[:n_removed],
                       'by_gradient': by_gradient[:n_removed], 'random': shuffled(heads, seed)[:n_removed]}
            for name, chosen in removed.items():
                if f'{name}_trained' not in row:
                    trained = tune_gates(prune_heads(model, chosen), steps, [], 0.0, seed=seed)
                    row[f'{name}_trained'] = share(exact(translator, trained, pairs))
            if 'by_gradient' not in row:
                row['by_gradient'] = share(exact(translator, prune_heads(model, removed['by_gradient']), pairs))
            print({name: value for name, value in row.items() if name != 'kept_heads'}, flush=True)
            rows.append(row)
    return rows

def measure_orders(translator, args, earlier) -> dict:
    "Return {part of the record: {order: its results}}; orders that were measured earlier are not measured again."
    model = translator.model
    heads = heads_of(model)
    train = list(toy_ende('train', n=2 * args.pairs))
    some = batches(translator, train[:args.pairs], 2048, shuffle=False)
    others = batches(translator, train[args.pairs:], 2048, shuffle=False)
    outputs = head_outputs(model, some)
    def loss(model):
        return validate(model, some)
    gradient = gradient_importance(model, some)
    draws = [leave_one_out(model, loss, 'resample', outputs, seed) for seed in range(args.draws)]
    resample = {head: statistics.mean(draw[head] for draw in draws) for head in heads}
    on_others = leave_one_out(model, lambda model: validate(model, others))
    orders = {'gradient': sorted(heads, key=gradient.get),
              'gradient, normalized': sorted(heads, key=normalized(gradient).get),
              'gradient, largest first': sorted(heads, key=gradient.get, reverse=True),
              'zero ablation': sorted(heads, key=leave_one_out(model, loss).get),
              'zero ablation, other sentences': sorted(heads, key=on_others.get),
              'zero ablation, one by one': one_by_one(model, max(args.removed), loss),
              'resample ablation': sorted(heads, key=resample.get)}
    for seed in range(args.random):
        orders[f'random {seed}'] = shuffled(heads, seed)
    pairs = toy_ende('test', n=args.sentences)
    found = {'orders': dict(earlier), 'removed_heads': {}}
    for name, order in orders.items():
        found['removed_heads'][name] = [label(head) for head in order]
        if name not in earlier:
            found['orders'][name] = {n: exact(translator, prune_heads(model, order[:n]), pairs) for n in args.removed}
            print(name, {n: share(bits) for n, bits in found['orders'][name].items()}, flush=True)
    return found

def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--sentences', type=int, default=300, help='of test (300)')
    parser.add_argument('--pairs', type=int, default=300, help='of train, to measure importance (300)')
    parser.add_argument('--draws', type=int, default=5, help='seeds of resample ablation, averaged (5)')
    parser.add_argument('--random', type=int, default=20, help='random orders (20)')
    parser.add_argument('--removed', type=int, nargs='+', default=list(range(0, 21, 2)),
                        help='numbers of removed heads (0 2 4 … 20)')
    parser.add_argument('--seeds', type=int, default=8, help='of the training with gates (8)')
    parser.add_argument('--penalties', type=float, nargs='+', default=[0.03, 0.07, 0.15],
                        help='for each open head, in nats per target token')
    parser.add_argument('--steps', type=int, default=60, help='of training (60)')
    parser.add_argument('--max-tokens', type=int, default=512, help='of a training batch (512)')
    parser.add_argument('--add', action='store_true', help='measure only what the record lacks')
    parser.add_argument('--out', type=Path, default=RESULTS / 'head-orders.json')
    return parser.parse_args()

def main():
    args = arguments()
    torch.set_num_threads(1)
    start = time.process_time()
    translator = Translator.load(device='cpu')
    settings = {name: value for name, value in vars(args).items() if name not in ('add', 'out')}
    earlier = json.loads(args.out.read_text('utf-8')) if args.add else {}
    if earlier and earlier['settings'] != settings:
        raise SystemExit(f'{args.out} was measured with other settings: leave out --add')
    record = about() | {'name': 'head-orders', 'settings': settings,
                        'gates': measure_gates(translator, args, earlier.get('gates', []))}
    record |= measure_orders(translator, args, earlier.get('orders', {}))
    record['cpu_seconds'] = round(time.process_time() - start)
    if earlier:
        record['command'] = f"{earlier['command']}; {record['command']}"
        record['cpu_seconds'] += earlier['cpu_seconds']
    atomic_write(args.out, to_json(record))

if __name__ == '__main__':
    main()
