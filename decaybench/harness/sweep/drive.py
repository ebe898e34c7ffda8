"""A sweep from its file to its summary: what is done already is left alone, the rest is given to an engine.

Beside the runs' own folders a sweep keeps one of its own, FILE without its ending:

    failures.json    the runs that failed, with their errors, until they succeed
    logs/            what a run's process printed, where it printed anything
    runs.csv         a line for each run and cell of its evaluation, in the file's order
    state-TASK.png   accuracy by state elements, where the runs' states differ; and as .svg

Nothing else is remembered from one sitting to the next: whether a run is done, its own folder says.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decaybench.core.errors import UserError
from decaybench.core.files import atomic_write_json, locked, read_json, writing
from decaybench.core.names import unknown
from decaybench.harness.distributed import expected_processes
from decaybench.harness.environment import resolve_device
from decaybench.harness.interrupt import InterruptedRunError, Stop
from decaybench.harness.progress import Progress
from decaybench.harness.run import kept_record
from decaybench.harness.sweep.board import Board
from decaybench.harness.sweep.engine import Engine
from decaybench.harness.sweep.local import LocalEngine
from decaybench.harness.sweep.plan import Plan, Planned, read_plan
from decaybench.harness.sweep.report import Finished, write_report
from decaybench.harness.sweep.worker import Ended
from decaybench.results.record import Record

if TYPE_CHECKING:
    from rich.table import Table

ENGINES = ("local", "ray")
_GLANCE = 0.2  # seconds between looks at what is at work
_TRIES = 4  # of a run whose worker is lost
_BUSY = 5.0  # seconds until a run that another process works on is looked at again


@dataclass(frozen=True)
class Wish:
    """What a command asks of a sweep. out: folder of run folders; folder: the sweep's own; None: as the module says."""

    file: Path
    engine: str = "local"
    workers: int | None = None
    address: str | None = None
    out: Path | None = None
    folder: Path | None = None


def sweep(wish: Wish, *, progress: Progress) -> Finished:
    """Carry out all runs of a sweep's file that aren't done yet, and sum up all of them.

    Raises UserError before anything is started where anything is wrong; RunError where another process works on the
    same sweep; InterruptedRunError on Ctrl-C, with what was at work left where it can go on. A run that fails doesn't
    raise: `Finished.failures` has it.
    """
    _check(wish)
    plan = read_plan(wish.file, out=wish.out)
    folder = _folder(wish)
    for line in plan.repeated:
        progress.say(line)
    with _locked(folder):
        work = _Work(plan, folder, progress)
        if work.waiting:
            with _engine(wish, plan, folder) as engine:
                work.carry_out(engine)
        return write_report(plan, work.records, work.failures, folder)


@dataclass(frozen=True)
class Seen:
    """The runs of a sweep, and how each stands: done, begun, failed with its error, or waiting."""

    plan: Plan
    standings: list[str]

    def table(self) -> Table:
        """For a terminal."""
        from rich.table import Table

        counts = Counter(standing.partition(":")[0] for standing in self.standings)
        title = f"{_run_count(len(self.plan.runs))}: " + ", ".join(f"{count} {name}" for name, count in counts.items())
        table = Table(title=title, title_justify="left", caption="\n".join(self.plan.repeated), caption_justify="left")
        for heading in ("run", "what", "folder", "stands"):
            table.add_column(heading, overflow="fold")
        for run, standing in zip(self.plan.runs, self.standings, strict=True):
            table.add_row(str(run.number), run.label, run.folder.path.name, standing)
        return table

    def plain(self) -> list[dict[str, Any]]:
        """JSON-able."""
        return [
            {
                "run": run.number,
                "label": run.label,
                "asked": run.asked,
                "seed": run.config.seed,
                "record": str(run.evaluation.record_path),
                "stands": standing,
            }
            for run, standing in zip(self.plan.runs, self.standings, strict=True)
        ]


def look(wish: Wish) -> Seen:
    """What a sweep's file asks for, without doing it. Raises UserError where anything is wrong."""
    _check(wish)
    plan = read_plan(wish.file, out=wish.out)
    failed = _read_failures(_folder(wish))
    return Seen(plan, [_standing(run, failed) for run in plan.runs])


def _check(wish: Wish) -> None:
    if wish.engine not in ENGINES:
        raise unknown("engine", wish.engine, ENGINES)
    if wish.workers is not None and wish.workers < 1:
        raise UserError(f"--workers {wish.workers}: one at least")
    if wish.address is not None and wish.engine != "ray":
        raise UserError(f"--address {wish.address} is of a Ray cluster: it goes with --engine ray")
    if expected_processes() > 1:
        raise UserError("bench sweep starts processes itself: call it without torchrun")


def _folder(wish: Wish) -> Path:
    folder = wish.folder or wish.file.with_suffix("")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, and the sweep keeps its own files in a folder: name one by --folder")
    return folder


def _standing(run: Planned, failed: dict[str, str]) -> str:
    if run.evaluation.is_complete():
        return "done"
    if run.key in failed:
        return f"failed: {failed[run.key]}"
    return "begun" if run.folder.config_path.exists() else "waiting"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", f"another process is working on the sweep of {folder}; wait for it"):
        yield


def _engine(wish: Wish, plan: Plan, folder: Path) -> Engine:
    if wish.engine == "ray":
        from decaybench.harness.sweep.cluster import RayEngine

        return RayEngine(wish.address, wish.workers, plan.threads, plan.gpus, folder / "logs")
    for device in {run.config.device for run in plan.runs}:
        resolve_device(device)
    return LocalEngine(wish.workers, plan.threads, plan.gpus, folder / "logs")


class _Work:
    """The runs of a sweep on their way: waiting, at work, done, failed."""

    def __init__(self, plan: Plan, folder: Path, progress: Progress) -> None:
        self._failures_file = folder / "failures.json"
        self._progress = progress
        self._total = len(plan.runs)
        self._tries: dict[int, int] = {}
        self._not_before: dict[int, float] = {}  # of runs that another process works on
        self.active: dict[int, Planned] = {}
        self.records: dict[int, Record] = {}
        self.failures: dict[int, str] = {}
        self.waiting: list[Planned] = []
        self._known = _read_failures(folder)
        if gone := self._known.keys() - {run.key for run in plan.runs}:  # the file was changed
            self._known = {key: error for key, error in self._known.items() if key not in gone}
            self._write_failures()
        again = 0
        for run in plan.runs:
            if run.evaluation.is_complete():
                self._done(run)
            else:
                self.waiting.append(run)
                again += run.key in self._known
        done = len(self.records) + len(self.failures)
        remark = f", {again} of them failed before and start again" if again else ""
        progress.say(f"{_run_count(self._total)}, {done} done already, {len(self.waiting)} to do{remark}")

    def carry_out(self, engine: Engine) -> None:
        """Until nothing is left. Raises InterruptedRunError where somebody asks to stop."""
        stopping = False
        self._progress.say(engine.name)
        with Stop() as stop, Board(self._progress, self._total) as board:
            while self.active or (self.waiting and not stopping):
                if not stopping:
                    self._start(engine, board)
                for run, ended in engine.wait(_GLANCE):
                    # Ctrl-C also ends a process that isn't in a session of its own yet, before engine.stop is called.
                    self._take(run, ended, stopping or stop.wanted, board)
                board.show(self.active.values(), len(self.records), self.failures, len(self.waiting))
                if stop.wanted and not stopping:
                    stopping = True
                    board.say("stopping: what is at work writes a checkpoint first")
                    engine.stop()
        if stopping:
            raise InterruptedRunError(
                f"stopped with {len(self.records)} of {self._total} runs done; the same command goes on from there"
            )

    def _start(self, engine: Engine, board: Board) -> None:
        """As many as there is room for; of those that share a run's folder one at a time."""
        room = engine.room()
        for run in list(self.waiting):
            if room < 1:
                return
            if any(run.folder.path == other.folder.path for other in self.active.values()):
                continue
            if time.monotonic() < self._not_before.get(run.number, 0.0):
                continue
            self.waiting.remove(run)
            self.active[run.number] = run
            board.started(run)
            engine.start(run)
            room -= 1

    def _take(self, run: Planned, ended: Ended, stopping: bool, board: Board) -> None:
        del self.active[run.number]
        for note in ended.notes:
            board.note(f"{run.label}: {note}")
        if ended.stopped or (ended.lost and stopping):
            self.waiting.append(run)
        elif ended.busy:
            # Another sweep's, say; or a lost worker's: NFS keeps the lock of a lost client for 90 s.
            if run.number not in self._not_before:
                board.note(f"{run.label}: another process is working on it; it waits until that ends")
            self._not_before[run.number] = time.monotonic() + _BUSY
            self.waiting.append(run)
        elif ended.again and self._tries.get(run.number, 1) < _TRIES:
            self._tries[run.number] = self._tries.get(run.number, 1) + 1
            board.note(f"{run.label}: {ended.error}; it goes on from its last checkpoint")
            self.waiting.insert(0, run)
        elif ended.error is not None:
            self._failed(run, ended.error)
            board.failed(run, ended.error)
        else:
            self._done(run)
            board.done(run, self.records.get(run.number), self.failures.get(run.number))

    def _done(self, run: Planned) -> None:
        try:
            self.records[run.number] = kept_record(run.evaluation)
        except UserError as error:
            self._failed(run, str(error))
            return
        if self._known.pop(run.key, None) is not None:
            self._write_failures()

    def _failed(self, run: Planned, error: str) -> None:
        self.failures[run.number] = error
        self._known[run.key] = error
        self._write_failures()

    def _write_failures(self) -> None:
        if self._known or self._failures_file.exists():
            atomic_write_json(self._failures_file, self._known)


def _read_failures(folder: Path) -> dict[str, str]:
    """What failed in a sitting before; a damaged file is as good as none: the runs' own folders count."""
    try:
        found: Any = read_json(folder / "failures.json")
    except UserError:
        return {}
    return {str(key): str(error) for key, error in found.items()} if isinstance(found, dict) else {}


def _run_count(number: int) -> str:
    """1 run, 2 runs."""
    return f"{number} run{'' if number == 1 else 's'}"
