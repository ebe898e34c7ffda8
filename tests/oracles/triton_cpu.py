"""Triton on a machine without a GPU: its interpreter runs kernels as NumPy on CPU tensors, which takes seconds.

Two things that the interpreter of Triton 3.7.1 lacks for flash-linear-attention and mamba-ssm are put in here. An
autotuned kernel is timed on a GPU to choose its configuration: the first configuration is taken instead. And the
variable of `for i in range(...)` is an int where a compiled kernel has a tensor, with a tensor's methods.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

_done = False


def interpret_triton() -> None:
    """Import Triton with its interpreter, for the rest of this process.

    Skips the test where Triton isn't installed and where a GPU is in sight, for which Triton is kept as it is. Raises
    RuntimeError if Triton was imported before without its interpreter (tests/conftest.py sees to that).
    """
    global _done
    if _done:
        return
    if torch.cuda.is_available():
        pytest.skip("Triton is for the GPU here; make parity hides it (CUDA_VISIBLE_DEVICES=)")
    imported_before = "triton" in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("triton", reason="Triton isn't installed: make parity")
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.autotuner import Autotuner

    if imported_before and not isinstance(tl.cdiv, interpreter.InterpretedFunction):
        raise RuntimeError("Triton is already imported without its interpreter: set TRITON_INTERPRET=1 before")
    Autotuner.run = _run_first_configuration
    interpreter.ASTTransformer.visit_For = _visit_for
    interpreter.range_of_tensors = _range_of_tensors
    _done = True


def _run_first_configuration(self: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of Autotuner.run."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    self.best_config = config = self.prune_configs(kwargs)[0]  # mamba-ssm's backward reads it
    if config.pre_hook is not None:
        config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
    result = self.fn.run(*args, **kwargs, **config.all_kwargs())
    self.nargs = None
    return result


def _visit_for(self: ast.NodeTransformer, node: ast.For) -> ast.AST:
    """In place of ASTTransformer's: `for i in range(...)` becomes `for i in range_of_tensors(...)`."""
    match node.iter:
        case ast.Call(func=ast.Name(id="range")):
            node.iter.func.id = "range_of_tensors"
    return self.generic_visit(node)


def _range_of_tensors(*bounds: Any) -> Iterator[Any]:
    from triton.runtime.interpreter import interpreter_semantic

    for i in range(*bounds):
        yield interpreter_semantic.to_tensor(i, False)
