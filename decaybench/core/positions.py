"""Positions: one tensor says where padding is, where documents start and how many tokens a cache has seen.

positions [B, T] int64: 0 is padding (an identity step), 1 the first token of a document (everything recurrent starts
anew), t the t-th token of its document; with a cached state they go on from the last position seen. `Layout` is what
the recurrences read off it, computed once a forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """What positions [B, T] mean for a recurrence. The optional masks are None where they would change nothing.

    positions: int64 [B, T], or [1, T] where all rows are alike. valid: bool [B, T], False at padding.
    resets: bool [B, T], True where a state from before this token must not be seen.
    segments: int64 [B, T], the number of resets up to and including each token: two tokens see each other only when
    theirs are equal, and a token sees the initial state only when its number is 0.
    """

    positions: Tensor
    valid: Tensor | None = None
    resets: Tensor | None = None
    segments: Tensor | None = None

    @staticmethod
    def of(positions: Tensor, *, has_state: bool = False, seen: Tensor | None = None) -> Layout:
        """The layout of positions [B, T]; has_state: whether a state from earlier calls flows in.

        seen: [B], the real tokens before these, of a state: where there were none, the state is empty and a first
        token has nothing to reset. None: not known.
        """
        valid = positions != 0
        resets = positions == 1
        if not has_state:
            resets[:, 0] = False
        elif seen is not None:
            resets[:, 0] &= seen > 0
        some = bool(resets.any())
        return Layout(
            positions,
            valid=None if bool(valid.all()) else valid,
            resets=resets if some else None,
            segments=resets.cumsum(1) if some else None,
        )

    @staticmethod
    def fresh(length: int, device: torch.device) -> Layout:
        """The layout of rows that each hold one document of `length` tokens from its start."""
        return Layout(torch.arange(1, length + 1, device=device)[None])

    def counts(self, batch: int) -> Tensor:
        """Real tokens a row, int64 [batch]."""
        if self.valid is None:
            return torch.full((batch,), self.positions.shape[1], device=self.positions.device)
        return self.valid.sum(1)

    def see_back(self, lag: int) -> Tensor | None:
        """Where the token `lag` steps earlier belongs to the same document, bool [B, T]; None: everywhere.

        Only meaningful on compacted rows, whose padding stands at the end.
        """
        return None if self.resets is None else self.positions > lag

    def last_position(self, otherwise: Tensor) -> Tensor:
        """The position of each row's last real token, int64 [B]; `otherwise` [B] where the row has none."""
        counts = self.counts(len(otherwise))
        positions = self.positions.expand(len(otherwise), -1)
        last = positions.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        return torch.where(counts > 0, last, otherwise)


def going_on(positions: Tensor, seen: Tensor) -> Tensor:
    """positions [B, T] of rows whose first document goes on after `seen` [B] tokens of it that came before.

    Documents that start later in a row stay as they are, and so do rows that have seen nothing.
    """
    real = positions != 0
    count = real.cumsum(1)
    later = ((positions == 1) & (count > 1)).cumsum(1) > 0
    return torch.where(real & ~later & (seen > 0)[:, None], seen[:, None] + count, positions)


def compaction(positions: Tensor) -> Tensor | None:
    """The order [B, T] that moves each row's padding to its end, or None where it stands there already."""
    padding = positions == 0
    if not bool((padding[:, :-1] & ~padding[:, 1:]).any()):
        return None
    return torch.argsort(padding.long(), dim=1, stable=True)


def check_positions(positions: Tensor, seen: Tensor | None = None) -> None:
    """Raises ValueError unless each row's real positions restart at 1 or go on by one (from `seen` [B], if given).

    A row that has seen nothing may start anywhere, in the middle of a document whose beginning the caller leaves out.
    """
    order = compaction(positions)
    rows = positions if order is None else positions.gather(1, order)
    before = torch.zeros_like(rows[:, :1]) if seen is None else seen[:, None].to(rows)
    previous = torch.cat([before, rows[:, :-1]], dim=1)
    fine = (rows == 0) | (rows == 1) | (rows == previous + 1)
    fine[:, :1] |= (before == 0) & (rows[:, :1] > 0)
    if not bool(fine.all()):
        row, column = (int(index) for index in (~fine).nonzero()[0])
        raise ValueError(
            f"positions: row {row} goes from {int(previous[row, column])} to {int(rows[row, column])}; "
            "each real token continues its document by one or starts a new one at 1"
        )
