"""The rule that turns counts into scores."""

from __future__ import annotations

import numpy as np

from decaybench.core.scoring import score


def test_a_samples_score_is_its_share_of_right_answers_or_whether_all_are_right() -> None:
    correct, asked = np.array([4, 3, 0, 1]), np.array([4, 4, 2, 1])
    assert score("mean_accuracy", correct, asked).tolist() == [1.0, 0.75, 0.0, 1.0]
    assert score("all_correct", correct, asked).tolist() == [1.0, 0.0, 0.0, 1.0]
