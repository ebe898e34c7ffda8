"""A record as a table, in a terminal and in a notebook: a row for each variant, length and coordinates but depth."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from decaybench.core.scoring import Metric
from decaybench.results.record import Record, groups

if TYPE_CHECKING:
    from rich.table import Table

_ACCURACY: dict[Metric, str] = {
    "mean_accuracy": "share of a sample's questions answered",
    "all_correct": "share of samples with every answer right",
}


def record_table(record: Record) -> Table:
    """The table for a terminal."""
    from rich.table import Table

    table = Table(title=_title(record), title_justify="left", caption=_caption(record), caption_justify="left")
    for heading in _headings(record):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for row in _rows(record):
        table.add_row(*row)
    return table


def record_html(record: Record) -> str:
    """The table for a notebook."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in _headings(record))
    lines = ["<tr>" + "".join(f"<td>{escape(entry)}</td>" for entry in row) + "</tr>" for row in _rows(record)]
    return (
        f"<table><caption>{escape(_title(record))}<br>{escape(_caption(record))}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


def _coordinates(record: Record) -> list[str]:
    """The names of the coordinates that have a column."""
    return list(dict.fromkeys(name for group in groups(record) for name in group.coordinates))


def _headings(record: Record) -> tuple[str, ...]:
    return ("variant", "length", "ratio", *_coordinates(record), "accuracy", "95 % interval", "samples")


def _title(record: Record) -> str:
    origin = record.checkpoint.source if record.checkpoint else f"seed {record.seed}"
    return f"{record.task.name} v{record.task.version}: {record.model.cell}, {origin}"


def _caption(record: Record) -> str:
    parts = [f"accuracy: {_ACCURACY[record.task.metric]}"]
    if any("depth" in cell.coordinates for cell in record.cells):
        parts[0] += ", over all depths"
    longest, wanted = record.longest_trained, record.train_length
    if longest is not None and wanted is not None and longest < wanted:
        parts.append(f"trained on at most {longest} tokens, so 1x ({wanted}) is beyond training already")
    if record.comparable_to:
        parts.append(f"comparable to {record.comparable_to}")
    return "; ".join([*parts, f"record {record.record_id[:12]}"])


def _rows(record: Record) -> Iterator[tuple[str, ...]]:
    names = _coordinates(record)
    for group in groups(record):
        low, high = group.interval
        ratio = "" if group.ratio is None else f"{group.ratio:g}x"
        place = [str(group.coordinates[name]) if name in group.coordinates else "" for name in names]
        span = f"[{low:.3f}, {high:.3f}]"
        yield group.variant, str(group.eval_length), ratio, *place, f"{group.value:.3f}", span, str(group.n)
