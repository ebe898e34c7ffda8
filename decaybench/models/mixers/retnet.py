"""RetNet's retention (Sun et al., "Retentive Network", arXiv 2307.08621).

    q, k, v, g = W_in x                    q, k, v through a short convolution and SiLU, if there is one
    q, k       = q, k turned by their positions
    S_t        = gamma S_{t-1} + k_t v_t^T             gamma_h = 1 - 2^(-5-h), fixed, one a head
    y          = W_out (RMSNorm(S_t^T q_t / sqrt(K)) * SiLU(g))              the norm within each head

With PoST's variant `minimal` log_decay = -exp(P - alpha log t) in the place of log gamma, P learned; in `paper`, gamma
and the rotation give way to GLA's softplus gate, and nothing is left that isn't GLA with PoST. Initial values, and the
norm without a mean, as in flash-linear-attention's MultiScaleRetention layer.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from decaybench.core.errors import UserError
from decaybench.models.branch import Place
from decaybench.models.mixers.gla import Gate, LinearAttention, LinearAttentionConfig, SoftplusGate, added_spectrum
from decaybench.models.ops.rotary import rotary
from decaybench.models.ops.scalar_decay import scalar_decay


class RetNetConfig(LinearAttentionConfig):
    """RetNet's sizes."""

    n_heads: int = Field(default=8, ge=1, description="number of heads (H)")
    expand_v: float = Field(default=2.0, gt=0, description="value channels of all heads / d_model")
    rope_base: float = Field(default=10_000.0, gt=1, description="base of the rotary wavelengths")


class RetNet(LinearAttention):
    """The mixer."""

    def __init__(self, config: RetNetConfig, place: Place) -> None:
        softplus = place.post is not None and place.post.replaces_gate
        super().__init__(config, place, SoftplusGate(config, place) if softplus else FixedGate(config, place))
        self.rope_base = None if softplus else config.rope_base
        K = config.head_dims(place.d_model)[0]
        if K % 2 and not softplus:
            raise UserError(f"mixer.n_heads={config.n_heads} makes heads of {K} key channels; rotation needs pairs")

    def placed(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Both turned; with the softplus gate, as GLA's."""
        if self.rope_base is None:
            return super().placed(q, k, positions)
        q = rotary(q, positions, self.rope_base, scale=q.shape[-1] ** -0.5)
        return q, rotary(k, positions, self.rope_base)

    def timescales(self, position: int) -> Tensor:
        """One a head, [H]; with the softplus gate one a key channel, [H K]."""
        return self.gate.timescales(position)


class FixedGate(Gate):
    """Decays that don't depend on the input. Call: x [B, T, D], positions -> log_decay float32 [B, T, H]."""

    recurrence = staticmethod(scalar_decay)

    def __init__(self, config: RetNetConfig, place: Place) -> None:
        super().__init__()
        self.heads = config.n_heads
        self.spectrum = added_spectrum(
            place.post, self.heads, lambda draws: (-self._log_gamma()).log(), lambda tau: -math.log(tau)
        )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.spectrum is None:
            log_decay = self._log_gamma().to(x.device)
        else:
            log_decay = -self.spectrum.log_rate(positions).exp()
        return log_decay.to(wide).expand(*x.shape[:2], self.heads)

    def _log_gamma(self) -> Tensor:
        """float64 [H]: at head 30, 1 - gamma is below float32's rounding of gamma."""
        return torch.log1p(-(2.0 ** -(5.0 + torch.arange(self.heads, dtype=torch.float64, device="cpu"))))

    def timescales(self, position: int) -> Tensor:
        """[H]."""
        if self.spectrum is None:
            return (-1.0 / self._log_gamma()).float()
        device = next(self.spectrum.parameters()).device
        return 1.0 / self.spectrum.log_rate(torch.full((1, 1), position, device=device)).exp().flatten()
