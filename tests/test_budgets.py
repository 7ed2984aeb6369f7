"The book stays readable: how long a page may be, and how large a module."
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NBS = ROOT / 'nbs'
PAGES = sorted(path for path in NBS.glob('*.ipynb') if re.match(r'\d\d_', path.name))
MODULES = sorted(path for path in (ROOT / 'annotated_transformer').glob('*.py') if path.stem != '_modidx')

CORE = {'cells': 45, 'words': 1300, 'code lines': 300}
OTHER = {'cells': 70, 'words': 2200}
MODULE_LINES = {'attention': 110, 'positions': 70, 'layers': 140, 'transformer': 180, 'training': 230, 'decoding': 220}
MAX_MODULE_LINES = 450
MAX_COLUMNS = 100
MAX_BYTES = 10_000_000


def is_core(page):
    "Pages 00 to 11 are Part I."
    return page.name < '12'


def cells(page):
    "The cells that count: all but the Colab cell that `make masthead` writes."
    found = json.loads(page.read_text(encoding='utf-8'))['cells']
    for cell in found:
        cell['source'] = ''.join(cell['source'])
    return [cell for cell in found if "'google.colab' in sys.modules" not in cell['source']]


def n_words(text):
    "Words of prose: no badge, no formulas, no addresses of links, no table rules."
    text = re.sub(r'^\[!\[.*$', '', text, flags=re.M)
    text = re.sub(r'\$\$.*?\$\$', ' ', text, flags=re.S)
    text = re.sub(r'\$[^$\n]*\$', ' x ', text)
    text = re.sub(r'\]\([^)]*\)', '] ', text)
    return len(re.findall(r"[A-Za-z0-9][\w'’.,-]*", text))


def code_lines(page):
    "Non-blank lines of code."
    sources = [cell['source'] for cell in cells(page) if cell['cell_type'] == 'code']
    return [line for source in sources for line in source.splitlines() if line.strip()]


def measure(page):
    "How long a page is."
    prose = [cell['source'] for cell in cells(page) if cell['cell_type'] == 'markdown']
    return {'cells': len(cells(page)), 'words': sum(map(n_words, prose)), 'code lines': len(code_lines(page))}


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_page_is_within_its_budget(page):
    found = measure(page)
    limits = CORE if is_core(page) else OTHER
    too_long = {name: found[name] for name, limit in limits.items() if found[name] > limit}
    assert not too_long, f'{page.name} exceeds its budget of {limits}: {too_long}'


@pytest.mark.parametrize('page', [page for page in PAGES if is_core(page)], ids=lambda page: page.stem)
def test_code_of_the_core_path_fits_the_width_of_a_page(page):
    too_wide = [line for line in code_lines(page) if len(line) > MAX_COLUMNS]
    assert not too_wide, f'{page.name}: lines of more than {MAX_COLUMNS} columns: {too_wide}'


def test_core_path_takes_one_day():
    core = [page for page in PAGES if is_core(page)]
    totals = [measure(page) for page in core]
    assert len(core) <= 12
    assert sum(total['code lines'] for total in totals) <= 3_000
    assert sum(total['words'] for total in totals) <= 13_000


@pytest.mark.parametrize('module', MODULES, ids=lambda module: module.stem)
def test_module_is_short(module):
    n_lines = len(module.read_text(encoding='utf-8').splitlines())
    limit = MODULE_LINES.get(module.stem, MAX_MODULE_LINES)
    assert n_lines <= limit, f'{module.name} has {n_lines} lines, more than {limit}: split it, or say it shorter'


def test_all_pages_together_are_small():
    size = sum(page.stat().st_size for page in NBS.glob('*.ipynb'))
    assert size < MAX_BYTES
