"""What a model remembers between calls: a typed state per layer, and how many tokens each row has seen."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

S = TypeVar("S")


@dataclass(frozen=True)
class LayerState:
    """One block's state. mixer, ffn, residual: each part's own state, or None if it keeps nothing."""

    mixer: Any
    ffn: Any
    residual: Any = None


@dataclass(frozen=True)
class ModelState:
    """layers: one LayerState a block. seen: int64 [B], the position of the last real token of each row (0: none).

    The next token of row b has position seen[b] + 1.
    """

    layers: tuple[LayerState, ...]
    seen: Tensor

    def select(self, rows: Tensor) -> ModelState:
        """The state of the rows with these indices, in this order (int64 [n])."""
        return map_tensors(self, lambda tensor: tensor.index_select(0, rows))

    def detach(self) -> ModelState:
        """The same values without their history, for training on one piece of a text after the other."""
        return map_tensors(self, lambda tensor: tensor.detach())

    def elements(self) -> tuple[int, ...]:
        """Numbers that each layer keeps for one row, counted from the tensors themselves."""
        rows = len(self.seen)
        return tuple(sum(t.numel() for t in tensors(layer)) // rows for layer in self.layers)


def tensors(state: Any) -> list[Tensor]:
    """All tensors of a state, in a fixed order."""
    if isinstance(state, Tensor):
        return [state]
    if is_dataclass(state) and not isinstance(state, type):
        return [t for field in fields(state) for t in tensors(getattr(state, field.name))]
    if isinstance(state, tuple):
        return [t for part in state for t in tensors(part)]
    return []


def map_tensors(state: S, fn: Any) -> S:
    """The same structure with `fn` applied to each tensor."""
    if isinstance(state, Tensor):
        return fn(state)  # type: ignore[no-any-return]
    if is_dataclass(state) and not isinstance(state, type):
        return replace(state, **{f.name: map_tensors(getattr(state, f.name), fn) for f in fields(state)})
    if isinstance(state, tuple):
        return tuple(map_tensors(part, fn) for part in state)  # type: ignore[return-value]
    return state
