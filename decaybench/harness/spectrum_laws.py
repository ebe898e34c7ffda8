"""What a set of timescales means, as functions of numbers alone.

    gaps       differences of neighbouring log timescales, nats; of N at random in a range L the smallest is
               L / (N-1)^2 on average, of N evenly spaced ones all are L / (N-1)
    useful     channels with 1 <= tau(t) <= t
    retention  of token j at t: exp(-sum_{s=j+1..t} 1 / tau(s)); exp(-a sum s^-alpha) for tau(s) = s^alpha / a
    graded     channels that keep 5 to 95 % of a token: neither as good as nothing nor as good as all

Random means log-uniform between the slowest and the fastest, which are given: the N - 1 gaps are then a stick of length
L broken at N - 2 uniform points, whose order statistics are known. Source of the questions: PoST, arXiv 2604.07658.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

GRADED = (0.05, 0.95)
PER_OCTAVE = 8  # points of a density

_KERNEL = 0.75  # standard deviation of a density's kernel, octaves
_ROUNDING = 1e-5  # of float32 timescales: PoST's fastest channel has tau = 1 exactly
_EXACT = 64  # positions up to which every rate is asked for
_NODES = 32  # rates an octave that are asked for beyond


@dataclass(frozen=True)
class Gaps:
    """Of the log timescales of one layer, nats. count: timescales; width: from the fastest to the slowest.

    smallest, median: of the gaps between neighbours. even: all gaps of as many in this range evenly spaced;
    random_smallest, random_median: means of as many at random; random_band: 5 and 95 % of their smallest.
    """

    count: int
    width: float
    smallest: float
    median: float
    even: float
    random_smallest: float
    random_band: tuple[float, float]
    random_median: float

    @classmethod
    def of(cls, logs: Float64) -> Gaps | None:
        """Of log timescales (or log speeds) [N] in any order; None for one alone."""
        if len(logs) < 2:
            return None
        gaps = np.diff(np.sort(logs))
        m, width = len(gaps), float(gaps.sum())
        return cls(
            count=len(logs),
            width=width,
            smallest=float(gaps.min()),
            median=float(np.median(gaps)),
            even=width / m,
            random_smallest=width / m**2,
            random_band=(_smallest_quantile(0.05, m, width), _smallest_quantile(0.95, m, width)),
            random_median=_random_median(m, width),
        )

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "width": self.width,
            "smallest": self.smallest,
            "median": self.median,
            "even": self.even,
            "random_smallest": self.random_smallest,
            "random_smallest_5_to_95_percent": list(self.random_band),
            "random_median": self.random_median,
        }


def useful(timescales: Float64, position: int) -> int:
    """How many of the timescales at `position` lie within [1, position] tokens; any shape."""
    return int(np.count_nonzero((timescales >= 1 - _ROUNDING) & (timescales <= position * (1 + _ROUNDING))))


def graded(retention: Float64) -> int:
    """How many of the retentions lie within 5 to 95 %; any shape."""
    low, high = GRADED
    return int(np.count_nonzero((retention >= low) & (retention <= high)))


def cumulative_rates(rates_at: Callable[[int], Float64], positions: Collection[int]) -> dict[int, Float64]:
    """C(t) = sum_{s=1..t} rate(s), [N], at each of `positions`; so retention of token j at t is exp(C(j) - C(t)).

    rates_at: the rates 1 / tau [N] at a position. Up to position 64 all are asked for, and beyond it 32 an octave: a
    rate between two of them is taken for the power of s that joins them, as those of all spectra are (of RWKV-7's
    nearly), and is summed by the formula of Euler and Maclaurin.
    """
    last = max(positions)
    far = [round(_EXACT * 2 ** (k / _NODES)) for k in range(_NODES * max(0, (last // _EXACT).bit_length()) + 1)]
    nodes = sorted({*range(1, min(last, _EXACT) + 1), *positions, *(s for s in far if s <= last)})
    total = rates = np.asarray(rates_at(1), dtype=np.float64)
    found = {1: total}
    for a, b in pairwise(nodes):
        before, rates = rates, np.asarray(rates_at(b), dtype=np.float64)
        total = total + _power_sum(a, b, before, rates)
        found[b] = total
    return {position: found[position] for position in positions}


def density(timescales: Float64, octaves: Float64) -> Float64:
    """Share of the timescales (any shape) an octave, [n], at log2 timescales `octaves` [n], evenly `PER_OCTAVE` apart.

    Smoothed by a Gaussian of 3/4 octave; what lies beyond the ends counts as there.
    """
    step = 1 / PER_OCTAVE
    edges = np.concatenate([octaves - step / 2, octaves[-1:] + step / 2])
    logs = np.log2(timescales).ravel().clip(edges[0], edges[-1])
    counts = np.histogram(logs, edges)[0] / max(logs.size, 1)
    distance = octaves[:, None] - octaves[None]
    kernel = np.exp(-0.5 * (distance / _KERNEL) ** 2)
    smooth: Float64 = (kernel / (kernel.sum(0) * step)) @ counts
    return smooth


def octaves_of(low: float, high: float) -> Float64:
    """log2 timescales at which a density of timescales from `low` to `high` is drawn."""
    first, last = np.floor(np.log2(low)) - 1, np.ceil(np.log2(high)) + 1
    return np.linspace(first, last, round((last - first) * PER_OCTAVE) + 1)


def _smallest_quantile(share: float, m: int, width: float) -> float:
    """Below which the smallest of m gaps is with this probability: P(> x) = (1 - m x / width)^(m - 1)."""
    if m == 1:
        return width
    return float(width / m * (1 - (1 - share) ** (1 / (m - 1))))


def _random_median(m: int, width: float) -> float:
    """Mean of the median of m gaps; that of the k-th smallest is width / m sum_{i<k} 1 / (m - i)."""
    means = width / m * np.cumsum(1 / (m - np.arange(m)))
    return float(np.median(means))


def _power_sum(a: int, b: int, low: Float64, high: Float64) -> Float64:
    """sum_{s=a+1..b} f(s), [N], for the f(s) = c s^-alpha with f(a) = low and f(b) = high."""
    if b == a + 1:
        return high
    tiny = np.finfo(np.float64).tiny
    low, high = np.maximum(low, tiny), np.maximum(high, tiny)
    x = np.log(b / a)
    alpha = -np.log(high / low) / x
    rest = (1 - alpha) * x
    near = np.abs(rest) < 1e-8
    integral = low * a * x * np.where(near, 1 + rest / 2, np.expm1(rest) / np.where(near, 1, rest))
    slopes = -alpha * (high / b - low / a)
    thirds = -alpha * (alpha + 1) * (alpha + 2) * (high / b**3 - low / a**3)
    found: Float64 = integral + (high - low) / 2 + slopes / 12 - thirds / 720
    return found
