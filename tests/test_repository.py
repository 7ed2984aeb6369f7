"What the files of the repository say, read and not run: addresses, paths, and which module leans on which."
import ast
import json
import re
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

import annotated_transformer

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT/'annotated_transformer'

# Each module imports only from lower floors. A new module takes its place here.
FLOORS = {
    -1: 'files toy_words progress', # the standard library alone; whatever writes a file imports files
    -0.5: 'probes',
    0: 'attention command_options positions vocabulary prepared toy_grammar scoring checks plotting '
       'distributed hub text_streams part_checks input_checks training_checks train_config comet_score',
    0.5: 'parallel_text data_checks config_files',
    1: 'layers batches complexity experiments bpe_dropout word_vectors drawing toy_languages downloads',
    2: 'transformer corpora diagrams loader',
    3: 'training decoding attention_maps relative_positions recurrent marian run_folder',
    3.2: 'large_corpora', # its folders have plans and locks, as those of runs have settings
    3.5: 'kernels',
    4: 'checkpoints inference causal_tests',
    4.2: 'checkpoint_writer',
    4.5: 'run_log explorer',
    5: 'trainer interop heads',
    5.5: 'engines onnx_export', # inference, and conversions as interop makes them; translator uses engines
    6: 'translator score_report line_translation',
    6.5: 'run_evaluation',
    7: 'recipe serving',
    7.5: 'run_reports',
    8: 'server train_command',
    8.5: 'commands prepare_command',
    8.7: 'model_commands translate_command',
    9: 'cli',
    10: '__main__',
}
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names.split()}
FOR_DEVELOPMENT = {'nbdev', 'execnb', 'fastcore', 'ghapi', 'beartype', 'IPython', 'pytest'}
MODULES = sorted(p for p in PACKAGE.rglob('*.py') if p.stem not in ('__init__', '_modidx'))
PAGES = sorted((ROOT/'nbs').glob('*.ipynb'))


@pytest.fixture(scope='module')
def cfg():
    config = ConfigParser()
    config.read(ROOT/'settings.ini', encoding='utf-8')
    return config['DEFAULT']


@pytest.fixture(scope='module')
def committed():
    "The text of every committed file, by path; of every file that would be, where git does not run."
    git = subprocess.run(['git', 'ls-files', '-co', '--exclude-standard'], cwd=ROOT, capture_output=True, text=True)
    if git.returncode: pytest.skip('not a git checkout')
    paths = [ROOT/line for line in git.stdout.splitlines() if (ROOT/line).is_file()]
    return {str(p.relative_to(ROOT)): p.read_text(encoding='utf-8', errors='replace') for p in paths}


def dotted(path):
    "A module's name within the package."
    return '.'.join(path.relative_to(PACKAGE).with_suffix('').parts)


def imports(path):
    "What a module imports, at any level of its code, and what it takes from the package's face: whole names."
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import): yield from (a.name for a in node.names if a.name != PACKAGE.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == PACKAGE.name:
            yield f'{PACKAGE.name}.{node.attr}'
        elif isinstance(node, ast.ImportFrom):
            assert node.level < 2, f'{path.name} reaches outside the package'
            folder = '.'.join(path.parent.relative_to(PACKAGE.parent).parts) if node.level else ''
            base = '.'.join(filter(None, [folder, node.module]))
            yield from (f'{base}.{a.name}' for a in node.names)


def test_version(cfg):
    assert annotated_transformer.__version__ == cfg['version']


def test_every_module_has_a_page_and_a_floor():
    for path in MODULES:
        assert dotted(path) in FLOOR, f'{dotted(path)}: give it a floor in FLOORS'
        if path.stem == '__main__':
            continue
        made_from = re.search(r'File to edit: (\S+\.ipynb)', path.read_text(encoding='utf-8')[:300])
        assert made_from and (path.parent/made_from[1]).resolve() in PAGES, f'{dotted(path)} is not made from a page'


@pytest.mark.parametrize('path', MODULES, ids=dotted)
def test_imports_come_from_lower_floors(path):
    for name in imports(path):
        top, *rest = name.split('.')
        assert top not in FOR_DEVELOPMENT, f'{path.name} imports {name}, which its users do not have'
        if top != PACKAGE.name or rest == ['__version__']: continue
        module = '.'.join(rest[:1])
        assert module in FLOOR, f'{dotted(path)} imports {name}: name the module it comes from'
        assert FLOOR[module] < FLOOR[dotted(path)], (
            f'{dotted(path)} (floor {FLOOR[dotted(path)]}) imports {module} (floor {FLOOR[module]})')


def test_lines_are_at_most_120_wide(committed):
    "Of the modules and of the pages' code; tests, tools and benchmarks may have 140. Not what nbdev lists."
    code = {f: text.splitlines() for f, text in committed.items() if f.endswith('.py') and not f.endswith('_modidx.py')}
    for page in PAGES:
        cells = json.loads(page.read_text(encoding='utf-8'))['cells']
        code[page.name] = ''.join(''.join(c['source']) + '\n' for c in cells if c['cell_type'] == 'code').splitlines()
    wide = []
    for f, lines in code.items():
        limit = 140 if f.startswith(('tests/', 'tools/', 'benchmarks/')) else 120
        wide += [f'{f}: {line}' for line in lines if len(line) > limit and not line.startswith('__all__')]
    assert not wide


def unused(code):
    "Names that Python code imports and does not use."
    nodes = list(ast.walk(ast.parse(code)))
    named = {(a.asname or a.name).split('.')[0] for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)
             for a in node.names}
    return named - {node.id for node in nodes if isinstance(node, ast.Name)} - {'*'}


def test_every_import_is_used(committed):
    "Of the modules by themselves, of pages as a whole, of tests, tools and benchmarks; not of the package's face."
    assert unused('import json, os.path as path\nfrom ast import *\nfrom re import sub\nsub(json)') == {'path'}
    code = {f: text for f, text in committed.items() if f.endswith('.py') and not f.endswith('__init__.py')}
    for page in PAGES:
        cells = json.loads(page.read_text(encoding='utf-8'))['cells']
        lines = ''.join(''.join(c['source']) + '\n' for c in cells if c['cell_type'] == 'code').splitlines()
        code[page.name] = '\n'.join(re.sub(r'^(\s*)[%!].*', r'\1pass', line) for line in lines)
    assert not {f: names for f, text in code.items() if (names := unused(text))}


def test_no_path_of_a_machine(committed):
    # in two pieces, so that this file is not its own finding
    folders = '|'.join(['wo' 'rk', 'fa' 'rm', 'ro' 'ot', 'home/' r'[a-z]\w*', 'Us' r'ers/\w+'])
    found = {f: m[0] for f, text in committed.items() if (m := re.search(rf'(?<![\w.])/(?:{folders})/\S*', text))}
    assert not found


def test_no_address_of_a_registry(committed):
    hosts = ['py' 'pi.org', 'python' 'hosted.org', 'npm' 'js.org', 'debian' '.org', '/opt/' 'py' 'pi']
    found = {f: h for f, text in committed.items() for h in hosts if h in text}
    assert not found


def test_the_public_address_stands_in_settings_alone(committed, cfg):
    address = re.compile(rf'github(?:\.com)?/{re.escape(cfg["user"])}/|{re.escape(cfg["user"])}\.github\.io')
    written = {f for f, text in committed.items() if address.search(text)}
    derived = {'README.md', 'annotated_transformer/_modidx.py', 'CITATION.cff'} # a test compares the last one
    assert {f for f in written - derived if not f.startswith('nbs/')} == set()
    for f in written:
        for owner_repo in re.findall(rf'github(?:\.com)?/({re.escape(cfg["user"])}/[\w-]+)', committed[f]):
            assert owner_repo == f'{cfg["user"]}/{cfg["repo"]}', f


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.stem)
def test_badge(page, cfg):
    cells = json.loads(page.read_text(encoding='utf-8'))['cells']
    first = next(''.join(c['source']) for c in cells if c['cell_type'] == 'markdown').splitlines()[0]
    where = f'{cfg["user"]}/{cfg["repo"]}/blob/{cfg["branch"]}/nbs/{page.name}'
    assert first.endswith(f'(https://colab.research.google.com/github/{where})'), 'run `make masthead`'


def test_front_page_is_of_today(cfg):
    "It gives the address of settings.ini, and leads to a list of every page."
    text = (ROOT/'README.md').read_text(encoding='utf-8')
    assert f'git clone {cfg["git_url"]} ' in text, 'run `make readme`'
    assert f'Python {cfg["min_python"]} ' in text
    assert '](nbs/README.md)' in text
    listed = (ROOT/'nbs/README.md').read_text(encoding='utf-8')
    for page in PAGES:
        if page.stem == 'index': continue
        cells = json.loads(page.read_text(encoding='utf-8'))['cells']
        title = re.search(r'^# (.+)', '\n'.join(''.join(c['source']) for c in cells
                                               if c['cell_type'] == 'markdown'), re.M)
        assert f'[{page.stem[:2]} {title[1]}]({page.name})' in listed, 'run `make readme`'
