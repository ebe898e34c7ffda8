"""Which records are compared with which, and what comes of it: a model with an add-on against the same without.

An experiment is all records that differ in nothing but the seed, the lengths and the samples asked. Two of them are
compared on the seeds and samples that both have, and only where every other setting is equal: a difference that two
learning rates make is nobody's add-on's. What may differ beside add-ons is named (`vary`), and so is what must not,
where it follows from the settings (`equal`: the counted state).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

import numpy as np

from decaybench.core.errors import UserError
from decaybench.core.hashing import digest
from decaybench.core.names import unknown
from decaybench.core.scoring import Metric, score
from decaybench.results.differences import Difference, Float64, paired_difference, seed_difference
from decaybench.results.leaderboard import columns, placed, settings_of, short
from decaybench.results.pair_tables import Grid, comparison_grid, summary_grid
from decaybench.results.record import CellResult, Record

_CELL = "model.cell"
_OF_TRAINING = ("task.stages", "task.mix")  # of a task's settings; the others make its questions, too
_AS_LARGE = 0.05  # states that are said to be equal differ by no larger share

Equal = Literal["state"]


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
    differ. parameters, state: as multiples of the base's. state_elements: the numbers in both states, the base's first.
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
    state_elements: tuple[int, int]

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
            "state_elements": list(self.state_elements),
        }


@dataclass(frozen=True)
class Comparisons:
    """What was compared, and notes on what was not."""

    found: tuple[Comparison, ...]
    notes: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        return {"comparisons": [one.plain() for one in self.found], "notes": list(self.notes)}

    def tables(self, *, distance: bool = False) -> list[Grid]:
        """A table a comparison. distance: also by octave of the distance."""
        return [comparison_grid(one, distance=distance) for one in self.found]

    def summaries(self) -> list[Grid]:
        """A table a task: a row a model, a column a length."""
        tasks: dict[str, list[Comparison]] = {}
        for one in self.found:
            tasks.setdefault(one.task, []).append(one)
        return [summary_grid(several) for several in tasks.values()]

    def remarks(self, *, summary: bool = False) -> list[str]:
        """How the tables, or their summaries, are to be read, then the notes."""
        intervals = sum(len(one.lines) for one in self.found)
        rules = dict.fromkeys(name for one in self.found for line in one.lines for name in line.references)
        means = "means over the seeds and samples that both have"
        if summary:
            how = (
                f"Without a sign: the base's {means}. Differences are paired by seed and sample, intervals are over "
                "both. Fewer than six seeds can't reach p = .05 in the test over seeds, which the longer tables have."
            )
        else:
            how = (
                f"base, model: {means}. difference: paired by seed and sample, with its 95 % interval over both. p: of "
                "the signs of the seeds' differences; fewer than six seeds can't reach .05. Speed is what these runs "
                "had; `bench speed` measures it."
            )
        return [
            how,
            *([f"{intervals} intervals, not corrected for being so many."] if intervals > 1 else []),
            *([f"{', '.join(rules)}: rules without a model, on the same samples."] if rules and not summary else []),
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

    @property
    def state(self) -> int:
        """The numbers in its state."""
        return sum(self.first.model.state_elements)

    def without(self, part: str) -> dict[str, Any]:
        """Its settings without one add-on's."""
        return _without(self.settings, [f"model.{part}"])

    def has(self, part: str) -> bool:
        return self.without(part) != _without(self.settings, [])

    def named(self, keys: Sequence[str]) -> str:
        """Its cell's name, with the settings among `keys` that it has: mamba2, state_passing=0.5."""
        own = {key.rpartition(".")[2]: self.settings[key] for key in keys if key in self.settings}
        shown = {key: f"{value:g}" if isinstance(value, float) else short(value) for key, value in own.items()}
        return ", ".join([self.cell, *(f"{key}={value}" for key, value in shown.items())])

    def cells(self, seed: int) -> dict[str, tuple[str, CellResult]]:
        """Its cells of one seed with their columns, by name; of one asked twice, that with more samples."""
        found: dict[str, tuple[str, CellResult]] = {}
        for record in self.records[seed]:
            for column, cell in placed(record):
                if cell.name not in found or found[cell.name][1].n < cell.n:
                    found[cell.name] = column, cell
        return found


def compare(
    records: Iterable[Record],
    parts: Sequence[str],
    base: str | None = None,
    *,
    vary: Sequence[str] = (),
    equal: Equal | None = None,
) -> Comparisons:
    """Every model against its base.

    parts: the keys of a model's configuration that are add-ons (post, bft). base: a cell's name, mamba2+bft: every
    model that differs from it in add-ons alone is compared with it; None: each model with an add-on is compared with
    the same model without that add-on.
    vary: settings that may differ too, by their dotted keys (training.state_passing; with a base also all below a key,
    model): without a base they alone may, and the base is the experiment that has none of them, else the least.
    equal: state, of these only models whose counted states are alike to 5 %.
    Raises UserError where there is nothing to compare, saying why.
    """
    experiments = _experiments(records, parts)
    _check_keys(vary, experiments, base)
    notes: list[str] = []
    if vary or base is not None:
        pairs = list(_against_base(experiments, parts if base is not None else (), base, vary, notes))
    else:
        pairs = list(_with_and_without(experiments, parts))
    if equal == "state":
        pairs = [pair for pair in pairs if _as_large(*pair, vary, notes)]
    found = []
    for first, second in pairs:
        seeds = sorted(first.records.keys() & second.records.keys())
        names = first.named(vary), second.named(vary)
        if not seeds:
            notes.append(f"{names[1]} and {names[0]} have no seed in common")
        elif one := _compared(first, second, names, seeds, _told_apart(first, second, pairs, vary)):
            found.append(one)
        else:
            notes.append(f"{names[1]} and {names[0]} were asked nothing in common")
    if not found:
        raise UserError("nothing to compare: " + ("; ".join(notes) or _why_nothing(experiments, vary)))
    return Comparisons(tuple(found), tuple(notes))


def _experiments(records: Iterable[Record], parts: Sequence[str]) -> list[_Experiment]:
    found: dict[str, _Experiment] = {}
    for record in records:
        settings = settings_of(record)
        rest = _without(settings, [f"model.{part}" for part in parts])
        experiment = found.setdefault(digest(settings), _Experiment(record.model.cell, settings, rest))
        experiment.records.setdefault(record.seed, []).append(record)
    return list(found.values())


def _check_keys(vary: Sequence[str], experiments: Sequence[_Experiment], base: str | None) -> None:
    known = {key: None for experiment in experiments for key in experiment.settings}
    for key in vary:
        if key.split(".")[0] in ("task", "evaluation") and key not in _OF_TRAINING:
            raise UserError(f"--vary {key}: it changes the questions, and only answers to the same ones can be paired")
        if key in known:
            continue
        if not any(name.startswith(f"{key}.") for name in known):
            raise unknown("setting", key, known)
        if base is None:
            raise UserError(f"--vary {key}: it is several settings, so say with --base what all are compared with")


def _with_and_without(
    experiments: Sequence[_Experiment], parts: Sequence[str]
) -> Iterator[tuple[_Experiment, _Experiment]]:
    for second in experiments:
        for part in parts:
            if second.has(part):
                wanted = second.without(part)
                yield from ((e, second) for e in experiments if not e.has(part) and e.without(part) == wanted)


def _against_base(
    experiments: Sequence[_Experiment], parts: Sequence[str], base: str | None, vary: Sequence[str], notes: list[str]
) -> Iterator[tuple[_Experiment, _Experiment]]:
    """parts: add-ons that may differ; base None: the first by what varies, of those that are alike else."""
    free = [*vary, *(f"model.{part}" for part in parts)]
    bases = [experiment for experiment in experiments if base in (None, experiment.cell)]
    if not bases:
        raise unknown("model", base or "", {experiment.cell for experiment in experiments})
    groups: dict[str, list[_Experiment]] = {}
    for experiment in experiments:
        groups.setdefault(digest(_without(experiment.settings, free)), []).append(experiment)
    for group in groups.values():
        here = [experiment for experiment in group if experiment in bases]
        least = min((_varied(experiment, vary) for experiment in here), default=None)
        firsts = [experiment for experiment in here if _varied(experiment, vary) == least]
        for second in group:
            if not here:
                why = _unlike(_without(bases[0].settings, free), _without(second.settings, free))
                notes.append(f"{second.named(vary)} left out: {why} (against {base})")
            elif second not in firsts:
                yield from ((first, second) for first in firsts)


def _varied(experiment: _Experiment, vary: Sequence[str]) -> list[tuple[int, float, str]]:
    """The settings that vary, in an order: what isn't there, numbers, all else; those below a key make none."""
    values = [experiment.settings.get(key) for key in vary]
    numbers = [float(value) if isinstance(value, int | float) else 0.0 for value in values]
    return [
        (0 if value is None else 1 if isinstance(value, int | float) else 2, number, str(value))
        for value, number in zip(values, numbers, strict=True)
    ]


def _as_large(first: _Experiment, second: _Experiment, vary: Sequence[str], notes: list[str]) -> bool:
    """Whether both states have as many numbers, nearly; else a note says that they haven't."""
    one, other = first.state, second.state
    if abs(other - one) <= _AS_LARGE * one:
        return True
    ratio = f" (x {other / one:.3g})" if one else ""
    notes.append(
        f"{second.named(vary)} left out: its state is {other:,} numbers, that of {first.named(vary)} {one:,}{ratio}: "
        f"not equal to {100 * _AS_LARGE:g} %"
    )
    return False


def _told_apart(
    first: _Experiment,
    second: _Experiment,
    pairs: Sequence[tuple[_Experiment, _Experiment]],
    vary: Sequence[str],
) -> dict[str, Any]:
    """The settings, add-ons apart, by which a pair differs from others of the same names."""
    names = first.named(vary), second.named(vary)
    alike = [other.rest for one, other in pairs if (one.named(vary), other.named(vary)) == names]
    keys = {key: None for rest in alike for key in rest}
    return {key: second.rest.get(key) for key in keys if any(rest.get(key) != second.rest.get(key) for rest in alike)}


def _compared(
    first: _Experiment, second: _Experiment, names: tuple[str, str], seeds: Sequence[int], where: dict[str, Any]
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
        base=names[0],
        other=names[1],
        where=where,
        seeds=tuple(seeds),
        lines=tuple(lines),
        loss=_loss(pairs, seeds),
        speed=_speed(pairs),
        parameters=other.model.parameters.trainable / one.model.parameters.trainable,
        state=_ratio(second.state, first.state),
        state_elements=(first.state, second.state),
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


def _without(settings: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Settings without these and all below them, and without the cell's name, which says no more than others do."""
    return {
        key: value
        for key, value in settings.items()
        if key != _CELL and not any(key == free or key.startswith(f"{free}.") for free in keys)
    }


def _unlike(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The first setting in which two differ."""
    key = next(key for key in {**one, **other} if one.get(key) != other.get(key))
    return f"{key} is {short(other.get(key))}, not {short(one.get(key))}"


def _why_nothing(experiments: Sequence[_Experiment], vary: Sequence[str]) -> str:
    names = sorted({experiment.cell for experiment in experiments})
    if vary:
        return f"no two records differ in {' or '.join(vary)} alone; here are {', '.join(names)}"
    for second in experiments:
        for first in experiments:
            same = first.settings.get("model.name") == second.settings.get("model.name")
            if same and first.rest != second.rest and first.cell != second.cell:
                return f"of {second.cell} and {first.cell}, {_unlike(first.rest, second.rest)}"
    return f"it takes a model with an add-on and the same without; here are {', '.join(names) or 'no records'}"
