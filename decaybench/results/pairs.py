"""Which records are compared with which, and what comes of it: a model with an add-on against the same without.

An experiment is all records that differ in nothing but the seed, the lengths and the samples asked. Two of them are
compared on the seeds and samples that both have, and only where every other setting is equal: a difference that two
learning rates make is nobody's add-on's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from decaybench.core.errors import UserError
from decaybench.core.hashing import digest
from decaybench.core.names import unknown
from decaybench.core.scoring import Metric, score
from decaybench.results.differences import Difference, Float64, paired_difference, seed_difference
from decaybench.results.leaderboard import columns, placed, settings_of, short
from decaybench.results.record import CellResult, Record

if TYPE_CHECKING:
    from rich.table import Table

_CELL = "model.cell"


@dataclass(frozen=True)
class Line:
    """One variant at one length. base, other: means over the common seeds and samples, 0..1.

    references: what rules without a model reach on these samples, by name. by_distance: by the octave's lower edge
    (tokens) the difference of the shares answered, paired by seed.
    """

    variant: str
    column: str
    base: float
    other: float
    samples: int
    references: dict[str, float]
    difference: Difference
    by_distance: dict[int, Difference]


@dataclass(frozen=True)
class Comparison:
    """A model against its base. where: settings by which it differs from others of these names; empty: there are none.

    loss: the difference of the final training losses, nats; None: trained elsewhere.
    speed: training tokens/s as a multiple of the base's, the geometric mean over seeds; None where device or threads
    differ. parameters, state: as multiples of the base's.
    """

    task: str
    base: str
    other: str
    where: dict[str, Any]
    seeds: tuple[int, ...]
    lines: tuple[Line, ...]
    loss: Difference | None
    speed: float | None
    parameters: float
    state: float | None

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        lines = [
            {
                "variant": line.variant,
                "length": line.column,
                "base": line.base,
                "other": line.other,
                "samples": line.samples,
                "references": line.references,
                "difference": line.difference.plain(),
                "by_distance": {str(low): found.plain() for low, found in line.by_distance.items()},
            }
            for line in self.lines
        ]
        return {
            "task": self.task,
            "base": self.base,
            "other": self.other,
            "where": self.where,
            "seeds": list(self.seeds),
            "lines": lines,
            "final_loss": None if self.loss is None else self.loss.plain(),
            "speed": self.speed,
            "parameters": self.parameters,
            "state": self.state,
        }


@dataclass(frozen=True)
class Comparisons:
    """What was compared, and notes on what was not."""

    found: tuple[Comparison, ...]
    notes: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        return {"comparisons": [one.plain() for one in self.found], "notes": list(self.notes)}

    def tables(self, *, distance: bool = False) -> list[Table]:
        """A table a comparison. distance: also by octave of the distance."""
        return [_table(one, distance=distance) for one in self.found]

    def remarks(self) -> list[str]:
        """How the tables are to be read, then the notes."""
        intervals = sum(len(one.lines) for one in self.found)
        rules = dict.fromkeys(name for one in self.found for line in one.lines for name in line.references)
        return [
            "base, model: means over the seeds and samples that both have. difference: paired by seed and sample, with "
            "its 95 % interval over both. p: of the signs of the seeds' differences; fewer than six seeds can't "
            "reach .05. Speed is what these runs had; `bench speed` measures it.",
            *([f"{intervals} intervals, not corrected for being so many."] if intervals > 1 else []),
            *([f"{', '.join(rules)}: rules without a model, on the same samples."] if rules else []),
            *self.notes,
        ]


@dataclass
class _Experiment:
    """Records of one experiment, by seed; rest: its settings without any add-on's."""

    cell: str
    settings: dict[str, Any]
    rest: dict[str, Any]
    records: dict[int, list[Record]] = field(default_factory=dict)

    @property
    def first(self) -> Record:
        return next(iter(self.records.values()))[0]

    def without(self, part: str) -> dict[str, Any]:
        """Its settings without one add-on's."""
        return _without(self.settings, [part])

    def has(self, part: str) -> bool:
        return self.without(part) != _without(self.settings, [])

    def cells(self, seed: int) -> dict[str, tuple[str, CellResult]]:
        """Its cells of one seed with their columns, by name; of one asked twice, that with more samples."""
        found: dict[str, tuple[str, CellResult]] = {}
        for record in self.records[seed]:
            for column, cell in placed(record):
                if cell.name not in found or found[cell.name][1].n < cell.n:
                    found[cell.name] = column, cell
        return found


def compare(records: Iterable[Record], parts: Sequence[str], base: str | None = None) -> Comparisons:
    """Every model against its base.

    parts: the keys of a model's configuration that are add-ons (post, bft). base: a cell's name, mamba2+bft: every
    model that differs from it in add-ons alone is compared with it; None: each model with an add-on is compared with
    the same model without that add-on. Raises UserError where there is nothing to compare, saying why.
    """
    experiments = _experiments(records, parts)
    notes: list[str] = []
    found = []
    pairs = list(_pairs(experiments, parts, base, notes))
    for first, second in pairs:
        seeds = sorted(first.records.keys() & second.records.keys())
        if not seeds:
            notes.append(f"{second.cell} and {first.cell} have no seed in common")
        elif one := _compared(first, second, seeds, _told_apart(first, second, pairs)):
            found.append(one)
        else:
            notes.append(f"{second.cell} and {first.cell} were asked nothing in common")
    if not found:
        raise UserError("nothing to compare: " + ("; ".join(notes) or _why_nothing(experiments)))
    return Comparisons(tuple(found), tuple(notes))


def _experiments(records: Iterable[Record], parts: Sequence[str]) -> list[_Experiment]:
    found: dict[str, _Experiment] = {}
    for record in records:
        settings = settings_of(record)
        experiment = found.setdefault(
            digest(settings), _Experiment(record.model.cell, settings, _without(settings, parts))
        )
        experiment.records.setdefault(record.seed, []).append(record)
    return list(found.values())


def _pairs(
    experiments: Sequence[_Experiment], parts: Sequence[str], base: str | None, notes: list[str]
) -> Iterator[tuple[_Experiment, _Experiment]]:
    if base is None:
        for second in experiments:
            for part in parts:
                if second.has(part):
                    wanted = second.without(part)
                    yield from ((e, second) for e in experiments if not e.has(part) and e.without(part) == wanted)
        return
    bases = [experiment for experiment in experiments if experiment.cell == base]
    if not bases:
        raise unknown("model", base, {experiment.cell for experiment in experiments})
    for second in experiments:
        if second.cell == base:
            continue
        alike = [first for first in bases if first.rest == second.rest]
        if not alike:
            notes.append(f"{second.cell} left out: {_unlike(bases[0].rest, second.rest)} (against {base})")
        yield from ((first, second) for first in alike)


def _told_apart(
    first: _Experiment, second: _Experiment, pairs: Sequence[tuple[_Experiment, _Experiment]]
) -> dict[str, Any]:
    """The settings, add-ons apart, by which a pair differs from others of the same names."""
    alike = [one.rest for one, other in pairs if (one.cell, other.cell) == (first.cell, second.cell)]
    keys = {key: None for rest in alike for key in rest}
    return {key: first.rest.get(key) for key in keys if any(rest.get(key) != first.rest.get(key) for rest in alike)}


def _compared(
    first: _Experiment, second: _Experiment, seeds: Sequence[int], where: dict[str, Any]
) -> Comparison | None:
    by_seed = [(first.cells(seed), second.cells(seed)) for seed in seeds]
    common = [name for name in by_seed[0][0] if all(name in one and name in other for one, other in by_seed)]
    by_line: dict[tuple[str, str], list[str]] = {}
    for name in common:
        column, cell = by_seed[0][0][name]
        by_line.setdefault((cell.variant, column), []).append(name)
    if not by_line:
        return None
    metric = first.first.task.metric
    order = {column: place for place, column in enumerate(columns([first.first]))}
    lines = [
        _line(
            variant,
            column,
            [[(one[name][1], other[name][1]) for one, other in by_seed] for name in names],
            seeds,
            metric,
        )
        for (variant, column), names in by_line.items()
    ]
    variants = list(dict.fromkeys(line.variant for line in lines))
    lines.sort(key=lambda line: (variants.index(line.variant), order.get(line.column, len(order))))
    pairs = [(first.records[seed][0], second.records[seed][0]) for seed in seeds]
    one, other = pairs[0]
    return Comparison(
        task=f"{one.task.name} v{one.task.version}",
        base=first.cell,
        other=second.cell,
        where=where,
        seeds=tuple(seeds),
        lines=tuple(lines),
        loss=_loss(pairs, seeds),
        speed=_speed(pairs),
        parameters=other.model.parameters.trainable / one.model.parameters.trainable,
        state=_ratio(sum(other.model.state_elements), sum(one.model.state_elements)),
    )


def _line(
    variant: str,
    column: str,
    cells: Sequence[Sequence[tuple[CellResult, CellResult]]],
    seeds: Sequence[int],
    metric: Metric,
) -> Line:
    """cells: for each cell of the line, by seed, the base's result and the other's."""
    samples = [min(result.n for pair in by_seed for result in pair) for by_seed in cells]
    base, other = (
        [
            np.stack([_scores(pair[side], n, metric) for pair in by_seed])
            for by_seed, n in zip(cells, samples, strict=True)
        ]
        for side in (0, 1)
    )
    return Line(
        variant=variant,
        column=column,
        base=fmean(float(part.mean()) for part in base),
        other=fmean(float(part.mean()) for part in other),
        samples=min(samples),
        references=_references([pair[0].references or {} for by_seed in cells for pair in by_seed]),
        difference=paired_difference(seeds, [b - a for a, b in zip(base, other, strict=True)]),
        by_distance=_by_distance(cells, seeds),
    )


def _scores(cell: CellResult, n: int, metric: Metric) -> Float64:
    return score(metric, np.array(cell.correct[:n]), np.array(cell.asked[:n]))


def _references(known: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(one[name] for one in known) for name in known[0] if all(name in one for one in known)}


def _by_distance(
    cells: Sequence[Sequence[tuple[CellResult, CellResult]]], seeds: Sequence[int]
) -> dict[int, Difference]:
    """Of the shares of all questions in an octave, those of several cells together."""
    shares: dict[int, list[float]] = {}
    for place in range(len(seeds)):
        sides: list[dict[int, tuple[int, int]]] = []
        for side in (0, 1):
            counts: dict[int, tuple[int, int]] = {}
            for by_seed in cells:
                for part in by_seed[place][side].by_distance:
                    correct, asked = counts.get(part.low, (0, 0))
                    counts[part.low] = correct + part.correct, asked + part.asked
            sides.append(counts)
        for low in sides[0].keys() & sides[1].keys():
            base, other = (counts[low][0] / counts[low][1] for counts in sides)
            shares.setdefault(low, []).append(other - base)
    whole = {low: found for low, found in sorted(shares.items()) if len(found) == len(seeds)}
    return {low: seed_difference(dict(zip(seeds, found, strict=True))) for low, found in whole.items()}


def _loss(pairs: Sequence[tuple[Record, Record]], seeds: Sequence[int]) -> Difference | None:
    found = {}
    for seed, (one, other) in zip(seeds, pairs, strict=True):
        if one.training is None or other.training is None:
            return None
        found[seed] = other.training.final_loss - one.training.final_loss
    return seed_difference(found)


def _speed(pairs: Sequence[tuple[Record, Record]]) -> float | None:
    logs = []
    for one, other in pairs:
        places = [(r.environment.platform, r.environment.device, r.environment.threads) for r in (one, other)]
        speeds = [record.cost.train_tokens_per_second for record in (one, other)]
        if places[0] != places[1] or not speeds[0] or not speeds[1]:
            return None
        logs.append(math.log(speeds[1] / speeds[0]))
    return math.exp(fmean(logs))


def _ratio(other: int, base: int) -> float | None:
    return other / base if base else None


def _without(settings: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """Settings without those of the add-ons `parts`, and without the cell's name, which says no more than they do."""
    prefixes = tuple(f"model.{part}" for part in parts)
    return {
        key: value
        for key, value in settings.items()
        if key != _CELL and not any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)
    }


def _unlike(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The first setting in which two experiments differ, add-ons apart."""
    key = next(key for key in {**one, **other} if one.get(key) != other.get(key))
    return f"{key} is {short(other.get(key))}, not {short(one.get(key))}"


def _why_nothing(experiments: Sequence[_Experiment]) -> str:
    names = sorted({experiment.cell for experiment in experiments})
    for second in experiments:
        for first in experiments:
            same = first.settings.get("model.name") == second.settings.get("model.name")
            if same and first.rest != second.rest and first.cell != second.cell:
                return f"of {second.cell} and {first.cell}, {_unlike(first.rest, second.rest)}"
    return f"it takes a model with an add-on and the same without; here are {', '.join(names) or 'no records'}"


def _table(one: Comparison, *, distance: bool) -> Table:
    from rich.table import Table

    verdicts = [line.difference.verdict for line in one.lines]
    few = "too few seeds" in verdicts
    where = [f"{key}={short(value)}" for key, value in one.where.items()]
    seeds = f"seeds {', '.join(map(str, one.seeds))}" + (": too few to show anything" if few else "")
    table = Table(
        title="; ".join([f"{one.task}: {one.other} against {one.base}", *where, seeds]),
        title_justify="left",
        caption=_others(one),
        caption_justify="left",
    )
    rules = list(dict.fromkeys(name for line in one.lines for name in line.references))
    where = ["variant", "length", *(["distance"] if distance else [])]
    for heading in [*where, "base", "model", *rules, "difference", "95 %", "p", *([] if few else ["shown"])]:
        table.add_column(heading, justify="left" if heading in ("variant", "shown") else "right")
    for line in one.lines:
        known = [f"{line.references[name]:.3f}" if name in line.references else "" for name in rules]
        values = [f"{line.base:.3f}", f"{line.other:.3f}", *known]
        octave = ["all"] if distance else []
        table.add_row(line.variant, line.column, *octave, *values, *_told(line.difference, few=few))
        for low, part in line.by_distance.items() if distance else ():
            table.add_row("", "", f"{low}-{2 * low - 1}", *[""] * len(values), *_told(part, few=few))
    return table


def _told(difference: Difference, *, few: bool) -> list[str]:
    p = "" if difference.p is None else f"{difference.p:.3f}"
    return [f"{difference.value:+.3f}", _range(difference), p, *([] if few else [difference.verdict])]


def _range(difference: Difference) -> str:
    if difference.interval is None:
        return "one seed"
    return f"{difference.interval[0]:+.3f} to {difference.interval[1]:+.3f}"


def _others(one: Comparison) -> str:
    parts = []
    if one.loss is not None:
        parts.append(f"final training loss {one.loss.value:+.3f} ({_range(one.loss)}) nats a label")
    for name, value in (("speed of training", one.speed), ("parameters", one.parameters), ("state", one.state)):
        if value is not None:
            parts.append(f"{name} x {value:.4g}")
    return "; ".join(parts)
