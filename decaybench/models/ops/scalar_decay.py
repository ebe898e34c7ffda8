"""Linear attention with one decay a head: Mamba-2's state space duality, RetNet.

    S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T        o_t = S_t^T q_t        S in R^{K x V}, one a head

Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060, section 6 (chunked algorithm).
q and k may be shared by the heads of a group (G groups, H heads, H a multiple of G). Log-decays, their cumulative
sums and the state are float32 whatever q, k, v are (float64 stays float64). Padding (position 0) is an identity step;
a document start (position 1) makes everything before it invisible by a mask, never by a log-decay of -inf.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from decaybench.core.positions import Layout
from decaybench.models.ops.precision import at_least_float32, bounded_log_decay, keeps_precision, without_autocast

DEFAULT_CHUNK = 32


def scalar_decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    layout: Layout | None = None,
    chunk_size: int = DEFAULT_CHUNK,
    backend: str = "torch",
) -> tuple[Tensor, Tensor | None]:
    """The recurrence by the form that suits its length: the loop for one token, the chunked form for more.

    q, k: [B, T, G, K]; v: [B, T, H, V]; log_decay: [B, T, H], <= 0; initial_state: [B, H, K, V].
    layout: what `positions` say (see core.positions); None means that every row is one document without padding.
    Returns o [B, T, H, V] in v's dtype and, if asked, the final state [B, H, K, V] in float32 (or float64).
    Raises ValueError on shapes that don't fit and on an unknown backend.
    """
    if backend != "torch":
        raise ValueError(f"scalar_decay has no backend {backend!r}; known: torch")
    _check(q, k, v, log_decay, initial_state)
    if v.shape[1] == 1:
        return scalar_decay_recurrent(
            q, k, v, log_decay, initial_state=initial_state, output_final_state=output_final_state, layout=layout
        )
    return scalar_decay_chunked(
        q,
        k,
        v,
        log_decay,
        initial_state=initial_state,
        output_final_state=output_final_state,
        layout=layout,
        chunk_size=chunk_size,
    )


@keeps_precision
def scalar_decay_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    layout: Layout | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The definition, one step after the other. Arguments and results as `scalar_decay`."""
    dtype = v.dtype
    q, k, v, log_decay = _prepare(q, k, v, log_decay, layout)
    B, T, H, V = v.shape
    K, shared = k.shape[-1], H // k.shape[2]
    q, k = (x.repeat_interleave(shared, dim=2) for x in (q, k))
    S = v.new_zeros(B, H, K, V) if initial_state is None else initial_state.to(v.dtype)
    out = []
    for t in range(T):
        if layout is not None and layout.resets is not None:
            S = S.masked_fill(layout.resets[:, t, None, None, None], 0.0)
        S = log_decay[:, t].exp()[..., None, None] * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(out, dim=1).to(dtype), S if output_final_state else None


@keeps_precision
def scalar_decay_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    layout: Layout | None = None,
    chunk_size: int = DEFAULT_CHUNK,
) -> tuple[Tensor, Tensor | None]:
    """The fast form: matrix products inside chunks of `chunk_size` tokens, a scan over chunks for the state.

    Arguments and results as `scalar_decay`; any T >= 1 and any chunk_size >= 1 give the same result.
    """
    dtype = v.dtype
    q, k, v, log_decay = _prepare(q, k, v, log_decay, layout)
    B, T, H, V = v.shape
    G, K = k.shape[2:]
    L = min(chunk_size, T)
    N = -(-T // L)
    segments = None if layout is None or layout.segments is None else layout.segments.expand(B, T)
    if N * L != T:  # zero keys and zero log-decays: identity steps behind the last token
        extra = N * L - T
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, extra)) for x in (q, k, v))
        log_decay = F.pad(log_decay, (0, 0, 0, extra))
        if segments is not None:
            segments = torch.cat([segments, segments[:, -1:].expand(B, extra)], dim=1)

    # 1. inside a chunk: c is the log-decay summed from the chunk's start, each token's own included
    c = log_decay.view(B, N, L, H).cumsum(2)
    same = None if segments is None else segments.view(B, N, L)
    q, k = (x.view(B, N, L, G, K).transpose(2, 3) for x in (q, k))  # [B, N, G, L, K]
    v = v.view(B, N, L, H, V)
    pairs = None if same is None else same[..., :, None] == same[..., None, :]
    o: Tensor = _Inside.apply(q, k, v, c, pairs)  # type: ignore[no-untyped-call]

    # 2. what each chunk adds to the state by its end
    c_end = c[:, :, -1:]
    weight = (c_end - c).exp()
    if same is not None:
        weight = weight * (same == same[..., -1:])[..., None]
    added = k.transpose(-1, -2) @ _group(v * weight[..., None], G)  # [B, N, G, K, (H/G) V]

    # 3. the state before each chunk, by a scan over chunks
    carry = c_end[:, :, 0].exp()  # [B, N, H]
    before = torch.zeros(B, N, dtype=torch.long, device=v.device)
    if same is not None:
        before = F.pad(same[:, :-1, -1], (1, 0))  # segment of the token before the chunk; 0: the initial state's
        carry = carry * (same[..., -1] == before)[..., None]
    carry = carry.view(B, N, G, 1, H // G, 1).expand(-1, -1, -1, -1, -1, V).reshape(B, N, G, 1, -1)
    state = added.new_zeros(B, G, K, H // G * V)
    if initial_state is not None:
        state = initial_state.to(v.dtype).view(B, G, H // G, K, V).transpose(2, 3).reshape(B, G, K, -1)
    states = []
    for n in range(N):
        states.append(state)
        state = torch.addcmul(added[:, n], carry[:, n], state)

    # 4. what the tokens of a chunk read from before it
    if N > 1 or initial_state is not None:
        reach = c.exp()
        if same is not None:
            reach = reach * (same == before[..., None])[..., None]
        o = torch.addcmul(o, reach[..., None], _ungroup(q @ torch.stack(states, dim=1), H))
    o = o.reshape(B, N * L, H, V)[:, :T].to(dtype)
    if not output_final_state:
        return o, None
    return o, state.view(B, G, K, H // G, V).transpose(2, 3).reshape(B, H, K, V)


class _Inside(torch.autograd.Function):
    """o_i = sum_{j <= i} exp(c_i - c_j) (q_i . k_j) v_j inside each chunk, over j of the same segment.

    Written with its gradient because the [L, L] weights of every head dominate a training step on a CPU: autograd's
    own backward makes about twice as many passes over them. With W_ij = exp(c_i - c_j) q_i . k_j, the gradient of c
    needs no pass at all: sum_j W_ij dW_ij = o_i . do_i and sum_i W_ij dW_ij = v_j . dv_j.
    q, k: [B, N, G, L, K]; v: [B, N, L, H, V]; c: [B, N, L, H]; same: bool [B, N, L, L] or None. Returns o as v.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, c: Tensor, same: Tensor | None) -> Tensor:
        B, N, G, L, _ = q.shape
        H = c.shape[-1]
        hidden = torch.ones(L, L, dtype=torch.bool, device=q.device).triu(1)
        if same is not None:
            hidden = (hidden | ~same)[:, :, None]
        c = c.transpose(2, 3)
        decay = c[..., :, None] - c[..., None, :]
        decay.masked_fill_(hidden, -torch.inf).exp_()  # masked before exp: above the diagonal it would overflow
        weights = (decay.view(B, N, G, H // G, L, L) * (q @ k.transpose(-1, -2))[:, :, :, None]).view(decay.shape)
        v = v.transpose(2, 3)
        o = weights @ v
        ctx.save_for_backward(q, k, v, decay, weights, o)
        return o.transpose(2, 3)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        q, k, v, decay, weights, o = ctx.saved_tensors
        B, N, G, L, _ = q.shape
        do = do.transpose(2, 3)
        with without_autocast(do):
            dv = weights.transpose(-1, -2) @ do
            dscores = (do @ v.transpose(-1, -2)).mul_(decay).view(B, N, G, -1, L, L).sum(3)
            dc = (o * do).sum(-1) - (v * dv).sum(-1)
            return dscores @ k, dscores.transpose(-1, -2) @ q, dv.transpose(2, 3), dc.transpose(2, 3), None


def _prepare(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, layout: Layout | None) -> tuple[Tensor, ...]:
    q, k, v, log_decay = (at_least_float32(x) for x in (q, k, v, log_decay))
    if layout is not None and layout.valid is not None:
        padding = ~layout.valid
        k = k.masked_fill(padding[..., None, None], 0.0)
        log_decay = log_decay.masked_fill(padding[..., None], 0.0)
    return q, k, v, bounded_log_decay(log_decay)


def _group(x: Tensor, G: int) -> Tensor:
    B, N, L, H, V = x.shape
    return x.reshape(B, N, L, G, H // G * V).transpose(2, 3)  # [B, N, G, L, (H/G) V]


def _ungroup(x: Tensor, H: int) -> Tensor:
    B, N, _, L, _ = x.shape
    return x.transpose(2, 3).reshape(B, N, L, H, -1)


def _check(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, initial_state: Tensor | None) -> None:
    B, T, H, V = v.shape
    G, K = k.shape[2:]
    if q.shape != (B, T, G, K) or k.shape != q.shape or log_decay.shape != (B, T, H) or H % G:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, log_decay))
        raise ValueError(f"scalar_decay wants q, k [B,T,G,K], v [B,T,H,V], log_decay [B,T,H], H % G = 0; got {shapes}")
    if initial_state is not None and initial_state.shape != (B, H, K, V):
        raise ValueError(f"initial_state must be {(B, H, K, V)}, not {tuple(initial_state.shape)}")
