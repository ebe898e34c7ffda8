"""GLA's mixer against its formulas as plain NumPy loops, its gates, and PoST on it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.core.positions import Layout
from decaybench.models.addons.post import PostConfig
from decaybench.models.branch import Context, Place
from decaybench.models.mixers.gla import GLA, GLAConfig
from decaybench.models.module import initialise, treatments
from tests.models.small import largest

T = 512
D = 16


def place(post=None, *, d_model=D, shrink=1.0) -> Place:
    options = None if post is None else PostConfig(**{"horizon": T, **post})
    return Place(d_model, layer=0, n_layers=2, shrink=shrink, post=options, backend="torch")


def fresh(mixer, seed=0):
    initialise(mixer, seed)
    return mixer


def build(post=None, *, seed=0, noise=0.0, shrink=1.0, d_model=D, mixer=GLA, config=GLAConfig, **sizes):
    """A float64 mixer; noise moves its parameters away from their initial values."""
    built = fresh(mixer(parse(config, sizes), place(post, shrink=shrink, d_model=d_model)), seed).double()
    draws = torch.Generator().manual_seed(seed)
    for parameter in built.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
    return built


def draw(*shape, seed=5):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(mixer, x, positions=None, state=None):
    positions = torch.arange(1, x.shape[1] + 1)[None] if positions is None else positions
    return mixer(x, Context(Layout.of(positions, has_state=state is not None), keep_state=True), state)


def arrays(mixer):
    return {name: value.detach().numpy() for name, value in mixer.state_dict().items()}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def log_rates(p, position, horizon=T):
    """P - alpha log t by hand, from a mixer's arrays."""
    P = [float(p["gate.spectrum.base"])]
    for delta in p["gate.spectrum.deltas"]:
        P.append(P[-1] + math.log1p(math.exp(delta)))
    n = len(P)
    cumulative = np.array(P) - P[0]
    k = np.arange(n)
    alpha = np.clip((n - 1 - k) / (n - 1) + (cumulative - k * cumulative[-1] / (n - 1)) / math.log(horizon), 0, 1)
    return np.array(P) - alpha * math.log(position)


def low_rank_decay(p, x, position, heads):
    speed = np.log(sigmoid(p["gate.up.weight"] @ (p["gate.down.weight"] @ x) + p["gate.bias"])) / 16
    speed = speed.reshape(heads, -1)
    return speed * np.exp(log_rates(p, position))[:, None] if "gate.spectrum.base" in p else speed


def softplus_decay(p, x, position, heads):
    dt = np.log1p(np.exp(p["gate.a_proj.weight"] @ x + p["gate.dt_bias"])).reshape(heads, -1)
    return -np.exp(log_rates(p, position))[:, None] * dt


def no_turn(q, k, position):
    return q, k


def by_hand(mixer, x, log_decay, turn=no_turn):
    """The equations at the top of gla.py and retnet.py for one row [T, D], token by token and head by head.

    log_decay(arrays, x_t, t, heads): [H, K]; turn(q, k, t): what the position does to q and k [H, K].
    """
    p, heads = arrays(mixer), mixer.config.n_heads
    HV = p["out_proj.weight"].shape[1]
    HK = (p["in_proj.weight"].shape[0] - 2 * HV) // 2
    channels = 2 * HK + HV
    taps = p.get("conv.weight")
    projected, out = [], []
    S = np.zeros((heads, HK // heads, HV // heads))
    for t, x_t in enumerate(x.numpy(), start=1):
        projected.append(p["in_proj.weight"] @ x_t)
        qkv, g = projected[-1][:channels], projected[-1][channels:]
        if taps is not None:
            seen = [np.zeros(channels)] * 3 + [row[:channels] for row in projected]
            mixed = sum(taps[:, lag] * seen[-4 + lag] for lag in range(4))
            qkv = mixed * sigmoid(mixed)
        q, k = qkv[:HK].reshape(heads, -1), qkv[HK : 2 * HK].reshape(heads, -1)
        v = qkv[2 * HK :].reshape(heads, -1)
        q, k = turn(q, k, t)
        decay = np.exp(log_decay(p, x_t, t, heads))
        y = np.zeros(HV).reshape(heads, -1)
        for h in range(heads):
            S[h] = decay[h][:, None] * S[h] + np.outer(k[h], v[h])
            o = S[h].T @ q[h] / math.sqrt(HK // heads)
            y[h] = o / math.sqrt(np.mean(o**2) + 1e-5) * p["norm.weight"]
        out.append(p["out_proj.weight"] @ (y.flatten() * g * sigmoid(g)))
    return torch.tensor(np.array(out)), torch.tensor(S)


GATES = {
    "baseline": (None, low_rank_decay),
    "minimal": ({"variant": "minimal"}, low_rank_decay),
    "paper": ({"variant": "paper"}, softplus_decay),
}


@pytest.mark.parametrize("conv_width", [None, 4])
@pytest.mark.parametrize("gate", GATES)
def test_the_mixer_is_its_formulas(gate, conv_width):
    post, decay = GATES[gate]
    mixer = build(post, noise=0.3, n_heads=2, expand_v=1.5, conv_width=conv_width, chunk_size=8)
    x = draw(2, 21, D)
    y, state = run(mixer, x)
    for b in range(2):
        want, memory = by_hand(mixer, x[b], decay)
        assert largest(y[b], want) < 1e-11
        assert largest(state.memory[b], memory) < 1e-11


@pytest.mark.parametrize("gate", GATES)
def test_timescales_are_those_of_the_state_without_input(gate):
    """With an input of 0 a state shrinks by exp(-1/tau) a token."""
    mixer = build(GATES[gate][0], noise=0.3, n_heads=2)
    K, V = 4, 8
    state = run(mixer, torch.zeros(1, 1, D, dtype=torch.float64))[1]
    state = type(state)(state.conv, torch.ones(1, 2, K, V, dtype=torch.float64))
    for position in (2, 77):
        _, after = run(mixer, torch.zeros(1, 1, D, dtype=torch.float64), torch.tensor([[position]]), state)
        tau = mixer.timescales(position)
        assert tau.shape == (2 * K,)
        assert largest(after.memory[0, :, :, 0].flatten(), torch.exp(-1 / tau)) < 1e-12


def switched_off(variant):
    return {"variant": variant, "reparameterize": False, "position_scaling": False}


def test_minimal_with_all_switches_off_is_the_baseline_bit_for_bit():
    base, off = build(n_heads=2, seed=3), build(switched_off("minimal"), n_heads=2, seed=3)
    assert base.state_dict().keys() == off.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(base.parameters(), off.parameters(), strict=True))
    x = draw(2, 19, D)
    results = []
    for mixer in (base, off):
        y, state = run(mixer, x)
        y.square().sum().backward()
        results.append([y, state.memory, *(parameter.grad for parameter in mixer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("taper", ["analytical", "linear"])
def test_minimal_starts_with_timescales_from_one_token_to_the_horizon(taper):
    mixer = build({"variant": "minimal", "taper": taper}, n_heads=4)
    with torch.no_grad():
        mixer.gate.bias.zero_()
    tau = mixer.timescales(1).reshape(4, -1)
    assert torch.equal(tau, tau[:, :1].expand_as(tau))
    assert torch.allclose(tau[:, 0].log(), torch.linspace(math.log(T), 0, 4, dtype=torch.float64), atol=1e-6)
    grown = (mixer.timescales(T).reshape(4, -1)[:, 0] / tau[:, 0]).log() / math.log(T)
    assert torch.allclose(grown, torch.linspace(1, 0, 4, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize("off", [False, True], ids=["post", "control"])
def test_the_softplus_gate_starts_as_in_the_papers_code(off):
    """P from 0 to log 16, slow to fast, with PoST and in the control: the gate with neither of its parts."""
    post = {**switched_off("paper"), "gate": "softplus"} if off else {"variant": "paper"}
    mixer = build(post, n_heads=4, d_model=64)
    assert mixer.gate.dt_bias.requires_grad
    dt = torch.nn.functional.softplus(mixer.gate.dt_bias).reshape(4, -1)
    assert 1e-3 <= float(dt.detach().min()) <= float(dt.detach().max()) <= 0.1
    rates = 1 / (mixer.timescales(1).reshape(4, -1) * dt)
    want = torch.linspace(0, math.log(16), 4, dtype=torch.float64)[:, None].expand_as(rates)
    assert torch.allclose(rates.log(), want, atol=1e-5)
    assert torch.equal(mixer.timescales(1), mixer.timescales(99)) == off


def test_the_control_learns_its_rates_and_sees_no_position():
    mixer = build({**switched_off("paper"), "gate": "softplus"}, noise=0.3, n_heads=2)
    assert mixer.gate.spectrum.P.requires_grad
    x = draw(1, 9, D)
    ahead = torch.arange(50, 59)[None]
    assert torch.equal(run(mixer, x)[0], run(mixer, x, ahead)[0])


@pytest.mark.parametrize(
    ("post", "softplus"),
    [
        ({"variant": "paper"}, True),
        ({"variant": "minimal"}, False),
        ({"variant": "paper", "gate": "baseline"}, False),
        ({"variant": "minimal", "gate": "softplus"}, True),
    ],
)
def test_the_gate_is_the_variants_or_the_one_asked_for(post, softplus):
    mixer = build(post, n_heads=2)
    assert hasattr(mixer.gate, "dt_bias") == softplus
    tau = mixer.timescales(1).reshape(2, -1).mean(1)
    assert tau[0] > tau[1]  # slow to fast, whichever gate


def test_position_scaling_alone_keeps_the_rates_and_adds_nothing_that_learns():
    base, scaled = (
        build(n_heads=3, d_model=24),
        build({"variant": "minimal", "reparameterize": False}, n_heads=3, d_model=24),
    )
    assert torch.equal(base.timescales(1), scaled.timescales(1))
    grown = (scaled.timescales(100) / base.timescales(100)).reshape(3, -1).log() / math.log(100)
    assert torch.allclose(grown, torch.tensor([[1.0], [0.5], [0.0]], dtype=torch.float64).expand_as(grown), atol=1e-6)
    assert treatments(base).keys() == treatments(scaled).keys()


def test_frozen_dt_bias_only_when_asked_for():
    assert not build({"variant": "paper", "dt_bias": "frozen"}).gate.dt_bias.requires_grad


def test_nothing_that_sets_a_decay_takes_weight_decay():
    for post, _ in GATES.values():
        decayed = {name for name, treatment in treatments(build(post)).items() if treatment.decays}
        weights = {"in_proj.weight", "out_proj.weight"}
        assert decayed == weights | ({"gate.a_proj.weight"} if post == {"variant": "paper"} else set()) | (
            set() if post == {"variant": "paper"} else {"gate.down.weight", "gate.up.weight"}
        )


def parameters(mixer):
    return sum(parameter.numel() for parameter in mixer.parameters())


def test_sizes_with_and_without_post():
    """H rates more in `minimal`; in `paper` the full-rank projection, dt_bias and rates for the low-rank gate."""
    D, H, rank = 32, 4, 16
    base, minimal, paper = (build(post, d_model=D, n_heads=H, conv_width=4) for post, _ in GATES.values())
    HK, HV = D // 2, D
    gate = D * rank + rank * HK + HK
    assert parameters(base) == D * (2 * HK + 2 * HV) + 4 * (2 * HK + HV) + gate + HV // H + HV * D
    assert parameters(minimal) == parameters(base) + H
    assert parameters(paper) == parameters(base) - gate + D * HK + HK + H
    states = [run(mixer, draw(1, 3, D))[1] for mixer in (base, minimal, paper)]
    for state in states:
        assert state.conv.shape == (1, 3, 2 * HK + HV)
        assert state.memory.shape == (1, H, HK // H, HV // H)


def test_initial_values():
    """The laws of flash-linear-attention's layer; tests/models/test_gla_fla.py draws from the layer itself."""
    mixer = build(d_model=256, n_heads=4, conv_width=4, shrink=2.0)
    HV = 256
    for name, bound in {
        "in_proj.weight": 256**-0.5,
        "conv.weight": 0.5,
        "gate.down.weight": 256**-0.5,
        "gate.up.weight": 0.25,
        "gate.bias": 0.25,
        "out_proj.weight": HV**-0.5 / 2,
    }.items():
        values = mixer.state_dict()[name]
        assert float(values.abs().max()) <= bound
        assert float(values.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert torch.equal(mixer.norm.weight, torch.ones(64, dtype=torch.float64))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"n_heads": 3}, r"mixer.expand_k=0.5 times d_model=16 must be a multiple of mixer.n_heads=3"),
        ({"n_heads": 4, "expand_v": 0.3}, r"mixer.expand_v=0.3 times d_model=16 .* mixer.n_heads=4"),
    ],
)
def test_sizes_that_do_not_divide_are_named(sizes, said):
    with pytest.raises(UserError, match=said):
        GLA(GLAConfig(**sizes), place())
