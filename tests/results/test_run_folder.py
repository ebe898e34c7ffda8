"""A run folder survives kills, full disks, damaged files and a second process."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from decaybench.core.errors import RunError, UserError
from decaybench.results.record import read_record
from decaybench.results.run_folder import RunFolder, SampleLine, SampleLog
from tests.results import example


def line(index: int, questions: int = 2) -> SampleLine:
    return SampleLine(
        id=f"{index:016x}",
        index=index,
        target=tuple(range(questions)),
        answer=tuple(range(questions)),
        score=1.0,
        distance=tuple(range(10, 10 + questions)),
        length=64,
        depth=0.5 if index % 2 else None,
    )


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


# --- the folder


def test_a_folder_is_made_and_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "mqar-mamba2-abc"
    folder = RunFolder.open(path)
    with folder.lock():
        folder.write_config({"seed": 1, "model": {"name": "mamba2"}})
    assert RunFolder.open(path).read_config() == {"seed": 1, "model": {"name": "mamba2"}}


def test_force_empties_a_run(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path)
    with folder.lock():
        folder.write_config({"seed": 1})
        folder.log({"step": 1})
        folder.checkpoint.mkdir()
        (folder.checkpoint / "weights").touch()
        folder.evaluation("e").write_record(example.record())
        (tmp_path / "elsewhere").symlink_to(tmp_path.parent, target_is_directory=True)
    RunFolder.open(tmp_path, force=True)
    assert names(tmp_path) <= {".lock"}
    RunFolder.open(tmp_path, force=True)


@pytest.mark.parametrize("force", [False, True])
def test_what_is_not_a_run_is_left_alone(tmp_path: Path, force: bool) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="not a run folder"):
        RunFolder.open(tmp_path, force)
    with pytest.raises(UserError, match="is a file"):
        RunFolder.open(tmp_path / "thesis.tex", force)
    assert names(tmp_path) == {"thesis.tex"}


def test_a_kill_before_the_configuration_is_written_blocks_nothing(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / ".config.yaml.123.tmp").touch()
    RunFolder.open(tmp_path)
    RunFolder.open(tmp_path, force=True)


@pytest.mark.parametrize("text", ["seed: [1", "", "- 1", "\x00"])
def test_a_damaged_configuration_is_named_and_kept(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml .*--force starts this run anew") as error:
        RunFolder.open(tmp_path).read_config()
    assert "\n" not in str(error.value)
    assert (tmp_path / "config.yaml").read_text() == text


def test_a_read_only_place_is_a_run_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refuse)
        with pytest.raises(RunError, match="read-only"):
            RunFolder.open(tmp_path / "a")
    folder = RunFolder.open(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(RunError, match="read-only"), folder.lock():
            pass
        with pytest.raises(RunError, match="read-only"):
            folder.log({"step": 1})


def test_a_second_process_is_turned_away(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "run")
    with folder.lock():
        folder.write_config({})
    program = f"""
import sys
from pathlib import Path
from decaybench.core.errors import RunError
from decaybench.results.run_folder import RunFolder
path = Path({str(folder.path)!r})
try:
    folder = RunFolder.open(path, force=sys.argv[1] == "force")
    with folder.lock():
        print("worked")
except RunError as error:
    print(error)
"""

    def second(how: str) -> str:
        root = Path(__file__).parents[2]
        return subprocess.run(
            [sys.executable, "-c", program, how], capture_output=True, text=True, timeout=60, cwd=root, check=True
        ).stdout.strip()

    turned_away = f"another process is working on {folder.path}; wait for it or choose another --out"
    with folder.lock():
        assert second("open") == turned_away
        assert second("force") == turned_away
        assert folder.read_config() == {}
    assert second("open") == "worked"


def test_two_folders_of_one_process_lock_each_other_out(tmp_path: Path) -> None:
    first, second = RunFolder.open(tmp_path), RunFolder.open(tmp_path)
    with first.lock(), pytest.raises(RunError, match="another process"), second.lock():
        pass
    with second.lock():
        pass


# --- the log


def test_a_torn_log_line_is_cut_and_the_next_is_whole(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path)
    folder.log({"step": 1, "loss": 0.5})
    folder.log({"step": 2, "loss": 0.25})
    log = tmp_path / "log.jsonl"
    whole = log.read_bytes()
    for size in range(len(whole)):
        log.write_bytes(whole[:size])
        kept = whole[:size].count(b"\n")
        folder.log({"step": 3})
        events = [json.loads(line) for line in log.read_text().splitlines()]
        assert [event["step"] for event in events] == [*[1, 2][:kept], 3]


# --- samples


def test_samples_read_back(tmp_path: Path) -> None:
    log = RunFolder(tmp_path).evaluation("abc").samples("single-length64")
    assert log.load(2) == ([], None)
    log.append(line(i) for i in range(2))
    log.append(line(i) for i in range(2, 4))
    assert log.path == tmp_path / "evaluations/abc/samples/single-length64.jsonl"
    assert log.load(2) == ([line(i) for i in range(4)], None)
    assert '"depth"' not in log.path.read_text().splitlines()[0]


@pytest.mark.parametrize("whole", [1, 2])
def test_a_kill_at_any_byte_leaves_whole_batches(tmp_path: Path, whole: int) -> None:
    log = SampleLog(tmp_path / "a.jsonl")
    log.append(line(i) for i in range(4))
    content = log.path.read_bytes()
    for size in range(len(content) + 1):
        log.path.write_bytes(content[:size])
        lines, note = log.load(whole)
        complete = content[:size].count(b"\n")
        assert note is None
        assert lines == [line(i) for i in range(complete - complete % whole)]
        log.append(line(i) for i in range(len(lines), 4))
        assert log.path.read_bytes() == content


def test_appending_without_loading_cuts_a_torn_line_too(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "a.jsonl")
    log.append([line(0), line(1)])
    log.path.write_bytes(log.path.read_bytes()[:-5])
    log.append([line(1)])
    assert log.load(1) == ([line(0), line(1)], None)


def test_the_first_samples_can_be_kept_alone(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "a.jsonl")
    for count in (4, 3, 0):
        log.append(line(i) for i in range(4))
        log.keep(count)
        assert log.load(1) == ([line(i) for i in range(count)], None)
        log.keep(0)


def test_the_last_batch_may_be_smaller(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "a.jsonl")
    log.append(line(i) for i in range(5))
    assert len(log.load(2, total=5).lines) == 5
    assert len(log.load(2, total=9).lines) == 4
    assert len(log.load(2).lines) == 4
    assert len(log.load(3, total=2).lines) == 2


@pytest.mark.parametrize(
    "damage",
    [
        b"{}",
        b"not json",
        b"\xff\x00",
        b"",
        line(1).model_dump_json(exclude_none=True).encode()[:-9],
        line(3).model_dump_json(exclude_none=True).encode(),
        line(2).model_dump_json(exclude_none=True).replace("64", '"64"').encode(),
        line(2).model_dump_json(exclude_none=True).replace("1.0", "NaN").encode(),
    ],
)
def test_from_a_damaged_line_on_all_is_done_again(tmp_path: Path, damage: bytes) -> None:
    log = SampleLog(tmp_path / "a.jsonl")
    log.append(line(i) for i in range(6))
    rows = log.path.read_bytes().split(b"\n")
    rows[2] = damage
    log.path.write_bytes(b"\n".join(rows))
    lines, note = log.load(2)
    assert lines == [line(0), line(1)]
    assert note is not None and "line 3 is damaged" in note and "\n" not in note
    log.append(line(i) for i in range(2, 6))
    assert log.load(2) == ([line(i) for i in range(6)], None)


def test_a_full_disk_leaves_the_samples_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SampleLog(tmp_path / "a.jsonl")
    log.append([line(0)])

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RunError, match="no space left on device while writing"):
            log.append([line(1)])
    assert log.load(1) == ([line(0)], None)


def test_ten_thousand_samples_load_within_a_second(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "a.jsonl")
    log.append(line(i, questions=64) for i in range(10_000))
    start = time.process_time()
    assert len(log.load(1).lines) == 10_000
    assert time.process_time() - start < 1.0


# --- the record


def test_the_record_completes_an_evaluation(tmp_path: Path) -> None:
    evaluation = RunFolder(tmp_path).evaluation("abc")
    assert not evaluation.is_complete()
    evaluation.write_record(example.record())
    assert evaluation.is_complete()
    assert read_record(evaluation.record_path) == example.record()
    assert evaluation.figures == evaluation.path / "figures"
