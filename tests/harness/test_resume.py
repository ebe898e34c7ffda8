"""Killed, stopped, out of space, damaged: the same command goes on, to the very numbers of an uninterrupted run."""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from decaybench.core import files
from decaybench.core.errors import RunError, UserError
from decaybench.harness import run as harness_run
from decaybench.harness import training
from decaybench.harness.config import RunConfig, make_config
from decaybench.harness.interrupt import InterruptedRunError
from decaybench.harness.progress import Progress
from decaybench.models import checkpoints
from decaybench.models.checkpoints import checkpoints_in, read_checkpoint
from decaybench.results.run_folder import RunFolder
from tests.command import NIAH, Started, bench, start

STEPS = 160
# Each step leaves a checkpoint, each sample is a batch: there is always something to tear apart.
LONG = (*NIAH, "--samples", "40", "--set", f"training.steps={STEPS}", "--set", "batch_tokens=1")
RESTLESS = (*LONG, "--set", "checkpoint_seconds=0")
BENCH = Path(sys.executable).with_name("bench")
Finished = Callable[[str], Path]


def numbers(folder: Path) -> dict[str, Any]:
    """All of a run's outcome but where it ran and what it took: record, answers, and the hash of its weights."""
    (path,) = folder.glob("evaluations/*/record.json")
    record = json.loads(path.read_text())
    for key in ("environment", "cost", "record_id"):
        del record[key]
    return {
        "record": record,
        "answers": {cell.name: cell.read_text() for cell in path.parent.glob("samples/*.jsonl")},
        "weights": read_checkpoint(checkpoints_in(folder / "checkpoint")[-1]).sha256,
    }


def the_run(cwd: Path) -> Path:
    (folder,) = (cwd / "runs").iterdir()
    return folder


def step_of(cwd: Path) -> int:
    names = [path.name for path in cwd.glob("runs/*/checkpoint/step-*")]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def samples_of(cwd: Path) -> int:
    total = 0
    for path in cwd.glob("runs/*/evaluations/*/samples/*.jsonl"):
        total += path.read_bytes().count(b"\n")
    return total


def one_line(text: str) -> str:
    """The last line of stderr; what stands before it is progress."""
    assert "Traceback" not in text
    return text.splitlines()[-1]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert start(*LONG, cwd=folder).end().code == 0
    return numbers(the_run(folder))


def kill(work: Started, reached: Callable[[], bool], wait: float) -> None:
    """kill -9 a random moment after something is reached."""
    assert work.wait_for(reached)
    work.process.join(timeout=wait)
    work.send(signal.SIGKILL)
    assert work.end().code == -signal.SIGKILL


def test_kill_9_at_random_moments_changes_nothing(tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    draws = random.Random(2)
    for step in sorted(draws.sample(range(2, STEPS - 15), 5)):
        kill(start(*RESTLESS, cwd=tmp_path), lambda step=step: step_of(tmp_path) >= step, draws.uniform(0, 0.03))
        assert samples_of(tmp_path) == 0, "still training"
    for count in sorted(draws.sample(range(2, 200), 4)):
        kill(start(*RESTLESS, cwd=tmp_path), lambda count=count: samples_of(tmp_path) >= count, draws.uniform(0, 0.03))
    folder = the_run(tmp_path)
    assert not list(folder.glob("evaluations/*/record.json"))
    done = start(*RESTLESS, cwd=tmp_path).end()
    assert done.code == 0
    assert numbers(folder) == uninterrupted
    left = [path.name for path in folder.rglob("*") if path.name.startswith(".")]
    assert left == [".lock"], "nothing half written is left"
    assert [path.name for path in checkpoints_in(folder / "checkpoint")] == [
        f"step-{STEPS - 1:08d}",
        f"step-{STEPS:08d}",
    ]


def test_the_installed_command_goes_on_after_kill_9(tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def killed_at(reached: Callable[[], bool]) -> None:
        with open(tmp_path / "err", "w") as err:
            work = subprocess.Popen([BENCH, *RESTLESS], cwd=tmp_path, stdout=err, stderr=err, env=environment)
            while not reached():
                assert work.poll() is None, (tmp_path / "err").read_text()
                time.sleep(0.01)
            work.kill()
            assert work.wait() == -signal.SIGKILL

    killed_at(lambda: step_of(tmp_path) >= 70)
    killed_at(lambda: samples_of(tmp_path) >= 100)
    done = subprocess.run([BENCH, *RESTLESS], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "going on from step" not in done.stderr, "training was done"
    assert numbers(the_run(tmp_path)) == uninterrupted
    assert {path.suffix for path in tmp_path.glob("runs/*/evaluations/*/figures/*")} == {".png", ".svg"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_run_that_goes_on(
    tmp_path: Path, uninterrupted: dict[str, Any], number: signal.Signals
) -> None:
    logged = lambda: any(tmp_path.glob("runs/*/log.jsonl"))  # noqa: E731 at step 50; checkpoints are 20 s apart
    work = start(*LONG, cwd=tmp_path)
    assert work.wait_for(logged)
    work.send(number)
    stopped = work.end()
    step = step_of(tmp_path)
    assert stopped.code == 1 and stopped.out == ""
    said = f"bench: training stopped at step {step} of {STEPS}; the same command goes on from there"
    assert one_line(stopped.err) == said
    assert 50 <= step < STEPS

    work = start(*LONG, cwd=tmp_path)
    assert work.wait_for(lambda: samples_of(tmp_path) >= 50)
    work.send(number)
    stopped = work.end()
    assert stopped.code == 1
    assert f"going on from step {step} of {STEPS}" in stopped.err
    assert re.fullmatch(
        r"bench: evaluation stopped in cell .*; the same command goes on from there", one_line(stopped.err)
    )
    assert 50 <= samples_of(tmp_path) < 240

    assert start(*LONG, cwd=tmp_path).end().code == 0
    assert numbers(the_run(tmp_path)) == uninterrupted


def test_two_processes_on_one_folder(tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    first = start(*LONG, cwd=tmp_path)
    assert first.wait_for(lambda: any(tmp_path.glob("runs/*/config.yaml")))
    for words in (LONG, (*LONG, "--force"), (*LONG, "--eval-lengths", "4x")):
        second = start(*words, cwd=tmp_path).end()
        assert second.code == 1 and second.out == ""
        folder = the_run(tmp_path).relative_to(tmp_path)
        said = f"bench: another process is working on {folder}; wait for it or choose another --out\n"
        assert second.err == said
    assert first.process.is_alive()
    assert first.end().code == 0
    assert numbers(the_run(tmp_path)) == uninterrupted


# --- the same in one process, for every plan of training


class StopHereError(Exception):
    """What a test raises where a kill would have struck."""


def config(task: str, model: dict[str, Any] | None = None, **training_settings: Any) -> RunConfig:
    stages = {
        "niah": [{"shape": {"length": 16, "needles": n, "queries": n}, "examples": 20 + n} for n in (1, 2)],
        "mqar": [{"shape": {"length": 16, "kv": kv}, "examples": 20 + kv} for kv in (1, 2)],
        "mqar-noisy": [{"shape": {"length": 16, "kv": 1, "single": one}, "examples": 20} for one in (True, None)],
    }
    return make_config(
        {
            "model": {
                **{"d_model": 16, "mixer": {"d_state": 8, "headdim": 8}, "post": {}, "embedding_dropout": 0.1},
                **(model or {}),
            },
            "task": {"name": task, "train_length": 16, "stages": stages[task]},
            "training": {"batch_samples": 4, "warmup": 3, **training_settings},
            "evaluation": {"lengths": ["1x"], "samples": 4},
            "seed": 3,
            "checkpoint_seconds": 0,
        }
    )


def trained(config: RunConfig, folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    opened = RunFolder.open(folder)
    opened.write_config(config.plain())
    model, info, _ = training.train(config, opened, device="cpu", backend="torch", progress=Progress(quiet=True))
    return model.state_dict(), info


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ("niah", {"steps": 30, "mastery": 0.004, "review": 0.5}),
        ("mqar", {"steps": 30, "mastery": 0.004, "review": 0.5, "schedule": "cosine"}),
        ("mqar", {"plan": "epochs", "epochs": 3, "shuffle": True, "schedule": "cosine-by-epoch"}),
        ("niah", {"plan": "epochs", "epochs": 2, "schedule": "linear-by-epoch", "dtype": "bfloat16"}),
        ("mqar", {"steps": 30, "mastery": 0.004, "review": 0.5, "label_noise": 0.4}),
        ("mqar", {"plan": "epochs", "epochs": 3, "shuffle": True, "label_noise": 0.4}),
        ("mqar", {"plan": "epochs", "epochs": 2, "model": {"bft": {}, "ffn": {}}}),
        ("mqar-noisy", {"plan": "epochs", "epochs": 2, "label_noise": 0.1}),
    ],
)
def test_training_stopped_anywhere_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, settings: dict[str, Any]
) -> None:
    wanted, info = trained(config(task, **settings), tmp_path / "whole")
    assert info.stages[0].step is not None or settings.get("plan") == "epochs", "a stage is mastered on the way"
    really = training._one_step
    calls = 0

    def stop_at(last: int, *arguments: Any) -> tuple[float, float]:
        nonlocal calls
        calls += 1
        if calls > last:
            raise StopHereError
        return really(*arguments)

    for steps in (1, 6, 9):  # the first checkpoint, and two others; each run goes on with the next step
        calls = 0
        monkeypatch.setattr(training, "_one_step", functools.partial(stop_at, steps))
        with pytest.raises(StopHereError):
            trained(config(task, **settings), tmp_path / "stopped")
    monkeypatch.setattr(training, "_one_step", really)
    weights, resumed = trained(config(task, **settings), tmp_path / "stopped")
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert resumed == info, "with every stage's batches and the longest sequence trained on"
    assert sum(stage.batches for stage in resumed.stages) == resumed.steps
    lines = (tmp_path / "stopped" / "log.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(set(steps))


def test_the_lock_is_free_after_an_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise InterruptedRunError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(training, "_one_step", stop)
        assert bench(*NIAH).code == 1
    assert bench(*NIAH).code == 0


# --- a disk that is full, a folder that can't be written


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_written(descriptor: int, data: bytes) -> None:
    os.write(descriptor, data[: len(data) // 2])
    full_disk()


def only_for(name: str, fails: Callable[..., Any], works: Callable[..., Any]) -> Callable[..., Any]:
    """A function that fails for files whose name holds `name`, found by its first argument."""

    def chosen(place: Any, *rest: Any) -> Any:
        path = str(Path(f"/proc/self/fd/{place}").readlink()) if isinstance(place, int) else str(place)
        return fails(place, *rest) if name in path else works(place, *rest)

    return chosen


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds a descriptor's file by /proc")
@pytest.mark.parametrize(
    "name", ["config.yaml", "log.jsonl", "single-length64-depth0", "record.json", "accuracy-length"]
)
def test_a_full_disk_is_one_line_and_loses_nothing(
    here: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    reference = numbers(finished("niah"))
    shutil.rmtree(here / "runs")
    draws = name == "accuracy-length"
    if draws:
        monkeypatch.undo()
        monkeypatch.chdir(here)
    with monkeypatch.context() as patch:
        patch.setattr(files, "_write_all", only_for(name, half_written, files._write_all))
        result = bench(*NIAH)
    assert result.code == 1 and result.out == ""
    assert re.match(r"bench: no space left on device while writing runs/niah-.*" + name, one_line(result.err))
    assert not list(here.rglob("*.tmp")) and not list(here.rglob("record.json"))
    if draws:
        monkeypatch.setattr(harness_run, "_draw", lambda *_: None)
    again = bench(*NIAH)
    assert again.code == 0 and "note" not in again.err
    assert numbers(the_run(here)) == reference


@pytest.mark.parametrize("where", ["save_file", "fsync"])
def test_a_full_disk_while_a_checkpoint_is_written(
    here: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    reference = numbers(finished("niah"))
    shutil.rmtree(here / "runs")
    module = os if where == "fsync" else checkpoints
    works, calls = getattr(module, where), 0

    def fails_in_the_end(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 20:
            if where == "save_file":
                arguments[1].write_bytes(b"half")
                raise checkpoints.SafetensorError("Error while serializing: I/O error: disk (os error 28)")
            full_disk()
        works(*arguments)

    restless = (*NIAH, "--set", "checkpoint_seconds=0")
    with monkeypatch.context() as patch:
        patch.setattr(module, where, fails_in_the_end)
        result = bench(*restless)
    assert result.code == 1
    assert re.match(r"bench: no space left on device while writing runs/niah-\S*/checkpoint/", one_line(result.err))
    kept = checkpoints_in(the_run(here) / "checkpoint")
    assert kept and all(read_checkpoint(folder).facts["step"] > 1 for folder in kept), "the ones before stay whole"
    assert not list(here.rglob(".*.writing"))
    again = bench(*restless)
    assert again.code == 0
    assert f"going on from step {int(kept[-1].name[5:])} of 12" in again.err
    assert numbers(the_run(here)) == reference


def small_files() -> None:
    """No file may grow beyond 4 kB: a real error of the system, in the middle of a write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def not_root() -> None:
    """Root may write everywhere: Linux lets it by two capabilities, given up here. It can still read what is its own,
    which another user couldn't: the environment that the tests run in may be root's alone.
    """
    if os.getuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
        data = (ctypes.c_uint32 * 6)()
        assert libc.capget(header, data) == 0
        data[0] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, of the effective ones
        assert libc.capset(header, data) == 0


def test_a_limit_on_file_sizes(here: Path) -> None:
    result = start(*NIAH, cwd=here, before=small_files).end()
    assert result.code == 1 and result.out == ""
    assert re.match(r"bench: can't write runs/niah-.*/checkpoint/step-00000012: File too large", one_line(result.err))
    assert bench(*NIAH).code == 0


@pytest.mark.parametrize("done", [False, True])
def test_a_folder_without_permission_to_write(
    here: Path, finished: Finished, done: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if done:
        finished("niah")
        words = (*NIAH, "--eval-lengths", "4x")
    else:
        (here / "runs").mkdir()
        words = NIAH
    before = sorted(here.rglob("*"))
    for path in (here, *here.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    result = start(*words, cwd=here, output=tmp_path_factory.mktemp("output"), before=not_root).end()
    for path in (here, *here.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert result.code == 1 and result.out == ""
    assert re.fullmatch(r"bench: can't write runs/niah-\S*: permission denied\n", result.err)
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EROFS, "the file system is read-only"), (errno.EACCES, "permission denied")],
)
def test_a_read_only_folder_is_one_line(
    here: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    folder = finished("niah")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    really = os.open

    def read_only(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and "runs" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return really(path, flags, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        result = bench(*NIAH, "--eval-lengths", "4x")
    assert result.code == 1 and result.out == ""
    assert re.fullmatch(rf"bench: can't write runs/niah-[^:]*: {words}\n", result.err)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


# --- damaged files


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garble(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize("damage", [cut, garble, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "optimiser.safetensors"])
def test_a_damaged_checkpoint_goes_on_from_the_one_before(
    here: Path, finished: Finished, damage: Callable[[Path], None], name: str
) -> None:
    folder = finished("niah")
    reference = numbers(folder)
    before, newest = checkpoints_in(folder / "checkpoint")
    damage(newest / name)
    shutil.rmtree(folder / "evaluations")
    result = bench(*NIAH, "--quiet")
    assert result.code == 0
    assert re.fullmatch(
        rf"note: checkpoint .*/{newest.name} is damaged: {name} .*; going on from the one before, {before.name}\n",
        result.err,
    )
    assert numbers(folder) == reference


def test_two_damaged_checkpoints_are_an_error_that_deletes_nothing(here: Path, finished: Finished) -> None:
    folder = finished("niah")
    reference = numbers(folder)
    cut(checkpoints_in(folder / "checkpoint")[0] / "model.safetensors")
    cut(checkpoints_in(folder / "checkpoint")[1] / "facts.json")
    before = snapshot(folder)
    result = bench(*NIAH, "--eval-lengths", "4x")
    assert result.code == 2 and result.out == ""
    assert re.fullmatch(
        r"bench: runs/\S*/step-00000012/facts.json is not valid JSON.*: --force starts this run anew",
        one_line(result.err),
    )
    assert snapshot(folder) == before
    assert bench(*NIAH, "--force").code == 0
    assert numbers(folder) == reference


def test_another_runs_checkpoint_is_refused(here: Path, finished: Finished) -> None:
    folder = finished("niah")
    for path in folder.glob("checkpoint/*/facts.json"):
        path.write_text(path.read_text().replace(make_hash(folder), "0" * 64))
    result = bench(*NIAH, "--eval-lengths", "4x")
    assert result.code == 2
    assert "is another run's; --force starts this run anew" in one_line(result.err)


def make_hash(folder: Path) -> str:
    return make_config(yaml.safe_load((folder / "config.yaml").read_text())).training_hash


def damaged(lines: list[bytes]) -> dict[str, tuple[list[bytes], bool]]:
    """Ways to damage a file of 8 samples, and whether the user must be told: not where a kill does the same."""
    no_answer = json.dumps({**json.loads(lines[5]), "answer": []}).encode() + b"\n"
    other_index = json.dumps({**json.loads(lines[5]), "index": 4}).encode() + b"\n"
    other_sample = json.dumps({**json.loads(lines[5]), "id": "0" * 16}).encode() + b"\n"
    return {
        "torn": ([*lines[:7], lines[7][:-20]], False),
        "short": (lines[:3], False),
        "empty": ([], False),
        "garbled": ([*lines[:4], b"\x00\x00garbage\n", *lines[5:]], True),
        "one missing": ([*lines[:2], *lines[3:]], True),
        "one twice": ([*lines[:2], lines[1], *lines[2:]], True),
        "an answer missing": ([*lines[:5], no_answer, *lines[6:]], True),
        "another index": ([*lines[:5], other_index, *lines[6:]], True),
        "another sample": ([*lines[:5], other_sample, *lines[6:]], True),
    }


def test_damaged_samples_are_evaluated_again(here: Path, finished: Finished) -> None:
    folder = finished("niah")
    reference = numbers(folder)
    (record,) = folder.glob("evaluations/*/record.json")
    path = record.parent / "samples" / "single-length64-depth0.5.jsonl"
    whole = path.read_bytes()
    for what, (lines, told) in damaged(whole.splitlines(keepends=True)).items():
        path.write_bytes(b"".join(lines))
        record.unlink()
        result = bench(*NIAH, "--quiet")
        assert result.code == 0, what
        found = re.fullmatch(r"note: runs/\S* line \d is damaged \(.*\); evaluating again from there\n", result.err)
        assert bool(found) == told, what
        assert told or result.err == "", what
        assert numbers(folder) == reference, what
        assert path.read_bytes() == whole, what


@pytest.mark.parametrize(
    "content",
    [
        "",
        "model: [",
        "model:\n  name: mamba2\n",
        "- 1\n",
        "\x00\x01",
        "model: {name: mamba2}\ntask: {name: niah}\n",
        "seed: 5\n",
    ],
)
def test_a_corrupt_configuration_is_one_line(here: Path, finished: Finished, content: str) -> None:
    folder = finished("niah")
    (folder / "config.yaml").write_text(content)
    before = snapshot(folder)
    commands = [(*NIAH, "--eval-lengths", "4x")]
    if make_valid(content) is False:
        commands += [("spectrum", str(folder)), ("niah", "--checkpoint", str(folder))]
    for words in commands:
        result = bench(*words)
        assert result.code == 2 and result.out == ""
        assert re.fullmatch(
            r"bench: runs/\S*config.yaml .*--force starts this run anew\n", result.err.replace(f"{here}/", "")
        )
    assert snapshot(folder) == before
    done = bench(*NIAH)
    assert done.code == 0 and "already done" in done.err, "what is finished can still be shown"


def make_valid(content: str) -> bool:
    try:
        make_config(yaml.safe_load(content))
    except (UserError, yaml.YAMLError, TypeError, ValueError, AttributeError):
        return False
    return True


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda text: text[: len(text) // 2], "is not valid JSON"),
        (lambda text: "", "is not valid JSON"),
        (lambda text: "[]", "must hold a JSON object"),
        (lambda text: text.replace('"seed": 0', '"seed": 1', 1), "it was changed"),
        (lambda text: text.replace('"cells"', '"zells"', 1), "unknown key 'zells'"),
    ],
)
def test_a_corrupt_record_is_one_line_and_made_again_when_deleted(
    here: Path, finished: Finished, edit: Callable[[str], str], words: str
) -> None:
    folder = finished("niah")
    reference = numbers(folder)
    (record,) = folder.glob("evaluations/*/record.json")
    record.write_text(edit(record.read_text()))
    before = snapshot(folder)
    result = bench(*NIAH, "--quiet")
    assert result.code == 2 and result.out == "" and result.err.count("\n") == 1
    assert words in result.err
    assert "delete it, and the same command makes it again from its samples" in result.err
    assert snapshot(folder) == before
    record.unlink()
    again = bench(*NIAH)
    assert again.code == 0 and "training" not in again.err
    assert numbers(folder) == reference


def test_a_corrupt_log_stops_nothing(here: Path, finished: Finished) -> None:
    folder = finished("niah")
    (folder / "log.jsonl").write_bytes(b"\xff\xfegarbage\n{torn")
    assert bench(*NIAH, "--eval-lengths", "4x").code == 0
    shutil.rmtree(folder / "evaluations")
    newest = checkpoints_in(folder / "checkpoint")[-1]
    shutil.rmtree(newest)
    assert bench(*NIAH).code == 0
    lines = (folder / "log.jsonl").read_bytes().splitlines()
    assert lines[0] == b"\xff\xfegarbage" and json.loads(lines[1])["step"] == 12


@pytest.mark.parametrize("key", ["step", "batches", "plan", "loss"])
def test_a_checkpoint_without_its_facts_is_one_line(here: Path, finished: Finished, key: str) -> None:
    folder = finished("niah")
    for path in folder.glob("checkpoint/*/facts.json"):
        facts = json.loads(path.read_text())
        del facts[key]
        path.write_text(json.dumps(facts))
    result = bench(*NIAH, "--eval-lengths", "4x")
    assert result.code == 2 and result.out == ""
    assert f"can't be gone on from: facts.json lacks '{key}'; --force starts this run anew" in one_line(result.err)


def test_out_of_memory_is_one_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = bench(*NIAH, "--quiet", "--set", "model.d_model=4000000")
    assert (result.code, result.out) == (1, "")
    assert re.fullmatch(r"bench: out of memory; .*\n", result.err)

    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(harness_run, "evaluate", fails)
    assert re.fullmatch(r"bench: out of memory; .*\n", bench(*NIAH, "--quiet").err)


def test_divergence_is_one_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really, calls = training.Objective.forward, 0

    def diverges(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        nats, right = really(*arguments)
        return (nats * float("nan") if calls == 8 else nats), right

    monkeypatch.setattr(training.Objective, "forward", diverges)
    result = bench(*NIAH, "--quiet")
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        "bench: training diverged at step 7: the loss is nan; try a learning rate below training.learning_rate=0.01\n"
    )
    with pytest.raises(RunError, match="diverged"):
        calls = 7
        harness_run.carry_out(config("niah", steps=12), progress=Progress(quiet=True))
