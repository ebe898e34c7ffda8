"""Timescales at rest: tau = -1 / log_decay in tokens, with the input's part of the decay left out.

At position t PoST multiplies it by t^alpha, so a spectrum is given at several positions. What every run draws, and
what its record keeps a summary of; `bench spectrum` (harness/spectra.py) shows more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from decaybench.core.errors import UserError
from decaybench.harness.spectrum_laws import Gaps
from decaybench.models.addons.post import TaperedSpectrum
from decaybench.models.branch import Mixer
from decaybench.models.language_model import LanguageModel, build_model
from decaybench.results.record import LayerSpectrum, SpectrumAt, SpectrumInfo

Float64 = NDArray[np.float64]
Timescales = dict[int, list[float]]  # by position, one number a head or channel, in the model's order

MULTIPLES = (1, 4, 16)  # of T: the positions that are shown, after the first
LONGEST = 1e30  # tokens; a rate that rounds to 0 has this timescale, and one that overflows its inverse
CAP = 1024  # times T: figures show a longer timescale as this one, which forgets a thousandth over T tokens

_UNKNOWN_LENGTH = 1024  # that stands for T where it isn't known


@dataclass(frozen=True)
class LayerTimescales:
    """A layer's timescales in tokens, by position; heads, or key channels one head after the other, in its own order.

    heads: how many it has; None: as many as timescales. order_at_start, order_after: log speeds of PoST's ordered
    parameter P alone, by position; None where there is none.
    """

    layer: int
    at_start: Timescales
    after: Timescales
    heads: int | None = None
    order_at_start: Timescales | None = None
    order_after: Timescales | None = None

    @property
    def channels(self) -> int:
        """How many timescales there are."""
        return len(next(iter(self.after.values())))

    @property
    def orders_channels(self) -> bool:
        """Whether P has a number for each of the timescales; else it has one a head of many channels."""
        return self.order_after is not None and len(next(iter(self.order_after.values()))) == self.channels

    @property
    def unit(self) -> str:
        """What has a timescale: `head`, or `channel`."""
        return "head" if self.heads in (None, self.channels) else "channel"


@dataclass(frozen=True)
class Spectrum:
    """A model's spectrum at rest. train_length: T in tokens, None where it isn't known."""

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

    @property
    def scales(self) -> bool:
        """Whether timescales depend on the position."""
        sets = [timescales for layer in self.layers for timescales in (layer.at_start, layer.after)]
        return any(not _constant(timescales) for timescales in sets)

    @property
    def length(self) -> int:
        """T, or what stands for it."""
        return self.train_length or _UNKNOWN_LENGTH

    def position_name(self, position: int) -> str:
        """How figures and tables call a position: 1, T, 4T."""
        times, rest = divmod(position, self.length)
        if self.train_length is None or rest or position == 1:
            return str(position)
        return "T" if times == 1 else f"{times}T"

    def position_labels(self) -> list[str]:
        """t = 1, t = T, t = 4T for the positions."""
        return [f"t = {self.position_name(t)}" for t in self.positions]


class Resting:
    """One mixer's timescales at rest at any position, each computed once."""

    def __init__(self, layer: int, mixer: Mixer) -> None:
        self.layer, self.mixer = layer, mixer
        self._known: dict[int, Float64] = {}

    @torch.no_grad()
    def timescales(self, position: int) -> Float64:
        """Tokens, [N]. Raises UserError where they are no numbers."""
        if position not in self._known:
            found = self.mixer.timescales(position)
            assert found is not None, "a mixer without decays has no resting timescales"
            taus = found.double().cpu().numpy()
            if not np.all(taus >= 0):
                raise UserError(f"layer {self.layer} has decays that are no numbers: its training diverged")
            self._known[position] = taus.clip(1 / LONGEST, LONGEST)
        return self._known[position]

    def rates(self, position: int) -> Float64:
        """1 / tau, [N]."""
        return 1 / self.timescales(position)

    @torch.no_grad()
    def order(self, position: int) -> list[float] | None:
        """Log speeds of the ordered parameter P alone at this position, up to a constant; None where there is none."""
        for part in self.mixer.modules():
            if isinstance(part, TaperedSpectrum):
                found: list[float] = part.log_speeds(position).double().tolist()
                return found
        return None


def units(layers: Iterable[LayerTimescales]) -> str:
    """What has timescales in these layers, in the plural: `heads and channels`."""
    return " and ".join(f"{unit}s" for unit in sorted({layer.unit for layer in layers}, reverse=True))


def model_spectrum(
    model: LanguageModel, seed: int, train_length: int | None, start: LanguageModel | None = None
) -> Spectrum:
    """The spectrum of a model beside that of its initial values.

    start: the model with these; None: drawn again from `seed`.
    """
    base = train_length or _UNKNOWN_LENGTH
    positions = tuple(dict.fromkeys((1, *(times * base for times in MULTIPLES))))
    before = resting_layers(start or build_model(model.config, seed))
    layers = []
    for number, after in resting_layers(model).items():
        layers.append(
            LayerTimescales(
                number,
                _at(positions, before[number].timescales),
                _at(positions, after.timescales),
                after.mixer.heads,
                _ordered(positions, before[number]),
                _ordered(positions, after),
            )
        )
    return Spectrum(model.config.cell, train_length, positions, tuple(layers))


@torch.no_grad()
def resting_layers(model: LanguageModel) -> dict[int, Resting]:
    """The layers with decays, by number."""
    mixers: dict[int, Mixer] = {number: block.mixer for number, block in enumerate(model.blocks)}  # type: ignore[misc]
    return {number: Resting(number, mixer) for number, mixer in mixers.items() if mixer.timescales(1) is not None}


def _at(positions: tuple[int, ...], of: Callable[[int], Float64]) -> Timescales:
    return {t: of(t).tolist() for t in positions}


def _ordered(positions: tuple[int, ...], layer: Resting) -> Timescales | None:
    found = {t: order for t in positions if (order := layer.order(t)) is not None}
    return found or None


def _constant(timescales: Timescales) -> bool:
    first, *others = (np.asarray(taus) for taus in timescales.values())
    return all(np.allclose(first, other, rtol=1e-6, atol=0) for other in others)


def _summary(timescales: Timescales) -> tuple[SpectrumAt, ...]:
    summary = []
    for position, taus in timescales.items():
        gaps = Gaps.of(np.log(taus))
        summary.append(
            SpectrumAt(
                position=position,
                slowest=max(taus),
                median=float(np.median(taus)),
                fastest=min(taus),
                smallest_log_gap=gaps.smallest if gaps else None,
                median_log_gap=gaps.median if gaps else None,
            )
        )
    return tuple(summary)
