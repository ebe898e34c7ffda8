"""BFT: precision carried through the layers, each block a step of a Bayesian filter (arXiv 2605.18832).

Beside its hidden state h each token carries a precision lambda, both [B, T, D], along depth and not along time. The
code keeps the variance P = 1/lambda, in which nothing divides by what may be 0:

    observe   e, R       the mixer's output and its variance, R = (W_O * W_O) (var_head * scale^2)
    update    K = P / (P + R)          h' = h + K e          P' = K R           (1/P' = 1/P + 1/R)
    predict   h'' = h' + FFN(h')       P'' = (1 + J)^2 P' + Q                   J = diag d FFN/dh', Q = softplus(q)

A mixer reads an estimate of its values' mean off sources of precision lbar_j, the mean of lambda_j over D. With
weights x_j of the sources, S0 = sum x, S1 = sum x v, S2 = sum x v^2:

    n = S0^2 / sum x^2                 effective sample size
    s2 = S2/S0 - (S1/S0)^2             s02 = <1/lbar> mean_c(S2/S0),   <1/lbar> the sources' mean variance under x
    sigma2 = (nu0 s02 + n s2) / (nu0 + n - 1)          REML with a conjugate prior
    var = sigma2 / n

Softmax attention: x_j = a_j lbar_j, and e is the estimate itself. Recurrences: x_j = d_tj u_j lbar_j with the decay d
from j to t and the write strength u; their read-out o isn't normalised, so the relative variance is carried over,
var_head = var rms(o)^2 / (rms(S1/S0)^2 + mean_c(var)), and each write is weighed by w_j = lbar_j / (S0_j / D1_j), with
D1 = sum d u, the token's precision against the mean of its past.

What the paper's summary states and what is our reconstruction of it: docs/bft.md and the descriptions below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from decaybench.core.config import Config
from decaybench.core.errors import UserError
from decaybench.models.addons.gates import GateResidual
from decaybench.models.branch import Context, LayerTrace, Mixer, Observer, Place
from decaybench.models.mixers.parts import inverse_softplus
from decaybench.models.module import DrawsFor, LayerNorm, Module, RMSNorm, normal_
from decaybench.models.ops.decayed_moments import MomentState, decayed_moments
from decaybench.models.ops.kalman_update import LOG_LARGEST, kalman_predict, kalman_update, mean_precision
from decaybench.models.ops.precision import at_least_float32, without_autocast
from decaybench.models.ops.read_variance import read_variance
from decaybench.models.ops.softmax_attention import kriging_attention, softmax_attention
from decaybench.models.residual import Residual, Stream

_KEY = "model.bft"  # where a run's configuration has it
_FAINTEST = 1e-9  # write strength: its square times the smallest precision's is still a float32
_TINY = 1e-30
_MLP_WIDTH = 8


class BftConfig(Config):
    """BFT and its switches. Where a description says `paper`, its summary states it; the rest is our reconstruction."""

    precision: Literal["token", "mlp", "frozen"] = Field(
        default="token",
        description="how lambda starts: learned a token id or by a small MLP of the embedding (paper: either), both at "
        "1; frozen: 1 in every layer, a control",
    )
    tau_rate: float = Field(default=1.0, gt=0, le=100, description="multiple of the learning rate for log tau (ours)")
    reliability: bool = Field(
        default=True,
        description="weigh sources by their precision: softmax's bias (paper), a recurrence's writes (ours)",
    )
    gain: bool = Field(default=True, description="Kalman gain on the mixer's output (paper); off: K = 1")
    jacobian: Literal["detached", "none"] | None = Field(
        default=None,
        description="the FFN's J in the prediction (paper): without its gradient, or J = 0; not given: differentiable",
    )
    process_noise: bool = Field(default=True, description="learned Q in the prediction (paper)")
    initial_noise: float = Field(default=1e-2, gt=0, le=100, description="Q at first (ours)")
    units: Literal["output", "stream"] = Field(
        default="output",
        description="what variances are counted in: the mean square of each mixer's output, so that no projection's "
        "scale changes K, or the stream's own units (ours)",
    )
    observation: Literal["estimate", "sample"] = Field(
        default="estimate", description="lambda_obs: n / sigma2, of the estimate, or 1 / sigma2, of one sample (ours)"
    )
    nu0: float = Field(default=1.0, gt=0, description="prior's weight in the residual variance, observations (ours)")
    control: Literal["none", "scalar_gate", "sigmoid_gate"] = Field(
        default="none",
        description="instead of BFT: one learned gate a token on the mixer's output, or the sigmoid gate a head of "
        "arXiv 2505.06708",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _one_value(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, Mapping | list):
            raise UserError(f"{_KEY}.{info.field_name} takes one value, neither a mapping nor a list")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> BftConfig:
        """A switch that would do nothing is refused: it would make another cell of the same model."""
        if self.control != "none":
            others = [name for name in BftConfig.model_fields if name != "control"]
            self._refuse(others, f"{self.said('control')} stands in the place of BFT")
        elif self.precision == "frozen":
            moot = ("tau_rate", "reliability", "jacobian", "process_noise", "initial_noise")
            self._refuse(moot, f"{self.said('precision')} carries none")
            if not self.gain:
                both = f"{self.said('precision')} and {self.said('gain')}"
                self._refuse(("units", "observation", "nu0"), f"{both} weigh nothing")
        elif not (self.gain or self.reliability):
            both = f"{self.said('gain')} and {self.said('reliability')}"
            raise UserError(f"{both}: the precision would be carried and change nothing")
        if not self.process_noise:
            self._refuse(["initial_noise"], self.said("process_noise"))
        return self

    @property
    def name(self) -> str:
        """What tables call it: `bft`, then the switches that differ: bft-no-gain; a control by its own name."""
        if self.control != "none":
            return self.control.replace("_", "-")
        parts = [
            (self.precision, self._differs("precision")),
            (f"tau-rate{self.tau_rate:g}", self._differs("tau_rate")),
            ("no-reliability", not self.reliability),
            ("no-gain", not self.gain),
            ("no-jacobian" if self.jacobian == "none" else f"{self.jacobian}-jacobian", self.jacobian is not None),
            ("no-noise", not self.process_noise),
            (f"noise{self.initial_noise:g}", self._differs("initial_noise")),
            (f"{self.units}-units", self._differs("units")),
            (self.observation, self._differs("observation")),
            (f"nu{self.nu0:g}", self._differs("nu0")),
        ]
        return "-".join(["bft", *(name for name, differs in parts if differs)])

    @property
    def carries(self) -> bool:
        """Whether a precision is carried through the layers."""
        return self.control == "none"

    def said(self, name: str) -> str:
        """An option as --set takes it: model.bft.gain=false."""
        value = getattr(self, name)
        shown = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
        return f"{_KEY}.{name}={shown}"

    def _refuse(self, moot: Iterable[str], why: str) -> None:
        """Raises UserError on the first of these options that isn't at its default."""
        for name in moot:
            if self._differs(name):
                raise UserError(f"{why}: {self.said(name)} would change nothing")

    def _differs(self, name: str) -> bool:
        return bool(getattr(self, name) != BftConfig.model_fields[name].default)


@dataclass(frozen=True)
class SourceState:
    """What a layer keeps of its sources. lbar: float32 [B, S], the precisions of attention's keys; moments: a
    recurrence's. Each None in the other kind.
    """

    lbar: Tensor | None = None
    moments: MomentState | None = None


@dataclass(frozen=True)
class Sources:
    """What a token's sources say together. mean, square: [B, T, H, V], their weighted mean and mean square; size: n,
    the effective number of them, and inverse: <1/lbar>, their mean variance, [B, T, H].
    """

    mean: Tensor
    square: Tensor
    size: Tensor
    inverse: Tensor

    def variance(self, config: BftConfig, size: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        """Of what heads of mean square `size` [B, T, H] read (None: the mean itself), times scale^2; [B, T, H, V]."""
        a, b = reml_weights(self.size, self.inverse, config.nu0)
        if config.observation == "estimate":
            a, b = a / self.size, b / self.size
        return read_variance(self.mean, self.square, a, b, size, scale)


def reml_weights(n: Tensor, inverse: Tensor, nu0: float) -> tuple[Tensor, Tensor]:
    """(a, b) with sigma2 = (nu0 s02 + n s2) / (nu0 + n - 1) = a s2 + b mean_c(S2/S0), for s02 = inverse mean_c(S2/S0).

    Restricted maximum likelihood with a scaled inverse chi^2 prior. n: effective sample size >= 1; s2: variance of the
    sources about their weighted mean; s02: the prior's scale; nu0: its weight. One source alone (n = 1, s2 = 0) has
    the prior's; nu0 = 0 is plain REML, 0/0 there.
    """
    freedom = nu0 + n - 1
    return n / freedom, nu0 * inverse / freedom


class InitialPrecision(Module):
    """P of the embedding, 1 at first. log_tau: [vocab], or down: [8, D] and up: [8] of the MLP; neither if frozen.

    Call: tokens [B, T] and their vectors [B, T, D] -> P, float32 [B, T, D].
    """

    float32_names = frozenset({"log_tau", "up"})
    no_weight_decay = frozenset({"log_tau", "up", "down"})

    def __init__(self, config: BftConfig, vocab_size: int, d_model: int) -> None:
        super().__init__()
        mlp = config.precision == "mlp"
        self.log_tau = nn.Parameter(torch.empty(vocab_size)) if config.precision == "token" else None
        self.down = nn.Parameter(torch.empty(_MLP_WIDTH, d_model)) if mlp else None
        self.up = nn.Parameter(torch.empty(_MLP_WIDTH)) if mlp else None
        if config.tau_rate != 1.0:
            self.learning_rate_factors = {name: config.tau_rate for name, _ in self.named_parameters()}

    def initialise(self, draws_for: DrawsFor) -> None:
        if self.log_tau is not None:
            self.log_tau.zero_()
        if self.up is not None and self.down is not None:
            self.up.zero_()
            normal_(self.down, self.down.shape[1] ** -0.5, draws_for("down"))

    def forward(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        wide = at_least_float32(embedded)
        if self.log_tau is not None:
            log_tau = F.embedding(tokens, self.log_tau[:, None])
        elif self.up is not None and self.down is not None:
            with without_autocast(wide):
                hidden = torch.tanh(F.linear(F.rms_norm(wide, wide.shape[-1:]), self.down.to(wide.dtype)))
                log_tau = F.linear(hidden, self.up.to(wide.dtype)[None])
        else:
            log_tau = wide.new_zeros(*tokens.shape, 1)
        return torch.exp(-log_tau.clamp(-LOG_LARGEST, LOG_LARGEST)).expand(wide.shape)


class KalmanObserver(Observer):
    """Watches one layer in one pass, and answers R [B, T, D], J and what to keep."""

    def __init__(
        self, config: BftConfig, lbar: Tensor, context: Context, state: SourceState | None, *, wants_dynamics: bool
    ) -> None:
        self.config, self.lbar, self.context, self.before = config, lbar, context, state
        self.wants_dynamics = wants_dynamics
        self.kept: SourceState | None = None
        self.sources: Sources | None = None
        self.log_decay: Tensor | None = None
        self.jacobian: Tensor | None = None
        self._variance: Tensor | None = None

    def write(self, values: Tensor, write_strength: Tensor | None, log_decay: Tensor) -> Tensor | None:
        """log lbar_j - log(S0_j / D1_j)."""
        lbar = self.lbar[..., None]
        u = lbar.new_ones(values.shape[:3]) if write_strength is None else at_least_float32(write_strength)
        u = u.clamp(min=_FAINTEST)
        self.log_decay = g = log_decay.mean(-1) if log_decay.ndim == 4 else log_decay
        found, kept = decayed_moments(
            values,
            u * lbar,
            u,
            g,
            initial_state=None if self.before is None else self.before.moments,
            output_final_state=self.context.keep_state,
            layout=self.context.layout,
        )
        if kept is not None:
            self.kept = SourceState(moments=kept)
        S0, D1, D2 = (part.clamp(min=_TINY) for part in (found.S0, found.D1, found.D2))
        self.sources = Sources(found.mean, found.square, (S0 * S0 / D2).clamp(min=1), D1 / S0)
        if not self.config.reliability or self.config.precision == "frozen":  # all alike: bit for bit as without
            return None
        # Not a difference of logs: those of faint writes are large, and float32 would leave 2e-6 of it.
        return (lbar * self.sources.inverse).log()

    def read(self, size: Tensor, scale: Tensor) -> None:
        assert self.sources is not None, "a recurrent mixer calls write before read"
        self._variance = self.sources.variance(self.config, size, scale).flatten(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        lbar = self.lbar
        if self.before is not None and self.before.lbar is not None:
            lbar = torch.cat([self.before.lbar, lbar], dim=1)
        if self.context.keep_state:
            self.kept = SourceState(lbar=lbar)
        found = kriging_attention(q, k, v, lbar, mask)
        self.sources = Sources(found.mean, found.square, found.n.clamp(min=1), found.i)
        self._variance = self.sources.variance(self.config).flatten(2)
        if self.config.precision == "frozen":  # the same weights as without: bit for bit then
            return softmax_attention(q, k, v, mask)
        return found.mean.to(v.dtype)

    def dynamics(self, jacobian: Tensor) -> None:
        self.jacobian = jacobian.detach() if self.config.jacobian == "detached" else jacobian

    def variance(self, weight: Tensor) -> Tensor:
        """R: of the mixer's output through its projection W_O = weight [D, H V], in its own units; [B, T, D]."""
        assert self._variance is not None, "a mixer that takes BFT shows its heads to the observer"
        with without_autocast(weight):
            return F.linear(self._variance, weight.to(self._variance.dtype).square())


class KalmanResidual(Residual[KalmanObserver]):
    """The residual as a filter's step. q: [D], Q = softplus(q); none without process noise, and none in the last layer:
    nothing reads the precision that it would predict.
    """

    float32_names = frozenset({"q"})
    no_weight_decay = frozenset({"q"})

    def __init__(self, config: BftConfig, place: Place) -> None:
        super().__init__()
        self.config = config
        self.predicts = config.precision != "frozen" and place.layer + 1 < place.n_layers
        self.q = nn.Parameter(torch.empty(place.d_model)) if self.predicts and config.process_noise else None

    def initialise(self, draws_for: DrawsFor) -> None:
        if self.q is not None:
            self.q.copy_(inverse_softplus(torch.tensor(self.config.initial_noise)))

    def observer(self, stream: Stream, x: Tensor, context: Context, state: SourceState | None) -> KalmanObserver:
        P = _carried(stream)
        lbar = mean_precision(P) if self.config.reliability else P.new_ones(P.shape[:2])
        dynamics = self.predicts and self.config.jacobian != "none"
        return KalmanObserver(self.config, lbar, context, state, wants_dynamics=dynamics)

    def update(self, stream: Stream, y: Tensor, observer: KalmanObserver, mixer: Mixer) -> Stream:
        P = _carried(stream)
        R = observer.variance(mixer.out_proj.weight)
        h, after, K = kalman_update(stream.hidden, P, y, R, relative=self.config.units == "output")
        after = P if self.config.precision == "frozen" else after
        if observer.context.trace is not None:
            n = observer.sources.size if observer.sources else None
            gain = K if self.config.gain else torch.ones_like(K)
            before, updated = (variance.reciprocal().mean(-1) for variance in (P, after))
            observer.context.trace.append(LayerTrace(gain.mean(-1), before, updated, n, observer.log_decay))
        return Stream(h if self.config.gain else stream.hidden + y, after)

    def predict(
        self, stream: Stream, y: Tensor | None, observer: KalmanObserver, norm: RMSNorm | LayerNorm | None
    ) -> Stream:
        P, h = _carried(stream), stream.hidden if y is None else stream.hidden + y
        if not self.predicts:
            return Stream(h, P)
        J = None
        if observer.jacobian is not None and norm is not None:
            slope = norm.slope(stream.hidden)
            J = observer.jacobian * (slope.detach() if self.config.jacobian == "detached" else slope)
        Q = None if self.q is None else F.softplus(self.q)
        return Stream(h, kalman_predict(P, J, Q))

    def state(self, observer: KalmanObserver) -> SourceState | None:
        return observer.kept


def make_residual(config: BftConfig | None, place: Place, mixer: Mixer) -> Residual[Any]:
    """What joins a block's branches: the plain sum without BFT."""
    if config is None:
        return Residual()
    if config.carries:
        return KalmanResidual(config, place)
    return GateResidual(place.d_model, mixer.heads, on_heads=config.control == "sigmoid_gate")


def _carried(stream: Stream) -> Tensor:
    assert stream.variance is not None, "a stream without a precision met a block that carries one"
    return stream.variance
