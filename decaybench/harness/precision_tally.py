"""What BFT, or a gate in its place, does while a model reads samples of its task: gains, sample sizes, precisions.

K, n and lambda are those of models/addons/bft.py, by layer: against the position, the context's length and the answer's
place, and lambda by what a token is. What is measured of n falls short of harness/sample_size.py, of equal writes with
the same decays, by as much as writes and precisions differ from one another. Intervals are those of
results/resampling.py, with samples as units.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, log
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from decaybench.core.hashing import key64
from decaybench.harness.config import RunConfig
from decaybench.harness.precision_report import (
    ALL,
    ASKED,
    BOUND,
    TOKENS,
    AtLength,
    HeadSize,
    LayerDetail,
    Quartiles,
    RunTrace,
    SourceOrder,
)
from decaybench.harness.sample_size import limit_of, sample_sizes
from decaybench.harness.sampling import first_samples
from decaybench.harness.tau_effect import tau_effects
from decaybench.harness.training import matmul_dtype
from decaybench.models.branch import LayerTrace
from decaybench.models.language_model import LanguageModel
from decaybench.results.resampling import Estimate, means, slopes
from decaybench.results.statistics import octave
from decaybench.tasks.base import Batch, Cell, Task
from decaybench.tasks.mqar_noisy import MqarNoisy
from decaybench.tasks.registry import make_task

Float64 = NDArray[np.float64]


def trace_run(
    config: RunConfig,
    model: LanguageModel,
    cells: Sequence[Cell],
    samples: int,
    name: str | None = None,
    *,
    label_noise: float | None = None,
    longest_trained: int | None = None,
) -> RunTrace:
    """Trace a model in evaluation mode on `samples` of the task's own test samples a length, spread over its cells.

    name, label_noise, longest_trained: see RunTrace.
    """
    task = make_task(config.task)
    by_length: dict[int, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_length[cell.shape.length].append(cell)
    tallies = []
    with matmul_dtype(config.training.dtype, model.embedding.weight.device.type):
        for length in sorted(by_length):
            tally = Tally(task, length, whole=length == max(by_length))
            seed, batch_tokens = config.evaluation.seed, config.batch_tokens
            for cell, batch in first_samples(task, by_length[length], samples, seed, batch_tokens):
                tokens = torch.from_numpy(batch.tokens).to(model.embedding.weight.device)
                tally.add(cell, batch, model.trace(tokens))
            tallies.append(tally)
    last = tallies[-1]
    tau = _initial_precision(model, task)
    layers = last.layers(model)
    reliabilities = task.config.reliabilities if isinstance(task, MqarNoisy) else ()
    return RunTrace(
        name=name or config.model.cell,
        cell=config.model.cell,
        seed=config.seed,
        task=task.name,
        variant=cells[0].variant,
        train_length=config.task.train_length,
        longest_trained=longest_trained,
        label_noise=label_noise,
        lengths=tuple(tally.at_length() for tally in tallies),
        slopes={place: _slopes(tallies, place) for place in (ASKED, ALL)} if len(tallies) > 1 else {},
        bins=tuple(position_bins(last.length)),
        answer_place=last.answer_place,
        answers=tuple((place, found.questions) for place, found in sorted(last.answers.items())),
        layers=layers,
        tau={kind: Quartiles.of(tau[ids.start : ids.stop]) for kind, ids in task.token_classes().items() if tau.size},
        reliability=dict(zip(_source_classes(task), reliabilities, strict=True)),
        sources=tuple(_source_orders(task, tau, layers)),
        tau_effects=tau_effects(config, model, by_length[min(by_length)][0], samples),
    )


def position_bins(length: int) -> list[tuple[int, int]]:
    """Positions 1 .. length in half octaves that end at powers of two: first and last position of each."""
    ends = sorted({round(2 ** (k / 2)) for k in range(2 * length.bit_length())})
    ends = [*(end for end in ends if end < length), length]
    return [(before + 1, end) for before, end in zip([0, *ends], ends, strict=False)]


@dataclass
class _Answers:
    """The answers at one place: how many questions ask for them, and the sum over these of gain and sample size, [L].

    size: 0 where there is no sample size.
    """

    questions: int
    gain: Float64
    size: Float64


class Tally:
    """What the samples of one length, tokens, have shown. whole: keep what is drawn of the longest context, too.

    answers: those of the longest context, by their place; answer_place: what that is, `depth` or `distance`.
    """

    def __init__(self, task: Task[Any, Any, Any], length: int, *, whole: bool) -> None:
        self.task, self.length, self.whole = task, length, whole
        self.rows = 0
        self.answer_place = "distance"
        self.answers: dict[float, _Answers] = {}
        self._samples: dict[tuple[str, str], list[Float64]] = defaultdict(list)  # [n, L] each
        self._sums: dict[str, Float64] = {}  # over samples: gain [L, T], size and log decay [L, T, H]
        self._kinds: dict[tuple[str, str], list[NDArray[np.float32]]] = defaultdict(list)  # [2 L, tokens] each

    def add(self, cell: Cell, batch: Batch, traces: Sequence[LayerTrace]) -> None:
        """Add a batch of samples; traces: one a layer."""
        asked = batch.asked
        gain = _stacked(traces, "gain")
        sizes = _stacked(traces, "sample_size")
        size = None if sizes is None else sizes.mean(-1)
        self.rows += len(asked)
        for name, values in (("gain", gain), ("size", size)):
            if values is not None:
                self._samples[name, ALL].append(values.mean(2).T)
                self._samples[name, ASKED].append(((values * asked).sum(2) / asked.sum(1)).T)
        if not self.whole:
            return
        decay = _stacked(traces, "log_decay")
        for name, values in (("gain", gain), ("size", sizes), ("decay", decay)):
            if values is not None:
                self._sums[name] = self._sums.get(name, 0.0) + values.sum(1)
        self._add_answers(cell, batch, gain, size)
        before, after = _stacked(traces, "precision"), _stacked(traces, "updated")
        if before is not None and after is not None:
            both = np.stack([before, after], axis=1).reshape(-1, *asked.shape).astype(np.float32)
            for kind, mask in _kinds(self.task, batch).items():
                if mask.any():
                    self._kinds[kind].append(both[:, mask])

    def samples(self, name: str, place: str) -> Float64:
        """Each sample's mean over the places, [n, L]; name: gain or size."""
        return np.concatenate(self._samples[name, place])

    @property
    def key(self) -> int:
        """Of the draws of samples for intervals."""
        return key64("precision", self.length)

    def at_length(self) -> AtLength:
        """Means over the samples, with their intervals."""

        def estimates(name: str) -> dict[str, tuple[Estimate, ...]]:
            return {place: means(self.samples(name, place), self.key) for place in (ASKED, ALL)}

        sized = ("size", ALL) in self._samples
        return AtLength(self.length, self.rows, estimates("gain"), estimates("size") if sized else None)

    def layers(self, model: LanguageModel) -> tuple[LayerDetail, ...]:
        """What is drawn of the longest context, a layer each."""
        sums = {name: total / self.rows for name, total in self._sums.items()}
        return tuple(self._layer(number, sums, block) for number, block in enumerate(model.blocks))

    def _layer(self, number: int, sums: dict[str, Float64], block: torch.nn.Module) -> LayerDetail:
        bins = position_bins(self.length)
        answers = [self.answers[place] for place in sorted(self.answers)]
        sized = "size" in sums
        spreads: dict[str, dict[str, tuple[Quartiles, Quartiles]]] = defaultdict(dict)
        for (kind, name), parts in self._kinds.items():
            before, after = (Quartiles.of(np.concatenate([part[2 * number + k] for part in parts])) for k in (0, 1))
            spreads[kind][name] = (before, after)
        return LayerDetail(
            gain=_binned(sums["gain"][number], bins),
            answer_gain=tuple(float(found.gain[number]) / found.questions for found in answers),
            sample_size=_binned(sums["size"][number].mean(-1), bins) if sized else None,
            answer_size=tuple(float(found.size[number]) / found.questions for found in answers) if sized else None,
            heads=self._heads(number, sums, bins, block) if sized else (),
            precision=dict(spreads),
        )

    def _heads(
        self, number: int, sums: dict[str, Float64], bins: list[tuple[int, int]], block: torch.nn.Module
    ) -> tuple[HeadSize, ...]:
        sizes = sums["size"][number]
        measured = [_binned(sizes[:, head], bins) for head in range(sizes.shape[1])]
        if "decay" not in sums:
            found = [HeadSize(head, curve) for head, curve in enumerate(measured)]
            return tuple(sorted(found, key=lambda head: -head.measured[-1]))
        decay = sums["decay"][number]
        theory = sample_sizes(decay)
        tapers = _tapers(block, sizes.shape[1], self.length)
        found = []
        for head, curve in enumerate(measured):
            mean = float(decay[bins[-1][0] - 1 :, head].mean())
            timescale = -1 / mean if mean else inf
            limit = limit_of(timescale, tapers[head], self.length)
            found.append(HeadSize(head, curve, _binned(theory[:, head], bins), timescale, tapers[head], limit))
        return tuple(sorted(found, key=lambda head: -(head.timescale or 0)))

    def _add_answers(self, cell: Cell, batch: Batch, gain: Float64, size: Float64 | None) -> None:
        asked = batch.asked
        if "depth" in cell.coordinates:
            self.answer_place = "depth"
            places = np.full(int(asked.sum()), cell.coordinates["depth"], dtype=np.float64)
        else:
            places = np.array([octave(max(int(d), 1)) for d in batch.distance[asked]], dtype=np.float64)
        for place in np.unique(places):
            here = places == place
            known = self.answers.setdefault(float(place), _Answers(0, np.zeros(len(gain)), np.zeros(len(gain))))
            known.questions += int(here.sum())
            known.gain += gain[:, asked][:, here].sum(1)
            if size is not None:
                known.size += size[:, asked][:, here].sum(1)


def _slopes(tallies: Sequence[Tally], place: str) -> tuple[Estimate, ...]:
    """What a doubling of the length adds to the gain."""
    lengths = np.log2([tally.length for tally in tallies])
    return slopes(lengths, [tally.samples("gain", place) for tally in tallies], [tally.key for tally in tallies])


def _kinds(task: Task[Any, Any, Any], batch: Batch) -> dict[tuple[str, str], NDArray[np.bool_]]:
    """Where each kind of token stands, bool [B, T]: by class, where asked, and for mqar-noisy by who bound a value."""
    found = {
        (TOKENS, name): (batch.tokens >= ids.start) & (batch.tokens < ids.stop)
        for name, ids in task.token_classes().items()
    }
    found[TOKENS, ASKED] = batch.asked
    if isinstance(task, MqarNoisy):
        source, place = batch.details["source"], batch.details["place"]
        rows = np.broadcast_to(np.arange(len(source))[:, None, None], source.shape)
        for number, name in enumerate(_source_classes(task)):
            mask = np.zeros(batch.tokens.shape, dtype=bool)
            here = source == number
            mask[rows[here], place[here]] = True
            found[BOUND, name] = mask
    return found


def _source_classes(task: Task[Any, Any, Any]) -> list[str]:
    """The classes of mqar-noisy's source tokens, in order: token 1 is the first source. None in other tasks."""
    if not isinstance(task, MqarNoisy):
        return []
    ids = {classed.start: name for name, classed in task.token_classes().items()}
    return [ids[token] for token in range(1, 1 + len(task.config.reliabilities))]


def _source_orders(task: Task[Any, Any, Any], tau: Float64, layers: Sequence[LayerDetail]) -> Iterator[SourceOrder]:
    """By tau of the source tokens, and before each further layer by lambda of the values that they bound."""
    if not isinstance(task, MqarNoisy) or not tau.size:
        return
    reliability = task.config.reliabilities
    yield SourceOrder("tau of the sources", reliability, tuple(tau[1 : 1 + len(reliability)].tolist()))
    for number, layer in enumerate(layers[1:], start=1):
        bound = layer.precision.get(BOUND, {})
        names = _source_classes(task)
        if all(name in bound for name in names):
            medians = tuple(bound[name][0].median for name in names)
            yield SourceOrder(f"lambda of the values they bound, before layer {number}", reliability, medians)


def _initial_precision(model: LanguageModel, task: Task[Any, Any, Any]) -> Float64:
    """lambda of the embedding by token id, [vocab]; empty where none is learned."""
    bft = model.config.bft
    if bft is None or bft.precision == "frozen":
        return np.zeros(0)
    ids = torch.arange(task.vocab_size, device=model.embedding.weight.device)
    found = model.initial_precision(ids[None])
    return np.zeros(0) if found is None else found[0].double().cpu().numpy()


def _tapers(block: torch.nn.Module, heads: int, length: int) -> list[float]:
    """The power of t with which each head's timescale at rest grows from position 1 to `length`."""
    with torch.no_grad():
        rates = [(1 / block.mixer.timescales(t)).double().reshape(heads, -1).mean(1) for t in (1, length)]  # type: ignore[operator, union-attr]
    grown = torch.where(rates[0] == rates[1], 1.0, rates[0] / rates[1])  # 0 / 0 where nothing decays
    return (grown.log() / log(length)).tolist() if length > 1 else [0.0] * heads


def _stacked(traces: Sequence[LayerTrace], name: str) -> Any:
    """A quantity of all layers, float64 [L, B, T, ...]; None where the residuals note none."""
    values = [getattr(trace, name) for trace in traces]
    return None if values[0] is None else torch.stack(values).double().cpu().numpy()


def _binned(values: Float64, bins: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    return tuple(float(values[first - 1 : last].mean()) for first, last in bins)
