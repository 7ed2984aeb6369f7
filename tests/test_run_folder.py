"A run's folder: one process at a time, and no other settings or data than it began with."
import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from annotated_transformer.corpora import CorpusConfig
from annotated_transformer.distributed import Processes
from annotated_transformer.hub import CARD_END
from annotated_transformer.recipe import RunConfig
from annotated_transformer.run_folder import (
    LOCK, check_model_folder, claim_folder, data_files, differences, is_finished, lock_folder, settings_dict,
    starts_over, stored_settings)
from annotated_transformer.trainer import TrainConfig
from annotated_transformer.transformer import TransformerConfig


@pytest.fixture
def table(tmp_path):
    path = tmp_path / 'pairs.tsv'
    path.write_text('a dog\tein Hund\n' * 50)
    return path


def make_run(table, **changes):
    model = TransformerConfig(vocab_size=60, n_layers=1, d_model=16, d_ff=24, n_heads=2)
    return RunConfig(CorpusConfig('tsv', tsv=table), model, TrainConfig(**changes))


def test_limits_may_change_and_nothing_else(table, tmp_path):
    out = tmp_path / 'run'
    claim_folder(out, make_run(table))
    claim_folder(out, make_run(table, max_steps=7, max_epochs=2, max_minutes=1.5))
    assert stored_settings(out / 'run.json')['training']['max_steps'] == 7
    with pytest.raises(ValueError, match=r'training.seed was 1 and is now 2'):
        claim_folder(out, make_run(table, seed=2))
    with pytest.raises(ValueError, match=r'corpus.held_out was 1000 and is now 9'):
        claim_folder(out, replace(make_run(table), corpus=CorpusConfig('tsv', tsv=table, held_out=9)))
    claim_folder(out, make_run(table, seed=2), overwrite=True)
    assert stored_settings(out / 'run.json')['training']['seed'] == 2


def test_a_torchrun_job_does_not_overwrite_its_own_run(table, tmp_path, monkeypatch, capsys):
    "A new number of processes starts them again, and does not count as a restart."
    out = tmp_path / 'run'
    monkeypatch.delenv('TORCHELASTIC_RUN_ID', raising=False)
    assert starts_over(out, True, Processes()) and not starts_over(out, False, Processes())
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'first')
    assert starts_over(out, True, Processes())
    claim_folder(out, make_run(table), True, Processes().job)
    assert stored_settings(out / 'run.json') == settings_dict(make_run(table))
    assert not starts_over(out, True, Processes())
    assert 'use another --rdzv-id than first' in capsys.readouterr().err
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'second')
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '1') # the first attempt died before it had claimed the folder
    assert starts_over(out, True, Processes())
    (out / 'run.json').write_text('{')
    assert starts_over(out, True, Processes())
    monkeypatch.delenv('TORCHELASTIC_RUN_ID')
    assert not starts_over(out, True, Processes()) # a job without an id, restarted


def test_hashes_are_recorded(table, tmp_path):
    claim_folder(tmp_path / 'run', make_run(table))
    stored = json.loads((tmp_path / 'run' / 'run.json').read_text())
    assert stored['data']['tsv'].keys() == {'path', 'size', 'sha256'}
    assert stored['data']['tsv']['size'] == table.stat().st_size
    assert stored_settings(tmp_path / 'run' / 'run.json') == settings_dict(make_run(table))


def test_data_may_move(table, tmp_path):
    out = tmp_path / 'run'
    claim_folder(out, make_run(table))
    moved = table.rename(tmp_path / 'elsewhere.tsv')
    claim_folder(out, make_run(moved))
    assert stored_settings(out / 'run.json')['corpus']['tsv'] == str(moved)


# point 3 of the trial of 0.1.0
@pytest.mark.parametrize('old, new', [('', 'a cat\teine Katze\n'), ('dog', 'cat')])
def test_changed_data_is_refused_by_name(table, tmp_path, old, new):
    "Appended data, and data of the same size."
    out = tmp_path / 'run'
    claim_folder(out, make_run(table))
    text = table.read_text()
    table.write_text(text.replace(old, new) if old else text + new)
    with pytest.raises(ValueError, match=r'pairs.tsv has changed \(.*--start-from'):
        claim_folder(out, make_run(table))
    claim_folder(out, make_run(table), overwrite=True)


def test_one_file_more_is_another_setting(table, tmp_path):
    out = tmp_path / 'run'
    claim_folder(out, make_run(table))
    with pytest.raises(ValueError, match='--val-tsv was not set and is now .given.'):
        claim_folder(out, replace(make_run(table), corpus=CorpusConfig('tsv', tsv=table, val_tsv=table)))


def test_of_a_folder_only_the_files_of_the_languages_count(tmp_path):
    for name in ('train.en', 'train.de.gz', 'train.fr', 'README.md'):
        (tmp_path / name).write_bytes(gzip.compress(b'x'))
    found = data_files(CorpusConfig('multi30k', pair='en-de', data_dir=tmp_path))
    assert found == {f'data_dir/{name}': tmp_path / name for name in ('train.de.gz', 'train.en')}


def test_a_new_file_in_a_data_folder_is_refused_by_name(tmp_path):
    "Beside train.en, a new train.en.gz would be read instead."
    data = tmp_path / 'data'
    data.mkdir()
    for name in ('train.en', 'train.de'):
        (data / name).write_text('x')
    config = replace(make_run('pairs.tsv'), corpus=CorpusConfig('multi30k', pair='en-de', data_dir=data))
    out = tmp_path / 'run'
    claim_folder(out, config)
    (data / 'notes.txt').write_text('mine')
    claim_folder(out, config)
    (data / 'train.en.gz').write_bytes(gzip.compress(b'x'))
    with pytest.raises(ValueError, match='train.en.gz is new.*--start-from'):
        claim_folder(out, config)
    (data / 'train.en.gz').unlink()
    claim_folder(out, config)


def test_a_run_without_a_record_of_its_data_resumes(table, tmp_path):
    "`run.json` of a version before the record."
    out = tmp_path / 'run'
    claim_folder(out, make_run(table))
    (out / 'run.json').write_text(json.dumps(settings_dict(make_run(table))))
    claim_folder(out, make_run(table))


# --- files of other models

def write_model(folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    for file in ('config.json', 'model.safetensors', 'tokenizer.json'):
        (folder / file).write_text(name)


def test_files_of_another_model_are_named(table, tmp_path):
    out = tmp_path / 'run'
    config = make_run(table)
    claim_folder(out, config)
    checkpoint = out / 'checkpoints' / 'step-00000010'
    write_model(checkpoint, 'own')
    claim_folder(out, config) # has not finished: the run has no model yet
    write_model(out, 'own')
    (out / 'training.json').write_text(json.dumps({'run': settings_dict(config)}))
    claim_folder(out, config)
    claim_folder(out, make_run(table, max_steps=9)) # another limit, the same run

    (out / 'tokenizer.json').write_text('other')
    with pytest.raises(ValueError, match=f'{out} holds files of another model, .*: tokenizer.json. .*{checkpoint}'):
        claim_folder(out, config)
    write_model(out, 'other')
    (out / 'training.json').write_text(json.dumps({'run': settings_dict(make_run(table, seed=2))}))
    with pytest.raises(ValueError, match='this run: config.json, tokenizer.json, training.json. To resume, delete'):
        claim_folder(out, config)
    (out / 'training.json').write_text('{}') # a model that was not trained here has no record of a run
    for call in (lambda: claim_folder(out, config), lambda: is_finished(out, config)):
        with pytest.raises(ValueError, match='training.json is damaged or belongs to another run .*: delete it to resume'):
            call()

    (out / 'training.json').unlink() # what the messages say
    for name in ('config.json', 'tokenizer.json'):
        (out / name).write_bytes((checkpoint / name).read_bytes())
    claim_folder(out, config)
    (out / 'tokenizer.json').write_text('other')
    claim_folder(out, config, overwrite=True)


def test_a_wrong_path_to_a_model_says_what_would_be_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / 'first', 'a')
    write_model(tmp_path / 'second', 'b')
    (tmp_path / 'pairs.tsv').write_text('a\tb\n')
    for name, message in [('frist', 'frist is not a model folder: it does not exist$'),
                          ('pairs.tsv', 'pairs.tsv is a file, not a model folder$'),
                          ('first/config.json', 'config.json is a file, not a model folder: use its folder, first$'),
                          ('.', 'it has no config.json, but it holds model folders: use second, or another of 2$')]:
        with pytest.raises(FileNotFoundError, match=message):
            check_model_folder(Path(name))
    check_model_folder(Path('first'))
    with pytest.raises(FileNotFoundError, match='first is not a model folder: it has no training.json$'):
        check_model_folder(Path('first'), ('config.json', 'training.json'))
    (tmp_path / 'run').mkdir()
    for i in (10, 20):
        write_model(tmp_path / f'run/checkpoints/step-000000{i}', 'c')
    with pytest.raises(FileNotFoundError, match='its newest checkpoint, run/checkpoints/step-00000020$'):
        check_model_folder(Path('run'))
    with pytest.raises(FileNotFoundError, match='use run/checkpoints/step-00000020, or another of 2$'):
        check_model_folder(Path('run/checkpoints'))


def test_a_finished_run_is_known_by_its_limits(table, tmp_path):
    assert not is_finished(tmp_path, make_run(table))
    (tmp_path / 'training.json').write_text(json.dumps({'run': settings_dict(make_run(table))}))
    assert is_finished(tmp_path, make_run(table))
    assert is_finished(tmp_path, make_run(table.rename(tmp_path / 'moved.tsv')))
    assert not is_finished(tmp_path, make_run(tmp_path / 'moved.tsv', max_steps=9))


@pytest.mark.parametrize('text', ['{', '[]', '{"training": {}}'])
def test_a_damaged_run_is_named(table, tmp_path, text):
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'run.json').write_text(text)
    with pytest.raises(ValueError, match='run.json is damaged'):
        claim_folder(tmp_path / 'run', make_run(table))


def test_other_folders_are_left_alone(table, tmp_path):
    (tmp_path / 'thesis').mkdir()
    (tmp_path / 'thesis' / 'chapter.tex').write_text('1')
    for overwrite in (False, True):
        with pytest.raises(ValueError, match='exists but holds no run'):
            claim_folder(tmp_path / 'thesis', make_run(table), overwrite)


def test_overwriting_removes_the_run_and_nothing_else(table, tmp_path):
    out = tmp_path / 'run'
    claim_folder(out, make_run(table))
    (out / 'checkpoints').mkdir()
    for name in ('samples.jsonl', 'notes.txt'):
        (out / name).write_text('')
    claim_folder(out, make_run(table), overwrite=True)
    assert {path.name for path in out.iterdir()} == {'run.json', 'notes.txt'}


def test_overwriting_keeps_a_model_card_that_was_edited(table, tmp_path):
    out = tmp_path / 'run'
    claim_folder(out, make_run(table))
    (out / 'README.md').write_bytes(b'# Mine \xe9')
    claim_folder(out, make_run(table, seed=2), overwrite=True)
    assert (out / 'README.md').read_bytes() == b'# Mine \xe9'
    (out / 'README.md').write_text(f'# Translation\n\n{CARD_END}\n')
    claim_folder(out, make_run(table), overwrite=True)
    assert {path.name for path in out.iterdir()} == {'run.json'}


def test_differences_are_nested():
    assert differences({'a': {'b': 1}, 'c': 2}, {'a': {'b': 2}, 'd': 3}) == [
        'a.b was 1 and is now 2', 'c was 2 and is now not set', 'd was not set and is now 3']


# --- the lock

# point 2 of the trial of 0.1.0
def test_two_at_a_time_are_refused(tmp_path):
    with lock_folder(tmp_path):
        with pytest.raises(ValueError, match=f'in use by process {os.getpid()} on '):
            with lock_folder(tmp_path):
                pass
    with lock_folder(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_which_nothing_was_written_is_removed(tmp_path):
    with pytest.raises(RuntimeError), lock_folder(tmp_path / 'a'):
        raise RuntimeError
    with lock_folder(tmp_path / 'b'):
        (tmp_path / 'b' / 'run.json').write_text('{}')
    assert {path.name for path in tmp_path.iterdir()} == {'b'}


HOLD = '''
import sys, time
from annotated_transformer.run_folder import lock_folder
with lock_folder(sys.argv[1]):
    print('locked', flush=True)
    time.sleep(60)
'''


def test_a_killed_process_leaves_no_lock(tmp_path):
    holder = subprocess.Popen([sys.executable, '-c', HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == 'locked\n'
        with pytest.raises(ValueError, match=f'in use by process {holder.pid} on '), lock_folder(tmp_path):
            pass
        holder.kill()
        holder.wait()
        assert (tmp_path / LOCK).exists()
        with lock_folder(tmp_path):
            pass
    finally:
        holder.kill()
        holder.stdout.close()
