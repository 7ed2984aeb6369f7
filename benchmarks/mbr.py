#!/usr/bin/env python3
"""Compare Minimum Bayes risk decoding with beam search: sample candidates, and keep the one most similar to them all.

    python benchmarks/mbr.py --model MODEL --record gpu-tok-r-drop-seed1 --tokenized --split test --data-dir DIR

The similarity (the utility) is sentence chrF or sentence BLEU. How to sample and how many candidates to draw is chosen
on the first sentences of `val`, for each utility, by BLEU; then the test split is translated once.
With --tokenized, DIR holds multi30k-tok, and all scores are those of lower-cased, tokenized text.
CTranslate2 draws the samples: with one thread, the same seed draws the same samples again in a new process.
The record holds scores, and paired tests against the recorded translations of beam search, over sentences, in BLEU and
chrF; the translations are in mbr-UTILITY.SPLIT.txt.
"""
import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from sacrebleu.metrics import BLEU, CHRF

from annotated_transformer.corpora import Corpus, CorpusConfig, load_corpus
from annotated_transformer.files import atomic_write, checksum
from annotated_transformer.score_report import LOWERCASED_TOKENIZED_OPTIONS, tokenized_bleu
from annotated_transformer.scoring import score
from annotated_transformer.translator import Translator
from paired import chrf_counts, compare, mean_chrf
from record import RESULTS, about, bleu_counts, sentence_bleu

NAME = 'mbr'
SAMPLINGS = {
    'temperature 0.5': {'temperature': 0.5},
    'temperature 1, top 10': {'temperature': 1.0, 'top_k': 10},
}
COUNTS = 4, 8, 16, 32 # candidates for each sentence
SEED = 1
SAMPLES = 1000 # of each paired test

def utilities(tokenized: bool) -> dict:
    "Return the metrics that compare two candidates."
    return {'chrF': CHRF(), 'BLEU': sentence_bleu(tokenized)}

def read_corpus(data_dir: Path, tokenized: bool) -> Corpus:
    "Return Multi30k from English to German: raw text, or `val` and `test` of its lower-cased, tokenized text."
    if not tokenized:
        return load_corpus(CorpusConfig('multi30k', data_dir=data_dir))
    files = {}
    for split, name in {'val': 'val', 'test': 'test_2016_flickr'}.items():
        for side, lang in {'src': 'en', 'tgt': 'de'}.items():
            files[f'{split}_{side}'] = data_dir / 'multi30k-tok' / f'{name}.lc.norm.tok.{lang}.gz'
    return load_corpus(CorpusConfig('files', **files))

def sample(translator: Translator, sources: list[str], n: int, settings: dict) -> list[list[str]]:
    "Return `n` samples for each source."
    repeated = [source for source in sources for _ in range(n)]
    found = translator.sample(repeated, batch_tokens=8192, **settings)
    return [found[i:i + n] for i in range(0, len(found), n)]

def similarities(candidates: list[str], metric) -> dict[tuple[str, str], float]:
    "Return the score of each candidate with each candidate as the reference."
    different = list(dict.fromkeys(candidates))
    return {(text, other): metric.sentence_score(text, [other]).score for text in different for other in different}

def best(candidates: list[str], utility: dict[tuple[str, str], float]) -> str:
    "Return the candidate with the highest mean utility; the first of several."
    counts = Counter(candidates)
    expected = {text: sum(n * utility[text, other] for other, n in counts.items()) for text in counts}
    return max(expected, key=expected.get)

def scores_of(translations: list[str], references: list[str], tokenized: bool) -> dict[str, float]:
    options = LOWERCASED_TOKENIZED_OPTIONS if tokenized else {}
    bleu = BLEU(**options).corpus_score(translations, [references])
    chrf = CHRF().corpus_score(translations, [references])
    return {'bleu': round(bleu.score, 2), 'chrf': round(chrf.score, 2), 'length_ratio': round(bleu.ratio, 3)}

def tried(candidates: list[list[str]], references: list[str], tokenized: bool) -> dict[str, dict[int, dict]]:
    "Return the scores of each utility and number of candidates."
    found = {}
    for name, metric in utilities(tokenized).items():
        tables = [similarities(texts, metric) for texts in candidates]
        found[name] = {}
        for n in COUNTS:
            translations = [best(texts[:n], table) for texts, table in zip(candidates, tables)]
            found[name][n] = scores_of(translations, references, tokenized)
    return found

def paired_test(translations: list[str], against: list[str], references: list[str], tokenized: bool) -> dict:
    "Return the difference in BLEU, and in chrF, from other translations, with intervals and p-values over sentences."
    both = translations, against
    bleu = compare(*[np.array([bleu_counts(texts, references, tokenized)]) for texts in both], samples=SAMPLES)
    chrf = compare(*[np.array([chrf_counts(texts, references)]) for texts in both], mean_chrf, SAMPLES)
    return bleu | {'chrf': chrf}

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', type=Path, required=True, help='folder of the trained model')
    parser.add_argument('--record', required=True, help="the model's record, with the translations of beam search")
    parser.add_argument('--data-dir', type=Path, required=True, help='folder of the files of Multi30k, or of multi30k-tok')
    parser.add_argument('--tokenized', action='store_true', help='the model translates lower-cased, tokenized text')
    parser.add_argument('--split', default='test_2016_flickr', help='split to translate with what was chosen')
    parser.add_argument('--val-sentences', type=int, default=500, help='sentences of val that choose (500)')
    parser.add_argument('--limit', type=int, help='use only so many sentences of the split, to try the script')
    parser.add_argument('--out', type=Path, default=RESULTS, help='folder for the record and the translations')
    args = parser.parse_args()
    record = json.loads((RESULTS / f'{args.record}.json').read_text('utf-8'))
    if checksum(args.model / 'model.safetensors')['sha256'] != record['weights_sha256']:
        parser.error(f'the weights in {args.model} are not those of the record {args.record}')
    import ctranslate2
    torch.set_num_threads(1)
    ctranslate2.set_random_seed(SEED)
    translator = Translator.load(args.model, engine='ctranslate2')
    corpus = read_corpus(args.data_dir, args.tokenized)

    pairs = corpus['val'][:args.val_sentences]
    sources, references = [src for src, _ in pairs], [tgt for _, tgt in pairs]
    start = time.process_time()
    val = {'beam search': scores_of(translator.translate(sources, **record['search']), references, args.tokenized)}
    seconds = {'beam search': time.process_time() - start}
    for name, settings in SAMPLINGS.items():
        start = time.process_time()
        candidates = sample(translator, sources, max(COUNTS), settings)
        seconds[f'{max(COUNTS)} samples, {name}'] = time.process_time() - start
        val[name] = {'different': statistics.mean(len(set(texts)) for texts in candidates),
                     'one sample': scores_of([texts[0] for texts in candidates], references, args.tokenized),
                     **tried(candidates, references, args.tokenized)}
        print('val', name, val[name], flush=True)
    chosen = {}
    for utility in utilities(args.tokenized):
        options = [(val[name][utility][n]['bleu'], -n, name) for name in SAMPLINGS for n in COUNTS]
        _, n, name = max(options)
        chosen[utility] = {'sampling': name, 'candidates': -n}
    print('chosen', chosen, flush=True)

    pairs = corpus[args.split][:args.limit]
    sources, references = [src for src, _ in pairs], [tgt for _, tgt in pairs]
    beam = (RESULTS / f'{args.record}.{args.split}.txt').read_text('utf-8').splitlines()[:args.limit]
    test = {'beam search': scores_of(beam, references, args.tokenized)}
    drawn = {}
    for utility, metric in utilities(args.tokenized).items():
        name, n = chosen[utility]['sampling'], chosen[utility]['candidates']
        if name not in drawn:
            most = max(choice['candidates'] for choice in chosen.values() if choice['sampling'] == name)
            drawn[name] = sample(translator, sources, most, SAMPLINGS[name])
        candidates = [texts[:n] for texts in drawn[name]]
        translations = [best(texts, similarities(texts, metric)) for texts in candidates]
        tested = paired_test(translations, beam, references, args.tokenized)
        test[utility] = scores_of(translations, references, args.tokenized) | {'paired_test': tested}
        lines = ''.join(translation + '\n' for translation in translations)
        atomic_write(args.out / f'{NAME}-{utility.lower()}.{args.split}.txt', lines)
        print(args.split, utility, test[utility], flush=True)
    command = ['python', 'benchmarks/mbr.py', '--model', 'MODEL', '--record', args.record, '--data-dir', 'DIR']
    command += ['--tokenized'] * args.tokenized + ['--split', args.split, '--val-sentences', str(args.val_sentences)]
    signature = tokenized_bleu(beam, references)[1] if args.tokenized else score(beam, references).signature
    found = about() | {
        'name': NAME, 'command': ' '.join(command), 'seed': SEED, 'model': args.record, 'split': args.split,
        'weights_sha256': record['weights_sha256'], 'search': record['search'], 'sentences': len(pairs),
        'bleu_signature': signature, 'val_sentences': args.val_sentences,
        'samplings': SAMPLINGS, 'val': val, 'chosen': chosen, 'test': test,
        'cpu_seconds_on_val': {name: round(value, 1) for name, value in seconds.items()}}
    atomic_write(args.out / f'{NAME}.json', json.dumps(found, indent=2) + '\n')

if __name__ == '__main__':
    main()
