"""Root mean square normalisation, whole or in groups of channels.

    r = 1 / sqrt(mean(x^2) + eps)      n = x r      y = n w
    dx = r (w dy - n mean(n w dy))     dw = sum n dy          the means over a group's channels

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decaybench.models.ops.precision import at_least_float32, keeps_precision, without_autocast


@keeps_precision
def rms_norm(x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    """x: [..., C]; weight: [C]; eps: added to the mean square; groups: parts of C that are normed each by itself.

    Computed in float32 (float64 stays), returned in x's dtype. Raises RuntimeError unless groups divides C.
    """
    wide = at_least_float32(x).reshape(-1, groups, x.shape[-1] // groups)
    y: Tensor = _RmsNorm.apply(wide, weight.view(groups, -1), eps)  # type: ignore[no-untyped-call]
    return y.view(x.shape).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    """x: [M, G, C/G]; weight: [G, C/G]. With its gradient, for autograd's own passes over x three times as often."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        n = x * r
        with without_autocast(dy):
            products = n * dy
            dweight = products.sum(0)
            shared = torch.einsum("mgc,gc->mg", products, weight)[..., None] / x.shape[-1]
        dx = torch.mul(dy, weight, out=products)
        return dx.sub_(n.mul_(shared)).mul_(r), dweight, None
