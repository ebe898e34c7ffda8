"""Layouts, compaction and the check of positions, each against its definition element by element."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decaybench.core.positions import Layout, check_positions, compaction


@st.composite
def batches(draw):
    """Positions [B, T] with padding anywhere, and what each row has seen before (0: nothing)."""
    T = draw(st.integers(1, 12))
    rows, seen = [], []
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, 3))
        seen.append(at)
        row = []
        for kind in draw(st.lists(st.sampled_from(["token", "token", "pad", "start"]), min_size=T, max_size=T)):
            at = at if kind == "pad" else 1 if kind == "start" else at + 1
            row.append(0 if kind == "pad" else at)
        rows.append(row)
    return torch.tensor(rows), torch.tensor(seen)


@settings(max_examples=100, deadline=None)
@given(batches())
def test_compaction_moves_padding_to_the_end_and_keeps_the_order(batch):
    positions, _ = batch
    order = compaction(positions)
    rows = positions if order is None else positions.gather(1, order)
    for row, compacted in zip(positions.tolist(), rows.tolist(), strict=True):
        real = [p for p in row if p]
        assert compacted == real + [0] * (len(row) - len(real))
    if order is not None:
        assert torch.equal(order.sort(1).values, torch.arange(positions.shape[1]).expand_as(order))


@settings(max_examples=100, deadline=None)
@given(batches(), st.booleans(), st.booleans())
def test_a_layout_says_what_the_positions_mean(batch, has_state, known):
    """known: whether it is told what rows have seen; one that has seen nothing has no state to reset."""
    positions, seen = batch
    layout = Layout.of(positions, has_state=has_state, seen=seen if known else None)
    valid = positions > 0
    assert torch.equal(torch.ones_like(valid) if layout.valid is None else layout.valid, valid)
    assert (layout.valid is None) == bool(valid.all())
    segments = torch.zeros_like(positions) if layout.segments is None else layout.segments
    for row, numbers, before in zip(positions.tolist(), segments.tolist(), seen.tolist(), strict=True):
        number = 0
        for t, position in enumerate(row):
            number += position == 1 and (t > 0 or (has_state and not (known and before == 0)))
            assert numbers[t] == number
    assert torch.equal(layout.counts(len(positions)), valid.sum(1))
    last = [
        next((p for p in reversed(row) if p), int(before)) for row, before in zip(positions.tolist(), seen, strict=True)
    ]
    order = compaction(positions)
    compacted = Layout.of(positions if order is None else positions.gather(1, order), has_state=has_state)
    assert compacted.last_position(seen).tolist() == last


@settings(max_examples=100, deadline=None)
@given(batches())
def test_see_back_is_whether_an_earlier_token_is_of_the_same_document(batch):
    positions, seen = batch
    order = compaction(positions)
    rows = positions if order is None else positions.gather(1, order)
    layout = Layout.of(rows, has_state=True)
    for lag in range(1, 5):
        back = layout.see_back(lag)
        for row, before, b in zip(rows.tolist(), seen.tolist(), range(len(rows)), strict=True):
            for t, position in enumerate(row):
                if position == 0 or back is None:
                    continue
                # The `lag` tokens before t: those of this call, and before them those that the state has seen.
                earlier = [*range(1, before + 1), *row[:t]][-lag:]
                same = len(earlier) == lag and earlier == list(range(position - lag, position)) and position > lag
                assert bool(back[b, t]) == same


@settings(max_examples=100, deadline=None)
@given(batches())
def test_continued_positions_pass_with_their_state(batch):
    positions, seen = batch
    check_positions(positions, seen)


@pytest.mark.parametrize(
    ("positions", "seen", "said"),
    [
        ([[1, 2, 4]], None, "row 0 goes from 2 to 4"),
        ([[1, 2, 2]], None, "row 0 goes from 2 to 2"),
        ([[1, 2], [5, 7]], None, "row 1 goes from 5 to 7"),
        ([[1, 0, 3]], None, "row 0 goes from 1 to 3"),
        ([[-1, 1]], None, "row 0 goes from 0 to -1"),
        ([[5, 6]], [3], "row 0 goes from 3 to 5"),
        ([[0, 5]], [5], "row 0 goes from 5 to 5"),
    ],
)
def test_positions_that_jump_are_refused(positions, seen, said):
    with pytest.raises(ValueError, match=said):
        check_positions(torch.tensor(positions), None if seen is None else torch.tensor(seen))


@pytest.mark.parametrize(
    ("positions", "seen"),
    [
        ([[7, 8, 9]], None),
        ([[0, 7, 0, 8]], None),
        ([[7, 8, 1, 2]], None),
        ([[7, 8]], [0]),  # a row that has seen nothing may begin in the middle of a document
        ([[0, 7], [4, 5]], [0, 3]),
        ([[0, 0]], [9]),
        ([[1, 2]], [9]),
    ],
)
def test_positions_that_may_be(positions, seen):
    check_positions(torch.tensor(positions), None if seen is None else torch.tensor(seen))


def test_a_fresh_layout_counts_from_one():
    layout = Layout.fresh(4, torch.device("cpu"))
    assert layout.positions.tolist() == [[1, 2, 3, 4]]
    assert layout.valid is layout.resets is layout.segments is None
    assert layout.counts(3).tolist() == [4, 4, 4]
    assert layout.last_position(torch.zeros(3, dtype=torch.long)).tolist() == [4, 4, 4]


def test_a_row_without_tokens_keeps_its_last_position():
    layout = Layout.of(torch.tensor([[0, 0], [1, 0]]), has_state=True)
    assert layout.last_position(torch.tensor([9, 9])).tolist() == [9, 1]
