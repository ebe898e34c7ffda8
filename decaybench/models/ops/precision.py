"""The precision rule of all recurrences: float32 inside, whatever the activations' dtype (float64 stays)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

# exp of these is far below what a sum of the dtype can show. Decays are cut there, for a cumulative sum over a chunk
# rounds in proportion to its size: with log-decays of -1e5 beside mild ones, the mild ones would lose every digit.
_LOG_FLOOR = {torch.float32: -30.0, torch.float64: -60.0}


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or in float64 if it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_log_decay(log_decay: Tensor) -> None:
    """Raises ValueError unless log-decays come in float32 or float64: bfloat16 can't tell a slow decay from none."""
    if log_decay.dtype not in _LOG_FLOOR:
        dtype = str(log_decay.dtype).removeprefix("torch.")
        raise ValueError(f"log_decay must be float32 or float64, not {dtype}: exp(-0.001) rounds to 1 there")


def bounded_log_decay(log_decay: Tensor) -> Tensor:
    """`log_decay`, float32 or float64, cut where the decay is 0 in all but name: for forms that sum log-decays."""
    return log_decay.clamp(min=_LOG_FLOOR[log_decay.dtype])


def keeps_precision(op: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """Decorates a recurrence: autocast doesn't reach inside."""

    @wraps(op)
    def inner(x: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with without_autocast(x):
            return op(x, *args, **kwargs)

    return inner


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Autocast switched off on x's device: it would make bfloat16 of an op's matrix products, and so of its state."""
    if torch.amp.is_autocast_available(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()
