#!/usr/bin/env python3
"""Write the live explainer as one HTML file that needs nothing else: code, style, weights, tokenizer, examples.

    python site/explainer/build.py OUT.html --pages PREFIX
"""
import argparse
import ast
import base64
import itertools
import json
import re
import sys
from configparser import ConfigParser
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from annotated_transformer.files import atomic_write
from annotated_transformer.toy_languages import PHENOMENA, toy_pairs

MODEL = ROOT / 'annotated_transformer' / 'data' / 'toy-ende'
SCRIPTS = 'model', 'search', 'tokenizer', 'tours', 'views', 'main'
N_TRAINING = 20_000 # pairs whose words count as known
HANDMADE = ['The dog sees the cat because it is tired.', 'The small dog sleeps in the garden because it is tired.',
            'The old woman gives the young man a new book.']
N_EXAMPLES = 20
# what each box shows: page, its title, module, function or class, and the name of the link
PLACES = {
    'embedding': ('02_positions', 'Positions', 'transformer', 'Transformer.encode'),
    'self': ('01_attention', 'Attention', 'attention', 'attention'),
    'cross': ('01_attention', 'Attention', 'attention', 'MultiHeadAttention'),
    'norm1': ('03_layers', 'Layers', 'layers', 'Residual'),
    'norm2': ('03_layers', 'Layers', 'layers', 'Residual'),
    'norm3': ('03_layers', 'Layers', 'layers', 'Residual'),
    'feedForward': ('03_layers', 'Layers', 'layers', 'FeedForward'),
    'out': ('04_transformer', 'The Transformer', 'transformer', 'Transformer.encode'),
    'logits': ('04_transformer', 'The Transformer', 'transformer', 'Transformer'),
    'softmax': ('08_decoding', 'Decoding', 'decoding', 'next_token_log_probs'),
}

def line_of(module: str, name: str) -> int:
    "Return the line on which a class, function or method of a module begins."
    body = ast.parse((ROOT / f'annotated_transformer/{module}.py').read_text('utf-8')).body
    found = None
    for part in name.split('.'):
        found = next(node for node in body if getattr(node, 'name', None) == part)
        body = getattr(found, 'body', [])
    return found.lineno

def links(pages: str) -> dict:
    "Return the page and the line of code of each box."
    config = ConfigParser()
    config.read(ROOT / 'settings.ini', encoding='utf-8')
    url = '{git_url}/blob/{branch}/annotated_transformer'.format(**config['DEFAULT'])
    return {box: {'page': pages.format(page=page), 'title': title, 'code': name,
                  'source': f'{url}/{module}.py#L{line_of(module, name)}'}
            for box, (page, title, module, name) in PLACES.items()}

def examples() -> list[dict]:
    "Return sentences of the toy language with their translations and true alignments, the hand-made ones without."
    found = [{'src': src, 'tgt': '', 'srcWords': [], 'tgtWords': [], 'alignment': []} for src in HANDMADE]
    pairs = (pair for pair in toy_pairs('test') if 6 <= len(pair.src_words) <= 12)
    seen = set()
    for pair in pairs:
        if pair.phenomena <= seen:
            continue
        seen |= pair.phenomena
        found.append({'src': pair.src, 'tgt': pair.tgt, 'srcWords': pair.src_words, 'tgtWords': pair.tgt_words,
                      'alignment': pair.alignment})
        if len(found) == N_EXAMPLES or len(seen) == len(PHENOMENA):
            break
    return found

def known_words() -> list[str]:
    "Return the English words of the training text, sorted as a dictionary is."
    words = set()
    for pair in itertools.islice(toy_pairs('train'), N_TRAINING):
        words.update(pair.src_words)
    lower = {word for word in words if word.islower()}
    return sorted(lower | {word for word in words if word[:1].isalpha() and word.lower() not in lower}, key=str.lower)

def script() -> str:
    "Return all scripts as one, without their imports and exports."
    parts = []
    for name in SCRIPTS:
        text = (HERE / f'{name}.js').read_text('utf-8')
        text = re.sub(r"^import\s[^;]*?\sfrom\s'[^']*';\n", '', text, flags=re.M)
        parts.append(re.sub(r'^export ', '', text, flags=re.M))
    return '\n'.join(parts)

def build(pages: str) -> str:
    "Return the page. `pages` is the address of a page of the book, with {page} for its name."
    tokenizer = json.loads((MODEL / 'tokenizer.json').read_text('utf-8'))['tokenizer']
    model = {'vocab': tokenizer['model']['vocab'], 'merges': tokenizer['model']['merges'],
             'unk_token': tokenizer['model']['unk_token']}
    data = {'config': json.loads((MODEL / 'config.json').read_text('utf-8')), 'tokenizer': {'model': model},
            'weights': base64.b64encode((MODEL / 'model.safetensors').read_bytes()).decode(),
            'words': known_words(), 'examples': examples(), 'links': links(pages)}
    text = json.dumps(data, ensure_ascii=False, separators=(',', ':')).replace('<', r'\u003c')
    page = (HERE / 'page.html').read_text('utf-8').replace('/*BOOK*/', pages.format(page='index'))
    for mark, content in (('/*STYLE*/', (HERE / 'style.css').read_text('utf-8')), ('/*DATA*/', text),
                          ('/*CODE*/', script())):
        before, after = page.split(mark)
        page = before + content + after
    return page

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out', type=Path, help='file to write')
    parser.add_argument('--pages', default='{page}.html', help='address of a page of the book (%(default)s)')
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(args.out, build(args.pages))

if __name__ == '__main__':
    main()
