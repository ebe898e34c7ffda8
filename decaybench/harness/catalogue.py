"""What is here: architectures, add-ons, tasks, presets and backends, as data and as tables for `bench list`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decaybench.harness.presets import PRESETS
from decaybench.models.config import PRESETS as SIZES
from decaybench.models.registry import architectures
from decaybench.tasks.registry import TASKS

if TYPE_CHECKING:
    from rich.table import Table

_ADDONS = {"post": "PoST: ordered, position-adaptive decay spectra (arXiv 2604.07658); flag --post"}


def catalogue() -> dict[str, list[dict[str, str]]]:
    """Each kind of thing with one entry a name."""
    return {
        "models": [
            {
                "name": found.name,
                "what": found.description,
                "add-ons": ", ".join(found.addons) or "none",
                "backends": ", ".join(found.backends),
                "source": found.source,
            }
            for found in architectures().values()
        ],
        "add-ons": [{"name": name, "what": what} for name, what in _ADDONS.items()],
        "tasks": [{"name": name, "what": entry.description} for name, entry in TASKS.items()],
        "presets": [
            {
                "command": f"bench {task} --preset {name}",
                "what": preset.description,
                "models": ", ".join(preset.models),
                "learning rates": _rates(preset.learning_rates),
            }
            for task, presets in PRESETS.items()
            for name, preset in presets.items()
        ],
        "sizes": [{"name": size, "models": ", ".join(models)} for size, models in SIZES.items()],
    }


def tables() -> list[Table]:
    """The catalogue as one table a kind."""
    from rich.table import Table

    found: list[Table] = []
    for kind, entries in catalogue().items():
        table = Table(title=kind, title_justify="left", title_style="bold")
        for key in entries[0]:
            table.add_column(key, overflow="fold")
        for entry in entries:
            table.add_row(*entry.values())
        found.append(table)
    return found


def _rates(grids: dict[str, tuple[float, ...]]) -> str:
    return "; ".join(
        ("" if model == "*" else f"{model}: ") + " ".join(f"{rate:.2g}" for rate in grid)
        for model, grid in grids.items()
    )
