"""A record as a table, in a terminal and in a notebook: a row for each variant, length and coordinates but depth.

Of running text there is a second table, of bits by byte at each position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from decaybench.core.scoring import Metric
from decaybench.results.record import CellResult, Group, Record, groups, said_of_training, trained_with
from decaybench.results.statistics import t_interval

if TYPE_CHECKING:
    from rich.console import RenderableType

_ACCURACY: dict[Metric, str] = {
    "mean_accuracy": "share of a sample's questions answered",
    "all_correct": "share of samples with every answer right",
}

_TEXT = "share of tokens that were the first choice"
_UNKNOWN = "—"

# What the rules do whose accuracies a task keeps beside a model's (tasks.mqar_noisy, MqarNoisy.references).
_RULES = {
    "bayes": "bayes knows how reliable each source is, and is the best possible",
    "majority": "majority takes the most frequent value",
    "last": "last the last one",
    "guess": "guess takes any of a story's candidates",
}


def record_table(record: Record) -> RenderableType:
    """The tables for a terminal."""
    from rich.console import Group
    from rich.table import Table

    tables = []
    for found in _tables(record):
        table = Table(title=found.title, title_justify="left", caption=found.caption, caption_justify="left")
        for heading in found.headings:
            table.add_column(heading, justify="left" if heading == "variant" else "right")
        for row in found.rows:
            table.add_row(*row)
        tables.append(table)
    return tables[0] if len(tables) == 1 else Group(*tables)


def record_html(record: Record) -> str:
    """The tables for a notebook."""
    return "".join(map(_html, _tables(record)))


class _Table(NamedTuple):
    title: str
    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def _tables(record: Record) -> Iterator[_Table]:
    yield _Table(_title(record), _caption(record), _headings(record), list(_rows(record)))
    cells = [cell for cell in record.cells if cell.by_position]
    if cells:
        longest = max(cells, key=lambda cell: cell.eval_length)
        caption = (
            "of what follows a token so many tokens into its document, or into the window where it began before that; "
            f"perplexity: of a token, at length {longest.eval_length}"
        )
        headings = ["positions", *(f"length {cell.eval_length}" for cell in cells), "perplexity"]
        yield _Table("bits/byte by position", caption, headings, list(_by_position(cells, longest)))


def _by_position(cells: Sequence[CellResult], longest: CellResult) -> Iterator[list[str]]:
    found = [{part.high: part for part in cell.by_position or ()} for cell in cells]
    perplexities = {part.high: part.perplexity for part in longest.by_position or ()}
    for high in sorted({high for bins in found for high in bins}):
        bits = [bins[high].bits_per_byte if high in bins else None for bins in found]
        shown = ["" if value is None else f"{value:.3f}" for value in bits]
        perplexity = perplexities.get(high)
        yield [
            str(high) if high <= 2 else f"{high // 2 + 1}-{high}",
            *shown,
            "" if perplexity is None else f"{perplexity:.4g}",
        ]


def _bits(group: Group) -> list[str]:
    """Bits by byte, and Student's interval of it: of few windows a standard error alone says too little."""
    bits, error = group.bits_per_byte or (None, None)
    if bits is None or error is None:
        return [_UNKNOWN if bits is None else f"{bits:.3f}", _UNKNOWN]
    low, high = t_interval(bits, error, group.n)
    return [f"{bits:.3f}", f"[{max(0.0, low):.3f}, {high:.3f}]"]


def _html(table: _Table) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    lines = ["<tr>" + "".join(f"<td>{escape(entry)}</td>" for entry in row) + "</tr>" for row in table.rows]
    return (
        f"<table><caption>{escape(table.title)}<br>{escape(table.caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


def _coordinates(record: Record) -> list[str]:
    """The names of the coordinates that have a column."""
    return list(dict.fromkeys(name for group in groups(record) for name in group.coordinates))


def _references(record: Record) -> list[str]:
    """The names of the rules without a model that have a column."""
    return list(dict.fromkeys(name for group in groups(record) for name in group.references))


def _headings(record: Record) -> list[str]:
    own = ["accuracy", "95 % interval"]
    if _is_text(record):
        own = ["bits/byte", "95 % interval", *own]
    elif _has_perplexity(record):
        own += ["perplexity"]
    return ["variant", "length", "ratio", *_coordinates(record), *own, *_references(record), "samples"]


def _is_text(record: Record) -> bool:
    return any(cell.bits_per_byte is not None for cell in record.cells)


def _has_perplexity(record: Record) -> bool:
    return not _is_text(record) and any(cell.log_likelihood is not None for cell in record.cells)


def _title(record: Record) -> str:
    origin = record.checkpoint.source if record.checkpoint else f"seed {record.seed}"
    said = said_of_training(trained_with(record))
    trained = f", trained with {said}" if said else ""
    return f"{record.task.name} v{record.task.version}: {record.model.cell}, {origin}{trained}"


def _caption(record: Record) -> str:
    text = _is_text(record)
    parts = [f"accuracy: {_TEXT if text else _ACCURACY[record.task.metric]}"]
    if any("depth" in cell.coordinates for cell in record.cells):
        parts[0] += ", over all depths"
    if _has_perplexity(record):
        parts.append("perplexity: of a whole answer, exp(-mean log-likelihood)")
    if text:
        parts.append("intervals: windows as units")
    if names := _references(record):
        parts.append(f"without a model: {', '.join(_RULES.get(name, name) for name in names)}")
    longest, wanted = record.longest_trained, record.train_length
    if longest is not None and wanted is not None and longest < wanted:
        parts.append(f"trained on at most {longest} tokens, so 1x ({wanted}) is beyond training already")
    if record.selection:
        chosen = record.selection.chosen
        parts.append(f"learning rate {chosen.learning_rate:.3g} and step {chosen.step} chosen on a validation set")
    if record.comparable_to:
        parts.append(f"comparable to {record.comparable_to}")
    return "; ".join([*parts, f"record {record.record_id[:12]}"])


def _rows(record: Record) -> Iterator[list[str]]:
    names, rules = _coordinates(record), _references(record)
    for group in groups(record):
        low, high = group.interval
        ratio = "" if group.ratio is None else f"{group.ratio:.3g}x"
        place = [str(group.coordinates[name]) if name in group.coordinates else "" for name in names]
        own = [f"{group.value:.3f}", f"[{low:.3f}, {high:.3f}]"]
        if _is_text(record):
            own = [*_bits(group), *own]
        elif _has_perplexity(record):
            own.append("" if group.perplexity is None else f"{group.perplexity:.4g}")
        without = [f"{group.references[name]:.3f}" if name in group.references else "" for name in rules]
        yield [group.variant, str(group.eval_length), ratio, *place, *own, *without, str(group.n)]
