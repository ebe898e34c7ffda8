"""Running text's figures and tables: every number drawn or printed is the record's, and what isn't known isn't told."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from decaybench.core.errors import UserError
from decaybench.harness.curves import draw_leaderboard, leaderboard_figure
from decaybench.harness.plots import draw_evaluation, evaluation_figures
from decaybench.results.comparison import comparable
from decaybench.results.leaderboard import add_record, read_leaderboard, table
from decaybench.results.record import CellResult, Record, bits_per_byte, check_counts, seal
from tests.results import example

T = 64
_T15 = 2.1314495456  # 97.5 % of Student's t with 15 degrees of freedom, as tabulated


def text_cell(length: int, windows: int, bits: float) -> dict[str, Any]:
    """Windows of one document each, that take `bits` a byte more at each octave, and a little more each."""
    highs = [1, 2, *(2**power for power in range(2, length.bit_length()))]
    sizes = {high: max(1, high // 2) for high in highs}
    nats = {
        high: round(windows * size * (bits + place) * math.log(2), 6)
        for place, (high, size) in enumerate(sizes.items())
    }
    shares = np.linspace(0.9, 1.1, windows) if windows > 1 else np.ones(1)
    likely = [-round(share * sum(nats.values()) / windows, 6) for share in shares]
    size = [sum(sizes.values())] * windows
    ratio, error = bits_per_byte(likely, size)
    right = [sum(number // 2 for number in sizes.values())] * windows
    cell = example.cell(length, right, [length] * windows, by_distance=[])
    bins = [
        {"low": high // 2 + 1, "high": high, "samples": windows, "nats": nats[high]}
        | {"asked": windows * sizes[high], "bytes": windows * sizes[high], "correct": windows * (sizes[high] // 2)}
        for high in highs
    ]
    return cell | {
        "name": f"validation-length{length}",
        "variant": "validation",
        "log_likelihood": likely,
        "bytes": size,
        "bits_per_byte": ratio,
        "by_position": bins,
        **({} if error is None else {"bits_per_byte_error": error}),
    }


def text_record(
    model: str = "mamba2", seed: int = 0, windows: int = 16, bits: float = 1.0, lengths: tuple[int, ...] = (T, 4 * T)
) -> Record:
    content = example.content(seed)
    architecture, _, addon = model.partition("+")
    content["model"] |= {"cell": model, "architecture": architecture, "addons": [addon] if addon else []}
    content["model"]["config"] = {"name": architecture, "d_model": len(architecture), "n_layers": 2}
    content["task"] |= {"name": "text", "config": {"data": "novels", "reset": True}, "metric": "mean_accuracy"}
    content["cells"] = [text_cell(length, windows, bits) for length in lengths]
    return seal(content)


def interval(cell: CellResult) -> tuple[float, float]:
    """Of 16 windows."""
    assert cell.n == 16 and cell.bits_per_byte is not None and cell.bits_per_byte_error is not None
    return cell.bits_per_byte - _T15 * cell.bits_per_byte_error, cell.bits_per_byte + _T15 * cell.bits_per_byte_error


def laid_out(figure: Figure) -> list[Axes]:
    """Its panels; matplotlib's warning, where a layout doesn't fit, is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.draw_without_rendering()
    return figure.axes


def printed(what: Any) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def test_the_figures_of_running_text_are_of_bits() -> None:
    assert list(evaluation_figures(text_record())) == ["bits-length", "bits-position"]


def test_by_length_each_window_counts_once() -> None:
    record = text_record()
    (panel,) = laid_out(evaluation_figures(record)["bits-length"])
    (line,) = [line for line in panel.lines if line.get_gid() is None]
    expected = [(cell.eval_length, cell.bits_per_byte) for cell in record.cells]
    np.testing.assert_allclose(line.get_xydata(), expected)
    for cell, bar in zip(record.cells, panel.collections, strict=True):
        (segment,) = bar.get_segments()  # type: ignore[attr-defined]
        low, high = interval(cell)
        np.testing.assert_allclose(segment, [(cell.eval_length, low), (cell.eval_length, high)])
    assert panel.get_ylabel() == "bits/byte, 95 % interval over 16 windows"


def test_of_one_window_no_interval_is_drawn() -> None:
    (panel,) = laid_out(evaluation_figures(text_record(windows=1))["bits-length"])
    assert not panel.collections


def test_by_position_a_line_a_length_and_few_tokens_hollow() -> None:
    record = text_record(windows=40)
    (panel,) = laid_out(evaluation_figures(record)["bits-position"])
    lines = [line for line in panel.lines if line.get_gid() is None]
    assert [line.get_label() for line in lines] == ["length 64, 1x", "length 256, 4x"]
    for cell, line in zip(record.cells, lines, strict=True):
        enough = [part for part in cell.by_position or () if part.asked >= 200]
        assert enough[0].high == 16, "of the first octaves there are 20, 40 and 80 tokens"
        x = [math.sqrt(part.low * part.high) for part in enough]
        np.testing.assert_allclose(line.get_xydata(), list(zip(x, [p.bits_per_byte for p in enough], strict=True)))
    hollow = [line for line in panel.lines if line.get_gid() == "fewer than 1,000 tokens"]
    assert [line.get_xydata().shape[0] for line in hollow] == [2, 2], "of 320 and 640 tokens"
    (mark,) = [line for line in panel.lines if line.get_gid() == "training length"]
    assert set(mark.get_xdata()) == {T}
    (legend,) = panel.figure.legends
    assert [text.get_text() for text in legend.get_texts()][-1] == "fewer than 1,000 tokens"


def test_where_there_is_little_text_all_of_it_is_drawn() -> None:
    (panel,) = laid_out(evaluation_figures(text_record(windows=1, lengths=(T,)))["bits-position"])
    assert len(panel.lines[0].get_xydata()) == 7


def test_positions_that_run_on_are_those_of_the_window() -> None:
    record = text_record()
    said = {"document": True, "window": False}
    for word, reset in said.items():
        content = record.plain() | {"task": {**record.task.plain(), "config": {"data": "novels", "reset": reset}}}
        (panel,) = laid_out(evaluation_figures(seal(content))["bits-position"])
        assert panel.get_xlabel() == f"position in the {word} (tokens)"


def test_the_files_are_the_same_twice(tmp_path: Path) -> None:
    first, second = (draw_evaluation(text_record(), tmp_path / name) for name in "ab")
    assert [path.name for path in first] == [
        f"bits-{what}.{kind}" for what in ("length", "position") for kind in ("png", "svg")
    ]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


# --- tables


def test_the_table_has_bits_with_students_interval() -> None:
    record = text_record()
    shown = printed(record)
    for cell in record.cells:
        low, high = interval(cell)
        assert f"│ {cell.bits_per_byte:.3f} │ [{low:.3f}, {high:.3f}] │" in re.sub(" +", " ", shown)
    assert "intervals: windows as units" in shown and "±" not in shown


def test_of_one_window_no_error_is_claimed() -> None:
    record = text_record(windows=1)
    check_counts(record)
    assert all(cell.bits_per_byte_error is None for cell in record.cells)
    assert all("bits_per_byte_error" not in cell for cell in record.plain()["cells"])
    shown = re.sub(" +", " ", printed(record))
    for cell in record.cells:
        assert f"│ {cell.bits_per_byte:.3f} │ — │" in shown
    assert "<td>—</td>" in record._repr_html_()


@pytest.mark.parametrize(("windows", "error"), [(1, 0.0), (4, None)])
def test_an_error_of_one_window_is_refused_and_of_several_is_wanted(windows: int, error: float | None) -> None:
    content = text_record(windows=windows).plain()
    cell = content["cells"][0]
    cell.pop("bits_per_byte_error", None)
    if error is not None:
        cell["bits_per_byte_error"] = error
    with pytest.raises(UserError, match="bits_per_byte_error, unless it is a single sample"):
        seal(content)


# --- several records


def board_of(path: Path, *records: Record) -> Path:
    for record in records:
        check_counts(record)
        assert add_record(path, record)
    return path


def test_the_leaderboard_has_bits_and_not_accuracies(tmp_path: Path) -> None:
    board = board_of(
        tmp_path / "board.json", text_record(), text_record(seed=1, bits=1.5), text_record(seed=2, bits=3.0)
    )
    middle = text_record(bits=1.5)
    shown = re.sub(" +", " ", printed(table(read_leaderboard(board))))
    assert " │ ".join(f"{cell.bits_per_byte:.3f}" for cell in middle.cells) in shown
    assert "task text: bits/byte" in " ".join(shown.split())


def test_several_models_are_drawn_by_position(tmp_path: Path) -> None:
    """Though they aren't of the same width, as presets for the same number of parameters aren't."""
    models = {"mamba2": 1.0, "mamba2+post": 0.9, "attention": 2.0}
    records = [text_record(model, seed, 40, bits + seed / 10) for model, bits in models.items() for seed in range(3)]
    figure = leaderboard_figure(comparable(records, "text"))
    panels = {panel.get_title(loc="left"): panel for panel in laid_out(figure)}
    assert list(panels) == ["mamba2", "attention", "all, medians"]
    for model, bits in models.items():
        (line,) = [one for one in panels["all, medians"].lines if one.get_label() == model]
        parts = [p for p in text_record(model, 1, 40, bits + 0.1).cells[-1].by_position or () if p.asked >= 200]
        np.testing.assert_allclose(line.get_xydata(), [(part.high, part.bits_per_byte) for part in parts])
    assert figure._suptitle.get_text() == "text validation: bits/byte by position"  # type: ignore[attr-defined]
    caption = " ".join(figure.legends[0].get_title().get_text().split())
    assert "a mark at 1024 is of positions 513 to 1024" in caption and "n_layers 2" in caption
    assert "40 windows a cell" in caption and "d_model" not in caption
    assert panels["mamba2"].get_ylim()[1] > 8, "no axis of accuracies"


def test_seeds_that_were_asked_at_other_lengths_share_none(tmp_path: Path) -> None:
    records = [text_record(seed=0, lengths=(T,)), text_record(seed=1, lengths=(2 * T,))]
    board = board_of(tmp_path / "board.json", *records)
    with pytest.raises(UserError, match="mamba2: its seeds have no length in common"):
        draw_leaderboard(board, tmp_path / "a.png", task="text")
