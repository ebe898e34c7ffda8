"""The feed-forward branches.

mlp:         W_out GELU(W_in x)
swiglu:      W_out (SiLU(W_gate x) * W_up x)                      (Shazeer, arXiv 2002.05202)
channel_mix: W_out ReLU(W_in (x + (x_{t-1} - x) * x_k))^2         (RWKV-7, arXiv 2503.14456, section 4)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from decaybench.core.config import Config
from decaybench.models.branch import Branch, Context, Observer, Place
from decaybench.models.module import DrawsFor, Linear, OrthogonalLinear
from decaybench.models.ops.precision import at_least_float32, keeps_precision
from decaybench.models.ops.token_shift import last_token, token_shift

Kind = Literal["mlp", "swiglu", "channel_mix"]
_MULTIPLES: dict[Kind, float] = {"mlp": 4.0, "swiglu": 8 / 3, "channel_mix": 4.0}


class FfnConfig(Config):
    """A block's feed-forward branch."""

    kind: Kind = Field(default="swiglu", description="which form; channel_mix is RWKV-7's")
    multiple: float | None = Field(
        default=None,
        gt=0,
        description="hidden width / d_model, rounded up to a multiple of 8; none: 8/3 for swiglu, 4 for the others",
    )

    def hidden(self, d_model: int) -> int:
        """The hidden width."""
        multiple = self.multiple or _MULTIPLES[self.kind]
        return max(8, -(-round(multiple * d_model) // 8) * 8)


def make_ffn(config: FfnConfig, place: Place) -> Branch:
    """The branch that a configuration names."""
    return ChannelMix(config, place) if config.kind == "channel_mix" else Ffn(config, place)


class Ffn(Branch):
    """A branch that sees one token at a time; it keeps no state."""

    def __init__(self, config: FfnConfig, place: Place) -> None:
        super().__init__()
        hidden = config.hidden(place.d_model)
        self.gated = config.kind == "swiglu"
        self.in_proj = Linear(place.d_model, 2 * hidden if self.gated else hidden)
        self.out_proj = Linear(hidden, place.d_model, shrink=place.shrink)

    def forward(
        self, x: Tensor, context: Context, state: None, observer: Observer | None = None
    ) -> tuple[Tensor, None]:
        hidden = self.in_proj(x)
        if observer is not None and observer.wants_dynamics:
            jacobian = swiglu_jacobian if self.gated else mlp_jacobian
            observer.dynamics(jacobian(hidden, self.in_proj.weight, self.out_proj.weight))
        if self.gated:
            gate, up = hidden.chunk(2, dim=-1)
            return self.out_proj(F.silu(gate) * up), None
        return self.out_proj(F.gelu(hidden)), None


class Identity(Branch):
    """y = x, where a block has nothing but a norm in the place of an FFN."""

    def forward(
        self, x: Tensor, context: Context, state: None, observer: Observer | None = None
    ) -> tuple[Tensor, None]:
        if observer is not None and observer.wants_dynamics:
            observer.dynamics(torch.ones_like(x, dtype=torch.promote_types(x.dtype, torch.float32)))
        return x, None


@dataclass(frozen=True)
class ChannelMixState:
    """last: [B, 1, D], the branch's last input."""

    last: Tensor


class ChannelMix(Branch):
    """RWKV-7's FFN. x_k: [D], how much of the token before each channel takes.

    Initial values as in RWKV-LM: x_k = 1 - (i/D)^(r^4) with r = 1 - layer/n_layers for channel i, W_in orthogonal,
    W_out = 0.
    """

    def __init__(self, config: FfnConfig, place: Place) -> None:
        super().__init__()
        self.place = place
        hidden = config.hidden(place.d_model)
        self.x_k = nn.Parameter(torch.empty(place.d_model))
        self.in_proj = OrthogonalLinear(place.d_model, hidden, gain=1.0)
        self.out_proj = OrthogonalLinear(hidden, place.d_model, gain=0.0)

    def initialise(self, draws_for: DrawsFor) -> None:
        D, remaining = self.place.d_model, 1 - self.place.layer / self.place.n_layers
        self.x_k.copy_(1 - (torch.arange(D) / D) ** remaining**4)

    def forward(
        self, x: Tensor, context: Context, state: ChannelMixState | None, observer: Observer | None = None
    ) -> tuple[Tensor, ChannelMixState | None]:
        difference, inputs = token_shift(x, context.layout, state.last if state else None)
        hidden = F.relu(self.in_proj(torch.addcmul(x, difference, self.x_k.to(x.dtype))))
        if observer is not None and observer.wants_dynamics:
            through = channel_mix_jacobian(hidden, self.in_proj.weight, self.out_proj.weight)
            observer.dynamics(through * (1 - self.x_k))
        y = self.out_proj(hidden.square())
        return y, ChannelMixState(last_token(inputs, context.layout)) if context.keep_state else None


@keeps_precision
def mlp_jacobian(hidden: Tensor, W_in: Tensor, W_out: Tensor) -> Tensor:
    """The diagonal of d y / d x, sum_k W_out[i, k] GELU'(hidden_k) W_in[k, i]; hidden = W_in x.

    hidden: [B, T, M]; W_in: [M, D]; W_out: [D, M]. Returns float32 (float64 stays) [B, T, D], as the two below.
    """
    hidden = at_least_float32(hidden)
    density = torch.exp(-0.5 * hidden.square()) / math.sqrt(2 * math.pi)
    return _along(torch.addcmul(torch.special.ndtr(hidden), hidden, density), W_in, W_out)


@keeps_precision
def swiglu_jacobian(hidden: Tensor, W_in: Tensor, W_out: Tensor) -> Tensor:
    """The same for W_out (SiLU(gate) * up), with (gate, up) = hidden [B, T, 2 M] and W_in [2 M, D]."""
    gate, up = at_least_float32(hidden).chunk(2, dim=-1)
    W_gate, W_up = W_in.chunk(2)
    share = torch.sigmoid(gate)
    silu = gate * share
    slope = (share + silu * (1 - share)) * up
    return _along(slope, W_gate, W_out) + _along(silu, W_up, W_out)


@keeps_precision
def channel_mix_jacobian(hidden: Tensor, W_in: Tensor, W_out: Tensor) -> Tensor:
    """The same for W_out ReLU(.)^2, with hidden after the ReLU, and with respect to what W_in reads."""
    return _along(2 * at_least_float32(hidden), W_in, W_out)


def _along(slope: Tensor, W_in: Tensor, W_out: Tensor) -> Tensor:
    """sum_k W_out[i, k] slope_k W_in[k, i], [B, T, D]."""
    return F.linear(slope, W_out.to(slope.dtype) * W_in.to(slope.dtype).T)
