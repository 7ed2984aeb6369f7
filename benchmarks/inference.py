#!/usr/bin/env python3
"""Compare `inference` with the reference search, and measure what each of its optimizations is worth.

    python benchmarks/inference.py

writes results/inference.json, which the page about inference shows. Run it on a machine that does nothing else.

    python benchmarks/inference.py --part equality --model runs/mine --data-dir DIR

compares the searches only, for one more model, trained on Multi30k (in DIR), and keeps the measurements of the record.
"""
import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from record import about

from annotated_transformer import decoding, inference
from annotated_transformer.attention import MultiHeadAttention, attention, causal_mask
from annotated_transformer.batches import pad_rows
from annotated_transformer.corpora import CorpusConfig, load_corpus
from annotated_transformer.files import atomic_write
from annotated_transformer.kernels import accelerate
from annotated_transformer.large_corpora import available_cores
from annotated_transformer.relative_positions import RelativeConfig, RelativeTransformer
from annotated_transformer.toy_languages import toy_ende
from annotated_transformer.transformer import Transformer, TransformerConfig
from annotated_transformer.translator import Translator
from annotated_transformer.vocabulary import EOS

PATH = Path(__file__).parent / 'results/inference.json'
BUSY_ROUNDS = 5 # a search with two threads that wait for one another take many times as long
SETTINGS = {'greedy, 1 sentence': (1, 1), 'beam 4, 1 sentence': (4, 1), 'beam 4, batch of 64': (4, 64)}


class WithCopiedSource(inference.DecoderState):
    "A DecoderState that copies a sentence's keys and values for each of its hypotheses."
    def cross_attention(self, i, mha, x):
        s, k, _ = x.shape
        query = mha.split_heads(mha.q_proj(x.flatten(0, 1)[:, None]))
        keys, values = [part.repeat_interleave(k, 0) for part in self.cross[i]]
        output, _ = mha.attention_fn(query, keys, values, self.src_mask.repeat_interleave(k, 0))
        return mha.out_proj(mha.merge_heads(output)).view(s, k, -1)


def keep_source(model, encoder_output):
    "Takes the place of `project_source`: the encoder's output itself, for each layer."
    return [(encoder_output, encoder_output) for _ in model.decoder.layers]


class WithProjections(inference.DecoderState):
    "A DecoderState that projects the source again in each step."
    def cross_attention(self, i, mha, x):
        keys = mha.split_heads(mha.k_proj(self.cross[i][0]))
        values = mha.split_heads(mha.v_proj(self.cross[i][1]))
        query = mha.split_heads(mha.q_proj(x))
        output, _ = mha.attention_fn(query, keys, values, self.src_mask)
        return mha.out_proj(mha.merge_heads(output))


class WithoutCache(inference.DecoderState):
    "A DecoderState that computes all target positions again in each step, but projects the source once."
    def __init__(self, model, src):
        super().__init__(model, src)
        self.tgt = src.new_empty(len(src), 1, 0) # (s, k, positions)

    def logits(self, tokens):
        model = self.model
        s, k = tokens.shape
        self.tgt = torch.cat([self.tgt, tokens[..., None]], dim=-1)
        t = self.tgt.size(-1)
        x = model.tgt_embed(self.tgt.flatten(0, 1)) * math.sqrt(model.config.d_model) + self.positions[:t]
        for i, layer in enumerate(model.decoder.layers):
            x = layer.residual1(x, lambda y: layer.self_attention(y, y, y, causal_mask(t)))
            x = x.view(s, k * t, -1) # all positions of a sentence's hypotheses are queries for its source
            x = layer.residual2(x, lambda y: self.cross_attention(i, layer.cross_attention, y))
            x = layer.residual3(x, layer.feed_forward).view(s * k, t, -1)
        return model.lm_head(model.decoder.norm(x)[:, -1]).view(s, k, -1)

    def reorder(self, parents):
        self.tgt = self.tgt.gather(1, parents[..., None].expand(-1, -1, self.tgt.size(-1)))

    def select_rows(self, sentences):
        self.tgt = self.tgt[sentences]
        self.cross = [(keys[sentences], values[sentences]) for keys, values in self.cross]
        self.src_mask = self.src_mask[sentences]


@contextmanager
def busy_core():
    "Another program that uses one core."
    program = subprocess.Popen([sys.executable, '-c', 'while True: pass'])
    try:
        yield
    finally:
        program.kill()
        program.wait()


VARIANTS = ['key/value cache', 'source projected once', 'k queries for each source', 'fused attention',
            'finished sentences leave the batch', 'nothing (control)'] # the last one shows how much measurements vary


@contextmanager
def variant(name, model):
    "Switch one optimization off."
    saved = {key: getattr(inference, key) for key in ('rows_to_keep', 'project_source', 'DecoderState')}
    if name == 'key/value cache':
        inference.DecoderState = WithoutCache
    if name == 'source projected once':
        inference.project_source = keep_source
        inference.DecoderState = WithProjections
    if name == 'k queries for each source':
        inference.DecoderState = WithCopiedSource
    if name == 'fused attention':
        for module in model.modules():
            if isinstance(module, MultiHeadAttention):
                module.attention_fn = attention
    if name == 'finished sentences leave the batch':
        inference.rows_to_keep = lambda done: None
    try:
        yield
    finally:
        accelerate(model)
        for key, value in saved.items():
            setattr(inference, key, value)


def batches_of(rows, batch_size):
    "One batch of 64 sentences, or every fifth of them alone."
    if batch_size == 1:
        return [pad_rows([row]) for row in rows[:64:5]]
    return [pad_rows(rows[:batch_size])]


def measure(model, rows, rounds):
    """Return milliseconds for each sentence, and ratios: the time without each optimization over the time with all,
    and the time of the reference over it.

    Each round compares times that were measured shortly after one another; the record has the quartiles of these
    ratios. Times are processor times, so that other programs disturb them less: use one thread.
    """
    names = ['the reference', None, *VARIANTS]
    seconds = {setting: {name: [] for name in names} for setting in SETTINGS}
    for _ in range(rounds):
        random.shuffle(names)
        for setting, (beam_size, batch_size) in SETTINGS.items():
            batches = batches_of(rows, batch_size)
            for name in names:
                if name == 'the reference' and batch_size > 1:
                    continue
                start = time.process_time()
                with variant(name, model):
                    for src in batches:
                        if name == 'the reference':
                            decoding.beam_search(model, src, beam_size)
                        else:
                            inference.beam_search(model, src, beam_size=beam_size)
                seconds[setting][name].append((time.process_time() - start) / sum(map(len, batches)))
    with_all = {setting: round(1000 * statistics.median(found[None]), 2) for setting, found in seconds.items()}
    without = {name: {} for name in ['the reference', *VARIANTS]}
    for setting, found in seconds.items():
        for name in without:
            ratios = [slow / fast for slow, fast in zip(found[name], found[None])]
            if ratios:
                without[name][setting] = [round(ratio, 3) for ratio in statistics.quantiles(ratios, n=4)]
    reference = without.pop('the reference')
    return with_all, without, reference


def measure_threads(model, rows, rounds):
    """Return the time without `suitable_threads` over the time with it: quartiles for each setting.

    PyTorch may use all cores. Times are those of a clock on the wall, since the processor time of two threads says
    nothing about the wait.
    """
    saved = inference.suitable_threads
    ways = {'with': saved, 'without': lambda model, n_rows: nullcontext()}
    ratios = {}
    torch.set_num_threads(available_cores())
    try:
        for setting, (beam_size, batch_size) in SETTINGS.items():
            batches = batches_of(rows, batch_size)
            seconds = {way: [] for way in ways}
            for i in range(rounds + 1):
                for way in (ways if i % 2 else reversed(ways)):
                    inference.suitable_threads = ways[way]
                    start = time.perf_counter()
                    for src in batches:
                        inference.beam_search(model, src, beam_size=beam_size)
                    seconds[way].append(time.perf_counter() - start)
            found = [slow / fast for slow, fast in zip(seconds['without'][1:], seconds['with'][1:])]    # the first warms up
            ratios[setting] = [round(ratio, 3) for ratio in statistics.quantiles(found, n=4)]
    finally:
        inference.suitable_threads = saved
        torch.set_num_threads(1)
    return ratios


def compare(model, rows):
    "Count the sentences for which both beam searches return the same tokens."
    found = [hypotheses[0] for start in range(0, len(rows), 100)
             for hypotheses in inference.beam_search(model, pad_rows(rows[start:start + 100]), max_extra_tokens=9)]
    result = {'sentences': len(rows), 'same': 0, 'ties': 0, 'different': 0, 'largest_difference': 0.0}
    for row, hypothesis in zip(rows, found):
        reference = decoding.beam_search(model, torch.tensor([row]), max_extra_tokens=9)[0]
        difference = abs(hypothesis.normalized_score - reference.normalized_score)
        result['largest_difference'] = max(result['largest_difference'], difference)
        if hypothesis.ids == reference.ids:
            result['same'] += 1
        else:
            result['ties' if difference < 1e-4 else 'different'] += 1
    return result


def main():
    parser = argparse.ArgumentParser(description='Compare inference with the reference search.')
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--sentences', type=int, default=1000, help='0: measure only, keep the comparison')
    parser.add_argument('--part', choices=['all', 'equality'], default='all', help='equality: keep the measurements')
    parser.add_argument('--model', type=Path, help='folder of a model trained on Multi30k, for the comparison')
    parser.add_argument('--data-dir', help='folder of Multi30k: sentences of test_2016_flickr for --model')
    parser.add_argument('--out', type=Path, default=PATH, help='the record (default: benchmarks/results/inference.json)')
    args = parser.parse_args()
    torch.set_num_threads(1)
    translator = Translator.load(device='cpu')
    pairs = [*toy_ende('test'), *toy_ende('val')][:args.sentences or 200]
    rows = translator.encode([pair.src for pair in pairs])
    torch.manual_seed(0)
    small = {'vocab_size': 200, 'n_layers': 2, 'd_model': 32, 'd_ff': 64, 'n_heads': 4, 'max_len': 60}
    untrained = [[*torch.randint(4, 200, (1 + i % 12,)).tolist(), EOS] for i in range(args.sentences)]
    models = {
        'shipped model': (translator.model, rows),
        'untrained, pre-norm, learned': (
            Transformer(TransformerConfig(**small, norm='pre', positions='learned')).eval(), untrained),
        'untrained, rotary': (
            accelerate(RelativeTransformer(RelativeConfig(**small, positions='rotary')).eval()), untrained)}
    if args.model:
        captions = Translator.load(args.model, 'cpu')
        corpus = CorpusConfig('multi30k', pair='-'.join(captions.tokenizer.langs), data_dir=args.data_dir)
        texts = [src for src, _ in load_corpus(corpus)['test_2016_flickr'][:args.sentences]]
        models['captions, trained'] = (captions.model, captions.encode(texts))
    if args.part == 'equality':
        record = json.loads(PATH.read_text())
        found = {name: compare(*model_and_rows) for name, model_and_rows in models.items()}
        command = about()['command'].replace(str(args.model), 'MODEL').replace(str(args.data_dir), 'DIR')
        record |= {'equality': found, 'equality_run': {**about(), 'command': command}}
        print(json.dumps(found, indent=1))
        return atomic_write(args.out, json.dumps(record, indent=1) + '\n')
    with_all, without, reference = measure(translator.model, rows, args.rounds)
    threads = {'cores': available_cores(), 'alone': measure_threads(translator.model, rows, args.rounds)}
    with busy_core():
        threads['with another program on one core'] = measure_threads(translator.model, rows, BUSY_ROUNDS)
    print(json.dumps({**without, 'the reference': reference, 'one thread for small steps': threads}, indent=1), flush=True)
    if args.sentences:
        equality = {name: compare(*model_and_rows) for name, model_and_rows in models.items()}
    else:
        equality = json.loads(PATH.read_text())['equality']
    result = {**about(), 'threads': 1, 'rounds': args.rounds, 'busy_rounds': BUSY_ROUNDS, 'settings': list(SETTINGS),
              'milliseconds': with_all, 'without': without, 'reference': reference, 'without_suitable_threads': threads,
              'equality': equality}
    atomic_write(args.out, json.dumps(result, indent=1) + '\n')
    print(json.dumps(result, indent=1))


if __name__ == '__main__':
    main()
