"""Runs in processes of this machine: each in one of its own, so that one which crashes takes no other with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

import decaybench
from decaybench.core.errors import UserError
from decaybench.harness.sweep.plan import Planned
from decaybench.harness.sweep.worker import Ended, carry_out_here, death, into_file, last_words
from decaybench.harness.workers import end_with_parent

_ROOT = Path(decaybench.__file__).resolve().parents[1]
# What a run imports, loaded once by the server that every run's process is a copy of; also what is imported late.
_PRELOAD = ["decaybench.harness.run", "torch._dynamo", "matplotlib.figure", "typer", "rich.progress"]


@dataclass
class _Working:
    run: Planned
    connection: Connection
    process: Any
    log: Path
    gpu: str | None


class LocalEngine:
    """`workers` runs at a time (None: as many as the cores have threads for, or the GPUs room).

    threads: of a run's CPU. gpus: share of a GPU that a run takes; None: a whole one where there are any. logs: folder
    of what the processes print. Raises UserError where there is no GPU to take a share of.
    """

    def __init__(self, workers: int | None, threads: int, gpus: float | None, logs: Path) -> None:
        self._slots = _gpu_slots(gpus)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        room = len(self._slots) if self._slots else max(1, cores // threads)
        self.workers = room if workers is None else workers
        if self._slots and self.workers > len(self._slots):
            raise UserError(
                f"--workers {self.workers}: the GPUs have room for {len(self._slots)} runs; gpus in the file is the "
                "share of one that a run takes"
            )
        self._threads, self._logs = threads, logs
        self._working: list[_Working] = []
        self._context = _context()
        self._over = not self._slots and self.workers * threads > cores
        self._cores = cores

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for working in self._working:
            working.process.kill()
            working.process.join()
            working.connection.close()
        self._working = []

    @property
    def name(self) -> str:
        processes = "one process" if self.workers == 1 else f"{self.workers} processes"
        threads = "one thread" if self._threads == 1 else f"{self._threads} threads"
        over = f", which is more than the {self._cores} cores" if self._over else ""
        on = f"; GPU {', '.join(dict.fromkeys(self._slots))}" if self._slots else ""
        return f"{processes} at a time, each of {threads}{over}{on}"

    def room(self) -> int:
        return self.workers - len(self._working)

    def start(self, run: Planned) -> None:
        gpu = next((slot for slot in self._free_slots()), "") if self._slots is not None else None
        log = self._logs / f"{run.key.replace('/', '-')}.txt"
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_work, args=(theirs, run.config.plain(), self._threads, gpu, log), daemon=True
        )
        process.start()
        theirs.close()
        self._working.append(_Working(run, ours, process, log, gpu))

    def wait(self, seconds: float) -> list[tuple[Planned, Ended]]:
        if not self._working:
            time.sleep(seconds)
            return []
        ready = wait([working.connection for working in self._working], timeout=seconds)
        ended = [working for working in self._working if working.connection in ready]
        self._working = [working for working in self._working if working not in ended]
        return [(working.run, _end(working)) for working in ended]

    def stop(self) -> None:
        for working in self._working:
            with suppress(OSError):
                os.kill(working.process.pid, signal.SIGTERM)

    def _free_slots(self) -> list[str]:
        free = list(self._slots or [])
        for working in self._working:
            if working.gpu in free:
                free.remove(working.gpu)
        return free


def _context() -> Any:
    """A copy of a process that has PyTorch loaded takes no time; elsewhere than on Linux that isn't safe."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    before = os.environ.get("PYTHONPATH")
    # The server finds modules by the environment alone, and is to load this package, not one installed beside it.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before:
            os.environ["PYTHONPATH"] = before
    return context


def _gpu_slots(share: float | None) -> list[str] | None:
    """The GPUs, each as often as runs fit on it; None: there are none, and nobody asked."""
    if share == 0:
        return []
    count = torch.cuda.device_count()
    if not count:
        if share is not None:
            raise UserError(f"gpus={share:g}: this PyTorch finds no GPU; leave gpus out, or 0")
        return None
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = named[:count] if named else [str(number) for number in range(count)]
    return [name for name in names for _ in range(int(1 / (share or 1) + 1e-9))]


def _end(working: _Working) -> Ended:
    """The answer of a process whose pipe has something to say, be it that the process is dead."""
    try:
        ended = working.connection.recv()
    except (EOFError, OSError):
        working.process.join()
        ended = None
    working.connection.close()
    working.process.join()
    if ended is None:
        said = last_words(working.log)
        why = death(working.process.exitcode) + (f": {said}" if said else "") + f" (see {working.log})" * bool(said)
        return Ended(error=why, lost=True)
    with suppress(OSError):
        if not working.log.stat().st_size:
            working.log.unlink()
    assert isinstance(ended, Ended)
    return ended


def _work(connection: Connection, config: dict[str, Any], threads: int, gpu: str | None, log: Path) -> None:
    # A session of its own: Ctrl-C is for the parent alone, which asks by SIGTERM.
    if hasattr(os, "setsid"):
        os.setsid()
    end_with_parent()
    into_file(log)
    connection.send(carry_out_here(config, threads, gpu))
