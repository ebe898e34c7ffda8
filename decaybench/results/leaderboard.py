"""The leaderboard: one JSON file of records, each with its counts, so that anyone can check every entry.

    {"schema_version": 1, "entries": [record, ...]}

It only grows: an entry is added under a lock to what the file holds then, and a damaged file is never overwritten.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from decaybench.core.errors import RunError, UserError
from decaybench.core.files import atomic_write_json, read_json, writing
from decaybench.core.hashing import digest
from decaybench.results.record import CellResult, Coordinates, Record, check_counts, parse_record, without_depth

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA_VERSION = 1

_PATIENCE = 60.0  # seconds that a writer waits for another


@dataclass(frozen=True)
class Row:
    """One line of the summary: the same experiment, its records differing only in seed, lengths and samples.

    values: by column, the median over seeds of the mean over depths, 0..1. seeds: by column, how many.
    longest_trained: the shortest, over seeds, of the longest sequences trained on, tokens.
    settings: every setting by its dotted key; what tells two rows apart that are else the same is found in it.
    """

    task: str
    version: int
    model: str
    train_length: int | None
    longest_trained: int | None
    variant: str
    seeds: dict[str, int]
    values: dict[str, float]
    settings: dict[str, Any]


def read_leaderboard(path: Path) -> list[Record]:
    """The entries of a leaderboard. Raises UserError with one line on the first thing that is wrong."""
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise UserError(f'{path} is not a leaderboard: it must hold {{"schema_version": 1, "entries": [...]}}')
    if content.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"{path} has schema_version {content.get('schema_version')!r}, not {SCHEMA_VERSION}")
    return [parse_record(entry, _where(path, index, entry)) for index, entry in enumerate(content["entries"])]


def add_record(path: Path, record: Record) -> bool:
    """Add a record, unless it is there already: then False. Makes the file where it is missing.

    Safe among processes. Raises UserError where the file is damaged (it stays as it is) or the record's counts don't
    give its values; RunError where the file can't be written or stays locked for a minute.
    """
    check_counts(record)
    with _locked(path):
        entries = read_leaderboard(path) if path.exists() else []
        if any(entry.record_id == record.record_id for entry in entries):
            return False
        merged = sorted([*entries, record], key=_order)
        content = {"schema_version": SCHEMA_VERSION, "entries": [entry.plain() for entry in merged]}
        atomic_write_json(path, content)
        return True


def check_leaderboard(path: Path) -> None:
    """Check each entry's schema and id, and recompute its cells from its counts. Raises UserError on the first fault.

    Whether the samples themselves can be made again is checked by the harness, which knows the tasks.
    """
    seen: dict[str, int] = {}
    for index, record in enumerate(read_leaderboard(path)):
        where = f"{path} entry {index} ({record.record_id[:12]})"
        if record.record_id in seen:
            raise UserError(f"{where}: the same record as entry {seen[record.record_id]}")
        seen[record.record_id] = index
        try:
            check_counts(record)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


def columns(records: Iterable[Record]) -> list[str]:
    """The summary's columns: ratios to the training length (1x, 2x) in order, then lengths in tokens.

    A length is in tokens where its ratio isn't known or isn't a short number. Cells of one variant and length that
    differ in more than depth have a column each, named by their coordinates: 1x kv=16.
    """
    places = [(name, cell) for record in records for name, cell in _columns(record)]
    order: dict[str, tuple[Any, ...]] = {}
    for name, cell in places:
        ratio = cell.ratio if name.split()[0].endswith("x") else None
        order[name] = (ratio is None, ratio or cell.eval_length, *without_depth(cell).values())
    return sorted(order, key=order.__getitem__)


def rows(records: Iterable[Record]) -> list[Row]:
    """The summary: a row for each task, model, training, evaluation and variant; seeds put together.

    Records with other lengths or numbers of samples are of the same evaluation.
    """
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in sorted(records, key=_order):
        chosen = digest(_settings(record))
        for variant in dict.fromkeys(cell.variant for cell in record.cells):
            found.setdefault((chosen, variant), []).append(record)
    return [_row(equal, variant) for (_, variant), equal in found.items()]


def table(records: Sequence[Record]) -> Table:
    """The summary as a rich table. T: the training length in tokens."""
    from rich.table import Table

    names, lines = columns(records), rows(records)
    notes = _differences(lines)
    short = any(_length(row) != str(row.train_length or "") for row in lines)
    caption = "medians over seeds; T: training length, tokens"
    caption += " (in brackets: the longest sequence really trained on)" if short else ""
    grid = Table(caption=caption, caption_justify="left")
    for heading in ("task", "model", "T", "variant", *(["settings"] if any(notes) else []), *names, "seeds"):
        left = heading in ("task", "model", "variant", "settings")
        grid.add_column(heading, justify="left" if left else "right", overflow="fold", min_width=5)
    for row, note in zip(lines, notes, strict=True):
        values = [f"{row.values[name]:.3f}" if name in row.values else "" for name in names]
        few, most = min(row.seeds.values()), max(row.seeds.values())
        seeds = f"{few}" if few == most else f"{few}-{most}"
        told = [note] if any(notes) else []
        grid.add_row(f"{row.task} v{row.version}", row.model, _length(row), row.variant, *told, *values, seeds)
    return grid


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(path.with_suffix(".lock"), timeout=_PATIENCE)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise RunError(f"another process has kept {path} locked for {_PATIENCE:g} s; try again") from None
    try:
        yield
    finally:
        lock.release()


def _where(path: Path, index: int, entry: Any) -> str:
    name = entry.get("record_id") if isinstance(entry, dict) else None
    return f"{path} entry {index} ({str(name)[:12]})"


def _order(record: Record) -> tuple[Any, ...]:
    model = record.model
    length = record.train_length or 0
    return record.task.name, record.task.version, model.architecture, model.cell, length, record.seed, record.record_id


def _settings(record: Record) -> dict[str, Any]:
    """What must be equal for two records to be seeds of one experiment: all that was chosen, by dotted key."""
    chosen = {
        "harness_version": record.harness_version,
        "task.version": record.task.version,
        "dtype": record.environment.dtype,
        "train_length": record.train_length,
        "model": {"cell": record.model.cell, **record.model.config},
        "task": {"name": record.task.name, **record.task.config},
        "evaluation": _without(record.task.evaluation, "lengths", "samples", "variants"),
    }
    if record.training:
        chosen["training"] = _without(record.training.config, "seed")
    if record.checkpoint:
        chosen["checkpoint"] = record.checkpoint.sha256
    return _flat(chosen)


def _without(content: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in names}


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return flat


def _row(equal: Sequence[Record], variant: str) -> Row:
    measured: dict[str, dict[int, dict[str, CellResult]]] = {}  # by column, seed and name
    for record in equal:
        for column, cell in _columns(record):
            if cell.variant == variant:
                cells = measured.setdefault(column, {}).setdefault(record.seed, {})
                # The same cell twice: its samples are the same ones, as far as they go.
                cells[cell.name] = max(cells.get(cell.name, cell), cell, key=lambda one: one.n)
    first = equal[0]
    return Row(
        task=first.task.name,
        version=first.task.version,
        model=first.model.cell,
        train_length=first.train_length,
        longest_trained=min((found for record in equal if (found := record.longest_trained)), default=None),
        variant=variant,
        seeds={column: len(seeds) for column, seeds in measured.items()},
        values={
            column: statistics.median(
                statistics.fmean(cell.value for cell in cells.values()) for cells in seeds.values()
            )
            for column, seeds in measured.items()
        },
        settings=_settings(first),
    )


def _columns(record: Record) -> Iterator[tuple[str, CellResult]]:
    """Each cell of a record with its column."""
    places: dict[tuple[str, int], list[Coordinates]] = {}
    for cell in record.cells:
        known = places.setdefault((cell.variant, cell.eval_length), [])
        if without_depth(cell) not in known:
            known.append(without_depth(cell))
    for cell in record.cells:
        column = _length_name(cell)
        if len(places[cell.variant, cell.eval_length]) > 1:
            column = " ".join([column, *(f"{name}={value}" for name, value in without_depth(cell).items())])
        yield column, cell


def _length_name(cell: CellResult) -> str:
    if cell.ratio is not None and math.isclose(float(f"{cell.ratio:g}"), cell.ratio, rel_tol=1e-12):
        return f"{cell.ratio:g}x"
    return f"{cell.eval_length}"


def _length(row: Row) -> str:
    if row.train_length is None:
        return ""
    short = row.longest_trained is not None and row.longest_trained < row.train_length
    return f"{row.train_length}" + (f" ({row.longest_trained})" if short else "")


def _differences(lines: Sequence[Row]) -> list[str]:
    """For each row the settings by which it differs from rows that show the same task, model, length and variant."""
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in lines:
        alike.setdefault((row.task, row.version, row.model, row.train_length, row.variant), []).append(row)
    notes = []
    for row in lines:
        others = alike[row.task, row.version, row.model, row.train_length, row.variant]
        keys = {key: None for other in others for key in other.settings}
        told = [key for key in keys if any(other.settings.get(key) != row.settings.get(key) for other in others)]
        notes.append(", ".join(f"{key}={_short(row.settings.get(key))}" for key in told))
    return notes


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:12] + "…"
