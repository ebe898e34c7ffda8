"""The statistics of a cell, and rank correlations, against known values, brute force and simulated coverage."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from decaybench.core.scoring import Metric
from decaybench.results.statistics import cell_statistics, kendall, octave, spearman, t_quantile, wilson


@pytest.mark.parametrize(
    ("df", "expected"),
    [
        (1, 12.706204736),
        (2, 4.302652730),
        (3, 3.182446305),
        (4, 2.776445105),
        (5, 2.570581836),
        (10, 2.228138852),
        (30, 2.042272456),
        (99, 1.984216952),
        (100, 1.983971519),
        (1000, 1.962339081),
        (10**6, 1.959966363),
    ],
)
def test_t_quantiles_are_the_tabulated_ones(df: int, expected: float) -> None:
    assert t_quantile(df) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("df", [2, 3, 7, 8, 50, 199, 201])
def test_t_quantiles_hold_95_percent_of_the_density(df: int) -> None:
    x = np.linspace(0.0, t_quantile(df), 200_001)
    log_constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    density = np.exp(log_constant - (df + 1) / 2 * np.log1p(x**2 / df))
    assert 2 * np.trapezoid(density, x) == pytest.approx(0.95, abs=1e-9)


def test_the_series_joins_the_sum_without_a_step() -> None:
    steps = [t_quantile(df) - t_quantile(df + 1) for df in (199, 200, 201)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] - steps[2] < 0.05 * steps[1]


@pytest.mark.parametrize(
    ("share", "n", "low", "high"),
    [
        # Newcombe (1998), table I, method 3: 81/263, 15/148, 0/20, 1/29
        (81 / 263, 263, 0.2553, 0.3662),
        (15 / 148, 148, 0.0624, 0.1605),
        (0.0, 20, 0.0, 0.1611),
        (1 / 29, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_intervals_are_the_published_ones(share: float, n: int, low: float, high: float) -> None:
    assert wilson(share, n) == pytest.approx((low, high), abs=5e-5)


def test_a_perfect_cell_does_not_claim_certainty() -> None:
    for metric in ("all_correct", "mean_accuracy"):
        value, error, interval = cell_statistics(metric, [4] * 100, [4] * 100)
        assert (value, error, interval[1]) == (1.0, 0.0, 1.0)
        assert interval[0] == pytest.approx(100 / (100 + 1.959963985**2))
    assert cell_statistics("all_correct", [0] * 100, [4] * 100)[2][0] == 0.0


def test_all_correct_counts_whole_samples() -> None:
    value, error, interval = cell_statistics("all_correct", [4, 3, 4, 0], [4, 4, 4, 4])
    assert value == 0.5
    assert error == pytest.approx(math.sqrt(1 / 3) / 2)
    assert interval == wilson(0.5, 4)


def test_the_ends_of_an_interval_lie_t_errors_away_by_their_own_variance() -> None:
    correct, asked = [1, 4, 3, 2, 6], [2, 4, 4, 4, 8]
    scores = np.array([0.5, 1.0, 0.75, 0.5, 0.75])
    value, error, interval = cell_statistics("mean_accuracy", correct, asked)
    assert value == pytest.approx(scores.mean())
    assert error == pytest.approx(scores.std(ddof=1) / math.sqrt(5))
    for end in interval:  # Wilson: the error at a true mean `end` is that seen at `value`, scaled by its variance
        there = error * math.sqrt(end * (1 - end) / (value * (1 - value)))
        assert abs(end - value) == pytest.approx(2.776445105 * there, rel=1e-8)


def test_one_question_a_sample_is_the_same_under_both_metrics() -> None:
    correct, asked = [1, 0, 1, 1, 1, 0], [1] * 6
    assert cell_statistics("mean_accuracy", correct, asked) == cell_statistics("all_correct", correct, asked)


def test_a_single_sample_has_no_error_and_a_wide_interval() -> None:
    value, error, (low, high) = cell_statistics("mean_accuracy", [3], [4])
    assert (value, error) == (0.75, 0.0)
    assert low < 0.25 and high > 0.95


@pytest.mark.parametrize(("correct", "asked"), [([], []), ([1], [1, 1]), ([2], [1]), ([-1], [1]), ([0], [0])], ids=str)
def test_impossible_counts_are_refused(correct: list[int], asked: list[int]) -> None:
    with pytest.raises(ValueError, match=r"counts|asked"):
        cell_statistics("mean_accuracy", correct, asked)


@pytest.mark.parametrize(
    ("metric", "questions", "share", "least"),
    [
        ("all_correct", 1, 0.5, 0.93),
        ("all_correct", 1, 0.9, 0.93),
        ("all_correct", 1, 0.98, 0.93),
        ("mean_accuracy", 16, 0.5, 0.93),
        ("mean_accuracy", 16, 0.9, 0.93),
        ("mean_accuracy", 4, 0.98, 0.93),
    ],
)
def test_intervals_cover_the_truth(metric: Metric, questions: int, share: float, least: float) -> None:
    repeats, samples = 2000, 40
    hits = np.random.default_rng(7).binomial(questions, share, size=(repeats, samples))
    covered = 0
    for counts in hits:
        low, high = cell_statistics(metric, counts.tolist(), [questions] * samples)[2]
        covered += low <= share <= high
    assert least <= covered / repeats <= 0.99


@pytest.mark.parametrize(("distance", "edge"), [(1, 1), (2, 2), (3, 2), (4, 4), (1023, 512), (1024, 1024)])
def test_octaves_begin_at_powers_of_two(distance: int, edge: int) -> None:
    assert octave(distance) == edge


def test_a_distance_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        octave(0)


def _concordance(x: list[float], y: list[float]) -> tuple[int, int, int, int]:
    pairs = list(combinations(range(len(x)), 2))
    products = [(x[i] - x[j]) * (y[i] - y[j]) for i, j in pairs]
    distinct = [sum(v[i] != v[j] for i, j in pairs) for v in (x, y)]
    return sum(p > 0 for p in products), sum(p < 0 for p in products), *distinct


def _midranks(x: list[float]) -> list[float]:
    return [sum(b < a for b in x) + (sum(b == a for b in x) + 1) / 2 for a in x]


@pytest.mark.parametrize("ties", [False, True])
def test_rank_correlations_are_those_counted_pair_by_pair(ties: bool) -> None:
    draws = np.random.default_rng(1)
    for _ in range(20):
        x, y = ([float(v) for v in (draws.integers(0, 3, 6) if ties else draws.permutation(6))] for _ in range(2))
        right, wrong, in_x, in_y = _concordance(x, y)
        if in_x and in_y:
            assert kendall(x, y) == pytest.approx((right - wrong) / math.sqrt(in_x * in_y))
            assert spearman(x, y) == pytest.approx(np.corrcoef(_midranks(x), _midranks(y))[0, 1])
    assert kendall([1, 2, 3], [5, 5, 5]) is None
    assert spearman([1, 2, 3], [5, 5, 5]) is None
