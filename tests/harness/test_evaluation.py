"""Evaluation: the same answers in pieces and in any batch, and results that a plain count gives too."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decaybench.core.errors import UserError
from decaybench.core.hashing import digest
from decaybench.harness import evaluation
from decaybench.harness.config import RunConfig, evaluation_cells, make_config
from decaybench.harness.evaluation import (
    Evaluated,
    cell_result,
    evaluate,
    predict,
    questions,
    update_digest,
)
from decaybench.harness.progress import Progress
from decaybench.models.language_model import LanguageModel, build_model
from decaybench.results.record import data_hash
from decaybench.results.run_folder import EvaluationFolder, SampleLine
from decaybench.results.statistics import cell_statistics
from decaybench.tasks.base import IGNORED, Batch, Cell, Task
from decaybench.tasks.mqar import MqarShape
from decaybench.tasks.registry import make_task

MODELS: dict[str, dict[str, Any]] = {
    "mamba2": {"d_model": 16, "mixer": {"d_state": 8, "headdim": 8}},
    "mamba2+post": {"d_model": 16, "mixer": {"d_state": 8, "headdim": 8}, "post": {}},
    "attention": {"name": "attention", "d_model": 16, "mixer": {"n_heads": 2}},
}


def config(task: str = "mqar", model: str = "mamba2", **evaluation: Any) -> RunConfig:
    return make_config(
        {
            "task": {"name": task, "train_length": 32},
            "model": MODELS[model],
            "evaluation": {"lengths": ["1x", "2x"], "samples": 10, **evaluation},
        }
    )


def live_model(found: RunConfig) -> LanguageModel:
    """A model whose answers differ from place to place: initial values draw nearly the same logits everywhere."""
    model = build_model(found.model, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3.0)
    return model.eval()


def a_batch(found: RunConfig, n: int = 12, cell: int = -1) -> Batch:
    made = make_task(found.task)
    cells = made.cells(found.evaluation, found.eval_lengths())
    return made.batch(cells[cell].shape, "test", 0, np.arange(n))


def asked(found: RunConfig, folder: Path) -> Evaluated:
    return evaluate(
        live_model(found),
        found,
        EvaluationFolder(folder),
        train_length=found.task.train_length,
        device="cpu",
        progress=Progress(quiet=True),
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("task", ["niah", "mqar"])
def test_answers_are_the_logits_first_choices(task: str, model: str) -> None:
    found = config(task, model)
    batch = a_batch(found)
    answers = predict(live_model(found), batch, "cpu").first
    logits = live_model(found)(torch.from_numpy(batch.tokens)).logits
    expected = logits.argmax(-1)[torch.from_numpy(batch.asked)]
    assert answers.tolist() == expected.tolist()
    assert answers.dtype == np.int64 and len(set(answers.tolist())) > 3, "or nothing could disagree"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("piece", [1, 7, 32, 63, 64, 1000])
def test_answers_in_pieces_are_those_of_the_whole(model: str, piece: int) -> None:
    found = config("mqar", model)
    batch = a_batch(found)
    whole = predict(live_model(found), batch, "cpu", piece=10_000).first
    assert predict(live_model(found), batch, "cpu", piece=piece).first.tolist() == whole.tolist()


@pytest.mark.parametrize("model", MODELS)
def test_a_sample_alone_gets_the_answers_it_gets_among_others(model: str) -> None:
    found = config("mqar", model)
    batch = a_batch(found)
    together = predict(live_model(found), batch, "cpu").first
    alone = [
        predict(
            live_model(found),
            Batch(*(part[row : row + 1] for part in (batch.tokens, batch.labels, batch.distance))),
            "cpu",
        ).first
        for row in range(len(batch.tokens))
    ]
    assert np.concatenate(alone).tolist() == together.tolist()


def test_no_place_is_asked_in_some_pieces() -> None:
    found = config("niah")
    batch = a_batch(found)
    assert (batch.asked.sum(1) == 1).all() and batch.asked[:, -1].all()
    assert len(predict(live_model(found), batch, "cpu", piece=8).first) == len(batch.tokens)


@pytest.mark.parametrize("task", ["niah", "mqar", "mqar-noisy"])
def test_batches_change_no_number(tmp_path: Path, task: str) -> None:
    results = []
    for batch_tokens in (1, 200, 16_384):
        found = config(task).model_copy(update={"batch_tokens": batch_tokens})
        results.append(asked(found, tmp_path / str(batch_tokens)))
    assert results[0].cells == results[1].cells == results[2].cells
    assert results[0].data_hash == results[1].data_hash == results[2].data_hash
    files = [sorted(folder.rglob("*.jsonl")) for folder in sorted(tmp_path.iterdir())]
    assert len(files[0]) == len(results[0].cells)
    for same in zip(*files, strict=True):
        assert len({path.read_bytes() for path in same}) == 1


@pytest.mark.parametrize("task", ["niah", "mqar"])
def test_cells_are_those_of_the_task_and_recount(tmp_path: Path, task: str) -> None:
    """Everything in a cell again, from the task's arrays and one pass of the model over all of them."""
    found = config(task)
    made = make_task(found.task)
    result = asked(found, tmp_path)
    cells = made.cells(found.evaluation, found.eval_lengths())
    assert [cell.name for cell in result.cells] == [cell.name for cell in cells]
    for cell, said in zip(cells, result.cells, strict=True):
        batch = made.batch(cell.shape, "test", 0, np.arange(10))
        choice = live_model(found)(torch.from_numpy(batch.tokens)).logits.argmax(-1).numpy()
        hit = (choice == batch.labels) & batch.asked
        assert said.correct == tuple(hit.sum(1)) and said.asked == tuple(batch.asked.sum(1))
        scores = hit.sum(1) / batch.asked.sum(1) if task == "mqar" else hit.sum(1) == batch.asked.sum(1)
        assert said.value == pytest.approx(float(np.mean(scores)), rel=1e-12)
        statistics = cell_statistics(made.metric, said.correct, said.asked)
        assert (said.value, said.standard_error, said.interval) == statistics
        by_distance = {}
        for low in (1, 2, 4, 8, 16, 32, 64):
            here = batch.asked & (batch.distance >= low) & (batch.distance < 2 * low)
            if here.any():
                counts = (int(here.any(1).sum()), int(here.sum()), int((hit & here).sum()))
                by_distance[low] = (2 * low, *counts)
        found_bins = {bin.low: (bin.high, bin.samples, bin.asked, bin.correct) for bin in said.by_distance}
        assert found_bins == by_distance
        assert (said.n, said.eval_length, said.ratio) == (10, cell.shape.length, cell.shape.length / 32)
        tokens = said.real_tokens
        assert (tokens.min, tokens.mean, tokens.max) == (cell.shape.length,) * 3
        if task == "niah":
            assert said.realised_depth == pytest.approx(batch.details["depth"].mean(), rel=1e-12)
        else:
            assert said.realised_depth is None
        assert said.coordinates == cell.coordinates and list(said.coordinates) == ["depth" if task == "niah" else "kv"]


@pytest.mark.parametrize("task", ["niah", "mqar", "mqar-noisy"])
def test_references_are_means_over_samples_as_the_value_is(tmp_path: Path, task: str) -> None:
    """`last` again, from the tokens; a task that names no rule has none, and its records stay as they were."""
    found = config(task)
    result = asked(found, tmp_path)
    if task != "mqar-noisy":
        assert all(cell.references is None and "references" not in cell.plain() for cell in result.cells)
        return
    made = make_task(found.task)
    for cell, said in zip(made.cells(found.evaluation, found.eval_lengths()), result.cells, strict=True):
        batch = made.batch(cell.shape, "test", 0, np.arange(10))
        scores = []
        for tokens, labels, distance in zip(batch.tokens, batch.labels, batch.distance, strict=True):
            places = np.flatnonzero(labels != IGNORED)
            scores.append(np.mean([tokens[place - distance[place]] == labels[place] for place in places]))
        assert said.references is not None and list(said.references) == ["bayes", "majority", "last"]
        assert said.references["last"] == pytest.approx(np.mean(scores), rel=1e-12)
        everything = made.references(batch)
        assert said.references == {name: pytest.approx(each.mean(), rel=1e-12) for name, each in everything.items()}
        assert said.references["last"] < said.references["bayes"]


def test_references_need_no_answers_and_survive_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = config("mqar-noisy").model_copy(update={"batch_tokens": 64})
    whole = asked(found, tmp_path / "whole")
    really, calls = predict, 0

    def fails_later(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        return really(*arguments, **named)

    monkeypatch.setattr(evaluation, "predict", fails_later)
    with pytest.raises(KeyboardInterrupt):
        asked(found, tmp_path / "parts")
    assert asked(found, tmp_path / "parts").cells == whole.cells


def test_distances_are_from_where_the_answer_was_written() -> None:
    found = config("mqar")
    batch = a_batch(found)
    for tokens, labels, distance in zip(batch.tokens, batch.labels, batch.distance, strict=True):
        places = np.flatnonzero(labels != IGNORED)
        assert (distance[labels == IGNORED] == 0).all()
        for place in places:
            written = place - distance[place]
            assert tokens[written] == labels[place] and tokens[written - 1] == tokens[place]


def test_the_samples_file_says_what_was_asked_and_answered(tmp_path: Path) -> None:
    found = config("niah", depths=[0.5])
    made = make_task(found.task)
    asked(found, tmp_path)
    (cell, _) = made.cells(found.evaluation, found.eval_lengths())
    lines = EvaluationFolder(tmp_path).samples(cell.name).read()
    batch = made.batch(cell.shape, "test", 0, np.arange(10))
    answers = predict(live_model(found), batch, "cpu").first
    assert [line.id for line in lines] == made.sample_ids(cell.shape, "test", 0, np.arange(10))
    assert [line.index for line in lines] == list(range(10))
    assert [line.target for line in lines] == [(int(row[-1]),) for row in batch.labels]
    assert [line.answer for line in lines] == [(answer,) for answer in answers.tolist()]
    assert [line.score for line in lines] == [float(line.target == line.answer) for line in lines]
    assert [line.distance for line in lines] == [(int(row[-1]),) for row in batch.distance]
    assert [line.depth for line in lines] == batch.details["depth"].tolist()
    assert {line.length for line in lines} == {32}


def test_the_data_hash_is_the_documented_one(tmp_path: Path) -> None:
    found = config("mqar")
    made = make_task(found.task)
    contents = []
    for cell in made.cells(found.evaluation, found.eval_lengths()):
        content = hashlib.sha256()
        for index in range(10):
            batch = made.batch(cell.shape, "test", 0, np.array([index]))
            content.update(np.asarray(batch.tokens[0], dtype="<i8").tobytes())
            content.update(np.asarray(batch.labels[0], dtype="<i8").tobytes())
        contents.append([cell.name, content.hexdigest()])
    assert asked(found, tmp_path).data_hash == digest(contents)


def test_the_data_hash_changes_with_the_data(tmp_path: Path) -> None:
    hashes = [
        asked(found, tmp_path / str(place)).data_hash
        for place, found in enumerate(
            (config(), config(seed=1), config(samples=9), config(lengths=["2x"]), config(variants=["persist"]))
        )
    ]
    assert len(set(hashes)) == len(hashes)


def cells_of(found: RunConfig) -> tuple[Task[Any, Any, Any], Cell]:
    made = make_task(found.task)
    return made, made.cells(found.evaluation, found.eval_lengths())[0]


def test_a_cell_by_hand() -> None:
    made, cell = cells_of(config("mqar"))

    def line(index: int, answer: tuple[int, ...], distance: tuple[int, ...], length: int) -> SampleLine:
        return SampleLine(
            id="a", index=index, target=(5, 6, 7, 8), answer=answer, score=0.0, distance=distance, length=length
        )

    lines = [
        line(0, (5, 6, 7, 8), (3, 4, 9, 31), 30),
        line(1, (5, 0, 0, 8), (2, 3, 8, 16), 32),
        line(2, (0, 0, 0, 0), (1, 1, 1, 1), 31),
    ]
    result = cell_result(made, cell, lines, 16)
    assert (result.correct, result.asked, result.n) == ((4, 2, 0), (4, 4, 4), 3)
    assert result.value == pytest.approx(0.5)
    assert result.standard_error == pytest.approx(0.5 / np.sqrt(3))
    assert (result.real_tokens.min, result.real_tokens.mean, result.real_tokens.max) == (30, 31, 32)
    assert result.ratio == 2 and cell_result(made, cell, lines, None).ratio is None
    assert [(bin.low, bin.high, bin.samples, bin.asked, bin.correct) for bin in result.by_distance] == [
        *((1, 2, 1, 4, 0), (2, 4, 2, 3, 2), (4, 8, 1, 1, 1), (8, 16, 2, 2, 1), (16, 32, 2, 2, 2)),
    ]


def test_an_evaluation_goes_on_after_the_samples_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = config().model_copy(update={"batch_tokens": 64})
    whole = asked(found, tmp_path / "whole")
    really, calls = predict, 0

    def fails_later(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        return really(*arguments, **named)

    monkeypatch.setattr(evaluation, "predict", fails_later)
    with pytest.raises(KeyboardInterrupt):
        asked(found, tmp_path / "parts")
    done = calls - 1
    calls = 100
    rest = asked(found, tmp_path / "parts")
    batches = 2 * (5 + 10)  # two variants; two samples of 32 tokens or one of 64 fit a batch
    assert calls - 100 == batches - done
    assert (rest.cells, rest.data_hash) == (whole.cells, whole.data_hash)
    assert rest.tokens == whole.tokens - (5 * 64 + 2 * 64)
    calls = 100
    again = asked(found, tmp_path / "parts")
    assert (again.cells, again.data_hash, again.tokens, calls) == (whole.cells, whole.data_hash, 0, 100)


def changed(line: dict[str, Any], what: str) -> None:
    """A well-formed line that the task and its answer don't give."""
    if what in ("target", "distance"):
        line[what][0] += 1
    elif what == "answer alone":  # its score stays
        line["answer"] = [-7, *line["answer"][1:]] if line["score"] else line["target"]
    elif what == "length of all":
        line.update(target=[1], answer=[2], distance=[3], score=0.0)
    else:
        line[what] = {"id": "0" * 16, "length": 31, "score": 0.125, "depth": 0.3}[what]


@pytest.mark.parametrize(
    "what", ["target", "distance", "answer alone", "length of all", "id", "length", "score", "depth"]
)
def test_a_line_that_is_not_the_tasks_own_is_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """It reads well, but no sample of the task is so: from its batch on the cell is evaluated again."""
    task = "niah" if what == "depth" else "mqar"
    found = config(task).model_copy(update={"batch_tokens": 128})
    whole = asked(found, tmp_path)
    path = sorted(tmp_path.rglob("*length32*.jsonl"))[0]  # four samples a batch
    content = path.read_bytes()
    lines = [json.loads(line) for line in content.splitlines()]
    changed(lines[6], what)
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    capsys.readouterr()
    again = asked(found, tmp_path)
    note = capsys.readouterr().err
    assert note == f"note: {path} line 7 is damaged (not the task's own sample); evaluating again from there\n"
    assert path.read_bytes() == content
    assert (again.cells, again.data_hash) == (whole.cells, whole.data_hash)
    assert again.tokens == 6 * 32, "samples 4 to 9: the batch of the sixth, and the one after it"


def test_lengths_are_those_of_the_training_length_that_is_known() -> None:
    found = config("mqar", lengths=["2x", "40"])
    made = make_task(found.task)
    lengths = [cell.shape.length for cell in evaluation_cells(made, found.evaluation, 16)]
    assert lengths == [32, 40, 32, 40]
    with pytest.raises(UserError, match=r"--eval-lengths: '2x' needs a training length, and this checkpoint doesn't"):
        evaluation_cells(made, found.evaluation, None)
    tokens = found.evaluation.model_copy(update={"lengths": ("40",)})
    assert [cell.shape.length for cell in evaluation_cells(made, tokens, None)] == [40, 40]
    listed = found.evaluation.model_copy(update={"pairs": ((64, 4),)})
    assert [cell.name for cell in evaluation_cells(made, listed, None)] == ["listed-length64-kv4"], "2x isn't used"
    with pytest.raises(UserError, match="--eval-lengths: 40,2x names a length twice"):
        evaluation_cells(made, found.evaluation.model_copy(update={"lengths": ("40", "2x")}), 20)


def test_questions_know_what_the_task_knows() -> None:
    found = config("mqar")
    made, cell = cells_of(found)
    assert isinstance(cell.shape, MqarShape)
    batch = made.batch(cell.shape, "test", 0, np.array([4, 2]))
    four, two = questions(made, cell, 0, batch, np.array([4, 2]))
    assert (two.id, four.id) == tuple(made.sample_ids(cell.shape, "test", 0, np.array([2, 4])))
    assert len(two.target) == len(two.distance) == cell.shape.kv and two.references == {}
    assert two.depth is None and two.length == 32
    parts = [hashlib.sha256(), hashlib.sha256()]
    update_digest(parts[0], batch)
    for row in range(2):
        update_digest(parts[1], made.batch(cell.shape, "test", 0, np.array([[4], [2]][row])))
    assert parts[0].hexdigest() == parts[1].hexdigest()
    assert data_hash([("a", "0" * 64)]) != data_hash([("b", "0" * 64)])
