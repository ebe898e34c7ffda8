"""What a training would take, without training: steps, tokens, parameters, memory and arithmetic.

Counted on PyTorch's meta device, where tensors have shapes and no values: the matrix products of one sequence, forwards
and backwards, and what the backward pass keeps of it. Blocks are alike, so two and three of them are counted and the
rest is a straight line. The head is applied where labels are. Weights, gradients and AdamW's two averages are float32,
16 bytes a parameter in all. A curriculum by mastery is counted as if all of it were at its longest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from decaybench.core.errors import UserError
from decaybench.harness.config import RunConfig
from decaybench.harness.distributed import expected_processes
from decaybench.harness.model_info import parameter_counts
from decaybench.harness.plans import Plan, make_plan, samples_a_batch
from decaybench.models.config import ModelConfig
from decaybench.models.language_model import LOGITS_AT_ONCE, build_model
from decaybench.tasks.base import Stage
from decaybench.tasks.registry import make_task

if TYPE_CHECKING:
    from rich.table import Table

_BYTES_A_PARAMETER = 16
_FLOAT32 = 4


@dataclass(frozen=True)
class Estimate:
    """Of one run. Bytes are of one process; what can't be counted is None.

    parameters: trainable; embedding: of these, in the embedding and an untied head. batch_tokens: of a step, at most;
    part_tokens: that a process computes at once, at most. flops: of the matrix products of all steps, two for a
    multiplication and its addition. state_bytes: weights, gradients and averages. activation_bytes: what the backward
    pass keeps of a part of a batch, all of it in float32 (with bfloat16 it is less). logit_bytes: logits, their softmax
    and its gradient.
    """

    cell: str
    parameters: int
    embedding: int
    steps: int
    tokens: int
    batch_tokens: int
    part_tokens: int
    processes: int
    flops: float | None
    state_bytes: int
    activation_bytes: int | None
    logit_bytes: int
    several_lengths: bool = False

    @property
    def memory_bytes(self) -> int | None:
        """The most that is held at once, roughly."""
        return None if self.activation_bytes is None else self.state_bytes + self.activation_bytes + self.logit_bytes

    def plain(self) -> dict[str, Any]:
        """As JSON-able data."""
        return {**asdict(self), "memory_bytes": self.memory_bytes}

    def __rich__(self) -> Table:
        from rich.table import Table

        most = f"up to {self.batch_tokens:,}" if self.several_lengths else f"{self.batch_tokens:,}"
        each = f", {self.processes} processes" if self.processes > 1 else ""
        table = Table(title=f"{self.cell}: what training would take{each}", title_justify="left", show_header=False)
        unknown = "not known: its mixer can't be counted without values"
        flops, memory = unknown, unknown
        if self.flops is not None:
            flops = (
                f"{self.flops:.3g} floating-point operations in matrix products, {self.flops / self.tokens:.3g} a token"
            )
        if self.memory_bytes is not None and self.activation_bytes is not None:
            memory = (
                f"about {_size(self.memory_bytes)}: weights, gradients and AdamW {_size(self.state_bytes)}, "
                f"activations {_size(self.activation_bytes)} at most, logits {_size(self.logit_bytes)}"
            )
        rows = {
            "parameters": f"{self.parameters:,}, of which {self.embedding:,} in embedding and head",
            "steps": f"{self.steps:,} of {most} tokens; a process computes {self.part_tokens:,} at once",
            "tokens": f"{self.tokens:,}, {self.tokens / self.parameters:.1f} a parameter",
            "arithmetic": flops,
            "memory" if self.processes == 1 else "memory of each": memory,
        }
        for name, said in rows.items():
            table.add_row(name, said)
        return table


def estimate(config: RunConfig) -> Estimate:
    """What training `config` would take, in as many processes as torchrun started. Raises UserError on a checkpoint."""
    if config.checkpoint is not None:
        raise UserError("--dry-run says what training takes; with --checkpoint nothing is trained")
    processes, stages = expected_processes(), make_task(config.task).stages()
    longest = max(stages, key=lambda stage: stage.shape.length)
    length, samples = longest.shape.length, samples_a_batch(longest, config.training)
    several = len({stage.shape.length for stage in stages}) > 1
    rows = -(-samples // processes)
    if config.micro_batch_tokens is not None:
        rows = min(rows, max(1, config.micro_batch_tokens // length))
    plan = make_plan(stages, config.training, config.seed)
    counts_by_stage = _sequences(plan, stages, config)
    asked = _asked(config, stages)
    model = build_model(config.model, device="meta")
    counts, stored = parameter_counts(model), sum(weight.numel() for weight in model.parameters())
    shards = processes if config.parallel == "fsdp" else 1
    lengths = {stages[number].shape.length for number in counts_by_stage} | {length}
    counted = {size: _counted(config.model, size, config.recompute) for size in lengths}
    flops = _flops(config, stages, counts_by_stage, asked, counted)
    kept = None if (found := counted[length]) is None else found[1]
    return Estimate(
        cell=config.model.cell,
        parameters=counts.trainable,
        embedding=counts.embedding,
        steps=plan.total_steps,
        tokens=sum(n * stages[number].shape.length for number, n in counts_by_stage.items()),
        batch_tokens=samples * length,
        part_tokens=rows * length,
        processes=processes,
        flops=flops,
        state_bytes=_BYTES_A_PARAMETER * stored // shards,
        activation_bytes=None if kept is None else kept * rows,
        logit_bytes=3 * _FLOAT32 * min(LOGITS_AT_ONCE, rows * max(asked) * config.model.vocab_size),
        several_lengths=several,
    )


def _sequences(plan: Plan, stages: Sequence[Stage], config: RunConfig) -> dict[int, int]:
    """How many sequences of each stage are trained on; where that isn't known beforehand, of the longest alone."""
    if plan.steps_by_epoch is None:
        longest = max(range(len(stages)), key=lambda number: stages[number].shape.length)
        return {longest: plan.total_steps * samples_a_batch(stages[longest], config.training)}
    epochs, rest = divmod(plan.total_steps, plan.steps_by_epoch)
    found: Counter[int] = Counter()
    for step in range(plan.steps_by_epoch if epochs else 0):
        number, indices = plan.next(step)
        found[number] += epochs * len(indices)
    for step in range(plan.total_steps - rest, plan.total_steps):
        number, indices = plan.next(step)
        found[number] += len(indices)
    return dict(found)


def _asked(config: RunConfig, stages: Sequence[Stage]) -> list[int]:
    """Labels of a sequence of each stage, those of its first sample; of text all tokens, and its data aren't read."""
    task = make_task(config.task)
    if task.running_text:
        return [stage.shape.length for stage in stages]
    first = np.zeros(1, dtype=np.int64)
    return [int(task.batch(stage.shape, "train", config.seed, first).asked.sum()) for stage in stages]


def _flops(
    config: RunConfig,
    stages: Sequence[Stage],
    sequences: Mapping[int, int],
    asked: Sequence[int],
    counted: Mapping[int, tuple[float, int] | None],
) -> float | None:
    """counted: by length what `_counted` gives, with the head everywhere. The head takes 6 a weight and label."""
    head, total = 6 * config.model.vocab_size * config.model.d_model, 0.0
    for number, n in sequences.items():
        length = stages[number].shape.length
        if (found := counted[length]) is None:
            return None
        total += n * (found[0] - head * (length - asked[number]))
    return total


def _counted(config: ModelConfig, length: int, recompute: bool) -> tuple[float, int] | None:
    """Operations, forwards and backwards, and bytes kept of one sequence; None where a mixer needs values to run."""
    n = config.n_layers
    try:
        if n <= 2 and not recompute:
            return _count(config, length)
        two, three = (_count(config.model_copy(update={"n_layers": few}), length) for few in (2, 3))
    except (NotImplementedError, RuntimeError, TypeError):
        return None
    flops, kept = (b - a for a, b in zip(two, three, strict=True))  # of one block
    others = two[1] - 2 * kept
    if not recompute:
        return two[0] + (n - 2) * flops, others + n * kept
    inputs = _FLOAT32 * length * config.d_model * (2 if config.bft is not None else 1)  # hidden and variance
    return two[0] + (n - 2) * flops + n * flops // 3, others + n * inputs + kept


def _count(config: ModelConfig, length: int) -> tuple[int, int]:
    model = build_model(config, device="meta")
    weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage()._cdata
        if place not in weights:
            kept[place] = tensor  # alive, or another's storage could come to have its place
        return tensor

    tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter, saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens).logits.sum().backward()
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    return counter.get_total_flops(), size


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.0f} MiB"
