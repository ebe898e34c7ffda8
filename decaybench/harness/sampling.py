"""The samples of a task that a model is looked at with: the first ones, as an evaluation asks them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from decaybench.tasks.base import Batch, Cell, Task


def first_samples(
    task: Task[Any, Any, Any], cells: Sequence[Cell], samples: int, seed: int, batch_tokens: int
) -> Iterator[tuple[Cell, Batch]]:
    """The first test samples of each cell, `samples` in all or a few more, in batches of at most `batch_tokens`."""
    each = -(-samples // len(cells))
    for cell in cells:
        size = max(1, batch_tokens // cell.shape.length)
        for first in range(0, each, size):
            indices = np.arange(first, min(first + size, each))
            yield cell, task.batch(cell.shape, "test", seed, indices)
