"""Softmax attention, and the same as kriging: sources of known precision, and how sure the estimate is.

    a~_tj = a_tj lbar_j / sum_j' a_tj' lbar_j' = softmax_j(q_t . k_j / sqrt(K) + log lbar_j)
    e_t   = sum_j a~_tj v_j           n_t = 1 / sum_j a~_tj^2          effective sample size
    m2_t  = sum_j a~_tj v_j^2         i_t = sum_j a~_tj / lbar_j       mean variance of the sources

Source: arXiv 2605.18832 (BFT); kriging weights by a bias on the logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from decaybench.models.ops.precision import at_least_float32, keeps_precision, without_autocast


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
def kriging_attention(q: Tensor, k: Tensor, v: Tensor, lbar: Tensor | None, mask: Tensor | None) -> Kriged:
    """Attention over keys of precision lbar, float32 [B, S] > 0 (None: all 1); the rest as `softmax_attention`."""
    B, T = q.shape[:2]
    H, V = v.shape[2:]
    q, k, v = (at_least_float32(part).transpose(1, 2) for part in (q, k, v))
    if lbar is None:
        lbar = v.new_ones(B, v.shape[2])
    hidden = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1) if mask is None else ~mask
    inverse = lbar.reciprocal()[:, None, :, None].expand(B, H, -1, 1)
    sources = torch.cat([v, v * v, inverse], dim=-1)
    sums, squares = _Kriging.apply(q * q.shape[-1] ** -0.5, k, sources, lbar.log(), hidden)  # type: ignore[no-untyped-call]
    means, i = torch.split(sums.transpose(1, 2), [2 * V, 1], dim=-1)
    return Kriged(means, squares.transpose(1, 2).reciprocal(), i[..., 0])


class _Kriging(torch.autograd.Function):
    """Weighted sums of `sources` and the sum of squared weights, with their gradient in as few passes over T x S as
    there can be. q: [B, H, T, K]; k: [B, H, S, K]; sources: [B, H, S, W]; bias: [B, S]; hidden: bool, broadcasts to
    [B, H, T, S]. Returns [B, H, T, W] and [B, H, T].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, sources: Tensor, bias: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        weights = q @ k.mT
        weights += bias[:, None, None, :]
        weights = weights.masked_fill_(hidden, -torch.inf).softmax(-1)
        sums = weights @ sources
        squares = torch.linalg.vector_norm(weights, dim=-1).square()
        ctx.save_for_backward(q, k, sources, weights, sums, squares)
        return sums, squares

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dsums: Tensor, dsquares: Tensor) -> tuple[Tensor | None, ...]:
        q, k, sources, weights, sums, squares = ctx.saved_tensors
        with without_autocast(dsums):
            # The mean of the weights' gradients under the weights, without a pass over T x S.
            mean = torch.einsum("bhtw,bhtw->bht", dsums, sums) + 2 * dsquares * squares
            dscores = dsums @ sources.mT
            dscores.addcmul_(weights, 2 * dsquares[..., None]).sub_(mean[..., None]).mul_(weights)
            dq, dk, dsources = dscores @ k, dscores.mT @ q, weights.mT @ dsums
            dbias = dscores.sum((1, 2))
        return dq, dk, dsources, dbias, None
