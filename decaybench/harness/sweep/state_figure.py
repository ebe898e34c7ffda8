"""Accuracy against the numbers that a model's state holds: what a larger state buys, by variant and length.

The numbers are each record's own, counted from a real cache. A line joins the medians over seeds of one architecture
with the same add-ons and the same training; every seed is a mark.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from decaybench.harness.drawing import (
    DASHED,
    MANY_INKS,
    MANY_MARKERS,
    evenly,
    legend_below,
    log2_axis,
    make_panels,
    name_axes,
    save,
    style,
    thin,
    unit_axis,
)
from decaybench.results.leaderboard import BITS, columns, distinct, placed, settings_of, short
from decaybench.results.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_COLUMNS = 4
_WIDTH, _HEIGHT = 2.4, 2.2  # of a panel, inches
_LOOKS: tuple[dict[str, Any], ...] = (
    {"linestyle": DASHED, "markerfacecolor": "white"},
    {"linestyle": "-"},
    {"linestyle": "-.", "fillstyle": "bottom"},
    {"linestyle": ":", "fillstyle": "left"},
)
Place = tuple[str, str]  # a variant, and a column of the leaderboard's summary


@dataclass
class Line:
    """Models that differ in their sizes, and so in their state, alone. values: by place and state, one a seed."""

    architecture: str
    model: str
    settings: dict[str, Any]
    values: dict[Place, dict[int, list[float]]] = field(default_factory=dict)

    @property
    def states(self) -> set[int]:
        """Sizes of the state, elements."""
        return {state for by_state in self.values.values() for state in by_state}


def draw_states(records: Sequence[Record], folder: Path) -> list[Path]:
    """For each task in which the states of one line differ, `state-TASK`.png and .svg; their paths. Raises RunError."""
    drawn = []
    for task in distinct(record.task.name for record in records):
        figure = state_figure([record for record in records if record.task.name == task])
        drawn += save(figure, folder, f"state-{task}") if figure else []
    return drawn


def state_figure(records: Sequence[Record]) -> Figure | None:
    """Records of one task as a figure: a row of panels a variant, a panel a length. None: no line has two states."""
    lines = state_lines(records)
    if not any(len(line.states) > 1 for line in lines):
        return None
    places = distinct(place for line in lines for place in line.values)
    variants = distinct(variant for variant, _ in places)
    lengths = evenly(
        [column for column in columns(records) if any(column == name for _, name in places)], _MOST_COLUMNS
    )
    measure = "accuracy" if records[0].cells[0].bits_per_byte is None else BITS
    size = (max(5.6, _WIDTH * len(lengths)), _HEIGHT * len(variants) + 1.2)
    looks = _looks(lines)
    with style():
        title = f"{records[0].task.name}: {measure} by size of the state"
        figure, panels = make_panels(title, len(variants) * len(lengths), len(lengths), size)
        name_axes(panels, len(lengths), "state elements", measure)
        for panel, (variant, length) in zip(panels, ((v, n) for v in variants for n in lengths), strict=True):
            panel.set_title(f"{variant}, {length}" if len(variants) > 1 else length)
            _draw_panel(panel, lines, looks, (variant, length), measure)
        states = sorted({state for line in lines for state in line.states})
        log2_axis(panels[0], states, [f"{state:,}" for state in states], states[0], states[-1])
        legend_below(figure, _legend(lines, looks), 3, title=textwrap.fill(_caption(lines), int(13 * size[0])))
        thin(figure)
    return figure


def state_lines(records: Sequence[Record]) -> list[Line]:
    """The figure's lines, in order of their models. Settings of the model tell no lines apart but by its name."""
    lines: dict[str, Line] = {}
    for record in records:
        settings = {key: value for key, value in settings_of(record).items() if not key.startswith("model.")}
        key = repr([record.model.cell, sorted(settings.items())])
        line = lines.setdefault(key, Line(record.model.architecture, record.model.cell, settings))
        found: dict[Place, list[float]] = {}
        for column, cell in placed(record):
            value = cell.value if cell.bits_per_byte is None else cell.bits_per_byte
            found.setdefault((cell.variant, column), []).append(value)
        state = sum(record.model.state_elements)
        for place, values in found.items():  # several: depths
            line.values.setdefault(place, {}).setdefault(state, []).append(fmean(values))
    return sorted(lines.values(), key=lambda line: (line.architecture, line.model))  # the architecture alone first


def _looks(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """An ink and a mark an architecture, a kind of line for what else differs: dashed and hollow the first."""
    names = distinct(line.architecture for line in lines)
    looks = []
    for line in lines:
        place = names.index(line.architecture)
        alike = [other for other in lines if other.architecture == line.architecture]
        kind = next(index for index, other in enumerate(alike) if other is line)
        look = {"color": MANY_INKS[place % len(MANY_INKS)], "marker": MANY_MARKERS[place % len(MANY_MARKERS)]}
        looks.append({**look, "linewidth": 1.5, "markersize": 4.5, **_LOOKS[min(kind, len(_LOOKS) - 1)]})
    return looks


def _draw_panel(
    panel: Axes, lines: Sequence[Line], looks: Sequence[dict[str, Any]], place: Place, measure: str
) -> None:
    if measure == BITS:
        panel.grid(axis="y")
    else:
        unit_axis(panel)
    for line, look in zip(lines, looks, strict=True):
        by_state = sorted(line.values.get(place, {}).items())
        panel.plot(
            [state for state, _ in by_state], [median(values) for _, values in by_state], **look | {"marker": ""}
        )
        marks = [(state, value) for state, values in by_state for value in values]
        seeds = {**look, "linestyle": "none", "gid": "seeds", "zorder": 3}
        panel.plot([state for state, _ in marks], [value for _, value in marks], **seeds)


def _legend(lines: Sequence[Line], looks: Sequence[dict[str, Any]]) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = []
    for line, look in zip(lines, looks, strict=True):
        alike = [other.settings for other in lines if other.model == line.model]
        differ = [key for key in line.settings if len(distinct(settings.get(key) for settings in alike)) > 1]
        told = [f"{key.rpartition('.')[2]}={short(line.settings[key])}" for key in differ]
        handles.append(Line2D([], [], label=" ".join([line.model, *told]), **look))
    return handles


def _caption(lines: Sequence[Line]) -> str:
    seeds = [len(values) for line in lines for by_state in line.values.values() for values in by_state.values()]
    few, most = min(seeds), max(seeds)
    several = f"lines: medians of {few if few == most else f'{few} to {most}'} runs; marks: every run"
    return f"{several if most > 1 else 'one run each'}; state elements: of all layers, counted"
