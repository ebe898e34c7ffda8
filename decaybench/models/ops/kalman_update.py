"""One step of a Kalman filter, elementwise: a state of variance P, an observation of it of variance R, and its move.

    update     K = P / (P + R)          h' = h + K e          P' = K R
    predict    P'' = (1 + J)^2 P' + Q

The update is 1/P' = 1/P + 1/R, with e the innovation. In variances nothing divides by what may be 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from decaybench.models.ops.precision import at_least_float32

LOG_LARGEST = 6.0  # of a precision and of a variance: log lambda stays in [-6, 6]
LARGEST = math.exp(LOG_LARGEST)
_TINY = 1e-30
_LOUDEST = 1e30  # observation: its product with K is a number still


def kalman_update(
    h: Tensor, P: Tensor, e: Tensor, R: Tensor, *, relative: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """One observation: h + K e, K R and K = P / (P + R), elementwise.

    h: [..., D], the state, of variance P > 0; e: the innovation, observed with variance R >= 0; relative: R is counted
    in the mean square of e over D, and divided by it first. The new variance is cut to [e^-6, e^6]. K comes without a
    gradient, to be looked at.
    """
    return _Update.apply(h, P, e, R, relative)  # type: ignore[no-any-return, no-untyped-call]


def kalman_predict(P: Tensor, J: Tensor | None, Q: Tensor | None) -> Tensor:
    """(1 + J)^2 P + Q within [e^-6, e^6]; P: [..., D]; J: like P; Q: [D]; None: 0."""
    return _Predict.apply(P, J, Q)  # type: ignore[no-any-return, no-untyped-call]


def mean_precision(P: Tensor) -> Tensor:
    """The mean of 1 / P over the last dimension."""
    return _MeanPrecision.apply(P)  # type: ignore[no-any-return, no-untyped-call]


class _Update(torch.autograd.Function):
    """With its gradient, in place wherever it can be, and keeping only what comes in: autograd's own makes three times
    as many passes and keeps three times as much.

    With s = 1 / (P + R): dK = s (R s dP - K dR), and d(K R) = s (R R s dP + P K dR) where it isn't cut. Nothing is the
    difference of what nearly cancels, such as 1 - K.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, P: Tensor, e: Tensor, R: Tensor, relative: bool) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(P, e, R)
        ctx.relative = relative
        R, _ = _counted(R, e, relative)
        K = torch.add(P, R)
        torch.div(P, K, out=K)
        ctx.mark_non_differentiable(K)
        return torch.addcmul(h, K.to(h.dtype), e.to(h.dtype)), _cut(R.mul_(K)), K

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dh: Tensor | None, dafter: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        P, e, R = ctx.saved_tensors
        dh = torch.zeros_like(e) if dh is None else dh
        R, size = _counted(R, e, ctx.relative)
        s = torch.add(P, R).reciprocal_()
        K, through = torch.mul(P, s), torch.mul(at_least_float32(dh), e)
        if dafter is None:
            dP, dR = through.clone(), through.neg_()
        else:
            passed = _uncut(K * R).mul_(dafter)
            dP, dR = torch.addcmul(through, passed, R), passed.mul_(P).sub_(through)
        dP.mul_(s).mul_(R).mul_(s)
        dR.mul_(s).mul_(K).mul_(torch.lt(R, _LOUDEST, out=s))
        de = K.mul_(dh)
        if size is not None:
            along = R.mul_(dR).sum(-1, keepdim=True)
            de.addcmul_(e, along.mul_(size > _TINY).div_(size).mul_(-2 / e.shape[-1]))
            dR.div_(size)
        return dh, dP, de.to(e.dtype), dR, None


class _Predict(torch.autograd.Function):
    """With its gradient, which passes where nothing is cut; only what comes in is kept."""

    @staticmethod
    def forward(ctx: Any, P: Tensor, J: Tensor | None, Q: Tensor | None) -> Tensor:
        ctx.save_for_backward(P, J, Q)
        return _cut(_predicted(P, J, Q))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dafter: Tensor) -> tuple[Tensor | None, ...]:
        P, J, Q = ctx.saved_tensors
        dsum = _uncut(_predicted(P, J, Q)).mul_(dafter)
        dQ = None if Q is None else dsum.flatten(0, -2).sum(0)
        if J is None:
            return dsum, None, dQ
        growth = 1 + J
        dP = dsum.mul_(growth)
        dJ = torch.mul(dP, P).mul_(2)
        return dP.mul_(growth), dJ, dQ


class _MeanPrecision(torch.autograd.Function):
    """Autograd's own keeps 1 / P, which P has already said."""

    @staticmethod
    def forward(ctx: Any, P: Tensor) -> Tensor:
        ctx.save_for_backward(P)
        return P.reciprocal().mean(-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dmean: Tensor) -> Tensor:
        (P,) = ctx.saved_tensors
        return torch.square(P).reciprocal_().mul_(dmean[..., None] / -P.shape[-1])


def _counted(R: Tensor, e: Tensor, relative: bool) -> tuple[Tensor, Tensor | None]:
    """R in the mean square of e, if so wanted, as new numbers; and that mean square."""
    if not relative:
        return R.clamp(max=_LOUDEST), None
    norm = torch.linalg.vector_norm(at_least_float32(e), dim=-1, keepdim=True)
    size = norm.square_().div_(e.shape[-1]).clamp_(min=_TINY)
    return torch.div(R, size).clamp_(max=_LOUDEST), size


def _predicted(P: Tensor, J: Tensor | None, Q: Tensor | None) -> Tensor:
    """As new numbers."""
    grown = P.clone() if J is None else (1 + J).square_().mul_(P)
    return grown if Q is None else grown.add_(Q)


def _cut(variance: Tensor) -> Tensor:
    """Within the bounds, in place."""
    return variance.clamp_(1 / LARGEST, LARGEST)


def _uncut(variance: Tensor) -> Tensor:
    """1 where `_cut` leaves it as it is, else 0, in place: a bool would take several times as long."""
    return torch.eq(variance, _cut(variance.clone()), out=variance)
