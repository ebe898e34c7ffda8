"""Rotary positions: each pair of channels turned by an angle in proportion to the position (arXiv 2104.09864).

(a, b) -> (a cos - b sin, a sin + b cos),   angle = position base^(-2i/K),   channel i paired with i + K/2
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decaybench.models.ops.precision import at_least_float32


def rotary(x: Tensor, positions: Tensor, base: float, scale: float = 1.0) -> Tensor:
    """x [B, T, H, K], K even, turned by positions [B or 1, T] and multiplied by `scale`; at least float32.

    Angles are float64: at position 1,000,000 float32 would be off by a thirtieth of a radian.
    """
    half = x.shape[-1] // 2
    frequencies = base ** -(torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = positions[..., None, None] * frequencies
    x = at_least_float32(x)
    cos, sin = (scale * angles.cos()).to(x.dtype), (scale * angles.sin()).to(x.dtype)
    # Written out for every head: broadcasting over them makes the inner loops short, and three times slower.
    cos, sin = (
        torch.cat(pair, dim=-1).expand(-1, -1, x.shape[2], -1).contiguous() for pair in ((cos, cos), (-sin, sin))
    )
    return _Turn.apply(x, cos, sin)  # type: ignore[no-any-return, no-untyped-call]


class _Turn(torch.autograd.Function):
    """x cos + (x with its halves exchanged) sin; the gradient is the rotation back.

    x: [B, T, H, K]; cos, sin: [B or 1, T, H, K], sin negative in the first half.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return (dy * cos).addcmul_(dy.roll(dy.shape[-1] // 2, -1), sin, value=-1), None, None
