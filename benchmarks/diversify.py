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
from annotated_transformer.scoring import lowercased_tokenized

SPLITS = {'': 'train', 'val-': 'val', 'test-': 'test_2016_flickr'} # of the cut text, by how their flags begin
STUDENT = ('--d-model 256 --d-ff 512 --dropout 0.2 --max-tokens 4096 --peak-lr 2.5e-3 '
           '--warmup-steps 1000 --max-steps 10000 --average-checkpoints 12') # more text has room for a wider model
FURTHER = '--dropout 0.3 --peak-lr 1e-3 --max-steps 9000' # begun from a trained model: smaller steps

def run(*args, processes: int = 1) -> None:
    "One command, by torchrun if on several processes; printed first."
    torchrun = ['torchrun', '--standalone', '--nproc-per-node', str(processes), '-m'] if processes > 1 else []
    args = [*torchrun, 'annotated_transformer' if torchrun else 'annotated-transformer', *map(str, args)]
    print(shlex.join(args) + '\n', end='', flush=True) # one write: several run at once
    if subprocess.run([Path(sys.executable).parent / args[0], *args[1:]]).returncode:
        raise SystemExit('stopped: the same call goes on from here')

def write(path: Path, lines: Iterable[str]) -> Path:
    atomic_write(path, ''.join(line + '\n' for line in lines))
    return path

def ways(runs: Path, model: Path, sentences: Path, search: str, cut: str | None = None) -> list[list[str]]:
    "For each sentence a model's translations, which are written to a file once; of the language `cut`, cut into words."
    out = runs/'-'.join([model.name, *search.replace('--', '').split()])
    if not out.exists():
        run('translate', '--model', model, '--input', sentences, *shlex.split(search), '--output', out)
    # the sentence's number, a score, a translation; of --n-best 1 that alone
    rows = [line.split('\t', 2) for line in stream_lines(out)]
    texts, found = [row[-1] for row in rows], [[] for _ in stream_lines(sentences)]
    for i, (row, text) in enumerate(zip(rows, lowercased_tokenized(texts, cut) if cut else texts), 1):
        found[int(row[0] if len(row) > 1 else i) - 1].append(text)
    return found

def teach(args, text: dict[str, Path]) -> dict[str, list[list[list[str]]]]: # text: each language's training sentences
    "Train the teachers; by language, what each teacher found for every sentence."
    src, tgt = args.pair.split('-')
    teachers = {f'forward-{seed}': (src, tgt, seed) for seed in args.seeds} | {'backward': (tgt, src, args.seeds[0])}
    def work(name):
        known, new, seed = teachers[name]
        run('train', '--recipe', 'multi30k-en-de', '--corpus', 'multi30k', '--pair', f'{known}-{new}', '--seed', seed,
            '--data-dir', args.data_dir, *shlex.split(args.flags), *shlex.split(args.teachers), '--out', args.runs/name)
        return ways(args.runs, args.runs/name, text[known], args.search, new if args.tokenized else None)
    with ThreadPoolExecutor(args.jobs) as pool: *forward, backward = pool.map(work, teachers)
    return {src: [backward], tgt: forward}

def nearest(taught: list[list[list[str]]], own: list[str], n: int, cut: bool) -> list[list[str]]: # cut into words?
    "Of all that was found for each sentence, the `n` nearest to what people wrote, by the BLEU of one sentence."
    bleu = BLEU(effective_order=True, tokenize='none' if cut else '13a')
    def choose(line, found):
        other = dict.fromkeys(text for texts in found for text in texts if text != line)
        return sorted(other, key=lambda text: bleu.sentence_score(text, [line]).score, reverse=True)[:n]
    return [choose(line, found) for line, *found in zip(own, *taught, strict=True)]

def cut_text(args, split: str, lang: str) -> Path:
    "A file of the lower-cased text cut into words, as upstream names it, gzipped or not."
    plain = args.tokenized/f'{split}.lc.norm.tok.{lang}'
    return plain if plain.exists() else plain.with_name(f'{plain.name}.gz')

def corpus_flags(args) -> list:
    "Where the student's own text lies."
    if not args.tokenized: return ['--corpus', 'multi30k', '--pair', args.pair, '--data-dir', args.data_dir]
    return ['--corpus', 'files', '--pair', args.pair, *(
        item for flag, split in SPLITS.items() for side, lang in zip(('src', 'tgt'), args.pair.split('-'))
        for item in (f'--{flag}{side}', cut_text(args, split, lang)))]

def students(args) -> None:
    "Have the teachers write, and train each round's student on what is there by then."
    src, tgt = args.pair.split('-')
    own = dict(zip((src, tgt), zip(*load_corpus(CorpusConfig('multi30k', args.pair, args.data_dir))['train'])))
    text = {lang: write(args.runs/f'train.{lang}', lines) for lang, lines in own.items()}
    taught, cut = teach(args, text), '-cut' if args.tokenized else ''
    if cut:
        own = {lang: list(stream_lines(cut_text(args, 'train', lang))) for lang in own}
        text = {lang: write(args.runs/f'train-cut.{lang}', lines) for lang, lines in own.items()}
    for n in range(1, args.rounds + 1):
        before, student = args.runs/f'student{cut}-{n - 1}', args.runs/f'student{cut}-{n}'
        if n > 1: taught[tgt].append(ways(args.runs, before, text[src], args.student_search))
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
    parser.add_argument('--data-dir', type=Path, required=True, help='holds the files of Multi30k')
    parser.add_argument('--tokenized', type=Path,
                        help='holds its text lower-cased and cut into words, as data/task1/tok does')
    parser.add_argument('--pair', default='en-de', help='source and target language')
    parser.add_argument('--seeds', type=int, nargs='+', default=[1, 2, 3], help='of the forward teachers')
    parser.add_argument('--search', default='--beam-size 5 --length-penalty 1.4 --n-best 3',
                        help="flags of the teachers' search (%(default)s)")
    parser.add_argument('--flags', default='', help="further flags of every run: '--precision bfloat16', say")
    parser.add_argument('--teachers', default='', help="further flags of the teachers' runs")
    parser.add_argument('--rounds', type=int, default=1,
                        help='students: each but the first goes on from the one before, which teaches it too')
    parser.add_argument('--student', default=STUDENT, help="further flags of a student's run (%(default)s)")
    parser.add_argument('--further', default=FURTHER,
                        help="flags after those, of the students but the first (%(default)s)")
    parser.add_argument('--student-search', default='--beam-size 5 --length-penalty 1.0 --n-best 5',
                        help='flags of its search, when it teaches the next (%(default)s)')
    parser.add_argument('--nearest', type=int, default=3,
                        help='translations of a sentence that the students but the first learn from, in each direction')
    parser.add_argument('--jobs', type=int, default=1, help='teachers at work at the same time')
    parser.add_argument('--processes', type=int, default=1, help='that the student is trained by, with torchrun')
    parser.add_argument('--runs', type=Path, default=Path('runs/diversified'), help='folder of the runs and texts')
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    students(args)

if __name__ == '__main__':
    main()
