"""What a task is: a pure generator of samples and the rule that scores them.

A `Shape` says what one sample looks like; a batch of samples is a pure function of (task, version, config, split,
seed, shape, index). A task knows nothing of models or training: it hands out token and label arrays, names the metric
(core.scoring) that turns "was this label predicted?" into scores, and says what is known without a model: what its
tokens stand for (`token_classes`), how well simple rules answer (`references`) and how well anything can (`ceiling`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from decaybench.core.config import Config
from decaybench.core.draws import Draws
from decaybench.core.errors import UserError
from decaybench.core.hashing import digest, key64, without_absent
from decaybench.core.scoring import Metric

IGNORED = -100

_HIT, _OTHER = 0, 1  # streams of label noise

Split = Literal["train", "validation", "test"]


class MissingDataError(UserError):
    """The files that a task's samples are made of aren't here, or are others. needs: what they are, for a record."""

    def __init__(self, message: str, needs: str) -> None:
        super().__init__(message)
        self.needs = needs


class Shape(Config):
    """What one sample looks like. Each task adds its own fields."""

    length: int = Field(ge=1, le=2**31, description="tokens in a sample")


class Stage(Config):
    """One stage of a training plan: samples of one shape. Each task narrows the type of `shape`."""

    shape: Shape
    examples: int | None = Field(default=None, ge=1, description="size of a fixed training set; none: unlimited")
    share: float | None = Field(default=None, gt=0, le=1, description="share of the batches, plan mix only")


class TaskConfig(Config):
    """The rules of a task and its training data. Part of the training hash.

    paths: the fields that say where a file or folder lies. They are in no hash, and records have their last part alone.
    found: the fields for what matters of such a file, a sha256 say; a validator fills them in where they are None. So a
    configuration whose files have gone still reads, and only making samples raises MissingDataError.
    """

    paths: ClassVar[frozenset[str]] = frozenset()
    found: ClassVar[frozenset[str]] = frozenset()

    name: str
    train_length: int = Field(ge=2, le=2**31, description="longest training length, tokens")

    def identity(self) -> dict[str, Any]:
        """The configuration as JSON-able data without its paths: what hashes are made of."""
        return {key: value for key, value in self.plain().items() if key not in self.paths}

    def said(self) -> dict[str, Any]:
        """The configuration as JSON-able data without what was found in files: with another path, others are found."""
        return {key: value for key, value in self.plain().items() if key not in self.found}

    def for_record(self) -> dict[str, Any]:
        """The configuration as JSON-able data with the last part of each path alone: the rest may name somebody."""
        plain = self.plain()
        for key in self.paths & plain.keys():
            if plain[key] is not None:
                plain[key] = re.split(r"[/\\]", str(plain[key]).rstrip("/\\"))[-1]
        return plain


# In YAML a length in tokens is a number.
Length = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]


class EvaluationConfig(Config):
    """What is asked of a trained model. Not part of the training hash."""

    lengths: tuple[Length, ...] = Field(
        default=("1x", "2x", "4x", "8x"), description="evaluation lengths: multiples of train_length (2x) or tokens"
    )
    samples: int = Field(default=100, ge=1, le=1_000_000, description="samples a cell")
    seed: int = Field(default=0, ge=0, lt=2**32, description="seed of the evaluation samples")

    @property
    def ignored(self) -> dict[str, str]:
        """The fields that change nothing beside what the others say, `lengths` for one, each with the reason."""
        return {}


@dataclass(frozen=True)
class Wanted:
    """What is to be found in the text that a model writes after a sample.

    answers: at least one; distance: of each, tokens between the place where it was written and the sample's end.
    """

    answers: tuple[str, ...]
    distance: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """A block of samples. All arrays int64.

    tokens [B, T]: what the model reads. labels [B, T]: what it should say at that place, IGNORED elsewhere.
    distance [B, T]: tokens between the place where the answer was written and the place where it is asked, 0 where
    nothing is asked, and everywhere in a sample that was told nothing. details: further facts about each sample,
    [B, ...] each (a realised depth, for example).
    positions [B, T]: as `core.positions` says (0 padding, 1 the first token of a document), nothing asked at padding;
    None: each row is one document without padding.
    wanted: an entry a sample, of a task that generates, which asks for no labels; None: it doesn't.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    distance: NDArray[np.int64]
    details: dict[str, NDArray[Any]] = field(default_factory=dict)
    positions: NDArray[np.int64] | None = None
    wanted: tuple[Wanted, ...] | None = None

    @property
    def asked(self) -> NDArray[np.bool_]:
        """Where a label is asked for, bool [B, T]."""
        asked: NDArray[np.bool_] = self.labels != IGNORED
        return asked

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Real tokens of each row, padding left out, int64 [B]."""
        if self.positions is None:
            return np.full(len(self.tokens), self.tokens.shape[1], dtype=np.int64)
        lengths: NDArray[np.int64] = (self.positions != 0).sum(1, dtype=np.int64)
        return lengths


@dataclass(frozen=True)
class Cell:
    """One cell of an evaluation: a shape, and the coordinates by which tables and figures name it."""

    shape: Shape
    variant: str
    coordinates: dict[str, float | int]

    @property
    def name(self) -> str:
        """A file-safe name, unique within an evaluation."""
        parts = [f"{key}{value:g}" for key, value in self.coordinates.items()]
        return "-".join([self.variant, f"length{self.shape.length}", *parts])


T = TypeVar("T", bound=TaskConfig)
S = TypeVar("S", bound=Shape)
E = TypeVar("E", bound=EvaluationConfig)


class Task(ABC, Generic[T, S, E]):
    """A benchmark task. Subclasses give the generator; ids, hashes and keys are the same for all.

    likelihood: whether an evaluation also keeps how likely each sample's labels were, and a cell's perplexity.
    pads: whether samples may be shorter than their shape's length, the rest padding.
    running_text: whether samples are stretches of text, in which every token is asked: an evaluation keeps sums by
    position and bits per byte instead of each answer.
    generates: whether a sample is a prompt, which the model continues, and its answers are looked for in the text;
    new_tokens: that it may write then, at most.
    plan: the plan of training where none is said (harness.plans).
    """

    name: ClassVar[str]
    version: ClassVar[int]
    metric: ClassVar[Metric]
    likelihood: ClassVar[bool] = False
    pads: ClassVar[bool] = False
    running_text: ClassVar[bool] = False
    generates: ClassVar[bool] = False
    new_tokens: ClassVar[int] = 0
    plan: ClassVar[Literal["mastery", "mix"]] = "mastery"

    def __init__(self, config: T) -> None:
        self.config = config

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens are integers in [0, vocab_size)."""

    @property
    def tokenizer_sha256(self) -> str | None:
        """Of what turns text into tokens, which a model must have been trained with; None: there is no text."""
        return None

    @abstractmethod
    def check(self, shape: S) -> None:
        """Raises UserError, naming the smallest size that works, where no sample of `shape` exists."""

    @abstractmethod
    def stages(self) -> Sequence[Stage]:
        """The training plan, easiest stage first."""

    @abstractmethod
    def cells(self, evaluation: E, lengths: Sequence[int]) -> list[Cell]:
        """The cells of an evaluation at the given lengths (tokens). Raises UserError where a cell can't exist."""

    def _sample(self, shape: S, draws: Draws) -> Batch:
        """The samples that `draws` stands for; a task that overrides `batch` needs none."""
        raise NotImplementedError

    def check_length(self, stage: Stage) -> None:
        """Raises UserError where a stage is longer than train_length, which evaluation lengths are multiples of."""
        if stage.shape.length > self.config.train_length:
            raise UserError(
                f"task.train_length={self.config.train_length} is shorter than a training stage: "
                f"the smallest is {stage.shape.length}"
            )

    def evaluation_defaults(self) -> dict[str, Any]:
        """What of the evaluation's configuration follows from the task's, where nothing is said."""
        return {}

    def remarks(self, cells: Sequence[Cell]) -> list[str]:
        """What a user should know of these samples before reading numbers, a line each."""
        return []

    def ready(self, cells: Sequence[Cell], samples: int) -> None:
        """Raises MissingDataError where files that samples are made of aren't here, UserError where they are too short.

        Called before anything is trained or evaluated, with the cells of the evaluation and the samples of each; a
        configuration is valid without its files.
        """

    def token_classes(self) -> dict[str, range]:
        """What tokens stand for: the ids of each class by its name, disjoint; an id of no class has none.

        By these a learned quantity of a token is drawn, and the class `value` holds all answers (`with_label_noise`).
        What depends on a token's place and not on its id (the filler of an MQAR sample) is no class.
        """
        return {}

    def references(self, batch: Batch) -> dict[str, NDArray[np.float64]]:
        """Accuracies without a model, by the name of a rule that answers from the sample alone; none by default.

        Each [B], averaged over a sample's questions as the metric does. Where a rule has several equal choices, it is
        the accuracy to be expected of a fair draw among them. A pure function of each sample, whatever the batch.
        """
        return {}

    def ceiling(self, shape: S) -> float | None:
        """The best accuracy that anything can reach on samples of `shape`, 0..1; None: all can be right."""
        return None

    def byte_lengths(self) -> NDArray[np.int64]:
        """The bytes of text that each token stands for, [vocab_size]; for running text only."""
        raise NotImplementedError

    def stop_ids(self) -> frozenset[int]:
        """The tokens with which a text ends; for tasks that generate only."""
        raise NotImplementedError

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of what a model wrote; for tasks that generate only."""
        raise NotImplementedError

    def found(self, text: str, answers: Sequence[str]) -> tuple[bool, ...]:
        """Which of the answers stand in a text, and in all that begin with it; for tasks that generate only."""
        raise NotImplementedError

    def rules(self) -> dict[str, Any]:
        """The part of the configuration that changes samples; it enters keys and hashes.

        An option that is added to a task must be None where it doesn't apply: only so do old samples stay as they are.
        """
        known = self.config.identity()
        return {key: known[key] for key in known if key not in ("train_length", "stages")}

    def batch(self, shape: S, split: Split, seed: int, indices: NDArray[np.int64]) -> Batch:
        """The samples with these indices, a pure function of the arguments and the task's rules.

        The three splits never share a sample stream. Raises UserError where no sample of `shape` exists.
        """
        self.check(shape)
        return self._sample(shape, Draws(key64(*self._origin(shape, split, seed)), indices))

    def with_label_noise(
        self, batch: Batch, share: float, shape: S, split: Split, seed: int, indices: NDArray[np.int64]
    ) -> Batch:
        """`batch`, the one with these indices, with each label replaced with probability `share` in [0, 1).

        By a uniform draw from the other tokens of class `value`; a function of the arguments and the label's place, so
        that a sample has the same wrong labels whenever it comes, and with a larger `share` these and more. Tokens stay
        as they are. Raises UserError where the task has no class `value` of two tokens at least.
        """
        values = self.token_classes().get("value", range(0))
        if len(values) < 2:
            raise UserError(f"training.label_noise: task {self.name} doesn't say which tokens can be an answer")
        draws = Draws(key64("label noise", *self._origin(shape, split, seed)), indices)
        length = batch.labels.shape[1]
        hit = batch.asked & (draws.uniform(_HIT, length) < share)
        # The r-th of the others: step over the label itself.
        others = values.start + draws.integers(_OTHER, length, len(values) - 1)
        others += others >= batch.labels
        return replace(batch, labels=np.where(hit, others, batch.labels))

    def sample_ids(self, shape: S, split: Split, seed: int, indices: NDArray[np.int64]) -> list[str]:
        """A sample's id: 16 hexadecimal digits, a hash of all that it is a function of."""
        origin = digest(self._origin(shape, split, seed))
        return [digest([origin, int(index)])[:16] for index in indices]

    def _origin(self, shape: S, split: Split, seed: int) -> list[Any]:
        return [self.name, self.version, without_absent(self.rules()), without_absent(shape.plain()), split, seed]


def doubling_lengths(train_length: int) -> list[int]:
    """A curriculum's lengths: 32, 64, ... below train_length, then train_length itself."""
    lengths = []
    length = 32
    while length < train_length:
        lengths.append(length)
        length *= 2
    return [*lengths, train_length]


V = TypeVar("V", bound=tuple[Any, ...])


def without_repeats(values: V) -> V:
    """For a validator: `values`, or ValueError where two of them would give a cell the same name."""
    names = [f"{abs(value):g}" if isinstance(value, float) else str(value) for value in values]
    if len(set(names)) < len(names):
        raise ValueError("must not repeat a value")
    return values
