"""What the page on training cannot show: a run's folder under odd circumstances,
and every setting that shapes the weights.
"""
import json, math, os, signal, sys, time
from dataclasses import replace

import pytest, safetensors.torch, torch

from annotated_transformer.v1 import training
from annotated_transformer.v1.batches import BatchLoader
from annotated_transformer.v1.checkpoints import (Progress, checkpoints, cut_log, load_checkpoint, load_model,
                                               read_log, save_checkpoint)
from annotated_transformer.v1.distributed import World
from annotated_transformer.v1.optimizer import learning_rate, make_optimizer
from annotated_transformer.v1.training import (Interrupted, Objective, TrainConfig, Trainer, timed_log, train_step,
                                               validate)
from annotated_transformer.v1.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(20, n_layers=1, d_model=16, d_ff=32, n_heads=2, max_len=16)
PAIRS = [([4 + i % 16] * (1 + i % 5), [4 + i % 16] * (1 + i % 3)) for i in range(60)]
SETTINGS = TrainConfig(max_tokens=40, warmup=10, peak_rate=1e-2, max_steps=30, log_every=5, save_every=10, average=2)

def trainer(out, settings=SETTINGS, **options):
    torch.manual_seed(settings.seed)
    loader = BatchLoader(PAIRS, settings.max_tokens, seed=settings.seed)
    return Trainer(Transformer(CONFIG), loader, list(loader.epoch(0))[:3], settings, out, progress_bar=False, **options)

def weights(model): return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize('limit, steps', [
    (dict(max_steps=7), 7), (dict(max_epochs=1), None), (dict(max_minutes=1e-9), 1)])
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

def test_speed_is_that_of_the_steps_alone(tmp_path):
    "A slow validation does not slow down the line after it."
    def slow(model):
        time.sleep(1)
        return {}
    trainer(tmp_path, replace(SETTINGS, max_steps=15), measure=slow).fit()
    before, *_, after = [row for row in timed_log(tmp_path) if 'rate' in row]
    tokens = [row['tokens'] for row in read_log(tmp_path / 'log.jsonl') if 'rate' in row]
    assert after['tokens_per_second'] > 2 * (tokens[-1] - tokens[-2]) # or the second would be in it
    assert before['tokens_per_second'] > 2 * tokens[0]

def test_an_infinite_norm_clips_nothing(tmp_path):
    free, wide = (trainer(tmp_path / str(norm), replace(SETTINGS, clip_norm=norm)).fit() for norm in (math.inf, 1e9))
    assert torch.equal(weights(free), weights(wide))

def test_each_process_has_a_dropout_of_its_own(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(training, 'seed_step', lambda *which: asked.append(which))
    for rank in (0, 1):
        run = trainer(tmp_path / str(rank), world=World(rank))
        run.noted = []
        run.start(), run.step([next(iter(run.batches.epoch(0)))])
    assert asked == [(SETTINGS.seed, 1, 0), (SETTINGS.seed, 1, 1)]

@pytest.mark.parametrize('stop', [1, 10, 13, 29])
def test_stopped_anywhere_ends_the_same(tmp_path, stop):
    whole = trainer(tmp_path / 'whole').fit()
    run = trainer(tmp_path / 'stopped')
    step, run.step = run.step, lambda batches: (
        step(batches) if run.at.step < stop else (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt): run.fit()
    resumed = trainer(tmp_path / 'stopped').fit()
    assert torch.equal(weights(whole), weights(resumed))
    assert (tmp_path / 'whole/log.jsonl').read_bytes() == (tmp_path / 'stopped/log.jsonl').read_bytes()

def test_a_half_made_checkpoint_is_not_seen(tmp_path):
    run = trainer(tmp_path)
    def fail(model, folder): raise OSError(28, 'No space left on device', str(folder))
    good = save_checkpoint(tmp_path, run.model, run.optimizer, Progress(step=10))
    with pytest.raises(OSError, match='No space left'):
        save_checkpoint(tmp_path, run.model, run.optimizer, Progress(step=20), fail)
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
    assert math.isclose(validate(model, batches), validate(model, list(BatchLoader(PAIRS, 1000).epoch(0))),
                        rel_tol=1e-5)

def test_the_saved_model_is_the_one_returned(tmp_path):
    model = trainer(tmp_path).fit()
    assert torch.equal(weights(load_model(tmp_path)), weights(model))
    assert json.loads((tmp_path / 'config.json').read_text())['d_model'] == 16

def test_cutting_a_log_keeps_what_came_before(tmp_path):
    path = tmp_path / 'log.jsonl'
    path.write_text(''.join(json.dumps({'step': s}) + '\n' for s in (5, 10, 15)))
    cut_log(path, 10)
    assert [row['step'] for row in read_log(path)] == [5, 10]


# --- strengths, each through an interruption

STRENGTHS = {'accumulate': dict(accumulate=3), 'ema': dict(ema=0.9), 'r_drop': dict(r_drop=3.0),
             'late r_drop': dict(r_drop=3.0, r_drop_from=15), 'bfloat16': dict(precision='bfloat16'),
             'best': dict(average_best=True, keep_best=3, average=2), 'plain Adam': dict(fused=False)}

@pytest.mark.parametrize('strength', STRENGTHS)
def test_every_strength_goes_on_exactly(tmp_path, strength):
    settings = replace(SETTINGS, **STRENGTHS[strength])
    whole = trainer(tmp_path / 'whole', settings).fit()
    run = trainer(tmp_path / 'stopped', settings)
    step, run.step = run.step, lambda batches: (
        step(batches) if run.at.step < 17 else (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt): run.fit()
    assert torch.equal(weights(trainer(tmp_path / 'stopped', settings).fit()), weights(whole))
    assert (tmp_path / 'whole/log.jsonl').read_bytes() == (tmp_path / 'stopped/log.jsonl').read_bytes()
    trainer(tmp_path / 'plain').fit()
    if strength not in ('best', 'plain Adam'): # those two change what is kept, or nothing
        assert (tmp_path / 'whole/log.jsonl').read_bytes() != (tmp_path / 'plain/log.jsonl').read_bytes()

def test_late_r_drop_is_plain_until_then(tmp_path):
    """Up to its first update with two passes a run is the run without R-Drop, to the last bit;
    from there on it is another.
    """
    losses = {}
    for name, settings in {'plain': {}, 'late': dict(r_drop=3.0, r_drop_from=15),
                           'never': dict(r_drop=3.0, r_drop_from=30)}.items():
        trainer(tmp_path / name, replace(SETTINGS, log_every=1, **settings)).fit()
        losses[name] = [row['loss'] for row in read_log(tmp_path / name / 'log.jsonl') if 'rate' in row]
    assert losses['late'][:15] == losses['plain'][:15] and losses['never'] == losses['plain']
    assert all(a != b for a, b in zip(losses['late'][15:], losses['plain'][15:], strict=True))

@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize('at', [7, 10, 28])
def test_asked_to_stop_it_saves_and_goes_on_exactly(tmp_path, number, at):
    whole, run = trainer(tmp_path / 'whole').fit(), trainer(tmp_path / 'stopped')
    step = run.step
    def asked(batches):
        step(batches)
        if run.at.step == at: os.kill(os.getpid(), number)
    run.step, before = asked, signal.getsignal(number)
    with pytest.raises(Interrupted, match=f'step {at + 1}|step {at}') as left: run.fit()
    assert left.value.signal == number and signal.getsignal(number) == before
    assert torch.equal(weights(trainer(tmp_path / 'stopped').fit()), weights(whole))
    assert (tmp_path / 'whole/log.jsonl').read_bytes() == (tmp_path / 'stopped/log.jsonl').read_bytes()
    assert [c.name for c in checkpoints(tmp_path / 'stopped')] == [c.name for c in checkpoints(tmp_path / 'whole')]

def test_the_schedule_counts_updates(tmp_path):
    run = trainer(tmp_path, replace(SETTINGS, accumulate=4, log_every=1, max_steps=12))
    run.fit()
    rates = [row['rate'] for row in read_log(tmp_path / 'log.jsonl') if 'rate' in row]
    assert rates == [learning_rate(step, 1e-2, 10) for step in range(1, 13)]
    assert run.at.epoch * len(run.batches) + run.at.batch > 12                      # more batches than updates

def test_no_pair_is_lost_when_batches_do_not_divide(tmp_path):
    "The last update of an epoch learns from what is left."
    run = trainer(tmp_path, replace(SETTINGS, accumulate=4, max_epochs=2, max_steps=10_000))
    run.fit()
    assert run.at.tokens == 2 * sum(len(tgt) + 1 for _, tgt in PAIRS)
    assert run.at.step == 2 * math.ceil(len(run.batches) / 4)

def test_patience_ends_a_run_and_survives_an_interruption(tmp_path):
    bleus = [1, 2, 5, 4, 3, 5, 9]
    def measured(out):
        run = trainer(out, replace(SETTINGS, max_steps=500, monitor='val_bleu', patience=3),
                      measure=lambda model: dict(val_bleu=float(bleus[run.at.step // 10 - 1])))
        return run
    run = measured(tmp_path)
    run.fit()
    # three in a row without more than 5; equal is not better
    assert run.at.step == 60
    assert [row.get('val_bleu') for row in read_log(tmp_path / 'log.jsonl') if 'val_bleu' in row] == bleus[:6]
    assert {'step-00000030', 'step-00000060'} <= {c.name for c in checkpoints(tmp_path)} # the best, and the last
    again = measured(tmp_path)
    assert again.start().step == 60 and again.done()

@pytest.mark.parametrize('bleus', [
    [1, 2, 3, 4, 5],   # the best is the newest
    [5, 4, 3, 2, 1],   # the best lies far behind
    [1, 9, 3, 2, 1]])  # patience ends the run
@pytest.mark.parametrize('average_best', [False, True])
def test_a_limit_between_two_checkpoints_changes_nothing_when_it_is_moved(tmp_path, bleus, average_best):
    settings = replace(SETTINGS, max_steps=50, monitor='val_bleu', patience=3, average=2, average_best=average_best)
    def measured(out, **limit):
        run = trainer(out, replace(settings, **limit), measure=lambda model: dict(
            val_bleu=float(bleus[run.at.step // 10 - 1]) if run.at.step % 10 == 0 else 7.5))
        return run
    straight, moved = measured(tmp_path / 'straight'), None
    straight.fit()
    for limit in 15, 26, 33, 38, 50:
        moved = measured(tmp_path / 'moved', max_steps=limit)
        moved.fit()
    assert moved.at.step == straight.at.step
    assert torch.equal(weights(moved.model), weights(straight.model))
    names = [[c.name for c in checkpoints(tmp_path / name)] for name in ('straight', 'moved')]
    assert names[0] == names[1]

def test_nothing_to_train_or_to_validate_on_is_told(tmp_path):
    model, some, none = Transformer(CONFIG), BatchLoader(PAIRS, 40), BatchLoader([], 40)
    with pytest.raises(ValueError, match='no batch to train on'):
        Trainer(model, none, list(some.epoch(0)), SETTINGS, tmp_path)
    with pytest.raises(ValueError, match='no batch to validate on'): Trainer(model, some, [], SETTINGS, tmp_path)

def test_a_figure_that_is_not_measured_cannot_be_watched(tmp_path):
    with pytest.raises(ValueError, match="monitor='val_bleu' is not measured: "
                                         'validation gives val_loss, val_perplexity'):
        trainer(tmp_path, replace(SETTINGS, monitor='val_bleu')).fit()

def test_the_best_checkpoints_are_averaged_when_asked(tmp_path):
    bleus = [9.0, 1.0, 8.0]
    run = trainer(tmp_path, replace(SETTINGS, monitor='val_bleu', average_best=True, average=2),
                  measure=lambda model: dict(val_bleu=bleus[run.at.step // 10 - 1]))
    run.fit()
    kept = [safetensors.torch.load_file(tmp_path / f'checkpoints/step-000000{n}/model.safetensors') for n in (10, 30)]
    averaged = run.candidates()['averaged']
    for name, w in averaged.items(): torch.testing.assert_close(w, (kept[0][name] + kept[1][name]) / 2)

def test_moving_average_is_what_it_says(tmp_path):
    run, mean = trainer(tmp_path, replace(SETTINGS, ema=0.9, max_steps=12)), None
    step = run.step
    def follow(batches):
        nonlocal mean
        step(batches)
        now = weights(run.model).clone()
        mean = now if mean is None else 0.9 * mean + 0.1 * now
    run.step = follow
    run.fit()
    torch.testing.assert_close(weights(run.ema.module), mean)

def test_a_step_that_is_refused_changes_nothing(tmp_path):
    run = trainer(tmp_path)
    run.start()
    batch = next(iter(run.batches.epoch(0)))
    with torch.no_grad(): run.model.output.weight[5] = 1e30
    before = weights(run.model).clone()
    with pytest.raises(FloatingPointError, match='the (loss is|gradient is)'):
        train_step(run.objective, [batch], run.optimizer, 1.0)
    assert torch.equal(weights(run.model), before)

def test_what_is_compiled_is_what_is_called(monkeypatch):
    called = []
    def compiled(states): return lambda *ids: called.append(len(ids)) or states(*ids)
    monkeypatch.setattr(torch, 'compile', compiled)
    model, batch = Transformer(CONFIG).eval(), next(iter(BatchLoader(PAIRS, 40).epoch(0)))
    assert torch.equal(Objective(model, TrainConfig(compile=True))(batch), Objective(model)(batch)) and called == [2]
    Objective(model, TrainConfig(compile=True, r_drop=1.0))(batch)
    assert called == [2, 2]

def test_tensorboard_has_the_figures(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    trainer(tmp_path, replace(SETTINGS, tensorboard=True)).fit()
    events = EventAccumulator(str(tmp_path / 'tensorboard')).Reload()
    for name in ('loss', 'val_loss'):
        rows = [(row['step'], row[name]) for row in read_log(tmp_path / 'log.jsonl') if name in row]
        assert [(e.step, pytest.approx(e.value)) for e in events.Scalars(name)] == rows
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', None)
    with pytest.raises(ValueError, match=r"pip install 'annotated_transformer\[tensorboard\]'"):
        trainer(tmp_path / 'without', replace(SETTINGS, tensorboard=True))

def test_tensorboard_sees_no_step_twice_and_loses_none(tmp_path):
    "Three steps after its checkpoint a run dies; the part that goes on takes their place."
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    settings = replace(SETTINGS, tensorboard=True, log_every=1)
    run = trainer(tmp_path, settings)
    step, run.step = run.step, lambda batches: (
        step(batches) if run.at.step < 13 else (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt): run.fit()
    def steps(): return [e.step for e in EventAccumulator(str(tmp_path / 'tensorboard')).Reload().Scalars('loss')]
    assert steps() == list(range(1, 14))
    trainer(tmp_path, settings).fit()
    assert steps() == list(range(1, 31))

def test_time_stands_beside_the_log(tmp_path):
    trainer(tmp_path).fit()
    rows = timed_log(tmp_path)
    assert ([{k: v for k, v in row.items() if k not in ('minutes', 'tokens_per_second')} for row in rows]
            == read_log(tmp_path / 'log.jsonl'))
    assert all('minutes' in row for row in rows) and all(row['tokens_per_second'] > 0 for row in rows if 'rate' in row)
    assert not any('minutes' in row for row in read_log(tmp_path / 'log.jsonl'))

def test_a_run_that_goes_on_tells_the_time_left_from_where_it_went_on(tmp_path):
    trainer(tmp_path, replace(SETTINGS, max_steps=20)).fit()
    going_on = trainer(tmp_path)
    going_on.reporter.progress_bar = True
    going_on.fit()
    assert going_on.reporter.bar.initial == pytest.approx(20 / 30) and going_on.reporter.bar.n == 1


# --- how a run ends

def finals(out): return [row for row in read_log(out / 'log.jsonl') if 'val_loss_last' in row]

def test_a_run_that_goes_on_logs_its_last_figures_too(tmp_path):
    "The figures of the candidates stand at the end of both parts; ending once more adds nothing."
    trainer(tmp_path, replace(SETTINGS, max_steps=20)).fit()
    for _ in range(2): trainer(tmp_path).fit()
    trainer(tmp_path / 'straight').fit()
    assert [row['step'] for row in finals(tmp_path)] == [20, 30]
    assert finals(tmp_path)[-1] == finals(tmp_path / 'straight')[-1]

def test_the_best_candidate_with_a_moving_average_is_what_was_validated(tmp_path):
    "The rate is far too high, so the best validation lies before the last, and is the moving average's."
    settings = replace(SETTINGS, ema=0.8, keep_best=1, peak_rate=0.3, max_steps=60)
    trainer(tmp_path, settings).fit()
    rows = [row for row in read_log(tmp_path / 'log.jsonl') if 'val_loss' in row]
    assert finals(tmp_path)[-1]['val_loss_best'] == min(row['val_loss'] for row in rows) < rows[-1]['val_loss']

def test_weights_whose_loss_is_no_number_are_not_kept(tmp_path, monkeypatch):
    "The last update leaves finite weights whose outputs are not: the best checkpoint before it is the model."
    monkeypatch.setattr('annotated_transformer.v1.training.learning_rate',
                        lambda step, *how: 1e30 if step == 11 else learning_rate(step, *how))
    run = trainer(tmp_path, replace(SETTINGS, max_steps=11))
    model, last = run.fit(), finals(tmp_path)[-1]
    assert math.isnan(last['val_loss_last']) and validate(model, run.val_batches) == last['val_loss_best']

def test_a_run_without_any_number_ends_with_what_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr('annotated_transformer.v1.training.validate', lambda *_: math.nan)
    run = trainer(tmp_path, replace(SETTINGS, patience=1))
    model = run.fit()
    assert run.at.step == 20 # two validations, and nothing better than nothing
    assert torch.equal(weights(load_model(tmp_path)), weights(model))

def test_a_first_line_that_was_torn_is_written_again(tmp_path):
    (tmp_path / 'log.jsonl').write_text('{"step": 0, "dro')
    run = trainer(tmp_path)
    run.reporter.once(dict(dropped_blank=3))
    run.fit()
    rows = read_log(tmp_path / 'log.jsonl')
    assert rows[0] == dict(step=0, epoch=0, dropped_blank=3) and [row['step'] for row in rows].count(0) == 1
