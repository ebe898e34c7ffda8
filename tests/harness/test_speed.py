"""`bench speed`: what it counts and how it compares. No test asserts how fast anything is."""

from __future__ import annotations

import gc
import io
import json
import math
import random
import statistics

import pytest
import torch
from jsonschema import Draft202012Validator
from rich.console import Console
from torch.nn import functional as F

from decaybench.core.errors import RunError, UserError
from decaybench.harness import peers, speed, stopwatch
from decaybench.harness.speed import make_shape, measure_speed, speed_configs, without_addons
from decaybench.harness.speed_report import SpeedReport
from decaybench.harness.stopwatch import in_turn, matrix_flops, middle, peak_growth, ratio
from decaybench.models.registry import architectures

TINY = ("batch=2", "length=16", "d_model=16", "vocab_size=32", "n_layers=1", "mixer.d_state=4", "mixer.headdim=8")


# --- the stopwatch


def test_actions_are_taken_in_turn_and_the_order_turns_round(monkeypatch):
    monkeypatch.setattr(stopwatch, "_SHORTEST", 0.0)
    said: list[str] = []
    seconds = in_turn({name: lambda name=name: said.append(name) for name in "abc"}, 4)
    assert "".join(said) == "aabbcc" + "abc" + "cba" + "abc" + "cba"
    assert {name: len(found) for name, found in seconds.items()} == {"a": 4, "b": 4, "c": 4}
    assert all(second > 0 for found in seconds.values() for second in found)


def test_short_actions_are_called_often_and_divided(monkeypatch):
    clock = iter(x * 0.5 for x in range(10_000))  # every look at the clock is half a second after the last
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(stopwatch, "_SHORTEST", 4.9)
    calls: list[int] = []
    assert in_turn({"": lambda: calls.append(1)}, 3) == {"": [0.05] * 3}
    assert len(calls) == 2 + 3 * 10


def test_the_garbage_collector_rests_and_comes_back():
    rested: list[bool] = []
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        in_turn({"": lambda: rested.append(gc.isenabled()) or (len(rested) > 4 and 1 / 0)}, 6)
    assert rested[2:] == [False] * len(rested[2:])
    assert gc.isenabled()


def test_ratios_are_those_of_pairs():
    drift = [1.0, 5.0, 0.2, 3.0, 11.0, 0.7, 2.0]  # another program comes and goes: medians alone would say 1
    base = drift
    slower = [1.1 * second for second in drift]
    found = ratio(slower, base)
    assert (found.value, found.low, found.high) == pytest.approx((1.1, 1.1, 1.1))
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        ratio(slower, base[1:])


# From Conover, Practical Nonparametric Statistics, and any table of the sign test: the ranks for 95 %.
@pytest.mark.parametrize(("n", "rank"), [(6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (15, 4), (17, 5), (20, 6), (25, 8)])
def test_the_interval_of_a_median_is_that_of_the_sign_test(n, rank):
    values = list(range(1, n + 1))
    random.Random(n).shuffle(values)
    assert middle(values) == (statistics.median(values), rank, n + 1 - rank)


def test_the_interval_covers_the_median_as_often_as_it_says():
    draws = random.Random(0)
    inside = 0
    for _ in range(2000):
        found = middle([draws.expovariate(1.0) for _ in range(12)])
        inside += found.low <= math.log(2) <= found.high
    assert 0.95 <= inside / 2000 <= 0.98  # 0.961 by the binomial law


def test_too_few_values_have_no_interval():
    with pytest.raises(ValueError, match="5 values"):
        middle([1.0] * 5)


needs_proc = pytest.mark.skipif(not stopwatch._RESET.exists(), reason="peak memory is read from Linux's /proc")


@needs_proc
def test_peak_memory_sees_what_is_allocated_and_freed_again():
    def allocate() -> float:
        return float(torch.ones(50_000_000).sum())  # 200 MB

    allocate()
    for _ in range(2):  # the second time the allocator may have it at hand
        assert 195e6 < peak_growth(allocate) < 215e6


@needs_proc
def test_peak_memory_is_that_of_the_action_alone():
    held = torch.ones(25_000_000)
    assert peak_growth(lambda: held.sum()) < 20e6


def test_peak_memory_that_nobody_can_say_is_absent(monkeypatch, tmp_path):
    monkeypatch.setattr(stopwatch, "_RESET", tmp_path / "none" / "clear_refs")
    assert peak_growth(lambda: None) is None


def test_flops_of_products_are_two_a_multiply_add():
    a, b = torch.randn(3, 20, 30), torch.randn(3, 30, 40)
    assert matrix_flops(lambda: a @ b) == 2 * 3 * 20 * 30 * 40
    out = torch.empty(3, 20, 40)
    assert matrix_flops(lambda: torch.bmm(a, b, out=out)) == 2 * 3 * 20 * 30 * 40
    assert matrix_flops(lambda: out.baddbmm_(a, b)) == 2 * 3 * 20 * 30 * 40
    assert matrix_flops(lambda: out[0].addmm_(a[0], b[0])) == 2 * 20 * 30 * 40
    assert matrix_flops(lambda: a + 1) == 0


def test_flops_of_a_backward_pass_are_counted():
    weight, x = torch.randn(40, 30, requires_grad=True), torch.randn(20, 30, requires_grad=True)
    assert matrix_flops(lambda: F.linear(x, weight).sum().backward()) == 3 * 2 * 20 * 30 * 40


# --- what is measured


def test_a_family_is_its_base_then_its_add_ons():
    shape = make_shape("wide", ["batch=4"])
    ((base, paper, minimal, bft, both),) = speed_configs("mamba2", shape, ["bft", "post"])
    assert [config.cell for config in (base, paper, minimal)] == ["mamba2", "mamba2+post", "mamba2+post-minimal"]
    assert [config.cell for config in (bft, both)] == ["mamba2+bft", "mamba2+post+bft"]
    assert base.mixer.plain() == paper.mixer.plain()
    assert (base.vocab_size, base.d_model, base.mixer.d_state, base.mixer.headdim) == (8192, 128, 64, 32)
    assert paper.post.horizon == both.post.horizon == 256
    for addons, cells in {
        (): [["mamba2"], ["attention"]],
        ("bft",): [["mamba2", "mamba2+bft"], ["attention", "attention+bft"]],
        ("post",): [["mamba2", "mamba2+post", "mamba2+post-minimal"], ["attention"]],
    }.items():
        found = speed_configs("mamba2, attention", shape, addons)
        assert [[config.cell for config in family] for family in found] == cells


def test_an_addon_that_nothing_takes_is_refused() -> None:
    shape = make_shape("smoke")
    with pytest.raises(UserError, match="post needs a mixer with decays; attention has none"):
        speed_configs("attention", shape, ["post"])
    cells = {config.cell for family in speed_configs("all", shape, ["bft"]) for config in family}
    assert {"mamba2+bft", "attention+bft"} <= cells
    assert not any("post" in cell for cell in cells)


def test_all_is_every_architecture_with_every_add_on():
    families = {family[0].name: len(family) for family in speed_configs("all", make_shape("smoke"))}
    gates = {name: len(known.gates) for name, known in architectures().items()}  # another one without PoST is a cell
    wanted = {name: 4 + gates[name] if "post" in known.addons else 2 for name, known in architectures().items()}
    assert families == wanted


MAMBAS = ["mamba2", "mamba2+post", "mamba2+post-minimal", "mamba2+bft", "mamba2+post+bft"]


@pytest.fixture(scope="module")
def report() -> SpeedReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopwatch, "_SHORTEST", 0.0)
        patch.setattr(stopwatch, "_PEAK_SIZES", {"cpu": (64,)})
        patch.setattr(speed, "_LONG_PREFILLS", (64, 5000))
        patch.setattr(speed, "_LONG_DECODES", (8, 64))
        return measure_speed(
            "mamba2,attention",
            ["post", "bft"],
            settings=TINY,
            peers=False,
            long=True,
            repeats=7,
            device="cpu",
            threads=1,
        )


def test_every_cell_is_measured_at_everything(report):
    assert [cell.cell for cell in report.cells] == [*MAMBAS, "attention", "attention+bft"]
    for cell in report.cells:
        assert [(work.what, work.tokens) for work in cell.work] == [
            ("train", 32),
            ("prefill", 32),
            ("decode", 1),
            ("decode_batch", 2),
        ]
        for work in cell.work:
            assert len(work.seconds) == report.repeats == 7
            assert work.tokens_per_second == pytest.approx(work.tokens / sorted(work.seconds)[3])
            assert work.flops_per_second == pytest.approx(work.flops / sorted(work.seconds)[3])


def test_flops_of_a_model_are_those_of_its_products(report):
    base = report.cells[0]
    d, inner, heads, state, tokens, labels = 16, 32, 4, 4, 32, 2 * 2
    projections = 2 * tokens * (d * (2 * inner + 2 * state + heads) + inner * d)
    head = 2 * d * 32
    # The recurrence of one chunk of 16 tokens: scores, then values by weights; for a state, keys by values beside.
    inside = 2 * tokens * 16 * (state + inner)
    norms = 2 * tokens * (inner + 2 * d)  # one product in each norm's gradient
    assert base.of("train").flops == 3 * (projections + inside + labels * head) + norms
    assert base.of("prefill").flops == projections + inside + 2 * tokens * state * inner + 2 * head


def test_add_ons_are_measured_beside_the_same_gate_without_them():
    def cell(config):
        return None if config is None else config.cell

    (family,) = speed_configs("retnet", make_shape("smoke"), ["post", "bft"])
    assert {config.cell: cell(without_addons(config)) for config in family} == {
        "retnet": None,
        "retnet+post": "retnet+post-unordered-static",
        "retnet+post-minimal": "retnet",
        "retnet+bft": "retnet",
        "retnet+post+bft": "retnet+post-unordered-static",
        "retnet+post-unordered-static": "retnet",
    }
    (family,) = speed_configs("rwkv7", make_shape("smoke"), ["post"])
    assert [cell(without_addons(config)) for config in family] == [None, "rwkv7", "rwkv7"]


def test_overheads_are_the_ratios_of_the_times_given(report):
    bases = {cell.cell: cell for cell in report.cells if cell.base is None}
    assert list(bases) == ["mamba2", "attention"]
    for cell in report.cells:
        for work in cell.work:
            if cell.base is None:
                assert work.overhead is work.memory_ratio is None
                continue
            of_base = bases[cell.base].of(work.what)
            pairs = sorted(a / b for a, b in zip(work.seconds, of_base.seconds, strict=True))
            assert (work.overhead.median, work.overhead.low, work.overhead.high) == (pairs[3], pairs[0], pairs[6])
            assert work.memory_ratio == (work.peak_bytes / of_base.peak_bytes if of_base.peak_bytes else None)


def test_long_inputs_are_for_recurrent_models(report):
    assert [found.cell for found in report.long] == MAMBAS
    for found in report.long:
        assert [prefill.tokens for prefill in found.prefill] == [64, 5000]
        assert all(prefill.seconds > 0 for prefill in found.prefill)
        few, many = found.decode
        assert (few.tokens, many.tokens) == (8, 64)
        pairs = [a / b for a, b in zip(many.seconds, few.seconds, strict=True)]
        assert found.decode_ratio.median == statistics.median(pairs)


def test_the_report_is_json_with_every_field_described(report):
    data = json.loads(json.dumps(report.plain()))
    schema = SpeedReport.model_json_schema()
    Draft202012Validator(schema).validate(data)
    assert SpeedReport.model_validate(data).plain() == report.plain()
    for part in [schema, *schema["$defs"].values()]:
        assert part["description"]
        assert all("description" in field for field in part.get("properties", {}).values())
    assert data["environment"]["threads"] == 1


def test_the_tables_name_what_was_measured(report):
    screen = io.StringIO()
    for table in report.tables():
        Console(file=screen, width=200).print(table)
    shown = screen.getvalue()
    for words in (
        "mamba2+post-minimal",
        "of peak",
        "with add-ons / without",
        "mamba2+post+bft",
        "prefill 5,000",
        "threads: 1",
        "medians of 7",
    ):
        assert words in shown


def test_threads_come_back_as_they_were():
    before = torch.get_num_threads()
    with speed._threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"model": "mamba3"}, "unknown model 'mamba3'; did you mean 'mamba2'?"),
        ({"shape": "smok"}, "unknown shape 'smok'; did you mean 'smoke'?"),
        ({"repeats": 5}, "--repeats 5"),
        ({"threads": 0}, "--threads 0"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"settings": ["batc=3"]}, "unknown key 'batc'"),
        ({"settings": ["op.lenght=3"]}, "unknown key 'op.lenght' (value 3); did you mean 'length'?"),
        ({"settings": ["length=0"]}, "length=0"),
        ({"settings": ["mixer.d_stat=3"]}, "unknown size of a mixer 'd_stat'; did you mean 'd_state'?"),
        ({"settings": ["mixer.headdim=7"]}, "mixer.headdim=7 must divide"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(wrong, says):
    with pytest.raises(UserError) as refused:
        measure_speed(**{"peers": False, "threads": 1, "device": "cpu", **wrong})
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


# --- peers


def test_peers_that_are_not_installed_are_named(monkeypatch):
    monkeypatch.setattr(peers, "_version", lambda package: None)
    assert peers.missing() == ["transformers", "flash-linear-attention"]
    assert peers.op_peers("mamba2", peers.OpShape(), "cpu") is None


def test_a_peer_that_computes_something_else_is_refused():
    with pytest.raises(RunError, match=r"theirs computes something else than we do: 2\.0e-02"):
        speed._must_agree({"mine": 1e-6, "theirs": 0.02})
    with pytest.raises(RunError):
        speed._must_agree({"theirs": math.nan})


def test_a_peer_is_chosen_and_compared(monkeypatch):
    """An op that is its own peer, one form of it exact and one half of it."""
    shape = peers.OpShape(batch=1, length=8, heads=2, d_key=4, d_value=4)
    monkeypatch.setattr(stopwatch, "_SHORTEST", 0.0)
    monkeypatch.setattr(peers, "_version", lambda package: "1.0")
    name, make, ours, _ = peers._OPS["mamba2"]
    bench = speed._Bench(make_shape("smoke").model_copy(update={"op": shape}), 6, "cpu", speed.Progress(quiet=True))
    monkeypatch.setitem(peers._OPS, "mamba2", (name, make, ours, lambda shape: {"same": ours}))
    (found,) = bench.op("mamba2")
    assert (found.op, found.peer, found.difference) == ("scalar_decay", "flash-linear-attention 1.0, same", 0)
    pairs = sorted(a / b for a, b in zip(found.peer_seconds, found.our_seconds, strict=True))
    assert (found.times_faster.low, found.times_faster.high) == (pairs[0], pairs[-1])
    monkeypatch.setitem(peers._OPS, "mamba2", (name, make, ours, lambda shape: {"half": lambda x: ours(x) / 2}))
    with pytest.raises(RunError, match="half computes something else"):
        bench.op("mamba2")


@pytest.mark.parity
@pytest.mark.parametrize("architecture", ["mamba2", "retnet", "gla", "gated_deltanet", "rwkv7"])
def test_flash_linear_attentions_forms_compute_what_ours_do(architecture):
    found = peers.op_peers(architecture, peers.OpShape(batch=2, length=64, heads=2, d_key=8, d_value=4), "cpu")
    if found is None:
        pytest.skip("flash-linear-attention is not installed")
    want = found.ours(found.inputs)
    assert found.peers
    for form in found.peers.values():
        assert float((form(found.inputs) - want).abs().max()) < 1e-5 * float(want.abs().max())


@pytest.mark.parity
def test_transformers_is_measured_with_our_weights_and_our_head(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(stopwatch, "_SHORTEST", 0.0)
    monkeypatch.setattr(stopwatch, "_PEAK_SIZES", {"cpu": (64,)})
    report = measure_speed("mamba2", settings=(*TINY, "op.length=32", "op.batch=1"), repeats=6, device="cpu", threads=1)
    trained = [peer for peer in report.peers if peer.what == "train"]
    assert any("(default)" in peer.peer for peer in trained)
    assert all(peer.difference < 1e-5 for peer in trained)
    assert {peer.what for peer in report.peers} >= {"train", "prefill"}
