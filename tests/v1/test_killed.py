"""Training that is killed, stopped, out of room or fed nonsense, met from the command line:
it says so in a line, and goes on exactly.
"""
import contextlib, json, os, re, resource, shutil, signal, subprocess, sys, time
from pathlib import Path

import pytest, torch

from annotated_transformer.v1.checkpoints import checkpoints, latest, load_state
from annotated_transformer.v1.cli import main

ROOT = Path(__file__).resolve().parents[2]
THREADS = dict(os.environ, OMP_NUM_THREADS=str(torch.get_num_threads()))


# --- SIGKILL: benchmarks/kills.py does it, here at two sizes

def kills(tmp_path, *flags):
    record = tmp_path / 'kills.json'
    done = subprocess.run([sys.executable, str(ROOT / 'benchmarks/kills.py'), '--record', str(record), *flags],
                          env=THREADS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(record.read_text())

def test_killed_at_random_moments_ends_bit_identical(tmp_path):
    record = kills(tmp_path, '--kills', '4', '--steps', '30')
    assert record['result']['kills'] == 4 and record['result']['files_that_differ'] == 0
    # just before a sync or a rename
    assert sum(kill['aimed_at'] is not None for kill in record['kills']) == 2

@pytest.mark.full
def test_killed_at_twenty_random_moments_ends_bit_identical(tmp_path):
    record = kills(tmp_path, '--kills', '20', '--seed', '7')
    assert record['result']['kills'] == 20 and record['result']['files_that_differ'] == 0
    assert record['result']['while_saving'] > 3

@pytest.mark.full
def test_killed_while_finishing_ends_bit_identical(tmp_path):
    "A run so short that most kills fall into its last save, its choice of weights, or the finished model."
    assert kills(tmp_path, '--kills', '30', '--steps', '10', '--seed', '3')['result']['files_that_differ'] == 0


# --- one run, and all that can happen to it

PAIRS = [(f'the {noun} {verb}s .', f'{noun.upper()} {verb} t !')
         for noun in 'dog cat fox hen cow'.split() for verb in 'run eat sing'.split()] * 6

@pytest.fixture(scope='module')
def flags(tmp_path_factory):
    "The flags of a run of some seconds, all but its --out."
    folder = tmp_path_factory.mktemp('pairs')
    for name, lines in zip(('s.txt', 't.txt'), zip(*PAIRS)): (folder / name).write_text('\n'.join(lines) + '\n')
    sizes = ('--max-steps 150 --max-epochs 1000 --save-every 15 --log-every 5 '
             '--d-model 32 --d-ff 64 --n-layers 1 --vocab-size 300 --max-tokens 256 --max-len 40')
    return ['train', '--corpus', 'files', '--src', str(folder / 's.txt'), '--tgt', str(folder / 't.txt'),
            *sizes.split()]

@pytest.fixture(scope='module')
def whole(flags, tmp_path_factory):
    "What the run makes if nothing happens to it."
    out = tmp_path_factory.mktemp('whole') / 'run'
    main([*flags, '--out', str(out)])
    return out

def same(out, whole):
    "Weights, optimizer state and log, byte for byte."
    assert [p.name for p in checkpoints(out)] == [p.name for p in checkpoints(whole)]
    names = ['log.jsonl', 'model.safetensors', 'config.json', 'tokenizer.json']
    names += [f'checkpoints/{p.name}/{name}' for p in checkpoints(whole) for name in ('model.safetensors', 'state.pt')]
    assert [name for name in names if (out / name).read_bytes() != (whole / name).read_bytes()] == []

def signalled(flags, out, number):
    "The run in a process of its own that gets a signal after its first checkpoint; its exit code, and what it said."
    run = subprocess.Popen([sys.executable, '-m', 'annotated_transformer', *flags, '--out', str(out)],
                           cwd=ROOT, env=THREADS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not checkpoints(out) and run.poll() is None: time.sleep(0.005)
    run.send_signal(number)
    said = run.communicate(timeout=120)[0]
    return run.returncode, said

@pytest.fixture
def fails(capsys):
    "Run a command that must fail: exit code 2 and one line, which is returned."
    def run(*args):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop: main([str(a) for a in args])
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith('annotated-transformer: ')]
        assert stop.value.code == 2 and len(lines) == 1, lines
        return lines[0]
    return run

@pytest.mark.parametrize('number, code', [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=['Ctrl-C', 'SIGTERM'])
def test_asked_to_stop_saves_and_says_how_to_go_on(flags, whole, tmp_path, number, code):
    out = tmp_path / 'run'
    exit_code, said = signalled(flags, out, number)
    assert exit_code == code, said
    line = said.strip().splitlines()[-1]
    step = re.search(r'step (\d+) is saved', line)
    assert line.startswith('annotated-transformer: ') and str(out) in line and 'same command' in line and step, said
    assert 'Traceback' not in said
    assert latest(out).name == f'step-{int(step[1]):08d}' and not (out / 'training.json').exists()
    main([*flags, '--out', str(out)])
    same(out, whole)

@contextlib.contextmanager
def small_files(limit):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try: yield
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, before)

def unfinished(whole, out, step):
    "A run's folder as it was when `step` had just been saved."
    shutil.copytree(whole, out)
    for name in ('training.json', 'model.safetensors', 'config.json'): (out / name).unlink()
    kept = [p for p in checkpoints(out) if int(p.name[5:]) <= step]
    for folder in checkpoints(out):
        if folder not in kept: shutil.rmtree(folder)
    return kept[-1]

def test_no_room_and_room_again(flags, whole, tmp_path, fails):
    "The last good checkpoint stays, and the run goes on from it."
    out = tmp_path / 'run'
    last = unfinished(whole, out, 120)
    with small_files((last / 'model.safetensors').stat().st_size - 1): said = fails(*flags, '--out', out)
    assert ('could not be written: File too large (model.safetensors)' in said
            and f'{last.name}, the last one, is untouched' in said)
    assert latest(out) == last
    assert not list(out.rglob('*.partial')) and not list(out.rglob('.*.tmp'))
    main([*flags, '--out', str(out)])
    same(out, whole)

def mount(*args): return subprocess.run(['mount', *map(str, args)], capture_output=True).returncode == 0

@contextlib.contextmanager
def small_disk(at, size):
    "A disk of its own for those who may mount one, else nothing. Yields whether there is one."
    at.mkdir()
    mounted = mount('-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', at)
    try: yield mounted
    finally:
        if mounted: subprocess.run(['umount', str(at)], check=True)

def test_a_full_disk(flags, whole, tmp_path, fails):
    """It fills up after some checkpoints; with a stranger's file removed the run goes on.
    Elsewhere: a limit on the log's size.
    """
    with small_disk(tmp_path / 'disk', '4m') as mounted:
        out, ballast = tmp_path / 'disk' / 'run', tmp_path / 'disk' / 'ballast'
        last = unfinished(whole, out, 120)
        if mounted:
            size = sum(p.stat().st_size for p in last.iterdir())
            free = shutil.disk_usage(out).free
            ballast.write_bytes(bytes(free - size // 2))
            said = fails(*flags, '--out', out)
            assert 'No space left on device' in said and f'{last.name}, the last one, is untouched' in said, said
        else:
            with small_files((out / 'log.jsonl').stat().st_size - 200): said = fails(*flags, '--out', out)
            assert 'File too large' in said and 'log.jsonl' in said
        assert latest(out) == last and not list(out.rglob('.*.tmp'))
        ballast.unlink(missing_ok=True)
        main([*flags, '--out', str(out)])
        same(out, whole)

@contextlib.contextmanager
def read_only(folder):
    """A folder that nobody may write to: mounted so for the superuser, who may write everywhere;
    by its rights for others.
    """
    if os.geteuid():
        rights = {p: p.stat().st_mode for p in [folder, *folder.rglob('*')] if p.is_dir()}
        for p in rights: p.chmod(0o500)
        try: yield True
        finally:
            for p, mode in rights.items(): p.chmod(mode)
    elif mount('--bind', folder, folder):
        try:
            yield mount('-o', 'remount,ro,bind', folder)
        finally: subprocess.run(['umount', str(folder)], check=True)
    else: yield False

def test_a_read_only_folder(flags, whole, tmp_path, fails):
    "Its files stay as they are. And a file in the checkpoints' place, which stops even a superuser who may not mount."
    out = tmp_path / 'run'
    last = unfinished(whole, out, 120)
    before = {p: p.read_bytes() for p in out.rglob('*') if p.is_file()}
    with read_only(out) as so:
        if so:
            said = fails(*flags, '--out', out)
            assert str(out) in said and re.search('Read-only file system|Permission denied', said), said
            assert latest(out) == last                                                   # reading it is still allowed
    if so: assert {p: p.read_bytes() for p in out.rglob('*') if p.is_file()} == before
    other = tmp_path / 'other'
    shutil.copytree(out, other, ignore=shutil.ignore_patterns('checkpoints'))
    (other / 'checkpoints').write_text('in the way')
    assert 'checkpoints/step-00000015 could not be written' in fails(*flags, '--out', other)
    main([*flags, '--out', str(out)])
    same(out, whole)

def test_a_damaged_checkpoint(flags, whole, tmp_path, fails):
    out = tmp_path / 'run'
    last = unfinished(whole, out, 120)
    before, weights = checkpoints(out)[-2], last / 'model.safetensors'
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 16
    weights.write_bytes(data)
    said = fails(*flags, '--out', out)
    assert (f'{last.name}/model.safetensors is damaged' in said
            and f'{before.name}, before it, is whole: delete {last.name}' in said)
    assert (out / 'checkpoints' / last.name).exists()                                    # a person decides
    shutil.rmtree(last)
    main([*flags, '--out', str(out)])
    same(out, whole)

def test_half_a_line_in_the_log(flags, whole, tmp_path):
    out = tmp_path / 'run'
    unfinished(whole, out, 120)
    for name in ('log.jsonl', 'clock.jsonl'):
        with open(out / name, 'rb+') as file: file.truncate((out / name).stat().st_size - 9)
    main([*flags, '--out', str(out)])
    same(out, whole)

def test_a_loss_that_is_no_number(flags, tmp_path, fails):
    out = tmp_path / 'run'
    said = fails(*flags, '--peak-rate', '1e38', '--warmup', '1', '--clip-norm', '1e9', '--out', out)
    found = re.search(r'step (\d+), batch (\d+) of epoch 0: '
                      r'the (?:loss is|gradient is) (?:nan|inf).* at rate (\S+)', said)
    assert found and int(found[1]) == int(found[2]) + 1 and float(found[3].rstrip(',;')) > 1e37, said
    assert latest(out).name == f'step-{int(found[1]) - 1:08d}'
    state = load_state(latest(out) / 'state.pt')['optimizer']['state'].values()
    assert all(number.isfinite().all() for numbers in state for number in numbers.values())
    assert not (out / 'training.json').exists()
