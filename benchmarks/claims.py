#!/usr/bin/env python3
"""Test the paper's claims with many small models on toy EN-DE. Page 41 reads the record.

    python benchmarks/claims.py                                # everything: about an hour of one core
    python benchmarks/claims.py --minutes 10                   # stop in time; run it again to continue
    python benchmarks/claims.py --quick --out /tmp/claims.json # try the script out, in a minute

Each case is trained once for each seed, with one thread: all cases with the first seed, then all with the second,
and so on. The settings were chosen in a pilot with seed 1, which is therefore left out. The cases that decide a claim
(NINE and GRID) have nine seeds; batch sizes, the scaled initialization, the outermost learning rates and cases that are
only plotted have five. Every finished run is added to the record at once, so you
can stop the script at any time.
"""
import argparse
import json
import math
import time
from functools import cache
from itertools import count
from pathlib import Path

import torch

from annotated_transformer.batches import BatchLoader, encode_pairs
from annotated_transformer.corpora import load_corpus
from annotated_transformer.files import atomic_write, read_json
from annotated_transformer.kernels import accelerate
from annotated_transformer.recipe import scale_residual_branches
from annotated_transformer.scoring import score
from annotated_transformer.training import learning_rate, make_optimizer, perplexity, train_step, validate
from annotated_transformer.transformer import Transformer, TransformerConfig
from annotated_transformer.translator import Translator
from annotated_transformer.vocabulary import train_tokenizer
from record import RESULTS, about

SEEDS = list(range(2, 11)) # nine
PEAK_LRS = (1e-3, 3e-3, 9e-3)

BASE = {
    'n_layers': 2, 'd_model': 96, 'd_ff': 192, 'n_heads': 4, 'max_len': 256, # of the model
    'peak_lr': 4e-3, 'warmup_steps': 100, 'label_smoothing': 0.1, 'max_tokens': 500,
    'warm_up': True,    # False: the peak learning rate from the first step on, until the decay begins
    'init': 'glorot',   # 'scaled': sublayers start with small outputs
    'pairs': 20_000,    # training pairs, from the beginning of the split
    'tokens': 200_000,  # target tokens to train on; pairs are repeated as needed
    'sentences': 300,   # of each test split, translated greedily; 0: none
}
FEW_PAIRS = BASE | {'d_model': 64, 'd_ff': 128, 'pairs': 500}
DEEP = BASE | {'n_layers': 4, 'd_model': 48, 'd_ff': 96, 'max_tokens': 400, 'warmup_steps': 50, 'tokens': 70_000,
               'sentences': 0}
TRAINING = ('peak_lr', 'warmup_steps', 'label_smoothing', 'max_tokens', 'warm_up', 'init', 'pairs',
            'tokens', 'sentences')

CASES = {
    'base': BASE,
    'no label smoothing': BASE | {'label_smoothing': 0.0},
    '1 head': BASE | {'n_heads': 1},
    '16 heads': BASE | {'n_heads': 16},
    'learned positions': BASE | {'positions': 'learned'},
    'few pairs, dropout 0.0': FEW_PAIRS | {'dropout': 0.0},
    'few pairs, dropout 0.1': FEW_PAIRS | {'dropout': 0.1},
    'few pairs, dropout 0.3': FEW_PAIRS | {'dropout': 0.3},
}
for placement, changes in {'post-norm': {'norm': 'post'}, 'post-norm, scaled': {'norm': 'post', 'init': 'scaled'},
                           'pre-norm': {'norm': 'pre'}}.items():
    for start, warm_up in {'warm-up': True, 'no warm-up': False}.items():
        for peak_lr in PEAK_LRS:
            CASES[f'{placement}, {start}, {peak_lr:g}'] = DEEP | changes | {'warm_up': warm_up, 'peak_lr': peak_lr}
for max_tokens in (250, 1000): # the warm-up lasts for as many tokens as in the base case, which has batches of 500
    for peak_lr in (2e-3, 4e-3, 8e-3):
        CASES[f'batch {max_tokens}, {peak_lr:g}'] = BASE | {
            'peak_lr': peak_lr, 'max_tokens': max_tokens, 'sentences': 0,
            'warmup_steps': BASE['warmup_steps'] * BASE['max_tokens'] // max_tokens}
NINE = ('base', 'no label smoothing', '1 head', 'learned positions', 'few pairs, dropout 0.0', 'few pairs, dropout 0.1')
for placement, peak_lr in {'post-norm': 3e-4, 'pre-norm': 2.7e-2}.items(): # at the edge
    for start in ('warm-up', 'no warm-up'):
        CASES[f'{placement}, {start}, {peak_lr:g}'] = CASES[f'{placement}, {start}, 0.003'] | {'peak_lr': peak_lr}
GRID = [f'{norm}, {start}, {peak_lr:g}' for norm in ('post-norm', 'pre-norm') for start in ('warm-up', 'no warm-up')
        for peak_lr in PEAK_LRS]
N_SEEDS = {name: 9 if name in NINE or name in GRID else 5 for name in CASES}
QUICK = {'tokens': 2000, 'pairs': 200, 'sentences': 5}


@cache
def data():
    "Load the corpus and train its tokenizer."
    corpus = load_corpus('toy-ende')
    return corpus, train_tokenizer('bpe', corpus['train'], corpus.langs, 1000)

def encoded(split, n=None):
    "Encode the first pairs of a split."
    corpus, tokenizer = data()
    return encode_pairs(corpus[split][:n], tokenizer, corpus.langs)

def lr_at(step, settings):
    "Return the learning rate of equation 3. Without warm-up, the peak lasts until the decay begins."
    if not settings['warm_up']:
        step = max(step, settings['warmup_steps'])
    return learning_rate(step, settings['peak_lr'], settings['warmup_steps'])

def train(model, settings, seed):
    "Train on a number of target tokens, and return the losses. Stops early if the loss is no longer finite."
    loader = BatchLoader(encoded('train', settings['pairs']), settings['max_tokens'], seed=seed)
    optimizer = make_optimizer(model)
    losses = []
    n_tokens = 0
    for epoch in count():
        for batch in loader.epoch(epoch):
            lr = lr_at(len(losses) + 1, settings)
            losses.append(train_step(model, batch, optimizer, lr, settings['label_smoothing']))
            n_tokens += batch.n_tokens
            if n_tokens >= settings['tokens'] or not math.isfinite(losses[-1]):
                return losses

def run(settings, seed):
    "Train one model with one seed, and score it."
    corpus, tokenizer = data()
    sizes = {name: value for name, value in settings.items() if name not in TRAINING}
    start = time.process_time()
    torch.manual_seed(seed)
    model = Transformer(TransformerConfig(vocab_size=len(tokenizer), **sizes))
    if settings['init'] == 'scaled':
        scale_residual_branches(model)
    model = accelerate(model)
    losses = train(model, settings, seed)
    means = [sum(losses[i:i + 10]) / len(losses[i:i + 10]) for i in range(0, len(losses), 10)]
    result = {'seed': seed, 'steps': len(losses), 'train_loss': [round(mean, 3) for mean in means]} # of every 10 steps
    for split in ('val', 'test'):
        loss = validate(model, BatchLoader(encoded(split), 4000, shuffle=False).epoch(0))
        result[f'{split}_loss'] = round(loss, 4)
        result[f'{split}_perplexity'] = round(perplexity(loss), 4)
    translator = Translator(model, tokenizer)
    for split in ('test', 'test_long') if settings['sentences'] else ():
        pairs = corpus[split][:settings['sentences']]
        translations = translator.translate([src for src, _ in pairs], beam_size=1)
        result[f'{split}_bleu'] = round(score(translations, [tgt for _, tgt in pairs]).bleu, 2)
    result['cpu_seconds'] = round(time.process_time() - start, 1)
    return result

def open_record(path, cases):
    "Return the record so far, or an empty one. Exits if it holds runs with other settings."
    record = read_json(path, default={'name': 'claims', 'corpus': 'toy-ende', 'cases': {}})
    for name, settings in cases.items():
        case = record['cases'].setdefault(name, {'settings': settings, 'runs': []})
        if case['settings'] != settings:
            raise SystemExit(f'{path} holds other settings of {name!r}: choose another --out')
    return record

def write(path, record):
    "Write the record; a list of numbers takes one line."
    lines = []
    for name, case in record['cases'].items():
        runs = ',\n    '.join(json.dumps(run) for run in case['runs'])
        lines.append(f'  {json.dumps(name)}: {{\n   "settings": {json.dumps(case["settings"])},\n'
                     f'   "runs": [\n    {runs}]}}')
    head = {name: value for name, value in record.items() if name != 'cases'}
    text = json.dumps(head, indent=1)[:-2] + ',\n "cases": {\n' + ',\n'.join(lines) + '\n }\n}\n'
    assert json.loads(text) == record
    atomic_write(path, text)

def planned_runs(names, seeds=None):
    "Return pairs of a seed and a case, in the order of training."
    return [(seed, name) for seed in seeds or SEEDS for name in names if seeds or seed in SEEDS[:N_SEEDS[name]]]

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', action='append', choices=list(CASES), help='a case; may be repeated')
    parser.add_argument('--seeds', type=int, nargs='+', help='seeds of each case (from 2 on)')
    parser.add_argument('--minutes', type=float, help='start no run after this time')
    parser.add_argument('--quick', action='store_true', help='train each model for a few steps, with two seeds')
    parser.add_argument('--out', type=Path, default=RESULTS / 'claims.json', help='the record (results/claims.json)')
    args = parser.parse_args()
    if args.quick and args.out == RESULTS / 'claims.json':
        parser.error('--quick needs another --out, to keep the record')
    torch.set_num_threads(1)
    cases = {name: CASES[name] | (QUICK if args.quick else {}) for name in args.only or CASES}
    record = open_record(args.out, cases) | about()
    deadline = time.monotonic() + 60 * (math.inf if args.minutes is None else args.minutes)
    for seed, name in planned_runs(cases, [2, 3] if args.quick else args.seeds):
        runs = record['cases'][name]['runs']
        if any(run['seed'] == seed for run in runs):
            continue
        if time.monotonic() > deadline:
            return
        runs.append(run(cases[name], seed))
        write(args.out, record)
        print(f'seed {seed}, {name}: ' + ', '.join(f'{key} {runs[-1][key]}' for key in runs[-1]
                                                   if key not in ('seed', 'train_loss')), flush=True)

if __name__ == '__main__':
    main()
