"""Where a run ran, as its record tells it."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import decaybench
from decaybench.core.errors import UserError
from decaybench.harness import environment as module
from decaybench.harness.environment import environment, peak_memory, resolve_device


def test_the_environment() -> None:
    torch.set_num_threads(1)
    found = environment("cpu", "bfloat16", 99)
    assert (found.decaybench, found.python) == (decaybench.__version__, platform.python_version())
    assert (found.dtype, found.threads, found.batch_tokens) == ("bfloat16", 1, 99)
    assert found.packages["torch"] == metadata.version("torch") and "numpy" in found.packages
    assert set(found.packages) <= {"torch", "numpy", "safetensors", "triton", "flash-linear-attention", "mamba-ssm"}
    assert found.platform == f"{platform.system()} {platform.machine()}"
    assert found.device
    assert platform.node() not in found.model_dump_json() or not platform.node(), "no name of the machine"


def test_packages_that_are_not_there_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PACKAGES", ("torch", "no-such-package-anywhere"))
    assert set(environment("cpu", "float32", 1).packages) == {"torch"}


def test_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, wanted in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=found: found)
        assert resolve_device("auto") == wanted
        assert resolve_device("cpu") == "cpu"
    assert resolve_device("cuda") == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device cuda: this PyTorch finds no GPU"):
        resolve_device("cuda")
    with pytest.raises(UserError, match=r"unknown device 'cud'; did you mean 'cuda'\?"):
        resolve_device("cud")


def test_peak_memory_is_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2**25 < peak_memory("cpu") < 2**36, "a process with PyTorch in it; in kilobytes it would be below"
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 12345)
    assert peak_memory("cuda") == 12345


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", "-C", folder, *identity, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_revision_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "decaybench" / "harness" / "environment.py"
    monkeypatch.setattr(module, "__file__", str(place))
    assert module._git() == (None, None), "an installed package"
    place.parent.mkdir(parents=True)
    place.write_text("one\n")
    git(tmp_path, "init", "-q")
    assert module._git() == (None, None), "no commit yet"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    revision = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "notes.txt").touch()
    assert module._git() == (revision, False)
    place.write_text("two\n")
    assert module._git() == (revision, True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module._git() == (None, None), "no git here"


def test_importing_costs_no_torch() -> None:
    code = "import sys, decaybench; assert 'torch' not in sys.modules; decaybench.run; assert 'torch' in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
