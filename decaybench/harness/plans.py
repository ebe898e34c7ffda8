"""The order of training batches: a pure function of (config, seed) and of the accuracies seen so far.

`mastery` moves to the next stage when the present one's running accuracy passes a share of what the stage's samples
allow, and goes back to earlier stages in a share of the batches. `epochs` goes through every stage's fixed examples in
each epoch. `mix` gives each stage its share of the batches, evenly spread.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from decaybench.core.draws import Draws
from decaybench.core.errors import UserError
from decaybench.core.hashing import key64
from decaybench.tasks.base import Stage

if TYPE_CHECKING:
    from decaybench.harness.config import TrainingConfig

_MEMORY = 0.9  # of the running accuracy: it is worth about the last ten batches


class Plan(ABC):
    """Says which samples come next. `state` is JSON-able, and `restore` goes on from it exactly."""

    total_steps: int
    steps_by_epoch: int | None = None

    @abstractmethod
    def next(self, step: int) -> tuple[int, NDArray[np.int64]]:
        """The stage and the sample indices of a step's batch, 0-based."""

    def saw(self, step: int, stage: int, accuracy: float) -> bool:
        """Tell a batch's accuracy on the labels trained on. Returns whether the plan moved on to another stage."""
        return False

    @property
    def stage(self) -> int:
        """The stage being learned."""
        return 0

    def mastered(self) -> list[int | None]:
        """For each stage the step at which it was mastered, or None."""
        return []

    def state(self) -> dict[str, Any]:
        """All that changes during training."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027 a plan may have no state
        """Go on from a `state`."""


class MasteryPlan(Plan):
    """The curriculum by mastery."""

    def __init__(
        self,
        stages: Sequence[Stage],
        config: TrainingConfig,
        seed: int,
        ceilings: Sequence[float | None] | None = None,
    ) -> None:
        """ceilings: the best accuracy that each stage's samples allow (`Task.ceiling`); None: all can be right."""
        self.total_steps = config.steps or 1500
        self._stages, self._config = stages, config
        self._wanted = [config.mastery * (1.0 if best is None else best) for best in ceilings or [None] * len(stages)]
        self._key = key64("plan", seed)
        self._stage = 0
        self._running = 0.0
        self._used = [0] * len(stages)
        self._mastered: list[int | None] = [None] * len(stages)

    def next(self, step: int) -> tuple[int, NDArray[np.int64]]:
        stage = self._stage
        if stage:
            draws = Draws(self._key, np.array([step]))
            if draws.uniform(0, 1)[0, 0] < self._config.review:
                stage = int(draws.integers(1, 1, stage)[0, 0])
        size = samples_a_batch(self._stages[stage], self._config)
        first = self._used[stage]
        self._used[stage] += size
        indices = np.arange(first, first + size, dtype=np.int64)
        examples = self._stages[stage].examples
        return stage, indices if examples is None else indices % examples

    def saw(self, step: int, stage: int, accuracy: float) -> bool:
        if stage != self._stage:
            return False
        # A model that is always right agrees with 1 - label_noise of the labels that it is trained on. The clean ones
        # are not looked at: it would be told what it is to do without.
        of_reachable = accuracy / (1 - (self._config.label_noise or 0))
        self._running = _MEMORY * self._running + (1 - _MEMORY) * of_reachable
        if self._running < self._wanted[stage] or self._mastered[stage] is not None:
            return False
        self._mastered[stage] = step
        if stage + 1 == len(self._stages):
            return False
        self._stage, self._running = stage + 1, 0.0
        return True

    @property
    def stage(self) -> int:
        return self._stage

    def mastered(self) -> list[int | None]:
        return list(self._mastered)

    def state(self) -> dict[str, Any]:
        return {
            "stage": self._stage,
            "running": self._running,
            "used": list(self._used),
            "mastered": list(self._mastered),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._stage, self._running = state["stage"], state["running"]
        self._used, self._mastered = list(state["used"]), list(state["mastered"])


class EpochPlan(Plan):
    """Fixed training sets, each gone through once an epoch: stage after stage, or in batches mixed over stages."""

    def __init__(self, stages: Sequence[Stage], config: TrainingConfig, seed: int) -> None:
        batches: list[tuple[int, int, int]] = []
        for number, stage in enumerate(stages):
            if stage.examples is None:
                raise UserError(f"training.plan=epochs needs task.stages.{number}.examples, the size of the set")
            size = samples_a_batch(stage, config)
            batches += [(number, first, min(first + size, stage.examples)) for first in range(0, stage.examples, size)]
        self._batches = batches
        self._shuffle, self._key = config.shuffle, key64("epochs", seed)
        self.steps_by_epoch = len(batches)
        self.total_steps = min(config.steps or len(batches) * config.epochs, len(batches) * config.epochs)
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def next(self, step: int) -> tuple[int, NDArray[np.int64]]:
        epoch, place = divmod(step, len(self._batches))
        if self._shuffle:
            if self._order is None or self._order[0] != epoch:
                draws = Draws(self._key, np.array([epoch]))
                self._order = epoch, draws.permutation(0, len(self._batches))[0]
            place = int(self._order[1][place])
        stage, first, last = self._batches[place]
        return stage, np.arange(first, last, dtype=np.int64)


class MixPlan(Plan):
    """One stage, or two that each have their share of the batches; a function of the step alone.

    The second stage has floor(s share) of the first s batches, evenly spread, and no sample of a stage comes twice.
    """

    def __init__(self, stages: Sequence[Stage], config: TrainingConfig) -> None:
        shares = [stage.share for stage in stages if stage.share is not None]
        if len(shares) < len(stages) or len(shares) > 2 or not math.isclose(math.fsum(shares), 1.0):
            raise UserError("training.plan=mix needs stages that have shares of the batches, as those of task text")
        self.total_steps = config.steps or 1500
        self._sizes = [samples_a_batch(stage, config) for stage in stages]
        self._share = shares[1] if len(shares) == 2 else 0.0

    def next(self, step: int) -> tuple[int, NDArray[np.int64]]:
        before = math.floor(step * self._share)
        stage = math.floor((step + 1) * self._share) - before
        size = self._sizes[stage]
        first = size * (before if stage else step - before)
        return stage, np.arange(first, first + size, dtype=np.int64)


def make_plan(
    stages: Sequence[Stage], config: TrainingConfig, seed: int, ceilings: Sequence[float | None] | None = None
) -> Plan:
    """The plan that `config` names. Raises UserError where the stages don't fit it.

    ceilings: the best accuracy that each stage's samples allow, by which plan mastery judges; None: 1 for all.
    """
    if config.plan == "mix":
        return MixPlan(stages, config)
    if any(stage.share not in (None, 1.0) for stage in stages):
        raise UserError(f"training.plan={config.plan} doesn't mix: stages with shares of the batches need plan mix")
    if config.plan == "mastery":
        return MasteryPlan(stages, config, seed, ceilings)
    return EpochPlan(stages, config, seed)


def samples_a_batch(stage: Stage, config: TrainingConfig) -> int:
    """Samples in a training batch of this stage."""
    return config.batch_samples or max(1, config.batch_tokens // stage.shape.length)
