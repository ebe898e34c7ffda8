"""Inverses of many small unit lower triangular matrices: the triangular system inside a chunk of the delta rules.

    T = (I + A)^-1,  A strictly lower triangular        dA = -T^T dT T^T below the diagonal

By forward substitution in blocks: T_ii of each diagonal block by rows, then T_ij = -T_ii sum_{m < i} A_im T_mj. The
product (I - A)(I + A^2)(I + A^4)... would need fewer steps, but loses every digit in float32 where keys repeat: the
powers of A then grow like binomial coefficients, while T stays small.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from decaybench.models.ops.precision import without_autocast

_BLOCK = 8  # measured: by rows the whole batch takes one pass a row, beyond 8 matrix products are faster


def inverse_unit_lower(A: Tensor) -> Tensor:
    """(I + A)^-1 for A [..., L, L], L >= 1, zero on and above the diagonal; float32 or float64, differentiable once."""
    T: Tensor = _Inverse.apply(A)  # type: ignore[no-untyped-call]
    return T


class _Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A: Tensor) -> Tensor:
        with without_autocast(A):
            T = _substitute(A.reshape(-1, *A.shape[-2:])).view(A.shape)
        ctx.save_for_backward(T)
        return T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dT: Tensor) -> Tensor:
        (T,) = ctx.saved_tensors
        with without_autocast(dT):
            transposed = T.transpose(-1, -2)
            dA: Tensor = (transposed @ dT @ transposed).tril_(-1).neg_()
        return dA


def _substitute(A: Tensor) -> Tensor:
    """A: [M, L, L]."""
    L = A.shape[-1]
    b = min(L, _BLOCK)
    if extra := -L % b:  # rows and columns of the identity behind the last
        return _substitute(F.pad(A, (0, extra, 0, extra)))[..., :L, :L].contiguous()
    T = torch.zeros_like(A)
    blocks = [slice(start, start + b) for start in range(0, L, b)]
    inverses = _by_rows(torch.stack([A[:, rows, rows] for rows in blocks]))
    for rows, inverse in zip(blocks, inverses, strict=True):
        T[:, rows, rows] = inverse
        if (start := rows.start) > 0:
            T[:, rows, :start] = (inverse @ (A[:, rows, :start] @ T[:, :start, :start])).neg_()
    return T


def _by_rows(A: Tensor) -> Tensor:
    """Row i of all matrices at once, with the matrices along the last dimension: few passes, over long vectors."""
    b = A.shape[-1]
    T = A.reshape(-1, b * b).t().contiguous().neg_().view(b, b, -1)
    for i in range(2, b):
        T[i, :i] += (T[i, :i, None] * T[:i, :i]).sum(0)
    T.diagonal().add_(1)
    return T.view(b * b, -1).t().contiguous().view(A.shape)
