"The command line as its users meet it: what goes wrong is one line and exit code 2, and what was there stays as it was."
import hashlib, json, os, resource, signal, subprocess, sys, time
from pathlib import Path

import pytest

from annotated_transformer.cli import main

SMALL = '--max-steps 40 --save-every 20 --d-model 32 --d-ff 64 --n-layers 1 --vocab-size 300 --max-tokens 512 --max-len 40'.split()
COMMAND = [sys.executable, '-c', 'from annotated_transformer.cli import main; main()']
PAIRS = [(f'the {noun} {verb}s .', f'{noun.upper()} {verb} t !') for noun in 'dog cat fox hen cow'.split() for verb in 'run eat sing'.split()] * 6


def write(folder, src, tgt):
    "Two parallel files, and the flags that name them."
    for name, lines in (('s.txt', src), ('t.txt', tgt)):
        (folder / name).write_bytes(b''.join(line.encode() + b'\n' if isinstance(line, str) else line + b'\n' for line in lines))
    return ['--corpus', 'files', '--src', str(folder / 's.txt'), '--tgt', str(folder / 't.txt')]

def start(args, out=subprocess.DEVNULL, **options):
    "The same command line in a process of its own."
    return subprocess.Popen([*COMMAND, *map(str, args)], stdout=out, stderr=subprocess.PIPE, text=True, **options)

def files_of(folder):
    "Every file below a folder with a hash of what it holds."
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(folder).rglob('*')) if p.is_file()}

@pytest.fixture
def fails(capsys):
    "Run a command that must fail: exit code 2 and one line, which is returned."
    def run(*args):
        with pytest.raises(SystemExit) as stop: main([str(a) for a in args])
        lines = capsys.readouterr().err.strip().splitlines()
        assert stop.value.code == 2
        assert len(lines) == 1 and lines[0].startswith('annotated-transformer: '), lines
        return lines[0]
    return run

@pytest.fixture(scope='session')
def trained(tmp_path_factory):
    "A model trained for a moment on two small files."
    folder = tmp_path_factory.mktemp('trained')
    main(['train', *write(folder, *zip(*PAIRS)), '--out', str(folder / 'run'), *SMALL])
    return folder / 'run'


@pytest.mark.parametrize('src, tgt, words', [
    ([], [], ['s.txt', 'empty']),
    (['a b'] * 30, ['x'] * 29, ['30', '29']),
    (['a b'] * 30 + [b'caf\xe9'], ['x'] * 31, ['s.txt', '31', 'UTF-8']),
    (['a b'] * 30, ['x'] * 5 + ['nul\0'] + ['x'] * 24, ['t.txt', '6', 'NUL']),
    (['a b'] * 3 + ['bare\rreturn'] + ['a'] * 26, ['x'] * 30, ['s.txt', '4', 'carriage return']),
])
def test_broken_files(fails, tmp_path, src, tgt, words):
    out = tmp_path / 'run'
    said = fails('train', *write(tmp_path, src, tgt), '--out', out, *SMALL)
    assert all(word in said for word in words), said
    assert not out.exists()                              # nothing half-made is left

def test_tsv_with_one_column(fails, tmp_path):
    (tmp_path / 'p.tsv').write_text('a\tb\nc\td\nonly\n', encoding='utf-8')
    said = fails('train', '--corpus', 'tsv', '--tsv', tmp_path / 'p.tsv', '--out', tmp_path / 'run', *SMALL)
    assert 'p.tsv' in said and '3' in said

@pytest.mark.parametrize('flags, words', [
    ('--corpus nope', ["'nope'", 'multi30k']),
    ('--corpus multi30k --pair en-xx', ["'xx'", 'de']),
    ('--preset nope', ["'nope'", 'tiny', 'base']),
    ('--d-model 0', ['d_model=0']), ('--n-layers -2', ['n_layers=-2']), ('--d-model 30 --n-heads 4', ['30', 'n_heads=4']),
    ('--dropout 1.5', ['dropout=1.5']), ('--max-tokens 0', ['max_tokens=0']), ('--warmup -1', ['warmup=-1']),
    ('--vocab-size 3', ['vocab_size=3']), ('--max-minutes 0', ['max_minutes=0']), ('--norm none', ["'none'", 'post']),
    ('--d-model x', ['d-model']), ('--no-such-flag 1', ['no-such-flag']),
    ('--corpus files', ['files', 'src']), ('--corpus multi30k --data-dir no/such/folder', ['no/such/folder']),
])
def test_settings_that_cannot_be(fails, tmp_path, flags, words):
    said = fails('train', '--out', tmp_path / 'run', *flags.split())
    assert all(word in said for word in words), said
    assert not (tmp_path / 'run').exists()

def test_unknown_split_and_pair(fails, trained):
    said = fails('evaluate', '--model', trained, '--split', 'exam')
    assert "'exam'" in said and 'val' in said
    assert 'de-en' in fails('evaluate', '--model', trained, '--corpus', 'toy-ende', '--pair', 'de-en')

def test_no_model(fails, tmp_path, trained):
    assert 'is no model folder' in fails('translate', '--model', tmp_path, 'hello')
    for name in ('config.json', 'model.safetensors', 'tokenizer.json'):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    config = json.loads((tmp_path / 'config.json').read_text())
    (tmp_path / 'config.json').write_text(json.dumps(config | {'d_ff': 128}))
    said = fails('translate', '--model', tmp_path, 'hello')
    assert 'does not fit' in said and 'model.safetensors' in said
    (tmp_path / 'config.json').write_text(json.dumps(config))
    (tmp_path / 'tokenizer.json').write_text('{}')
    assert 'tokenizer.json' in fails('translate', '--model', tmp_path, 'hello')

def test_translates_every_line(trained, capsys, monkeypatch):
    class Stdin:
        buffer = [b'the dog runs .\n', b'\n', b'  \n', '☃ naïve\r\n'.encode(), b'the cat eats .']
        @staticmethod
        def isatty(): return False
    monkeypatch.setattr(sys, 'stdin', Stdin)
    main(['translate', '--model', str(trained)])
    lines = capsys.readouterr().out.split('\n')
    assert len(lines) == 6 and lines[1] == lines[2] == lines[5] == ''
    main(['translate', '--model', str(trained), 'the dog runs .'])
    assert capsys.readouterr().out == lines[0] + '\n'

def test_too_long_is_cut_and_said(trained):
    run = start(['translate', '--model', trained, 'the dog runs . ' * 50, '--max-extra', '3'], out=subprocess.PIPE)
    out, err = run.communicate()
    assert run.returncode == 0 and len(out.splitlines()) == 1
    assert len(err.splitlines()) == 1 and 'cut' in err and '39' in err

def test_stdin_that_is_no_text(fails, trained, monkeypatch):
    class Stdin:
        buffer = [b'fine\n', b'\xff\xfe\n']
        @staticmethod
        def isatty(): return False
    monkeypatch.setattr(sys, 'stdin', Stdin)
    assert 'line 2' in fails('translate', '--model', trained)

def test_evaluate_prints_one_json_object(trained, capsys, tmp_path):
    main(['evaluate', '--model', str(trained), '--split', 'test', '--json', '--output', str(tmp_path / 'out.txt')])
    result = json.loads(capsys.readouterr().out)
    assert {'bleu', 'signature', 'chrf', 'sentences', 'seconds'} <= result.keys()
    assert len((tmp_path / 'out.txt').read_text().splitlines()) == result['sentences'] > 0

def test_other_settings_are_refused_and_nothing_changes(fails, trained):
    flags = ['--corpus', 'files', '--src', trained.parent / 's.txt', '--tgt', trained.parent / 't.txt', '--out', trained, *SMALL]
    before = files_of(trained)
    said = fails('train', *flags, '--warmup', '9')
    assert 'warmup' in said and '9 here' in said and '--overwrite' in said
    assert files_of(trained) == before
    main(['train', *map(str, flags)])                    # the same settings: finished, nothing to do
    assert files_of(trained) == before

def test_a_stranger_folder_is_not_touched(fails, tmp_path):
    (tmp_path / 'thesis.txt').write_text('mine')
    assert 'holds no run' in fails('train', *write(tmp_path, *zip(*PAIRS)), '--out', tmp_path, *SMALL)
    assert (tmp_path / 'thesis.txt').read_text() == 'mine'


def test_killed_and_resumed_ends_the_same(tmp_path):
    flags = [*write(tmp_path, *zip(*PAIRS)), *SMALL, '--max-steps', '400']
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    assert start(['train', *flags, '--out', whole]).wait() == 0
    run = start(['train', *flags, '--out', killed])
    while not list(killed.glob('checkpoints/step-*0')): time.sleep(0.01); assert run.poll() is None
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not (killed / 'training.json').exists()
    assert start(['train', *flags, '--out', killed]).wait() == 0
    assert (whole / 'model.safetensors').read_bytes() == (killed / 'model.safetensors').read_bytes()

def test_no_room_on_the_disk(tmp_path):
    flags = [*write(tmp_path, *zip(*PAIRS)), '--out', tmp_path / 'run', *SMALL, '--max-steps', '200']
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))   # the weights are larger
    run = start(['train', *flags], preexec_fn=limit)
    said = run.communicate()[1].strip().splitlines()[-1]
    assert run.returncode == 2 and said.startswith('annotated-transformer: ') and 'model.safetensors' in said, said
    assert not list((tmp_path / 'run').rglob('*.safetensors'))
    assert start(['train', *flags]).wait() == 0          # with room again, the same command goes on
