"""Needle in a haystack (NIAH), token level: does the model find one planted fact, at any depth of any length?

Tokens: 0 PAD (never drawn), 1 NEEDLE, 2 QUERY, then keys, values and hay in ranges of their own. A needle is
[NEEDLE] key v1 .. vm. A sample is a body of hay and needles, then for each needle asked [QUERY] key v1 .. vm, where
the last answer's vm is left out: it is the label of the sample's last token. Labels stand at key (v1), v1 (v2), and
so on. A sample's keys are distinct; values are drawn independently.

`depth` d puts the first needle asked where round(d u) of the body's u other units (a hay token or a needle) stand
before it; all else is uniform over placements. The variants are those of RULER (arXiv 2404.06654).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from decaybench.core.draws import Draws
from decaybench.core.errors import UserError
from decaybench.core.scoring import Metric
from decaybench.tasks.base import (
    IGNORED,
    Batch,
    Cell,
    EvaluationConfig,
    Shape,
    Stage,
    Task,
    TaskConfig,
    doubling_lengths,
    without_repeats,
)

PAD, NEEDLE, QUERY = 0, 1, 2
SPECIALS = 3

Haystack = Literal["noise", "needles"]
Variant = Literal["single", "multikey", "multivalue", "multiquery"]
Int64 = NDArray[np.int64]

# Draws.distinct takes a stream and the next one.
_PLACES, _KEYS, _VALUES, _HAY = 0, 2, 4, 5


class NiahShape(Shape):
    """One NIAH sample's sizes."""

    needles: int = Field(ge=1, description="needles in the body; with haystack=needles the smallest number")
    queries: int = Field(ge=1, description="needles asked, each once")
    values: int = Field(default=1, ge=1, description="value tokens in a needle")
    depth: float | None = Field(default=None, ge=0, le=1, description="depth of the first needle asked; none: anywhere")
    haystack: Haystack = Field(default="noise", description="what else the body holds")

    @property
    def width(self) -> int:
        """Tokens in a needle: its marker, its key and its values."""
        return 2 + self.values

    @property
    def body(self) -> int:
        """Tokens before the first question."""
        return self.length - (self.queries * self.width - 1)


class NiahStage(Stage):
    """One stage of a NIAH training plan."""

    shape: NiahShape


class NiahConfig(TaskConfig):
    """NIAH's rules and training data."""

    name: Literal["niah"] = "niah"
    train_length: int = Field(default=128, ge=2, le=2**31, description="longest training length, tokens")
    key_tokens: int = Field(default=64, ge=1, le=2**28, description="tokens that can be a key")
    value_tokens: int = Field(default=64, ge=2, le=2**28, description="tokens that can be a value")
    hay_tokens: int = Field(default=64, ge=1, le=2**28, description="tokens that can be hay")
    values: int = Field(default=1, ge=1, description="value tokens in a needle of the multivalue variant")
    haystack: Haystack = Field(
        default="noise",
        description="hay (noise), or as many other needles as fit and have a key of their own (needles)",
    )
    stages: tuple[NiahStage, ...] | None = Field(
        default=None, min_length=1, description="training plan; none: a curriculum up to train_length"
    )


class NiahEvaluation(EvaluationConfig):
    """What is asked of a model trained on NIAH."""

    variants: Annotated[tuple[Variant, ...], AfterValidator(without_repeats)] = Field(
        default=("single",),
        min_length=1,
        description="single: one needle; multikey: others beside it; multivalue: several values; multiquery: all asked",
    )
    depths: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], AfterValidator(without_repeats)] = Field(
        default=tuple(tenth / 10 for tenth in range(11)),
        min_length=1,
        description="depths of the needle asked first: 0 at the start of the body, 1 at its end",
    )
    distractors: int = Field(default=3, ge=1, description="other needles in multikey and multiquery")


class Niah(Task[NiahConfig, NiahShape, NiahEvaluation]):
    """NIAH samples and scores: 1 where all of a sample's values are right."""

    name: ClassVar[str] = "niah"
    version: ClassVar[int] = 1
    metric: ClassVar[Metric] = "all_correct"

    @property
    def vocab_size(self) -> int:
        """Tokens are integers in [0, vocab_size)."""
        return SPECIALS + self.config.key_tokens + self.config.value_tokens + self.config.hay_tokens

    def token_classes(self) -> dict[str, range]:
        """The special tokens one by one, then the ranges of keys, values and hay; needles are planted by a marker."""
        classes = {"pad": range(PAD, PAD + 1), "needle": range(NEEDLE, NEEDLE + 1), "query": range(QUERY, QUERY + 1)}
        first = SPECIALS
        for name in ("key", "value", "hay"):
            size = getattr(self.config, f"{name}_tokens")
            classes[name] = range(first, first + size)
            first += size
        return classes

    def rules(self) -> dict[str, Any]:
        """The vocabulary: `values` and `haystack` enter a sample by its shape."""
        rules = super().rules()
        return {key: rules[key] for key in rules if key not in ("values", "haystack")}

    def check(self, shape: NiahShape) -> None:
        """Raises UserError where no sample of `shape` exists."""
        if shape.queries > shape.needles:
            raise UserError(f"niah queries={shape.queries} asks for more than there are: needles={shape.needles}")
        if shape.needles > self.config.key_tokens:
            raise UserError(
                f"task.key_tokens={self.config.key_tokens} is too small for needles={shape.needles} with distinct "
                f"keys: the smallest is {shape.needles}"
            )
        smallest = (shape.needles + shape.queries) * shape.width - 1
        if shape.length < smallest:
            raise UserError(
                f"niah length={shape.length} is too short for needles={shape.needles} and queries={shape.queries} "
                f"with values={shape.values}: the smallest length is {smallest}"
            )

    def stages(self) -> Sequence[NiahStage]:
        """The configured plan, or a curriculum of growing lengths and numbers of needles."""
        stages = self.config.stages or _curriculum(self.config)
        for stage in stages:
            self.check_length(stage)
            self.check(stage.shape)
        return stages

    def cells(self, evaluation: NiahEvaluation, lengths: Sequence[int]) -> list[Cell]:
        """A cell for each variant, length and depth, with the depth as coordinate."""
        cells = []
        for variant in evaluation.variants:
            sizes = self._sizes(evaluation, variant)
            for length in lengths:
                self.check(NiahShape(length=length, **sizes))
                for depth in evaluation.depths:
                    shape = NiahShape(length=length, depth=depth, haystack=self.config.haystack, **sizes)
                    cells.append(Cell(shape, variant, {"depth": depth}))
        return cells

    def _sizes(self, evaluation: NiahEvaluation, variant: Variant) -> dict[str, int]:
        if variant == "multivalue" and self.config.values < 2:
            raise UserError(
                f"evaluation.variants: multivalue needs at least 2 values in a needle, and task.values is "
                f"{self.config.values}; set task.values=4, for example"
            )
        several = 1 + evaluation.distractors
        return {
            "needles": several if variant in ("multikey", "multiquery") else 1,
            "queries": several if variant == "multiquery" else 1,
            "values": self.config.values if variant == "multivalue" else 1,
        }

    def _needles_in(self, shape: NiahShape) -> int:
        if shape.haystack == "noise":
            return shape.needles
        return min(shape.body // shape.width, self.config.key_tokens)

    def _sample(self, shape: NiahShape, draws: Draws) -> Batch:
        n, m = self._needles_in(shape), shape.values
        keys = SPECIALS + draws.distinct(_KEYS, n, self.config.key_tokens)
        first_value = SPECIALS + self.config.key_tokens
        values = first_value + draws.integers(_VALUES, n * m, self.config.value_tokens).reshape(len(keys), n, m)
        starts = _starts(shape, n, draws)

        first_hay = first_value + self.config.value_tokens
        body = first_hay + draws.integers(_HAY, shape.body, self.config.hay_tokens)
        needles = np.concatenate([np.full_like(keys, NEEDLE)[..., None], keys[..., None], values], axis=2)
        places = starts[..., None] + np.arange(shape.width)
        flat = (len(body), n * shape.width)
        np.put_along_axis(body, places.reshape(flat), needles.reshape(flat), axis=1)

        # The needles come in random order, but for the target, so the first ones are a random choice in random order.
        written = starts[:, : shape.queries]
        batch = _with_questions(body, needles[:, : shape.queries], written)
        if shape.depth is not None:
            room = shape.body - shape.width
            batch.details["depth"] = written[:, 0] / room if room else np.zeros(len(body))
        return batch


def _starts(shape: NiahShape, n: int, draws: Draws) -> Int64:
    """Where each of n needles starts in the body, int64 [B, n], in random order; with a depth the target is first."""
    units = shape.body - n * (shape.width - 1)
    if shape.depth is None:
        order = draws.distinct(_PLACES, n, units)
    else:
        target = round(shape.depth * (units - 1))
        others = draws.distinct(_PLACES, n - 1, units - 1)
        others += others >= target
        order = np.concatenate([np.full((len(others), 1), target), others], axis=1)
    needles_before = np.argsort(np.argsort(order, axis=1), axis=1)
    return order + (shape.width - 1) * needles_before


def _with_questions(body: Int64, questions: Int64, written: Int64) -> Batch:
    """The body [B, L] followed by the questions, [B, Q, width] as needles that start at `written` [B, Q]."""
    rows, count, width = questions.shape
    block = questions.copy()
    block[:, :, 0] = QUERY
    labels = np.full_like(questions, IGNORED)
    labels[:, :, 1:-1] = questions[:, :, 2:]
    # From a needle's start to its question's start, less the marker: v1 is written 2 after the one and asked 1
    # after the other, and so on for v2 .. vm.
    ahead = body.shape[1] + width * np.arange(count) - written - 1
    distance = np.where(labels == IGNORED, 0, ahead[..., None])

    def joined(before: int | Int64, after: Int64) -> Int64:
        front = np.broadcast_to(np.asarray(before, dtype=np.int64), body.shape)
        return np.concatenate([front, after.reshape(rows, count * width)[:, :-1]], axis=1)

    return Batch(joined(body, block), joined(IGNORED, labels), joined(0, distance))


def _curriculum(config: NiahConfig) -> tuple[NiahStage, ...]:
    """Lengths 32, 64, ... up to train_length with L/16 and L/8 needles each, all asked."""
    shapes = []
    for length in doubling_lengths(config.train_length):
        for share in (16, 8):
            for values in dict.fromkeys((1, config.values)):
                fit = (length + 1) // (2 * (2 + values))
                if fit or length == config.train_length:
                    needles = max(1, min(length // share, fit, config.key_tokens))
                    sizes = {"needles": needles, "queries": needles, "values": values}
                    shapes.append(NiahShape(length=length, haystack=config.haystack, **sizes))
    return tuple(NiahStage(shape=shape) for shape in dict.fromkeys(shapes))
