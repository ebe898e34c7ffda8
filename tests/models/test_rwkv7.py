"""RWKV-7's time mix with and without PoST against its formulas as a plain loop in NumPy, and what it starts from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from decaybench.core.errors import UserError
from decaybench.core.positions import Layout
from decaybench.models.addons.post import PostConfig
from decaybench.models.branch import Context, Place
from decaybench.models.language_model import build_model
from decaybench.models.mixers.rwkv7 import RWKV7, RWKV7Config
from decaybench.models.module import initialise, treatments
from tests.models import small

HORIZON = 512
HALF = math.exp(-0.5)
POSTS = {
    "baseline": None,
    "paper": {"variant": "paper"},
    "minimal": {"variant": "minimal"},
    "position only": {"variant": "minimal", "reparameterize": False},
    "order only": {"variant": "paper", "position_scaling": False},
}


def build(d_model=12, head_dim=4, layer=0, n_layers=3, post=None, seed=0, **sizes) -> RWKV7:
    config = RWKV7Config(head_dim=head_dim, chunk_size=4, **sizes)
    chosen = None if post is None else PostConfig(**{"horizon": HORIZON, **post})
    mixer = RWKV7(config, Place(d_model, layer, n_layers, 1.0, chosen, "torch"))
    initialise(mixer, seed)
    return mixer


def perturbed(seed=0, noise=0.3, **options) -> RWKV7:
    mixer = build(seed=seed, **options).double()
    draws = torch.Generator().manual_seed(seed)
    for parameter in mixer.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
    return mixer


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def tapers(P, horizon):
    """PoST's analytical taper, from the log-speeds logsigmoid(P)."""
    log_speed = -np.log1p(np.exp(-P))
    n, cumulative = len(P), log_speed - log_speed[0]
    k = np.arange(n)
    return np.clip((n - 1 - k) / (n - 1) + (cumulative - k * cumulative[-1] / (n - 1)) / math.log(horizon), 0, 1)


def rates_of(w, post):
    """P and alpha from the parameters, by hand."""
    if post is None or not post.get("reparameterize", True):
        P, alpha = w["spectrum.P"], np.zeros(len(w["spectrum.P"]))
        if post is not None:
            alpha = w["spectrum.alpha"]
        return P, alpha
    P = w["spectrum.base"] + np.concatenate([[0.0], np.cumsum(np.log1p(np.exp(w["spectrum.deltas"])))])
    return P, tapers(P, HORIZON) if post.get("position_scaling", True) else np.zeros(len(P))


def time_mix(w, x, first, post, heads):
    """One document x [T, D], as the official code's slow version does it, one token after the other."""
    P, alpha = rates_of(w, post)
    D = x.shape[1]
    N = D // heads
    S, before = np.zeros((heads, N, N)), np.zeros(D)
    outputs, values = [], []

    def lora(name, x, f=lambda hidden: hidden):
        return w[f"{name}.up"] @ f(w[f"{name}.down"] @ x) + w.get(f"{name}.bias", 0.0)

    for t, now in enumerate(x, start=1):
        x_r, x_w, x_k, x_v, x_a, x_g = (now + (before - now) * w[f"x_{c}"] for c in "rwkvag")
        before = now
        r, k, v = w["r_proj.weight"] @ x_r, w["k_proj.weight"] @ x_k, w["v_proj.weight"] @ x_v
        decay = np.exp(-HALF * sigmoid(P + lora("decay", x_w, np.tanh) - alpha * np.log(t)))
        if first is not None:
            v = v + (first[t - 1] - v) * sigmoid(lora("mix_value", x_v))
        a, g = sigmoid(lora("rate", x_a)), lora("gate", x_g, sigmoid)
        kk = k * w["k_k"]
        k = k * (1 + (a - 1) * w["k_a"])
        parts = []
        for h in range(heads):
            c = slice(h * N, (h + 1) * N)
            unit = kk[c] / np.linalg.norm(kk[c])
            S[h] = S[h] @ (np.diag(decay[c]) - np.outer(unit, unit * a[c])) + np.outer(v[c], k[c])
            o = S[h] @ r[c]
            o = (o - o.mean()) / np.sqrt(o.var() + 64e-5) * w["norm.weight"][c] + w["norm.bias"][c]
            parts.append(o + (r[c] @ (k[c] * w["r_k"][h])) * v[c])
        outputs.append(w["out_proj.weight"] @ (np.concatenate(parts) * g))
        values.append(v)
    return np.stack(outputs), np.stack(values)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("name", POSTS)
def test_the_mixer_is_its_formulas(name, layer):
    mixer = perturbed(layer=layer, post=POSTS[name], seed=3)
    weights = {key: value.numpy() for key, value in mixer.state_dict().items()}
    draws = torch.Generator().manual_seed(1)
    x, first = (torch.randn(2, 21, 12, generator=draws, dtype=torch.float64) for _ in range(2))
    # The second row packs two documents and ends in padding.
    positions = torch.tensor([[*range(1, 22)], [*range(1, 9), *range(1, 12), 0, 0]])
    context = Context(Layout.of(positions), keep_state=True, shared={"rwkv7.first_value": first})
    y, _ = mixer(x, context, None)
    for row, document in ((0, slice(0, 21)), (1, slice(0, 8)), (1, slice(8, 19))):
        given = first[row, document].numpy() if layer else None
        want, values = time_mix(weights, x[row, document].numpy(), given, POSTS[name], heads=3)
        assert np.abs(y[row, document].detach().numpy() - want).max() < 1e-11 * max(1, np.abs(want).max())
        if layer == 0:
            left = context.shared["rwkv7.first_value"][row, document].detach().numpy()
            assert np.abs(left - values).max() < 1e-12 * np.abs(values).max()


def test_the_first_value_reaches_every_later_layer():
    model = small.model("rwkv7", n_layers=3)
    tokens = small.tokens(2, 9)
    want = model(tokens).logits
    mixing = [block.mixer.mix_value for block in model.blocks]
    assert mixing[0] is None
    for layer in (1, 2):
        bias = mixing[layer].bias
        before, bias.data = bias.data.clone(), torch.full_like(bias, -60.0)  # sigmoid 0: the layer's own value alone
        assert small.largest(model(tokens).logits, want) > 1e-3
        bias.data = before
    assert small.largest(model(tokens).logits, want) == 0


@pytest.mark.parametrize(("d_model", "head_dim"), [(64, 64), (768, 64), (40, 8), (6, 1), (1, 1)])
@pytest.mark.parametrize(("layer", "n_layers"), [(0, 1), (0, 12), (5, 12), (11, 12)])
def test_initial_vectors_are_the_official_codes(d_model, head_dim, layer, n_layers):
    """Written out from RWKV-LM's RWKV-v7/train_temp/src/model.py, with its divisions by zero at one layer mended."""
    mixer = build(d_model, head_dim, layer, n_layers).requires_grad_(False)
    up, down = layer / max(n_layers - 1, 1), 1 - layer / n_layers
    for i in range(0, d_model, max(1, d_model // 50)):
        share = i / max(d_model - 1, 1)
        half = (head_dim - 1) / 2
        zigzag = (i % head_dim - half) / half if half else 0.0
        zigzag *= abs(zigzag)
        for name, power in {"x_r": 0.2, "x_w": 0.9, "x_k": 0.7, "x_v": 0.7, "x_a": 0.9, "x_g": 0.2}.items():
            assert float(getattr(mixer, name)[i]) == pytest.approx(1 - (i / d_model) ** (power * down), abs=1e-6)
        w0 = -6 + 6 * share ** (1 + up**0.3) + 0.5 + zigzag * 2.5
        assert float(mixer.spectrum.P[i]) == pytest.approx(w0, abs=1e-5)
        assert float(mixer.rate.bias[i]) == pytest.approx(-0.19 + zigzag * 0.3 + (share - 0.5) * 0.4, abs=1e-6)
        assert float(mixer.k_k[i]) == pytest.approx(0.71 - (share - 0.5) * 0.1, abs=1e-6)
        assert float(mixer.norm.weight[i]) == pytest.approx(((layer + 1) / n_layers) ** 0.7)
        if layer:
            assert float(mixer.mix_value.bias[i]) == pytest.approx(0.73 - (share - 0.5) * 0.4, abs=1e-6)
    assert torch.all(mixer.k_a == 1.02)
    assert torch.all(mixer.r_k == -0.04)
    assert torch.all(mixer.norm.bias == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_matrices_are_orthogonal_or_zero(dtype):
    mixer = build(48, 16, 1, value_rank=64).to(dtype)
    initialise(mixer, 0)
    gains = {"r_proj.weight": 1.0, "k_proj.weight": 0.1, "v_proj.weight": 1.0, "decay.up": 0.1, "rate.up": 0.1}
    gains |= {"gate.up": 0.1, "mix_value.up": 0.1 * math.sqrt(64 / 48)}
    for name, gain in gains.items():
        matrix = mixer.get_parameter(name).float()
        products = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
        off = (products - gain**2 * torch.eye(len(products))).abs().max()
        assert off < gain**2 * (1e-5 if dtype == torch.float32 else 2**-8), name
    for name in ("out_proj.weight", "decay.down", "rate.down", "gate.down", "mix_value.down"):
        assert torch.all(mixer.get_parameter(name) == 0), name


@pytest.mark.parametrize(
    ("d_model", "ranks"),
    [(64, (32, 32, 32, 32)), (768, (64, 64, 32, 128)), (1024, (64, 64, 64, 160)), (2048, (128, 128, 64, 224))],
)
def test_ranks_are_the_official_codes(d_model, ranks):
    with torch.device("meta"):
        mixer = RWKV7(RWKV7Config(), Place(d_model, 1, 2, 1.0, None, "torch"))
        own = RWKV7(
            RWKV7Config(decay_rank=3, rate_rank=5, value_rank=7, gate_rank=9), Place(64, 1, 2, 1.0, None, "torch")
        )
    for built, want in ((mixer, ranks), (own, (3, 5, 7, 9))):
        loras = (built.decay, built.rate, built.mix_value, built.gate)
        assert tuple(lora.down.shape[0] for lora in loras) == want


def test_learning_rates_and_weight_decay_are_the_official_codes():
    for post, doubled in ((None, {"spectrum.P"}), ({"variant": "paper"}, {"spectrum.base", "spectrum.deltas"})):
        for variant in [post] if post is None else [post, {"variant": "minimal"}]:
            found = treatments(build(layer=1, post=variant))
            assert {name for name, treatment in found.items() if treatment.factor != 1} == doubled
            assert all(found[name].factor == 2 for name in doubled)
            decayed = {name for name, treatment in found.items() if treatment.decays}
            assert decayed == {"r_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight"}


@pytest.mark.parametrize("variant", ["paper", "minimal"])
def test_posts_spectrum_starts_as_the_papers(variant):
    mixer = build(768, 64, post={"variant": variant})
    P = mixer.spectrum.ordered_rates().detach().double()
    slowest, fastest = 1 / (0.60653 * HORIZON), 0.5
    assert float(P[0]) == pytest.approx(math.log(slowest / (1 - slowest)), abs=1e-4)
    assert float(P[-1]) == pytest.approx(fastest, abs=1e-4)
    assert P.diff(n=2).abs().max() < 2e-6  # evenly spaced, to float32's rounding
    assert torch.allclose(mixer.decay.bias, build(768, 64).spectrum.P - build(768, 64)._ramp() - 0.5, atol=1e-6)


def test_resting_timescales_are_unordered_by_the_zigzag_as_known():
    """1.7 to 6,219 tokens at T = 512, though P is ordered; without position scaling in either."""
    mixer = build(768, 64, post={"variant": "paper"})
    timescales = mixer.timescales(1).detach()
    assert float(timescales.min()) == pytest.approx(1.7, abs=0.05)
    assert float(timescales.max()) == pytest.approx(6219, rel=2e-3)
    assert torch.all(mixer.spectrum.ordered_rates().diff() > 0)
    assert torch.any(timescales.diff() > 0)


@pytest.mark.parametrize("name", POSTS)
@pytest.mark.parametrize("position", [1, 7, 512])
def test_timescales_are_what_the_mixer_does_at_rest(name, position):
    """With a zero input every LoRA rests: what a write leaves after one token more is its decay."""
    mixer = perturbed(layer=0, post=POSTS[name], seed=2)
    weights = {key: value.numpy() for key, value in mixer.state_dict().items()}
    P, alpha = rates_of(weights, POSTS[name])
    logit = P + weights.get("decay.bias", 0.0) - alpha * math.log(position)
    assert np.allclose(mixer.timescales(position).detach().numpy(), 1 / (HALF * sigmoid(logit)), rtol=1e-10, atol=0)
    wkv = torch.ones(1, 3, 4, 4, dtype=torch.float64)
    x = torch.zeros(1, 1, 12, dtype=torch.float64)
    state = type(mixer(x, Context(Layout.fresh(1, x.device), keep_state=True), None)[1])(x, wkv)
    _, after = mixer(x, Context(Layout.of(torch.tensor([[position + 1]]), has_state=True), keep_state=True), state)
    want = torch.exp(-1 / mixer.timescales(position + 1)).view(1, 3, 4, 1).expand_as(wkv)
    assert small.largest(after.wkv, want) < 1e-12


def test_variant_minimal_is_paper_and_all_switches_off_is_the_baseline():
    tokens = small.tokens(2, 11)
    post = {"horizon": 32, "variant": "paper"}
    models = [build_model(small.config("rwkv7", post=post | {"variant": v}), 0) for v in ("paper", "minimal")]
    assert torch.equal(models[0](tokens).logits, models[1](tokens).logits)
    off = post | {"variant": "minimal", "reparameterize": False, "position_scaling": False}
    base, without = (build_model(small.config("rwkv7", post=p), 0) for p in (None, off))
    assert base.state_dict().keys() == without.state_dict().keys()
    assert torch.equal(base(tokens).logits, without(tokens).logits)


def test_post_adds_the_loras_bias_and_nothing_else():
    base, post = build(layer=1), build(layer=1, post={"variant": "paper"})
    count = [sum(p.numel() for p in mixer.parameters()) for mixer in (base, post)]
    assert count[1] - count[0] == 12
    shared = base.state_dict().keys() - {"spectrum.P"}
    assert shared == post.state_dict().keys() - {"spectrum.base", "spectrum.deltas", "decay.bias"}
    assert all(torch.equal(base.state_dict()[name], post.state_dict()[name]) for name in shared)


def test_the_state_is_the_shift_and_one_matrix_a_head():
    model = small.model("rwkv7")
    state = model.prefill(small.tokens(2, 5)).state
    assert state.elements() == (32 + 4 * 8 * 8,) * 2


def test_a_timescale_that_it_cannot_have_is_refused():
    with pytest.raises(UserError, match=r"post\.range: RWKV-7's timescales are above 1\.65 tokens, not 1"):
        build(post={"variant": "paper", "range": (1.0, 100.0)})
    P = build(post={"variant": "paper", "range": (1.7, 100.0)}).spectrum.ordered_rates()
    ends = 1 / (HALF * torch.sigmoid(P.detach()[[-1, 0]]))
    assert ends.tolist() == pytest.approx([1.7, 100.0], rel=1e-4)


def test_a_head_that_does_not_divide_is_named():
    with pytest.raises(UserError, match=r"mixer\.head_dim=5 must divide d_model = 12"):
        build(head_dim=5)
