"""ModelConfig: the sizes of a model, its architecture's own sizes and its add-ons."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, SerializeAsAny, model_validator

from decaybench.core.config import Config, parse
from decaybench.core.errors import UserError
from decaybench.core.names import unknown
from decaybench.models.addons import ADDONS
from decaybench.models.addons.bft import BftConfig
from decaybench.models.addons.post import USUAL_GATE, PostConfig
from decaybench.models.ffn import FfnConfig
from decaybench.models.registry import architectures, get_architecture


class ModelConfig(Config):
    """A model. `bench list` names the architectures and presets."""

    name: str = Field(default="mamba2", description="architecture")
    vocab_size: int = Field(default=272, ge=2, description="tokens in the vocabulary")
    d_model: int = Field(default=64, ge=1, description="width of the residual stream")
    n_layers: int = Field(default=2, ge=1, description="blocks")
    mixer: SerializeAsAny[Config] = Field(default_factory=Config, description="the architecture's own sizes")
    ffn: FfnConfig | None = Field(default=None, description="feed-forward branch; none: mixers only")
    norm: Literal["rmsnorm", "layernorm"] = Field(default="rmsnorm", description="kind of norm")
    norm_eps: float = Field(default=1e-5, gt=0, description="added to the variance in norms")
    final_norm: Literal["rmsnorm", "layernorm"] | None = Field(
        default=None, description="kind of the norm before the head; none: that of the blocks"
    )
    norm_branch: bool | None = Field(
        default=None,
        description="a block without an FFN adds the norm of the stream in its place, as Zoology's blocks with an "
        "identity there do; none: nothing",
    )
    tie_embeddings: bool = Field(default=True, description="the head's weights are the embedding's")
    embedding_norm: bool | None = Field(
        default=None, description="a norm after the embedding, as in RWKV's language models; none: without"
    )
    embedding_dropout: float | None = Field(
        default=None, gt=0, lt=1, description="share of the embedding's output dropped in training; none: nothing"
    )
    post: PostConfig | None = Field(default=None, description="PoST; none: without")
    bft: BftConfig | None = Field(default=None, description="BFT; none: without")

    @model_validator(mode="before")
    @classmethod
    def _own_sizes(cls, data: Any) -> Any:
        """Read `mixer` as the architecture's own configuration."""
        if isinstance(data, dict):
            architecture = get_architecture(str(data.get("name", "mamba2")))
            sizes = data.get("mixer") or {}
            if isinstance(sizes, Config):
                sizes = sizes.plain()
            if isinstance(sizes, dict):
                data = data | {"mixer": parse(architecture.config_class(), sizes, "model.mixer")}
            if isinstance(ffn := data.get("ffn"), dict):
                data = data | {"ffn": {"kind": architecture.ffn, **ffn}}
            for name, addon in ADDONS.items():
                if data.get(name) is not None and name not in architecture.addons:
                    raise ValueError(addon.refusal.format(name=architecture.name))
                if not isinstance(data.get(name), Mapping | Config | None):
                    raise UserError(
                        f"model.{name}={json.dumps(data[name], default=str)[:40]}: it takes options "
                        f"(model.{name}.KEY=VALUE, {{}} for the usual ones), or null for none"
                    )
        return data

    @model_validator(mode="after")
    def _switches_it_has(self) -> ModelConfig:
        """A switch that would do nothing is refused: it would make another cell of the same model."""
        if self.norm_branch and self.ffn is not None:
            raise UserError("model.norm_branch stands in the place of an FFN, and this model has one: leave it out")
        if self.bft is not None and self.bft.jacobian is not None and self.ffn is None:
            raise UserError(f"{self.bft.said('jacobian')} is of an FFN, and this model has none: J = 0")
        if self.bft is not None and self.n_layers == 1:
            for name in ("jacobian", "process_noise", "initial_noise"):
                if getattr(self.bft, name) != BftConfig.model_fields[name].default:
                    raise UserError(f"{self.bft.said(name)} is for the layers above, and model.n_layers=1 has none")
        architecture, post = get_architecture(self.name), self.post
        if post is None:
            return self
        if post.gate is not None and len(architecture.gates) == 1:
            with_gates = ", ".join(name for name, known in architectures().items() if len(known.gates) > 1)
            raise ValueError(f"post.gate={post.gate} is for {with_gates}; {self.name} has one gate, its own")
        if post.gate == USUAL_GATE[post.variant]:
            raise ValueError(f"post.gate={post.gate} is what variant {post.variant} has: leave it out")
        gate = "softplus" if post.replaces_gate and len(architecture.gates) > 1 else "baseline"
        if post.dt_bias is not None and gate not in architecture.dt_bias_gates:
            needs = "with post.gate=softplus only" if architecture.dt_bias_gates else "in no gate"
            raise ValueError(f"post.dt_bias={post.dt_bias}: {self.name} has a dt_bias {needs}")
        return self

    @property
    def addons(self) -> tuple[str, ...]:
        """The add-ons' names as tables spell them: post (variant paper), post-minimal, bft."""
        return tuple(addon.name for key in ADDONS if (addon := getattr(self, key)) is not None)

    @property
    def cell(self) -> str:
        """The model's name in every table, e.g. mamba2+post."""
        return "+".join([self.name, *self.addons])


POST_VOCABULARY = 128_256  # Llama 3's


# Sizes of the published language models (PoST, arXiv 2604.07658, section on pretraining). RWKV-7 has an FFN and half of
# the others' blocks. GLA, RetNet and attention aren't among them: theirs are ours, with an FFN and half of the blocks
# too, and 12 d_model^2 weights a block in mixer and FFN together, as many as two of Mamba-2's.
def _language_model(d_model: int, n_layers: int) -> dict[str, dict[str, Any]]:
    shared = {"vocab_size": POST_VOCABULARY, "d_model": d_model}
    return {
        "mamba2": {**shared, "n_layers": n_layers, "mixer": {"d_state": 128, "headdim": 64}},
        "rwkv7": {
            **shared,
            "n_layers": n_layers // 2,
            "mixer": {"head_dim": 64},
            "ffn": {"kind": "channel_mix"},
            "norm": "layernorm",
            "embedding_norm": True,
        },
        "gated_deltanet": {
            **shared,
            "n_layers": n_layers,
            "mixer": {"n_heads": d_model // 128, "head_dim": 128, "expand_v": 2},
        },
        "gla": {
            **shared,
            "n_layers": n_layers // 2,
            "mixer": {"n_heads": d_model // 256, "expand_k": 0.5, "expand_v": 1},
            "ffn": {"kind": "swiglu"},
        },
        "retnet": {
            **shared,
            "n_layers": n_layers // 2,
            "mixer": {"n_heads": d_model // 256, "expand_k": 1, "expand_v": 2},
            "ffn": {"kind": "swiglu", "multiple": 4 / 3},
        },
        "attention": {
            **shared,
            "n_layers": n_layers // 2,
            "mixer": {"n_heads": d_model // 64},
            "ffn": {"kind": "swiglu"},
        },
    }


# On two CPU cores. Every recurrence keeps 4,096 numbers a layer beside its convolutions' or shift's tail.
_SMOKE_MIXERS: dict[str, dict[str, Any]] = {
    "mamba2": {"d_state": 32, "headdim": 16},
    "rwkv7": {"head_dim": 64},
    "gated_deltanet": {"n_heads": 4, "head_dim": 32, "expand_v": 1, "output_gate": False},
    "gla": {"n_heads": 4, "expand_k": 2, "expand_v": 2, "conv_width": 4},
    "retnet": {"n_heads": 4, "expand_k": 2, "expand_v": 2, "conv_width": 4},
    "attention": {"n_heads": 4},
}

# Language models for a CPU, of bytes; about two million parameters, and 32,768 numbers of state a layer beside RWKV-7's
# 16,384.
_MICRO: dict[str, dict[str, Any]] = {
    "mamba2": {"d_model": 256, "n_layers": 4, "mixer": {"d_state": 64, "headdim": 32}},
    "rwkv7": {
        "d_model": 256,
        "n_layers": 3,
        "mixer": {"head_dim": 64},
        "ffn": {"kind": "channel_mix"},
        "norm": "layernorm",
        "embedding_norm": True,
    },
    "gated_deltanet": {"d_model": 256, "n_layers": 4, "mixer": {"n_heads": 4, "head_dim": 64, "expand_v": 2}},
    "gla": {"d_model": 256, "n_layers": 4, "mixer": {"n_heads": 4, "expand_k": 1, "expand_v": 2, "conv_width": 4}},
    "retnet": {"d_model": 256, "n_layers": 4, "mixer": {"n_heads": 4, "expand_k": 1, "expand_v": 2, "conv_width": 4}},
    "attention": {"d_model": 192, "n_layers": 4, "mixer": {"n_heads": 3}, "ffn": {"kind": "swiglu"}},
}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "smoke": {name: {"d_model": 64, "n_layers": 2, "mixer": mixer} for name, mixer in _SMOKE_MIXERS.items()},
    "micro": {name: {"vocab_size": 257, **sizes} for name, sizes in _MICRO.items()},
    "180m": _language_model(768, 24),
    "440m": _language_model(1024, 48),
    "1.5b": _language_model(2048, 48),
}


def preset(size: str, name: str) -> dict[str, Any]:
    """The settings of a preset for an architecture, as data to be completed. Raises UserError on unknown names."""
    if size not in PRESETS:
        raise unknown("model preset", size, PRESETS)
    get_architecture(name)
    if name not in PRESETS[size]:
        raise unknown(f"model of preset {size}", name, PRESETS[size])
    return {"name": name, **PRESETS[size][name]}
