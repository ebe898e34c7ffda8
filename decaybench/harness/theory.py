"""What the theory of decay spectra claims, computed: harness/theory_fit.py fits, theory_claims.py judges.

A recurrence with N decay rates p_k remembers lag t by sum_k w_k exp(-p_k t). The paper (Cao, "Optimal Decay Spectra for
Linear Recurrences", arXiv 2604.07658) asks how well that can be t^-beta on [1, T], by where the rates are:

    geometric      p_k = T^(-k/(N-1)), k = 0..N-1: timescales 1/p_k over [1, T], log-rates evenly spaced
    log-uniform    log p_k uniform on [-log T, 0], drawn
    uniform        p_k uniform on [0, 1], drawn
    linear         p_k = k/T, k = 1..N (S4D-Real's spacing)
    geometric 1/8  timescales over [1/8, T] (ours, a control: what channels faster than a token add)

At position t a memory reaches t tokens back at most, so the kernel is fitted on [1, t]. There a static spectrum still
has its timescales over [1, T]. Position scaling, tau_k(t) = tau_k(1) t^alpha_k with alpha_k from 1 (slowest) to 0, has
them over [1, t] where the theory starts from tau_k(1) = 1, and over [1, T t] where the paper's code starts from
timescales over [1, T]. The rates hold still in the theory. In a model they change on the way, and lag l is kept by

    exp(-p_k sum_{s = t-l+1..t} s^-alpha_k) = about exp(-p_k integral from t-l+1/2 to t+1/2 of s^-alpha_k)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from math import isfinite, log, sqrt
from typing import Any, TypeVar

import numpy as np

from decaybench.core.draws import Draws
from decaybench.core.errors import UserError
from decaybench.core.hashing import key64
from decaybench.harness.progress import Progress
from decaybench.harness.theory_fit import Fit, Float64, fit_exponentials, fit_functions, log_grid

BETAS = (0.5, 1.0, 1.5)
LENGTHS = (64, 256, 1024, 4096)
CHANNELS = (4, 8, 16, 24, 32, 48, 64)
DRAWS = 50
Numeral = TypeVar("Numeral", int, float)

NORMS = ("least_squares", "minimax", "float32")

GEOMETRIC, LOG_UNIFORM, UNIFORM, LINEAR, FAST = "geometric", "log-uniform", "uniform", "linear", "geometric 1/8"
STATIC, THEORY, CODE, WIDE = "static", "theory's range", "code's range", "static, wide"
THEORY_KEPT, CODE_KEPT = "theory's range, as kept", "code's range, as kept"

_FASTEST = 1 / 8  # token, of the control
_MOST_DRAWN = 32  # channels of drawn spectra, whose fits are many
_GAP_CHANNELS = (8, 16, 32, 64, 128, 256)
_GAP_DRAWS = 2000
_POSITION_CHANNELS = 16
_KEPT_POINTS = 160


@dataclass(frozen=True)
class Question:
    """What to compute. betas: of kernels t^-beta, the first is drawn; lengths: T in tokens; channels: N; draws: of each
    random spectrum.
    """

    betas: tuple[float, ...] = BETAS
    lengths: tuple[int, ...] = LENGTHS
    channels: tuple[int, ...] = CHANNELS
    draws: int = DRAWS

    def __post_init__(self) -> None:
        """Raises UserError on what can't be computed or told from so few numbers."""
        for name, values, least, low, high in (
            ("--beta", self.betas, 1, 0.05, 4),
            ("--train-lengths", self.lengths, 3, 16, 65536),
            ("--channels", self.channels, 3, 2, 64),
        ):
            said = f"{name} {','.join(f'{value:g}' for value in values)}"
            if len(set(values)) < len(values):
                raise UserError(f"{said}: one is there twice")
            for value in values:
                if not isfinite(value) or not low <= value <= high:
                    raise UserError(f"{said}: {value:g} is not between {low:g} and {high:g}")
            if len(values) < least:
                raise UserError(f"{said}: a rate needs {least} at least")
        if sum(n <= _MOST_DRAWN for n in self.channels) < 3:
            raise UserError(f"--channels: random spectra have {_MOST_DRAWN} at most, and a rate needs 3 such numbers")
        if not 10 <= self.draws <= 1000:
            raise UserError(f"--draws {self.draws} is not between 10 and 1000")

    @classmethod
    def parse(cls, betas: str, lengths: str, channels: str, draws: int) -> Question:
        """From the flags' words, numbers between commas. Raises UserError."""
        return cls(
            tuple(_numbers("--beta", betas, float)),
            tuple(sorted(_numbers("--train-lengths", lengths, int))),
            tuple(sorted(_numbers("--channels", channels, int))),
            draws,
        )

    @property
    def drawn_channels(self) -> tuple[int, ...]:
        """Those that random spectra are fitted with."""
        return tuple(n for n in self.channels if n <= _MOST_DRAWN)

    @property
    def length(self) -> int:
        """The T of what is shown for one T: the middle one."""
        return self.lengths[len(self.lengths) // 2]

    @property
    def position_channels(self) -> int:
        """The N of what is shown by position: 16, or the next smaller number."""
        return max((n for n in self.channels if n <= _POSITION_CHANNELS), default=min(self.channels))


@dataclass(frozen=True)
class Errors:
    """A spectrum's errors. by_norm: one of NORMS -> [betas, lengths, channels, draws] (1 draw where none is drawn);
    weight: the largest weight of least squares, and certainty: the minimax error's bound over it, of the same shape.
    """

    channels: tuple[int, ...]
    by_norm: dict[str, Float64]
    weight: Float64
    certainty: Float64

    def draws(self, norm: str, beta: int) -> Float64:
        """The error over draws: geometric mean, 10th and 90th percentile, [3, lengths, channels]."""
        found = self.by_norm[norm][beta]
        low, high = np.quantile(found, [0.1, 0.9], axis=2)
        return np.stack([np.exp(np.log(found).mean(2)), low, high])

    def plain(self, lengths: tuple[int, ...], betas: tuple[float, ...]) -> dict[str, Any]:
        """JSON-able: of drawn spectra the mean and the range of most draws."""
        rows = []
        for b, beta in enumerate(betas):
            shown = {norm: self.draws(norm, b) for norm in NORMS}
            for (place, length), (size, count) in product(enumerate(lengths), enumerate(self.channels)):
                errors = {norm: [float(x) for x in found[:, place, size]] for norm, found in shown.items()}
                if self.weight.shape[3] == 1:
                    row: dict[str, Any] = {norm: values[0] for norm, values in errors.items()}
                else:
                    row = {norm: {"geometric_mean": m, "p10": a, "p90": z} for norm, (m, a, z) in errors.items()}
                    row |= {f"{norm}_mean": float(self.by_norm[norm][b, place, size].mean()) for norm in NORMS}
                own = (b, place, size)
                extra = {
                    "largest_weight": float(np.median(self.weight[own])),
                    "minimax_bound": float(self.certainty[own].min()),
                }
                rows.append({"beta": beta, "length": length, "channels": count, **row, **extra})
        return {"draws": self.weight.shape[3], "errors": rows}


@dataclass(frozen=True)
class Gaps:
    """The smallest gap of N random log-rates. gaps: [channels, draws]; expected: its exact mean."""

    channels: tuple[int, ...]
    gaps: Float64
    expected: Float64

    def plain(self) -> list[dict[str, Any]]:
        """JSON-able: means over draws with their standard errors."""
        errors = self.gaps.std(1, ddof=1) / sqrt(self.gaps.shape[1])
        rows = zip(self.channels, self.gaps.mean(1), errors, self.expected, strict=True)
        return [
            {"channels": count, "mean": float(mean), "standard_error": float(error), "exact_mean": float(exact)}
            for count, mean, error, exact in rows
        ]


@dataclass(frozen=True)
class AtPositions:
    """Errors of fits on [1, t], N channels, T = length. errors, float32: spectrum -> [betas, positions], as Fit's
    least_squares and float32; useful: spectrum -> channels with a timescale within [1, t]; equivalent: spectrum -> of
    how many channels over [1, t] the error is, [betas, positions], 2 to 2N.
    """

    length: int
    channels: int
    positions: tuple[int, ...]
    errors: dict[str, Float64]
    float32: dict[str, Float64]
    useful: dict[str, Float64]
    equivalent: dict[str, Float64]

    def plain(self, betas: tuple[float, ...]) -> dict[str, Any]:
        """JSON-able."""
        found: dict[str, Any] = {"length": self.length, "channels": self.channels, "positions": list(self.positions)}
        found["channels_within_1_to_t"] = {name: [float(x) for x in row] for name, row in self.useful.items()}
        for what, tables in (
            ("least_squares", self.errors),
            ("float32", self.float32),
            ("equivalent_channels", self.equivalent),
        ):
            found[what] = {
                name: [
                    {"beta": beta, "by_position": [float(x) for x in row]}
                    for beta, row in zip(betas, rows, strict=True)
                ]
                for name, rows in tables.items()
            }
        return found


@dataclass(frozen=True)
class Coherence:
    """Overlaps of neighbours among three exponentials, closed form and by integration. reading: what 1, 2, 3 are."""

    reading: str
    rates: tuple[float, ...]
    closed: tuple[float, float]
    integrated: tuple[float, float]


@dataclass(frozen=True)
class Findings:
    """All that is computed."""

    question: Question
    errors: dict[str, Errors]
    gaps: dict[str, Gaps]
    at: AtPositions
    coherence: tuple[Coherence, ...]

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        question = self.question
        lengths, betas = question.lengths, question.betas
        return {
            "question": {
                "betas": list(betas),
                "lengths": list(lengths),
                "channels": list(question.channels),
                "draws": question.draws,
            },
            "spectra": {name: found.plain(lengths, betas) for name, found in self.errors.items()},
            "smallest_gaps": {name: found.plain() for name, found in self.gaps.items()},
            "positions": self.at.plain(betas),
            "coherence": [asdict(found) for found in self.coherence],
        }


def compute(question: Question, progress: Progress | None = None) -> Findings:
    """Everything that `bench theory` tells and draws; a function of the question alone."""
    drawn, ordered = len(question.drawn_channels) * question.draws, len(question.channels)
    total = len(question.lengths) * (2 * drawn + 3 * ordered)
    with (progress or Progress(quiet=True)).bar("fits", total, 0) as show:
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            show(done, "")

        errors = {name: _errors(question, name, step) for name in (GEOMETRIC, FAST, LINEAR, LOG_UNIFORM, UNIFORM)}
    return Findings(question, errors, _gaps(question.length), _at_positions(question), coherences())


def spectrum_rates(name: str, channels: int, length: float, draws: int) -> Float64:
    """Rates in 1/tokens of a spectrum of [1, length], [draws, channels]; one row where none is drawn.

    A draw's rates with fewer channels are the first of those with more, and differ by T only in scale.
    """
    match name:
        case "geometric":
            return geometric(channels, 1, length)[None]
        case "geometric 1/8":
            return geometric(channels, _FASTEST, length)[None]
        case "linear":
            return (np.arange(1, channels + 1) / length)[None]
    uniform = Draws(key64("theory", name), np.arange(draws)).uniform(0, channels)
    return length**-uniform if name == LOG_UNIFORM else uniform


def geometric(channels: int, fastest: float, slowest: float) -> Float64:
    """Rates of timescales from slowest to fastest, tokens, evenly spaced in their logarithm."""
    return np.exp(-np.linspace(log(slowest), log(fastest), channels))


def kept(rates: Float64, alpha: Float64, position: float, lags: Float64) -> Float64:
    """What channels with decays scaled by s^-alpha at position s keep of a token `lags` ago at `position`, [lags, N].

    The sum over positions s by its midpoint rule, which is why lags need not be whole.
    """

    def integral(s: Float64) -> Float64:
        power = 1 - alpha
        flat = power < 1e-12
        safe = np.where(flat, 1.0, power)
        return np.where(flat, np.log(s)[:, None], s[:, None] ** safe / safe)

    decay = integral(np.array([position + 0.5])) - integral(position - lags + 0.5)
    return np.exp(-rates * decay)


def coherence(p: float, q: float) -> float:
    """<f, g> / (|f| |g|) of f = exp(-p t), g = exp(-q t) over t >= 0: 2 sqrt(pq)/(p+q) = sech(log(p/q)/2)."""
    return float(1 / np.cosh(log(p / q) / 2))


def coherences() -> tuple[Coherence, ...]:
    """Proposition 4.5 (global coherence) for (1, 2, 3), read as rates and read as log-rates."""
    found = []
    for reading, rates in (("rates", (1.0, 2.0, 3.0)), ("log-rates", tuple(float(np.exp(x)) for x in (1, 2, 3)))):
        pairs = list(pairwise(rates))
        first, second = (coherence(p, q) for p, q in pairs)
        third, fourth = (_integrated_coherence(p, q) for p, q in pairs)
        found.append(Coherence(reading, rates, (first, second), (third, fourth)))
    return tuple(found)


def _numbers(flag: str, words: str, kind: type[Numeral]) -> list[Numeral]:
    found = []
    for word in words.split(","):
        try:
            found.append(kind(word))
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise UserError(f"{flag} {words}: {word.strip()!r} is not {what}") from None
    return found


def _integrated_coherence(p: float, q: float) -> float:
    """By the trapezoid rule in log t, where the integrands fall double-exponentially on one side."""
    s, step = np.linspace(-45, 8, 2121, retstep=True)
    t = np.exp(s)

    def inner(a: float, b: float) -> float:
        return float((np.exp(-(a + b) * t) * t).sum() * step)

    return inner(p, q) / sqrt(inner(p, p) * inner(q, q))


def _errors(question: Question, name: str, step: Callable[[], None]) -> Errors:
    drawn = name in (LOG_UNIFORM, UNIFORM)
    channels = question.drawn_channels if drawn else question.channels
    fits = np.empty((len(question.lengths), len(channels), question.draws if drawn else 1), dtype=object)
    for place, length in enumerate(question.lengths):
        for size, count in enumerate(channels):
            for draw, rates in enumerate(spectrum_rates(name, count, length, question.draws)):
                fits[place, size, draw] = fit_exponentials(rates, length, question.betas)
                step()

    def table(number: Callable[[Fit], float]) -> Float64:
        flat = [[number(fit) for fit in found] for found in fits.ravel()]
        return np.moveaxis(np.array(flat).reshape(*fits.shape, len(question.betas)), -1, 0)

    return Errors(
        channels,
        {
            "least_squares": table(lambda fit: fit.least_squares),
            "minimax": table(lambda fit: fit.minimax),
            "float32": table(lambda fit: fit.float32),
        },
        table(lambda fit: fit.weight),
        table(lambda fit: fit.bound / fit.minimax),
    )


def _gaps(length: int) -> dict[str, Gaps]:
    """Exact means: L/(N^2 - 1) of N uniform on [0, L]; 2/(N(N-1)) of -log U, whose gaps are exponential of 1..N-1."""
    sizes = np.array(_GAP_CHANNELS, dtype=np.float64)
    exact = {LOG_UNIFORM: log(length) / (sizes**2 - 1), UNIFORM: 2 / (sizes * (sizes - 1))}
    found = {}
    for name, expected in exact.items():
        rows = [
            np.diff(np.sort(np.log(spectrum_rates(name, count, length, _GAP_DRAWS)))).min(1) for count in _GAP_CHANNELS
        ]
        found[name] = Gaps(_GAP_CHANNELS, np.stack(rows), expected)
    return found


def _at_positions(question: Question) -> AtPositions:
    T, N = question.length, question.position_channels
    positions = tuple(2**power for power in range(3, 21) if 2**power <= 4 * T)
    alpha = np.linspace(1, 0, N)
    fits: dict[str, list[list[Fit]]] = {}
    useful: dict[str, list[float]] = {}
    ladders: list[list[list[float]]] = []
    for t in positions:
        spectra = {
            STATIC: geometric(N, 1, T),
            THEORY: geometric(N, 1, t),
            CODE: geometric(N, 1, T * t),
            WIDE: geometric(N, 1, T * T),
        }
        for name, rates in spectra.items():
            fits.setdefault(name, []).append(fit_exponentials(rates, t, question.betas))
            useful.setdefault(name, []).append(float((1 / rates <= t * (1 + 1e-9)).sum()))
        lags = log_grid(t, _KEPT_POINTS)
        targets = np.stack([lags**-beta for beta in question.betas], axis=1)
        for name, slowest in ((THEORY_KEPT, 1), (CODE_KEPT, T)):
            fits.setdefault(name, []).append(fit_functions(kept(geometric(N, 1, slowest), alpha, t, lags), targets))
        steps = [fit_exponentials(geometric(n, 1, t), t, question.betas) for n in range(2, 2 * N + 1)]
        ladders.append([[fit.least_squares for fit in found] for found in steps])
    errors = {name: np.array([[fit.least_squares for fit in row] for row in rows]).T for name, rows in fits.items()}
    float32 = {name: np.array([[fit.float32 for fit in row] for row in rows]).T for name, rows in fits.items()}
    ladder = np.moveaxis(np.array(ladders), -1, 0)  # [betas, positions, channels]
    equivalent = {name: _equivalent(errors[name], ladder) for name in (STATIC, CODE, WIDE, THEORY_KEPT, CODE_KEPT)}
    counts = {name: np.array(found) for name, found in useful.items()}
    return AtPositions(T, N, positions, errors, float32, counts, equivalent)


def _equivalent(errors: Float64, ladder: Float64) -> Float64:
    """How many channels over [1, t] have these errors: between whole numbers by the logarithm; 2 to 2N."""
    found = np.empty(errors.shape)
    for place in np.ndindex(errors.shape):
        steps = -np.log(np.minimum.accumulate(ladder[place]))
        found[place] = np.interp(-np.log(errors[place]), steps, np.arange(2, 2 + len(steps)))
    return found
