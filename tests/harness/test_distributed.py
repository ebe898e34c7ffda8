"""Two processes on one run: the losses, weights and samples of one, whichever way they share it, and on from there."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decaybench.core.errors import RunError, UserError
from decaybench.harness import training
from decaybench.harness.config import RunConfig, make_config
from decaybench.harness.distributed import ALONE, World, expected_processes, joined
from decaybench.harness.evaluation import evaluate
from decaybench.harness.interrupt import InterruptedRunError
from decaybench.harness.progress import Progress
from decaybench.harness.training import train
from decaybench.models.checkpoints import checkpoints_in, read_checkpoint
from decaybench.models.language_model import build_model
from decaybench.results.record import read_record
from decaybench.results.run_folder import EvaluationFolder, RunFolder
from decaybench.tasks.text import Text
from tests.command import start
from tests.harness.processes import as_rank, events, free_port, together
from tests.token_shards import prepared, stories

T = 32
STEPS = 20
STEEP = {"learning_rate": 3e-3}
MODELS: dict[str, dict[str, Any]] = {
    # Parameters without a dimension to cut, frozen ones, and a state by document.
    "mamba2+post": {"mixer": {"d_state": 8, "headdim": 8}, "post": {}},
    # What crosses layers beside the stream: a variance, and the first layer's values.
    "rwkv7+bft": {
        "name": "rwkv7",
        "mixer": {"head_dim": 8},
        "ffn": {},
        "embedding_norm": True,
        "bft": {},
    },
    "gated_deltanet+post": {"name": "gated_deltanet", "mixer": {"n_heads": 2, "head_dim": 8}, "post": {}},
    "gla+bft": {"name": "gla", "mixer": {"n_heads": 2}, "bft": {}},
    "retnet": {"name": "retnet", "mixer": {"n_heads": 2}},
    "attention": {"name": "attention", "mixer": {"n_heads": 2}, "tie_embeddings": False},
}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": "ddp", "micro_batch_tokens": 2 * T},
    "fsdp": {"parallel": "fsdp", "micro_batch_tokens": 2 * T, "recompute": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("text") / "stories", stories(200, longest=30))


def config(folder: Path, model: str = "mamba2+post", **settings: Any) -> RunConfig:
    """Seven samples a batch: four for one process and three for the other."""
    wanted = {"steps": STEPS, "batch_samples": 7, "warmup": 2, "learning_rate": 1e-3, **settings.pop("training", {})}
    return make_config(
        {
            "model": {"d_model": 16, "n_layers": 2, **MODELS[model]},
            "task": {"name": "text", "train_length": T, "data": str(folder)},
            "training": wanted,
            "evaluation": {"lengths": ["1x", "4x"], "samples": 9},
            **settings,
        }
    )


def trained(world: World, found: RunConfig, folder: Path) -> dict[str, torch.Tensor]:
    """Train, with each step in the log and each process's samples in a file. Returns the weights."""
    usual, really = training._LOG_EVERY, Text.batch

    def noted(self: Text, shape: Any, split: Any, seed: int, indices: np.ndarray) -> Any:
        with open(folder / f"samples-{world.size}-{world.rank}", "a") as file:
            file.write(json.dumps(indices.tolist()) + "\n")
        return really(self, shape, split, seed, indices)

    run = RunFolder.open(folder) if world.first else RunFolder(folder)
    if world.first and not run.config_path.exists():
        run.write_config(found.plain())
    world.tell(None)
    training._LOG_EVERY, Text.batch = 1, noted  # type: ignore[method-assign]
    try:
        model, _, _ = train(found, run, device="cpu", backend="torch", progress=Progress(quiet=True), world=world)
    finally:
        training._LOG_EVERY, Text.batch = usual, really  # type: ignore[method-assign]
    return model.state_dict()


def in_both_ways(world: World, data: Path, root: Path, model: str, **settings: Any) -> None:
    for way, how in WAYS.items():
        weights = trained(world, config(data, model, **settings, **how), root / way)
        torch.save(weights, root / f"{way}-{world.rank}.pt")


def in_both_ways_exactly(world: World, data: Path, root: Path, model: str) -> None:
    for way, how in WAYS.items():
        with in_float64():
            trained(world, config(data, model, training=STEEP, **how), root / f"{way}-float64")


@contextmanager
def in_float64() -> Iterator[None]:
    """Models are trained in float64, from the same initial values."""
    really = training.build_model
    training.build_model = lambda *sizes, **how: really(*sizes, **how).double()  # type: ignore[assignment]
    try:
        yield
    finally:
        training.build_model = really


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in events(run)]


@pytest.mark.parametrize("model", MODELS)
def test_two_processes_compute_what_one_does(folder: Path, tmp_path: Path, model: str) -> None:
    """Nothing but rounding tells them apart: in float64 20 steps agree a hundred million times closer than they learn.

    In float32 they mustn't be asked to, at this learning rate. GLA and RetNet divide a head's output by its norm, and
    on a document's first token that is (q k) v, whose sign alone is left where q k is nearly 0; AdamW's first steps are
    signs, too. Moving the initial values by half a unit in the last place moves RetNet's loss by 1e-3 here, and by less
    than 1e-6 with norm_eps = 1e-2, or at a third of the learning rate, which the next test takes.
    """
    together(in_both_ways_exactly, folder, tmp_path, model, folder=tmp_path)
    with in_float64():
        trained(ALONE, config(folder, model, training=STEEP), tmp_path / "one")
    expected = losses(tmp_path / "one")
    assert len(expected) == STEPS and expected[-1] < expected[0] - 0.5, "it learns"
    for way in WAYS:
        assert losses(tmp_path / f"{way}-float64") == pytest.approx(expected, abs=1e-9, rel=0), way


@pytest.mark.parametrize("model", MODELS)
def test_two_processes_have_the_losses_of_one(folder: Path, tmp_path: Path, model: str) -> None:
    together(in_both_ways, folder, tmp_path, model, folder=tmp_path)
    weights = trained(ALONE, config(folder, model), tmp_path / "one")
    expected = losses(tmp_path / "one")
    assert len(expected) == STEPS and expected[-1] < expected[0] - 0.1, "it learns"
    for way in WAYS:
        assert losses(tmp_path / way) == pytest.approx(expected, abs=1e-5, rel=0), way
        assert [event["tokens"] for event in events(tmp_path / way)] == [7 * T * (n + 1) for n in range(STEPS)]
        written = read_checkpoint(checkpoints_in(tmp_path / way / "checkpoint")[-1]).model().state_dict()
        for rank in range(2):
            returned = torch.load(tmp_path / f"{way}-{rank}.pt")
            assert returned.keys() == weights.keys()
            for name, value in returned.items():
                assert torch.equal(value, written[name]), "each process has the whole model, as the checkpoint has"
                assert torch.allclose(value, weights[name], rtol=1e-3, atol=1e-4), name


def test_a_batch_that_is_too_small_for_all(folder: Path, tmp_path: Path) -> None:
    """One sample a step: the other process computes one without labels."""
    settings = {"training": {"steps": 6, "batch_samples": 1}}
    together(functools.partial(in_both_ways, **settings), folder, tmp_path, "mamba2+post", folder=tmp_path)
    trained(ALONE, config(folder, **settings), tmp_path / "one")
    for way in WAYS:
        assert losses(tmp_path / way) == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
        assert events(tmp_path / way)[-1]["tokens"] == 6 * T


def test_a_loss_that_is_no_number_in_one_process_stops_all(folder: Path, tmp_path: Path) -> None:
    together(_diverge, folder, tmp_path, folder=tmp_path)
    for way in WAYS:
        (newest, before) = reversed(checkpoints_in(tmp_path / way / "checkpoint"))
        assert (newest.name, before.name) == ("step-00000003", "step-00000002"), "weights from before it"


def _diverge(world: World, data: Path, root: Path) -> None:
    really = training.Objective.forward
    for way, how in WAYS.items():
        calls = 0

        def forward(self: Any, *batch: Any) -> Any:
            nonlocal calls
            calls += 1
            nats, right = really(self, *batch)
            broken = not world.first and calls == 8  # of two parts a step: in the second one of the fourth
            return (nats * math.nan if broken else nats), right

        training.Objective.forward = forward  # type: ignore[method-assign]
        try:
            with pytest.raises(RunError, match="training diverged at step 3: the loss is nan"):
                trained(world, config(data, checkpoint_seconds=0, **how), root / way)
        finally:
            training.Objective.forward = really  # type: ignore[method-assign]


# --- going on with another number of processes


def stopped_after(world: World, data: Path, run: Path, step: int, **how: Any) -> None:
    """Train as if killed in the middle of the step after this one."""
    really, taken = training._one_step, 0

    def one_step(*arguments: Any) -> tuple[float, float]:
        nonlocal taken
        if arguments[0].step == step:
            raise StopHereError
        taken += 1
        return really(*arguments)

    training._one_step = one_step
    try:
        trained(world, config(data, checkpoint_seconds=0, **how), run)
    except StopHereError:
        return
    finally:
        training._one_step = really
    raise AssertionError("not stopped")


class StopHereError(Exception):
    """Raised where a kill would have struck."""


def taken_on(run: Path, size: int, steps: int) -> list[set[int]]:
    """The samples of the first so many steps that processes of a world of this size computed, all parts together."""
    found: list[set[int]] = [set() for _ in range(steps)]
    for rank in range(size):
        lines = [json.loads(line) for line in (run / f"samples-{size}-{rank}").read_text().splitlines()]
        parts = len(lines) // steps if size == 1 else 2
        for step in range(steps):
            here = [index for line in lines[parts * step : parts * (step + 1)] for index in line]
            assert not found[step] & set(here)
            found[step] |= set(here)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_one_process_goes_on_where_two_were_killed(folder: Path, tmp_path: Path, way: str) -> None:
    together(functools.partial(stopped_after, **WAYS[way]), folder, tmp_path / "run", 9, folder=tmp_path)
    weights = trained(ALONE, config(folder, checkpoint_seconds=0), tmp_path / "run")
    expected = trained(ALONE, config(folder), tmp_path / "whole")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)
    assert all(torch.allclose(weights[name], value, rtol=1e-3, atol=1e-4) for name, value in expected.items())
    # The tenth batch was drawn before the kill, and trained on after it.
    samples = taken_on(tmp_path / "run", 2, 9) + taken_on(tmp_path / "run", 1, STEPS - 9)
    assert samples == [set(range(7 * step, 7 * (step + 1))) for step in range(STEPS)]


def test_two_processes_go_on_where_one_was_killed(folder: Path, tmp_path: Path) -> None:
    stopped_after(ALONE, folder, tmp_path / "run", 9)
    together(functools.partial(_finish, **WAYS["fsdp"]), folder, tmp_path / "run", folder=tmp_path)
    trained(ALONE, config(folder), tmp_path / "whole")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)
    samples = taken_on(tmp_path / "run", 1, 10)[:9] + taken_on(tmp_path / "run", 2, STEPS - 9)
    assert samples == [set(range(7 * step, 7 * (step + 1))) for step in range(STEPS)]


def _finish(world: World, data: Path, run: Path, **how: Any) -> None:
    trained(world, config(data, checkpoint_seconds=0, **how), run)


def test_windows_of_a_run_repeat_nothing_before_the_epoch_ends(folder: Path) -> None:
    """What makes the test above one of documents: distinct samples are distinct stretches of the text."""
    made = Text(config(folder).task)  # type: ignore[arg-type]
    shape = made.stages()[0].shape
    count = made._windows("train", T)
    assert count > 7 * STEPS
    starts = np.sort(made._starts(shape, "train", 0, np.arange(count)))  # type: ignore[arg-type]
    assert (np.diff(starts) == T).all()


# --- evaluation


def evaluated(world: World, data: Path, folder: Path, batch_tokens: int = 4 * T) -> Any:
    found = config(data, batch_tokens=batch_tokens)
    model = build_model(found.model, 3).eval()
    where = EvaluationFolder(folder)
    return evaluate(model, found, where, train_length=T, device="cpu", progress=Progress(quiet=True), world=world)


def _evaluate(world: World, data: Path, folder: Path) -> None:
    result = evaluated(world, data, folder)
    assert len(result.cells) == 2, "every process knows the outcome"
    told = world.gather([cell.plain() for cell in result.cells])
    assert told == ([told[0]] * 2 if world.first else [])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "samples").iterdir()}


def test_two_processes_evaluate_as_one(folder: Path, tmp_path: Path) -> None:
    whole = evaluated(ALONE, folder, tmp_path / "one")
    together(_evaluate, folder, tmp_path / "two", folder=tmp_path)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert evaluated(ALONE, folder, tmp_path / "two").cells == whole.cells
    lines = contents(tmp_path / "one")[f"validation-length{T}.jsonl"].splitlines(keepends=True)
    for kept in (1, 4, 7):  # four samples a batch: one is begun, one is whole, two are begun
        path = tmp_path / "two" / "samples" / f"validation-length{T}.jsonl"
        path.write_bytes(b"".join(lines[:kept]))
        together(_evaluate, folder, tmp_path / "two", folder=tmp_path)
        assert contents(tmp_path / "two") == contents(tmp_path / "one")


# --- the command


WORDS = (
    *("pretrain", "--train-length", str(T), "--eval-lengths", "1x", "--samples", "4", "--set", "model.d_model=16"),
    *("--set", "model.n_layers=2", "--set", "model.mixer.headdim=8", "--set", "model.mixer.d_state=8"),
    *("--set", "training.steps=40", "--set", "training.batch_tokens=128", "--set", "checkpoint_seconds=0"),
)


def test_the_command_in_two_processes(folder: Path, tmp_path: Path) -> None:
    words = (*WORDS, "--data", str(folder), "--set", "parallel=fsdp")
    port = free_port()
    work = [start(*words, cwd=tmp_path, before=functools.partial(as_rank, rank, 2, port)) for rank in range(2)]
    first, second = (each.end() for each in work)
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    assert "bits/byte by position" in first.out and "train tokens" in first.err
    assert (second.out, second.err) == ("", "")
    (path,) = tmp_path.glob("runs/*/evaluations/*/record.json")
    assert read_record(path).environment.processes == 2
    alone = start(*words, cwd=tmp_path).end()
    assert alone.code == 0 and "already done" in alone.err, "the same run, in however many processes"


def test_stopping_one_stops_all_with_one_checkpoint(folder: Path, tmp_path: Path) -> None:
    words = (*WORDS, "--data", str(folder), "--set", "training.steps=4000")
    port = free_port()
    work = [start(*words, cwd=tmp_path, before=functools.partial(as_rank, rank, 2, port)) for rank in range(2)]
    assert work[0].wait_for(lambda: any(tmp_path.glob("runs/*/checkpoint/step-0000000[5-9]")))
    work[1].send(signal.SIGTERM)
    ends = [each.end() for each in work]
    assert [each.code for each in ends] == [1, 1]
    assert "training stopped at step" in ends[0].err and "the same command goes on from there" in ends[0].err
    newest = max(path.name for path in tmp_path.glob("runs/*/checkpoint/step-*"))
    assert f"stopped at step {int(newest.removeprefix('step-'))} of 4000" in ends[0].err


@pytest.mark.parametrize("killed", [0, 1])
def test_killing_one_ends_the_other_and_changes_nothing(folder: Path, tmp_path: Path, killed: int) -> None:
    words = (*WORDS, "--data", str(folder), "--set", "keep=5")
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    port = free_port()
    work = [start(*words, cwd=tmp_path / "cut", before=functools.partial(as_rank, rank, 2, port)) for rank in range(2)]
    assert work[0].wait_for(lambda: any(tmp_path.glob("cut/runs/*/checkpoint/step-00000005")))
    work[killed].send(signal.SIGKILL)
    ends = [each.end() for each in work]
    assert ends[killed].code == -signal.SIGKILL and ends[1 - killed].code == 1
    assert ends[1 - killed].err.splitlines()[-1] == (
        "bench: another of the 2 processes ended, or can't be reached any more; the same command goes on from the last "
        "checkpoint"
    )
    assert "Traceback" not in ends[1 - killed].err
    for name in ("whole", "cut"):
        done = start(*words, cwd=tmp_path / name).end()
        assert done.code == 0 and ("going on from step" in done.err) == (name == "cut")
    # Two processes round otherwise than one: the same data, and all but the same weights.
    (whole,), (cut,) = (
        [read_record(p) for p in tmp_path.glob(f"{name}/runs/*/evaluations/*/record.json")] for name in ("whole", "cut")
    )
    assert whole.training and cut.training and whole.training.tokens == cut.training.tokens
    assert cut.training.final_loss == pytest.approx(whole.training.final_loss, abs=1e-4)
    assert [cell.bits_per_byte for cell in cut.cells] == pytest.approx(
        [cell.bits_per_byte for cell in whole.cells], abs=1e-4
    )


def test_what_stops_the_first_alone_is_said_once(folder: Path, tmp_path: Path) -> None:
    """Another run holds the folder: only the first process asks for it."""
    words = (*WORDS, "--data", str(folder), "--set", "training.steps=4000")
    other = start(*words, cwd=tmp_path)
    assert other.wait_for(lambda: any(tmp_path.glob("runs/*/checkpoint/step-*")))
    port = free_port()
    work = [start(*words, cwd=tmp_path, before=functools.partial(as_rank, rank, 2, port)) for rank in range(2)]
    ends = [each.end() for each in work]
    other.send(signal.SIGKILL)
    other.end()
    assert [each.code for each in ends] == [1, 1]
    said = [each.err.splitlines()[-1] for each in ends]
    assert "another process is" in said[0] and said[1].startswith("bench: another of the 2 processes ended")
    assert "Traceback" not in ends[0].err + ends[1].err


def test_a_request_to_stop_is_never_lost(folder: Path, tmp_path: Path) -> None:
    """Whenever it comes: also while the processes add up who was asked to, and while the first one writes."""
    together(_interrupted, folder, tmp_path, folder=tmp_path)


def _interrupted(world: World, data: Path, root: Path) -> None:
    really_sums, really_save = World.sums, training._save

    def stopped(name: str, steps: int = STEPS) -> str:
        with pytest.raises(InterruptedRunError) as error:
            trained(world, config(data, checkpoint_seconds=0, training={"steps": steps}), root / name)
        return str(error.value).partition(";")[0]

    asked = 0

    def sums(self: World, *numbers: float) -> list[float]:
        nonlocal asked
        found = really_sums(self, *numbers)
        asked += 1
        if asked == 6 and not world.first:  # three a step: the last one of the second
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    def save(work: Any, *rest: Any) -> None:
        if work.step == 2 and world.first:
            os.kill(os.getpid(), signal.SIGINT)
        really_save(work, *rest)

    World.sums = sums  # type: ignore[method-assign]
    try:
        assert stopped("sums") == f"training stopped at step 3 of {STEPS}"
    finally:
        World.sums = really_sums  # type: ignore[method-assign]
    training._save = save
    try:
        assert stopped("save") == f"training stopped at step 3 of {STEPS}"
        assert stopped("last", steps=2) == "training stopped at step 2 of 2"
    finally:
        training._save = really_save


def test_torchrun(folder: Path, tmp_path: Path) -> None:
    words = (*WORDS, "--data", str(folder), "--set", "training.steps=3", "--quiet")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", str(free_port()), "-m", "decaybench.cli", *words),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bits/byte by position") == 1
    (path,) = tmp_path.glob("runs/*/evaluations/*/record.json")
    assert read_record(path).environment.processes == 2


# --- alone


def test_alone_there_is_nothing_to_share() -> None:
    assert ALONE.sums(1.5, 2) == [1.5, 2]
    assert ALONE.tell("x") == "x" and ALONE.gather("x") == ["x"] and ALONE.first
    module = torch.nn.Linear(2, 2)
    assert ALONE.shared(module, [], "fsdp") is module
    with joined("cpu") as world:
        assert (world.rank, world.size, world.device) == (0, 1, "cpu")


@pytest.mark.parametrize("said", ["two", "0", "-1", ""])
def test_a_wrong_number_of_processes_is_said(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", said)
    with pytest.raises(UserError, match="is not a number of processes; torchrun sets it"):
        expected_processes()
