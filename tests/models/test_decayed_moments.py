"""The weighted moments of a recurrence's sources: the chunked form = the definition = plain sums."""

from __future__ import annotations

import itertools

import pytest
import torch

from decaybench.core.positions import Layout
from decaybench.models.ops import decayed_moments as module
from decaybench.models.ops.decayed_moments import MomentState, decayed_moments, decayed_moments_recurrent

B, T, H, V = 2, 13, 3, 4
FRESH = torch.arange(1, T + 1).expand(B, T)
LATER = FRESH + 5
PACKED = torch.tensor([[1, 2, 3, 4, 1, 2, 3, 1, 2, 0, 0, 0, 0], [6, 7, 8, 9, 10, 11, 1, 2, 3, 4, 5, 6, 7]])
CASES = {"fresh": (FRESH, False), "from a state": (LATER, True), "documents and padding": (PACKED, True)}


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(*, state: bool) -> tuple[list[torch.Tensor], MomentState | None]:
    g = draws(0)
    v = torch.randn(B, T, H, V, generator=g, dtype=torch.float64)
    x, u, speed = (torch.rand(B, T, H, generator=g, dtype=torch.float64) for _ in range(3))
    sums = torch.rand(B, H, 2 * V + 2, generator=g, dtype=torch.float64)
    squares = torch.rand(B, H, generator=g, dtype=torch.float64)
    given = [part.requires_grad_() for part in (v, x, u, (-2 * speed).detach())]
    return given, MomentState(sums.requires_grad_(), squares.requires_grad_()) if state else None


def results(op, given, state, layout, **settings):
    """All that comes out, in one list, and the gradients of a random mixture of it."""
    moments, after = op(*given, initial_state=state, output_final_state=True, layout=layout, **settings)
    out = [*moments, after.sums, after.squares]
    mixture = sum((part * torch.randn(part.shape, generator=draws(1), dtype=part.dtype)).sum() for part in out)
    leaves = [*given, *([state.sums, state.squares] if state else [])]
    return out, torch.autograd.grad(mixture, leaves)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk_size", [1, 3, 4, 13, 32])
def test_the_chunked_form_is_the_definition_with_all_gradients(case, chunk_size):
    positions, carried = CASES[case]
    given, state = inputs(state=carried)
    layout = Layout.of(positions.clone(), has_state=carried)
    want = results(decayed_moments_recurrent, given, state, layout)
    found = results(decayed_moments, given, state, layout, chunk_size=chunk_size)
    for a, b in zip(itertools.chain(*found), itertools.chain(*want), strict=True):
        assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize("length", [2, 3, 4, 9, 12])
def test_the_usual_chunk_and_a_row_at_a_time_are_the_definition_too(length, monkeypatch):
    monkeypatch.setattr(module, "_SCRATCH", 1)
    given, state = inputs(state=True)
    given = [part[:, :length] for part in given]
    layout = Layout.of(PACKED[:, :length].clone(), has_state=True)
    want = results(decayed_moments_recurrent, given, state, layout)
    found = results(decayed_moments, given, state, layout)
    for a, b in zip(itertools.chain(*found), itertools.chain(*want), strict=True):
        assert (a - b).abs().max() < 1e-12


def test_float32_gradients_keep_their_digits_over_thousands_of_tokens():
    """The log-decays' are sums over a chunk; slow and fast decays, strong and faint writes."""
    length, heads = 4000, 4
    g = draws(3)
    v = torch.randn(1, length, heads, V, generator=g, dtype=torch.float64)
    u = (6 * torch.randn(1, length, heads, generator=g, dtype=torch.float64)).sigmoid()
    x = u * torch.rand(1, length, heads, generator=g, dtype=torch.float64)
    log_decay = -torch.tensor([1e-4, 1e-2, 0.5, 20.0], dtype=torch.float64).expand(1, length, heads)
    gradients = []
    for dtype in (torch.float64, torch.float32):
        given = [part.to(dtype).requires_grad_() for part in (v, x, u, log_decay)]
        mean, square, S0, D1, D2 = decayed_moments(*given)[0]
        loss = (mean * square).sum() + (S0 * S0 / D2).clamp(min=1).log().sum() + (D1 / S0).log().sum()
        gradients.append(torch.autograd.grad(loss, given))
    for exact, rounded in zip(*gradients, strict=True):
        for head in range(heads):
            want = exact[:, :, head]
            assert (rounded[:, :, head].double() - want).abs().max() < 1e-3 * want.abs().max()


def test_the_definition_is_the_sum_over_all_tokens_so_far():
    (v, x, u, log_decay), _ = inputs(state=False)
    moments, _ = decayed_moments_recurrent(v, x, u, log_decay)
    for b, t, h in itertools.product(range(B), range(T), range(H)):
        d = [log_decay[b, j + 1 : t + 1, h].sum().exp().item() for j in range(t + 1)]
        S0 = sum(d[j] * x[b, j, h] for j in range(t + 1))
        S1 = sum(d[j] * x[b, j, h] * v[b, j, h] for j in range(t + 1))
        S2 = sum(d[j] * x[b, j, h] * v[b, j, h] ** 2 for j in range(t + 1))
        found = torch.cat([moments.mean[b, t, h], moments.square[b, t, h]])
        assert torch.allclose(found, torch.cat([S1, S2]) / S0, rtol=1e-12, atol=1e-13)
        assert moments.S0[b, t, h].item() == pytest.approx(S0.item(), rel=1e-12)
        assert moments.D1[b, t, h].item() == pytest.approx(sum(d[j] * u[b, j, h].item() for j in range(t + 1)))
        assert moments.D2[b, t, h].item() == pytest.approx(sum((d[j] * x[b, j, h].item()) ** 2 for j in range(t + 1)))


def test_shapes_that_do_not_fit_and_rounded_decays_are_refused():
    (v, x, u, log_decay), _ = inputs(state=False)
    with pytest.raises(ValueError, match="decayed_moments wants"):
        decayed_moments(v, x[:, :5], u, log_decay)
    with pytest.raises(ValueError, match="log_decay must be float32 or float64"):
        decayed_moments(v, x, u, log_decay.to(torch.bfloat16))
