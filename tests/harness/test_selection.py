"""`--select`: the validation chooses the learning rate and the step, and what is claimed of it can be recomputed."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decaybench.core.errors import RunError, UserError
from decaybench.harness import evaluation, selection, training
from decaybench.harness import run as harness_run
from decaybench.harness.config import RunConfig, make_config
from decaybench.harness.presets import learning_rates
from decaybench.harness.progress import Progress
from decaybench.harness.selection import select, validation_cells, validation_seed
from decaybench.harness.training import DivergedError
from decaybench.harness.verify import add_to_leaderboard, verify
from decaybench.models.checkpoints import read_checkpoint
from decaybench.results.leaderboard import rows
from decaybench.results.record import Record, SelectionInfo, read_record, seal
from decaybench.results.run_folder import EvaluationFolder
from decaybench.tasks.registry import make_task
from tests.command import MQAR, TINY, bench, start

RATES = (0.003, 0.01)
SELECT = ("mqar", *TINY[:-2], "--samples", "4", "--select", "--learning-rates", "0.01,0.003")  # less the rate of TINY
QUIET = Progress(quiet=True)

# What the rigged model gets right, by rate and step: on validation, and on the test.
SHARES = {
    (0.003, 3): (0.2, 0.2),
    (0.003, 6): (0.9, 0.3),  # chosen: of those with 0.9 the one with fewer steps
    (0.003, 9): (0.9, 0.9),
    (0.003, 12): (0.5, 0.4),
    (0.01, 3): (0.1, 0.1),
    (0.01, 6): (0.3, 1.0),  # best on the test, by far
    (0.01, 9): (0.9, 0.8),
    (0.01, 12): (0.7, 0.6),
}


def config(**settings: Any) -> RunConfig:
    data = {
        "model": {"d_model": 16, "mixer": {"d_state": 8, "headdim": 8}},
        "task": {"name": "mqar", "train_length": 32},
        "training": {"steps": 12, "batch_tokens": 128, "warmup": 2},
        "evaluation": {"lengths": ["1x", "2x"], "samples": 20},
    }
    return make_config(data, settings)


@pytest.fixture
def rigged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int, str]]:
    """Answers that are right in the shares of SHARES, whatever the model; the list of what was asked."""
    asked: list[tuple[float, int, str]] = []
    ask = selection.ask

    def watched(model: Any, config: RunConfig, cells: Any, folder: EvaluationFolder, **more: Any) -> Any:
        step = int(folder.path.parent.name.removeprefix("step-"))
        asked.append((config.training.learning_rate, step, more["split"]))
        return ask(model, config, cells, folder, **more)

    def predict(model: Any, batch: Any, device: str, **_: Any) -> evaluation.Answers:
        rate, step, split = asked[-1]
        first = batch.labels[batch.asked].copy()
        first[round(SHARES[rate, step][split == "test"] * len(first)) :] = 0
        return evaluation.Answers(first)

    monkeypatch.setattr(selection, "ask", watched)
    monkeypatch.setattr(evaluation, "predict", predict)
    return asked


def selected(record: Record) -> SelectionInfo:
    assert record.selection is not None and record.training is not None
    return record.selection


def test_the_validation_chooses_the_rate_and_the_step(here: Path, rigged: list[tuple[float, int, str]]) -> None:
    outcome = select(config(), RATES, progress=QUIET)
    record, found = outcome.record, selected(outcome.record)
    assert (found.chosen.learning_rate, found.chosen.step) == (0.003, 6)
    assert found.chosen.value == pytest.approx(0.9, abs=0.05)
    assert [cell.value for cell in record.cells] == pytest.approx([0.3] * 4, abs=0.05)
    test = found.chosen_on_test
    assert {(one.learning_rate, one.step, one.value) for one in (*test.by_cell, test.by_mean)} == {(0.01, 6, 1.0)}
    assert sorted(rigged) == sorted((*at, split) for at in SHARES for split in ("test", "validation"))

    # The record is that of the checkpoint: steps, rate, stages' batches, and where it lies.
    training = record.training
    assert training is not None
    assert (training.steps, training.learning_rate, sum(stage.batches for stage in training.stages)) == (6, 0.003, 6)
    checkpoint = read_checkpoint(outcome.run.checkpoint / "step-00000006")
    assert (training.tokens, training.final_loss) == (checkpoint.facts["tokens"], checkpoint.facts["loss"])
    assert training.training_hash[:12] in outcome.evaluation.path.parts[-3]

    # The validation set: the training's sizes, another seed and split than the test's.
    shapes = [stage.shape.plain() for stage in make_task(config().task).stages()]
    assert [cell.shape for cell in found.validation.cells] == shapes
    assert found.validation.seed not in (record.seed, record.task.evaluation["seed"])
    assert found.validation.data_hash != record.task.data_hash

    # Again: nothing is asked twice, and the same record comes back.
    rigged.clear()
    assert select(config(), RATES, progress=QUIET).record == record
    assert rigged == []
    assert list(add_to_leaderboard(here / "board.json", [outcome.run.path])) == [(outcome.evaluation.record_path, True)]
    check_forgeries(record, outcome.evaluation)


def check_forgeries(record: Record, folder: EvaluationFolder) -> None:
    """What a selection may not say, though its own numbers agree with one another."""

    def forged(change: Callable[[dict[str, Any]], Any], where: EvaluationFolder | None, message: str) -> None:
        content = json.loads(record.to_json())
        change(content["selection"])
        with pytest.raises(UserError, match=message) as error:
            verify(seal(content), where)
        assert "\n" not in str(error.value)

    verify(record)
    for where in (folder, None):
        forged(lambda found: found["validation"].update(seed=0), where, r"validation\.seed=0 is the run's")
        forged(lambda found: found["validation"].update(seed=5), where, r"validation\.data_hash is not")
        forged(lambda found: found["validation"]["cells"][0].update(n=21), where, "validation cells are not the sizes")
        forged(lambda found: found["validation"]["cells"][0]["shape"].update(kv=1), where, "are not the sizes")
        forged(lambda found: found["runs"][1].update(training_hash="f" * 64), where, "0.01 has training_hash ffff")
        forged(lambda found: found.update(steps_by_epoch=3), where, "steps_by_epoch is 3, but .* None")
        forged(lambda found: found["chosen"].update(step=9), where, r"training\.steps is 6, .* it is 9")

    # Another point's validation made worse, means and all, shows in its answers alone.
    def worse(found: dict[str, Any]) -> None:
        found["runs"][1]["points"][3].update(validation=[0.125, 0.125, 0.125], validation_mean=0.125)

    content = json.loads(record.to_json())
    worse(content["selection"])
    verify(seal(content))
    forged(worse, folder, r"learning rate 0.01, step 12: validation-length32-stage1 is 0.125, but by its samples")

    runs = folder.path.parents[2]
    (other,) = (path for path in runs.iterdir() if path != folder.path.parents[1] and path.is_dir())
    (lines,) = other.glob("points/step-00000009/validation-*/samples/validation-length32-stage2.jsonl")
    kept = lines.read_text()
    lines.write_text(kept.replace('"score":1.0', '"score":0.0', 1))
    forged(lambda found: None, folder, r"stage2\.jsonl: sample \d+ is not the task's own")
    shutil.move(other, runs.parent / "elsewhere")
    forged(lambda found: None, folder, r"is missing; the runs of all learning rates belong beside the record's")


def test_each_seed_chooses_and_the_command_shows_both_numbers(here: Path, rigged: list[tuple[float, int, str]]) -> None:
    result = bench(*SELECT, "--seeds", "0,1", "--quiet")
    assert result.code == 0, result.err
    told = " ".join(result.out.split())  # titles are broken to their table's width
    for seed in (0, 1):
        assert re.search(rf"mamba2, seed {seed}: learning rate 0\.003 and step 6 of 12, by 0\.\d+ on validation", told)
    assert result.out.count("chosen on the test") >= 2
    records = [read_record(Path(line.split()[1])) for line in result.out.splitlines() if line.startswith("record ")]
    assert [record.seed for record in records] == [0, 1]
    assert len({selected(record).validation.data_hash for record in records}) == 1, "one validation set for all seeds"
    (row,) = {row.seeds["1x"] for row in rows(records)}
    assert row == 2


def test_a_rate_that_diverges_loses_what_comes_after(here: Path, rigged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one_step = training._one_step

    def diverging(work: Any, config: RunConfig, *more: Any) -> Any:
        if (config.training.learning_rate, work.step) in lost:
            raise DivergedError(f"training diverged at step {work.step}: the loss is nan", work.step)
        return one_step(work, config, *more)

    monkeypatch.setattr(training, "_one_step", diverging)
    lost = {(0.003, 5), (0.01, 10)}
    found = selected(select(config(), RATES, progress=QUIET).record)
    assert [(run.diverged, [point.step for point in run.points]) for run in found.runs] == [(5, [3]), (10, [3, 6, 9])]
    assert (found.chosen.learning_rate, found.chosen.step) == (0.01, 9)
    lost = {(0.003, 1), (0.01, 2)}
    with pytest.raises(RunError, match="diverged at every learning rate before its first candidate"):
        select(config(out="others"), RATES, progress=QUIET)


def test_epochs_are_the_candidates_of_a_plan_that_has_them() -> None:
    stages = [{"shape": {"length": 16, "kv": kv}, "examples": 24} for kv in (1, 2)]
    epochs = config(
        task={"name": "mqar", "train_length": 16, "stages": stages},
        training={"plan": "epochs", "epochs": 3, "batch_tokens": 128, "steps": None},
        evaluation={"pairs": [[16, 1]]},
    )
    assert selection.default_every(epochs) == 6
    assert selection.default_every(config()) == 3
    assert [one.keep for one in selection.learning_rate_grid(epochs, RATES)] == [6, 6]
    assert [one.keep for one in selection.learning_rate_grid(config(keep=5), RATES)] == [5, 5]
    assert [cell.name for cell in validation_cells(make_task(epochs.task))] == [
        "validation-length16-stage1",
        "validation-length16-stage2",
    ]


def test_the_validation_seed_is_neither_the_runs_nor_the_tests() -> None:
    usual = validation_seed(0, 1)
    assert len({usual, validation_seed(usual, 0), validation_seed(0, usual), validation_seed(usual, usual + 1)}) == 3
    for seed, other in ((0, 0), (usual, 0), (usual, usual + 1), (usual + 1, usual)):
        assert validation_seed(seed, other) not in (seed, other)


def test_grids_are_the_presets_or_those_named(tmp_path: Path) -> None:
    assert learning_rates("mqar", "rwkv7", preset="post-16k") == pytest.approx((10**-4.5, 1e-4, 10**-3.5))
    assert learning_rates("mqar", "gla", preset="post-16k") == pytest.approx((1e-3, 10**-2.5, 1e-2))
    assert len(learning_rates("mqar", "mamba2", preset="zoology-based")) == 4
    assert learning_rates("mqar", "mamba2", preset="post-16k", named=[0.5]) == (0.5,)
    file = tmp_path / "settings.yaml"
    file.write_text("model: {name: mamba2}\n")
    with pytest.raises(UserError, match="a file has no grid of learning rates"):
        learning_rates("mqar", "mamba2", file=file)
    assert learning_rates("mqar", "mamba2", file=file, named=[0.1, 0.2]) == (0.1, 0.2)
    file.write_text("training: {learning_rate: 0.1}\n")
    for more in ({"file": file}, {"settings": ["training.learning_rate=0.1"]}):
        with pytest.raises(UserError, match=r"--select chooses training\.learning_rate, which is set"):
            learning_rates("mqar", "mamba2", named=[0.1], **more)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*MQAR, "--learning-rates", "0.1"), "--learning-rates is for --select; one rate is --set"),
        ((*SELECT[:-1], "0.1,x"), "--learning-rates: 'x' is not a number; write 1e-3,3e-3"),
        ((*SELECT[:-1], "0.1,0.10"), "--learning-rates: a rate stands there twice"),
        ((*SELECT[:-1], "0.1,11"), "training.learning_rate=11.0: input should be less than 10"),
        ((*SELECT, "--set", "training.learning_rate=0.1"), "which is set: leave it out"),
        (("mqar", "--select", "--checkpoint", "runs/none"), "no checkpoint at runs/none"),
    ],
)
def test_wrong_words_are_one_line(here: Path, words: tuple[str, ...], message: str) -> None:
    result = bench(*words)
    assert result.code == 2 and result.out == ""
    assert message in result.err and result.err.count("\n") == 1
    assert not (here / "runs").exists()


def test_a_run_that_kept_nothing_is_not_chosen_from(here: Path) -> None:
    harness_run.carry_out(config(training={"learning_rate": RATES[0]}), progress=QUIET)
    with pytest.raises(UserError, match=r"trained without --select, and kept no checkpoint of step 3: --force trains"):
        select(config(), RATES, progress=QUIET)
    one = select(config(), RATES[:1], force=True, progress=QUIET).record
    assert [run.learning_rate for run in selected(one).runs] == [RATES[0]]


def numbers(folder: Path) -> dict[str, Any]:
    """All of a selection's outcome but where it ran and what it took."""
    (path,) = folder.glob("runs/*/evaluations/*/record.json")
    content = json.loads(path.read_text())
    for key in ("environment", "cost", "record_id"):
        del content[key]
    answers = {str(file.relative_to(folder)): file.read_text() for file in folder.glob("runs/**/samples/*.jsonl")}
    return {"record": content, "answers": answers, "path": str(path.relative_to(folder))}


def test_kill_9_at_random_moments_changes_nothing(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    done = start(*SELECT, cwd=whole).end()
    assert done.code == 0, done.err
    expected = numbers(whole)

    def files() -> int:
        return sum(1 for _ in killed.glob("runs/*/checkpoint/step-*")) + sum(
            1 for _ in killed.glob("runs/*/points/**/*")
        )

    draws, last = random.Random(1), 0
    total = sum(1 for _ in whole.glob("runs/*/points/**/*")) + 8
    for share in (0.02, 0.3, 0.6, 0.95):
        work = start(*SELECT, cwd=killed)
        last = max(last + 1, round(share * total))
        if work.wait_for(lambda reached=last: files() >= reached):
            work.process.join(timeout=draws.uniform(0, 0.02))
            work.send(signal.SIGKILL)
        assert work.end().code in (-signal.SIGKILL, 0)
    assert start(*SELECT, cwd=killed).end().code == 0
    assert numbers(killed) == expected
    (path,) = killed.glob("runs/*/evaluations/*/record.json")
    verify(read_record(path), EvaluationFolder(path.parent))


def test_damage_in_a_points_answers_is_repaired(here: Path, rigged: list[tuple[float, int, str]]) -> None:
    record = select(config(), RATES, progress=QUIET).record
    (path,) = here.glob("runs/*/evaluations/*/record.json")
    path.unlink()
    results = sorted(here.glob("runs/*/points/step-00000006/*/result.json"))
    results[0].write_text('{"values": [1.0], "data_hash": "' + "0" * 64 + '"}')
    (lines,) = results[1].parent.glob("samples/*stage1.jsonl") or results[1].parent.glob("samples/capacity-length32*")
    results[1].unlink()
    lines.write_text(lines.read_text()[:-30])
    rigged.clear()
    again = select(config(), RATES, progress=QUIET).record
    assert {step for _, step, _ in rigged} == {6}, "no other point is looked at"
    assert (again.selection, again.cells) == (record.selection, record.cells)
