"""The diagonals of the FFNs' Jacobians, alone and through the norms before them, against autograd's full Jacobian."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.autograd.functional import jacobian as full_jacobian

from decaybench.core.config import parse
from decaybench.core.positions import Layout
from decaybench.models.branch import Context, Observer, Place
from decaybench.models.ffn import FfnConfig, channel_mix_jacobian, make_ffn, mlp_jacobian, swiglu_jacobian
from decaybench.models.module import LayerNorm, RMSNorm, initialise
from tests.models.small import largest

D = 6
KINDS = ["mlp", "swiglu", "channel_mix"]
NORMS = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Dynamics(Observer):
    """Keeps the J that it is told."""

    wants_dynamics = True
    J = None

    def dynamics(self, jacobian):
        self.J = jacobian


def moved(module):
    """float64, with every parameter away from its initial value."""
    initialise(module, 0)
    module = module.double()
    for n, parameter in enumerate(module.parameters()):
        parameter.data = 0.5 * draw(*parameter.shape, seed=n) + 0.1
    return module


def branch(kind):
    return moved(make_ffn(parse(FfnConfig, {"kind": kind, "multiple": 2}), Place(D, 0, 2, 1.0, None, "torch")))


def run(ffn, x, positions, state=None):
    """y, the state after it and J."""
    observer = Dynamics()
    y, state = ffn(x, Context(Layout.of(positions, has_state=state is not None), keep_state=True), state, observer)
    return y, state, observer.J


def diagonal(f, x):
    """d f_ti / d x_ti, from all of d f / d x. x: [1, T, D]."""
    J = full_jacobian(f, x)[0, :, :, 0]  # [T, D, T, D]
    return torch.einsum("titi->ti", J)[None]


@pytest.mark.parametrize("kind", KINDS)
def test_the_diagonal_is_autograds(kind):
    """Over documents side by side: the token shift's own share, 1 - x_k, is the same at a document's start."""
    ffn, x, positions = branch(kind), draw(1, 7, D), torch.tensor([[1, 2, 3, 1, 2, 3, 4]])
    J = run(ffn, x, positions)[2]
    assert J.shape == x.shape
    assert largest(J, diagonal(lambda x: run(ffn, x, positions)[0], x)) < 1e-12
    assert float(J.detach().abs().min()) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_same_from_a_state_one_token_at_a_time(kind):
    ffn, x, positions = branch(kind), draw(1, 5, D), torch.arange(1, 6)[None]
    whole, state = run(ffn, x, positions)[2], None
    for t in range(5):
        _, state, J = run(ffn, x[:, t : t + 1], positions[:, t : t + 1], state)
        assert largest(J, whole[:, t : t + 1]) < 1e-14


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_through_the_norm_with_its_scale_held_constant(kind, norm):
    """Autograd sees h / r - and h minus its mean - with r and the mean of a copy of h."""
    ffn, before, h, positions = (
        branch(kind),
        moved(NORMS[norm](D, 1e-2)),
        draw(1, 4, D, seed=3),
        torch.tensor([range(4)]),
    )
    positions = positions + 1
    kept = h.clone()
    mean = kept.mean(-1, keepdim=True) if norm == "layernorm" else 0.0
    r = ((kept - mean) ** 2).mean(-1, keepdim=True).add(1e-2).sqrt()
    bias = before.bias if norm == "layernorm" else 0.0

    def held(h):
        return (h - mean) / r * before.weight + bias

    assert largest(held(h), before(h)) < 1e-12
    J = run(ffn, before(h), positions)[2] * before.slope(h)
    assert largest(J, diagonal(lambda h: run(ffn, held(h), positions)[0], h)) < 1e-12
    assert largest(J, diagonal(lambda h: run(ffn, before(h), positions)[0], h)) > 1e-3  # what is left out


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_slope_of_a_norm_within_groups(norm, groups):
    found, x = moved(NORMS[norm](D, 1e-2, groups)), draw(2, 3, D, seed=4)
    for part, weight, slope in zip(
        x.chunk(groups, -1), found.weight.chunk(groups), found.slope(x).chunk(groups, -1), strict=True
    ):
        centred = part - part.mean(-1, keepdim=True) if norm == "layernorm" else part
        assert largest(slope, weight / (centred.square().mean(-1, keepdim=True) + 1e-2).sqrt()) < 1e-12


@pytest.mark.parametrize(
    ("function", "width"), [(mlp_jacobian, 1), (swiglu_jacobian, 2), (channel_mix_jacobian, 1)], ids=KINDS
)
def test_its_gradients_are_finite_differences(function, width):
    """By the hidden layer and by both weights."""
    M = 5
    hidden, W_in, W_out = draw(1, 2, width * M), draw(width * M, 3, seed=1), draw(3, M, seed=2)
    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in (hidden, W_in, W_out)])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_float32_in_a_bfloat16_model(kind, autocast):
    """Cast to bfloat16, or float32 under autocast; as near to the exact one as the hidden layer's rounding lets it."""
    exact, positions, x = branch(kind), torch.arange(1, 5)[None], draw(1, 4, D)
    low = copy.deepcopy(exact).to(torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        J = run(low, x.to(low.in_proj.weight.dtype), positions)[2]
    J = J.detach()
    assert J.dtype == torch.float32
    want = run(exact, x, positions)[2].detach()
    assert largest(J, want) < 0.02 * float(want.abs().max())


def test_nobody_asks_and_nothing_is_computed():
    class Silent(Dynamics):
        wants_dynamics = False

    for kind in KINDS:
        observer = Silent()
        y, _ = branch(kind)(draw(1, 3, D), Context(Layout.fresh(3, torch.device("cpu")), False), None, observer)
        assert observer.J is None
        assert largest(y, run(branch(kind), draw(1, 3, D), torch.arange(1, 4)[None])[0]) == 0
