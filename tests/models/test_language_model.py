"""The language model: what forward, prefill and step promise to a caller."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from decaybench.core.errors import UserError
from decaybench.core.positions import Layout
from decaybench.models.branch import Context
from decaybench.models.language_model import build_model, resolve_backend
from decaybench.models.module import treatments
from decaybench.models.state import tensors
from tests.models import small
from tests.models.small import largest

MODELS = [("mamba2", None), ("mamba2", {"variant": "paper", "horizon": 32}), ("attention", None)]


@pytest.fixture(params=MODELS, ids=["mamba2", "mamba2+post", "attention"])
def model(request):
    name, post = request.param
    return small.model(name, post=post)


def left_padded(lengths, width, seed=0):
    tokens, positions = small.tokens(len(lengths), width, seed=seed), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        positions[row, width - length :] = torch.arange(1, length + 1)
    return tokens, positions


def test_logits_are_given_for_every_token(model):
    output = model(small.tokens(2, 9))
    assert output.logits.shape == (2, 9, 31)
    assert output.state is None


def test_logits_only_where_asked(model):
    tokens = small.tokens(3, 11)
    where = torch.zeros(3, 11, dtype=torch.bool)
    where[0, [2, 5]] = where[2, 10] = True
    asked = model(tokens, logits_at=where).logits
    assert asked.shape == (3, 31)
    assert largest(asked, model(tokens).logits[where]) < 1e-12
    assert model(tokens, logits_at=torch.zeros_like(where)).logits.shape == (0, 31)


def test_prefill_gives_the_logits_after_each_rows_last_token(model):
    tokens, positions = left_padded([9, 4, 1], 9)
    positions[1] = torch.tensor([1, 2, 0, 3, 4, 0, 0, 5, 0])  # padding between and after
    whole = model(tokens, positions).logits
    want = torch.stack([whole[0, 8], whole[1, 7], whole[2, 8]])
    for piece in (1, 2, 4, 9, 100):
        output = model.prefill(tokens, positions, piece=piece)
        assert largest(output.logits, want) < 1e-12
        assert output.state.seen.tolist() == [9, 5, 1]


def test_a_row_of_padding_keeps_its_state_and_has_no_logits(model):
    tokens = small.tokens(2, 6)
    state = model.prefill(tokens).state
    positions = torch.tensor([[0] * 6, [7, 8, 9, 10, 11, 12]])
    output = model.prefill(tokens, positions, state)
    assert torch.equal(output.logits[0], torch.zeros(31, dtype=torch.float64))
    assert output.state.seen.tolist() == [6, 12]
    following = torch.tensor([3, 3])
    assert largest(model.step(following, output.state).logits[0], model.step(following, state).logits[0]) < 1e-12


def test_rows_that_have_seen_nothing_start_when_their_first_token_comes(model):
    """Long left padding, read in pieces: some pieces hold no token of a row."""
    tokens, positions = left_padded([20, 3], 20)
    positions[1, 17:] += 40  # a document whose beginning is left out
    whole = model(tokens, positions, output_state=True)
    output = model.prefill(tokens, positions, piece=5)
    assert largest(output.logits, whole.logits[:, -1]) < 1e-12
    assert output.state.seen.tolist() == whole.state.seen.tolist() == [20, 43]


def test_a_state_gives_any_of_its_rows(model):
    tokens = small.tokens(4, 7)
    state = model(tokens, output_state=True).state
    rows = torch.tensor([2, 0, 2])
    selected = state.select(rows)
    assert selected.seen.tolist() == [7, 7, 7]
    following = small.tokens(4, seed=1)
    want = model.step(following, state).logits[rows]
    assert largest(model.step(following[rows], selected).logits, want) < 1e-12


def test_a_detached_state_has_no_history(model):
    state = model(small.tokens(1, 4), output_state=True).state
    assert any(t.requires_grad for t in tensors(state))
    assert not any(t.requires_grad for t in tensors(state.detach()))
    assert all(torch.equal(a, b) for a, b in zip(tensors(state), tensors(state.detach()), strict=True))


def test_state_elements_are_counted_from_the_state():
    d_state, headdim, inner, width = 8, 8, 64, 4
    built = small.model("mamba2", mixer={"n_groups": 2})
    per_layer = inner // headdim * headdim * d_state + (width - 1) * (inner + 2 * 2 * d_state)
    for T in (1, 30):
        assert built(small.tokens(3, T), output_state=True).state.elements() == (per_layer, per_layer)
    attention = small.model("attention")
    counts = [attention(small.tokens(3, T), output_state=True).state.elements()[0] for T in (5, 10)]
    assert counts == [5 * (2 * 32 + 1), 10 * (2 * 32 + 1)]  # keys, values and positions of each token


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ([[1, 2, 4], [1, 2, 3]], "row 0 goes from 2 to 4"),
        ([[1, 2, 3]], r"positions must be \(2, 3\) like tokens, not \(1, 3\)"),
        ([[1, 2], [1, 2]], r"positions must be \(2, 3\)"),
    ],
)
def test_positions_that_cannot_be_are_refused(model, positions, said):
    with pytest.raises(ValueError, match=said):
        model(small.tokens(2, 3), torch.tensor(positions))


def test_positions_must_go_on_from_the_state(model):
    tokens = small.tokens(2, 3)
    state = model(tokens, output_state=True).state
    with pytest.raises(ValueError, match="row 1 goes from 3 to 6"):
        model(tokens, torch.tensor([[4, 5, 6], [6, 7, 8]]), state)
    with pytest.raises(ValueError, match="row 0 goes from 3 to 3"):
        model.step(tokens[:, 0], state, torch.tensor([3, 4]))


@pytest.mark.parametrize("call", ["__call__", "prefill"])
def test_no_tokens_at_all_are_refused(model, call):
    with pytest.raises(ValueError, match="at least one column"):
        getattr(model, call)(small.tokens(2, 0))


def test_tied_and_untied_heads():
    tied, untied = (build_model(small.config(tie_embeddings=tie)) for tie in (True, False))
    assert tied.head is None
    assert "head.weight" in untied.state_dict()
    x = torch.randn(3, 32)
    assert torch.equal(tied._logits(x), F.linear(x, tied.embedding.weight))
    assert torch.equal(untied._logits(x), F.linear(x, untied.head.weight))
    shared = tied.state_dict().keys()
    assert all(torch.equal(tied.state_dict()[key], untied.state_dict()[key]) for key in shared)


def test_swiglu_and_mlp_are_their_formulas():
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    gated = small.model(ffn={"kind": "swiglu", "multiple": 2.0}).blocks[0].ffn
    up = gated.in_proj.weight
    by_hand = (F.silu(x @ up[:64].T) * (x @ up[64:].T)) @ gated.out_proj.weight.T
    assert largest(gated(x, None, None)[0], by_hand) < 1e-12
    plain = small.model(ffn={"kind": "mlp", "multiple": 2.0}).blocks[0].ffn
    assert largest(plain(x, None, None)[0], F.gelu(x @ plain.in_proj.weight.T) @ plain.out_proj.weight.T) < 1e-12


@pytest.mark.parametrize(("multiple", "hidden"), [(8 / 3, 88), (2.0, 64), (1.0, 32), (0.01, 8)])
def test_the_ffns_width_is_a_multiple_of_eight(multiple, hidden):
    built = build_model(small.config(ffn={"kind": "mlp", "multiple": multiple}))
    assert built.blocks[0].ffn.in_proj.weight.shape == (hidden, 32)
    assert built(small.tokens(1, 3)).logits.isfinite().all()


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norms_are_torchs(kind):
    built = small.model(norm=kind, norm_eps=1e-3)
    x = torch.randn(4, 32, dtype=torch.float64) * 3 + 1
    norm = built.norm
    if kind == "rmsnorm":
        want = F.rms_norm(x, (32,), norm.weight, eps=1e-3)
    else:
        want = F.layer_norm(x, (32,), norm.weight, norm.bias, eps=1e-3)
    assert largest(norm(x), want) < 1e-12
    assert built(small.tokens(2, 5)).logits.shape == (2, 5, 31)


def test_the_gated_norm_works_within_each_group_of_heads():
    norm = small.model(mixer={"n_groups": 2}).blocks[0].mixer.norm
    x = torch.randn(3, 64, dtype=torch.float64)
    halves = [
        F.rms_norm(part, (32,), weight, eps=1e-5)
        for part, weight in zip(x.chunk(2, -1), norm.weight.chunk(2), strict=True)
    ]
    assert largest(norm(x), torch.cat(halves, dim=-1)) < 1e-12


@torch.no_grad()
def test_initial_values_are_mamba2s():
    built = build_model(small.config(d_model=256, n_layers=4))
    A = torch.cat([block.mixer.spectrum.P for block in built.blocks]).exp()
    dt = F.softplus(torch.cat([block.mixer.dt_bias for block in built.blocks]))
    assert len(A) == 256
    assert A.min() > 1 - 1e-5
    assert A.max() < 16
    assert A.mean() == pytest.approx(8.5, abs=1)  # uniform: sd of the mean is 0.27
    assert dt.min() > 1e-3 * 0.999
    assert dt.max() < 0.1001
    assert dt.log().mean() == pytest.approx(-4.6, abs=0.4)  # log-uniform: sd of the mean is 0.08
    assert all(torch.equal(block.mixer.D, torch.ones(64)) for block in built.blocks)
    assert all(torch.equal(block.norm.weight, torch.ones(256)) for block in built.blocks)
    assert built.embedding.weight.std() == pytest.approx(0.02, rel=0.05)
    assert built.blocks[0].mixer.out_proj.weight.abs().max() <= 1 / (512**0.5 * 2)


def test_decay_parameters_and_norms_stay_in_float32_and_return_unchanged(model):
    model = model.float()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    low = copy.deepcopy(model).to(torch.bfloat16)
    kept = [name for name, value in low.state_dict().items() if value.dtype == torch.float32]
    decays = [name for name in before if "spectrum" in name or name.endswith(("dt_bias", ".D"))]
    assert set(decays) <= set(kept)
    assert {name for name in before if "norm" in name} <= set(kept)
    assert all(torch.equal(low.state_dict()[name], before[name]) for name in kept)
    assert all(value.dtype == torch.bfloat16 for name, value in low.state_dict().items() if "proj" in name)
    assert all(value.dtype == torch.float64 for value in low.double().state_dict().values())


def test_weight_decay_is_for_matrices_alone():
    decays = treatments(build_model(small.config(ffn={}, tie_embeddings=False, norm="layernorm")))
    assert {name for name, wanted in decays.items() if wanted.decays} == {
        name
        for name in decays
        if "proj" in name or "conv.weight" in name or name in ("embedding.weight", "head.weight")
    }
    frozen = treatments(build_model(small.config(post={"horizon": 8})))
    assert not any("dt_bias" in name for name in frozen)
    assert not any(frozen[name].decays for name in frozen if "spectrum" in name)


def test_which_parameters_decay_may_be_all_or_all_weights():
    built = build_model(small.config("rwkv7"))
    usual, matrices, everything = (treatments(built, which) for which in (None, "matrices", "all"))
    added = {name for name in usual if matrices[name].decays != usual[name].decays}
    assert added == {name for name in usual if name.endswith((".down", ".up"))} != set()
    assert not matrices["blocks.0.mixer.r_k"].decays, "two dimensions, and no weight of a projection"
    assert all(wanted.decays for wanted in everything.values())
    for found in (matrices, everything):
        assert {name: wanted.factor for name, wanted in found.items()} == {n: w.factor for n, w in usual.items()}


def test_a_norm_in_the_place_of_an_ffn_is_added_to_the_stream():
    built = small.model("gla", norm="layernorm", norm_branch=True, final_norm="rmsnorm")
    tokens = small.tokens(2, 9)
    layout = Layout.fresh(9, tokens.device)
    x = built.embedding.weight[tokens]
    for block in built.blocks:
        x = x + block.mixer(block.norm(x), Context(layout, keep_state=False, trace=None), None)[0]
        mean, std = x.mean(-1, keepdim=True), (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        x = x + (x - mean) / std * block.ffn_norm.weight + block.ffn_norm.bias
    x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * built.norm.weight
    assert largest(built(tokens).logits, x @ built.embedding.weight.T) < 1e-12
    state = built.prefill(tokens[:, :5]).state
    for place in range(5, 9):
        output = built.step(tokens[:, place], state)
        state = output.state
    assert largest(output.logits, built(tokens).logits[:, -1]) < 1e-12
    with pytest.raises(UserError, match=r"model.norm_branch stands in the place of an FFN"):
        small.config(norm_branch=True, ffn={})


def test_a_model_on_meta_has_shapes_and_no_values():
    built = build_model(small.config(d_model=4096, n_layers=3), device="meta")
    assert all(parameter.is_meta for parameter in built.parameters())
    assert built(small.tokens(1, 4).to("meta")).logits.shape == (1, 4, 31)


def test_tokens_may_be_strided(model):
    strided = small.tokens(9, 2).T
    assert torch.equal(model(strided).logits, model(strided.contiguous()).logits)


def test_backends_are_resolved_by_name():
    assert resolve_backend("auto", "mamba2")[0] == "torch"
    assert resolve_backend("torch", "mamba2") == ("torch", "as asked")
    with pytest.raises(UserError, match="unknown backend for mamba2 'fla'"):
        resolve_backend("fla", "mamba2")
