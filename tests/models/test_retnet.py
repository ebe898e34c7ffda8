"""RetNet's mixer against its formulas as plain NumPy loops; with PoST's gate it is GLA with PoST."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from decaybench.core.errors import UserError
from decaybench.models.mixers.gla import GLA, GLAConfig
from decaybench.models.mixers.retnet import RetNet, RetNetConfig
from tests.models import test_gla as gla
from tests.models.small import largest
from tests.models.test_gla import D, T, by_hand, draw, log_rates, parameters, place, run, switched_off


def build(post=None, **options):
    return gla.build(post, mixer=RetNet, config=RetNetConfig, **options)


def gammas(n):
    return np.array([1 - 2 ** -(5 + h) for h in range(n)])


def fixed_decay(p, x, position, heads):
    return np.log(gammas(heads))[:, None]


def learned_decay(p, x, position, heads):
    return -np.exp(log_rates(p, position))[:, None]


def turn(q, k, position):
    """Channels i and i + K/2 as one complex number, turned by position * 10000^(-2i/K)."""
    half = q.shape[1] // 2
    angle = np.exp(1j * position * 10_000.0 ** (-np.arange(half) / half))

    def turned(x):
        z = (x[:, :half] + 1j * x[:, half:]) * angle
        return np.concatenate([z.real, z.imag], axis=1)

    return turned(q), turned(k)


GATES = {
    "baseline": (None, fixed_decay, turn),
    "minimal": ({"variant": "minimal"}, learned_decay, turn),
    "paper": ({"variant": "paper"}, gla.softplus_decay, gla.no_turn),
}


@pytest.mark.parametrize("conv_width", [None, 4])
@pytest.mark.parametrize("gate", GATES)
def test_the_mixer_is_its_formulas(gate, conv_width):
    post, decay, turned = GATES[gate]
    mixer = build(post, noise=0.3, n_heads=2, conv_width=conv_width, chunk_size=8)
    x = draw(2, 21, D)
    y, state = run(mixer, x)
    for b in range(2):
        want, memory = by_hand(mixer, x[b], decay, turned)
        assert largest(y[b], want) < 1e-11
        assert largest(state.memory[b], memory) < 1e-11


SAME = {"n_heads": 2, "expand_k": 0.5, "expand_v": 1.5, "conv_width": 4, "chunk_size": 8}


@pytest.mark.parametrize("post", [{"variant": "paper"}, {**switched_off("paper"), "gate": "softplus"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_the_softplus_gate_it_is_gla_bit_for_bit(post, dtype):
    """Given the same parameters: outputs, states, gradients, a step from the state, and timescales."""
    ours, theirs = build(post, noise=0.3, **SAME).to(dtype), gla.build(post, seed=1, **SAME).to(dtype)
    theirs.load_state_dict(ours.state_dict())
    x, following = draw(2, 21, D).to(dtype), draw(2, 1, D, seed=6).to(dtype)
    results = []
    for mixer in (ours, theirs):
        y, state = run(mixer, x)
        step, after = run(mixer, following, torch.full((2, 1), 22), state)
        (y.square().sum() + step.sum()).backward()
        found = [y, state.conv, state.memory, step, after.memory, mixer.timescales(9)]
        results.append([*found, *(parameter.grad for parameter in mixer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_both_start_from_the_same_values_with_the_softplus_gate():
    ours = build({"variant": "paper"}, **SAME).state_dict()
    theirs = gla.build({"variant": "paper"}, **SAME).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_minimal_with_all_switches_off_is_the_baseline_bit_for_bit():
    base, off = build(n_heads=2, seed=3), build(switched_off("minimal"), n_heads=2, seed=3)
    assert base.state_dict().keys() == off.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(base.parameters(), off.parameters(), strict=True))
    x = draw(2, 19, D)
    (y, state), (z, other) = run(base, x), run(off, x)
    assert torch.equal(y, z)
    assert torch.equal(state.memory, other.memory)
    assert torch.equal(base.timescales(7), off.timescales(7))


def test_timescales_of_the_fixed_gammas():
    tau = build(n_heads=8).timescales(5)
    assert tau.dtype == torch.float32
    assert torch.allclose(tau.double(), torch.tensor(-1 / np.log(gammas(8))), rtol=1e-6)


def test_minimal_starts_with_timescales_from_the_horizon_to_one_token():
    mixer = build({"variant": "minimal"}, n_heads=4)
    assert all(parameter.requires_grad for parameter in mixer.gate.parameters())
    tau = mixer.timescales(1)
    assert torch.allclose(tau.log(), torch.linspace(math.log(T), 0, 4, dtype=torch.float64), atol=1e-6)
    grown = (mixer.timescales(T) / tau).log() / math.log(T)
    assert torch.allclose(grown, torch.linspace(1, 0, 4, dtype=torch.float64), atol=1e-6)


def test_position_scaling_alone_tapers_by_rank_and_adds_nothing_that_learns():
    """RetNet's own order is fast to slow: the last head is the slowest and takes alpha = 1."""
    base, scaled = build(n_heads=4), build({"variant": "minimal", "reparameterize": False}, n_heads=4)
    assert torch.allclose(base.timescales(1).double(), scaled.timescales(1), rtol=1e-6)
    grown = (scaled.timescales(100) / scaled.timescales(1)).log() / math.log(100)
    assert torch.allclose(grown, torch.linspace(0, 1, 4, dtype=torch.float64), atol=1e-6)
    assert not any(parameter.requires_grad for parameter in scaled.gate.parameters())


@pytest.mark.parametrize("far", [1000, 1_000_000])
def test_only_distances_matter(far):
    """The same tokens further on in a document that begins before them, as a cached decode reads them."""
    mixer = build(noise=0.3, n_heads=2)
    x = draw(1, 15, D)
    y, _ = run(mixer, x)
    z, _ = run(mixer, x, torch.arange(far, far + 15)[None])
    assert largest(y, z) < 1e-8


def test_sizes_with_and_without_post():
    D, H = 32, 4
    base, minimal, paper = (build(post, d_model=D, n_heads=H) for post, *_ in GATES.values())
    HK, HV = D, 2 * D
    assert parameters(base) == D * (2 * HK + 2 * HV) + HV // H + HV * D
    assert parameters(minimal) == parameters(base) + H
    assert parameters(paper) == parameters(base) + D * HK + HK + H
    for mixer in (base, minimal, paper):
        state = run(mixer, draw(1, 3, D))[1]
        assert state.conv is None
        assert state.memory.shape == (1, H, HK // H, HV // H)


def test_a_rotation_needs_pairs_of_channels():
    with pytest.raises(UserError, match=r"mixer.n_heads=16 makes heads of 1 key channels"):
        RetNet(RetNetConfig(n_heads=16), place())
    RetNet(RetNetConfig(n_heads=16), place({"variant": "paper"}))
    GLA(GLAConfig(n_heads=8), place())
