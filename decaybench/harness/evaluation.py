"""Evaluation: every cell's samples through the model, one line a sample, resumable after any batch.

Batches are fixed by the configuration (sample i is always in batch i // size), so that a resumed evaluation computes
exactly what an uninterrupted one does.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import fsum, isfinite
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from decaybench.core.errors import RunError
from decaybench.core.scoring import score
from decaybench.harness.config import RunConfig, evaluation_cells
from decaybench.harness.distributed import ALONE, World
from decaybench.harness.generation import greedy
from decaybench.harness.interrupt import Stop
from decaybench.harness.progress import Progress
from decaybench.harness.training import matmul_dtype
from decaybench.models.language_model import LanguageModel
from decaybench.results.record import (
    CellResult,
    PositionBin,
    RealTokens,
    bits_per_byte,
    data_hash,
    distance_bins,
    perplexity,
    unwritten,
)
from decaybench.results.run_folder import EvaluationFolder, PositionSums, SampleLine
from decaybench.results.statistics import cell_statistics
from decaybench.tasks.base import IGNORED, Batch, Cell, Split, Task
from decaybench.tasks.registry import make_task

_PIECE = 4096  # tokens of a sample that are read at once; longer samples pass through the state
_DIGITS = 6  # of a log-likelihood in nats, that are kept
_ALIKE = 1.25  # rows that are read together: the longest has at most so many times the columns of the shortest


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation found. tokens, seconds: of the part that this process computed."""

    cells: tuple[CellResult, ...]
    data_hash: str
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Question:
    """One sample's right answers, and what is known of it without a model (references: `Task.references`).

    places: of running text, in the place of target and distance: what there is to foresee, by position.
    wanted: of a prompt, in the place of target: what is to be found in the text that a model writes after it.
    """

    id: str
    target: tuple[int, ...]
    distance: tuple[int, ...]
    length: int
    depth: float | None
    references: dict[str, float]
    places: tuple[Place, ...] | None = None
    wanted: tuple[str, ...] | None = None


class Place(NamedTuple):
    """The positions of a bin (`results.record.position_bin`): tokens asked there, and the bytes that they stand for."""

    high: int
    asked: int
    bytes: int


class Answers(NamedTuple):
    """Of each label of a batch, row by row: first, int64 [n], what the model says there; nats, float64 [n], minus the
    label's log-likelihood, or None where nobody asked for it.
    """

    first: NDArray[np.int64]
    nats: NDArray[np.float64] | None = None


def evaluate(
    model: LanguageModel,
    config: RunConfig,
    folder: EvaluationFolder,
    *,
    train_length: int | None,
    device: str,
    progress: Progress,
    world: World = ALONE,
) -> Evaluated:
    """Ask the model everything that `config` asks, going on after the samples that `folder` holds already.

    train_length: the model's own, tokens; None: not known. world: the processes that share the batches.
    """
    cells = evaluation_cells(make_task(config.task), config.evaluation, train_length)
    return ask(model, config, cells, folder, train_length=train_length, device=device, progress=progress, world=world)


def ask(
    model: LanguageModel,
    config: RunConfig,
    cells: Sequence[Cell],
    folder: EvaluationFolder,
    *,
    split: Split = "test",
    seed: int | None = None,
    train_length: int | None,
    device: str,
    progress: Progress,
    world: World = ALONE,
) -> Evaluated:
    """`evaluate` with these cells; split, seed: whose samples, None: with the evaluation's seed."""
    task = make_task(config.task)
    samples = config.evaluation.samples
    own = (split, config.evaluation.seed if seed is None else seed)
    what = "evaluation" if split == "test" else split
    results, hashes, tokens, began = [], [], 0, time.monotonic()
    model.eval()
    with Stop() as stop, progress.bar(what, samples * len(cells), 0) as show:
        for place, cell in enumerate(cells):
            work = _CellWork(task, cell, config, own, folder, progress, world)
            for starts in work.rounds():
                todo = world.tell(work.prepare(starts) if world.first else [])
                mine = todo[world.rank : world.rank + 1]  # a round has a batch for each process
                with matmul_dtype(config.training.dtype, device):
                    done = [work.answer(model, start, device) for start in mine]
                if todo:
                    work.keep([lines for found in world.gather(done) for lines in found])
                    stop.raise_if_wanted(f"{what} stopped in cell {cell.name}", world.sums(stop.wanted) != [0])
                show(place * samples + min(samples, starts[-1] + work.size), cell.name)
            if world.first:
                results.append(cell_result(task, cell, work.lines, train_length, work.asked))
                hashes.append((cell.name, work.digest.hexdigest()))
                tokens += work.tokens
    seconds = time.monotonic() - began
    return world.tell(Evaluated(tuple(results), data_hash(hashes), tokens, seconds))


class _CellWork:
    """A cell on its way: what is done of it lies in its log. All but `rounds` and `answer` is for the first process.

    size: samples a batch. asked: the samples so far. tokens: those that were computed.
    """

    def __init__(
        self,
        task: Task[Any, Any, Any],
        cell: Cell,
        config: RunConfig,
        own: tuple[Split, int],
        folder: EvaluationFolder,
        progress: Progress,
        world: World,
    ) -> None:
        """own: split and seed of the samples."""
        self.size = max(1, config.batch_tokens // cell.shape.length)
        self.lines: list[SampleLine] = []
        self.asked: list[Question] = []
        self.digest = hashlib.sha256()
        self.tokens = 0
        self._task, self._cell, self._evaluation, self._processes = task, cell, config.evaluation, world.size
        self._split, self._seed = own
        self._log, self._progress = folder.samples(cell.name), progress
        self._batches: dict[int, tuple[Batch, list[Question]]] = {}
        if world.first:
            loaded = self._log.load(self.size, self._evaluation.samples)
            if loaded.note:
                progress.note(loaded.note)
            self.lines = list(loaded.lines)

    def rounds(self) -> Iterator[list[int]]:
        """The first sample of each batch, for as many batches as there are processes."""
        starts = list(range(0, self._evaluation.samples, self.size))
        for first in range(0, len(starts), self._processes):
            yield starts[first : first + self._processes]

    def prepare(self, starts: Sequence[int]) -> list[int]:
        """Look at the samples of a round, and at the lines that there are of them. Returns what is to be computed."""
        self._batches = {}
        for start in starts:
            batch, known = self._made(start)
            update_digest(self.digest, batch)
            # Of running text, samples are many thousand questions, and there are no references to take from them.
            self.asked += [] if self._task.running_text else known
            wrong = _first_wrong(self._task, known, self.lines[start:])
            if wrong is not None:
                what = f"{self._log.path} line {wrong + 1} is damaged (not the task's own sample)"
                self._progress.note(f"{what}; evaluating again from there")
                self._log.keep(start)
                del self.lines[start:]
            if start >= len(self.lines):
                self._batches[start] = batch, known
                self.tokens += batch.tokens.size
        return list(self._batches)

    def answer(self, model: LanguageModel, start: int, device: str) -> list[SampleLine]:
        """The model's lines of a batch."""
        batch, known = self._batches.get(start) or self._made(start)
        if self._task.generates:
            return _written(self._task, model, batch, known, start, device)
        answers = predict(model, batch, device, likelihood=self._task.likelihood)
        return _lines(self._task, self._cell, batch, known, start, answers)

    def keep(self, done: Sequence[list[SampleLine]]) -> None:
        """Write down the lines of batches, in their order."""
        for lines in done:
            self._log.append(lines)
            self.lines += lines

    def _made(self, start: int) -> tuple[Batch, list[Question]]:
        indices = np.arange(start, min(start + self.size, self._evaluation.samples))
        batch = self._task.batch(self._cell.shape, self._split, self._seed, indices)
        return batch, questions(self._task, self._cell, self._seed, batch, indices, self._split)


def predict(
    model: LanguageModel, batch: Batch, device: str, *, likelihood: bool = False, piece: int = _PIECE
) -> Answers:
    """What the model says wherever the batch asks; likelihood: also how likely it held the labels.

    Samples longer than `piece` tokens are read piece by piece through the state, in constant memory for a recurrence.
    Padding behind the samples is mostly left out: rows of about the same length are read together.
    """
    asked = batch.asked
    first = np.full(asked.shape, -1)
    nats = np.zeros(asked.shape) if likelihood else None
    for rows, columns in _alike(batch):
        part = _part(batch, rows, columns)
        answers = _read(model, part, device, likelihood, piece)
        where = np.zeros_like(asked)
        where[rows, :columns] = part.asked
        first[where] = answers.first
        if nats is not None and answers.nats is not None:
            nats[where] = answers.nats
    return Answers(first[asked], None if nats is None else nats[asked])


def _alike(batch: Batch) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Rows of about the same length, in the batch's order, and the columns up to the last token of any of them."""
    rows, length = batch.tokens.shape
    if batch.positions is None:
        yield np.arange(rows), length
        return
    ends = length - (batch.positions[:, ::-1] != 0).argmax(1)
    order = np.argsort(ends, kind="stable")
    start = 0
    while start < rows:
        stop = int(np.searchsorted(ends[order], _ALIKE * ends[order[start]], side="right"))
        yield np.sort(order[start:stop]), int(ends[order[stop - 1]])
        start = stop


def _part(batch: Batch, rows: NDArray[np.int64], columns: int) -> Batch:
    cut = {name: getattr(batch, name)[rows, :columns] for name in ("tokens", "labels", "distance")}
    return Batch(**cut, positions=None if batch.positions is None else batch.positions[rows, :columns])


@torch.no_grad()
def _read(model: LanguageModel, batch: Batch, device: str, likelihood: bool, piece: int) -> Answers:
    tokens, labels = (torch.from_numpy(part).to(device) for part in (batch.tokens, batch.labels))
    positions = None if batch.positions is None else torch.from_numpy(batch.positions).to(device)
    asked = labels != IGNORED
    first = torch.full_like(tokens, -1)
    nats = torch.zeros(tokens.shape, dtype=torch.float64, device=device) if likelihood else None
    state = None
    length = tokens.shape[1]
    for start in range(0, length, piece):
        part = slice(start, start + piece)
        here = asked[:, part]
        where = None if positions is None else positions[:, part]
        more = start + piece < length
        if nats is None:
            output = model(tokens[:, part], where, state, logits_at=here, output_state=more)
            first[:, part][here], state = output.logits.argmax(-1), output.state
        else:
            scores = model.score(tokens[:, part], labels[:, part], where, state, output_state=more)
            first[:, part][here], state = scores.first, scores.state
            nats[:, part][here] = scores.nats.double()
    return Answers(first[asked].cpu().numpy(), None if nats is None else nats[asked].cpu().numpy())


def questions(
    task: Task[Any, Any, Any],
    cell: Cell,
    seed: int,
    batch: Batch,
    indices: NDArray[np.int64],
    split: Split = "test",
) -> list[Question]:
    """What is known of a batch's samples without a model: ids, right answers, distances, what simple rules answer."""
    ids = task.sample_ids(cell.shape, split, seed, indices)
    depths = batch.details.get("depth")
    references = task.references(batch)
    lengths = batch.lengths.tolist()
    found = []
    for row, asked in enumerate(batch.asked):
        told = batch.labels[row][asked], batch.distance[row][asked]
        common = {
            "id": ids[row],
            "length": lengths[row] + task.new_tokens,
            "depth": None if depths is None else float(depths[row]),
            "references": {name: float(accuracy[row]) for name, accuracy in references.items()},
        }
        if task.running_text:
            places = tuple(_Bins.of(task, batch, row).places())
            found.append(Question(target=(), distance=(), places=places, **common))
        elif batch.wanted is not None:
            wanted = batch.wanted[row]
            found.append(Question(target=(), distance=wanted.distance, wanted=wanted.answers, **common))
        else:
            found.append(Question(target=tuple(told[0].tolist()), distance=_distances(told[1]), **common))
    return found


def sample_line(
    task: Task[Any, Any, Any],
    index: int,
    question: Question,
    answer: tuple[int, ...],
    log_likelihood: float | None = None,
    by_position: tuple[PositionSums, ...] | None = None,
    text: str | None = None,
) -> SampleLine:
    """The line that a cell's file of samples has for an answer; log_likelihood: of the right ones, nats.

    by_position: of running text, in the place of an answer. text: what the model wrote after a prompt, of tokens
    `answer`.
    """
    if by_position is not None:
        correct, asked = sum(part.correct for part in by_position), sum(part.asked for part in by_position)
    elif text is not None and question.wanted is not None:
        found = task.found(text, question.wanted)
        correct, asked = sum(found), len(found)
    else:
        correct, asked = sum(a == b for a, b in zip(question.target, answer, strict=True)), len(answer)
    return SampleLine(
        id=question.id,
        index=index,
        target=question.target,
        answer=answer,
        score=float(score(task.metric, np.array([correct]), np.array([asked]))[0]),
        distance=question.distance,
        length=question.length,
        depth=question.depth,
        log_likelihood=log_likelihood,
        by_position=by_position,
        wanted=question.wanted,
        text=text,
    )


def right_line(task: Task[Any, Any, Any], index: int, question: Question) -> SampleLine:
    """The line of an answer that is right in all, and certain."""
    sums = None
    if question.places is not None:
        sums = tuple(PositionSums(**place._asdict(), correct=place.asked, nats=0.0) for place in question.places)
    text = None if question.wanted is None else " ".join(question.wanted)
    return sample_line(task, index, question, question.target, 0.0 if task.likelihood else None, sums, text)


def is_own(task: Task[Any, Any, Any], question: Question, line: SampleLine) -> bool:
    """Whether all of a line but its answer is what the task says of that sample, and its score that of its answer."""
    sums = line.by_position
    if (line.log_likelihood is not None, sums is not None) != (task.likelihood, task.running_text):
        return False
    if (line.text is not None) != task.generates:
        return False
    if line.text is not None:
        if len(line.answer) > task.new_tokens or line.text != task.text_of(line.answer):
            return False
    elif len(line.answer) != len(question.target):
        return False
    if sums is not None:
        if tuple(Place(part.high, part.asked, part.bytes) for part in sums) != question.places:
            return False
        if any(part.correct > part.asked for part in sums) or line.log_likelihood != _total(sums):
            return False
    return line == sample_line(task, line.index, question, line.answer, line.log_likelihood, sums, line.text)


def cell_result(
    task: Task[Any, Any, Any],
    cell: Cell,
    lines: Sequence[SampleLine],
    train_length: int | None,
    known: Sequence[Question] = (),
) -> CellResult:
    """A cell's result from its samples' lines; known: the samples themselves, for what simple rules answer."""
    hits = [_hits(task, line) for line in lines]
    correct, asked = tuple(sum(row) for row in hits), tuple(len(row) for row in hits)
    if task.running_text:
        correct, asked = (
            tuple(sum(getattr(part, name) for part in line.by_position or ()) for line in lines)
            for name in ("correct", "asked")
        )
    value, error, interval = cell_statistics(task.metric, correct, asked)
    lengths = [line.length for line in lines]
    depths = [line.depth for line in lines if line.depth is not None]
    distances = [line.distance for line in lines]
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
        by_distance=distance_bins(distances, hits),
        unwritten=unwritten(distances, hits),
        references=_references(known),
        **_likelihoods(task, lines),
    )


def _hits(task: Task[Any, Any, Any], line: SampleLine) -> tuple[bool, ...]:
    """Which of a sample's questions were answered."""
    if line.text is not None and line.wanted is not None:
        return task.found(line.text, line.wanted)
    return tuple(a == b for a, b in zip(line.target, line.answer, strict=True))


def _likelihoods(task: Task[Any, Any, Any], lines: Sequence[SampleLine]) -> dict[str, Any]:
    """What a cell says of likelihoods, by field; nothing where its task asks for none."""
    if not task.likelihood:
        return {}
    likely = tuple(line.log_likelihood for line in lines if line.log_likelihood is not None)
    if not task.running_text:
        return {"log_likelihood": likely, "perplexity": perplexity(likely)}
    size = tuple(sum(part.bytes for part in line.by_position or ()) for line in lines)
    if not any(size):
        raise RunError("there is no text in the windows of the validation documents, only tokens that stand for none")
    bits, error = bits_per_byte(likely, size)
    bins: dict[int, list[PositionSums]] = {}
    for line in lines:
        for part in line.by_position or ():
            bins.setdefault(part.high, []).append(part)
    by_position = tuple(
        PositionBin(
            low=high // 2 + 1,
            high=high,
            samples=len(parts),
            **{name: sum(getattr(part, name) for part in parts) for name in ("asked", "correct", "bytes")},
            nats=round(fsum(part.nats for part in parts), _DIGITS),
        )
        for high, parts in sorted(bins.items())
    )
    return {
        "log_likelihood": likely,
        "bytes": size,
        "bits_per_byte": bits,
        "bits_per_byte_error": error,
        "by_position": by_position,
    }


class _Bins(NamedTuple):
    """The labels of a row of running text by position: the bins' highs, each label's bin, and each label's bytes."""

    highs: NDArray[np.int64]
    number: NDArray[np.int64]
    bytes: NDArray[np.int64]

    @staticmethod
    def of(task: Task[Any, Any, Any], batch: Batch, row: int) -> _Bins:
        asked = batch.asked[row]
        positions = np.arange(1, len(asked) + 1) if batch.positions is None else batch.positions[row]
        # The bits of p - 1, as the exponent of the float that it is.
        highs, number = np.unique(1 << np.frexp(positions[asked] - 1)[1].astype(np.int64), return_inverse=True)
        return _Bins(highs, number, task.byte_lengths()[batch.labels[row][asked]])

    def places(self) -> Iterator[Place]:
        asked, size = np.bincount(self.number), np.bincount(self.number, self.bytes).astype(np.int64)
        return map(Place, self.highs.tolist(), asked.tolist(), size.tolist())

    def sums(self, hits: NDArray[np.bool_], nats: NDArray[np.float64]) -> tuple[PositionSums, ...]:
        correct, lost = np.bincount(self.number, hits).astype(np.int64).tolist(), np.bincount(self.number, nats)
        found = zip(self.places(), correct, lost.tolist(), strict=True)
        return tuple(
            PositionSums(**place._asdict(), correct=right, nats=max(0.0, round(sum_, _DIGITS)))
            for place, right, sum_ in found
        )


def _total(sums: Iterable[PositionSums]) -> float:
    """The log-likelihood of a sample of running text, nats."""
    return min(0.0, -round(fsum(part.nats for part in sums), _DIGITS))


def _distances(found: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(found.tolist()) if found.all() else ()


def _references(known: Sequence[Question]) -> dict[str, float] | None:
    """The mean over samples, as a cell's value is one; None where the task has none."""
    names = known[0].references if known else {}
    return {name: fsum(question.references[name] for question in known) / len(known) for name in names} or None


def update_digest(digest: hashlib._Hash, batch: Batch) -> None:
    """Add a batch to a cell's content hash (`results.record.data_hash`)."""
    if batch.positions is None:
        digest.update(np.stack([batch.tokens, batch.labels], axis=1).astype("<i8").tobytes())
        return
    for parts in zip(batch.tokens, batch.labels, batch.positions, strict=True):
        real = parts[2] != 0
        digest.update(np.stack([part[real] for part in parts]).astype("<i8").tobytes())


def _lines(
    task: Task[Any, Any, Any],
    cell: Cell,
    batch: Batch,
    known: Sequence[Question],
    first: int,
    answers: Answers,
) -> list[SampleLine]:
    lines, start = [], 0
    for row, question in enumerate(known):
        index, labels = first + row, batch.labels[row][batch.asked[row]]
        here = slice(start, start := start + len(labels))
        nats = None if answers.nats is None else answers.nats[here]
        if nats is None:
            lines.append(sample_line(task, index, question, tuple(answers.first[here].tolist())))
            continue
        total = float(nats.sum())
        if not isfinite(total):
            raise RunError(
                f"the model's log-likelihood of sample {index} in cell {cell.name} is {-total}, not a number"
            )
        if task.running_text:
            sums = _Bins.of(task, batch, row).sums(answers.first[here] == labels, nats)
            lines.append(sample_line(task, index, question, (), _total(sums), sums))
        else:
            likely = min(0.0, round(-total, _DIGITS))
            lines.append(sample_line(task, index, question, tuple(answers.first[here].tolist()), likely))
    return lines


def _written(
    task: Task[Any, Any, Any],
    model: LanguageModel,
    batch: Batch,
    known: Sequence[Question],
    first: int,
    device: str,
) -> list[SampleLine]:
    """The lines of what a model writes after a batch of prompts: until all that is wanted stands there, or it ends."""
    real = np.ones_like(batch.tokens) if batch.positions is None else batch.positions
    prompts = [tokens[here != 0] for tokens, here in zip(batch.tokens, real, strict=True)]

    def finished(row: int, ids: list[int]) -> bool:
        return all(task.found(task.text_of(ids), known[row].wanted or ()))

    written = greedy(model, prompts, task.new_tokens, device=device, stop_ids=task.stop_ids(), finished=finished)
    return [
        sample_line(task, first + row, question, tuple(ids), text=task.text_of(ids))
        for row, (question, ids) in enumerate(zip(known, written, strict=True))
    ]


def _first_wrong(task: Task, known: Iterable[Question], lines: Iterable[SampleLine]) -> int | None:  # type: ignore[type-arg]
    """The index of the first line that the task and the line's own answer don't give; None: all are right."""
    for question, line in zip(known, lines, strict=False):
        if not is_own(task, question, line):
            return line.index
    return None
