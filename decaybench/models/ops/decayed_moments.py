"""Weighted moments of all values so far, the weights decaying: what a linear recurrence knows of its sources.

    d_tj = exp(sum of log_decay over j+1 .. t)
    S0_t = sum_{j <= t} d_tj x_j       S1_t = sum d_tj x_j v_j       S2_t = sum d_tj x_j v_j^2
    D1_t = sum d_tj u_j                D2_t = sum d_tj^2 x_j^2

The recurrence of `scalar_decay` with q = k = 1; an op of its own because there are no scores, because D2 takes the same
decays squared, and because the values needn't be written out by autograd. Source: the sums of arXiv 2605.18832's
kriging with an exponential kernel in the place of softmax weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decaybench.core.positions import Layout
from decaybench.models.ops.pieces import pieces
from decaybench.models.ops.precision import (
    at_least_float32,
    bounded_log_decay,
    check_log_decay,
    keeps_precision,
)

_TINY = 1e-30
_SCRATCH = 2**20  # numbers of the states worked on at a time


@dataclass(frozen=True)
class MomentState:
    """sums: [B, H, 2 V + 2], S1, S2, S0 and D1 after the last token; squares: [B, H], D2. float32 (float64 stays)."""

    sums: Tensor
    squares: Tensor


class DecayedMoments(NamedTuple):
    """mean, square: [B, T, H, V], S1/S0 and S2/S0 (0 where S0 is); S0, D1, D2: [B, T, H]. float32 (float64 stays)."""

    mean: Tensor
    square: Tensor
    S0: Tensor
    D1: Tensor
    D2: Tensor


@keeps_precision
def decayed_moments(
    v: Tensor,
    x: Tensor,
    u: Tensor,
    log_decay: Tensor,
    *,
    initial_state: MomentState | None = None,
    output_final_state: bool = False,
    layout: Layout | None = None,
    chunk_size: int | None = None,
) -> tuple[DecayedMoments, MomentState | None]:
    """By the form that suits the length: the loop for one token, the chunked form for more.

    v: [B, T, H, V]; x, u: >= 0 [B, T, H]; log_decay: <= 0 [B, T, H]; layout as in `scalar_decay`. Any T >= 1 and
    chunk_size >= 1 (None: about sqrt(T)) give the same. Raises ValueError on shapes that don't fit and on log-decays
    below float32.
    """
    check_log_decay(log_decay)
    T = v.shape[1]
    if not x.shape == u.shape == log_decay.shape == v.shape[:3]:
        shapes = ", ".join(str(tuple(part.shape)) for part in (v, x, u, log_decay))
        raise ValueError(f"decayed_moments wants v [B,T,H,V], x, u and log_decay [B,T,H]; got {shapes}")
    if T == 1:
        return decayed_moments_recurrent(
            v, x, u, log_decay, initial_state=initial_state, output_final_state=output_final_state, layout=layout
        )
    v, x, u, log_decay = _prepare(v, x, u, log_decay, layout)
    sums, squares = _start(v, initial_state)
    resets = None if layout is None else layout.resets
    L = min(T, chunk_size or math.isqrt(T))
    *found, last, last_square = _Moments.apply(v, x, u, log_decay, sums, squares, resets, L)  # type: ignore[no-untyped-call]
    return DecayedMoments(*found), MomentState(last, last_square) if output_final_state else None


@keeps_precision
def decayed_moments_recurrent(
    v: Tensor,
    x: Tensor,
    u: Tensor,
    log_decay: Tensor,
    *,
    initial_state: MomentState | None = None,
    output_final_state: bool = False,
    layout: Layout | None = None,
) -> tuple[DecayedMoments, MomentState | None]:
    """The definition, one step after the other. Arguments and results as `decayed_moments`."""
    v, x, u, log_decay = _prepare(v, x, u, log_decay, layout)
    written = torch.cat([x[..., None] * v, x[..., None] * v * v, x[..., None], u[..., None]], dim=-1)
    decay, V = log_decay.exp(), v.shape[-1]
    sums, squares = _start(v, initial_state)
    found = []
    for t in range(v.shape[1]):
        if layout is not None and layout.resets is not None:
            new = layout.resets[:, t, None]
            sums, squares = sums.masked_fill(new[..., None], 0.0), squares.masked_fill(new, 0.0)
        sums = decay[:, t, :, None] * sums + written[:, t]
        squares = decay[:, t].square() * squares + x[:, t].square()
        found.append(torch.cat([sums, squares[..., None]], dim=-1))
    weighted, S0, D1, D2 = torch.split(torch.stack(found, dim=1), [2 * V, 1, 1, 1], dim=-1)
    mean, square = (weighted * _inverse(S0)).chunk(2, dim=-1)
    moments = DecayedMoments(mean, square, S0[..., 0], D1[..., 0], D2[..., 0])
    return moments, MomentState(sums, squares) if output_final_state else None


class _Moments(torch.autograd.Function):
    """By chunks of L tokens, with its gradient, both in place.

    First token after token in all chunks at once, then chunk after chunk, y_t += reach_t (y before the chunk) with the
    decay reach_t from there to t. A decay of 0 parts documents. For y_t = decay_t y_{t-1} + w_t, g_t the gradient of
    y_t as an output, and dy_t = dw_t the one with what later tokens have of it, the log-decay's is

        e_t = dy_t . decay_t y_{t-1} = g_t . y_t - dw_t . w_t + e_{t+1}

    The sum takes no pass over the states; it begins anew in each chunk, from the product at the next one's first token,
    lest its rounding add up.

    v: [B, T, H, V]; x, u, log_decay: [B, T, H]; sums: [B, H, 2 V + 2]; squares: [B, H]; resets: bool [B, T] or None.
    Returns mean, square, S0, D1, D2 and the two parts of the last state. Inside, S0, D1 and D2 lie behind one another,
    [3 B, T, H, 1], and so do their decays.
    """

    @staticmethod
    def forward(
        ctx: Any,
        v: Tensor,
        x: Tensor,
        u: Tensor,
        log_decay: Tensor,
        sums: Tensor,
        squares: Tensor,
        resets: Tensor | None,
        L: int,
    ) -> tuple[Tensor, ...]:
        decay = log_decay.exp()
        if resets is not None:
            decay.masked_fill_(resets[..., None], 0.0)
        decays = _behind(decay, decay, decay.square())
        reach = _reach(decays, L)
        small = _behind(x, u, x.square())
        _scan(small, decays, reach, L, _behind(sums[..., -2], sums[..., -1], squares))
        S0, D1, D2 = small[..., 0].chunk(3)

        B = len(v)
        both, last = v.new_empty(2, *v.shape), torch.empty_like(sums)
        last[..., -2], last[..., -1] = S0[:, -1], D1[:, -1]
        inverse = _inverse(small[:B])
        for at in _rows(v):
            here = both[:, at]
            torch.mul(v[at], x[at, ..., None], out=here[0])
            torch.mul(here[0], v[at], out=here[1])
            _scan(here, decays[at], reach[at], L, torch.stack(sums[at, :, :-2].chunk(2, dim=-1)))
            last[at, :, :-2] = torch.cat([*here[:, :, -1]], dim=-1)
            here.mul_(inverse[at])
        last_square = D2[:, -1].clone()
        ctx.save_for_backward(v, x, u, decays, both, small, last, last_square)
        ctx.L = L
        return both[0], both[1], S0, D1, D2, last, last_square

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx.L, *ctx.saved_tensors, *gradients), None, None


def _gradients(
    L: int,
    v: Tensor,
    x: Tensor,
    u: Tensor,
    decays: Tensor,
    both: Tensor,
    small: Tensor,
    last: Tensor,
    last_square: Tensor,
    dmean: Tensor,
    dsquare: Tensor,
    dS0: Tensor,
    dD1: Tensor,
    dD2: Tensor,
    dlast: Tensor,
    dlast_square: Tensor,
) -> tuple[Tensor, ...]:
    """Of v, x, u, log_decay and the two parts of the first state."""
    (B, T), dv, dsums = v.shape[:2], torch.empty_like(v), torch.empty_like(last)
    held, dx, edges = torch.empty_like(x), torch.empty_like(x), x.new_empty(B, (T - 1) // L, x.shape[2])
    reach = _reach_back(decays, L)
    inverse = _inverse(small[:B])

    # 1. the sums of values
    for at in _rows(v):
        (mean, square), (dm, dq), v_at, x_at = both[:, at], (dmean[at], dsquare[at]), v[at], x[at, ..., None]
        held[at] = torch.mul(dm, mean).addcmul_(dq, square).sum(-1)
        d = v.new_empty(2, *v_at.shape)
        torch.mul(dm, inverse[at], out=d[0])
        torch.mul(dq, inverse[at], out=d[1])
        d[:, :, -1] += torch.stack(dlast[at, :, :-2].chunk(2, dim=-1))
        dsums[at, :, :-2] = torch.cat([*_scan_back(d, decays[at], reach[at], L)], dim=-1)
        crossing = (d[:, :, L::L] * both[:, at, L - 1 : T - 1 : L]).sum((0, -1))
        edges[at] = crossing * (decays[at, L::L] / inverse[at, L - 1 : T - 1 : L])[..., 0]
        d[0].add_(d[1].mul_(v_at))
        dx[at] = torch.mul(d[0], v_at).sum(-1)
        torch.mul(d[0].add_(d[1]), x_at, out=dv[at])

    # 2. the small ones
    dsmall = _behind(dS0 - held * (inverse * (small[:B] > _TINY))[..., 0], dD1, dD2)
    e = held + _once_and_twice(dsmall * small)
    dsmall[:, -1] += _behind(dlast[..., -2], dlast[..., -1], dlast_square)
    dS0_first, dD1_first, dsquares = _scan_back(dsmall, decays, reach, L)[..., 0].chunk(3)
    dsums[..., -2], dsums[..., -1] = dS0_first, dD1_first
    edges += _once_and_twice(dsmall[:, L::L] * decays[:, L::L] * small[:, L - 1 : T - 1 : L])
    dx_small, du, dx_square = dsmall[..., 0].chunk(3)
    dx += dx_small
    e -= x * dx + u * du + 2 * x.square() * dx_square
    dx += 2 * x * dx_square

    # 3. the log-decays
    e[:, L - 1 : T - 1 : L] += edges
    e[:, -1] += (dlast * last).sum(-1) + 2 * dlast_square * last_square
    for here, before in reversed(list(_steps(T, L))):
        e[:, before] += e[:, here]
    return dv, dx, du, e, dsums, dsquares


def _scan(y: Tensor, decay: Tensor, reach: Tensor, L: int, start: Tensor) -> None:
    """y_t = decay_t y_{t-1} + what y_t holds at first. y: [..., T, H, W]; decay, reach: [B, T, H, 1]; start: y_0, like
    y without T.
    """
    T = y.shape[-3]
    for here, before in _steps(T, L):
        y[..., here, :, :].addcmul_(decay[:, here], y[..., before, :, :])
    y[..., :L, :, :].addcmul_(reach[:, :L], start.unsqueeze(-3))
    for at in range(L, T, L):
        y[..., at : at + L, :, :].addcmul_(reach[:, at : at + L], y[..., at - 1 : at, :, :])


def _scan_back(dy: Tensor, decay: Tensor, reach: Tensor, L: int) -> Tensor:
    """dy_t += decay_{t+1} dy_{t+1}, with reach from `_reach_back`. Returns the gradient of y_0."""
    T = dy.shape[-3]
    for here, before in reversed(list(_steps(T, L))):
        dy[..., before, :, :].addcmul_(decay[:, here], dy[..., here, :, :])
    for at in reversed(range(L, T, L)):
        dy[..., at - L : at, :, :].addcmul_(reach[:, at - L : at], dy[..., at : at + 1, :, :])
    return decay[:, 0] * dy[..., 0, :, :]


def _reach(decay: Tensor, L: int) -> Tensor:
    """From the end of the chunk before to each token; decay: [B, T, H, 1]."""
    reach = decay.clone()
    for here, before in _steps(decay.shape[1], L):
        reach[:, here] *= reach[:, before]
    return reach


def _reach_back(decay: Tensor, L: int) -> Tensor:
    """From each token to the first one of the next chunk; the last chunk has none."""
    reach = torch.cat([decay[:, 1:], decay[:, :1]], dim=1)
    for here, before in reversed(list(_steps(decay.shape[1], L))):
        reach[:, before] *= reach[:, here]
    return reach


def _steps(T: int, L: int) -> Iterator[tuple[slice, slice]]:
    """The second tokens of all chunks and the first ones, the third and the second, ..."""
    for n in range(1, L):
        yield slice(n, None, L), slice(n - 1, T - 1, L)


def _rows(v: Tensor) -> Iterator[slice]:
    return pieces(len(v), 2 * v.shape[1:].numel(), v.device, _SCRATCH)


def _behind(S0: Tensor, D1: Tensor, D2: Tensor) -> Tensor:
    return torch.cat([S0, D1, D2])[..., None]


def _once_and_twice(part: Tensor) -> Tensor:
    """[3 B, T, H, 1] as [B, T, H]: D2's decays are squared, so that log-decays count twice in them."""
    S0, D1, D2 = part[..., 0].chunk(3)
    return (S0 + D1).add_(D2, alpha=2)


def _start(v: Tensor, state: MomentState | None) -> tuple[Tensor, Tensor]:
    if state is not None:
        return state.sums.to(v.dtype), state.squares.to(v.dtype)
    B, _, H, V = v.shape
    return v.new_zeros(B, H, 2 * V + 2), v.new_zeros(B, H)


def _prepare(v: Tensor, x: Tensor, u: Tensor, log_decay: Tensor, layout: Layout | None) -> tuple[Tensor, ...]:
    v, x, u = (at_least_float32(part) for part in (v, x, u))
    if layout is not None and layout.valid is not None:
        padding = ~layout.valid[..., None]
        x, u, log_decay = (part.masked_fill(padding, 0.0) for part in (x, u, log_decay))
    return v, x, u, bounded_log_decay(log_decay)


def _inverse(S0: Tensor) -> Tensor:
    return S0.clamp(min=_TINY).reciprocal()
