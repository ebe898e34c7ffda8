"""Comparing a module of ours with one that isn't: random parameters, gradients, and a bound relative to the largest."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def randomise(module: nn.Module, seed: int, spread: float = 0.3) -> nn.Module:
    """Every parameter off its initial value, so that nothing agrees because it is 0 or 1; returns the module.

    Matrices become N(0, 1/inputs), which keeps activations of order one; the rest get N(0, spread^2) added.
    """
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=draws).to(parameter)
            matrix = parameter.squeeze().ndim > 1
            parameter.copy_(noise / parameter.shape[-1] ** 0.5 if matrix else parameter + spread * noise)
    return module


def gradients(loss: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of loss by name. Raises RuntimeError for a tensor that the loss doesn't depend on."""
    found = torch.autograd.grad(loss, list(tensors.values()), retain_graph=True)
    return dict(zip(tensors, found, strict=True))


def assert_close(got: Tensor, want: Tensor, bound: float, what: str = "", *, floor: float = 0.0) -> None:
    """|got - want| <= bound * max |want| everywhere, with the same shape; and want isn't all zero.

    floor: the least that max |want| counts as, for gradients that are small differences of large terms.
    """
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} is not {tuple(want.shape)}"
    got, want = got.detach().double(), want.detach().double()
    scale = float(want.abs().max())
    assert scale > 0, f"{what}: the oracle is all zero, which compares nothing"
    error = float((got - want).abs().max()) / max(scale, floor)
    assert error <= bound, f"{what}: off by {error:.2e} of the largest value, more than {bound:.0e}"
