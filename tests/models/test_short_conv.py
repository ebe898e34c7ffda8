"""The short convolution against torch's conv1d on each document alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from decaybench.core.positions import Layout
from decaybench.models.ops.short_conv import conv_tail, short_conv
from tests.models.small import largest

C = 3


def by_document(x, weight, bias):
    """One document [T, C] through torch's own convolution."""
    W = weight.shape[1]
    return F.conv1d(F.pad(x.T[None], (W - 1, 0)), weight[:, None], bias, groups=C)[0].T


def parameters(W, seed=0):
    draws = torch.Generator().manual_seed(seed)
    shapes = ((C, W), (C,))
    return tuple(torch.randn(shape, generator=draws, dtype=torch.float64).requires_grad_() for shape in shapes)


def rows_of(lengths, width, seed=0, dtype=torch.float64):
    """Rows of packed documents with padding (junk) at the end."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(len(lengths), width, C, generator=draws, dtype=dtype).requires_grad_()
    positions = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, documents in enumerate(lengths):
        filled = [t for length in documents for t in range(1, length + 1)]
        positions[row, : len(filled)] = torch.tensor(filled, dtype=torch.long)
    return x, positions


def spans(lengths):
    for row, documents in enumerate(lengths):
        start = 0
        for length in documents:
            yield row, slice(start, start + length)
            start += length


LENGTHS = [[5, 1, 4], [11], [], [1, 1, 2, 3], [2]]


@pytest.mark.parametrize("W", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("with_bias", [True, False])
def test_each_document_is_torchs_convolution(W, with_bias):
    x, positions = rows_of(LENGTHS, 12)
    weight, bias = parameters(W)
    bias = bias if with_bias else None
    y, _ = short_conv(x, weight, bias, Layout.of(positions), None)
    got = torch.cat([y[row, span] for row, span in spans(LENGTHS)])
    want = torch.cat([by_document(x[row, span], weight, bias) for row, span in spans(LENGTHS)])
    assert largest(got, want) < 1e-13
    sources = [x, weight] if bias is None else [x, weight, bias]
    ramp = torch.linspace(-1, 2, got.numel(), dtype=got.dtype).view(got.shape)
    for a, b in zip(
        torch.autograd.grad((got * ramp).sum(), sources), torch.autograd.grad((want * ramp).sum(), sources), strict=True
    ):
        assert largest(a, b) < 1e-12


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=1, max_size=3),
    st.integers(1, 5),
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
)
def test_split_anywhere_with_the_tail_carried(lengths, W, cuts):
    width = max([sum(documents) for documents in lengths] + [1]) + 1
    x, positions = rows_of(lengths, width)
    weight, bias = parameters(W)
    whole, inputs = short_conv(x, weight, bias, Layout.of(positions), None)
    edges = sorted({0, width, *(cut for cut in torch.tensor(cuts).cumsum(0).tolist() if cut < width)})
    tail, parts = None, []
    for start, end in itertools.pairwise(edges):
        layout = Layout.of(positions[:, start:end], has_state=tail is not None)
        y, seen = short_conv(x[:, start:end], weight, bias, layout, tail)
        tail = conv_tail(seen, layout, W)
        parts.append(y)
    real = positions > 0
    assert largest(torch.cat(parts, dim=1)[real], whole[real]) < 1e-13
    assert largest(tail, conv_tail(inputs, Layout.of(positions), W)) == 0


def test_the_tail_holds_the_last_documents_inputs_and_nothing_older():
    x, positions = rows_of([[5, 2], [9], [], [8, 1]], 10)
    _, inputs = short_conv(x, *parameters(4), Layout.of(positions), None)
    tail = conv_tail(inputs, Layout.of(positions), 4)
    none = torch.zeros(1, C, dtype=x.dtype)
    assert torch.equal(tail[0], torch.cat([none, x[0, 5:7]]))
    assert torch.equal(tail[1], x[1, 6:9])
    assert torch.equal(tail[2], torch.zeros(3, C, dtype=x.dtype))
    assert torch.equal(tail[3], torch.cat([none, none, x[3, 8:9]]))


def test_a_row_of_padding_keeps_its_tail():
    tail = torch.randn(2, 3, C, dtype=torch.float64)
    x, _ = rows_of([[], []], 5)
    positions = torch.tensor([[0] * 5, [9, 10, 0, 0, 0]])
    layout = Layout.of(positions, has_state=True)
    _, inputs = short_conv(x, *parameters(4), layout, tail)
    after = conv_tail(inputs, layout, 4)
    assert torch.equal(after[0], tail[0])
    assert torch.equal(after[1], torch.cat([tail[1, 2:], x[1, :2]]))


def test_gradients_reach_back_through_the_tail():
    x, positions = rows_of([[8], [8]], 8)
    weight, bias = parameters(4)

    def run(x, weight, bias):
        first = Layout.of(positions[:, :3])
        y, inputs = short_conv(x[:, :3], weight, bias, first, None)
        rest = Layout.of(positions[:, 3:], has_state=True)
        z, _ = short_conv(x[:, 3:], weight, bias, rest, conv_tail(inputs, first, 4))
        return torch.cat([y, z], dim=1)

    assert torch.autograd.gradcheck(run, (x, weight, bias))
