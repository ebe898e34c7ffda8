"""RetNet against flash-linear-attention's layer and its kernels, forward, gradients and initial values.

The kernels are Triton's, run by its interpreter (tests.oracles).
"""

from __future__ import annotations

import pytest
import torch

from decaybench.models.branch import Place
from decaybench.models.mixers.retnet import RetNet, RetNetConfig
from decaybench.models.module import initialise
from tests import oracles
from tests.models.test_gla_fla import D, assert_same_laws, assert_same_layer, assert_same_steps, under_our_names

pytestmark = pytest.mark.interpreter

# heads, expand_v, short convolution, length; a chunk of their kernel holds 64 tokens.
CASES = {
    "as published": (2, 2.0, False, 69),
    "below a chunk": (2, 2.0, False, 7),
    "short convolution, four heads": (4, 1.0, True, 67),
}


def pair(case):
    """Their layer with every parameter randomised, and ours with the same weights."""
    heads, expand_v, convolves, _ = CASES[case]
    layer = oracles.fla("layers").MultiScaleRetention
    theirs = layer(hidden_size=D, num_heads=heads, expand_v=expand_v, use_short_conv=convolves, layer_idx=0)
    oracles.randomise(theirs, 1)
    config = RetNetConfig(n_heads=heads, expand_v=expand_v, conv_width=4 if convolves else None, chunk_size=16)
    ours = RetNet(config, Place(D, 0, 1, 1.0, None, "torch"))
    ours.load_state_dict(under_our_names(theirs.state_dict()))
    return theirs, ours


@pytest.mark.parametrize("case", CASES)
def test_the_mixer_is_their_layer(case):
    assert_same_layer(*pair(case), CASES[case][-1])


@pytest.mark.parametrize("case", ["as published", "short convolution, four heads"])
def test_cached_steps_are_theirs(case):
    """Positions, and with them the rotation, go on from the prefill."""
    assert_same_steps(*pair(case))


def test_initial_values_follow_their_laws():
    layer = oracles.fla("layers").MultiScaleRetention
    layers, mixers = [], []
    for seed in range(4):
        torch.manual_seed(seed)
        layers.append(layer(hidden_size=64, num_heads=8, use_short_conv=True))
        mixers.append(RetNet(RetNetConfig(conv_width=4), Place(64, 0, 1, 1.0, None, "torch")))
        initialise(mixers[-1], seed)
    assert_same_laws(layers, mixers)
