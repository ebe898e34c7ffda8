"""What the figures share: their style, panels, axes and files; .png for a page, .svg for a paper, the same bytes twice.

No pyplot: no window, and nothing of the caller's matplotlib is changed. matplotlib is imported by the functions that
draw, so that what merely imports this module doesn't wait for it.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from decaybench.core.files import atomic_write_bytes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.ticker import Locator

T = TypeVar("T")

INK, MUTED, GRID = "#222222", "#6b6b6b", "#e4e4e4"
INKS = ("#0072b2", "#d55e00", "#009e73", "#b0578d")  # Okabe and Ito's: colour-blind eyes tell them apart
MARKERS = ("o", "s", "^", "D")
MANY_INKS = (*INKS, INK, "#e69f00", "#56b4e9")
MANY_MARKERS = (*MARKERS, "v", "P", "X")
DASHED = (0, (3, 1.5))  # ink and gap, in widths of the line
_LEGEND_ROW = 0.19  # inches
_STYLE: Any = {  # matplotlib types its keys one by one
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "figure.titlesize": 11,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.title_fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "savefig.dpi": 150,
    "svg.hashsalt": "decaybench",
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 9,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 9,
}


@contextmanager
def style() -> Iterator[None]:
    """Our style alone, whatever the user's matplotlibrc says; the caller's settings come back afterwards."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def make_panels(
    title: str, count: int, columns: int, size: tuple[float, float], share: tuple[Any, Any] = (True, True)
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels that share their axes, filled row by row.

    size: inches. share: which panels share their x and their y axis, as matplotlib says it: all, "row", "col", none.
    """
    from matplotlib.figure import Figure

    rows = ceil(count / columns)
    figure = Figure(figsize=size)
    grid = figure.subplots(rows, columns, sharex=share[0], sharey=share[1], squeeze=False).ravel()
    for unused in grid[count:]:
        unused.remove()
    panels = list(grid[:count])
    for panel in panels[max(0, count - columns) :]:  # also those whose neighbour below was removed
        panel.tick_params(labelbottom=True)
    per_line = int(11.5 * size[0])  # characters, wide ones too
    figure.suptitle(textwrap.fill(title, per_line), x=0.01, ha="left")
    return figure, panels


def name_panel(panel: Axes, variant: str, variants: Sequence[str], pad: float = 6) -> None:
    """The variant above its panel, where there are several."""
    if len(variants) > 1:
        panel.set_title(variant, pad=pad)


def name_axes(panels: Sequence[Axes], columns: int, x: str, y: str) -> None:
    """The axes' names, once a column and once a row."""
    for panel in panels[max(0, len(panels) - columns) :]:
        panel.set_xlabel(x)
    for panel in panels[::columns]:
        panel.set_ylabel(y)


def legend_below(figure: Figure, handles: Sequence[Artist], columns: int, title: str = "") -> None:
    """A legend under the figure: as few rows as `columns` and its width allow, evenly filled; it grows by many rows."""
    for most in range(columns, 0, -1):
        rows = ceil(len(handles) / most)
        legend = figure.legend(
            handles=handles, loc="outside lower center", ncols=ceil(len(handles) / rows), title=title or None
        )
        if most == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * max(0, rows - 2))


def handles(panel: Axes) -> list[Artist]:
    """What of a panel a legend would name."""
    return list(panel.get_legend_handles_labels()[0])


def no_minor_ticks() -> Locator:
    """For an axis on which they would crowd."""
    from matplotlib.ticker import NullLocator

    return NullLocator()


def evenly(items: Sequence[T], most: int) -> list[T]:
    """At most so many of the items, 2 or more: the first, the last and those evenly between them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def shades(count: int) -> list[Any]:
    """Blues from light to dark; the usual blue for one."""
    from matplotlib import colormaps

    return [colormaps["Blues"](shade) for shade in np.linspace(0.4, 1.0, count)] if count > 1 else [INKS[0]]


def ratio_label(ratio: float) -> str:
    """A multiple of the training length: 2x."""
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.3g}x"


def tokens_label(tokens: int) -> str:
    """Tokens on an axis: 8192, 16k, 1M, with k = 1024, as model cards count."""
    for unit, letter in ((1024**3, "G"), (1024**2, "M"), (1024, "k")):
        if tokens > 9999 and tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return str(tokens)


def unit_axis(panel: Axes) -> None:
    """Accuracies or gains from 0 to 1 upwards."""
    panel.set_ylim(-0.03, 1.03)
    panel.set_yticks(np.linspace(0, 1, 6))
    panel.grid(axis="y")


def log2_axis(panel: Axes, ticks: Sequence[float], labels: Sequence[str], low: float, high: float) -> None:
    """Tokens from `low` to `high` on a log axis with these ticks."""
    from matplotlib.ticker import NullLocator

    panel.set_xscale("log", base=2)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xticks(ticks, labels)
    margin = max((high / low) ** 0.05, 1.1)
    panel.set_xlim(low / margin, high * margin)


def mark_training_length(panel: Axes, train_length: int | None, longest: int | None) -> None:
    """A dashed line at the training length, named above the panel; longest: what was really trained on, tokens."""
    if train_length is None:
        return
    reached = f" ({tokens_label(longest)} reached)" if longest is not None and longest < train_length else ""
    panel.axvline(train_length, color=MUTED, linestyle="--", linewidth=1.1, zorder=1, gid="training length")
    panel.annotate(
        f"training length{reached}",
        (train_length, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        color=MUTED,
        size=9,
    )


def beside(panel: Axes, place: tuple[float, float], text: str, **look: Any) -> None:
    """Text to the right of a place."""
    panel.annotate(text, place, xytext=(6, 0), textcoords="offset points", va="center", annotation_clip=False, **look)


def apart(values: Sequence[float], gap: float) -> list[float]:
    """The nearest heights to `values` in [0, 1], in the same order, that are `gap` apart (less if there is no room)."""
    gap = min(gap, 1 / max(len(values) - 1, 1))
    order = sorted(range(len(values)), key=lambda index: values[index])
    blocks: list[list[float]] = []  # isotonic regression of value - rank gap: neighbours out of order share their mean
    for rank, index in enumerate(order):
        blocks.append([values[index] - rank * gap])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    levels = [fmean(block) for block in blocks for _ in block]
    room = 1 - (len(values) - 1) * gap
    heights = [0.0] * len(values)
    for rank, index in enumerate(order):
        heights[index] = min(max(levels[rank], 0.0), room) + rank * gap
    return heights


def thin(figure: Figure) -> None:
    """Leave out tick labels that would touch; one in bold stays."""
    figure.draw_without_rendering()
    for panel in figure.axes:
        for axis in (panel.xaxis, panel.yaxis):
            labels = [label for label in axis.get_ticklabels() if label.get_text()]
            kept: list[Text] = []
            for label in sorted(labels, key=lambda label: label.get_fontweight() != "bold"):
                box = label.get_window_extent().padded(2)
                if any(box.overlaps(other.get_window_extent()) for other in kept):
                    label.set_visible(False)
                else:
                    kept.append(label)


def remove(folder: Path, names: Iterable[str]) -> None:
    """Remove the .png and .svg of these names, where they are. Raises OSError."""
    for name in names:
        for ending in (".png", ".svg"):
            (folder / f"{name}{ending}").unlink(missing_ok=True)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `name`.png and .svg, each whole or not at all. Raises RunError."""
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    unsigned = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}
    for path in paths:
        data = io.BytesIO()
        with style():
            figure.savefig(data, format=path.suffix[1:], metadata=unsigned[path.suffix])
        atomic_write_bytes(path, data.getvalue())
    return paths
