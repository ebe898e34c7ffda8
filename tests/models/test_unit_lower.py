"""Inverses of unit lower triangular matrices against torch.linalg and autograd through it."""

from __future__ import annotations

import pytest
import torch

from decaybench.models.ops.unit_lower import inverse_unit_lower
from tests.models.small import largest


def strictly_lower(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draws, dtype=torch.float64).tril(-1).to(dtype)


def inverse(A: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(torch.eye(A.shape[-1], dtype=torch.float64) + A.double())


@pytest.mark.parametrize("L", [1, 2, 3, 7, 8, 9, 15, 16, 20, 33, 64])
@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3)])
def test_it_is_the_inverse(L, batch):
    A = strictly_lower(*batch, L, L) / 4
    T = inverse_unit_lower(A)
    want = inverse(A)
    assert largest(T, want) < 1e-11 * float(want.abs().max())
    assert torch.equal(T, T.tril())
    assert torch.equal(T.diagonal(dim1=-2, dim2=-1), torch.ones(*batch, L, dtype=T.dtype))


@pytest.mark.parametrize("L", [1, 5, 8, 13, 32])
def test_its_gradient_is_that_of_the_inverse(L):
    A = (strictly_lower(3, L, L) / 4).requires_grad_()
    weights = strictly_lower(3, L, L, seed=1) + strictly_lower(3, L, L, seed=2).mT
    (got,) = torch.autograd.grad((inverse_unit_lower(A) * weights).sum(), A)
    (want,) = torch.autograd.grad((inverse(A) * weights).sum(), A)
    assert largest(got, want.tril(-1)) < 1e-11 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("strength", [1.0, 2.0])
def test_repeated_keys_keep_every_digit_in_float32(strength):
    """All entries alike, as where one key is written again and again: powers of A reach 1e17 and more at L = 64."""
    A = torch.full((2, 64, 64), strength).tril(-1)
    assert torch.equal(inverse_unit_lower(A).double(), inverse(A).round())
    noisy = A * (1 + 1e-3 * strictly_lower(2, 64, 64, dtype=torch.float32))
    identity = torch.eye(64).expand(A.shape)
    substituted = torch.linalg.solve_triangular(noisy, identity, upper=False, unitriangular=True)
    want = inverse(noisy)
    assert largest(inverse_unit_lower(noisy).double(), want) <= largest(substituted.double(), want) < 1e-3


def test_neither_strides_nor_the_input_matter():
    A = strictly_lower(2, 24, 3, 24).transpose(1, 2).tril(-1)
    strided = A.contiguous().transpose(0, 1).contiguous().transpose(0, 1)
    before = strided.clone()
    assert torch.equal(inverse_unit_lower(strided), inverse_unit_lower(A.contiguous()))
    assert torch.equal(strided, before)


def test_autocast_does_not_reach_inside():
    A = (strictly_lower(4, 20, 20, dtype=torch.float32) / 4).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        T = inverse_unit_lower(A)
        (gradient,) = torch.autograd.grad(T.sum(), A)
    assert T.dtype == gradient.dtype == torch.float32
    assert torch.equal(T, inverse_unit_lower(A))
    assert torch.equal(gradient, torch.autograd.grad(inverse_unit_lower(A).sum(), A)[0])
