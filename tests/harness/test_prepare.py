"""`bench data prepare`: shards against a plain loop; the same bytes however it is done and however often it stops."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from decaybench.core.errors import RunError, UserError
from decaybench.harness import prepare as module
from decaybench.harness.prepare import Wish, prepare
from decaybench.harness.progress import Progress
from decaybench.harness.workers import Workers
from decaybench.text import documents
from decaybench.text import shards as shards_module
from decaybench.text.shards import TokenShards, folder_tokenizer, read_manifest
from decaybench.text.tokenizers import load_tokenizer
from tests.command import Started, bench, start
from tests.text.test_tokenizers import vocabulary, write

QUIET = Progress(quiet=True)
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def small_units() -> None:
    """Units of about 2,000 bytes, so that small files give many; here, or in a process that is started."""
    module._SMALLEST = 2000
    module._UNITS = 10_000


def slow_units() -> None:
    """The same, and each takes a while: long enough to be killed in it."""
    small_units()
    before = module._encode

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.01)
        return before(*arguments)

    module._encode = slowly


_STUCK = "stuck"


def stuck_after_units() -> None:
    """The same, but after a few there is no end, and a file that says so: whatever stops it, the work isn't done."""
    small_units()
    before, done = module._encode, itertools.count()

    def slowly(*arguments: Any) -> Any:
        if next(done) == 4:
            Path(_STUCK).touch()
            time.sleep(600)
        return before(*arguments)

    module._encode = slowly


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALLEST", 2000)
    monkeypatch.setattr(module, "_UNITS", 10_000)


def story(number: int, size: int = 1500) -> str:
    """Text of about this size, another for each number."""
    draws = random.Random(number)
    words = ["river", "ocean", "über", "moon", "a", "😀", "stone\n", "the", "window,"]
    return " ".join(draws.choice(words) for _ in range(size // 5)) + f" end {number}"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with a bit of everything, 30 KB."""
    folder = tmp_path / "texts"
    for number in range(12):
        write(folder / f"book{number}.txt", story(number))
    write(folder / "long.md", story(99, 9000))
    rows = [json.dumps({"text": story(100 + n, 300), "body": "x"}) for n in range(20)]
    write(folder / "more" / "rows.jsonl", "\n".join([*rows[:9], "{broken", *rows[9:]]) + "\n")
    return folder


def wish(paths: Path | list[Path], out: Path, **others: Any) -> Wish:
    given = [paths] if isinstance(paths, Path) else paths
    return Wish([str(path) for path in given], out, **{"workers": 1, "validation": 0.3, **others})


def files_of(folder: Path) -> dict[str, bytes]:
    """All that a finished folder holds, but what only its maker needs."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name not in (".lock", ".prepare.json")}


def contents(folder: Path) -> dict[str, list[str]]:
    """The documents of each split, decoded."""
    found: dict[str, list[str]] = {}
    for split in read_manifest(folder).splits:
        shards = TokenShards(folder, split)
        shards.verify()
        decode = shards.tokenizer().decode
        places = [shards.document(number) for number in range(shards.documents)]
        found[split] = [decode(shards.tokens(start, stop).tolist()) for start, stop in places]
    return found


def u(identity: bytes) -> float:
    """Where a document or file falls, as the page says."""
    name = json.dumps(["validation", hashlib.sha256(identity).hexdigest()], separators=(",", ":"))
    return int(hashlib.sha256(name.encode()).hexdigest()[:13], 16) / 16**13


def test_the_shards_are_what_a_plain_loop_gives(texts: Path, tmp_path: Path, small: None) -> None:
    done = prepare(wish(texts, tmp_path / "out"), progress=QUIET)
    expected: dict[str, list[str]] = {"train": [], "validation": []}
    for path in sorted(texts.glob("*.*")):
        expected["validation" if u(path.read_bytes()) < 0.3 else "train"].append(path.read_text(encoding="utf-8"))
    for line in (texts / "more" / "rows.jsonl").read_text(encoding="utf-8").splitlines():
        if line != "{broken":
            text = json.loads(line)["text"]
            expected["validation" if u(text.encode()) < 0.3 else "train"].append(text)
    assert contents(tmp_path / "out") == expected
    assert min(len(split) for split in expected.values()) > 5
    for name, split in done.manifest.splits.items():
        size = sum(len(text.encode()) for text in expected[name])
        assert (split.documents, split.bytes, split.tokens) == (len(expected[name]), size, size + split.documents)
        assert len(split.shards) >= 5
    names = [path.relative_to(tmp_path).as_posix() for path in sorted(texts.rglob("*.*")) if path.is_file()]
    assert [source.name for source in done.manifest.sources] == sorted(names, key=lambda name: name.count("/"))
    for source in done.manifest.sources:
        assert source.sha256 == hashlib.sha256((tmp_path / source.name).read_bytes()).hexdigest()
    (problem,) = done.manifest.problems
    assert str(problem).startswith("1 broken rows skipped; the first: texts/more/rows.jsonl line 10 (not JSON")


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_gives_the_same_bytes(texts: Path, tmp_path: Path, small: None, workers: int) -> None:
    prepare(wish(texts, tmp_path / "one"), progress=QUIET)
    prepare(wish(texts, tmp_path / "more", workers=workers), progress=QUIET)
    assert files_of(tmp_path / "more") == files_of(tmp_path / "one")


def test_units_of_another_size_hold_the_same_documents(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(wish(texts, tmp_path / "whole"), progress=QUIET)
    known = contents(tmp_path / "whole")
    assert len(read_manifest(tmp_path / "whole").splits["train"].shards) == 1
    for size in (300, 777, 5000):
        monkeypatch.setattr(module, "_SMALLEST", size)
        monkeypatch.setattr(module, "_UNITS", 10_000)
        prepare(wish(texts, tmp_path / str(size)), progress=QUIET)
        assert contents(tmp_path / str(size)) == known


def test_a_document_goes_on_from_shard_to_shard(tmp_path: Path, small: None) -> None:
    paths = [write(tmp_path / f"{name}.txt", story(n, 20_000)) for n, name in enumerate("ab")]
    done = prepare(wish(paths, tmp_path / "out", validation=0.0), progress=QUIET)
    assert contents(tmp_path / "out") == {"train": [story(0, 20_000), story(1, 20_000)]}
    shards = done.manifest.splits["train"].shards
    assert len(shards) > 10 and sum(shard.documents for shard in shards) == 2
    assert [shard.sources for shard in shards[:2]] == [(0, 0), (0, 0)]


def test_a_tokenizer_goes_with_its_shards(texts: Path, tmp_path: Path, small: None) -> None:
    path = write(tmp_path / "mine.txt", vocabulary("300 'ocean' 5", "70000 ' moon' 5"))
    prepare(wish(texts, tmp_path / "out", tokenizer=str(path)), progress=QUIET)
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.tokenizer.name, manifest.tokenizer.separator, manifest.dtype) == ("mine", 0, "uint32")
    path.unlink()
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    texts_found = contents(moved)
    prepare(wish(texts, tmp_path / "bytes"), progress=QUIET)
    assert texts_found == contents(tmp_path / "bytes")
    assert folder_tokenizer(moved, manifest).encode("ocean moon") == [300, 70000]


def test_tokens_are_those_of_the_whole_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A novel read in pieces of 4 KB, in units of 20 KB."""
    novel, near = DATA / "corpora" / "litbank" / "11_alices_adventures_in_wonderland.txt", DATA / "tokenizers"
    if not novel.exists():
        pytest.skip("no novels at shared/data/corpora")
    monkeypatch.setattr(module, "_SMALLEST", 20_000)
    monkeypatch.setattr(module, "_UNITS", 10_000)
    monkeypatch.setattr(documents, "_PIECE", 4_000)
    specs = [near / "rwkv_vocab_v20230424.txt", *([near / "gpt2"] if find_spec("tokenizers") else [])]
    for spec in specs:
        prepare(wish(novel, tmp_path / spec.name, tokenizer=str(spec)), progress=QUIET)
        shards = TokenShards(tmp_path / spec.name)
        assert len(shards.info.shards) == 7
        text = novel.read_text(encoding="utf-8")
        expected = [*load_tokenizer(str(spec)).encode(text), shards.manifest.tokenizer.separator]
        assert shards.tokens(0, len(shards)).tolist() == expected
        assert shards.info.bytes_per_token == len(text.encode()) / (len(expected) - 1)


# --- validation


def test_by_file_keeps_files_together(texts: Path, tmp_path: Path, small: None) -> None:
    prepare(wish(texts, tmp_path / "out", by="file"), progress=QUIET)
    found = contents(tmp_path / "out")
    rows = [json.loads(row)["text"] for row in good_rows(texts)]
    side = "validation" if u((texts / "more" / "rows.jsonl").read_bytes()) < 0.3 else "train"
    assert set(rows) <= set(found[side])


def good_rows(texts: Path) -> list[str]:
    lines = (texts / "more" / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line != "{broken"]


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_neither_split_of_a_few_files_is_empty(tmp_path: Path, share: float) -> None:
    for number in range(4):
        write(tmp_path / "books" / f"{number}.txt", story(number))
    done = prepare(wish(tmp_path / "books", tmp_path / "out", validation=share), progress=QUIET)
    few, many = ("validation", "train") if share < 0.5 else ("train", "validation")
    assert {name: split.documents for name, split in done.manifest.splits.items()} == {few: 1, many: 3}


def test_one_document_is_for_training(tmp_path: Path) -> None:
    for number in range(6):
        path = write(tmp_path / f"{number}.txt", story(number))
        done = prepare(wish(path, tmp_path / f"out{number}", validation=0.9), progress=QUIET)
        assert list(done.manifest.splits) == ["train"]
        assert done.notes() == ["no document fell into validation; --split-on or another --validation helps"]


def test_a_document_never_changes_sides(texts: Path, tmp_path: Path, small: None) -> None:
    """Whatever is added, and wherever it lies; equal documents are on one side."""
    prepare(wish(texts, tmp_path / "before"), progress=QUIET)
    for number in range(30):
        write(texts / "added" / f"{number}.txt", story(number + 500))
    shutil.copy(texts / "book3.txt", texts / "added" / "copy.txt")
    done = prepare(wish(texts, tmp_path / "after"), progress=QUIET)
    before, after = contents(tmp_path / "before"), contents(tmp_path / "after")
    for split in before:
        assert set(before[split]) <= set(after[split])
    assert not set(after["train"]) & set(after["validation"])
    assert any("files that hold the same as another" in line and "copy.txt" in line for line in done.notes())


def test_the_share_is_about_what_was_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "lines.txt", "\n".join(f"line {n}" for n in range(4000)))
    done = prepare(wish(path, tmp_path / "out", split_on="lines", validation=0.25), progress=QUIET)
    share = done.manifest.splits["validation"].documents / 4000
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5


# --- stopped and started again


def kill(work: Started, reached: Callable[[], bool], wait: float) -> None:
    """kill -9 a moment after something is reached; no worker outlives it."""
    assert work.wait_for(reached), work.end().err
    children = children_of(work.process.pid)
    work.process.join(timeout=wait)
    work.send(signal.SIGKILL)
    assert work.end().code == -signal.SIGKILL
    until = time.monotonic() + 20
    while any(is_alive(child) for child in children):
        assert time.monotonic() < until, "a worker is still there"
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def units_of(cwd: Path) -> int:
    path = cwd / "out" / ".progress.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_kill_9_at_random_moments_changes_nothing(texts: Path, tmp_path: Path, small: None) -> None:
    for number in range(30):
        write(texts / "others" / f"{number}.txt", story(number + 700))
    prepare(wish(texts, tmp_path / "whole"), progress=QUIET)
    draws = random.Random(3)
    words = ("data", "prepare", str(texts), "--out", "out", "--validation", "0.3", "--workers")
    for count, workers in zip(sorted(draws.sample(range(28), 4)), "1221", strict=True):
        work = start(*words, workers, cwd=tmp_path, before=slow_units)
        kill(work, lambda count=count: units_of(tmp_path) >= count, draws.uniform(0, 0.05))
        assert not (tmp_path / "out" / "manifest.json").exists()
    result = start(*words, "2", cwd=tmp_path, before=small_units).end()
    assert result.code == 0 and "going on: " in result.err
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert not list((tmp_path / "out").glob("*/.shard*"))


def test_what_is_left_of_a_unit_is_made_again(texts: Path, tmp_path: Path, small: None) -> None:
    """Drafts, shards that nobody noted, notes of shards that are gone, torn and damaged notes."""
    prepare(wish(texts, tmp_path / "whole"), progress=QUIET)
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_finish", stopped)
        with pytest.raises(RunError, match="stopped"):
            prepare(wish(texts, out), progress=QUIET)
    lines = (out / ".progress.jsonl").read_text().splitlines(keepends=True)
    damaged = [lines[0], "\0\n", lines[3].replace('"unit"', '"unity"'), *lines[4:], lines[2][:50]]
    (out / ".progress.jsonl").write_text("".join(damaged))
    (out / "train" / ".shard-00001.bin.77.tmp").write_text("half")
    gone = json.loads(lines[5])["shards"].popitem()[1]["file"]
    (out / f"{gone}.idx").unlink()
    (out / "train" / "shard-00002.bin").write_text("old")
    prepare(wish(texts, out), progress=QUIET)
    assert files_of(out) == files_of(tmp_path / "whole")


def stopped(*_: Any) -> None:
    raise RunError("stopped")


def test_a_finished_folder_is_left_alone(texts: Path, tmp_path: Path, small: None, monkeypatch) -> None:
    prepare(wish(texts, tmp_path / "out"), progress=QUIET)
    before = files_of(tmp_path / "out")
    monkeypatch.setattr(module, "_carry_out", stopped)
    monkeypatch.setattr(module, "file_digest", stopped)
    prepare(wish(texts, tmp_path / "out"), progress=QUIET)
    assert files_of(tmp_path / "out") == before


def test_a_folder_without_its_state_is_still_known(texts: Path, tmp_path: Path, small: None, monkeypatch) -> None:
    prepare(wish(texts, tmp_path / "out"), progress=QUIET)
    (tmp_path / "out" / ".prepare.json").unlink()
    monkeypatch.setattr(module, "_carry_out", stopped)
    prepare(wish(texts, tmp_path / "out"), progress=QUIET)
    with pytest.raises(
        UserError, match=r"was begun with --validation 0\.3, not --validation 0\.1; choose another --out"
    ):
        prepare(wish(texts, tmp_path / "out", validation=0.1), progress=QUIET)


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"validation": 0.2}, "--validation 0.3, not --validation 0.2"),
        ({"by": "file"}, "--by document, not --by file"),
        ({"field": "body"}, "--field text, not --field body"),
        ({"split_on": "lines"}, "no --split-on, not --split-on lines"),
        ({"tokenizer": "v.txt"}, "--tokenizer bytes, not v"),
        ({"paths": ["texts/more"]}, "texts/book0.txt where this command has more/rows.jsonl"),
        ({"paths": ["texts", "v.txt"]}, "14 files, not 15"),
    ],
)
def test_another_command_in_the_same_folder_is_refused(
    texts: Path,
    tmp_path: Path,
    small: None,
    monkeypatch: pytest.MonkeyPatch,
    finished: bool,
    change: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("v.txt"), vocabulary())
    with pytest.MonkeyPatch.context() as patch:
        if not finished:
            patch.setattr(module, "_finish", stopped)
        with pytest.raises(RunError) if not finished else pytest.MonkeyPatch.context():
            prepare(wish(Path("texts"), Path("out")), progress=QUIET)
    before = files_of(Path("out"))
    other = wish(Path("texts"), Path("out"))._replace(**change)
    with pytest.raises(UserError) as error:
        prepare(other, progress=QUIET)
    assert str(error.value) == f"out was begun with {words}; choose another --out, or --force to start anew"
    assert files_of(Path("out")) == before
    prepare(other, force=True, progress=QUIET)
    prepare(other._replace(out=Path("new")), progress=QUIET)
    assert files_of(Path("out")) == files_of(Path("new"))


def test_strict_is_no_other_command(texts: Path, tmp_path: Path, small: None) -> None:
    """What it refuses can be had without it, with what is done; and what was done without it is refused by it."""
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"--strict refuses broken rows: texts/more/rows\.jsonl line 10 \(not JSON"):
        prepare(wish(texts, out, strict=True), progress=QUIET)
    assert units_of(tmp_path) > 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_finish", stopped)
        with pytest.raises(RunError):
            prepare(wish(texts, out), progress=QUIET)
    with pytest.raises(UserError, match=r"--strict refuses broken rows: texts/more/rows\.jsonl line 10 \(not JSON"):
        prepare(wish(texts, out, strict=True), progress=QUIET)
    prepare(wish(texts, out), progress=QUIET)
    with pytest.raises(UserError, match=r"--strict refuses what .*out was made of: 1 broken rows skipped"):
        prepare(wish(texts, out, strict=True), progress=QUIET)


def test_a_source_that_changed_is_refused(texts: Path, tmp_path: Path, small: None) -> None:
    prepare(wish(texts, tmp_path / "out"), progress=QUIET)
    os.utime(texts / "book1.txt")  # another time, the same content
    prepare(wish(texts, tmp_path / "out"), progress=QUIET)
    write(texts / "book1.txt", story(1001))
    with pytest.raises(
        UserError, match=r"was begun with another content of texts/book1\.txt; choose another --out, or"
    ):
        prepare(wish(texts, tmp_path / "out"), progress=QUIET)


def test_a_source_that_changes_meanwhile_is_said(
    texts: Path, tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = module._encode

    def changing(*arguments: Any) -> Any:
        write(texts / "book1.txt", story(1001))
        return before(*arguments)

    monkeypatch.setattr(module, "_encode", changing)
    with pytest.raises((RunError, UserError), match=r"book1\.txt (changed|became shorter) while it was read"):
        prepare(wish(texts, tmp_path / "out"), progress=QUIET)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_two_processes_dont_work_on_one_folder(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"):
        result = bench("data", "prepare", str(texts), "--out", str(tmp_path / "out"))
    assert result.code == 1
    assert "another process is working on" in result.err and "Traceback" not in result.err


def test_ctrl_c_stops_at_once_and_goes_on(texts: Path, tmp_path: Path, small: None) -> None:
    prepare(wish(texts, tmp_path / "whole"), progress=QUIET)
    words = ("data", "prepare", str(texts), "--out", "out", "--validation", "0.3", "--workers", "1")
    work = start(*words, cwd=tmp_path, before=stuck_after_units)
    assert work.wait_for((tmp_path / _STUCK).exists) and units_of(tmp_path) >= 2
    work.send(signal.SIGINT)
    result = work.end()
    assert result.code == 1
    assert result.err.splitlines()[-1] == "bench: stopped; the same command goes on from where it was"
    assert "Traceback" not in result.err
    assert start(*words, cwd=tmp_path, before=small_units).end().code == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


# --- a disk that is full, workers that die


class FullDisk:
    """A file on a disk that takes so many bytes more."""

    left = 0

    def __init__(self, path: Path, mode: str) -> None:
        self._file = open(path, mode)  # noqa: SIM115 closed by its user

    def write(self, data: bytes) -> int:
        FullDisk.left -= len(data)
        if FullDisk.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("room", [0, 3000, 20_001])
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    texts: Path, tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    prepare(wish(texts, tmp_path / "whole"), progress=QUIET)
    words = ("data", "prepare", str(texts), "--out", str(tmp_path / "out"), "--validation", "0.3", "--workers", "1")
    with monkeypatch.context() as patch:
        FullDisk.left = room
        patch.setattr(shards_module, "open", FullDisk, raising=False)
        result = bench(*words, "--quiet")
    assert result.code == 1 and result.out == ""
    (line,) = result.err.splitlines()
    assert line.startswith("bench: no space left on device while writing ")
    assert line.endswith("; the same command goes on from there")
    assert not list((tmp_path / "out").glob("*/.shard*"))
    assert (units_of(tmp_path) > 0) == (room > 10_000)
    assert bench(*words).code == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def small_files() -> None:
    small_units()
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))  # workers inherit it
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def test_a_worker_that_cannot_write_says_so(texts: Path, tmp_path: Path) -> None:
    words = ("data", "prepare", str(texts), "--out", "out", "--workers", "2")
    write(texts / "huge.txt", story(5, 60_000))
    result = start(*words, cwd=tmp_path, output=tmp_path, before=small_files).end()
    assert result.code == 1
    assert "File too large; the same command goes on from there" in result.err.splitlines()[-1]
    assert start(*words, cwd=tmp_path, before=small_units).end().code == 0


def _square(setup: int) -> Callable[[int], int]:
    return lambda task: setup * task * task


def _fails(setup: str) -> Callable[[int], int]:
    def work(task: int) -> int:
        if task == 3:
            match setup:
                case "user":
                    raise UserError("three is wrong")
                case "memory":
                    raise MemoryError
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
        return task

    return work


@pytest.mark.parametrize("count", [1, 2])
def test_workers_do_every_task_once(count: int) -> None:
    with Workers(count, _square, 2) as workers:
        assert sorted(workers.do(range(20))) == [2 * n * n for n in range(20)]
        assert list(workers.do([])) == []


def test_memory_that_runs_out_without_workers() -> None:
    with pytest.raises(RunError, match="out of memory; the same command goes on"), Workers(1, _fails, "memory") as one:
        list(one.do(range(8)))


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("user", UserError, "three is wrong"),
        ("memory", RunError, "out of memory; the same command goes on, and needs less with fewer --workers"),
        ("killed", RunError, r"a worker ended with code -9 \(out of memory\?\); the same command goes on"),
    ],
)
def test_what_goes_wrong_in_a_worker_is_raised_here(what: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words), Workers(2, _fails, what) as workers:
        list(workers.do(range(8)))


# --- wrong input


@pytest.mark.parametrize(
    ("words", "holds"),
    [
        (("--validation", "1"), ("--validation 1.0", "0.1")),
        (("--validation", "-0.1"), ("--validation -0.1",)),
        (("--validation", "nan"), ("--validation nan",)),
        (("--validation", "x"), ("'x' is not a number",)),
        (("--by", "fiel"), ("'fiel'", "'file'")),
        (("--workers", "0"), ("--workers 0",)),
        (("--tokenizer", "byte"), ("'byte'", "'bytes'")),
        (("--split-on", "blank_lines"), ("'blank_lines'", "'blank-lines'")),
        (("--field", "bdy"), ("no field 'bdy'; did you mean 'body'?", "no document in")),
        (("nowhere",), ("'nowhere'",)),
    ],
)
def test_wrong_input_is_one_line(
    texts: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], holds: tuple[str, ...]
) -> None:
    monkeypatch.chdir(texts.parent)
    result = bench("data", "prepare", "texts/more", "--out", "out", "--workers", "1", "--quiet", *words)
    assert (result.code, result.out) == (2, "")
    (line,) = result.err.splitlines()
    assert line.startswith("bench: ") and all(word in line for word in holds), line
    result = bench("data", "prepare", "texts/more", "--out", "out", "--workers", "1", "--quiet")
    assert result.code == 0, "a wrong command leaves nothing that stands in the way"


def test_by_file_needs_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "text")
    with pytest.raises(UserError, match=r"--by file: a\.txt is the only one; --by document, or --validation 0"):
        prepare(wish(path, tmp_path / "out", by="file"), progress=QUIET)
    with pytest.raises(UserError, match="--by file: hf://some/set is no file"):
        prepare(Wish([str(path), "hf://some/set"], tmp_path / "out", by="file"), progress=QUIET)


def test_folders_that_hold_something_else_are_left_alone(texts: Path, tmp_path: Path) -> None:
    mine = write(tmp_path / "mine" / "train" / "shard-00000.bin", "precious")
    write(tmp_path / "mine" / "manifest.json", {"name": "another program's"})
    for force in (False, True):
        with pytest.raises(UserError, match="mine is not empty and no folder of token shards; choose another --out"):
            prepare(wish(texts, tmp_path / "mine"), force=force, progress=QUIET)
    assert mine.read_text() == "precious"
    with pytest.raises(UserError, match="is a file, not a folder; choose another --out"):
        prepare(wish(texts, mine / "out"), progress=QUIET)


def test_force_deletes_only_what_was_made(texts: Path, tmp_path: Path) -> None:
    prepare(wish(texts, tmp_path / "out"), progress=QUIET)
    mine = write(tmp_path / "out" / "train" / "notes.txt", "mine")
    prepare(wish(texts, tmp_path / "out", validation=0.2), force=True, progress=QUIET)
    assert mine.read_text() == "mine"
    assert read_manifest(tmp_path / "out").rule.validation == 0.2


@pytest.mark.parametrize("name", [".prepare.json", "manifest.json"])
def test_damaged_files_of_the_folder(texts: Path, tmp_path: Path, name: str) -> None:
    prepare(wish(texts, tmp_path / "out"), progress=QUIET)
    path = tmp_path / "out" / name
    for text in ("", "{}", "[1]", path.read_text()[:-40]):
        path.write_text(text)
        with pytest.raises(UserError, match=rf"{name}.*; --force starts anew"):
            prepare(wish(texts, tmp_path / "out"), progress=QUIET)
    prepare(wish(texts, tmp_path / "out"), force=True, progress=QUIET)


def test_hostile_text_is_processed_and_said(tmp_path: Path, small: None) -> None:
    folder = tmp_path / "texts"
    write(folder / "good.txt", story(1))
    (folder / "nul.txt").write_bytes(b"a\0b\0" + b"\xff\xfe\xc3" + b" end")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "broken.jsonl").write_bytes(b'{"text": "one"}\n{"text": "tw')
    result = bench(
        "data", "prepare", str(folder), "--out", str(tmp_path / "out"), "--workers", "1", "--validation", "0"
    )
    assert result.code == 0
    assert contents(tmp_path / "out")["train"] == ["one", story(1), "a\0b\0��� end"]
    for line in (
        "1 empty files skipped; the first: texts/empty.txt",
        "2 NUL characters kept; the first: texts/nul.txt at byte 1",
        "3 byte sequences that aren't UTF-8 replaced by U+FFFD; the first: texts/nul.txt at byte 4",
        "1 broken rows skipped; the first: texts/broken.jsonl line 2 (not JSON",
    ):
        assert line in result.out
    strict = bench("data", "prepare", str(folder), "--out", str(tmp_path / "strict"), "--strict", "--workers", "1")
    assert strict.code == 2
    assert "bench: --strict refuses empty files: texts/empty.txt" in strict.err


def test_a_long_line_needs_little_memory(tmp_path: Path) -> None:
    """100 MB without a line end or a space, by a process that may have 70 MB more than it starts with."""
    with open(tmp_path / "line.txt", "wb") as file:
        for _ in range(100):
            file.write(b"x\xc3\xa9y" * (1 << 18))
    result = start(
        "data", "prepare", "line.txt", "--out", "out", "--workers", "1", cwd=tmp_path, before=little_memory
    ).end()
    assert result.code == 0, result.err
    shards = TokenShards(tmp_path / "out")
    assert (len(shards), shards.documents) == (100 * (4 << 18) + 1, 1)
    np.testing.assert_array_equal(shards.tokens(10**8, 10**8 + 4), list(b"x\xc3\xa9y"))


def little_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (70 << 20),) * 2)


# --- what is printed


def test_show_says_what_prepare_said(texts: Path, tmp_path: Path, small: None) -> None:
    made = bench("data", "prepare", str(texts), "--out", str(tmp_path / "out"), "--workers", "1", "--json")
    shown = bench("data", "show", str(tmp_path / "out"), "--json", "--verify")
    assert made.code == shown.code == 0
    found = json.loads(shown.out)
    assert found == json.loads(made.out)
    manifest = read_manifest(tmp_path / "out")
    assert found["sha256"] == manifest.sha256
    assert found["splits"]["train"]["tokens"] == manifest.splits["train"].tokens
    assert found["splits"]["train"]["bytes_per_token"] == 1
    assert found["sources"] == 14 and found["rule"]["validation"] == 0.1
    table = " ".join(bench("data", "show", str(tmp_path / "out")).out.split())  # a title is as wide as its table
    assert f"{manifest.splits['train'].tokens:,}" in table and "tokens of bytes (257 ids, uint16)" in table
    assert "broken rows skipped" in table


def test_show_of_what_is_not_whole(texts: Path, tmp_path: Path, small: None) -> None:
    prepare(wish(texts, tmp_path / "out"), progress=QUIET)
    path = tmp_path / "out" / "train" / "shard-00003.bin"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    assert bench("data", "show", str(tmp_path / "out")).code == 0
    result = bench("data", "show", str(tmp_path / "out"), "--verify")
    assert result.code == 2 and "shard-00003.bin is damaged: its sha256 isn't the manifest's" in result.err
    path.write_bytes(data[:-2])
    assert bench("data", "show", str(tmp_path / "out")).code == 2


# --- a data set of the hub


class TestHub:
    """From a folder of this machine, by the package datasets: tests reach no network."""

    @pytest.fixture(autouse=True)
    def _package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("datasets", reason="the package datasets is not installed")
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        monkeypatch.setattr(module, "_HUB_UNIT", 1000)

    def test_it_is_streamed_in_order_and_goes_on(
        self, tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "set"
        rows = [json.dumps({"text": story(n, 400)}) for n in range(24)]
        write(folder / "train.jsonl", "\n".join([*rows, json.dumps({"text": ""})]))
        before, after = (write(tmp_path / f"{name}.txt", story(n)) for n, name in enumerate(("before", "after")))
        asked = Wish([str(before), f"hf://{folder}", str(after)], tmp_path / "out", validation=0.0, workers=1)
        whole = prepare(asked._replace(out=tmp_path / "whole"), progress=QUIET)
        assert contents(tmp_path / "whole")["train"] == [story(0), *(story(n, 400) for n in range(24)), story(1)]
        assert [source.kind for source in whole.manifest.sources] == ["text", "hub", "text"]
        (problem,) = whole.manifest.problems
        assert str(problem).startswith("1 empty documents skipped") and problem.first.endswith("set row 25")
        encode, calls = module._encode, 0

        def stops(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % 4 == 0:
                raise RunError("stopped")
            return encode(*arguments)

        monkeypatch.setattr(module, "_encode", stops)
        for _ in range(20):
            try:
                prepare(asked, progress=QUIET)
                break
            except RunError as error:
                assert str(error) == "stopped; the same command goes on from there"
        assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
        prepare(asked._replace(out=tmp_path / "two", workers=2), progress=QUIET)
        assert files_of(tmp_path / "two") == files_of(tmp_path / "whole")
