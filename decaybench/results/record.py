"""The record: one JSON object that holds all that is claimed of a run, and the counts to check it by.

A record names itself: `record_id` is the sha256 of the canonical JSON of everything else in it. What is not known is
absent; only `comparable_to` is written as null, because "comparable to nothing" is a statement.
`python -m decaybench.results.record` prints the JSON schema that is committed beside this file.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    StrictFloat,
    StrictInt,
    field_validator,
    model_serializer,
    model_validator,
)

from decaybench.core.config import Config, parse
from decaybench.core.errors import UserError
from decaybench.core.files import read_json, readable_json
from decaybench.core.hashing import canonical_json, digest
from decaybench.core.scoring import Metric
from decaybench.results.statistics import Interval, cell_statistics, octave, wilson

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA_VERSION = 1
ENOUGH = 200  # tokens in a bin of positions; figures leave out the mean of fewer


def _json_able(content: dict[str, Any]) -> dict[str, Any]:
    canonical_json(content).encode()
    return content


JsonObject = Annotated[dict[str, Any], AfterValidator(_json_able)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0)]
LogLikelihood = Annotated[float, Field(le=0)]
Coordinates = dict[str, StrictInt | StrictFloat]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Part(Config):
    """A part of a record: an optional field that is None is left out."""

    @model_serializer(mode="wrap")
    def _leave_out_absent(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {key: value for key, value in dump(self).items() if value is not None or fields[key].is_required()}


class TaskInfo(Part):
    """What was asked."""

    name: str = Field(description="the task's name")
    version: int = Field(ge=1, description="the task's version: it goes up when any sample changes")
    config: JsonObject = Field(description="the task's rules: every option that changes samples")
    evaluation: JsonObject = Field(description="the resolved evaluation configuration")
    metric: Metric = Field(description="how a sample's counts become its score")
    data_hash: Sha256 = Field(description="sha256 over the evaluation samples of all cells, see `data_hash`")


class ParameterCounts(Part):
    """How large the model is, parameters."""

    trainable: Count = Field(description="all trainable parameters; tied weights count once, frozen ones not at all")
    embedding: Count = Field(description="of these, in embeddings and an untied head")
    not_decayed: Count = Field(description="of these, without weight decay in training")


class ModelInfo(Part):
    """What was measured."""

    cell: str = Field(description="architecture and add-ons as tables spell it: mamba2+post")
    architecture: str = Field(description="the registered name of the architecture")
    addons: tuple[str, ...] = Field(description="the add-ons in use")
    config: JsonObject = Field(description="the resolved model configuration, each add-on with every option")
    parameters: ParameterCounts = Field(description="parameter counts")
    state_elements: tuple[Count, ...] = Field(
        description="numbers in each layer's state after task.config.train_length tokens, counted"
    )
    backend: str = Field(description="the kernels that ran: torch, fla, mamba_ssm")


class StageInfo(Part):
    """One stage of the curriculum."""

    shape: JsonObject = Field(description="what the stage's samples look like")
    batches: Count = Field(description="batches trained on; 0: the stage was never reached")
    step: Count | None = Field(default=None, description="training step at which it was mastered; absent: never")


class TrainingInfo(Part):
    """How the model was trained, where decaybench trained it."""

    config: JsonObject = Field(description="the resolved training configuration")
    training_hash: str = Field(description="hash of all that the trained weights are a function of")
    seed: Count = Field(description="seed of initial weights and training data")
    train_length: int = Field(ge=1, description="the task's training length, of which ratios are multiples, tokens")
    longest_trained: int = Field(ge=1, description="longest sequence really trained on, tokens")
    steps: Count = Field(description="optimiser steps")
    tokens: Count = Field(description="tokens trained on")
    optimizer: str = Field(description="the optimiser's name")
    learning_rate: float = Field(ge=0, description="highest learning rate of the schedule")
    final_loss: float = Field(description="training loss at the end, nats per label")
    final_accuracy: float | None = Field(
        default=None, ge=0, le=1, description="training accuracy at the end, on the labels trained on, 0..1"
    )
    stages: tuple[StageInfo, ...] = Field(default=(), description="the curriculum's stages in order; none: empty")


class CheckpointInfo(Part):
    """Where the model came from, where it was given."""

    source: str = Field(description="the name that the user gave: its last two path parts")
    sha256: Sha256 = Field(description="sha256 of the weights' file")
    train_length: int | None = Field(
        default=None, ge=1, description="the training length that the checkpoint states, tokens; absent: it states none"
    )
    longest_trained: int | None = Field(
        default=None, ge=1, description="longest sequence trained on, as it states, tokens; absent: it states none"
    )
    label_noise: float | None = Field(
        default=None, ge=0, lt=1, description="share of training labels replaced, as it states; absent: it states none"
    )
    state_passing: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="share of training sequences that started from another's final state, as it states; absent: it "
        "states none",
    )

    @field_validator("source")
    @classmethod
    def _no_private_path(cls, source: str) -> str:
        return "/".join([part for part in re.split(r"[/\\]", source) if part][-2:])


class RealTokens(Part):
    """How long the samples of a cell really are, tokens."""

    min: Count = Field(description="the shortest sample, tokens")
    mean: float = Field(ge=0, description="mean over samples, tokens")
    max: Count = Field(description="the longest sample, tokens")


class DistanceBin(Part):
    """Questions whose answer was written between `low` and `high` tokens before they were asked.

    The questions of one sample aren't independent, so an interval for a bin (`share_interval`) counts samples.
    """

    low: int = Field(ge=1, description="shortest distance, tokens; a power of two")
    high: int = Field(ge=2, description="first distance beyond the bin, tokens: twice `low`")
    samples: int = Field(ge=1, description="samples with a question in the bin")
    asked: int = Field(ge=1, description="questions asked")
    correct: Count = Field(description="questions answered correctly")

    def share_interval(self) -> Interval:
        """95 % interval of correct / asked: Wilson's with a sample as one coin toss, however many questions it has.

        That is the interval for questions that share their sample's fate; it is too wide where they don't, and
        Wilson's over questions would be too narrow wherever they do.
        """
        return wilson(self.correct / self.asked, self.samples)


class Unwritten(Part):
    """Questions whose answer was nowhere written before they were asked, where others' were."""

    samples: int = Field(ge=1, description="samples with such questions, which have no others")
    asked: int = Field(ge=1, description="questions asked")
    correct: Count = Field(description="questions answered correctly")


class PositionBin(Part):
    """Of running text, what follows its tokens at positions `low` to `high` of a document, these two included."""

    low: int = Field(ge=1, description="first position, tokens: one more than half of `high`")
    high: int = Field(ge=1, description="last position, tokens; a power of two")
    samples: int = Field(ge=1, description="samples with a token in the bin")
    asked: int = Field(ge=1, description="tokens that had to be foreseen")
    correct: Count = Field(description="of these, the first choice")
    bytes: Count = Field(description="bytes of text that these stand for; a separator has none")
    nats: float = Field(ge=0, description="minus their log-likelihood, nats")

    @property
    def perplexity(self) -> float | None:
        """Of a token; None where that is too large for a number."""
        return perplexity([-self.nats / self.asked])

    @property
    def bits_per_byte(self) -> float | None:
        """None where there is no text in the bin."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None


class CellResult(Part):
    """One cell of the evaluation, with the counts that its value is computed from."""

    name: str = Field(description="the cell's name, also of its file of samples")
    variant: str = Field(description="the task's variant that the cell belongs to")
    eval_length: int = Field(ge=1, description="evaluation length, tokens")
    ratio: float | None = Field(default=None, gt=0, description="eval_length / train_length; absent: not known")
    coordinates: Coordinates = Field(
        default_factory=dict,
        description="where the cell lies besides variant and length, by name: depth (0 = start, 1 = end), kv, ...",
    )
    n: int = Field(ge=1, description="samples")
    real_tokens: RealTokens = Field(description="true sample lengths, tokens")
    realised_depth: float | None = Field(default=None, ge=0, le=1, description="mean depth found in the samples, 0..1")
    correct: tuple[Count, ...] = Field(description="questions answered correctly, a number a sample, by index")
    asked: tuple[Count, ...] = Field(description="questions asked, a number a sample, by index")
    value: float = Field(ge=0, le=1, description="mean over samples of the metric, 0..1")
    standard_error: float = Field(ge=0, description="standard error of the value")
    interval: Interval = Field(description="95 % interval of the value, see `statistics.cell_statistics`")
    by_distance: tuple[DistanceBin, ...] = Field(
        default=(), description="answers by distance, in octaves, nearest first; empty: the task has no distances"
    )
    unwritten: Unwritten | None = Field(
        default=None, description="what by_distance leaves out: no distance; absent: nothing, or all of the task's"
    )
    references: dict[str, Share] | None = Field(
        default=None,
        description="accuracies of rules without a model on the same samples, averaged as the value is, by name: bayes "
        "(the best that is possible), majority, last; absent: the task has none",
    )
    log_likelihood: tuple[LogLikelihood, ...] | None = Field(
        default=None,
        description="log-likelihood of a sample's right answers together, nats, 6 digits, a number a sample, by index; "
        "absent: the task asks for none",
    )
    perplexity: float | None = Field(
        default=None,
        gt=0,
        description="exp(-mean of log_likelihood): of a whole answer, as LAMBADA's is; absent: there is none (as of "
        "running text), or it is too large for a number",
    )
    bytes: tuple[Count, ...] | None = Field(
        default=None,
        description="bytes of text that a sample's right answers stand for, by index; absent: not running text",
    )
    bits_per_byte: float | None = Field(
        default=None,
        ge=0,
        description="bits that all right answers take, separators' too, by the bytes of text that they stand for; "
        "absent: not running text",
    )
    bits_per_byte_error: float | None = Field(
        default=None,
        ge=0,
        description="standard error of bits_per_byte, samples as units, as of a ratio of means; absent: not running "
        "text, or a single sample",
    )
    by_position: tuple[PositionBin, ...] | None = Field(
        default=None, description="the same by position, first ones first; absent: not running text"
    )

    @model_validator(mode="after")
    def _possible_counts(self) -> CellResult:
        if not self.n == len(self.correct) == len(self.asked):
            raise ValueError(f"n is {self.n}, but correct has {len(self.correct)} counts and asked {len(self.asked)}")
        if any(not correct <= asked or asked < 1 for correct, asked in zip(self.correct, self.asked, strict=True)):
            raise ValueError("each sample needs asked >= 1 and 0 <= correct <= asked")
        for name in ("log_likelihood", "bytes"):
            if (found := getattr(self, name)) is not None and len(found) != self.n:
                raise ValueError(f"n is {self.n}, but {name} has {len(found)} numbers")
        running = (self.bytes, self.bits_per_byte, self.by_position)
        if any(part is not None for part in (*running, self.bits_per_byte_error)):
            if None in (*running, self.log_likelihood):
                raise ValueError("running text has log_likelihood, bytes, bits_per_byte and by_position, or none")
            if (self.bits_per_byte_error is None) != (self.n == 1):
                raise ValueError("running text has bits_per_byte_error, unless it is a single sample")
        return self


class SpectrumAt(Part):
    """A layer's timescales (tau = -1 / log_decay) at one position."""

    position: int = Field(ge=1, description="position in the document, tokens")
    slowest: float = Field(ge=0, description="largest timescale, tokens")
    median: float = Field(ge=0, description="median timescale, tokens")
    fastest: float = Field(ge=0, description="smallest timescale, tokens")
    smallest_log_gap: float | None = Field(
        default=None, description="smallest gap between neighbouring log timescales, nats; absent: one timescale"
    )
    median_log_gap: float | None = Field(
        default=None, description="median gap between neighbouring log timescales, nats; absent: one timescale"
    )


class LayerSpectrum(Part):
    """The timescales of one layer, before and after training."""

    layer: Count = Field(description="index of the layer")
    at_start: tuple[SpectrumAt, ...] | None = Field(
        default=None, description="at initialisation, by position; absent: not known"
    )
    after: tuple[SpectrumAt, ...] = Field(description="of the measured weights, by position")


class SpectrumInfo(Part):
    """The decay spectrum; a layer without decay has no entry."""

    layers: tuple[LayerSpectrum, ...] = Field(description="by layer")


class ValidationCell(Part):
    """A size that a selection's validation set asks at."""

    name: str = Field(description="the cell's name, also of its file of samples")
    shape: JsonObject = Field(description="what its samples look like: those of a training stage")
    n: int = Field(ge=1, description="samples")


class ValidationInfo(Part):
    """The samples that a learning rate and a step were chosen on. They are neither the test's nor trained on."""

    seed: Count = Field(description="seed of the task's split `validation`; neither the run's nor the evaluation's")
    cells: tuple[ValidationCell, ...] = Field(min_length=1, description="each size of the training's stages once")
    data_hash: Sha256 = Field(description="sha256 over the samples of all cells, see `data_hash`")


class SelectionPoint(Part):
    """One candidate: the weights of a run at one step."""

    step: int = Field(ge=1, description="optimiser steps until then")
    validation: tuple[Share, ...] = Field(description="value of each validation cell, in their order")
    validation_mean: Share = Field(description="mean over validation cells, by which is chosen")
    test: tuple[Share, ...] = Field(description="value of each of the record's cells, in their order")
    test_mean: Share = Field(description="mean over the record's cells")


class SelectionRun(Part):
    """One learning rate of the grid."""

    learning_rate: float = Field(gt=0, description="highest learning rate of the schedule")
    training_hash: str = Field(description="hash of all that its weights are a function of")
    diverged: int | None = Field(
        default=None, ge=1, description="step at which training diverged, after which there are no points; absent: none"
    )
    points: tuple[SelectionPoint, ...] = Field(description="its candidates, first ones first")


class Choice(Part):
    """A learning rate and a step of a selection's grid, and what is reached there."""

    learning_rate: float = Field(gt=0, description="highest learning rate of the schedule")
    step: int = Field(ge=1, description="optimiser steps")
    value: Share = Field(description="what is largest there, 0..1")


class SelectedOnTest(Part):
    """Chosen on the test: what papers report that look at the test for their learning rate and epoch.

    It is too high as a claim about new samples, and is here only to be comparable with theirs.
    """

    by_cell: tuple[Choice, ...] = Field(description="for each of the record's cells the best point of all, in order")
    by_mean: Choice = Field(description="the point with the largest mean over the record's cells")


class SelectionInfo(Part):
    """How the learning rate and the step of a record's training were chosen, and all that was tried.

    Chosen is the largest validation_mean; of equal ones that with fewer steps, then the smaller learning rate.
    Candidates are every `every` steps and the last one, of each learning rate of the grid, with the record's seed.
    """

    every: int = Field(ge=1, description="steps between candidates")
    steps_by_epoch: int | None = Field(default=None, ge=1, description="steps an epoch; absent: a plan without epochs")
    total_steps: int = Field(ge=1, description="steps of a whole training")
    validation: ValidationInfo = Field(description="what was chosen on")
    runs: tuple[SelectionRun, ...] = Field(min_length=1, description="the grid, smallest learning rate first")
    chosen: Choice = Field(description="the record's training: learning rate, step and validation_mean")
    chosen_on_test: SelectedOnTest = Field(description="what a choice on the test itself would have reported")

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The grid, smallest first."""
        return tuple(run.learning_rate for run in self.runs)

    @property
    def each_epoch(self) -> bool:
        """Whether the end of each epoch was a candidate, and nothing else."""
        return self.every == self.steps_by_epoch


class Environment(Part):
    """Where it ran."""

    decaybench: str = Field(description="version of decaybench")
    python: str = Field(description="version of Python")
    packages: dict[str, str] = Field(description="versions of the packages that compute: torch, numpy, ...")
    platform: str = Field(description="operating system and processor")
    device: str = Field(description="the device's name")
    dtype: str = Field(description="dtype of the evaluation's matrix products")
    threads: int = Field(ge=1, description="CPU threads")
    git_revision: str | None = Field(default=None, description="revision of the source; absent: not a checkout")
    git_dirty: bool | None = Field(default=None, description="whether the source had changes; absent: not a checkout")
    batch_tokens: int = Field(ge=1, description="largest evaluation batch, tokens")
    processes: int | None = Field(default=None, ge=2, description="processes that shared the work; absent: one")


class Cost(Part):
    """What it took."""

    train_seconds: Seconds | None = Field(default=None, description="wall time of training, s")
    selection_seconds: Seconds | None = Field(
        default=None, description="wall time of training all runs that it was chosen from, s; absent: none was chosen"
    )
    evaluation_seconds: Seconds = Field(
        description="wall time of evaluation in the process that finished it, s; not of those that were stopped before"
    )
    train_tokens_per_second: float | None = Field(default=None, ge=0, description="training speed, tokens/s")
    evaluation_tokens_per_second: float | None = Field(
        default=None, ge=0, description="evaluation speed of that process, tokens/s; absent: it computed no sample"
    )
    peak_memory_bytes: Count = Field(description="peak memory of the device, or of the process on a CPU, bytes")


class Record(Part):
    """All that is claimed of one run. `to_json()` is its file; notebooks and rich show it as a table."""

    schema_version: Literal[1] = Field(description="version of this schema")
    record_id: Sha256 = Field(description="sha256 of the canonical JSON of all other fields")
    harness_version: int = Field(ge=1, description="version of the rules by which runs are trained and evaluated")
    task: TaskInfo = Field(description="what was asked")
    model: ModelInfo = Field(description="what was measured")
    training: TrainingInfo | None = Field(default=None, description="how it was trained; absent: a given checkpoint")
    checkpoint: CheckpointInfo | None = Field(default=None, description="which checkpoint; absent: trained here")
    seed: Count = Field(description="the run's seed")
    cells: tuple[CellResult, ...] = Field(min_length=1, description="the evaluation's cells")
    selection: SelectionInfo | None = Field(
        default=None, description="how its learning rate and step were chosen; absent: they were given"
    )
    spectrum: SpectrumInfo | None = Field(default=None, description="decay spectrum; absent: not measured")
    environment: Environment = Field(description="where it ran")
    cost: Cost = Field(description="what it took")
    comparable_to: str | None = Field(description="the named protocol that it matches exactly, or null")

    @model_validator(mode="after")
    def _one_origin_and_distinct_cells(self) -> Record:
        if (self.training is None) == (self.checkpoint is None):
            raise ValueError("a record holds exactly one of training and checkpoint")
        names = [cell.name for cell in self.cells]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ValueError(f"two cells have the name {min(repeated)!r}")
        return self

    @property
    def train_length(self) -> int | None:
        """The training length that ratios are multiples of, tokens; None for a checkpoint that doesn't state it."""
        return self._origin.train_length

    @property
    def longest_trained(self) -> int | None:
        """The longest sequence really trained on, tokens; None for a checkpoint that doesn't state it."""
        return self._origin.longest_trained

    @property
    def _origin(self) -> TrainingInfo | CheckpointInfo:
        origin = self.training or self.checkpoint
        assert origin is not None
        return origin

    def to_json(self) -> str:
        """The record's file: indented JSON with each list of counts on one line."""
        return readable_json(self.plain()) + "\n"

    def __rich__(self) -> RenderableType:
        from decaybench.results.tables import record_table

        return record_table(self)

    def _repr_html_(self) -> str:
        from decaybench.results.tables import record_html

        return record_html(self)


class Group(NamedTuple):
    """The cells of one variant, length and coordinates but depth, put together: the mean over depths.

    coordinates: the others. references: as a cell's, the mean over samples; empty where there are none. perplexity,
    bits_per_byte (and its standard error, None of a single sample): of all samples; None where cells have none.
    """

    variant: str
    eval_length: int
    ratio: float | None
    coordinates: Coordinates
    value: float
    interval: Interval
    n: int
    references: dict[str, float]
    perplexity: float | None = None
    bits_per_byte: tuple[float, float | None] | None = None


def seal(content: Mapping[str, Any]) -> Record:
    """The record with this content, its schema version and id filled in. Raises UserError on what is not a record."""
    blank = {**content, "schema_version": SCHEMA_VERSION, "record_id": "0" * 64}
    record = parse(Record, blank)
    return record.model_copy(update={"record_id": record_hash(record.plain())})


def record_hash(content: Mapping[str, Any]) -> str:
    """The id of a record with this plain content; its own `record_id`, if any, doesn't count."""
    return digest({key: content[key] for key in content if key != "record_id"})


def read_record(path: Path) -> Record:
    """The record in a file. Raises UserError with one line: missing, damaged, not a record, or changed since."""
    return parse_record(read_json(path), str(path))


def parse_record(content: Any, where: str) -> Record:
    """JSON content as a record whose id is right. Raises UserError; `where` says in it what was read."""
    if not isinstance(content, dict):
        raise UserError(f"{where} must hold a JSON object, not {type(content).__name__}")
    version = content.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise UserError(f"{where} has schema_version {version}; this decaybench reads {SCHEMA_VERSION}: update it")
    try:
        record = parse(Record, content)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    expected = record_hash(record.plain())
    if record.record_id != expected:
        raise UserError(
            f"{where}: record_id is {record.record_id[:12]}, but its content has {expected[:12]}: it was changed"
        )
    return record


def check_counts(record: Record) -> None:
    """Recompute every cell from its counts (relative tolerance 1e-9). Raises UserError on the first difference.

    That the counts are possible (correct <= asked, n of them) holds for every Record.
    """
    for cell in record.cells:
        for problem in _problems(cell, record.task.metric, record.train_length):
            raise UserError(f"cell {cell.name!r}: {problem}")


def data_hash(cells: Iterable[tuple[str, str]]) -> str:
    """The hash of an evaluation's data: sha256 over (name, content hash) of its cells in order.

    A cell's content hash is the sha256 of its samples in order of index: for each its tokens, then its labels, then its
    positions where the task gives them, as little-endian int64 and without padding. It doesn't depend on how the
    samples were batched.
    """
    return digest([[name, content] for name, content in cells])


def distance_bins(distances: Iterable[Sequence[int]], hits: Iterable[Sequence[bool]]) -> tuple[DistanceBin, ...]:
    """Questions counted by the octave of their distance (tokens), nearest first; octaves without any are absent.

    distances, hits: an entry a sample, in it one a question; a sample without distances has none.
    """
    counts: dict[int, list[int]] = {}
    for row, answers in zip(distances, hits, strict=True):
        for low in {octave(distance) for distance in row}:
            counts.setdefault(low, [0, 0, 0])[0] += 1
        for distance, hit in zip(row, answers, strict=len(row) > 0):
            count = counts[octave(distance)]
            count[1] += 1
            count[2] += bool(hit)
    return tuple(
        DistanceBin(low=low, high=2 * low, samples=samples, asked=asked, correct=correct)
        for low, (samples, asked, correct) in sorted(counts.items())
    )


def unwritten(distances: Sequence[Sequence[int]], hits: Sequence[Sequence[bool]]) -> Unwritten | None:
    """What `distance_bins` of the same leaves out; None where that is nothing or all."""
    left = [answers for row, answers in zip(distances, hits, strict=True) if not row]
    if not left or len(left) == len(hits):
        return None
    return Unwritten(samples=len(left), asked=sum(map(len, left)), correct=sum(map(sum, left)))


def groups(record: Record) -> list[Group]:
    """The record's cells put together over depths, in their order; the statistics are of a group's pooled counts."""
    found: dict[tuple[Any, ...], list[CellResult]] = {}
    for cell in record.cells:
        found.setdefault((cell.variant, cell.eval_length, *sorted(without_depth(cell).items())), []).append(cell)
    return [_group(record.task.metric, cells) for cells in found.values()]


def perplexity(log_likelihood: Sequence[float]) -> float | None:
    """exp(-mean log-likelihood of a sample's answers); None where that is too large for a number."""
    try:
        return math.exp(-math.fsum(log_likelihood) / len(log_likelihood))
    except OverflowError:
        return None


def bits_per_byte(log_likelihood: Sequence[float], size: Sequence[int]) -> tuple[float, float | None]:
    """Bits by bytes of all samples, and the standard error of that, None for one sample; size: bytes, not all 0."""
    bits = [-value / math.log(2) for value in log_likelihood]
    ratio = math.fsum(bits) / sum(size)
    n, mean = len(bits), sum(size) / len(size)
    squares = math.fsum((bit - ratio * length) ** 2 for bit, length in zip(bits, size, strict=True))
    return ratio, math.sqrt(squares / (n - 1) / n) / mean if n > 1 else None


def position_bin(position: int) -> int:
    """`high` of the bin that a position >= 1 lies in: 1, 2, 4 (3 and 4), 8 (5 to 8), …"""
    return 1 << (position - 1).bit_length()


# What a model was trained with that belongs to its name, as it isn't the task's own training.
TRAINED_WITH = ("label_noise", "state_passing")


def trained_with(record: Record) -> dict[str, float]:
    """The shares of TRAINED_WITH that aren't 0, by the training or the checkpoint, whichever says so.

    label_noise: of the training labels that were replaced. state_passing: of the training sequences that started from
    another's final state.
    """
    shares: dict[str, float] = {}
    for key in TRAINED_WITH:
        said = record.training.config.get(key) if record.training else None
        if record.checkpoint is not None:
            said = getattr(record.checkpoint, key)
        if isinstance(said, int | float) and said:
            shares[key] = float(said)
    return shares


def said_of_training(shares: Mapping[str, float]) -> str:
    """`trained_with` in words: label noise 0.4, state passing 0.5; empty where there is nothing to say."""
    return ", ".join(f"{key.replace('_', ' ')} {share:g}" for key, share in shares.items())


def without_depth(cell: CellResult) -> Coordinates:
    """A cell's coordinates but its depth, over which tables and lines take the mean."""
    return {name: value for name, value in cell.coordinates.items() if name != "depth"}


def json_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a record's file."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Record.model_json_schema()}
    for kind in [schema, *schema["$defs"].values()]:
        required = set(kind.get("required", ()))
        kind["properties"] = {
            key: value if key in required else _never_null(value) for key, value in kind["properties"].items()
        }
    return schema


def _group(metric: Metric, cells: Sequence[CellResult]) -> Group:
    correct = [count for cell in cells for count in cell.correct]
    asked = [count for cell in cells for count in cell.asked]
    value, _, interval = cell_statistics(metric, correct, asked)
    first = cells[0]
    known = [(cell.n, cell.references or {}) for cell in cells]
    references = {
        name: math.fsum(n * found[name] for n, found in known) / len(asked)
        for name in first.references or {}
        if all(name in found for _, found in known)
    }
    return Group(
        variant=first.variant,
        eval_length=first.eval_length,
        ratio=first.ratio,
        coordinates=without_depth(first),
        value=value,
        interval=interval,
        n=len(asked),
        references=references,
        **_pooled_likelihoods(cells),
    )


def _pooled_likelihoods(cells: Sequence[CellResult]) -> dict[str, Any]:
    likely = [value for cell in cells for value in cell.log_likelihood or ()]
    size = [value for cell in cells for value in cell.bytes or ()]
    if any(cell.log_likelihood is None for cell in cells):
        return {}
    if any(cell.bytes is None for cell in cells):
        return {"perplexity": perplexity(likely)}
    return {"bits_per_byte": bits_per_byte(likely, size)}


def _problems(cell: CellResult, metric: Metric, train_length: int | None) -> Iterator[str]:
    value, error, interval = cell_statistics(metric, cell.correct, cell.asked)
    for name, given, found in (
        ("value", cell.value, value),
        ("standard_error", cell.standard_error, error),
        ("interval.0", cell.interval[0], interval[0]),
        ("interval.1", cell.interval[1], interval[1]),
    ):
        if not _equal(given, found):
            yield f"{name} is {given!r}, but its counts give {found!r}"
    if train_length is None and cell.ratio is not None:
        yield f"ratio is {cell.ratio!r}, but no training length is known"
    if train_length is not None and (cell.ratio is None or not _equal(cell.ratio, cell.eval_length / train_length)):
        yield f"ratio is {cell.ratio!r}, but {cell.eval_length} / {train_length} tokens is not"
    if not cell.real_tokens.min <= cell.real_tokens.mean <= cell.real_tokens.max:
        yield "real_tokens has min, mean and max out of order"
    if cell.by_distance or cell.unwritten:
        yield from _distance_problems(cell)
    likely = None if cell.log_likelihood is None or cell.bytes is not None else perplexity(cell.log_likelihood)
    if (cell.perplexity is None) != (likely is None) or not _equal(cell.perplexity or 0, likely or 0):
        yield f"perplexity is {cell.perplexity!r}, but its log-likelihoods give {likely!r}"
    if cell.bytes is not None:
        yield from _text_problems(cell, cell.bytes)


def _distance_problems(cell: CellResult) -> Iterator[str]:
    lows = [part.low for part in cell.by_distance]
    if lows != sorted(set(lows)) or any(octave(low) != low for low in lows):
        yield "by_distance must have rising powers of two as low"
    for part in cell.by_distance:
        if part.high != 2 * part.low:
            yield f"by_distance from {part.low} goes to {part.high}, not {2 * part.low}"
        if part.correct > part.asked:
            yield f"by_distance from {part.low} has {part.correct} correct of {part.asked} asked"
        if part.samples > min(part.asked, cell.n):
            yield f"by_distance from {part.low} has {part.samples} samples of {cell.n}, with {part.asked} questions"
    left = cell.unwritten
    if left and (left.correct > left.asked or left.samples > min(left.asked, cell.n)):
        yield f"unwritten has {left.correct} correct of {left.asked} asked, in {left.samples} samples of {cell.n}"
    parts = [*cell.by_distance, *([left] if left else [])]
    for name in ("asked", "correct"):
        binned, counted = sum(getattr(part, name) for part in parts), sum(getattr(cell, name))
        if binned != counted:
            where = "by_distance and unwritten have" if left else "by_distance has"
            yield f"{where} {binned} {name}, but the samples have {counted}"


def _text_problems(cell: CellResult, size: Sequence[int]) -> Iterator[str]:
    likely, bins = cell.log_likelihood or (), cell.by_position or ()
    if not any(size):
        yield "bytes are 0 for all samples: there is no text"
        return
    for name, found in zip(("bits_per_byte", "bits_per_byte_error"), bits_per_byte(likely, size), strict=True):
        if found is not None and not _equal(getattr(cell, name), found):  # that a single sample has no error is checked
            yield f"{name} is {getattr(cell, name)!r}, but its log-likelihoods and bytes give {found!r}"
    highs = [part.high for part in bins]
    if highs != sorted(set(highs)) or any((position_bin(p.high), p.low) != (p.high, p.high // 2 + 1) for p in bins):
        yield "by_position must have rising powers of two as high, and as low one more than their half"
    for name, counted in (("asked", sum(cell.asked)), ("correct", sum(cell.correct)), ("bytes", sum(size))):
        if (binned := sum(getattr(part, name) for part in bins)) != counted:
            yield f"by_position has {binned} {name}, but the samples have {counted}"
    nats = math.fsum(part.nats for part in bins)
    if not math.isclose(nats, -math.fsum(likely), rel_tol=1e-9, abs_tol=1e-6):
        yield f"by_position has {nats!r} nats, but the samples have {-math.fsum(likely)!r}"
    for part in bins:
        if part.correct > part.asked or part.samples > min(part.asked, cell.n):
            yield f"by_position to {part.high} has {part.correct} correct of {part.asked}, in {part.samples} samples"


def _equal(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


def _never_null(field: dict[str, Any]) -> dict[str, Any]:
    if {"type": "null"} not in field.get("anyOf", ()):
        return field
    choices = [choice for choice in field["anyOf"] if choice != {"type": "null"}]
    kept = {key: value for key, value in field.items() if key not in ("anyOf", "default")}
    return {**kept, **choices[0]} if len(choices) == 1 else {**kept, "anyOf": choices}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n")
