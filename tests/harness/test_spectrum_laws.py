"""What timescales mean: gaps against simulated random spectra, retentions against plain sums, densities by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from decaybench.harness.spectrum_laws import (
    PER_OCTAVE,
    Gaps,
    cumulative_rates,
    density,
    graded,
    octaves_of,
    useful,
)


def test_gaps_of_a_few_timescales() -> None:
    gaps = Gaps.of(np.array([0.0, 3.0, 1.0, 7.0]))
    assert gaps is not None
    assert (gaps.count, gaps.width, gaps.smallest, gaps.median) == (4, 7.0, 1.0, 2.0)
    assert gaps.even == pytest.approx(7 / 3) and gaps.random_smallest == pytest.approx(7 / 9)
    assert Gaps.of(np.array([2.0])) is None
    two = Gaps.of(np.array([1.0, 4.0]))
    assert two is not None and {two.smallest, two.median, two.even, two.random_smallest, *two.random_band} == {3.0}


@pytest.mark.parametrize("count", [3, 8, 25])
def test_random_gaps_are_those_of_simulated_spectra(count: int) -> None:
    """N - 2 uniform points between two ends, many times."""
    draws = np.random.default_rng(0)
    width, rounds = 5.0, 40_000
    inner = draws.uniform(0, width, (rounds, count - 2))
    points = np.sort(np.concatenate([np.zeros((rounds, 1)), inner, np.full((rounds, 1), width)], axis=1), axis=1)
    gaps = np.diff(points)
    law = Gaps.of(np.linspace(0, width, count))
    assert law is not None
    assert law.random_smallest == pytest.approx(gaps.min(1).mean(), rel=0.02)
    assert law.random_median == pytest.approx(np.median(gaps, axis=1).mean(), rel=0.01)
    assert law.random_band == pytest.approx(np.quantile(gaps.min(1), [0.05, 0.95]), rel=0.05)
    assert law.smallest == pytest.approx(law.even)


def test_the_smallest_random_gap_falls_as_the_square_of_the_number() -> None:
    small, large = (Gaps.of(np.linspace(0, 1, n)) for n in (101, 201))
    assert small is not None and large is not None
    assert small.random_smallest / large.random_smallest == pytest.approx(4.0)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0, 1.0 + 1e-10, 1.7])
def test_rates_that_are_powers_add_up(alpha: float) -> None:
    rates = np.array([0.7, 1e-3])
    positions = [1, 2, 63, 64, 65, 100, 777, 4096, 30_000]
    found = cumulative_rates(lambda s: rates * s**-alpha, positions)
    steps = np.arange(1, positions[-1] + 1, dtype=np.float64) ** -alpha
    for t in positions:
        assert found[t] == pytest.approx(rates * math.fsum(steps[:t]), rel=1e-10)


def test_rates_in_a_logit_add_up_nearly() -> None:
    """RWKV-7's: c sigmoid(w - alpha log s), a power of s at both ends and none between."""
    logits, alpha = np.array([4.0, 0.0, -3.0]), np.array([1.0, 0.6, 0.2])

    def rates(s: float) -> np.ndarray:
        return 0.60653 / (1 + np.exp(alpha * math.log(s) - logits))

    found = cumulative_rates(rates, [20_000])[20_000]
    assert found == pytest.approx(sum(rates(s) for s in range(1, 20_001)), rel=1e-5)


def test_a_rate_of_nothing_adds_nothing() -> None:
    found = cumulative_rates(lambda s: np.array([0.0, 1e-300]), [1, 1000])
    assert np.all(found[1000] < 1e-200)


def test_useful_and_graded_are_counted_with_their_ends() -> None:
    taus = np.array([0.5, 1.0, 1 - 1e-7, 64.0, 64 + 1e-5, 65.0])
    assert [useful(taus, t) for t in (1, 64, 65)] == [2, 4, 5]
    assert graded(np.array([0.0, 0.049, 0.05, 0.5, 0.95, 0.951, 1.0])) == 3


def test_a_density_is_a_sum_of_bells() -> None:
    octaves = octaves_of(0.3, 900.0)
    assert octaves[0] == -3 and octaves[-1] == 11 and np.diff(octaves) == pytest.approx(1 / PER_OCTAVE)
    taus = np.array([4.0, 4.0, 64.0])
    found = density(taus, octaves)
    bell = np.exp(-0.5 * ((octaves[:, None] - np.log2(taus)) / 0.75) ** 2).mean(1) / (0.75 * math.sqrt(2 * math.pi))
    assert found == pytest.approx(bell, abs=1e-3)
    assert found.sum() / PER_OCTAVE == pytest.approx(1.0)
    assert density(np.array([1e30]), octaves).sum() / PER_OCTAVE == pytest.approx(1.0), "beyond the end counts there"
