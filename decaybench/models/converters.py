"""Other people's weights under our names. The tensors are taken as they are; only names and singleton axes change."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path

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

_RWKV_OUTER = {
    "emb": "embedding",
    "blocks.0.ln0": "embedding_norm",
    "ln_out": "norm",
    "head": "head",
}
_RWKV_INNER = {
    "ln1": "norm",
    "ln2": "ffn_norm",
    "att.receptance": "mixer.r_proj",
    "att.key": "mixer.k_proj",
    "att.value": "mixer.v_proj",
    "att.output": "mixer.out_proj",
    "att.ln_x": "mixer.norm",
    "att.w0": "mixer.spectrum.P",
    "att.w1": "mixer.decay.down",
    "att.w2": "mixer.decay.up",
    "att.a0": "mixer.rate.bias",
    "att.a1": "mixer.rate.down",
    "att.a2": "mixer.rate.up",
    "att.v0": "mixer.mix_value.bias",
    "att.v1": "mixer.mix_value.down",
    "att.v2": "mixer.mix_value.up",
    "att.g1": "mixer.gate.down",
    "att.g2": "mixer.gate.up",
    "att.k_k": "mixer.k_k",
    "att.k_a": "mixer.k_a",
    "att.r_k": "mixer.r_k",
    "ffn.x_k": "ffn.x_k",
    "ffn.key": "ffn.in_proj",
    "ffn.value": "ffn.out_proj",
}
_RWKV_MIXES = "rwkvag"  # rwkv.cpp keeps the six mixes of the token shift in one tensor, in this order


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


def rwkv7_from_rwkv_cpp(path: Path) -> dict[str, Tensor]:
    """The state dict of our `rwkv7` from a file of RWKV-7 weights in rwkv.cpp's format, float32 or float16.

    The model has `norm` layernorm, `embedding_norm`, an FFN of kind channel_mix and a head of its own.
    Source: rwkv.cpp's docs/FILE_FORMAT.md. Layer 0's value residual, which nothing uses, is left out where a file has
    it. Raises UserError on another format, on quantised weights and on a tensor that our model has no place for.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in _read_rwkv_cpp(path).items():
        block = re.fullmatch(r"blocks\.(\d+)\.att\.x_rwkvag", name)
        if block:
            for mix, values in zip(_RWKV_MIXES, tensor, strict=True):
                named[f"blocks.{block[1]}.mixer.x_{mix}"] = values.flatten()
        elif not re.fullmatch(r"blocks\.0\.att\.v[012]", name):
            ours = _our_rwkv_name(name)
            named[ours] = tensor.flatten() if tensor.shape[:-1].numel() == 1 and not ours.endswith("r_k") else tensor
    return named


def _read_rwkv_cpp(path: Path) -> dict[str, Tensor]:
    data = path.read_bytes()
    if len(data) < 24 or struct.unpack_from("=2i", data) not in {(0x67676D66, 100), (0x67676D66, 101)}:
        raise UserError(f"{path} is not a file of rwkv.cpp's format, version 100 or 101")
    try:
        return _tensors_of(data, path)
    except (struct.error, UnicodeDecodeError, RuntimeError, ValueError):
        raise UserError(f"{path} ends in the middle of a tensor, or is damaged") from None


def _tensors_of(data: bytes, path: Path) -> dict[str, Tensor]:
    found, at = {}, 24
    while at < len(data):
        n_dims, n_name, kind = struct.unpack_from("=3i", data, at)
        shape = struct.unpack_from(f"={n_dims}i", data, at + 12)[::-1]  # the file counts from the fastest dimension
        at += 12 + 4 * n_dims + n_name
        name = data[at - n_name : at].decode()
        if kind not in (0, 1):
            raise UserError(f"{path}: tensor {name!r} is quantised; only float32 and float16 can be read")
        dtype = (torch.float32, torch.float16)[kind]
        count = torch.Size(shape).numel()
        found[name] = torch.frombuffer(bytearray(data[at : at + count * dtype.itemsize]), dtype=dtype).view(shape)
        at += count * dtype.itemsize
    return found


def _our_rwkv_name(name: str) -> str:
    stem, dot, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        stem, dot, suffix = name, "", ""
    if stem in _RWKV_OUTER:
        return f"{_RWKV_OUTER[stem]}{dot}{suffix}"
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", stem)
    if block and block[2] in _RWKV_INNER:
        return f"blocks.{block[1]}.{_RWKV_INNER[block[2]]}{dot}{suffix}"
    raise UserError(f"an RWKV-7 file's tensor {name!r} has no place in this model")


def _our_name(name: str) -> str:
    inner = name.removeprefix("backbone.")
    block = re.fullmatch(r"layers\.(\d+)\.(.+)", inner)
    if block and block[2] in _INNER:
        return f"blocks.{block[1]}.{_INNER[block[2]]}"
    if inner in _OUTER:
        return _OUTER[inner]
    raise UserError(f"a Mamba-2 checkpoint's tensor {name!r} has no place in this model")
