"""Mamba-2 against transformers' Mamba2ForCausalLM (in plain PyTorch) with the same weights: logits and all gradients.

Skipped where transformers isn't installed (the extra `parity`).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.models.config import ModelConfig
from decaybench.models.converters import mamba2_from_transformers
from decaybench.models.language_model import build_model
from tests import oracles

BOUND = 2e-5

SHAPES = {
    "one group": {"heads": 4, "groups": 1, "d_state": 16, "headdim": 16, "chunk": 8, "T": 24},
    "two groups": {"heads": 8, "groups": 2, "d_state": 8, "headdim": 8, "chunk": 8, "T": 21},
    "T below a chunk": {"heads": 4, "groups": 1, "d_state": 8, "headdim": 16, "chunk": 256, "T": 7},
    "untied, three layers": {"heads": 8, "groups": 4, "d_state": 4, "headdim": 8, "chunk": 5, "T": 33, "tied": False},
}


def pair(shape, seed):
    """Their model with every parameter randomised, and ours with the same values."""
    transformers = oracles.transformers()
    s = SimpleNamespace(**{"tied": True, **shape})
    d_model, layers = s.heads * s.headdim // 2, 2 if s.tied else 3
    torch.manual_seed(seed)
    theirs = transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(
            vocab_size=29,
            hidden_size=d_model,
            num_hidden_layers=layers,
            num_heads=s.heads,
            head_dim=s.headdim,
            state_size=s.d_state,
            n_groups=s.groups,
            expand=2,
            conv_kernel=4,
            chunk_size=s.chunk,
            tie_word_embeddings=s.tied,
            residual_in_fp32=True,
        )
    )
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in theirs.parameters():
            noise = torch.randn(parameter.shape, generator=draws)
            # Weights by about what keeps activations of order one; the rest about where they start.
            parameter.copy_(noise / d_model**0.5 if parameter.ndim > 1 else parameter + 0.3 * noise)
    config = parse(
        ModelConfig,
        {
            "name": "mamba2",
            "vocab_size": 29,
            "d_model": d_model,
            "n_layers": layers,
            "tie_embeddings": s.tied,
            "mixer": {"d_state": s.d_state, "headdim": s.headdim, "n_groups": s.groups, "chunk_size": 8},
        },
    )
    ours = build_model(config)
    ours.load_state_dict(mamba2_from_transformers(theirs.state_dict()))
    tokens = torch.randint(0, 29, (3, s.T), generator=draws)
    return theirs.eval(), ours, tokens


@pytest.mark.parity
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_gradients_agree(shape, seed):
    theirs, ours, tokens = pair(SHAPES[shape], seed)
    their_logits, our_logits = theirs(tokens).logits, ours(tokens).logits
    assert float(their_logits.detach().std()) > 0.1
    oracles.assert_close(our_logits, their_logits, BOUND, "logits")
    for logits in (their_logits, our_logits):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    wanted = mamba2_from_transformers({name: p.grad for name, p in theirs.named_parameters()})
    found = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert wanted.keys() == found.keys()
    for name, gradient in found.items():
        oracles.assert_close(gradient, wanted[name], BOUND, name, floor=1e-3)


@pytest.mark.parity
@pytest.mark.parametrize("shape", ["one group", "two groups"])
def test_left_padded_rows_agree(shape):
    theirs, ours, tokens = pair(SHAPES[shape], 3)
    T = tokens.shape[1]
    mask = torch.ones_like(tokens)
    mask[0, :5], mask[1, : T - 1] = 0, 0
    positions = mask.cumsum(1) * mask
    real = mask.bool()
    want = theirs(tokens, attention_mask=mask, use_cache=False).logits
    oracles.assert_close(ours(tokens, positions).logits[real], want[real], BOUND, "logits at real tokens")


@pytest.mark.parity
def test_decoding_agrees():
    theirs, ours, tokens = pair(SHAPES["two groups"], 4)
    state = ours.prefill(tokens[:, :9]).state
    whole = theirs(tokens, use_cache=False).logits
    for t in range(9, tokens.shape[1]):
        output = ours.step(tokens[:, t], state)
        state = output.state
        oracles.assert_close(output.logits, whole[:, t], BOUND, f"step {t}")


def names_of(embedding):
    inner = ["norm.weight", "mixer.in_proj.weight", "mixer.conv1d.weight", "mixer.conv1d.bias", "mixer.dt_bias"]
    inner += ["mixer.A_log", "mixer.D", "mixer.norm.weight", "mixer.out_proj.weight"]
    layers = [f"backbone.layers.{n}.{name}" for n in range(2) for name in inner]
    return [f"backbone.{embedding}.weight", *layers, "backbone.norm_f.weight", "lm_head.weight"]


@pytest.mark.parametrize("embedding", ["embedding", "embeddings"])  # mamba-ssm's name, transformers' name
@pytest.mark.parametrize("tied", [True, False])
def test_every_name_is_mapped(embedding, tied):
    model = build_model(parse(ModelConfig, {"d_model": 64, "tie_embeddings": tied}), device="meta")
    theirs = {name: torch.full((3, 1, 4), float(n)) for n, name in enumerate(names_of(embedding))}
    if tied:
        theirs["lm_head.weight"] = theirs[f"backbone.{embedding}.weight"].clone()
    ours = mamba2_from_transformers(theirs)
    assert ours.keys() == model.state_dict().keys()
    assert ours["blocks.1.mixer.conv.weight"].shape == (3, 4)
    assert torch.equal(ours["blocks.1.mixer.spectrum.P"], theirs["backbone.layers.1.mixer.A_log"])


def test_a_tensor_without_a_place_is_named():
    with pytest.raises(UserError, match=r"tensor 'backbone\.layers\.0\.mixer\.in_proj\.bias' has no place"):
        mamba2_from_transformers({"backbone.layers.0.mixer.in_proj.bias": torch.zeros(3)})
