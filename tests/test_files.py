"Files and folders: complete or untouched, whatever interrupts the writer."
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from annotated_transformer import files
from annotated_transformer.files import (
    atomic_folder, atomic_open, atomic_write, checksum, read_json, recover, replace_atomically, to_json)

needs_posix = pytest.mark.skipif(os.name == 'nt', reason='Windows has other rules')


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_write(tmp_path):
    path = atomic_write(tmp_path / 'a.txt', 'ä\n')
    assert path == tmp_path / 'a.txt' and path.read_bytes() == b'\xc3\xa4\n'
    atomic_write(str(path), b'b')
    assert path.read_bytes() == b'b' and names(tmp_path) == ['a.txt']


def test_errors_name_the_file_that_was_asked_for(tmp_path):
    path = atomic_write(tmp_path / 'a.txt', b'old')
    with pytest.raises(UnicodeEncodeError):
        atomic_write(path, '\ud800')
    with pytest.raises(FileNotFoundError) as error:
        atomic_write(tmp_path / 'nowhere' / 'b.txt', b'')
    assert error.value.filename == str(tmp_path / 'nowhere' / 'b.txt') and '.tmp' not in str(error.value)
    with pytest.raises(OSError):
        atomic_write(path / 'below', b'')
    (tmp_path / 'folder').mkdir()
    with pytest.raises(IsADirectoryError, match='folder'):
        atomic_write(tmp_path / 'folder', b'x')
    assert path.read_bytes() == b'old' and names(tmp_path) == ['a.txt', 'folder']


def test_an_error_of_the_rename_names_one_file(tmp_path, monkeypatch):
    def refuse(old, new):
        raise PermissionError(13, 'Permission denied', str(old), None, str(new))
    monkeypatch.setattr(files.os, 'replace', refuse)
    with pytest.raises(PermissionError) as error:
        atomic_write(tmp_path / 'a.txt', b'x')
    assert str(error.value) == f'[Errno 13] Permission denied: {str(tmp_path / "a.txt")!r}'
    assert names(tmp_path) == []


@needs_posix
def test_a_link_stays_a_link(tmp_path):
    (tmp_path / 'real').mkdir()
    target = tmp_path / 'real' / 'a.txt'
    link = tmp_path / 'link'
    link.symlink_to(target)
    assert atomic_write(link, 'x') == target
    assert link.is_symlink() and target.read_text() == 'x'
    atomic_write(link, 'y')
    assert link.is_symlink() and target.read_text() == 'y'


@needs_posix
def test_a_file_keeps_its_mode_and_is_never_readable_by_more(tmp_path):
    path = atomic_write(tmp_path / 'a.txt', 'old')
    usual = path.stat().st_mode
    for mode in (0o600, 0o444, 0o755):
        path.chmod(mode)
        with atomic_open(path, 'w') as file:
            assert os.stat(file.name).st_mode & 0o777 == mode # the temporary file, before the first byte
            file.write('new')
        assert path.stat().st_mode & 0o777 == mode and path.read_text() == 'new'
    link = tmp_path / 'link'
    link.symlink_to(path)
    atomic_write(link, 'through the link')
    assert path.stat().st_mode & 0o777 == 0o755
    assert atomic_write(tmp_path / 'b.txt', 'new').stat().st_mode == usual


@needs_posix
def test_a_pipe_is_written_to_directly(tmp_path):
    path = tmp_path / 'pipe'
    os.mkfifo(path)
    reader = subprocess.Popen([sys.executable, '-c', f'print(open({str(path)!r}).read())'], stdout=subprocess.PIPE)
    atomic_write(path, 'through the pipe')
    assert reader.communicate(timeout=60)[0].decode().strip() == 'through the pipe'
    assert names(tmp_path) == ['pipe']


@needs_posix
def test_no_space_leaves_the_old_file(tmp_path):
    atomic_write(tmp_path / 'a.txt', 'old')
    program = '''if True:
        import resource, signal, sys
        from annotated_transformer.files import atomic_write
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try: atomic_write(sys.argv[1], b'x' * 5000)
        except OSError as error: print(error.filename)
    '''
    done = subprocess.run([sys.executable, '-c', program, tmp_path / 'a.txt'], capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / 'a.txt'), done.stderr
    assert (tmp_path / 'a.txt').read_text() == 'old' and names(tmp_path) == ['a.txt']


@needs_posix
def test_a_killed_writer_leaves_the_old_file(tmp_path):
    atomic_write(tmp_path / 'a.txt', 'old')
    program = '''if True:
        import os, signal, sys
        from annotated_transformer import files
        files.os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        files.atomic_write(sys.argv[1], b'new')
    '''
    done = subprocess.run([sys.executable, '-c', program, tmp_path / 'a.txt'])
    assert done.returncode == -9
    assert (tmp_path / 'a.txt').read_text() == 'old'
    [left] = [name for name in names(tmp_path) if name != 'a.txt']
    assert re.fullmatch(r'\.[0-9a-f]{16}\.tmp', left) # the form that `keep_checkpoints` removes


def test_text_options(tmp_path):
    with atomic_open(tmp_path / 'a.txt', 'w', encoding='utf-16', newline='\r\n') as file:
        file.write('a\n')
    assert (tmp_path / 'a.txt').read_bytes().decode('utf-16') == 'a\r\n'


def test_the_bytes_are_on_the_disk_before_the_name(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(files.os, 'fsync', lambda descriptor: done.append('fsync') or fsync(descriptor))
    monkeypatch.setattr(files.os, 'replace', lambda old, new: done.append('rename') or replace(old, new))
    atomic_write(tmp_path / 'a.txt', 'x')
    assert done == ['fsync', 'rename']
    if os.name != 'nt':
        done.clear()
        with atomic_folder(tmp_path / 'folder'):
            pass
        assert done == ['fsync', 'rename', 'fsync'] # the folder's names, its own name, its parent's names


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    folder = tmp_path / 'model'
    for name in ('a', 'b'):
        with atomic_folder(folder) as partial:
            (partial / name).touch()
            assert not (folder / name).exists()
        assert names(folder) == [name]
    with pytest.raises(KeyboardInterrupt):
        with atomic_folder(folder) as partial:
            (partial / 'c').touch()
            raise KeyboardInterrupt
    assert names(tmp_path) == ['model'] and names(folder) == ['b']


def test_what_a_killed_process_left_does_not_get_into_a_new_folder(tmp_path):
    (tmp_path / 'model.partial').mkdir()
    (tmp_path / 'model.partial' / 'left').touch()
    with atomic_folder(tmp_path / 'model') as partial:
        (partial / 'a').touch()
    assert names(tmp_path / 'model') == ['a']


def test_killed_between_the_two_renames(tmp_path, monkeypatch):
    folder, new = tmp_path / 'model', tmp_path / 'new'
    for path, name in ((folder, 'old'), (new, 'new')):
        path.mkdir()
        (path / name).touch()
    replace = os.replace

    def killed(old, target):
        if Path(target) == folder:
            raise SystemExit
        replace(old, target)
    monkeypatch.setattr(files.os, 'replace', killed)
    with pytest.raises(SystemExit):
        replace_atomically(new, folder)
    monkeypatch.undo()
    assert not folder.exists()
    recover(folder)
    assert names(folder) == ['old']
    recover(folder) # nothing to do
    replace_atomically(new, folder)
    assert names(folder) == ['new'] and names(tmp_path) == ['model']


def test_recover_does_not_touch_a_folder_that_is_there(tmp_path):
    for name in ('model', 'model.old'):
        (tmp_path / name).mkdir()
    recover(tmp_path / 'model')
    assert names(tmp_path) == ['model', 'model.old']


def test_a_foreign_folder_is_not_removed(tmp_path):
    "A folder called `model.old` that somebody made stays if there is nothing to replace."
    (tmp_path / 'model.old').mkdir()
    with atomic_folder(tmp_path / 'model'):
        pass
    assert names(tmp_path) == ['model', 'model.old']


def test_checksum(tmp_path):
    path = tmp_path / 'a'
    path.write_bytes(b'abc' * 500_000) # longer than one piece
    assert checksum(path)['size'] == 1_500_000
    import hashlib
    assert checksum(path)['sha256'] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_json(tmp_path):
    path = atomic_write(tmp_path / 'a.json', to_json({'a': [1, None], 'b': '\ud800ä'}))
    assert read_json(path) == {'a': [1, None], 'b': '\ud800ä'} # even text that is not valid Unicode
    assert read_json(tmp_path / 'none.json', default={'c': 1}) == {'c': 1}
    for damaged in (b'{"a": ', b'["a"]', b'\0', b'\xff', b''):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match='a.json is damaged'):
            read_json(path, default={})
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / 'none.json')


def test_the_module_imports_only_the_standard_library():
    program = 'import sys, annotated_transformer.files; print(*[m for m in ("torch", "numpy") if m in sys.modules])'
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ''
