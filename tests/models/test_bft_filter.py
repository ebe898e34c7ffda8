"""The residual as a filter's step, against exact Kalman filters: update, prediction, their bounds and gradients."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from decaybench.core.positions import Layout
from decaybench.models.addons.bft import BftConfig, KalmanObserver, KalmanResidual
from decaybench.models.branch import Context, Place
from decaybench.models.module import LayerNorm, RMSNorm, initialise
from decaybench.models.ops.kalman_update import kalman_predict, kalman_update, mean_precision
from decaybench.models.residual import Stream
from tests.models.small import largest

LEAST, MOST = math.exp(-6), math.exp(6)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one(value):
    return torch.full((1, 1, 1), value, dtype=torch.float64)


def residual(layer=0, n_layers=2, d_model=1, q=None, **options):
    """Q = softplus(q) is set to the q given."""
    made = KalmanResidual(BftConfig(**options), Place(d_model, layer, n_layers, 1.0, None, "torch"))
    initialise(made, 0)
    made = made.double()
    if q is not None:
        made.q.data.copy_(torch.as_tensor(q, dtype=torch.float64).expm1().log())
    return made


def observer(made, P, jacobian=None):
    """One that was told J."""
    context = Context(Layout.fresh(P.shape[1], torch.device("cpu")), keep_state=False)
    found = made.observer(Stream(P, P), P, context, None)
    if jacobian is not None:
        found.dynamics(jacobian)
    return found


def test_a_constant_seen_through_noise_is_the_exact_filters():
    """Fifty observations of one scalar, gain and variance after each, by rational numbers."""
    R, P = Fraction(17, 4), Fraction(1)
    h, P_ours = one(0.0), one(1.0)
    estimate = Fraction(0)
    seen = [Fraction(int(1000 * x), 1000) for x in draw(50, seed=1).tolist()]
    for z in seen:
        K = P / (P + R)
        estimate, P = estimate + K * (z - estimate), (1 - K) * P
        h, P_ours, K_ours = kalman_update(h, P_ours, float(z) - h, one(float(R)))
        assert float(K_ours) == pytest.approx(float(K), rel=1e-13)
        assert float(P_ours) == pytest.approx(float(P), rel=1e-13)
        assert float(h) == pytest.approx(float(estimate), abs=1e-14)
    # Which is the mean of the observations and the prior, each by its precision.
    assert float(h) == pytest.approx(float(sum(seen) / R / (1 + Fraction(50) / R)), abs=1e-14)
    assert 1 / float(P_ours) == pytest.approx(1 + 50 / float(R), rel=1e-12)


def test_a_moving_state_seen_through_noise_is_the_exact_filters():
    """x <- (1 + J) x + noise of variance Q, seen with variance R, three channels at once, through `predict`; the FFN's
    part of the move is J x, the norm's slope 1."""
    J, Q = [-0.3, 0.05, 0.6], [0.02, 0.5, 1.3]
    R = [0.4, 2.0, 0.7]
    made = residual(d_model=3, q=Q)
    jacobian, noise = torch.tensor(J, dtype=torch.float64)[None, None], torch.tensor(R, dtype=torch.float64)[None, None]
    stream = Stream(torch.zeros(1, 1, 3, dtype=torch.float64), torch.ones(1, 1, 3, dtype=torch.float64))
    exact = [(0.0, 1.0)] * 3
    for z in draw(40, 3, seed=2):
        watching = observer(made, stream.variance, jacobian)
        h, P, _ = kalman_update(stream.hidden, stream.variance, z - stream.hidden, noise)
        stream = made.predict(Stream(h, P), jacobian * h, watching, Slope(1.0))
        for c, (x, p) in enumerate(exact):
            K = p / (p + R[c])
            x, p = x + K * (float(z[c]) - x), (1 - K) * p
            exact[c] = ((1 + J[c]) * x, (1 + J[c]) ** 2 * p + Q[c])
    for c, (x, p) in enumerate(exact):
        assert float(stream.hidden[..., c].detach()) == pytest.approx(x, rel=1e-12)
        assert float(stream.variance[..., c].detach()) == pytest.approx(p, rel=1e-12)
    assert max(p for _, p in exact) < MOST


class Slope:
    """A norm with this slope everywhere."""

    def __init__(self, value):
        self.value = value

    def slope(self, x):
        return torch.full_like(x, self.value)


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_the_prediction_takes_j_through_the_norms_slope_at_the_new_state(norm):
    made, before = residual(d_model=4, q=0.1), norm(4, 1e-3)
    initialise(before, 0)
    before = before.double()
    before.weight.data = draw(4, seed=5)
    h, P, J, y = draw(2, 3, 4, seed=6), draw(2, 3, 4, seed=7).exp(), draw(2, 3, 4, seed=8), draw(2, 3, 4, seed=9)
    after = made.predict(Stream(h, P), y, observer(made, P, J), before)
    assert largest(after.hidden, h + y) == 0
    assert largest(after.variance, (1 + J * before.slope(h)) ** 2 * P + 0.1) < 1e-12


def test_without_an_ffn_only_noise_is_added():
    made, P = residual(d_model=4, q=0.25), draw(1, 2, 4).exp()
    after = made.predict(Stream(P, P), None, observer(made, P), None)
    assert torch.equal(after.hidden, P)
    assert largest(after.variance, P + 0.25) < 1e-12


@pytest.mark.parametrize(("options", "Q"), [({}, 0.01), ({"initial_noise": 0.3}, 0.3), ({"initial_noise": 50}, 50.0)])
def test_the_initial_noise(options, Q):
    q = residual(d_model=4, **options).q
    assert largest(torch.nn.functional.softplus(q), torch.full((4,), Q)) < 1e-6 * Q


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, lambda P, J, Q: (1 + J) ** 2 * P + Q),
        ({"jacobian": "detached"}, lambda P, J, Q: (1 + J) ** 2 * P + Q),
        ({"jacobian": "none"}, lambda P, J, Q: P + Q),
        ({"process_noise": False}, lambda P, J, Q: (1 + J) ** 2 * P),
        ({"process_noise": False, "jacobian": "none"}, lambda P, J, Q: P),
    ],
    ids=str,
)
def test_each_part_of_the_prediction_is_a_switch(options, want):
    noisy = options.get("process_noise", True)
    made = residual(d_model=4, q=0.25 if noisy else None, **options)
    P, J = draw(1, 2, 4).exp(), draw(1, 2, 4, seed=1)
    watching = observer(made, P)
    assert watching.wants_dynamics is (options.get("jacobian") != "none")
    if watching.wants_dynamics:
        watching.dynamics(J)
    after = made.predict(Stream(P, P), J, watching, Slope(1.0))
    assert largest(after.variance, want(P, J, 0.25)) < 1e-12
    assert (made.q is None) is not noisy


@pytest.mark.parametrize(("mode", "flows"), [(None, True), ("detached", False)])
def test_a_detached_jacobian_has_no_gradient(mode, flows):
    made, before = residual(d_model=4, jacobian=mode), RMSNorm(4, 1e-3)
    initialise(before, 0)
    P, J, h = (draw(1, 2, 4, seed=n).requires_grad_() for n in range(3))
    after = made.predict(Stream(h, P.exp()), None, observer(made, P.exp(), J), before.double())
    after.variance.sum().backward()
    assert P.grad.abs().min() > 0
    for part in (J, h, before.weight):
        assert (part.grad is not None and bool(part.grad.any())) is flows


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_last_layer_predicts_nothing(layer):
    """Nobody reads what it would predict: no noise that never learns."""
    made, P = residual(layer, 3, d_model=4), draw(1, 2, 4).exp()
    last = layer == 2
    assert (made.q is None) is last
    watching = observer(made, P)
    assert watching.wants_dynamics is not last
    if last:
        after = made.predict(Stream(P, P), P, watching, Slope(1.0))
        assert torch.equal(after.hidden, 2 * P)
        assert torch.equal(after.variance, P)


# Bounds.


def test_the_gain_is_one_where_nothing_is_uncertain():
    """W_O = 0, or all values 0: R = 0."""
    h, e = draw(2, 3, 4, seed=1), draw(2, 3, 4, seed=2)
    zero, ones = torch.zeros_like(h), torch.ones_like(h)
    for dtype in (torch.float32, torch.float64):
        new, after, K = kalman_update(*(x.to(dtype) for x in (h, ones, e, zero)))
        assert torch.equal(K, ones.to(dtype))
        assert torch.equal(new, h.to(dtype) + e.to(dtype))
        assert torch.equal(after, torch.full_like(after, LEAST))
        for P in (LEAST, 0.3, 2.7, MOST):
            K = kalman_update(h.to(dtype), torch.full_like(h, P).to(dtype), e.to(dtype), zero.to(dtype))[2]
            assert largest(K, ones.to(dtype)) <= torch.finfo(dtype).eps


@pytest.mark.parametrize("R", [0.0, 1e-38, 1e-20, 1.0, 1e20, 1e38])
@pytest.mark.parametrize("P", [LEAST, 1.0, MOST])
def test_any_noise_leaves_a_gain_and_a_bounded_variance(P, R):
    x = [torch.full((1, 1, 1), value).requires_grad_() for value in (1.0, P, 2.0, R)]
    h, after, K = kalman_update(*x)
    assert LEAST * (1 - 1e-6) <= float(after.detach()) <= MOST * (1 + 1e-6)
    assert 0 <= float(K) <= 1
    (h + after).sum().backward()
    assert all(part.grad.isfinite().all() for part in x)


def test_no_prediction_leaves_the_bounds():
    P = torch.tensor([LEAST, 1.0, MOST], dtype=torch.float64).expand(1, 1, 3)
    for J in (-1.0, 0.0, 1e3, 1e18):
        made = residual(d_model=3, q=1e-3)
        after = made.predict(Stream(P, P), P, observer(made, P, J * torch.ones_like(P)), Slope(1.0)).variance
        assert float(after.detach().min()) >= LEAST * (1 - 1e-12)
        assert float(after.detach().max()) <= MOST * (1 + 1e-12)


# Gradients.


def leaves(shape=(2, 3, 2)):
    h, e = draw(*shape, seed=1), draw(*shape, seed=2)
    P, R = draw(*shape, seed=3).exp(), draw(*shape, seed=4).exp()
    return [part.requires_grad_() for part in (h, P, e, R)]


def test_gradients_of_the_update_are_finite_differences():
    assert torch.autograd.gradcheck(lambda *x: kalman_update(*x)[:2], leaves())


def test_gradients_of_the_update_are_autograds_also_where_the_variance_is_cut():
    x = leaves((200, 2, 2))
    with torch.no_grad():
        x[1].pow_(6).clamp_(LEAST, MOST)
        x[3].pow_(6)
    weigh = draw(200, 2, 2, seed=5), draw(200, 2, 2, seed=6)

    def plain(h, P, e, R):
        K = 1 / (1 + R / P)
        return h + K * e, (1 / (1 / P + 1 / R)).clamp(LEAST, MOST)

    gradients = []
    for update in (lambda *x: kalman_update(*x)[:2], plain):
        outputs = update(*x)
        gradients.append(torch.autograd.grad(sum((w * y).sum() for w, y in zip(weigh, outputs, strict=True)), x))
    cut = (outputs[1] == LEAST) | (outputs[1] == MOST)
    assert 10 < int(cut.sum()) < 790
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def agree(found, wanted, given, seed=5):
    """Two functions with their gradients, of a random mixture of all that comes out."""
    results = []
    for function in (found, wanted):
        x = [part.detach().clone().requires_grad_() for part in given]
        outputs = function(*x)
        mixture = sum((draw(*y.shape, seed=seed + n) * y).sum() for n, y in enumerate(outputs))
        results.append([*outputs, *torch.autograd.grad(mixture, x)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    return results[0]


def test_an_observation_in_the_units_of_what_is_observed():
    """Some of it nothing at all, and some variances cut."""
    given = leaves((50, 3, 4))
    with torch.no_grad():
        given[1].pow_(6).clamp_(2 * LEAST, MOST / 2)
        given[3].pow_(6)
        given[2][:, 0] *= 1e-6
        given[1][:2], given[2][:2], given[3][0], given[3][1] = 2.0, 0.0, 1e-3, 1e3

    def plain(h, P, e, R):
        R = (R / e.square().mean(-1, keepdim=True).clamp(min=1e-30)).clamp(max=1e30)
        return h + e / (1 + R / P), (1 / (1 / P + 1 / R)).clamp(LEAST, MOST)

    found = agree(lambda *x: kalman_update(*x, relative=True)[:2], plain, given)
    assert 10 < int(((found[1] == LEAST) | (found[1] == MOST)).sum()) < 590


@pytest.mark.parametrize("relative", [False, True])
def test_an_update_whose_variance_nobody_reads(relative):
    """The last layer's: the gradient of what it doesn't hand on is none, which is 0."""
    h, P, e, R = leaves()
    ours = torch.autograd.grad(kalman_update(h, P, e, R, relative=relative)[0].sum(), (h, P, e, R))
    new, after, _ = kalman_update(h, P, e, R, relative=relative)
    for one, other in zip(ours, torch.autograd.grad(new.sum() + 0 * after.sum(), (h, P, e, R)), strict=True):
        assert largest(one, other) < 1e-14


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
def test_the_prediction_is_its_formula(moves, noisy):
    """With autograd's gradients, also where it is cut."""
    given = [draw(100, 3, 4, seed=1).mul(3).exp()] + [draw(100, 3, 4, seed=2)] * moves + [draw(4, seed=3).exp()] * noisy

    def split(P, *rest):
        return P, rest[0] if moves else None, rest[-1] if noisy else None

    def plain(*x):
        P, J, Q = split(*x)
        after = P if J is None else (1 + J) ** 2 * P
        return [(after if Q is None else after + Q).clamp(LEAST, MOST)]

    found = agree(lambda *x: [kalman_predict(*split(*x))], plain, given)
    assert (found[0] == MOST).any()


@pytest.mark.parametrize("alike", [False, True])
def test_the_mean_precision_is_its_formula(alike):
    """Also of variances that are one number a token, never written out."""
    P = draw(2, 3, 1 if alike else 4, seed=1).exp()
    agree(lambda P: [mean_precision(P.expand(2, 3, 4))], lambda P: [(1 / P.expand(2, 3, 4)).mean(-1)], [P])


def test_a_step_keeps_what_it_is_given_and_no_more():
    """For its gradient: P, e and R, and P again for what is observed and predicted with."""
    h, P, e, R = leaves((2, 300, 4))
    kept = {}

    def keep(part):
        kept[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        return part

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda part: part):
        mean_precision(P)
        _, after, _ = kalman_update(h, P, e, R, relative=True)
        kalman_predict(after, None, None)
    assert sum(kept.values()) == 4 * h.nbytes  # P, e, R and P' itself


def test_gradients_of_a_whole_step_are_finite_differences():
    made = residual(d_model=2, q=0.3)
    before = RMSNorm(2, 1e-2)
    initialise(before, 0)
    before = before.double()

    def step(h, P, e, R, J, q):
        watching = observer(made, P, J)
        h, P, _ = kalman_update(h, P, e, R)
        after = torch.func.functional_call(Step(made, before), {"made.q": q}, (Stream(h, P), 0.5 * h, watching))
        return after.hidden, after.variance

    extra = [draw(2, 3, 2, seed=7).requires_grad_(), draw(2, seed=8).requires_grad_()]
    assert torch.autograd.gradcheck(step, [*leaves(), *extra])


class Step(torch.nn.Module):
    def __init__(self, made, norm):
        super().__init__()
        self.made, self.norm = made, norm

    def forward(self, stream, y, watching):
        return self.made.predict(stream, y, watching, self.norm)


# The observer that a residual makes.


def test_the_observer_sees_the_mean_precision_of_each_token():
    P = draw(2, 3, 4).exp()
    assert largest(observer(residual(d_model=4), P).lbar, (1 / P).mean(-1)) < 1e-15
    off = observer(residual(d_model=4, reliability=False), P)
    assert torch.equal(off.lbar, torch.ones(2, 3, dtype=torch.float64))
    assert isinstance(off, KalmanObserver)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_low_precision_stream_keeps_a_float32_variance(dtype):
    h, e = (draw(2, 3, 4, seed=n).to(dtype).requires_grad_() for n in (1, 2))
    P, R = (draw(2, 3, 4, seed=n).float().exp().requires_grad_() for n in (3, 4))
    new, after, K = kalman_update(h, P, e, R)
    assert new.dtype == dtype
    assert after.dtype == K.dtype == torch.float32
    exact = P.double() / (P.double() + R.double())
    assert largest(new.double(), h.double() + exact * e.double()) < 0.02
    assert largest(after.double(), exact * R.double()) < 1e-6
    (new.float().sum() + after.sum()).backward()
    assert [x.grad.dtype for x in (h, P, e, R)] == [dtype, torch.float32, dtype, torch.float32]
    wanted = torch.autograd.grad((exact * e.detach().double()).sum() + (exact * R.double()).sum(), (P, R))
    assert all(torch.allclose(x.grad, want, rtol=0.02, atol=0.02) for x, want in zip((P, R), wanted, strict=True))
