"""The tests' own tools: an oracle that can't say no is none."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import nn

from tests import oracles
from tests.oracles.packages import _hidden


@pytest.mark.interpreter
def test_an_interpreted_kernel_is_its_plain_form():
    """Both are flash-linear-attention's: what fails here is the interpreter, not this package."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 70, 2, 16) for _ in range(3))
    streams = {"q": q, "k": k, "v": v, "g": -torch.rand(1, 70, 2)}
    want, _ = oracles.fla("ops.simple_gla.naive").naive_recurrent_simple_gla(**streams)
    got, _ = oracles.fla("ops.simple_gla").chunk_simple_gla(**streams)
    oracles.assert_close(got, want, 1e-5, "o")


def test_assert_close_says_what_is_off():
    want = torch.tensor([1.0, -4.0])
    oracles.assert_close(want + 3e-6, want, 1e-6)
    with pytest.raises(AssertionError, match=r"gate: off by 2\.50e-03 of the largest value, more than 1e-03"):
        oracles.assert_close(want + 0.01, want, 1e-3, "gate")
    oracles.assert_close(want + 0.01, want, 1e-3, floor=10)
    with pytest.raises(AssertionError, match="not"):
        oracles.assert_close(want[:1], want, 1)
    with pytest.raises(AssertionError, match="compares nothing"):
        oracles.assert_close(torch.zeros(2), torch.zeros(2), 1)
    with pytest.raises(AssertionError, match="off by nan"):
        oracles.assert_close(torch.tensor([1.0, torch.nan]), want, 1)


def test_laws_that_differ_a_little_are_told_apart():
    draws = np.random.default_rng(0)
    theirs = draws.uniform(0, 16, 10_000)
    oracles.assert_same_law(draws.uniform(0, 16, 8_000), theirs)
    with pytest.raises(AssertionError, match=r"rate: distributions 0\.06\d apart"):
        oracles.assert_same_law(draws.uniform(1, 16, 8_000), theirs, "rate")
    oracles.assert_same_law(np.ones(3), np.ones(5))
    with pytest.raises(AssertionError, match=r"not the constant 1\.0"):
        oracles.assert_same_law(np.array([1, 1, 1.1]), np.ones(5))
    with pytest.raises(AssertionError, match="too few"):
        oracles.assert_same_law(theirs[:100], theirs)


def test_randomised_parameters_are_all_new():
    module = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for name, parameter in oracles.randomise(module, 0).named_parameters():
        assert (parameter != before[name]).all(), name


def test_plain_loop_obeys_positions():
    """S counts what was written: padding adds nothing, a document's first token starts from an empty state."""
    o, final = oracles.plain_loop(
        lambda S, b, t, h: S + 1,
        lambda S, b, t, h: S[0],
        torch.full((2, 1, 1, 1), 5.0),
        [[8, 0, 9, 1, 2], [0, 1, 2, 3, 0]],
    )
    assert o[..., 0, 0].tolist() == [[6, 6, 7, 1, 2], [5, 1, 2, 3, 3]]
    assert final.flatten().tolist() == [2, 3]


def test_hidden_packages_come_back():
    with _hidden("numpy", "a_package_that_is_not_there"), pytest.raises(ImportError):
        import numpy  # noqa: F401
    assert sys.modules["numpy"] is np
    assert "a_package_that_is_not_there" not in sys.modules
