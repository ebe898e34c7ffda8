"""Gates on a mixer's output, learned and without a filter behind them: what BFT's gain is compared with.

    scalar_gate    h' = h + g y,  g = sigmoid(w . x + b), one a token
    sigmoid_gate   the heads' outputs times sigmoid(W x), one a head, before the output projection

Source of the second: "Gated Attention for Large Language Models", arXiv 2505.06708, its headwise gate after attention.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from decaybench.models.branch import Context, LayerTrace, Mixer, Observer
from decaybench.models.mixers.parts import split_heads
from decaybench.models.module import DrawsFor, Linear
from decaybench.models.ops.precision import at_least_float32
from decaybench.models.residual import Residual, Stream


class GateObserver(Observer):
    """gate: [B, T, H] on the heads, before the output projection, or [B, T, 1] on the mixer's output (not on_heads)."""

    def __init__(self, gate: Tensor, context: Context, *, on_heads: bool) -> None:
        self.gate, self.context, self.on_heads = gate, context, on_heads

    def output(self, y: Tensor) -> Tensor:
        if not self.on_heads:
            return y
        return (split_heads(y, self.gate.shape[-1]) * self.gate[..., None]).flatten(2)


class GateResidual(Residual[GateObserver]):
    """The controls: h + g y with one gate a token, g = sigmoid(w . x + b), b = 2 at first; or one gate a head before
    the output projection, sigmoid(W x), as in arXiv 2505.06708 (its headwise gate after attention).
    """

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"bias"})

    def __init__(self, d_model: int, heads: int, *, on_heads: bool) -> None:
        super().__init__()
        self.on_heads = on_heads
        self.proj = Linear(d_model, heads if self.on_heads else 1)
        self.bias = None if self.on_heads else nn.Parameter(torch.empty(1))

    def initialise(self, draws_for: DrawsFor) -> None:
        if self.bias is not None:
            self.bias.fill_(2.0)

    def observer(self, stream: Stream, x: Tensor, context: Context, state: Any) -> GateObserver:
        logit = self.proj(x)
        gate = torch.sigmoid(logit if self.bias is None else logit + self.bias).to(x.dtype)
        return GateObserver(gate, context, on_heads=self.on_heads)

    def update(self, stream: Stream, y: Tensor, observer: GateObserver, mixer: Mixer) -> Stream:
        if observer.context.trace is not None:
            observer.context.trace.append(LayerTrace(at_least_float32(observer.gate).mean(-1)))
        if self.on_heads:
            return Stream(stream.hidden + y)
        return Stream(torch.addcmul(stream.hidden, observer.gate, y))
