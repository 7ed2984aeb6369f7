"What the page on training cannot show: a run's folder under odd circumstances, and every setting that shapes the weights."
import json, math
from dataclasses import replace

import pytest, torch

from annotated_transformer.batches import BatchLoader
from annotated_transformer.checkpoints import Progress, checkpoints, cut_log, load_checkpoint, load_model, read_log, save_checkpoint
from annotated_transformer.optimizer import make_optimizer
from annotated_transformer.training import Interrupted, TrainConfig, Trainer, timed_log, validate
from annotated_transformer.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(20, n_layers=1, d_model=16, d_ff=32, n_heads=2, max_len=16)
PAIRS = [([4 + i % 16] * (1 + i % 5), [4 + i % 16] * (1 + i % 3)) for i in range(60)]
SETTINGS = TrainConfig(max_tokens=40, warmup=10, peak_rate=1e-2, max_steps=30, log_every=5, save_every=10, average=2)

def trainer(out, settings=SETTINGS, **options):
    torch.manual_seed(settings.seed)
    loader = BatchLoader(PAIRS, settings.max_tokens, seed=settings.seed)
    return Trainer(Transformer(CONFIG), loader, list(loader.epoch(0))[:3], settings, out, progress_bar=False, **options)

def weights(model): return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize('limit, steps', [(dict(max_steps=7), 7), (dict(max_epochs=1), None), (dict(max_minutes=1e-9), 1)])
def test_each_limit_ends_the_run(tmp_path, limit, steps):
    run = trainer(tmp_path, replace(SETTINGS, **limit))
    run.fit()
    assert run.at.step == (steps or len(run.batches))
    assert len(checkpoints(tmp_path)) >= 1 and (tmp_path / 'model.safetensors').exists()

def test_seed_decides_everything(tmp_path):
    a, b = (trainer(tmp_path / name).fit() for name in 'ab')
    assert torch.equal(weights(a), weights(b))
    c = trainer(tmp_path / 'c', replace(SETTINGS, seed=2)).fit()
    assert not torch.equal(weights(a), weights(c))

@pytest.mark.parametrize('stop', [1, 10, 13, 29])
def test_stopped_anywhere_ends_the_same(tmp_path, stop):
    whole = trainer(tmp_path / 'whole').fit()
    run = trainer(tmp_path / 'stopped')
    step, run.step = run.step, lambda batches: step(batches) if run.at.step < stop else (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt): run.fit()
    resumed = trainer(tmp_path / 'stopped').fit()
    assert torch.equal(weights(whole), weights(resumed))
    assert (tmp_path / 'whole/log.jsonl').read_bytes() == (tmp_path / 'stopped/log.jsonl').read_bytes()

def test_a_half_made_checkpoint_is_not_seen(tmp_path):
    run = trainer(tmp_path)
    def fail(model, folder): raise OSError(28, 'No space left on device', str(folder))
    good = save_checkpoint(tmp_path, run.model, run.optimizer, Progress(step=10))
    with pytest.raises(OSError, match='No space left'): save_checkpoint(tmp_path, run.model, run.optimizer, Progress(step=20), fail)
    (tmp_path / 'checkpoints' / 'step-00000030.partial').mkdir()
    assert checkpoints(tmp_path) == [good]
    twin = Transformer(CONFIG)
    assert load_checkpoint(good, twin, make_optimizer(twin)).step == 10
    assert torch.equal(weights(twin), weights(run.model))

def test_measured_figures_are_logged_and_leave_training_on(tmp_path):
    modes = []
    run = trainer(tmp_path, measure=lambda model: modes.append(model.eval()) or {'figure': len(modes)})
    run.fit()
    assert [row['figure'] for row in read_log(tmp_path / 'log.jsonl') if 'figure' in row] == [1, 2, 3]
    assert not run.model.training

def test_validation_counts_tokens(tmp_path):
    model, loader = Transformer(CONFIG), BatchLoader(PAIRS, 40)
    batches = list(loader.epoch(0))
    assert math.isclose(validate(model, batches), validate(model, list(BatchLoader(PAIRS, 1000).epoch(0))), rel_tol=1e-5)

def test_the_saved_model_is_the_one_returned(tmp_path):
    model = trainer(tmp_path).fit()
    assert torch.equal(weights(load_model(tmp_path)), weights(model))
    assert json.loads((tmp_path / 'config.json').read_text())['d_model'] == 16

def test_cutting_a_log_keeps_what_came_before(tmp_path):
    path = tmp_path / 'log.jsonl'
    path.write_text(''.join(json.dumps({'step': s}) + '\n' for s in (5, 10, 15)))
    cut_log(path, 10)
    assert [row['step'] for row in read_log(path)] == [5, 10]
