"""Training: AdamW with a schedule, over a plan of batches, resumable at any moment to the same outcome.

A checkpoint holds the weights, the optimiser's averages, the plan's state and the states that are passed on to the next
step's sequences (harness.state_passing); everything else is a function of the step. So a run that was killed, however
often, ends with the weights of one that wasn't (on the same machine).

The loss of a step is the sum over its batch's labels over their number, whoever computes which part of it: a batch may
be cut into parts that are computed one after the other, and shared among processes (harness.distributed). Checkpoints
hold whole tensors, so any number of processes goes on from one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from decaybench.core.errors import RunError, UserError
from decaybench.core.hashing import key64
from decaybench.core.positions import going_on
from decaybench.harness.config import RunConfig, TrainingConfig
from decaybench.harness.distributed import (
    ALONE,
    World,
    clip_gradients,
    optimiser_groups,
    part_of_step,
    placed_like,
    whole,
)
from decaybench.harness.interrupt import Stop
from decaybench.harness.plans import Plan, make_plan
from decaybench.harness.progress import Progress
from decaybench.harness.state_passing import STATES_FILE, StatePassing
from decaybench.harness.tensorboard import tensorboard
from decaybench.models.checkpoints import (
    MODEL_FILE,
    Checkpoint,
    checkpoints_in,
    read_checkpoint,
    remove_checkpoint,
    write_checkpoint,
)
from decaybench.models.language_model import LanguageModel, build_model
from decaybench.models.module import Decayed, Treatment, treatments
from decaybench.models.state import ModelState
from decaybench.results.record import StageInfo, TrainingInfo
from decaybench.results.run_folder import RunFolder
from decaybench.tasks.base import IGNORED, Batch, Shape, Stage, Task
from decaybench.tasks.registry import make_task

_OPTIMISER_FILE = "optimiser.safetensors"
_LOG_EVERY = 50
_SAVING_SHARE = 20  # checkpoints are at least so many times as far apart as writing one takes
_MEMORY = 0.98  # of the loss and accuracy that are shown and recorded: about the last fifty batches


class DivergedError(RunError):
    """The loss or the gradient is no number. step: the last one that was done."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


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
    objective: nn.Module
    optimiser: torch.optim.Optimizer
    plan: Plan
    averages: _Averages
    batches: list[int]  # by stage, trained on so far
    seed: int
    passing: StatePassing | None = None
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    unlogged: list[tuple[int, float, float]] = field(default_factory=list)  # stage, loss, accuracy of batches


class Objective(nn.Module):
    """What training makes small, as one module that processes can share."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum of the labels' cross-entropies (nats), and how many were the first choice. All int64 [B, T]."""
        nats, right, _ = from_state(self.model, tokens, labels, positions)
        return nats, right


def train(
    config: RunConfig, folder: RunFolder, *, device: str, backend: str, progress: Progress, world: World = ALONE
) -> tuple[LanguageModel, TrainingInfo, float]:
    """Train the model of `config` in `folder`, or go on where a run before stopped, or load its finished weights.

    world: the processes that share the work; each returns the whole model. Returns the model, what the record says of
    its training, and the seconds that training took in all. Says so where training ended before a sequence of
    train_length was reached.
    Raises UserError on a damaged folder, RunError when training diverges or the disk is full, and
    InterruptedRunError on Ctrl-C.
    """
    work = _start(config, folder, device, backend, progress, world)
    stages = make_task(config.task).stages()
    if work.step < work.plan.total_steps:
        _train_on(work, config, stages, folder, device, progress, world)
    _say_what_was_not_reached(work, config, stages, progress)
    model = work.model
    if world.size > 1 and config.parallel == "fsdp":
        weights = {name: whole(value) for name, value in model.state_dict().items()}
        model = _model_of(config, weights, backend).to(device)
    return model, _info(work, config, stages), work.seconds


def training_info(config: RunConfig, facts: Mapping[str, Any]) -> TrainingInfo:
    """What a record says of a training up to one of its checkpoints; facts: the checkpoint's, whole (`train`)."""
    stages = make_task(config.task).stages()
    plan = make_plan(stages, config.training, config.seed)
    plan.restore(facts["plan"])
    averages = _Averages(facts["loss"], facts["accuracy"])
    return _training_info(config, stages, plan, averages, facts["batches"], facts["step"], facts["tokens"])


def parameter_groups(model: LanguageModel, weight_decay: float, decayed: Decayed | None = None) -> list[dict[str, Any]]:
    """AdamW's groups, one for each treatment: those that take weight decay first. Frozen parameters are in none.

    factor: the multiple of the learning rate at which a group learns. decayed: as in `treatments`.
    """
    named = dict(model.named_parameters())
    groups: dict[Treatment, list[Tensor]] = {}
    for name, treatment in treatments(model, decayed).items():
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
        floor = config.floor or 0.0
        return (config.learning_rate - floor) * rise * 0.5 * (1 + math.cos(math.pi * passed)) + floor * rise
    epoch = step // (plan.steps_by_epoch or total)
    if config.schedule == "linear-by-epoch":
        return config.learning_rate * rise * (config.epochs - epoch) / config.epochs
    return config.learning_rate * rise * 0.5 * (1 + math.cos(math.pi * epoch / config.epochs))


def loss_and_hits(
    model: LanguageModel, tokens: Tensor, labels: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy over the labels (nats), and whether each was the first choice, bool [n].

    tokens, labels, positions: int64 [B, T] (`tasks.base.Batch`); the head is applied at labels only.
    """
    asked = labels != IGNORED
    where = {} if positions is None else {"positions": positions}
    logits = model(tokens, logits_at=asked, **where).logits.float()
    wanted = labels[asked]
    return F.cross_entropy(logits, wanted), logits.detach().argmax(-1) == wanted


def from_state(
    model: LanguageModel,
    tokens: Tensor,
    labels: Tensor,
    positions: Tensor | None,
    state: ModelState | None = None,
    *,
    output_state: bool = False,
) -> tuple[Tensor, Tensor, ModelState | None]:
    """What `Objective` says of rows that start from a state, None: empty, and the state at their end if asked for.

    tokens, labels, positions: int64 [B, T], the positions as if there was no state.
    """
    if state is not None and positions is not None:
        positions = going_on(positions, state.seen)
    scores = model.score(tokens, labels, positions, state, output_state=output_state)
    return scores.nats.sum(), (scores.first == labels[labels != IGNORED]).sum(), scores.state


def to_tensors(batch: Batch, device: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """A batch's tokens, labels and positions on a device."""
    tokens, labels = (torch.from_numpy(part).to(device) for part in (batch.tokens, batch.labels))
    return tokens, labels, None if batch.positions is None else torch.from_numpy(batch.positions).to(device)


@contextmanager
def matmul_dtype(dtype: str, device: str) -> Iterator[None]:
    """Autocast to bfloat16 if asked for; float32 otherwise."""
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        yield


def _start(config: RunConfig, folder: RunFolder, device: str, backend: str, progress: Progress, world: World) -> _Work:
    """The model and all that changes with it, where the newest checkpoint left them, shared among the processes."""
    training, task = config.training, make_task(config.task)
    stages = task.stages()
    ceilings = [task.ceiling(stage.shape) for stage in stages] if training.plan == "mastery" else None
    plan = make_plan(stages, training, config.seed, ceilings)
    model = build_model(config.model, config.seed, device=device, backend=backend)
    if config.recompute:
        _recompute(model)
    found = _checkpoint(config, folder, progress, world)
    if found is not None:
        model.load_state_dict(found.tensors(MODEL_FILE))
    objective = world.shared(Objective(model), list(model.blocks), config.parallel)
    optimiser = torch.optim.AdamW(
        optimiser_groups(parameter_groups(model, training.weight_decay, training.decayed)),
        lr=training.learning_rate,
        betas=training.betas,
        eps=training.eps,
        fused=True,
    )
    passing = None
    if training.state_passing is not None:
        passing = StatePassing(training.state_passing, config.seed, training.state_passing_after or 0)
    work = _Work(model, objective, optimiser, plan, _Averages(), [0] * len(stages), config.seed, passing)
    if found is not None:
        _go_on(work, found, progress)
    return work


def _recompute(model: LanguageModel) -> None:
    """Blocks keep what goes into them and not what they make of it, which is made again for the gradients."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def _train_on(
    work: _Work,
    config: RunConfig,
    stages: Sequence[Stage],
    folder: RunFolder,
    device: str,
    progress: Progress,
    world: World,
) -> None:
    task, total = make_task(config.task), work.plan.total_steps
    work.model.train()
    started, saved, saving = time.monotonic() - work.seconds, time.monotonic(), 0.0
    with Stop() as stop, progress.bar("training", total, work.step) as show, _log(config, folder, work, world) as log:
        while work.step < total:
            number, indices = work.plan.next(work.step)
            parts = _parts(task, config, stages[number].shape, indices, world)
            loss, accuracy = _one_step(work, config, parts, device, world)
            moved = work.plan.saw(work.step, number, accuracy)
            work.averages.saw(loss, accuracy)
            work.unlogged.append((number, loss, accuracy))
            work.batches[number] += 1
            work.step += 1
            work.seconds = time.monotonic() - started
            shape = stages[work.plan.stage].shape
            show(work.step, f"loss {work.averages.loss:.3f}  accuracy {work.averages.accuracy:.3f}  {_name(shape)}")
            if moved or work.step % _LOG_EVERY == 0 or work.step == total:
                log(_event(work, config.training, _name(shape)))
            began = time.monotonic()
            due = began - saved > _seconds_between_checkpoints(config, saving)
            # One clock decides for all, and whoever is asked to stop stops all.
            due, stopping = (n > 0 for n in world.sums(due if world.first else 0, stop.wanted))
            if due or stopping or work.step == total or _stays(config, work.step):
                _save(work, config, stages, folder, world)
                saved = time.monotonic()
                saving = saved - began
            stop.raise_if_wanted(f"training stopped at step {work.step} of {total}", stopping)
        # Whoever asked during the last step's checkpoint.
        stop.raise_if_wanted(f"training stopped at step {work.step} of {total}", world.sums(stop.wanted) != [0])


@contextmanager
def _log(
    config: RunConfig, folder: RunFolder, work: _Work, world: World
) -> Iterator[Callable[[Mapping[str, float | str]], None]]:
    """What takes the events of a training: log.jsonl, and TensorBoard's files where they are asked for."""
    with ExitStack() as opened:
        takers: list[Callable[[Mapping[str, float | str]], None]] = [folder.log] if world.first else []
        if world.first and config.tensorboard:
            takers.append(opened.enter_context(tensorboard(folder.path / "tensorboard", work.step)))

        def log(event: Mapping[str, float | str]) -> None:
            for take in takers:
                take(event)

        yield log


def _parts(
    task: Task[Any, Any, Any], config: RunConfig, shape: Shape, indices: NDArray[np.int64], world: World
) -> list[Batch]:
    """This process's part of a step's batch, in the parts that are computed at once: as many in every process.

    A process that has fewer samples than others computes one without labels, which changes no gradient.
    """
    share = np.array_split(indices, world.size)[world.rank]
    most = -(-len(indices) // world.size)
    at_once = most if config.micro_batch_tokens is None else max(1, config.micro_batch_tokens // shape.length)
    parts = []
    for some in np.array_split(share, -(-most // at_once)):
        batch = _training_batch(task, config, shape, some if len(some) else indices[:1])
        parts.append(batch if len(some) else replace(batch, labels=np.full_like(batch.labels, IGNORED)))
    return parts


def _training_batch(task: Task[Any, Any, Any], config: RunConfig, shape: Shape, indices: NDArray[np.int64]) -> Batch:
    batch = task.batch(shape, "train", config.seed, indices)
    if config.training.label_noise is None:
        return batch
    return task.with_label_noise(batch, config.training.label_noise, shape, "train", config.seed, indices)


def _seconds_between_checkpoints(config: RunConfig, saving: float) -> float:
    """saving: seconds that the last one took. checkpoint_seconds=0 asks for one after every step, and gets it."""
    asked = config.checkpoint_seconds
    return max(asked, _SAVING_SHARE * saving) if asked else 0.0


def _one_step(work: _Work, config: RunConfig, parts: Sequence[Batch], device: str, world: World) -> tuple[float, float]:
    """Returns the loss, the mean over all labels of all processes, and the accuracy; counts the tokens."""
    training = config.training
    rate = learning_rate(training, work.step, work.plan)
    for group in work.optimiser.param_groups:
        group["lr"] = rate * group["factor"]
    asked = [int(part.asked.sum()) for part in parts]
    tokens = sum(int(part.lengths.sum()) for part, labels in zip(parts, asked, strict=True) if labels)
    all_labels, all_tokens = world.sums(sum(asked), tokens)
    work.optimiser.zero_grad(set_to_none=True)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    passing = work.passing
    starts = passing.starts(work.step, [len(part.tokens) for part in parts]) if passing else [None] * len(parts)
    keep = passing is not None and passing.wants(work.step)
    ends: list[ModelState] = []
    with _dropout_of_step(work, world):
        for number, (part, start) in enumerate(zip(parts, starts, strict=True), start=1):
            with part_of_step(work.objective, last=number == len(parts)):
                with matmul_dtype(training.dtype, device):
                    batch = to_tensors(part, device)
                    if passing is None:
                        nats, right = work.objective(*batch)
                    else:  # there is one process
                        nats, right, end = from_state(work.model, *batch, start, output_state=keep)
                        ends += [] if end is None else [end]
                # Shared gradients are the mean over processes, and the loss is the sum over them.
                (nats / (all_labels / world.size)).backward()
            sums += torch.stack([nats.detach(), right])
    norm = clip_gradients(work.model, training.clip or math.inf)
    # One wait for the device, and before the step: weights that are not numbers must never reach a checkpoint.
    *own, norm_found = torch.cat([sums, norm[None]]).tolist()
    all_nats, all_right = world.sums(*own)
    loss, accuracy = all_nats / all_labels, float(np.float32(all_right) / np.float32(all_labels))
    for what, found in (("loss", loss), ("gradient's norm", norm_found)):
        if not math.isfinite(found):
            raise DivergedError(
                f"training diverged at step {work.step}: the {what} is {found}; "
                f"try a learning rate below training.learning_rate={training.learning_rate:g}",
                work.step,
            )
    work.optimiser.step()
    work.tokens += int(all_tokens)
    if passing and keep:
        passing.keep(ends)
    return loss, accuracy


@contextmanager
def _dropout_of_step(work: _Work, world: World) -> Iterator[None]:
    """What is dropped is a function of the step, so that a resumed run drops the same; the caller's draws go on."""
    if not work.model.config.embedding_dropout:
        yield
        return
    with torch.random.fork_rng():
        others = () if world.first else (world.rank,)
        torch.manual_seed(key64("dropout", work.seed, work.step, *others) >> 1)
        yield


def _save(work: _Work, config: RunConfig, stages: Sequence[Stage], folder: RunFolder, world: World) -> None:
    """Every process puts the tensors together, the first one writes them."""
    sharded = world.size > 1 and config.parallel == "fsdp"
    weights = _gathered(work.model.state_dict(), world) if sharded else {}
    averages = _gathered(dict(_averages(work)), world)
    if not world.first:
        return
    facts = {
        "step": work.step,
        "tokens": work.tokens,
        "seconds": work.seconds,
        "plan": work.plan.state(),
        "loss": work.averages.loss,
        "accuracy": work.averages.accuracy,
        "batches": work.batches,
        "train_length": config.task.train_length,
        "longest_trained": _longest_trained(work.batches, stages),
        "training_hash": config.training_hash,
        **({} if config.training.label_noise is None else {"label_noise": config.training.label_noise}),
        **({} if config.training.state_passing is None else {"state_passing": config.training.state_passing}),
        **({} if (reader := make_task(config.task).tokenizer_sha256) is None else {"tokenizer_sha256": reader}),
    }
    model = _model_of(config, weights) if sharded else work.model
    path = folder.checkpoint / f"step-{work.step:08d}"
    states = {STATES_FILE: work.passing.tensors()} if work.passing else {}
    write_checkpoint(path, model, config.seed, facts, {_OPTIMISER_FILE: averages, **states})
    others = [other for other in checkpoints_in(folder.checkpoint) if other != path]
    before = max((other for other in others if other.name < path.name), default=None)
    for other in others:  # the one before stays, in case the newest is damaged later
        if other != before and not _stays(config, int(other.name.removeprefix("step-"))):
            remove_checkpoint(other)


def _averages(work: _Work) -> Iterator[tuple[str, Tensor]]:
    """The optimiser's tensors by the name of their parameter."""
    for name, parameter in work.model.named_parameters():
        if parameter.requires_grad:
            for key, value in work.optimiser.state[parameter].items():
                if isinstance(value, Tensor):
                    yield f"{name}/{key}", value


def _gathered(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Whole tensors on the CPU, one after the other; only the first process keeps them."""
    found = {}
    for name, value in tensors.items():
        gathered = whole(value)
        if world.first:
            found[name] = gathered
    return found


def _model_of(config: RunConfig, weights: Mapping[str, Tensor], backend: str = "torch") -> LanguageModel:
    model = build_model(config.model, device="meta", backend=backend)
    model.load_state_dict(weights, assign=True)
    return model


def _stays(config: RunConfig, step: int) -> bool:
    """Whether the checkpoint of a step is one of those that are never removed."""
    return config.keep is not None and step % config.keep == 0


def _checkpoint(config: RunConfig, folder: RunFolder, progress: Progress, world: World) -> Checkpoint | None:
    """The checkpoint to go on from, the same for all processes."""
    found = _newest_intact(folder.checkpoint, progress) if world.first else None
    name = world.tell(None if found is None else found.folder.name)
    if found is None and name is not None:
        found = read_checkpoint(folder.checkpoint / name)
    if found is not None and found.facts.get("training_hash") != config.training_hash:
        raise UserError(f"checkpoint {found.folder} is another run's; --force starts this run anew")
    return found


def _go_on(work: _Work, found: Checkpoint, progress: Progress) -> None:
    parameters = dict(work.model.named_parameters())
    for key, value in found.tensors(_OPTIMISER_FILE).items():
        name, _, part = key.rpartition("/")
        work.optimiser.state[parameters[name]][part] = placed_like(value, parameters[name])
    if work.passing:
        work.passing.restore(found.tensors(STATES_FILE), work.model)
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
    return _training_info(config, stages, work.plan, work.averages, work.batches, work.step, work.tokens)


def _training_info(
    config: RunConfig,
    stages: Sequence[Stage],
    plan: Plan,
    averages: _Averages,
    batches: Sequence[int],
    step: int,
    tokens: int,
) -> TrainingInfo:
    mastered = plan.mastered() or [None] * len(stages)
    return TrainingInfo(
        config=config.training.plain(),
        training_hash=config.training_hash,
        seed=config.seed,
        train_length=config.task.train_length,
        longest_trained=_longest_trained(batches, stages),
        steps=step,
        tokens=tokens,
        optimizer="AdamW",
        learning_rate=config.training.learning_rate,
        final_loss=averages.loss or 0.0,
        final_accuracy=averages.accuracy,
        stages=tuple(
            StageInfo(shape=stage.shape.plain(), batches=count, step=when)
            for stage, count, when in zip(stages, batches, mastered, strict=True)
        ),
    )


def _longest_trained(batches: Sequence[int], stages: Sequence[Stage]) -> int:
    """The longest sequence trained on, tokens; batches: by stage, so far."""
    return max(stage.shape.length for stage, count in zip(stages, batches, strict=True) if count)


def _say_what_was_not_reached(work: _Work, config: RunConfig, stages: Sequence[Stage], progress: Progress) -> None:
    longest, wanted = _longest_trained(work.batches, stages), config.task.train_length
    if longest >= wanted:
        return
    missed = [_name(stage.shape) for stage, batches in zip(stages, work.batches, strict=True) if not batches]
    never = f"never reached: {'; '.join(missed)}" if missed else "no stage is longer"
    progress.note(
        f"the longest sequence trained on has {longest} tokens, not task.train_length={wanted}, which lengths like 2x "
        f"are multiples of; {never}"
    )


def _event(work: _Work, config: TrainingConfig, stage: str) -> dict[str, Any]:
    """What the log gets: of the last batch, or of a mix, whose batches alternate, means since the last event."""
    _, loss, accuracy = work.unlogged[-1]
    found = {"loss": loss, "accuracy": accuracy}
    if config.plan == "mix":
        for number, prefix in ((0, ""), (1, "mix_")):
            if own := [batch[1:] for batch in work.unlogged if batch[0] == number]:
                losses, accuracies = zip(*own, strict=True)
                found |= {f"{prefix}loss": fmean(losses), f"{prefix}accuracy": fmean(accuracies)}
    work.unlogged.clear()
    return {
        "step": work.step,
        "stage": stage,
        **found,
        "learning_rate": learning_rate(config, work.step - 1, work.plan),
        "tokens": work.tokens,
        "seconds": round(work.seconds, 2),
    }


def _name(shape: Any) -> str:
    return " ".join(f"{key}={value}" for key, value in shape.plain().items() if value is not None)
