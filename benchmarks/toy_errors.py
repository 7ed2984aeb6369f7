#!/usr/bin/env python3
"""Count the types of errors of toy EN-DE models that differ in their seed alone, trained as page 10 trains its model.

    python benchmarks/toy_errors.py --seeds 2 3 4 # writes results/toy-errors.json; about 10 minutes of one core
"""
import argparse
import json
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

import torch

from annotated_transformer.batches import BatchLoader, encode_pairs
from annotated_transformer.corpora import load_corpus
from annotated_transformer.files import atomic_write
from annotated_transformer.kernels import accelerate
from annotated_transformer.score_report import ERROR_TYPES, error_types, score_groups
from annotated_transformer.scoring import score
from annotated_transformer.training import average_weights, learning_rate, make_optimizer, train_step
from annotated_transformer.transformer import PRESETS, Transformer
from annotated_transformer.translator import Translator
from annotated_transformer.vocabulary import train_tokenizer
from record import RESULTS, about

SPLITS = ('val', 'test', 'test_combinations', 'test_long')
SETTINGS = {'n_epochs': 6, 'max_tokens': 1024, 'peak_lr': 4e-3, 'warmup_steps': 400}

def train_model(corpus, seed: int) -> Translator:
    "Train the model of page 10 with another seed."
    config = replace(PRESETS['toy'], vocab_size=1000)
    tokenizer = train_tokenizer('bpe', corpus['train'], corpus.langs, config.vocab_size)
    config = replace(config, vocab_size=len(tokenizer))
    loader = BatchLoader(encode_pairs(corpus['train'], tokenizer, corpus.langs), SETTINGS['max_tokens'], seed=seed)
    torch.manual_seed(seed)
    model = accelerate(Transformer(config))
    optimizer = make_optimizer(model)
    snapshots = deque(maxlen=5)
    step = 0
    for epoch in range(SETTINGS['n_epochs']):
        for batch in loader.epoch(epoch):
            step += 1
            train_step(model, batch, optimizer, learning_rate(step, SETTINGS['peak_lr'], SETTINGS['warmup_steps']))
            if step % 50 == 0:
                snapshots.append({name: weight.clone() for name, weight in model.state_dict().items()})
    model.load_state_dict(average_weights(snapshots))
    return Translator(model, tokenizer)

def measure(translations: list[str], references: list[str]) -> dict:
    "Return BLEU, exact matches, and for each error type the number of sentences and their BLEU."
    errors = [error_types(ours, reference) for ours, reference in zip(translations, references, strict=True)]
    counts = Counter(name for found in errors for name in found)
    scores = score_groups(translations, references, errors)
    return {'sentences': len(references), 'bleu': score(translations, references).bleu,
            'exact': sum(not found for found in errors),
            'errors': {name: counts[name] for name in ERROR_TYPES},
            'bleu_by_error': {name: part.bleu for name, part in scores.items()}}

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seeds', type=int, nargs='+', default=[2, 3, 4])
    parser.add_argument('--out', type=Path, default=RESULTS / 'toy-errors.json')
    args = parser.parse_args()
    torch.set_num_threads(1)
    corpus = load_corpus('toy-ende')
    found = {}
    for seed in args.seeds:
        translator = train_model(corpus, seed)
        found[seed] = {}
        for split in SPLITS:
            sources, references = map(list, zip(*corpus[split]))
            found[seed][split] = measure(translator.translate(sources), references)
            print(seed, split, found[seed][split], flush=True)
        atomic_write(args.out, json.dumps({'settings': SETTINGS, 'seeds': found, **about()}, indent=2) + '\n')

if __name__ == '__main__':
    main()
