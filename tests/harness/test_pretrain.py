"""Language models on text: what an evaluation sums up, against each document alone; training in parts; the command."""

from __future__ import annotations

import json
import math
import resource
import shutil
import signal
import sys
import types
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from decaybench.core.errors import RunError, UserError
from decaybench.harness import evaluation, training
from decaybench.harness.config import RunConfig, make_config
from decaybench.harness.estimate import estimate
from decaybench.harness.evaluation import Evaluated, evaluate
from decaybench.harness.plans import make_plan
from decaybench.harness.presets import configure
from decaybench.harness.progress import Progress
from decaybench.harness.training import learning_rate, train
from decaybench.harness.verify import verify
from decaybench.models.checkpoints import checkpoints_in, read_checkpoint
from decaybench.models.language_model import LanguageModel, build_model
from decaybench.results.record import CellResult, Record, parse_record, read_record, record_hash
from decaybench.results.run_folder import EvaluationFolder, RunFolder
from decaybench.tasks.registry import make_task
from tests.command import bench, start
from tests.token_shards import prepared, stories

T = 32
MODELS: dict[str, dict[str, Any]] = {
    "mamba2+post": {"d_model": 16, "n_layers": 2, "mixer": {"d_state": 8, "headdim": 8}, "post": {}},
    "attention": {"name": "attention", "d_model": 16, "n_layers": 2, "mixer": {"n_heads": 2}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("text") / "stories", stories(60, longest=30))


def config(folder: Path, model: str = "mamba2+post", **settings: Any) -> RunConfig:
    return make_config(
        {
            "model": MODELS[model],
            "task": {"name": "text", "train_length": T, "data": str(folder), **settings.pop("task", {})},
            "training": {"steps": 12, "batch_samples": 6, "warmup": 2, **settings.pop("training", {})},
            "evaluation": {"lengths": ["1x", "4x"], "samples": 5, **settings.pop("evaluation", {})},
            **settings,
        }
    )


def live_model(found: RunConfig) -> LanguageModel:
    """A model whose answers differ from place to place."""
    model = build_model(found.model, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3.0)
    return model.eval()


def asked(found: RunConfig, folder: Path) -> Evaluated:
    return evaluate(
        live_model(found),
        found,
        EvaluationFolder(folder),
        train_length=T,
        device="cpu",
        progress=Progress(quiet=True),
    )


def trained(found: RunConfig, folder: Path) -> tuple[LanguageModel, list[dict[str, Any]]]:
    """The model, and the events of its training."""
    opened = RunFolder.open(folder)
    opened.write_config(found.plain())
    model, _, _ = train(found, opened, device="cpu", backend="torch", progress=Progress(quiet=True))
    return model, [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


# --- what is summed up


def documents(tokens: np.ndarray, labels: np.ndarray, reset: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A window's documents, each with its separator first."""
    starts = [0, *(place for place in range(1, len(tokens)) if reset and tokens[place] == 256), len(tokens)]
    for first, stop in pairwise(starts):
        yield tokens[first:stop], labels[first:stop]


def by_hand(model: LanguageModel, tokens: np.ndarray, labels: np.ndarray, reset: bool) -> dict[int, list[float]]:
    """By the last position of a bin: tokens asked, right first choices, bytes, nats."""
    found: dict[int, list[float]] = {}
    for ids, wanted in documents(tokens, labels, reset):
        with torch.no_grad():
            chances = model(torch.from_numpy(ids)[None]).logits[0].double().log_softmax(-1).numpy()
        for t, label in enumerate(wanted.tolist(), start=1):
            high = next(2**k for k in range(20) if t <= 2**k)
            sums = found.setdefault(high, [0, 0, 0, 0.0])
            sums[0] += 1
            sums[1] += int(chances[t - 1].argmax() == label)
            sums[2] += int(label < 256)
            sums[3] -= float(chances[t - 1, label])
    return dict(sorted(found.items()))


@pytest.mark.parametrize("piece", [7, 4096])
@pytest.mark.parametrize(("model", "reset"), [("mamba2+post", True), ("mamba2+post", False), ("attention", True)])
def test_sums_are_those_of_each_document_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, reset: bool, piece: int
) -> None:
    monkeypatch.setattr(evaluation.predict, "__kwdefaults__", {"likelihood": False, "piece": piece})
    found = config(folder, model, task={"reset": reset})
    result = asked(found, tmp_path)
    made = make_task(found.task)
    several = 0
    for cell, said in zip(made.cells(found.evaluation, [T, 4 * T]), result.cells, strict=True):
        batch = made.batch(cell.shape, "test", 0, np.arange(5))
        several += int((batch.tokens[:, 1:] == 256).sum())
        rows = [by_hand(live_model(found), *row, reset) for row in zip(batch.tokens, batch.labels, strict=True)]
        lines = EvaluationFolder(tmp_path).samples(cell.name).read()
        for row, line in zip(rows, lines, strict=True):
            assert line.by_position is not None and (line.target, line.answer, line.distance) == ((), (), ())
            assert [part.high for part in line.by_position] == list(row)
            for part, (count, right, size, nats) in zip(line.by_position, row.values(), strict=True):
                assert (part.asked, part.correct, part.bytes) == (count, right, size)
                assert part.nats == pytest.approx(nats, rel=2e-5)
            assert line.score == sum(sums[1] for sums in row.values()) / cell.shape.length
            assert line.log_likelihood == pytest.approx(-math.fsum(part.nats for part in line.by_position), abs=1e-6)
        check_cell(said, rows)
    assert several > 3, "or nothing starts anew"


def check_cell(said: CellResult, rows: list[dict[int, list[float]]]) -> None:
    totals = np.array([np.sum(list(row.values()), axis=0) for row in rows])
    assert said.asked == tuple(totals[:, 0]) and said.correct == tuple(totals[:, 1])
    assert said.bytes == tuple(totals[:, 2]) and said.log_likelihood == pytest.approx(-totals[:, 3], rel=2e-5)
    assert said.value == pytest.approx((totals[:, 1] / totals[:, 0]).mean())
    bits = totals[:, 3] / math.log(2)
    ratio = bits.sum() / totals[:, 2].sum()
    assert said.bits_per_byte == pytest.approx(ratio, rel=2e-5)
    n, spread = len(rows), np.cov(bits, totals[:, 2])
    variance = (spread[0, 0] - 2 * ratio * spread[0, 1] + ratio**2 * spread[1, 1]) / n
    assert said.bits_per_byte_error == pytest.approx(math.sqrt(variance) / totals[:, 2].mean(), rel=1e-3)
    assert said.perplexity is None and said.by_distance == ()
    assert said.by_position is not None
    highs = sorted({high for row in rows for high in row})
    assert [(part.low, part.high) for part in said.by_position] == [(high // 2 + 1, high) for high in highs]
    for part in said.by_position:
        here = np.array([row[part.high] for row in rows if part.high in row])
        assert part.samples == len(here)
        assert [part.asked, part.correct, part.bytes] == here[:, :3].sum(0).tolist()
        assert part.nats == pytest.approx(here[:, 3].sum(), rel=2e-5)
        assert part.perplexity == pytest.approx(math.exp(here[:, 3].sum() / here[:, 0].sum()), rel=1e-4)
        assert part.bits_per_byte == pytest.approx(here[:, 3].sum() / math.log(2) / here[:, 2].sum(), rel=2e-5)


def test_a_model_that_knows_nothing_takes_the_logarithm_of_its_vocabulary(folder: Path, tmp_path: Path) -> None:
    found = config(folder)
    model = build_model(found.model, 0)
    with torch.no_grad():
        model.norm.weight.zero_()
    result = evaluate(
        model, found, EvaluationFolder(tmp_path), train_length=T, device="cpu", progress=Progress(quiet=True)
    )
    for cell in result.cells:
        assert cell.bytes is not None
        assert cell.bits_per_byte == pytest.approx(math.log2(257) * sum(cell.asked) / sum(cell.bytes), rel=1e-6)


def damaged(line: dict[str, Any], what: str) -> None:
    part = line["by_position"][2]
    changes: dict[str, Callable[[], Any]] = {
        "asked": lambda: part.update(asked=part["asked"] + 1),
        "bytes": lambda: part.update(bytes=part["bytes"] + 1),
        "high": lambda: part.update(high=64),
        "more right than asked": lambda: part.update(correct=part["asked"] + 1),
        "nats": lambda: part.update(nats=part["nats"] + 1),
        "likelihood": lambda: line.update(log_likelihood=line["log_likelihood"] - 1),
        "score": lambda: line.update(score=0.123),
        "no sums": lambda: line.pop("by_position"),
        "a bin less": lambda: line["by_position"].pop(),
    }
    changes[what]()


@pytest.mark.parametrize(
    "what",
    ["asked", "bytes", "high", "more right than asked", "nats", "likelihood", "score", "no sums", "a bin less"],
)
def test_a_line_that_is_not_the_tasks_own_is_done_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    found = config(folder, batch_tokens=2 * T)
    whole = asked(found, tmp_path)
    (path,) = tmp_path.rglob(f"*length{T}.jsonl")
    content = path.read_bytes()
    lines = [json.loads(line) for line in content.splitlines()]
    damaged(lines[2], what)
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    again = asked(found, tmp_path)
    assert "line 3 is damaged" in capsys.readouterr().err
    assert path.read_bytes() == content
    assert (again.cells, again.tokens) == (whole.cells, 3 * T)


# --- training


def test_a_batch_in_parts_gives_the_gradients_of_the_whole(folder: Path, tmp_path: Path) -> None:
    whole, events = trained(config(folder), tmp_path / "whole")
    for tokens in (1, 2 * T, 4 * T):
        parts, same = trained(config(folder, micro_batch_tokens=tokens), tmp_path / str(tokens))
        assert same[-1]["loss"] == pytest.approx(events[-1]["loss"], abs=1e-5)
        assert same[-1]["tokens"] == events[-1]["tokens"] == 12 * 6 * T
        for name, value in parts.state_dict().items():
            assert torch.allclose(value, whole.state_dict()[name], rtol=1e-3, atol=1e-4), name
    hashes = {config(folder, micro_batch_tokens=n).training_hash for n in (None, 1, 64)}
    assert len(hashes) == 1, "how it is computed is no part of what is computed"


def test_activations_made_again_change_nothing(folder: Path, tmp_path: Path) -> None:
    kept, _ = trained(config(folder), tmp_path / "kept")
    again, _ = trained(config(folder, recompute=True), tmp_path / "again")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in kept.state_dict().items())


def test_activations_are_made_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {False: 0, True: 0}
    for recompute in calls:
        model = build_model(config(folder).model)
        mixer, really = model.blocks[1].mixer, model.blocks[1].mixer.forward

        def counted(*arguments: Any, really: Any = really, recompute: bool = recompute) -> Any:
            calls[recompute] += 1
            return really(*arguments)

        monkeypatch.setattr(mixer, "forward", counted)
        if recompute:
            training._recompute(model)
        tokens = torch.zeros(1, 8, dtype=torch.long)
        model.score(tokens, tokens).nats.sum().backward()
        assert model.embedding.weight.grad is not None
    assert calls == {False: 1, True: 2}


def test_checkpoints_are_kept_by_rule(folder: Path, tmp_path: Path) -> None:
    trained(config(folder, keep=4, checkpoint_seconds=0), tmp_path / "all")
    assert [path.name for path in checkpoints_in(tmp_path / "all" / "checkpoint")] == [
        f"step-{step:08d}" for step in (4, 8, 11, 12)
    ]
    trained(config(folder, keep=5, checkpoint_seconds=1000), tmp_path / "rare")
    steps = [read_checkpoint(path).facts["step"] for path in checkpoints_in(tmp_path / "rare" / "checkpoint")]
    assert steps == [5, 10, 12]


def test_a_cosine_ends_at_its_floor(folder: Path) -> None:
    settings = {"schedule": "cosine", "warmup": 10, "learning_rate": 1e-2, "floor": 1e-3, "steps": 100}
    found = config(folder, training=settings).training
    plan = make_plan(make_task(config(folder).task).stages(), found, 0)
    rates = [learning_rate(found, step, plan) for step in range(101)]
    assert rates[100] == pytest.approx(1e-3) and rates[99] > 1e-3
    assert rates[50] == pytest.approx(5.5e-3) and rates[0] == pytest.approx(1e-3, rel=1e-2)
    for step in (20, 77):
        assert rates[step] == pytest.approx(1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi * step / 100)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"floor": 1e-3, "schedule": "linear-by-epoch"}, "training.floor is for schedules hold and cosine"),
        ({"floor": 0.1}, "training.floor=0.1 is above training.learning_rate=0.01"),
        ({"floor": -1}, "training.floor=-1"),
        ({"plan": "epochs"}, "training.plan=epochs needs task.stages.0.examples"),
        ({"label_noise": 0.1}, "doesn't say which tokens can be an answer"),
    ],
)
def test_settings_that_do_not_fit_are_said(folder: Path, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        trained(config(folder, training=settings), tmp_path)
    assert said in str(error.value)


def test_a_mix_needs_the_plan_that_mixes(folder: Path) -> None:
    for plan in ("mastery", "epochs"):
        with pytest.raises(UserError, match=rf"training.plan={plan} doesn't mix: stages with shares"):
            config(folder, task={"mix": "niah-text:0.2", "train_length": 512}, training={"plan": plan})
    with pytest.raises(UserError, match=r"training.plan=mix needs stages that have shares"):
        make_config({"task": {"name": "mqar"}, "training": {"plan": "mix"}})


def test_passages_come_in_their_share_of_the_batches(folder: Path, tmp_path: Path) -> None:
    settings = {"steps": 10, "batch_samples": 2}
    found = config(folder, task={"mix": "niah-text:0.2", "train_length": 512}, training=settings)
    opened = RunFolder.open(tmp_path)
    opened.write_config(found.plain())
    _, info, _ = train(found, opened, device="cpu", backend="torch", progress=Progress(quiet=True))
    assert [stage.batches for stage in info.stages] == [8, 2]
    assert 16 * 512 < info.tokens < 20 * 512, "padding isn't counted"


def test_the_log_tells_windows_from_passages(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fifth batch is passages: a log of the last batch alone would show nothing else."""
    found = config(
        folder, task={"mix": "niah-text:0.2", "train_length": 512}, training={"steps": 10, "batch_samples": 2}
    )
    really, losses = training._one_step, []
    monkeypatch.setattr(training, "_one_step", lambda *given: losses.append(really(*given)) or losses[-1])
    monkeypatch.setattr(training, "_LOG_EVERY", 5)
    _, events = trained(found, tmp_path)
    for event, step in zip(events, (5, 10), strict=True):
        *windows, passages = (loss for loss, _ in losses[step - 5 : step])
        assert (event["step"], event["mix_loss"]) == (step, passages)
        assert event["loss"] == pytest.approx(sum(windows) / 4, rel=1e-12)


# --- TensorBoard


class Writer:
    """In the place of the package's."""

    opened: ClassVar[list[tuple[str, int]]] = []
    scalars: ClassVar[list[tuple[str, float, int]]] = []

    def __init__(self, folder: str, purge_step: int) -> None:
        self.opened.append((folder, purge_step))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        pass


def test_tensorboard_gets_what_the_log_gets(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = types.ModuleType("torch.utils.tensorboard")
    stub.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    monkeypatch.setattr(training, "_LOG_EVERY", 5)
    _, events = trained(config(folder, tensorboard=True), tmp_path)
    assert Writer.opened == [(str(tmp_path / "tensorboard"), 1)]
    expected = [
        (f"training/{name}", value, event["step"])
        for event in events
        for name, value in event.items()
        if name not in ("step", "stage")
    ]
    assert len(events) == 3 and Writer.scalars == expected


def test_without_tensorboards_package_it_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RunError, match=r"tensorboard=true needs the package tensorboard: pip install"):
        trained(config(folder, tensorboard=True), tmp_path)


# --- the command


def words(folder: Path, *more: str) -> tuple[str, ...]:
    sizes = ("model.d_model=16", "model.n_layers=2", "model.mixer.headdim=8", "model.mixer.d_state=8")
    quick = ("training.steps=12", "training.batch_tokens=128", "training.warmup=2", "checkpoint_seconds=0")
    settings = [part for setting in (*sizes, *quick) for part in ("--set", setting)]
    lengths = ("--train-length", str(T), "--eval-lengths", "1x,4x", "--samples", "4")
    return ("pretrain", "--data", str(folder), *lengths, *settings, *more)


def the_record(here: Path) -> Path:
    (path,) = here.glob("runs/text-mamba2-*/evaluations/*/record.json")
    return path


def test_pretrain_from_shards_to_a_record_that_recomputes(folder: Path, here: Path) -> None:
    data = Path(shutil.copytree(folder, here / "private" / "novels"))
    done = bench(*words(data))
    assert done.code == 0, done.err
    assert "bits/byte by position" in done.out and "train tokens" in done.err
    assert "already done" in bench(*words(data)).err
    record = read_record(the_record(here))
    assert record.task.config["data"] == "novels" and "private" not in record.to_json()
    assert record.task.config["tokenizer_sha256"] and record.training is not None
    assert record.training.tokens == 12 * 128 and record.training.config["plan"] == "mix"
    assert [cell.eval_length for cell in record.cells] == [T, 4 * T]
    assert bench("leaderboard", "add", str(the_record(here).parents[2]), "--file", "board.json").code == 0
    checked = bench("leaderboard", "validate", "board.json")
    assert checked.code == 0
    assert "0 entries valid; 1 not recomputable here (needs novels, tokens of sha256 " in checked.out
    shutil.move(data, here / "novels")
    assert "1 entries, all valid" in bench("leaderboard", "validate", "board.json").out


def test_a_checkpoint_is_measured_on_other_text(folder: Path, here: Path) -> None:
    data = Path(shutil.copytree(folder, here / "novels"))
    assert bench(*words(data)).code == 0
    run = the_record(here).parents[2]
    other = prepared(here / "others", stories(40, seed=5))
    shutil.rmtree(data)
    measured = bench("pretrain", "--checkpoint", str(run), "--data", str(other), "--samples", "3")
    assert measured.code == 0, measured.err
    (path,) = (path for path in here.glob("runs/*/evaluations/*/record.json") if path.parents[2] != run)
    record = read_record(path)
    assert record.checkpoint is not None and record.task.config["data"] == "others"
    assert [cell.ratio for cell in record.cells] == [1, 2, 4, 8]
    for more, named in ((("--mix", "niah-text:0.2"), "--mix"), (("--set", "recompute=true"), "recompute")):
        useless = bench("pretrain", "--checkpoint", str(run), *more)
        assert useless.code == 2 and f"leave out {named}" in useless.err
    gone = bench("pretrain", "--checkpoint", str(run), "--samples", "3")
    assert gone.code == 2 and "novels is no folder of token shards" in gone.err and gone.err.count("\n") == 1
    spectrum = bench("spectrum", str(run))
    assert spectrum.code == 0, "needs no data"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ("--data", "nowhere"),
            "nowhere is no folder of token shards (no manifest.json); `bench data prepare` makes one",
        ),
        (("--samples", "100000"), "fewer than evaluation.samples=100000"),
        (("--mix", "niah-text"), "task.mix='niah-text': write a task and its share of the batches, niah-text:0.2"),
        (("--mix", "niah-text:0.2"), "passages of single_1 take"),
        (("--preset", "7b"), "unknown preset for text '7b'"),
        (("--set", "parallel=tensor"), "parallel='tensor'"),
        (("--set", "micro_batch_tokens=0"), "micro_batch_tokens=0"),
        (("--set", "task.stages=[]"), "unknown key 'task.stages'"),
    ],
)
def test_wrong_input_is_one_line(folder: Path, here: Path, more: tuple[str, ...], said: str) -> None:
    done = bench(*words(folder, *more))
    assert done.code == 2 and done.out == ""
    assert done.err.startswith("bench: ") and done.err.count("\n") == 1 and said in done.err
    assert not (here / "runs").exists()


def test_other_data_in_the_same_place_are_another_run(folder: Path, here: Path) -> None:
    data = prepared(here / "novels", stories(30, seed=1))
    assert bench(*words(data)).code == 0
    (saved,) = here.glob("runs/*/config.yaml")
    shutil.rmtree(data)
    prepared(here / "novels", stories(30, seed=2))
    again = bench("pretrain", "--config", str(saved))
    assert again.code == 2 and "task.data=" in again.err and "holds other tokens (sha256 " in again.err
    assert bench(*words(here / "novels")).code == 0
    assert len(list(here.glob("runs/*"))) == 2


def test_a_checkpoint_of_another_tokenizer_is_refused(folder: Path, here: Path) -> None:
    """Though the ids would fit: two vocabularies of as many tokens."""
    assert bench(*words(folder)).code == 0
    words_of = [f"{number} {bytes([number - 1])!r} 1" for number in range(1, 257)]
    (here / "vocabulary.txt").write_text("\n".join(words_of) + "\n")
    other = prepared(here / "other", stories(40, seed=5), tokenizer=str(here / "vocabulary.txt"))
    refused = bench(
        "pretrain", "--checkpoint", str(the_record(here).parents[2]), "--data", str(other), "--samples", "2"
    )
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert "was trained with another tokenizer" in refused.err


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(folder: Path, tmp_path: Path) -> None:
    long = words(folder, "--set", "training.steps=30")
    for name in ("whole", "full"):
        (tmp_path / name).mkdir()
    full = start(*long, cwd=tmp_path / "full", before=_no_file_of_more_than_8_kib).end()
    assert full.code == 1 and full.err.splitlines()[-1].startswith("bench: ") and "Traceback" not in full.err
    assert "file too large" in full.err.lower()
    for name in ("whole", "full"):
        assert start(*long, cwd=tmp_path / name).end().code == 0
    whole, again = (read_record(the_record(tmp_path / name)) for name in ("whole", "full"))
    assert (whole.cells, whole.training) == (again.cells, again.training)


def _no_file_of_more_than_8_kib() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))


def test_kill_9_changes_nothing(folder: Path, tmp_path: Path) -> None:
    long = words(folder, "--set", "training.steps=60", "--set", "batch_tokens=1", "--samples", "10")

    def outcome(cwd: Path) -> tuple[Any, ...]:
        record = json.loads(the_record(cwd).read_text())
        weights = read_checkpoint(checkpoints_in(the_record(cwd).parents[2] / "checkpoint")[-1]).sha256
        return record["cells"], record["training"], record["task"], weights

    (tmp_path / "whole").mkdir()
    assert start(*long, cwd=tmp_path / "whole").end().code == 0
    cut = tmp_path / "cut"
    cut.mkdir()
    reached: list[Callable[[], bool]] = [
        lambda: any(cut.glob("runs/*/checkpoint/step-0000002*")),
        lambda: sum(path.read_bytes().count(b"\n") for path in cut.glob("runs/*/evaluations/*/samples/*")) > 5,
    ]
    for enough in reached:
        work = start(*long, cwd=cut)
        assert work.wait_for(enough)
        work.send(signal.SIGKILL)
        assert work.end().code == -signal.SIGKILL
    last = start(*long, cwd=cut).end()
    assert last.code == 0 and "going on" not in last.err
    assert outcome(cut) == outcome(tmp_path / "whole")


# --- records


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, EvaluationFolder]:
    cwd = tmp_path_factory.mktemp("finished")
    assert start(*words(folder), cwd=cwd).end().code == 0
    return read_record(the_record(cwd)), EvaluationFolder(the_record(cwd).parent)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "bits by byte": (lambda cell: cell.update(bits_per_byte=1.0), "bits_per_byte is 1.0, but its log-likelihoods"),
    "its error": (lambda cell: cell.update(bits_per_byte_error=1.0), "bits_per_byte_error is 1.0, but"),
    "bytes": (lambda cell: cell["bytes"].__setitem__(0, 1), "bits_per_byte is"),
    "fewer bytes": (lambda cell: cell["bytes"].pop(), "bytes has 3 numbers"),
    "no bytes": (lambda cell: cell.pop("bytes"), "running text has log_likelihood, bytes"),
    "no positions": (lambda cell: cell.pop("by_position"), "running text has log_likelihood, bytes"),
    "a perplexity": (lambda cell: cell.update(perplexity=3.0), "perplexity is 3.0"),
    "a bin's nats": (lambda cell: cell["by_position"][2].update(nats=0.0), "by_position has"),
    "a bin's tokens": (lambda cell: cell["by_position"][2].update(asked=1), "by_position has"),
    "a bin's bytes": (lambda cell: cell["by_position"][2].update(bytes=1), "by_position has"),
    "a bin's right ones": (lambda cell: cell["by_position"][2].update(correct=9999), "by_position has"),
    "a bin's place": (lambda cell: cell["by_position"][2].update(low=2), "by_position must have rising powers of two"),
    "bins' order": (lambda cell: cell["by_position"].reverse(), "by_position must have rising powers of two"),
    "another likelihood": (lambda cell: cell["log_likelihood"].__setitem__(0, -1.0), "bits_per_byte is"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changed_numbers_are_refused(finished: tuple[Record, EvaluationFolder], what: str) -> None:
    record, samples = finished
    edit, said = CHANGES[what]
    content = json.loads(record.to_json())
    edit(content["cells"][1])
    with pytest.raises(UserError) as error:
        verify(parse_record({**content, "record_id": record_hash(content)}, "record"), samples)
    assert said in str(error.value)


def moved(cell: dict[str, Any]) -> None:
    """Nats from one bin to another, and a right choice: all sums stay."""
    for a, b in (("nats", 0.5), ("bytes", 1), ("asked", 1)):
        cell["by_position"][3][a] += b
        cell["by_position"][4][a] -= b


def test_sums_that_agree_with_themselves_alone_are_refused(
    finished: tuple[Record, EvaluationFolder], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, samples = finished
    monkeypatch.chdir(folder.parent)  # where the record's name of the data is a folder's
    verify(record, samples)
    verify(record)
    content = json.loads(record.to_json())
    moved(content["cells"][1])
    changed = parse_record({**content, "record_id": record_hash(content)}, "record")
    for known in (samples, None):
        with pytest.raises(UserError, match="by_position is not what it should be"):
            verify(changed, known)


# --- sizes, and what they would take


def of_size(size: str, model: str, *settings: str, **addons: Any) -> RunConfig:
    flags = {"model.name": model, **addons}
    (found,) = configure("text", preset=size, flags=flags, settings=settings, without_data=True)
    return found


def mamba2_parameters(d: int, layers: int, vocabulary: int = 128_256, state: int = 128, head: int = 64) -> int:
    inner = 2 * d
    heads = inner // head
    conv = inner + 2 * state
    block = d * (inner + conv + heads) + conv * 5 + 3 * heads + inner + inner * d + d
    return vocabulary * d + layers * block + d


@pytest.mark.parametrize("size", ["180m", "440m", "1.5b"])
def test_published_sizes_have_about_so_many_parameters(size: str) -> None:
    nominal = {"180m": 180e6, "440m": 440e6, "1.5b": 1.5e9}[size]
    for model in ARCHITECTURES:
        counted = sum(weight.numel() for weight in build_model(of_size(size, model).model, device="meta").parameters())
        with_gates = 1.35 if model == "gated_deltanet" else 1.1  # an output gate as wide as its doubled values
        assert 0.9 * nominal < counted < with_gates * nominal, model


ARCHITECTURES = ("mamba2", "rwkv7", "gated_deltanet", "gla", "retnet", "attention")
ADDONS: tuple[dict[str, Any], ...] = (
    {},
    {"model.post": {}},
    {"model.post": {"variant": "minimal"}},
    {"model.bft": {}},
    {"model.post": {}, "model.bft": {}},
)
COMBINED = [
    (name, addons) for name in ARCHITECTURES for addons in ADDONS if name != "attention" or "model.post" not in addons
]


def block_parameters(name: str, d: int) -> int:
    """Of one block of a published size, counted from its equations."""
    if name == "mamba2":
        return mamba2_parameters(d, 1, 0) - d
    if name == "gated_deltanet":  # queries, keys, values and gate of twice the width, a and b; taps; A, dt; norms
        heads = d // 128
        return d * (2 * d + 2 * 2 * d + 2 * heads) + 2 * d * d + 4 * (2 * d + 2 * d) + 2 * heads + 256 + d
    if name == "rwkv7":  # r, k, v, output; low ranks of w, a, v, g; six shifts, k_k, k_a, r_k, w0, a0, v0; norms; FFN
        return 4 * d * d + 2 * d * sum(ranks(d)) + 12 * d + 3 * 2 * d + d + 2 * 4 * d * d
    if name == "attention":
        return 4 * d * d + 3 * d * hidden(8, d) + 2 * d
    if name == "gla":  # queries and keys of half the width, values, gate, output; the decays' rank 16; a norm in a head
        return d * (d + 2 * d) + d * d + 16 * (d + d // 2) + d // 2 + 256 + 3 * d * hidden(8, d) + 2 * d
    return d * (2 * d + 2 * 2 * d) + 2 * d * d + 512 + 3 * d * hidden(4, d) + 2 * d  # retnet: twice the width in all


def ranks(d: int) -> list[int]:
    return [max(32, round(factor * d**0.5 / 32) * 32) for factor in (2.5, 2.5, 1.7, 5)]


def hidden(thirds: int, d: int) -> int:
    """Of an FFN of so many thirds of the width, a multiple of 8."""
    return 8 * math.ceil(thirds * d / 3 / 8)


def post_parameters(name: str, variant: str, d: int) -> int:
    """What PoST adds to a block of a published size, in trainable parameters."""
    heads = d // 256
    if variant == "minimal":
        return {"gla": heads, "retnet": heads, "rwkv7": d}.get(name, 0)  # P, and what RWKV-7's low rank starts from
    if name == "mamba2":
        return -2 * d // 64  # dt's biases are frozen
    keys = {"gla": d // 2, "retnet": d}.get(name, 0)
    low_rank = 16 * (d + keys) + keys if name == "gla" else 0
    return d if name == "rwkv7" else (d * keys + keys + heads - low_rank if keys else 0)


@pytest.mark.parametrize("size", ["180m", "440m", "1.5b"])
@pytest.mark.parametrize(("name", "addons"), COMBINED)
def test_every_model_has_the_parameters_of_its_equations(size: str, name: str, addons: dict[str, Any]) -> None:
    found = of_size(size, name, **addons).model
    d, layers, vocabulary = found.d_model, found.n_layers, 128_256
    expected = vocabulary * d + d + layers * block_parameters(name, d)
    if name == "rwkv7":  # norms with biases, one after the embedding; the first block mixes no values
        expected += 3 * d - (2 * d * ranks(d)[2] + d)
    if (post := found.post) is not None:
        expected += layers * post_parameters(name, post.variant, d)
    counted = sum(weight.numel() for weight in build_model(found, device="meta").parameters() if weight.requires_grad)
    if found.bft is None:
        assert counted == expected
    else:  # a precision of each token, and few numbers a block
        assert vocabulary < counted - expected < 1.25 * vocabulary + 2 * d * layers


@pytest.mark.parametrize(("name", "addons"), COMBINED)
def test_every_model_can_be_counted_without_values(name: str, addons: dict[str, Any]) -> None:
    """Matrix products take two operations a weight forwards and four backwards, and the recurrence a few more."""
    found = of_size("180m", name, "micro_batch_tokens=4096", "task.train_length=256", **addons)
    told = estimate(found)
    assert (told.steps, told.tokens, told.batch_tokens, told.part_tokens) == (7630, 7630 * 2**19, 2**19, 4096)
    assert told.flops is not None and told.memory_bytes is not None
    assert 6 * told.parameters < told.flops / told.tokens < 8.5 * told.parameters
    assert told.state_bytes >= 16 * told.parameters


@pytest.mark.parametrize(("size", "tokens", "rate"), [("180m", 4e9, 6e-4), ("440m", 9e9, 3e-4), ("1.5b", 3e10, 2e-4)])
def test_published_sizes_are_trained_as_published(size: str, tokens: float, rate: float) -> None:
    for model, betas, eps in (("mamba2", (0.9, 0.95), 1e-8), ("rwkv7", (0.9, 0.99), 1e-18)):
        found = of_size(size, model)
        training = found.training
        plan = make_plan(make_task(found.task).stages(), training, 0)
        assert plan.total_steps == math.ceil(tokens / 524_288)
        assert (found.task.train_length, training.batch_tokens, training.dtype) == (2048, 524_288, "bfloat16")
        assert (training.learning_rate, training.floor, training.schedule) == (rate, 1e-5, "cosine")
        assert training.warmup == round(plan.total_steps / 100)
        assert (training.betas, training.eps, training.weight_decay, training.clip) == (betas, eps, 0.1, 1.0)
        assert found.model.tie_embeddings and found.model.vocab_size == 128_256


def test_micro_models_have_one_to_three_million_parameters(folder: Path) -> None:
    for model in ("mamba2", "rwkv7", "gated_deltanet", "gla", "retnet", "attention"):
        for addons in ({}, {"model.bft": {}}):
            flags = {"model.name": model, "task.data": str(folder), **addons}
            (found,) = configure("text", flags=flags)
            assert (found.task.train_length, found.model.vocab_size) == (1024, 257)
            made = build_model(found.model, device="meta")
            assert 1e6 < sum(weight.numel() for weight in made.parameters()) < 3e6, model


def test_a_dry_run_says_what_training_would_take(folder: Path, here: Path) -> None:
    done = bench(*words(folder, "--dry-run", "--set", "micro_batch_tokens=64"))
    assert done.code == 0
    assert "what training would take" in done.out and "12 of 128 tokens; a process computes 64 at once" in done.out
    told = json.loads(bench(*words(folder, "--dry-run", "--json")).out)
    made = build_model(config(folder).model, device="meta")
    assert (told["steps"], told["tokens"], told["part_tokens"]) == (12, 12 * 128, 128)
    assert told["state_bytes"] == 16 * mamba2_parameters(16, 2, 257, 8, 8)
    assert told["memory_bytes"] > told["state_bytes"] and made is not None
    assert not (here / "runs").exists()
    assert bench("pretrain", "--dry-run", "--checkpoint", "x").code == 2


def test_a_dry_run_of_sets_of_several_lengths_counts_each(here: Path) -> None:
    """Epochs by hand: 3 batches of 4 of 16 tokens, and 2 of 32; the head where the labels are."""
    stages = '[{"shape":{"length":16,"kv":2},"examples":12},{"shape":{"length":32,"kv":4},"examples":6}]'
    words = ("mqar", "--model", "attention", "--train-length", "32", "--set", f"task.stages={stages}")
    plan = ("--set", "training.plan=epochs", "--set", "training.batch_samples=4", "--set", "training.epochs=3")
    done = bench(*words, *plan, "--dry-run")
    assert done.code == 0, done.err
    assert "15 of up to 128 tokens; a process computes 128 at once" in done.out and not (here / "runs").exists()
    told = json.loads(bench(*words, *plan, "--dry-run", "--json").out)
    assert (told["steps"], told["tokens"]) == (15, 3 * (12 * 16 + 6 * 32))
    d, layers, V = 64, 2, 272
    norms = 2 * (layers + 1) * d  # a product with itself forwards
    each = {
        L: 3 * 2 * (L * layers * 4 * d * d + kv * V * d + layers * 2 * L * L * d) + L * norms
        for L, kv in ((16, 2), (32, 4))
    }
    assert told["flops"] == 3 * (12 * each[16] + 6 * each[32])
    assert told["logit_bytes"] == 3 * 4 * 4 * 4 * V
    part = json.loads(bench(*words, *plan, "--set", "training.steps=6", "--dry-run", "--json").out)
    assert (part["steps"], part["tokens"]) == (6, 12 * 16 + 6 * 32 + 4 * 16)


def test_a_dry_run_of_two_processes_is_said_once(folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        said.append(bench(*words(folder, "--dry-run", "--set", "parallel=fsdp")))
    assert [each.code for each in said] == [0, 0] and said[1].out == ""
    assert "2 processes" in said[0].out and "12 of 128 tokens; a process computes 64 at once" in said[0].out


def test_arithmetic_is_what_products_of_matrices_take(folder: Path) -> None:
    """Attention by hand: 6 a weight and token, embedding as the head, and scores and mixture over all pairs."""
    found = of_size("micro", "attention", "task.train_length=64", "training.steps=3", "training.batch_samples=2")
    told = estimate(found)
    d, layers, V, L = 192, 4, 128_256, 64
    products = layers * (4 * d * d + 3 * d * 512) + V * d
    assert told.flops == pytest.approx(3 * 2 * L * (6 * products + layers * 12 * L * d), rel=1e-4), "norms are little"


def test_blocks_are_a_straight_line(folder: Path) -> None:
    """Of four layers, counted from two and three, what counting all of them gives; made again, they keep less."""
    found = of_size("micro", "mamba2", "task.train_length=128", "model.n_layers=4")
    from decaybench.harness import estimate as module

    told = estimate(found)
    flops, kept = module._count(found.model, 128)
    rows = told.part_tokens // 128
    assert told.flops == flops * told.tokens / 128 and told.activation_bytes == kept * rows
    again = estimate(of_size("micro", "mamba2", "task.train_length=128", "model.n_layers=4", "recompute=true"))
    assert again.activation_bytes is not None and again.activation_bytes < 0.5 * told.activation_bytes
    assert again.flops is not None and told.flops < again.flops < 1.4 * told.flops
