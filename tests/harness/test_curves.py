"""The leaderboard's figure holds every seed and the medians in the right panel, says what it shows, fits its page."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from decaybench.core.errors import UserError
from decaybench.harness.curves import draw_leaderboard, leaderboard_figure
from decaybench.models.registry import architectures
from decaybench.results.comparison import comparable
from decaybench.results.leaderboard import add_record
from decaybench.results.record import Record
from tests.results.board import T, measured, seeds
from tests.results.example import cell

MAMBA = {64: (0.9, 0.7, 0.8), 128: (0.5, 0.1, 0.6)}
POST = {64: (1.0, 0.9, 0.95), 128: (0.7, 0.75, 0.65)}
FIVE = ("mamba2", "rwkv7", "gated_deltanet", "gla", "retnet")


def ten(variants: Sequence[str] = ("capacity",), addons: Sequence[str] = ("", "+post")) -> list[Record]:
    return [record for name in FIVE for addon in addons for record in seeds(name + addon, MAMBA, variants=variants)]


def figure_of(records: Sequence[Record], **options: Any) -> Figure:
    """The figure, laid out; matplotlib's warning, where a layout doesn't fit, is an error."""
    figure = leaderboard_figure(comparable(records, "mqar", **options))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.draw_without_rendering()
    return figure


def panels(figure: Figure) -> dict[str, Axes]:
    return {panel.get_title(loc="left"): panel for panel in figure.axes}


def line(panel: Axes, model: str) -> Line2D:
    (found,) = [one for one in panel.lines if one.get_label() == model]
    return found


def marks(panel: Axes) -> list[list[tuple[float, float]]]:
    return [[(x, y) for x, y in one.get_xydata()] for one in panel.lines if one.get_gid() == "seeds"]


def caption(figure: Figure) -> str:
    (legend,) = figure.legends
    return " ".join(legend.get_title().get_text().split())


def test_every_seed_is_a_mark_and_the_line_joins_medians() -> None:
    figure = figure_of([*seeds("mamba2", MAMBA), *seeds("mamba2+post", POST)])
    (panel,) = figure.axes
    assert panel.get_xscale() == "log"
    for model, shares, at in (("mamba2", MAMBA, -0.5), ("mamba2+post", POST, 0.5)):
        shift = 2 ** (0.07 * at)
        expected = [(length * shift, sorted(values)[1]) for length, values in shares.items()]
        np.testing.assert_allclose(line(panel, model).get_xydata(), expected)
        seen = [(length * shift, value) for length, values in shares.items() for value in values]
        assert any(np.shape(found) == np.shape(seen) and np.allclose(found, seen) for found in marks(panel))
    assert "lines: medians of 3 seeds; marks: every seed; 4 samples a cell" in caption(figure)
    assert "d_model 64, n_layers 2, 50,000 parameters" in caption(figure)


def test_alone_is_dashed_and_thin_and_its_addon_solid_in_the_same_ink() -> None:
    figure = figure_of(ten())
    for name in FIVE:
        alone, post = (line(panels(figure)[name], model) for model in (name, f"{name}+post"))
        assert alone.get_color() == post.get_color()
        assert (alone.get_linestyle(), post.get_linestyle()) == ("--", "-")
        assert alone.get_linewidth() < post.get_linewidth()
        assert {one.get_markerfacecolor() == "white" for one in panels(figure)[name].lines if one.get_gid()} == {
            True,
            False,
        }
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["architecture alone", "+post"]


def test_an_addon_looks_the_same_without_the_architecture_alone() -> None:
    (panel,) = figure_of(seeds("mamba2+post", POST)).axes
    assert line(panel, "mamba2+post").get_linestyle() == "-"


def test_a_panel_an_architecture_and_one_of_all_medians() -> None:
    figure = figure_of(ten())
    assert list(panels(figure)) == [*FIVE, "all, medians"], "in the registry's order, whatever the records' order"
    for name in FIVE:
        models = [one.get_label() for one in panels(figure)[name].lines if one.get_gid() is None]
        assert models == [name, f"{name}+post"]
    together = panels(figure)["all, medians"]
    assert {one.get_label() for one in together.lines} == {name + addon for name in FIVE for addon in ("", "+post")}
    np.testing.assert_allclose(line(together, "gla").get_xydata(), [(64, 0.8), (128, 0.5)])


def test_several_variants_have_a_row_of_panels_each() -> None:
    figure = figure_of(ten(("capacity", "persist")))
    names = [*FIVE, "all, medians"]
    assert list(panels(figure)) == [f"{variant}: {name}" for variant in ("capacity", "persist") for name in names]
    assert figure.get_suptitle() == "mqar: accuracy by length"
    assert figure_of(ten(), variants=["capacity"]).get_suptitle() == "mqar capacity: accuracy by length"


def test_axes_are_named_once_a_row_and_a_column_even_beside_a_gap() -> None:
    """Seven panels a variant in four columns: the last place of a row is empty."""
    variants = ("capacity", "persist")
    found = panels(figure_of(ten(variants) + seeds("attention", MAMBA, variants=variants)))
    named = [title for title, panel in found.items() if panel.get_ylabel() == "accuracy"]
    assert named == ["capacity: mamba2", "capacity: retnet", "persist: mamba2", "persist: retnet"]
    named = [title for title, panel in found.items() if panel.get_xlabel() == "length (tokens)"]
    lowest = ["persist: gla", "persist: retnet", "persist: attention", "persist: all, medians"]
    assert named == lowest
    ticked = [title for title, panel in found.items() if any(label.get_text() for label in panel.get_xticklabels())]
    assert ticked == ["capacity: gla", *lowest]


def test_an_architecture_keeps_its_ink_whichever_others_stand_there() -> None:
    together = panels(figure_of(ten()))
    for name in ("mamba2", "gla"):
        all_of_them, alone = together[name], figure_of(seeds(name, MAMBA)).axes[0]
        assert line(all_of_them, name).get_color() == line(alone, name).get_color()
        assert all_of_them.lines[1].get_marker() == alone.lines[1].get_marker()


def test_inks_of_the_built_in_architectures_can_be_told_apart_by_colour_blind_eyes() -> None:
    """Machado, Oliveira and Fernandes (2009), table 1: severity 1.0. In CIE Lab; 10 is told apart at a glance."""
    kinds = {
        "protanopia": (
            (0.152286, 1.052583, -0.204868),
            (0.114503, 0.786281, 0.099216),
            (-0.003882, -0.048116, 1.051998),
        ),
        "deuteranopia": (
            (0.367322, 0.860646, -0.227968),
            (0.280085, 0.672501, 0.047413),
            (-0.01182, 0.04294, 0.968881),
        ),
        "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
        "none": np.eye(3),
    }
    known = list(architectures())
    figure = figure_of([measured(name, 0, {T: 0.5}) for name in known])
    inks = [to_hex(line(panels(figure)[name], name).get_color()) for name in known]
    for kind, matrix in kinds.items():
        seen = [_lab(np.asarray(matrix) @ _linear(ink)) for ink in inks]
        gaps = [np.linalg.norm(one - other) for i, one in enumerate(seen) for other in seen[:i]]
        assert min(gaps) > 15, kind
    marks_ = [panels(figure)[name].lines[1].get_marker() for name in known]
    assert len(set(marks_)) == len(known), "and each has its own mark"


@pytest.mark.parametrize(
    ("addons", "more", "variants"),
    [
        (("", "+post"), (), ("capacity",)),
        (("", "+post"), ("attention",), ("capacity", "persist")),
        (("",), ("attention", "leaky", "other"), ("capacity",)),
        (("", "+post", "+post-minimal", "+post-static"), (), ("capacity",)),
    ],
)
def test_nothing_is_cut_off_or_touches(
    addons: tuple[str, ...], more: tuple[str, ...], variants: tuple[str, ...]
) -> None:
    records = ten(variants, addons) + [record for name in more for record in seeds(name, POST, variants=variants)]
    figure = figure_of(records)
    assert figure.bbox.width <= 900 * figure.dpi / 100, "a README's width"
    (legend,) = figure.legends
    boxes = {"legend": legend.get_window_extent()}
    for title, panel in panels(figure).items():
        boxes[title] = panel.get_tightbbox()
    for box in boxes.values():
        assert figure.bbox.x0 - 1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1
        assert figure.bbox.y0 - 1 <= box.y0 and box.y1 <= figure.bbox.y1 + 1
    places = list(boxes.values())
    assert not any(one.overlaps(other) for i, one in enumerate(places) for other in places[:i])
    assert {len(panel.get_xticklabels()) for panel in figure.axes} <= {0, 2}
    assert min(panel.get_window_extent().height for panel in figure.axes) > 90


def test_the_training_length_is_in_bold_even_where_it_was_not_asked() -> None:
    for shares in ({64: 0.9, 128: 0.5}, {128: 0.5, 256: 0.4}):
        figure = figure_of([measured("mamba2", 0, shares)])
        labels = figure.axes[0].get_xticklabels()
        assert [label.get_text() for label in labels if label.get_fontweight() == "bold"] == ["64\n1x"]
        assert "bold: training length" in caption(figure)
        assert "one seed" in caption(figure)


def test_the_caption_says_what_training_was_not_alike() -> None:
    rates = {"mamba2": 0.01, "gla": 0.003, "retnet": 0.005}
    records = [
        measured(name, 0, {T: 0.5}, training__config={"learning_rate": rate, "steps": 1000 if name == "gla" else 1500})
        for name, rate in rates.items()
    ]
    records.append(measured("attention", 0, {T: 0.5}, training__longest_trained=32, training__config={"steps": 1500}))
    said = caption(figure_of(records))
    assert "by model: learning_rate 0.003 to 0.01" not in said, "attention has none"
    assert "learning_rate none or 0.003 or 0.01 or 0.005" in said
    assert "steps 1500 or 1000" in said
    assert "trained on shorter sequences only: attention (32)" in said
    assert "by model: learning_rate 0.003 to 0.01, steps 1000 or 1500" in caption(figure_of(records[:3]))
    assert "by model" not in caption(figure_of(records[:1]))


def test_the_caption_says_what_was_trained_on_wrong_labels() -> None:
    noisy = [measured(name, 0, {T: 0.5}, training__config={"label_noise": 0.4}) for name in ("mamba2", "gla")]
    assert "trained with label noise 0.4" in caption(figure_of(noisy))
    assert "noise" not in caption(figure_of([measured("mamba2", 0, {T: 0.5})]))


RULES = {"bayes": 0.89, "majority": 0.82, "last": 0.7}


def ruled(model: str, samples: int, best: dict[int, float], variant: str = "capacity") -> Record:
    """A record with rules without a model, of which `bayes` reaches `best` by length."""
    cells = [
        cell(length, [1] * samples, [2] * samples, variant=variant, by_distance=[], references={**RULES, "bayes": b})
        | {"name": f"{variant}-length{length}"}
        for length, b in best.items()
    ]
    return measured(model, 0, {T: 0.5}, cells=cells, task__data_hash=str(samples) * 64)


def rules(panel: Axes) -> dict[str, list[tuple[float, float]]]:
    lines = [one for one in panel.lines if str(one.get_gid()).startswith("rule ")]
    return {str(one.get_gid()).removeprefix("rule "): [(x, y) for x, y in one.get_xydata()] for one in lines}


def test_what_rules_reach_stands_in_grey_behind_the_models() -> None:
    """On the most samples that any model was asked."""
    records = [ruled("mamba2", 4, {64: 0.9, 128: 0.88}), ruled("gla+bft", 2, {64: 1.0, 128: 0.75, 256: 0.8})]
    figure = figure_of(records)
    for panel in figure.axes:
        assert rules(panel)["bayes"] == [(64, 0.9), (128, 0.88), (256, 0.8)]
        assert rules(panel)["last"] == [(64, 0.7), (128, 0.7), (256, 0.7)]
        lines = {str(one.get_gid()): one for one in panel.lines}
        models = [one for one in panel.lines if not str(one.get_gid()).startswith("rule ")]
        for name in RULES:
            grey = lines[f"rule {name}"]
            assert len(set(to_rgb(grey.get_color()))) == 1, "no ink of a model's"
            assert all(grey.get_zorder() < one.get_zorder() for one in models)
            assert all(grey.get_linewidth() < one.get_linewidth() for one in models)
    names = [[text.get_text() for text in panel.texts] for panel in figure.axes]
    assert names == [[], [], list(RULES)], "once a row"
    heights = sorted(text.get_window_extent().y0 for text in figure.axes[-1].texts)
    assert min(np.diff(heights)) >= figure.axes[-1].texts[0].get_window_extent().height * 0.8
    assert "grey: rules without a model, on the same samples" in caption(figure)
    assert "grey" not in caption(figure_of([measured("mamba2", 0, {T: 0.5})]))


def test_each_variant_has_its_own_rules() -> None:
    records = [ruled("mamba2", 4, {64: 0.9, 128: 0.8}), ruled("mamba2", 4, {64: 0.7, 128: 0.6}, "persist")]
    cells = [one.plain() for record in records for one in record.cells]
    found = panels(figure_of([measured("mamba2", 0, {T: 0.5}, cells=cells)]))
    assert {title: rules(panel)["bayes"] for title, panel in found.items()} == {
        "capacity: mamba2": [(64, 0.9), (128, 0.8)],
        "persist: mamba2": [(64, 0.7), (128, 0.6)],
    }


def test_no_mark_stands_on_an_axis() -> None:
    """Four models side by side, of which the outer ones are drawn before and after their length."""
    names = ("", "+post", "+bft", "+post+bft")
    (panel,) = figure_of([record for name in names for record in seeds("mamba2" + name, MAMBA)]).axes
    inside = panel.get_window_extent()
    at = [panel.transData.transform((x, 0.5))[0] for group in marks(panel) for x, _ in group]
    assert inside.x0 + 4 < min(at) and max(at) < inside.x1 - 4


def test_seeds_and_samples_that_differ_are_a_range() -> None:
    records = [*seeds("mamba2", MAMBA), *seeds("gla", {64: (0.5,)})]
    assert "medians of 1 to 3 seeds" in caption(figure_of(records))


def test_both_files_are_written_and_are_the_same_twice(tmp_path: Path) -> None:
    board = tmp_path / "board.json"
    for record in seeds("mamba2", MAMBA):
        add_record(board, record)
    paths = draw_leaderboard(board, tmp_path / "a" / "curves.png", task="mqar")
    assert [path.name for path in paths] == ["curves.png", "curves.svg"]
    again = draw_leaderboard(board, tmp_path / "b" / "curves.svg", task="mqar", variants=["capacity"])
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]
    with pytest.raises(UserError, match=r"--out a\.pdf: must end in \.png or \.svg"):
        draw_leaderboard(board, Path("a.pdf"), task="mqar")


def test_the_committed_leaderboard_is_drawn(tmp_path: Path) -> None:
    board = Path(__file__).parents[2] / "results" / "leaderboard.json"
    paths = draw_leaderboard(board, tmp_path / "curves.png", task="mqar")
    assert all(path.stat().st_size > 10_000 for path in paths)


def _linear(ink: str) -> Any:
    channels = np.asarray(to_rgb(ink))
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def _lab(linear: Any) -> Any:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ np.clip(linear, 0, 1) / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
