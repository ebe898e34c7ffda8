"""GLA against flash-linear-attention's layer and its kernels, forward, gradients and initial values.

The kernels are Triton's, run by its interpreter (tests.oracles).
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch

from decaybench.core.positions import Layout
from decaybench.models.branch import Context, Place
from decaybench.models.mixers.gla import GLA, GLAConfig
from decaybench.models.module import initialise
from tests import oracles

pytestmark = pytest.mark.interpreter

D, H = 32, 2
# expand_v, short convolution, length; up to 64 tokens their layer takes its recurrent kernel, above the chunked one.
CASES = {
    "as published, their recurrent kernel": (1.0, False, 23),
    "as published, their chunked kernel": (1.0, False, 69),
    "short convolution, wide values": (2.0, True, 67),
    "short convolution, their recurrent kernel": (1.0, True, 9),
}


def pair(case):
    """Their layer with every parameter randomised, and ours with the same weights."""
    expand_v, convolves, _ = CASES[case]
    layer = oracles.fla("layers").GatedLinearAttention
    theirs = layer(hidden_size=D, num_heads=H, expand_v=expand_v, use_short_conv=convolves, layer_idx=0)
    oracles.randomise(theirs, 1)
    config = GLAConfig(n_heads=H, expand_v=expand_v, conv_width=4 if convolves else None, chunk_size=16)
    ours = GLA(config, Place(D, 0, 1, 1.0, None, "torch"))
    ours.load_state_dict(under_our_names(theirs.state_dict()))
    return theirs, ours


def under_our_names(theirs):
    """Their tensors as ours: the projections of the input in one matrix, the three convolutions in one."""
    given = {name.removesuffix(".weight"): tensor for name, tensor in theirs.items()}
    named = {
        "in_proj.weight": torch.cat([given[f"{name}_proj"] for name in "qkvg"]),
        "norm.weight": given["g_norm_swish_gate"],
        "out_proj.weight": given["o_proj"],
    }
    if "gk_proj.0" in given:
        named |= {
            "gate.down.weight": given["gk_proj.0"],
            "gate.up.weight": given["gk_proj.1"],
            "gate.bias": given["gk_proj.1.bias"],
        }
    if "q_conv1d" in given:
        named["conv.weight"] = torch.cat([given[f"{name}_conv1d"] for name in "qkv"])[:, 0]
    return named


def draw(*shape, seed=2):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weighed(y):
    return (y * torch.linspace(-2, 2, y.numel()).cos().view_as(y)).sum()


def assert_same_layer(theirs, ours, length):
    """The same output and the same gradients of the input and of every parameter."""
    x = draw(2, length, D).requires_grad_()
    want, _, _ = theirs(x)
    got, _ = ours(x, Context(Layout.fresh(length, x.device), keep_state=False), None)
    oracles.assert_close(got, want, 1e-5, "y")
    wanted = oracles.gradients(weighed(want), {"x": x, **dict(theirs.named_parameters())})
    found = oracles.gradients(weighed(got), {"x": x, **dict(ours.named_parameters())})
    oracles.assert_close(found.pop("x"), wanted.pop("x"), 2e-5, "gradient of x")
    wanted = under_our_names(wanted)
    assert wanted.keys() == found.keys()
    for what, gradient in found.items():
        oracles.assert_close(gradient, wanted[what], 2e-5, f"gradient of {what}")


def assert_same_steps(theirs, ours, prefilled=11, steps=3):
    """A cached prefill and then token by token."""
    cache = oracles.fla("models.utils").Cache()
    x = draw(2, prefilled + steps, D)
    state = None
    pieces = [slice(0, prefilled), *(slice(t, t + 1) for t in range(prefilled, prefilled + steps))]
    with torch.no_grad():
        for piece in pieces:
            want, _, cache = theirs(x[:, piece], past_key_values=cache, use_cache=True)
            positions = torch.arange(piece.start + 1, piece.stop + 1)[None]
            got, state = ours(x[:, piece], Context(Layout.of(positions), keep_state=True), state)
            oracles.assert_close(got, want, 1e-5, f"tokens {piece.start} to {piece.stop}")


def assert_same_laws(layers, mixers):
    """Each kind of parameter over all of them."""
    theirs, ours = defaultdict(list), defaultdict(list)
    for sample, states in (
        (theirs, [under_our_names(layer.state_dict()) for layer in layers]),
        (ours, [mixer.state_dict() for mixer in mixers]),
    ):
        for state in states:
            for name, tensor in state.items():
                sample[name].append(tensor.numpy().ravel())
    assert theirs.keys() == ours.keys()
    for name, values in theirs.items():
        oracles.assert_same_law(np.concatenate(ours[name]), np.concatenate(values), name)


@pytest.mark.parametrize("case", CASES)
def test_the_mixer_is_their_layer(case):
    assert_same_layer(*pair(case), CASES[case][-1])


@pytest.mark.parametrize("case", ["as published, their recurrent kernel", "short convolution, wide values"])
def test_cached_steps_are_theirs(case):
    assert_same_steps(*pair(case))


def test_initial_values_follow_their_laws():
    layer = oracles.fla("layers").GatedLinearAttention
    layers, mixers = [], []
    for seed in range(8):
        torch.manual_seed(seed)
        layers.append(layer(hidden_size=64, num_heads=4, expand_k=16, use_short_conv=True))
        mixers.append(GLA(GLAConfig(expand_k=16, conv_width=4), Place(64, 0, 1, 1.0, None, "torch")))
        initialise(mixers[-1], seed)
    assert_same_laws(layers, mixers)
