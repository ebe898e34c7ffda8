"""What `bench spectrum` has a model read: samples of its own task, or windows of a text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.core.names import unknown
from decaybench.harness.config import RunConfig, evaluation_cells, parse_length
from decaybench.harness.drawing import evenly
from decaybench.harness.sampling import first_samples
from decaybench.harness.spectrum_report import Read
from decaybench.harness.spectrum_tally import Tally, measure
from decaybench.harness.training import matmul_dtype
from decaybench.models.checkpoints import Checkpoint
from decaybench.models.language_model import LanguageModel
from decaybench.tasks.base import Cell, EvaluationConfig, MissingDataError, Task
from decaybench.tasks.registry import make_task
from decaybench.tasks.text import TextConfig, TextEvaluation

TOKENS = 32_768  # that are read by default
LENGTHS = (16, 8, 4, 2, 1)  # times T: the longest that the task has samples of

_BATCH_TOKENS = 16_384


@dataclass(frozen=True)
class Asked:
    """What to read. tokens: in all, about; 0: nothing. data: folder of token shards; None: the run's own task.
    variant: of the task; length: of a sample, `4x` or tokens; both None for what fits.
    """

    tokens: int = TOKENS
    data: Path | None = None
    variant: str | None = None
    length: str | None = None

    @property
    def named(self) -> bool:
        """Whether anything but the number of tokens is said: then it must be there."""
        return any(part is not None for part in (self.data, self.variant, self.length))


@dataclass(frozen=True)
class Reading:
    """Samples of cells that share a length and a variant, some of each. dtype: of matrix products."""

    task: Task[Any, Any, Any]
    cells: list[Cell]
    samples: int
    seed: int
    dtype: str

    def read(self, model: LanguageModel, tally: Tally) -> Read:
        """Let the model read the samples, and count."""
        with matmul_dtype(self.dtype, model.embedding.weight.device.type):
            for _, batch in first_samples(self.task, self.cells, self.samples, self.seed, _BATCH_TOKENS):
                measure(model, tally, batch.tokens, batch.positions)
        what = f"{self.task.name} {self.cells[0].variant}"
        return Read(what, self.samples, self.cells[0].shape.length, tally.tokens, tally.documents)


def find_reading(
    path: Path, checkpoint: Checkpoint, run: RunConfig | None, length: int, asked: Asked
) -> tuple[Reading | None, str | None]:
    """What to have a model read, or in words why there is nothing. length: T.

    Raises UserError where what is asked for isn't there: a text in other tokens, a variant or a length.
    """
    if asked.tokens == 0:
        return None, "at rest alone, as --tokens 0 says"
    if asked.data is not None:
        return _of_text(path, checkpoint, run, length, asked), None
    if run is None:
        missing = f"{path} is a checkpoint without its run, whose task would be read; --data DIR names a text"
        if asked.named:
            raise UserError(missing)
        return None, f"at rest alone: {missing}"
    evaluation, dtype = run.evaluation, run.training.dtype
    try:
        return _of_task(make_task(run.task), evaluation, evaluation.seed, dtype, length, asked), None
    except UserError as error:  # its files have gone, or hold too little
        if asked.named:
            raise
        return None, f"at rest alone: {error}"


def _of_text(path: Path, checkpoint: Checkpoint, run: RunConfig | None, length: int, asked: Asked) -> Reading:
    known = run.task.plain() if run is not None and isinstance(run.task, TextConfig) else {}
    config = parse(TextConfig, {"data": str(asked.data), "train_length": length, "reset": known.get("reset", True)})
    learned = checkpoint.facts.get("tokenizer_sha256")
    if learned is None and run is not None:
        raise UserError(f"--data {asked.data} is text, and {path} was trained on {run.task.name}: leave it out")
    if learned is not None and learned != config.tokenizer_sha256:
        raise UserError(f"--data {asked.data} is in another tokenizer's tokens than those that {path} was trained on")
    task = make_task(config)
    if task.vocab_size > checkpoint.config.vocab_size:
        raise UserError(
            f"--data {asked.data} has {task.vocab_size} kinds of tokens, {path} {checkpoint.config.vocab_size}"
        )
    dtype = run.training.dtype if run is not None else "float32"
    return _of_task(task, TextEvaluation(), 0, dtype, length, asked)


def _of_task(
    task: Task[Any, Any, Any], evaluation: EvaluationConfig, seed: int, dtype: str, length: int, asked: Asked
) -> Reading:
    """The longest samples that the task has, of its first variant that has them; or those that are asked for."""
    lengths = [parse_length(asked.length, length)] if asked.length else [times * length for times in LENGTHS]
    last: UserError | None = None
    for tokens in lengths:
        for variant in _variants(evaluation, asked):
            try:
                cells = _cells(task, evaluation, tokens, variant)
                samples = max(1, asked.tokens // cells[0].shape.length)
                cells = evenly(cells, samples) if samples > 1 else cells[len(cells) // 2 :][:1]
                each = samples // len(cells)
                task.ready(cells, each)
                for cell in cells:
                    task.check(cell.shape)
                return Reading(task, cells, each * len(cells), seed, dtype)
            except MissingDataError:
                raise
            except UserError as error:
                last = error
    assert last is not None
    raise last


def _variants(evaluation: EvaluationConfig, asked: Asked) -> Iterator[str | None]:
    """The variants to try; None: the task has none, or lists its cells."""
    known = [] if "variants" in evaluation.ignored else list(getattr(evaluation, "variants", None) or ())
    if asked.variant is not None:
        yield asked.variant
    elif known:
        yield from known
    else:
        yield None


def _cells(task: Task[Any, Any, Any], evaluation: EvaluationConfig, tokens: int, variant: str | None) -> list[Cell]:
    """The cells of one length and one variant; of an evaluation that lists them the longest."""
    more: dict[str, Any] = {} if "lengths" in evaluation.ignored else {"lengths": [str(tokens)]}
    if variant is not None and hasattr(evaluation, "variants"):
        more["variants"] = [variant]
    cells = evaluation_cells(task, parse(type(evaluation), evaluation.plain() | more, "evaluation"), None)
    found = list(dict.fromkeys(cell.variant for cell in cells))
    if variant is not None and variant not in found:
        raise unknown("variant", variant, found)
    cells = [cell for cell in cells if cell.variant == (variant or found[0])]
    longest = max(cell.shape.length for cell in cells)
    return [cell for cell in cells if cell.shape.length == longest]
