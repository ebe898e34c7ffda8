"""The add-ons that a model may have: one entry each, from which flags, lists, self-test and speed take them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decaybench.core.config import Config


@dataclass(frozen=True)
class AddOn:
    """One add-on. name: its key in ModelConfig, its flag, and what an architecture says it takes; title: as pages
    write it; config: `module:Class`.

    refusal: what an architecture without it is told, {name} its name. variants: the settings that self-test and speed
    look at, the first what its flag gives.
    """

    name: str
    title: str
    description: str
    source: str
    config: str
    refusal: str
    variants: tuple[dict[str, Any], ...] = ({},)

    def config_class(self) -> type[Config]:
        """The class of its settings; imports torch."""
        module, _, attribute = self.config.partition(":")
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]


_ALL = (
    AddOn(
        "post",
        "PoST",
        "ordered, position-adaptive decay spectra",
        "arXiv 2604.07658",
        "decaybench.models.addons.post:PostConfig",
        "post needs a mixer with decays; {name} has none",
        variants=({"variant": "paper"}, {"variant": "minimal"}),
    ),
    AddOn(
        "bft",
        "BFT",
        "a precision carried through the layers",
        "arXiv 2605.18832",
        "decaybench.models.addons.bft:BftConfig",
        "bft needs a mixer that shows its heads; {name} doesn't",
    ),
)

ADDONS = {addon.name: addon for addon in _ALL}  # in the order in which a cell's name has them
