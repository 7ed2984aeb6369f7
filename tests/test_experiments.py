"Intervals cover what they promise, false alarms are rare, and verdicts admit what the data cannot decide."
import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from annotated_transformer.experiments import (
    Claim, PairedDifference, bootstrap_interval, decide, decision_table, dot_plot, paired_difference, seeds_needed,
    t_interval, t_quantile, verdict)


def covered(interval, truth, rows):
    "The share of rows whose interval holds the truth."
    found = [interval(row) for row in rows]
    return np.mean([low <= truth <= high for low, high in found])


def difference(low, high):
    "A difference with this interval, in the middle of it."
    mean = (low + high) / 2
    return PairedDifference(mean, low, high, 0.95, 1.0, (mean,) * 8)


# --- intervals

@pytest.mark.parametrize('df, expected', [(1, 12.706), (4, 2.776), (7, 2.365), (9, 2.262), (30, 2.042), (1000, 1.962)])
def test_quantiles_of_student(df, expected):
    assert t_quantile(df) == pytest.approx(expected, abs=1e-3)


def test_quantiles_for_other_confidence():
    assert t_quantile(9, 0.99) == pytest.approx(3.250, abs=1e-3)
    assert t_quantile(8, 1 - 0.05 / 8) == pytest.approx(3.6766, abs=1e-3) # eight claims with nine seeds


def test_the_bootstrap_covers_95_percent_of_many_values():
    rng = np.random.default_rng(1)
    rows = rng.exponential(size=(400, 60)) # skewed, as sentence scores are
    assert 0.90 <= covered(lambda row: bootstrap_interval(row, samples=400), 1.0, rows) <= 0.98


def test_student_covers_95_percent_of_few_values_and_the_bootstrap_does_not():
    rng = np.random.default_rng(2)
    rows = rng.normal(3.0, 2.0, size=(1000, 5))
    assert 0.93 <= covered(t_interval, 3.0, rows) <= 0.97
    assert covered(lambda row: bootstrap_interval(row, samples=200), 3.0, rows) < 0.90


def test_the_bootstrap_takes_any_statistic_of_rows():
    counts = np.array([[1, 2], [3, 4], [0, 5]] * 20) # matches and totals of sentences
    low, high = bootstrap_interval(counts, lambda rows: rows[:, 0].sum() / rows[:, 1].sum())
    assert low < 4 / 11 < high
    assert (low, high) == bootstrap_interval(torch.tensor(counts), lambda rows: rows[:, 0].sum() / rows[:, 1].sum())


@pytest.mark.parametrize('interval', [bootstrap_interval, t_interval])
def test_one_value_has_no_interval(interval):
    with pytest.raises(ValueError, match='found 1 values: an interval needs at least 2'):
        interval([1.0])


# --- paired seeds

def test_a_difference_is_taken_seed_by_seed():
    found = paired_difference([3.0, 5.0, 10.0], torch.tensor([1.0, 4.0, 10.0]))
    assert found.differences == (2.0, 1.0, 0.0)
    assert found.mean == 1.0
    assert found.effect_size == 1.0
    assert (found.low, found.high) == t_interval([2.0, 1.0, 0.0])
    assert found.confidence == 0.95
    assert paired_difference([3.0, 5.0, 10.0], [1.0, 4.0, 10.0], 0.99).low == t_interval([2.0, 1.0, 0.0], 0.99)[0]


def test_pairing_removes_what_the_seeds_share():
    rng = np.random.default_rng(5)
    seeds = rng.normal(size=8)
    better = seeds + 0.3 + rng.normal(scale=0.1, size=8)
    assert paired_difference(better, seeds).low > 0
    assert paired_difference(better, np.roll(seeds, 1)).low < 0


def test_effect_size_without_spread():
    assert paired_difference([2.0, 2.0], [1.0, 1.0]).effect_size == math.inf
    assert paired_difference([1.0, 1.0], [1.0, 1.0]).effect_size == 0


def test_unequal_numbers_of_seeds_are_an_error():
    with pytest.raises(ValueError, match=r'shapes \(2,\) and \(3,\) are not paired'):
        paired_difference([1, 2], [1, 2, 3])


# --- verdicts

def test_the_correction_limits_the_risk_of_any_false_alarm():
    rng = np.random.default_rng(6)
    alarms = []
    for _ in range(1000):
        claims = [Claim('', 'higher', rng.normal(size=6), np.zeros(6)) for _ in range(5)]
        alarms.append(any(row['verdict'] != 'not decided' for row in decide(claims)))
    assert 0.03 <= np.mean(alarms) <= 0.07


@pytest.mark.parametrize('n_claims, effect_size, n_seeds', [(1, 1.5, 6), (1, 1.0, 10), (8, 1.5, 10)])
def test_seeds_needed(n_claims, effect_size, n_seeds): # of a paired t test with power 0.8, by tables
    assert abs(seeds_needed(n_claims, effect_size) - n_seeds) <= (0 if n_claims == 1 else 1)


def test_too_many_seeds_needed():
    with pytest.raises(ValueError, match='effect_size=0.1 needs more than 100 seeds'):
        seeds_needed(1, 0.1)


@pytest.mark.parametrize('low, high, prediction, margin, expected', [
    (1.0, 3.0, 'higher', 0.0, 'confirmed'),
    (1.0, 3.0, 'lower', 0.0, 'contradicted'),
    (-3.0, -1.0, 'lower', 0.0, 'confirmed'),
    (-1.0, 3.0, 'higher', 0.0, 'not decided'),
    (0.6, 0.9, 'higher', 0.5, 'confirmed'),
    (0.1, 0.3, 'higher', 0.5, 'contradicted'), # the difference is below the margin
    (0.1, 0.9, 'higher', 0.5, 'not decided'),
    (-0.3, 0.2, 'equal', 0.5, 'confirmed'),
    (-0.3, 0.6, 'equal', 0.5, 'not decided'),
    (0.3, 3.7, 'equal', 0.5, 'not decided'),   # the mean exceeds the margin, the interval overlaps it
    (1.0, 3.0, 'equal', 0.5, 'contradicted'),
    (0.0, 0.0, 'higher', 0.0, 'contradicted'),
])
def test_verdicts(low, high, prediction, margin, expected):
    assert verdict(difference(low, high), prediction, margin) == expected


def test_equality_needs_a_margin():
    with pytest.raises(ValueError, match='must be positive'):
        verdict(difference(-1.0, 1.0), 'equal')


# --- reports

@pytest.fixture(scope='module')
def decisions():
    seeds = np.arange(8.0)
    return decide([Claim('clear', 'higher', seeds + 2 + seeds / 10, seeds),
                   Claim('noise', 'lower', seeds + [1, -1] * 4, seeds),
                   Claim('same', 'equal', seeds + [0.01, -0.01] * 4, seeds, margin=0.5)])


def test_claims_are_decided_together(decisions):
    assert [row['verdict'] for row in decisions] == ['confirmed', 'not decided', 'confirmed']
    assert decisions[0]['difference'].confidence == pytest.approx(1 - 0.05 / 3)
    found = decisions[0]['difference']
    assert (found.low, found.high) == t_interval(found.differences, 1 - 0.05 / 3)


def test_table_of_decisions(decisions):
    header, rule, clear, noise, same = decision_table(decisions).splitlines()
    assert 'difference, 98.3 % interval' in header
    assert clear.startswith('| clear | higher | +2.35 (+2.08 to +2.62) |')
    assert clear.endswith('| 8 | **confirmed** |')
    assert '| equal (± 0.5) |' in same
    assert {line.count('|') for line in (header, rule, clear, noise, same)} == {7}


def test_dot_plot_shows_every_seed_and_the_interval():
    values = {'one': [1.0, 2.0, 3.0], 'two': torch.tensor([2.0, 2.5, 6.0])}
    ax = dot_plot(plt.subplots()[1], values, 'title', 'BLEU', color=['red', 'blue'], zero=True)
    dots, line, bar = ax.lines[:3]
    assert list(dots.get_xdata()) == values['one']
    assert tuple(line.get_xdata()) == t_interval(values['one'])
    assert list(bar.get_xdata()) == [2.0, 2.0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ['one', 'two']
    assert len(ax.lines) == 7
    plt.close(ax.figure)


def test_dot_plot_of_a_single_seed_has_no_interval():
    ax = dot_plot(plt.subplots()[1], {'one': [1.0]})
    assert len(ax.lines) == 2 # the dot and the mean
    plt.close(ax.figure)


def test_dot_plot_joins_the_runs_of_a_seed():
    ax = dot_plot(plt.subplots()[1], {'one': [1.0, 2.0], 'two': [3.0, 5.0]}, interval=None, paired=True)
    joined = [list(line.get_xdata()) for line in ax.lines[4:]]
    assert joined == [[1.0, 3.0], [2.0, 5.0]]
    plt.close(ax.figure)
