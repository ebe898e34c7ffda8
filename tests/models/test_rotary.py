"""The rotation against complex numbers, its gradient by finite differences."""

from __future__ import annotations

import pytest
import torch

from decaybench.models.ops.rotary import rotary
from tests.models.small import largest


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def by_complex_numbers(x, positions, base):
    half = x.shape[-1] // 2
    angles = positions.double()[..., None, None] * base ** (-torch.arange(half).double() / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], dim=-1)


@pytest.mark.parametrize(
    "positions", [torch.tensor([[1, 2, 0, 1, 99]]), torch.tensor([[3, 4, 5, 6, 7], [1, 2, 3, 0, 0]])]
)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_pairs_are_complex_numbers(positions, scale):
    x = draw(2, 5, 3, 8)
    assert largest(rotary(x, positions, 10_000.0, scale), scale * by_complex_numbers(x, positions, 10_000.0)) < 1e-14
    assert torch.autograd.gradcheck(lambda x: rotary(x, positions, 100.0, scale), [x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_far_positions_keep_their_digits_in_float32(dtype):
    x = draw(1, 4, 2, 16).to(dtype)
    positions = torch.arange(1_000_000, 1_000_004)[None]
    got = rotary(x, positions, 10_000.0)
    assert got.dtype == torch.float32
    assert largest(got.double(), by_complex_numbers(x.double(), positions, 10_000.0)) < 1e-6
