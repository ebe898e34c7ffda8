"""Root mean square normalisation against torch's own, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from decaybench.models.ops.rms_norm import rms_norm
from tests.models.small import largest


def inputs(*shape: int, dtype=torch.float64):
    draws = torch.Generator().manual_seed(0)
    made = [torch.randn(size, generator=draws, dtype=torch.float64).to(dtype) for size in (shape, shape[-1:])]
    return [x.requires_grad_() for x in made]


def by_torch(x, weight, eps, groups):
    parts = x.reshape(*x.shape[:-1], groups, -1)
    return F.rms_norm(parts, parts.shape[-1:], eps=eps).reshape(x.shape) * weight


@pytest.mark.parametrize("shape", [(12,), (5, 12), (2, 3, 12), (2, 3, 4, 12)])
@pytest.mark.parametrize("groups", [1, 3, 12])
def test_values_and_gradients_are_torchs(shape, groups):
    x, weight = inputs(*shape)
    got, want = rms_norm(x, weight, 1e-3, groups), by_torch(x, weight, 1e-3, groups)
    assert largest(got, want) < 1e-14
    ramp = torch.linspace(-1, 2, got.numel(), dtype=got.dtype).view(got.shape)
    for a, b in zip(
        torch.autograd.grad((got * ramp).sum(), (x, weight)),
        torch.autograd.grad((want * ramp).sum(), (x, weight)),
        strict=True,
    ):
        assert largest(a, b) < 1e-13


def test_eps_keeps_zeros_finite():
    x, weight = torch.zeros(2, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    y = rms_norm(x, weight, 1e-5)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert not y.any()
    assert torch.allclose(gradient, torch.full_like(x, 1e-5**-0.5))


def test_inputs_that_are_not_contiguous():
    x, weight = inputs(6, 4, 8)
    turned = x.transpose(0, 1)
    (got,) = torch.autograd.grad(rms_norm(turned, weight, 1e-5).square().mean(), x)
    (want,) = torch.autograd.grad(by_torch(turned, weight, 1e-5, 1).square().mean(), x)
    assert largest(got, want) < 1e-14


def test_float32_inside_whatever_the_activations():
    x, weight = inputs(64, 256, dtype=torch.bfloat16)
    wide = weight.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = rms_norm(x, wide, 1e-5)
    assert y.dtype == torch.bfloat16
    want = by_torch(x.detach().double(), wide.detach().double(), 1e-5, 1)
    assert largest(y.double(), want) <= 2**-8 * float(want.abs().max())  # the rounding of its own output, no more
    gradients = torch.autograd.grad(y.float().square().sum(), (x, wide))
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32]
