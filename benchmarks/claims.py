#!/usr/bin/env python3
"""The paper's claims, measured small: many little models, three seeds each, on the toy EN-DE corpus.

    python benchmarks/claims.py                   # all of it: about 25 minutes of one core, two runs at a time
    python benchmarks/claims.py --only positions  # one experiment; its figures join those that the record holds

Every run has one thread. A run that several experiments share is trained once, and one that is finished is kept in
--scratch, so that the script may be stopped and started again. It writes results/claims.json, which the pages plot.
"""
import argparse, hashlib, json, multiprocessing, os, statistics, time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import tqdm

from annotated_transformer.v1.batches import BatchLoader, encode_pairs
from annotated_transformer.v1.corpora import CorpusConfig, load_corpus
from annotated_transformer.v1.optimizer import learning_rate, make_optimizer, set_rate
from annotated_transformer.v1.scoring import perplexity, score
from annotated_transformer.v1.training import batch_loss, validate
from annotated_transformer.v1.transformer import Transformer, TransformerConfig
from annotated_transformer.v1.translator import Translator
from annotated_transformer.v1.vocabulary import train_tokenizer, write_whole
from record import RESULTS, about

SEEDS = (1, 2, 3)
SMALL = dict(n_layers=2, d_model=96, d_ff=192, n_heads=4, max_len=256,           # of the model
             max_tokens=1000, warmup=200, rate=4e-3, label_smoothing=0.1,        # of its training
             # True: no warm-up, the highest rate from the first step on, and the same rates after `warmup`
             flat=False,
             pairs=20_000,   # training pairs, from the beginning of the split
             tokens=300_000) # target tokens to learn from, pairs repeated as needed
DEEP = SMALL | dict(n_layers=4, d_model=64, d_ff=128)
FEW = SMALL | dict(pairs=2000)

EXPERIMENTS = { # name: what it asks, and the settings of each of its cases
    'norm': ('Does post-norm need warm-up, and pre-norm not?', {
        f'{norm}-norm, {"no warm-up" if flat else "warm-up"}': DEEP | dict(norm=norm, flat=flat)
        for norm in ('post', 'pre') for flat in (False, True)}),
    'init': ('Do deep stacks learn better if sublayers begin with small contributions?', {
        f'{norm}-norm, {init}': DEEP | dict(norm=norm, flat=False) | (dict(init=init) if init != 'glorot' else {})
        for norm in ('post', 'pre') for init in ('glorot', 'scaled')}),
    'label_smoothing': ('Does it hurt perplexity and help BLEU?', {
        f'{s}': SMALL | dict(label_smoothing=s) for s in (0.0, 0.1)}),
    'dropout': ('Does it help where pairs are few?', {f'{p}': FEW | dict(dropout=p) for p in (0.0, 0.1, 0.3)}),
    'heads': ('How many, at equal cost?', {f'{h}': SMALL | dict(n_heads=h) for h in (1, 4, 8)}),
    'positions': ('Which kind, and which goes further than its training sentences?', {
        kind: SMALL | (dict(positions=kind) if kind != 'sinusoidal' else {})
        for kind in ('sinusoidal', 'learned', 'alibi', 'rotary')}),
    'batch': ('Many small steps, or few large ones, over the same tokens?', {
        '1,000': SMALL, '4,000': SMALL | dict(max_tokens=4000, warmup=50)}), # warm-up over as many tokens
}
TESTS = ('test', 'test_long')


@cache
def data():
    "The corpus and its tokenizer: the same in every process."
    corpus = load_corpus(CorpusConfig('toy-ende'))
    return corpus, train_tokenizer('bpe', corpus['train'], corpus.langs, 1000)

def split(settings):
    "The model's settings, and those of its training."
    mine = {name for name in SMALL} - set(TransformerConfig.__dataclass_fields__)
    return ({k: v for k, v in settings.items() if k not in mine}, {k: v for k, v in settings.items() if k in mine})

def rate_at(step, t):
    "Equation 3, or the same with its rise cut off."
    return learning_rate(max(step, t['warmup']) if t['flat'] else step, t['rate'], t['warmup'])

def train(model, loader, t):
    "The mean loss of every 20 steps, as trained on; ends early when it is no number."
    optimizer, losses, step, tokens, epoch = make_optimizer(model), [], 0, 0, 0
    model.train()
    while tokens < t['tokens']:
        for batch in loader.epoch(epoch):
            loss = batch_loss(model, batch, t['label_smoothing']) / batch.n_tokens
            if not loss.isfinite(): return losses
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            set_rate(optimizer, rate_at(step + 1, t))
            optimizer.step()
            losses.append(loss.item())
            step, tokens = step + 1, tokens + batch.n_tokens
            if tokens >= t['tokens']: break
        epoch += 1
    return [round(statistics.fmean(losses[i:i + 20]), 4) for i in range(0, len(losses), 20)]

def run(settings, seed, sentences):
    "Train one model and score it."
    torch.set_num_threads(1)
    (corpus, tokenizer), (sizes, t) = data(), split(settings)
    config = TransformerConfig(vocab_size=len(tokenizer), **sizes)
    def ids(pairs): return encode_pairs(pairs, tokenizer, corpus.langs, config.max_len)
    began = time.process_time()
    torch.manual_seed(seed)
    model = Transformer(config)
    losses = train(model, BatchLoader(ids(corpus['train'][:t['pairs']]), t['max_tokens'], seed=seed), t)
    seconds = time.process_time() - began
    val_loss = validate(model.eval(), list(BatchLoader(ids(corpus['val']), 4000, shuffle=False).epoch(0)))
    translator, figures = Translator(model, tokenizer), dict(
        seed=seed, val_loss=val_loss, val_perplexity=perplexity(val_loss))
    for name in TESTS:
        pairs = corpus[name][:sentences]
        figures[f'{name}_bleu'] = score(translator.translate([s for s, _ in pairs], beam_size=1),
                                        [r for _, r in pairs]).bleu
    return figures | dict(losses=losses, cpu_seconds=round(seconds, 1))

def key(settings, seed, sentences):
    "A name for a run: the same settings, the same name."
    text = json.dumps([sorted(settings.items()), seed, sentences])
    return hashlib.sha256(text.encode()).hexdigest()[:16]

def kept(path): return json.loads(path.read_text('utf-8')) if path.is_file() else None

def measure(tasks, scratch, jobs):
    "Every run's figures by its key: read from `scratch`, or trained now and written there."
    done = {name: figures for name in tasks if (figures := kept(scratch / f'{name}.json'))}
    missing = {name: task for name, task in tasks.items() if name not in done}
    spawn = multiprocessing.get_context('spawn')
    with (ProcessPoolExecutor(jobs, mp_context=spawn) as pool,
          tqdm(total=len(tasks), initial=len(done), unit='run') as bar):
        futures = {pool.submit(run, *task): name for name, task in missing.items()}
        for future in as_completed(futures):
            name = futures[future]
            done[name] = future.result()
            write_whole(scratch / f'{name}.json', json.dumps(done[name]) + '\n')
            bar.update()
    return done

def spread(values):
    "Mean and standard deviation over seeds."
    return f'{statistics.fmean(values):7.2f} ± {statistics.stdev(values) if len(values) > 1 else 0:5.2f}'

def table(record):
    "Mean and spread of every case, as text."
    lines = []
    for name, experiment in record['experiments'].items():
        lines += ['', f"{name}: {experiment['question']}",
                  f"{'':24}{'val perplexity':>16}" + ''.join(f'{t + " BLEU":>18}' for t in TESTS)]
        for case, own in experiment['cases'].items():
            columns = [[r[c] for r in own['runs']] for c in ('val_perplexity', *(f'{t}_bleu' for t in TESTS))]
            lines.append(f'{case:24}' + '  '.join(spread(c) for c in columns))
    return '\n'.join(lines)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', choices=list(EXPERIMENTS), action='append', help='an experiment; may be repeated')
    parser.add_argument('--jobs', type=int, default=2, help='runs side by side, each with one thread (2)')
    parser.add_argument('--sentences', type=int, default=150, help='of each test split to translate, greedily (150)')
    parser.add_argument('--tokens', type=int, help='target tokens of every run, to try the script out')
    parser.add_argument('--scratch', type=Path, default=Path('runs/claims'),
                        help='finished runs are kept here (runs/claims)')
    parser.add_argument('--out', type=Path, default=RESULTS / 'claims.json', help='the record (results/claims.json)')
    args = parser.parse_args()
    if args.jobs < 1: parser.error(f'--jobs {args.jobs}: at least 1')
    earlier = kept(args.out) or dict(experiments={}, sentences=args.sentences)
    if args.only and earlier['sentences'] != args.sentences:
        parser.error(f"{args.out} holds scores of {earlier['sentences']} sentences: give as many, or another --out")
    if args.sentences < 1: parser.error(f'--sentences {args.sentences}: at least 1')
    cases = {(name, case): settings | ({'tokens': args.tokens} if args.tokens else {})
             for name, (_, own) in EXPERIMENTS.items() if name in (args.only or EXPERIMENTS)
             for case, settings in own.items()}
    runs = {k: [key(s, seed, args.sentences) for seed in SEEDS] for k, s in cases.items()}
    tasks = {name: (cases[k], seed, args.sentences) for k, names in runs.items() for name, seed in zip(names, SEEDS)}
    args.scratch.mkdir(parents=True, exist_ok=True)
    os.environ['OMP_NUM_THREADS'] = '1'  # for the processes to come
    done = measure(tasks, args.scratch, args.jobs)
    found = {name: dict(question=EXPERIMENTS[name][0], cases={}) for name, _ in cases}
    for (name, case), names in runs.items():
        found[name]['cases'][case] = dict(settings=cases[name, case], runs=[done[n] for n in names])
    experiments = {name: e for name in EXPERIMENTS if (e := found.get(name) or earlier['experiments'].get(name))}
    torch.set_num_threads(1)             # as in every run: what `versions` will say
    record = dict(name='claims', **about(), seeds=SEEDS, sentences=args.sentences, corpus='toy-ende',
                  experiments=experiments)
    write_whole(args.out, json.dumps(record, indent=1) + '\n')
    print(table(record))

if __name__ == '__main__': main()
