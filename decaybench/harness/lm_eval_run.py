"""`bench eval`: a checkpoint asked lm-eval's tasks (harness/lm_eval_tasks.py), kept in a record as other evaluations.

A cell is a metric of a task, a sample of it a document: asked 1, correct 0 or 1. Its length is that of the longest
document asked, in tokens that are read. Answers are kept as they come, a line a request in samples/<task>.jsonl; a run
that was stopped goes on after them, and from them a record's cells are computed again (`verify_tasks`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from decaybench.core.config import Config, parse
from decaybench.core.errors import RunError, UserError
from decaybench.core.hashing import digest, file_digest, without_absent
from decaybench.core.scoring import Metric
from decaybench.harness.config import HARNESS_VERSION
from decaybench.harness.environment import environment, peak_memory, resolve_device
from decaybench.harness.interrupt import Stop
from decaybench.harness.lm_eval_model import Dtype
from decaybench.harness.lm_eval_tasks import LmEvalTask, Measure, lm_eval_version, load_tasks, measure
from decaybench.harness.model_info import model_info
from decaybench.harness.progress import Progress
from decaybench.harness.reader import Answer, Reader, tokenizer_of, tokens_read
from decaybench.harness.run import Outcome, checkpoint_info, enough_memory, kept_record
from decaybench.harness.spectrum_rest import model_spectrum
from decaybench.models.checkpoints import find_checkpoint
from decaybench.models.language_model import resolve_backend
from decaybench.results.answers import AnswerLine, AnswerLog
from decaybench.results.record import CellResult, Cost, RealTokens, Record, TaskInfo, data_hash, perplexity, seal
from decaybench.results.run_folder import EvaluationFolder, RunFolder
from decaybench.results.statistics import cell_statistics
from decaybench.tasks.base import MissingDataError
from decaybench.tasks.reading import Start, own_tokenizer
from decaybench.text.tokenizers import Tokenizer

NAME = "lm-eval"
METRIC: Metric = "mean_accuracy"
VERSION = 1  # goes up where the same answers would make another record

_DIGITS = 6  # of a log-likelihood in nats, that a record keeps
_LENGTH = 1024  # tokens after which the state of a model is counted whose training length isn't known
_MEANS = ("value", "standard_error", "interval", "perplexity")
_FILE = "data_files."  # before a task's name, in the folder's paths


class LmEvalQuestions(Config):
    """What is asked, but for the files that it is made of."""

    tasks: tuple[str, ...] = Field(min_length=1, description="lm-eval's tasks, groups or tags")
    limit: int | None = Field(default=None, ge=1, description="documents a task, from the first on; none: all")
    num_fewshot: int | None = Field(default=None, ge=0, description="few-shot examples; none: as each task says")
    start: Start = Field(default="none", description="token before each row: none, separator, or an id")

    @field_validator("tasks", mode="after")
    @classmethod
    def _each_once(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        found = tuple(task.strip() for task in tasks)
        if not all(found) or len(set(found)) < len(found):
            raise ValueError("name tasks of lm-eval, each once: lambada_openai,hellaswag")
        return found


class LmEvalConfig(LmEvalQuestions):
    """What `bench eval` is asked."""

    checkpoint: str = Field(description="a run or a checkpoint")
    tokenizer: str | None = Field(
        default=None, description="bytes, a tokenizer.json or its folder, or an RWKV vocabulary file; none: bytes"
    )
    data_files: dict[str, str] = Field(default_factory=dict, description="files in the place of data sets, by task")
    dtype: Dtype = Field(default="float32", description="of matrix products")
    batch_tokens: int = Field(default=16_384, ge=1, description="tokens a batch")
    device: str = Field(default="auto", description="auto, cpu or cuda")
    backend: str = Field(default="auto", description="kernels of the recurrence")
    out: str = Field(default="runs", description="folder of run folders")

    @field_validator("data_files", mode="before")
    @classmethod
    def _from_texts(cls, value: Any) -> Any:
        """TASK=FILE as the command line has them."""
        if not isinstance(value, list | tuple):
            return value
        pairs = [str(text).partition("=") for text in value]
        if not all(task and file for task, _, file in pairs):
            raise ValueError("write TASK=FILE, lambada_openai=passages.jsonl")
        return {task: file for task, _, file in pairs}


@enough_memory()
def evaluate_tasks(config: LmEvalConfig, *, force: bool = False, progress: Progress) -> Outcome:
    """Ask a checkpoint lm-eval's tasks, going on after the answers that are there.

    Raises UserError on wrong input, RunError where lm-eval isn't installed or data or numbers can't be had.
    """
    checkpoint = find_checkpoint(Path(config.checkpoint))
    tokenizer = tokenizer_of(checkpoint, config.tokenizer, config.start)
    backend, why = resolve_backend(config.backend, checkpoint.config.name)
    device, version = resolve_device(config.device), lm_eval_version()
    progress.say(f"lm-eval {version}: {', '.join(config.tasks)}")
    tasks = load_tasks(config.tasks, config.data_files, config.limit, config.num_fewshot)
    info = _task_info(config, tasks, tokenizer, checkpoint.train_length, version)

    place = Path(config.out) / f"{NAME}-{checkpoint.config.cell}-{checkpoint.sha256[:12]}"
    folder = RunFolder.open(place, force=force)
    asked = [HARNESS_VERSION, VERSION, version, info.evaluation, info.data_hash, tokenizer.sha256]
    asked += [config.batch_tokens, config.dtype]
    evaluation = folder.evaluation(digest(without_absent(asked))[:12])
    with folder.lock():
        if evaluation.is_complete():
            progress.say(f"already done: {evaluation.record_path}")
            return Outcome(kept_record(evaluation), folder, evaluation)
        if not folder.config_path.exists():
            folder.write_config({"lm_eval": config.plain()})
        files = {_FILE + task: file for task, file in config.data_files.items()}
        evaluation.write_paths(files | ({"tokenizer": config.tokenizer} if config.tokenizer else {}))
        progress.say(f"{checkpoint.config.cell} on {device}; backend {backend} ({why}); {folder.path}")
        model = checkpoint.model(device=device, backend=backend)
        reader = Reader(
            model,
            tokenizer,
            device=device,
            batch_tokens=config.batch_tokens,
            start=config.start,
            dtype=config.dtype,
        )
        began = time.monotonic()
        computed = _ask(reader, tasks, evaluation, progress)
        seconds = time.monotonic() - began
        cells, notes = _cells(tasks, evaluation, checkpoint.train_length)
        for note in notes:
            progress.note(note)
        record = seal(
            {
                "harness_version": HARNESS_VERSION,
                "task": info,
                "model": model_info(model, info.config["train_length"]),
                "checkpoint": checkpoint_info(config.checkpoint, checkpoint),
                "seed": checkpoint.facts["seed"],
                "cells": cells,
                "spectrum": model_spectrum(model, checkpoint.facts["seed"], checkpoint.train_length).info(),
                "environment": environment(device, config.dtype, config.batch_tokens),
                "cost": Cost(
                    evaluation_seconds=seconds,
                    evaluation_tokens_per_second=computed / seconds if computed and seconds else None,
                    peak_memory_bytes=peak_memory(device),
                ),
                "comparable_to": None,
            }
        )
        evaluation.write_record(record)
    return Outcome(record, folder, evaluation)


def verify_tasks(record: Record, folder: EvaluationFolder | None) -> None:
    """Recompute a record's cells from its answers (folder: where they lie), and its hash from lm-eval's tasks.

    Without a folder: the hash of what was asked, and each cell's number of documents and their lengths.
    Raises UserError on the first thing that doesn't recompute, MissingDataError where lm-eval of that version, a data
    set or a tokenizer isn't here.
    """
    asked = parse(LmEvalQuestions, record.task.evaluation, "evaluation")
    said = parse(_Said, record.task.config, "task")
    paths = {} if folder is None else folder.read_paths()
    tasks = _same_tasks(asked, said, paths)
    if data_hash((task.name, task.digest) for task in tasks) != record.task.data_hash:
        raise UserError("task.data_hash is not that of what lm-eval asks")
    tokenizer = own_tokenizer(paths.get("tokenizer", said.tokenizer), said.tokenizer_sha256)
    read = {task.name: tokens_read(task.requests, tokenizer, asked.start) for task in tasks}
    if folder is None:
        for cell in record.cells:
            _check_lengths(cell, {task.name: _lengths(task, read[task.name]) for task in tasks})
        return
    for task in tasks:
        _check_lines(task, _answer_log(folder, task), read[task.name])
    found, _ = _cells(tasks, folder, record.train_length)
    if [cell.name for cell in record.cells] != [cell.name for cell in found]:
        raise UserError(f"its cells are not those of its answers: {', '.join(cell.name for cell in found)}")
    for own, cell in zip(record.cells, found, strict=True):
        facts = own.plain()
        for key, value in cell.plain().items():
            if facts.get(key) != value and key not in _MEANS:  # which its counts were checked to give
                raise UserError(f"cell {own.name!r}: {key} is not what its answers give")


def state_length(record: Record) -> int:
    """Tokens after which a record's state is counted. Raises UserError where it doesn't say so, or isn't consistent."""
    length, stated = parse(_Said, record.task.config, "task").train_length, record.train_length
    if stated is not None and length != stated:
        raise UserError(f"task.config.train_length is {length}, but the checkpoint's is {stated}")
    return length


class _Said(Config):
    """The part of a record that is LmEvalTask's and the tokenizer's."""

    name: str
    train_length: int = Field(ge=1)
    lm_eval: str
    tokenizer: str
    tokenizer_sha256: str
    tasks: tuple[dict[str, Any], ...]


def _ask(reader: Reader, tasks: Sequence[LmEvalTask], folder: EvaluationFolder, progress: Progress) -> int:
    """Ask what isn't answered yet. Returns the tokens that were read."""
    computed, done = 0, 0
    total = sum(len(task.requests) for task in tasks)
    with Stop() as stop, progress.bar("evaluation", total, 0) as show:
        for task in tasks:
            log = _answer_log(folder, task)
            known, note = log.load()
            if note:
                progress.note(note)
            here = {index for index, line in known.items() if _fits(task, line)}
            show(done + len(here), task.name)
            for batch in reader.answers(task.requests, here):
                log.append([_line(task, index, answer) for index, answer in batch])
                here |= {index for index, _ in batch}
                computed += sum(answer.tokens for _, answer in batch)
                show(done + len(here), task.name)
                stop.raise_if_wanted(f"evaluation stopped in task {task.name}")
            done += len(task.requests)
    return computed


def _fits(task: LmEvalTask, line: AnswerLine) -> bool:
    """Whether a line is an answer to the request that it names."""
    return line.request < len(task.requests) and task.places[line.request] == (line.document, line.option)


def _line(task: LmEvalTask, index: int, answer: Answer) -> AnswerLine:
    document, option = task.places[index]
    return AnswerLine(request=index, document=document, option=option, **answer._asdict())


def _answer_log(folder: EvaluationFolder, task: LmEvalTask) -> AnswerLog:
    return AnswerLog(folder.samples(_file_safe(task.name)).path)


def _file_safe(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


def _task_info(
    config: LmEvalConfig, tasks: Sequence[LmEvalTask], tokenizer: Tokenizer, train_length: int | None, version: str
) -> TaskInfo:
    asked = config.plain()
    kept = ("tasks", "limit", "num_fewshot", "start")
    return TaskInfo(
        name=NAME,
        version=VERSION,
        config={
            "name": NAME,
            "train_length": train_length or _LENGTH,
            "lm_eval": version,
            "tokenizer": tokenizer.name,
            "tokenizer_sha256": tokenizer.sha256,
            "tasks": [task.info() for task in tasks],
        },
        evaluation={key: asked[key] for key in kept},
        metric=METRIC,
        data_hash=data_hash((task.name, task.digest) for task in tasks),
    )


def _cells(
    tasks: Sequence[LmEvalTask], folder: EvaluationFolder, train_length: int | None
) -> tuple[list[CellResult], list[str]]:
    """The cells of answers that are all there, and what a user should know of metrics that aren't among them."""
    cells, notes = [], []
    for task in tasks:
        lines = _answer_log(folder, task).read()
        answers = [
            Answer(line.tokens, line.log_likelihood, line.greedy, line.text)
            for line in (lines[index] for index in range(len(task.requests)))
        ]
        measures, left_out = measure(task, answers)
        if left_out:
            notes.append(
                f"task {task.name}: {', '.join(left_out)} isn't in the record, which holds metrics of 0 or 1 a document"
            )
        lengths = _lengths(task, [answer.tokens for answer in answers])
        cells += [_cell(task, found, lengths, train_length) for found in measures]
    if not cells:
        raise UserError(f"{'; '.join(notes)}: ask by `lm_eval --model decaybench` (docs/lm-eval.md)")
    return cells, notes


def _cell(task: LmEvalTask, found: Measure, lengths: Sequence[int], train_length: int | None) -> CellResult:
    n = len(found.values)
    value, error, interval = cell_statistics(METRIC, found.values, [1] * n)
    likely = None if found.log_likelihood is None else tuple(round(nats, _DIGITS) for nats in found.log_likelihood)
    return CellResult(
        name=_file_safe(f"{task.name}-{found.name}"),
        variant=f"{task.name} {found.name}",
        eval_length=max(lengths),
        ratio=max(lengths) / train_length if train_length else None,
        n=n,
        real_tokens=_real_tokens(lengths),
        correct=found.values,
        asked=(1,) * n,
        value=value,
        standard_error=error,
        interval=interval,
        log_likelihood=likely,
        perplexity=None if likely is None else perplexity(likely),
    )


def _lengths(task: LmEvalTask, tokens: Sequence[int]) -> list[int]:
    """The longest of each document's requests, tokens."""
    found: dict[int, int] = {}
    for (document, _), count in zip(task.places, tokens, strict=True):
        found[document] = max(count, found.get(document, 1))
    return list(found.values())


def _real_tokens(lengths: Sequence[int]) -> RealTokens:
    return RealTokens(min=min(lengths), mean=sum(lengths) / len(lengths), max=max(lengths))


def _same_tasks(asked: LmEvalQuestions, said: _Said, paths: Mapping[str, str]) -> list[LmEvalTask]:
    """The tasks of a record; paths: where a run found its files."""
    wanted = f"lm-eval {said.lm_eval}"
    try:
        here = lm_eval_version()
    except RunError as error:
        raise MissingDataError(str(error), wanted) from None
    if here != said.lm_eval:
        raise MissingDataError(f"the record is by {wanted}; here is {here}", f"{wanted}; here {here}")
    files = {}
    for info in said.tasks:
        name, data = str(info.get("name")), info.get("data")
        if not isinstance(data, dict) or "file" not in data:
            continue
        files[name] = paths.get(_FILE + name, str(data["file"]))
        needs = f"{data['file']} (sha256 {str(data.get('sha256'))[:12]}…)"
        if not Path(files[name]).is_file() or file_digest(Path(files[name])) != data.get("sha256"):
            raise MissingDataError(f"{files[name]} is not the file that the record is of", needs)
    try:
        tasks = load_tasks(asked.tasks, files, asked.limit, asked.num_fewshot)
    except RunError as error:
        raise MissingDataError(str(error), f"the data of {', '.join(asked.tasks)}") from None
    if [task.info() for task in tasks] != list(said.tasks):
        raise UserError("task.config.tasks is not what lm-eval says of them")
    return tasks


def _check_lines(task: LmEvalTask, log: AnswerLog, read: Sequence[int]) -> None:
    lines = log.read()
    if sorted(lines) != list(range(len(task.requests))):
        raise UserError(f"{log.path} has {len(lines)} answers to {len(task.requests)} requests")
    for index, line in lines.items():
        if (line.document, line.option, line.tokens) != (*task.places[index], read[index]):
            raise UserError(f"{log.path}: the line of request {index} is another request's")


def _check_lengths(cell: CellResult, lengths: Mapping[str, Sequence[int]]) -> None:
    """lengths: of each task's documents, tokens."""
    own = lengths.get(cell.variant.partition(" ")[0])
    if own is None:
        raise UserError(f"cell {cell.name!r} is of none of its tasks")
    expected = {"n": len(own), "eval_length": max(own), "real_tokens": _real_tokens(own).plain()}
    for key, value in expected.items():
        if cell.plain()[key] != value:
            raise UserError(f"cell {cell.name!r}: {key} is not that of its documents")
