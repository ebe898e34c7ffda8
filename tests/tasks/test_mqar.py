"""MQAR: Zoology's rules on our samples and on Zoology's own, the same law of gaps, and samples that never change."""

from __future__ import annotations

import hashlib
import re
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.tasks.base import IGNORED, Cell
from decaybench.tasks.mqar import Mqar, MqarConfig, MqarEvaluation, MqarShape, expected_key_repeats
from decaybench.tasks.registry import TASKS, get_task, make_task
from tests.statistics import fits

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "data" / "reference" / "mqar"
FILLS = ("random", "zero", "random-safe")


def task(**settings) -> Mqar:
    return Mqar(MqarConfig(**settings))


def sample(shape: MqarShape, n: int = 50, seed: int = 0, **settings):
    return task(**settings).batch(shape, "train", seed, np.arange(n))


def reference(length: int, fill: str) -> tuple[np.ndarray, np.ndarray]:
    names = sorted(REFERENCE.glob(f"mqar_L{length}_*_rnq{int(fill == 'random')}.npz"))
    if not names:
        pytest.skip(f"no Zoology samples of length {length} at shared/data/reference/mqar")
    with np.load(names[0]) as data:
        return data["inputs"].astype(np.int64), data["labels"].astype(np.int64)


def assert_mqar_rules(tokens, labels, kv, vocab, fill):
    """Every rule of an MQAR sample, checked one sample at a time."""
    length, half = tokens.shape[1], vocab // 2
    assert labels.shape == tokens.shape
    for row, wanted in zip(tokens.tolist(), labels.tolist(), strict=True):
        keys, values = row[0 : 2 * kv : 2], row[1 : 2 * kv : 2]
        assert len(set(keys)) == kv
        assert all(1 <= key < half for key in keys)
        assert len(set(values)) == kv
        assert all(half <= value < vocab for value in values)
        asked = [place for place in range(length) if wanted[place] != IGNORED]
        assert all(place >= 2 * kv and place % 2 == 0 for place in asked)
        assert sorted(row[place] for place in asked) == sorted(keys)
        pairs = dict(zip(keys, values, strict=True))
        assert all(wanted[place] == pairs[row[place]] for place in asked)
        others = [row[place] for place in range(2 * kv, length) if wanted[place] == IGNORED]
        assert len(others) == length - 3 * kv
        assert all(0 <= token < vocab for token in others)
        if fill == "zero":
            assert not any(others)
        if fill == "random-safe":
            assert not set(others) & set(keys)


def slots_of(tokens, labels, kv) -> np.ndarray:
    """The query slot of each key in the order of the context, [B, kv]."""
    asked = labels[:, 2 * kv :: 2] != IGNORED
    queries = np.where(asked, tokens[:, 2 * kv :: 2], -1)
    return (queries[:, None, :] == tokens[:, 0 : 2 * kv : 2, None]).argmax(axis=2)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(
    ("length", "kv", "vocab"), [(64, 4, 8192), (256, 16, 8192), (16, 4, 10), (4, 1, 5), (50, 3, 21)]
)
def test_our_samples_follow_the_rules(length, kv, vocab, fill):
    batch = sample(MqarShape(length=length, kv=kv), vocab_size=vocab, fill=fill)
    assert batch.tokens.dtype == batch.labels.dtype == batch.distance.dtype == np.int64
    assert_mqar_rules(batch.tokens, batch.labels, kv, vocab, fill)


@pytest.mark.parametrize("fill", ["zero", "random"])
@pytest.mark.parametrize(("length", "kv"), [(64, 4), (256, 16)])
def test_zoologys_samples_follow_the_same_rules(length, kv, fill):
    tokens, labels = reference(length, fill)
    assert_mqar_rules(tokens, labels, kv, 8192, fill)


@pytest.mark.parametrize(("length", "kv"), [(64, 4), (256, 16)])
@pytest.mark.parametrize("fill", ["zero", "random"])
def test_query_slots_have_zoologys_law(length, kv, fill):
    theirs = slots_of(*reference(length, fill), kv)
    batch = sample(MqarShape(length=length, kv=kv), n=10_000, vocab_size=8192)
    ours = slots_of(batch.tokens, batch.labels, kv)
    # The first key has the first choice of slots and the last key what is left: their laws differ.
    for keys, groups in ((slice(0, 1), 4), (slice(kv - 1, kv), 4), (slice(None), 12)):
        share = np.bincount(ours[:, keys].ravel(), minlength=(length - 2 * kv) // 2) / ours[:, keys].size
        group_of_slot = np.unique(((share.cumsum() - share / 2) * groups).astype(int), return_inverse=True)[1]
        expected = np.bincount(group_of_slot, share)
        assert len(expected) >= 3
        assert fits(np.bincount(group_of_slot[theirs[:, keys]].ravel(), minlength=len(expected)), expected, z=3)


def test_the_first_keys_slot_has_the_exact_power_law():
    batch = sample(MqarShape(length=32, kv=4), n=20_000, power=0.3)
    weights = np.arange(1, 13) ** (0.3 - 1)
    first = slots_of(batch.tokens, batch.labels, 4)[:, 0]
    assert fits(np.bincount(first, minlength=12), weights / weights.sum())


def test_distance_is_counted_from_the_value_to_its_question():
    batch = sample(MqarShape(length=40, kv=5), fill="zero")
    for row, wanted, distance in zip(batch.tokens, batch.labels, batch.distance, strict=True):
        for place in range(40):
            if wanted[place] == IGNORED:
                assert distance[place] == 0
            else:
                written = [at for at in range(10) if row[at] == wanted[place]]
                assert [place - distance[place]] == written


def test_random_safe_fill_is_uniform_over_the_tokens_that_are_no_key():
    batch = sample(MqarShape(length=16, kv=2), n=8_000, vocab_size=12)
    fillers = np.where(batch.asked, -1, batch.tokens)[:, 4:]
    keys = batch.tokens[:, 0:4:2]
    ranks = fillers - (fillers[:, :, None] > keys[:, None, :]).sum(axis=2)
    assert fits(np.bincount(ranks[fillers >= 0], minlength=10))


def test_random_fill_is_uniform_and_repeats_keys_at_the_expected_rate():
    shape, vocab, n = MqarShape(length=32, kv=4), 40, 10_000
    batch = sample(shape, n=n, vocab_size=vocab, fill="random")
    fillers = np.where(batch.asked, -1, batch.tokens)[:, 8:]
    assert fits(np.bincount(fillers[fillers >= 0], minlength=vocab))
    repeats = (fillers[:, :, None] == batch.tokens[:, None, 0:8:2]).sum() / n
    expected = expected_key_repeats(shape, vocab)
    assert expected == 20 * 4 / 40
    assert abs(repeats - expected) < 5 * np.sqrt(expected / n)


@given(
    pairs=st.integers(1, 12),
    spare=st.integers(0, 20),
    fill=st.sampled_from(FILLS),
    indices=st.lists(st.integers(0, 2**40), min_size=1, max_size=6),
)
@settings(max_examples=40, deadline=None)
def test_a_sample_is_the_same_in_every_batch(pairs, spare, fill, indices):
    shape = MqarShape(length=4 * pairs + 2 * spare, kv=pairs)
    mqar = task(vocab_size=2 * pairs + 2, fill=fill)
    together = mqar.batch(shape, "test", 3, np.array(indices))
    assert_mqar_rules(together.tokens, together.labels, pairs, mqar.vocab_size, fill)
    for row, index in enumerate(indices):
        alone = mqar.batch(shape, "test", 3, np.array([index]))
        for part in ("tokens", "labels", "distance"):
            assert np.array_equal(getattr(together, part)[row], getattr(alone, part)[0])


@pytest.mark.parametrize(
    ("fill", "expected"),
    [("random", "35c2c75e3284d14f"), ("zero", "5888812ab6c3dc38"), ("random-safe", "662429e6d54bdd95")],
)
def test_samples_never_change(fill, expected):
    batch = sample(MqarShape(length=64, kv=8), n=64, fill=fill)
    content = batch.tokens.astype("<i8").tobytes() + batch.labels.astype("<i8").tobytes()
    assert hashlib.sha256(content).hexdigest()[:16] == expected


def test_ids_are_unique_over_seeds_splits_shapes_rules_and_indices():
    indices = np.arange(20)
    ids = [
        name
        for mqar in (task(), task(fill="zero"), task(vocab_size=300), task(power=0.1))
        for shape in (MqarShape(length=64, kv=4), MqarShape(length=64, kv=5), MqarShape(length=66, kv=4))
        for split in ("train", "validation", "test")
        for seed in (0, 1)
        for name in mqar.sample_ids(shape, split, seed, indices)
    ]
    assert len(set(ids)) == len(ids) == 4 * 3 * 3 * 2 * 20
    assert all(re.fullmatch("[0-9a-f]{16}", name) for name in ids)


def test_ids_and_samples_do_not_depend_on_the_training_plan():
    plan = task(train_length=256)
    shape, indices = MqarShape(length=64, kv=4), np.arange(5)
    assert plan.sample_ids(shape, "test", 0, indices) == task().sample_ids(shape, "test", 0, indices)


def test_splits_seeds_and_indices_give_disjoint_samples():
    shape = MqarShape(length=32, kv=4)
    blocks = [
        task().batch(shape, split, seed, np.arange(300)).tokens
        for split in ("train", "validation", "test")
        for seed in (0, 1)
    ]
    rows = np.concatenate(blocks)
    assert len(np.unique(rows, axis=0)) == len(rows)


@pytest.mark.parametrize(
    ("length", "kv", "vocab", "message"),
    [
        (15, 4, 272, "length=15 .* kv=4.* smallest length is 16"),
        (63, 4, 272, "length=63 is odd.* is 64"),
        (64, 16, 33, r"vocab_size=33 .* kv=16 .* smallest is 34"),
    ],
)
def test_impossible_shapes_name_the_smallest_size_that_works(length, kv, vocab, message):
    with pytest.raises(UserError, match=message) as error:
        sample(MqarShape(length=length, kv=kv), vocab_size=vocab)
    assert "\n" not in str(error.value)
    smallest = int(re.findall(r"\d+", str(error.value))[-1])
    if "vocab" in str(error.value):
        task(vocab_size=smallest).check(MqarShape(length=length, kv=kv))
    else:
        task(vocab_size=vocab).check(MqarShape(length=smallest, kv=kv))


def plan(**settings) -> list[tuple[int, int]]:
    return [(stage.shape.length, stage.shape.kv) for stage in task(**settings).stages()]


def test_the_curriculum_is_the_smoke_preset_at_128_and_sensible_elsewhere():
    assert plan() == [(32, 2), (32, 4), (32, 8), (64, 8), (64, 16), (128, 16), (128, 32)]
    assert plan(train_length=32) == [(32, 2), (32, 4), (32, 8)]
    assert plan(train_length=48) == [(32, 2), (32, 4), (32, 8), (48, 6), (48, 12)]
    assert plan(train_length=4) == [(4, 1)]
    assert plan(train_length=22) == [(22, 1), (22, 2), (22, 5)]
    with pytest.raises(UserError, match="odd"):
        plan(train_length=65)
    with pytest.raises(UserError, match=r"vocab_size=272 .* smallest is 514"):
        plan(train_length=1024)


def test_configured_stages_are_kept_and_checked():
    stages = [{"shape": {"length": 16, "kv": 4}, "examples": 10}]
    config = parse(MqarConfig, {"train_length": 16, "stages": stages})
    assert Mqar(config).stages() == config.stages
    with pytest.raises(UserError, match=r"train_length=8 .* smallest is 16"):
        Mqar(parse(MqarConfig, {"train_length": 8, "stages": stages})).stages()
    with pytest.raises(UserError, match=r"stages\.0\.shape\.kvs.* 'kv'"):
        parse(MqarConfig, {"stages": [{"shape": {"length": 16, "kvs": 4}}]}, "task")


def test_cells_cover_variants_and_lengths():
    cells = task().cells(MqarEvaluation(), [64, 128, 256])
    assert [(cell.variant, cell.shape.length, cell.coordinates) for cell in cells] == [
        ("capacity", 64, {"kv": 8}),
        ("capacity", 128, {"kv": 16}),
        ("capacity", 256, {"kv": 32}),
        ("persist", 64, {"kv": 16}),
        ("persist", 128, {"kv": 16}),
        ("persist", 256, {"kv": 16}),
    ]
    assert len({cell.name for cell in cells}) == 6
    few = task().cells(MqarEvaluation(variants=("persist",), persist_kv=5), [64])
    assert few[0].shape == MqarShape(length=64, kv=5)


def test_a_cell_that_cannot_exist_is_an_error():
    with pytest.raises(UserError, match=r"length=32 .* kv=16.* smallest length is 64"):
        task().cells(MqarEvaluation(), [32])
    with pytest.raises(UserError, match=r"vocab_size=272 .* smallest is 514"):
        task().cells(MqarEvaluation(), [128, 2048])
    with pytest.raises(UserError, match=r"variants.*repeat"):
        parse(MqarEvaluation, {"variants": ["persist", "persist"]}, "evaluation")


def test_registry_makes_each_task_and_hints_at_names():
    for name, entry in TASKS.items():
        made = make_task(parse(entry.config, {"name": name}))
        assert type(made) is entry.task
        assert made.name == name
        assert made.cells(entry.evaluation(), [128])
    with pytest.raises(UserError, match="unknown task 'mqr'; did you mean 'mqar'"):
        get_task("mqr")


def test_a_hundred_thousand_samples_take_seconds_not_minutes():
    start = time.process_time()
    sample(MqarShape(length=64, kv=4), n=100_000, vocab_size=8192)
    # Measured 0.75 s of CPU time beside other programs; a loop over samples takes more than 6.
    assert time.process_time() - start < 3


def test_a_random_fill_is_remarked_upon():
    (remark,) = Mqar(MqarConfig(fill="random", vocab_size=8192)).remarks(
        [Cell(MqarShape(length=length, kv=kv), "listed", {"kv": kv}) for length, kv in ((128, 16), (64, 4))]
    )
    assert "0.16 times a sample" in remark and "listed-length128-kv16" in remark  # 80 fillers, 16 of 8192 tokens
    assert Mqar(MqarConfig()).remarks([]) == []
