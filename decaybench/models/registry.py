"""The architectures: names to mixers, imported only when used. Other packages add theirs by entry points.

A package registers one with an entry point of the group `decaybench.models`, whose value is an `Architecture`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from decaybench.core.config import Config
from decaybench.core.errors import RunError
from decaybench.core.names import unknown

if TYPE_CHECKING:
    from decaybench.models.branch import Mixer

ENTRY_POINT_GROUP = "decaybench.models"


@dataclass(frozen=True)
class Architecture:
    """A named mixer. config, mixer: `module:Class` of its configuration and its mixer.

    The mixer is built as `mixer(config, place)` (models.branch.Place); addons: those that it takes, by name, and what
    each changes in it. backends: implementations of its recurrence, best first. gates: what post.gate may be;
    dt_bias_gates: those with a dt_bias. ffn: the kind of FFN that its language models have. equation: its recurrence;
    verified: what it was compared with. state_grows: whether its state grows with every token;
    state_size: the size of its mixer that the state grows with, and little else does, to make states equal by; empty:
    none.
    """

    name: str
    config: str
    mixer: str
    description: str
    source: str
    addons: Mapping[str, str] = field(default_factory=dict)
    backends: tuple[str, ...] = ("torch",)
    gates: tuple[str, ...] = ("baseline",)
    dt_bias_gates: tuple[str, ...] = ()
    ffn: str = "swiglu"
    equation: str = ""
    verified: str = ""
    state_grows: bool = False
    state_size: str = ""

    def config_class(self) -> type[Config]:
        """The class of its own sizes."""
        return _load(self.config)  # type: ignore[no-any-return]

    def mixer_class(self) -> type[Mixer]:
        """The mixer itself; imports torch."""
        return _load(self.mixer)  # type: ignore[no-any-return]


_BUILT_IN = (
    Architecture(
        "mamba2",
        "decaybench.models.mixers.mamba2:Mamba2Config",
        "decaybench.models.mixers.mamba2:Mamba2",
        "Mamba-2: one data-dependent decay a head",
        "arXiv 2405.21060",
        addons={
            "post": "A_log of the heads becomes the spectrum; paper: dt_bias frozen at dt = 0.05",
            "bft": "u = dt; what is written is multiplied by its reliability w",
        },
        dt_bias_gates=("baseline",),
        equation="S_t = exp(-exp(A_log) dt_t) S_{t-1} + dt_t B_t x_t^T,  y_t = C_t^T S_t + D x_t",
        verified="transformers' Mamba2ForCausalLM and mamba-ssm's SSD kernel, forward and gradients",
        state_size="d_state",
    ),
    Architecture(
        "rwkv7",
        "decaybench.models.mixers.rwkv7:RWKV7Config",
        "decaybench.models.mixers.rwkv7:RWKV7",
        "RWKV-7: generalised delta rule, one decay a channel",
        "arXiv 2503.14456",
        addons={
            "post": "w0 of the channels becomes the spectrum beside a bias of the decay's LoRA; t^-alpha enters the "
            "logit",
            "bft": "u = the mean of a over a head's channels; log w is added to the logit of a",
        },
        ffn="channel_mix",
        equation="S_t = S_{t-1} (diag(w_t) - kk_t (a_t kk_t)^T) + v_t k_t^T,  "
        "log w_t = -e^(-1/2) sigmoid(w0 + LoRA(x_t))",
        verified="flash-linear-attention's layer and kernels, forward and gradients; rwkv.cpp's logits",
        state_size="head_dim",
    ),
    Architecture(
        "gated_deltanet",
        "decaybench.models.mixers.gated_deltanet:GatedDeltaNetConfig",
        "decaybench.models.mixers.gated_deltanet:GatedDeltaNet",
        "Gated DeltaNet: delta rule with one data-dependent decay a head",
        "arXiv 2412.06464",
        addons={
            "post": "A_log of the heads becomes the spectrum",
            "bft": "u = beta; log w is added to the logit of beta",
        },
        dt_bias_gates=("baseline",),
        equation="S_t = exp(-exp(A_log) dt_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T",
        verified="flash-linear-attention's layer and kernels, forward and gradients",
        state_size="head_dim",
    ),
    Architecture(
        "gla",
        "decaybench.models.mixers.gla:GLAConfig",
        "decaybench.models.mixers.gla:GLA",
        "Gated linear attention: one data-dependent decay a key channel",
        "arXiv 2312.06635",
        addons={
            "post": "paper: the gate becomes -exp(A_log) softplus(W x + dt_bias); minimal: exp(P) times the gate",
            "bft": "u = 1, the decay is the mean over key channels; what is written is multiplied by its reliability w",
        },
        gates=("baseline", "softplus"),
        dt_bias_gates=("softplus",),
        equation="S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T,  log_decay_t = logsigmoid(W2 W1 x_t + b) / 16",
        verified="flash-linear-attention's layer and kernels, forward and gradients",
        state_size="expand_k",
    ),
    Architecture(
        "retnet",
        "decaybench.models.mixers.retnet:RetNetConfig",
        "decaybench.models.mixers.retnet:RetNet",
        "RetNet: one fixed decay a head, rotary positions",
        "arXiv 2307.08621",
        addons={
            "post": "paper: the same model as gla+post; minimal: -log gamma of the heads becomes the spectrum",
            "bft": "u = 1; what is written is multiplied by its reliability w",
        },
        gates=("baseline", "softplus"),
        dt_bias_gates=("softplus",),
        equation="S_t = gamma S_{t-1} + k_t v_t^T,  gamma_h = 1 - 2^(-5-h)",
        verified="flash-linear-attention's layer and kernels, forward and gradients",
        state_size="expand_k",
    ),
    Architecture(
        "attention",
        "decaybench.models.mixers.attention:AttentionConfig",
        "decaybench.models.mixers.attention:Attention",
        "softmax attention with rotary positions: the baseline",
        "arXiv 1706.03762, 2104.09864",
        addons={"bft": "a key counts by its token's precision: softmax(logit + log lbar)"},
        equation="o_t = sum_{j <= t} softmax_j(q_t . k_j / sqrt(K)) v_j",
        verified="a plain loop over softmax and rotations",
        state_grows=True,
    ),
)


@cache
def architectures() -> dict[str, Architecture]:
    """All architectures by name, the built-in ones first."""
    found = {architecture.name: architecture for architecture in _BUILT_IN}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            architecture = entry.load()
        except Exception as error:  # another package's import can fail in any way; say whose it was
            raise RunError(f"entry point {entry.name} of {ENTRY_POINT_GROUP} can't be loaded: {error}") from error
        if not isinstance(architecture, Architecture):
            raise RunError(f"entry point {entry.name} of {ENTRY_POINT_GROUP} is not an Architecture")
        if architecture.name in found:
            raise RunError(f"entry point {entry.name} takes the model name {architecture.name!r}, which is taken")
        found[architecture.name] = architecture
    return found


def get_architecture(name: str) -> Architecture:
    """The architecture of that name. Raises UserError with the nearest name."""
    known = architectures()
    if name not in known:
        raise unknown("model", name, known)
    return known[name]


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise RunError(f"{path!r}, which an architecture names, can't be imported: {error}") from error
