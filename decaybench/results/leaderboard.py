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

from decaybench.core.config import flat
from decaybench.core.errors import UserError
from decaybench.core.files import atomic_write_json, locked, read_json, writing
from decaybench.core.hashing import digest
from decaybench.results.record import (
    ENOUGH,
    TRAINED_WITH,
    CellResult,
    Coordinates,
    PositionBin,
    Record,
    check_counts,
    parse_record,
    said_of_training,
    trained_with,
    without_depth,
)

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA_VERSION = 1
ACCURACY, BITS = "accuracy", "bits/byte"

_PATIENCE = 60.0  # seconds that a writer waits for another


@dataclass(frozen=True)
class Point:
    """What an experiment reached at one length.

    by_seed: accuracies, 0..1, the mean over depths; of running text bits by byte. samples: of a cell, fewest and most.
    depths: whether there are several. references: what rules without a model reach, by name, the mean over cells;
    empty: the task has none.
    """

    eval_length: int
    ratio: float | None
    by_seed: dict[int, float]
    samples: tuple[int, int]
    depths: bool
    references: dict[str, float]

    @property
    def median(self) -> float:
        """The median over seeds."""
        return statistics.median(self.by_seed.values())


@dataclass(frozen=True)
class Row:
    """One line of the summary: the same experiment, its records differing only in seed, lengths and samples.

    points: by column. longest_trained: the shortest, over seeds, of the longest sequences trained on, tokens.
    settings: every setting by its dotted key; what tells two rows apart that are else the same is found in it.
    measure: what its numbers are, ACCURACY or BITS. positions: of running text, a point for each octave of the position
    in the longest windows, its last position in the place of a length; else empty.
    """

    task: str
    version: int
    architecture: str
    model: str
    train_length: int | None
    longest_trained: int | None
    variant: str
    points: dict[str, Point]
    parameters: int
    settings: dict[str, Any]
    measure: str
    positions: tuple[Point, ...]

    @property
    def values(self) -> dict[str, float]:
        """The median over seeds, by column."""
        return {column: point.median for column, point in self.points.items()}

    @property
    def seeds(self) -> dict[str, int]:
        """How many seeds, by column."""
        return {column: len(point.by_seed) for column, point in self.points.items()}

    @property
    def references(self) -> dict[str, dict[str, float]]:
        """What rules without a model reach, by the rule's name and column."""
        found: dict[str, dict[str, float]] = {}
        for column, point in self.points.items():
            for name, value in point.references.items():
                found.setdefault(name, {})[column] = value
        return found


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
    places = [(name, cell) for record in records for name, cell in placed(record)]
    order: dict[str, tuple[Any, ...]] = {}
    for name, cell in places:
        ratio = cell.ratio if name.split()[0].endswith("x") else None
        order[name] = (ratio is None, ratio or cell.eval_length, *without_depth(cell).values())
    return sorted(order, key=order.__getitem__)


def placed(record: Record) -> Iterator[tuple[str, CellResult]]:
    """Each cell of a record with its column of the summary."""
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


def rows(records: Iterable[Record]) -> list[Row]:
    """The summary: a row for each task, model, training, evaluation and variant; seeds put together.

    Records with other lengths or numbers of samples are of the same evaluation.
    """
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in sorted(records, key=_order):
        chosen = digest(settings_of(record))
        for variant in dict.fromkeys(cell.variant for cell in record.cells):
            found.setdefault((chosen, variant), []).append(record)
    return [_row(equal, variant) for (_, variant), equal in found.items()]


def differences(lines: Sequence[Row]) -> dict[str, list[Any]]:
    """The settings in which rows differ, each with its values in order of appearance; one that a row lacks is None."""
    keys = {key: None for row in lines for key in row.settings}
    values = {key: distinct(row.settings.get(key) for row in lines) for key in keys}
    return {key: several for key, several in values.items() if len(several) > 1}


def settings_of(record: Record) -> dict[str, Any]:
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
    if record.training and record.selection:  # the rate is a result; what it was chosen from is a setting
        grid = {"learning_rates": list(record.selection.learning_rates), "every": record.selection.every}
        chosen["training"] = {**_without(record.training.config, "seed", "learning_rate"), "selected": grid}
    if record.checkpoint:
        chosen["checkpoint"] = record.checkpoint.sha256
        if shares := trained_with(record):
            chosen["training"] = shares
    return flat(chosen)


def distinct(values: Iterable[Any]) -> list[Any]:
    """Each value once, in order of appearance; they needn't be hashable."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def short(value: Any) -> str:
    """A setting's value in few characters."""
    text = "none" if value is None else str(value)
    return text if len(text) <= 16 else text[:12] + "…"


def table(records: Sequence[Record]) -> Table:
    """The summary as a rich table. T: the training length in tokens."""
    from rich.table import Table

    names, lines = columns(records), rows(records)
    notes = _differences(lines)
    short = any(_length(row) != str(row.train_length or "") for row in lines)
    caption = "medians over seeds; T: training length, tokens"
    caption += " (in brackets: the longest sequence really trained on)" if short else ""
    caption += f"; task text: {BITS}" if any(row.measure == BITS for row in lines) else ""
    caption += "; models in brackets: rules without a model, on the same samples" if _rules(lines) else ""
    grid = Table(caption=caption, caption_justify="left")
    for heading in ("task", "model", "T", "variant", *(["settings"] if any(notes) else []), *names, "seeds"):
        left = heading in ("task", "model", "variant", "settings")
        grid.add_column(heading, justify="left" if left else "right", overflow="fold", min_width=5)
    for row, note in zip(lines, notes, strict=True):
        few, most = min(row.seeds.values()), max(row.seeds.values())
        seeds = f"{few}" if few == most else f"{few}-{most}"
        told = [note] if any(notes) else []
        values = _shown(row.values, names)
        grid.add_row(f"{row.task} v{row.version}", _model(row), _length(row), row.variant, *told, *values, seeds)
    for row, name in _rules(lines):
        told = [""] if any(notes) else []
        values = _shown(row.references[name], names)
        grid.add_row(f"{row.task} v{row.version}", f"({name})", _length(row), row.variant, *told, *values, "")
    return grid


def _model(row: Row) -> str:
    """The model's name; what it was trained with belongs to it where that isn't the task's own training."""
    shares = {key: row.settings.get(f"training.{key}") for key in TRAINED_WITH}
    said = said_of_training({key: share for key, share in shares.items() if isinstance(share, int | float)})
    return f"{row.model}, {said}" if said else row.model


def _shown(values: dict[str, float], names: Sequence[str]) -> list[str]:
    return [f"{values[name]:.3f}" if name in values else "" for name in names]


def _rules(lines: Sequence[Row]) -> list[tuple[Row, str]]:
    """The rules without a model, each once with a row that was asked the same: it has their accuracies."""
    found: dict[tuple[Any, ...], tuple[Row, str]] = {}
    for row in lines:
        for name, values in row.references.items():
            # To so many digits: means over other numbers of seeds round differently.
            told = ((column, round(value, 9)) for column, value in values.items())
            asked = (row.task, row.version, row.train_length, row.variant, name, *told)
            found.setdefault(asked, (row, name))
    return list(found.values())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    said = f"another process has kept {path} locked for {_PATIENCE:g} s; try again"
    with locked(path.with_suffix(".lock"), said, _PATIENCE):
        yield


def _where(path: Path, index: int, entry: Any) -> str:
    name = entry.get("record_id") if isinstance(entry, dict) else None
    return f"{path} entry {index} ({str(name)[:12]})"


def _order(record: Record) -> tuple[Any, ...]:
    model = record.model
    length = record.train_length or 0
    return record.task.name, record.task.version, model.architecture, model.cell, length, record.seed, record.record_id


def _without(content: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in names}


def _row(equal: Sequence[Record], variant: str) -> Row:
    measured: dict[str, dict[int, dict[str, CellResult]]] = {}  # by column, seed and name
    for record in equal:
        for column, cell in placed(record):
            if cell.variant == variant:
                cells = measured.setdefault(column, {}).setdefault(record.seed, {})
                # The same cell twice: its samples are the same ones, as far as they go.
                cells[cell.name] = max(cells.get(cell.name, cell), cell, key=lambda one: one.n)
    first = equal[0]
    return Row(
        task=first.task.name,
        version=first.task.version,
        architecture=first.model.architecture,
        model=first.model.cell,
        train_length=first.train_length,
        longest_trained=min((found for record in equal if (found := record.longest_trained)), default=None),
        variant=variant,
        points={column: _point(by_seed) for column, by_seed in measured.items()},
        parameters=first.model.parameters.trainable,
        settings=settings_of(first),
        measure=ACCURACY if first.cells[0].bits_per_byte is None else BITS,
        positions=_positions(measured.values()),
    )


def _positions(measured: Iterable[dict[int, dict[str, CellResult]]]) -> tuple[Point, ...]:
    """Of the longest windows that all seeds have: bits by byte by octave of the position, where there is text."""
    cells = [{seed: cell for seed, named in by_seed.items() for cell in named.values()} for by_seed in measured]
    seeds = {seed for by_seed in cells for seed in by_seed}
    common = [by_seed for by_seed in cells if by_seed.keys() == seeds and all(c.by_position for c in by_seed.values())]
    if not common:
        return ()
    longest = max(common, key=lambda by_seed: next(iter(by_seed.values())).eval_length)
    found: dict[int, dict[int, PositionBin]] = {}
    for seed, cell in longest.items():
        for part in cell.by_position or ():
            if part.asked >= ENOUGH and part.bytes:
                found.setdefault(part.high, {})[seed] = part
    return tuple(
        Point(
            eval_length=high,
            ratio=None,
            by_seed={seed: part.bits_per_byte for seed, part in parts.items() if part.bits_per_byte is not None},
            samples=(min(part.samples for part in parts.values()), max(part.samples for part in parts.values())),
            depths=False,
            references={},
        )
        for high, parts in sorted(found.items())
    )


def _point(by_seed: dict[int, dict[str, CellResult]]) -> Point:
    cells = [cell for named in by_seed.values() for cell in named.values()]
    return Point(
        eval_length=cells[0].eval_length,
        ratio=cells[0].ratio,
        by_seed={seed: statistics.fmean(map(_value, named.values())) for seed, named in by_seed.items()},
        samples=(min(cell.n for cell in cells), max(cell.n for cell in cells)),
        depths=len({cell.coordinates.get("depth") for cell in cells}) > 1,
        references=_references([cell.references or {} for cell in cells]),
    )


def _value(cell: CellResult) -> float:
    return cell.value if cell.bits_per_byte is None else cell.bits_per_byte


def _references(known: Sequence[dict[str, float]]) -> dict[str, float]:
    names = [name for name in known[0] if all(name in found for found in known)]
    return {name: statistics.fmean(found[name] for found in known) for name in names}


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
        alike.setdefault((row.task, row.version, _model(row), row.train_length, row.variant), []).append(row)
    notes = []
    for row in lines:
        others = alike[row.task, row.version, _model(row), row.train_length, row.variant]
        notes.append(", ".join(f"{key}={short(row.settings.get(key))}" for key in differences(others)))
    return notes
