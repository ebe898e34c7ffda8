"""A task for tests: spell a word again, in packed rows with padding anywhere; with likelihoods, and a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from decaybench.core.draws import Draws
from decaybench.core.hashing import file_digest
from decaybench.core.scoring import Metric
from decaybench.tasks import registry
from decaybench.tasks.base import (
    IGNORED,
    Batch,
    Cell,
    EvaluationConfig,
    MissingDataError,
    Shape,
    Stage,
    Task,
    TaskConfig,
)


class SpellingConfig(TaskConfig):
    """file: what the words' alphabet is read from; sha256: of it."""

    paths: ClassVar[frozenset[str]] = frozenset({"file"})

    name: Literal["spelling"] = "spelling"
    train_length: int = 16
    file: str | None = None
    sha256: str | None = None


class Spelling(Task[SpellingConfig, Shape, EvaluationConfig]):
    """A row: padding, another document of three tokens, a word of 3 to 5 letters, a padding, the word again."""

    name: ClassVar[str] = "spelling"
    version: ClassVar[int] = 1
    metric: ClassVar[Metric] = "all_correct"
    likelihood: ClassVar[bool] = True
    pads: ClassVar[bool] = True

    @property
    def vocab_size(self) -> int:
        return 12

    def check(self, shape: Shape) -> None:
        pass

    def stages(self) -> Sequence[Stage]:
        return [Stage(shape=Shape(length=self.config.train_length))]

    def cells(self, evaluation: EvaluationConfig, lengths: Sequence[int]) -> list[Cell]:
        return [Cell(Shape(length=n), "spelling", {}) for n in lengths]

    def ready(self, cells: Sequence[Cell], samples: int) -> None:
        if self.config.file is None:
            return
        path = Path(self.config.file)
        if not path.is_file() or file_digest(path) != self.config.sha256:
            raise MissingDataError(f"task.file={path}: not the file", f"{path.name}, sha256 {self.config.sha256}")

    def _sample(self, shape: Shape, draws: Draws) -> Batch:
        T = shape.length
        sizes = 3 + draws.integers(0, 1, 3)[:, 0]
        words = draws.integers(1, 5, 12)
        before = draws.integers(2, 3, 12)
        tokens, labels, positions = (np.full((len(sizes), T), fill) for fill in (0, IGNORED, 0))
        for row, n in enumerate(sizes.tolist()):
            start = T - 4 - 2 * n
            tokens[row, start : start + 3], positions[row, start : start + 3] = before[row], (1, 2, 3)
            word, first, again = words[row, :n], start + 3, start + 4 + n
            tokens[row, first : first + n], positions[row, first : first + n] = word, np.arange(1, n + 1)
            tokens[row, again:], positions[row, again:] = word, np.arange(n + 1, 2 * n + 1)
            labels[row, again:-1] = word[1:]
        return Batch(tokens, labels, np.where(labels == IGNORED, 0, 1), positions=positions)


@pytest.fixture
def spelling(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Spelling]]:
    """The task, registered."""
    entry = registry.TaskEntry(Spelling, SpellingConfig, EvaluationConfig, "spelling, for tests")
    monkeypatch.setitem(registry.TASKS, "spelling", entry)
    yield Spelling


def spelling_config(**settings: Any) -> dict[str, Any]:
    """Plain data for a tiny run."""
    return {
        "model": {"d_model": 16, "mixer": {"d_state": 8, "headdim": 8}},
        "task": {"name": "spelling", **settings.pop("task", {})},
        "training": {"steps": 6, "batch_samples": 4},
        "evaluation": {"lengths": ["1x", "2x"], "samples": 7},
        "batch_tokens": 64,
        **settings,
    }
