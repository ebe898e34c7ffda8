"""`bench sweep` with processes of this machine: the same results however it is done, failures seen, nothing lost."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock, Timeout

from decaybench.core.errors import UserError
from decaybench.harness.sweep import drive, local
from decaybench.harness.sweep.board import headline, last_event
from decaybench.harness.sweep.local import LocalEngine
from decaybench.harness.sweep.plan import read_plan
from decaybench.harness.sweep.worker import Ended
from decaybench.models.checkpoints import checkpoints_in
from decaybench.results.record import read_record
from tests.command import MQAR, PRELOADED, bench, start
from tests.harness.sweeps import results, rows, write_sweep


@pytest.fixture(scope="module", autouse=True)
def no_figures():
    """Whoever starts the server that runs' processes are copies of, it draws no figures of single runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_PRELOAD", PRELOADED)
        yield


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Three runs, two at a time; the folder, what the command said, and the records."""
    folder = tmp_path_factory.mktemp("two")
    path = write_sweep(folder / "s.yaml", seeds=[0, 1], runs=[{}, {"set": {"model.post": {}}, "seeds": [0]}])
    done = bench("sweep", str(path), "--out", str(folder / "runs"), "--workers", "2")
    return folder, done, results(folder / "runs")


def test_all_runs_are_done_and_summed_up(swept):
    folder, done, found = swept
    assert done.code == 0 and len(found) == 3
    assert "3 runs, 0 done already, 3 to do" in done.err and done.err.count("done     ") == 3
    assert "mamba2+post" in done.out and "medians over seeds" in done.out
    assert f"written: {folder / 's' / 'runs.csv'}" in done.out
    assert not list((folder / "s").glob("*.png"))  # one size of the state
    assert not (folder / "s" / "failures.json").exists() and not list((folder / "s" / "logs").iterdir())


def test_the_csv_has_every_cell_of_every_run(swept):
    folder, _, _ = swept
    lines = rows(folder / "s")
    records = [read_record(path) for path in (folder / "runs").glob("*/evaluations/*/record.json")]
    assert len(lines) == sum(len(record.cells) for record in records) == 3 * 4
    wanted = {
        (record.model.cell, str(record.seed), cell.variant, str(cell.eval_length), repr(cell.value), str(cell.n))
        for record in records
        for cell in record.cells
    }
    keys = ("model", "seed", "variant", "length", "value", "samples")
    assert {tuple(line[key] for key in keys) for line in lines} == wanted
    state = {record.model.cell: sum(record.model.state_elements) for record in records}
    assert all(int(line["state_elements"]) == state[line["model"]] for line in lines)
    assert [line["model.post"] for line in lines] == [""] * 8 + ["{}"] * 4


def test_one_at_a_time_and_the_tasks_own_command_give_the_same(swept, tmp_path):
    folder, _, found = swept
    path = folder / "s.yaml"
    one = bench("sweep", str(path), "--out", str(tmp_path / "runs"), "--workers", "1", "--folder", str(tmp_path / "s"))
    assert one.code == 0 and results(tmp_path / "runs") == found
    assert (tmp_path / "s" / "runs.csv").read_bytes() == (folder / "s" / "runs.csv").read_bytes()
    # tests.command says the same settings in flags.
    alone = start(*MQAR, "--seed", "1", "--out", "alone", cwd=tmp_path)
    assert alone.end().code == 0
    [(place, record)] = results(tmp_path / "alone").items()
    assert found[place] == record


def test_what_is_done_is_not_done_again(swept):
    folder, _, _ = swept
    before = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*") if path.is_file()}
    again = bench("sweep", str(folder / "s.yaml"), "--out", str(folder / "runs"), "--json")
    assert again.code == 0 and "3 runs, 3 done already, 0 to do" in again.err
    said = json.loads(again.out)
    assert said["failed"] == 0 and [run["state"] for run in said["runs"]] == ["done"] * 3
    assert said["runs"][2]["record_id"] == read_record(Path(said["runs"][2]["record"])).record_id
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_dry_run_says_how_each_stands_and_does_nothing(swept, tmp_path):
    folder, _, _ = swept
    seen = bench("sweep", str(folder / "s.yaml"), "--out", str(folder / "runs"), "--dry-run")
    assert seen.code == 0 and "3 runs: 3 done" in seen.out
    path = write_sweep(tmp_path / "s.yaml")
    seen = bench("sweep", str(path), "--out", str(tmp_path / "runs"), "--dry-run", "--json")
    [run] = json.loads(seen.out)
    assert run["stands"] == "waiting" and run["label"] == "mamba2 seed 0" and run["asked"]["training.steps"] == 12
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["s.yaml"]


def test_a_run_that_fails_is_seen_stops_no_other_and_starts_again(tmp_path):
    # At this rate without a limit to gradients a loss is soon no number.
    wild = {"set": {"training.learning_rate": 9.0, "training.clip": None, "training.steps": 400}}
    path = write_sweep(tmp_path / "s.yaml", runs=[wild, {}])
    words = ("sweep", str(path), "--out", str(tmp_path / "runs"), "--workers", "2")
    done = bench(*words)
    assert done.code == 1 and len(results(tmp_path / "runs")) == 1
    assert "failed   1/2" in done.err and "diverged" in done.out
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("bench: 1 of 2 runs failed, the first: mamba2 seed 0") and "diverged" in last
    assert "starts them again" in last
    failed = [line for line in rows(tmp_path / "s") if line["error"]]
    assert len(failed) == 1 and "diverged" in failed[0]["error"] and failed[0]["value"] == ""
    assert "1 done, " in " ".join(bench(*words, "--dry-run").out.split()) or "failed" in bench(*words, "--dry-run").out
    again = bench(*words)
    assert again.code == 1
    assert "2 runs, 1 done already, 1 to do, 1 of them failed before and start again" in again.err


def test_a_run_that_failed_can_succeed_with_the_same_command(tmp_path):
    path = write_sweep(tmp_path / "s.yaml")
    folder = read_plan(path, out=tmp_path / "runs").runs[0].folder.path
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("not a run")
    words = ("sweep", str(path), "--out", str(tmp_path / "runs"), "--json")
    done = bench(*words)
    [run] = json.loads(done.out)["runs"]
    assert done.code == 1 and run["state"] == "failed" and "not a run folder" in run["error"]
    assert list(json.loads((tmp_path / "s" / "failures.json").read_text()).values()) == [run["error"]]
    assert (folder / "mine.txt").read_text() == "not a run"
    (folder / "mine.txt").unlink()
    done = bench(*words)
    assert done.code == 0 and json.loads(done.out)["failed"] == 0
    assert json.loads((tmp_path / "s" / "failures.json").read_text()) == {}


def test_runs_that_share_a_folder_wait_for_one_another(tmp_path):
    path = write_sweep(tmp_path / "s.yaml", grid={"evaluation.samples": [4, 8]})
    done = bench("sweep", str(path), "--out", str(tmp_path / "runs"), "--workers", "2")
    assert done.code == 0 and len(list((tmp_path / "runs").iterdir())) == 1
    assert [line["samples"] for line in rows(tmp_path / "s")] == ["4"] * 4 + ["8"] * 4


LONG = {"training.steps": 300, "checkpoint_seconds": 0.1}


def begin(tmp_path, name, workers=2):
    """A sweep of two long runs, at work in a process of its own; both have a checkpoint."""
    path = write_sweep(tmp_path / "s.yaml", LONG, seeds=[0, 1])
    words = ("sweep", str(path), "--out", name, "--folder", f"{name}-s", "--workers", str(workers))
    begun = start(*words, cwd=tmp_path)
    runs = read_plan(path, out=tmp_path / name).runs
    assert begun.wait_for(lambda: all(checkpoints_in(run.folder.checkpoint) for run in runs)), begun.end().err
    return words, begun, runs


def free(run):
    """Whether nobody works on a run's folder."""
    try:
        FileLock(run.folder.path / ".lock", timeout=0).acquire().lock.release()
    except Timeout:
        return False
    return True


@pytest.mark.timeout(600)
def test_killed_or_stopped_it_goes_on_and_nothing_is_left_at_work(tmp_path, monkeypatch):
    words, begun, runs = begin(tmp_path, "killed")
    begun.send(signal.SIGKILL)
    begun.end()
    until = time.monotonic() + 20
    while not all(free(run) for run in runs):  # the workers end with the one that started them
        assert time.monotonic() < until, "workers outlive a killed sweep"
        time.sleep(0.05)
    steps = [last_event(run.folder.path / "log.jsonl") for run in runs]
    assert not any(run.evaluation.is_complete() for run in runs)
    again = start(*words, cwd=tmp_path)
    assert again.wait_for(
        lambda: [last_event(run.folder.path / "log.jsonl") for run in runs] != steps
    )  # it went on from a checkpoint
    again.send(signal.SIGINT)
    stopped = again.end()
    assert stopped.code == 1 and stopped.err.strip().splitlines()[-1] == (
        "bench: stopped with 0 of 2 runs done; the same command goes on from there"
    ), stopped.err
    assert "stopping" in stopped.err and "Traceback" not in stopped.err
    assert all(free(run) for run in runs)
    monkeypatch.chdir(tmp_path)
    assert bench(*words).code == 0
    assert bench(*words[:2], "--out", "straight", "--folder", "straight-s").code == 0
    assert results(tmp_path / "killed") == results(tmp_path / "straight")
    assert len(results(tmp_path / "killed")) == 2


def test_a_second_sweep_of_the_same_file_stops(tmp_path):
    path = write_sweep(tmp_path / "s.yaml")
    (tmp_path / "s").mkdir()
    with FileLock(tmp_path / "s" / ".lock"):
        done = bench("sweep", str(path), "--out", str(tmp_path / "runs"))
    assert done.code == 1 and "another process is working on the sweep" in done.err
    assert not (tmp_path / "runs").exists()


def test_a_run_at_work_elsewhere_is_waited_for(tmp_path, monkeypatch):
    """The others are done meanwhile; failures of runs that the file no longer has are forgotten."""
    monkeypatch.setattr(drive, "_BUSY", 0.1)
    path = write_sweep(tmp_path / "s.yaml", seeds=[0, 1])
    first, second = read_plan(path, out=tmp_path / "runs").runs
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "failures.json").write_text('{"mqar-gone/0": "diverged"}')
    first.folder.path.mkdir(parents=True)
    lock = FileLock(first.folder.path / ".lock")
    lock.acquire()
    begun = start("sweep", str(path), "--out", str(tmp_path / "runs"), "--workers", "1", cwd=tmp_path)
    try:
        assert begun.wait_for(second.evaluation.is_complete) and not first.evaluation.is_complete()
    finally:
        lock.release()
    done = begun.end()
    assert done.code == 0, done.err
    assert done.err.count("another process is working on it; it waits") == 1 and "0 failed" not in done.out
    assert first.evaluation.is_complete()
    failures = tmp_path / "s" / "failures.json"
    assert not failures.exists() or json.loads(failures.read_text()) == {}


class Losing:
    """An engine whose workers are lost so many times before a run of theirs succeeds."""

    name = "losing"

    def __init__(self, times):
        self.times, self.at_work, self.started = times, [], 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def room(self):
        return 1 - len(self.at_work)

    def start(self, run):
        self.at_work.append(run)
        self.started += 1

    def wait(self, seconds):
        [run], self.at_work = self.at_work, []
        if self.started <= self.times:
            return [(run, Ended(error="its worker was lost (a node died)", lost=True, again=True))]
        return [(run, Ended(error="and then it diverged"))]


@pytest.mark.parametrize(("times", "started", "error"), [(3, 4, "and then it diverged"), (9, 4, "its worker was lost")])
def test_a_run_whose_worker_is_lost_is_tried_again_but_not_for_ever(tmp_path, monkeypatch, times, started, error):
    engine = Losing(times)
    monkeypatch.setattr(drive, "_engine", lambda *_: engine)
    path = write_sweep(tmp_path / "s.yaml")
    done = bench("sweep", str(path), "--out", str(tmp_path / "runs"))
    assert done.code == 1 and engine.started == started
    assert done.err.count("note: mamba2 seed 0: its worker was lost") == 3
    assert error in rows(tmp_path / "s")[0]["error"]


class Interrupted(Losing):
    """An engine whose worker is ended by the Ctrl-C that its caller gets."""

    def wait(self, seconds):
        os.kill(os.getpid(), signal.SIGINT)
        [run], self.at_work = self.at_work, []
        return [(run, Ended(error="its process ended with code 1", lost=True))]

    def stop(self):
        pass


def test_a_run_that_ctrl_c_ends_at_its_start_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(drive, "_engine", lambda *_: Interrupted(0))
    path = write_sweep(tmp_path / "s.yaml")
    done = bench("sweep", str(path), "--out", str(tmp_path / "runs"))
    assert done.code == 1 and "stopped with 0 of 1 runs done" in done.err
    assert "failed" not in done.err and not (tmp_path / "s" / "failures.json").exists()


def test_a_process_that_dies_is_a_run_that_failed(tmp_path):
    [run] = read_plan(write_sweep(tmp_path / "s.yaml", LONG), out=tmp_path / "runs").runs
    with LocalEngine(1, 1, None, tmp_path / "logs") as engine:
        engine.start(run)
        while not run.folder.config_path.exists():
            assert not engine.wait(0.05)
        assert engine.room() == 0
        os.kill(engine._working[0].process.pid, signal.SIGKILL)
        [(ended_run, ended)] = engine.wait(60)
        assert engine.room() == 1
    assert ended_run is run and ended.error == "its process was killed by SIGKILL (out of memory?)" and not ended.again


def _crash(*_):
    raise KeyError("a mistake of ours")


def test_an_unforeseen_error_is_told_with_where_its_traceback_is(tmp_path, monkeypatch):
    [run] = read_plan(write_sweep(tmp_path / "s.yaml"), out=tmp_path / "runs").runs
    context = _Swapped(local._context())
    monkeypatch.setattr(local, "_context", lambda: context)
    with LocalEngine(1, 1, None, tmp_path / "logs") as engine:
        engine.start(run)
        [(_, ended)] = engine.wait(60)
    log = next((tmp_path / "logs").iterdir())
    assert ended.error == f"its process ended with code 1: KeyError: 'a mistake of ours' (see {log})"
    assert "Traceback" in log.read_text()


class _Swapped:
    """A context of multiprocessing whose processes crash where they would work."""

    def __init__(self, context):
        self._context = context
        self.Pipe = context.Pipe

    def Process(self, target, args, daemon):
        return self._context.Process(target=_work_that_crashes, args=args, daemon=daemon)


def _work_that_crashes(*args):
    local.carry_out_here = _crash
    local._work(*args)


def test_gpus_are_shared_by_fraction(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local._gpu_slots(0.5) == ["0", "0", "1", "1"]
    assert local._gpu_slots(None) == ["0", "1"]
    assert local._gpu_slots(0) == []
    assert local._gpu_slots(0.34) == ["0", "0", "1", "1"]
    assert local._gpu_slots(1 / 3) == ["0"] * 3 + ["1"] * 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert local._gpu_slots(None) == ["GPU-a", "GPU-b"]
    assert LocalEngine(None, 1, 0.5, tmp_path).workers == 4
    with pytest.raises(UserError, match=r"--workers 5"):
        LocalEngine(5, 1, 0.5, tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert local._gpu_slots(None) is None
    with pytest.raises(UserError, match=r"gpus=0\.5"):
        local._gpu_slots(0.5)


def test_threads_are_divided_among_the_processes(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert [LocalEngine(None, threads, None, tmp_path).workers for threads in (1, 3, 8, 9)] == [8, 2, 1, 1]
    assert "more than the 8 cores" in LocalEngine(5, 2, None, tmp_path).name
    assert LocalEngine(1, 2, None, tmp_path).name == "one process at a time, each of 2 threads"


def test_the_last_event_of_a_torn_log(tmp_path):
    log = tmp_path / "log.jsonl"
    assert last_event(log) is None
    log.write_text('{"step": 5, "loss": 1.0, "accuracy": 0.1}\n{"odd": 1}\nnot json\n{"step": 6, "lo')
    assert last_event(log) == {"step": 5, "loss": 1.0, "accuracy": 0.1}


def test_a_headline_has_the_values_by_variant(swept):
    folder, _, _ = swept
    record = read_record(next((folder / "runs").glob("*/evaluations/*/record.json")))
    values = {
        variant: [f"{c.value:.3f}" for c in record.cells if c.variant == variant] for variant in ("capacity", "persist")
    }
    assert headline(record) == ", ".join(f"{variant} {' '.join(found)}" for variant, found in values.items())
