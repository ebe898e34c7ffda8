"""Initial values as distributions: Kolmogorov and Smirnov's two-sample test, without SciPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def assert_same_law(ours: ArrayLike, theirs: ArrayLike, what: str = "") -> None:
    """Whether two samples can be of one distribution; constants must be the same constant.

    The largest distance between the two empirical distribution functions is compared with the distance that equal
    laws exceed once in a million tests: 3.8 / sqrt(n) for n values each, so give thousands. Seeds in tests are fixed,
    so a pass stays a pass.
    """
    a, b = (np.sort(np.asarray(x, dtype=np.float64).ravel()) for x in (ours, theirs))
    if np.ptp(b) == 0:
        assert np.allclose(a, b[0], rtol=1e-6, atol=0), f"{what}: not the constant {b[0]}"
        return
    assert min(len(a), len(b)) >= 200, f"{what}: too few values to tell laws apart"
    distance = _distance(a, b)
    bound = math.sqrt(-math.log(1e-6 / 2) / 2 * (len(a) + len(b)) / (len(a) * len(b)))
    assert distance < bound, f"{what}: distributions {distance:.3f} apart, more than {bound:.3f}"


def _distance(a: NDArray[Any], b: NDArray[Any]) -> float:
    points = np.concatenate([a, b])
    ours, theirs = (np.searchsorted(x, points, side="right") / len(x) for x in (a, b))
    return float(np.abs(ours - theirs).max())
