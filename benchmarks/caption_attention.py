#!/usr/bin/env python3
"""Store the attention of a Multi30k model on two sentences of the test set: a good and a bad translation.

    python benchmarks/caption_attention.py --model MODEL --record gpu-tok-r-drop-seed1 --data-dir DIR

DIR holds multi30k-tok. The sentences are chosen from the recorded translations by RULE, without looking at attention.
Each is translated again with the recorded search: the script stops if the translation is not the recorded one.
The attention is the cross-attention of the decoder's last layer, the mean of its heads. Takes about ten seconds.
"""
import argparse
import gzip
import json
from collections import Counter
from pathlib import Path

import torch
from sacrebleu.metrics import CHRF

from annotated_transformer.files import atomic_write, checksum
from annotated_transformer.translator import Translator
from record import RESULTS, about

NAME = 'caption-attention'
WORDS = range(8, 13)
RULE = ('among the sentences with 8 to 12 words in source and translation (punctuation counts), those with the highest '
        'and the lowest chrF; the first of several')

def read_lines(data_dir: Path, split: str, lang: str) -> list[str]:
    "Return the sentences of a file of tokenized Multi30k."
    with gzip.open(data_dir / 'multi30k-tok' / f'{split}.lc.norm.tok.{lang}.gz', 'rt', encoding='utf-8') as file:
        return [line.rstrip('\n') for line in file]

def choose(sources: list[str], translations: list[str], chrf: list[float]) -> dict[str, int]:
    "Return the indices of the good and the bad sentence by RULE."
    fitting = [i for i, pair in enumerate(zip(sources, translations, strict=True))
               if all(len(text.split()) in WORDS for text in pair)]
    return {'good': max(fitting, key=lambda i: chrf[i]), 'bad': min(fitting, key=lambda i: chrf[i])}

def attention(translator: Translator, source: str, translation: str) -> dict:
    "Return the source tokens, the predicted tokens, and a row of weights over the source for each predicted token."
    maps = translator.attention(source, translation)
    weights = maps.cross[-1].mean(0).tolist()
    return {'source_tokens': maps.src, 'predicted_tokens': maps.tgt[1:] + ['<eos>'],
            'weights': [[round(weight, 3) for weight in row] for row in weights]}

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', type=Path, required=True, help='folder of the trained model')
    parser.add_argument('--record', required=True, help="the model's record, with its translations of the test set")
    parser.add_argument('--data-dir', type=Path, required=True, help='folder that holds multi30k-tok')
    parser.add_argument('--out', type=Path, default=RESULTS, help='folder for the record')
    args = parser.parse_args()
    model = json.loads((RESULTS / f'{args.record}.json').read_text('utf-8'))
    if checksum(args.model / 'model.safetensors')['sha256'] != model['weights_sha256']:
        parser.error(f'the weights in {args.model} are not those of the record {args.record}')
    torch.set_num_threads(1)
    translator = Translator.load(args.model)
    sources, references = [read_lines(args.data_dir, 'test_2016_flickr', lang) for lang in ('en', 'de')]
    translations = (RESULTS / f'{args.record}.test.txt').read_text('utf-8').splitlines()
    metric = CHRF()
    chrf = [metric.sentence_score(translation, [reference]).score
            for translation, reference in zip(translations, references, strict=True)]
    in_training = Counter(word for line in read_lines(args.data_dir, 'train', 'en') for word in line.split())
    sentences = {}
    for kind, i in choose(sources, translations, chrf).items():
        if translator.translate(sources[i], **model['search']) != translations[i]:
            parser.error(f'line {i + 1} of the test set is not translated as in {args.record}.test.txt')
        sentences[kind] = {'line': i + 1, 'source': sources[i], 'translation': translations[i],
                           'reference': references[i], 'chrf': round(chrf[i], 2),
                           'in_training': {word: in_training[word] for word in sources[i].split()},
                           **attention(translator, sources[i], translations[i])}
    command = f'python benchmarks/{NAME.replace("-", "_")}.py --model MODEL --record {args.record} --data-dir DIR'
    found = about() | {'name': NAME, 'command': command, 'model': args.record, 'split': 'test',
                       'weights_sha256': model['weights_sha256'], 'search': model['search'], 'rule': RULE,
                       'chrf_signature': str(metric.get_signature()),
                       'attention': "cross-attention of the decoder's last layer, mean of the heads",
                       'sentences': sentences}
    atomic_write(args.out / f'{NAME}.json', json.dumps(found, indent=2) + '\n')

if __name__ == '__main__':
    main()
