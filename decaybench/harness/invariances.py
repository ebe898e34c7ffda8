"""What must not change a model's output: the invariances that other projects broke.

Each check is named after the numbered bug it guards against and compares two ways to the same logits, gradients or
state. The model is small, and all its parameters are moved away from their initial values, so that no two ways agree
for want of anything to disagree about.

Bounds, in units of the largest number compared. float64: 1e-9, far below what any slip makes and far above its
rounding, which is about 1e-15 here. float32: 1e-4; its rounding is about 1e-6 here. Of a state and of gradients each
tensor is taken in units of its own largest element; a scalar's gradient is a sum over all tokens that may nearly
cancel, so that in float32 it is allowed ten times as much. Where two ways do the very same arithmetic, and where
something is counted, the bound is 0.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from decaybench.core.config import parse
from decaybench.harness.addons import ADDONS, Choice, complete
from decaybench.harness.training import parameter_groups
from decaybench.models.addons.bft import InitialPrecision, KalmanResidual
from decaybench.models.branch import LayerTrace, Mixer
from decaybench.models.checkpoints import read_checkpoint, write_checkpoint
from decaybench.models.config import ModelConfig
from decaybench.models.language_model import LanguageModel, Output, build_model
from decaybench.models.module import initialise
from decaybench.models.registry import get_architecture
from decaybench.models.state import ModelState, tensors

_VOCABULARY = 31
_D_MODEL = 32
_HORIZON = 32
# Sizes by the names that architectures give them; each takes those that it has.
_SMALL = {"d_state": 8, "headdim": 8, "head_dim": 8, "n_heads": 4, "n_groups": 2, "chunk_size": 8}
_ONE_HEAD = {"headdim": 2 * _D_MODEL, "head_dim": _D_MODEL, "n_heads": 1, "n_groups": 1}
_BOUND = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_ULP = 2.0**-24  # of a float32, relative
_STEADY = 2.5e-5  # a quarter of float32's bound
_SEEDS = 10
_SCALAR_SHARE = {torch.float64: 1.0, torch.float32: 0.1}  # how much of a scalar's gradient's difference counts
# Of bfloat16 the error of most tokens is compared, a dozen times its rounding (0.4 %) allowed: the norm of a head whose
# output is nearly zero turns it around under any rounding, so that single tokens may be far off.
_BFLOAT16_BOUND, _MOST_TOKENS = 0.05, 0.9
_CHUNKS = (1, 2, 3, 7, 8, 64)


@dataclass(frozen=True)
class Check:
    """One comparison. pitfall: the bug's number; difference: the largest absolute one; bound: what is allowed."""

    pitfall: int
    name: str
    difference: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the difference is within the bound; NaN is not."""
        return self.difference <= self.bound


def small_config(name: str, addons: Choice | None = None, *, one_head: bool = False) -> ModelConfig:
    """A model of any registered architecture that takes milliseconds. addons: their settings by name; one_head: one
    layer of one head.
    """
    known = get_architecture(name).config_class().model_fields
    sizes = {key: size for key, size in (_SMALL | (_ONE_HEAD if one_head else {})).items() if key in known}
    return parse(
        ModelConfig,
        {
            "name": name,
            "vocab_size": _VOCABULARY,
            "d_model": _D_MODEL,
            "n_layers": 1 if one_head else 2,
            "mixer": sizes,
            "ffn": {"kind": get_architecture(name).ffn, "multiple": 1.0},
            **complete(addons or {}, _HORIZON),
        },
    )


def steady_seed(config: ModelConfig, seed: int, device: str) -> int:
    """A seed whose subject can be tested in float32: `seed`, or one of the next, its gradient moving by less than a
    quarter of the bound when each parameter moves by the rounding of a float32 (computed in float64).

    Now and then a model's values make a gradient the small difference of large ones: a head whose output is nearly zero
    is divided by its norm. There float32 is off by more than the bound whatever is done right, and a check would tell
    nothing of padding or packing. Where none of ten is steady, or a model can't be computed, `seed`.
    """
    for other in range(seed, seed + _SEEDS):
        try:
            steady = _sensitivity(Subject(config, torch.float64, other, device)) < _STEADY
        except (RuntimeError, ValueError, IndexError, TypeError):  # the checks will say so
            return seed
        if steady:
            return other
    return seed


def _sensitivity(s: Subject) -> float:
    """By how much rounding every parameter to a float32 moves the gradient, in units of each one's largest element."""
    documents, draws = s.documents(1, 7, 8, 5, 16, 1, 4, 21), torch.Generator().manual_seed(s.seed)
    before = s.gradients(_loss(s.alone(documents), documents))
    with torch.no_grad():
        for parameter in s.model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=draws).mul(2).sub(1)
            parameter.mul_(1 + _HALF_ULP * signs.to(parameter))
    after = s.gradients(_loss(s.alone(documents), documents))
    return _max(difference / (scale or 1.0) for difference, scale in map(_largest, after, before))


class Subject:
    """A model under test, with the data to test it on."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, seed: int, device: str) -> None:
        self.config, self.dtype, self.seed, self.device = config, dtype, seed, device
        self.draws = torch.Generator().manual_seed(seed)

    @cached_property
    def model(self) -> LanguageModel:
        model = build_model(self.config, self.seed).to(self.dtype)
        draws = torch.Generator().manual_seed(self.seed + 1)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
            # Matrices by their own size, so that activations stay of order one; vectors and scalars by 0.3.
            size = 0.3
            if parameter.ndim > 1:  # one that starts at zero would leave its branch untested
                size = float(parameter.detach().std()) or parameter.shape[-1] ** -0.5
            parameter.data += (size * noise).to(parameter.dtype)
        model.embedding.weight.data += 0.3 * torch.randn(model.embedding.weight.shape, generator=draws)
        return model.to(self.device)

    def copy(self, config: ModelConfig | None = None) -> LanguageModel:
        """A second model with the same values, perhaps of another configuration of the same shapes."""
        model = build_model(config or self.config, self.seed).to(self.dtype)
        model.load_state_dict(self.model.state_dict())
        return model.to(self.device)

    def tokens(self, *shape: int) -> Tensor:
        return torch.randint(0, _VOCABULARY, shape, generator=self.draws).to(self.device)

    def documents(self, *lengths: int) -> list[Tensor]:
        return [self.tokens(length) for length in lengths]

    def logits(self, tokens: Tensor, positions: Tensor | None = None, state: ModelState | None = None) -> Tensor:
        return self.model(tokens, positions, state).logits  # type: ignore[no-any-return]

    def read(
        self, tokens: Tensor, positions: Tensor | None = None, state: ModelState | None = None
    ) -> tuple[Tensor, ModelState]:
        """Logits, and the state after the last token."""
        return _both(self.model(tokens, positions, state, output_state=True))

    def step(self, tokens: Tensor, state: ModelState, positions: Tensor | None = None) -> tuple[Tensor, ModelState]:
        """Logits of one more token a row, and the state after it."""
        return _both(self.model.step(tokens, state, positions))

    def alone(self, documents: Iterable[Tensor]) -> list[Tensor]:
        """Each document's logits, read alone from its start."""
        return [self.logits(document[None])[0] for document in documents]

    def recurrent(self, state: ModelState) -> list[Tensor]:
        """The tensors of a state, but for those of mixers without decays: a cache may hold pads, hidden."""
        pairs = zip(_mixers(self.model), state.layers, strict=True)
        return [t for mixer, layer in pairs if mixer.timescales(1) is not None for t in tensors(layer)]

    def place(self, rows: list[list[Tensor]], width: int, shift: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
        """Documents in rows of `width` columns, each row's tokens at the columns `shift(n)` [n], junk elsewhere."""
        tokens = self.tokens(len(rows), width)
        positions = torch.zeros(len(rows), width, dtype=torch.long, device=self.device)
        for row, documents in enumerate(rows):
            columns = shift(sum(map(len, documents))).to(self.device)
            tokens[row, columns] = torch.cat(documents)
            positions[row, columns] = torch.cat([torch.arange(1, len(d) + 1, device=self.device) for d in documents])
        return tokens, positions

    def left(self, documents: list[Tensor], width: int) -> tuple[Tensor, Tensor]:
        """A row a document, padded on the left."""
        return self.place([[document] for document in documents], width, lambda n: torch.arange(width - n, width))

    def scattered(self, rows: list[list[Tensor]], width: int) -> tuple[Tensor, Tensor]:
        """Documents in rows, padding anywhere."""
        return self.place(rows, width, lambda n: torch.randperm(width, generator=self.draws)[:n].sort().values)

    def same(self, pitfall: int, name: str, got: Any, want: Any, bound: float | None = None) -> Check:
        """That two (collections of) tensors agree."""
        difference, scale = _largest(got, want)
        allowed = _BOUND[self.dtype] * max(1.0, scale) if bound is None else bound
        return Check(pitfall, name, difference, allowed)

    def same_state(
        self, pitfall: int, name: str, got: ModelState, want: ModelState, bound: float | None = None
    ) -> Check:
        """That two states agree, each tensor in units of its own largest number, or of 1 where that is less."""
        differences = []
        for a, b in zip(self.recurrent(got), self.recurrent(want), strict=True):
            difference, scale = _largest(a, b)
            differences.append(difference / max(1.0, scale))
        return Check(pitfall, name, _max(differences), _BOUND[self.dtype] if bound is None else bound)

    def same_gradients(self, pitfall: int, name: str, got: Tensor, want: Tensor) -> Check:
        """That two losses have the same gradient, each parameter's in units of its largest element."""
        differences = []
        for a, b in zip(self.gradients(got), self.gradients(want), strict=True):
            difference, scale = _largest(a, b)
            counted = _SCALAR_SHARE[self.dtype] if b.ndim == 0 else 1.0
            differences.append(counted * difference / (scale or 1.0))
        return Check(pitfall, name, _max(differences), _BOUND[self.dtype])

    def gradients(self, loss: Tensor) -> list[Tensor]:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]


def left_padding(s: Subject) -> Iterator[Check]:
    documents = s.documents(5, 17, 9)
    tokens, positions = s.left(documents, 20)
    together, alone = _real(s.logits(tokens, positions), positions), s.alone(documents)
    yield s.same(1, "left padding", together, alone)
    yield s.same_gradients(1, "left padding: gradients", _loss(together, documents), _loss(alone, documents))
    state, following = s.read(tokens, positions)[1], s.tokens(3)
    after = [s.step(following[n : n + 1], s.read(document[None])[1])[0][0] for n, document in enumerate(documents)]
    yield s.same(1, "left padding: the step after it", list(s.step(following, state)[0]), after)


def batch_of_one(s: Subject) -> Iterator[Check]:
    documents = s.documents(5, 17, 9)
    alone, following = s.alone(documents), s.tokens(1)
    after = [s.step(following, s.read(document[None])[1])[0] for document in documents]
    left = [s.left([document], 20) for document in documents]
    scattered = [s.scattered([[document]], 20) for document in documents]
    for name, rows in (("on the left", left), ("anywhere", scattered)):
        single = [_real(s.logits(*row), row[1])[0] for row in rows]
        yield s.same(2, f"a batch of one, padding {name}", single, alone)
        steps = [s.step(following, s.read(*row)[1])[0] for row in rows]
        yield s.same(2, f"a batch of one, padding {name}: the step after", steps, after)
    tokens = s.tokens(2, 13)
    explicit = torch.arange(1, 14, device=s.device).expand(2, 13)
    yield s.same(2, "positions given and left out", s.logits(tokens, explicit), s.logits(tokens))


def interior_padding(s: Subject) -> Iterator[Check]:
    documents = s.documents(5, 17, 1, 22)
    tokens, positions = s.scattered([[document] for document in documents], 22)
    together, alone = _real(s.logits(tokens, positions), positions), s.alone(documents)
    yield s.same(3, "padding between tokens", together, alone)
    yield s.same_gradients(3, "padding between tokens: gradients", _loss(together, documents), _loss(alone, documents))
    positions[2] = 0
    left = [n for n in range(4) if n != 2]
    yield s.same(
        3,
        "a row of padding only",
        [s.logits(tokens, positions)[n][positions[n] > 0] for n in left],
        [alone[n] for n in left],
    )


def rows_have_their_own_positions(s: Subject) -> Iterator[Check]:
    document = s.tokens(11)
    tokens, positions = s.place([[document]] * 5, 20, lambda n: torch.arange(n))
    for row in range(5):
        tokens[row], positions[row] = tokens[row].roll(2 * row), positions[row].roll(2 * row)
    logits, state = s.read(tokens, positions)
    rows = _real(logits, positions)
    yield s.same(4, "one document behind 0, 2, 4, 6, 8 pads", rows, [rows[0]] * 5)
    yield s.same(4, "tokens seen by each row", state.seen, torch.full((5,), 11, device=s.device), bound=0)


def position_in_decode(s: Subject) -> Iterator[Check]:
    tokens = s.tokens(2, 24)
    whole = s.logits(tokens)
    for n in (1, 8, 21):
        logits, state = _both(s.model.prefill(tokens[:, :n]))
        steps = [logits]
        for t in range(n, 24):
            logits, state = s.step(tokens[:, t], state)
            steps.append(logits)
        name = f"{n} tokens read, then {24 - n} steps"
        yield s.same(5, name, torch.stack(steps, dim=1), whole[:, n - 1 :])
        yield s.same(5, f"{name}: seen", state.seen, torch.full((2,), 24, device=s.device), bound=0)


def pieces(s: Subject) -> Iterator[Check]:
    documents = s.documents(19, 30, 4)
    tokens, positions = s.left(documents, 33)
    whole, end = s.read(tokens, positions)
    for lengths in ([1] * 33, [8, 8, 8, 9], _random_pieces(s, 33), _random_pieces(s, 33)):
        logits, state = _in_pieces(s, tokens, positions, lengths)
        name = f"pieces of {', '.join(map(str, lengths)) if len(set(lengths)) > 1 else lengths[0]}"
        yield s.same(6, name, _real(logits, positions), _real(whole, positions))
        yield s.same_state(6, f"{name}: state", state, end)
    prefilled = [s.model.prefill(tokens, positions, piece=piece).logits for piece in (1, 5, 8, 32, 33, 4096)]
    yield s.same(6, "prefill in pieces of 1, 5, 8, 32, 33, 4096", prefilled, [whole[:, -1]] * 6)


def steps(s: Subject) -> Iterator[Check]:
    documents = s.documents(12, 12)
    tokens = torch.stack(documents)
    whole, end = s.read(tokens)
    logits, state = _in_pieces(s, tokens, None, [1] * 12)
    name = "steps from the first token"
    yield s.same(7, name, logits, whole)
    yield s.same_state(7, f"{name}: state", state, end)
    yield s.same_gradients(7, f"{name}: gradients", _loss(logits, documents), _loss(whole, documents))


def finished_rows(s: Subject) -> Iterator[Check]:
    tokens = s.tokens(3, 14)
    state = s.read(tokens[:, :9])[1]
    running, finished = torch.tensor([0, 2], device=s.device), torch.tensor([1], device=s.device)
    mixed, kept = state, []
    for t in range(9, 14):
        logits, mixed = s.step(tokens[:, t], mixed, torch.tensor([t + 1, 0, t + 1], device=s.device))
        kept.append(logits[running])
    yield s.same(7, "a finished row beside running ones", torch.stack(kept, dim=1), s.logits(tokens[running])[:, 9:])
    now, before = mixed.select(finished), state.select(finished)
    following = s.step(tokens[1:2, 9], now)[0]
    yield s.same(7, "a finished row: its next token", following, s.logits(tokens[1:2, :10])[:, 9])
    yield s.same_state(7, "a finished row: its state", now, before, bound=0)


def extreme_decays(s: Subject) -> Iterator[Check]:
    tokens = s.tokens(2, 20)
    for factor in (10.0, -10.0):  # every gate saturates, one way and the other
        for mixer in _mixers(s.model):
            for parameter in mixer.parameters():
                parameter.data *= factor
        logits, state = _in_pieces(s, tokens, None, [1] * 20)
        whole, end = s.read(tokens)
        name = f"steps with the mixers' parameters times {factor:g}"
        yield s.same(8, name, logits, whole)
        yield s.same_state(8, f"{name}: state", state, end)
        del s.model
    if not _precision_parameters(s.model):
        return
    for factor in (30.0, -30.0):  # precisions at both ends of their range, side by side
        parameters = dict(s.model.named_parameters())
        for own in _precision_parameters(s.model):
            parameters[own].data *= factor
        name = f"steps with the precision's parameters times {factor:g}"
        yield s.same(8, name, _in_pieces(s, tokens[:, :8], None, [1] * 8)[0], s.logits(tokens[:, :8]))
        del s.model


def packing(s: Subject) -> Iterator[Check]:
    rows = [s.documents(1, 7, 8, 5), s.documents(16, 1, 4), s.documents(21)]
    flat = [document for row in rows for document in row]
    tokens, positions = s.place(rows, 21, torch.arange)
    logits, end = s.read(tokens, positions)
    packed, alone = _split(logits, rows), s.alone(flat)
    yield s.same(9, "documents packed in a row", packed, alone)
    yield s.same_gradients(9, "documents packed in a row: gradients", _loss(packed, flat), _loss(alone, flat))
    for name, lengths in (("8, 8, 5", [8, 8, 5]), ("1", [1] * 21), ("random lengths", _random_pieces(s, 21))):
        logits, state = _in_pieces(s, tokens, positions, lengths)
        yield s.same(9, f"packed, in pieces of {name}", _split(logits, rows), alone)
        yield s.same(9, f"packed, in pieces of {name}: the step after", *_steps_after(s, state, rows))
    yield s.same(9, "packed: the step after", *_steps_after(s, end, rows))
    tokens, positions = s.scattered(rows, 30)
    scattered = _split(_real(s.logits(tokens, positions), positions), rows)
    yield s.same(9, "packed, padding anywhere", scattered, alone)


def any_length(s: Subject) -> Iterator[Check]:
    tokens = s.tokens(2, 20)
    with torch.no_grad():
        reference = _in_pieces(s, tokens, None, [1] * 20)[0]
        pairs = [(s.logits(tokens[:, :T]), reference[:, :T]) for T in range(1, 21)]
        yield s.same(10, "lengths 1 to 20", [got for got, _ in pairs], [want for _, want in pairs])
        if "chunk_size" not in type(s.config.mixer).model_fields:
            return
        for chunk in _CHUNKS:
            mixer = s.config.mixer.model_copy(update={"chunk_size": chunk})
            model = s.copy(s.config.model_copy(update={"mixer": mixer}))
            got = [model(tokens[:, :T]).logits for T in (1, 2, 8, 13, 20)]
            yield s.same(10, f"chunks of {chunk}", got, [reference[:, :T] for T in (1, 2, 8, 13, 20)])


def initial_state(s: Subject) -> Iterator[Check]:
    documents = s.documents(22, 22)
    tokens = torch.stack(documents)
    whole = s.logits(tokens)
    for lengths in ([11, 11], [1, 21], _random_pieces(s, 22)):
        logits, _ = _in_pieces(s, tokens, None, lengths)
        name = f"split into {', '.join(map(str, lengths))}"
        yield s.same(11, name, logits, whole)
        yield s.same_gradients(11, f"{name}: gradients", _loss(logits, documents), _loss(s.logits(tokens), documents))


def low_precision(s: Subject) -> Iterator[Check]:
    named = _decay_parameters(s.model) + _precision_parameters(s.model)
    low = s.copy().to(torch.bfloat16)
    kept, wide = (dict(model.named_parameters()) for model in (low, s.model))
    below = [kept[name].dtype == torch.bfloat16 for name in named]
    yield _counted(12, "bfloat16 model: parameters of decays and precision below float32", below)
    values = [kept[name] for name in named], [wide[name].float() for name in named]
    yield s.same(12, "bfloat16 model: values of these parameters", *values, bound=0)

    tokens = s.tokens(2, 64)
    full = s.logits(tokens)
    logits, state = _both(low(tokens, output_state=True))
    yield _counted(12, "bfloat16 model: states below float32", _below_float32(low, state))
    yield _near(12, "bfloat16 model: logits", logits, full)
    logits, _ = _both(low.step(tokens[:, -1], _both(low.prefill(tokens[:, :-1]))[1]))
    yield _near(12, "bfloat16 model: a step: logits", logits, full[:, -1])
    yield from _traced("bfloat16 model", low.trace(tokens), s.model.trace(tokens))


def autocast(s: Subject) -> Iterator[Check]:
    model, tokens = s.copy().float(), s.tokens(2, 64)
    with torch.autocast(torch.device(s.device).type, dtype=torch.bfloat16):
        logits, state = _both(model(tokens, output_state=True))
        traced = model.trace(tokens)
    yield _counted(12, "autocast: states below float32", _below_float32(model, state))
    yield _near(12, "autocast: logits", logits, s.logits(tokens))
    yield from _traced("autocast", traced, s.model.trace(tokens))
    _loss(logits.float(), tokens).backward()  # type: ignore[no-untyped-call]
    yield _counted(12, "autocast: gradients not finite", _not_finite(p.grad for p in model.parameters()))
    if any(mixer.timescales(1) is not None for mixer in _mixers(model)) or _observed(model):
        whole = model(tokens).logits
        with torch.autocast(torch.device(s.device).type, dtype=torch.bfloat16), _projections_outside_autocast(s.device):
            logits = model(tokens).logits
        difference, scale = _largest(logits, whole)
        bound = _BOUND[torch.float32] * max(1.0, scale)
        yield Check(12, "autocast of all but the projections: recurrence and precision in float32", difference, bound)


def overflow(s: Subject) -> Iterator[Check]:
    documents = s.documents(20, 20)
    tokens = torch.stack(documents)
    decays, precision = _decay_parameters(s.model), _precision_parameters(s.model)
    extremes = [("the fastest decays", decays, 8.0), ("no decay", decays, -1e3)]
    if precision:
        extremes += [("all certain", precision, 1e3), ("nothing certain", precision, -1e3)]
    for what, named, value in extremes:
        model = s.copy()
        parameters = dict(model.named_parameters())
        for name in named:
            parameters[name].data.fill_(value)
        logits = model(tokens).logits
        _loss(logits, documents).backward()  # type: ignore[no-untyped-call]
        yield _counted(13, f"{what}: logits not finite", _not_finite([logits]))
        yield _counted(13, f"{what}: gradients not finite", _not_finite(p.grad for p in model.parameters()))


def causality(s: Subject) -> Iterator[Check]:
    tokens = s.tokens(1, 20)
    whole = s.logits(tokens)
    got, want = [], []
    for t in range(1, 20):
        changed = tokens.clone()
        changed[:, t:] = (changed[:, t:] + 1) % _VOCABULARY
        got.append(s.logits(changed)[:, :t])
        want.append(whole[:, :t])
    yield s.same(13, "later tokens don't change earlier logits", got, want)


def weight_decay(s: Subject) -> Iterator[Check]:
    groups = parameter_groups(s.model, 0.1)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    decayed = {id(parameter) for group in groups if group["weight_decay"] for parameter in group["params"]}
    named = dict(s.model.named_parameters())
    decays = _decay_parameters(s.model)
    exempt = [id(p) in decayed for name, p in named.items() if p.ndim < 2 or name in decays]
    yield _counted(14, "weight decay on decays, norms and biases", exempt)
    misplaced = [grouped.count(id(p)) != int(p.requires_grad) for p in named.values()]
    yield _counted(14, "parameters not in one group, or frozen in one", misplaced)


def initial_values(s: Subject) -> Iterator[Check]:
    built = build_model(s.config, s.seed).state_dict()
    other = build_model(s.config, s.seed + 1)
    for tensor in other.state_dict().values():
        tensor.fill_(math.nan)
    initialise(other, s.seed)
    yield s.same(15, "every value is drawn, from the seed", other.state_dict().values(), built.values(), bound=0)
    yield _counted(15, "initial values not finite", _not_finite(built.values()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        write_checkpoint(path, s.model, s.seed + 1, {}, {})
        loaded = read_checkpoint(path).model(device=s.device).state_dict()
    saved = [tensor.float() for tensor in s.model.state_dict().values()]  # a model is loaded in float32
    yield s.same(15, "values after loading a checkpoint", loaded.values(), saved, bound=0)


def initial_values_in_bfloat16(s: Subject) -> Iterator[Check]:
    drawn = build_model(s.config, s.seed + 1).to(torch.bfloat16)
    initialise(drawn, s.seed)
    cast = build_model(s.config, s.seed).to(torch.bfloat16)
    name = "drawn into a bfloat16 model as into a float32 one"
    yield s.same(16, name, drawn.state_dict().values(), cast.state_dict().values(), bound=0)


def one_head_and_layer(s: Subject) -> Iterator[Check]:
    addons = {name: addon.plain() for name in ADDONS if (addon := getattr(s.config, name)) is not None}
    one = Subject(small_config(s.config.name, addons, one_head=True), s.dtype, s.seed, s.device)
    name = "one layer of one head"
    initial = build_model(one.config, one.seed).state_dict().values()
    yield _counted(17, f"{name}: initial values not finite", _not_finite(initial))
    documents = one.documents(13, 13)
    tokens = torch.stack(documents)
    logits = one.logits(tokens)
    found = [logits, *one.gradients(_loss(logits, documents))]
    yield _counted(17, f"{name}: logits and gradients not finite", _not_finite(found))
    yield one.same(17, f"{name}: steps", _in_pieces(one, tokens, None, [1] * 13)[0], logits)


def state_size(s: Subject) -> Iterator[Check]:
    lengths = (8, 20)
    sizes = [s.read(s.tokens(1, length))[1].elements() for length in lengths]
    recurrent = [mixer.timescales(1) is not None for mixer in _mixers(s.model)]
    grown = [a != b for a, b, fixed in zip(*sizes, recurrent, strict=True) if fixed]
    yield _counted(28, "recurrent layers whose state grows with the text", grown)
    if s.config.bft is None or not s.config.bft.carries:
        return
    plain = build_model(s.config.model_copy(update={"bft": None}), s.seed).to(s.device)
    for length, elements in zip(lengths, sizes, strict=True):
        without = _both(plain(s.tokens(1, length), output_state=True))[1].elements()
        moments = [_moments(mixer, length) for mixer in _mixers(s.model)]
        differs = [a - b != m for a, b, m in zip(elements, without, moments, strict=True)]
        yield _counted(28, f"layers that keep more or less than the moments of {length} tokens", differs)


CHECKS: dict[Callable[[Subject], Iterator[Check]], int] = {
    left_padding: 1,
    batch_of_one: 2,
    interior_padding: 3,
    rows_have_their_own_positions: 4,
    position_in_decode: 5,
    pieces: 6,
    steps: 7,
    finished_rows: 7,
    extreme_decays: 8,
    packing: 9,
    any_length: 10,
    initial_state: 11,
    low_precision: 12,
    autocast: 12,
    overflow: 13,
    causality: 13,
    weight_decay: 14,
    initial_values: 15,
    initial_values_in_bfloat16: 16,
    one_head_and_layer: 17,
    state_size: 28,
}


def _in_pieces(s: Subject, tokens: Tensor, positions: Tensor | None, lengths: list[int]) -> tuple[Tensor, ModelState]:
    """Logits and the last state of a forward pass cut into pieces, the state carried along with its history."""
    state, parts, start = None, [], 0
    for length in lengths:
        piece = slice(start, start + length)
        logits, state = s.read(tokens[:, piece], None if positions is None else positions[:, piece], state)
        parts.append(logits)
        start += length
    assert state is not None
    return torch.cat(parts, dim=1), state


def _random_pieces(s: Subject, length: int) -> list[int]:
    cuts = torch.randperm(length - 1, generator=s.draws)[:4].sort().values + 1
    edges = [0, *cuts.tolist(), length]
    return [int(after - before) for before, after in pairwise(edges)]


def _steps_after(s: Subject, state: ModelState, rows: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """Two steps from a packed state, beside the last document of each row read alone with these two tokens."""
    following = s.tokens(len(rows), 2)
    first, state = s.step(following[:, 0], state)
    second, _ = s.step(following[:, 1], state)
    whole = [s.logits(torch.cat([row[-1], following[n]])[None])[0, -2:] for n, row in enumerate(rows)]
    return torch.stack([first, second], dim=1), torch.stack(whole)


def _real(logits: Tensor, positions: Tensor) -> list[Tensor]:
    return [row[where > 0] for row, where in zip(logits, positions, strict=True)]


def _split(logits: Iterable[Tensor], rows: list[list[Tensor]]) -> list[Tensor]:
    """The logits of rows of packed documents, document by document."""
    return [
        part
        for of_row, documents in zip(logits, rows, strict=True)
        for part in of_row.split([len(document) for document in documents])  # type: ignore[no-untyped-call]
    ]


def _loss(logits: Iterable[Tensor], documents: Iterable[Tensor]) -> Tensor:
    """Cross-entropy of each document with itself, summed: a loss to which every token counts."""
    pairs = zip(logits, documents, strict=True)
    return torch.stack([F.cross_entropy(got, wanted, reduction="sum") for got, wanted in pairs]).sum()


def _mixers(model: LanguageModel) -> list[Mixer]:
    return [cast(Mixer, block.mixer) for block in model.blocks]


@torch.no_grad()
def _decay_parameters(model: LanguageModel) -> list[str]:
    """The parameters on which the resting timescales depend, found by moving each."""

    def timescales() -> Tensor:
        scales = [scale for mixer in _mixers(model) if (scale := mixer.timescales(5)) is not None]
        return torch.cat(scales) if scales else torch.empty(0)

    rest, found = timescales(), []
    for name, parameter in model.named_parameters():
        value = parameter.clone()
        parameter.add_(0.1)
        if not torch.equal(timescales(), rest):
            found.append(name)
        parameter.copy_(value)
    return found


def _precision_parameters(model: LanguageModel) -> list[str]:
    """The vectors that set a precision, of BFT: log tau or the MLP's end, and q."""
    kinds = (InitialPrecision, KalmanResidual)
    owners = [(prefix, module) for prefix, module in model.named_modules() if isinstance(module, kinds)]
    return [f"{prefix}.{name}" for prefix, owner in owners for name, p in owner.named_parameters() if p.ndim < 2]


def _observed(model: LanguageModel) -> bool:
    """Whether attention is BFT's, in float32 as a recurrence is, and not PyTorch's."""
    return model.config.bft is not None and model.config.bft.carries and model.config.bft.precision != "frozen"


def _moments(mixer: Mixer, length: int) -> int:
    """Numbers that BFT keeps of the tokens so far: S0, D1, D2 a head and S1, S2 a value channel, or lbar a key."""
    if mixer.timescales(1) is None:
        return length
    return 3 * mixer.heads + 2 * int(mixer.out_proj.weight.shape[1])


def _traced(name: str, got: list[LayerTrace], want: list[LayerTrace]) -> Iterator[Check]:
    """That what a residual carries stays in float32, and near what it is in full precision."""
    for part in ("gain", "precision", "updated", "sample_size"):
        pairs = [(getattr(a, part), getattr(b, part)) for a, b in zip(got, want, strict=True)]
        if pairs := [(a, b) for a, b in pairs if b is not None]:
            words = part.replace("_", " ")
            low = [a.dtype not in (torch.float32, torch.float64) for a, _ in pairs]
            yield _counted(12, f"{name}: {words} below float32", low)
            found, wanted = (torch.stack(side).flatten()[:, None] for side in zip(*pairs, strict=True))
            yield _near(12, f"{name}: {words}", found, wanted)


def _both(output: Output) -> tuple[Tensor, ModelState]:
    assert output.state is not None
    return output.logits, output.state


def _below_float32(model: LanguageModel, state: ModelState) -> list[bool]:
    """For each recurrent state [B, H, K, V] and all that a residual keeps, whether it is in less than float32."""
    pairs = zip(_mixers(model), state.layers, strict=True)
    states = [t for mixer, layer in pairs if mixer.timescales(1) is not None for t in tensors(layer.mixer)]
    kept = [t for t in states if t.ndim >= 4] + [t for layer in state.layers for t in tensors(layer.residual)]
    return [t.dtype not in (torch.float32, torch.float64) for t in kept]


def _not_finite(values: Iterable[Tensor | None]) -> list[bool]:
    return [not bool(value.isfinite().all()) for value in values if value is not None]


@contextmanager
def _projections_outside_autocast(device: str) -> Iterator[None]:
    """Within autocast, what is left in full precision by it is then the recurrence alone."""
    linear = F.linear

    def outside(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        with torch.autocast(torch.device(device).type, enabled=False):
            return linear(x, weight, bias)

    F.linear = outside  # type: ignore[assignment]
    try:
        yield
    finally:
        F.linear = linear


def _counted(pitfall: int, name: str, wrong: list[bool]) -> Check:
    return Check(pitfall, f"{name}, of {len(wrong)}", sum(wrong), 0)


def _near(pitfall: int, name: str, got: Any, want: Any) -> Check:
    errors, sizes = (x.detach().double().square().mean(-1).sqrt() for x in (got - want, want))
    difference = float((errors / sizes).flatten().quantile(_MOST_TOKENS))  # NaN stays NaN
    return Check(pitfall, f"{name} beside full precision", difference, _BFLOAT16_BOUND)


def _largest(got: Any, want: Any) -> tuple[float, float]:
    """The largest absolute difference, NaN if any is, and the largest wanted value."""
    got, want = ([x] if isinstance(x, Tensor) else x for x in (got, want))
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(got, want, strict=True)]
    differences = [float((a - b).abs().amax()) if a.numel() else 0.0 for a, b in pairs]
    return _max(differences), _max(float(b.abs().amax()) for _, b in pairs if b.numel())


def _max(values: Iterable[float]) -> float:
    found = list(values)
    return math.nan if any(math.isnan(value) for value in found) else max(found, default=0.0)
