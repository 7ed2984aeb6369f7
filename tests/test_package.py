"The package as its users get it: a wheel, in a fresh environment with its own torch, outside the checkout."
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
NOT_OURS = shutil.ignore_patterns('.git', '.venv', 'runs', 'build', 'dist', '*.egg-info', '__pycache__', '_proc')


def call(*command, **kwargs):
    "Run a command and return what it printed; its words are the failure's message."
    env = {k: v for k, v in os.environ.items() if k not in ('PYTHONPATH', 'PIP_CONSTRAINT', 'PIP_REQUIREMENT')}
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=env, **kwargs)
    assert done.returncode == 0, f'{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}'
    return done.stdout


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    "A wheel, built from a copy of the tree so that no build folder is left in it."
    folder = tmp_path_factory.mktemp('wheel')
    shutil.copytree(ROOT, folder/'tree', ignore=NOT_OURS)
    call(sys.executable, '-m', 'build', '--wheel', '--no-isolation', '--outdir', folder, folder/'tree')
    [path] = folder.glob('*.whl')
    return path


@pytest.fixture(scope='module')
def elsewhere(tmp_path_factory):
    "A folder for a fresh environment, away from the checkout; it is large, and goes when the tests are done."
    folder = tmp_path_factory.mktemp('elsewhere')
    yield folder
    shutil.rmtree(folder)


def with_requirements(name):
    "Names of a package and of all that it needs, as installed here."
    names = [name]
    for found in names:
        needed = [Requirement(line) for line in metadata.requires(found) or []]
        wanted = [r.name for r in needed if r.marker is None or r.marker.evaluate({'extra': ''})]
        names += [n for n in wanted if n not in names]
    return names


def link(source, target):
    "Link a file, or copy it to another drive; pip replaces files, and never writes into them."
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.fixture(scope='module')
def installed(wheel, elsewhere):
    "The interpreter of a fresh environment with torch, then the wheel; and its torch before and after the wheel."
    call(sys.executable, '-m', 'venv', '--without-pip', elsewhere/'venv')
    python = elsewhere/'venv'/('Scripts' if os.name == 'nt' else 'bin')/'python'
    def torch_there(): return json.loads(call(python, '-c', (
        'import json, os, importlib.metadata as m; d = m.distribution("torch");'
        'files = [str(d.locate_file(f)) for f in d.files if f.suffix in (".py", ".so")];'
        'print(json.dumps([d.version, '
        '{f: os.stat(f).st_mtime_ns for f in files if os.path.exists(f)}]))'), cwd=elsewhere))
    packages = Path(call(python, '-c', 'import sysconfig; print(sysconfig.get_path("purelib"))').strip())
    for name in with_requirements('torch'):
        for file in metadata.files(name):
            if '..' not in file.parts and file.locate().is_file():
                link(file.locate(), packages/file)
    before = torch_there()
    # Only torch is left without a pin: pip is free to take a newer one, and must not.
    pins = elsewhere/'without_torch.txt'
    pins.write_text(''.join(line for line in open(ROOT/'constraints.txt') if not line.startswith('torch==')))
    call(sys.executable, '-m', 'pip', '--python', python, 'install', '-q', '--no-compile', '-c', pins, wheel, cwd=elsewhere)
    return python, before, torch_there()


def test_metadata_asks_for_floors(wheel):
    "Any torch from 2.6 on is left alone: the wheel asks for no more, and pins nothing else either."
    with zipfile.ZipFile(wheel) as z:
        [name] = [n for n in z.namelist() if n.endswith('.dist-info/METADATA')]
        lines = z.read(name).decode().split('\n\n')[0].splitlines()
    wanted = [line.removeprefix('Requires-Dist: ') for line in lines if line.startswith('Requires-Dist: ')]
    runtime = [w for w in wanted if 'extra ==' not in w]
    assert [w for w in runtime if re.match(r'torch\b', w)] == ['torch>=2.6']
    assert all(re.fullmatch(r'[\w-]+>=[\d.]+', w) for w in runtime), runtime
    assert not any(re.match('nbdev|execnb|fastcore|ghapi|beartype', w) for w in runtime)
    assert {line for line in lines if line.startswith('Requires-Python')} == {'Requires-Python: >=3.10'}


# point 6 of the trial of 0.1.0
def test_wheel_holds_the_package_alone(wheel):
    with zipfile.ZipFile(wheel) as z:
        names = set(z.namelist())
    folders = {name.split('/')[0] for name in names}
    assert {folder for folder in folders if not folder.endswith('.dist-info')} == {'annotated_transformer'}
    assert 'annotated_transformer/py.typed' in names


@pytest.mark.slow
def test_torch_is_left_alone(installed):
    _, before, after = installed
    assert before[0] == metadata.version('torch') and len(before[1]) > 1000
    assert after == before


@pytest.mark.slow
def test_development_tools_are_not_there(installed, elsewhere):
    found = call(installed[0], '-c', (
        'from importlib.util import find_spec\n'
        'print([n for n in ("nbdev", "execnb", "fastcore", "beartype", "IPython", "pytest") if find_spec(n)])'),
        cwd=elsewhere)
    assert found.strip() == '[]'


@pytest.mark.slow
def test_every_module_imports_without_the_extras(installed, elsewhere):
    "All but those that draw: they need the extra `plot`."
    names = ['.'.join(p.relative_to(ROOT).with_suffix('').parts)
             for p in sorted((ROOT/'annotated_transformer').rglob('*.py'))
             if not p.stem.startswith('_') and p.stem not in ('plotting', 'drawing', 'diagrams', 'experiments')]
    where = call(installed[0], '-c', ';'.join(['import annotated_transformer', *(
        f'import {n}' for n in names), 'print(annotated_transformer.__file__)']), cwd=elsewhere)
    assert Path(where.strip()).is_relative_to(elsewhere)


@pytest.mark.slow
def test_a_small_real_use(installed, elsewhere):
    "A model that has learned nothing still encodes, decodes and stops."
    call(installed[0], '-c', '''
import torch
from annotated_transformer.inference import greedy
from annotated_transformer.transformer import Transformer, TransformerConfig
from annotated_transformer.vocabulary import BOS, EOS
torch.manual_seed(0)
config = TransformerConfig(vocab_size=23, n_layers=2, d_model=16, d_ff=32, n_heads=4)
model = Transformer(config).eval()
src = torch.tensor([[5, 6, 7, EOS], [8, 9, 10, EOS]])
assert model(src, torch.tensor([[BOS, 5, 6]]*2)).shape == (2, 3, 23)
assert len(greedy(model, src, max_extra_tokens=7)) == 2
''', cwd=elsewhere)


@pytest.mark.slow
def test_the_command_is_there(installed, elsewhere):
    command = shutil.which('annotated-transformer', path=str(installed[0].parent))
    said = call(command, '--help', cwd=elsewhere)
    assert all(name in said for name in ('train', 'translate', 'evaluate', 'demo'))


@pytest.mark.slow
def test_it_answers_right_after_installation(installed, elsewhere):
    "No training, no network, no folder: the toy model is in the wheel."
    command = shutil.which('annotated-transformer', path=str(installed[0].parent))
    assert (call(command, 'translate', 'the small dog sleeps because it is tired', cwd=elsewhere)
            == 'der kleine Hund schläft, weil er müde ist.\n')
