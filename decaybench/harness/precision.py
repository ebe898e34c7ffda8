"""`bench precision`: trace runs of one task on the same samples (harness/precision_tally.py), and draw what they do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.core.files import atomic_write_json
from decaybench.core.hashing import without_absent
from decaybench.core.names import unknown
from decaybench.harness.config import RunConfig, evaluation_cells
from decaybench.harness.environment import resolve_device
from decaybench.harness.origin import model_of, told_apart
from decaybench.harness.precision_plots import draw_comparison, draw_run, remove_figures
from decaybench.harness.precision_report import Comparison, RunTrace
from decaybench.harness.precision_tally import trace_run
from decaybench.models.checkpoints import Checkpoint
from decaybench.tasks.base import Cell
from decaybench.tasks.registry import get_task, make_task

LENGTHS = ("1x", "2x", "4x")


def draw_precision(
    paths: Sequence[Path],
    out: Path | None = None,
    *,
    lengths: Sequence[str] | None = None,
    samples: int = 32,
    variant: str | None = None,
    device: str = "auto",
) -> Comparison:
    """Trace runs (`trace_runs`) and draw them: figures and `precision.json` in `out`, what is of one run alone in a
    folder of its own where there are several.

    out: None for RUN/precision, or precision/ where there are several runs.
    """
    runs = trace_runs(paths, lengths=lengths, samples=samples, variant=variant, device=device)
    folder = out or (paths[0] / "precision" if len(paths) == 1 else Path("precision"))
    remove_figures(folder)
    for path, run in zip(paths, runs, strict=True):
        draw_run(run, folder if len(paths) == 1 else folder / path.resolve().name)
    draw_comparison(runs, folder)
    found = Comparison(folder, runs)
    atomic_write_json(folder / "precision.json", found.plain())
    return found


def trace_runs(
    paths: Sequence[Path],
    *,
    lengths: Sequence[str] | None = None,
    samples: int = 32,
    variant: str | None = None,
    device: str = "auto",
) -> tuple[RunTrace, ...]:
    """Trace the runs in these folders on the same samples of their task.

    lengths: of contexts, multiples of the training length (2x) or tokens; samples: for each length; variant: of the
    task, None for its first. Raises UserError on a folder without a run, a run without BFT or a gate, runs of several
    tasks or that are asked different samples, and on what the task doesn't have.
    """
    if samples < 2:
        raise UserError(f"--samples {samples}: an interval needs 2 at least")
    where = resolve_device(device)
    opened = [_open(path) for path in paths]
    configs = [config for config, _ in opened]
    names = _names(paths, configs, [_label_noise(*found) for found in opened])
    _check_names(paths, configs)
    cells = [_cells(config, lengths, variant) for config in configs]
    _check_alike(paths, configs, cells)
    return tuple(
        trace_run(
            config,
            checkpoint.model(device=where),
            asked,
            samples,
            name,
            label_noise=_label_noise(config, checkpoint),
            longest_trained=checkpoint.longest_trained,
        )
        for (config, checkpoint), asked, name in zip(opened, cells, names, strict=True)
    )


def _open(path: Path) -> tuple[RunConfig, Checkpoint]:
    """A run that has something to draw, and its newest checkpoint."""
    checkpoint, config = model_of(path)
    if config is None:
        raise UserError(
            f"{path} is a checkpoint without its run, whose task and samples are needed: give a run's folder"
        )
    config = config.model_copy(update={"model": checkpoint.config})
    if config.model.bft is None:
        command = get_task(config.task.name).command
        post = " --post" if config.model.post is not None else ""
        raise UserError(
            f"{path}: {config.model.cell} has neither BFT nor a gate, so no gain or precision; train one with --bft: "
            f"bench {command} --model {config.model.name}{post} --bft"
        )
    return config, checkpoint


def _label_noise(run: RunConfig, checkpoint: Checkpoint) -> float | None:
    """The share of wrong training labels, as the checkpoint or the run that trained it states; None: neither does."""
    said = run.training.label_noise if run.checkpoint is None else None
    return checkpoint.label_noise or said


def _check_names(paths: Sequence[Path], runs: Sequence[RunConfig]) -> None:
    for path, run in zip(paths, runs, strict=True):
        if run.task.name != runs[0].task.name:
            raise UserError(
                f"{path} is of task {run.task.name}, {paths[0]} of {runs[0].task.name}: draw each task alone"
            )
    folders = [path.resolve().name for path in paths]
    if len(set(folders)) < len(folders):
        raise UserError(f"two of the runs are named {max(folders, key=folders.count)}; give each once, or rename one")


def _check_alike(paths: Sequence[Path], runs: Sequence[RunConfig], cells: Sequence[Sequence[Cell]]) -> None:
    """Runs that stand in one figure are traced on the same samples. Raises UserError on the first difference."""
    first = _asked(runs[0], cells[0])
    for path, run, own in zip(paths[1:], runs[1:], cells[1:], strict=True):
        asked = _asked(run, own)
        for what in first:
            if asked[what] == first[what]:
                continue
            free = not any("variants" in other.evaluation.ignored for other in (run, runs[0]))
            remedy = "say --variant" if what == "variant" and free else "draw each alone"
            raise UserError(f"{what} is {asked[what]} in {path}, {first[what]} in {paths[0]}: {remedy}")


def _asked(run: RunConfig, cells: Sequence[Cell]) -> dict[str, Any]:
    """All that a run's samples are a function of, by name."""
    rules = {f"task.{key}": value for key, value in make_task(run.task).rules().items()}
    shapes = [without_absent(cell.shape.plain()) for cell in cells]
    return {
        "variant": cells[0].variant,
        "task.train_length": run.task.train_length,
        **rules,
        "evaluation.seed": run.evaluation.seed,
        "number of cells": len(cells),
        **{f"cell {n}": " ".join(f"{k}={v}" for k, v in shape.items()) for n, shape in enumerate(shapes, start=1)},
    }


def _names(paths: Sequence[Path], runs: Sequence[RunConfig], noises: Sequence[float | None]) -> list[str]:
    """The models' names, and of what was trained on wrong labels; with the seed, or the run's hash where that isn't
    enough, to tell equal ones apart.
    """
    cells = [
        run.model.cell + (f", label noise {noise:g}" if noise else "") for run, noise in zip(runs, noises, strict=True)
    ]
    return told_apart(cells, [run.seed for run in runs], paths)


def _cells(run: RunConfig, lengths: Sequence[str] | None, variant: str | None) -> list[Cell]:
    """The cells of one variant at these lengths, or those that the evaluation lists one by one."""
    evaluation = run.evaluation
    if "variants" not in evaluation.ignored:
        asked = {"lengths": list(lengths or LENGTHS), **({} if variant is None else {"variants": [variant]})}
        evaluation = parse(type(evaluation), evaluation.plain() | asked, "evaluation")
    elif lengths is not None:
        raise UserError("--eval-lengths: evaluation.pairs of this run names its cells one by one; leave it out")
    cells = evaluation_cells(make_task(run.task), evaluation, run.task.train_length)
    found = list(dict.fromkeys(cell.variant for cell in cells))
    if variant is not None and variant not in found:
        raise unknown("variant", variant, found)
    return [cell for cell in cells if cell.variant == (variant or found[0])]
