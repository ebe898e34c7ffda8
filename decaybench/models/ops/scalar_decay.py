"""Linear attention with one decay a head: Mamba-2's state space duality, RetNet.

    S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T        o_t = S_t^T q_t        S in R^{K x V}, one a head

Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060, section 6 (chunked algorithm).
q and k may be shared by the heads of a group (G groups, H heads, H a multiple of G). Log-decays, their cumulative
sums and the state are float32 whatever q, k, v are (float64 stays float64). Padding (position 0) is an identity step;
a document start (position 1) makes everything before it invisible by a mask, never by a log-decay of -inf.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from decaybench.core.positions import Layout
from decaybench.models.ops.chunks import (
    Visible,
    chunks,
    chunks_of_heads,
    fill_last_chunk,
    product_into,
    tokens_of_heads,
)
from decaybench.models.ops.precision import (
    at_least_float32,
    bounded_log_decay,
    check_log_decay,
    keeps_precision,
    without_autocast,
)

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
    Raises ValueError on shapes that don't fit, on log-decays below float32 and on an unknown backend.
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
    T = v.shape[1]
    L = min(chunk_size, T)
    (q, k, v, log_decay), visible = fill_last_chunk(L, layout, q, k, v, log_decay)
    start = None if initial_state is None else initial_state.to(v.dtype)
    o, final = _Chunked.apply(q, k, v, log_decay, start, visible, L, output_final_state)  # type: ignore[no-untyped-call]
    return o[:, :T].to(dtype), final


class _Chunked(torch.autograd.Function):
    """The chunked form with its gradient: autograd's own backward takes twice as long on a CPU.

    With c the log-decay summed from its chunk's start, each token's own included, D_ij = exp(c_i - c_j) inside a chunk
    and S_n the state before chunk n:

        o_i     = sum_{j <= i} D_ij (q_i . k_j) v_j + exp(c_i) S_n^T q_i
        S_{n+1} = exp(c_end) S_n + sum_j exp(c_end - c_j) k_j v_j^T

    c_i multiplies all that o_i holds, and -c_j all that v_j goes into, so the gradient of c needs no pass over D:
    dc_i = o_i . do_i - v_i . dv_i, and c_end gets S_{n+1} . dS_{n+1} beside.
    q, k: [B, T, G, K]; v: [B, T, H, V]; log_decay: [B, T, H]; start: [B, H, K, V] or None; T a multiple of L. Returns o
    like v and, where `keep` asks for it, the final state. Inside, chunks come first ([N, B, L, ...]): the states of all
    chunks but the first or the last then lie in one piece.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        start: Tensor | None,
        visible: Visible | None,
        L: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        q, k = (chunks_of_heads(x, L).contiguous() for x in (q, k))  # [N, B, G, L, K]
        v = chunks(v, L)
        N, B, G, _, K = q.shape
        H, V = v.shape[3:]
        decays = _decays(chunks(log_decay, L), visible)

        # 1. inside a chunk
        scores = decays.hide(q @ k.mT)
        weights = (torch.unflatten(decays.inside, 2, (G, -1)) * scores[:, :, :, None]).flatten(2, 3)
        v_heads = v.transpose(2, 3).contiguous()
        inside = (weights @ v_heads).transpose(2, 3)

        # 2. the state before each chunk that reads one, and after the last if asked for, by a scan over chunks
        M = N if keep else N - 1
        written = _grouped(v[:M] * decays.weight[:M, ..., None], G)
        states = q.new_empty(M + 1, B, G, K, H // G * V)
        states[0] = 0.0 if start is None else _grouped_state(start, G)
        product_into(states[1:], k[:M].mT, written)
        carry = _per_channel(decays.carry, G, V)
        for n in range(M):
            states[n + 1].addcmul_(carry[n], states[n])

        # 3. what the tokens of a chunk read from before it
        o = v.new_empty(B, N, L, H, V)
        o_chunks = o.transpose(0, 1)
        first = 1 if start is None else 0  # the first chunk with anything before it
        o_chunks[:first] = inside[:first]
        if first < N:
            before = _ungrouped(q[first:] @ states[first:N], H).mul_(decays.reach[first:, ..., None])
            torch.add(inside[first:], before, out=o_chunks[first:])
        o = o.flatten(1, 2)
        ctx.save_for_backward(q, k, v_heads, weights, written, states, o, *decays)
        ctx.first = first
        return o, _state_of_heads(states[N], H) if keep else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        with without_autocast(do):
            return _gradients(ctx.saved_tensors, ctx.first, do, dfinal)


def _gradients(saved: tuple[Tensor, ...], first: int, do: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v_heads, weights, written, states, o, *rest = saved
    decays = _Decays(*rest)
    N, B, G, L, _ = q.shape
    H, V = v_heads.shape[2], v_heads.shape[4]
    M = len(written)
    do_chunks = chunks(do, L)

    # 1. inside a chunk
    do_heads = do_chunks.transpose(2, 3).contiguous()
    dweights = (do_heads @ v_heads.mT).mul_(decays.inside)
    dscores = decays.hide(torch.unflatten(dweights, 2, (G, -1)).sum(3))
    dq, dk = dscores @ k, dscores.mT @ q
    dv_inside = (weights.mT @ do_heads).transpose(2, 3)

    # 2. what was read from the states, and the scan back: dstates[n] is the gradient of the state before chunk n
    dstates = torch.empty_like(states)
    dstates[:first] = 0.0
    if dfinal is not None:
        dstates[N] = _grouped_state(dfinal, G)
    if first < N:
        dread = _grouped(do_chunks[first:] * decays.reach[first:, ..., None], G)
        dq[first:] += dread @ states[first:N].mT
        product_into(dstates[first:N], q[first:].mT, dread)
    dc_end = _scan_back(states, dstates, decays.carry)

    # 3. what was written to the states
    dv = do.new_empty(B, N, L, H, V)
    dv_chunks = dv.transpose(0, 1)
    dv_chunks[M:] = dv_inside[M:]
    if M:
        dk[:M] += written @ dstates[1:].mT
        dwritten = _ungrouped(k[:M] @ dstates[1:], H).mul_(decays.weight[:M, ..., None])
        torch.add(dv_inside[:M], dwritten, out=dv_chunks[:M])

    dc = chunks((o * do).sum(-1), L) - (v_heads.transpose(2, 3) * dv_chunks).sum(-1)
    dc[:M, :, -1] += dc_end
    dlog_decay = dc.flip(2).cumsum(2).flip(2)
    dstart = None if first else _state_of_heads(dstates[0], H)
    dq, dk, dv = tokens_of_heads(dq), tokens_of_heads(dk), dv.flatten(1, 2)
    return dq, dk, dv, dlog_decay.transpose(0, 1).flatten(1, 2), dstart, None, None, None


def _scan_back(states: Tensor, dstates: Tensor, carry: Tensor) -> Tensor:
    """From what each chunk reads of the state before it to all that the later ones do, in place in dstates.

    states, dstates: [M + 1, B, G, K, (H/G) V]; carry: [N, B, H]. Returns S_{n+1} . dS_{n+1}, [M, B, H].
    """
    M, (B, G, _, width), H = len(states) - 1, states.shape[1:], carry.shape[2]
    V = width * G // H
    carry = _per_channel(carry, G, V)
    products = states.new_empty(M, B, H)
    scratch = torch.empty_like(states[0])
    for n in reversed(range(M)):
        torch.mul(states[n + 1], dstates[n + 1], out=scratch)
        products[n] = scratch.sum(2).view(B, H, V).sum(2)
        dstates[n].addcmul_(carry[n], dstates[n + 1])
    return products


class _Decays(NamedTuple):
    """Decays between the places of a chunk, each exp of a number <= 0; 0 across the start of a document.

    inside: [N, B, H, L, L], from token j to token i (1 above the diagonal and across documents, where `hide` applies).
    reach: [N, B, L, H], from the chunk's start to token i. weight: [N, B, L, H], from token j to the chunk's end.
    carry: [N, B, H], over the whole chunk. same: bool [N, B, 1, L, L], whether two tokens share a document, or None.
    """

    inside: Tensor
    reach: Tensor
    weight: Tensor
    carry: Tensor
    same: Tensor | None

    def hide(self, scores: Tensor) -> Tensor:
        """Scores [N, B, G, L, L], in place, with 0 where token i doesn't see token j."""
        scores.tril_()
        return scores if self.same is None else scores.masked_fill_(~self.same, 0.0)


def _decays(log_decay: Tensor, visible: Visible | None) -> _Decays:
    """log_decay: [N, B, L, H]."""
    c = log_decay.cumsum(2)
    c_heads, c_end = c.transpose(2, 3).contiguous(), c[:, :, -1]
    # Bounded before exp: above the diagonal it would overflow.
    inside = (c_heads[..., :, None] - c_heads[..., None, :]).clamp_(max=0.0).exp_()
    reach, weight, carry = c.exp(), (c_end[:, :, None] - c).exp_(), c_end.exp()
    if visible is None:
        return _Decays(inside, reach, weight, carry, None)
    reach = reach * visible.reads[..., None]
    weight = weight * visible.writes[..., None]
    carry = carry * visible.passes[..., None]
    return _Decays(inside, reach, weight, carry, visible.same[:, :, None])


def _prepare(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, layout: Layout | None) -> tuple[Tensor, ...]:
    q, k, v, log_decay = (at_least_float32(x) for x in (q, k, v, log_decay))
    if layout is not None and layout.valid is not None:
        padding = ~layout.valid
        k = k.masked_fill(padding[..., None, None], 0.0)
        log_decay = log_decay.masked_fill(padding[..., None], 0.0)
    return q, k, v, bounded_log_decay(log_decay)


def _grouped(x: Tensor, G: int) -> Tensor:
    return torch.unflatten(x, 3, (G, -1)).flatten(4).transpose(2, 3)  # [N, B, L, H, V] -> [N, B, G, L, (H/G) V]


def _ungrouped(x: Tensor, H: int) -> Tensor:
    return torch.unflatten(x.transpose(2, 3).flatten(3), 3, (H, -1))  # [N, B, G, L, (H/G) V] -> [N, B, L, H, V]


def _grouped_state(state: Tensor, G: int) -> Tensor:
    return torch.unflatten(state, 1, (G, -1)).transpose(2, 3).flatten(3)  # [B, H, K, V] -> [B, G, K, (H/G) V]


def _state_of_heads(state: Tensor, H: int) -> Tensor:
    G = state.shape[1]
    return torch.unflatten(state, 3, (H // G, -1)).transpose(2, 3).flatten(1, 2)  # [B, G, K, (H/G) V] -> [B, H, K, V]


def _per_channel(decay: Tensor, G: int, V: int) -> Tensor:
    """[N, B, H] as [N, B, G, 1, (H/G) V], to multiply grouped states: written out, addcmul is slow without."""
    return torch.unflatten(decay.repeat_interleave(V, dim=2), 2, (G, 1, -1))


def _check(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, initial_state: Tensor | None) -> None:
    check_log_decay(log_decay)
    B, T, H, V = v.shape
    G, K = k.shape[2:]
    if q.shape != (B, T, G, K) or k.shape != q.shape or log_decay.shape != (B, T, H) or H % G:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, log_decay))
        raise ValueError(f"scalar_decay wants q, k [B,T,G,K], v [B,T,H,V], log_decay [B,T,H], H % G = 0; got {shapes}")
    if initial_state is not None and initial_state.shape != (B, H, K, V):
        raise ValueError(f"initial_state must be {(B, H, K, V)}, not {tuple(initial_state.shape)}")
