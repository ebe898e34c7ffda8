"""A run that only evaluated stands for the model that it names, as long as that is the one that it evaluated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from decaybench.core.errors import UserError
from decaybench.harness.origin import model_of
from decaybench.models.checkpoints import find_checkpoint
from tests.command import bench


@pytest.fixture
def evaluated(finished: Callable[[str], Path]) -> tuple[Path, Path]:
    """A run that trained, and the one that evaluated its model at other lengths."""
    trained = finished("mqar")
    assert bench("mqar", "--checkpoint", str(trained), "--eval-lengths", "1x,4x", "--samples", "4").code == 0
    (other,) = (path for path in trained.parent.iterdir() if path != trained)
    return trained, other


def test_the_spectrum_of_an_evaluation_is_that_of_its_model(evaluated: tuple[Path, Path]) -> None:
    trained, other = evaluated
    assert not (other / "checkpoint").exists()
    found = bench("spectrum", str(other))
    assert (found.code, found.err) == (0, "")
    assert str(other / "spectrum") in found.out
    assert bench("spectrum", str(trained)).code == 0
    of_both = [json.loads((path / "spectrum" / "spectrum.json").read_text()) for path in (other, trained)]
    assert of_both[0]["runs"][0]["train_length"] == 32
    for found in of_both:  # each on its own evaluation's samples
        for layer in found["runs"][0]["layers"]:
            layer.pop("measured"), layer.pop("kept")
        found["runs"][0].pop("measured_on"), found["runs"][0]["density"].pop("measured")
    assert of_both[0] == of_both[1]


def test_its_configuration_is_the_evaluations(evaluated: tuple[Path, Path]) -> None:
    trained, other = evaluated
    checkpoint, config = model_of(other)
    assert checkpoint.sha256 == find_checkpoint(trained).sha256
    assert config is not None and config.evaluation.lengths == ("1x", "4x") and config.checkpoint == str(trained)
    checkpoint, config = model_of(trained)
    assert config is not None and config.evaluation.lengths == ("1x", "2x") and config.checkpoint is None
    assert model_of(checkpoint.folder) == (checkpoint, config)


def test_a_model_that_is_gone_is_named(evaluated: tuple[Path, Path]) -> None:
    trained, other = evaluated
    trained.rename(trained.with_name("elsewhere"))
    for command in ("spectrum", "precision"):
        found = bench(command, str(other))
        assert found.code == 2 and found.out == "" and found.err.count("\n") == 1
        assert f"{other} holds evaluations only" in found.err and f"no checkpoint at {trained}" in found.err


def test_other_weights_than_those_evaluated_are_refused(evaluated: tuple[Path, Path]) -> None:
    trained, other = evaluated
    newest = find_checkpoint(trained)
    shutil.rmtree(newest.folder)
    before = find_checkpoint(trained).sha256[:12]
    assert before != newest.sha256[:12], "the one of some steps before"
    with pytest.raises(UserError) as error:
        model_of(other)
    assert f"{other} evaluated the weights {newest.sha256[:12]} of {trained}, which holds {before} now" in str(
        error.value
    )
    renamed = other.rename(other.with_name("mine"))
    assert model_of(renamed)[0].sha256[:12] == before, "a name that says nothing can't be checked"


def test_what_is_no_run_is_told_as_before(tmp_path: Path, evaluated: tuple[Path, Path]) -> None:
    _, other = evaluated
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere", tmp_path / ("x" * 300), Path("nul\0")):
        with pytest.raises(UserError, match="no checkpoint at"):
            model_of(path)
    (other / "config.yaml").write_text("task: [")
    with pytest.raises(UserError, match=r"config\.yaml is not valid YAML"):
        model_of(other)
