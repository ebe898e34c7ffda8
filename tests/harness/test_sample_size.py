"""Sample sizes of equal writes are the sum over all tokens before, and near their limits far out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from decaybench.harness.sample_size import limit_of, sample_sizes


def test_theory_is_the_sum_over_all_tokens_before() -> None:
    draws = np.random.default_rng(0)
    g = -draws.exponential(0.3, (40, 2))
    found = sample_sizes(g)
    for head in range(2):
        for t in range(40):
            d = [math.exp(sum(g[j + 1 : t + 1, head])) for j in range(t + 1)]
            assert found[t, head] == pytest.approx(sum(d) ** 2 / sum(x * x for x in d), rel=1e-12)


@pytest.mark.parametrize("tau", [0.3, 2.0, 19.0])
def test_a_static_decay_saturates_at_its_limit_near_twice_its_timescale(tau: float) -> None:
    n = sample_sizes(np.full(600, -1 / tau))
    assert n[-1] == pytest.approx(limit_of(tau, 0.0, 600), rel=1e-9)
    if tau > 1:
        assert limit_of(tau, 0.0, 600) == pytest.approx(2 * tau, rel=0.05)


@pytest.mark.parametrize("a", [0.01, 1.0, 3.0])
def test_posts_slowest_head_grows_with_t_without_end(a: float) -> None:
    t = np.arange(1, 20_001)
    n = sample_sizes(-a / t)
    for position in (5_000, 20_000):
        assert n[position - 1] == pytest.approx(limit_of(position / a, 1.0, position), rel=2e-3)
    assert n[-1] / n[4_999] == pytest.approx(4, rel=2e-3)


@pytest.mark.parametrize("taper", [0.0, 1.0])
def test_without_decay_every_token_counts(taper: float) -> None:
    assert sample_sizes(np.zeros(50)).tolist() == list(range(1, 51))
    assert limit_of(math.inf, taper, 50) == 50
