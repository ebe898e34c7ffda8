"""Which add-ons are looked at together, and with which settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from decaybench.models.addons import ADDONS

__all__ = ["ADDONS", "Choice", "alone_and_together", "complete", "together"]

Choice = Mapping[str, Mapping[str, Any]]  # the settings of each add-on that is there, by its name


def alone_and_together(wanted: Iterable[str]) -> list[Choice]:
    """No add-on, every variant of each alone, and the first variants of all together."""
    names = _in_order(wanted)
    alone: list[Choice] = [{name: variant} for name in names for variant in ADDONS[name].variants]
    return [{}, *alone, *([{name: ADDONS[name].variants[0] for name in names}] if len(names) > 1 else [])]


def together(wanted: Iterable[str]) -> list[Choice]:
    """All of them at once, in every combination of their variants."""
    names = _in_order(wanted)
    return [dict(zip(names, chosen, strict=True)) for chosen in product(*(ADDONS[name].variants for name in names))]


def complete(choice: Choice, horizon: int) -> dict[str, dict[str, Any]]:
    """A choice as a model's settings; horizon: for those that have one and don't say it, tokens."""
    return {
        name: {**({"horizon": horizon} if "horizon" in ADDONS[name].config_class().model_fields else {}), **settings}
        for name, settings in choice.items()
    }


def _in_order(wanted: Iterable[str]) -> list[str]:
    asked = set(wanted)
    return [name for name in ADDONS if name in asked]
