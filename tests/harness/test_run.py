"""A run from its configuration to its record: nothing is done twice, and every way to ask for it gives the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import decaybench
from decaybench.core.errors import UserError
from decaybench.harness import evaluation as harness_evaluation
from decaybench.harness import run as harness_run
from decaybench.harness import training
from decaybench.harness.config import RunConfig, make_config
from decaybench.harness.model_info import model_info
from decaybench.harness.presets import configure
from decaybench.harness.progress import Progress
from decaybench.harness.run import carry_out, carry_out_all
from decaybench.models.checkpoints import checkpoints_in, read_checkpoint, write_checkpoint
from decaybench.models.language_model import build_model
from decaybench.results.leaderboard import rows
from decaybench.results.record import Record, read_record
from tests.command import MQAR, NIAH, bench

Finished = Callable[[str], Path]

DATA: dict[str, Any] = {  # what the command NIAH asks for, preset and all
    "model": {"d_model": 16, "n_layers": 2, "mixer": {"d_state": 8, "headdim": 8}},
    "task": {"name": "niah", "train_length": 32},
    "training": {"steps": 12, "batch_tokens": 128, "warmup": 2},
    "evaluation": {"lengths": ["1x", "2x"], "samples": 8, "depths": [0, 0.5, 1]},
}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def samples(folder: Path) -> dict[str, bytes]:
    """Every answer of a run's only evaluation, cell by cell."""
    found = {path.name: path.read_bytes() for path in folder.glob("evaluations/*/samples/*.jsonl")}
    assert found
    return found


def outcome(record: Record | dict[str, Any]) -> dict[str, Any]:
    """A record without where it ran and what it took."""
    plain = record.plain() if isinstance(record, Record) else record
    return {key: plain[key] for key in plain if key not in ("environment", "cost", "record_id")}


def json_of(*words: str) -> dict[str, Any]:
    result = bench(*words, "--json")
    assert result.code == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The training steps that are really taken."""
    taken: list[int] = []
    really = training._one_step
    monkeypatch.setattr(training, "_one_step", lambda work, *rest: (taken.append(work.step), really(work, *rest))[1])
    return taken


# --- nothing twice


@pytest.mark.parametrize(
    "other", [("--eval-lengths", "4x"), ("--samples", "3"), ("--depths", "0.25"), ("--variants", "multikey")]
)
def test_another_evaluation_doesnt_train_again(
    here: Path, finished: Finished, steps: list[int], other: tuple[str, ...]
) -> None:
    folder = finished("niah")
    before = contents(folder)
    result = bench(*NIAH, *other)
    assert result.code == 0 and "training" not in result.err
    assert steps == []
    after = contents(folder)
    assert {name: after[name] for name in before} == before, "checkpoints, log, configuration and the first evaluation"
    assert {name.split("/")[0] for name in set(after) - set(before)} == {"evaluations"}
    assert len(list(folder.glob("evaluations/*/record.json"))) == 2
    assert len(list((here / "runs").iterdir())) == 1


def test_what_is_done_is_shown_again(here: Path, finished: Finished, steps: list[int]) -> None:
    folder = finished("niah")
    before = contents(folder)
    (path,) = folder.glob("evaluations/*/record.json")
    assert json_of(*NIAH) == json.loads(path.read_text())
    assert contents(folder) == before and steps == []


def test_where_it_computes_changes_no_folder(here: Path, finished: Finished, steps: list[int]) -> None:
    finished("niah")
    assert bench(*NIAH, "--device", "cpu", "--backend", "torch", "--set", "checkpoint_seconds=1").code == 0
    assert steps == [] and len(list((here / "runs").iterdir())) == 1


def test_force_trains_anew(here: Path, finished: Finished, steps: list[int]) -> None:
    folder = finished("niah")
    (path,) = folder.glob("evaluations/*/record.json")
    (folder / "evaluations" / "older").mkdir()
    before = json.loads(path.read_text())
    after = json_of(*NIAH, "--force")
    assert steps == list(range(12))
    assert outcome(after) == outcome(before)
    assert [entry.name for entry in (folder / "evaluations").iterdir()] == [path.parent.name]
    assert (folder / "log.jsonl").read_text().count("\n") == 1, "of this training alone"


def test_each_training_has_a_folder_of_its_own(here: Path, finished: Finished) -> None:
    finished("niah")
    for other in (
        ("--seed", "1"),
        ("--post",),
        ("--set", "training.learning_rate=0.001"),
        ("--set", "task.hay_tokens=8"),
    ):
        assert bench(*NIAH, *other).code == 0
    folders = sorted(path.name for path in (here / "runs").iterdir())
    assert len(folders) == 5
    assert sum(name.startswith("niah-mamba2+post-") for name in folders) == 1


def test_the_folder_holds_what_the_design_says(here: Path) -> None:
    record = json_of(*NIAH)
    (folder,) = (here / "runs").iterdir()
    evaluation = next((folder / "evaluations").iterdir())
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    cells = [cell["name"] for cell in record["cells"]]
    assert names == {
        *(".lock", "config.yaml", "log.jsonl"),
        *(f"checkpoint/step-00000012/{name}" for name in ("facts.json", "model.safetensors", "optimiser.safetensors")),
        f"evaluations/{evaluation.name}/record.json",
        *(f"evaluations/{evaluation.name}/samples/{cell}.jsonl" for cell in cells),
    }
    assert folder.name.startswith("niah-mamba2-") and len(cells) == 6


def test_several_seeds(here: Path, steps: list[int]) -> None:
    outcomes = carry_out_all([make_config(DATA, {"seed": seed}) for seed in (2, 0)], progress=Progress(quiet=True))
    assert [found.record.seed for found in outcomes] == [2, 0]
    assert steps == [*range(12), *range(12)]
    losses = [found.record.training.final_loss for found in outcomes if found.record.training]
    assert len(set(losses)) == 2
    assert all(read_record(found.evaluation.record_path) == found.record for found in outcomes)


# --- the same by every way


def test_python_and_the_command_line_give_the_same(here: Path, finished: Finished) -> None:
    finished("niah")
    by_command = json_of(*NIAH)
    record = decaybench.run({**DATA, "out": "elsewhere"})
    assert isinstance(record, decaybench.Record)
    assert outcome(record) == outcome(by_command)
    assert len(list((here / "elsewhere").iterdir())) == 1
    config = RunConfig(**{**DATA, "out": "third"})
    assert outcome(decaybench.run(config)) == outcome(by_command)
    (by_flags,) = configure("niah", flags={"model.d_model": 16, "task.train_length": 32}, settings=NIAH_SETTINGS)
    assert by_flags.training_hash == config.training_hash


NIAH_SETTINGS = [
    *(
        "model.mixer={d_state: 8, headdim: 8}",
        "training={steps: 12, batch_tokens: 128, warmup: 2, learning_rate: 0.01}",
    ),
]


def test_python_says_nothing_unless_asked(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    decaybench.run({**DATA, "training": {**DATA["training"], "steps": 2}})
    assert capfd.readouterr() == ("", "")
    decaybench.run(DATA, quiet=False)
    printed = capfd.readouterr()
    assert printed.out == "" and "training 12/12" in printed.err


def test_python_raises_what_the_command_line_prints(here: Path) -> None:
    with pytest.raises(UserError, match=r"unknown key 'training\.step' \(value 5\); did you mean 'steps'\?"):
        decaybench.run({"task": {"name": "niah"}, "training": {"step": 5}})
    with pytest.raises(UserError, match=r"task\.name is missing"):
        decaybench.run({})
    assert list(here.iterdir()) == []


def test_python_forces_too(here: Path, steps: list[int]) -> None:
    decaybench.run(DATA)
    decaybench.run(DATA)
    assert len(steps) == 12
    decaybench.run(DATA, force=True)
    assert len(steps) == 24


# --- a checkpoint is evaluated


@pytest.mark.parametrize("task", ["niah", "mqar"])
def test_a_run_as_checkpoint_gives_the_values_of_the_run(
    here: Path, finished: Finished, steps: list[int], task: str
) -> None:
    folder = finished(task)
    words = {"niah": NIAH, "mqar": MQAR}[task]
    run = json_of(*words)
    before = contents(folder)
    asked = ("--eval-lengths", "1x,2x", "--samples", "8", *(("--depths", "0,0.5,1") if task == "niah" else ()))
    newest = checkpoints_in(folder / "checkpoint")[-1]
    for path in (folder, folder / "checkpoint", newest):
        found = json_of(task, "--checkpoint", str(path), *asked)
        assert found["cells"] == run["cells"]
        assert found["task"] == run["task"]
        assert found["model"] == run["model"]
        sha256 = read_checkpoint(newest).sha256
        assert found["checkpoint"] == {
            **{"source": folder.name, "sha256": sha256},
            **{"train_length": 32, "longest_trained": 32},
        }
        assert samples(here / "runs" / f"{task}-mamba2-{sha256[:12]}") == samples(folder)
        assert "training" not in found and "train_seconds" not in found["cost"]
        assert found["seed"] == run["seed"]
    assert steps == [] and contents(folder) == before
    assert len(list((here / "runs").iterdir())) == 2, "one more folder, named after the weights"


def test_a_checkpoint_says_what_was_wrong_in_its_training(here: Path) -> None:
    """Else a model that was trained on wrong labels would stand beside the others as a clean one."""
    json_of(*MQAR, "--label-noise", "0.4")
    (folder,) = (here / "runs").iterdir()
    found = json_of("mqar", "--checkpoint", str(folder), "--eval-lengths", "1x", "--samples", "2", "--out", "second")
    assert found["checkpoint"]["label_noise"] == 0.4
    (path,) = here.glob("second/*/evaluations/*/record.json")
    (row, *_) = rows([read_record(path)])
    assert row.settings["training.label_noise"] == 0.4
    (facts,) = folder.glob("checkpoint/*/facts.json")
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "label_noise": "much"}))
    code, _, err = bench("mqar", "--checkpoint", str(folder))
    assert code == 2 and "label_noise='much', not a share" in err


def test_a_checkpoint_of_another_seed_says_so(here: Path) -> None:
    json_of(*NIAH, "--seed", "6")
    (folder,) = (here / "runs").iterdir()
    assert json_of("niah", "--checkpoint", str(folder), "--samples", "2")["seed"] == 6


def test_what_is_asked_of_a_checkpoint_is_never_mixed_up(here: Path, finished: Finished) -> None:
    """The same weights, two vocabularies of hay: two evaluations, although both lie in one folder."""
    folder = finished("niah")
    asked = ("niah", "--checkpoint", str(folder), "--samples", "8", "--eval-lengths", "64")
    one = json_of(*asked)
    other = json_of(*asked, "--set", "task.hay_tokens=8")
    third = json_of(*asked, "--set", "training.dtype=bfloat16")
    assert one["task"]["data_hash"] != other["task"]["data_hash"]
    assert other["task"]["config"]["hay_tokens"] == 8
    assert third["environment"]["dtype"] == "bfloat16" and one["environment"]["dtype"] == "float32"
    assert json_of(*asked) == one


def test_a_checkpoint_of_another_task_with_a_vocabulary_large_enough(here: Path, finished: Finished) -> None:
    folder = finished("mqar")
    found = json_of("niah", "--checkpoint", str(folder), "--samples", "2", "--eval-lengths", "32", "--depths", "0.5")
    assert found["task"]["name"] == "niah" and found["model"]["config"]["vocab_size"] == 272
    assert found["task"]["config"]["train_length"] == found["checkpoint"]["train_length"] == 32, "the checkpoint's"
    assert [cell["ratio"] for cell in found["cells"]] == [1.0]


def test_multiples_are_of_the_checkpoints_own_training_length(here: Path, finished: Finished) -> None:
    """Also where it lies in no run, and the task's own training length would be another."""
    weights = checkpoints_in(finished("niah") / "checkpoint")[-1]
    shutil.copytree(weights, here / "given")
    asked = ("niah", "--checkpoint", "given", "--samples", "2", "--depths", "1")
    found = json_of(*asked, "--eval-lengths", "1x,2x")
    assert [(cell["eval_length"], cell["ratio"]) for cell in found["cells"]] == [(32, 1.0), (64, 2.0)]
    assert found["task"]["config"]["train_length"] == 32
    for layer in found["spectrum"]["layers"]:
        assert [at["position"] for at in layer["after"]] == [1, 32, 128, 512]
    python = decaybench.run({"task": {"name": "niah"}, "checkpoint": "given", "evaluation": {"lengths": ["3x"]}})
    assert {(cell.eval_length, cell.ratio) for cell in python.cells} == {(96, 3.0)}


def foreign(here: Path) -> tuple[str, ...]:
    """A checkpoint that doesn't say how long it was trained, and the command that evaluates it."""
    config = make_config(DATA)
    write_checkpoint(here / "given", build_model(config.model, 4), 4, {}, {})
    return "niah", "--checkpoint", "given", "--samples", "2", "--depths", "1"


def test_an_unknown_training_length_makes_no_ratio(here: Path) -> None:
    found = json_of(*foreign(here), "--eval-lengths", "64,32")
    assert found["checkpoint"] == {"source": "given", "sha256": found["checkpoint"]["sha256"]}
    assert [(cell["eval_length"], "ratio" in cell) for cell in found["cells"]] == [(64, False), (32, False)]
    (path,) = here.glob("runs/*/evaluations/*/record.json")
    record = read_record(path)
    assert record.train_length is None and record.longest_trained is None


@pytest.mark.parametrize("lengths", [(), ("--eval-lengths", "64,2x")])
def test_multiples_of_an_unknown_training_length_are_refused(here: Path, lengths: tuple[str, ...]) -> None:
    code, out, err = bench(*foreign(here), *lengths)
    named = "2x" if lengths else "1x"
    assert (code, out) == (2, "")
    assert err == (
        f"bench: --eval-lengths: '{named}' needs a training length, and this checkpoint doesn't say its own: "
        "write tokens\n"
    )
    assert not (here / "runs").exists()


@pytest.mark.parametrize("stated", [0, True, "32", 1.5])
def test_a_checkpoint_with_an_impossible_training_length_is_damaged(here: Path, stated: Any) -> None:
    words = foreign(here)
    facts = json.loads((here / "given" / "facts.json").read_text())
    (here / "given" / "facts.json").write_text(json.dumps({**facts, "train_length": stated}))
    code, out, err = bench(*words, "--eval-lengths", "64")
    assert (code, out) == (2, "")
    assert f"facts.json has train_length={stated!r}, not a number of tokens" in err


def test_a_checkpoint_with_too_small_a_vocabulary(here: Path, finished: Finished) -> None:
    folder = finished("niah")
    code, out, err = bench("mqar", "--checkpoint", str(folder))
    assert (code, out) == (2, "")
    assert "has a vocabulary of 195 tokens; task mqar needs 272" in err
    assert len(list((here / "runs").iterdir())) == 1


def test_a_checkpoint_from_elsewhere(here: Path) -> None:
    config = make_config(DATA)
    model = build_model(config.model, 4)
    write_checkpoint(here / "given", model, 4, {}, {})
    asked = ("niah", "--checkpoint", "given", "--eval-lengths", "64,32", "--samples", "2", "--depths", "1")
    found = json_of(*asked)
    assert [cell["eval_length"] for cell in found["cells"]] == [64, 32]
    assert found["checkpoint"]["source"] == "given" and found["seed"] == 4
    with torch.no_grad():
        model.embedding.weight.add_(1.0)
    write_checkpoint(here / "given", model, 4, {}, {})
    assert json_of(*asked)["checkpoint"]["sha256"] != found["checkpoint"]["sha256"], "other weights, another run"
    assert len(list((here / "runs").iterdir())) == 2


def test_a_damaged_checkpoint_is_not_evaluated(here: Path, finished: Finished) -> None:
    folder = finished("niah")
    weights = checkpoints_in(folder / "checkpoint")[-1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, out, err = bench("niah", "--checkpoint", str(folder))
    assert (code, out) == (2, "") and "model.safetensors is cut short or changed" in err


# --- the record


def test_a_record_says_what_was_done(here: Path, finished: Finished) -> None:
    finished("niah")
    record = carry_out(make_config(DATA), progress=Progress(quiet=True)).record
    config = make_config(DATA)
    assert record.task.config == config.task.plain() and record.task.evaluation == config.evaluation.plain()
    assert (record.task.name, record.task.version, record.task.metric) == ("niah", 1, "all_correct")
    assert record.model.config == config.model.plain() and record.model.cell == "mamba2"
    assert record.training is not None and record.checkpoint is None
    assert record.training.training_hash == config.training_hash
    assert (record.training.steps, record.training.train_length) == (12, 32)
    assert record.comparable_to is None
    assert record.cost.train_seconds is not None and 0 < record.cost.train_seconds < 60
    assert record.cost.train_tokens_per_second == pytest.approx(record.training.tokens / record.cost.train_seconds)
    assert record.environment.threads == 1 and record.environment.batch_tokens == 16_384


def test_the_models_sizes_are_counted(here: Path) -> None:
    """d_model 16, expand 2, headdim 8, d_state 8, 2 layers, 195 tokens: all by hand."""
    found = model_info(build_model(make_config(DATA).model), 32)
    inner, heads, state, vocabulary = 32, 4, 8, 195
    convolved = inner + 2 * state
    mixer = 16 * (inner + convolved + heads) + convolved * 4 + convolved + 3 * heads + inner + inner * 16
    assert found.parameters.trainable == vocabulary * 16 + 2 * (mixer + 16) + 16
    assert found.parameters.embedding == vocabulary * 16
    assert found.parameters.not_decayed == 2 * (convolved + 3 * heads + inner + 16) + 16
    assert found.state_elements == (heads * 8 * state + 3 * convolved,) * 2
    frozen = model_info(build_model(make_config(DATA, {"model": {"post": {}}}).model), 32)
    assert frozen.addons == ("post",) and frozen.cell == "mamba2+post"
    assert frozen.state_elements == found.state_elements
    # PoST's base and gaps stand where P stood, a number a head; dt_bias is frozen, and decayed nothing before either.
    for counts in ("trainable", "not_decayed"):
        assert getattr(frozen.parameters, counts) == getattr(found.parameters, counts) - 2 * heads
    tracked = model_info(build_model(make_config(DATA, {"model": {"post": {}, "bft": {}}}).model), 32)
    assert tracked.addons == ("post", "bft") and tracked.cell == "mamba2+post+bft"
    # log tau a token, and a q a channel but in the last layer; none decays.
    for counts in ("trainable", "not_decayed"):
        assert getattr(tracked.parameters, counts) == getattr(frozen.parameters, counts) + vocabulary + 16
    assert tracked.parameters.embedding == found.parameters.embedding
    assert tracked.state_elements == (found.state_elements[0] + 3 * heads + 2 * inner,) * 2
    on_meta = build_model(make_config(DATA).model, device="meta")
    assert model_info(on_meta, 32) == found, "no values are needed"


def test_spectrum_in_the_record(here: Path, finished: Finished) -> None:
    finished("niah")
    record = carry_out(make_config(DATA), progress=Progress(quiet=True)).record
    assert record.spectrum is not None
    assert [layer.layer for layer in record.spectrum.layers] == [0, 1]
    for layer in record.spectrum.layers:
        assert [at.position for at in layer.after] == [1, 32, 128, 512]
        assert layer.at_start is not None and layer.at_start != layer.after
        assert all(at.slowest >= at.median >= at.fastest > 0 for at in layer.after)
    attention = {**DATA, "model": {"name": "attention", "d_model": 16}}
    assert carry_out(make_config(attention), progress=Progress(quiet=True)).record.spectrum is None


def test_a_failure_to_draw_leaves_an_evaluation_that_goes_on(
    here: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished("niah")
    shutil.rmtree(folder / "evaluations")

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(harness_run, "_draw", fails)
        assert bench(*NIAH, "--quiet") == (1, "", "bench: stopped; the same command goes on from where it was\n")
    assert not list(folder.rglob("record.json"))
    record = json_of(*NIAH)
    assert "evaluation_tokens_per_second" not in record["cost"], "no sample was asked again"


def test_a_clock_that_stands_still_divides_nothing(
    here: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished("niah")
    shutil.rmtree(folder / "evaluations")
    monkeypatch.setattr(harness_evaluation.time, "monotonic", lambda: 7.0)
    record = json_of(*NIAH)
    assert record["cost"]["evaluation_seconds"] == 0
    assert "evaluation_tokens_per_second" not in record["cost"]
