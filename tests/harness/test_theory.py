"""`bench theory`: fits against exact least squares, Lawson's iteration and Bernstein's rate; claims; figures."""

from __future__ import annotations

import json
import re
from decimal import Context, Decimal, localcontext
from functools import cache
from itertools import pairwise
from math import cosh, exp, log, log1p, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from decaybench.harness import theory_fit
from decaybench.harness.theory import (
    CODE,
    FAST,
    GEOMETRIC,
    LINEAR,
    LOG_UNIFORM,
    NORMS,
    STATIC,
    THEORY,
    UNIFORM,
    AtPositions,
    Errors,
    Findings,
    Question,
    _at_positions,
    _gaps,
    coherences,
    geometric,
    kept,
    spectrum_rates,
)
from decaybench.harness.theory_claims import CONTROL, HELD, IN_PART, NOT_HELD, Theory, collapse, judge, line, rounded
from decaybench.harness.theory_fit import fit_exponentials, fit_functions, log_grid
from decaybench.models.config import ModelConfig
from decaybench.models.language_model import build_model
from tests.command import bench

SMALL = Question((0.5, 1.0), (16, 64, 256), (2, 3, 4, 6), 10)
WORDS = ("theory", "--beta", "0.5,1", "--train-lengths", "16,32,64", "--channels", "2,3,4", "--draws", "10", "--quiet")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "theory.md"
FIGURES = ("channels", "collapse", "error", "gaps", "position")


def exact_least_squares(rates: NDArray[np.float64], grid: NDArray[np.float64], beta: float) -> float:
    """By the normal equations in decimals of 200 digits: no rounding matters."""
    with localcontext(Context(prec=200, Emin=-(10**6), Emax=10**6)):
        columns = [[(-Decimal(float(p)) * Decimal(float(t))).exp() for t in grid] for p in rates]
        target = [(Decimal(float(t)).ln() * Decimal(-beta)).exp() for t in grid]
        rows = [[inner(a, b) for b in [*columns, target]] for a in columns]
        size = len(rows)
        for k in range(size):
            for j in range(k + 1, size):
                share = rows[j][k] / rows[k][k]
                rows[j] = [x - share * y for x, y in zip(rows[j], rows[k], strict=True)]
        weights = [Decimal(0)] * size
        for k in reversed(range(size)):
            weights[k] = (rows[k][size] - inner(rows[k][k + 1 : size], weights[k + 1 :])) / rows[k][k]
        errors = [y - inner(list(row), weights) for y, row in zip(target, zip(*columns, strict=True), strict=True)]
        return float((inner(errors, errors) / len(grid)).sqrt())


def inner(a: list[Decimal], b: list[Decimal]) -> Decimal:
    return sum((x * y for x, y in zip(a, b, strict=True)), Decimal(0))


def lawson(columns: NDArray[np.float64], target: NDArray[np.float64], rounds: int = 3000) -> tuple[float, float]:
    """What the minimax error lies between, by reweighted least squares: weights times |error|, again and again."""
    weights = np.full(len(target), 1 / len(target))
    below, above = 0.0, np.inf
    for _ in range(rounds):
        root = np.sqrt(weights)
        error = target - columns @ np.linalg.lstsq(columns * root[:, None], target * root, rcond=None)[0]
        below = max(below, float(np.sqrt(weights @ error**2)))
        above = min(above, float(np.abs(error).max()))
        weights = weights * np.abs(error)
        weights /= weights.sum()
    return below, above


@pytest.mark.parametrize("beta", [0.5, 1.5])
@pytest.mark.parametrize("name", [GEOMETRIC, LINEAR, UNIFORM])
def test_least_squares_is_that_of_exact_arithmetic(name: str, beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory_fit, "_POINTS", 30)
    (rates, *_) = spectrum_rates(name, 7, 64, 1)
    (fit,) = fit_exponentials(rates, 64, (beta,))
    exact = exact_least_squares(rates, log_grid(64, 35), beta)
    assert fit.least_squares == pytest.approx(exact, rel=1e-10)


def test_more_bits_change_nothing_where_float64_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = geometric(40, 1, 64)
    (fit,) = fit_exponentials(rates, 64, (0.5,))
    monkeypatch.setattr(theory_fit, "_BITS", 400)
    (again,) = fit_exponentials(rates, 64, (0.5,))
    for name in ("least_squares", "minimax", "float32"):
        assert getattr(again, name) == pytest.approx(getattr(fit, name), rel=1e-9)
    t = log_grid(64, 200)
    columns = np.exp(-np.outer(t - 1, rates))
    plain = t**-0.5 - columns @ np.linalg.lstsq(columns, t**-0.5, rcond=None)[0]
    assert np.sqrt(np.mean(plain**2)) > 20 * fit.least_squares


@pytest.mark.parametrize("name", [GEOMETRIC, FAST, LINEAR, LOG_UNIFORM, UNIFORM])
def test_numpy_finds_the_same_where_it_can_and_never_less(name: str) -> None:
    t = log_grid(256, 96)
    for count in (2, 4, 12):
        (rates, *_) = spectrum_rates(name, count, 256, 1)
        columns = np.exp(-np.outer(t - 1, rates))
        plain = t**-1.0 - columns @ np.linalg.lstsq(columns, t**-1.0, rcond=None)[0]
        (fit,) = fit_exponentials(rates, 256, (1.0,))
        found = float(np.sqrt(np.mean(plain**2)))
        assert found >= fit.least_squares - 1e-15 * count * fit.weight  # but for the rounding of numpy's columns
        if count < 12:
            assert fit.least_squares == pytest.approx(found, rel=1e-8)


@pytest.mark.parametrize("name", [GEOMETRIC, LINEAR, LOG_UNIFORM])
def test_minimax_lies_where_reweighted_least_squares_says(name: str) -> None:
    (rates, *_) = spectrum_rates(name, 5, 256, 1)
    t = log_grid(256, 96)
    below, above = lawson(np.exp(-np.outer(t - 1, rates)), t**-0.5)
    (fit,) = fit_exponentials(rates, 256, (0.5,))
    assert below * (1 - 1e-9) <= fit.minimax <= above * (1 + 1e-6)
    assert above < 1.02 * below  # so that this says something
    assert fit.bound == pytest.approx(fit.minimax, rel=1e-5)
    assert fit.least_squares < fit.minimax


def test_one_exponential_by_hand() -> None:
    t = log_grid(64, 96)
    column, target = np.exp(-t / 20), t**-1.0
    weight = column @ target / (column @ column)
    (fit,) = fit_exponentials(np.array([1 / 20]), 64, (1.0,))
    assert fit.least_squares == pytest.approx(float(np.sqrt(np.mean((target - weight * column) ** 2))), rel=1e-12)
    assert fit.weight == pytest.approx(weight, rel=1e-12)
    trials = np.abs(target - np.linspace(0, 2, 4001)[:, None] * column).max(1)
    assert trials.min() - 5e-4 <= fit.minimax <= trials.min()


def test_any_functions_are_fitted_as_exponentials_are() -> None:
    rates = geometric(6, 1, 64)
    t = log_grid(64, 96)
    (expected,) = fit_exponentials(rates, 64, (0.5,))
    (fit,) = fit_functions(np.exp(-np.outer(t, rates)), (t**-0.5)[:, None])
    assert fit.least_squares == pytest.approx(expected.least_squares, rel=1e-8)
    assert fit.minimax == pytest.approx(expected.minimax, rel=1e-5)


def test_float32_reaches_less_and_the_more_its_weights_cancel() -> None:
    (easy,), (hard,) = (fit_exponentials(geometric(n, 1, 1024), 1024, (0.5,)) for n in (8, 32))
    assert easy.float32 == pytest.approx(easy.least_squares, rel=1e-6) and easy.weight < 10
    assert hard.float32 > 1.3 * hard.least_squares and hard.weight > 1e8


@pytest.mark.parametrize(("length", "points"), [(64, 160), (1000, 160), (17, 40)])
def test_the_grid_is_even_in_the_logarithm(length: int, points: int) -> None:
    t = log_grid(length, points)
    assert t[0] == 1 and t[-1] == length and points <= len(t) < points + log(length) / log(2) + 3
    ratios = [b / a for a, b in pairwise(t)]
    assert ratios[1:] == pytest.approx([ratios[1]] * (len(t) - 2)) and 1 < ratios[0] <= ratios[1] * (1 + 1e-9)


@pytest.mark.parametrize("beta", [0.5, 1.0, 1.5])
def test_linear_rates_converge_as_bernstein_says(beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """exp(-kt/T) are powers of x = exp(-t/T): polynomials on [1/e, exp(-1/T)], of a function that is singular at x = 1
    like (1 - x)^-beta, whose best error is about N^(beta - 1) rho^-N with rho of the ellipse through 1.
    """
    monkeypatch.setattr(theory_fit, "_POINTS_A_RATE", 24)  # so that the grid's error is less than the one on [1, T]
    T = 64
    few, many = 24, 32
    (a,), (b,) = (fit_exponentials(np.arange(1, n + 1) / T, T, (beta,)) for n in (few, many))
    low, high = exp(-1), exp(-1 / T)
    u = (1 - (low + high) / 2) / ((high - low) / 2)
    expected = log(u + sqrt(u * u - 1)) + (1 - beta) * log(many / few) / (many - few)
    assert log(a.minimax / b.minimax) / (many - few) == pytest.approx(expected, rel=0.02)


def test_gaps_have_their_exact_mean() -> None:
    for name, gaps in _gaps(1024).items():
        error = gaps.gaps.std(1, ddof=1) / sqrt(gaps.gaps.shape[1])
        assert (np.abs(gaps.gaps.mean(1) - gaps.expected) < 4 * error).all(), name
    other = np.random.default_rng(5)
    for draw, size, mean in (
        (lambda shape: log(1024) * other.random(shape), 8, log(1024) / 63),
        (lambda shape: log1p(0) - np.log(other.random(shape)), 8, 2 / 56),
    ):
        smallest = np.diff(np.sort(draw((40_000, size)))).min(1)
        assert smallest.mean() == pytest.approx(mean, rel=0.03)


def test_coherence_in_both_readings() -> None:
    rates, log_rates = coherences()
    assert rates.closed == pytest.approx((2 * sqrt(2) / 3, 2 * sqrt(6) / 5), rel=1e-14)
    assert log_rates.closed == pytest.approx((1 / cosh(0.5), 1 / cosh(0.5)), rel=1e-14)
    for found in (rates, log_rates):
        assert found.integrated == pytest.approx(found.closed, rel=1e-12)


def test_what_a_recurrence_keeps_is_the_product_of_its_decays() -> None:
    rates, alpha = geometric(5, 1, 256), np.linspace(1, 0, 5)
    position = 200
    lags = np.array([1, 7, 50, 190])
    found = kept(rates, alpha, position, lags.astype(np.float64))
    for row, lag in zip(found, lags, strict=True):
        product = np.ones(5)
        for s in range(position - lag + 1, position + 1):
            product *= np.exp(-rates * s**-alpha)
        assert row == pytest.approx(product, rel=2e-3)
    assert found[:, -1] == pytest.approx(np.exp(-lags * rates[-1]))  # alpha 0: as without position scaling


def test_the_codes_range_is_that_of_a_model_with_post() -> None:
    T = 128
    config = ModelConfig(vocab_size=16, d_model=32, n_layers=1, mixer={"headdim": 8, "d_state": 8}, post={"horizon": T})
    mixer: Any = build_model(config, 0).blocks[0].mixer
    positions = torch.tensor([[1, T, 4 * T]])
    taus = 1 / (mixer.spectrum.log_rate(positions).exp() * 0.05)[0]  # dt = 0.05
    for tau, scaled in zip(taus.tolist(), (T, T * T, 4 * T * T), strict=True):
        assert tau == pytest.approx(list(1 / geometric(len(tau), 1, scaled)), rel=1e-3)


def test_spectra_are_what_their_names_say() -> None:
    assert list(1 / spectrum_rates(GEOMETRIC, 4, 1000, 1)[0]) == pytest.approx([1000, 100, 10, 1])
    assert list(1 / spectrum_rates(FAST, 3, 128, 1)[0]) == pytest.approx([128, 4, 1 / 8])
    assert list(spectrum_rates(LINEAR, 3, 64, 1)[0]) == [1 / 64, 2 / 64, 3 / 64]
    drawn = spectrum_rates(LOG_UNIFORM, 500, 64, 20)
    assert drawn.shape == (20, 500) and drawn.min() > 1 / 64 and drawn.max() < 1
    assert np.log(drawn).mean() == pytest.approx(-log(64) / 2, rel=0.02)
    assert spectrum_rates(UNIFORM, 500, 64, 20).mean() == pytest.approx(0.5, rel=0.02)
    assert (spectrum_rates(UNIFORM, 3, 64, 20) == spectrum_rates(UNIFORM, 500, 1024, 20)[:, :3]).all()


def test_at_position_t() -> None:
    at = at_positions()
    T, N = 64, 6
    assert (at.length, at.channels, at.positions) == (T, N, (8, 16, 32, 64, 128, 256))
    for place, t in enumerate(at.positions):
        for name, slowest in ((STATIC, T), (THEORY, t), (CODE, T * t)):
            (fit, _) = fit_exponentials(np.exp(-np.linspace(log(slowest), 0, N)), t, SMALL.betas)
            assert at.errors[name][0, place] == pytest.approx(fit.least_squares, rel=1e-9)
        assert at.useful[STATIC][place] == sum(T ** (k / (N - 1)) <= t * 1.0001 for k in range(N))
        assert at.useful[CODE][place] == sum((T * t) ** (k / (N - 1)) <= t * 1.0001 for k in range(N))
    same = at.positions.index(T)
    assert at.errors[STATIC][0, same] == pytest.approx(at.errors[THEORY][0, same])
    assert at.equivalent[STATIC][0, same] == pytest.approx(N)


@cache
def at_positions() -> AtPositions:
    return _at_positions(SMALL)


def made_up(error: dict[str, object]) -> Findings:
    """Findings of errors by formula: a function of N, T and the draw a spectrum."""
    N, T = np.meshgrid(np.array(SMALL.channels, dtype=float), np.array(SMALL.lengths, dtype=float))
    noise = np.exp(0.2 * np.random.default_rng(0).standard_normal((2, *N.shape, SMALL.draws)))
    errors = {}
    for name in (GEOMETRIC, FAST, LINEAR, LOG_UNIFORM, UNIFORM):
        found = np.broadcast_to(error[name](N, T), (2, *N.shape))[..., None]  # type: ignore[operator]
        values = found * noise if name in (LOG_UNIFORM, UNIFORM) else found
        ones = np.ones_like(values)
        errors[name] = Errors(SMALL.channels, dict.fromkeys(NORMS, values), ones, ones)
    return Findings(SMALL, errors, _gaps(64), at_positions(), coherences())


def by_start(theory: Theory) -> dict[str, str]:
    return {claim.what.partition(" (")[0]: claim.verdict for claim in theory.claims if claim.beta in (None, 0.5)}


def even(N, T):
    return np.exp(-2 * N / np.log(T))


def root(N, T):
    return np.exp(-3 * N / np.sqrt(T))


def test_errors_that_are_as_claimed_are_held() -> None:
    slower = lambda N, T: 3 * np.exp(-N / np.log(T))  # noqa: E731
    theory = judge(made_up({GEOMETRIC: even, FAST: even, LINEAR: root, LOG_UNIFORM: slower, UNIFORM: slower}))
    found = by_start(theory)
    assert found["linear: error"] == found["geometric: error"] == HELD
    assert found["log-uniform: falls slower than geometric"] == found["log-uniform: more error than geometric"] == HELD
    assert found["log-uniform: smallest gap of log-rates"] == found["uniform: smallest gap of log-rates"] == HELD
    assert found["geometric 1/8: timescales over [1/8, T]"] == CONTROL
    assert found["Proposition 4.5 for"] == HELD  # the last of the two, log-rates
    linear, geometric_ = (theory.rates[name]["least_squares"][0] for name in (LINEAR, GEOMETRIC))
    assert linear.collapse["N/sqrt T"] == pytest.approx((3, 1)) and linear.best == "N/sqrt T"
    assert [rate.value for rate in linear.rates] == pytest.approx([3 / sqrt(T) for T in SMALL.lengths])
    assert linear.exponents["T"].value == pytest.approx(0.5)
    assert geometric_.exponents["log T"].value == pytest.approx(1)
    drawn = theory.rates[LOG_UNIFORM]["minimax"][0]
    for rate, T in zip(drawn.rates, SMALL.lengths, strict=True):
        assert rate.interval[0] < 1 / log(T) < rate.interval[1]


def test_errors_that_are_not_as_claimed_are_not_held() -> None:
    flat = lambda N, T: N**-3.0  # noqa: E731
    faster = lambda N, T: 0.2 * np.exp(-4 * N / np.log(T))  # noqa: E731
    theory = judge(made_up({GEOMETRIC: even, FAST: even, LINEAR: flat, LOG_UNIFORM: faster, UNIFORM: flat}))
    found = by_start(theory)
    assert found["linear: error"] == NOT_HELD
    assert found["log-uniform: falls slower than geometric"] == NOT_HELD
    assert found["log-uniform: more error than geometric"] == NOT_HELD
    assert theory.rates[LINEAR]["least_squares"][0].best == "log N"
    verdicts = {(claim.what, claim.claimed): claim.verdict for claim in theory.claims}
    assert verdicts["Proposition 4.5 for (1, 2, 3) as rates", "overlaps up to 0.9428"] == NOT_HELD


def test_the_page_has_every_claim_and_its_verdicts() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE)[1:]
    theory = judge(made_up({GEOMETRIC: even, FAST: even, LINEAR: root, LOG_UNIFORM: even, UNIFORM: even}))
    names = [claim.what.partition(" (N =")[0] for claim in theory.claims if claim.beta in (None, 0.5)]
    assert sorted(name for name, _ in rows) == sorted(names)
    assert {verdict for _, verdict in rows} <= {HELD, IN_PART, NOT_HELD, CONTROL}
    assert all((PAGE.parent / name).is_file() for name in re.findall(r"\((figures/[^)]+)\)", page))


def test_a_scaling_that_fits_best_with_another_power_is_held_in_part() -> None:
    near = lambda N, T: np.exp(-3 * N / T**0.4)  # noqa: E731
    theory = judge(made_up({GEOMETRIC: even, FAST: even, LINEAR: near, LOG_UNIFORM: even, UNIFORM: even}))
    assert theory.rates[LINEAR]["least_squares"][0].best == "N/sqrt T"
    assert by_start(theory)["linear: error"] == IN_PART


def test_a_line_has_the_interval_of_any_textbook() -> None:
    x, y = np.array([1.0, 2, 3, 4, 5]), np.array([1.2, 1.9, 3.2, 3.8, 5.1])
    found = line(x, y)
    (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
    margin = 3.182446 * sqrt(covariance[0, 0])  # Student's, 3 degrees of freedom
    assert (found.value, *found.interval) == pytest.approx((slope, slope - margin, slope + margin), rel=1e-6)


def test_collapse_tells_scalings_apart() -> None:
    N, T = np.array([2.0, 4, 8, 16]), np.array([16.0, 64, 256])
    errors = -1.5 * N / np.log(T)[:, None]
    found = collapse(errors, N, T)
    assert found["N/log T"] == pytest.approx((1.5, 1))
    assert min(factor for name, (_, factor) in found.items() if name != "N/log T") > 1.2


def test_rounded_is_json() -> None:
    assert rounded({"a": (1.23456789, float("nan"), 3), "b": "x"}) == {"a": [1.23457, None, 3], "b": "x"}


def test_the_command_is_deterministic_and_keeps_every_number(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    code, out, err = bench(*WORDS, "--out", str(first))
    assert (code, err) == (0, "")
    assert "Proposition 4.5" in out and f"figures and numbers in {first}" in out
    code, printed, err = bench(*WORDS, "--out", str(second), "--json")
    assert (code, err) == (0, "")
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted([f"{name}{end}" for name in FIGURES for end in (".png", ".svg")] + ["theory.json"])
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    content = json.loads(printed)
    assert content == json.loads((first / "theory.json").read_text())
    row = content["spectra"]["geometric"]["errors"][0]
    assert (row["beta"], row["length"], row["channels"]) == (0.5, 16, 2)
    (fit,) = fit_exponentials(np.array([1 / 16, 1.0]), 16, (0.5,))
    assert row["least_squares"] == pytest.approx(fit.least_squares, rel=1e-5)
    assert row["minimax"] == pytest.approx(fit.minimax, rel=1e-5)
    assert {claim["verdict"] for claim in content["claims"]} <= {HELD, IN_PART, NOT_HELD, CONTROL}
    assert {claim["beta"] for claim in content["claims"] if "beta" in claim} == {0.5, 1.0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--beta", "half"), "--beta half: 'half' is not a number"),
        (("--beta", "nan"), "--beta nan: nan is not between 0.05 and 4"),
        (("--beta", "0"), "--beta 0: 0 is not between 0.05 and 4"),
        (("--train-lengths", "64,256"), "--train-lengths 64,256: a rate needs 3 at least"),
        (("--train-length", "64,256,1e3"), "--train-lengths 64,256,1e3: '1e3' is not a whole number"),
        (("--train-lengths", "8,64,256"), "--train-lengths 8,64,256: 8 is not between 16 and 65536"),
        (("--channels", "4,8,8"), "--channels 4,8,8: one is there twice"),
        (("--channels", "1,2,4"), "--channels 1,2,4: 1 is not between 2 and 64"),
        (("--channels", "32,48,64"), "--channels: random spectra have 32 at most, and a rate needs 3 such numbers"),
        (("--draws", "3"), "--draws 3 is not between 10 and 1000"),
    ],
)
def test_wrong_input_is_one_line(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    code, out, err = bench("theory", *words, "--out", str(tmp_path))
    assert (code, out, err) == (2, "", f"bench: {message}\n")


def test_a_folder_that_cant_be_written_is_known_at_once(tmp_path: Path) -> None:
    (tmp_path / "theory").write_text("a file")
    code, out, err = bench("theory", "--quiet", "--out", str(tmp_path / "theory"))
    assert (code, out) == (2, "")
    assert err == f"bench: {tmp_path / 'theory'} is a file, not a folder; choose another --out\n"
