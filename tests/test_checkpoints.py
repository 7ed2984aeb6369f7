"Checkpoints when things go wrong: killed at any moment, no space left, damaged files, malicious files."
import copy
import errno
import importlib
import io
import json
import os
import pickle
import random
import runpy
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from annotated_transformer import checkpoints
from annotated_transformer.checkpoints import (
    KINDS, Progress, append_log, average_checkpoints, best_steps, build_model, config_from_json, keep_checkpoints,
    latest_checkpoint, list_checkpoints, load_checkpoint, load_model, load_state, read_log, save_checkpoint,
    save_model, training_record, truncate_log, verify_checkpoint, write_manifest)
from annotated_transformer.files import atomic_write, read_json, to_json
from annotated_transformer.transformer import Transformer, TransformerConfig
from annotated_transformer.vocabulary import load_tokenizer, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / 'annotated_transformer/data/toy-ende'
CONFIG = TransformerConfig(20, n_layers=1, d_model=8, d_ff=16, n_heads=2, max_len=16)
FILES = ['config.json', 'model.safetensors', 'state.pt', 'progress.json', 'manifest.json']
needs_posix = pytest.mark.skipif(os.name == 'nt', reason='Windows has other rules')


def trained(seed=0, config=CONFIG):
    "A model, its optimizer after two steps, and a moving average; none of them zero."
    torch.manual_seed(seed)
    model = Transformer(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ema = AveragedModel(model)
    for _ in range(2):
        sum((p * torch.randn_like(p)).sum() for p in model.parameters()).backward()
        optimizer.step()
        ema.update_parameters(model)
    return model, optimizer, ema


def save(out, step, seed=0, **progress):
    model, optimizer, ema = trained(seed)
    return save_checkpoint(out, model, optimizer, Progress(step, **progress), ema=ema)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob('*')) if p.is_file()}


def names(out):
    return sorted(p.name for p in (out / 'checkpoints').iterdir())


# --- kinds and model folders

def test_config_json_names_the_kind(tmp_path):
    model = Transformer(CONFIG)
    save_model(model, tmp_path)
    fields = read_json(tmp_path / 'config.json')
    assert list(fields)[0] == 'kind' and fields['kind'] == 'transformer' and fields['d_ff'] == 16
    assert config_from_json(fields) == CONFIG
    reloaded = load_model(tmp_path)
    assert torch.equal(flat(reloaded), flat(model)) and not reloaded.training
    assert reloaded.lm_head.weight is reloaded.src_embed.weight is reloaded.tgt_embed.weight


@pytest.mark.parametrize('changes', [dict(tied=False), dict(norm='pre'), dict(positions='learned'),
                                     dict(positions='none'), dict(d_k=3, d_v=5)])
def test_every_switch_of_the_reference_comes_back(tmp_path, changes):
    config = TransformerConfig(**(vars(CONFIG) | changes))
    model = Transformer(config)
    save_model(model, tmp_path)
    reloaded = load_model(tmp_path)
    assert reloaded.config == config and torch.equal(flat(reloaded), flat(model))


def test_an_unknown_kind_names_the_known_ones(tmp_path):
    save_model(Transformer(CONFIG), tmp_path)
    fields = read_json(tmp_path / 'config.json')
    atomic_write(tmp_path / 'config.json', to_json(fields | {'kind': 'convolutional'}))
    with pytest.raises(ValueError, match=r"config.json cannot be used: kind='convolutional' is unknown: "
                                         'known are transformer, relative, recurrent, pruned, marian'):
        load_model(tmp_path)

    @dataclass
    class Unregistered:
        n_layers: int = 1
    with pytest.raises(ValueError, match='Unregistered is not the config of a known kind: known are transformer'):
        build_model(Unregistered())


def test_a_kind_is_added_by_one_line(tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class LinearConfig:
        width: int = 3

    class Linear(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config
            self.layer = nn.Linear(config.width, config.width)
    module = sys.modules[__name__]
    monkeypatch.setattr(module, 'LinearConfig', LinearConfig, raising=False)
    monkeypatch.setattr(module, 'Linear', Linear, raising=False)
    monkeypatch.setitem(KINDS, 'linear', (__name__, 'LinearConfig', 'Linear'))
    model = Linear(LinearConfig(4))
    save_model(model, tmp_path)
    assert read_json(tmp_path / 'config.json') == {'kind': 'linear', 'width': 4}
    assert torch.equal(load_model(tmp_path).layer.weight, model.layer.weight)


@pytest.mark.parametrize('kind', list(KINDS))
def test_registered_classes_exist(kind):
    module = importlib.util.find_spec(KINDS[kind][0], 'annotated_transformer')
    if module is None:
        pytest.skip(f'{KINDS[kind][0]} is not written yet')
    config_class, model_class = checkpoints.kind_classes(kind)
    assert (config_class.__name__, model_class.__name__) == KINDS[kind][1:]


def test_other_kinds_are_imported_only_when_used():
    program = ('import sys, annotated_transformer.checkpoints; '
               'print(*[m for m in ("recurrent", "heads", "marian", "relative_positions") '
               'if "annotated_transformer." + m in sys.modules])')
    assert subprocess.run([sys.executable, '-c', program], capture_output=True, text=True,
                          check=True).stdout.strip() == ''


def test_a_model_folder_that_does_not_fit(tmp_path):
    with pytest.raises(FileNotFoundError, match='is not a model folder: it has no config.json'):
        load_model(tmp_path)
    save_model(Transformer(CONFIG), tmp_path)
    fields = read_json(tmp_path / 'config.json')
    for changes, said in [({'d_ff': 32}, r'does not fit its config.json in 6 tensors: \S+ is \(16,\), expected'),
                          ({'tied': False}, r'lm_head.weight is missing, expected \(20, 8\)'),
                          ({'n_heads': 3}, 'd_model=8 is not divisible by n_heads=3'),
                          ({'d_fff': 3}, "config.json cannot be used.*'d_fff'")]:
        atomic_write(tmp_path / 'config.json', to_json(fields | changes))
        with pytest.raises(ValueError, match=said):
            load_model(tmp_path)
    atomic_write(tmp_path / 'config.json', to_json(fields))
    (tmp_path / 'model.safetensors').unlink()
    with pytest.raises(FileNotFoundError, match='it has no model.safetensors'):
        load_model(tmp_path)


# --- models of version 0.1.0

def convert_in_this_process(*args):
    "Run the script as `python` does, without a new process; return its exit status or message."
    script = str(ROOT / 'tools/convert_v1.py')
    with patch.object(sys, 'argv', [script, *map(str, args)]):
        try:
            runpy.run_path(script, run_name='__main__')
        except SystemExit as ended:
            return ended.code


@pytest.fixture
def old(tmp_path):
    "A model folder as version 0.1.0 wrote it, small; its config.json can be changed before converting."
    new = tmp_path / 'made'
    torch.manual_seed(0)
    save_model(Transformer(CONFIG), new)
    folder = tmp_path / 'old'
    folder.mkdir()
    renamed = {}
    for name, tensor in safetensors.torch.load_file(new / 'model.safetensors').items():
        for now, before in [('q_proj', 'query'), ('k_proj', 'key'), ('v_proj', 'value'), ('out_proj', 'output'),
                            ('linear1', 'inner'), ('linear2', 'outer'), ('residual1', 'add_norms.0'),
                            ('residual2', 'add_norms.1'), ('residual3', 'add_norms.2')]:
            name = name.replace(now, before)
        renamed[name] = tensor
    safetensors.torch.save_file(renamed, folder / 'model.safetensors')
    fields = read_json(new / 'config.json') | {'init': 'scaled', 'activation': 'relu', 'output_bias': False,
                                               'kept_heads': None}
    del fields['kind']
    (folder / 'config.json').write_text(json.dumps(fields))
    training = dict(max_tokens=1024, warmup=400, peak_rate=0.004, clip_norm=1.0, average=5, accumulate=1, ema=0.0,
                    fused=True)
    decoding = dict(beam_size=4, alpha=0.6, length_offset=5.0, max_extra=50, min_len=0, no_repeat_ngram=0, n_best=1,
                    patience=0.0)
    (folder / 'training.json').write_text(json.dumps(dict(
        run=dict(corpus=dict(corpus='copy'), model=fields, training=training), decoding=decoding,
        progress=dict(step=3, loss=1.5, counted=2), versions=dict(annotated_transformer='0.1.0'))))
    return folder


def test_an_old_folder_is_refused_and_can_be_converted(old, tmp_path):
    with pytest.raises(ValueError, match='written by version 0.1.0: convert the folder with '
                                         '`python tools/convert_v1.py OLD NEW`'):
        load_model(old)
    before = content(old)
    new = tmp_path / 'new'
    done = subprocess.run([sys.executable, ROOT / 'tools/convert_v1.py', old, new], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert torch.equal(flat(load_model(new)), flat(load_model(tmp_path / 'made')))
    assert content(old) == before
    record = read_json(new / 'training.json')
    assert record['converted_from']['version'] == record['versions']['annotated_transformer'] == '0.1.0'
    assert record['run']['training'] == dict(max_tokens=1024, warmup_steps=400, peak_lr=0.004, max_grad_norm=1.0,
                                             average_checkpoints=5, gradient_accumulation_steps=1, ema_decay=0.0,
                                             init='scaled')
    assert record['decoding'] == dict(beam_size=4, length_penalty=0.6, length_penalty_offset=5.0,
                                      max_extra_tokens=50, min_length=0, no_repeat_ngram_size=0, n_best=1,
                                      patience=None)
    assert Progress(**record['progress']) == Progress(3, loss_sum=1.5, loss_tokens=2)
    assert 'new exists: choose another folder' in convert_in_this_process(old, new)


@pytest.mark.parametrize('changes, said', [
    ({'kind': 'recurrent'}, "kind 'recurrent' cannot be converted: train this model again"),
    ({'kept_heads': {'encoder.layers.0.self_attention': [1]}}, 'pruned heads cannot be converted'),
    ({'activation': 'gelu'}, 'Marian models cannot be converted: import this model again'),
    ({'output_bias': True}, 'Marian models cannot be converted: import this model again'),
    ({'d_ff': 32}, 'does not fit its config.json')])
def test_models_that_cannot_be_converted(old, tmp_path, changes, said):
    fields = json.loads((old / 'config.json').read_text()) | changes
    (old / 'config.json').write_text(json.dumps(fields))
    assert said in convert_in_this_process(old, tmp_path / 'new')
    assert not list(tmp_path.glob('new*'))


@pytest.mark.parametrize('positions', ['rotary', 'alibi'])
def test_relative_positions_become_a_kind(positions):
    sys.path.insert(0, str(ROOT / 'tools'))
    try:
        from convert_v1 import convert_config
    finally:
        sys.path.remove(str(ROOT / 'tools'))
    old = vars(CONFIG) | dict(positions=positions, init='glorot', activation='relu', output_bias=False,
                              kept_heads=None)
    new = convert_config(old)
    assert new['kind'] == 'relative' and new['positions'] == positions and 'init' not in new


def test_the_shipped_model_tells_where_it_comes_from():
    assert len(load_tokenizer(SHIPPED / 'tokenizer.json')) == load_model(SHIPPED).config.vocab_size == 1000
    record = read_json(SHIPPED / 'training.json')
    assert record['run']['training']['peak_lr'] == 0.004 and record['test']['bleu'] > 95
    assert record['converted_from']['version'] == record['versions']['annotated_transformer']


# --- what comes back

def test_everything_comes_back(tmp_path):
    model, optimizer, ema = trained(seed=1)
    progress = Progress(7, 1, 2, 3, 0.5)
    folder = save_checkpoint(tmp_path, model, optimizer, progress, ema=ema)
    copy, copy_optimizer, copy_ema = trained(seed=2)
    assert load_checkpoint(folder, copy, copy_optimizer, copy_ema) == progress
    assert torch.equal(flat(model), flat(copy)) and torch.equal(flat(ema), flat(copy_ema))
    assert copy.lm_head.weight is copy.src_embed.weight
    again = save_checkpoint(tmp_path / 'again', copy, copy_optimizer, progress, ema=copy_ema)
    assert content(folder) == content(again) # the files are a function of what they hold


def test_a_damaged_checkpoint_changes_nothing(tmp_path):
    folder = save(tmp_path, 1, seed=1)
    (folder / 'progress.json').write_text('{}')
    model, optimizer, ema = trained(seed=2)
    before = flat(model), flat(ema), str(optimizer.state_dict())
    with pytest.raises(ValueError, match='progress.json'):
        load_checkpoint(folder, model, optimizer, ema)
    assert torch.equal(flat(model), before[0]) and torch.equal(flat(ema), before[1])
    assert str(optimizer.state_dict()) == before[2]


def test_an_optimizer_with_other_groups_changes_nothing(tmp_path):
    folder = save(tmp_path, 1, seed=1)
    model, _, ema = trained(seed=2)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam([{'params': parameters[:3]}, {'params': parameters[3:]}])
    before = flat(model), flat(ema), str(optimizer.state_dict())
    with pytest.raises(ValueError, match='state.pt does not fit the optimizer'):
        load_checkpoint(folder, model, optimizer, ema)
    assert torch.equal(flat(model), before[0]) and torch.equal(flat(ema), before[1])
    assert str(optimizer.state_dict()) == before[2]


def test_a_state_without_moving_average(tmp_path):
    model, optimizer, ema = trained()
    folder = save_checkpoint(tmp_path, model, optimizer, Progress(1))
    with pytest.raises(ValueError, match='state.pt holds no moving average'):
        load_checkpoint(folder, model, optimizer, ema)
    assert load_checkpoint(save(tmp_path, 2), model, optimizer).step == 2 # a stored average that is not requested is ignored


def test_another_moving_average_changes_nothing(tmp_path):
    folder = save(tmp_path, 1)
    model, optimizer, _ = trained(seed=1)
    weights = flat(model).clone()
    state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match='state.pt does not fit the moving average of the weights'):
        load_checkpoint(folder, model, optimizer, AveragedModel(nn.Linear(2, 3)))
    assert torch.equal(flat(model), weights)
    for number, values in optimizer.state_dict()['state'].items():
        assert all(torch.equal(values[name], state['state'][number][name]) for name in values)


# --- killed

class Snapshots:
    "Copy a folder before every operation on a file, and once more with each file being written cut in half."
    OPERATIONS = {'open', 'os.rename', 'os.remove', 'os.rmdir', 'os.mkdir', 'os.truncate'}

    def __init__(self):
        self.on = False

    def __call__(self, event, args):
        if not self.on or event not in self.OPERATIONS:
            return
        self.on = False # copying opens files, too
        self.take(event)
        for file in self.folder.rglob('.*.tmp'):
            half = self.take(f'{event}, half a file') / file.relative_to(self.folder)
            half.write_bytes(half.read_bytes()[:half.stat().st_size // 2])
        self.on = True

    def take(self, event):
        snapshot = self.album / f'{len(self.taken):04d}'
        shutil.copytree(self.folder, snapshot)
        self.taken.append((event, snapshot))
        return snapshot

    def of(self, folder, album, function):
        self.folder, self.album, self.taken, self.on = folder, album, [], True
        try:
            function()
        finally:
            self.on = False
        return self.taken


SNAPSHOTS = Snapshots()
sys.addaudithook(SNAPSHOTS)


def test_killed_at_any_moment_of_a_save(tmp_path):
    run = tmp_path / 'run'
    save(run, 10, tokens=1)
    model, optimizer, ema = trained(seed=1)

    def two_saves():
        save_checkpoint(run, model, optimizer, Progress(20, tokens=2), ema=ema)
        save_checkpoint(run, model, optimizer, Progress(20, tokens=3), ema=ema)
    snapshots = SNAPSHOTS.of(run, tmp_path / 'album', two_saves)
    assert any((snapshot / 'checkpoints/step-00000020.partial/manifest.json').exists() for _, snapshot in snapshots)
    found = []
    for _, snapshot in snapshots:
        progress = load_checkpoint(latest_checkpoint(snapshot), model, optimizer, ema)
        found.append((progress.step, progress.tokens))
        keep_checkpoints(snapshot, last=5)
        assert not [name for name in names(snapshot) if '.' in name] # nothing unfinished is left
        assert latest_checkpoint(snapshot).name == progress.name
    assert found == sorted(found) and set(found) == {(10, 1), (20, 2), (20, 3)}
    assert sum('half a file' in event for event, _ in snapshots) >= 8


def test_killed_between_the_two_renames(tmp_path):
    folder = save(tmp_path, 10)
    before = content(folder)
    old = folder.with_name(folder.name + '.old')
    folder.rename(old)
    assert list_checkpoints(tmp_path) == []
    assert latest_checkpoint(tmp_path) == folder and content(folder) == before
    shutil.copytree(folder, old) # killed after the second rename
    assert latest_checkpoint(tmp_path) == folder
    keep_checkpoints(tmp_path, 1)
    assert names(tmp_path) == [folder.name]


def test_killed_at_any_moment_of_a_removal(tmp_path):
    run = tmp_path / 'run'
    for step in range(1, 6):
        save(run, step)
    (run / 'checkpoints/step-00000006.partial').mkdir()
    snapshots = SNAPSHOTS.of(run, tmp_path / 'album', lambda: keep_checkpoints(run, 2, [2]))
    assert len(snapshots) > 10
    for _, snapshot in snapshots:
        for folder in list_checkpoints(snapshot):
            verify_checkpoint(folder) # none is half removed
        assert latest_checkpoint(snapshot).name == 'step-00000005'
        keep_checkpoints(snapshot, 2, [2])
        assert names(snapshot) == names(run) == ['step-00000002', 'step-00000004', 'step-00000005']


def test_only_our_own_files_are_removed(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    foreign = ['notes.txt', '.hidden.tmp', '.sixteen-letters.tmp', 'checkpoints/step-best', 'checkpoints/README']
    for name in foreign:
        (tmp_path / name).touch()
    unfinished = tmp_path / f'.{"0" * 16}.tmp'
    unfinished.touch()
    keep_checkpoints(tmp_path, 1)
    assert not unfinished.exists() and all((tmp_path / name).exists() for name in foreign)
    assert [p.name for p in list_checkpoints(tmp_path)] == ['step-00000003']
    with pytest.raises(ValueError, match='last=0 must be at least 1'):
        keep_checkpoints(tmp_path, 0)


@pytest.mark.skipif(not Path('/proc/self/fd').exists(), reason='no /proc to look up what a descriptor is of')
def test_everything_is_on_the_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor):
        done.append(('sync', os.readlink(f'/proc/self/fd/{descriptor}')))
        fsync(descriptor)

    def noted_replace(old, new):
        done.append(('name', str(new)))
        replace(old, new)
    monkeypatch.setattr(os, 'fsync', noted_fsync)
    monkeypatch.setattr(os, 'replace', noted_replace)
    folder = save(tmp_path, 10)
    partial = f'{folder}.partial'
    named = done.index(('name', str(folder)))
    for name in content(folder):
        at = done.index(('name', f'{partial}/{name}'))
        assert done[at - 1][0] == 'sync' and done[at - 1][1].endswith('.tmp') and at < named
    manifest = done.index(('name', f'{partial}/manifest.json'))
    assert manifest == max(i for i in range(named) if done[i][0] == 'name') # written last
    assert done[named - 1] == ('sync', partial) and done[named + 1] == ('sync', str(folder.parent))


# --- no space left

def limited(limit, function):
    "Call a function while no file may become larger than `limit` bytes."
    import resource
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        return function()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@needs_posix
@pytest.mark.parametrize('file, limit', [('config.json', 10), ('model.safetensors', 5000), ('state.pt', 20_000)])
def test_a_limit_on_the_size_of_files(tmp_path, file, limit):
    good = save(tmp_path, 10)
    before = content(tmp_path)
    with pytest.raises(OSError) as error:
        limited(limit, lambda: save(tmp_path, 20))
    assert 'step-00000020 could not be written: ' in str(error.value)
    assert str(error.value).endswith('; step-00000010 is untouched')
    assert error.value.errno == errno.EFBIG and f'File too large ({file})' in str(error.value)
    assert content(tmp_path) == before and names(tmp_path) == [good.name]
    save(tmp_path, 20) # with space again
    assert latest_checkpoint(tmp_path).name == 'step-00000020'


@needs_posix
def test_no_space_for_the_first_one_or_for_the_same_step_again(tmp_path):
    with pytest.raises(OSError, match='there is no earlier checkpoint'):
        limited(10, lambda: save(tmp_path, 20))
    assert latest_checkpoint(tmp_path) is None
    save(tmp_path, 10)
    before = content(tmp_path)
    with pytest.raises(OSError, match='File too large'):
        limited(5000, lambda: save(tmp_path, 10, seed=3))
    assert content(tmp_path) == before


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / 'checkpoints').write_text('in the way')
    with pytest.raises(OSError, match='step-00000010 could not be written: .*; there is no earlier checkpoint'):
        save(tmp_path, 10)


@pytest.mark.parametrize('name', [name for name in FILES if name != 'state.pt'])
def test_any_file_that_cannot_be_written(tmp_path, monkeypatch, name):
    def full(path, data):
        if Path(path).name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return atomic_write(path, data)
    good = save(tmp_path, 10)
    before = content(tmp_path)
    monkeypatch.setattr(checkpoints, 'atomic_write', full)
    with pytest.raises(OSError, match=f'No space left on device .{name}.; step-00000010 is untouched'):
        save(tmp_path, 20)
    assert content(tmp_path) == before and latest_checkpoint(tmp_path) == good


def test_interrupted_while_saving(tmp_path):
    def interrupted(model, folder):
        save_model(model, folder)
        raise KeyboardInterrupt
    model, optimizer, _ = trained()
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, model, optimizer, Progress(20), interrupted)
    assert names(tmp_path) == []


# --- damaged

def damages(data, seed, n):
    "One bit flipped at `n` random places and at both ends; the end missing; a byte too many."
    places = {0, 1, 7, 8, len(data) - 1, *random.Random(seed).sample(range(len(data)), min(n, len(data)))}
    for i in sorted(places & set(range(len(data)))):
        for bit in (0, 5, 7):
            yield data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1:]
    for size in (0, 1, len(data) // 2, len(data) - 1):
        yield data[:size]
    yield data + b'\0'


@pytest.mark.parametrize('name', FILES)
def test_damage_is_recognised_and_named(tmp_path, name):
    save(tmp_path, 10)
    damaged = save(tmp_path, 20)
    path = damaged / name
    data = path.read_bytes()
    model, optimizer, ema = trained(seed=2)
    for wrong in damages(data, seed=name, n=40):
        path.write_bytes(wrong)
        with pytest.raises(ValueError) as error:
            latest_checkpoint(tmp_path)
        message = str(error.value)
        assert str(damaged) in message
        assert 'step-00000010 is complete: delete step-00000020 to resume from there' in message
        assert name in message or name == 'manifest.json' # a wrong checksum accuses the file that it is of
        with pytest.raises(ValueError, match='step-00000020'):
            load_checkpoint(damaged, model, optimizer, ema)
    path.write_bytes(data)
    verify_checkpoint(damaged)


def test_every_bit_of_the_manifest_counts(tmp_path):
    folder = save(tmp_path, 10)
    path = folder / 'manifest.json'
    data = path.read_bytes()
    for i in range(len(data)):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1:])
        with pytest.raises(ValueError, match='step-00000010'):
            verify_checkpoint(folder)


@pytest.mark.parametrize('name', FILES)
def test_a_missing_file(tmp_path, name):
    save(tmp_path, 10)
    (save(tmp_path, 20) / name).unlink()
    with pytest.raises(ValueError, match=f'step-00000020.*{name}.*step-00000010 is complete'):
        latest_checkpoint(tmp_path)


def test_several_damaged_ones(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    for step in (20, 30):
        (tmp_path / f'checkpoints/step-{step:08d}/state.pt').write_bytes(b'')
    with pytest.raises(ValueError, match='step-00000010 is complete: delete step-00000030 and step-00000020 to'):
        latest_checkpoint(tmp_path)
    (tmp_path / 'checkpoints/step-00000010/state.pt').write_bytes(b'')
    with pytest.raises(ValueError, match='no earlier checkpoint is complete: delete them all to start again'):
        latest_checkpoint(tmp_path)
    for step in (20, 30):
        shutil.rmtree(tmp_path / f'checkpoints/step-{step:08d}')
    save(tmp_path, 10) # the damaged one of the same step is replaced
    assert latest_checkpoint(tmp_path).name == 'step-00000010'


@pytest.mark.parametrize('manifest', ['[]', '{"state.pt": 3}', '{"state.pt": {}}', 'null',
                                      '{"state.pt": {"size": "x", "sha256": ""}}', '{'])
def test_a_manifest_of_another_form(tmp_path, manifest):
    folder = save(tmp_path, 10)
    (folder / 'manifest.json').write_text(manifest)
    with pytest.raises(ValueError, match='manifest.json is damaged'):
        verify_checkpoint(folder)


def test_damaged_weights_of_a_finished_model(tmp_path):
    "Without a manifest, wrong numbers cannot be told from right ones; everything else is refused by name."
    save_model(trained()[0], tmp_path)
    path = tmp_path / 'model.safetensors'
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], 'little')
    refused = 0
    for wrong in damages(data[:header], seed=1, n=60):
        path.write_bytes(wrong + data[header:] if len(wrong) >= header else wrong)
        try:
            load_model(tmp_path)
        except ValueError as error:
            refused += 'model.safetensors' in str(error)
    assert refused > 150
    for size in (0, 1, 7, 8, header - 1, header, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match='model.safetensors'):
            load_model(tmp_path)


# --- malicious

class Trap:
    "An object that creates a file when its pickle is read."
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, 'w')


def pickles(marker):
    "The ways to write a pickle that does something when it is read."
    state = dict(optimizer=Trap(marker), ema=None)
    zipped, legacy, tar = io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save(state, zipped)
    torch.save(state, legacy, _use_new_zipfile_serialization=False)
    with tarfile.open(fileobj=tar, mode='w') as file:
        for name in ('storages', 'tensors', 'pickle'):
            data = pickle.dumps(Trap(marker), 2)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return dict(zip=zipped.getvalue(), legacy=legacy.getvalue(), tar=tar.getvalue(),
                plain=pickle.dumps(Trap(marker), 2), text=pickle.dumps(Trap(marker), 0))


@pytest.mark.filterwarnings('ignore:Detected pickle protocol')
@pytest.mark.parametrize('form', ['zip', 'legacy', 'tar', 'plain', 'text'])
@pytest.mark.parametrize('name', ['state.pt', 'model.safetensors', 'progress.json', 'config.json',
                                  'tokenizer.json', 'training.json'])
def test_no_pickle_is_executed(tmp_path, name, form):
    marker = tmp_path / 'boom'
    tokenizer = train_tokenizer('bpe', [('a b', 'c d')], ('en', 'de'), vocab_size=20)
    model, optimizer, ema = trained()

    def save_with_tokenizer(model, folder):
        save_model(model, folder)
        tokenizer.save(folder / 'tokenizer.json')
        atomic_write(folder / 'training.json', '{}')
    folder = save_checkpoint(tmp_path, model, optimizer, Progress(1), save_with_tokenizer, ema)

    def load_everything():
        load_checkpoint(folder, model, optimizer, ema)
        load_model(folder)
        load_tokenizer(folder / 'tokenizer.json')
        training_record(folder)
    load_everything()
    bomb = pickles(marker)[form]
    (folder / name).write_bytes(bomb)
    write_manifest(folder) # the manifest agrees with the malicious file
    verify_checkpoint(folder)
    with pytest.raises(ValueError, match=name.replace('.', r'\.')):
        load_everything()
    assert not marker.exists()
    if form in ('plain', 'text'):
        pickle.loads(bomb) # an ordinary reader executes it
        assert marker.exists()


def test_a_state_of_something_else(tmp_path):
    for thing in ([], dict(weights=torch.ones(2)), torch.ones(3), 'text'):
        torch.save(thing, tmp_path / 'state.pt')
        with pytest.raises(ValueError, match='state.pt is not the state of a training run'):
            load_state(tmp_path / 'state.pt')
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path / 'none.pt')


# --- best ones, averages

def test_best_steps():
    values = [(1, 3., 1.), (2, 1., 5.), (3, 2., 5.), (4, float('nan'), float('nan'))]
    rows = [dict(step=step, val_loss=loss, val_bleu=bleu) for step, loss, bleu in values]
    assert best_steps(rows, 'val_loss', 9) == [2, 3, 1] # a validation that was not a number is never best
    assert best_steps(rows, 'val_loss', 2) == [2, 3] and best_steps(rows, 'val_bleu', 2) == [2, 3]
    assert best_steps(rows + [dict(step=2, val_loss=9.)], 'val_loss', 1) == [3] # the last value of a step counts
    assert best_steps(iter([dict(step=1, loss=3.)]), 'val_loss', 2) == [] and best_steps(rows, 'val_loss', 0) == []


def test_an_average_is_a_model_folder(tmp_path):
    run = tmp_path / 'run'

    def save_with_tokenizer(model, folder):
        save_model(model, folder)
        atomic_write(folder / 'tokenizer.json', '{}')
    models = [trained(seed) for seed in range(3)]
    folders = [save_checkpoint(run, model, optimizer, Progress(step), save_with_tokenizer)
               for step, (model, optimizer, _) in enumerate(models)]
    atomic_write(run / 'run.json', to_json(dict(corpus=dict(corpus='copy'))))
    mean = average_checkpoints(folders, tmp_path / 'mean')
    expected = torch.stack([flat(model) for model, _, _ in models]).mean(0)
    torch.testing.assert_close(flat(load_model(mean)), expected)
    assert read_json(mean / 'training.json') == dict(run=dict(corpus=dict(corpus='copy')),
                                                     averaged=[str(folder) for folder in folders])
    assert sorted(content(mean)) == ['config.json', 'model.safetensors', 'tokenizer.json', 'training.json']
    again = average_checkpoints([mean] * 2, tmp_path / 'again') # of finished models, too
    assert content(again)['model.safetensors'] == content(mean)['model.safetensors']


def test_averages_that_cannot_be(tmp_path):
    folders = [save(tmp_path, step, seed=step) for step in (1, 2)]
    with pytest.raises(ValueError, match='no checkpoints to average'):
        average_checkpoints([], tmp_path / 'mean')
    with pytest.raises(TypeError, match='folders must be a list of model folders, got one path'):
        average_checkpoints('run', tmp_path / 'mean')
    with pytest.raises(ValueError, match="folder='' is empty"):
        average_checkpoints(folders, '')
    wide = tmp_path / 'wide'
    save_model(Transformer(TransformerConfig(**(vars(CONFIG) | dict(d_ff=32)))), wide)
    with pytest.raises(ValueError, match='their config.json differ'):
        average_checkpoints([folders[0], wide], tmp_path / 'mean')
    (tmp_path / 'empty').mkdir()
    with pytest.raises(FileNotFoundError, match='it has no config.json'):
        average_checkpoints([tmp_path / 'empty'], tmp_path / 'mean')
    if os.name != 'nt':
        with pytest.raises(OSError, match='File too large'):
            limited(5000, lambda: average_checkpoints(folders, tmp_path / 'mean'))
    (folders[0] / 'model.safetensors').write_bytes((folders[1] / 'model.safetensors').read_bytes())
    with pytest.raises(ValueError, match='step-00000001/model.safetensors is damaged'):
        average_checkpoints(folders, tmp_path / 'mean')
    assert not list(tmp_path.glob('mean*'))
    (tmp_path / 'mean').mkdir()
    with pytest.raises(FileExistsError, match='choose another folder'):
        average_checkpoints(folders, tmp_path / 'mean')


def test_training_record(tmp_path):
    folder = tmp_path / 'checkpoints/step-00000001'
    folder.mkdir(parents=True)
    assert training_record(folder) == {}
    atomic_write(tmp_path / 'run.json', to_json(dict(corpus='toy')))
    assert training_record(folder) == dict(run=dict(corpus='toy'))
    atomic_write(tmp_path / 'training.json', to_json(dict(run='as it was', val='a score of the average')))
    assert training_record(folder) == dict(run='as it was') # scores are of another model
    atomic_write(folder / 'training.json', '{"run": ')
    with pytest.raises(ValueError, match='training.json is damaged'):
        training_record(folder)


# --- the log

def test_a_log_killed_at_any_byte(tmp_path):
    path = tmp_path / 'log.jsonl'
    for step in (10, 20, 30):
        append_log(path, dict(step=step, loss=1 / step, text='äß€'))
    data = path.read_bytes()
    lines = data.splitlines(True)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        n_complete = data[:size].count(b'\n')
        assert [row['step'] for row in read_log(path)] == [10, 20, 30][:n_complete]
        truncate_log(path, 20)
        assert path.read_bytes() == b''.join(lines[:min(n_complete, 2)]) # unchanged, without the unfinished line
        append_log(path, dict(step=40))
        assert read_log(path)[-1] == dict(step=40)


def test_a_log_that_does_not_exist(tmp_path):
    truncate_log(tmp_path / 'log.jsonl', 0)
    assert read_log(tmp_path / 'log.jsonl') == []


def test_a_log_with_a_damaged_line(tmp_path):
    path = tmp_path / 'log.jsonl'
    path.write_text('{"step": 1}\n{"step" 2}\n{"step": 3}\n')
    with pytest.raises(ValueError, match='log.jsonl is damaged in line 2'):
        read_log(path)


@needs_posix
def test_no_space_for_a_line(tmp_path):
    path = tmp_path / 'log.jsonl'
    append_log(path, dict(step=1))
    before = path.read_bytes()
    with pytest.raises(OSError, match='File too large') as error:
        limited(len(before) + 5, lambda: append_log(path, dict(step=2)))
    assert error.value.filename == str(path) and path.read_bytes() == before
    append_log(path, dict(step=2))
    assert [row['step'] for row in read_log(path)] == [1, 2]
