"A run counts, validates, saves, resumes and stops as it should."
import json
import math
import signal
from itertools import islice

import pytest
import torch
from torch.testing import assert_close

from annotated_transformer import training
from annotated_transformer.batches import BatchLoader, collate
from annotated_transformer.checkpoints import list_checkpoints, read_log
from annotated_transformer.kernels import LossModule, accelerate, summed_loss, validate
from annotated_transformer.loader import TrainingLoader
from annotated_transformer.recipe import scale_residual_branches
from annotated_transformer.run_log import Interrupted, best_name
from annotated_transformer.trainer import (
    TrainConfig, Trainer, steps_to_keep, train_step)
from annotated_transformer.transformer import Transformer, TransformerConfig


def make_pairs(n=120):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(4, 14, (int(torch.randint(1, 8, (), generator=generator)),), generator=generator).tolist()
            for _ in range(n)]
    return [(row, row) for row in rows]


def make_model(dropout=0.1):
    torch.manual_seed(0)
    sizes = {'vocab_size': 14, 'n_layers': 1, 'd_model': 16, 'd_ff': 24, 'n_heads': 2, 'max_len': 20}
    return accelerate(Transformer(TransformerConfig(**sizes, dropout=dropout)))


def make_trainer(out, measure=None, **changes):
    settings = {'max_tokens': 128, 'warmup_steps': 5, 'peak_lr': 1e-2, 'max_steps': 20, 'save_every': 5, 'log_every': 5}
    config = TrainConfig(**settings | changes)
    pairs = make_pairs()
    val_batches = list(TrainingLoader(pairs[100:], 128, shuffle=False).epoch(0))
    loader = TrainingLoader(pairs[:100], config.max_tokens, seed=config.seed)
    return Trainer(make_model(), loader, val_batches, config, out, measure, progress_bar=False)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_step_equals_the_reference():
    "With one batch and no clipping it is `training.train_step`: in float64, Adam does not magnify rounding."
    batch = collate(make_pairs(20))
    models = [make_model(dropout=0.0).double() for _ in range(2)]
    optimizers = [training.make_optimizer(model) for model in models]
    loss_module = LossModule(models[1].train(), TrainConfig())
    for step in range(1, 6):
        expected = training.train_step(models[0], batch, optimizers[0], 1e-3 * step)
        found = train_step(loss_module, [batch], optimizers[1], 1e-3 * step, math.inf)
        assert math.isclose(found, expected, rel_tol=1e-9)
    for a, b in zip(models[0].parameters(), models[1].parameters()):
        assert_close(a, b)


class ResumableLoader(BatchLoader):
    def epoch(self, epoch, start=0):
        return islice(super().epoch(epoch), start, None)


def test_run_equals_the_reference(tmp_path):
    "`Trainer.fit` makes the steps of `training.train`, with the same learning rates."
    models = [make_model(dropout=0.0).double() for _ in range(2)]
    loader = ResumableLoader(make_pairs(), 128)
    expected = training.train(models[0], loader, 2, peak_lr=1e-2, warmup_steps=5, progress=False)
    config = TrainConfig(peak_lr=1e-2, warmup_steps=5, max_epochs=2, log_every=1, save_every=100,
                         max_grad_norm=math.inf)
    Trainer(models[1], loader, list(loader.epoch(0))[:1], config, tmp_path, progress_bar=False).fit()
    rows = [row for row in read_log(tmp_path / 'log.jsonl') if 'loss' in row]
    for row, step in zip(rows, expected, strict=True):
        assert math.isclose(row['loss'], step['loss'], rel_tol=1e-9) and row['lr'] == step['lr']
    for a, b in zip(models[0].parameters(), models[1].parameters()):
        assert_close(a, b)


def test_bfloat16_is_close_and_weights_stay_float32():
    batch = collate(make_pairs(20))
    losses = []
    for precision in ('float32', 'bfloat16'):
        model = make_model(dropout=0.0)
        loss = LossModule(model, TrainConfig(precision=precision))(batch)
        loss.backward()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        losses.append(loss.item())
    assert losses[0] != losses[1] and math.isclose(*losses, rel_tol=1e-2)


def test_ema_follows_the_weights(tmp_path):
    trainer = make_trainer(tmp_path, ema_decay=0.9, max_steps=6, save_every=100)
    average = {}
    original = trainer.step
    def step(batches):
        original(batches)
        for name, p in trainer.model.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * p.detach() if name in average else p.detach().clone()
    trainer.step = step
    trainer.fit()
    for name, p in trainer.ema.module.named_parameters():
        assert_close(p.detach(), average[name])


def test_samples_are_written_at_each_validation(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.translate_samples = lambda model: [{'source': 'a', 'reference': 'b', 'translation': 'c'}]
    trainer.fit()
    assert [row['step'] for row in read_log(tmp_path / 'samples.jsonl')] == [5, 10, 15, 20]


def test_accumulated_batches_count_every_token_once():
    "Parts of unequal size: the mean of their two means would differ."
    pairs = make_pairs(20)
    models = [make_model(dropout=0.0) for _ in range(2)]
    losses = []
    for model, batches in zip(models, ([collate(pairs)], [collate(pairs[:3]), collate(pairs[3:])])):
        optimizer = torch.optim.SGD(model.parameters())
        losses.append(train_step(LossModule(model, TrainConfig()), batches, optimizer, 0.1, math.inf))
    assert math.isclose(*losses, rel_tol=1e-5)
    for a, b in zip(models[0].parameters(), models[1].parameters()):
        assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_gradients_are_clipped():
    batch = collate(make_pairs(20))
    model = make_model(dropout=0.0)
    before = weights(model)
    train_step(LossModule(model, TrainConfig()), [batch], torch.optim.SGD(model.parameters()), 1.0, max_grad_norm=1e-3)
    moved = math.sqrt(sum((p.detach() - before[name]).square().sum().item() for name, p in model.named_parameters()))
    assert math.isclose(moved, 1e-3, rel_tol=1e-2)


def test_a_step_that_is_not_finite_changes_nothing():
    batch = collate(make_pairs(20))
    model = make_model()
    with torch.no_grad():
        model.encoder.layers[0].feed_forward.linear2.bias[0] = math.nan
    before = weights(model)
    with pytest.raises(FloatingPointError, match='loss is nan'):
        train_step(LossModule(model, TrainConfig()), [batch], torch.optim.SGD(model.parameters()), 0.1)
    assert all(torch.equal(p, before[name]) or p.isnan().any() for name, p in model.named_parameters())


def test_validation_equals_the_reference():
    batches = [collate(make_pairs(30)[:9]), collate(make_pairs(30)[9:])]
    model = make_model()
    assert math.isclose(validate(model, batches), training.validate(model, batches), rel_tol=1e-5)
    expected = training.batch_loss(model, batches[0], 0.1) * batches[0].n_tokens
    assert_close(summed_loss(model, batches[0], 0.1), expected, atol=1e-3, rtol=1e-5)


def test_log_and_checkpoints(tmp_path):
    trainer = make_trainer(tmp_path)
    model = trainer.fit()
    assert not model.training
    rows = read_log(tmp_path / 'log.jsonl')
    assert [row['step'] for row in rows if 'loss' in row] == [5, 10, 15, 20]
    assert [row['step'] for row in rows if 'val_loss' in row] == [5, 10, 15, 20]
    assert {'val_loss_last', 'val_loss_averaged'} <= rows[-1].keys()
    assert rows[-2]['val_loss'] < rows[1]['val_loss']
    assert len(list_checkpoints(tmp_path)) == 4
    assert json.loads((tmp_path / 'config.json').read_text())['kind'] == 'transformer'


def test_best_candidate_is_kept(tmp_path):
    trainer = make_trainer(tmp_path)
    model = trainer.fit()
    last_row = read_log(tmp_path / 'log.jsonl')[-1]
    best = min(value for name, value in last_row.items() if name.startswith('val_loss_'))
    assert math.isclose(validate(model, trainer.val_batches), best, rel_tol=1e-5)


def test_global_tokens_are_a_multiple_of_max_tokens():
    assert TrainConfig(max_tokens=100, global_tokens=300).batches_per_step == 3
    assert TrainConfig(max_tokens=100, gradient_accumulation_steps=2).batches_per_step == 2
    for wanted in (250, 50, 0):
        with pytest.raises(ValueError, match=f'global_tokens={wanted} is not a multiple of max_tokens=100: choose'):
            TrainConfig(max_tokens=100, global_tokens=wanted)
    with pytest.raises(ValueError, match='leave one of them out'):
        TrainConfig(max_tokens=100, global_tokens=200, gradient_accumulation_steps=2)


@pytest.mark.parametrize('changes', [{}, {'ema_decay': 0.9}, {'gradient_accumulation_steps': 2}, {'r_drop': 1.0}])
def test_resumed_run_is_bit_identical(tmp_path, changes):
    whole = make_trainer(tmp_path / 'whole', **changes).fit()
    make_trainer(tmp_path / 'parts', max_steps=7, **changes).fit()
    resumed = make_trainer(tmp_path / 'parts', **changes).fit()
    for a, b in zip(whole.parameters(), resumed.parameters()):
        assert torch.equal(a, b)


def test_interrupt_saves_and_says_so(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1000, save_every=1000)
    original = trainer.step
    def step(batches):
        original(batches)
        if trainer.progress.step == 3:
            signal.raise_signal(signal.SIGINT)
    trainer.step = step
    with pytest.raises(Interrupted, match='run the same command again') as caught:
        trainer.fit()
    assert caught.value.signal == signal.SIGINT
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ['step-00000003']


def test_early_stopping(tmp_path):
    values = iter([1.0, 0.5, 0.6, 0.7, 0.8, 0.9] + [1.0] * 10)
    trainer = make_trainer(tmp_path, lambda model: {'val_loss': next(values)}, max_steps=100, patience=2)
    trainer.fit()
    assert trainer.progress.step == 20 # best at step 10, then two worse ones


ABSURD = {'peak_lr': 1e30, 'max_grad_norm': math.inf}


def test_nan_loss_stops_with_advice(tmp_path):
    with pytest.raises(FloatingPointError, match='after step 1, the loss is nan.*lower learning rate.*no earlier'):
        make_trainer(tmp_path, **ABSURD).fit()
    assert not list_checkpoints(tmp_path)


@pytest.mark.parametrize('save_every', [1, 5])
def test_run_that_diverges_leaves_a_checkpoint_to_resume_from(tmp_path, save_every):
    "With save_every=1, weights are validated after the step that ruins them: they are not saved."
    make_trainer(tmp_path / 'run', max_steps=10).fit()
    with pytest.raises(FloatingPointError, match='after step 11.*step-00000010'):
        make_trainer(tmp_path / 'run', save_every=save_every, **ABSURD).fit()
    assert list_checkpoints(tmp_path / 'run')[-1].name == 'step-00000010'
    resumed = make_trainer(tmp_path / 'run').fit()
    whole = make_trainer(tmp_path / 'whole').fit()
    for a, b in zip(whole.parameters(), resumed.parameters()):
        assert torch.equal(a, b)


def test_interrupted_run_with_ruined_weights_resumes_from_an_earlier_checkpoint(tmp_path):
    "A signal saves without validation. The checkpoint proves worthless at the next step, and is renamed."
    trainer = make_trainer(tmp_path)
    original = trainer.step
    def step(batches):
        original(batches)
        if trainer.progress.step == 7:
            with torch.no_grad():
                trainer.model.lm_head.weight.fill_(math.nan)
            signal.raise_signal(signal.SIGINT)
    trainer.step = step
    with pytest.raises(Interrupted):
        trainer.fit()
    assert list_checkpoints(tmp_path)[-1].name == 'step-00000007'
    with pytest.raises(FloatingPointError, match='after step 7.*step-00000005'):
        make_trainer(tmp_path).fit()
    assert (tmp_path / 'checkpoints/failed-00000007/model.safetensors').exists()
    assert list_checkpoints(tmp_path)[-1].name == 'step-00000005'
    assert make_trainer(tmp_path).fit() and read_log(tmp_path / 'log.jsonl')[-1]['step'] == 20


def test_validation_that_fails_stops_with_advice(tmp_path):
    "As translating does when logits are NaN."
    def measure(model):
        raise FloatingPointError('the logits are NaN')
    with pytest.raises(FloatingPointError, match='after step 5, the logits are NaN.*lower learning rate'):
        make_trainer(tmp_path, measure).fit()


def test_huge_loss_has_a_perplexity(tmp_path):
    trainer = make_trainer(tmp_path)
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1e5)
    metrics = trainer.metrics(trainer.model)
    assert metrics['val_loss'] > 1000 and math.isfinite(metrics['val_perplexity'])


def test_best_candidate_is_never_nan():
    assert best_name({'last': 2.0, 'averaged': math.nan, 'ema': 1.0}, 'val_loss') == 'ema'
    assert best_name({'last': math.nan, 'averaged': 20.0, 'ema': 21.0}, 'val_bleu') == 'ema'
    assert best_name({'last': math.nan, 'ema': math.nan}, 'val_loss') == 'last'


def test_checkpoints_to_keep():
    losses = [4.0, 2.0, 3.0, math.nan, 2.5]
    rows = [{'step': step, 'val_loss': loss} for step, loss in enumerate(losses)]
    assert steps_to_keep(rows, TrainConfig(average_checkpoints=2)) == [3, 4, 1]
    assert steps_to_keep(rows, TrainConfig(average_checkpoints=2, average_best=True)) == [3, 4, 1, 4]


def test_unknown_monitor_is_named(tmp_path):
    with pytest.raises(ValueError, match="monitor='val_bleu' is not measured"):
        make_trainer(tmp_path, monitor='val_bleu').fit()


def test_scaled_initialization():
    models = [make_model(), make_model()]
    scale_residual_branches(models[1])
    plain, scaled = (model.encoder.layers[0] for model in models)
    assert_close(scaled.feed_forward.linear2.weight, plain.feed_forward.linear2.weight / math.sqrt(2))
    assert_close(scaled.self_attention.out_proj.weight, plain.self_attention.out_proj.weight / math.sqrt(2))
    assert torch.equal(scaled.feed_forward.linear1.weight, plain.feed_forward.linear1.weight)


@pytest.mark.parametrize('name, value', [
    ('max_tokens', 0), ('max_tokens', 10**12), ('warmup_steps', 0), ('max_steps', 0), ('save_every', 0),
    ('average_checkpoints', 0), ('gradient_accumulation_steps', 0), ('peak_lr', 0.0), ('peak_lr', math.nan), ('max_epochs', 0),
    ('max_minutes', -1.0), ('patience', 0), ('r_drop', -1.0), ('r_drop', math.inf), ('label_smoothing', 1.0), ('ema_decay', 1.0),
    ('max_grad_norm', 0.0)])
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        TrainConfig(**{name: value})


def test_nothing_to_train_on(tmp_path):
    trainer = make_trainer(tmp_path)
    with pytest.raises(ValueError, match='no batch to train on'):
        Trainer(make_model(), TrainingLoader([], 128), trainer.val_batches, TrainConfig(), tmp_path)
    with pytest.raises(ValueError, match='no batch to validate on'):
        Trainer(make_model(), trainer.loader, [], TrainConfig(), tmp_path)
