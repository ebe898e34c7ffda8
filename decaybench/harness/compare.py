"""Does an add-on help? Models with it against the same without, from finished runs, a leaderboard, or runs made now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from decaybench.core.errors import UserError
from decaybench.core.names import unknown
from decaybench.harness.addons import ADDONS
from decaybench.harness.config import RunConfig
from decaybench.harness.equal_state import sized_state
from decaybench.harness.presets import configure
from decaybench.harness.progress import Progress
from decaybench.harness.run import carry_out_all
from decaybench.results.comparison import chosen
from decaybench.results.leaderboard import read_leaderboard
from decaybench.results.pairs import Comparisons, Equal, compare
from decaybench.results.record import Record, read_record
from decaybench.results.run_folder import find_evaluations


def compare_runs(
    runs: Sequence[Path],
    *,
    seeds: Sequence[int] | None = None,
    base: str | None = None,
    vary: Sequence[str] = (),
    equal: str | None = None,
) -> Comparisons:
    """Every evaluation of these run folders; of runs that aren't finished a note says so.

    seeds: of these alone; None: of all. base, vary, equal: see `results.pairs.compare`. Raises UserError where there is
    nothing to compare.
    """
    records, unfinished = [], []
    for run in runs:
        try:
            evaluations = find_evaluations(run)
        except UserError:
            if len(runs) == 1 or not (run / "config.yaml").is_file():
                raise
            unfinished.append(f"{run.name} left out: it has no finished evaluation")
            continue
        records += [read_record(found.record_path) for found in evaluations]
    found = _compared(_of_seeds(records, seeds), base, vary, equal)
    return replace(found, notes=(*found.notes, *unfinished))


def compare_entries(
    file: Path,
    *,
    task: str | None = None,
    models: Sequence[str] = (),
    where: Iterable[str] = (),
    seeds: Sequence[int] | None = None,
    base: str | None = None,
    vary: Sequence[str] = (),
    equal: str | None = None,
) -> Comparisons:
    """The records of a leaderboard: of one task, of these architectures (none: all), with these settings and seeds."""
    records = read_leaderboard(file)
    if task is not None:
        records = _of("task", [task], [(record.task.name, record) for record in records])
    if models:
        records = _of("model", models, [(record.model.architecture, record) for record in records])
    return _compared(_of_seeds(chosen(records, where), seeds), base, vary, equal)


def compare_addon(
    task: str,
    model: str,
    addon: str,
    *,
    seeds: Sequence[int],
    preset: str | None = None,
    settings: Iterable[str] = (),
    out: Path | None = None,
    equal: str | None = None,
    progress: Progress,
) -> Comparisons:
    """A model with an add-on and without, for each seed; runs that are finished already are not done again.

    equal: state, the model without it is sized so that its state has the most nearly as many numbers.
    """
    if addon not in ADDONS:
        raise unknown("add-on", addon, ADDONS)
    flags: dict[str, Any] = {"model.name": model, "out": None if out is None else str(out)}
    how: dict[str, Any] = {"preset": preset, "seeds": seeds}
    without = configure(task, flags=flags, settings=settings, **how)
    others = configure(task, flags={**flags, f"model.{addon}": {}}, settings=settings, **how)
    if _checked(equal) is None:
        return _compared(_records(without + others, progress), None)
    sized = sized_state(without[0].model, others[0].model)
    said = sized.said(without[0].model.cell, others[0].model.cell)
    progress.say(said)
    if not sized.changed:
        found = _compared(_records(without + others, progress), None)
    else:
        without = configure(task, flags=flags, settings=[*settings, f"{sized.key}={sized.value}"], **how)
        found = _compared(_records(without + others, progress), without[0].model.cell, [sized.key])
    return replace(found, notes=(*found.notes, said))


def compare_settings(
    task: str,
    model: str,
    varied: Sequence[str],
    *,
    seeds: Sequence[int],
    preset: str | None = None,
    settings: Iterable[str] = (),
    out: Path | None = None,
    progress: Progress,
) -> Comparisons:
    """A model with all of these settings, KEY=VALUE, and with none; finished runs are not done again."""
    flags: dict[str, Any] = {"model.name": model, "out": None if out is None else str(out)}
    how: dict[str, Any] = {"flags": flags, "preset": preset, "seeds": seeds}
    settings = list(settings)
    without = configure(task, settings=settings, **how)
    others = configure(task, settings=[*settings, *varied], **how)
    if without[0].training_hash == others[0].training_hash:
        raise UserError(f"--vary {varied[0]}: the run without it has that too, so there is nothing to compare")
    keys = [setting.partition("=")[0].strip() for setting in varied]
    return _compared(_records(without + others, progress), None, keys)


def _records(configs: Sequence[RunConfig], progress: Progress) -> list[Record]:
    return [outcome.record for outcome in carry_out_all(configs, progress=progress)]


def _compared(
    records: Sequence[Record], base: str | None, vary: Sequence[str] = (), equal: str | None = None
) -> Comparisons:
    if len({record.task.name for record in records}) > 1 and base is not None:
        names = sorted({record.task.name for record in records})
        raise UserError(f"--base needs records of one task, not of {', '.join(names)}; choose with --task")
    return compare(records, tuple(ADDONS), base, vary=vary, equal=_checked(equal))


def _checked(equal: str | None) -> Equal | None:
    if equal is None:
        return None
    if equal != "state":
        raise unknown("--equal", equal, ["state"])
    return "state"


def _of_seeds(records: Sequence[Record], seeds: Sequence[int] | None) -> Sequence[Record]:
    if seeds is None:
        return records
    known = {record.seed for record in records}
    for seed in seeds:
        if seed not in known:
            raise UserError(f"--seeds: no record has seed {seed}; here are {', '.join(map(str, sorted(known)))}")
    return [record for record in records if record.seed in seeds]


def _of(what: str, wanted: Sequence[str], named: Sequence[tuple[str, Record]]) -> list[Record]:
    known = {name for name, _ in named}
    for name in wanted:
        if name not in known:
            raise unknown(f"{what} of the leaderboard", name, known)
    return [record for name, record in named if name in wanted]
