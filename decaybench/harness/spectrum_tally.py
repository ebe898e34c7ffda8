"""Decays measured while a model reads samples of a task, or a text: timescales, and what is left of a token.

A timescale is -1 / log_decay of one token in one head or channel. At position t its distribution is over the tokens
after 7/8 t and up to t, of all samples: there are more of them than at t alone, and t^alpha moves by an eighth at most.
The retention of token j at t is exp(sum_{s=j+1..t} log_decay_s): what decay alone leaves of it, whatever else a delta
rule erases. Positions count from the start of a token's document.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from decaybench.core.errors import UserError
from decaybench.harness.spectrum_laws import GRADED, density, useful
from decaybench.harness.spectrum_rest import LONGEST
from decaybench.models.language_model import LanguageModel

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

_WINDOW = 8  # the last 1/8 of the positions up to t
_MOST_TOKENS = 1024  # of a window, evenly chosen: it bounds the memory, and quantiles need no more


@dataclass(frozen=True)
class MeasuredAt:
    """A layer's timescales over `tokens` tokens at a position; [N] each, in the order of those at rest.

    quantiles: [5, N], of QUANTILES; effective: -1 / mean log_decay, the timescale by which products of decays go;
    useful: mean number of channels with 1 <= tau <= t.
    """

    tokens: int
    quantiles: Float64
    effective: Float64
    useful: float

    @property
    def median(self) -> Float64:
        """[N]."""
        found: Float64 = self.quantiles[QUANTILES.index(0.5)]
        return found

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        named = {f"{share * 100:g}_percent": row.tolist() for share, row in zip(QUANTILES, self.quantiles, strict=True)}
        return {"tokens": self.tokens, **named, "effective": self.effective.tolist(), "useful": self.useful}


@dataclass(frozen=True)
class Kept:
    """What is left of a token at a later position of its document, over `documents` of them.

    mean: [N], the mean retention; graded: mean number of channels that keep 5 to 95 %.
    """

    documents: int
    mean: Float64
    graded: float

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        return {"documents": self.documents, "mean": self.mean.tolist(), "graded": self.graded}


@dataclass(frozen=True)
class MeasuredLayer:
    """One layer. at: by position; kept: by source token and later position; what no document reaches is absent."""

    at: dict[int, MeasuredAt]
    kept: dict[tuple[int, int], Kept]


class Tally:
    """What the samples have shown so far.

    positions: where timescales are wanted; sources, targets: tokens j and positions t of retentions; rows: samples to
    come, by which the tokens of a window are thinned out.
    """

    def __init__(
        self, positions: Collection[int], sources: Collection[int], targets: Collection[int], rows: int
    ) -> None:
        self.positions, self.sources, self.targets = sorted(positions), sorted(sources), sorted(targets)
        self.documents = self.tokens = 0
        self._steps = {t: max(1, rows * (t - t * (_WINDOW - 1) // _WINDOW) // _MOST_TOKENS) for t in self.positions}
        self._found: dict[tuple[int, int], list[Float64]] = defaultdict(list)  # (layer, t): [tokens, N] log decays
        self._kept: dict[tuple[int, int, int], list[Float64]] = defaultdict(list)  # (layer, j, t): [N] log retentions

    def add(self, positions: Int64, pieces: Iterable[dict[int, torch.Tensor]]) -> None:
        """Add a batch of samples. positions: [B, T]; pieces: what LanguageModel.decays yields for it."""
        self.documents += int((positions == 1).sum())
        self.tokens += int((positions > 0).sum())
        sums: dict[int, Float64] = {}  # by layer, of log decays since the rows' first token, [B, N]
        marks: dict[tuple[int, int], dict[int, Float64]] = defaultdict(dict)  # (layer, row): by source, sum up to it
        start = 0
        for found in pieces:
            for layer, noted in found.items():
                decays = noted.double().cpu().numpy()
                where = positions[:, start : start + decays.shape[1]]
                decays[where == 0] = 0
                if np.isnan(decays).any():
                    raise UserError(f"layer {layer} has decays that are no numbers: its training diverged")
                self._add_window(layer, where, decays)
                summed = decays.cumsum(1) + sums.get(layer, np.zeros(1))[..., None, :]
                self._add_kept(layer, where, summed, marks)
                sums[layer] = summed[:, -1]
            start += where.shape[1] if found else 0

    def layers(self) -> dict[int, MeasuredLayer]:
        """What was measured, by layer."""
        at: dict[int, dict[int, MeasuredAt]] = defaultdict(dict)
        for (layer, t), parts in self._found.items():
            at[layer][t] = _measured(np.concatenate(parts), t)
        kept: dict[int, dict[tuple[int, int], Kept]] = defaultdict(dict)
        low, high = GRADED
        for (layer, j, t), rows in self._kept.items():
            left = np.exp(np.stack(rows))
            share = float(((left >= low) & (left <= high)).sum(1).mean())
            kept[layer][j, t] = Kept(len(rows), left.mean(0), share)
        return {layer: MeasuredLayer(at[layer], kept[layer]) for layer in sorted(at)}

    def densities(self, position: int, octaves: Float64, cap: float) -> Float64 | None:
        """Density of the timescales of all layers' tokens at a position (spectrum_laws.density); None without any.

        cap: what longer ones count as. Each head or channel of whatever layer weighs the same.
        """
        parts = [np.concatenate(found) for (_, t), found in sorted(self._found.items()) if t == position]
        if not parts:
            return None
        weighed = [density(_timescales(part).clip(max=cap), octaves) * part.shape[1] for part in parts]
        total: Float64 = np.sum(weighed, axis=0) / sum(part.shape[1] for part in parts)
        return total

    def _add_window(self, layer: int, where: Int64, decays: Float64) -> None:
        for t, step in self._steps.items():
            chosen = (where > t * (_WINDOW - 1) // _WINDOW) & (where <= t) & ((t - where) % step == 0)
            if chosen.any():
                self._found[layer, t].append(decays[chosen])

    def _add_kept(
        self, layer: int, where: Int64, summed: Float64, marks: dict[tuple[int, int], dict[int, Float64]]
    ) -> None:
        for row, column in np.argwhere(np.isin(where, [1, *self.sources, *self.targets])).tolist():
            position, now, known = int(where[row, column]), summed[row, column], marks[layer, row]
            if position == 1:
                known.clear()
            if position in self.targets:
                for j, before in known.items():
                    self._kept[layer, j, position].append(now - before)
            if position in self.sources:
                known[position] = now.copy()


def measure(model: LanguageModel, tally: Tally, tokens: Int64, positions: Int64 | None) -> None:
    """Add what a model does while it reads tokens [B, T] at `positions` [B, T]; None: each row is one document."""
    device = model.embedding.weight.device
    where = np.broadcast_to(np.arange(1, tokens.shape[1] + 1), tokens.shape) if positions is None else positions
    given = None if positions is None else torch.from_numpy(positions).to(device)
    tally.add(where, model.decays(torch.from_numpy(tokens).to(device), given))


def _timescales(decays: Float64) -> Float64:
    found: Float64 = 1 / np.maximum(-decays, 1 / LONGEST)
    return found


def _measured(decays: Float64, position: int) -> MeasuredAt:
    """Of log decays [tokens, N]."""
    taus = _timescales(decays)
    return MeasuredAt(
        tokens=len(decays),
        quantiles=np.exp(np.quantile(np.log(taus), QUANTILES, axis=0)),
        effective=_timescales(decays.mean(0)),
        useful=useful(taus, position) / len(decays),
    )
