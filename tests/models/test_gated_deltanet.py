"""Gated DeltaNet with and without PoST against its formulas as a plain loop in NumPy, and what it starts from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from decaybench.core.errors import UserError
from decaybench.core.positions import Layout
from decaybench.models.addons.post import PostConfig
from decaybench.models.branch import Context, Place
from decaybench.models.language_model import build_model
from decaybench.models.mixers import gated_deltanet
from decaybench.models.mixers.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig
from decaybench.models.module import initialise, treatments
from tests import oracles
from tests.models import small

HORIZON = 512
POSTS = {
    "baseline": None,
    "paper": {"variant": "paper"},
    "minimal": {"variant": "minimal"},
    "position only": {"variant": "minimal", "reparameterize": False},
    "order only": {"variant": "paper", "position_scaling": False},
}
OPTIONS = {
    "as published": {},
    "no output gate": {"output_gate": False, "expand_v": 1},
    "negative eigenvalues": {"negative_eigenvalues": True, "expand_v": 1.5},
    "no convolution": {"conv_width": None},
}


def build(d_model=12, n_heads=3, head_dim=4, post=None, seed=0, **sizes) -> GatedDeltaNet:
    config = GatedDeltaNetConfig(n_heads=n_heads, head_dim=head_dim, chunk_size=4, **sizes)
    chosen = None if post is None else PostConfig(**{"horizon": HORIZON, **post})
    mixer = GatedDeltaNet(config, Place(d_model, 0, 2, 1.0, chosen, "torch"))
    initialise(mixer, seed)
    return mixer


def perturbed(seed=0, noise=0.3, **options) -> GatedDeltaNet:
    mixer = build(seed=seed, **options).double()
    draws = torch.Generator().manual_seed(seed)
    for parameter in mixer.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
    return mixer


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.log1p(np.exp(x))


def rates_of(w, post):
    """P and alpha from the parameters, by hand."""
    if post is None or not post.get("reparameterize", True):
        P = w["spectrum.P"]
        return P, np.zeros(len(P)) if post is None else w["spectrum.alpha"]
    steps = np.cumsum(softplus(w["spectrum.deltas"]))
    P = w["spectrum.base"] + np.concatenate([[0.0], steps])
    if not post.get("position_scaling", True):
        return P, np.zeros(len(P))
    n, k = len(P), np.arange(len(P))
    uneven = (P - P[0] - k * (P[-1] - P[0]) / (n - 1)) / math.log(HORIZON)
    return P, np.clip((n - 1 - k) / (n - 1) + uneven, 0, 1)


def by_hand(w, x, post, config):
    """One document x [T, D], one token after the other."""
    H, K = config.n_heads, config.head_dim
    V = int(K * config.expand_v)
    P, alpha = rates_of(w, post)
    projected = x @ w["in_proj.weight"].T
    C = H * (2 * K + V)
    S, outputs = np.zeros((H, K, V)), []
    for t in range(len(x)):
        qkv = projected[t, :C]
        if config.conv_width:
            taps = w["conv.weight"]  # the last tap is the token itself
            last = config.conv_width - 1
            qkv = sum(taps[:, last - lag] * projected[t - lag, :C] for lag in range(min(t, last) + 1))
        qkv = qkv * sigmoid(qkv)
        q, k, v = np.split(qkv, [H * K, 2 * H * K])
        a, b, z = np.split(projected[t, C:], [H, 2 * H])
        parts = []
        for h in range(H):
            q_h, k_h, v_h = (y.reshape(H, -1)[h] for y in (q, k, v))
            q_h = q_h / math.sqrt(q_h @ q_h + 1e-6) / math.sqrt(K)
            k_h = k_h / math.sqrt(k_h @ k_h + 1e-6)
            beta = sigmoid(b[h]) * (2 if config.negative_eigenvalues else 1)
            decay = np.exp(-np.exp(P[h]) * (t + 1.0) ** -alpha[h] * softplus(a[h] + w["dt_bias"][h]))
            S[h] = decay * (np.eye(K) - beta * np.outer(k_h, k_h)) @ S[h] + beta * np.outer(k_h, v_h)
            o = q_h @ S[h]
            parts.append(o / math.sqrt((o * o).mean() + 1e-5) * w["norm.weight"])
        y = np.concatenate(parts)
        outputs.append(w["out_proj.weight"] @ (y * z * sigmoid(z) if config.output_gate else y))
    return np.stack(outputs)


@pytest.mark.parametrize(
    ("post", "options"), [(name, "as published") for name in POSTS] + [("paper", name) for name in list(OPTIONS)[1:]]
)
def test_the_mixer_is_its_formulas(post, options):
    mixer = perturbed(post=POSTS[post], seed=3, **OPTIONS[options])
    weights = {key: value.numpy() for key, value in mixer.state_dict().items()}
    x = torch.randn(2, 21, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # The second row packs two documents and ends in padding.
    positions = torch.tensor([[*range(1, 22)], [*range(1, 9), *range(1, 12), 0, 0]])
    y, _ = mixer(x, Context(Layout.of(positions), keep_state=False), None)
    for row, document in ((0, slice(0, 21)), (1, slice(0, 8)), (1, slice(8, 19))):
        want = by_hand(weights, x[row, document].numpy(), POSTS[post], mixer.config)
        assert np.abs(y[row, document].detach().numpy() - want).max() < 1e-11 * np.abs(want).max()


@pytest.mark.parametrize("options", OPTIONS)
def test_the_state_carries_on(options):
    mixer = perturbed(post=POSTS["paper"], **OPTIONS[options])
    x = torch.randn(2, 14, 12, dtype=torch.float64)
    want, _ = mixer(x, Context(Layout.fresh(14, x.device), keep_state=False), None)
    state, at, parts = None, 0, []
    for length in (6, 1, 5, 2):
        positions = torch.arange(at + 1, at + length + 1).expand(2, -1)
        layout = Layout.of(positions, has_state=state is not None)
        y, state = mixer(x[:, at : at + length], Context(layout, keep_state=True), state)
        parts.append(y)
        at += length
    assert small.largest(torch.cat(parts, dim=1), want) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("post", POSTS)
def test_decays_reach_the_recurrence_in_float32(monkeypatch, dtype, post):
    mixer = build(post=POSTS[post]).to(dtype)
    seen = {}

    def spy(q, k, v, beta, log_decay, **options):
        seen.update(beta=beta, log_decay=log_decay)
        return gated_deltanet_op(q, k, v, beta, log_decay, **options)

    gated_deltanet_op = gated_deltanet.gated_delta_rule
    monkeypatch.setattr(gated_deltanet, "gated_delta_rule", spy)
    x = torch.zeros(1, 3, 12, dtype=dtype)
    y, _ = mixer(x, Context(Layout.fresh(3, x.device), keep_state=False), None)
    assert y.dtype == dtype
    assert {tensor.dtype for tensor in seen.values()} == {torch.float32}
    rates = [1 / mixer.timescales(t) for t in (1, 2, 3)]  # a zero input: the mixer at rest
    assert small.largest(seen["log_decay"][0], -torch.stack(rates)) < 1e-6
    assert torch.all(seen["beta"] == 0.5)


@pytest.mark.parametrize("name", POSTS)
@pytest.mark.parametrize("position", [1, 7, 512])
def test_timescales_are_the_formula(name, position):
    mixer = perturbed(post=POSTS[name], seed=2)
    weights = {key: value.numpy() for key, value in mixer.state_dict().items()}
    P, alpha = rates_of(weights, POSTS[name])
    want = position**alpha / (np.exp(P) * softplus(weights["dt_bias"]))
    assert np.allclose(mixer.timescales(position).detach().numpy(), want, rtol=1e-10, atol=0)


def test_initial_values_follow_their_laws():
    mixer = build(d_model=400, n_heads=10_000, head_dim=1, expand_v=1, post=None).requires_grad_(False)
    even = (np.arange(10_000) + 0.5) / 10_000
    oracles.assert_same_law(mixer.spectrum.P.exp(), 16 * even, "A")
    oracles.assert_same_law(softplus(mixer.dt_bias.double().numpy()), 1e-3 * 100**even, "dt")
    oracles.assert_same_law(mixer.conv.weight, even - 0.5, "convolution")
    oracles.assert_same_law(mixer.in_proj.weight[::97], (2 * even - 1) / 20, "in_proj")
    oracles.assert_same_law(mixer.out_proj.weight[::40], (2 * even - 1) / 100, "out_proj")
    assert torch.all(mixer.norm.weight == 1)


def test_a_draw_of_zero_is_no_infinite_timescale(monkeypatch):
    monkeypatch.setattr(gated_deltanet, "uniform_", lambda parameter, low, high, draws: parameter.fill_(low))
    mixer = build()
    assert mixer.spectrum.P.isfinite().all()
    assert mixer.timescales(1).isfinite().all()


def test_out_proj_is_shrunk():
    config = GatedDeltaNetConfig(n_heads=2, head_dim=8)
    plain, shrunk = (GatedDeltaNet(config, Place(16, 0, 2, shrink, None, "torch")) for shrink in (1.0, 4.0))
    for mixer in (plain, shrunk):
        initialise(mixer, 0)
    assert torch.equal(plain.out_proj.weight, 4 * shrunk.out_proj.weight)
    assert torch.equal(plain.in_proj.weight, shrunk.in_proj.weight)


@pytest.mark.parametrize(
    ("variant", "slowest", "fastest"),
    [("paper", 0.0, math.log(HORIZON)), ("minimal", -math.log(0.01 * HORIZON), -math.log(0.01))],
)
def test_posts_spectrum_starts_as_the_papers(variant, slowest, fastest):
    mixer = build(n_heads=9, post={"variant": variant})
    P = mixer.spectrum.ordered_rates().detach().numpy()
    assert np.allclose(P, np.linspace(slowest, fastest, 9), atol=2e-6)
    assert np.allclose(mixer.spectrum.tapers().detach().numpy(), np.linspace(1, 0, 9), atol=1e-6)


def test_a_range_is_in_timescales_at_a_dt_of_a_hundredth():
    P = build(post={"variant": "paper", "range": (5.0, 500.0)}).spectrum.ordered_rates().detach()
    assert (1 / (0.01 * P.exp()))[[-1, 0]].tolist() == pytest.approx([5.0, 500.0], rel=1e-5)


@pytest.mark.parametrize("variant", ["paper", "minimal"])
@pytest.mark.parametrize(("dt_bias", "learns"), [(None, True), ("learned", True), ("frozen", False)])
def test_dt_bias_learns_unless_frozen(variant, dt_bias, learns):
    mixer = build(post={"variant": variant, "dt_bias": dt_bias})
    assert mixer.dt_bias.requires_grad is learns
    assert torch.equal(mixer.dt_bias, build().dt_bias)


@pytest.mark.parametrize("variant", ["paper", "minimal"])
def test_post_adds_no_parameter_and_no_state(variant):
    post = {"horizon": 32, "variant": variant}
    base, with_post = (build_model(small.config("gated_deltanet", post=p), 0) for p in (None, post))
    sizes = [sum(p.numel() for p in model.parameters()) for model in (base, with_post)]
    assert sizes[0] == sizes[1]
    tokens = small.tokens(2, 5)
    kept = [model.prefill(tokens).state.elements() for model in (base, with_post)]
    # Convolution: 3 inputs of 4 heads with 8 + 8 + 16 channels. Memory: 8 x 16 a head.
    assert kept[0] == kept[1] == (3 * 4 * 32 + 4 * 8 * 16,) * 2
    own = {f"blocks.{n}.mixer.spectrum.{name}" for n in (0, 1) for name in ("P", "base", "deltas")}
    ours, theirs = base.state_dict(), with_post.state_dict()
    assert ours.keys() - own == theirs.keys() - own
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() - own)


@pytest.mark.parametrize("variant", ["paper", "minimal"])
def test_both_switches_off_are_the_baseline_bit_for_bit(variant):
    """In either variant: the paper changes nothing in Gated DeltaNet beside PoST."""
    off = {"horizon": 32, "variant": variant, "reparameterize": False, "position_scaling": False}
    base, without = (build_model(small.config("gated_deltanet", post=post), 0) for post in (None, off))
    tokens = small.tokens(2, 11)
    assert base.state_dict().keys() == without.state_dict().keys()
    logits = [model(tokens).logits for model in (base, without)]
    assert torch.equal(*logits)
    for values, model in zip(logits, (base, without), strict=True):
        values.square().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    for ours, theirs in zip(base.parameters(), without.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("post", POSTS)
def test_weight_decay_is_for_matrices_alone(post):
    found = treatments(build(post=POSTS[post]))
    decayed = {name for name, treatment in found.items() if treatment.decays}
    assert decayed == {"in_proj.weight", "conv.weight", "out_proj.weight"}
    assert {treatment.factor for treatment in found.values()} == {1.0}


def test_a_value_size_that_is_not_whole_is_named():
    with pytest.raises(UserError, match=r"mixer\.head_dim \* mixer\.expand_v = 4 \* 1\.3 .* not 5\.2"):
        build(expand_v=1.3)
