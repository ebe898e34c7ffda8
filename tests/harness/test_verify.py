"""A leaderboard takes what recomputes, and nothing else: each way to change a record is refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.harness import verify as verification
from decaybench.harness.config import training_hash
from decaybench.harness.verify import add_to_leaderboard, validate_file, verify
from decaybench.models.language_model import LanguageModel
from decaybench.results.leaderboard import read_leaderboard
from decaybench.results.record import Record, parse_record, read_record, record_hash
from decaybench.results.run_folder import EvaluationFolder
from decaybench.results.statistics import cell_statistics
from decaybench.tasks.mqar import Mqar, MqarConfig
from decaybench.tasks.registry import make_task
from tests.command import MQAR, NIAH, bench

Finished = Callable[[str], Path]
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def run(here: Path, finished: Finished) -> Path:
    return finished("mqar")


def record_path(run: Path) -> Path:
    (path,) = run.glob("evaluations/*/record.json")
    return path


def resealed(content: dict[str, Any]) -> dict[str, Any]:
    """The content with its own hash as id: whoever changes a record can do that too."""
    return {**content, "record_id": record_hash(content)}


def recount(cell: dict[str, Any], metric: str = "mean_accuracy") -> None:
    value, error, interval = cell_statistics(metric, cell["correct"], cell["asked"])  # type: ignore[arg-type]
    cell.update(value=value, standard_error=error, interval=list(interval))


def refused(run: Path, edit: Edit | None = None) -> str:
    """The line with which `leaderboard add` refuses an edited record; the leaderboard stays as it was."""
    path = record_path(run)
    if edit:
        content = json.loads(path.read_text())
        edit(content)
        path.write_text(json.dumps(resealed(content)))
    board = Path("board.json")
    before = board.read_bytes() if board.exists() else None
    code, out, err = bench("leaderboard", "add", str(run), "--file", "board.json")
    assert (code, out) == (2, "")
    assert err.startswith("bench: ") and err.count("\n") == 1 and len(err) < 400
    assert (board.read_bytes() if board.exists() else None) == before
    return err


def refused_without_samples(run: Path, edit: Edit) -> str:
    """The line with which `leaderboard validate` refuses the record alone."""
    content = json.loads(record_path(run).read_text())
    edit(content)
    board = Path("edited.json")
    board.write_text(json.dumps({"schema_version": 1, "entries": [resealed(content)]}))
    code, out, err = bench("leaderboard", "validate", "edited.json")
    assert (code, out) == (2, "")
    assert err.startswith("bench: edited.json") and "entry 0" in err and err.count("\n") == 1
    return err


# --- what is right


@pytest.mark.parametrize("task", ["niah", "mqar", "mqar-noisy"])
def test_a_run_as_it_is_is_added_once(here: Path, finished: Finished, task: str) -> None:
    run = finished(task)
    path = record_path(run).relative_to(here)
    words = ("leaderboard", "add", f"runs/{run.name}", "--file", "board.json")
    assert bench(*words) == (0, f"added: {path}\n", "")
    before = Path("board.json").read_bytes()
    assert bench(*words) == (0, f"already there: {path}\n", "")
    assert Path("board.json").read_bytes() == before
    assert validate_file(Path("board.json")) == (1, ())
    assert read_leaderboard(Path("board.json")) == [read_record(path)]


def test_every_evaluation_of_a_run_is_added(here: Path, run: Path) -> None:
    assert bench(*MQAR, "--eval-lengths", "4x").code == 0
    found = list(add_to_leaderboard(Path("board.json"), [run]))
    assert [new for _, new in found] == [True, True]
    assert len(read_leaderboard(Path("board.json"))) == 2
    assert validate_file(Path("board.json")) == (2, ())


@pytest.mark.parametrize("place", ["run", "evaluation", "record"])
def test_a_run_an_evaluation_or_a_record_can_be_given(here: Path, run: Path, place: str) -> None:
    path = {"run": run, "evaluation": record_path(run).parent, "record": record_path(run)}[place]
    assert [new for _, new in add_to_leaderboard(Path("board.json"), [path])] == [True]


def test_a_record_of_a_checkpoint(here: Path, finished: Finished) -> None:
    run = finished("niah")
    assert bench("niah", "--checkpoint", str(run), "--samples", "3", "--eval-lengths", "1x,7").code == 0
    (other,) = (path for path in (here / "runs").iterdir() if path != run)
    assert [new for _, new in add_to_leaderboard(Path("board.json"), [other])] == [True]
    assert validate_file(Path("board.json")) == (1, ())


def test_with_post_and_listed_pairs(here: Path) -> None:
    words = ("--post", "--set", "evaluation.pairs=[[16,2],[64,8]]", "--seed", "3")
    asked = MQAR.index("--eval-lengths")
    assert bench(*MQAR[:asked], *MQAR[asked + 2 :], *words).code == 0
    refused = bench(*MQAR, *words)
    assert refused.code == 2 and "evaluation.lengths would be ignored" in refused.err
    (run,) = (here / "runs").iterdir()
    assert [new for _, new in add_to_leaderboard(Path("board.json"), [run])] == [True]
    assert validate_file(record_path(run)) == (1, ())


def test_a_checkpoint_that_does_not_say_its_training_length(here: Path, finished: Finished) -> None:
    (weights,) = finished("niah").glob("checkpoint/step-00000012")
    facts = json.loads((weights / "facts.json").read_text())
    (weights / "facts.json").write_text(json.dumps({**facts, "train_length": None, "longest_trained": None}))
    shutil.copytree(weights, here / "given")
    shutil.rmtree(here / "runs")
    assert bench("niah", "--checkpoint", "given", "--samples", "3", "--eval-lengths", "48,7").code == 0
    (run,) = (here / "runs").iterdir()
    assert [new for _, new in add_to_leaderboard(Path("board.json"), [run])] == [True]
    assert validate_file(Path("board.json")) == (1, ())
    claimed: Edit = lambda r: r["checkpoint"].update(train_length=24)  # noqa: E731
    assert "ratio is None, but 48 / 24 tokens is not" in refused_without_samples(run, claimed)
    claimed = lambda r: r["cells"][0].update(ratio=2.0)  # noqa: E731
    assert "ratio is 2.0, but no training length is known" in refused_without_samples(run, claimed)
    claimed = lambda r: r["task"]["evaluation"].update(lengths=["2x", "7"])  # noqa: E731
    assert "'2x' needs a training length" in refused_without_samples(run, claimed)


def of_theirs(run: Path, **changes: Any) -> dict[str, Any]:
    """The run's record as one of another package's architecture, which isn't installed here, its hash made anew."""
    content: dict[str, Any] = json.loads(record_path(run).read_text())
    config = {**content["model"]["config"], "name": "theirs", "mixer": {"their_size": 3}}
    content["model"].update(architecture="theirs", cell="theirs", config=config, backend="their_kernels")
    task = make_task(parse(MqarConfig, content["task"]["config"]))
    training = content["training"]
    training["training_hash"] = training_hash(config, task, training["config"], training["seed"])
    for part, changed in changes.items():
        content[part].update(changed)
    return content


def test_a_record_of_an_architecture_that_is_not_here_is_accepted(run: Path) -> None:
    folder = EvaluationFolder(record_path(run).parent)
    content = of_theirs(run)
    verify(parse_record(resealed(content), "record"), folder)

    def said(**changes: Any) -> str:
        with pytest.raises(UserError) as error:
            verify(parse_record(resealed(of_theirs(run, **changes)), "record"), folder)
        return str(error.value)

    assert "model.cell is 'ours', but by the rest of the record it is 'theirs'" in said(model={"cell": "ours"})
    assert "model.architecture is 'ours', but" in said(model={"architecture": "ours", "cell": "ours"})
    assert "model.cell is 'theirs', but by the rest" in said(model={"addons": ["post"]})
    assert "training_hash is" in said(model={"config": {**content["model"]["config"], "d_model": 8}})
    assert "data_hash is not that" in said(task={"data_hash": "0" * 64})
    cells = json.loads(json.dumps(content["cells"]))
    cells[0]["asked"][0] += 1
    recount(cells[0])
    content = {**of_theirs(run), "cells": cells}
    with pytest.raises(UserError, match=r"by_distance has \d+ asked"):
        verify(parse_record(resealed(content), "record"), folder)


def test_a_state_that_needs_values_is_counted_from_a_small_model_alone(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = read_record(record_path(run))
    really = verification.state_elements
    counted: list[str] = []

    def needs_values(model: LanguageModel, length: int) -> tuple[int, ...]:
        device = model.embedding.weight.device.type
        if device == "meta":
            raise NotImplementedError("no values")
        counted.append(device)
        return really(model, length)

    monkeypatch.setattr(verification, "state_elements", needs_values)
    wrong = record.model_copy(update={"model": record.model.model_copy(update={"state_elements": (1, 1)})})
    verify(record)
    with pytest.raises(UserError, match=r"model.state_elements is \(1, 1\)"):
        verify(wrong)
    assert counted == ["cpu", "cpu"]
    monkeypatch.setattr(verification, "_SMALL", 100)
    verify(wrong)
    assert counted == ["cpu", "cpu"], "too large to be built for that"


# --- what was changed

CHANGES: dict[str, tuple[Edit, str]] = {
    "metric": (
        lambda r: (r["task"].update(metric="all_correct"), [recount(cell, "all_correct") for cell in r["cells"]]),
        "task mqar is scored by mean_accuracy, not by all_correct",
    ),
    "task name": (lambda r: r["task"].update(name="mqra"), "did you mean 'mqar'?"),
    "another task": (lambda r: r["task"].update(name="niah"), "task niah is scored by all_correct"),
    "task rule": (lambda r: r["task"]["config"].update(fill="zero"), "training_hash"),
    "task rule unknown": (lambda r: r["task"]["config"].update(fil="zero"), "unknown key 'task.fil'"),
    "data hash": (lambda r: r["task"].update(data_hash="0" * 64), "data_hash is not that of the task's samples"),
    "evaluation seed": (lambda r: r["task"]["evaluation"].update(seed=1), "cell 'capacity-length32-kv4': "),
    "evaluation lengths": (lambda r: r["task"]["evaluation"].update(lengths=["1x", "4x"]), "cells"),
    "samples said": (lambda r: r["task"]["evaluation"].update(samples=80), "n is 8, but evaluation.samples is 80"),
    "seed": (lambda r: r.update(seed=1), "seed is 1, but by the rest of the record it is 0"),
    "both seeds": (lambda r: (r.update(seed=1), r["training"].update(seed=1)), "training_hash is"),
    "training steps": (lambda r: r["training"]["config"].update(steps=1), "training_hash is"),
    "training hash": (lambda r: r["training"].update(training_hash="0" * 64), "training_hash is 000000000000"),
    "train length": (lambda r: r["training"].update(train_length=16), "ratio is 1.0, but 32 / 16"),
    "learning rate": (lambda r: r["training"].update(learning_rate=1e-5), "training.learning_rate is 1e-05"),
    "model size": (lambda r: r["model"]["config"].update(d_model=8), "training_hash is"),
    "model's name": (lambda r: r["model"].update(cell="mamba2+post"), "model.cell is 'mamba2+post'"),
    "architecture": (lambda r: r["model"].update(architecture="attention"), "model.cell"),
    "architecture and name": (
        lambda r: r["model"].update(architecture="attention", cell="attention"),
        "model.architecture is 'attention', but by the rest of the record it is 'mamba2'",
    ),
    "architecture that is not here": (
        lambda r: r["model"].update(architecture="theirs", cell="theirs"),
        "model.architecture is 'theirs', but by the rest of the record it is 'mamba2'",
    ),
    "add-ons": (lambda r: r["model"].update(addons=["post"], cell="mamba2+post"), "model.addons is ('post',)"),
    "backend": (lambda r: r["model"].update(backend="fla"), "model.backend is 'fla'; mamba2 has torch"),
    "parameters": (lambda r: r["model"]["parameters"].update(trainable=1), "model.parameters is {'trainable': 1"),
    "embedding": (lambda r: r["model"]["parameters"].update(embedding=0), "model.parameters is"),
    "not decayed": (lambda r: r["model"]["parameters"].update(not_decayed=0), "model.parameters is"),
    "state": (lambda r: r["model"].update(state_elements=[1, 400]), "model.state_elements is (1, 400)"),
    "stages": (lambda r: r["training"]["stages"].pop(), "training.stages is"),
    "stage": (lambda r: r["training"]["stages"][0]["shape"].update(kv=1), "training.stages is"),
    "batches": (lambda r: r["training"]["stages"][0].update(batches=11), "batches is 11, but by the rest"),
    "all steps": (lambda r: shorter(r["training"], steps=11), "training.steps is 11, but by the rest of the record"),
    "tokens": (lambda r: r["training"].update(tokens=12 * 128 + 1), "training.tokens is 1537, but"),
    "fewer tokens": (lambda r: r["training"].update(tokens=12 * 128 - 1), "training.tokens is 1535, but"),
    "longest": (lambda r: r["training"].update(longest_trained=16), "training.longest_trained is 16, but"),
    "longer than all": (lambda r: r["training"].update(longest_trained=64), "longest_trained is 64, longer than"),
    "protocol": (lambda r: r.update(comparable_to="zoology-based"), "comparable_to is 'zoology-based'"),
    "fewer cells": (lambda r: r["cells"].pop(), "its cells are not those of its evaluation"),
    "cells in another order": (lambda r: r["cells"].reverse(), "its cells are not those of its evaluation"),
    "value": (lambda r: r["cells"][0].update(value=1.0), "value is 1.0, but its counts give"),
    "standard error": (lambda r: r["cells"][0].update(standard_error=0.5), "standard_error is 0.5"),
    "interval": (lambda r: r["cells"][0].update(interval=[0.0, 0.1]), "interval.1 is 0.1"),
    "ratio": (lambda r: r["cells"][0].update(ratio=8.0), "ratio is 8.0"),
    "length": (lambda r: r["cells"][2].update(eval_length=64, ratio=2.0), "eval_length is 64, not 32"),
    "variant": (lambda r: r["cells"][0].update(variant="persist"), "variant is 'persist', not 'capacity'"),
    "kv": (lambda r: r["cells"][0]["coordinates"].update(kv=32), "coordinates is {'kv': 32}, not {'kv': 4}"),
    "depth": (lambda r: r["cells"][0]["coordinates"].update(depth=0.5), "coordinates is {'kv': 4, 'depth': 0.5}"),
    "samples a bin": (lambda r: r["cells"][0]["by_distance"][0].update(samples=1), "by_distance is not what it"),
    "true lengths": (lambda r: r["cells"][0]["real_tokens"].update(min=1), "real_tokens"),
    "questions": (lambda r: (r["cells"][0].update(asked=[1] * 8, correct=[0] * 8), flat(r["cells"][0])), "asked"),
    "distances": (lambda r: r["cells"][0].update(by_distance=[]), "by_distance"),
}


def shorter(training: dict[str, Any], steps: int) -> None:
    training.update(steps=steps)
    training["stages"][0].update(batches=steps)


def flat(cell: dict[str, Any]) -> None:
    cell["by_distance"] = [{"low": 4, "high": 8, "samples": 8, "asked": 8, "correct": 0}]
    recount(cell)


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_record_is_refused_with_and_without_its_samples(run: Path, what: str) -> None:
    edit, words = CHANGES[what]
    assert words in refused_without_samples(run, edit)
    assert words in refused(run, edit)


def test_a_record_changed_without_a_new_id_is_refused(run: Path) -> None:
    content = json.loads(record_path(run).read_text())
    content["cost"]["train_seconds"] = 1.0
    record_path(run).write_text(json.dumps(content))
    assert "it was changed" in refused(run)


def better(content: dict[str, Any]) -> None:
    """One more question of the first sample was right, and everything that follows from it."""
    cell = content["cells"][0]
    assert cell["correct"][0] < cell["asked"][0]
    cell["correct"][0] += 1
    for part in cell["by_distance"]:
        if part["correct"] < part["asked"]:
            part["correct"] += 1
            break
    recount(cell)


def test_a_better_count_is_refused_by_the_samples(run: Path) -> None:
    assert "cell 'capacity-length32-kv4': correct is not what it should be, by its samples" in refused(run, better)


@pytest.mark.parametrize("by", ["target", "answer", "distance", "id", "length", "score", "order", "index", "shape"])
def test_changed_samples_are_refused(run: Path, by: str) -> None:
    path = record_path(run).parent / "samples" / "persist-length64-kv4.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    line = lines[3]
    if by in ("target", "distance"):
        line[by][0] += 1
    elif by == "answer":
        assert line["answer"] != line["target"]
        line.update(answer=line["target"], score=1.0)
    elif by == "id":
        line[by] = "0" * 16
    elif by == "length":
        line[by] = 63
    elif by == "index":
        line[by] = 5
    elif by == "shape":
        line.update(target=[1], answer=[1], distance=[1])
    elif by == "score":
        line[by] = 0.125
    else:
        lines[3], lines[4] = {**lines[4], "index": 3}, {**lines[3], "index": 4}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = refused(run)
    if by == "index":
        assert "line 4 is damaged (index is 5, not 3)" in said
    elif by == "answer":
        assert "cell 'persist-length64-kv4': correct is not what it should be, by its samples" in said
    else:
        assert "cell 'persist-length64-kv4': sample 3 is not the task's own" in said


@pytest.mark.parametrize("by", ["missing", "short", "torn", "long", "all missing"])
def test_samples_that_are_not_all_there_are_refused(run: Path, by: str) -> None:
    path = record_path(run).parent / "samples" / "capacity-length64-kv8.jsonl"
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    if by == "missing":
        path.unlink()
    elif by == "all missing":
        shutil.rmtree(path.parent)
    else:
        path.write_bytes({"short": b"".join(lines[:-1]), "torn": content[:-5], "long": content + lines[-1]}[by])
    words = {
        "missing": "cell 'capacity-length64-kv8': its samples are missing",
        "all missing": "cell 'capacity-length32-kv4': its samples are missing",
        "short": "cell 'capacity-length64-kv8': 7 samples in its file, 8 in the record",
        "torn": "line 8 is damaged (cut short)",
        "long": "line 9 is damaged (index is 7, not 8)",
    }
    assert words[by] in refused(run)


def test_a_right_run_is_added_after_a_wrong_one_was_refused(here: Path, finished: Finished) -> None:
    wrong, right = finished("mqar"), finished("niah")
    refused(wrong, better)
    assert [new for _, new in add_to_leaderboard(Path("board.json"), [right])] == [True]
    refused(wrong)
    assert len(read_leaderboard(Path("board.json"))) == 1


# --- a leaderboard edited by hand


def test_validate_finds_edits_by_hand(here: Path, finished: Finished) -> None:
    for task in ("niah", "mqar"):
        list(add_to_leaderboard(Path("board.json"), [finished(task)]))
    board = Path("board.json")
    content = json.loads(board.read_text())
    assert validate_file(board) == (2, ())

    def said(edited: dict[str, Any]) -> str:
        board.write_text(json.dumps(edited))
        code, out, err = bench("leaderboard", "validate", "board.json")
        assert (code, out) == (2, "") and err.startswith("bench: board.json") and err.count("\n") == 1
        return err

    def edited(edit: Edit, seal: bool) -> dict[str, Any]:
        entries = json.loads(json.dumps(content["entries"]))
        edit(entries[1])
        return {**content, "entries": [entries[0], resealed(entries[1]) if seal else entries[1]]}

    assert "entry 1" in (line := said(edited(lambda r: r["cells"][0].update(value=0.9), seal=False))), line
    assert "it was changed" in line
    assert "value is 0.9, but its counts give" in said(edited(lambda r: r["cells"][0].update(value=0.9), seal=True))
    assert "data_hash" in said(edited(lambda r: r["task"].update(data_hash="1" * 64), seal=True))
    assert "the same record as entry 0" in said({**content, "entries": [content["entries"][0]] * 2})
    assert "schema_version 9" in said({**content, "schema_version": 9})
    assert "it must hold" in said({"entries": {}})
    assert "missing" in said(edited(lambda r: r.pop("cells"), seal=True))


def test_a_damaged_leaderboard_takes_nothing(here: Path, run: Path) -> None:
    Path("board.json").write_text('{"schema_version": 1, "entries": [')
    assert "board.json is not valid JSON" in refused(run)


def raise_task(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(Mqar, "version", 2)
    return "not recomputable here (task mqar version 1; here 2)"


def raise_harness(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(verification, "HARNESS_VERSION", 2)
    return "not recomputable here (harness version 1; here 2)"


@pytest.mark.parametrize("raised", [raise_task, raise_harness])
def test_records_of_another_version_stay_and_are_not_added(
    here: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch, raised: Callable[[pytest.MonkeyPatch], str]
) -> None:
    run = finished("mqar")
    list(add_to_leaderboard(Path("board.json"), [run]))
    content = json.loads(Path("board.json").read_text())
    why = raised(monkeypatch)
    assert why in refused(run)
    assert validate_file(Path("board.json")) == (0, (why,))
    assert bench("leaderboard", "validate", "board.json") == (0, f"board.json: 0 entries valid; 1 {why}\n", "")
    assert validate_file(record_path(run)) == (0, (why,))
    content["entries"][0]["task"]["data_hash"] = "1" * 64
    content["entries"][0] = resealed(content["entries"][0])
    Path("board.json").write_text(json.dumps(content))
    assert validate_file(Path("board.json")) == (0, (why,)), "this can't be known here"
    content["entries"][0]["cells"][0]["value"] = 0.875
    content["entries"][0] = resealed(content["entries"][0])
    Path("board.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"value is 0.875, but its counts give"):
        validate_file(Path("board.json"))


def test_other_versions_do_not_stop_the_check_of_the_rest(
    here: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task in ("mqar", "niah"):
        list(add_to_leaderboard(Path("board.json"), [finished(task)]))
    why = raise_task(monkeypatch)
    assert validate_file(Path("board.json")) == (1, (why,))
    assert bench("leaderboard", "validate", "board.json").out == f"board.json: 1 entries valid; 1 {why}\n"
    content = json.loads(Path("board.json").read_text())
    assert [entry["task"]["name"] for entry in content["entries"]] == ["mqar", "niah"]
    content["entries"][1]["task"]["data_hash"] = "1" * 64
    content["entries"][1] = resealed(content["entries"][1])
    Path("board.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"entry 1 .*data_hash is not that"):
        validate_file(Path("board.json"))


def test_other_machines_last_digits_are_no_change(run: Path) -> None:
    """Statistics are compared with a tolerance: another processor may round a mean another way."""

    def nudge(value: float) -> float:
        return value * (1 + 1e-15)

    content = json.loads(record_path(run).read_text())
    for cell in content["cells"]:
        cell["value"], cell["standard_error"] = nudge(cell["value"]), nudge(cell["standard_error"])
        cell["interval"] = [nudge(bound) for bound in cell["interval"]]
    record: Record = parse_record(resealed(content), "record")
    assert record != read_record(record_path(run))
    verify(record, EvaluationFolder(record_path(run).parent))


def test_references_are_verified(here: Path, finished: Finished) -> None:
    run = finished("mqar-noisy")
    edits: dict[str, Edit] = {
        "references.bayes is 0.999, but its samples give ": lambda r: r["cells"][1]["references"].update(bayes=0.999),
        "references.last is None, but its samples give ": lambda r: r["cells"][1]["references"].pop("last"),
        "references.oracle is 1.0, but its samples give None": lambda r: r["cells"][1]["references"].update(oracle=1.0),
        "references.bayes is None, but": lambda r: r["cells"][1].pop("references"),
    }
    kept = record_path(run).read_text()
    for words, edit in edits.items():
        assert f"cell 'capacity-length64-kv4': {words}" in refused_without_samples(run, edit)
        assert words in refused(run, edit)
        record_path(run).write_text(kept)
    plain = finished("mqar")
    edit = lambda r: r["cells"][0].update(references={"bayes": 1.0})  # noqa: E731
    assert "references.bayes is 1.0, but its samples give None" in refused_without_samples(plain, edit)


def test_references_of_another_machine_may_differ_in_the_last_digits(here: Path, finished: Finished) -> None:
    run = finished("mqar-noisy")
    content = json.loads(record_path(run).read_text())
    for cell in content["cells"]:
        cell["references"] = {name: value * (1 - 1e-15) for name, value in cell["references"].items()}
    verify(parse_record(resealed(content), "record"), EvaluationFolder(record_path(run).parent))


def test_a_run_with_label_noise_is_added(here: Path) -> None:
    assert bench(*MQAR, "--label-noise", "0.4").code == 0
    (run,) = (here / "runs").iterdir()
    assert [new for _, new in add_to_leaderboard(Path("board.json"), [run])] == [True]
    edit: Edit = lambda r: r["training"]["config"].update(label_noise=None)  # noqa: E731
    assert "training_hash is" in refused_without_samples(run, edit)


def test_niah_depths_are_verified(here: Path, finished: Finished) -> None:
    run = finished("niah")
    edit: Edit = lambda r: r["cells"][1].update(realised_depth=0.25)  # noqa: E731
    assert "realised_depth is 0.25, not " in refused_without_samples(run, edit)
    edit = lambda r: r["cells"][1].update(coordinates={"depth": 1.0})  # noqa: E731
    assert "coordinates is {'depth': 1.0}, not {'depth': 0.5}" in refused(run, edit)
    assert NIAH[0] == "niah"
