"Several processes make the steps of one."
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from annotated_transformer import kernels
from annotated_transformer.checkpoints import load_state, read_log
from annotated_transformer.distributed import Processes, init_process_group
from annotated_transformer.run_reports import batch_sizes
from annotated_transformer.train_config import TrainConfig

ROOT = Path(__file__).resolve().parents[1]
needs_distributed = pytest.mark.skipif(not torch.distributed.is_available(), reason='this PyTorch has no torch.distributed')


def test_alone_nothing_is_communicated():
    alone = Processes()
    layer = torch.nn.Linear(2, 2)
    assert alone.is_main_process and alone.all_reduce_sum(1, 2.5) == [1.0, 2.5]
    assert type(alone.adam(layer.parameters(), shard=True, lr=0.1)) is torch.optim.Adam
    assert alone.wrap(layer) is layer and not alone.any(False) and alone.any(True)
    alone.barrier()
    alone.broadcast_parameters(layer)
    with alone.no_sync(layer):
        pass


def test_a_process_started_by_itself_is_alone(monkeypatch):
    monkeypatch.delenv('WORLD_SIZE', raising=False)
    assert init_process_group() == Processes()
    assert Processes().job is None and not Processes().restarted
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'en-de')
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '2')
    assert Processes().job == 'en-de' and Processes().restarted


def test_restarts_need_a_new_rendezvous_store(monkeypatch):
    "In a shared one, restarted processes find the addresses of those that died."
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setenv('TORCHELASTIC_MAX_RESTARTS', '3')
    monkeypatch.setenv('TORCHELASTIC_USE_AGENT_STORE', 'True')
    with pytest.raises(ValueError, match='run torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1'):
        init_process_group()


@pytest.mark.parametrize('n_processes, wanted, text', [
    (1, None, 'at most 100 tokens'), (1, 400, 'at most 100 tokens, 400 in a step'),
    (2, None, 'at most 100 tokens, shared by 2 processes'),
    (2, 400, 'at most 100 tokens in each of 2 processes, 400 in a step'),
    (2, 300, 'at most 100 tokens, shared by 2 processes, 300 in a step')])
def test_report_tells_the_batch_of_a_process_and_of_a_step(n_processes, wanted, text):
    assert batch_sizes(TrainConfig(max_tokens=100, global_tokens=wanted), n_processes) == text


SCRIPT = '''
import torch
from annotated_transformer import kernels
from annotated_transformer.distributed import destroy_process_group, init_process_group
from annotated_transformer.loader import TrainingLoader
from annotated_transformer.trainer import LossModule, TrainConfig, next_step, train_step
from annotated_transformer.training import make_optimizer
from annotated_transformer.transformer import Transformer, TransformerConfig

processes = init_process_group()
assert processes.all_reduce_sum(processes.rank)[0] == sum(range(processes.size))
generator = torch.Generator().manual_seed(0)
lengths = torch.randint(2, 12, (200,), generator=generator).tolist()
rows = [torch.randint(4, 20, (n,), generator=generator).tolist() for n in lengths]
torch.manual_seed(processes.rank) # wrapping gives all processes the weights of rank 0
model = Transformer(TransformerConfig(vocab_size=20, n_layers=1, d_model=16, d_ff=32, n_heads=2, dropout=0.0))
model.double()
loader = TrainingLoader([(row, row) for row in rows], 200, rank=processes.rank, world_size=processes.size)
loss_module = processes.wrap(LossModule(model, TrainConfig()))
optimizer = make_optimizer(model)
batches = iter(loader.epoch(0))
losses = []
for _ in range(2): # the processes share each batch
    losses.append(train_step(loss_module, [next(batches), next(batches)], optimizer, 1e-3, processes=processes))
loader = TrainingLoader([(row, row) for row in rows], 200, rank=processes.rank, world_size=processes.size,
                        batches_per_step=2)
batches = loader.epoch(0, start=4)
for _ in range(2): # each process has a batch of its own
    step_batches = next_step(batches, 2)
    assert len(step_batches) == 2 // processes.size
    losses.append(train_step(loss_module, step_batches, optimizer, 1e-3, processes=processes))
assert processes.gather([n * n for n in processes.share(range(7))]) == [n * n for n in range(7)]
assert processes.broadcast(processes.rank) == 0
validated = []
def counted_loss(model, batch, summed_loss=kernels.summed_loss):
    validated.append(batch)
    return summed_loss(model, batch)
kernels.summed_loss = counted_loss
val_batches = list(TrainingLoader([(row, row) for row in rows], 200, shuffle=False).epoch(0))
losses.append(kernels.validate(model, val_batches, processes))
assert len(validated) == len(processes.share(val_batches)) # no process waits for one that validates alone
weights = sum(p.double().sum().item() for p in model.parameters())
assert abs(processes.all_reduce_sum(weights)[0] / processes.size - weights) < 1e-12
if processes.is_main_process:
    print(*losses)
loss_module = None
destroy_process_group(processes)
'''


def start(rank, port, path, *args):
    "Start one of two processes as `torchrun` does."
    env = os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'WORLD_SIZE': '2', 'RANK': str(rank),
                        'LOCAL_RANK': str(rank), 'MASTER_ADDR': 'localhost', 'MASTER_PORT': str(port)}
    return subprocess.Popen([sys.executable, str(path), *args], env=env, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def start_two(path, *args):
    with socket.socket() as found:
        found.bind(('localhost', 0))
        port = found.getsockname()[1]
    return [start(rank, port, path, *args) for rank in (0, 1)]


@needs_distributed
def test_two_processes_make_the_steps_of_one(tmp_path, capsys):
    "With two accumulated batches for each step; then they validate together."
    path = tmp_path / 'steps.py'
    path.write_text(SCRIPT)
    started = start_two(path)
    summed_loss = kernels.summed_loss
    runpy.run_path(str(path)) # alone, in this process
    kernels.summed_loss = summed_loss
    alone = [float(loss) for loss in capsys.readouterr().out.split()]
    outputs = [process.communicate(timeout=120) for process in started]
    for process, (_, errors) in zip(started, outputs):
        assert process.returncode == 0, errors[-2000:]
    together = [float(loss) for loss in outputs[0][0].split()]
    assert len(alone) == 5
    torch.testing.assert_close(torch.tensor(together, dtype=torch.float64), torch.tensor(alone, dtype=torch.float64),
                               rtol=1e-9, atol=0)


RUN = '''
import json
import sys
from dataclasses import replace
import torch
import torch.distributed as dist
from annotated_transformer.distributed import destroy_process_group, init_process_group
from annotated_transformer.kernels import accelerate
from annotated_transformer.loader import TrainingLoader
from annotated_transformer.trainer import TrainConfig, Trainer
from annotated_transformer.transformer import PRESETS, Transformer

calls = []
def counted(function):
    def call(*args, **options):
        calls.append(function.__name__)
        return function(*args, **options)
    return call
for name in dir(dist.distributed_c10d):
    if name.startswith(('all_', 'barrier', 'broadcast', 'gather', 'reduce', 'scatter', 'send', 'recv', 'isend', 'irecv')):
        setattr(dist, name, counted(getattr(dist, name))) # DistributedDataParallel exchanges the gradient below these

class CountingTrainer(Trainer):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.found = []

    def train_epoch(self):
        calls.clear()
        super().train_epoch()

    def log_step(self):
        self.found.append([self.progress.loss_sum / self.progress.loss_tokens, len(calls)])
        super().log_step()
        calls.clear()

processes = init_process_group()
generator = torch.Generator().manual_seed(0)
lengths = torch.randint(2, 12, (600,), generator=generator).tolist()
rows = [[4 + (n * n + k) % 96 for k in range(n)] for n in lengths] # words that follow one another
torch.manual_seed(0)
small = replace(PRESETS['toy'], vocab_size=100, d_model=32, d_ff=64, dropout=0.0, max_len=20)
model = accelerate(Transformer(small)).double()
loader = TrainingLoader([(row, row[::-1]) for row in rows], 192, rank=processes.rank, world_size=processes.size)
val_batches = list(TrainingLoader([(row, row[::-1]) for row in rows[:9]], 128, shuffle=False).epoch(0))
config = TrainConfig(192, max_steps=200, save_every=200, log_every=1, warmup_steps=60, peak_lr=1e-2)
trainer = CountingTrainer(model, loader, val_batches, config, sys.argv[1], progress_bar=False, processes=processes)
trainer.fit()
if processes.is_main_process:
    print(json.dumps(trainer.found))
destroy_process_group(processes)
'''


@pytest.mark.slow
@needs_distributed
def test_a_run_on_two_processes_has_the_losses_of_one(tmp_path):
    """A small model, 200 steps in ten epochs. Beside the gradient, a step exchanges the loss, and clock and signals.

    In float64: in float32, rounding grows from step to step.
    """
    path = tmp_path / 'run.py'
    path.write_text(RUN)
    started = start_two(path, str(tmp_path / 'two'))
    outputs = [process.communicate(timeout=500) for process in started]
    for process, (_, errors) in zip(started, outputs):
        assert process.returncode == 0, errors[-2000:]
    alone = subprocess.run([sys.executable, str(path), str(tmp_path / 'one')], check=True, stdout=subprocess.PIPE,
                           env=os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}, text=True, timeout=500)
    one, two = [json.loads(text.splitlines()[-1]) for text in (alone.stdout, outputs[0][0])]
    assert len(one) == len(two) == 200 and one[-1][0] < one[0][0] - 0.5
    assert max(abs(a - b) for (a, _), (b, _) in zip(one, two)) < 1e-4
    assert all(n_calls == 0 for _, n_calls in one) and all(1 <= n_calls <= 2 for _, n_calls in two)


SHARDED = '''
import json
import sys
import torch
from annotated_transformer.checkpoints import read_log
from annotated_transformer.distributed import destroy_process_group, init_process_group
from annotated_transformer.loader import TrainingLoader
from annotated_transformer.trainer import TrainConfig, Trainer
from annotated_transformer.transformer import Transformer, TransformerConfig

out, shard, max_steps = sys.argv[1], sys.argv[2] == 'True', int(sys.argv[3])
processes = init_process_group()
rows = [[4 + (n * n + k) % 16 for k in range(2 + n % 9)] for n in range(200)]
torch.manual_seed(0)
model = Transformer(TransformerConfig(vocab_size=20, n_layers=1, d_model=16, d_ff=32, n_heads=2, dropout=0.0)).double()
loader = TrainingLoader([(row, row) for row in rows], 128, rank=processes.rank, world_size=processes.size)
val_batches = list(TrainingLoader([(row, row) for row in rows[:9]], 128, shuffle=False).epoch(0))
config = TrainConfig(128, max_steps=max_steps, save_every=10, log_every=1, warmup_steps=20, peak_lr=1e-2,
                     shard_optimizer=shard)
trainer = Trainer(model, loader, val_batches, config, out, progress_bar=False, processes=processes)
trainer.fit()
n_numbers = sum(value.numel() for state in getattr(trainer.optimizer, 'optim', trainer.optimizer).state.values()
                for value in state.values())
print(n_numbers)
trainer = None
destroy_process_group(processes)
'''


@pytest.mark.slow
@needs_distributed
def test_sharded_optimizer_takes_the_same_steps_with_half_of_the_state(tmp_path):
    "Its checkpoint is the usual one: other runs resume from it, with and without sharding, on one process or two."
    path = tmp_path / 'run.py'
    path.write_text(SHARDED)

    def run(name, shard, max_steps, n=2):
        args = (str(tmp_path / name), str(shard), str(max_steps))
        if n == 1:
            env = os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
            started = [subprocess.Popen([sys.executable, str(path), *args], env=env, text=True, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE)]
        else:
            started = start_two(path, *args)
        outputs = [process.communicate(timeout=300) for process in started]
        for process, (_, errors) in zip(started, outputs):
            assert process.returncode == 0, errors[-2000:]
        rows = [row['loss'] for row in read_log(tmp_path / name / 'log.jsonl') if 'loss' in row]
        return torch.tensor(rows, dtype=torch.float64), [int(printed) for printed, _ in outputs]

    def state(name):
        return load_state(tmp_path / name / 'checkpoints/step-00000020/state.pt')['optimizer']

    whole, n_whole = run('whole', False, 20)
    sharded, n_sharded = run('sharded', True, 20)
    torch.testing.assert_close(sharded, whole, rtol=1e-9, atol=0)
    assert max(n_sharded) < 0.7 * n_whole[0] and sum(n_sharded) == n_whole[0]
    torch.testing.assert_close(state('sharded')['state'], state('whole')['state'])
    expected, _ = run('whole', False, 30)
    shutil.copytree(tmp_path / 'sharded', tmp_path / 'alone')
    for found, _ in (run('sharded', True, 30), run('alone', False, 30, n=1)):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


COMPILED = '''
import json
import sys
from functools import partial
from unittest import mock
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from annotated_transformer.distributed import destroy_process_group, init_process_group
from annotated_transformer.kernels import LossModule, accelerate
from annotated_transformer.loader import TrainingLoader
from annotated_transformer.trainer import TrainConfig, train_step
from annotated_transformer.training import make_optimizer
from annotated_transformer.transformer import Transformer, TransformerConfig

compiled, splits = [argument == 'True' for argument in sys.argv[1:]]
torch._dynamo.config.optimize_ddp = splits
events = []

def compiler(name):
    "A compiler that leaves graphs as they are, and notes when they run."
    def compile_graph(graph, inputs):
        def run(*args):
            events.append(name)
            return graph(*args)
        return make_boxed_func(run)
    return compile_graph

def note_bucket(group, bucket):
    events.append('bucket')
    return allreduce_hook(group, bucket)

backend = aot_autograd(fw_compiler=compiler('forward'), bw_compiler=compiler('backward'))
small_buckets = partial(torch.nn.parallel.DistributedDataParallel, bucket_cap_mb=1)
processes = init_process_group()
generator = torch.Generator().manual_seed(0)
lengths = torch.randint(2, 12, (100,), generator=generator).tolist()
rows = [torch.randint(4, 20, (n,), generator=generator).tolist() for n in lengths]
torch.manual_seed(0)
config = TransformerConfig(vocab_size=20, n_layers=1, d_model=128, d_ff=512, n_heads=2, dropout=0.0) # 4 MiB
model = accelerate(Transformer(config)).double().train()
loader = TrainingLoader([(row, row) for row in rows], 128, rank=processes.rank, world_size=processes.size,
                        pad_to_multiple_of=4)
with mock.patch.object(torch, 'compile', partial(torch.compile, backend=backend)):
    loss_module = LossModule(model, TrainConfig(compile=compiled))
with mock.patch.object(torch.nn.parallel, 'DistributedDataParallel', small_buckets):
    loss_module = processes.wrap(loss_module)
loss_module.register_comm_hook(None, note_bucket)
optimizer = make_optimizer(model)
losses = []
shapes = set()
for _, batch in zip(range(6), loader.epoch(0)):
    events.clear()
    shapes.add(batch.src.shape)
    losses.append(train_step(loss_module, [batch], optimizer, 1e-3, processes=processes))
assert len(shapes) > 1
print(json.dumps({'losses': losses, 'events': events}))
loss_module = None
destroy_process_group(processes)
'''


@pytest.mark.slow
@needs_distributed
def test_compiled_model_communicates_during_the_backward_pass(tmp_path):
    """PyTorch splits the compiled model at buckets. Unsplit, it returns all gradients when the backward pass has ended.

    The losses are those without compilation, also when the shapes of batches change.
    """
    path = tmp_path / 'run.py'
    path.write_text(COMPILED)

    def run(compiled, splits=True):
        started = start_two(path, str(compiled), str(splits))
        outputs = [process.communicate(timeout=500) for process in started]
        for process, (_, errors) in zip(started, outputs):
            assert process.returncode == 0, errors[-2000:]
        return json.loads(outputs[0][0].splitlines()[-1])

    plain = run(False)
    assert set(plain['events']) == {'bucket'}
    found = run(True)
    torch.testing.assert_close(torch.tensor(found['losses'], dtype=torch.float64),
                               torch.tensor(plain['losses'], dtype=torch.float64), rtol=1e-9, atol=0)
    events = found['events']
    last_backward = len(events) - 1 - events[::-1].index('backward')
    assert events.count('backward') > 2 and events.index('bucket') < last_backward, events
    unsplit = [event for event in run(True, splits=False)['events'] if event != 'forward']
    assert unsplit[0] == 'backward' and set(unsplit[1:]) == {'bucket'}
