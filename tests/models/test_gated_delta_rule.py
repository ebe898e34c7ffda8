"""The gated delta rule's two forms against the formula as a plain loop and flash-linear-attention's, with gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from decaybench.core.positions import Layout
from decaybench.models.ops.gated_delta_rule import (
    gated_delta_rule,
    gated_delta_rule_chunked,
    gated_delta_rule_recurrent,
)
from tests import oracles
from tests.models.small import largest, row_of_positions

FORMS = [gated_delta_rule_recurrent, gated_delta_rule_chunked]


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor
    initial_state: Tensor | None
    positions: list[list[int]]

    @property
    def tensors(self) -> list[Tensor]:
        found = [self.q, self.k, self.v, self.beta, self.log_decay]
        return found if self.initial_state is None else [*found, self.initial_state]

    def layout(self) -> Layout:
        return Layout.of(torch.tensor(self.positions), has_state=self.initial_state is not None)

    def run(self, form, **options):
        return form(
            *self.tensors[:5],
            initial_state=self.initial_state,
            output_final_state=True,
            layout=self.layout(),
            **options,
        )

    def to(self, dtype: torch.dtype) -> Inputs:
        moved = [x.detach().to(dtype).requires_grad_() for x in self.tensors]
        return Inputs(*moved[:5], moved[5] if len(moved) > 5 else None, self.positions)


def make(B=2, T=9, H=3, K=3, V=2, *, state=True, positions=None, seed=0, dtype=torch.float64) -> Inputs:
    """Keys of length 1 and writes of 0 to 2: down to where a write turns what it finds into its negative."""
    draws = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=draws, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(shape, generator=draws, dtype=torch.float64)

    start = 7 if state else 0  # a row with a state goes on from its seventh token
    return Inputs(
        normal(B, T, H, K),
        F.normalize(normal(B, T, H, K), dim=-1),
        normal(B, T, H, V),
        2 * uniform(B, T, H),
        -4 * uniform(B, T, H).pow(3),
        normal(B, H, K, V) if state else None,
        positions or [list(range(start + 1, start + T + 1))] * B,
    ).to(dtype)


def plain_loop(inputs: Inputs):
    q, k, v, beta, log_decay = inputs.tensors[:5]
    B, _, H, V = v.shape

    def write(S, b, t, h):
        decayed = log_decay[b, t, h].exp() * S
        return decayed + torch.outer(k[b, t, h], beta[b, t, h] * (v[b, t, h] - k[b, t, h] @ decayed))

    empty = torch.zeros(B, H, k.shape[-1], V, dtype=v.dtype)
    state = empty if inputs.initial_state is None else inputs.initial_state
    return oracles.plain_loop(write, lambda S, b, t, h: q[b, t, h] @ S, state, inputs.positions)


def gradients(outputs, inputs: Inputs) -> list[Tensor]:
    o, final = outputs
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).cos().view(x.shape) for x in (o, final)]
    loss = (o * weights[0]).sum() + (final * weights[1]).sum()
    return list(torch.autograd.grad(loss, inputs.tensors, materialize_grads=True, retain_graph=True))


def assert_same(got, want, inputs: Inputs, bound: float, *, wanted_of: Inputs | None = None) -> None:
    for a, b in zip(got, want, strict=True):
        assert largest(a.to(b.dtype), b) < bound * max(1.0, float(b.detach().abs().max()))
    for a, b in zip(gradients(got, inputs), gradients(want, wanted_of or inputs), strict=True):
        assert largest(a.to(b.dtype), b) < bound * max(1.0, float(b.detach().abs().max()))


@st.composite
def cases(draw):
    T, state = draw(st.integers(1, 19)), draw(st.booleans())
    B, H = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    positions = [draw(row_of_positions(T, state)) for _ in range(B)]
    K, V, seed = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(0, 99))
    return make(B, T, H, K, V, state=state, positions=positions, seed=seed), draw(st.integers(1, 24))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_both_forms_are_the_plain_loop(case):
    inputs, chunk = case
    want = plain_loop(inputs)
    assert_same(inputs.run(gated_delta_rule_recurrent), want, inputs, 1e-11)
    assert_same(inputs.run(gated_delta_rule_chunked, chunk_size=chunk), want, inputs, 1e-11)
    assert_same(inputs.run(gated_delta_rule, chunk_size=chunk), want, inputs, 1e-11)


@pytest.mark.parametrize("T", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("chunk", [1, 3, 4, 13, 100])
def test_any_length_and_any_chunk_without_a_layout(T, chunk):
    inputs = make(T=T, state=False)
    got = gated_delta_rule_chunked(*inputs.tensors, output_final_state=True, chunk_size=chunk)
    assert_same(got, plain_loop(inputs), inputs, 1e-11)


@pytest.mark.parametrize("chunk", [1, 2, 3, 8])
def test_gradients_by_finite_differences(chunk):
    inputs = make(B=1, T=5, H=2, K=2, V=2, positions=[[8, 0, 1, 2, 3]])

    def run(*tensors):
        return Inputs(*tensors, inputs.positions).run(gated_delta_rule_chunked, chunk_size=chunk)

    assert torch.autograd.gradcheck(run, inputs.tensors)


def test_gradients_where_nothing_is_written():
    """beta = 0 writes nothing, but its gradient says what a write would do."""
    inputs = make(T=10)
    inputs.beta.data[:, ::2] = 0.0
    got = inputs.run(gated_delta_rule_chunked, chunk_size=4)
    assert_same(got, plain_loop(inputs), inputs, 1e-11)
    assert gradients(got, inputs)[3][:, ::2].abs().min() > 1e-6


@pytest.mark.parametrize("cut", [1, 4, 8, 15])
def test_the_final_state_carries_on(cut):
    inputs = make(T=16)
    whole = inputs.run(gated_delta_rule_chunked, chunk_size=4)
    state, parts = inputs.initial_state, []
    for piece in (slice(0, cut), slice(cut, 16)):
        part, state = gated_delta_rule(
            *(x[:, piece] for x in inputs.tensors[:5]), initial_state=state, output_final_state=True, chunk_size=4
        )
        parts.append(part)
    assert_same((torch.cat(parts, dim=1), state), whole, inputs, 1e-11)


def test_non_contiguous_inputs_are_read_as_they_are():
    inputs = make(T=12)
    strided = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in inputs.tensors]
    moved = Inputs(*strided, inputs.positions)
    expanded = inputs.v[:1].expand(2, -1, -1, -1)
    for form in FORMS:
        assert_same(moved.run(form), inputs.run(form), moved, 1e-12, wanted_of=inputs)
        got = replace(inputs, v=expanded).run(form)
        assert_same(got, replace(inputs, v=expanded.contiguous()).run(form), inputs, 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_padding_keeps_its_state_to_the_bit(form):
    inputs = make(T=6, positions=[[0] * 6, [8, 9, 10, 11, 12, 13]])
    _, final = inputs.run(form)
    assert torch.equal(final[0], inputs.initial_state[0])
    assert not torch.equal(final[1], inputs.initial_state[1])


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("chunk", [16, 64])
def test_one_key_written_again_and_again_in_float32(beta, chunk):
    """beta 1 replaces what the key held, beta 2 reflects it: the values that a sum of powers would lose."""
    inputs = make(T=150, K=8, V=4)
    inputs.k.data[:] = inputs.k.data[:, :1]
    inputs.beta.data[:] = beta
    inputs.log_decay.data[:] *= 1e-4
    single = inputs.to(torch.float32)
    single.k.data = F.normalize(single.k.data, dim=-1)
    exact = single.to(torch.float64)
    got = single.run(gated_delta_rule_chunked, chunk_size=chunk)
    assert_same(got, plain_loop(exact), single, 2e-5, wanted_of=exact)


def test_float32_is_close_to_float64():
    inputs = make(B=1, T=200, H=2, K=16, V=16, state=False)
    single = inputs.to(torch.float32)
    exact = single.to(torch.float64)
    want = exact.run(gated_delta_rule_recurrent)
    for form in FORMS:
        assert_same(single.run(form), want, single, 2e-5, wanted_of=exact)


@pytest.mark.parametrize("form", FORMS)
def test_decays_and_state_are_float32_under_bfloat16_inputs(form):
    T = 300
    inputs = make(B=1, T=T, H=1, K=4, V=4, state=False)
    q, k, v, beta = (x.detach().bfloat16() for x in inputs.tensors[:4])
    # Slower than bfloat16 can tell from no decay at all: exp(-0.001) rounds to 1 there.
    log_decay = torch.full((1, T, 1), -1e-3)
    o, final = form(q, k, v, beta, log_decay, output_final_state=True)
    exact = form(*(x.double() for x in (q, k, v, beta, log_decay)), output_final_state=True)
    assert o.dtype == torch.bfloat16
    assert final.dtype == torch.float32
    assert largest(final.double(), exact[1]) < 1e-4
    assert largest(o.double(), exact[0]) < 2**-8 * float(exact[0].abs().max())


@pytest.mark.parametrize("form", FORMS)
def test_autocast_does_not_reach_inside(form):
    inputs = make(T=20, dtype=torch.float32)
    want = inputs.run(form)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = inputs.run(form)
        assert_same(got, want, inputs, 1e-6)
    assert got[0].dtype == got[1].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_decays_are_exact_and_finite(dtype):
    """A log-decay of -1e5 beside mild ones must cost the mild ones nothing, nor overflow above the diagonal."""
    inputs = make(T=40)
    extremes = torch.tensor([0.0, -1e-6, -1.0, -30.0, -1e5], dtype=torch.float64)
    choice = torch.randint(0, 5, inputs.log_decay.shape, generator=torch.Generator().manual_seed(1))
    inputs.log_decay = extremes[choice]
    inputs = inputs.to(dtype)
    exact = inputs.to(torch.float64)
    want = plain_loop(exact)
    for form in FORMS:
        got = inputs.run(form)
        assert all(x.isfinite().all() for x in [*got, *gradients(got, inputs)])
        assert_same(got, want, inputs, 1e-11 if dtype == torch.float64 else 1e-4, wanted_of=exact)


@pytest.mark.parametrize("log_decay", [-1e5, -30.0, -1e-6, 0.0])
def test_one_extreme_decay_throughout(log_decay):
    inputs = make(T=70, state=False, dtype=torch.float32)
    inputs.log_decay.data[:] = log_decay
    got = inputs.run(gated_delta_rule_chunked)
    assert all(x.isfinite().all() for x in [*got, *gradients(got, inputs)])
    if log_decay <= -30:  # nothing but the last write is left
        written = inputs.beta[:, -1, :, None] * inputs.v[:, -1]
        assert largest(got[1], torch.einsum("bhk,bhv->bhkv", inputs.k[:, -1], written)) < 1e-6


def test_no_final_state_unless_asked_for():
    assert gated_delta_rule(*make().tensors[:5])[1] is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": (2, 9, 3, 4)}, r"q, k \[B,T,H,K\]"),
        ({"k": (2, 8, 3, 3)}, r"q, k \[B,T,H,K\]"),
        ({"beta": (2, 9, 2)}, r"beta, log_decay \[B,T,H\]"),
        ({"log_decay": (2, 9, 2)}, r"beta, log_decay \[B,T,H\]"),
        ({"initial_state": (2, 3, 2, 3)}, r"initial_state must be \(2, 3, 3, 2\), not \(2, 3, 2, 3\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, said):
    shapes = {
        "q": (2, 9, 3, 3),
        "k": (2, 9, 3, 3),
        "v": (2, 9, 3, 2),
        "beta": (2, 9, 3),
        "log_decay": (2, 9, 3),
    } | change
    with pytest.raises(ValueError, match=said):
        gated_delta_rule(**{name: torch.zeros(shape) for name, shape in shapes.items()})


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match="no backend 'fla'; known: torch"):
        gated_delta_rule(*make().tensors[:5], backend="fla")


@pytest.mark.interpreter
@pytest.mark.parametrize("T", [40, 130])
def test_it_is_flash_linear_attentions(T):
    """Its two naive forms, which compute in float32, scale q and know no padding."""
    naive = oracles.fla("ops.gated_delta_rule.naive")
    inputs = make(T=T, K=8, V=16, dtype=torch.float32)
    q, k, v, beta, log_decay, initial_state = inputs.tensors
    given = {"q": q, "k": k, "v": v, "beta": beta, "g": log_decay, "scale": 1.0}
    got = inputs.run(gated_delta_rule)
    for theirs in (naive.naive_recurrent_gated_delta_rule, naive.naive_chunk_gated_delta_rule):
        want = theirs(**given, initial_state=initial_state, output_final_state=True)
        assert_same(got, want, inputs, 1e-5)


@pytest.mark.interpreter
@pytest.mark.parametrize("documents", [None, [9, 64, 1, 7]])
def test_it_is_their_kernel(documents):
    """Which takes documents as offsets, and a state before each; ours knows one before the first."""
    kernel = oracles.fla("ops.gated_delta_rule").chunk_gated_delta_rule
    lengths = documents or [70]
    T, starts = sum(lengths), np.cumsum([0, *lengths])
    rows = [[*range(8, 8 + lengths[0]), *(t for n in lengths[1:] for t in range(1, n + 1))]]
    inputs = make(B=1, T=T, H=2, K=16, V=16, positions=rows, dtype=torch.float32)
    q, k, v, beta, log_decay, initial_state = inputs.tensors
    first = torch.cat([initial_state, torch.zeros(len(lengths) - 1, 2, 16, 16)])
    o, finals = kernel(
        q=q,
        k=k,
        v=v,
        beta=beta,
        g=log_decay,
        scale=1.0,
        initial_state=first,
        output_final_state=True,
        cu_seqlens=torch.tensor(starts) if documents else None,
    )
    assert_same(inputs.run(gated_delta_rule), (o, finals[-1:]), inputs, 2e-5)
