"""What is claimed of a cell, from its counts alone: value, standard error, 95 % interval; octaves, rank correlations.

Wilson's score interval (Wilson, 1927) with z = z_.975, p the mean score and n the samples:

    (p + z^2/2n ± z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)

Student's t: P(|t| <= x) with theta = arctan(x / sqrt(df)) is a finite sum in cos(theta) (Abramowitz and Stegun,
26.7.3 and 26.7.4); for many degrees of freedom its quantile is a series around the normal's (26.7.5).

Rank correlations of pairs (x_i, y_i), with s_ij = sign(x_i - x_j) and t_ij = sign(y_i - y_j): Kendall's tau-b (1945) is
sum(s t) / sqrt(sum(s^2) sum(t^2)) over all i and j. Spearman's is the same of the sums of s and of t over j, which are
ranks up to a factor and a constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from decaybench.core.scoring import Metric, score

Interval = tuple[float, float]

_LEVEL = 0.95
_Z = NormalDist().inv_cdf(0.5 + _LEVEL / 2)
_MANY = 200


def cell_statistics(metric: Metric, correct: Sequence[int], asked: Sequence[int]) -> tuple[float, float, Interval]:
    """(value, standard_error, interval) of a cell, from each sample's counts.

    correct, asked: questions answered and asked, one entry a sample, 0 <= correct <= asked, asked >= 1, n >= 1.
    value: the mean of the samples' scores. A sample is the unit, because the questions of one sample share a
    sequence and are not independent.
    standard_error: sample standard deviation (n - 1) over sqrt(n); 0 for a single sample.
    interval, 95 %:
    - Wilson's where every score is 0 or 1 (`all_correct`; one question a sample): it stays in [0, 1] and keeps
      its coverage near both ends, where mean ± standard error doesn't.
    - Wilson's too where all scores are equal: the spread that was seen is 0, so 100 samples of 1.0 would claim
      [1, 1]. It takes a score as one coin toss, the widest law with that mean, and is wide rather than narrow.
    - else Wilson's at the effective number of coin tosses p(1-p)/standard_error^2, with Student's t (n - 1) in place
      of z: fractional scores have a variance of their own, which a binomial on n would overstate.
    Raises ValueError where the counts are impossible.
    """
    hits, questions = np.asarray(correct, dtype=np.int64), np.asarray(asked, dtype=np.int64)
    if len(hits) != len(questions) or len(hits) == 0:
        raise ValueError(f"{len(hits)} counts of correct answers, {len(questions)} of questions")
    if (questions < 1).any() or (hits < 0).any() or (hits > questions).any():
        raise ValueError("each sample needs asked >= 1 and 0 <= correct <= asked")
    scores = score(metric, hits, questions)
    n, value = len(scores), float(scores.mean())
    constant = bool(scores.min() == scores.max())
    error = 0.0 if constant else float(scores.std(ddof=1)) / math.sqrt(n)
    if constant or bool(np.isin(scores, (0.0, 1.0)).all()):
        return value, error, wilson(value, n)
    return value, error, wilson(value, value * (1 - value) / error**2, t_quantile(n - 1))


def wilson(share: float, n: float, z: float = _Z) -> Interval:
    """Wilson's score interval for a share in [0, 1] seen among n samples (or n effective ones); 95 % by default."""
    scale = 1 + z**2 / n
    centre = (share + z**2 / (2 * n)) / scale
    margin = z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)) / scale
    return (0.0 if share == 0 else centre - margin), (1.0 if share == 1 else centre + margin)


def t_interval(value: float, error: float, n: int) -> Interval:
    """Student's 95 % interval of a value with this standard error, estimated from n >= 2 samples."""
    margin = t_quantile(n - 1) * error
    return value - margin, value + margin


@lru_cache(maxsize=1024)
def t_quantile(df: int) -> float:
    """x with P(|t| <= x) = 95 % for Student's t with df >= 1 degrees of freedom; relative error below 1e-10."""
    if df > _MANY:
        return _t_series(df)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if _t_within(middle, df) < _LEVEL:
            low = middle
        else:
            high = middle
    return math.sqrt(df) * math.tan((low + high) / 2)


def octave(distance: int) -> int:
    """The lower edge 2^k of the octave [2^k, 2^(k+1)) that holds a distance >= 1, tokens."""
    if distance < 1:
        raise ValueError(f"a distance is at least 1 token, not {distance}")
    return 1 << (int(distance).bit_length() - 1)


def kendall(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Kendall's tau-b of pairs (x, y); None where all x or all y are the same."""
    signs = [np.sign(np.subtract.outer(np.asarray(v, dtype=np.float64), v)) for v in (x, y)]
    scale = math.sqrt(float((signs[0] ** 2).sum() * (signs[1] ** 2).sum()))
    return float((signs[0] * signs[1]).sum()) / scale if scale else None


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's rank correlation of pairs (x, y), equal ones sharing their mean rank; None where all are the same."""
    ranks = [np.sign(np.subtract.outer(np.asarray(v, dtype=np.float64), v)).sum(1) for v in (x, y)]
    scale = math.sqrt(float((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum()))
    return float((ranks[0] * ranks[1]).sum()) / scale if scale else None


def _t_within(theta: float, df: int) -> float:
    cosine = math.cos(theta)
    term = cosine if df % 2 else 1.0
    total = term if df > 1 else 0.0
    for k in range(3 if df % 2 else 2, df - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    if df % 2:
        return 2 / math.pi * (theta + math.sin(theta) * total)
    return math.sin(theta) * total


def _t_series(df: int) -> float:
    z = _Z
    return (
        z
        + (z**3 + z) / (4 * df)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * df**4)
    )
