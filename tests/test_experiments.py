"Intervals cover what they promise, false alarms are rare, and verdicts admit what the data cannot decide."
import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from annotated_transformer.experiments import (
    Claim, PairedDifference, bootstrap_interval, decide, decision_table, dot_plot, forest_plot, holm_levels, p_value,
    paired_difference, region, seeds_needed, t_interval, t_quantile, verdict)


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
    assert found.effect_size == pytest.approx(1 - 3 / 7) # mean / deviation = 1, and Hedges' correction for three pairs
    assert (found.low, found.high) == t_interval([2.0, 1.0, 0.0])
    assert found.confidence == 0.95
    assert paired_difference([3.0, 5.0, 10.0], [1.0, 4.0, 10.0], 0.99).low == t_interval([2.0, 1.0, 0.0], 0.99)[0]


def test_pairing_removes_what_the_seeds_share():
    rng = np.random.default_rng(5)
    seeds = rng.normal(size=8)
    better = seeds + 0.3 + rng.normal(scale=0.1, size=8)
    assert paired_difference(better, seeds).low > 0
    assert paired_difference(better, np.roll(seeds, 1)).low < 0


def test_the_effect_size_is_not_inflated_by_few_pairs():
    rng = np.random.default_rng(7)
    found = [paired_difference(1.5 + rng.normal(size=5), np.zeros(5)).effect_size for _ in range(4000)]
    assert np.mean(found) == pytest.approx(1.5, abs=0.06)


def test_effect_size_without_spread():
    assert paired_difference([2.0, 2.0], [1.0, 1.0]).effect_size == math.inf
    assert paired_difference([1.0, 1.0], [1.0, 1.0]).effect_size == 0


def test_unequal_numbers_of_seeds_are_an_error():
    with pytest.raises(ValueError, match=r'shapes \(2,\) and \(3,\) are not paired'):
        paired_difference([1, 2], [1, 2, 3])


# --- verdicts

PAIRS = [3.1, 2.7, 4.0, 3.3, 2.9], [2.8, 2.9, 3.1, 3.0, 2.5]

@pytest.mark.parametrize('prediction, margin, expected', [
    ('higher', 0.0, 0.12385684836470087), # scipy.stats.ttest_rel
    ('lower', 0.0, 0.12385684836470087),
    ('higher', 0.1, 0.24198153056802074), # scipy.stats.ttest_1samp at 0.1
    ('lower', 1.0, 0.0015609085859860771), # at -1
    ('equal', 1.0, 0.019554212720304602)]) # at 1, the nearer edge
def test_p_values_are_those_of_scipy(prediction, margin, expected):
    assert p_value(paired_difference(*PAIRS), prediction, margin) == pytest.approx(expected, rel=1e-6)


def test_intervals_are_those_of_scipy(): # ttest_rel(a, b).confidence_interval
    found = paired_difference(*PAIRS)
    assert (found.low, found.high) == pytest.approx((-0.1456795354, 0.8256795354), abs=1e-8)
    found = paired_difference(*PAIRS, 0.9875)
    assert (found.low, found.high) == pytest.approx((-0.4147565559, 1.0947565559), abs=1e-7)


@pytest.mark.parametrize('t, df, expected', [(2, 8, 8.05162380e-2), (10, 8, 8.48818153e-6), (30, 8, 1.65352568e-9),
                                             (4, 1, 0.15595826)])
def test_tails_of_student_are_those_of_scipy(t, df, expected): # 2 * scipy.stats.t.sf
    values = np.array([1.0, -1.0] * 50)[:df + 1]
    values = t / math.sqrt(df + 1) + (values - values.mean()) / values.std(ddof=1)
    assert p_value(paired_difference(values, 0 * values), 'higher') == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize('prediction, margin', [('higher', 0.0), ('lower', 0.2), ('equal', 0.3)])
def test_a_p_value_is_the_smallest_risk_that_decides(prediction, margin):
    rng = np.random.default_rng(8)
    for shift in (-1.0, 0.0, 0.1, 0.8):
        a = shift + 0.2 * rng.normal(size=6)
        p = p_value(paired_difference(a, 0 * a), prediction, margin)
        decided = [verdict(paired_difference(a, 0 * a, 1 - risk), prediction, margin) != 'not decided'
                   for risk in (0.98 * p, 1.02 * p)]
        assert decided == [False, True]


@pytest.mark.parametrize('p_values', [[0.01, 0.04, 0.03, 0.005], [0.001, 0.2, 0.0101, 0.0249, 0.02, 0.9],
                                      [0.02, 0.04], [0.04, 0.001, 0.012, 0.024], [0.5], [0.03, 0.03]])
def test_holm_rejects_what_its_definition_says(p_values):
    levels = holm_levels(p_values)
    m = len(p_values)
    ordered = sorted(p_values)
    n_rejected = next((k for k, p in enumerate(ordered) if p > 0.05 / (m - k)), m) # Holm (1979), step by step
    assert sum(p <= level for p, level in zip(p_values, levels)) == n_rejected
    assert sorted(levels)[:n_rejected] == [0.05 / (m - k) for k in range(n_rejected)]
    assert all(level == 0.05 / (m - n_rejected) for p, level in zip(p_values, levels) if p > level)


def test_holm_rejects_what_statsmodels_rejects(): # statsmodels.stats.multitest.multipletests(p, 0.05, 'holm')
    def rejected(p_values):
        return [p <= level for p, level in zip(p_values, holm_levels(p_values))]
    assert rejected([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]
    assert rejected([0.001, 0.2, 0.011, 0.0249, 0.02, 0.9]) == [True, False, False, False, False, False]


def test_holm_decides_more_than_bonferroni():
    p_values = [0.001, 0.015, 0.02, 0.04]
    assert sum(p <= level for p, level in zip(p_values, holm_levels(p_values))) == 4
    assert sum(p <= 0.05 / 4 for p in p_values) == 1


@pytest.mark.slow
@pytest.mark.parametrize('n_true', [0, 3]) # claims whose predicted effect is real, among five
def test_the_correction_limits_the_risk_of_any_false_alarm(n_true):
    rng = np.random.default_rng(6)
    alarms = []
    for _ in range(1000):
        claims = [Claim('', 'higher', rng.normal(size=6) + (5 if i < n_true else 0), np.zeros(6)) for i in range(5)]
        alarms.append(any(row['verdict'] != 'not decided' for row in decide(claims)[n_true:]))
    assert 0.03 <= np.mean(alarms) <= 0.07


@pytest.mark.parametrize('n_claims, effect_size, n_seeds', [(1, 1.5, 6), (1, 1.0, 10), (8, 1.5, 10)])
def test_seeds_needed(n_claims, effect_size, n_seeds): # of a paired t test with power 0.8, by tables
    assert abs(seeds_needed(n_claims, effect_size) - n_seeds) <= (0 if n_claims == 1 else 1)


def test_seeds_needed_to_confirm_equality():
    n = seeds_needed(prediction='equal', margin=1.0, effect_size=0.0)
    rng = np.random.default_rng(9)
    share = {}
    for seeds in (n - 1, n):
        found = [paired_difference(rng.normal(size=seeds), np.zeros(seeds)) for _ in range(3000)]
        share[seeds] = np.mean([verdict(difference, 'equal', 1.0) == 'confirmed' for difference in found])
    assert share[n - 1] < 0.82 and share[n] > 0.78
    assert seeds_needed(prediction='equal', margin=1.0, effect_size=0.5) > 2 * n
    with pytest.raises(ValueError, match='must be positive'):
        seeds_needed(prediction='equal')


def test_too_many_seeds_needed():
    with pytest.raises(ValueError, match='effect_size=0.1 needs more than 100 seeds'):
        seeds_needed(1, 0.1)


@pytest.mark.parametrize('prediction, margin, effect_size', [
    ('equal', 1.0, 1.5), ('higher', 0.0, -1.0), ('lower', 0.0, 1.0)])
def test_no_number_of_seeds_confirms_a_false_claim(prediction, margin, effect_size):
    with pytest.raises(ValueError, match=f"contradicts '{prediction}': choose one between"):
        seeds_needed(1, effect_size, prediction=prediction, margin=margin)


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


def test_regions_of_predictions():
    assert region('higher', 0.5) == (0.5, math.inf)
    assert region('lower') == (-math.inf, 0.0)
    assert region('equal', 2.0) == (-2.0, 2.0)


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
    assert [row['difference'].confidence for row in decisions] == pytest.approx([1 - 0.05 / 2, 1 - 0.05, 1 - 0.05 / 3])
    assert decisions[1]['p_value'] > 0.05 > decisions[0]['p_value'] > decisions[2]['p_value']
    for row in decisions:
        found = row['difference']
        assert (found.low, found.high) == t_interval(found.differences, found.confidence)


def test_table_of_decisions(decisions):
    header, rule, clear, noise, same = decision_table(decisions).splitlines()
    assert 'difference (interval) | confidence' in header
    assert clear.startswith('| clear | higher | +2.35 (+2.10 to +2.60) | 97.5 % |')
    assert clear.endswith('| 8 | **confirmed** |')
    assert '| equal (± 0.5) |' in same
    assert {line.count('|') for line in (header, rule, clear, noise, same)} == {8}


def test_forest_plot_shows_pairs_intervals_region_and_verdict(decisions):
    ax = forest_plot(plt.subplots()[1], decisions, 'title', 'BLEU')
    dots, thin, thick, bar = ax.lines[:4]
    found = decisions[0]['difference']
    assert tuple(dots.get_xdata()) == found.differences
    assert tuple(thin.get_xdata()) == (found.low, found.high)
    assert tuple(thick.get_xdata()) == t_interval(found.differences)
    assert list(bar.get_xdata()) == [found.mean] * 2
    assert [text.get_text() for text in ax.texts] == ['confirmed', 'not decided', 'confirmed']
    assert [label.get_text() for label in ax.get_yticklabels()] == ['clear', 'noise', 'same']
    bands = [band.get_paths()[0].vertices[:, 0] for band in ax.collections]
    left, right = ax.get_xlim()
    spans = [(band.min(), band.max()) for band in bands]
    assert spans == [(0, right), (left, 0), (-0.5, 0.5)]
    plt.close(ax.figure)


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
