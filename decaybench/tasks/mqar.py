"""Multi-query associative recall (MQAR): how many key-value pairs does a state hold, and for how long?

A sample of T tokens is k1 v1 k2 v2 ... (kv pairs), then each key once more, at 2 kv + 2 slot, where its value is the
label. Keys are distinct in [1, V/2), values distinct in [V/2, V). The slots are drawn for one key after the other,
without replacement, with p_i ~ a i^(a-1) for slot i - 1 = 0 .. (T - 2 kv)/2 - 1, so that most questions come early
and some late. The other places are filled by `fill`. Source: Zoology, arXiv 2312.04927; `random-safe` is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

Size = Annotated[int, Field(ge=1, le=2**31)]
Fill = Literal["random", "zero", "random-safe"]
Variant = Literal["capacity", "persist"]

# Draws.distinct takes a stream and the next one.
_KEYS, _VALUES, _SLOTS, _FILL = 0, 2, 4, 5


class MqarShape(Shape):
    """One MQAR sample's sizes."""

    kv: int = Field(ge=1, description="key-value pairs in a sample, each asked once")


class MqarStage(Stage):
    """One stage of an MQAR training plan."""

    shape: MqarShape


class MqarConfig(TaskConfig):
    """MQAR's rules and training data."""

    name: Literal["mqar"] = "mqar"
    train_length: int = Field(default=128, ge=2, le=2**31, description="longest training length, tokens")
    vocab_size: int = Field(default=272, ge=4, le=2**31, description="tokens: 0, then keys, then values from half on")
    fill: Fill = Field(
        default="random-safe",
        description="other places: any token (random), token 0 (zero), any token but the sample's keys (random-safe)",
    )
    power: float = Field(default=0.01, gt=0, le=10, description="exponent a of the query gaps; 1 is uniform")
    stages: tuple[MqarStage, ...] | None = Field(
        default=None, min_length=1, description="training plan; none: a curriculum up to train_length"
    )


class MqarEvaluation(EvaluationConfig):
    """What is asked of a model trained on MQAR."""

    variants: Annotated[tuple[Variant, ...], AfterValidator(without_repeats)] = Field(
        default=("capacity", "persist"),
        min_length=1,
        description="capacity: pairs grow with the length; persist: the same number of pairs at every length",
    )
    capacity_ratio: int = Field(default=8, ge=4, description="tokens per pair in capacity cells")
    persist_kv: int | None = Field(
        default=None, ge=1, description="pairs in persist cells; none: train_length / capacity_ratio"
    )
    pairs: tuple[tuple[Size, Size], ...] | None = Field(
        default=None, min_length=1, description="the cells one by one as (length, kv), instead of variants and lengths"
    )

    @property
    def ignored(self) -> dict[str, str]:
        """Lengths and variants where cells are listed as `pairs`."""
        reason = "evaluation.pairs names the cells one by one"
        return {} if self.pairs is None else dict.fromkeys(("lengths", "variants"), reason)


class Mqar(Task[MqarConfig, MqarShape, MqarEvaluation]):
    """MQAR samples and scores: the accuracy over a sample's questions, averaged over samples."""

    name: ClassVar[str] = "mqar"
    version: ClassVar[int] = 1
    metric: ClassVar[Metric] = "mean_accuracy"

    @property
    def vocab_size(self) -> int:
        """Tokens are integers in [0, vocab_size)."""
        return self.config.vocab_size

    def token_classes(self) -> dict[str, range]:
        """Token 0 (filler where `fill` is zero), keys and values; with other fills a filler may be any of these."""
        half = self.vocab_size // 2
        return {"filler": range(1), "key": range(1, half), "value": range(half, self.vocab_size)}

    def check(self, shape: MqarShape) -> None:
        """Raises UserError where no sample of `shape` exists: T is odd, 4 kv > T, or kv > V/2 - 1."""
        if shape.length < 4 * shape.kv:
            raise UserError(
                f"mqar length={shape.length} is too short for kv={shape.kv}: it takes 4 tokens a pair, "
                f"so the smallest length is {4 * shape.kv}"
            )
        if shape.length % 2:
            raise UserError(
                f"mqar length={shape.length} is odd, and queries stand at even places: the smallest length "
                f"above it that works is {shape.length + 1}"
            )
        if shape.kv > self.config.vocab_size // 2 - 1:
            raise UserError(
                f"task.vocab_size={self.config.vocab_size} is too small for kv={shape.kv} distinct keys: "
                f"the smallest is {2 * shape.kv + 2}"
            )

    def stages(self) -> Sequence[MqarStage]:
        """The configured plan, or a curriculum of growing lengths and numbers of pairs."""
        stages = self.config.stages or _curriculum(self.config.train_length)
        for stage in stages:
            self.check_length(stage)
            self.check(stage.shape)
        return stages

    def cells(self, evaluation: MqarEvaluation, lengths: Sequence[int]) -> list[Cell]:
        """A cell for each variant and length, or for each of `pairs`, with its number of pairs as coordinate."""
        return kv_cells(self, MqarShape, evaluation, lengths)

    def remarks(self, cells: Sequence[Cell]) -> list[str]:
        """With fill `random`: how often the filler repeats a key, which asks for the rebinding of a key, not recall."""
        if self.config.fill != "random":
            return []
        shapes = {cell.name: cell.shape for cell in cells}
        repeats = {
            name: expected_key_repeats(shape, self.vocab_size)
            for name, shape in shapes.items()
            if isinstance(shape, MqarShape)
        }
        worst = max(repeats, key=repeats.__getitem__)
        return [f"fill random repeats a sample's keys, up to {repeats[worst]:.2g} times a sample on average ({worst})"]

    def _sample(self, shape: MqarShape, draws: Draws) -> Batch:
        kv, half = shape.kv, self.vocab_size // 2
        keys = 1 + draws.distinct(_KEYS, kv, half - 1)
        values = half + draws.distinct(_VALUES, kv, self.vocab_size - half)
        slots = draws.weighted(_SLOTS, kv, slot_weights((shape.length - 2 * kv) // 2, self.config.power))
        asked = 2 * kv + 2 * slots

        tokens = np.zeros((len(keys), shape.length), dtype=np.int64)
        tokens[:, 0 : 2 * kv : 2] = keys
        tokens[:, 1 : 2 * kv : 2] = values
        np.put_along_axis(tokens, asked, keys, axis=1)
        self._fill(tokens, keys, draws)

        labels = np.full_like(tokens, IGNORED)
        np.put_along_axis(labels, asked, values, axis=1)
        distance = np.zeros_like(tokens)
        np.put_along_axis(distance, asked, asked - np.arange(1, 2 * kv, 2), axis=1)
        return Batch(tokens, labels, distance)

    def _fill(self, tokens: NDArray[np.int64], keys: NDArray[np.int64], draws: Draws) -> None:
        kv = keys.shape[1]
        fillers = tokens.shape[1] - 3 * kv
        if self.config.fill == "zero" or fillers == 0:
            return
        if self.config.fill == "random":
            words = draws.integers(_FILL, fillers, self.vocab_size)
        else:
            words = step_over(draws.integers(_FILL, fillers, self.vocab_size - kv), keys)
        # 0 is neither a key nor a value, so each sample has exactly this many places left.
        tokens[tokens == 0] = words.ravel()


def expected_key_repeats(shape: MqarShape, vocab_size: int) -> float:
    """How many filler tokens of a sample repeat one of its keys, on average, with fill `random`: (T - 3 kv) kv / V."""
    return (shape.length - 3 * shape.kv) * shape.kv / vocab_size


def slot_weights(space: int, power: float) -> NDArray[np.float64]:
    """How likely each of `space` slots is to hold a question, not normalised: i^(power - 1), i = 1 .. space."""
    return np.arange(1, space + 1, dtype=np.float64) ** (power - 1)


def step_over(ranks: NDArray[np.int64], taken: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each rank r of [B, n] the r-th of the tokens 0, 1, ... that aren't among its row's `taken` [B, k], distinct.

    So uniform ranks become uniform tokens that are none of them. Works in place.
    """
    for token in np.sort(taken, axis=1).T:  # smallest first
        ranks += ranks >= token[:, None]
    return ranks


def kv_cells(
    task: Task[Any, Any, Any], shape_of: Callable[..., Shape], evaluation: MqarEvaluation, lengths: Sequence[int]
) -> list[Cell]:
    """The cells of a task whose shapes are `shape_of(length=..., kv=...)`. Raises UserError where one can't exist."""
    cells = []
    for variant, length, kv in _sizes(evaluation, lengths, task.config.train_length):
        shape = shape_of(length=length, kv=kv)
        task.check(shape)
        cells.append(Cell(shape, variant, {"kv": kv}))
    return cells


def _sizes(evaluation: MqarEvaluation, lengths: Sequence[int], train_length: int) -> list[tuple[str, int, int]]:
    """(variant, length, pairs) of each cell: a cell for each variant and length, or for each of `evaluation.pairs`."""
    if evaluation.pairs is not None:
        return [("listed", length, kv) for length, kv in evaluation.pairs]
    return [
        (variant, length, _pairs(evaluation, variant, length if variant == "capacity" else train_length))
        for variant in evaluation.variants
        for length in lengths
    ]


def _pairs(evaluation: MqarEvaluation, variant: Variant, tokens: int) -> int:
    if variant == "persist" and evaluation.persist_kv is not None:
        return evaluation.persist_kv
    return max(1, tokens // evaluation.capacity_ratio)


def _curriculum(train_length: int) -> tuple[MqarStage, ...]:
    """Lengths 32, 64, ... up to train_length with L/8 and L/4 pairs each; the first begins with L/16."""
    stages = []
    for place, length in enumerate(doubling_lengths(train_length)):
        shares = (8, 4) if place else (16, 8, 4)
        pairs = dict.fromkeys(max(1, length // share) for share in shares)
        stages += [MqarStage(shape=MqarShape(length=length, kv=kv)) for kv in pairs]
    return tuple(stages)
