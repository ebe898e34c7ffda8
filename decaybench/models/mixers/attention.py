"""Softmax attention with rotary positions: the baseline that forgets nothing.

    o_t = sum_{j <= t} softmax_j(q_t . k_j / sqrt(K)) v_j,   q, k rotated by their positions (arXiv 2104.09864)

With `conv_width`, q, k and v pass a short convolution first (Primer, arXiv 2109.08668), the one that most recurrences
have: a token then sees its neighbours in the first layer. Keys of other documents and padding are hidden by a mask. The
cache grows by one entry a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from pydantic import Field
from torch import Tensor

from decaybench.core.config import Config
from decaybench.core.errors import UserError
from decaybench.core.positions import Layout
from decaybench.models.branch import Context, Mixer, Observer, Place
from decaybench.models.mixers.parts import ShortConv, split_heads
from decaybench.models.module import Linear
from decaybench.models.ops.rotary import rotary
from decaybench.models.ops.short_conv import conv_tail
from decaybench.models.ops.softmax_attention import softmax_attention


class AttentionConfig(Config):
    """Attention's sizes."""

    n_heads: int = Field(default=4, ge=1, description="heads; they divide d_model")
    rope_base: float = Field(default=10_000.0, gt=1, description="base of the rotary wavelengths")
    conv_width: int | None = Field(default=None, ge=1, description="taps of the short convolution, tokens; none: none")

    def head_dim(self, d_model: int) -> int:
        """Channels a head. Raises UserError where the sizes don't divide into even parts."""
        if d_model % self.n_heads or d_model // self.n_heads % 2:
            raise UserError(
                f"mixer.n_heads={self.n_heads} must divide d_model={d_model} into heads of an even number of channels"
            )
        return d_model // self.n_heads


@dataclass(frozen=True)
class AttentionState:
    """k, v: [B, S, H, K], keys rotated. positions: int64 [B, S], 0 where an entry must not be seen.

    conv: [B, W-1, 3 D], the short convolution's last inputs, or None without one.
    """

    k: Tensor
    v: Tensor
    positions: Tensor
    conv: Tensor | None = None


class Attention(Mixer):
    """The mixer. Dimensions: H = n_heads of K = d_model / H channels."""

    def __init__(self, config: AttentionConfig, place: Place) -> None:
        super().__init__()
        self.config, self.heads = config, config.n_heads
        self.head_dim = config.head_dim(place.d_model)
        self.qkv_proj = Linear(place.d_model, 3 * place.d_model)
        self.conv = ShortConv(3 * place.d_model, config.conv_width, bias=False) if config.conv_width else None
        self.out_proj = Linear(place.d_model, place.d_model, shrink=place.shrink)

    def forward(
        self, x: Tensor, context: Context, state: AttentionState | None, observer: Observer | None = None
    ) -> tuple[Tensor, AttentionState | None]:
        B, T, D = x.shape
        layout = context.layout
        qkv, tail = self.qkv_proj(x), None
        if self.conv is not None and self.config.conv_width is not None:
            qkv, inputs = self.conv(qkv, layout, state.conv if state else None)
            tail = conv_tail(inputs, layout, self.config.conv_width) if context.keep_state else None
        q, k, v = (split_heads(part, self.heads) for part in qkv.chunk(3, dim=-1))
        q, k = (rotary(part, layout.positions, self.config.rope_base).to(x.dtype) for part in (q, k))
        mask = _visible(layout, B, state)
        cached = AttentionState(k, v, layout.positions.expand(B, T), tail)
        if state is not None:
            k, v = torch.cat([state.k.to(k.dtype), k], dim=1), torch.cat([state.v.to(v.dtype), v], dim=1)
            cached = AttentionState(k, v, torch.cat([state.positions, cached.positions], dim=1), tail)
        attend = softmax_attention if observer is None else observer.attend
        y = attend(q, k, v, mask).reshape(B, T, D)
        if observer is not None:
            y = observer.output(y)
        return self.out_proj(y), _forget_earlier_documents(cached, layout) if context.keep_state else None


def _visible(layout: Layout, batch: int, state: AttentionState | None) -> Tensor | None:
    """Which keys each token sees, bool [B, 1, T, S+T]; None where that is plain causality.

    Padding at a row's end needs no mask: no real token comes after it.
    """
    T = layout.positions.shape[1]
    if layout.resets is None and state is None:
        return None
    mask = torch.ones(T, T, dtype=torch.bool, device=layout.positions.device).tril().expand(batch, T, T)
    if layout.segments is not None:
        mask = mask & (layout.segments[:, :, None] == layout.segments[:, None, :])
    if state is not None:
        before = (state.positions > 0)[:, None, :].expand(-1, T, -1)
        if layout.segments is not None:
            before = before & (layout.segments == 0)[..., None]
        mask = torch.cat([before, mask], dim=-1)
    return mask[:, None]


def _forget_earlier_documents(cached: AttentionState, layout: Layout) -> AttentionState:
    """Hide the entries of documents that ended in this call."""
    if layout.segments is None:
        return cached
    T = layout.segments.shape[1]
    last = layout.segments[:, -1:]  # constant over trailing padding
    keep = torch.cat([(last == 0).expand(-1, cached.positions.shape[1] - T), layout.segments == last], dim=1)
    return replace(cached, positions=cached.positions * keep)
