"""A difference between two models, paired by seed and by sample: its value, its interval, and an exact test over seeds.

D[s, i] is the difference of two scores of sample i, the model's minus the base's, both trained with seed s and asked
the same sample. Seeds and samples are crossed and both are drawn from many: D = mean + seed + sample + rest. The mean
over both has the variance

    V = V_seed + V_sample,   V_seed = var_s(mean_i D) / S,   V_sample = (MS_sample - MS_rest) / (S N), at least 0

with the mean squares of the two-way table without repetition (Searle, Casella and McCulloch, "Variance Components",
1992, section 4.4), and the interval is the mean ± t sqrt(V), Student's t with Satterthwaite's (1946) degrees of freedom
V^2 / (V_seed^2 / (S - 1) + V_sample^2 / (N - 1)). Drawing seeds again instead (the bootstrap) covers too little: with
three seeds about three times in four where 95 % is claimed. Several cells (the depths of a length) count alike, each
with samples of its own.

The test takes nothing for granted but that without an effect each seed's difference is as likely to have the other
sign: p is the share of the 2^S choices of signs whose mean is at least as far from 0. It can't be below 2^(1-S), so
that fewer than six seeds never reach 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from decaybench.results.statistics import Interval, t_quantile

Float64 = NDArray[np.float64]
Verdict = Literal["higher", "lower", "not shown", "too few seeds"]

LEVEL = 0.05
_EXACT = 20  # seeds up to which every choice of signs is tried
_CLOSE = 1e-12  # means that differ by less are the same mean added up in another order


@dataclass(frozen=True)
class Difference:
    """by_seed: the mean over samples, by seed. interval: 95 %; None with one seed, which tells nothing of seeds.
    p: of the exact test over seeds; None with more seeds than can be tried.
    """

    by_seed: dict[int, float]
    value: float
    interval: Interval | None
    p: float | None

    @property
    def verdict(self) -> Verdict:
        """What may be said: `too few seeds` where no outcome could reach 5 %, whatever the interval."""
        if 2.0 ** (1 - len(self.by_seed)) > LEVEL or self.interval is None:
            return "too few seeds"
        low, high = self.interval
        if low <= 0 <= high or (self.p is not None and self.p > LEVEL):
            return "not shown"
        return "higher" if low > 0 else "lower"

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "value": self.value,
            "interval": None if self.interval is None else list(self.interval),
            "p": self.p,
            "verdict": self.verdict,
            "by_seed": {str(seed): value for seed, value in self.by_seed.items()},
        }


def paired_difference(seeds: Sequence[int], cells: Sequence[Float64]) -> Difference:
    """cells: for each cell the differences of scores, [S, N]: row s is of seeds[s], column i of the same sample.

    Raises ValueError where there is no seed, no cell or no sample.
    """
    if not len(seeds) or not cells or any(cell.shape[0] != len(seeds) or cell.shape[1] < 1 for cell in cells):
        raise ValueError("a difference needs a row for each seed and a sample at least, in every cell")
    by_seed = np.mean([cell.mean(1) for cell in cells], axis=0)
    value = float(by_seed.mean())
    return Difference(
        dict(zip(seeds, by_seed.tolist(), strict=True)), value, _interval(value, by_seed, cells), sign_flip(by_seed)
    )


def seed_difference(by_seed: dict[int, float]) -> Difference:
    """Of numbers that have no samples (a loss), paired by seed alone: Student's t over the seeds."""
    numbers = np.array(list(by_seed.values()), dtype=np.float64)
    return paired_difference(list(by_seed), [numbers[:, None]])


def sign_flip(by_seed: Float64) -> float | None:
    """p of the two-sided test of the mean by every choice of signs; None with more than 20 numbers."""
    n = len(by_seed)
    if n > _EXACT:
        return None
    signs = 1 - 2 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
    sums = np.abs(signs @ by_seed)
    return float(np.mean(sums >= abs(by_seed.sum()) - _CLOSE))


def _interval(value: float, by_seed: Float64, cells: Sequence[Float64]) -> Interval | None:
    seeds = len(by_seed)
    if seeds < 2:
        return None
    from_seeds = float(by_seed.var(ddof=1)) / seeds
    parts = [_sample_variance(cell) / len(cells) ** 2 for cell in cells]
    variance = from_seeds + sum(parts)
    if not variance:
        return value, value
    spread = from_seeds**2 / (seeds - 1)
    spread += sum(part**2 / (cell.shape[1] - 1) for part, cell in zip(parts, cells, strict=True) if part)
    margin = t_quantile(max(1, math.floor(variance**2 / spread + _CLOSE))) * math.sqrt(variance)
    return value - margin, value + margin


def _sample_variance(cell: Float64) -> float:
    """What the choice of samples adds to the variance of a cell's mean."""
    seeds, samples = cell.shape
    if samples < 2:
        return 0.0
    by_sample, by_seed = cell.mean(0), cell.mean(1)
    rest = cell - by_sample - by_seed[:, None] + cell.mean()
    of_samples = seeds * float(by_sample.var(ddof=1))
    of_rest = float((rest**2).sum()) / ((seeds - 1) * (samples - 1))
    found: float = max(0.0, of_samples - of_rest) / (seeds * samples)
    return found
