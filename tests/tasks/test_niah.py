"""NIAH, token level: each sample is read by a plain parser, and what it finds must be what the rules say."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.tasks.base import IGNORED
from decaybench.tasks.niah import NEEDLE, QUERY, SPECIALS, Niah, NiahConfig, NiahEvaluation, NiahShape
from tests.statistics import fits

DEPTHS = tuple(tenth / 10 for tenth in range(11))
VARIANTS = ("single", "multikey", "multivalue", "multiquery")


def task(**settings) -> Niah:
    return Niah(NiahConfig(**settings))


def sample(shape: NiahShape, n: int = 50, seed: int = 0, **settings):
    return task(**settings).batch(shape, "train", seed, np.arange(n))


@dataclass
class Read:
    """What the parser found: each needle's start by its key, the hay, and the keys asked in order."""

    starts: dict[int, int]
    values: dict[int, list[int]]
    hay: list[int]
    asked: list[int]


def read(config: NiahConfig, shape: NiahShape, tokens, labels, distance) -> Read:
    """Read one sample token by token, asserting every rule on the way."""
    first_value = SPECIALS + config.key_tokens
    first_hay = first_value + config.value_tokens
    m = shape.values
    assert len(tokens) == len(labels) == len(distance) == shape.length
    found = Read({}, {}, [], [])
    place = 0
    while tokens[place] != QUERY:
        assert labels[place] == IGNORED
        if tokens[place] != NEEDLE:
            assert first_hay <= tokens[place] < first_hay + config.hay_tokens
            found.hay.append(place)
            place += 1
            continue
        key, values = tokens[place + 1], tokens[place + 2 : place + 2 + m]
        assert SPECIALS <= key < first_value
        assert all(first_value <= value < first_hay for value in values)
        assert key not in found.starts
        found.starts[key], found.values[key] = place, values
        place += 2 + m
    while place < shape.length:
        key = tokens[place + 1]
        assert tokens[place] == QUERY
        assert labels[place] == IGNORED
        assert key not in found.asked
        found.asked.append(key)
        for j, value in enumerate(found.values[key]):
            at = place + 1 + j
            assert labels[at] == value
            assert at - distance[at] == found.starts[key] + 2 + j
            if at + 1 < shape.length:
                assert tokens[at + 1] == value
        if at + 1 < shape.length:
            assert labels[at + 1] == IGNORED
        place += 2 + m
    assert labels[-1] == found.values[found.asked[-1]][-1]
    assert len(found.asked) == shape.queries
    assert sum(label != IGNORED for label in labels) == shape.queries * m
    assert all(distance[at] == 0 for at in range(shape.length) if labels[at] == IGNORED)
    return found


def read_all(niah: Niah, shape: NiahShape, batch) -> list[Read]:
    found = [
        read(niah.config, shape, *row)
        for row in zip(batch.tokens.tolist(), batch.labels.tolist(), batch.distance.tolist(), strict=True)
    ]
    for row, sample_read in enumerate(found):
        units = len(sample_read.starts) + len(sample_read.hay)
        if shape.haystack == "noise":
            assert len(sample_read.starts) == shape.needles
        else:
            full = len(sample_read.starts) == niah.config.key_tokens
            assert full or len(sample_read.hay) < shape.width
        if shape.depth is None:
            assert "depth" not in batch.details
            continue
        start = sample_read.starts[sample_read.asked[0]]
        others = [other for other in sample_read.starts.values() if other < start]
        before = start - len(others) * (shape.width - 1)
        assert before == round(shape.depth * (units - 1))
        room = shape.body - shape.width
        assert batch.details["depth"][row] == (start / room if room else 0.0)
    return found


@pytest.mark.parametrize("haystack", ["noise", "needles"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", [40, 127])
def test_every_cell_of_every_variant_follows_the_rules(variant, haystack, length):
    niah = task(values=3, haystack=haystack, key_tokens=16)
    cells = niah.cells(NiahEvaluation(variants=(variant,)), [length])
    assert [cell.coordinates for cell in cells] == [{"depth": depth} for depth in DEPTHS]
    for cell in cells:
        assert cell.shape.queries == (4 if variant == "multiquery" else 1)
        assert cell.shape.needles == (4 if variant in ("multikey", "multiquery") else 1)
        assert cell.shape.values == (3 if variant == "multivalue" else 1)
        read_all(niah, cell.shape, niah.batch(cell.shape, "test", 0, np.arange(8)))


@pytest.mark.parametrize(("needles", "queries", "values"), [(1, 1, 1), (1, 1, 3), (4, 1, 1), (4, 4, 1), (3, 2, 2)])
@pytest.mark.parametrize("depth", [None, 0.5])
def test_samples_are_exact_at_every_length_from_the_smallest_up(needles, queries, values, depth):
    smallest = (needles + queries) * (2 + values) - 1
    for length in range(smallest, smallest + 12):
        shape = NiahShape(length=length, needles=needles, queries=queries, values=values, depth=depth)
        read_all(task(), shape, sample(shape, n=5))


@given(
    needles=st.integers(1, 8),
    asked=st.floats(0, 1),
    values=st.integers(1, 4),
    spare=st.integers(0, 40),
    depth=st.none() | st.floats(0, 1),
    haystack=st.sampled_from(["noise", "needles"]),
    indices=st.lists(st.integers(0, 2**40), min_size=1, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_any_shape_follows_the_rules_in_any_batch(needles, asked, values, spare, depth, haystack, indices):
    queries = 1 + round(asked * (needles - 1))
    length = (needles + queries) * (2 + values) - 1 + spare
    shape = NiahShape(length=length, needles=needles, queries=queries, values=values, depth=depth, haystack=haystack)
    niah = task(key_tokens=9, value_tokens=5, hay_tokens=2)
    batch = niah.batch(shape, "test", 1, np.array(indices))
    read_all(niah, shape, batch)
    for row, index in enumerate(indices):
        alone = niah.batch(shape, "test", 1, np.array([index]))
        for part in ("tokens", "labels", "distance"):
            assert np.array_equal(getattr(batch, part)[row], getattr(alone, part)[0])


def test_the_depth_grid_of_single_runs_from_0_to_1_within_one_token():
    niah = task()
    cells = niah.cells(NiahEvaluation(), [100])
    depths = []
    for cell in cells:
        realised = niah.batch(cell.shape, "test", 0, np.arange(5)).details["depth"]
        assert (realised == realised[0]).all()
        assert abs(realised[0] - cell.coordinates["depth"]) * (cell.shape.body - cell.shape.width) <= 0.5 + 1e-9
        depths.append(realised[0])
    assert depths[0] == 0.0
    assert depths[-1] == 1.0
    assert (np.diff(depths) > 0).all()


@pytest.mark.parametrize("haystack", ["noise", "needles"])
def test_the_ends_of_the_grid_are_the_ends_of_the_body_for_multikey_too(haystack):
    for depth in (0.0, 1.0):
        shape = NiahShape(length=60, needles=4, queries=1, depth=depth, haystack=haystack)
        assert (sample(shape).details["depth"] == depth).all()


def test_placements_and_the_choice_of_the_asked_are_uniform():
    niah = task(key_tokens=4)
    # A body of 2 needles of 3 tokens and 3 hay tokens: 10 placements.
    shape = NiahShape(length=14, needles=2, queries=2)
    found = read_all(niah, shape, niah.batch(shape, "train", 0, np.arange(3_000)))
    placements = [tuple(sorted(one.starts.values())) for one in found]
    expected = [(a, b + 2) for a, b in combinations(range(5), 2)]
    assert set(placements) == set(expected)
    assert fits(np.array([placements.count(place) for place in expected]))
    firsts = [one.starts[one.asked[0]] == min(one.starts.values()) for one in found]
    assert fits(np.array([sum(firsts), len(firsts) - sum(firsts)]))
    keys = np.array([one.asked for one in found]) - SPECIALS
    assert fits(np.bincount(keys[:, 0], minlength=4))
    assert fits(np.bincount(keys[:, 1], minlength=4))


def test_distractors_are_uniform_around_a_target_at_a_depth():
    niah = task()
    # 4 hay tokens, a distractor and the target in the middle: the distractor has 5 places.
    shape = NiahShape(length=12, needles=2, queries=1, depth=0.4)
    found = read_all(niah, shape, niah.batch(shape, "train", 0, np.arange(2_000)))
    others = [min(start for key, start in one.starts.items() if key != one.asked[0]) for one in found]
    places, counts = np.unique(others, return_counts=True)
    assert len(places) == 5
    assert fits(counts)


def test_values_are_independent_and_hay_is_uniform():
    niah = task(value_tokens=3, hay_tokens=5)
    shape = NiahShape(length=20, needles=2, queries=1, values=2)
    batch = niah.batch(shape, "train", 0, np.arange(2_000))
    found = read_all(niah, shape, batch)
    values = np.array([np.concatenate(list(one.values.values())) for one in found]) - SPECIALS - 64
    assert fits(np.bincount(values @ [27, 9, 3, 1], minlength=81))
    hay = np.concatenate([batch.tokens[row, one.hay] for row, one in enumerate(found)]) - SPECIALS - 64 - 3
    assert fits(np.bincount(hay, minlength=5))


def test_padding_is_never_drawn_and_the_vocabulary_is_as_large_as_said():
    niah = task(key_tokens=3, value_tokens=2, hay_tokens=1)
    tokens = niah.batch(NiahShape(length=30, needles=3, queries=2), "train", 0, np.arange(200)).tokens
    assert niah.vocab_size == 9
    assert np.unique(tokens).tolist() == list(range(1, 9))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (NiahShape(length=64, needles=4, queries=4), "ad450d337acd11cc"),
        (NiahShape(length=64, needles=4, queries=2, values=2, depth=0.3), "dc468acff846c92d"),
        (NiahShape(length=64, needles=1, queries=1, depth=0.5, haystack="needles"), "c0c331ee18958c93"),
    ],
)
def test_samples_never_change(shape, expected):
    batch = sample(shape, n=64)
    content = batch.tokens.astype("<i8").tobytes() + batch.labels.astype("<i8").tobytes()
    assert hashlib.sha256(content).hexdigest()[:16] == expected


def test_ids_and_samples_differ_by_split_seed_and_shape():
    shapes = [NiahShape(length=32, needles=2, queries=1, depth=depth) for depth in (None, 0.0, 0.1)]
    indices = np.arange(30)
    origins = [(shape, split, seed) for shape in shapes for split in ("train", "validation", "test") for seed in (0, 1)]
    ids = [name for origin in origins for name in task().sample_ids(*origin, indices)]
    assert len(set(ids)) == len(ids) == 18 * 30
    rows = np.concatenate([task().batch(*origin, indices).tokens for origin in origins])
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_a_cells_samples_do_not_depend_on_what_other_variants_need():
    shape = NiahShape(length=32, needles=1, queries=1, depth=0.5)
    assert np.array_equal(sample(shape, values=1).tokens, sample(shape, values=4).tokens)
    assert not np.array_equal(sample(shape).tokens, sample(shape, hay_tokens=65).tokens)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"length": 22, "needles": 4, "queries": 4}, "length=22 .* smallest length is 23"),
        ({"length": 30, "needles": 4, "queries": 1, "values": 5}, "length=30 .* smallest length is 34"),
        ({"length": 64, "needles": 2, "queries": 3}, "queries=3 .* needles=2"),
        ({"length": 999, "needles": 65, "queries": 1}, "key_tokens=64 .* needles=65 .* smallest is 65"),
    ],
)
def test_impossible_shapes_name_what_works(sizes, message):
    with pytest.raises(UserError, match=message) as error:
        task().check(NiahShape(**sizes))
    assert "\n" not in str(error.value)
    if "smallest length" in message:
        task().check(NiahShape(**{**sizes, "length": int(re.findall(r"\d+", str(error.value))[-1])}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"depths": [0.5, 1.5]}, r"depths\.1=1\.5"),
        ({"depths": []}, "depths"),
        ({"depths": [0.5, 0.5]}, "depths.*repeat"),
        ({"variants": ["single", "multkey"]}, "did you mean 'multikey'"),
        ({"distractors": 0}, "distractors=0"),
    ],
)
def test_wrong_evaluations_are_one_line(data, message):
    with pytest.raises(UserError, match=message):
        parse(NiahEvaluation, data, "evaluation")


def test_a_cell_that_cannot_exist_is_an_error():
    with pytest.raises(UserError, match=r"multivalue .*task\.values=4"):
        task().cells(NiahEvaluation(variants=("multivalue",)), [64])
    with pytest.raises(UserError, match=r"length=16 .* smallest length is 23"):
        task().cells(NiahEvaluation(variants=("multiquery",)), [64, 16])


def test_cell_names_are_unique():
    cells = task(values=2).cells(NiahEvaluation(variants=VARIANTS), [64, 128])
    assert len({cell.name for cell in cells}) == len(cells) == 4 * 2 * 11


def plan(**settings) -> list[tuple[int, int, int]]:
    stages = task(**settings).stages()
    assert all(stage.shape.queries == stage.shape.needles for stage in stages)
    assert all(stage.shape.depth is None for stage in stages)
    return [(stage.shape.length, stage.shape.needles, stage.shape.values) for stage in stages]


def test_the_curriculum_grows_to_the_training_length():
    assert plan() == [(32, 2, 1), (32, 4, 1), (64, 4, 1), (64, 8, 1), (128, 8, 1), (128, 16, 1)]
    assert plan(train_length=5) == [(5, 1, 1)]
    assert plan(train_length=48, values=4) == [
        *[(32, 2, 1), (32, 2, 4), (32, 4, 1)],
        *[(48, 3, 1), (48, 3, 4), (48, 6, 1), (48, 4, 4)],
    ]
    assert max(needles for _, needles, _ in plan(train_length=2048)) == 64
    with pytest.raises(UserError, match=r"length=4 .* smallest length is 5"):
        plan(train_length=4)
    with pytest.raises(UserError, match="values=20: the smallest length is 43"):
        plan(train_length=32, values=20)
