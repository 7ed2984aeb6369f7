"What every part of the site needs to know: where things lie, the settings, the pages and their groups."
import json
import re
from configparser import ConfigParser
from pathlib import Path

SITE = Path(__file__).resolve().parent
ROOT = SITE.parent
NBS = ROOT / 'nbs'
RESULTS = ROOT / 'benchmarks' / 'results'


def settings():
    "The project's settings.ini, and the addresses that follow from it."
    config = ConfigParser()
    config.read(ROOT / 'settings.ini', encoding='utf-8')
    cfg = dict(config['DEFAULT'])
    cfg['blob'] = f"{cfg['git_url']}/blob/{cfg['branch']}"
    cfg['edit'] = f"{cfg['git_url']}/edit/{cfg['branch']}"
    cfg['colab'] = f"https://colab.research.google.com/github/{cfg['user']}/{cfg['repo']}/blob/{cfg['branch']}"
    return cfg


CFG = settings()
PACKAGE = ROOT / CFG['lib_name']

# The groups of the left navigation: a title, and the numbers of their pages.
GROUPS = {
    'Part I: the paper': range(0, 12),
    'Part II: the engine': range(20, 40),
    'Part III: experiments': range(40, 50),
    'Details of the engine': [50, 51, 52, *range(58, 90), 95, 96, 97, 98],
    'Details of the experiments': [53, 54, 55, 56, 57],
    'Appendix': [90, 91, 92, 93, 94, 99],
}


def read_page(path):
    "A notebook as a dictionary, each cell's source as one string."
    page = json.loads(path.read_text(encoding='utf-8'))
    for cell in page['cells']:
        cell['source'] = ''.join(cell['source'])
    return page


def describe(path):
    "What a page says about itself: its number, title, promise and module."
    cells = read_page(path)['cells']
    prose = '\n'.join(cell['source'] for cell in cells if cell['cell_type'] == 'markdown')
    code = '\n'.join(cell['source'] for cell in cells if cell['cell_type'] == 'code')
    module = re.search(r'^#\| default_exp (\S+)', code, re.M)
    number = int(path.stem[:2])
    return {
        'stem': path.stem,
        'number': number,
        'title': re.search(r'^# (.+)', prose, re.M)[1].strip(),
        'promise': re.search(r'^> (.+)', prose, re.M)[1].strip(),
        'module': module[1] if module else '',
        'group': next(title for title, numbers in GROUPS.items() if number in numbers),
    }


PAGES = {path.stem: describe(path) for path in sorted(NBS.glob('[0-9][0-9]_*.ipynb'))}
BY_NUMBER = {page['number']: page for page in PAGES.values()}
BY_MODULE = {page['module']: page for page in PAGES.values() if page['module']}


def repository_links(text):
    "Links that leave nbs/ lead to the repository; those to sections are written as MyST names sections, #like-this."
    def anchor(match):
        return f"{match[1]}#{re.sub(r'[^a-z0-9_-]', '', match[2].lower())})"
    text = text.replace('](index.ipynb)', '](index.md)')
    text = re.sub(r'(\]\((?:\w+\.ipynb)?)#([^)]+)\)', anchor, text)
    return re.sub(r'\]\(\.\./([^)]+)\)', rf"]({CFG['blob']}/\1)", text)
