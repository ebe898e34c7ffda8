"""What came of a sweep: the summary by model, every cell of every run as CSV, and accuracy against the state's size."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decaybench.core.errors import RunError
from decaybench.core.files import atomic_write_text
from decaybench.harness.sweep.plan import Plan, Planned, written
from decaybench.harness.sweep.state_figure import draw_states
from decaybench.results.leaderboard import table as summary
from decaybench.results.record import CellResult, Record

if TYPE_CHECKING:
    from rich.table import Table

CSV = "runs.csv"
_OWN = ("task", "seed", "model.name")  # have columns of their own


@dataclass(frozen=True)
class Finished:
    """A sweep that nothing is left to do of. records, failures: by the run's number. files: what was written of it."""

    plan: Plan
    records: dict[int, Record]
    failures: dict[int, str]
    files: list[Path]

    def tables(self) -> Iterator[Table]:
        """The summary, and the runs that failed."""
        from rich.table import Table

        if self.records:
            yield summary(list(self.records.values()))
        if self.failures:
            failed = Table(title="failed; the same command starts them again", title_justify="left")
            for heading in ("run", "", "error"):
                failed.add_column(heading, overflow="fold")
            for run in self.plan.runs:
                if run.number in self.failures:
                    failed.add_row(str(run.number), run.label, self.failures[run.number])
            yield failed

    def raise_if_failed(self) -> None:
        """Raises RunError where any run failed."""
        if self.failures:
            number, error = next(iter(sorted(self.failures.items())))
            label = next(run.label for run in self.plan.runs if run.number == number)
            raise RunError(
                f"{len(self.failures)} of {len(self.plan.runs)} runs failed, the first: {label}: {error}; "
                "the same command starts them again"
            )

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "runs": [self._plain(run) for run in self.plan.runs],
            "failed": len(self.failures),
            "files": [str(path) for path in self.files],
        }

    def _plain(self, run: Planned) -> dict[str, Any]:
        record, error = self.records.get(run.number), self.failures.get(run.number)
        return {
            "run": run.number,
            "label": run.label,
            "asked": run.asked,
            "seed": run.config.seed,
            "state": "failed" if record is None else "done",
            "error": error,
            "record": None if record is None else str(run.evaluation.record_path),
            "record_id": None if record is None else record.record_id,
        }


def write_report(plan: Plan, records: dict[int, Record], failures: dict[int, str], folder: Path) -> Finished:
    """Write the CSV, and the figure where there is one to draw. Raises RunError."""
    table = folder / CSV
    atomic_write_text(table, _csv(plan, records, failures))
    ordered = {run.number: records[run.number] for run in plan.runs if run.number in records}
    return Finished(plan, ordered, failures, [table, *draw_states(list(ordered.values()), folder)])


def _csv(plan: Plan, records: Mapping[int, Record], failures: Mapping[int, str]) -> str:
    """No number in it depends on where or when a run was carried out."""
    varying = [key for key in plan.varying if key not in _OWN]
    coordinates = list(
        dict.fromkeys(name for record in records.values() for cell in record.cells for name in cell.coordinates)
    )
    headings = ["run", "task", "model", "architecture", "seed", *varying, "parameters", "state_elements"]
    headings += ["train_length", "variant", "length", "ratio", *coordinates, "samples", "value", "low", "high"]
    headings += ["bits_per_byte", "folder", "error"]
    text = io.StringIO()
    writer = csv.DictWriter(text, headings, lineterminator="\n")
    writer.writeheader()
    for run in plan.runs:
        asked = {key: written(run.asked[key]) for key in varying if key in run.asked}
        start = {"run": run.number, "task": run.config.task.name, "folder": run.folder.path.name, **asked}
        record = records.get(run.number)
        if record is None:
            model = run.config.model
            writer.writerow(
                start
                | {"model": model.cell, "architecture": model.name, "seed": run.config.seed}
                | {"error": failures.get(run.number, "")}
            )
            continue
        start |= {
            "model": record.model.cell,
            "architecture": record.model.architecture,
            "seed": record.seed,
            "parameters": record.model.parameters.trainable,
            "state_elements": sum(record.model.state_elements),
            "train_length": record.train_length,
        }
        for cell in record.cells:
            writer.writerow({**start, **_numbers(cell)})
    return text.getvalue()


def _numbers(cell: CellResult) -> dict[str, Any]:
    return {
        "variant": cell.variant,
        "length": cell.eval_length,
        "ratio": cell.ratio,
        **cell.coordinates,
        "samples": cell.n,
        "value": cell.value,
        "low": cell.interval[0],
        "high": cell.interval[1],
        "bits_per_byte": cell.bits_per_byte,
    }
