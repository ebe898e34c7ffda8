"""One run of a sweep in a process of its own: what every engine has done, wherever it has it done.

PyTorch is imported by the call and not with this module, so that whoever calls it can set the process up first.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decaybench.core.errors import RunError, UserError
from decaybench.core.memory import keep_freed_memory
from decaybench.harness.interrupt import InterruptedRunError
from decaybench.harness.progress import Progress
from decaybench.results.run_folder import LockedError


@dataclass(frozen=True)
class Ended:
    """How a run ended. error: one line; None: done, or stopped on request. lost: without an answer; again: by no fault
    of its own, perhaps; busy: another process works on it. notes: what it said that matters.
    """

    error: str | None = None
    stopped: bool = False
    lost: bool = False
    again: bool = False
    busy: bool = False
    notes: tuple[str, ...] = ()


def carry_out_here(config: Mapping[str, Any], threads: int, gpus: str | None) -> Ended:
    """Carry out a run in this process, which does nothing else.

    config: plain. threads: of the CPU. gpus: those that it may see, as CUDA_VISIBLE_DEVICES has it; None: as it is.
    """
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    keep_freed_memory()
    import torch

    from decaybench.harness.config import make_config
    from decaybench.harness.run import carry_out

    torch.set_num_threads(threads)
    progress = _Notes()
    try:
        carry_out(make_config(config), progress=progress)
    except LockedError as error:
        return Ended(error=str(error), busy=True)
    except InterruptedRunError:
        return Ended(stopped=True, notes=tuple(progress.notes))
    except (UserError, RunError) as error:
        # A sweep has no --force, and doesn't need one.
        told = str(error).replace("--force starts", "deleting its folder starts")
        return Ended(error=" ".join(told.split()), notes=tuple(progress.notes))
    return Ended(notes=tuple(progress.notes))


def into_file(path: Path) -> None:
    """From now on this process writes what it prints into a file, the traceback of a crash among it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    faulthandler.enable(sys.stderr)


def last_words(path: Path) -> str:
    """The last line of such a file, of a traceback the error; empty: there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def death(code: int | None) -> str:
    """What an exit code says of a process that ended without an answer."""
    if code is None or code >= 0:
        return f"its process ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"its process was killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")


class _Notes(Progress):
    """Shows nothing and keeps the notes."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)
