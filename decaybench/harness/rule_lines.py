"""What rules without a model reach (`CellResult.references`): thin grey lines behind a model's, named at the right.

A record of mqar-noisy has them: `bayes`, the best that is possible, `majority` and `last`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from decaybench.harness.drawing import MUTED, apart, beside

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAID = "grey: rules without a model"
_LINE: dict[str, Any] = {"color": MUTED, "linewidth": 0.9, "zorder": 1}
_POINT: dict[str, Any] = {"marker": "_", "markersize": 14, "markeredgewidth": 0.9}  # one length has no line


def draw_rules(
    panel: Axes, rules: Mapping[str, Mapping[int, float]], *, named: bool = True, apart_by: float = 0.055
) -> None:
    """A line a rule over lengths, tokens; rules: by name the accuracy, 0..1, by length.

    apart_by: how far from one another their names stand at least, in accuracy.
    """
    for name, values in rules.items():
        points = sorted(values.items())
        look = _POINT if len(points) == 1 else {}
        panel.plot([x for x, _ in points], [y for _, y in points], gid=_gid(name), **_LINE, **look)
    if named:
        _name(panel, {name: values[max(values)] for name, values in rules.items()}, apart_by)


def draw_levels(panel: Axes, levels: Mapping[str, float], *, apart_by: float = 0.065) -> None:
    """A line a rule across the panel; levels: the accuracy, 0..1, by name. apart_by: see draw_rules."""
    for name, level in levels.items():
        panel.axhline(level, gid=_gid(name), **_LINE)
    _name(panel, levels, apart_by)


def _name(panel: Axes, heights: Mapping[str, float], apart_by: float) -> None:
    for name, height in zip(heights, apart(list(heights.values()), apart_by), strict=True):
        beside(panel, (1, height), name, xycoords=("axes fraction", "data"), color=MUTED, size=8)


def _gid(name: str) -> str:
    return f"rule {name}"
