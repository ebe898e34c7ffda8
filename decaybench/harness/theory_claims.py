"""The paper's claims beside what was computed (harness/theory.py), each with its interval and a verdict by rule.

A spectrum's rate at T is the slope of ln(error) over N, by least squares; of random spectra ln(error) is the mean over
draws. Over several T the rate is a power of log T or of T, whose exponent is claimed. Intervals are of 95 %: of random
spectra by drawing the draws again, 2000 times, the same draws at every N and T; of those without chance Student's of
the regression, which says how straight the line is and nothing of samples. A scaling g(N, T) collapses the errors where
ln(error) = a - c g(N, T) with one a and c for all N and T; how far off it is, is the root of the mean square deviation,
given as a factor of the error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, isfinite, log, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from decaybench.core.draws import Draws
from decaybench.core.hashing import key64
from decaybench.harness.theory import (
    CODE,
    CODE_KEPT,
    FAST,
    GEOMETRIC,
    LINEAR,
    LOG_UNIFORM,
    NORMS,
    STATIC,
    THEORY,
    UNIFORM,
    Errors,
    Findings,
)
from decaybench.harness.theory_fit import Float64
from decaybench.results.statistics import t_interval

if TYPE_CHECKING:
    from rich.table import Table

Interval = tuple[float, float]

HELD, IN_PART, NOT_HELD, CONTROL = "held", "in part", "not held", "a control"

SCALINGS: dict[str, Callable[[Float64, Float64], Float64]] = {
    "N/log T": lambda N, T: N / np.log(T),
    "N/sqrt T": lambda N, T: N / np.sqrt(T),
    "N/log N": lambda N, T: N / np.log(N),
    "N": lambda N, T: N,
    "sqrt N": lambda N, T: np.sqrt(N),
    "log N": lambda N, T: np.log(N),
}
_EXACT = {LOG_UNIFORM: "log T/(N^2 - 1)", UNIFORM: "2/(N(N - 1))"}
_RESAMPLES = 2000


@dataclass(frozen=True)
class Number:
    """A number that was found, with its interval; claimed: what it should be, None where no number is claimed."""

    value: float
    interval: Interval
    claimed: float | None = None

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        claimed = {} if self.claimed is None else {"claimed": self.claimed}
        return {"value": self.value, "interval": list(self.interval), **claimed}

    def __str__(self) -> str:
        return f"{_short(self.value)} [{_short(self.interval[0])}, {_short(self.interval[1])}]"


@dataclass(frozen=True)
class Claim:
    """A row of the table. beta: of the kernel, None where there is none; rule: when the verdict is `held`."""

    what: str
    beta: float | None
    claimed: str
    found: str
    verdict: str
    rule: str
    number: Number | None = None

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        found = {
            "what": self.what,
            "beta": self.beta,
            "claimed": self.claimed,
            "found": self.found,
            "verdict": self.verdict,
            "rule": self.rule,
            "number": None if self.number is None else self.number.plain(),
        }
        return {key: value for key, value in found.items() if value is not None}


@dataclass(frozen=True)
class Rates:
    """Of one spectrum, kernel and norm. rates: per channel, by length; scaled: rate log T and rate sqrt T, by length;
    exponents: of log T and of T in the rate, negated; collapse: by scaling, (c, deviation as a factor).
    """

    rates: tuple[Number, ...]
    exponents: dict[str, Number]
    collapse: dict[str, tuple[float, float]]

    @property
    def best(self) -> str:
        """The scaling that collapses the errors best."""
        return min(self.collapse, key=lambda name: self.collapse[name][1])

    def plain(self, lengths: tuple[int, ...]) -> dict[str, Any]:
        """JSON-able."""
        return {
            "rates": [{"length": T} | rate.plain() for T, rate in zip(lengths, self.rates, strict=True)],
            "exponents": {name: number.plain() for name, number in self.exponents.items()},
            "collapse": {name: {"c": c, "deviation": factor} for name, (c, factor) in self.collapse.items()},
            "best": self.best,
        }


@dataclass(frozen=True)
class Theory:
    """Findings, fitted rates (spectrum -> norm -> a Rates for each beta), and the claims judged."""

    findings: Findings
    rates: dict[str, dict[str, tuple[Rates, ...]]]
    claims: tuple[Claim, ...]

    def plain(self) -> dict[str, Any]:
        """Every number of the tables and figures, JSON-able, with 6 digits."""
        lengths = self.findings.question.lengths
        rates = {
            name: {
                norm: [{"beta": beta} | found.plain(lengths) for beta, found in zip(self.betas, by_beta, strict=True)]
                for norm, by_beta in norms.items()
            }
            for name, norms in self.rates.items()
        }
        claims = [claim.plain() for claim in self.claims]
        plain: dict[str, Any] = rounded({"claims": claims, "rates": rates, **self.findings.plain()})
        return plain

    @property
    def betas(self) -> tuple[float, ...]:
        """The kernels'."""
        return self.findings.question.betas

    def table(self) -> Table:
        """The claims of the first kernel."""
        from rich.table import Table

        question = self.findings.question
        beta = question.betas[0]
        table = Table(
            title=f"decay spectra: claims and what was found, kernel t^-{beta:g}, T = {_numbers(question.lengths)}, "
            f"N = {_numbers(question.channels)}"
        )
        for title in ("claim", "claimed", "found [95 % interval]", "verdict"):
            table.add_column(title)
        for claim in self.claims:
            if claim.beta in (None, beta):
                table.add_row(claim.what, claim.claimed, claim.found, claim.verdict)
        return table

    def scaling_table(self) -> Table:
        """By spectrum and kernel how far off each scaling is, the best in bold."""
        from rich.table import Table

        table = Table(title="least-squares errors as exp(-c g): deviation, a factor of the error (1: exact)")
        table.add_column("spectrum")
        table.add_column("beta", justify="right")
        for name in SCALINGS:
            table.add_column(name, justify="right")
        for spectrum, norms in self.rates.items():
            for beta, found in zip(self.betas, norms[NORMS[0]], strict=True):
                cells = [
                    f"[bold]{factor:.2f}[/bold]" if name == found.best else f"{factor:.2f}"
                    for name, (_, factor) in found.collapse.items()
                ]
                table.add_row(spectrum, f"{beta:g}", *cells)
        return table


def judge(findings: Findings) -> Theory:
    """Fit the rates and judge every claim."""
    question = findings.question
    lengths = np.array(question.lengths, dtype=np.float64)
    rates = {
        name: {
            norm: tuple(_rates(errors, norm, place, lengths) for place in range(len(question.betas))) for norm in NORMS
        }
        for name, errors in findings.errors.items()
    }
    claims = [_gap_claim(findings, name) for name in (LOG_UNIFORM, UNIFORM)]
    for place, beta in enumerate(question.betas):
        own = {name: norms[NORMS[0]][place] for name, norms in rates.items()}
        claims += _error_claims(findings, own, place, beta)
        claims += _position_claims(findings, place, beta)
    return Theory(findings, rates, (*claims, *_coherence_claims(findings)))


def rounded(content: Any) -> Any:
    """JSON-able content with numbers of 6 digits, which arithmetic in another order gives too; NaN is None."""
    match content:
        case dict():
            return {key: rounded(value) for key, value in content.items()}
        case list() | tuple():
            return [rounded(value) for value in content]
        case float():
            return float(f"{content:.6g}") if isfinite(content) else None
    return content


def line(x: Float64, y: Float64) -> Number:
    """The slope of y over x by least squares, three points or more, with Student's interval."""
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    residual = y - y.mean() - slope * centred
    error = sqrt(float(residual @ residual) / (len(x) - 2) / float(centred @ centred))
    return Number(slope, t_interval(slope, error, len(x) - 1))


def collapse(errors: Float64, channels: Float64, lengths: Float64) -> dict[str, tuple[float, float]]:
    """By scaling (c, deviation as a factor) of ln(error), [lengths, channels]."""
    N, T = np.meshgrid(channels, lengths)
    found = {}
    for name, scaling in SCALINGS.items():
        x = scaling(N, T).ravel()
        centred, y = x - x.mean(), errors.ravel()
        slope = float(centred @ y / (centred @ centred))
        residual = y - y.mean() - slope * centred
        found[name] = (-slope, exp(sqrt(float((residual**2).mean()))))
    return found


def _rates(errors: Errors, norm: str, place: int, lengths: Float64) -> Rates:
    N = np.array(errors.channels, dtype=np.float64)
    logs = np.log(errors.by_norm[norm][place])  # [lengths, channels, draws]
    mean = logs.mean(2)
    random = logs.shape[2] > 1
    by = {"log T": np.log(np.log(lengths)), "T": np.log(lengths)}
    if not random:
        rates = tuple(_negative(line(N, row)) for row in mean)
        fitted = _log(np.array([rate.value for rate in rates]))
        exponents = {name: _negative(line(x, fitted)) for name, x in by.items()}
    else:
        slopes = -_slopes(N, mean)
        again = -_slopes(N, _redrawn(logs))  # [resamples, lengths]
        rates = tuple(_number(value, column) for value, column in zip(slopes, again.T, strict=True))
        exponents = {
            name: _number(-float(_slopes(x, _log(slopes))), -_slopes(x, _log(again))) for name, x in by.items()
        }
    return Rates(rates, exponents, collapse(mean, N, lengths))


def _gap_claim(findings: Findings, name: str) -> Claim:
    gaps = findings.gaps[name]
    x = np.log(np.array(gaps.channels, dtype=np.float64))
    value = float(_slopes(x, np.log(gaps.gaps.mean(1))))
    again = _slopes(x, np.log(_redrawn(gaps.gaps)))
    exact = float(_slopes(x, np.log(gaps.expected)))
    number = _number(value, again, claimed=exact)
    ratio = gaps.gaps.mean(1) / gaps.expected
    return Claim(
        f"{name}: smallest gap of log-rates",
        None,
        "N^-2",
        f"N^{number}, exactly {exact:.2f} at these N; {ratio.min():.2f} to {ratio.max():.2f} of its exact mean",
        _verdict(_within(number)),
        f"the exponent's interval holds that of the exact mean, {_EXACT[name]}",
        number,
    )


def _error_claims(findings: Findings, rates: dict[str, Rates], place: int, beta: float) -> list[Claim]:
    exponents = (
        (LINEAR, "N/sqrt T", "T", 0.5, "exp(-O(N/sqrt T))"),
        (GEOMETRIC, "N/log T", "log T", 1.0, "exp(-c N/log T)"),
    )
    claims = []
    for name, scaling, of, claimed, words in exponents:
        found = rates[name]
        number = Number(found.exponents[of].value, found.exponents[of].interval, claimed)
        c, factor = found.collapse[scaling]
        best = found.best == scaling
        base = f"({of})" if " " in of else of
        how = "best of six scalings" if best else f"{found.best} is off by {found.collapse[found.best][1]:.2f}"
        claims.append(
            Claim(
                f"{name}: error",
                beta,
                words,
                f"c = {c:.2f}, off by a factor {factor:.2f}: {how}; rate falls as {base}^-x, x = {number}",
                HELD if best and _within(number) else IN_PART if best or _within(number) else NOT_HELD,
                f"{scaling} collapses the errors best, and x's interval holds {claimed:g}; in part: one of the two",
                number,
            )
        )
    return [*claims, *_random_claims(findings, place, beta), _control(findings, place, beta)]


def _random_claims(findings: Findings, place: int, beta: float) -> list[Claim]:
    """Log-uniform rates beside geometric ones: how fast the error falls, how large it is, and how often it is less."""
    shared = findings.question.drawn_channels
    own = [findings.errors[GEOMETRIC].channels.index(n) for n in shared]
    N = np.array(shared, dtype=np.float64)

    def compared(norm: str) -> tuple[Float64, Float64, Float64, Number, float]:
        random = np.log(findings.errors[LOG_UNIFORM].by_norm[norm][place])
        even = np.log(findings.errors[GEOMETRIC].by_norm[norm][place][:, own, 0])
        again = _redrawn(random)
        size = _number(float(np.exp((random.mean(2) - even).mean())), np.exp((again - even).mean((1, 2))))
        return random, even, again, size, float((random < even[:, :, None]).mean())

    random, even, again, size, less = compared("least_squares")
    *_, size32, less32 = compared("float32")
    ratio = _number(
        float((_slopes(N, random.mean(2)) / _slopes(N, even)).mean()), (_slopes(N, again) / _slopes(N, even)).mean(1)
    )
    return [
        Claim(
            f"{LOG_UNIFORM}: falls slower than geometric",
            beta,
            "exp(-Omega(N/log N))",
            f"{ratio} times geometric's rate, N <= {shared[-1]}",
            _verdict(ratio.interval[1] < 1),
            "the interval of the rates' ratio, the mean over T, is below 1",
            ratio,
        ),
        Claim(
            f"{LOG_UNIFORM}: more error than geometric",
            beta,
            "more",
            f"{size} times; less in {less:.0%} of draws. In float32 {size32} times, less in {less32:.0%}",
            _verdict(size.interval[0] > 1),
            "the interval of the errors' ratio, the geometric mean over N and T, is above 1",
            size,
        ),
    ]


def _control(findings: Findings, place: int, beta: float) -> Claim:
    """The same spacing with faster channels: does the range or the spacing limit the fit?"""
    question = findings.question
    T, N = question.length, question.position_channels
    at = (place, question.lengths.index(T), question.channels.index(N), 0)
    ratio = findings.errors[FAST].by_norm[NORMS[0]][at] / findings.errors[GEOMETRIC].by_norm[NORMS[0]][at]
    return Claim(
        f"{FAST}: timescales over [1/8, T]",
        beta,
        "-",
        f"{_short(float(ratio))} times the error of [1, T] at N = {N}, T = {T}",
        CONTROL,
        "none: the paper claims nothing of it",
    )


def _position_claims(findings: Findings, place: int, beta: float) -> list[Claim]:
    at = findings.at
    t = np.array(at.positions, dtype=np.float64)
    before = t < at.length
    static, theory, code = (np.log(at.errors[name][place]) for name in (STATIC, THEORY, CODE))
    claimed = np.maximum(at.channels * np.log(t) / log(at.length), 2)
    share = _mean_ratio(at.equivalent[STATIC][place][before] / claimed[before])
    gain, cost, kept = (
        _mean_ratio(np.exp(found[before]))
        for found in (static - theory, code - static, np.log(at.errors[CODE_KEPT][place]) - static)
    )
    where = f"N = {at.channels}, t < T = {at.length}"
    return [
        Claim(
            f"static: channels that count at t ({where})",
            beta,
            "N log t/log T",
            f"{share} times as many",
            _verdict(share.interval[0] <= 1 <= share.interval[1]),
            "the interval of found over claimed, the geometric mean over t, holds 1",
            share,
        ),
        Claim(
            "timescales over [1, t]: less error than static",
            beta,
            "exp(-c N/log t)",
            f"static has {gain} times the error",
            _verdict(gain.interval[0] > 1),
            "the interval of the errors' ratio, the geometric mean over t, is above 1",
            gain,
        ),
        Claim(
            "timescales over [1, T t], the code's: less than static",
            beta,
            "exp(-c N/log t)",
            f"{cost} times static's error; as kept {kept}",
            _verdict(cost.interval[1] < 1),
            "the interval of the errors' ratio, the geometric mean over t, is below 1",
            cost,
        ),
    ]


def _coherence_claims(findings: Findings) -> list[Claim]:
    claims = []
    for found in findings.coherence:
        first, second = found.closed
        bound = findings.coherence[0].closed[0] if found.reading == "rates" else first
        claims.append(
            Claim(
                f"Proposition 4.5 for (1, 2, 3) as {found.reading}",
                None,
                f"overlaps up to {bound:.4f}",
                f"{first:.4f} and {second:.4f}",
                _verdict(max(first, second) <= bound + 1e-12),
                "no overlap of neighbours is above the first",
            )
        )
    return claims


def _mean_ratio(ratios: Float64) -> Number:
    """The geometric mean over positions, with Student's interval of the logarithms."""
    logs = np.log(ratios)
    mean, error = float(logs.mean()), float(logs.std(ddof=1)) / sqrt(len(logs))
    low, high = t_interval(mean, error, len(logs))
    return Number(exp(mean), (exp(low), exp(high)))


def _slopes(x: Float64, y: Float64) -> Float64:
    """Of y, [..., n], over x."""
    centred = x - x.mean()
    return np.asarray(y @ centred / (centred @ centred))


def _redrawn(values: Float64) -> Float64:
    """Means over draws drawn again, [resamples, ...], of values [..., draws]."""
    count = values.shape[-1]
    chosen = Draws(key64("theory", "resamples"), np.arange(_RESAMPLES)).integers(0, count, count)
    weights = np.stack([np.bincount(row, minlength=count) for row in chosen]) / count
    return np.asarray(np.moveaxis(values @ weights.T, -1, 0))


def _number(value: float, again: Float64, claimed: float | None = None) -> Number:
    low, high = np.quantile(again, [0.025, 0.975])
    return Number(float(value), (float(low), float(high)), claimed)


def _log(rates: Float64) -> Float64:
    """Of rates, which are hardly ever negative: where float32 ends, an error doesn't fall."""
    return np.asarray(np.log(np.maximum(rates, 1e-9)))


def _negative(number: Number) -> Number:
    return Number(-number.value, (-number.interval[1], -number.interval[0]))


def _within(number: Number) -> bool:
    assert number.claimed is not None
    return number.interval[0] <= number.claimed <= number.interval[1]


def _verdict(held: bool) -> str:
    return HELD if held else NOT_HELD


def _short(value: float) -> str:
    return f"{value:.2f}" if 0.1 <= abs(value) < 100 else f"{value:.2g}"


def _numbers(values: tuple[int, ...]) -> str:
    return f"{values[0]} to {values[-1]}"
