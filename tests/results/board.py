"""Records of several models for the tests of summaries and figures over a leaderboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decaybench.results.record import Record, seal
from tests.results import example

T = 64


def measured(
    model: str, seed: int, shares: Mapping[int, float], variants: Sequence[str] = ("capacity",), **changes: Any
) -> Record:
    """A model's record with these accuracies by length in whole percent, four samples a cell.

    changes: `part__key=value` deep, put into the example record.
    """
    content = example.content(seed)
    architecture, _, addons = model.partition("+")
    content["model"] |= {"cell": model, "architecture": architecture, "addons": [addons] if addons else []}
    content["model"]["config"] = {"name": architecture, "d_model": 64, "n_layers": 2}
    content["cells"] = [
        example.cell(length, [round(100 * share)] * 4, [100] * 4, variant=variant, by_distance=[])
        | {"name": f"{variant}-length{length}"}
        for variant in variants
        for length, share in shares.items()
    ]
    for path, value in changes.items():
        *parts, last = path.split("__")
        place = content
        for part in parts:
            place = place[part]
        place[last] = value
    return seal(content)


def seeds(model: str, shares: Mapping[int, Sequence[float]], **options: Any) -> list[Record]:
    """A record a seed; shares: by length the accuracy of each seed."""
    count = len(next(iter(shares.values())))
    return [
        measured(model, seed, {length: values[seed] for length, values in shares.items()}, **options)
        for seed in range(count)
    ]
