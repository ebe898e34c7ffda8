"""Which rows of a leaderboard may stand in one figure: like with like, one experiment a model.

Equal must be what was asked (the task's rules, its evaluation, the training length that lengths are multiples of, the
samples themselves), how many training labels were wrong and how many training sequences started from another's state,
and the models' width and depth, but of language models, whose sizes are made to have as many parameters. Else training
may differ from model to model: each architecture has its own learning rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from decaybench.core.config import apply_settings
from decaybench.core.errors import UserError
from decaybench.core.names import unknown
from decaybench.results.leaderboard import BITS, Row, differences, distinct, rows, settings_of, short
from decaybench.results.record import TRAINED_WITH, Record

_SHARED = (
    "harness_version",
    "dtype",
    "train_length",
    "task.",
    "evaluation.",
    *(f"training.{key}" for key in TRAINED_WITH),
)
_SIZES = ("model.d_model", "model.n_layers")
_CONTROL = "model.bft.control"  # what stands in the place of BFT's filter: none, or a gate


def comparable(
    records: Sequence[Record], task: str, variants: Sequence[str] | None = None, where: Iterable[str] = ()
) -> list[Row]:
    """The summary's rows of one task that may stand in one figure: like with like, and a row a model and variant.

    variants: those wanted, in this order; None: all. where: `[MODEL:]KEY=VALUE`, keeps the records (of that model) with
    this setting; a control has none of the options of what it stands in the place of. Raises UserError with one line on
    names that aren't there; where what was asked, its samples, the label noise or the models' width and depth differ;
    and where a model was trained in several ways.
    """
    of_task = [record for record in records if record.task.name == task]
    if not of_task:
        raise unknown("task of the leaderboard", task, {record.task.name for record in records})
    kept = chosen(of_task, where)
    found = rows(kept)
    known = list(dict.fromkeys(row.variant for row in found))
    for variant in variants or ():
        if variant not in known:
            raise unknown(f"variant of {task}", variant, known)
    found = [row for variant in variants or known for row in found if row.variant == variant]
    _check_alike(found)
    _check_data(kept)
    return found


def chosen(records: Sequence[Record], where: Iterable[str]) -> list[Record]:
    """The records with these settings (`comparable`). Raises UserError on a condition that no record meets."""
    kept = list(records)
    for condition in where:
        name, equals, value = condition.partition("=")
        model, colon, key = name.rpartition(":")
        if not equals or not key or (colon and not model):
            raise UserError(f"--where takes [MODEL:]KEY=VALUE, for example training.steps=1500, not {condition!r}")
        meant = [record for record in kept if model in ("", record.model.cell)]
        if not meant:
            raise unknown("model of the leaderboard", model, {record.model.cell for record in records})
        values = {record.record_id: _in_force(settings_of(record)) for record in meant}
        if not any(key in settings for settings in values.values()):
            raise unknown("setting", key, {key for settings in values.values() for key in settings})
        # A setting whose value is the word "none" (model.bft.control) isn't one that isn't there.
        said = any(settings.get(key) == value for settings in values.values())
        wanted = (value,) if said else (value, _read(value))
        left = [record for record in kept if record not in meant or values[record.record_id].get(key) in wanted]
        if all(record not in left for record in meant):
            there = ", ".join(map(str, distinct(settings.get(key) for settings in values.values())))
            raise UserError(f"--where {condition}: no record has this; {key} is {there}")
        kept = left
    return kept


def _in_force(settings: dict[str, Any]) -> dict[str, Any]:
    """Without the filter's options where a gate stands in its place: they are at their defaults there and do nothing,
    so that model.bft.gain=true means models with BFT's gain.
    """
    if settings.get(_CONTROL, "none") == "none":
        return settings
    filters = _CONTROL.rpartition(".")[0] + "."
    return {key: value for key, value in settings.items() if key == _CONTROL or not key.startswith(filters)}


def _read(value: str) -> Any:
    """A value as --set reads it: 0.01, true, null; and none, as tables write what isn't there."""
    return None if value == "none" else apply_settings({}, [f"value={value}"])["value"]


def _check_alike(lines: Sequence[Row]) -> None:
    shared = _SHARED if lines and lines[0].measure == BITS else (*_SHARED, *_SIZES)
    for key, values in differences(lines).items():
        if key.startswith(shared):
            raise UserError(
                f"these records can't stand in one figure: {key} is {_listed(values)}; choose with --where {key}=VALUE"
            )
    by_name: dict[tuple[str, str], list[Row]] = {}
    for row in lines:
        by_name.setdefault((row.model, row.variant), []).append(row)
    for (model, _), several in by_name.items():
        for key, values in differences(several).items():
            raise UserError(
                f"{model} stands there more than once: {key} is {_listed(values)}; "
                f"choose with --where {model}:{key}=VALUE"
            )
    for row in lines:
        if len({point.eval_length for point in row.points.values()}) < len(row.points):
            raise UserError(f"{row.task} {row.variant} is no curve over length: it has {_listed(list(row.points))}")


def _check_data(records: Sequence[Record]) -> None:
    """The same cells must be the same samples."""
    seen: dict[tuple[tuple[str, int], ...], Record] = {}
    for record in records:
        first = seen.setdefault(tuple((cell.name, cell.n) for cell in record.cells), record)
        if first.task.data_hash != record.task.data_hash:
            names = f"{first.model.cell} ({first.record_id[:12]}) and {record.model.cell} ({record.record_id[:12]})"
            raise UserError(f"these records can't stand in one figure: {names} were asked different samples")


def _listed(values: Sequence[Any]) -> str:
    return " or ".join(short(value) for value in values)
