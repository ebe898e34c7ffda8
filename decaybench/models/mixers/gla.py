"""Gated linear attention (Yang et al., "Gated Linear Attention Transformers", arXiv 2312.06635).

    q, k, v, g = W_in x                    q, k, v through a short convolution and SiLU, if there is one
    S_t        = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T
    y          = W_out (RMSNorm(S_t^T q_t / sqrt(K)) * SiLU(g))              the norm within each head

The gate gives one log-decay a key channel, from the input:

    low rank   log_decay = exp(log_rate) logsigmoid(W_up W_down x + bias) / 16      log_rate = 0, or PoST's in `minimal`
    softplus   log_decay = -exp(log_rate) softplus(W_a x + dt_bias)          PoST's variant `paper` (arXiv 2604.07658)

with log_rate = P - alpha log t, one a head. Initial values as in flash-linear-attention's GatedLinearAttention layer;
those of the softplus gate as in PoST's code: P from 0 to log 16, dt log-uniform in [1e-3, 0.1].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from decaybench.core.config import Config
from decaybench.core.errors import UserError
from decaybench.models.addons.post import PostConfig, Spectrum, make_spectrum
from decaybench.models.branch import Context, Mixer, Observer, Place
from decaybench.models.mixers.parts import MemoryState, ShortConv, initial_dt_bias, split_heads
from decaybench.models.module import DrawsFor, Linear, Module, RMSNorm, uniform_
from decaybench.models.ops.vector_decay import DEFAULT_CHUNK, vector_decay

_NORM_EPS = 1e-5
_A_RANGE = (1.0, 16.0)  # of the softplus gate, over the heads
_REFERENCE_DT = 0.01  # at which PoST counts the softplus gate's timescales: the middle of the range of dt


class LinearAttentionConfig(Config):
    """The sizes that GLA and RetNet both have."""

    n_heads: int = Field(default=4, ge=1, description="number of heads (H)")
    expand_k: float = Field(default=1.0, gt=0, description="key channels of all heads / d_model")
    expand_v: float = Field(default=1.0, gt=0, description="value channels of all heads / d_model")
    conv_width: int | None = Field(default=None, ge=1, description="taps of the short convolution, tokens; none: none")
    chunk_size: int = Field(default=DEFAULT_CHUNK, ge=1, description="tokens a chunk of the chunked form; speed only")

    def head_dims(self, d_model: int) -> tuple[int, int]:
        """Key and value channels a head (K, V). Raises UserError where they aren't whole numbers."""
        return self._per_head("expand_k", self.expand_k, d_model), self._per_head("expand_v", self.expand_v, d_model)

    def _per_head(self, key: str, expand: float, d_model: int) -> int:
        channels = expand * d_model / self.n_heads
        if not channels.is_integer():
            raise UserError(
                f"mixer.{key}={expand:g} times d_model={d_model} must be a multiple of mixer.n_heads={self.n_heads}"
            )
        return int(channels)


class GLAConfig(LinearAttentionConfig):
    """GLA's sizes."""

    expand_k: float = Field(default=0.5, gt=0, description="key channels of all heads / d_model")
    gate_rank: int = Field(default=16, ge=1, description="rank of the low-rank gate")
    gate_normalizer: float = Field(default=16.0, gt=0, description="what the low-rank gate's log-decay is divided by")


class Gate(Module):
    """How the state decays. Call: x [B, T, D], positions [B or 1, T] -> log_decay float32 [B, T, H, K].

    recurrence: the op that takes such log-decays.
    """

    recurrence: ClassVar[Callable[..., tuple[Tensor, Tensor | None]]] = staticmethod(vector_decay)

    def timescales(self, position: int) -> Tensor:
        """-1 / log_decay with the input's part left out, float32 [H K]."""
        raise NotImplementedError


class LinearAttention(Mixer):
    """What GLA and RetNet share. Dimensions: D = d_model, H = n_heads, K = expand_k D / H, V = expand_v D / H."""

    def __init__(self, config: LinearAttentionConfig, place: Place, gate: Gate) -> None:
        super().__init__()
        self.config, self.backend = config, place.backend
        self.heads = H = config.n_heads
        K, V = config.head_dims(place.d_model)
        self.convolved, self.gated = H * (2 * K + V), H * V
        self.in_proj = Linear(place.d_model, self.convolved + self.gated)
        self.conv = ShortConv(self.convolved, config.conv_width, bias=False) if config.conv_width else None
        self.gate = gate
        self.norm = RMSNorm(V, eps=_NORM_EPS)
        self.out_proj = Linear(self.gated, place.d_model, shrink=place.shrink)

    def forward(
        self, x: Tensor, context: Context, state: MemoryState | None, observer: Observer | None = None
    ) -> tuple[Tensor, MemoryState | None]:
        c, layout = self.config, context.layout
        H = c.n_heads
        qkv, g = self.in_proj.parts(x, self.convolved, self.gated)
        inputs = None
        if self.conv is not None:
            qkv, inputs = self.conv(qkv, layout, state.conv if state else None)
            qkv = F.silu(qkv)
        qk, v = torch.split(qkv, [self.convolved - self.gated, self.gated], dim=-1)
        q, k = torch.split(split_heads(qk, 2 * H), H, dim=2)
        values = v = split_heads(v, H)
        log_decay = self.gate(x, layout.positions)
        if observer is not None and (log_w := observer.write(v, None, log_decay)) is not None:
            values = (v * log_w.exp()[..., None]).to(v.dtype)
        o, memory = self.gate.recurrence(
            *self.placed(q, k, layout.positions),
            values,
            log_decay,
            initial_state=state.memory if state else None,
            output_final_state=context.keep_state,
            layout=layout,
            chunk_size=c.chunk_size,
            backend=self.backend,
        )
        gate = F.silu(g)
        y = self.norm(o).flatten(2) * gate
        if observer is not None:
            observer.read(self.norm.share(o)[..., 0], self.norm.weight * split_heads(gate, H))
            y = observer.output(y)
        return self.out_proj(y), MemoryState.after(memory, inputs, layout, c.conv_width)

    def placed(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q / sqrt(K) and k, [B, T, H, K], with what positions [B or 1, T] do to them: here nothing."""
        return q * q.shape[-1] ** -0.5, k

    def timescales(self, position: int) -> Tensor:
        """One a key channel, [H K], heads one after the other."""
        return self.gate.timescales(position)


class GLA(LinearAttention):
    """The mixer."""

    def __init__(self, config: GLAConfig, place: Place) -> None:
        softplus = place.post is not None and place.post.replaces_gate
        super().__init__(config, place, SoftplusGate(config, place) if softplus else LowRankGate(config, place))


class LowRankGate(Gate):
    """GLA's own gate. bias: [H K], initially U(-1/sqrt(rank), 1/sqrt(rank)) as the bias of a linear layer there."""

    float32_names = frozenset({"bias"})
    no_weight_decay = frozenset({"bias"})

    def __init__(self, config: GLAConfig, place: Place) -> None:
        super().__init__()
        H, K = config.n_heads, config.head_dims(place.d_model)[0]
        self.heads, self.normalizer = H, config.gate_normalizer
        self.down = Linear(place.d_model, config.gate_rank)
        self.up = Linear(config.gate_rank, H * K)
        self.bias = nn.Parameter(torch.empty(H * K))
        self.spectrum = added_spectrum(
            place.post,
            H,
            lambda draws: torch.zeros(H),
            lambda tau: math.log(config.gate_normalizer / (tau * math.log(2))),  # at a gate logit of 0
        )

    def initialise(self, draws_for: DrawsFor) -> None:
        bound = 1.0 / math.sqrt(self.up.weight.shape[1])
        uniform_(self.bias, -bound, bound, draws_for("bias"))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self._log_decay(self.up(self.down(x)) + self.bias, positions)

    def _log_decay(self, logits: Tensor, positions: Tensor) -> Tensor:
        speed = F.logsigmoid(split_heads(logits, self.heads))
        if self.spectrum is None:
            return speed / self.normalizer
        return speed * (self.spectrum.log_rate(positions).exp() / self.normalizer)[..., None]

    def timescales(self, position: int) -> Tensor:
        at = torch.full((1, 1), position, device=self.bias.device)
        return -1.0 / self._log_decay(self.bias[None, None], at).flatten()


class SoftplusGate(Gate):
    """The gate that PoST's code gives GLA and RetNet alike. dt_bias: [H K], dt log-uniform in [1e-3, 0.1]."""

    float32_names = frozenset({"dt_bias"})
    no_weight_decay = frozenset({"dt_bias"})

    def __init__(self, config: LinearAttentionConfig, place: Place) -> None:
        super().__init__()
        H, K = config.n_heads, config.head_dims(place.d_model)[0]
        self.heads = H
        self.a_proj = Linear(place.d_model, H * K)
        frozen = place.post is not None and place.post.dt_bias == "frozen"  # the paper's learns, unlike Mamba-2's
        self.dt_bias = nn.Parameter(torch.empty(H * K), requires_grad=not frozen)
        slowest, fastest = _A_RANGE
        self.spectrum = make_spectrum(
            place.post,
            H,
            lambda draws: torch.linspace(math.log(slowest), math.log(fastest), H),
            lambda tau: -math.log(_REFERENCE_DT * tau),
            timescales=lambda horizon: (1 / (_REFERENCE_DT * fastest), 1 / (_REFERENCE_DT * slowest)),
        )

    def initialise(self, draws_for: DrawsFor) -> None:
        self.dt_bias.copy_(initial_dt_bias(len(self.dt_bias), draws_for("dt_bias")))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self._log_decay(self.a_proj(x) + self.dt_bias, positions)

    def _log_decay(self, logits: Tensor, positions: Tensor) -> Tensor:
        return F.softplus(split_heads(logits, self.heads)) * -self.spectrum.log_rate(positions).exp()[..., None]

    def timescales(self, position: int) -> Tensor:
        at = torch.full((1, 1), position, device=self.dt_bias.device)
        return -1.0 / self._log_decay(self.dt_bias[None, None], at).flatten()


def added_spectrum(
    post: PostConfig | None, n: int, initial: Callable[[torch.Generator], Tensor], log_rate_of: Callable[[float], float]
) -> Spectrum | None:
    """PoST's spectrum where the architecture has no such parameter of its own; None where PoST would change nothing.

    With position scaling alone the rates stay what they are in the architecture: they don't learn.
    """
    if post is None or not (post.reparameterize or post.scales):
        return None
    made = make_spectrum(post, n, initial, log_rate_of)
    if not post.reparameterize:
        made.requires_grad_(False)
    return made
