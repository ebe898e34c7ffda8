"""PoST's spectra against the formulas of arXiv 2604.07658, written out as plain loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.func import functional_call

from decaybench.models.addons.post import FreeSpectrum, PostConfig, TaperedSpectrum, make_spectrum
from decaybench.models.language_model import build_model
from decaybench.models.mixers import mamba2
from decaybench.models.module import initialise
from tests.models import small

T = 2048
DT = {"paper": 0.05, "minimal": 0.01}


def spectrum(n: int, *, dt: float = 0.05, **settings) -> TaperedSpectrum:
    post = PostConfig(**{"horizon": T, **settings})
    made = make_spectrum(post, n, lambda draws: torch.zeros(n), lambda tau: -math.log(dt * tau))
    initialise(made, 0)
    return made.double()


def rates_by_hand(base, deltas):
    P = [base]
    for delta in deltas:
        P.append(P[-1] + math.log1p(math.exp(delta)))
    return np.array(P)


def tapers_by_hand(P, horizon, clamp=True):
    N = len(P)
    if N == 1:
        return np.zeros(1)
    alpha = []
    G = (P[N - 1] - P[0]) / (N - 1)
    for k in range(N):
        value = (N - 1 - k) / (N - 1) + (P[k] - P[0] - k * G) / math.log(horizon)
        alpha.append(min(max(value, 0.0), 1.0) if clamp else value)
    return np.array(alpha)


def retention(log_rate, dt, j, t):
    """What is left at t of a write at j: log_rate(s) is the log-rate at position s."""
    return np.exp(-sum(dt * np.exp(log_rate(s)) for s in range(j + 1, t + 1)))


def perturbed(n: int, seed: int, size: float, horizon: int = T) -> TaperedSpectrum:
    found = spectrum(n, horizon=horizon)
    draws = torch.Generator().manual_seed(seed)
    for parameter in found.parameters():
        parameter.data += size * torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
    return found


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(2, 10**6), st.integers(0, 99), st.sampled_from([0.0, 0.1, 1.0, 4.0]))
def test_rates_tapers_and_scaling_are_the_formulas(n, horizon, seed, size):
    found = perturbed(n, seed, size, horizon)
    P = rates_by_hand(float(found.base.detach()), found.deltas.tolist())
    alpha = tapers_by_hand(P, horizon)
    assert np.allclose(found.ordered_rates().detach().numpy(), P, rtol=0, atol=1e-11)
    assert np.all(np.diff(P) > 0)
    assert np.allclose(found.tapers().detach().numpy(), alpha, rtol=0, atol=1e-11)
    positions = torch.tensor([[0, 1, 2, 3, 1000], [5, 6, 1, 2, 10**7]])
    scaled = found.log_rate(positions).detach().numpy()
    for row, column in np.ndindex(2, 5):
        t = max(1, int(positions[row, column]))
        assert np.allclose(scaled[row, column], P - alpha * math.log(t), rtol=0, atol=1e-11)


@pytest.mark.parametrize("seed", range(5))
def test_timescales_at_the_horizon_are_evenly_spaced(seed):
    """Whatever the learned gaps, log tau_k at t = T is linear in k, as long as the clamp doesn't bind."""
    found = perturbed(16, seed, 0.3)
    P = found.ordered_rates().detach().numpy()
    assert np.allclose(tapers_by_hand(P, T), tapers_by_hand(P, T, clamp=False)), "the clamp binds: not this test"
    assert np.abs(np.diff(P, 2)).max() > 0.05, "P itself is even: nothing to show"
    log_tau = -found.log_rate(torch.tensor([[T]])).detach().numpy()[0, 0]
    assert np.abs(np.diff(log_tau, 2)).max() < 1e-12
    elsewhere = -found.log_rate(torch.tensor([[T // 4]])).detach().numpy()[0, 0]
    assert np.abs(np.diff(elsewhere, 2)).max() > 1e-3


def test_the_clamp_binds():
    found = spectrum(6)
    with torch.no_grad():
        found.deltas.copy_(torch.tensor([20.0, -9.0, -9.0, -9.0, -9.0]))
    P = rates_by_hand(float(found.base.detach()), found.deltas.tolist())
    free = tapers_by_hand(P, T, clamp=False)
    assert free.max() > 1.5
    alpha = found.tapers().detach().numpy()
    assert alpha.min() >= 0
    assert alpha.max() == 1
    assert np.allclose(alpha, free.clip(0, 1))


def test_evenly_spaced_rates_have_the_linear_taper():
    n = 24
    assert np.allclose(spectrum(n).tapers().detach().numpy(), (n - 1 - np.arange(n)) / (n - 1), atol=1e-6)


@pytest.mark.parametrize("n", [2, 5, 24])
def test_the_learned_taper_starts_linear_and_falls_from_one_to_zero(n):
    found = spectrum(n, taper="learned")
    ramp = (n - 1 - np.arange(n)) / (n - 1)
    assert np.allclose(found.tapers().detach().numpy(), ramp)
    with torch.no_grad():
        found.logits.copy_(torch.linspace(-3, 2, n - 1))
    logits = np.exp(np.linspace(-3, 2, n - 1))
    by_hand = np.concatenate([[1.0], 1 - np.cumsum(logits / logits.sum())])
    assert np.allclose(found.tapers().detach().numpy(), by_hand, atol=1e-7)
    assert np.all(np.diff(by_hand) < 0)
    if n > 2:
        loss = found.tapers()[1]
        assert torch.autograd.grad(loss, found.logits)[0].abs().max() > 0


def test_the_linear_taper_has_no_gradient_and_ignores_the_gaps():
    found = perturbed(5, 0, 1.0)
    linear = TaperedSpectrum(5, -4.0, 0.0, PostConfig(horizon=T, taper="linear")).double()
    linear.load_state_dict(found.state_dict())
    assert np.allclose(linear.tapers().numpy(), [1, 0.75, 0.5, 0.25, 0])
    assert not linear.tapers().requires_grad
    assert not torch.allclose(linear.tapers(), found.tapers())


@pytest.mark.parametrize("taper", ["analytical", "linear", "learned"])
def test_gradients_flow_through_the_rates_into_the_gaps(taper):
    """By finite differences, the way through alpha included."""
    found = spectrum(5, taper=taper)
    names = [name for name, _ in found.named_parameters()]
    values = [p.detach() + 0.1 * torch.arange(p.numel()).double().view(p.shape) for p in found.parameters()]
    positions = torch.tensor([[1, 2, 3, 900]])

    def log_rate(*values):
        return functional_call(
            Caller(found), dict(zip([f"spectrum.{name}" for name in names], values, strict=True)), positions
        )

    free = [value.clone().requires_grad_() for value in values]
    assert torch.autograd.gradcheck(log_rate, free)
    if taper == "analytical":  # alpha alone moves with the gaps
        late, early = (log_rate(*free)[0, place] for place in (3, 0))
        assert torch.autograd.grad((late - early)[2], free[names.index("deltas")])[0].abs().min() > 1e-3


class Caller(torch.nn.Module):
    def __init__(self, spectrum):
        super().__init__()
        self.spectrum = spectrum

    def forward(self, positions):
        return self.spectrum.log_rate(positions)


@pytest.mark.parametrize(
    ("taper", "control"),
    [*itertools.product(["analytical", "linear", "learned"], ["none", "shuffled"]), ("analytical", "static_wide")],
)
def test_one_head(taper, control):
    found = spectrum(1, taper=taper, control=control)
    positions = torch.tensor([[1, 7, 4096]])
    assert found.log_rate(positions).isfinite().all()
    if control == "static_wide":
        assert found.tapers() is None
    else:
        assert found.tapers().tolist() == [0.0]
        assert torch.equal(found.log_rate(positions), found.ordered_rates().expand(1, 3, 1))
    found.log_rate(positions).sum().backward()
    assert found.base.grad.isfinite()


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 24, 64])
def test_shuffled_is_a_permutation_and_not_the_identity(n):
    ordered, shuffled = spectrum(n).tapers(), spectrum(n, control="shuffled").tapers()
    assert not torch.equal(ordered, shuffled)
    assert torch.equal(ordered.sort().values, shuffled.sort().values)
    assert torch.equal(shuffled, spectrum(n, control="shuffled").tapers())
    assert torch.equal(spectrum(n).ordered_rates(), spectrum(n, control="shuffled").ordered_rates())


@pytest.mark.parametrize(
    ("settings", "fastest", "slowest"),
    [
        ({}, 1, T),
        ({"range": (2.0, 300.0)}, 2, 300),
        ({"horizon": 100}, 1, 100),
        ({"control": "static_wide"}, 1, T**2),
    ],
)
@pytest.mark.parametrize("dt", [0.05, 0.01])
def test_initial_timescales_span_the_range(settings, fastest, slowest, dt):
    found = spectrum(9, dt=dt, **settings)
    timescales = 1 / (dt * found.ordered_rates().exp().detach().numpy())
    assert np.allclose(timescales, np.geomspace(slowest, fastest, 9), rtol=1e-5)
    assert (found.tapers() is None) == (settings.get("control") == "static_wide")


def test_static_wide_has_the_timescales_that_post_has_at_the_horizon():
    late = spectrum(9).log_rate(torch.tensor([[T]]))[0, 0]
    assert torch.allclose(spectrum(9, control="static_wide").log_rate(torch.tensor([[1]])), late, atol=1e-5)


def test_position_only_tapers_go_by_the_rank_of_the_initial_rates():
    rates = torch.tensor([2.0, -1.0, 0.5, 3.0])
    for options, want in ({}, [1 / 3, 1, 2 / 3, 0]), ({"control": "shuffled"}, None):
        found = make_spectrum(PostConfig(horizon=T, reparameterize=False, **options), 4, lambda draws: rates, math.log)
        initialise(found, 0)
        assert isinstance(found, FreeSpectrum)
        if want:
            assert found.tapers().tolist() == pytest.approx(want)
            log_rate = found.log_rate(torch.tensor([[1, 10]]))
            assert torch.allclose(log_rate[0, 1], rates - torch.tensor(want) * math.log(10))
        else:
            assert sorted(found.tapers().tolist()) == pytest.approx([0, 1 / 3, 2 / 3, 1])
            assert found.tapers().tolist() != pytest.approx([1 / 3, 1, 2 / 3, 0])


def test_reparameterize_only_does_not_see_the_position():
    found = spectrum(5, position_scaling=False)
    assert found.tapers() is None
    assert found.log_rate(torch.tensor([[1, 500]])).shape == (5,)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"range": (0.0, 5.0)}, "two timescales"),
        ({"range": (6.0, 5.0)}, "two timescales"),
        ({"control": "static_wide", "reparameterize": False}, "ordered spectrum"),
        ({"control": "shuffled", "position_scaling": False}, "permutes the tapers"),
        ({"taper": "learned", "reparameterize": False}, "taper=learned needs"),
        ({"range": (1.0, 5.0), "reparameterize": False}, "needs reparameterize=true"),
        ({"taper": "linear", "reparameterize": False}, "taper=linear needs"),
        ({"taper": "linear", "position_scaling": False}, "tapers nothing"),
        ({"taper": "learned", "control": "static_wide"}, "tapers nothing"),
        ({"range": (4.0, 64.0), "control": "static_wide"}, "excludes range"),
        ({"control": "static_wide", "position_scaling": False}, "leave position_scaling=false out"),
        ({"horizon": 1}, "greater than or equal to 2"),
    ],
)
def test_switches_that_contradict_each_other_are_refused(settings, said):
    with pytest.raises(ValidationError, match=said):
        PostConfig(**settings)


def test_a_missing_horizon_is_named():
    with pytest.raises(ValueError, match=r"post\.horizon is not set"):
        make_spectrum(PostConfig(), 4, torch.zeros, math.log)


# --- the figures of what PoST must show at the start: N = 24 heads, T = 2048, dt = 0.05


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({}, [9, 8, 7, 7]),
        ({"position_scaling": False}, [12, 8, 4, 0]),
        ({"range": (1.0, 1.0)}, [0, 0, 0, 0]),  # a flat spectrum: all heads start at the fastest timescale
    ],
)
def test_heads_that_keep_5_to_95_percent_of_the_first_token(settings, counts):
    found = spectrum(24, **settings)
    with torch.no_grad():
        rates = found.log_rate(torch.arange(2, 8193)[None]).expand(1, 8191, 24)[0].exp().numpy()
    kept = np.exp(-0.05 * rates.cumsum(0))
    partly = ((kept >= 0.05) & (kept <= 0.95)).sum(1)
    assert [partly[t - 2] for t in (64, 512, 2048, 8192)] == counts


@pytest.mark.parametrize(("j", "t"), [(10, 100), (100, 3000), (500, 8000)])
def test_the_slowest_head_forgets_by_a_power_law(j, t):
    found = spectrum(4, range=(1.0, 2.0))
    a = 0.05 * float(found.ordered_rates()[0].exp().detach())

    def log_rate(s):
        return found.log_rate(torch.tensor([[s]])).detach().numpy()[0, 0]

    assert retention(log_rate, 0.05, j, t)[0] == pytest.approx((j / t) ** a, rel=a / j)


# --- in a model


@pytest.mark.parametrize("variant", ["paper", "minimal"])
def test_initial_timescales_of_the_model(variant):
    model = build_model(small.config(post={"variant": variant, "horizon": 128}))
    for block in model.blocks:
        rates = block.mixer.spectrum.ordered_rates().detach().exp()
        assert np.allclose(1 / (DT[variant] * rates), np.geomspace(128, 1, 8), rtol=1e-4)
        assert block.mixer.dt_bias.requires_grad == (variant == "minimal")
        if variant == "paper":
            assert torch.allclose(torch.nn.functional.softplus(block.mixer.dt_bias), torch.tensor(0.05))
            # The slowest head's timescale grows with t from T to T t, the fastest's stays.
            assert block.mixer.timescales(1)[[0, -1]].tolist() == pytest.approx([128, 1], rel=1e-3)
            assert block.mixer.timescales(50)[[0, -1]].tolist() == pytest.approx([128 * 50, 1], rel=1e-3)


@pytest.mark.parametrize("variant", ["paper", "minimal"])
@pytest.mark.parametrize("dt_bias", ["learned", "frozen", None])
def test_dt_bias_learns_or_not_as_told(variant, dt_bias):
    model = build_model(small.config(post={"variant": variant, "horizon": 64, "dt_bias": dt_bias}))
    learns = {"learned": True, "frozen": False, None: variant == "minimal"}[dt_bias]
    assert all(block.mixer.dt_bias.requires_grad == learns for block in model.blocks)


def test_only_the_decay_is_scaled(monkeypatch):
    calls = []

    def listen(*args, **kwargs):
        calls.append((args, kwargs))
        return original(*args, **kwargs)

    original = mamba2.scalar_decay
    monkeypatch.setattr(mamba2, "scalar_decay", listen)
    tokens, positions = small.tokens(1, 9), torch.tensor([[1, 2, 3, 1, 2, 3, 4, 5, 6]])
    for scaling in (True, False):
        model = small.model(post={"variant": "minimal", "horizon": 64, "position_scaling": scaling})
        model(tokens, positions)
    (scaled, plain) = calls[0][0], calls[2][0]  # the first layers: what goes in is the same
    for name, a, b in zip(("q", "k", "v"), scaled[:3], plain[:3], strict=True):
        assert torch.equal(a, b), name
    alpha = model.blocks[0].mixer.spectrum._ordered_tapers()
    ratio = positions[0, :, None].double() ** -alpha
    assert torch.allclose(scaled[3][0], plain[3][0] * ratio, rtol=1e-12)


@pytest.mark.parametrize("name", ["mamba2"])
def test_both_switches_off_are_the_baseline_bit_for_bit(name):
    off = {"variant": "minimal", "reparameterize": False, "position_scaling": False}
    with_post, baseline = (build_model(small.config(name, post=post), 3) for post in (off, None))
    a, b = with_post.state_dict(), baseline.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert {n: p.requires_grad for n, p in with_post.named_parameters()} == {
        n: p.requires_grad for n, p in baseline.named_parameters()
    }
    tokens = small.tokens(2, 40)
    assert torch.equal(with_post(tokens).logits, baseline(tokens).logits)


@pytest.mark.parametrize(
    ("post", "changed"),
    [
        ({"variant": "minimal"}, ("spectrum",)),
        ({"variant": "minimal", "reparameterize": False}, ("spectrum.alpha",)),
        ({"variant": "minimal", "taper": "learned"}, ("spectrum",)),
        ({"variant": "paper"}, ("spectrum", "dt_bias")),
        ({"variant": "paper", "control": "static_wide"}, ("spectrum", "dt_bias")),
    ],
)
@pytest.mark.parametrize("seed", [0, 7])
def test_what_the_addon_does_not_own_starts_as_in_the_baseline(post, changed, seed):
    with_post = build_model(small.config(post={"horizon": 64, **post}), seed).state_dict()
    baseline = build_model(small.config(), seed).state_dict()
    owned = {key for key in with_post if any(part in key for part in changed)}
    assert owned
    shared = with_post.keys() - owned
    assert shared == {key for key in baseline if not any(part in key for part in changed)}
    assert all(torch.equal(with_post[key], baseline[key]) for key in shared)
    assert len(shared) > 10


def test_two_seeds_start_differently():
    a, b = (build_model(small.config(), seed).state_dict() for seed in (0, 1))
    assert not any(torch.equal(a[key], b[key]) for key in a if "proj" in key or "embedding" in key or "P" in key)
