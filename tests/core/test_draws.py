"""Counter-based draws: right numbers, right laws, and the same numbers in whatever batch."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decaybench.core.draws import _BLOCK, Draws, _order_of_times, _taken, philox4x32
from tests.statistics import fits

KEY = 0x0123_4567_89AB_CDEF


def draws(n: int, start: int = 0) -> Draws:
    return Draws(KEY, np.arange(start, start + n))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_random123s_known_answers(counter, key, expected):
    words = philox4x32(tuple(np.array([word], dtype=np.uint32) for word in counter), key)
    assert " ".join(f"{word:08x}" for word in words[0]) == expected


def test_a_block_is_the_philox_of_index_place_and_stream():
    index = 2**32 * 5 + 7
    block = Draws(KEY, np.array([index])).bits(stream=3, n=8)[0]
    counter = tuple(np.array([word], dtype=np.uint32) for word in (7, 5, 1, 3))
    assert block[4:].tolist() == philox4x32(counter, (0x89AB_CDEF, 0x0123_4567))[0].tolist()


def everything(source: Draws) -> list[np.ndarray]:
    return [
        source.bits(0, 7),
        source.integers(0, 5, 1000),
        source.uniform(1, 3),
        source.permutation(2, 6),
        source.distinct(3, 4, 9),
        source.weighted(5, 3, np.arange(1.0, 8.0)),
    ]


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5))
@settings(max_examples=25, deadline=None)
def test_a_samples_draws_do_not_depend_on_its_batch(indices):
    together = everything(Draws(KEY, np.array(indices)))
    for row, index in enumerate(indices):
        for block, alone in zip(together, everything(Draws(KEY, np.array([index]))), strict=True):
            assert np.array_equal(block[row], alone[0])


def test_an_empty_batch_and_zero_draws_have_the_right_shape():
    assert [block.shape[0] for block in everything(Draws(KEY, np.arange(0)))] == [0] * 6
    assert draws(3).bits(0, 0).shape == (3, 0)
    assert draws(3).distinct(0, 0, 5).shape == (3, 0)


def test_indices_beyond_32_bits_are_samples_of_their_own():
    indices = np.array([1, 2**32 + 1, 2**40 + 1, 2**62 + 1])
    assert len({tuple(row) for row in Draws(KEY, indices).bits(0, 4)}) == 4


def test_streams_keys_and_indices_share_no_numbers():
    blocks = [draws(50).bits(stream, 40) for stream in range(4)] + [Draws(KEY ^ 1, np.arange(50)).bits(0, 40)]
    words = np.concatenate([block.ravel() for block in blocks])
    # 8,000 words of 32 bits hold 0.007 repeats by chance.
    assert len(np.unique(words)) == len(words)


def test_streams_are_uncorrelated():
    first, second = draws(20_000).uniform(0, 1)[:, 0], draws(20_000).uniform(1, 1)[:, 0]
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(20_000)


def test_longer_draws_begin_with_the_shorter_ones():
    assert np.array_equal(draws(5).bits(0, 9)[:, :3], draws(5).bits(0, 3))


def test_uniform_lies_inside_the_open_interval_and_is_flat():
    numbers = draws(5_000).uniform(0, 8)
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert fits(np.bincount((numbers.ravel() * 50).astype(int), minlength=50))


def test_integers_are_uniform_below_each_bound():
    numbers = draws(6_000).integers(0, 3, np.array([[1, 7, 10]]))
    assert (numbers[:, 0] == 0).all()
    assert fits(np.bincount(numbers[:, 1], minlength=7))
    assert fits(np.bincount(numbers[:, 2], minlength=10))


def test_permutations_are_uniform():
    rows = draws(12_000).permutation(0, 4)
    assert (np.sort(rows, axis=1) == np.arange(4)).all()
    assert fits(np.unique(rows, axis=0, return_counts=True)[1])


@pytest.mark.parametrize(("n", "bound"), [(1, 1), (3, 3), (3, 7), (20, 1_000_000)])
def test_distinct_is_distinct_and_within_its_bound(n, bound):
    rows = draws(500).distinct(0, n, bound)
    assert rows.min() >= 0
    assert rows.max() < bound
    assert (np.diff(np.sort(rows, axis=1), axis=1) > 0).all()


def test_distinct_is_uniform_in_each_place_and_over_all_orders():
    rows = draws(30_000).distinct(0, 3, 5)
    for place in range(3):
        assert fits(np.bincount(rows[:, place], minlength=5))
    orders, counts = np.unique(rows, axis=0, return_counts=True)
    assert len(orders) == 60
    assert fits(counts)


def test_weighted_has_the_law_of_drawing_one_after_the_other():
    weights = np.array([5.0, 1.0, 0.5, 2.0])
    rows = draws(40_000).weighted(0, 2, weights)
    pairs = list(permutations(range(4), 2))
    exact = [weights[a] / weights.sum() * weights[b] / (weights.sum() - weights[a]) for a, b in pairs]
    counts = [int(((rows[:, 0] == a) & (rows[:, 1] == b)).sum()) for a, b in pairs]
    assert sum(counts) == len(rows)
    assert fits(np.array(counts), np.array(exact))


def test_weighted_can_draw_every_place():
    rows = draws(200).weighted(0, 6, np.arange(1.0, 7.0))
    assert (np.sort(rows, axis=1) == np.arange(6)).all()


# --- the fast forms draw the very numbers of the plain ones


def floyd(picks: np.ndarray, first: int) -> list[int]:
    """One row of Floyd's algorithm: place by place, each takes its pick unless an earlier place has it."""
    chosen: list[int] = []
    for place, pick in enumerate(picks.tolist()):
        chosen.append(first + place if pick in chosen else pick)
    return chosen


@given(st.integers(0, 40), st.sampled_from([0, 1, 2, 5, 60, 5000]), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_distinct_is_floyds_algorithm_place_by_place(n, spare, start):
    bound = n + spare
    source = draws(6, start)
    picks = source.integers(3, n, np.arange(bound - n, bound)[None, :] + 1)
    order = np.argsort(source.bits(4, n), axis=1, kind="stable")
    expected = [
        np.array(floyd(row, bound - n), dtype=np.int64)[places] for row, places in zip(picks, order, strict=True)
    ]
    assert source.distinct(3, n, bound).tolist() == [row.tolist() for row in expected]


def test_replaced_picks_that_follow_one_another_are_found():
    # Place 1 can't have 0 and takes 5; so place 2 can't have 5 and takes 6, and so on: a chain through all places.
    picks = np.array([[0, 0, 5, 6, 7], [0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [3, 3, 3, 3, 3]])
    taken = _taken(picks, 4)
    assert np.where(taken, 4 + np.arange(5), picks).tolist() == [floyd(row, 4) for row in picks]
    assert taken.tolist()[:2] == [[False, True, True, True, True], [False] * 5]


def test_weighted_sorts_equal_and_almost_equal_times_as_a_stable_sort_does():
    near = np.nextafter(1.0, 2.0)
    rows = np.array([[1.0, 1.0, 1.0, 0.5], [near, 1.0, near, 1.0], [3.0, 1.0, 2.0, 0.1], [np.inf, 1e-300, np.inf, 0.0]])
    assert np.array_equal(_order_of_times(rows), np.argsort(rows, axis=1, kind="stable"))
    wide = 1 + np.random.default_rng(0).integers(0, 9, size=(50, 300)) * (near - 1)
    assert np.array_equal(_order_of_times(wide), np.argsort(wide, axis=1, kind="stable"))


def test_blocks_of_counters_join_without_a_seam():
    n = 2 * _BLOCK + 3
    words = philox4x32(tuple(np.arange(n, dtype=np.uint32) + shift for shift in range(4)), (1, 2))
    for row in (0, _BLOCK - 1, _BLOCK, n - 1):
        alone = philox4x32(tuple(np.array([row + shift], dtype=np.uint32) for shift in range(4)), (1, 2))
        assert words[row].tolist() == alone[0].tolist()
