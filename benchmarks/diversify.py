#!/usr/bin/env python3
"""Data diversification: several teachers write more training text for a student.

    python benchmarks/diversify.py --data-dir DIR --flags='--precision bfloat16' --jobs 2
    python benchmarks/diversify.py --data-dir DIR --tokenized DIR # the student is trained on tokenized text

As in Nguyen et al. (2020), forward teachers (the recipe with several seeds) translate the source sentences, a
backward teacher translates the target sentences, and a student is trained on all these pairs and the original ones.
In a further round, the student becomes a teacher, and the next student continues from its weights with only those
translations that are nearest to the references (Kim and Rush, 2016). Each step is a command of
`annotated-transformer`, which is printed. Run the same command again to resume. With --tokenized, the student's text is
lower-cased and tokenized; the teachers' translations are tokenized by the same rules. No test split is used.
"""
import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sacrebleu.metrics import BLEU

from annotated_transformer.corpora import CorpusConfig, load_corpus
from annotated_transformer.files import atomic_write
from annotated_transformer.parallel_text import stream_lines
from annotated_transformer.score_report import lowercased_tokenized

# {beginning of the flags: split} of the tokenized text
SPLITS = {'': 'train', 'val-': 'val', 'test-': 'test_2016_flickr'}
STUDENT = ('--d-model 256 --d-ff 512 --dropout 0.2 --max-tokens 4096 --peak-lr 2.5e-3 '
           '--warmup-steps 1000 --max-steps 10000 --average-checkpoints 12') # more text allows a wider model
FURTHER = '--dropout 0.3 --peak-lr 1e-3 --max-steps 9000' # starts from a trained model: smaller steps

def run(*args, processes: int = 1) -> None:
    "Print a command and run it; by torchrun if it needs several processes."
    torchrun = ['torchrun', '--standalone', '--nproc-per-node', str(processes), '-m'] if processes > 1 else []
    args = [*torchrun, 'annotated_transformer' if torchrun else 'annotated-transformer', *map(str, args)]
    print(shlex.join(args) + '\n', end='', flush=True) # one write: several run at once
    if subprocess.run([Path(sys.executable).parent / args[0], *args[1:]]).returncode:
        raise SystemExit('stopped: run the same command again to resume')

def write(path: Path, lines: Iterable[str]) -> Path:
    atomic_write(path, ''.join(line + '\n' for line in lines))
    return path

def translations_of(runs: Path, model: Path, sentences: Path, search: str, cut: str | None = None) -> list[list[str]]:
    "Return a model's translations of each sentence, from a file if it exists. `cut` is the language to tokenize."
    out = runs/'-'.join([model.name, *search.replace('--', '').split()])
    if not out.exists():
        run('translate', '--model', model, '--input', sentences, *shlex.split(search), '--output', out)
    # with --n-best 1, a line is a translation; else the sentence's number, a score and a translation
    rows = [line.split('\t', 2) for line in stream_lines(out)]
    texts, found = [row[-1] for row in rows], [[] for _ in stream_lines(sentences)]
    for i, (row, text) in enumerate(zip(rows, lowercased_tokenized(texts, cut) if cut else texts), 1):
        found[int(row[0] if len(row) > 1 else i) - 1].append(text)
    return found

def teach(args, text: dict[str, Path]) -> dict[str, list[list[list[str]]]]: # text: each language's training sentences
    "Train the teachers; return, for each language, each teacher's translations of every sentence."
    src, tgt = args.pair.split('-')
    teachers = {f'forward-{seed}': (src, tgt, seed) for seed in args.seeds} | {'backward': (tgt, src, args.seeds[0])}
    def work(name):
        known, new, seed = teachers[name]
        run('train', '--recipe', 'multi30k-en-de', '--corpus', 'multi30k', '--pair', f'{known}-{new}', '--seed', seed,
            '--data-dir', args.data_dir, *shlex.split(args.flags), *shlex.split(args.teachers), '--out', args.runs/name)
        return translations_of(args.runs, args.runs/name, text[known], args.search, new if args.tokenized else None)
    with ThreadPoolExecutor(args.jobs) as pool: *forward, backward = pool.map(work, teachers)
    return {src: [backward], tgt: forward}

def nearest(taught: list[list[list[str]]], own: list[str], n: int, cut: bool) -> list[list[str]]:
    "Return the `n` translations of each sentence with the highest sentence BLEU against the reference."
    bleu = BLEU(effective_order=True, tokenize='none' if cut else '13a')
    def choose(line, found):
        other = dict.fromkeys(text for texts in found for text in texts if text != line)
        return sorted(other, key=lambda text: bleu.sentence_score(text, [line]).score, reverse=True)[:n]
    return [choose(line, found) for line, *found in zip(own, *taught, strict=True)]

def cut_text(args, split: str, lang: str) -> Path:
    "Return the path of a file of lower-cased, tokenized text, as upstream names it, gzipped or not."
    plain = args.tokenized/f'{split}.lc.norm.tok.{lang}'
    return plain if plain.exists() else plain.with_name(f'{plain.name}.gz')

def corpus_flags(args) -> list:
    "Return the flags for the student's original text."
    if not args.tokenized: return ['--corpus', 'multi30k', '--pair', args.pair, '--data-dir', args.data_dir]
    return ['--corpus', 'files', '--pair', args.pair, *(
        item for flag, split in SPLITS.items() for side, lang in zip(('src', 'tgt'), args.pair.split('-'))
        for item in (f'--{flag}{side}', cut_text(args, split, lang)))]

def students(args) -> None:
    "Train the teachers, let them translate, and train the student of each round."
    src, tgt = args.pair.split('-')
    own = dict(zip((src, tgt), zip(*load_corpus(CorpusConfig('multi30k', args.pair, args.data_dir))['train'])))
    text = {lang: write(args.runs/f'train.{lang}', lines) for lang, lines in own.items()}
    taught, cut = teach(args, text), '-cut' if args.tokenized else ''
    if cut:
        own = {lang: list(stream_lines(cut_text(args, 'train', lang))) for lang in own}
        text = {lang: write(args.runs/f'train-cut.{lang}', lines) for lang, lines in own.items()}
    for n in range(1, args.rounds + 1):
        before, student = args.runs/f'student{cut}-{n - 1}', args.runs/f'student{cut}-{n}'
        if n > 1: taught[tgt].append(translations_of(args.runs, before, text[src], args.student_search))
        learnt = taught if n == 1 else {lang: [nearest(taught[lang], own[lang], args.nearest, bool(cut))]
                                        for lang in own}
        further = [(line, new) for found in learnt[tgt] for line, texts in zip(own[src], found) for new in texts]
        further += [(new, line) for found in learnt[src] for line, texts in zip(own[tgt], found) for new in texts]
        sides = [write(args.runs/f'further{cut}-{n}.{lang}', lines) for lang, lines in zip(own, zip(*further))]
        run('train', '--recipe', 'multi30k-en-de', *corpus_flags(args), '--extra-src', sides[0], '--extra-tgt',
            sides[1], '--unique', *shlex.split(args.flags), *shlex.split(args.student),
            *(['--start-from', before, *shlex.split(args.further)] if n > 1 else []), '--out', student,
            processes=args.processes)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-dir', type=Path, required=True, help='folder with the files of Multi30k')
    parser.add_argument('--tokenized', type=Path,
                        help='folder with the lower-cased, tokenized text (upstream: data/task1/tok)')
    parser.add_argument('--pair', default='en-de', help='source and target language')
    parser.add_argument('--seeds', type=int, nargs='+', default=[1, 2, 3], help='seeds of the forward teachers')
    parser.add_argument('--search', default='--beam-size 5 --length-penalty 1.4 --n-best 3',
                        help="the teachers' decoding flags (%(default)s)")
    parser.add_argument('--flags', default='', help="more flags for every run, for example '--precision bfloat16'")
    parser.add_argument('--teachers', default='', help="more flags for the teachers' runs")
    parser.add_argument('--rounds', type=int, default=1,
                        help='number of students; each one after the first starts from the one before')
    parser.add_argument('--student', default=STUDENT, help="flags for each student's run (%(default)s)")
    parser.add_argument('--further', default=FURTHER,
                        help="more flags for the students after the first (%(default)s)")
    parser.add_argument('--student-search', default='--beam-size 5 --length-penalty 1.0 --n-best 5',
                        help="a student's decoding flags, when it teaches the next (%(default)s)")
    parser.add_argument('--nearest', type=int, default=3,
                        help='translations of each sentence that students after the first are trained on')
    parser.add_argument('--jobs', type=int, default=1, help='teachers to train at the same time')
    parser.add_argument('--processes', type=int, default=1, help='processes that train the student, with torchrun')
    parser.add_argument('--runs', type=Path, default=Path('runs/diversified'), help='folder of the runs and texts')
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    students(args)

if __name__ == '__main__':
    main()
