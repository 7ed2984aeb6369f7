#!/usr/bin/env python3
"""A student of several teachers: the recipe's seeds, and a model of the other direction, write more text to learn from.

    python benchmarks/diversify.py --data-dir DIR --flags='--precision bfloat16' --jobs 2
    python benchmarks/diversify.py --data-dir DIR --tokenized DIR # the student learns older papers' kind of text

Nguyen et al. (2020): every forward teacher translates the training sentences, the backward one their translations,
and a student learns from all that beside what people wrote; in a further round it is a teacher itself. Each step
is a command of `annotated-transformer`, printed as it begins; what is finished is not done again, so the same call
goes on where it was stopped. With --tokenized the student's text is lower-cased and cut into words, in a folder that
holds it so; what the teachers write is cut by the same rules. No test split is looked at.
"""
import argparse, shlex, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from annotated_transformer.corpora import CorpusConfig, load_corpus, stream_lines
from annotated_transformer.scoring import lowercased_tokenized
from annotated_transformer.vocabulary import write_whole

SPLITS = {'': 'train', 'val-': 'val', 'test-': 'test_2016_flickr'} # of the cut text, by how their flags begin
STUDENT = ('--d-model 256 --d-ff 512 --dropout 0.2 --max-tokens 4096 --peak-rate 2.5e-3 --warmup 1000 '
           '--max-steps 10000 --average 12') # more text has room for a wider model

def run(*args, processes: int = 1) -> None:
    "One command, by torchrun if on several processes; printed first."
    torchrun = ['torchrun', '--standalone', '--nproc-per-node', str(processes), '-m'] if processes > 1 else []
    args = [*torchrun, 'annotated_transformer' if torchrun else 'annotated-transformer', *map(str, args)]
    print(shlex.join(args) + '\n', end='', flush=True) # one write: several run at once
    if subprocess.run([Path(sys.executable).parent / args[0], *args[1:]]).returncode:
        raise SystemExit('stopped: the same call goes on from here')

def write(path: Path, lines: list[str]) -> Path:
    write_whole(path, ''.join(line + '\n' for line in lines))
    return path

def ways(args, model: Path, sentences: Path, out: Path) -> list[tuple[str, str]]:
    "Every sentence beside each of a model's translations of it, which are written to `out` once."
    if not out.exists(): run('translate', '--model', model, '--input', sentences, '--beam-size', args.beam_size,
                             '--alpha', args.alpha, '--n-best', args.n_best, '--output', out)
    known, found = list(stream_lines(sentences)), list(stream_lines(out))
    if args.n_best == 1: return list(zip(known, found, strict=True))
    rows = (line.split('\t', 2) for line in found) # the sentence's number, a score, a translation
    return [(known[int(number) - 1], way) for number, _, way in rows]

def teach(args, text: dict[str, Path]) -> list[dict[str, list[str]]]: # text: a file of the training split's sentences
    "Train the teachers; for each, by language, the people's sentences and its translations of them."
    src, tgt = args.pair.split('-')
    teachers = {f'forward-{seed}': (src, tgt, seed) for seed in args.seeds} | {'backward': (tgt, src, args.seeds[0])}
    def work(name):
        known, new, seed = teachers[name]
        run('train', '--recipe', 'multi30k-en-de', '--corpus', 'multi30k', '--pair', f'{known}-{new}', '--seed', seed,
            '--data-dir', args.data_dir, *shlex.split(args.flags), *shlex.split(args.teachers), '--out', args.runs/name)
        found = ways(args, args.runs/name, text[known], args.runs/f'{name}-best-{args.n_best}.{new}')
        return dict(zip((known, new), zip(*found)))
    with ThreadPoolExecutor(args.jobs) as pool: return list(pool.map(work, teachers))

def corpus_flags(args) -> list:
    "Where the student's own text lies."
    if not args.tokenized: return ['--corpus', 'multi30k', '--pair', args.pair, '--data-dir', args.data_dir]
    return ['--corpus', 'files', '--pair', args.pair, *(
        item for flag, split in SPLITS.items() for side, lang in zip(('src', 'tgt'), args.pair.split('-'))
        for item in (f'--{flag}{side}', args.tokenized/f'{split}.lc.norm.tok.{lang}.gz'))]

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-dir', type=Path, required=True, help='holds the files of Multi30k')
    parser.add_argument('--tokenized', type=Path, help='holds its lower-cased text cut into words')
    parser.add_argument('--pair', default='en-de', help='source and target language')
    parser.add_argument('--seeds', type=int, nargs='+', default=[1, 2, 3], help='of the forward teachers')
    parser.add_argument('--beam-size', type=int, default=5, help="of the teachers' search")
    parser.add_argument('--n-best', type=int, default=3,
                        help='translations of each sentence by each teacher, at most BEAM_SIZE')
    parser.add_argument('--alpha', type=float, default=1.4, help="of the teachers' search: no text may be short")
    parser.add_argument('--flags', default='', help="further flags of every run: '--precision bfloat16', say")
    parser.add_argument('--teachers', default='', help="further flags of the teachers' runs")
    parser.add_argument('--rounds', type=int, default=1,
                        help='students: each but the first has one more teacher, the student before it')
    parser.add_argument('--student', default=STUDENT, help="further flags of a student's run (%(default)s)")
    parser.add_argument('--jobs', type=int, default=1, help='teachers at work at the same time')
    parser.add_argument('--processes', type=int, default=1, help='that the student is trained by, with torchrun')
    parser.add_argument('--runs', type=Path, default=Path('runs/diversified'), help='folder of the runs and texts')
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    langs, pairs = args.pair.split('-'), load_corpus(CorpusConfig('multi30k', args.pair, args.data_dir))['train']
    text = {lang: write(args.runs/f'train.{lang}', lines) for lang, lines in zip(langs, map(list, zip(*pairs)))}
    taught, cut = teach(args, text), '-cut' if args.tokenized else ''
    further = {lang: [line for pairs in taught for line in pairs[lang]] for lang in langs}
    if cut: further = {lang: lowercased_tokenized(lines, lang) for lang, lines in further.items()}
    said = args.tokenized/f'train.lc.norm.tok.{langs[0]}.gz' if cut else text[langs[0]]
    for n in range(1, args.rounds + 1):
        if n > 1: # the student before is one more teacher
            found = ways(args, student, said, args.runs/f'{student.name}-best-{args.n_best}.{langs[1]}')
            for lang, lines in zip(langs, zip(*found)): further[lang] += lines
        student = args.runs/f'student{cut}-{n}'
        src, tgt = (write(args.runs/f'further{cut}-{n}.{lang}', further[lang]) for lang in langs)
        run('train', '--recipe', 'multi30k-en-de', *corpus_flags(args), '--extra-src', src, '--extra-tgt', tgt,
            '--unique', *shlex.split(args.flags), *shlex.split(args.student), '--out', student,
            processes=args.processes)

if __name__ == '__main__': main()
