"""RunConfig: all that a run is a function of, and how it is carried out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from decaybench.core.config import Config, merge, parse
from decaybench.core.errors import UserError
from decaybench.core.hashing import digest, without_absent
from decaybench.harness.plans import make_plan
from decaybench.models.config import ModelConfig
from decaybench.models.language_model import build_model
from decaybench.models.module import Decayed
from decaybench.models.registry import get_architecture
from decaybench.results.run_folder import RunFolder
from decaybench.tasks.base import Cell, EvaluationConfig, Task, TaskConfig
from decaybench.tasks.registry import get_task, make_task

# Goes up when training or evaluation changes in a way that changes results: old run folders then don't match.
HARNESS_VERSION = 1

Factor = Annotated[float, Field(ge=0, lt=1)]


class TrainingConfig(Config):
    """How a model is trained: the order of the data, the optimiser and its schedule."""

    plan: Literal["mastery", "epochs", "mix"] = Field(
        default="mastery",
        description="mastery: the next stage when this one is mastered; epochs: every stage's examples in each epoch; "
        "mix: each stage in its share of the batches, task text",
    )
    steps: int | None = Field(
        default=None, ge=1, description="optimiser steps; none: all epochs with plan epochs, else 1500"
    )
    epochs: int = Field(default=1, ge=1, description="passes over the examples, plan epochs only")
    mastery: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="running accuracy at which a stage is mastered, as a share of the best that its samples allow",
    )
    review: float = Field(default=0.25, ge=0, lt=1, description="share of batches from stages already mastered")
    shuffle: bool = Field(default=False, description="mix batches of all stages, plan epochs only")
    batch_tokens: int = Field(default=4096, ge=1, description="tokens a step: as many samples as fit, at least one")
    batch_samples: int | None = Field(default=None, ge=1, description="samples a step; none: by batch_tokens")
    label_noise: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="share of training labels replaced by another of the task's values; none or 0: no noise",
    )
    state_passing: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="share of sequences that start from the final state of one of the step before, not empty; none or "
        "0: none does",
    )
    state_passing_after: int | None = Field(
        default=None, ge=1, description="steps before states are passed; none: they are from the beginning"
    )
    learning_rate: float = Field(default=1e-2, gt=0, lt=10, description="highest learning rate")
    schedule: Literal["hold", "cosine", "cosine-by-epoch", "linear-by-epoch"] = Field(
        default="hold",
        description="hold: constant to `hold`, then cosine to 0; cosine: to 0; by-epoch: constant within an epoch",
    )
    floor: float | None = Field(
        default=None, ge=0, description="learning rate at the end, schedules hold and cosine only; none: 0"
    )
    warmup: int = Field(default=30, ge=0, description="steps of linear warm-up")
    hold: float = Field(default=0.6, ge=0, le=1, description="share of steps before the cosine, schedule hold only")
    weight_decay: float = Field(default=0.1, ge=0, description="AdamW's, on weights of two or more dimensions")
    decayed: Decayed | None = Field(
        default=None,
        description="what takes weight decay; none: weights of two or more dimensions, but those that an "
        "architecture's own training leaves out; matrices: those too; all: every parameter, norms and decays too",
    )
    betas: tuple[Factor, Factor] = Field(default=(0.9, 0.95), description="AdamW's averaging factors")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon")
    clip: float | None = Field(default=1.0, gt=0, description="largest gradient norm; none: no limit")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of matrix products; bfloat16: autocast, parameters and decays stay float32"
    )

    @model_validator(mode="after")
    def _floor_below_the_rate(self) -> TrainingConfig:
        if self.floor is not None and self.schedule not in ("hold", "cosine"):
            raise ValueError(f"training.floor is for schedules hold and cosine, not {self.schedule}")
        if self.floor is not None and self.floor > self.learning_rate:
            raise ValueError(f"training.floor={self.floor:g} is above training.learning_rate={self.learning_rate:g}")
        return self

    @model_validator(mode="after")
    def _states_passed_after(self) -> TrainingConfig:
        if self.state_passing_after is not None and self.state_passing is None:
            raise ValueError(
                f"training.state_passing_after={self.state_passing_after} needs training.state_passing, the share"
            )
        return self

    @field_validator("label_noise", "state_passing")
    @classmethod
    def _no_share_is_none(cls, share: float | None) -> float | None:
        """So that a run with 0 is the run without."""
        return share or None


class RunConfig(Config):
    """One run: a model, a task, how to train on it and what to ask. What follows from the task is filled in."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="the model")
    task: SerializeAsAny[TaskConfig] = Field(description="the task and its training data")
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="how the model is trained")
    evaluation: SerializeAsAny[EvaluationConfig] = Field(description="what the model is asked")
    seed: int = Field(default=0, ge=0, lt=2**32, description="seed of initial values and training data")
    checkpoint: str | None = Field(default=None, description="folder of a trained model: evaluate only")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="where to compute")
    backend: str = Field(default="auto", description="kernels of the recurrence")
    out: str = Field(default="runs", description="folder of run folders")
    batch_tokens: int = Field(default=16_384, ge=1, description="tokens an evaluation batch")
    checkpoint_seconds: float = Field(default=20.0, ge=0, description="time between checkpoints, s; 0: every step")
    keep: int | None = Field(
        default=None, ge=1, description="steps between checkpoints that stay; none: the last two alone stay"
    )
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens that a process trains on at once, gradients of a step's batch added up; none: on all",
    )
    recompute: bool = Field(
        default=False, description="blocks' activations are made again for the gradients, not kept: less memory"
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        default="ddp", description="how torchrun's processes share a training: ddp copies the model, fsdp shards it"
    )
    tensorboard: bool = Field(
        default=False, description="write what log.jsonl gets to the run's tensorboard/ too (extra tensorboard)"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_task(cls, data: Any) -> Any:
        """Read `task` and `evaluation` as the task's own configurations; fill in what follows from the task."""
        if not isinstance(data, Mapping):
            return data
        data = {key: _as_data(value) for key, value in data.items()}
        if not isinstance(data.get("task"), dict) or not isinstance(data["task"].get("name"), str):
            raise ValueError("task.name is missing: mqar or niah, for example")
        entry = get_task(data["task"]["name"])
        task = parse(entry.config, data["task"], "task")
        training = data.setdefault("training", {})
        if isinstance(training, dict):
            data["training"] = {"plan": entry.task.plan, **training}
        model = data.setdefault("model", {})
        if isinstance(model, dict) and data.get("checkpoint") is None:
            model.setdefault("vocab_size", make_task(task).vocab_size)
            if isinstance(model.get("post"), dict) and model["post"].get("horizon") is None:
                model["post"]["horizon"] = task.train_length
        asked = data.get("evaluation")
        if asked is None or isinstance(asked, Mapping):
            asked = {**make_task(task).evaluation_defaults(), **(asked or {})}
        evaluation = parse(entry.evaluation, asked, "evaluation")
        return data | {"task": task, "evaluation": evaluation, "model": parse(ModelConfig, model, "model")}

    @model_validator(mode="after")
    def _vocabulary_fits(self) -> RunConfig:
        wanted = make_task(self.task).vocab_size
        if self.model.vocab_size < wanted and self.checkpoint is None:
            raise ValueError(
                f"model.vocab_size={self.model.vocab_size} is too small: task {self.task.name} has {wanted} tokens"
            )
        return self

    @model_validator(mode="after")
    def _state_that_can_be_passed(self) -> RunConfig:
        share, name = self.training.state_passing, self.model.name
        if share is not None and get_architecture(name).state_grows:
            raise ValueError(
                f"training.state_passing={share:g} is for recurrences: the state of {name} grows with every token"
            )
        return self

    @property
    def training_hash(self) -> str:
        """Hash of all that the trained weights are a function of."""
        return training_hash(self.model.plain(), make_task(self.task), self.training.plain(), self.seed)

    @property
    def evaluation_hash(self) -> str:
        """Hash of all that the answers of a model are a function of: what is asked, in which batches and dtype."""
        task = make_task(self.task)
        rules = self.task.identity() | {"stages": None}
        asked = self.evaluation.plain() | {"lengths": self.eval_lengths()}
        return digest(
            without_absent([HARNESS_VERSION, task.version, rules, asked, self.batch_tokens, self.training.dtype])
        )

    def eval_lengths(self) -> list[int]:
        """The evaluation lengths in tokens, in the order given. Raises UserError."""
        return [parse_length(text, self.task.train_length) for text in self.evaluation.lengths]

    def folder(self, origin: str) -> Path:
        """The run's folder; `origin`: the hash of the training or of the checkpoint."""
        return Path(self.out) / f"{self.task.name}-{self.model.cell}-{origin[:12]}"


def parse_length(text: str, train_length: int) -> int:
    """A length in tokens from `2x` (times the training length), `0.5x`, or `512`. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)x|(\d+)", text.strip(), re.ASCII)
    if not match:
        raise UserError(
            f"--eval-lengths: {text.strip()!r} is not a length; "
            f"write multiples of the training length (1x,2x) or tokens (512)"
        )
    length = Fraction(match[1]) * train_length if match[1] else Fraction(match[2])  # 1.1 x 100 is 110 exactly
    shown = text.strip() if len(text.strip()) <= 20 else text.strip()[:20] + "…"
    if length > 2**31:
        raise UserError(f"--eval-lengths: {shown!r} is more than 2^31 tokens")
    if length < 1 or length.denominator != 1:
        raise UserError(
            f"--eval-lengths: {shown!r} is {float(length):g} tokens, not a whole number of them; write 1x,2x or 512"
        )
    return int(length)


def training_hash(
    model: Mapping[str, Any],
    task: Task[Any, Any, Any],
    training: Mapping[str, Any],
    seed: int,
    harness_version: int = HARNESS_VERSION,
) -> str:
    """Hash of all that trained weights are a function of; model, training: plain configurations.

    The task's stages enter as they are resolved: a change of its default curriculum is another training.
    """
    data = task.config.identity() | {"stages": [stage.plain() for stage in task.stages()]}
    return digest(without_absent([harness_version, model, task.version, data, training, seed]))


def make_config(*layers: Mapping[str, Any]) -> RunConfig:
    """The configuration from layers of plain data, later ones winning. Raises UserError with one line."""
    data: dict[str, Any] = {}
    for layer in layers:
        merge(data, _as_data(layer))
    config = parse(RunConfig, data)
    if config.checkpoint is None:  # a checkpoint brings its own training length: the run checks against that one
        plan = make_plan(make_task(config.task).stages(), config.training, config.seed)
        if (after := config.training.state_passing_after) is not None and after >= plan.total_steps:
            raise UserError(
                f"training.state_passing_after={after}: no state would be passed in {plan.total_steps} steps"
            )
        evaluation_cells(make_task(config.task), config.evaluation, config.task.train_length)
        _build_without_values(config.model)
    return config


def evaluation_cells(task: Task[Any, Any, Any], evaluation: EvaluationConfig, train_length: int | None) -> list[Cell]:
    """The cells of an evaluation of a model with this training length (tokens; None: not known).

    Raises UserError where a length or a cell can't exist or is asked for twice.
    """
    asked = () if "lengths" in evaluation.ignored else evaluation.lengths
    lengths = [_length(text, train_length) for text in asked]
    if len(set(lengths)) < len(lengths):
        raise UserError(f"--eval-lengths: {','.join(evaluation.lengths)} names a length twice")
    cells = task.cells(evaluation, lengths)
    names = [cell.name for cell in cells]
    if len(set(names)) < len(names):
        raise UserError(f"evaluation: the cell {max(names, key=names.count)} is asked for twice")
    return cells


def read_run_config(run: RunFolder) -> RunConfig:
    """The configuration that a run's folder holds. Raises UserError where it is missing, damaged or incomplete."""
    data = run.read_config()
    if isinstance(asked := data.get("lm_eval"), dict):
        raise UserError(f"{run.path} holds answers to lm-eval's tasks alone: name its model, {asked.get('checkpoint')}")
    try:
        return make_config(data)
    except UserError as error:
        raise UserError(f"{run.config_path} is damaged: {error}; --force starts this run anew") from None


def _length(text: str, train_length: int | None) -> int:
    if train_length is None and text.strip().endswith("x"):
        raise UserError(
            f"--eval-lengths: {text.strip()!r} needs a training length, and this checkpoint doesn't say its own: "
            f"write tokens"
        )
    return parse_length(text, train_length or 1)


def _build_without_values(model: ModelConfig) -> None:
    """Sizes that don't fit one another show only where the parts of a model are made. Raises UserError."""
    try:
        build_model(model, device="meta")
    except (RuntimeError, OverflowError, TypeError) as error:
        what = f"model: PyTorch can't make tensors of its sizes (d_model={model.d_model}): {error}"
        raise UserError(" ".join(what.split())[:200]) from None


def _as_data(value: Any) -> Any:
    if isinstance(value, Config):
        return value.plain()
    if isinstance(value, Mapping):
        return {key: _as_data(part) for key, part in value.items()}
    return value
