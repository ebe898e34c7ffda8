"""How uncertain what a head reads is, channel by channel, from the weighted moments of its sources.

    m, q      the sources' weighted mean and mean square          s2 = max(q - m^2, 0)
    variance  = a s2 + b mean_c(q)                                of m; a and b [B, T, H] say how (see addons.bft)
    y         = variance * scale^2                                where m itself is read, or
    y         = variance * size / (mean_c(m^2) + mean_c(variance)) * scale^2

where something is read that is the mean times a number not known, and `size` its mean square: then the relative
variance is carried over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decaybench.models.ops.precision import at_least_float32, keeps_precision, without_autocast

_TINY = 1e-30


@keeps_precision
def read_variance(
    means: Tensor, a: Tensor, b: Tensor, size: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """means: [B, T, H, 2 V], m and q; a, b: [B, T, H]; size: [B, T, H], None where m is read; scale: [B, T, H, V],
    None for 1. Returns y [B, T, H, V] in float32 (float64 stays).
    """
    means, a, b = (at_least_float32(part) for part in (means, a[..., None], b[..., None]))
    size = None if size is None else at_least_float32(size[..., None])
    scale = None if scale is None else at_least_float32(scale)
    y: Tensor = _ReadVariance.apply(means, a, b, size, scale)  # type: ignore[no-untyped-call]
    return y


class _ReadVariance(torch.autograd.Function):
    """With its gradient: autograd's own makes three times as many passes over [B, T, H, V]."""

    @staticmethod
    def forward(ctx: Any, means: Tensor, a: Tensor, b: Tensor, size: Tensor | None, scale: Tensor | None) -> Tensor:
        m, q = means.chunk(2, dim=-1)
        s2 = _spread(means)
        q_mean, s2_mean = q.mean(-1, keepdim=True), s2.mean(-1, keepdim=True)
        relative = None
        factor = torch.ones_like(a)
        if size is not None:
            relative = (_mean_square(m) + a * s2_mean + b * q_mean).clamp_(min=_TINY)
            factor = size / relative
        y = torch.mul(s2, factor * a).add_(factor * b * q_mean)
        if scale is not None:
            y.mul_(scale).mul_(scale)
        ctx.save_for_backward(means, a, b, scale, q_mean, s2_mean, relative, factor)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        means, a, b, scale, q_mean, s2_mean, relative, factor = ctx.saved_tensors
        s2 = _spread(means)
        V = s2.shape[-1]
        m = means[..., :V]
        with without_autocast(dy):
            dscale = dsize = None
            if scale is not None:
                dscale = torch.mul(s2, factor * a).add_(factor * b * q_mean).mul_(2)
                scaled = dy * scale
                dscale.mul_(scaled)
                dy = scaled.mul_(scale)
            along, plain = (dy * s2).sum(-1, keepdim=True), dy.sum(-1, keepdim=True)
            da, db = factor * along, factor * q_mean * plain
            dq_mean, ds2_mean, dm_square = factor * b * plain, torch.zeros_like(a), torch.zeros_like(a)
            if relative is not None:
                dfactor = a * along + b * q_mean * plain
                dsize = dfactor / relative
                dm_square = -dfactor * factor / relative * (relative > _TINY)
                da, db = da + dm_square * s2_mean, db + dm_square * q_mean
                ds2_mean, dq_mean = dm_square * a, dq_mean + dm_square * b
            ds2 = torch.mul(dy, factor * a).add_(ds2_mean / V).mul_(s2 > 0)
            dmeans = torch.empty_like(means)
            torch.add(ds2, dq_mean / V, out=dmeans[..., V:])
            torch.mul(m, ds2.sub_(dm_square / V).mul_(-2), out=dmeans[..., :V])
        return dmeans, da, db, dsize, dscale


def _spread(means: Tensor) -> Tensor:
    m, q = means.chunk(2, dim=-1)
    return torch.addcmul(q, m, m, value=-1).clamp_(min=0)


def _mean_square(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1])
