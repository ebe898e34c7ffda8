"""What a recurrence knows of its sources, against sums over all earlier tokens; and what mixers do with reliability.

d_tj = exp(sum of g over j+1 .. t)     x_j = u_j lbar_j     w_t = lbar_t / (sum d x / sum d u)
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decaybench.core.positions import Layout
from decaybench.models.addons.bft import BftConfig, KalmanObserver
from decaybench.models.branch import Context, Observer
from decaybench.models.ops.decayed_moments import MomentState, decayed_moments
from tests.models import small
from tests.models.small import largest, row_of_positions

B, H, V = 2, 2, 3
FAINTEST = 1e-9  # a write weaker than that counts as this


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def precisions(*shape, seed=9):
    """From e^-3 to e^3."""
    return (3 * draw(*shape, seed=seed).tanh()).exp()


def sources(T, rows=B, heads=H, channels=V):
    """values, write strengths, log-decays, precisions; what `observed` takes."""
    values, g = draw(rows, T, heads, channels, seed=1), -draw(rows, T, heads, seed=3).exp() / 4
    return values, draw(rows, T, heads, seed=2).sigmoid(), g, precisions(rows, T)


def observed(values, u, g, lbar, *, positions=None, state=None, keep=True, **options):
    """An observer that has seen the writes, and log w."""
    T = values.shape[1]
    if positions is None:
        layout = Layout.fresh(T, torch.device("cpu"))
    else:
        layout = Layout.of(positions, has_state=state is not None)
    context = Context(layout, keep_state=keep)
    observer = KalmanObserver(BftConfig(**options), lbar, context, state, wants_dynamics=False)
    return observer, observer.write(values, u, g)


def moments(observer):
    """mean S1/S0, square S2/S0, n and <1/lbar>."""
    found = observer.sources
    return found.mean, found.square, found.size, found.inverse


def by_hand(values, u, g, lbar, tokens):
    """The moments and log w of the last of `tokens`, the columns of its document so far, of one row and head."""
    sums = np.zeros((5, values.shape[-1]))
    for j in tokens:
        d = math.exp(sum(float(g[s]) for s in tokens if s > j))
        x, v = float(u[j] * lbar[j]), values[j].numpy()
        sums += [d * x * v**0, d * x * v, d * x * v**2, d * float(u[j]) * v**0, (d * x) ** 2 * v**0]
    S0, S1, S2, D1, D2 = sums
    w = float(lbar[tokens[-1]]) / (S0[0] / D1[0])
    return S1 / S0, S2 / S0, S0[0] ** 2 / D2[0], D1[0] / S0[0], math.log(w)


def agree(found, log_w, given, positions, before=(), tolerance=1e-11):
    """Whether what was found at every real token is `by_hand`'s. before: columns of `given` that came earlier, whose
    places in the document positions go on from."""
    values, u, g, lbar = given
    for b in range(len(positions)):
        document = list(before)
        for t, position in enumerate(positions[b].tolist()):
            if position == 0:
                continue
            if position == 1:
                document = []
            document.append(t + len(before))
            for h in range(values.shape[2]):
                want = by_hand(values[b, :, h], u[b, :, h], g[b, :, h], lbar[b], document)
                have = [*(part[b, t, h].detach().numpy() for part in found), float(log_w[b, t, h])]
                for one, other in zip(have, want, strict=True):
                    assert np.allclose(one, other, rtol=tolerance, atol=tolerance)


def fresh(T, rows=B):
    return torch.arange(1, T + 1).expand(rows, T)


@pytest.mark.parametrize("T", [1, 2, 11, 70])
def test_moments_and_reliability_are_sums_over_all_tokens_so_far(T):
    given = sources(T)
    observer, log_w = observed(*given)
    agree(moments(observer), log_w, given, fresh(T))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_padding_documents_and_splits(data):
    """Any of them, a row at a time; a state before, which padding keeps and a document's start forgets."""
    T = data.draw(st.integers(1, 9))
    cuts = sorted({0, T, *data.draw(st.lists(st.integers(0, T), max_size=3))})
    positions = torch.tensor([data.draw(row_of_positions(T, state=True)) for _ in range(B)])
    given = sources(7 + T)
    state = observed(*(part[:, :7] for part in given))[0].kept
    pieces, log_w = [], []
    for start, end in itertools.pairwise(cuts):
        here = [part[:, 7 + start : 7 + end] for part in given]
        observer, found = observed(*here, positions=positions[:, start:end], state=state)
        state = observer.kept
        pieces.append(moments(observer))
        log_w.append(found)
    found = [torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True)]
    agree(found, torch.cat(log_w, dim=1), given, positions, before=range(7))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_any_chunk_gives_the_same_with_its_gradients(chunk, documents):
    T = 23
    values, u, g, lbar = sources(T)
    positions = torch.tensor([[*range(8, 20), *range(1, 12)], [0] * 3 + [*range(8, 21)] + [1, 2, 3, 4, 1, 0, 0]])
    layout = Layout.of(positions, has_state=True) if documents else None
    start = MomentState(draw(B, H, 2 * V + 2, seed=5).exp(), draw(B, H, seed=6).exp())
    results = []
    for size in (chunk, 100):
        x = [part.clone().requires_grad_() for part in (values, u * lbar[..., None], u, g, start.sums, start.squares)]
        found, after = decayed_moments(
            *x[:4], initial_state=MomentState(*x[4:]), output_final_state=True, layout=layout, chunk_size=size
        )
        outputs = [*found, after.sums, after.squares]
        sum((draw(*y.shape, seed=n) * y).sum() for n, y in enumerate(outputs)).backward()
        results.append([*outputs, *(part.grad for part in x)])
    for one, other in zip(*results, strict=True):
        assert largest(one, other) < 1e-10


@pytest.mark.parametrize("case", ["one chunk", "chunks", "documents"])
def test_gradients_of_the_moments_are_finite_differences(case):
    T, chunk = 5, 2 if case == "chunks" else 8
    values, u, g, lbar = sources(T, rows=1)
    positions = torch.tensor([[8, 9, 1, 2, 0]])
    layout = Layout.of(positions, has_state=True) if case == "documents" else None

    def op(values, u, lbar, g, sums, squares):
        found, after = decayed_moments(
            values,
            u * lbar[..., None],
            u,
            g,
            initial_state=MomentState(sums, squares),
            output_final_state=True,
            layout=layout,
            chunk_size=chunk,
        )
        return *found, after.sums, after.squares

    start = draw(1, H, 2 * V + 2, seed=5).exp(), draw(1, H, seed=6).exp()
    assert torch.autograd.gradcheck(op, [x.requires_grad_() for x in (values, u, lbar, g, *start)])


def test_a_vector_of_decays_counts_by_its_mean():
    values, u, _, lbar = sources(12)
    g = -draw(B, 12, H, 4, seed=4).exp()
    by_channel, by_head = observed(values, u, g, lbar), observed(values, u, g.mean(-1), lbar)
    assert largest(by_channel[1], by_head[1]) == 0
    assert all(largest(a, b) == 0 for a, b in zip(moments(by_channel[0]), moments(by_head[0]), strict=True))


def test_no_write_strength_is_one():
    values, u, g, lbar = sources(12)
    none, ones = observed(values, None, g, lbar), observed(values, torch.ones_like(u), g, lbar)
    assert largest(none[1].expand_as(ones[1]), ones[1]) == 0
    assert all(largest(a, b) == 0 for a, b in zip(moments(none[0]), moments(ones[0]), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("constant", [math.exp(-6), 0.3, 1.0, 2.7, math.exp(6)])
def test_a_constant_precision_trusts_all_writes_alike(constant, dtype):
    values, u, g, _ = (part.to(dtype) for part in sources(200))
    log_w = observed(values, u, g, torch.full((B, 200), constant, dtype=dtype))[1]
    assert log_w.dtype == dtype
    assert float(log_w.abs().max()) < (1e-6 if dtype == torch.float32 else 1e-12)


def test_reliability_off_takes_no_precision_and_weighs_nothing():
    """lbar is 1 then; the layer asks the observer so (see test_bft.py)."""
    values, u, g, _ = sources(12)
    ones = torch.ones(B, 12, dtype=torch.float64)
    observer, log_w = observed(values, u, g, ones, reliability=False)
    assert log_w is None
    agree(moments(observer), torch.zeros(B, 12, H), (values, u, g, ones), fresh(12))


def test_the_state_is_what_the_page_says_and_only_kept_where_wanted():
    observer, _ = observed(*sources(9))
    assert sum(part.numel() for part in (observer.kept.moments.sums, observer.kept.moments.squares)) == B * H * (
        2 * V + 3
    )
    assert observer.kept.lbar is None
    assert observed(*sources(9), keep=False)[0].kept is None


def test_rows_of_padding_alone_are_finite_with_their_gradients():
    """In float32; before a row's first token all sums are 0."""
    positions = torch.tensor([[0] * 6, [1, 2, 3, 0, 0, 0]])
    x = [part.float().requires_grad_() for part in sources(6)]
    observer, log_w = observed(*x, positions=positions)
    heads, scale, W = (draw(*shape, seed=n).float() for n, shape in enumerate([(B, 6, H, V), (B, 6, H, V), (5, H * V)]))
    heads[0] = 0.0
    observer.read(heads.square().mean(-1), scale)
    results = [*moments(observer), log_w, observer.variance(W)]
    assert all(part.isfinite().all() for part in results)
    assert not observer.kept.moments.sums[0].any()
    sum(part.sum() for part in results).backward()
    assert all(part.grad.isfinite().all() for part in x)
    assert all(not part.grad[0].any() for part in x[:3])
    # From that state the first token is the first.
    following, (values, *_) = sources(2), sources(2)
    later, log_w = observed(*following, positions=torch.tensor([[1, 2], [4, 5]]), state=observer.kept)
    assert float(log_w[0, 0].detach().abs().max()) < 1e-12
    assert largest(moments(later)[0][0, 0], values[0, 0]) < 1e-12


def test_float32_keeps_its_digits_over_thousands_of_tokens():
    """Slow and fast decays, strong and faint writes."""
    T = 4000
    values, _, _, lbar = sources(T, rows=1, heads=4)
    g = -torch.tensor([1e-4, 1e-2, 0.5, 20.0], dtype=torch.float64).expand(1, T, 4)
    u = (6 * draw(1, T, 4, seed=8)).sigmoid()
    exact, rounded = (
        observed(*(part.to(dtype) for part in (values, u, g, lbar))) for dtype in (torch.float64, torch.float32)
    )
    assert largest(exact[1], rounded[1].double()) < 1e-5
    for one, other in zip(moments(exact[0]), moments(rounded[0]), strict=True):
        assert torch.allclose(one, other.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("u", [0.0, 1e-38, 1e-12])
@pytest.mark.parametrize("size", [-6.0, 6.0])
def test_the_faintest_writes_still_have_a_mean(u, size):
    """Strengths of 0 count alike, rather than not at all: the token itself is always a source."""
    values, _, g, _ = (part.float() for part in sources(8))
    lbar = torch.full((B, 8), math.exp(size))
    observer, log_w = observed(values, torch.full((B, 8, H), u), g, lbar)
    alike = observed(values.double(), torch.full((B, 8, H), FAINTEST).double(), g.double(), lbar.double())[0]
    assert float(log_w.abs().max()) < 1e-6
    for ours, exact in zip(moments(observer), moments(alike), strict=True):
        assert torch.allclose(ours.double(), exact, rtol=1e-5, atol=1e-6)


# What mixers hand over, and what a reliability does to what reaches their recurrence.


class Given(Observer):
    """Answers a reliability of its choice and keeps what it is told."""

    def __init__(self, log_w):
        self.log_w, self.told, self.size = log_w, None, None

    def write(self, values, write_strength, log_decay):
        self.told = values, write_strength, log_decay
        return self.log_w

    def read(self, size, scale):
        self.size = size


POST = {"horizon": 16}
MIXERS = {
    "mamba2": ("mamba2", {}),
    "mamba2+post": ("mamba2", {"post": POST}),
    "gated_deltanet": ("gated_deltanet", {}),
    "gated_deltanet+post": ("gated_deltanet", {"post": POST}),
    "gated_deltanet-reflecting": ("gated_deltanet", {"mixer": {"negative_eigenvalues": True}}),
    "gla": ("gla", {}),
    "gla+post": ("gla", {"post": POST}),
    "retnet": ("retnet", {}),
    "retnet+post": ("retnet", {"post": POST}),
    "retnet+post-minimal": ("retnet", {"post": POST | {"variant": "minimal"}}),
    "rwkv7": ("rwkv7", {}),
    "rwkv7+post": ("rwkv7", {"post": POST}),
}
OPS = {"mamba2": "scalar_decay", "gated_deltanet": "gated_delta_rule", "rwkv7": "dplr"}


def spied(monkeypatch, name, mixer):
    """Where the recurrence's arguments of the mixer's last call will be, and what it gave."""
    seen = {}
    if name in OPS:
        module = __import__(f"decaybench.models.mixers.{name}", fromlist=[name])
        op = getattr(module, OPS[name])
    else:
        op = mixer.gate.recurrence

    def spy(*args, **kwargs):
        seen["args"], (seen["o"], state) = args, op(*args, **kwargs)
        return seen["o"], state

    if name in OPS:
        monkeypatch.setattr(module, OPS[name], spy)
    else:
        mixer.gate.recurrence = spy
    return seen


@pytest.fixture(params=MIXERS)
def second_mixer(request, monkeypatch):
    """(name, mixer, run); run(log_w) gives the observer and the recurrence's arguments. The second layer's mixer:
    RWKV-7's values there are mixed with the first layer's."""
    name, options = MIXERS[request.param]
    model = small.model(name, **options)
    T, first, mixer = 9, model.blocks[0].mixer, model.blocks[1].mixer
    seen = spied(monkeypatch, name, mixer)
    x = draw(B, T, 32, seed=4)

    def run(log_w):
        context = Context(Layout.fresh(T, torch.device("cpu")), False)
        first(x, context, None)
        observer = Given(log_w)
        mixer(x, context, None, observer)
        assert observer.size.shape == seen["o"].shape[:3]
        return observer, seen["args"]

    return name, mixer, run


def test_a_mixer_shows_what_it_writes(second_mixer):
    name, mixer, run = second_mixer
    observer, args = run(None)
    values, u, g = observer.told
    if name == "mamba2":
        _, _, v, log_decay = args
        assert largest(values * u[..., None], v) < 1e-12
    elif name == "gated_deltanet":
        _, _, v, beta, log_decay = args
        assert largest(values, v) == 0
        assert largest(u * (2 if mixer.config.negative_eigenvalues else 1), beta) < 1e-12
    elif name == "rwkv7":
        _, log_decay, _, v, a, b = args
        assert largest(values, v) == 0
        assert largest(u, (-b / a).mean(-1)) < 1e-9
    else:
        _, _, v, log_decay = args
        assert largest(values, v) == 0
        assert u is None
    assert largest(g, log_decay) == 0


def test_a_reliability_scales_what_is_written_and_nothing_else(second_mixer):
    """The key where writes add up; the gain's odds in delta rules: beta' = beta w / (1 - beta + beta w)."""
    name, mixer, run = second_mixer
    log_w = 2 * draw(B, 9, mixer.heads, seed=6)
    w = log_w.exp()
    (_, plain), (_, weighed) = run(None), run(log_w)

    def odds(rate, w):
        return rate * w / (1 - rate + rate * w)

    if name == "gated_deltanet":
        beta, most = plain[3], 2 if mixer.config.negative_eigenvalues else 1
        assert largest(weighed[3], most * odds(beta / most, w)) < 1e-12
        changed = {3}
    elif name == "rwkv7":
        (_, _, k, _, a, b), (_, _, k_w, _, _, b_w) = plain, weighed
        rate, k_a = -b / a, mixer.k_a.view(mixer.heads, -1)
        new = odds(rate, w[..., None])
        assert largest(-b_w / a, new) < 1e-9
        assert largest(k_w * (1 + (rate - 1) * k_a), k * (1 + (new - 1) * k_a)) < 1e-9
        changed = {2, 5}
    else:
        assert largest(weighed[2], plain[2] * w[..., None]) < 1e-12
        changed = {2}
    for n, (one, other) in enumerate(zip(plain, weighed, strict=True)):
        assert n in changed or torch.equal(one, other)


@pytest.mark.parametrize("extreme", [-12.0, 12.0])
def test_the_gain_of_a_delta_rule_never_leaves_its_range(extreme):
    """In float32, at the ends of what two precisions can differ by."""
    for name in ("gated_deltanet", "rwkv7"):
        model = small.model(name, bft={}).float()
        mixer, context = model.blocks[0].mixer, Context(Layout.fresh(20, torch.device("cpu")), False)
        y, _ = mixer(draw(B, 20, 32).float(), context, None, Given(torch.full((B, 20, mixer.heads), extreme)))
        assert y.isfinite().all()
        assert y.abs().max() < 1e3
