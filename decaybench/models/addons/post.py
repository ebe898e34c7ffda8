"""PoST: ordered, position-adaptive decay spectra (Cao, "Optimal Decay Spectra for Linear Recurrences", 2604.07658).

A mixer owns one `Spectrum` of N log-rates and makes one call, `log_rate`; it doesn't know which kind it has.

    P_k     = base + sum_{j<k} softplus(delta_j)                                     increasing: slow to fast
    alpha_k = clamp((N-1-k)/(N-1) + (c_k - k G) / log T, 0, 1),  c_k = P_k - P_0,  G = c_{N-1} / (N-1)
    log_rate[t, k] = P_k - alpha_k log t                                             t = 1 at the first token

k = 0 is the slowest head (alpha = 1), k = N-1 the fastest (alpha = 0). Only the decay is scaled, never the input.
Mixers use the log-rate inside an exponential (Mamba-2, Gated DeltaNet, GLA, RetNet) or as a logit (RWKV-7); where P
isn't itself the log of a speed, the taper is taken from the log-speed that it gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from decaybench.core.config import Config
from decaybench.core.errors import UserError
from decaybench.models.module import DrawsFor, Module

Taper = Literal["analytical", "linear", "learned"]
Gate = Literal["baseline", "softplus"]
USUAL_GATE: dict[str, Gate] = {"paper": "softplus", "minimal": "baseline"}


class PostConfig(Config):
    """PoST and its switches. `variant` sets what else changes against the baseline; the rest are ablations."""

    variant: Literal["paper", "minimal"] = Field(
        default="paper",
        description="paper: with the changes that the paper's code makes beside PoST; minimal: the idea alone",
    )
    reparameterize: bool = Field(default=True, description="ordered log-rates; off: the architecture's own parameter")
    position_scaling: bool = Field(default=True, description="multiply the rates by t^-alpha")
    taper: Taper = Field(
        default="analytical",
        description="how alpha falls from 1 to 0 over the heads; by the rank of the initial rates if not ordered",
    )
    range: tuple[float, float] | None = Field(
        default=None, description="fastest and slowest initial timescale at t = 1, tokens; none: 1 and horizon"
    )
    dt_bias: Literal["learned", "frozen"] | None = Field(
        default=None,
        description="whether dt_bias learns, where there is one; none: frozen in Mamba-2's variant paper, else learned",
    )
    gate: Gate | None = Field(
        default=None,
        description="GLA, RetNet: the architecture's own gate or the softplus gate of the paper's code; none: softplus "
        "in variant paper, baseline in minimal",
    )
    control: Literal["none", "static_wide", "shuffled"] = Field(
        default="none",
        description="static_wide: no position, but the slow end of the range times horizon; shuffled: tapers permuted "
        "over heads",
    )
    horizon: int | None = Field(
        default=None, ge=2, description="T in the formulas, tokens; none: the run's training length"
    )

    @model_validator(mode="after")
    def _consistent(self) -> PostConfig:
        if self.range is not None and not 0 < self.range[0] <= self.range[1]:
            raise ValueError(f"range={self.range} must be two timescales in tokens, 0 < fastest <= slowest")
        if self.control == "static_wide" and not self.reparameterize:
            raise ValueError("control=static_wide needs reparameterize=true: it is an ordered spectrum")
        if self.control == "static_wide" and not self.position_scaling:
            raise ValueError("control=static_wide has no position scaling: leave position_scaling=false out")
        if self.control == "static_wide" and self.range is not None:
            raise ValueError(f"control=static_wide widens the usual range: it excludes range={self.range}")
        if self.control == "shuffled" and not self.position_scaling:
            raise ValueError("control=shuffled needs position_scaling=true: it permutes the tapers")
        if self.taper != "analytical" and not self.reparameterize:
            raise ValueError(f"taper={self.taper} needs reparameterize=true: else tapers go by initial rank and stay")
        if self.taper != "analytical" and not self.scales:
            raise ValueError(f"taper={self.taper} tapers nothing: rates don't depend on the position here")
        if self.range is not None and not self.reparameterize:
            raise ValueError(f"range={self.range} needs reparameterize=true: the baseline's rates have their own")
        return self

    @property
    def name(self) -> str:
        """What tables call it: `post` for variant paper, then the switches that differ: post-minimal-linear."""
        parts = [
            ("minimal", self.variant == "minimal"),
            ("unordered", not self.reparameterize),
            ("static", not self.position_scaling),
            (self.taper, self.taper != "analytical"),
            ("range", self.range is not None),
            (f"{self.dt_bias}-dt", self.dt_bias is not None),
            (f"{self.gate}-gate", self.gate is not None),
            (self.control.replace("_", "-"), self.control != "none"),
        ]
        return "-".join(["post", *(name for name, differs in parts if differs)])

    @property
    def scales(self) -> bool:
        """Whether rates depend on the position."""
        return self.position_scaling and self.control != "static_wide"

    @property
    def replaces_gate(self) -> bool:
        """Whether an architecture that offers both gates takes the softplus gate."""
        return (self.gate or USUAL_GATE[self.variant]) == "softplus"

    def timescale_range(self, usual: Callable[[int], tuple[float, float]]) -> tuple[float, float]:
        """The fastest and the slowest initial timescale at t = 1, in tokens.

        usual: what the variant takes for an architecture, from the horizon.
        """
        if self.range is not None:
            return self.range
        horizon = self.required_horizon()
        fastest, slowest = usual(horizon)
        return fastest, slowest * horizon if self.control == "static_wide" else slowest

    def required_horizon(self) -> int:
        """`horizon`. Raises ValueError where nobody set it."""
        if self.horizon is None:
            raise ValueError("post.horizon is not set: give the training length in tokens")
        return self.horizon


def _as_is(P: Tensor) -> Tensor:
    return P


def _one_to_horizon(horizon: int) -> tuple[float, float]:
    return 1.0, float(horizon)


class Spectrum(Module):
    """The log-rates of one layer."""

    def ordered_rates(self) -> Tensor:
        """P, float32 [N]: the log-rates at t = 1."""
        raise NotImplementedError

    def tapers(self) -> Tensor | None:
        """alpha, float32 [N]; None where rates don't depend on the position."""
        return None

    def log_rate(self, positions: Tensor) -> Tensor:
        """P - alpha log t, float32, [N] without position scaling, else [B, T, N]; positions: int64 [B, T]."""
        P, alpha = self.ordered_rates(), self.tapers()
        if alpha is None:
            return P
        return P - alpha * positions.clamp(min=1).to(P.dtype).log()[..., None]


class FreeSpectrum(Spectrum):
    """The architecture's usual parameter, one free log-rate a head; with fixed tapers in the ablation `position only`.

    P: [N], initially `initial(generator)`. No weight decay: it would pull every rate towards 1.
    """

    float32_names = frozenset({"P", "alpha"})
    no_weight_decay = frozenset({"P"})

    def __init__(self, n: int, initial: Callable[[torch.Generator], Tensor], *, scales: bool, shuffled: bool) -> None:
        super().__init__()
        self.P = nn.Parameter(torch.empty(n))
        self._draw_initial = initial
        self._shuffled = shuffled
        self.alpha: Tensor | None
        self.register_buffer("alpha", torch.empty(n) if scales else None)

    def initialise(self, draws_for: DrawsFor) -> None:
        self.P.copy_(self._draw_initial(draws_for("P")))
        if self.alpha is not None:  # by the rank of the initial rates: the slowest head takes alpha = 1
            ranks = self.P.argsort(stable=True).argsort(stable=True)
            self.alpha.copy_(_shuffle(linear_taper(len(self.P))[ranks], self._shuffled))

    def ordered_rates(self) -> Tensor:
        return self.P

    def tapers(self) -> Tensor | None:
        return self.alpha


class TaperedSpectrum(Spectrum):
    """The ordered spectrum with its taper.

    base: scalar; deltas: [N-1]; logits: [N-1] with the learned taper. Initially P is evenly spaced from `slowest` to
    `fastest` log-rate. No weight decay on any of them.
    """

    float32_names = frozenset({"base", "deltas", "logits"})
    no_weight_decay = frozenset({"base", "deltas", "logits"})

    def __init__(
        self, n: int, slowest: float, fastest: float, config: PostConfig, log_speed: Callable[[Tensor], Tensor] = _as_is
    ) -> None:
        super().__init__()
        self._slowest, self._fastest = slowest, fastest
        self._config, self._log_speed = config, log_speed
        self.base = nn.Parameter(torch.empty(()))
        self.deltas = nn.Parameter(torch.empty(n - 1))
        self.logits = nn.Parameter(torch.empty(n - 1)) if config.scales and config.taper == "learned" else None

    def initialise(self, draws_for: DrawsFor) -> None:
        initial = torch.linspace(self._slowest, self._fastest, len(self.deltas) + 1, dtype=torch.float64)
        gaps = initial.diff()
        # A range of one point has gaps of 0, where log(expm1(gap)) is -inf and its gradient 0: start just above.
        self.deltas.copy_(gaps.clamp(min=1e-6).expm1().log())
        self.base.copy_(initial[0])
        if self.logits is not None:
            self.logits.zero_()

    def ordered_rates(self) -> Tensor:
        return torch.cat([self.base[None], self.base + F.softplus(self.deltas).cumsum(0)])

    def log_speeds(self, position: int) -> Tensor:
        """Logs of the decay speeds at `position` that this spectrum gives alone, up to a constant, float32 [N]."""
        at = torch.full((1, 1), position, device=self.base.device)
        return self._log_speed(self.log_rate(at).flatten())

    def tapers(self) -> Tensor | None:
        if not self._config.scales:
            return None
        return _shuffle(self._ordered_tapers(), self._config.control == "shuffled")

    def _ordered_tapers(self) -> Tensor:
        n = len(self.deltas) + 1
        if n == 1:
            return torch.zeros_like(self.base)[None]
        if self.logits is not None:
            falling = 1 - self.logits.softmax(0).cumsum(0)
            return torch.cat([torch.ones_like(falling[:1]), falling])
        if self._config.taper == "linear":
            return linear_taper(n).to(self.deltas)
        return analytical_taper(self._log_speed(self.ordered_rates()), self._config.required_horizon())


def make_spectrum(
    post: PostConfig | None,
    n: int,
    initial: Callable[[torch.Generator], Tensor],
    log_rate_of: Callable[[float], float],
    *,
    timescales: Callable[[int], tuple[float, float]] = _one_to_horizon,
    log_speed: Callable[[Tensor], Tensor] = _as_is,
    learning_rate_factor: float = 1.0,
) -> Spectrum:
    """The spectrum of one layer with N = n log-rates.

    initial: draws the architecture's own initial log-rates [n]. log_rate_of: the log-rate P that has a timescale of
    so many tokens at t = 1, by which PoST lays out its initial range. timescales: the fastest and the slowest timescale
    of that range in tokens, from the horizon T; usually 1 and T. log_speed: the log of the decay speed, up to a
    constant, that P [n] gives; the taper is taken from it. learning_rate_factor: of all parameters of the spectrum.
    """
    made: Spectrum
    if post is None or not post.reparameterize:
        scales = post is not None and post.scales
        made = FreeSpectrum(n, initial, scales=scales, shuffled=post is not None and post.control == "shuffled")
    else:
        fastest, slowest = post.timescale_range(timescales)
        if slowest < fastest:
            raise UserError(f"post.horizon={post.horizon} is too short: the fastest timescale is {fastest:.3g} tokens")
        made = TaperedSpectrum(n, log_rate_of(slowest), log_rate_of(fastest), post, log_speed)
    if learning_rate_factor != 1.0:
        made.learning_rate_factors = {name: learning_rate_factor for name, _ in made.named_parameters()}
    return made


def linear_taper(n: int) -> Tensor:
    """(N-1-k)/(N-1) for k = 0..N-1, float32 [n]; 0 for N = 1."""
    return torch.arange(n - 1, -1, -1) / max(n - 1, 1)


def analytical_taper(P: Tensor, horizon: int) -> Tensor:
    """The taper that makes log tau_k at t = horizon linear in k, while the clamp doesn't bind.

    P: ordered log-rates [N], N >= 2; the gradient flows through it. Returns [N].
    """
    n = len(P)
    k = torch.arange(n, device=P.device, dtype=P.dtype)
    cumulative = P - P[0]
    gap = cumulative[-1] / (n - 1)
    return ((n - 1 - k) / (n - 1) + (cumulative - k * gap) / math.log(horizon)).clamp(0.0, 1.0)


def _shuffle(alpha: Tensor, shuffled: bool) -> Tensor:
    if not shuffled:
        return alpha
    # A fixed permutation for each N, the same in every layer and seed: what is tested is the order, not the draw.
    order = torch.randperm(len(alpha), generator=torch.Generator().manual_seed(len(alpha)))
    if len(alpha) == 2:  # the draw for two heads is the identity
        order = order.flip(0)
    return alpha[order.to(alpha.device)]
