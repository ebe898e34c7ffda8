"""The base of all our modules: where initial values, precision and weight decay of a parameter are decided.

A module says three things about its own parameters, beside their definition: how they start (`initialise`), which of
them stay in float32 whatever the model is cast to (`float32_names`), and which of them take no weight decay
(`no_weight_decay`). Nothing outside a module overwrites its initial values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decaybench.core.hashing import key64

DrawsFor = Callable[[str], torch.Generator]


class Module(nn.Module):
    """An nn.Module whose parameters are declared, not drawn, at construction; `initialise` draws them."""

    float32_names: ClassVar[frozenset[str]] = frozenset()
    no_weight_decay: ClassVar[frozenset[str]] = frozenset()

    def initialise(self, draws_for: DrawsFor) -> None:
        """Fill this module's own parameters and buffers; `draws_for(name)` is a parameter's own generator."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        own: dict[str, Tensor | None] = {**self._parameters, **self._buffers}
        before = {name: kept.data for name in self.float32_names if (kept := own.get(name)) is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            now = getattr(self, name)
            wanted = torch.promote_types(now.dtype, torch.float32)
            if now.dtype != wanted:  # a cast below float32: take the old values along, not their rounded copies
                now.data = old.to(device=now.device, dtype=wanted)
        return self


def initialise(model: nn.Module, seed: int) -> None:
    """Draw every parameter of `model`, each from a generator of its own keyed by (seed, its full name).

    So a parameter's initial value doesn't depend on which other parameters exist: a model with an add-on starts from
    the same values as one without, wherever they share a parameter.
    """
    for prefix, module in model.named_modules():
        if not isinstance(module, Module):
            if any(True for _ in module.parameters(recurse=False)):
                raise TypeError(f"{type(module).__name__} at {prefix!r} doesn't say how its parameters start")
            continue

        def draws_for(name: str, prefix: str = prefix) -> torch.Generator:
            return torch.Generator().manual_seed(key64("parameter", seed, f"{prefix}.{name}") >> 1)

        with torch.no_grad():
            module.initialise(draws_for)


def uniform_(parameter: Tensor, low: float, high: float, draws: torch.Generator) -> None:
    """Fill with U(low, high), drawn in float32 on the CPU so that it is the same on every device and dtype."""
    parameter.copy_(torch.empty(parameter.shape, dtype=torch.float32).uniform_(low, high, generator=draws))


def normal_(parameter: Tensor, std: float, draws: torch.Generator) -> None:
    """Fill with N(0, std^2), drawn in float32 on the CPU."""
    parameter.copy_(torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=draws))


class Linear(Module):
    """y = x W^T without bias. W: [d_out, d_in], initially U(-1/sqrt(d_in), 1/sqrt(d_in)) / `shrink`.

    The same law as torch.nn.Linear's default, which mamba-ssm and flash-linear-attention keep; `shrink` is the
    sqrt(number of residual branches) by which they divide projections that end a branch (GPT-2's rule).
    """

    def __init__(self, d_in: int, d_out: int, *, shrink: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.shrink = shrink

    def initialise(self, draws_for: DrawsFor) -> None:
        bound = 1.0 / (math.sqrt(self.weight.shape[1]) * self.shrink)
        uniform_(self.weight, -bound, bound, draws_for("weight"))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Embedding(Module):
    """Token vectors [vocab_size, d_model], initially N(0, 0.02^2)."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))

    def initialise(self, draws_for: DrawsFor) -> None:
        normal_(self.weight, 0.02, draws_for("weight"))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class RMSNorm(Module):
    """x / rms(x) * weight over the last dimension, or each of `groups` parts of it, in float32; weight starts at 1."""

    float32_names = frozenset({"weight"})
    no_weight_decay = frozenset({"weight"})

    def __init__(self, width: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.groups = groups

    def initialise(self, draws_for: DrawsFor) -> None:
        self.weight.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide.reshape(*x.shape[:-1], self.groups, x.shape[-1] // self.groups)
        # Written out: F.rms_norm takes twice as long on a CPU, forward and backward.
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return ((wide * scale).reshape(x.shape) * self.weight).to(x.dtype)


class LayerNorm(Module):
    """(x - mean) / std * weight + bias over the last dimension, in float32; starts as the plain standardisation."""

    float32_names = frozenset({"weight", "bias"})
    no_weight_decay = frozenset({"weight", "bias"})

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.eps = eps

    def initialise(self, draws_for: DrawsFor) -> None:
        self.weight.fill_(1.0)
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.layer_norm(wide, self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)


def takes_weight_decay(model: nn.Module) -> dict[str, bool]:
    """For each trainable parameter, whether weight decay applies: weights of two or more dimensions, unless named.

    Norms, biases and everything that sets a decay (A_log, dt_bias, D, PoST's base and deltas) never take it.
    """
    result = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            exempt = isinstance(module, Module) and name in module.no_weight_decay
            if parameter.requires_grad:
                result[f"{prefix}.{name}".lstrip(".")] = parameter.ndim >= 2 and not exempt
    return result
