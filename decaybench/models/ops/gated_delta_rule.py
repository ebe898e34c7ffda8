"""The gated delta rule with one decay and one write strength a head: Gated DeltaNet.

    S_t = exp(log_decay_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = S_t^T q_t

The state decays, then what it holds under k_t is moved towards v_t by beta_t: with D = exp(log_decay_t) S_{t-1},
S_t = D + k_t u_t^T, u_t = beta_t (v_t - D^T k_t). S in R^{K x V}, one a head; beta in [0, 1], or up to 2 for negative
eigenvalues. Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, section 3; the chunked
form by the WY representation of Yang et al., "Parallelizing Linear Transformers with the Delta Rule", arXiv 2406.06484,
section 3. Log-decays, their cumulative sums and the state are float32 whatever q, k, v are (float64 stays float64).
Padding (position 0) is an identity step; a document start (position 1) makes everything before it invisible by a mask,
never by a log-decay of -inf.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decaybench.core.positions import Layout
from decaybench.models.ops.chunks import Visible, chunks, chunks_of_heads, fill_last_chunk, tokens_of_heads
from decaybench.models.ops.precision import (
    at_least_float32,
    bounded_log_decay,
    check_log_decay,
    keeps_precision,
    without_autocast,
)
from decaybench.models.ops.unit_lower import inverse_unit_lower

DEFAULT_CHUNK = 32


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    layout: Layout | None = None,
    chunk_size: int = DEFAULT_CHUNK,
    backend: str = "torch",
) -> tuple[Tensor, Tensor | None]:
    """The recurrence by the form that suits its length: the loop for one token, the chunked form for more.

    q, k: [B, T, H, K], k of length 1 or less (beta |k|^2 > 2 makes the state explode); v: [B, T, H, V];
    beta, log_decay: [B, T, H], log_decay <= 0; initial_state: [B, H, K, V].
    layout: what `positions` say (see core.positions); None means that every row is one document without padding.
    Returns o [B, T, H, V] in v's dtype and, if asked, the final state [B, H, K, V] in float32 (or float64).
    Raises ValueError on shapes that don't fit, on log-decays below float32 and on an unknown backend.
    """
    if backend != "torch":
        raise ValueError(f"gated_delta_rule has no backend {backend!r}; known: torch")
    _check(q, k, v, beta, log_decay, initial_state)
    if v.shape[1] == 1:
        return gated_delta_rule_recurrent(
            q, k, v, beta, log_decay, initial_state=initial_state, output_final_state=output_final_state, layout=layout
        )
    return gated_delta_rule_chunked(
        q,
        k,
        v,
        beta,
        log_decay,
        initial_state=initial_state,
        output_final_state=output_final_state,
        layout=layout,
        chunk_size=chunk_size,
    )


@keeps_precision
def gated_delta_rule_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    layout: Layout | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The definition, one step after the other. Arguments and results as `gated_delta_rule`."""
    dtype = v.dtype
    q, k, v, beta, log_decay = _prepare(q, k, v, beta, log_decay, layout)
    B, T, H, V = v.shape
    S = v.new_zeros(B, H, k.shape[-1], V) if initial_state is None else initial_state.to(v.dtype)
    out = []
    for t in range(T):
        if layout is not None and layout.resets is not None:
            S = S.masked_fill(layout.resets[:, t, None, None, None], 0.0)
        S = log_decay[:, t].exp()[..., None, None] * S
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + k[:, t, :, :, None] * u[:, :, None, :]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(out, dim=1).to(dtype), S if output_final_state else None


@keeps_precision
def gated_delta_rule_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    layout: Layout | None = None,
    chunk_size: int = DEFAULT_CHUNK,
) -> tuple[Tensor, Tensor | None]:
    """The fast form: matrix products inside chunks of `chunk_size` tokens, a scan over chunks for the state.

    Arguments and results as `gated_delta_rule`; any T >= 1 and any chunk_size >= 1 give the same result.
    """
    dtype = v.dtype
    q, k, v, beta, log_decay = _prepare(q, k, v, beta, log_decay, layout)
    B, T, H, V = v.shape
    L = min(chunk_size, T)
    (q, k, v, beta, log_decay), visible = fill_last_chunk(L, layout, q, k, v, beta, log_decay)
    c = chunks(log_decay, L).cumsum(2).transpose(2, 3)
    S = v.new_zeros(B, H, k.shape[-1], V) if initial_state is None else initial_state.to(v.dtype)
    o, S = _Chunks.apply(q, k, v, beta, c.contiguous(), S, visible)  # type: ignore[no-untyped-call]
    return o[:, :T].to(dtype), S if output_final_state else None


class _Chunks(torch.autograd.Function):
    """The chunked form with its gradient: autograd's own backward makes several times as many passes on a CPU.

    Inside a chunk, with S the state before it, c the log-decay summed from its start and i >= j two of its tokens,

        D_ij = exp(c_i - c_j)    P = D * q k^T    G = D * k k^T below the diagonal    r = exp(c)    e_j = D_end,j
        x = v - r k S - G u      u = beta x       o = r q S + P u                     S' = exp(c_end) S + (e k)^T u

    where x is what a token finds missing under its key. Solved for x (the WY form): with T = (I + G diag(beta))^-1,

        x = T v - w S,   w = T r k

    so that the scan over chunks takes two products a chunk. Gradients, the scan's again two products a chunk:

        du = P^T do + e k dS'            dS = exp(c_end) dS' + (r q)^T do - (beta w)^T du
        dv = T^T beta du                 dbeta = x . (du - G^T dv)          dP = do u^T          dG = -dv u^T
        dc = o . do - v . dv             and at the chunk's end + S' . dS'

    dc needs no pass over [L, L], for D_ij dD_ij summed over a row or a column are products that are there already.

    q, k: [B, N L, H, K]; v: [B, N L, H, V]; beta: [B, N L, H]; c: [N, B, H, L]; S: [B, H, K, V]. Returns o as v, and
    the state behind the last chunk. Inside, the first dimension is m = N B H, and q and k are stacked [m, 2 L, K], as
    are P and G.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, c: Tensor, S: Tensor, visible: Visible | None
    ) -> tuple[Tensor, Tensor]:
        (N, B, H, L), (K, V) = c.shape, S.shape[2:]
        qk = q.new_empty(N, B, H, 2, L, K)
        qk[:, :, :, 0], qk[:, :, :, 1] = chunks_of_heads(q, L), chunks_of_heads(k, L)
        qk = qk.view(-1, 2 * L, K)
        q, k = qk[:, :L], qk[:, L:]
        v = chunks_of_heads(v, L).reshape(-1, L, V)
        beta = chunks_of_heads(beta[..., None], L).reshape(-1, L, 1)
        decay, reach, rest, carry = _decays(c, visible)

        weights = _scale(qk @ k.transpose(1, 2), decay)
        P, G = weights[:, :L], weights[:, L:]
        G.diagonal(dim1=1, dim2=2).zero_()
        T = inverse_unit_lower(G * beta.transpose(1, 2))
        w = T @ (k * reach)
        x = T @ v
        states = S.new_empty(N + 1, B * H, K, V)
        states[0] = S.reshape(-1, K, V)
        e = (k * (rest * beta)).transpose(1, 2)
        by_chunk = (y.chunk(N) for y in (x, w, e, carry))
        for x_n, w_n, e_n, carry_n, before, after in zip(*by_chunk, states[:-1], states[1:], strict=True):
            x_n.baddbmm_(w_n, before, alpha=-1)
            torch.mul(before, carry_n, out=after).baddbmm_(e_n, x_n)

        u = x * beta
        o = (q @ states[:-1].view(-1, K, V)).mul_(reach).baddbmm_(P, u)
        ctx.save_for_backward(qk, v, beta, decay, reach, rest, carry, weights, T, w, x, u, o, states)
        ctx.shape = N, B, H, L
        return tokens_of_heads(o.view(N, B, H, L, V)), states[-1].view(
            S.shape
        ).clone()  # a view would keep all of states alive

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
        qk, v, beta, decay, reach, rest, carry, weights, T, w, x, u, o, states = ctx.saved_tensors
        (N, B, H, L), (K, V) = ctx.shape, states.shape[2:]
        q, k, P, G = qk[:, :L], qk[:, L:], weights[:, :L], weights[:, L:]
        with without_autocast(do):
            dread = torch.empty(len(v), 2 * L, V, dtype=do.dtype, device=do.device)
            dread[:, :L].view(N, B, H, L, V).copy_(chunks_of_heads(do, L))
            do = dread[:, :L]
            du = P.transpose(1, 2) @ do
            inside = q.transpose(1, 2) @ (do * reach)
            dstates = torch.empty_like(states)
            dstates[N] = dS.reshape(-1, K, V)
            by_chunk = (y.chunk(N) for y in (du, k * rest, (w * beta).transpose(1, 2), inside, carry))
            steps = list(zip(*by_chunk, dstates[:-1], dstates[1:], strict=True))
            for du_n, e_n, w_n, inside_n, carry_n, dbefore, dafter in reversed(steps):
                du_n.baddbmm_(e_n, dafter)
                torch.addcmul(inside_n, dafter, carry_n, out=dbefore).baddbmm_(w_n, du_n, alpha=-1)

            before, after = states[:-1].view(-1, K, V), states[1:].view(-1, K, V)
            dafter = dstates[1:].view(-1, K, V)
            dv = T.transpose(1, 2) @ (du * beta)
            torch.neg(dv, out=dread[:, L:])
            dbeta = du.baddbmm_(G.transpose(1, 2), dv, alpha=-1).mul_(x).sum(-1, keepdim=True)
            dweights = _scale(dread @ u.transpose(1, 2), decay)
            dweights[:, L:].diagonal(dim1=1, dim2=2).zero_()
            dqk = _scale(dread @ before.transpose(1, 2), reach).baddbmm_(dweights, k)
            dk = (u @ dafter.transpose(1, 2)).mul_(rest)
            dk.add_(dqk[:, L:]).baddbmm_(dweights.transpose(1, 2), qk)
            dc = (do * o).sum(-1) - (dv * v).sum(-1)
            dc[:, -1] += (after * dafter).sum((1, 2))
        dq, dk, dv, dbeta = (tokens_of_heads(y.view(N, B, H, L, -1)) for y in (dqk[:, :L], dk, dv, dbeta))
        return dq, dk, dv, dbeta[..., 0], dc.view(N, B, H, L), dstates[0].view(B, H, K, V), None


def _decays(c: Tensor, visible: Visible | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is left from token to token [m, L, L], from before the chunk to each token [m, L, 1], from each token to the
    chunk's end [m, L, 1] and across the chunk [m, 1, 1].
    """
    L = c.shape[-1]
    hidden = torch.full((L, L), -torch.inf, dtype=c.dtype, device=c.device).triu_(1)
    reach = c.exp()
    if visible is not None:
        hidden = hidden.masked_fill(~visible.same, -torch.inf)[:, :, None]
        reach = reach * visible.reads[:, :, None]
    # Masked before exp: above the diagonal it would overflow.
    decay = (c[..., :, None] - c[..., None, :]).add_(hidden).exp_().view(-1, L, L)
    reach = reach.view(-1, L, 1)
    return decay, reach, decay[:, -1, :, None], reach[:, -1:]


def _scale(stacked: Tensor, factor: Tensor) -> Tensor:
    """Both halves of [m, 2 L, X] times factor [m, L, X or 1], in place."""
    stacked.view(len(factor), 2, -1, stacked.shape[-1]).mul_(factor[:, None])
    return stacked


def _prepare(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, layout: Layout | None) -> list[Tensor]:
    q, k, v, beta, log_decay = (at_least_float32(x) for x in (q, k, v, beta, log_decay))
    if layout is not None and layout.valid is not None:
        padding = ~layout.valid[..., None]
        beta = beta.masked_fill(padding, 0.0)
        log_decay = log_decay.masked_fill(padding, 0.0)
    return [q, k, v, beta, bounded_log_decay(log_decay)]


def _check(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, initial_state: Tensor | None) -> None:
    check_log_decay(log_decay)
    B, T, H, V = v.shape
    K = k.shape[-1]
    if q.shape != (B, T, H, K) or k.shape != q.shape or beta.shape != (B, T, H) or log_decay.shape != (B, T, H):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, beta, log_decay))
        raise ValueError(f"gated_delta_rule wants q, k [B,T,H,K], v [B,T,H,V], beta, log_decay [B,T,H]; got {shapes}")
    if initial_state is not None and initial_state.shape != (B, H, K, V):
        raise ValueError(f"initial_state must be {(B, H, K, V)}, not {tuple(initial_state.shape)}")
