"""Other projects' packages, imported so that they run on a CPU; a test that asks for one skips without it."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.oracles.triton_cpu import interpret_triton


def fla(module: str = "") -> ModuleType:
    """flash-linear-attention or one module of it, by its dotted name without `fla.`."""
    interpret_triton()  # before fla, which without Triton imports well and has no layers
    # Its few compiled functions run as they are written: compiling takes longer, and a C++ compiler.
    with mock.patch.object(torch, "compile", _as_written), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no GPU, once a module
        pytest.importorskip("fla", reason="flash-linear-attention isn't installed: make parity")
        return importlib.import_module(f"fla.{module}" if module else "fla")


def mamba_ssm(module: str = "") -> ModuleType:
    """mamba-ssm or one module of it, by its dotted name without `mamba_ssm.`; its CUDA kernels don't exist here."""
    interpret_triton()
    sys.modules.setdefault("selective_scan_cuda", ModuleType("selective_scan_cuda"))  # Mamba-1's, compiled
    # It asks for a GPU whatever the tensors' device is; without one PyTorch would raise, for all who ask.
    torch.cuda.device = lambda index: contextlib.nullcontext()
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=1)
    pytest.importorskip("mamba_ssm", reason="mamba-ssm isn't installed: make parity")
    return importlib.import_module(f"mamba_ssm.{module}" if module else "mamba_ssm")


def transformers() -> ModuleType:
    """transformers, with its Mamba-2 in plain PyTorch: at its import that looks for mamba-ssm's kernels."""
    package = pytest.importorskip("transformers", reason="transformers isn't installed: make parity")
    with _hidden("mamba_ssm", "causal_conv1d"):
        importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    return package


@contextlib.contextmanager
def _hidden(*names: str) -> Iterator[None]:
    """Packages that can't be imported for a while, even if they were before."""
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None: an ImportError
    yield
    for name in names:
        del sys.modules[name]
    sys.modules.update(before)


def _as_written(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """In place of torch.compile, as a function and as a decorator with options."""
    return function if function is not None else _as_written
