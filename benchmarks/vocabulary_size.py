#!/usr/bin/env python3
"""Measure what the size of a vocabulary costs, on real text: tokenizers are trained on Multi30k, English and German.

    python benchmarks/vocabulary_size.py --data-dir DIR # writes results/vocabulary-size.json

Sentences of the validation split are encoded; the training split shows how often each token occurs. Times are the
median of five runs in one thread.
"""
import argparse
import io
import json
import os
import statistics
import time
from collections import Counter
from pathlib import Path

from sentencepiece import SentencePieceTrainer

from annotated_transformer.corpora import load_corpus
from annotated_transformer.files import atomic_write
from annotated_transformer.vocabulary import SPECIALS, UNK, SentencePieceTokenizer, open_sentencepiece, train_tokenizer
from record import RESULTS, about

LANGS = ('en', 'de')
SIZES = (500, 1000, 2000, 4000, 8000, 10000, 16000)
ENOUGH = 100 # occurrences in the training text

def train_unigram(pairs, vocab_size: int) -> SentencePieceTokenizer:
    "Train a unigram model with SentencePiece."
    file = io.BytesIO()
    SentencePieceTrainer.train(sentence_iterator=(text for pair in pairs for text in pair), model_writer=file,
                               vocab_size=vocab_size - len(SPECIALS) + 3, character_coverage=1.0, num_threads=1,
                               minloglevel=2) # its own special tokens are three
    model = open_sentencepiece(file.getvalue())
    pieces = [model.id_to_piece(i) for i in range(3, len(model))]
    return SentencePieceTokenizer([file.getvalue()] * 2, [pieces] * 2, LANGS)

def encode(tokenizer, pairs) -> list[list[int]]:
    "Return the ids of all sentences in both languages."
    return [ids for side, lang in enumerate(LANGS)
            for ids in tokenizer.encode_batch([pair[side] for pair in pairs], lang)]

def measure(tokenizer, train, val) -> dict:
    "Return what a tokenizer costs."
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        rows = encode(tokenizer, val)
        seconds.append(time.perf_counter() - start)
    n_tokens = sum(map(len, rows))
    counts = Counter(i for ids in encode(tokenizer, train) for i in ids)
    learned = range(len(SPECIALS), len(tokenizer))
    return {'tokens': len(tokenizer), 'tokens_per_sentence': n_tokens / len(rows),
            'unknown': sum(ids.count(UNK) for ids in rows) / n_tokens,
            'frequent': sum(counts[i] >= ENOUGH for i in learned) / len(learned),
            'microseconds_per_sentence': 1e6 * statistics.median(seconds) / len(rows)}

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-dir', type=Path, help='folder with the files of Multi30k, downloaded otherwise')
    parser.add_argument('--out', type=Path, default=RESULTS / 'vocabulary-size.json')
    args = parser.parse_args()
    os.environ['RAYON_NUM_THREADS'] = '1' # read by `tokenizers` when it first starts threads
    corpus = load_corpus('multi30k', data_dir=args.data_dir)
    train, val = list(corpus['train']), list(corpus['val'])
    found = {}
    for kind in ('words', 'bpe', 'unigram'):
        found[kind] = []
        for size in SIZES:
            tokenizer = train_unigram(train, size) if kind == 'unigram' else train_tokenizer(kind, train, LANGS, size)
            found[kind].append(measure(tokenizer, train, val))
            print(kind, found[kind][-1], flush=True)
    record = {'sentence_pairs': {'train': len(train), 'val': len(val)}, 'enough': ENOUGH, 'kinds': found, **about()}
    record['command'] = 'python benchmarks/vocabulary_size.py --data-dir DIR'
    atomic_write(args.out, json.dumps(record, indent=2) + '\n')

if __name__ == '__main__':
    main()
