"""What the chunked forms of the recurrences share: T tokens cut into N chunks of L, and what documents let through.

The last chunk is filled up with zeros, an identity step in every recurrence here: they write nothing, and a log-decay
of 0 keeps the state, so that the state behind the last chunk is the one behind the last token. Documents part by masks:
a token sees a token of its chunk, or the state before it, where their segments are equal (see core.positions). A
log-decay of -inf in their place would cost the mild ones beside it their digits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from decaybench.core.positions import Layout


class Visible(NamedTuple):
    """What documents let through, bool. same: [N, B, L, L], whether two tokens of a chunk share a document.

    reads: [N, B, L], whether a token sees the state before its chunk. writes: [N, B, L], whether the state after the
    chunk sees a token. passes: [N, B], whether that state sees the one before.
    """

    same: Tensor
    reads: Tensor
    writes: Tensor
    passes: Tensor


def fill_last_chunk(L: int, layout: Layout | None, *inputs: Tensor) -> tuple[list[Tensor], Visible | None]:
    """Inputs [B, T, ...] as [B, N L, ...] with zeros behind the last token, and what documents let through.

    None: all of it. Tokens behind the last one belong to its document.
    """
    B, T = inputs[0].shape[:2]
    extra = -T % L
    filled = [F.pad(x, (0, 0) * (x.ndim - 2) + (0, extra)) for x in inputs] if extra else list(inputs)
    if layout is None or layout.segments is None:
        return filled, None
    segments = layout.segments.expand(B, T)
    return filled, _visible(chunks(torch.cat([segments, segments[:, -1:].expand(B, extra)], dim=1), L))


def chunks(x: Tensor, L: int) -> Tensor:
    """x [B, N L, ...] as [N, B, L, ...], a view. With chunks first, those that a scan has passed lie in one piece."""
    return torch.unflatten(x, 1, (-1, L)).transpose(0, 1)


def chunks_of_heads(x: Tensor, L: int) -> Tensor:
    """x [B, N L, H, K] as [N, B, H, L, K], a view: batches of matrices."""
    return chunks(x, L).transpose(2, 3)


def tokens_of_heads(x: Tensor) -> Tensor:
    """The way back, [N, B, H, L, K] as [B, N L, H, K]."""
    return x.permute(1, 0, 3, 2, 4).flatten(1, 2)


def product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b without a buffer between, for matrices in chunks, [N, B, H, ., .]; N may be 0."""
    if len(out):
        torch.bmm(a.flatten(0, 2), b.flatten(0, 2), out=out.flatten(0, 2))


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b in one pass, as `product_into`."""
    if len(out):
        flat = out.flatten(0, 2)
        torch.baddbmm(flat, a.flatten(0, 2), b.flatten(0, 2), out=flat)


def _visible(segments: Tensor) -> Visible:
    """segments: int64 [N, B, L]."""
    before = F.pad(segments[:-1, :, -1], (0, 0, 1, 0))[..., None]  # of the token before; 0: the initial state's
    last = segments[..., -1:]
    same = segments[..., :, None] == segments[..., None, :]
    return Visible(same, segments == before, segments == last, (last == before)[..., 0])
