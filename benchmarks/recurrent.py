#!/usr/bin/env python3
"""Compare Transformers with LSTMs with attention that have as many parameters, on the same batches. Page 44 reads the
record.

    python benchmarks/recurrent.py --all          # all of toy EN-DE: the three commands below, 35 minutes of one core
    python benchmarks/recurrent.py --sweep                               # learning rates: 6 minutes of one core
    python benchmarks/recurrent.py --seeds 12 13 14 15 16 --minutes 1.2  # toy EN-DE: 20 minutes of one core
    python benchmarks/recurrent.py --gradients                           # paths of the gradient: 8 minutes
    python benchmarks/recurrent.py --corpus multi30k --data-dir ../shared/data/multi30k --minutes 8 --slice 30
    python benchmarks/recurrent.py --minutes 0.1 --slice 3 --sentences 20 --out /tmp/recurrent.json # a copy: to try it

`--sweep` trains each model of toy EN-DE for 200 steps at five peak learning rates, and keeps the losses on `val`. All
other runs use the best of each model; Multi30k takes it from the same sweep. Without `--sweep`, one model of each kind
is trained with every seed. The models of a seed train in turns, `--slice` seconds each, so that a slow phase of the
machine affects all of them. Time is the processor time of optimizer steps, with one thread, without validation and
translation. Every finished seed is added to the record at once, and replaces runs of the same models and seed. Ctrl-C
ends the training after the current turn, and the models are scored.

`--gradients` trains two models of toy EN-DE again, with the same seeds, for 200 steps. Before and after, it measures in
the encoder how the norm of the gradient of an output with respect to an input depends on the distance between the two
positions, on long sentences of `test_long`. Seeds that are in the record are left out.
"""
import argparse
import json
import re
import time
from bisect import bisect_left
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tqdm.auto import tqdm, trange

from annotated_transformer.batches import BatchLoader, encode_pairs
from annotated_transformer.checkpoints import build_model
from annotated_transformer.corpora import CorpusConfig, load_corpus
from annotated_transformer.files import atomic_write
from annotated_transformer.kernels import LossModule, accelerate, validate
from annotated_transformer.recipe import default_run
from annotated_transformer.recurrent import Recurrent, RecurrentConfig
from annotated_transformer.relative_positions import RelativeConfig
from annotated_transformer.run_log import catch_signals
from annotated_transformer.score_report import score_groups
from annotated_transformer.scoring import score
from annotated_transformer.trainer import seed_step, train_step
from annotated_transformer.training import learning_rate, make_optimizer
from annotated_transformer.transformer import TransformerConfig, count_parameters
from annotated_transformer.translator import Translator
from annotated_transformer.vocabulary import EOS, train_tokenizer
from record import RESULTS, about

ORIGINAL = 'Transformer, post-norm, sinusoidal'
MODERN = 'Transformer, pre-norm, rotary'
ADDITIVE = 'LSTM, additive'
GENERAL = 'LSTM, general'
MODELS = {'toy-ende': (ORIGINAL, MODERN, ADDITIVE), 'multi30k': (MODERN, ADDITIVE, GENERAL)}
RATES = {ORIGINAL: (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), # five peak learning rates for each model, a factor of 2 apart
         MODERN: (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
         ADDITIVE: (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)}
GENERAL_RATE = 8e-3 # at twice this rate, it learned more slowly on Multi30k
WARMUP = 100
SWEEP_SEED = 1
OWN = {'toy-ende': {}, 'multi30k': {'vocab_size': 4000, 'dropout': 0.2}} # Multi30k's recipe trains for far longer
TESTS = {'toy-ende': ('test', 'test_long'), 'multi30k': ('test_2016_flickr',)}
PATH_MODELS = (MODERN, ADDITIVE)
N_DISTANCES = 25        # distances between an output and an input: from 0 to 24
N_PATH_SENTENCES = 20   # of test_long
PATH_STEPS = 200        # of training before the second measurement
GATE_QUANTILES = (0.1, 0.5, 0.9)
SEEDS = (12, 13, 14, 15, 16) # of --all
MINUTES = 1.2
EDGES = (7, 11, 15, 19, 23) # words of the longest source sentence in each group but the last


class Task:
    "A corpus as ids, and the settings of models with the same number of parameters."
    def __init__(self, name, data_dir):
        config = CorpusConfig(name, pair='en-de', data_dir=data_dir)
        run = default_run(config)
        self.corpus = load_corpus(config)
        sizes = asdict(replace(run.model, **OWN[name]))
        self.tokenizer = train_tokenizer('bpe', self.corpus['train'], self.corpus.langs, sizes['vocab_size'])
        sizes['vocab_size'] = len(self.tokenizer)
        self.training = replace(run.training, warmup_steps=WARMUP)
        modern = RelativeConfig(**sizes | {'norm': 'pre', 'positions': 'rotary'})
        models = {ORIGINAL: TransformerConfig(**sizes | {'norm': 'post', 'positions': 'sinusoidal'}), MODERN: modern,
                  ADDITIVE: equal_size(modern, 'additive'), GENERAL: equal_size(modern, 'general')}
        self.models = {model: models[model] for model in MODELS[name]}
        self.train, val = (encode_pairs(self.corpus[split], self.tokenizer, self.corpus.langs, modern.max_len)
                           for split in ('train', 'val'))
        self.val = list(BatchLoader(val, 4000, shuffle=False).epoch(0))

def equal_size(transformer, attention):
    "Return the recurrent configuration whose number of parameters is closest to the Transformer's."
    wanted = count_parameters(build_model(transformer))
    c = transformer
    configs = [RecurrentConfig(c.vocab_size, 2, d_model, attention, c.dropout, c.max_len)
               for d_model in range(c.d_model, 2 * c.d_model, 2)]
    return min(configs, key=lambda config: abs(count_parameters(build_model(config)) - wanted))


def encoder_output(model, src):
    "Return the encoder's output (sentences, positions, features)."
    encoded = model.encode(src)
    return encoded[0] if isinstance(model, Recurrent) else encoded

def gradients_by_distance(model, sources, n_distances=N_DISTANCES):
    """Return the root mean square, over pairs of positions, of the norm of the gradient of an output with respect to an
    embedded input, for distances from 0 on. Each output is weighted by a random vector."""
    embedded = []

    def keep(module, args, output):
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    noise = torch.Generator().manual_seed(0)
    squares = torch.zeros(n_distances)
    counts = torch.zeros(n_distances)
    handle = model.src_embed.register_forward_hook(keep)
    for ids in sources:
        n = len(ids)
        output = encoder_output(model, torch.tensor([ids] * n)) # row i of the batch is for output i
        chosen = output[torch.arange(n), torch.arange(n)]
        gradient, = torch.autograd.grad((chosen * torch.randn(chosen.shape, generator=noise)).sum(), embedded.pop())
        square = gradient.square().sum(-1)
        distance = (torch.arange(n)[:, None] - torch.arange(n)).abs()
        near = distance < n_distances
        squares.index_add_(0, distance[near], square[near])
        counts.index_add_(0, distance[near], torch.ones(int(near.sum())))
    handle.remove()
    return (squares / counts).sqrt().tolist()

def forget_gates(model, sources):
    "Return the forget gates of the encoder's first layer, left to right, at all tokens (tokens, features)."
    lstm = model.encoder.lstm
    alone = torch.nn.LSTM(lstm.input_size, lstm.hidden_size, batch_first=True)
    alone.load_state_dict({name: getattr(lstm, name) for name in alone.state_dict()})
    gates = []
    for ids in sources:
        x = model.embed(torch.tensor([ids]), model.src_embed)
        hidden = alone(x)[0]
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
        logits = x @ alone.weight_ih_l0.T + alone.bias_ih_l0 + before @ alone.weight_hh_l0.T + alone.bias_hh_l0
        gates.append(logits.chunk(4, -1)[1].sigmoid()[0]) # input, forget, candidate, output
    return torch.cat(gates)

def measure_paths(model, sources):
    "Return the gradients by distance, and for an LSTM three quantiles of its forget gates."
    was_training = model.training
    model.eval()
    found = {'norms': [float(f'{norm:.3g}') for norm in gradients_by_distance(model, sources)]}
    if isinstance(model, Recurrent):
        with torch.no_grad():
            gates = forget_gates(model, sources).flatten()
        found['forget_gates'] = {str(q): round(gates.quantile(q).item(), 3) for q in GATE_QUANTILES}
    model.train(was_training)
    return found

def trained_paths(task, out, names=PATH_MODELS):
    "Add the gradients by distance, before and after training, to the record."
    peak_lrs = best_rates(out)
    encoded = encode_pairs(task.corpus['test_long'], task.tokenizer, task.corpus.langs)
    sources = [[*src, EOS] for src, _ in encoded if len(src) >= N_DISTANCES][:N_PATH_SENTENCES]
    for seed in SEEDS:
        for name in names:
            found = join(out).get('gradients', {'sentences': len(sources), 'steps': PATH_STEPS, 'runs': []})
            if any(run['model'] == name and run['seed'] == seed for run in found['runs']):
                continue
            learner = Learner(task, task.models[name], peak_lrs[name], seed)
            before = measure_paths(learner.model, sources)
            for _ in trange(PATH_STEPS, desc=f'{name}, seed {seed}'):
                learner.update()
            run = {'model': name, 'seed': seed, 'val_loss': round(validate(learner.model, task.val), 4),
                   'before': before, 'after': measure_paths(learner.model, sources)}
            join(out, gradients=found | {'runs': [*found['runs'], run]} | about())
            print(f'{name}, seed {seed}: validation loss {run["val_loss"]}, norms {run["after"]["norms"][::5]}', flush=True)


class Learner:
    "One model in training."
    def __init__(self, task, config, rate, seed):
        torch.manual_seed(seed)
        self.task = task
        self.rate = rate
        self.seed = seed
        self.model = accelerate(build_model(config))
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self.curve = []
        self.optimizer = make_optimizer(self.model)
        self.objective = LossModule(self.model, task.training)
        self.loader = BatchLoader(task.train, task.training.max_tokens, seed)
        self.batches = self.all_batches()

    def all_batches(self):
        epoch = 0
        while True:
            yield from self.loader.epoch(epoch)
            epoch += 1

    def update(self):
        "Train on one more batch."
        batch = next(self.batches)
        settings = self.task.training
        began = time.process_time()
        seed_step(self.seed, self.step + 1)
        lr = learning_rate(self.step + 1, self.rate, settings.warmup_steps)
        train_step(self.objective, [batch], self.optimizer, lr, settings.max_grad_norm)
        self.seconds += time.process_time() - began
        self.step += 1
        self.tokens += batch.n_tokens

    def learn(self, until):
        "Train until this many seconds are used; then validate."
        self.model.train()
        while self.seconds < until:
            self.update()
        loss = validate(self.model, self.task.val)
        self.curve.append({'step': self.step, 'epochs': round(self.step / len(self.loader), 3), 'tokens': self.tokens,
                           'seconds': round(self.seconds, 2), 'val_loss': round(loss, 4)})
        return loss


def sweep(task, steps, out, models):
    "Add the validation loss of each model at each of its learning rates to the record."
    for name in models:
        for rate in RATES[name]:
            found = join(out).get('sweep', {'steps': steps, 'val_loss': {}})
            losses = found['val_loss'].setdefault(name, {})
            if f'{rate:g}' in losses:
                continue
            learner = Learner(task, task.models[name], rate, SWEEP_SEED)
            for _ in trange(steps, desc=f'{name}, {rate:g}'):
                learner.update()
            losses[f'{rate:g}'] = round(validate(learner.model, task.val), 4)
            join(out, sweep=found | {'seed': SWEEP_SEED} | about())

def length_group(text):
    "Return the group of a source sentence."
    names = [f'{low + 1}-{high}' for low, high in zip((0, *EDGES), EDGES)] + [f'{EDGES[-1] + 1}+']
    return names[bisect_left(EDGES, len(text.split()))]

def score_split(translator, pairs):
    "Translate greedily; return BLEU, also by words of the source, and processor time."
    texts = [src for src, _ in pairs]
    references = [tgt for _, tgt in pairs]
    began = time.process_time()
    translations = translator.translate(texts, beam_size=1)
    seconds = time.process_time() - began
    groups = score_groups(translations, references, [length_group(text) for text in texts])
    return {'sentences': len(pairs), 'bleu': round(score(translations, references).bleu, 2),
            'sentences_per_second': round(len(pairs) / seconds, 1),
            'by_words': {name: {'sentences': part.sentences, 'bleu': round(part.bleu, 2)}
                         for name, part in groups.items()}}

def cross_attention(translator, pairs):
    "Return the mean cross-attention weights of the longest of 20 pairs, and its tokens."
    src, tgt = max(pairs[:20], key=lambda pair: len(pair[0]))
    seen = translator.attention(src, tgt)
    weights = [[round(weight, 3) for weight in row] for row in seen.cross.mean(1)[-1].tolist()]
    return {'src': seen.src, 'tgt': seen.tgt, 'weights': weights}

def result(name, learner, minutes, sentences):
    "Return a run's part of the record."
    task = learner.task
    translator = Translator(learner.model.eval(), task.tokenizer)
    run = {'model': name, 'seed': learner.seed, 'minutes': minutes,
           'tokens_per_second': round(learner.tokens / learner.seconds, 1)}
    for split in TESTS[task.corpus.name]:
        run[split] = score_split(translator, task.corpus[split][:sentences])
    if name == ADDITIVE:
        run['cross_attention'] = cross_attention(translator, task.corpus[TESTS[task.corpus.name][0]])
    return run | {'curve': learner.curve}

def join(path, **parts):
    "Add parts to the record, and return it."
    record = json.loads(path.read_text('utf-8')) if path.is_file() else {'name': 'recurrent'}
    record |= parts
    # a row of numbers, and a point of a curve, takes a line
    text = re.sub(r'\[[\s\d.,]+\]|\{[^{}[\]]+\}', lambda rows: ' '.join(rows[0].split()), json.dumps(record, indent=1))
    assert json.loads(text) == record
    if parts:
        atomic_write(path, text + '\n')
    return record

def compare(task, rates, args):
    "Train the models with each seed, in turns; add them to the record, which keeps all other runs."
    kept = {name: getattr(task.training, name)
            for name in ('max_tokens', 'warmup_steps', 'label_smoothing', 'max_grad_norm')}
    n_turns = max(1, round(60 * args.minutes / args.slice))
    for seed in args.seeds:
        learners = {name: Learner(task, task.models[name], rates[name], seed) for name in args.models}
        with catch_signals() as received:
            for turn in tqdm(range(1, 1 + n_turns), desc=f'{task.corpus.name}, seed {seed}', unit='turn'):
                if received:
                    break
                losses = {name: learner.learn(60 * args.minutes * turn / n_turns) for name, learner in learners.items()}
                tqdm.write('  '.join(f'{name} {loss:.3f}' for name, loss in losses.items()))
        runs = [result(name, learner, args.minutes, args.sentences) for name, learner in learners.items()]
        part = join(args.out).get(task.corpus.name, {'models': {}, 'runs': []})
        part['models'] |= {name: {'settings': asdict(task.models[name]), 'peak_lr': rates[name],
                                  'parameters': count_parameters(learners[name].model)} for name in args.models}
        part['runs'] = [run for run in part['runs'] if run['seed'] != seed or run['model'] not in args.models] + runs
        seeds = sorted({run['seed'] for run in part['runs']})
        join(args.out, **{task.corpus.name: part | about() | {'seeds': seeds, 'training': kept}})
        for run in runs:
            print(run['model'], {split: run[split]['bleu'] for split in TESTS[task.corpus.name]}, flush=True)
        if received:
            return

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--corpus', choices=list(TESTS), default='toy-ende')
    parser.add_argument('--data-dir', type=Path, help='where Multi30k lies')
    parser.add_argument('--sweep', action='store_true', help='try the learning rates of toy EN-DE that are missing')
    parser.add_argument('--gradients', action='store_true',
                        help='measure the gradients of toy EN-DE before and after training')
    parser.add_argument('--all', action='store_true', help='all of toy EN-DE: learning rates, seeds and gradients')
    parser.add_argument('--sweep-steps', type=int, default=200, help='updates for each learning rate (200)')
    parser.add_argument('--models', nargs='+', help='names of models; all unless given')
    parser.add_argument('--seeds', type=int, nargs='+', default=[1], help='train all models with each of them (1)')
    parser.add_argument('--minutes', type=float, default=MINUTES, help='of training for each model (1.2)')
    parser.add_argument('--slice', type=float, default=9.0, help='seconds of a turn (9)')
    parser.add_argument('--sentences', type=int, help='of each test split to translate; all unless given')
    parser.add_argument('--out', type=Path, default=RESULTS / 'recurrent.json',
                        help='the record (results/recurrent.json)')
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.all:
        args.seeds = SEEDS
        args.minutes = MINUTES
    if args.gradients and 'sweep' not in join(args.out):
        parser.error('the record has no learning rates: run --sweep first')
    if args.corpus != 'toy-ende' and (args.all or args.sweep or args.gradients):
        parser.error(f'--all, --sweep and --gradients are for toy-ende: drop --corpus {args.corpus}')
    task = Task(args.corpus, args.data_dir)
    if args.sweep or args.all:
        sweep(task, args.sweep_steps, args.out, RATES)
    if not args.sweep and not args.gradients:
        train_seeds(task, args, parser)
    if args.gradients or args.all:
        trained_paths(task, args.out)

def best_rates(out):
    "Return the peak learning rate of each model whose loss was lowest in the sweep of the record."
    losses = join(out).get('sweep', {}).get('val_loss', {})
    return {name: float(min(found, key=found.get)) for name, found in losses.items()} | {GENERAL: GENERAL_RATE}

def train_seeds(task, args, parser):
    "Train the models at their best learning rates."
    args.models = args.models or list(task.models)
    rates = best_rates(args.out)
    for name in args.models:
        if name not in task.models:
            parser.error(f'model {name!r} is unknown: choose from {", ".join(task.models)}')
        if name not in rates:
            parser.error(f'the record has no learning rate of {name}: run --sweep on toy EN-DE first')
    compare(task, rates, args)

if __name__ == '__main__':
    main()
