"""A run's configuration: what wins over what, what its hashes depend on, and how lengths are read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from decaybench.core.errors import UserError
from decaybench.harness.config import RunConfig, TrainingConfig, make_config, parse_length, training_hash
from decaybench.harness.presets import configure
from decaybench.models.config import ModelConfig
from decaybench.tasks.mqar import MqarConfig, MqarEvaluation
from decaybench.tasks.niah import NiahConfig, NiahEvaluation
from decaybench.tasks.registry import make_task
from tests.command import NIAH, bench


def config(*layers: dict[str, Any], task: str = "niah") -> RunConfig:
    return make_config({"task": {"name": task}}, *layers)


# --- layers


def test_preset_file_flags_and_settings_win_in_this_order(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    text = "model: {d_model: 32}\ntraining: {steps: 7, warmup: 7, clip: 0.7}\nseed: 7\n"
    file.write_text(text)
    (found,) = configure(
        "niah",
        preset="smoke",
        file=file,
        flags={"seed": 8, "training.warmup": 8, "training.clip": 0.8, "evaluation.samples": None},
        settings=["training.clip=0.9", "training.eps=1e-9"],
    )
    training = found.training
    assert (found.model.d_model, training.steps, found.seed, training.warmup) == (32, 7, 8, 8)
    assert (training.clip, training.eps, found.evaluation.samples) == (0.9, 1e-9, 100)
    assert found.model.mixer.plain()["d_state"] == 32, "the preset's"
    assert file.read_text() == text


def test_later_settings_win_over_earlier_ones() -> None:
    (found,) = configure("niah", settings=["training.steps=1", "training={steps: 2}", "training.steps=3"])
    assert found.training.steps == 3


def test_a_file_alone_brings_no_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 1\n")
    (found,) = configure("niah", file=file)
    assert found.model == config().model != configure("niah")[0].model


@pytest.mark.parametrize("said", ["flag", "setting", "file"])
def test_the_preset_is_that_of_the_model_said_last(tmp_path: Path, said: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {name: attention}\n" if said == "file" else "seed: 1\n")
    (found,) = configure(
        "mqar",
        preset="smoke",
        file=file,
        flags={"model.name": {"flag": "attention", "setting": "mamba2"}.get(said)},
        settings=["model.name=attention"] if said == "setting" else [],
    )
    assert (found.model.name, found.model.mixer.plain()["n_heads"]) == ("attention", 4)


def test_post_as_a_flag_keeps_what_the_file_says_of_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {post: {taper: learned}}\n")
    (found,) = configure("niah", preset="smoke", file=file, flags={"model.post": {}})
    assert found.model.post is not None and found.model.post.taper == "learned"
    (found,) = configure("niah", preset="smoke", file=file, settings=["model.post="])
    assert found.model.post is None


def test_a_run_a_seed() -> None:
    found = configure("niah", seeds=[3, 1])
    assert [run.seed for run in found] == [3, 1]
    assert len({run.training_hash for run in found}) == 2
    assert found[0].model_copy(update={"seed": 1}) == found[1]


def test_horizon_and_vocabulary_follow_the_task() -> None:
    found = config({"model": {"post": {}}, "task": {"train_length": 64, "hay_tokens": 13}})
    assert found.model.post is not None and found.model.post.horizon == 64
    assert found.model.vocab_size == 3 + 64 + 64 + 13
    found = config({"model": {"post": {"horizon": 99}, "vocab_size": 300}, "task": {"train_length": 64}})
    assert found.model.post is not None and (found.model.post.horizon, found.model.vocab_size) == (99, 300)


def test_objects_are_taken_as_well_as_data() -> None:
    by_objects = RunConfig(
        model=ModelConfig(d_model=32, vocab_size=272),
        task=MqarConfig(train_length=64),
        training=TrainingConfig(steps=5),
        evaluation=MqarEvaluation(samples=3),
    )
    by_data = config(
        {
            "model": {"d_model": 32},
            "task": {"train_length": 64},
            "training": {"steps": 5},
            "evaluation": {"samples": 3},
        },
        task="mqar",
    )
    assert by_objects == by_data == make_config(by_objects.plain())
    assert isinstance(by_data.task, MqarConfig) and isinstance(by_data.evaluation, MqarEvaluation)


def test_what_is_given_stays_as_it_is() -> None:
    data: dict[str, Any] = {"model": {"post": {}}, "task": {"name": "niah"}}
    make_config(data, {"model": {"d_model": 32}})
    assert data == {"model": {"post": {}}, "task": {"name": "niah"}}


@pytest.mark.parametrize("task", ["niah", "mqar"])
@pytest.mark.parametrize("post", [None, {"taper": "learned", "range": [1.5, 100.25]}])
def test_plain_data_makes_the_same_configuration(task: str, post: dict[str, Any] | None) -> None:
    found = config({"model": {"post": post}, "training": {"learning_rate": 10**-2.5}, "seed": 4}, task=task)
    for data in (found.plain(), yaml.safe_load(yaml.safe_dump(found.plain(), sort_keys=False))):
        again = make_config(data)
        assert again == found
        assert (again.training_hash, again.evaluation_hash) == (found.training_hash, found.evaluation_hash)


def test_a_saved_configuration_finds_its_run(here: Path) -> None:
    assert bench(*NIAH).code == 0
    (saved,) = here.glob("runs/*/config.yaml")
    result = bench("niah", "--config", str(saved))
    assert result.code == 0 and "already done" in result.err
    assert "training" not in bench("niah", "--config", str(saved), "--eval-lengths", "4x").err
    assert len(list((here / "runs").iterdir())) == 1


# --- hashes

TRAINING_KEYS = {
    "model.name": "attention",
    "model.vocab_size": 500,
    "model.d_model": 128,
    "model.n_layers": 3,
    "model.mixer": {"d_state": 16},
    "model.ffn": {},
    "model.norm": "layernorm",
    "model.norm_eps": 1e-6,
    "model.final_norm": "layernorm",
    "model.norm_branch": True,
    "model.tie_embeddings": False,
    "model.embedding_norm": True,
    "model.embedding_dropout": 0.5,
    "model.post": {},
    "model.bft": {},
    "task.train_length": 64,
    "task.key_tokens": 32,
    "task.value_tokens": 32,
    "task.hay_tokens": 32,
    "task.values": 2,
    "task.haystack": "needles",
    "task.stages": [{"shape": {"length": 16, "needles": 1, "queries": 1}, "examples": 8}],
    "training.plan": "epochs",
    "training.steps": 77,
    "training.epochs": 3,
    "training.mastery": 0.5,
    "training.review": 0.5,
    "training.shuffle": True,
    "training.batch_tokens": 512,
    "training.batch_samples": 7,
    "training.label_noise": 0.25,
    "training.state_passing": 0.25,
    "training.learning_rate": 1e-3,
    "training.schedule": "cosine",
    "training.warmup": 7,
    "training.hold": 0.5,
    "training.floor": 1e-4,
    "training.weight_decay": 0.0,
    "training.decayed": "all",
    "training.betas": [0.8, 0.9],
    "training.eps": 1e-7,
    "training.clip": 0.5,
    "training.dtype": "bfloat16",
    "seed": 1,
}
EVALUATION_KEYS = {
    "evaluation.lengths": ["1x"],
    "evaluation.samples": 7,
    "evaluation.seed": 1,
    "evaluation.variants": ["multikey"],
    "evaluation.depths": [0.5],
    "evaluation.distractors": 2,
    "batch_tokens": 99,
}
OTHER_KEYS = {
    "device": "cpu",
    "backend": "torch",
    "out": "elsewhere",
    "checkpoint_seconds": 0.5,
    "keep": 10,
    "micro_batch_tokens": 64,
    "recompute": True,
    "parallel": "fsdp",
    "tensorboard": True,
}
STAGES = [{"shape": {"length": 32, "needles": 2, "queries": 2}, "examples": 64}]


def changed(key: str, value: Any) -> RunConfig:
    *sections, name = key.split(".")
    layer: dict[str, Any] = {name: value}
    for section in reversed(sections):
        layer = {section: layer}
    return config({"task": {"stages": STAGES}}, layer)


def test_every_key_is_in_one_of_the_three_lists() -> None:
    parts: dict[str, type[BaseModel]] = {
        "": RunConfig,
        "model.": ModelConfig,
        "task.": NiahConfig,
        "training.": TrainingConfig,
        "evaluation.": NiahEvaluation,
    }
    keys = {prefix + name for prefix, kind in parts.items() for name in kind.model_fields}
    listed = {*TRAINING_KEYS, *EVALUATION_KEYS, *OTHER_KEYS}
    with_another = {"training.state_passing_after"}  # its own test is below
    assert keys - listed == {"model", "task", "training", "evaluation", "checkpoint", "task.name"} | with_another


@pytest.mark.parametrize("key", TRAINING_KEYS)
def test_the_training_hash_changes_with(key: str) -> None:
    assert changed(key, TRAINING_KEYS[key]).training_hash != changed("seed", 0).training_hash


@pytest.mark.parametrize("key", [*EVALUATION_KEYS, *OTHER_KEYS])
def test_the_training_hash_stays_with(key: str) -> None:
    value = {**EVALUATION_KEYS, **OTHER_KEYS}[key]
    assert changed(key, value).training_hash == changed("seed", 0).training_hash


@pytest.mark.parametrize("key", [*EVALUATION_KEYS, "task.key_tokens", "task.hay_tokens", "training.dtype"])
def test_the_evaluation_hash_changes_with(key: str) -> None:
    value = {**EVALUATION_KEYS, **TRAINING_KEYS}[key]
    assert changed(key, value).evaluation_hash != changed("seed", 0).evaluation_hash


@pytest.mark.parametrize("key", [*OTHER_KEYS, "model.d_model", "training.steps", "seed"])
def test_the_evaluation_hash_stays_with(key: str) -> None:
    value = {**OTHER_KEYS, **TRAINING_KEYS}[key]
    assert changed(key, value).evaluation_hash == changed("seed", 0).evaluation_hash


def test_the_training_hash_changes_with_the_step_that_states_are_passed_after() -> None:
    found = [config({"training": {"state_passing": 1, "state_passing_after": after}}) for after in (None, 1, 2)]
    assert len({one.training_hash for one in found}) == 3


@pytest.mark.parametrize("key", ["label_noise", "state_passing"])
@pytest.mark.parametrize("share", [0, 0.0, None])
def test_a_share_of_nothing_is_the_run_without(key: str, share: float | None) -> None:
    found = config({"training": {key: share}})
    assert found == config() and getattr(found.training, key) is None
    assert found.training_hash == config().training_hash


@pytest.mark.parametrize("keys", [("label_noise",), ("state_passing", "state_passing_after")], ids=lambda keys: keys[0])
def test_the_hash_of_a_training_is_what_it_was_before_there_was_this(keys: tuple[str, ...]) -> None:
    """Its configuration without the keys: the one that records of then hold."""
    found = config()
    before = {key: value for key, value in found.training.plain().items() if key not in keys}
    assert training_hash(found.model.plain(), make_task(found.task), before, found.seed) == found.training_hash


def test_the_hash_of_a_training_is_what_it_was_before_there_was_bft() -> None:
    found = config({"model": {"post": {}}})
    before = {key: value for key, value in found.model.plain().items() if key != "bft"}
    assert training_hash(before, make_task(found.task), found.training.plain(), found.seed) == found.training_hash


@pytest.mark.parametrize("share", [1, 1.5, -0.1, "a", math.nan, True])
def test_no_share_of_labels(share: Any) -> None:
    with pytest.raises(UserError, match=r"training\.label_noise="):
        config({"training": {"label_noise": share}})


def test_a_length_is_the_same_by_ratio_and_in_tokens() -> None:
    one, other = (config({"evaluation": {"lengths": lengths}}) for lengths in (["1x", "0.5x"], ["128", "64"]))
    assert one.eval_lengths() == other.eval_lengths() == [128, 64]


def test_the_hashes_of_this_version() -> None:
    """Old run folders are found by these: they may change only with HARNESS_VERSION, a task's version or a default."""
    (found,) = configure("niah", flags={"model.post": {}})
    folder = found.folder(found.training_hash)
    assert folder == Path("runs") / f"niah-mamba2+post-{found.training_hash[:12]}"
    assert len(found.training_hash) == len(found.evaluation_hash) == 64


# --- lengths


@pytest.mark.parametrize(
    ("text", "length"),
    [("1x", 96), ("2x", 192), ("0.5x", 48), (" 4x ", 384), ("1.25x", 120), ("512", 512), ("1", 1), ("0512", 512)],
)
def test_lengths(text: str, length: int) -> None:
    assert parse_length(text, 96) == length


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "0x", "-1", "-1x", "1.5", "1e3", "nan", "inf", "0.3x", "1 x", "1X", "2x2", "٣", f"{2**31 + 1}"],
)
def test_no_lengths(text: str) -> None:
    with pytest.raises(UserError, match="--eval-lengths: "):
        parse_length(text, 96)


def test_the_longest_length() -> None:
    assert parse_length(str(2**31), 96) == 2**31


# --- what doesn't fit together


def test_lengths_that_are_the_same_are_refused() -> None:
    with pytest.raises(UserError, match="1x,128 names a length twice"):
        config({"evaluation": {"lengths": ["1x", "128"]}})


def test_infinities_and_nan_are_refused_everywhere() -> None:
    for section, key in (("training", "weight_decay"), ("training", "clip"), ("model", "norm_eps")):
        for value in (math.inf, -math.inf, math.nan):
            with pytest.raises(UserError, match=rf"{section}\.{key}=-?(inf|nan): "):
                config({section: {key: value}})


def test_a_checkpoint_needs_no_model_and_no_stages() -> None:
    short = {"task": {"train_length": 3}, "evaluation": {"lengths": ["16"]}}
    found = config(short, {"checkpoint": "somewhere", "model": {"vocab_size": 2}})
    assert found.checkpoint == "somewhere"
    with pytest.raises(UserError, match="length=3 is too short"):
        config(short)


def test_lengths_in_tokens_may_be_numbers() -> None:
    config = make_config({"task": {"name": "niah"}, "evaluation": {"lengths": [64, "1x", "256"]}})
    assert config.eval_lengths() == [64, 128, 256]
    with pytest.raises(UserError, match=r"evaluation.lengths.0=1.5"):
        make_config({"task": {"name": "niah"}, "evaluation": {"lengths": [1.5]}})
