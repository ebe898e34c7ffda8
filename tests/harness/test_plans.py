"""The order of batches is a pure function of configuration, seed and accuracies; schedules are their formulas."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from decaybench.core.errors import UserError
from decaybench.harness.config import TrainingConfig
from decaybench.harness.plans import EpochPlan, MasteryPlan, Plan, make_plan, samples_a_batch
from decaybench.harness.training import learning_rate
from decaybench.tasks.base import Shape, Stage


def stages(*sizes: tuple[int, int | None]) -> list[Stage]:
    return [Stage(shape=Shape(length=length), examples=examples) for length, examples in sizes]


FOUR = stages((8, None), (8, None), (16, None), (32, None))


def mastery(seed: int = 0, of: list[Stage] = FOUR, **settings: Any) -> MasteryPlan:
    plan = make_plan(of, TrainingConfig(batch_tokens=64, **{"steps": 1000, **settings}), seed)
    assert isinstance(plan, MasteryPlan)
    return plan


def epochs(of: list[Stage], seed: int = 0, **settings: Any) -> EpochPlan:
    plan = make_plan(of, TrainingConfig(plan="epochs", **settings), seed)
    assert isinstance(plan, EpochPlan)
    return plan


def go(plan: Plan, first: int, last: int, accuracies: random.Random | None = None) -> list[tuple[int, list[int]]]:
    """The batches of some steps; without `accuracies` all answers are right."""
    seen = []
    for step in range(first, last):
        stage, indices = plan.next(step)
        seen.append((stage, indices.tolist()))
        plan.saw(step, stage, accuracies.random() if accuracies else 1.0)
    return seen


# --- mastery


def test_the_order_is_a_function_of_seed_and_accuracies() -> None:
    one = go(mastery(3, mastery=0.45), 0, 400, random.Random(1))
    assert go(mastery(3, mastery=0.45), 0, 400, random.Random(1)) == one
    assert go(mastery(4, mastery=0.45), 0, 400, random.Random(1)) != one
    assert go(mastery(3, mastery=0.45), 0, 400, random.Random(2)) != one
    assert {stage for stage, _ in one} == {0, 1, 2, 3}


def test_a_stage_is_left_when_its_running_accuracy_passes_the_threshold() -> None:
    """With all right the running accuracy after n batches is 1 - .9^n, which passes .8 at n = 16."""
    plan = mastery(review=0)
    for step in range(15):
        assert not plan.saw(step, plan.next(step)[0], 1.0)
    assert plan.stage == 0 and plan.mastered() == [None] * 4
    assert plan.saw(15, plan.next(15)[0], 1.0)
    assert plan.stage == 1 and plan.mastered() == [15, None, None, None]
    assert 1 - 0.9**15 < 0.8 <= 1 - 0.9**16


def test_the_last_stage_is_mastered_once_and_not_left() -> None:
    plan = mastery(review=0)
    moves = [step for step in range(100) if plan.saw(step, plan.next(step)[0], 1.0)]
    assert moves == [15, 31, 47]
    assert plan.stage == 3 and plan.mastered() == [15, 31, 47, 63]


def test_accuracies_of_review_batches_dont_count() -> None:
    plan = mastery()
    go(plan, 0, 16)
    assert plan.stage == 1
    for step in range(16, 200):
        plan.next(step)
        assert not plan.saw(step, 0, 1.0)
    assert plan.stage == 1


def test_the_share_of_review() -> None:
    plan = mastery(seed=1, steps=100_000)
    go(plan, 0, 200)
    assert plan.stage == 3
    n = 4000
    counts = Counter(plan.next(step)[0] for step in range(200, 200 + n))
    reviewed = n - counts[3]
    assert abs(reviewed - n / 4) < 4 * math.sqrt(n * 0.25 * 0.75)
    for stage in range(3):  # every earlier stage alike
        assert abs(counts[stage] - reviewed / 3) < 4 * math.sqrt(reviewed * 2 / 9)


def test_no_review_and_none_before_anything_is_mastered() -> None:
    plan = mastery(review=0)
    assert [stage for stage, _ in go(plan, 0, 40)] == [0] * 16 + [1] * 16 + [2] * 8
    plan = mastery(review=0.99)
    assert {plan.next(step)[0] for step in range(100)} == {0}


def test_samples_are_new_until_the_set_is_used_up() -> None:
    plan = mastery(review=0)
    first = go(plan, 0, 16)
    assert [index for _, indices in first for index in indices] == list(range(16 * 8))
    plan = mastery(of=stages((8, 20)))
    assert [indices for _, indices in go(plan, 0, 3)] == [
        list(range(8)),
        list(range(8, 16)),
        [16, 17, 18, 19, 0, 1, 2, 3],
    ]


def test_the_default_number_of_steps() -> None:
    assert mastery(steps=None).total_steps == 1500
    assert mastery(steps=7).total_steps == 7
    assert mastery().steps_by_epoch is None


# --- what a stage allows, and labels that are wrong


def steps_to_master(accuracy: float, ceilings: list[float | None] | None = None, **settings: Any) -> list[int | None]:
    """When each stage is mastered by one who always has this accuracy."""
    plan = make_plan(FOUR, TrainingConfig(batch_tokens=64, steps=1000, review=0, **settings), 0, ceilings)
    for step in range(100):
        plan.saw(step, plan.next(step)[0], accuracy)
    return plan.mastered()


def test_mastery_is_a_share_of_what_the_stage_allows() -> None:
    """At .6 the running accuracy .6 (1 - .9^n) passes .8 x .7 = .56 at n = 26, and never .8 x 1."""
    assert 0.6 * (1 - 0.9**25) < 0.56 <= 0.6 * (1 - 0.9**26)
    assert steps_to_master(0.6, [0.7, 0.7, 0.7, 0.7]) == [25, 51, 77, None]
    assert steps_to_master(0.6, [0.7, None, 0.7, 0.7]) == [25, None, None, None]
    assert steps_to_master(0.6) == [None] * 4
    assert steps_to_master(1.0) == steps_to_master(1.0, [None] * 4) == steps_to_master(1.0, [1.0] * 4)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.75])
def test_who_is_right_masters_noisy_labels_as_soon_as_clean_ones(share: float) -> None:
    """One who answers right agrees with 1 - p of the labels; judged by that alone no stage would ever end."""
    for right in (1.0, 0.9, 0.79):
        expected = steps_to_master(right)
        assert steps_to_master(right * (1 - share), label_noise=share) == expected
    assert steps_to_master(0.79 * (1 - share), label_noise=share) == [None] * 4
    assert steps_to_master(1 - share) == [None] * 4 if share > 0.2 else True


# --- epochs

SETS = stages((8, 20), (16, 7), (32, 5))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("settings", [{"batch_tokens": 64}, {"batch_samples": 3}, {"batch_samples": 100}])
def test_an_epoch_holds_each_example_once(shuffle: bool, settings: dict[str, int]) -> None:
    plan = epochs(SETS, shuffle=shuffle, epochs=3, **settings)
    size = plan.steps_by_epoch
    assert size is not None and plan.total_steps == 3 * size
    wanted = sorted((stage, index) for stage, found in enumerate(SETS) for index in range(found.examples or 0))
    for epoch in range(3):
        batches = go(plan, epoch * size, (epoch + 1) * size)
        assert sorted((stage, index) for stage, indices in batches for index in indices) == wanted
        if not shuffle:
            assert [stage for stage, _ in batches] == sorted(stage for stage, _ in batches)
        for stage, indices in batches:
            assert 0 < len(indices) <= samples_a_batch(SETS[stage], plan_config(**settings))


def plan_config(**settings: int) -> TrainingConfig:
    return TrainingConfig(plan="epochs", **settings)


def test_the_last_batch_of_a_stage_is_what_is_left() -> None:
    plan = epochs(SETS, batch_samples=6)
    assert [len(plan.next(step)[1]) for step in range(plan.total_steps)] == [6, 6, 6, 2, 6, 1, 5]


def test_shuffled_epochs_differ_and_are_a_function_of_the_seed() -> None:
    plan = epochs(SETS, shuffle=True, epochs=2, batch_samples=1)
    size = plan.steps_by_epoch
    assert size == 32
    one, two = go(plan, 0, size), go(plan, size, 2 * size)
    assert one != two
    assert go(epochs(SETS, shuffle=True, epochs=2, batch_samples=1), 0, 2 * size) == one + two
    assert go(epochs(SETS, 1, shuffle=True, epochs=2, batch_samples=1), 0, size) != one
    again = epochs(SETS, shuffle=True, epochs=2, batch_samples=1)
    assert go(again, size, 2 * size) == two, "an epoch doesn't depend on the one before"


def test_steps_cut_the_epochs_short() -> None:
    assert epochs(SETS, batch_samples=6, epochs=3).total_steps == 21
    assert epochs(SETS, batch_samples=6, epochs=3, steps=10).total_steps == 10
    assert epochs(SETS, batch_samples=6, epochs=3, steps=99).total_steps == 21


def test_an_epoch_needs_fixed_sets() -> None:
    with pytest.raises(UserError, match=r"training\.plan=epochs needs task\.stages\.1\.examples"):
        epochs(stages((8, 20), (16, None)))


# --- both


@pytest.mark.parametrize(
    "make",
    [
        lambda: mastery(5, mastery=0.45),
        lambda: mastery(5, mastery=0.45, of=stages((8, 20), (16, 9))),
        lambda: mastery(5, mastery=0.45, label_noise=0.3),
        lambda: make_plan(FOUR, TrainingConfig(batch_tokens=64, steps=1000), 5, [0.5] * 4),
        lambda: epochs(SETS, shuffle=True, epochs=40, batch_samples=3),
        lambda: epochs(SETS, epochs=40, batch_samples=3),
    ],
)
def test_a_restored_plan_goes_on_exactly(make: Any) -> None:
    plan, draws = make(), random.Random(0)
    for step in (0, 1, 60, 131, 200):
        other = make()
        other.restore(json.loads(json.dumps(plan.state())))
        ahead = random.Random()
        ahead.setstate(draws.getstate())
        last = {0: 1, 1: 60, 60: 131, 131: 200, 200: 300}[step]
        assert go(other, step, last, ahead) == go(plan, step, last, draws)
        assert (other.stage, other.mastered(), other.state()) == (plan.stage, plan.mastered(), plan.state())


def test_the_state_is_a_copy() -> None:
    plan = mastery()
    before = plan.state()
    kept = json.dumps(before)
    go(plan, 0, 40)
    assert json.dumps(before) == kept


def test_samples_in_a_batch() -> None:
    (stage,) = stages((48, None))
    assert samples_a_batch(stage, TrainingConfig(batch_tokens=100)) == 2
    assert samples_a_batch(stage, TrainingConfig(batch_tokens=10)) == 1
    assert samples_a_batch(stage, TrainingConfig(batch_tokens=10, batch_samples=5)) == 5


# --- learning rates


def rates(plan: Plan, config: TrainingConfig, *steps: int) -> list[float]:
    return [learning_rate(config, step, plan) for step in steps]


def test_hold() -> None:
    config = TrainingConfig(steps=1000, learning_rate=0.5, warmup=10, hold=0.6, schedule="hold")
    plan = make_plan(FOUR, config, 0)
    assert rates(plan, config, 0, 4, 9, 10, 599, 600) == pytest.approx([0.05, 0.25, 0.5, 0.5, 0.5, 0.5], rel=1e-12)
    for step in (601, 700, 800, 999):
        expected = 0.25 * (1 + math.cos(math.pi * (step - 600) / 400))
        assert rates(plan, config, step) == pytest.approx([expected], rel=1e-12)
    assert rates(plan, config, 800) == pytest.approx([0.25])
    assert 0 < rates(plan, config, 999)[0] < 1e-4


def test_cosine() -> None:
    config = TrainingConfig(steps=100, learning_rate=0.5, warmup=0, schedule="cosine")
    plan = make_plan(FOUR, config, 0)
    for step in (0, 1, 50, 99):
        assert rates(plan, config, step) == pytest.approx([0.25 * (1 + math.cos(math.pi * step / 100))], rel=1e-12)


@pytest.mark.parametrize("hold", [0.0, 1.0])
def test_the_ends_of_hold(hold: float) -> None:
    config = TrainingConfig(steps=10, learning_rate=0.5, warmup=0, hold=hold, schedule="hold")
    plan = make_plan(FOUR, config, 0)
    cosine = TrainingConfig(steps=10, learning_rate=0.5, warmup=0, schedule="cosine")
    expected = [0.5] * 10 if hold else rates(plan, cosine, *range(10))
    assert rates(plan, config, *range(10)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["cosine-by-epoch", "linear-by-epoch"])
def test_by_epoch(schedule: Any) -> None:
    config = TrainingConfig(plan="epochs", epochs=8, batch_samples=8, learning_rate=0.5, warmup=2, schedule=schedule)
    plan = make_plan(SETS, config, 0)
    size = plan.steps_by_epoch or 0
    assert size == 5
    for epoch in range(8):
        share = (8 - epoch) / 8 if schedule == "linear-by-epoch" else 0.5 * (1 + math.cos(math.pi * epoch / 8))
        rise = [0.5, 1, 1, 1, 1] if epoch == 0 else [1] * 5
        found = rates(plan, config, *range(epoch * size, (epoch + 1) * size))
        assert found == pytest.approx([0.5 * share * part for part in rise], rel=1e-12)


def test_no_rate_is_negative_or_above_the_highest() -> None:
    for schedule in ("hold", "cosine"):
        for steps in (1, 2, 7):
            config = TrainingConfig(steps=steps, warmup=3, schedule=schedule)
            plan = make_plan(FOUR, config, 0)
            found = np.array(rates(plan, config, *range(steps)))
            assert (found > 0).all() and (found <= config.learning_rate).all()


# --- mix


def mix(share: float, **settings: Any) -> Plan:
    of = [Stage(shape=Shape(length=8), share=1 - share), Stage(shape=Shape(length=16), share=share)]
    return make_plan(of, TrainingConfig(plan="mix", batch_tokens=64, **settings), 0)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.29, 1 / 3, 0.999])
def test_a_mix_spreads_its_shares_evenly_and_repeats_no_sample(share: float) -> None:
    batches = go(mix(share), 0, 1000)
    assert batches == [go(mix(share), step, step + 1)[0] for step in range(1000)], "a function of the step alone"
    seconds = np.cumsum([stage for stage, _ in batches])
    assert np.abs(seconds - share * np.arange(1, 1001)).max() < 1 + 1e-9
    for stage, size in ((0, 8), (1, 4)):
        samples = [index for number, indices in batches if number == stage for index in indices]
        assert samples == list(range(len(samples))) and len(samples) % size == 0


def test_a_mix_of_one_stage_is_that_stage() -> None:
    plan = make_plan([Stage(shape=Shape(length=8), share=1.0)], TrainingConfig(plan="mix", batch_samples=3), 5)
    assert go(plan, 0, 3) == [(0, [0, 1, 2]), (0, [3, 4, 5]), (0, [6, 7, 8])]
    assert plan.total_steps == 1500 and mix(0.5, steps=7).total_steps == 7
    assert (plan.state(), plan.mastered(), plan.saw(0, 0, 1.0)) == ({}, [], False)


def test_shares_that_are_not_all_of_the_batches_are_refused() -> None:
    for shares in ([0.5, 0.4], [None, 0.5], [0.9], [0.4, 0.3, 0.3]):
        of = [Stage(shape=Shape(length=8), share=share) for share in shares]
        with pytest.raises(UserError, match=r"training.plan=mix needs stages that have shares"):
            make_plan(of, TrainingConfig(plan="mix"), 0)
