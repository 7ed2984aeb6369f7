"`torchrun` restarts processes that die, and adds and removes machines: the run resumes from its last checkpoint."
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason='this PyTorch has no torch.distributed'),
]

# `train`, with one process that kills itself at a step, or with steps that wait for something to happen
SCRIPT = '''
import os
import signal
import sys
import time
from pathlib import Path
from annotated_transformer.cli import main
from annotated_transformer.trainer import Stepper

folder = Path(sys.argv[1])
size = int(os.environ['WORLD_SIZE'])
(folder / f'worker-of-{os.getppid()}').write_text(str(os.getpid()))
take_step = Stepper.step

def step(self, batches):
    step = self.progress.step + 1
    if step == 25 and (folder / 'kill').exists() and self.processes.rank == 1:
        while not (folder / 'run/checkpoints/step-00000020').exists(): # a thread writes it
            time.sleep(0.05)
        (folder / 'kill').unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if (step, size) in ((15, 1), (25, 2), (45, 1)) and (folder / 'pause').exists(): # until a machine comes or leaves
        (folder / f'at-{step}-of-{size}').touch()
        while not (folder / 'left').exists() if size == 2 else not self.received_signals:
            time.sleep(0.05)
    with open(folder / 'steps', 'a') as file:
        file.write(f'{step} {size}\\n')
    take_step(self, batches)

Stepper.step = step
main(sys.argv[2:])
'''
SETTINGS = ('--tokenizer words --held-out 4 --max-len 12 --vocab-size 60 --positions sinusoidal '
            '--n-layers 1 --d-model 16 --d-ff 32 --n-heads 2 --max-tokens 64 --global-tokens 128 '
            '--max-steps 60 --save-every 10 --log-every 10 --warmup-steps 20 --device cpu --overwrite').split()
PAIRS = ''.join(f'w{n % 7} w{n % 11} w{n % 13} w{n}\tw{n} w{n % 13} w{n % 11} w{n % 7}\n' for n in range(40))


def make_folder(folder, *files):
    folder.mkdir()
    (folder / 'script.py').write_text(SCRIPT)
    (folder.parent / 'pairs.tsv').write_text(PAIRS)
    for name in files:
        (folder / name).touch()
    return folder


def torchrun(folder, *launch_options, settings=()):
    env = os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1'}
    command = [sys.executable, '-m', 'torch.distributed.run', '--monitor-interval', '0.1', *launch_options,
               str(folder / 'script.py'), str(folder), 'train', '--tsv', str(folder.parent / 'pairs.tsv'), '--out',
               str(folder / 'run'), *SETTINGS, *settings]
    with open(folder / 'errors', 'a') as errors:
        return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=errors)


def kill_machine(process, folder):
    "Kill an agent, and the process that it has started last."
    if process is not None and process.poll() is None:
        process.kill()
        process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((folder / f'worker-of-{process.pid}').read_text()), signal.SIGKILL)


def finish(process, folder):
    try:
        code = process.wait(timeout=240)
    finally:
        kill_machine(process, folder)
    assert code == 0, (folder / 'errors').read_text()[-3000:]


def wait_for(path, folder):
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, (folder / 'errors').read_text()[-3000:]
        time.sleep(0.05)


def read_steps(folder):
    return [tuple(map(int, line.split())) for line in (folder / 'steps').read_text().splitlines()]


def losses(folder):
    rows = map(json.loads, (folder / 'run' / 'log.jsonl').read_text().splitlines())
    return [row['loss'] for row in rows if 'loss' in row]


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp('undisturbed') / 'two')
    finish(torchrun(folder, '--standalone', '--nproc-per-node', '2'), folder)
    return folder


@pytest.mark.parametrize('attempt', range(3))
def test_killed_process_resumes_from_the_last_checkpoint(undisturbed, tmp_path, attempt):
    "With `--overwrite`, which a restart must not repeat. Several times: a rendezvous may fail by chance."
    folder = make_folder(tmp_path / 'killed', 'kill')
    finish(torchrun(folder, '--standalone', '--nproc-per-node', '2', '--max-restarts', '1'), folder)
    assert not (folder / 'kill').exists()
    rank_0 = [step for step, _ in read_steps(folder)]
    assert rank_0.count(20) == 2 and rank_0.count(21) == 4 # both processes, once more after step 20
    assert (folder / 'run' / 'log.jsonl').read_bytes() == (undisturbed / 'run' / 'log.jsonl').read_bytes()
    found, expected = [load_file(path / 'run' / 'model.safetensors') for path in (folder, undisturbed)]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize('attempt', range(2))
def test_run_goes_on_when_machines_come_and_leave(tmp_path, attempt):
    """1, 2, 1 and 2 machines, each an agent of `torchrun`. With `--overwrite`, which a resize must not repeat.

    A machine that comes does not count as a restart. Without dropout, so that the losses are those of one process.
    """
    with socket.socket() as found:
        found.bind(('localhost', 0))
        port = found.getsockname()[1]
    alone = make_folder(tmp_path / 'alone')
    finish(torchrun(alone, '--standalone', '--nproc-per-node', '1', settings=['--dropout', '0']), alone)
    folder = make_folder(tmp_path / 'resized', 'pause')
    options = ['--nnodes', '1:2', '--nproc-per-node', '1', '--max-restarts', '3', '--rdzv-backend', 'c10d',
               '--rdzv-endpoint', f'localhost:{port}', '--rdzv-id', 'resized', '--local-addr', 'localhost',
               '--rdzv-conf', 'last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3']
    first = torchrun(folder, *options, settings=['--dropout', '0'])
    second = None
    try:
        wait_for(folder / 'at-15-of-1', folder)
        second = torchrun(folder, *options, settings=['--dropout', '0'])
        wait_for(folder / 'at-25-of-2', folder)
        kill_machine(second, folder)
        (folder / 'left').touch()
        wait_for(folder / 'at-45-of-1', folder)
        second = torchrun(folder, *options, settings=['--dropout', '0'])
        finish(first, folder)
        finish(second, folder)
    finally:
        for process in (first, second):
            kill_machine(process, folder)
    steps = read_steps(folder)
    assert steps.count((10, 1)) == 1 and (10, 2) not in steps # nothing was started over
    sizes = dict(steps) # the last that took each step
    assert (sizes[20], sizes[40], sizes[60]) == (2, 1, 2)
    torch.testing.assert_close(torch.tensor(losses(folder)), torch.tensor(losses(alone)), rtol=0, atol=1e-4)
