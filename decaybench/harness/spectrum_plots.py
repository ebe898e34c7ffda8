"""The figures of `bench spectrum`, several runs side by side.

Dashed is the start, solid after training, both at rest; grey, or a mark beside them, is measured while the model read.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from math import ceil, floor, log2
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from decaybench.harness.drawing import (
    INKS,
    MANY_INKS,
    MANY_MARKERS,
    MUTED,
    evenly,
    handles,
    legend_below,
    log2_axis,
    make_panels,
    mark_training_length,
    name_axes,
    no_minor_ticks,
    remove,
    save,
    shades,
    style,
    tokens_label,
    unit_axis,
)
from decaybench.harness.spectrum_laws import GRADED
from decaybench.harness.spectrum_layers import START_LOOK, measured_figure, timescale_figure
from decaybench.harness.spectrum_report import START, TRAINED, LayerNumbers, RunSpectrum, titled
from decaybench.harness.spectrum_rest import units

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FIGURES = ("timescales", "measured", "density", "gaps", "channels", "retention")
_MOST_STARTS = 3  # runs; of more the start would hide what they learned
_FLOOR = 1e-6  # nats; a smaller gap is drawn here


def draw_spectrum_figures(runs: Sequence[RunSpectrum], folder: Path) -> list[Path]:
    """Save the figures of runs side by side in `folder`, and return their paths; an earlier call's go. Raises RunError.

    timescales, density, gaps, channels, retention, and where decays were measured, measured.
    """
    remove(folder, _FIGURES)
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


def density_figure(runs: Sequence[RunSpectrum]) -> Figure:
    """Where the timescales of all layers lie at t = T: at the start, after training, and measured; a panel a run."""
    columns = min(len(runs), 3)
    title = "density of timescales at t = T, all layers"
    with style():
        size = (3.0 * columns + 1.0 if columns > 1 else 5.6, 2.0 * ceil(len(runs) / columns) + 1.2)
        figure, panels = make_panels(titled(runs, title), len(runs), columns, size)
        for panel, run in zip(panels, runs, strict=True):
            if len(runs) > 1:
                panel.set_title(run.name)
            taus, found = 2.0**run.density.octaves, run.density
            if found.measured is not None:
                panel.fill_between(taus, found.measured, color=MUTED, alpha=0.3, linewidth=0, label="measured")
            panel.plot(taus, found.at_start, color=INKS[0], label="start", **START_LOOK)
            panel.plot(taus, found.after, color=INKS[0], label="trained")
            if run.rest.train_length is not None:
                panel.axvline(run.rest.length, color=MUTED, linestyle="--", linewidth=1.1, zorder=1)
            panel.grid(axis="y")
        panels[0].set_ylim(bottom=0)
        ends = [2.0 ** run.density.octaves[end] for run in runs for end in (0, -1)]
        _token_axis(panels[0], max(min(ends), 2**-6), max(ends))
        name_axes(panels, columns, "timescale (tokens; dashed: T)", "share an octave")
        legend_below(figure, handles(panels[0]), columns=3)
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
        figure, panels = make_panels(titled(runs, title), len(rows) * columns, columns, size, share=("col", True))
        panels[0].set_yscale("log")
        panels[0].yaxis.set_minor_locator(no_minor_ticks())
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
        unit = units(layer.rest for run in runs for layer in run.layers)
        title = f"share of the {unit} of all layers that are useful, and graded, at position t"
        figure, panels = make_panels(titled(runs, title), 3, 3, (8.6, 3.7 + 0.1 * len(runs)))
        for panel, name in zip(panels, names, strict=True):
            panel.set_title(name, pad=17)
            unit_axis(panel)
        for number, run in enumerate(runs):
            look: dict[str, Any] = {"color": MANY_INKS[number % len(MANY_INKS)]}
            marker = MANY_MARKERS[number % len(MANY_MARKERS)]
            for panel, curves in zip(panels, _channel_curves(run), strict=True):
                before, after, measured = curves
                if len(runs) <= _MOST_STARTS:
                    panel.plot(list(before), list(before.values()), **look, **START_LOOK)
                panel.plot(list(after), list(after.values()), **look, label=run.name)
                panel.plot(list(measured), list(measured.values()), **look, linestyle="none", marker=marker)
        last = max(max(run.useful_shares(TRAINED)) for run in runs)
        _token_axis(panels[0], 1, last)
        if len({run.rest.train_length for run in runs}) == 1:
            t = np.geomspace(1, last)
            even = np.log(t) / np.log(max(runs[0].rest.length, 2))
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
    unit = units(layer.rest for run in runs for layer in run.layers)
    title = f"what decay leaves of token 1 at position t, the slowest {unit} darkest"
    with style():
        size = (2.9 * columns + 1.0 if columns > 1 else 5.6, 2.3 * ceil(len(runs) / columns) + 1.3)
        figure, panels = make_panels(titled(runs, title), len(runs), columns, size)
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


def _name_of_length(runs: Sequence[RunSpectrum]) -> str:
    known = [run.rest.train_length for run in runs]
    return str(runs[0].rest.length) if known[0] is None and len(set(known)) == 1 else "T"


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
                look: dict[str, Any] = {"marker": marker, "markersize": size, "color": ink, "linestyle": "none"}
                face = "white" if hollow else ink
                panel.plot([place], [max(value, _FLOOR)], markerfacecolor=face, zorder=3, **look)


def _layer_axis(panel: Axes, run: RunSpectrum) -> None:
    panel.grid(axis="y")
    places = evenly(range(len(run.layers)), 8)
    panel.set_xticks(places, [str(run.layers[place].rest.layer) for place in places])
    panel.set_xlim(-0.5, len(run.layers) - 0.5)


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


def _channel_curves(run: RunSpectrum) -> Iterator[tuple[dict[int, float], dict[int, float], dict[int, float]]]:
    """At the start, after training, and measured: useful, and graded of token 1 and of token T."""
    yield run.useful_shares(START), run.useful_shares(TRAINED), run.measured_useful()
    for token in (1, run.rest.length):
        yield run.graded_shares(START, token), run.graded_shares(TRAINED, token), run.measured_graded(token)


def _channel_legend(runs: Sequence[RunSpectrum], panel: Axes) -> Iterator[Artist]:
    from matplotlib.lines import Line2D

    if len(runs) > 1:
        yield from handles(panel)
    if len(runs) <= _MOST_STARTS:
        yield Line2D([], [], color=MUTED, label="start", **START_LOOK)
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
