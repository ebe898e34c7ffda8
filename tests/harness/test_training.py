"""Training: the loss at labels alone, what takes weight decay, the same weights every time, and that models learn."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from decaybench.core.errors import RunError
from decaybench.harness import training
from decaybench.harness.config import RunConfig, make_config
from decaybench.harness.evaluation import evaluate
from decaybench.harness.progress import Progress
from decaybench.harness.training import (
    Objective,
    loss_and_hits,
    matmul_dtype,
    parameter_groups,
    to_tensors,
    train,
)
from decaybench.models.checkpoints import checkpoints_in, read_checkpoint
from decaybench.models.language_model import LanguageModel, build_model
from decaybench.models.mixers.parts import ShortConv
from decaybench.results.record import TrainingInfo
from decaybench.results.run_folder import EvaluationFolder, RunFolder
from decaybench.tasks.base import IGNORED, Task
from decaybench.tasks.mqar import Mqar
from decaybench.tasks.registry import make_task
from tests.command import TINY, bench

SMALL = {"d_model": 16, "mixer": {"d_state": 8, "headdim": 8}}


def config(task: dict[str, Any], *, model: dict[str, Any] | None = None, **rest: Any) -> RunConfig:
    return make_config({"task": task, "model": model or SMALL, "evaluation": {"lengths": ["1x"]}}, rest)


def trained(found: RunConfig, folder: Path) -> tuple[LanguageModel, TrainingInfo]:
    opened = RunFolder.open(folder)
    opened.write_config(found.plain())
    model, info, _ = train(found, opened, device="cpu", backend="torch", progress=Progress(quiet=True))
    return model, info


@pytest.mark.parametrize("task", ["niah", "mqar", "mqar-noisy"])
def test_the_loss_is_the_cross_entropy_at_the_labels(task: str) -> None:
    found = config({"name": task, "train_length": 32})
    made = make_task(found.task)
    batch = made.batch(made.stages()[-1].shape, "train", 0, torch.arange(5).numpy())
    tokens, labels, positions = to_tensors(batch, "cpu")
    assert positions is None
    model = build_model(found.model, 1)
    loss, hits = loss_and_hits(model, tokens, labels)
    logits = model(tokens).logits
    expected = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORED)
    assert torch.allclose(loss, expected, rtol=1e-6)
    nats, right = Objective(model)(tokens, labels, None)
    assert torch.allclose(nats / len(hits), expected, rtol=1e-6) and int(right) == int(hits.sum())
    assert loss.requires_grad and not hits.requires_grad
    asked = labels != IGNORED
    assert torch.equal(hits, (logits.argmax(-1) == labels)[asked])
    assert hits.shape == (int(asked.sum()),) and hits.dtype == torch.bool
    assert abs(float(loss.detach()) - math.log(found.model.vocab_size)) < 0.5, "at the start nothing is known"

    weights = list(model.parameters())
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    for one, other in zip(gradients, torch.autograd.grad(expected, weights, allow_unused=True), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)


# Pitfall 14: what sets a decay, norms and biases take no weight decay. By their full names in one block and outside it.
DECAYED = {
    "mamba2": {"mixer.in_proj.weight", "mixer.conv.weight", "mixer.out_proj.weight"},
    "attention": {"mixer.qkv_proj.weight", "mixer.out_proj.weight"},
}
NOT_DECAYED = {
    "mamba2": {"norm.weight", "mixer.dt_bias", "mixer.D", "mixer.spectrum.P", "mixer.conv.bias", "mixer.norm.weight"},
    "attention": {"norm.weight"},
}
WITH_POST: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
    # Options of PoST: what its parameters are called, and what is frozen.
    "paper": ({}, {"mixer.spectrum.base", "mixer.spectrum.deltas"}, {"mixer.dt_bias"}),
    "minimal": ({"variant": "minimal"}, {"mixer.spectrum.base", "mixer.spectrum.deltas", "mixer.dt_bias"}, set()),
    "learned": (
        {"taper": "learned"},
        {"mixer.spectrum.base", "mixer.spectrum.deltas", "mixer.spectrum.logits"},
        {"mixer.dt_bias"},
    ),
    "position only": ({"reparameterize": False}, {"mixer.spectrum.P"}, {"mixer.dt_bias"}),
}


def in_blocks(names: set[str]) -> set[str]:
    return {f"blocks.{layer}.{name}" for layer in range(2) for name in names}


def check_groups(model: LanguageModel, decayed: set[str], not_decayed: set[str], frozen: set[str]) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with_decay, without = parameter_groups(model, 0.125)
    assert (with_decay["weight_decay"], without["weight_decay"]) == (0.125, 0.0)
    assert {names[id(parameter)] for parameter in with_decay["params"]} == decayed
    assert {names[id(parameter)] for parameter in without["params"]} == not_decayed
    assert len(with_decay["params"]) + len(without["params"]) == len(decayed) + len(not_decayed)
    assert set(names.values()) == decayed | not_decayed | frozen
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == frozen


@pytest.mark.parametrize("name", ["mamba2", "attention"])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_what_takes_weight_decay(name: str, norm: str) -> None:
    sizes = {"name": name, "norm": norm, "ffn": {}, "tie_embeddings": False, "d_model": 16}
    if name == "mamba2":
        sizes |= SMALL
    model = build_model(config({"name": "niah"}, model=sizes).model)
    layer_norms = {"norm.bias", "ffn_norm.bias"} if norm == "layernorm" else set()
    ffn = {name for name, _ in model.blocks[0].ffn.named_parameters()}
    assert ffn and all(part.endswith("weight") for part in ffn)
    check_groups(
        model,
        in_blocks(DECAYED[name] | {f"ffn.{part}" for part in ffn}) | {"embedding.weight", "head.weight"},
        in_blocks(NOT_DECAYED[name] | {"ffn_norm.weight"} | layer_norms)
        | {"norm.weight"}
        | ({"norm.bias"} if layer_norms else set()),
        set(),
    )


@pytest.mark.parametrize("options", WITH_POST)
def test_what_takes_weight_decay_with_post(options: str) -> None:
    settings, own, frozen = WITH_POST[options]
    model = build_model(config({"name": "niah"}, model={**SMALL, "post": settings}).model)
    plain = NOT_DECAYED["mamba2"] - {"mixer.spectrum.P", "mixer.dt_bias"}
    check_groups(
        model,
        in_blocks(DECAYED["mamba2"]) | {"embedding.weight"},
        in_blocks(plain | own) | {"norm.weight"},
        in_blocks(frozen),
    )


def test_a_parameter_learns_at_its_multiple_of_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of one step that differ in one factor: AdamW's first step is the rate times the gradient's sign."""
    found = config(
        {"name": "mqar", "train_length": 16},
        training={"steps": 1, "warmup": 0, "batch_samples": 2, "learning_rate": 1e-3, "eps": 1e-15},
    )
    start = build_model(found.model, 0).state_dict()
    usual = trained(found, tmp_path / "usual")[0].state_dict()
    monkeypatch.setattr(ShortConv, "learning_rate_factors", {"bias": 2.0})
    faster = trained(found, tmp_path / "faster")[0]
    assert {group["factor"] for group in parameter_groups(faster, 0.1)} == {1.0, 2.0}
    for name, value in faster.state_dict().items():
        moved, before = value - start[name], usual[name] - start[name]
        if name.endswith("conv.bias"):
            assert torch.allclose(moved, 2 * before, rtol=1e-3, atol=1e-7) and bool(moved.abs().max() > 1e-3)
        else:
            assert torch.equal(moved, before)


def test_weight_decay_moves_only_what_takes_it(tmp_path: Path) -> None:
    """One step of two runs that differ in weight decay: it alone may make the difference."""
    once = {"steps": 1, "warmup": 0, "batch_samples": 2}
    task = {"name": "mqar", "train_length": 16}
    models = [
        trained(config(task, training={**once, "weight_decay": decay}), tmp_path / str(decay))[0]
        for decay in (0.0, 0.5)
    ]
    start = build_model(models[0].config, 0).state_dict()
    without, with_decay = (model.state_dict() for model in models)
    decayed = {name for name, value in without.items() if not torch.equal(value, with_decay[name])}
    assert decayed == in_blocks(DECAYED["mamba2"]) | {"embedding.weight"}
    for name in decayed:
        moved = without[name] - with_decay[name]
        assert torch.allclose(moved, 0.5 * 1e-2 * start[name], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("post", [None, {}])
def test_the_same_seed_gives_the_same_bits(tmp_path: Path, post: dict[str, Any] | None) -> None:
    task = {"name": "niah", "train_length": 32}
    settings = {"training": {"steps": 15, "batch_tokens": 128}}
    runs = []
    for place, (seed, threads) in enumerate(((1, 1), (1, 1), (2, 1))):
        torch.manual_seed(place)  # nobody's global state may matter
        torch.set_num_threads(threads)
        found = config(task, model={**SMALL, "post": post}, seed=seed, **settings)
        model, info = trained(found, tmp_path / str(place))
        runs.append((model.state_dict(), info))
    (one, first), (two, second), (other, _) = runs
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert first == second
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])


def test_a_tiny_model_learns(tmp_path: Path) -> None:
    """One pair to remember in 8 tokens: chance is 1/16, and a right model reaches 1."""
    found = config(
        {"name": "mqar", "train_length": 8, "vocab_size": 32, "stages": [{"shape": {"length": 8, "kv": 1}}]},
        training={"steps": 250, "batch_samples": 32, "warmup": 10, "mastery": 0.99},
    )
    model, info = trained(found, tmp_path)
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events] == [50, 100, 150, 200, 250]
    assert events[0]["loss"] > 1 and events[-1]["loss"] < 0.05
    assert info.final_accuracy is not None and info.final_accuracy > 0.95
    assert info.final_loss < 0.3
    made = make_task(found.task)
    batch = made.batch(made.stages()[0].shape, "test", 0, torch.arange(200).numpy())
    _, hits = loss_and_hits(model, *to_tensors(batch, "cpu"))
    assert float(hits.float().mean()) > 0.95, "on samples that it hasn't seen"


def test_what_the_record_says_of_a_training(tmp_path: Path) -> None:
    found = config(
        {"name": "mqar", "train_length": 16},
        training={"steps": 9, "batch_samples": 3, "learning_rate": 3e-3, "mastery": 1e-9, "review": 0},
        seed=5,
    )
    _, info = trained(found, tmp_path)
    assert (info.steps, info.seed, info.train_length, info.learning_rate) == (9, 5, 16, 3e-3)
    assert info.training_hash == found.training_hash
    assert info.config == found.training.plain()
    assert info.optimizer == "AdamW"
    stages = make_task(found.task).stages()
    assert [dict(stage.shape) for stage in info.stages] == [stage.shape.plain() for stage in stages]
    assert info.tokens == 9 * 3 * 16, "all stages are 16 tokens long"
    assert info.longest_trained == 16
    assert [stage.batches for stage in info.stages] == [9] + [0] * (len(stages) - 1)


GROWING = {"name": "mqar", "stages": [{"shape": {"length": length, "kv": 1}, "examples": 4} for length in (8, 16, 24)]}


def test_what_training_did_not_reach_is_said_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"steps": 6, "batch_samples": 2, "review": 0}
    found = config({**GROWING, "train_length": 24}, training={**settings, "mastery": 1.0})
    _, info = trained(found, tmp_path / "short")
    assert (info.train_length, info.longest_trained, info.tokens) == (24, 8, 6 * 2 * 8)
    assert [stage.batches for stage in info.stages] == [6, 0, 0]
    assert capsys.readouterr().err == (
        "note: the longest sequence trained on has 8 tokens, not task.train_length=24, which lengths like 2x are "
        "multiples of; never reached: length=16 kv=1; length=24 kv=1\n"
    )
    facts = read_checkpoint(checkpoints_in(tmp_path / "short" / "checkpoint")[-1])
    assert (facts.train_length, facts.longest_trained) == (24, 8)

    epochs = {"plan": "epochs", "epochs": 2, "batch_samples": 2}
    _, info = trained(config({**GROWING, "train_length": 32}, training=epochs), tmp_path / "shorter stages")
    assert (info.train_length, info.longest_trained) == (32, 24)
    assert "the longest sequence trained on has 24 tokens" in (said := capsys.readouterr().err)
    assert said.endswith("; no stage is longer\n")

    _, info = trained(config({**GROWING, "train_length": 24}, training=epochs), tmp_path / "all")
    assert (info.train_length, info.longest_trained) == (24, 24)
    assert [stage.batches for stage in info.stages] == [4, 4, 4]
    assert info.tokens == 4 * 2 * (8 + 16 + 24)
    assert capsys.readouterr().err == ""


def test_settings_reach_the_optimiser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    really = torch.optim.AdamW

    def watched(groups: Any, **settings: Any) -> torch.optim.AdamW:
        given.append(settings)
        return really(groups, **settings)

    monkeypatch.setattr(torch.optim, "AdamW", watched)
    settings = {"steps": 1, "batch_samples": 1, "betas": [0.7, 0.8], "eps": 1e-5, "learning_rate": 0.03}
    trained(config({"name": "mqar", "train_length": 16}, training=settings), tmp_path)
    (found,) = given
    assert (found["betas"], found["eps"], found["lr"]) == ((0.7, 0.8), 1e-5, 0.03)


def test_gradients_are_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam doesn't see the scale of gradients, so a clip shows where they are clipped to nothing beside eps."""
    norms: list[float] = []
    really = torch.nn.utils.clip_grad_norm_

    def watched(parameters: Any, limit: float) -> torch.Tensor:
        parameters = list(parameters)
        before = really(parameters, limit)
        after = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        norms.append(float(after))
        assert float(before) > limit
        return before

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", watched)
    settings = {"steps": 3, "batch_samples": 2, "clip": 1e-3}
    trained(config({"name": "mqar", "train_length": 16}, training=settings), tmp_path)
    assert norms == pytest.approx([1e-3] * 3, rel=1e-3)


def test_without_a_limit_gradients_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[float] = []
    really = torch.nn.utils.clip_grad_norm_

    def watched(parameters: Any, limit: float) -> torch.Tensor:
        parameters = [p for p in parameters if p.grad is not None]
        before = [p.grad.clone() for p in parameters]
        norm = really(parameters, limit)
        changed.extend(float((p.grad - old).abs().max()) for p, old in zip(parameters, before, strict=True))
        assert float(norm) > 0
        return norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", watched)
    settings = {"steps": 2, "batch_samples": 2, "clip": None}
    trained(config({"name": "mqar", "train_length": 16}, training=settings), tmp_path)
    assert len(changed) > 20 and set(changed) == {0.0}


def test_bfloat16_is_for_matrix_products_alone() -> None:
    model = build_model(config({"name": "niah"}).model)
    tokens = torch.arange(32)[None]
    with matmul_dtype("bfloat16", "cpu"):
        half = model(tokens).logits
    with matmul_dtype("float32", "cpu"):
        full = model(tokens).logits
    assert (half.dtype, full.dtype) == (torch.bfloat16, torch.float32)
    assert 0 < float((half - full).abs().max().detach()) < 0.1
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_training_in_bfloat16_keeps_float32_weights(tmp_path: Path) -> None:
    settings = {"steps": 3, "batch_samples": 2, "dtype": "bfloat16"}
    model, info = trained(config({"name": "mqar", "train_length": 16}, training=settings), tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert info.config["dtype"] == "bfloat16"


def test_checkpoints_come_by_time(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    def tick() -> float:
        nonlocal clock
        clock += 1.0
        return clock

    saved: list[int] = []
    really = training._save
    monkeypatch.setattr(training.time, "monotonic", tick)
    monkeypatch.setattr(training, "_save", lambda work, *rest: (saved.append(work.step), really(work, *rest))[1])
    assert bench("niah", *TINY, "--set", "checkpoint_seconds=7", "--quiet").code == 0
    assert saved[-1] == 12 and 1 < len(saved) < 8, "now and then, and at the end"
    assert len(list(here.glob("runs/*/checkpoint/step-*"))) == 2, "the last and the one before it"


@pytest.mark.parametrize(
    ("seconds", "saving", "expected"),
    [
        (5, 0.0, [6, 12, 18, 24, 30]),  # a second a step, and the sixth is the first that is more than 5 s later
        (5, 0.5, [6, 17, 28, 30]),  # 20 times half a second
        (15, 0.5, [16, 30]),
        (0, 0.5, list(range(1, 31))),
    ],
)
def test_saving_takes_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, saving: float, expected: list[int]
) -> None:
    clock = 0.0
    step, save = training._one_step, training._save
    saved: list[int] = []

    def slow_step(*arguments: Any) -> tuple[float, float]:
        nonlocal clock
        clock += 1.0
        return step(*arguments)

    def slow_save(work: Any, *rest: Any) -> Any:
        nonlocal clock
        clock += saving
        saved.append(work.step)
        return save(work, *rest)

    monkeypatch.setattr(training.time, "monotonic", lambda: clock)
    monkeypatch.setattr(training, "_one_step", slow_step)
    monkeypatch.setattr(training, "_save", slow_save)
    settings = {"steps": 30, "batch_samples": 1}
    trained(config({"name": "mqar", "train_length": 16}, training=settings, checkpoint_seconds=seconds), tmp_path)
    assert saved == expected


def watched(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The labels of each step of the trainings that follow."""
    seen: list[torch.Tensor] = []
    really = Objective.forward

    def watch(self: Objective, tokens: torch.Tensor, labels: torch.Tensor, positions: None) -> Any:
        seen.append(labels)
        return really(self, tokens, labels, positions)

    monkeypatch.setattr(Objective, "forward", watch)
    return seen


@pytest.mark.parametrize("task", ["mqar", "niah", "mqar-noisy"])
def test_training_labels_are_noisy_and_evaluation_is_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    seen = watched(monkeypatch)
    settings = {"steps": 6, "batch_samples": 40, "review": 0}
    found = config({"name": task, "train_length": 16}, training={**settings, "label_noise": 0.4})
    model, info = trained(found, tmp_path / "noisy")
    noisy, seen[:] = list(seen), []
    trained(config({"name": task, "train_length": 16}, training=settings), tmp_path / "clean")
    assert len(noisy) == len(seen) == 6
    asked = torch.cat([labels != IGNORED for labels in seen])
    wrong = torch.cat([(one != other) for one, other in zip(noisy, seen, strict=True)])
    assert not wrong[~asked].any()
    n = int(asked.sum())
    assert abs(int(wrong.sum()) - 0.4 * n) < 4 * math.sqrt(n * 0.24)
    assert info.config["label_noise"] == 0.4
    assert not torch.equal(noisy[0], noisy[1]), "new samples, new noise"

    made = make_task(found.task)
    evaluated = evaluate(
        model,
        found,
        EvaluationFolder(tmp_path / "evaluation"),
        train_length=16,
        device="cpu",
        progress=Progress(quiet=True),
    )
    (cell, *_) = made.cells(found.evaluation, [16])
    clean = made.batch(cell.shape, "test", 0, np.arange(100))
    lines = EvaluationFolder(tmp_path / "evaluation").samples(cell.name).read()
    assert [line.target for line in lines] == [tuple(row[row != IGNORED]) for row in clean.labels]
    same = config({"name": task, "train_length": 16})
    assert found.evaluation_hash == same.evaluation_hash and evaluated.data_hash


def test_the_same_set_has_the_same_wrong_labels_in_every_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch)
    stages = [{"shape": {"length": 16, "kv": 2}, "examples": 12}]
    settings = {"plan": "epochs", "epochs": 2, "batch_samples": 6, "label_noise": 0.5}
    trained(config({"name": "mqar", "train_length": 16, "stages": stages}, training=settings), tmp_path)
    assert len(seen) == 4 and torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3])


def test_the_curriculum_goes_on_under_label_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that knows every answer: by its noisy labels alone it would master nothing."""
    truth: dict[str, torch.Tensor] = {}
    really, batch = Objective.forward, Task.batch

    def remember(self: Any, shape: Any, split: str, seed: int, indices: Any) -> Any:
        made = batch(self, shape, split, seed, indices)
        if split == "train":
            truth["labels"] = torch.from_numpy(made.labels)
        return made

    def knows(self: Objective, tokens: torch.Tensor, labels: torch.Tensor, positions: None) -> Any:
        nats, _ = really(self, tokens, labels, positions)
        asked = labels != IGNORED
        return nats, (labels[asked] == truth["labels"][asked]).sum()

    monkeypatch.setattr(Task, "batch", remember)
    monkeypatch.setattr(Objective, "forward", knows)
    settings = {"steps": 60, "batch_samples": 64, "review": 0, "label_noise": 0.5}
    _, info = trained(config({"name": "mqar", "train_length": 16}, training=settings), tmp_path / "mqar")
    assert [stage.step is not None for stage in info.stages] == [True, True, True]
    assert info.final_accuracy == pytest.approx(0.5, abs=0.1), "what is recorded is what the labels say"


@pytest.mark.parametrize(("ceiling", "mastered"), [(0.6, 3), (None, 0)])
def test_the_curriculum_asks_for_no_more_than_the_task_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ceiling: float | None, mastered: int
) -> None:
    really = Objective.forward

    def half_right(self: Objective, tokens: torch.Tensor, labels: torch.Tensor, positions: None) -> Any:
        nats, _ = really(self, tokens, labels, positions)
        return nats, ((labels != IGNORED).sum() + 1) // 2

    monkeypatch.setattr(Mqar, "ceiling", lambda self, shape: ceiling)
    monkeypatch.setattr(Objective, "forward", half_right)
    settings = {"steps": 100, "batch_samples": 4, "review": 0}
    _, info = trained(config({"name": "mqar", "train_length": 16}, training=settings), tmp_path)
    assert sum(stage.step is not None for stage in info.stages) == mastered


@pytest.mark.parametrize("what", ["loss", "gradient's norm"])
def test_a_training_that_diverges_leaves_whole_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    really, calls = Objective.forward, 0

    def diverges(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        nats, right = really(*arguments)
        if calls < 8:
            return nats, right
        # Multiplied by 0 a loss is finite, and its gradient's root at 0 is not.
        return (nats * math.nan if what == "loss" else nats + (nats * 0).sqrt()), right

    monkeypatch.setattr(Objective, "forward", diverges)
    found = config(
        {"name": "mqar", "train_length": 16}, training={"steps": 12, "batch_samples": 1}, checkpoint_seconds=0
    )
    with pytest.raises(RunError, match=f"training diverged at step 7: the {what} is nan; try a learning rate below"):
        trained(found, tmp_path)
    newest = read_checkpoint(checkpoints_in(tmp_path / "checkpoint")[-1])
    assert newest.facts["step"] == 7
    assert all(bool(torch.isfinite(value).all()) for value in newest.tensors("model.safetensors").values())
