"""The folder of token shards while it is made: its lock, what it was begun with, and which units are done.

    .prepare.json      what the shards depend on; another command is refused
    .progress.jsonl    a line a unit, written when its shards are on the disk
    .lock              held by the process at work

A kill leaves drafts (.shard-*.tmp), which the next process deletes, and perhaps shards without a line, which it makes
again, with the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from decaybench.core.errors import UserError
from decaybench.core.files import append_lines, atomic_write_json, locked, make_folder, read_json, writing
from decaybench.text.shards import MANIFEST, SPLITS, TOKENIZER, Manifest, ShardInfo, SplitName, read_manifest

_STATE, _PROGRESS, _LOCK = ".prepare.json", ".progress.jsonl", ".lock"
_HEAD = ("tokenizer", "dtype", "rule", "sources")


class Done(BaseModel):
    """A finished unit: a line of `.progress.jsonl`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    unit: int
    rows: tuple[int, int, int] | None = None  # of a data set of the hub: its place among the sources, first row, end
    shards: dict[SplitName, ShardInfo]
    problems: dict[str, tuple[Any, ...]]


class State(BaseModel):
    """`.prepare.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    plan: list[int]  # how the sources are cut into units
    head: dict[str, Any]  # what the manifest says before there are shards
    stats: list[tuple[int, int]]  # each source's size and time of change, ns, when it was hashed


class ShardFolder:
    """A folder for token shards, made where it is missing. Write to it only inside `lock()`.

    Raises UserError where `path` is a file or holds something else, RunError where it can't be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        make_folder(path)
        with writing(path):
            if not self._is_ours():
                raise UserError(f"{path} is not empty and no folder of token shards; choose another --out")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held while working on the folder. Raises RunError at once where another process holds it."""
        with locked(
            self.path / _LOCK, f"another process is working on {self.path}; wait for it or choose another --out"
        ):
            yield

    @property
    def is_complete(self) -> bool:
        """Whether the manifest, the last file to be written, is there."""
        return (self.path / MANIFEST).is_file()

    def manifest(self) -> Manifest:
        """The manifest of a complete folder. Raises UserError where it is damaged."""
        try:
            return read_manifest(self.path)
        except UserError as error:
            raise UserError(f"{error}; --force starts anew") from None

    def state(self) -> State | None:
        """What the folder was begun with; None: with nothing yet. Raises UserError where that is damaged."""
        path = self.path / _STATE
        if path.is_file():
            try:
                return State.model_validate(read_json(path))
            except ValidationError:
                raise UserError(f"{path} is damaged; --force starts anew") from None
            except UserError as error:
                raise UserError(f"{error}; --force starts anew") from None
        if self.is_complete:  # copied from elsewhere, perhaps: the manifest says it too
            data = self.manifest().model_dump(mode="json", exclude_none=True)
            return State(plan=[], head={key: data[key] for key in _HEAD}, stats=[])
        return None

    def begin(self, state: State) -> None:
        """Write down what the shards will be of, and delete the drafts of a killed process. Raises RunError."""
        self.delete_drafts()
        atomic_write_json(self.path / _STATE, state.model_dump(mode="json"))

    def delete_drafts(self) -> None:
        """Delete what workers left half written. Only while none is at work."""
        for draft in self.path.glob("*/.shard-*.tmp"):
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def done(self) -> dict[int, Done]:
        """The units that are done and whose shards are there, by number. Raises UserError where it can't be read."""
        path = self.path / _PROGRESS
        try:
            lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        except OSError as error:
            raise UserError(f"can't read {path}: {error.strerror}") from None
        found: dict[int, Done] = {}
        for line in lines:
            with suppress(ValidationError):  # a damaged line: its unit is made again
                unit = Done.model_validate_json(line)
                if all(self._is_there(shard, split) for split, shard in unit.shards.items()):
                    found[unit.unit] = unit
        return found

    def add(self, unit: Done) -> None:
        """Note that a unit is done. Raises RunError."""
        append_lines(self.path / _PROGRESS, [json.dumps(unit.model_dump(mode="json"), allow_nan=False)])

    def complete(self, manifest: Manifest) -> None:
        """Write the manifest, then delete what nobody needs any more. Raises RunError."""
        atomic_write_json(self.path / MANIFEST, manifest.model_dump(mode="json", exclude_none=True))
        with suppress(OSError):
            (self.path / _PROGRESS).unlink(missing_ok=True)

    def empty(self) -> None:
        """Delete all that was made. Raises RunError."""
        with writing(self.path):
            # The manifest first: from then on the folder isn't complete. The state last: until then it is known.
            for name in (MANIFEST, _PROGRESS):
                (self.path / name).unlink(missing_ok=True)
            for split in SPLITS:
                for pattern in ("shard-*.bin", "shard-*.idx", ".shard-*.tmp"):
                    for path in (self.path / split).glob(pattern):
                        path.unlink(missing_ok=True)
                with suppress(OSError):  # it isn't there, or holds what isn't ours
                    (self.path / split).rmdir()
            shutil.rmtree(self.path / TOKENIZER, ignore_errors=True)
            (self.path / _STATE).unlink(missing_ok=True)

    def _is_ours(self) -> bool:
        names = {entry.name for entry in self.path.iterdir()}
        if _STATE in names or all(name == _LOCK or name.startswith(f".{_STATE}.") for name in names):
            return True
        with suppress(UserError):
            read_manifest(self.path)
            return True
        return False

    def _is_there(self, shard: ShardInfo, split: SplitName) -> bool:
        # The ids have 2 or 4 bytes; files are renamed when they are whole, so the sizes tell them apart from others.
        ids, ends = (self.path / (shard.file + suffix) for suffix in (".bin", ".idx"))
        try:
            return (
                ids.stat().st_size in (2 * shard.tokens, 4 * shard.tokens)
                and ends.stat().st_size == 8 * shard.documents
            )
        except OSError:
            return False
