"""Greedy generation from the state against full forward passes over one prompt at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decaybench.harness.generation import greedy
from tests.models import small

MODELS = [
    *[(name, None, None) for name in small.SIZES],
    ("mamba2", {"variant": "paper", "horizon": 32}, None),
    ("mamba2", None, {}),
]
LENGTHS = [12, 5, 1, 9]


@pytest.fixture(
    params=MODELS, ids=[name + "+post" * bool(post) + "+bft" * (bft is not None) for name, post, bft in MODELS]
)
def model(request):
    name, post, bft = request.param
    return small.model(name, post=post, bft=bft)


@pytest.fixture
def one():
    return small.model()


def prompts(lengths, seed=0):
    return [small.tokens(length, seed=seed + place).numpy() for place, length in enumerate(lengths)]


@torch.no_grad()
def by_forward(model, prompt, n, stop=frozenset()):
    """Token after token by full passes over all that is there."""
    text, new = prompt.tolist(), []
    while len(new) < n and not (new and new[-1] in stop):
        new.append(int(model(torch.tensor([text + new])).logits[0, -1].argmax()))
    return new


def test_every_row_is_the_argmax_of_full_passes(model):
    rows = prompts(LENGTHS)
    want = [by_forward(model, row, 8) for row in rows]
    assert len({tuple(row) for row in want}) > 1
    assert greedy(model, rows, 8, device="cpu") == want
    assert greedy(model, rows[::-1], 8, device="cpu") == want[::-1]
    assert [greedy(model, [row], 8, device="cpu")[0] for row in rows] == want


def test_prompts_of_one_length_need_no_padding(one):
    rows = prompts([7, 7])
    assert greedy(one, rows, 5, device="cpu") == [by_forward(one, row, 5) for row in rows]


def test_a_prompt_is_read_in_pieces_through_the_state(one):
    rows = prompts([5000, 3])
    assert greedy(one, rows, 3, device="cpu") == [by_forward(one, row, 3) for row in rows]


def test_each_row_has_its_own_number_of_tokens(one):
    rows, limits = prompts(LENGTHS), [3, 0, 6, 1]
    want = [by_forward(one, row, limit) for row, limit in zip(rows, limits, strict=True)]
    assert greedy(one, rows, limits, device="cpu") == want
    assert greedy(one, rows, 0, device="cpu") == [[], [], [], []]
    assert greedy(one, [], 3, device="cpu") == []


def test_a_row_ends_with_a_stop_token_and_leaves_the_others_alone(one):
    rows = prompts(LENGTHS, seed=3)
    free = greedy(one, rows, 10, device="cpu")
    stop = frozenset({free[0][0], free[1][3]})
    want = [by_forward(one, row, 10, stop) for row in rows]
    assert want != free
    assert greedy(one, rows, 10, device="cpu", stop_ids=stop) == want


def test_a_row_ends_where_the_caller_says_so(one):
    rows = prompts(LENGTHS)
    free = greedy(one, rows, 9, device="cpu")
    calls = []

    def finished(row, ids):
        calls.append((row, len(ids)))
        return len(ids) == [4, 2, 9, 5][row]

    got = greedy(one, rows, 9, device="cpu", finished=finished)
    assert got == [row[:end] for row, end in zip(free, [4, 2, 9, 5], strict=True)]
    asked = {row: max(n for which, n in calls if which == row) for row in range(4)}
    assert asked == {0: 4, 1: 2, 2: 8, 3: 5}  # not after the last token that a row may have


def test_what_nothing_can_follow_is_refused(one):
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        greedy(one, [np.array([1]), np.array([], dtype=np.int64)], 2, device="cpu")
    with pytest.raises(ValueError, match="new_tokens has 2 numbers for 1 prompts"):
        greedy(one, [np.array([1])], [2, 3], device="cpu")
