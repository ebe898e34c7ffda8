"""Gated DeltaNet against flash-linear-attention's layer and its kernels, forward, gradients and initial values.

The kernels are Triton's, run by its interpreter (tests.oracles).
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch

from decaybench.core.positions import Layout
from decaybench.models.branch import Context, Place
from decaybench.models.mixers.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig
from decaybench.models.module import initialise
from tests import oracles

pytestmark = pytest.mark.interpreter

D, H, K = 24, 2, 16
# expand_v, output gate, negative eigenvalues, short convolution, length; a chunk of their kernels holds 64 tokens.
CASES = {
    "as published": (2, True, False, True, 67),
    "no output gate, below a chunk": (1, False, False, True, 5),
    "negative eigenvalues": (1, True, True, True, 65),
    "no convolution": (2, False, True, False, 9),
}


def pair(case):
    """Their layer with every parameter randomised, and ours with the same weights."""
    expand_v, gate, negative, convolves, _ = CASES[case]
    layer = oracles.fla("layers").GatedDeltaNet
    torch.manual_seed(0)
    theirs = layer(
        hidden_size=D,
        expand_v=expand_v,
        head_dim=K,
        num_heads=H,
        mode="chunk",
        use_gate=gate,
        use_short_conv=convolves,
        allow_neg_eigval=negative,
        layer_idx=0,
    )
    oracles.randomise(theirs, 1)
    config = GatedDeltaNetConfig(
        n_heads=H,
        head_dim=K,
        expand_v=expand_v,
        conv_width=4 if convolves else None,
        output_gate=gate,
        negative_eigenvalues=negative,
        chunk_size=16,
    )
    ours = GatedDeltaNet(config, Place(D, 0, 1, 1.0, None, "torch"))
    ours.load_state_dict(under_our_names(theirs.state_dict()))
    return theirs, ours


def under_our_names(theirs):
    """Their tensors as ours: the projections of the input in one matrix, the three convolutions in one."""
    given = {name.removesuffix(".weight"): tensor for name, tensor in theirs.items()}
    inputs = [given[f"{name}_proj"] for name in "qkvabg" if f"{name}_proj" in given]
    named = {
        "in_proj.weight": torch.cat(inputs),
        "dt_bias": given["dt_bias"],
        "spectrum.P": given["A_log"],
        "norm.weight": given["o_norm"],
        "out_proj.weight": given["o_proj"],
    }
    if "q_conv1d" in given:
        named["conv.weight"] = torch.cat([given[f"{name}_conv1d"] for name in "qkv"])[:, 0]
    return named


def weighed(y):
    return (y * torch.linspace(-2, 2, y.numel()).cos().view_as(y)).sum()


@pytest.mark.parametrize("case", CASES)
def test_the_mixer_is_their_layer(case):
    theirs, ours = pair(case)
    T = CASES[case][-1]
    x = torch.randn(2, T, D, generator=torch.Generator().manual_seed(2)).requires_grad_()
    want, _, _ = theirs(x)
    got, _ = ours(x, Context(Layout.fresh(T, x.device), keep_state=False), None)
    oracles.assert_close(got, want, 5e-6, "y")
    wanted = oracles.gradients(weighed(want), {"x": x, **dict(theirs.named_parameters())})
    found = oracles.gradients(weighed(got), {"x": x, **dict(ours.named_parameters())})
    oracles.assert_close(found.pop("x"), wanted.pop("x"), 2e-5, "gradient of x")
    wanted = under_our_names(wanted)
    assert wanted.keys() == found.keys()
    for what, gradient in found.items():
        oracles.assert_close(gradient, wanted[what], 2e-5, f"gradient of {what}")


def test_a_padded_batch_is_their_layers():
    """Left padding, which they cut out by a mask and we skip by positions."""
    theirs, ours = pair("as published")
    x = torch.randn(3, 20, D, generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([20, 7, 13])
    positions = (torch.arange(1, 21) - (20 - lengths)[:, None]).clamp(min=0)
    real = positions > 0
    want, _, _ = theirs(x, attention_mask=real.long())
    order = torch.argsort((~real).long(), dim=1, stable=True)
    moved, positions = x.gather(1, order[..., None].expand_as(x)), positions.gather(1, order)
    got, _ = ours(moved, Context(Layout.of(positions), keep_state=False), None)
    for row, length in enumerate(lengths.tolist()):
        oracles.assert_close(got[row, :length], want[row, 20 - length :], 5e-6, f"row {row}")


def test_initial_values_follow_their_laws():
    """Each kind of parameter over 8 layers of 1024 heads."""
    layer = oracles.fla("layers").GatedDeltaNet
    config = GatedDeltaNetConfig(n_heads=1024, head_dim=1)
    theirs, ours = defaultdict(list), defaultdict(list)
    for seed in range(8):
        torch.manual_seed(seed)
        built = layer(hidden_size=8, head_dim=1, num_heads=1024)
        mixer = GatedDeltaNet(config, Place(8, 0, 1, 1.0, None, "torch"))
        initialise(mixer, seed)
        for sample, tensors in ((theirs, under_our_names(built.state_dict())), (ours, mixer.state_dict())):
            for name, tensor in tensors.items():
                sample[name].append(tensor.numpy().ravel())
    assert theirs.keys() == ours.keys()
    for name, values in theirs.items():
        oracles.assert_same_law(np.concatenate(ours[name]), np.concatenate(values), name)
