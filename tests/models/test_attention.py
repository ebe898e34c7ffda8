"""Attention against softmax and rotary positions as a plain loop."""

from __future__ import annotations

import math

import pytest
import torch

from decaybench.core.errors import UserError
from decaybench.models.language_model import build_model
from decaybench.models.ops.rotary import rotary
from tests.models import small
from tests.models.small import largest

BASE = 10_000.0


def rotated_by_hand(x, position):
    """One head's vector [K]; channel i pairs with i + K/2."""
    half = len(x) // 2
    out = [0.0] * len(x)
    for i in range(half):
        angle = position * BASE ** (-i / half)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i] * math.sin(angle) + x[i + half] * math.cos(angle)
    return torch.stack(out)


def attend_by_hand(mixer, x):
    """One document [T, D]."""
    T, _D = x.shape
    H, K = mixer.config.n_heads, mixer.head_dim
    q, k, v = ((x @ weight.T).view(T, H, K) for weight in mixer.qkv_proj.weight.chunk(3))
    rows = []
    for t in range(T):
        heads = []
        for h in range(H):
            query = rotated_by_hand(q[t, h], t + 1)
            scores = torch.stack([query @ rotated_by_hand(k[j, h], j + 1) / math.sqrt(K) for j in range(t + 1)])
            weights = scores.exp() / scores.exp().sum()
            heads.append(sum(weights[j] * v[j, h] for j in range(t + 1)))
        rows.append(torch.cat(heads) @ mixer.out_proj.weight.T)
    return torch.stack(rows)


def logits_by_hand(model, tokens):
    x = model.embedding(tokens)
    for block in model.blocks:
        x = x + attend_by_hand(block.mixer, block.norm(x))
    return model._logits(model.norm(x))


@pytest.fixture(scope="module")
def model():
    return small.model("attention")


@pytest.fixture(scope="module")
def documents(model):
    found = [small.tokens(length, seed=length) for length in (6, 1, 4)]
    return found, [logits_by_hand(model, document) for document in found]


def test_a_document_is_the_plain_loop(model, documents):
    for document, want in zip(*documents, strict=True):
        assert largest(model(document[None]).logits[0], want) < 1e-12


@pytest.mark.parametrize("piece", [1, 3, 6, 11])
def test_packed_documents_do_not_see_each_other_whatever_the_pieces(model, documents, piece):
    tokens = torch.cat(documents[0])[None]
    positions = torch.cat([torch.arange(1, len(d) + 1) for d in documents[0]])[None]
    state, parts = None, []
    for start in range(0, 11, piece):
        cut = slice(start, start + piece)
        output = model(tokens[:, cut], positions[:, cut], state, output_state=True)
        state = output.state
        parts.append(output.logits)
    assert largest(torch.cat(parts, dim=1)[0], torch.cat(documents[1])) < 1e-12
    # What is cached of documents that ended must not be seen by what follows the last.
    following = small.tokens(1, seed=5)
    want = logits_by_hand(model, torch.cat([documents[0][-1], following]))[-1]
    assert largest(model.step(following, state).logits[0], want) < 1e-12


def test_padding_anywhere_is_not_seen(model, documents):
    tokens, positions = small.tokens(3, 9), torch.zeros(3, 9, dtype=torch.long)
    places = [[0, 2, 3, 5, 7, 8], [8], [3, 4, 6, 7]]
    for row, (document, columns) in enumerate(zip(documents[0], places, strict=True)):
        tokens[row, columns], positions[row, columns] = document, torch.arange(1, len(document) + 1)
    output = model(tokens, positions, output_state=True)
    for row, want in enumerate(documents[1]):
        assert largest(output.logits[row, places[row]], want) < 1e-12
    following = small.tokens(3, seed=5)
    after = model.step(following, output.state).logits
    for row, document in enumerate(documents[0]):
        assert largest(after[row], logits_by_hand(model, torch.cat([document, following[row : row + 1]]))[-1]) < 1e-12


def test_a_row_of_padding_with_a_cache_is_finite_and_changes_nothing(model):
    tokens = small.tokens(2, 5)
    state = model(tokens, output_state=True).state
    output = model(tokens, torch.tensor([[0] * 5, [6, 7, 8, 9, 10]]), state, output_state=True)
    assert output.logits.isfinite().all()
    following = small.tokens(2, seed=1)
    assert largest(model.step(following, output.state).logits[0], model.step(following, state).logits[0]) < 1e-12


def test_rotary_depends_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    near = (rotary(q, torch.tensor([[5]]), BASE) * rotary(k, torch.tensor([[2]]), BASE)).sum()
    far = (rotary(q, torch.tensor([[90_005]]), BASE) * rotary(k, torch.tensor([[90_002]]), BASE)).sum()
    assert float((near - far).abs()) < 1e-9
    assert (
        float((near - (rotary(q, torch.tensor([[9]]), BASE) * rotary(k, torch.tensor([[2]]), BASE)).sum()).abs()) > 1e-3
    )


def test_rotary_angles_are_exact_under_bfloat16():
    x = torch.randn(1, 1, 1, 8)
    at = torch.tensor([[30_001]])  # bfloat16 can't tell it from its neighbours
    assert torch.equal(rotary(x.bfloat16(), at, BASE), rotary(x.bfloat16().float(), at, BASE))
    model = small.model("attention").to(torch.bfloat16)
    assert model(small.tokens(1, 3)).logits.dtype == torch.bfloat16


@pytest.mark.parametrize(("heads", "width"), [(3, 32), (32, 32)])
def test_heads_must_divide_the_width_into_even_parts(heads, width):
    with pytest.raises(UserError, match=f"n_heads={heads} must divide d_model={width}"):
        build_model(small.config("attention", {"n_heads": heads}, d_model=width))
