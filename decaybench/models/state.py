"""What a model remembers between calls: a typed state per layer, and how many tokens each row has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
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


def concatenated(states: Sequence[ModelState]) -> ModelState:
    """The rows of several states, one after the other."""
    parts = iter([torch.cat(several) for several in zip(*map(tensors, states), strict=True)])
    return map_tensors(states[0], lambda _: next(parts))


def named_tensors(state: ModelState) -> dict[str, Tensor]:
    """All tensors of a state by their place in it: 0, 1, …"""
    return {str(place): tensor for place, tensor in enumerate(tensors(state))}


def filled(like: ModelState, named: Mapping[str, Tensor]) -> ModelState:
    """The state that gave these `named_tensors`, of the structure and on the device of `like`.

    Raises ValueError where the numbers or shapes of tensors differ in more than rows.
    """
    wanted = named_tensors(like)
    if wanted.keys() != named.keys():
        raise ValueError(f"it has {len(named)} tensors, not {len(wanted)}")
    for name, tensor in wanted.items():
        if named[name].shape[1:] != tensor.shape[1:] or len(named[name]) != len(named["0"]):
            raise ValueError(f"tensor {name} is {list(named[name].shape)}, a row of it {list(tensor.shape[1:])}")
    given = iter([named[name].to(tensor.device) for name, tensor in wanted.items()])
    return map_tensors(like, lambda _: next(given))
