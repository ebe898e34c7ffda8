"""Worker processes: tasks in, results out as they are done; a worker that dies is noticed, and none outlives us.

Every worker has a pipe of its own. A full queue can't block anyone, a killed worker (out of memory, say) shows as the
end of its pipe, and one whose parent is killed ends at once, so that nobody writes where another process works by then.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from decaybench.core.errors import RunError, UserError

_NO_MEMORY = "out of memory; the same command goes on, and needs less with fewer --workers"

Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers(Generic[Task, Result]):
    """`count` processes that each call `make(setup)` once, and the function it returns for every task.

    With one, the tasks are done here. `make` is a module's function; setup, tasks and results are picklable. Ended with
    the `with` block, what is at work is killed.
    """

    def __init__(self, count: int, make: Callable[[Any], Callable[[Task], Result]], setup: Any) -> None:
        self._count, self._make, self._setup = count, make, setup
        self._started: list[tuple[Connection, multiprocessing.process.BaseProcess]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection, process in self._started:
            process.kill()
            process.join()
            connection.close()

    def do(self, tasks: Iterable[Task]) -> Iterator[Result]:
        """The results, in the order in which they are done; a task is taken when a worker is free for it.

        Raises what a task raises of UserError and RunError, and RunError where a worker dies or lacks memory.
        """
        if self._count == 1:
            try:
                yield from map(self._make(self._setup), tasks)
            except MemoryError:
                raise RunError(_NO_MEMORY) from None
            return
        rest = iter(tasks)
        busy = {free for free in range(self._count) if self._give(free, rest)}
        while busy:
            ready = wait([self._started[number][0] for number in busy])
            for number in [n for n in busy if self._started[n][0] in ready]:
                result = self._take(number)
                if not self._give(number, rest):
                    busy.remove(number)
                yield result

    def _give(self, number: int, tasks: Iterator[Task]) -> bool:
        for task in tasks:
            if number == len(self._started):
                self._start()
            with suppress(OSError):  # dead: its pipe's end, which is read next, says so
                self._started[number][0].send(task)
            return True
        return False

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a copy of this process would have its threads' locks too
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self._make, self._setup), daemon=True)
        process.start()
        theirs.close()
        self._started.append((ours, process))

    def _take(self, number: int) -> Result:
        connection, process = self._started[number]
        try:
            done, result = connection.recv()
        except (EOFError, OSError):
            process.join()
            raise RunError(
                f"a worker ended with code {process.exitcode} (out of memory?); the same command goes on, and needs "
                "less memory with fewer --workers"
            ) from None
        if not done:
            raise result
        return result  # type: ignore[no-any-return]


def end_with_parent() -> None:
    """From now on a process of multiprocessing ends at once when the one that started it does, however that ends."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _work(connection: Connection, make: Callable[[Any], Callable[[Any], Any]], setup: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent decides
    end_with_parent()
    do: Callable[[Any], Any] | None = None
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        try:
            do = do or make(setup)
            answer = (True, do(task))
        except (UserError, RunError) as error:
            answer = (False, error)
        except MemoryError:
            answer = (False, RunError(_NO_MEMORY))
        connection.send(answer)


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
