"""How well N decaying exponentials fit the power law t^-beta on [1, T], whatever their rates.

    e(w) = t^-beta - sum_k w_k exp(-p_k t)          on a log grid t_1 = 1 < ... < t_M = T, real weights w

Least squares takes min sqrt(mean e^2), minimax min max |e|. The matrix exp(-p_k t_i) is so ill-conditioned (1e25 for 32
rates) that float64 stops far above the optimum. So its columns, and t^-beta, are made orthogonal by modified
Gram-Schmidt in integers that count 2^-bits, as many bits as the matrix' condition takes and 60 more. What comes out is
an orthonormal basis of exactly their span, and the residual of least squares, both with the relative precision of
float64: there is no floor. Minimax then is Remez's exchange on the grid, which ends with its own proof: no weights have
an error below `bound` (de la Vallee Poussin, 1910). What float32 can tell of it is least squares of the unit columns
without the singular values below 2^-23 of the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from math import ceil, floor, isqrt, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Whole = NDArray[Any]  # Python's integers of any size

FLOAT32 = 2.0**-23  # the relative size of a singular value that float32 can't tell from 0

_POINTS = 96
_POINTS_A_RATE = 5
_BITS = 192  # at first; 6 a rate where that is more
_BITS_A_RATE = 6
_SPARE = 60  # bits that must be left
_CLOSE = 1e-6  # of the minimax error: how near to its bound the exchange ends
_EXCHANGES = 60


@dataclass(frozen=True)
class Fit:
    """Of one kernel. least_squares: root of the mean square error, minimax: the largest error, each at its own best
    weights; bound: no weights have a largest error below it; float32: as least_squares, in float32's reach.
    weight: the largest |w_k| of least squares.
    """

    least_squares: float
    minimax: float
    bound: float
    float32: float
    weight: float


def fit_exponentials(rates: Float64, length: float, betas: tuple[float, ...]) -> list[Fit]:
    """Fit t^-beta on [1, length] by exponentials of these rates (1/tokens, [N]); a fit for each beta."""
    rates = np.unique(rates)
    points = max(_POINTS, _POINTS_A_RATE * len(rates))
    bits = max(_BITS, _BITS_A_RATE * len(rates))
    while True:
        found = _solve(_exponentials(rates, length, points, bits), _power_laws(length, points, betas, bits), bits)
        if found is not None:
            t = log_grid(length, points)
            columns = np.exp(-np.outer(t - 1, rates))  # exp(p) is a weight's
            return _complete(found, columns, np.stack([t**-beta for beta in betas], axis=1))
        bits += _BITS


def fit_functions(columns: Float64, targets: Float64) -> list[Fit]:
    """Fit each target, [M, K], by columns [M, N] of any kind on the same M points; numbers in [-1, 1]."""
    bits = _BITS
    while True:
        found = _solve(_whole(columns, bits), _whole(targets, bits), bits)
        if found is not None:
            return _complete(found, columns, targets)
        bits += _BITS


def log_grid(length: float, points: int) -> Float64:
    """`points` places or a few more from 1 to length, whose ratio is a root of 2: so that exp(-2pt) is a square."""
    step = _places_an_octave(length, points)
    t = length * 2.0 ** (-np.arange(floor(step * log2(length) + 1e-9), -1, -1) / step)
    if t[0] < 1 + 1e-9:
        t[0] = 1.0
        return t
    return np.concatenate([[1.0], t])


def minimax(basis: Float64, residual: Float64) -> tuple[float, float]:
    """The least possible max |residual - basis w| over w, and what it can't be below; residual [M], basis [M, N].

    basis: orthonormal, and of functions whose sums have N - 1 zeros at most (as exponentials have); residual: that of
    least squares, which therefore has N zeros at least. Remez's exchange: N + 1 places where the error alternates in
    sign are balanced, and exchanged for the largest errors between its zeros. Where the error doesn't alternate, which
    takes functions that vanish on much of the grid, the best yet.
    """
    error = residual
    best, bound = float(np.abs(error).max()), float(np.sqrt((error**2).mean()))
    signs = (-1.0) ** np.arange(basis.shape[1] + 1)
    for _ in range(_EXCHANGES):
        places = _alternating(error, len(signs))
        if places is None:
            break
        try:
            solution = np.linalg.solve(np.column_stack([basis[places], signs]), residual[places])
        except np.linalg.LinAlgError:
            break
        error = residual - basis @ solution[:-1]
        best, bound = min(best, float(np.abs(error).max())), max(bound, abs(float(solution[-1])))
        if best <= bound * (1 + _CLOSE):
            break
    return best, min(bound, best)


@dataclass(frozen=True)
class _Solved:
    least_squares: float
    minimax: float
    bound: float
    weight: float


def _complete(found: list[_Solved], columns: Float64, targets: Float64) -> list[Fit]:
    """With what float32 reaches of it."""
    left, sizes, _ = np.linalg.svd(columns / np.linalg.norm(columns, axis=0), full_matrices=False)
    kept = left[:, sizes > FLOAT32 * sizes[0]]
    reached = np.sqrt(((targets - kept @ (kept.T @ targets)) ** 2).mean(0))
    return [
        Fit(fit.least_squares, fit.minimax, fit.bound, max(float(error), fit.least_squares), fit.weight)
        for fit, error in zip(found, reached, strict=True)
    ]


def _solve(columns: Whole, targets: Whole, bits: int) -> list[_Solved] | None:
    """Least squares and minimax of each target; None where more bits are needed."""
    count = columns.shape[1]
    rest = np.concatenate([columns, targets], axis=1)
    sizes = [_norm(column) for column in rest.T]
    basis, triangle = np.zeros(columns.shape), np.zeros((count, rest.shape[1]), dtype=object)
    for k in range(count):
        norm = _norm(rest[:, k])
        if sizes[k].bit_length() - norm.bit_length() > bits - _SPARE:
            return None
        unit = (rest[:, k] << bits) // norm
        basis[:, k] = (unit >> (bits - 62)).astype(np.float64) / 2.0**62
        shares = (unit @ rest[:, k + 1 :]) >> bits
        triangle[k, k], triangle[k, k + 1 :] = norm, shares
        rest[:, k + 1 :] = rest[:, k + 1 :] - (np.outer(unit, shares) >> bits)
    found = []
    for k in range(count, rest.shape[1]):
        weight, norm = _largest_weight(triangle, count, k, bits), _norm(rest[:, k])
        # weight / (norm / size) is about the condition of the columns, by which the units' errors grow.
        if weight.bit_length() + sizes[k].bit_length() - norm.bit_length() > 2 * bits - _SPARE:
            return None
        scale = int(np.abs(rest[:, k]).max())
        residual = np.array([value / scale for value in rest[:, k]], dtype=np.float64)
        largest, least = scale / 2.0**bits, float(np.sqrt((residual**2).mean()))
        best, bound = minimax(basis, residual)
        found.append(_Solved(least * largest, best * largest, bound * largest, weight / 2.0**bits))
    return found


def _largest_weight(triangle: Whole, count: int, target: int, bits: int) -> int:
    """In units of 2^-bits, by back substitution of the columns' triangle."""
    weights = np.zeros(count, dtype=object)
    for k in range(count - 1, -1, -1):
        rest = triangle[k, target] * (1 << bits) - triangle[k, k + 1 : count] @ weights[k + 1 :]
        weights[k] = rest // triangle[k, k]
    return max(abs(int(weight)) for weight in weights)


def _norm(column: Whole) -> int:
    return max(1, isqrt(column @ column))


def _alternating(error: Float64, count: int) -> NDArray[np.int64] | None:
    """Places of `count` errors of alternating sign, the largest among them; None where there are fewer."""
    changes = np.flatnonzero(np.diff(error >= 0)) + 1
    runs = np.split(np.arange(len(error)), changes)
    places = [int(run[np.argmax(np.abs(error[run]))]) for run in runs]
    if len(places) < count:
        return None
    while len(places) > count:
        sizes = [abs(error[place]) for place in places]
        k = int(np.argmin(sizes))
        if len(places) == count + 1 or k in (0, len(places) - 1):
            del places[0 if sizes[0] < sizes[-1] else -1]
        else:  # with a neighbour, that the signs go on alternating
            first = k - 1 if sizes[k - 1] < sizes[k + 1] else k
            del places[first : first + 2]
    return np.array(places)


def _places_an_octave(length: float, points: int) -> int:
    return ceil((points - 1) / log2(length))


def _exponentials(rates: Float64, length: float, points: int, bits: int) -> Whole:
    """exp(-p t) on the log grid in units of 2^-bits: Python's decimals in the first octave, then squares."""
    t, step = log_grid(length, points), _places_an_octave(length, points)
    on_ladder = floor(step * log2(length) + 1e-9) + 1
    start = len(t) - on_ladder  # 1 where the ladder doesn't reach it
    with localcontext(_decimals(bits)):
        exact = [Decimal(float(rate)) for rate in rates]
        unit = Decimal(1 << bits)
        rows = [
            np.array([int((-rate * Decimal(float(place))).exp() * unit) for rate in exact], dtype=object)
            for place in t[: start + step]
        ]
    for place in range(len(rows), len(t)):
        rows.append((rows[place - step] ** 2) >> bits)
    return np.stack(rows)


@lru_cache(maxsize=64)
def _power_laws(length: float, points: int, betas: tuple[float, ...], bits: int) -> Whole:
    """t^-beta on the log grid in units of 2^-bits."""
    with localcontext(_decimals(bits)):
        unit = Decimal(1 << bits)
        logs = [Decimal(float(place)).ln() for place in log_grid(length, points)]
        return np.array([[int((log * Decimal(-beta)).exp() * unit) for beta in betas] for log in logs], dtype=object)


def _decimals(bits: int) -> Context:
    return Context(prec=ceil(bits * 0.302) + 8, Emin=-(10**8), Emax=10**8)


def _whole(values: Float64, bits: int) -> Whole:
    exact = np.array([[int(value * 2.0**62) for value in row] for row in values], dtype=object)
    return exact << (bits - 62)
