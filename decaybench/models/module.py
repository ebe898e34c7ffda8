"""The base of all our modules: where a parameter's initial value, precision and treatment in training are decided.

A module says four things about its own parameters, beside their definition: how they start (`initialise`), which of
them stay in float32 whatever the model is cast to (`float32_names`), which of them take no weight decay
(`no_weight_decay`), and which learn at a multiple of the learning rate (`learning_rate_factors`). Nothing outside a
module overwrites its initial values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decaybench.core.hashing import key64
from decaybench.models.ops.precision import at_least_float32
from decaybench.models.ops.rms_norm import rms_norm

DrawsFor = Callable[[str], torch.Generator]


class Module(nn.Module):
    """An nn.Module whose parameters are declared, not drawn, at construction; `initialise` draws them."""

    float32_names: ClassVar[frozenset[str]] = frozenset()
    no_weight_decay: ClassVar[frozenset[str]] = frozenset()
    exempt_matrices: ClassVar[frozenset[str]] = frozenset()  # of these, weights of projections
    learning_rate_factors: Mapping[str, float] = MappingProxyType({})

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


def orthogonal_(parameter: Tensor, gain: float, draws: torch.Generator) -> None:
    """Fill a matrix with orthonormal rows or columns (the fewer) times `gain`, in float32 on the CPU.

    In bfloat16 the decomposition would lose the orthogonality.
    """
    drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    parameter.copy_(nn.init.orthogonal_(drawn, gain, generator=draws))


class Linear(Module):
    """y = x W^T + b. W: [d_out, d_in], b: [d_out] or none, both initially U(-1/sqrt(d_in), 1/sqrt(d_in)), W / `shrink`.

    The same law as torch.nn.Linear's default, which mamba-ssm and flash-linear-attention keep; `shrink` is the
    sqrt(number of residual branches) by which they divide projections that end a branch (GPT-2's rule).
    """

    no_weight_decay = frozenset({"bias"})

    def __init__(self, d_in: int, d_out: int, *, bias: bool = False, shrink: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None
        self.shrink = shrink

    def initialise(self, draws_for: DrawsFor) -> None:
        bound = 1.0 / math.sqrt(self.weight.shape[1])
        uniform_(self.weight, -bound / self.shrink, bound / self.shrink, draws_for("weight"))
        if self.bias is not None:
            uniform_(self.bias, -bound, bound, draws_for("bias"))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def parts(self, x: Tensor, *sizes: int) -> list[Tensor]:
        """y of a projection without b, in parts of so many channels.

        Each is a product of its own: the parts are contiguous, and their gradients needn't be put together, which would
        be one more pass over all of y.
        """
        assert self.bias is None, "parts of a projection with a bias: it would be left out"
        return [F.linear(x, weight) for weight in self.weight.split(sizes)]  # type: ignore[no-untyped-call]


class OrthogonalLinear(Linear):
    """A projection that starts orthogonal, times `gain`; with gain 0 its branch starts as the identity."""

    def __init__(self, d_in: int, d_out: int, *, gain: float) -> None:
        super().__init__(d_in, d_out)
        self.gain = gain

    def initialise(self, draws_for: DrawsFor) -> None:
        orthogonal_(self.weight, self.gain, draws_for("weight"))


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
        return rms_norm(x, self.weight, self.eps, self.groups)

    def factor(self, x: Tensor) -> Tensor:
        """1 / rms of each group, float32 [..., groups, 1]."""
        parts = at_least_float32(x).reshape(*x.shape[:-1], self.groups, -1)
        return torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)

    def share(self, x: Tensor) -> Tensor:
        """The mean square that x / rms has, in each group: m / (m + eps) for one of m in x; float32 [..., groups]."""
        m = at_least_float32(x).reshape(*x.shape[:-1], self.groups, -1).square().mean(-1)
        return m / (m + self.eps)

    def slope(self, x: Tensor) -> Tensor:
        """weight / rms, float32 in x's shape: the derivative where the rms is taken for a constant."""
        return (self.factor(x) * self.weight.view(self.groups, -1)).reshape(x.shape)


class LayerNorm(Module):
    """(x - mean) / std * weight + bias over the last dimension, or each of `groups` parts of it, in float32.

    Starts as the plain standardisation.
    """

    float32_names = frozenset({"weight", "bias"})
    no_weight_decay = frozenset({"weight", "bias"})

    def __init__(self, width: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.groups = groups

    def initialise(self, draws_for: DrawsFor) -> None:
        self.weight.fill_(1.0)
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.groups == 1:
            return F.layer_norm(wide, self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)
        parts = wide.reshape(*x.shape[:-1], self.groups, x.shape[-1] // self.groups)
        parts = F.layer_norm(parts, parts.shape[-1:], eps=self.eps)
        return torch.addcmul(self.bias, parts.reshape(x.shape), self.weight).to(x.dtype)

    def factor(self, x: Tensor) -> Tensor:
        """1 / std of each group, float32 [..., groups, 1]."""
        parts = at_least_float32(x).reshape(*x.shape[:-1], self.groups, -1)
        return torch.rsqrt(parts.var(-1, correction=0, keepdim=True) + self.eps)

    def slope(self, x: Tensor) -> Tensor:
        """weight / std, float32 in x's shape: the derivative where mean and std are taken for constants."""
        return (self.factor(x) * self.weight.view(self.groups, -1)).reshape(x.shape)


@dataclass(frozen=True)
class Treatment:
    """How a parameter is trained. decays: whether it takes weight decay; factor: multiple of the learning rate."""

    decays: bool
    factor: float


Decayed = Literal["matrices", "all"]


def treatments(model: nn.Module, decayed: Decayed | None = None) -> dict[str, Treatment]:
    """The treatment of each trainable parameter. Weights of two or more dimensions take weight decay, unless named.

    Norms, biases and everything that sets a decay (A_log, dt_bias, D, w0, PoST's base and deltas) don't take it.
    decayed: "matrices" decays the weights of projections that an architecture's own training leaves out, too; "all"
    decays every parameter, as AdamW does where nobody makes groups.
    """
    result = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            ours = isinstance(module, Module)
            exempt = ours and name in module.no_weight_decay
            if exempt and decayed == "matrices":
                exempt = name not in module.exempt_matrices
            factor = module.learning_rate_factors.get(name, 1.0) if ours else 1.0
            if parameter.requires_grad:
                decays = decayed == "all" or (parameter.ndim >= 2 and not exempt)
                result[f"{prefix}.{name}".lstrip(".")] = Treatment(decays, factor)
    return result
