"""`bench lambada`: the numbers are lm-eval's, records recompute, and what is wrong is said in one line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decaybench.core.config import parse
from decaybench.harness import run as harness_run
from decaybench.harness.config import RunConfig, make_config
from decaybench.harness.evaluation import evaluate
from decaybench.harness.progress import Progress
from decaybench.harness.training import loss_and_hits, to_tensors
from decaybench.models.checkpoints import write_checkpoint
from decaybench.models.config import ModelConfig
from decaybench.models.language_model import LanguageModel, build_model
from decaybench.results.record import CellResult, _problems, read_record
from decaybench.results.run_folder import EvaluationFolder
from decaybench.tasks.lambada import LambadaEvaluation
from decaybench.tasks.registry import make_task
from decaybench.text.tokenizers import ByteTokenizer
from tests.command import TINY, Result, bench
from tests.tasks.test_lambada import PASSAGES, file  # noqa: F401 the fixture
from tests.text.test_lambada import by_lm_eval

STORIES = ("lambada", *TINY, "--train-length", "128", "--variants", "plain,before,between", "--seed", "0")
MODELS: dict[str, dict[str, Any]] = {
    "mamba2+post": {"d_model": 32, "mixer": {"d_state": 8, "headdim": 8}, "post": {"horizon": 64}},
    "rwkv7": {"name": "rwkv7", "d_model": 32, "mixer": {"head_dim": 8}},
    "attention": {"name": "attention", "d_model": 32, "mixer": {"n_heads": 2}},
}


def config(passages: str, model: str = "mamba2+post", **settings: Any) -> RunConfig:
    task = {"name": "lambada", "source": "openai", "file": passages, "train_length": 64, **settings.pop("task", {})}
    evaluation = {"lengths": ["1x", "2x"], "variants": ["plain", "before"], **settings.pop("evaluation", {})}
    sizes = {"vocab_size": 257, **MODELS[model]}
    # With a checkpoint nothing is trained, which no file allows; the model is the tests' own.
    return make_config({"model": sizes, "task": task, "evaluation": evaluation, "checkpoint": "none", **settings})


def live_model(found: RunConfig) -> LanguageModel:
    """One that has seen the first three passages until it foresees their last words."""
    model, task = build_model(found.model, 1), make_task(found.task)
    (cell, *_) = task.cells(LambadaEvaluation(), [64])
    seen = to_tensors(task.batch(cell.shape, "test", 0, np.arange(3)), "cpu")
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(200):
        loss, hits = loss_and_hits(model, *seen)
        if bool(hits.all()):
            return model.eval()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    raise AssertionError("it learned nothing")


def cells(found: RunConfig, folder: Path, model: LanguageModel | None = None) -> dict[str, CellResult]:
    progress = Progress(quiet=True)
    done = evaluate(
        model or live_model(found), found, EvaluationFolder(folder), train_length=64, device="cpu", progress=progress
    )
    return {cell.name: cell for cell in done.cells}


@torch.no_grad()
def lm_eval(model: LanguageModel, text: str, start: list[int]) -> tuple[float, bool]:
    """What lm-eval gives for a passage (HFLM._loglikelihood_tokens): its target's log-likelihood, and is_greedy."""
    context, continuation = by_lm_eval(ByteTokenizer(), text)
    context = start + context
    inputs = torch.tensor([(context + continuation)[:-1]])
    logits = torch.log_softmax(model(inputs).logits.double(), dim=-1)[0, -len(continuation) :]
    wanted = torch.tensor(continuation)
    return float(logits.gather(1, wanted[:, None]).sum()), bool((logits.argmax(-1) == wanted).all())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("start", ["none", "separator"])
def test_accuracy_and_perplexity_are_lm_evals(file: str, model: str, start: str, tmp_path: Path) -> None:  # noqa: F811
    found = config(file, model, task={"start": start})
    reader = live_model(found)
    assert found.evaluation.samples == len(PASSAGES), "all where nothing is said"
    plain = cells(found, tmp_path, reader)[f"plain-length{57 + (start != 'none') + 1}"]
    answers = [lm_eval(reader, text, [256] if start == "separator" else []) for text in PASSAGES]
    assert 3 <= sum(greedy for _, greedy in answers) < 5
    assert plain.value == sum(greedy for _, greedy in answers) / len(answers)
    assert plain.perplexity == pytest.approx(math.exp(-np.mean([nats for nats, _ in answers])), rel=1e-5)
    assert plain.log_likelihood == pytest.approx([nats for nats, _ in answers], rel=1e-5)
    assert plain.asked == tuple(len(by_lm_eval(ByteTokenizer(), text)[1]) for text in PASSAGES)


@pytest.mark.parametrize("batch_tokens", [1, 100, 4096])
def test_batches_and_padding_change_nothing(file: str, batch_tokens: int, tmp_path: Path) -> None:  # noqa: F811
    whole = cells(config(file, batch_tokens=16_384), tmp_path / "whole")
    parts = cells(config(file, batch_tokens=batch_tokens), tmp_path / "parts")
    for name, cell in whole.items():
        assert parts[name].correct == cell.correct
        assert parts[name].log_likelihood == pytest.approx(cell.log_likelihood, rel=1e-5)
        assert (parts[name].real_tokens, parts[name].by_distance) == (cell.real_tokens, cell.by_distance)


def test_passages_whose_word_was_not_there_before_are_counted_apart(file: str, tmp_path: Path) -> None:  # noqa: F811
    for cell in cells(config(file), tmp_path).values():
        assert cell.unwritten is not None
        assert (cell.unwritten.samples, cell.unwritten.asked) == (1, len(" waited"))
        assert sum(part.samples for part in cell.by_distance) == len(PASSAGES) - 1
        assert sum(part.asked for part in cell.by_distance) == sum(cell.asked) - len(" waited")
        assert sum(part.correct for part in cell.by_distance) == sum(cell.correct) - cell.unwritten.correct
    all_written = cells(config(file, evaluation={"samples": 3}), tmp_path / "three")
    assert all(cell.unwritten is None and cell.by_distance for cell in all_written.values())


def test_counts_of_what_was_not_written_must_add_up(file: str, tmp_path: Path) -> None:  # noqa: F811
    (cell, *_) = cells(config(file), tmp_path).values()
    assert not list(_problems(cell, "all_correct", 64))
    left = cell.unwritten
    assert left is not None
    for update, problem in (
        ({"unwritten": None}, f"by_distance has {sum(cell.asked) - left.asked} asked, but the samples have"),
        ({"unwritten": left.model_copy(update={"asked": 9})}, "by_distance and unwritten have"),
        ({"unwritten": left.model_copy(update={"samples": 6})}, "in 6 samples of 5"),
        ({"by_distance": ()}, f"by_distance and unwritten have {left.asked} asked"),
    ):
        assert any(problem in line for line in _problems(cell.model_copy(update=update), "all_correct", 64))


# --- the command


@pytest.fixture
def trained(here: Path) -> Path:
    done = bench(*STORIES)
    assert done.code == 0, done.err
    (run,) = (here / "runs").iterdir()
    return run


def test_stories_are_learned_from_and_asked(trained: Path) -> None:
    (path,) = trained.glob("evaluations/*/record.json")
    record = read_record(path)
    assert [cell.name for cell in record.cells] == [
        *("plain-length70", "before-length128", "before-length256"),
        *("between-length128", "between-length256"),
    ]
    assert record.task.config["tokenizer"] == "words" and record.task.config["source"] == "synthetic"
    assert record.model.config["vocab_size"] == record.task.config["vocab_size"]
    assert all(cell.references == {"guess": 0.25} for cell in record.cells)
    assert all(cell.perplexity and 200 < cell.perplexity < 600 for cell in record.cells), "nothing was learned yet"
    between = record.cells[-1]
    assert min(part.low for part in between.by_distance) >= 128
    assert bench("leaderboard", "add", str(trained), "--file", "board.json").code == 0
    assert "1 entries, all valid" in bench("leaderboard", "validate", "board.json").out


def test_a_checkpoint_is_only_asked(trained: Path) -> None:
    done = bench(
        "lambada", "--checkpoint", str(trained), "--variants", "plain", "--samples", "5", "--set", "task.pairs=3"
    )
    assert done.code == 0, done.err
    assert "training" not in done.err
    assert "plain" in done.out and "0.333" in done.out, "a guess among three"


@pytest.fixture
def given(here: Path) -> tuple[str, ...]:
    """Words that ask a model of bytes, of an unknown training length, for published passages."""
    (here / "given").mkdir()
    model = build_model(parse(ModelConfig, {"vocab_size": 257, **MODELS["mamba2+post"]}), 1)
    write_checkpoint(here / "given" / "model", model, 1, {"train_length": None}, {})
    return ("--source", "openai", "--checkpoint", "given/model")


def test_passages_are_read_alone_where_nothing_is_said(file: str, given: tuple[str, ...], here: Path) -> None:  # noqa: F811
    words = (*given, "--file", file)
    done = bench("lambada", *words)
    assert done.code == 0, "no lengths, so no training length either: " + done.err
    assert "each passage is read alone; --variants plain,before reads it behind unrelated ones too" in done.err
    assert "million tokens" not in done.err
    (path,) = here.glob("runs/*/evaluations/*/record.json")
    assert [(cell.name, cell.n) for cell in read_record(path).cells] == [("plain-length58", len(PASSAGES))]
    assert "needs a training length" in asked(*words, "--variants", "plain,before").err
    said = asked(*words, "--eval-lengths", "100").err
    assert "evaluation.lengths would be ignored: variant plain reads each passage alone" in said


HOSTILE = (
    b'{"text": "The cat saw the dog, and the dog saw the cat"}\n'
    b'{"text": "word"}\n'
    b'{"text": "The c\xff\xfet saw the dog"}\n'
    b'\n[1, 2]\n{"text": 5}\n{"txt": "a b"}\n'
    b'{"text": "The \\u0000 dog saw the cat"}\n'
    b'{"text": "He gave the key to Ann. She thanked him, sa'
)


def test_of_a_damaged_file_what_can_be_read_is_asked(given: tuple[str, ...], here: Path) -> None:
    (here / "some.jsonl").write_bytes(HOSTILE)
    done = bench("lambada", *given, "--file", "some.jsonl")
    assert done.code == 0 and "Traceback" not in done.err
    for line in (
        "some.jsonl: 4 broken rows skipped; the first: some.jsonl line 5 (no object but list)",
        "some.jsonl: 2 byte sequences that aren't UTF-8 replaced by U+FFFD; the first: some.jsonl line 3",
        "some.jsonl: 1 NUL characters kept; the first: some.jsonl line 8",
        "some.jsonl: 1 passages without a space skipped; the first: number 2, 'word'",
        "these 3 passages aren't the published test set of LAMBADA openai",
    ):
        assert line in done.err.splitlines(), done.err
    (path,) = here.glob("runs/*/evaluations/*/record.json")
    assert [cell.n for cell in read_record(path).cells] == [3]
    (here / "empty.jsonl").touch()
    assert asked(*given, "--file", "empty.jsonl").err.endswith("task.file: empty.jsonl holds no passage\n")
    assert "samples=4 is more than there are passages: 3" in asked(*given, "--file", "some.jsonl", "--samples", "4").err
    assert len(list(here.glob("runs/*/evaluations/*"))) == 1, "what is refused leaves nothing"


def test_an_evaluation_of_many_tokens_says_so(file: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    found = config(file)
    cells_ = make_task(found.task).cells(found.evaluation, [64, 128])
    assert harness_run._much(found, cells_) == []
    monkeypatch.setattr(harness_run, "_MANY_TOKENS", 5 * (57 + 64 + 128))
    monkeypatch.setattr(harness_run, "_MILLION", 100)
    (said,) = harness_run._much(found, cells_)
    assert said.startswith("the evaluation reads 12 million tokens at most, 5 samples in each of 3 cells; --samples")


def asked(*words: str) -> Result:
    done = bench("lambada", *words)
    assert done.code == 2 and done.err.count("\n") == 1, done.err
    return done


@pytest.mark.usefixtures("here")
def test_wrong_input_is_said_in_one_line(file: str) -> None:  # noqa: F811
    assert (
        "source=openai is for evaluation only: name a model by --checkpoint"
        in asked("--source", "openai", "--file", file).err
    )
    assert "needs file" in asked("--source", "openai").err
    assert "did you mean 'openai'?" in asked("--source", "opnai").err
    assert "file is for source openai or standard" in asked("--file", file).err
    assert "did you mean 'before'?" in asked("--variants", "befor").err
    assert "write none, separator" in asked("--start", "bos").err
    assert "length=64 is too short" in asked("--eval-lengths", "0.5x").err


def test_a_model_is_asked_by_its_own_tokenizer_alone(trained: Path) -> None:
    said = asked("--checkpoint", str(trained), "--tokenizer", "bytes").err
    assert "was trained with another tokenizer" in said and "name its own by --tokenizer" in said


def test_the_stories_tokenizer_reads_no_passages(trained: Path, file: str) -> None:  # noqa: F811
    said = asked("--checkpoint", str(trained), "--source", "openai", "--file", file).err
    assert "tokenizer=words knows the words of the stories only" in said
