"""Other people's weights under our names. The tensors are taken as they are; only names and singleton axes change."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from decaybench.core.errors import UserError

_OUTER = {
    "embedding.weight": "embedding.weight",
    "embeddings.weight": "embedding.weight",
    "norm_f.weight": "norm.weight",
}
_INNER = {
    "norm.weight": "norm.weight",
    "mixer.in_proj.weight": "mixer.in_proj.weight",
    "mixer.conv1d.weight": "mixer.conv.weight",
    "mixer.conv1d.bias": "mixer.conv.bias",
    "mixer.dt_bias": "mixer.dt_bias",
    "mixer.A_log": "mixer.spectrum.P",
    "mixer.D": "mixer.D",
    "mixer.norm.weight": "mixer.norm.weight",
    "mixer.out_proj.weight": "mixer.out_proj.weight",
}
_HEAD, _EMBEDDING = "lm_head.weight", "embedding.weight"


def mamba2_from_transformers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of our `mamba2` from that of a Mamba-2 language model of transformers or mamba-ssm.

    Sources: transformers' Mamba2ForCausalLM (models/mamba2/modeling_mamba2.py), mamba-ssm's MambaLMHeadModel
    (models/mixer_seq_simple.py, modules/mamba2.py); they differ in `embeddings` for `embedding`. Both lay in_proj's
    rows out as ours does: z, x, B, C, dt. A head equal to the embedding is left out, as for `tie_embeddings`.
    Raises UserError on a tensor that our model has no place for, such as the projections' biases.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name != _HEAD:
            ours = _our_name(name)
            named[ours] = tensor.squeeze(1) if ours.endswith("conv.weight") else tensor
    head = tensors.get(_HEAD)
    if head is not None and not (_EMBEDDING in named and torch.equal(head, named[_EMBEDDING])):
        named["head.weight"] = head
    return named


def _our_name(name: str) -> str:
    inner = name.removeprefix("backbone.")
    block = re.fullmatch(r"layers\.(\d+)\.(.+)", inner)
    if block and block[2] in _INNER:
        return f"blocks.{block[1]}.{_INNER[block[2]]}"
    if inner in _OUTER:
        return _OUTER[inner]
    raise UserError(f"a Mamba-2 checkpoint's tensor {name!r} has no place in this model")
