"""Learned decay spectra: the timescales of every layer at rest, at the start and after training.

A timescale is tau = -1 / log_decay in tokens, with the input's part of the decay left out. At position t PoST
multiplies it by t^alpha, so a spectrum is given at several positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from decaybench.core.errors import UserError
from decaybench.core.files import atomic_write_json
from decaybench.harness.origin import model_of
from decaybench.harness.plots import draw_timescales
from decaybench.models.language_model import LanguageModel, build_model
from decaybench.results.record import LayerSpectrum, SpectrumAt, SpectrumInfo

if TYPE_CHECKING:
    from rich.table import Table

Timescales = dict[int, list[float]]  # by position, one number a head, in the order of heads


@dataclass(frozen=True)
class LayerTimescales:
    """A layer's timescales in tokens, by position; heads in the model's order."""

    layer: int
    at_start: Timescales
    after: Timescales


@dataclass(frozen=True)
class Spectrum:
    """A model's spectrum. train_length: T in tokens, None where it isn't known."""

    cell: str
    train_length: int | None
    positions: tuple[int, ...]
    layers: tuple[LayerTimescales, ...]

    def info(self) -> SpectrumInfo | None:
        """The summary that a record holds; None for a model without decays."""
        if not self.layers:
            return None
        return SpectrumInfo(
            layers=tuple(
                LayerSpectrum(layer=layer.layer, at_start=_summary(layer.at_start), after=_summary(layer.after))
                for layer in self.layers
            )
        )

    def position_labels(self) -> list[str]:
        """How figures and tables call the positions: t = 1, T, 4T."""
        T = self.train_length
        names = {} if T is None else {T: "T"} | {n * T: f"{n}T" for n in range(2, 33)}
        return [f"t = {names.get(t, t)}" for t in self.positions]

    def plain(self) -> dict[str, Any]:
        """Every number of the figure, JSON-able."""

        def listed(timescales: Timescales) -> list[dict[str, Any]]:
            return [{"position": position, "timescales": taus} for position, taus in timescales.items()]

        layers = [
            {"layer": layer.layer, "at_start": listed(layer.at_start), "after": listed(layer.after)}
            for layer in self.layers
        ]
        return {"model": self.cell, "train_length": self.train_length, "unit": "tokens", "layers": layers}

    def __rich__(self) -> Table:
        """A row for each layer and position: slowest, median and fastest timescale at the start and after."""
        from rich.table import Table

        table = Table(title=f"{self.cell}: timescales at rest, tokens")
        for title in ("layer", "position"):
            table.add_column(title, justify="right", no_wrap=True)
        for title in (f"{when}\n{name}" for when in ("start", "trained") for name in ("slowest", "median", "fastest")):
            table.add_column(title, justify="right")
        labels = self.position_labels()
        for layer in self.layers:
            rows = zip(labels, _summary(layer.at_start), _summary(layer.after), strict=True)
            for label, start, after in rows:
                numbers = [_tokens(tau) for at in (start, after) for tau in (at.slowest, at.median, at.fastest)]
                table.add_row(str(layer.layer), label, *numbers)
        return table


def model_spectrum(model: LanguageModel, seed: int, train_length: int | None) -> Spectrum:
    """The spectrum of a model beside that of its initial values (drawn again from `seed`)."""
    base = train_length or 1024
    positions = (1, base, 4 * base)
    start = build_model(model.config, seed)
    layers = []
    for number, (block, initial) in enumerate(zip(model.blocks, start.blocks, strict=True)):
        after = {t: _timescales(block, t) for t in positions}
        before = {t: _timescales(initial, t) for t in positions}
        if after[1] is not None:
            layers.append(LayerTimescales(number, before, after))  # type: ignore[arg-type]
    return Spectrum(model.config.cell, train_length, positions, tuple(layers))


def spectrum(path: str | Path) -> Spectrum:
    """The spectrum of a run's or a checkpoint's model.

    Raises UserError where there is no checkpoint, or where the model has no decays.
    """
    checkpoint, run = model_of(Path(path))
    trained_here = run is not None and run.checkpoint is None
    train_length = run.task.train_length if run and trained_here else checkpoint.train_length
    found = model_spectrum(checkpoint.model(), int(checkpoint.facts["seed"]), train_length)
    if not found.layers:
        raise UserError(f"{found.cell} has no decays, so no spectrum")
    return found


def draw_spectra(paths: Sequence[Path], out: Path | None = None) -> list[tuple[Path, Spectrum]]:
    """Draw the spectrum of each run: `timescales.png`, `.svg` and `spectrum.json` in its folder `spectrum/`.

    out: another folder, with one folder a run in it where there are several. Returns each folder and what was drawn.
    """
    names = [path.resolve().name for path in paths]
    if out is not None and len(set(names)) < len(names):
        raise UserError(f"--out {out}: two of the runs are named {max(names, key=names.count)}; draw them one by one")
    drawn = []
    for path in paths:
        folder = path / "spectrum" if out is None else out if len(paths) == 1 else out / path.name
        found = spectrum(path)
        draw_timescales(found, folder)
        atomic_write_json(folder / "spectrum.json", found.plain())
        drawn.append((folder, found))
    return drawn


@torch.no_grad()
def _timescales(block: torch.nn.Module, position: int) -> list[float] | None:
    found = block.mixer.timescales(position)  # type: ignore[operator, union-attr]
    return None if found is None else [float(tau) for tau in found]


def _summary(timescales: Timescales) -> tuple[SpectrumAt, ...]:
    summary = []
    for position, taus in timescales.items():
        tau = torch.tensor(taus, dtype=torch.float64).sort(descending=True).values
        gaps = -tau.log().diff()
        summary.append(
            SpectrumAt(
                position=position,
                slowest=float(tau[0]),
                median=_median(tau),
                fastest=float(tau[-1]),
                smallest_log_gap=float(gaps.min()) if len(gaps) else None,
                median_log_gap=_median(gaps) if len(gaps) else None,
            )
        )
    return tuple(summary)


def _tokens(tau: float) -> str:
    return f"{tau:.3g}" if tau < 1000 else f"{tau:.0f}"


def _median(values: torch.Tensor) -> float:
    return float(values.quantile(0.5))
