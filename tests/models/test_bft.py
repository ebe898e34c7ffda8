"""Models with BFT: what its switches do, what leaves it alone, and that nothing in it runs away."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.core.positions import Layout
from decaybench.models import registry
from decaybench.models.addons.bft import BftConfig, KalmanObserver
from decaybench.models.branch import Context
from decaybench.models.config import PRESETS, ModelConfig, preset
from decaybench.models.language_model import build_model
from decaybench.models.module import treatments
from decaybench.models.state import tensors
from tests.models import small
from tests.models.small import largest

LEAST, MOST = math.exp(-6), math.exp(6)
POST = {"horizon": 16}
CELLS = {name: (name, {"ffn": {}}) for name in small.SIZES}
CELLS |= {f"{name}+post": (name, {"post": POST}) for name in small.SIZES if name != "attention"}
CELLS["attention-conv"] = "attention", {"mixer": {"conv_width": 4}}


def model(cell, bft=None, **options):
    name, settings = CELLS[cell]
    return small.model(name, **(settings | options), bft={} if bft is None else bft)


@pytest.fixture(params=CELLS)
def cell(request):
    return request.param


def parameters(built):
    return sum(parameter.numel() for parameter in built.parameters())


def variances(built):
    """What each block hands on as P, filled by every later pass."""
    seen = []
    for block in built.blocks:
        block.register_forward_hook(lambda module, args, output: seen.append(output[0].variance.detach()))
    return seen


def bounded(found):
    return all(bool(((P >= LEAST * (1 - 1e-6)) & (P <= MOST * (1 + 1e-6))).all()) for P in found)


# Nothing but an add-on.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_precision_and_gain_it_is_the_plain_model_bit_for_bit(cell, dtype):
    """Outputs, and gradients of all parameters: precision frozen at 1, K at 1."""
    check_plain(cell, dtype, {"precision": "frozen", "gain": False})


def test_with_no_uncertainty_it_is_the_plain_model_bit_for_bit(cell, monkeypatch):
    """K = 1 by itself where R = 0."""
    found = KalmanObserver.variance
    monkeypatch.setattr(KalmanObserver, "variance", lambda self, weight: torch.zeros_like(found(self, weight)))
    check_plain(cell, torch.float32, {"precision": "frozen"})


def check_plain(cell, dtype, bft):
    name, settings = CELLS[cell]
    plain = small.model(name, **settings)
    with_bft = build_model(small.config(name, **settings, bft=bft)).double()
    with_bft.load_state_dict(plain.state_dict())
    tokens, positions = small.tokens(2, 37), torch.arange(1, 38).repeat(2, 1)
    positions[1] = torch.tensor([0, 0, *range(1, 20), *range(1, 11), 0, *range(11, 16)])
    logits = []
    for built in (plain.to(dtype), with_bft.to(dtype)):
        logits.append(built(tokens, positions).logits[positions > 0])
        logits[-1].square().sum().backward()
    assert torch.equal(*logits)
    for (key, one), other in zip(plain.named_parameters(), with_bft.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), key
        assert one.grad is None or torch.equal(one.grad, other.grad), key


def test_what_it_shares_with_the_plain_model_starts_at_the_same_values(cell):
    name, settings = CELLS[cell]
    plain = build_model(small.config(name, **settings)).state_dict()
    for bft in ({}, {"precision": "mlp"}, {"control": "scalar_gate"}, {"control": "sigmoid_gate"}):
        with_it = build_model(small.config(name, **settings, bft=bft)).state_dict()
        assert all(torch.equal(with_it[key], value) for key, value in plain.items())
        added = with_it.keys() - plain.keys()
        assert added
        assert all(key.startswith("precision.") or ".residual." in key for key in added)


@pytest.mark.parametrize("log_tau", [-2.0, 3.0])
def test_a_constant_precision_weighs_all_tokens_alike(cell, log_tau):
    """In float32: writes and softmax weights are those of the plain model."""
    name, settings = CELLS[cell]
    plain = small.model(name, noise=0.1, **settings, n_layers=1)
    same = build_model(small.config(name, **settings, n_layers=1, bft={"gain": False})).double()
    same.load_state_dict(plain.state_dict(), strict=False)
    same.precision.log_tau.data.fill_(log_tau)
    tokens = small.tokens(2, 40)
    want = plain.float()(tokens).logits
    assert largest(same.float()(tokens).logits, want) < 2e-6 * float(want.abs().max().detach())


# Positions say it all, here too.


DOCUMENTS = [small.tokens(length, seed=length) for length in (9, 1, 5, 12)]


def laid_out():
    """Three documents in a row with padding before, between and inside them; one after padding; nothing at all.

    tokens, positions [3, 20], and the document of each real token, in order.
    """
    tokens, positions = small.tokens(3, 20), torch.zeros(3, 20, dtype=torch.long)
    columns = [[1, 2, 3, 5, 6, 7, 8, 9, 11], [12], [13, 14, 17, 18, 19]]
    for document, places in zip(DOCUMENTS, columns, strict=False):
        tokens[0, places], positions[0, places] = document, torch.arange(1, len(document) + 1)
    tokens[1, 8:], positions[1, 8:] = DOCUMENTS[3], torch.arange(1, 13)
    return tokens, positions


@torch.no_grad()
def test_padding_packing_pieces_and_steps_leave_it_alone(cell):
    built = model(cell)
    alone = [built(document[None]).logits[0] for document in DOCUMENTS]
    tokens, positions = laid_out()
    following = small.tokens(3, seed=7)
    extended = [torch.cat([DOCUMENTS[2], following[:1]]), torch.cat([DOCUMENTS[3], following[1:2]]), following[2:3]]
    after = torch.stack([built(document[None]).logits[0, -1] for document in extended])
    for piece in (1, 7, 20):
        state, parts = None, []
        for start in range(0, 20, piece):
            cut = slice(start, start + piece)
            output = built(tokens[:, cut], positions[:, cut], state, output_state=True)
            state = output.state
            parts.append(output.logits)
        logits = torch.cat(parts, dim=1)
        assert logits.isfinite().all()
        assert largest(logits[0, positions[0] > 0], torch.cat(alone[:3])) < 1e-10
        assert largest(logits[1, positions[1] > 0], alone[3]) < 1e-10
        assert state.seen.tolist() == [5, 12, 0]
        assert largest(built.step(following, state).logits, after) < 1e-10
        picked = built.step(following[[1, 0]], state.select(torch.tensor([1, 0]))).logits
        assert largest(picked, after[[1, 0]]) < 1e-10


def test_rows_of_padding_alone_give_no_nan(cell):
    """Also in gradients, and where somebody asks for their logits."""
    built = model(cell).float()
    tokens, positions = laid_out()
    built(tokens, positions).logits.square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in built.parameters())


def test_the_state_grows_by_the_sources(cell):
    name, settings = CELLS[cell]
    plain, with_bft = small.model(name, **settings), model(cell)
    tokens = small.tokens(3, 7)
    counts = [built(tokens, output_state=True).state.elements() for built in (plain, with_bft)]
    mixer = with_bft.blocks[0].mixer
    V = mixer.out_proj.weight.shape[1] // mixer.heads
    more = 7 if name == "attention" else mixer.heads * (2 * V + 3)
    assert [b - a for a, b in zip(*counts, strict=True)] == [more, more]


def test_no_output_before_a_token_depends_on_it(cell):
    built, tokens = model(cell), small.tokens(1, 20)
    before = built(tokens).logits
    for t in (0, 7, 19):
        changed = tokens.clone()
        changed[0, t] = (tokens[0, t] + 5) % 31
        after = built(changed).logits
        assert torch.equal(after[:, :t], before[:, :t])
        assert largest(after[:, t], before[:, t]) > 1e-6


def test_the_precision_of_a_token_reaches_later_tokens_by_their_weights(cell):
    """With the gain off nothing else can carry it there."""
    built = model(cell, {"gain": False})
    tokens = torch.arange(12)[None]
    before = built(tokens).logits
    built.precision.log_tau.data[5] += 1.0
    after = built(tokens).logits
    assert torch.equal(after[:, :5], before[:, :5])
    assert float((after - before)[:, 6:].detach().abs().amax(-1).min()) > 1e-6


# Gradients of whole models.


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "mlp", "observation": "sample", "nu0": 3.0}, {"jacobian": "none", "gain": False}],
    ids=str,
)
def test_gradients_are_finite_differences(cell, options):
    """Along a random direction of all parameters at once."""
    name, settings = CELLS[cell]
    if "jacobian" in options and "ffn" not in settings:
        options = {"process_noise": False, "gain": False}
    built, tokens = small.model(name, noise=0.1, **settings, bft=options), small.tokens(2, 11)
    draws = torch.Generator().manual_seed(3)
    weigh = torch.randn(2, 11, 31, generator=draws, dtype=torch.float64)
    chosen = [p for p in built.parameters() if p.requires_grad]
    direction = [torch.randn(p.shape, generator=draws, dtype=torch.float64) for p in chosen]

    def loss():
        return (weigh * built(tokens).logits).sum()

    along = sum(float((d * g).sum()) for d, g in zip(direction, torch.autograd.grad(loss(), chosen), strict=True))
    values = []
    with torch.no_grad():
        for step in (1e-7, -2e-7):
            for p, d in zip(chosen, direction, strict=True):
                p += step * d
            values.append(float(loss()))
    assert (values[0] - values[1]) / 2e-7 == pytest.approx(along, rel=1e-5)


def test_every_added_parameter_has_a_gradient(cell):
    built = model(cell, {"precision": "token"}, n_layers=3)
    built(small.tokens(2, 20)).logits.square().sum().backward()
    added = {key: p.grad for key, p in built.named_parameters() if key.startswith("precision.") or ".residual." in key}
    assert added.keys() == {"precision.log_tau", "blocks.0.residual.q", "blocks.1.residual.q"}
    assert all(float(grad.abs().max()) > 1e-9 for grad in added.values())


# Nothing runs away.


THIN = {
    "mamba2": {"d_state": 4, "headdim": 4, "expand": 1},
    "rwkv7": {"head_dim": 4},
    "gated_deltanet": {"n_heads": 2, "head_dim": 4},
    "gla": {"n_heads": 2},
    "retnet": {"n_heads": 2, "expand_v": 1.0},
    "attention": {"n_heads": 2},
}


def thin(name, n_layers, *, noise=0.0, **settings):
    """Float32, 8 channels, near its initial values or moved away."""
    built = build_model(small.config(name, THIN[name], n_layers=n_layers, d_model=8, bft={}, **settings))
    draws = torch.Generator().manual_seed(1)
    for parameter in built.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=draws)
    return built


def finite_gradients(built):
    return all(p.grad is not None and bool(p.grad.isfinite().all()) for p in built.parameters())


@pytest.mark.parametrize(
    ("name", "noise", "ffn"), [*((name, 0.3, {}) for name in THIN), *((name, 0.0, None) for name in THIN)]
)
def test_the_precision_is_bounded_over_48_layers(name, noise, ffn):
    built = thin(name, 48, noise=noise, ffn=ffn)
    seen = variances(built)
    logits = built(small.tokens(1, 16)).logits
    logits.square().mean().backward()
    assert logits.isfinite().all()
    assert len(seen) == 48
    assert bounded(seen)
    assert finite_gradients(built)


@pytest.mark.parametrize(("name", "post"), [("mamba2", None), ("mamba2", POST), ("retnet", None)])
@torch.no_grad()
def test_the_precision_is_bounded_over_a_hundred_thousand_tokens(name, post):
    built = thin(name, 2, noise=0.1, post=post)
    seen = variances(built)
    output = built.prefill(small.tokens(1, 100_000), piece=20_000)
    assert output.logits.isfinite().all()
    assert sum(P.shape[1] for P in seen) == 200_000
    assert bounded(seen)
    assert all(part.isfinite().all() for part in tensors(output.state))


@pytest.mark.parametrize("name", THIN)
def test_gradients_over_thousands_of_tokens_are_finite(name):
    built = thin(name, 2, noise=0.1)
    T = 600 if name == "attention" else 3000
    built(small.tokens(1, T)).logits.square().mean().backward()
    assert finite_gradients(built)


@torch.no_grad()
def unequal_tau(built):
    built.precision.log_tau[::2], built.precision.log_tau[1::2] = -20.0, 20.0


@torch.no_grad()
def no_writes(built):
    for block in built.blocks:
        block.mixer.dt_bias.fill_(-60.0)


@torch.no_grad()
def no_values(built):
    built.embedding.weight.zero_()


@torch.no_grad()
def enormous_output(built):
    for block in built.blocks:
        block.mixer.out_proj.weight *= 1e8


@torch.no_grad()
def no_output(built):
    for block in built.blocks:
        block.mixer.out_proj.weight.zero_()


EXTREMES = [
    *itertools.product(CELLS, [unequal_tau, no_values, enormous_output, no_output]),
    *((cell, no_writes) for cell, (name, _) in CELLS.items() if name in ("mamba2", "gated_deltanet")),
]


@pytest.mark.parametrize(("cell", "extreme"), EXTREMES)
def test_extremes_stay_finite_with_their_gradients(cell, extreme):
    built = model(cell).float()
    extreme(built)
    seen = variances(built)
    for tokens in (small.tokens(2, 40), small.tokens(2, 1)):
        logits = built(tokens).logits
        logits.mean().backward()
        assert logits.isfinite().all()
        assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in built.parameters())
    assert bounded(seen)
    if extreme is no_output:
        assert all(largest(trace.gain, torch.ones(2, 1)) < 1e-6 for trace in built.trace(tokens))


def test_rwkv7_starts_with_a_gain_of_one():
    """Its W_O starts at 0, and the variance of nothing is 0."""
    built = build_model(small.config("rwkv7", ffn={}, n_layers=3, bft={}))
    assert not built.blocks[0].mixer.out_proj.weight.any()
    traces = built.trace(small.tokens(2, 9))
    assert len(traces) == 3
    assert all(largest(trace.gain, torch.ones(2, 9)) < 1e-6 for trace in traces)
    built(small.tokens(2, 9)).logits.sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in built.parameters())


# Switches.


def by_hand(built, tokens, lbar=None):
    """Logits of a model with BFT as its three lines, the mixer and its R given: P, K and h spelled out. lbar: what
    the observer is told instead of the mean precision."""
    config, context = built.config.bft, Context(Layout.fresh(tokens.shape[1], tokens.device), False)
    h = built.embedding(tokens)
    P = built.precision(tokens, h)
    last = len(built.blocks) - 1
    for n, block in enumerate(built.blocks):
        trusted = (1 / P).mean(-1) if lbar is None else lbar.expand(P.shape[:2])
        observer = KalmanObserver(config, trusted, context, None, wants_dynamics=n < last)
        y, _ = block.mixer(block.norm(h), context, None, observer)
        R = observer.variance(block.mixer.out_proj.weight)
        if config.units == "output":
            R = R / y.square().mean(-1, keepdim=True)
        h = h + (y / (1 + R / P) if config.gain else y)
        if config.precision != "frozen":
            P = (1 / (1 / P + 1 / R)).clamp(LEAST, MOST)
        if block.ffn is None:
            move = torch.zeros_like(h)
        else:
            x = block.ffn_norm(h)
            y, _ = block.ffn(x, context, None, observer)
            move = observer.jacobian * block.ffn_norm.slope(h) if n < last and config.jacobian != "none" else 0.0
            h = h + y
        if n < last and config.precision != "frozen":
            Q = F.softplus(block.residual.q) if config.process_noise else 0.0
            P = ((1 + move) ** 2 * P + Q).clamp(LEAST, MOST)
    return built._logits(built.norm(h))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"units": "stream"},
        {"observation": "sample"},
        {"nu0": 5.0},
        {"gain": False},
        {"process_noise": False},
        {"jacobian": "detached"},
        {"precision": "mlp"},
        {"precision": "frozen"},
    ],
    ids=str,
)
@torch.no_grad()
def test_a_model_is_observe_update_predict(cell, options):
    if "ffn" not in CELLS[cell][1]:
        options = {key: value for key, value in options.items() if key != "jacobian"}
    built, tokens = model(cell, options, n_layers=3), small.tokens(2, 9)
    assert largest(built(tokens).logits, by_hand(built, tokens)) < 1e-9


@torch.no_grad()
def test_without_reliability_the_observer_takes_a_precision_of_one(cell):
    """So the precision acts by the gain alone."""
    built, tokens = model(cell, {"reliability": False}, n_layers=3), small.tokens(2, 9)
    ones = torch.ones(1, 1, dtype=torch.float64)
    assert largest(built(tokens).logits, by_hand(built, tokens, lbar=ones)) < 1e-9
    states = [built(tokens, output_state=True).state.layers[0].residual]
    built.precision.log_tau += torch.linspace(-2, 2, 31)
    states.append(built(tokens, output_state=True).state.layers[0].residual)
    assert all(torch.equal(a, b) for a, b in zip(*(tensors(state) for state in states), strict=True))


@torch.no_grad()
def test_the_scale_of_an_output_projection_leaves_the_gain_alone_in_its_own_units(cell):
    gains = {}
    for units in ("output", "stream"):
        built, tokens = model(cell, {"units": units}), small.tokens(2, 9)
        before = built.trace(tokens)[0].gain
        built.blocks[0].mixer.out_proj.weight *= 3.0
        gains[units] = largest(built.trace(tokens)[0].gain, before)
    assert gains["output"] < 1e-9
    assert gains["stream"] > 1e-6


@torch.no_grad()
def test_each_switch_changes_the_model():
    settings = [
        {},
        {"units": "stream"},
        {"observation": "sample"},
        {"nu0": 5.0},
        {"gain": False},
        {"reliability": False},
        {"process_noise": False},
        {"jacobian": "none"},
        {"precision": "frozen"},
        {"control": "scalar_gate"},
        {"control": "sigmoid_gate"},
    ]
    for name in ("attention", "mamba2"):
        models = [build_model(small.config(name, ffn={}, n_layers=3, bft=bft)).double() for bft in settings]
        whole = models[0]
        for p in whole.parameters():
            p += 0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype)
        for other in models[1:]:
            other.load_state_dict(
                {k: v for k, v in whole.state_dict().items() if k in other.state_dict()}, strict=False
            )
        logits = [built(small.tokens(2, 9)).logits for built in models]
        assert all(largest(a, b) > 1e-5 for a, b in itertools.combinations(logits, 2))


def test_a_detached_jacobian_changes_gradients_alone():
    found = {}
    for mode in ("detached", None):
        built = model("attention", {} if mode is None else {"jacobian": mode})
        logits = built(small.tokens(2, 9)).logits
        logits.square().sum().backward()
        found[mode] = logits, built.blocks[0].ffn.in_proj.weight.grad
    assert torch.equal(found[None][0], found["detached"][0])
    assert largest(found[None][1], found["detached"][1]) > 1e-6


@pytest.mark.parametrize("gain", [True, False])
@torch.no_grad()
def test_a_trace_says_what_the_residual_did(cell, gain):
    """Its gain is what multiplies the mixer's output: 1 where that is switched off, whatever K is."""
    built, tokens = model(cell, {"gain": gain}), small.tokens(2, 9)
    steps, seen = [], variances(built)
    for block in built.blocks:
        block.register_forward_pre_hook(lambda module, args: steps.append([args[0].hidden]))
        block.mixer.register_forward_hook(lambda module, args, output: steps[-1].append(output[0]))
        if block.ffn_norm is not None:
            block.ffn_norm.register_forward_pre_hook(lambda module, args: steps[-1].append(args[0]))
    traces = built.trace(tokens)
    before = [(-built.precision.log_tau[tokens, None]).exp().expand_as(seen[0]), *seen[:-1]]
    for trace, P, step in zip(traces, before, steps, strict=True):
        assert largest(trace.precision, (1 / P).mean(-1)) < 1e-9
        if len(step) == 3:
            h, y, new = step
            assert largest(trace.gain, ((new - h) / y).mean(-1)) < 1e-9
        assert trace.sample_size.shape == (2, 9, built.blocks[0].mixer.heads)
    assert all(bool((trace.gain == 1).all()) is not gain for trace in traces)
    assert not any(bool((trace.updated < trace.precision).any()) for trace in traces)


@torch.no_grad()
def test_the_initial_precision_is_tau_by_token():
    built, tokens = model("gla"), torch.tensor([[3, 7, 3, 1]])
    assert not build_model(small.config(bft={})).precision.log_tau.any()
    built.precision.log_tau.copy_(torch.linspace(-8, 8, 31))
    embedded = built.embedding(tokens)
    P = built.precision(tokens, embedded)
    want = (1 / built.precision.log_tau[tokens].exp()).clamp(LEAST, MOST)
    assert P.shape == embedded.shape
    assert largest(P, want[..., None].expand_as(P)) < 1e-12
    trace = built.trace(tokens)[0]
    assert largest(trace.precision, 1 / want) < 1e-9


@torch.no_grad()
def test_the_initial_precision_by_a_small_mlp_of_the_embedding():
    built = build_model(small.config(bft={"precision": "mlp"})).double()
    tokens = small.tokens(2, 5)
    assert torch.equal(built.precision(tokens, built.embedding(tokens)), torch.ones(2, 5, 32, dtype=torch.float64))
    draws = torch.Generator().manual_seed(1)
    up, down = (
        torch.randn(p.shape, generator=draws, dtype=torch.float64) for p in (built.precision.up, built.precision.down)
    )
    built.precision.up.copy_(up)
    built.precision.down.copy_(down)
    embedded = 3 * torch.randn(2, 5, 32, generator=draws, dtype=torch.float64)
    P = built.precision(tokens, embedded)
    for b, t in itertools.product(range(2), range(5)):
        e = embedded[b, t] / embedded[b, t].square().mean().sqrt()
        log_tau = float(up @ torch.tanh(down @ e))
        assert float(P[b, t, 0]) == pytest.approx(min(max(math.exp(-log_tau), LEAST), MOST), rel=1e-12)
    assert torch.equal(P, P[..., :1].expand_as(P))


@torch.no_grad()
def test_a_frozen_precision_stays_one():
    built = model("retnet", {"precision": "frozen"}, n_layers=3)
    seen = variances(built)
    traces = built.trace(small.tokens(2, 9))
    assert all(torch.equal(P, torch.ones_like(P)) for P in seen)
    assert all(0.05 < float(trace.gain.mean()) < 0.95 for trace in traces)
    assert not any("residual" in key or "precision" in key for key in built.state_dict())


def test_how_it_is_trained():
    for bft in ({"tau_rate": 10.0}, {"tau_rate": 10.0, "precision": "mlp"}):
        found = treatments(build_model(small.config(bft=bft, n_layers=3)))
        added = {key: found[key] for key in found if key.startswith("precision.") or ".residual." in key}
        assert not any(treatment.decays for treatment in added.values())
        assert {key for key in found if found[key].factor == 10.0} == {k for k in added if k.startswith("precision.")}
    assert all(treatment.factor == 1.0 for treatment in treatments(build_model(small.config(bft={}))).values())
    control = treatments(build_model(small.config(bft={"control": "scalar_gate"})))
    assert not control["blocks.0.residual.bias"].decays
    assert control["blocks.0.residual.proj.weight"].decays


# Controls.


@torch.no_grad()
def test_a_scalar_gate_is_its_formula(cell):
    built = model(cell, {"control": "scalar_gate"})
    tokens, context = small.tokens(2, 9), Context(Layout.fresh(9, torch.device("cpu")), False)
    h, gains = built.embedding(tokens), []
    for block in built.blocks:
        x = block.norm(h)
        logit = x @ block.residual.proj.weight[0] + block.residual.bias
        gains.append(1 / (1 + torch.exp(-logit)))
        h = h + gains[-1][..., None] * block.mixer(x, context, None)[0]
        if block.ffn is not None:
            h = h + block.ffn(block.ffn_norm(h), context, None)[0]
    assert largest(built(tokens).logits, built._logits(built.norm(h))) < 1e-12
    traces = built.trace(tokens)
    assert all(largest(trace.gain, gain) < 1e-12 for trace, gain in zip(traces, gains, strict=True))
    assert all(trace.precision is None for trace in traces)


@torch.no_grad()
def test_a_sigmoid_gate_is_on_every_head_before_the_output_projection(cell):
    built, tokens = model(cell, {"control": "sigmoid_gate"}, n_layers=1), small.tokens(2, 9)
    block, context = built.blocks[0], Context(Layout.fresh(9, torch.device("cpu")), False)
    entered = []
    block.mixer.out_proj.register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    built(tokens)
    x = block.norm(built.embedding(tokens))
    block.mixer(x, context, None)
    gate = 1 / (1 + torch.exp(-(x @ block.residual.proj.weight.T)))
    assert gate.shape == (2, 9, block.mixer.heads)
    channels = entered[0].shape[-1] // block.mixer.heads
    assert largest(entered[0], entered[1] * gate.repeat_interleave(channels, dim=-1)) < 1e-12
    assert largest(built.trace(tokens)[0].gain, gate.mean(-1)) < 1e-12


def test_the_controls_sizes_and_initial_values(cell):
    name, settings = CELLS[cell]
    plain = build_model(small.config(name, **settings))
    scalar, sigmoid = (
        build_model(small.config(name, **settings, bft={"control": kind})) for kind in ("scalar_gate", "sigmoid_gate")
    )
    assert parameters(scalar) - parameters(plain) == 2 * (32 + 1)
    assert parameters(sigmoid) - parameters(plain) == 2 * 32 * plain.blocks[0].mixer.heads
    assert scalar.blocks[1].residual.bias.tolist() == [2.0]
    assert all(built.precision is None for built in (scalar, sigmoid))


# Sizes.


@pytest.mark.parametrize("options", [{}, {"precision": "mlp"}], ids=str)
@pytest.mark.parametrize("name", PRESETS["180m"])
def test_it_adds_less_than_a_thousandth_of_the_parameters(name, options):
    sizes = preset("180m", name)
    plain, with_bft = (
        build_model(parse(ModelConfig, data), device="meta") for data in (sizes, sizes | {"bft": options})
    )
    layers, D, vocab = sizes["n_layers"], sizes["d_model"], sizes["vocab_size"]
    more = parameters(with_bft) - parameters(plain)
    assert more == (layers - 1) * D + (8 * (D + 1) if options else vocab)
    assert more < 0.001 * parameters(plain)


# dtypes.


@pytest.mark.parametrize("kind", ["autocast", "cast"])
def test_the_precision_stays_float32_in_bfloat16(cell, kind):
    built = model(cell, {"precision": "mlp"} if cell == "gla" else {}).float()
    exact = copy.deepcopy(built)
    if kind == "cast":
        built = built.to(torch.bfloat16)
    own = [p for key, p in built.named_parameters() if key.endswith((".log_tau", ".up", ".q")) and "mixer" not in key]
    assert len(own) == 2
    assert all(p.dtype == torch.float32 for p in own)
    seen, tokens = variances(built), small.tokens(2, 40)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        output = built(tokens[:, :30], output_state=True)
        step = built.step(tokens[:, 30], output.state)
        traces = built.trace(tokens)
    output.logits.float().square().mean().backward()
    assert all(P.dtype == torch.float32 for P in seen)
    assert bounded(seen)
    for layer in step.state.layers:
        assert all(part.dtype == torch.float32 for part in tensors(layer.residual))
    wanted = exact.trace(tokens)
    for trace, want in zip(traces, wanted, strict=True):
        assert trace.gain.dtype == trace.precision.dtype == trace.sample_size.dtype == torch.float32
        assert float((trace.gain - want.gain).abs().mean()) < 0.05
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in built.parameters())


@pytest.mark.parametrize("control", ["scalar_gate", "sigmoid_gate"])
@pytest.mark.parametrize("kind", ["autocast", "cast"])
def test_the_controls_work_in_bfloat16(cell, control, kind):
    built, tokens = model(cell, {"control": control}).float(), small.tokens(2, 12)
    want = built(tokens).logits.detach()
    if kind == "cast":
        built = built.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        logits = built(tokens).logits
    logits.float().square().mean().backward()
    assert float((logits.detach().float() - want).abs().mean()) < 0.1 * float(want.abs().mean())
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in built.parameters())


# Names and refusals.


@pytest.mark.parametrize(
    ("settings", "cell"),
    [
        ({"name": "mamba2", "post": POST, "bft": {}}, "mamba2+post+bft"),
        ({"name": "attention", "bft": {}}, "attention+bft"),
        ({"name": "mamba2", "bft": {"gain": False}}, "mamba2+bft-no-gain"),
        ({"name": "gla", "bft": {"reliability": False, "process_noise": False}}, "gla+bft-no-reliability-no-noise"),
        ({"name": "gla", "ffn": {}, "bft": {"jacobian": "none"}}, "gla+bft-no-jacobian"),
        ({"name": "gla", "ffn": {}, "bft": {"jacobian": "detached"}}, "gla+bft-detached-jacobian"),
        ({"name": "rwkv7", "bft": {"precision": "mlp", "tau_rate": 10}}, "rwkv7+bft-mlp-tau-rate10"),
        ({"name": "rwkv7", "bft": {"precision": "frozen"}}, "rwkv7+bft-frozen"),
        ({"name": "retnet", "bft": {"observation": "sample", "nu0": 0.5}}, "retnet+bft-sample-nu0.5"),
        ({"name": "retnet", "bft": {"initial_noise": 0.3}}, "retnet+bft-noise0.3"),
        ({"name": "mamba2", "bft": {"control": "scalar_gate"}}, "mamba2+scalar-gate"),
        (
            {"name": "mamba2", "post": POST | {"variant": "minimal"}, "bft": {"control": "sigmoid_gate"}},
            "mamba2+post-minimal+sigmoid-gate",
        ),
    ],
)
def test_the_name_says_what_differs(settings, cell):
    assert parse(ModelConfig, settings).cell == cell


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"bft": {"control": "scalar_gate", "nu0": 2}},
            r"^model\.bft\.control=scalar_gate stands in the place of BFT: model\.bft\.nu0=2 would change nothing",
        ),
        (
            {"bft": {"precision": "frozen", "tau_rate": 2}},
            r"^model\.bft\.precision=frozen carries none: model\.bft\.tau_rate=2 would change nothing",
        ),
        (
            {"ffn": {}, "bft": {"precision": "frozen", "jacobian": "none"}},
            r"^model\.bft\.precision=frozen carries none: model\.bft\.jacobian=none would change nothing",
        ),
        (
            {"bft": {"precision": "frozen", "process_noise": False}},
            r"^model\.bft\.precision=frozen carries none: model\.bft\.process_noise=false would change nothing",
        ),
        (
            {"bft": {"precision": "frozen", "reliability": False}},
            r"^model\.bft\.precision=frozen carries none: model\.bft\.reliability=false would change nothing",
        ),
        (
            {"bft": {"precision": "frozen", "initial_noise": 0.3}},
            r"^model\.bft\.precision=frozen carries none: model\.bft\.initial_noise=0\.3 would change nothing",
        ),
        (
            {"bft": {"process_noise": False, "initial_noise": 0.3}},
            r"^model\.bft\.process_noise=false: model\.bft\.initial_noise=0\.3 would change nothing",
        ),
        (
            {"bft": {"gain": False, "reliability": False}},
            r"^model\.bft\.gain=false and model\.bft\.reliability=false: the precision would be carried and change",
        ),
        (
            {"bft": {"precision": "frozen", "gain": False, "units": "stream"}},
            r"^model\.bft\.precision=frozen and model\.bft\.gain=false weigh nothing: model\.bft\.units=stream would",
        ),
        ({"bft": {"jacobian": "none"}}, r"^model\.bft\.jacobian=none is of an FFN, and this model has none: J = 0"),
        (
            {"n_layers": 1, "bft": {"process_noise": False}},
            r"^model\.bft\.process_noise=false is for the layers above, and model\.n_layers=1 has none",
        ),
        ({"bft": {"gain": {"x": 1}}}, r"^model\.bft\.gain takes one value, neither a mapping nor a list$"),
        ({"bft": {"control": ["none"]}}, r"^model\.bft\.control takes one value"),
        ({"bft": True}, r"^model\.bft=true: it takes options \(model\.bft\.KEY=VALUE"),
        ({"bft": {"nu0": 0}}, "bft.nu0=0: input should be greater than 0"),
        ({"bft": {"tau_rate": 0}}, "bft.tau_rate=0: input should be greater than 0"),
        ({"bft": {"precison": "mlp"}}, "unknown key 'bft.precison' .*did you mean 'precision'"),
        ({"bft": {"precision": "frozn"}}, "did you mean 'frozen'"),
        ({"bft": {"gain": 2}}, "bft.gain=2"),
    ],
)
def test_switches_that_change_nothing_and_wrong_ones_are_refused(settings, said):
    with pytest.raises(UserError, match=said) as error:
        parse(ModelConfig, settings)
    assert "{'" not in str(error.value), "no dict of Python's"


def test_a_mixer_that_shows_no_heads_is_refused(monkeypatch):
    known = registry.architectures()
    other = dataclasses.replace(known["gla"], addons={})
    monkeypatch.setattr(registry, "architectures", lambda: known | {"gla": other})
    with pytest.raises(UserError, match="bft needs a mixer that shows its heads; gla doesn't"):
        parse(ModelConfig, {"name": "gla", "bft": {}})


def test_every_field_says_whose_it_is():
    for name, field in BftConfig.model_fields.items():
        assert name == "control" or "(paper" in field.description or "(ours)" in field.description
