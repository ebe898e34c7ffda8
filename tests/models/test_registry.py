"""Architectures by name, other packages' by entry points, and what a wrong configuration is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from decaybench.core.config import parse
from decaybench.core.errors import RunError, UserError
from decaybench.models import registry
from decaybench.models.addons import ADDONS
from decaybench.models.config import PRESETS, ModelConfig, preset
from decaybench.models.language_model import build_model
from decaybench.models.registry import Architecture, architectures, get_architecture
from tests.models import small

MAMBA2 = "decaybench.models.mixers.mamba2:"
BUILT_IN = ["mamba2", "rwkv7", "gated_deltanet", "gla", "retnet", "attention"]


class Entry:
    """What importlib.metadata.entry_points gives."""

    def __init__(self, name, value):
        self.name, self.value = name, value

    def load(self):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@pytest.fixture
def installed(monkeypatch) -> Iterator[list[Entry]]:
    entries: list[Entry] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == "decaybench.models" else [])
    architectures.cache_clear()
    yield entries
    architectures.cache_clear()


def other(name="mamba2b", mixer="Mamba2", config="Mamba2Config", **settings):
    return Architecture(name, MAMBA2 + config, MAMBA2 + mixer, "another package's", "here", **settings)


@pytest.mark.parametrize(
    ("name", "hint"), [("mamba3", "mamba2"), ("Mamba2", "mamba2"), ("atention", "attention"), ("mamba-2", "mamba2")]
)
def test_an_unknown_name_is_answered_with_the_nearest(name, hint):
    with pytest.raises(UserError, match=f"unknown model '{name}'; did you mean '{hint}'"):
        get_architecture(name)


def test_a_name_like_no_other_is_answered_with_all():
    with pytest.raises(UserError, match=f"known: {', '.join(sorted(BUILT_IN))}"):
        get_architecture("zzz")


def test_another_packages_model_is_built_like_ours(installed):
    installed.append(Entry("x", other()))
    assert list(architectures()) == [*BUILT_IN, "mamba2b"]
    config = parse(ModelConfig, {"name": "mamba2b", "vocab_size": 31, "d_model": 32, "mixer": small.SIZES["mamba2"]})
    assert config.cell == "mamba2b"
    assert build_model(config)(small.tokens(1, 5)).logits.shape == (1, 5, 31)
    with pytest.raises(UserError, match="post needs a mixer with decays; mamba2b has none"):
        parse(ModelConfig, {"name": "mamba2b", "post": {"horizon": 64}})
    with pytest.raises(UserError, match="bft needs a mixer that shows its heads; mamba2b doesn't"):
        parse(ModelConfig, {"name": "mamba2b", "bft": {}})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            ImportError("no module named cuda"),
            "entry point x of decaybench.models can't be loaded: no module named cuda",
        ),
        (RuntimeError("boom"), "entry point x of decaybench.models can't be loaded: boom"),
        ("a string", "entry point x of decaybench.models is not an Architecture"),
        (other("mamba2"), "takes the model name 'mamba2', which is taken"),
    ],
)
def test_a_bad_entry_point_is_named(installed, value, said):
    installed.append(Entry("x", value))
    with pytest.raises(RunError, match=said):
        architectures()
    installed.clear()  # what failed is not remembered
    assert list(architectures()) == BUILT_IN


@pytest.mark.parametrize("bad", [{"config": "Nothing"}, {"mixer": "Nothing"}])
def test_an_architecture_that_names_nothing_is_named(installed, bad):
    installed.append(Entry("x", other(**bad)))
    with pytest.raises(RunError, match="Nothing', which an architecture names, can't be imported"):
        build_model(parse(ModelConfig, {"name": "mamba2b"}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "mamba"}, "unknown model 'mamba'; did you mean 'mamba2'?"),
        ({"d_modle": 64}, "unknown key 'd_modle' (value 64); did you mean 'd_model'?"),
        ({"mixer": {"d_sate": 8}}, "unknown key 'model.mixer.d_sate' (value 8); did you mean 'd_state'?"),
        ({"mixer": {"d_state": 0}}, "model.mixer.d_state=0: input should be greater than or equal to 1"),
        ({"name": "attention", "mixer": {"d_state": 8}}, "unknown key 'model.mixer.d_state'"),
        ({"ffn": {"kind": "swiglo"}}, "did you mean 'swiglu'?"),
        ({"post": {"taper": "lerned"}}, "did you mean 'learned'?"),
        ({"post": {"horizn": 5}}, "unknown key 'post.horizn' (value 5); did you mean 'horizon'?"),
        ({"name": "attention", "post": {}}, "post needs a mixer with decays; attention has none"),
        ({"bft": {"precison": "mlp"}}, "unknown key 'bft.precison' (value 'mlp'); did you mean 'precision'?"),
        ({"bft": {"observation": "sampel"}}, "did you mean 'sample'?"),
        ({"bft": {"jacobian": "detached"}}, "model.bft.jacobian=detached is of an FFN, and this model has none: J = 0"),
        ({"bft": {"control": "scalar_gate", "nu0": 2.0}}, "scalar_gate stands in the place of BFT: model.bft.nu0=2"),
        (
            {"bft": {"precision": "frozen", "process_noise": False}},
            "frozen carries none: model.bft.process_noise=false",
        ),
        ({"post": {"gate": "softplus"}}, "post.gate=softplus is for gla, retnet; mamba2 has one gate, its own"),
        ({"name": "rwkv7", "post": {"gate": "baseline"}}, "rwkv7 has one gate, its own"),
        ({"name": "gla", "post": {"gate": "softplus"}}, "post.gate=softplus is what variant paper has: leave it out"),
        ({"name": "rwkv7", "post": {"dt_bias": "frozen"}}, "post.dt_bias=frozen: rwkv7 has a dt_bias in no gate"),
        (
            {"name": "gla", "post": {"variant": "minimal", "dt_bias": "frozen"}},
            "post.dt_bias=frozen: gla has a dt_bias with post.gate=softplus only",
        ),
        ({"vocab_size": 1}, "vocab_size=1: input should be greater than or equal to 2"),
        ({"n_layers": 0}, "n_layers=0"),
        ({"norm": "rms"}, "norm='rms'"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(settings, said):
    with pytest.raises(UserError) as error:
        parse(ModelConfig, settings)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("mixer", "said"),
    [
        ({"headdim": 7}, "mixer.headdim=7 must divide expand * d_model = 64"),
        ({"n_groups": 3}, "mixer.n_groups=3 must divide the number of heads, 8"),
    ],
)
def test_sizes_that_do_not_divide_are_named(mixer, said):
    with pytest.raises(UserError) as error:
        build_model(small.config(mixer=mixer))
    assert str(error.value) == said


def test_every_preset_is_a_configuration(monkeypatch):
    for size, models in PRESETS.items():
        for name in models:
            config = parse(ModelConfig, preset(size, name))
            assert config.name == name
            build_model(config, device="meta")
    with pytest.raises(UserError, match="unknown model preset '180'; did you mean '180m'"):
        preset("180", "mamba2")
    monkeypatch.delitem(PRESETS["180m"], "attention")
    with pytest.raises(UserError, match="unknown model of preset 180m 'attention'"):
        preset("180m", "attention")


def test_an_architecture_has_its_own_ffn():
    assert parse(ModelConfig, {"name": "rwkv7", "ffn": {"multiple": 2}}).ffn.kind == "channel_mix"
    assert parse(ModelConfig, {"name": "rwkv7", "ffn": {"kind": "mlp"}}).ffn.kind == "mlp"
    assert parse(ModelConfig, {"name": "mamba2", "ffn": {}}).ffn.kind == "swiglu"


def test_a_configuration_survives_its_plain_form():
    config = small.config(ffn={}, post={"variant": "minimal", "range": (2.0, 50.0)}, bft={"gain": False})
    assert parse(ModelConfig, config.plain()) == config
    assert config.cell == "mamba2+post-minimal-range+bft-no-gain"
    assert config.addons == ("post-minimal-range", "bft-no-gain")
    assert small.config(post={}).cell == "mamba2+post"
    assert small.config(bft={}).cell == "mamba2+bft"


def test_the_table_of_add_ons_is_what_configurations_and_architectures_have():
    for name, addon in ADDONS.items():
        assert addon.name == name
        assert ModelConfig.model_fields[name].annotation == addon.config_class() | None
        assert addon.source.removeprefix("arXiv ") in sys.modules[addon.config_class().__module__].__doc__
        for variant in addon.variants:
            found = parse(addon.config_class(), variant)
            assert found.name.split("-")[0] == name
        assert parse(addon.config_class(), addon.variants[0]) == addon.config_class()(), (
            "the first is what --flag gives"
        )
    for architecture in architectures().values():
        assert list(architecture.addons) == [name for name in ADDONS if name in architecture.addons]
        assert all(architecture.addons.values())
