"""Mamba-2 (Dao and Gu, "Transformers are SSMs", arXiv 2405.21060).

    z, x, B, C, dt = W_in u                  x, B, C through a short convolution and SiLU
    dt          = softplus(dt + dt_bias)     one step size a head
    log_decay   = -exp(log_rate) dt          log_rate = A_log, or PoST's P - alpha log t
    S_t         = exp(log_decay_t) S_{t-1} + B_t (dt_t x_t)^T
    y           = W_out RMSNorm((C_t^T S_t + D x) * SiLU(z))     the norm within each group of heads

Initial values as in mamba-ssm's Mamba2: A ~ U(1, 16), dt log-uniform in [1e-3, 0.1], D = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from decaybench.core.config import Config
from decaybench.core.errors import UserError
from decaybench.models.addons.post import make_spectrum
from decaybench.models.branch import Context, Mixer, Observer, Place
from decaybench.models.mixers.parts import ShortConv, initial_dt_bias, inverse_softplus
from decaybench.models.module import DrawsFor, Linear, RMSNorm, uniform_
from decaybench.models.ops.scalar_decay import DEFAULT_CHUNK, scalar_decay
from decaybench.models.ops.short_conv import conv_tail

_A_RANGE = (1.0, 16.0)
# The dt at which PoST counts its initial timescales: the paper's frozen value, or the middle of the baseline's range.
_POST_DT = {"paper": 0.05, "minimal": 0.01}
_USUAL_DT_BIAS = {"paper": "frozen", "minimal": "learned"}


class Mamba2Config(Config):
    """Mamba-2's sizes."""

    d_state: int = Field(default=128, ge=1, description="state channels a head (K)")
    headdim: int = Field(default=64, ge=1, description="value channels a head (V)")
    expand: int = Field(default=2, ge=1, description="inner width / d_model")
    n_groups: int = Field(default=1, ge=1, description="groups of heads that share B and C")
    conv_width: int = Field(default=4, ge=1, description="taps of the short convolution, tokens")
    chunk_size: int = Field(default=DEFAULT_CHUNK, ge=1, description="tokens a chunk of the chunked form; speed only")

    def heads(self, d_model: int) -> int:
        """Number of heads. Raises UserError where the sizes don't divide."""
        inner = self.expand * d_model
        if inner % self.headdim:
            raise UserError(f"mixer.headdim={self.headdim} must divide expand * d_model = {inner}")
        heads = inner // self.headdim
        if heads % self.n_groups:
            raise UserError(f"mixer.n_groups={self.n_groups} must divide the number of heads, {heads}")
        return heads


@dataclass(frozen=True)
class Mamba2State:
    """conv: [B, conv_width-1, inner + 2 G K], the convolution's last inputs. ssm: float32 [B, H, K, V]."""

    conv: Tensor
    ssm: Tensor


class Mamba2(Mixer):
    """The mixer. Dimensions: D = d_model, H heads of V = headdim, G groups of K = d_state, inner = H V."""

    float32_names = frozenset({"dt_bias", "D"})
    no_weight_decay = frozenset({"dt_bias", "D"})

    def __init__(self, config: Mamba2Config, place: Place) -> None:
        super().__init__()
        self.config, self.post, self.backend = config, place.post, place.backend
        self.heads = H = config.heads(place.d_model)
        self.inner = config.expand * place.d_model
        self.convolved = self.inner + 2 * config.n_groups * config.d_state
        self.in_proj = Linear(place.d_model, self.inner + self.convolved + H)
        self.conv = ShortConv(self.convolved, config.conv_width)
        frozen = place.post is not None and (place.post.dt_bias or _USUAL_DT_BIAS[place.post.variant]) == "frozen"
        self.dt_bias = nn.Parameter(torch.empty(H), requires_grad=not frozen)
        self.D = nn.Parameter(torch.empty(H))
        self.spectrum = make_spectrum(place.post, H, self._initial_log_rates, self._log_rate_of)
        self.norm = RMSNorm(self.inner, eps=1e-5, groups=config.n_groups)
        self.out_proj = Linear(self.inner, place.d_model, shrink=place.shrink)

    def initialise(self, draws_for: DrawsFor) -> None:
        self.D.fill_(1.0)
        if self.post is not None and self.post.variant == "paper":
            self.dt_bias.copy_(inverse_softplus(torch.full((self.heads,), _POST_DT["paper"], device="cpu")))
        else:
            self.dt_bias.copy_(initial_dt_bias(self.heads, draws_for("dt_bias")))

    def _log_rate_of(self, timescale: float) -> float:
        assert self.post is not None
        return -math.log(_POST_DT[self.post.variant] * timescale)

    def _initial_log_rates(self, draws: torch.Generator) -> Tensor:
        A = torch.empty(self.heads)
        uniform_(A, *_A_RANGE, draws)
        return A.log()

    def forward(
        self, x: Tensor, context: Context, state: Mamba2State | None, observer: Observer | None = None
    ) -> tuple[Tensor, Mamba2State | None]:
        B, T, _ = x.shape
        c, layout = self.config, context.layout
        z, xBC, dt = self.in_proj.parts(x, self.inner, self.convolved, self.heads)
        xBC, inputs = self.conv(xBC, layout, state.conv if state else None)
        xBC = F.silu(xBC)
        u, B_, C_ = torch.split(xBC, [self.inner, c.n_groups * c.d_state, c.n_groups * c.d_state], dim=-1)
        u = u.reshape(B, T, self.heads, c.headdim)

        # Decays in float32: dt_bias and the spectrum are, and promotion carries dt along.
        dt = F.softplus(dt + self.dt_bias)
        log_decay = -self.spectrum.log_rate(layout.positions).exp() * dt
        step = dt
        if observer is not None and (log_w := observer.write(u, dt, log_decay)) is not None:
            step = dt * log_w.exp()
        y, ssm = scalar_decay(
            C_.reshape(B, T, c.n_groups, c.d_state),
            B_.reshape(B, T, c.n_groups, c.d_state),
            u * step[..., None],
            log_decay,
            initial_state=state.ssm if state else None,
            output_final_state=context.keep_state,
            layout=layout,
            chunk_size=c.chunk_size,
            backend=self.backend,
        )
        gate = F.silu(z)
        gated = torch.addcmul(y, u, self.D[:, None]).reshape(B, T, self.inner).to(x.dtype) * gate
        normed = self.norm(gated)
        if observer is not None:
            size = y.square().mean(-1).view(B, T, c.n_groups, -1) * self.norm.factor(gated).square()
            observer.read(size.flatten(2), (gate * self.norm.weight).view(y.shape))
            normed = observer.output(normed)
        y = self.out_proj(normed)
        if ssm is None:
            return y, None
        return y, Mamba2State(conv_tail(inputs, layout, c.conv_width), ssm)

    def timescales(self, position: int) -> Tensor:
        at = torch.full((1, 1), position, device=self.dt_bias.device)
        rates = self.spectrum.log_rate(at).reshape(-1).exp() * F.softplus(self.dt_bias)
        return 1.0 / rates
