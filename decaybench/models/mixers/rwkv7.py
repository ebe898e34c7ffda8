"""RWKV-7's time mix (Peng et al., "RWKV-7 Goose", arXiv 2503.14456; RWKV-LM's RWKV-v7, "x070").

    x^c         = x + (x_{t-1} - x) * x_c                          token shift, one mix for each c of r, w, k, v, a, g
    r, k, v     = W_r x^r, W_k x^k, W_v x^v
    log_decay   = -e^(-1/2) sigmoid(w0 + LoRA_w(x^w))              w0 = log_rate: a logit, or PoST's P - alpha log t
    v           = v + (v_first - v) * sigmoid(LoRA_v(x^v))         v_first: layer 0's v; not in layer 0
    a, g        = sigmoid(LoRA_a(x^a)), LoRA_g(x^g)
    kk          = k * k_k / |k * k_k|                              within each head
    k           = k * (1 + (a - 1) * k_a)
    S_t         = S_{t-1} (diag(exp(log_decay_t)) - kk_t (a_t * kk_t)^T) + v_t k_t^T
    o           = GroupNorm(S_t r_t) + (r . (k * r_k)) v           within each head
    y           = W_out (o * g)

LoRA(x) = W_up f(W_down x) + bias, with f = tanh in w, sigmoid in g and nothing in v and a, and a bias in v and a. With
PoST the one of w has a bias too, where the zigzag of the baseline's w0 stays; P takes the place of its ramp.
Initial values as RWKV-LM's training code leaves them (generate_init_weight overwrites what the constructor draws).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from decaybench.core.config import Config
from decaybench.core.errors import UserError
from decaybench.models.addons.post import make_spectrum
from decaybench.models.branch import Context, Mixer, Observer, Place
from decaybench.models.mixers.parts import split_heads
from decaybench.models.module import DrawsFor, LayerNorm, Module, OrthogonalLinear, orthogonal_
from decaybench.models.ops.dplr import DEFAULT_CHUNK, dplr
from decaybench.models.ops.token_shift import last_token, token_shift

_MAX_RATE = math.exp(-0.5)  # the fastest decay: a timescale of 1.65 tokens
_NORM_EPS = 64e-5
# The exponents of the initial mixes, x_c = 1 - (i/D)^(exponent * (1 - layer/n_layers)) for channel i.
_MIXES = {"x_r": 0.2, "x_w": 0.9, "x_k": 0.7, "x_v": 0.7, "x_a": 0.9, "x_g": 0.2}
_FIRST_VALUE = "rwkv7.first_value"


class RWKV7Config(Config):
    """RWKV-7's sizes. A rank left out is RWKV-LM's: factor * sqrt(d_model) to a multiple of 32, at least 32."""

    head_dim: int = Field(default=64, ge=1, description="channels a head, of keys and of values (K = V)")
    decay_rank: int | None = Field(default=None, ge=1, description="rank of the decay's LoRA; none: factor 2.5")
    rate_rank: int | None = Field(default=None, ge=1, description="rank of the in-context rate's; none: factor 2.5")
    value_rank: int | None = Field(default=None, ge=1, description="rank of the value residual's; none: factor 1.7")
    gate_rank: int | None = Field(default=None, ge=1, description="rank of the output gate's; none: factor 5")
    chunk_size: int = Field(default=DEFAULT_CHUNK, ge=1, description="tokens a chunk of the chunked form; speed only")

    def heads(self, d_model: int) -> int:
        """Number of heads. Raises UserError where the sizes don't divide."""
        if d_model % self.head_dim:
            raise UserError(f"mixer.head_dim={self.head_dim} must divide d_model = {d_model}")
        return d_model // self.head_dim


@dataclass(frozen=True)
class RWKV7State:
    """last: [B, 1, D], the mixer's last input, for the token shift. wkv: float32 [B, H, K, V]."""

    last: Tensor
    wkv: Tensor


class RWKV7(Mixer):
    """The mixer. D = d_model channels in H heads of K = V = head_dim."""

    no_weight_decay = frozenset({"r_k"})

    def __init__(self, config: RWKV7Config, place: Place) -> None:
        super().__init__()
        self.config, self.place = config, place
        D = place.d_model
        self.heads = H = config.heads(D)
        self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g = (nn.Parameter(torch.empty(D)) for _ in _MIXES)
        self.r_proj, self.v_proj = OrthogonalLinear(D, D, gain=1.0), OrthogonalLinear(D, D, gain=1.0)
        self.k_proj, self.out_proj = OrthogonalLinear(D, D, gain=0.1), OrthogonalLinear(D, D, gain=0.0)
        self.spectrum = make_spectrum(
            place.post,
            D,
            lambda draws: self._ramp() + 0.5 + self._decay_zigzag(),
            _logit_of,
            timescales=lambda horizon: (1 / (_MAX_RATE * _sigmoid(0.5)), float(horizon)),
            log_speed=F.logsigmoid,
            learning_rate_factor=2.0,
        )
        ordered = place.post is not None and place.post.reparameterize
        self.decay = LowRank(D, config.decay_rank or _rank(2.5, D), torch.tanh, self._decay_zigzag if ordered else None)
        self.rate = LowRank(D, config.rate_rank or _rank(2.5, D), None, self._initial_rate)
        self.mix_value = None
        if place.layer > 0:
            self.mix_value = LowRank(D, config.value_rank or _rank(1.7, D), None, self._initial_value_mix)
        self.gate = LowRank(D, config.gate_rank or _rank(5.0, D), torch.sigmoid, None)
        self.k_k, self.k_a = nn.Parameter(torch.empty(D)), nn.Parameter(torch.empty(D))
        self.r_k = nn.Parameter(torch.empty(H, config.head_dim))
        self.norm = HeadNorm(D, H, ((place.layer + 1) / place.n_layers) ** 0.7)

    def initialise(self, draws_for: DrawsFor) -> None:
        D = self.place.d_model
        for name, exponent in _MIXES.items():
            ramp = (torch.arange(D) / D) ** (exponent * (1 - self.place.layer / self.place.n_layers))
            getattr(self, name).copy_(1 - ramp)
        self.k_k.copy_(0.71 - 0.1 * self._linear())
        self.k_a.fill_(1.02)
        self.r_k.fill_(-0.04)

    def _linear(self) -> Tensor:
        """-1/2 to 1/2 over the channels."""
        D = self.place.d_model
        return torch.arange(D) / max(D - 1, 1) - 0.5

    def _zigzag(self) -> Tensor:
        """-1 to 1 over the channels of each head, flat in the middle."""
        half = (self.config.head_dim - 1) / 2
        saw = (torch.arange(self.place.d_model) % self.config.head_dim - half) / max(half, 0.5)
        return saw * saw.abs()

    def _ramp(self) -> Tensor:
        """-6 to 0 over the channels, straight in the first layer and bent in later ones."""
        depth = self.place.layer / max(self.place.n_layers - 1, 1)
        bent: Tensor = (self._linear() + 0.5) ** (1 + depth**0.3)
        return -6 + 6 * bent

    def _decay_zigzag(self) -> Tensor:
        return 2.5 * self._zigzag()

    def _initial_rate(self) -> Tensor:
        return -0.19 + 0.3 * self._zigzag() + 0.4 * self._linear()

    def _initial_value_mix(self) -> Tensor:
        return 0.73 - 0.4 * self._linear()

    def forward(
        self, x: Tensor, context: Context, state: RWKV7State | None, observer: Observer | None = None
    ) -> tuple[Tensor, RWKV7State | None]:
        difference, inputs = token_shift(x, context.layout, state.last if state else None)
        x_r, x_w, x_k, x_v, x_a, x_g = (torch.addcmul(x, difference, getattr(self, c).to(x.dtype)) for c in _MIXES)
        r, k, v = (split_heads(y, self.heads) for y in (self.r_proj(x_r), self.k_proj(x_k), self._value(x_v, context)))
        # In float32: the spectrum is, and promotion carries the LoRA's part along.
        log_decay = -_MAX_RATE * torch.sigmoid(self.spectrum.log_rate(context.layout.positions) + self.decay(x_w))
        log_decay = split_heads(log_decay, self.heads)
        logit = split_heads(self.rate(x_a), self.heads)
        if observer is not None:
            log_w = observer.write(v, torch.sigmoid(logit).mean(-1), log_decay)
            if log_w is not None:
                logit = logit + log_w[..., None]
        rate = torch.sigmoid(logit).to(k.dtype)

        kk = F.normalize(k * self.k_k.view_as(self.r_k), dim=-1)
        k = k * (1 + (rate - 1) * self.k_a.view_as(self.r_k))
        o, wkv = dplr(
            r,
            log_decay,
            k,
            v,
            -kk,
            kk * rate,
            initial_state=state.wkv if state else None,
            output_final_state=context.keep_state,
            layout=context.layout,
            chunk_size=self.config.chunk_size,
            backend=self.place.backend,
        )
        bonus = (r * k * self.r_k).sum(-1, keepdim=True) * v
        gate, flat = self.gate(x_g), o.flatten(2)
        y = (self.norm(flat) + bonus.flatten(2)) * gate
        if observer is not None:
            size = o.square().mean(-1) * self.norm.factor(flat)[..., 0].square()
            observer.read(size, (self.norm.weight * gate).view(o.shape))
            y = observer.output(y)
        return self.out_proj(y), None if wkv is None else RWKV7State(last_token(inputs, context.layout), wkv)

    def _value(self, x_v: Tensor, context: Context) -> Tensor:
        v: Tensor = self.v_proj(x_v)
        if self.mix_value is None:
            context.shared[_FIRST_VALUE] = v
            return v
        mix = torch.sigmoid(self.mix_value(x_v)).to(v.dtype)
        return torch.lerp(v, context.shared[_FIRST_VALUE], mix)

    def timescales(self, position: int) -> Tensor:
        at = torch.full((1, 1), position, device=self.k_k.device)
        logit = self.spectrum.log_rate(at).reshape(-1)
        if self.decay.bias is not None:
            logit = logit + self.decay.bias
        rates: Tensor = _MAX_RATE * torch.sigmoid(logit)
        return 1 / rates


class LowRank(Module):
    """W_up f(W_down x) + bias. down: [rank, D], initially 0; up: [D, rank], initially orthogonal, gain 0.1; bias: [D].

    activation: f, None for the identity. initial_bias: gives the bias' initial values; None: no bias. The bias stays
    in float32, for one of them sets a decay.
    """

    float32_names = frozenset({"bias"})
    no_weight_decay = frozenset({"down", "up", "bias"})  # as in RWKV-LM
    exempt_matrices = frozenset({"down", "up"})

    def __init__(
        self,
        width: int,
        rank: int,
        activation: Callable[[Tensor], Tensor] | None,
        initial_bias: Callable[[], Tensor] | None,
    ) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, width))
        self.up = nn.Parameter(torch.empty(width, rank))
        self.bias = nn.Parameter(torch.empty(width)) if initial_bias else None
        self.activation, self._initial_bias = activation, initial_bias

    def initialise(self, draws_for: DrawsFor) -> None:
        width, rank = self.up.shape
        self.down.zero_()
        orthogonal_(self.up, 0.1 * math.sqrt(max(rank / width, 1.0)), draws_for("up"))
        if self.bias is not None and self._initial_bias is not None:
            self.bias.copy_(self._initial_bias())

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, self.down)
        y = F.linear(hidden if self.activation is None else self.activation(hidden), self.up)
        return y if self.bias is None else y + self.bias


class HeadNorm(LayerNorm):
    """The group norm of a layer's heads; its weight starts smaller in earlier layers."""

    def __init__(self, width: int, heads: int, scale: float) -> None:
        super().__init__(width, _NORM_EPS, groups=heads)
        self.scale = scale

    def initialise(self, draws_for: DrawsFor) -> None:
        self.weight.fill_(self.scale)
        self.bias.zero_()


def _rank(factor: float, width: int) -> int:
    return max(32, round(factor * math.sqrt(width) / 32) * 32)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _logit_of(timescale: float) -> float:
    share = 1 / (_MAX_RATE * timescale)
    if share >= 1:
        raise UserError(f"post.range: RWKV-7's timescales are above {1 / _MAX_RATE:.2f} tokens, not {timescale:g}")
    return math.log(share / (1 - share))
