"""The feed-forward branches.

mlp:    W_out GELU(W_in x)
swiglu: W_out (SiLU(W_gate x) * W_up x)         (Shazeer, arXiv 2002.05202)
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from decaybench.core.config import Config
from decaybench.models.branch import Branch, Context
from decaybench.models.module import Linear


class FfnConfig(Config):
    """A block's feed-forward branch."""

    kind: Literal["mlp", "swiglu"] = Field(default="swiglu", description="which form")
    multiple: float = Field(default=8 / 3, gt=0, description="hidden width / d_model, rounded up to a multiple of 8")


class Ffn(Branch):
    """The branch; it keeps no state."""

    def __init__(self, config: FfnConfig, d_model: int, shrink: float) -> None:
        super().__init__()
        hidden = max(8, -(-round(config.multiple * d_model) // 8) * 8)
        self.gated = config.kind == "swiglu"
        self.in_proj = Linear(d_model, 2 * hidden if self.gated else hidden)
        self.out_proj = Linear(hidden, d_model, shrink=shrink)

    def forward(self, x: Tensor, context: Context, state: None) -> tuple[Tensor, None]:
        hidden = self.in_proj(x)
        if self.gated:
            gate, up = hidden.chunk(2, dim=-1)
            return self.out_proj(F.silu(gate) * up), None
        return self.out_proj(F.gelu(hidden)), None
