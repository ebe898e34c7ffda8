"""One step of a Kalman filter, elementwise: a state of variance P and an observation of it of variance R.

    K = P / (P + R)          h' = h + K e          P' = K R

which is 1/P' = 1/P + 1/R, with e the innovation. In variances nothing divides by what may be 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from decaybench.models.ops.precision import at_least_float32

LOG_LARGEST = 6.0  # of a precision and of a variance: log lambda stays in [-6, 6]
LARGEST = math.exp(LOG_LARGEST)


def kalman_update(h: Tensor, P: Tensor, e: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One observation: h + K e, K R and K = P / (P + R), elementwise.

    h: the state, of variance P > 0; e: the innovation, observed with variance R >= 0. The new variance is cut to
    [e^-6, e^6]. K comes without a gradient, to be looked at.
    """
    return _KalmanUpdate.apply(h, P, e, R)  # type: ignore[no-any-return, no-untyped-call]


def bounded(x: Tensor) -> Tensor:
    """A variance within [e^-6, e^6]."""
    return x.clamp(1 / LARGEST, LARGEST)


class _KalmanUpdate(torch.autograd.Function):
    """With its gradient: autograd's own makes twice as many passes.

    With s = 1 / (P + R): dK/dP = (1 - K) s, dK/dR = -K s, and the new variance K R passes its gradient on where it
    isn't cut.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, P: Tensor, e: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = torch.add(P, R).reciprocal_()
        K = P * s
        after = K * R
        inside = (after >= 1 / LARGEST) & (after <= LARGEST)
        ctx.save_for_backward(e, R, K, s, inside)
        ctx.mark_non_differentiable(K)
        return torch.addcmul(h, K.to(h.dtype), e.to(h.dtype)), bounded(after), K

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dh: Tensor, dafter: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        e, R, K, s, inside = ctx.saved_tensors
        passed = dafter * inside
        dK_s = torch.addcmul(at_least_float32(dh) * e, passed, R).mul_(s)
        dR = torch.sub(passed, dK_s).mul_(K)
        dP = dK_s * (1 - K)
        return dh, dP, (dh * K).to(e.dtype), dR
