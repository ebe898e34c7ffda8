"""Only like with like stands in one figure, and what is in the way is named with the option that chooses."""

from __future__ import annotations

from typing import Any

import pytest

from decaybench.core.errors import UserError
from decaybench.results.comparison import comparable
from decaybench.results.leaderboard import rows
from tests.results.board import measured, seeds

SHARES = {64: 0.9, 128: 0.5}


def refused(records: list[Any], *words: str, **options: Any) -> None:
    with pytest.raises(UserError) as error:
        comparable(records, "mqar", **options)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_models_whose_training_differs_stand_together() -> None:
    records = [
        *seeds("mamba2", {64: (0.9, 0.7, 0.8), 128: (0.5, 0.1, 0.6)}, training__config={"learning_rate": 0.01}),
        *seeds("gla", {64: (0.6,), 128: (0.2,)}, training__config={"learning_rate": 0.003}),
    ]
    gla, mamba2 = comparable(records, "mqar")
    assert (mamba2.model, mamba2.architecture, mamba2.variant) == ("mamba2", "mamba2", "capacity")
    assert mamba2.points["1x"].by_seed == {0: 0.9, 1: 0.7, 2: 0.8}
    assert mamba2.values == {"1x": 0.8, "2x": 0.5} and mamba2.seeds == {"1x": 3, "2x": 3}
    assert mamba2.points["2x"].eval_length == 128 and mamba2.points["2x"].samples == (4, 4)
    assert gla.values == {"1x": 0.6, "2x": 0.2}


def test_variants_come_in_the_order_asked_for() -> None:
    records = [measured(model, 0, SHARES, ("capacity", "persist")) for model in ("gla", "mamba2")]
    assert [row.variant for row in comparable(records, "mqar")] == ["capacity", "capacity", "persist", "persist"]
    found = comparable(records, "mqar", ["persist", "capacity"])
    assert [(row.variant, row.model) for row in found] == [
        (variant, model) for variant in ("persist", "capacity") for model in ("gla", "mamba2")
    ]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"task__config__vocab_size": 512}, "task.vocab_size is 272 or 512"),
        ({"task__version": 2}, "task.version is 1 or 2"),
        ({"task__evaluation__seed": 7}, "evaluation.seed is 0 or 7"),
        ({"model__config": {"name": "gla", "d_model": 128, "n_layers": 2}}, "model.d_model is 64 or 128"),
        ({"model__config": {"name": "gla", "d_model": 64, "n_layers": 4}}, "model.n_layers is 2 or 4"),
        ({"environment__dtype": "bfloat16"}, "dtype is float32 or bfloat16"),
        ({"harness_version": 2}, "harness_version is 1 or 2"),
        ({"training__config__label_noise": 0.4}, "training.label_noise is none or 0.4"),
        ({"training__config__state_passing": 0.5}, "training.state_passing is none or 0.5"),
    ],
)
def test_what_was_not_asked_alike_is_refused_and_can_be_chosen(changes: dict[str, Any], key: str) -> None:
    records = [measured("mamba2", 0, SHARES), measured("mamba2+post", 0, SHARES, **changes)]
    name = key.split(" is ")[0]
    refused(records, "can't stand in one figure", key, f"--where {name}=VALUE")
    first, second = key.split(" is ")[1].split(" or ")
    (row,) = comparable(records, "mqar", where=[f"{name}={first}"])
    assert row.model == "mamba2"
    (row,) = comparable(records, "mqar", where=[f"{name}={second}"])
    assert row.model == "mamba2+post"


def test_another_training_length_is_refused() -> None:
    cells = [cell.plain() | {"ratio": 1.0} for cell in measured("gla", 0, {128: 0.5}).cells]
    other = measured("gla", 0, {128: 0.5}, training__train_length=128, cells=cells)
    refused([measured("mamba2", 0, SHARES), other], "train_length is 128 or 64")


def test_other_samples_under_the_same_name_are_refused() -> None:
    other = measured("gla", 0, SHARES, task__data_hash="c" * 64)
    refused([measured("mamba2", 0, SHARES), other], "mamba2 (", "gla (", "were asked different samples")


def test_other_lengths_have_other_samples_and_stand_together() -> None:
    records = [measured("mamba2", 0, SHARES), measured("gla", 0, {64: 0.5}, task__data_hash="c" * 64)]
    assert [row.model for row in comparable(records, "mqar")] == ["gla", "mamba2"]


def test_a_model_trained_in_two_ways_is_refused_until_one_is_chosen() -> None:
    records = [
        measured("mamba2", 0, SHARES, training__config={"learning_rate": 0.01}),
        measured("mamba2", 0, {64: 0.3}, training__config={"learning_rate": 0.003}),
        measured("gla", 0, SHARES, training__config={"learning_rate": 0.003}),
    ]
    refused(records, "mamba2 stands there more than once", "training.learning_rate is 0.01 or 0.003")
    refused(records, "--where mamba2:training.learning_rate=VALUE")
    gla, mamba2 = comparable(records, "mqar", where=["mamba2:training.learning_rate=0.01"])
    assert (gla.model, mamba2.values) == ("gla", {"1x": 0.9, "2x": 0.5})
    found = comparable(records, "mqar", where=["training.learning_rate=0.003"])
    assert [row.values["1x"] for row in found] == [0.9, 0.3]


def test_a_gate_has_none_of_the_options_of_the_filter_whose_place_it_takes() -> None:
    """Its own are all at their defaults, gain=true among them, and do nothing."""

    def with_bft(name: str, **options: Any) -> Any:
        config = {"name": "mamba2", "d_model": 64, "n_layers": 2}
        bft = {"gain": True, "nu0": 1.0, "control": "none", **options}
        return measured(f"mamba2+{name}", 0, SHARES, model__config={**config, "bft": bft})

    records = [
        measured("mamba2", 0, SHARES),
        with_bft("bft"),
        with_bft("bft-no-gain", gain=False),
        with_bft("scalar-gate", control="scalar_gate"),
    ]

    def models(*where: str) -> list[str]:
        return [row.model for row in comparable(records, "mqar", where=where)]

    assert models("model.bft.gain=true") == ["mamba2+bft"]
    assert models("model.bft.nu0=1") == ["mamba2+bft", "mamba2+bft-no-gain"]
    assert models("model.bft.control=none") == ["mamba2+bft", "mamba2+bft-no-gain"]
    assert models("model.bft.control=scalar_gate") == ["mamba2+scalar-gate"]
    everything = ["mamba2", "mamba2+bft", "mamba2+bft-no-gain", "mamba2+scalar-gate"]
    assert models() == everything
    assert models("mamba2+bft:model.bft.gain=true") == everything
    refused(records, "'model.bft.gain'", where=["mamba2+scalar-gate:model.bft.gain=true"])


def test_several_cells_a_length_are_no_curve() -> None:
    record = measured("mamba2", 0, {64: 0.9})
    cells = [cell.plain() | {"coordinates": {"kv": kv}, "name": str(kv)} for cell in record.cells for kv in (4, 8)]
    refused([measured("mamba2", 0, {64: 0.9}, cells=cells)], "mqar capacity is no curve over length", "1x kv=4")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"variants": ["capacty"]}, ("variant of mqar", "'capacty'", "'capacity'")),
        ({"where": ["training.steps"]}, ("--where", "[MODEL:]KEY=VALUE", "'training.steps'")),
        ({"where": ["=3"]}, ("--where", "'=3'")),
        ({"where": [":training.steps=3"]}, ("--where", "':training.steps=3'")),
        ({"where": ["mamba:training.steps=3"]}, ("'mamba'", "'mamba2'")),
        ({"where": ["training.step=3"]}, ("'training.step'", "'training.steps'")),
        ({"where": ["training.steps=3"]}, ("--where training.steps=3", "training.steps is 1500")),
    ],
)
def test_unknown_names_are_one_line(options: dict[str, Any], words: tuple[str, ...]) -> None:
    refused([measured("mamba2", 0, SHARES)], *words, **options)


def test_an_unknown_task_is_one_line() -> None:
    with pytest.raises(UserError, match="unknown task of the leaderboard 'mqa'; did you mean 'mqar'"):
        comparable([measured("mamba2", 0, SHARES)], "mqa")
    with pytest.raises(UserError, match="known: none"):
        comparable([], "mqar")


def test_an_option_that_is_newer_than_a_record_and_absent_changes_nothing() -> None:
    old = measured("mamba2", 0, SHARES)
    new = measured("mamba2", 1, SHARES, model__config=old.model.config | {"embedding_norm": None})
    assert [row.seeds for row in rows([old, new])] == [{"1x": 2, "2x": 2}]
    used = measured("mamba2", 1, SHARES, model__config=old.model.config | {"embedding_norm": True})
    assert len(rows([old, used])) == 2
