"""`bench selftest`: does a model on this machine hold what padding, packing, caches and odd lengths must not change?

The checks themselves are in `harness.invariances`; here they are run, for the configurations asked for, and shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from decaybench.harness.addons import Choice, alone_and_together, together
from decaybench.harness.invariances import CHECKS, Check, Subject, small_config, steady_seed
from decaybench.models.config import ModelConfig
from decaybench.models.registry import Architecture, architectures

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Check", "check_models", "plain", "selftest", "small_config", "summary", "tables"]

Results = dict[str, list[Check]]  # by cell and dtype: mamba2+post float32


def selftest(
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: str = "cpu",
    pitfalls: Container[int] | None = None,
) -> list[Check]:
    """The checks of one model configuration, or those of some pitfalls only.

    dtype: float64 or float32; seed: of the model's values, or with float32 of the first steady ones (`steady_seed`). A
    check that can't be carried out fails with an infinite difference.
    """
    results: list[Check] = []
    with _one_thread():
        if dtype == torch.float32:
            seed = steady_seed(config, seed, device)
        for check, pitfall in CHECKS.items():
            if pitfalls is not None and pitfall not in pitfalls:
                continue
            try:
                results.extend(check(Subject(config, dtype, seed, device)))
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                name = f"{check.__name__.replace('_', ' ')}: {' '.join(str(error).split())[:80]}"
                results.append(Check(pitfall, name, math.inf, 0.0))
    return results


def check_models(
    name: str,
    addons: Collection[str] = (),
    *,
    device: str = "cpu",
    verbose: bool = False,
    show: Callable[[str | Table], None] | None = None,
) -> Results:
    """The checks of an architecture with these add-ons, in every combination of their variants. Raises UserError.

    name: of all: each with those of the add-ons that it takes; where none is named, each alone, with every add-on, and
    with the first variants together.

    show: is given what there is to say of each cell as soon as it has been checked: its `summary`, or its `tables`
    where it is the only one or with verbose.
    """
    if name == "all":
        cells = [(known.name, choice) for known in architectures().values() for choice in _choices(known, addons)]
    else:
        cells = [(name, choice) for choice in together(addons)]
    configs = [small_config(known, choice) for known, choice in cells]
    results: Results = {}
    for config in configs:
        checked = {
            f"{config.cell} {str(dtype).removeprefix('torch.')}": selftest(config, dtype=dtype, device=device)
            for dtype in (torch.float64, torch.float32)
        }
        results |= checked
        for said in tables(checked) if verbose or len(configs) == 1 else [summary(checked)]:
            if show is not None:
                show(said)
    return results


def _choices(known: Architecture, addons: Collection[str]) -> list[Choice]:
    if not addons:
        return alone_and_together(known.addons)
    taken = set(addons) & set(known.addons)
    return together(taken) if taken else []


def plain(results: Results) -> list[dict[str, Any]]:
    """The checks as JSON-able data; a difference that is not a finite number is None."""
    return [
        {
            "model": model,
            "pitfall": check.pitfall,
            "check": check.name,
            "difference": check.difference if math.isfinite(check.difference) else None,
            "bound": check.bound,
            "passed": check.passed,
        }
        for model, checks in results.items()
        for check in checks
    ]


def summary(results: Results) -> str:
    """One line for a cell, with its dtypes, and one more for each check that is broken."""
    checks = [(model, check) for model, found in results.items() for check in found]
    cell = next(iter(results)).split()[0]
    broken = [(model, check) for model, check in checks if not check.passed]
    if not broken:
        return f"{cell}: all {len(checks)} checks hold ({', '.join(model.split()[-1] for model in results)})"
    lines = [f"{cell}: {len(broken)} of {len(checks)} checks broken"]
    for model, check in sorted(broken, key=lambda one: one[1].pitfall):
        difference, bound = _numbers(check)
        lines.append(f"  {model.split()[-1]}, pitfall {check.pitfall}, {check.name}: {difference}, bound {bound}")
    return "\n".join(lines)


def tables(results: Results) -> list[Table]:
    """The checks for a terminal, a table for each cell and dtype; the verdict stands in its caption."""
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    drawn = []
    for model, checks in results.items():
        broken = sum(not check.passed for check in checks)
        verdict = f"{broken} of {len(checks)} checks broken" if broken else f"all {len(checks)} checks hold"
        table = Table(title=model, caption=f"{model}: {verdict}", box=SIMPLE, padding=(0, 1))
        table.title_justify = table.caption_justify = "left"
        for heading in ("pitfall", "check", "largest difference", "bound", "verdict"):
            table.add_column(heading, justify="left" if heading in ("check", "verdict") else "right")
        for check in sorted(checks, key=lambda check: check.pitfall):
            holds = "[green]holds[/]" if check.passed else "[bold red]BROKEN[/]"
            table.add_row(str(check.pitfall), escape(check.name), *_numbers(check), holds)
        drawn.append(table)
    return drawn


def _numbers(check: Check) -> tuple[str, str]:
    return f"{check.difference:.1e}", f"{check.bound:.0e}" if check.bound else "0"


@contextmanager
def _one_thread() -> Iterator[None]:
    # Several would wait for one another at each of these tiny products: twenty times slower on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
