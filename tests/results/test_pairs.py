"""Which records are compared, on which seeds and samples, and what is said where there is nothing to compare."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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


def refusal(records: list[Record], base: str | None = None) -> str:
    with pytest.raises(UserError) as error:
        compare(records, PARTS, base)
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
