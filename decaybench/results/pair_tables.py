"""Comparisons as tables, in a terminal and in Markdown: one with all that a pair has to say, or a row a model.

A `Grid` is a table's content; whoever shows it chooses the form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decaybench.results.differences import Difference
from decaybench.results.leaderboard import short

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

    from decaybench.results.pairs import Comparison

_LEFT = frozenset({"variant", "shown", "model"})
_NO_LIMIT = 10_000  # columns
_BREAK = "\n"  # in a cell: a line of its own in a terminal, a space in Markdown


@dataclass(frozen=True)
class Grid:
    """title, caption: what stands above and below; empty: nothing. left: the columns whose text begins at the left.

    sections: the rows that a line is drawn above.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str
    left: tuple[bool, ...]
    sections: tuple[int, ...] = ()

    def table(self, *, narrow: bool = False) -> Table:
        """For a terminal. narrow: bounds of intervals below one another, and variants above their models."""
        from rich.table import Table

        headings, left, rows = self.headings, self.left, self.rows
        if narrow:
            rows = tuple(tuple(_in_lines(cell) for cell in row) for row in rows)
        if narrow and headings[:2] == ("variant", "model"):
            headings, left = ("model", *headings[2:]), left[1:]
            rows = tuple((_BREAK.join(filter(None, row[:2])), *row[2:]) for row in rows)
        table = Table(title=self.title, title_justify="left", caption=self.caption or None, caption_justify="left")
        for heading, is_left in zip(headings, left, strict=True):
            table.add_column(heading, justify="left" if is_left else "right", overflow="fold")
        for number, row in enumerate(rows):
            if number in self.sections:
                table.add_section()
            table.add_row(*row)
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = self.table()
        fits = wide.__rich_measure__(console, options.update(width=_NO_LIMIT)).maximum <= options.max_width
        yield wide if fits else self.table(narrow=True)

    def markdown(self) -> str:
        """The same in Markdown: the title, the table, the caption."""
        rules = ["---" if left else "---:" for left in self.left]
        lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in (self.headings, rules, *self.rows)]
        return "\n\n".join(part for part in (self.title, "\n".join(lines), self.caption) if part)


def comparison_grid(one: Comparison, *, distance: bool) -> Grid:
    """All of one comparison. distance: also by octave of the distance."""
    few = "too few seeds" in [line.difference.verdict for line in one.lines]
    where = [f"{key}={short(value)}" for key, value in one.where.items()]
    seeds = f"seeds {_seeds(one.seeds)}" + (": too few to show anything" if few else "")
    rules = list(dict.fromkeys(name for line in one.lines for name in line.references))
    place = ["variant", "length", *(["distance"] if distance else [])]
    headings = (*place, "base", "model", *rules, "difference", "95 %", "p", *([] if few else ["shown"]))
    rows: list[tuple[str, ...]] = []
    for line in one.lines:
        known = [f"{line.references[name]:.3f}" if name in line.references else "" for name in rules]
        values = [f"{line.base:.3f}", f"{line.other:.3f}", *known]
        octave = ["all"] if distance else []
        rows.append((line.variant, line.column, *octave, *values, *_told(line.difference, few=few)))
        for low, part in line.by_distance.items() if distance else ():
            rows.append(("", "", f"{low}-{2 * low - 1}", *[""] * len(values), *_told(part, few=few)))
    title = "; ".join([f"{one.task}: {one.other} against {one.base}", *where, seeds])
    return Grid(title, headings, tuple(rows), _others(one), tuple(name in ("variant", "shown") for name in headings))


def summary_grid(several: Sequence[Comparison]) -> Grid:
    """Comparisons of one task in one table: each base's means, and below it the differences of its models."""
    lengths = list(dict.fromkeys(line.column for one in several for line in one.lines))
    variants = list(dict.fromkeys(line.variant for one in several for line in one.lines))
    sizes = [name for name in ("parameters", "state") if any(_ratio(one, name) not in ("", "1") for one in several)]
    rows: list[tuple[str, ...]] = []
    sections = []
    for variant in variants:
        for base, models in _by_base(several, variant, lengths).items():
            sections.append(len(rows))
            rows.append((variant, *base, *[""] * len(sizes)))
            for one in models:
                lines = {line.column: line for line in one.lines if line.variant == variant}
                values = [_compact(lines[length].difference) if length in lines else "" for length in lengths]
                rows.append(("", _label(one), _seeds(one.seeds), *values, *(_ratio(one, name) for name in sizes)))
    headings = ("variant", "model", "seeds", *lengths, *(f"{name} x" for name in sizes))
    bases = dict.fromkeys(one.base for one in several)
    return Grid(
        f"{several[0].task}: against {', '.join(bases)}",
        headings,
        tuple(rows),
        "with a sign: the difference from the base above, with its 95 % interval; *: it leaves out 0",
        tuple(name in _LEFT for name in headings),
        tuple(sections),
    )


def _in_lines(cell: str) -> str:
    """An interval's two bounds on a line each."""
    return cell.replace(", ", "," + _BREAK) if "[" in cell else cell


def _by_base(
    several: Sequence[Comparison], variant: str, lengths: Sequence[str]
) -> dict[tuple[str, ...], list[Comparison]]:
    """The comparisons of a variant by what there is to say of their base: name, seeds, means."""
    found: dict[tuple[str, ...], list[Comparison]] = {}
    for one in several:
        lines = {line.column: line for line in one.lines if line.variant == variant}
        if lines:
            means = [f"{lines[length].base:.3f}" if length in lines else "" for length in lengths]
            found.setdefault((one.base, _seeds(one.seeds), *means), []).append(one)
    return found


def _ratio(one: Comparison, part: str) -> str:
    value = getattr(one, part)
    return "" if value is None else f"{value:.3g}"


def _label(one: Comparison) -> str:
    return ", ".join([one.other, *(f"{key}={short(value)}" for key, value in one.where.items())])


def _seeds(seeds: Sequence[int]) -> str:
    """0-2 where there is no gap, else each."""
    whole = len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]}-{seeds[-1]}" if whole else ", ".join(map(str, seeds))


def _compact(difference: Difference) -> str:
    if difference.interval is None:
        return f"{difference.value:+.3f}{_BREAK}one seed"
    low, high = difference.interval
    star = "" if low <= 0 <= high else "*"
    return f"{difference.value:+.3f}{star}{_BREAK}[{low:+.3f}, {high:+.3f}]"


def _told(difference: Difference, *, few: bool) -> list[str]:
    p = "" if difference.p is None else f"{difference.p:.3f}"
    return [f"{difference.value:+.3f}", _range(difference), p, *([] if few else [difference.verdict])]


def _range(difference: Difference) -> str:
    if difference.interval is None:
        return "one seed"
    return f"{difference.interval[0]:+.3f} to {difference.interval[1]:+.3f}"


def _others(one: Comparison) -> str:
    parts = []
    if one.loss is not None:
        parts.append(f"final training loss {one.loss.value:+.3f} ({_range(one.loss)}) nats a label")
    if one.speed is not None:
        parts.append(f"speed of training x {one.speed:.4g}")
    parts.append(f"parameters x {one.parameters:.4g}")
    if one.state is not None:
        base, other = one.state_elements
        parts.append(f"state x {one.state:.4g} ({other:,} and {base:,} numbers)")
    return "; ".join(parts)


def _cell(text: str) -> str:
    return text.replace(_BREAK, " ").replace("|", "\\|")
