"""The `bench` command for tests: called here, or in a process of its own that can be killed."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from decaybench import cli

# A model and a run as small as they can be: a step takes milliseconds.
TINY = (
    *("--train-length", "32", "--eval-lengths", "1x,2x", "--samples", "8"),
    *("--set", "model.d_model=16", "--set", "model.mixer.headdim=8", "--set", "model.mixer.d_state=8"),
    *("--set", "training.steps=12", "--set", "training.batch_tokens=128", "--set", "training.warmup=2"),
    *("--set", "training.learning_rate=0.01"),
)
NIAH = ("niah", *TINY, "--depths", "0,0.5,1")
MQAR = ("mqar", *TINY)
NOISY = ("mqar", "--noisy-sources", *TINY, "--set", "evaluation.persist_kv=2")

_processes: Any = multiprocessing.get_context("forkserver")
# Also what a run imports late: the optimiser its compiler, the registry the mixer.
PRELOADED = [
    *("decaybench.cli", "decaybench.harness.run", "torch._dynamo", "decaybench.models.mixers.mamba2", "rich.progress"),
    "tests.no_figures",
]
_processes.set_forkserver_preload(PRELOADED)


class Result(NamedTuple):
    """What a command left: its exit code and all that it printed."""

    code: int
    out: str
    err: str


def bench(*words: str) -> Result:
    """Call the command here, with the same entry point as the installed one."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        mock.patch.object(sys, "argv", ["bench", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 0 if exit_.code is None else 1
    return Result(code, out.getvalue(), err.getvalue())


class Started:
    """A command at work in a process of its own, in the folder `cwd`."""

    def __init__(self, words: tuple[str, ...], cwd: Path, output: Path, before: Callable[[], None] | None) -> None:
        self._output = [output / f".{what}-{time.monotonic_ns()}" for what in ("out", "err")]
        arguments = (words, cwd, self._output, before)
        self.process = _processes.Process(target=_child, args=arguments)
        self.process.start()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def wait_for(self, reached: Callable[[], bool]) -> bool:
        """Wait until something is reached; False where the process ended before."""
        while not reached():
            if not self.process.is_alive():
                return False
            time.sleep(0.001)
        return True

    def end(self) -> Result:
        """Wait for the end. A process killed by a signal has its negative number as code."""
        self.process.join(timeout=120)
        assert self.process.exitcode is not None, "still at work after two minutes"
        out, err = (path.read_text() if path.exists() else "" for path in self._output)
        return Result(self.process.exitcode, out, err)


def start(*words: str, cwd: Path, output: Path | None = None, before: Callable[[], None] | None = None) -> Started:
    """Start the command as a process that draws no figures, in no time: it comes from a server that has PyTorch loaded.

    output: folder of the files that take what it prints; before: called in the process first (picklable).
    """
    return Started(words, cwd, output or cwd, before)


def _child(words: tuple[str, ...], cwd: Path, output: list[Path], before: Callable[[], None] | None) -> None:
    import torch

    # Where the tests run in the background of a script, the shell has them ignore Ctrl-C, and so their children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    for stream, path in zip((1, 2), output, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), stream)
    torch.set_num_threads(1)
    if before:
        before()
    sys.argv = ["bench", *words]
    cli.main()
