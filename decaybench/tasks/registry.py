"""Names -> tasks. A name that isn't here is answered with the nearest one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from decaybench.core.names import unknown
from decaybench.tasks.base import EvaluationConfig, Task, TaskConfig
from decaybench.tasks.lambada import Lambada, LambadaConfig, LambadaEvaluation
from decaybench.tasks.mqar import Mqar, MqarConfig, MqarEvaluation
from decaybench.tasks.mqar_noisy import MqarNoisy, MqarNoisyConfig, MqarNoisyEvaluation
from decaybench.tasks.niah import Niah, NiahConfig, NiahEvaluation
from decaybench.tasks.niah_text import NiahText, NiahTextConfig, NiahTextEvaluation
from decaybench.tasks.text import Text, TextConfig, TextEvaluation


@dataclass(frozen=True)
class TaskEntry:
    """A task, its two configurations and one line about it. words: what `bench` is told to run it; none: its name."""

    task: type[Task[Any, Any, Any]]
    config: type[TaskConfig]
    evaluation: type[EvaluationConfig]
    description: str
    words: str | None = None

    @property
    def command(self) -> str:
        """What `bench` is told to run it."""
        return self.words or self.task.name


TASKS: dict[str, TaskEntry] = {
    "mqar": TaskEntry(Mqar, MqarConfig, MqarEvaluation, "recall of many key-value pairs, by number and by length"),
    "mqar-noisy": TaskEntry(
        MqarNoisy,
        MqarNoisyConfig,
        MqarNoisyEvaluation,
        "recall of a key's true value from several sources, some of them unreliable",
        words="mqar --noisy-sources",
    ),
    "lambada": TaskEntry(
        Lambada,
        LambadaConfig,
        LambadaEvaluation,
        "the last word of a passage that only its context tells, alone and behind unrelated text",
    ),
    "niah": TaskEntry(Niah, NiahConfig, NiahEvaluation, "recall of one planted fact, by length and by depth"),
    "niah-text": TaskEntry(
        NiahText,
        NiahTextConfig,
        NiahTextEvaluation,
        "facts planted in text, that a language model writes down again when asked; RULER's eight variants",
        words="niah --text",
    ),
    "text": TaskEntry(
        Text, TextConfig, TextEvaluation, "text of your own, learned and foreseen, by position", words="pretrain"
    ),
}


def get_task(name: str) -> TaskEntry:
    """The task of this name. Raises UserError with the nearest name where there is none."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]


def make_task(config: TaskConfig) -> Task[Any, Any, Any]:
    """The task that `config` describes. Raises UserError where its name is unknown."""
    return get_task(config.name).task(config)
