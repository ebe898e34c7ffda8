"""The figure of a leaderboard: accuracy by length, a panel an architecture, the model alone against its add-ons.

An ink and a mark an architecture, the same in every figure; dashed and hollow is the architecture alone, solid and
filled its first add-on. Every seed is a mark and a line joins their medians. Where there are several architectures, one
more panel shows their medians together. Thin grey is what rules without a model reach. Of running text it is bits by
byte by position, in the longest windows that all seeds were asked.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decaybench.core.errors import UserError
from decaybench.harness.drawing import (
    DASHED,
    MANY_INKS,
    MANY_MARKERS,
    MUTED,
    legend_below,
    log2_axis,
    make_panels,
    name_axes,
    ratio_label,
    save,
    style,
    thin,
    tokens_label,
    unit_axis,
)
from decaybench.harness.rule_lines import SAID, draw_rules
from decaybench.models.registry import architectures
from decaybench.results.comparison import comparable
from decaybench.results.leaderboard import BITS, Row, differences, read_leaderboard
from decaybench.results.record import TRAINED_WITH, said_of_training

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_MOST_COLUMNS = 4
_WIDTH, _HEIGHT = 2.5, 1.95  # of a panel, inches
_PAGE = 8.4  # inches: 900 pixels of a README, its letters as large as the page's
_APART = 0.07  # octaves between the marks of two models
_ROOM = 0.05  # octaves beside a length that an axis has for marks in any case
_LOOKS: tuple[dict[str, Any], ...] = (
    {"linestyle": DASHED, "linewidth": 1.2, "markerfacecolor": "white"},
    {"linestyle": "-", "linewidth": 1.8},
    {"linestyle": "-.", "linewidth": 1.4, "fillstyle": "bottom"},
    {"linestyle": ":", "linewidth": 1.8, "fillstyle": "left"},
)
_TOGETHER = "all, medians"


def draw_leaderboard(
    file: Path, out: Path, *, task: str, variants: Sequence[str] | None = None, where: Iterable[str] = ()
) -> list[Path]:
    """Draw a leaderboard's records of one task into `out`'s .png and .svg, and return both paths.

    variants, where: see `comparison.comparable`. Raises UserError where the records aren't alike or `out` names another
    kind of file; RunError where it can't be written.
    """
    if out.suffix not in (".png", ".svg"):
        raise UserError(f"--out {out}: must end in .png or .svg; both are written")
    return save(leaderboard_figure(comparable(read_leaderboard(file), task, variants, where)), out.parent, out.stem)


def leaderboard_figure(lines: Sequence[Row]) -> Figure:
    """Accuracy by length of rows that may stand in one figure: for each variant a panel an architecture.

    Of running text: bits by byte by position. Raises UserError where there are no positions that all seeds have.
    """
    what, along = lines[0].measure, "length"
    if what == BITS:
        lines, along = [_by_position(row) for row in lines], "position"
    variants = list(dict.fromkeys(row.variant for row in lines))
    found = _in_order(dict.fromkeys(row.architecture for row in lines))
    titles = [*found, *([_TOGETHER] if len(found) > 1 else [])]
    rows = ceil(len(titles) / _MOST_COLUMNS)
    columns = ceil(len(titles) / rows)
    looks = _looks(lines)
    asked = f"{lines[0].task} {variants[0]}" if len(variants) == 1 else lines[0].task
    height = _HEIGHT if columns > 1 else 1.4 * _HEIGHT
    said = 1.6 if _rules(lines) else 1.4  # a line more
    size = (min(max(5.6, _WIDTH * columns), _PAGE), height * rows * len(variants) + said)
    with style():
        figure, panels = make_panels(f"{asked}: {what} by {along}", rows * columns * len(variants), columns, size)
        for number, variant in enumerate(variants):
            block = _block(panels[number * rows * columns :][: rows * columns], len(titles), columns)
            name_axes(block, columns, f"{along} (tokens)" if variant == variants[-1] else "", what)
            asked_alike = [row for row in lines if row.variant == variant]
            for place, (panel, title) in enumerate(zip(block, titles, strict=True), start=1):
                panel.set_title(title if len(variants) == 1 else f"{variant}: {title}")
                here = [row for row in asked_alike if title in (row.architecture, _TOGETHER)]
                last_of_row = place % columns == 0 or place == len(block)
                draw_rules(panel, _rules(asked_alike), named=last_of_row, apart_by=0.11 if columns > 1 else 0.055)
                _draw_panel(panel, here, looks, seeds=title != _TOGETHER)
        _length_axis(figure.axes, lines, _APART * (len(looks) - 1) / 2)
        legend_below(figure, list(_legend(looks)), 4, title=_caption(lines, int(13.5 * size[0])))
        thin(figure)
    return figure


def _by_position(row: Row) -> Row:
    """With octaves of the position in the place of lengths."""
    if not row.positions:
        raise UserError(f"{row.model}: its seeds have no length in common with text enough to draw by position")
    return replace(row, points={str(point.eval_length): point for point in row.positions})


def _block(panels: list[Axes], count: int, columns: int) -> list[Axes]:
    """The first `count` panels; those after them are taken away."""
    for place in range(count, len(panels)):
        panels[place].remove()
        panels[place - columns].tick_params(labelbottom=True)  # it is the last of its column now
    return panels[:count]


def _looks(lines: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The line and mark of each set of add-ons, the architecture alone first."""
    addons = sorted({_addons(row) for row in lines}, key=lambda name: (name != "", name != "post", name))
    first = 0 if "" in addons else 1
    return {name: _LOOKS[min(kind, len(_LOOKS) - 1)] for kind, name in enumerate(addons, first)}


def _draw_panel(panel: Axes, here: Sequence[Row], looks: dict[str, dict[str, Any]], seeds: bool) -> None:
    """Rows as lines; seeds: with a mark each, models side by side."""
    if any(row.measure == BITS for row in here):
        panel.grid(axis="y")
    else:
        unit_axis(panel)
    order = _in_order({*architectures(), *(row.architecture for row in here)})
    for row in here:
        place = order.index(row.architecture)
        marker = MANY_MARKERS[(place + place // len(MANY_INKS)) % len(MANY_MARKERS)]
        look: dict[str, Any] = {"color": MANY_INKS[place % len(MANY_INKS)], "marker": marker, **looks[_addons(row)]}
        octaves = _APART * (list(looks).index(_addons(row)) - (len(looks) - 1) / 2) if seeds else 0
        points = sorted(row.points.values(), key=lambda point: point.eval_length)
        x = [point.eval_length * 2**octaves for point in points]
        medians = {**look, "marker": "none"} if seeds else {**look, "markersize": 3.5}
        panel.plot(x, [point.median for point in points], label=row.model, **medians)
        if seeds:
            each = [(at, value) for at, point in zip(x, points, strict=True) for value in point.by_seed.values()]
            look |= {"linestyle": "none", "markersize": 4, "markeredgewidth": 0.9, "gid": "seeds", "zorder": 3}
            panel.plot([at for at, _ in each], [value for _, value in each], **look)


def _rules(lines: Sequence[Row]) -> dict[str, dict[int, float]]:
    """What rules without a model reach, by name and length: on the most samples that a row was asked."""
    found: dict[str, dict[int, float]] = {}
    for point in sorted((point for row in lines for point in row.points.values()), key=lambda point: point.samples):
        for name, value in point.references.items():
            found.setdefault(name, {})[point.eval_length] = value
    return found


def _length_axis(panels: Sequence[Axes], lines: Sequence[Row], spread: float) -> None:
    """Ticks at every length, in bold at the training length; the panels share their axes.

    spread: octaves by which marks stand beside their length at most.
    """
    ratios = {point.eval_length: point.ratio for row in lines for point in row.points.values()}
    trained = lines[0].train_length
    if trained is not None:
        ratios.setdefault(trained, 1.0)
    labels = [
        tokens_label(length) + ("" if ratio is None else f"\n{ratio_label(ratio)}") for length, ratio in ratios.items()
    ]
    beyond = 2 ** max(0.0, spread - _ROOM)
    log2_axis(panels[0], list(ratios), labels, min(ratios) / beyond, max(ratios) * beyond)
    for panel in panels:
        for length, label in zip(ratios, panel.get_xticklabels(), strict=False):  # none where another is below
            if length == trained:
                label.set_fontweight("bold")


def _legend(looks: dict[str, dict[str, Any]]) -> Iterator[Line2D]:
    from matplotlib.lines import Line2D

    for name, look in looks.items():
        label = f"+{name}" if name else "architecture alone"
        yield Line2D([], [], label=label, **{"color": MUTED, "marker": "o", "markersize": 4, **look})


def _caption(lines: Sequence[Row], width: int) -> str:
    """What the figure's reader must know. width: characters a line."""
    points = [point for row in lines for point in row.points.values()]
    seeds = [len(point.by_seed) for point in points]
    shown = f"lines: medians of {_span(seeds, 'seed')}; marks: every seed" if max(seeds) > 1 else "one seed"
    samples = _span([n for point in points for n in point.samples], "sample")
    depths = ", mean over depths" if any(point.depths for point in points) else ""
    bold = "bold: training length; " if lines[0].train_length is not None else ""
    sizes = {name: {row.settings.get(f"model.{name}") for row in lines} for name in ("d_model", "n_layers")}
    told = [f"{name} {size}" for name, several in sizes.items() if len(several) == 1 for size in several - {None}]
    told.append(_span([row.parameters for row in lines], "parameter"))
    # The same in all lines of a figure.
    shares = {key: lines[0].settings[name] for key in TRAINED_WITH if (name := f"training.{key}") in lines[0].settings}
    if shares:
        told.append(f"trained with {said_of_training(shares)}")
    rules = [f"{SAID}, on the same samples"] if any(point.references for point in points) else []
    if lines[0].measure == BITS:
        rules.append(
            "a mark at 1024 is of positions 513 to 1024, in the longest windows that a model's seeds were asked"
        )
        samples = _span([n for point in points for n in point.samples], "window")
    said = [f"{shown}; {samples} a cell{depths}", *rules, bold + ", ".join(told), *_training(lines)]
    return "\n".join(textwrap.fill(line, width) for line in said)


def _training(lines: Sequence[Row]) -> Iterator[str]:
    """What was not the same in training."""
    told = []
    for key, values in differences(lines).items():
        if key.startswith("training."):
            numbers = [value for value in values if isinstance(value, int | float)]
            both = len(numbers) == len(values) > 2
            shown = (
                f"{min(numbers):g} to {max(numbers):g}"
                if both
                else " or ".join("none" if value is None else str(value) for value in values)
            )
            told.append(f"{key.removeprefix('training.')} {shown}")
    if told:
        yield f"by model: {', '.join(told)}"
    short = {
        row.model: row.longest_trained
        for row in lines
        if row.longest_trained and row.train_length and row.longest_trained < row.train_length
    }
    if short:
        yield "trained on shorter sequences only: " + ", ".join(f"{model} ({most})" for model, most in short.items())


def _span(numbers: Sequence[int], unit: str) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,} {unit}{'s' * (low != 1)}" if low == high else f"{low:,} to {high:,} {unit}s"


def _addons(row: Row) -> str:
    return row.model.partition("+")[2]


def _in_order(names: Iterable[str]) -> list[str]:
    """The architectures in the registry's order, others after them."""
    order = list(architectures())
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))
