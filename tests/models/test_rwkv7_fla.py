"""RWKV-7's time mix against flash-linear-attention's RWKV7Attention: forward, gradients, steps, initial values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from decaybench.core.positions import Layout
from decaybench.models.branch import Context, Place
from decaybench.models.mixers.rwkv7 import RWKV7, RWKV7Config
from decaybench.models.module import initialise
from tests import oracles

pytestmark = pytest.mark.interpreter
N_LAYERS = 3
OURS = {
    "w_lora.lora.0.weight": "decay.down",
    "w_lora.lora.2.weight": "decay.up",
    "w_lora.lora.2.bias": "spectrum.P",
    "a_lora.lora.0.weight": "rate.down",
    "a_lora.lora.2.weight": "rate.up",
    "a_lora.lora.2.bias": "rate.bias",
    "v_lora.lora.0.weight": "mix_value.down",
    "v_lora.lora.2.weight": "mix_value.up",
    "v_lora.lora.2.bias": "mix_value.bias",
    "g_lora.lora.0.weight": "gate.down",
    "g_lora.lora.2.weight": "gate.up",
    "o_proj.weight": "out_proj.weight",
    "g_norm.weight": "norm.weight",
    "g_norm.bias": "norm.bias",
}


def ours_of(theirs, d_model, head_dim, layer) -> RWKV7:
    """Our mixer with their parameters' values."""
    mixer = build(d_model, head_dim, layer)
    named = {OURS.get(name, name): values for name, values in theirs.state_dict().items()}
    mixer.load_state_dict({name: values.reshape(mixer.get_parameter(name).shape) for name, values in named.items()})
    return mixer


def build(d_model, head_dim, layer, n_layers=N_LAYERS, seed=0) -> RWKV7:
    mixer = RWKV7(RWKV7Config(head_dim=head_dim, chunk_size=8), Place(d_model, layer, n_layers, 1.0, None, "torch"))
    initialise(mixer, seed)
    return mixer


def their_layer(d_model, head_dim, layer, n_layers=N_LAYERS):
    # The official epsilon is 64e-5 whatever the head; theirs is a multiple of the head's size.
    return oracles.fla("layers").RWKV7Attention(
        hidden_size=d_model, head_dim=head_dim, layer_idx=layer, num_hidden_layers=n_layers, norm_eps=64e-5 / head_dim
    )


def pair(d_model, head_dim, layer, T, *, B=2, seed=0):
    """Their layer with every parameter randomised, ours with the same values, and the same inputs to both."""
    theirs = oracles.randomise(their_layer(d_model, head_dim, layer), seed)
    draws = torch.Generator().manual_seed(seed + 1)
    x, first = (torch.randn(B, T, d_model, generator=draws).requires_grad_() for _ in range(2))
    return SimpleNamespace(theirs=theirs, ours=ours_of(theirs, d_model, head_dim, layer), x=x, first=first)


def run_ours(case, x, state=None, first=None):
    layout = Layout.fresh(x.shape[1], x.device) if state is None else Layout(torch.full((1, 1), 9), None, None, None)
    context = Context(layout, keep_state=True, shared={"rwkv7.first_value": case.first if first is None else first})
    y, state = case.ours(x, context, state)
    return y, state, context.shared["rwkv7.first_value"]


@pytest.mark.parametrize(("layer", "d_model", "head_dim", "T"), [(0, 64, 64, 21), (1, 64, 32, 70), (2, 48, 16, 9)])
def test_outputs_agree_with_the_chunked_kernel(layer, d_model, head_dim, T):
    """It is what is inexact: it is off by 5e-5 from our float64 result at T = 70, our float32 by 5e-7."""
    case = pair(d_model, head_dim, layer, T, seed=layer)
    with torch.no_grad():
        want, _, _, their_first = case.theirs(case.x, v_first=case.first)
        got, _, our_first = run_ours(case, case.x)
    oracles.assert_close(got, want, 1e-4, "y")
    oracles.assert_close(our_first, their_first, 1e-6, "v_first")


@pytest.mark.parametrize(("layer", "d_model", "head_dim", "T"), [(0, 64, 64, 21), (1, 64, 32, 60), (2, 48, 16, 9)])
def test_outputs_agree_with_the_recurrent_kernel(layer, d_model, head_dim, T):
    """Which the layer takes for short inputs in evaluation."""
    case = pair(d_model, head_dim, layer, T, seed=layer)
    with torch.no_grad():
        want, *_ = case.theirs.eval()(case.x, v_first=case.first)
        whole, _, _ = run_ours(case, case.x)
        _, state, _ = run_ours(case, case.x[:, :-1], first=case.first[:, :-1])
        step, _, _ = run_ours(case, case.x[:, -1:], state, first=case.first[:, -1:])
    oracles.assert_close(whole, want, 5e-6, "y")
    oracles.assert_close(step, want[:, -1:], 5e-6, "the last token from the state")


@pytest.mark.parametrize("layer", [0, 2])
def test_gradients_agree(layer):
    case = pair(32, 16, layer, 13, seed=5 + layer)
    want, _, _, their_first = case.theirs(case.x, v_first=case.first)
    got, _, our_first = run_ours(case, case.x)
    weights = [torch.linspace(0, 9, x.numel()).cos().view(x.shape) for x in (want, their_first)]
    inputs = {"x": case.x} | ({"v_first": case.first} if layer else {})
    losses = [(y * weights[0]).sum() + (v * weights[1]).sum() for y, v in ((want, their_first), (got, our_first))]
    wanted = oracles.gradients(losses[0], inputs | dict(case.theirs.named_parameters()))
    found = oracles.gradients(losses[1], inputs | dict(case.ours.named_parameters()))
    assert len(wanted) == len(found)
    for name, gradient in wanted.items():
        ours = found[OURS.get(name, name)]
        oracles.assert_close(ours, gradient.reshape(ours.shape), 1e-4, name)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_initial_values_follow_the_same_laws(layer):
    """Random ones as distributions, the rest to the last digits."""
    d_model, head_dim = 128, 64
    theirs, ours = [], []
    for seed in range(2):
        torch.manual_seed(seed)
        theirs.append(their_layer(d_model, head_dim, layer).state_dict())
        ours.append(build(d_model, head_dim, layer, seed=seed).state_dict())
    for name, values in theirs[0].items():
        our_name = OURS.get(name, name)
        if not torch.equal(values, theirs[1][name]):
            drawn = [torch.cat([d[key].flatten() for d in draws]) for draws, key in ((ours, our_name), (theirs, name))]
            oracles.assert_same_law(*drawn, name)
            assert torch.allclose(products(ours[0][our_name]), products(values), atol=1e-6), f"{name}: not orthogonal"
        else:
            assert torch.allclose(ours[0][our_name], values.reshape(ours[0][our_name].shape), atol=1e-6), name


def products(matrix):
    """Of the rows or the columns, the fewer."""
    return matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
