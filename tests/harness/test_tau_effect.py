"""What making tau equal does is what the same questions say of a model whose tau was changed by hand."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from decaybench.harness.config import RunConfig, make_config
from decaybench.harness.precision_report import TauEffect
from decaybench.harness.tau_effect import tau_effects
from decaybench.models.language_model import LanguageModel, build_model
from decaybench.results.resampling import Estimate
from decaybench.tasks.base import Cell
from decaybench.tasks.registry import make_task

SAMPLES = 40


def setting(task: str, bft: dict[str, Any] | None) -> tuple[RunConfig, LanguageModel, Cell]:
    """An attention model whose tau differ widely, and which guesses right now and then: there are few values."""
    own = {"reliabilities": [0.9, 0.5, 0.3]} if task == "mqar-noisy" else {}
    model = {"name": "attention", "d_model": 16, "n_layers": 2, "bft": bft}
    config = make_config(
        {
            "task": {"name": task, "train_length": 64, "vocab_size": 40, **own},
            "model": model,
            "evaluation": {"lengths": ["1x"]},
        }
    )
    made = build_model(config.model, 3).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
        if made.precision is not None and made.precision.log_tau is not None:
            made.precision.log_tau.mul_(2)
    asked = make_task(config.task)
    return config, made, asked.cells(config.evaluation, [64])[0]


def accuracies(config: RunConfig, model: LanguageModel, cell: Cell) -> list[float]:
    task = make_task(config.task)
    found = []
    for index in range(SAMPLES):
        batch = task.batch(cell.shape, "test", config.evaluation.seed, np.array([index]))
        with torch.no_grad():
            said = model(torch.from_numpy(batch.tokens)).logits.argmax(-1).numpy()
        found.append(float((said == batch.labels)[batch.asked].mean()))
    return found


@pytest.mark.parametrize(
    ("task", "groups"),
    [("mqar-noisy", {"sources": range(1, 4), "tokens": range(40)}), ("mqar", {"tokens": range(40)})],
)
def test_equal_taus_are_their_geometric_mean_and_nothing_else_changes(task: str, groups: dict[str, range]) -> None:
    config, model, cell = setting(task, {})
    assert model.precision is not None and model.precision.log_tau is not None
    before = {name: value.clone() for name, value in model.state_dict().items()}
    effects = tau_effects(config, model, cell, SAMPLES)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [effect.what for effect in effects] == list(groups)
    learned = accuracies(config, model, cell)
    for effect, ids in zip(effects, groups.values(), strict=True):
        changed = copy.deepcopy(model)
        tau = changed.precision.log_tau.detach().exp()  # type: ignore[union-attr]
        with torch.no_grad():
            for token in ids:
                changed.precision.log_tau[token] = tau[list(ids)].prod().pow(1 / len(ids)).log()  # type: ignore[union-attr, index]
        differences = np.subtract(accuracies(config, changed, cell), learned)
        assert effect.accuracy == pytest.approx(np.mean(learned)) and 0 < effect.accuracy < 1
        assert effect.difference.value == pytest.approx(differences.mean(), abs=1e-12)
        assert (effect.length, effect.samples) == (64, SAMPLES)
    assert effects[-1].difference.value != 0, "tau of this spread changes some answer"


@pytest.mark.parametrize("bft", [None, {"precision": "frozen"}, {"precision": "mlp"}, {"control": "scalar_gate"}])
def test_only_a_tau_of_each_token_can_be_made_equal(bft: dict[str, Any] | None) -> None:
    assert tau_effects(*setting("mqar-noisy", bft), SAMPLES) == ()


def test_words() -> None:
    effect = TauEffect("sources", 128, 300, 0.8213, Estimate(-0.00123, (-0.004, 0.002)))
    assert str(effect) == ("all sources' tau made equal: accuracy 0.821 at 128 tokens, then -0.0012 [-0.0040, +0.0020]")
    assert str(TauEffect("tokens", 128, 300, 0.8, Estimate(0.0, (0.0, 0.0)))).endswith("then no answer changes")
    assert effect.plain()["difference"] == {"value": -0.00123, "interval": [-0.004, 0.002]}
