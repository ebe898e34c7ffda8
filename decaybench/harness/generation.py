"""Greedy generation: prompts of different lengths as one batch, read in pieces, then decoded from the state.

What a row gets doesn't depend on the others: shorter prompts are padded (position 0, an identity step), and a row that
has ended leaves the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decaybench.models.language_model import LanguageModel


@torch.no_grad()
def greedy(
    model: LanguageModel,
    prompts: Sequence[NDArray[np.int64]],
    new_tokens: int | Sequence[int],
    *,
    device: str | torch.device,
    stop_ids: frozenset[int] = frozenset(),
    finished: Callable[[int, list[int]], bool] | None = None,
) -> list[list[int]]:
    """The first choice after each prompt [T >= 1], again and again: the new tokens of each row.

    new_tokens: most of them, for all rows or for each. A row ends sooner with a token of `stop_ids`, which is its last
    one, or where `finished(row, its new tokens)` says so after a token.
    Raises ValueError on a prompt without tokens.
    """
    most = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else list(new_tokens)
    if len(most) != len(prompts):
        raise ValueError(f"new_tokens has {len(most)} numbers for {len(prompts)} prompts")
    empty = next((row for row, prompt in enumerate(prompts) if not len(prompt)), None)
    if empty is not None:
        raise ValueError(f"prompt {empty} has no tokens: nothing can follow it")
    found: list[list[int]] = [[] for _ in prompts]
    live = [row for row, limit in enumerate(most) if limit > 0]  # the rows of the batch
    if not live:
        return found
    output = model.prefill(*_padded([prompts[row] for row in live], device))
    while True:
        following = output.logits.argmax(-1)
        left = []
        for place, (row, token) in enumerate(zip(live, following.tolist(), strict=True)):
            found[row].append(token)
            if token in stop_ids or len(found[row]) >= most[row]:
                continue
            if finished is None or not finished(row, found[row]):
                left.append(place)
        if not left:
            return found
        state = output.state
        assert state is not None, "prefill and step return one"
        if len(left) < len(live):
            places = torch.tensor(left, device=following.device)
            live, following, state = [live[place] for place in left], following[places], state.select(places)
        output = model.step(following, state)


def _padded(prompts: Sequence[NDArray[np.int64]], device: str | torch.device) -> tuple[Tensor, Tensor | None]:
    """Tokens and positions [B, T], padded behind; no positions where all rows are equally long."""
    lengths = [len(prompt) for prompt in prompts]
    tokens = np.zeros((len(prompts), max(lengths)), dtype=np.int64)
    positions = np.zeros_like(tokens)
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        tokens[row, :length], positions[row, :length] = prompt, np.arange(1, length + 1)
    where = None if min(lengths) == max(lengths) else torch.from_numpy(positions).to(device)
    return torch.from_numpy(tokens).to(device), where
