"""The recurrence's two forms against the formula as a plain loop, values and gradients."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decaybench.core.positions import Layout
from decaybench.models.ops.scalar_decay import scalar_decay, scalar_decay_chunked, scalar_decay_recurrent
from tests import oracles
from tests.models.small import largest, row_of_positions


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    initial_state: Tensor | None
    positions: list[list[int]]

    @property
    def tensors(self) -> list[Tensor]:
        found = [self.q, self.k, self.v, self.log_decay]
        return found if self.initial_state is None else [*found, self.initial_state]

    def layout(self) -> Layout:
        return Layout.of(torch.tensor(self.positions), has_state=self.initial_state is not None)

    def run(self, form, **options):
        return form(
            self.q,
            self.k,
            self.v,
            self.log_decay,
            initial_state=self.initial_state,
            output_final_state=True,
            layout=self.layout(),
            **options,
        )

    def plain_loop(self):
        """The definition, token by token, sharing nothing with the package."""
        q, k, v, log_decay = self.tensors[:4]
        (B, _, H, V), (G, K) = v.shape, k.shape[2:]
        state = v.new_zeros(B, H, K, V) if self.initial_state is None else self.initial_state

        def write(S, b, t, h):
            return torch.exp(log_decay[b, t, h]) * S + torch.outer(k[b, t, h * G // H], v[b, t, h])

        return oracles.plain_loop(write, lambda S, b, t, h: q[b, t, h * G // H] @ S, state, self.positions)


def make(B=2, T=9, H=4, G=2, K=3, V=2, *, state=True, positions=None, seed=0, dtype=torch.float64) -> Inputs:
    draws = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=draws, dtype=torch.float64).to(dtype).requires_grad_()

    log_decay = (-torch.rand(B, T, H, generator=draws, dtype=torch.float64).pow(3) * 4).to(dtype).requires_grad_()
    start = 7 if state else 0  # a row with a state goes on from its seventh token
    positions = positions or [list(range(start + 1, start + T + 1))] * B
    initial_state = normal(B, H, K, V) if state else None
    return Inputs(normal(B, T, G, K), normal(B, T, G, K), normal(B, T, H, V), log_decay, initial_state, positions)


def gradients(outputs, inputs: Inputs) -> list[Tensor]:
    o, final = outputs
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).cos().view(x.shape) for x in (o, final)]
    loss = (o * weights[0]).sum() + (final * weights[1]).sum()
    return list(torch.autograd.grad(loss, inputs.tensors, materialize_grads=True, retain_graph=True))


def assert_same(got, want, inputs: Inputs, bound: float) -> None:
    for a, b in zip(got, want, strict=True):
        assert largest(a, b) < bound
    for a, b in zip(gradients(got, inputs), gradients(want, inputs), strict=True):
        assert largest(a, b) < bound * max(1.0, float(b.detach().abs().max()))


@st.composite
def cases(draw):
    T, state = draw(st.integers(1, 19)), draw(st.booleans())
    H, G = draw(st.sampled_from([(4, 1), (4, 2), (4, 4), (3, 1), (1, 1)]))
    B = draw(st.integers(1, 3))
    positions = [draw(row_of_positions(T, state)) for _ in range(B)]
    K, V, seed = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(0, 99))
    return make(B, T, H, G, K, V, state=state, positions=positions, seed=seed), draw(st.integers(1, 24))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_both_forms_are_the_plain_loop(case):
    inputs, chunk = case
    want = inputs.plain_loop()
    assert_same(inputs.run(scalar_decay_recurrent), want, inputs, 1e-11)
    assert_same(inputs.run(scalar_decay_chunked, chunk_size=chunk), want, inputs, 1e-11)
    assert_same(inputs.run(scalar_decay, chunk_size=chunk), want, inputs, 1e-11)


@pytest.mark.parametrize("T", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("chunk", [1, 3, 4, 13, 100])
def test_any_length_and_any_chunk_without_a_layout(T, chunk):
    inputs = make(T=T, state=False)
    want = inputs.plain_loop()
    got = scalar_decay_chunked(*inputs.tensors, output_final_state=True, chunk_size=chunk)
    assert_same(got, want, inputs, 1e-11)


@pytest.mark.parametrize("chunk", [1, 2, 3, 8])
def test_gradients_by_finite_differences(chunk):
    inputs = make(B=1, T=5, H=2, G=1, K=2, V=2, positions=[[8, 0, 1, 2, 3]])
    layout = inputs.layout()

    def run(q, k, v, log_decay, initial_state):
        return scalar_decay_chunked(
            q,
            k,
            v,
            log_decay,
            initial_state=initial_state,
            output_final_state=True,
            layout=layout,
            chunk_size=chunk,
        )

    assert torch.autograd.gradcheck(run, inputs.tensors)


@pytest.mark.parametrize("cut", [1, 4, 8, 15])
def test_the_final_state_carries_on(cut):
    inputs = make(T=16)
    whole = inputs.run(scalar_decay_chunked, chunk_size=4)
    state, parts = inputs.initial_state, []
    for piece in (slice(0, cut), slice(cut, 16)):
        part, state = scalar_decay(
            *(x[:, piece] for x in inputs.tensors[:4]), initial_state=state, output_final_state=True, chunk_size=4
        )
        parts.append(part)
    assert_same((torch.cat(parts, dim=1), state), whole, inputs, 1e-11)


def test_non_contiguous_inputs_are_read_as_they_are():
    inputs = make(T=12, H=4, G=2)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs.tensors[:4]]
    strided = [x.flip(-1).flip(-1)[..., ::1] if n % 2 else x for n, x in enumerate(strided)]
    expanded = inputs.v[:1].expand(2, -1, -1, -1)
    for form, options in ((scalar_decay_recurrent, {}), (scalar_decay_chunked, {"chunk_size": 5})):
        got = form(*strided, output_final_state=True, **options)
        assert_same(got, form(*inputs.tensors[:4], output_final_state=True, **options), replace_state(inputs), 1e-12)
        o, _ = form(*inputs.tensors[:2], expanded, inputs.log_decay, **options)
        assert largest(o, form(*inputs.tensors[:2], expanded.contiguous(), inputs.log_decay, **options)[0]) < 1e-12


def replace_state(inputs: Inputs) -> Inputs:
    return Inputs(inputs.q, inputs.k, inputs.v, inputs.log_decay, None, inputs.positions)


@pytest.mark.parametrize("form", [scalar_decay_recurrent, scalar_decay_chunked])
def test_a_row_of_padding_keeps_its_state_to_the_bit(form):
    inputs = make(B=2, T=6, positions=[[0] * 6, [8, 9, 10, 11, 12, 13]])
    _, final = inputs.run(form)
    assert torch.equal(final[0], inputs.initial_state[0])
    assert not torch.equal(final[1], inputs.initial_state[1])


@pytest.mark.parametrize("form", [scalar_decay_recurrent, scalar_decay_chunked])
def test_decays_and_state_are_float32_under_bfloat16_inputs(form):
    T = 300
    draws = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, 1, 4, generator=draws).bfloat16() for _ in range(3))
    # Slower than bfloat16 can tell from no decay at all: exp(-0.001) rounds to 1 there.
    log_decay = torch.full((1, T, 1), -1e-3)
    o, final = form(q, k, v, log_decay, output_final_state=True)
    exact = form(*(x.double() for x in (q, k, v)), log_decay.double(), output_final_state=True)
    assert o.dtype == torch.bfloat16
    assert final.dtype == torch.float32
    assert largest(final.double(), exact[1]) < 1e-4
    assert largest(o.double(), exact[0]) < 2**-8 * float(exact[0].abs().max())


@pytest.mark.parametrize("form", [scalar_decay_recurrent, scalar_decay_chunked])
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
    inputs = make(B=2, T=40, dtype=dtype)
    extremes = torch.tensor([0.0, -1e-3, -1.0, -1e4, -1e5], dtype=dtype)
    choice = torch.randint(0, 5, inputs.log_decay.shape, generator=torch.Generator().manual_seed(1))
    inputs.log_decay = extremes[choice].requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in inputs.tensors]
    wide = Inputs(*exact, inputs.positions)
    want = wide.plain_loop()
    bound = 1e-11 if dtype == torch.float64 else 1e-4
    for form in (scalar_decay_recurrent, scalar_decay_chunked):
        got = inputs.run(form)
        for a, b in zip([*got, *gradients(got, inputs)], [*want, *gradients(want, wide)], strict=True):
            assert a.isfinite().all()
            assert largest(a.double(), b) < bound * max(1.0, float(b.detach().abs().max()))


@pytest.mark.parametrize("log_decay", [-1e5, -1e4, 0.0])
def test_one_extreme_decay_throughout(log_decay):
    inputs = make(T=70, state=False, dtype=torch.float32)
    inputs.log_decay = torch.full_like(inputs.log_decay, log_decay).requires_grad_()
    got = inputs.run(scalar_decay_chunked)
    assert all(x.isfinite().all() for x in [*got, *gradients(got, inputs)])
    if log_decay < 0:  # nothing but the last write is left
        assert (
            largest(got[1], torch.einsum("bgk,bhv->bghkv", inputs.k[:, -1], inputs.v[:, -1])[:, [0, 0, 1, 1], range(4)])
            < 1e-6
        )


def test_no_final_state_unless_asked_for():
    inputs = make()
    assert scalar_decay(*inputs.tensors[:4])[1] is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": (2, 9, 2, 4)}, r"q, k \[B,T,G,K\]"),
        ({"k": (2, 8, 2, 3)}, r"q, k \[B,T,G,K\]"),
        ({"log_decay": (2, 9, 2)}, r"log_decay \[B,T,H\]"),
        ({"q": (2, 9, 3, 3), "k": (2, 9, 3, 3)}, "H % G = 0"),
        ({"initial_state": (2, 4, 2, 3)}, r"initial_state must be \(2, 4, 3, 2\), not \(2, 4, 2, 3\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, said):
    shapes = {"q": (2, 9, 2, 3), "k": (2, 9, 2, 3), "v": (2, 9, 4, 2), "log_decay": (2, 9, 4)} | change
    with pytest.raises(ValueError, match=said):
        scalar_decay(**{name: torch.zeros(shape) for name, shape in shapes.items()})


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match="no backend 'fla'; known: torch"):
        scalar_decay(*make().tensors[:4], backend="fla")
