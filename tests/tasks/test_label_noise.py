"""Label noise: as often as asked, uniform over the other values, a function of the sample and the place alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from decaybench.core.errors import UserError
from decaybench.tasks.base import IGNORED, Batch, Shape, Task
from decaybench.tasks.mqar import Mqar, MqarConfig, MqarShape
from decaybench.tasks.mqar_noisy import MqarNoisy, MqarNoisyConfig, MqarNoisyShape
from decaybench.tasks.niah import Niah, NiahConfig, NiahShape
from tests.statistics import fits

CASES: dict[str, tuple[Task[Any, Any, Any], Shape]] = {
    "mqar": (Mqar(MqarConfig(vocab_size=24)), MqarShape(length=32, kv=4)),
    "mqar-noisy": (MqarNoisy(MqarNoisyConfig(vocab_size=24)), MqarNoisyShape(length=64, kv=4)),
    "niah": (Niah(NiahConfig(value_tokens=12)), NiahShape(length=64, needles=4, queries=3, values=2)),
}


def clean(name: str, indices: np.ndarray, seed: int = 0) -> Batch:
    task, shape = CASES[name]
    return task.batch(shape, "train", seed, indices)


def noisy(name: str, share: float, indices: np.ndarray, seed: int = 0, shape: Shape | None = None) -> Batch:
    task, usual = CASES[name]
    return task.with_label_noise(clean(name, indices, seed), share, shape or usual, "train", seed, indices)


@pytest.mark.parametrize("name", CASES)
def test_every_label_alone_is_replaced_by_a_uniform_other_value(name: str) -> None:
    share, indices = 0.3, np.arange(4000)
    before, after = clean(name, indices), noisy(name, share, indices)
    assert np.array_equal(before.asked, after.asked) and (after.labels[~after.asked] == IGNORED).all()
    asked = before.asked
    replaced = (before.labels != after.labels) & asked
    n = asked.sum()
    assert abs(replaced.sum() - n * share) < 4 * np.sqrt(n * share * (1 - share))
    values = CASES[name][0].token_classes()["value"]
    steps = (after.labels - before.labels)[replaced] % len(values)
    assert fits(np.bincount(steps, minlength=len(values))[1:])
    assert after.labels[asked].min() == values.start and after.labels[asked].max() == values.stop - 1
    # Each label of a sample by itself: how many are replaced is binomial.
    per_sample = asked.sum(axis=1)[0]
    assert (asked.sum(axis=1) == per_sample).all() and per_sample > 1
    binomial = np.array([1.0])
    for _ in range(per_sample):
        binomial = np.convolve(binomial, [1 - share, share])
    counts = np.bincount(replaced.sum(axis=1), minlength=per_sample + 1)
    enough = binomial * len(indices) >= 5
    assert fits(np.append(counts[enough], counts[~enough].sum() + 5), np.append(binomial[enough], 5 / 4000))


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_all_else_stay(name: str) -> None:
    indices = np.arange(50)
    before = clean(name, indices)
    kept = before.labels.copy()
    after = CASES[name][0].with_label_noise(before, 0.5, CASES[name][1], "train", 0, indices)
    assert np.array_equal(before.labels, kept), "the clean batch is not written to"
    assert np.array_equal(before.tokens, after.tokens) and np.array_equal(before.distance, after.distance)
    assert before.details is after.details
    assert np.array_equal(noisy(name, 0.0, indices).labels, kept)


@pytest.mark.parametrize("name", CASES)
def test_it_is_a_function_of_the_sample_whatever_the_batch(name: str) -> None:
    indices = np.array([7, 3, 2**33, 11])
    together = noisy(name, 0.4, indices).labels
    for row, index in enumerate(indices):
        assert np.array_equal(noisy(name, 0.4, indices[row : row + 1]).labels[0], together[row])
        assert index >= 0
    assert np.array_equal(noisy(name, 0.4, indices[::-1].copy()).labels[::-1], together)


@pytest.mark.parametrize("name", CASES)
def test_it_differs_by_seed_and_shape(name: str) -> None:
    """On the same clean labels, so that only the noise can differ."""
    task, shape = CASES[name]
    indices = np.arange(300)
    batch = clean(name, indices)
    found = [
        (task.with_label_noise(batch, 0.5, of, split, seed, indices).labels != batch.labels)[batch.asked]
        for of, split, seed in (
            (shape, "train", 0),
            (shape, "train", 1),
            (shape, "validation", 0),
            (shape.model_copy(update={"length": shape.length + 2}), "train", 0),
        )
    ]
    for place, one in enumerate(found):
        for other in found[:place]:
            assert abs((one == other).mean() - 0.5) < 4 * 0.5 / np.sqrt(one.size)


def test_with_a_larger_share_these_labels_and_more_are_wrong() -> None:
    indices = np.arange(500)
    before = clean("mqar", indices).labels
    some, more = (noisy("mqar", share, indices).labels for share in (0.2, 0.6))
    wrong = some != before
    assert wrong.any() and np.array_equal(some[wrong], more[wrong]) and (more != before).sum() > 2 * wrong.sum()


def test_a_task_that_names_no_values_has_no_label_noise() -> None:
    class Unnamed(Mqar):
        def token_classes(self) -> dict[str, range]:
            return Task.token_classes(self)

    made, shape = Unnamed(MqarConfig()), MqarShape(length=16, kv=2)
    indices = np.arange(3)
    batch = made.batch(shape, "train", 0, indices)
    assert made.token_classes() == {} and made.references(batch) == {} and made.ceiling(shape) is None
    with pytest.raises(UserError, match=r"training\.label_noise: task mqar doesn't say which tokens can be an answer"):
        made.with_label_noise(replace(batch), 0.5, shape, "train", 0, indices)


def test_token_classes_of_mqar_and_niah_are_where_their_tokens_are() -> None:
    """By the samples: keys and values of MQAR at their places, needles by their marker."""
    made, shape = Mqar(MqarConfig(vocab_size=25)), MqarShape(length=32, kv=4)
    tokens = made.batch(shape, "train", 0, np.arange(500)).tokens
    classes = made.token_classes()
    assert list(classes) == ["filler", "key", "value"]
    assert set(tokens[:, 0:8:2].ravel()) == set(classes["key"]) and set(tokens[:, 1:8:2].ravel()) == set(
        classes["value"]
    )
    needle = Niah(NiahConfig(key_tokens=9, value_tokens=8, hay_tokens=7))
    classes = needle.token_classes()
    assert list(classes) == ["pad", "needle", "query", "key", "value", "hay"]
    batch = needle.batch(NiahShape(length=32, needles=3, queries=2), "train", 0, np.arange(500)).tokens
    rows, at = np.nonzero(batch == classes["needle"].start)
    assert set(batch[rows, at + 1]) == set(classes["key"]) and set(batch[rows, at + 2]) == set(classes["value"])
    asked, where = np.nonzero(batch == classes["query"].start)
    assert set(batch[asked, where + 1]) == set(classes["key"])


@pytest.mark.parametrize("name", CASES)
def test_token_classes_are_disjoint_and_of_the_vocabulary(name: str) -> None:
    task, _ = CASES[name]
    tokens = [token for several in task.token_classes().values() for token in several]
    assert sorted(tokens) == list(range(task.vocab_size)), "here every token has a class"
