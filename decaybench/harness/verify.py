"""Is a record what it says? Its hashes, its counts, its task's data made again, and its samples scored again.

What a record claims besides its answers is a function of its configurations, so it is computed again from them. The
answers themselves are checked against the run's samples where they are at hand.

Not checked, because nothing here can: that the answers are those of the weights that the record names (the weights'
sha256, a checkpoint's own claims of its training length), the training's loss, accuracy and the steps at which stages
were mastered, the spectrum, the environment, the cost, and what the git revision held. Of an architecture that isn't
installed neither the add-ons nor the parameters nor the state; and the state of one that can't run without values (on
PyTorch's meta device) only up to 5 million parameters.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isclose
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.core.files import read_json
from decaybench.harness import lm_eval_run
from decaybench.harness.config import HARNESS_VERSION, TrainingConfig, evaluation_cells, training_hash
from decaybench.harness.evaluation import (
    Question,
    cell_result,
    is_own,
    questions,
    right_line,
    update_digest,
)
from decaybench.harness.model_info import parameter_counts, state_elements
from decaybench.harness.plans import make_plan, samples_a_batch
from decaybench.harness.protocols import PROTOCOLS, departures
from decaybench.harness.verify_selection import verify_selection
from decaybench.models.config import ModelConfig
from decaybench.models.language_model import LanguageModel, build_model
from decaybench.models.registry import architectures
from decaybench.results.leaderboard import add_record, check_leaderboard, read_leaderboard
from decaybench.results.record import CellResult, Record, TrainingInfo, check_counts, data_hash, read_record
from decaybench.results.run_folder import EvaluationFolder, SampleLine, find_evaluations
from decaybench.tasks.base import Cell, MissingDataError, Task
from decaybench.tasks.registry import TaskEntry, get_task, make_task

_BLOCK_TOKENS = 2**20
_LIKELIHOODS = ("perplexity", "bits_per_byte", "bits_per_byte_error")  # what log-likelihoods and bytes give
_SMALL = 5_000_000  # parameters of a model that may be built only to count its state


class NotRecomputableError(UserError):
    """What a record claims can't be recomputed here: another version of its task or of the harness, or other files."""

    def __init__(self, why: str) -> None:
        super().__init__(f"not recomputable here ({why})")


class Validated(NamedTuple):
    """How many records recompute, and for each other one why it can't be recomputed here."""

    valid: int
    not_recomputable: tuple[str, ...]

    def __str__(self) -> str:
        if not self.not_recomputable:
            return f"{self.valid} entries, all valid"
        others = [f"{count} {why}" for why, count in Counter(self.not_recomputable).items()]
        return "; ".join([f"{self.valid} entries valid", *others])


def verify(record: Record, folder: EvaluationFolder | None = None) -> None:
    """Recompute a record. Raises UserError on the first thing that doesn't recompute.

    Without `folder`: every cell's statistics from its counts; all else of the cells and the hash of the data from the
    task itself; the model's sizes from its configuration; the training's hash, stages, steps and tokens from the
    configurations. With it, also every sample's line against the task's own answer, and every count from the lines.
    Raises NotRecomputableError where this version can't recompute more than the counts, and after all else where the
    files that the samples are made of aren't here.
    """
    check_counts(record)
    entry = None if record.task.name == lm_eval_run.NAME else get_task(record.task.name)
    version = lm_eval_run.VERSION if entry is None else entry.task.version
    metric = lm_eval_run.METRIC if entry is None else entry.task.metric
    for what, theirs, ours in (
        (f"task {record.task.name}", record.task.version, version),
        ("harness", record.harness_version, HARNESS_VERSION),
    ):
        if theirs != ours:
            raise NotRecomputableError(f"{what} version {theirs}; here {ours}")
    if record.task.metric != metric:
        raise UserError(f"task {record.task.name} is scored by {metric}, not by {record.task.metric}")
    _check_claim(record)
    try:
        if entry is None:
            _check_model(record, lm_eval_run.state_length(record))
            lm_eval_run.verify_tasks(record, folder)
        else:
            _recompute(record, entry, folder)
    except MissingDataError as error:
        raise NotRecomputableError(f"needs {error.needs}") from None


def _check_claim(record: Record) -> None:
    """That a record claims no protocol of which an item doesn't hold; it may claim less."""
    claim = record.comparable_to
    if claim is None:
        return
    if claim not in PROTOCOLS:
        raise UserError(f"comparable_to is {claim!r}, and there is no such protocol: {', '.join(PROTOCOLS)}")
    if found := departures(record, claim):
        raise UserError(f"comparable_to is {claim!r}, but {found[0]}")


def _recompute(record: Record, entry: TaskEntry, folder: EvaluationFolder | None) -> None:
    """All of `verify` that a task is needed for. Raises MissingDataError as late as the task does."""
    evaluation = parse(entry.evaluation, record.task.evaluation, "evaluation")
    task = _with_files(entry.task(parse(entry.config, record.task.config, "task")), folder)
    _check_origin(record, task)
    _check_model(record, task.config.train_length)
    cells = evaluation_cells(task, evaluation, record.train_length)
    _same_cells(record, cells)
    task.ready(cells, evaluation.samples)
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
        _check_cell(task, cell, result, known, lines, record.train_length)
        hashes.append((cell.name, digest.hexdigest()))
    if data_hash(hashes) != record.task.data_hash:
        raise UserError(f"task {record.task.name}: data_hash is not that of the task's samples")
    verify_selection(record, task, evaluation, folder)


def add_to_leaderboard(file: Path, runs: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Verify every evaluation of the runs against its samples, then add its record; yields (record, whether new)."""
    found = [folder for run in runs for folder in find_evaluations(run)]
    for folder in found:
        record = read_record(folder.record_path)
        try:
            verify(record, folder)
        except UserError as error:
            raise UserError(f"{folder.record_path}: {error}") from None
        yield folder.record_path, add_record(file, record)


def validate_file(file: Path) -> Validated:
    """Verify every record of a leaderboard, or the one record in the file. Raises UserError on the first fault.

    Of a record of another version of its task or of the harness, schema, id and counts alone are checked; of one whose
    task's files aren't here, all but the samples.
    """
    content = read_json(file)
    if isinstance(content, dict) and "record_id" in content:
        found = {str(file): read_record(file)}
    else:
        check_leaderboard(file)
        records = enumerate(read_leaderboard(file))
        found = {f"{file}: entry {number} ({record.record_id[:12]})": record for number, record in records}
    others = []
    for where, record in found.items():
        try:
            verify(record)
        except NotRecomputableError as error:
            others.append(str(error))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    return Validated(len(found) - len(others), tuple(others))


def _same_cells(record: Record, cells: Sequence[Cell]) -> None:
    names, expected = [cell.name for cell in record.cells], [cell.name for cell in cells]
    if names != expected:
        odd = sorted(set(names) ^ set(expected)) or names
        raise UserError(f"its cells are not those of its evaluation: {odd[0]!r}, for example")
    samples = record.task.evaluation.get("samples")
    for cell in record.cells:
        if cell.n != samples:
            raise UserError(f"cell {cell.name!r}: n is {cell.n}, but evaluation.samples is {samples}")


def _with_files(task: Task[Any, Any, Any], folder: EvaluationFolder | None) -> Task[Any, Any, Any]:
    """The task with its files where the run found them; without a run, where the record's names lie from here."""
    found = folder.read_paths() if folder else {}
    here = {key: path for key, path in found.items() if key in task.config.paths}
    return make_task(task.config.model_copy(update=here)) if here else task


def _same(claims: Mapping[str, tuple[Any, Any]]) -> None:
    """claims: by name what a record says, and what follows from the rest of it."""
    for name, (said, expected) in claims.items():
        if said != expected:
            raise UserError(f"{name} is {said!r}, but by the rest of the record it is {expected!r}")


def _check_origin(record: Record, task: Task[Any, Any, Any]) -> None:
    """What is said of the training, or of the checkpoint, as far as it follows from the configurations."""
    T = task.config.train_length
    if record.checkpoint is not None and record.checkpoint.train_length is not None:
        _same({"checkpoint.train_length": (record.checkpoint.train_length, T)})
    longest = record.longest_trained
    if longest is not None and record.train_length is not None and longest > record.train_length:
        raise UserError(f"longest_trained is {longest}, longer than train_length={record.train_length}")
    if record.training is None:
        if record.selection is not None:
            raise UserError("selection: the record has no training")
        return
    _check_training(record, record.training, task)


def _check_training(record: Record, training: TrainingInfo, task: Task[Any, Any, Any]) -> None:
    _same(
        {
            "seed": (record.seed, training.seed),
            "training.train_length": (training.train_length, task.config.train_length),
            "training.learning_rate": (training.learning_rate, training.config.get("learning_rate")),
        }
    )
    found = training_hash(record.model.config, task, training.config, training.seed, record.harness_version)
    if training.training_hash != found:
        raise UserError(
            f"training_hash is {training.training_hash[:12]}, but the record's model, task, training and seed have "
            f"{found[:12]}"
        )
    config = parse(TrainingConfig, training.config, "training")
    stages = task.stages()
    _same({"training.stages": ([stage.shape for stage in training.stages], [stage.shape.plain() for stage in stages])})
    counted = [(stage.shape.length, stage, said.batches) for stage, said in zip(stages, training.stages, strict=True)]
    _same(
        {
            "training.steps": (training.steps, _steps(record, make_plan(stages, config, training.seed).total_steps)),
            "the sum of training.stages.*.batches": (sum(batches for *_, batches in counted), training.steps),
            "training.longest_trained": (
                training.longest_trained,
                max((length for length, _, batches in counted if batches), default=0),
            ),
        }
    )
    most = sum(length * batches * samples_a_batch(stage, config) for length, stage, batches in counted)
    # With plan epochs the last batch of a set may be a smaller one.
    exact = config.plan == "mastery" and not task.pads
    if training.tokens > most or (exact and training.tokens < most):
        raise UserError(f"training.tokens is {training.tokens}, but its stages' batches have {most}")


def _steps(record: Record, total: int) -> int:
    """The steps that a training has: all of its plan's, or until the point that a selection chose (`_recompute`)."""
    return total if record.selection is None else record.selection.chosen.step


def _check_model(record: Record, length: int) -> None:
    """length: tokens after which the state is counted."""
    said = record.model
    _same(
        {
            "model.cell": (said.cell, "+".join([said.architecture, *said.addons])),
            "model.architecture": (said.architecture, said.config.get("name")),
        }
    )
    architecture = architectures().get(said.architecture)
    if architecture is None:  # another package's, not installed here
        return
    config = parse(ModelConfig, said.config, "model")
    _same({"model.addons": (said.addons, config.addons)})
    if said.backend not in architecture.backends:
        raise UserError(
            f"model.backend is {said.backend!r}; {said.architecture} has {', '.join(architecture.backends)}"
        )
    backend = "torch" if "torch" in architecture.backends else said.backend
    model = build_model(config, device="meta", backend=backend)
    decayed = record.training.config.get("decayed") if record.training else None
    _same({"model.parameters": (said.parameters.plain(), parameter_counts(model, decayed).plain())})
    state = _state_elements(model, length)
    if state is not None:
        _same({"model.state_elements": (said.state_elements, state)})


def _state_elements(model: LanguageModel, length: int) -> tuple[int, ...] | None:
    """`state_elements` of a model on the meta device; None where that can't be known."""
    try:
        return state_elements(model, length)
    except (NotImplementedError, RuntimeError, TypeError):  # it needs values
        if sum(value.numel() for value in model.parameters()) > _SMALL:
            return None
        return state_elements(build_model(model.config, backend=model.backend), length)


def _check_cell(
    task: Task[Any, Any, Any],
    cell: Cell,
    result: CellResult,
    known: Sequence[Question],
    lines: Sequence[SampleLine] | None,
    train_length: int | None,
) -> None:
    """A cell against what its samples are (known), and against the answers in the run's samples (lines) if given."""
    if (result.log_likelihood is not None) != task.likelihood:
        raise UserError(f"cell {cell.name!r}: log_likelihood is for tasks that ask for it, and for all of them")
    if lines is None:
        right = [right_line(task, number, question) for number, question in enumerate(known)]
        found = cell_result(task, cell, right, train_length, known)
        _check_references(result, found)
        expected = _facts(found, answers=False)
        if _facts(result, answers=False) != expected:
            raise UserError(f"cell {cell.name!r}: {_difference(_facts(result, answers=False), expected)}")
        return
    for number, (line, question) in enumerate(zip(lines, known, strict=True)):
        if line.index != number or not is_own(task, question, line):
            raise UserError(f"cell {cell.name!r}: sample {number} is not the task's own")
    found = cell_result(task, cell, lines, train_length, known)
    _check_references(result, found)
    expected = _facts(found)
    if _facts(result) != expected:
        raise UserError(f"cell {cell.name!r}: {_difference(_facts(result), expected)}, by its samples")


def _check_references(result: CellResult, found: CellResult) -> None:
    """With a tolerance, as for the other means: another machine may add in another order."""
    said, expected = result.references or {}, found.references or {}
    for name in {**expected, **said}:
        if name not in said or name not in expected or not isclose(said[name], expected[name], rel_tol=1e-9):
            raise UserError(
                f"cell {result.name!r}: references.{name} is {said.get(name)!r}, but its samples give "
                f"{expected.get(name)!r}"
            )


def _facts(result: CellResult, *, answers: bool = True) -> dict[str, Any]:
    """A cell without its means, which are compared with a tolerance elsewhere; answers: with what was right."""
    facts = result.plain()
    for key in ("value", "standard_error", "interval", "references", *_LIKELIHOODS):
        facts.pop(key, None)
    if not answers:
        for key in ("correct", "log_likelihood"):
            facts.pop(key, None)
        facts["by_distance"] = [{**part, "correct": None} for part in facts["by_distance"]]
        if "unwritten" in facts:
            facts["unwritten"] = {**facts["unwritten"], "correct": None}
        if "by_position" in facts:
            facts["by_position"] = [{**part, "correct": None, "nats": None} for part in facts["by_position"]]
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
