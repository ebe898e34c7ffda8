"""Parts that several mixers are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from decaybench.core.positions import Layout
from decaybench.models.module import DrawsFor, Module, uniform_
from decaybench.models.ops.short_conv import conv_tail, short_conv

_DT_RANGE = (1e-3, 0.1)
_DT_FLOOR = 1e-4


class ShortConv(Module):
    """The short convolution's parameters. weight: [C, W], bias: [C] or None, both initially U(-1/sqrt(W), 1/sqrt(W)).

    Call: x [B, T, C] and the inputs before it [B, W-1, C] or None -> y [B, T, C] and all inputs, for `conv_tail`.
    """

    no_weight_decay = frozenset({"bias"})

    def __init__(self, channels: int, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def initialise(self, draws_for: DrawsFor) -> None:
        bound = 1.0 / math.sqrt(self.weight.shape[1])
        uniform_(self.weight, -bound, bound, draws_for("weight"))
        if self.bias is not None:
            uniform_(self.bias, -bound, bound, draws_for("bias"))

    def forward(self, x: Tensor, layout: Layout, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        return short_conv(x, self.weight, self.bias, layout, tail)


@dataclass(frozen=True)
class MemoryState:
    """conv: [B, W-1, H (2 K + V)], the short convolution's last inputs, or None without one.

    memory: float32 [B, H, K, V].
    """

    conv: Tensor | None
    memory: Tensor

    @staticmethod
    def after(memory: Tensor | None, inputs: Tensor | None, layout: Layout, width: int | None) -> MemoryState | None:
        """The state to keep, None where no memory was asked for.

        inputs: all that the convolution of `width` taps saw, as ShortConv returns them; both None without one.
        """
        if memory is None:
            return None
        return MemoryState(None if inputs is None or width is None else conv_tail(inputs, layout, width), memory)


def initial_dt_bias(n: int, draws: torch.Generator) -> Tensor:
    """softplus^-1(dt) with dt log-uniform in [1e-3, 0.1] and at least 1e-4, float32 [n]; as mamba-ssm's Mamba2."""
    dt = torch.empty(n, device="cpu")
    uniform_(dt, math.log(_DT_RANGE[0]), math.log(_DT_RANGE[1]), draws)
    return inverse_softplus(dt.exp().clamp(min=_DT_FLOOR))


def inverse_softplus(x: Tensor) -> Tensor:
    """The y with softplus(y) = x, for x > 0."""
    return x + (-torch.expm1(-x)).log()


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, H K] as [B, T, H, K]."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)
