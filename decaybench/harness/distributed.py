"""Several processes on one run, as torchrun starts them: who is who, sums over all, and PyTorch's DDP and FSDP2.

    torchrun --nproc-per-node 8 -m decaybench.cli pretrain --model mamba2 --data DIR

Each process computes its part of every batch; the first one alone writes, and says what there is to say. Without
torchrun there is one process, `ALONE`, and nothing here does anything.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from decaybench.core.errors import RunError, UserError
from decaybench.harness.progress import Progress
from decaybench.models.residual import Stream

T = TypeVar("T")

_PATIENCE = timedelta(minutes=30)  # for one another: the first may be writing a large checkpoint


@dataclass(frozen=True)
class World:
    """One of `size` processes, number `rank`; device: where it computes, cpu or cuda."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def sums(self, *numbers: float) -> list[float]:
        """Each number's sum over all processes, in float64."""
        if self.size == 1:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(found)
        return found.tolist()

    def tell(self, thing: T) -> T:
        """What the first process has, for all. It is pickled among processes that one command started."""
        if self.size == 1:
            return thing
        told = [thing if self.first else None]
        dist.broadcast_object_list(told, src=0, device=torch.device(self.device))
        return told[0]  # type: ignore[return-value]

    def gather(self, thing: T) -> list[T]:
        """What each process has, in the order of ranks; for the first process alone, empty elsewhere."""
        if self.size == 1:
            return [thing]
        found: list[Any] = [None] * self.size if self.first else []
        dist.gather_object(thing, found if self.first else None, dst=0)
        return found

    def progress(self, progress: Progress) -> Progress:
        """The first process's own; in the others one that says nothing."""
        return progress if self.first else _Silent()

    def shared(self, module: nn.Module, blocks: Sequence[nn.Module], how: Literal["ddp", "fsdp"]) -> nn.Module:
        """`module` with gradients that are the mean over all processes; blocks: its parts that fsdp shards one by one.

        With fsdp its parameters become shards in place (`whole` puts one together); with ddp they stay as they are.
        """
        if self.size == 1:
            return module
        if how == "fsdp":
            return _sharded(module, blocks, self)
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(module)


ALONE = World()


def expected_processes() -> int:
    """How many processes were started for this run, by the environment that torchrun makes. Raises UserError."""
    said = os.environ.get("WORLD_SIZE", "1")
    if not said.isdecimal() or int(said) < 1:
        raise UserError(f"WORLD_SIZE={said!r} is not a number of processes; torchrun sets it")
    return int(said)


def speaks() -> bool:
    """Whether this is the first of the processes that were started for this run, without meeting the others."""
    return expected_processes() == 1 or os.environ.get("RANK", "0") == "0"


@contextmanager
def joined(device: str) -> Iterator[World]:
    """Meet the other processes of this run, and part from them at the end. device: cpu or cuda, resolved.

    Inside another one it is that one's. Raises RunError where they don't come together, and where one of them ends
    before the others: whoever waits for it learns that from the connection.
    """
    size = expected_processes()
    if size == 1:
        yield World(device=device)
        return
    if dist.is_initialized():
        yield World(dist.get_rank(), dist.get_world_size(), device)
        return
    try:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_PATIENCE)
    except (RuntimeError, ValueError, KeyError) as error:
        raise RunError(f"the {size} processes don't come together: {' '.join(str(error).split())[:200]}") from None
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    except RuntimeError as error:
        if not _is_parting(error):
            raise
        raise RunError(
            f"another of the {size} processes ended, or can't be reached any more; the same command goes on from the "
            "last checkpoint"
        ) from error
    finally:
        gc.collect()  # shared modules hold the group, whose threads must end before the interpreter does
        dist.destroy_process_group()


@contextmanager
def part_of_step(module: nn.Module, last: bool) -> Iterator[None]:
    """Around the gradients of a part of a step's batch: ddp shares them in the last part only, fsdp in each."""
    no_sync = getattr(module, "no_sync", None)
    with nullcontext() if last or no_sync is None else no_sync():
        yield


def clip_gradients(module: nn.Module, limit: float) -> Tensor:
    """Scale all gradients so that their norm is `limit` at most; after the last part of a step. Returns the norm, [].

    Before that, what fsdp leaves out, parameters without a dimension to cut, gets its mean over the processes.
    """
    kinds = _kinds([weight for weight in module.parameters() if weight.grad is not None])
    if len(kinds) == 1 and not _is_shard(kinds[0][0]):
        norm: Tensor = torch.nn.utils.clip_grad_norm_(kinds[0], limit)
        return norm
    norms = []
    for weights in kinds:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        if not _is_shard(weights[0]):
            for gradient in gradients:
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
        norms.append(whole(torch.nn.utils.get_total_norm(gradients)))
    norm = torch.stack(norms).norm().to(kinds[0][0].device)
    for weights in kinds:
        torch.nn.utils.clip_grads_with_norm_(weights, limit, norm)
    return norm


def optimiser_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimiser's groups, those parted that hold shards and whole parameters: no kernel takes both at once."""
    return [{**group, "params": weights} for group in groups for weights in _kinds(group["params"])]


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the values of all its shards, on the CPU; to be called by all processes."""
    found: Any = tensor.detach()
    gathered: Tensor = found.full_tensor() if _is_shard(found) else found
    return gathered.cpu()


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor where `other` lies: its part of it, if `other` is a shard; to be called by all processes."""
    tensor, place = tensor.to(other.device), other.detach()
    if not _is_shard(other) or tensor.shape != other.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(place, DTensor)
    return distribute_tensor(tensor, place.device_mesh, place.placements)


def _kinds(weights: Sequence[Tensor]) -> list[list[Tensor]]:
    """Shards, then whole ones; what there is of them."""
    parted: dict[bool, list[Tensor]] = {True: [], False: []}
    for weight in weights:
        parted[_is_shard(weight)].append(weight)
    return [kind for kind in parted.values() if kind]


def _is_shard(tensor: Tensor) -> bool:
    if not dist.is_available() or not dist.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _is_parting(error: RuntimeError) -> bool:
    """Whether an error is of what connects the processes; gloo's have no class of their own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "by peer" in str(error)


class _Silent(Progress):
    def __init__(self) -> None:
        super().__init__(quiet=True)

    def note(self, text: str) -> None:
        pass


def _sharded(module: nn.Module, blocks: Sequence[nn.Module], world: World) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _show_tensors_of_stream()
    mesh = init_device_mesh(world.device, (world.size,))  # its own choice would be a GPU wherever there is one
    uncut = {weight for weight in module.parameters() if weight.ndim == 0}
    for part in (*blocks, module):
        fully_shard(part, mesh=mesh, ignored_params=uncut)
    return module


def _show_tensors_of_stream() -> None:
    """FSDP2 hooks onto the tensors that go into a block and come out of it, and has to know where they are."""
    from torch.utils import _pytree

    if Stream not in _pytree.SUPPORTED_NODES:
        torch.export.register_dataclass(Stream)
