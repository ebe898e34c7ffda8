"""Figures of an evaluation: .png for a page, .svg for a paper; the same bytes every time.

In all of them a darker blue is a higher accuracy or a longer sample, dashed grey or a frame marks the training length,
and a bar is a 95 % interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, log2, nan, sqrt
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from decaybench.harness.drawing import (
    INK,
    INKS,
    MARKERS,
    MUTED,
    apart,
    beside,
    legend_below,
    log2_axis,
    make_panels,
    mark_training_length,
    name_axes,
    name_panel,
    ratio_label,
    save,
    shades,
    style,
    thin,
    tokens_label,
    unit_axis,
)
from decaybench.harness.rule_lines import SAID, draw_levels, draw_rules
from decaybench.harness.text_plots import bits_by_length, bits_by_position
from decaybench.results.record import CellResult, DistanceBin, Group, Record, groups, said_of_training, trained_with

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

_MOST_NUMBERS = 40  # rows or columns of a heat map; with more of them no number could be read
_FEW = 10  # samples; the share of fewer says next to nothing
_HOLLOW = f"fewer than {_FEW} samples"


def draw_evaluation(record: Record, folder: Path) -> list[Path]:
    """Save `evaluation_figures` as .png and .svg in `folder`, and return their paths. Raises RunError."""
    return [path for name, figure in evaluation_figures(record).items() for path in save(figure, folder, name)]


def evaluation_figures(record: Record) -> dict[str, Figure]:
    """The figures that a record has data for, by name.

    accuracy-length-depth: a heat map a variant, of the cells with a depth. accuracy-length: a line a variant, depths
    pooled, each in a panel of its own where rules without a model stand beside it. accuracy-distance: a panel a variant
    and a line an evaluation length, of the cells with distances; a point is a share of questions, and its interval
    counts samples (`DistanceBin.share_interval`). Of running text there are bits-length and bits-position alone.
    """
    figures = {}
    with style():
        if any(cell.by_position for cell in record.cells):
            return {"bits-length": bits_by_length(record), "bits-position": bits_by_position(record)}
        if any("depth" in cell.coordinates for cell in record.cells):
            figures["accuracy-length-depth"] = _length_depth(record)
        figures["accuracy-length"] = _length(record)
        if any(cell.by_distance for cell in record.cells):
            figures["accuracy-distance"] = _distance(record)
    return figures


def _length_depth(record: Record) -> Figure:
    cells = [cell for cell in record.cells if "depth" in cell.coordinates]
    variants = _variants(cells)
    lengths = _lengths(cells)
    depths = sorted({cell.coordinates["depth"] for cell in cells})
    wide, high = (0.55, 0.27) if max(len(lengths), len(depths)) <= _MOST_NUMBERS else (0.12, 0.06)
    columns = min(len(variants), max(1, int(7.2 / (wide * len(lengths)))))
    size = (
        max(5.6, min(columns * wide * len(lengths) + 1.0, 100)),
        max(2.6, min(ceil(len(variants) / columns) * (high * len(depths) + 0.7) + 0.7, 100)),
    )
    title = _title(record, variants, "accuracy by length and depth")
    figure, panels = make_panels(title, len(variants), columns, size)
    for panel, variant in zip(panels, variants, strict=True):
        here = [cell for cell in cells if cell.variant == variant]
        values: dict[tuple[float, int], list[float]] = {}
        for cell in here:
            values.setdefault((cell.coordinates["depth"], cell.eval_length), []).append(cell.value)
        grid = np.array([[fmean(values.get((depth, length), [nan])) for length in lengths] for depth in depths])
        _heat_map(figure, panel, grid)
        name_panel(panel, variant, variants)
        panel.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
        panel.set_xticks(range(len(lengths)), list(lengths.values()))
        if record.train_length in lengths:
            _frame(panel, list(lengths).index(record.train_length), len(depths))
    framed = " (framed: training length)" if record.train_length in lengths else ""
    one_row = columns == len(panels)
    name_axes(
        panels, columns, "" if columns > 1 else f"length, tokens{framed}", "depth of the needle" if one_row else ""
    )
    if columns > 1:  # too long for a panel
        figure.supxlabel(f"length, tokens{framed}", size=10)
    if not one_row:  # a panel of one depth is lower than the name is long
        figure.supylabel("depth of the needle", size=10)
    thin(figure)
    return figure


def _length(record: Record) -> Figure:
    found = groups(record)
    variants = _variants(record.cells)
    ruled = any(group.references for group in found)  # a rule has a line a variant: each variant has its panel then
    shown = [[variant] for variant in variants] if ruled else [variants]
    columns = len(shown) if len(shown) <= 3 else 2
    size = (6.4 if columns == 1 else 8.4, 2.8 * ceil(len(shown) / columns) + 1.0)
    over = ", mean over depths" if any("depth" in cell.coordinates for cell in record.cells) else ""
    title = f"accuracy by length{over}" + (f"; {SAID}" if ruled else "")
    figure, panels = make_panels(_title(record, variants, title), len(shown), columns, size)
    _length_axis(panels, record)
    for panel, here in zip(panels, shown, strict=True):
        unit_axis(panel)
        if ruled:
            name_panel(panel, here[0], variants, pad=17)  # above "training length"
            _rules(panel, [group for group in found if group.variant == here[0]])
        _length_lines(panel, [group for group in found if group.variant in here], variants)
        mark_training_length(panel, record.train_length, record.longest_trained)
    name_axes(panels, columns, "length (tokens)", "accuracy, 95 % interval")
    thin(figure)
    return figure


def _length_lines(panel: Axes, found: Sequence[Group], variants: Sequence[str]) -> None:
    """A line for each variant among the groups, named where there are several; variants: all of the figure."""
    here = list(dict.fromkeys(group.variant for group in found))
    ends = []
    for variant in here:
        place = variants.index(variant)
        ink, marker = INKS[place % len(INKS)], MARKERS[place % len(MARKERS)]
        points = sorted((group for group in found if group.variant == variant), key=lambda group: group.eval_length)
        lengths = [group.eval_length for group in points]
        joined = _is_curve(points)
        _intervals(panel, lengths, [group.interval for group in points], ink)
        values = [group.value for group in points]
        panel.plot(
            lengths, values, color=ink, marker=marker, linestyle="-" if joined else "none", label=variant, zorder=3
        )
        if joined:
            ends.append((points[-1].eval_length, points[-1].value, variant, ink))
        else:
            _name_points(panel, points)
    if len(here) > 1:
        _name_lines(panel, ends, all_lines=len(ends) == len(here))


def _is_curve(points: Sequence[Group]) -> bool:
    """Whether there is one point a length."""
    return len({group.eval_length for group in points}) == len(points)


def _distance(record: Record) -> Figure:
    from matplotlib.lines import Line2D

    cells = [cell for cell in record.cells if cell.by_distance]
    variants = _variants(cells)
    lengths = _lengths(cells)
    columns = len(variants) if len(variants) <= 3 else 2
    size = (6.4 if columns == 1 else 8.0, 2.4 * ceil(len(variants) / columns) + 1.4)
    at = f" at length {next(iter(lengths))}" if len(lengths) == 1 else ""
    ruled = f"; {SAID}, over all distances" if any(cell.references for cell in cells) else ""
    title = _title(record, variants, f"accuracy by distance{at}, 95 % intervals with samples as units{ruled}")
    figure, panels = make_panels(title, len(variants), columns, size)
    inks = shades(len(lengths))
    for panel, variant in zip(panels, variants, strict=True):
        unit_axis(panel)
        name_panel(panel, variant, variants, pad=17)  # above "training length"
        draw_levels(panel, _levels([cell for cell in cells if cell.variant == variant]))
        for ink, length in zip(inks, lengths, strict=True):
            bins = _pooled(cell for cell in cells if (cell.variant, cell.eval_length) == (variant, length))
            _distance_line(panel, bins, ink, f"length {lengths[length]}".replace("\n", ", "))
    _octave_axis(panels[0], cells, record.train_length)
    for panel in panels:
        mark_training_length(panel, record.train_length, record.longest_trained)
    name_axes(panels, columns, "distance to the answer (tokens)", "accuracy per question")
    handles = panels[0].get_legend_handles_labels()[0] if len(lengths) > 1 else []
    if any(line.get_gid() == _HOLLOW for panel in panels for line in panel.lines):
        handles.append(
            Line2D([], [], color=MUTED, marker="o", markerfacecolor="white", linestyle="none", label=_HOLLOW)
        )
    if handles:
        legend_below(figure, handles, columns=4 if columns == 1 else 5)
    thin(figure)
    return figure


def _title(record: Record, variants: Sequence[str], shown: str) -> str:
    asked = f"{record.task.name} {variants[0]}" if len(variants) == 1 else record.task.name
    said = said_of_training(trained_with(record))
    trained = f", trained with {said}," if said else ""
    return f"{record.model.cell}{trained} on {asked}: {shown}"


def _variants(cells: Iterable[CellResult]) -> list[str]:
    return list(dict.fromkeys(cell.variant for cell in cells))


def _lengths(cells: Iterable[CellResult]) -> dict[int, str]:
    """The evaluation lengths, shortest first, each with its label: tokens, and times the training length."""
    ratios = {cell.eval_length: cell.ratio for cell in cells}
    return {
        length: tokens_label(length) + ("" if ratio is None else f"\n{ratio_label(ratio)}")
        for length, ratio in sorted(ratios.items())
    }


def _heat_map(figure: Figure, panel: Axes, grid: NDArray[np.float64]) -> None:
    image = panel.imshow(grid, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    if max(grid.shape) > _MOST_NUMBERS:
        figure.colorbar(image, ax=panel, label="accuracy")
        return
    for (row, column), value in np.ndenumerate(grid):
        if not np.isnan(value):
            ink = "white" if value > 0.68 else INK  # where white has the higher contrast
            panel.text(column, row, f"{value:.2f}", ha="center", va="center", size=9, color=ink)


def _frame(panel: Axes, column: int, rows: int) -> None:
    from matplotlib.patches import Rectangle

    frame = Rectangle((column - 0.5, -0.5), 1, rows, fill=False, edgecolor=INK, linewidth=1.8, clip_on=False)
    panel.add_patch(frame)
    for label in panel.get_xticklabels()[column : column + 1]:  # none in a panel that has another below it
        label.set_fontweight("bold")


def _length_axis(panels: Sequence[Axes], record: Record) -> None:
    """Ticks at every length, in bold at the training length; the panels share their axes."""
    ticks, trained = _lengths(record.cells), record.train_length
    if trained is not None:
        ticks.setdefault(trained, f"{tokens_label(trained)}\n1x")
    log2_axis(panels[0], list(ticks), list(ticks.values()), min(ticks), max(ticks))
    for panel in panels:
        for length, label in zip(ticks, panel.get_xticklabels(), strict=False):  # none where another panel is below
            if length == trained:
                label.set_fontweight("bold")


def _octave_axis(panel: Axes, cells: Iterable[CellResult], train_length: int | None) -> None:
    bins = [part for cell in cells for part in cell.by_distance]
    low = min(part.low for part in bins)
    high = max(part.high for part in bins)
    ticks = [2**power for power in range(int(log2(low)), int(log2(high)) + 1)]
    ticks = ticks[:: ceil(len(ticks) / 9)]
    log2_axis(panel, ticks, [tokens_label(tick) for tick in ticks], low, max(high, train_length or 1))


def _rules(panel: Axes, points: Sequence[Group]) -> None:
    """Lines over length of what rules reach; where a length has several points, their mean."""
    found: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for group in points:
        for name, value in group.references.items():
            found.setdefault(name, {}).setdefault(group.eval_length, []).append((group.n, value))
    draw_rules(panel, {name: {length: _mean(parts) for length, parts in at.items()} for name, at in found.items()})


def _levels(cells: Sequence[CellResult]) -> dict[str, float]:
    """What each rule reaches in these cells together, the mean over samples."""
    found: dict[str, list[tuple[int, float]]] = {}
    for cell in cells:
        for name, value in (cell.references or {}).items():
            found.setdefault(name, []).append((cell.n, value))
    return {name: _mean(parts) for name, parts in found.items()}


def _mean(parts: Sequence[tuple[int, float]]) -> float:
    """Of values with their numbers of samples."""
    return sum(n * value for n, value in parts) / sum(n for n, _ in parts)


def _intervals(panel: Axes, x: Sequence[float], intervals: Sequence[tuple[float, float]], ink: Any) -> None:
    panel.vlines(x, [low for low, _ in intervals], [high for _, high in intervals], color=ink, linewidth=1.5, alpha=0.5)


def _name_lines(panel: Axes, ends: Sequence[tuple[float, float, str, str]], all_lines: bool) -> None:
    """Names at the lines' ends, kept apart; a legend where there are many lines, or where they end at other lengths."""
    if not all_lines or len(ends) > 4 or len({x for x, *_ in ends}) > 1:
        panel.legend()
        return
    heights = apart([y for _, y, _, _ in ends], 0.075)
    for (_, _, name, ink), height in zip(ends, heights, strict=True):
        beside(panel, (1, height), name, xycoords=("axes fraction", "data"), color=ink)


def _name_points(panel: Axes, points: Sequence[Group]) -> None:
    for length in {group.eval_length for group in points}:
        here = [group for group in points if group.eval_length == length]
        for group, height in zip(here, apart([group.value for group in here], 0.06), strict=True):
            name = ", ".join(f"{key} {value}" for key, value in group.coordinates.items())
            beside(panel, (length, height), name, xycoords="data", size=8)


def _pooled(cells: Iterable[CellResult]) -> list[DistanceBin]:
    """The cells' questions by octave, nearest first."""
    found: dict[int, list[DistanceBin]] = {}
    for cell in cells:
        for part in cell.by_distance:
            found.setdefault(part.low, []).append(part)
    return [
        DistanceBin(
            low=low,
            high=parts[0].high,
            samples=sum(part.samples for part in parts),
            asked=sum(part.asked for part in parts),
            correct=sum(part.correct for part in parts),
        )
        for low, parts in sorted(found.items())
    ]


def _distance_line(panel: Axes, bins: Sequence[DistanceBin], ink: Any, name: str) -> None:
    """Each octave at its geometric middle; one with few samples is hollow. The line joins neighbours only."""
    look = {"color": ink, "marker": "o", "zorder": 3}
    intervals = [part.share_interval() for part in bins]
    _intervals(panel, [_point(part)[0] for part in bins], intervals, ink)
    firm = [part for part in bins if part.samples >= _FEW]
    line: list[tuple[float, float]] = []
    for place, part in enumerate(firm):
        if place > 0 and firm[place - 1].high != part.low:
            line.append((nan, nan))
        line.append(_point(part))
    panel.plot([x for x, _ in line], [y for _, y in line], label=name, **look)
    few = [_point(part) for part in bins if part.samples < _FEW]
    if few:
        look |= {"markerfacecolor": "white", "linestyle": "none", "gid": _HOLLOW}
        panel.plot([x for x, _ in few], [y for _, y in few], **look)


def _point(part: DistanceBin) -> tuple[float, float]:
    return sqrt(part.low * part.high), part.correct / part.asked
