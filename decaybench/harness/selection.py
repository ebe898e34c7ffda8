"""`--select`: learning rate and epoch chosen on a validation set, with the test-selected number beside it.

Every learning rate of a grid is a run of its own, with a checkpoint at the end of each epoch (of a plan without epochs,
at each quarter of its steps). Each checkpoint answers a validation set, which has the training's sizes and a stream of
samples of its own, and the test. `results.selection` has the rule; the chosen checkpoint's record says all of it.

    runs/mqar-mamba2-<hash>/                    the run of a learning rate
      checkpoint/step-<n>/                      its candidates
      points/step-<n>/validation-<hash>/        samples/<cell>.jsonl, and result.json, written last
      points/step-<n>/test-<hash>/              the same
      evaluations/<hash>/                       of the chosen run alone: the record, as of any other evaluation
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from decaybench.core.config import Config, parse
from decaybench.core.errors import RunError, UserError
from decaybench.core.files import atomic_write_bytes, atomic_write_json, read_json
from decaybench.core.hashing import digest, without_absent
from decaybench.harness.config import HARNESS_VERSION, RunConfig, evaluation_cells, make_config
from decaybench.harness.distributed import ALONE, expected_processes
from decaybench.harness.environment import resolve_device
from decaybench.harness.evaluation import Evaluated, ask, evaluate
from decaybench.harness.plans import make_plan
from decaybench.harness.progress import Progress
from decaybench.harness.run import Outcome, enough_memory, keep_config, kept_record, write_outcome
from decaybench.harness.training import DivergedError, train, training_info
from decaybench.models.checkpoints import Checkpoint, checkpoints_in, read_checkpoint
from decaybench.models.language_model import LanguageModel, resolve_backend
from decaybench.results.record import (
    SelectionInfo,
    SelectionPoint,
    SelectionRun,
    Sha256,
    Share,
    ValidationCell,
    ValidationInfo,
)
from decaybench.results.run_folder import EvaluationFolder, RunFolder
from decaybench.results.selection import best, best_on_test, candidates, make_point
from decaybench.tasks.base import Cell, Split, Task
from decaybench.tasks.registry import make_task

_POINTS, _RESULT = "points", "result.json"
_QUARTERS = 4  # candidates of a plan without epochs
_SEED = 2**31  # of validation samples: far from those that people give


def learning_rate_grid(config: RunConfig, learning_rates: Sequence[float]) -> list[RunConfig]:
    """The run of each learning rate, smallest first. Raises UserError on a rate that is twice there or impossible."""
    if len(set(learning_rates)) < len(learning_rates):
        raise UserError("--learning-rates: a rate stands there twice")
    data = config.plain() | {"keep": config.keep or default_every(config)}
    return [make_config(data, {"training": {"learning_rate": rate}}) for rate in sorted(learning_rates)]


def default_every(config: RunConfig) -> int:
    """Steps between candidates where nobody says: an epoch, or a quarter of all."""
    plan = make_plan(make_task(config.task).stages(), config.training, config.seed)
    return plan.steps_by_epoch or math.ceil(plan.total_steps / _QUARTERS)


def validation_cells(task: Task[Any, Any, Any]) -> list[Cell]:
    """Each size of the training's stages once. Raises UserError of a task that isn't scored by right answers."""
    if task.running_text or task.generates:
        raise UserError(f"--select: task {task.name} has no questions of its training's sizes to choose by")
    shapes: dict[str, Cell] = {}
    for number, stage in enumerate(task.stages(), start=1):
        cell = Cell(stage.shape, "validation", {"stage": number})
        shapes.setdefault(digest(stage.shape.plain()), cell)
    return list(shapes.values())


def validation_seed(seed: int, evaluation_seed: int) -> int:
    """The seed of the validation samples: neither the run's nor the evaluation's, whose streams are others anyway."""
    return next(found for found in (_SEED, _SEED + 1, _SEED + 2) if found not in (seed, evaluation_seed))


def set_name(
    task: Task[Any, Any, Any],
    cells: Sequence[Cell],
    split: Split,
    seed: int,
    samples: int,
    batch_tokens: int,
    dtype: str,
) -> str:
    """The name of the folder of a point's answers to these samples, with a hash of all that they are a function of."""
    shapes = [cell.shape.plain() for cell in cells]
    said = [HARNESS_VERSION, task.name, task.version, task.rules(), shapes, split, seed, samples, batch_tokens, dtype]
    return f"{split}-{digest(without_absent(said))[:12]}"


def point_folder(run: RunFolder, step: int, name: str) -> EvaluationFolder:
    """Where the answers of a run's checkpoint to a set of samples lie."""
    return EvaluationFolder(run.path / _POINTS / f"step-{step:08d}" / name)


@enough_memory()
def select(config: RunConfig, learning_rates: Sequence[float], *, force: bool = False, progress: Progress) -> Outcome:
    """Train at every learning rate, choose one and a step, and write its record; what is done is not done again.

    config: the run but for its learning rate; `keep` says the steps between candidates, None: an epoch, or a quarter
    of all steps. force: delete the runs of all learning rates, and start anew. Raises UserError on wrong input,
    RunError where training diverges at every rate before its first candidate, or the work can't be finished.
    """
    if config.checkpoint is not None:
        raise UserError("--select trains: leave out --checkpoint")
    if expected_processes() > 1:
        raise UserError("--select works in one process: start it without torchrun")
    if not learning_rates:
        raise UserError("--select: no learning rates; name them by --learning-rates 1e-3,3e-3")
    work = _Selection(learning_rate_grid(config, learning_rates), progress)
    if force:
        for one in work.configs:
            RunFolder.open(work.folder(one).path, force=True)
    for one in work.configs:
        if (done := work.record_folder(one)).is_complete():
            progress.say(f"already done: {done.record_path}")
            return Outcome(kept_record(done), work.folder(one), done)
    return work.finish([work.run(one) for one in work.configs])


class _Result(Config):
    """A point's answers to one set of samples, when all are there."""

    values: tuple[Share, ...] = Field(description="value of each cell")
    data_hash: Sha256


@dataclass(frozen=True)
class _Trained:
    """A learning rate's run. seconds: that training took."""

    info: SelectionRun
    seconds: float
    validation_hash: str | None


class _Selection:
    """What is common to the runs of a grid."""

    def __init__(self, configs: Sequence[RunConfig], progress: Progress) -> None:
        self.configs, self.progress = list(configs), progress
        first = self.configs[0]
        self.device = resolve_device(first.device)
        self.backend, self._why = resolve_backend(first.backend, first.model.name)
        self.task = make_task(first.task)
        self.cells = evaluation_cells(self.task, first.evaluation, first.task.train_length)
        self.task.ready(self.cells, first.evaluation.samples)
        self.plan = make_plan(self.task.stages(), first.training, first.seed)
        self.every = first.keep or default_every(first)
        self.seed = validation_seed(first.seed, first.evaluation.seed)
        self.validation = validation_cells(self.task)

    def folder(self, config: RunConfig) -> RunFolder:
        return RunFolder(config.folder(config.training_hash))

    def record_folder(self, config: RunConfig) -> EvaluationFolder:
        """Where the record lies if this run is chosen."""
        grid = [one.training_hash for one in self.configs]
        key = digest(["selection", grid, self.every, self.sets()])
        return self.folder(config).evaluation(key[:12])

    def sets(self) -> dict[str, str]:
        """The folders of a point's answers, by split."""
        first = self.configs[0]
        how = (first.evaluation.samples, first.batch_tokens, first.training.dtype)
        return {
            "validation": set_name(self.task, self.validation, "validation", self.seed, *how),
            "test": set_name(self.task, self.cells, "test", first.evaluation.seed, *how),
        }

    def run(self, config: RunConfig) -> _Trained:
        """Train at one learning rate, and have each candidate answer."""
        folder = RunFolder.open(self.folder(config).path)
        rate = config.training.learning_rate
        with folder.lock():
            keep_config(config, folder)
            self.progress.say(
                f"{self.task.name} {config.model.cell}, learning rate {rate:g} on {self.device}; backend "
                f"{self.backend} ({self._why}); {folder.path}"
            )
            wanted = candidates(self.plan.total_steps, self.every)
            self._check_kept(folder, wanted)
            diverged = None
            try:
                train(config, folder, device=self.device, backend=self.backend, progress=self.progress)
            except DivergedError as error:
                self.progress.note(f"{error}; chosen among what came before")
                diverged = error.step
                wanted = [step for step in wanted if step < diverged]
            self._check_kept(folder, wanted)
            points, seconds, hashes = [], 0.0, None
            for step in wanted:
                checkpoint = read_checkpoint(_checkpoint(folder, step))
                point, hashes = self._point(config, folder, checkpoint)
                points.append(point)
                seconds = checkpoint.facts["seconds"]
        run = SelectionRun(
            learning_rate=rate, training_hash=config.training_hash, diverged=diverged, points=tuple(points)
        )
        return _Trained(run, seconds, hashes)

    def finish(self, trained: Sequence[_Trained]) -> Outcome:
        """Choose, and write the chosen run's record."""
        hashes = [one.validation_hash for one in trained if one.validation_hash is not None]
        if not hashes:
            raise RunError("training diverged at every learning rate before its first candidate; try smaller ones")
        runs = tuple(one.info for one in trained)
        chosen = best(runs, lambda point: point.validation_mean)
        (config,) = (one for one in self.configs if one.training.learning_rate == chosen.learning_rate)
        samples = config.evaluation.samples
        cells = tuple(ValidationCell(name=c.name, shape=c.shape.plain(), n=samples) for c in self.validation)
        info = SelectionInfo(
            every=self.every,
            steps_by_epoch=self.plan.steps_by_epoch,
            total_steps=self.plan.total_steps,
            validation=ValidationInfo(seed=self.seed, cells=cells, data_hash=hashes[0]),
            runs=runs,
            chosen=chosen,
            chosen_on_test=best_on_test(runs),
        )
        return self._write(config, chosen.step, info, sum(one.seconds for one in trained))

    def _check_kept(self, folder: RunFolder, wanted: Sequence[int]) -> None:
        """Whether training, as far as it got, left the candidates that it passed."""
        there = {path.name for path in checkpoints_in(folder.checkpoint)}
        newest = max(there, default="")
        for step in wanted:
            name = _checkpoint(folder, step).name
            if name < newest and name not in there:
                raise UserError(
                    f"{folder.path} was trained without --select, and kept no checkpoint of step {step}: --force "
                    "trains it anew, or choose another --out"
                )

    def _point(self, config: RunConfig, folder: RunFolder, checkpoint: Checkpoint) -> tuple[SelectionPoint, str]:
        """A candidate's answers, and the hash of the validation samples."""
        step = int(checkpoint.facts["step"])
        found: dict[str, _Result] = {}
        model: LanguageModel | None = None
        for name in self.sets():
            place = point_folder(folder, step, self.sets()[name])
            wanted = len(self.validation if name == "validation" else self.cells)
            if (kept := _kept(place.path, wanted, self.progress)) is None:
                model = model or checkpoint.model(device=self.device, backend=self.backend)
                self.progress.say(f"learning rate {config.training.learning_rate:g}, step {step}: {name}")
                answered = self._ask(model, config, name, place)
                values = tuple(cell.value for cell in answered.cells)
                kept = _Result(values=values, data_hash=answered.data_hash)
                atomic_write_json(place.path / _RESULT, kept.plain())
            found[name] = kept
        point = make_point(step, found["validation"].values, found["test"].values)
        return point, found["validation"].data_hash

    def _ask(self, model: LanguageModel, config: RunConfig, name: str, place: EvaluationFolder) -> Evaluated:
        cells, seed = (self.validation, self.seed) if name == "validation" else (self.cells, config.evaluation.seed)
        return ask(
            model,
            config,
            cells,
            place,
            split="validation" if name == "validation" else "test",
            seed=seed,
            train_length=config.task.train_length,
            device=self.device,
            progress=self.progress,
        )

    def _write(self, config: RunConfig, step: int, info: SelectionInfo, seconds: float) -> Outcome:
        folder, evaluation = self.folder(config), self.record_folder(config)
        checkpoint = read_checkpoint(_checkpoint(folder, step))
        with folder.lock():
            answers = point_folder(folder, step, self.sets()["test"])
            for cell in self.cells:
                atomic_write_bytes(evaluation.samples(cell.name).path, answers.samples(cell.name).path.read_bytes())
            model = checkpoint.model(device=self.device, backend=self.backend)
            length = config.task.train_length
            found = evaluate(model, config, evaluation, train_length=length, device=self.device, progress=self.progress)
            record = write_outcome(
                config,
                model,
                found,
                evaluation,
                ALONE,
                training=training_info(config, checkpoint.facts),
                train_seconds=checkpoint.facts["seconds"],
                selection=info,
                selection_seconds=seconds,
            )
        return Outcome(record, folder, evaluation)


def _checkpoint(folder: RunFolder, step: int) -> Path:
    return folder.checkpoint / f"step-{step:08d}"


def _kept(folder: Path, cells: int, progress: Progress) -> _Result | None:
    """A point's finished answers; None where they aren't, or can't be read: then the samples are looked at again."""
    path = folder / _RESULT
    if not path.exists():
        return None
    try:
        found = parse(_Result, read_json(path), str(path))
        if len(found.values) != cells:
            raise UserError(f"{path} has {len(found.values)} values for {cells} cells")
    except UserError as error:
        progress.note(f"{error}; looking at its samples again")
        return None
    return found
