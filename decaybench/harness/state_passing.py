"""State passing: training sequences that start from another sequence's final state (arXiv 2507.02782).

A recurrence that only ever starts empty sees few of the states that a long text leads to, and fails on the others.
So a sequence of step s starts, with probability p, where one of step s-1 ended:

    state_0(row) = stop_gradient(state_T(another row of the step before)),  else empty

All that a model caches is passed: the recurrence's state, the last inputs of convolutions and token shifts, and the
number of tokens seen. Positions go on from there, so that PoST's t stays the number of tokens in the state; it grows
beyond the training length as sequences follow one another, (1-p) p^n of the rows after n others. The paper passes the
states of the step before to all rows (p = 1), in a few hundred steps after a usual training; a model that is trained so
from the start never meets the empty state that every evaluation starts from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from decaybench.core.draws import Draws
from decaybench.core.errors import UserError
from decaybench.core.hashing import key64
from decaybench.models.language_model import LanguageModel
from decaybench.models.state import ModelState, concatenated, filled, map_tensors, named_tensors

STATES_FILE = "states.safetensors"

_PASSED, _ORDER = 0, 1  # streams


class StatePassing:
    """The final states of a step's sequences, and which of the next step's start from which.

    share: p. after: steps before the first one that states are passed to.
    """

    def __init__(self, share: float, seed: int, after: int = 0) -> None:
        self._share, self._key, self._after = share, key64("state passing", seed), after
        self._states: ModelState | None = None

    def starts(self, step: int, sizes: Sequence[int]) -> list[ModelState | None]:
        """The states that a step's sequences start from, for each of its parts, of `sizes` rows; None: all empty.

        A function of the seed, the step and the states kept. Every kept state is passed once before one is passed
        again, as far as rows are drawn.
        """
        rows = sum(sizes)
        if self._states is None:
            return [None] * len(sizes)
        kept = len(self._states.seen)
        draws = Draws(self._key, np.array([step]))
        passed = draws.uniform(_PASSED, rows)[0] < self._share
        from_row = np.resize(draws.permutation(_ORDER, kept)[0], rows)
        found: list[ModelState | None] = []
        for part in np.split(np.arange(rows), np.cumsum(sizes)[:-1]):
            some = passed[part]
            found.append(_some_of(self._states, from_row[part], some) if some.any() else None)
        return found

    def wants(self, step: int) -> bool:
        """Whether the next step's sequences may start from this step's final states."""
        return step + 1 >= self._after

    def keep(self, states: Sequence[ModelState]) -> None:
        """Keep the final states of a step's parts, without their history, for the next step."""
        self._states = concatenated([state.detach() for state in states])

    def tensors(self) -> dict[str, Tensor]:
        """What is kept, for a checkpoint; empty before the first step."""
        return {} if self._states is None else named_tensors(self._states)

    def restore(self, tensors: Mapping[str, Tensor], model: LanguageModel) -> None:
        """Go on from what `tensors` said. Raises UserError where it is not this model's."""
        if not tensors:
            return
        token = torch.zeros(1, 1, dtype=torch.long, device=model.embedding.weight.device)
        with torch.no_grad():
            like = model.prefill(token).state
        assert like is not None
        try:
            self._states = filled(like, tensors)
        except ValueError as error:
            raise UserError(f"the checkpoint's {STATES_FILE} can't be gone on from: {error}") from None


def _some_of(states: ModelState, rows: np.ndarray, passed: np.ndarray) -> ModelState:
    """The states of these rows, empty where they aren't passed."""
    device = states.seen.device
    chosen = states.select(torch.from_numpy(rows).to(device))
    mask = torch.from_numpy(passed).to(device)
    return map_tensors(chosen, lambda t: torch.where(mask.reshape(-1, *[1] * (t.dim() - 1)), t, torch.zeros_like(t)))
