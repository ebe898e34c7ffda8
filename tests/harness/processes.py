"""Work in several processes as torchrun would start them, from the server of tests.command that has PyTorch loaded."""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.command import _processes


def as_rank(rank: int, size: int, port: int) -> None:
    """What torchrun tells a process."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def together(what: Any, *arguments: Any, size: int = 2, folder: Path) -> None:
    """Call `what(world, *arguments)`, a module's function, in so many processes; fails with a traceback of theirs."""
    port = free_port()
    started = []
    for rank in range(size):
        process = _processes.Process(target=_call, args=(rank, size, port, folder, what, arguments))
        process.start()
        started.append(process)
    for process in started:
        process.join(timeout=240)
    failed = sorted(folder.glob(".failed-*"))
    assert not failed, failed[0].read_text()
    assert [process.exitcode for process in started] == [0] * size


def events(run: Path) -> list[dict[str, Any]]:
    """A run's log."""
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def _call(rank: int, size: int, port: int, folder: Path, what: Any, arguments: Sequence[Any]) -> None:
    import torch

    from decaybench.harness.distributed import joined

    torch.set_num_threads(1)
    as_rank(rank, size, port)
    try:
        with joined("cpu") as world:
            what(world, *arguments)
    except BaseException:
        (folder / f".failed-{rank}").write_text(traceback.format_exc())
        raise
