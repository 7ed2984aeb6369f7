"Model folders on the Hugging Face Hub: what is asked for, what is sent, and what happens without a network."
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from annotated_transformer.hub import download_folder, upload_folder

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
    (tmp_path / 'config.json').write_bytes(b'{}')
    assert upload_folder(tmp_path, 'me/model', private, 'New weights') == 'https://hub/me/model'
    assert hub.repos == {'me/model': private} and hub.files == {'config.json': b'{}'}


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
for call in (lambda: download_folder('me/model', ['config.json']), lambda: upload_folder(sys.argv[1], 'me/model'),
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
    done = subprocess.run([sys.executable, '-c', OFFLINE, str(tmp_path)], capture_output=True, text=True, env=env)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 3, done
    assert lines[0].startswith('me/model is not a folder here and could not be fetched from the Hugging Face Hub: ')
    assert lines[1].startswith('could not upload me/model to the Hugging Face Hub: ')
    assert lines[2].startswith('a name/with/too much is not a folder here')
