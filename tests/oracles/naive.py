"""A recurrence with a matrix state as plain loops over rows, tokens and heads, sharing nothing with the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Step = Callable[[Tensor, int, int, int], Tensor]


def plain_loop(write: Step, read: Step, state: Tensor, positions: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """The definition with what positions [B, T] say: no write at 0, an empty state before 1.

    write(S, b, t, h): the state [K, V] after token t of row b in head h; read(S, b, t, h): the output [V] from it.
    state: [B, H, K, V] before the first token. Returns o [B, T, H, V] and the last state; autograd goes through both:

        plain_loop(
            lambda S, b, t, h: log_decay[b, t, h].exp() * S + torch.outer(k[b, t, h], v[b, t, h]),
            lambda S, b, t, h: q[b, t, h] @ S,
            state,
            positions,
        )
    """
    out, final = [], []
    for b, row in enumerate(positions):
        states, outputs = list(state[b]), []
        for t, position in enumerate(row):
            for h, S in enumerate(states):
                before = torch.zeros_like(S) if position == 1 else S
                states[h] = write(before, b, t, h) if position > 0 else before
            outputs.append(torch.stack([read(S, b, t, h) for h, S in enumerate(states)]))
        out.append(torch.stack(outputs))
        final.append(torch.stack(states))
    return torch.stack(out), torch.stack(final)
