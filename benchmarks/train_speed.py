#!/usr/bin/env python3
"""How fast a training step is, beside torch's own Transformer, Hugging Face's Marian, and the matrix products alone.

    python benchmarks/train_speed.py # sizes tiny and small; on a GPU base and big as well, in bfloat16
    python benchmarks/train_speed.py --sizes tiny --repeats 5 --steps 8 --out /dev/null

All learn from the same batches in the same order: Multi30k EN-DE where it lies in ../shared/data (or
--data-dir), the toy corpus elsewhere. All have the same dimensions, tied embeddings, dropout in the same
places (embeddings and sublayer outputs), the same label smoothing, clipping and fused Adam. The two others are
given the faster of two ways to the loss: logits at every position, or at real tokens only. Every round times
each of them once, one after the other in an order that moves on, and the medians of the rounds count. Memory
is measured in a process of its own for each: the peak during the steps above what was resident once model and
optimizer were built, so gradients, Adam's means, activations and logits count, and code and weights do not.
"""
import argparse, json, math, statistics, subprocess, sys, time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from annotated_transformer.v1.batches import BatchLoader, encode_pairs
from annotated_transformer.v1.corpora import CorpusConfig, load_corpus
from annotated_transformer.v1.layers import Dropout
from annotated_transformer.v1.optimizer import make_optimizer
from annotated_transformer.v1.positions import SinusoidalPositions
from annotated_transformer.v1.training import Objective, TrainConfig, train_step
from annotated_transformer.v1.transformer import Transformer, TransformerConfig, count_parameters
from annotated_transformer.v1.vocabulary import PAD, train_tokenizer, write_whole
from record import RESULTS, about

ROOT = Path(__file__).parents[1]
SMOOTHING, CLIP, RATE, SEED = 0.1, 1.0, 1e-4, 1
OURS = 'annotated_transformer'


@dataclass(frozen=True)
class Size:
    "What is trained: a model, and the budget of its batches."
    model: TransformerConfig
    max_tokens: int
    gpu: bool = False # only timed on one, in bfloat16

SIZES = {
    'tiny': Size(TransformerConfig.preset('tiny', vocab_size=4000), 2048),
    'small': Size(TransformerConfig(vocab_size=8000, n_layers=3, d_model=256, d_ff=1024, n_heads=4), 3000),
    'base': Size(TransformerConfig.preset('base'), 25_000, gpu=True),
    'big': Size(TransformerConfig.preset('big'), 25_000, gpu=True),
}


# --- what is trained from

def load_batches(size, n, data_dir, multiple=1):
    "The first `n` batches of an epoch, and the name of the corpus that they are from."
    found = data_dir.is_dir()
    corpus = load_corpus(CorpusConfig('multi30k', data_dir=data_dir) if found else CorpusConfig('toy-ende'))
    v = min(size.model.vocab_size, 8000)  # a small corpus has no more; the model keeps its own size
    tokenizer = train_tokenizer('bpe', corpus['train'], corpus.langs, v)
    loader = BatchLoader(encode_pairs(corpus['train'], tokenizer, corpus.langs),
                         size.max_tokens, seed=SEED, multiple=multiple)
    batches = [batch for _, batch in zip(range(n), loader.epoch(0))]
    return batches, ('multi30k' if found else 'toy-ende') + f', BPE {len(tokenizer):,}'


# --- who trains: each is a function of a size that gives a model and a function from a batch to its mean loss

def smoothed(logits, targets):
    "The usual loss."
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=PAD, label_smoothing=SMOOTHING)

def head(output, states, targets, everywhere):
    "Logits at every position, or at real tokens only, and their loss."
    if everywhere: return smoothed(output(states), targets)
    real = targets != PAD
    return smoothed(output(states[real]), targets[real])


class TorchTransformer(nn.Module):
    "`nn.Transformer` with what it lacks: tied embeddings, positions, an output layer."
    def __init__(self, c):
        super().__init__()
        self.scale, self.embed = math.sqrt(c.d_model), nn.Embedding(c.vocab_size, c.d_model)
        self.positions, self.dropout = SinusoidalPositions(c.d_model, c.max_len), nn.Dropout(c.dropout)
        self.body = nn.Transformer(c.d_model, c.n_heads, c.n_layers, c.n_layers, c.d_ff, c.dropout, batch_first=True)
        for m in self.body.modules():       # dropout only where ours has it, which spares it the slow attention
            if isinstance(m, nn.MultiheadAttention): m.dropout = 0.0
            if isinstance(m, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)): m.dropout = nn.Identity()
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.output.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=c.d_model**-0.5)

    def read(self, ids): return self.dropout(self.positions(self.embed(ids) * self.scale))

    def states(self, src, tgt):
        future = torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool, device=tgt.device).triu(1)
        hidden = src == PAD
        return self.body(self.read(src), self.read(tgt), tgt_mask=future, tgt_is_causal=True,
                         src_key_padding_mask=hidden, memory_key_padding_mask=hidden)

def torch_transformer(config, everywhere):
    model = TorchTransformer(config)
    return model, lambda batch: head(model.output, model.states(batch.src, batch.tgt_in), batch.tgt_out, everywhere)

def marian(config, everywhere):
    import transformers
    c = config
    sides = {f'{side}_{what}': value for side in ('encoder', 'decoder') for what, value in
             dict(layers=c.n_layers, ffn_dim=c.d_ff, attention_heads=c.n_heads).items()}
    model = transformers.MarianMTModel(transformers.MarianConfig(
        vocab_size=c.vocab_size, d_model=c.d_model, dropout=c.dropout, attention_dropout=0.0, activation_dropout=0.0,
        activation_function='relu', scale_embedding=True, max_position_embeddings=c.max_len, use_cache=False,
        pad_token_id=PAD, decoder_start_token_id=1, eos_token_id=2, forced_eos_token_id=None,
        attn_implementation='sdpa', **sides))
    def loss(batch):
        states = model.model(batch.src, attention_mask=(batch.src != PAD), decoder_input_ids=batch.tgt_in)[0]
        return head(lambda x: model.lm_head(x) + model.final_logits_bias, states, batch.tgt_out, everywhere)
    return model, loss

OTHERS = {f'{name}, {where}': (build, everywhere)
          for name, build in (('nn.Transformer', torch_transformer), ('Marian', marian))
          for where, everywhere in (('all logits', True), ('real logits', False))}

SWITCHES = {OURS: {}, 'Adam unfused': dict(fused=False), 'all logits at once': dict(plain_loss=True),
            "torch's dropout": dict(plain_dropout=True), 'bfloat16': dict(precision='bfloat16'),
            'compiled': dict(compile=True)}

class PlainObjective(Objective):
    "The loss of all logits at once."
    def forward(self, batch):
        with torch.autocast(batch.src.device.type, torch.bfloat16, enabled=self.config.precision == 'bfloat16'):
            real = batch.tgt_out != PAD
            logits = self.model.output(self.model.states(batch.src, batch.tgt_in)[real])
            return F.cross_entropy(logits, batch.tgt_out[real], label_smoothing=SMOOTHING, reduction='sum')

def ours(size, device, precision, fused=True, plain_loss=False, plain_dropout=False, **switches):
    "Our model and its step, as it is or with a switch the other way."
    model = Transformer(size.model).to(device).train()
    for m in model.modules():
        if plain_dropout and isinstance(m, Dropout): m.__class__ = nn.Dropout
    config = TrainConfig(**dict(label_smoothing=SMOOTHING, precision=precision) | switches)
    objective, optimizer = ((PlainObjective if plain_loss else Objective)(model, config),
                            make_optimizer(model, fused=fused))
    return model, lambda batch: train_step(objective, [batch], optimizer, RATE, CLIP)

def contender(name, size, device, precision):
    "A model and its step: a function of a batch that updates the model and returns the loss."
    torch.manual_seed(SEED)
    if name in SWITCHES: return ours(size, device, **dict(precision=precision) | SWITCHES[name])
    build, everywhere = OTHERS[name]
    model, loss_of = build(size.model, everywhere)
    model.to(device).train()
    optimizer = make_optimizer(model, RATE)
    def step(batch):
        with torch.autocast(device, torch.bfloat16, enabled=precision == 'bfloat16'): loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.item()
    return model, step


# --- the floor

def products(batch, c):
    "(rows, in, out, how many at once) of every matrix product in a forward pass, attention's by head."
    b, n, m, d = len(batch), batch.src.size(1), batch.tgt.size(1) - 1, c.d_model
    def attend(q, k): return [(b*q, d, d, 1), (b*k, d, d, 1), (b*k, d, d, 1), (b*q, d, d, 1),
                              (q, d//c.n_heads, k, b*c.n_heads), (q, k, d//c.n_heads, b*c.n_heads)]
    def feed(rows): return [(rows, d, c.d_ff, 1), (rows, c.d_ff, d, 1)]
    layer = attend(n, n) + feed(b*n) + attend(m, m) + attend(m, n) + feed(b*m)
    return layer*c.n_layers + [(batch.n_tokens, d, c.vocab_size, 1)]

def flops(batch, c):
    "Of a step: two for each multiplication, and a product's backward pass is two products more."
    return sum(3 * 2*rows*k*n*times for rows, k, n, times in products(batch, c))

def floor(c, device, dtype):
    "A step that is nothing but products of its shapes, forward and backward, from and to memory that is there already."
    held = {}
    def room(what, *shape):
        if (what, shape) not in held: held[what, shape] = torch.randn(shape, device=device, dtype=dtype)
        return held[what, shape]
    def step(batch):
        for rows, k, n, times in products(batch, c):
            lead, product = ((), torch.mm) if times == 1 else ((times,), torch.bmm)
            x, w, y = room('x', *lead, rows, k), room('w', *lead, n, k), room('y', *lead, rows, n)
            product(x, w.mT, out=room('to', *lead, rows, n))  # y
            product(y, w, out=room('to', *lead, rows, k))     # the gradient of x
            product(y.mT, x, out=room('to', *lead, n, k))     # the gradient of w
        if device == 'cuda': torch.cuda.synchronize()
    return step

def matrix_rate(dtype, n=8192, repeats=20):
    "Floating-point operations a second of one large product on this card."
    a, b = (torch.randn(n, n, device='cuda', dtype=dtype) for _ in range(2))
    for _ in range(5): a @ b
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats): a @ b
    torch.cuda.synchronize()
    return repeats * 2*n**3 / (time.perf_counter() - began)


# --- measuring

def seconds(step, batches):
    began = time.perf_counter()
    for batch in batches: step(batch)
    return time.perf_counter() - began

def rounds(steps, batches, repeats):
    """{name: seconds of each round}: everybody once a round, each time another one first;
    one round more, before, counts for nothing.
    """
    names, found = list(steps), {name: [] for name in steps}
    for i in range(repeats + 1):
        for name in names[i % len(names):] + names[:i % len(names)]:
            took = seconds(steps[name], batches)
            if i: found[name].append(took)
    return found

def resident(peak=False):
    "Bytes of this process in memory, now or at most since `forget_peak`."
    field = 'VmHWM:' if peak else 'VmRSS:'
    return next(int(line.split()[1])*1024 for line in Path('/proc/self/status').read_text().splitlines()
                if line.startswith(field))

def forget_peak(): Path('/proc/self/clear_refs').write_text('5')

def peak_memory(name, size, device, precision, batches):
    "Bytes held at most during the steps, above what was held when model and optimizer were built."
    _, step = contender(name, size, device, precision)
    if device == 'cuda':
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        torch.randn(512, 512) @ torch.randn(512, 512)   # the libraries' own threads and memory
        forget_peak()
        before = resident()
    for batch in batches: step(batch)
    return (torch.cuda.max_memory_allocated() if device == 'cuda' else resident(peak=True)) - before

def memory_of(name, label, args):
    "`peak_memory` in a fresh process."
    command = [sys.executable, __file__, '--memory-of', name, '--sizes', label, '--device', args.device,
               '--steps', str(args.steps), '--threads', str(args.threads), '--data-dir', str(args.data_dir)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])

def measure(label, args):
    "One size: everybody's speed and memory, the floor, and how ours compares."
    size = SIZES[label]
    precision = 'bfloat16' if size.gpu else 'float32'
    batches, corpus = load_batches(size, args.steps, args.data_dir)
    batches, tokens = [batch.to(args.device) for batch in batches], sum(batch.n_tokens for batch in batches)
    made = {name: contender(name, size, args.device, precision) for name in (OURS, *OTHERS)}
    parameters = {name: count_parameters(model) for name, (model, _) in made.items()}
    assert max(parameters.values()) < 1.01*min(parameters.values()), parameters
    steps = ({name: step for name, (_, step) in made.items()}
             | {'floor': floor(size.model, args.device, getattr(torch, precision))})
    took = rounds(steps, batches, args.repeats)
    median = {name: statistics.median(t) for name, t in took.items()}
    memory = {name: memory_of(name, label, args) for name in (OURS, *OTHERS)}
    def ratio(a, b): return statistics.median(x/y for x, y in zip(took[a], took[b]))
    fastest = min(OTHERS, key=lambda name: ratio(name, OURS)) # round by round, as the ratio that is told
    for name in (OURS, *OTHERS):
        print(f'{label:6} {name:28} {tokens/median[name]:9,.0f} target tokens/s  {memory[name]/2**20:8,.0f} MiB')
    found = dict(
        tokens_per_second={name: round(tokens/median[name]) for name in (OURS, *OTHERS)},
        peak_mib={name: round(m/2**20) for name, m in memory.items()},
        ms_per_step={name: round(1000*t/args.steps, 2) for name, t in median.items()},
        fastest_other=fastest, speedup=round(ratio(fastest, OURS), 3),
        memory_ratio=round(memory[OURS]/memory[fastest], 3),
        memory_ratio_to_least=round(memory[OURS]/min(memory[n] for n in OTHERS), 3),
        share_of_floor=round(ratio('floor', OURS), 3), parameters=parameters[OURS], corpus=corpus,
        precision=precision, max_tokens=size.max_tokens, target_tokens_per_step=round(tokens/args.steps, 1),
        rounds={name: [round(t, 4) for t in ts] for name, ts in took.items()})
    if args.switches: found |= dict(switches=measure_switches(label, args))
    if args.device == 'cuda':
        found |= dict(copy_ms=copies(load_batches(size, args.steps, args.data_dir)[0]))
        rate, done = matrix_rate(getattr(torch, precision)), sum(flops(batch, size.model) for batch in batches)
        found |= dict(matrix_tflops=round(rate/1e12, 1), share_of_matrix_rate=round(done/median[OURS]/rate, 3))
    shown = 'speedup', 'memory_ratio', 'share_of_floor', 'share_of_matrix_rate'
    print(f'{label:6} beside {fastest}: ' + ', '.join(f'{k} {found[k]}' for k in shown if k in found), flush=True)
    return found | dict(model=asdict(size.model))

def measure_switches(label, args):
    """One size of ours with each switch the other way; `compiled` is given batches of few shapes,
    and everybody the same ones.
    """
    size, precision = SIZES[label], 'bfloat16' if SIZES[label].gpu else 'float32'
    batches, _ = load_batches(size, args.steps, args.data_dir, multiple=16)
    batches, tokens = [batch.to(args.device) for batch in batches], sum(batch.n_tokens for batch in batches)
    steps = {name: contender(name, size, args.device, precision)[1]
             for name in SWITCHES if SWITCHES[name].get('precision') != precision}
    steps['compiled'], began = counting_graphs(steps['compiled']), time.perf_counter()
    for batch in batches: steps['compiled'](batch)
    compiling = time.perf_counter() - began
    took = rounds(steps, batches, args.repeats)
    times = {name: round(statistics.median(t/o for t, o in zip(took[name], took[OURS])), 3) for name in steps}
    for name, t in times.items(): print(f'{label:6} {name:28} {t:5.2f} times the time of a step as it is', flush=True)
    return dict(times=times, compile_seconds=round(compiling, 1), graphs=steps['compiled'].graphs(),
                shapes=len({(batch.src.shape, batch.tgt.shape) for batch in batches}),
                tokens_per_second={name: round(tokens/statistics.median(t)) for name, t in took.items()})

def counting_graphs(step):
    "The same step, which knows how many graphs were compiled."
    import torch._dynamo
    torch._dynamo.utils.counters.clear()
    def counted(batch): return step(batch)
    counted.graphs = lambda: int(torch._dynamo.utils.counters['stats']['unique_graphs'])
    return counted

def copies(batches):
    """Milliseconds in which the Python thread is held up by copying a batch to the GPU:
    from ordinary memory, and from pinned.
    """
    found = {}
    for name, ready, free in ('pageable', batches, False), ('pinned', [batch.pin_memory() for batch in batches], True):
        torch.cuda.synchronize()
        found[name] = round(1000*statistics.median(
            seconds(lambda b: b.to('cuda', non_blocking=free), [b]) for b in ready), 4)
    return found


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--sizes', nargs='+', choices=SIZES, help='all that suit the device unless given')
    parser.add_argument('--repeats', type=int, default=7, help='rounds that count (7)')
    parser.add_argument('--steps', type=int, default=8, help='batches of a round (8)')
    parser.add_argument('--threads', type=int, default=0, help="of torch; its own choice unless given")
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu', choices=['cpu', 'cuda'])
    parser.add_argument('--data-dir', type=Path, default=ROOT.parent/'shared/data/multi30k', help='where Multi30k lies')
    parser.add_argument('--out', type=Path, help='the record (results/train-speed.json; of a GPU train-speed-gpu.json)')
    parser.add_argument('--switches', action='store_true',
                        help='also ours with each switch the other way; compiling takes minutes')
    parser.add_argument('--memory-of', choices=[OURS, *OTHERS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.sizes = args.sizes or [name for name, size in SIZES.items() if args.device == 'cuda' or not size.gpu]
    args.name = 'train-speed-gpu' if args.device == 'cuda' else 'train-speed'
    args.out = args.out or RESULTS/f'{args.name}.json'
    if args.threads: torch.set_num_threads(args.threads)
    return args

def main():
    args = arguments()
    if args.memory_of:
        size = SIZES[args.sizes[0]]
        batches, _ = load_batches(size, args.steps, args.data_dir)
        print(peak_memory(args.memory_of, size, args.device, 'bfloat16' if size.gpu else 'float32',
                          [batch.to(args.device) for batch in batches]))
        return
    import transformers
    metrics = {label: measure(label, args) for label in args.sizes}
    record = dict(name=args.name, **about(), seed=SEED, metrics=metrics, repeats=args.repeats, steps=args.steps)
    record['versions'] |= dict(transformers=transformers.__version__)
    write_whole(args.out, json.dumps(record, indent=2) + '\n')

if __name__ == '__main__': main()
