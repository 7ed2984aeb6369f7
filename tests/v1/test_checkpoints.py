"Checkpoints when things go wrong: killed between any two operations on the disk, no room, one bit turned over, a trap."
import errno, io, json, os, pickle, random, resource, shutil, subprocess, sys, tarfile
from pathlib import Path

import pytest, torch
from torch.optim.swa_utils import AveragedModel

from annotated_transformer.v1 import checkpoints as module
from annotated_transformer.v1.checkpoints import (
    Progress, append_log, average_checkpoints, best_steps, checkpoint_name, checkpoints, cut_log, keep,
    latest, load_checkpoint, load_model, load_state, read_log,
    save_checkpoint, save_model, verify, whole, write_manifest)
from annotated_transformer.v1.transformer import Transformer, TransformerConfig
from annotated_transformer.v1.translator import Translator
from annotated_transformer.v1.vocabulary import train_tokenizer, write_whole

CONFIG = TransformerConfig(20, n_layers=1, d_model=8, d_ff=16, n_heads=2, max_len=16)

def trained(seed=0, config=CONFIG):
    "A model, an Adam with a memory, and a moving average, none of them zero."
    torch.manual_seed(seed)
    model = Transformer(config)
    optimizer, ema = torch.optim.Adam(model.parameters(), lr=1e-2), AveragedModel(model)
    for _ in range(2):
        sum((p * torch.randn_like(p)).sum() for p in model.parameters()).backward()
        optimizer.step()
        ema.update_parameters(model)
    return model, optimizer, ema

def save(out, step, seed=0, **progress):
    model, optimizer, ema = trained(seed)
    return save_checkpoint(out, model, optimizer, Progress(step, **progress), ema=ema)

def numbers(model): return torch.cat([p.detach().flatten() for p in model.parameters()])

def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes()
            for p in sorted(Path(folder).rglob('*')) if p.is_file()}

def names(out): return sorted(p.name for p in (out / 'checkpoints').iterdir())


# --- what comes back

def test_all_comes_back_and_the_files_are_a_function_of_it(tmp_path):
    model, optimizer, ema = trained(seed=1)
    folder = save_checkpoint(tmp_path, model, optimizer, Progress(7, 1, 2, 3, 0.5), ema=ema)
    twin, twin_optimizer, twin_ema = trained(seed=2)
    at = load_checkpoint(folder, twin, twin_optimizer, twin_ema)
    assert (at.step, at.epoch, at.batch, at.tokens, at.minutes) == (7, 1, 2, 3, 0.5)
    assert torch.equal(numbers(model), numbers(twin)) and torch.equal(numbers(ema), numbers(twin_ema))
    assert twin.output.weight is twin.src_embed.weight
    again = save_checkpoint(tmp_path / 'again', twin, twin_optimizer, at, ema=twin_ema)
    assert content(folder) == content(again)

def test_a_damaged_checkpoint_changes_nothing(tmp_path):
    folder = save(tmp_path, 1, seed=1)
    (folder / 'progress.json').write_text('{}')
    model, optimizer, ema = trained(seed=2)
    before = numbers(model), numbers(ema), str(optimizer.state_dict())
    with pytest.raises(ValueError, match='progress.json'): load_checkpoint(folder, model, optimizer, ema)
    assert (torch.equal(numbers(model), before[0]) and torch.equal(numbers(ema), before[1])
            and str(optimizer.state_dict()) == before[2])

def test_a_state_without_moving_average(tmp_path):
    model, optimizer, ema = trained()
    folder = save_checkpoint(tmp_path, model, optimizer, Progress(1))
    with pytest.raises(ValueError, match='state.pt holds no moving average'):
        load_checkpoint(folder, model, optimizer, ema)
    assert load_checkpoint(save(tmp_path, 2), model, optimizer).step == 2     # one that is not asked for does no harm


# --- killed

class Photographer:
    "Copies `folder` before every operation on a file, and once with each file that is being written cut in half."
    OPERATIONS = {'open', 'os.rename', 'os.remove', 'os.rmdir', 'os.mkdir', 'os.truncate'}
    def __init__(self): self.on = False
    def look(self, event, args):
        if not self.on or event not in self.OPERATIONS: return
        self.on = False                                # copying opens files too
        self.take(event)
        for file in self.folder.rglob('.*.tmp'):       # as if killed while the bytes were on their way
            picture = self.take(f'{event}, half a file') / file.relative_to(self.folder)
            picture.write_bytes(picture.read_bytes()[:picture.stat().st_size // 2])
        self.on = True
    def take(self, event):
        picture = self.album / f'{len(self.pictures):04d}'
        shutil.copytree(self.folder, picture)
        self.pictures.append((event, picture))
        return picture
    def of(self, folder, album, do):
        self.folder, self.album, self.pictures, self.on = folder, album, [], True
        try: do()
        finally: self.on = False
        return self.pictures

PHOTOGRAPHER = Photographer()
sys.addaudithook(PHOTOGRAPHER.look)

def test_killed_at_any_instant_of_a_save(tmp_path):
    run = tmp_path / 'run'
    save(run, 10, tokens=1)
    model, optimizer, ema = trained(seed=1)
    def saves():
        save_checkpoint(run, model, optimizer, Progress(20, tokens=2), ema=ema)
        save_checkpoint(run, model, optimizer, Progress(20, tokens=3), ema=ema)
    pictures, seen = PHOTOGRAPHER.of(run, tmp_path / 'album', saves), []
    assert any((picture / 'checkpoints' / 'step-00000020.partial' / 'manifest.json').exists()
               for _, picture in pictures)
    for event, picture in pictures:
        at = load_checkpoint(latest(picture), model, optimizer, ema)
        seen.append((at.step, at.tokens))
        keep(picture, last=5)                          # what was half-made is gone, what was whole is not
        assert not [name for name in names(picture) if '.' in name]
        assert latest(picture).name == checkpoint_name(at)
    assert seen == sorted(seen) and set(seen) == {(10, 1), (20, 2), (20, 3)}
    assert sum('half a file' in event for event, _ in pictures) >= 8

def test_killed_between_the_two_renames(tmp_path):
    folder = save(tmp_path, 10)
    before = content(folder)
    folder.rename(folder.with_name(folder.name + '.old'))
    assert checkpoints(tmp_path) == []
    assert latest(tmp_path) == folder and content(folder) == before
    shutil.copytree(folder, folder.with_name(folder.name + '.old'))           # killed after the second
    assert latest(tmp_path) == folder
    keep(tmp_path, 1)
    assert names(tmp_path) == [folder.name]

def test_killed_at_any_instant_of_a_removal(tmp_path):
    run = tmp_path / 'run'
    for step in range(1, 6): save(run, step)
    (run / 'checkpoints' / 'step-00000006.partial').mkdir()
    pictures = PHOTOGRAPHER.of(run, tmp_path / 'album', lambda: keep(run, 2, [2]))
    assert len(pictures) > 10
    for _, picture in pictures:
        for folder in checkpoints(picture): verify(folder)                    # none is half-emptied under a good name
        assert latest(picture).name == 'step-00000005'
        keep(picture, 2, [2])
        assert names(picture) == names(run) == ['step-00000002', 'step-00000004', 'step-00000005']

def test_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    "A power cut keeps what was synced: every file, its name, then the folder's name."
    done, by_number = [], {}
    real_open, real_fsync, real_replace = os.open, os.fsync, os.replace
    def fsync(number): done.append(('sync', os.readlink(f'/proc/self/fd/{number}'))); real_fsync(number)
    def replace(old, new): done.append(('name', str(new))); real_replace(old, new)
    if not Path('/proc/self/fd').exists(): pytest.skip('no /proc to ask what a descriptor is of')
    monkeypatch.setattr(os, 'fsync', fsync)
    monkeypatch.setattr(os, 'replace', replace)
    folder = save(tmp_path, 10)
    partial = f'{folder}.partial'
    named = done.index(('name', str(folder)))
    for name in content(folder):
        at = done.index(('name', f'{partial}/{name}'))
        assert done[at - 1][0] == 'sync' and done[at - 1][1].endswith('.tmp') and at < named
    assert done.index(('name', f'{partial}/manifest.json')) == max(i for i in range(named) if done[i][0] == 'name')
    assert ('sync', partial) == done[named - 1]
    assert ('sync', str(folder.parent)) == done[named + 1]

def test_only_its_own_are_removed(tmp_path):
    for step in (1, 2, 3): save(tmp_path, step)
    strangers = ['notes.txt', '.hidden.tmp', 'checkpoints/step-best', 'checkpoints/README']
    for name in strangers: (tmp_path / name).touch()
    left = tmp_path / f'.{"0" * 16}.tmp'
    left.touch()
    keep(tmp_path, 1)
    assert not left.exists() and all((tmp_path / name).exists() for name in strangers)
    assert [p.name for p in checkpoints(tmp_path)] == ['step-00000003']


# --- no room

def limited(limit, do):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try: return do()
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, before)

@pytest.mark.parametrize('file, limit', [('config.json', 10), ('model.safetensors', 5000), ('state.pt', 20_000)])
def test_a_limit_on_the_size_of_files(tmp_path, file, limit):
    good = save(tmp_path, 10)
    before = content(tmp_path)
    with pytest.raises(OSError) as error: limited(limit, lambda: save(tmp_path, 20))
    assert error.value.errno == errno.EFBIG
    assert str(error.value) == (f'{tmp_path}/checkpoints/step-00000020 could not be written: File too large ({file}); '
                                'step-00000010, the last one, is untouched')
    assert content(tmp_path) == before and names(tmp_path) == [good.name]
    assert latest(tmp_path) == good
    save(tmp_path, 20)                                                        # with room again
    assert latest(tmp_path).name == 'step-00000020'

def test_the_first_one(tmp_path):
    with pytest.raises(OSError, match='there is none before it'): limited(10, lambda: save(tmp_path, 20))
    assert latest(tmp_path) is None

def test_no_room_for_the_same_step_again(tmp_path):
    save(tmp_path, 10)
    before = content(tmp_path)
    with pytest.raises(OSError, match='File too large'): limited(5000, lambda: save(tmp_path, 10, seed=3))
    assert content(tmp_path) == before

def test_a_file_where_the_folder_should_be(tmp_path):
    "Nobody can write there, whatever their rights."
    (tmp_path / 'checkpoints').write_text('in the way')
    with pytest.raises(OSError, match='step-00000010 could not be written: .*; there is none before it'):
        save(tmp_path, 10)

def mounted(size, path):
    "A small disk of its own, where this process may have one."
    return subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', str(path)],
                          capture_output=True).returncode == 0

def test_a_full_disk(tmp_path):
    "A real one for those who may mount it; a write that fails as on a full disk for everybody."
    disk = tmp_path / 'disk'
    disk.mkdir()
    small = mounted('300k', disk)
    try:
        save(disk, 1)
        if small:
            with pytest.raises(OSError, match='No space left on device .*; '
                                              'step-000000.., the last one, is untouched') as error:
                for step in range(2, 20): save(disk, step)
            assert error.value.errno == errno.ENOSPC
            assert shutil.disk_usage(disk).free > 0                           # the attempt was cleared away
            log = disk / 'log.jsonl'
            with pytest.raises(OSError, match='No space left') as error:
                while True: append_log(log, dict(step=1, text='x' * 999))
            assert error.value.filename == str(log)
            assert {row['step'] for row in read_log(log)} == {1} and log.read_bytes().endswith(b'\n')
            log.unlink()
        last = latest(disk)
        keep(disk, 1)                                                         # makes room
        save(disk, 20)
        assert last and latest(disk).name == 'step-00000020'
    finally:
        if small: subprocess.run(['umount', str(disk)], check=True)

@pytest.mark.parametrize('name', ['config.json', 'model.safetensors', 'state.pt', 'progress.json', 'manifest.json'])
def test_any_file_that_cannot_be_written(tmp_path, monkeypatch, name):
    def full(path, data):
        if Path(path).name == name: raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write_whole(path, data)
    good = save(tmp_path, 10)
    before = content(tmp_path)
    monkeypatch.setattr(module, 'write_whole', full)
    with pytest.raises(OSError, match=f'No space left on device .{name}.; step-00000010'): save(tmp_path, 20)
    assert content(tmp_path) == before and latest(tmp_path) == good

def test_interrupted_while_saving(tmp_path):
    def slow(model, folder):
        save_model(model, folder)
        raise KeyboardInterrupt
    model, optimizer, _ = trained()
    with pytest.raises(KeyboardInterrupt): save_checkpoint(tmp_path, model, optimizer, Progress(20), slow)
    assert names(tmp_path) == []


# --- damaged

def damages(data, seed, n):
    "One bit turned over at `n` random places and both ends, bytes lost at the end, none left, one too many."
    for i in sorted({0, 1, 7, 8, len(data) - 1, *random.Random(seed).sample(range(len(data)), min(n, len(data)))}
                    & {*range(len(data))}):
        for bit in (0, 5, 7): yield f'bit {bit} of byte {i}', data[:i] + bytes([data[i] ^ 1 << bit]) + data[i+1:]
    for left in (0, 1, len(data) // 2, len(data) - 1): yield f'cut to {left}', data[:left]
    yield 'a byte more', data + b'\0'

@pytest.mark.parametrize('name', ['config.json', 'model.safetensors', 'state.pt', 'progress.json', 'manifest.json'])
def test_damage_is_recognised_by_name(tmp_path, name):
    good, bad = save(tmp_path, 10), save(tmp_path, 20)
    path, data = bad / name, (bad / name).read_bytes()
    model, optimizer, ema = trained(seed=2)
    for what, damaged in damages(data, seed=name, n=60):
        path.write_bytes(damaged)
        with pytest.raises(ValueError) as error: latest(tmp_path)
        told = str(error.value)
        assert str(bad) in told and 'step-00000010, before it, is whole: delete step-00000020' in told, (what, told)
        # a list that errs accuses the file it is wrong about
        assert name in told or name == 'manifest.json', (what, told)
        with pytest.raises(ValueError, match='step-00000020'): load_checkpoint(bad, model, optimizer, ema)
    path.write_bytes(data)
    verify(bad)

def test_every_bit_of_the_list(tmp_path):
    folder = save(tmp_path, 10)
    path, data = folder / 'manifest.json', (folder / 'manifest.json').read_bytes()
    for i in range(len(data)):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i+1:])
        with pytest.raises(ValueError, match='step-00000010'): verify(folder)

@pytest.mark.parametrize('name', ['config.json', 'model.safetensors', 'state.pt', 'progress.json', 'manifest.json'])
def test_a_missing_file(tmp_path, name):
    save(tmp_path, 10)
    (save(tmp_path, 20) / name).unlink()
    with pytest.raises(ValueError, match=f'step-00000020.*{name}.*step-00000010, before it, is whole'): latest(tmp_path)

def test_several_damaged_ones(tmp_path):
    for step in (10, 20, 30): save(tmp_path, step)
    for step in (20, 30): (tmp_path / f'checkpoints/step-{step:08d}/state.pt').write_bytes(b'')
    with pytest.raises(ValueError, match='step-00000010, before it, is whole: '
                                         'delete step-00000030 and step-00000020'):
        latest(tmp_path)
    (tmp_path / 'checkpoints/step-00000010/state.pt').write_bytes(b'')
    with pytest.raises(ValueError, match='no checkpoint before it is whole'): latest(tmp_path)
    for step in (20, 30): shutil.rmtree(tmp_path / f'checkpoints/step-{step:08d}')
    save(tmp_path, 10)    # the damaged one of the same step is replaced
    assert latest(tmp_path).name == 'step-00000010'

@pytest.mark.parametrize('listed', ['[]', '{"state.pt": 3}', '{"state.pt": {}}', 'null',
                                    '{"state.pt": {"size": "x", "sha256": ""}}', '{'])
def test_a_list_of_another_form(tmp_path, listed):
    folder = save(tmp_path, 10)
    (folder / 'manifest.json').write_text(listed)
    with pytest.raises(ValueError, match='manifest.json is damaged'): verify(folder)

def test_damaged_weights_of_a_finished_model(tmp_path):
    "Without a list: what still reads as weights cannot be told from weights, the rest is refused by name."
    save_model(trained()[0], tmp_path)
    path, data = tmp_path / 'model.safetensors', (tmp_path / 'model.safetensors').read_bytes()
    header = 8 + int.from_bytes(data[:8], 'little')
    refused = 0
    for what, damaged in damages(data[:header], seed=1, n=60):
        path.write_bytes(damaged + data[header:] if len(damaged) >= header else damaged)
        try: load_model(tmp_path)
        except ValueError as error: refused += 'model.safetensors' in str(error)
    assert refused > 150
    for left in (0, 1, 7, 8, header - 1, header, len(data) - 1):
        path.write_bytes(data[:left])
        with pytest.raises(ValueError, match='model.safetensors'): load_model(tmp_path)


# --- traps

class Trap:
    "Reading its pickle makes a file."
    def __init__(self, path): self.path = str(path)
    def __reduce__(self): return open, (self.path, 'w')

def bombs(marker):
    "Ways to write a pickle that does something when it is read."
    zipped = io.BytesIO()
    torch.save(dict(optimizer=Trap(marker), ema=None), zipped)
    old = io.BytesIO()
    torch.save(dict(optimizer=Trap(marker), ema=None), old, _use_new_zipfile_serialization=False)
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode='w') as file:
        for name in ('storages', 'tensors', 'pickle'):
            info = tarfile.TarInfo(name)
            info.size = len(data := pickle.dumps(Trap(marker), 2))
            file.addfile(info, io.BytesIO(data))
    return dict(zip=zipped.getvalue(), legacy=old.getvalue(), tar=tar.getvalue(), plain=pickle.dumps(Trap(marker), 2),
                text=pickle.dumps(Trap(marker), 0))

@pytest.mark.filterwarnings('ignore:Detected pickle protocol')
@pytest.mark.parametrize('kind', ['zip', 'legacy', 'tar', 'plain', 'text'])
@pytest.mark.parametrize('name', ['state.pt', 'model.safetensors', 'progress.json',
                                  'config.json', 'tokenizer.json', 'training.json'])
def test_no_pickle_is_run(tmp_path, name, kind):
    marker = tmp_path / 'boom'
    model, optimizer, ema = trained()
    tokenizer = train_tokenizer('words', [('a b', 'c d')], ('en', 'de'), vocab_size=20)
    config = TransformerConfig(len(tokenizer), n_layers=1, d_model=8, d_ff=16, n_heads=2, max_len=16)
    model, optimizer, ema = trained(config=config)
    def save(model, folder): Translator(model, tokenizer, {}).save(folder)
    folder = save_checkpoint(tmp_path, model, optimizer, Progress(1), save, ema)
    assert isinstance(Translator.load(folder), Translator)
    bomb = bombs(marker)[kind]
    (folder / name).write_bytes(bomb)
    write_manifest(folder)                                                    # the list agrees with the trap
    verify(folder)
    with pytest.raises(ValueError, match=name.replace('.', r'\.')):
        load_checkpoint(folder, model, optimizer, ema)
        Translator.load(folder)
    assert not marker.exists()
    if kind in ('plain', 'text'):
        pickle.loads(bomb)                                                    # it would have
        assert marker.exists()

def test_a_state_of_other_things(tmp_path):
    for number, thing in enumerate(([], dict(weights=torch.ones(2)), torch.ones(3), 'text')):
        torch.save(thing, tmp_path / 'state.pt')
        with pytest.raises(ValueError, match='state.pt is not the state of a run'): load_state(tmp_path / 'state.pt')
    with pytest.raises(FileNotFoundError): load_state(tmp_path / 'none.pt')


# --- best ones, averages

def test_best_steps():
    rows = [dict(step=s, val_loss=l, val_bleu=b)
            for s, l, b in [(1, 3., 1.), (2, 1., 5.), (3, 2., 5.), (4, float('nan'), float('nan'))]]
    assert best_steps(rows, 'val_loss', 2) == [2, 3] and best_steps(rows, 'val_bleu', 2) == [2, 3]
    assert best_steps(rows + [dict(step=2, val_loss=9.)], 'val_loss', 1) == [3]   # the last word on a step counts
    assert best_steps(iter([dict(step=1, loss=3.)]), 'val_loss', 2) == [] and best_steps(rows, 'val_loss', 0) == []

def test_an_average_is_a_model_folder(tmp_path):
    run, tokenizer = tmp_path / 'run', train_tokenizer('words', [('a b', 'c d')], ('en', 'de'), vocab_size=20)
    config = TransformerConfig(len(tokenizer), n_layers=1, d_model=8, d_ff=16, n_heads=2, max_len=16)
    def save(model, folder):
        save_model(model, folder)
        tokenizer.save(Path(folder) / 'tokenizer.json')
    models = [trained(seed, config) for seed in range(3)]
    folders = [save_checkpoint(run, model, optimizer, Progress(step), save)
               for step, (model, optimizer, _) in enumerate(models)]
    write_whole(run / 'run.json', json.dumps(dict(corpus=dict(corpus='copy'))))
    mean = Translator.load(average_checkpoints(folders, tmp_path / 'mean'), 'cpu')
    expected = torch.stack([numbers(model) for model, _, _ in models]).mean(0)
    torch.testing.assert_close(numbers(mean.model), expected)
    assert mean.training == dict(run=dict(corpus=dict(corpus='copy')), averaged=[str(folder) for folder in folders])
    assert sorted(content(tmp_path / 'mean')) == ['config.json', 'model.safetensors', 'tokenizer.json', 'training.json']
    again = average_checkpoints([tmp_path / 'mean'] * 2, tmp_path / 'again')  # of finished models too
    assert content(again)['model.safetensors'] == content(tmp_path / 'mean')['model.safetensors']

def test_an_average_is_written_whole_or_not_at_all(tmp_path):
    folders = [save(tmp_path, step, seed=step) for step in (1, 2)]
    with pytest.raises(OSError, match='File too large'):
        limited(5000, lambda: average_checkpoints(folders, tmp_path / 'mean'))
    assert not list(tmp_path.glob('mean*'))
    (folders[0] / 'model.safetensors').write_bytes((folders[1] / 'model.safetensors').read_bytes())
    with pytest.raises(ValueError, match='step-00000001/model.safetensors is damaged'):
        average_checkpoints(folders, tmp_path / 'mean')
    with pytest.raises(FileNotFoundError, match='it has no config.json'):
        (tmp_path / 'empty').mkdir()
        average_checkpoints([tmp_path / 'empty'], tmp_path / 'mean')
    assert not list(tmp_path.glob('mean*'))

def test_a_folder_with_a_passing_name(tmp_path):
    with pytest.raises(RuntimeError):
        with whole(tmp_path / 'a') as partial:
            (partial / 'x').touch()
            raise RuntimeError
    assert list(tmp_path.iterdir()) == []


# --- the log

def test_a_log_killed_at_any_byte(tmp_path):
    path = tmp_path / 'log.jsonl'
    for step in (10, 20, 30): append_log(path, dict(step=step, loss=1 / step, text='äß€'))
    data, lines = path.read_bytes(), path.read_bytes().splitlines(True)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        whole_lines = data[:size].count(b'\n')
        assert [row['step'] for row in read_log(path)] == [10, 20, 30][:whole_lines]
        cut_log(path, 20)
        assert path.read_bytes() == b''.join(lines[:min(whole_lines, 2)])     # byte for byte, half a line gone
        append_log(path, dict(step=40))
        assert read_log(path)[-1] == dict(step=40)

def test_a_log_with_a_damaged_line(tmp_path):
    path = tmp_path / 'log.jsonl'
    path.write_text('{"step": 1}\n{"step" 2}\n{"step": 3}\n')
    with pytest.raises(ValueError, match='log.jsonl is damaged in line 2'): read_log(path)

def test_no_room_for_a_line(tmp_path):
    path = tmp_path / 'log.jsonl'
    append_log(path, dict(step=1))
    before = path.read_bytes()
    with pytest.raises(OSError, match='File too large') as error:
        limited(len(before) + 5, lambda: append_log(path, dict(step=2)))
    assert error.value.filename == str(path) and path.read_bytes() == before
    append_log(path, dict(step=2))
    assert [row['step'] for row in read_log(path)] == [1, 2]
