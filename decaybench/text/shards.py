"""Token shards: a folder of token ids, memory-mapped, that is the same whoever made it and with how many workers.

    manifest.json              what is in it; written last: its presence means complete
    train/shard-00000.bin      token ids, uint16 or uint32, little-endian; each document ends with the separator
    train/shard-00000.idx      where documents end, int64, little-endian: tokens of this shard up to and with it
    validation/…               the same, documents that are in no train shard
    tokenizer/…                a copy of the tokenizer's files, where it has any

A split is its shards one after the other, in the manifest's order; a document may go on from one into the next.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, BinaryIO, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.core.files import atomic_write_bytes, read_json, writing
from decaybench.core.hashing import digest, file_digest
from decaybench.core.names import unknown
from decaybench.text.tokenizers import Ids, Tokenizer, load_tokenizer

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
SplitName = Literal["train", "validation"]
By = Literal["document", "file"]
SPLITS: tuple[SplitName, ...] = ("train", "validation")
Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]

_IN_A_FOLDER = ("tokenizer.json", "tokenizer_config.json")  # whose folder's name is the tokenizer's
_OPEN = 64  # files mapped at once, of a limit of perhaps 256 a process
_AT_ONCE = 1 << 22  # tokens


class Part(BaseModel):
    """A part of the manifest. No Config, whose validators in Python are slow for a million sources."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TokenizerInfo(Part):
    """The tokenizer that made the ids."""

    name: str
    sha256: Sha256 = Field(description="of all that encoding depends on; the file's own hash is another")
    vocab_size: int = Field(ge=1, le=1 << 31)
    separator: Count = Field(description="the id that ends a document")
    file: str | None = Field(default=None, pattern=r"^tokenizer/[^/\\]+$", description="its copy; absent: built in")

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """What is said of this tokenizer."""
        return cls(
            name=tokenizer.name,
            sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            separator=tokenizer.separator,
            file=_copy_name(tokenizer),
        )


class Rule(Part):
    """How documents were found, and which of them are validation."""

    split_on: str | None = Field(default=None, description="what stands between the documents of a text file")
    field: str = Field(description="the documents' field in JSON lines, and column in Parquet")
    validation: float = Field(ge=0, lt=1, description="share of documents or files that was asked for")
    by: By = Field(description="what falls into one of the splits as a whole")


class SourceInfo(Part):
    """A file, or a data set of the hub."""

    name: str
    kind: Literal["text", "jsonl", "parquet", "hub"]
    bytes: Count | None = Field(default=None, description="absent: of the hub")
    sha256: Sha256 | None = Field(default=None, description="of the file; absent: of the hub")
    revision: str | None = Field(default=None, description="the commit of the hub's data set")


class Problem(Part):
    """Something that was wrong with the sources."""

    what: str
    outcome: str = Field(description="what became of it")
    count: Count
    first: str = Field(description="where it was first")

    def __str__(self) -> str:
        return f"{self.count:,} {self.what} {self.outcome}; the first: {self.first}"


class ShardInfo(Part):
    """A shard."""

    file: str = Field(pattern=r"^(train|validation)/shard-\d{5,9}$", description="its path without .bin and .idx")
    tokens: Count
    documents: Count = Field(description="documents that end in it")
    bytes: Count = Field(description="bytes of its text in UTF-8")
    sha256: Sha256 = Field(description="of the .bin file")
    ends_sha256: Sha256 = Field(description="of the .idx file")
    sources: tuple[Count, Count] = Field(description="its first and its last source, by place in the list")


class SplitInfo(Part):
    """Train or validation."""

    tokens: Count = Field(description="separators included")
    documents: Count
    bytes: Count = Field(description="bytes of text in UTF-8")
    shards: tuple[ShardInfo, ...]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text a token; separators, which are no text, not counted. 0: there is no text."""
        return self.bytes / max(1, self.tokens - self.documents)

    @classmethod
    def of(cls, shards: tuple[ShardInfo, ...]) -> Self:
        """These shards, with their sums."""
        tokens, documents, size = (sum(getattr(s, name) for s in shards) for name in ("tokens", "documents", "bytes"))
        return cls(tokens=tokens, documents=documents, bytes=size, shards=shards)


class Manifest(Part):
    """What is in a folder of token shards."""

    format: Literal[1] = 1
    tokenizer: TokenizerInfo
    dtype: Literal["uint16", "uint32"]
    rule: Rule
    sources: tuple[SourceInfo, ...]
    splits: dict[SplitName, SplitInfo]
    problems: tuple[Problem, ...] = Field(description="what was skipped, replaced or odd")

    @property
    def sha256(self) -> str:
        """Of the tokens and their splits: 64 hexadecimal digits, equal for equal data whatever it was made of."""
        shards = {name: [[s.sha256, s.ends_sha256] for s in split.shards] for name, split in self.splits.items()}
        return digest({"format": self.format, "tokenizer": self.tokenizer.sha256, "dtype": self.dtype, **shards})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder of token shards. Raises UserError where there is none or it is damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        if (folder / "train").is_dir() or (folder / "validation").is_dir():
            raise UserError(f"{folder} is not finished (no {MANIFEST}); the same `bench data prepare` goes on with it")
        raise UserError(f"{folder} is no folder of token shards (no {MANIFEST}); `bench data prepare` makes one")
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(content).__name__}")
    try:
        manifest = parse(Manifest, content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    for name, split in manifest.splits.items():
        if split != SplitInfo.of(split.shards):
            raise UserError(f"{path}: the sums of {name} aren't those of its shards")
    return manifest


class TokenShards:
    """A split of a folder of token shards, opened for reading: nothing is loaded, files are mapped when used.

    Raises UserError where the folder isn't complete, has no such split, or a file's size isn't the manifest's.
    """

    def __init__(self, folder: Path, split: str = "train") -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        if split not in self.manifest.splits:
            raise UserError(f"{folder} has no {split} documents; prepare it with another --validation")
        self.split: SplitName = split
        self.info = self.manifest.splits[split]
        self._dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self._starts = np.cumsum([0, *(shard.tokens for shard in self.info.shards)])
        self._firsts = np.cumsum([0, *(shard.documents for shard in self.info.shards)])
        self._open: OrderedDict[tuple[int, str], NDArray[Any]] = OrderedDict()
        for shard in self.info.shards:
            self._check_size(shard.file + ".bin", shard.tokens * self._dtype.itemsize)
            self._check_size(shard.file + ".idx", shard.documents * 8)

    def __len__(self) -> int:
        """Tokens, separators included."""
        return self.info.tokens

    @property
    def documents(self) -> int:
        """Documents of the split."""
        return self.info.documents

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """The ids from token `start` up to `stop`, [stop - start], uint16 or uint32: a copy. Raises IndexError."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        found = np.empty(stop - start, dtype=np.dtype(self.manifest.dtype))
        for shard, first, last in self._overlaps(start, stop):
            place = int(self._starts[shard]) + first - start
            found[place : place + last - first] = self._map(shard, ".bin")[first:last]
        return found

    def ends(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where the documents end that end in these tokens: every e with start < e <= stop, upwards. Raises IndexError.

        tokens(e - 1, e) is a separator, and at e another document begins, or the split ends.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        found = [np.empty(0, dtype=np.int64)]
        for shard, first, last in self._overlaps(start, stop):
            ends = self._map(shard, ".idx")
            low, high = np.searchsorted(ends, [first, last], side="right")
            found.append(ends[low:high] + self._starts[shard])
        return np.concatenate(found)

    def document(self, number: int) -> tuple[int, int]:
        """Where a document starts, and where it ends behind its separator, in tokens. Raises IndexError."""
        if not 0 <= number < self.documents:
            raise IndexError(f"document {number} of {self.documents}")
        return self._end(number - 1) if number else 0, self._end(number)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids, from its copy. Raises UserError where that is another one now."""
        return folder_tokenizer(self.folder, self.manifest)

    def verify(self) -> None:
        """Read everything: hashes, ids, and that each document ends with its only separator. Raises UserError."""
        for number, shard in enumerate(self.info.shards):
            for suffix, known in ((".bin", shard.sha256), (".idx", shard.ends_sha256)):
                path = self.folder / (shard.file + suffix)
                if file_digest(path) != known:
                    raise UserError(f"{path} is damaged: its sha256 isn't the manifest's; --force prepares it anew")
            problem = self._disorder(number)
            if problem:
                raise UserError(f"{self.folder / shard.file}.bin: {problem}")

    def _disorder(self, number: int) -> str | None:
        ids, ends = self._map(number, ".bin"), self._map(number, ".idx")
        known = self.manifest.tokenizer
        places = [np.empty(0, dtype=np.int64)]
        for start in range(0, len(ids), _AT_ONCE):
            some = ids[start : start + _AT_ONCE]
            if some.max() >= known.vocab_size:
                return f"id {some.max()} in a vocabulary of {known.vocab_size}"
            places.append(np.flatnonzero(some == known.separator) + start + 1)
        if not np.array_equal(np.concatenate(places), ends):
            return "documents don't end where the separators are"
        if number == len(self.info.shards) - 1 and (not len(ends) or ends[-1] != len(ids)):
            return "the last document has no end"
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # another process maps the files itself

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The shards that hold these tokens: number, first token and last in the shard's own count."""
        if start == stop:
            return
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while shard < len(self.info.shards) and self._starts[shard] < stop:
            offset, tokens = int(self._starts[shard]), self.info.shards[shard].tokens
            yield shard, max(0, start - offset), min(tokens, stop - offset)
            shard += 1

    def _end(self, number: int) -> int:
        shard = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return int(self._starts[shard] + self._map(shard, ".idx")[number - self._firsts[shard]])

    def _map(self, number: int, suffix: Literal[".bin", ".idx"]) -> NDArray[Any]:
        key = (number, suffix)
        if key not in self._open:
            path = self.folder / (self.info.shards[number].file + suffix)
            dtype = self._dtype if suffix == ".bin" else np.dtype("<i8")
            try:
                empty = path.stat().st_size == 0  # which can't be mapped
                self._open[key] = np.empty(0, dtype) if empty else np.memmap(path, dtype=dtype, mode="r")
            except OSError as error:
                raise UserError(f"can't read {path}: {error.strerror or error}") from None
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(key)
        return self._open[key]

    def _check_size(self, name: str, size: int) -> None:
        path = self.folder / name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise UserError(f"can't read {path}: {error.strerror}; --force prepares it anew") from None
        if found != size:
            raise UserError(f"{path} has {found} bytes, not {size}: cut short or damaged; --force prepares it anew")


def folder_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    """The tokenizer of a folder of token shards. Raises UserError where its copy is damaged."""
    known = manifest.tokenizer
    found = load_tokenizer(known.name if known.file is None else str(folder / known.file))
    if found.sha256 != known.sha256:
        raise UserError(f"{folder / (known.file or '')}: not the tokenizer {known.name!r} that made these tokens")
    return found


def copy_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Put a copy of the tokenizer's files into a folder of token shards. Raises UserError, RunError."""
    name = _copy_name(tokenizer)
    for file in tokenizer.files:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise UserError(f"can't read {file}: {error.strerror}") from None
        place = folder / str(name)
        atomic_write_bytes(place / file.name if file.name in _IN_A_FOLDER else place, data)


class ShardWriter:
    """A shard as it is written, under other names until `close`; left by an exception it is deleted.

    Raises RunError where it can't be written.
    """

    def __init__(self, folder: Path, file: str, dtype: str, temporary: str) -> None:
        self._paths = {suffix: folder / (file + suffix) for suffix in (".bin", ".idx")}
        self._drafts = {s: path.with_name(f".{path.name}.{temporary}.tmp") for s, path in self._paths.items()}
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._file = file
        self._hashes = {suffix: hashlib.sha256() for suffix in self._paths}
        self._handles: dict[str, BinaryIO] = {}
        self._ends: list[int] = []
        self._tokens = self._documents = self._bytes = 0
        self._origins: list[int] = []

    def __enter__(self) -> Self:
        for suffix, draft in self._drafts.items():
            with writing(self._paths[suffix]):
                draft.parent.mkdir(parents=True, exist_ok=True)
                self._handles[suffix] = open(draft, "wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for suffix, handle in self._handles.items():
            with suppress(OSError):  # of the buffer, on a full disk
                handle.close()
            with suppress(OSError):
                self._drafts[suffix].unlink(missing_ok=True)

    def add(self, ids: Ids, size: int, origin: int) -> None:
        """Tokens, the bytes of their text, and the place of their source in the list."""
        self._write(".bin", ids.astype(self._dtype))
        self._tokens += len(ids)
        self._bytes += size
        self._origins = [self._origins[0] if self._origins else origin, origin]

    def end_document(self, separator: int) -> None:
        """The document ends here, with a separator."""
        self._write(".bin", np.array([separator], dtype=self._dtype))
        self._tokens += 1
        self._documents += 1
        self._ends.append(self._tokens)
        if len(self._ends) >= 1 << 16:
            self._flush_ends()

    def close(self) -> ShardInfo:
        """Put the shard in its place, on the disk."""
        self._flush_ends()
        for suffix, handle in self._handles.items():
            with writing(self._paths[suffix]):
                handle.flush()
                os.fsync(handle.fileno())
                handle.close()
                self._drafts[suffix].replace(self._paths[suffix])
        return ShardInfo(
            file=self._file,
            tokens=self._tokens,
            documents=self._documents,
            bytes=self._bytes,
            sha256=self._hashes[".bin"].hexdigest(),
            ends_sha256=self._hashes[".idx"].hexdigest(),
            sources=(self._origins[0], self._origins[-1]),
        )

    def _flush_ends(self) -> None:
        self._write(".idx", np.array(self._ends, dtype="<i8"))
        self._ends = []

    def _write(self, suffix: str, values: NDArray[Any]) -> None:
        data = values.tobytes()
        self._hashes[suffix].update(data)
        with writing(self._paths[suffix]):
            self._handles[suffix].write(data)


def _copy_name(tokenizer: Tokenizer) -> str | None:
    if not tokenizer.files:
        return None
    file = tokenizer.files[0].name
    return f"{TOKENIZER}/{tokenizer.name if file in _IN_A_FOLDER else file}"
