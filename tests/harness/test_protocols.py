"""Protocols: what is comparable to one, and what is not by any single item; presets against the published tables."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decaybench.core.errors import UserError
from decaybench.harness import presets, protocols
from decaybench.harness.config import RunConfig, evaluation_cells
from decaybench.harness.plans import make_plan
from decaybench.harness.presets import PRESETS, Preset, configure
from decaybench.harness.protocols import PROTOCOLS, Protocol, comparable_to, decided, departures, items, remark
from decaybench.harness.training import parameter_groups
from decaybench.harness.verify import add_to_leaderboard, verify
from decaybench.models.checkpoints import write_checkpoint
from decaybench.models.config import ModelConfig
from decaybench.models.language_model import build_model
from decaybench.results.record import Record, read_record, seal
from decaybench.results.selection import best, best_on_test, make_point
from decaybench.results.statistics import cell_statistics
from decaybench.tasks.base import IGNORED
from decaybench.tasks.registry import make_task
from tests.command import bench
from tests.results import example

Edit = Callable[[dict[str, Any]], Any]

# Every protocol that trains, with the architectures and add-ons that it is decided for. RWKV-7 alone isn't comparable
# to PoST's: its w0 learns at twice the rate here, as RWKV-LM's does, and the paper's baseline at the common one.
COMPARABLE = [
    *(("zoology-based", "mamba2", addons) for addons in ({}, {"post": {}}, {"bft": {}})),
    *((f"zoology-iclr24-{length}", "mamba2", {}) for length in (64, 128, 256, 512)),
    *((f"post-{state}", "mamba2", {}) for state in ("64k", "32k", "16k")),
    *(("post-16k", model, {}) for model in ("gated_deltanet", "gla", "retnet")),
    *(("post-64k", model, {"post": {}}) for model in ("mamba2", "rwkv7", "gated_deltanet", "gla", "retnet")),
    *(("post-16k", model, {"post": {"variant": "minimal"}}) for model in ("rwkv7", "retnet")),
]


def run_of(name: str, model: str = "mamba2", addons: Mapping[str, Any] | None = None) -> RunConfig:
    flags = {"model.name": model, **{f"model.{addon}": options for addon, options in (addons or {}).items()}}
    (found,) = configure("mqar", preset=name, flags=flags)
    return found


def cell(name: str, variant: str, length: int, n: int) -> dict[str, Any]:
    value, error, interval = cell_statistics("mean_accuracy", [1] * n, [1] * n)
    return {
        **{"name": name, "variant": variant, "eval_length": length, "coordinates": {}, "n": n},
        **{"real_tokens": {"min": length, "mean": length, "max": length}, "correct": [1] * n, "asked": [1] * n},
        **{"value": value, "standard_error": error, "interval": interval},
    }


@cache
def _finished(name: str, model: str, addons: str) -> str:
    """All of the record of a whole run of a protocol, its learning rate and epoch selected; JSON."""
    config = run_of(name, model, json.loads(addons))
    task = make_task(config.task)
    plan = make_plan(task.stages(), config.training, 0)
    cells = evaluation_cells(task, config.evaluation, config.task.train_length)
    assert plan.steps_by_epoch is not None
    grid = PRESETS["mqar"][name].grid(model)
    points = tuple(make_point(plan.steps_by_epoch * (e + 1), (e / 100,), (0.5,) * len(cells)) for e in range(2))
    runs = [{"learning_rate": rate, "training_hash": "a" * 64, "points": points} for rate in grid]
    content = example.content()
    content["task"]["config"] = config.task.for_record()
    content["task"]["evaluation"] = config.evaluation.plain()
    content["model"].update(
        cell=config.model.cell, architecture=model, addons=config.model.addons, config=config.model.plain()
    )
    content["training"].update(
        config=config.training.plain(), seed=0, train_length=config.task.train_length, steps=points[1].step
    )
    content["environment"]["dtype"] = config.training.dtype
    content["cells"] = [cell(c.name, c.variant, c.shape.length, config.evaluation.samples) for c in cells]
    content["selection"] = {
        **{"every": plan.steps_by_epoch, "steps_by_epoch": plan.steps_by_epoch, "total_steps": plan.total_steps},
        "validation": {"seed": 1, "cells": [{"name": "v", "shape": {}, "n": 8}], "data_hash": "b" * 64},
        "runs": runs,
        "chosen": {"learning_rate": grid[0], "step": points[1].step, "value": 0.01},
        "chosen_on_test": {"by_cell": [], "by_mean": {"learning_rate": grid[0], "step": 1, "value": 0.5}},
    }
    content["training"]["config"]["learning_rate"] = content["training"]["learning_rate"] = grid[0]
    return json.dumps(seal(content).plain())


def finished(name: str, model: str = "mamba2", addons: Mapping[str, Any] | None = None) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_finished(name, model, json.dumps(addons or {})))
    return {key: value for key, value in content.items() if key not in ("record_id", "schema_version")}


def edited(content: dict[str, Any], edit: Edit) -> Record:
    changed = copy.deepcopy(content)
    edit(changed)
    return seal(changed)


# --- comparable, and not


@pytest.mark.parametrize(("name", "model", "addons"), COMPARABLE)
def test_a_whole_run_of_a_protocol_is_comparable_to_it(name: str, model: str, addons: dict[str, Any]) -> None:
    record = seal(finished(name, model, addons))
    assert departures(record, name) == []
    assert comparable_to(record) == name
    assert decided(finished(name, model, addons)).comparable_to == name
    assert remark(record, name) == f"comparable to {name}: every item of the protocol holds"
    for seed in (1, 7):
        assert comparable_to(edited(finished(name, model, addons), lambda c, s=seed: c.update(seed=s))) == name


def _places(content: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _places(value, (*path, key))
    elif content is not None:
        yield path, content


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value + 2
    return value[:-1] if isinstance(value, list) else f"{value}-other"


FREE = {
    "training.learning_rate",
    *("training.mastery", "training.review", "training.hold"),  # that this plan and schedule don't look at
    "model.mixer.chunk_size",
}
ITEMS = {
    f"{name} {model}: {part}.{'.'.join(path)}": (name, model, (part, *path))
    for name, model, free in (
        ("zoology-based", "mamba2", {*FREE, "training.batch_tokens", "model.d_model", "model.mixer.d_state"}),
        ("post-16k", "gla", FREE),
        ("post-64k", "rwkv7", FREE),
    )
    for part in ("task", "model", "training")
    for path, _ in _places(finished(name, model)[part]["config"], ())
    if ".".join((part, *path)) not in free
}


@pytest.mark.parametrize("item", ITEMS)
def test_any_other_value_of_an_item_is_no_longer_comparable(item: str) -> None:
    name, model, (part, *path, last) = ITEMS[item]

    def change(content: dict[str, Any]) -> None:
        place = content[part]["config"]
        for key in path:
            place = place[key]
        place[last] = _another(place[last])

    record = edited(finished(name, model), change)
    assert comparable_to(record) is None
    key = ".".join((part, *path, last))
    assert any(reason.startswith(f"{key}=") and f"; {name} has " in reason for reason in departures(record, name))


NEW = {
    "label noise": (("training", "config", "label_noise"), 0.1, "training.label_noise=0.1; post-16k has none"),
    "a floor": (("training", "config", "floor"), 1e-5, "training.floor=1e-05; post-16k has none"),
    "batches by samples": (("training", "config", "batch_samples"), 8, "training.batch_samples=8; post-16k has none"),
    "an FFN": (("model", "config", "ffn"), {"kind": "mlp"}, "model.ffn.kind=mlp; post-16k has none"),
    "an option of a later version": (("training", "config", "new"), 3, "training.new=3; post-16k has none"),
    "fewer steps": (("training", "config", "steps"), 20, "training.steps=20; post-16k has 16,384, 8 epochs"),
    "a rate between": (
        ("training", "config", "learning_rate"),
        2e-3,
        "training.learning_rate=0.002; post-16k has one of 0.001, 0.00316, 0.01",
    ),
    "dtype": (("environment", "dtype"), "float32", "evaluated in float32; post-16k has bfloat16"),
}


@pytest.mark.parametrize("what", NEW)
def test_an_item_that_the_protocol_does_not_have(what: str) -> None:
    (*path, key), value, reason = NEW[what]

    def change(content: dict[str, Any]) -> None:
        place = content
        for part in path:
            place = place[part]
        place[key] = value

    record = edited(finished("post-16k", "gla"), change)
    assert reason in departures(record, "post-16k") and comparable_to(record) is None


def _checkpoint(content: dict[str, Any]) -> None:
    del content["training"]
    content["checkpoint"] = {"source": "a", "sha256": "c" * 64}


DONE: dict[str, tuple[Edit, str]] = {
    "too few samples": (
        lambda c: c["cells"].__setitem__(0, cell("capacity-length512-kv128", "capacity", 512, 100)),
        "evaluation.samples=100; post-16k has 3,000",
    ),
    "a cell less": (lambda c: c["cells"].pop(), "evaluation: persist-length4096-kv128 isn't asked, of 1 cells"),
    "a cell more": (
        lambda c: c["cells"].append(cell("persist-length8192-kv128", "persist", 8192, 3000)),
        "evaluation: persist-length8192-kv128 is asked, of 1 cells that post-16k doesn't have",
    ),
    "not selected": (
        lambda c: c.pop("selection"),
        "its learning rate and epoch weren't selected on a validation set; post-16k has the grid 0.001, 0.00316, 0.01",
    ),
    "a rate left out": (
        lambda c: c["selection"]["runs"].pop(),
        "selection left out learning rate 0.01 of post-16k's grid",
    ),
    "a rate added": (
        lambda c: c["selection"]["runs"].append({**c["selection"]["runs"][0], "learning_rate": 0.5}),
        "selection tried learning rate 0.5, which post-16k's grid doesn't have",
    ),
    "other candidates": (
        lambda c: c["selection"].update(every=1000),
        "selection's candidates are every 1,000 steps; post-16k has the end of each epoch",
    ),
    "a shorter training": (
        lambda c: c["selection"].update(total_steps=4096),
        "selection trained 4,096 steps; post-16k has 16,384",
    ),
    "another step than was chosen": (
        lambda c: c["training"].update(steps=16384),
        "selection chose learning rate 0.001 at step 4,096; the training has 0.001 and 16,384",
    ),
    "a checkpoint": (_checkpoint, "the model is a given checkpoint; post-16k says how it is trained"),
    "another architecture": (
        lambda c: c["model"].update(architecture="attention"),
        "model is attention: post-16k is decided for mamba2, rwkv7, gated_deltanet, gla, retnet",
    ),
    "another horizon": (
        lambda c: c["model"]["config"].update(post={"horizon": 4096}),
        "model.post.horizon=4096; the training length is 512",
    ),
    "another task": (lambda c: c["task"].update(name="niah"), "task is niah; post-16k is of mqar"),
}


@pytest.mark.parametrize("what", DONE)
def test_what_was_done_otherwise(what: str) -> None:
    edit, reason = DONE[what]
    record = edited(finished("post-16k"), edit)
    assert any(found.startswith(reason) for found in departures(record, "post-16k")), departures(record, "post-16k")
    assert comparable_to(record) is None


def test_parameter_groups_are_the_protocols() -> None:
    """RWKV-7 alone has w0 at twice the rate; weight decay on everything is Zoology's, and on matrices PoST's."""
    said = departures(seal(finished("post-16k", "rwkv7")), "post-16k")
    assert said == [
        "training groups: blocks.0.mixer.spectrum.P without weight decay at 2 times the learning rate; post-16k has it "
        "without weight decay at the learning rate, and 1 more like it"
    ]
    everything: Edit = lambda c: c["training"]["config"].update(decayed="all")  # noqa: E731
    said = departures(edited(finished("post-16k"), everything), "post-16k")
    assert said[0] == "training.decayed=all; post-16k has matrices"
    assert said[1].startswith("training groups: blocks.0.norm.weight with weight decay at the learning rate; post-16k")
    usual: Edit = lambda c: c["training"]["config"].update(decayed=None)  # noqa: E731
    (_, groups) = departures(edited(finished("post-64k", "rwkv7", {"post": {}}), usual), "post-64k")
    assert groups.startswith("training groups: blocks.0.mixer.decay.down without weight decay")


def test_attention_is_said_to_be_another() -> None:
    for name in ("zoology-based", "zoology-iclr24-64"):
        run = run_of(name, "attention")
        record = edited(
            finished(name), lambda c, run=run: c["model"].update(architecture="attention", config=run.model.plain())
        )
        (reason,) = departures(record, name)
        assert reason.startswith("model is attention: it turns queries and keys by their positions here")


def test_the_protocols_own_sizes_may_be_chosen() -> None:
    for key, sizes, other in (("d_model", (64, 128, 256), 512), ("d_state", (8, 16, 24), 32)):
        for size in (*sizes, other):

            def change(content: dict[str, Any], key: str = key, size: int = size) -> None:
                place = content["model"]["config"]
                (place["mixer"] if key == "d_state" else place)[key] = size

            found = comparable_to(edited(finished("zoology-based"), change))
            assert found == (None if size == other else "zoology-based")


@pytest.mark.parametrize("value", [True, 3, -1e308, "x", [], [1, {"a": 2}], {"a": [{}]}, 10**30], ids=repr)
def test_a_record_that_somebody_made_up_is_answered_all_the_same(value: Any) -> None:
    for part, key in (
        *(("training", key) for key in ("steps", "betas", "decayed", "learning_rate")),
        *(("model", key) for key in ("d_model", "post", "mixer", "norm", "n_layers")),
        *(("task", key) for key in ("stages", "fill", "train_length")),
    ):
        if (key, value) == ("steps", 10**30):  # a training ends with its last epoch
            continue
        record = edited(finished("post-16k"), lambda c, p=part, k=key: c[p]["config"].update({k: value}))
        found = departures(record, "post-16k")
        assert found and all(isinstance(reason, str) and "\n" not in reason for reason in found), (part, key)


def test_no_name_is_unknown() -> None:
    record = seal(finished("post-16k"))
    with pytest.raises(UserError, match=r"unknown protocol 'post-16'; did you mean 'post-16k'\?"):
        departures(record, "post-16")
    with pytest.raises(UserError, match=r"unknown model of protocol zoology-based 'gla'"):
        items("zoology-based", "gla")
    smoke = seal(example.content())
    assert comparable_to(smoke) is None, "most of its items aren't even there"
    for name, protocol in PROTOCOLS.items():
        assert (name in PRESETS[protocol.task]) and departures(smoke, name)


# --- presets against the tables of the sources, written out again here

STATES = {"post-64k": (512, 4), "post-32k": (512, 8), "post-16k": (256, 4)}


@pytest.mark.parametrize("name", STATES)
def test_post_data_are_four_sets_in_this_order_inside_each_epoch(name: str) -> None:
    config = run_of(name)
    task = make_task(config.task)
    plan = make_plan(task.stages(), config.training, 0)
    seen: dict[int, list[int]] = {}
    firsts = []
    for step in range(2 * 2048):  # two epochs of 2,048 steps of 512 sequences
        stage, indices = plan.next(step)
        assert len(indices) * 512 == 2**18 and stage == step % 2048 // 512
        if step < 2048:
            seen.setdefault(stage, []).extend(indices[[0, -1]].tolist())
        if step % 512 == 0:
            firsts.append((stage, int(indices[0])))
    assert firsts == [(0, 0), (1, 0), (2, 0), (3, 0)] * 2, "the same examples in each epoch"
    for stage, kv in enumerate((16, 32, 64, 128)):
        ends = np.array(seen[stage]).reshape(-1, 2)
        assert ends[0, 0] == 0 and ends[-1, 1] == 2**18 - 1 and (ends[1:, 0] == ends[:-1, 1] + 1).all()
        batch = task.batch(task.stages()[stage].shape, "train", 0, np.arange(8))
        check_samples(batch.tokens, batch.labels, 512, kv)


def check_samples(tokens: np.ndarray, labels: np.ndarray, length: int, kv: int, fill: str = "random") -> None:
    """By Zoology's rules: keys in [1, V/2), values in [V/2, V), all distinct; each key asked once, at even places."""
    assert tokens.shape == labels.shape == (len(tokens), length)
    assert tokens.min() >= 0 and tokens.max() < 8192
    for row, asked in zip(tokens, labels, strict=True):
        keys, values = row[0 : 2 * kv : 2], row[1 : 2 * kv : 2]
        assert len(set(keys)) == len(set(values)) == kv
        assert keys.min() >= 1 and keys.max() < 4096 <= values.min()
        places = np.flatnonzero(asked != IGNORED)
        assert len(places) == kv and (places % 2 == 0).all() and places.min() >= 2 * kv
        assert dict(zip(keys, values, strict=True)) == dict(zip(row[places], asked[places], strict=True))
        rest = np.delete(row, [*range(2 * kv), *places])
        assert (rest == 0).all() if fill == "zero" else len(rest) == 0 or len(set(rest)) > 1


@pytest.mark.parametrize("length", [64, 128, 256, 512])
def test_zoology_iclr24_data(length: int) -> None:
    kv = {64: 4, 128: 8, 256: 16, 512: 64}[length]
    config = run_of(f"zoology-iclr24-{length}")
    task = make_task(config.task)
    (stage,) = task.stages()
    assert stage.examples == 100_000
    batch = task.batch(stage.shape, "train", 0, np.arange(8))
    check_samples(batch.tokens, batch.labels, length, kv, "zero")
    test = task.batch(stage.shape, "test", 0, np.arange(8))
    assert not (test.tokens[:, : 2 * kv] == batch.tokens[:, : 2 * kv]).all(axis=1).any(), (
        "other samples than training's"
    )


def test_zoology_based_batches_are_of_one_set_and_mixed() -> None:
    config = run_of("zoology-based")
    task = make_task(config.task)
    plan = make_plan(task.stages(), config.training, 0)
    sizes = {0: (64, 4, 100_000), 1: (128, 8, 20_000), 2: (256, 16, 20_000), 3: (256, 32, 20_000), 4: (256, 64, 20_000)}
    counted: dict[int, list[int]] = {stage: [] for stage in sizes}
    order = []
    for step in range(391 + 4 * 79):
        stage, indices = plan.next(step)
        assert len(indices) <= 256
        counted[stage] += indices.tolist()
        order.append(stage)
    for stage, (length, kv, examples) in sizes.items():
        assert sorted(counted[stage]) == list(range(examples))
        batch = task.batch(task.stages()[stage].shape, "train", 0, np.arange(4))
        check_samples(batch.tokens, batch.labels, length, kv)
    assert order != sorted(order) and order != [plan.next(707 + step)[0] for step in range(707)], "anew in each epoch"


DECAYED = {
    "mamba2": ["in_proj.weight", "conv.weight", "out_proj.weight"],
    "gated_deltanet": ["in_proj.weight", "conv.weight", "out_proj.weight"],
    "gla": ["in_proj.weight", "conv.weight", "out_proj.weight", "gate.down.weight", "gate.up.weight"],
    "retnet": ["in_proj.weight", "conv.weight", "out_proj.weight"],
    "rwkv7": [
        *(f"{name}_proj.weight" for name in ("r", "k", "v", "out")),
        *(f"{name}.{part}" for name in ("decay", "rate", "gate", "mix_value") for part in ("down", "up")),
    ],
}
WITH_POST = {"gla": [*DECAYED["retnet"], "gate.a_proj.weight"], "retnet": [*DECAYED["retnet"], "gate.a_proj.weight"]}


def groups_of(config: RunConfig) -> dict[str, tuple[float, float]]:
    """Weight decay and multiple of the learning rate of each trainable parameter, as AdamW gets them."""
    model = build_model(config.model, device="meta")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, config.training.weight_decay, config.training.decayed)
    found = {names[id(p)]: (group["weight_decay"], group["factor"]) for group in groups for p in group["params"]}
    assert found.keys() == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return found


@pytest.mark.parametrize("post", [False, True], ids=["base", "post"])
@pytest.mark.parametrize("model", DECAYED)
@pytest.mark.parametrize("name", ["post-16k", "post-64k"])
def test_post_groups_by_name(name: str, model: str, post: bool) -> None:
    found = groups_of(run_of(name, model, {"post": {}} if post else {}))
    own = WITH_POST.get(model, DECAYED[model]) if post else DECAYED[model]
    decayed = {"embedding.weight", *(f"blocks.{layer}.mixer.{part}" for layer in (0, 1) for part in own)}
    decayed -= {f"blocks.0.mixer.mix_value.{part}" for part in ("down", "up")}  # the first layer mixes no values
    assert {parameter for parameter, (decay, _) in found.items() if decay} == decayed
    assert {decay for decay, _ in found.values()} == {0.0, 0.1}
    faster = {parameter for parameter, (_, factor) in found.items() if factor != 1}
    assert {found[parameter][1] for parameter in faster} == ({2.0} if model == "rwkv7" else set())
    assert all(".mixer.spectrum." in parameter for parameter in faster)
    if model == "mamba2":
        assert ("blocks.0.mixer.dt_bias" in found) != post, "frozen with PoST"


def test_zoology_decays_every_parameter() -> None:
    for name in ("zoology-based", "zoology-iclr24-64"):
        for model in ("mamba2", "attention"):
            assert set(groups_of(run_of(name, model)).values()) == {(0.1, 1.0)}


def test_optimisers_are_torchs_with_its_betas() -> None:
    for name in [name for name, protocol in PROTOCOLS.items() if protocol.task == "mqar"]:
        training = run_of(name).training
        assert (training.betas, training.eps, training.weight_decay, training.warmup) == ((0.9, 0.999), 1e-8, 0.1, 0)
        assert (training.clip, training.dtype) == ((1.0, "bfloat16") if "post" in name else (None, "float32"))


BLOCKS = {
    "mamba2": ("rmsnorm", "layernorm", None, None),
    "rwkv7": ("layernorm", None, None, None),
    **dict.fromkeys(("gated_deltanet", "gla", "retnet"), ("layernorm", None, 0.1, True)),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("model", BLOCKS)
def test_post_blocks_and_sizes(name: str, model: str) -> None:
    found, (d, heads) = run_of(name, model).model, STATES[name]
    assert (found.d_model, found.n_layers, found.ffn, found.tie_embeddings, found.norm_eps) == (d, 2, None, True, 1e-5)
    assert (found.norm, found.final_norm, found.embedding_dropout, found.norm_branch) == BLOCKS[model]
    mixer = found.mixer.plain()
    expected = {
        "mamba2": {"d_state": d // (2 * heads), "headdim": 2 * d // heads, "expand": 2, "conv_width": 4, "n_groups": 1},
        "rwkv7": {"head_dim": d // heads},
        "gated_deltanet": {
            **{"n_heads": heads, "head_dim": d // heads, "expand_v": 1, "output_gate": False, "conv_width": 4},
        },
        "gla": {
            "n_heads": heads,
            "expand_k": 1,
            "expand_v": 1,
            "conv_width": 4,
            "gate_rank": 16,
            "gate_normalizer": 16,
        },
        "retnet": {"n_heads": heads, "expand_k": 1, "expand_v": 1, "conv_width": 4},
    }[model]
    assert {key: mixer[key] for key in expected} == expected
    if model == "rwkv7":
        rank = {key: getattr(build_model(found, device="meta").blocks[1].mixer, key).down.shape[0] for key in RANKS}
        factor = d // heads / 64
        assert rank == {
            key: max(32, round(f * math.sqrt(d) * (factor if key != "gate" else 1) / 32) * 32)
            for key, f in RANKS.items()
        }


RANKS = {"decay": 2.5, "rate": 2.5, "mix_value": 1.7, "gate": 5.0}


def test_zoology_blocks_and_sizes() -> None:
    for length in (64, 128, 256, 512):
        mamba, attention = (run_of(f"zoology-iclr24-{length}", model).model for model in ("mamba2", "attention"))
        assert (mamba.n_layers, attention.n_layers) == (4, 2), "of all but attention the figure has four mixers"
        assert (mamba.norm, mamba.final_norm, mamba.norm_branch) == ("rmsnorm", "layernorm", None)
        assert (attention.norm, attention.embedding_dropout, attention.norm_branch) == ("layernorm", 0.1, True)
    based = run_of("zoology-based").model
    mixer = based.mixer.plain()
    assert (based.d_model, based.n_layers, mixer["d_state"], mixer["headdim"], mixer["expand"]) == (64, 2, 16, 64, 2)


# --- end to end, with a protocol as small as can be


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, here: Path) -> str:
    stages = [{"shape": {"length": 16, "kv": kv}, "examples": 16} for kv in (2, 4)]
    preset = Preset(
        "as small as can be",
        {"mamba2": {"d_model": 16, "n_layers": 1, "mixer": {"d_state": 8, "headdim": 8}}},
        {
            "task": {"train_length": 16, "vocab_size": 32, "stages": stages},
            "training": {**presets._ZOOLOGY_TRAINING, "epochs": 2, "batch_samples": 8},
            "evaluation": {"lengths": ["16", "32"], "samples": 6, "capacity_ratio": 4},
        },
        {"*": (1e-3, 1e-2)},
    )
    monkeypatch.setitem(PRESETS["mqar"], "tiny", preset)
    protocol = Protocol("tiny", "mqar", "nowhere", ("mamba2",), groups=protocols._all_decay)
    monkeypatch.setitem(PROTOCOLS, "tiny", protocol)
    yield "tiny"
    protocols._wanted.cache_clear()


def record_path(folder: Path) -> Path:
    (path,) = folder.glob("runs/*/evaluations/*/record.json")
    return path


def test_a_selected_run_says_that_it_is_comparable_and_is_believed(tiny: str, here: Path) -> None:
    done = bench("mqar", "--preset", tiny, "--select")
    assert done.code == 0, done.err
    assert "comparable to tiny: every item of the protocol holds" in done.out
    path = record_path(here)
    record = read_record(path)
    assert record.comparable_to == "tiny" and record.model.parameters.not_decayed == 0
    assert [new for _, new in add_to_leaderboard(Path("board.json"), [path])] == [True]
    assert bench("leaderboard", "validate", "board.json").code == 0
    # It may claim less, and nothing that isn't so.
    verify(edited(record.plain(), lambda c: c.update(comparable_to=None)))
    with pytest.raises(UserError, match=r"comparable_to is 'post-16k', but task.train_length=16; post-16k has 512"):
        verify(edited(record.plain(), lambda c: c.update(comparable_to="post-16k")))
    with pytest.raises(UserError, match=r"comparable_to is 'mine', and there is no such protocol: zoology-iclr24-64"):
        verify(edited(record.plain(), lambda c: c.update(comparable_to="mine")))


def test_a_run_that_was_not_selected_says_why_it_is_not_comparable(tiny: str, here: Path) -> None:
    done = bench("mqar", "--preset", tiny, "--set", "training.steps=3", "--post")
    assert done.code == 0, done.err
    assert (
        "not comparable to tiny: training.steps=3; tiny has 8, 2 epochs; its learning rate and epoch weren't"
        in done.out
    )
    path = record_path(here)
    record = read_record(path)
    assert record.comparable_to is None
    forged = edited(record.plain(), lambda c: c.update(comparable_to="tiny"))
    path.write_text(forged.to_json())
    refused = bench("leaderboard", "add", str(path), "--file", "board.json")
    assert refused.code == 2 and "comparable_to is 'tiny', but training.steps=3; tiny has 8" in refused.err
    assert refused.err.count("\n") == 1 and not Path("board.json").exists()
    path.write_text(record.to_json())
    told = bench("protocol", tiny, str(here / "runs" / path.parents[2].name))
    assert told.code == 0 and "departs from tiny in" in told.out and "  training.steps=3; tiny has 8" in told.out
    (reasons,) = json.loads(bench("protocol", tiny, str(path), "--json").out).values()
    assert reasons == departures(record, "tiny")


def test_what_protocols_demand_is_listed() -> None:
    listed = bench("protocol").out
    assert all(name in listed for name in PROTOCOLS)
    told = bench("protocol", "post-16k", "--model", "gated_deltanet").out
    for word in (
        "linear-by-epoch",
        "one of 0.000316, 0.001, 0.00316",
        "kv 128",
        "bfloat16",
        "3,000 samples",
        "matrices",
    ):
        assert word in " ".join(told.split()), word
    wrong = bench("protocol", "post-16")
    assert (wrong.code, wrong.out) == (2, "") and "did you mean 'post-16k'?" in wrong.err


# --- RULER's NIAH


def asked(**settings: Any) -> Record:
    content = example.content()
    _checkpoint(content)
    variants = settings.get("variants", ("single_1", "multikey_2", "multikey_3"))
    content["task"].update(name="niah-text", config={"fit": settings.get("fit", "ruler")})
    content["cells"] = [
        {**cell(f"{v}-length{T}", v, T, settings.get("samples", 500)), "coordinates": settings.get("coordinates", {})}
        for v in variants
        for T in (1024, 4096)
    ]
    return seal(content)


def test_ruler_niah() -> None:
    assert comparable_to(asked()) == "ruler-niah" == comparable_to(asked(variants=("multikey_3",)))
    for settings, reason in (
        ({"fit": "exact"}, "task.fit=exact; ruler-niah has ruler"),
        ({"samples": 100}, "evaluation.samples=100; ruler-niah has 500"),
        ({"coordinates": {"depth": 0.5}}, "evaluation.depths is a grid; ruler-niah has RULER's own draw"),
        ({"variants": ("single_1", "single_2")}, "single_2: hidden in an essay, and RULER's is what its script finds"),
    ):
        (found,) = departures(asked(**settings), "ruler-niah")
        assert found.startswith(reason) and comparable_to(asked(**settings)) is None


def test_the_preset_asks_a_checkpoint_as_ruler_does(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(vocab_size=257, d_model=16, n_layers=1, mixer={"d_state": 8, "headdim": 8})
    write_checkpoint(here / "mine" / "step-1", build_model(config), 0, {}, {})
    flags = {"checkpoint": str(here / "mine" / "step-1"), "evaluation.lengths": ["700"]}
    (found,) = configure("niah-text", preset="ruler-niah", flags=flags)
    evaluation = found.evaluation.plain()
    assert (found.task.plain()["fit"], evaluation["samples"], evaluation["depths"]) == ("ruler", 500, None)
    assert evaluation["variants"] == ["single_1", "multikey_2", "multikey_3"]
    (other,) = configure("niah-text", preset="ruler-niah", flags={**flags, "evaluation.variants": ["all"]})
    assert len(other.evaluation.plain()["variants"]) == 8
    monkeypatch.setattr(protocols, "_RULER_SAMPLES", 2)
    words = ("niah", "--text", "--checkpoint", "mine/step-1", "--preset", "ruler-niah", "--samples", "2")
    done = bench(*words, "--eval-lengths", "960", "--variants", "single_1,multikey_2")
    assert done.code == 0, done.err
    assert "comparable to ruler-niah" in done.out and read_record(record_path(here)).comparable_to == "ruler-niah"
    assert [new for _, new in add_to_leaderboard(Path("board.json"), [record_path(here)])] == [True]
    monkeypatch.setattr(protocols, "_RULER_SAMPLES", 500)
    with pytest.raises(UserError, match=r"comparable_to is 'ruler-niah', but evaluation.samples=2"):
        verify(read_record(record_path(here)))
    refused = bench("niah", "--text", "--checkpoint", "mine/step-1", "--preset", "ruler")
    assert refused.code == 2 and "did you mean 'ruler-niah'?" in refused.err
    refused = bench("niah", "--text", "--preset", "ruler-niah")
    assert refused.code == 2 and "name a model by --checkpoint" in refused.err


def test_best_is_what_these_tests_pretend() -> None:
    """The selection that the records here are given is one that `results.selection` would make."""
    record = seal(finished("post-16k"))
    assert record.selection is not None and best_on_test(record.selection.runs)
    chosen = best(record.selection.runs, lambda point: point.validation_mean)
    assert (chosen.learning_rate, chosen.step) == (record.selection.chosen.learning_rate, record.selection.chosen.step)
