"""Attention as kriging: weights, sums and gradients against plain loops and autograd through the explicit softmax."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from decaybench.models.ops import pieces
from decaybench.models.ops import softmax_attention as module
from decaybench.models.ops.softmax_attention import kriging_attention, softmax_attention
from tests.models.small import largest

B, H, K, V = 2, 2, 4, 3


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def precisions(S, seed=9):
    """From e^-2 to e^2, one a key."""
    drawn = torch.rand(B, S, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (4 * drawn - 2).exp()


def inputs(T, S):
    return draw(B, T, H, K, seed=1), draw(B, S, H, K, seed=2), draw(B, S, H, V, seed=3), precisions(S)


def causal(T, S):
    """T tokens at the end of S keys."""
    return torch.ones(T, S, dtype=torch.bool).tril(S - T)[None, None].expand(B, 1, T, S)


def some_hidden(T, S):
    """Besides what is to come, keys of another document: other ones in each row."""
    mask = causal(T, S).clone()
    mask[0, ..., : S // 3] = False
    mask[1, ..., 1 : S - T] = False
    return mask | torch.eye(S, dtype=torch.bool)[S - T :]


CASES = {"causal": (5, 5, None), "one": (1, 1, None), "cached": (3, 8, causal), "documents": (6, 9, some_hidden)}


@pytest.fixture(params=[*((name, None) for name in CASES), *((name, 2) for name in CASES)], ids=str)
def case(request, monkeypatch):
    """As it is, and in blocks of two queries in one row."""
    name, block = request.param
    if block is not None:
        monkeypatch.setattr(module, "_BLOCK", block)
        monkeypatch.setattr(pieces, "_CACHED", 1)
    T, S, make = CASES[name]
    return inputs(T, S), None if make is None else make(T, S)


def kriged(*inputs):
    """e, m2, n and i."""
    return tuple(kriging_attention(*inputs))


def kriging_weights(q, k, lbar, mask):
    """a_tj lbar_j / sum_j' a_tj' lbar_j', numpy [B, H, T, S], from the softmax without any bias."""
    q, k, lbar = (x.numpy() for x in (q, k, lbar))
    T, S = q.shape[1], k.shape[1]
    weights = np.zeros((B, H, T, S))
    for b, h, t in np.ndindex(B, H, T):
        seen = [j for j in range(S) if (j <= t if mask is None else bool(mask[b, 0, t, j]))]
        scores = np.exp([q[b, t, h] @ k[b, j, h] / math.sqrt(K) for j in seen])
        share = scores / scores.sum() * lbar[b, seen]
        weights[b, h, t, seen] = share / share.sum()
    return weights


def test_the_bias_gives_the_kriging_weights(case):
    (q, k, v, lbar), mask = case
    weights = kriging_weights(q, k, lbar, mask)
    e_found, m2, n, i = kriged(q, k, v, lbar, mask)
    values, variances = v.numpy(), (1 / lbar).numpy()
    for b, t, h in np.ndindex(B, q.shape[1], H):
        a = weights[b, h, t]
        e = sum(a[j] * values[b, j, h] for j in range(len(a)))
        residuals = sum(a[j] * (values[b, j, h] - e) ** 2 for j in range(len(a)))
        assert np.allclose(e_found[b, t, h], e, rtol=0, atol=1e-12)
        assert np.allclose(m2[b, t, h] - e_found[b, t, h] ** 2, residuals, rtol=0, atol=1e-12)
        assert float(n[b, t, h]) == pytest.approx(1 / (a**2).sum(), rel=1e-12)
        assert float(i[b, t, h]) == pytest.approx((a * variances[b]).sum(), rel=1e-12)


def test_the_sample_size_is_a_difference_of_log_sum_exps(case):
    (q, k, v, lbar), mask = case
    T, S = q.shape[1], k.shape[1]
    logits = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(K) + lbar.log()[:, None, None]
    seen = torch.ones(T, S, dtype=torch.bool).tril() if mask is None else mask
    logits = logits.masked_fill(~seen, -torch.inf)
    n = (2 * logits.logsumexp(-1) - (2 * logits).logsumexp(-1)).exp()
    assert largest(kriging_attention(q, k, v, lbar, mask).n, n.transpose(1, 2)) < 1e-12


def test_one_source_alone_is_its_value():
    q, k, v, lbar = inputs(4, 4)
    e, m2, n, i = kriged(q, k, v, lbar, None)
    assert torch.equal(e[:, 0], v[:, 0])
    assert torch.equal(m2[:, 0], v[:, 0] ** 2)
    assert torch.equal(i[:, 0], (1 / lbar)[:, :1].expand(B, H))
    assert torch.equal(n[:, 0], torch.ones(B, H, dtype=torch.float64))


@pytest.mark.parametrize("constant", [math.exp(-6), 1.0, 2.7, math.exp(6)])
def test_a_constant_precision_changes_no_weight(case, constant):
    (q, k, v, lbar), mask = case
    q, k, v = q.float(), k.float(), v.float()
    e, _, _, i = kriged(q, k, v, torch.full_like(lbar, constant, dtype=torch.float32), mask)
    assert largest(e, softmax_attention(q, k, v, mask)) < 1e-6
    assert torch.allclose(i, torch.tensor(1 / constant), rtol=1e-6)


def leaves(*tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("masked", [False, True])
def test_its_gradients_are_finite_differences(masked):
    T, S = (3, 4) if masked else (4, 4)
    given = draw(1, T, 2, 2, seed=1), draw(1, S, 2, 2, seed=2), draw(1, S, 2, 3, seed=3), precisions(S)[:1]
    mask = causal(T, S)[:1] if masked else None
    assert torch.autograd.gradcheck(lambda *x: kriged(*x, mask), leaves(*given))


def test_its_gradients_are_autograds_through_the_explicit_softmax(case):
    given, mask = case
    T, S = given[0].shape[1], given[1].shape[1]
    seen = torch.ones(T, S, dtype=torch.bool).tril() if mask is None else mask
    weigh = [draw(B, T, H, V, seed=5), draw(B, T, H, V, seed=6), draw(B, T, H, seed=7), draw(B, T, H, seed=8)]

    def explicit(q, k, v, lbar):
        scores = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(K)
        a = scores.masked_fill(~seen, -torch.inf).softmax(-1) * lbar[:, None, None]
        a = a / a.sum(-1, keepdim=True)
        e, m2 = (torch.einsum("bhts,bshv->bthv", a, x) for x in (v, v**2))
        return e, m2, 1 / (a**2).sum(-1).transpose(1, 2), (a / lbar[:, None, None]).sum(-1).transpose(1, 2)

    gradients = []
    for attention in (lambda *x: kriged(*x, mask), explicit):
        x = leaves(*given)
        sum((w * y).sum() for w, y in zip(weigh, attention(*x), strict=True)).backward()
        gradients.append([leaf.grad for leaf in x])
    for ours, theirs in zip(*gradients, strict=True):
        assert largest(ours, theirs) < 1e-11


def test_enormous_scores_and_precisions_stay_finite():
    q, k, v, lbar = inputs(6, 6)
    x = leaves(*((scale * part).float() for scale, part in zip((1e3, 1e3, 1e3, 1.0), (q, k, v, lbar), strict=True)))
    bounds = torch.tensor([-6.0, 6.0]).exp().repeat(B, 3)
    found = kriging_attention(*x[:3], bounds, None)
    assert all(part.isfinite().all() for part in found)
    assert found.n.min() > 1 - 1e-6
    assert found.n.max() < 6 + 1e-5
    sum(part.sum() for part in found).backward()
    assert all(leaf.grad.isfinite().all() for leaf in x[:3])


@pytest.mark.parametrize("masked", [False, True])
def test_nothing_is_kept_but_what_comes_in_and_goes_out(masked):
    """No weights, T x S, and no second copy of the values."""
    T = 40
    x, kept = leaves(*inputs(T, T)), {}

    def keep(part):
        kept[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        return part

    mask = causal(T, T) if masked else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda part: part):
        found = kriging_attention(*x, mask)
    allowed = [*x, *found, *([mask] if masked else [])]
    assert sum(kept.values()) <= sum(part.untyped_storage().nbytes() for part in allowed) + found.n.nbytes
    assert found.mean.requires_grad


@pytest.mark.parametrize("autocast", [False, True])
def test_from_bfloat16_all_is_float32(autocast):
    """Also the estimate: squared and taken from m2, its rounding would drown a small variance."""
    q, k, v, lbar = inputs(6, 6)
    low = [part.bfloat16() for part in (q, k, 1 + 0.03 * v)]
    want = kriged(*(part.double() for part in low), lbar, None)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = kriged(*low, lbar.float(), None)
    assert all(part.dtype == torch.float32 for part in found)
    assert all(torch.allclose(ours.double(), exact, rtol=1e-5) for ours, exact in zip(found, want, strict=True))
    spread, exact = (m2 - e**2 for e, m2, *_ in (found, want))
    assert largest(spread, exact) < 0.01 * float(exact.max())


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_under_bfloat16_are_float32s(autocast):
    given = [part.bfloat16() for part in inputs(6, 6)[:3]]
    gradients = []
    for dtype, cast in ((torch.float64, False), (torch.bfloat16, autocast)):
        x = leaves(*(part.to(dtype) for part in given))
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            found = kriged(*x, precisions(6).float(), None)
        sum(part.sum() for part in found).backward()
        gradients.append([leaf.grad.double() for leaf in x])
    for exact, ours in zip(*gradients, strict=True):
        assert torch.allclose(ours, exact, rtol=2**-8, atol=1e-5)  # rounded once, at the end


def test_the_plain_one_is_a_softmax(case):
    (q, k, v, _), mask = case
    want = kriging_weights(q, k, torch.ones(B, k.shape[1], dtype=torch.float64), mask)
    assert np.allclose(softmax_attention(q, k, v, mask), np.einsum("bhts,bshv->bthv", want, v.numpy()), atol=1e-12)
