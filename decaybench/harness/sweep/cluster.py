"""Runs on a Ray cluster: one that is there, or one of this machine alone. Every node sees the same folders.

A run whose node or process is lost is no failure: it goes on from its last checkpoint wherever there is room. Ray's own
retries are off, so that such a run is seen, and one that takes its process down each time isn't tried for ever.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from decaybench.core.errors import RunError, UserError
from decaybench.core.files import writing
from decaybench.harness.sweep.plan import Planned
from decaybench.harness.sweep.worker import Ended, carry_out_here, into_file

_ANSWER = 5.0  # seconds that a cluster has to answer a first call
_OBJECTS = 10**8  # bytes of a new cluster's object store: nothing large goes through it


class RayEngine:
    """address: of the cluster; None: RAY_ADDRESS, or one that this machine belongs to, or a new one.

    workers: runs at a time; None: as many as the cluster has room for. threads, gpus, logs: as of LocalEngine.
    Raises UserError where Ray isn't installed, or the cluster can't take a run; RunError where it can't be reached.
    """

    def __init__(self, address: str | None, workers: int | None, threads: int, gpus: float | None, logs: Path) -> None:
        self._ray = _ray()
        self._address, self._workers, self._threads, self._gpus = address, workers, threads, gpus
        self._logs = logs.absolute()
        self._closing = ExitStack()
        self._working: dict[Any, Planned] = {}

    def __enter__(self) -> Self:
        with self._closing:  # until all is well
            # Ray tells news of its nodes on stdout, where --json has its output.
            self._closing.enter_context(_stdout_into(self._logs / "ray.txt"))
            if not self._ray.is_initialized():
                self._join()
                self._closing.callback(self._ray.shutdown)
            self._settle()
            self._closing.callback(self._cancel)
            self._closing = self._closing.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    @property
    def name(self) -> str:
        nodes = sum(node["Alive"] for node in self._ray.nodes())
        found = self._ray.cluster_resources()
        gpus = f", {found['GPU']:g} GPUs" if found.get("GPU") else ""
        return (
            f"Ray, {nodes} node{'s' * (nodes != 1)} with {found.get('CPU', 0):g} CPUs{gpus}; a run takes "
            f"{self._threads} of them" + (f" and {self._share:g} of a GPU" if self._share else "")
        )

    def room(self) -> int:
        if self._workers is not None:
            return self._workers - len(self._working)
        found = self._ray.cluster_resources()
        room = int(found.get("CPU", 0) // self._threads)
        if self._share:
            room = min(room, int(found.get("GPU", 0) / self._share + 1e-9))
        return max(1, room) - len(self._working)  # one at least waits: a cluster that grows with demand must see some

    def start(self, run: Planned) -> None:
        options: dict[str, Any] = {"num_cpus": self._threads, "name": run.label}
        if self._share:
            options["num_gpus"] = self._share
        log = self._logs / f"{run.key.replace('/', '-')}.txt"
        reference = self._task.options(**options).remote(
            run.config.plain(), self._threads, None if self._share else "", Path.cwd(), log
        )
        self._working[reference] = run

    def wait(self, seconds: float) -> list[tuple[Planned, Ended]]:
        ready, _ = self._ray.wait(list(self._working), num_returns=1, timeout=seconds)
        return [(self._working.pop(reference), self._end(reference)) for reference in ready]

    def stop(self) -> None:
        for reference in self._working:
            self._ray.cancel(reference)

    def _cancel(self) -> None:
        for reference in self._working:
            with suppress(Exception):  # whatever is wrong with the cluster, there is nothing left to do
                self._ray.cancel(reference, force=True)
        self._working = {}

    def _join(self) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        address = self._address or os.environ.get("RAY_ADDRESS") or _on_this_machine()
        try:
            if address is None:
                self._ray.init(address="local", include_dashboard=False, object_store_memory=_OBJECTS, **quiet)
            else:
                _check_answers(address)
                self._ray.init(address=address, **quiet)
        except Exception as error:  # noqa: BLE001 Ray raises what it likes
            what = f"the Ray cluster at {address} can't be reached" if address else "Ray can't be started here"
            raise RunError(f"{what}: {' '.join(str(error).split())}") from None

    def _settle(self) -> None:
        """What a run takes, and whether any node can give it."""
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        gpus = max((node.get("GPU", 0) for node in alive), default=0)
        self._share = self._gpus if self._gpus is not None else float(gpus > 0)
        if self._share > gpus:
            raise UserError(f"gpus={self._share:g}: no node of the Ray cluster has a GPU; leave gpus out, or 0")
        cpus = max((node.get("CPU", 0) for node in alive), default=0)
        if self._threads > cpus:
            raise UserError(f"threads={self._threads}: the Ray cluster's largest node has {cpus:g} CPUs")
        # A process of its own for every run, as with the other engine.
        self._task = self._ray.remote(max_calls=1, max_retries=0)(_work)

    def _end(self, reference: Any) -> Ended:
        errors = self._ray.exceptions
        try:
            ended = self._ray.get(reference)
        except errors.TaskCancelledError:
            return Ended(stopped=True)
        except errors.RayTaskError as error:  # of ours, with a traceback
            return Ended(error=str(error).strip().split("\n")[-1])
        except errors.RayError as error:
            why = str(error).strip().partition("\n")[0].partition(". ")[0]
            return Ended(error=f"its worker was lost ({type(error).__name__}: {why})", lost=True, again=True)
        assert isinstance(ended, Ended)
        return ended


def _work(config: dict[str, Any], threads: int, gpus: str | None, folder: Path, log: Path) -> Ended:
    """In a process of the cluster. folder: where relative paths start, on the caller's machine as on this one."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        os.chdir(folder)
        into_file(log)
    except OSError as error:
        return Ended(error=f"{folder} must be the same folder on every node of the cluster: {error}")
    return carry_out_here(config, threads, gpus)


def _on_this_machine() -> str | None:
    """The cluster that this machine belongs to, as Ray notes it; None: there is none, or none that lives.

    Ray itself waits ten minutes for one that was killed.
    """
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        address = note.read_text(encoding="utf-8").strip()
        _check_answers(address)
    except (OSError, ValueError):
        return None
    return address


def _check_answers(address: str) -> None:
    """Raises OSError where nobody listens at host:port, ValueError where the address is none."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        raise ValueError("an address is host:port, 10.0.0.1:6379 for example")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER).close()


@contextmanager
def _stdout_into(path: Path) -> Iterator[None]:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115 closed below
    with file, redirect_stdout(file):
        yield


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # its default to be, and no warning of that
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise UserError("--engine ray needs Ray: pip install 'decaybench[cluster]'") from None
    return ray
