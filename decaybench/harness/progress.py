"""What a user sees while a run works: progress with loss, accuracy and the time left, and notes, all on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

Show = Callable[[int, str], None]

_LINE_EVERY = 15.0  # seconds, where stderr is a file or a pipe and a bar can't be drawn


class Progress:
    """Bars and notes on stderr. quiet: neither; notes of damage are shown all the same."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        """A line of news; not shown when quiet."""
        if not self.quiet:
            self.console.print(text, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """A line that matters even to those who asked for quiet."""
        self.console.print(f"note: {text}", markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, what: str, total: int, done: int) -> Iterator[Show]:
        """Progress of `what` over `total` steps; call it with (steps done, a few words about the present one)."""
        if self.quiet:
            yield lambda done, text: None
        elif self.console.is_terminal:
            yield from self._bar(what, total, done)
        else:
            yield self._lines(what, total, done)

    def _bar(self, what: str, total: int, done: int) -> Iterator[Show]:
        columns = (
            TextColumn(f"{what:<10}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        with Bars(*columns, console=self.console, refresh_per_second=4) as bars:
            task = bars.add_task("", total=total, completed=done, text="")
            yield lambda done, text: bars.update(task, completed=done, text=text)

    def _lines(self, what: str, total: int, start: int) -> Show:
        began = last = time.monotonic()

        def show(done: int, text: str) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last < _LINE_EVERY and done < total:
                return
            last = now
            left = (now - began) / max(1, done - start) * (total - done)
            self.say(f"{what} {done}/{total}  {left:.0f} s left  {text}")

        return show
