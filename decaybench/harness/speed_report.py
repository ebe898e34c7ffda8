"""What `bench speed` found: the report as data, each field described, and as tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field

from decaybench.harness.stopwatch import Middle
from decaybench.results.record import Count, Environment, JsonObject, ParameterCounts, Part

if TYPE_CHECKING:
    from rich.table import Table

What = Literal["train", "prefill", "decode", "decode_batch"]
Times = tuple[float, ...]


class Ratio(Part):
    """The ratio of two times, measured in turn."""

    median: float = Field(description="median of the ratios of pairs")
    low: float = Field(description="lower end of its 95 % interval, by order statistics")
    high: float = Field(description="upper end")

    @classmethod
    def of(cls, found: Middle) -> Self:
        """The same as data."""
        return cls(median=found.value, low=found.low, high=found.high)

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


class Work(Part):
    """One thing that a model does, measured."""

    what: What = Field(
        description="train: forward, loss, backward and optimiser step; prefill: reading a batch into a state; "
        "decode: one token of one row; decode_batch: one token of each row"
    )
    tokens: int = Field(ge=1, description="tokens a call")
    seconds: Times = Field(description="seconds a call, each measurement in order")
    peak_bytes: Count | None = Field(
        default=None,
        description="memory at the peak beyond weights, optimiser and inputs, bytes, median; absent: not measured",
    )
    flops: Count = Field(description="FLOPs a call in matrix products and convolutions as they run")
    overhead: Ratio | None = Field(
        default=None, description="seconds of this cell / seconds of its base; absent: it is the base"
    )
    memory_ratio: float | None = Field(
        default=None,
        ge=0,
        description="peak_bytes of this cell / peak_bytes of its base; absent: it is the base, or none was measured",
    )

    @property
    def median_seconds(self) -> float:
        """Median seconds a call."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """By the median."""
        return self.tokens / self.median_seconds

    @property
    def flops_per_second(self) -> float:
        """By the median."""
        return self.flops / self.median_seconds


class CellSpeed(Part):
    """A model with or without add-ons."""

    cell: str = Field(description="architecture and add-ons as tables spell it: mamba2+post")
    base: str | None = Field(
        description="the cell that its overhead is a ratio to: without add-ons, with the same gate; null: it has none"
    )
    config: JsonObject = Field(description="the resolved model configuration")
    parameters: ParameterCounts = Field(description="parameter counts")
    state_elements: tuple[Count, ...] = Field(description="numbers in each layer's state after shape.length tokens")
    work: tuple[Work, ...] = Field(description="what was measured")

    def of(self, what: What) -> Work:
        """The work of that kind."""
        return next(work for work in self.work if work.what == what)


class PeerSpeed(Part):
    """Another package's implementation of the same function on the same inputs, measured in turn with ours."""

    architecture: str = Field(description="the registered name of the architecture")
    peer: str = Field(description="package, version and form")
    what: What | Literal["op"] = Field(description="as in a cell's work; op: forward and backward")
    op: str | None = Field(default=None, description="the op, where it is one")
    our_seconds: Times = Field(description="ours, seconds a call, each measurement in order")
    peer_seconds: Times = Field(description="theirs, seconds a call, paired with ours")
    times_faster: Ratio = Field(description="their seconds / our seconds")
    difference: float = Field(
        ge=0, description="largest difference of what they compute, relative to the largest number"
    )


class LongPrefill(Part):
    """One very long input, read."""

    tokens: int = Field(ge=1, description="length of the input")
    seconds: float = Field(gt=0, description="seconds, measured once")
    peak_bytes: Count | None = Field(
        default=None, description="memory at the peak beyond weights and the input, bytes; absent: not measured"
    )


class DecodeAfter(Part):
    """Decoding one token after so many."""

    tokens: int = Field(ge=1, description="tokens read before")
    seconds: Times = Field(description="seconds a token, each measurement in order")


class LongSpeed(Part):
    """Whether a model's memory and time stay the same however long the input is."""

    cell: str = Field(description="architecture and add-ons")
    prefill: tuple[LongPrefill, ...] = Field(description="inputs read, shortest first")
    decode: tuple[DecodeAfter, ...] = Field(description="decoding, after the shortest first")
    decode_ratio: Ratio = Field(description="seconds a token after the longest / after the shortest")


class SpeedReport(Part):
    """Everything measured in one run of `bench speed`."""

    environment: Environment = Field(description="where it ran; threads are those used")
    wait_policy: str | None = Field(default=None, description="OMP_WAIT_POLICY; absent: not set")
    shape: JsonObject = Field(description="the sizes, every default filled in")
    repeats: int = Field(ge=1, description="measurements of each thing")
    matmul_flops_per_second: float = Field(gt=0, description="fastest float32 product of square matrices in this run")
    cells: tuple[CellSpeed, ...] = Field(description="the models, each base before its add-ons")
    peers: tuple[PeerSpeed, ...] = Field(default=(), description="other packages' implementations")
    missing_peers: tuple[str, ...] = Field(default=(), description="packages with peers that are not installed")
    long: tuple[LongSpeed, ...] = Field(default=(), description="very long inputs, recurrent models only")

    def tables(self) -> list[Table]:
        """The report for a terminal, a table for each kind of finding."""
        found = [_speeds(self)]
        found += [_overheads(self)] if any(work.overhead for cell in self.cells for work in cell.work) else []
        found += [_peers(self)] if self.peers else []
        found += [_long(self)] if self.long else []
        found[-1].caption = _caption(self)
        found[-1].caption_justify = "left"
        return found


def _table(title: str, headings: Iterable[str]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table


def _speeds(report: SpeedReport) -> Table:
    shape = report.shape
    title = (
        f"speed: {shape['batch']} x {shape['length']} tokens, d_model {shape['d_model']}, {shape['n_layers']} layers, "
        f"vocabulary {shape['vocab_size']}, one label in {shape['label_every']} tokens"
    )
    headings = ["cell", "train\ntokens/s", "GFLOP/s", "of peak", "MB", "prefill\ntokens/s", "GFLOP/s", "MB"]
    headings += ["decode\nms/token", f"batch {shape['batch']}\ntokens/s", "MB"]
    table = _table(title, headings)
    for cell in report.cells:
        train, prefill, decode, batch = (cell.of(what) for what in ("train", "prefill", "decode", "decode_batch"))
        table.add_row(
            cell.cell,
            f"{train.tokens_per_second:,.0f}",
            f"{train.flops_per_second / 1e9:.3g}",
            f"{train.flops_per_second / report.matmul_flops_per_second:.0%}",
            _megabytes(train.peak_bytes),
            f"{prefill.tokens_per_second:,.0f}",
            f"{prefill.flops_per_second / 1e9:.3g}",
            _megabytes(prefill.peak_bytes),
            f"{1e3 * decode.median_seconds:.3g}",
            f"{batch.tokens_per_second:,.0f}",
            _megabytes(batch.peak_bytes),
        )
    return table


def _overheads(report: SpeedReport) -> Table:
    headings = ["cell", "beside"]
    headings += [f"{what}\n{of}" for what in ("train", "prefill") for of in ("time", "memory")]
    headings += ["decode\ntime", "decode,\nbatch"]
    table = _table("with add-ons / without", headings)
    for cell in report.cells:
        if all(work.overhead is None for work in cell.work):
            continue
        row = []
        for work in cell.work:
            row.append(str(work.overhead))
            if work.what in ("train", "prefill"):  # in decoding it is the logits' buffers, and noise
                row.append("" if work.memory_ratio is None else f"{work.memory_ratio:.2f}")
        table.add_row(cell.cell, cell.base, *row)
    return table


def _peers(report: SpeedReport) -> Table:
    headings = ["architecture", "what", "peer", "ours, ms", "theirs, ms", "times faster", "difference"]
    table = _table("beside other packages, same weights or inputs", headings)
    for peer in report.peers:
        table.add_row(
            peer.architecture,
            peer.op or peer.what,
            peer.peer,
            *(f"{1e3 * statistics.median(times):.3g}" for times in (peer.our_seconds, peer.peer_seconds)),
            str(peer.times_faster),
            f"{peer.difference:.0e}",
        )
    return table


def _long(report: SpeedReport) -> Table:
    headings = ["cell"]
    for prefill in report.long[0].prefill:
        headings += [f"prefill {prefill.tokens:,}\ntokens/s", "MB"]
    headings += [f"decode after {decode.tokens:,}\nms/token" for decode in report.long[0].decode]
    table = _table("very long inputs, one row", [*headings, "ratio"])
    for found in report.long:
        row = [part for prefill in found.prefill for part in _long_prefill(prefill)]
        row += [f"{1e3 * statistics.median(decode.seconds):.3g}" for decode in found.decode]
        table.add_row(found.cell, *row, str(found.decode_ratio))
    return table


def _long_prefill(found: LongPrefill) -> Iterator[str]:
    yield f"{found.tokens / found.seconds:,.0f}"
    yield _megabytes(found.peak_bytes)


def _caption(report: SpeedReport) -> str:
    where = report.environment
    parts = [
        f"{where.device}, threads: {where.threads}, OMP_WAIT_POLICY {report.wait_policy or 'not set'}",
        f"medians of {report.repeats}, ratios with 95 % intervals",
        f"matrix products reach {report.matmul_flops_per_second / 1e9:.3g} GFLOP/s (float32)",
        "MB: at the peak, beyond weights, optimiser and inputs",
    ]
    if report.missing_peers:
        parts.append(f"not installed: {', '.join(report.missing_peers)}")
    return "; ".join(parts)


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:,.1f}"
