"""Measuring: times in alternation, ratios of pairs with an interval, peak memory, matrix FLOPs and their ceiling.

Another program on the same machine slows everything down for a while, so two things are compared by doing them in turn
(A B, B A, A B, ...) and taking the ratio of each pair: what lasts longer than a pair divides out. The interval of a
median is between two order statistics: with n pairs, the l-th smallest and the l-th largest hold it between them with
probability 1 - 2 P(Binomial(n, 1/2) < l), whatever the law of the ratios; l is the largest that leaves 95 %.
"""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

Action = Callable[[], object]

LEAST_PAIRS = 6  # below, no two order statistics hold the median with 95 %
_SHORTEST = 0.02  # seconds: shorter actions are repeated within one measurement
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PEAK_SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192)}


class Middle(NamedTuple):
    """A median and its 95 % interval."""

    value: float
    low: float
    high: float


def in_turn(actions: Mapping[str, Action], rounds: int, device: str = "cpu") -> dict[str, list[float]]:
    """Seconds of one call of each action, `rounds` of them, the order turned round after each.

    Each runs twice before it counts; what is shorter than 20 ms is called several times within a measurement and
    divided. The garbage collector rests meanwhile.
    """
    calls = {name: _calls(action, device) for name, action in actions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    order = list(actions)
    with _no_garbage_collection():
        for _ in range(rounds):
            for name in order:
                seconds[name].append(duration(actions[name], device, calls[name]) / calls[name])
            order.reverse()
    return seconds


def duration(action: Action, device: str = "cpu", calls: int = 1) -> float:
    """Seconds of so many calls of an action, until the device has done with them."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def ratio(times: Sequence[float], base: Sequence[float]) -> Middle:
    """The median of times_i / base_i with its interval; raises ValueError unless there are as many of both."""
    return middle([a / b for a, b in zip(times, base, strict=True)])


def middle(values: Sequence[float]) -> Middle:
    """The median with its interval by order statistics. Raises ValueError on fewer than six values."""
    n = len(values)
    if n < LEAST_PAIRS:
        raise ValueError(f"{n} values don't hold their median with 95 %: it takes {LEAST_PAIRS}")
    ordered = sorted(values)
    below, rank = 0, 0  # of 2^n equally likely patterns, those with fewer than `rank` values under the median
    while 2 * (below + math.comb(n, rank)) <= 0.05 * 2**n:
        below += math.comb(n, rank)
        rank += 1
    return Middle(statistics.median(ordered), ordered[rank - 1], ordered[n - rank])


def peak_growth(action: Action, device: str = "cpu") -> int | None:
    """Bytes of memory that an action takes at its peak, beyond what is in use before; None where nobody can say.

    On a GPU, of its allocator. On a CPU, of the process's resident set: the kernel's high-water mark is set back first
    (Linux 4.0 and later), and memory that was freed but is still held goes back to the system, so that it counts again.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return torch.cuda.max_memory_allocated() - before
    try:
        _give_back()
        _RESET.write_text("5")
        resident = _kilobytes("VmRSS")
        action()
        return max(0, _kilobytes("VmHWM") - resident) * 1024
    except OSError:
        return None


def matrix_flops(action: Action) -> int:
    """Floating-point operations in the matrix products and convolutions of an action, two a multiply-add.

    Counted by PyTorch as they run, backward and masked-out products included; elementwise work isn't counted.
    """
    # Those in place are not among the ones that PyTorch knows.
    in_place = {torch.ops.aten.baddbmm_: _flops_of_sum, torch.ops.aten.addmm_: _flops_of_sum}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        action()
    return int(counter.get_total_flops())


def _flops_of_sum(summed: torch.Size, a: torch.Size, b: torch.Size, **_: object) -> int:
    """FLOPs of summed + a @ b from the shapes [.., M, K] and [.., K, N]; the sum's aren't counted, as in PyTorch."""
    return 2 * a.numel() * b[-1]


def matmul_peak(device: str = "cpu", rounds: int = 8) -> float:
    """FLOP/s of this machine's fastest float32 product of square matrices, with the threads set now."""
    best = 0.0
    for n in _PEAK_SIZES[device]:
        a, b = (torch.randn(n, n, device=device) for _ in range(2))
        out = torch.empty_like(a)
        times = in_turn({"": lambda a=a, b=b, out=out: torch.mm(a, b, out=out)}, rounds, device)[""]  # type: ignore[misc]
        best = max(best, 2 * n**3 / min(times))
    return best


def _calls(action: Action, device: str) -> int:
    action()
    return max(1, math.ceil(_SHORTEST / max(duration(action, device), 1e-7)))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _kilobytes(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise OSError(f"no {field} in {_STATUS}")


def _give_back() -> None:
    with suppress(AttributeError):  # not glibc: memory that was freed and is held will be used again, uncounted
        ctypes.CDLL(None).malloc_trim(0)
