"""The scores by halving against the formula over all pairs of tokens, its gradients by autograd."""

from __future__ import annotations

import math

import pytest
import torch

from decaybench.models.ops.decayed_scores import decayed_scores, decayed_scores_backward
from tests.models.small import largest


def all_pairs(q, k, log_decay):
    """The formula with a tensor of tokens x tokens x channels: [.., P, L, S, L]."""
    L = q.shape[-2]
    c = log_decay.cumsum(-2)
    later = torch.ones(L, L).triu(1).bool()[..., None]
    between = (c[..., :, None, :] - c[..., None, :, :]).masked_fill(later, -torch.inf).exp()
    return torch.einsum("...pik,...sjk,...ijk->...pisj", q, k, between)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def decays(*shape, seed=2):
    """Log-decays from almost none to exp(-8), float64."""
    return -torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).pow(4) * 8


@pytest.mark.parametrize(("P", "S"), [(1, 1), (2, 2), (1, 3), (2, 1)])
@pytest.mark.parametrize("L", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("lead", [(), (3, 2)])
def test_scores_and_gradients_are_the_formulas(P, S, L, lead):
    K = 5
    q, k, log_decay = draw(*lead, P, L, K), draw(*lead, S, L, K, seed=1), decays(*lead, L, K)
    want = all_pairs(q, k, log_decay)
    dscores = draw(*want.shape, seed=3).detach()
    wanted = torch.autograd.grad(want, [q, k], dscores)
    with torch.no_grad():
        got = decayed_scores(q, k, log_decay.exp())
        found = decayed_scores_backward(q, k, log_decay.exp(), dscores)
    assert largest(got.scores, want) < 1e-12
    for a, b in zip(found, wanted, strict=True):
        assert largest(a, b) < 1e-12
    c = log_decay.cumsum(-2)
    assert largest(got.since_start, c.exp()) < 1e-14
    assert largest(got.until_end, (c[..., -1:, :] - c).exp()) < 1e-14


def test_inputs_stay_as_they_are():
    q, k, decay = draw(2, 1, 8, 3).detach(), draw(2, 1, 8, 3, seed=1).detach(), decays(2, 8, 3).exp()
    before = [x.clone() for x in (q, k, decay)]
    scores = decayed_scores(q, k, decay).scores
    decayed_scores_backward(q, k, decay, scores)
    assert all(torch.equal(a, b) for a, b in zip((q, k, decay), before, strict=True))


def test_nothing_above_the_diagonal_is_written_or_read():
    L = 16
    q, k, decay = draw(2, 2, L, 3).detach(), draw(2, 2, L, 3, seed=1).detach(), decays(2, L, 3).exp()
    above = torch.ones(L, L).triu(1).bool()[:, None, :]
    scores = decayed_scores(q, k, decay).scores
    assert torch.equal(scores.masked_fill(~above, 0.0), torch.zeros_like(scores))
    dscores = draw(*scores.shape, seed=3).detach()
    want = decayed_scores_backward(q, k, decay, dscores)
    got = decayed_scores_backward(q, k, decay, dscores.masked_fill(above, math.nan))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("slowest", [0.0, -1e-7, -1e-3])
def test_any_mixture_of_decays_keeps_its_digits_in_float32(slowest):
    """Decays of exactly 1 and exactly 0 and all between; plain exp(c_i) exp(-c_j) would be 0 times infinity here."""
    L, K = 32, 16
    choice = torch.randint(0, 5, (4, L, K), generator=torch.Generator().manual_seed(0))
    log_decay = torch.tensor([slowest, slowest, -1.0, -30.0, -1e5], dtype=torch.float64)[choice]
    q, k = draw(4, 1, L, K), draw(4, 1, L, K, seed=1)
    want = all_pairs(q, k, log_decay)
    dscores = draw(*want.shape, seed=3).detach()
    wanted = torch.autograd.grad(want, [q, k], dscores)
    narrow = q.detach().float(), k.detach().float(), log_decay.float().exp()
    scores = decayed_scores(*narrow).scores
    found = decayed_scores_backward(*narrow, dscores.float())
    for a, b in zip([scores, *found], [want, *wanted], strict=True):
        assert largest(a.double(), b) < 1e-6 * float(b.detach().abs().max())


@pytest.mark.parametrize("L", [3, 12, 31])
def test_other_lengths_are_refused(L):
    with pytest.raises(ValueError, match=f"power of two of tokens, not {L}"):
        decayed_scores(torch.zeros(1, L, 2), torch.zeros(1, L, 2), torch.ones(L, 2))
