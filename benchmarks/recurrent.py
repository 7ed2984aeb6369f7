#!/usr/bin/env python3
"""Compare the Transformer with LSTMs with attention that have as many parameters, on the same batches.

    python benchmarks/recurrent.py # toy EN-DE: rates, training, decoding; about 20 minutes of one core
    python benchmarks/recurrent.py --corpus multi30k --data-dir ../shared/data/multi30k --minutes 8
    python benchmarks/recurrent.py --corpus multi30k --data-dir ../shared/data/multi30k \
        --only 'LSTM, general' --rate 0.008 --minutes 2 --slice 30
    python benchmarks/recurrent.py --seeds 2 3 4 5 6 --minutes 0.6  # two models, several seeds: 7 minutes of one core
    python benchmarks/recurrent.py --seeds 7 8 9 10 11 --minutes 1.2
    python benchmarks/recurrent.py --minutes 0.1 --sweep-steps 20 --sentences 20 --out /tmp/recurrent.json

Each model's time is the processor time of its optimizer steps, with one thread, without validation and decoding. The
models train in turns, `--slice` seconds each, so that a slow phase of the machine affects all of them. The peak
learning rate of each family is the best of several, by the loss on `val` of toy EN-DE after `--sweep-steps` steps;
Multi30k takes it from the record. Results are added to the record after every round. Ctrl-C ends the training after
the current round, and the models are scored. Learning rates that are in the record are not tried again.
"""
import argparse
import json
import re
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tqdm.auto import tqdm, trange

from annotated_transformer.batches import BatchLoader, encode_pairs
from annotated_transformer.checkpoints import build_model
from annotated_transformer.corpora import CorpusConfig, load_corpus
from annotated_transformer.files import atomic_write
from annotated_transformer.kernels import accelerate
from annotated_transformer.recipe import default_run
from annotated_transformer.recurrent import RecurrentConfig
from annotated_transformer.run_log import catch_signals
from annotated_transformer.score_report import score_by_length
from annotated_transformer.scoring import score
from annotated_transformer.trainer import LossModule, seed_step, train_step, validate
from annotated_transformer.training import learning_rate, make_optimizer
from annotated_transformer.transformer import count_parameters
from annotated_transformer.translator import Translator
from annotated_transformer.vocabulary import train_tokenizer
from record import RESULTS, about

SEED, WARMUP = 1, 100
# tried as the highest, by family
RATES = {'Transformer': (2e-3, 4e-3, 8e-3), 'LSTM': (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)}
OWN = {'toy-ende': {}, 'multi30k': dict(vocab_size=4000, dropout=0.2)} # Multi30k's recipe trains for far longer
TESTS = {'toy-ende': ('test', 'test_long'), 'multi30k': ('test_2016_flickr',)}
# words of the longest reference in each group but the last
EDGES = {'toy-ende': (6, 9, 12, 16, 20, 24), 'multi30k': (7, 10, 13, 16, 20)}


class Task:
    "A corpus as ids, and the settings of three models with the same number of parameters."
    def __init__(self, name, data_dir):
        config = CorpusConfig(name, pair='en-de', data_dir=data_dir)
        run = default_run(config)
        model = replace(run.model, **OWN[name])
        self.corpus = load_corpus(config)
        self.tokenizer = train_tokenizer('bpe', self.corpus['train'], self.corpus.langs, model.vocab_size)
        self.training = replace(run.training, warmup_steps=WARMUP, seed=SEED)
        transformer = replace(model, vocab_size=len(self.tokenizer))
        self.models = {'Transformer': transformer} | {
            f'LSTM, {attention}': self.equal(transformer, attention) for attention in ('additive', 'general')}
        self.train, val = (encode_pairs(self.corpus[s], self.tokenizer, self.corpus.langs, transformer.max_len)
                           for s in ('train', 'val'))
        self.val = list(BatchLoader(val, 4000, shuffle=False).epoch(0))

    def equal(self, transformer, attention):
        "Return the recurrent configuration whose number of parameters is closest to the Transformer's."
        wanted, c = count_parameters(build_model(transformer)), transformer
        configs = [RecurrentConfig(c.vocab_size, 2, d, attention, c.dropout, c.max_len)
                   for d in range(c.d_model, 2*c.d_model, 2)]
        return min(configs, key=lambda config: abs(count_parameters(build_model(config)) - wanted))


class Learner:
    "One model in training."
    def __init__(self, task, config, rate, seed=SEED):
        torch.manual_seed(seed)
        self.task, self.rate, self.seed, self.model = task, rate, seed, accelerate(build_model(config))
        self.step, self.tokens, self.seconds = 0, 0, 0.
        self.optimizer, self.objective = make_optimizer(self.model), LossModule(self.model, task.training)
        self.loader = BatchLoader(task.train, task.training.max_tokens, seed)
        self.batches, self.curve = self.all_batches(), []

    def all_batches(self):
        epoch = 0
        while True:
            yield from self.loader.epoch(epoch)
            epoch += 1

    def update(self):
        "Train on one more batch."
        c, batch, began = self.task.training, next(self.batches), time.process_time()
        seed_step(self.seed, self.step + 1)
        train_step(self.objective, [batch], self.optimizer,
                   learning_rate(self.step + 1, self.rate, c.warmup_steps), c.max_grad_norm)
        self.step, self.tokens, self.seconds = (
            self.step + 1, self.tokens + batch.n_tokens, self.seconds + time.process_time() - began)

    def learn(self, until):
        "Train until the model's time is over; then validate."
        self.model.train()
        while self.seconds < until: self.update()
        return self.note()

    def note(self):
        loss = validate(self.model, self.task.val)
        self.curve.append(dict(step=self.step, epochs=round(self.step / len(self.loader), 3), tokens=self.tokens,
                               seconds=round(self.seconds, 2), val_loss=round(loss, 4)))
        return loss


def family(name): return name.split(',')[0]

def sweep(task, steps, out):
    "Add validation losses for each family and learning rate to the record; the additive LSTM stands for both."
    found = join(out).get('sweep', {}).get('val_loss', {})
    for name in ('Transformer', 'LSTM, additive'):
        losses = found.setdefault(family(name), {})
        for rate in RATES[family(name)]:
            if f'{rate:g}' in losses: continue
            learner = Learner(task, task.models[name], rate)
            for _ in trange(steps, desc=f'{family(name)}, {rate:g}'): learner.update()
            losses[f'{rate:g}'] = round(validate(learner.model, task.val), 4)
            join(out, sweep=dict(steps=steps, val_loss=found))

def decode(task, learner, sentences):
    "Return scores, also by length; decoding times; and the attention weights for one sentence."
    translator, took = Translator(learner.model.eval(), task.tokenizer), {}
    pairs = [pair for split in TESTS[task.corpus.name] for pair in task.corpus[split][:sentences]]
    texts, references = map(list, zip(*pairs))
    for how, beam in dict(greedy=1, beam=4).items():
        began = time.process_time()
        translations = translator.translate(texts, beam_size=beam)
        seconds = time.process_time() - began
        took[how] = dict(bleu=round(score(translations, references).bleu, 2), seconds=round(seconds, 2),
                         sentences_per_second=round(len(texts)/seconds, 2))
    src, tgt = max(task.corpus[TESTS[task.corpus.name][0]][:20], key=lambda pair: len(pair[0]))
    seen = translator.attention(src, tgt)
    looked = dict(src=seen.src, tgt=seen.tgt,
                  cross=[[[round(w, 3) for w in row] for row in layer] for layer in seen.cross.mean(1).tolist()])
    groups = score_by_length(translations, references, EDGES[task.corpus.name])
    return dict(**took, looked=looked,
                by_length={name: dict(bleu=part.bleu, chrf=part.chrf, sentences=part.sentences)
                           for name, part in groups.items()})

def figures(task, learners, rates, decoded):
    "Return each model's part of the record."
    return {name: dict(settings=asdict(task.models[name]), parameters=count_parameters(of.model),
                       peak_lr=rates[family(name)], curve=of.curve,
                       tokens_per_second=round(of.tokens / of.seconds, 1), **decoded.get(name, {}))
            for name, of in learners.items()}

def join(path, **parts):
    "Add parts to the record, and return it."
    record = json.loads(path.read_text('utf-8')) if path.is_file() else dict(name='recurrent')
    record |= parts
    # a row of numbers is a line
    text = re.sub(r'\[[\s\d.,]+\]', lambda rows: ' '.join(rows[0].split()), json.dumps(record, indent=1))
    if parts: atomic_write(path, text + '\n')
    return record

def try_rate(task, args):
    "Add one model's training curve at another learning rate to the record."
    learner = Learner(task, task.models[args.only], args.rate)
    for i in trange(1, 1 + round(60*args.minutes / args.slice), desc=f'{args.only}, {args.rate:g}'):
        learner.learn(i * args.slice)
    found = dict(model=args.only, peak_lr=args.rate, command=about()['command'], curve=learner.curve)
    held = join(args.out)[args.corpus]
    join(args.out, **{args.corpus: held | dict(other_rates=held.get('other_rates', []) + [found])})

def compare_seeds(task, args):
    "Train the Transformer and the additive LSTM with each seed for the same time; add losses and BLEU to the record."
    found = join(args.out).get('seeds', {'runs': []})
    keys = ('model', 'seed', 'minutes')
    rates = {name: float(min(losses, key=losses.get)) for name, losses in join(args.out)['sweep']['val_loss'].items()}
    for seed in args.seeds:
        for name in ('Transformer', 'LSTM, additive'):
            if [name, seed, args.minutes] in [[run[key] for key in keys] for run in found['runs']]:
                continue
            learner = Learner(task, task.models[name], rates[family(name)], seed)
            loss = learner.learn(60 * args.minutes)
            run = {'seed': seed, 'model': name, 'minutes': args.minutes, 'val_loss': round(loss, 4),
                   'step': learner.step, 'tokens': learner.tokens}
            translator = Translator(learner.model.eval(), task.tokenizer)
            for split in TESTS['toy-ende']:
                pairs = task.corpus[split][:args.sentences or 300]
                translations = translator.translate([src for src, _ in pairs], beam_size=1)
                run[split] = round(score(translations, [tgt for _, tgt in pairs]).bleu, 2)
            found['runs'].append(run)
            join(args.out, seeds=found | about())
            print(run, flush=True)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--corpus', choices=list(TESTS), default='toy-ende')
    parser.add_argument('--data-dir', type=Path, help='where Multi30k lies')
    parser.add_argument('--minutes', type=float, default=3., help='of training for each model (3)')
    parser.add_argument('--slice', type=float, default=20.,
                        help='seconds that one model learns before it is the next one\'s turn (20)')
    parser.add_argument('--sweep-steps', type=int, default=200,
                        help='updates for each learning rate that is tried (200)')
    parser.add_argument('--sentences', type=int, help='of each test split to translate; all unless given')
    parser.add_argument('--seeds', type=int, nargs='+', help='train two models with each of these seeds (toy EN-DE)')
    parser.add_argument('--only', help='one model, to learn alone at --rate and not be scored: was the rate to blame?')
    parser.add_argument('--rate', type=float, help='its highest rate')
    parser.add_argument('--out', type=Path, default=RESULTS / 'recurrent.json',
                        help='the record (results/recurrent.json)')
    args = parser.parse_args()
    torch.set_num_threads(1)
    task, decoded = Task(args.corpus, args.data_dir), {}
    if args.only: return try_rate(task, args)
    if args.seeds: return compare_seeds(task, args)
    if args.corpus == 'toy-ende': sweep(task, args.sweep_steps, args.out)
    if 'sweep' not in (record := join(args.out)): parser.error('the rates are found on toy EN-DE: run that first')
    rates = {name: float(min(losses, key=losses.get)) for name, losses in record['sweep']['val_loss'].items()}
    learners = {name: Learner(task, config, rates[family(name)]) for name, config in task.models.items()}
    told = about() | dict(seed=SEED, tests=TESTS[args.corpus],
                          training={name: getattr(task.training, name)
                                    for name in ('max_tokens', 'warmup_steps', 'label_smoothing', 'max_grad_norm')})
    held = join(args.out).get(args.corpus, {}) # other rates, say, that were tried
    def write(): join(args.out, **{args.corpus: held | dict(told, models=figures(task, learners, rates, decoded))})
    with catch_signals() as received:
        for i in tqdm(range(1, 1 + max(1, round(60*args.minutes / args.slice))), desc=args.corpus, unit='round'):
            if received:
                break
            losses = {name: learner.learn(i * args.slice) for name, learner in learners.items()}
            write()
            tqdm.write(f'{i * args.slice:6.0f} s  ' + '  '.join(f'{name} {loss:.3f}' for name, loss in losses.items()))
    for name, learner in learners.items():
        decoded[name] = decode(task, learner, args.sentences)
        write()
        print(f'{name:16}', {k: v for k, v in decoded[name].items() if k in ('greedy', 'beam')})

if __name__ == '__main__':
    main()
