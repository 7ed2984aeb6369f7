#!/usr/bin/env python3
"""Score a trained folder on some splits of its own corpus, and write the record:
NAME.json and NAME.log.jsonl in results/.

    python benchmarks/record.py runs/m30k multi30k-en-de-tiny-30min --split test_2016_flickr
        --beam-size 5 8 --alpha 1.0 1.4 --command 'annotated-transformer train …'

Several beam sizes or alphas are all tried on `val`, and the best of them searches the other splits.
"""
import argparse, itertools, json, platform, shlex, sys, time
from datetime import date
from pathlib import Path

from annotated_transformer.v1.checkpoints import fingerprint
from annotated_transformer.v1.corpora import CorpusConfig, load_corpus
from annotated_transformer.v1.large_corpora import len_cores
from annotated_transformer.v1.recipe import evaluate, versions
from annotated_transformer.v1.scoring import CUT, bleu_interval, report, tokenized_bleu
from annotated_transformer.v1.training import timed_log
from annotated_transformer.v1.transformer import count_parameters
from annotated_transformer.v1.translator import Translator
from annotated_transformer.v1.vocabulary import write_whole

RESULTS = Path(__file__).parent / 'results'
PATHS = 'data_dir', 'src', 'tgt', 'val_src', 'val_tgt', 'test_src', 'test_tgt', 'tsv', 'extra_src', 'extra_tgt'

def machine() -> str:
    "The processor's name and how many of its cores are ours."
    info = Path('/proc/cpuinfo')
    names = [line.split(':')[1].strip() for line in info.read_text().splitlines()
             if line.startswith('model name')] if info.exists() else []
    return f'{(names or [platform.processor() or platform.machine()])[0]}, {len_cores()} cores'

def about() -> dict:
    "What stands beside every measurement: the command that made it, machine, date, versions of the libraries."
    return dict(command=shlex.join(['python', f'benchmarks/{Path(sys.argv[0]).name}', *sys.argv[1:]]),
                machine=machine(), date=str(date.today()), versions=versions())

def scored(translations: list[str], references: list[str], lang: str, tokenized: bool) -> dict:
    """All that is told of a split; of text that is lower-cased and cut into words,
    that figure alone which older papers have.
    """
    if not tokenized: return report(translations, references, lang)
    bleu, signature = tokenized_bleu(translations, references)
    interval = bleu_interval(translations, references, **CUT)
    return dict(lowercased_tokenized_bleu=bleu, lowercased_tokenized_signature=signature, sentences=len(references),
                lowercased_tokenized_half_width=interval.half_width,
                lowercased_tokenized_interval_signature=interval.signature)

def told_of(corpus: dict) -> dict:
    "A corpus' settings: of the paths, which lie elsewhere for everybody, only whether there was further text."
    told = {name: value for name, value in corpus.items() if name not in PATHS}
    return told | dict(extra=bool(corpus.get('extra_src')))

def choose(translator: Translator, pairs: list, beam_sizes: list[int], alphas: list[float],
           tokenized: bool) -> tuple[dict, dict[str, float]]:
    "The search with the highest BLEU on `pairs`, and what each of them reached."
    found, searches = {}, {f'beam {beam}, alpha {alpha}': dict(beam_size=beam, alpha=alpha)
                           for beam, alpha in itertools.product(beam_sizes, alphas)}
    if len(searches) == 1: return *searches.values(), found
    for name, search in searches.items():
        scores, translations = evaluate(translator, pairs, progress_bar=True, **search)
        found[name] = tokenized_bleu(translations, [tgt for _, tgt in pairs])[0] if tokenized else scores.bleu
        print(f'val, {name}: {found[name]:.2f}', flush=True)
    return searches[max(found, key=found.get)], found

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', type=Path, help='a folder that `annotated-transformer train` finished')
    parser.add_argument('name', help='of the record')
    parser.add_argument('--split', action='append', required=True,
                        help='of the corpus that it was trained on; may be repeated')
    parser.add_argument('--command', required=True, help='the command that made the folder')
    parser.add_argument('--data-dir', type=Path, help='where the corpus lies, if not where it lay in training')
    parser.add_argument('--beam-size', type=int, nargs='+', default=[4], help='of the search (4)')
    parser.add_argument('--alpha', type=float, nargs='+', default=[0.6], help="of the search's length penalty (0.6)")
    parser.add_argument('--tokenized', action='store_true', help='the corpus is lower-cased and cut into words')
    parser.add_argument('--teacher', type=Path, action='append', default=[],
                        help='a run whose translations it learned from, counted into its minutes; may be repeated')
    args = parser.parse_args()
    translator = Translator.load(args.run)
    made = translator.training
    teachers = {run.name: json.loads((run / 'training.json').read_text('utf-8'))['progress']['minutes']
                for run in args.teacher}
    corpus = load_corpus(CorpusConfig(**made['run']['corpus'] | ({'data_dir': args.data_dir} if args.data_dir else {})))
    metrics = dict(parameters=count_parameters(translator.model),
                   training_minutes=round(made['progress']['minutes'] + sum(teachers.values()), 2),
                   steps=made['progress']['step'], epochs=made['progress']['epoch'],
                   target_tokens=made['progress']['tokens'])
    details, (search, tried) = {}, choose(translator, corpus['val'], args.beam_size, args.alpha, args.tokenized)
    for split in ['val', *args.split]:
        began = time.monotonic()
        translations = evaluate(translator, corpus[split], progress_bar=True, **search)[1]
        seconds = round(time.monotonic() - began, 2)
        found = scored(translations, [tgt for _, tgt in corpus[split]], corpus.langs[1], args.tokenized)
        details[split] = found | dict(seconds=seconds)
        told = {f'{split}_{name}': round(found[name], 2)
                for name in ('bleu', 'chrf', 'lowercased_tokenized_bleu') if name in found}
        metrics |= told
        print(', '.join(f'{name} {figure}' for name, figure in told.items()))
    record = dict(name=args.name, command=args.command, seed=made['run']['training']['seed'], machine=machine(),
                  date=str(date.today()), search=search, **(dict(tried_on_val=tried) if tried else {}),
                  metrics=metrics, scores=details, versions=made['versions'],
                  **(dict(teachers_minutes=teachers) if teachers else {}),
                  settings=made['run'] | dict(corpus=told_of(made['run']['corpus'])),
                  weights_sha256=fingerprint(args.run / 'model.safetensors')['sha256'])
    write_whole(RESULTS / f'{args.name}.json', json.dumps(record, indent=2) + '\n')
    write_whole(RESULTS / f'{args.name}.log.jsonl', ''.join(json.dumps(row) + '\n' for row in timed_log(args.run)))

if __name__ == '__main__': main()
