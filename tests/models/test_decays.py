"""The decays that a model notes are those of its state: measured by single-step impulses in float64, no op of ours.

What a step does to a state is linear in it, so the difference of two steps from states that differ by D is the
transition applied to D. For Mamba-2, GLA and RetNet it is the decay alone. Gated DeltaNet's is exp(g) (I - beta k k^T),
whose largest singular value is exp(g); RWKV-7's removal is switched off (k_k = 0), on which its decays don't depend.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decaybench.models.language_model import LanguageModel
from decaybench.models.state import ModelState
from tests.models import small

T = 40
NAMES = ("mamba2", "rwkv7", "gated_deltanet", "gla", "retnet")
POST: dict[str, dict[str, Any] | None] = {
    "base": None,
    "paper": {"variant": "paper", "horizon": 16},
    "minimal": {"variant": "minimal", "horizon": 16},
}
MEMORY = {"mamba2": "ssm", "rwkv7": "wkv"}


def made(name: str, post: str = "base", **settings: Any) -> LanguageModel:
    model = small.model(name, post=POST[post], n_layers=2, **settings).eval()
    if name == "rwkv7":
        for block in model.blocks:
            block.mixer.k_k.data.zero_()  # type: ignore[union-attr]
    return model


def moved(state: ModelState, layer: int, D: Tensor) -> ModelState:
    """The state with D [K, V] added to what every head of one layer remembers."""
    old = state.layers[layer]
    name = MEMORY.get(type(old.mixer).__module__.rpartition(".")[2], "memory")
    mixer = replace(old.mixer, **{name: getattr(old.mixer, name) + D})
    layers = (*state.layers[:layer], replace(old, mixer=mixer), *state.layers[layer + 1 :])
    return replace(state, layers=layers)


def memory(state: ModelState, layer: int) -> Tensor:
    mixer = state.layers[layer].mixer
    found: Tensor = getattr(mixer, MEMORY.get(type(mixer).__module__.rpartition(".")[2], "memory"))
    return found


@torch.no_grad()
def impulses(model: LanguageModel, layer: int, tokens: Tensor) -> Tensor:
    """exp(log_decay) at positions 2 .. T of the one row of tokens [1, T], as one layer's state does it.

    [T - 1, H], or [T - 1, H, K, V]: what becomes of a 1 in each of its numbers.
    """
    state = model(tokens[:, :1], output_state=True).state
    found = []
    for t in range(1, tokens.shape[1]):
        _, _, K, V = memory(state, layer).shape
        square = model.config.name == "gated_deltanet"
        D = torch.eye(K, V, dtype=torch.float64) if square else torch.ones(K, V, dtype=torch.float64)
        plain = model.step(tokens[:, t], state).state
        other = model.step(tokens[:, t], moved(state, layer, D)).state
        E = (memory(other, layer) - memory(plain, layer))[0]
        found.append(torch.linalg.matrix_norm(E, ord=2) if square else E)
        state = plain
    return torch.stack(found)


def by_channel(found: Tensor, channels: int) -> Tensor:
    """Impulses as one number a head or channel, [T - 1, channels], after checking that the rest of them agree."""
    if found.ndim == 2:
        return found
    if channels == found.shape[1]:
        assert small.largest(found, found[:, :, :1, :1].expand_as(found)) < 1e-12
        return found[:, :, 0, 0]
    assert small.largest(found, found[..., :1].expand_as(found)) < 1e-12
    return found[..., 0].flatten(1)


@pytest.mark.parametrize("post", POST)
@pytest.mark.parametrize("name", NAMES)
def test_noted_decays_are_what_the_state_does(name: str, post: str) -> None:
    model = made(name, post)
    tokens = small.tokens(1, T, seed=3)
    (noted,) = model.decays(tokens)
    assert list(noted) == [0, 1]
    for layer in (0, 1):
        found = by_channel(impulses(model, layer, tokens), noted[layer].shape[-1])
        assert small.largest(found, noted[layer][0, 1:].exp()) < 1e-11
        assert 0.01 < float(found.mean()) < 0.999, "decays that say something"
        assert noted[layer].shape[-1] == len(model.blocks[layer].mixer.timescales(1))  # type: ignore[operator, union-attr, arg-type]


@pytest.mark.parametrize("name", [*NAMES, "attention"])
def test_pieces_packing_and_padding_note_the_same(name: str) -> None:
    model = made(name)
    tokens = small.tokens(2, 24)
    if name == "attention":
        assert [*model.decays(tokens)] == [{}]
        return
    (whole,) = model.decays(tokens)
    parts = [*model.decays(tokens, piece=7)]
    assert [part[1].shape[1] for part in parts] == [7, 7, 7, 3]
    assert small.largest(torch.cat([part[1] for part in parts], 1), whole[1]) < 1e-12

    row, pads = tokens[:1], torch.zeros(1, 5, dtype=torch.long)
    packed = torch.cat([pads, row[:, :10], pads, row[:, 10:]], 1)
    steps = torch.arange(1, 25)[None]
    where = torch.cat([pads, steps[:, :10], pads, steps[:, 10:]], 1)
    (padded,) = model.decays(packed, where)
    assert small.largest(padded[1][where != 0], whole[1][0]) < 1e-12
    again = torch.cat([row, row], 1)
    (twice,) = model.decays(again, torch.cat([steps, steps], 1))
    assert small.largest(twice[1][:, 24:], whole[1][:1]) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_a_filter_sees_what_it_saw(name: str) -> None:
    """With BFT as well: the residual's own observer is asked as before, and notes the same decays."""
    model = made(name, "paper", bft={})
    tokens = small.tokens(2, 24)
    (noted,) = model.decays(tokens)
    for layer, trace in enumerate(model.trace(tokens)):
        assert trace.log_decay is not None
        heads = trace.log_decay.shape[-1]
        assert small.largest(noted[layer].unflatten(-1, (heads, -1)).mean(-1), trace.log_decay) < 1e-12
