"""MQAR's generator has the law of the plain loops that it is measured against, in bounded memory. Nothing is timed."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from numpy.typing import NDArray
from rich.console import Console

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.harness import generators
from decaybench.harness.config import RunConfig
from decaybench.harness.generator_loops import FORMS, Form, mqar_loop
from decaybench.harness.generators import GeneratorReport, measure_generators, stream
from decaybench.harness.plans import EpochPlan, make_plan
from decaybench.harness.presets import configure
from decaybench.tasks.mqar import Fill, Mqar, MqarConfig, MqarShape, expected_key_repeats
from decaybench.tasks.registry import make_task
from tests.command import bench
from tests.statistics import fits
from tests.tasks.test_mqar import assert_mqar_rules, slots_of

SHAPE, VOCAB, N = MqarShape(length=48, kv=6), 64, 6000
Samples = tuple[NDArray[np.int64], NDArray[np.int64]]


def ours(fill: Fill, n: int = N, seed: int = 0) -> Samples:
    task = Mqar(parse(MqarConfig, {"train_length": 48, "vocab_size": VOCAB, "fill": fill}))
    batch = task.batch(SHAPE, "train", seed, np.arange(n))
    return batch.tokens, batch.labels


def theirs(fill: Fill, form: Form, n: int = N) -> Samples:
    return mqar_loop(SHAPE, n, vocab_size=VOCAB, fill=fill, form=form)


def same_law(ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> bool:
    """Whether two counts of the same events have one law: chi-square of each against what both together expect.

    Twice the chi-square of one against the pooled shares is the two-sample statistic where both have the same size;
    `fits` allows five deviations of one sample against a known law, which is stricter on half of it.
    """
    assert ours.sum() == theirs.sum()
    share = (ours + theirs) / (ours + theirs).sum()
    expected = ours.sum() * share
    statistic = 2 * float(((ours - expected) ** 2 / expected).sum())
    freedom = len(share) - 1
    return expected.min() >= 5 and statistic < freedom + 4 * np.sqrt(2 * freedom)


def joint_slots(samples: Samples) -> NDArray[np.int64]:
    """How often the first and the last key are asked in each pair of thirds of the slots: their laws hang together."""
    slots = slots_of(*samples, SHAPE.kv)
    third = np.digitize(slots, [3, 9])
    return np.bincount(3 * third[:, 0] + third[:, -1], minlength=9)


LAWS: dict[str, Callable[[Samples], NDArray[np.int64]]] = {
    "slot of the first key": lambda found: np.bincount(slots_of(*found, SHAPE.kv)[:, 0], minlength=18),
    "slot of the last key": lambda found: np.bincount(slots_of(*found, SHAPE.kv)[:, -1], minlength=18),
    "slots of two keys": joint_slots,
    "keys in each place": lambda found: np.concatenate(
        [np.bincount(found[0][:, place], minlength=VOCAB)[1 : VOCAB // 2] for place in (0, 10)]
    ),
    "values": lambda found: np.bincount(found[0][:, 1:12:2].ravel(), minlength=VOCAB)[VOCAB // 2 :],
    "key and value of a pair": lambda found: np.bincount(
        4 * (found[0][:, 0] // 8) + (found[0][:, 1] - VOCAB // 2) // 8, minlength=16
    ),
    "fillers": lambda found: np.bincount(found[0][:, 12:][found[1][:, 12:] < 0], minlength=VOCAB),
    "repeats of keys": lambda found: np.bincount(np.minimum(key_repeats(found), 8), minlength=9)[:9],
}


def key_repeats(samples: Samples) -> NDArray[np.int64]:
    """How many fillers of each sample are one of its keys."""
    fillers = np.where(samples[1] < 0, samples[0], -1)[:, 12:]
    found: NDArray[np.int64] = (fillers[:, :, None] == samples[0][:, None, 0:12:2]).sum((1, 2))
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("law", LAWS)
def test_both_forms_have_the_same_law(law: str, form: Form) -> None:
    assert same_law(*(LAWS[law](found) for found in (ours("random"), theirs("random", form))))


def test_random_safe_fillers_have_the_same_law_and_are_no_keys() -> None:
    found = ours("random-safe"), theirs("random-safe", "modern")
    assert same_law(*map(LAWS["fillers"], found))
    assert not any(key_repeats(one).any() for one in found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fill", ["random", "zero", "random-safe"])
def test_the_loops_follow_the_rules(fill: Fill, form: Form) -> None:
    assert_mqar_rules(*theirs(fill, form, 50), SHAPE.kv, VOCAB, fill)


def test_repeats_of_keys_come_as_often_as_expected() -> None:
    expected = expected_key_repeats(SHAPE, VOCAB)
    for found in (ours("random"), theirs("random", "legacy")):
        assert abs(key_repeats(found).mean() - expected) < 4 * np.sqrt(expected / N)


def test_the_check_of_laws_sees_a_difference() -> None:
    tokens, labels = ours("random")
    uniform = np.random.default_rng(0).integers(0, 18, N)
    assert not same_law(LAWS["slot of the first key"]((tokens, labels)), np.bincount(uniform, minlength=18))
    assert not same_law(
        LAWS["repeats of keys"](ours("random-safe", seed=1)) + 5, LAWS["repeats of keys"]((tokens, labels)) + 5
    )
    assert fits(LAWS["values"]((tokens, labels)))


# --- memory


def preset(name: str) -> RunConfig:
    (found,) = configure("mqar", preset=name)
    return found


def peak_of(action: Callable[[], object]) -> int:
    """Bytes at the peak of an action, by Python's and NumPy's own count."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_that_of_a_batch_however_many_samples() -> None:
    config = preset("post-64k")
    task, shape = make_task(config.task), make_task(config.task).stages()[0].shape
    few, many = (peak_of(lambda n=n: stream(task, shape, n * 64, 64)) for n in (2, 12))
    batch = 64 * shape.length * 8
    assert few < 20 * batch
    assert many < 1.1 * few


@pytest.mark.parametrize(("name", "steps"), [("post-64k", 2048), ("zoology-based", 707)])
def test_a_plan_of_a_whole_epoch_holds_indices_alone(name: str, steps: int) -> None:
    config = preset(name)
    stages = make_task(config.task).stages()
    examples = sum(stage.examples or 0 for stage in stages)
    assert examples == {"post-64k": 2**20, "zoology-based": 180_000}[name]
    seen = []

    def epoch() -> None:
        plan = make_plan(stages, config.training, 0)
        assert isinstance(plan, EpochPlan)
        for step in range(steps):
            stage, indices = plan.next(step)
            seen.append((stage, int(indices[0]), len(indices)))

    peak = peak_of(epoch)
    assert peak < 2 * examples, "less than two bytes an example: no list of them, and no sample"
    assert sum(count for *_, count in seen) == examples, "each once"
    assert len({(stage, first) for stage, first, _ in seen}) == steps


# --- the report


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that a report takes no time."""
    monkeypatch.setattr(
        generators,
        "in_turn",
        lambda actions, rounds: {
            name: [(action() and 0.0) or (1.0 if name else 0.25)] * rounds for name, action in actions.items()
        },
    )
    monkeypatch.setattr(generators, "peak_growth", lambda action: 123)


def test_ratios_are_of_seconds_a_sample(few: None) -> None:
    report = measure_generators(samples=400, loop_samples=20, repeats=6)
    wide = report.generators[0]
    assert (wide.samples, wide.batch, wide.peak_bytes) == (400, 4096, 123)
    assert wide.samples_per_second == 1600
    # 20 samples in a second are 80 times slower than 400 in a quarter of one.
    assert [(loop.form, loop.times_faster.median) for loop in wide.loops] == [("legacy", 80.0), ("modern", 80.0)]
    assert [found.task["name"] for found in report.generators if not found.loops] == ["mqar-noisy", "niah"]
    long = next(found for found in report.generators if found.shape["length"] == 512)
    assert (long.samples, long.loops[0].samples) == (50, 2)
    Draft202012Validator(GeneratorReport.model_json_schema()).validate(report.plain())
    out = io.StringIO()
    Console(file=out, width=200).print(report.tables()[0])
    assert "80 [80, 80]" in out.getvalue() and "1,600" in out.getvalue()
    with pytest.raises(UserError, match="--repeats 5: the interval of a median takes at least 6"):
        measure_generators(repeats=5)


def test_the_command_measures_generators_and_no_model(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "_CASES", generators._CASES[-1:])
    result = bench("speed", "--generators", "--quiet", "--repeats", "6")
    assert result.code == 0, result.err
    assert "niah" in result.out and "tokens/s" not in result.out
    refused = bench("speed", "--generators", "--long", "--quiet")
    assert refused.code == 2 and refused.err == "bench: --generators measures no model: leave out --long\n"
