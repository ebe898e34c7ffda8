"""Differences paired by seed and sample: the variance against a loop over the two-way table, coverage by simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from decaybench.results.differences import Difference, paired_difference, seed_difference, sign_flip
from decaybench.results.statistics import t_quantile

Float64 = NDArray[np.float64]


def drawn(seeds: int, samples: int, spread: tuple[float, float, float], generator: np.random.Generator) -> Float64:
    """D of two-way normal effects with mean 0; spread: standard deviations of seed, sample and rest."""
    of_seed, of_sample, rest = spread
    return (
        of_seed * generator.standard_normal((seeds, 1))
        + of_sample * generator.standard_normal((1, samples))
        + rest * generator.standard_normal((seeds, samples))
    )


def test_the_interval_is_that_of_the_two_way_table() -> None:
    D = drawn(4, 7, (0.3, 0.5, 0.2), np.random.default_rng(0))
    S, N = D.shape
    mean = sum(D[s, i] for s in range(S) for i in range(N)) / (S * N)
    rows = [sum(D[s]) / N for s in range(S)]
    columns = [sum(D[:, i]) / S for i in range(N)]
    of_seeds = N * sum((row - mean) ** 2 for row in rows) / (S - 1)
    of_samples = S * sum((column - mean) ** 2 for column in columns) / (N - 1)
    rest = sum((D[s, i] - rows[s] - columns[i] + mean) ** 2 for s in range(S) for i in range(N)) / ((S - 1) * (N - 1))
    from_seeds, from_samples = of_seeds / (S * N), (of_samples - rest) / (S * N)
    assert from_samples > 0
    variance = from_seeds + from_samples
    freedom = math.floor(variance**2 / (from_seeds**2 / (S - 1) + from_samples**2 / (N - 1)))
    margin = t_quantile(freedom) * math.sqrt(variance)
    found = paired_difference(range(S), [D])
    assert found.value == pytest.approx(mean, abs=1e-14)
    assert found.by_seed == pytest.approx(dict(enumerate(rows)), abs=1e-14)
    assert found.interval == pytest.approx((mean - margin, mean + margin), abs=1e-12)


def test_samples_that_every_seed_finds_equally_hard_count_once_and_not_once_a_seed() -> None:
    sample = np.random.default_rng(1).standard_normal(50)
    found = paired_difference(range(8), [np.tile(sample, (8, 1))])
    margin = t_quantile(49) * sample.std(ddof=1) / math.sqrt(50)
    assert found.interval == pytest.approx((sample.mean() - margin, sample.mean() + margin), abs=1e-12)


def test_several_cells_count_alike_and_their_samples_are_their_own() -> None:
    generator = np.random.default_rng(2)
    cells = [drawn(3, samples, (0.0, 1.0, 0.0), generator) + samples for samples in (10, 40)]
    found = paired_difference(range(3), cells)
    means = [float(cell.mean()) for cell in cells]
    assert found.value == pytest.approx(sum(means) / 2)
    parts = [float(cell[0].var(ddof=1)) / cell.shape[1] / 4 for cell in cells]
    freedom = math.floor(sum(parts) ** 2 / (parts[0] ** 2 / 9 + parts[1] ** 2 / 39))
    assert found.interval is not None
    assert found.interval[1] - found.value == pytest.approx(t_quantile(freedom) * math.sqrt(sum(parts)))


@pytest.mark.parametrize("spread", [(1.0, 0.0, 1.0), (0.0, 1.0, 1.0), (0.2, 1.0, 1.0), (0.0, 0.0, 1.0)])
@pytest.mark.parametrize("seeds", [3, 8])
def test_intervals_cover_what_they_claim(seeds: int, spread: tuple[float, float, float]) -> None:
    """Three seeds as well; too wide is allowed where samples vary alike for all seeds, too narrow nowhere."""
    generator, trials = np.random.default_rng(3), 1500
    covered = 0
    for _ in range(trials):
        interval = paired_difference(range(seeds), [drawn(seeds, 25, spread, generator)]).interval
        assert interval is not None
        covered += interval[0] <= 0 <= interval[1]
    assert covered / trials > 0.95 - 4 * math.sqrt(0.95 * 0.05 / trials)


def test_where_a_bootstrap_and_where_these_intervals_cover_less() -> None:
    """docs/ablations.md, How far to trust an interval: three seeds, whose differences outweigh those of samples."""
    generator, trials = np.random.default_rng(4), 800
    ours = bootstrap = lost = 0
    for _ in range(trials):
        heavy = generator.standard_t(3, (3, 1)) + 0.5 * generator.standard_normal((3, 40))
        ours += _holds_zero(heavy)
        resampled = [heavy[generator.integers(0, 3, 3)][:, generator.integers(0, 40, 40)].mean() for _ in range(150)]
        low, high = np.quantile(resampled, [0.025, 0.975])
        bootstrap += low <= 0 <= high
        # One seed in seven learns nothing; all are 0 on average.
        sometimes = np.where(generator.random((3, 1)) < 1 / 7, -6.0, 1.0) + 0.5 * generator.standard_normal((3, 40))
        lost += _holds_zero(sometimes)
    assert ours / trials > 0.95 - 4 * math.sqrt(0.95 * 0.05 / trials)
    assert bootstrap / trials < 0.87
    assert lost / trials < 0.75


def _holds_zero(D: Float64) -> bool:
    interval = paired_difference(range(len(D)), [D]).interval
    assert interval is not None
    return interval[0] <= 0 <= interval[1]


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_the_exact_test_tries_every_choice_of_signs(n: int) -> None:
    by_seed = np.random.default_rng(n).standard_normal(n) + 0.5
    extreme = [
        abs(sum(sign * value for sign, value in zip(signs, by_seed, strict=True))) >= abs(sum(by_seed)) - 1e-12
        for signs in itertools.product((1, -1), repeat=n)
    ]
    assert sign_flip(by_seed) == pytest.approx(sum(extreme) / 2**n)
    assert sign_flip(np.abs(by_seed)) == 2.0 ** (1 - n)
    assert sign_flip(np.zeros(n)) == 1.0


def test_the_exact_test_keeps_its_level() -> None:
    generator = np.random.default_rng(4)
    p = np.array([sign_flip(generator.standard_normal(8)) for _ in range(2000)], dtype=np.float64)
    assert 0.03 < (p <= 0.05).mean() < 0.06


def verdict(*by_seed: float) -> str:
    return seed_difference(dict(enumerate(by_seed))).verdict


def test_what_may_be_said() -> None:
    assert verdict(0.3, 0.31, 0.3, 0.29, 0.3) == "too few seeds"
    assert verdict(0.3, 0.31, 0.3, 0.29, 0.3, 0.32) == "higher"
    assert verdict(*(-value for value in (0.3, 0.31, 0.3, 0.29, 0.3, 0.32))) == "lower"
    assert verdict(0.3, -0.31, 0.3, -0.29, 0.3, -0.32) == "not shown"
    assert Difference(dict.fromkeys(range(6), 0.1), 0.1, (0.01, 0.2), 0.0625).verdict == "not shown"


def test_one_seed_tells_nothing_of_seeds() -> None:
    found = paired_difference([5], [np.array([[0.0, 1.0, 1.0]])])
    assert (found.interval, found.verdict, found.p) == (None, "too few seeds", 1.0)
    assert found.plain()["interval"] is None and found.by_seed == pytest.approx({5: 2 / 3})


def test_equal_models_differ_by_nothing() -> None:
    found = paired_difference(range(6), [np.zeros((6, 9))])
    assert (found.value, found.interval, found.p, found.verdict) == (0.0, (0.0, 0.0), 1.0, "not shown")


@pytest.mark.parametrize("cells", [[], [np.zeros((2, 3))], [np.zeros((3, 0))]])
def test_a_difference_of_nothing_is_an_error(cells: list[Float64]) -> None:
    with pytest.raises(ValueError, match="a difference needs"):
        paired_difference(range(3), cells)
