#!/usr/bin/env python3
"""Measure how fast a training step is, beside nn.Transformer and Hugging Face's Marian.

    python benchmarks/train_speed.py                                   # sizes tiny and small on a CPU
    python benchmarks/train_speed.py --sizes base big --device cuda --precision bfloat16
    python benchmarks/train_speed.py --sizes tiny --rounds 1 --steps 2 --out /tmp/quick.json   # try it

How it measures:

- All train on the same batches in the same order: Multi30k EN-DE with --data-dir, otherwise the toy corpus. All have the same
  sizes, tied embeddings, dropout in the same places, label smoothing, gradient clipping and fused Adam.
- Each system runs in its own process. The rounds alternate in time, each starting with another system; a first round is
  not counted. The record holds every round; the tables show the median, the smallest and the largest.
- The other two get the faster of two ways to the loss: logits at every position, or at real tokens only.
- Memory is the peak during the steps minus what was resident once model and optimizer were built.
- The rate of a large matrix product is the median of several timings, all of which are in the record.
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from annotated_transformer.batches import encode_pairs
from annotated_transformer.corpora import CorpusConfig, load_corpus
from annotated_transformer.kernels import accelerate
from annotated_transformer.loader import TrainingLoader
from annotated_transformer.positions import SinusoidalPositions
from annotated_transformer.trainer import LossModule, TrainConfig, train_step
from annotated_transformer.transformer import PRESETS, Transformer, TransformerConfig, count_parameters
from annotated_transformer.vocabulary import PAD, train_tokenizer

LABEL_SMOOTHING = 0.1
MAX_GRAD_NORM = 1.0
LR = 1e-4
SEED = 1
REST = 0.3 # seconds between measurements
OURS = 'annotated_transformer'


@dataclass(frozen=True)
class Size:
    "A model and the limit for the tokens of its batches."
    model: TransformerConfig
    max_tokens: int

TINY = PRESETS['tiny']
SIZES = {
    'tiny': Size(TransformerConfig(4000, TINY.n_layers, TINY.d_model, TINY.d_ff, TINY.n_heads), 2048),
    'small': Size(TransformerConfig(8000, n_layers=3, d_model=256, d_ff=1024, n_heads=4), 3000),
    'base': Size(PRESETS['base'], 25_000),
    'big': Size(PRESETS['big'], 25_000),
}


# --- the systems: each is a function of a configuration that returns a model and a function from a batch to its mean loss

def mean_loss(lm_head, hidden, targets, everywhere):
    "The smoothed loss from logits at every position, or at real tokens only."
    if not everywhere:
        is_token = targets != PAD
        hidden = hidden[is_token]
        targets = targets[is_token]
    return F.cross_entropy(lm_head(hidden).flatten(0, -2), targets.flatten(), ignore_index=PAD,
                           label_smoothing=LABEL_SMOOTHING)

class TorchTransformer(nn.Module):
    "`nn.Transformer` with what it lacks: tied embeddings, positions, an output layer."
    def __init__(self, c):
        super().__init__()
        self.scale = math.sqrt(c.d_model)
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.positions = SinusoidalPositions(c.d_model, c.max_len)
        self.dropout = nn.Dropout(c.dropout)
        self.body = nn.Transformer(c.d_model, c.n_heads, c.n_layers, c.n_layers, c.d_ff, c.dropout, batch_first=True)
        for module in self.body.modules(): # dropout only where ours has it, which spares it the slow attention
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
                module.dropout = nn.Identity()
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.lm_head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=c.d_model ** -0.5)

    def embedded(self, ids):
        return self.dropout(self.positions(self.embed(ids) * self.scale))

    def forward(self, src, tgt):
        future = torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool, device=tgt.device).triu(1)
        padding = src == PAD
        return self.body(self.embedded(src), self.embedded(tgt), tgt_mask=future, tgt_is_causal=True,
                         src_key_padding_mask=padding, memory_key_padding_mask=padding)

def torch_transformer(config, everywhere):
    model = TorchTransformer(config)

    def loss(batch):
        return mean_loss(model.lm_head, model(batch.src, batch.tgt_in), batch.tgt_out, everywhere)

    return model, loss

def marian(config, everywhere):
    import transformers
    sizes = {}
    for side in ('encoder', 'decoder'):
        sizes |= {f'{side}_layers': config.n_layers, f'{side}_ffn_dim': config.d_ff,
                  f'{side}_attention_heads': config.n_heads}
    model = transformers.MarianMTModel(transformers.MarianConfig(
        vocab_size=config.vocab_size, d_model=config.d_model, dropout=config.dropout, attention_dropout=0.0,
        activation_dropout=0.0, activation_function='relu', scale_embedding=True, use_cache=False,
        max_position_embeddings=config.max_len, pad_token_id=PAD, decoder_start_token_id=1, eos_token_id=2,
        forced_eos_token_id=None, attn_implementation='sdpa', **sizes))

    def lm_head(hidden):
        return model.lm_head(hidden) + model.final_logits_bias

    def loss(batch):
        hidden = model.model(batch.src, attention_mask=batch.src != PAD, decoder_input_ids=batch.tgt_in)[0]
        return mean_loss(lm_head, hidden, batch.tgt_out, everywhere)

    return model, loss

OTHERS = {'nn.Transformer, all logits': (torch_transformer, True), 'nn.Transformer, real logits': (torch_transformer, False),
          'Marian, all logits': (marian, True), 'Marian, real logits': (marian, False)}

def make_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=LR, betas=(0.9, 0.98), eps=1e-9, fused=True)

def make_system(name, size, device, precision):
    "A model and its training step, a function of a batch."
    torch.manual_seed(SEED)
    if name == OURS:
        model = accelerate(Transformer(size.model)).to(device).train()
        loss_module = LossModule(model, TrainConfig(label_smoothing=LABEL_SMOOTHING, precision=precision))
        optimizer = make_optimizer(model)

        def our_step(batch):
            return train_step(loss_module, [batch], optimizer, LR, MAX_GRAD_NORM)

        return model, our_step
    build, everywhere = OTHERS[name]
    model, loss_of = build(size.model, everywhere)
    model.to(device).train()
    optimizer = make_optimizer(model)

    def step(batch):
        with torch.autocast(device, torch.bfloat16, enabled=precision == 'bfloat16'):
            loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        return loss.item()

    return model, step


# --- a worker: one system in its own process

def load_batches(size, n_batches, data_dir):
    "The first batches of an epoch, and the name of their corpus."
    multi30k = data_dir is not None
    corpus = load_corpus(CorpusConfig('multi30k', data_dir=data_dir) if multi30k else CorpusConfig('toy-ende'))
    vocab_size = min(size.model.vocab_size, 8000) # a small corpus has no more tokens; the model keeps its size
    tokenizer = train_tokenizer('bpe', corpus['train'], corpus.langs, vocab_size)
    loader = TrainingLoader(encode_pairs(corpus['train'], tokenizer, corpus.langs), size.max_tokens, seed=SEED)
    batches = [batch for _, batch in zip(range(n_batches), loader.epoch(0))]
    return batches, f'{corpus.name}, BPE {len(tokenizer):,}'

def resident(peak=False):
    "Bytes of this process in memory: now, or the largest number since `reset_peak`."
    field = 'VmHWM:' if peak else 'VmRSS:'
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def reset_peak():
    Path('/proc/self/clear_refs').write_text('5')

def run_round(step, batches, device):
    start = time.perf_counter()
    for batch in batches:
        step(batch)
    if device == 'cuda':
        torch.cuda.synchronize()
    return time.perf_counter() - start

def work(args):
    "Answer each line of standard input with the seconds of a round."
    size = SIZES[args.sizes[0]]
    batches, corpus = load_batches(size, args.steps, args.data_dir)
    n_tokens = sum(batch.n_tokens for batch in batches)
    batches = [batch.to(args.device) for batch in batches]
    model, step = make_system(args.worker, size, args.device, args.precision)
    if args.device == 'cuda':
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        torch.randn(512, 512) @ torch.randn(512, 512) # the libraries' own threads and memory
        reset_peak()
        before = resident()
    run_round(step, batches, args.device) # not counted
    peak = torch.cuda.max_memory_allocated() if args.device == 'cuda' else resident(peak=True)
    about = {'parameters': count_parameters(model), 'peak_mib': round((peak - before) / 2**20),
             'corpus': corpus, 'target_tokens': n_tokens}
    print(json.dumps(about), flush=True)
    for _ in sys.stdin:
        print(json.dumps(run_round(step, batches, args.device)), flush=True)

class Worker:
    "A process with one system."
    def __init__(self, name, label, args):
        command = [sys.executable, __file__, '--worker', name, '--sizes', label, '--device', args.device,
                   '--precision', args.precision, '--steps', str(args.steps)]
        if args.data_dir:
            command += ['--data-dir', str(args.data_dir)]
        environment = dict(os.environ, OMP_NUM_THREADS=str(args.threads), MKL_NUM_THREADS=str(args.threads))
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env=environment)

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f'the process ended: {self.process.args}')
        return json.loads(line)

    def measure(self):
        time.sleep(REST)
        self.process.stdin.write('\n')
        self.process.stdin.flush()
        return self.read()

    def stop(self):
        self.process.stdin.close()
        self.process.wait()


# --- the measurement

def matrix_rates(device, dtype, timings=7, repeats=20, n=None):
    "Floating-point operations per second of a large matrix product in this precision: a rate for each timing."
    if n is None:
        n = 8192 if device == 'cuda' else 2048
    wait = torch.cuda.synchronize if device == 'cuda' else lambda: None
    a = torch.randn(n, n, device=device).to(dtype)
    b = torch.randn(n, n, device=device).to(dtype)
    for _ in range(5):
        a @ b
    rates = []
    for _ in range(timings):
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            a @ b
        wait()
        rates.append(repeats * 2 * n**3 / (time.perf_counter() - start))
    return rates

def measure(label, args):
    "One size: speed and memory of every system."
    workers = {name: Worker(name, label, args) for name in args.systems}
    rounds = {name: [] for name in workers}
    names = list(workers)
    try:
        about = {name: worker.read() for name, worker in workers.items()} # all are ready now
        for i in range(args.rounds):
            start = i % len(names)
            for name in names[start:] + names[:start]:
                rounds[name].append(workers[name].measure())
    finally:
        for worker in workers.values():
            worker.stop()
    n_tokens = about[OURS]['target_tokens']
    parameters = [found['parameters'] for found in about.values()]
    assert max(parameters) < 1.01 * min(parameters), about
    median = {name: statistics.median(seconds) for name, seconds in rounds.items()}
    fastest = min((name for name in names if name != OURS), key=median.get)
    memory = {name: found['peak_mib'] for name, found in about.items()}
    for name in names:
        seconds = rounds[name]
        print(f'{label:6} {name:28} {n_tokens / median[name]:9,.0f} target tokens/s '
              f'({n_tokens / max(seconds):,.0f}-{n_tokens / min(seconds):,.0f}) {memory[name]:7,} MiB', flush=True)
    best = min(min(seconds) for name, seconds in rounds.items() if name != OURS) # the fastest round of any other
    found = {'tokens_per_second': {name: round(n_tokens / median[name]) for name in names},
             'peak_mib': memory, 'fastest_other': fastest,
             'speedup_of_medians': round(median[fastest] / median[OURS], 3),
             'speedup_of_best': round(best / min(rounds[OURS]), 3),
             'memory_ratio': round(memory[OURS] / memory[fastest], 3),
             'parameters': parameters[0], 'corpus': about[OURS]['corpus'], 'max_tokens': SIZES[label].max_tokens,
             'rounds': {name: [round(t, 4) for t in seconds] for name, seconds in rounds.items()},
             'model': asdict(SIZES[label].model)}
    print(f"{label:6} beside {fastest}: {found['speedup_of_medians']} times as fast by medians, "
          f"{found['speedup_of_best']} by best rounds, {found['memory_ratio']} of its memory", flush=True)
    return found

def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--sizes', nargs='+', choices=SIZES, default=['tiny', 'small'])
    parser.add_argument('--systems', nargs='+', choices=[OURS, *OTHERS], default=[OURS, *OTHERS])
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--steps', type=int, default=8, help='batches of a round')
    parser.add_argument('--threads', type=int, default=os.cpu_count() or 1)
    parser.add_argument('--device', default='cpu', choices=['cpu', 'cuda'])
    parser.add_argument('--precision', default='float32', choices=['float32', 'bfloat16'])
    parser.add_argument('--data-dir', type=Path, help='folder of Multi30k')
    parser.add_argument('--name', default='train-speed', help='of the record')
    parser.add_argument('--out', type=Path, help='the record (default: benchmarks/results/NAME.json)')
    parser.add_argument('--worker', choices=[OURS, *OTHERS], help=argparse.SUPPRESS)
    return parser.parse_args()

def main():
    args = arguments()
    if args.worker:
        return work(args)
    import transformers
    from annotated_transformer.files import atomic_write, to_json
    from record import RESULTS, about
    record = {'name': args.name, **about(), 'seed': SEED,
              'settings': {name: getattr(args, name) for name in ('rounds', 'steps', 'threads', 'device', 'precision')},
              'metrics': {label: measure(label, args) for label in args.sizes}}
    torch.set_num_threads(args.threads)
    rates = matrix_rates(args.device, getattr(torch, args.precision))
    record['matrix_tflops'] = round(statistics.median(rates) / 1e12, 3)
    record['matrix_tflops_rounds'] = [round(rate / 1e12, 3) for rate in rates]
    record['versions'] |= {'transformers': transformers.__version__}
    atomic_write(args.out or RESULTS / f'{args.name}.json', to_json(record))


if __name__ == '__main__':
    main()
