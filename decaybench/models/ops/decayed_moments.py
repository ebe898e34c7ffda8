"""Weighted moments of all values so far, the weights decaying: what a linear recurrence knows of its sources.

    d_tj = exp(sum of log_decay over j+1 .. t)
    S0_t = sum_{j <= t} d_tj x_j       S1_t = sum d_tj x_j v_j       S2_t = sum d_tj x_j v_j^2
    D1_t = sum d_tj u_j                D2_t = sum d_tj^2 x_j^2

The recurrence of `scalar_decay` with q = k = 1; an op of its own because there are no scores, because D2 takes the same
decays squared, and because the values needn't be written out by autograd. Source: the sums of arXiv 2605.18832's
kriging with an exponential kernel in the place of softmax weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decaybench.core.positions import Layout
from decaybench.models.ops.chunks import Visible, chunks, chunks_of_heads, fill_last_chunk
from decaybench.models.ops.precision import (
    at_least_float32,
    bounded_log_decay,
    check_log_decay,
    keeps_precision,
    without_autocast,
)

DEFAULT_CHUNK = 32
_TINY = 1e-30


@dataclass(frozen=True)
class MomentState:
    """sums: [B, H, 2 V + 2], S1, S2, S0 and D1 after the last token; squares: [B, H], D2. float32 (float64 stays)."""

    sums: Tensor
    squares: Tensor


class DecayedMoments(NamedTuple):
    """means: [B, T, H, 2 V], S1/S0 and S2/S0 (0 where S0 is); S0, D1, D2: [B, T, H]. float32 (float64 stays)."""

    means: Tensor
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
    chunk_size: int = DEFAULT_CHUNK,
) -> tuple[DecayedMoments, MomentState | None]:
    """By the form that suits the length: the loop for one token, the chunked form for more.

    v: [B, T, H, V]; x, u: >= 0 [B, T, H]; log_decay: <= 0 [B, T, H]; layout as in `scalar_decay`. Any T >= 1 and
    chunk_size >= 1 give the same. Raises ValueError on shapes that don't fit and on log-decays below float32.
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
    L = min(chunk_size, T)
    (v, x, u, log_decay), visible = fill_last_chunk(L, layout, v, x, u, log_decay)
    sums = squares = None
    if initial_state is not None:
        sums, squares = initial_state.sums.to(v.dtype), initial_state.squares.to(v.dtype)
    means, S0, D1, D2, last, last_square = _Moments.apply(v, x, u, log_decay, sums, squares, visible, L)  # type: ignore[no-untyped-call]
    found = DecayedMoments(*(part[:, :T] for part in (means, S0, D1, D2)))
    return found, MomentState(last, last_square) if output_final_state else None


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
    sums, squares = torch.zeros_like(written[:, 0]), torch.zeros_like(x[:, 0])
    if initial_state is not None:
        sums, squares = initial_state.sums.to(v.dtype), initial_state.squares.to(v.dtype)
    found = []
    for t in range(v.shape[1]):
        if layout is not None and layout.resets is not None:
            new = layout.resets[:, t, None]
            sums, squares = sums.masked_fill(new[..., None], 0.0), squares.masked_fill(new, 0.0)
        sums = decay[:, t, :, None] * sums + written[:, t]
        squares = decay[:, t].square() * squares + x[:, t].square()
        found.append(torch.cat([sums, squares[..., None]], dim=-1))
    weighted, S0, D1, D2 = torch.split(torch.stack(found, dim=1), [2 * V, 1, 1, 1], dim=-1)
    means = weighted * S0.clamp(min=_TINY).reciprocal()
    moments = DecayedMoments(means, S0[..., 0], D1[..., 0], D2[..., 0])
    return moments, MomentState(sums, squares) if output_final_state else None


class _Moments(torch.autograd.Function):
    """By chunks, with its gradient. With c the log-decay summed from a chunk's start and D_ij = exp(c_i - c_j), the
    state before a chunk is one more source, and the state after it is what its last token holds:

        sums_i = [exp(c_i), D_ij] [state before; values_j]          values = [x v, x v^2, x, u]

    c_i multiplies all that token i holds and -c_j all that j goes into: its gradient takes no pass over D, as in
    `scalar_decay`. v: [B, T, H, V]; x, u, log_decay: [B, T, H], T a multiple of L; sums: [B, H, 2 V + 2] or None;
    squares: [B, H] or None. Returns means, S0, D1, D2 and the two parts of the last state.
    """

    @staticmethod
    def forward(
        ctx: Any,
        v: Tensor,
        x: Tensor,
        u: Tensor,
        log_decay: Tensor,
        sums: Tensor | None,
        squares: Tensor | None,
        visible: Visible | None,
        L: int,
    ) -> tuple[Tensor, ...]:
        D = _decays(chunks(log_decay, L), visible)
        N, B, H = D.shape[:3]
        V = v.shape[-1]
        v_heads, x_heads = chunks_of_heads(v, L), _heads(x, L)

        values = v.new_empty(N, B, H, L + 1, 2 * V + 2)  # the state before each chunk first
        tokens = values[..., 1:, :]
        torch.mul(v_heads, x_heads[..., None], out=tokens[..., :V])
        torch.mul(tokens[..., :V], v_heads, out=tokens[..., V : 2 * V])
        tokens[..., 2 * V] = x_heads
        tokens[..., 2 * V + 1] = _heads(u, L)
        last = _scan(values, D, sums)
        found = D @ values

        D_squared = D.square()
        squared = v.new_empty(N, B, H, L + 1, 1)
        squared[..., 1:, 0] = x_heads.square()
        last_square = _scan(squared, D_squared, None if squares is None else squares[..., None])
        D2 = (D_squared @ squared)[..., 0]

        weights = found[..., 2 * V :].contiguous()
        means = v.new_empty(B, N, L, H, 2 * V)
        torch.mul(found[..., : 2 * V], _inverse(weights), out=means.permute(1, 0, 3, 2, 4))
        before, before_square = values[..., 0, :].clone(), squared[..., 0, :].clone()
        ctx.save_for_backward(v, x, u, D, means, weights, D2, before, before_square, last, last_square)
        ctx.starts = sums is not None
        small = (_tokens(part) for part in (weights[..., 0], weights[..., 1], D2))
        return means.flatten(1, 2), *small, last, last_square[..., 0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(gradients[0]):
            *inputs, dsums, dsquares = _gradients(*ctx.saved_tensors, *gradients)
        starts = (dsums, dsquares) if ctx.starts else (None, None)
        return *inputs, *starts, None, None


def _gradients(
    v: Tensor,
    x: Tensor,
    u: Tensor,
    D: Tensor,
    means: Tensor,
    weights: Tensor,
    D2: Tensor,
    before: Tensor,
    before_square: Tensor,
    last: Tensor,
    last_square: Tensor,
    dmeans: Tensor,
    dS0: Tensor,
    dD1: Tensor,
    dD2: Tensor,
    dlast: Tensor,
    dlast_square: Tensor,
) -> tuple[Tensor, ...]:
    """Of v, x, u, log_decay and the two parts of the first state."""
    N, B, H, L, _ = D.shape
    V = v.shape[-1]
    dmeans = torch.unflatten(dmeans, 1, (N, L))

    # 1. what each token holds: through S1/S0 and S2/S0 to the sums
    held = torch.einsum("bnlhw,bnlhw->nbhl", dmeans, means)  # S1 . dS1 + S2 . dS2
    inverse = _inverse(weights)
    dfound = v.new_empty(N, B, H, L, 2 * V + 2)
    torch.mul(dmeans.permute(1, 0, 3, 2, 4), inverse, out=dfound[..., : 2 * V])
    dfound[..., 2 * V] = _heads(dS0, L) - held * (inverse[..., 0] * (weights[..., 0] > _TINY))
    dfound[..., 2 * V + 1] = _heads(dD1, L)
    dc = held + (dfound[..., 2 * V :] * weights).sum(-1)
    dsums = _scan_back(dfound, dc, 1, D, before, last, dlast)
    dfound_square = _heads(dD2, L)[..., None].clone(memory_format=torch.contiguous_format)
    D_squared = D.square()
    dc += 2 * dfound_square[..., 0] * D2
    dsquares = _scan_back(dfound_square, dc, 2, D_squared, before_square, last_square, dlast_square[..., None])

    # 2. what each token wrote
    dvalues = D[..., 1:].mT @ dfound
    dsquared = (D_squared[..., 1:].mT @ dfound_square)[..., 0]
    v_heads, x_heads, u_heads = chunks_of_heads(v, L), _heads(x, L), _heads(u, L)
    through_square = dvalues[..., V : 2 * V] * v_heads
    through = dvalues[..., :V].add_(through_square)
    dx = (through * v_heads).sum(-1) + dvalues[..., 2 * V]
    du = dvalues[..., 2 * V + 1]
    dc -= x_heads * dx + u_heads * du + 2 * x_heads.square() * dsquared
    dx += 2 * x_heads * dsquared
    dv = v.new_empty(B, N, L, H, V)
    torch.mul(through.add_(through_square), x_heads[..., None], out=dv.permute(1, 0, 3, 2, 4))
    dlog_decay = dc.flip(-1).cumsum(-1).flip(-1)
    return dv.flatten(1, 2), _tokens(dx), _tokens(du), _tokens(dlog_decay), dsums, dsquares[..., 0]


def _decays(log_decay: Tensor, visible: Visible | None) -> Tensor:
    """log_decay: [N, B, L, H]. From the chunk's start, and from each of its tokens, to token i: [N, B, H, L, 1 + L]."""
    N, B, L, H = log_decay.shape
    c = log_decay.cumsum(2).transpose(2, 3).contiguous()
    D = c.new_empty(N, B, H, L, L + 1)
    D[..., 0] = c
    torch.sub(c[..., :, None], c[..., None, :], out=D[..., 1:])
    D.clamp_(max=0.0).exp_().tril_(1)  # bounded before exp: above the diagonal it would overflow
    if visible is not None:
        D[..., 0] *= visible.reads[:, :, None]
        D[..., 1:] *= visible.same[:, :, None]
    return D


def _scan(values: Tensor, D: Tensor, start: Tensor | None) -> Tensor:
    """Put the state before each chunk in the first row of its values [N, B, H, 1 + L, W]; returns the one after all."""
    written = (D[..., -1:, 1:] @ values[..., 1:, :])[..., 0, :]
    carry = D[..., -1, :1]
    state = torch.zeros_like(written[0]) if start is None else start
    for n in range(len(values)):
        values[n, ..., 0, :] = state
        state = torch.addcmul(written[n], carry[n], state)
    return state


def _scan_back(
    dfound: Tensor, dc: Tensor, power: int, D: Tensor, before: Tensor, last: Tensor, dlast: Tensor
) -> Tensor:
    """Add to what the last token of each chunk holds, in dfound [N, B, H, L, W], what later chunks have of it.

    power: of the decays in D, whose log-decays get their part of it in dc [N, B, H, L]. before: the state before each
    chunk, [N, B, H, W]; last: the one after all. Returns the gradient of the state before all, [B, H, W].
    """
    # In one piece: products with a strided vector take ten times as long.
    read = (D[..., None, :, 0].contiguous() @ dfound)[..., 0, :]
    carry = D[..., -1, :1]
    dstate = dlast
    for n in reversed(range(len(dfound))):
        after = last if n + 1 == len(dfound) else before[n + 1]
        dfound[n, ..., -1, :] += dstate
        dc[n, ..., -1] += power * (after * dstate).sum(-1)
        dstate = torch.addcmul(read[n], carry[n], dstate)
    return dstate


def _prepare(v: Tensor, x: Tensor, u: Tensor, log_decay: Tensor, layout: Layout | None) -> tuple[Tensor, ...]:
    v, x, u = (at_least_float32(part) for part in (v, x, u))
    if layout is not None and layout.valid is not None:
        padding = ~layout.valid[..., None]
        x, u, log_decay = (part.masked_fill(padding, 0.0) for part in (x, u, log_decay))
    return v, x, u, bounded_log_decay(log_decay)


def _inverse(weights: Tensor) -> Tensor:
    """1 / S0, weights: [..., 2], S0 and D1. Returns [..., 1]."""
    return weights[..., :1].clamp(min=_TINY).reciprocal()


def _heads(x: Tensor, L: int) -> Tensor:
    """[B, N L, H] as [N, B, H, L]."""
    return chunks(x, L).transpose(2, 3)


def _tokens(x: Tensor) -> Tensor:
    """[N, B, H, L] as [B, N L, H]."""
    return x.permute(1, 0, 3, 2).flatten(1, 2)
