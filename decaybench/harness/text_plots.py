"""Figures of an evaluation on running text: bits by byte of its text, by length of the window and by position in it.

A window of length L tells of all positions up to L, so a line a length shows whether what a model knows beyond its
training context depends on where the window ends, which it mustn't, or on how far it has read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, log2, nan, sqrt
from typing import TYPE_CHECKING, Any

from decaybench.harness.drawing import (
    INKS,
    MUTED,
    evenly,
    legend_below,
    log2_axis,
    make_panels,
    mark_training_length,
    name_axes,
    ratio_label,
    shades,
    thin,
    tokens_label,
)
from decaybench.results.leaderboard import BITS
from decaybench.results.record import ENOUGH, CellResult, PositionBin, Record, groups
from decaybench.results.statistics import t_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FEW = 1000  # tokens; the mean of fewer is hollow, and that of fewer than ENOUGH isn't there
_HOLLOW = f"fewer than {_FEW:,} tokens"
_SIZE = (6.4, 3.8)  # inches


def bits_by_length(record: Record) -> Figure:
    """Bits by byte of windows by their length, with Student's 95 % interval where there are several."""
    found = sorted((group for group in groups(record) if group.bits_per_byte), key=lambda group: group.eval_length)
    figure, (panel,) = make_panels(_title(record, f"{BITS} by length"), 1, 1, _SIZE)
    lengths = [group.eval_length for group in found]
    pairs = [group.bits_per_byte for group in found if group.bits_per_byte]
    for group, (bits, error) in zip(found, pairs, strict=True):
        if error is not None:
            low, high = t_interval(bits, error, group.n)
            panel.vlines([group.eval_length], [max(0.0, low)], [high], color=INKS[0], linewidth=1.5, alpha=0.5)
    panel.plot(lengths, [bits for bits, _ in pairs], color=INKS[0], marker="o", zorder=3)
    ticks = {group.eval_length: _named(group.eval_length, group.ratio, "\n") for group in found}
    if record.train_length is not None:
        ticks.setdefault(record.train_length, _named(record.train_length, 1.0, "\n"))
    log2_axis(panel, list(ticks), list(ticks.values()), min(ticks), max(ticks))
    samples = sorted({group.n for group in found})
    windows = f"{samples[0]}" if len(samples) == 1 else f"{samples[0]} to {samples[-1]}"
    name_axes([panel], 1, "length of the window (tokens)", f"{BITS}, 95 % interval over {windows} windows")
    return _finished(figure, panel, record)


def bits_by_position(record: Record) -> Figure:
    """Bits by byte by octave of the position, a line a length; a point is at its octave's geometric middle."""
    from matplotlib.lines import Line2D

    cells = sorted((cell for cell in record.cells if cell.by_position), key=lambda cell: cell.eval_length)
    into = "window" if record.task.config.get("reset") is False else "document"
    figure, (panel,) = make_panels(_title(record, f"{BITS} by position in the {into}"), 1, 1, _SIZE)
    drawn = [(cell, _enough(cell)) for cell in cells]
    for ink, (cell, bins) in zip(shades(len(cells)), drawn, strict=True):
        _line(panel, bins, ink, f"length {_named(cell.eval_length, cell.ratio, ', ')}")
    highs = {part.high for _, bins in drawn for part in bins}
    low, high = min(highs, default=2) // 2, max([*highs, record.train_length or 2])
    ticks = evenly([2**power for power in range(int(log2(low or 1)), ceil(log2(high)) + 1)], 12)
    log2_axis(panel, ticks, [tokens_label(tick) for tick in ticks], low or 1, high)
    name_axes([panel], 1, f"position in the {into} (tokens)", BITS)
    handles = panel.get_legend_handles_labels()[0]
    if any(line.get_gid() == _HOLLOW for line in panel.lines):
        handles.append(Line2D([], [], color=MUTED, marker="o", markerfacecolor="white", ls="none", label=_HOLLOW))
    legend_below(figure, handles, columns=5)
    return _finished(figure, panel, record)


def _finished(figure: Figure, panel: Axes, record: Record) -> Figure:
    panel.grid(axis="y")
    mark_training_length(panel, record.train_length, record.longest_trained)
    thin(figure)
    return figure


def _title(record: Record, shown: str) -> str:
    of = record.task.config.get("data")
    return f"{record.model.cell} on {of or record.task.name}: {shown}"


def _named(length: int, ratio: float | None, between: str) -> str:
    return tokens_label(length) + ("" if ratio is None else between + ratio_label(ratio))


def _enough(cell: CellResult) -> list[PositionBin]:
    """The bins that have text enough for a number; all that have any where none has."""
    bins = [part for part in cell.by_position or () if part.bytes]
    return [part for part in bins if part.asked >= ENOUGH] or bins


def _line(panel: Axes, bins: Sequence[PositionBin], ink: Any, name: str) -> None:
    """The line joins neighbours only."""
    points = list(_joined(bins))
    panel.plot([x for x, _ in points], [y for _, y in points], color=ink, label=name, marker="o", zorder=3)
    few = [_point(part) for part in bins if part.asked < _FEW]
    look: dict[str, Any] = {"color": ink, "marker": "o", "markerfacecolor": "white", "linestyle": "none", "zorder": 4}
    if few:
        panel.plot([x for x, _ in few], [y for _, y in few], gid=_HOLLOW, **look)


def _joined(bins: Iterable[PositionBin]) -> Iterable[tuple[float, float]]:
    before: PositionBin | None = None
    for part in bins:
        if before is not None and part.low != before.high + 1:
            yield nan, nan
        yield _point(part)
        before = part


def _point(part: PositionBin) -> tuple[float, float]:
    return sqrt(part.low * part.high), part.bits_per_byte or 0.0
