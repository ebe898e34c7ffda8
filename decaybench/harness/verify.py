"""Is a record what it says? Its hashes, its counts, its task's data made again, and its samples scored again.

What a record claims besides its answers is a function of its configurations, so it is computed again from them. The
answers themselves are checked against the run's samples where they are at hand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.core.files import read_json
from decaybench.harness.config import parse_length, training_hash
from decaybench.harness.evaluation import Question, cell_result, questions, sample_line, update_digest
from decaybench.models.config import ModelConfig
from decaybench.models.registry import architectures
from decaybench.results.leaderboard import add_record, check_leaderboard, read_leaderboard
from decaybench.results.record import CellResult, Record, check_counts, data_hash, read_record
from decaybench.results.run_folder import EvaluationFolder, SampleLine
from decaybench.tasks.base import Cell, Task
from decaybench.tasks.registry import get_task, make_task

_BLOCK_TOKENS = 2**20


def verify(record: Record, folder: EvaluationFolder | None = None) -> None:
    """Recompute a record. Raises UserError on the first thing that doesn't recompute.

    Without `folder`: every cell's statistics from its counts; all else of the cells and the hash of the data from the
    task itself; the training's hash from the configurations. With it, also every sample's line against the task's own
    answer, and every count from the lines.
    """
    check_counts(record)
    entry = get_task(record.task.name)
    if record.task.version != entry.task.version:
        raise UserError(
            f"task {record.task.name} has version {record.task.version} in the record and {entry.task.version} here"
        )
    if record.task.metric != entry.task.metric:
        raise UserError(f"task {record.task.name} is scored by {entry.task.metric}, not by {record.task.metric}")
    _check_claims(record)
    config = parse(entry.config, record.task.config, "task")
    evaluation = parse(entry.evaluation, record.task.evaluation, "evaluation")
    task = entry.task(config)
    cells = task.cells(evaluation, [parse_length(text, config.train_length) for text in evaluation.lengths])
    _same_cells(record, cells)
    hashes = []
    for cell, result in zip(cells, record.cells, strict=True):
        digest = hashlib.sha256()
        lines = None if folder is None else _samples(folder, result)
        known: list[Question] = []
        size = max(1, _BLOCK_TOKENS // cell.shape.length)
        for first in range(0, result.n, size):
            indices = np.arange(first, min(first + size, result.n))
            batch = task.batch(cell.shape, "test", evaluation.seed, indices)
            update_digest(digest, batch)
            known += questions(task, cell, evaluation.seed, batch, indices)
        _check_cell(task, cell, result, known, lines, config.train_length)
        hashes.append((cell.name, digest.hexdigest()))
    if data_hash(hashes) != record.task.data_hash:
        raise UserError(f"task {record.task.name}: data_hash is not that of the task's samples")


def add_to_leaderboard(file: Path, runs: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Verify every evaluation of the runs against its samples, then add its record; yields (record, whether new)."""
    found = [folder for run in runs for folder in _evaluations(run)]
    for folder in found:
        record = read_record(folder.record_path)
        try:
            verify(record, folder)
        except UserError as error:
            raise UserError(f"{folder.record_path}: {error}") from None
        yield folder.record_path, add_record(file, record)


def validate_file(file: Path) -> int:
    """Verify every record of a leaderboard, or the one record in the file. Returns how many there are."""
    content = read_json(file)
    if isinstance(content, dict) and "record_id" in content:
        verify(read_record(file))
        return 1
    check_leaderboard(file)
    records = read_leaderboard(file)
    for number, record in enumerate(records):
        try:
            verify(record)
        except UserError as error:
            raise UserError(f"{file}: entry {number} ({record.record_id[:12]}): {error}") from None
    return len(records)


def _evaluations(run: Path) -> list[EvaluationFolder]:
    if (run / "record.json").is_file():
        return [EvaluationFolder(run)]
    if run.name == "record.json" and run.is_file():
        return [EvaluationFolder(run.parent)]
    if not run.exists():
        raise UserError(f"no run at {run}: there is no such folder")
    found = sorted(path.parent for path in run.glob("evaluations/*/record.json"))
    if not found:
        raise UserError(f"{run} holds no finished evaluation (evaluations/*/record.json)")
    return [EvaluationFolder(path) for path in found]


def _same_cells(record: Record, cells: Sequence[Cell]) -> None:
    names, expected = [cell.name for cell in record.cells], [cell.name for cell in cells]
    if names != expected:
        odd = sorted(set(names) ^ set(expected)) or names
        raise UserError(f"its cells are not those of its evaluation: {odd[0]!r}, for example")
    samples = record.task.evaluation.get("samples")
    for cell in record.cells:
        if cell.n != samples:
            raise UserError(f"cell {cell.name!r}: n is {cell.n}, but evaluation.samples is {samples}")


def _check_claims(record: Record) -> None:
    """What a record says twice, it must say alike; and its training's hash must be that of its configurations."""
    model, training = record.model, record.training
    if model.architecture in architectures():  # another package's may not be installed here
        config = parse(ModelConfig, model.config, "model")
        if (model.cell, model.architecture, model.addons) != (config.cell, config.name, config.addons):
            raise UserError(f"model.cell is {model.cell!r}, but the model's configuration is that of {config.cell!r}")
    if record.comparable_to is not None:
        raise UserError(f"comparable_to is {record.comparable_to!r}, but nothing here checks that protocol")
    if training is None:
        return
    told = {
        "seed": (record.seed, training.seed),
        "training.train_length": (training.train_length, record.task.config.get("train_length")),
        "training.learning_rate": (training.learning_rate, training.config.get("learning_rate")),
    }
    for key, (said, expected) in told.items():
        if said != expected:
            raise UserError(f"{key} is {said!r}, but elsewhere in the record it is {expected!r}")
    task = parse(get_task(record.task.name).config, record.task.config, "task")
    found = training_hash(
        model.config,
        make_task(task),
        training.config,
        training.seed,
    )
    if training.training_hash != found:
        raise UserError(
            f"training_hash is {training.training_hash[:12]}, but the record's model, task, training and seed have "
            f"{found[:12]}: changed, or trained by another version of decaybench"
        )


def _check_cell(
    task: Task[Any, Any, Any],
    cell: Cell,
    result: CellResult,
    known: Sequence[Question],
    lines: Sequence[SampleLine] | None,
    train_length: int,
) -> None:
    """A cell against what its samples are (known), and against the answers in the run's samples (lines) if given."""
    if lines is None:
        right = [sample_line(task, number, question, question.target) for number, question in enumerate(known)]
        expected = _facts(cell_result(task, cell, right, train_length), answers=False)
        if _facts(result, answers=False) != expected:
            raise UserError(f"cell {cell.name!r}: {_difference(_facts(result, answers=False), expected)}")
        return
    for number, (line, question) in enumerate(zip(lines, known, strict=True)):
        if line != sample_line(task, number, question, line.answer):
            raise UserError(f"cell {cell.name!r}: sample {number} is not the task's own")
    expected = _facts(cell_result(task, cell, lines, train_length))
    if _facts(result) != expected:
        raise UserError(f"cell {cell.name!r}: {_difference(_facts(result), expected)}, by its samples")


def _facts(result: CellResult, *, answers: bool = True) -> dict[str, Any]:
    """A cell without its statistics, which `check_counts` recomputes with a tolerance; answers: with what was right."""
    facts = result.plain()
    for key in ("value", "standard_error", "interval"):
        del facts[key]
    if not answers:
        del facts["correct"]
        facts["by_distance"] = [{**part, "correct": None} for part in facts["by_distance"]]
    return facts


def _difference(said: dict[str, Any], expected: dict[str, Any]) -> str:
    key = next(key for key in {**expected, **said} if said.get(key) != expected.get(key))
    if isinstance(expected.get(key), list):
        return f"{key} is not what it should be"
    return f"{key} is {said.get(key)!r}, not {expected.get(key)!r}"


def _samples(folder: EvaluationFolder, result: CellResult) -> list[SampleLine]:
    log = folder.samples(result.name)
    if not log.path.is_file():
        raise UserError(f"cell {result.name!r}: its samples are missing ({log.path.name})")
    lines = log.read()
    if len(lines) != result.n:
        raise UserError(f"cell {result.name!r}: {len(lines)} samples in its file, {result.n} in the record")
    return lines
