"""What a user sees while a sweep works: how many runs are where, those at work with step, loss and accuracy, failures.

How far a run is, its own log says (results.run_folder), wherever it is carried out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from decaybench.harness.plans import make_plan
from decaybench.harness.progress import Progress
from decaybench.harness.sweep.plan import Planned
from decaybench.results.record import Record, groups
from decaybench.tasks.registry import make_task

if TYPE_CHECKING:
    from rich.console import RenderableType

_TAIL = 4096  # bytes of a log that hold its last line
_LINE_EVERY = 30.0  # seconds, where stderr is no terminal
_MOST_ROWS = 20


class Board:
    """A table that is drawn anew on a terminal, and lines elsewhere. Used as a context."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total = progress, total
        self._began: dict[int, float] = {}
        self._steps: dict[int, int | None] = {}
        self._last = time.monotonic()
        self._live: Any = None

    def __enter__(self) -> Self:
        if not self._progress.quiet and self._progress.console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._progress.console, refresh_per_second=2, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line of news."""
        self._progress.say(text)

    def note(self, text: str) -> None:
        """A line that matters even to those who asked for quiet."""
        self._progress.note(text)

    def started(self, run: Planned) -> None:
        """A run begins."""
        self._began[run.number] = time.monotonic()
        if self._live is None:
            self.say(f"start    {self._place(run)}")

    def done(self, run: Planned, record: Record | None, damaged: str | None) -> None:
        """A run ended as it should; damaged: its record didn't survive that."""
        if record is None:
            self.failed(run, damaged or "")
        else:
            self.say(f"done     {self._place(run)}, {self._seconds(run)}: {headline(record)}")

    def failed(self, run: Planned, error: str) -> None:
        """A run failed."""
        self.say(f"failed   {self._place(run)}, {self._seconds(run)}: {error}")

    def show(self, active: Iterable[Planned], done: int, failures: Mapping[int, str], waiting: int) -> None:
        """The present state."""
        if self._progress.quiet:
            return
        rows = list(active)
        counts = f"{done} of {self._total} done, {len(failures)} failed, {len(rows)} at work, {waiting} waiting"
        if self._live is not None:
            self._live.update(self._table(rows, counts))
        elif time.monotonic() - self._last > _LINE_EVERY:
            self._last = time.monotonic()
            self.say("; ".join([counts, *(f"{run.label}: {self._at(run)}" for run in rows[:4])]))

    def _table(self, rows: list[Planned], counts: str) -> RenderableType:
        from rich.table import Table

        table = Table(title=counts, title_justify="left", box=None, pad_edge=False)
        for heading in ("run", "at work", "for", "at"):
            table.add_column(heading, no_wrap=True)
        for run in rows[:_MOST_ROWS]:
            table.add_row(str(run.number), run.label, self._seconds(run), self._at(run))
        if len(rows) > _MOST_ROWS:
            table.add_row("", f"and {len(rows) - _MOST_ROWS} more", "", "")
        return table

    def _at(self, run: Planned) -> str:
        event = last_event(run.folder.path / "log.jsonl")
        total = self._total_steps(run)
        if total is None:
            return "evaluating"
        if event is None:
            return f"step 0/{total}"
        if event["step"] >= total:
            return "evaluating"
        return f"step {event['step']}/{total}  loss {event['loss']:.3f}  accuracy {event['accuracy']:.3f}"

    def _total_steps(self, run: Planned) -> int | None:
        """Of its training; None: it has none."""
        if run.number not in self._steps:
            config = run.config
            trained = config.checkpoint is None
            plan = make_plan(make_task(config.task).stages(), config.training, config.seed) if trained else None
            self._steps[run.number] = plan.total_steps if plan else None
        return self._steps[run.number]

    def _place(self, run: Planned) -> str:
        return f"{run.number}/{self._total}  {run.label}"

    def _seconds(self, run: Planned) -> str:
        return f"{time.monotonic() - self._began.get(run.number, time.monotonic()):.0f} s"


def headline(record: Record) -> str:
    """A record in a few words: by variant its values from the shortest length to the longest."""
    found: dict[str, list[str]] = {}
    for group in groups(record):
        value = group.value if group.bits_per_byte is None else group.bits_per_byte[0]
        found.setdefault(group.variant, []).append(f"{value:.3f}")
    return ", ".join(f"{variant} {' '.join(values)}" for variant, values in found.items())


def last_event(log: Path) -> dict[str, Any] | None:
    """The last whole line of a run's log that says how far training is; None: there is none yet."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and {"step", "loss", "accuracy"} <= event.keys():
            return event
    return None
