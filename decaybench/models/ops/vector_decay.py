"""Linear attention with a decay of every key channel: gated linear attention (GLA).

    S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T        o_t = S_t^T q_t        S in R^{K x V}, one a head

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", arXiv 2312.06635,
equation 3 (recurrence) and section 4 (chunks inside chunks). Log-decays, their sums and the state are float32 whatever
q, k, v are (float64 stays float64). Padding (position 0) is an identity step; a document start (position 1) makes
everything before it invisible by a mask, never by a log-decay of -inf.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decaybench.core.positions import Layout
from decaybench.models.ops.chunks import (
    Visible,
    add_product,
    chunks_of_heads,
    fill_last_chunk,
    product_into,
    tokens_of_heads,
)
from decaybench.models.ops.decayed_scores import decayed_scores, decayed_scores_backward
from decaybench.models.ops.precision import (
    at_least_float32,
    bounded_log_decay,
    check_log_decay,
    keeps_precision,
    without_autocast,
)

DEFAULT_CHUNK = 32


def vector_decay(
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

    q, k: [B, T, H, K]; v: [B, T, H, V]; log_decay: [B, T, H, K], <= 0; initial_state: [B, H, K, V].
    layout: what `positions` say (see core.positions); None means that every row is one document without padding.
    Returns o [B, T, H, V] in v's dtype and, if asked, the final state [B, H, K, V] in float32 (or float64).
    Raises ValueError on shapes that don't fit, on log-decays below float32 and on an unknown backend.
    """
    if backend != "torch":
        raise ValueError(f"vector_decay has no backend {backend!r}; known: torch")
    _check(q, k, v, log_decay, initial_state)
    if v.shape[1] == 1:
        return vector_decay_recurrent(
            q, k, v, log_decay, initial_state=initial_state, output_final_state=output_final_state, layout=layout
        )
    return vector_decay_chunked(
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
def vector_decay_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    layout: Layout | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The definition, one step after the other. Arguments and results as `vector_decay`."""
    dtype = v.dtype
    q, k, v, log_decay = _prepare(q, k, v, log_decay, layout)
    B, T, H, V = v.shape
    S = v.new_zeros(B, H, k.shape[-1], V) if initial_state is None else initial_state.to(v.dtype)
    out = []
    for t in range(T):
        if layout is not None and layout.resets is not None:
            S = S.masked_fill(layout.resets[:, t, None, None, None], 0.0)
        S = log_decay[:, t].exp()[..., None] * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(out, dim=1).to(dtype), S if output_final_state else None


@keeps_precision
def vector_decay_chunked(
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
    """The fast form: matrix products inside chunks of tokens, a scan over chunks for the state.

    Arguments and results as `vector_decay`; any T >= 1 and any chunk_size >= 1, which is rounded up to a power of two,
    give the same result.
    """
    dtype = v.dtype
    T = v.shape[1]
    L = 1 << (min(chunk_size, T) - 1).bit_length()
    inputs, visible = fill_last_chunk(L, layout, *_prepare(q, k, v, log_decay, layout))
    o, state = _Chunked.apply(*inputs, initial_state, visible, L, output_final_state)  # type: ignore[no-untyped-call]
    return o[:, :T].to(dtype), state


class _Chunked(torch.autograd.Function):
    """Inside chunks o = scores v + (q since_start) S, from chunk to chunk S' = decay S + (k until_end)^T v.

    Written with its gradient, in which the log-decays come almost free (see `decayed_scores_backward`).
    q, k, v, log_decay, initial_state: as `vector_decay`, T a multiple of L, the tokens of a chunk. Returns o and, where
    `keep` asks for it, the final state.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        initial_state: Tensor | None,
        visible: Visible | None,
        L: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v, log_decay = (_in_chunks(x, L) for x in (q, k, v, log_decay))
        N, B, H, _, K = q.shape
        whole = log_decay.sum(3).exp()  # [N, B, H, K]; since's last row would add up rounding from chunk to chunk
        decay = log_decay.exp_()
        scores, since, until = decayed_scores(q[:, :, :, None], k[:, :, :, None], decay)
        scores = scores.view(N, B, H, L, L)
        pairs = None
        if visible is not None:
            pairs = visible.same[:, :, None]
            scores *= pairs
            since *= visible.reads[:, :, None, :, None]
            until *= visible.writes[:, :, None, :, None]
            whole *= visible.passes[:, :, None, None]

        # The state before each chunk that reads one, and after the last if asked for: M chunks write to it.
        M = N if keep else N - 1
        first = 1 if initial_state is None else 0  # the first chunk that has anything before it
        states = v.new_empty(M + 1, B, H, K, v.shape[-1])
        states[0] = 0.0 if initial_state is None else initial_state
        product_into(states[1:], (k[:M] * until[:M]).mT, v[:M])
        for n in range(M):
            states[n + 1].addcmul_(whole[n, ..., None], states[n])

        o = scores @ v
        add_product(o[first:], q[first:] * since[first:], states[first:N])
        ctx.save_for_backward(q, k, v, decay, whole, scores, since, until, states, pairs)
        ctx.first, ctx.initial_dtype = first, None if initial_state is None else initial_state.dtype
        return tokens_of_heads(o), states[N].clone() if keep else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        with without_autocast(do):
            *gradients, dinitial = _gradients(ctx.saved_tensors, ctx.first, do, dfinal)
        dtype = ctx.initial_dtype
        return *gradients, None if dtype is None else dinitial.to(dtype), None, None, None


def _gradients(saved: tuple[Tensor, ...], first: int, do: Tensor, dfinal: Tensor | None) -> tuple[Tensor, ...]:
    """Of q, k, v, log_decay and the first state."""
    q, k, v, decay, whole, scores, since, until, states, pairs = saved
    N, _, _, L, _ = q.shape
    M = len(states) - 1
    do = _in_chunks(do, L)

    # dstates[n] is the gradient of the state before chunk n: what the chunk reads of it, and what it leaves of it
    dstates = torch.empty_like(states)
    dstates[:first] = 0.0
    if dfinal is not None:
        dstates[N] = dfinal
    product_into(dstates[first:N], (q[first:] * since[first:]).mT, do[first:])
    for n in reversed(range(M)):
        dstates[n].addcmul_(whole[n, ..., None], dstates[n + 1])

    dv = scores.mT @ do
    add_product(dv[:M], k[:M] * until[:M], dstates[1:])
    dscores = do @ v.mT
    if pairs is not None:
        dscores *= pairs
    dq, dk = decayed_scores_backward(q[:, :, :, None], k[:, :, :, None], decay, dscores[:, :, :, None, :, None, :])
    dq, dk = dq[:, :, :, 0], dk[:, :, :, 0]
    dq[first:].addcmul_(since[first:], do[first:] @ states[first:N].mT)
    dk[:M].addcmul_(until[:M], v[:M] @ dstates[1:].mT)
    dsum = (q * dq).addcmul_(k, dk, value=-1)
    dsum[:M, ..., -1, :] += (states[1:] * dstates[1:]).sum(-1)
    dlog_decay = torch.ones(L, L, dtype=q.dtype, device=q.device).triu() @ dsum
    return *(tokens_of_heads(x) for x in (dq, dk, dv, dlog_decay)), dstates[0]


def _in_chunks(x: Tensor, L: int) -> Tensor:
    """x [B, T, H, K] as a fresh [N, B, H, L, K]."""
    return chunks_of_heads(x, L).clone(memory_format=torch.contiguous_format)


def _prepare(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, layout: Layout | None) -> tuple[Tensor, ...]:
    q, k, v, log_decay = (at_least_float32(x) for x in (q, k, v, log_decay))
    if layout is not None and layout.valid is not None:
        padding = ~layout.valid[..., None, None]
        k, log_decay = k.masked_fill(padding, 0.0), log_decay.masked_fill(padding, 0.0)
    return q, k, v, bounded_log_decay(log_decay)


def _check(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, initial_state: Tensor | None) -> None:
    check_log_decay(log_decay)
    B, T, H, V = v.shape
    K = k.shape[-1]
    if not q.shape == k.shape == log_decay.shape == (B, T, H, K):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, log_decay))
        raise ValueError(f"vector_decay wants q, k, log_decay [B,T,H,K] and v [B,T,H,V]; got {shapes}")
    if initial_state is not None and initial_state.shape != (B, H, K, V):
        raise ValueError(f"initial_state must be {(B, H, K, V)}, not {tuple(initial_state.shape)}")
