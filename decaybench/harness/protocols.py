"""Is a finished run a published protocol's, in every item? Decided from its record, so that others can decide it too.

A protocol that trains binds all that a run's configuration says of task, model and training to what its preset says,
and frees a few items: the seed, a learning rate of the protocol's grid, the sizes that it varies itself, add-ons (they
are what is measured, and `model.cell` names them), and what changes speed alone. Beside the configuration it binds
what was done: which parameters take weight decay and learn at which rate, the dtype, the cells with their number of
samples, and that learning rate and epoch were selected from the whole grid, on samples that are neither the test's nor
trained on. An item that a later version adds is bound too, to its default, without a word here.

Sources: Zoology (arXiv 2312.04927, figure 2), Based (arXiv 2402.18668, figure 2) and PoST (arXiv 2604.07658), each with
its published code; RULER (arXiv 2404.06654). docs/protocols.md says what `comparable` leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import isclose
from pathlib import Path
from typing import Any

from decaybench.core.config import flat, merge, parse
from decaybench.core.errors import UserError
from decaybench.core.names import unknown
from decaybench.harness.config import RunConfig, TrainingConfig, evaluation_cells
from decaybench.harness.plans import make_plan
from decaybench.harness.presets import get_preset, preset_layer
from decaybench.models.addons import ADDONS
from decaybench.models.config import ModelConfig
from decaybench.models.language_model import LanguageModel, build_model
from decaybench.models.module import Treatment, treatments
from decaybench.results.record import Record, SelectionInfo, TrainingInfo, read_record, seal
from decaybench.results.run_folder import find_evaluations
from decaybench.tasks.registry import make_task
from decaybench.text.needles import VARIANTS

Groups = Callable[[LanguageModel], dict[str, Treatment]]

# What no result depends on where a protocol's plan, schedule and batch are these: they are said and do nothing.
_IDLE = frozenset({"training.mastery", "training.review", "training.hold"})
_SPEED = frozenset({"model.mixer.chunk_size"})
_SHOWN = 3  # departures in a remark; `bench protocol` prints all


@dataclass(frozen=True)
class Protocol:
    """A published protocol. Its preset, of the same name, holds the items.

    models: the architectures it is decided for; others: for an architecture of the preset, why it isn't. choices: by
    key, what the protocol itself varies. groups: how each parameter is to be trained.
    """

    name: str
    task: str
    source: str
    models: tuple[str, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    groups: Groups | None = None


def comparable_to(record: Record) -> str | None:
    """The protocol of which every item holds for the run that a record is of; None: of no protocol."""
    for protocol in PROTOCOLS.values():
        if protocol.task == record.task.name and next(_departures(record, protocol), None) is None:
            return protocol.name
    return None


def departures(record: Record, name: str) -> list[str]:
    """Where the run that a record is of departs from a protocol, an item each; none: it is comparable.

    Raises UserError with the nearest name where there is no such protocol.
    """
    return list(_departures(record, get_protocol(name)))


def remark(record: Record, name: str) -> str:
    """Whether a record is comparable to a protocol, in a line that names the first items that it departs in."""
    found = departures(record, name)
    if not found:
        return f"comparable to {name}: every item of the protocol holds"
    more = f"; and {len(found) - _SHOWN} more (`bench protocol {name} RUN`)" if len(found) > _SHOWN else ""
    return f"not comparable to {name}: {'; '.join(found[:_SHOWN])}{more}"


def get_protocol(name: str) -> Protocol:
    """The protocol of this name. Raises UserError with the nearest name."""
    if name not in PROTOCOLS:
        raise unknown("protocol", name, PROTOCOLS)
    return PROTOCOLS[name]


def items(name: str, model: str) -> dict[str, str]:
    """What a protocol demands of a run with this architecture, by item. Raises UserError on unknown names."""
    protocol = get_protocol(name)
    if not protocol.models:
        return dict(_RULER_ITEMS)
    if model not in protocol.models:
        raise unknown(f"model of protocol {name}", model, protocol.models)
    config = _wanted(name, model)
    bound = {key: value for key, value in _bound(config).items() if not _free(key, protocol, model)}
    cells = evaluation_cells(make_task(config.task), config.evaluation, config.task.train_length)
    return {
        **{key: _said(value) for key, value in bound.items() if value is not False},
        **{key: _one_of(values) for key, values in _choices(protocol, model).items()},
        "training groups": _GROUPS_SAID[protocol.groups] if protocol.groups else "",
        "evaluation": f"{config.evaluation.samples:,} samples in each of {', '.join(cell.name for cell in cells)}",
        "selection": "learning rate and epoch from the whole grid, on a validation set (docs/protocols.md)",
    }


def listed(name: str | None = None, model: str | None = None) -> dict[str, list[dict[str, str]]]:
    """Each protocol; or with a name what it demands, of its first architecture where none is said."""
    if name is None:
        return {
            "protocols": [
                {
                    "name": known.name,
                    "task": known.task,
                    "source": known.source,
                    "models": ", ".join(known.models) or "any, by --checkpoint",
                }
                for known in PROTOCOLS.values()
            ]
        }
    models = get_protocol(name).models
    asked = model or next(iter(models), "")
    title = f"{name}, {asked}" if asked else name
    return {title: [{"item": item, "demanded": demanded} for item, demanded in items(name, asked).items()]}


def departures_of(runs: Sequence[Path], name: str) -> dict[str, list[str]]:
    """`departures` of every finished evaluation of runs, by the path of its record. Raises UserError."""
    found = [folder.record_path for run in runs for folder in find_evaluations(run)]
    return {str(path): departures(read_record(path), name) for path in found}


def decided(content: Mapping[str, Any]) -> Record:
    """`seal` of a record's content with `comparable_to` decided by what else it says."""
    record = seal({**content, "comparable_to": None})
    name = comparable_to(record)
    return record if name is None else seal({**content, "comparable_to": name})


def _departures(record: Record, protocol: Protocol) -> Iterator[str]:
    if record.task.name != protocol.task:
        yield f"task is {record.task.name}; {protocol.name} is of {protocol.task}"
    elif not protocol.models:
        yield from _ruler_departures(record)
    else:
        yield from _training_departures(record, protocol)


def _training_departures(record: Record, protocol: Protocol) -> Iterator[str]:
    name, model, training = protocol.name, record.model.architecture, record.training
    if model not in protocol.models:
        why = protocol.others.get(model, f"{name} is decided for {', '.join(protocol.models)}")
        yield f"model is {model}: {why}"
        return
    if training is None:
        yield f"the model is a given checkpoint; {name} says how it is trained"
        return
    wanted, choices = _wanted(name, model), _choices(protocol, model)
    found = {
        **_under("task", record.task.config),
        **_under("model", record.model.config),
        **_under("training", training.config),
    }
    bound = {key: value for key, value in _bound(wanted).items() if not _free(key, protocol, model)}
    others = [key for key in found if key not in bound and not _free(key, protocol, model)]
    odd = {key: _said(bound.get(key)) for key in [*bound, *others] if not _equal(found.get(key), bound.get(key))}
    for key, values in choices.items():
        if not any(_equal(found.get(key), value) for value in values):
            odd[key] = _one_of(values)
    for key, demanded in odd.items():
        yield f"{key}={_said(found.get(key))}; {name} has {demanded}"
    for addon in ADDONS:
        horizon = found.get(f"model.{addon}.horizon")
        if horizon not in (None, wanted.task.train_length):
            yield f"model.{addon}.horizon={horizon}; the training length is {wanted.task.train_length}"
    if not any(key.startswith("model.") for key in odd):  # of another model they say nothing, and it may be any size
        yield from _group_departures(record, training, protocol)
    if record.environment.dtype != wanted.training.dtype:
        yield f"evaluated in {record.environment.dtype}; {name} has {wanted.training.dtype}"
    yield from _cell_departures(record, wanted, name)
    yield from _selection_departures(record, training, wanted, choices["training.learning_rate"], name)


def _group_departures(record: Record, training: TrainingInfo, protocol: Protocol) -> Iterator[str]:
    """Of the parameters that the model has without BFT, whose own aren't the protocol's to train."""
    try:
        model = build_model(parse(ModelConfig, {**record.model.config, "bft": None}, "model"), device="meta")
        given = parse(TrainingConfig, training.config, "training")
    except UserError as error:  # made up: what it departs in is said above
        yield f"training groups can't be told: {error}"
        return
    found = treatments(model, given.decayed)
    wanted = protocol.groups(model) if protocol.groups else found
    odd = [parameter for parameter, treatment in found.items() if treatment != wanted[parameter]]
    if odd:
        ours, theirs = found[odd[0]], wanted[odd[0]]
        others = f", and {len(odd) - 1} more like it" if len(odd) > 1 else ""
        yield f"training groups: {odd[0]} {_trained(ours)}; {protocol.name} has it {_trained(theirs)}{others}"


def _cell_departures(record: Record, wanted: RunConfig, name: str) -> Iterator[str]:
    cells = evaluation_cells(make_task(wanted.task), wanted.evaluation, wanted.task.train_length)
    asked = {cell.name for cell in cells}
    found = {cell.name: cell.n for cell in record.cells}
    if missing := [cell.name for cell in cells if cell.name not in found]:
        yield f"evaluation: {missing[0]} isn't asked, of {len(missing)} cells that {name} has"
    if added := [cell for cell in found if cell not in asked]:
        yield f"evaluation: {added[0]} is asked, of {len(added)} cells that {name} doesn't have"
    sizes = {n for cell, n in found.items() if cell in asked}
    if sizes - {wanted.evaluation.samples}:
        yield f"evaluation.samples={min(sizes)}; {name} has {wanted.evaluation.samples:,}"


def _selection_departures(
    record: Record, training: TrainingInfo, wanted: RunConfig, grid: Sequence[float], name: str
) -> Iterator[str]:
    plan = make_plan(make_task(wanted.task).stages(), wanted.training, record.seed)
    total, chosen = plan.total_steps, record.selection
    steps = training.config.get("steps")
    if steps is not None and not (isinstance(steps, int) and steps >= total):
        yield f"training.steps={_said(steps)}; {name} has {total:,}, {wanted.training.epochs} epochs"
    if chosen is None:
        rates = ", ".join(f"{rate:.3g}" for rate in grid)
        yield f"its learning rate and epoch weren't selected on a validation set; {name} has the grid {rates}"
        return
    yield from _grid_departures(chosen, grid, total, name)
    if not isclose(chosen.chosen.learning_rate, training.learning_rate) or chosen.chosen.step != training.steps:
        yield (
            f"selection chose learning rate {chosen.chosen.learning_rate:.3g} at step {chosen.chosen.step:,}; the "
            f"training has {training.learning_rate:.3g} and {training.steps:,}"
        )


def _grid_departures(chosen: SelectionInfo, grid: Sequence[float], total: int, name: str) -> Iterator[str]:
    tried = chosen.learning_rates
    for rate in grid:
        if not any(isclose(rate, other) for other in tried):
            yield f"selection left out learning rate {rate:.3g} of {name}'s grid"
    for other in tried:
        if not any(isclose(rate, other) for rate in grid):
            yield f"selection tried learning rate {other:.3g}, which {name}'s grid doesn't have"
    if not chosen.each_epoch:
        yield f"selection's candidates are every {chosen.every:,} steps; {name} has the end of each epoch"
    if chosen.total_steps != total:
        yield f"selection trained {chosen.total_steps:,} steps; {name} has {total:,}"


# --- RULER's NIAH: an evaluation alone

_RULER_SAMPLES = 500
_RULER_ITEMS = {
    "task.fit": "ruler",
    "evaluation.depths": "none: RULER's own draw",
    "evaluation.samples": f"{_RULER_SAMPLES}",
    "evaluation.variants": "any of "
    + ", ".join(name for name, form in VARIANTS.items() if form.haystack != "essay")
    + ": those without an essay",
    "answer": "128 new tokens, greedily, counted inside the length; the answer's prefix is given; string_match_all",
    "model, lengths, tokenizer, task.start": "any",
}


def _ruler_departures(record: Record) -> Iterator[str]:
    fit = record.task.config.get("fit")
    if fit != "ruler":
        yield f"task.fit={_said(fit)}; ruler-niah has ruler"
    if any("depth" in cell.coordinates for cell in record.cells):
        yield "evaluation.depths is a grid; ruler-niah has RULER's own draw"
    samples = {cell.n for cell in record.cells} - {_RULER_SAMPLES}
    if samples:
        yield f"evaluation.samples={min(samples)}; ruler-niah has {_RULER_SAMPLES}"
    if essays := sorted({c.variant for c in record.cells if c.variant in VARIANTS and _has_essay(c.variant)}):
        yield (
            f"{', '.join(essays)}: hidden in an essay, and RULER's is what its script finds on the net that day, so "
            "nothing can check that this is it"
        )


def _has_essay(variant: str) -> bool:
    return VARIANTS[variant].haystack == "essay"


# --- what a protocol binds


@lru_cache(maxsize=64)
def _wanted(name: str, model: str) -> RunConfig:
    """A run of the preset of this name, as the protocol has it."""
    protocol = PROTOCOLS[name]
    return parse(RunConfig, merge({}, preset_layer(protocol.task, name, model)))


def _bound(config: RunConfig) -> dict[str, Any]:
    """All that a configuration says of task, model and training, by dotted key; None is absent."""
    return {
        **_under("task", config.task.for_record()),
        **_under("model", config.model.plain()),
        **_under("training", config.training.plain()),
    }


def _under(part: str, content: Mapping[str, Any]) -> dict[str, Any]:
    return flat({part: {key: value for key, value in content.items() if (part, key) != ("training", "steps")}})


def _free(key: str, protocol: Protocol, model: str) -> bool:
    """Whether an item isn't bound to the preset's value."""
    if key == "training.batch_tokens":
        return _wanted(protocol.name, model).training.batch_samples is not None
    of_addon = any(key.startswith(f"model.{addon}.") for addon in ADDONS)  # options; there is no model.post alone
    return of_addon or key in _IDLE or key in _SPEED or key in _choices(protocol, model)


def _choices(protocol: Protocol, model: str) -> dict[str, tuple[float, ...]]:
    return {**protocol.choices, "training.learning_rate": get_preset(protocol.task, protocol.name).grid(model)}


def _all_decay(model: LanguageModel) -> dict[str, Treatment]:
    """torch's AdamW over model.parameters()."""
    return {name: Treatment(True, 1.0) for name, weight in model.named_parameters() if weight.requires_grad}


def _weights_decay(model: LanguageModel) -> dict[str, Treatment]:
    """PoST's groups: weights of two or more dimensions decay, and RWKV-7's ordered spectrum learns at twice the rate.

    Its baseline's w0 learns at the common rate.
    """
    fast = model.config.name == "rwkv7" and model.config.post is not None and model.config.post.reparameterize
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            weight = parameter.ndim >= 2 and name.rpartition(".")[2] in ("weight", "down", "up")
            found[name] = Treatment(weight, 2.0 if fast and ".spectrum." in name else 1.0)
    return found


_GROUPS_SAID: dict[Groups | None, str] = {
    _all_decay: "every parameter takes weight decay and learns at the same rate",
    _weights_decay: "weights of two or more dimensions take weight decay, nothing else; all learn at the same rate, "
    "but RWKV-7's spectrum with PoST at twice it",
}

_TURNED = "it turns queries and keys by their positions here, and the protocol's attention has {what}"


def _zoology(name: str, attention: str, choices: Mapping[str, tuple[int, ...]], source: str) -> Protocol:
    others = {"attention": _TURNED.format(what=attention)}
    return Protocol(name, "mqar", source, ("mamba2",), others, choices, _all_decay)


def _post(state: str) -> Protocol:
    models = ("mamba2", "rwkv7", "gated_deltanet", "gla", "retnet")
    return Protocol(f"post-{state}", "mqar", "PoST, arXiv 2604.07658", models, groups=_weights_decay)


_ALL = (
    *(
        _zoology(
            f"zoology-iclr24-{length}",
            "learned ones, added to the embedding, and dropout",
            {"model.d_model": (64, 128, 256, 512)},
            "Zoology, arXiv 2312.04927, figure 2",
        )
        for length in (64, 128, 256, 512)
    ),
    _zoology(
        "zoology-based",
        "none, but a gated convolution before it",
        {"model.d_model": (64, 128, 256), "model.mixer.d_state": (8, 16, 24)},
        "Based, arXiv 2402.18668, figure 2",
    ),
    *(_post(state) for state in ("64k", "32k", "16k")),
    Protocol("ruler-niah", "niah-text", "RULER, arXiv 2404.06654"),
)

PROTOCOLS = {protocol.name: protocol for protocol in _ALL}


# --- in words


def _equal(found: Any, wanted: Any) -> bool:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (found, wanted))
    return isclose(found, wanted, rel_tol=1e-9) if numbers else found == wanted


def _said(value: Any) -> str:
    if isinstance(value, list | tuple) and value and all(isinstance(part, Mapping) for part in value):
        return f"({'; '.join(_stage(stage) for stage in value)})"
    if isinstance(value, list | tuple):
        return f"({', '.join(_said(part) for part in value)})"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _stage(stage: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_said(value)}" for key, value in flat(stage).items()).replace("shape.", "")


def _one_of(values: Sequence[float]) -> str:
    return f"one of {', '.join(_said(value) for value in values)}"


def _trained(treatment: Treatment) -> str:
    decay = "with" if treatment.decays else "without"
    rate = "the learning rate" if treatment.factor == 1 else f"{treatment.factor:g} times the learning rate"
    return f"{decay} weight decay at {rate}"
