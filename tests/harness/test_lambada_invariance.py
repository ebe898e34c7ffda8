"""`bench lambada` on passages of unlike lengths: batches, padding, order, processes and kill -9 change no score.

Scores are held to the bounds that `bench selftest` prints.
"""

from __future__ import annotations

import json
import math
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decaybench.core.draws import Draws
from decaybench.harness import evaluation
from decaybench.harness.config import RunConfig, make_config
from decaybench.harness.distributed import ALONE, World
from decaybench.harness.evaluation import Answers, evaluate, predict
from decaybench.harness.progress import Progress
from decaybench.harness.selftest import selftest, small_config
from decaybench.models.checkpoints import write_checkpoint
from decaybench.models.language_model import LanguageModel, build_model
from decaybench.results.record import CellResult
from decaybench.results.run_folder import EvaluationFolder
from decaybench.tasks.base import Batch
from decaybench.tasks.lambada import LambadaEvaluation
from decaybench.tasks.registry import make_task
from decaybench.text.stories import StoryWriter
from tests.command import start
from tests.harness.processes import together
from tests.harness.test_lambada import MODELS

COUNT = 24


@pytest.fixture(scope="module")
def passages(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Stories of two to twelve pairs: from a hundred characters to eight hundred."""
    path = tmp_path_factory.mktemp("passages") / "passages.jsonl"
    writers = [StoryWriter(pairs) for pairs in range(2, 13)]
    with path.open("w") as file:
        for number, bits in enumerate(Draws(5, np.arange(COUNT)).bits(0, writers[-1].draws).tolist()):
            text = writers[number * 7 % len(writers)].write(bits).whole
            file.write(json.dumps({"text": text.removesuffix(".")}) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def bound() -> float:
    """What `bench selftest` allows in float32 between padded rows and rows alone, in units of the largest number."""
    checks = selftest(small_config("mamba2"), dtype=torch.float32, pitfalls={1})
    (bound,) = (check.bound for check in checks if check.name == "left padding")
    return bound


def config(passages: str, model: str = "mamba2+post", **settings: Any) -> RunConfig:
    return make_config(
        {
            "model": {"vocab_size": 257, **MODELS[model]},
            "task": {"name": "lambada", "source": "openai", "file": passages},
            "evaluation": {"variants": ["plain", "before"], "lengths": ["900"]},
            "checkpoint": "none",
            **settings,
        }
    )


def a_model(found: RunConfig) -> LanguageModel:
    """Its embedding is larger than at the start: what it says depends on what it read."""
    model = build_model(found.model, 1).eval()
    with torch.no_grad():
        model.embedding.weight.mul_(8)
    return model


def a_batch(found: RunConfig, variant: str = "plain") -> Batch:
    task = make_task(found.task)
    (cell,) = task.cells(LambadaEvaluation(variants=(variant,)), [900])  # type: ignore[arg-type]
    batch: Batch = task.batch(cell.shape, "test", 0, np.arange(COUNT))
    return batch


def by_row(batch: Batch, answers: Answers) -> list[tuple[list[int], float]]:
    """Each row's first choices, and minus its log-likelihood."""
    assert answers.nats is not None
    ends = np.cumsum(batch.asked.sum(1))[:-1]
    parts = zip(np.split(answers.first, ends), np.split(answers.nats, ends), strict=True)
    return [(first.tolist(), float(nats.sum())) for first, nats in parts]


def rows_of(batch: Batch, rows: Any) -> Batch:
    parts = {name: getattr(batch, name)[rows] for name in ("tokens", "labels", "distance", "positions")}
    return replace(batch, **parts)


def assert_same(got: list[tuple[list[int], float]], want: list[tuple[list[int], float]], bound: float) -> None:
    assert [first for first, _ in got] == [first for first, _ in want]
    scores = np.array([nats for _, nats in want])
    assert np.ptp(scores) > 1, "or nothing could disagree"
    np.testing.assert_allclose([nats for _, nats in got], scores, rtol=0, atol=bound * np.abs(scores).max())


@pytest.fixture(params=MODELS)
def asked(request: pytest.FixtureRequest, passages: str) -> Iterator[tuple[LanguageModel, Batch, Any]]:
    """A model, the plain passages, and what it says of each of them alone, without padding."""
    found = config(passages, request.param)
    model, batch = a_model(found), a_batch(found)
    assert batch.lengths.max() > 4 * batch.lengths.min()
    alone = []
    for row, length in enumerate(batch.lengths):
        single = rows_of(batch, [row])
        bare = Batch(single.tokens[:, :length], single.labels[:, :length], single.distance[:, :length])
        alone += by_row(bare, predict(model, bare, "cpu", likelihood=True))
    yield model, batch, alone


def test_a_batch_says_what_its_rows_say_alone(asked: Any, bound: float) -> None:
    model, batch, alone = asked
    assert_same(by_row(batch, predict(model, batch, "cpu", likelihood=True)), alone, bound)
    first = predict(model, batch, "cpu")
    assert first.nats is None and first.first.tolist() == [choice for choices, _ in alone for choice in choices]


@pytest.mark.parametrize("piece", [64, 4096])
def test_padding_on_the_left_or_the_right(asked: Any, bound: float, piece: int) -> None:
    model, batch, alone = asked
    left = rows_of(batch, slice(None))
    for parts in zip(left.lengths, left.tokens, left.labels, left.distance, left.positions, strict=True):
        length, *arrays = parts
        for array in arrays:
            array[:] = np.roll(array, len(array) - length)
    assert (left.positions[:, -1] > 0).all() and not left.positions[:, 0].all()
    assert_same(by_row(left, predict(model, left, "cpu", likelihood=True, piece=piece)), alone, bound)


def test_sorted_or_shuffled(asked: Any, bound: float) -> None:
    model, batch, alone = asked
    for order in (np.argsort(batch.lengths), np.random.default_rng(3).permutation(COUNT)):
        assert order.tolist() != list(range(COUNT))
        other = rows_of(batch, order)
        found = by_row(other, predict(model, other, "cpu", likelihood=True))
        assert_same(found, [alone[row] for row in order], bound)


def test_rows_are_read_with_others_of_their_length(passages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, ...]] = []
    really = evaluation._read

    def noted(model: LanguageModel, batch: Batch, *rest: Any) -> Answers:
        read.append(batch.tokens.shape)
        assert batch.lengths.max() == batch.tokens.shape[1] <= 1.25 * batch.lengths.min()
        return really(model, batch, *rest)

    monkeypatch.setattr(evaluation, "_read", noted)
    found = config(passages)
    batch = a_batch(found)
    predict(a_model(found), batch, "cpu")
    assert sum(rows for rows, _ in read) == COUNT and 3 < len(read) < 12
    assert sum(rows * columns for rows, columns in read) < 1.15 * batch.lengths.sum() < 0.75 * batch.tokens.size
    del read[:]
    predict(a_model(found), a_batch(found, "before"), "cpu")
    assert read == [(COUNT, 900)], "rows of one length are read together"


# --- whole evaluations


def evaluated(world: World, passages: str, folder: Path, batch_tokens: int = 4000) -> dict[str, CellResult]:
    found = config(passages, batch_tokens=batch_tokens)
    done = evaluate(
        a_model(found),
        found,
        EvaluationFolder(folder),
        train_length=64,
        device="cpu",
        progress=Progress(quiet=True),
        world=world,
    )
    return {cell.variant: cell for cell in done.cells}


def _evaluate(world: World, passages: str, folder: Path) -> None:
    evaluated(world, passages, folder)


def test_batches_of_any_size(passages: str, bound: float, tmp_path: Path) -> None:
    whole = evaluated(ALONE, passages, tmp_path / "whole", 10**6)
    for batch_tokens in (1, 4000):
        for variant, cell in evaluated(ALONE, passages, tmp_path / str(batch_tokens), batch_tokens).items():
            same = whole[variant]
            assert cell.correct == same.correct and cell.value == same.value
            scores, others = (np.array(found.log_likelihood) for found in (same, cell))
            assert np.abs(scores - others).max() <= bound * np.abs(scores).max()
            assert same.perplexity is not None
            assert cell.perplexity == pytest.approx(same.perplexity, rel=1e-4)
            assert math.log(same.perplexity) == pytest.approx(-np.mean(scores), rel=1e-9)


def test_one_process_or_two(passages: str, tmp_path: Path) -> None:
    one = evaluated(ALONE, passages, tmp_path / "one")
    together(_evaluate, passages, tmp_path / "two", folder=tmp_path)
    files = {path.name: path.read_bytes() for path in (tmp_path / "one" / "samples").iterdir()}
    assert len(files) == len(one) == 2 and all(len(content.splitlines()) == COUNT for content in files.values())
    for name, content in files.items():
        same = "each process reads whole batches: the same to the last digit"
        assert (tmp_path / "two" / "samples" / name).read_bytes() == content, same


# --- kill -9


@pytest.fixture(scope="module")
def checkpoint(passages: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = a_model(config(passages))
    facts = {"train_length": 300, "tokenizer_sha256": make_task(config(passages).task).tokenizer_sha256}
    return write_checkpoint(tmp_path_factory.mktemp("given") / "model", model, 1, facts, {}).folder


def samples_of(cwd: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in cwd.glob("runs/*/evaluations/*/samples/*.jsonl"))


def outcome(cwd: Path) -> dict[str, Any]:
    """The record without where and how fast it was made, and the answers."""
    (path,) = cwd.glob("runs/*/evaluations/*/record.json")
    record = json.loads(path.read_text())
    for key in ("environment", "cost", "record_id"):
        del record[key]
    return {"record": record, **{cell.name: cell.read_text() for cell in path.parent.glob("samples/*.jsonl")}}


def test_kill_9_in_the_middle_changes_nothing(passages: str, checkpoint: Path, tmp_path: Path) -> None:
    words = (
        *("lambada", "--source", "openai", "--file", passages, "--checkpoint", str(checkpoint)),
        *("--variants", "plain,before", "--eval-lengths", "3x,4x", "--set", "batch_tokens=1800"),
    )
    (whole := tmp_path / "whole").mkdir()
    (killed := tmp_path / "killed").mkdir()
    done = start(*words, cwd=whole).end()
    assert done.code == 0, done.err
    draws = random.Random(4)
    for count in (1, 13, 30, 55):
        work = start(*words, cwd=killed)
        assert work.wait_for(lambda count=count: samples_of(killed) >= count), work.end().err
        work.process.join(timeout=draws.uniform(0, 0.03))
        work.send(signal.SIGKILL)
        assert work.end().code == -signal.SIGKILL
    assert not list(killed.glob("runs/*/evaluations/*/record.json"))
    assert 55 <= samples_of(killed) < 3 * COUNT
    done = start(*words, cwd=killed).end()
    assert done.code == 0, done.err
    assert outcome(killed) == outcome(whole)
    assert "already done" in start(*words, cwd=killed).end().err
