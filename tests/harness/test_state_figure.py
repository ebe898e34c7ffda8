"""Accuracy against the size of the state: what is drawn is what the records hold."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from decaybench.harness.sweep.state_figure import draw_states, state_figure, state_lines
from decaybench.results.leaderboard import read_leaderboard

BOARD = Path(__file__).parents[2] / "results/leaderboard.json"
HALVED = {2: 0.05, 4: 0.2}  # how much less accurate a state of a half and a quarter is made here


def of_size(record, part):
    """The record as one of a model with a state a part as large, its accuracies lower."""
    model = record.model
    sizes = tuple(size // part for size in model.state_elements)
    less = HALVED.get(part, 0.0)
    cells = tuple(cell.model_copy(update={"value": max(0.0, cell.value - less)}) for cell in record.cells)
    config = {**model.config, "mixer": {**model.config["mixer"], "part": part}}
    model = model.model_copy(update={"state_elements": sizes, "config": config})
    return record.model_copy(update={"model": model, "cells": cells})


@pytest.fixture(scope="module")
def records():
    cells = ("mamba2", "mamba2+post", "gla")
    found = [
        record
        for record in read_leaderboard(BOARD)
        if record.task.name == "mqar" and record.model.cell in cells and record.training.config["learning_rate"] > 0.005
    ]
    assert len({record.model.cell for record in found}) == 3
    return found


def test_a_line_is_a_model_whatever_its_size(records):
    some = [record for record in records if record.model.cell != "gla"]
    lines = state_lines([of_size(record, part) for part in (1, 2, 4) for record in some])
    names = [line.model for line in lines]
    assert names == sorted(names) and set(names) == {"mamba2", "mamba2+post"}
    whole = sum(some[0].model.state_elements)
    for line in lines:
        assert line.states == {whole, whole // 2, whole // 4}


def test_the_figure_shows_every_run_and_the_medians(records):
    given = [of_size(record, part) for part in (4, 1, 2) for record in records if record.model.cell == "mamba2"]
    rates = {record.training.config["learning_rate"] for record in given}
    figure = state_figure(given)
    assert figure is not None
    titles = [panel.get_title(loc="left") for panel in figure.axes]
    assert titles == [f"{variant}, {n}x" for variant in ("capacity", "persist") for n in (1, 2, 4, 8)]
    panel = figure.axes[2]  # capacity, 4x
    lines = [line for line in panel.get_lines() if line.get_gid() != "seeds"]
    marks = [line for line in panel.get_lines() if line.get_gid() == "seeds"]
    assert len(lines) == len(marks) == len(rates)
    drawn = sorted(point for line in lines for point in zip(*line.get_data(), strict=True))
    wanted: dict[tuple[int, float], list[float]] = {}
    for record in given:
        (value,) = (cell.value for cell in record.cells if (cell.variant, cell.ratio) == ("capacity", 4))
        key = (sum(record.model.state_elements), record.training.config["learning_rate"])
        wanted.setdefault(key, []).append(value)
    medians = sorted((state, median(values)) for (state, _), values in wanted.items())
    assert drawn == medians
    seeds = sorted(point for line in marks for point in zip(*line.get_data(), strict=True))
    assert seeds == sorted((state, value) for (state, _), values in wanted.items() for value in values)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ([f"mamba2 learning_rate={rate:g}" for rate in sorted(rates)] if len(rates) > 1 else ["mamba2"])


def test_one_size_a_model_is_nothing_to_draw(records, tmp_path):
    assert state_figure(records) is None
    mixed = [of_size(record, 2 if record.model.cell == "gla" else 1) for record in records]
    assert len({sum(record.model.state_elements) for record in mixed}) > 1
    assert draw_states(mixed, tmp_path) == [] and not list(tmp_path.iterdir())


def test_it_is_the_same_file_twice(records, tmp_path):
    given = [of_size(record, part) for part in (1, 2) for record in records]
    for name in ("a", "b"):
        assert [path.name for path in draw_states(given, tmp_path / name)] == ["state-mqar.png", "state-mqar.svg"]
    assert (tmp_path / "a/state-mqar.svg").read_bytes() == (tmp_path / "b/state-mqar.svg").read_bytes()
