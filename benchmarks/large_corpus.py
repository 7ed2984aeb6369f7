#!/usr/bin/env python3
"""Measure what a corpus larger than memory costs: toy EN-DE pairs are written, encoded on disk, and trained on.

    python benchmarks/large_corpus.py # 250,000, 500,000 and 1,000,000 pairs; writes results/large-corpus.json
    python benchmarks/large_corpus.py --sizes 2000 4000 --out - # try the script; prints the results only

Each size is prepared and trained on in a separate process, so that peak memory is measured for each. A straight line
through the measured times predicts the time for ten million pairs.
"""
import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import torch

from annotated_transformer.corpora import load_corpus
from annotated_transformer.files import atomic_write
from annotated_transformer.kernels import accelerate
from annotated_transformer.large_corpora import available_cores, open_pairs, train_tokenizer_on
from annotated_transformer.loader import TrainingLoader
from annotated_transformer.recipe import model_config
from annotated_transformer.toy_languages import toy_pairs
from annotated_transformer.training import make_optimizer, train_step
from annotated_transformer.transformer import Transformer
from annotated_transformer.vocabulary import PAD, load_tokenizer
from record import RESULTS, about

VOCAB, MAX_TOKENS, MAX_LEN = 4000, 4096, 256

def padding_share(batches) -> float:
    "Return the share of padding in the ids of batches."
    n_padding = 0
    n_ids = 0
    for batch in batches:
        for ids in (batch.src, batch.tgt):
            n_padding += int((ids == PAD).sum())
            n_ids += ids.numel()
    return n_padding / n_ids

def rss_mb() -> float: return psutil.Process().memory_info().rss/1e6

def cpu_seconds() -> float:
    "Return the CPU time of this process and of its finished child processes."
    return sum(u.ru_utime + u.ru_stime
               for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))

def corpus(folder: Path, n: int):
    return load_corpus('files', src=folder/f'{n}.en', tgt=folder/f'{n}.de', on_disk=True,
                       max_words=100, max_ratio=9., unique=True)

def generate(
    folder: Path, sizes: list[int], seed: int
) -> dict[int, float]: # {size: seconds until so many were written}
    "Write the pairs of all sizes; the smaller files are the beginning of the largest."
    began, seconds = time.perf_counter(), {}
    files = {n: [open(folder/f'{n}.{lang}', 'w', encoding='utf-8') for lang in ('en', 'de')] for n in sizes}
    for i, pair in enumerate(islice(toy_pairs('train', seed), max(sizes)), 1):
        for n in sizes:
            if i <= n: files[n][0].write(pair.src + '\n'), files[n][1].write(pair.tgt + '\n')
        if i in sizes: seconds[i] = time.perf_counter() - began
        if i % 100_000 == 0:
            print(f'{i:,} pairs written, {time.perf_counter() - began:.0f} s', file=sys.stderr, flush=True)
    for pair_of_files in files.values():
        for file in pair_of_files: file.close()
    return seconds

def prepare(folder: Path, n: int) -> dict:
    "Encode the pairs of one size with a tokenizer that is trained already."
    found, tokenizer = corpus(folder, n), load_tokenizer(folder/'tokenizer.json')
    began = time.perf_counter()
    pairs = open_pairs(found['train'], tokenizer, found.langs, MAX_LEN, folder/'encoded')
    seconds, encoded = time.perf_counter() - began, sum(p.stat().st_size for p in pairs.folder.iterdir())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    began = time.perf_counter()
    open_pairs(found['train'], tokenizer, found.langs, MAX_LEN, folder/'encoded')
    return dict(prepare_seconds=seconds, prepare_cpu_seconds=cpu_seconds(), reopen_seconds=time.perf_counter() - began,
                prepare_rss_mb=peak[0]*1024/1e6, prepare_worker_rss_mb=peak[1]*1024/1e6,
                kept=len(pairs), dropped=pairs.dropped, encoded_mb=encoded/1e6, tokens=pairs.tokens)

def train(folder: Path, n: int, steps: int) -> dict:
    "Train the tiny model for some steps; then run one epoch of the loader alone."
    torch.manual_seed(0)
    found, tokenizer = corpus(folder, n), load_tokenizer(folder/'tokenizer.json')
    pairs = open_pairs(found['train'], tokenizer, found.langs, MAX_LEN, folder/'encoded', progress_bar=False)
    model = accelerate(Transformer(model_config('tiny', vocab_size=len(tokenizer))))
    optimizer, loader, seconds, most = make_optimizer(model), TrainingLoader(pairs, MAX_TOKENS, seed=1), [], 0.
    began = time.perf_counter()
    n_batches = len(loader)
    counted = time.perf_counter() - began
    cpu = []
    for batch in islice(loader.epoch(0), steps):
        began, cpu_began = time.perf_counter(), time.process_time()
        train_step(model, batch, optimizer, lr=1e-4)
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - cpu_began)
        most = max(most, rss_mb())
    after_steps, began, cpu_began, batches = most, time.perf_counter(), time.process_time(), 0
    for batch in loader.epoch(1): batches += 1
    of_loader, of_loader_cpu = (time.perf_counter() - began)/batches, (time.process_time() - cpu_began)/batches
    step, step_cpu = statistics.median(seconds[1:]), statistics.median(cpu[1:])
    return dict(batches=n_batches, count_seconds=counted,
                step_ms=1000*step, loader_ms=1000*of_loader, loader_share=of_loader/step,
                step_cpu_ms=1000*step_cpu, loader_cpu_ms=1000*of_loader_cpu, threads=torch.get_num_threads(),
                padding=padding_share(islice(loader.epoch(2), 100)),
                rss_after_steps_mb=after_steps, rss_mb=max(most, rss_mb()))

def measure(stage: str, folder: Path, n: int, steps: int) -> dict:
    "Run a stage in a new process, and return its results."
    command = [sys.executable, __file__, '--stage', stage,
               '--folder', str(folder), '--sizes', str(n), '--steps', str(steps)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])

def rounded(value):
    if isinstance(value, dict): return {k: rounded(v) for k, v in value.items()}
    return float(f'{value:.4g}') if isinstance(value, float) else value

def line(rows: list[dict]) -> dict:
    "Fit preparation times by a straight line, and predict ten million pairs."
    slope, start = np.polyfit([row['pairs']/1e6 for row in rows], [row['prepare_seconds'] for row in rows], 1)
    fitted = [start + slope*row['pairs']/1e6 for row in rows]
    off = max(abs(f/row['prepare_seconds'] - 1) for f, row in zip(fitted, rows))
    last = rows[-1]
    return dict(seconds=start, seconds_per_million=slope, furthest_off=off, ten_million_minutes=(start + 10*slope)/60,
                ten_million_encoded_mb=10e6*last['encoded_mb']/last['pairs'])

def table(rows: list[dict]) -> str:
    keys = ('pairs generate_seconds prepare_seconds prepare_cpu_seconds encoded_mb '
            'prepare_rss_mb rss_mb step_ms loader_ms loader_share').split()
    lines = [keys] + [[f'{row[key]:,}' if key == 'pairs' else f'{row[key]:.4g}' for key in keys] for row in rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(keys))]
    return '\n'.join('  '.join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--sizes', type=int, nargs='+', default=[250_000, 500_000, 1_000_000], help='pairs')
    parser.add_argument('--steps', type=int, default=15, help='training steps at each size')
    parser.add_argument('--seed', type=int, default=1, help='seed of the sentences')
    parser.add_argument('--folder', type=Path,
                        help='folder of the files (default: a temporary folder)')
    parser.add_argument('--out', default='large-corpus', help='name of the record in results/; -: write no record')
    parser.add_argument('--note', default='', help='a note in the record: was the machine shared?')
    parser.add_argument('--stage', choices=['prepare', 'train'], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        stage = (prepare(args.folder, args.sizes[0]) if args.stage == 'prepare'
                 else train(args.folder, args.sizes[0], args.steps))
        return print(json.dumps(stage))
    with tempfile.TemporaryDirectory() as temporary:
        folder, sizes, load = args.folder or Path(temporary), sorted(args.sizes), [os.getloadavg()[0]]
        folder.mkdir(parents=True, exist_ok=True)
        generated = generate(folder, sizes, args.seed)
        began = time.perf_counter()
        smallest = corpus(folder, sizes[0])
        train_tokenizer_on('bpe', smallest['train'], smallest.langs, VOCAB).save(folder/'tokenizer.json')
        tokenizer_seconds, rows = time.perf_counter() - began, []
        for n in sizes:
            rows.append(rounded(dict(pairs=n, generate_seconds=generated[n], **measure('prepare', folder, n, 0),
                                     **measure('train', folder, n, args.steps))))
            load.append(os.getloadavg()[0])
            print(table(rows), flush=True)
    metrics = dict(sizes=rows, line=rounded(line(rows)) if len(rows) > 1 else None,
                   num_proc=available_cores(), tokenizer_seconds=round(tokenizer_seconds, 1),
                   vocab_size=VOCAB, max_tokens=MAX_TOKENS, steps=args.steps, load_average=[round(x, 1) for x in load])
    record = dict(name=args.out, **about(), seed=args.seed, note=args.note, metrics=metrics)
    print(json.dumps(metrics['line'], indent=1))
    if args.out != '-': atomic_write(RESULTS/f'{args.out}.json', json.dumps(record, indent=2) + '\n')

if __name__ == '__main__':
    main()
