"""A record as a table, in a terminal and in a notebook: a row for each variant, length and coordinates but depth."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from decaybench.core.scoring import Metric
from decaybench.results.record import Record, groups, label_noise

if TYPE_CHECKING:
    from rich.table import Table

_ACCURACY: dict[Metric, str] = {
    "mean_accuracy": "share of a sample's questions answered",
    "all_correct": "share of samples with every answer right",
}

# What the rules do whose accuracies a task keeps beside a model's (tasks.mqar_noisy, MqarNoisy.references).
_RULES = {
    "bayes": "bayes knows how reliable each source is, and is the best possible",
    "majority": "majority takes the most frequent value",
    "last": "last the last one",
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


def _references(record: Record) -> list[str]:
    """The names of the rules without a model that have a column."""
    return list(dict.fromkeys(name for group in groups(record) for name in group.references))


def _headings(record: Record) -> tuple[str, ...]:
    own = ("accuracy", "95 % interval")
    return ("variant", "length", "ratio", *_coordinates(record), *own, *_references(record), "samples")


def _title(record: Record) -> str:
    origin = record.checkpoint.source if record.checkpoint else f"seed {record.seed}"
    noise = label_noise(record)
    trained = f", trained with label noise {noise:g}" if noise else ""
    return f"{record.task.name} v{record.task.version}: {record.model.cell}, {origin}{trained}"


def _caption(record: Record) -> str:
    parts = [f"accuracy: {_ACCURACY[record.task.metric]}"]
    if any("depth" in cell.coordinates for cell in record.cells):
        parts[0] += ", over all depths"
    if names := _references(record):
        parts.append(f"without a model: {', '.join(_RULES.get(name, name) for name in names)}")
    longest, wanted = record.longest_trained, record.train_length
    if longest is not None and wanted is not None and longest < wanted:
        parts.append(f"trained on at most {longest} tokens, so 1x ({wanted}) is beyond training already")
    if record.comparable_to:
        parts.append(f"comparable to {record.comparable_to}")
    return "; ".join([*parts, f"record {record.record_id[:12]}"])


def _rows(record: Record) -> Iterator[tuple[str, ...]]:
    names, rules = _coordinates(record), _references(record)
    for group in groups(record):
        low, high = group.interval
        ratio = "" if group.ratio is None else f"{group.ratio:g}x"
        place = [str(group.coordinates[name]) if name in group.coordinates else "" for name in names]
        span = f"[{low:.3f}, {high:.3f}]"
        without = [f"{group.references[name]:.3f}" if name in group.references else "" for name in rules]
        yield group.variant, str(group.eval_length), ratio, *place, f"{group.value:.3f}", span, *without, str(group.n)
