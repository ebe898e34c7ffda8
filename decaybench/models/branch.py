"""The one signature of a block's branches, mixers and FFNs alike: (x, context, state) -> (y, state)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from decaybench.core.positions import Layout
from decaybench.models.addons.post import PostConfig
from decaybench.models.module import Module


@dataclass(frozen=True)
class Context:
    """What a branch may know of its surroundings in one forward pass.

    layout: positions and what they mean. keep_state: whether the caller wants the state after the last token.
    shared: what a layer leaves for the layers above it in the same pass (RWKV-7's first value).
    """

    layout: Layout
    keep_state: bool
    shared: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where a branch stands in its model; what a mixer may know when it is built.

    d_model: width of the residual stream. layer: its block, 0-based, of n_layers. shrink: square root of the number of
    residual branches, by which a projection that ends one is divided (GPT-2's rule). post: PoST, or None. backend:
    kernels of the recurrence.
    """

    d_model: int
    layer: int
    n_layers: int
    shrink: float
    post: PostConfig | None
    backend: str


class Branch(Module):
    """A mixer or an FFN."""

    @abstractmethod
    def forward(self, x: Tensor, context: Context, state: Any) -> tuple[Tensor, Any]:
        """x: [B, T, D] on compacted rows; state: this branch's state, or None at the start.

        Returns y [B, T, D] and the state after each row's last real token (None unless context.keep_state).
        """


class Mixer(Branch):
    """A sequence mixer. Recurrent ones also say what their timescales are."""

    def timescales(self, position: int) -> Tensor | None:
        """Timescales at rest in tokens at the given position, float32 [N], one a head or channel.

        tau = -1 / log_decay with the input's part of the decay left out. None for mixers without a decay.
        """
        return None
