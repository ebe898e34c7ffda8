"""Figures of decay spectra: of a run at rest, and of `bench spectrum`, several runs side by side.

Dashed is the start, solid after training, both at rest; grey or a filled mark beside them is measured while the model
read. A timescale above 1024 T is drawn there, as a triangle: over T tokens it forgets a thousandth.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from math import ceil, floor, log2
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from decaybench.harness.drawing import (
    DASHED,
    GRID,
    INKS,
    MANY_INKS,
    MANY_MARKERS,
    MUTED,
    evenly,
    legend_below,
    log2_axis,
    make_panels,
    mark_training_length,
    name_axes,
    save,
    shades,
    style,
    tokens_label,
    unit_axis,
)
from decaybench.harness.spectrum_laws import GRADED
from decaybench.harness.spectrum_report import START, TRAINED, LayerNumbers, RunSpectrum
from decaybench.harness.spectrum_rest import CAP, LayerTimescales, Spectrum

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

_FIGURES = ("timescales", "measured", "density", "gaps", "channels", "retention")
_MOST_LAYERS = 6
_FEW = 12  # channels; of fewer each is a mark
_START: dict[str, Any] = {"linestyle": DASHED, "linewidth": 1.2, "markerfacecolor": "white"}
_MOST_STARTS = 3  # runs; of more the start would hide what they learned
_FLOOR = 1e-6  # nats; a smaller gap is drawn here
_DOT: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 2, "color": INKS[1], "zorder": 1}
_BEYOND: dict[str, Any] = {"marker": "^", "markersize": 5, "linestyle": "none", "clip_on": False, "zorder": 4}


def draw_timescales(spectrum: Spectrum, folder: Path) -> list[Path]:
    """Save `timescale_figure` as timescales.png and .svg in `folder`, and return their paths. Raises RunError."""
    return save(timescale_figure([spectrum]), folder, "timescales")


def draw_spectrum_figures(runs: Sequence[RunSpectrum], folder: Path) -> list[Path]:
    """Save the figures of runs side by side in `folder`, and return their paths; an earlier call's go. Raises RunError.

    timescales, density, gaps, channels, retention, and where decays were measured, measured.
    """
    for name in _FIGURES:
        for ending in (".png", ".svg"):
            (folder / f"{name}{ending}").unlink(missing_ok=True)
    figures = {
        "timescales": timescale_figure([run.rest for run in runs], [run.name for run in runs]),
        "density": density_figure(runs),
        "gaps": gap_figure(runs),
        "channels": channel_figure(runs),
        "retention": retention_figure(runs),
    }
    if read := [run for run in runs if run.read is not None]:
        figures["measured"] = measured_figure(read)
    return [path for name, figure in figures.items() for path in save(figure, folder, name)]


def timescale_figure(spectra: Sequence[Spectrum], names: Sequence[str] = ()) -> Figure:
    """The timescales at rest of each layer, slowest first: dashed at the start, solid after training; a row a model.

    A shade a position where timescales depend on it, and dots in the model's order where PoST's parameter P has another
    order than they. At most 6 layers, evenly chosen; each has one layer at least.
    """
    named = list(zip(names or [spectrum.cell for spectrum in spectra], spectra, strict=True))
    most = _MOST_LAYERS if len(spectra) == 1 else 3
    what = f"timescales at rest of the {_units(layer for spectrum in spectra for layer in spectrum.layers)}"
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
        title = _titled(runs, title) + (f", on {runs[0].read}" if len(reads) == 1 else "")
        figure, panels = _layer_panels(title, [(run.layers, run, most) for run in runs])
        for panel, layer, run in panels:
            where = f"layer {layer.rest.layer}"
            panel.set_title(where if len(runs) == 1 else f"{run.name}, {where}")
            _measured_bands(panel, layer, run)
            _rank_axis(panel, layer.rest.channels)
        _name_layers(panels, "slowest first")
        _timescale_axis(panels, [run.rest for run in runs])
        _common_legend(figure, [panel for panel, *_ in panels], columns=3)
    return figure


def density_figure(runs: Sequence[RunSpectrum]) -> Figure:
    """Where the timescales of all layers lie at t = T: at the start, after training, and measured; a panel a run."""
    columns = min(len(runs), 3)
    title = "density of timescales at t = T, all layers"
    with style():
        size = (3.0 * columns + 1.0 if columns > 1 else 5.6, 2.0 * ceil(len(runs) / columns) + 1.2)
        figure, panels = make_panels(_titled(runs, title), len(runs), columns, size)
        for panel, run in zip(panels, runs, strict=True):
            if len(runs) > 1:
                panel.set_title(run.name)
            taus, found = 2.0**run.density.octaves, run.density
            if found.measured is not None:
                panel.fill_between(taus, found.measured, color=MUTED, alpha=0.3, linewidth=0, label="measured")
            panel.plot(taus, found.at_start, color=INKS[0], label="start", **_START)
            panel.plot(taus, found.after, color=INKS[0], label="trained")
            if run.rest.train_length is not None:
                panel.axvline(run.rest.length, color=MUTED, linestyle="--", linewidth=1.1, zorder=1)
            panel.grid(axis="y")
        panels[0].set_ylim(bottom=0)
        ends = [2.0 ** run.density.octaves[end] for run in runs for end in (0, -1)]
        _token_axis(panels[0], max(min(ends), 2**-6), max(ends))
        name_axes(panels, columns, "timescale (tokens; dashed: T)", "share an octave")
        legend_below(figure, _handles(panels[0]), columns=3)
    return figure


def gap_figure(runs: Sequence[RunSpectrum]) -> Figure:
    """Gaps between neighbouring log timescales by layer, beside those of as many at random and evenly spaced.

    A row each for the smallest at t = 1, where PoST's are what P learned; at t = T, where its analytical taper makes
    them even; and the median at t = 1. A column a run.
    """
    columns = len(runs)
    title = "gaps between neighbouring log timescales"
    with style():
        size = (max(5.6, 1.9 * columns + 1.0), 6.4)
        rows = [("smallest", False), ("smallest", True), ("median", False)]
        figure, panels = make_panels(_titled(runs, title), len(rows) * columns, columns, size, share=("col", True))
        panels[0].set_yscale("log")
        panels[0].yaxis.set_minor_locator(_no_ticks())
        for place, panel in enumerate(panels):
            run, (what, trained_at) = runs[place % columns], rows[place // columns]
            if columns > 1 and place < columns:
                panel.set_title(textwrap.fill(run.name, 20), size=9)
            for x, layer in enumerate(run.layers):
                _gap_marks(panel, x, layer, run.rest.length if trained_at else 1, what)
            _layer_axis(panel, run)
        for row, (what, trained_at) in enumerate(rows):
            panels[row * columns].set_ylabel(f"{what} at t = {_name_of_length(runs) if trained_at else 1}")
        for panel in panels[-columns:]:
            panel.set_xlabel("layer")
        figure.supylabel("gap (nats)", size=10)
        legend_below(figure, list(_gap_legend(runs)), columns=5)
    return figure


def channel_figure(runs: Sequence[RunSpectrum]) -> Figure:
    """Which share of all layers' channels is good for what at position t: a line a run, marks measured.

    Useful: 1 <= tau <= t; graded: keep 5 to 95 % of token 1, and of token T. Grey: N log t / log T useful channels of
    N, as of a static spectrum evenly spaced over [1, T].
    """
    low, high = (f"{share * 100:g}" for share in GRADED)
    kept = f"keep {low} to {high} % of token"
    names = ("useful: 1 ≤ tau ≤ t", f"graded: {kept} 1", f"{kept} {_name_of_length(runs)}")
    with style():
        unit = _units(layer.rest for run in runs for layer in run.layers)
        title = f"share of the {unit} of all layers that are useful, and graded, at position t"
        figure, panels = make_panels(_titled(runs, title), 3, 3, (8.6, 3.7 + 0.1 * len(runs)))
        for panel, name in zip(panels, names, strict=True):
            panel.set_title(name, pad=17)
            unit_axis(panel)
        for number, run in enumerate(runs):
            look: dict[str, Any] = {"color": MANY_INKS[number % len(MANY_INKS)]}
            marker = MANY_MARKERS[number % len(MANY_MARKERS)]
            for panel, curves in zip(panels, _channel_curves(run), strict=True):
                before, after, measured = curves
                if len(runs) <= _MOST_STARTS:
                    panel.plot(list(before), list(before.values()), **look, **_START)
                panel.plot(list(after), list(after.values()), **look, label=run.name)
                panel.plot(list(measured), list(measured.values()), **look, linestyle="none", marker=marker)
        last = max(max(run.useful_shares(TRAINED)) for run in runs)
        _token_axis(panels[0], 1, last)
        if len({run.rest.train_length for run in runs}) == 1:
            t = np.geomspace(1, last)
            even = np.log(t) / np.log(runs[0].rest.length)
            panels[0].plot(t, even.clip(max=1), color=MUTED, linewidth=1, linestyle=":", zorder=1)
            for panel in panels:
                mark_training_length(panel, runs[0].rest.train_length, None)
        name_axes(panels, 3, "position t (tokens)", "share")
        legend_below(figure, list(_channel_legend(runs, panels[0])), columns=5)
    return figure


def retention_figure(runs: Sequence[RunSpectrum]) -> Figure:
    """What is left of token 1 at position t, by channel of all layers, darker for slower ones; a panel a run.

    At most 16 channels, evenly chosen. Marks: the mean measured. Dotted: 5 and 95 %.
    """
    columns = min(len(runs), 3)
    units = _units(layer.rest for run in runs for layer in run.layers)
    title = f"what decay leaves of token 1 at position t, the slowest {units} darkest"
    with style():
        size = (2.9 * columns + 1.0 if columns > 1 else 5.6, 2.3 * ceil(len(runs) / columns) + 1.3)
        figure, panels = make_panels(_titled(runs, title), len(runs), columns, size)
        for panel, run in zip(panels, runs, strict=True):
            if len(runs) > 1:
                panel.set_title(run.name, pad=17)
            unit_axis(panel)
            for share in GRADED:
                panel.axhline(share, color=MUTED, linewidth=1, linestyle=":", zorder=1)
            _retention_lines(panel, run)
            mark_training_length(panel, run.rest.train_length, None)
        _token_axis(panels[0], 1, max(max(line.kept) for run in runs for line in run.lines))
        name_axes(panels, columns, "position t (tokens)", "retention of token 1")
        legend_below(figure, list(_retention_legend(runs)), columns=4)
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
    found = {str(handle.get_label()): handle for panel in panels for handle in _handles(panel)}
    legend_below(figure, list(found.values()), columns)


def _handles(panel: Axes) -> list[Artist]:
    return list(panel.get_legend_handles_labels()[0])


def _rest(layer: LayerTimescales | LayerNumbers) -> LayerTimescales:
    return layer.rest if isinstance(layer, LayerNumbers) else layer


def _units(layers: Iterator[LayerTimescales]) -> str:
    """What has timescales in these layers, in the plural."""
    return " and ".join(f"{unit}s" for unit in sorted({layer.unit for layer in layers}, reverse=True))


def _titled(runs: Sequence[RunSpectrum], title: str) -> str:
    return f"{runs[0].name}: {title}" if len(runs) == 1 else title


def _name_of_length(runs: Sequence[RunSpectrum]) -> str:
    known = [run.rest.train_length for run in runs]
    return str(runs[0].rest.length) if known[0] is None and len(set(known)) == 1 else "T"


# --- timescales by layer


def _distinct_positions(spectrum: Spectrum) -> dict[int, str]:
    """The positions to draw, with their names: one, where timescales are the same at all of them."""
    if not spectrum.scales:
        return {spectrum.positions[0]: "every t"}
    return dict(zip(spectrum.positions, spectrum.position_labels(), strict=True))


def _timescale_lines(panel: Axes, layer: LayerTimescales, spectrum: Spectrum, lone: str) -> None:
    """lone: the ink of timescales that are the same at every position."""
    start, trained = {"marker": "o", **_START}, {"marker": "o"}
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

    marker = "o" if any(line.get_marker() == "o" for panel in panels for line in panel.lines) else "none"
    scaling = [spectrum for spectrum in spectra if spectrum.scales]
    ink: Any = MUTED if scaling else INKS[0]
    yield Line2D([], [], color=ink, label="start", **{"marker": marker, "markersize": 4, **_START})
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
        panel.yaxis.set_minor_locator(_no_ticks())
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


# --- gaps


def _gap_marks(panel: Axes, x: int, layer: LayerNumbers, position: int, what: str) -> None:
    """Hollow at the start, filled after training; bars: random spectra, lines: evenly spaced; triangles: P alone.

    what: `smallest` or `median`.
    """
    for when, shift in ((START, -0.17), (TRAINED, 0.17)):
        gaps = layer.gaps[when].get(position)
        if gaps is None:
            continue
        place, hollow = x + shift, when == START
        if what == "smallest":
            panel.vlines(place, *np.maximum(gaps.random_band, _FLOOR), color=MUTED, linewidth=4, alpha=0.35)
        panel.hlines(max(gaps.even, _FLOOR), place - 0.13, place + 0.13, color=INKS[2], linewidth=1.5)
        order = layer.order_gaps.get(when, {}).get(position) if layer.shows_order else None
        for value, ink, marker, size in (
            (getattr(gaps, f"random_{what}"), MUTED, "_", 9),
            (getattr(gaps, what), INKS[0], "o", 5),
            (getattr(order, what, None), INKS[1], "^", 5),
        ):
            if value is not None:
                look = {"marker": marker, "markersize": size, "color": ink, "linestyle": "none", "zorder": 3}
                panel.plot([place], [max(value, _FLOOR)], markerfacecolor="white" if hollow else ink, **look)


def _layer_axis(panel: Axes, run: RunSpectrum) -> None:
    panel.grid(axis="y")
    places = evenly(range(len(run.layers)), 8)
    panel.set_xticks(places, [str(run.layers[place].rest.layer) for place in places])
    panel.set_xlim(-0.5, len(run.layers) - 0.5)


def _no_ticks() -> Locator:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _gap_legend(runs: Sequence[RunSpectrum]) -> Iterator[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    look: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 5}
    yield Line2D([], [], color=INKS[0], label="start", markerfacecolor="white", **look)
    yield Line2D([], [], color=INKS[0], label="trained", **look)
    yield Line2D([], [], color=INKS[2], label="evenly spaced", linewidth=1.5)
    yield Line2D([], [], color=MUTED, label="random, mean", marker="_", markersize=9, linestyle="none")
    yield Patch(color=MUTED, alpha=0.35, linewidth=0, label="random, 5 to 95 %")
    if any(layer.shows_order for run in runs for layer in run.layers):
        yield Line2D([], [], color=INKS[1], label="PoST's P alone", **(look | {"marker": "^"}))


# --- shares and retention by position


def _channel_curves(run: RunSpectrum) -> Iterator[tuple[dict[int, float], dict[int, float], dict[int, float]]]:
    """At the start, after training, and measured: useful, and graded of token 1 and of token T."""
    yield run.useful_shares(START), run.useful_shares(TRAINED), run.measured_useful()
    for token in (1, run.rest.length):
        yield run.graded_shares(START, token), run.graded_shares(TRAINED, token), run.measured_graded(token)


def _channel_legend(runs: Sequence[RunSpectrum], panel: Axes) -> Iterator[Artist]:
    from matplotlib.lines import Line2D

    if len(runs) > 1:
        yield from _handles(panel)
    if len(runs) <= _MOST_STARTS:
        yield Line2D([], [], color=MUTED, label="start", **_START)
    yield Line2D([], [], color=MUTED, label="trained, at rest")
    if any(run.read is not None for run in runs):
        yield Line2D([], [], color=MUTED, linestyle="none", marker="o", label="measured")


def _retention_lines(panel: Axes, run: RunSpectrum) -> None:
    measured = {layer.rest.layer: layer.measured for layer in run.layers}
    inks = shades(len(run.lines) + 2)[:1:-1]  # none as light as the page
    for ink, line in zip(inks, run.lines, strict=True):
        panel.plot(list(line.kept), list(line.kept.values()), color=ink, linewidth=1.4)
        known = measured[line.layer]
        kept = {} if known is None else {t: of.mean[line.channel] for (j, t), of in known.kept.items() if j == 1}
        panel.plot(list(kept), list(kept.values()), color=ink, linestyle="none", marker="o", markersize=3)


def _retention_legend(runs: Sequence[RunSpectrum]) -> Iterator[Artist]:
    from matplotlib.lines import Line2D

    dark, *_, light = shades(8)[::-1]
    yield Line2D([], [], color=dark, label="slowest, at rest")
    yield Line2D([], [], color=light, label="fastest")
    if any(run.read is not None for run in runs):
        yield Line2D([], [], color=MUTED, linestyle="none", marker="o", markersize=3, label="mean measured")
    yield Line2D([], [], color=MUTED, linewidth=1, linestyle=":", label="5 and 95 %")


def _token_axis(panel: Axes, low: float, high: float) -> None:
    """Tokens on a log axis, few ticks."""
    powers = range(ceil(log2(low) - 1e-9), floor(log2(high) + 1e-9) + 1)
    powers = powers[:: max(1, ceil(len(powers) / 6))]
    log2_axis(panel, [2.0**p for p in powers], [_power_label(p) for p in powers], low, high)


def _power_label(power: int) -> str:
    return tokens_label(2**power) if power >= 0 else f"1/{2**-power}"
