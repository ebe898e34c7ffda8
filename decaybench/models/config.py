"""ModelConfig: the sizes of a model, its architecture's own sizes and its add-ons."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializeAsAny, model_validator

from decaybench.core.config import Config, parse
from decaybench.core.names import unknown
from decaybench.models.addons.post import PostConfig
from decaybench.models.ffn import FfnConfig
from decaybench.models.registry import get_architecture


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
    tie_embeddings: bool = Field(default=True, description="the head's weights are the embedding's")
    post: PostConfig | None = Field(default=None, description="PoST; none: without")

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
            if data.get("post") is not None and "post" not in architecture.addons:
                raise ValueError(f"post needs a mixer with decays; {architecture.name} has none")
        return data

    @property
    def addons(self) -> tuple[str, ...]:
        """The add-ons' names as tables spell them: post (variant paper), post-minimal."""
        return () if self.post is None else (self.post.name,)

    @property
    def cell(self) -> str:
        """The model's name in every table, e.g. mamba2+post."""
        return "+".join([self.name, *self.addons])


# Sizes of the published language models (PoST, arXiv 2604.07658, section on pretraining).
_LM = {"vocab_size": 128_256, "mixer": {"d_state": 128, "headdim": 64}}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "smoke": {
        "mamba2": {"d_model": 64, "n_layers": 2, "mixer": {"d_state": 32, "headdim": 16}},
        "attention": {"d_model": 64, "n_layers": 2, "mixer": {"n_heads": 4}},
    },
    "180m": {"mamba2": {**_LM, "d_model": 768, "n_layers": 24}},
    "440m": {"mamba2": {**_LM, "d_model": 1024, "n_layers": 48}},
    "1.5b": {"mamba2": {**_LM, "d_model": 2048, "n_layers": 48}},
}


def preset(size: str, name: str) -> dict[str, Any]:
    """The settings of a preset for an architecture, as data to be completed. Raises UserError on unknown names."""
    if size not in PRESETS:
        raise unknown("model preset", size, PRESETS)
    get_architecture(name)
    if name not in PRESETS[size]:
        raise unknown(f"model of preset {size}", name, PRESETS[size])
    return {"name": name, **PRESETS[size][name]}
