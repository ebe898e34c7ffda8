"""The generalised delta rule, diagonal plus low rank: RWKV-7.

    S_t = diag(exp(log_decay_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T      o_t = S_t^T r_t      S in R^{K x V}

one state a head; in RWKV-7 a = -kk and b = kk * (its in-context learning rate), so that what the state holds under the
normed key kk is replaced in part. The state here is the transpose of the paper's.
Source: Peng et al., "RWKV-7 Goose", arXiv 2503.14456, section 4; the chunked form after the WY representation of
Yang et al., arXiv 2406.06484, section 3. Inside a chunk that starts from the state S, with c the cumulative log-decay,
e = c - log_decay (what a token sees before its own step) and u_t = a_t^T S_{t-1}:

    A_xy[i, j] = sum_K x_i y_j exp(c_i - c_j), j <= i, for x = r; exp(e_i - c_j), j < i, for x = a; y = k, b
    U     = (I - A_ab)^-1 (A_ak V + (a exp(e)) S)           = U_0 + W S
    O     = A_rk V + A_rb U + (r exp(c)) S
    S_end = diag(exp(c_L)) S + (k exp(c_L - c))^T V + (b exp(c_L - c))^T U

Log-decays, decays and the state are float32 whatever the other inputs are (float64 stays float64). Padding (position
0) is an identity step; a document start (position 1) makes everything before it invisible by a mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decaybench.core.positions import Layout
from decaybench.models.ops.chunks import Visible, chunks_of_heads, fill_last_chunk, tokens_of_heads
from decaybench.models.ops.decayed_scores import decayed_scores, decayed_scores_backward
from decaybench.models.ops.precision import at_least_float32, check_log_decay, keeps_precision, without_autocast
from decaybench.models.ops.unit_lower import inverse_unit_lower

DEFAULT_CHUNK = 32


def dplr(
    r: Tensor,
    log_decay: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    layout: Layout | None = None,
    chunk_size: int = DEFAULT_CHUNK,
    backend: str = "torch",
) -> tuple[Tensor, Tensor | None]:
    """The recurrence by the form that suits its length: the loop for one token, the chunked form for more.

    r, log_decay (<= 0), k, a, b: [B, T, H, K]; v: [B, T, H, V]; initial_state: [B, H, K, V].
    layout: what `positions` say (see core.positions); None means that every row is one document without padding.
    Returns o [B, T, H, V] in v's dtype and, if asked, the final state [B, H, K, V] in float32 (or float64).
    Raises ValueError on shapes that don't fit, on log-decays below float32 and on an unknown backend.
    """
    if backend != "torch":
        raise ValueError(f"dplr has no backend {backend!r}; known: torch")
    _check(r, log_decay, k, v, a, b, initial_state)
    if v.shape[1] == 1:
        return dplr_recurrent(
            r, log_decay, k, v, a, b, initial_state=initial_state, output_final_state=output_final_state, layout=layout
        )
    return dplr_chunked(
        r,
        log_decay,
        k,
        v,
        a,
        b,
        initial_state=initial_state,
        output_final_state=output_final_state,
        layout=layout,
        chunk_size=chunk_size,
    )


@keeps_precision
def dplr_recurrent(
    r: Tensor,
    log_decay: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    layout: Layout | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The definition, one step after the other. Arguments and results as `dplr`."""
    dtype = v.dtype
    r, log_decay, k, v, a, b = _prepare(r, log_decay, k, v, a, b, layout)
    B, T, H, V = v.shape
    S = v.new_zeros(B, H, k.shape[-1], V) if initial_state is None else initial_state.to(v.dtype)
    decay = log_decay.exp()
    out = []
    for t in range(T):
        if layout is not None and layout.resets is not None:
            S = S.masked_fill(layout.resets[:, t, None, None, None], 0.0)
        u = a[:, t, :, None, :] @ S  # [B, H, 1, V]
        S = decay[:, t, :, :, None] * S + b[:, t, :, :, None] * u + k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append((r[:, t, :, None, :] @ S)[:, :, 0])
    return torch.stack(out, dim=1).to(dtype), S if output_final_state else None


@keeps_precision
def dplr_chunked(
    r: Tensor,
    log_decay: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    layout: Layout | None = None,
    chunk_size: int = DEFAULT_CHUNK,
) -> tuple[Tensor, Tensor | None]:
    """The fast form: matrix products inside chunks of `chunk_size` tokens, a scan over chunks for the state.

    Arguments and results as `dplr`; any T >= 1 and any chunk_size >= 1 give the same result (inside it is rounded up
    to a power of two).
    """
    dtype = v.dtype
    T = v.shape[1]
    L = 1 << (min(chunk_size, T) - 1).bit_length()
    inputs, visible = fill_last_chunk(L, layout, *_prepare(r, log_decay, k, v, a, b, layout))
    S = None if initial_state is None else initial_state.to(inputs[0].dtype)
    o, final = _Chunks.apply(*inputs, S, L, visible)  # type: ignore[no-untyped-call]
    return o[:, :T].to(dtype), final if output_final_state else None


class _Chunks(torch.autograd.Function):
    """The chunked form with its gradient, for N whole chunks of L tokens.

    Written by hand because autograd's own backward makes several times as many passes over the scores, and goes through
    the transitions G = diag(exp(c_L)) + (b exp(c_L - c))^T W, which only the scan needs. With D the gradient of S_end
    and dU = A_rb^T dO + (b exp(c_L - c)) D, all follows from dZ = (I - A_ab)^-T dU, the gradient of what the inverse is
    multiplied with. The log-decay's gradient needs no pass over scores either: c enters each product x_i y_j only as
    exp(c_i - c_j), so dc = x dx - y dy, elementwise, and at the chunk's last token also S_end D summed over V.

    r, log_decay, k, a, b: [B, N L, H, K]; v: [B, N L, H, V]; S: [B, H, K, V] or None. Returns o as v, the final state.
    Inside, the first dimension is N B H, chunk by chunk. queries [NBH, 2, L, K] holds r and a, keys k and b, values v
    and u. a stands one token earlier: what it reads before its own step, the token before reads after its own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        r: Tensor,
        log_decay: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        S: Tensor | None,
        L: int,
        visible: Visible | None,
    ) -> tuple[Tensor, Tensor]:
        B, T, H, V = v.shape
        N, K = T // L, k.shape[-1]
        r, log_decay, k, v, a, b = (chunks_of_heads(x, L).flatten(0, 2) for x in (r, log_decay, k, v, a, b))
        queries, keys, values = _with_earlier(r, a), _pairs(k, b), _pairs(v, None)
        decay, carry = log_decay.exp(), log_decay.sum(1).exp_()
        scores, since, until = decayed_scores(queries, keys, decay)
        apart = None
        if visible is not None:
            shape = (N, B, H)
            apart = ~visible.same[:, :, None, None, :, None, :]
            scores.view(*shape, 2, L, 2, L).masked_fill_(apart, 0.0)
            since = (since.view(*shape, L, K) * visible.reads[:, :, None, :, None]).view(since.shape)
            until = (until.view(*shape, L, K) * visible.writes[:, :, None, :, None]).view(until.shape)
            carry = (carry.view(*shape, K) * visible.passes[:, :, None, None]).view(carry.shape)
        scores = scores.view(-1, 2 * L, 2 * L)
        reads, writes = queries[:, 0] * since, (keys * until[:, None]).view(-1, 2 * L, K)

        inverse, solved = _solve(a[:, :1], queries, values, scores, since)
        step = writes[:, L:].transpose(1, 2) @ solved  # [G | added]: S_end = G S + added
        step[..., :K].diagonal(dim1=1, dim2=2).add_(carry)
        step[..., K:].baddbmm_(writes[:, :L].transpose(1, 2), values[:, 0])
        states = v.new_zeros(N + 1, B * H, K, V)  # before each chunk, and the final one
        if S is not None:
            states[0] = S.reshape(B * H, K, V)
        for n, G in enumerate(step.view(N, B * H, K, -1)):
            torch.baddbmm(G[..., K:], G[..., :K], states[n], out=states[n + 1])

        before = states[:-1].view(-1, K, V)
        torch.baddbmm(solved[..., K:], solved[..., :K], before, out=values[:, 1])
        o = torch.bmm(reads, before).baddbmm_(scores[:, :L], values.view(-1, 2 * L, V))
        ctx.save_for_backward(
            queries, keys, values, decay, scores, since, until, reads, writes, inverse, solved, step, states
        )
        ctx.apart, ctx.shape = apart, (N, B, H, L)
        return tokens_of_heads(o.view(N, B, H, L, V)), states[-1].clone().view(B, H, K, V)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, decay, scores, since, until, reads, writes, inverse, solved, step, states = (
            ctx.saved_tensors
        )
        (N, B, H, L), K, V = ctx.shape, queries.shape[-1], values.shape[-1]
        do = chunks_of_heads(do, L).flatten(0, 2)
        with without_autocast(do):
            # The gradients of values and states: what o and the states read, by a scan from the last chunk
            dvalues = scores[:, :L].transpose(1, 2) @ do
            dstates = torch.empty_like(states)
            dread = dstates[:-1].view(-1, K, V)
            torch.bmm(reads.transpose(1, 2), do, out=dread).baddbmm_(solved[..., :K].transpose(1, 2), dvalues[:, L:])
            dstates[-1] = dfinal.reshape(B * H, K, V)
            G = step.view(N, B * H, K, -1)[..., :K]
            for n in reversed(range(N)):
                dstates[n].baddbmm_(G[n].transpose(1, 2), dstates[n + 1])
            S, D = states[:-1].view(-1, K, V), dstates[1:].view(-1, K, V)
            dvalues.baddbmm_(writes, D)

            # Through the triangular system to the scores and from there to queries and keys
            dright = inverse.transpose(1, 2) @ dvalues[:, L:]
            dreads = _with_earlier(do, dright)
            dv = dvalues[:, :L].baddbmm_(scores[:, L:, :L].transpose(1, 2), dreads[:, 1])
            values, dreads = values.view(-1, 2 * L, V), dreads.view(-1, 2 * L, V)
            dscores = torch.bmm(dreads, values.transpose(1, 2)).view(-1, 2, L, 2, L)
            if ctx.apart is not None:
                dscores.view(N, B, H, 2, L, 2, L).masked_fill_(ctx.apart, 0.0)
            dqueries, dkeys = decayed_scores_backward(queries, keys, decay, dscores)
            dqueries.addcmul_((dreads @ S.transpose(1, 2)).view(queries.shape), since[:, None])
            dkeys.addcmul_((values @ D.transpose(1, 2)).view(keys.shape), until[:, None])
            da = torch.cat([dright[:, :1] @ S.transpose(1, 2), dqueries[:, 1, :-1]], dim=1)

            dc = queries[:, 0] * dqueries[:, 0]
            dc.addcmul_(queries[:, 1], dqueries[:, 1])
            dc.addcmul_(keys[:, 0], dkeys[:, 0], value=-1).addcmul_(keys[:, 1], dkeys[:, 1], value=-1)
            dc[:, -1] += (states[1:] * dstates[1:]).sum(-1).view(-1, K)
            dlog_decay = dc.new_ones(L, L).triu() @ dc  # the sum from each token to the chunk's end
        dinputs = (dqueries[:, 0], dlog_decay, dkeys[:, 0], dv, da, dkeys[:, 1])
        dinitial = dstates[0].view(B, H, K, V) if ctx.needs_input_grad[6] else None
        return *(tokens_of_heads(x.view(N, B, H, L, -1)) for x in dinputs), dinitial, None, None


def _solve(first: Tensor, queries: Tensor, values: Tensor, scores: Tensor, since: Tensor) -> tuple[Tensor, Tensor]:
    """(I - A_ab)^-1, and times [a exp(e) | A_ak V]: [W | U_0]. first: a of each chunk's first token, [NBH, 1, K]."""
    M, _, L, K = queries.shape
    system = scores.new_zeros(M, L, L)
    torch.neg(scores[:, L:-1, L:], out=system[:, 1:])
    inverse = inverse_unit_lower(system)
    right = scores.new_zeros(M, L, K + values.shape[-1])
    right[:, :1, :K] = first
    torch.mul(queries[:, 1, :-1], since[:, :-1], out=right[:, 1:, :K])
    right[:, 1:, K:] = scores[:, L:-1, :L] @ values[:, 0]
    return inverse, inverse @ right


def _pairs(x: Tensor, y: Tensor | None) -> Tensor:
    """x and y [M, L, K] as [M, 2, L, K]; None: to be filled."""
    out = x.new_empty(len(x), 2, *x.shape[1:])
    out[:, 0] = x
    if y is not None:
        out[:, 1] = y
    return out


def _with_earlier(x: Tensor, y: Tensor) -> Tensor:
    """x and, one token earlier, y [M, L, K] as [M, 2, L, K]; 0 where no y follows."""
    out = _pairs(x, None)
    out[:, 1, :-1] = y[:, 1:]
    out[:, 1, -1] = 0.0
    return out


def _prepare(
    r: Tensor, log_decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, layout: Layout | None
) -> tuple[Tensor, ...]:
    r, log_decay, k, v, a, b = (at_least_float32(x) for x in (r, log_decay, k, v, a, b))
    if layout is not None and layout.valid is not None:
        padding = ~layout.valid[..., None, None]
        k, b, log_decay = (x.masked_fill(padding, 0.0) for x in (k, b, log_decay))
    if layout is not None and layout.resets is not None:  # a document's first token finds an empty state
        a = a.masked_fill(layout.resets[..., None, None], 0.0)
    return r, log_decay, k, v, a, b


def _check(
    r: Tensor, log_decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, initial_state: Tensor | None
) -> None:
    check_log_decay(log_decay)
    B, T, H, V = v.shape
    K = k.shape[-1]
    if any(x.shape != (B, T, H, K) for x in (r, log_decay, k, a, b)):
        shapes = ", ".join(str(tuple(x.shape)) for x in (r, log_decay, k, v, a, b))
        raise ValueError(f"dplr wants r, log_decay, k, a, b [B,T,H,K] and v [B,T,H,V]; got {shapes}")
    if initial_state is not None and initial_state.shape != (B, H, K, V):
        raise ValueError(f"initial_state must be {(B, H, K, V)}, not {tuple(initial_state.shape)}")
