"""The short causal convolution in front of a recurrence: each channel mixes its last W tokens.

    y_t = bias + sum_{l < W} weight_{W-1-l} x_{t-l}     over tokens t-l of the same document

Rows must be compacted (padding at the end), so that a token's predecessors are its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from decaybench.core.positions import Layout


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, layout: Layout, tail: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x: [B, T, C]; weight: [C, W], the last tap is the token itself; bias: [C]; tail: [B, W-1, C], the inputs before
    x, or None.

    Returns y [B, T, C] and, as a view, all inputs in order [B, W-1+T, C], for `conv_tail`.
    """
    T, W = x.shape[1], weight.shape[1]
    inputs = F.pad(x, (0, 0, W - 1, 0)) if tail is None else torch.cat([tail.to(x.dtype), x], dim=1)
    y = inputs[:, W - 1 :] * weight[:, W - 1]
    if bias is not None:
        y = y + bias
    for lag in range(1, W):
        earlier = inputs[:, W - 1 - lag : W - 1 - lag + T]
        same_document = layout.see_back(lag)
        if same_document is not None:
            earlier = earlier.masked_fill(~same_document[..., None], 0.0)
        y = torch.addcmul(y, earlier, weight[:, W - 1 - lag])
    return y, inputs


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
