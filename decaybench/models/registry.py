"""The architectures: names to mixers, imported only when used. Other packages add theirs by entry points.

A package registers one with an entry point of the group `decaybench.models`, whose value is an `Architecture`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from decaybench.core.config import Config
from decaybench.core.errors import RunError
from decaybench.core.names import unknown

if TYPE_CHECKING:
    from decaybench.models.branch import Mixer

ENTRY_POINT_GROUP = "decaybench.models"


@dataclass(frozen=True)
class Architecture:
    """A named mixer. config, mixer: `module:Class` of its configuration and its mixer.

    The mixer is built as `mixer(config, place)` (models.branch.Place); addons: those that it takes.
    backends: implementations of its recurrence, best first.
    """

    name: str
    config: str
    mixer: str
    description: str
    source: str
    addons: tuple[str, ...] = ()
    backends: tuple[str, ...] = ("torch",)

    def config_class(self) -> type[Config]:
        """The class of its own sizes."""
        return _load(self.config)  # type: ignore[no-any-return]

    def mixer_class(self) -> type[Mixer]:
        """The mixer itself; imports torch."""
        return _load(self.mixer)  # type: ignore[no-any-return]


_BUILT_IN = (
    Architecture(
        "mamba2",
        "decaybench.models.mixers.mamba2:Mamba2Config",
        "decaybench.models.mixers.mamba2:Mamba2",
        "Mamba-2: one data-dependent decay a head",
        "arXiv 2405.21060",
        addons=("post",),
    ),
    Architecture(
        "attention",
        "decaybench.models.mixers.attention:AttentionConfig",
        "decaybench.models.mixers.attention:Attention",
        "softmax attention with rotary positions: the baseline",
        "arXiv 1706.03762, 2104.09864",
    ),
)


@cache
def architectures() -> dict[str, Architecture]:
    """All architectures by name, the built-in ones first."""
    found = {architecture.name: architecture for architecture in _BUILT_IN}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            architecture = entry.load()
        except Exception as error:  # another package's import can fail in any way; say whose it was
            raise RunError(f"entry point {entry.name} of {ENTRY_POINT_GROUP} can't be loaded: {error}") from error
        if not isinstance(architecture, Architecture):
            raise RunError(f"entry point {entry.name} of {ENTRY_POINT_GROUP} is not an Architecture")
        if architecture.name in found:
            raise RunError(f"entry point {entry.name} takes the model name {architecture.name!r}, which is taken")
        found[architecture.name] = architecture
    return found


def get_architecture(name: str) -> Architecture:
    """The architecture of that name. Raises UserError with the nearest name."""
    known = architectures()
    if name not in known:
        raise unknown("model", name, known)
    return known[name]


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise RunError(f"{path!r}, which an architecture names, can't be imported: {error}") from error
