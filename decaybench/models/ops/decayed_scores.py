"""Scores under a decay of every key channel: what GLA and RWKV-7 put in the place of attention's q k^T.

    scores_ij = sum_K q_i k_j exp(log_decay_{j+1} + ... + log_decay_i)        j <= i, 0 elsewhere

By halving: in a block of 2m tokens a query of the second half sees a key of the first through their boundary, so
q_i (decay from the boundary to i) times k_j (decay from j to the boundary) is one matrix product, and every factor is a
product of decays <= 1: no exp of a positive number (which exp(c_i) exp(-c_j) of the plain form takes), no tensor of
tokens x tokens x channels. From m = 1 to L/2 both factors grow by one multiplication; at the end they are the decays
from the chunk's start to each token and from each token to the chunk's end, which the chunked forms need anyway.
Source: the secondary chunking of gated linear attention, Yang et al., arXiv 2312.06635, section 4.3, here with log2(L)
levels in the place of two.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor


class DecayedScores(NamedTuple):
    """scores [.., P, L, S, L]; since_start, until_end [.., L, K].

    since_start_i: the product of the decays of tokens 0 to i. until_end_i: that of tokens i + 1 to L - 1.
    """

    scores: Tensor
    since_start: Tensor
    until_end: Tensor


def decayed_scores(q: Tensor, k: Tensor, decay: Tensor) -> DecayedScores:
    """The scores of P queries with S keys a token that share one decay, in a chunk of L tokens, L a power of two.

    q: [.., P, L, K]; k: [.., S, L, K]; decay: [.., L, K], exp(log_decay), in [0, 1]. A query that reads before its
    token's own decay is the one that reads after the token before: give it one token earlier.
    Not for autograd: call it under no_grad in a Function whose backward calls `decayed_scores_backward`.
    Raises ValueError if L is not a power of two.
    """
    *lead, P, L, K = q.shape
    S = k.shape[-3]
    if L & (L - 1):
        raise ValueError(f"decayed_scores wants a power of two of tokens, not {L}")
    q, k, decay = q.reshape(-1, P, L, K), k.reshape(-1, S, L, K), decay.reshape(-1, L, K)
    scores = q.new_zeros(len(q), P, L, S, L)
    for p, s in product(range(P), range(S)):
        scores[:, p, :, s].diagonal(dim1=1, dim2=2).copy_((q[:, p] * k[:, s]).sum(-1))
    since, until = decay.clone(), torch.ones_like(decay)
    q_scratch, k_scratch = _scratch(q), _scratch(k)
    m = 1
    while m < L:
        q_scaled, k_scaled = _scaled(q, since, 1, m, q_scratch), _scaled(k, until, 0, m, k_scratch)
        found = (q_scaled @ k_scaled.transpose(1, 2)).view(len(q), -1, P, m, S, m)
        for p, s in product(range(P), range(S)):
            _corners(scores[:, p, :, s], m).copy_(found[:, :, p, :, s])
        _join(since, until, m)
        m *= 2
    return DecayedScores(scores.view(*lead, P, L, S, L), since.view(*lead, L, K), until.view(*lead, L, K))


def decayed_scores_backward(q: Tensor, k: Tensor, decay: Tensor, dscores: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of q and k from that of the scores, [.., P, L, S, L]; what it holds for j > i is not read.

    q, k, decay: as they were given. That of the log-decays needs no pass over the scores: with everything that reads
    q through since_start and writes k through until_end added to dq and dk, it is the sum from the chunk's end of
    sum_P q dq - sum_S k dk, plus (at the chunk's last token) the chunk's last state times its gradient, summed over V.
    """
    *lead, P, L, K = q.shape
    S = k.shape[-3]
    q, k, decay = q.reshape(-1, P, L, K), k.reshape(-1, S, L, K), decay.reshape(-1, L, K)
    dscores = dscores.reshape(-1, P, L, S, L)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    for p, s in product(range(P), range(S)):
        same = dscores[:, p, :, s].diagonal(dim1=1, dim2=2)[..., None]
        _accumulate(dq[:, p], same, k[:, s], first=s == 0)
        _accumulate(dk[:, s], same, q[:, p], first=p == 0)
    since, until = decay.clone(), torch.ones_like(decay)
    q_scratch, k_scratch = _scratch(q), _scratch(k)
    m = 1
    while m < L:
        q_scaled, k_scaled = _scaled(q, since, 1, m, q_scratch), _scaled(k, until, 0, m, k_scratch)
        dfound = dscores.new_empty(len(q), L // (2 * m), P, m, S, m)
        for p, s in product(range(P), range(S)):
            dfound[:, :, p, :, s].copy_(_corners(dscores[:, p, :, s], m))
        dfound = dfound.view(-1, P * m, S * m)
        _add_scaled(dq, since, 1, m, _matmul(dfound, k_scaled))
        _add_scaled(dk, until, 0, m, _matmul(dfound.transpose(1, 2), q_scaled))
        _join(since, until, m)
        m *= 2
    return dq.view(*lead, P, L, K), dk.view(*lead, S, L, K)


def _half(x: Tensor, half: int, m: int) -> Tensor:
    """Of x [X, L, K] the first (0) or second (1) half of each block of 2m tokens, [X, L/2m, m, K], a view."""
    X, L, K = x.shape
    return x.view(X, L // (2 * m), 2, m, K)[:, :, half]


def _corners(scores: Tensor, m: int) -> Tensor:
    """Of scores [X, L, L] the queries of second halves with the keys of first halves of each block of 2m tokens.

    A view, [X, L/2m, m, m].
    """
    X, L, _ = scores.shape
    n = L // (2 * m)
    return scores.view(X, n, 2, m, n, 2, m)[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _scratch(x: Tensor) -> Tensor:
    """Room for half of x's tokens, used again at every level: on a CPU a fresh buffer costs more than filling it."""
    return torch.empty(x.numel() // 2, dtype=x.dtype, device=x.device)


def _scaled(x: Tensor, factor: Tensor, half: int, m: int, scratch: Tensor) -> Tensor:
    """x [X, P, L, K] times factor [X, L, K] in one half of each block of 2m tokens: [X L/2m, P m, K]."""
    X, P, L, K = x.shape
    out = scratch.view(X, L // (2 * m), P, m, K)
    for p in range(P):  # one by one: broadcasting over P makes the inner loops of the multiplication short
        torch.mul(_half(x[:, p], half, m), _half(factor, half, m), out=out[:, :, p])
    return out.view(-1, P * m, K)


def _add_scaled(grad: Tensor, factor: Tensor, half: int, m: int, x: Tensor) -> None:
    """Adds to one half of each block of 2m tokens of grad [X, P, L, K] x [X L/2m, P m, K] times factor [X, L, K]."""
    X, P, L, K = grad.shape
    x = x.view(X, L // (2 * m), P, m, K)
    for p in range(P):
        _half(grad[:, p], half, m).addcmul_(_half(factor, half, m), x[:, :, p])


def _join(since: Tensor, until: Tensor, m: int) -> None:
    """In place, from blocks of m tokens to blocks of 2m: decays since each block's start and until each block's end."""
    first, second, ending = _half(since, 0, m), _half(since, 1, m), _half(until, 0, m)
    # Two tokens one by one: multiplied together the inner loops would be short, and three times slower.
    parts = (slice(0, 1), slice(1, 2)) if m == 2 else (slice(None),)
    for tokens in parts:
        ending[:, :, tokens].mul_(second[:, :, -1:])
    for tokens in parts:
        second[:, :, tokens].mul_(first[:, :, -1:])


def _accumulate(out: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """out = a b the first time, out += a b later."""
    if first:
        torch.mul(a, b, out=out)
    else:
        out.addcmul_(a, b)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, without a matrix product where a has one or two columns: the library's own is slow there."""
    if a.shape[-1] > 2:
        return a @ b
    out = a[..., :1] * b[..., :1, :]
    return out if a.shape[-1] == 1 else out.addcmul_(a[..., 1:], b[..., 1:, :])
