"""Evaluation: every cell's samples through the model, one line a sample, resumable after any batch.

Batches are fixed by the configuration (sample i is always in batch i // size), so that a resumed evaluation computes
exactly what an uninterrupted one does.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decaybench.core.scoring import score
from decaybench.harness.config import RunConfig, evaluation_cells
from decaybench.harness.interrupt import Stop
from decaybench.harness.progress import Progress
from decaybench.harness.training import matmul_dtype
from decaybench.models.language_model import LanguageModel
from decaybench.results.record import CellResult, RealTokens, data_hash, distance_bins
from decaybench.results.run_folder import EvaluationFolder, SampleLine
from decaybench.results.statistics import cell_statistics
from decaybench.tasks.base import Batch, Cell, Task
from decaybench.tasks.registry import make_task

_PIECE = 4096  # tokens of a sample that are read at once; longer samples pass through the state


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation found. tokens, seconds: of the part that this process computed."""

    cells: tuple[CellResult, ...]
    data_hash: str
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Question:
    """One sample's right answers, and what is known of it without a model (references: `Task.references`)."""

    id: str
    target: tuple[int, ...]
    distance: tuple[int, ...]
    length: int
    depth: float | None
    references: dict[str, float]


def evaluate(
    model: LanguageModel,
    config: RunConfig,
    folder: EvaluationFolder,
    *,
    train_length: int | None,
    device: str,
    progress: Progress,
) -> Evaluated:
    """Ask the model everything that `config` asks, going on after the samples that `folder` holds already.

    train_length: the model's own, tokens; None: not known.
    """
    task = make_task(config.task)
    cells = evaluation_cells(task, config.evaluation, train_length)
    samples = config.evaluation.samples
    results, hashes, tokens, began = [], [], 0, time.monotonic()
    model.eval()
    with Stop() as stop, progress.bar("evaluation", samples * len(cells), 0) as show:
        for place, cell in enumerate(cells):
            log, digest = folder.samples(cell.name), hashlib.sha256()
            size = max(1, config.batch_tokens // cell.shape.length)
            loaded = log.load(size, samples)
            if loaded.note:
                progress.note(loaded.note)
            lines, asked = list(loaded.lines), list[Question]()
            for first in range(0, samples, size):
                indices = np.arange(first, min(first + size, samples))
                batch = task.batch(cell.shape, "test", config.evaluation.seed, indices)
                update_digest(digest, batch)
                known = questions(task, cell, config.evaluation.seed, batch, indices)
                asked += known
                wrong = _first_wrong(task, known, lines[first:])
                if wrong is not None:
                    what = f"{log.path} line {wrong + 1} is damaged (not the task's own sample)"
                    progress.note(f"{what}; evaluating again from there")
                    log.keep(first)
                    del lines[first:]
                if first >= len(lines):
                    with matmul_dtype(config.training.dtype, device):
                        answers = predict(model, batch, device)
                    done = _lines(task, known, first, answers)
                    log.append(done)
                    lines += done
                    tokens += batch.tokens.size
                    stop.raise_if_wanted(f"evaluation stopped in cell {cell.name}")
                show(place * samples + int(indices[-1]) + 1, cell.name)
            results.append(cell_result(task, cell, lines, train_length, asked))
            hashes.append((cell.name, digest.hexdigest()))
    return Evaluated(tuple(results), data_hash(hashes), tokens, time.monotonic() - began)


@torch.no_grad()
def predict(model: LanguageModel, batch: Batch, device: str, *, piece: int = _PIECE) -> NDArray[np.int64]:
    """The model's first choice wherever the batch asks, int64 [number of labels], row by row.

    Samples longer than `piece` tokens are read piece by piece through the state, in constant memory for a recurrence.
    """
    tokens = torch.from_numpy(batch.tokens).to(device)
    asked = torch.from_numpy(batch.asked).to(device)
    answers = torch.full_like(tokens, -1)
    state = None
    length = tokens.shape[1]
    for first in range(0, length, piece):
        part = slice(first, first + piece)
        output = model(tokens[:, part], state=state, logits_at=asked[:, part], output_state=first + piece < length)
        state = output.state
        answers[:, part][asked[:, part]] = output.logits.argmax(-1)
    return _numpy(answers[asked])


def questions(task: Task, cell: Cell, seed: int, batch: Batch, indices: NDArray[np.int64]) -> list[Question]:  # type: ignore[type-arg]
    """What is known of a batch's samples without a model: ids, right answers, distances, what simple rules answer."""
    ids = task.sample_ids(cell.shape, "test", seed, indices)
    depths = batch.details.get("depth")
    references = task.references(batch)
    return [
        Question(
            id=ids[row],
            target=tuple(batch.labels[row][asked].tolist()),
            distance=tuple(batch.distance[row][asked].tolist()),
            length=len(batch.tokens[row]),
            depth=None if depths is None else float(depths[row]),
            references={name: float(accuracy[row]) for name, accuracy in references.items()},
        )
        for row, asked in enumerate(batch.asked)
    ]


def sample_line(task: Task, index: int, question: Question, answer: tuple[int, ...]) -> SampleLine:  # type: ignore[type-arg]
    """The line that a cell's file of samples has for an answer."""
    correct = sum(a == b for a, b in zip(question.target, answer, strict=True))
    return SampleLine(
        id=question.id,
        index=index,
        target=question.target,
        answer=answer,
        score=float(score(task.metric, np.array([correct]), np.array([len(answer)]))[0]),
        distance=question.distance,
        length=question.length,
        depth=question.depth,
    )


def is_own(task: Task, question: Question, line: SampleLine) -> bool:  # type: ignore[type-arg]
    """Whether all of a line but its answer is what the task says of that sample, and its score that of its answer."""
    fits = len(line.answer) == len(question.target)
    return fits and line == sample_line(task, line.index, question, line.answer)


def cell_result(
    task: Task[Any, Any, Any],
    cell: Cell,
    lines: Sequence[SampleLine],
    train_length: int | None,
    known: Sequence[Question] = (),
) -> CellResult:
    """A cell's result from its samples' lines; known: the samples themselves, for what simple rules answer."""
    hits = [tuple(a == b for a, b in zip(line.target, line.answer, strict=True)) for line in lines]
    correct, asked = tuple(sum(row) for row in hits), tuple(len(row) for row in hits)
    value, error, interval = cell_statistics(task.metric, correct, asked)
    lengths = [line.length for line in lines]
    depths = [line.depth for line in lines if line.depth is not None]
    return CellResult(
        name=cell.name,
        variant=cell.variant,
        eval_length=cell.shape.length,
        ratio=cell.shape.length / train_length if train_length else None,
        coordinates=cell.coordinates,
        n=len(lines),
        real_tokens=RealTokens(min=min(lengths), mean=sum(lengths) / len(lengths), max=max(lengths)),
        realised_depth=sum(depths) / len(depths) if depths else None,
        correct=correct,
        asked=asked,
        value=value,
        standard_error=error,
        interval=interval,
        by_distance=distance_bins([line.distance for line in lines], hits),
        references=_references(known),
    )


def _references(known: Sequence[Question]) -> dict[str, float] | None:
    """The mean over samples, as a cell's value is one; None where the task has none."""
    names = known[0].references if known else {}
    return {name: fsum(question.references[name] for question in known) / len(known) for name in names} or None


def update_digest(digest: hashlib._Hash, batch: Batch) -> None:
    """Add a batch to a cell's content hash: for each sample its tokens, then its labels."""
    both = np.stack([batch.tokens, batch.labels], axis=1).astype("<i8")
    digest.update(both.tobytes())


def _lines(task: Task, known: Iterable[Question], first: int, answers: NDArray[np.int64]) -> list[SampleLine]:  # type: ignore[type-arg]
    lines, start = [], 0
    for index, question in enumerate(known, start=first):
        answer = tuple(answers[start : start + len(question.target)].tolist())
        start += len(question.target)
        lines.append(sample_line(task, index, question, answer))
    return lines


def _first_wrong(task: Task, known: Iterable[Question], lines: Iterable[SampleLine]) -> int | None:  # type: ignore[type-arg]
    """The index of the first line that the task and the line's own answer don't give; None: all are right."""
    for question, line in zip(known, lines, strict=False):
        if not is_own(task, question, line):
            return line.index
    return None


def _numpy(tensor: Tensor) -> NDArray[np.int64]:
    return tensor.cpu().numpy()
