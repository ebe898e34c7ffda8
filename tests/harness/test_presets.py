"""Each preset is the protocol that it is named after: data, schedule and grid as in the published tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decaybench.core.errors import UserError
from decaybench.harness.config import RunConfig, make_config
from decaybench.harness.plans import make_plan, samples_a_batch
from decaybench.harness.presets import PRESETS, configure, get_preset, preset_layer, run_config_of
from decaybench.harness.training import learning_rate
from decaybench.models.checkpoints import find_checkpoint, write_checkpoint
from decaybench.models.language_model import build_model
from decaybench.models.state import tensors
from decaybench.tasks.registry import TASKS, make_task
from tests.command import NIAH, bench


def preset(name: str, task: str = "mqar", model: str = "mamba2") -> RunConfig:
    (found,) = configure(task, preset=name, flags={"model.name": model}, without_data=True)
    return found


def stages(config: RunConfig) -> list[tuple[int, int | None, int]]:
    return [(stage.shape.length, stage.examples, stage.shape.kv) for stage in make_task(config.task).stages()]


def cells(config: RunConfig) -> list[tuple[str, int, Any]]:
    found = make_task(config.task).cells(config.evaluation, config.eval_lengths())
    return [(cell.variant, cell.shape.length, cell.coordinates["kv"]) for cell in found]


def logspace(low: float, high: float, n: int) -> list[float]:
    return [10 ** (low + place * (high - low) / (n - 1)) for place in range(n)]


@pytest.mark.parametrize(("task", "name"), [(task, name) for task in PRESETS for name in PRESETS[task]])
def test_each_preset_makes_a_run_of_every_model_it_names(task: str, name: str) -> None:
    assert set(PRESETS) == set(TASKS)
    found = get_preset(task, name)
    for model in found.models:
        config = preset(name, task, model)
        plan = make_plan(make_task(config.task).stages(), config.training, config.seed)
        assert plan.total_steps >= 1
        assert config.model.name == model
        assert config == make_config(config.plain())
        sizes = build_model(config.model, device="meta")
        assert sum(parameter.numel() for parameter in sizes.parameters()) > 1000
        if found.learning_rates:
            grid = found.learning_rates.get(model, found.learning_rates["*"])
            assert any(math.isclose(config.training.learning_rate, rate) for rate in grid)


@pytest.mark.parametrize(("length", "kv", "batch"), [(64, 4, 512), (128, 8, 512), (256, 16, 256), (512, 64, 128)])
def test_zoology_iclr24(length: int, kv: int, batch: int) -> None:
    config = preset(f"zoology-iclr24-{length}")
    assert stages(config) == [(length, 100_000, kv)]
    assert cells(config) == [("listed", length, kv)]
    assert config.evaluation.samples == 3000
    assert (config.task.plain()["vocab_size"], config.task.plain()["fill"]) == (8192, "zero")
    training = config.training
    assert (training.plan, training.epochs, training.batch_samples) == ("epochs", 64, batch)
    plan = make_plan(make_task(config.task).stages(), training, 0)
    assert (plan.steps_by_epoch, plan.total_steps) == (math.ceil(1e5 / batch), 64 * math.ceil(1e5 / batch))
    assert get_preset("mqar", f"zoology-iclr24-{length}").learning_rates["*"] == pytest.approx(logspace(-4, -2, 4))
    assert (config.model.n_layers, config.model.ffn) == (4, None)


def test_zoology_based() -> None:
    config = preset("zoology-based")
    assert stages(config) == [
        *((64, 100_000, 4), (128, 20_000, 8), (256, 20_000, 16), (256, 20_000, 32), (256, 20_000, 64)),
    ]
    assert cells(config) == [
        ("listed", length, kv)
        for length, kv in ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))
    ]
    assert config.evaluation.samples == 1000
    assert config.task.plain()["vocab_size"] == 8192
    training = config.training
    assert (training.epochs, training.batch_samples, training.weight_decay) == (32, 256, 0.1)
    assert (training.schedule, training.shuffle) == ("cosine-by-epoch", True)
    plan = make_plan(make_task(config.task).stages(), training, 0)
    by_epoch = math.ceil(1e5 / 256) + 4 * math.ceil(2e4 / 256)
    assert (plan.steps_by_epoch, plan.total_steps) == (by_epoch, 32 * by_epoch)
    rate = training.learning_rate
    for epoch in (0, 1, 31):  # constant within an epoch, a cosine over epochs
        for step in (epoch * by_epoch, (epoch + 1) * by_epoch - 1):
            expected = rate * 0.5 * (1 + math.cos(math.pi * epoch / 32))
            assert learning_rate(training, step, plan) == pytest.approx(expected, rel=1e-12)
    assert get_preset("mqar", "zoology-based").learning_rates["*"] == pytest.approx(logspace(-3, -1.5, 4))


@pytest.mark.parametrize(("name", "d_model", "heads"), [("64k", 512, 4), ("32k", 512, 8), ("16k", 256, 4)])
def test_post(name: str, d_model: int, heads: int) -> None:
    config = preset(f"post-{name}")
    assert stages(config) == [(512, 2**18, kv) for kv in (16, 32, 64, 128)]
    assert cells(config) == [
        *(("capacity", length, length // 4) for length in (512, 1024, 2048, 4096)),
        *(("persist", length, 128) for length in (512, 1024, 2048, 4096)),
    ]
    assert config.evaluation.samples == 3000
    assert (config.task.plain()["vocab_size"], config.task.train_length) == (8192, 512)
    mixer = config.model.mixer.plain()
    assert (config.model.d_model, config.model.n_layers, config.model.ffn) == (d_model, 2, None)
    assert (mixer["d_state"], mixer["headdim"]) == (d_model // (2 * heads), 2 * d_model // heads)
    assert mixer["expand"] * d_model // mixer["headdim"] == heads
    training = config.training
    assert (training.epochs, training.clip, training.weight_decay, training.dtype) == (8, 1.0, 0.1, "bfloat16")
    assert samples_a_batch(make_task(config.task).stages()[0], training) * 512 == 2**18
    plan = make_plan(make_task(config.task).stages(), training, 0)
    by_epoch = 4 * 2**18 * 512 // 2**18
    assert (plan.steps_by_epoch, plan.total_steps) == (by_epoch, 8 * by_epoch)
    order = [plan.next(step)[0] for step in range(2 * by_epoch)]
    assert order == sorted(order[:by_epoch]) * 2, "the stages in this order inside each epoch"
    for epoch in range(8):
        expected = training.learning_rate * (8 - epoch) / 8
        assert learning_rate(training, epoch * by_epoch + 5, plan) == pytest.approx(expected, rel=1e-12)
    grids = get_preset("mqar", f"post-{name}").learning_rates
    assert grids["*"] == pytest.approx([10**-3, 10**-2.5, 10**-2])
    assert grids["rwkv7"] == pytest.approx([10**-4.5, 10**-4, 10**-3.5])
    assert grids["gated_deltanet"] == pytest.approx([10**-3.5, 10**-3, 10**-2.5])


@pytest.mark.parametrize(("name", "elements"), [("64k", 2**16), ("32k", 2**15), ("16k", 2**14)])
def test_posts_state_has_as_many_elements_as_its_name_says(name: str, elements: int) -> None:
    mixer, d_model = preset(f"post-{name}").model.mixer.plain(), preset(f"post-{name}").model.d_model
    assert mixer["d_state"] * mixer["expand"] * d_model == elements


@pytest.mark.parametrize("task", ["mqar", "niah"])
def test_smoke(task: str) -> None:
    config = preset("smoke", task)
    mixer = config.model.mixer.plain()
    assert (config.model.d_model, config.model.n_layers, config.model.ffn) == (64, 2, None)
    assert (mixer["d_state"], mixer["headdim"]) == (32, 16)
    training = config.training
    assert (training.plan, training.mastery, training.review) == ("mastery", 0.8, 0.25)
    rate = {"mqar": 2e-2, "niah": 1e-2}[task]
    assert (training.batch_tokens, training.learning_rate, training.clip) == (4096, rate, 1.0)
    assert config.eval_lengths() == [128, 256, 512, 1024]
    if task == "mqar":
        assert make_plan(make_task(config.task).stages(), training, 0).total_steps == 1500
        assert [(length, kv) for length, _, kv in stages(config)] == [
            *((32, 2), (32, 4), (32, 8), (64, 8), (64, 16), (128, 16), (128, 32)),
        ]
        assert (config.task.plain()["vocab_size"], config.task.plain()["fill"]) == (272, "random-safe")
        assert cells(config)[4:] == [("persist", length, 16) for length in (128, 256, 512, 1024)]


def test_smoke_of_noisy_sources() -> None:
    config = preset("smoke", "mqar-noisy")
    assert config.model == preset("smoke").model.model_copy(update={"vocab_size": 96})
    task, training = config.task.plain(), config.training
    assert (task["vocab_size"], task["reliabilities"]) == (96, [0.95, 0.8, 0.6, 0.4])
    assert (task["min_bindings"], task["max_bindings"], task["train_length"]) == (2, 4, 128)
    assert (training.steps, training.batch_tokens, training.plan, training.mastery) == (800, 8192, "mastery", 0.8)
    assert [(length, kv) for length, _, kv in stages(config)] == [(12, 2), (20, 4), (32, 2), (64, 4), (128, 8)]
    assert cells(config) == [
        *(("capacity", length, {128: 8, 256: 16, 512: 32}[length]) for length in (128, 256, 512)),
        *(("persist", length, 4) for length in (128, 256, 512)),
    ]
    assert config.evaluation.samples == 300


@pytest.mark.parametrize("model", ["mamba2", "rwkv7", "gated_deltanet", "gla", "retnet"])
@pytest.mark.parametrize(("name", "elements"), [("post-64k", 2**16), ("post-32k", 2**15), ("post-16k", 2**14)])
def test_every_model_keeps_the_state_that_a_post_preset_is_named_after(name: str, elements: int, model: str) -> None:
    found = build_model(preset(name, model=model).model)
    state = found.prefill(torch.zeros(1, 1, dtype=torch.long)).state
    assert state is not None
    for layer in state.layers:
        assert sum(part.numel() for part in tensors(layer.mixer) if part.ndim == 4) == elements


def test_unknown_presets_are_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown preset for mqar 'zoology_based'; did you mean 'zoology-based'\?"):
        get_preset("mqar", "zoology_based")
    known = "gated_deltanet, gla, mamba2, retnet, rwkv7"
    with pytest.raises(UserError, match=f"no sizes for model 'attention'; it has them for: {known}"):
        preset_layer("mqar", "post-64k", "attention")


# --- what a checkpoint brings


def test_a_checkpoint_brings_its_runs_task_and_dtype(here: Path) -> None:
    few = ("--set", "task.hay_tokens=16", "--set", "training.dtype=bfloat16")
    assert bench(*NIAH, *few).code == 0
    (run,) = (here / "runs").iterdir()
    found = [
        configure("niah", flags={"checkpoint": str(run)})[0],
        configure("niah", settings=[f"checkpoint={run}"])[0],
        configure("niah", flags={"checkpoint": str(run / "checkpoint" / "step-00000012")})[0],
    ]
    for config in found:
        assert config.task.plain()["hay_tokens"] == 16 and config.task.train_length == 32
        assert config.training.dtype == "bfloat16"
    (other,) = configure("mqar", flags={"checkpoint": str(run)})
    assert other.task.name == "mqar" and other.task.train_length == 128


def test_a_checkpoint_of_the_same_command_without_the_flag_is_refused(finished: Callable[[str], Path]) -> None:
    for theirs, ours, command in (
        ("mqar", "mqar-noisy", "mqar"),
        ("mqar-noisy", "mqar", "mqar --noisy-sources"),
    ):
        run = finished(theirs)
        with pytest.raises(UserError, match=rf"is of task {theirs}, not {ours}: use `bench {command}`"):
            configure(ours, flags={"checkpoint": str(run)})
        (same,) = configure(theirs, flags={"checkpoint": str(run)})
        assert same.task.name == theirs and same.task.train_length == 32
    (other,) = configure("niah", flags={"checkpoint": str(run)})
    assert other.task.name == "niah", "what another task's model makes of it may be asked"


def test_a_checkpoint_outside_a_run_brings_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("something: else\n")
    config = preset("smoke", "niah")
    place = tmp_path / "mine" / "step-1"
    write_checkpoint(place, build_model(config.model), 0, {}, {})
    assert run_config_of(find_checkpoint(place)) is None
