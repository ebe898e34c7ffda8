"""The generalised delta rule's two forms against the formula as a plain loop, values and gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decaybench.core.positions import Layout
from decaybench.models.ops.dplr import dplr, dplr_chunked, dplr_recurrent
from tests import oracles
from tests.models.small import largest, row_of_positions

FORMS = [dplr_recurrent, dplr_chunked]


@dataclass
class Inputs:
    r: Tensor
    log_decay: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    initial_state: Tensor | None
    positions: list[list[int]]

    @property
    def streams(self) -> list[Tensor]:
        return [self.r, self.log_decay, self.k, self.v, self.a, self.b]

    @property
    def tensors(self) -> list[Tensor]:
        return self.streams if self.initial_state is None else [*self.streams, self.initial_state]

    def layout(self) -> Layout:
        return Layout.of(torch.tensor(self.positions), has_state=self.initial_state is not None)

    def run(self, form, **options):
        options = {"initial_state": self.initial_state, "output_final_state": True, "layout": self.layout(), **options}
        return form(*self.streams, **options)

    def plain_loop(self):
        """The paper's own orientation, ours transposed: S <- S (diag(exp(log_decay)) + a b^T) + v k^T, o = S r."""
        r, log_decay, k, v, a, b = self.streams
        B, _, H, K = k.shape
        state = v.new_zeros(B, H, K, v.shape[-1]) if self.initial_state is None else self.initial_state

        def write(S, *at):
            transition = torch.diag(torch.exp(log_decay[at])) + torch.outer(a[at], b[at])
            return (S.T @ transition + torch.outer(v[at], k[at])).T

        return oracles.plain_loop(write, lambda S, *at: S.T @ r[at], state, self.positions)

    def to(self, dtype) -> Inputs:
        names = ["r", "log_decay", "k", "v", "a", "b", "initial_state"]
        moved = {name: x.detach().to(dtype).requires_grad_() for name, x in zip(names, self.tensors, strict=False)}
        return replace(self, **moved)


def make(B=2, T=9, H=2, K=3, V=2, *, state=True, positions=None, seed=0, dtype=torch.float64, rwkv=False) -> Inputs:
    """rwkv: a = -kk and b = kk * rate as in RWKV-7; else any a and b, small enough for a state of order one."""
    draws = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=draws, dtype=torch.float64)

    log_decay = -torch.rand(B, T, H, K, generator=draws, dtype=torch.float64).pow(3) * 4
    a, b = normal(B, T, H, K) * 0.7 / K**0.5, normal(B, T, H, K) * 0.7 / K**0.5
    if rwkv:
        kk = torch.nn.functional.normalize(normal(B, T, H, K), dim=-1)
        a, b = -kk, kk * torch.rand(B, T, H, K, generator=draws, dtype=torch.float64)
    start = 7 if state else 0  # a row with a state goes on from its seventh token
    positions = positions or [list(range(start + 1, start + T + 1))] * B
    streams = [normal(B, T, H, K), log_decay, normal(B, T, H, K), normal(B, T, H, V), a, b]
    initial_state = normal(B, H, K, V) if state else None
    return Inputs(*streams, initial_state, positions).to(dtype)


def gradients(outputs, inputs: Inputs) -> list[Tensor]:
    o, final = outputs
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).cos().view(x.shape) for x in (o, final)]
    loss = (o * weights[0]).sum() + (final * weights[1]).sum()
    return list(torch.autograd.grad(loss, inputs.tensors, materialize_grads=True, retain_graph=True))


def assert_same(got, want, inputs: Inputs, bound: float) -> None:
    got, want = [*got, *gradients(got, inputs)], [*want, *gradients(want, inputs)]
    for x, y in zip(got, want, strict=True):
        assert largest(x, y) < bound * max(1.0, float(y.detach().abs().max()))


@st.composite
def cases(draw):
    T, state, rwkv = draw(st.integers(1, 19)), draw(st.booleans()), draw(st.booleans())
    B, H = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    positions = [draw(row_of_positions(T, state)) for _ in range(B)]
    K, V, seed = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(0, 99))
    inputs = make(B, T, H, K, V, state=state, positions=positions, seed=seed, rwkv=rwkv)
    return inputs, draw(st.integers(1, 24))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_both_forms_are_the_plain_loop(case):
    inputs, chunk = case
    want = inputs.plain_loop()
    assert_same(inputs.run(dplr_recurrent), want, inputs, 1e-11)
    assert_same(inputs.run(dplr_chunked, chunk_size=chunk), want, inputs, 1e-11)
    assert_same(inputs.run(dplr, chunk_size=chunk), want, inputs, 1e-11)


@pytest.mark.parametrize("T", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("chunk", [1, 3, 4, 13, 100])
def test_any_length_and_any_chunk_without_a_layout(T, chunk):
    inputs = make(T=T, state=False)
    got = dplr_chunked(*inputs.streams, output_final_state=True, chunk_size=chunk)
    assert_same(got, inputs.plain_loop(), inputs, 1e-11)


@pytest.mark.parametrize("chunk", [1, 2, 3, 8])
def test_gradients_by_finite_differences(chunk):
    inputs = make(B=1, T=5, H=2, K=2, V=2, positions=[[8, 0, 1, 2, 3]])
    layout = inputs.layout()

    def run(*tensors):
        options = {"initial_state": tensors[6], "output_final_state": True, "layout": layout, "chunk_size": chunk}
        return dplr_chunked(*tensors[:6], **options)

    assert torch.autograd.gradcheck(run, inputs.tensors)


@pytest.mark.parametrize("cut", [1, 4, 8, 15])
def test_the_final_state_carries_on(cut):
    inputs = make(T=16)
    whole = inputs.run(dplr_chunked, chunk_size=4)
    state, parts = inputs.initial_state, []
    for piece in (slice(0, cut), slice(cut, 16)):
        streams = [x[:, piece] for x in inputs.streams]
        part, state = dplr(*streams, initial_state=state, output_final_state=True, chunk_size=4)
        parts.append(part)
    assert_same((torch.cat(parts, dim=1), state), whole, inputs, 1e-11)


def test_non_contiguous_inputs_are_read_as_they_are():
    inputs = make(T=12, state=False)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) if n % 2 else x for n, x in enumerate(inputs.streams)]
    strided = [x if n % 2 else x.transpose(2, 3).contiguous().transpose(2, 3) for n, x in enumerate(strided)]
    for form, options in ((dplr_recurrent, {}), (dplr_chunked, {"chunk_size": 5})):
        got = form(*strided, output_final_state=True, **options)
        assert_same(got, form(*inputs.streams, output_final_state=True, **options), inputs, 1e-12)
        expanded = [x[:1].expand(2, -1, -1, -1) for x in inputs.streams]
        o, _ = form(*expanded, **options)
        assert largest(o, form(*(x.contiguous() for x in expanded), **options)[0]) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_padding_keeps_its_state_to_the_bit(form):
    inputs = make(B=2, T=6, positions=[[0] * 6, [8, 9, 10, 11, 12, 13]])
    _, final = inputs.run(form)
    assert torch.equal(final[0], inputs.initial_state[0])
    assert not torch.equal(final[1], inputs.initial_state[1])


@pytest.mark.parametrize("form", FORMS)
def test_decays_and_state_are_float32_under_bfloat16_inputs(form):
    T = 300
    draws = torch.Generator().manual_seed(0)
    r, k, v, a, b = (torch.randn(1, T, 1, 4, generator=draws).bfloat16() for _ in range(5))
    a, b = a / 4, b / 4
    # Slower than bfloat16 can tell from no decay at all: exp(-0.001) rounds to 1 there.
    log_decay = torch.full((1, T, 1, 4), -1e-3)
    o, final = form(r, log_decay, k, v, a, b, output_final_state=True)
    exact = form(*(x.double() for x in (r, log_decay, k, v, a, b)), output_final_state=True)
    assert o.dtype == torch.bfloat16
    assert final.dtype == torch.float32
    assert largest(final.double(), exact[1]) < 1e-4
    assert largest(o.double(), exact[0]) < 2**-8 * float(exact[0].abs().max())


@pytest.mark.parametrize("form", FORMS)
def test_gradients_have_their_inputs_dtypes(form):
    inputs = make(T=20, rwkv=True)
    dtypes = [torch.bfloat16, torch.float32] + [torch.bfloat16] * 4 + [torch.float32]
    rounded = [x.detach().to(dtype) for x, dtype in zip(inputs.tensors, dtypes, strict=True)]
    mixed = replace(inputs, **dict(zip(vars(inputs), (x.requires_grad_() for x in rounded), strict=False)))
    exact = mixed.to(torch.float64)
    got, want = gradients(mixed.run(form), mixed), gradients(exact.plain_loop(), exact)
    for x, y, dtype in zip(got, want, dtypes, strict=True):
        assert x.dtype == dtype
        assert largest(x.double(), y) < 2**-6 * float(y.abs().max())


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
    inputs = make(B=2, T=40, dtype=dtype, rwkv=True)
    extremes = torch.tensor([0.0, -1e-6, -0.6065, -30.0, -1e5], dtype=dtype)
    choice = torch.randint(0, 5, inputs.log_decay.shape, generator=torch.Generator().manual_seed(1))
    inputs.log_decay = extremes[choice].requires_grad_()
    exact = inputs.to(torch.float64)
    want = exact.plain_loop()
    want = [*want, *gradients(want, exact)]
    bound = 1e-11 if dtype == torch.float64 else 1e-5
    for form in FORMS:
        got = inputs.run(form)
        for x, y in zip([*got, *gradients(got, inputs)], want, strict=True):
            assert x.isfinite().all()
            assert largest(x.double(), y) < bound * max(1.0, float(y.detach().abs().max()))


@pytest.mark.parametrize("log_decay", [-1e5, -30.0, -0.6065, -1e-6, 0.0])
def test_one_extreme_decay_throughout(log_decay):
    inputs = make(T=70, state=False, dtype=torch.float32, rwkv=True)
    inputs.log_decay = torch.full_like(inputs.log_decay, log_decay).requires_grad_()
    exact = inputs.to(torch.float64)
    assert_close(inputs.run(dplr_chunked), exact.plain_loop(), inputs, exact, 1e-5)


@pytest.mark.parametrize("chunk", [16, 64])
def test_keys_that_repeat_cost_no_digits(chunk):
    """One normed key throughout, rate 1, no decay: the triangular system at its worst, a chain of replacements."""
    inputs = make(B=1, T=64, H=1, K=4, V=2, dtype=torch.float32, rwkv=True)
    kk = torch.full((1, 64, 1, 4), 0.5)
    inputs.a, inputs.b = (-kk).requires_grad_(), kk.clone().requires_grad_()
    inputs.log_decay = torch.zeros(1, 64, 1, 4, requires_grad=True)
    exact = inputs.to(torch.float64)
    assert_close(inputs.run(dplr_chunked, chunk_size=chunk), exact.plain_loop(), inputs, exact, 1e-5)


def assert_close(got, want, inputs: Inputs, exact: Inputs, bound: float) -> None:
    for x, y in zip([*got, *gradients(got, inputs)], [*want, *gradients(want, exact)], strict=True):
        assert x.isfinite().all()
        assert largest(x.double(), y) < bound * max(1.0, float(y.detach().abs().max()))


def test_no_final_state_unless_asked_for():
    inputs = make()
    assert dplr(*inputs.streams)[1] is None


@pytest.mark.interpreter
@pytest.mark.parametrize(("form", "options"), [("dplr_recurrence", {}), ("dplr_chunkwise", {"chunk_size": 8})])
def test_flash_linear_attentions_naive_forms_agree(form, options):
    """Their queries are scaled by K^-1/2, and their tensors are [B, H, T, K]."""
    theirs = getattr(oracles.fla("ops.generalized_delta_rule.dplr.naive"), form)
    inputs = make(T=24, K=4, V=6, rwkv=True).to(torch.float32)
    names = ["q", "gk", "k", "v", "alpha", "beta"]
    moved = {name: x.transpose(1, 2) for name, x in zip(names, inputs.streams, strict=True)}
    moved["q"] = moved["q"] * 2.0  # K^1/2
    o, final = theirs(**moved, initial_state=inputs.initial_state, output_final_state=True, **options)
    want = (o.transpose(1, 2), final)
    for ours in FORMS:
        assert_same(inputs.run(ours), want, inputs, 1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r": (2, 9, 2, 4)}, r"r, log_decay, k, a, b \[B,T,H,K\]"),
        ({"log_decay": (2, 9, 2, 1)}, r"r, log_decay, k, a, b \[B,T,H,K\]"),
        ({"a": (2, 8, 2, 3)}, r"r, log_decay, k, a, b \[B,T,H,K\]"),
        ({"v": (2, 9, 1, 2)}, r"r, log_decay, k, a, b \[B,T,H,K\]"),
        ({"initial_state": (2, 2, 2, 3)}, r"initial_state must be \(2, 2, 3, 2\), not \(2, 2, 2, 3\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, said):
    shapes = dict.fromkeys(["r", "log_decay", "k", "a", "b"], (2, 9, 2, 3)) | {"v": (2, 9, 2, 2)} | change
    with pytest.raises(ValueError, match=said):
        dplr(**{name: torch.zeros(shape) for name, shape in shapes.items()})


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match="no backend 'fla'; known: torch"):
        dplr(*make().streams, backend="fla")
