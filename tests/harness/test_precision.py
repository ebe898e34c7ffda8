"""Gains, sample sizes and precisions are the model's, theory stands beside them, and figures hold the numbers."""

from __future__ import annotations

import io
import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from torch.nn import functional as F

from decaybench.core.errors import UserError
from decaybench.harness import precision
from decaybench.harness import run as harness_run
from decaybench.harness.config import RunConfig, make_config
from decaybench.harness.precision import draw_precision, trace_runs
from decaybench.harness.precision_plots import gain_figure, gain_length_figure, precision_figure, sample_size_figure
from decaybench.harness.precision_report import ALL, ASKED, BOUND, TOKENS, Comparison, RunTrace, SourceOrder
from decaybench.harness.precision_tally import position_bins, trace_run
from decaybench.models.checkpoints import find_checkpoint, write_checkpoint
from decaybench.models.language_model import LanguageModel, build_model
from decaybench.results.resampling import Estimate
from decaybench.results.run_folder import RunFolder
from decaybench.tasks.registry import make_task
from tests.command import bench

T, VOCAB = 32, 144
MQAR = {"name": "mqar", "train_length": T, "vocab_size": VOCAB}
SIZES: dict[str, dict[str, Any]] = {
    "mamba2": {"headdim": 8, "d_state": 8},
    "attention": {"n_heads": 4},
    "retnet": {"n_heads": 4},
    "gla": {"n_heads": 4},
    "rwkv7": {"head_dim": 16},
}


def made(
    folder: Path,
    name: str = "mamba2",
    bft: dict[str, Any] | None = None,
    *,
    task: dict[str, Any] | None = None,
    evaluation: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    noise: float = 0.3,
    seed: int = 0,
    **settings: Any,
) -> tuple[Path, RunConfig, LanguageModel]:
    """A run's folder with a checkpoint of a model that never trained but was moved away from its initial values."""
    config = make_config(
        {
            "task": MQAR if task is None else task,
            "model": {"name": name, "d_model": 16, "mixer": SIZES[name], "bft": bft, **settings},
            "training": training or {},
            "evaluation": evaluation,
            "seed": seed,
            "out": str(folder),
        }
    )
    model = build_model(config.model, seed)
    draws = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=draws)
    run = RunFolder.open(config.folder(config.training_hash))
    run.write_config(config.plain())
    write_checkpoint(run.checkpoint / "step-00000001", model, seed, {}, {})
    return run.path, config, find_checkpoint(run.path).model()


def traced(*paths: Path, **asked: Any) -> tuple[RunTrace, ...]:
    return trace_runs(paths, **asked)


def named(panel: Axes) -> dict[str, list[tuple[float, float]]]:
    """The panel's lines with a name: their points."""
    lines = {str(line.get_label()): line for line in panel.lines if not str(line.get_label()).startswith("_")}
    return {name: [(float(x), float(y)) for x, y in line.get_xydata()] for name, line in lines.items()}


@pytest.mark.parametrize("length", [1, 2, 3, 31, 32, 33, 512, 1000])
def test_bins_hold_every_position_once_and_end_at_powers_of_two(length: int) -> None:
    bins = position_bins(length)
    assert [t for first, last in bins for t in range(first, last + 1)] == list(range(1, length + 1))
    ends = {last for _, last in bins}
    assert {2**k for k in range(length.bit_length()) if 2**k <= length} <= ends


def test_an_order_is_said_in_words() -> None:
    ordered = SourceOrder("tau", (0.4, 0.95, 0.6), (0.5, 2.0, 1.0))
    listed = "tau: 2 for reliability 0.95, 1 for 0.6, 0.5 for 0.4"
    assert str(ordered) == f"{listed}: ordered by reliability (Kendall +1.00, Spearman +1.00)"
    assert "not ordered" in str(SourceOrder("tau", (0.4, 0.95, 0.6), (0.5, 2.0, 0.1)))
    assert "the other way round (Kendall -1.00" in str(SourceOrder("tau", (0.4, 0.95, 0.6), (2.0, 0.1, 1.0)))
    alike = SourceOrder("tau", (0.4, 0.95), (1.0, 1.0))
    assert str(alike) == "tau: 1 for reliability 0.95, 1 for 0.4: not ordered by reliability"
    assert "of one reliability have no order" in str(SourceOrder("tau", (0.6, 0.6), (2.0, 1.0)))


def test_sources_of_one_reliability_may_come_in_any_order() -> None:
    """Of (0.6, 1) and (0.6, 2) neither is to come first; tau-b still counts their tie: 5 pairs of sqrt(5 * 6)."""
    reliability = (0.6, 0.95, 0.6, 0.4)
    ordered = SourceOrder("tau", reliability, (1.0, 3.0, 2.0, 0.5))
    assert ordered.kendall == pytest.approx(5 / math.sqrt(30))
    assert ": ordered by reliability (Kendall +0.91" in str(ordered)
    assert "other way round (Kendall -0.91" in str(SourceOrder("tau", reliability, (2.0, 0.5, 1.0, 3.0)))
    for values in ((1.0, 1.5, 2.0, 0.5), (1.0, 3.0, 2.0, 1.0)):
        assert ": not ordered by reliability" in str(SourceOrder("tau", reliability, values))


@pytest.mark.parametrize("step", [1e-1, 1e-3, 1e-5, 1e-7])
def test_precisions_have_as_many_digits_as_it_takes_to_read_their_order(step: float) -> None:
    """After a few steps of training taus differ from 1 in the fifth digit."""
    values = tuple(1 - step * k for k in (1, 3, 0, 2))
    said = str(SourceOrder("tau", (0.8, 0.4, 0.95, 0.6), values))
    numbers = [float(part.split(" for ")[0]) for part in said.split(": ")[1].split(", ")]
    assert numbers == sorted(numbers, reverse=True) and len(set(numbers)) == 4
    assert numbers == pytest.approx([1 - step * k for k in range(4)], abs=step / 2)
    assert ": ordered by reliability" in said


def test_no_more_digits_than_that_and_no_end_of_them_for_equal_ones() -> None:
    assert "0.681 for reliability 0.95, 0.8 for 0.8" in str(SourceOrder("tau", (0.95, 0.8), (0.68123, 0.80001)))
    assert "1.23 for reliability 0.95, 1.23 for 0.8" in str(SourceOrder("tau", (0.95, 0.8), (1.23456, 1.23456)))
    assert "1 for reliability 0.95, 1 for 0.8" in str(SourceOrder("tau", (0.95, 0.8), (1.0, 1.0 + 1e-15)))


def test_gains_and_sample_sizes_are_the_means_of_the_tasks_own_samples(tmp_path: Path) -> None:
    path, config, model = made(tmp_path, bft={})
    (run,) = traced(path, samples=6, lengths=["1x", "4x"])
    task = make_task(config.task)
    cells = {
        cell.shape.length: cell for cell in task.cells(config.evaluation, [T, 4 * T]) if cell.variant == "capacity"
    }
    assert (run.task, run.variant, run.cell, run.train_length) == ("mqar", "capacity", "mamba2+bft", T)
    for at in run.lengths:
        batch = task.batch(cells[at.length].shape, "test", config.evaluation.seed, np.arange(6))
        for layer, trace in enumerate(model.trace(torch.from_numpy(batch.tokens))):
            assert trace.sample_size is not None and at.sample_size is not None
            for quantity, estimates in ((trace.gain, at.gain), (trace.sample_size.mean(-1), at.sample_size)):
                values = quantity.double().numpy()
                assert estimates[ALL][layer].value == pytest.approx(values.mean(), rel=1e-6)
                each = [row[asked].mean() for row, asked in zip(values, batch.asked, strict=True)]
                assert estimates[ASKED][layer].value == pytest.approx(np.mean(each), rel=1e-6)
                low, high = estimates[ASKED][layer].interval
                assert min(each) <= low < np.mean(each) < high <= max(each)
        if at.length == 4 * T:
            _check_curves(run, batch, model)
    assert run.lengths[0].samples == 6


def _check_curves(run: RunTrace, batch: Any, model: LanguageModel) -> None:
    """By position and by the answer's distance, from the trace, one question after the other."""
    for detail, trace in zip(run.layers, model.trace(torch.from_numpy(batch.tokens)), strict=True):
        assert trace.sample_size is not None and detail.sample_size is not None and detail.answer_size is not None
        gain, size = trace.gain.double().numpy(), trace.sample_size.double().numpy()
        for place, (first, last) in enumerate(run.bins):
            assert detail.gain[place] == pytest.approx(gain[:, first - 1 : last].mean(), rel=1e-6)
            assert detail.sample_size[place] == pytest.approx(size[:, first - 1 : last].mean(), rel=1e-6)
            for head in detail.heads:
                assert head.measured[place] == pytest.approx(size[:, first - 1 : last, head.head].mean(), rel=1e-6)
        assert [head.timescale for head in detail.heads] == sorted((h.timescale for h in detail.heads), reverse=True)  # type: ignore[type-var]
        found: dict[int, list[tuple[float, float]]] = {}
        for row, column in zip(*np.nonzero(batch.asked), strict=True):
            nearest = 2 ** int(math.log2(batch.distance[row, column]))
            found.setdefault(nearest, []).append((gain[row, column], size[row, column].mean()))
        assert run.answers == tuple((place, len(found[place])) for place in sorted(found))
        for k, place in enumerate(sorted(found)):
            means = np.mean(found[place], axis=0)
            assert (detail.answer_gain[k], detail.answer_size[k]) == pytest.approx(tuple(means), rel=1e-6)


def test_precisions_are_grouped_by_what_a_token_is_and_tau_by_its_id(tmp_path: Path) -> None:
    path, config, model = made(tmp_path, bft={})
    (run,) = traced(path, samples=4, lengths=["2x"])
    task = make_task(config.task)
    (cell,) = (cell for cell in task.cells(config.evaluation, [2 * T]) if cell.variant == "capacity")
    batch = task.batch(cell.shape, "test", 0, np.arange(4))
    for detail, trace in zip(run.layers, model.trace(torch.from_numpy(batch.tokens)), strict=True):
        for moment, quantity in enumerate((trace.precision, trace.updated)):
            assert quantity is not None
            values = quantity.double().numpy()
            keys = [values[place] for place in np.ndindex(*values.shape) if 1 <= batch.tokens[place] < VOCAB // 2]
            spread = detail.precision[TOKENS]["key"][moment]
            assert (spread.low, spread.median, spread.high) == pytest.approx(
                tuple(np.quantile(keys, [0.25, 0.5, 0.75]))
            )
            assert spread.count == len(keys)
            assert detail.precision[TOKENS][ASKED][moment].median == pytest.approx(np.median(values[batch.asked]))
    assert model.precision is not None and model.precision.log_tau is not None
    tau = model.precision.log_tau.detach().double().exp()
    assert run.tau["value"].median == pytest.approx(float(tau[VOCAB // 2 :].quantile(0.5)), rel=1e-5)
    assert {name: spread.count for name, spread in run.tau.items()} == {"filler": 1, "key": 71, "value": 72}
    assert run.sources == ()


def test_an_mlps_tau_is_that_of_the_embedding_and_a_frozen_precision_has_none(tmp_path: Path) -> None:
    path, _, model = made(tmp_path, bft={"precision": "mlp"})
    (run,) = traced(path, samples=2, lengths=["1x"])
    (first, *_) = model.trace(torch.arange(VOCAB)[:, None])
    assert first.precision is not None
    assert run.tau["key"].high == pytest.approx(
        float(first.precision[1 : VOCAB // 2].double().quantile(0.75)), rel=1e-5
    )
    path, *_ = made(tmp_path, bft={"precision": "frozen"})
    (run,) = traced(path, samples=2, lengths=["1x"])
    assert run.tau == {}
    assert all(s.median == 1 for detail in run.layers for both in detail.precision[TOKENS].values() for s in both)


@pytest.mark.parametrize("post", [None, {"variant": "minimal"}])
def test_measured_sizes_are_the_theorys_where_writes_are_all_alike(tmp_path: Path, post: dict[str, Any] | None) -> None:
    """RetNet's decays don't depend on the input, its writes have strength 1, and a frozen precision is 1."""
    path, _, model = made(tmp_path, "retnet", {"precision": "frozen"}, post=post, noise=0.0)
    (run,) = traced(path, samples=2, lengths=["1x", "16x"])
    for detail, block in zip(run.layers, model.blocks, strict=True):
        assert len(detail.heads) == 4
        for head in detail.heads:
            assert head.theory is not None and head.limit is not None and head.taper is not None
            np.testing.assert_allclose(head.measured, head.theory, rtol=1e-4)
            rest = [float(block.mixer.timescales(t)[head.head].detach()) for t in (1, 16 * T)]
            assert head.taper == pytest.approx(math.log(rest[1] / rest[0]) / math.log(16 * T), abs=1e-6)
            if post is None:
                assert head.timescale == pytest.approx(rest[0], rel=1e-4)
                assert head.limit == pytest.approx(2 * rest[0], rel=0.01)
                if rest[0] < 2 * T:
                    assert head.measured[-1] == pytest.approx(2 * rest[0], rel=0.02), "saturated"
        if post is not None:
            slowest, fastest = detail.heads[0], detail.heads[-1]
            assert (slowest.taper, fastest.taper) == pytest.approx((1.0, 0.0), abs=1e-6)
            assert slowest.measured[-1] / slowest.measured[-5] == pytest.approx(4, rel=0.03), "linear: two octaves"
            assert fastest.measured[-1] == pytest.approx(fastest.measured[-5], rel=0.01), "saturated"


def test_channels_of_a_head_decay_together(tmp_path: Path) -> None:
    path, config, model = made(tmp_path, "gla", {}, post={"variant": "minimal"})
    (run,) = traced(path, samples=2, lengths=["1x"])
    task = make_task(config.task)
    (cell, *_) = task.cells(config.evaluation, [T])
    tokens = torch.from_numpy(task.batch(cell.shape, "test", 0, np.arange(2)).tokens)
    trace = model.trace(tokens)[0]
    assert trace.log_decay is not None and trace.log_decay.shape == (2, T, 4)
    first, last = run.bins[-1]
    for head in run.layers[0].heads:
        mean = float(trace.log_decay[:, first - 1 : last, head.head].double().mean())
        assert head.timescale == pytest.approx(-1 / mean, rel=1e-6)
        own = (2 * head.head, 2 * head.head + 1)  # 8 key channels in all
        rates = [sum(1 / float(model.blocks[0].mixer.timescales(t)[k].detach()) for k in own) for t in (1, T)]
        assert head.taper == pytest.approx(math.log(rates[0] / rates[1]) / math.log(T), rel=1e-5)


def test_a_head_that_never_decays_has_an_infinite_timescale(tmp_path: Path) -> None:
    _, config, model = made(tmp_path, bft={})
    for block in model.blocks:
        block.mixer.spectrum.P.data[0] = -200.0  # type: ignore[union-attr]
    cells = [c for c in make_task(config.task).cells(config.evaluation, [2 * T]) if c.variant == "capacity"]
    run = trace_run(config, model, cells, 2)
    for number, layer in enumerate(run.layers):
        first, *others = layer.heads
        assert (first.head, first.timescale, first.taper, first.limit) == (0, math.inf, 0.0, 2 * T)
        assert first.theory == pytest.approx([(first + last) / 2 for first, last in run.bins])
        assert all(math.isfinite(head.timescale or math.nan) for head in others)
        kept = json.loads(json.dumps(run.plain(), allow_nan=False))["layers"][number]["heads"]
        assert [head["timescale"] is None for head in kept] == [True] + [False] * len(others)
    sample_size_figure([run])


def test_attention_has_sizes_without_theory(tmp_path: Path) -> None:
    path, *_ = made(tmp_path, "attention", {})
    (run,) = traced(path, samples=2, lengths=["1x"])
    for detail in run.layers:
        assert [head.theory for head in detail.heads] == [None] * 4
        ends = [head.measured[-1] for head in detail.heads]
        assert ends == sorted(ends, reverse=True) and min(ends) >= 1
    assert "timescale" not in run.plain()["layers"][0]["heads"][0]


def test_a_gate_has_gains_alone(tmp_path: Path) -> None:
    for control in ("scalar_gate", "sigmoid_gate"):
        path, config, model = made(tmp_path, bft={"control": control})
        (run,) = traced(path, samples=3, lengths=["1x"])
        assert not run.carries and run.tau == {} and run.layers[0].heads == () and run.layers[0].precision == {}
        task = make_task(config.task)
        (cell,) = (cell for cell in task.cells(config.evaluation, [T]) if cell.variant == "capacity")
        tokens = torch.from_numpy(task.batch(cell.shape, "test", 0, np.arange(3)).tokens)
        block = model.blocks[0]
        logit = F.linear(block.norm(model.embedding(tokens)), block.residual.proj.weight)
        if control == "scalar_gate":
            logit = logit + block.residual.bias
        assert run.lengths[0].gain[ALL][0].value == pytest.approx(
            float(logit.detach().double().sigmoid().mean()), rel=1e-5
        )


def test_needles_are_drawn_against_their_depth(tmp_path: Path) -> None:
    niah = {"name": "niah", "train_length": T, "key_tokens": 8, "value_tokens": 8, "hay_tokens": 8}
    path, config, model = made(tmp_path, bft={}, task=niah, evaluation={"depths": [0.0, 0.5, 1.0]})
    (run,) = traced(path, samples=5, lengths=["1x", "2x"])
    assert run.answer_place == "depth"
    assert run.answers == ((0.0, 2), (0.5, 2), (1.0, 2)), "five samples over three cells: two each"
    task = make_task(config.task)
    for k, cell in enumerate(task.cells(config.evaluation, [2 * T])):
        batch = task.batch(cell.shape, "test", 0, np.arange(2))
        gain = model.trace(torch.from_numpy(batch.tokens))[1].gain.numpy()[batch.asked]
        assert run.layers[1].answer_gain[k] == pytest.approx(float(gain.mean()), rel=1e-6)
    assert {"needle", "query", "key", "value", "hay", ASKED} == set(run.layers[0].precision[TOKENS])
    assert [x for x, _ in named(gain_figure(run).axes[1])["layer 0"]] == [0.0, 0.5, 1.0]


def test_sources_are_ordered_by_tau_and_by_the_values_that_they_bound(tmp_path: Path) -> None:
    task = {"name": "mqar-noisy", "train_length": T, "vocab_size": VOCAB, "reliabilities": [0.6, 0.95, 0.4]}
    path, config, model = made(tmp_path, "attention", {}, task=task)
    (run,) = traced(path, samples=4, lengths=["2x"])
    assert model.precision is not None and model.precision.log_tau is not None
    tau = model.precision.log_tau.detach().double().exp()[1:4].tolist()
    (first, bound) = run.sources
    assert first.reliability == (0.6, 0.95, 0.4)
    assert first.precision == pytest.approx(tau, rel=1e-5)
    asked = make_task(config.task)
    (cell,) = (c for c in asked.cells(config.evaluation, [2 * T]) if c.variant == "capacity")
    batch = asked.batch(cell.shape, "test", 0, np.arange(4))
    precision = model.trace(torch.from_numpy(batch.tokens))[1].precision
    assert precision is not None
    for source in range(3):  # a source token always opens a binding: source, key, value
        rows, columns = np.nonzero(batch.tokens == 1 + source)
        values = precision.double().numpy()[rows, columns + 2]
        assert bound.precision[source] == pytest.approx(np.median(values), rel=1e-6)
        name = f"source {first.reliability[source]:g}"
        assert run.layers[1].precision[BOUND][name][0].count == len(values)
    assert "before layer 1" in bound.what
    by_class, by_source, _ = precision_figure(run).axes
    assert list(named(by_source)) == [f"source {reliability:g}" for reliability in first.reliability]
    lines = {str(line.get_label()): line for line in by_class.lines if str(line.get_label()) in named(by_class)}
    light = {name: _lightness(line.get_color()) for name, line in lines.items()}
    assert all(light[str(line.get_label())] == _lightness(line.get_color()) for line in by_source.lines[::2])
    steps = [light["source 0.6"] - light["source 0.95"], light["source 0.4"] - light["source 0.6"]]
    assert min(steps) > 20 and max(steps) < 1.3 * min(steps), "the darker the more reliable, in even steps"
    assert light["source 0.4"] < 80, "seen on white"
    circles = [name for name, line in lines.items() if line.get_marker() == "o"]
    assert set(circles) == set(named(by_source)), "in grey marks tell the others apart"
    highest = max(moments[1].high for detail in run.layers for moments in detail.precision[BOUND].values())
    assert by_class.get_ylim() == by_source.get_ylim() and by_source.get_ylim()[1] > highest, "no bar is cut"


def _lightness(ink: Any) -> float:
    """L* of CIE Lab, which is what is left in grey: 0 is black, 100 white."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(ink)]
    return float(116 * np.cbrt(np.dot(linear, (0.2126, 0.7152, 0.0722))) - 16)


def test_a_slope_is_the_least_squares_line_through_the_means(tmp_path: Path) -> None:
    path, *_ = made(tmp_path, bft={})
    (run,) = traced(path, samples=6, lengths=["1x", "2x", "8x"])
    x = np.log2([at.length for at in run.lengths])
    for place in (ASKED, ALL):
        for layer in range(2):
            means = [at.gain[place][layer].value for at in run.lengths]
            slope = run.slopes[place][layer]
            assert slope.value == pytest.approx(np.polyfit(x, means, 1)[0], rel=1e-9)
            assert slope.interval[0] < slope.value < slope.interval[1]
    (single,) = traced(path, samples=2, lengths=["1x"])
    assert single.slopes == {}


def test_batches_change_nothing(tmp_path: Path) -> None:
    path, config, _ = made(tmp_path, bft={})
    (whole,) = traced(path, samples=5)
    small = RunFolder(path)
    small.write_config({**config.plain(), "batch_tokens": 70})
    (pieces,) = traced(path, samples=5)
    _close(whole.plain(), pieces.plain())


def _close(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            _close(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            _close(one, other)
    else:
        assert a == (pytest.approx(b, rel=1e-4, abs=1e-6) if isinstance(a, float) else b)


def test_a_long_sequence_is_traced_piece_by_piece(tmp_path: Path) -> None:
    for name in ("mamba2", "attention", "rwkv7"):
        _, _, model = made(tmp_path, name, {})
        model.double()
        tokens = torch.randint(0, 32, (2, 41), generator=torch.Generator().manual_seed(0))
        for whole, pieces in zip(model.trace(tokens), model.trace(tokens, piece=7), strict=True):
            for quantity in ("gain", "precision", "updated", "sample_size", "log_decay"):
                a, b = getattr(whole, quantity), getattr(pieces, quantity)
                assert (a is None) == (b is None) == (quantity == "log_decay" and name == "attention")
                if a is not None:
                    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_figures_hold_the_numbers_of_the_file(tmp_path: Path) -> None:
    """That the file holds `Comparison.plain` is told below."""
    paths = [
        made(tmp_path, bft={})[0],
        made(tmp_path, bft={}, post={}, seed=1)[0],
        made(tmp_path, bft={"control": "sigmoid_gate"})[0],
    ]
    runs = traced(*paths, samples=3)
    kept = json.loads(json.dumps(Comparison(tmp_path, runs).plain()))["runs"]
    assert [run["name"] for run in kept] == ["mamba2+bft", "mamba2+post+bft", "mamba2+sigmoid-gate"]

    figure = gain_length_figure(runs)
    titles = [panel.get_title(loc="left") for panel in figure.axes]
    assert titles == [f"layer {n}, {where}" for where in ("where an answer is asked", "everywhere") for n in (0, 1)]
    for panel, (place, layer) in zip(figure.axes, [(p, n) for p in ("asked", "all") for n in (0, 1)], strict=True):
        lines = named(panel)
        assert list(lines) == [run["name"] for run in kept]
        bars = [collection.get_segments() for collection in panel.collections]  # type: ignore[attr-defined]
        for number, run in enumerate(kept):
            gains = [at[place]["gain"] for at in run["layers"][layer]["lengths"]]
            assert [y for _, y in lines[run["name"]]] == [gain["value"] for gain in gains]
            places = [math.log2(x) for x, _ in lines[run["name"]]]
            shifts = np.subtract(places, [math.log2(at["length"]) for at in run["layers"][layer]["lengths"]]).tolist()
            assert shifts == pytest.approx([0.1 * (number - 1)] * 3), "side by side"
            for (x, _), gain, bar in zip(lines[run["name"]], gains, bars[number], strict=True):
                assert bar.tolist() == [[x, gain["interval"][0]], [x, gain["interval"][1]]]
        slopes = [run["layers"][layer]["gain_by_doubling"][place] for run in kept]
        shown = [text.get_text() for text in panel.texts]
        assert [float(text.strip("()")) for text in shown] == pytest.approx([s["value"] for s in slopes], abs=5.01e-4)
        nothing = [s["interval"][0] <= 0 <= s["interval"][1] for s in slopes]
        assert [text.startswith("(") for text in shown] == nothing
    assert "95 % intervals over samples" in " ".join(figure.get_suptitle().split())

    figure = gain_figure(runs[0])
    (gains, _, sizes, _) = figure.axes
    for number, layer in enumerate(kept[0]["layers"]):
        centres = [math.sqrt(at["first"] * at["last"]) for at in layer["by_position"]]
        for panel, key in ((gains, "gain"), (sizes, "sample_size")):
            line = named(panel)[f"layer {number}"]
            assert line == list(zip(centres, [at[key] for at in layer["by_position"]], strict=True))

    figure = sample_size_figure(runs[:2])
    for panel, (run, layer) in zip(figure.axes, [(r, n) for r in kept[:2] for n in (0, 1)], strict=True):
        heads = [head["head"] for head in run["layers"][layer]["heads"]]
        slowest = [
            (at["heads"][0]["sample_size"], at["heads"][0]["theory"]) for at in run["layers"][layer]["by_position"]
        ]
        assert run["layers"][layer]["by_position"][0]["heads"][0]["head"] == heads[0]
        lines = [[y for _, y in line.get_xydata()] for line in panel.lines]
        assert [size for size, _ in slowest] in lines and [theory for _, theory in slowest] in lines

    figure = precision_figure(runs[0])
    for name, points in named(figure.axes[0]).items():
        medians = [
            layer["precision"]["token"][name][moment]["median"]
            for layer in kept[0]["layers"]
            for moment in ("before", "observed")
        ]
        assert [y for _, y in points] == medians
    middles = [float(line.get_xdata()[0]) for line in figure.axes[1].lines if line.get_gid() != "initial"]
    assert middles == [spread["median"] for spread in kept[0]["tau"].values()]


def test_files_and_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with_bft, *_ = made(Path("runs"), bft={}, n_layers=1)
    gate, *_ = made(Path("runs"), bft={"control": "scalar_gate"}, n_layers=1)
    alone = draw_precision([with_bft], samples=2, lengths=["1x", "2x"])
    assert alone.folder == with_bft / "precision"
    drawn = {"gain", "precision", "gain-length", "sample-size"}
    names = {f"{name}.{kind}" for name in drawn for kind in ("png", "svg")} | {"precision.json"}
    assert {path.name for path in alone.folder.iterdir()} == names
    both = draw_precision([with_bft, gate], samples=2, lengths=["1x", "2x"])
    assert both.folder == Path("precision")
    assert json.loads(Path("precision/precision.json").read_text()) == json.loads(json.dumps(both.plain()))
    listed = {str(path.relative_to("precision")) for path in Path("precision").rglob("*.png")}
    own = {f"{with_bft.name}/{name}.png" for name in ("gain", "precision")} | {f"{gate.name}/gain.png"}
    assert listed == own | {"gain-length.png", "sample-size.png"}
    for name in ("gain.png", "gain.svg", "precision.png", "precision.svg"):
        again = Path("precision") / with_bft.name / name
        assert again.read_bytes() == (alone.folder / name).read_bytes(), "the same bytes every time"
    draw_precision([with_bft], samples=2, lengths=["1x"])
    left = {path.name for path in alone.folder.iterdir()}
    assert left == names - {"gain-length.png", "gain-length.svg"}, "none of an earlier call stands beside new numbers"


def test_many_layers_heads_and_runs_have_room(tmp_path: Path) -> None:
    deep, *_ = made(tmp_path, bft={}, n_layers=8)
    flat, *_ = made(tmp_path, "rwkv7", {}, n_layers=1)
    runs = traced(deep, flat, samples=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gains, _ = [gain_figure(run) for run in runs]  # each is laid out as it is made
        for run in runs:
            precision_figure(run)
        gain_length_figure(runs)
        figure = sample_size_figure(runs)
    assert len(named(gains.axes[0])) == 6
    assert [panel.get_title(loc="left") for panel in figure.axes] == [
        *(f"mamba2+bft, layer {n}" for n in (0, 4, 7)),
        "rwkv7+bft, layer 0",
        "",
        "",
    ]
    assert list(named(figure.axes[3])) == ["slowest head"], "it has one"


def test_equal_models_are_told_apart_by_seed_then_by_run(tmp_path: Path) -> None:
    first, *_ = made(tmp_path, bft={}, seed=0)
    second, *_ = made(tmp_path, bft={}, seed=1)
    third, *_ = made(tmp_path, bft={}, seed=1, tie_embeddings=False)
    names = [run.name for run in traced(first, second, third, samples=2, lengths=["1x"])]
    hashes = [path.name.rpartition("-")[2] for path in (second, third)]
    assert names == ["mamba2+bft, seed 0", *(f"mamba2+bft, {name}" for name in hashes)]


def test_listed_cells_take_no_lengths(tmp_path: Path) -> None:
    path, *_ = made(tmp_path, bft={}, evaluation={"pairs": [[16, 2], [32, 4]]})
    (run,) = traced(path, samples=2)
    assert [at.length for at in run.lengths] == [16, 32]
    with pytest.raises(UserError, match=r"--eval-lengths: evaluation\.pairs"):
        traced(path, samples=2, lengths=["1x"])


def test_what_cannot_be_drawn_is_one_line(tmp_path: Path) -> None:
    path, *_ = made(tmp_path, bft={})
    plain, *_ = made(tmp_path, post={})
    noisy, *_ = made(tmp_path, "attention", {}, task={**MQAR, "name": "mqar-noisy"})
    for paths, asked, match in (
        ([plain], {}, r"mamba2\+post has neither BFT nor a gate.*bench mqar --model mamba2 --post --bft"),
        ([path, noisy], {}, "is of task mqar-noisy, .* of mqar"),
        ([path, path], {}, "two of the runs are named"),
        ([path], {"samples": 1}, "--samples 1: .* 2 at least"),
        ([path], {"lengths": ["1x", "foo"]}, "--eval-lengths: 'foo'"),
        ([path], {"lengths": ["1x", "32"]}, "names a length twice"),
        ([path], {"variant": "persit"}, "'persit'.*'persist'"),
        ([path], {"device": "gpu"}, "device 'gpu'"),
        ([tmp_path / "nowhere"], {}, "no checkpoint at .*nowhere"),
    ):
        with pytest.raises(UserError, match=match):
            draw_precision(paths, tmp_path / "out", **asked)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_runs_that_are_asked_different_samples_are_not_drawn_together(tmp_path: Path) -> None:
    first, *_ = made(tmp_path, bft={})
    listed, *_ = made(tmp_path, bft={}, evaluation={"pairs": [[16, 2], [32, 4]]}, seed=8)
    for number, (task, evaluation, match) in enumerate(
        (
            ({}, {"variants": ["persist"]}, r"^variant is persist in .*, capacity in .*: say --variant$"),
            ({}, {"pairs": [[32, 4]]}, r"^variant is listed in .*, capacity in .*: draw each alone$"),
            ({"train_length": 2 * T}, {}, "^task.train_length is 64 in .*, 32 in "),
            ({"vocab_size": VOCAB + 16}, {}, "^task.vocab_size is 160 in .*, 144 in "),
            ({}, {"seed": 1}, "^evaluation.seed is 1 in .*, 0 in "),
            ({}, {"capacity_ratio": 16}, "^cell 1 is length=32 kv=2 .*, length=32 kv=4 "),
        ),
        start=1,
    ):
        other, *_ = made(tmp_path, bft={}, task={**MQAR, **task}, evaluation=evaluation, seed=number)
        with pytest.raises(UserError, match=match):
            traced(first, other, samples=2)
        if evaluation.get("variants"):
            runs = traced(first, other, samples=2, variant="persist", lengths=["1x"])
            assert [run.variant for run in runs] == ["persist", "persist"]
        if evaluation.get("pairs"):
            with pytest.raises(UserError, match=r"^number of cells is 1 in .*, 2 in "):
                traced(listed, other, samples=2)


def test_a_run_that_only_evaluated_is_traced_on_what_it_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness_run, "_draw", lambda record, spectrum, folder: None)
    path, _, model = made(tmp_path, bft={}, training={"label_noise": 0.2})
    facts = {"train_length": T, "longest_trained": T, "label_noise": 0.2}
    write_checkpoint(path / "checkpoint" / "step-00000002", model, 0, facts, {})
    words = ("--eval-lengths", "1x", "--samples", "2", "--variants", "persist", "--set", "evaluation.seed=7")
    assert bench("mqar", "--checkpoint", str(path), "--out", str(tmp_path / "more"), *words).code == 0
    (other,) = (tmp_path / "more").iterdir()
    (asked,) = traced(other, samples=2, lengths=["1x"])
    (trained,) = traced(path, samples=2, lengths=["1x"])
    assert (asked.variant, trained.variant) == ("persist", "capacity")
    assert asked.name == trained.name == "mamba2+bft, label noise 0.2"
    assert (asked.label_noise, asked.longest_trained, asked.train_length) == (0.2, T, T)
    assert asked.tau == trained.tau, "the same weights"
    with pytest.raises(UserError, match="variant is persist in "):
        traced(path, other, samples=2)


def test_a_checkpoint_without_its_run_has_no_samples(tmp_path: Path) -> None:
    path, *_ = made(tmp_path, bft={})
    moved = tmp_path / "elsewhere"
    (path / "checkpoint" / "step-00000001").rename(moved)
    with pytest.raises(UserError, match="elsewhere is a checkpoint without its run"):
        draw_precision([moved])


def test_the_table_names_models_layers_and_slopes(tmp_path: Path) -> None:
    path, *_ = made(tmp_path, bft={})
    gate, *_ = made(tmp_path, bft={"control": "sigmoid_gate"})
    found = Comparison(tmp_path, traced(path, gate, samples=3))
    text = printed(found)
    for run in found.runs:
        for layer in (0, 1):
            slope = run.slopes[ASKED][layer]
            row = f"{slope.value:+.4f} [{slope.interval[0]:+.4f}, {slope.interval[1]:+.4f}]"
            assert row in text
    nothing = {ASKED: (Estimate(-3e-6, (-2e-4, 4e-5)),) * 2, ALL: (Estimate(0.01, (-0.01, 0.02)),) * 2}
    text_of_nothing = printed(Comparison(tmp_path, (replace(found.runs[0], slopes=nothing),)))
    assert "0.0000 [-0.0002, 0.0000] │ +0.0100 [-0.0100, +0.0200]" in text_of_nothing, "0 has no sign"
    assert text.count("mamba2+bft") == 1 and "mamba2+sigmoid-gate" in text
    (effect,) = found.lines()
    assert effect.startswith("mamba2+bft: all tokens' tau made equal: accuracy"), "a gate has no tau"
    assert "mqar capacity: gain and sample size n where an answer is asked" in text
    assert "means over 3 samples a length; in brackets: 95 % intervals over samples; 1x: 32 tokens" in text


def printed(found: Comparison) -> str:
    from rich.console import Console

    console = Console(width=160, record=True, file=io.StringIO())
    console.print(found)
    return console.export_text()


def test_what_no_run_has_is_no_column(tmp_path: Path) -> None:
    path, *_ = made(tmp_path, bft={})
    gate, *_ = made(tmp_path, bft={"control": "sigmoid_gate"})
    for paths, lengths, slopes, sizes in (
        ([path, gate], ["1x", "2x"], True, True),
        ([gate], ["1x", "2x"], True, False),
        ([path], ["2x"], False, True),
        ([gate], ["2x"], False, False),
    ):
        text = printed(Comparison(tmp_path, traced(*paths, samples=2, lengths=lengths)))
        assert ("a doubling adds" in text, "intervals" in text) == (slopes, slopes)
        assert ("sample size" in text, " n " in text) == (sizes, sizes)
        assert any(line.startswith("│") for line in text.splitlines())
        columns = [set(column) for column in zip(*(line.split("│")[1:-1] for line in _rows(text)), strict=True)]
        assert all(any(entry.strip() for entry in column) for column in columns), "no empty column"


def _rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("│")]


def test_what_was_trained_on_wrong_labels_or_on_short_sequences_is_said(tmp_path: Path) -> None:
    usual, *_ = made(tmp_path, bft={})
    noisy, _, model = made(tmp_path, bft={}, training={"label_noise": 0.4})
    write_checkpoint(noisy / "checkpoint" / "step-00000002", model, 0, {"label_noise": 0.4, "longest_trained": 8}, {})
    runs = traced(usual, noisy, samples=2, lengths=["1x", "2x"])
    assert [run.name for run in runs] == ["mamba2+bft", "mamba2+bft, label noise 0.4"]
    assert [(run.label_noise, run.longest_trained) for run in runs] == [(None, None), (0.4, 8)]
    text = " ".join(printed(Comparison(tmp_path, runs)).split())
    assert "│ mamba2+bft, label noise 0.4 │" in text
    assert "trained on shorter sequences only: mamba2+bft, label noise 0.4 (8)" in text
    assert "shorter" not in printed(Comparison(tmp_path, runs[:1]))
    titles = [gain_figure(run).get_suptitle().split(":")[0] for run in runs]
    assert titles == ["mamba2+bft on mqar capacity", "mamba2+bft, label noise 0.4, on mqar capacity"]
    marks = [[text.get_text() for text in gain_figure(run).axes[0].texts] for run in runs]
    assert marks == [["training length"], ["training length (8 reached)"]]
    for run, kept in zip(runs, Comparison(tmp_path, runs).plain()["runs"], strict=True):
        assert (kept.get("label_noise"), kept.get("longest_trained")) == (run.label_noise, run.longest_trained)


def test_the_command_prints_a_table_and_the_order_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Path] = []
    monkeypatch.setattr(precision, "draw_run", lambda run, folder: drawn.append(folder))
    monkeypatch.setattr(precision, "draw_comparison", lambda runs, folder: drawn.append(folder))
    task = {"name": "mqar-noisy", "train_length": T, "vocab_size": VOCAB}
    path, *_ = made(tmp_path, "attention", {}, task=task)
    words = ("precision", str(path), "--lengths", "1x, 2x", "--samples", "3", "--out", str(tmp_path / "out"))
    code, out, err = bench(*words)
    assert (code, err) == (0, "")
    assert "mqar-noisy capacity" in out and "attention+bft" in out
    assert out.count("tau of the sources: ") == 1 and "Kendall" in out
    assert out.endswith(f"figures and numbers in {tmp_path / 'out'}\n")
    assert drawn == 2 * [tmp_path / "out"]
    code, out, err = bench(*words, "--variant", "persist", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads((tmp_path / "out" / "precision.json").read_text())
    assert [run["variant"] for run in json.loads(out)["runs"]] == ["persist"]


def test_a_mistake_in_the_command_is_one_line(tmp_path: Path) -> None:
    path, *_ = made(tmp_path)
    for words, fragments in (
        ((), ("RUN",)),
        ((str(tmp_path / "nowhere"),), ("nowhere",)),
        ((str(path),), ("mamba2 has neither BFT nor a gate", "bench mqar --model mamba2 --bft")),
        ((str(path), "--samples", "many"), ("--samples", "many")),
    ):
        code, out, err = bench("precision", *words)
        assert (code, out) == (2, "")
        assert err.startswith("bench: ") and err.count("\n") == 1 and len(err) < 400
        assert all(fragment in err for fragment in fragments), err
