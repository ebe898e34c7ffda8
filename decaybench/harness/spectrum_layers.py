"""Figures of timescales by layer: at rest, of a run or several, and measured.

Dashed is the start, solid after training, both at rest. A timescale above 1024 T is drawn there, as a triangle: over T
tokens it forgets a thousandth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from decaybench.harness.drawing import (
    DASHED,
    GRID,
    INKS,
    MUTED,
    evenly,
    handles,
    legend_below,
    make_panels,
    no_minor_ticks,
    save,
    shades,
    style,
)
from decaybench.harness.spectrum_report import LayerNumbers, RunSpectrum, titled
from decaybench.harness.spectrum_rest import CAP, LayerTimescales, Spectrum, units

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

START_LOOK: dict[str, Any] = {"linestyle": DASHED, "linewidth": 1.2, "markerfacecolor": "white"}

_MOST_LAYERS = 6
_FEW = 12  # channels; of fewer each is a mark
_DOT: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 2, "color": INKS[1], "zorder": 1}
_BEYOND: dict[str, Any] = {"marker": "^", "markersize": 5, "linestyle": "none", "clip_on": False, "zorder": 4}


def draw_timescales(spectrum: Spectrum, folder: Path) -> list[Path]:
    """Save `timescale_figure` as timescales.png and .svg in `folder`, and return their paths. Raises RunError."""
    return save(timescale_figure([spectrum]), folder, "timescales")


def timescale_figure(spectra: Sequence[Spectrum], names: Sequence[str] = ()) -> Figure:
    """The timescales at rest of each layer, slowest first: dashed at the start, solid after training; a row a model.

    A shade a position where timescales depend on it, and dots in the model's order where PoST's parameter P has another
    order than they. At most 6 layers, evenly chosen; each has one layer at least.
    """
    named = list(zip(names or [spectrum.cell for spectrum in spectra], spectra, strict=True))
    most = _MOST_LAYERS if len(spectra) == 1 else 3
    what = f"timescales at rest of the {units(layer for spectrum in spectra for layer in spectrum.layers)}"
    lone = INKS[2] if any(spectrum.scales for spectrum in spectra) else INKS[0]
    with style():
        title = f"{named[0][0]}: {what}" if len(spectra) == 1 else what
        figure, panels = _layer_panels(title, [(of.layers, (name, of), most) for name, of in named])
        for panel, layer, (name, spectrum) in panels:
            panel.set_title(f"layer {layer.layer}" if len(spectra) == 1 else f"{name}, layer {layer.layer}")
            _timescale_lines(panel, layer, spectrum, lone)
            _rank_axis(panel, layer.channels)
        _name_layers(panels, "slowest first")
        _timescale_axis(panels, list(spectra))
        legend_below(figure, list(_timescale_legend([panel for panel, *_ in panels], spectra)), columns=4)
    return figure


def measured_figure(runs: Sequence[RunSpectrum]) -> Figure:
    """Timescales over the tokens that a model read: medians, quartiles and 5 to 95 % of each head or channel.

    At t = T, and at the last position measured where timescales depend on it; dotted: at rest, of the same channels.
    """
    most = _MOST_LAYERS if len(runs) == 1 else 3
    title = "timescales measured over tokens: median, quartiles, 5 and 95\u00a0%"
    with style():
        reads = {str(run.read) for run in runs}
        title = titled(runs, title) + (f", on {runs[0].read}" if len(reads) == 1 else "")
        figure, panels = _layer_panels(title, [(run.measured_layers, run, most) for run in runs])
        for panel, layer, run in panels:
            where = f"layer {layer.rest.layer}"
            panel.set_title(where if len(runs) == 1 else f"{run.name}, {where}")
            _measured_bands(panel, layer, run)
            _rank_axis(panel, layer.rest.channels)
        _name_layers(panels, "slowest first")
        _timescale_axis(panels, [run.rest for run in runs])
        _common_legend(figure, [panel for panel, *_ in panels], columns=3)
    return figure


def _layer_panels(
    title: str, rows: Sequence[tuple[Sequence[Any], Any, int]]
) -> tuple[Figure, list[tuple[Axes, Any, Any]]]:
    """Panels of layers: a row a run, or one run alone in as many rows as it needs.

    rows: layers, whose they are, and how many of them to show, evenly chosen. Returns each panel with its layer and
    whose that is.
    """
    shown = [evenly(layers, most) for layers, _, most in rows]
    most, single = max(len(layers) for layers in shown), len(rows) == 1
    columns = most if most <= 3 or not single else ceil(most / 2)
    count = most if single else len(rows) * columns
    cut = [f"{len(few)} of {len(layers)} layers" for few, (layers, *_) in zip(shown, rows, strict=True)]
    if any(len(few) < len(layers) for few, (layers, *_) in zip(shown, rows, strict=True)):
        title = f"{title} ({', '.join(dict.fromkeys(cut))})"
    size = (max(5.2, 2.45 * columns), (2.1 if single else 1.9) * ceil(count / columns) + 1.2)
    figure, panels = make_panels(title, count, columns, size, (single or "row", True))
    found = []
    for row, (layers, (_, whose, _)) in enumerate(zip(shown, rows, strict=True)):
        here = panels[row * columns : (row + 1) * columns] if not single else panels
        found += [(panel, layer, whose) for panel, layer in zip(here, layers, strict=False)]
        for unused in here[len(layers) :]:
            unused.remove()
    return figure, found


def _name_layers(panels: Sequence[tuple[Axes, Any, Any]], order: str) -> None:
    """The axes' names: at the left of each row, and under the lowest panel of each column."""
    lowest: dict[int, Axes] = {}
    unit = " or ".join(sorted({_rest(layer).unit for _, layer, _ in panels}, reverse=True))
    for panel, *_ in panels:
        column = _column(panel)
        lowest[column] = panel
        if column == 0:
            panel.set_ylabel("timescale (tokens)")
    for panel in lowest.values():
        panel.set_xlabel(f"{unit}, {order}")


def _column(panel: Axes) -> int:
    place = panel.get_subplotspec()
    assert place is not None, "panels stand in a grid"
    return int(place.colspan.start)


def _common_legend(figure: Figure, panels: Sequence[Axes], columns: int) -> None:
    """Under the figure, what any of its panels has."""
    found = {str(handle.get_label()): handle for panel in panels for handle in handles(panel)}
    legend_below(figure, list(found.values()), columns)


def _rest(layer: LayerTimescales | LayerNumbers) -> LayerTimescales:
    return layer.rest if isinstance(layer, LayerNumbers) else layer


def _distinct_positions(spectrum: Spectrum) -> dict[int, str]:
    """The positions to draw, with their names: one, where timescales are the same at all of them."""
    if not spectrum.scales:
        return {spectrum.positions[0]: "every t"}
    return dict(zip(spectrum.positions, spectrum.position_labels(), strict=True))


def _timescale_lines(panel: Axes, layer: LayerTimescales, spectrum: Spectrum, lone: str) -> None:
    """lone: the ink of timescales that are the same at every position."""
    start, trained = {"marker": "o", **START_LOOK}, {"marker": "o"}
    if layer.channels > _FEW:
        start["marker"] = "none"
        trained["marker"] = "none"
    cap, positions = float(CAP * spectrum.length), _distinct_positions(spectrum)
    inks = shades(len(positions)) if spectrum.scales else [lone]
    for ink, (position, name) in zip(inks, positions.items(), strict=True):
        for when, taus, look in (("start", layer.at_start, start), ("trained", layer.after, trained)):
            _ranked(panel, sorted(taus[position], reverse=True), cap, f"{name}, {when}", color=ink, **look)
    position = spectrum.length if spectrum.scales else spectrum.positions[0]
    if layer.orders_channels and not _falls(layer.after[position]):
        label = f"{positions[position]}, trained, in the order of P"
        _ranked(panel, layer.after[position], cap, label, **_DOT)


def _timescale_legend(panels: Sequence[Axes], spectra: Sequence[Spectrum]) -> Iterator[Artist]:
    """Shades for positions where timescales depend on them, how start and trained look, and what the dots are."""
    from matplotlib.lines import Line2D

    trained = [line for panel in panels for line in panel.lines if str(line.get_label()).endswith("trained")]
    marker = "o" if any(line.get_marker() == "o" for line in trained) else "none"
    scaling = [spectrum for spectrum in spectra if spectrum.scales]
    ink: Any = MUTED if scaling else INKS[0]
    yield Line2D([], [], color=ink, label="start", **{"marker": marker, "markersize": 4, **START_LOOK})
    yield Line2D([], [], color=ink, label="trained", marker=marker, markersize=4)
    if scaling and len(scaling) < len(spectra):
        yield Line2D([], [], color=INKS[2], label="every t")
    if scaling:
        names = _distinct_positions(scaling[0]).values()
        yield from (Line2D([], [], color=ink, label=name) for ink, name in zip(shades(len(names)), names, strict=True))
    dots = {str(line.get_label()) for panel in panels for line in panel.lines if "order of P" in str(line.get_label())}
    yield from (Line2D([], [], label=name, **_DOT) for name in sorted(dots))


def _ranked(panel: Axes, taus: Sequence[float], cap: float, label: str, **look: Any) -> None:
    """Timescales by rank; those beyond the cap are triangles there."""
    values = np.asarray(taus)
    ranks = np.arange(1, len(values) + 1)
    panel.plot(ranks, values.clip(max=cap), label=label, **{"markersize": 4, **look})
    beyond = values > cap
    if beyond.any():
        panel.plot(ranks[beyond], np.full(beyond.sum(), cap), color=look["color"], **_BEYOND)


def _falls(taus: Sequence[float]) -> bool:
    """Whether each is at most the one before it, but for rounding."""
    values = np.asarray(taus)
    return bool(np.all(values[1:] <= values[:-1] * (1 + 1e-5)))


def _rank_axis(panel: Axes, count: int) -> None:
    panel.set_xticks(sorted({1, *(max(1, count * quarter // 4) for quarter in (1, 2, 3, 4))}))


def _timescale_axis(panels: Sequence[tuple[Axes, Any, Any]], spectra: Sequence[Spectrum]) -> None:
    """Tokens on a log axis, with light lines at 1 and multiples of T where all models have the same."""
    panels[0][0].set_yscale("log")
    same = len({spectrum.train_length for spectrum in spectra}) == 1
    cap = CAP * spectra[0].length
    beyond = any(np.max(line.get_ydata()) >= cap for panel, *_ in panels for line in panel.lines)
    guides = [*spectra[0].positions, *([cap] if beyond else [])]
    last: dict[Any, Axes] = {_row(panel): panel for panel, *_ in panels}
    for panel, *_ in panels:
        panel.yaxis.set_minor_locator(no_minor_ticks())
        if not same:
            continue
        for position in guides:
            panel.axhline(position, color=GRID, linewidth=1, zorder=0)
            if panel is last[_row(panel)]:
                _name_guide(panel, position, spectra[0].position_name(position))


def _row(panel: Axes) -> int:
    place = panel.get_subplotspec()
    assert place is not None, "panels stand in a grid"
    return int(place.rowspan.start)


def _name_guide(panel: Axes, position: int, name: str) -> None:
    panel.annotate(
        name,
        (1, position),
        xycoords=("axes fraction", "data"),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        color=MUTED,
        size=8,
    )


def _measured_bands(panel: Axes, layer: LayerNumbers, run: RunSpectrum) -> None:
    """At T and the last position measured; at one of them where timescales at rest are the same at all."""
    assert layer.measured is not None, "drawn where something was read"
    known = [t for t in run.rest.positions[1:] if t in layer.measured.at]
    shown = ([known[0], known[-1]] if run.rest.scales and len(known) > 1 else known[:1]) or list(layer.measured.at)[:1]
    cap = float(CAP * run.rest.length)
    for ink, position in zip(INKS, shown, strict=False):
        at = layer.measured.at[position]
        order = np.argsort(-at.median, kind="stable")
        low, lower, median, upper, high = at.quantiles[:, order].clip(max=cap)
        ranks = np.arange(1, len(order) + 1)
        for bottom, top, alpha in ((low, high, 0.15), (lower, upper, 0.3)):
            panel.fill_between(ranks, bottom, top, color=ink, alpha=alpha, linewidth=0)
        name = f"t = {run.rest.position_name(position)}"
        panel.plot(ranks, median, color=ink, label=f"{name}, measured")
        rest = np.asarray(layer.rest.after[position])[order].clip(max=cap)
        size = 3.5 if len(order) <= _FEW else 1.8
        look: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": size, "zorder": 1}
        panel.plot(ranks, rest, color=ink, label=f"{name}, at rest", **look)
