"""What is here: architectures, add-ons, tasks, presets and backends, as data and as tables for `bench list`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from decaybench.harness.addons import ADDONS
from decaybench.harness.config import RunConfig, TrainingConfig
from decaybench.harness.presets import PRESETS, Preset
from decaybench.models.config import PRESETS as SIZES
from decaybench.models.config import ModelConfig
from decaybench.models.ffn import FfnConfig
from decaybench.models.registry import architectures, get_architecture
from decaybench.tasks.registry import TASKS

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

Catalogue = dict[str, list[dict[str, str]]]


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
        "add-ons": [
            {"name": name, "what": f"{addon.title}: {addon.description} ({addon.source}); flag --{name}"}
            for name, addon in ADDONS.items()
        ],
        "tasks": [
            {"name": name, "what": f"{entry.description}; bench {entry.command}"} for name, entry in TASKS.items()
        ],
        "presets": [
            {
                "task": task,
                "name": name,
                "what": preset.description,
                "models": ", ".join(preset.models) or "any, by --checkpoint",
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
    parts["model: FFN"] = ("model.ffn", FfnConfig)
    for name, addon in ADDONS.items():
        parts[f"model: {addon.title}"] = (f"model.{name}", addon.config_class())
    parts["training"] = ("training", TrainingConfig)
    for name, entry in TASKS.items():
        parts[f"task: {name}"] = ("task", entry.config)
        parts[f"evaluation: {name}"] = ("evaluation", entry.evaluation)
    return {title: list(_settings(prefix, kind)) for title, (prefix, kind) in parts.items()}


def about(name: str) -> dict[str, Any]:
    """All that is known of an architecture. Raises UserError with the nearest name."""
    found = get_architecture(name)
    return {
        "name": name,
        "what": found.description,
        "source": found.source,
        "equation": found.equation,
        **{ADDONS[addon].title: change for addon, change in found.addons.items()},
        "verified": found.verified,
        "add-ons": list(found.addons),
        "gates": list(found.gates),
        "FFN": found.ffn,
        "backends": list(found.backends),
        "settings": list(_settings("model.mixer", found.config_class())),
        "presets": [
            {
                "task": task,
                "name": preset,
                "what": entry.description,
                "model": _flat(entry.models[name]),
                "learning rate": _learning_rate(entry, name),
            }
            for task, presets in PRESETS.items()
            for preset, entry in presets.items()
            if name in entry.models
        ],
        "model sizes": [
            {"name": size, "model": _flat(models[name])} for size, models in SIZES.items() if name in models
        ],
    }


def page(known: Mapping[str, Any]) -> Group:
    """What `about` found, to be read."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    facts.add_row(known["name"], Text(known["what"]))
    changes = (addon.title for addon in ADDONS.values() if addon.title in known)
    for key in ("source", "equation", *changes, "verified", "add-ons", "gates", "FFN", "backends"):
        said = known[key] if isinstance(known[key], str) else ", ".join(known[key])
        if said and said != "baseline":  # one gate only
            facts.add_row(key, Text(said))
    lists = {kind: known[kind] for kind in ("settings", "presets", "model sizes") if known[kind]}
    return Group(facts, "", *tables({kind: [_shown(row) for row in entries] for kind, entries in lists.items()}))


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
    parts = ("model", "task", "training", "evaluation", "mixer", "ffn", *ADDONS)
    for name, field in kind.model_fields.items():
        if name in parts:
            continue
        default = "" if field.is_required() else str(field.get_default(call_default_factory=True))
        yield {
            "key": f"{prefix}.{name}" if prefix else name,
            "default": default,
            "what": field.description or "",
        }


def _learning_rate(preset: Preset, model: str) -> float:
    """What a run of the preset takes."""
    given = preset.learning_rate(model) or preset.run.get("training", {}).get("learning_rate")
    return float(given or TrainingConfig().learning_rate)


def _shown(row: Mapping[str, Any]) -> dict[str, str]:
    shown = {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in row.items()}
    if "model" in row:
        shown["model"] = ", ".join(f"{key}={value}" for key, value in row["model"].items() if key != "name")
    return shown


def _flat(sizes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in sizes.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
