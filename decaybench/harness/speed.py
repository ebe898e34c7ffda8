"""`bench speed`: how fast a model trains, reads and decodes on this machine, what its add-ons cost, and its peers.

All cells of an architecture, and the same model in other packages, are measured in one process and in turn
(`harness.stopwatch`), so that ratios hold on a busy machine too. Training is one step: forward, loss at the labels,
backward and AdamW, as `harness.training` has them. FLOPs are those of matrix products and convolutions as they run.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from decaybench.core.config import Config, apply_settings, merge, parse
from decaybench.core.errors import RunError, UserError
from decaybench.core.names import unknown
from decaybench.harness import peers as packages
from decaybench.harness.addons import ADDONS, alone_and_together, complete
from decaybench.harness.environment import environment, resolve_device
from decaybench.harness.model_info import parameter_counts, state_elements
from decaybench.harness.progress import Progress
from decaybench.harness.speed_report import (
    CellSpeed,
    DecodeAfter,
    LongPrefill,
    LongSpeed,
    PeerSpeed,
    Ratio,
    SpeedReport,
    What,
    Work,
)
from decaybench.harness.stopwatch import (
    LEAST_PAIRS,
    Action,
    duration,
    in_turn,
    matmul_peak,
    matrix_flops,
    peak_growth,
    ratio,
)
from decaybench.harness.training import loss_and_hits, parameter_groups
from decaybench.models.config import PRESETS, ModelConfig, preset
from decaybench.models.language_model import LanguageModel, build_model
from decaybench.models.registry import Architecture, architectures, get_architecture
from decaybench.tasks.base import IGNORED

_WHATS: tuple[What, ...] = ("train", "prefill", "decode", "decode_batch")
_LONG_PREFILLS = (100_000, 1_000_000)
_LONG_DECODES = (1_000, 100_000)
_PEAKS = 5  # measurements of a peak of memory
_WARM = 8192  # tokens read before memory is measured: two pieces of a prefill
_AGREE = 1e-3  # of the largest number; rounding in float32 is a hundred times smaller


class SpeedShape(Config):
    """The sizes at which models are measured."""

    batch: int = Field(default=64, ge=1, description="rows of a batch")
    length: int = Field(default=128, ge=2, description="tokens a row; PoST's horizon too")
    vocab_size: int = Field(default=512, ge=2, description="tokens in the vocabulary")
    d_model: int = Field(default=64, ge=1, description="width of the residual stream")
    n_layers: int = Field(default=2, ge=1, description="blocks")
    label_every: int = Field(default=8, ge=1, description="one token in so many is a label, as in MQAR's capacity")
    mixer: dict[str, Any] = Field(
        default_factory=dict, description="sizes over those of preset smoke, for each architecture that has them"
    )
    op: packages.OpShape = Field(default_factory=packages.OpShape, description="inputs of the comparison of ops")


SHAPES = {
    "smoke": SpeedShape(),
    "wide": SpeedShape(batch=32, length=256, vocab_size=8192, d_model=128, mixer={"d_state": 64, "headdim": 32}),
}


def measure_speed(
    model: str = "mamba2",
    addons: Collection[str] = (),
    *,
    shape: str = "smoke",
    settings: Iterable[str] = (),
    peers: bool = True,
    long: bool = False,
    repeats: int = 12,
    device: str = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
) -> SpeedReport:
    """Measure an architecture, several (`mamba2,gla`), or all of them with every add-on.

    addons: by name, every variant of each alone and all together. settings: `key=value` texts for SpeedShape. repeats:
    measurements of each, at least 6. long: prefill of 100,000 and 1,000,000 tokens, and decoding after 1,000 and
    100,000. threads: of the CPU, None for PyTorch's choice. Raises UserError on what can't be measured, and RunError
    where a peer's numbers aren't ours.
    """
    if repeats < LEAST_PAIRS:
        raise UserError(f"--repeats {repeats}: the interval of a median takes at least {LEAST_PAIRS}")
    if threads is not None and threads < 1:
        raise UserError(f"--threads {threads}: it takes at least one")
    sizes, where = make_shape(shape, settings), resolve_device(device)
    families = speed_configs(model, sizes, addons)
    with _threads(threads):
        peak = matmul_peak(where)
        bench = _Bench(sizes, repeats, where, progress or Progress(quiet=True))
        cells: list[CellSpeed] = []
        beside: list[PeerSpeed] = []
        far: list[LongSpeed] = []
        for configs in families:
            models = [build_model(config, device=where) for config in configs]
            found, compared = bench.family(models, packages.model_peers(models[0], sizes.length) if peers else {})
            cells += found
            beside += compared
            beside += bench.op(configs[0].name) if peers else []
            far += [bench.long(model) for model in models if is_recurrent(model)] if long else []
        return SpeedReport(
            environment=environment(where, "float32", sizes.batch * sizes.length),
            wait_policy=os.environ.get("OMP_WAIT_POLICY"),
            shape=sizes.plain(),
            repeats=repeats,
            matmul_flops_per_second=max(peak, matmul_peak(where)),
            cells=tuple(cells),
            peers=tuple(beside),
            missing_peers=tuple(packages.missing()) if peers else (),
            long=tuple(far),
        )


def make_shape(name: str, settings: Iterable[str] = ()) -> SpeedShape:
    """A named shape with `key=value` settings put over it. Raises UserError."""
    if name not in SHAPES:
        raise unknown("shape", name, SHAPES)
    return parse(SpeedShape, apply_settings(SHAPES[name].plain(), settings))


def speed_configs(model: str, shape: SpeedShape, addons: Collection[str] = ()) -> list[list[ModelConfig]]:
    """For each architecture wanted its base, then with those of the add-ons that it takes; of `all` with every one
    where none is named. Raises UserError, also on an add-on that none of those named takes.
    """
    everything = model == "all"
    names = list(architectures()) if everything else [name.strip() for name in model.split(",")]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--model: {twice[0]} stands there twice")
    wanted = [get_architecture(name) for name in names]
    known = {key for architecture in wanted for key in architecture.config_class().model_fields}
    of_shapes = [named.mixer.items() for named in SHAPES.values()]
    if (
        strange := {key for key, size in shape.mixer.items() if not any((key, size) in sizes for sizes in of_shapes)}
        - known
    ):
        raise unknown("size of a mixer", min(strange), known)
    asked = set(ADDONS) if everything and not addons else set(addons)
    if refused := [name for name in ADDONS if name in asked and all(name not in known.addons for known in wanted)]:
        raise UserError(ADDONS[refused[0]].refusal.format(name=wanted[0].name))
    families = [_family(architecture, shape, asked & set(architecture.addons)) for architecture in wanted]
    for config in chain.from_iterable(families):
        build_model(config, device="meta")  # sizes that don't fit one another show here, before an hour of measuring
    return families


def without_addons(config: ModelConfig) -> ModelConfig | None:
    """What the cost of a model's add-ons is a ratio to: the model without them, but with its gate. None: it has none.

    PoST's variant paper gives GLA and RetNet another gate, which isn't part of PoST (RetNet's costs a quarter of a
    step): with this gate alone they are a cell of their own, whose cost is a ratio to the plain architecture.
    """
    plain = config.model_copy(update=dict.fromkeys(ADDONS))
    if config == plain:
        return None
    if not (config.post and config.post.replaces_gate and "softplus" in get_architecture(config.name).gates):
        return plain
    off = {"reparameterize": False, "position_scaling": False}
    gate_alone = plain.model_copy(update={"post": config.post.model_copy(update=off)})
    return plain if config == gate_alone else gate_alone


def is_recurrent(model: LanguageModel) -> bool:
    """Whether what it remembers has one size, however much it has read."""
    return state_elements(model, 16) == state_elements(model, 32)


@dataclass(frozen=True)
class _Bench:
    """What all measurements of a report share."""

    shape: SpeedShape
    repeats: int
    device: str
    progress: Progress

    def family(
        self, models: list[LanguageModel], peers: Mapping[str, packages.TransformersMamba2]
    ) -> tuple[list[CellSpeed], list[PeerSpeed]]:
        """An architecture's base and add-ons, in turn, and the base in other packages."""
        base, batch = models[0], self._batch()
        ours = {model.config.cell: self._actions(model, batch) for model in models}
        theirs, differences = self._chosen(base, peers, batch)
        works: dict[str, list[Work]] = {cell: [] for cell in ours}
        beside = []
        for what in _WHATS:
            self.progress.say(f"{base.config.name}: {what}")
            rivals: dict[str, Action] = {name: actions[what] for name, actions in theirs.items() if what in actions}
            seconds = self._in_turn({cell: actions[what] for cell, actions in ours.items()} | rivals)
            first = seconds[base.config.cell]
            peaks = self._peaks({cell: actions[what] for cell, actions in ours.items()})
            for model in models:
                cell, without = model.config.cell, without_addons(model.config)
                beside_cell = None if without is None else without.cell
                works[cell].append(self._work(what, ours[cell][what], cell, beside_cell, seconds, peaks))
            beside += [_peer(base.config.name, name, what, first, seconds[name], differences[name]) for name in rivals]
        found = [
            CellSpeed(
                cell=model.config.cell,
                base=None if (without := without_addons(model.config)) is None else without.cell,
                config=model.config.plain(),
                parameters=parameter_counts(model),
                state_elements=state_elements(model, self.shape.length),
                work=tuple(works[model.config.cell]),
            )
            for model in models
        ]
        return found, beside

    def op(self, architecture: str) -> list[PeerSpeed]:
        """An architecture's op, forward and backward, and other packages' forms of it."""
        found = packages.op_peers(architecture, self.shape.op, self.device)
        if found is None:
            return []
        self.progress.say(f"{architecture}: {found.name}, forward and backward")
        want = found.ours(found.inputs)
        differences = {name: _difference(form(found.inputs), want) for name, form in found.peers.items()}
        _must_agree(differences)
        forms = {"": found.ours, **found.peers}
        seconds = self._in_turn({name: _forward_backward(form, found.inputs) for name, form in forms.items()})
        return [
            _peer(architecture, name, "op", seconds[""], seconds[name], differences[name], op=found.name)
            for name in found.peers
        ]

    def long(self, model: LanguageModel) -> LongSpeed:
        """Very long inputs, and decoding after short and long ones."""
        self.progress.say(f"{model.config.cell}: very long inputs")
        _read(model, self._tokens(1, _WARM))()
        prefills = []
        for length in _LONG_PREFILLS:
            timed = _Timed(_read(model, self._tokens(1, length)), self.device)
            peak = peak_growth(timed, self.device)
            prefills.append(LongPrefill(tokens=length, seconds=timed.seconds, peak_bytes=peak))
        steps = {str(length): _step(model, self._tokens(1, length)) for length in _LONG_DECODES}
        seconds = self._in_turn(steps)
        few, many = (seconds[str(length)] for length in _LONG_DECODES)
        return LongSpeed(
            cell=model.config.cell,
            prefill=tuple(prefills),
            decode=tuple(DecodeAfter(tokens=n, seconds=tuple(seconds[str(n)])) for n in _LONG_DECODES),
            decode_ratio=Ratio.of(ratio(many, few)),
        )

    def _in_turn(self, actions: Mapping[str, Action]) -> dict[str, list[float]]:
        return in_turn(actions, self.repeats, self.device)

    def _peaks(self, actions: Mapping[str, Action]) -> dict[str, int | None]:
        """Each action's peak memory, bytes: the median of several, for what an allocator holds varies by a tenth."""
        grown = [{name: peak_growth(action, self.device) for name, action in actions.items()} for _ in range(_PEAKS)]
        peaks: dict[str, int | None] = {}
        for name in actions:
            said = [peak for turn in grown if (peak := turn[name]) is not None]
            peaks[name] = statistics.median_low(said) if said else None
        return peaks

    def _tokens(self, *shape: int) -> Tensor:
        draws = torch.Generator().manual_seed(0)
        return torch.randint(0, self.shape.vocab_size, shape, generator=draws).to(self.device)

    def _batch(self) -> tuple[Tensor, Tensor]:
        tokens = self._tokens(self.shape.batch, self.shape.length)
        labels = torch.full_like(tokens, IGNORED)
        labels[:, :: self.shape.label_every] = tokens[:, :: self.shape.label_every]
        return tokens, labels

    def _actions(self, model: LanguageModel, batch: tuple[Tensor, Tensor]) -> dict[What, Action]:
        tokens, labels = batch
        return {
            "train": _train(model, tokens, labels),
            "prefill": _read(model, tokens),
            "decode": _step(model, tokens[:1]),
            "decode_batch": _step(model, tokens),
        }

    def _chosen(
        self, ours: LanguageModel, peers: Mapping[str, packages.TransformersMamba2], batch: tuple[Tensor, Tensor]
    ) -> tuple[dict[str, dict[What, Action]], dict[str, float]]:
        """Of the packages' variants the default one and the fastest in training, and how far each is from ours."""
        tokens, labels = batch
        asked = labels != IGNORED
        with torch.no_grad():
            want = ours(tokens, logits_at=asked).logits
            differences = {
                name: _difference(peer(tokens, logits_at=asked).logits, want) for name, peer in peers.items()
            }
        _must_agree(differences)
        trained = {name: _train(peer, tokens, labels) for name, peer in peers.items()}
        took = {name: min(duration(action, self.device) for _ in range(2)) for name, action in trained.items()}
        fastest = min(took, key=took.__getitem__, default=None)
        return {
            name: {"train": trained[name], "prefill": _read(peer, tokens)}
            for name, peer in peers.items()
            if peer.is_default or name == fastest
        }, differences

    def _work(
        self,
        what: What,
        action: Action,
        cell: str,
        base: str | None,
        seconds: Mapping[str, list[float]],
        peaks: Mapping[str, int | None],
    ) -> Work:
        tokens = {"decode": 1, "decode_batch": self.shape.batch}.get(what, self.shape.batch * self.shape.length)
        peak, of_base = peaks[cell], peaks.get(base or "")
        return Work(
            what=what,
            tokens=tokens,
            seconds=tuple(seconds[cell]),
            peak_bytes=peak,
            flops=matrix_flops(action),
            overhead=None if base is None else Ratio.of(ratio(seconds[cell], seconds[base])),
            memory_ratio=peak / of_base if peak is not None and of_base else None,
        )


class _Timed:
    """An action that remembers how long it took."""

    def __init__(self, action: Action, device: str) -> None:
        self.action, self.device, self.seconds = action, device, 0.0

    def __call__(self) -> None:
        self.seconds = duration(self.action, self.device)


def _family(architecture: Architecture, shape: SpeedShape, addons: Collection[str]) -> list[ModelConfig]:
    name = architecture.name
    sizes = preset("smoke", name) if name in PRESETS["smoke"] else {"name": name}
    known = architecture.config_class().model_fields
    stream = {"vocab_size": shape.vocab_size, "d_model": shape.d_model, "n_layers": shape.n_layers}
    own = {key: value for key, value in shape.mixer.items() if key in known}
    data = merge(merge({"mixer": {}}, sizes), {**stream, "mixer": own})
    choices = alone_and_together(addons)
    found = [parse(ModelConfig, {**data, **complete(choice, shape.length)}, "model") for choice in choices]
    bases = [without for config in found if (without := without_addons(config)) is not None]
    return found + [config for n, config in enumerate(bases) if config not in [*found, *bases[:n]]]


def _train(model: nn.Module, tokens: Tensor, labels: Tensor) -> Action:
    """One training step; at a rate so small that the weights hardly move however often it runs."""
    groups = parameter_groups(model, 0.1) if isinstance(model, LanguageModel) else model.parameters()
    optimiser = torch.optim.AdamW(groups, lr=1e-8, fused=True)

    def step() -> None:
        loss, _ = loss_and_hits(model, tokens, labels)  # type: ignore[arg-type]
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def _read(model: Any, tokens: Tensor) -> Action:
    return torch.no_grad()(lambda: model.prefill(tokens))


def _step(model: LanguageModel, before: Tensor) -> Action:
    """The next token of each row, after `before` [B, T]."""
    with torch.no_grad():
        state = model.prefill(before).state
    assert state is not None
    return torch.no_grad()(lambda: model.step(before[:, 0], state))


def _forward_backward(form: packages.Op, inputs: packages.Inputs) -> Action:
    leaves = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}

    def run() -> None:
        o = form(leaves)
        torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o), allow_unused=True)

    return run


def _peer(
    architecture: str,
    name: str,
    what: What | Literal["op"],
    ours: list[float],
    theirs: list[float],
    difference: float,
    op: str | None = None,
) -> PeerSpeed:
    return PeerSpeed(
        architecture=architecture,
        peer=name,
        what=what,
        op=op,
        our_seconds=tuple(ours),
        peer_seconds=tuple(theirs),
        times_faster=Ratio.of(ratio(theirs, ours)),
        difference=difference,
    )


def _difference(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def _must_agree(differences: Mapping[str, float]) -> None:
    for name, difference in differences.items():
        if not difference <= _AGREE:
            raise RunError(f"{name} computes something else than we do: {difference:.1e} of the largest number")


@contextmanager
def _threads(wanted: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
