"""Files are whole or absent, also on a full or read-only disk."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decaybench.core.errors import RunError, UserError
from decaybench.core.files import (
    append_lines,
    atomic_write_json,
    atomic_write_text,
    make_folder,
    read_json,
    readable_json,
)


def failing(code: int, after: int = 0) -> Callable[..., Any]:
    """A system call that fails with this error after `after` good calls."""
    calls = 0
    real = os.write

    def call(descriptor: int, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls <= after:
            return real(descriptor, data[:3])
        raise OSError(code, os.strerror(code))

    return call


def test_a_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    atomic_write_text(path, "one")
    atomic_write_text(path, "zwei ✓")
    assert path.read_text(encoding="utf-8") == "zwei ✓"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "no space left on device while writing "),
        (errno.EDQUOT, "disk quota exceeded while writing "),
        (errno.EROFS, "the file system is read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "Input/output error"),
    ],
)
@pytest.mark.parametrize("after", [0, 2])
def test_a_failed_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str, after: int
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing(code, after))
        with pytest.raises(RunError, match=words) as error:
            atomic_write_text(path, "new text")
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_that_shows_at_fsync_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="no space left"):
        atomic_write_text(path, "new")
    with pytest.raises(RunError, match="no space left"):
        append_lines(path, ["new"])
    assert path.read_text() == ""  # "old" was a torn line


def test_a_failed_append_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    append_lines(path, ["1", "2"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing(errno.ENOSPC, after=1))
        with pytest.raises(RunError, match="no space left on device"):
            append_lines(path, ["33333", "44444"])
    assert path.read_text() == "1\n2\n"
    append_lines(path, ["3"])
    assert path.read_text() == "1\n2\n3\n"


@pytest.mark.parametrize("torn", ["", "x", "x" * 65_535, "x" * 65_536, "x" * 200_000])
def test_appending_cuts_a_torn_line(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("1\n22\n" + torn)
    append_lines(path, ["3"])
    assert path.read_text() == "1\n22\n3\n"
    path.write_text(torn)
    append_lines(path, ["3"])
    assert path.read_text() == "3\n"


def test_json_reads_back_and_short_things_stay_on_a_line(tmp_path: Path) -> None:
    content = {"counts": list(range(200)), "deep": [{"a": "x" * 60, "b": {"c": "y" * 60}}], "empty": [], "é": None}
    atomic_write_json(tmp_path / "a.json", content)
    assert read_json(tmp_path / "a.json") == content
    text = readable_json(content)
    assert json.loads(text) == content
    assert text.count("\n") == 10
    with pytest.raises(ValueError, match="JSON"):
        readable_json([float("nan")])


def test_damaged_json_is_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ("", "{", '{"a": Infinity}', "[" * 100_000):
        path.write_text(text)
        with pytest.raises(UserError, match="is not valid JSON"):
            read_json(path)
    with pytest.raises(UserError, match="can't read"):
        read_json(tmp_path)


def test_a_folder_is_made_or_what_stands_in_its_place_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"file is a file, not a folder of runs; choose another --out"):
            make_folder(path, "of runs")
