"""A whole RWKV-7 against the logits that rwkv.cpp's own tests expect, and the reader of its file format."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.models.config import ModelConfig
from decaybench.models.converters import rwkv7_from_rwkv_cpp
from decaybench.models.language_model import build_model
from tests.models.small import largest

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "weights" / "rwkv.cpp"
WEIGHTS, EXPECTED = FOLDER / "tiny-rwkv-7v0-834K-FP32.bin", FOLDER / "expected-logits-7v0-834K.bin"
PROMPT = b'"in'
# An independent float64 forward is 3.7e-7 off, and so is ours. Far below 1e-4, because the model is barely trained and
# some of its parameters hardly matter.
BOUND = 5e-6


@pytest.fixture(scope="module")
def model():
    if not WEIGHTS.exists():
        pytest.skip("no RWKV-7 weights of rwkv.cpp's tests at shared/data/weights/rwkv.cpp")
    config = parse(
        ModelConfig,
        {
            "name": "rwkv7",
            "vocab_size": 256,
            "d_model": 64,
            "n_layers": 12,
            "mixer": {"head_dim": 64},
            "ffn": {"kind": "channel_mix"},
            "norm": "layernorm",
            "embedding_norm": True,
            "tie_embeddings": False,
        },
    )
    built = build_model(config)
    built.load_state_dict(rwkv7_from_rwkv_cpp(WEIGHTS))
    return built


@pytest.fixture(scope="module")
def expected():
    return torch.from_numpy(np.fromfile(EXPECTED, dtype=np.float32))


@pytest.fixture
def prompt():
    return torch.tensor([list(PROMPT)])


def test_the_logits_are_rwkv_cpps(model, expected, prompt):
    assert expected.shape == (256,)
    assert float(expected.std()) > 0.5
    assert largest(model(prompt).logits[0, -1], expected) < BOUND


def test_token_by_token_from_the_state(model, expected, prompt):
    output = model(prompt[:, :1], output_state=True)
    for t in range(1, len(PROMPT)):
        output = model.step(prompt[:, t], output.state)
    assert largest(output.logits[0], expected) < BOUND


@pytest.mark.parametrize("change", ["mixer.k_a", "mixer.r_k", "mixer.mix_value.bias", "mixer.norm.weight", "ffn.x_k"])
def test_the_logits_tell_a_wrong_weight(model, expected, prompt, change):
    """The bound isn't met by a model that is almost this one."""
    parameter = model.get_parameter(f"blocks.5.{change}")
    before = parameter.data.clone()
    parameter.data.mul_(1.2).add_(0.1)
    try:
        assert largest(model(prompt).logits[0, -1], expected) > BOUND
    finally:
        parameter.data.copy_(before)


def write(path: Path, tensors: dict[str, np.ndarray], *, magic=0x67676D66, version=101, kind=None) -> Path:
    data = struct.pack("=6i", magic, version, 0, 0, 0, 0)
    for name, values in tensors.items():
        number = {"float32": 0, "float16": 1}[values.dtype.name] if kind is None else kind
        data += struct.pack("=3i", values.ndim, len(name), number) + struct.pack(
            f"={values.ndim}i", *values.shape[::-1]
        )
        data += name.encode() + values.tobytes()
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_tensor_is_read_and_named(tmp_path, dtype):
    file = {
        "emb.weight": np.arange(6, dtype=dtype).reshape(3, 2),
        "blocks.0.ln0.bias": np.arange(2, dtype=dtype),
        "blocks.0.att.v1": np.zeros((4, 2), dtype=dtype),  # unused: layer 0 has no value residual
        "blocks.1.att.v1": np.arange(8, dtype=dtype).reshape(4, 2),
        "blocks.1.att.w0": np.arange(2, dtype=dtype).reshape(1, 1, 2),
        "blocks.1.att.r_k": np.arange(2, dtype=dtype).reshape(1, 2),
        "blocks.1.att.x_rwkvag": np.arange(12, dtype=dtype).reshape(6, 1, 2),
        "blocks.1.ffn.key.weight": np.arange(4, dtype=dtype).reshape(2, 2),
        "head.weight": np.arange(6, dtype=dtype).reshape(3, 2),
    }
    found = rwkv7_from_rwkv_cpp(write(tmp_path / "a.bin", file))
    assert all(values.dtype == getattr(torch, dtype) for values in found.values())
    mixes = {f"blocks.1.mixer.x_{c}": [2 * n, 2 * n + 1] for n, c in enumerate("rwkvag")}
    assert {name: values.tolist() for name, values in found.items()} == mixes | {
        "embedding.weight": [[0, 1], [2, 3], [4, 5]],
        "embedding_norm.bias": [0, 1],
        "blocks.1.mixer.mix_value.down": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "blocks.1.mixer.spectrum.P": [0, 1],
        "blocks.1.mixer.r_k": [[0, 1]],
        "blocks.1.ffn.in_proj.weight": [[0, 1], [2, 3]],
        "head.weight": [[0, 1], [2, 3], [4, 5]],
    }


def test_files_that_do_not_fit_are_refused(tmp_path):
    one = {"emb.weight": np.zeros((2, 2), dtype="float32")}
    cases = [
        (write(tmp_path / "a", one, magic=1), "not a file of rwkv.cpp's format"),
        (write(tmp_path / "b", one, version=7), "not a file of rwkv.cpp's format"),
        (write(tmp_path / "c", one, kind=2), r"'emb\.weight' is quantised"),
        (
            write(tmp_path / "d", {"blocks.0.att.time_faaaa": one["emb.weight"]}),
            "'blocks.0.att.time_faaaa' has no place",
        ),
    ]
    (tmp_path / "e").write_bytes(b"fmgg")
    for path, said in [*cases, (tmp_path / "e", "not a file of rwkv.cpp's format")]:
        with pytest.raises(UserError, match=said):
            rwkv7_from_rwkv_cpp(path)
