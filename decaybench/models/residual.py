"""How a block joins its branches to the stream: by adding them, or weighted by an add-on or a control.

A residual is asked four times a layer: for the `observer` that the branches are given, to `update` the stream by the
mixer's output, to `predict` it by the FFN's, and for the `state` to keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from decaybench.models.branch import Context, Mixer, Observer
from decaybench.models.module import LayerNorm, Module, RMSNorm

O = TypeVar("O", bound=Observer | None)  # noqa: E741 an observer's kind


@dataclass(frozen=True)
class Stream:
    """hidden: [B, T, D]. variance: P = 1/lambda, float32 (float64 stays) [B, T, D]; None where none is carried."""

    hidden: Tensor
    variance: Tensor | None = None


class Residual(Module, Generic[O]):
    """The plain residual stream: h + y."""

    def observer(self, stream: Stream, x: Tensor, context: Context, state: Any) -> O:
        """Who watches the branches of this layer in this pass, None for nobody.

        x: [B, T, D], what the mixer reads; state: what `state` said last time, or None at the start.
        """
        return None  # type: ignore[return-value]

    def update(self, stream: Stream, y: Tensor, observer: O, mixer: Mixer) -> Stream:
        """The stream after the mixer's output y [B, T, D]."""
        return Stream(stream.hidden + y, stream.variance)

    def predict(self, stream: Stream, y: Tensor | None, observer: O, norm: RMSNorm | LayerNorm | None) -> Stream:
        """The stream after the FFN's output y [B, T, D]; norm: the norm before the FFN. Both None without an FFN."""
        return stream if y is None else Stream(stream.hidden + y, stream.variance)

    def state(self, observer: O) -> Any:
        """What to keep for the tokens to come; None for nothing."""
        return None
