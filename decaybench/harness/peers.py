"""Other projects' implementations of the same functions, where they are installed, for `bench speed`.

- transformers' Mamba2ForCausalLM by its torch path, with our model's weights; its head is applied where ours is.
- flash-linear-attention's naive forms (plain PyTorch): each file is loaded by its path, without the package around it,
  which would want Triton.

What a peer computes is compared with what ours computes before anything is timed.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from decaybench.core.config import Config
from decaybench.models.config import ModelConfig
from decaybench.models.converters import mamba2_from_transformers
from decaybench.models.language_model import LanguageModel, Output
from decaybench.models.ops.dplr import dplr
from decaybench.models.ops.gated_delta_rule import gated_delta_rule
from decaybench.models.ops.scalar_decay import scalar_decay
from decaybench.models.ops.vector_decay import vector_decay

Inputs = dict[str, Tensor]
Op = Callable[[Inputs], Tensor]

PACKAGES = ("transformers", "flash-linear-attention")
_CHUNKS = (16, 32, 64, 128)
_DPLR_CHUNK = 32


class OpShape(Config):
    """The inputs on which ops are compared with other packages' forms of them."""

    batch: int = Field(default=2, ge=1, description="rows")
    length: int = Field(default=1024, ge=1, description="tokens a row")
    heads: int = Field(default=4, ge=1, description="heads")
    d_key: int = Field(default=64, ge=1, description="key channels a head")
    d_value: int = Field(default=64, ge=1, description="value channels a head")


@dataclass(frozen=True)
class OpPeers:
    """An op of ours and other forms of the same function. Each takes the inputs and returns o [B, T, H, V]."""

    name: str
    inputs: Inputs
    ours: Op
    peers: Mapping[str, Op]


def missing() -> list[str]:
    """The packages with peers in them that are not installed here."""
    return [name for name in PACKAGES if _version(name) is None]


class TransformersMamba2(nn.Module):
    """Their model, called as ours is in training: the head only at `logits_at`."""

    def __init__(self, ours: LanguageModel, chunk_size: int | None) -> None:
        """ours: whose weights it takes; chunk_size: tokens, None for the package's default."""
        super().__init__()
        transformers = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()  # it would tell that it takes its torch path, which is what we want
        config, mixer = ours.config, ours.config.mixer.plain()
        given = {} if chunk_size is None else {"chunk_size": chunk_size}
        self.inner = transformers.Mamba2ForCausalLM(
            transformers.Mamba2Config(
                vocab_size=config.vocab_size,
                hidden_size=config.d_model,
                num_hidden_layers=config.n_layers,
                num_heads=mixer["expand"] * config.d_model // mixer["headdim"],
                head_dim=mixer["headdim"],
                state_size=mixer["d_state"],
                n_groups=mixer["n_groups"],
                expand=mixer["expand"],
                conv_kernel=mixer["conv_width"],
                tie_word_embeddings=config.tie_embeddings,
                layer_norm_epsilon=config.norm_eps,
                **given,
            )
        )
        self.is_default = chunk_size is None
        self.chunk_size: int = self.inner.config.chunk_size
        weights = ours.state_dict()
        with torch.no_grad():
            for name, parameter in self.inner.named_parameters():
                ((own, _),) = mamba2_from_transformers({name: parameter}).items()
                parameter.copy_(weights[own].view(parameter.shape))
        self.to(ours.embedding.weight.device)

    def forward(self, tokens: Tensor, *, logits_at: Tensor) -> Output:
        """tokens: int64 [B, T]; logits_at: bool [B, T]. Logits [n, V] at those places."""
        hidden = self.inner.backbone(tokens, use_cache=False)[0]
        return Output(self.inner.lm_head(hidden[logits_at]), None)

    def prefill(self, tokens: Tensor) -> Output:
        """Logits [B, V] after the last token."""
        return Output(self.inner.lm_head(self.inner.backbone(tokens, use_cache=False)[0][:, -1]), None)


def model_peers(ours: LanguageModel, length: int) -> dict[str, TransformersMamba2]:
    """The same model in other packages, by what to call it: with their default chunk size and with others."""
    if not _is_plain_mamba2(ours.config) or _version("transformers") is None:
        return {}
    default = TransformersMamba2(ours, None)
    others = (chunk for chunk in _CHUNKS if chunk <= 2 * length and chunk != default.chunk_size)
    found = [default, *(TransformersMamba2(ours, chunk) for chunk in others)]
    name = f"transformers {_version('transformers')}"
    return {f"{name}, chunks of {peer.chunk_size}{' (default)' * peer.is_default}": peer for peer in found}


def op_peers(architecture: str, shape: OpShape, device: str) -> OpPeers | None:
    """The op of an architecture with its peers; None where no package here has it."""
    if architecture not in _OPS or _version("flash-linear-attention") is None:
        return None
    name, make, ours, peers = _OPS[architecture]
    draws = torch.Generator().manual_seed(0)
    inputs = {key: value.to(device) for key, value in make(shape, draws).items()}
    version = _version("flash-linear-attention")
    found = {f"flash-linear-attention {version}, {form}": op for form, op in peers(shape).items()}
    return OpPeers(name, inputs, ours, found) if found else None


def _is_plain_mamba2(config: ModelConfig) -> bool:
    beside = (config.addons, config.ffn, config.embedding_norm, config.embedding_dropout)
    return config.name == "mamba2" and config.norm == "rmsnorm" and not any(beside)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _naive(path: str) -> ModuleType | None:
    """A file of flash-linear-attention, e.g. ops/gla/naive.py; None where there is none, or not one that loads."""
    package = importlib.util.find_spec("fla")
    for folder in (package.submodule_search_locations or []) if package else []:
        file = Path(folder) / path
        spec = importlib.util.spec_from_file_location(f"decaybench_peer.{path.replace('/', '.')}", file)
        if file.exists() and spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            try:
                spec.loader.exec_module(module)
            except ImportError:
                return None
            return module
    return None


# --- inputs: of order one, keys of length one, decays of a few tokens to a few hundred


def _normal(draws: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draws)


def _log_decay(draws: torch.Generator, *shape: int) -> Tensor:
    return -torch.empty(shape).uniform_(math.log(1e-3), math.log(0.3), generator=draws).exp()


def _attention(s: OpShape, draws: torch.Generator) -> Inputs:
    q, k = (F.normalize(_normal(draws, s.batch, s.length, s.heads, s.d_key), dim=-1) for _ in range(2))
    return {"q": q, "k": k, "v": _normal(draws, s.batch, s.length, s.heads, s.d_value)}


def _scalar_inputs(s: OpShape, draws: torch.Generator) -> Inputs:
    return {**_attention(s, draws), "log_decay": _log_decay(draws, s.batch, s.length, s.heads)}


def _retention_inputs(s: OpShape, draws: torch.Generator) -> Inputs:
    """The decays that flash-linear-attention's form has built in; not an input there, so that it has no gradient."""
    log_decay = torch.log1p(-torch.exp2(-5 - torch.arange(s.heads, dtype=torch.float32)))
    return {**_attention(s, draws), "log_decay": log_decay.expand(s.batch, s.length, s.heads)}


def _vector_inputs(s: OpShape, draws: torch.Generator) -> Inputs:
    return {**_attention(s, draws), "log_decay": _log_decay(draws, s.batch, s.length, s.heads, s.d_key)}


def _delta_inputs(s: OpShape, draws: torch.Generator) -> Inputs:
    return {**_scalar_inputs(s, draws), "beta": _normal(draws, s.batch, s.length, s.heads).sigmoid()}


def _dplr_inputs(s: OpShape, draws: torch.Generator) -> Inputs:
    kk = F.normalize(_normal(draws, s.batch, s.length, s.heads, s.d_key), dim=-1)
    rate = _normal(draws, s.batch, s.length, s.heads, s.d_key).sigmoid()
    return {**_vector_inputs(s, draws), "a": -kk, "b": kk * rate}


# --- ours


def _scalar(x: Inputs) -> Tensor:
    return scalar_decay(x["q"], x["k"], x["v"], x["log_decay"])[0]


def _vector(x: Inputs) -> Tensor:
    return vector_decay(x["q"], x["k"], x["v"], x["log_decay"])[0]


def _delta(x: Inputs) -> Tensor:
    return gated_delta_rule(x["q"], x["k"], x["v"], x["beta"], x["log_decay"])[0]


def _dplr(x: Inputs) -> Tensor:
    return dplr(x["q"], x["log_decay"], x["k"], x["v"], x["a"], x["b"])[0]


# --- theirs. They divide q by sqrt(K) where they take no `scale`; called by keyword, for their orders differ.


def _unscaled(x: Inputs) -> Tensor:
    q = x["q"]
    return q * math.sqrt(q.shape[-1])


def _their_scalar(form: Callable[..., Any], x: Inputs) -> Tensor:
    return form(q=x["q"], k=x["k"], v=x["v"], g=x["log_decay"], scale=1.0)[0]  # type: ignore[no-any-return]


def _their_retention(form: Callable[..., Any], x: Inputs) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in (_unscaled(x), x["k"], x["v"]))
    return form(q=q, k=k, v=v).transpose(1, 2)  # type: ignore[no-any-return]


def _their_vector(form: Callable[..., Any], x: Inputs) -> Tensor:
    return form(q=_unscaled(x), k=x["k"], v=x["v"], gk=x["log_decay"])[0]  # type: ignore[no-any-return]


def _their_delta(form: Callable[..., Any], x: Inputs) -> Tensor:
    parts = {"q": x["q"], "k": x["k"], "v": x["v"], "g": x["log_decay"], "beta": x["beta"]}
    return form(**parts, scale=1.0)[0]  # type: ignore[no-any-return]


def _their_dplr(form: Callable[..., Any], x: Inputs) -> Tensor:
    parts = {"q": _unscaled(x), "k": x["k"], "v": x["v"], "alpha": x["a"], "beta": x["b"], "gk": x["log_decay"]}
    turned = {key: part.transpose(1, 2) for key, part in parts.items()}
    return form(**turned)[0].transpose(1, 2)  # type: ignore[no-any-return]


def _forms(path: str, adapt: Callable[..., Tensor], **names: str) -> dict[str, Op]:
    """The forms of one file, by what to call them."""
    module = _naive(path)
    return {
        form.replace("_", " "): partial(adapt, getattr(module, name))
        for form, name in names.items()
        if hasattr(module, name)
    }


def _scalar_forms(shape: OpShape) -> dict[str, Op]:
    return _forms(
        "ops/simple_gla/naive.py",
        _their_scalar,
        naive_recurrent="naive_recurrent_simple_gla",
        naive_chunk="naive_chunk_simple_gla",
        naive_parallel="naive_parallel_simple_gla",
    )


def _retention_forms(shape: OpShape) -> dict[str, Op]:
    return _forms("ops/retention/naive.py", _their_retention, naive="naive_retention")


def _vector_forms(shape: OpShape) -> dict[str, Op]:
    return _forms("ops/gla/naive.py", _their_vector, naive_recurrent="naive_recurrent_gla")


def _delta_forms(shape: OpShape) -> dict[str, Op]:
    return _forms(
        "ops/gated_delta_rule/naive.py",
        _their_delta,
        naive_recurrent="naive_recurrent_gated_delta_rule",
        naive_chunk="naive_chunk_gated_delta_rule",
    )


def _dplr_forms(shape: OpShape) -> dict[str, Op]:
    names = {"naive_recurrent": "dplr_recurrence", "naive_chunk": "dplr_chunkwise"}
    if shape.length % _DPLR_CHUNK:
        del names["naive_chunk"]  # it takes whole chunks only
    return _forms("ops/generalized_delta_rule/dplr/naive.py", _their_dplr, **names)


_OPS: dict[str, tuple[str, Callable[..., Inputs], Op, Callable[[OpShape], dict[str, Op]]]] = {
    "mamba2": ("scalar_decay", _scalar_inputs, _scalar, _scalar_forms),
    "retnet": ("retention", _retention_inputs, _scalar, _retention_forms),
    "gla": ("vector_decay", _vector_inputs, _vector, _vector_forms),
    "gated_deltanet": ("gated_delta_rule", _delta_inputs, _delta, _delta_forms),
    "rwkv7": ("dplr", _dplr_inputs, _dplr, _dplr_forms),
}
