"""What `bench spectrum` found out about runs: as data, and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from decaybench.harness.drawing import evenly
from decaybench.harness.spectrum_laws import Gaps
from decaybench.harness.spectrum_rest import LayerTimescales, Spectrum, Timescales
from decaybench.harness.spectrum_tally import MeasuredLayer

if TYPE_CHECKING:
    from rich.table import Table

Float64 = NDArray[np.float64]

START, TRAINED = "at_start", "after"
WHEN = (START, TRAINED)

_MOST_LAYERS = 6  # of a table


@dataclass(frozen=True)
class Counts:
    """Of one layer's channels at rest, how many. useful: have 1 <= tau <= t, by position t; graded: keep 5 to 95 % of
    token j at t, by j and t.
    """

    useful: dict[int, int]
    graded: dict[int, dict[int, int]]

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        useful = [{"position": t, "channels": count} for t, count in self.useful.items()]
        graded = [
            {"token": j, "position": t, "channels": count} for j, at in self.graded.items() for t, count in at.items()
        ]
        return {"useful": useful, "graded": graded}


@dataclass(frozen=True)
class LayerNumbers:
    """One layer. gaps, counts: by when, START or TRAINED, gaps by position too; order_gaps: of PoST's ordered parameter
    alone, empty without. measured: None where nothing was read.
    """

    rest: LayerTimescales
    gaps: dict[str, dict[int, Gaps]]
    order_gaps: dict[str, dict[int, Gaps]]
    counts: dict[str, Counts]
    measured: MeasuredLayer | None

    @property
    def shows_order(self) -> bool:
        """Whether the ordered parameter says something else than the timescales at rest."""
        return any(
            abs(gaps.smallest - self.gaps[when][t].smallest) > 1e-3 * gaps.even
            for when, found in self.order_gaps.items()
            for t, gaps in found.items()
            if t in self.gaps[when]
        )

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        rest, found = self.rest, {"layer": self.rest.layer, "unit": self.rest.unit, "count": self.rest.channels}
        order = {START: rest.order_at_start, TRAINED: rest.order_after}
        for when, taus in ((START, rest.at_start), (TRAINED, rest.after)):
            found[when] = _listed(taus, self.gaps[when])
            if (speeds := order[when]) is not None:
                found[f"order_{when}"] = _listed(speeds, self.order_gaps.get(when, {}), "log_speeds")
            found[f"counts_{when}"] = self.counts[when].plain()
        if self.measured is not None:
            found["measured"] = [{"position": t, **at.plain()} for t, at in sorted(self.measured.at.items())]
            found["kept"] = [
                {"token": j, "position": t, **kept.plain()} for (j, t), kept in sorted(self.measured.kept.items())
            ]
        return found


@dataclass(frozen=True)
class Line:
    """What one head or channel keeps of token 1 at rest. timescale: at t = T, tokens; kept: by position, 0..1."""

    layer: int
    channel: int
    timescale: float
    kept: dict[int, float]

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        kept = [{"position": t, "kept": share} for t, share in self.kept.items()]
        return {"layer": self.layer, "channel": self.channel, "timescale": self.timescale, "token": 1, "kept": kept}


@dataclass(frozen=True)
class Densities:
    """Share of all layers' timescales at t = T an octave. octaves: log2 tokens; measured: None where nothing was."""

    octaves: Float64
    at_start: Float64
    after: Float64
    measured: Float64 | None

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        found = {"octaves": self.octaves, START: self.at_start, TRAINED: self.after, "measured": self.measured}
        return {name: values.tolist() for name, values in found.items() if values is not None}


@dataclass(frozen=True)
class Read:
    """What was read to measure decays. what: in words, `mqar persist`; length: of a sample, tokens; documents: in all
    samples.
    """

    what: str
    samples: int
    length: int
    tokens: int
    documents: int

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "of": self.what,
            "samples": self.samples,
            "length": self.length,
            "tokens": self.tokens,
            "documents": self.documents,
        }

    def __str__(self) -> str:
        return f"{self.samples} samples of {self.what}, {self.length} tokens each"


@dataclass(frozen=True)
class RunSpectrum:
    """A model's spectrum. name: how figures call it; read: None where nothing was, for the reason in `remark`."""

    name: str
    seed: int
    rest: Spectrum
    layers: tuple[LayerNumbers, ...]
    lines: tuple[Line, ...]
    density: Densities
    read: Read | None
    remark: str | None = None

    @property
    def measured_layers(self) -> tuple[LayerNumbers, ...]:
        """Those whose decays were measured."""
        return tuple(layer for layer in self.layers if layer.measured is not None)

    def useful_shares(self, when: str) -> dict[int, float]:
        """Share of all layers' channels with 1 <= tau <= t at rest, by t."""
        return _shares([(layer, layer.counts[when].useful) for layer in self.layers])

    def graded_shares(self, when: str, token: int) -> dict[int, float]:
        """Share of all layers' channels that at rest keep 5 to 95 % of a token at t, by t."""
        return _shares([(layer, layer.counts[when].graded.get(token, {})) for layer in self.layers])

    def measured_useful(self) -> dict[int, float]:
        """As `useful_shares`, of what was measured."""
        return _shares([(layer, {t: at.useful for t, at in known.at.items()}) for layer, known in self._measured()])

    def measured_graded(self, token: int) -> dict[int, float]:
        """As `graded_shares`, of what was measured."""
        return _shares(
            [
                (layer, {t: kept.graded for (j, t), kept in known.kept.items() if j == token})
                for layer, known in self._measured()
            ]
        )

    def plain(self) -> dict[str, Any]:
        """Every number of the figures, JSON-able."""
        return {
            "name": self.name,
            "model": self.rest.cell,
            "seed": self.seed,
            "train_length": self.rest.train_length,
            "unit": "tokens",
            "measured_on": None if self.read is None else self.read.plain(),
            "layers": [layer.plain() for layer in self.layers],
            "density": {"position": self.rest.length, **self.density.plain()},
            "retention": [line.plain() for line in self.lines],
        }

    def __rich__(self) -> Table:
        return timescale_table([self])

    def _measured(self) -> list[tuple[LayerNumbers, MeasuredLayer]]:
        return [(layer, layer.measured) for layer in self.layers if layer.measured is not None]


@dataclass(frozen=True)
class Spectra:
    """Several runs' spectra, and the folder that figures and numbers are in."""

    folder: Path
    runs: tuple[RunSpectrum, ...]

    def plain(self) -> dict[str, Any]:
        """Every number of the figures, JSON-able."""
        return {"runs": [run.plain() for run in self.runs]}

    def tables(self) -> Iterator[Table]:
        """Timescales; their gaps; then what they are good for."""
        yield timescale_table(self.runs)
        yield gap_table(self.runs)
        yield channel_table(self.runs)

    def remarks(self) -> list[str]:
        """What a table can't hold: what was read, or why nothing was."""
        said = [(run.name, run.remark or f"measured on {run.read}") for run in self.runs]
        if len({text for _, text in said}) == 1:
            return [said[0][1]]
        return [f"{name}: {text}" for name, text in said]


def titled(runs: Sequence[RunSpectrum], title: str) -> str:
    """A title with the run's name before it where there is one run alone."""
    return f"{runs[0].name}: {title}" if len(runs) == 1 else title


def timescale_table(runs: Sequence[RunSpectrum]) -> Table:
    """Slowest, median and fastest timescale by layer and position: a row for the start, after training, and measured.

    Of models with many layers 6, evenly chosen; one position where it changes nothing, measured at t = T.
    """
    measured = any(run.read is not None for run in runs)
    title = f"timescales at rest{' and measured' if measured else ''}, tokens"
    table = _layer_table(runs, title, ("position", ""), ("slowest", "median", "fastest"))
    for run in runs:
        for layer in evenly(run.layers, _MOST_LAYERS):
            rest, known = layer.rest, layer.measured.at if layer.measured else {}
            for position in run.rest.positions if run.rest.scales else [run.rest.length]:
                sets: dict[str, Sequence[float] | Float64] = {
                    "start": rest.at_start[position],
                    "trained": rest.after[position],
                }
                if position in known:
                    sets["measured"] = known[position].median
                at = f"t = {run.rest.position_name(position)}" if run.rest.scales else "every t"
                for name, taus in sets.items():
                    numbers = [_tokens(float(of(taus))) for of in (np.max, np.median, np.min)]
                    _add_row(
                        table, run if len(runs) > 1 else None, layer, at if name == "start" else "", name, *numbers
                    )
            table.add_section()
    return table


def gap_table(runs: Sequence[RunSpectrum]) -> Table:
    """Of trained models at rest, by layer, at t = 1 and t = T: log gaps, beside those of random spectra."""
    names = ("smallest", "random", "median")
    table = _layer_table(runs, "gaps between neighbouring log timescales; trained, at rest", ("of", "position"), names)
    table.caption = "nats; random: the smallest of as many at random in the same range, its mean"
    for run in runs:
        for layer in evenly(run.layers, _MOST_LAYERS):
            first = f"{layer.rest.channels} {layer.rest.unit}s"
            for t, gaps in layer.gaps[TRAINED].items():
                if t in (1, run.rest.length):
                    numbers = [f"{gap:.2g}" for gap in (gaps.smallest, gaps.random_smallest, gaps.median)]
                    at = f"t = {run.rest.position_name(t)}"
                    _add_row(table, run if len(runs) > 1 else None, layer, first, at, *numbers)
                    first = ""
            table.add_section()
    return table


def channel_table(runs: Sequence[RunSpectrum]) -> Table:
    """Of trained models at rest, by layer and position: how many channels are useful, and graded."""
    names = ("useful", "graded")
    table = _layer_table(runs, "useful and graded channels; trained, at rest", ("of", "position"), names)
    table.caption = "useful: 1 <= tau <= t; graded: keep 5 to 95 % of token 1 at t"
    for run in runs:
        for layer in evenly(run.layers, _MOST_LAYERS):
            first, counts = f"{layer.rest.channels} {layer.rest.unit}s", layer.counts[TRAINED]
            for t in run.rest.positions[1:]:
                numbers = [str(counts.useful[t]), str(counts.graded[1][t])]
                at = f"t = {run.rest.position_name(t)}"
                _add_row(table, run if len(runs) > 1 else None, layer, first, at, *numbers)
                first = ""
            table.add_section()
    return table


def _layer_table(runs: Sequence[RunSpectrum], title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table; of several runs with a column for their names. It fits 80 columns."""
    from rich.table import Table

    table = Table(title=titled(runs, title), caption_justify="left")
    if len(runs) > 1:
        table.add_column("model", overflow="fold", min_width=5)
    table.add_column("layer", justify="right", no_wrap=True)
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _add_row(table: Table, run: RunSpectrum | None, layer: LayerNumbers, first: str, *cells: str) -> None:
    """A row whose model and layer are named where something new begins: where `first` isn't empty."""
    named = [] if run is None else [run.name if first else ""]
    table.add_row(*named, str(layer.rest.layer) if first else "", first, *cells)


def _shares(counts: Sequence[tuple[LayerNumbers, Mapping[int, float]]]) -> dict[int, float]:
    """Counts of layers by position, as shares of the channels of all these layers."""
    if not counts:
        return {}
    total = sum(layer.rest.channels for layer, _ in counts)
    return {t: sum(of[t] for _, of in counts) / total for t in sorted(counts[0][1])}


def _listed(numbers: Timescales, gaps: Mapping[int, Gaps], name: str = "timescales") -> list[dict[str, Any]]:
    return [
        {"position": t, name: values, **({"log_gaps": gaps[t].plain()} if t in gaps else {})}
        for t, values in numbers.items()
    ]


def _tokens(tau: float) -> str:
    return f"{tau:.3g}" if tau < 1000 or tau >= 1e6 else f"{tau:.0f}"
