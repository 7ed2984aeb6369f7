#!/usr/bin/env python3
"""Measure what millions of pairs cost: made-up text of real lengths is prepared, and trained on.

    python benchmarks/large_corpus.py # 1, 5, 10 and 20 million pairs; writes results/large-corpus.json
    python benchmarks/large_corpus.py --sizes 20000 40000 --out - # try the script; prints the results only

The record is written after each part. With --resume and the same --folder, an interrupted run measures what is missing.

For each size, `annotated-transformer prepare` runs with a tokenizer that is trained already: its time, and the memory
of all its processes together. Then a new process trains the tiny model on the prepared folder for some steps, and
another one reads a whole epoch of batches, without a model that could hide what reading costs. Both report their peak
memory, and the times of a step and of a batch.

Sentence lengths are log-normal with a mean of about 25 words, as in parliament debates and news. Words are drawn from
100,000 in each language by Zipf's law. 20 million pairs take about 20 GB of disk.
"""
import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import torch

from annotated_transformer.checkpoints import build_model
from annotated_transformer.corpora import CorpusConfig
from annotated_transformer.files import atomic_write
from annotated_transformer.kernels import accelerate
from annotated_transformer.large_corpora import available_cores
from annotated_transformer.loader import TrainingLoader
from annotated_transformer.parallel_text import PairStream, stream_files
from annotated_transformer.prepared import open_prepared, read_manifest
from annotated_transformer.recipe import default_run, train_translator
from annotated_transformer.trainer import TrainConfig
from annotated_transformer.training import make_optimizer, train_step
from annotated_transformer.vocabulary import PAD, train_tokenizer
from record import RESULTS, about

LANGS = ('en', 'de')
VOCAB_SIZE = 32_000
SAMPLE_SIZE = 200_000
N_WORDS = 100_000       # different words in each language
N_QUANTILES = 1 << 22
MAX_TOKENS = 4096
CLEANING = '--max-words 100 --max-ratio 9 --unique --held-out 16'.split()

def make_words(rng: np.random.Generator, vowels: list[str], syllables: float) -> np.ndarray:
    "Return different made-up words, the shorter ones first; `syllables` is their mean length."
    consonants = 'b d f g h k l m n p r s t v w z sch st tr br'.split()
    known = [c + v + end for c in consonants for v in vowels for end in ('', 'n', 'r', 's', 't')]
    words = {}
    while len(words) < N_WORDS:
        n = 1 + rng.poisson(syllables * min(1, (len(words) + 1) / 2000) ** 0.3)
        words[''.join(known[i] for i in rng.integers(len(known), size=n))] = None
    return np.array(list(words), dtype=object)

def quantiles() -> np.ndarray:
    "Return the rank of a word for each of many probabilities: a draw is then one look-up."
    probabilities = 1 / (np.arange(N_WORDS) + 2.7) ** 1.05
    cumulative = np.cumsum(probabilities / probabilities.sum())
    return np.searchsorted(cumulative, (np.arange(N_QUANTILES) + 0.5) / N_QUANTILES).astype(np.int32)

def sentences(rng: np.random.Generator, words: np.ndarray, ranks: np.ndarray, lengths: np.ndarray) -> list[str]:
    "Return sentences of given lengths, of words drawn by Zipf's law."
    drawn = words[ranks[rng.integers(N_QUANTILES, size=lengths.sum())]].tolist()
    ends = np.cumsum(lengths).tolist()
    return [' '.join(drawn[start:end]) + ' .\n' for start, end in zip([0, *ends], ends)]

def generate(folder: Path, sizes: list[int], seed: int) -> None:
    "Write the pairs of all sizes, unless they are there; the smaller files are the beginning of the largest."
    if (folder / 'text.json').is_file() and json.loads((folder / 'text.json').read_text()) == [sizes, seed]:
        return
    rng = np.random.default_rng(seed)
    words = [make_words(rng, ['a', 'e', 'i', 'o', 'u'], 1.2), make_words(rng, ['a', 'e', 'i', 'ü', 'ö', 'ei'], 1.5)]
    ranks = quantiles()
    files = {n: [open(folder / f'{n}.{lang}', 'w', encoding='utf-8') for lang in LANGS] for n in sizes}
    start = time.perf_counter()
    n_written = 0
    while n_written < max(sizes):
        part = min(10_000, min(n for n in sizes if n > n_written) - n_written)
        n_src = np.clip(np.exp(rng.normal(np.log(20), 0.65, part)), 1, 120).astype(int)
        n_tgt = np.clip(np.rint(n_src * np.exp(rng.normal(-0.05, 0.15, part))), 1, 120).astype(int)
        sides = [sentences(rng, of_lang, ranks, lengths) for of_lang, lengths in zip(words, (n_src, n_tgt))]
        for n, pair_of_files in files.items():
            if n > n_written:
                for file, lines in zip(pair_of_files, sides):
                    file.write(''.join(lines))
        n_written += part
        if n_written % 1_000_000 == 0:
            print(f'{n_written:,} pairs written, {time.perf_counter() - start:.0f} s', file=sys.stderr, flush=True)
    for pair_of_files in files.values():
        for file in pair_of_files:
            file.close()
    atomic_write(folder / 'text.json', json.dumps([sizes, seed]))

def megabytes(process: psutil.Process) -> tuple[float, float]:
    "Return the memory of a process and its children: the sum of their shares (PSS), and the largest resident set."
    shares = []
    sets = []
    for member in [process, *process.children(recursive=True)]:
        try:
            info = member.memory_full_info()
        except psutil.Error: # it has ended
            continue
        shares.append(getattr(info, 'pss', info.uss) / 1e6)
        sets.append(info.rss / 1e6)
    return sum(shares), max(sets, default=0)

def prepare(folder: Path, n: int, num_proc: int) -> dict:
    "Run the command `prepare` on one size, and watch its memory."
    out = folder / f'prepared-{n}'
    shutil.rmtree(out, ignore_errors=True) # of an interrupted run: half of the work would be measured
    load_before = os.getloadavg()[0]
    command = [sys.executable, '-m', 'annotated_transformer', 'prepare', '--src', folder / f'{n}.en', '--tgt', folder / f'{n}.de',
               '--tokenizer', folder / 'tokenizer.json', '--num-proc', num_proc, *CLEANING, '--out', out]
    start = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = psutil.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    total = largest = 0.0
    while process.poll() is None:
        try:
            found = megabytes(process)
        except psutil.Error:
            continue
        total = max(total, found[0])
        largest = max(largest, found[1])
        time.sleep(1)
    if process.returncode:
        raise SystemExit(f'prepare failed with exit code {process.returncode}')
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    manifest = read_manifest(out)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {'load_before': load_before, 'load_after': os.getloadavg()[0],
            'prepare_minutes': seconds / 60, 'prepare_cpu_minutes': cpu_seconds / 60, 'prepare_memory_mb': total,
            'prepare_largest_process_mb': largest, 'kept': manifest['pairs'], 'dropped': manifest['dropped'],
            'src_tokens': manifest['src_tokens'], 'tgt_tokens': manifest['tgt_tokens'], 'shards': len(manifest['shards']),
            'text_mb': sum(record['size'] for record in manifest['inputs'].values()) / 1e6,
            'prepared_mb': sum(record['size'] for record in manifest['files'].values()) / 1e6}

def peak_mb() -> float:
    "Return the peak resident memory of this process. (`ru_maxrss` may be that of the process that started it.)"
    status = Path('/proc/self/status').read_text()
    return int(re.search(r'VmHWM:\s+(\d+) kB', status)[1]) * 1024 / 1e6

def padding_share(batches) -> float:
    "Return the share of padding in the ids of batches."
    n_padding = 0
    n_ids = 0
    for batch in batches:
        for ids in (batch.src, batch.tgt):
            n_padding += int((ids == PAD).sum())
            n_ids += ids.numel()
    return n_padding / n_ids

def training_config(folder: Path, n: int):
    "Return the settings of a run of the tiny model on a prepared folder."
    return default_run(CorpusConfig('prepared', prepared=folder / f'prepared-{n}'), 'tiny')

def train(folder: Path, n: int, steps: int, seed: int) -> dict:
    "Train the tiny model, as the command does; then time single steps."
    config = training_config(folder, n)
    training = TrainConfig(MAX_TOKENS, max_steps=steps, save_every=steps, seed=seed)
    start = time.perf_counter()
    train_translator(replace(config, training=training), folder / f'run-{n}', overwrite=True, progress_bar=False)
    found = {'train_peak_mb': peak_mb(), 'training_minutes': (time.perf_counter() - start) / 60}
    torch.manual_seed(seed)
    model = accelerate(build_model(config.model))
    optimizer = make_optimizer(model)
    loader = TrainingLoader(open_prepared(config.corpus.prepared, config.model.max_len), MAX_TOKENS, seed)
    seconds = []
    for batch in islice(loader.epoch(0), 1 + steps):
        start = time.perf_counter()
        train_step(model, batch, optimizer, lr=1e-4)
        seconds.append(time.perf_counter() - start)
    return found | {'step_ms': 1000 * statistics.median(seconds[1:]), 'threads': torch.get_num_threads()}

def read(folder: Path, n: int, steps: int, seed: int) -> dict:
    "Read one epoch of batches."
    config = training_config(folder, n)
    start = time.perf_counter()
    loader = TrainingLoader(open_prepared(config.corpus.prepared, config.model.max_len), MAX_TOKENS, seed)
    first = next(loader.epoch(0))
    found = {'first_batch_seconds': time.perf_counter() - start, 'first_batch_tokens': first.n_tokens}
    n_tokens = 0
    n_batches = 0
    start = time.perf_counter()
    for batch in loader.epoch(1):
        n_tokens += batch.n_tokens
        n_batches += 1
    loader_ms = 1000 * (time.perf_counter() - start) / n_batches
    found |= {'read_peak_mb': peak_mb(), 'loader_ms': loader_ms, 'batches': n_batches, 'predicted_batches': len(loader),
              'tokens_are_all': n_tokens == loader.pairs.tokens[1]}
    return found | {'padding': padding_share(islice(loader.epoch(2), 100))}

STAGES = {'train': train, 'read': read}

def in_new_process(stage: str, folder: Path, n: int, steps: int, seed: int) -> dict:
    "Run a stage in a new process, and return its results."
    command = [sys.executable, __file__, '--stage', stage, '--folder', folder, '--sizes', n, '--steps', steps, '--seed', seed]
    done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])

def rounded(value):
    "Round every number in a result to four digits."
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    return float(f'{value:.4g}') if isinstance(value, float) else value

def table(rows: list[dict]) -> str:
    "Return the main results as text."
    names = ('pairs prepare_minutes prepare_cpu_minutes prepare_memory_mb prepared_mb train_peak_mb read_peak_mb step_ms '
             'loader_ms step_over_loader').split()
    lines = [names] + [[f'{row[name]:,}' if name == 'pairs' else f'{row.get(name, float("nan")):.4g}' for name in names]
                       for row in rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(names))]
    return '\n'.join('  '.join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--sizes', type=int, nargs='+', default=[1_000_000, 5_000_000, 10_000_000, 20_000_000], help='pairs')
    parser.add_argument('--steps', type=int, default=20, help='training steps at each size')
    parser.add_argument('--num-proc', type=int, default=2, help='processes that encode')
    parser.add_argument('--seed', type=int, default=1, help='seed of text, batches and weights')
    parser.add_argument('--folder', type=Path, help='folder of the files (default: a temporary folder)')
    parser.add_argument('--out', default='large-corpus', help='name of the record in results/; -: write no record')
    parser.add_argument('--resume', action='store_true', help='keep the parts that the record has')
    parser.add_argument('--note', default='', help='a note in the record: was the machine shared?')
    parser.add_argument('--stage', choices=STAGES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        return print(json.dumps(STAGES[args.stage](args.folder, args.sizes[0], args.steps, args.seed)))
    path = RESULTS / f'{args.out}.json'
    metrics = {}
    if args.resume and path.is_file():
        metrics = json.loads(path.read_text(encoding='utf-8'))['metrics']
    rows = {row['pairs']: row for row in metrics.get('sizes', []) if row['pairs'] in args.sizes}
    metrics |= {'num_proc': args.num_proc, 'cores': available_cores(), 'vocab_size': VOCAB_SIZE,
                'sample_size': SAMPLE_SIZE, 'max_tokens': MAX_TOKENS, 'steps': args.steps}

    def keep(n, part):
        rows.setdefault(n, {'pairs': n}).update(rounded(part))
        metrics['sizes'] = [rows[n] for n in sorted(rows)]
        metrics['memory_ranges'] = {}
        for name in ('train_peak_mb', 'read_peak_mb'):
            peaks = [row[name] for row in rows.values() if name in row]
            if peaks:
                metrics['memory_ranges'][name] = round(max(peaks) - min(peaks), 1)
        print(table(metrics['sizes']), flush=True)
        record = {'name': args.out, **about(), 'seed': args.seed, 'note': args.note, 'metrics': metrics}
        if args.out != '-':
            atomic_write(path, json.dumps(record, indent=2) + '\n')

    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        generate(folder, sorted(args.sizes), args.seed)
        if not (folder / 'tokenizer.json').is_file():
            start = time.perf_counter()
            text = [folder / f'{min(args.sizes)}.{lang}' for lang in LANGS]
            sample = PairStream(lambda: stream_files(*text)).sample(SAMPLE_SIZE, args.seed)
            train_tokenizer('bpe', sample, LANGS, VOCAB_SIZE).save(folder / 'tokenizer.json')
            metrics['tokenizer_seconds'] = round(time.perf_counter() - start, 1)
            del sample
        for n in args.sizes:
            if 'prepare_minutes' not in rows.get(n, {}) or not (folder / f'prepared-{n}').is_dir():
                keep(n, prepare(folder, n, args.num_proc))
            if 'train_peak_mb' not in rows[n]:
                keep(n, in_new_process('train', folder, n, args.steps, args.seed))
        for n in args.sizes:
            if 'read_peak_mb' not in rows[n]:
                keep(n, in_new_process('read', folder, n, args.steps, args.seed))
            keep(n, {'step_over_loader': rows[n]['step_ms'] / rows[n]['loader_ms']})

if __name__ == '__main__':
    main()
