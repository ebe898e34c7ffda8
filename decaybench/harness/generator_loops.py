"""MQAR's samples as plain Python loops, an example at a time: what our generator is measured against.

The rules are Zoology's (arXiv 2312.04927; `tasks.mqar`), drawn from NumPy's generators in sequence, so that a sample
depends on all that were drawn before it. `legacy` draws as Zoology's code does, by RandomState.choice, which puts the
whole vocabulary into a random order for each example's few keys; `modern` by Generator.choice, which doesn't.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from decaybench.tasks.base import IGNORED
from decaybench.tasks.mqar import Fill, MqarShape, slot_weights

Form = Literal["legacy", "modern"]
FORMS: tuple[Form, ...] = get_args(Form)
Int64 = NDArray[np.int64]


def mqar_loop(
    shape: MqarShape, n: int, *, vocab_size: int, fill: Fill, power: float = 0.01, seed: int = 0, form: Form = "legacy"
) -> tuple[Int64, Int64]:
    """Tokens and labels of n samples, int64 [n, T] each; the sizes must be ones that `Mqar.check` accepts."""
    draws = np.random.RandomState(seed) if form == "legacy" else np.random.default_rng(seed)
    whole: Callable[..., Int64] = draws.randint if isinstance(draws, np.random.RandomState) else draws.integers
    kv, half = shape.kv, vocab_size // 2
    keys, values = np.arange(1, half), np.arange(half, vocab_size)
    weights = slot_weights((shape.length - 2 * kv) // 2, power)
    chances = weights / weights.sum()
    tokens = np.zeros((n, shape.length), dtype=np.int64)
    labels = np.full((n, shape.length), IGNORED, dtype=np.int64)
    for row in range(n):
        own_keys = draws.choice(keys, size=kv, replace=False)
        own_values = draws.choice(values, size=kv, replace=False)
        asked = 2 * kv + 2 * draws.choice(len(chances), size=kv, replace=False, p=chances)
        tokens[row, 0 : 2 * kv : 2], tokens[row, 1 : 2 * kv : 2] = own_keys, own_values
        tokens[row, asked], labels[row, asked] = own_keys, own_values
        if fill == "zero":
            continue
        free = tokens[row] == 0
        words = whole(0, vocab_size, free.sum())
        while fill == "random-safe" and (hit := np.isin(words, own_keys)).any():
            words[hit] = whole(0, vocab_size, hit.sum())
        tokens[row, free] = words
    return tokens, labels
