"""Documents out of sources, in pieces, so that no file needs more memory than a few of them.

Text is UTF-8 and taken as it is, line ends and NULs included, less a byte order mark. What isn't UTF-8 becomes U+FFFD,
what is no document is skipped, and both are counted (Problems). A text of more than 1 MiB comes in pieces of about
0.5 MiB, cut between words where it has any: before a space between two letters, where every tokenizer begins a token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from decaybench.core.errors import RunError, UserError
from decaybench.core.names import nearest
from decaybench.text.sources import (
    BROKEN_ROWS,
    EMPTY_DOCUMENTS,
    EMPTY_FILES,
    INVALID,
    LONGEST_SEPARATOR,
    NULS,
    Part,
    Place,
    Problems,
    Rules,
    Source,
    open_parquet,
    parquet_errors,
)
from decaybench.text.tokenizers import REPLACEMENT, to_bytes

_PIECE = 1 << 19  # bytes of a long text that are read at once
_BREAK = re.compile(rb"[A-Za-z](?= [A-Za-z])")
_LOOK = 1 << 16  # bytes beyond the intended place within which a break is looked for
_LONGEST_ROW = 1 << 26  # bytes of a line of JSON, which can only be read as a whole
_ROWS = 256  # of Parquet at once


class Piece(NamedTuple):
    """A document or a piece of one. starts, ends: whether the document starts and ends with it."""

    origin: int  # the source's place in the list of all
    text: str
    starts: bool = True
    ends: bool = True


class Stretch(NamedTuple):
    """Rows of a data set of the hub, from start to stop: their documents, and what was wrong with them."""

    start: int
    stop: int
    pieces: list[Piece]
    problems: Problems


def read_part(part: Part, rules: Rules, problems: Problems) -> Iterator[Piece]:
    """A part's documents in pieces. Raises UserError where the file can't be read, or what strict `problems` refuse."""
    read = {"text": _text, "jsonl": _json_lines, "parquet": _parquet}[part.source.kind]
    try:
        yield from read(part, rules, problems)
    except OSError as error:
        raise UserError(f"can't read {part.source.path}: {error.strerror or error}") from None


class HubRows:
    """A data set of the hub. revision: the commit that it is read at; None: it is a folder of this machine.

    Raises RunError where it, or the package `datasets`, can't be had.
    """

    def __init__(self, source: Source, origin: int, rules: Rules, revision: str | None = None) -> None:
        self._source, self._origin, self._rules = source, origin, rules
        name, _, rest = source.path.partition(":")
        config, _, split = rest.partition(":")
        with _hub_errors(source):
            from datasets import load_dataset

            self.revision = revision or _revision(name)
            self._data = load_dataset(
                name, config or None, split=split or "train", streaming=True, revision=self.revision
            )

    def stretches(self, start: int, size: int) -> Iterator[Stretch]:
        """The rows from `start` on, in stretches of about `size` characters. Raises RunError, and UserError."""
        with _hub_errors(self._source):
            rows: Iterator[Any] = iter(self._data.skip(start))
        found = Stretch(start, start, [], Problems(self._rules.strict))
        weight = 0
        while True:
            with _hub_errors(self._source):
                row = next(rows, None)
            if row is None:
                break
            text = _document(row, self._rules, Place(self._source, found.stop), found.problems)
            if text is not None:
                found.pieces.append(Piece(self._origin, text))
                weight += len(text)
            found = found._replace(stop=found.stop + 1)
            if weight >= size:
                yield found
                found, weight = Stretch(found.stop, found.stop, [], Problems(self._rules.strict)), 0
        if found.stop > found.start:
            yield found


def _text(part: Part, rules: Rules, problems: Problems) -> Iterator[Piece]:
    separator, source = rules.separator(), part.source
    with open(source.path, "rb") as file, open(source.path, "rb") as scanned:
        if separator is not None:
            for start, stop in _stretches(scanned, part.start, part.stop, source.size, separator):
                for piece in _pieces(file, part, start, stop, problems):
                    if not (piece.starts and piece.ends and _is_empty(piece.text)):
                        yield piece
            return
        first, last = part.start == 0, part.stop == source.size
        start, stop = (_cut(file, place, source.size) for place in (part.start, part.stop))
        for piece in _pieces(file, part, start, stop, problems):
            piece = piece._replace(starts=first and piece.starts, ends=last and piece.ends)
            if piece.starts and piece.ends and _is_empty(piece.text):
                problems.add(EMPTY_FILES, Place(source))
            else:
                yield piece


def _pieces(file: BinaryIO, part: Part, start: int, stop: int, problems: Problems) -> Iterator[Piece]:
    place = start
    while True:
        end = stop if stop - place <= 2 * _PIECE else _cut(file, place + _PIECE, stop)
        data = _read(file, place, end, part.source)
        if b"\0" in data:
            problems.add(NULS, Place(part.source, place + data.index(0)), data.count(0))
        text = _decoded(data, Place(part.source, place), problems)
        yield Piece(part.origin, text.removeprefix("\ufeff") if place == 0 else text, place == start, end == stop)
        if end == stop:
            return
        place = end


def _cut(file: BinaryIO, place: int, stop: int) -> int:
    """Where a text can be cut at or behind `place`: at a break, or where there is none at a character's first byte."""
    if not 0 < place < stop:
        return max(0, min(place, stop))
    file.seek(place)
    ahead = file.read(min(_LOOK, stop - place))
    found = _BREAK.search(ahead)
    if found:
        return place + found.end()
    # A character that began before has at most three bytes left, each of them 10xxxxxx.
    return place + next((i for i, byte in enumerate(ahead[:3]) if byte & 0xC0 != 0x80), min(3, len(ahead)))


def _read(file: BinaryIO, start: int, stop: int, source: Source) -> bytes:
    file.seek(start)
    data = file.read(stop - start)
    if len(data) < stop - start:
        raise UserError(f"{source.path} became shorter while it was read")
    return data


def _stretches(file: BinaryIO, start: int, stop: int, size: int, separator: bytes) -> Iterator[tuple[int, int]]:
    """The documents that start from byte `start` up to `stop`: what lies between separators, from byte to byte.

    Separators that touch or overlap count as one, so that where a document starts can be told from the bytes near it.
    """
    begin: int | None = 0 if start == 0 else None  # of the document; None: before `start`, it is another part's
    for left, right in _separators(file, max(0, start - LONGEST_SEPARATOR), size, separator):
        if begin is not None and left > begin:
            if begin >= stop:
                return
            if begin >= start:
                yield begin, left
        begin = right if begin is None else max(begin, right)
    if begin is not None and start <= begin < min(stop, size):
        yield begin, size


def _separators(file: BinaryIO, start: int, size: int, separator: bytes) -> Iterator[tuple[int, int]]:
    pattern = re.compile(b"(?=(" + separator + b"))", re.DOTALL)  # overlapping ones too
    for place in range(start, size, _PIECE):
        file.seek(place)
        for found in pattern.finditer(file.read(_PIECE + LONGEST_SEPARATOR)):
            if found.start() < _PIECE:
                yield place + found.start(), place + found.end(1)


def _json_lines(part: Part, rules: Rules, problems: Problems) -> Iterator[Piece]:
    with open(part.source.path, "rb") as file:
        for offset, line in _lines(file, part.start, part.stop):
            where = Place(part.source, offset)
            if line is None:
                problems.add(BROKEN_ROWS, where._replace(detail=f"more than {_LONGEST_ROW >> 20} MiB"))
                continue
            text = _decoded(line, where, problems).strip("\ufeff \t\r\n")
            if not text:
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                problems.add(BROKEN_ROWS, where._replace(detail=f"not JSON: {error}"))
                continue
            document = _document(row, rules, where, problems)
            if document is not None:
                yield Piece(part.origin, document)


def _lines(file: BinaryIO, start: int, stop: int) -> Iterator[tuple[int, bytes | None]]:
    """The lines that start from `start` up to `stop`, each with its place; None for one that is too long."""
    place = start
    if start:
        file.seek(start - 1)
        place += _skip_line(file) - 1
    while place < stop:
        line = file.readline(_LONGEST_ROW)
        if not line:
            return
        if len(line) == _LONGEST_ROW and not line.endswith(b"\n"):
            yield place, None
            place += len(line) + _skip_line(file)
        else:
            yield place, line
            place += len(line)


def _skip_line(file: BinaryIO) -> int:
    skipped = 0
    while line := file.readline(_PIECE):
        skipped += len(line)
        if line.endswith(b"\n"):
            break
    return skipped


def _parquet(part: Part, rules: Rules, problems: Problems) -> Iterator[Piece]:
    for number, value in _column(part, rules.field):
        where = Place(part.source, number)
        text = None if value is None else _decoded(value, where, problems)
        document = _document({rules.field: text}, rules, where, problems)
        if document is not None:
            yield Piece(part.origin, document)


def _column(part: Part, name: str) -> Iterator[tuple[int, bytes | None]]:
    """A part's rows, each with its number in the file, as bytes: pyarrow gives up where text isn't UTF-8."""
    import pyarrow

    with parquet_errors(part.source), open_parquet(part.source) as file:
        number = sum(file.metadata.row_group(i).num_rows for i in range(part.start))
        groups = list(range(part.start, part.stop))
        for batch in file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=[name]):
            column = batch.column(0)
            if pyarrow.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            values = column.cast(pyarrow.large_binary()).to_pylist()
            yield from enumerate(values, number)
            number += len(values)


def _document(row: Any, rules: Rules, where: Place, problems: Problems) -> str | None:
    """The document of a row; None where there is none."""
    if not isinstance(row, dict):
        problems.add(BROKEN_ROWS, where._replace(detail=f"no object but {_kind(row)}"))
        return None
    text = row.get(rules.field)
    if not isinstance(text, str):
        problems.add(BROKEN_ROWS, where._replace(detail=_lack(row, rules.field)))
        return None
    if _is_empty(text):
        problems.add(EMPTY_DOCUMENTS, where)
        return None
    data = to_bytes(text)
    clean = data.decode()
    if clean != text:  # lone surrogates
        problems.add(INVALID, where, clean.count(REPLACEMENT) - text.count(REPLACEMENT))
    if b"\0" in data:
        problems.add(NULS, where, data.count(0))
    return clean


def _lack(row: dict[Any, Any], name: str) -> str:
    if name in row:
        return f"its field {name!r} is {_kind(row[name])}"
    hint = nearest(name, map(str, row))
    has = ", ".join(repr(str(key)[:40]) for key in list(row)[:8]) or "none"
    return f"no field {name!r}; " + (f"did you mean {hint!r}?" if hint else f"it has {has}")


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _decoded(data: bytes, where: Place, problems: Problems) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        text = data.decode(errors="replace")
        at = where._replace(offset=(where.offset or 0) + error.start) if where.source.kind == "text" else where
        problems.add(INVALID, at, text.count(REPLACEMENT) - data.count(REPLACEMENT.encode()))
        return text


def _is_empty(text: str) -> bool:
    return not text or text.isspace()


@contextmanager
def _hub_errors(source: Source) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise RunError(f"{source.name} needs the package {error.name}: pip install 'decaybench[lm]'") from None
    except Exception as error:  # noqa: BLE001 a dozen packages raise their own
        reason = " ".join(str(error).split())[:300]
        raise RunError(f"can't read {source.name} ({type(error).__name__}): {reason}") from None


def _revision(name: str) -> str | None:
    """The commit that a data set of the hub is at now; None: a folder of this machine, which has none."""
    if Path(name).exists():
        return None
    from huggingface_hub import HfApi

    commit: str | None = HfApi().dataset_info(name).sha
    return commit
