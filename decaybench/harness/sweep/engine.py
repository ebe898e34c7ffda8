"""What carries out a sweep's runs, several at a time: processes of this machine, or of a cluster."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from decaybench.harness.sweep.plan import Planned
from decaybench.harness.sweep.worker import Ended


class Engine(Protocol):
    """Carries out runs, several at a time. Left, it kills what still works."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def name(self) -> str:
        """What it is, for the user: processes, threads, machines."""
        ...

    def room(self) -> int:
        """How many runs could be started now."""
        ...

    def start(self, run: Planned) -> None:
        """Start a run."""
        ...

    def wait(self, seconds: float) -> list[tuple[Planned, Ended]]:
        """The runs that have ended, as soon as one has; none after so many seconds."""
        ...

    def stop(self) -> None:
        """Ask all that is at work to write a checkpoint and end."""
        ...
