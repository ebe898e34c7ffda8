"""What a model answered to requests of text: a line a request, in the order in which they were answered.

Batches are appended whole, so that a kill leaves whole lines and at most one torn one. A request that was answered
again has its last line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from decaybench.core.config import explain
from decaybench.core.errors import UserError
from decaybench.core.files import append_lines, atomic_write_bytes


class AnswerLine(BaseModel):
    """An answer. log_likelihood and greedy, or text."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    request: int = Field(ge=0, description="the request's index")
    document: int = Field(ge=0, description="the document that it asks of, by index")
    option: int = Field(ge=0, description="which of the document's requests it is, by index")
    tokens: int = Field(ge=0, description="tokens that were read for it")
    log_likelihood: float | None = Field(
        default=None, le=0, description="of the text asked for, nats; absent: text was written"
    )
    greedy: bool | None = Field(default=None, description="whether each of its tokens is the model's first choice")
    text: str | None = Field(default=None, description="what the model wrote; absent: nothing was to be written")

    @model_validator(mode="after")
    def _one_kind(self) -> AnswerLine:
        if (self.log_likelihood is None) != (self.greedy is None) or (self.text is None) == (self.greedy is None):
            raise ValueError("a line has log_likelihood and greedy, or text")
        return self


class Answers(NamedTuple):
    """The answers by request, and a note for the user where damaged lines were left out."""

    lines: dict[int, AnswerLine]
    note: str | None


class AnswerLog:
    """The answers to one task's requests."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> Answers:
        """The answers so far. Damaged lines are taken out of the file. Raises UserError, RunError."""
        complete = self._bytes().split(b"\n")[:-1]
        found = [_parsed(line) for line in complete]
        damaged = [number for number, line in enumerate(found, 1) if isinstance(line, str)]
        lines = {line.request: line for line in found if isinstance(line, AnswerLine)}
        if not damaged:
            return Answers(lines, None)
        kept = [text + b"\n" for text, line in zip(complete, found, strict=True) if isinstance(line, AnswerLine)]
        atomic_write_bytes(self.path, b"".join(kept))
        what = f"{self.path} line {damaged[0]} is damaged ({found[damaged[0] - 1]})"
        return Answers(lines, f"{what}; asking again what its {len(damaged)} damaged lines were of")

    def read(self) -> dict[int, AnswerLine]:
        """The answers of finished work, as they are. Raises UserError where there is none or a line is damaged."""
        content = self._bytes()
        if not content.endswith(b"\n"):
            raise UserError(f"{self.path} is missing, empty or cut short")
        lines = {}
        for number, text in enumerate(content.split(b"\n")[:-1], 1):
            line = _parsed(text)
            if isinstance(line, str):
                raise UserError(f"{self.path} line {number} is damaged ({line})")
            lines[line.request] = line
        return lines

    def append(self, lines: Sequence[AnswerLine]) -> None:
        """Add a batch in one write, and wait for the disk. Raises RunError; the file is then as it was."""
        append_lines(self.path, [line.model_dump_json(exclude_none=True) for line in lines])

    def _bytes(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise UserError(f"can't read {self.path}: {error.strerror}") from None


def _parsed(text: bytes) -> AnswerLine | str:
    """A line, or what is wrong with it."""
    try:
        return AnswerLine.model_validate_json(text, strict=True)
    except ValidationError as error:
        return explain(error, AnswerLine)
