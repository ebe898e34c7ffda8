"""What a sweep's file asks for: blocks of settings, each a product of lists, made into runs before any is started.

    task: mqar                            # these four hold for every block that doesn't say otherwise
    preset: smoke
    seeds: [0, 1, 2]
    set: {evaluation.samples: 200}        # any key of `bench list --settings`
    grid:                                 # a block: every choice of one value a key
      model.name: [mamba2, gla]
      model.post: [null, {}, {variant: minimal}]
    runs:                                 # more blocks
      - {set: {model.name: mamba2}, seeds: [3, 4], grid: {model.post: [null, {}]}}

A run is what `bench TASK` with the same settings is: the preset's layers below, the same hashes, the same folder.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, field_validator

from decaybench.core.config import Config, merge, nested, number_or_text, parse, read_yaml
from decaybench.core.errors import UserError
from decaybench.harness.addons import ADDONS
from decaybench.harness.config import RunConfig
from decaybench.harness.presets import configure
from decaybench.harness.run import destination
from decaybench.models.language_model import resolve_backend
from decaybench.results.run_folder import EvaluationFolder, RunFolder
from decaybench.tasks.registry import get_task

MOST_RUNS = 10_000
_MOST_VALUES = 100_000  # of a file: its aliases (*name) may stand for more than anyone can write


class Block(Config):
    """Runs that differ by a grid and by seed."""

    task: str | None = Field(default=None, description="the task: mqar, niah, …")
    preset: str | None = Field(default=None, description="named settings; none: the task's first")
    seeds: tuple[int, ...] | None = Field(default=None, min_length=1, description="one run each; none: seed 0")
    set: dict[str, Any] = Field(default_factory=dict, description="settings of every run, by dotted key")
    grid: dict[str, tuple[Any, ...]] = Field(
        default_factory=dict, description="values by dotted key: a run for every choice of one of each"
    )

    @field_validator("grid", mode="before")
    @classmethod
    def _lists(cls, grid: Any) -> Any:
        for key, values in grid.items() if isinstance(grid, Mapping) else ():
            if key == "out":
                raise ValueError("out can't vary: a sweep has one folder of run folders, under set or by --out")
            if not isinstance(values, list | tuple):
                raise ValueError(f"{key} takes a list of values here, in [brackets]; a single one belongs under set")
            if not values:
                raise ValueError(f"{key} has no values, which makes no run at all")
        return grid

    @property
    def count(self) -> int:
        """Runs of this block."""
        return math.prod(map(len, self.grid.values())) * len(self.seeds or (0,))


class SweepFile(Block):
    """A sweep's file: a block of its own where it has a grid or no `runs`, and what every block starts from."""

    runs: tuple[Block, ...] = Field(default=(), description="more blocks; what one leaves out it takes from above")
    threads: int = Field(
        default=1, ge=1, le=1024, description="CPU threads of a run; not by the number of workers: sums would round so"
    )
    gpus: float | None = Field(
        default=None, ge=0, le=1, description="share of a GPU that a run takes; none: a whole one where there are GPUs"
    )

    def blocks(self) -> list[tuple[str, Block]]:
        """Every block with what it takes from above filled in, and its place in the file: grid, runs.0, none."""
        own = Block(task=self.task, preset=self.preset, seeds=self.seeds, set=self.set, grid=self.grid)
        found = [("grid" if self.grid else "", own)] if self.grid or not self.runs else []
        for place, block in enumerate(self.runs):
            task = block.task or self.task
            same = task == self.task
            changes = {
                "task": task,
                "preset": block.preset or (self.preset if same else None),
                "seeds": block.seeds or self.seeds,
                "set": {**self.set, **block.set},
            }
            found.append((f"runs.{place}", block.model_copy(update=changes)))
        return found


@dataclass(frozen=True)
class Planned:
    """One run of a sweep. number: from 1 on, in the file's order. asked: the file's settings of it, by dotted key."""

    number: int
    config: RunConfig
    asked: dict[str, Any]
    folder: RunFolder
    evaluation: EvaluationFolder
    label: str = ""

    @property
    def key(self) -> str:
        """What it is known by from one sitting to the next."""
        return f"{self.folder.path.name}/{self.evaluation.path.name}"


@dataclass(frozen=True)
class Plan:
    """The runs, each once. varying: the keys in which what was asked differs. repeated: a line for each run that the
    file asks for again.
    """

    runs: list[Planned]
    threads: int
    gpus: float | None
    varying: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)


def read_plan(path: Path, *, out: Path | None = None) -> Plan:
    """All runs that a sweep's file asks for, every one checked. out: folder of run folders, above the file's.

    Raises UserError with one line on the first thing that is wrong, which names the run.
    """
    content = read_yaml(path)
    _check_size(path, content)
    try:
        file = parse(SweepFile, content)
        blocks = file.blocks()
        count = sum(block.count for _, block in blocks)
        if count > MOST_RUNS:
            raise UserError(f"it asks for {count:,} runs, and a sweep has {MOST_RUNS:,} at most")
        asked = [run for place, block in blocks for run in _asked(place, block, out)]
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return _plan(file, asked)


def written(value: Any) -> str:
    """A setting's value in one line, as YAML has it."""
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("\n").removesuffix("\n...")


def _asked(place: str, block: Block, out: Path | None) -> Iterator[Planned]:
    """The runs of a block, not numbered or named yet."""
    if block.task is None:
        raise UserError(f"{place}{place and ': '}task is missing: mqar or niah, for example")
    get_task(block.task)
    for values in itertools.product(*block.grid.values()):
        asked = {**block.set, **dict(zip(block.grid, values, strict=True))}
        try:
            flags, settings = _layers(asked if out is None else {**asked, "out": str(out)})
            configs = configure(block.task, preset=block.preset, flags=flags, settings=settings, seeds=block.seeds)
            told = {"task": block.task, **_split(asked)}
            found = [Planned(0, config, told, *_ready(config)) for config in configs]
        except UserError as error:
            chosen = ", ".join(f"{key}={written(value)}" for key, value in zip(block.grid, values, strict=True))
            where = f"{place} ({chosen})" if chosen else place
            raise UserError(f"{where}: {error}" if where else str(error)) from None
        yield from found


def _layers(asked: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What was asked as `configure` takes it: values by dotted key, and texts for those that are none.

    Keys are put into one another first, in their order, so that the last one said of a part holds.
    """
    whole: dict[str, Any] = {}
    for key, value in asked.items():
        path = key.split(".")
        if not all(path):
            raise UserError(f"{key!r} is no key; one looks like training.steps")
        copied = json.loads(json.dumps(number_or_text(value), default=str))  # merge changes what it is given
        merge(whole, nested(path, copied))
    flat = dict(_leaves(whole, ""))
    return (
        {key: value for key, value in flat.items() if value is not None},
        [f"{key}=null" for key, value in flat.items() if value is None],
    )


def _split(asked: Mapping[str, Any]) -> dict[str, Any]:
    """`training: {steps: 5}` as training.steps, so that a key has one name however it was written."""
    found: dict[str, Any] = {}
    for key, value in asked.items():
        if isinstance(value, Mapping) and "." not in key:
            found |= {f"{key}.{name}": part for name, part in value.items()}
        else:
            found[key] = value
    return found


def _leaves(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    # Not core.config.flat: a null is something that was asked.
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _ready(config: RunConfig) -> tuple[RunFolder, EvaluationFolder]:
    """Where a run's results lie. Raises UserError on what would end it at its start: no such kernels, no checkpoint."""
    resolve_backend(config.backend, config.model.name)
    return destination(config)


def _plan(file: SweepFile, asked: Sequence[Planned]) -> Plan:
    keys = dict.fromkeys(key for run in asked for key in run.asked)
    varying = [key for key in keys if len({written(run.asked.get(key)) for run in asked}) > 1]
    telling = [key for key in varying if not _named_by_cell(key, asked)]
    several = len({run.config.task.name for run in asked}) > 1
    runs: dict[str, Planned] = {}
    repeated = []
    for run in asked:
        named = replace(run, number=len(runs) + 1, label=_label(run, telling, several))
        known = runs.setdefault(str(run.evaluation.path), named)
        if known is not named:
            repeated.append(f"{named.label} is asked for twice, and done once: run {known.number}")
    return Plan(list(runs.values()), file.threads, file.gpus, varying, repeated)


def _label(run: Planned, varying: Sequence[str], several: bool) -> str:
    """A short name: the model, the seed, and what varies beside them. several: whether there is more than one task."""
    config = run.config
    words = [config.task.name] * several
    words += [config.checkpoint] if config.checkpoint else [config.model.cell, f"seed {config.seed}"]
    words += [
        f"{key.rpartition('.')[2]}={written(run.asked[key])}"
        for key in varying
        if key in run.asked and key not in ("task", "seed", "checkpoint", "model.name")
    ]
    return " ".join(words)


def _named_by_cell(key: str, asked: Sequence[Planned]) -> bool:
    """Whether it is an add-on's, and the model's name says its value: +post-minimal does, and no horizon."""
    if not key.startswith("model.") or key.split(".")[1] not in ADDONS:
        return False
    values = {(run.config.model.cell, written(run.asked.get(key))) for run in asked}
    return len(values) == len({cell for cell, _ in values})


def _check_size(path: Path, content: Any) -> None:
    """Refuse what aliases make enormous, or endless, before anyone walks through it."""
    stack, seen = [content], 0
    while stack:
        value = stack.pop()
        seen += 1
        if seen > _MOST_VALUES:
            raise UserError(f"{path} holds more than {_MOST_VALUES:,} values, by aliases (*name) perhaps")
        if isinstance(value, Mapping):
            stack.extend(value.values())
        elif isinstance(value, list | tuple):
            stack.extend(value)
