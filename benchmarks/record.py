#!/usr/bin/env python3
"""Score a trained model on some splits of its corpus, and write the record in results/:
NAME.json, NAME.log.jsonl, and the translations of each test split in NAME.SPLIT.txt, one on each line.

    python benchmarks/record.py runs/m30k multi30k-en-de-30min --split test_2016_flickr
        --beam-size 5 8 --length-penalty 1.0 1.4 --command 'annotated-transformer train …'

If you give several beam sizes or length penalties, all combinations are tried on `val`; the best one is used
for the other splits. With --against, a paired test compares the translations with those of another record.
"""
import argparse
import itertools
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from bisect import bisect_left
from datetime import date
from pathlib import Path

import numpy as np
from sacrebleu.metrics import BLEU, CHRF

from annotated_transformer.checkpoints import read_log
from annotated_transformer.corpora import CorpusConfig, load_corpus
from annotated_transformer.experiments import bootstrap_interval
from annotated_transformer.files import atomic_write, checksum
from annotated_transformer.large_corpora import available_cores
from annotated_transformer.recipe import evaluate, versions
from annotated_transformer.score_report import LOWERCASED_TOKENIZED_OPTIONS, report, tokenized_bleu
from annotated_transformer.scoring import bleu_interval, compare
from annotated_transformer.transformer import count_parameters
from annotated_transformer.translator import Translator

RESULTS = Path(__file__).parent / 'results'
MAX_ORDER = 4 # words of the longest n-grams that BLEU counts
N_SAMPLES = 8 # translations that a record holds, from all over the last split
PATHS = ('data_dir', 'src', 'tgt', 'val_src', 'val_tgt', 'test_src', 'test_tgt', 'tsv', 'val_tsv', 'test_tsv', 'extra_src',
         'extra_tgt', 'prepared')

def cpu_info(field: str) -> str:
    "Return a field of the first processor in Linux's /proc/cpuinfo; '' elsewhere."
    info = Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(':')[1].strip() for line in lines if line.startswith(field)), '')

def cpu_model() -> str:
    "Return the processor's name."
    return cpu_info('model name') or platform.processor() or platform.machine()

def cpu_flags() -> list[str]:
    "Return the vector and matrix instructions of the processor, such as avx512_bf16."
    return [flag for flag in cpu_info('flags').split() if flag.startswith(('avx', 'amx', 'sse4', 'fma'))]

def machine() -> str:
    "Return the processor's name and the number of cores that this process may use."
    return f'{cpu_model()}, {available_cores()} cores'

def commit() -> str:
    "Return the commit of this checkout, with a + if the code has been changed since; '' outside a checkout."
    def git(*args):
        return subprocess.run(['git', *args], cwd=RESULTS.parent, capture_output=True, text=True).stdout.strip()

    changed = git('status', '--porcelain', '--', ':/*.py')
    return git('rev-parse', '--short', 'HEAD') + ('+' if changed else '')

def about() -> dict:
    "Return what stands beside every measurement: command, machine, date, commit, versions of libraries."
    command = ['python', f'benchmarks/{Path(sys.argv[0]).name}', *sys.argv[1:]]
    return {'command': shlex.join(command), 'machine': machine(), 'cpu_flags': cpu_flags(), 'date': str(date.today()),
            'commit': commit(), 'versions': versions()}

def report_tokenized(translations: list[str], references: list[str]) -> dict:
    """Return what we measure of text that is lower-cased and tokenized already: BLEU as older papers compute it, and chrF.

    Our BLEU is that of fairseq's scorer, as long as the corpus has matching n-grams of every order: both split at spaces
    and sum the clipped counts of the sentences; sacreBLEU smooths only an order without matches. chrF ignores spaces.
    """
    bleu, signature = tokenized_bleu(translations, references)
    interval = bleu_interval(translations, references, lowercase=True, tokenize='none')
    chrf = CHRF()
    return {'lowercased_tokenized_bleu': bleu, 'lowercased_tokenized_signature': signature,
            'lowercased_tokenized_chrf': chrf.corpus_score(translations, [references]).score,
            'lowercased_tokenized_chrf_signature': str(chrf.get_signature()),
            'sentences': len(references), 'lowercased_tokenized_half_width': interval.half_width,
            'lowercased_tokenized_interval_signature': interval.signature}

def sentence_bleu(tokenized: bool = False) -> BLEU:
    "Return the BLEU of single sentences, which counts only n-grams that the sentence is long enough for."
    return BLEU(effective_order=True, **(LOWERCASED_TOKENIZED_OPTIONS if tokenized else {}))

def bleu_counts(translations: list[str], references: list[str], tokenized: bool = False) -> np.ndarray:
    "Return a row for each sentence with what BLEU sums: matching n-grams, all n-grams, both lengths."
    metric = sentence_bleu(tokenized) # differs from BLEU in a sentence's score, not in its counts
    scores = [metric.sentence_score(translation, [reference])
              for translation, reference in zip(translations, references, strict=True)]
    return np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores])

def bleu_of(counts: np.ndarray) -> float:
    "Return the corpus BLEU of some rows of `bleu_counts`."
    *ngrams, length, reference_length = counts.sum(axis=0).tolist()
    found = BLEU.compute_bleu(ngrams[:MAX_ORDER], ngrams[MAX_ORDER:], length, reference_length, 'exp')
    return found.score

def by_source_length(sources: list[str], counts: np.ndarray, n_groups: int = 4) -> dict[str, dict]:
    "Return BLEU with its 95% interval for groups of nearly equal size, from the shortest sources to the longest."
    lengths = [len(source.split()) for source in sources]
    edges = statistics.quantiles(lengths, n=n_groups)
    groups = np.array([bisect_left(edges, length) for length in lengths])
    found = {}
    for group in sorted(set(groups.tolist())):
        members = np.flatnonzero(groups == group)
        inside = [lengths[i] for i in members]
        low, high = bootstrap_interval(counts[members], bleu_of, samples=1000)
        found[f'{min(inside)}-{max(inside)}'] = {'bleu': bleu_of(counts[members]), 'low': low, 'high': high,
                                                 'sentences': len(members)}
    return found

def paired_test(translations: list[str], against: list[str], references: list[str]) -> dict:
    "Return the difference in BLEU from another system on the same sentences, its 95% interval and a p-value."
    ours = bleu_counts(translations, references)
    theirs = bleu_counts(against, references)
    width = ours.shape[1]
    low, high = bootstrap_interval(np.hstack([ours, theirs]), samples=1000,
                                   statistic=lambda rows: bleu_of(rows[:, :width]) - bleu_of(rows[:, width:]))
    p_value = compare(translations, against, references).p_value
    return {'difference': bleu_of(ours) - bleu_of(theirs), 'low': low, 'high': high, 'p_value': p_value}

def public_settings(corpus: dict) -> dict:
    "Return a corpus' settings without paths, which differ between machines; only whether there was extra text."
    settings = {name: value for name, value in corpus.items() if name not in PATHS}
    return settings | {'extra': bool(corpus.get('extra_src'))}

def choose(translator: Translator, pairs: list, beam_sizes: list[int], length_penalties: list[float],
           tokenized: bool, batch_tokens: int) -> tuple[dict, dict[str, float]]: # the best search, BLEU of each
    "Find the search with the highest BLEU on `pairs`. If there is only one, it is not measured."
    searches = {f'beam {beam_size}, length penalty {length_penalty}':
                {'beam_size': beam_size, 'length_penalty': length_penalty}
                for beam_size, length_penalty in itertools.product(beam_sizes, length_penalties)}
    if len(searches) == 1:
        return list(searches.values())[0], {}
    references = [tgt for _, tgt in pairs]
    found = {}
    for name, search in searches.items():
        scores, translations = evaluate(translator, pairs, progress_bar=True, batch_tokens=batch_tokens, **search)
        found[name] = tokenized_bleu(translations, references)[0] if tokenized else scores.bleu
        print(f'val, {name}: {found[name]:.2f}', flush=True)
    return searches[max(found, key=found.get)], found

def timed_log(run: Path) -> list[dict]:
    "Return the rows of a run's log, each with its minutes and, where there is one, its speed."
    times = {(row['step'], 'tokens_per_second' in row): row for row in read_log(run / 'clock.jsonl')}
    return [row | times.get((row['step'], 'loss' in row), {}) for row in read_log(run / 'log.jsonl')]

def dropped_pairs(log: list[dict]) -> dict[str, int]:
    "Return how many training pairs were left out for each reason: the first row of a log, or {} where it has no counts."
    first = log[0] if log else {}
    return {name.removeprefix('dropped_'): n for name, n in first.items() if name.startswith('dropped_')}

def minutes_of(run: Path) -> float:
    "Return how long a finished run was trained."
    return json.loads((run / 'training.json').read_text('utf-8'))['progress']['minutes']

def arguments(args: list[str] | None = None) -> argparse.Namespace:
    "Return the values of the options on the command line, or of `args`."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', type=Path, help='a folder that `annotated-transformer train` finished')
    parser.add_argument('name', help='name of the record')
    parser.add_argument('--split', action='append', required=True, help='split of its corpus to score; may be repeated')
    parser.add_argument('--command', required=True, help='the command that trained the model')
    parser.add_argument('--data-dir', type=Path, help='folder of the corpus, if it has moved since training')
    parser.add_argument('--beam-size', type=int, nargs='+', default=[4], help='beam sizes to try on val (4)')
    parser.add_argument('--length-penalty', type=float, nargs='+', default=[0.6],
                        help='length penalties to try on val (0.6)')
    parser.add_argument('--batch-tokens', type=int, default=4096, help='source tokens to decode at once (4096)')
    parser.add_argument('--tokenized', action='store_true', help='the corpus is lower-cased and tokenized')
    parser.add_argument('--against', help='name of a record to compare with, whose translations are in results/')
    parser.add_argument('--teacher', type=Path, action='append', default=[],
                        help='a run whose translations were training text: its minutes are added; may be repeated')
    parser.add_argument('--note', help='a remark for the record, such as what else ran on the machine')
    return parser.parse_args(args)

def main():
    args = arguments()
    translator = Translator.load(args.run)
    settings = translator.training['run']
    progress = translator.training['progress']
    teachers = {run.name: minutes_of(run) for run in args.teacher}
    moved = {'data_dir': args.data_dir} if args.data_dir else {}
    corpus = load_corpus(CorpusConfig(**settings['corpus'] | moved))
    metrics = {'parameters': count_parameters(translator.model),
               'training_minutes': round(progress['minutes'] + sum(teachers.values()), 2),
               'steps': progress['step'], 'epochs': progress['epoch'], 'target_tokens': progress['tokens']}
    search, tried = choose(translator, corpus['val'], args.beam_size, args.length_penalty, args.tokenized,
                           args.batch_tokens)
    scores = {}
    samples = []
    for split in ['val', *args.split]:
        start = time.monotonic()
        _, translations = evaluate(translator, corpus[split], progress_bar=True,
                                   batch_tokens=args.batch_tokens, **search)
        seconds = round(time.monotonic() - start, 2)
        references = [tgt for _, tgt in corpus[split]]
        if args.tokenized:
            found = report_tokenized(translations, references)
        else:
            found = report(translations, references, corpus.langs[1])
            sources = [src for src, _ in corpus[split]]
            found['by_source_length'] = by_source_length(sources, bleu_counts(translations, references))
        if split != 'val':
            lines = ''.join(translation + '\n' for translation in translations)
            atomic_write(RESULTS / f'{args.name}.{split}.txt', lines)
            if args.against:
                other = (RESULTS / f'{args.against}.{split}.txt').read_text('utf-8').splitlines()
                found['paired_test'] = {'against': args.against} | paired_test(translations, other, references)
        scores[split] = found | {'seconds': seconds}
        step = max(1, len(references) // N_SAMPLES)
        samples = [{'split': split, 'source': src, 'translation': translation, 'reference': reference}
                   for (src, reference), translation in list(zip(corpus[split], translations))[::step][:N_SAMPLES]]
        for name in ('bleu', 'chrf', 'lowercased_tokenized_bleu', 'lowercased_tokenized_chrf'):
            if name in found:
                metrics[f'{split}_{name}'] = round(found[name], 2)
                print(f'{split}_{name} {found[name]:.2f}')
    record = {'name': args.name, 'command': args.command, 'seed': settings['training']['seed'], 'machine': machine(),
              'date': str(date.today()), 'search': search}
    if tried:
        record['tried_on_val'] = tried
    log = timed_log(args.run)
    record['metrics'] = metrics
    if dropped_pairs(log):
        record['dropped_pairs'] = dropped_pairs(log)
    record |= {'scores': scores, 'samples': samples, 'versions': translator.training['versions']}
    if teachers:
        record['teachers_minutes'] = teachers
    record |= {'settings': settings | {'corpus': public_settings(settings['corpus'])},
               'weights_sha256': checksum(args.run / 'model.safetensors')['sha256']}
    if args.note:
        record['note'] = args.note
    atomic_write(RESULTS / f'{args.name}.log.jsonl', ''.join(json.dumps(row) + '\n' for row in log))
    atomic_write(RESULTS / f'{args.name}.json', json.dumps(record, indent=2) + '\n') # last: it says that all is there

if __name__ == '__main__':
    main()
