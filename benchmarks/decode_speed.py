#!/usr/bin/env python3
"""Measure how fast translations are found, beside transformers' generate and CTranslate2, with the same weights.

    python benchmarks/decode_speed.py                     # the toy model that comes with the package
    python benchmarks/decode_speed.py --model runs/m30k --corpus multi30k --split test_2016_flickr
    python benchmarks/decode_speed.py --sentences 40 --rounds 1 --out /tmp/quick.json   # try it

How it measures:

- Each engine runs in its own process, one process for each number of threads, so that no two OpenMP runtimes share one.
- One round over all numbers of threads chooses the best number for each engine and each cell of the table;
  the record shows all of them.
- The rounds that count alternate in time, each starting with another engine. The record holds every round; the
  tables show the median, the smallest and the largest.
- All engines search alike: greedily or with a beam of 4, scores divided by the number of tokens, until as many
  hypotheses have finished as the beam is wide. Our default, which stops when no active hypothesis can win, has its own row.
- `ids` is from token ids to token ids, `text` from text to text. Batches are sorted by length. A batch of 1 gives
  the latency of single sentences: median and 95th percentile.

The model must be one that all engines can hold: post-norm, sinusoidal positions.
"""
import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = 'annotated_transformer'
OURS_EXACT = 'annotated_transformer, until none can win'
OURS_CTRANSLATE2 = 'annotated_transformer with CTranslate2'
TRANSFORMERS = 'transformers'
CTRANSLATE2 = 'CTranslate2 float32'
CTRANSLATE2_INT8 = 'CTranslate2 int8'
ENGINES = (OURS, OURS_EXACT, OURS_CTRANSLATE2, TRANSFORMERS, CTRANSLATE2, CTRANSLATE2_INT8)
TEXT_ENGINES = (OURS, OURS_CTRANSLATE2) # those that also translate from text to text
SEARCH = {'length_penalty': 1.0, 'length_penalty_offset': 0.0, 'max_extra_tokens': 50}
REST = 0.3 # seconds between measurements, so that the last engine's threads have stopped waiting for work


# --- the engines: each returns a function from (rows, beam size) to outputs; rows are ids with EOS, or texts

def our_engine(prepared, threads, patience):
    import torch
    from annotated_transformer.batches import pad_rows
    from annotated_transformer.inference import DecodingConfig, beam_search, greedy
    from annotated_transformer.translator import Translator
    translator = Translator.load(prepared['model'], device='cpu')

    def from_ids(rows, beam):
        config = DecodingConfig(beam_size=beam, patience=patience if beam > 1 else None, **SEARCH)
        src = pad_rows(rows)
        if beam == 1:
            return [hypothesis.ids for hypothesis in greedy(translator.model, src, config)]
        return [best[0].ids for best in beam_search(translator.model, src, config)]

    def from_text(texts, beam):
        return translator.translate(texts, beam_size=beam, patience=patience if beam > 1 else None,
                                    batch_tokens=10**6, **SEARCH)

    torch.set_num_threads(threads)
    return from_ids, from_text

def our_ctranslate2(prepared, threads, compute_type):
    from annotated_transformer.interop import CTranslate2Translator
    translator = CTranslate2Translator(prepared['ctranslate2'], compute_type=compute_type,
                                       inter_threads=1, intra_threads=threads)
    ids = token_ids(translator.tokenizer)
    names = list(ids)

    def from_ids(rows, beam):
        found = translator.search([[names[i] for i in row[:-1]] for row in rows], beam_size=beam, patience=1.0, **SEARCH)
        return [[ids[name] for name in tokens] for tokens in found]

    def from_text(texts, beam):
        return translator.translate(texts, beam_size=beam, patience=1.0, **SEARCH)

    return from_ids, from_text

def transformers_engine(prepared, threads):
    import torch
    import transformers
    from annotated_transformer.batches import pad_rows
    from annotated_transformer.vocabulary import BOS, EOS, PAD
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    model = transformers.MarianMTModel.from_pretrained(prepared['marian']).eval()
    plain = {'do_sample': False, 'length_penalty': 1.0, 'bad_words_ids': None, 'renormalize_logits': False,
             'forced_eos_token_id': None, 'max_length': None}

    @torch.inference_mode()
    def from_ids(rows, beam):
        src = pad_rows(rows)
        longest = src.size(1) + SEARCH['max_extra_tokens']
        found = model.generate(src, attention_mask=(src != PAD).long(), max_new_tokens=longest,
                               num_beams=beam, early_stopping=beam > 1, **plain)
        return [[token for token in row if token not in (PAD, BOS, EOS)] for row in found.tolist()]

    return from_ids, None

def ctranslate2_engine(prepared, threads, compute_type):
    import ctranslate2
    from annotated_transformer.vocabulary import load_tokenizer
    tokenizer = load_tokenizer(Path(prepared['ctranslate2']) / 'tokenizer.json')
    ids = token_ids(tokenizer)
    names = list(ids)
    engine = ctranslate2.Translator(str(prepared['ctranslate2']), device='cpu', compute_type=compute_type,
                                    inter_threads=1, intra_threads=threads)

    def from_ids(rows, beam):
        sources = [[names[i] for i in row[:-1]] for row in rows] # the engine adds EOS
        longest = max(map(len, rows)) + SEARCH['max_extra_tokens']
        found = engine.translate_batch(sources, beam_size=beam, length_penalty=1.0, max_batch_size=0,
                                       max_decoding_length=longest)
        return [[ids[name] for name in result.hypotheses[0]] for result in found]

    return from_ids, None

def token_ids(tokenizer):
    return {name: i for i, name in enumerate(tokenizer.tokens(range(len(tokenizer))))}

def make_engine(name, prepared, threads):
    if name == OURS:
        return our_engine(prepared, threads, patience=1.0)
    if name == OURS_EXACT:
        return our_engine(prepared, threads, patience=None)
    if name == OURS_CTRANSLATE2:
        return our_ctranslate2(prepared, threads, 'float32')
    if name == TRANSFORMERS:
        return transformers_engine(prepared, threads)
    return ctranslate2_engine(prepared, threads, 'int8' if name == CTRANSLATE2_INT8 else 'float32')


# --- a worker: one engine with one number of threads; it reads cells from standard input and answers with seconds

def batches_of(rows, size):
    "Positions of the rows of each batch, the longest rows first."
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    return [order[start:start + size] for start in range(0, len(order), size)]

def run_cell(translate, rows, beam, size):
    "Translate all rows in batches. Return the seconds of each batch and the outputs in the order of the rows."
    outputs = [None] * len(rows)
    seconds = []
    for batch in batches_of(rows, size):
        start = time.perf_counter()
        found = translate([rows[i] for i in batch], beam)
        seconds.append(time.perf_counter() - start)
        for i, output in zip(batch, found):
            outputs[i] = output
    return seconds, outputs

def work(args):
    prepared = json.loads(args.prepared.read_text())
    from_ids, from_text = make_engine(args.worker, prepared, args.thread_counts[0])
    print(json.dumps({'ready': True}), flush=True)
    for line in sys.stdin:
        cell = json.loads(line)
        translate = from_text if cell['unit'] == 'text' else from_ids
        rows = prepared['texts' if cell['unit'] == 'text' else 'rows'][:cell['sentences']]
        if cell['warm_up']:
            rows = rows[:2 * cell['batch']] if cell['batch'] > 1 else rows[:5]
        seconds, outputs = run_cell(translate, rows, cell['beam'], cell['batch'])
        digests = [hashlib.sha256(json.dumps(output).encode()).hexdigest()[:12] for output in outputs]
        n_tokens = sum(len(output) + 1 for output in outputs) if cell['unit'] == 'ids' else None
        print(json.dumps({'seconds': seconds, 'n_tokens': n_tokens, 'digests': digests}), flush=True)

class Worker:
    "A process with one engine."
    def __init__(self, name, threads, prepared):
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads),
                           TOKENIZERS_PARALLELISM='false')
        command = [sys.executable, __file__, '--worker', name, '--thread-counts', str(threads),
                   '--prepared', str(prepared)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True, env=environment)
        self.read()

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f'the process ended: {self.process.args}')
        return json.loads(line)

    def measure(self, cell, warm_up=False):
        time.sleep(REST)
        self.process.stdin.write(json.dumps({**cell, 'warm_up': warm_up}) + '\n')
        self.process.stdin.flush()
        return self.read()

    def stop(self):
        self.process.stdin.close()
        self.process.wait()


# --- the measurement

def prepare(args, folder):
    "Convert the model for every engine and encode the sentences."
    from annotated_transformer.corpora import CorpusConfig, load_corpus
    from annotated_transformer.interop import export_ctranslate2, export_marian
    from annotated_transformer.translator import SHIPPED, Translator
    from annotated_transformer.vocabulary import EOS
    model = args.model or SHIPPED
    data = {'data_dir': args.data_dir} if args.corpus == 'multi30k' else {}
    corpus = load_corpus(CorpusConfig(args.corpus, **data))
    texts = [src for src, _ in corpus[args.split]][:args.sentences]
    tokenizer = Translator.load(model, device='cpu').tokenizer
    rows = [[*row, EOS] for row in tokenizer.encode_batch(texts, tokenizer.langs[0])]
    prepared = {'model': str(model), 'rows': rows, 'texts': texts,
                'marian': str(export_marian(model, folder / 'marian')),
                'ctranslate2': str(export_ctranslate2(model, folder / 'ctranslate2'))}
    path = folder / 'prepared.json'
    path.write_text(json.dumps(prepared))
    return path, prepared

def cells_of(args):
    "Every combination of search, batch size and unit."
    for beam in args.beams:
        for batch in args.batches:
            for unit in ('ids', 'text'):
                sentences = args.sentences if batch > 1 else max(20, args.sentences // 10)
                yield {'beam': beam, 'batch': batch, 'unit': unit, 'sentences': sentences}

def engines_of(cell, engines):
    found = [name for name in engines if cell['unit'] == 'ids' or name in TEXT_ENGINES]
    return [name for name in found if not (name == OURS_EXACT and cell['beam'] == 1)]

def summary(results, cell):
    "Speed over the rounds, and for single sentences the latency over all rounds."
    totals = [sum(result['seconds']) for result in results]
    found = {'rounds': [round(total, 4) for total in totals],
             'sentences_per_second': round(cell['sentences'] / statistics.median(totals), 1),
             'slowest': round(cell['sentences'] / max(totals), 1), 'fastest': round(cell['sentences'] / min(totals), 1)}
    if results[0]['n_tokens']:
        found['tokens_per_second'] = round(results[0]['n_tokens'] / statistics.median(totals))
    if cell['batch'] == 1:
        times = sorted(1000 * second for result in results for second in result['seconds'])
        found['latency_ms'] = {'median': round(statistics.median(times), 2), '95 %': round(times[int(0.95 * len(times))], 2)}
    return found

def measure(args, path):
    "Return one row for each cell and engine."
    workers = {(name, threads): Worker(name, threads, path) for name in args.engines for threads in args.thread_counts}
    table = []
    try:
        for cell in cells_of(args):
            names = engines_of(cell, args.engines)
            sweep = {}
            for name in names:
                for threads in args.thread_counts:
                    workers[name, threads].measure(cell, warm_up=True)
                    seconds = sum(workers[name, threads].measure(cell)['seconds'])
                    sweep.setdefault(name, {})[threads] = round(seconds, 4)
            best = {name: min(seconds, key=seconds.get) for name, seconds in sweep.items()}
            results = {name: [] for name in names}
            for i in range(args.rounds):
                start = i % len(names)
                for name in names[start:] + names[:start]:
                    results[name].append(workers[name, best[name]].measure(cell))
            for name in names:
                digests = results[name][0]['digests']
                same = sum(a == b for a, b in zip(digests, results[names[0]][0]['digests']))
                row = {**cell, 'engine': name, 'threads': best[name], 'seconds_by_threads': sweep[name],
                       'same_as_first': same, **summary(results[name], cell)}
                table.append(row)
                print(f"{row['unit']:4} beam {row['beam']} batch {row['batch']:2} {name:42} "
                      f"{row['threads']} threads {row['sentences_per_second']:8.1f} sentences/s "
                      f"({row['slowest']}-{row['fastest']}) {row.get('tokens_per_second', ''):>7} tokens/s "
                      f"{row.get('latency_ms', '')} same {same}/{cell['sentences']}", flush=True)
    finally:
        for worker in workers.values():
            worker.stop()
    return table

def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', type=Path, help='a model folder (default: the toy model of the package)')
    parser.add_argument('--corpus', default='toy-ende', choices=['toy-ende', 'multi30k'])
    parser.add_argument('--split', default='test')
    parser.add_argument('--data-dir', type=Path, help='folder of Multi30k')
    parser.add_argument('--sentences', type=int, default=500, help='for batches of 1, a tenth of them (500)')
    parser.add_argument('--beams', type=int, nargs='+', default=[1, 4])
    parser.add_argument('--batches', type=int, nargs='+', default=[1, 8, 64])
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--thread-counts', type=int, nargs='+', default=list(range(1, (os.cpu_count() or 1) + 1)))
    parser.add_argument('--engines', nargs='+', default=list(ENGINES), choices=ENGINES)
    parser.add_argument('--name', default='decode-speed', help='of the record')
    parser.add_argument('--out', type=Path, help='the record (default: benchmarks/results/NAME.json)')
    parser.add_argument('--worker', choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument('--prepared', type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()

def cpu_flags():
    info = Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line.split(':')[1].split() for line in lines if line.startswith('flags')), [])
    return [flag for flag in flags if flag.startswith(('avx', 'amx', 'sse4', 'fma'))]

def main():
    args = arguments()
    if args.worker:
        return work(args)
    import ctranslate2
    import transformers
    from annotated_transformer.checkpoints import load_model
    from annotated_transformer.files import atomic_write, checksum, to_json
    from record import RESULTS, about
    with tempfile.TemporaryDirectory() as folder:
        path, prepared = prepare(args, Path(folder))
        table = measure(args, path)
    settings = {name: getattr(args, name)
                for name in ('corpus', 'split', 'sentences', 'beams', 'batches', 'rounds', 'thread_counts')}
    config = asdict(load_model(prepared['model']).config)
    record = {'name': args.name, **about(), 'metrics': table, 'settings': {**settings, 'search': SEARCH, 'model': config},
              'weights_sha256': checksum(Path(prepared['model']) / 'model.safetensors')['sha256'],
              'cpu_flags': cpu_flags()}
    record['versions'] |= {'transformers': transformers.__version__, 'ctranslate2': ctranslate2.__version__}
    atomic_write(args.out or RESULTS / f'{args.name}.json', to_json(record))


if __name__ == '__main__':
    main()
