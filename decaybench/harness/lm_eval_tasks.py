"""lm-eval's tasks: their documents as requests of text, and the metrics that lm-eval makes of the answers.

Everything that defines a task stays lm-eval's: prompts, few-shot examples (its seeds), filters, metrics. A task's
documents come from where its definition says, or from a file of the user's (JSON lines or Parquet, with the fields of
the data set) in the place of all its splits: few-shot examples are then drawn from the file too, never the document
that is asked.

Kept are metrics that are 0 or 1 a document (acc, acc_norm, exact_match, ...), whose mean lm-eval reports, and the
log-likelihoods that its `perplexity` is made of.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from decaybench.core.errors import RunError, UserError
from decaybench.core.hashing import canonical_json, digest, file_digest
from decaybench.core.names import nearest
from decaybench.harness.lm_eval_model import NEEDED, likelihood, request_of, written
from decaybench.harness.reader import Answer, Request

_SEED, _FEW_SHOT_SEED = 0, 1234  # lm-eval's own defaults
_FILE_SPLIT = "test"  # the split that a file of the user's is
_LARGEST = 1 << 30  # bytes of such a file: lm-eval holds all documents in memory
_TASK_LINE = re.compile(rb"^task:[ \t]*[\"']?([^\s\"'#]+)[\"']?[ \t\r]*$", re.MULTILINE)


@dataclass(frozen=True)
class LmEvalTask:
    """A task with what it asks.

    name, version, output_type: lm-eval's; data: the data set's name and part, or the file's name and sha256; documents:
    of the data set, before any limit; shots: few-shot examples; requests: what is asked, in the order of documents, and
    places: which document each is of and which of its requests; digest: sha256 of the documents and requests.
    """

    name: str
    version: Any
    output_type: str
    data: dict[str, str]
    documents: int
    shots: int
    requests: tuple[Request, ...]
    places: tuple[tuple[int, int], ...]
    digest: str
    _task: Any
    _limit: int | None

    def info(self) -> dict[str, Any]:
        """What a record says of it."""
        return {
            "name": self.name,
            "version": self.version,
            "output_type": self.output_type,
            "data": self.data,
            "documents": self.documents,
            "shots": self.shots,
        }


class Measure(NamedTuple):
    """A metric of a task's documents, by a filter of the answers: each document's value, 0 or 1.

    log_likelihood: nats, of each document's right answer, where the task's perplexity is made of it.
    """

    metric: str
    filter: str
    values: tuple[int, ...]
    log_likelihood: tuple[float, ...] | None

    @property
    def name(self) -> str:
        """As tables and files name it; lm-eval's filter `none` goes without saying."""
        return self.metric if self.filter == "none" else f"{self.metric}-{self.filter}"


def lm_eval_version() -> str:
    """The version of lm-eval. Raises RunError where it isn't installed."""
    try:
        return metadata.version("lm-eval")
    except metadata.PackageNotFoundError:
        raise RunError(NEEDED) from None


def load_tasks(
    names: Sequence[str], files: Mapping[str, str], limit: int | None = None, shots: int | None = None
) -> list[LmEvalTask]:
    """The tasks of these names (a group's or a tag's: all of its tasks). files: of the user's, by task.

    limit: documents of each, from the first on; shots: few-shot examples, None: as each task says.
    Raises UserError for unknown names, files that don't fit and tasks that a record can't hold; RunError where lm-eval
    isn't installed or a data set can't be had.
    """
    lm_eval_version()
    _quiet()
    for name in files:
        if name not in names:
            raise UserError(f"--data-file: {name!r} is none of --tasks; {_hint(name, names)}")
    manager = _manager(names)
    for name in files:
        if manager.task_index[name].kind.name not in ("TASK", "PY_TASK"):
            raise UserError(f"--data-file: {name!r} stands for several tasks; name one of them")
    with _as_lm_eval_runs():
        by_name = {task.task_name: task for name in names for task in _built(manager, name, files)}
    return [_asked(task, files.get(name), limit, shots) for name, task in by_name.items()]


def measure(task: LmEvalTask, answers: Sequence[Answer]) -> tuple[list[Measure], list[str]]:
    """What lm-eval makes of the answers to `task.requests`, and the names of the metrics that can't be kept."""
    from lm_eval.api.metrics import mean, perplexity
    from lm_eval.evaluator import evaluate

    model = _replay(task, answers)
    task._task.set_fewshot_seed(seed=_FEW_SHOT_SEED)
    with _as_lm_eval_runs():
        found = evaluate(model, {"tasks": {task.name: task._task}}, limit=task._limit, bootstrap_iters=0)
    aggregation = task._task.aggregation()
    measures, left_out = [], []
    samples = found["samples"][task.name]
    for filter_ in dict.fromkeys(sample["filter"] for sample in samples):
        own = sorted((s for s in samples if s["filter"] == filter_), key=lambda sample: int(sample["doc_id"]))
        names = list(dict.fromkeys(name for sample in own for name in sample["metrics"]))
        summed = next((name for name in names if aggregation.get(name) is perplexity), None)
        likely = None if summed is None else tuple(float(sample[summed]) for sample in own)
        for name in names:
            values = [sample.get(name) for sample in own]
            if aggregation.get(name, mean) is mean and all(_is_hit(value) for value in values):
                measures.append(Measure(name, filter_, tuple(int(value) for value in values), likely))
                likely = None  # it stands with the first
            elif name != summed:
                left_out.append(name)
        if likely is not None:
            left_out.append(str(summed))
    return measures, left_out


def request_line(request: Any) -> str:
    """An lm-eval request as text: what it asks, and nothing of where it stands."""
    return canonical_json([request.request_type, *request.args])


def _is_hit(value: Any) -> bool:
    return isinstance(value, int | float | np.number | np.bool_) and value in (0, 1)


def _quiet() -> None:
    """No warnings of lm-eval and the data sets' packages, a line or more a task."""
    for name in ("lm_eval", "datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _as_lm_eval_runs() -> Iterator[None]:
    """Some tasks draw from global generators: they start as lm-eval's own command starts them, and are put back.

    lm-eval's own bars and remarks are left out: what goes wrong comes as an exception.
    """
    kept = random.getstate(), np.random.get_state()  # noqa: NPY002 that one it is
    random.seed(_SEED)
    np.random.seed(_FEW_SHOT_SEED)  # noqa: NPY002
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002


def _manager(names: Sequence[str]) -> Any:
    """lm-eval's index of its tasks: of the folders of these, because all 14,000 take many seconds."""
    from lm_eval import tasks

    folders: dict[str, Path] = {}
    for path in Path(tasks.__file__).parent.rglob("*.yaml"):
        for name in _TASK_LINE.findall(path.read_bytes()):
            folders[name.decode(errors="replace")] = path.parent
    if all(name in folders for name in names):
        own = sorted({str(folders[name]) for name in names})
        return tasks.TaskManager(include_path=own, include_defaults=False)
    manager = _index()
    for name in names:
        if name not in manager.task_index:
            raise UserError(f"unknown lm-eval task {name!r}; {_hint(name, manager.all_tasks)}")
    return manager


@cache
def _index() -> Any:
    """lm-eval's index of all its tasks."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _hint(name: str, known: Iterable[str]) -> str:
    near = nearest(name, known)
    return f"did you mean {near!r}?" if near else "`lm_eval ls tasks` names all tasks"


def _built(manager: Any, name: str, files: Mapping[str, str]) -> list[Any]:
    """The tasks of a name, as lm-eval builds them."""
    file = files.get(name)
    spec: Any = name
    if file is not None:
        rows = _rows(name, Path(file))
        splits = dict.fromkeys(("training_split", "validation_split", "fewshot_split"))
        own = {"task": name, "custom_dataset": lambda **_: {_FILE_SPLIT: rows}, "test_split": _FILE_SPLIT, **splits}
        spec = {"group": f"{name} of a file", "task": [own]}  # a task in a group is one with changes
    try:
        found = list(manager.load([spec])["tasks"].values())
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 any: they run a task's own code and the data sets' package
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if file is not None:
            raise UserError(f"--data-file {name}={file}: its rows don't fit lm-eval's task ({what})") from None
        raise RunError(
            f"lm-eval's task {name}: its data can't be loaded here ({what}); with a copy of them: --data-file "
            f"{name}=FILE.jsonl"
        ) from None
    if file is not None and found[0].fewshot_cfg.samples is None:
        found[0].fewshot_cfg.split = _FILE_SPLIT  # so that no document is an example of itself
    return found


def _rows(task: str, path: Path) -> Any:
    """A file's rows as a data set."""
    from datasets import Dataset
    from pyarrow import ArrowException

    where = f"--data-file {task}={path}"
    try:
        size = path.stat().st_size
        if size > _LARGEST:
            raise UserError(f"{where}: {size / 2**30:.1f} GiB are more than lm-eval can hold; cut it to 1 GiB")
        if path.suffix == ".parquet":
            from pyarrow import parquet

            found = Dataset(parquet.read_table(path))
        else:
            found = Dataset.from_list(_json_rows(where, path))
    except (OSError, ValueError, ArrowException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"{where}: it can't be read ({' '.join(reason.split())[:200]})") from None
    if not len(found):
        raise UserError(f"{where}: it holds no rows")
    return found


def _json_rows(where: str, path: Path) -> list[dict[str, Any]]:
    rows = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise UserError(f"{where} line {number}: not a JSON object; it takes a row a line")
            rows.append(row)
    return rows


def _asked(task: Any, file: str | None, limit: int | None, shots: int | None) -> LmEvalTask:
    """A task with its requests."""
    name = task.task_name
    _check_kind(task)
    own = task.get_config("num_fewshot")
    # As lm-eval: what a task itself sets to 0 stays 0.
    task.set_config(key="num_fewshot", value=own if shots is None or own == 0 else shots)
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=_FEW_SHOT_SEED)
    try:
        with _as_lm_eval_runs():
            task.build_all_requests(limit=limit)
    except Exception as error:  # noqa: BLE001 any: a task's own code on a user's rows
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"lm-eval's task {name} can't make requests of its documents ({what})") from None
    found = task.instances
    if any(request.repeats != 1 for request in found):
        raise UserError(f"lm-eval's task {name} asks each prompt several times, to sample; generation here is greedy")
    documents = [json.dumps(request.doc, sort_keys=True, default=str) for request in found if request.idx == 0]
    data = {"dataset": str(task.config.dataset_path), "subset": str(task.config.dataset_name or "")}
    if file is not None:
        data = {"file": Path(file).name, "sha256": file_digest(Path(file))}
    return LmEvalTask(
        name=name,
        version=task.VERSION,
        output_type=str(task.OUTPUT_TYPE),
        data={key: value for key, value in data.items() if value},
        documents=len(task.eval_docs),
        shots=task.get_config("num_fewshot"),
        requests=tuple(request_of(request.request_type, request.args) for request in found),
        places=tuple((int(request.doc_id), int(request.idx)) for request in found),
        digest=digest([documents, [request_line(request) for request in found]]),
        _task=task,
        _limit=limit,
    )


def _check_kind(task: Any) -> None:
    name = task.task_name
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        raise UserError(
            f"lm-eval's task {name} measures the perplexity of whole documents ({', '.join(task.aggregation())}), for "
            "which a record has no place: ask it by `lm_eval --model decaybench` (docs/lm-eval.md)"
        )
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(f"lm-eval's task {name} runs what a model wrote as a program; bench eval never does")
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"lm-eval's task {name} shows images or plays sound; decaybench's models read text alone")


def _replay(task: LmEvalTask, answers: Sequence[Answer]) -> Any:
    """A model for lm-eval that gives the answers that are there already."""
    from lm_eval.api.model import LM

    known = dict(zip((request_line(request) for request in task._task.instances), answers, strict=True))

    def told(result: Callable[[Answer], Any]) -> Callable[..., list[Any]]:
        def replies(self: Any, requests: Sequence[Any]) -> list[Any]:
            lines = [request_line(request) for request in requests]
            if any(line not in known for line in lines):
                raise RunError(f"lm-eval's task {task.name} makes other requests each time: it can't be measured here")
            return [result(known[line]) for line in lines]

        return replies

    methods = {
        "loglikelihood": told(likelihood),
        "loglikelihood_rolling": told(lambda answer: likelihood(answer)[0]),
        "generate_until": told(written),
    }
    return type("Replay", (LM,), methods)()
