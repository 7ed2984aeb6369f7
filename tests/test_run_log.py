"What a run reports while it trains, and how it stops."
import io
import signal
import sys
import threading

import pytest

from annotated_transformer import progress
from annotated_transformer.checkpoints import Progress, read_log
from annotated_transformer.progress import new_bar
from annotated_transformer.run_log import RunLog, catch_signals, seconds_left


def test_loss_is_a_mean_over_tokens(tmp_path):
    log = RunLog(tmp_path, progress_bar=False)
    log.start(Progress())
    log.log_step(Progress(step=5, tokens=400, loss_sum=1000.0, loss_tokens=400), lr=0.1)
    assert read_log(log.log) == [{'step': 5, 'epoch': 0, 'loss': 2.5, 'lr': 0.1, 'tokens': 400}]
    assert read_log(log.clock)[0]['tokens_per_second'] > 0


def test_resuming_drops_later_rows(tmp_path):
    log = RunLog(tmp_path, progress_bar=False)
    log.start(Progress())
    for step in (5, 10):
        log.log_validation(Progress(step=step), {'val_loss': 1.0})
        log.log_samples(Progress(step=step), [{'source': 'a', 'reference': 'b', 'translation': 'c'}])
    log.start(Progress(step=5))
    for path in (log.log, log.clock, log.samples):
        assert [row['step'] for row in read_log(path)] == [5]


class Terminal(io.StringIO):
    def isatty(self):
        return True


# second trial, point 9
@pytest.mark.parametrize('is_terminal', [True, False])
def test_a_log_file_gets_lines_instead_of_bars(is_terminal, monkeypatch):
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, 'stderr', stream)
    clock = [0.0]
    monkeypatch.setattr(progress.time, 'monotonic', lambda: clock[0])
    with new_bar(total=100, mininterval=0) as bar:
        for _ in range(100):
            clock[0] += 1.0
            bar.update()
    assert ('\r' in stream.getvalue()) == is_terminal
    if not is_terminal:
        lines = stream.getvalue().splitlines()
        assert len(lines) == 4 and '30/100' in lines[0] and '100/100' in lines[-1], lines


def test_a_bar_takes_the_arguments_of_tqdm(monkeypatch):
    stderr, own = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, 'stderr', stderr)
    assert list(new_bar(range(3))) == [0, 1, 2]
    assert list(new_bar('abc', 'letters', 3)) == ['a', 'b', 'c']
    assert [line.split('|')[0] for line in stderr.getvalue().splitlines()] == ['100%', 'letters: 100%']
    assert list(new_bar(range(3), file=own, mininterval=0)) == [0, 1, 2]
    assert '\r' in own.getvalue() and len(stderr.getvalue().splitlines()) == 2
    assert new_bar(range(3), disable=None).disable # tqdm: None switches a bar off where there is no terminal
    with new_bar(total=2, leave=False) as bar:
        bar.update(2)
    assert len(stderr.getvalue().splitlines()) == 2


def test_a_bar_inside_another_one_prints_lines_in_a_log_file(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, 'stderr', stderr)
    for _ in new_bar(range(2), 'outer', mininterval=0):
        for _ in new_bar(range(3), 'inner', mininterval=0):
            pass
    lines = stderr.getvalue().splitlines()
    assert [line.split('|')[0] for line in lines] == ['inner: 100%', 'inner: 100%', 'outer: 100%']


def test_validations_stand_between_the_lines_of_a_log_file(tmp_path, capsys):
    log = RunLog(tmp_path)
    with log.open_bar():
        log.show_progress(0.5, 1.0)
        log.log_validation(Progress(step=5), {'val_loss': 1.0})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == 'step 5: val_loss 1.000' and len(lines) == 2 and lines[1].startswith('50%')


def test_initial_metrics_are_written_once(tmp_path):
    for _ in range(2):
        log = RunLog(tmp_path, progress_bar=False)
        log.initial_metrics = {'dropped_blank': 3}
        log.start(Progress())
    assert read_log(log.log) == [{'step': 0, 'epoch': 0, 'dropped_blank': 3}]


def test_callback_gets_all_rows(tmp_path):
    calls = []
    log = RunLog(tmp_path, progress_bar=False, on_log=calls.append)
    log.start(Progress())
    log.log_validation(Progress(step=1), {'val_loss': 1.0})
    log.log_validation(Progress(step=2), {'val_loss': 0.5})
    assert [[row['step'] for row in rows] for rows in calls] == [[1], [1, 2]]


def test_progress_bar_shows_losses_time_left_and_samples(tmp_path, capsys):
    log = RunLog(tmp_path)
    log.start(Progress())
    with log.open_bar():
        log.seconds_after_training = 30.0
        log.show_progress(0.5, minutes=1.0)
        log.log_step(Progress(step=5, tokens=400, loss_sum=1000.0, loss_tokens=400), lr=0.1)
        log.log_validation(Progress(step=5), {'val_loss': 1.25})
        log.log_samples(Progress(step=5), [{'source': 'a dog', 'reference': 'ein Hund', 'translation': 'Hund'}])
    shown = capsys.readouterr().err
    for text in ('01:30 left', 'loss 2.500', 'step 5: val_loss 1.250', 'source:      a dog', 'translation: Hund'):
        assert text in shown


# point 10 of the trial of 0.1.0
@pytest.mark.parametrize('fraction, seconds, after, expected', [
    (0.0, 0.0, 9.0, None), (0.25, 60.0, 0.0, 180.0), (0.25, 60.0, 45.0, 225.0), (1.0, 240.0, 45.0, 45.0)])
def test_time_left_includes_what_follows_training(fraction, seconds, after, expected):
    assert seconds_left(fraction, seconds, after) == expected


def test_a_finished_run_fills_the_bar(tmp_path):
    log = RunLog(tmp_path, progress_bar=False)
    log.show_progress(1.0, minutes=0.0)
    assert log.bar.n == 1.0


def test_first_signal_is_recorded_and_the_second_counts():
    with pytest.raises(KeyboardInterrupt), catch_signals() as received:
        signal.raise_signal(signal.SIGINT)
        assert received == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_other_threads_catch_no_signals():
    results = []
    def work():
        with catch_signals() as received:
            results.append(received)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [[]]
