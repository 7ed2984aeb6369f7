#!/usr/bin/env python3
"""Find the heads that carry gender from a noun to its pronoun, in several models trained with different seeds:
results/gender-path.json, which the page on the path of gender plots.

    python benchmarks/gender_path.py --folder runs/gender    # about four minutes of one core for each model
    python benchmarks/gender_path.py --folder runs/gender --seeds 4 5 # other seeds

The first model is the shipped one, trained by version 0.1.0. The others are trained by its recipe in `--folder`, with
these seeds; models that are already there are not trained again. The test sentences are those of the page, with six
animals and six places: *This dog should sleep in the house although it is sad*. For each head of the encoder, at
*it*:

- `patching`: share of the logit difference that follows when its output comes from the other sentence,
- `zero`: the same share when its output is replaced with zeros (0.5: no information about the noun is left),
- `weight`: mean attention weight from *it* to the noun.

All three are means over the sentences. `pairs` has `patching` for each pair of nouns.
"""
import argparse
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from annotated_transformer.attention_maps import record_attention
from annotated_transformer.batches import pad_rows
from annotated_transformer.causal_tests import Site, ablate, logit_difference, patching_effect
from annotated_transformer.files import atomic_write, to_json
from annotated_transformer.recipe import default_run, train_translator
from annotated_transformer.toy_words import nouns_of_kind
from annotated_transformer.translator import Translator
from annotated_transformer.vocabulary import BOS
from record import RESULTS, about

PLACES = {'in the house': 'im Haus', 'in the garden': 'im Garten', 'in the kitchen': 'in der Küche',
          'in the park': 'im Park', 'on the bed': 'auf dem Bett', 'on the bench': 'auf der Bank'}
PRONOUNS = {'m': 'er', 'f': 'sie', 'n': 'es'}
THIS = {'m': 'Dieser', 'f': 'Diese', 'n': 'Dieses'}

def sentence(noun, place: str) -> str:
    return f'This {noun.en} should sleep {place} although it is sad.'

def minimal_pairs(translator: Translator) -> tuple:
    "Return (source, its pair, target before the pronoun, its pronoun, the pair's pronoun) as tensors, and the nouns."
    animals = nouns_of_kind('animal')
    nouns = [(a, b) for a, b in product(animals, animals) if a.gender != b.gender]
    rows = [(a, b, place) for (a, b), place in product(nouns, PLACES)]
    def ids(texts, side='src'):
        return translator.encode(texts, side)
    def pronoun(noun):
        return ids([PRONOUNS[noun.gender]], 'tgt')[0][0]
    prefixes = ids([f'{THIS[a.gender]} {a.de} sollte {PLACES[place]} schlafen, obwohl' for a, _, place in rows], 'tgt')
    return (torch.tensor(ids([sentence(a, place) for a, _, place in rows])),
            torch.tensor(ids([sentence(b, place) for _, b, place in rows])),
            pad_rows([[BOS] + row for row in prefixes]),
            torch.tensor([pronoun(a) for a, _, _ in rows]),
            torch.tensor([pronoun(b) for _, b, _ in rows])), [f'{a.en} {b.en}' for a, b in nouns]

def zero_effect(model, pair, heads: dict[str, list[int]]) -> torch.Tensor:
    "Return the share of the logit difference that is lost when heads are replaced with zeros."
    src, other_src, tgt, word, other_word = pair
    before = logit_difference(model, src, tgt, word, other_word)
    other = logit_difference(model, other_src, tgt, word, other_word)
    with ablate(model, heads):
        after = logit_difference(model, src, tgt, word, other_word)
    return (before - after) / (before - other)

@torch.no_grad()
def measure(translator: Translator) -> dict:
    model = translator.model
    pair, nouns = minimal_pairs(translator)
    src, other_src, tgt, word, other_word = pair
    tokens = translator.tokenizer.tokens(src[0].tolist())
    it = tokens.index('▁it')
    right = logit_difference(model, src, tgt, word, other_word) > 0
    right &= logit_difference(model, other_src, tgt, word, other_word) < 0
    with record_attention(model) as recorded:
        model(src, tgt)
    heads = []
    for layer, head in product(range(2), range(4)):
        name = f'encoder.layers.{layer}.self_attention'
        effect = patching_effect(model, *pair, [Site(name, (it,), (head,))])
        heads.append({'layer': layer, 'head': head, 'patching': effect.mean().item(),
                      'zero': zero_effect(model, pair, {name: [head]}).mean().item(),
                      'weight': recorded[name][0][:, head, it, 1].mean().item(),
                      'pairs': dict(zip(nouns, effect.view(-1, len(PLACES)).mean(1).tolist()))})
    strongest = sorted(heads, key=lambda row: -row['patching'])[:2]
    sites = [Site(f"encoder.layers.{row['layer']}.self_attention", (it,), (row['head'],)) for row in strongest]
    together = {}
    for site in sites:
        together.setdefault(site.module, []).extend(site.heads)
    return {'right': right.float().mean().item(), 'heads': heads,
            'two_strongest': {'heads': [f"{row['layer']}.{row['head']}" for row in strongest],
                              'patching': patching_effect(model, *pair, merged(sites)).mean().item(),
                              'zero': zero_effect(model, pair, together).mean().item()}}

def merged(sites: list[Site]) -> list[Site]:
    "Return one site for each module."
    by_module = {}
    for site in sites:
        by_module.setdefault((site.module, site.positions), []).extend(site.heads)
    return [Site(module, positions, tuple(heads)) for (module, positions), heads in by_module.items()]

def trained(folder: Path, seed: int) -> Translator:
    "Return the translator of this seed; train it if the folder does not hold it."
    run = default_run()
    run = replace(run, training=replace(run.training, seed=seed))
    return train_translator(run, folder / f'seed-{seed}', progress_bar=False, device='cpu')

def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--folder', type=Path, required=True, help='of the trained models')
    parser.add_argument('--seeds', type=int, nargs='+', default=[1, 2, 3], help='of training (1 2 3)')
    parser.add_argument('--out', type=Path, default=RESULTS / 'gender-path.json')
    return parser.parse_args()

def main():
    args = arguments()
    torch.set_num_threads(1)
    start = time.process_time()
    models = {'shipped': measure(Translator.load(device='cpu'))}
    for seed in args.seeds:
        models[f'seed {seed}'] = measure(trained(args.folder, seed))
        print(seed, round(time.process_time() - start), models[f'seed {seed}']['two_strongest'], flush=True)
        record = about() | {'name': 'gender-path', 'settings': {'seeds': args.seeds}, 'models': models}
        atomic_write(args.out, to_json(record))

if __name__ == '__main__':
    main()
