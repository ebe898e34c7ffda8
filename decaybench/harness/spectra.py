"""`bench spectrum`: the decay timescales that models learned, at rest and measured while they read.

At rest everything follows from the weights. Measured is on samples of a run's own task, or on a text: harness/
spectrum_tally.py. What the numbers mean stands in harness/spectrum_laws.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decaybench.core.errors import UserError
from decaybench.core.files import atomic_write_json, make_folder
from decaybench.harness.config import RunConfig
from decaybench.harness.drawing import evenly
from decaybench.harness.environment import resolve_device
from decaybench.harness.origin import model_of, told_apart
from decaybench.harness.spectrum_laws import Gaps, cumulative_rates, density, graded, octaves_of, useful
from decaybench.harness.spectrum_plots import draw_spectrum_figures
from decaybench.harness.spectrum_reading import Asked, find_reading
from decaybench.harness.spectrum_report import (
    START,
    TRAINED,
    Counts,
    Densities,
    LayerNumbers,
    Line,
    RunSpectrum,
    Spectra,
)
from decaybench.harness.spectrum_rest import (
    CAP,
    Float64,
    LayerTimescales,
    Resting,
    Spectrum,
    Timescales,
    model_spectrum,
    resting_layers,
)
from decaybench.harness.spectrum_tally import MeasuredLayer, Tally
from decaybench.models.checkpoints import Checkpoint
from decaybench.models.language_model import build_model

LAST = 64  # times T: the last position of counts and retentions

_KEPT_AT = (1, 2, 4, 8, 16)  # times T: where retentions are measured
_FASTEST = 1 / 4  # tokens; densities begin here, or where a resting one does
_LINES = 16  # channels whose retention is drawn


def spectrum(path: str | Path, *, device: str = "auto", **asked: Any) -> RunSpectrum:
    """The spectrum of a run's or a checkpoint's model; asked: what to read, fields of `Asked`.

    Raises UserError where there is no checkpoint, where the model has no decays, or on what can't be read.
    """
    (found,) = look_at([Path(path)], Asked(**asked), device)
    return found


def draw_spectra(paths: Sequence[Path], out: Path | None = None, *, device: str = "auto", **asked: Any) -> Spectra:
    """Look at runs, and draw them side by side: figures and `spectrum.json` in `out`.

    out: None for RUN/spectrum, or spectrum/ where there are several runs. asked: as for `spectrum`.
    """
    if out is not None:
        make_folder(out)
    runs = look_at(paths, Asked(**asked), device)
    folder = out or (paths[0] / "spectrum" if len(paths) == 1 else Path("spectrum"))
    found = Spectra(folder, tuple(runs))
    draw_spectrum_figures(found.runs, folder)
    atomic_write_json(folder / "spectrum.json", found.plain())
    return found


def look_at(paths: Sequence[Path], asked: Asked, device: str = "auto") -> list[RunSpectrum]:
    """The spectra of the models in these folders. Raises UserError as `spectrum` does, and where one is given twice."""
    if asked.tokens < 0:
        raise UserError(f"--tokens {asked.tokens}: say how many to read, or 0 for timescales at rest alone")
    where = resolve_device(device)
    opened = [model_of(path) for path in paths]
    places = [path.resolve() for path in paths]
    for path, place in zip(paths, places, strict=True):
        if places.count(place) > 1:
            raise UserError(f"{path} is given twice")
    for path, (checkpoint, _) in zip(paths, opened, strict=True):
        if not resting_layers(build_model(checkpoint.config, device="meta")):
            raise UserError(f"{path}: {checkpoint.config.cell} has no decays, so no spectrum")
    cells = [checkpoint.config.cell for checkpoint, _ in opened]
    names = told_apart(cells, [checkpoint.facts["seed"] for checkpoint, _ in opened], paths)
    return [_look(name, path, *found, asked, where) for name, path, found in zip(names, paths, opened, strict=True)]


def _look(
    name: str, path: Path, checkpoint: Checkpoint, run: RunConfig | None, asked: Asked, device: str
) -> RunSpectrum:
    trained_here = run is not None and run.checkpoint is None
    train_length = run.task.train_length if run and trained_here else checkpoint.train_length
    seed = int(checkpoint.facts["seed"])
    model = checkpoint.model(device=device)
    start = build_model(model.config, seed)
    rest = model_spectrum(model, seed, train_length, start)
    reading, remark = find_reading(path, checkpoint, run, rest.length, asked)
    read, tally = None, None
    if reading is not None:
        targets = [times * rest.length for times in _KEPT_AT]
        tally = Tally(rest.positions, _sources(rest), targets, reading.samples)
        read = reading.read(model, tally)
    before, after = resting_layers(start), resting_layers(model)
    measured = tally.layers() if tally is not None else {}
    if read is not None and not measured:
        read, remark = None, f"at rest alone: {model.config.name} shows its decays to no observer"
    sums = {number: _Sums(layer, rest) for number, layer in after.items()}
    layers = tuple(
        _numbers(layer, rest, {START: _Sums(before[layer.layer], rest), TRAINED: sums[layer.layer]}, measured)
        for layer in rest.layers
    )
    return RunSpectrum(name, seed, rest, layers, tuple(_lines(rest, sums)), _densities(rest, tally), read, remark)


def _sources(rest: Spectrum) -> tuple[int, ...]:
    """The tokens j whose retention is looked at."""
    return tuple(dict.fromkeys((1, rest.length)))


def _grid(rest: Spectrum) -> list[int]:
    """The positions of counts: half octaves up to LAST times T, and the spectrum's own."""
    last = LAST * rest.length
    halves = (round(2 ** (k / 2)) for k in range(2 * last.bit_length()))
    return sorted({*(t for t in halves if t < last), *rest.positions, last})


class _Sums:
    """A layer at rest, and its rates summed up to each position of the grid."""

    def __init__(self, layer: Resting, rest: Spectrum) -> None:
        self.layer, self.rest = layer, rest
        self.sums = cumulative_rates(layer.rates, {*_grid(rest), *_sources(rest)})

    def kept(self, token: int, position: int) -> Float64:
        """What is left of a token at a position, [N]."""
        found: Float64 = np.exp(self.sums[token] - self.sums[position])
        return found

    def counts(self) -> Counts:
        grid = _grid(self.rest)
        return Counts(
            useful={t: useful(self.layer.timescales(t), t) for t in grid},
            graded={j: {t: graded(self.kept(j, t)) for t in grid if t > j} for j in _sources(self.rest)},
        )


def _numbers(
    layer: LayerTimescales, rest: Spectrum, sums: dict[str, _Sums], measured: dict[int, MeasuredLayer]
) -> LayerNumbers:
    order = {START: layer.order_at_start, TRAINED: layer.order_after}
    return LayerNumbers(
        rest=layer,
        gaps={START: _gaps(layer.at_start, log=True), TRAINED: _gaps(layer.after, log=True)},
        order_gaps={when: _gaps(speeds, log=False) for when, speeds in order.items() if speeds is not None},
        counts={when: found.counts() for when, found in sums.items()},
        measured=measured.get(layer.layer),
    )


def _gaps(numbers: Timescales, *, log: bool) -> dict[int, Gaps]:
    found = {t: Gaps.of(np.log(values) if log else np.asarray(values)) for t, values in numbers.items()}
    return {t: gaps for t, gaps in found.items() if gaps is not None}


def _lines(rest: Spectrum, sums: dict[int, _Sums]) -> list[Line]:
    """Retention of token 1 by channels of all layers, evenly chosen from the slowest to the fastest at T."""
    at = {layer.layer: layer.after[rest.length] for layer in rest.layers}
    channels = sorted(((tau, number, n) for number, taus in at.items() for n, tau in enumerate(taus)), reverse=True)
    return [
        Line(number, channel, tau, {t: float(sums[number].kept(1, t)[channel]) for t in _grid(rest)})
        for tau, number, channel in evenly(channels, _LINES)
    ]


def _densities(rest: Spectrum, tally: Tally | None) -> Densities:
    position, cap = rest.length, float(CAP * rest.length)
    start = np.concatenate([layer.at_start[position] for layer in rest.layers]).clip(max=cap)
    after = np.concatenate([layer.after[position] for layer in rest.layers]).clip(max=cap)
    octaves = octaves_of(min(start.min(), after.min(), _FASTEST), 2 * cap)
    measured = None if tally is None else tally.densities(position, octaves, cap)
    return Densities(octaves, density(start, octaves), density(after, octaves), measured)
