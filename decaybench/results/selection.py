"""Choosing a learning rate and a step: the rule, and whether a record's selection follows from what it says itself.

Chosen is the point of the grid with the largest mean over the validation cells; of equal ones that with fewer steps,
then the smaller learning rate. A choice on the test follows the same rule with the test's cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from decaybench.core.errors import UserError
from decaybench.results.record import Choice, Record, SelectedOnTest, SelectionInfo, SelectionPoint, SelectionRun

if TYPE_CHECKING:
    from rich.table import Table


def best(runs: Sequence[SelectionRun], value: Callable[[SelectionPoint], float]) -> Choice:
    """The point of all runs with the largest value; of equal ones fewer steps, then the smaller learning rate.

    Raises ValueError where there is no point.
    """
    points = [(value(point), -point.step, -run.learning_rate) for run in runs for point in run.points]
    found, step, rate = max(points)
    return Choice(learning_rate=-rate, step=-step, value=found)


def best_on_test(runs: Sequence[SelectionRun]) -> SelectedOnTest:
    """What a choice on the test would have reported: cell by cell, and by the mean over cells."""
    cells = len(next(point for run in runs for point in run.points).test)

    def at(place: int) -> Callable[[SelectionPoint], float]:
        return lambda point: point.test[place]

    return SelectedOnTest(
        by_cell=tuple(best(runs, at(place)) for place in range(cells)),
        by_mean=best(runs, lambda point: point.test_mean),
    )


def make_point(step: int, validation: Sequence[float], test: Sequence[float]) -> SelectionPoint:
    """A point from the values of the validation's and of the test's cells."""
    return SelectionPoint(
        step=step,
        validation=tuple(validation),
        validation_mean=fmean(validation),
        test=tuple(test),
        test_mean=fmean(test),
    )


def candidates(total_steps: int, every: int) -> list[int]:
    """The steps at which there are points: every so many, and the last one."""
    return [*range(every, total_steps, every), total_steps]


def check_consistent(record: Record) -> None:
    """Recompute what a selection says from its own points. Raises UserError on the first difference."""
    if record.selection is not None:
        for problem in _problems(record, record.selection):
            raise UserError(f"selection: {problem}")


def selection_table(record: Record) -> Table:
    """What was chosen and what a choice on the test would have reported. Raises ValueError without a selection."""
    from rich.table import Table

    found = record.selection
    if found is None:
        raise ValueError("nothing was selected")
    names = list(dict.fromkeys(name for cell in record.cells for name in cell.coordinates))
    grid = Table(title=_title(record, found), title_justify="left", caption=_caption(found), caption_justify="left")
    for heading in ("variant", "length", *names, "chosen on validation", "chosen on the test", "learning rate", "step"):
        grid.add_column(heading, justify="left" if heading == "variant" else "right")
    for cell, other in zip(record.cells, found.chosen_on_test.by_cell, strict=True):
        place = [f"{cell.coordinates[name]:g}" if name in cell.coordinates else "" for name in names]
        at = [f"{other.learning_rate:.3g}", _when(found, other.step)]
        grid.add_row(cell.variant, str(cell.eval_length), *place, f"{cell.value:.3f}", f"{other.value:.3f}", *at)
    mean, test = fmean(cell.value for cell in record.cells), found.chosen_on_test.by_mean
    at = [f"{test.learning_rate:.3g}", _when(found, test.step)]
    grid.add_section()
    grid.add_row("mean, one choice", "", *[""] * len(names), f"{mean:.3f}", f"{test.value:.3f}", *at)
    return grid


def _title(record: Record, found: SelectionInfo) -> str:
    rates = ", ".join(f"{rate:.3g}" for rate in found.learning_rates)
    return (
        f"{record.model.cell}, seed {record.seed}: learning rate {found.chosen.learning_rate:.3g} and step "
        f"{_when(found, found.chosen.step)} of {_when(found, found.total_steps)}, by {found.chosen.value:.3f} on "
        f"validation; of learning rates {rates}"
    )


def _caption(found: SelectionInfo) -> str:
    cells, samples = len(found.validation.cells), found.validation.cells[0].n
    lost = [f"{run.learning_rate:.3g} at step {run.diverged}" for run in found.runs if run.diverged is not None]
    epochs = "; in brackets: epochs" if found.steps_by_epoch else ""
    return (
        f"validation: {samples} samples of each of {cells} training sizes, none of them trained on or in the test. "
        "chosen on the test: what is reported by who looks at the test for the learning rate and step, cell by cell; "
        f"too high for new samples{epochs}" + (f"; diverged: {', '.join(lost)}" if lost else "")
    )


def _when(found: SelectionInfo, step: int) -> str:
    return f"{step} ({step / found.steps_by_epoch:.3g})" if found.steps_by_epoch else str(step)


def _problems(record: Record, found: SelectionInfo) -> Iterator[str]:
    rates = list(found.learning_rates)
    if rates != sorted(set(rates)):
        yield f"its learning rates {rates} don't rise"
    if record.training is None:
        yield "the record has no training"
        return
    steps = candidates(found.total_steps, found.every)
    for run in found.runs:
        own = [step for step in steps if run.diverged is None or step < run.diverged]
        if [point.step for point in run.points] != own:
            yield f"learning rate {run.learning_rate:g} has points at other steps than every {found.every}"
        for point in run.points:
            yield from _wrong_point(record, found, point)
    if not any(run.points for run in found.runs):
        yield "it has no points"
        return
    chosen = best(found.runs, lambda point: point.validation_mean)
    yield from _differences(
        ("chosen", found.chosen.plain(), chosen.plain()),
        ("chosen_on_test", found.chosen_on_test.plain(), best_on_test(found.runs).plain()),
        ("the record's learning rate", record.training.learning_rate, chosen.learning_rate),
        ("the record's steps", record.training.steps, chosen.step),
    )
    (run,) = (run for run in found.runs if run.learning_rate == chosen.learning_rate)
    (point,) = (point for point in run.points if point.step == chosen.step)
    yield from _differences(("the record's training_hash", record.training.training_hash, run.training_hash))
    for cell, value in zip(record.cells, point.test, strict=True):
        if not math.isclose(cell.value, value, rel_tol=1e-9, abs_tol=1e-12):
            yield f"cell {cell.name!r} has {cell.value!r}, but the chosen point has {value!r}"


def _wrong_point(record: Record, found: SelectionInfo, point: SelectionPoint) -> Iterator[str]:
    for name, said, values, cells in (
        ("validation", point.validation_mean, point.validation, len(found.validation.cells)),
        ("test", point.test_mean, point.test, len(record.cells)),
    ):
        if len(values) != cells:
            yield f"the point at step {point.step} has {len(values)} values of {name}, not {cells}"
        elif not math.isclose(said, fmean(values), rel_tol=1e-9, abs_tol=1e-12):
            yield f"the point at step {point.step} has {name}_mean {said!r}, but its values give {fmean(values)!r}"


def _differences(*claims: tuple[str, Any, Any]) -> Iterator[str]:
    for name, said, expected in claims:
        if said != expected:
            yield f"{name} is {said!r}, but by its points it is {expected!r}"
