"""The leaderboard: one JSON file of records, each with its counts, so that anyone can check every entry.

    {"schema_version": 1, "entries": [record, ...]}

It only grows: an entry is added under a lock to what the file holds then, and a damaged file is never overwritten.
"""

from __future__ import annotations

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
from decaybench.results.record import CellResult, Record, check_counts, parse_record

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA_VERSION = 1

_PATIENCE = 60.0  # seconds that a writer waits for another


@dataclass(frozen=True)
class Row:
    """One line of the summary: equal runs that differ only in their seed.

    values: by column, the median over seeds of the mean over the column's cells, 0..1. seeds: how many.
    """

    task: str
    version: int
    model: str
    train_length: int | None
    variant: str
    seeds: int
    values: dict[str, float]


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
    """The summary's columns: ratios to the training length (1x, 2x) in order, then lengths whose ratio isn't known."""
    cells = [cell for record in records for cell in record.cells]
    order = {_column(cell): (cell.ratio is None, cell.ratio or cell.eval_length) for cell in cells}
    return sorted(order, key=order.__getitem__)


def rows(records: Iterable[Record]) -> list[Row]:
    """The summary: a row for each task, model, training and variant, seeds put together."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in sorted(records, key=_order):
        for variant in dict.fromkeys(cell.variant for cell in record.cells):
            found.setdefault((*_kind(record), variant), []).append(record)
    return [_row(equal, key[-1]) for key, equal in found.items()]


def table(records: Sequence[Record]) -> Table:
    """The summary as a rich table. T: the training length in tokens."""
    from rich.table import Table

    names = columns(records)
    grid = Table(caption="medians over seeds; T: training length, tokens", caption_justify="left")
    for heading in ("task", "model", "T", "variant", *names, "seeds"):
        left = heading in ("task", "model", "variant")
        grid.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for row in rows(records):
        values = [f"{row.values[name]:.3f}" if name in row.values else "" for name in names]
        length = "" if row.train_length is None else str(row.train_length)
        grid.add_row(f"{row.task} v{row.version}", row.model, length, row.variant, *values, str(row.seeds))
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


def _kind(record: Record) -> tuple[Any, ...]:
    # What must be equal for two records to be seeds of one run: everything that was chosen, but the seed.
    if record.training:
        origin = {key: value for key, value in record.training.config.items() if key != "seed"}
    else:
        origin = {"checkpoint": record.checkpoint.sha256 if record.checkpoint else None}
    chosen = digest([record.task.config, record.model.config, origin])
    return record.task.name, record.task.version, record.model.cell, record.train_length, chosen


def _row(equal: Sequence[Record], variant: str) -> Row:
    by_seed: dict[str, dict[int, list[float]]] = {}
    for record in equal:
        for cell in record.cells:
            if cell.variant == variant:
                by_seed.setdefault(_column(cell), {}).setdefault(record.seed, []).append(cell.value)
    values = {
        column: statistics.median(statistics.fmean(seed) for seed in seeds.values())
        for column, seeds in by_seed.items()
    }
    first = equal[0]
    count = len({record.seed for record in equal})
    return Row(first.task.name, first.task.version, first.model.cell, first.train_length, variant, count, values)


def _column(cell: CellResult) -> str:
    return f"{cell.eval_length}" if cell.ratio is None else f"{cell.ratio:g}x"
