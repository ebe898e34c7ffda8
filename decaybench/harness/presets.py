"""Named run configurations: `smoke` for two CPU cores, and the published protocols.

Sources: Zoology (arXiv 2312.04927, its configurations of figure 2), Based (arXiv 2402.18668, figure 2), PoST (arXiv
2604.07658 and its code), RULER (arXiv 2404.06654). A protocol's learning rate is chosen from its grid; the preset
starts with the middle one. `harness/protocols.py` decides whether a finished run is still the protocol's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decaybench.core.config import apply_settings, merge, nested, read_yaml
from decaybench.core.errors import UserError
from decaybench.core.names import unknown
from decaybench.harness.addons import ADDONS
from decaybench.harness.config import RunConfig, make_config, read_run_config
from decaybench.models import config as models
from decaybench.models.checkpoints import Checkpoint, find_checkpoint
from decaybench.models.registry import get_architecture
from decaybench.results.run_folder import RunFolder
from decaybench.tasks.registry import TASKS, get_task
from decaybench.tasks.text import mix_of


@dataclass(frozen=True)
class Preset:
    """Settings for a run. models: each architecture's sizes; run: all else; others: sizes of an architecture that is
    not among them (None: there are none, a published protocol's say).

    learning_rates: the protocol's grid by architecture, `*` for all others; a run takes its middle one. training: what
    of the training is an architecture's own.
    """

    description: str
    models: dict[str, dict[str, Any]]
    run: dict[str, Any]
    learning_rates: dict[str, tuple[float, ...]] = field(default_factory=dict)
    others: dict[str, Any] | None = None
    training: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether it says how a model is trained, not only what one is asked."""
        return bool(self.models)

    def grid(self, model: str) -> tuple[float, ...]:
        """The learning rates that an architecture's is chosen from; empty: none are named."""
        return self.learning_rates.get(model) or self.learning_rates.get("*") or ()

    def learning_rate(self, model: str) -> float | None:
        """The middle of the grid (the upper one of two); None: the preset has no grid."""
        grid = self.grid(model)
        return grid[len(grid) // 2] if grid else None


_SMOKE_MODELS = {name: models.preset("smoke", name) for name in models.PRESETS["smoke"]}
_SMOKE_OTHERS: dict[str, Any] = {"d_model": 64, "n_layers": 2}
# The best of 4e-3, 1e-2 and 2e-2 on samples of their own (docs/architectures.md).
_MQAR_RATES: dict[str, tuple[float, ...]] = {"mamba2": (2e-2,), "rwkv7": (4e-3,), "retnet": (2e-2,), "*": (1e-2,)}
# The best of the same for mamba2 (one seed) and attention (two: at 1e-2 one never left the curriculum, at 4e-3 both
# were slow); the others weren't tried.
_NOISY_RATES: dict[str, tuple[float, ...]] = {"attention": (2e-2,), "*": (1e-2,)}
_NIAH_RATES: dict[str, tuple[float, ...]] = {
    "rwkv7": (4e-3,),
    "retnet": (2e-2,),
    "attention": (2e-2,),
    "*": (1e-2,),
}
_WIDE = 8192


def _grid(low: float, high: float, n: int) -> tuple[float, ...]:
    return tuple(10 ** (low + (high - low) * i / (n - 1)) for i in range(n))


# Zoology's blocks around mixers that bring none of their own: LayerNorms, dropout behind the embedding, and the norm of
# the stream added where an FFN would be. Mamba-2's have RMSNorms and nothing else; all end in a LayerNorm.
_ZOOLOGY_BLOCKS: dict[str, Any] = {"norm": "layernorm", "embedding_dropout": 0.1, "norm_branch": True}
_MAMBA_BLOCKS: dict[str, Any] = {"final_norm": "layernorm"}
# torch's AdamW as it comes, over all parameters alike, in float32.
_ZOOLOGY_TRAINING: dict[str, Any] = {
    "plan": "epochs",
    "shuffle": True,
    "schedule": "cosine-by-epoch",
    "warmup": 0,
    "betas": [0.9, 0.999],
    "decayed": "all",
    "clip": None,
}


def _stages(*sizes: tuple[int, int, int]) -> list[dict[str, Any]]:
    return [{"shape": {"length": T, "kv": kv}, "examples": examples} for T, examples, kv in sizes]


def _iclr24(length: int, kv: int, batch: int) -> Preset:
    return Preset(
        f"Zoology, figure 2 at T = {length}, kv = {kv}",
        {
            # Two mixers stand where attention has one and the place of an FFN.
            "mamba2": {"d_model": 64, "n_layers": 4, **_MAMBA_BLOCKS},
            "attention": {"d_model": 64, "n_layers": 2, **_ZOOLOGY_BLOCKS, "mixer": {"n_heads": 1}},
        },
        {
            "task": {
                "train_length": length,
                "vocab_size": _WIDE,
                "fill": "zero",
                "stages": _stages((length, 100_000, kv)),
            },
            "training": {**_ZOOLOGY_TRAINING, "epochs": 64, "batch_samples": batch},
            "evaluation": {"lengths": [str(length)], "samples": 3000, "pairs": [[length, kv]]},
        },
        {"*": _grid(-4, -2, 4)},
    )


_BASED = Preset(
    "Based, figure 2: one training set of five sizes, tested up to T = 1024, kv = 256",
    {
        "mamba2": {"d_model": 64, "n_layers": 2, **_MAMBA_BLOCKS, "mixer": {"d_state": 16}},
        "attention": {"d_model": 64, "n_layers": 2, **_ZOOLOGY_BLOCKS, "mixer": {"n_heads": 1}},
    },
    {
        "task": {
            "train_length": 256,
            "vocab_size": _WIDE,
            "fill": "random",
            "stages": _stages(
                (64, 100_000, 4), (128, 20_000, 8), (256, 20_000, 16), (256, 20_000, 32), (256, 20_000, 64)
            ),
        },
        "training": {**_ZOOLOGY_TRAINING, "epochs": 32, "batch_samples": 256},
        "evaluation": {
            "samples": 1000,
            "pairs": [[64, 4], [64, 8], [64, 16], [128, 32], [256, 64], [512, 128], [1024, 256]],
        },
    },
    {"*": _grid(-3, -1.5, 4)},
)


def _post(state: str, d_model: int, heads: int) -> Preset:
    blocks = {"d_model": d_model, "n_layers": 2}
    # The protocol's GDN, GLA and RetNet stand in other blocks than its Mamba-2 and RWKV-7.
    others = {**blocks, **_ZOOLOGY_BLOCKS}
    head_dim = d_model // heads
    # Its LoRA of RWKV-7 grows with the heads, RWKV-LM's doesn't.
    ranks = {"decay_rank": 128, "rate_rank": 128, "value_rank": 64} if head_dim == 128 else {}
    linear = {"n_heads": heads, "expand_k": 1, "expand_v": 1, "conv_width": 4}
    return Preset(
        f"PoST's MQAR at {state} state elements: T = 512, kv to 128, tested at 512 to 4096",
        {
            "mamba2": {
                **blocks,
                **_MAMBA_BLOCKS,
                "mixer": {"d_state": d_model // (2 * heads), "headdim": 2 * d_model // heads},
            },
            "rwkv7": {**blocks, "norm": "layernorm", "mixer": {"head_dim": head_dim, **ranks}},
            "gated_deltanet": {
                **others,
                "mixer": {"n_heads": heads, "head_dim": head_dim, "expand_v": 1, "output_gate": False},
            },
            "gla": {**others, "mixer": linear},
            "retnet": {**others, "mixer": linear},
        },
        {
            "task": {
                "train_length": 512,
                "vocab_size": _WIDE,
                "fill": "random",
                "stages": _stages(*((512, 2**18, kv) for kv in (16, 32, 64, 128))),
            },
            "training": {
                "plan": "epochs",
                "epochs": 8,
                "batch_tokens": 2**18,
                "schedule": "linear-by-epoch",
                "warmup": 0,
                "betas": [0.9, 0.999],
                "decayed": "matrices",
                "dtype": "bfloat16",
            },
            "micro_batch_tokens": 2**14,
            "evaluation": {"lengths": ["512", "1024", "2048", "4096"], "samples": 3000, "capacity_ratio": 4},
        },
        {"rwkv7": _grid(-4.5, -3.5, 3), "gated_deltanet": _grid(-3.5, -2.5, 3), "*": _grid(-3, -2, 3)},
    )


def _sizes_of(size: str) -> dict[str, dict[str, Any]]:
    """Each architecture's language model, with the vocabulary of whatever the data were made with."""
    found = {name: models.preset(size, name) for name in models.PRESETS[size]}
    return {name: {key: value for key, value in sizes.items() if key != "vocab_size"} for name, sizes in found.items()}


def _language_model(size: str, tokens: float, rate: float, **run: Any) -> Preset:
    """PoST's protocol: 524,288 tokens a step, warm-up over 1 % of the steps, then a cosine to 1e-5."""
    batch = 2**19
    steps = math.ceil(tokens / batch)
    return Preset(
        f"PoST's language model of {size.upper()}: {tokens:.0e} tokens, context 2048; evaluated at 1x to 8x",
        _sizes_of(size),
        {
            "task": {"train_length": 2048},
            "training": {
                "steps": steps,
                "batch_tokens": batch,
                "schedule": "cosine",
                "warmup": round(steps / 100),
                "floor": 1e-5,
                "dtype": "bfloat16",
            },
            "checkpoint_seconds": 600.0,
            **run,
        },
        {"*": (rate,)},
        training={"rwkv7": {"betas": [0.9, 0.99], "eps": 1e-18}},
    )


PRESETS: dict[str, dict[str, Preset]] = {
    "mqar": {
        "smoke": Preset(
            "two CPU cores, minutes: T = 128, tested at 1x to 8x", _SMOKE_MODELS, {}, _MQAR_RATES, _SMOKE_OTHERS
        ),
        "zoology-iclr24-64": _iclr24(64, 4, 512),
        "zoology-iclr24-128": _iclr24(128, 8, 512),
        "zoology-iclr24-256": _iclr24(256, 16, 256),
        "zoology-iclr24-512": _iclr24(512, 64, 128),
        "zoology-based": _BASED,
        "post-64k": _post("64K", 512, 4),
        "post-32k": _post("32K", 512, 8),
        "post-16k": _post("16K", 256, 4),
    },
    "mqar-noisy": {
        "smoke": Preset(
            "two CPU cores, minutes: T = 128, tested at 1x to 4x",
            _SMOKE_MODELS,
            # A question in 16 tokens teaches slowly, so the vocabulary is smaller than MQAR's and a step larger: with
            # 272 tokens mamba2 and attention were twice as far below the best possible at 1x, with 4,096 a step more.
            {
                "task": {"vocab_size": 96},
                "training": {"steps": 800, "batch_tokens": 8192},
                "evaluation": {"samples": 300, "persist_kv": 4},
            },
            _NOISY_RATES,
            _SMOKE_OTHERS,
        ),
    },
    "lambada": {
        "smoke": Preset(
            "two CPU cores, minutes: stories of T = 128, tested at 1x to 8x",
            _SMOKE_MODELS,
            {"evaluation": {"samples": 200}},
            # With 1e-2 one of two seeds of mamba2 learned half as fast. The others' weren't varied: rwkv7,
            # gated_deltanet, gla and retnet learn to the end; attention hadn't left the first stage after 1,150 steps.
            _MQAR_RATES,
            _SMOKE_OTHERS,
        ),
    },
    "niah": {
        "smoke": Preset(
            "two CPU cores, minutes: T = 128, tested at 1x to 8x",
            _SMOKE_MODELS,
            {"training": {"steps": 800}},
            _NIAH_RATES,
            _SMOKE_OTHERS,
        ),
    },
    "niah-text": {  # for evaluation only
        "ruler-niah": Preset(
            "RULER's NIAH: 500 samples, its fit; its variants without essays, whose text no code can check",
            {},
            {
                "task": {"fit": "ruler"},
                "evaluation": {"samples": 500, "variants": ["single_1", "multikey_2", "multikey_3"]},
            },
        ),
    },
    "text": {
        "micro": Preset(
            "a CPU, about an hour: 2M parameters, T = 1024, evaluated at 1x to 8x",
            _sizes_of("micro"),
            {
                "task": {"train_length": 1024},
                "training": {"steps": 2400, "batch_tokens": 4096, "schedule": "cosine", "warmup": 100, "floor": 1e-4},
                "evaluation": {"samples": 16},
                "micro_batch_tokens": 4096,
            },
            {"*": (3e-3,)},
        ),
        "180m": _language_model("180m", 4e9, 6e-4, micro_batch_tokens=2**14),
        "440m": _language_model("440m", 9e9, 3e-4, micro_batch_tokens=2**13),
        "1.5b": _language_model("1.5b", 3e10, 2e-4, micro_batch_tokens=2**13, recompute=True, parallel="fsdp"),
    },
}


def get_preset(task: str, name: str) -> Preset:
    """A task's preset. Raises UserError with the nearest name."""
    if name not in PRESETS[task]:
        raise unknown(f"preset for {task}", name, PRESETS[task])
    return PRESETS[task][name]


def preset_layer(task: str, name: str, model: str) -> dict[str, Any]:
    """A preset's settings for a model, as a layer for `make_config`. Raises UserError."""
    preset = get_preset(task, name)
    get_architecture(model)
    sizes = preset.models.get(model, preset.others)
    if sizes is None:
        known = ", ".join(sorted(preset.models))
        raise UserError(f"preset {name} of {task} has no sizes for model {model!r}; it has them for: {known}")
    rate = preset.learning_rate(model)
    training = {**preset.run.get("training", {}), **preset.training.get(model, {})}
    return {
        **preset.run,
        "task": {"name": task, **preset.run.get("task", {})},
        "model": {"name": model, **sizes},
        "training": training if rate is None else {**training, "learning_rate": rate},
    }


def evaluates_only(task: str) -> bool:
    """Whether nothing is trained on a task: its presets say what is asked of a checkpoint."""
    return not any(preset.trains for preset in PRESETS[task].values())


def default_preset(task: str) -> str:
    """The one for a machine without a GPU, the first of them."""
    return next(iter(PRESETS[task]))


def configure(
    task: str,
    *,
    preset: str | None = None,
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    settings: Iterable[str] = (),
    seeds: Sequence[int] | None = None,
    without_data: bool = False,
) -> list[RunConfig]:
    """The runs that a command line asks for, one a seed: preset < file < flags < settings.

    flags: settings by dotted key, None where a flag wasn't given; settings: `key=value` texts. without_data: a run of
    task text may name none, and then has the vocabulary of PoST's language models; it can be looked at, not done.
    Raises UserError with one line on the first thing that is wrong.
    """
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    with contextlib.suppress(KeyError, ValueError):  # written out, --set task.mix.variants adds to it
        given["task.mix"] = mix_of(given["task.mix"])
    _check_own(task, given)
    settings = list(settings)
    if seeds is not None and len(set(seeds)) < len(seeds):
        raise UserError("--seeds: a seed stands there twice")
    layers: list[Mapping[str, Any]] = [] if file is None else [read_yaml(file)]
    layers += [nested(key.split("."), value) for key, value in given.items()]
    layers.append(apply_settings({}, settings))
    if seeds is not None and _said(layers, "seed") is not None:
        raise UserError("--seed and --seeds exclude each other; so do a seed in the file or by --set and --seeds")
    named = _said(layers, "task", "name")
    if named not in (None, task):
        raise UserError(
            f"task.name={named!r} is another task than this command's: use `bench {get_task(str(named)).command}`"
        )
    checkpoint = _said(layers, "checkpoint")
    if checkpoint is not None:
        in_file = [] if file is None else [key for key in layers[0] if key != "task"]
        keys = [*given, *(setting.partition("=")[0].strip() for setting in settings), *in_file]
        _check_nothing_trained(keys, None if evaluates_only(task) else preset, seeds)
        base = _checkpoint_layer(task, Path(str(checkpoint)))
        if preset is not None:
            merge(base, {**get_preset(task, preset).run})
    elif evaluates_only(task):
        raise UserError(
            f"`bench {get_task(task).command}` trains nothing: name a model by --checkpoint, a run of `bench pretrain` "
            "for example"
        )
    elif file is None or preset is not None:
        base = preset_layer(task, preset or default_preset(task), str(_said(layers, "model", "name") or "mamba2"))
    else:
        base = {}
    if without_data and task == "text" and _said(layers, "task", "data") is None:
        base = merge({"task": {"vocab_size": models.POST_VOCABULARY}}, base)
    several: Sequence[int | None] = [None] if seeds is None else seeds
    configs = [
        make_config({"task": {"name": task}}, base, *layers, *([] if seed is None else [{"seed": seed}]))
        for seed in several
    ]
    for name, reason in configs[0].evaluation.ignored.items():
        if f"evaluation.{name}" in given:
            raise UserError(f"evaluation.{name} would be ignored: {reason}")
    return configs


def learning_rates(
    task: str,
    model: str,
    *,
    preset: str | None = None,
    file: Path | None = None,
    settings: Iterable[str] = (),
    named: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """The grid of a selection: those named, else the preset's for this architecture; the rest as for `configure`.

    Raises UserError where one rate is set beside it, or there is no grid.
    """
    said = apply_settings({} if file is None else read_yaml(file), settings)
    if _said([said], "training", "learning_rate") is not None:
        raise UserError(
            "--select chooses training.learning_rate, which is set: leave it out, and name the grid by --learning-rates"
        )
    if named is not None:
        return tuple(named)
    if file is not None and preset is None:
        raise UserError("--select: a file has no grid of learning rates; name them by --learning-rates 1e-3,3e-3")
    return get_preset(task, preset or default_preset(task)).grid(model)


# What else is of no use where nothing is trained.
_OF_TRAINING = (
    *("task.train_length", "task.stages", "task.mix"),
    *("keep", "micro_batch_tokens", "recompute", "parallel", "tensorboard"),
)


def _check_own(task: str, given: Mapping[str, Any]) -> None:
    """Refuse a flag that only another task of the same command takes."""
    own = get_task(task)
    for key in given:
        part, _, name = key.partition(".")
        if part == "task" and name not in own.config.model_fields:
            for other in TASKS.values():
                if name in other.config.model_fields and other.command.split()[0] == own.command.split()[0]:
                    raise UserError(f"{key}={given[key]} is for `bench {other.command}`")


def _said(layers: Sequence[Mapping[str, Any]], *path: str) -> Any:
    """What the last layer that says something about a key says; None: none does."""
    for layer in reversed(layers):
        value: Any = layer
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


def _check_nothing_trained(keys: Iterable[str], preset: str | None, seeds: Sequence[int] | None) -> None:
    """With a checkpoint nothing is trained, and what would be ignored is refused."""
    flags = {
        "model.name": "--model",
        **{f"model.{name}": f"--{name}" for name in ADDONS},
        "seed": "--seed",
        "task.train_length": "--train-length",
        "training.label_noise": "--label-noise",
        "task.mix": "--mix",
    }
    unused = [
        flags.get(key, key)
        for key in keys
        if (key.partition(".")[0] in ("model", "training", "seed") and key != "training.dtype") or key in _OF_TRAINING
    ]
    unused += ["--preset"] * (preset is not None) + ["--seeds"] * (seeds is not None)
    if unused:
        raise UserError(f"--checkpoint brings its own model, training and seed: leave out {unused[0]}")


def _checkpoint_layer(task: str, path: Path) -> dict[str, Any]:
    """The task's rules and the dtype of the run that a checkpoint belongs to, so that it answers the same."""
    config = run_config_of(find_checkpoint(path))
    if config is None:
        return {}
    if config.task.name != task:
        theirs, ours = (get_task(name).command for name in (config.task.name, task))
        if theirs.split()[0] == ours.split()[0]:  # one command with and without a flag: a slip, not a transfer
            raise UserError(f"checkpoint {path} is of task {config.task.name}, not {task}: use `bench {theirs}`")
        return {}
    return {"task": config.task.said(), "training": {"dtype": config.training.dtype}}


def run_config_of(checkpoint: Checkpoint) -> RunConfig | None:
    """The configuration of the run that a checkpoint lies in; None where it lies elsewhere."""
    run = RunFolder(checkpoint.folder.parent.parent)
    inside = checkpoint.folder.parent == run.checkpoint and run.config_path.exists()
    return read_run_config(run) if inside else None
