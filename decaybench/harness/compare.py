"""Does an add-on help? Models with it against the same without, from finished runs, a leaderboard, or runs made now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from decaybench.core.errors import UserError
from decaybench.core.names import unknown
from decaybench.harness.addons import ADDONS
from decaybench.harness.presets import configure
from decaybench.harness.progress import Progress
from decaybench.harness.run import carry_out_all
from decaybench.results.comparison import chosen
from decaybench.results.leaderboard import read_leaderboard
from decaybench.results.pairs import Comparisons, compare
from decaybench.results.record import Record, read_record
from decaybench.results.run_folder import find_evaluations


def compare_runs(runs: Sequence[Path], *, base: str | None = None) -> Comparisons:
    """Every evaluation of these run folders. Raises UserError where there is nothing to compare (`results.pairs`)."""
    return _compared([read_record(found.record_path) for run in runs for found in find_evaluations(run)], base)


def compare_entries(
    file: Path,
    *,
    task: str | None = None,
    models: Sequence[str] = (),
    where: Iterable[str] = (),
    base: str | None = None,
) -> Comparisons:
    """The records of a leaderboard: of one task, of these architectures (none: all), and with these settings."""
    records = read_leaderboard(file)
    if task is not None:
        records = _of("task", [task], [(record.task.name, record) for record in records])
    if models:
        records = _of("model", models, [(record.model.architecture, record) for record in records])
    return _compared(chosen(records, where), base)


def compare_addon(
    task: str,
    model: str,
    addon: str,
    *,
    seeds: Sequence[int],
    preset: str | None = None,
    settings: Iterable[str] = (),
    out: Path | None = None,
    progress: Progress,
) -> Comparisons:
    """A model with an add-on and without, for each seed; runs that are finished already are not done again."""
    if addon not in ADDONS:
        raise unknown("add-on", addon, ADDONS)
    records: list[Record] = []
    without: dict[str, Any] = {"model.name": model, "out": None if out is None else str(out)}
    for flags in (without, {**without, f"model.{addon}": {}}):
        configs = configure(task, preset=preset, flags=flags, settings=settings, seeds=seeds)
        records += [outcome.record for outcome in carry_out_all(configs, progress=progress)]
    return _compared(records, None)


def _compared(records: Sequence[Record], base: str | None) -> Comparisons:
    if len({record.task.name for record in records}) > 1 and base is not None:
        names = sorted({record.task.name for record in records})
        raise UserError(f"--base needs records of one task, not of {', '.join(names)}; choose with --task")
    return compare(records, tuple(ADDONS), base)


def _of(what: str, wanted: Sequence[str], named: Sequence[tuple[str, Record]]) -> list[Record]:
    known = {name for name, _ in named}
    for name in wanted:
        if name not in known:
            raise unknown(f"{what} of the leaderboard", name, known)
    return [record for name, record in named if name in wanted]
