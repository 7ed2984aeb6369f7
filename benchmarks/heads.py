#!/usr/bin/env python3
"""Measure how much the heads of a trained model matter, and how the model performs without them:
results/heads.json, which the page on pruning heads shows.

    python benchmarks/heads.py --model runs/multi30k --made 'annotated-transformer train …'
        # about a quarter of an hour of one core
    python benchmarks/heads.py --model runs/multi30k --only speed
        # measure one part again, and replace it in the record

- `importance`: the importance of each head, by gradient and by zero ablation on training pairs, and by the BLEU that is
  lost without the head. BLEU is always measured on the first sentences of `val`, decoded greedily.
- `curves`: heads of one kind or of all kinds are removed without further training, the least important first and, for
  comparison, the most important first.
- `gates`: learned gates, for several penalties on an open head (--prices). For comparison, as many heads are chosen by
  gradient, and the model is trained for as many steps on the same batches.
- `speed`: processor time. Each round measures the whole model and the smaller ones. The record has the median of the
  rounds' ratios, and the range of the middle half of the rounds.
"""
import argparse
import json
import shlex
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from annotated_transformer.batches import BatchLoader, encode_pairs, pad_rows
from annotated_transformer.corpora import CorpusConfig, load_corpus
from annotated_transformer.files import atomic_write, checksum
from annotated_transformer.heads import (
    HEAD_KINDS, Head, gradient_importance, head_statistics, heads_of, leave_one_out, normalized, prune_heads,
    pruning_curve, rank_correlation, tune_gates)
from annotated_transformer.inference import greedy
from annotated_transformer.kernels import accelerate
from annotated_transformer.recipe import evaluate
from annotated_transformer.training import validate
from annotated_transformer.transformer import count_parameters
from annotated_transformer.translator import Translator
from record import RESULTS, about

GROUPS = {kind: (kind,) for kind in HEAD_KINDS} | {'all': HEAD_KINDS}

class Experiment:
    "A model, and the pairs it is measured and trained on."
    def __init__(self, args):
        self.args = args
        self.translator = Translator.load(args.model, device='cpu')
        self.model = self.translator.model
        made = self.translator.training.get('run', {}).get('corpus', {})
        if args.data_dir:
            made = made | {'data_dir': str(args.data_dir)}
        corpus = load_corpus(CorpusConfig(**made))
        self.val = list(corpus['val'])[:args.sentences]
        train = list(corpus['train'])
        self.some = self.batches(train[:args.pairs], 2048, shuffle=False)
        self.training = self.batches(train[args.pairs:], args.max_tokens, seed=args.seed)[:args.steps]

    def batches(self, pairs, max_tokens, **options):
        tokenizer = self.translator.tokenizer
        rows = encode_pairs(pairs, tokenizer, tokenizer.langs)
        longest = self.model.config.max_len - 1
        rows = [(src, tgt) for src, tgt in rows if max(len(src), len(tgt)) <= longest]
        return list(BatchLoader(rows, max_tokens, **options).epoch(0))

    def bleu(self, model):
        scores, _ = evaluate(Translator(model, self.translator.tokenizer), self.val, beam_size=1)
        return round(scores.bleu, 2)

    def tuned(self, model, heads, price):
        args = self.args
        return tune_gates(model, self.training, heads, price, args.lr, args.gate_lr, seed=args.seed)

def entropies(run):
    "Return the entropy of each head's weights, on the validation sentences and their references."
    maps = [run.translator.attention(*pair) for pair in run.val]
    found = {kind: head_statistics([getattr(each, kind) for each in maps])['entropy'] for kind in HEAD_KINDS[:2]}
    weights = [each.cross for each in maps]
    rows = [-(w * w.clamp(min=1e-12).log()).sum(-1) for w in weights]
    found['cross'] = torch.cat(rows, dim=-1).mean(-1)
    return {head: float(found[head.kind][head.layer][head.number]) for head in heads_of(run.model)}

def importance(run, metrics):
    "A row for each head, and how far the measures agree."
    whole = run.bleu(run.model)
    heads = heads_of(run.model)
    worth = {'gradient': gradient_importance(run.model, run.some),
             'loss': leave_one_out(run.model, lambda model: validate(model, run.some)),
             'bleu': {head: whole - run.bleu(prune_heads(run.model, [head])) for head in heads},
             'entropy': entropies(run)}
    rows = [head._asdict() | {'kind': head.kind, 'layer': head.layer}
            | {name: round(x[head], 6) for name, x in worth.items()} for head in heads]
    pairs = (('gradient', 'loss'), ('gradient', 'bleu'), ('loss', 'bleu'), ('gradient', 'entropy'))
    agree = {f'{a} and {b}': round(rank_correlation(worth[a], worth[b]), 3) for a, b in pairs}
    print(f'BLEU {whole}; rank correlations {agree}', flush=True)
    return {'bleu': whole, 'parameters': count_parameters(run.model), 'heads': rows, 'rank_correlation': agree}

def worth_of(metrics, name):
    return {Head(row['attention'], row['number']): row[name] for row in metrics['heads']}

def curves(run, metrics):
    "{group: {order: {heads left: BLEU}}}"
    gradient = worth_of(metrics, 'gradient')
    loss = worth_of(metrics, 'loss')
    found = {}
    for group, kinds in GROUPS.items():
        def order(worth):
            return sorted(heads_of(run.model, *kinds), key=worth.get)
        orders = {'least first, by gradient': order(gradient), 'least first, by leaving out': order(loss),
                  'most first, by gradient': order(gradient)[::-1]}
        if group == 'all':
            orders['least first, by gradient and layer'] = order(normalized(gradient))
        steps = range(0, len(order(loss)) + 1, run.args.every * len(kinds))
        found[group] = {name: pruning_curve(run.model, heads, run.bleu, steps) for name, heads in orders.items()}
        for name, curve in found[group].items():
            print(f'{group:8} {name:36} {curve}', flush=True)
    return {'curves': found}

def gates(run, metrics):
    "{group: a row for each price}, and what the training does to the whole model"
    gradient = worth_of(metrics, 'gradient')
    found = {group: [] for group in GROUPS}
    for group, kinds in GROUPS.items():
        heads = heads_of(run.model, *kinds)
        for price in run.args.prices:
            learned = run.tuned(run.model, heads, price)
            kept = len(heads_of(learned, *kinds))
            ranked = prune_heads(run.model, sorted(heads, key=gradient.get)[:len(heads) - kept])
            row = {'price': price, 'kept': kept, 'bleu': run.bleu(learned), 'by_gradient': run.bleu(ranked),
                   'by_gradient_trained': run.bleu(run.tuned(ranked, [], 0.0))}
            found[group].append(row | {'kept_heads': learned.config.kept_heads})
            print(group, row, flush=True)
    return {'gates': found, 'trained_on': run.bleu(run.tuned(run.model, [], 0.0))}

def seconds(work):
    start = time.process_time()
    work()
    return time.process_time() - start

@torch.inference_mode()
def speed(run, metrics):
    "{heads left: parameters, and how many times as fast as the whole model it is}"
    gradient = worth_of(metrics, 'gradient')
    order = sorted(gradient, key=normalized(gradient).get)
    n = len(gradient)
    models = {n - k: accelerate(prune_heads(run.model, order[:k])).eval() for k in (0, n // 4, n // 2, 3 * n // 4)}
    rows = sorted(run.translator.encode([src for src, _ in run.val]), key=len)
    middle = len(rows) // 2
    src = pad_rows(rows[max(0, middle - 32):middle + 32])
    batch = run.some[len(run.some) // 2]
    tasks = {'forward': lambda model: model.hidden_states(batch.src, batch.tgt_in),
             'encode': lambda model: model.encode(src),
             'decode': lambda model: greedy(model, src, min_length=20, max_extra_tokens=0)} # no sentence ends early
    found = {kept: {'parameters': count_parameters(model), 'of_attention': attention_parameters(model)}
             for kept, model in models.items()}
    for task, work in tasks.items():
        for model in models.values():
            work(model)
        rounds = [{kept: seconds(lambda: work(model)) for kept, model in models.items()}
                  for _ in range(run.args.repeats)]
        for kept in models:
            ratios = sorted(r[n] / r[kept] for r in rounds)
            found[kept][task] = round(statistics.median(ratios), 3)
            found[kept][f'{task}_middle_half'] = [round(ratios[len(ratios) * i // 4], 3) for i in (1, 3)]
            found[kept][f'{task}_seconds'] = round(statistics.median(r[kept] for r in rounds), 4)
    for kept, row in found.items():
        print(kept, row, flush=True)
    return {'speed': found}

def attention_parameters(model):
    return sum(p.numel() for name, p in model.named_parameters() if '_attention' in name)

PARTS = {'importance': importance, 'curves': curves, 'speed': speed, 'gates': gates}
SHARED = ('sentences', 'pairs', 'threads')
OWN = {'importance': (), 'curves': ('every',), 'speed': ('repeats',), # settings of each part
       'gates': ('steps', 'max_tokens', 'prices', 'lr', 'gate_lr')}

def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', type=Path, required=True, help='a model folder')
    parser.add_argument('--made', default='', help='the command that made it')
    parser.add_argument('--data-dir', type=Path, help='where its corpus lies, if not where it lay in training')
    parser.add_argument('--only', action='append', choices=list(PARTS),
                        help='a part; may be repeated; the others stay as they were in the record')
    parser.add_argument('--sentences', type=int, default=200, help='of val, for BLEU (200)')
    parser.add_argument('--pairs', type=int, default=300, help='of train, for importance (300)')
    parser.add_argument('--every', type=int, default=2,
                        help='heads from one point of a curve to the next (2; of all kinds, three times as many)')
    parser.add_argument('--steps', type=int, default=60, help='of training with gates (60)')
    parser.add_argument('--max-tokens', type=int, default=1024, help='of a batch of that training (1024)')
    parser.add_argument('--prices', type=float, nargs='+', default=[0.03, 0.1, 0.3],
                        help='of an open head, in nats for each target token')
    parser.add_argument('--lr', type=float, default=5e-4, help='learning rate of the weights (5e-4)')
    parser.add_argument('--gate-lr', type=float, default=0.2, help='learning rate of the gates (0.2)')
    parser.add_argument('--repeats', type=int, default=15, help='rounds of the speed measurement (15)')
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--out', type=Path, default=RESULTS/'heads.json', help='of the record')
    return parser.parse_args()

def main():
    args = arguments()
    start = time.process_time()
    torch.set_num_threads(args.threads)
    weights = checksum(args.model / 'model.safetensors')['sha256']
    earlier = json.loads(args.out.read_text('utf-8')) if args.only and args.out.is_file() else {}
    if earlier and earlier['weights_sha256'] != weights:
        raise SystemExit(f'{args.out} is of another model: measure all parts')
    is_other = any(earlier['settings'][name] != getattr(args, name) for name in SHARED) if earlier else False
    if is_other or earlier.get('seed', args.seed) != args.seed:
        raise SystemExit(f'{args.out} was measured with other --{", --".join(SHARED)} or --seed: '
                         'give the same, or measure all parts')
    run = Experiment(args)
    metrics = earlier.get('metrics', {})
    for name in args.only or PARTS:
        metrics |= PARTS[name](run, metrics)
    names = [*SHARED, *(setting for name in args.only or PARTS for setting in OWN[name])]
    settings = {name: getattr(args, name) for name in names}
    given = [word for word in sys.argv[1:] if word not in (args.made, '--made')]
    shown = ['MODEL' if word == str(args.model) else word for word in given]
    record = about() | {
        'name': 'heads', 'command': shlex.join(['python', 'benchmarks/heads.py', *shown]), 'model_command': args.made,
        'seed': args.seed, 'cpu_seconds': round(time.process_time() - start), 'metrics': metrics,
        'settings': settings | {'model': asdict(run.model.config)}, 'weights_sha256': weights}
    if earlier:
        record |= {'command': f"{earlier['command']}; {record['command']}", 'model_command': earlier['model_command'],
                   'settings': earlier['settings'] | settings,
                   'cpu_seconds': earlier['cpu_seconds'] + record['cpu_seconds']}
    atomic_write(args.out, json.dumps(record, indent=1) + '\n')

if __name__ == '__main__':
    main()
