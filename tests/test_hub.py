"Model folders on the Hugging Face Hub: what is asked for, what is sent, and what happens without a network."
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from annotated_transformer.files import read_json
from annotated_transformer.hub import download_folder, upload_folder, write_model_card
from annotated_transformer.translator import SHIPPED, Translator

FILES = ('config.json', 'model.safetensors')


class FakeHub:
    "Records what it is told."
    def __init__(self):
        self.repos = {}
        self.files = {}

    def create_repo(self, repo_id, private, exist_ok):
        assert exist_ok
        self.repos[repo_id] = private
        return f'https://hub/{repo_id}'

    def upload_folder(self, repo_id, folder_path, commit_message):
        assert repo_id in self.repos and commit_message == 'New weights'
        self.files = {p.name: p.read_bytes() for p in Path(folder_path).iterdir()}


@pytest.mark.parametrize('private', [True, False])
def test_upload(tmp_path, monkeypatch, private):
    hub = FakeHub()
    monkeypatch.setattr('huggingface_hub.HfApi', lambda: hub)
    for path in SHIPPED.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / 'run.json').write_text('{"corpus": {"tsv": "secret/pairs.tsv"}}')
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert upload_folder(tmp_path, 'me/model', private, 'New weights') == 'https://hub/me/model'
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert hub.repos == {'me/model': private}
    assert set(hub.files) == {'config.json', 'model.safetensors', 'tokenizer.json', 'training.json', 'README.md'}
    assert b"Translator.from_pretrained('me/model')" in hub.files['README.md']
    assert (b'hf download me/model --local-dir model\n'
            b'annotated-transformer translate --model model "A sentence."') in hub.files['README.md']

    assert b'train --config model/training.json' in hub.files['README.md']

    (tmp_path / 'mine.md').write_text('# My model')
    Translator.load().push_to_hub('me/model', private, 'New weights', card=tmp_path / 'mine.md')
    assert hub.files['README.md'] == b'# My model'
    (tmp_path / 'README.md').write_text('# Also mine')
    upload_folder(tmp_path, 'me/model', private, 'New weights')
    assert hub.files['README.md'] == b'# Also mine'


@pytest.mark.parametrize('name', ['', 'a/b/c', './model', '/abs/model', 'owner/', 'C:\\models', 'a model'])
def test_what_is_no_name_on_the_hub(tmp_path, name):
    for call in (lambda: download_folder(name, FILES), lambda: upload_folder(tmp_path, name)):
        with pytest.raises(FileNotFoundError, match='not a name on the Hugging Face Hub, which has the form owner/name'):
            call()


def test_download(tmp_path, monkeypatch):
    requests = []
    def snapshot_download(repo_id, revision, allow_patterns):
        requests.append((repo_id, revision, allow_patterns))
        return str(tmp_path)
    monkeypatch.setattr('huggingface_hub.snapshot_download', snapshot_download)
    with pytest.raises(FileNotFoundError, match='me/model on the Hugging Face Hub has no config.json'):
        download_folder('me/model', FILES)
    (tmp_path / 'config.json').write_bytes(b'{}')
    assert download_folder('me/model', FILES, revision='v1') == tmp_path
    assert requests == [('me/model', None, list(FILES)), ('me/model', 'v1', list(FILES))]


def test_a_card_says_what_its_files_say(tmp_path):
    translator = Translator.load()
    translator.training['data'] = {'tsv': {'path': 'secret/pairs.tsv', 'size': 12345, 'sha256': 'ab' * 32}}
    translator.save(tmp_path / 'mine')
    card = (tmp_path / 'mine/README.md').read_text()
    assert card.startswith('---\nlanguage:\n- en\n- de\n')
    assert '| tsv | pairs.tsv, 12,345 bytes, SHA-256 `abababababababab…` |' in card
    assert 'secret' not in card
    training = read_json(SHIPPED / 'training.json')
    n_parameters = sum(p.numel() for p in translator.model.parameters())
    for fact in ("Translator.load('mine')", 'train --config mine/training.json',
                 f'{n_parameters:,} parameters', training['val']['signature'], f'{training["test"]["chrf"]:.2f}',
                 '| n_heads | 4 |', '| seed | 1 |'):
        assert fact in card


def test_a_card_of_an_unknown_model(tmp_path):
    translator = Translator.load()
    translator.training = {}
    translator.save(tmp_path)
    card = (tmp_path / 'README.md').read_text()
    assert 'This model has not been scored' in card and 'language:' not in card and 'from en' not in card


def test_a_card_that_was_changed_is_kept(tmp_path):
    translator = Translator.load()
    translator.save(tmp_path)
    path = tmp_path / 'README.md'
    original = path.read_text()
    path.write_text(original.replace('# Translation', '# Great translation'))
    translator.save(tmp_path, overwrite=True)
    assert path.read_text() == original
    path.write_text('# My model')
    write_model_card(tmp_path)
    assert path.read_text() == '# My model'


def test_the_library_has_the_functions_and_arguments_that_the_fakes_have():
    from huggingface_hub import HfApi, snapshot_download
    for function, names in [(HfApi.create_repo, 'repo_id private exist_ok'),
                            (HfApi.upload_folder, 'repo_id folder_path commit_message'),
                            (snapshot_download, 'repo_id revision allow_patterns')]:
        assert set(names.split()) <= set(inspect.signature(function).parameters)


def test_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
    for call in (lambda: download_folder('me/model', FILES), lambda: upload_folder(tmp_path, 'me/model')):
        with pytest.raises(ImportError, match=r"pip install 'annotated_transformer\[hub\]'"):
            call()


OFFLINE = '''
import sys, time
from annotated_transformer.hub import download_folder, upload_folder
start = time.monotonic()
for call in (lambda: download_folder('me/model', ['config.json']), lambda: upload_folder(sys.argv[1], 'me/model', card=sys.argv[2]),
             lambda: download_folder('a name/with/too much', ['config.json'])):
    try:
        call()
    except OSError as error:
        print(error)
assert time.monotonic() - start < 60
'''


@pytest.mark.parametrize('settings', [
    {'HF_HUB_OFFLINE': '1'}, {'HF_ENDPOINT': 'http://127.0.0.1:9', 'HF_TOKEN': 'x'}], ids=['offline', 'closed port'])
def test_without_a_network_there_is_one_clear_line(tmp_path, settings):
    env = os.environ | {'HF_HOME': str(tmp_path / 'home'), 'HF_HUB_OFFLINE': '0'} | settings
    (tmp_path / 'README.md').write_text('# My model')
    command = [sys.executable, '-c', OFFLINE, str(tmp_path), str(tmp_path / 'README.md')]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 3, done
    assert lines[0].startswith('me/model is not a folder here and could not be fetched from the Hugging Face Hub: ')
    assert lines[1].startswith('could not upload me/model to the Hugging Face Hub: ')
    assert lines[2].startswith('a name/with/too much is not a folder here')
