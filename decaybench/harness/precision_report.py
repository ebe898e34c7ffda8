"""What `bench precision` found: gains, sample sizes and precisions of runs as data, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from decaybench.results.resampling import Estimate
from decaybench.results.statistics import kendall, spearman

if TYPE_CHECKING:
    from rich.table import Table

ASKED, ALL = "asked", "all"  # the places where an answer is asked, and all places
TOKENS, BOUND = "token", "bound value"  # kinds of places: by what a token is; a value, by the source that bound it


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
    decays, as are the rest. timescale: -1 / mean log decay over the last bin, tokens, infinite where nothing decays.
    taper: alpha, the power of t with which the timescale at rest grows. limit: what n tends to at the last position
    (harness/sample_size.py).
    """

    head: int
    measured: tuple[float, ...]
    theory: tuple[float, ...] | None = None
    timescale: float | None = None
    taper: float | None = None
    limit: float | None = None

    def plain(self) -> dict[str, Any]:
        """JSON-able, but for the curves; an infinite timescale is None."""
        found = _without_none(head=self.head, timescale=self.timescale, taper=self.taper, limit=self.limit)
        return found | ({"timescale": None} if self.timescale == inf else {})


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
    where all of one are the same. In words sources of one reliability may come in any order; tau-b counts them as ties.
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
        sources = sorted(zip(self.reliability, self.precision, strict=True), reverse=True)
        shown = zip(sources, _apart([precision for _, precision in sources]), strict=True)
        listed = ", ".join(f"{text} for {r:g}" for (r, _), text in shown).replace(" for ", " for reliability ", 1)
        differences = [p - q for (r, p), (s, q) in combinations(sources, 2) if r > s]
        if not differences:
            said = "sources of one reliability have no order"
        elif all(difference > 0 for difference in differences):
            said = "ordered by reliability"
        elif all(difference < 0 for difference in differences):
            said = "ordered the other way round"
        else:
            said = "not ordered by reliability"
        if self.kendall is None or self.spearman is None:
            return f"{self.what}: {listed}: {said}"
        return f"{self.what}: {listed}: {said} (Kendall {self.kendall:+.2f}, Spearman {self.spearman:+.2f})"


@dataclass(frozen=True)
class TauEffect:
    """What becomes of the accuracy when some tokens' tau are made equal (harness/tau_effect.py).

    what: `sources` or `tokens`, all of them. length: tokens; accuracy: as learned, 0..1; difference: made equal, minus
    as learned.
    """

    what: str
    length: int
    samples: int
    accuracy: float
    difference: Estimate

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        found = {name: getattr(self, name) for name in ("what", "length", "samples", "accuracy")}
        return {**found, "difference": self.difference.plain()}

    def __str__(self) -> str:
        change = "no answer changes" if self.difference.interval == (0.0, 0.0) else _signed(self.difference)
        return f"all {self.what}' tau made equal: accuracy {self.accuracy:.3f} at {self.length} tokens, then {change}"


@dataclass(frozen=True)
class RunTrace:
    """What a run's model does. name: how figures call it. longest_trained: the longest sequence trained on, tokens;
    label_noise: the share of wrong training labels; both None where none is known. slopes: what a doubling of the
    context adds to the gain, an estimate a layer by place; empty with one length. bins: the bins of positions, first
    and last. answers: where answers lie, as `depth` (0..1) or `distance` (an octave's lower end), and how many
    questions are asked about each. tau: lambda of the embedding by class of token ids; empty where none is learned.
    reliability: of each source of mqar-noisy, by the class of its token; empty for other tasks. tau_effects: what its
    differences do; empty where tau isn't a token's own.
    """

    name: str
    cell: str
    seed: int
    task: str
    variant: str
    train_length: int
    longest_trained: int | None
    label_noise: float | None
    lengths: tuple[AtLength, ...]
    slopes: dict[str, tuple[Estimate, ...]]
    bins: tuple[tuple[int, int], ...]
    answer_place: str
    answers: tuple[tuple[float, int], ...]
    layers: tuple[LayerDetail, ...]
    tau: dict[str, Quartiles]
    reliability: dict[str, float]
    sources: tuple[SourceOrder, ...]
    tau_effects: tuple[TauEffect, ...] = ()

    @property
    def carries(self) -> bool:
        """Whether a precision is carried; else the gain is a gate's."""
        return self.lengths[0].sample_size is not None

    @property
    def fell_short(self) -> bool:
        """Whether training ended before a sequence of the training length."""
        return self.longest_trained is not None and self.longest_trained < self.train_length

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
            **_without_none(longest_trained=self.longest_trained, label_noise=self.label_noise),
            "unit": "tokens",
            "layers": [self._plain_layer(layer) for layer in range(len(self.layers))],
            **({"tau": tau} if tau else {}),
            **({"sources": [order.plain() for order in self.sources]} if self.sources else {}),
            **({"tau_effects": [effect.plain() for effect in self.tau_effects]} if self.tau_effects else {}),
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
        """What a table can't hold: for each run whether it orders the sources, and whether tau matters."""
        several = len(self.runs) > 1
        found = [(run.name, said) for run in self.runs for said in (*run.sources, *run.tau_effects)]
        return [f"{name}: {said}" if several else str(said) for name, said in found]

    def __rich__(self) -> Table:
        """A row a run and layer: the gain where answers are asked, what a doubling adds, and sample sizes.

        What none of the runs has is no column: slopes with one length, sample sizes of gates.
        """
        from rich.table import Table

        first = self.runs[0]
        sized, sloped = any(run.carries for run in self.runs), bool(first.slopes)
        what = "gain and sample size n" if sized else "gain"
        title = f"{first.task} {first.variant}: {what} where an answer is asked"
        table = Table(title=title, title_justify="left", caption=self._caption(), caption_justify="left")
        table.add_column("model", overflow="fold")
        table.add_column("layer", justify="right")
        ratios = [f"{at.length / first.train_length:g}x" for at in first.lengths]
        headings = [f"gain\n{ratio}" for ratio in ratios]
        headings += ["a doubling adds,\nwhere asked", "a doubling adds,\neverywhere"] if sloped else []
        headings += [f"n\n{ratio}" for ratio in ratios] if sized else []
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for run in self.runs:
            for layer in range(len(run.layers)):
                row = [f"{at.gain[ASKED][layer].value:.3f}" for at in run.lengths]
                row += [_signed(run.slopes[place][layer]) for place in (ASKED, ALL)] if sloped else []
                sizes = [f"{at.sample_size[ASKED][layer].value:.3g}" if at.sample_size else "" for at in run.lengths]
                table.add_row(run.name if layer == 0 else "", str(layer), *row, *(sizes if sized else []))
        return table

    def _caption(self) -> str:
        """What the numbers are, and what training fell short of."""
        first = self.runs[0]
        counts = sorted({at.samples for run in self.runs for at in run.lengths})
        samples = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        said = [f"means over {samples} samples a length"]
        if first.slopes:
            said.append("in brackets: 95 % intervals over samples")
        said.append(f"1x: {first.train_length} tokens, the training length")
        short = {run.name: run.longest_trained for run in self.runs if run.fell_short}
        if short:
            listed = ", ".join(f"{name} ({longest})" for name, longest in short.items())
            said.append(f"trained on shorter sequences only: {listed}")
        return "; ".join(said)


def _apart(values: Sequence[float]) -> list[str]:
    """Numbers to three digits, or as many as it takes to see which is larger, at most the 9 of a float32."""
    for digits in range(3, 10):
        shown = [f"{value:.{digits}g}" for value in values]
        if len(set(shown)) == len(set(values)):
            break
    return shown


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
    value, low, high = (_change(number) for number in (estimate.value, *estimate.interval))
    return f"{value} [{low}, {high}]"


def _change(number: float) -> str:
    """With a sign, but what rounds to 0."""
    shown = f"{number:+.4f}"
    return shown if float(shown) else "0.0000"
