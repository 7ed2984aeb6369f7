"Checkpoints are written in a thread: training continues, and errors are not lost."
import threading

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from annotated_transformer.checkpoint_writer import CheckpointWriter
from annotated_transformer.checkpoints import (
    Progress, keep_checkpoints, latest_checkpoint, list_checkpoints, load_checkpoint, save_checkpoint, save_model)
from annotated_transformer.training import make_optimizer
from annotated_transformer.transformer import Transformer, TransformerConfig


def make_parts():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocab_size=20, n_layers=1, d_model=16, d_ff=32, n_heads=2))
    return model, make_optimizer(model), AveragedModel(model)


def take_step(model, optimizer, ema):
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    optimizer.param_groups[0]['lr'] = 0.1
    optimizer.step()
    ema.update_parameters(model)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    "The file has the state of the moment when it was asked for: the same bytes as without a thread."
    model, optimizer, ema = make_parts()
    take_step(model, optimizer, ema)
    expected = save_checkpoint(tmp_path / 'expected', model, optimizer, Progress(1), ema=ema)
    may_write = threading.Event()

    def save(model, folder):
        assert may_write.wait(60)
        save_model(model, folder)

    writer = CheckpointWriter()
    progress = Progress(1)
    writer.save(tmp_path, model, optimizer, progress, save, ema)
    take_step(model, optimizer, ema)
    progress.step = 2
    assert list_checkpoints(tmp_path) == []
    may_write.set()
    writer.save(tmp_path, model, optimizer, progress, save, ema)
    writer.submit(keep_checkpoints, tmp_path, 1, [1])
    writer.close()
    assert [path.name for path in list_checkpoints(tmp_path)] == ['step-00000001', 'step-00000002']
    for name in ('model.safetensors', 'progress.json'):
        assert (tmp_path / 'checkpoints/step-00000001' / name).read_bytes() == (expected / name).read_bytes()
    copies = make_parts()
    assert load_checkpoint(latest_checkpoint(tmp_path), *copies).step == 2
    for found, wanted in zip(copies, (model, optimizer, ema)):
        torch.testing.assert_close(found.state_dict(), wanted.state_dict(), rtol=0, atol=0)


def test_an_error_of_the_thread_is_raised_by_the_next_call(tmp_path):
    model, optimizer, _ = make_parts()

    def full(model, folder):
        raise OSError(28, 'No space left on device')

    writer = CheckpointWriter()
    writer.save(tmp_path, model, optimizer, Progress(1), full)
    with pytest.raises(OSError, match='could not be written: No space left on device'):
        writer.save(tmp_path, model, optimizer, Progress(2))
    writer.save(tmp_path, model, optimizer, Progress(3), full)
    with pytest.raises(OSError, match='No space left'):
        writer.close()
