"""The worked examples of CONTRIBUTING.md work: the architecture holds the invariances, the task trains."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from decaybench.core.config import parse
from decaybench.harness import selftest
from decaybench.harness.presets import configure
from decaybench.models import registry
from decaybench.models.config import ModelConfig
from decaybench.models.language_model import build_model
from decaybench.tasks.base import Shape

TEXT = (Path(__file__).resolve().parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture
def example(monkeypatch):
    """Runs the code block that begins with a path's comment, as a module of that name."""

    def run(path: str) -> types.ModuleType:
        found = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
        blocks = [block for block in found if block.startswith(f"# {path}")]
        assert len(blocks) == 1, f"CONTRIBUTING.md has {len(blocks)} blocks of {path}"
        module = types.ModuleType(Path(path).stem)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(blocks[0], path, "exec"), module.__dict__)
        return module

    return run


def test_the_architecture_holds_every_invariance_with_and_without_post(example, monkeypatch):
    example("decaybench/models/mixers/leaky.py")
    leaky = registry.Architecture(
        "leaky", "leaky:LeakyConfig", "leaky:Leaky", "a leaky average", "CONTRIBUTING.md", addons={"post": "h's decays"}
    )
    known = registry.architectures() | {"leaky": leaky}
    monkeypatch.setattr(registry, "architectures", lambda: known)
    for name, checks in (selftest.check_models("leaky") | selftest.check_models("leaky", ["post"])).items():
        assert len(checks) > 50, name
        assert [check for check in checks if not check.passed] == [], name
    (config,) = configure("mqar", flags={"model.name": "leaky"})
    assert (config.model.name, config.model.d_model) == ("leaky", 64)
    model = build_model(parse(ModelConfig, {"name": "leaky", "d_model": 8, "post": {"horizon": 16}}))
    taus = model.blocks[0].mixer.timescales(1)
    np.testing.assert_allclose(taus.detach(), np.geomspace(16, 1, 8), rtol=1e-5)


def test_the_task_makes_samples_that_say_what_it_says(example):
    module = example("decaybench/tasks/copying.py")
    task = module.Copying(module.CopyingConfig())
    batch = task.batch(Shape(length=6), "train", 0, np.arange(4))
    np.testing.assert_array_equal(batch.tokens[:, :3], batch.labels[:, 3:])
    np.testing.assert_array_equal(batch.distance[:, 3:], 3)
    assert not batch.asked[:, :3].any() and batch.asked[:, 3:].all()
    assert [stage.shape.length for stage in task.stages()] == [16, 32, 64, 128]
    with pytest.raises(module.UserError, match="copying length=7 is odd; the next that works is 8"):
        task.check(Shape(length=7))
