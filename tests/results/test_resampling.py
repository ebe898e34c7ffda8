"""Bootstrap intervals are as wide as the error of what they stand beside, and the same every time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from decaybench.results.resampling import means, slopes


def test_the_interval_of_a_mean_has_the_width_of_its_error() -> None:
    values = np.random.default_rng(0).normal([0.0, 5.0], [1.0, 0.1], (60, 2))
    for column, estimate in enumerate(means(values, key=3)):
        low, high = estimate.interval
        assert estimate.value == pytest.approx(values[:, column].mean())
        assert low < estimate.value < high
        assert high - low == pytest.approx(2 * 1.96 * values[:, column].std() / math.sqrt(60), rel=0.1)
    assert means(values, key=3) == means(values, key=3) != means(values, key=4)


def test_a_slope_is_that_of_least_squares_and_its_interval_that_of_independent_means() -> None:
    draws = np.random.default_rng(1)
    at = np.array([0.0, 1.0, 4.0])
    values = [draws.normal([x, -2 * x], 0.5, (n, 2)) for x, n in zip(at, (50, 60, 70), strict=True)]
    errors = [samples.std(0) / math.sqrt(len(samples)) for samples in values]
    for column, estimate in enumerate(slopes(at, values, keys=[1, 2, 3])):
        line = np.polyfit(at, [samples[:, column].mean() for samples in values], 1)
        assert estimate.value == pytest.approx(line[0])
        # The slope's derivative by each mean is that of a line through that mean moved by 1.
        moved = [np.polyfit(at, np.arange(3) == k, 1)[0] for k in range(3)]
        error = math.sqrt(sum((w * e[column]) ** 2 for w, e in zip(moved, errors, strict=True)))
        low, high = estimate.interval
        assert high - low == pytest.approx(2 * 1.96 * error, rel=0.1)
