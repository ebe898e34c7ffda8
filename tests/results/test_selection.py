"""The rule by which a learning rate and a step are chosen, and records whose selection doesn't follow it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from decaybench.core.errors import UserError
from decaybench.results.leaderboard import rows, settings_of
from decaybench.results.record import Record, SelectionRun, parse_record, record_hash, seal
from decaybench.results.selection import best, best_on_test, candidates, check_consistent, make_point, selection_table
from decaybench.results.tables import record_html
from tests.results import example


def run(rate: float, *points: tuple[int, list[float], list[float]], diverged: int | None = None) -> SelectionRun:
    return SelectionRun(
        learning_rate=rate,
        training_hash=f"{rate:g}",
        diverged=diverged,
        points=tuple(make_point(step, validation, test) for step, validation, test in points),
    )


def on_validation(*runs: SelectionRun) -> tuple[float, int, float]:
    found = best(runs, lambda point: point.validation_mean)
    return found.learning_rate, found.step, found.value


def test_the_validation_chooses_and_not_the_test() -> None:
    runs = [
        run(1e-3, (10, [0.5, 0.7], [0.1, 0.2]), (20, [0.8, 0.6], [0.2, 0.1])),
        run(1e-2, (10, [0.1, 0.1], [0.9, 0.3]), (20, [0.2, 0.2], [0.1, 1.0])),
    ]
    assert on_validation(*runs) == (1e-3, 20, pytest.approx(0.7))
    found = best_on_test(runs)
    assert [(one.learning_rate, one.step, one.value) for one in found.by_cell] == [(1e-2, 10, 0.9), (1e-2, 20, 1.0)]
    assert (found.by_mean.learning_rate, found.by_mean.step) == (1e-2, 10)
    assert found.by_mean.value == pytest.approx(0.6)


@pytest.mark.parametrize("turned", [False, True])
def test_of_equal_points_fewer_steps_then_the_smaller_rate(turned: bool) -> None:
    runs = [run(3e-2, (10, [0.5], [0.0]), (20, [0.9], [0.0])), run(1e-2, (20, [0.9], [0.0]), (30, [0.9], [1.0]))]
    assert on_validation(*(reversed(runs) if turned else runs))[:2] == (1e-2, 20)
    early = run(5e-1, (10, [0.9], [0.0]))
    assert on_validation(*runs, early)[:2] == (5e-1, 10)


def test_candidates_end_with_the_last_step() -> None:
    assert candidates(12, 3) == [3, 6, 9, 12]
    assert candidates(13, 5) == [5, 10, 13]
    assert candidates(4, 9) == [4]


def content() -> dict[str, Any]:
    """The example's record, chosen from two rates at two steps each; its cells are those of (0.01, 1500)."""
    found = example.content()
    test = [cell["value"] for cell in found["cells"]]
    found["training"]["training_hash"] = "0.01"
    runs = [
        run(0.003, (1000, [0.6, 0.7], [1.0, 1.0, 0.9]), diverged=1200),
        run(0.01, (1000, [0.2, 0.3], [0.0, 0.1, 0.2]), (1500, [0.9, 0.8], test)),
    ]
    found["selection"] = {
        "every": 1000,
        "total_steps": 1500,
        "validation": {
            "seed": 7,
            "cells": [{"name": f"validation-{n}", "shape": {"length": 8 * n}, "n": 4} for n in (1, 2)],
            "data_hash": "c" * 64,
        },
        "runs": [one.plain() for one in runs],
        "chosen": best(runs, lambda point: point.validation_mean).plain(),
        "chosen_on_test": best_on_test(runs).plain(),
    }
    return found


def test_a_consistent_selection_is_accepted_and_keeps_its_form() -> None:
    record = seal(content())
    check_consistent(record)
    assert parse_record(record.plain(), "") == record
    assert record.selection is not None and record.selection.learning_rates == (0.003, 0.01)
    assert not record.selection.each_epoch
    check_consistent(example.record())


def test_a_record_without_selection_says_nothing_of_it() -> None:
    plain = example.record().plain()
    assert "selection" not in plain and "selection_seconds" not in plain["cost"]


Forgery = Callable[[dict[str, Any]], None]


def of_point(place: int, **changes: Any) -> Forgery:
    return lambda found: found["runs"][1]["points"][place].update(changes)


FORGERIES: dict[str, tuple[Forgery, str]] = {
    "another point chosen": (lambda found: found["chosen"].update(step=1000), "chosen is .* by its points"),
    "a better choice claimed": (lambda found: found["chosen"].update(value=0.99), "chosen is"),
    "a smaller test number": (lambda found: found["chosen_on_test"]["by_mean"].update(value=0.5), "chosen_on_test is"),
    "a mean that isn't one": (of_point(1, validation_mean=0.95), "validation_mean 0.95, but its values give 0.85"),
    "the chosen point's test": (of_point(1, test=[1.0, 1.0, 1.0], test_mean=1.0), "chosen_on_test is|cell .* has"),
    "a value left out": (of_point(0, test=[0.0, 0.1]), "2 values of test, not 3"),
    "a point left out": (lambda found: found["runs"][1]["points"].pop(0), "points at other steps than every 1000"),
    "a point after divergence": (lambda found: found["runs"][0].update(diverged=900), "points at other steps"),
    "rates in disorder": (lambda found: found["runs"].reverse(), "don't rise"),
    "another training": (lambda found: found["runs"][1].update(training_hash="x"), "training_hash"),
    "no points": (lambda found: [one.update(points=[], diverged=1) for one in found["runs"]] and None, "no points"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_selection_is_refused(name: str) -> None:
    forge, message = FORGERIES[name]
    data = copy.deepcopy(content())
    forge(data["selection"])
    with pytest.raises(UserError, match=message) as error:
        check_consistent(seal(data))
    assert str(error.value).startswith("selection: ") and "\n" not in str(error.value)


def test_a_selection_of_another_training_is_refused() -> None:
    data = content()
    data["training"]["steps"] = 1000
    with pytest.raises(UserError, match=r"the record's steps is 1000, but by its points it is 1500"):
        check_consistent(seal(data))


def with_rate(rate: float, seed: int) -> Record:
    data = content()
    data["seed"] = data["training"]["seed"] = seed
    data["training"]["config"]["learning_rate"] = rate
    return seal(data)


def test_seeds_that_chose_different_rates_are_one_experiment() -> None:
    chosen = [with_rate(0.01, 0), with_rate(0.003, 1)]
    assert {row.points["1x"].by_seed.keys() == {0, 1} for row in rows(chosen)} == {True}
    assert settings_of(chosen[0])["training.selected.learning_rates"] == [0.003, 0.01]
    given = with_rate(0.01, 0).plain()
    del given["selection"]
    given["record_id"] = record_hash(given)
    plain = parse_record(given, "")
    assert settings_of(plain)["training.learning_rate"] == 0.01
    assert len(rows([*chosen, plain])) == 2 * len(rows(chosen)), "a rate that was given is another experiment"


def test_the_table_shows_both_numbers() -> None:
    out = io.StringIO()
    Console(file=out, width=160).print(selection_table(seal(content())))
    text = out.getvalue()
    assert "learning rate 0.01 and step 1500 of 1500, by 0.850 on validation" in text
    assert "diverged: 0.003 at step 1200" in text
    last = next(line for line in text.splitlines() if "mean, one choice" in line)
    assert "0.967" in last and "0.003" in last and "1000" in last
    assert "learning rate 0.01 and step 1500 chosen on a validation set" in " ".join(
        record_html(seal(content())).split()
    )
    with pytest.raises(ValueError, match="nothing was selected"):
        selection_table(example.record())
