"""Token shift: each token beside the one before it in its document (RWKV, arXiv 2305.13048, section 3.1).

    difference_t = x_{t-1} - x_t,   x_0 = 0

Rows must be compacted (padding at the end), so that a token's predecessor is its neighbour.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from decaybench.core.positions import Layout
from decaybench.models.ops.short_conv import conv_tail


def token_shift(x: Tensor, layout: Layout, last: Tensor | None) -> tuple[Tensor, Tensor]:
    """x: [B, T, D]; last: [B, 1, D], the input before x, or None.

    Returns x_{t-1} - x_t [B, T, D], and all inputs in order [B, 1+T, D], for `last_token`.
    """
    inputs = F.pad(x, (0, 0, 1, 0)) if last is None else torch.cat([last.to(x.dtype), x], dim=1)
    before = inputs[:, :-1]
    seen = layout.see_back(1)
    if seen is not None:
        before = before.masked_fill(~seen[..., None], 0.0)
    return before - x, inputs


def last_token(inputs: Tensor, layout: Layout) -> Tensor:
    """The last real input of each row, [B, 1, D], from what `token_shift` returned."""
    return conv_tail(inputs, layout, 2)
