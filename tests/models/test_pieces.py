"""Pieces of rows: they cover all of them, in order, and are as large as they may be."""

from __future__ import annotations

import pytest
import torch

from decaybench.models.ops import pieces as module
from decaybench.models.ops.pieces import pieces

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("count", "size", "most"), [(7, 1, 3), (7, 2, 3), (6, 3, 9), (5, 100, 9), (1, 1, 1)])
def test_pieces_cover_all_rows_and_keep_within_the_most(count, size, most):
    threads = torch.get_num_threads()
    found = list(pieces(count, size, CPU, most))
    assert [row for at in found for row in range(count)[at]] == list(range(count))
    lengths = [at.stop - at.start for at in found]
    assert all(length == 1 or length * size <= most * threads for length in lengths)
    assert all((length + 1) * size > most * threads for length in lengths[:-1])


def test_without_a_limit_it_is_the_caches(monkeypatch):
    monkeypatch.setattr(module, "_CACHED", 4)
    assert list(pieces(9, 2, CPU)) == list(pieces(9, 2, CPU, 4))


def test_a_gpu_has_everything_in_one_piece():
    assert list(pieces(9, 10**9, GPU)) == [slice(0, 9)]
    assert list(pieces(0, 1, GPU)) == list(pieces(0, 1, CPU)) == []
