"""Stopping on request: Ctrl-C or SIGTERM asks for a checkpoint first; a second one stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

from decaybench.core.errors import RunError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptedRunError(RunError):
    """The user or the system asked to stop; the same command goes on from there."""


class Stop:
    """While active, the first Ctrl-C or SIGTERM only sets `wanted`; the second acts as usual."""

    def __init__(self) -> None:
        self.wanted = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._before = {number: signal.signal(number, self._asked) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def raise_if_wanted(self, what: str, by_all: bool | None = None) -> None:
        """Raises InterruptedRunError, saying `what` was left, if somebody asked to stop.

        by_all: what several processes agreed on in place of `wanted`, which may have been set since; it stays so.
        """
        if self.wanted if by_all is None else by_all:
            raise InterruptedRunError(f"{what}; the same command goes on from there")

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
