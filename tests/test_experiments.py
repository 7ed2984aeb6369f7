"Intervals cover what they promise, tests raise few false alarms, and verdicts admit what the data cannot decide."
import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from annotated_transformer.experiments import (
    Claim, PairedDifference, bootstrap_interval, decide, decision_table, dot_plot, holm, paired_difference,
    seeds_needed, sign_flip_p_value, t_interval, t_quantile, verdict)


def covered(interval, truth, rows):
    "The share of rows whose interval holds the truth."
    found = [interval(row) for row in rows]
    return np.mean([low <= truth <= high for low, high in found])


def difference(low, high, p_value=0.01):
    "A difference with this interval, in the middle of it."
    mean = (low + high) / 2
    return PairedDifference(mean, low, high, p_value, 1.0, (mean,) * 8)


# --- intervals

@pytest.mark.parametrize('df, expected', [(1, 12.706), (4, 2.776), (7, 2.365), (9, 2.262), (30, 2.042), (1000, 1.962)])
def test_quantiles_of_student(df, expected):
    assert t_quantile(df) == pytest.approx(expected, abs=1e-3)


def test_quantiles_for_other_confidence():
    assert t_quantile(9, 0.99) == pytest.approx(3.250, abs=1e-3)


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

def test_sign_flips_counted_by_hand():
    # of the 8 signs of 1, 2, 3, the sums 6 and -6 are as far from 0 as 6, and +-4 as far as 4
    assert sign_flip_p_value([1, 2, 3]) == 2 / 8
    assert sign_flip_p_value([-1, 2, 3]) == 4 / 8
    assert sign_flip_p_value([0, 0]) == 1


def test_rounding_does_not_change_a_p_value():
    assert sign_flip_p_value([0.1, 0.2, 0.3]) == sign_flip_p_value([1, 2, 3])


def test_many_differences_are_drawn_at_random():
    rng = np.random.default_rng(3)
    differences = rng.normal(0.4, 1.0, 16)
    exact = sign_flip_p_value(differences)
    assert sign_flip_p_value([*differences, 0.0]) == pytest.approx(exact, abs=0.01) # a zero changes nothing


def test_false_alarms_of_the_sign_flip_test_are_rare():
    rng = np.random.default_rng(4)
    p_values = [sign_flip_p_value(row) for row in rng.normal(size=(1000, 8))]
    assert 0.03 <= np.mean(np.array(p_values) <= 0.05) <= 0.065


def test_a_difference_is_taken_seed_by_seed():
    found = paired_difference([3.0, 5.0, 10.0], torch.tensor([1.0, 4.0, 10.0]))
    assert found.differences == (2.0, 1.0, 0.0)
    assert found.mean == 1.0
    assert found.effect_size == 1.0
    assert (found.low, found.high) == t_interval([2.0, 1.0, 0.0])
    assert found.p_value == 2 / 4


def test_pairing_removes_what_the_seeds_share():
    rng = np.random.default_rng(5)
    seeds = rng.normal(size=8)
    better = seeds + 0.3 + rng.normal(scale=0.1, size=8)
    assert paired_difference(better, seeds).p_value < 0.05
    assert paired_difference(better, np.roll(seeds, 1)).p_value > 0.05


def test_effect_size_without_spread():
    assert paired_difference([2.0, 2.0], [1.0, 1.0]).effect_size == math.inf
    assert paired_difference([1.0, 1.0], [1.0, 1.0]).effect_size == 0


def test_unequal_numbers_of_seeds_are_an_error():
    with pytest.raises(ValueError, match=r'shapes \(2,\) and \(3,\) are not paired'):
        paired_difference([1, 2], [1, 2, 3])


# --- verdicts

def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.9]) == [1, 1]
    assert holm([]) == []


def test_holm_limits_the_risk_of_any_false_alarm():
    rng = np.random.default_rng(6)
    uniform = rng.uniform(size=(2000, 6))
    assert np.mean([min(holm(row)) <= 0.05 for row in uniform]) == pytest.approx(0.05, abs=0.015)


@pytest.mark.parametrize('n_claims, n_seeds', [(1, 6), (3, 7), (6, 8), (9, 9)])
def test_seeds_needed(n_claims, n_seeds):
    assert seeds_needed(n_claims) == n_seeds
    clear = [sign_flip_p_value(np.arange(1, n_seeds + 1))] * n_claims
    assert max(holm(clear)) <= 0.05
    assert holm([sign_flip_p_value(np.arange(1, n_seeds))] * n_claims)[0] > 0.05


@pytest.mark.parametrize('low, high, p_value, prediction, margin, expected', [
    (1.0, 3.0, 0.01, 'higher', 0.0, 'confirmed'),
    (1.0, 3.0, 0.01, 'lower', 0.0, 'contradicted'),
    (-3.0, -1.0, 0.01, 'lower', 0.0, 'confirmed'),
    (-1.0, 3.0, 0.30, 'higher', 0.0, 'not decided'),
    (1.0, 3.0, 0.06, 'higher', 0.0, 'not decided'),
    (0.1, 0.3, 0.01, 'higher', 0.5, 'no difference'),
    (-0.3, 0.2, 0.50, 'equal', 0.5, 'confirmed'),
    (-0.3, 0.6, 0.50, 'equal', 0.5, 'not decided'),
    (1.0, 3.0, 0.01, 'equal', 0.5, 'contradicted'),
    (0.2, 0.6, 0.01, 'equal', 0.5, 'not decided'),
])
def test_verdicts(low, high, p_value, prediction, margin, expected):
    assert verdict(difference(low, high, p_value), prediction, margin=margin) == expected


def test_a_corrected_p_value_replaces_the_own():
    assert verdict(difference(1.0, 3.0, 0.01), 'higher') == 'confirmed'
    assert verdict(difference(1.0, 3.0, 0.01), 'higher', 0.08) == 'not decided'


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
    assert decisions[0]['p_value'] == 3 * decisions[0]['difference'].p_value


def test_table_of_decisions(decisions):
    header, rule, clear, noise, same = decision_table(decisions).splitlines()
    assert clear.startswith('| clear | higher | +2.35 (+2.15 to +2.55) |')
    assert clear.endswith('| 0.023 | 8 | **confirmed** |')
    assert '| equal (± 0.5) |' in same
    assert {line.count('|') for line in (header, rule, clear, noise, same)} == {8}


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
