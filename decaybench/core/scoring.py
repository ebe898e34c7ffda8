"""From counts to scores: the one rule that tasks score by and that records are checked by."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Metric = Literal["mean_accuracy", "all_correct"]


def score(metric: Metric, correct: NDArray[Any], asked: NDArray[Any]) -> NDArray[np.float64]:
    """Per-sample scores from per-sample counts.

    mean_accuracy: the share of a sample's questions answered; all_correct: 1 where all of them are.
    """
    if metric == "all_correct":
        return np.asarray(correct == asked, dtype=np.float64)
    return np.asarray(correct / asked, dtype=np.float64)
