"""RWKV-7's channel mix against a loop over its formula, and what an FFN with a state must hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decaybench.core.config import parse
from decaybench.core.positions import Layout
from decaybench.models.branch import Context, Place
from decaybench.models.ffn import ChannelMix, FfnConfig
from decaybench.models.language_model import build_model
from decaybench.models.module import initialise
from tests.models import small


def place(layer: int = 0, n_layers: int = 1, d_model: int = 32) -> Place:
    return Place(d_model, layer, n_layers, 1.0, None, "torch")


def channel_mix() -> dict[str, str]:
    return {"kind": "channel_mix"}


@pytest.mark.parametrize(
    ("kind", "hidden"), [("mlp", 128), ("swiglu", 88), ("channel_mix", 128)], ids=["mlp", "swiglu", "channel_mix"]
)
def test_each_kind_has_its_usual_width(kind, hidden):
    assert parse(FfnConfig, {"kind": kind}).hidden(32) == hidden
    assert parse(FfnConfig, {"kind": kind, "multiple": 2}).hidden(32) == 64


def test_the_channel_mix_is_its_formula():
    model = small.model("mamba2", ffn=channel_mix())
    found = model.blocks[1].ffn
    assert isinstance(found, ChannelMix)
    values = {name: value.detach().numpy() for name, value in found.named_parameters()}
    documents = [np.random.default_rng(n).normal(size=(length, 32)) for n, length in enumerate((5, 3))]

    want = []
    for document in documents:
        before = np.zeros(32)
        for x in document:
            hidden = values["in_proj.weight"] @ (x + (before - x) * values["x_k"])
            want.append(values["out_proj.weight"] @ np.maximum(hidden, 0) ** 2)
            before = x

    positions = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3, 0]])
    x = torch.cat([torch.from_numpy(np.concatenate(documents)), torch.full((1, 32), 9.0, dtype=torch.float64)])[None]
    y, state = found(x, Context(Layout.of(positions), keep_state=True), None)
    assert np.allclose(y[0, :-1].detach().numpy(), np.array(want), atol=1e-12)
    assert torch.equal(state.last, x[:, 7:8])


def test_its_initial_values():
    """x_k falls over the channels, the steeper the earlier the layer; the branch starts as the identity."""
    for layer, n_layers in ((0, 4), (2, 4), (0, 1)):
        found = ChannelMix(parse(FfnConfig, channel_mix()), place(layer, n_layers))
        initialise(found, 0)
        remaining = 1 - layer / n_layers
        assert np.allclose(found.x_k.detach(), 1 - (np.arange(32) / 32) ** (remaining**4))
        W = found.in_proj.weight.detach().double()
        assert W.shape == (128, 32)
        assert torch.allclose(W.T @ W, torch.eye(32, dtype=torch.float64), atol=1e-6)
        assert not found.out_proj.weight.any()


def test_its_state_is_counted_and_a_step_is_a_forward_pass():
    model = small.model("mamba2", ffn=channel_mix())
    without = small.model("mamba2", ffn={"kind": "swiglu"})
    tokens = small.tokens(2, 7)
    output = model(tokens[:, :6], output_state=True)
    elements = [m(tokens, output_state=True).state.elements() for m in (model, without)]
    assert [a - b for a, b in zip(*elements, strict=True)] == [32, 32]
    assert small.largest(model.step(tokens[:, 6], output.state).logits, model(tokens).logits[:, 6]) < 1e-12


def test_an_embedding_norm_and_dropout():
    model = small.model(embedding_norm=True, norm="layernorm")
    assert small.largest(model._embed(small.tokens(2, 3)).mean(-1), torch.zeros(2, 3)) > 0  # its bias was moved
    built = build_model(small.config(embedding_norm=True, norm="layernorm"))
    embedded = built._embed(small.tokens(2, 3))
    assert small.largest(embedded.mean(-1), torch.zeros(2, 3)) < 1e-6
    assert small.largest(embedded.var(-1, correction=0), torch.ones(2, 3)) < 0.05

    dropping = build_model(small.config(embedding_dropout=0.5))
    tokens = small.tokens(4, 50)
    torch.manual_seed(0)
    share = float((dropping._embed(tokens) == 0).float().mean())
    assert abs(share - 0.5) < 5 * (0.25 / (4 * 50 * 32)) ** 0.5
    assert torch.equal(dropping.eval()(tokens).logits, build_model(small.config())(tokens).logits)
