"""A run from its configuration to its record: train, evaluate, draw, write down. What `bench` and Python both call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decaybench.core.config import parse
from decaybench.core.errors import RunError, UserError
from decaybench.harness.config import HARNESS_VERSION, RunConfig, evaluation_cells, make_config, read_run_config
from decaybench.harness.distributed import World, expected_processes, joined
from decaybench.harness.environment import environment, peak_memory, resolve_device
from decaybench.harness.evaluation import Evaluated, evaluate
from decaybench.harness.model_info import model_info
from decaybench.harness.plots import draw_evaluation
from decaybench.harness.progress import Progress
from decaybench.harness.protocols import decided
from decaybench.harness.spectrum_layers import draw_timescales
from decaybench.harness.spectrum_rest import Spectrum, model_spectrum
from decaybench.harness.training import train
from decaybench.models.checkpoints import Checkpoint, find_checkpoint
from decaybench.models.language_model import LanguageModel, resolve_backend
from decaybench.results.record import (
    CheckpointInfo,
    Cost,
    Record,
    SelectionInfo,
    TaskInfo,
    TrainingInfo,
    read_record,
)
from decaybench.results.run_folder import EvaluationFolder, RunFolder
from decaybench.tasks.base import Cell
from decaybench.tasks.registry import make_task

_MILLION = 1_000_000
_MANY_TOKENS = 10 * _MILLION  # of an evaluation: many minutes for a small language model on a CPU


@dataclass(frozen=True)
class Outcome:
    """A finished run: its record, and the folder of the evaluation that the record is of."""

    record: Record
    run: RunFolder
    evaluation: EvaluationFolder


def run(config: RunConfig | Mapping[str, Any], *, force: bool = False, quiet: bool = True) -> Record:
    """Carry out a run and return its record; what its folder holds already is not done again.

    config: a RunConfig, or plain data for one; with a checkpoint, the model, the seed and the training length are the
    checkpoint's, whatever else is said there. force: start anew. quiet: no progress on stderr.
    Raises UserError on wrong input, RunError where the work can't be finished.
    """
    return carry_out(
        make_config(config.plain() if isinstance(config, RunConfig) else config),
        force=force,
        progress=Progress(quiet=quiet),
    ).record


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turns running out of memory into a RunError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # PyTorch has a class of its own for a GPU's memory only.
        out = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not out:
            raise
        raise RunError(
            "out of memory; try a smaller batch_tokens or micro_batch_tokens, shorter lengths or a smaller model"
        ) from error


@enough_memory()
def carry_out(config: RunConfig, *, force: bool = False, progress: Progress) -> Outcome:
    """`run`, and where its results lie; in each of the processes that share it."""
    device = resolve_device(config.device)
    with joined(device) as world:
        return _carry_out(config, force, world.progress(progress), world)


def _carry_out(config: RunConfig, force: bool, progress: Progress, world: World) -> Outcome:
    device = world.device
    config, checkpoint = _resolved(config)
    train_length = checkpoint.train_length if checkpoint else config.task.train_length
    task = make_task(config.task)
    cells = evaluation_cells(task, config.evaluation, train_length)
    task.ready(cells, config.evaluation.samples)
    backend, why = resolve_backend(config.backend, config.model.name)
    if checkpoint is None and config.training.state_passing is not None and world.size > 1:
        raise UserError(
            f"training.state_passing={config.training.state_passing:g} is for one process, and here are {world.size}: "
            "each would pass the states of its own sequences alone"
        )
    folder, evaluation = _places(config, checkpoint)
    if world.first:
        folder = RunFolder.open(folder.path, force=force)
    with folder.lock() if world.first else nullcontext():
        if world.tell(evaluation.is_complete()):
            progress.say(f"already done: {evaluation.record_path}")
            return Outcome(kept_record(evaluation), folder, evaluation)
        if world.first:
            keep_config(config, folder)
            evaluation.write_paths({key: value for key in config.task.paths if (value := getattr(config.task, key))})
        progress.say(f"{config.task.name} {config.model.cell} on {device}; backend {backend} ({why}); {folder.path}")
        for remark in [*task.remarks(cells), *_much(config, cells)]:
            progress.say(remark)
        if checkpoint:
            model, training, seconds = checkpoint.model(device=device, backend=backend), None, None
        else:
            model, training, seconds = train(
                config, folder, device=device, backend=backend, progress=progress, world=world
            )
        model.eval()
        found = evaluate(
            model, config, evaluation, train_length=train_length, device=device, progress=progress, world=world
        )
        record = None
        if world.first:
            record = write_outcome(
                config, model, found, evaluation, world, training=training, checkpoint=checkpoint, train_seconds=seconds
            )
        record = world.tell(record)
        assert record is not None
    return Outcome(record, folder, evaluation)


def carry_out_all(configs: Sequence[RunConfig], *, force: bool = False, progress: Progress) -> list[Outcome]:
    """One run after the other. Empty in a process that isn't the first of those that share them: nobody reads it."""
    if expected_processes() == 1 or not configs:
        return [carry_out(config, force=force, progress=progress) for config in configs]
    with joined(resolve_device(configs[0].device)) as world:
        outcomes = [carry_out(config, force=force, progress=progress) for config in configs]
    return outcomes if world.first else []


def destination(config: RunConfig) -> tuple[RunFolder, EvaluationFolder]:
    """Where the results of a run lie, or will lie. Raises UserError where its checkpoint is gone or doesn't fit."""
    return _places(*_resolved(config))


def _resolved(config: RunConfig) -> tuple[RunConfig, Checkpoint | None]:
    """The configuration with all that a checkpoint brings, and the checkpoint where there is one."""
    if config.checkpoint is None:
        return config, None
    checkpoint = find_checkpoint(Path(config.checkpoint))
    return _with_model_of(checkpoint, config), checkpoint


def _places(config: RunConfig, checkpoint: Checkpoint | None) -> tuple[RunFolder, EvaluationFolder]:
    folder = RunFolder(config.folder(checkpoint.sha256 if checkpoint else config.training_hash))
    return folder, folder.evaluation(config.evaluation_hash[:12])


def _with_model_of(checkpoint: Checkpoint, config: RunConfig) -> RunConfig:
    asked = make_task(config.task)
    reader, learned = asked.tokenizer_sha256, checkpoint.facts.get("tokenizer_sha256")
    if reader is None and learned is not None:
        raise UserError(
            f"checkpoint {checkpoint.folder} was trained on text, and task {asked.name} asks in tokens of its own: ask "
            "by `bench niah --text` or `bench lambada`"
        )
    if reader is not None and learned is not None and reader != learned:
        raise UserError(
            f"checkpoint {checkpoint.folder} was trained with another tokenizer (sha256 {str(learned)[:12]}…) than "
            f"task {asked.name} reads by ({reader[:12]}…): name its own by --tokenizer"
        )
    wanted, has = asked.vocab_size, checkpoint.config.vocab_size
    if has < wanted:
        raise UserError(
            f"checkpoint {checkpoint.folder} has a vocabulary of {has} tokens; task {config.task.name} needs {wanted}"
        )
    task = config.task
    if checkpoint.train_length is not None:
        task = parse(type(task), {**task.plain(), "train_length": checkpoint.train_length}, "task")
    return config.model_copy(update={"model": checkpoint.config, "seed": checkpoint.facts["seed"], "task": task})


def _much(config: RunConfig, cells: Sequence[Cell]) -> list[str]:
    """What an evaluation of many tokens will take, before hours have gone into it."""
    samples = config.evaluation.samples
    tokens = samples * sum(cell.shape.length for cell in cells)
    if tokens < _MANY_TOKENS:
        return []
    return [
        f"the evaluation reads {tokens / _MILLION:,.0f} million tokens at most, {samples:,} samples in each of "
        f"{len(cells)} cells; --samples and --eval-lengths ask for fewer"
    ]


def keep_config(config: RunConfig, folder: RunFolder) -> None:
    """Write the run's configuration, or check that the folder's is the same run's."""
    if not folder.config_path.exists():
        folder.write_config(config.plain())
        return
    kept = read_run_config(folder)
    if config.checkpoint is None:
        same = kept.training_hash == config.training_hash
    else:
        same = (kept.task.name, kept.model) == (config.task.name, config.model)
    if not same:
        raise UserError(f"{folder.config_path} is another run's or was changed; --force starts this run anew")


def kept_record(evaluation: EvaluationFolder) -> Record:
    """The record of a finished evaluation. Raises UserError where it is damaged."""
    try:
        return read_record(evaluation.record_path)
    except UserError as error:
        raise UserError(f"{error}; delete it, and the same command makes it again from its samples") from None


def write_outcome(
    config: RunConfig,
    model: LanguageModel,
    found: Evaluated,
    folder: EvaluationFolder,
    world: World,
    *,
    training: TrainingInfo | None = None,
    checkpoint: Checkpoint | None = None,
    train_seconds: float | None = None,
    selection: SelectionInfo | None = None,
    selection_seconds: float | None = None,
) -> Record:
    """Draw what an evaluation found, and write its record; training or checkpoint says where `model` is from."""
    train_length = checkpoint.train_length if checkpoint else config.task.train_length
    spectrum = model_spectrum(model, config.seed, train_length)
    chosen = (selection, selection_seconds)
    record = _record(config, model, training, checkpoint, found, spectrum, world, train_seconds, *chosen)
    _draw(record, spectrum, folder.figures)
    folder.write_record(record)
    return record


def _record(
    config: RunConfig,
    model: LanguageModel,
    training: TrainingInfo | None,
    checkpoint: Checkpoint | None,
    found: Evaluated,
    spectrum: Spectrum,
    world: World,
    train_seconds: float | None,
    selection: SelectionInfo | None,
    selection_seconds: float | None,
) -> Record:
    task = make_task(config.task)
    content = {
        "harness_version": HARNESS_VERSION,
        "task": TaskInfo(
            name=task.name,
            version=task.version,
            config=config.task.for_record(),
            evaluation=config.evaluation.plain(),
            metric=task.metric,
            data_hash=found.data_hash,
        ),
        "model": model_info(model, config.task.train_length, config.training.decayed if training else None),
        "training": training,
        "checkpoint": checkpoint_info(config.checkpoint, checkpoint) if checkpoint else None,
        "seed": config.seed,
        "cells": found.cells,
        "selection": selection,
        "spectrum": spectrum.info(),
        "environment": environment(world.device, config.training.dtype, config.batch_tokens).model_copy(
            update={"processes": world.size if world.size > 1 else None}
        ),
        "cost": Cost(
            train_seconds=train_seconds,
            selection_seconds=selection_seconds,
            evaluation_seconds=found.seconds,
            train_tokens_per_second=training.tokens / train_seconds if training and train_seconds else None,
            evaluation_tokens_per_second=found.tokens / found.seconds if found.tokens and found.seconds else None,
            peak_memory_bytes=peak_memory(world.device),
        ),
    }
    return decided({key: value for key, value in content.items() if value is not None})


def checkpoint_info(named: str | None, checkpoint: Checkpoint) -> CheckpointInfo:
    """What a record says of a checkpoint; named: as the user names it."""
    return CheckpointInfo(
        # The last part alone: the one before may be somebody's name.
        source=Path(named or checkpoint.folder).resolve().name,
        sha256=checkpoint.sha256,
        train_length=checkpoint.train_length,
        longest_trained=checkpoint.longest_trained,
        label_noise=checkpoint.label_noise,
        state_passing=checkpoint.state_passing,
    )


def _draw(record: Record, spectrum: Spectrum, folder: Path) -> None:
    draw_evaluation(record, folder)
    if spectrum.layers:
        draw_timescales(spectrum, folder)
