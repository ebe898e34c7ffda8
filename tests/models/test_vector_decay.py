"""The recurrence's two forms against the formula as a plain loop, values and gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from decaybench.core.positions import Layout
from decaybench.models.ops.vector_decay import vector_decay, vector_decay_chunked, vector_decay_recurrent
from tests import oracles
from tests.models.small import largest, row_of_positions

FORMS = [vector_decay_recurrent, vector_decay_chunked]


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

    def run(self, form, **options):
        has_state = self.initial_state is not None
        layout = Layout.of(torch.tensor(self.positions), has_state=has_state)
        state = {"initial_state": self.initial_state, "output_final_state": True}
        return form(*self.tensors[:4], layout=layout, **state, **options)

    def plain_loop(self):
        """The definition, token by token, sharing nothing with the package."""
        q, k, v, log_decay = self.tensors[:4]
        B, _, H, K = q.shape
        state = v.new_zeros(B, H, K, v.shape[-1]) if self.initial_state is None else self.initial_state

        def write(S, b, t, h):
            return torch.exp(log_decay[b, t, h])[:, None] * S + torch.outer(k[b, t, h], v[b, t, h])

        return oracles.plain_loop(write, lambda S, b, t, h: q[b, t, h] @ S, state, self.positions)

    def to(self, dtype: torch.dtype) -> Inputs:
        tensors = [x.detach().to(dtype).requires_grad_() for x in self.tensors]
        return Inputs(*tensors[:4], tensors[4] if self.initial_state is not None else None, self.positions)


def make(B=2, T=9, H=3, K=3, V=2, *, state=True, positions=None, seed=0, dtype=torch.float64) -> Inputs:
    draws = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=draws, dtype=torch.float64).requires_grad_()

    log_decay = (-torch.rand(B, T, H, K, generator=draws, dtype=torch.float64).pow(3) * 4).requires_grad_()
    start = 7 if state else 0  # a row with a state goes on from its seventh token
    positions = positions or [list(range(start + 1, start + T + 1))] * B
    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V)
    inputs = Inputs(q, k, v, log_decay, normal(B, H, K, V) if state else None, positions)
    return inputs if dtype == torch.float64 else inputs.to(dtype)


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
    B, H = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    positions = [draw(row_of_positions(T, state)) for _ in range(B)]
    K, V, seed = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(0, 99))
    return make(B, T, H, K, V, state=state, positions=positions, seed=seed), draw(st.integers(1, 24))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_both_forms_are_the_plain_loop(case):
    inputs, chunk = case
    want = inputs.plain_loop()
    assert_same(inputs.run(vector_decay_recurrent), want, inputs, 1e-11)
    assert_same(inputs.run(vector_decay_chunked, chunk_size=chunk), want, inputs, 1e-11)
    assert_same(inputs.run(vector_decay, chunk_size=chunk), want, inputs, 1e-11)


@pytest.mark.parametrize("T", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("chunk", [1, 3, 4, 13, 100])
def test_any_length_and_any_chunk_without_a_layout(T, chunk):
    inputs = make(T=T, state=False)
    got = vector_decay_chunked(*inputs.tensors, output_final_state=True, chunk_size=chunk)
    assert_same(got, inputs.plain_loop(), inputs, 1e-11)


@pytest.mark.parametrize("chunk", [1, 2, 3, 8])
def test_gradients_by_finite_differences(chunk):
    inputs = make(B=1, T=5, H=2, K=2, V=2, positions=[[8, 0, 1, 2, 3]])

    def run(*tensors):
        return Inputs(*tensors, inputs.positions).run(vector_decay_chunked, chunk_size=chunk)

    assert torch.autograd.gradcheck(run, inputs.tensors)


@pytest.mark.parametrize("cut", [1, 4, 8, 15])
def test_the_final_state_carries_on(cut):
    inputs = make(T=16)
    whole = inputs.run(vector_decay_chunked, chunk_size=4)
    state, parts = inputs.initial_state, []
    for piece in (slice(0, cut), slice(cut, 16)):
        part, state = vector_decay(
            *(x[:, piece] for x in inputs.tensors[:4]), initial_state=state, output_final_state=True, chunk_size=4
        )
        parts.append(part)
    assert_same((torch.cat(parts, dim=1), state), whole, inputs, 1e-11)


def test_one_output_alone_has_its_gradients():
    """A loss on o or on the final state only: autograd hands the other's gradient over as zeros."""
    inputs = make(T=11)
    for n in (0, 1):
        got, want = inputs.run(vector_decay_chunked, chunk_size=4)[n], inputs.plain_loop()[n]
        wanted = torch.autograd.grad(want.square().sum(), inputs.tensors, materialize_grads=True)
        found = torch.autograd.grad(got.square().sum(), inputs.tensors, materialize_grads=True)
        assert all(largest(a, b) < 1e-11 for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_inputs_of_any_strides_stay_as_they_are(form):
    inputs = make(T=8)
    strided = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in inputs.tensors[:4]]
    strided[2] = strided[2][:1].expand(2, -1, -1, -1)
    before = [x.clone() for x in strided]
    got = form(*strided)[0]
    assert all(torch.equal(a, b) for a, b in zip(strided, before, strict=True))
    assert largest(got, form(*before)[0]) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_padding_keeps_its_state_to_the_bit(form):
    inputs = make(B=2, T=6, positions=[[0] * 6, [8, 9, 10, 11, 12, 13]])
    _, final = inputs.run(form)
    assert torch.equal(final[0], inputs.initial_state[0])
    assert not torch.equal(final[1], inputs.initial_state[1])


@pytest.mark.parametrize("form", FORMS)
def test_decays_and_state_are_float32_under_bfloat16_inputs(form):
    # Slower than bfloat16 can tell from no decay at all: exp(-0.001) rounds to 1 there.
    inputs = make(B=1, T=300, H=1, K=4, V=4, state=False)
    inputs.log_decay = torch.full_like(inputs.log_decay, -1e-3)
    narrow = [x.detach().bfloat16() for x in inputs.tensors[:3]]
    o, final = form(*narrow, inputs.log_decay.float(), output_final_state=True)
    exact = vector_decay_recurrent(*(x.double() for x in narrow), inputs.log_decay, output_final_state=True)
    assert o.dtype == torch.bfloat16
    assert final.dtype == torch.float32
    assert largest(final.double(), exact[1]) < 1e-4
    assert largest(o.double(), exact[0]) < 2**-8 * float(exact[0].abs().max())


def test_gradients_have_their_inputs_dtypes():
    inputs = make(T=40)
    dtypes = [torch.bfloat16] * 3 + [torch.float32, torch.bfloat16]
    narrow = [x.detach().to(dtype).requires_grad_() for x, dtype in zip(inputs.tensors, dtypes, strict=True)]
    o, final = vector_decay(*narrow[:4], initial_state=narrow[4], output_final_state=True)
    found = torch.autograd.grad(o.float().sum() + final.sum(), narrow)
    assert [x.dtype for x in found] == dtypes


def test_log_decays_below_float32_are_refused():
    inputs = make(T=4)
    with pytest.raises(ValueError, match="log_decay must be float32 or float64, not bfloat16"):
        vector_decay(*inputs.tensors[:3], inputs.log_decay.bfloat16())


@pytest.mark.parametrize("form", FORMS)
def test_autocast_does_not_reach_inside(form):
    inputs = make(T=20, dtype=torch.float32)
    want = inputs.run(form)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = inputs.run(form)
        assert_same(got, want, inputs, 1e-6)
    assert got[0].dtype == got[1].dtype == torch.float32


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
def test_extreme_decays_are_exact_and_finite(dtype, bound):
    """Log-decays from 0 to -1e5 beside each other, in all channels and tokens, cost the mild ones nothing."""
    inputs = make(B=2, T=70, K=8, dtype=dtype)
    extremes = torch.tensor([0.0, -1e-6, -1e-3, -1.0, -30.0, -1e5], dtype=dtype)
    choice = torch.randint(0, 6, inputs.log_decay.shape, generator=torch.Generator().manual_seed(1))
    inputs.log_decay = extremes[choice].requires_grad_()
    wide = inputs.to(torch.float64)
    want = wide.plain_loop()
    for form in FORMS:
        got = inputs.run(form)
        for a, b in zip([*got, *gradients(got, inputs)], [*want, *gradients(want, wide)], strict=True):
            assert a.isfinite().all()
            assert largest(a.double(), b) < bound * float(b.detach().abs().max())


@pytest.mark.parametrize("log_decay", [-1e5, -30.0, -1e-6, 0.0])
def test_one_extreme_decay_throughout(log_decay):
    inputs = make(T=70, state=False, dtype=torch.float32)
    inputs.log_decay = torch.full_like(inputs.log_decay, log_decay).requires_grad_()
    wide = inputs.to(torch.float64)
    got, want = inputs.run(vector_decay_chunked), wide.plain_loop()
    for a, b in zip([*got, *gradients(got, inputs)], [*want, *gradients(want, wide)], strict=True):
        assert largest(a.double(), b) < 2e-6 * max(1.0, float(b.detach().abs().max()))


def test_a_state_outlives_many_chunks_to_its_last_digits():
    """Rounding exp(-1e-6) to float32 is 5 % of what it takes away; token by token that would add up."""
    T, slow = 4096, -1e-6
    q = k = v = torch.zeros(1, T, 1, 1)
    _, final = vector_decay_chunked(
        q, k, v, torch.full((1, T, 1, 1), slow), initial_state=torch.ones(1, 1, 1, 1), output_final_state=True
    )
    assert abs(float(final) - math.exp(T * slow)) < 2e-5


def test_no_final_state_unless_asked_for():
    assert vector_decay(*make().tensors[:4])[1] is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": (2, 9, 3, 4)}, r"q, k, log_decay \[B,T,H,K\]"),
        ({"k": (2, 8, 3, 3)}, r"q, k, log_decay \[B,T,H,K\]"),
        ({"log_decay": (2, 9, 3)}, r"q, k, log_decay \[B,T,H,K\]"),
        ({"v": (2, 9, 6, 2)}, r"v \[B,T,H,V\]"),
        ({"initial_state": (2, 3, 2, 3)}, r"initial_state must be \(2, 3, 3, 2\), not \(2, 3, 2, 3\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, said):
    shapes = {"q": (2, 9, 3, 3), "k": (2, 9, 3, 3), "v": (2, 9, 3, 2), "log_decay": (2, 9, 3, 3)} | change
    with pytest.raises(ValueError, match=said):
        vector_decay(**{name: torch.zeros(shape) for name, shape in shapes.items()})


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match="no backend 'fla'; known: torch"):
        vector_decay(*make().tensors[:4], backend="fla")


@pytest.mark.interpreter
@pytest.mark.parametrize(("T", "state"), [(1, True), (37, True), (70, False)])
def test_both_forms_are_flash_linear_attentions_plain_form(T, state):
    """Which scales q by 1/sqrt(K)."""
    naive = oracles.fla("ops.gla.naive").naive_recurrent_gla
    inputs = make(T=T, K=8, V=5, state=state, dtype=torch.float32)
    q, k, v, log_decay = inputs.tensors[:4]
    states = {"initial_state": inputs.initial_state, "output_final_state": True}
    want = naive(q=q, k=k, v=v, gk=log_decay, **states)
    for form in (vector_decay_recurrent, vector_decay_chunked):
        got = form(q / q.shape[-1] ** 0.5, k, v, log_decay, **states)
        for a, b in zip([*got, *gradients(got, inputs)], [*want, *gradients(want, inputs)], strict=True):
            oracles.assert_close(a, b, 2e-6)


@pytest.mark.interpreter
def test_the_chunked_form_is_flash_linear_attentions_kernel():
    kernel = oracles.fla("ops.gla").chunk_gla
    inputs = make(T=75, K=16, V=16, dtype=torch.float32)
    q, k, v, log_decay = inputs.tensors[:4]
    log_decay = F.logsigmoid(log_decay + 3)
    states = {"initial_state": inputs.initial_state, "output_final_state": True}
    want = kernel(q=q, k=k, v=v, g=log_decay, scale=1.0, **states)
    got = vector_decay_chunked(q, k, v, log_decay, **states)
    for a, b in zip([*got, *gradients(got, inputs)], [*want, *gradients(want, inputs)], strict=True):
        oracles.assert_close(a, b, 1e-5)
