"""What BFT, or a gate in its place, does while a trained model reads: gains, effective sample sizes, precisions.

K, n and lambda are those of models/addons/bft.py, by layer: against the position, the context's length and the answer's
place, and lambda by what a token is. A head whose log decays are g_t and whose writes are all alike has

    S_t = e^{g_t} S_{t-1} + 1,   D_t = e^{2 g_t} D_{t-1} + 1,   n_t = S_t^2 / D_t

so that a static decay of timescale tau saturates, n -> coth(1 / (2 tau)), nearly 2 tau, and PoST's slowest head,
g_t = -a / t, grows for ever, n / t -> (2 a + 1) / (a + 1)^2. What is measured falls short of it by as much as writes
and precisions differ from one another. Intervals are percentiles of means over samples drawn again, 95 %.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log, sqrt, tanh
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from decaybench.core.config import parse
from decaybench.core.draws import Draws
from decaybench.core.errors import UserError
from decaybench.core.files import atomic_write_json
from decaybench.core.hashing import key64
from decaybench.core.names import unknown
from decaybench.harness.config import RunConfig, evaluation_cells
from decaybench.harness.environment import resolve_device
from decaybench.harness.precision_plots import draw_comparison, draw_run
from decaybench.harness.presets import run_config_of
from decaybench.harness.training import matmul_dtype
from decaybench.models.branch import LayerTrace
from decaybench.models.checkpoints import Checkpoint, find_checkpoint
from decaybench.models.language_model import LanguageModel
from decaybench.results.statistics import octave
from decaybench.tasks.base import Batch, Cell, Task
from decaybench.tasks.mqar_noisy import MqarNoisy
from decaybench.tasks.registry import get_task, make_task

if TYPE_CHECKING:
    from rich.table import Table

Float64 = NDArray[np.float64]

LENGTHS = ("1x", "2x", "4x")
ASKED, ALL = "asked", "all"  # the places where an answer is asked, and all places
TOKENS, BOUND = "token", "bound value"  # kinds of places: by what a token is; a value, by the source that bound it
_RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """A mean over samples with its interval."""

    value: float
    interval: tuple[float, float]

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        return {"value": self.value, "interval": list(self.interval)}


@dataclass(frozen=True)
class Quartiles:
    """The spread of a quantity over `count` tokens."""

    low: float
    median: float
    high: float
    count: int

    @classmethod
    def of(cls, values: NDArray[Any]) -> Quartiles:
        """Of one value or more, [n]."""
        low, median, high = np.quantile(values.astype(np.float64), [0.25, 0.5, 0.75])
        return cls(float(low), float(median), float(high), len(values))

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        return {"lower_quartile": self.low, "median": self.median, "upper_quartile": self.high, "tokens": self.count}


@dataclass(frozen=True)
class AtLength:
    """One context length, tokens. gain, sample_size: an estimate a layer by place, ASKED and ALL; sample_size: the mean
    over heads, None for a gate.
    """

    length: int
    samples: int
    gain: dict[str, tuple[Estimate, ...]]
    sample_size: dict[str, tuple[Estimate, ...]] | None


@dataclass(frozen=True)
class HeadSize:
    """A head's sample size by bin of positions. theory: of equal writes with the head's mean decays; None without
    decays, as are the rest. timescale: -1 / mean log decay over the last bin, tokens. taper: alpha, the power of t with
    which the timescale at rest grows. limit: what n tends to at the last position, by the module's equations.
    """

    head: int
    measured: tuple[float, ...]
    theory: tuple[float, ...] | None = None
    timescale: float | None = None
    taper: float | None = None
    limit: float | None = None

    def plain(self) -> dict[str, Any]:
        """JSON-able, but for the curves."""
        names = ("head", "timescale", "taper", "limit")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True)
class LayerDetail:
    """One layer in the longest context. gain, sample_size: by bin of positions; answer_gain, answer_size: where answers
    are asked, by the answer's place. heads: slowest first. precision: by kind and name of tokens, lambda before the
    layer and after its observation. sample_size, answer_size: None for a gate, which has no heads or precision either.
    """

    gain: tuple[float, ...]
    answer_gain: tuple[float, ...]
    sample_size: tuple[float, ...] | None
    answer_size: tuple[float, ...] | None
    heads: tuple[HeadSize, ...]
    precision: dict[str, dict[str, tuple[Quartiles, Quartiles]]]


@dataclass(frozen=True)
class SourceOrder:
    """Do precisions order the sources of mqar-noisy by their reliability?

    what: which precision. reliability, precision: a number a source. kendall (tau-b), spearman: rank correlations; None
    where all of one are the same.
    """

    what: str
    reliability: tuple[float, ...]
    precision: tuple[float, ...]

    @property
    def kendall(self) -> float | None:
        """Kendall's tau-b."""
        return kendall(self.reliability, self.precision)

    @property
    def spearman(self) -> float | None:
        """Spearman's rank correlation."""
        return spearman(self.reliability, self.precision)

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        found = {name: list(getattr(self, name)) for name in ("reliability", "precision")}
        return {"what": self.what, **found, "kendall": self.kendall, "spearman": self.spearman}

    def __str__(self) -> str:
        listed = ", ".join(f"{p:.3g} ({r:g})" for r, p in sorted(self._pairs(), reverse=True))
        if self.kendall is None or self.spearman is None:
            return f"{self.what}: {listed}: not ordered by reliability"
        orders = {1.0: "ordered by reliability", -1.0: "ordered the other way round"}
        said = orders.get(round(self.kendall, 9), "not ordered by reliability")
        return f"{self.what}: {listed}: {said} (Kendall {self.kendall:+.2f}, Spearman {self.spearman:+.2f})"

    def _pairs(self) -> Iterator[tuple[float, float]]:
        return zip(self.reliability, self.precision, strict=True)


@dataclass(frozen=True)
class RunTrace:
    """What a run's model does. name: how figures call it. slopes: what a doubling of the context adds to the gain, an
    estimate a layer by place; empty with one length. bins: the bins of positions, first and last. answers: where
    answers lie, as `depth` (0..1) or `distance` (an octave's lower end), and how many questions are asked about each.
    tau: lambda of the embedding by class of token ids; empty where none is learned.
    """

    name: str
    cell: str
    seed: int
    task: str
    variant: str
    train_length: int
    lengths: tuple[AtLength, ...]
    slopes: dict[str, tuple[Estimate, ...]]
    bins: tuple[tuple[int, int], ...]
    answer_place: str
    answers: tuple[tuple[float, int], ...]
    layers: tuple[LayerDetail, ...]
    tau: dict[str, Quartiles]
    sources: tuple[SourceOrder, ...]

    @property
    def carries(self) -> bool:
        """Whether a precision is carried; else the gain is a gate's."""
        return self.lengths[0].sample_size is not None

    @property
    def centres(self) -> tuple[float, ...]:
        """The bins' geometric middles, positions."""
        return tuple(sqrt(first * last) for first, last in self.bins)

    def plain(self) -> dict[str, Any]:
        """Every number of the figures, JSON-able."""
        names = ("name", "cell", "seed", "task", "variant", "train_length")
        tau = {name: spread.plain() for name, spread in self.tau.items()}
        return {
            **{name: getattr(self, name) for name in names},
            "unit": "tokens",
            "layers": [self._plain_layer(layer) for layer in range(len(self.layers))],
            **({"tau": tau} if tau else {}),
            **({"sources": [order.plain() for order in self.sources]} if self.sources else {}),
        }

    def _plain_layer(self, layer: int) -> dict[str, Any]:
        look = self.layers[layer]
        found: dict[str, Any] = {"layer": layer, "lengths": [_plain_length(at, layer) for at in self.lengths]}
        if self.slopes:
            found["gain_by_doubling"] = {place: self.slopes[place][layer].plain() for place in (ASKED, ALL)}
        found["by_position"] = [
            {"first": first, "last": last, **_without_none(gain=gain, sample_size=size, heads=heads)}
            for (first, last), gain, size, heads in zip(
                self.bins, look.gain, look.sample_size or [None] * len(self.bins), _by_bin(look, self.bins), strict=True
            )
        ]
        sizes = look.answer_size or [None] * len(self.answers)
        found[f"by_{self.answer_place}"] = [
            {self.answer_place: place, "questions": count, **_without_none(gain=gain, sample_size=size)}
            for (place, count), gain, size in zip(self.answers, look.answer_gain, sizes, strict=True)
        ]
        if look.heads:
            found["heads"] = [head.plain() for head in look.heads]
        if look.precision:
            found["precision"] = {
                kind: {name: {"before": a.plain(), "observed": b.plain()} for name, (a, b) in spreads.items()}
                for kind, spreads in look.precision.items()
            }
        return found


@dataclass(frozen=True)
class Comparison:
    """Several runs' traces, and the folder that figures and numbers of all of them are in."""

    folder: Path
    runs: tuple[RunTrace, ...]

    def plain(self) -> dict[str, Any]:
        """Every number of the figures, JSON-able."""
        return {"runs": [run.plain() for run in self.runs]}

    def lines(self) -> list[str]:
        """What a table can't hold: for each run whether it orders the sources."""
        several = len(self.runs) > 1
        return [f"{run.name}: {order}" if several else str(order) for run in self.runs for order in run.sources]

    def __rich__(self) -> Table:
        """A row a run and layer: the gain where answers are asked, what a doubling adds, and sample sizes."""
        from rich.table import Table

        run = self.runs[0]
        table = Table(
            title=f"{run.task} {run.variant}: gain and sample size n where an answer is asked, 95 % intervals"
        )
        table.add_column("model", overflow="fold")
        ratios = [f"{at.length / run.train_length:g}x" for at in run.lengths]
        table.add_column("layer", justify="right")
        for title in (
            *(f"gain\n{ratio}" for ratio in ratios),
            "asked:\na doubling adds",
            "everywhere:\na doubling adds",
        ):
            table.add_column(title, justify="right", no_wrap=True)
        for ratio in ratios:
            table.add_column(f"n\n{ratio}", justify="right", no_wrap=True)
        for run in self.runs:
            for layer in range(len(run.layers)):
                gains = [f"{at.gain[ASKED][layer].value:.3f}" for at in run.lengths]
                slopes = [_signed(run.slopes[place][layer]) if run.slopes else "" for place in (ASKED, ALL)]
                sizes = [f"{at.sample_size[ASKED][layer].value:.3g}" if at.sample_size else "" for at in run.lengths]
                table.add_row(run.name if layer == 0 else "", str(layer), *gains, *slopes, *sizes)
        return table


def draw_precision(
    paths: Sequence[Path],
    out: Path | None = None,
    *,
    lengths: Sequence[str] | None = None,
    samples: int = 32,
    variant: str | None = None,
    device: str = "auto",
) -> Comparison:
    """Trace runs (`trace_runs`) and draw them: figures and `precision.json` in `out`, what is of one run alone in a
    folder of its own where there are several.

    out: None for RUN/precision, or precision/ where there are several runs.
    """
    runs = trace_runs(paths, lengths=lengths, samples=samples, variant=variant, device=device)
    folder = out or (paths[0] / "precision" if len(paths) == 1 else Path("precision"))
    for path, run in zip(paths, runs, strict=True):
        draw_run(run, folder if len(paths) == 1 else folder / path.resolve().name)
    draw_comparison(runs, folder)
    found = Comparison(folder, runs)
    atomic_write_json(folder / "precision.json", found.plain())
    return found


def trace_runs(
    paths: Sequence[Path],
    *,
    lengths: Sequence[str] | None = None,
    samples: int = 32,
    variant: str | None = None,
    device: str = "auto",
) -> tuple[RunTrace, ...]:
    """Trace the runs in these folders, each with its own task and samples.

    lengths: of contexts, multiples of the training length (2x) or tokens; samples: for each length; variant: of the
    task, None for its first. Raises UserError on a folder without a run, a run without BFT or a gate, runs of several
    tasks, and on what the task doesn't have.
    """
    if samples < 2:
        raise UserError(f"--samples {samples}: an interval needs 2 at least")
    where = resolve_device(device)
    opened = [_open(path) for path in paths]
    configs = [config for config, _ in opened]
    _check_alike(paths, configs)
    cells = [_cells(config, lengths, variant) for config in configs]
    return tuple(
        trace_run(config, checkpoint.model(device=where), asked, samples, name)
        for (config, checkpoint), asked, name in zip(opened, cells, _names(paths, configs), strict=True)
    )


def trace_run(
    config: RunConfig, model: LanguageModel, cells: Sequence[Cell], samples: int, name: str | None = None
) -> RunTrace:
    """Trace a model in evaluation mode on `samples` of the task's own test samples a length, spread over its cells."""
    task = make_task(config.task)
    by_length: dict[int, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_length[cell.shape.length].append(cell)
    tallies = []
    with matmul_dtype(config.training.dtype, model.embedding.weight.device.type):
        for length in sorted(by_length):
            tally = _Tally(task, length, whole=length == max(by_length))
            for cell, batch in _batches(task, config, by_length[length], samples):
                tokens = torch.from_numpy(batch.tokens).to(model.embedding.weight.device)
                tally.add(cell, batch, model.trace(tokens))
            tallies.append(tally)
    last = tallies[-1]
    tau = _initial_precision(model, task)
    layers = last.layers(model)
    gains = [{place: tally.samples("gain", place) for place in (ASKED, ALL)} for tally in tallies]
    return RunTrace(
        name=name or config.model.cell,
        cell=config.model.cell,
        seed=config.seed,
        task=task.name,
        variant=cells[0].variant,
        train_length=config.task.train_length,
        lengths=tuple(tally.at_length() for tally in tallies),
        slopes=_slopes([tally.length for tally in tallies], gains),
        bins=tuple(position_bins(last.length)),
        answer_place=last.answer_place,
        answers=tuple((place, count) for place, (count, *_) in sorted(last.answers.items())),
        layers=layers,
        tau={kind: Quartiles.of(tau[ids.start : ids.stop]) for kind, ids in task.token_classes().items() if tau.size},
        sources=tuple(_source_orders(task, tau, layers)),
    )


def sample_sizes(log_decay: Float64) -> Float64:
    """n of equal writes with these log decays [T, ...], by the module's recurrence; [T, ...]."""
    S = D = np.zeros(log_decay.shape[1:])
    found = np.empty_like(log_decay)
    for t, g in enumerate(log_decay):
        S, D = np.exp(g) * S + 1, np.exp(2 * g) * D + 1
        found[t] = S * S / D
    return found


def limit_of(timescale: float, taper: float, position: int) -> float:
    """What n tends to at `position` for a head whose timescale there is so long, tokens, and grows with t^taper."""
    if taper > 1 - 1e-3:
        a = position / timescale
        return position * (2 * a + 1) / (a + 1) ** 2
    return 1 / tanh(1 / (2 * timescale))


def position_bins(length: int) -> list[tuple[int, int]]:
    """Positions 1 .. length in half octaves that end at powers of two: first and last position of each."""
    ends = sorted({round(2 ** (k / 2)) for k in range(2 * length.bit_length())})
    ends = [*(end for end in ends if end < length), length]
    return [(before + 1, end) for before, end in zip([0, *ends], ends, strict=False)]


def kendall(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Kendall's tau-b of pairs (x, y); None where all x or all y are the same."""
    signs = [np.sign(np.subtract.outer(np.asarray(v, dtype=np.float64), v)) for v in (x, y)]
    scale = sqrt(float((signs[0] ** 2).sum() * (signs[1] ** 2).sum()))
    return float((signs[0] * signs[1]).sum()) / scale if scale else None


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's rank correlation of pairs (x, y), equal ones sharing their mean rank; None where all are the same."""
    ranks = [np.sign(np.subtract.outer(np.asarray(v, dtype=np.float64), v)).sum(1) for v in (x, y)]  # up to a constant
    scale = sqrt(float((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum()))
    return float((ranks[0] * ranks[1]).sum()) / scale if scale else None


class _Tally:
    """What the samples of one length have shown. whole: keep what is drawn of the longest context, too."""

    def __init__(self, task: Task[Any, Any, Any], length: int, *, whole: bool) -> None:
        self.task, self.length, self.whole = task, length, whole
        self.rows = 0
        self.answer_place = "distance"
        self.answers: dict[float, list[Any]] = {}  # questions, sum of gains [L], sum of sample sizes [L] or None
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

    def at_length(self) -> AtLength:
        def estimates(name: str) -> dict[str, tuple[Estimate, ...]]:
            return {place: _estimates(self.samples(name, place), self.length) for place in (ASKED, ALL)}

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
            answer_gain=tuple(float(gain[number]) / count for count, gain, _ in answers),
            sample_size=_binned(sums["size"][number].mean(-1), bins) if sized else None,
            answer_size=tuple(float(size[number]) / count for count, _, size in answers) if sized else None,
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
            timescale = -1 / float(decay[bins[-1][0] - 1 :, head].mean())
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
            known = self.answers.setdefault(float(place), [0, 0.0, 0.0])
            known[0] += int(here.sum())
            known[1] = known[1] + gain[:, asked][:, here].sum(1)
            if size is not None:
                known[2] = known[2] + size[:, asked][:, here].sum(1)


def _open(path: Path) -> tuple[RunConfig, Checkpoint]:
    """A run that has something to draw, and its newest checkpoint."""
    checkpoint = find_checkpoint(path)
    config = run_config_of(checkpoint)
    if config is None:
        raise UserError(
            f"{path} is a checkpoint without its run, whose task and samples are needed: give a run's folder"
        )
    config = config.model_copy(update={"model": checkpoint.config})
    if config.model.bft is None:
        command = get_task(config.task.name).command or config.task.name
        post = " --post" if config.model.post is not None else ""
        raise UserError(
            f"{path}: {config.model.cell} has neither BFT nor a gate, so no gain or precision; train one with --bft: "
            f"bench {command} --model {config.model.name}{post} --bft"
        )
    return config, checkpoint


def _check_alike(paths: Sequence[Path], runs: Sequence[RunConfig]) -> None:
    for path, run in zip(paths, runs, strict=True):
        if run.task.name != runs[0].task.name:
            raise UserError(
                f"{path} is of task {run.task.name}, {paths[0]} of {runs[0].task.name}: draw each task alone"
            )
    folders = [path.resolve().name for path in paths]
    if len(set(folders)) < len(folders):
        raise UserError(f"two of the runs are named {max(folders, key=folders.count)}; give each once, or rename one")


def _names(paths: Sequence[Path], runs: Sequence[RunConfig]) -> list[str]:
    """The models' names; with the seed, or the run's hash where that isn't enough, to tell equal ones apart."""
    cells = [run.model.cell for run in runs]
    seeds = [f"{run.model.cell}, seed {run.seed}" for run in runs]
    hashes = [
        f"{run.model.cell}, {path.resolve().name.rpartition('-')[2]}" for path, run in zip(paths, runs, strict=True)
    ]
    return [
        cell if cells.count(cell) == 1 else seed if seeds.count(seed) == 1 else by_hash
        for cell, seed, by_hash in zip(cells, seeds, hashes, strict=True)
    ]


def _cells(run: RunConfig, lengths: Sequence[str] | None, variant: str | None) -> list[Cell]:
    """The cells of one variant at these lengths, or those that the evaluation lists one by one."""
    evaluation = run.evaluation
    if evaluation.uses_lengths:
        asked = {"lengths": list(lengths or LENGTHS), **({} if variant is None else {"variants": [variant]})}
        evaluation = parse(type(evaluation), evaluation.plain() | asked, "evaluation")
    elif lengths is not None:
        raise UserError("--eval-lengths: evaluation.pairs of this run names its cells one by one; leave it out")
    cells = evaluation_cells(make_task(run.task), evaluation, run.task.train_length)
    found = list(dict.fromkeys(cell.variant for cell in cells))
    if variant is not None and variant not in found:
        raise unknown("variant", variant, found)
    return [cell for cell in cells if cell.variant == (variant or found[0])]


def _batches(
    task: Task[Any, Any, Any], config: RunConfig, cells: Sequence[Cell], samples: int
) -> Iterator[tuple[Cell, Batch]]:
    """The first samples of each cell, as an evaluation asks them, `samples` in all or a few more."""
    each = -(-samples // len(cells))
    for cell in cells:
        size = max(1, config.batch_tokens // cell.shape.length)
        for first in range(0, each, size):
            indices = np.arange(first, min(first + size, each))
            yield cell, task.batch(cell.shape, "test", config.evaluation.seed, indices)


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


def _source_classes(task: MqarNoisy) -> list[str]:
    """The classes of the source tokens, in order: token 1 is the first source."""
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
    return ((rates[0] / rates[1]).log() / log(length)).tolist() if length > 1 else [0.0] * heads


def _stacked(traces: Sequence[LayerTrace], name: str) -> Any:
    """A quantity of all layers, float64 [L, B, T, ...]; None where the residuals note none."""
    values = [getattr(trace, name) for trace in traces]
    return None if values[0] is None else torch.stack(values).double().cpu().numpy()


def _binned(values: Float64, bins: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    return tuple(float(values[first - 1 : last].mean()) for first, last in bins)


def _redrawn(values: Float64, length: int) -> Float64:
    """Means over samples drawn again with replacement, [_RESAMPLES, L], of values [n, L]."""
    n = len(values)
    chosen = Draws(key64("precision", length), np.arange(_RESAMPLES)).integers(0, n, n)
    rows = np.arange(_RESAMPLES)[:, None]
    counts = np.bincount((chosen + n * rows).ravel(), minlength=n * _RESAMPLES).reshape(_RESAMPLES, n)
    means: Float64 = counts @ values / n
    return means


def _estimates(values: Float64, length: int) -> tuple[Estimate, ...]:
    return _with_intervals(values.mean(0), _redrawn(values, length))


def _slopes(lengths: Sequence[int], values: Sequence[dict[str, Float64]]) -> dict[str, tuple[Estimate, ...]]:
    """By place what a doubling of the length adds: least squares over the lengths' means against log2 length."""
    if len(lengths) < 2:
        return {}
    x = np.log2(lengths) - np.log2(lengths).mean()
    weights = x / (x**2).sum()
    found = {}
    for place in (ASKED, ALL):
        means = np.stack([at[place].mean(0) for at in values])
        redrawn = np.stack([_redrawn(at[place], length) for at, length in zip(values, lengths, strict=True)])
        found[place] = _with_intervals(weights @ means, np.tensordot(weights, redrawn, axes=1))
    return found


def _with_intervals(values: Float64, redrawn: Float64) -> tuple[Estimate, ...]:
    low, high = np.quantile(redrawn, [0.025, 0.975], axis=0)
    return tuple(Estimate(float(v), (float(a), float(b))) for v, a, b in zip(values, low, high, strict=True))


def _plain_length(at: AtLength, layer: int) -> dict[str, Any]:
    places = {}
    for place in (ASKED, ALL):
        size = at.sample_size[place][layer].plain() if at.sample_size else None
        places[place] = _without_none(gain=at.gain[place][layer].plain(), sample_size=size)
    return {"length": at.length, "samples": at.samples, **places}


def _by_bin(look: LayerDetail, bins: Sequence[tuple[int, int]]) -> list[list[dict[str, Any]] | None]:
    """For each bin each head's sample size."""
    if not look.heads:
        return [None] * len(bins)
    return [
        [
            _without_none(head=head.head, sample_size=head.measured[k], theory=head.theory[k] if head.theory else None)
            for head in look.heads
        ]
        for k in range(len(bins))
    ]


def _without_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _signed(estimate: Estimate) -> str:
    return f"{estimate.value:+.4f} [{estimate.interval[0]:+.4f}, {estimate.interval[1]:+.4f}]"
