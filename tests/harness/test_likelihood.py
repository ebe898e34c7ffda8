"""Batches with positions, and tasks that ask how likely the answers were: against one sample at a time, by hand."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decaybench.core.errors import RunError, UserError
from decaybench.core.files import atomic_write_json
from decaybench.core.hashing import digest, file_digest
from decaybench.harness import evaluation
from decaybench.harness.config import RunConfig, make_config
from decaybench.harness.evaluation import evaluate, predict
from decaybench.harness.progress import Progress
from decaybench.harness.run import carry_out
from decaybench.harness.training import loss_and_hits, to_tensors
from decaybench.harness.verify import NotRecomputableError, add_to_leaderboard, validate_file, verify
from decaybench.models import language_model
from decaybench.models.language_model import LanguageModel, build_model
from decaybench.results.record import Record, perplexity, record_hash
from decaybench.results.run_folder import EvaluationFolder
from decaybench.tasks.base import Batch, Shape
from decaybench.tasks.registry import make_task
from tests.harness.spelling import Spelling, spelling, spelling_config  # noqa: F401 the fixture

MODELS: dict[str, dict[str, Any]] = {
    "mamba2+post": {"d_model": 16, "mixer": {"d_state": 8, "headdim": 8}, "post": {}},
    "attention": {"name": "attention", "d_model": 16, "mixer": {"n_heads": 2}},
    "rwkv7": {"name": "rwkv7", "d_model": 16, "mixer": {"head_dim": 8}},
}

pytestmark = pytest.mark.usefixtures("spelling")


def config(model: str = "mamba2+post", **settings: Any) -> RunConfig:
    return make_config(spelling_config(model=MODELS[model], **settings))


def live_model(found: RunConfig) -> LanguageModel:
    """A model whose answers differ from place to place."""
    model = build_model(found.model, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3.0)
    return model.eval()


def a_batch(found: RunConfig, n: int = 6, length: int = 16) -> Batch:
    return make_task(found.task).batch(Shape(length=length), "test", 0, np.arange(n))


def by_hand(model: LanguageModel, batch: Batch) -> list[tuple[list[float], list[int]]]:
    """Of each row the log-probabilities of its labels and the first choices: the second document alone, no padding."""
    found = []
    assert batch.positions is not None
    for tokens, labels, positions in zip(batch.tokens, batch.labels, batch.positions, strict=True):
        start = int(np.flatnonzero(positions == 1)[-1])
        real = positions[start:] != 0
        ids, wanted = tokens[start:][real], labels[start:][real]
        with torch.no_grad():
            logits = model(torch.from_numpy(ids)[None]).logits[0].double().numpy()
        places = np.flatnonzero(wanted >= 0)
        chances = [math.log(np.exp(logits[p] - logits[p].max())[wanted[p]]) for p in places]
        chances = [
            c - math.log(np.exp(logits[p] - logits[p].max()).sum()) for c, p in zip(chances, places, strict=True)
        ]
        found.append((chances, [int(logits[p].argmax()) for p in places]))
    return found


def asked(found: RunConfig, folder: Path, model: LanguageModel | None = None) -> evaluation.Evaluated:
    return evaluate(
        model or live_model(found),
        found,
        EvaluationFolder(folder),
        train_length=16,
        device="cpu",
        progress=Progress(quiet=True),
    )


# --- positions


@pytest.mark.parametrize("piece", [1, 5, 16, 100])
@pytest.mark.parametrize("model", MODELS)
def test_answers_and_likelihoods_are_those_of_the_document_alone(model: str, piece: int) -> None:
    found = config(model)
    batch = a_batch(found)
    answers = predict(live_model(found), batch, "cpu", likelihood=True, piece=piece)
    expected = by_hand(live_model(found), batch)
    assert answers.first.tolist() == [choice for _, choices in expected for choice in choices]
    assert len(set(answers.first.tolist())) > 2, "or nothing could disagree"
    assert answers.nats is not None and answers.nats.dtype == np.float64
    np.testing.assert_allclose(answers.nats, [-chance for chances, _ in expected for chance in chances], rtol=2e-5)
    without = predict(live_model(found), batch, "cpu", piece=piece)
    assert without.first.tolist() == answers.first.tolist() and without.nats is None


@pytest.mark.parametrize("model", MODELS)
def test_training_reads_positions_too(model: str) -> None:
    found = config(model)
    batch = a_batch(found)
    loss, hits = loss_and_hits(live_model(found), *to_tensors(batch, "cpu"))
    expected = by_hand(live_model(found), batch)
    chances = [chance for chances, _ in expected for chance in chances]
    assert float(loss.detach()) == pytest.approx(-np.mean(chances), rel=1e-5)
    right = [c == int(w) for c, w in zip([c for _, cs in expected for c in cs], batch.labels[batch.asked], strict=True)]
    assert hits.tolist() == right


def test_padding_counts_neither_as_length_nor_as_data(tmp_path: Path) -> None:
    found = config()
    batch = a_batch(found, n=7)
    result = asked(found, tmp_path).cells[0]
    assert batch.positions is not None
    lengths = [int(np.count_nonzero(row)) for row in batch.positions]
    assert batch.lengths.tolist() == lengths and len(set(lengths)) > 1 and max(lengths) < 16
    tokens = result.real_tokens
    assert (tokens.min, tokens.max) == (min(lengths), max(lengths))
    assert tokens.mean == pytest.approx(np.mean(lengths))
    content, padded = hashlib.sha256(), hashlib.sha256()
    for index in range(7):
        one = make_task(found.task).batch(Shape(length=16), "test", 0, np.array([index]))
        assert one.positions is not None
        real = one.positions[0] != 0
        for part in (one.tokens, one.labels, one.positions):
            content.update(part[0][real].astype("<i8").tobytes())
    evaluation.update_digest(padded, batch)
    assert padded.hexdigest() == content.hexdigest()
    assert digest([["spelling-length16", content.hexdigest()]]) == digest([[result.name, padded.hexdigest()]])


def test_a_batch_without_positions_is_hashed_as_ever() -> None:
    plain = Batch(np.arange(6).reshape(2, 3), np.full((2, 3), -100), np.zeros((2, 3), dtype=np.int64))
    found = hashlib.sha256()
    evaluation.update_digest(found, plain)
    rows = [0, 1, 2, -100, -100, -100, 3, 4, 5, -100, -100, -100]
    assert found.hexdigest() == hashlib.sha256(np.array(rows, dtype="<i8").tobytes()).hexdigest()
    assert plain.lengths.tolist() == [3, 3]


def test_tokens_trained_on_are_real_ones(here: Path) -> None:
    record = carry_out(config(), progress=Progress(quiet=True)).record
    made = make_task(config().task)
    batch = made.batch(Shape(length=16), "train", 0, np.arange(24))
    assert record.training is not None and record.training.tokens == int(batch.lengths.sum()) < 24 * 16


# --- likelihoods


def test_a_sample_keeps_the_likelihood_of_its_whole_answer(tmp_path: Path) -> None:
    found = config()
    result = asked(found, tmp_path)
    for cell in result.cells:
        lines = EvaluationFolder(tmp_path).samples(cell.name).read()
        expected = [sum(chances) for chances, _ in by_hand(live_model(found), a_batch(found, 7, cell.eval_length))]
        likely = [line.log_likelihood for line in lines]
        assert likely == pytest.approx(expected, abs=2e-5)
        assert all(value == round(value, 6) for value in likely if value is not None)
        assert cell.log_likelihood == tuple(likely)
        assert cell.perplexity == pytest.approx(math.exp(-sum(likely) / 7), rel=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_tokens", [1, 48, 10_000])
def test_batches_change_likelihoods_in_the_last_digit_at_most(tmp_path: Path, batch_tokens: int) -> None:
    whole = asked(config(), tmp_path / "a").cells[0]
    other = asked(config(batch_tokens=batch_tokens), tmp_path / "b").cells[0]
    assert other.log_likelihood == pytest.approx(whole.log_likelihood, abs=2e-6)
    assert (other.correct, other.name) == (whole.correct, whole.name)


def test_what_asks_for_no_likelihood_has_none(here: Path) -> None:
    settings: dict[str, Any] = {"task": {"name": "mqar", "train_length": 16}, "model": MODELS["mamba2+post"]}
    found = make_config({**settings, "training": {"steps": 2}, "evaluation": {"lengths": ["1x"], "samples": 3}})
    outcome = carry_out(found, progress=Progress(quiet=True))
    text = outcome.evaluation.record_path.read_text()
    assert "log_likelihood" not in text and "perplexity" not in text and "positions" not in text
    lines = outcome.evaluation.samples(outcome.record.cells[0].name).path.read_text()
    assert "log_likelihood" not in lines
    assert not (outcome.evaluation.path / "paths.json").exists()


def test_an_evaluation_with_likelihoods_goes_on_where_it_was(tmp_path: Path) -> None:
    found = config()
    whole = asked(found, tmp_path)
    (path,) = tmp_path.rglob("*length16.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    for broken in (
        "".join(lines[:5]),
        "".join([*lines[:2], lines[2].replace('"log_likelihood":-', '"log_likelihood":'), *lines[3:]]),
        "".join([*lines[:2], json.dumps({**json.loads(lines[2]), "log_likelihood": None}) + "\n", *lines[3:]]),
    ):
        path.write_text(broken)
        again = asked(found, tmp_path)
        assert again.cells == whole.cells and again.tokens > 0
        assert path.read_text() == "".join(lines)


def test_a_model_without_numbers_is_refused(tmp_path: Path) -> None:
    found = config()
    model = live_model(found)
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    with pytest.raises(RunError, match=r"log-likelihood of sample 0 in cell spelling-length16 is nan, not a number"):
        asked(found, tmp_path, model)


def test_perplexity_is_absent_where_no_number_holds_it() -> None:
    assert perplexity([-1.0, -3.0]) == pytest.approx(math.e**2)
    assert perplexity([-800.0]) is None


# --- the head applied part by part


@pytest.mark.parametrize("at_once", [1, 12 * 4, 10**9])
def test_scores_part_by_part_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    found = config()
    tokens, labels, positions = to_tensors(a_batch(found), "cpu")
    model = live_model(found)
    loss, hits = loss_and_hits(model, tokens, labels, positions)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    expected = torch.autograd.grad(loss, weights, allow_unused=True)
    monkeypatch.setattr(language_model, "LOGITS_AT_ONCE", at_once)
    scores = model.score(tokens, labels, positions)
    assert torch.allclose(scores.nats.mean(), loss, rtol=1e-6)
    assert torch.equal(scores.first == labels[labels >= 0], hits)
    for one, other in zip(torch.autograd.grad(scores.nats.mean(), weights, allow_unused=True), expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.allclose(one, other, rtol=1e-4, atol=1e-7)


# --- records


def test_a_record_with_likelihoods_and_a_file_recomputes(here: Path) -> None:
    (here / "private").mkdir()
    file = here / "private" / "alphabet.txt"
    file.write_text("abc")
    found = config(task={"file": "private/alphabet.txt", "sha256": file_digest(file)})
    outcome = carry_out(found, progress=Progress(quiet=True))
    text = outcome.evaluation.record_path.read_text()
    assert "private" not in text and outcome.record.task.config["file"] == "alphabet.txt"
    assert list(add_to_leaderboard(Path("board.json"), [outcome.run.path])) == [(outcome.evaluation.record_path, True)]
    lacking = f"not recomputable here (needs alphabet.txt, sha256 {file_digest(file)})"
    assert validate_file(Path("board.json")) == (0, (lacking,)), "the record has the file's name alone"
    (here / "alphabet.txt").write_text("abc")
    assert validate_file(Path("board.json")) == (1, ())
    file.write_text("abd")
    with pytest.raises(UserError, match=r"not recomputable here \(needs alphabet.txt"):
        list(add_to_leaderboard(Path("board.json"), [outcome.run.path]))


def test_a_missing_file_is_said_before_anything_is_done(here: Path) -> None:
    with pytest.raises(UserError, match=r"task.file=gone.txt: not the file"):
        carry_out(config(task={"file": "gone.txt", "sha256": "0" * 64}), progress=Progress(quiet=True))
    assert not (here / "runs").exists()


def test_where_a_file_lies_is_in_no_hash() -> None:
    one, other = (config(task={"file": path, "sha256": "0" * 64}) for path in ("a/x.txt", "/b/y.txt"))
    third = config(task={"file": "a/x.txt", "sha256": "1" * 64})
    assert one.training_hash == other.training_hash != third.training_hash
    assert one.evaluation_hash == other.evaluation_hash != third.evaluation_hash
    ids = [make_task(c.task).sample_ids(Shape(length=16), "test", 0, np.arange(2)) for c in (one, other, third)]
    assert ids[0] == ids[1] != ids[2]
    assert [c.task.for_record()["file"] for c in (one, other)] == ["x.txt", "y.txt"]


def changed(record: Record, edit: Any) -> Record:
    content = json.loads(record.to_json())
    edit(content["cells"][0])
    from decaybench.results.record import parse_record

    return parse_record({**content, "record_id": record_hash(content)}, "record")


def test_changed_likelihoods_are_refused(here: Path) -> None:
    outcome = carry_out(config(), progress=Progress(quiet=True))
    record, folder = outcome.record, outcome.evaluation
    verify(record, folder)
    verify(record)

    def said(edit: Any) -> str:
        with pytest.raises(UserError) as error:
            verify(changed(record, edit), folder)
        assert not isinstance(error.value, NotRecomputableError)
        return str(error.value)

    def other(cell: dict[str, Any]) -> None:
        cell["log_likelihood"][0] -= 0.5
        cell["perplexity"] = perplexity(cell["log_likelihood"])

    assert "log_likelihood is not what it should be, by its samples" in said(other)
    assert "but its log-likelihoods give" in said(lambda cell: cell.update(perplexity=1.5))
    assert "but its log-likelihoods give" in said(lambda cell: cell.pop("perplexity"))
    assert "perplexity is" in said(lambda cell: cell.pop("log_likelihood"))
    both = lambda cell: (cell.pop("log_likelihood"), cell.pop("perplexity"))  # noqa: E731
    assert "log_likelihood is for tasks that ask for it" in said(both)
    assert "log_likelihood has 6 numbers" in said(lambda cell: cell["log_likelihood"].pop())
    assert "log_likelihood.0=0.5" in said(lambda cell: cell["log_likelihood"].__setitem__(0, 0.5))


def test_tables_show_the_perplexity(here: Path) -> None:
    from rich.console import Console

    record = carry_out(config(), progress=Progress(quiet=True)).record
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(record)
    text = console.export_text()
    assert "perplexity" in text and f"{record.cells[0].perplexity:.4g}" in text
    assert "perplexity" in record._repr_html_()


def test_damaged_paths_are_said(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    assert folder.read_paths() == {}
    folder.write_paths({"file": "here.txt", "tokenizer": "bytes"})
    assert folder.read_paths() == {"file": "here.txt", "tokenizer": "bytes"}, "neither is a file here"
    (tmp_path / "there.txt").touch()
    folder.write_paths({"file": str(tmp_path / "there.txt")})
    assert folder.read_paths() == {"file": str(tmp_path / "there.txt")}
    atomic_write_json(tmp_path / "paths.json", {"file": 3})
    with pytest.raises(UserError, match=r"paths.json is damaged"):
        folder.read_paths()


def test_the_task_for_tests_has_what_is_tested() -> None:
    batch = a_batch(config(), n=30)
    assert batch.positions is not None
    inside = (batch.positions == 0)[:, 1:] & (batch.positions != 0)[:, :-1]
    assert inside.any(1).all(), "padding between tokens"
    assert ((batch.positions == 1).sum(1) == 2).all(), "two documents"
    assert Spelling.likelihood
