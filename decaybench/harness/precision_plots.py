"""Figures of what BFT's filter, or a gate in its place, does; harness/precision_tally.py says whence the numbers.

An ink a layer, a run, a head or a kind of token, with bars for intervals or quartiles; dashed is theory, or a gate
beside a filter. Sources are circles from one map whose lightness is even, the darker the more reliable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil, floor, log2
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from decaybench.harness.drawing import (
    DASHED,
    INK,
    INKS,
    MANY_INKS,
    MANY_MARKERS,
    MUTED,
    apart,
    beside,
    evenly,
    legend_below,
    log2_axis,
    make_panels,
    mark_training_length,
    name_axes,
    ratio_label,
    remove,
    save,
    shades,
    style,
    thin,
    tokens_label,
    unit_axis,
)
from decaybench.harness.precision_report import ALL, ASKED, BOUND, TOKENS

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from decaybench.harness.precision_report import HeadSize, LayerDetail, Quartiles, RunTrace
    from decaybench.results.resampling import Estimate

_MOST_LAYERS = 6
_MOST_COLUMNS = 3
_FEW = 10
_FEW_ASKED = f"fewer than {_FEW} questions"
_FEW_LOOK: dict[str, Any] = {"marker": "o", "markersize": 4, "markerfacecolor": "white", "linestyle": "none"}
_PLACES = {ASKED: "where an answer is asked", ALL: "everywhere"}
_KINDS = {TOKENS: "by what a token is", BOUND: "values, by who bound them"}
_HEADS = dict(zip(("slowest head", "median head", "fastest head"), INKS, strict=False))
_THEORY: dict[str, Any] = {"linestyle": DASHED, "linewidth": 1.2}
_CAP: dict[str, Any] = {"linestyle": "none", "marker": "_", "markersize": 7, "markeredgewidth": 1.2, "gid": "interval"}
_LIMIT: dict[str, Any] = {"linestyle": "none", "marker": "<", "markersize": 6, "markerfacecolor": "white"}
_NO_DECAY: dict[str, Any] = {"color": MUTED, "linestyle": ":", "linewidth": 1}
_FIGURES = ("gain", "precision", "gain-length", "sample-size")
_HOLLOW: dict[str, Any] = {"linestyle": DASHED, "linewidth": 1.3, "markerfacecolor": "white"}
_RELIABLE, _UNRELIABLE = 0.1, 0.8  # of viridis: neither nearly black nor too light for a page
_UNLIKE_SOURCES = (INKS[1], INKS[3], INK, MANY_INKS[5])  # neither blue nor green
_BESIDE = 0.3  # of the least distance of two lengths: how far the runs' bars stand apart in all


def remove_figures(folder: Path) -> None:
    """Remove what an earlier call drew there: it may have drawn more, which would stand beside new numbers."""
    remove(folder, _FIGURES)


def draw_run(run: RunTrace, folder: Path) -> list[Path]:
    """Save gain.png and .svg, and precision.png and .svg where one is carried. Returns the paths. Raises RunError."""
    paths = save(gain_figure(run), folder, "gain")
    return paths + (save(precision_figure(run), folder, "precision") if run.carries else [])


def draw_comparison(runs: Sequence[RunTrace], folder: Path) -> list[Path]:
    """Save gain-length where there are several lengths and sample-size where a run has one. Raises RunError."""
    paths = save(gain_length_figure(runs), folder, "gain-length") if len(runs[0].lengths) > 1 else []
    sized = [run for run in runs if run.carries]
    return paths + (save(sample_size_figure(sized), folder, "sample-size") if sized else [])


def gain_figure(run: RunTrace) -> Figure:
    """Gain and sample size against the position, and against the answer's place; at most 6 layers, evenly chosen."""
    columns, rows = 1 + (len(run.answers) > 1), 1 + run.carries
    what = "gain and effective sample size" if run.carries else "gain"
    title = f"{_asked(run)}: {what} in contexts of {run.lengths[-1].length} tokens"
    with style():
        size = (4.0 * columns + 0.6, 2.2 * rows + 1.2)
        figure, panels = make_panels(title, rows * columns, columns, size, share=("col", "row"))
        for place, panel in enumerate(panels):
            _layer_lines(panel, run, by_answer=place % columns == 1, gain=place < columns)
            panel.grid(axis="y")
        unit_axis(panels[0])
        panels[0].set_ylabel("gain")
        if run.carries:
            _size_axis(panels[columns], [size for layer in run.layers for size in _sizes(layer)])
            panels[columns].set_ylabel("sample size n")
        _position_axis(panels[0], run)
        mark_training_length(panels[0], run.train_length, run.longest_trained)
        panels[-columns].set_xlabel("position (tokens)")
        if columns > 1:
            _answer_axis(panels[-1], run)
        legend_below(figure, list(_layer_legend(panels, columns)), columns=6)
        thin(figure)
    return figure


def precision_figure(run: RunTrace) -> Figure:
    """Precision by kind of token before each layer and after its observation, and tau by class of token ids."""
    kinds = list(run.layers[0].precision)
    looks = _looks([*run.layers[0].precision[kinds[0]], *run.tau], run.reliability)
    columns = len(kinds) + bool(run.tau)
    with style():
        figure, panels = make_panels(
            f"{_asked(run)}: precision by token, medians and quartiles",
            columns,
            columns,
            (3.3 * columns + 0.8, 3.6),
            share=(False, False),
        )
        for panel in panels[1 : len(kinds)]:
            panel.sharey(panels[0])
        for panel, kind in zip(panels, kinds, strict=False):
            panel.set_title(_KINDS[kind])
            _precision_lines(panel, run, kind, looks)
        panels[0].set_ylabel("precision, mean over channels")
        if run.tau:
            _tau_panel(panels[-1], run.tau, looks)
        legend_below(figure, list(_precision_legend(panels[0])), columns=6)
        thin(figure)
    return figure


def gain_length_figure(runs: Sequence[RunTrace]) -> Figure:
    """Gain by length of the context, a line a run, where an answer is asked and everywhere; at most 3 layers.

    Bars are 95 % intervals; runs stand side by side. At the right of a line: what a doubling of the context adds to its
    gain, in brackets where that may be nothing.
    """
    shown = evenly(range(min(len(run.layers) for run in runs)), _MOST_COLUMNS)
    columns = len(shown)
    title = (
        f"{runs[0].task} {runs[0].variant}: gain by length of the context, 95 % intervals over samples; right: what a "
        "doubling adds (in brackets: its interval holds 0)"
    )
    with style():
        figure, panels = make_panels(title, 2 * columns, columns, (2.9 * columns + 1.2, 5.4))
        _length_axis(panels[0], runs)
        unit_axis(panels[0])
        for place, row in zip(_PLACES, (panels[:columns], panels[columns:]), strict=True):
            for panel, layer in zip(row, shown, strict=True):
                panel.set_title(f"layer {layer}, {_PLACES[place]}")
                panel.grid(axis="y")
                _length_lines(panel, runs, place, layer)
        name_axes(panels, columns, "length of the context (tokens)", "gain")
        legend_below(figure, panels[0].get_legend_handles_labels()[0], columns=3)
        thin(figure)
    return figure


def sample_size_figure(runs: Sequence[RunTrace]) -> Figure:
    """Sample size by position of three heads a layer, measured beside theory: a row a run, at most 3 layers.

    The slowest, median and fastest head; of heads without decays those of the largest, median and smallest size.
    """
    layers = [evenly(range(len(run.layers)), _MOST_COLUMNS) for run in runs]
    columns = max(len(shown) for shown in layers)
    title = f"{runs[0].task} {runs[0].variant}: effective sample size n by position, three heads a layer"
    with style():
        size = (2.9 * columns + 1.2, 2.3 * len(runs) + 1.4)
        figure, panels = make_panels(title, len(runs) * columns, columns, size)
        _position_axis(panels[0], runs[0])
        _size_axis(panels[0], [1.0, float(runs[0].lengths[-1].length)])
        name_axes(panels, columns, "position t (tokens)", "n")
        for row, (run, shown) in enumerate(zip(runs, layers, strict=True)):
            here = panels[row * columns : (row + 1) * columns]
            for panel, layer in zip(here, shown, strict=False):
                panel.set_title(f"{run.name}, layer {layer}")
                _head_lines(panel, run, run.layers[layer].heads)
            for unused in here[len(shown) :]:
                unused.set_axis_off()
        undecayed = any(layer.heads[0].theory is None for run in runs for layer in run.layers)
        note = "attention's heads: of the largest, the median and the smallest n" if undecayed else ""
        legend_below(figure, list(_head_legend(runs)), columns=3, title=note)
        thin(figure)
    return figure


def _asked(run: RunTrace) -> str:
    name = f"{run.name}," if "," in run.name else run.name  # a seed or label noise is inserted
    return f"{name} on {run.task} {run.variant}"


def _layer_lines(panel: Axes, run: RunTrace, *, by_answer: bool, gain: bool) -> None:
    """A line a layer; of an answer's place with few questions the mark is hollow."""
    shown = evenly(range(len(run.layers)), _MOST_LAYERS)
    x = [place for place, _ in run.answers] if by_answer else run.centres
    few = [place for place, (_, count) in enumerate(run.answers) if count < _FEW] if by_answer else []
    for ink, number in zip(_inks(len(shown)), shown, strict=True):
        layer = run.layers[number]
        curves = (layer.answer_gain, layer.answer_size) if by_answer else (layer.gain, layer.sample_size)
        y = curves[0] if gain else curves[1]
        assert y is not None, "sample sizes are drawn where there are some"
        panel.plot(x, y, color=ink, label=f"layer {number}", marker="o" if by_answer else "none", markersize=4)
        if few:
            at = [x[place] for place in few], [y[place] for place in few]
            panel.plot(*at, color=ink, zorder=3, gid=_FEW_ASKED, **_FEW_LOOK)


def _layer_legend(panels: Sequence[Axes], columns: int) -> Iterator[Artist]:
    from matplotlib.lines import Line2D

    yield from panels[0].get_legend_handles_labels()[0]
    if any(line.get_gid() == _FEW_ASKED for line in panels[columns - 1].lines):
        yield Line2D([], [], color=MUTED, label=_FEW_ASKED, **_FEW_LOOK)


def _sizes(layer: LayerDetail) -> Iterator[float]:
    yield from layer.sample_size or ()
    yield from layer.answer_size or ()


def _size_axis(panel: Axes, sizes: Sequence[float]) -> None:
    """Sample sizes on a log axis, a tick an octave or two."""
    from matplotlib.ticker import NullLocator

    low, high = floor(log2(min(sizes))), max(1, ceil(log2(max(sizes))))
    panel.set_yscale("log", base=2)
    panel.yaxis.set_minor_locator(NullLocator())
    powers = range(low, high + 1, 1 + (high - low) // 6)
    panel.set_yticks([2**power for power in powers], [tokens_label(2**power) for power in powers])
    panel.set_ylim(2 ** (low - 0.2), 2 ** (high + 0.2))


def _position_axis(panel: Axes, run: RunTrace) -> None:
    powers = range(run.lengths[-1].length.bit_length())
    powers = powers[:: 1 + len(powers) // 9]
    log2_axis(panel, [2**p for p in powers], [tokens_label(2**p) for p in powers], 1, run.lengths[-1].length)


def _answer_axis(panel: Axes, run: RunTrace) -> None:
    places = [place for place, _ in run.answers]
    names = {"depth": "depth of the needle", "distance": "distance to the answer (tokens)"}
    panel.set_xlabel(names[run.answer_place])
    if run.answer_place == "depth":
        panel.set_xlim(-0.03, 1.03)
        panel.set_xticks(np.linspace(0, 1, 6))
    else:
        log2_axis(panel, [int(p) for p in places], [tokens_label(int(p)) for p in places], min(places), max(places))


def _length_axis(panel: Axes, runs: Sequence[RunTrace]) -> None:
    lengths = [at.length for at in runs[0].lengths]
    labels = [f"{tokens_label(length)}\n{ratio_label(length / runs[0].train_length)}" for length in lengths]
    low, high = (_side_by_side(lengths, number, len(runs)) for number in (0, len(runs) - 1))
    log2_axis(panel, lengths, labels, low[0], high[-1])


def _length_lines(panel: Axes, runs: Sequence[RunTrace], place: str, layer: int) -> None:
    ends = []
    for number, run in enumerate(runs):
        ink, marker = MANY_INKS[number % len(MANY_INKS)], MANY_MARKERS[number % len(MANY_MARKERS)]
        estimates = [at.gain[place][layer] for at in run.lengths]
        lengths = _side_by_side([at.length for at in run.lengths], number, len(runs))
        values = [estimate.value for estimate in estimates]
        look: dict[str, Any] = {"linewidth": 1.4, "markersize": 4, **({} if run.carries else _HOLLOW)}
        panel.plot(lengths, values, color=ink, marker=marker, label=run.name, **look)
        low, high = zip(*(estimate.interval for estimate in estimates), strict=True)
        panel.vlines(lengths, low, high, color=ink, linewidth=1.2, zorder=3)
        for ends_of_bars in (low, high):  # wider than a mark, within which a short bar would not be seen
            panel.plot(lengths, ends_of_bars, color=ink, zorder=3, **_CAP)
        ends.append((values[-1], _slope(run.slopes[place][layer]), ink))
    heights = apart([value for value, _, _ in ends], 0.085)
    for (_, text, ink), height in zip(ends, heights, strict=True):
        beside(panel, (1, height), text, xycoords=("axes fraction", "data"), color=ink, size=8)


def _side_by_side(lengths: Sequence[int], number: int, count: int) -> list[float]:
    """Where the bars of one of `count` runs stand, about the lengths."""
    gap = min(log2(high / low) for low, high in pairwise(lengths))
    shift = _BESIDE * gap * (number - (count - 1) / 2) / count
    return [length * 2**shift for length in lengths]


def _slope(estimate: Estimate) -> str:
    """With a sign, but 0; in brackets where the interval holds 0."""
    shown = f"{estimate.value:+.3f}" if float(f"{estimate.value:.3f}") else "0.000"
    return f"({shown})" if estimate.interval[0] <= 0 <= estimate.interval[1] else shown


def _head_lines(panel: Axes, run: RunTrace, heads: Sequence[HeadSize]) -> None:
    length = run.lengths[-1].length
    panel.plot([1, length], [1, length], zorder=0, **_NO_DECAY)
    for name, head in _chosen(heads).items():
        ink = _HEADS[name]
        panel.plot(run.centres, head.measured, color=ink, label=name)
        if head.theory is not None:
            panel.plot(run.centres, head.theory, color=ink, zorder=3, **_THEORY)
        if head.limit is not None and head.limit <= length:  # else it isn't near
            panel.plot([length], [head.limit], color=ink, clip_on=False, zorder=4, **_LIMIT)


def _chosen(heads: Sequence[HeadSize]) -> dict[str, HeadSize]:
    """The slowest, the median and the fastest head, or what there is of them."""
    places = dict(zip(_HEADS, (0, len(heads) // 2, len(heads) - 1), strict=True))
    if len(heads) < 3:
        del places["median head"]
    return {name: heads[place] for name, place in places.items() if place or name == "slowest head"}


def _head_legend(runs: Sequence[RunTrace]) -> Iterator[Artist]:
    from matplotlib.lines import Line2D

    layers = [layer for run in runs for layer in run.layers]
    for name, ink in _HEADS.items():
        if any(name in _chosen(layer.heads) for layer in layers):
            yield Line2D([], [], color=ink, label=name)
    if any(layer.heads[0].theory is not None for layer in layers):
        yield Line2D([], [], color=MUTED, label="equal writes with its mean decays", **_THEORY)
        yield Line2D([], [], color=MUTED, label="their limit, 2 tau or (2a + 1) / (a + 1)^2 t", **_LIMIT)
    yield Line2D([], [], label="n = t, no decay", **_NO_DECAY)


def _looks(names: Sequence[str], reliability: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Ink and marker of each kind of token, the same in all panels; reliability: of those that are sources."""
    names = list(dict.fromkeys(names))
    levels = sorted(set(reliability.values()), reverse=True)
    inks_of = dict(zip(levels, _ordered_inks(len(levels)), strict=True))
    alike: Counter[float] = Counter()
    looks: dict[str, dict[str, Any]] = {}
    for name, level in reliability.items():
        looks[name] = {"color": inks_of[level], "marker": MANY_MARKERS[alike[level] % len(MANY_MARKERS)]}
        alike[level] += 1
    inks = _UNLIKE_SOURCES if reliability else MANY_INKS
    marks = MANY_MARKERS[1:] if reliability else MANY_MARKERS  # the circle is the sources'
    for number, name in enumerate(name for name in names if name not in looks):
        looks[name] = {"color": inks[number % len(inks)], "marker": marks[number % len(marks)]}
    return looks


def _ordered_inks(count: int) -> list[Any]:
    """Inks from dark to light in even steps, for colour-blind eyes and in grey as well."""
    from matplotlib import colormaps

    return [colormaps["viridis"](at) for at in np.linspace(_RELIABLE, _UNRELIABLE, count)]


def _precision_lines(panel: Axes, run: RunTrace, kind: str, looks: dict[str, dict[str, Any]]) -> None:
    """Filled before a layer, hollow half a step later, after its observation."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    names = list(run.layers[0].precision[kind])
    for number, name in enumerate(names):
        spreads = [spread for layer in run.layers for spread in layer.precision[kind][name]]
        shift = 0.3 * (number - (len(names) - 1) / 2) / max(len(names) - 1, 1)
        x = [step / 2 + shift for step in range(len(spreads))]
        _quartile_line(panel, x, spreads, name, looks[name])
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_xticks(range(len(run.layers)), [str(layer) for layer in range(len(run.layers))])
    panel.set_xlabel("layer")
    panel.grid(axis="y")


def _quartile_line(
    panel: Axes, x: Sequence[float], spreads: Sequence[Quartiles], name: str, look: dict[str, Any]
) -> None:
    ink = look["color"]
    panel.vlines(x, [s.low for s in spreads], [s.high for s in spreads], color=ink, linewidth=1.5, alpha=0.5)
    panel.plot(x, [s.median for s in spreads], label=name, linewidth=1.2, markersize=4.5, markevery=2, zorder=3, **look)
    panel.plot(
        x[1::2],
        [s.median for s in spreads[1::2]],
        linestyle="none",
        markersize=4.5,
        markerfacecolor="white",
        zorder=3,
        **look,
    )


def _precision_legend(panel: Axes) -> Iterator[Artist]:
    from matplotlib.lines import Line2D

    yield from panel.get_legend_handles_labels()[0]
    for label, face in (("before the layer", MUTED), ("after its observation", "white")):
        yield Line2D([], [], color=MUTED, linestyle="none", marker="o", markerfacecolor=face, label=label)


def _tau_panel(panel: Axes, tau: dict[str, Quartiles], looks: dict[str, dict[str, Any]]) -> None:
    panel.set_title("learned tau, by token id")
    for row, (name, spread) in enumerate(tau.items()):
        panel.hlines(row, spread.low, spread.high, color=looks[name]["color"], linewidth=2.5, alpha=0.5)
        panel.plot([spread.median], [row], linestyle="none", **looks[name])
    panel.axvline(1, color=MUTED, linestyle="--", linewidth=1.1, zorder=1, gid="initial")
    panel.set_yticks(range(len(tau)), [f"{name} ({s.count})" if s.count > 1 else name for name, s in tau.items()])
    panel.set_ylim(len(tau) - 0.5, -0.5)
    panel.set_xlabel("tau (1 before training)")


def _inks(count: int) -> list[Any]:
    """An ink a layer: the usual ones for few, blues from light to dark for many."""
    return list(INKS[:count]) if count <= len(INKS) else shades(count)
