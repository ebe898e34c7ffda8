"""MQAR with unreliable sources: can a model weigh what it was told by who said it?

A binding is three tokens, `source key value`. A source is one of m tokens with a reliability r of its own: with
probability r the value is the key's true one, else a uniform one of the others. Each of kv keys is bound min_bindings
to max_bindings times (uniformly), each time by a uniformly drawn source; all bindings of a sample stand in random
order. Then each key is asked once, at MQAR's slots (tasks/mqar.py), and the label is its true value.

Tokens: 0 filler, 1 .. m sources, then keys up to V/2, values in [V/2, V). Keys are distinct, true values independent
and uniform over the n values, so that what the bindings (s_1, v_1), (s_2, v_2), ... of a key say of its true value is

    P(v) ~ product over i of (r_s_i if v_i == v else (1 - r_s_i) / (n - 1)).

Places: 3 max_bindings kv for the bindings, those left over behind them; then the questions. A place that nothing stands
at holds a uniform token that is none of the sample's keys (as MQAR's `random-safe`) and no source: a source token
always opens a binding, so that what a model does at one is about bindings alone. In a `single` shape every key is bound
once and truly: plain recall, for a curriculum to begin with. A question's distance counts from the last binding of its
key, whether that was true or not. The task is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from decaybench.core.draws import Draws
from decaybench.core.errors import UserError
from decaybench.core.scoring import Metric
from decaybench.tasks.base import (
    IGNORED,
    Batch,
    Cell,
    Length,
    Shape,
    Stage,
    Task,
    TaskConfig,
    doubling_lengths,
)
from decaybench.tasks.mqar import MqarEvaluation, kv_cells, slot_weights, step_over

Share = Annotated[float, Field(ge=0, le=1)]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

# Draws.distinct takes a stream and the next one.
_KEYS, _TRUTH, _COUNTS, _SOURCES, _RIGHT, _WRONG, _ORDER, _SLOTS, _FILL = 0, 2, 3, 4, 5, 6, 7, 8, 9

_CEILING_QUESTIONS = 4096  # their mean accuracy is known to about .005
_TIE = 1e-9  # log-odds that differ by less are equal: they differ by the order of adding


class MqarNoisyShape(Shape):
    """The sizes of one sample of mqar-noisy."""

    kv: int = Field(ge=1, description="keys in a sample, each asked once")
    single: bool | None = Field(
        default=None, description="each key bound once and truly, to learn recall by; none: by the task's rules"
    )


class MqarNoisyStage(Stage):
    """One stage of a training plan of mqar-noisy."""

    shape: MqarNoisyShape


class MqarNoisyConfig(TaskConfig):
    """The rules and training data of mqar-noisy."""

    name: Literal["mqar-noisy"] = "mqar-noisy"
    train_length: int = Field(default=128, ge=2, le=2**31, description="longest training length, tokens")
    vocab_size: int = Field(
        default=272, ge=6, le=2**31, description="tokens: 0, then sources, then keys, then values from half on"
    )
    reliabilities: tuple[Share, ...] = Field(
        default=(0.95, 0.8, 0.6, 0.4), min_length=1, description="for each source how often its value is the true one"
    )
    min_bindings: int = Field(default=2, ge=1, description="fewest bindings of a key")
    max_bindings: int = Field(default=4, ge=1, le=1024, description="most bindings of a key")
    power: float = Field(default=0.01, gt=0, le=10, description="exponent a of the query gaps; 1 is uniform")
    stages: tuple[MqarNoisyStage, ...] | None = Field(
        default=None, min_length=1, description="training plan; none: a curriculum up to train_length"
    )

    @model_validator(mode="after")
    def _fewest_and_most(self) -> MqarNoisyConfig:
        if self.min_bindings > self.max_bindings:
            raise ValueError(
                f"min_bindings={self.min_bindings} is more than max_bindings={self.max_bindings}: "
                f"the smallest max_bindings is {self.min_bindings}"
            )
        return self


class MqarNoisyEvaluation(MqarEvaluation):
    """What is asked of a model trained on mqar-noisy."""

    lengths: tuple[Length, ...] = Field(
        default=("1x", "2x", "4x"), description="evaluation lengths: multiples of train_length (2x) or tokens"
    )
    capacity_ratio: int = Field(default=16, ge=4, description="tokens per key in capacity cells")


class MqarNoisy(Task[MqarNoisyConfig, MqarNoisyShape, MqarNoisyEvaluation]):
    """Samples and scores of mqar-noisy: the accuracy over a sample's questions, averaged over samples."""

    name: ClassVar[str] = "mqar-noisy"
    version: ClassVar[int] = 1
    metric: ClassVar[Metric] = "mean_accuracy"

    @property
    def vocab_size(self) -> int:
        """Tokens are integers in [0, vocab_size)."""
        return self.config.vocab_size

    @property
    def values(self) -> int:
        """How many values there are."""
        return self.vocab_size - self.vocab_size // 2

    def token_classes(self) -> dict[str, range]:
        """Token 0, each source by its reliability (`source 0.95`), keys and values; a filler may be 0, key or value."""
        names: list[str] = []
        for reliability in self.config.reliabilities:
            name = f"source {reliability:g}"
            again = sum(known.partition(" #")[0] == name for known in names)
            names.append(f"{name} #{again + 1}" if again else name)
        half = self.vocab_size // 2
        sources = {name: range(token, token + 1) for token, name in enumerate(names, start=1)}
        return {
            "filler": range(1),
            **sources,
            "key": range(1 + len(names), half),
            "value": range(half, self.vocab_size),
        }

    def check(self, shape: MqarNoisyShape) -> None:
        """Raises UserError where no sample of `shape` exists: T too short for its bindings, or V for its keys."""
        smallest = self._room(shape) + 2 * shape.kv
        if shape.length < smallest:
            raise UserError(
                f"mqar-noisy length={shape.length} is too short for kv={shape.kv} with up to {self._bound(shape)[1]} "
                f"bindings a key: it takes {smallest // shape.kv} tokens a key, so the smallest length is {smallest}"
            )
        smallest = 2 * (1 + len(self.config.reliabilities) + shape.kv)
        if self.vocab_size < smallest:
            raise UserError(
                f"task.vocab_size={self.vocab_size} is too small for kv={shape.kv} distinct keys and "
                f"{len(self.config.reliabilities)} sources: the smallest is {smallest}"
            )

    def stages(self) -> Sequence[MqarNoisyStage]:
        """The configured plan, or a curriculum: plain recall, then growing lengths and numbers of keys."""
        stages = self.config.stages or _curriculum(self.config)
        for stage in stages:
            self.check_length(stage)
            self.check(stage.shape)
        return stages

    def cells(self, evaluation: MqarNoisyEvaluation, lengths: Sequence[int]) -> list[Cell]:
        """A cell for each variant and length, or for each of `pairs`, with its number of keys as coordinate."""
        return kv_cells(self, MqarNoisyShape, evaluation, lengths)

    def references(self, batch: Batch) -> dict[str, Float64]:
        """bayes: the likeliest value by the equation above. majority: the most frequent value. last: the last one."""
        source, value, place, truth = (batch.details[name] for name in ("source", "value", "place", "truth"))
        there = source >= 0
        with np.errstate(divide="ignore"):  # a reliability of 1 or 0 says all
            r = np.asarray(self.config.reliabilities)
            weights = np.log(r) + np.log(self.values - 1) - np.log1p(-r)
        last = np.take_along_axis(value, place.argmax(axis=2)[..., None], axis=2)[..., 0]
        return {
            "bayes": _vote(value, weights[source], there, truth, self.values).mean(axis=1),
            "majority": _vote(value, np.ones(source.shape), there, truth, self.values).mean(axis=1),
            "last": (last == truth).mean(axis=1),
        }

    def ceiling(self, shape: MqarNoisyShape) -> float | None:
        """The accuracy of `bayes`, which nothing beats on average, on the first validation samples of seed 0."""
        if shape.single:
            return None
        indices = np.arange(-(-_CEILING_QUESTIONS // shape.kv), dtype=np.int64)
        return float(self.references(self.batch(shape, "validation", 0, indices))["bayes"].mean())

    def _room(self, shape: MqarNoisyShape) -> int:
        """Tokens kept for bindings, whether there are so many or not."""
        return 3 * self._bound(shape)[1] * shape.kv

    def _bound(self, shape: MqarNoisyShape) -> tuple[int, int]:
        """How often a key is bound, at least and at most."""
        return (1, 1) if shape.single else (self.config.min_bindings, self.config.max_bindings)

    def _sample(self, shape: MqarNoisyShape, draws: Draws) -> Batch:
        config, kv, room = self.config, shape.kv, self._room(shape)
        half, sources = self.vocab_size // 2, len(config.reliabilities)
        keys = 1 + sources + draws.distinct(_KEYS, kv, half - 1 - sources)
        truth = half + draws.integers(_TRUTH, kv, self.values)
        source, value, there = self._bindings(shape, truth, draws)
        order, place = _order(there, draws)

        bindings = np.stack([1 + source, np.broadcast_to(keys[..., None], source.shape), value], axis=3)
        bindings[~there] = -1
        tokens = np.full((len(keys), shape.length), -1, dtype=np.int64)
        tokens[:, :room] = np.take_along_axis(bindings.reshape(len(keys), -1, 3), order[..., None], axis=1).reshape(
            len(keys), room
        )
        asked = room + 2 * draws.weighted(_SLOTS, kv, slot_weights((shape.length - room) // 2, config.power))
        np.put_along_axis(tokens, asked, keys, axis=1)
        self._fill(tokens, keys, draws)

        labels = np.full_like(tokens, IGNORED)
        np.put_along_axis(labels, asked, truth, axis=1)
        distance = np.zeros_like(tokens)
        np.put_along_axis(distance, asked, asked - place.max(axis=2), axis=1)
        # Of each key's bindings, in no order; -1 where there is none. place: where the value stands.
        details = {"source": source, "value": np.where(there, value, -1), "place": place, "truth": truth}
        return Batch(tokens, labels, distance, details)

    def _bindings(self, shape: MqarNoisyShape, truth: Int64, draws: Draws) -> tuple[Int64, Int64, NDArray[np.bool_]]:
        """Each key's bindings [B, kv, most]: the source's number or -1, its value, whether there is one."""
        fewest, most = self._bound(shape)
        sizes, n = (*truth.shape, most), shape.kv * most
        there = np.arange(most) < (fewest + draws.integers(_COUNTS, shape.kv, most - fewest + 1))[..., None]
        source = draws.integers(_SOURCES, n, len(self.config.reliabilities)).reshape(sizes)
        reliability = 1.0 if shape.single else np.asarray(self.config.reliabilities)[source]
        right = draws.uniform(_RIGHT, n).reshape(sizes) < reliability
        wrong = self.vocab_size // 2 + draws.integers(_WRONG, n, self.values - 1).reshape(sizes)
        wrong += wrong >= truth[..., None]
        return np.where(there, source, -1), np.where(right, truth[..., None], wrong), there

    def _fill(self, tokens: Int64, keys: Int64, draws: Draws) -> None:
        sources = np.broadcast_to(
            np.arange(1, 1 + len(self.config.reliabilities)), (len(keys), len(self.config.reliabilities))
        )
        taken = np.concatenate([sources, keys], axis=1)
        words = step_over(draws.integers(_FILL, tokens.shape[1], self.vocab_size - taken.shape[1]), taken)
        np.copyto(tokens, words, where=tokens < 0)


def _curriculum(config: MqarNoisyConfig) -> tuple[MqarNoisyStage, ...]:
    """Recall first, in short samples; then lengths 32, 64, ... up to train_length with L/16 keys, or what fits.

    With many bindings a question is rare, and a model must find the key's bindings before it can weigh them: without
    the first two stages attention learned nothing in 800 steps. There a token in five is asked, not one in fourteen.
    """
    T, tokens_a_key = config.train_length, 3 * config.max_bindings + 2
    shapes = [MqarNoisyShape(length=length, kv=kv, single=True) for length, kv in ((12, 2), (20, 4)) if length <= T]
    for length in doubling_lengths(T):
        kv = min(length // 16, length // tokens_a_key)
        if kv or length == T:
            shapes.append(MqarNoisyShape(length=length, kv=max(1, kv)))
    return tuple(MqarNoisyStage(shape=shape) for shape in shapes)


def _order(there: NDArray[np.bool_], draws: Draws) -> tuple[Int64, Int64]:
    """A random order of the bindings that are there, the others behind them: int64 [B, kv max_bindings].

    And the place of each binding's value in the sample, [B, kv, max_bindings]; -1 where there is no binding.
    """
    flat = there.reshape(len(there), -1)
    shuffled = draws.permutation(_ORDER, flat.shape[1])
    absent_last = np.argsort(~np.take_along_axis(flat, shuffled, axis=1), axis=1, kind="stable")
    order = np.take_along_axis(shuffled, absent_last, axis=1)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(3 * np.arange(flat.shape[1]) + 2, order.shape), axis=1)
    return order, np.where(there, place.reshape(there.shape), -1)


def _vote(value: Int64, weight: Float64, there: NDArray[np.bool_], truth: Int64, values: int) -> Float64:
    """How likely the winner of a vote is the truth, [B, kv]: a value's votes are the sum of its bindings' weights.

    value, weight, there: [B, kv, n]; truth: [B, kv]. A value that no binding shows has 0 votes, and there are `values`
    of them in all; equal winners share.
    """
    same = there[..., None, :] & (value[..., :, None] == value[..., None, :])
    votes = np.where(same, weight[..., None, :], 0.0).sum(axis=3)
    first = there & ~np.tril(same, k=-1).any(axis=3)  # one binding stands for all with its value
    unseen = values - first.sum(axis=2)
    best = np.where(first, votes, -np.inf).max(axis=2)
    best = np.where(unseen > 0, np.maximum(best, 0.0), best)
    winners = first & (votes >= best[..., None] - _TIE)
    unseen_wins = (unseen > 0) & (best <= _TIE)
    seen = (first & (value == truth[..., None])).any(axis=2)
    right = np.where(seen, (winners & (value == truth[..., None])).any(axis=2), unseen_wins)
    found: Float64 = right / (winners.sum(axis=2) + np.where(unseen_wins, unseen, 0))
    return found
