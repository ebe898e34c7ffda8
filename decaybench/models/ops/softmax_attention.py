"""Softmax attention, and the same as kriging: sources of known precision, and how sure the estimate is.

    a~_tj = a_tj lbar_j / sum_j' a_tj' lbar_j' = softmax_j(q_t . k_j / sqrt(K) + log lbar_j)
    e_t   = sum_j a~_tj v_j           n_t = 1 / sum_j a~_tj^2          effective sample size
    m2_t  = sum_j a~_tj v_j^2         i_t = sum_j a~_tj / lbar_j       mean variance of the sources

Source: arXiv 2605.18832 (BFT); kriging weights by a bias on the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from decaybench.models.ops.precision import at_least_float32, keeps_precision, without_autocast

_BLOCK = 64  # queries


class Kriged(NamedTuple):
    """means: [B, T, H, 2 V], e and m2; n, i: [B, T, H]; float32 (float64 stays)."""

    means: Tensor
    n: Tensor
    i: Tensor


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q: [B, T, H, K]; k: [B, S, H, K]; v: [B, S, H, V]; mask: bool [B, 1, T, S], True where token t sees key s; None:
    every token sees itself and all before it, S = T. Returns [B, T, H, V].
    """
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).transpose(1, 2)


@keeps_precision
def kriging_attention(q: Tensor, k: Tensor, v: Tensor, lbar: Tensor, mask: Tensor | None) -> Kriged:
    """Attention over keys of precision lbar, float32 [B, S] > 0; the rest as `softmax_attention`."""
    B, (H, V) = len(v), v.shape[2:]
    q, k, v = (at_least_float32(part).transpose(1, 2) for part in (q, k, v))
    inverse = lbar.reciprocal()[:, None, :, None].expand(B, H, -1, 1)
    sources = torch.cat([v, v * v, inverse], dim=-1)
    sums, squares = _Kriging.apply(q * q.shape[-1] ** -0.5, k, sources, lbar.log(), mask)  # type: ignore[no-untyped-call]
    means, i = torch.split(sums.transpose(1, 2), [2 * V, 1], dim=-1)
    return Kriged(means, squares.transpose(1, 2).reciprocal(), i[..., 0])


class _Kriging(torch.autograd.Function):
    """Weighted sums of `sources` and the sum of squared weights, with their gradient.

    By blocks of queries, whose weights are made again for the gradient: never more than a block of them is in memory,
    and what causality hides isn't computed. q: [B, H, T, K]; k: [B, H, S, K]; sources: [B, H, S, W]; bias: [B, S];
    mask: as in `softmax_attention`. Returns [B, H, T, W] and [B, H, T].
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, sources: Tensor, bias: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        sums, squares = q.new_empty(*q.shape[:3], sources.shape[-1]), q.new_empty(q.shape[:3])
        for rows, S in _blocks(q.shape[2], k.shape[2], mask):
            weights = _weights(q, k, bias, mask, rows, S)
            sums[:, :, rows] = weights @ sources[:, :, :S]
            squares[:, :, rows] = torch.linalg.vector_norm(weights, dim=-1).square_()
        ctx.save_for_backward(q, k, sources, bias, mask, sums, squares)
        return sums, squares

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dsums: Tensor, dsquares: Tensor) -> tuple[Tensor | None, ...]:
        q, k, sources, bias, mask, sums, squares = ctx.saved_tensors
        dq, dk, dsources, dbias = (torch.zeros_like(part) for part in (q, k, sources, bias))
        with without_autocast(dsums):
            # The mean of the weights' gradients under the weights, without a pass over T x S.
            mean = torch.einsum("bhtw,bhtw->bht", dsums, sums) + 2 * dsquares * squares
            for rows, S in _blocks(q.shape[2], k.shape[2], mask):
                weights = _weights(q, k, bias, mask, rows, S)
                dblock, q_block = dsums[:, :, rows], q[:, :, rows]
                dscores = dblock @ sources[:, :, :S].mT
                dscores.addcmul_(weights, 2 * dsquares[:, :, rows, None]).sub_(mean[:, :, rows, None]).mul_(weights)
                dq[:, :, rows] = dscores @ k[:, :, :S]
                dk[:, :, :S] += dscores.mT @ q_block
                dsources[:, :, :S] += weights.mT @ dblock
                dbias[:, :S] += dscores.sum((1, 2))
        return dq, dk, dsources, dbias, None


def _blocks(T: int, S: int, mask: Tensor | None) -> Iterator[tuple[slice, int]]:
    """Rows of queries, and the number of keys that they may see."""
    for start in range(0, T, _BLOCK):
        stop = min(start + _BLOCK, T)
        yield slice(start, stop), S if mask is not None else stop


def _weights(q: Tensor, k: Tensor, bias: Tensor, mask: Tensor | None, rows: slice, S: int) -> Tensor:
    """[B, H, rows, S]."""
    scores = q[:, :, rows] @ k[:, :, :S].mT
    scores += bias[:, None, None, :S]
    if mask is not None:
        scores.masked_fill_(~mask[:, :, rows], -torch.inf)
    else:
        n = scores.shape[2]
        later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        scores[..., S - n :].masked_fill_(later, -torch.inf)
    return scores.softmax(-1)
