"""What the tests of the harness share: one thread, a folder of their own, and finished tiny runs to start from."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from decaybench.harness import run
from tests.command import MQAR, NIAH, NOISY, bench


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are slower on two threads, and far slower beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing: figures take most of a tiny run's time."""
    monkeypatch.setattr(run, "_draw", lambda record, spectrum, folder: None)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_figures: None) -> Path:
    """An empty folder to work in, its `runs` the default place of runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(run, "_draw", lambda record, spectrum, folder: None)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        # At 9 and at 12 steps there is a checkpoint, so that the last has one before it.
        for words in (NIAH, MQAR, NOISY):
            assert bench(*words, "--set", "checkpoint_seconds=0").code == 0
        torch.set_num_threads(threads)
    return folder / "runs"


@pytest.fixture
def finished(_finished: Path, here: Path) -> Callable[[str], Path]:
    """finished("niah"): a finished tiny run of that task in `runs`, as the command NIAH (MQAR, NOISY) makes it."""

    def copy(task: str) -> Path:
        (found,) = _finished.glob(f"{task}-mamba2-*")
        return Path(shutil.copytree(found, here / "runs" / found.name))

    return copy
