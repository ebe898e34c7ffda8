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
        """Timescales; then what they are good for."""
        yield timescale_table(self.runs)
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
    """A row a layer and position: slowest, median and fastest timescale, at the start, after training, and measured.

    Of models with many layers 6, evenly chosen; one row where the position changes nothing, measured at t = T.
    """
    from rich.table import Table

    measured = any(run.read is not None for run in runs)
    columns = ["start", "trained", *(["measured"] if measured else [])]
    table = Table(title=titled(runs, f"timescales at rest{' and measured' if measured else ''}, tokens"))
    if len(runs) > 1:
        table.add_column("model", overflow="fold")
    for title in ("layer", "position"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in (f"{when}\n{name}" for when in columns for name in ("slowest", "median", "fastest")):
        table.add_column(title, justify="right")
    for run in runs:
        for layer in evenly(run.layers, _MOST_LAYERS):
            rest, known = layer.rest, layer.measured.at if layer.measured else {}
            for position in run.rest.positions if run.rest.scales else [run.rest.length]:
                sets: list[Sequence[float] | Float64] = [rest.at_start[position], rest.after[position]]
                if position in known:
                    sets.append(known[position].median)
                numbers = [_tokens(float(of(taus))) for taus in sets for of in (np.max, np.median, np.min)]
                label = f"t = {run.rest.position_name(position)}" if run.rest.scales else "every t"
                named = [run.name] if len(runs) > 1 else []
                table.add_row(*named, str(rest.layer), label, *numbers, *([""] * (3 * len(columns) - len(numbers))))
    return table


def channel_table(runs: Sequence[RunSpectrum]) -> Table:
    """A row a run and layer, of trained models at rest: log-gaps beside those of random spectra, and shares at t."""
    from rich.table import Table

    table = Table(
        title=titled(runs, "log gaps, and channels that are useful or graded; trained, at rest"),
        caption="smallest, median: gap between neighbouring log timescales, nats; random: the smallest of as many at "
        "random in the same range, its mean; useful: 1 <= tau <= t; graded: keep 5 to 95 % of token 1 at t",
        caption_justify="left",
    )
    if len(runs) > 1:
        table.add_column("model", overflow="fold")
    names = [f"t = {runs[0].rest.position_name(t)}" for t in runs[0].rest.positions[1:]]
    gaps_of = [f"{what}\n{name}" for name in ("t = 1", names[0]) for what in ("smallest", "random")]
    counts_of = [f"{what}\n{name}" for what in ("useful", "graded") for name in names]
    for title in ["layer", "of", *gaps_of, "median\nt = 1", *counts_of]:
        table.add_column(title, justify="right", no_wrap=True)
    for run in runs:
        for layer in evenly(run.layers, _MOST_LAYERS):
            at = layer.gaps[TRAINED]
            gaps = [gap for t in (1, run.rest.length) if t in at for gap in (at[t].smallest, at[t].random_smallest)]
            gaps += [at[1].median] if at else []
            counts, shown = layer.counts[TRAINED], run.rest.positions[1:]
            row = [str(layer.rest.layer), f"{layer.rest.channels} {layer.rest.unit}s"]
            row += [f"{gap:.2g}" for gap in gaps] or [""] * 5
            row += [str(counts.useful[t]) for t in shown] + [str(counts.graded[1][t]) for t in shown]
            table.add_row(*([run.name] if len(runs) > 1 else []), *row)
    return table


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
