"""Mamba-2 against mamba-ssm: the op and its SSD kernels, mixer and model with the same weights, initial values.

Their Triton kernels are run by Triton's interpreter (tests.oracles). scalar_decay is also held against
flash-linear-attention's plain forms of the same recurrence.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from decaybench.core.config import parse
from decaybench.core.positions import Layout
from decaybench.models.branch import Context
from decaybench.models.config import ModelConfig
from decaybench.models.converters import mamba2_from_transformers
from decaybench.models.language_model import build_model
from decaybench.models.ops.scalar_decay import scalar_decay
from tests import oracles

pytestmark = pytest.mark.interpreter

# B, T, H heads of V, G groups of K; documents: tokens of each row's documents; the kernels' chunks hold 16 tokens.
KERNEL_CASES = {
    "T below a chunk": {"T": 5},
    "whole chunks": {"T": 32},
    "a part of a chunk, groups": {"T": 41, "H": 4, "G": 2},
    "a state before": {"T": 35, "state": True},
    "documents": {"T": 40, "documents": [[7, 9, 24], [16, 16, 8]]},
    "documents, a state before the first": {"T": 37, "G": 2, "state": True, "documents": [[20, 1, 16], [37]]},
}


def random(seed, **shapes):
    """Normal leaves of the shapes given, by name."""
    draws = torch.Generator().manual_seed(seed)
    leaves = {name: torch.randn(shape, generator=draws) for name, shape in shapes.items()}
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}


def weighed(*outputs):
    """A sum of the outputs with different weights, so that each of them has its own gradient."""
    return sum((x * torch.linspace(-2, 2, x.numel(), dtype=x.dtype).cos().view_as(x)).sum() for x in outputs)


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_the_op_is_the_ssd_kernel(name):
    scan = oracles.mamba_ssm("ops.triton.ssd_combined").mamba_chunk_scan_combined
    case = {"B": 2, "H": 2, "G": 1, "K": 8, "V": 4, "state": False, "documents": None, **KERNEL_CASES[name]}
    B, T, H, G, K, V = (case[size] for size in "BTHGKV")
    shapes = {"x": (B, T, H, V), "dt": (B, T, H), "A": (H,), "B": (B, T, G, K), "C": (B, T, G, K)}
    if case["state"]:
        shapes["state"] = (B, H, V, K)
    leaves = random(0, **shapes)
    dt, A, state = F.softplus(leaves["dt"]), -leaves["A"].exp(), leaves.get("state")
    documents = positions = None
    if case["documents"]:
        lengths = case["documents"]
        documents = torch.tensor([np.repeat(np.arange(len(row)), row).tolist() for row in lengths], dtype=torch.int32)
        positions = torch.tensor([[t + 1 for n in row for t in range(n)] for row in lengths])
        if case["state"]:  # each row's first document goes on from its 100th token
            positions = torch.where(documents == 0, positions + 100, positions)

    theirs = scan(
        leaves["x"],
        dt,
        A,
        leaves["B"],
        leaves["C"],
        chunk_size=16,
        initial_states=state,
        seq_idx=documents,
        return_final_states=True,
    )
    o, final = scalar_decay(
        leaves["C"],
        leaves["B"],
        leaves["x"] * dt[..., None],
        A * dt,
        initial_state=None if state is None else state.transpose(-1, -2),
        output_final_state=True,
        layout=None if positions is None else Layout.of(positions, has_state=state is not None),
        chunk_size=7,
    )
    ours = o, final.transpose(-1, -2)
    for what, got, want in zip(("o", "final state"), ours, theirs, strict=True):
        oracles.assert_close(got, want, 2e-6, what)
    wanted = oracles.gradients(weighed(*theirs), leaves)
    for what, got in oracles.gradients(weighed(*ours), leaves).items():
        oracles.assert_close(got, wanted[what], 1e-5, f"gradient of {what}")


@pytest.mark.parametrize("T", [1, 37])
def test_the_op_is_simple_linear_attention(T):
    """flash-linear-attention's plain forms of the recurrence, which scale q by 1/sqrt(K)."""
    naive = oracles.fla("ops.simple_gla.naive")
    B, H, K, V = 2, 3, 4, 5
    leaves = random(1, q=(B, T, H, K), k=(B, T, H, K), v=(B, T, H, V), g=(B, T, H), state=(B, H, K, V))
    q, k, v, g, state = leaves["q"], leaves["k"], leaves["v"], F.logsigmoid(leaves["g"]), leaves["state"]
    theirs = naive.naive_recurrent_simple_gla(q=q, k=k, v=v, g=g, initial_state=state, output_final_state=True)
    ours = scalar_decay(q / K**0.5, k, v, g, initial_state=state, output_final_state=True, chunk_size=8)
    for what, got, want in zip(("o", "final state"), ours, theirs, strict=True):
        oracles.assert_close(got, want, 2e-6, what)
    wanted = oracles.gradients(weighed(*theirs), leaves)
    for what, got in oracles.gradients(weighed(*ours), leaves).items():
        oracles.assert_close(got, wanted[what], 1e-5, f"gradient of {what}")


def test_the_op_with_fixed_decays_is_retention():
    naive_retention = oracles.fla("ops.retention.naive").naive_retention
    B, T, H, K = 2, 29, 4, 8
    leaves = random(2, q=(B, T, H, K), k=(B, T, H, K), v=(B, T, H, K))
    q, k, v = leaves.values()
    theirs = naive_retention(q=q.transpose(1, 2), k=k.transpose(1, 2), v=v.transpose(1, 2)).transpose(1, 2)
    log_gamma = torch.log1p(-(2.0 ** -(5.0 + torch.arange(H))))
    ours, _ = scalar_decay(q / K**0.5, k, v, log_gamma.expand(B, T, H), chunk_size=8)
    oracles.assert_close(ours, theirs, 2e-6, "o")
    wanted = oracles.gradients(weighed(theirs), leaves)
    for what, got in oracles.gradients(weighed(ours), leaves).items():
        oracles.assert_close(got, wanted[what], 1e-5, f"gradient of {what}")


def pair(shape, seed, layers=1):
    """Their language model without fused kernels (which need CUDA's convolution), and ours of the same shape."""
    models = oracles.mamba_ssm("models.mixer_seq_simple")
    config = oracles.mamba_ssm("models.config_mamba").MambaConfig(
        d_model=shape["d_model"],
        n_layer=layers,
        vocab_size=29,
        ssm_cfg={
            "layer": "Mamba2",
            "d_state": shape["d_state"],
            "headdim": shape["headdim"],
            "ngroups": shape["groups"],
            "chunk_size": 16,
            "use_mem_eff_path": False,
        },
        fused_add_norm=False,
        pad_vocab_size_multiple=1,
    )
    torch.manual_seed(seed)
    theirs = models.MambaLMHeadModel(config)
    sizes = {"d_state": shape["d_state"], "headdim": shape["headdim"], "n_groups": shape["groups"], "chunk_size": 8}
    ours = {"name": "mamba2", "vocab_size": 29, "d_model": shape["d_model"], "n_layers": layers, "mixer": sizes}
    return theirs, build_model(parse(ModelConfig, ours), seed)


SHAPES = {
    "one group": {"d_model": 16, "d_state": 8, "headdim": 8, "groups": 1},
    "two groups": {"d_model": 16, "d_state": 4, "headdim": 8, "groups": 2},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_mixer_is_their_module(shape):
    theirs, ours = pair(SHAPES[shape], 3)
    oracles.randomise(theirs, 3)
    ours.load_state_dict(mamba2_from_transformers(theirs.state_dict()))
    their_mixer, our_mixer = theirs.backbone.layers[0].mixer, ours.blocks[0].mixer
    x = torch.randn(1, 21, SHAPES[shape]["d_model"], generator=torch.Generator().manual_seed(4)).requires_grad_()
    want = their_mixer(x)
    got, _ = our_mixer(x, Context(Layout.fresh(21, x.device), keep_state=False), None)
    oracles.assert_close(got, want, 5e-6, "y")
    (wanted,), (found,) = (torch.autograd.grad(weighed(y), [x], retain_graph=True) for y in (want, got))
    oracles.assert_close(found, wanted, 1e-5, "gradient of x")
    wanted = oracles.gradients(
        weighed(want), {f"backbone.layers.0.mixer.{n}": p for n, p in their_mixer.named_parameters()}
    )
    found = oracles.gradients(weighed(got), {f"blocks.0.mixer.{n}": p for n, p in our_mixer.named_parameters()})
    wanted = mamba2_from_transformers(wanted)
    assert wanted.keys() == found.keys()
    for what, gradient in found.items():
        oracles.assert_close(gradient, wanted[what], 1e-5, f"gradient of {what}")


def test_the_model_is_theirs():
    theirs, ours = pair(SHAPES["two groups"], 5, layers=2)
    oracles.randomise(theirs, 5)
    ours.load_state_dict(mamba2_from_transformers(theirs.state_dict()))
    tokens = torch.randint(0, 29, (1, 19), generator=torch.Generator().manual_seed(6))
    their_logits, our_logits = theirs(tokens).logits, ours(tokens).logits
    oracles.assert_close(our_logits, their_logits, 1e-5, "logits")
    for logits in (their_logits, our_logits):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    wanted = mamba2_from_transformers({name: p.grad for name, p in theirs.named_parameters()})
    found = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert wanted.keys() == found.keys()
    for what, gradient in found.items():
        oracles.assert_close(gradient, wanted[what], 2e-5, f"gradient of {what}", floor=1e-3)


def test_a_step_is_theirs():
    """Their `step` from an empty cache, output and state, against ours from the state of a prefill."""
    theirs, ours = pair(SHAPES["two groups"], 7)
    oracles.randomise(theirs, 7)
    ours.load_state_dict(mamba2_from_transformers(theirs.state_dict()))
    their_mixer, our_mixer = theirs.backbone.layers[0].mixer.eval(), ours.blocks[0].mixer
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        conv, ssm = their_mixer.allocate_inference_cache(2, 6)
        steps = [their_mixer.step(x[:, t : t + 1], conv, ssm)[0] for t in range(6)]
        _, state = our_mixer(x[:, :4], Context(Layout.fresh(4, x.device), keep_state=True), None)
        for t in (4, 5):
            layout = Layout.of(torch.full((2, 1), t + 1), has_state=True)
            y, state = our_mixer(x[:, t : t + 1], Context(layout, keep_state=True), state)
            oracles.assert_close(y, steps[t], 5e-6, f"step {t}")
    oracles.assert_close(state.ssm, ssm.transpose(-1, -2), 5e-6, "state")
    oracles.assert_close(state.conv, conv[..., 1:].transpose(1, 2), 5e-6, "convolution's inputs")


def test_initial_values_follow_their_laws():
    """Each kind of parameter over 16 models of 4 layers, the embedding and the shrinking of out_proj included."""
    shape = {"d_model": 64, "d_state": 4, "headdim": 1, "groups": 1}  # many heads: 8192 values of A, dt and D each
    theirs, ours = defaultdict(list), defaultdict(list)
    for seed in range(16):
        their_model, our_model = pair(shape, seed, layers=4)
        converted = mamba2_from_transformers(their_model.state_dict())
        for sample, tensors in ((theirs, converted), (ours, our_model.state_dict())):
            for name, tensor in tensors.items():
                sample[name.split(".", 2)[-1] if name.startswith("blocks") else name].append(tensor.numpy().ravel())
    assert theirs.keys() == ours.keys()
    for name, values in theirs.items():
        oracles.assert_same_law(np.concatenate(ours[name]), np.concatenate(values), name)
