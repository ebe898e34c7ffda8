"""The pages say what the code says: docs/architectures.md against the registry, the presets and the tests it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from decaybench.core.config import parse
from decaybench.harness.equal_state import counted
from decaybench.harness.model_info import state_elements
from decaybench.harness.presets import configure, preset_layer
from decaybench.models.config import ModelConfig, preset
from decaybench.models.language_model import build_model
from decaybench.models.registry import architectures

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
BUILT_IN = {name: found for name, found in architectures().items() if found.mixer.startswith("decaybench.")}
WITH_POST = [name for name, found in BUILT_IN.items() if "post" in found.addons]


RATES = "Learning rates of preset smoke"


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def plain(text: str) -> str:
    return " ".join(text.split())


def test_every_architecture_has_its_section_and_no_other_has() -> None:
    assert list(sections()) == ["PoST in all of them", RATES, *BUILT_IN]


@pytest.mark.parametrize("task", ["mqar", "niah"])
@pytest.mark.parametrize("name", WITH_POST)
def test_the_tables_of_learning_rates_say_what_the_presets_take(name: str, task: str) -> None:
    table = sections()[RATES].partition(f"### {task.upper()}")[2].partition("###")[0]
    head = re.search(r"^\| \|(.+)\|$", table, re.MULTILINE)
    row = re.search(rf"^\| {name}\b[^|]*\|(.+)\|$", table, re.MULTILINE)
    assert head and row
    columns = zip(head[1].split("|"), row[1].split("|"), strict=True)
    (chosen,) = [rate for rate, cell in columns if "**" in cell]
    assert preset_layer(task, "smoke", name)["training"]["learning_rate"] == float(chosen)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_section_has_source_and_equation_of_the_registry(name: str) -> None:
    section, known = sections()[name], BUILT_IN[name]
    sources = re.findall(r"\d{4}\.\d{5}", known.source)
    assert sources and all(f"arXiv {number}" in section for number in sources)
    code = [plain(line) for line in section.splitlines() if line.startswith("    ")]
    assert len(code) == 1
    assert not known.equation or plain(known.equation) == code[0]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_section_says_all_that_is_asked_of_it(name: str) -> None:
    section, known = sections()[name], BUILT_IN[name]
    for word in ("**Initial values**", "**PoST", "**State**", "**Verified**"):
        assert word in section
    if "post" in known.addons:
        assert "paper" in section and "minimal" in section and "**Timescale at rest**" in section
        assert re.search(rf"^\| {name} \|", PAGE, re.MULTILINE), "and a line in the table of spectra"
    for package in ("transformers", "mamba-ssm", "flash-linear-attention", "rwkv.cpp"):
        assert (package in known.verified) <= (package in section)
    named = re.findall(r"`(tests/[\w/]+\.py)`", section)
    assert named and all((ROOT / path).is_file() for path in named)
    own = ROOT.glob(f"tests/models/test_{name}*.py")
    assert {str(path.relative_to(ROOT)) for path in own} <= set(named), "every test of it is named"


@pytest.mark.parametrize("name", WITH_POST)
def test_state_sizes_are_those_of_a_real_cache(name: str) -> None:
    (said,) = re.findall(r"([\d,]+) numbers a layer in preset smoke", plain(sections()[name]))
    model = build_model(parse(ModelConfig, preset("smoke", name)))
    assert set(state_elements(model, 128)) == {int(said.replace(",", ""))}


@pytest.mark.parametrize("name", WITH_POST)
@pytest.mark.parametrize("variant", ["paper", "minimal"])
def test_the_table_of_spectra_is_where_they_start(name: str, variant: str) -> None:
    (row,) = re.findall(rf"^\| {name} \|(.*)\|$", sections()["PoST in all of them"], re.MULTILINE)
    _, paper, minimal = (entry.strip() for entry in row.split("|"))
    said = paper if variant == "paper" or minimal == "the same" else minimal
    T = 512
    sizes = {"mamba2": {"d_state": 8, "headdim": 8}, "rwkv7": {"head_dim": 8}}.get(name, {"n_heads": 4})
    post = {"variant": variant, "horizon": T}
    model = build_model(parse(ModelConfig, {"name": name, "d_model": 32, "n_layers": 1, "mixer": sizes, "post": post}))
    log_rates = _spectrum(model).ordered_rates()
    dt = float(found[1]) if (found := re.search(r"dt = ([\d.]+)", said)) else 1.0
    slow, fast = log_rates[0].exp().item(), log_rates[-1].exp().item()
    if name == "rwkv7":
        slow, fast = (0.60653 * x / (1 + x) for x in (slow, fast))
    if "gate logit of 0" in said:
        slow, fast = (x * 0.693147 / 16 for x in (slow, fast))
    low, high = re.match(r"(\S+) to ([\d.T]+)", said).groups()  # type: ignore[union-attr]
    values = {"T": T, "100/T": 100 / T}
    for timescale, number in ((1 / (fast * dt), low), (1 / (slow * dt), high)):
        assert timescale == pytest.approx(values.get(number) or float(number.rstrip(",")), rel=2e-3)


def _spectrum(model):
    from decaybench.models.addons.post import Spectrum

    (found,) = [module for module in model.modules() if isinstance(module, Spectrum)]
    return found


# --- docs/pretrain.md

PRETRAIN = (ROOT / "docs" / "pretrain.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_sizes_of_language_models_are_counted(name: str) -> None:
    (row,) = re.findall(rf"^\| {name} \|(.+)\|$", PRETRAIN, re.MULTILINE)
    for size, said in zip(("micro", "180m", "440m", "1.5b"), row.split("|"), strict=True):
        model = build_model(parse(ModelConfig, preset(size, name)), device="meta")
        millions = sum(weight.numel() for weight in model.parameters()) / 1e6
        assert said.strip() == (f"{millions:,.2f} M" if millions < 100 else f"{millions:,.0f} M")


def test_what_the_page_on_pretraining_says_of_preset_micro() -> None:
    settings = preset_layer("text", "micro", "mamba2")
    training = settings["training"]
    assert f"{training['steps']:,} steps of {training['batch_tokens']:,} tokens" in PRETRAIN
    assert f"context {settings['task']['train_length']}" in PRETRAIN


# --- docs/ablations.md

ABLATIONS = (ROOT / "docs" / "ablations.md").read_text(encoding="utf-8")
VARIANTS = re.findall(r"^\| (mamba2\S*?),? ?(?:state_passing=1)? \| [^|]+ \| (?:`(.*)`)? ?\|$", ABLATIONS, re.MULTILINE)


def test_the_flags_of_an_ablation_make_the_variant_of_its_row() -> None:
    assert len(VARIANTS) == 9
    for cell, flags in VARIANTS:
        settings = [word for word in flags.split() if "=" in word]
        (config,) = configure("mqar", flags={"model.post": {}} if "--post" in flags else {}, settings=settings)
        assert config.model.cell == cell
        assert (config.training.state_passing is not None) == ("state_passing" in flags)


@pytest.mark.parametrize("name", WITH_POST)
def test_what_the_page_on_ablations_says_of_states(name: str) -> None:
    alone, post, bft = (
        counted(parse(ModelConfig, {**preset("smoke", name), **more}))
        for more in ({}, {"post": {"horizon": 128}}, {"bft": {}})
    )
    others = "the others" if name not in ("mamba2", "rwkv7") else {"mamba2": "Mamba-2", "rwkv7": "RWKV-7"}[name]
    (share,) = re.findall(rf"([\d.]+) % with {others}", plain(ABLATIONS))
    assert alone == post and f"{100 * (bft / alone - 1):.1f}" == share
    assert name == "rwkv7" or f"{alone:,}" in ABLATIONS
