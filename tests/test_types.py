"A type checker accepts the code that people copy, and sees the types that the functions return."
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(not importlib.util.find_spec('basedpyright'), reason='needs basedpyright')

def copied_code(text):
    "The Python blocks of a text, which readers copy."
    return re.findall(r'^```(?:python|py)\n(.*?)^```', text, re.DOTALL | re.MULTILINE)

def readme_code():
    return '\n'.join(copied_code((ROOT/'README.md').read_text(encoding='utf-8')))

def guide_code():
    "All Python of the guide: its cells, without IPython's commands, and the blocks in its text."
    cells = []
    for cell in nbformat.read(ROOT/'nbs/34_your_own_data.ipynb', 4).cells:
        cells += [cell.source] if cell.cell_type == 'code' else copied_code(cell.source)
    lines = '\n'.join(cells).splitlines()
    return '\n'.join(re.sub(r'^(\s*)[%!].*', r'\1pass', line) for line in lines)

TYPES = '''
from collections.abc import Iterator
from typing_extensions import assert_type
from annotated_transformer.translator import ScoringModel, Translation, Translator

class Mine(Translator):
    pass

translator = Translator.load('runs/first', device='cpu')
assert_type(translator, Translator)
assert_type(Mine.load(), Mine)
assert_type(Mine.from_pretrained('name'), Mine)
assert_type(translator.translate('Hi.', beam_size=1), str)
assert_type(translator.translate(['Hi.'], prefix=['Da']), list[str])
assert_type(translator.translate(open('sentences.txt')), Iterator[str])
assert_type(translator.translate(('Hi.', b'You.')), list[str])
assert_type(translator.translate(open('sentences.txt', 'rb')), Iterator[str])
assert_type(translator.translate_n_best('Hi.', 4), list[Translation])
assert_type(translator.translate_n_best(['Hi.'], 4), list[list[Translation]])
assert_type(translator.sample('Hi.', temperature=0.5, seed=1, max_extra_tokens=9), str)
assert_type(translator.sample(['Hi.'] * 3), list[str])
assert_type(translator.score('Hi.', 'Hallo.', batch_tokens=64), float)
assert_type(translator.score(['Hi.'], ['Hallo.']), list[float])
'''

MISTAKES = ["translator.translate('Hi.', beam=4)", "translator.translate('Hi.', beam_size='4')",
            'translator.translate(None)', 'translator.translate([5])', 'translator.translate([None])',
            "translator.translate('Hi.').text", "translator.translate('Hi.', 'de')",
            "translator.sample('Hi.', 3)", "translator.sample('Hi.', n=3)", "Translator('runs/first')",
            "translator.save('mine', True)", "translator.score('Hi.', 'Hallo.', 64)"]
START = ['from annotated_transformer.translator import Translator', 'translator = Translator.load()']

@pytest.fixture(scope='module')
def errors(tmp_path_factory):
    "The errors that the type checker finds in each file, as (line, message). It runs once, since it reads PyTorch each time."
    folder = tmp_path_factory.mktemp('user')
    settings = {'typeCheckingMode': 'standard', 'extraPaths': [str(ROOT)], 'pythonVersion': '3.10'}
    (folder/'pyrightconfig.json').write_text(json.dumps(settings))
    files = {'readme': readme_code(), 'guide': guide_code(), 'signatures': TYPES, 'mistakes': '\n'.join(START + MISTAKES)}
    for name, code in files.items():
        (folder/f'{name}.py').write_text(code)
    command = [sys.executable, '-m', 'basedpyright', '--outputjson', '--pythonpath', sys.executable]
    done = subprocess.run([*command, *(f'{name}.py' for name in files)], cwd=folder, capture_output=True, text=True, timeout=300)
    report = json.loads(done.stdout)
    assert report['summary']['filesAnalyzed'] == len(files)
    found = {name: [] for name in files}
    for item in report['generalDiagnostics']:
        if item['severity'] == 'error':
            found[Path(item['file']).stem].append((item['range']['start']['line'] + 1, item['message']))
    return found

# point 6 of the trial of 0.1.0
@pytest.mark.parametrize('name, code', [('readme', readme_code), ('guide', guide_code)])
def test_the_code_that_people_copy(errors, name, code):
    assert 'Translator.load(' in code()
    assert "Translator.load('runs/first')" in guide_code() # which stands in its text
    assert errors[name] == []

def test_functions_return_what_the_checker_sees(errors):
    assert errors['signatures'] == []

def test_the_checker_finds_mistakes(errors):
    assert {line for line, _ in errors['mistakes']} == set(range(3, 3 + len(MISTAKES)))
