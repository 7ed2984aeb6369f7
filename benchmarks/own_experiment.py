#!/usr/bin/env python3
"""Make the runs of page 47: its pilots and experiments, and the solutions of its exercises.

    python benchmarks/own_experiment.py      # ten minutes of one core; stop it at any time, run it again to continue

The script runs the code of the page, and keeps what the page's function `stored` made. So the record holds the runs of
the code that a reader sees: each key has a hash of the configuration, the data and the code. When they change, delete
the record, and run the script again, then the page.
"""
import argparse
import json
import linecache
import os
from functools import partial
from pathlib import Path

os.environ.setdefault('MPLBACKEND', 'Agg')

from annotated_transformer.files import atomic_write
from record import RESULTS, about

RECORD = RESULTS / 'own-experiment.json'
PAGE = Path(__file__).resolve().parents[1] / 'nbs/47_your_own_experiment.ipynb'

def rounded(value):
    "Round a number, or the numbers in a list, to five decimals."
    return [rounded(part) for part in value] if isinstance(value, list) else round(value, 5)

class Saved(dict):
    "Values that are written into the record as soon as they are set."
    def __setitem__(self, key, value):
        super().__setitem__(key, rounded(value))
        rows = ',\n'.join(f'  {json.dumps(name)}: {json.dumps(found)}' for name, found in self.items())
        head = json.dumps({'name': 'own-experiment'} | about(), indent=1)[:-2]
        atomic_write(RECORD, f'{head},\n "values": {{\n{rows}\n }}\n}}\n')
        print(key, self[key] if isinstance(self[key], float) else '', flush=True)

def code_of(page):
    "Return the sources of a page's code cells, without the commands of IPython."
    cells = json.loads(page.read_text('utf-8'))['cells']
    sources = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code']
    return ['\n'.join(line for line in source.splitlines() if not line.startswith('%'))
            for source in sources if "'google.colab'" not in source]

def compile_cell(source, number):
    "Compile a cell, and let `inspect.getsource` find its functions."
    name = f'cell {number} of {PAGE.name}'
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    return compile(source, name, 'exec')

def stored_and_saved(record, key, make):
    "Return what the record holds under this key; if it holds nothing, call `make`, and save the result."
    if key not in record:
        record[key] = make()
    return record[key]

def run_page(sources):
    "Run the cells in one namespace; what they store is saved at once."
    namespace = {'__name__': '__main__'}
    for number, source in enumerate(sources):
        exec(compile_cell(source, number), namespace)
        if not isinstance(namespace.get('recorded'), Saved) and 'recorded' in namespace:
            namespace['recorded'] = Saved(namespace['recorded'])
        if 'stored' in namespace:
            namespace['stored'] = partial(stored_and_saved, namespace['recorded'])

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    os.chdir(PAGE.parent) # where the page finds the record so far
    run_page(code_of(PAGE))

if __name__ == '__main__':
    main()
