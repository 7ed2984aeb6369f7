#!/usr/bin/env python3
"""What the heads of a trained model are worth, and what is left of it without them:
results/heads.json, which page 31 plots.

    python benchmarks/heads.py --model runs/multi30k --made 'annotated-transformer train …'
        # about a quarter of an hour of one core
    python benchmarks/heads.py --model runs/multi30k --only speed
        # one part again; it takes its place in the record

`importance`: of each head, by gradient and by leaving it out, on training pairs, and by the BLEU that
is lost without it. BLEU is always of the first sentences of `val`, decoded greedily. `curves`: heads
are taken out in the order of importance, of one kind or of all, and nothing is trained; for
comparison the most important first. `gates`: stochastic gates, with which the model is trained on for
a few steps, at several prices of an open head. Since that training helps by itself, the model with as
many heads by the gradient's choice is trained on for as many steps on the same batches. `speed`:
seconds of the processor, the whole model and smaller ones in turn; the median of each round's ratios.
"""
import argparse, json, shlex, statistics, sys, time
from dataclasses import asdict
from pathlib import Path

import torch

from annotated_transformer.v1.batches import BatchLoader, encode_pairs, pad_rows
from annotated_transformer.v1.checkpoints import fingerprint, origin
from annotated_transformer.v1.corpora import CorpusConfig, load_corpus
from annotated_transformer.v1.decoding import greedy
from annotated_transformer.v1.heads import (
    KINDS, Head, gradient_importance, heads_of, leave_one_out, normalized,
    prune_heads, pruning_curve, rank_correlation, tune_gates)
from annotated_transformer.v1.recipe import evaluate
from annotated_transformer.v1.training import validate
from annotated_transformer.v1.transformer import count_parameters
from annotated_transformer.v1.translator import ModelFolder, Translator
from annotated_transformer.v1.visualize import head_habits
from annotated_transformer.v1.vocabulary import write_whole
from record import RESULTS, about

ROOT = Path(__file__).parents[1]
GROUPS = {**{kind: (kind,) for kind in KINDS}, 'all': KINDS}

class Experiment:
    "A model, and the pairs it is measured and trained on."
    def __init__(self, args):
        self.args, self.folder = args, ModelFolder.load(args.model, 'cpu')
        made = origin(args.model).get('run', {}).get('corpus', {})
        corpus = load_corpus(CorpusConfig(**made | ({'data_dir': args.data_dir} if args.data_dir else {})))
        self.model, self.val, train = self.folder.model, list(corpus['val'])[:args.sentences], list(corpus['train'])
        self.some = self.batches(train[:args.pairs], 2048, shuffle=False)
        self.training = self.batches(train[args.pairs:], args.max_tokens, seed=args.seed)[:args.steps]

    def batches(self, pairs, max_tokens, **options):
        tokenizer = self.folder.tokenizer
        return list(BatchLoader(encode_pairs(pairs, tokenizer, tokenizer.langs, self.model.config.max_len),
                                max_tokens, **options).epoch(0))

    def bleu(self, model):
        return round(evaluate(Translator(model, self.folder.tokenizer), self.val, beam_size=1)[0].bleu, 2)

    def tuned(self, model, heads, price):
        return tune_gates(model, self.training, heads, price, self.args.rate, self.args.gate_rate, seed=self.args.seed)

def entropies(run):
    "How widely each head looks, on the validation sentences and their references."
    translator = Translator(run.model, run.folder.tokenizer)
    maps = [translator.attention(*pair) for pair in run.val]
    habits = {kind: head_habits([getattr(each, kind) for each in maps])['entropy'] for kind in KINDS}
    return {head: float(habits[head.kind][head.layer][head.number]) for head in heads_of(run.model)}

def importance(run, metrics):
    "A row for each head, and how far the measures agree."
    whole = run.bleu(run.model)
    worth = dict(gradient=gradient_importance(run.model, run.some),
                 loss=leave_one_out(run.model, lambda model: validate(model, run.some)),
                 bleu={head: whole - run.bleu(prune_heads(run.model, [head])) for head in heads_of(run.model)},
                 entropy=entropies(run))
    rows = [head._asdict() | dict(kind=head.kind, layer=head.layer)
            | {name: round(x[head], 6) for name, x in worth.items()}
            for head in heads_of(run.model)]
    agree = {f'{a} and {b}': round(rank_correlation(worth[a], worth[b]), 3)
             for a, b in (('gradient', 'loss'), ('gradient', 'bleu'), ('loss', 'bleu'), ('gradient', 'entropy'))}
    print(f'BLEU {whole}; rank correlations {agree}', flush=True)
    return dict(bleu=whole, parameters=count_parameters(run.model), heads=rows, rank_correlation=agree)

def worth_of(metrics, name): return {Head(row['attention'], row['number']): row[name] for row in metrics['heads']}

def curves(run, metrics):
    "{group: {order: {heads left: BLEU}}}"
    gradient, loss, found = worth_of(metrics, 'gradient'), worth_of(metrics, 'loss'), {}
    for group, kinds in GROUPS.items():
        def order(worth): return sorted(heads_of(run.model, *kinds), key=worth.get)
        orders = {'least first, by gradient': order(gradient),
                  'least first, by leaving out': order(loss),
                  'most first, by gradient': order(gradient)[::-1]}
        if group == 'all': orders['least first, by gradient and layer'] = order(normalized(gradient))
        steps = range(0, len(order(loss)) + 1, run.args.every*len(kinds))
        found[group] = {name: pruning_curve(run.model, heads, run.bleu, steps) for name, heads in orders.items()}
        for name, curve in found[group].items(): print(f'{group:8} {name:36} {curve}', flush=True)
    return dict(curves=found)

def gates(run, metrics):
    "{group: a row for each price}, and what the training does to the whole model"
    gradient, found = worth_of(metrics, 'gradient'), {group: [] for group in GROUPS}
    for group, kinds in GROUPS.items():
        heads = heads_of(run.model, *kinds)
        for price in run.args.prices:
            learned = run.tuned(run.model, heads, price)
            kept = len(heads_of(learned, *kinds))
            ranked = prune_heads(run.model, sorted(heads, key=gradient.get)[:len(heads) - kept])
            row = dict(price=price, kept=kept, bleu=run.bleu(learned), by_gradient=run.bleu(ranked),
                       by_gradient_trained=run.bleu(run.tuned(ranked, [], 0.)))
            found[group].append(row | dict(kept_heads=learned.config.kept_heads))
            print(group, row, flush=True)
    return dict(gates=found, trained_on=run.bleu(run.tuned(run.model, [], 0.)))

def seconds(work):
    began = time.process_time()
    work()
    return time.process_time() - began

@torch.inference_mode()
def speed(run, metrics):
    "{heads left: parameters, and how many times as fast as the whole model it is}"
    gradient = worth_of(metrics, 'gradient')
    order, n = sorted(gradient, key=normalized(gradient).get), len(gradient)
    models = {n - k: prune_heads(run.model, order[:k]).eval() for k in (0, n//4, n//2, 3*n//4)}
    rows = sorted(run.folder.encode([src for src, _ in run.val]), key=len)
    src, batch = pad_rows(rows[len(rows)//2 - 32:len(rows)//2 + 32]), run.some[len(run.some)//2]
    tasks = dict(forward=lambda model: model.states(batch.src, batch.tgt_in), encode=lambda model: model.encode(src),
                 decode=lambda model: greedy(model, src, min_len=20, max_extra=0))      # nobody ends early
    found = {kept: dict(parameters=count_parameters(model), of_attention=attention_parameters(model))
             for kept, model in models.items()}
    for task, work in tasks.items():
        for model in models.values(): work(model)
        rounds = [{kept: seconds(lambda: work(model)) for kept, model in models.items()}
                  for _ in range(run.args.repeats)]
        for kept in models:
            found[kept][task] = round(statistics.median(r[n]/r[kept] for r in rounds), 3)
            found[kept][f'{task}_seconds'] = round(statistics.median(r[kept] for r in rounds), 4)
    for kept, row in found.items(): print(kept, row, flush=True)
    return dict(speed=found)

def attention_parameters(model): return sum(p.numel() for name, p in model.named_parameters() if '_attention' in name)

PARTS = dict(importance=importance, curves=curves, speed=speed, gates=gates)
SHARED = 'sentences', 'pairs', 'threads'
# settings
OWN = dict(importance=(), curves=('every',), speed=('repeats',),
           gates=('steps', 'max_tokens', 'prices', 'rate', 'gate_rate'))

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
    parser.add_argument('--rate', type=float, default=5e-4, help='of the weights (5e-4)')
    parser.add_argument('--gate-rate', type=float, default=0.2, help='of the gates (0.2)')
    parser.add_argument('--repeats', type=int, default=15, help='rounds of the speed measurement (15)')
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--out', type=Path, default=RESULTS/'heads.json', help='of the record')
    return parser.parse_args()

def main():
    args, began = arguments(), time.process_time()
    torch.set_num_threads(args.threads)
    weights = fingerprint(args.model/'model.safetensors')['sha256']
    earlier = json.loads(args.out.read_text('utf-8')) if args.only and args.out.is_file() else {}
    if earlier and earlier['weights_sha256'] != weights:
        raise SystemExit(f'{args.out} is of another model: measure all parts')
    if (earlier and any(earlier['settings'][k] != getattr(args, k) for k in SHARED)
            or earlier.get('seed', args.seed) != args.seed):
        raise SystemExit(f'{args.out} was measured with other --{", --".join(SHARED)} or --seed: '
                         'give the same, or measure all parts')
    run, metrics = Experiment(args), earlier.get('metrics', {})
    for name in args.only or PARTS: metrics |= PARTS[name](run, metrics)
    settings = {k: getattr(args, k) for k in sum(([*OWN[name]] for name in args.only or PARTS), [*SHARED])}
    given = [word for word in sys.argv[1:] if word not in (args.made, '--made')]
    shown = ['MODEL' if word == str(args.model) else word for word in given]
    record = about() | dict(name='heads', command=shlex.join(['python', 'benchmarks/heads.py', *shown]),
                            model_command=args.made, seed=args.seed,
                            cpu_seconds=round(time.process_time() - began), metrics=metrics,
                            settings=settings | dict(model=asdict(run.model.config)), weights_sha256=weights)
    if earlier:
        record |= dict(command=f"{earlier['command']}; {record['command']}",
                       model_command=earlier['model_command'], settings=earlier['settings'] | settings,
                       cpu_seconds=earlier['cpu_seconds'] + record['cpu_seconds'])
    write_whole(args.out, json.dumps(record, indent=1) + '\n')

if __name__ == '__main__': main()
