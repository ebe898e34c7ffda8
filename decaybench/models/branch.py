"""The one signature of a block's branches, mixers and FFNs alike: (x, context, state, observer) -> (y, state)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from decaybench.core.positions import Layout
from decaybench.models.addons.post import PostConfig
from decaybench.models.module import Linear, Module
from decaybench.models.ops.softmax_attention import softmax_attention


@dataclass(frozen=True)
class LayerTrace:
    """What a residual did in one pass, to be looked at.

    gain: float32 [B, T], what multiplies the mixer's output: its mean over D, or over the heads. precision,
    updated: [B, T], the mean over D of lambda before the layer and after its observation; None where none is carried.
    sample_size: [B, T, H], the effective number of tokens that each head's read-out rests on; None likewise. log_decay:
    [B, T, H], the mean over key channels; None likewise, and for a mixer without decays.
    """

    gain: Tensor
    precision: Tensor | None = None
    updated: Tensor | None = None
    sample_size: Tensor | None = None
    log_decay: Tensor | None = None

    @staticmethod
    def joined(parts: Sequence[LayerTrace]) -> LayerTrace:
        """The trace of one sequence from those of its pieces, first to last."""

        def whole(name: str) -> Any:
            values = [getattr(part, name) for part in parts]
            return None if values[0] is None else torch.cat(values, dim=1)

        return LayerTrace(**{kind.name: whole(kind.name) for kind in fields(LayerTrace)})


@dataclass(frozen=True)
class Context:
    """What a branch may know of its surroundings in one forward pass.

    layout: positions and what they mean. keep_state: whether the caller wants the state after the last token.
    shared: what a layer leaves for the layers above it in the same pass (RWKV-7's first value). trace: where
    residuals note what they did, a LayerTrace a layer; None: nobody looks. decays: where the log-decays of recurrent
    mixers are noted, by layer, float32 [B, T, N] of N heads or channels; None likewise.
    """

    layout: Layout
    keep_state: bool
    shared: dict[str, Tensor] = field(default_factory=dict)
    trace: list[LayerTrace] | None = None
    decays: dict[int, Tensor] | None = None


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


class Observer:
    """What a residual asks of the branches that it joins; this one asks nothing and changes nothing.

    A branch is given one or None. A recurrent mixer calls `write` before it mixes and `read` after; a mixer
    with softmax attention lets `attend` do it; both pass what enters their output projection through `output`. An FFN
    calls `dynamics` where `wants_dynamics`.
    """

    wants_dynamics: bool = False

    def write(self, values: Tensor, write_strength: Tensor | None, log_decay: Tensor) -> Tensor | None:
        """What is about to be written. Returns log w, float32 [B, T, H]: how much more to trust each write than those
        before it; None: all alike.

        values: [B, T, H, V], what is written, without its strength; write_strength: >= 0 [B, T, H], None for 1;
        log_decay: [B, T, H] or [B, T, H, K].
        """
        return None

    def read(self, size: Tensor, scale: Tensor) -> None:
        """size: [B, T, H], the mean square of what each head read, over that of the norm after it (both in one number,
        for they nearly cancel); scale: [B, T, H, V], what else multiplies it on its way to the projection.
        """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Softmax attention, arguments as there (ops.softmax_attention)."""
        return softmax_attention(q, k, v, mask)

    def output(self, y: Tensor) -> Tensor:
        """y: [B, T, H V], what enters the output projection."""
        return y

    def dynamics(self, jacobian: Tensor) -> None:
        """jacobian: [B, T, D], the diagonal of the FFN's Jacobian with respect to its input."""


class DecayObserver(Observer):
    """Notes a mixer's log-decays in `decays` under `layer`, and leaves all else to another observer, if any."""

    def __init__(self, inner: Observer | None, decays: dict[int, Tensor], layer: int) -> None:
        self.inner = inner or Observer()
        self.decays, self.layer = decays, layer

    def write(self, values: Tensor, write_strength: Tensor | None, log_decay: Tensor) -> Tensor | None:
        self.decays[self.layer] = log_decay.flatten(2)
        return self.inner.write(values, write_strength, log_decay)

    def read(self, size: Tensor, scale: Tensor) -> None:
        self.inner.read(size, scale)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.inner.attend(q, k, v, mask)

    def output(self, y: Tensor) -> Tensor:
        return self.inner.output(y)


class Branch(Module):
    """A mixer or an FFN."""

    @abstractmethod
    def forward(self, x: Tensor, context: Context, state: Any, observer: Observer | None = None) -> tuple[Tensor, Any]:
        """x: [B, T, D] on compacted rows; state: this branch's state, or None at the start; observer: who watches this
        branch, None for nobody.

        Returns y [B, T, D] and the state after each row's last real token (None unless context.keep_state).
        """


class Mixer(Branch):
    """A sequence mixer of `heads` heads, ended by `out_proj`. Recurrent ones also say what their timescales are."""

    heads: int
    out_proj: Linear

    def timescales(self, position: int) -> Tensor | None:
        """Timescales at rest in tokens at the given position, float32 [N], one a head or channel.

        tau = -1 / log_decay with the input's part of the decay left out. None for mixers without a decay.
        """
        return None
