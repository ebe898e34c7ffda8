"""Softmax attention, and the same as kriging: sources of known precision, and how sure the estimate is.

    a~_tj = a_tj lbar_j / sum_j' a_tj' lbar_j' = softmax_j(q_t . k_j / sqrt(K) + log lbar_j)
    e_t   = sum_j a~_tj v_j           n_t = 1 / sum_j a~_tj^2          effective sample size
    m2_t  = sum_j a~_tj v_j^2         i_t = sum_j a~_tj / lbar_j       mean variance of the sources

Source: arXiv 2605.18832 (BFT); kriging weights by a bias on the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from decaybench.models.ops.pieces import pieces
from decaybench.models.ops.precision import at_least_float32, keeps_precision, without_autocast

_BLOCK = 64  # queries


class Kriged(NamedTuple):
    """mean, square: [B, T, H, V], e and m2; n, i: [B, T, H]; float32 (float64 stays)."""

    mean: Tensor
    square: Tensor
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
    q, k, v = (at_least_float32(part) for part in (q, k, v))
    mean, square, i, squares = _Kriging.apply(q, k, v, lbar.to(q.dtype), mask)  # type: ignore[no-untyped-call]
    return Kriged(mean, square, squares.reciprocal(), i)


class _Kriging(torch.autograd.Function):
    """e, m2, i and the sum of squared weights, with their gradient.

    By blocks of queries in a few rows of the batch, whose weights are made again for the gradient: never more than a
    block of them is in memory, what causality hides isn't computed, and only what comes in and goes out is kept.
    Arguments as `kriging_attention`; returns e, m2, i and 1 / n.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, lbar: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (B, T, H), V = q.shape[:3], v.shape[-1]
        mean, square = v.new_empty(B, T, H, V), v.new_empty(B, T, H, V)
        i, squares = v.new_empty(B, T, H), v.new_empty(B, T, H)
        for at, rows in _rows(q, k, v, lbar, mask):
            sources, found, norms = rows.sources[..., :-1], [], []
            for _, S, weights in rows.blocks():
                found.append(torch.bmm(weights, sources[:, :S]))
                norms.append(torch.linalg.vector_norm(weights, dim=-1, keepdim=True))
            mean[at], square[at], one = torch.split(rows.tokens(torch.cat(found, dim=1)), [V, V, 1], dim=-1)
            i[at], squares[at] = one[..., 0], rows.tokens(torch.cat(norms, dim=1))[..., 0].square()
        ctx.save_for_backward(q, k, v, lbar, mask, mean, square, i, squares)
        return mean, square, i, squares

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(gradients[0]):
            return *_gradients(*ctx.saved_tensors, *gradients), None


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lbar: Tensor,
    mask: Tensor | None,
    mean: Tensor,
    square: Tensor,
    i: Tensor,
    squares: Tensor,
    dmean: Tensor,
    dsquare: Tensor,
    di: Tensor,
    dsquares: Tensor,
) -> tuple[Tensor, ...]:
    """Of q, k, v and lbar."""
    K, V = q.shape[-1], v.shape[-1]
    dq, dk, dv, dlbar = (torch.empty_like(part) for part in (q, k, v, lbar))
    for at, rows in _rows(q, k, v, lbar, mask):
        twice = 2 * dsquares[at]
        # Under a token's weights their gradients' mean, without a pass over T x S.
        middle = (dmean[at] * mean[at]).sum(-1).add_((dsquare[at] * square[at]).sum(-1))
        middle.addcmul_(di[at], i[at]).addcmul_(twice, squares[at])
        dfound = _heads(dmean[at], dsquare[at], di[at, ..., None], middle.neg_()[..., None])
        twice = _heads(twice[..., None])
        dq_rows = []
        dk_rows, dsources, dbias = (torch.zeros_like(part) for part in (rows.k, rows.sources, rows.bias))
        for cut, S, weights in rows.blocks():
            dfound_cut = dfound[:, cut]
            dscores = (weights * twice[:, cut]).baddbmm_(dfound_cut, rows.sources[:, :S].mT).mul_(weights)
            dq_rows.append(torch.bmm(dscores, rows.k[:, :S]))
            dk_rows[:, :S].add_(torch.bmm(dscores.mT, rows.q[:, cut]))
            dsources[:, :S].add_(torch.bmm(weights.mT, dfound_cut))
            dbias[..., :S].add_(dscores.sum(1, keepdim=True))
        torch.mul(rows.tokens(torch.cat(dq_rows, dim=1)), K**-0.5, out=dq[at])
        dk[at] = rows.tokens(dk_rows)
        through, through_square, dinverse, _ = torch.split(rows.tokens(dsources), [V, V, 1, 1], dim=-1)
        torch.addcmul(through, v[at], through_square, value=2, out=dv[at])
        dlbar[at] = (rows.tokens(dbias.mT) - dinverse / lbar[at, :, None, None]).sum((2, 3)) / lbar[at]
    return dq, dk, dv, dlbar


@dataclass(frozen=True)
class _Rows:
    """A few rows of the batch, R of them with H heads each in one dimension.

    q: [R H, T, K], by sqrt(K); k: [R H, S, K]; sources: [R H, S, 2 V + 2], v, v^2, 1/lbar and 1; bias: [R H, 1, S], log
    lbar; mask: bool [R, 1, T, S] or None; count: R.
    """

    q: Tensor
    k: Tensor
    sources: Tensor
    bias: Tensor
    mask: Tensor | None
    count: int

    def blocks(self) -> Iterator[tuple[slice, int, Tensor]]:
        """Queries, the number of keys that they may see, and their weights [R H, queries, keys]."""
        T, keys = self.q.shape[1], self.k.mT
        later = self.q.new_full((min(T, _BLOCK),) * 2, -torch.inf).triu_(1)
        for start in range(0, T, _BLOCK):
            stop = min(start + _BLOCK, T)
            cut, n = slice(start, stop), stop - start
            if self.mask is None:
                scores = torch.baddbmm(self.bias[..., :stop], self.q[:, cut], keys[..., :stop])
                scores[..., start:].add_(later[:n, :n])
            else:
                scores = torch.baddbmm(self._seen(self.mask[:, 0, cut]), self.q[:, cut], keys)
            yield cut, scores.shape[-1], scores.softmax(-1)

    def _seen(self, mask: Tensor) -> Tensor:
        """The bias, -inf where mask [R, n, S] is False; [R H, n, S]. Filled in once for all heads: it takes long."""
        heads = len(self.bias) // self.count
        return self.bias[::heads].masked_fill(~mask, -torch.inf).repeat_interleave(heads, dim=0)

    def tokens(self, part: Tensor) -> Tensor:
        """[R H, n, W] as [R, n, H, W]."""
        return part.view(self.count, -1, *part.shape[1:]).transpose(1, 2)


def _rows(q: Tensor, k: Tensor, v: Tensor, lbar: Tensor, mask: Tensor | None) -> Iterator[tuple[slice, _Rows]]:
    """So many rows at a time that a block of weights stays in the cache."""
    B, T, H, K = q.shape
    S = k.shape[1]
    for at in pieces(B, H * min(T, _BLOCK) * S, q.device):
        inverse, bias = (part[at, :, None, None].expand(-1, S, H, 1) for part in (lbar.reciprocal(), lbar.log()))
        sources = _heads(v[at], v[at].square(), inverse, v.new_ones(1).expand(inverse.shape))
        here = _heads(q[at] * K**-0.5), _heads(k[at]), sources, _heads(bias).mT
        yield at, _Rows(*here, None if mask is None else mask[at], len(bias))


def _heads(*parts: Tensor) -> Tensor:
    """[R, n, H, .] beside each other, as [R H, n, W]."""
    R, n, H = parts[0].shape[:3]
    widths = [part.shape[-1] for part in parts]
    found = parts[0].new_empty(R, H, n, sum(widths))
    for place, part in zip(torch.split(found.transpose(1, 2), widths, dim=-1), parts, strict=True):
        place.copy_(part)
    return found.flatten(0, 1)
