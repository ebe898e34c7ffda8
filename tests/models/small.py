"""Small models for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from decaybench.core.config import parse
from decaybench.models.config import ModelConfig
from decaybench.models.language_model import LanguageModel, build_model

SIZES = {
    "mamba2": {"d_state": 8, "headdim": 8, "chunk_size": 8},
    "rwkv7": {"head_dim": 8, "chunk_size": 8},
    "gated_deltanet": {"n_heads": 4, "head_dim": 8, "chunk_size": 8},
    "gla": {"n_heads": 4, "chunk_size": 8},
    "retnet": {"n_heads": 4, "chunk_size": 8},
    "attention": {"n_heads": 4},
}


def config(name: str = "mamba2", mixer: dict[str, Any] | None = None, **settings: Any) -> ModelConfig:
    sizes = SIZES[name] | (mixer or {})
    return parse(ModelConfig, {"name": name, "vocab_size": 31, "d_model": 32, "mixer": sizes, **settings})


def model(name: str = "mamba2", *, seed: int = 0, noise: float = 0.2, **settings: Any) -> LanguageModel:
    """A float64 model with every parameter moved away from its initial value."""
    built = build_model(config(name, **settings), seed).double()
    draws = torch.Generator().manual_seed(seed)
    for parameter in built.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
    return built


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 31, shape, generator=torch.Generator().manual_seed(seed))


def largest(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a.detach() - b.detach()).abs().max()) if a.numel() else 0.0


@st.composite
def row_of_positions(draw: st.DrawFn, length: int, state: bool) -> list[int]:
    """Padding anywhere, documents that start anywhere; the first goes on from position 7 where there is a state."""
    at, row = 7 if state else 0, []
    for kind in draw(st.lists(st.sampled_from(["token"] * 4 + ["pad", "start"]), min_size=length, max_size=length)):
        at = at if kind == "pad" else 1 if kind == "start" else at + 1
        row.append(0 if kind == "pad" else at)
    return row
