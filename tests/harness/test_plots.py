"""Figures hold the numbers of their record or spectrum in the right places, are the same bytes twice, take odd data."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from decaybench.core.errors import RunError
from decaybench.harness.plots import draw_evaluation, evaluation_figures
from decaybench.harness.spectrum_layers import draw_timescales, timescale_figure
from decaybench.harness.spectrum_rest import LayerTimescales, Spectrum
from decaybench.results.record import Record, groups, seal
from decaybench.results.statistics import wilson
from tests.results.example import cell, content

T = 64
NAMES = ["accuracy-distance", "accuracy-length", "accuracy-length-depth"]


def record(cells: Iterable[dict[str, Any]], trained: bool = True, longest: int = T) -> Record:
    """The example record with these cells; not trained: of a checkpoint that doesn't say how long it was trained."""
    cells = [{**cell, "name": f"cell{index}"} for index, cell in enumerate(cells)]
    found = {**content(), "cells": cells}
    found["training"]["longest_trained"] = longest
    if not trained:
        del found["training"]
        found["checkpoint"] = {"source": "model", "sha256": "a" * 64}
    return seal(found)


def one(variant: str, length: int, right: int, n: int = 10, **coordinates: Any) -> dict[str, Any]:
    """A cell of n questions, a sample each, of which `right` were answered."""
    return cell(length, [int(index < right) for index in range(n)], [1] * n, variant=variant, **coordinates)


def grid(variants: Iterable[str] = ("single",), lengths: Iterable[int] = (256, 64, 128)) -> Record:
    """Cells of needles whose value tells their place; lengths and depths out of order."""
    cells = []
    for k, variant in enumerate(variants):
        for i, length in enumerate(lengths):
            cells += [one(variant, length, (3 * i + j + k) % 11, depth=d) for j, d in enumerate((1.0, 0.0, 0.5))]
    return record(cells)


def with_bins(length: int, bins: dict[int, tuple[int, int]], variant: str = "single", each: int = 1) -> dict[str, Any]:
    """A cell with (correct, asked) by octave, `each` questions of an octave in one sample; its own counts follow."""
    hits = [int(index < correct) for correct, asked in bins.values() for index in range(asked)]
    found = one(variant, length, 0) | cell(length, hits, [1] * len(hits), variant=variant)
    found["by_distance"] = [
        {"low": low, "high": 2 * low, "correct": correct, "asked": asked, "samples": asked // each}
        for low, (correct, asked) in bins.items()
    ]
    return found


def spectrum(layers: int = 2, heads: int = 4, post: bool = True, train_length: int | None = T) -> Spectrum:
    """Timescales that differ in every layer, head and position; heads not in order."""
    base = train_length or 1024
    positions = (1, base, 4 * base)
    order = np.random.default_rng(0).permutation(heads)

    def taus(scale: float) -> dict[int, list[float]]:
        return {
            t: [scale * 2.0**head * (t ** (head / heads) if post else 1.0) for head in order.tolist()]
            for t in positions
        }

    found = [LayerTimescales(layer, taus(1.0), taus(1.5 + layer)) for layer in range(layers)]
    return Spectrum("mamba2+post" if post else "mamba2", train_length, positions, tuple(found))


def panels(figure: Figure) -> list[Axes]:
    return [panel for panel in figure.axes if panel.get_label() != "<colorbar>"]


def marked(panel: Axes) -> list[float]:
    """Where the training length is marked."""
    return [float(line.get_xdata()[0]) for line in panel.lines if line.get_gid() == "training length"]


def named(panel: Axes) -> dict[str, list[tuple[float, float]]]:
    """The panel's lines with a name: their points."""
    lines = {str(line.get_label()): line for line in panel.lines if not str(line.get_label()).startswith("_")}
    return {name: [(float(x), float(y)) for x, y in line.get_xydata()] for name, line in lines.items()}


def x_labels(panel: Axes) -> dict[float, str]:
    return dict(zip(panel.get_xticks().tolist(), [label.get_text() for label in panel.get_xticklabels()], strict=True))


def texts(panel: Axes) -> list[str]:
    return [text.get_text() for text in panel.texts]


def lay_out(figure: Figure) -> None:
    """Draw it all but the pixels; matplotlib's warning, where a layout doesn't fit, is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.draw_without_rendering()


def test_files_are_written_whole_and_are_the_same_bytes_twice(tmp_path: Path) -> None:
    paths = draw_evaluation(grid(), tmp_path / "a") + draw_timescales(spectrum(), tmp_path / "a")
    assert sorted(path.name for path in paths) == sorted(
        f"{name}.{kind}" for name in [*NAMES, "timescales"] for kind in ("png", "svg")
    )
    assert sorted((tmp_path / "a").iterdir()) == sorted(paths), "nothing else stays in the folder"
    again = draw_evaluation(grid(), tmp_path / "b") + draw_timescales(spectrum(), tmp_path / "b")
    for path, other in zip(paths, again, strict=True):
        assert path.read_bytes() == other.read_bytes(), path.name
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
        assert b"date" not in path.read_bytes().lower()


def test_the_users_matplotlib_neither_changes_a_figure_nor_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain,) = [path for path in draw_evaluation(grid(), tmp_path / "a") if path.name == "accuracy-length.svg"]
    monkeypatch.setitem(rcParams, "axes.facecolor", "black")
    monkeypatch.setitem(rcParams, "font.size", 30.0)
    before = dict(rcParams)
    (other,) = [path for path in draw_evaluation(grid(), tmp_path / "b") if path.name == "accuracy-length.svg"]
    assert dict(rcParams) == before
    assert other.read_bytes() == plain.read_bytes()


def test_importing_costs_no_matplotlib_and_drawing_no_pyplot(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from decaybench.harness import plots
assert "matplotlib" not in sys.modules
from tests.results.example import record
assert plots.draw_evaluation(record(), Path({str(tmp_path)!r}))
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("name", ["write", "replace", "mkdir"])
def test_a_full_disk_is_one_line_and_keeps_the_old_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    paths = draw_timescales(spectrum(), tmp_path)
    old = [path.read_bytes() for path in paths]
    with monkeypatch.context() as patch:
        patch.setattr(Path, {"write": "write_bytes"}.get(name, name), full)
        patch.setattr(os, name, full)
        with pytest.raises(RunError, match=r"no space left on device while writing .*timescales\.png"):
            draw_timescales(spectrum(layers=3), tmp_path)
    assert [path.read_bytes() for path in paths] == old
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_the_heat_map_has_each_value_at_its_depth_and_length() -> None:
    made = grid(("single", "multikey"))
    found = panels(evaluation_figures(made)["accuracy-length-depth"])
    assert [panel.get_title(loc="left") for panel in found] == ["single", "multikey"]
    lengths, depths = [64, 128, 256], [0.0, 0.5, 1.0]
    for panel, variant in zip(found, ("single", "multikey"), strict=True):
        values = {(c.coordinates["depth"], c.eval_length): c.value for c in made.cells if c.variant == variant}
        expected = [[values[depth, length] for length in lengths] for depth in depths]
        (image,) = panel.images
        assert np.asarray(image.get_array()).tolist() == expected
        assert image.get_clim() == (0, 1)
        assert texts(panel) == [f"{value:.2f}" for row in expected for value in row]
        assert panel.yaxis_inverted(), "depth 0 is on top"
    assert [label.get_text() for label in found[0].get_yticklabels()] == ["0", "0.5", "1"]
    assert list(x_labels(found[-1]).values()) == ["64\n1x", "128\n2x", "256\n4x"]


def test_the_heat_map_frames_the_training_length_and_prints_readable_numbers() -> None:
    (panel,) = panels(evaluation_figures(grid())["accuracy-length-depth"])
    (frame,) = panel.patches
    assert (frame.get_x(), frame.get_width(), frame.get_height()) == (-0.5, 1, 3)
    assert [label.get_fontweight() == "bold" for label in panel.get_xticklabels()] == [True, False, False]
    (image,) = panel.images
    for text in panel.texts:
        column, row = text.get_position()
        ground = image.cmap(image.norm(image.get_array()[row][column]))
        assert _contrast(to_hex(text.get_color()), to_hex(ground)) > 4
    (panel,) = panels(evaluation_figures(grid(lengths=(128, 256)))["accuracy-length-depth"])
    assert not panel.patches, "the training length was not evaluated"


def test_lines_over_length_are_the_pooled_values_with_their_intervals() -> None:
    made = grid(("single", "multikey"))
    (panel,) = panels(evaluation_figures(made)["accuracy-length"])
    pooled = sorted(groups(made), key=lambda group: group.eval_length)
    for variant, points in named(panel).items():
        assert points == [(g.eval_length, g.value) for g in pooled if g.variant == variant]
    assert list(named(panel)) == ["single", "multikey"]
    bars = [path.vertices[:, 1].tolist() for collection in panel.collections for path in collection.get_paths()]
    assert sorted(bars) == sorted(list(group.interval) for group in pooled)
    assert marked(panel) == [T]
    assert x_labels(panel) == {64: "64\n1x", 128: "128\n2x", 256: "256\n4x"}
    assert panel.get_xscale() == "log"
    assert [name for name in texts(panel) if name in named(panel)] == ["single", "multikey"], "named at their ends"
    assert panel.get_legend() is None


RULES = {"bayes": 0.9, "majority": 0.8, "last": 0.75}


def with_rules(found: dict[str, Any], bayes: float = 0.9) -> dict[str, Any]:
    return {**found, "references": {**RULES, "bayes": bayes}}


def rules(panel: Axes) -> dict[str, list[tuple[float, float]]]:
    lines = [line for line in panel.lines if str(line.get_gid()).startswith("rule ")]
    return {str(line.get_gid()).removeprefix("rule "): [(x, y) for x, y in line.get_xydata()] for line in lines}


def test_rules_without_a_model_are_grey_lines_over_length_in_a_panel_a_variant() -> None:
    made = record(
        [
            with_rules(one("capacity", 128, 6), 0.85),
            with_rules(one("capacity", 64, 9), 0.95),
            with_rules(one("persist", 64, 9)),
        ]
    )
    figure = evaluation_figures(made)["accuracy-length"]
    capacity, persist = panels(figure)
    assert [panel.get_title(loc="left") for panel in (capacity, persist)] == ["capacity", "persist"]
    assert named(capacity) == {"capacity": [(64, 0.9), (128, 0.6)]} and named(persist) == {"persist": [(64, 0.9)]}
    assert rules(capacity) == {
        "bayes": [(64, 0.95), (128, 0.85)],
        "majority": [(64, 0.8), (128, 0.8)],
        "last": [(64, 0.75), (128, 0.75)],
    }
    assert rules(persist) == {name: [(64, value)] for name, value in RULES.items()}
    for panel in (capacity, persist):
        (model,) = [line for line in panel.lines if line.get_label() in ("capacity", "persist")]
        for line in panel.lines:
            if str(line.get_gid()).startswith("rule "):
                assert line.get_zorder() < model.get_zorder() and line.get_linewidth() < model.get_linewidth()
                assert len(set(to_rgb(line.get_color()))) == 1, "grey"
        assert [text for text in texts(panel) if text in RULES] == list(RULES)
        assert marked(panel) == [T]
        assert [label.get_fontweight() for label in panel.get_xticklabels()] == ["bold", "normal"]
    assert all(line.get_marker() == "_" for line in persist.lines if str(line.get_gid()).startswith("rule "))
    assert "grey: rules without a model" in figure.get_suptitle()
    lay_out(figure)


def test_rules_over_distance_are_their_mean_over_all_samples() -> None:
    found = [with_rules(with_bins(64, {4: (10, 10)}), 1.0), with_rules(with_bins(128, {4: (5, 30)}), 0.8)]
    figure = evaluation_figures(record(found))["accuracy-distance"]
    (panel,) = panels(figure)
    heights = {name: [y for _, y in points] for name, points in rules(panel).items()}
    assert heights["bayes"] == pytest.approx([0.85, 0.85]), "10 samples of 1.0 and 30 of 0.8"
    assert heights["last"] == pytest.approx([0.75, 0.75])
    assert "grey: rules without a model, over all distances" in " ".join(figure.get_suptitle().split())
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["length 64, 1x", "length 128, 2x"]


def test_a_record_without_rules_is_drawn_as_before() -> None:
    for figure in evaluation_figures(grid(("single", "multikey"))).values():
        assert "rules" not in figure.get_suptitle()
        assert all(not rules(panel) for panel in panels(figure))


def test_a_title_says_what_was_trained_on_wrong_labels() -> None:
    found = {**content(), "training": {**content()["training"], "config": {"label_noise": 0.4}}}
    for drawn in evaluation_figures(seal(found)).values():
        assert "trained with label noise 0.4, on " in " ".join(drawn.get_suptitle().split())


def test_an_unevaluated_training_length_has_a_tick_and_an_unknown_one_no_mark() -> None:
    (panel,) = panels(evaluation_figures(record([one("capacity", 256, 3, kv=4)]))["accuracy-length"])
    assert x_labels(panel) == {256: "256\n4x", 64: "64\n1x"}
    assert marked(panel) == [64]
    cells = [{**one("capacity", 256, 3, kv=4), "ratio": None}]
    (panel,) = panels(evaluation_figures(record(cells, trained=False))["accuracy-length"])
    assert x_labels(panel) == {256: "256"}
    assert marked(panel) == []


def test_names_at_line_ends_keep_apart() -> None:
    cells = [one(name, length, 0) for name in ("a", "b", "c", "d") for length in (64, 128)]
    (panel,) = panels(evaluation_figures(record(cells))["accuracy-length"])
    heights = sorted(text.xy[1] for text in panel.texts if text.get_text() in "abcd")  # type: ignore[attr-defined]
    assert len(heights) == 4
    assert min(np.diff(heights)) >= 0.07
    assert heights[0] >= 0


def test_many_lines_have_a_legend() -> None:
    cells = [one(name, length, 0) for name in "abcde" for length in (64, 128)]
    (panel,) = panels(evaluation_figures(record(cells))["accuracy-length"])
    legend = panel.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == list("abcde")


def test_listed_pairs_are_points_named_by_kv() -> None:
    made = record([one("listed", length, 10 - kv // 2, kv=kv) for length, kv in [(64, 4), (128, 4), (128, 16)]])
    (panel,) = panels(evaluation_figures(made)["accuracy-length"])
    (line,) = [line for line in panel.lines if line.get_label() == "listed"]
    assert line.get_linestyle() == "None"
    assert named(panel)["listed"] == [(64, 0.8), (128, 0.8), (128, 0.2)]
    assert sorted(texts(panel)) == ["kv 16", "kv 4", "kv 4", "training length"]


def test_lines_over_distance_pool_a_lengths_cells_and_break_at_gaps() -> None:
    made = record(
        [
            with_bins(64, {4: (10, 10), 8: (6, 12)}),
            with_bins(64, {8: (4, 8), 64: (3, 30)}),
            with_bins(128, {4: (1, 9), 8: (10, 10)}),
        ]
    )
    figure = evaluation_figures(made)["accuracy-distance"]
    (panel,) = panels(figure)
    lines = named(panel)
    assert list(lines) == ["length 64, 1x", "length 128, 2x"]
    root = math.sqrt(2)
    expected = [(4 * root, 1.0), (8 * root, 0.5), (math.nan, math.nan), (64 * root, 0.1)]
    np.testing.assert_allclose(lines["length 64, 1x"], expected)
    np.testing.assert_allclose(lines["length 128, 2x"], [(8 * root, 1.0)])
    (few,) = [line for line in panel.lines if line.get_gid() == "fewer than 10 samples"]
    np.testing.assert_allclose(few.get_xydata(), [(4 * root, 1 / 9)])
    assert few.get_linestyle() == "None"
    bars = [path.vertices[:, 1].tolist() for path in panel.collections[0].get_paths()]
    np.testing.assert_allclose(bars, [wilson(1.0, 10), wilson(0.5, 20), wilson(0.1, 30)])
    assert marked(panel) == [T]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [*lines, "fewer than 10 samples"]
    inks = [sum(line.get_color()[:3]) for line in panel.lines if line.get_label() in lines]
    assert inks[0] > inks[1], "longer is darker"


def test_intervals_over_distance_count_samples_not_questions() -> None:
    """Four questions a sample: 40 questions say no more for certain than 10 samples; two cells' samples add up."""
    made = record([with_bins(64, {4: (30, 40), 8: (9, 36)}, each=4), with_bins(64, {4: (10, 20)}, each=2)])
    figure = evaluation_figures(made)["accuracy-distance"]
    (panel,) = panels(figure)
    bars = [path.vertices[:, 1].tolist() for path in panel.collections[0].get_paths()]
    np.testing.assert_allclose(bars, [wilson(40 / 60, 20), wilson(0.25, 9)])
    assert bars[0][1] - bars[0][0] > 1.5 * (wilson(40 / 60, 60)[1] - wilson(40 / 60, 60)[0])
    (few,) = [line for line in panel.lines if line.get_gid() == "fewer than 10 samples"]
    np.testing.assert_allclose(few.get_xydata(), [(8 * math.sqrt(2), 0.25)])
    assert "95 % intervals with samples as units" in " ".join(figure.get_suptitle().split())


def test_the_mark_of_the_training_length_says_when_it_was_not_reached() -> None:
    for longest, said in ((T, "training length"), (T // 2, "training length (32 reached)")):
        figures = evaluation_figures(record([with_bins(64, {4: (10, 10)})], longest=longest))
        for name in ("accuracy-length", "accuracy-distance"):
            (panel,) = panels(figures[name])
            assert marked(panel) == [T]
            assert [text for text in texts(panel) if text.startswith("training")] == [said]


def test_a_checkpoint_that_states_its_training_length_has_the_mark() -> None:
    found = content()
    del found["training"]
    found["checkpoint"] = {"source": "model", "sha256": "a" * 64, "train_length": T}
    (panel,) = panels(evaluation_figures(seal(found))["accuracy-length"])
    assert marked(panel) == [T]


def test_the_heat_map_is_the_mean_over_other_coordinates() -> None:
    made = record([one("single", 64, right, depth=0.5, kv=kv) for right, kv in ((10, 1), (5, 2))])
    (panel,) = panels(evaluation_figures(made)["accuracy-length-depth"])
    assert texts(panel) == ["0.75"]


def test_distances_have_a_panel_a_variant() -> None:
    made = record([with_bins(64, {4: (10, 10)}, "capacity"), with_bins(128, {4: (5, 10)}, "persist")])
    found = panels(evaluation_figures(made)["accuracy-distance"])
    assert [panel.get_title(loc="left") for panel in found] == ["capacity", "persist"]
    assert [[y for _, y in named(panel)["length 64, 1x"]] for panel in found] == [[1.0], []]
    assert [[y for _, y in named(panel)["length 128, 2x"]] for panel in found] == [[], [0.5]]


def test_timescales_are_drawn_from_slow_to_fast_for_each_position() -> None:
    made = spectrum()
    figure = timescale_figure([made])
    for panel, layer in zip(panels(figure), made.layers, strict=True):
        assert panel.get_yscale() == "log"
        assert panel.get_title(loc="left") == f"layer {layer.layer}"
        lines = named(panel)
        assert list(lines) == [f"t = {t}, {when}" for t in ("1", "T", "4T") for when in ("start", "trained")]
        for position, name in zip(made.positions, ("1", "T", "4T"), strict=True):
            for when, taus in (("start", layer.at_start), ("trained", layer.after)):
                expected = list(enumerate(sorted(taus[position], reverse=True), 1))
                assert lines[f"t = {name}, {when}"] == expected
        guides = [float(line.get_ydata()[0]) for line in panel.lines if str(line.get_label()).startswith("_")]
        assert guides == [1, T, 4 * T]
    assert [texts(panel) for panel in panels(figure)] == [[], ["1", "T", "4T"]]


def test_timescales_without_positions_are_one_line() -> None:
    (panel, _) = panels(timescale_figure([spectrum(post=False)]))
    assert list(named(panel)) == ["every t, start", "every t, trained"]


def test_of_many_layers_six_are_drawn_and_the_title_says_so() -> None:
    figure = timescale_figure([spectrum(layers=24, heads=24)])
    titles = [panel.get_title(loc="left") for panel in panels(figure)]
    assert titles == [f"layer {layer}" for layer in (0, 5, 9, 14, 18, 23)]
    assert "6 of 24 layers" in figure.get_suptitle()


@pytest.mark.parametrize("made", [(1, 1, True, T), (3, 64, True, None), (5, 2, False, 1), (7, 3, True, 2)])
def test_odd_spectra_are_drawn(made: tuple[int, int, bool, int | None]) -> None:
    lay_out(timescale_figure([spectrum(*made)]))


ODD = {
    "one cell": [one("single", 64, 5, depth=0.5)],
    "all wrong": [one("single", length, 0, depth=0.5) for length in (64, 128)],
    "shorter than trained": [one("single", 2, 5, n=1, depth=0.0)],
    "to a million tokens": [one("single", 2**k, 5, depth=0.5) for k in range(6, 21)],
    "lengths close together": [one("capacity", length, 5, kv=4) for length in range(60, 100, 2)],
    "holes in the grid": [one("single", 64, 5, depth=0.5), one("single", 128, 5, depth=0.1)],
    "with and without depth": [one("single", 64, 5, depth=0.5), one("multikey", 64, 5)],
    "61 depths": [one("single", 64, 5, depth=depth / 60) for depth in range(61)],
    "variants of other lengths": [one("a", 64, 5), one("a", 128, 5), one("b", 64, 5)],
    "no distances": [{**one("single", 64, 5), "by_distance": []}],
    "seven variants": [one(name, length, 5, depth=0.5) for name in "abcdefg" for length in (64, 128)],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_records_are_drawn(name: str) -> None:
    for trained in (True, False):
        for cells in (ODD[name], [with_rules(one) for one in ODD[name]]):
            for figure in evaluation_figures(record(cells, trained)).values():
                lay_out(figure)


@pytest.mark.parametrize("name", ["lengths close together", "61 depths"])
def test_tick_labels_do_not_touch(name: str) -> None:
    left_out = 0
    for figure in evaluation_figures(record(ODD[name])).values():
        figure.draw_without_rendering()
        for panel in panels(figure):
            for axis in (panel.xaxis, panel.yaxis):
                boxes = [label.get_window_extent() for label in axis.get_ticklabels()]  # the visible ones
                assert not any(box.overlaps(other) for i, box in enumerate(boxes) for other in boxes[:i])
                left_out += len(axis.get_ticklocs()) - len(boxes)
    assert left_out > 0


@pytest.mark.parametrize("variants", [("capacity",), ("capacity", "persist"), tuple("abcdefg")])
@pytest.mark.parametrize("count", [2, 11, 17])
def test_the_legend_of_many_lengths_is_whole(variants: tuple[str, ...], count: int) -> None:
    made = record([with_bins(64 << k, {4: (5, 5)}, variant) for variant in variants for k in range(count)])
    figure = evaluation_figures(made)["accuracy-distance"]
    lay_out(figure)
    (legend,) = figure.legends
    assert len(legend.get_texts()) == count + 1, "and the mark of few samples"
    box = legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y0 >= figure.bbox.y0
    assert min(panel.get_window_extent().height for panel in panels(figure)) > 100, "it takes no panel's place"


@pytest.mark.parametrize("lengths", [2, 4, 10])
@pytest.mark.parametrize("variants", [("a",), ("a", "b"), tuple("abcd")])
def test_names_of_axes_do_not_touch_with_one_depth(lengths: int, variants: tuple[str, ...]) -> None:
    cells = [one(name, 64 << k, 5, depth=0.5) for name in variants for k in range(lengths)]
    figure = evaluation_figures(record(cells))["accuracy-length-depth"]
    lay_out(figure)
    labels = [panel.yaxis.label for panel in panels(figure)] + [figure._supylabel]  # type: ignore[attr-defined]
    boxes = [label.get_window_extent() for label in labels if label is not None and label.get_text()]
    assert boxes, "the axis has a name"
    assert not any(box.overlaps(other) for i, box in enumerate(boxes) for other in boxes[:i])
    assert all(box.y0 >= 0 and box.y1 <= figure.bbox.y1 for box in boxes)


def test_the_example_record_is_drawn(tmp_path: Path) -> None:
    assert {path.stem for path in draw_evaluation(seal(content()), tmp_path)} == set(NAMES)


def _contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, 1 to 21 (WCAG 2)."""
    dark, light = sorted(_luminance(colour) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
