"""The run folder: what a run has done so far, so that the same command goes on from there.

    config.yaml               the resolved configuration
    log.jsonl                 one line an event
    checkpoint/               weights and optimiser (models/checkpoints.py)
    evaluations/<hash>/       samples/<cell>.jsonl, figures/, record.json (written last: the evaluation is complete),
                              and where the task has files of its own, paths.json

Every file is whole, or is lines of which only the last can be torn by a kill; a torn line is cut off, never guessed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from decaybench.core.config import explain, read_yaml
from decaybench.core.errors import RunError, UserError
from decaybench.core.files import (
    append_lines,
    atomic_write_json,
    atomic_write_text,
    cut,
    locked,
    make_folder,
    read_json,
    writing,
)
from decaybench.results.record import Record

_LOCK = ".lock"
_CONFIG = "config.yaml"
_EVALUATIONS = "evaluations"
_PATHS = "paths.json"


class PositionSums(BaseModel):
    """Of a sample of running text, what follows its tokens at positions high / 2 + 1 to high (`record.PositionBin`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    high: int = Field(ge=1)
    asked: int = Field(ge=1, description="tokens that had to be foreseen")
    correct: int = Field(ge=0, description="of these, the first choice")
    bytes: int = Field(ge=0, description="bytes of text that these stand for")
    nats: float = Field(ge=0, description="minus their log-likelihood, nats, 6 digits")


class SampleLine(BaseModel):
    """One evaluated sample: a line of `samples/<cell>.jsonl`. The lists have an entry a question.

    No Config, whose validators in Python are slow for many thousand lines and can't be strict about JSON's types.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    id: str = Field(description="the sample's id, a hash of all that it is a function of")
    index: int = Field(ge=0, description="the sample's index in its cell")
    target: tuple[int, ...] = Field(description="the right answers, token ids")
    answer: tuple[int, ...] = Field(
        description="the model's answers, token ids; where it was to write a text, all that it wrote"
    )
    score: float = Field(ge=0, le=1, description="the metric's score, 0..1")
    distance: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        description="tokens between writing and asking; empty: the task has no distances"
    )
    length: int = Field(ge=0, description="true length, tokens")
    depth: float | None = Field(default=None, ge=0, le=1, description="realised depth, 0..1; absent: none")
    log_likelihood: float | None = Field(
        default=None, le=0, description="of all right answers together, nats, 6 digits; absent: the task asks for none"
    )
    by_position: tuple[PositionSums, ...] | None = Field(
        default=None, description="of running text, in the place of targets and answers; absent: it isn't"
    )
    wanted: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="in the place of targets, what is to be found in what the model wrote; absent: it wrote no text",
    )
    text: str | None = Field(
        default=None, description="what it wrote, with U+FFFD for what is no text; absent: no text"
    )

    @model_validator(mode="after")
    def _an_answer_a_question(self) -> SampleLine:
        if (self.wanted is None) != (self.text is None):
            raise ValueError("wanted and text are there together, or neither")
        if self.wanted is not None:
            if self.target or len(self.distance) not in (0, len(self.wanted)):
                raise ValueError(f"{len(self.wanted)} wanted, {len(self.distance)} distances")
        elif len(self.answer) != len(self.target) or len(self.distance) not in (0, len(self.target)):
            raise ValueError(f"{len(self.target)} targets, {len(self.answer)} answers, {len(self.distance)} distances")
        return self


class Loaded(NamedTuple):
    """The samples that a log holds, and a note for the user where damaged lines had to be dropped."""

    lines: list[SampleLine]
    note: str | None


class SampleLog:
    """The samples of one cell in order of index, 0 first, appended as batches are done."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, whole: int, total: int | None = None) -> Loaded:
        """The samples done so far; what can't be used is cut off the file.

        whole: samples a batch. A kill may leave part of a batch, and a resumed run must compute the same batches as
        an uninterrupted one: only a multiple of `whole` is kept, or all where `total` (samples of the cell) are there.
        From the first damaged line on, all is cut. Raises UserError where the file can't be read, RunError where it
        can't be cut.
        """
        content = self._bytes()
        complete = content.split(b"\n")[:-1]
        lines, reason = _valid(complete)
        note = None
        if reason:
            note = f"{self.path} line {len(lines) + 1} is damaged ({reason}); evaluating again from there"
        kept = total if total is not None and len(lines) >= total else len(lines) - len(lines) % whole
        size = sum(len(line) + 1 for line in complete[:kept])
        if size < len(content):
            cut(self.path, size)
        return Loaded(lines[:kept], note)

    def keep(self, count: int) -> None:
        """Cut off all but the first `count` samples. Raises RunError where the file can't be cut."""
        cut(self.path, sum(len(line) + 1 for line in self._bytes().split(b"\n")[:count]))

    def read(self) -> list[SampleLine]:
        """All samples of a finished cell, as they are. Raises UserError where any line is damaged."""
        content = self._bytes()
        lines, reason = _valid(content.split(b"\n")[:-1])
        if reason or not content.endswith(b"\n"):
            raise UserError(f"{self.path} line {len(lines) + 1} is damaged ({reason or 'cut short'})")
        return lines

    def _bytes(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise UserError(f"can't read {self.path}: {error.strerror}") from None

    def append(self, lines: Iterable[SampleLine]) -> None:
        """Add a batch in one write, and wait for the disk. Raises RunError; the file is then as it was."""
        append_lines(self.path, [line.model_dump_json(exclude_none=True) for line in lines])


class EvaluationFolder:
    """The folder of one evaluation of a run's model."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def samples(self, cell: str) -> SampleLog:
        """The log of a cell's samples."""
        return SampleLog(self.path / "samples" / f"{cell}.jsonl")

    @property
    def figures(self) -> Path:
        """Folder of the figures. It may not exist yet."""
        return self.path / "figures"

    def write_paths(self, paths: Mapping[str, str]) -> None:
        """Note where the task's files lie, of which the record has names alone, if it has any. Raises RunError."""
        if paths:
            here = {key: Path(path) for key, path in paths.items()}
            full = {key: str(path.absolute()) if path.exists() else paths[key] for key, path in here.items()}
            atomic_write_json(self.path / _PATHS, full)

    def read_paths(self) -> dict[str, str]:
        """What `write_paths` noted; empty: nothing. Raises UserError where it is damaged."""
        file = self.path / _PATHS
        found = read_json(file) if file.exists() else {}
        if not isinstance(found, dict) or not all(isinstance(path, str) for path in found.values()):
            raise UserError(f"{file} is damaged: it must hold names and paths")
        return found

    @property
    def record_path(self) -> Path:
        """The record's file. Its presence means that the evaluation is complete."""
        return self.path / "record.json"

    def is_complete(self) -> bool:
        """Whether the record, the last file to be written, is there."""
        return self.record_path.is_file()

    def write_record(self, record: Record) -> None:
        """Write the record; to be called last. Raises RunError."""
        atomic_write_text(self.record_path, record.to_json())


class LockedError(RunError):
    """Another process works on the folder."""


class RunFolder:
    """A run's folder. Write to it only inside `lock()`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: Path, force: bool = False) -> RunFolder:
        """The run folder at `path`, made where it is missing and emptied with `force`.

        Raises UserError where `path` holds something that isn't a run, RunError where it can't be made or, with
        `force`, while another process works on it.
        """
        folder = cls(path)
        make_folder(path, "of runs")
        with writing(path):
            if not folder._is_run():
                raise UserError(f"{path} is not empty and not a run folder (no {_CONFIG}); choose another --out")
        if force:
            folder._empty()
        return folder

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held while working on the folder. Raises LockedError at once where another process holds it."""
        said = f"another process is working on {self.path}; wait for it or choose another --out"
        with locked(self.path / _LOCK, said, kind=LockedError):
            yield

    @property
    def config_path(self) -> Path:
        """The configuration's file. It may not exist yet."""
        return self.path / _CONFIG

    def write_config(self, data: Mapping[str, Any]) -> None:
        """Write config.yaml. Raises RunError."""
        text = yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True)
        atomic_write_text(self.config_path, text)

    def read_config(self) -> dict[str, Any]:
        """The content of config.yaml. Raises UserError where it is missing or damaged; nothing is deleted."""
        try:
            return read_yaml(self.config_path)
        except UserError as error:
            raise UserError(f"{error}; --force starts this run anew") from None

    def log(self, event: Mapping[str, Any]) -> None:
        """Append an event to log.jsonl; a torn last line is cut off first. Numbers must be finite. Raises RunError."""
        line = json.dumps(dict(event), ensure_ascii=False, allow_nan=False)
        append_lines(self.path / "log.jsonl", [line], sync=False)

    @property
    def checkpoint(self) -> Path:
        """Folder of the last checkpoint. It may not exist yet."""
        return self.path / "checkpoint"

    def evaluation(self, evaluation_hash: str) -> EvaluationFolder:
        """The folder of the evaluation with this hash. It may not exist yet."""
        return EvaluationFolder(self.path / _EVALUATIONS / evaluation_hash)

    def _is_run(self) -> bool:
        names = {entry.name for entry in self.path.iterdir()}
        # A kill before the first write leaves nothing but the lock and the configuration's temporary file.
        return _CONFIG in names or all(name == _LOCK or name.startswith(f".{_CONFIG}.") for name in names)

    def _empty(self) -> None:
        with self.lock(), writing(self.path):
            # Evaluations first and the configuration last: a kill in between leaves a folder that is still known
            # as a run, and no record of weights that are gone.
            order = {_EVALUATIONS: 0, _CONFIG: 2}
            for entry in sorted(self.path.iterdir(), key=lambda entry: order.get(entry.name, 1)):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name != _LOCK:
                    entry.unlink()


def find_evaluations(run: Path) -> list[EvaluationFolder]:
    """The finished evaluations of a run; or that one whose folder or record `run` is. Raises UserError on none."""
    if (run / "record.json").is_file():
        return [EvaluationFolder(run)]
    if run.name == "record.json" and run.is_file():
        return [EvaluationFolder(run.parent)]
    if not run.exists():
        raise UserError(f"no run at {run}: there is no such folder")
    found = sorted(path.parent for path in run.glob("evaluations/*/record.json"))
    if not found:
        raise UserError(f"{run} holds no finished evaluation (evaluations/*/record.json)")
    return [EvaluationFolder(path) for path in found]


def _valid(complete: list[bytes]) -> tuple[list[SampleLine], str | None]:
    lines: list[SampleLine] = []
    for text in complete:
        try:
            line = SampleLine.model_validate_json(text, strict=True)
        except ValidationError as error:
            return lines, explain(error, SampleLine)
        if line.index != len(lines):
            return lines, f"index is {line.index}, not {len(lines)}"
        lines.append(line)
    return lines, None
