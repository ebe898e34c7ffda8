"""Training: AdamW with a schedule, over a plan of batches, resumable at any moment to the same outcome.

A checkpoint holds the weights, the optimiser's averages and the plan's state; everything else is a function of the
step. So a run that was killed, however often, ends with the weights of one that wasn't (on the same machine).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from decaybench.core.errors import RunError, UserError
from decaybench.core.hashing import key64
from decaybench.harness.config import RunConfig, TrainingConfig
from decaybench.harness.interrupt import Stop
from decaybench.harness.plans import Plan, make_plan
from decaybench.harness.progress import Progress
from decaybench.models.checkpoints import (
    Checkpoint,
    checkpoints_in,
    read_checkpoint,
    remove_checkpoint,
    write_checkpoint,
)
from decaybench.models.language_model import LanguageModel, build_model
from decaybench.models.module import Treatment, treatments
from decaybench.results.record import StageInfo, TrainingInfo
from decaybench.results.run_folder import RunFolder
from decaybench.tasks.base import IGNORED, Batch, Shape, Stage, Task
from decaybench.tasks.registry import make_task

_OPTIMISER_FILE = "optimiser.safetensors"
_LOG_EVERY = 50
_SAVING_SHARE = 20  # checkpoints are at least so many times as far apart as writing one takes
_MEMORY = 0.98  # of the loss and accuracy that are shown and recorded: about the last fifty batches


@dataclass
class _Averages:
    """Running loss (nats a label) and accuracy over all batches."""

    loss: float | None = None
    accuracy: float = 0.0

    def saw(self, loss: float, accuracy: float) -> None:
        if self.loss is None:
            self.loss, self.accuracy = loss, accuracy
        self.loss = _MEMORY * self.loss + (1 - _MEMORY) * loss
        self.accuracy = _MEMORY * self.accuracy + (1 - _MEMORY) * accuracy


@dataclass
class _Work:
    """All that changes while training."""

    model: LanguageModel
    optimiser: torch.optim.Optimizer
    plan: Plan
    averages: _Averages
    batches: list[int]  # by stage, trained on so far
    seed: int
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def train(
    config: RunConfig, folder: RunFolder, *, device: str, backend: str, progress: Progress
) -> tuple[LanguageModel, TrainingInfo, float]:
    """Train the model of `config` in `folder`, or go on where a run before stopped, or load its finished weights.

    Returns the model, what the record says of its training, and the seconds that training took in all. Says so where
    training ended before a sequence of train_length was reached.
    Raises UserError on a damaged folder, RunError when training diverges or the disk is full, and
    InterruptedRunError on Ctrl-C.
    """
    work = _start(config, device, backend)
    _resume(work, config, folder, progress)
    stages = make_task(config.task).stages()
    if work.step < work.plan.total_steps:
        _train_on(work, config, stages, folder, device, progress)
    _say_what_was_not_reached(work, config, stages, progress)
    return work.model, _info(work, config, stages), work.seconds


def parameter_groups(model: LanguageModel, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups, one for each treatment: those that take weight decay first. Frozen parameters are in none.

    factor: the multiple of the learning rate at which a group learns.
    """
    named = dict(model.named_parameters())
    groups: dict[Treatment, list[Tensor]] = {}
    for name, treatment in treatments(model).items():
        groups.setdefault(treatment, []).append(named[name])
    ordered = sorted(groups, key=lambda treatment: (not treatment.decays, treatment.factor))
    return [
        {
            "params": groups[treatment],
            "weight_decay": weight_decay if treatment.decays else 0.0,
            "factor": treatment.factor,
        }
        for treatment in ordered
    ]


def learning_rate(config: TrainingConfig, step: int, plan: Plan) -> float:
    """The learning rate of a step (0-based)."""
    total = plan.total_steps
    rise = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    if config.schedule in ("hold", "cosine"):
        start = config.hold * total if config.schedule == "hold" else 0.0
        passed = max(0.0, step - start) / max(1.0, total - start)
        return config.learning_rate * rise * 0.5 * (1 + math.cos(math.pi * passed))
    epoch = step // (plan.steps_by_epoch or total)
    if config.schedule == "linear-by-epoch":
        return config.learning_rate * rise * (config.epochs - epoch) / config.epochs
    return config.learning_rate * rise * 0.5 * (1 + math.cos(math.pi * epoch / config.epochs))


def loss_and_hits(model: LanguageModel, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy over the labels (nats), and whether each was the first choice, bool [n].

    tokens, labels: int64 [B, T]; the head is applied at labels only.
    """
    asked = labels != IGNORED
    logits = model(tokens, logits_at=asked).logits.float()
    wanted = labels[asked]
    return F.cross_entropy(logits, wanted), logits.detach().argmax(-1) == wanted


def to_tensors(batch: Batch, device: str) -> tuple[Tensor, Tensor]:
    """A batch's tokens and labels on a device."""
    return tuple(torch.from_numpy(part).to(device) for part in (batch.tokens, batch.labels))  # type: ignore[return-value]


@contextmanager
def matmul_dtype(dtype: str, device: str) -> Iterator[None]:
    """Autocast to bfloat16 if asked for; float32 otherwise."""
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        yield


def _start(config: RunConfig, device: str, backend: str) -> _Work:
    training = config.training
    model = build_model(config.model, config.seed, device=device, backend=backend)
    optimiser = torch.optim.AdamW(
        parameter_groups(model, training.weight_decay),
        lr=training.learning_rate,
        betas=training.betas,
        eps=training.eps,
        fused=True,
    )
    task = make_task(config.task)
    stages = task.stages()
    ceilings = [task.ceiling(stage.shape) for stage in stages] if training.plan == "mastery" else None
    plan = make_plan(stages, training, config.seed, ceilings)
    return _Work(model, optimiser, plan, _Averages(), [0] * len(stages), config.seed)


def _train_on(
    work: _Work, config: RunConfig, stages: Sequence[Stage], folder: RunFolder, device: str, progress: Progress
) -> None:
    task, total = make_task(config.task), work.plan.total_steps
    work.model.train()
    started, saved, saving = time.monotonic() - work.seconds, time.monotonic(), 0.0
    with Stop() as stop, progress.bar("training", total, work.step) as show:
        while work.step < total:
            number, indices = work.plan.next(work.step)
            batch = _training_batch(task, config, stages[number].shape, indices)
            loss, accuracy = _one_step(work, config.training, batch, device)
            moved = work.plan.saw(work.step, number, accuracy)
            work.averages.saw(loss, accuracy)
            work.batches[number] += 1
            work.step += 1
            work.tokens += batch.tokens.size
            work.seconds = time.monotonic() - started
            shape = stages[work.plan.stage].shape
            show(work.step, f"loss {work.averages.loss:.3f}  accuracy {work.averages.accuracy:.3f}  {_name(shape)}")
            if moved or work.step % _LOG_EVERY == 0 or work.step == total:
                folder.log(_event(work, config.training, loss, accuracy, _name(shape)))
            began = time.monotonic()
            due = began - saved > _seconds_between_checkpoints(config, saving)
            if due or stop.wanted or work.step == total:
                _save(work, config, stages, folder)
                saved = time.monotonic()
                saving = saved - began
            stop.raise_if_wanted(f"training stopped at step {work.step} of {total}")


def _training_batch(task: Task[Any, Any, Any], config: RunConfig, shape: Shape, indices: NDArray[np.int64]) -> Batch:
    batch = task.batch(shape, "train", config.seed, indices)
    if config.training.label_noise is None:
        return batch
    return task.with_label_noise(batch, config.training.label_noise, shape, "train", config.seed, indices)


def _seconds_between_checkpoints(config: RunConfig, saving: float) -> float:
    """saving: seconds that the last one took. checkpoint_seconds=0 asks for one after every step, and gets it."""
    asked = config.checkpoint_seconds
    return max(asked, _SAVING_SHARE * saving) if asked else 0.0


def _one_step(work: _Work, config: TrainingConfig, batch: Batch, device: str) -> tuple[float, float]:
    rate = learning_rate(config, work.step, work.plan)
    for group in work.optimiser.param_groups:
        group["lr"] = rate * group["factor"]
    tokens, labels = to_tensors(batch, device)
    with _dropout_of_step(work), matmul_dtype(config.dtype, device):
        loss, hits = loss_and_hits(work.model, tokens, labels)
    work.optimiser.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(work.model.parameters(), config.clip or math.inf)
    # One wait for the device, and before the step: weights that are not numbers must never reach a checkpoint.
    nats, accuracy, norm_found = torch.stack([loss.detach(), hits.float().mean(), norm]).tolist()
    for what, number in (("loss", nats), ("gradient's norm", norm_found)):
        if not math.isfinite(number):
            raise RunError(
                f"training diverged at step {work.step}: the {what} is {number}; "
                f"try a learning rate below training.learning_rate={config.learning_rate:g}"
            )
    work.optimiser.step()
    return nats, accuracy


@contextmanager
def _dropout_of_step(work: _Work) -> Iterator[None]:
    """What is dropped is a function of the step, so that a resumed run drops the same; the caller's draws go on."""
    if not work.model.config.embedding_dropout:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(key64("dropout", work.seed, work.step) >> 1)
        yield


def _save(work: _Work, config: RunConfig, stages: Sequence[Stage], folder: RunFolder) -> Checkpoint:
    names = [name for name, parameter in work.model.named_parameters() if parameter.requires_grad]
    parameters = dict(work.model.named_parameters())
    averages = {
        f"{name}/{key}": value
        for name in names
        for key, value in work.optimiser.state[parameters[name]].items()
        if isinstance(value, Tensor)
    }
    facts = {
        "step": work.step,
        "tokens": work.tokens,
        "seconds": work.seconds,
        "plan": work.plan.state(),
        "loss": work.averages.loss,
        "accuracy": work.averages.accuracy,
        "batches": work.batches,
        "train_length": config.task.train_length,
        "longest_trained": _longest_trained(work, stages),
        "training_hash": config.training_hash,
        **({} if config.training.label_noise is None else {"label_noise": config.training.label_noise}),
    }
    path = folder.checkpoint / f"step-{work.step:08d}"
    written = write_checkpoint(path, work.model, config.seed, facts, {_OPTIMISER_FILE: averages})
    others = [other for other in checkpoints_in(folder.checkpoint) if other != path]
    before = max((other for other in others if other.name < path.name), default=None)
    for other in others:  # the one before stays, in case the newest is damaged later
        if other != before:
            remove_checkpoint(other)
    return written


def _resume(work: _Work, config: RunConfig, folder: RunFolder, progress: Progress) -> None:
    found = _newest_intact(folder.checkpoint, progress)
    if found is None:
        return
    if found.facts.get("training_hash") != config.training_hash:
        raise UserError(f"checkpoint {found.folder} is another run's; --force starts this run anew")
    work.model.load_state_dict(found.tensors("model.safetensors"))
    parameters = dict(work.model.named_parameters())
    for key, value in found.tensors(_OPTIMISER_FILE).items():
        name, _, part = key.rpartition("/")
        work.optimiser.state[parameters[name]][part] = value.to(parameters[name].device)
    facts = found.facts
    try:
        work.step, work.tokens, work.seconds = facts["step"], facts["tokens"], facts["seconds"]
        work.averages, work.batches = _Averages(facts["loss"], facts["accuracy"]), list(facts["batches"])
        work.plan.restore(facts["plan"])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"checkpoint {found.folder} can't be gone on from: facts.json lacks {error}; --force starts this run anew"
        ) from None
    if work.step < work.plan.total_steps:
        progress.say(f"going on from step {work.step} of {work.plan.total_steps}")


def _newest_intact(root: Path, progress: Progress) -> Checkpoint | None:
    found = checkpoints_in(root)
    problem = None
    for folder in reversed(found):
        try:
            intact = read_checkpoint(folder)
        except UserError as error:
            problem = problem or error
            continue
        if problem:
            progress.note(f"{problem}; going on from the one before, {folder.name}")
        return intact
    if problem:
        raise UserError(f"{problem}; there is none before it: --force starts this run anew")
    return None


def _info(work: _Work, config: RunConfig, stages: Sequence[Stage]) -> TrainingInfo:
    mastered = work.plan.mastered() or [None] * len(stages)
    return TrainingInfo(
        config=config.training.plain(),
        training_hash=config.training_hash,
        seed=config.seed,
        train_length=config.task.train_length,
        longest_trained=_longest_trained(work, stages),
        steps=work.step,
        tokens=work.tokens,
        optimizer="AdamW",
        learning_rate=config.training.learning_rate,
        final_loss=work.averages.loss or 0.0,
        final_accuracy=work.averages.accuracy,
        stages=tuple(
            StageInfo(shape=stage.shape.plain(), batches=batches, step=step)
            for stage, batches, step in zip(stages, work.batches, mastered, strict=True)
        ),
    )


def _longest_trained(work: _Work, stages: Sequence[Stage]) -> int:
    """The longest sequence trained on so far, tokens."""
    return max(stage.shape.length for stage, batches in zip(stages, work.batches, strict=True) if batches)


def _say_what_was_not_reached(work: _Work, config: RunConfig, stages: Sequence[Stage], progress: Progress) -> None:
    longest, wanted = _longest_trained(work, stages), config.task.train_length
    if longest >= wanted:
        return
    missed = [_name(stage.shape) for stage, batches in zip(stages, work.batches, strict=True) if not batches]
    never = f"never reached: {'; '.join(missed)}" if missed else "no stage is longer"
    progress.note(
        f"the longest sequence trained on has {longest} tokens, not task.train_length={wanted}, which lengths like 2x "
        f"are multiples of; {never}"
    )


def _event(work: _Work, config: TrainingConfig, loss: float, accuracy: float, stage: str) -> dict[str, Any]:
    return {
        "step": work.step,
        "stage": stage,
        "loss": loss,
        "accuracy": accuracy,
        "learning_rate": learning_rate(config, work.step - 1, work.plan),
        "tokens": work.tokens,
        "seconds": round(work.seconds, 2),
    }


def _name(shape: Any) -> str:
    return " ".join(f"{key}={value}" for key, value in shape.plain().items() if value is not None)
