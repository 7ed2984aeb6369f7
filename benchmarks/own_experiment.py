#!/usr/bin/env python3
"""Make the long runs of page 47: its second experiment, its template, and the solutions of its exercises.

    python benchmarks/own_experiment.py      # ten minutes of one core

The script runs the code of the page without a record, and keeps what the page's function `stored` made. So the record
holds the runs of the code that a reader sees. Run it again when that code changes, and then the page.
"""
import argparse
import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault('MPLBACKEND', 'Agg')

from annotated_transformer.files import atomic_write
from record import RESULTS, about

PAGE = Path(__file__).resolve().parents[1] / 'nbs/47_your_own_experiment.ipynb'

def code_of(page):
    "Return the sources of a page's code cells, without the commands of IPython."
    cells = json.loads(page.read_text('utf-8'))['cells']
    sources = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code']
    return ['\n'.join(line for line in source.splitlines() if not line.startswith('%'))
            for source in sources if "'google.colab'" not in source]

def run_page(sources):
    "Run the cells in one namespace, in an empty folder, where they find no record; return what they stored."
    namespace = {'__name__': '__main__'}
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for number, source in enumerate(sources):
                exec(compile(source, f'cell {number} of {PAGE.name}', 'exec'), namespace)
                print(f'cell {number + 1} of {len(sources)}: {len(namespace.get("recorded", {}))} values', flush=True)
        finally:
            os.chdir(here)
    return namespace['recorded']

def rounded(value):
    "Round a number, or the numbers in a list, to five decimals."
    return [rounded(part) for part in value] if isinstance(value, list) else round(value, 5)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=RESULTS / 'own-experiment.json',
                        help='the record (results/own-experiment.json)')
    args = parser.parse_args()
    out = args.out.resolve()
    values = run_page(code_of(PAGE))
    rows = ',\n'.join(f'  {json.dumps(key)}: {json.dumps(rounded(value))}' for key, value in values.items())
    head = json.dumps({'name': 'own-experiment'} | about(), indent=1)[:-2]
    text = f'{head},\n "values": {{\n{rows}\n }}\n}}\n'
    json.loads(text)
    atomic_write(out, text)

if __name__ == '__main__':
    main()
