"""A goodness-of-fit check for tests of random draws, without SciPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def fits(counts: NDArray[Any], probabilities: NDArray[Any] | None = None, z: float = 5.0) -> bool:
    """Whether counts agree with probabilities (uniform if none): chi-square within z deviations of its mean.

    The tests' seeds are fixed, so a pass stays a pass; z = 5 keeps a right generator from failing by bad luck.
    """
    counts = np.asarray(counts, dtype=np.float64).ravel()
    if probabilities is None:
        probabilities = np.full(len(counts), 1 / len(counts))
    expected = counts.sum() * np.asarray(probabilities, dtype=np.float64).ravel()
    assert expected.min() >= 5, "too few draws for a chi-square"
    freedom = len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum()) < freedom + z * np.sqrt(2 * freedom)
