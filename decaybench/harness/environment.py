"""What a record says about where it ran."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

import decaybench
from decaybench.core.errors import UserError
from decaybench.core.names import unknown
from decaybench.results.record import Environment

_PACKAGES = ("torch", "numpy", "safetensors", "triton", "flash-linear-attention", "mamba-ssm")


def resolve_device(wanted: str) -> str:
    """`cpu` or `cuda` from auto|cpu|cuda. Raises UserError where there is no such device."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise unknown("device", wanted, ("auto", "cpu", "cuda"))
    found = torch.cuda.is_available()
    if wanted == "cuda" and not found:
        raise UserError("--device cuda: this PyTorch finds no GPU; use --device cpu")
    return "cuda" if found and wanted != "cpu" else "cpu"


def environment(device: str, dtype: str, batch_tokens: int) -> Environment:
    """The present environment. device: `cpu` or `cuda`; dtype: of matrix products."""
    revision, dirty = _git()
    return Environment(
        decaybench=decaybench.__version__,
        python=platform.python_version(),
        packages={name: version for name in _PACKAGES if (version := _version(name))},
        platform=f"{platform.system()} {platform.machine()}",
        device=torch.cuda.get_device_name() if device == "cuda" else _processor(),
        dtype=dtype,
        threads=torch.get_num_threads(),
        git_revision=revision,
        git_dirty=dirty,
        batch_tokens=batch_tokens,
    )


def peak_memory(device: str) -> int:
    """Bytes: the most that the GPU's allocator held, or the process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the general name will do
    return platform.processor() or platform.machine()


def _git() -> tuple[str | None, bool | None]:
    """The revision of decaybench's own checkout, not of wherever the user stands."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None, None
    try:
        revision = _run_git(root, "rev-parse", "HEAD")
        return revision, bool(_run_git(root, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _run_git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
