"""Where text comes from: files, folders, and data sets of the Hugging Face hub, and what is wrong with them.

    .txt .md         a file is one document, or several where `split_on` says what stands between them
    .jsonl           a line is a JSON object, its `field` one document
    .parquet         a row is a document, its column `field`
    hf://NAME        the same of a data set of the hub, streamed; hf://NAME:CONFIG:SPLIT

A file is read in parts, each of which can be read alone (text/documents.py): a part has the documents that start in it
or, of a file that is one document, a stretch.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from decaybench.core.errors import RunError, UserError
from decaybench.core.names import nearest
from decaybench.text.tokenizers import to_bytes

Kind = Literal["text", "jsonl", "parquet", "hub"]
HUB = "hf://"
SUFFIXES: dict[str, Kind] = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
LONGEST_SEPARATOR = 256  # bytes

# What can be wrong with a source, and what becomes of it.
EMPTY_FILES = "empty files"
EMPTY_DOCUMENTS = "empty documents"
OTHER_FILES = "files of other kinds"
WIDE_FILES = "UTF-16 files"
BROKEN_ROWS = "broken rows"
INVALID = "byte sequences that aren't UTF-8"
NULS = "NUL characters"
DUPLICATES = "files that hold the same as another"
OUTCOMES = {
    EMPTY_FILES: "skipped",
    EMPTY_DOCUMENTS: "skipped",
    OTHER_FILES: "left aside",
    WIDE_FILES: "skipped (text is read as UTF-8)",
    BROKEN_ROWS: "skipped",
    INVALID: "replaced by U+FFFD",
    NULS: "kept",
    DUPLICATES: "kept (their text counts double)",
}
HARMLESS = (OTHER_FILES, EMPTY_DOCUMENTS, NULS, DUPLICATES)  # nothing is lost

_SEPARATORS = {"blank-lines": rb"\n[ \t\r]{0,64}\n", "lines": rb"\n"}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "\\": "\\"}
_COUNTED = 1 << 20  # bytes at once


class Rules(NamedTuple):
    """How files become documents.

    split_on: what stands between the documents of a text file: None (the file is one), "blank-lines", "lines", or the
    separator itself, in which \\n is a line end; field: the document's name in JSON and Parquet; strict: refuse what
    would else be skipped or replaced.
    """

    split_on: str | None = None
    field: str = "text"
    strict: bool = False

    def separator(self) -> bytes | None:
        """What stands between a text file's documents, as a regular expression; None: it is one. Raises UserError."""
        text = self.split_on
        if text is None or text in _SEPARATORS:
            return None if text is None else _SEPARATORS[text]
        hint = nearest(text, _SEPARATORS)
        if hint:
            raise UserError(f"--split-on {text!r}: did you mean {hint!r}?")
        unknown = next((found for found in re.findall(r"\\(.?)", text, re.DOTALL) if found not in _ESCAPES), None)
        if unknown is not None:
            raise UserError(f"--split-on {text!r}: \\{unknown} stands for nothing; write \\\\ for a backslash")
        data = to_bytes(re.sub(r"\\(.)", lambda found: _ESCAPES[found[1]], text))
        if not 0 < len(data) <= LONGEST_SEPARATOR:
            raise UserError(
                f"--split-on {text[:40]!r}: a separator has 1 to {LONGEST_SEPARATOR} bytes, not {len(data)}"
            )
        return re.escape(data)


class Source(NamedTuple):
    """A file, or a data set of the hub.

    name: its path below what was asked for, the same on every machine; path: here, or what stands after hf://; size:
    bytes; weights: bytes of the column in each row group of a Parquet file.
    """

    name: str
    path: str
    kind: Kind
    size: int = 0
    weights: tuple[int, ...] = ()

    def is_one_document(self, rules: Rules) -> bool:
        """Whether it is a file that is one document."""
        return self.kind == "text" and rules.split_on is None


class Part(NamedTuple):
    """A stretch of a file: bytes, or row groups of Parquet, from start to stop. weight: bytes."""

    origin: int  # the source's place in the list of all
    source: Source
    start: int
    stop: int
    weight: int


class Place(NamedTuple):
    """Where something was found: offset in bytes, or in rows of Parquet and of the hub; None: all of the source."""

    source: Source
    offset: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        where = self.source.name
        if self.offset is not None:
            match self.source.kind:
                case "text":
                    where += f" at byte {self.offset}"
                case "jsonl":
                    where += f" line {_line_number(self.source.path, self.offset)}"
                case _:
                    where += f" row {self.offset + 1}"
        return where + (f" ({self.detail})" if self.detail else "")


class Problems:
    """What was wrong with the sources: how often, and where first. strict: refused instead, with UserError."""

    def __init__(self, strict: bool = False) -> None:
        self._strict = strict
        self.found: dict[str, tuple[int, Place]] = {}

    def add(self, what: str, where: Place, count: int = 1) -> None:
        """Count what was found; of all places the first is kept."""
        if self._strict and what not in HARMLESS:
            raise UserError(f"--strict refuses {what}: {where}")
        before, first = self.found.get(what, (0, where))
        self.found[what] = (before + count, first)

    def merge(self, later: Problems) -> None:
        """Add what was found after all that is here."""
        for what, (count, where) in later.found.items():
            self.add(what, where, count)

    def lines(self) -> list[str]:
        """A line on each for a reader."""
        return [f"{count:,} {what} {OUTCOMES[what]}; the first: {where}" for what, (count, where) in self.found.items()]

    def plain(self) -> dict[str, Any]:
        """JSON-able data, for `from_plain`."""
        return {what: [count, *where] for what, (count, where) in self.found.items()}

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Problems:
        """What `plain` gave."""
        problems = cls()
        for what, (count, source, offset, detail) in data.items():
            problems.add(what, Place(Source(*source), offset, detail), count)
        return problems


def find_sources(paths: Iterable[str], rules: Rules, problems: Problems, leave: Path | None = None) -> list[Source]:
    """The sources that paths and hf:// names stand for, folders recursively and by name, in the order asked for.

    leave: a folder to leave out, where it lies in one of them.
    Raises UserError where there is none, one is named twice or can't be read, or a Parquet file is damaged or lacks the
    column; RunError where a package is missing.
    """
    rules.separator()
    found: list[Source] = []
    for text in paths:
        if text.startswith(HUB):
            found.append(Source(text, text.removeprefix(HUB), "hub"))
        else:
            found += _files(Path(text), problems, leave)
    seen: dict[str, str] = {}
    for source in found:
        real = source.path if source.kind == "hub" else os.path.realpath(source.path)
        if real in seen:
            raise UserError(f"{source.path} is named twice (as {seen[real]}); its text would count double")
        seen[real] = source.path
    return [_with_weights(source, rules) if source.kind == "parquet" else source for source in found]


def split_parts(origin: int, source: Source, size: int) -> Iterator[Part]:
    """A file in parts of about `size` bytes, or fewer where it is shorter. Raises ValueError for one of the hub."""
    if source.kind == "hub":
        raise ValueError("a data set of the hub is read by HubRows")
    if source.kind == "parquet":
        for group, weight in enumerate(source.weights):
            yield Part(origin, source, group, group + 1, weight)
        return
    count = max(1, source.size // size)
    edges = [source.size * i // count for i in range(count + 1)]
    for start, stop in itertools.pairwise(edges):
        yield Part(origin, source, start, stop, stop - start)


def open_parquet(source: Source) -> Any:
    """The file, by pyarrow. Raises RunError where that isn't installed, and what pyarrow raises."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise RunError(f"{source.path} needs the package pyarrow: pip install 'decaybench[lm]'") from None
    return ParquetFile(source.path)


@contextmanager
def parquet_errors(source: Source) -> Iterator[None]:
    """What pyarrow raises inside it becomes a UserError."""
    try:
        yield
    except (OSError, ValueError, TypeError, NotImplementedError) as error:  # all of pyarrow's are one of these, too
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{source.path} is no whole Parquet file (cut short or damaged?): {reason}") from None


def _files(path: Path, problems: Problems, leave: Path | None) -> Iterator[Source]:
    if path.is_dir():
        yield from _below(path, problems, leave)
    elif not path.exists():
        raise UserError(f"no file or folder {str(path)!r}; a data set of the hub is {HUB}{path}")
    elif not path.is_file():
        raise UserError(f"{path} is neither a file nor a folder")
    elif path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path}: can't read {path.suffix or 'a file without an ending'}; {', '.join(SUFFIXES)} can be")
    else:
        yield from _file(path, path.name, problems)


def _below(folder: Path, problems: Problems, leave: Path | None) -> Iterator[Source]:
    def refuse(error: OSError) -> None:
        raise UserError(f"can't read {error.filename}: {error.strerror}")

    top = folder.resolve().name
    known = False
    been = set() if leave is None else {os.path.realpath(leave)}
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(place)
        if real in been:  # perhaps by a link back to a folder above it
            folders.clear()
            continue
        been.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            path = Path(place, name)
            if path.is_file():
                known = known or path.suffix.lower() in SUFFIXES
                yield from _file(path, "/".join((top, *path.relative_to(folder).parts)), problems)
    if not known:
        raise UserError(f"{folder} holds no {', '.join(SUFFIXES)} file")


def _file(path: Path, name: str, problems: Problems) -> Iterator[Source]:
    name = os.fsencode(name).decode(errors="replace")  # a name on disk needn't be text
    kind = SUFFIXES.get(path.suffix.lower())
    if kind is None:
        problems.add(OTHER_FILES, Place(Source(name, str(path), "text")))
        return
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(2)
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from None
    source = Source(name, str(path), kind, size)
    if kind != "parquet" and start in (b"\xff\xfe", b"\xfe\xff"):
        problems.add(WIDE_FILES, Place(source))
    elif size == 0:
        problems.add(EMPTY_FILES, Place(source))
    else:
        yield source


def _with_weights(source: Source, rules: Rules) -> Source:
    with parquet_errors(source), open_parquet(source) as file:
        names = file.schema_arrow.names
        if rules.field not in names:
            hint = nearest(rules.field, names)
            tail = f"did you mean {hint!r}?" if hint else f"it has {', '.join(names[:8]) or 'none'}"
            raise UserError(f"{source.path} has no column {rules.field!r} (--field); {tail}")
        kind = file.schema_arrow.field(rules.field).type
        if not re.fullmatch(r"(large_)?string|dictionary<values=(large_)?string, .*>", str(kind)):
            raise UserError(f"{source.path}: column {rules.field!r} is {kind}, not text; --field names another")
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        if file.metadata.num_columns != len(names):  # some are nested, and columns have other numbers than names
            return source._replace(weights=tuple(group.total_byte_size for group in groups))
        column = names.index(rules.field)
        return source._replace(weights=tuple(group.column(column).total_uncompressed_size for group in groups))


def _line_number(path: str, offset: int) -> int:
    count = 1
    with open(path, "rb") as file:
        while offset > 0 and (data := file.read(min(offset, _COUNTED))):
            count += data.count(b"\n")
            offset -= len(data)
    return count
