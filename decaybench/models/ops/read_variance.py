"""How uncertain what a head reads is, channel by channel, from the weighted moments of its sources.

    m, q      the sources' weighted mean and mean square          s2 = max(q - m^2, 0)
    variance  = a s2 + b mean_c(q)                                of m; a and b [B, T, H] say how (see addons.bft)
    y         = variance * scale^2                                where m itself is read, or
    y         = variance * size / (mean_c(m^2) + mean_c(variance)) * scale^2

where something is read that is the mean times a number not known, and `size` its mean square: then the relative
variance is carried over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from decaybench.models.ops.pieces import pieces
from decaybench.models.ops.precision import at_least_float32, keeps_precision

_TINY = 1e-30


@keeps_precision
def read_variance(
    mean: Tensor, square: Tensor, a: Tensor, b: Tensor, size: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """mean, square: [B, T, H, V], m and q; a, b: [B, T, H]; size: [B, T, H], None where m is read; scale: [B, T, H, V],
    None for 1. Returns y [B, T, H, V] in float32 (float64 stays).
    """
    wide = [None if part is None else at_least_float32(part).flatten(0, 1) for part in (mean, square, scale)]
    small = [None if part is None else at_least_float32(part).flatten(0, 1)[..., None] for part in (a, b, size)]
    y: Tensor = _ReadVariance.apply(*wide, *small)  # type: ignore[no-untyped-call]
    return y.view(mean.shape)


class _ReadVariance(torch.autograd.Function):
    """With its gradient, some tokens at a time: autograd's own makes three times as many passes over all of them.

    m, q, scale: [N, H, V]; a, b, size: [N, H, 1].
    """

    @staticmethod
    def forward(
        ctx: Any, m: Tensor, q: Tensor, scale: Tensor | None, a: Tensor, b: Tensor, size: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(m, q, scale, a, b, size)
        y = torch.empty_like(m)
        for at in _tokens(m):
            s2, of_s2, of_q = _spread(m[at], q[at], y[at]), a[at], b[at] * _mean(q[at])
            if size is not None:
                factor = size[at] / _relative(m[at], of_s2 * _mean(s2) + of_q)
                of_s2, of_q = factor * of_s2, factor * of_q
            s2.mul_(of_s2).add_(of_q)
            if scale is not None:
                s2.mul_(scale[at]).mul_(scale[at])
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        gradients = [None if part is None else torch.empty_like(part) for part in saved]
        for at in _tokens(dy):
            here: list[Any] = [None if part is None else part[at] for part in (*saved, dy, *gradients)]
            _gradients(*here)
        return tuple(gradients)


def _gradients(
    m: Tensor,
    q: Tensor,
    scale: Tensor | None,
    a: Tensor,
    b: Tensor,
    size: Tensor | None,
    dy: Tensor,
    dm: Tensor,
    dq: Tensor,
    dscale: Tensor | None,
    da: Tensor,
    db: Tensor,
    dsize: Tensor | None,
) -> None:
    """Into the last six."""
    V = m.shape[-1]
    s2, q_mean = _spread(m, q, torch.empty_like(m)), _mean(q)
    s2_mean, of_q = _mean(s2), b * q_mean
    relative = None if size is None else _relative(m, a * s2_mean + of_q)
    factor = torch.ones_like(a) if size is None or relative is None else size / relative
    if scale is not None and dscale is not None:
        scaled = dy * scale
        torch.mul(s2, 2 * factor * a, out=dscale).add_(2 * factor * of_q).mul_(scaled)
        dy = scaled.mul_(scale)

    along, plain = torch.mul(dy, s2, out=dq).sum(-1, keepdim=True), dy.sum(-1, keepdim=True)
    drelative = torch.zeros_like(a)
    if relative is not None and dsize is not None:
        torch.div(a * along + of_q * plain, relative, out=dsize)
        drelative = -factor * dsize * (relative > _TINY)
    of_plain = torch.addcmul(drelative, factor, plain)
    torch.addcmul(drelative * s2_mean, factor, along, out=da)
    torch.mul(of_plain, q_mean, out=db)

    ds2 = torch.mul(dy, factor * a, out=dq).add_(drelative * a / V)
    ds2.mul_(s2.gt_(0))  # in place: as a bool it would take several times as long
    torch.sub(ds2, drelative / V, out=dm).mul_(m).mul_(-2)
    dq.add_(of_plain * b / V)


def _tokens(x: Tensor) -> Iterator[slice]:
    return pieces(len(x), x.shape[1:].numel(), x.device)


def _spread(m: Tensor, q: Tensor, out: Tensor) -> Tensor:
    return torch.addcmul(q, m, m, value=-1, out=out).clamp_(min=0)


def _relative(m: Tensor, variance: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(m, dim=-1, keepdim=True)
    return norm.square_().div_(m.shape[-1]).add_(variance).clamp_(min=_TINY)


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)
