"""Imports point one way: cli -> harness -> {tasks, models, results} -> core, text beside core; heavy packages late."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import decaybench

ROOT = Path(decaybench.__file__).parent
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
MAY_USE = {
    "core": {"core"},
    "text": {"core", "text"},
    "tasks": {"core", "text", "tasks"},
    "models": {"core", "models"},
    "results": {"core", "results"},
    "harness": {"core", "text", "tasks", "models", "results", "harness"},
}
NEVER_AT_TOP = {
    *("triton", "transformers", "lm_eval", "ray", "fla", "flash_attn", "mamba_ssm", "causal_conv1d"),
    *("tokenizers", "pyarrow", "datasets", "huggingface_hub"),
}


def imported(tree: ast.AST, *, at_top: bool) -> Iterator[str]:
    """The modules that a file imports: on being imported itself, or anywhere."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they point"
            assert node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif not (at_top and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            if at_top and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            yield from imported(node, at_top=at_top)


def parts_used(path: Path) -> set[str]:
    names = [name.split(".") for name in imported(ast.parse((ROOT / path).read_text()), at_top=False)]
    return {name[1] for name in names if name[0] == "decaybench" and len(name) > 1}


def test_there_are_modules_of_every_part():
    assert {path.parts[0] for path in MODULES} >= {*MAY_USE, "cli.py", "__init__.py"}


@pytest.mark.parametrize("path", [p for p in MODULES if p.parts[0] in MAY_USE], ids=str)
def test_imports_point_one_way(path):
    assert parts_used(path) <= MAY_USE[path.parts[0]]


def test_the_command_line_uses_harness_results_and_core():
    assert parts_used(Path("cli.py")) <= {"core", "harness", "results", "__version__"}


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_nothing_heavy_is_imported_at_the_top(path):
    names = {name.split(".")[0] for name in imported(ast.parse((ROOT / path).read_text()), at_top=True)}
    assert not names & NEVER_AT_TOP
    light = path.name in ("cli.py", "__init__.py") or path.parts[0] in ("core", "text")
    if light and path.name != "positions.py":
        assert "torch" not in names


@pytest.mark.parametrize("module", ["decaybench", "decaybench.cli", "decaybench.core.config"])
def test_no_torch_until_it_is_used(module):
    code = f"import {module}, sys; assert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
