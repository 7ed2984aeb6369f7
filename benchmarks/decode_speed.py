#!/usr/bin/env python3
"""How fast translations are found, beside transformers' generate and CTranslate2,
with the same weights and the same search.

    python benchmarks/decode_speed.py --model runs/m30k # Multi30k test_2016_flickr; about eight minutes on two cores
    python benchmarks/decode_speed.py --model runs/m30k --sentences 200 --repeats 1 --out /dev/null

The model is one of our folders that both others can hold: post-norm with sinusoids (train with
`--norm post --init scaled --positions sinusoidal`). All engines read the same ids in the same batches,
sorted by length, and search alike: greedily and with a beam of 4, scores divided by the number of
tokens, until as many hypotheses have ended as the beam is wide (`patience` 1; early_stopping=True). The rule that is
ours by default, until none that lives can win, is measured besides; it finds at least as good scores
and takes more steps. Every round times each engine once, one after the other in an order that moves
on, and the medians of the rounds count. Batches of one are timed on every tenth sentence; where a
step is that small, ours keeps to one thread by itself, and the others have as many as they are
given. Beside each speed: BLEU, how many outputs are the same ids as ours, the time to a first token,
and the memory that a process of its own takes at most above what the loaded model takes. On a GPU
ours and transformers run in float32 and in bfloat16, CTranslate2 in its own float32 and float16.
"""
import argparse, json, statistics, subprocess, sys, tempfile, time
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import torch

from annotated_transformer.v1 import decoding
from annotated_transformer.v1.batches import pad_rows
from annotated_transformer.v1.checkpoints import fingerprint
from annotated_transformer.v1.corpora import CorpusConfig, load_corpus
from annotated_transformer.v1.decoding import DecodingConfig, beam_search, greedy
from annotated_transformer.v1.interop import export_ctranslate2, export_marian
from annotated_transformer.v1.scoring import score
from annotated_transformer.v1.translator import ModelFolder
from annotated_transformer.v1.vocabulary import BOS, EOS, PAD, write_whole
from record import RESULTS, about
from train_speed import forget_peak, resident

ROOT = Path(__file__).parents[1]
OURS, EXACT, HF, CT2 = ('annotated_transformer', 'annotated_transformer, until none can win',
                        'transformers', 'CTranslate2')
SEARCH = DecodingConfig(alpha=1.0, length_offset=0.0, patience=1.0)


# --- who translates: each is a function of rows of source ids (with EOS) and a beam that gives rows of target ids

def ours(folder, device, dtype, patience=1.0):
    model = ModelFolder.load(folder, device).model.to(dtype)
    def translate(rows, beam):
        src = pad_rows(rows).to(device)
        if beam == 1: return [h.ids for h in greedy(model, src, SEARCH)]
        return [best[0].ids for best in beam_search(model, src, SEARCH, beam_size=beam, patience=patience)]
    def first_token(rows, beam):
        with patch.object(decoding, 'length_limits',
                          lambda src, *_: torch.ones(len(src), dtype=torch.long, device=device)):
            translate(rows, beam)
    return translate, first_token

def longest(rows): return max(map(len, rows)) + SEARCH.max_extra

def transformers_generate(folder, device, dtype):
    import transformers
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as made:
        model = transformers.MarianMTModel.from_pretrained(
            export_marian(folder, Path(made)/'marian')).to(device, dtype).eval()
    plain = dict(do_sample=False, length_penalty=1.0, bad_words_ids=None,
                 renormalize_logits=False, forced_eos_token_id=None)
    def translate(rows, beam, most=None):
        src = pad_rows(rows).to(device)
        search = plain | (dict(num_beams=beam, early_stopping=True) if beam > 1
                          else dict(num_beams=1, early_stopping=False))
        found = model.generate(src, attention_mask=(src != PAD).long(),
                               max_new_tokens=most or longest(rows), max_length=None, **search)
        return [[token for token in row if token not in (PAD, BOS, EOS)] for row in found.tolist()]
    return translate, lambda rows, beam: translate(rows, beam, 1)

def ctranslate2_library(folder, device, threads, precision):
    import ctranslate2
    with tempfile.TemporaryDirectory() as made:
        path = export_ctranslate2(folder, Path(made)/'ct2', 'int8' if precision == 'int8' else 'float32')
        engine = ctranslate2.Translator(str(path), device=device, inter_threads=1, intra_threads=threads,
                                        compute_type=precision)
    tokenizer = ModelFolder.load(folder, 'cpu').tokenizer
    names = tokenizer.tokens(range(len(tokenizer)))
    ids = {name: i for i, name in enumerate(names)}
    def translate(rows, beam, most=None):
        # it puts EOS behind a source itself
        found = engine.translate_batch([[names[i] for i in row[:-1]] for row in rows],
                                       beam_size=beam, length_penalty=1.0,
                                       max_batch_size=0, max_decoding_length=most or longest(rows))
        return [[ids[name] for name in result.hypotheses[0]] for result in found]
    return translate, lambda rows, beam: translate(rows, beam, 1)

def engine(name, args):
    "(translate, first_token)"
    who, _, precision = name.partition(' in ')
    if who == CT2: return ctranslate2_library(args.model, args.device, args.threads, precision)
    dtype = getattr(torch, precision or 'float32')
    if who == HF: return transformers_generate(args.model, args.device, dtype)
    return ours(args.model, args.device, dtype, patience=0.0 if who == EXACT else 1.0)

def engines(device):
    more = [f'{CT2} in int8'] if device == 'cpu' else [f'{CT2} in float16', f'{OURS} in bfloat16', f'{HF} in bfloat16']
    return [OURS, EXACT, HF, f'{CT2} in float32', *more]


# --- measuring

def batches_of(rows, size):
    "Batches of like length, the longest first, as lists of positions."
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    return [order[i:i + size] for i in range(0, len(order), size)]

def run(translate, rows, size, beam):
    "(seconds, outputs in order)"
    found, began = [None] * len(rows), time.perf_counter()
    for batch in batches_of(rows, size):
        for i, ids in zip(batch, translate([rows[i] for i in batch], beam)): found[i] = ids
    return time.perf_counter() - began, found

def rounds(made, rows, size, beam, repeats):
    """{name: seconds of each round}, {name: outputs}: everybody once a round,
    each time another one first, after a round on a part.
    """
    took, found, names = {name: [] for name in made}, {}, list(made)
    for name in names: run(made[name][0], rows[:2*size if size > 1 else 5], size, beam)
    for i in range(repeats):
        for name in names[i % len(names):] + names[:i % len(names)]:
            seconds, found[name] = run(made[name][0], rows, size, beam)
            took[name].append(seconds)
    return took, found

def latency(made, rows, beam, repeats=20):
    "{name: median milliseconds until a single sentence has its first token}"
    took = {name: [] for name in made}
    for row in rows[:repeats + 1]:
        for name, (_, first_token) in made.items():
            began = time.perf_counter()
            first_token([row], beam)
            took[name].append(1000 * (time.perf_counter() - began))
    return {name: round(statistics.median(t[1:]), 2) for name, t in took.items()}

def peak_memory(name, rows, args):
    """Bytes held at most while three batches of 64 are translated with a beam of 4,
    above what is held once the model is there.
    """
    translate, _ = engine(name, args)
    batches = batches_of(rows, 64)
    translate([rows[i] for i in batches[-1][:4]], 4)    # the libraries' own threads and memory
    if args.device == 'cuda':
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()          # of torch; CTranslate2's is not counted there
    else:
        forget_peak()
        before = resident()
    for batch in (batches[0], batches[len(batches) // 2], batches[-1]): translate([rows[i] for i in batch], 4)
    return (torch.cuda.max_memory_allocated() if args.device == 'cuda' else resident(peak=True)) - before

def memory_of(name, args):
    "`peak_memory` in a fresh process."
    given = {name: getattr(args, name) for name in ('model', 'device', 'threads', 'data_dir', 'split', 'sentences')}
    flags = [part for name, value in given.items() for part in ('--' + name.replace('_', '-'), str(value))]
    command = [sys.executable, __file__, '--memory-of', name, *flags]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])

def load(args):
    "Sentence pairs, and the sources as ids."
    folder = ModelFolder.load(args.model, 'cpu')
    made = folder.training.get('run', {}).get('corpus', {})
    pairs = list(load_corpus(CorpusConfig('multi30k', pair=made.get('pair', 'en-de'),
                                          data_dir=args.data_dir))[args.split])[:args.sentences]
    return folder, pairs, folder.encode([src for src, _ in pairs])

def measure(args):
    "Everybody at each beam and batch size, beside ours."
    folder, pairs, rows = load(args)
    text = lambda ids: folder.tokenizer.decode(ids)
    made, metrics = {name: engine(name, args) for name in engines(args.device)}, {}
    for beam in args.beams:
        first = latency({name: e for name, e in made.items() if beam > 1 or name != EXACT}, rows, beam)
        for size in args.batches:
            some = rows if size > 1 else rows[::10]
            taking = {name: e for name, e in made.items() if not (name == EXACT and beam == 1)}
            took, found = rounds(taking, some, size, beam, args.repeats)
            table = metrics[f'beam {beam}, batch {size}'] = {}
            for name, outputs in found.items():
                seconds, tokens = statistics.median(took[name]), sum(len(ids) + 1 for ids in outputs)
                def ratio(other):
                    return round(statistics.median(
                        theirs / mine for theirs, mine in zip(took[other], took[name])), 3)
                table[name] = dict(
                    sentences_per_second=round(len(some) / seconds, 1), tokens_per_second=round(tokens / seconds),
                    first_token_ms=first[name], same_as_ours=sum(a == b for a, b in zip(outputs, found[OURS])),
                    of=len(some), rounds=[round(t, 3) for t in took[name]])
                if size > 1:
                    table[name]['bleu'] = round(
                        score([text(ids) for ids in outputs], [tgt for _, tgt in pairs]).bleu, 2)
                if name.startswith(OURS):
                    table[name]['speed'] = {other: ratio(other)
                                            for other in found if not other.startswith(OURS)}
                shown = '  '.join(f'{k} {v}' for k, v in table[name].items() if k not in ('rounds', 'of'))
                print(f'beam {beam} batch {size:2}  {name:42} {shown}', flush=True)
    memory = {name: round(memory_of(name, args) / 2**20) for name in made}
    print('MiB at most, beam 4, batch 64:', memory)
    return dict(speed=metrics, peak_mib=memory), folder


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', type=Path, required=True,
                        help='a folder that `annotated-transformer train` finished, post-norm with sinusoids')
    parser.add_argument('--split', default='test_2016_flickr', help='of Multi30k (test_2016_flickr)')
    parser.add_argument('--sentences', type=int, default=1000, help='the first so many of them (1000)')
    parser.add_argument('--beams', type=int, nargs='+', default=[1, 4])
    parser.add_argument('--batches', type=int, nargs='+', default=[64, 1])
    parser.add_argument('--repeats', type=int, default=3, help='rounds (3)')
    parser.add_argument('--threads', type=int, default=torch.get_num_threads(), help="torch's own choice unless given")
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu', choices=['cpu', 'cuda'])
    parser.add_argument('--data-dir', type=Path, default=ROOT.parent/'shared/data/multi30k', help='where Multi30k lies')
    parser.add_argument('--out', type=Path, default=RESULTS/'decode-speed.json', help='of the record')
    parser.add_argument('--memory-of', help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    return args

def main():
    args = arguments()
    if args.memory_of: return print(peak_memory(args.memory_of, load(args)[2], args))
    import ctranslate2, transformers
    metrics, folder = measure(args)
    settings = {k: getattr(args, k) for k in ('split', 'sentences', 'beams', 'batches', 'repeats', 'threads', 'device')}
    record = dict(name='decode-speed', **about(), metrics=metrics,
                  settings=settings | dict(search=asdict(SEARCH), model=asdict(folder.model.config)),
                  weights_sha256=fingerprint(args.model/'model.safetensors')['sha256'])
    record['versions'] |= dict(transformers=transformers.__version__, ctranslate2=ctranslate2.__version__)
    write_whole(args.out, json.dumps(record, indent=2) + '\n')

if __name__ == '__main__': main()
