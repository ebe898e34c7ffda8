"""Files that are whole or absent: atomic writes, lines that survive a kill, and one clear line for a full disk."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from decaybench.core.errors import RunError, UserError

_WIDTH = 110
_BLOCK = 65536


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError raised inside it into a RunError that names `path` and what stopped the write."""
    try:
        yield
    except OSError as error:
        raise RunError(_reason(path, error)) from error


def make_folder(path: Path, of: str = "") -> None:
    """Make a folder that --out names, before the work for it. of: what it is for, "of runs".

    Raises UserError where it or a parent is a file, RunError where it can't be made.
    """
    with writing(path):
        for place in (path, *path.parents):
            if place.exists() and not place.is_dir():
                raise UserError(f"{place} is a file, not a folder{of and ' '}{of}; choose another --out")
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def locked(lock: Path, said: str, patience: float = 0.0, kind: type[RunError] = RunError) -> Iterator[None]:
    """Held by one process at a time, and let go by its death. lock: a file in a folder that exists.

    Raises `kind` with the line `said` where another process still holds it after `patience` seconds.
    """
    held = FileLock(lock, timeout=patience)
    with writing(lock):
        try:
            held.acquire()
        except Timeout:
            raise kind(said) from None
    try:
        yield
    finally:
        held.release()


def atomic_write_text(path: Path, text: str) -> None:
    """`atomic_write_bytes` of `text` in UTF-8."""
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader, or a kill, finds the old file or the new one. Raises RunError.

    Missing folders are made.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_new(new, data)
            new.replace(path)
        except BaseException:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def atomic_write_json(path: Path, content: Any) -> None:
    """`atomic_write_text` of `content` as `readable_json`, with a newline at its end."""
    atomic_write_text(path, readable_json(content) + "\n")


def append_lines(path: Path, lines: Iterable[str], sync: bool = True) -> None:
    """Append `lines` in one write, each with a newline. Raises RunError, and then the file is as it was.

    A torn last line (no newline: a kill in the middle of a write) is cut off first. sync: wait for the disk.
    """
    data = "".join(line + "\n" for line in lines).encode()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            start = _end_of_last_line(descriptor)
            os.ftruncate(descriptor, start)
            os.lseek(descriptor, start, os.SEEK_SET)
            try:
                _write_all(descriptor, data)
                if sync:
                    os.fsync(descriptor)
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(descriptor, start)
                raise
        finally:
            os.close(descriptor)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cut(path: Path, size: int) -> None:
    """Keep the first `size` bytes of a file. Raises RunError."""
    with writing(path), open(path, "r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """A JSON file's content. Raises UserError with one line when it is missing, truncated or not JSON."""
    try:
        return json.loads(path.read_bytes(), parse_constant=_refuse)
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON (cut short or damaged?): {error}") from None


def readable_json(content: Any, indent: str = "") -> str:
    """`content` as indented JSON in which what is short, and any list of plain values, stays on one line.

    Raises ValueError on NaN and infinities.
    """
    line = json.dumps(content, ensure_ascii=False, allow_nan=False)
    if len(indent) + len(line) <= _WIDTH or not isinstance(content, dict | list) or _is_plain_list(content):
        return line
    inner = indent + "  "
    if isinstance(content, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {readable_json(content[key], inner)}" for key in content]
        opening, closing = "{", "}"
    else:
        parts = [readable_json(part, inner) for part in content]
        opening, closing = "[", "]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{closing}"


def _reason(path: Path, error: OSError) -> str:
    match error.errno:
        case errno.ENOSPC:
            return f"no space left on device while writing {path}"
        case errno.EDQUOT:
            return f"disk quota exceeded while writing {path}"
        case errno.EROFS:
            return f"can't write {path}: the file system is read-only"
        case errno.EACCES | errno.EPERM:
            return f"can't write {path}: permission denied"
        case _:
            return f"can't write {path}: {error.strerror or error}"


def _write_new(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _sync_folder(path: Path) -> None:
    # The new name is safe only when its folder is on the disk; not every system lets a folder be opened.
    with suppress(OSError):
        sync(path)


def _end_of_last_line(descriptor: int) -> int:
    end = os.lseek(descriptor, 0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BLOCK)
        os.lseek(descriptor, start, os.SEEK_SET)
        found = os.read(descriptor, end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _is_plain_list(content: Any) -> bool:
    return isinstance(content, list) and not any(isinstance(part, dict | list) for part in content)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")
