"""What is here: architectures, add-ons, tasks, presets and backends, as data and as tables for `bench list`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel

from decaybench.harness.config import RunConfig, TrainingConfig
from decaybench.harness.presets import PRESETS
from decaybench.models.addons.post import PostConfig
from decaybench.models.config import PRESETS as SIZES
from decaybench.models.config import ModelConfig
from decaybench.models.ffn import FfnConfig
from decaybench.models.registry import architectures
from decaybench.tasks.registry import TASKS

if TYPE_CHECKING:
    from rich.table import Table

Catalogue = dict[str, list[dict[str, str]]]

_ADDONS = {"post": "PoST: ordered, position-adaptive decay spectra (arXiv 2604.07658); flag --post"}


def catalogue() -> Catalogue:
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
                "task": task,
                "name": name,
                "what": preset.description,
                "models": ", ".join(preset.models),
            }
            for task, presets in PRESETS.items()
            for name, preset in presets.items()
        ],
        "model sizes (Python: decaybench.models.config.preset)": [
            {"name": size, "models": ", ".join(models)} for size, models in SIZES.items()
        ],
    }


def all_settings() -> Catalogue:
    """Every key that `--set` and YAML files take, by part of the configuration."""
    parts: dict[str, tuple[str, type[BaseModel]]] = {"run": ("", RunConfig), "model": ("model", ModelConfig)}
    for name, architecture in architectures().items():
        parts[f"model: {name}"] = ("model.mixer", architecture.config_class())
    parts |= {
        "model: FFN": ("model.ffn", FfnConfig),
        "model: PoST": ("model.post", PostConfig),
        "training": ("training", TrainingConfig),
    }
    for name, entry in TASKS.items():
        parts[f"task: {name}"] = ("task", entry.config)
        parts[f"evaluation: {name}"] = ("evaluation", entry.evaluation)
    return {title: list(_settings(prefix, kind)) for title, (prefix, kind) in parts.items()}


def tables(entries: Catalogue) -> list[Table]:
    """One table for each kind of thing."""
    from rich.table import Table

    found: list[Table] = []
    for kind, rows in entries.items():
        table = Table(title=kind, title_justify="left", title_style="bold")
        for key in dict.fromkeys(key for row in rows for key in row):
            table.add_column(key, no_wrap=key in ("name", "task", "add-ons", "backends", "key"))
        for row in rows:
            table.add_row(*row.values())
        found.append(table)
    return found


def _settings(prefix: str, kind: type[BaseModel]) -> Iterator[dict[str, str]]:
    parts = ("model", "task", "training", "evaluation", "mixer", "ffn", "post")
    for name, field in kind.model_fields.items():
        if name in parts:
            continue
        default = "" if field.is_required() else str(field.get_default(call_default_factory=True))
        yield {
            "key": f"{prefix}.{name}" if prefix else name,
            "default": default,
            "what": field.description or "",
        }
