"""Gated DeltaNet (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464).

    q, k, v, a, b, z = W_in x              q, k, v through a short convolution and SiLU
    q, k      = q / (|q| sqrt(K)), k / |k|                       each head
    beta      = sigmoid(b)                 how much of what stands under k a write replaces; 2 sigmoid(b) reflects it
    log_decay = -exp(log_rate) softplus(a + dt_bias)             log_rate = A_log, or PoST's P - alpha log t
    S_t       = exp(log_decay_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
    y         = W_out (RMSNorm(S_t^T q_t) * SiLU(z))             the norm within each head

Initial values as in flash-linear-attention's GatedDeltaNet layer: A ~ U(0, 16), dt log-uniform in [1e-3, 0.1].
Negative eigenvalues: Grazzi et al., "Unlocking State-Tracking in Linear RNNs", arXiv 2411.12537.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from decaybench.core.config import Config
from decaybench.core.errors import UserError
from decaybench.models.addons.post import make_spectrum
from decaybench.models.branch import Context, Mixer, Observer, Place
from decaybench.models.mixers.parts import MemoryState, ShortConv, initial_dt_bias, split_heads
from decaybench.models.module import DrawsFor, Linear, RMSNorm, uniform_
from decaybench.models.ops.gated_delta_rule import DEFAULT_CHUNK, gated_delta_rule
from decaybench.models.ops.precision import at_least_float32

_A_RANGE = (0.0, 16.0)
_A_FLOOR = 1e-4  # U(0, 16) can draw 0, whose log is -inf
_NORM_EPS = 1e-5
_LENGTH_EPS = 1e-6
_POST_DT = 0.01  # where PoST counts its initial timescales: the middle of the range of dt


class GatedDeltaNetConfig(Config):
    """Gated DeltaNet's sizes."""

    n_heads: int = Field(default=6, ge=1, description="number of heads")
    head_dim: int = Field(default=256, ge=1, description="key channels a head (K)")
    expand_v: float = Field(default=2.0, gt=0, description="value channels a head / head_dim")
    conv_width: int | None = Field(default=4, ge=1, description="taps of the short convolution, tokens; none: none")
    output_gate: bool = Field(default=True, description="multiply each head's output by SiLU(z)")
    negative_eigenvalues: bool = Field(default=False, description="beta in [0, 2] instead of [0, 1]")
    chunk_size: int = Field(default=DEFAULT_CHUNK, ge=1, description="tokens a chunk of the chunked form; speed only")

    def value_dim(self) -> int:
        """Value channels a head (V). Raises UserError where that isn't a whole number."""
        wanted = self.head_dim * self.expand_v
        V = round(wanted)
        if V < 1 or not math.isclose(V, wanted, rel_tol=1e-9):
            sizes = f"mixer.head_dim * mixer.expand_v = {self.head_dim} * {self.expand_v}"
            raise UserError(f"{sizes} must be a whole number of value channels, not {wanted:g}")
        return V


class GatedDeltaNet(Mixer):
    """The mixer. Dimensions: H = n_heads, K = head_dim, V = expand_v K."""

    float32_names = frozenset({"dt_bias"})
    no_weight_decay = frozenset({"dt_bias"})

    def __init__(self, config: GatedDeltaNetConfig, place: Place) -> None:
        super().__init__()
        self.config, self.backend = config, place.backend
        self.heads = H = config.n_heads
        K, V = config.head_dim, config.value_dim()
        convolved = H * (2 * K + V)
        self.value_dim, self.projected = V, [convolved, H, H, *([H * V] if config.output_gate else [])]
        self.in_proj = Linear(place.d_model, sum(self.projected))
        self.conv = ShortConv(convolved, config.conv_width, bias=False) if config.conv_width else None
        # It learns in both variants, unlike Mamba-2's.
        frozen = place.post is not None and place.post.dt_bias == "frozen"
        self.dt_bias = nn.Parameter(torch.empty(H), requires_grad=not frozen)
        paper = place.post is not None and place.post.variant == "paper"
        self.spectrum = make_spectrum(
            place.post,
            H,
            self._initial_log_rates,
            lambda tau: -math.log(_POST_DT * tau),
            timescales=_paper_timescales if paper else _minimal_timescales,
        )
        self.norm = RMSNorm(V, eps=_NORM_EPS)
        self.out_proj = Linear(H * V, place.d_model, shrink=place.shrink)

    def initialise(self, draws_for: DrawsFor) -> None:
        self.dt_bias.copy_(initial_dt_bias(self.config.n_heads, draws_for("dt_bias")))

    def _initial_log_rates(self, draws: torch.Generator) -> Tensor:
        A = torch.empty(self.config.n_heads, device="cpu")
        uniform_(A, *_A_RANGE, draws)
        return A.clamp(min=_A_FLOOR).log()

    def forward(
        self, x: Tensor, context: Context, state: MemoryState | None, observer: Observer | None = None
    ) -> tuple[Tensor, MemoryState | None]:
        c, layout = self.config, context.layout
        H, K, V = c.n_heads, c.head_dim, self.value_dim
        qkv, a, b, *z = self.in_proj.parts(x, *self.projected)
        inputs = None
        if self.conv is not None:
            qkv, inputs = self.conv(qkv, layout, state.conv if state else None)
        qk, v = torch.split(F.silu(qkv), [2 * H * K, H * V], dim=-1)
        unit: Tensor = _UnitLength.apply(at_least_float32(split_heads(qk, 2 * H)))  # type: ignore[no-untyped-call]
        q, k = torch.split(unit, H, dim=2)

        # Decays in float32: dt_bias and the spectrum are, and promotion carries dt along.
        v = split_heads(v, H)
        log_decay = -self.spectrum.log_rate(layout.positions).exp() * F.softplus(a + self.dt_bias)
        logit = at_least_float32(b)
        if observer is not None and (log_w := observer.write(v, logit.sigmoid(), log_decay)) is not None:
            logit = logit + log_w  # as in a Kalman filter the gain moves in odds: it never leaves (0, 1)
        beta = logit.sigmoid()
        o, memory = gated_delta_rule(
            q * K**-0.5,
            k,
            v,
            2 * beta if c.negative_eigenvalues else beta,
            log_decay,
            initial_state=state.memory if state else None,
            output_final_state=context.keep_state,
            layout=layout,
            chunk_size=c.chunk_size,
            backend=self.backend,
        )
        y = self.norm(o).flatten(2)
        gate = F.silu(z[0]) if z else None
        if gate is not None:
            y = y * gate
        if observer is not None:
            scale = self.norm.weight.expand(o.shape)
            observer.read(self.norm.share(o)[..., 0], scale if gate is None else scale * split_heads(gate, H))
            y = observer.output(y)
        return self.out_proj(y), MemoryState.after(memory, inputs, layout, c.conv_width)

    def timescales(self, position: int) -> Tensor:
        at = torch.full((1, 1), position, device=self.dt_bias.device)
        rates = self.spectrum.log_rate(at).reshape(-1).exp() * F.softplus(self.dt_bias)
        return 1.0 / rates


class _UnitLength(torch.autograd.Function):
    """y = x / sqrt(|x|^2 + eps) over the last dimension, dx = (dy - y (y . dy)) / sqrt(|x|^2 + eps).

    Written with its gradient: autograd's own takes almost twice as long on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(_LENGTH_EPS).rsqrt_()
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        y, scale = ctx.saved_tensors
        along = (y * dy).sum(-1, keepdim=True)
        dx: Tensor = torch.addcmul(dy, y, along, value=-1).mul_(scale)
        return dx


def _paper_timescales(horizon: int) -> tuple[float, float]:
    """P from 0 to log horizon."""
    return 1 / (_POST_DT * horizon), 1 / _POST_DT


def _minimal_timescales(horizon: int) -> tuple[float, float]:
    return 1.0, float(horizon)
