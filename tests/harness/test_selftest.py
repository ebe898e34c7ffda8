"""The self-test holds for what we ship, and each of its checks finds the bug that it is named after."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from decaybench.core import positions
from decaybench.core.positions import Layout
from decaybench.harness import invariances, selftest
from decaybench.harness.selftest import Check, small_config
from decaybench.models import language_model, module
from decaybench.models.addons import bft, post
from decaybench.models.language_model import LanguageModel
from decaybench.models.mixers import attention, mamba2
from decaybench.models.ops import scalar_decay
from decaybench.models.registry import architectures

RECURRENT = ("mamba2", "rwkv7", "gated_deltanet", "gla", "retnet")
POST, MINIMAL, BFT = {"post": {"variant": "paper"}}, {"post": {"variant": "minimal"}}, {"bft": {}}
CONFIGS = {
    **{name: (name, {}) for name in (*RECURRENT, "attention")},
    **{f"{name}+post": (name, POST) for name in RECURRENT},
    **{f"{name}+post-minimal": (name, MINIMAL) for name in RECURRENT},
    **{f"{name}+bft": (name, BFT) for name in (*RECURRENT, "attention")},
    **{f"{name}+post+bft": (name, POST | BFT) for name in RECURRENT},
}


def failed(checks: list[Check]) -> list[str]:
    return [
        f"{check.pitfall} {check.name}: {check.difference:g} > {check.bound:g}" for check in checks if not check.passed
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("cell", [cell for cell in CONFIGS if "bft" not in cell])
def test_every_invariance_holds(cell, dtype):
    checks = selftest.selftest(small_config(*CONFIGS[cell]), dtype=dtype)
    assert failed(checks) == []
    assert {check.pitfall for check in checks} == {*range(1, 18), 28}


@pytest.mark.parametrize("cell", [*(f"{name}+post+bft" for name in RECURRENT), "attention+bft"])
def test_every_invariance_holds_with_all_add_ons(cell):
    checks = selftest.selftest(small_config(*CONFIGS[cell]))
    assert failed(checks) == []
    assert {check.pitfall for check in checks} == {*range(1, 18), 28}


@pytest.mark.parametrize("cell", ["mamba2+post+bft", "rwkv7+bft", "attention+bft"])
def test_a_precision_rounds_no_worse_in_float32(cell):
    checks = selftest.selftest(small_config(*CONFIGS[cell]), dtype=torch.float32, pitfalls={7, 8, 9, 13})
    assert failed(checks) == []


@pytest.mark.parametrize("settings", [{"taper": "learned"}, {"control": "shuffled"}, {"reparameterize": False}])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_ablations_of_post_hold_too(settings, seed):
    config = small_config("mamba2", {"post": {"variant": "minimal", **settings}})
    config = config.model_copy(update={"tie_embeddings": False})
    assert failed(selftest.selftest(config, seed=seed, pitfalls={1, 3, 5, 6, 9, 11})) == []


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mamba2", {"precision": "mlp", "observation": "sample"}),
        ("attention", {"precision": "frozen"}),
        ("gla", {"reliability": False, "jacobian": "detached"}),
        ("retnet", {"gain": False, "jacobian": "none"}),
        ("gated_deltanet", {"control": "scalar_gate"}),
        ("attention", {"control": "sigmoid_gate"}),
    ],
    ids=str,
)
def test_the_ablations_of_bft_hold_too(name, settings):
    checks = selftest.selftest(small_config(name, {"bft": settings}), seed=1, pitfalls={3, 7, 12, 14, 15, 28})
    assert failed(checks) == []


# --- each known bug, put back in


@pytest.fixture
def bug(monkeypatch) -> Iterator[Callable]:
    """Puts `wrap(original)` in the place of a function."""

    def put(owner, name, wrap):
        monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))

    yield put


def without(**fields):
    """A layout that doesn't know of some things."""

    def wrap(of):
        return staticmethod(lambda *args, **kwargs: replace(of(*args, **kwargs), **fields))

    return wrap


def caught(*pitfalls: int, cell: str = "mamba2+post-minimal") -> set[int]:
    checks = selftest.selftest(small_config(*CONFIGS[cell]), pitfalls=set(pitfalls))
    return {check.pitfall for check in checks if not check.passed}


def test_finds_pads_that_enter_the_state(bug):
    bug(Layout, "of", without(valid=None))
    assert caught(1) == {1}


def test_finds_pads_between_tokens(bug):
    bug(language_model, "compaction", lambda original: lambda positions: None)
    assert caught(3, 9) == {3, 9}


def test_finds_a_mask_that_is_ignored_in_a_batch_of_one(bug):
    def wrap(of):
        def ignoring(p, **options):
            return of(p, **options) if len(p) > 1 else Layout.fresh(p.shape[1], p.device)

        return staticmethod(ignoring)

    bug(Layout, "of", wrap)
    assert caught(2, 3) == {2}


def test_finds_pads_that_are_kept_in_a_batch_of_one(bug):
    bug(language_model, "compaction", lambda original: lambda p: original(p) if len(p) > 1 else None)
    assert caught(2, 3) == {2}


def test_finds_positions_counted_from_the_padded_column(bug):
    def wrap(log_rate):
        return lambda self, p: log_rate(self, torch.arange(1, p.shape[1] + 1).expand(p.shape))

    bug(post.Spectrum, "log_rate", wrap)
    assert caught(5, 9, 11) == {5, 9, 11}


def test_finds_rows_that_share_positions(bug):
    def wrap(log_rate):
        return lambda self, p: log_rate(self, p.amax(0, keepdim=True).cummax(1).values.expand(p.shape))

    bug(post.Spectrum, "log_rate", wrap)
    assert caught(1, 9) == {1, 9}


def test_finds_tokens_seen_counted_with_the_pads(bug):
    def wrap(last_position):
        return lambda self, otherwise: torch.full_like(otherwise, self.positions.shape[1])

    bug(Layout, "last_position", wrap)
    assert caught(4, cell="mamba2") == {4}


def test_finds_a_position_that_is_lost_in_decode(bug):
    def wrap(log_rate):
        return lambda self, p: log_rate(self, p if p.shape[1] > 1 else torch.ones_like(p))

    bug(post.Spectrum, "log_rate", wrap)
    assert caught(5, 7) == {5, 7}


def test_finds_a_convolution_tail_that_is_dropped(bug):
    bug(mamba2, "conv_tail", lambda original: lambda *args: torch.zeros_like(original(*args)))
    assert caught(5, 6, 7, 11) == {5, 6, 7, 11}


def test_finds_a_state_that_is_dropped(bug):
    def wrap(original):
        return lambda *args, **kwargs: original(*args, **kwargs | {"initial_state": None})

    bug(mamba2, "scalar_decay", wrap)
    assert caught(6, 7) == {6, 7}


def test_finds_a_clamp_in_the_loop_alone(bug):
    def wrap(original):
        return lambda q, k, v, log_decay, **kwargs: original(q, k, v, log_decay.clamp(min=-10.0), **kwargs)

    bug(scalar_decay, "scalar_decay_recurrent", wrap)
    assert caught(8) == {8}


def test_finds_a_state_that_leaks_into_the_next_document(bug):
    bug(Layout, "of", without(resets=None, segments=None))
    assert caught(9, 6) == {9}
    assert caught(9, 6, cell="attention") == {9}


def test_finds_a_convolution_that_leaks_into_the_next_document(bug):
    bug(Layout, "see_back", lambda original: lambda self, lag: None)
    assert caught(9, cell="mamba2") == {9}


def test_finds_a_tail_of_an_earlier_document(bug):
    def wrap(original):
        def kept(inputs, layout, width):
            return original(inputs, replace(layout, positions=layout.positions.clamp(min=0) * 0 + width), width)

        return kept

    bug(mamba2, "conv_tail", wrap)
    assert caught(9, 6, cell="mamba2") == {9}


def test_finds_a_cache_of_an_earlier_document(bug):
    bug(attention, "_forget_earlier_documents", lambda original: lambda cached, layout: cached)
    assert caught(9, 6, cell="attention") == {9}


def test_finds_a_length_that_is_no_multiple_of_the_chunk(bug):
    def wrap(original):
        def rounded(q, k, v, log_decay, **kwargs):
            o, state = original(q, k, v, log_decay, **kwargs)
            whole = v.shape[1] // kwargs["chunk_size"] * kwargs["chunk_size"]
            return torch.cat([o[:, :whole], torch.zeros_like(o[:, whole:])], dim=1), state

        return rounded

    bug(scalar_decay, "scalar_decay_chunked", wrap)
    assert caught(10) == {10}


def test_finds_an_initial_state_without_a_gradient(bug):
    def wrap(original):
        def detached(*args, initial_state=None, **kwargs):
            return original(*args, initial_state=None if initial_state is None else initial_state.detach(), **kwargs)

        return detached

    bug(mamba2, "scalar_decay", wrap)
    checks = selftest.selftest(small_config("mamba2"), pitfalls={11})
    assert {check.name.endswith("gradients") for check in checks if not check.passed} == {True}


def test_finds_decays_in_bfloat16(bug):
    bug(mamba2.Mamba2, "float32_names", lambda original: frozenset())
    assert caught(12) == {12}


def test_finds_a_state_in_bfloat16(bug):
    def wrap(original):
        def narrowed(*args, **kwargs):
            o, state = original(*args, **kwargs)
            return o, None if state is None else state.bfloat16()

        return narrowed

    bug(mamba2, "scalar_decay", wrap)
    assert caught(12) == {12}


def test_finds_a_bfloat16_that_goes_wrong_after_most_of_a_row(bug):
    def wrap(original):
        def late(self, x):
            far = torch.arange(x.shape[1]) > 0.8 * x.shape[1]
            return original(self, x) * torch.where(far, 1.2, 1.0).to(x.dtype)[:, None]

        return lambda self, x: late(self, x) if x.dtype == torch.bfloat16 else original(self, x)

    bug(module.RMSNorm, "forward", wrap)
    assert caught(12) == {12}


def test_finds_autocast_inside_the_recurrence(bug):
    bug(scalar_decay, "scalar_decay_chunked", lambda original: original.__wrapped__)
    names = [c.name for c in selftest.selftest(small_config("mamba2"), pitfalls={12}) if not c.passed]
    assert names
    assert all("autocast" in name for name in names)


def test_finds_an_overflow(bug):
    bug(scalar_decay, "bounded_log_decay", lambda original: lambda x: torch.where(x < -20, -math.inf, x))
    assert 13 in caught(13)


def test_finds_a_look_ahead(bug):
    def wrap(original):
        def leaking(*args, **kwargs):
            o, state = original(*args, **kwargs)
            return o + 1e-6 * o.roll(-1, dims=1), state

        return leaking

    bug(mamba2, "scalar_decay", wrap)
    assert caught(13) == {13}


def test_finds_weight_decay_on_decays(bug):
    def everywhere(original):
        return lambda model, decay: [
            {"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": decay}
        ]

    bug(invariances, "parameter_groups", everywhere)
    assert caught(14) == {14}


def test_finds_a_value_that_nobody_draws(bug):
    bug(mamba2.Mamba2, "initialise", lambda original: lambda self, draws_for: None)
    assert caught(15) == {15}


def test_finds_initial_values_that_loading_overwrites(bug):
    def wrap(original):
        def reset(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            module.initialise(self, 5)
            return result

        return reset

    bug(LanguageModel, "load_state_dict", wrap)
    assert caught(15) == {15}


def test_finds_initial_values_drawn_in_bfloat16(bug):
    def wrap(original):
        def narrow(parameter, low, high, draws):
            drawn = torch.empty(parameter.shape, dtype=parameter.dtype).uniform_(low, high, generator=draws)
            parameter.copy_(drawn)

        return narrow

    bug(module, "uniform_", wrap)
    assert caught(16) == {16}


def test_finds_a_precision_that_leaks_into_the_next_document(bug):
    def wrap(original):
        def leaking(*args, layout, **kwargs):
            return original(*args, layout=replace(layout, resets=None, segments=None), **kwargs)

        return leaking

    bug(bft, "decayed_moments", wrap)
    assert caught(1, 9, cell="mamba2+bft") == {9}


def test_finds_moments_that_are_dropped(bug):
    def wrap(original):
        return lambda *args, initial_state=None, **kwargs: original(*args, initial_state=None, **kwargs)

    bug(bft, "decayed_moments", wrap)
    assert caught(7, 11, cell="gla+bft") == {7, 11}


def test_finds_precisions_of_pads_that_count(bug):
    def wrap(original):
        def counting(*args, layout, **kwargs):
            return original(*args, layout=replace(layout, valid=None), **kwargs)

        return counting

    bug(bft, "decayed_moments", wrap)
    assert caught(1, 4, cell="retnet+bft") == {1}


def test_finds_a_precision_in_bfloat16(bug):
    bug(bft.InitialPrecision, "float32_names", lambda original: frozenset())
    checks = selftest.selftest(small_config("mamba2", BFT), pitfalls={12})
    assert "bfloat16 model: parameters of decays and precision below float32, of 6" in {
        check.name for check in checks if not check.passed
    }


def test_finds_precisions_cached_in_bfloat16(bug):
    def wrap(original):
        return lambda lbar=None, **kwargs: original(lbar=lbar.bfloat16(), **kwargs)

    bug(bft, "SourceState", wrap)
    broken = {
        check.name for check in selftest.selftest(small_config("attention", BFT), pitfalls={12}) if not check.passed
    }
    assert broken == {"bfloat16 model: states below float32, of 2", "autocast: states below float32, of 2"}


def test_finds_a_precision_without_end(bug):
    bug(bft, "LOG_LARGEST", lambda original: math.inf)
    assert caught(8, 13, cell="attention+bft") == {13}


def test_finds_a_state_of_a_size_that_grows(bug):
    bug(mamba2, "conv_tail", lambda original: lambda inputs, layout, width: inputs)
    assert caught(28, cell="mamba2") == {28}


def test_finds_more_kept_than_the_moments(bug):
    def wrap(original):
        return lambda lbar=None, **kwargs: original(lbar=None if lbar is None else lbar.repeat(1, 2), **kwargs)

    bug(bft, "SourceState", wrap)
    checks = selftest.selftest(small_config("attention", BFT), pitfalls={28})
    assert [check.passed for check in checks] == [True, False, False]


def test_finds_a_division_by_one_head_less(bug):
    bug(
        post.TaperedSpectrum,
        "_ordered_tapers",
        lambda original: lambda self: torch.zeros(len(self.deltas) + 1) / len(self.deltas),
    )
    assert caught(17) == {17}


# --- how it is shown


def test_nan_and_infinity_fail():
    assert Check(1, "x", 1e-9, 1e-9).passed
    assert not Check(1, "x", math.nan, 1e-9).passed
    assert not Check(1, "x", math.inf, 1e-9).passed


def test_a_check_that_cannot_be_carried_out_fails_and_says_why(bug):
    def wrap(original):
        def broken(*args, **kwargs):
            raise RuntimeError("no kernel\nfor this device")

        return broken

    bug(mamba2, "scalar_decay", wrap)
    checks = selftest.selftest(small_config("mamba2"), pitfalls={1, 10})
    assert [(check.pitfall, check.difference) for check in checks] == [(1, math.inf), (10, math.inf)]
    assert checks[0].name == "left padding: no kernel for this device"


def test_results_by_model_are_tabled_and_plain(monkeypatch):
    from rich.console import Console

    checks = [Check(9, "packing [x]", 0.5, 1e-9), Check(1, "padding", 1e-15, 1e-9), Check(2, "odd", math.inf, 0)]
    monkeypatch.setattr(selftest, "selftest", lambda config, **options: checks)
    results = selftest.check_models("all")
    assert list(results)[:2] == ["mamba2 float64", "mamba2 float32"]
    assert {name.split()[0] for name in results} == set(CONFIGS)
    for addons, cells in {
        ("post",): ("mamba2+post", "mamba2+post-minimal"),
        ("bft",): ("mamba2+bft",),
        ("bft", "post"): ("mamba2+post+bft", "mamba2+post-minimal+bft"),
    }.items():
        wanted = [f"{cell} {dtype}" for cell in cells for dtype in ("float64", "float32")]
        assert list(selftest.check_models("mamba2", addons)) == wanted
    console = Console(width=120, record=True, file=io.StringIO())
    (drawn,) = selftest.tables({"mamba2": checks})
    console.print(drawn)
    lines = [line for line in console.export_text().splitlines() if "holds" in line or "BROKEN" in line]
    assert ["holds" in lines[0], "BROKEN" in lines[1], "BROKEN" in lines[2]] == [True] * 3, "by the pitfall's number"
    assert "packing [x]" in lines[2]
    assert "1.0e-15" in lines[0]
    assert drawn.caption == "mamba2: 2 of 3 checks broken"
    shown = json.loads(json.dumps(selftest.plain({"mamba2": checks}), allow_nan=False))
    assert [row["passed"] for row in shown] == [False, True, False]
    assert shown[2]["difference"] is None


def test_a_cell_is_shown_as_soon_as_it_is_checked(monkeypatch):
    order = []

    def checks(config, **options):
        order.append(config.cell)
        held = config.cell != "mamba2+post-minimal"
        return [Check(9, "packing [x]", 0.0 if held else math.inf, 1e-9), Check(2, "odd", 0.0 if held else 0.25, 0.0)]

    monkeypatch.setattr(selftest, "selftest", checks)
    results = selftest.check_models("mamba2", ["post"], show=order.append)
    broken = [
        "mamba2+post-minimal: 4 of 4 checks broken",
        "  float64, pitfall 2, odd: 2.5e-01, bound 0",
        "  float32, pitfall 2, odd: 2.5e-01, bound 0",
        "  float64, pitfall 9, packing [x]: inf, bound 1e-09",
        "  float32, pitfall 9, packing [x]: inf, bound 1e-09",
    ]
    post, minimal = ["mamba2+post"] * 2, ["mamba2+post-minimal"] * 2
    assert order == [*post, "mamba2+post: all 4 checks hold (float64, float32)", *minimal, "\n".join(broken)]
    assert list(results) == [f"{cell} {dtype}" for cell in (post[0], minimal[0]) for dtype in ("float64", "float32")]
    shown = []
    selftest.check_models("mamba2", show=shown.append)
    selftest.check_models("mamba2", ["post"], verbose=True, show=shown.append)
    assert [table.title.split()[0] for table in shown] == ["mamba2"] * 2 + post + minimal


def test_post_needs_decays():
    from decaybench.core.errors import UserError

    with pytest.raises(UserError, match="post needs a mixer with decays; attention has none"):
        selftest.check_models("attention", ["post"])


def test_the_machines_threads_are_given_back():
    before = torch.get_num_threads()
    selftest.selftest(small_config("mamba2"), pitfalls={14})
    assert torch.get_num_threads() == before


def test_check_positions_is_the_models_own():
    assert language_model.check_positions is positions.check_positions


def test_all_with_an_addon_named_are_the_cells_that_have_it(monkeypatch):
    monkeypatch.setattr(selftest, "CHECKS", {})
    cells = {key.split()[0] for key in selftest.check_models("all", ["bft"])}
    assert cells == {f"{name}+bft" for name in architectures()}
    both = {key.split()[0] for key in selftest.check_models("all", ["post", "bft"])}
    assert "attention+bft" in both
    assert {"mamba2+post+bft", "mamba2+post-minimal+bft"} <= both
    assert not any(cell in both for cell in ("mamba2", "mamba2+post", "mamba2+bft"))


def test_float32_is_tested_on_values_that_it_can_hold(monkeypatch):
    """GLA with BFT at seed 0: rounding its parameters alone moves its gradient by as much as the bound."""
    config, steady = small_config(*CONFIGS["gla+bft"]), small_config(*CONFIGS["mamba2"])
    subject = invariances.Subject(config, torch.float64, 0, "cpu")
    assert invariances._sensitivity(subject) > invariances._STEADY
    found = invariances.steady_seed(config, 0, "cpu")
    assert found > 0 and invariances.steady_seed(config, found, "cpu") == found
    assert invariances.steady_seed(steady, 3, "cpu") == 3
    assert failed(selftest.selftest(config, dtype=torch.float32, pitfalls={9})) == []

    def broken(*arguments, **settings):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(LanguageModel, "forward", broken)
    assert invariances.steady_seed(config, 0, "cpu") == 0
