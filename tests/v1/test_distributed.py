"Many processes, started by torchrun as a user would: the same losses as one process, a process killed, one that logs."
import json, os, shutil, signal, subprocess, sys, tempfile, time
from pathlib import Path

import psutil, pytest, safetensors.torch, torch

from annotated_transformer.v1.distributed import World
from annotated_transformer.v1.toy_languages import toy_ende
from annotated_transformer.v1.transformer import Transformer, TransformerConfig

SETTINGS = ('--corpus tsv --held-out 20 --d-model 32 --d-ff 64 --n-layers 1 --n-heads 2 --vocab-size 300 '
            '--max-tokens 512 --warmup 20 --peak-rate 3e-3 --log-every 1 --save-every 25 --max-steps 50').split()

PAIRS = Path(tempfile.mkdtemp()) / 'pairs.tsv' # few: a run starts several times in a test

@pytest.fixture(scope='module', autouse=True)
def pairs():
    PAIRS.write_text(''.join(f'{p.src}\t{p.tgt}\n' for p in toy_ende('train', n=1200)), encoding='utf-8')
    yield
    shutil.rmtree(PAIRS.parent)

def command(out, *flags, processes=1, restarts=0):
    launcher = ['-m', 'torch.distributed.run', '--standalone',
                '--nproc-per-node', str(processes), '--max-restarts', str(restarts)]
    return [sys.executable, *(launcher if processes > 1 else []), '-m', 'annotated_transformer', 'train',
            '--out', str(out), '--tsv', str(PAIRS), *SETTINGS, *flags]

def environment(): return os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=str(Path(__file__).parents[2]))

def train(out, *flags, processes=1):
    done = subprocess.run(command(out, *flags, processes=processes), env=environment(),
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done

def rows(out): return [json.loads(line) for line in (out / 'log.jsonl').read_text().splitlines()]
def weights(out): return safetensors.torch.load_file(out / 'model.safetensors')
def losses(out): return [row['loss'] for row in rows(out) if 'loss' in row]


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp('alone') / 'run'
    train(out, '--dropout', '0')
    return out

@pytest.fixture(scope='module')
def together(tmp_path_factory):
    out = tmp_path_factory.mktemp('together') / 'run'
    return out, train(out, '--dropout', '0', processes=2)

def test_two_processes_learn_what_one_does(alone, together):
    out, done = together
    assert len(losses(alone)) == 50
    torch.testing.assert_close(losses(out), losses(alone), rtol=0, atol=1e-4)
    assert losses(alone)[-1] < losses(alone)[0] - 0.5                        # and that is something
    # a key's bias shifts all scores of a query alike: its gradient is rounding noise, which Adam magnifies
    for name, w in weights(alone).items():
        if not name.endswith('key.bias'): torch.testing.assert_close(weights(out)[name], w, rtol=0, atol=1e-3)
    assert ([row['tokens'] for row in rows(out) if 'tokens' in row]
            == [row['tokens'] for row in rows(alone) if 'tokens' in row])

def test_no_step_sends_the_tables_of_positions():
    torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = Transformer(TransformerConfig(20, n_layers=1, d_model=8, d_ff=8, n_heads=2))
        assert torch.nn.parallel.DistributedDataParallel(model).will_sync_module_buffers()     # as torch would have it
        assert not World(0, 2).wrap(model).will_sync_module_buffers()
    finally: torch.distributed.destroy_process_group()

def test_one_process_speaks(together):
    out, done = together
    assert done.stdout.count('50 steps') == 1
    assert [row['step'] for row in rows(out) if 'loss' in row] == list(range(1, 51))
    assert json.loads((out / 'training.json').read_text())['progress']['step'] == 50

def test_a_run_with_dropout_repeats(tmp_path):
    first, second = tmp_path / 'first', tmp_path / 'second'
    for out in (first, second): train(out, '--dropout', '0.3', '--max-steps', '10', processes=2)
    assert (first / 'log.jsonl').read_bytes() == (second / 'log.jsonl').read_bytes()

def test_a_run_that_patience_has_ended_ends_again_when_it_is_started_again(tmp_path):
    "All processes know that it has ended, not the one alone that reads the log."
    for _ in range(2):
        train(tmp_path, '--patience', '1', '--peak-rate', '0.5', '--warmup', '1', '--save-every', '5', processes=2)
    assert rows(tmp_path)[-1]['step'] < 50

def test_a_killed_process_is_replaced_and_the_run_ends_where_it_should(tmp_path, together):
    whole, out = together[0], tmp_path / 'run'
    run = subprocess.Popen(command(out, '--dropout', '0', processes=2, restarts=2), env=environment(),
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while not (out / 'checkpoints' / 'step-00000025').exists():
        assert run.poll() is None and time.monotonic() < deadline, (
            run.communicate()[0] if run.poll() is not None else 'no checkpoint came')
        time.sleep(0.05)
    victim = next(p for p in psutil.Process(run.pid).children(recursive=True) if p.environ().get('RANK') == '1')
    victim.send_signal(signal.SIGKILL)
    said = run.communicate(timeout=300)[0]
    assert run.returncode == 0, said
    assert not victim.is_running()
    assert (out / 'log.jsonl').read_bytes() == (whole / 'log.jsonl').read_bytes()
    for name, w in weights(whole).items(): assert torch.equal(weights(out)[name], w), name
