"""Means over samples, and slopes of such means, with 95 % intervals by drawing the samples again (Efron, 1979).

The n samples are drawn again with replacement, n at a time and 1000 times; an interval lies between the 2.5 and 97.5 %
quantiles of what the draws give. A slope is that of least squares, sum_k w_k mean_k with

    w_k = (z_k - mean z) / sum_j (z_j - mean z)^2

over means at z_1, z_2, ... whose samples are drawn independently. Draws are a function of a key alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decaybench.core.draws import Draws

Float64 = NDArray[np.float64]

_RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """A number that samples tell, with its 95 % interval."""

    value: float
    interval: tuple[float, float]

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        return {"value": self.value, "interval": list(self.interval)}


def means(values: Float64, key: int) -> tuple[Estimate, ...]:
    """The mean over samples of each column of `values`, [n, L]; key: of the draws."""
    return _with_intervals(values.mean(0), _redrawn(values, key))


def slopes(at: Float64, values: Sequence[Float64], keys: Sequence[int]) -> tuple[Estimate, ...]:
    """By column what a unit of `at` adds to the mean over samples.

    at: two places or more, not all the same; values: the samples at each, [n, L]; keys: of their draws.
    """
    centred = at - at.mean()
    weights = centred / (centred**2).sum()
    found = np.stack([samples.mean(0) for samples in values])
    redrawn = np.stack([_redrawn(samples, key) for samples, key in zip(values, keys, strict=True)])
    return _with_intervals(weights @ found, np.tensordot(weights, redrawn, axes=1))


def _redrawn(values: Float64, key: int) -> Float64:
    """Means over samples drawn again, [_RESAMPLES, L], of values [n, L]."""
    n = len(values)
    chosen = Draws(key, np.arange(_RESAMPLES)).integers(0, n, n)
    rows = np.arange(_RESAMPLES)[:, None]
    counts = np.bincount((chosen + n * rows).ravel(), minlength=n * _RESAMPLES).reshape(_RESAMPLES, n)
    found: Float64 = counts @ values / n
    return found


def _with_intervals(values: Float64, redrawn: Float64) -> tuple[Estimate, ...]:
    low, high = np.quantile(redrawn, [0.025, 0.975], axis=0)
    return tuple(Estimate(float(v), (float(a), float(b))) for v, a, b in zip(values, low, high, strict=True))
