"""`bench niah --text`: what a model writes and scores is what a plain loop gives, however it is batched or stopped."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decaybench.core.errors import UserError
from decaybench.harness import evaluation
from decaybench.harness.config import RunConfig, make_config
from decaybench.harness.distributed import ALONE, World
from decaybench.harness.evaluation import Evaluated, evaluate, questions
from decaybench.harness.plots import evaluation_figures
from decaybench.harness.progress import Progress
from decaybench.harness.verify import add_to_leaderboard, validate_file, verify
from decaybench.models.language_model import LanguageModel, build_model
from decaybench.results.record import Record, read_record
from decaybench.results.run_folder import EvaluationFolder, SampleLine
from decaybench.tasks import niah_text
from decaybench.tasks.base import Batch, Wanted
from decaybench.tasks.registry import make_task
from tests.command import bench, start
from tests.harness.processes import together
from tests.harness.test_verify import recount, resealed
from tests.token_shards import prepared, stories

MODELS: dict[str, dict[str, Any]] = {
    "mamba2+post": {"d_model": 32, "n_layers": 2, "mixer": {"d_state": 8, "headdim": 8}, "post": {"horizon": 64}},
    "rwkv7": {"name": "rwkv7", "d_model": 32, "n_layers": 2, "mixer": {"head_dim": 8}, "tie_embeddings": False},
    "attention": {"name": "attention", "d_model": 32, "n_layers": 2, "mixer": {"n_heads": 2}},
}
LENGTH = 960  # of a small sample of every variant but those with four answers, in bytes


def config(model: str = "mamba2+post", **settings: Any) -> RunConfig:
    task = {"name": "niah-text", "train_length": 64, **settings.pop("task", {})}
    asked = {"lengths": ["700", str(LENGTH)], "samples": 5, **settings.pop("evaluation", {})}
    # With a checkpoint nothing is trained, which this task can't; the model is the tests' own.
    sizes = {"vocab_size": 257, **MODELS[model]}
    return make_config({"model": sizes, "task": task, "evaluation": asked, "checkpoint": "none", **settings})


def live_model(found: RunConfig) -> LanguageModel:
    """One that writes something else after each prompt, digits as a rule."""
    model = build_model(found.model, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3.0)
        (model.embedding if model.head is None else model.head).weight[48:58] *= 3
    return model.eval()


def ran(found: RunConfig, folder: Path, model: LanguageModel | None = None, world: World = ALONE) -> Evaluated:
    progress = Progress(quiet=True)
    where = EvaluationFolder(folder)
    return evaluate(
        model or live_model(found), found, where, train_length=64, device="cpu", progress=progress, world=world
    )


def lines_of(folder: Path) -> dict[str, list[SampleLine]]:
    return {path.stem: EvaluationFolder(folder).samples(path.stem).read() for path in folder.glob("samples/*.jsonl")}


def one_digit(sample: Any) -> Wanted:
    """Each answer's last character alone, which a model that has learned nothing may write, and may not."""
    wanted = _wanted(sample)
    return Wanted(tuple(answer[-1] for answer in wanted.answers), wanted.distance)


_wanted = niah_text._wanted


@pytest.fixture
def easy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(niah_text, "_wanted", one_digit)


# --- against plain loops


@torch.no_grad()
def by_hand(model: LanguageModel, prompt: Sequence[int], answers: Sequence[str]) -> tuple[list[int], list[bool]]:
    """Token by token, one prompt alone: what is written, and which answers stand in it."""
    output = model(torch.tensor([prompt[:1]]), output_state=True)
    logits, state = output.logits[:, 0], output.state
    for token in prompt[1:]:
        assert state is not None
        output = model.step(torch.tensor([token]), state)
        logits, state = output.logits, output.state
    written: list[int] = []
    while True:
        written.append(int(logits.argmax()))
        text = bytes(token for token in written if token != 256).decode(errors="replace").lower()
        hits = [answer.lower() in text for answer in answers]
        if len(written) == 128 or written[-1] == 256 or all(hits):
            return written, hits
        assert state is not None
        output = model.step(torch.tensor([written[-1]]), state)
        logits, state = output.logits, output.state


@pytest.mark.usefixtures("easy")
@pytest.mark.parametrize("model", MODELS)
def test_texts_and_scores_are_those_of_a_plain_loop(model: str, tmp_path: Path) -> None:
    found = config(model, evaluation={"variants": ["single_1", "multikey_2"], "lengths": ["640"], "samples": 2})
    reader, task = live_model(found), make_task(found.task)
    result = ran(found, tmp_path, reader)
    scores = []
    for cell, made in zip(result.cells, task.cells(found.evaluation, [640]), strict=True):
        batch = task.batch(made.shape, "test", 0, np.arange(2))
        assert batch.positions is not None and batch.wanted is not None
        for row, line in enumerate(lines_of(tmp_path)[cell.name]):
            prompt = batch.tokens[row][batch.positions[row] != 0].tolist()
            written, hits = by_hand(reader, prompt, batch.wanted[row].answers)
            assert line.answer == tuple(written) and line.wanted == batch.wanted[row].answers
            assert line.text == bytes(token for token in written if token != 256).decode(errors="replace")
            assert line.score == np.mean(hits) and (cell.correct[row], cell.asked[row]) == (sum(hits), len(hits))
            assert line.length == len(prompt) + 128 <= cell.eval_length
            scores.append(line.score)
    assert len({line.text for lines in lines_of(tmp_path).values() for line in lines}) > 1
    assert 0 < np.mean(scores) < 1, "or nothing could disagree"


@pytest.mark.usefixtures("easy")
def test_a_cells_numbers_are_the_samples(tmp_path: Path) -> None:
    found = config(evaluation={"variants": ["multiquery"], "lengths": ["1100"], "samples": 12})
    (cell,) = ran(found, tmp_path).cells
    lines = lines_of(tmp_path)[cell.name]
    shares = [sum(answer in (line.text or "") for answer in line.wanted or ()) / 4 for line in lines]
    assert cell.value == pytest.approx(np.mean(shares)) and len(set(shares)) > 2 and cell.asked == (4,) * 12
    assert cell.real_tokens.max == max(line.length for line in lines) <= 1100
    assert cell.realised_depth == pytest.approx(np.mean([line.depth for line in lines]))
    distances = [distance for line in lines for distance in line.distance]
    assert sum(part.asked for part in cell.by_distance) == len(distances) == 48
    for part in cell.by_distance:
        assert part.asked == sum(part.low <= distance < part.high for distance in distances)
    assert sum(part.correct for part in cell.by_distance) == sum(cell.correct)


# --- however it is asked


@pytest.mark.usefixtures("easy")
@pytest.mark.parametrize("model", MODELS)
def test_batches_change_nothing(model: str, tmp_path: Path) -> None:
    whole = ran(config(model, batch_tokens=16_384), tmp_path / "whole")
    for batch_tokens in (1, 2000):
        parts = ran(config(model, batch_tokens=batch_tokens), tmp_path / str(batch_tokens))
        assert lines_of(tmp_path / str(batch_tokens)) == lines_of(tmp_path / "whole")
        assert (parts.cells, parts.data_hash) == (whole.cells, whole.data_hash)


def written(found: RunConfig, change: Callable[[Batch], Batch], order: Sequence[int]) -> dict[str, SampleLine]:
    """The lines of these samples in one batch, by id."""
    task = make_task(found.task)
    cell, indices = task.cells(found.evaluation, [LENGTH])[0], np.array(order)
    batch = task.batch(cell.shape, "test", 0, indices)
    known = questions(task, cell, 0, batch, indices)
    lines = evaluation._written(task, live_model(found), change(batch), known, 0, "cpu")
    return {line.id: line.model_copy(update={"index": 0}) for line in lines}


def padded_before(batch: Batch) -> Batch:
    """The same rows with their padding in front, and three places more of it."""
    assert batch.positions is not None
    tokens, positions = (np.pad(part, ((0, 0), (3, 0))) for part in (batch.tokens, batch.positions))
    for row, length in enumerate(batch.lengths):
        shift = positions.shape[1] - 3 - length
        tokens[row], positions[row] = np.roll(tokens[row], shift), np.roll(positions[row], shift)
        assert positions[row, -1] == length
    return replace(batch, tokens=tokens, positions=positions)


@pytest.mark.usefixtures("easy")
@pytest.mark.parametrize("model", MODELS)
def test_padding_and_order_change_nothing(model: str) -> None:
    found = config(model, evaluation={"variants": ["single_2"]})
    plain = written(found, lambda batch: batch, range(6))
    assert len({line.length for line in plain.values()}) > 2, "rows are padded"
    assert written(found, padded_before, range(6)) == plain
    assert written(found, lambda batch: batch, [3, 0, 5, 1, 4, 2]) == plain
    lengths = [line.length for line in plain.values()]
    assert written(found, lambda batch: batch, np.argsort(lengths).tolist()) == plain


def _evaluate(world: World, folder: Path) -> None:
    niah_text._wanted = one_digit
    result = ran(config(batch_tokens=2 * LENGTH), folder, world=world)
    told = world.gather([cell.plain() for cell in result.cells])
    assert told == ([told[0]] * 2 if world.first else [])


@pytest.mark.usefixtures("easy")
def test_two_processes_evaluate_as_one(tmp_path: Path) -> None:
    whole = ran(config(batch_tokens=2 * LENGTH), tmp_path / "one")
    together(_evaluate, tmp_path / "two", folder=tmp_path)
    names = [f"single_1-length{length}.jsonl" for length in (700, LENGTH)]
    for name in names:
        path = tmp_path / "two" / "samples" / name
        assert path.read_bytes() == (tmp_path / "one" / "samples" / name).read_bytes()
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))  # two samples a batch: one is begun
    together(_evaluate, tmp_path / "two", folder=tmp_path)
    assert path.read_bytes() == (tmp_path / "one" / "samples" / names[-1]).read_bytes()
    assert ran(config(batch_tokens=2 * LENGTH), tmp_path / "two").cells == whole.cells


# --- what is written


def saying(what: Callable[[tuple[str, ...]], Sequence[int]], monkeypatch: pytest.MonkeyPatch, found: RunConfig) -> None:
    """A model that writes `what` of a prompt's answers."""
    task = make_task(found.task)
    answers: dict[bytes, tuple[str, ...]] = {}
    for cell in task.cells(found.evaluation, found.eval_lengths()):
        batch = task.batch(cell.shape, "test", 0, np.arange(found.evaluation.samples))
        for tokens, length, wanted in zip(batch.tokens, batch.lengths, batch.wanted or (), strict=True):
            answers[tokens[:length].tobytes()] = wanted.answers

    def greedy(model: Any, prompts: Any, *_: Any, **__: Any) -> list[list[int]]:
        return [list(what(answers[prompt.tobytes()])) for prompt in prompts]

    monkeypatch.setattr(evaluation, "greedy", greedy)


def test_the_right_answers_score_one_and_half_of_them_a_half(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = config(evaluation={"variants": "all", "lengths": ["1200"]})
    saying(lambda answers: [*f" {', '.join(answers)}.".upper().encode(), 256], monkeypatch, found)
    assert [cell.value for cell in ran(found, tmp_path / "all").cells] == [1] * 8
    saying(lambda answers: f"{answers[-1]}, {answers[0]}".encode(), monkeypatch, found)
    assert [cell.value for cell in ran(found, tmp_path / "two").cells] == [1] * 6 + [0.5] * 2
    saying(lambda answers: f"{answers[0][:-1]} {answers[0][-1]}".encode(), monkeypatch, found)
    assert [cell.value for cell in ran(found, tmp_path / "cut").cells] == [0] * 8


def test_what_is_no_text_is_kept_as_it_was_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = config(evaluation={"lengths": ["700"]})
    odd = [0, 255, 10, 13, 0xE2, 0x80, 0xA8, 0xED, 0xA0, 0x80, 34, 92, 0xC3, 299, 256]
    saying(lambda answers: odd, monkeypatch, found)
    first = ran(found, tmp_path)
    (lines,) = lines_of(tmp_path).values()
    assert {line.answer for line in lines} == {tuple(odd)}
    assert {line.text for line in lines} == {'\x00\ufffd\n\r\u2028\ufffd\ufffd\ufffd"\\\ufffd\ufffd'}
    monkeypatch.setattr(evaluation, "greedy", None)
    assert ran(found, tmp_path).cells == first.cells, "all is there: nothing is written again"


def test_a_text_ends_with_the_separator_or_where_nothing_is_left_to_find(tmp_path: Path) -> None:
    """What is cut off couldn't change a score: the rows end one by one, and all that is written before is kept."""
    found = config(evaluation={"lengths": ["700"]})
    ran(found, tmp_path)
    (lines,) = lines_of(tmp_path).values()
    assert all(len(line.answer) == 128 or line.answer[-1] == 256 for line in lines)
    assert all(256 not in line.answer[:-1] for line in lines)


# --- the command


SMALL = (
    *("--set", "model.d_model=16", "--set", "model.n_layers=1", "--set", "model.mixer.headdim=8"),
    *("--set", "model.mixer.d_state=8", "--set", "training.steps=3", "--set", "training.batch_tokens=128"),
)
ASKED = ("niah", "--text", "--checkpoint", "model", "--eval-lengths", "640", "--samples", "4")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of `bench pretrain` in `model`."""
    folder = tmp_path_factory.mktemp("pretrained")
    prepared(folder / "stories", stories(60, longest=30))
    words = ("pretrain", "--data", "stories", "--train-length", "32", "--eval-lengths", "1x", "--samples", "2", *SMALL)
    done = start(*words, cwd=folder).end()
    assert done.code == 0, done.err
    (run,) = (folder / "runs").iterdir()
    return Path(shutil.move(run, folder / "model"))


@pytest.fixture
def place(here: Path, trained: Path) -> Path:
    shutil.copytree(trained, here / "model")
    return here


def record_path(folder: Path) -> Path:
    (path,) = folder.glob("runs/niah-text-*/evaluations/*/record.json")
    return path


def claims(folder: Path) -> tuple[Record, dict[str, str]]:
    """A run's outcome but where it ran and what it took."""
    path = record_path(folder)
    content = json.loads(path.read_text())
    del content["environment"], content["cost"], content["record_id"]
    return content, {cell.name: cell.read_text() for cell in path.parent.glob("samples/*.jsonl")}


def test_a_language_model_is_asked_and_its_record_recomputes(place: Path) -> None:
    done = bench(*ASKED, "--variants", "single_1,multikey_2", "--depths", "0,0.5", "--eval-lengths", "20x")
    assert done.code == 0, done.err
    assert "multikey_2" in done.out and "over all depths" in done.out
    record = read_record(record_path(place))
    assert [cell.name for cell in record.cells[:3]] == [
        *("single_1-length640-depth0", "single_1-length640-depth0.5", "multikey_2-length640-depth0")
    ]
    assert record.task.config["tokenizer"] == "bytes" and record.task.config["start"] == "separator"
    assert record.train_length == 32 and {cell.ratio for cell in record.cells} == {20.0}
    assert set(evaluation_figures(record)) == {"accuracy-length-depth", "accuracy-length", "accuracy-distance"}
    assert bench("leaderboard", "add", *map(str, place.glob("runs/*")), "--file", "board.json").code == 0
    assert validate_file(Path("board.json")) == (1, ())
    again = bench(*ASKED, "--variants", "single_1,multikey_2", "--depths", "0,0.5", "--eval-lengths", "20x")
    assert again.code == 0 and "already done" in again.err


def test_every_variant_without_a_depth_of_its_own(place: Path) -> None:
    words = ("--variants", "all", "--eval-lengths", "1000", "--samples", "2", "--set", "task.start=none")
    done = bench(*ASKED, *words)
    assert done.code == 0, done.err
    record = read_record(record_path(place))
    assert [cell.variant for cell in record.cells] == list(niah_text.VARIANTS)
    assert set(evaluation_figures(record)) == {"accuracy-length", "accuracy-distance"}


def test_a_haystack_that_has_gone_can_not_be_recomputed(place: Path) -> None:
    hay = place / "hay" / "book.txt"
    hay.parent.mkdir()
    hay.write_text("".join(f"On day {n} no land was seen. " for n in range(99)))
    done = bench(*ASKED, "--variants", "single_2", "--haystack", "hay")
    assert done.code == 0, done.err
    path = record_path(place)
    record = read_record(path)
    assert record.task.config["haystack"] == "hay"
    verify(record, EvaluationFolder(path.parent))
    assert [new for _, new in add_to_leaderboard(Path("board.json"), list(place.glob("runs/*")))] == [True]
    hay.rename(place / "elsewhere.txt")
    assert validate_file(path).not_recomputable
    with pytest.raises(UserError, match=r"not recomputable here \(needs the haystack hay \(sha256 "):
        verify(record, EvaluationFolder(path.parent))


def test_kill_9_anywhere_changes_nothing(trained: Path, tmp_path: Path) -> None:
    # More than half of the 32 samples are left where the last kill may fall: the work can't outrun it.
    words = (*ASKED, "--samples", "16", "--set", "batch_tokens=1280", "--variants", "single_1,multikey_2")
    for name in ("whole", "killed"):
        shutil.copytree(trained, tmp_path / name / "model")
    assert start(*words, cwd=tmp_path / "whole").end().code == 0
    expected = claims(tmp_path / "whole")
    here, draws = tmp_path / "killed", random.Random(1)

    def samples() -> int:
        return sum(path.read_bytes().count(b"\n") for path in here.glob("runs/*/evaluations/*/samples/*.jsonl"))

    for count in (0, 2, 6, 10, 14):
        work = start(*words, cwd=here)
        assert work.wait_for(lambda count=count: samples() >= count and any(here.glob("runs/*/config.yaml")))
        work.process.join(timeout=draws.uniform(0, 0.2))
        work.send(signal.SIGKILL)
        assert work.end().code == -signal.SIGKILL
        assert not list(here.glob("runs/*/evaluations/*/record.json"))
    path = next(here.glob("runs/*/evaluations/*/samples/*.jsonl"))
    path.write_bytes(path.read_bytes().replace(b'"text":"', b'"text":"1', 1))
    done = start(*words, cwd=here).end()
    assert done.code == 0
    assert "line 1 is damaged (not the task's own sample); evaluating again from there" in done.err
    assert claims(here) == expected


# --- what is wrong


def refused(*words: str) -> str:
    done = bench("niah", *words)
    assert (done.code, done.out) == (2, "") and done.err.count("\n") == 1, done.err
    return done.err


def test_wrong_input_is_said_in_one_line(place: Path) -> None:
    text = ("--text", "--checkpoint", "model")
    assert "trains nothing: name a model by --checkpoint, a run of `bench pretrain`" in refused("--text")
    assert "task.fit=ruler is for `bench niah --text`" in refused("--fit", "ruler")
    assert "task.tokenizer=bytes is for `bench niah --text`" in refused("--tokenizer", "bytes")
    assert "task.haystack='book.txt': input should be 'noise' or 'needles'" in refused("--haystack", "book.txt")
    assert "leave out --model" in refused(*text, "--model", "mamba2")
    assert "leave out --train-length" in refused(*text, "--train-length", "64")
    assert "haystack: can't read book.txt" in refused(*text, "--haystack", "book.txt", "--variants", "single_2")
    assert "length=512 is too short for single_1" in refused(*text, "--eval-lengths", "512")
    assert "length=32 is too short" in refused(*text) and "the smallest length is" in refused(*text)
    assert "evaluation.depths.0='1.5'" in refused(*text, "--depths", "1.5")
    assert "did you mean 'multikey_1'?" in refused(*text, "--variants", "multikey_1x")
    assert "no tokenizer 'gpt3'" in refused(*text, "--tokenizer", "gpt3")
    assert "trained on text, and task niah asks in tokens of its own" in refused("--checkpoint", "model")
    assert not list(place.glob("runs/*/evaluations/*"))


def test_a_model_is_asked_by_its_own_tokenizer_alone(place: Path) -> None:
    vocabulary = place / "vocabulary.txt"
    vocabulary.write_text("".join(f"{byte + 1} {bytes([byte])!r} 1\n" for byte in range(256)))
    said = refused("--text", "--checkpoint", "model", "--tokenizer", "vocabulary.txt")
    assert "was trained with another tokenizer" in said and "name its own by --tokenizer" in said


def edited(folder: Path, edit: Callable[[dict[str, Any]], None]) -> str:
    """The line with which `leaderboard add` refuses a run whose first sample was edited."""
    (path,) = record_path(folder).parent.glob("samples/*.jsonl")
    first, *rest = path.read_text().splitlines(keepends=True)
    line = json.loads(first)
    edit(line)
    path.write_text("".join([json.dumps(line) + "\n", *rest]))
    done = bench("leaderboard", "add", *map(str, folder.glob("runs/*")), "--file", "board.json")
    path.write_text("".join([first, *rest]))
    assert (done.code, done.out) == (2, "") and done.err.count("\n") == 1
    return done.err


def test_changed_samples_are_caught(place: Path) -> None:
    assert bench(*ASKED).code == 0
    own = "sample 0 is not the task's own"

    def right(line: dict[str, Any]) -> None:
        """As if the model had found the needle."""
        line["text"] = f" {line['wanted'][0]}"
        line["answer"], line["score"] = list(line["text"].encode()), 1.0

    assert own in edited(place, lambda line: line.update(text=line["text"] + " and more"))
    assert own in edited(place, lambda line: line.update(text=f" {line['wanted'][0]}", score=1.0))
    assert own in edited(place, lambda line: line.update(score=1.0))
    assert own in edited(place, lambda line: line.update(wanted=["7654321"]))
    assert own in edited(place, lambda line: line.update(distance=[line["distance"][0] + 1]))
    assert own in edited(place, lambda line: line.update(length=line["length"] + 1))
    assert own in edited(place, lambda line: line.update(depth=0.123))
    assert own in edited(place, lambda line: line.update(answer=line["answer"] * 2, text=line["text"] * 2))
    assert "is damaged" in edited(place, lambda line: line.pop("text"))
    assert "is damaged" in edited(place, lambda line: line.update(distance=line["distance"] * 2))
    assert "correct is not what it should be, by its samples" in edited(place, right)


def test_a_changed_record_is_caught_without_its_samples(place: Path) -> None:
    assert bench(*ASKED).code == 0
    path = record_path(place)

    def said(edit: Callable[[dict[str, Any]], None]) -> str:
        content = json.loads(path.read_text())
        edit(content)
        (place / "edited.json").write_text(json.dumps(resealed(content)))
        done = bench("leaderboard", "validate", "edited.json")
        assert (done.code, done.out) == (2, ""), done.out
        return done.err

    def asked_more(content: dict[str, Any]) -> None:
        cell = content["cells"][0]
        cell["asked"][0] += 1
        cell["by_distance"][0]["asked"] += 1
        recount(cell)

    assert "asked is not what it should be" in said(asked_more)
    assert "data_hash is not that of the task's samples" in said(lambda c: c["task"].update(data_hash="0" * 64))
    assert "its cells are not those" in said(lambda c: c["task"]["evaluation"].update(variants=["single_2"]))
    longer = said(lambda c: c["cells"][0]["real_tokens"].update(max=641))
    assert "real_tokens is" in longer
