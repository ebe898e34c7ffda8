"""The short causal convolution in front of a recurrence: each channel mixes its last W tokens.

    y_t = bias + sum_{l < W} weight_{W-1-l} x_{t-l}     over tokens t-l of the same document

Rows must be compacted (padding at the end), so that a token's predecessors are its neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from decaybench.core.positions import Layout
from decaybench.models.ops.precision import at_least_float32


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, layout: Layout, tail: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x: [B, T, C]; weight: [C, W], the last tap is the token itself; bias: [C]; tail: [B, W-1, C], the inputs before
    x, or None.

    Returns y [B, T, C] and, as a view, all inputs in order [B, W-1+T, C], for `conv_tail`.
    """
    W = weight.shape[1]
    inputs = F.pad(x, (0, 0, W - 1, 0)) if tail is None else torch.cat([tail.to(x.dtype), x], dim=1)
    others = [layout.see_back(lag) for lag in range(1, W)]
    hidden = [None if same is None else ~same[..., None] for same in others]
    y: Tensor = _Taps.apply(inputs, weight, bias, *hidden)  # type: ignore[no-untyped-call]
    return y, inputs


class _Taps(torch.autograd.Function):
    """The sum over taps with its gradient: autograd's own makes a padded copy for every slice, three times slower.

    inputs: [B, W-1+T, C]; weight: [C, W]; bias: [C] or None; hidden: for each lag 1..W-1 bool [B, T, 1] or None.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, *hidden: Tensor | None) -> Tensor:
        W = weight.shape[1]
        taps = at_least_float32(weight).T.contiguous()
        current = at_least_float32(inputs[:, W - 1 :])
        y = current * taps[W - 1] if bias is None else torch.addcmul(bias, current, taps[W - 1])
        for lag, mask in enumerate(hidden, start=1):
            y.addcmul_(_behind(inputs, lag, W, mask), taps[W - 1 - lag])
        ctx.save_for_backward(inputs, weight, bias, *hidden)
        return y.to(torch.promote_types(inputs.dtype, weight.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, bias, *hidden = ctx.saved_tensors
        W, T = weight.shape[1], dy.shape[1]
        dy = at_least_float32(dy)
        taps = at_least_float32(weight).T.contiguous()
        dinputs = torch.zeros(inputs.shape, dtype=dy.dtype, device=dy.device)
        dtaps = torch.empty_like(taps)
        scratch = torch.empty_like(dy)  # one for all lags: fresh memory costs more than the product
        for lag, mask in enumerate([None, *hidden]):
            place = W - 1 - lag
            seen = dy if mask is None else dy.masked_fill(mask, 0.0)
            dinputs[:, place : place + T].addcmul_(seen, taps[place])
            dtaps[place] = torch.mul(seen, _behind(inputs, lag, W, None), out=scratch).sum((0, 1))
        dbias = None if bias is None else dy.sum((0, 1)).to(bias.dtype)
        return dinputs.to(inputs.dtype), dtaps.T.to(weight.dtype), dbias, *(None for _ in hidden)


def _behind(inputs: Tensor, lag: int, width: int, hidden: Tensor | None) -> Tensor:
    place = width - 1 - lag
    earlier = at_least_float32(inputs[:, place : place + inputs.shape[1] - width + 1])
    return earlier if hidden is None else earlier.masked_fill(hidden, 0.0)


def conv_tail(inputs: Tensor, layout: Layout, width: int) -> Tensor:
    """The last width-1 inputs of each row, [B, width-1, C], from what `short_conv` returned.

    Inputs from before the last token's document are 0: the next call may not know that a document began in this one.
    """
    counts = layout.counts(len(inputs))
    columns = counts[:, None] + torch.arange(width - 1, device=inputs.device)
    tail = inputs.gather(1, columns[..., None].expand(-1, -1, inputs.shape[-1]))
    lags = torch.arange(width - 2, -1, -1, device=inputs.device)
    earlier = layout.last_position(torch.full_like(counts, width))[:, None] <= lags
    return tail.masked_fill(earlier[..., None], 0.0)
