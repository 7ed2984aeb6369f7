#!/usr/bin/env python3
"""Measure how fast translations are found, beside transformers' generate and CTranslate2, with the same weights.

    python benchmarks/decode_speed.py                     # the toy model that comes with the package
    python benchmarks/decode_speed.py --size base         # random weights: toy, tiny, small, base or big
    python benchmarks/decode_speed.py --size base --device cuda   # on a GPU, in float32 and float16
    python benchmarks/decode_speed.py --model runs/m30k --corpus multi30k --split test_2016_flickr
    python benchmarks/decode_speed.py --old CHECKOUT      # our engine beside that of version 0.1.0, checked out there
    python benchmarks/decode_speed.py --sentences 40 --rounds 1 --out quick.json        # try it

The record is written after every cell of the table. Run the same command again to measure the cells that are missing;
`--cells 2` stops after two of them. `--again 64` measures the cells of this batch size again, and leaves the others as
they are; each row of the record says when it was measured.

How it measures:

- Each engine runs in its own process, one process for each number of threads, so that no two OpenMP runtimes share one.
- CTranslate2 is called in two ways: each product divided between the threads, or the batch divided between workers
  with one thread each.
- Rounds alternate in time, each starting with another engine. A round measures each engine with each number of
  threads; the number with the best median counts for each engine and each cell of the table, and the record shows the
  others' medians too. A worker sleeps while it is not measured.
- The record holds every round of the number that counts; the tables show the median, the smallest and the largest.
- All engines search alike: greedily or with a beam of 4, scores divided by the number of tokens, until as many
  hypotheses have finished as the beam is wide. The default settings of our library have rows of their own: it divides
  scores by a length penalty of 0.6, and stops when no active hypothesis can win.
- A model with random weights never ends a translation: each has as many tokens as its source, EOS included. A
  stopping rule then makes no difference, so there are no rows for it.
- `ids` is from token ids to token ids, `text` from text to text; both are measured in the same rounds, in the same
  batches, sorted by the number of ids. A batch of 1 gives the latency of single sentences: median and 95th percentile.
- The load average before the start is in the record: on an idle machine, it is close to 0.

On a GPU, PyTorch and transformers compute in float32 and in float16, and CTranslate2 in float16. CTranslate2 4.8 loads
cuBLAS 12 from the library path (LD_LIBRARY_PATH).

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
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = 'annotated_transformer'
OURS_DEFAULT = 'annotated_transformer, default settings'
OURS_CTRANSLATE2 = 'annotated_transformer with CTranslate2'
OURS_CTRANSLATE2_INT8 = 'annotated_transformer with CTranslate2 int8'
OURS_CTRANSLATE2_DEFAULT = 'annotated_transformer with CTranslate2, default settings'
OURS_CTRANSLATE2_INT8_DEFAULT = 'annotated_transformer with CTranslate2 int8, default settings'
TRANSFORMERS = 'transformers'
CTRANSLATE2 = 'CTranslate2 float32'
CTRANSLATE2_INT8 = 'CTranslate2 int8'
CTRANSLATE2_WORKERS = 'CTranslate2 float32, a worker for each thread'
CTRANSLATE2_INT8_WORKERS = 'CTranslate2 int8, a worker for each thread'
OLD = 'annotated_transformer 0.1.0'
DEFAULT = (OURS_DEFAULT, OURS_CTRANSLATE2_DEFAULT, OURS_CTRANSLATE2_INT8_DEFAULT) # differ from other rows with a beam only
ENGINES = (OURS, OURS_CTRANSLATE2, OURS_CTRANSLATE2_INT8, *DEFAULT, TRANSFORMERS, CTRANSLATE2, CTRANSLATE2_INT8,
           CTRANSLATE2_WORKERS, CTRANSLATE2_INT8_WORKERS)
WORKERS = (CTRANSLATE2_WORKERS, CTRANSLATE2_INT8_WORKERS) # divide a batch, as our engine does; one sentence cannot be divided
OURS_HALF = 'annotated_transformer float16'
OURS_CTRANSLATE2_HALF = 'annotated_transformer with CTranslate2 float16'
TRANSFORMERS_HALF = 'transformers float16'
CTRANSLATE2_HALF = 'CTranslate2 float16'
ON_GPU = (OURS, OURS_HALF, OURS_DEFAULT, OURS_CTRANSLATE2_HALF, TRANSFORMERS, TRANSFORMERS_HALF, CTRANSLATE2_HALF)
TEXT_ENGINES = ( # also translate from text to text
    OURS, OURS_HALF, OURS_CTRANSLATE2, OURS_CTRANSLATE2_HALF, OURS_CTRANSLATE2_INT8, *DEFAULT)
SEARCH = {'length_penalty': 1.0, 'length_penalty_offset': 0.0}
SIZES = { # of the models with random weights
    'toy': {'vocab_size': 1_000, 'n_layers': 2, 'd_model': 128, 'd_ff': 256, 'n_heads': 4},
    'tiny': {'vocab_size': 10_000, 'n_layers': 4, 'd_model': 128, 'd_ff': 256, 'n_heads': 4},
    'small': {'vocab_size': 16_000, 'n_layers': 6, 'd_model': 256, 'd_ff': 1024, 'n_heads': 4},
    'base': {'vocab_size': 32_000, 'n_layers': 6, 'd_model': 512, 'd_ff': 2048, 'n_heads': 8},
    'big': {'vocab_size': 32_000, 'n_layers': 6, 'd_model': 1024, 'd_ff': 4096, 'n_heads': 16},
}
REST = 0.3 # seconds between measurements, so that the last engine's threads have stopped waiting for work


# --- the engines: each returns a function from (rows, beam size) to outputs; rows are ids with EOS, or texts

def our_engine(prepared, threads, engine, device, compute_type, has_default_settings):
    import torch
    from annotated_transformer.inference import DecodingConfig
    from annotated_transformer.translator import Translator
    torch.set_num_threads(threads)
    if engine == 'pytorch':
        translator = Translator.load(prepared['model'], device=device)
        translator.model.to(getattr(torch, compute_type))
    else:
        translator = Translator.load(prepared['model'], device=device, engine=engine, compute_type=compute_type)
    search = asdict(DecodingConfig(max_extra_tokens=prepared['max_extra_tokens']))
    if not has_default_settings:
        search |= {**SEARCH, 'patience': 1.0}

    def settings_of(beam):
        return {**search, 'beam_size': beam, 'patience': search['patience'] if beam > 1 else None}

    def from_ids(rows, beam):
        config = DecodingConfig(**settings_of(beam))
        return [best[0].ids for best in translator.engine.beam_search(rows, config)]

    def from_text(texts, beam):
        settings = settings_of(beam)
        del settings['n_best'] # one translation for each text
        return translator.translate(texts, batch_tokens=10**6, **settings)

    return from_ids, from_text

def old_engine(prepared, threads):
    "The engine of version 0.1.0; the worker imports the package from its checkout."
    import torch
    from annotated_transformer.batches import pad_rows
    from annotated_transformer.decoding import DecodingConfig, beam_search, greedy
    from annotated_transformer.translator import ModelFolder
    torch.set_num_threads(threads)
    model = ModelFolder.load(prepared['old_model'], 'cpu').model
    config = DecodingConfig(alpha=SEARCH['length_penalty'], length_offset=SEARCH['length_penalty_offset'],
                            max_extra=prepared['max_extra_tokens'], patience=1.0)

    def from_ids(rows, beam):
        src = pad_rows(rows)
        if beam == 1:
            return [found.ids for found in greedy(model, src, config)]
        return [best[0].ids for best in beam_search(model, src, config, beam_size=beam)]

    return from_ids, None

def transformers_engine(prepared, threads, device, number_format):
    import torch
    import transformers
    from annotated_transformer.batches import pad_rows
    from annotated_transformer.vocabulary import BOS, EOS, PAD
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    model = transformers.MarianMTModel.from_pretrained(prepared['marian']).to(device, getattr(torch, number_format)).eval()
    plain = {'do_sample': False, 'length_penalty': 1.0, 'bad_words_ids': None, 'renormalize_logits': False,
             'forced_eos_token_id': None, 'max_length': None}

    @torch.inference_mode()
    def from_ids(rows, beam):
        src = pad_rows(rows).to(device)
        longest = src.size(1) + prepared['max_extra_tokens']
        found = model.generate(src, attention_mask=(src != PAD).long(), max_new_tokens=longest,
                               num_beams=beam, early_stopping=beam > 1, **plain)
        return [[token for token in row if token not in (PAD, BOS, EOS)] for row in found.tolist()]

    return from_ids, None

def ctranslate2_engine(prepared, threads, device, compute_type, n_workers):
    import math
    import ctranslate2
    from annotated_transformer.vocabulary import load_tokenizer
    tokenizer = load_tokenizer(Path(prepared['ctranslate2']) / 'tokenizer.json')
    ids = token_ids(tokenizer)
    names = list(ids)
    engine = ctranslate2.Translator(str(prepared['ctranslate2']), device=device, compute_type=compute_type,
                                    inter_threads=n_workers, intra_threads=threads // n_workers)

    def from_ids(rows, beam):
        sources = [[names[i] for i in row[:-1]] for row in rows] # the engine adds EOS
        longest = max(map(len, rows)) + prepared['max_extra_tokens']
        found = engine.translate_batch(sources, beam_size=beam, length_penalty=1.0, max_decoding_length=longest,
                                       max_batch_size=math.ceil(len(rows) / n_workers))
        return [[ids[name] for name in result.hypotheses[0]] for result in found]

    return from_ids, None

def token_ids(tokenizer):
    return {name: i for i, name in enumerate(tokenizer.tokens(range(len(tokenizer))))}

def number_format(name):
    if 'int8' in name:
        return 'int8'
    return 'float16' if 'float16' in name else 'float32'

def make_engine(name, prepared, threads, device):
    if name == OLD:
        return old_engine(prepared, threads)
    if name.startswith(OURS):
        engine = 'ctranslate2' if 'CTranslate2' in name else 'pytorch'
        return our_engine(prepared, threads, engine, device, number_format(name), name in DEFAULT)
    if name.startswith(TRANSFORMERS):
        return transformers_engine(prepared, threads, device, number_format(name))
    n_workers = threads if name in WORKERS else 1
    return ctranslate2_engine(prepared, threads, device, number_format(name), n_workers)


# --- a worker: one engine with one number of threads; it reads cells from standard input and answers with seconds

def batches_of(rows, size):
    "Positions of the rows of each batch, the longest rows first."
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    return [order[start:start + size] for start in range(0, len(order), size)]

def run_cell(translate, rows, batches, beam):
    "Translate all rows in batches. Return the seconds of each batch and the outputs in the order of the rows."
    outputs = [None] * len(rows)
    seconds = []
    for batch in batches:
        start = time.perf_counter()
        found = translate([rows[i] for i in batch], beam)
        seconds.append(time.perf_counter() - start)
        for i, output in zip(batch, found):
            outputs[i] = output
    return seconds, outputs

def work(args):
    prepared = json.loads(args.prepared.read_text())
    from_ids, from_text = make_engine(args.worker, prepared, args.thread_counts[0], args.device)
    print(json.dumps({'ready': True}), flush=True)
    for line in sys.stdin:
        cell = json.loads(line)
        translate = from_text if cell['unit'] == 'text' else from_ids
        rows = prepared['texts' if cell['unit'] == 'text' else 'rows'][:cell['sentences']]
        if cell['warm_up']:
            rows = rows[:2 * cell['batch']] if cell['batch'] > 1 else rows[:5]
        batches = batches_of(prepared['rows'][:len(rows)], cell['batch']) # the same for texts as for ids
        seconds, outputs = run_cell(translate, rows, batches, cell['beam'])
        digests = [hashlib.sha256(json.dumps(output).encode()).hexdigest()[:12] for output in outputs]
        n_tokens = sum(len(output) + 1 for output in outputs) if cell['unit'] == 'ids' else None
        print(json.dumps({'seconds': seconds, 'n_tokens': n_tokens, 'digests': digests}), flush=True)

class Worker:
    "A process with one engine."
    def __init__(self, name, threads, prepared, device):
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads),
                           RAYON_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM='true')
        if name == OLD:
            environment['PYTHONPATH'] = json.loads(prepared.read_text())['old']
        command = [sys.executable, __file__, '--worker', name, '--thread-counts', str(threads),
                   '--prepared', str(prepared), '--device', device]
        self.errors = tempfile.TemporaryFile('w+')
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.errors, text=True, env=environment)

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise RuntimeError(f'the process ended: {self.process.args}\n{self.errors.read()[-2000:]}')
        return json.loads(line)

    def measure(self, cell, warm_up=False):
        time.sleep(REST)
        self.process.stdin.write(json.dumps({**cell, 'warm_up': warm_up}) + '\n')
        self.process.stdin.flush()
        return self.read()

    def stop(self):
        self.process.stdin.close()
        self.process.wait()
        self.errors.close()


# --- the measurement

def random_model(size, folder):
    """A model with random weights that never ends a translation, in the format that all engines can hold.

    Its tokenizer is that of the toy model, with more tokens, which occur in outputs only.
    """
    import torch
    from annotated_transformer.checkpoints import build_model
    from annotated_transformer.marian import MarianConfig
    from annotated_transformer.translator import Translator
    from annotated_transformer.vocabulary import EOS, BytePairTokenizer
    torch.manual_seed(0)
    config = MarianConfig(**SIZES[size], activation='relu', max_len=64) # its output layer has a bias
    toy = Translator.load(device='cpu').tokenizer
    state = {**toy.state(), 'langs': toy.langs}
    tokens = state['tokenizer']['model']['vocab']
    for i in range(len(tokens), config.vocab_size):
        tokens[f'▁more{i}'] = i
    tokenizer = BytePairTokenizer.from_state(state)
    model = build_model(config).eval()
    with torch.no_grad():
        model.lm_head.bias[EOS] = -1e4
    Translator(model, tokenizer).save(folder)
    return folder

def random_texts(tokenizer, n):
    "Texts of 20 random words, each of which is one token: their translations have one length for all engines."
    import random
    words = []
    for token in tokenizer.tokens(range(len(tokenizer))):
        word = token.removeprefix('▁')
        if word.isalpha() and len(tokenizer.encode(word)) == 1:
            words.append(word)
    numbers = random.Random(0)
    return [' '.join(numbers.choices(words, k=20)) for _ in range(n)]

def prepare(args, folder):
    "Convert the model for every engine and encode the sentences."
    from annotated_transformer.corpora import CorpusConfig, load_corpus
    from annotated_transformer.interop import export_ctranslate2, export_marian
    from annotated_transformer.translator import SHIPPED, Translator
    from annotated_transformer.vocabulary import EOS
    if args.size:
        model = random_model(args.size, folder / 'model')
    else:
        model = args.model or SHIPPED
        if args.old:
            old_model = args.old / 'annotated_transformer/data/toy-ende'
            model = folder / 'model'
            subprocess.run([sys.executable, ROOT / 'tools/convert_v1.py', old_model, model], check=True)
    tokenizer = Translator.load(model, device='cpu').tokenizer
    if args.size:
        texts = random_texts(tokenizer, args.sentences)
    else:
        data = {'data_dir': args.data_dir} if args.corpus == 'multi30k' else {}
        texts = [src for src, _ in load_corpus(CorpusConfig(args.corpus, **data))[args.split]][:args.sentences]
    rows = [[*row, EOS] for row in tokenizer.encode_batch(texts, tokenizer.langs[0])]
    prepared = {'model': str(model), 'rows': rows, 'texts': texts, 'max_extra_tokens': 0 if args.size else 50,
                'marian': str(export_marian(model, folder / 'marian'))}
    if args.old:
        prepared |= {'old': str(args.old.resolve()), 'old_model': str(old_model.resolve())}
    if uses_ctranslate2(args):
        prepared['ctranslate2'] = str(export_ctranslate2(model, folder / 'ctranslate2'))
    path = folder / 'prepared.json'
    path.write_text(json.dumps(prepared))
    return path, prepared

def uses_ctranslate2(args):
    return any('CTranslate2' in name for name in args.engines)

def cells_of(args):
    "Every combination of search and batch size."
    for beam in args.beams:
        for batch in args.batches:
            sentences = args.sentences if batch > 1 else args.single_sentences
            yield {'beam': beam, 'batch': batch, 'sentences': sentences}

def contestants(cell, engines):
    "The engines to measure in a cell, each with its units."
    names = [name for name in engines
             if not (name in DEFAULT and cell['beam'] == 1) and not (name in WORKERS and cell['batch'] == 1)]
    return [(name, unit) for unit in ('ids', 'text') for name in names if unit == 'ids' or name in TEXT_ENGINES]

def median_seconds(results):
    return round(statistics.median(sum(result['seconds']) for result in results), 4)

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
        found['latency_ms'] = {'median': round(statistics.median(times), 2),
                               '95 %': round(times[int(0.95 * len(times))], 2)}
    return found

def measure_cell(args, path, cell):
    "Return one row for each engine and unit."
    pairs = contestants(cell, args.engines)
    workers = {(name, threads): Worker(name, threads, path, args.device)
               for name in dict(pairs) for threads in args.thread_counts}
    results = {(name, unit, threads): [] for name, unit in pairs for threads in args.thread_counts}
    try:
        for worker in workers.values():
            worker.read() # it is ready
        for name, unit, threads in results:
            workers[name, threads].measure({**cell, 'unit': unit}, warm_up=True)
        for i in range(args.rounds):
            start = i % len(pairs)
            for name, unit in pairs[start:] + pairs[:start]:
                for threads in args.thread_counts:
                    results[name, unit, threads].append(workers[name, threads].measure({**cell, 'unit': unit}))
    finally:
        for worker in workers.values():
            worker.stop()
    rows = []
    now = f'{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC'
    for name, unit in pairs:
        seconds = {threads: median_seconds(results[name, unit, threads]) for threads in args.thread_counts}
        best = min(seconds, key=seconds.get)
        found = results[name, unit, best]
        first = next(key for key in results if key[1] == unit)
        same = sum(a == b for a, b in zip(found[0]['digests'], results[first][0]['digests']))
        row = {**cell, 'unit': unit, 'engine': name, 'threads': best, 'seconds_by_threads': seconds,
               'same_as_first': same, 'measured': now, **summary(found, cell)}
        rows.append(row)
        print(f"{unit:4} beam {row['beam']} batch {row['batch']:2} {name:58} "
              f"{row['threads']} threads {row['sentences_per_second']:8.1f} sentences/s "
              f"({row['slowest']}-{row['fastest']}) {row.get('tokens_per_second', ''):>7} tokens/s "
              f"{row.get('latency_ms', '')} same {same}/{cell['sentences']}", flush=True)
    return rows

def measure(args, path, record, out):
    "Measure the cells that the record lacks, and those to measure again. Write the record after each."
    from annotated_transformer.files import atomic_write, to_json
    n_measured = 0
    for cell in cells_of(args):
        others = [row for row in record['metrics'] if not cell.items() <= row.items()]
        if len(others) < len(record['metrics']) and cell['batch'] not in args.again:
            continue
        if args.cells is not None and n_measured == args.cells:
            print('run the same command again to measure the rest')
            return
        record['metrics'] = others + measure_cell(args, path, cell)
        record['metrics'].sort(key=lambda row: (row['beam'], row['batch']))
        atomic_write(out, to_json(record))
        n_measured += 1

def continue_record(record, old, again):
    """Take the rows of an earlier record of the same measurement.

    To measure some of its cells again, the record must be one of the same measurement; it keeps its command and its date.
    """
    different = [key for key in ('settings', 'weights_sha256', 'cpu_model', 'cpu_flags', 'versions')
                 if json.loads(json.dumps(record[key])) != old.get(key)]
    if again and different:
        sys.exit(f'--again: this record does not exist, or differs from this measurement in {", ".join(different)}')
    if different:
        return
    for row in old['metrics']:
        row.setdefault('measured', old['date'])
    record['metrics'] = old['metrics']
    if again:
        now = {key: record[key] for key in ('command', 'date')}
        record |= {'command': old['command'], 'date': old['date']}
        record['measured_again'] = [*old.get('measured_again', []), now]

def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', type=Path, help='a model folder (default: the toy model of the package)')
    parser.add_argument('--size', choices=list(SIZES), help='random weights of this size, instead of a model')
    parser.add_argument('--corpus', default='toy-ende', choices=['toy-ende', 'multi30k'])
    parser.add_argument('--split', default='test')
    parser.add_argument('--data-dir', type=Path, help='folder of Multi30k')
    parser.add_argument('--sentences', type=int, default=500, help='in batches of more than 1 (500)')
    parser.add_argument('--single-sentences', type=int, help='in batches of 1 (a tenth of --sentences, at least 5)')
    parser.add_argument('--beams', type=int, nargs='+', default=[1, 4])
    parser.add_argument('--batches', type=int, nargs='+', default=[1, 8, 64])
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--thread-counts', type=int, nargs='+', default=list(range(1, (os.cpu_count() or 1) + 1)))
    parser.add_argument('--device', default='cpu', choices=['cpu', 'cuda'])
    parser.add_argument('--engines', nargs='+', choices=[*ENGINES, *ON_GPU], metavar='NAME',
                        help=f'default: all of {"; ".join(ENGINES)}; with --device cuda, of {"; ".join(ON_GPU)}')
    parser.add_argument('--old', type=Path, help='a checkout of version 0.1.0: compare with its engine and its model')
    parser.add_argument('--cells', type=int, help='stop after so many cells (default: measure all that are missing)')
    parser.add_argument('--again', type=int, nargs='+', default=[], metavar='BATCH',
                        help='measure these batch sizes again, although the record has them')
    parser.add_argument('--name', help='of the record (decode-speed or decode-speed-SIZE; on a GPU, decode-speed-gpu-SIZE)')
    parser.add_argument('--out', type=Path, help='the record (default: benchmarks/results/NAME.json)')
    parser.add_argument('--worker', choices=[*ENGINES, *ON_GPU, OLD], help=argparse.SUPPRESS)
    parser.add_argument('--prepared', type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    possible = ON_GPU if args.device == 'cuda' else ENGINES
    args.engines = args.engines or list(possible)
    args.single_sentences = args.single_sentences or max(5, args.sentences // 10)
    if args.single_sentences > args.sentences:
        parser.error('--single-sentences: at most as many as --sentences')
    impossible = [name for name in args.engines if name not in possible]
    if impossible:
        parser.error(f'--engines: {"; ".join(impossible)} cannot be measured with --device {args.device}')
    if args.device == 'cuda' and not args.worker:
        args.thread_counts = [1]
    if args.size:
        args.engines = [name for name in args.engines if name not in DEFAULT]
    if args.old and (args.size or args.model):
        parser.error('--old brings its own model: leave out --size and --model')
    if args.old and not args.worker:
        args.engines = [OURS, OLD]
        args.name = args.name or 'decode-speed-0.1.0'
    return args

def main():
    args = arguments()
    if args.worker:
        return work(args)
    import torch
    import transformers
    from annotated_transformer.checkpoints import load_model
    from annotated_transformer.files import checksum, read_json
    from record import RESULTS, about, cpu_model
    if args.device == 'cuda' and not torch.cuda.is_available():
        sys.exit('--device cuda: PyTorch finds no GPU')
    if args.device == 'cuda' and uses_ctranslate2(args):
        import ctranslate2
        if not ctranslate2.get_cuda_device_count():
            sys.exit('--device cuda: CTranslate2 finds no GPU; choose --engines without it')
    parts = ['decode-speed', 'gpu' if args.device == 'cuda' else None, args.size]
    name = args.name or '-'.join(part for part in parts if part)
    out = args.out or RESULTS / f'{name}.json'
    with tempfile.TemporaryDirectory() as folder:
        path, prepared = prepare(args, Path(folder))
        settings = {name: getattr(args, name) for name in ('size', 'corpus', 'split', 'sentences', 'single_sentences', 'beams', 'batches',
                                                           'rounds', 'thread_counts', 'engines', 'device')}
        settings |= {'search': {**SEARCH, 'max_extra_tokens': prepared['max_extra_tokens']},
                     'model': asdict(load_model(prepared['model']).config)}
        record = {'name': name, **about(), 'metrics': [], 'settings': settings,
                  'weights_sha256': checksum(Path(prepared['model']) / 'model.safetensors')['sha256'],
                  'cpu_model': cpu_model(), 'load_average': round(os.getloadavg()[0], 2)}
        record['versions'] |= {'transformers': transformers.__version__}
        if uses_ctranslate2(args):
            import ctranslate2
            record['versions'] |= {'ctranslate2': ctranslate2.__version__}
        old = read_json(out, {})
        continue_record(record, old, args.again)
        measure(args, path, record, out)


if __name__ == '__main__':
    main()
