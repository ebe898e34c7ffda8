"""bench spectrum: closed forms and impulses at rest, what is measured against plain loops, the command, its figures."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from torch.nn import functional as F

import decaybench
from decaybench.core.config import parse
from decaybench.core.errors import UserError
from decaybench.core.positions import Layout
from decaybench.harness import spectra
from decaybench.harness import spectrum_plots as plots
from decaybench.harness.drawing import save
from decaybench.harness.spectra import Asked, look_at
from decaybench.harness.spectrum_laws import cumulative_rates
from decaybench.harness.spectrum_layers import timescale_figure
from decaybench.harness.spectrum_report import START, TRAINED, RunSpectrum, Spectra
from decaybench.harness.spectrum_rest import CAP, Resting, model_spectrum
from decaybench.harness.spectrum_tally import QUANTILES, Tally, measure
from decaybench.models.branch import Context
from decaybench.models.checkpoints import write_checkpoint
from decaybench.models.language_model import LanguageModel, build_model
from decaybench.tasks.registry import make_task
from decaybench.tasks.text import TextConfig, TextEvaluation
from decaybench.text.tokenizers import ByteTokenizer
from tests.command import bench
from tests.models import small
from tests.models.test_decays import NAMES, POST, made, memory, moved
from tests.token_shards import prepared, stories

T = 16


def saved(folder: Path, model: LanguageModel, train_length: int | None = T, **facts: Any) -> Path:
    """A checkpoint without a run."""
    told = facts if train_length is None else {"train_length": train_length, **facts}
    return write_checkpoint(folder, model, 0, told, {}).folder


# --- at rest


def test_retnets_timescales_are_its_gammas() -> None:
    (layer, _) = model_spectrum(made("retnet"), 0, T).layers
    gammas = [1 - 2.0 ** -(5 + h) for h in range(4)]
    for taus in (layer.at_start, layer.after):
        assert [*taus] == [1, T, 4 * T, 16 * T]
        for position in taus:
            assert taus[position] == pytest.approx([-1 / math.log(gamma) for gamma in gammas], rel=1e-6)
    assert (layer.unit, layer.channels) == ("head", 4)


@pytest.mark.parametrize("post", POST)
def test_mamba2s_timescales_are_a_and_dt_and_t_to_the_alpha(post: str) -> None:
    model = made("mamba2", post)
    spectrum = model_spectrum(model, 0, T)
    for layer, block in zip(spectrum.layers, model.blocks, strict=True):
        mixer: Any = block.mixer
        dt = np.log1p(np.exp(mixer.dt_bias.detach().numpy()))
        if post == "base":
            P, alpha = mixer.spectrum.P.detach().numpy(), 0.0
        else:
            steps = np.log1p(np.exp(mixer.spectrum.deltas.detach().numpy()))
            P = mixer.spectrum.base.item() + np.concatenate([[0.0], np.cumsum(steps)])
            k, N = np.arange(len(P)), len(P)
            tilt = P - P[0] - k * (P[-1] - P[0]) / (N - 1)
            alpha = ((N - 1 - k) / (N - 1) + tilt / math.log(16)).clip(0, 1)
        for t, taus in layer.after.items():
            assert taus == pytest.approx(t**alpha / (np.exp(P) * dt), rel=1e-9)
    assert spectrum.scales == (post != "base")


def test_at_the_start_post_spreads_timescales_evenly_over_t_squared() -> None:
    model = build_model(small.config("mamba2", post=POST["paper"], n_layers=1))
    (layer,) = model_spectrum(model, 0, T).layers
    N = layer.channels
    assert layer.after == layer.at_start, "nothing was trained"
    assert layer.after[1] == pytest.approx(T ** np.linspace(1, 0, N), rel=1e-5)
    assert layer.after[T] == pytest.approx(T ** np.linspace(2, 0, N), rel=1e-5)


def at_rest(model: LanguageModel, j: int, t: int) -> torch.Tensor:
    """What the first layer's state keeps from position j to t while its mixer reads zeros: [H, K, V], by an impulse."""
    mixer: Any = model.blocks[0].mixer

    def read(first: int, last: int, state: Any) -> Any:
        x = torch.zeros(1, last - first + 1, model.config.d_model, dtype=torch.float64)
        layout = Layout.of(torch.arange(first, last + 1)[None], has_state=state is not None)
        return mixer(x, Context(layout, keep_state=True), state)[1]

    before = model(torch.zeros(1, 1, dtype=torch.long), output_state=True).state
    assert before is not None
    layer = before.layers[0]
    other = [type(before)((type(layer)(read(1, j, None), None), *before.layers[1:]), before.seen) for _ in range(2)]
    one = torch.ones(memory(before, 0).shape[2:], dtype=torch.float64)
    ends = [read(j + 1, t, state.layers[0].mixer) for state in (other[0], moved(other[1], 0, one))]
    found = [memory(type(before)((type(layer)(end, None),), before.seen), 0)[0] for end in ends]
    return found[1] - found[0]


@pytest.mark.parametrize("post", POST)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_retention_at_rest_is_what_an_impulse_leaves(name: str, post: str) -> None:
    model = made(name, post)
    resting = Resting(0, model.blocks[0].mixer)  # type: ignore[arg-type]
    pairs = [(3, 4), (3, 40), (60, 90), (3, 300)]
    sums = cumulative_rates(resting.rates, {t for pair in pairs for t in pair})
    # Beyond position 64 RWKV-7's rates are nearly powers of t; RetNet's own timescales are float32.
    bound = 1e-6 if name == "rwkv7" else 1e-7 if (name, post) == ("retnet", "base") else 1e-11
    for j, t in pairs:
        left = torch.from_numpy(np.exp(sums[j] - sums[t]))
        found = at_rest(model, j, t)
        left = left.unflatten(0, (found.shape[0], -1))[..., None]  # [H, 1 or K, 1]
        assert small.largest(found, left.expand_as(found)) < bound


SWITCHES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "PoST": ({}, [9, 8, 7, 7]),
    "no position scaling": ({"position_scaling": False}, [12, 8, 4, 0]),
    "taper on a flat spectrum": ({"taper": "linear", "range": (1.0, 1.0)}, [0, 0, 0, 0]),
}


@pytest.mark.parametrize("switches", SWITCHES)
def test_heads_that_keep_a_share_of_token_1(tmp_path: Path, switches: str) -> None:
    """Mamba-2 of 24 heads at T = 2048 before training: how many keep 5 to 95 % at t = 64, 512, 2048, 8192."""
    settings, counts = SWITCHES[switches]
    post = {"variant": "paper", "horizon": 2048, **settings}
    model = build_model(small.config("mamba2", {"d_state": 4}, d_model=96, n_layers=1, post=post))
    found = decaybench.spectrum(saved(tmp_path / "c", model, 2048), tokens=0)
    (layer,) = found.layers
    assert layer.rest.channels == 24
    for when in (START, TRAINED):
        assert [layer.counts[when].graded[1][t] for t in (64, 512, 2048, 8192)] == counts


def test_a_head_of_alpha_1_forgets_by_a_power_of_the_position(tmp_path: Path) -> None:
    """(j / t)^a, of any token j: exp(-a (1/(j+1) + ... + 1/t))."""
    model = build_model(small.config("mamba2", post=POST["paper"], n_layers=1))
    found = decaybench.spectrum(saved(tmp_path / "c", model), tokens=0)
    slowest = found.lines[0]
    rate = 1 / found.rest.layers[0].after[1][slowest.channel]
    assert rate == pytest.approx(1 / T, rel=1e-5)
    for t, kept in slowest.kept.items():
        assert kept == pytest.approx(math.exp(-rate * sum(1 / s for s in range(2, t + 1))), rel=1e-6)
    assert max(slowest.kept) == 64 * T
    assert slowest.kept[64 * T] / slowest.kept[16 * T] == pytest.approx(4**-rate, rel=2e-4)


def test_useful_channels_are_counted_at_every_position(tmp_path: Path) -> None:
    model = made("gla", "paper")
    found = decaybench.spectrum(saved(tmp_path / "c", model), tokens=0)
    for layer, block in zip(found.layers, model.blocks, strict=True):
        assert layer.rest.unit == "channel"
        for t, count in layer.counts[TRAINED].useful.items():
            taus = block.mixer.timescales(t)  # type: ignore[operator, union-attr]
            assert count == sum(1 <= tau <= t for tau in taus.tolist())
    shares = found.useful_shares(TRAINED)
    total = sum(layer.rest.channels for layer in found.layers)
    assert shares[T] == sum(layer.counts[TRAINED].useful[T] for layer in found.layers) / total


def test_the_ordered_parameter_stands_beside_timescales_that_have_another_order(tmp_path: Path) -> None:
    model = made("rwkv7", "paper")
    (first, _) = decaybench.spectrum(saved(tmp_path / "c", model), tokens=0).layers
    assert first.shows_order and first.rest.orders_channels and first.rest.order_after is not None
    spectrum: Any = model.blocks[0].mixer.spectrum  # type: ignore[union-attr]
    P, alpha = spectrum.ordered_rates(), spectrum.tapers()
    speeds = F.logsigmoid(P - alpha * math.log(T))
    assert first.rest.order_after[T] == pytest.approx(speeds.tolist(), rel=1e-5)
    gaps = first.order_gaps[TRAINED][T]
    assert gaps.smallest == pytest.approx(speeds.sort().values.diff().min().item(), rel=1e-3)
    plain = decaybench.spectrum(saved(tmp_path / "d", made("rwkv7")), tokens=0).layers[0]
    assert plain.order_gaps == {} and not plain.shows_order


# --- measured


def windows(noted: np.ndarray, positions: np.ndarray, t: int) -> np.ndarray:
    """Timescales of the tokens after 7/8 t and up to t, [n, N], by a plain loop."""
    rows, columns = positions.shape
    return np.stack(
        [
            -1 / noted[row, column]
            for row in range(rows)
            for column in range(columns)
            if 7 * t // 8 < positions[row, column] <= t
        ]
    )


@pytest.mark.parametrize("post", POST)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_measured_is_what_the_models_decays_say(name: str, post: str) -> None:
    model = made(name, post)
    tokens = small.tokens(3, 64, seed=5).numpy()
    tally = Tally((1, 16, 64), (1, 16), (16, 32, 64), rows=3)
    measure(model, tally, tokens, None)
    (noted,) = model.decays(torch.from_numpy(tokens))
    where = np.broadcast_to(np.arange(1, 65), tokens.shape)
    for layer, found in tally.layers().items():
        decays = noted[layer].numpy()
        for t in (1, 16, 64):
            taus = windows(decays, where, t)
            at = found.at[t]
            assert at.tokens == len(taus) == 3 * (t - 7 * t // 8)
            assert at.quantiles == pytest.approx(np.exp(np.quantile(np.log(taus), QUANTILES, axis=0)), rel=1e-9)
            assert at.effective == pytest.approx(1 / (1 / taus).mean(0), rel=1e-9)
            assert at.useful == pytest.approx(np.mean([sum(1 <= tau <= t for tau in row) for row in taus]))
        assert sorted(found.kept) == [(1, 16), (1, 32), (1, 64), (16, 32), (16, 64)]
        for (j, t), kept in found.kept.items():
            left = np.exp(decays[:, j:t].sum(1))  # positions j + 1 .. t
            assert kept.documents == 3
            assert kept.mean == pytest.approx(left.mean(0), rel=1e-9, abs=1e-300)
            assert kept.graded == pytest.approx(((left >= 0.05) & (left <= 0.95)).sum() / 3)


def test_documents_and_padding_are_told_apart() -> None:
    """Two documents in a row, pads before and between: the same as each alone; what none reaches is absent."""
    model = made("gla", "paper")
    tokens = small.tokens(1, 30, seed=2).numpy()
    pads = np.zeros((1, 3), dtype=np.int64)
    row = np.concatenate([pads, tokens, pads, tokens[:, :20]], axis=1)
    steps = np.arange(1, 31)[None]
    positions = np.concatenate([pads, steps, pads, steps[:, :20]], axis=1)
    packed, alone = (Tally((1, 16, 64), (1, 16), (16, 30, 64), rows=1) for _ in range(2))
    measure(model, packed, row, positions)
    measure(model, alone, tokens, None)
    measure(model, alone, tokens[:, :20], None)
    assert (packed.documents, packed.tokens) == (alone.documents, alone.tokens) == (2, 50)
    for layer, found in packed.layers().items():
        other = alone.layers()[layer]
        assert sorted(found.at) == sorted(other.at) == [1, 16]
        assert found.at[16].quantiles == pytest.approx(other.at[16].quantiles, rel=1e-9)
        assert {pair: kept.documents for pair, kept in found.kept.items()} == {(1, 16): 2, (1, 30): 1, (16, 30): 1}
        for pair, kept in found.kept.items():
            assert kept.mean == pytest.approx(other.kept[pair].mean, rel=1e-9)


def test_long_rows_are_read_in_pieces_and_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("mamba2")
    tokens = small.tokens(2, 512, seed=1).numpy()
    whole = Tally((512,), (1,), (512,), rows=2)
    measure(model, whole, tokens, None)
    parts = Tally((512,), (1,), (512,), rows=2)
    parts.add(np.broadcast_to(np.arange(1, 513), tokens.shape), model.decays(torch.from_numpy(tokens), piece=100))
    thin = Tally((512,), (1,), (512,), rows=200)
    measure(model, thin, tokens, None)
    at = [tally.layers()[1].at[512] for tally in (whole, parts, thin)]
    assert at[0].quantiles == pytest.approx(at[1].quantiles, rel=1e-9)
    assert [found.tokens for found in at] == [128, 128, 12], "every 12th of 200 samples' 12,800"
    kept = [tally.layers()[1].kept[1, 512].mean for tally in (whole, parts)]
    assert kept[0] == pytest.approx(kept[1], rel=1e-9)


# --- the command


def undraw(patch: pytest.MonkeyPatch) -> None:
    """Figures take most of a command's time."""
    patch.setattr(spectra, "draw_spectrum_figures", lambda runs, folder: [])


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    undraw(monkeypatch)


def test_a_run_is_drawn_with_every_number(finished: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished("mqar")
    done = bench("spectrum", str(run), "--tokens", "2048")
    assert (done.code, done.err) == (0, "")
    assert "measured on 4 samples of mqar capacity, 512 tokens each" in done.out
    names = {path.name for path in (run / "spectrum").iterdir()}
    figures = ("timescales", "measured", "density", "gaps", "channels", "retention")
    assert names == {"spectrum.json", *(f"{name}.{kind}" for name in figures for kind in ("png", "svg"))}
    (found,) = json.loads((run / "spectrum" / "spectrum.json").read_text())["runs"]
    read = {"of": "mqar capacity", "samples": 4, "length": 512, "tokens": 2048, "documents": 4}
    assert found["measured_on"] == read
    with monkeypatch.context() as patch:
        undraw(patch)
        assert json.loads(bench("spectrum", str(run), "--tokens", "2048", "--json").out)["runs"] == [found]
    for layer in found["layers"]:
        assert [at["position"] for at in layer["measured"]] == [1, 32, 128, 512]
        assert layer["unit"] == "head" and layer["count"] == 4
    again = bench("spectrum", str(run), "--tokens", "0")
    assert again.code == 0 and "at rest alone" in again.out
    assert not (run / "spectrum" / "measured.png").exists(), "an older call's figure would belong to other numbers"


def test_variant_and_length_are_the_callers_to_say(undrawn: None, finished: Callable[[str], Path]) -> None:
    run = finished("niah")
    (found,) = look_at([run], Asked(tokens=256, length="2x"))
    assert found.read is not None and (found.read.what, found.read.length) == ("niah single", 64)
    assert found.layers[0].measured is not None and sorted(found.layers[0].measured.at) == [1, 32]
    (found,) = look_at([run], Asked(tokens=256, variant="multikey", length="128"))
    assert found.read is not None and (found.read.what, found.read.length) == ("niah multikey", 128)
    for words, said in (
        (("--variant", "multkey"), "multikey"),
        (("--length", "long"), "'long' is not a length"),
        (("--tokens", "-1"), "--tokens -1"),
        (("--data", "nowhere"), "nowhere"),
        ((str(run),), "given twice"),
        (("x" * 300,), "no checkpoint at"),
    ):
        refused = bench("spectrum", str(run), *words)
        assert refused.code == 2 and said in refused.err and refused.err.count("\n") == 1, refused.err


def test_what_has_nothing_to_read_is_drawn_at_rest(undrawn: None, tmp_path: Path) -> None:
    alone = saved(tmp_path / "c", small.model("gla"))
    done = bench("spectrum", str(alone))
    assert done.code == 0 and "is a checkpoint without its run" in done.out and "--data DIR" in done.out
    (found,) = json.loads((alone / "spectrum" / "spectrum.json").read_text())["runs"]
    assert found["measured_on"] is None and "measured" not in found["layers"][0]
    refused = bench("spectrum", str(alone), "--length", "2x")
    assert refused.code == 2 and "checkpoint without its run" in refused.err
    untold = saved(tmp_path / "d", small.model("gla"), None)
    assert [found.rest.position_name(t) for found in look_at([untold], Asked()) for t in found.rest.positions] == [
        *("1", "1024", "4096", "16384")
    ]


def test_a_mixer_that_shows_nothing_is_drawn_at_rest(
    undrawn: None, finished: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LanguageModel, "decays", lambda self, tokens, positions=None: iter([{}]))
    done = bench("spectrum", str(finished("mqar")))
    assert done.code == 0 and "at rest alone: mamba2 shows its decays to no observer" in done.out


def test_no_decays_no_spectrum(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", small.model("attention"))
    refused = bench("spectrum", str(path))
    assert refused.code == 2 and "attention has no decays" in refused.err and refused.err.count("\n") == 1


def test_decays_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    model = small.model("mamba2")
    model.blocks[1].mixer.spectrum.P.data[0] = math.nan  # type: ignore[union-attr, operator, index]
    refused = bench("spectrum", str(saved(tmp_path / "c", model)))
    assert refused.code == 2 and "layer 1 has decays that are no numbers" in refused.err


def test_a_head_that_never_forgets_is_drawn_at_the_edge(undrawn: None, tmp_path: Path) -> None:
    model = small.model("mamba2")
    model.blocks[0].mixer.spectrum.P.data[0] = -200.0  # type: ignore[union-attr, operator, index]
    path = saved(tmp_path / "c", model.float())
    assert bench("spectrum", str(path)).code == 0
    (found,) = look_at([path], Asked())
    assert found.rest.layers[0].after[1][0] == 1e30
    panel = timescale_figure([found.rest]).axes[0]
    assert max(np.max(line.get_ydata()) for line in panel.lines) == CAP * T


def test_several_runs_stand_side_by_side(
    undrawn: None, tmp_path: Path, here: Path, finished: Callable[[str], Path]
) -> None:
    paths = [finished("mqar"), saved(tmp_path / "c", small.model("rwkv7", post=POST["paper"]))]
    done = bench("spectrum", *map(str, paths), "--tokens", "512")
    assert done.code == 0, done.err
    found = json.loads((here / "spectrum" / "spectrum.json").read_text())["runs"]
    assert [run["name"] for run in found] == ["mamba2", "rwkv7+post"]
    assert "mamba2: measured on" in done.out and "rwkv7+post: at rest alone" in done.out


def test_tables_fit_80_columns(looked_at: list[RunSpectrum]) -> None:
    for runs in (looked_at, looked_at[:1]):
        for table in Spectra(Path("spectrum"), tuple(runs)).tables():
            out = io.StringIO()
            Console(file=out, width=80).print(table)
            said = out.getvalue()
            assert "…" not in said, said
            assert all(run.name in said for run in runs), said


def test_python_gives_the_same(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", small.model("gla"))
    assert decaybench.spectrum(path).plain() == look_at([path], Asked())[0].plain()
    with pytest.raises(UserError, match="no checkpoint"):
        decaybench.spectrum(tmp_path / "nowhere")


# --- texts


@pytest.fixture(scope="module")
def novels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("data") / "novels", stories(60))


def test_a_language_model_reads_a_text(undrawn: None, tmp_path: Path, novels: Path) -> None:
    """Positions start anew with each document: few of them reach the later ones."""
    model = small.model("gla", vocab_size=257).float()
    path = saved(tmp_path / "c", model, tokenizer_sha256=ByteTokenizer().sha256)
    (found,) = look_at([path], Asked(tokens=2048, data=novels))
    assert found.read is not None and found.read.what == "text validation" and found.read.length == 16 * T
    assert (found.read.tokens, found.read.documents) == (2048, len(_documents(novels, 16 * T, 8)))
    at = found.layers[0].measured
    assert at is not None and at.at[1].tokens == found.read.documents > 8
    longest = max(_documents(novels, 16 * T, 8))
    assert {t for t in (T, 4 * T, 16 * T) if t <= longest} <= set(at.at) and max(at.at) <= 8 * longest // 7 + 1
    (one,) = look_at([path], Asked(tokens=100, data=novels, length="1x"))
    assert one.read is not None and (one.read.samples, one.read.length) == (6, T)


def _documents(folder: Path, length: int, rows: int) -> list[int]:
    """Lengths of the documents, whole or cut, in the windows that are read."""
    task = make_task(parse(TextConfig, {"data": str(folder), "train_length": T}))
    (cell,) = task.cells(TextEvaluation(), [length])
    positions = task.batch(cell.shape, "test", 0, np.arange(rows)).positions
    assert positions is not None
    starts = [np.flatnonzero(row == 1).tolist() for row in positions]
    return [end - start for row in starts for start, end in pairwise([*row, length])]


def test_a_text_in_other_tokens_is_refused(
    undrawn: None, tmp_path: Path, novels: Path, finished: Callable[[str], Path]
) -> None:
    other = saved(tmp_path / "c", small.model(vocab_size=257), tokenizer_sha256="0" * 64)
    few = saved(tmp_path / "d", small.model(vocab_size=31))
    for path, said in (
        (other, "another tokenizer"),
        (few, "257 kinds of tokens"),
        (finished("mqar"), "trained on mqar"),
    ):
        refused = bench("spectrum", str(path), "--data", str(novels))
        assert refused.code == 2 and said in refused.err and refused.err.count("\n") == 1, refused.err


# --- figures


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory: pytest.TempPathFactory) -> list[RunSpectrum]:
    """Three runs of several kinds, one of them measured by hand."""
    folder = tmp_path_factory.mktemp("looked")
    models = {"mamba2": "paper", "rwkv7": "paper", "gla": "base"}
    paths = [saved(folder / name, made(name, post)) for name, post in models.items()]
    return look_at(paths, Asked())


def panels(figure: Figure) -> list[Axes]:
    figure.draw_without_rendering()
    return list(figure.axes)


def test_gaps_are_drawn_beside_random_ones(looked_at: list[RunSpectrum]) -> None:
    found = panels(plots.gap_figure(looked_at))
    assert len(found) == 9
    for column, run in enumerate(looked_at):
        rows = zip(found[column::3], (("smallest", 1), ("smallest", T), ("median", 1)), strict=True)
        for panel, (what, t) in rows:
            for marker, name in (("o", what), ("_", f"random_{what}")):
                drawn = sorted(float(line.get_ydata()[0]) for line in panel.lines if line.get_marker() == marker)
                wanted = [getattr(layer.gaps[when][t], name) for layer in run.layers for when in (START, TRAINED)]
                assert drawn == pytest.approx(sorted(max(gap, 1e-6) for gap in wanted))
            triangles = [line for line in panel.lines if line.get_marker() == "^"]
            assert len(triangles) == 2 * sum(layer.shows_order for layer in run.layers)
        assert any(layer.shows_order for layer in run.layers) == (run.rest.cell != "gla")


def test_shares_are_drawn_by_position(looked_at: list[RunSpectrum]) -> None:
    found = panels(plots.channel_figure(looked_at))
    for run in looked_at:
        for panel, curve in zip(
            found,
            (run.useful_shares(TRAINED), run.graded_shares(TRAINED, 1), run.graded_shares(TRAINED, T)),
            strict=True,
        ):
            (line,) = [line for line in panel.lines if line.get_label() == run.name]
            assert dict(line.get_xydata().tolist()) == pytest.approx(curve)


def test_retention_is_drawn_for_the_lines_listed(looked_at: list[RunSpectrum]) -> None:
    for panel, run in zip(panels(plots.retention_figure(looked_at)), looked_at, strict=True):
        curves = [line.get_ydata().tolist() for line in panel.lines if len(line.get_ydata()) > 2]
        assert curves == [list(line.kept.values()) for line in run.lines]


def test_a_figure_is_the_same_bytes_twice(looked_at: list[RunSpectrum], tmp_path: Path) -> None:
    paths = [save(plots.density_figure(looked_at), tmp_path / name, "density") for name in ("a", "b")]
    assert [path.read_bytes() for path in paths[0]] == [path.read_bytes() for path in paths[1]]
