#!/usr/bin/env python3
"""Compare Minimum Bayes risk decoding with beam search: sample candidates, and keep the one most similar to them all.

    python benchmarks/mbr.py --model runs/wide --record gpu-en-de-wide-seed1 --data-dir DIR

The similarity (the utility) is sentence chrF or sentence BLEU. How to sample and how many candidates to draw is chosen
on the first sentences of `val`, for each utility, by BLEU; then the test split is translated once.
CTranslate2 draws the samples: with one thread, the same seed draws the same samples again in a new process.
The record holds scores, and paired tests against the beam search; the translations are in mbr-UTILITY.SPLIT.txt.
"""
import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path

import torch
from sacrebleu.metrics import BLEU, CHRF

from annotated_transformer.corpora import CorpusConfig, load_corpus
from annotated_transformer.files import atomic_write, checksum
from annotated_transformer.scoring import score
from annotated_transformer.translator import Translator
from record import RESULTS, about, paired_test

NAME = 'mbr'
SAMPLINGS = {
    'temperature 0.5': {'temperature': 0.5},
    'temperature 1, top 10': {'temperature': 1.0, 'top_k': 10},
}
COUNTS = 4, 8, 16 # candidates for each sentence
UTILITIES = {'chrF': CHRF(), 'BLEU': BLEU(effective_order=True)}
SEED = 1

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

def scores_of(translations: list[str], references: list[str]) -> dict[str, float]:
    found = score(translations, references)
    return {'bleu': round(found.bleu, 2), 'chrf': round(found.chrf, 2), 'length_ratio': round(found.length_ratio, 3)}

def tried(candidates: list[list[str]], references: list[str]) -> dict[str, dict[int, dict]]:
    "Return the scores of each utility and number of candidates."
    found = {}
    for name, metric in UTILITIES.items():
        tables = [similarities(texts, metric) for texts in candidates]
        found[name] = {n: scores_of([best(texts[:n], table) for texts, table in zip(candidates, tables)], references)
                       for n in COUNTS}
    return found

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', type=Path, required=True, help='folder of the trained model')
    parser.add_argument('--record', required=True, help="the model's record, with the translations of beam search")
    parser.add_argument('--data-dir', type=Path, required=True, help='folder with the files of Multi30k')
    parser.add_argument('--split', default='test_2016_flickr', help='split to translate with what was chosen')
    parser.add_argument('--val-sentences', type=int, default=150, help='sentences of val that choose (150)')
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
    corpus = load_corpus(CorpusConfig('multi30k', data_dir=args.data_dir))

    pairs = corpus['val'][:args.val_sentences]
    sources, references = [src for src, _ in pairs], [tgt for _, tgt in pairs]
    start = time.process_time()
    val = {'beam search': scores_of(translator.translate(sources, **record['search']), references)}
    seconds = {'beam search': time.process_time() - start}
    for name, settings in SAMPLINGS.items():
        start = time.process_time()
        candidates = sample(translator, sources, max(COUNTS), settings)
        seconds[f'{max(COUNTS)} samples, {name}'] = time.process_time() - start
        val[name] = {'different': statistics.mean(len(set(texts)) for texts in candidates),
                     'one sample': scores_of([texts[0] for texts in candidates], references),
                     **tried(candidates, references)}
        print('val', name, val[name], flush=True)
    chosen = {}
    for utility in UTILITIES:
        options = [(val[name][utility][n]['bleu'], -n, name) for name in SAMPLINGS for n in COUNTS]
        _, n, name = max(options)
        chosen[utility] = {'sampling': name, 'candidates': -n}
    print('chosen', chosen, flush=True)

    pairs = corpus[args.split][:args.limit]
    sources, references = [src for src, _ in pairs], [tgt for _, tgt in pairs]
    beam = (RESULTS / f'{args.record}.{args.split}.txt').read_text('utf-8').splitlines()[:args.limit]
    test = {'beam search': scores_of(beam, references)}
    drawn = {}
    for utility, metric in UTILITIES.items():
        name, n = chosen[utility]['sampling'], chosen[utility]['candidates']
        if name not in drawn:
            most = max(choice['candidates'] for choice in chosen.values() if choice['sampling'] == name)
            drawn[name] = sample(translator, sources, most, SAMPLINGS[name])
        candidates = [texts[:n] for texts in drawn[name]]
        translations = [best(texts, similarities(texts, metric)) for texts in candidates]
        test[utility] = scores_of(translations, references) | {'paired_test': paired_test(translations, beam, references)}
        lines = ''.join(translation + '\n' for translation in translations)
        atomic_write(args.out / f'{NAME}-{utility.lower()}.{args.split}.txt', lines)
        print(args.split, utility, test[utility], flush=True)
    command = ['python', 'benchmarks/mbr.py', '--model', 'MODEL', '--record', args.record, '--data-dir', 'DIR']
    found = about() | {
        'name': NAME, 'command': ' '.join(command), 'seed': SEED, 'model': args.record, 'split': args.split,
        'weights_sha256': record['weights_sha256'], 'search': record['search'], 'val_sentences': args.val_sentences,
        'samplings': SAMPLINGS, 'val': val, 'chosen': chosen, 'test': test,
        'cpu_seconds_on_val': {name: round(value, 1) for name, value in seconds.items()}}
    atomic_write(args.out / f'{NAME}.json', json.dumps(found, indent=2) + '\n')

if __name__ == '__main__':
    main()
