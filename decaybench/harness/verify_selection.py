"""Is a record's selection what it says? Its grid, its validation samples made again, and its points' answers counted.

Without the runs' folders a point's values can't be counted, only what follows from them: means, choices, hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import isclose
from typing import Any, NamedTuple

import numpy as np

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.harness.config import TrainingConfig, evaluation_cells, training_hash
from decaybench.harness.evaluation import Question, cell_result, is_own, questions, update_digest
from decaybench.harness.plans import make_plan
from decaybench.harness.selection import point_folder, set_name, validation_cells
from decaybench.results.record import Record, SelectionInfo, SelectionRun, TrainingInfo, data_hash
from decaybench.results.run_folder import EvaluationFolder, RunFolder
from decaybench.results.selection import check_consistent
from decaybench.tasks.base import Cell, EvaluationConfig, Split, Task

_BLOCK_TOKENS = 2**20


def verify_selection(
    record: Record, task: Task[Any, Any, Any], evaluation: EvaluationConfig, folder: EvaluationFolder | None
) -> None:
    """Recompute a record's selection, if it has one. Raises UserError on the first thing that doesn't recompute.

    folder: the record's own; the runs of the other learning rates lie beside the one that it is in.
    """
    found, training = record.selection, record.training
    if found is None:
        return
    check_consistent(record)
    assert training is not None  # else it isn't consistent
    _check_grid(record, found, training, task)
    cells = validation_cells(task)
    said = [(cell.name, cell.shape, cell.n) for cell in found.validation.cells]
    if said != [(cell.name, cell.shape.plain(), evaluation.samples) for cell in cells]:
        raise UserError("selection: its validation cells are not the sizes of the training's stages")
    if found.validation.seed in (record.seed, evaluation.seed):
        raise UserError(f"selection: validation.seed={found.validation.seed} is the run's or the evaluation's own")
    validation = _known(task, cells, "validation", found.validation.seed, evaluation.samples)
    hashes = [(cell.name, content) for cell, content in zip(cells, validation.hashes, strict=True)]
    if data_hash(hashes) != found.validation.data_hash:
        raise UserError("selection: validation.data_hash is not that of the task's samples")
    if folder is not None:
        asked = evaluation_cells(task, evaluation, record.train_length)
        test = _known(task, asked, "test", evaluation.seed, evaluation.samples)
        for run in found.runs:
            _check_answers(record, run, (validation, test), task, folder)


class _Known(NamedTuple):
    """A set of samples: its folder's name needs split and seed; questions and content hash by cell."""

    cells: Sequence[Cell]
    split: Split
    seed: int
    samples: int
    questions: list[list[Question]]
    hashes: list[str]


def _known(task: Task[Any, Any, Any], cells: Sequence[Cell], split: Split, seed: int, samples: int) -> _Known:
    found = _Known(cells, split, seed, samples, [], [])
    for cell in cells:
        digest, known = hashlib.sha256(), []
        size = max(1, _BLOCK_TOKENS // cell.shape.length)
        for first in range(0, samples, size):
            indices = np.arange(first, min(first + size, samples))
            batch = task.batch(cell.shape, split, seed, indices)
            update_digest(digest, batch)
            known += questions(task, cell, seed, batch, indices, split)
        found.questions.append(known)
        found.hashes.append(digest.hexdigest())
    return found


def _check_grid(record: Record, found: SelectionInfo, training: TrainingInfo, task: Task[Any, Any, Any]) -> None:
    plan = make_plan(task.stages(), parse(TrainingConfig, training.config, "training"), training.seed)
    for name, said, expected in (
        ("total_steps", found.total_steps, plan.total_steps),
        ("steps_by_epoch", found.steps_by_epoch, plan.steps_by_epoch),
    ):
        if said != expected:
            raise UserError(f"selection: {name} is {said}, but by the training's plan it is {expected}")
    for run in found.runs:
        config = parse(TrainingConfig, {**training.config, "learning_rate": run.learning_rate}, "training")
        own = training_hash(record.model.config, task, config.plain(), training.seed, record.harness_version)
        if run.training_hash != own:
            raise UserError(
                f"selection: learning rate {run.learning_rate:g} has training_hash {run.training_hash[:12]}, but the "
                f"record's model, task and training have {own[:12]}"
            )


def _check_answers(
    record: Record, run: SelectionRun, sets: Sequence[_Known], task: Task[Any, Any, Any], folder: EvaluationFolder
) -> None:
    """Count every point's answers of a learning rate."""
    runs = folder.path.absolute().parents[2]
    place = RunFolder(runs / f"{record.task.name}-{record.model.cell}-{run.training_hash[:12]}")
    where = record.environment
    for point in run.points:
        for known, said in zip(sets, (point.validation, point.test), strict=True):
            how = (known.seed, known.samples, where.batch_tokens, where.dtype)
            answers = point_folder(place, point.step, set_name(task, known.cells, known.split, *how))
            for cell, asked, value in zip(known.cells, known.questions, said, strict=True):
                counted = _value(answers, task, cell, asked)
                if not isclose(counted, value, rel_tol=1e-9, abs_tol=1e-12):
                    raise UserError(
                        f"selection: learning rate {run.learning_rate:g}, step {point.step}: {cell.name} is {value!r}, "
                        f"but by its samples it is {counted!r}"
                    )


def _value(folder: EvaluationFolder, task: Task[Any, Any, Any], cell: Cell, known: Sequence[Question]) -> float:
    log = folder.samples(cell.name)
    if not log.path.is_file():
        raise UserError(f"selection: {log.path} is missing; the runs of all learning rates belong beside the record's")
    lines = log.read()
    if len(lines) != len(known):
        raise UserError(f"selection: {log.path} has {len(lines)} samples, not {len(known)}")
    for number, (line, question) in enumerate(zip(lines, known, strict=True)):
        if line.index != number or not is_own(task, question, line):
            raise UserError(f"selection: {log.path}: sample {number} is not the task's own")
    return cell_result(task, cell, lines, task.config.train_length).value
