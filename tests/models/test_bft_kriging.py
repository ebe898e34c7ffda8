"""The variance of what a mixer reads: the estimator by Monte Carlo, and the way out to R by perturbing the heads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from decaybench.core.positions import Layout
from decaybench.models.addons.bft import BftConfig, KalmanObserver
from decaybench.models.addons.post import PostConfig, make_spectrum
from decaybench.models.branch import Context, Observer
from decaybench.models.module import LayerNorm, initialise
from decaybench.models.ops import pieces
from decaybench.models.ops.read_variance import read_variance
from decaybench.models.ops.softmax_attention import softmax_attention
from tests.models import small
from tests.models.small import largest
from tests.models.test_bft_moments import MIXERS, OPS, Given, H, V, draw, moments, observed, precisions, sources, spied

D_OUT, K = 5, 4
OPTIONS = [{}, {"observation": "sample"}, {"nu0": 0.3}, {"nu0": 20.0, "observation": "sample"}]


def attended(q, k, v, lbar, **options):
    context = Context(Layout.fresh(q.shape[1], torch.device("cpu")), keep_state=False)
    observer = KalmanObserver(BftConfig(**options), lbar, context, None, wants_dynamics=False)
    return observer, observer.attend(q, k, v, None)


def plain_inputs(T, rows=2):
    return *(draw(rows, T, H, width, seed=n) for n, width in enumerate((K, K, V), start=11)), precisions(rows, T)


def variance_by_hand(observer, nu0=1.0, observation="estimate"):
    """Of the sources' mean, numpy [B, T, H, V], from the moments."""
    mean, square, n, inverse = (part.detach().numpy() for part in moments(observer))
    variance = np.zeros_like(mean)
    for place in np.ndindex(n.shape):
        s2 = np.maximum(square[place] - mean[place] ** 2, 0)
        s02 = inverse[place] * square[place].mean()
        sigma2 = (nu0 * s02 + n[place] * s2) / (nu0 + n[place] - 1)
        variance[place] = sigma2 / n[place] if observation == "estimate" else sigma2
    return variance


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attentions_variance_is_the_formula(options):
    observer, e = attended(*plain_inputs(7), **options)
    W = draw(D_OUT, H * V, seed=20)
    want = variance_by_hand(observer, **options).reshape(2, 7, H * V) @ (W.numpy() ** 2).T
    assert np.allclose(observer.variance(W), want, rtol=1e-11)
    assert largest(e, moments(observer)[0]) == 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_recurrences_variance_is_the_formula(options):
    """The relative variance of the sources' mean, at the size of what was read."""
    observer, _ = observed(*sources(7), **options)
    o, scale, W = draw(2, 7, H, V, seed=17), draw(2, 7, H, V, seed=18), draw(D_OUT, H * V, seed=20)
    observer.read(o.square().mean(-1), scale)
    variance, mean = variance_by_hand(observer, **options), moments(observer)[0].numpy()

    def mean_square(x):
        return (x**2).mean(-1, keepdims=True)

    of_heads = variance * mean_square(o.numpy()) / (mean_square(mean) + variance.mean(-1, keepdims=True))
    want = (of_heads * scale.numpy() ** 2).reshape(2, 7, H * V) @ (W.numpy() ** 2).T
    assert np.allclose(observer.variance(W), want, rtol=1e-11)


def test_the_first_token_has_the_priors_variance():
    """One source: nothing is known but that its variance is its mean square, at a precision of 1."""
    for nu0 in (0.5, 1.0, 7.0):
        (values, u, g, lbar), (q, k, v, _) = sources(3), plain_inputs(3)
        for observer, given in (
            (observed(values, u, g, lbar, nu0=nu0)[0], values),
            (attended(q, k, v, lbar, nu0=nu0)[0], v),
        ):
            want = given[:, 0].square().mean(-1, keepdim=True) / lbar[:, 0, None, None]
            got = observer.sources.variance(BftConfig(nu0=nu0))[:, 0]
            assert largest(got, want.expand_as(got)) < 1e-12


DRAWS, SIGMA = 20_000, 0.7


@pytest.mark.parametrize("nu0", [0.0, 0.5, 1.0, 10.0])
@pytest.mark.parametrize("kind", ["recurrence", "attention"])
def test_the_estimators_expectation_by_monte_carlo(kind, nu0):
    """Equal variances under any weights: E sigma2 = (nu0 E s02 + (n-1) sigma^2) / (nu0 + n - 1), and unbiased at
    nu0 = 0. The bound is five standard errors."""
    T, channels = 6, 2
    mu = torch.tensor([0.3, -1.0], dtype=torch.float64)
    values = mu + SIGMA * draw(DRAWS, T, 1, channels, seed=31)

    def alike(x):
        return x.expand(DRAWS, *x.shape[1:])

    _, u, g, lbar = (alike(part) for part in sources(T, rows=1, heads=1))
    if kind == "recurrence":
        observer, _ = observed(values, u, g, lbar, keep=False)
    else:
        q, k = (alike(draw(1, T, 1, K, seed=seed)) for seed in (32, 33))
        observer, _ = attended(q, k, values, lbar)
    _, _, n, inverse = (part[0, -1, 0] for part in moments(observer))
    sigma2 = observer.sources.variance(BftConfig(observation="sample").model_copy(update={"nu0": nu0}))[:, -1, 0]
    s02 = inverse * (SIGMA**2 + mu.square().mean())
    want = (nu0 * s02 + (n - 1) * SIGMA**2) / (nu0 + n - 1)
    error = sigma2.std(0) / math.sqrt(DRAWS)
    assert 1.5 < n < T
    assert ((sigma2.mean(0) - want).abs() < 5 * error).all()
    assert (error < 0.02 * want).all()


# Out to R: the heads are perturbed inside the mixer, whose norm keeps the scale that it had.


class Remembering(KalmanObserver):
    """Keeps its answer, for who mixes again."""

    def write(self, values, write_strength, log_decay):
        self.log_w = super().write(values, write_strength, log_decay)
        return self.log_w


class Perturbed(Observer):
    """Attention with a given result."""

    def __init__(self, heads):
        self.heads = heads

    def attend(self, q, k, v, mask):
        return self.heads


def hold(norm, at):
    """Let the norm divide by the standard deviation (or rms) that it finds in `at` for good."""
    parts = at.reshape(*at.shape[:-1], norm.groups, -1)
    centred = isinstance(norm, LayerNorm)
    mean = parts.mean(-1, keepdim=True) if centred else torch.zeros((), dtype=at.dtype)
    std = ((parts - mean) ** 2).mean(-1, keepdim=True).add(norm.eps).sqrt()

    def held(x):
        y = ((x.reshape(*x.shape[:-1], norm.groups, -1) - mean) / std).reshape(x.shape) * norm.weight
        return y + norm.bias if centred else y

    norm.forward = held


def read_and_perturbed(name, options, monkeypatch):
    """A mixer's y, R, its heads' variances [1, T, H, V], and a function from noise on the heads to y."""
    T = 3
    mixer = small.model(name, **options).blocks[0].mixer
    x, lbar = draw(1, T, 32, seed=4), precisions(1, T)
    context = Context(Layout.fresh(T, torch.device("cpu")), False)
    observer, before = Remembering(BftConfig(), lbar, context, None, wants_dynamics=False), []
    if name == "attention":
        y, _ = mixer(x, context, None, observer)
        o = moments(observer)[0].detach()
        variance = torch.from_numpy(variance_by_hand(observer))

        def perturb(noise):
            rows = x.expand(len(noise), -1, -1)
            return mixer(rows, context, None, Perturbed(o + noise))[0]

        return y, observer.variance(mixer.out_proj.weight), variance, perturb

    seen = spied(monkeypatch, name, mixer)
    hook = mixer.norm.register_forward_pre_hook(lambda module, args: before.append(args[0].detach()))
    y, _ = mixer(x, context, None, observer)
    hook.remove()
    hold(mixer.norm, before[0])
    o, mean, of_mean = seen["o"].detach(), moments(observer)[0].detach(), torch.from_numpy(variance_by_hand(observer))
    size = o.square().mean(-1, keepdim=True) / (mean.square() + of_mean).mean(-1, keepdim=True)

    def perturb(noise):
        if name in OPS:
            monkeypatch.setattr(f"decaybench.models.mixers.{name}.{OPS[name]}", lambda *_, **__: (o + noise, None))
        else:
            mixer.gate.recurrence = lambda *_, **__: (o + noise, None)
        return mixer(x.expand(len(noise), -1, -1), context, None, Given(observer.log_w))[0]

    return y, observer.variance(mixer.out_proj.weight), of_mean * size, perturb


@pytest.mark.parametrize("cell", [*MIXERS, "attention"])
@torch.no_grad()
def test_the_outputs_variance_is_that_of_perturbed_heads(cell, monkeypatch):
    """Exactly, one channel at a time, and by Monte Carlo, all at once."""
    name, options = MIXERS.get(cell, (cell, {}))
    y, R, variance, perturb = read_and_perturbed(name, options, monkeypatch)
    assert largest(perturb(torch.zeros_like(variance)), y) < 1e-12
    assert R.shape == y.shape
    T, channels = variance.shape[1], variance[0, 0].numel()
    one_each = torch.eye(channels, dtype=torch.float64).view(channels, 1, *variance.shape[2:]) * variance.sqrt()
    moved = (perturb(one_each) - y).square().sum(0)
    assert largest(moved / R[0], torch.ones(T, 32)) < 1e-9

    draws = 4000
    sampled = perturb(draw(draws, *variance.shape[1:], seed=8) * variance.sqrt()).var(0)
    assert largest(sampled / R[0], torch.ones(T, 32)) < 5 * math.sqrt(2 / draws)


# Scale.


@pytest.mark.parametrize("factor", [1e-4, 3.0, 1e4])
@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("cell", ["gla", "gla+post", "retnet", "retnet+post", "retnet+post-minimal"])
@torch.no_grad()
def test_rescaling_projections_leaves_the_gain_alone(cell, part, factor):
    """By the rows of the weights, where nothing but a norm follows; its eps is off, for it knows a scale."""
    name, options = MIXERS[cell]
    model = small.model(name, **options, bft={})
    for block in model.blocks:
        block.mixer.norm.eps = 0.0
    tokens = small.tokens(2, 12)
    before, logits = [trace.gain for trace in model.trace(tokens)], model(tokens).logits
    for block in model.blocks:
        keys = (block.mixer.convolved - block.mixer.gated) // 2
        rows = {"q": slice(0, keys), "k": slice(keys, 2 * keys), "v": slice(2 * keys, block.mixer.convolved)}[part]
        block.mixer.in_proj.weight[rows] *= factor
    after = [trace.gain for trace in model.trace(tokens)]
    assert all(largest(one, other) < 1e-9 for one, other in zip(before, after, strict=True))
    assert largest(model(tokens).logits, logits) < 1e-8
    assert all(0.01 < float(gain.mean()) < 0.99 for gain in before)


@pytest.mark.parametrize("factor", [1e-4, 1e4])
@pytest.mark.parametrize("part", ["q or k", "v"])
def test_rescaled_heads_behind_a_norm_have_the_same_variance(part, factor):
    """The observer alone: heads c o with a slope / c; values come scaled or not."""
    (values, u, g, lbar), W = sources(9), draw(D_OUT, H * V, seed=20)
    o, slope = draw(2, 9, H, V, seed=17), draw(2, 9, H, V, seed=18)
    results = []
    for c in (1.0, factor):
        observer, log_w = observed(values * (c if part == "v" else 1.0), u, g, lbar)
        observer.read((o * c).square().mean(-1), slope / c)
        results.append((observer.variance(W), log_w))
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-10)
    assert torch.equal(results[0][1], results[1][1])


# How many tokens a read-out rests on, against its position: the bridge to PoST.


@pytest.mark.parametrize("a", [0.25, 1.0, 3.0])
def test_with_posts_slowest_taper_the_sample_size_grows_with_the_context(a):
    """Rates a/t, alpha = 1: a decay of about (j/t)^a from j to t, and n/t tends to (2a+1)/(a+1)^2."""
    T = 3000
    spectrum = make_spectrum(PostConfig(horizon=T), 2, lambda draws: torch.zeros(2), lambda tau: -math.log(tau))
    initialise(spectrum, 0)
    spectrum.double().base.data.fill_(math.log(a))
    g = -spectrum.log_rate(torch.arange(1, T + 1)[None]).exp()[..., :1].detach()
    assert largest(g[0, :, 0], -a / torch.arange(1, T + 1, dtype=torch.float64)) < 1e-12
    ones = torch.ones(1, T, dtype=torch.float64)
    observer, _ = observed(draw(1, T, 1, 1), None, g, ones)
    n = observer.sources.size[0, :, 0].detach()
    limit = (2 * a + 1) / (a + 1) ** 2
    for at in (300, 1000, 3000):
        assert float(n[at - 1]) / at == pytest.approx(limit, rel=10 / at)
        power_law = (torch.arange(1, at + 1) / at) ** a
        assert float(n[at - 1]) == pytest.approx(float(power_law.sum() ** 2 / power_law.square().sum()), rel=10 / at)


@pytest.mark.parametrize("tau", [5.0, 50.0])
def test_with_a_static_decay_the_sample_size_saturates_at_twice_the_timescale(tau):
    T, r = 2000, math.exp(-1 / tau)
    g = torch.full((1, T, 1), -1 / tau, dtype=torch.float64)
    n = observed(draw(1, T, 1, 1), None, g, torch.ones(1, T, dtype=torch.float64))[0].sources.size[0, :, 0]
    assert float(n[-1]) == pytest.approx((1 + r) / (1 - r), rel=1e-9)
    assert float(n[-1]) == pytest.approx(2 * tau, rel=0.01)
    assert largest(n[int(20 * tau) :], n[-1].expand(T - int(20 * tau))) < 1e-6 * tau
    assert (n[: int(tau)].diff() > 0.5).all()  # at first it grows with the context here too


# Gradients.


@pytest.mark.parametrize("size", [False, True])
@pytest.mark.parametrize("scale", [False, True])
def test_gradients_of_the_read_variance_are_finite_differences(size, scale):
    shape = 1, 3, 2, 4
    m, ratio = draw(*shape, seed=1), draw(*shape, seed=2).exp()  # below 1, s2 is 0, as after rounding
    x = [m, m**2 * ratio, draw(*shape[:3], seed=3).exp(), draw(*shape[:3], seed=4).exp()]
    x += [draw(*shape[:3], seed=5).exp()] * size + [draw(*shape, seed=6)] * scale

    def op(mean, square, a, b, *rest):
        return read_variance(mean, square, a, b, rest[0] if size else None, rest[-1] if scale else None)

    assert torch.autograd.gradcheck(op, [part.clone().requires_grad_() for part in x])


@pytest.mark.parametrize("tokens", [1, 2, 100])
@pytest.mark.parametrize("size", [False, True])
@pytest.mark.parametrize("scale", [False, True])
def test_the_read_variance_is_its_formula_however_many_tokens_at_a_time(size, scale, tokens, monkeypatch):
    """With autograd's gradients."""
    shape = 2, 5, 3, 4
    monkeypatch.setattr(pieces, "_CACHED", tokens * 3 * 4)
    m, ratio = draw(*shape, seed=1), draw(*shape, seed=2).exp()
    x = [m, m**2 * ratio, *(draw(*shape[:3], seed=n).exp() for n in (3, 4, 5)), draw(*shape, seed=6)]

    def formula(m, q, a, b, s, c):
        def mean(x):
            return x.mean(-1, keepdim=True)

        s2 = (q - m**2).clamp(min=0)
        y = a[..., None] * s2 + b[..., None] * mean(q)
        y = y * s[..., None] / (mean(m**2) + mean(y)) if size else y
        return y * c**2 if scale else y

    def op(m, q, a, b, s, c):
        return read_variance(m, q, a, b, s if size else None, c if scale else None)

    results = []
    for function in (formula, op):
        given = [part.clone().requires_grad_() for part in x]
        y = function(*given)
        (y * draw(*shape, seed=7)).sum().backward()
        results.append([y, *(torch.zeros_like(part) if part.grad is None else part.grad for part in given)])
    for want, found in zip(*results, strict=True):
        assert largest(want, found) < 1e-11


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
@pytest.mark.parametrize("T", [1, 4])
def test_gradients_of_the_whole_observation_are_finite_differences(T, options):
    """From values, write strengths, decays, precisions, heads, scale and weights to log w and R."""

    def observe(values, logit, log_rate, log_lambda, o, scale, W):
        lbar = log_lambda.exp().mean(-1)
        observer, log_w = observed(values, logit.sigmoid(), -log_rate.exp(), lbar, keep=False, **options)
        observer.read(o.square().mean(-1), scale)
        return log_w, observer.variance(W)

    def attend(q, k, v, log_lambda, W):
        observer, e = attended(q, k, v, log_lambda.exp().mean(-1), **options)
        return e, observer.variance(W)

    shapes = [(1, T, 2, 2), (1, T, 2), (1, T, 2), (1, T, 3), (1, T, 2, 2), (1, T, 2, 2), (3, 4)]
    x = [draw(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(observe, x)
    shapes = [(1, T, 2, 2), (1, T, 2, 2), (1, T, 2, 2), (1, T, 3), (3, 4)]
    x = [draw(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(attend, x)


@pytest.mark.parametrize("constant", [0.1, 1.0, 30.0])
def test_frozen_attention_is_the_plain_one(constant):
    """And a constant precision reads the same to rounding."""
    q, k, v, lbar = (part.float() for part in plain_inputs(9))
    plain = softmax_attention(q, k, v, None)
    assert torch.equal(attended(q, k, v, torch.ones_like(lbar), precision="frozen")[1], plain)
    assert largest(attended(q, k, v, torch.full_like(lbar, constant))[1], plain) < 1e-6


def test_an_observer_says_what_a_mixer_left_out():
    context = Context(Layout.fresh(2, torch.device("cpu")), False)
    observer = KalmanObserver(BftConfig(), torch.ones(1, 2), context, None, wants_dynamics=False)
    with pytest.raises(AssertionError, match="write before read"):
        observer.read(draw(1, 2, H), draw(1, 2, H, V))
    with pytest.raises(AssertionError, match="shows its heads"):
        observer.variance(draw(3, H * V))
