"""`bench speed --generators`: how fast the tasks make samples, and MQAR's beside plain Python loops.

Ours and the loops are measured in one process and in turn (`harness.stopwatch`), so that ratios hold on a busy machine.
Ours are made in batches that are thrown away, as training does: memory is that of a batch, whatever the number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.harness.environment import environment
from decaybench.harness.generator_loops import FORMS, Form, mqar_loop
from decaybench.harness.progress import Progress
from decaybench.harness.speed_report import Ratio, Times
from decaybench.harness.stopwatch import LEAST_PAIRS, Action, in_turn, peak_growth, ratio
from decaybench.results.record import Count, Environment, JsonObject, Part
from decaybench.tasks.base import Task
from decaybench.tasks.mqar import MqarShape
from decaybench.tasks.registry import get_task, make_task

if TYPE_CHECKING:
    from rich.table import Table

_BATCH_TOKENS = 2**18  # of PoST's protocol
_NAMES: dict[Form, str] = {"legacy": "np.random.choice, as Zoology's code", "modern": "np.random.Generator.choice"}
_WIDE = {"name": "mqar", "vocab_size": 8192}
_CASES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    *(({**_WIDE, "fill": fill}, {"length": 64, "kv": 4}) for fill in ("random", "zero", "random-safe")),
    ({**_WIDE, "fill": "random"}, {"length": 64, "kv": 16}),
    ({**_WIDE, "fill": "random"}, {"length": 512, "kv": 128}),
    ({"name": "mqar-noisy"}, {"length": 128, "kv": 8}),
    ({"name": "niah"}, {"length": 128, "needles": 8, "queries": 8}),
)


class LoopSpeed(Part):
    """The same samples by a loop over examples."""

    form: str = Field(description="how the loop draws")
    samples: int = Field(ge=1, description="samples a measurement")
    seconds: Times = Field(description="seconds of a measurement, in order, each paired with one of ours")
    times_faster: Ratio = Field(description="their seconds a sample / our seconds a sample")


class GeneratorSpeed(Part):
    """A task's generator at one size."""

    task: JsonObject = Field(description="the task's configuration as far as it was said")
    shape: JsonObject = Field(description="what a sample looks like")
    samples: int = Field(ge=1, description="samples a measurement")
    batch: int = Field(ge=1, description="samples made at once")
    seconds: Times = Field(description="seconds of a measurement, in order")
    peak_bytes: Count | None = Field(
        default=None, description="memory at the peak of a measurement, beyond what was in use; absent: not measured"
    )
    loops: tuple[LoopSpeed, ...] = Field(default=(), description="MQAR's plain loops")

    @property
    def samples_per_second(self) -> float:
        """By the median."""
        return self.samples / float(np.median(self.seconds))


class GeneratorReport(Part):
    """Everything measured in one run of `bench speed --generators`."""

    environment: Environment = Field(description="where it ran")
    repeats: int = Field(ge=1, description="measurements of each thing")
    generators: tuple[GeneratorSpeed, ...] = Field(description="the generators, a size each")

    def tables(self) -> list[Table]:
        """The report for a terminal."""
        from rich.box import SIMPLE
        from rich.table import Table

        columns = (
            "task",
            "sample",
            "samples/s",
            "100,000 take",
            "MB",
            *(f"times faster than\n{_NAMES[form]}" for form in FORMS),
        )
        table = Table(title="making samples", title_justify="left", box=SIMPLE, padding=(0, 1))
        for number, heading in enumerate(columns):
            table.add_column(heading, justify="left" if number < 2 else "right")
        for found in self.generators:
            table.add_row(*_row(found))
        table.caption = (
            f"{self.environment.device}, one thread; medians of {self.repeats} in turn, ratios with 95 % intervals; "
            f"MB: at the peak, in batches of {_BATCH_TOKENS:,} tokens"
        )
        table.caption_justify = "left"
        return [table]


def measure_generators(
    *,
    samples: int = 100_000,
    loop_samples: int = 2_000,
    batch_tokens: int = _BATCH_TOKENS,
    repeats: int = 12,
    progress: Progress | None = None,
) -> GeneratorReport:
    """Measure each case. samples, loop_samples: of a measurement of ours, and of a loop; fewer at greater lengths.

    Raises UserError on fewer than 6 repeats.
    """
    if repeats < LEAST_PAIRS:
        raise UserError(f"--repeats {repeats}: the interval of a median takes at least {LEAST_PAIRS}")
    progress = progress or Progress(quiet=True)
    found = []
    for config, shape in _CASES:
        progress.say(f"{config['name']}: {_words(shape)}")
        share = min(1.0, 64 / shape["length"])
        sizes = max(1, round(share * samples)), max(1, round(share * loop_samples))
        found.append(_measured(config, shape, *sizes, max(1, batch_tokens // shape["length"]), repeats))
    return GeneratorReport(
        environment=environment("cpu", "float32", batch_tokens), repeats=repeats, generators=tuple(found)
    )


def stream(task: Task[Any, Any, Any], shape: Any, samples: int, batch: int) -> None:
    """Make the first so many training samples, a batch at a time, and keep none."""
    for first in range(0, samples, batch):
        task.batch(shape, "train", 0, np.arange(first, min(first + batch, samples)))


def _measured(
    config: dict[str, Any], shape: dict[str, Any], samples: int, loop_samples: int, batch: int, repeats: int
) -> GeneratorSpeed:
    entry = get_task(config["name"])
    task = make_task(parse(entry.config, {**config, "train_length": shape["length"]}, "task"))
    asked = parse(type(task.stages()[0].shape), shape, "shape")
    ours = partial(stream, task, asked, samples, batch)
    actions: dict[str, Action] = {"": ours}
    if isinstance(asked, MqarShape):
        own = {"vocab_size": config["vocab_size"], "fill": config["fill"]}
        actions |= {form: partial(mqar_loop, asked, loop_samples, **own, form=form) for form in FORMS}
    seconds = in_turn(actions, repeats)
    return GeneratorSpeed(
        task=config,
        shape=shape,
        samples=samples,
        batch=batch,
        seconds=tuple(seconds[""]),
        peak_bytes=peak_growth(ours),
        loops=tuple(_loops(seconds, samples, loop_samples)),
    )


def _loops(seconds: Mapping[str, list[float]], samples: int, loop_samples: int) -> Iterator[LoopSpeed]:
    ours = [time / samples for time in seconds[""]]
    for form in seconds:
        if form:
            each = [time / loop_samples for time in seconds[form]]
            yield LoopSpeed(
                form=form, samples=loop_samples, seconds=tuple(seconds[form]), times_faster=Ratio.of(ratio(each, ours))
            )


def _row(found: GeneratorSpeed) -> list[str]:
    faster = {loop.form: str(loop.times_faster) for loop in found.loops}
    config = {key: value for key, value in found.task.items() if key != "name"}
    return [
        f"{found.task['name']} {_words(config)}".strip(),
        _words(found.shape),
        f"{found.samples_per_second:,.0f}",
        f"{1e5 / found.samples_per_second:.2f} s",
        "" if found.peak_bytes is None else f"{found.peak_bytes / 1e6:,.1f}",
        *(faster.get(form, "") for form in FORMS),
    ]


def _words(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())
