"""Which records are compared, on which seeds and samples, and what is said where there is nothing to compare."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from decaybench.core.errors import UserError
from decaybench.results.pairs import Comparison, compare
from decaybench.results.record import Record
from tests.results import example
from tests.results.board import measured

PARTS = ("post", "bft")
POST, BFT = {"taper": True}, {"gain": True}


def runs(
    name: str, shares: dict[int, tuple[float, ...]], seeds: tuple[int, ...] = (0, 1, 2), **more: Any
) -> list[Record]:
    """Records of mamba2 with the add-ons that its name says; shares: by length, one a seed."""
    addons = {part: setting for part, setting in (("post", POST), ("bft", BFT)) if part in name}
    config = {"name": "mamba2", "d_model": 64, **addons, **more.pop("model", {})}
    return [
        measured(name, seed, {T: values[place] for T, values in shares.items()}, model__config=config, **more)
        for place, seed in enumerate(seeds)
    ]


def names(found: tuple[Comparison, ...]) -> list[tuple[str, str]]:
    return [(one.other, one.base) for one in found]


def refusal(records: list[Record], base: str | None = None, **how: Any) -> str:
    with pytest.raises(UserError) as error:
        compare(records, PARTS, base, **how)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_each_model_stands_against_the_same_without_one_addon() -> None:
    shares = {64: (0.5, 0.5, 0.5)}
    records = [
        record for name in ("mamba2", "mamba2+post", "mamba2+bft", "mamba2+post+bft") for record in runs(name, shares)
    ]
    assert sorted(names(compare(records, PARTS).found)) == [
        ("mamba2+bft", "mamba2"),
        ("mamba2+post", "mamba2"),
        ("mamba2+post+bft", "mamba2+bft"),
        ("mamba2+post+bft", "mamba2+post"),
    ]
    assert names(compare(records, PARTS, "mamba2").found) == [
        ("mamba2+post", "mamba2"),
        ("mamba2+bft", "mamba2"),
        ("mamba2+post+bft", "mamba2"),
    ]


def test_differences_are_of_the_common_seeds() -> None:
    base = runs("mamba2", {64: (0.5, 0.6, 0.9), 128: (0.2, 0.3, 0.9)})
    other = runs("mamba2+post", {64: (0.7, 0.5, 0.1), 128: (0.4, 0.4, 0.1)}, seeds=(1, 0, 7))
    (one,) = compare(base + other, PARTS).found
    assert one.seeds == (0, 1)
    short, long = one.lines
    assert (short.column, long.column) == ("1x", "2x")
    assert short.difference.by_seed == pytest.approx({0: 0.0, 1: 0.1})
    assert long.difference.by_seed == pytest.approx({0: 0.2, 1: 0.1})
    assert (short.base, short.other) == pytest.approx((0.55, 0.6))
    assert one.loss is not None and one.loss.value == 0.0
    assert (one.parameters, one.state) == (1.0, 1.0) and one.speed is None


def test_samples_are_paired_as_far_as_both_go() -> None:
    """Of an experiment asked twice the longer record counts; its first samples are the other's."""
    counts = {"mamba2": [(0, 4, 4)], "mamba2+post": [(4, 4, 0, 0, 0), (4, 4)]}
    records = []
    for name, several in counts.items():
        for correct in several:
            (record,) = runs(name, {64: (0.5,)}, seeds=(0,))
            content = record.plain()
            cell = example.cell(64, correct, [4] * len(correct)) | {"ratio": 1.0}
            records.append(record.model_copy(update={"cells": (type(record.cells[0])(**cell),)}))
            assert content["cells"]
    (one,) = compare(records, PARTS).found
    (line,) = one.lines
    assert line.samples == 3
    assert line.difference.value == pytest.approx(np.mean([4 - 0, 4 - 4, 0 - 4]) / 4)


def test_by_distance_the_shares_of_questions_are_compared() -> None:
    base, other = runs("mamba2", {64: (0.5, 0.5)}, (0, 1)), runs("mamba2+post", {64: (0.5, 0.5)}, (0, 1))

    def with_bins(record: Record, correct: int) -> Record:
        bins = [{"low": 8, "high": 16, "samples": 4, "asked": 10, "correct": correct}]
        cell = type(record.cells[0])(**{**record.cells[0].plain(), "by_distance": bins})
        return record.model_copy(update={"cells": (cell,)})

    records = [with_bins(base[0], 5), with_bins(base[1], 6), with_bins(other[0], 7), with_bins(other[1], 5)]
    (line,) = compare(records, PARTS).found[0].lines
    assert line.by_distance[8].by_seed == pytest.approx({0: 0.2, 1: -0.1})


def test_another_learning_rate_is_no_addon() -> None:
    shares = {64: (0.5, 0.6, 0.9)}
    base = runs("mamba2", shares, training__config={"learning_rate": 0.01})
    other = runs("mamba2+post", shares, training__config={"learning_rate": 0.02})
    message = refusal(base + other)
    assert (
        "training.learning_rate is 0.01, not 0.02" in message or "training.learning_rate is 0.02, not 0.01" in message
    )
    bft = runs("mamba2+bft", shares, training__config={"learning_rate": 0.01})
    found = compare(base + other + bft, PARTS, "mamba2")
    assert names(found.found) == [("mamba2+bft", "mamba2")]
    assert found.notes == ("mamba2+post left out: training.learning_rate is 0.02, not 0.01 (against mamba2)",)


def test_pairs_of_the_same_names_are_told_apart() -> None:
    shares = {64: (0.5, 0.6, 0.9)}
    records = [
        record
        for noise in (None, 0.4)
        for name in ("mamba2", "mamba2+post")
        for record in runs(name, shares, training__config={"learning_rate": 0.01, "label_noise": noise})
    ]
    found = compare([*records, *runs("mamba2+bft", shares, training__config={"learning_rate": 0.01})], PARTS).found
    assert {(one.other, tuple(one.where.items())) for one in found} == {
        ("mamba2+post", (("training.label_noise", None),)),
        ("mamba2+post", (("training.label_noise", 0.4),)),
        ("mamba2+bft", ()),
    }


def test_refusals_say_why() -> None:
    shares = {64: (0.5, 0.6, 0.9)}
    assert "a model with an add-on and the same without; here are mamba2" in refusal(runs("mamba2", shares))
    assert "here are no records" in refusal([])
    assert "no seed in common" in refusal(runs("mamba2", shares) + runs("mamba2+post", shares, seeds=(3, 4, 5)))
    other = runs("mamba2+post", {128: (0.5, 0.6, 0.9)})
    assert "were asked nothing in common" in refusal(runs("mamba2", shares) + other)
    assert "did you mean 'mamba2'" in refusal(runs("mamba2", shares), "mamba")


def test_tables_and_remarks_tell_how_to_read_them() -> None:
    from rich.console import Console

    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 rich closes nothing
    few = compare(runs("mamba2", {64: (0.5, 0.6)}, (0, 1)) + runs("mamba2+post", {64: (0.7, 0.9)}, (0, 1)), PARTS)
    seeds = tuple(range(6))
    base, other = runs("mamba2", {64: (0.5,) * 6}, seeds), runs("mamba2+post", {64: (0.7,) * 6}, seeds)
    for found in (few, compare(base + other, PARTS)):
        for table in found.tables(distance=True):
            console.print(table)
    text = console.export_text()
    assert "mamba2+post against mamba2; seeds 0, 1: too few to show anything" in text
    assert "higher" in text and "+0.200" in text
    assert "fewer than six seeds" in few.remarks()[0]
    assert few.plain()["comparisons"][0]["lines"][0]["difference"]["verdict"] == "too few seeds"


HALF = {64: (0.5, 0.5, 0.5)}
PASSING = "training.state_passing"


def passing(share: float | None, name: str = "mamba2", **more: Any) -> list[Record]:
    return runs(name, HALF, training__config={"learning_rate": 0.01, "state_passing": share}, **more)


def test_experiments_that_differ_in_one_named_setting_are_compared() -> None:
    """Against the one that hasn't it, else the least; what differs in more than that is another pair."""
    records = [
        *passing(0.9),
        *passing(None),
        *passing(1.0),
        *passing(0.9, "mamba2+post"),
        *passing(None, "mamba2+post"),
    ]
    found = compare(records, PARTS, vary=[PASSING])
    assert names(found.found) == [
        ("mamba2, state_passing=0.9", "mamba2"),
        ("mamba2, state_passing=1", "mamba2"),
        ("mamba2+post, state_passing=0.9", "mamba2+post"),
    ]
    assert all(one.where == {} for one in found.found)
    without = passing(10.0) + passing(9.0)
    assert names(compare(without, PARTS, vary=[PASSING]).found) == [
        ("mamba2, state_passing=10", "mamba2, state_passing=9")
    ]
    # Add-ons are compared as ever: like with like.
    told = [(one.other, one.base, one.where) for one in compare(records, PARTS).found]
    assert told == [
        ("mamba2+post", "mamba2", {PASSING: 0.9}),
        ("mamba2+post", "mamba2", {PASSING: None}),
    ]


def test_with_a_base_addons_and_named_settings_may_differ() -> None:
    records = [*passing(None), *passing(1.0), *passing(None, "mamba2+post"), *passing(1.0, "mamba2+post")]
    slow = runs("mamba2+bft", HALF, training__config={"learning_rate": 0.001})
    found = compare(records + slow, PARTS, "mamba2", vary=[PASSING])
    assert names(found.found) == [
        ("mamba2, state_passing=1", "mamba2"),
        ("mamba2+post", "mamba2"),
        ("mamba2+post, state_passing=1", "mamba2"),
    ]
    assert found.notes == ("mamba2+bft left out: training.learning_rate is 0.001, not 0.01 (against mamba2)",)
    assert names(compare(records + slow, PARTS, "mamba2", vary=["training"]).found)[-1] == ("mamba2+bft", "mamba2")


def test_architectures_are_compared_where_all_of_the_model_may_differ() -> None:
    gla = runs("gla", HALF, model={"name": "gla", "d_model": 32})
    wide = runs("gla", HALF, model={"name": "gla", "d_model": 96})
    found = compare([*runs("mamba2", HALF), *gla, *wide], PARTS, "mamba2", vary=["model"])
    assert [(one.other, one.where) for one in found.found] == [
        ("gla", {"model.d_model": 32}),
        ("gla", {"model.d_model": 96}),
    ]


def test_states_that_are_not_equal_are_left_out_and_said() -> None:
    """Equal to 5 %; the counts are those of the records."""
    base = runs("mamba2", HALF, model__state_elements=[1000, 1000])
    near = runs("mamba2+post", HALF, model__state_elements=[1100, 1000])
    far = runs("mamba2+bft", HALF, model__state_elements=[1101, 1000])
    found = compare(base + near + far, PARTS, equal="state")
    assert names(found.found) == [("mamba2+post", "mamba2")]
    assert found.found[0].state_elements == (2000, 2100) and found.found[0].state == 1.05
    assert found.notes == (
        "mamba2+bft left out: its state is 2,101 numbers, that of mamba2 2,000 (x 1.05): not equal to 5 %",
    )
    assert "(2,100 and 2,000 numbers)" in found.tables()[0].caption
    assert "not equal to 5 %" in refusal(base + far, equal="state")


def test_settings_that_cant_vary_are_refused() -> None:
    records = passing(None) + passing(0.9)
    assert f"unknown setting 'training.state_pasing'; did you mean '{PASSING}'?" in refusal(
        records, vary=["training.state_pasing"]
    )
    for key in ("task.fill", "task", "evaluation.seed"):
        assert f"--vary {key}: it changes the questions" in refusal(records, vary=[key], base="mamba2")
    assert "--vary training: it is several settings, so say with --base" in refusal(records, vary=["training"])
    assert f"no two records differ in {PASSING} alone; here are mamba2" in refusal(passing(0.9), vary=[PASSING])


def test_a_summary_fits_80_columns() -> None:
    """Names and bounds of intervals are whole, and none is cut off."""
    (grid,) = compare(runs("gated_deltanet", HALF) + runs("gated_deltanet+post", HALF), PARTS).summaries()
    for width in (80, 200):
        out = io.StringIO()
        Console(file=out, width=width).print(grid)
        said = out.getvalue()
        assert "…" not in said and all(len(line) <= width for line in said.splitlines()), said
        bounds = [bound for cell in grid.rows[1] if "[" in cell for bound in cell[cell.index("[") :].split(", ")]
        assert bounds and all(bound in said for bound in bounds), said


def test_a_summary_has_a_row_a_model_and_a_column_a_length() -> None:
    """Each base's means once for the same seeds, then the differences; the same in Markdown."""
    shares = {64: (0.5, 0.6), 128: (0.2, 0.4)}
    better = {64: (0.8, 0.9), 128: (0.2, 0.5)}
    records = runs("mamba2", shares, (0, 1)) + runs("mamba2+post", better, (0, 1)) + runs("mamba2+bft", shares, (0, 1))
    one = runs("mamba2+post+bft", {64: (0.1,)}, (0,))
    found = compare(records + one, PARTS, "mamba2")
    (grid,) = found.summaries()
    assert grid.headings == ("variant", "model", "seeds", "1x", "2x")
    assert grid.rows == (
        ("capacity", "mamba2", "0, 1", "0.550", "0.300"),
        ("", "mamba2+post", "0, 1", "+0.300*\n[+0.300, +0.300]", "+0.050\n[-0.585, +0.685]"),
        ("", "mamba2+bft", "0, 1", "+0.000\n[+0.000, +0.000]", "+0.000\n[+0.000, +0.000]"),
        ("capacity", "mamba2", "0", "0.500", ""),
        ("", "mamba2+post+bft", "0", "-0.400\none seed", ""),
    )
    lines = grid.markdown().splitlines()
    assert lines[2:5] == [
        "| variant | model | seeds | 1x | 2x |",
        "| --- | --- | ---: | ---: | ---: |",
        "| capacity | mamba2 | 0, 1 | 0.550 | 0.300 |",
    ]
    assert lines[5] == "|  | mamba2+post | 0, 1 | +0.300* [+0.300, +0.300] | +0.050 [-0.585, +0.685] |"
    assert "Fewer than six seeds" in found.remarks(summary=True)[0]
    larger = runs("mamba2+post", better, (0, 1), model__state_elements=[600, 600])
    (grid,) = compare(records[:2] + larger, PARTS).summaries()
    assert grid.headings[-1] == "state x" and grid.rows[0][-1] == "" and grid.rows[1][-1] != "1"
