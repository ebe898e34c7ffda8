"""Is a record what it says? Its hash, its counts, its task's data made again, and its samples scored again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.core.files import read_json
from decaybench.harness.config import parse_length
from decaybench.harness.evaluation import cell_result, questions, update_digest
from decaybench.results.leaderboard import add_record, check_leaderboard, read_leaderboard
from decaybench.results.record import CellResult, Record, check_counts, data_hash, read_record
from decaybench.results.run_folder import EvaluationFolder, SampleLine
from decaybench.tasks.base import Cell
from decaybench.tasks.registry import get_task

_BLOCK_TOKENS = 2**20


def verify(record: Record, folder: EvaluationFolder | None = None) -> None:
    """Recompute a record. Raises UserError on the first thing that doesn't recompute.

    Without `folder`: every cell's statistics from its counts, and the hash of the data from the task itself. With it,
    also every sample's line against the task's own answer, and every count from the lines.
    """
    check_counts(record)
    entry = get_task(record.task.name)
    if record.task.version != entry.task.version:
        raise UserError(
            f"task {record.task.name} has version {record.task.version} in the record and {entry.task.version} here"
        )
    config = parse(entry.config, record.task.config, "task")
    evaluation = parse(entry.evaluation, record.task.evaluation, "evaluation")
    task = entry.task(config)
    cells = task.cells(evaluation, [parse_length(text, config.train_length) for text in evaluation.lengths])
    _same_cells(record, cells)
    hashes = []
    for cell, result in zip(cells, record.cells, strict=True):
        digest = hashlib.sha256()
        lines = [] if folder is None else _samples(folder, result)
        size = max(1, _BLOCK_TOKENS // cell.shape.length)
        for first in range(0, result.n, size):
            indices = np.arange(first, min(first + size, result.n))
            batch = task.batch(cell.shape, "test", evaluation.seed, indices)
            update_digest(digest, batch)
            if folder is not None:
                asked = questions(task, cell, evaluation.seed, batch, indices)
                for line, question in zip(lines[first : first + size], asked, strict=True):
                    if (line.id, line.target, line.distance) != (question.id, question.target, question.distance):
                        raise UserError(f"cell {cell.name!r}: sample {line.index} is not the task's own")
        if folder is not None and cell_result(task, cell, lines, config.train_length) != result:
            raise UserError(f"cell {cell.name!r}: the record's counts are not those of its samples")
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


def _samples(folder: EvaluationFolder, result: CellResult) -> list[SampleLine]:
    log = folder.samples(result.name)
    if not log.path.is_file():
        raise UserError(f"cell {result.name!r}: its samples are missing ({log.path.name})")
    lines = log.read()
    if len(lines) != result.n:
        raise UserError(f"cell {result.name!r}: {len(lines)} samples in its file, {result.n} in the record")
    return lines
