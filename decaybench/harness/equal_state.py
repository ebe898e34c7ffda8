"""States of as many numbers: the size of a model that brings its state nearest to another's, both counted.

Each architecture names the one size that its state grows with and little else does (`Architecture.state_size`): key
channels of Mamba-2, GLA and RetNet, channels of both kinds of Gated DeltaNet's and RWKV-7's heads. States are counted
from the caches themselves, of models without values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.harness.model_info import state_elements
from decaybench.models.config import ModelConfig
from decaybench.models.language_model import build_model
from decaybench.models.registry import get_architecture

_WIDEST = 8  # times as large as it was, a size is looked for


@dataclass(frozen=True)
class SizedState:
    """key: the setting, model.mixer.d_state say; usual: its value before. state: the numbers then; wanted: the other's.

    usual_state: the numbers without the change.
    """

    key: str
    value: float
    usual: float
    state: int
    usual_state: int
    wanted: int

    @property
    def changed(self) -> bool:
        """Whether another value comes nearer than the usual one."""
        return self.value != self.usual

    def said(self, base: str, other: str) -> str:
        """What was found, in a sentence."""
        if self.usual_state == self.wanted:
            return f"the states are equal already: {self.wanted:,} numbers in {base} and in {other}"
        if self.changed:
            found = f"{base} has {self.key}={self.value:g}, not {self.usual:g}, and a state of {self.state:,} numbers"
        else:
            found = f"no other {self.key} brings {base} nearer than {self.usual:g}, a state of {self.state:,} numbers"
        return f"{found}; {other} has {self.wanted:,} (x {self.wanted / self.state:.3g})"


def sized_state(base: ModelConfig, other: ModelConfig) -> SizedState:
    """The size of `base` with which its state has the most nearly as many numbers as that of `other`.

    Of two that are as near it is the smaller one. Raises UserError for an architecture without such a size.
    """
    key = get_architecture(base.name).state_size
    if not key:
        raise UserError(f"--equal state: {base.name} names no size that its state grows with")
    usual = getattr(base.mixer, key)
    wanted, count = counted(other), counted(base)
    found = {usual: count}
    for value in _values(base, key, larger=count < wanted):
        if (size := _sized(base, key, value)) is None:
            continue
        found[value] = counted(size)
        if (found[value] >= wanted) if count < wanted else (found[value] <= wanted):
            break
    best = min(found, key=lambda value: (abs(found[value] - wanted), value))
    return SizedState(f"model.mixer.{key}", best, usual, found[best], count, wanted)


def counted(model: ModelConfig) -> int:
    """The numbers in a model's state, of all layers; of one that grows, after a token."""
    return sum(state_elements(build_model(model, device="meta"), 1))


def _values(model: ModelConfig, key: str, *, larger: bool) -> Iterator[float]:
    """Values beside the present one, nearest first; of a share of d_model those that make whole channels a head."""
    usual = getattr(model.mixer, key)
    step = 1 if isinstance(usual, int) else getattr(model.mixer, "n_heads", 1) / model.d_model
    present = round(usual / step)
    places = range(present + 1, _WIDEST * present + 1) if larger else range(present - 1, 0, -1)
    yield from (place * step for place in places)


def _sized(model: ModelConfig, key: str, value: float) -> ModelConfig | None:
    """The model with this size; None where it doesn't fit the others."""
    content = model.plain()
    try:
        sized = parse(ModelConfig, content | {"mixer": content["mixer"] | {key: value}}, "model")
        build_model(sized, device="meta")
    except UserError:
        return None
    return sized
