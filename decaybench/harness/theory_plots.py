"""Figures of `bench theory`: errors by channels, their collapse, gaps, and errors and channels by position.

An ink a spectrum, the same in every figure; dashed is what is claimed. Where several T share a panel, the darker the
longer. Figures show the first kernel of the question; theory.json has every number of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from decaybench.core.files import atomic_write_json, make_folder
from decaybench.harness.drawing import (
    DASHED,
    INK,
    INKS,
    MUTED,
    legend_below,
    log2_axis,
    make_panels,
    mark_training_length,
    save,
    shades,
    style,
    thin,
    tokens_label,
)
from decaybench.harness.progress import Progress
from decaybench.harness.theory import (
    CODE,
    CODE_KEPT,
    FAST,
    GEOMETRIC,
    LINEAR,
    LOG_UNIFORM,
    STATIC,
    THEORY,
    THEORY_KEPT,
    UNIFORM,
    WIDE,
    Question,
    compute,
)
from decaybench.harness.theory_claims import SCALINGS, Theory, judge

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOKS: dict[str, dict[str, Any]] = {
    GEOMETRIC: {"color": INKS[0], "marker": "o"},
    LOG_UNIFORM: {"color": INKS[2], "marker": "^"},
    UNIFORM: {"color": INKS[3], "marker": "D"},
    LINEAR: {"color": INKS[1], "marker": "s"},
    FAST: {"color": INK, "marker": "v"},
}
_NORM_TITLES = {"least_squares": "best weights of any size", "float32": "weights within float32's reach"}
_POSITION_LOOKS: dict[str, dict[str, Any]] = {
    STATIC: {"color": INKS[1], "marker": "s"},
    THEORY: {"color": INKS[0], "marker": "o"},
    CODE: {"color": INKS[2], "marker": "^"},
}
_KEPT_LOOKS: dict[str, dict[str, Any]] = {
    THEORY_KEPT: {"color": INKS[0], "marker": "o", "markerfacecolor": "white", "linewidth": 1.2},
    CODE_KEPT: {"color": INKS[2], "marker": "^", "markerfacecolor": "white", "linewidth": 1.2},
}
_POSITION_NAMES = {
    STATIC: "static, timescales over [1, T]",
    THEORY: "position-scaled, over [1, t] (the theory)",
    CODE: "position-scaled, over [1, T t] (the code)",
    WIDE: "static, over [1, T²]",
    THEORY_KEPT: "the theory's start, as a recurrence keeps it",
    CODE_KEPT: "the code's start, as a recurrence keeps it",
}


def draw_theory(question: Question, out: Path, progress: Progress | None = None) -> Theory:
    """Compute, judge and draw: five figures and theory.json, with every number drawn, in `out`.

    The same question gives the same files. Raises UserError or RunError where `out` can't be that folder.
    """
    make_folder(out)  # before a minute of work
    theory = judge(compute(question, progress))
    draw(theory, out)
    atomic_write_json(out / "theory.json", theory.plain())
    return theory


def draw(theory: Theory, folder: Path) -> list[Path]:
    """Save five figures, each as .png and .svg. Returns the paths. Raises RunError."""
    figures = {
        "error": error_figure,
        "collapse": collapse_figure,
        "gaps": gap_figure,
        "position": position_figure,
        "channels": channels_figure,
    }
    return [path for name, figure in figures.items() for path in save(figure(theory), folder, name)]


def error_figure(theory: Theory) -> Figure:
    """Error by channels at one T, best weights beside those that float32 can hold; of random spectra 10 to 90 %."""
    findings = theory.findings
    T = findings.question.length
    place = findings.question.lengths.index(T)
    with style():
        title = (
            f"Fitting t^-{theory.betas[0]:g} on [1, T], T = {T}: error by number of channels; of random spectra the "
            f"geometric mean and 10 to 90 % of {findings.question.draws} draws"
        )
        figure, panels = make_panels(title, 2, 2, (8.6, 4.4))
        for panel, (norm, name) in zip(panels, _NORM_TITLES.items(), strict=True):
            panel.set_title(name)
            panel.grid(axis="y")
            for spectrum, look in _LOOKS.items():
                errors = findings.errors[spectrum]
                mean, low, high = errors.draws(norm, 0)[:, place]
                panel.plot(errors.channels, mean, label=spectrum, **look)
                if errors.weight.shape[3] > 1:
                    panel.fill_between(errors.channels, low, high, color=look["color"], alpha=0.15, linewidth=0)
            panel.set_xticks(findings.question.channels)
            panel.set_xlabel("channels N")
        _decade_axis(panels[0])
        panels[0].set_ylabel("error (root mean square over log t)")
        legend_below(figure, panels[0].get_legend_handles_labels()[0], columns=5)
        thin(figure)
    return figure


def collapse_figure(theory: Theory) -> Figure:
    """Do geometric and linear errors at all T fall on one line, over N/log T and over N/sqrt T?"""
    findings = theory.findings
    lengths = findings.question.lengths
    with style():
        title = f"Error of t^-{theory.betas[0]:g} at every T over two scalings: one line where the scaling is right"
        figure, panels = make_panels(title, 4, 2, (8.6, 6.4), share=(False, "row"))
        for panel, (spectrum, scaling) in zip(
            panels, [(name, by) for name in (GEOMETRIC, LINEAR) for by in ("N/log T", "N/sqrt T")], strict=True
        ):
            errors = findings.errors[spectrum]
            N = np.array(errors.channels, dtype=np.float64)
            found = theory.rates[spectrum]["least_squares"][0]
            for ink, T, row in zip(shades(len(lengths)), lengths, errors.draws("least_squares", 0)[0], strict=True):
                x = SCALINGS[scaling](N, np.full_like(N, T))
                panel.plot(x, row, color=ink, marker="o", markersize=4, label=f"T = {T}")
            c, factor = found.collapse[scaling]
            name = scaling.replace("sqrt ", "√")
            panel.set_title(f"{spectrum}: exp(-{c:.2f} {name}), off by a factor {factor:.2f}")
            panel.set_xlabel(name)
            panel.grid(axis="y")
            _decade_axis(panel)
        for panel in panels[::2]:
            panel.set_ylabel("error")
        legend_below(figure, panels[0].get_legend_handles_labels()[0], columns=6)
        thin(figure)
    return figure


def gap_figure(theory: Theory) -> Figure:
    """The smallest gap between random log-rates by their number, with its exact mean and N^-2."""
    with style():
        figure, panels = make_panels("The smallest gap of N random log-rates, mean of 2000 draws", 1, 1, (6.0, 4.0))
        (panel,) = panels
        for name in (LOG_UNIFORM, UNIFORM):
            gaps = theory.findings.gaps[name]
            look = _LOOKS[name] | {"linestyle": "none"}
            panel.plot(gaps.channels, gaps.gaps.mean(1), label=f"{name}, drawn", **look)
            panel.plot(
                gaps.channels, gaps.expected, color=look["color"], linewidth=1, label=f"{name}, exact mean", zorder=1
            )
        N = np.array(gaps.channels, dtype=np.float64)
        panel.plot(N, N**-2.0, color=MUTED, linestyle=DASHED, linewidth=1.2, label="N^-2")
        panel.set_yscale("log")
        panel.grid(axis="y")
        log2_axis(panel, gaps.channels, [str(n) for n in gaps.channels], min(gaps.channels), max(gaps.channels))
        panel.set_xlabel("rates N")
        panel.set_ylabel("smallest gap of log-rates")
        panel.legend()
        thin(figure)
    return figure


def position_figure(theory: Theory) -> Figure:
    """Error of N channels at position t, fitted on [1, t]: rates that hold still, and what a recurrence keeps."""
    at = theory.findings.at
    with style():
        title = (
            f"Fitting t^-{theory.betas[0]:g} on [1, t] at position t with N = {at.channels} channels, T = {at.length}"
        )
        figure, panels = make_panels(title, 1, 1, (7.0, 4.4))
        (panel,) = panels
        for name, look in (_POSITION_LOOKS | _KEPT_LOOKS).items():
            panel.plot(at.positions, at.errors[name][0], label=_POSITION_NAMES[name], **look)
        _position_axis(panel, at.positions, at.length)
        _decade_axis(panel)
        panel.grid(axis="y")
        panel.set_ylabel("error (root mean square over log t)")
        legend_below(figure, panel.get_legend_handles_labels()[0], columns=2)
        thin(figure)
    return figure


def channels_figure(theory: Theory) -> Figure:
    """Useful channels at t: counted, a timescale within [1, t], beside what the error says they are worth."""
    from matplotlib.ticker import MaxNLocator

    at = theory.findings.at
    with style():
        title = f"Channels that are of use at position t, of N = {at.channels}, T = {at.length}"
        figure, panels = make_panels(title, 2, 2, (8.6, 4.0))
        counted, worth = panels
        t = np.array(at.positions, dtype=np.float64)
        counted.set_title("counted: timescale within [1, t]", pad=17)  # above "training length"
        worth.set_title("worth: so many over [1, t] err as much", pad=17)
        for name, look in _POSITION_LOOKS.items():
            counted.plot(t, at.useful[name], label=_POSITION_NAMES[name], **look)
            if name in at.equivalent:
                worth.plot(t, at.equivalent[name][0], **look)
        worth.plot(t, np.full_like(t, at.channels), **_POSITION_LOOKS[THEORY])
        claimed = np.minimum(at.channels * np.log(t) / log(at.length), at.channels)
        for panel in panels:
            panel.plot(t, claimed, color=INK, linestyle=DASHED, linewidth=1.2, label="claimed of static: N log t/log T")
            panel.grid(axis="y")
            _position_axis(panel, at.positions, at.length)
            panel.set_ylim(0, at.channels * 1.25)
            panel.yaxis.set_major_locator(MaxNLocator(integer=True))
        counted.set_ylabel("channels")
        legend_below(figure, counted.get_legend_handles_labels()[0], columns=2)
        thin(figure)
    return figure


def _position_axis(panel: Axes, positions: Sequence[int], length: int) -> None:
    log2_axis(panel, list(positions), [tokens_label(t) for t in positions], positions[0], positions[-1])
    panel.set_xlabel("position t (tokens)")
    if positions[0] <= length <= positions[-1]:
        mark_training_length(panel, length, None)


def _decade_axis(panel: Axes) -> None:
    """Errors on a log axis with at most seven ticks, whole decades."""
    from matplotlib.ticker import NullLocator

    panel.set_yscale("log")
    values = np.concatenate(
        [np.asarray(line.get_ydata(), dtype=np.float64) for line in panel.lines if not _guide(line)]
    )
    low, high = floor(log10(values.min())), ceil(log10(values.max()))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_yticks([10.0**power for power in range(low, high + 1, ceil((high - low) / 7))])


def _guide(line: Any) -> bool:
    """The mark of the training length has no data of its own."""
    return line.get_gid() is not None
