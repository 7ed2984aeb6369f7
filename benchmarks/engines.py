#!/usr/bin/env python3
"""Compare the engines on a test set: PyTorch, CTranslate2 in float32 and in int8, each with two stopping rules. A search
ends when no active hypothesis can win, or (patience 1, the default of `serve`) as soon as --beam-size hypotheses have
finished.

    python benchmarks/engines.py --model runs/mine --data-dir DIR

DIR holds Multi30k. Each engine translates the split with the settings stored with the model. The record holds BLEU, the share
of translations that equal those of PyTorch, and what kind the others are: PyTorch scores both translations in float32, and
the score of the other engine's is the same up to rounding (a tie), lower or higher.

It also holds the seconds of each search: of every tenth sentence alone, and of all sentences in batches of 64. Each system
runs in a process of its own, with a thread for each core; rounds alternate in time, each starting with another system. All
rounds are recorded.

    python benchmarks/engines.py --model runs/mine --data-dir DIR --part margins

measures first margins of the exact search in CTranslate2 in the same way, and adds them to the record.
"""
import argparse
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from annotated_transformer.batches import pad_rows
from annotated_transformer.corpora import CorpusConfig, load_corpus
from annotated_transformer.decoding import Hypothesis, normalized_score
from annotated_transformer.files import atomic_write, checksum, read_json, to_json
from annotated_transformer.inference import DecodingConfig
from annotated_transformer.large_corpora import available_cores
from annotated_transformer.scoring import score
from annotated_transformer.translator import Translator
from annotated_transformer.vocabulary import BOS, EOS
from record import RESULTS, about, paired_test

TIE = 1e-4 # scores that differ by less are the same up to rounding
BATCH = 64 # sentences
PYTORCH = 'PyTorch'
SYSTEMS = { # name: engine, compute type, patience
    PYTORCH: ('pytorch', 'float32', None),
    'CTranslate2 float32': ('ctranslate2', 'float32', None),
    'CTranslate2 int8': ('ctranslate2', 'int8', None),
    'PyTorch, patience 1': ('pytorch', 'float32', 1.0),
    'CTranslate2 float32, patience 1': ('ctranslate2', 'float32', 1.0),
    'CTranslate2 int8, patience 1': ('ctranslate2', 'int8', 1.0),
}
MARGINS = {f'margin {margin}': margin for margin in (3, 6, 8, 12)} # tokens of a first search beyond the source

def translate(
    translator: Translator, rows: list[list[int]], config: DecodingConfig, batch_size: int = BATCH,
) -> list[Hypothesis]:
    "Return the best hypothesis of each sentence; batches hold sentences of similar length."
    found = [None] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    for start in range(0, len(order), batch_size):
        batch = order[start:start + batch_size]
        for i, best in zip(batch, translator.engine.beam_search([rows[i] for i in batch], config)):
            found[i] = best[0]
    return found

@torch.inference_mode()
def rescore(translator: Translator, row: list[int], ids: list[int], config: DecodingConfig) -> float:
    "Return the normalized score that the model in PyTorch gives a translation; an unfinished one has no EOS."
    limit = min(len(row) + config.max_extra_tokens, translator.model.config.max_len)
    targets = torch.tensor(ids if len(ids) >= limit else [*ids, EOS])
    logits = translator.model(pad_rows([row]), torch.tensor([[BOS, *targets[:-1]]]))[0]
    logits[:, :EOS] = -math.inf # PAD and BOS, as in a search
    log_prob = logits.log_softmax(-1)[torch.arange(len(targets)), targets].sum().item()
    return normalized_score(log_prob, len(targets), config.length_penalty, config.length_penalty_offset)

def differences(translator: Translator, rows: list, ours: list, theirs: list, config: DecodingConfig) -> dict:
    "Return how many translations equal ours, and of which kind the others are."
    kinds = {'tie': 0, 'lower score': 0, 'higher score': 0}
    gaps = []
    for row, a, b in zip(rows, ours, theirs):
        if a.ids != b.ids:
            gap = rescore(translator, row, b.ids, config) - rescore(translator, row, a.ids, config)
            gaps.append(gap)
            kinds['tie' if abs(gap) < TIE else 'lower score' if gap < 0 else 'higher score'] += 1
    largest = round(max(map(abs, gaps), default=0.0), 5)
    return {'same': len(rows) - len(gaps), 'kinds': kinds, 'largest_score_gap': largest}

def load(model: Path, name: str) -> tuple[Translator, DecodingConfig]:
    "Return the translator of a system, and the settings of its search."
    engine, compute_type, patience = SYSTEMS['CTranslate2 float32' if name in MARGINS else name]
    translator = Translator.load(model, 'cpu', engine, compute_type)
    if name in MARGINS:
        translator.engine.margin = MARGINS[name]
    return translator, replace(translator.decoding, n_best=1, patience=patience)

def work(model: Path, name: str, texts: list[str]) -> None:
    "Measure one system whenever a batch size comes on a line: answer with the seconds that its searches took."
    torch.set_num_threads(available_cores())
    translator, config = load(model, name)
    rows = translator.encode(texts)
    rows_for = {1: rows[::10], BATCH: rows}
    translate(translator, rows[:2 * BATCH], config) # warm up
    print('ready', flush=True)
    for line in sys.stdin:
        batch_size = int(line)
        start = time.perf_counter()
        translate(translator, rows_for[batch_size], config, batch_size)
        print(time.perf_counter() - start, flush=True)

def measure_speed(systems: list[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    "Return the seconds of each system and batch size in every round."
    environment = {key: value for key, value in os.environ.items() if key != 'OMP_NUM_THREADS'}
    workers = {name: subprocess.Popen([sys.executable, *sys.argv, '--worker', name], stdin=subprocess.PIPE, text=True,
                                      stdout=subprocess.PIPE, env=environment) for name in systems}
    seconds = {name: {'1': [], str(BATCH): []} for name in systems}
    try:
        for name, worker in workers.items():
            if worker.stdout.readline() != 'ready\n':
                raise RuntimeError(f'the process of {name} has failed')
        for i in range(rounds):
            first = i % len(systems)
            for name in [*systems[first:], *systems[:first]]:
                for batch_size, found in seconds[name].items():
                    time.sleep(0.3) # threads of the last search have stopped waiting for work
                    print(batch_size, file=workers[name].stdin, flush=True)
                    found.append(round(float(workers[name].stdout.readline()), 3))
            print(f'round {i + 1}:', {name: {size: found[-1] for size, found in of_name.items()}
                                      for name, of_name in seconds.items()}, flush=True)
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    return seconds

def compare(model: Path, pairs: list[tuple[str, str]]) -> dict[str, dict]:
    "Return the scores of each system, and how its translations differ from those of PyTorch."
    texts, references = [src for src, _ in pairs], [tgt for _, tgt in pairs]
    found = {}
    translations = {}
    reference = Translator.load(model, 'cpu', engine='pytorch')
    rows = reference.encode(texts)
    lines = {}
    for name, (_, _, patience) in SYSTEMS.items():
        translator, config = load(model, name)
        start = time.process_time()
        translations[name] = translate(translator, rows, config)
        seconds = time.process_time() - start
        lines[name] = [translator.tokenizer.decode(best.ids) for best in translations[name]]
        scores = score(lines[name], references)
        row = {'bleu': round(scores.bleu, 2), 'chrf': round(scores.chrf, 2), 'processor_seconds': round(seconds, 1)}
        row |= differences(reference, rows, translations[PYTORCH], translations[name], config)
        if patience is not None:
            same_rule = translations['PyTorch, patience 1']
            row['same_as_pytorch_with_this_patience'] = differences(reference, rows, same_rule, translations[name], config)
        if row['same'] < len(rows):
            tested = paired_test(lines[name], lines[PYTORCH], references)
            row['paired_test'] = {key: round(value, 3) for key, value in tested.items()}
        found[name] = row
        print(name, row, flush=True)
    return found

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', type=Path, required=True, help='folder of the trained model')
    parser.add_argument('--data-dir', type=Path, required=True, help='folder of Multi30k')
    parser.add_argument('--split', default='test_2016_flickr')
    parser.add_argument('--sentences', type=int, help='use only so many sentences, to try the script')
    parser.add_argument('--rounds', type=int, default=7, help='of the measurement of speed')
    parser.add_argument('--out', type=Path, default=RESULTS / 'engines.json', help='the record')
    parser.add_argument('--part', choices=['systems', 'margins'], default='systems', help='what to measure')
    parser.add_argument('--worker', choices=[*SYSTEMS, *MARGINS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    translator = Translator.load(args.model, 'cpu')
    pair = '-'.join(translator.tokenizer.langs)
    pairs = load_corpus(CorpusConfig('multi30k', pair=pair, data_dir=args.data_dir))[args.split][:args.sentences]
    if args.worker:
        return work(args.model, args.worker, [src for src, _ in pairs])
    import ctranslate2
    load_average = os.getloadavg()[0]
    seconds = measure_speed(list(MARGINS if args.part == 'margins' else SYSTEMS), args.rounds)
    command = about()['command']
    for path, name in [(args.data_dir, 'DIR'), (args.model, 'MODEL')]:
        command = command.replace(str(path), name)
    if args.part == 'margins':
        weights = checksum(args.model / 'model.safetensors')['sha256']
        record = read_json(args.out)
        if record['weights_sha256'] != weights:
            raise ValueError(f'{args.out} is the record of another model: measure --part systems first')
        record['margins'] = {**about(), 'command': command, 'rounds': args.rounds, 'load_average': round(load_average, 2),
                             'seconds': {MARGINS[name]: found for name, found in seconds.items()}}
        return atomic_write(args.out, to_json(record))
    record = {**about(), 'command': command, 'corpus': f'multi30k {pair}', 'split': args.split, 'sentences': len(pairs),
              'seed': translator.training.get('run', {}).get('training', {}).get('seed'),
              'search': asdict(translator.decoding), 'model': asdict(translator.model.config),
              'metrics': {name: {**found, 'seconds': seconds[name]}
                          for name, found in compare(args.model, pairs).items()},
              'rounds': args.rounds, 'cores': available_cores(), 'load_average': round(load_average, 2),
              'single_sentences': len(pairs[::10]), 'batch_size': BATCH,
              'weights_sha256': checksum(args.model / 'model.safetensors')['sha256']}
    record['versions'] |= {'ctranslate2': ctranslate2.__version__}
    atomic_write(args.out, to_json(record))


if __name__ == '__main__':
    main()
