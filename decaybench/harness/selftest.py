"""What must not change a model's output, checked on this machine: the invariances that other projects broke.

Each check is named after the numbered bug it guards against and compares two ways to the same logits, gradients or
state. The model is small, and all its parameters are moved away from their initial values, so that no two ways agree
for want of anything to disagree about.

Bounds. float64: 1e-9 of the largest number compared; its rounding, 1e-16, grows to about 1e-13 over these sums. That
is far below what any real slip makes. float32: 1e-4 for logits and 1e-3 for gradients, whose sums run over all
tokens and cancel; both a few hundred times its rounding, 6e-8. Where the two ways do the very same arithmetic, and
where something is counted, the bound is 0.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decaybench.core.config import parse
from decaybench.harness.training import parameter_groups
from decaybench.models.checkpoints import read_checkpoint, write_checkpoint
from decaybench.models.config import ModelConfig
from decaybench.models.language_model import LanguageModel, build_model
from decaybench.models.module import initialise
from decaybench.models.registry import architectures, get_architecture
from decaybench.models.state import ModelState, tensors

if TYPE_CHECKING:
    from rich.table import Table

_VOCABULARY = 31
_D_MODEL = 32
# Sizes by the names that architectures give them; each takes those that it has.
_SMALL = {"d_state": 8, "headdim": 8, "head_dim": 8, "n_heads": 4, "n_groups": 2, "chunk_size": 8}
_ONE_HEAD = {"headdim": 2 * _D_MODEL, "head_dim": _D_MODEL, "n_heads": 1, "n_groups": 1}
_LOGITS_BOUND = {torch.float64: 1e-9, torch.float32: 1e-4}
_GRADIENTS_BOUND = {torch.float64: 1e-9, torch.float32: 1e-3}
_BFLOAT16_BOUND = 0.05  # of the largest logit: a dozen times bfloat16's rounding, 0.4 %
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


def small_config(
    name: str, post_variant: Literal["paper", "minimal"] | None = None, *, one_head: bool = False
) -> ModelConfig:
    """A model of any registered architecture that takes milliseconds. one_head: one layer of one head."""
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
            "ffn": {"kind": "swiglu", "multiple": 1.0},
            "post": post_variant and {"variant": post_variant, "horizon": 32},
        },
    )


def selftest(
    config: ModelConfig, *, dtype: torch.dtype = torch.float64, seed: int = 0, device: str = "cpu"
) -> list[Check]:
    """All checks of one model configuration. A check that can't be carried out fails with an infinite difference."""
    results: list[Check] = []
    for check in _CHECKS:
        subject = _Subject(config, dtype, seed, device)
        try:
            results.extend(check(subject))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            name = f"{check.__name__.strip('_').replace('_', ' ')}: {' '.join(str(error).split())[:80]}"
            results.append(Check(_CHECKS[check], name, math.inf, 0.0))
    return results


def test_models(name: str, *, post: bool = False, device: str = "cpu") -> dict[str, list[Check]]:
    """The checks of an architecture, or of all with every add-on: cell and dtype -> checks. Raises UserError."""
    if name == "all":
        cells = [
            (known.name, variant)
            for known in architectures().values()
            for variant in (None, "paper", "minimal")
            if variant is None or "post" in known.addons
        ]
    else:
        cells = [(name, "paper"), (name, "minimal")] if post else [(name, None)]
    configs = [small_config(known, variant) for known, variant in cells]  # type: ignore[arg-type]
    return {
        f"{config.cell} {str(dtype).removeprefix('torch.')}": selftest(config, dtype=dtype, device=device)
        for config in configs
        for dtype in (torch.float64, torch.float32)
    }


def plain(results: dict[str, list[Check]]) -> list[dict[str, Any]]:
    """The checks as JSON-able data; a difference that is not a finite number is None."""
    return [
        {
            "model": model,
            "pitfall": check.pitfall,
            "check": check.name,
            "difference": check.difference if math.isfinite(check.difference) else None,
            "bound": check.bound,
            "passed": check.passed,
        }
        for model, checks in results.items()
        for check in checks
    ]


def table(results: dict[str, list[Check]]) -> Table:
    """The checks for a terminal."""
    from rich.markup import escape
    from rich.table import Table

    drawn = Table("model", "pitfall", "check", "largest difference", "bound", "verdict")
    for column in (1, 3, 4):
        drawn.columns[column].justify = "right"
    for model, checks in results.items():
        for check in sorted(checks, key=lambda check: check.pitfall):
            verdict = "[green]holds[/]" if check.passed else "[bold red]BROKEN[/]"
            numbers = (f"{check.difference:.1e}", f"{check.bound:.0e}" if check.bound else "0")
            drawn.add_row(model, str(check.pitfall), escape(check.name), *numbers, verdict)
        drawn.add_section()
    return drawn


class _Subject:
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
            size = float(parameter.detach().std()) if parameter.ndim > 1 else 0.3
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

    def alone(self, documents: Iterable[Tensor]) -> list[Tensor]:
        """Each document's logits, read alone from its start."""
        return [self.logits(document[None])[0] for document in documents]

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

    def scattered(self, documents: list[Tensor], width: int) -> tuple[Tensor, Tensor]:
        """A row a document, padding anywhere."""
        return self.place(
            [[document] for document in documents],
            width,
            lambda n: torch.randperm(width, generator=self.draws)[:n].sort().values,
        )

    def same(self, pitfall: int, name: str, got: Any, want: Any, bound: float | None = None) -> Check:
        """That two (collections of) tensors agree."""
        difference, scale = _largest(got, want)
        allowed = _LOGITS_BOUND[self.dtype] * max(1.0, scale) if bound is None else bound
        return Check(pitfall, name, difference, allowed)

    def same_gradients(self, pitfall: int, name: str, got: Tensor, want: Tensor) -> Check:
        """That two losses have the same gradient, each parameter's in units of its largest element."""
        pairs = list(zip(self._gradients(got), self._gradients(want), strict=True))
        difference = _max(_largest(a, b)[0] / (_largest(b, b)[1] or 1.0) for a, b in pairs)
        return Check(pitfall, name, difference, _GRADIENTS_BOUND[self.dtype])

    def _gradients(self, loss: Tensor) -> list[Tensor]:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]


def _left_padding(s: _Subject) -> Iterator[Check]:
    documents = s.documents(5, 17, 9)
    tokens, positions = s.left(documents, 20)
    together, alone = _real(s.logits(tokens, positions), positions), s.alone(documents)
    yield s.same(1, "left padding", together, alone)
    yield s.same_gradients(1, "left padding: gradients", _loss(together, documents), _loss(alone, documents))
    state = s.model(tokens, positions, output_state=True).state
    after = [s.model(document[None], output_state=True).state for document in documents]
    following = s.tokens(3)
    step = s.model.step(following, state).logits
    yield s.same(1, "left padding: the step after it", step, [s.model.step(following[n : n + 1], after[n]).logits[0] for n in range(3)])


def _batch_of_one(s: _Subject) -> Iterator[Check]:
    documents = s.documents(5, 17, 9)
    placed = [s.left([document], 20) for document in documents]
    yield s.same(2, "padding in a batch of one", [s.logits(*row)[0, 20 - len(d) :] for row, d in zip(placed, documents, strict=True)], s.alone(documents))
    tokens = s.tokens(2, 13)
    explicit = torch.arange(1, 14, device=s.device).expand(2, 13)
    yield s.same(2, "positions given and left out", s.logits(tokens, explicit), s.logits(tokens))


def _interior_padding(s: _Subject) -> Iterator[Check]:
    documents = s.documents(5, 17, 1, 22)
    tokens, positions = s.scattered(documents, 22)
    together, alone = _real(s.logits(tokens, positions), positions), s.alone(documents)
    yield s.same(3, "padding between tokens", together, alone)
    yield s.same_gradients(3, "padding between tokens: gradients", _loss(together, documents), _loss(alone, documents))
    positions[2] = 0
    left = [n for n in range(4) if n != 2]
    yield s.same(3, "a row of padding only", [s.logits(tokens, positions)[n][positions[n] > 0] for n in left], [alone[n] for n in left])


def _rows_have_their_own_positions(s: _Subject) -> Iterator[Check]:
    document = s.tokens(11)
    tokens, positions = s.place([[document]] * 5, 20, lambda n: torch.arange(n))
    for row in range(5):
        tokens[row], positions[row] = tokens[row].roll(2 * row), positions[row].roll(2 * row)
    output = s.model(tokens, positions, output_state=True)
    rows = _real(output.logits, positions)
    yield s.same(4, "one document behind 0, 2, 4, 6, 8 pads", rows, [rows[0]] * 5)
    yield s.same(4, "tokens seen by each row", output.state.seen, torch.full((5,), 11, device=s.device), bound=0)


def _position_in_decode(s: _Subject) -> Iterator[Check]:
    tokens = s.tokens(2, 24)
    whole = s.logits(tokens)
    for n in (1, 8, 21):
        output = s.model.prefill(tokens[:, :n])
        steps = [output.logits]
        for t in range(n, 24):
            output = s.model.step(tokens[:, t], output.state)
            steps.append(output.logits)
        yield s.same(5, f"{n} tokens read, then {24 - n} steps", torch.stack(steps, dim=1), whole[:, n - 1 :])
        yield s.same(5, f"{n} tokens read, then {24 - n} steps: seen", output.state.seen, torch.full((2,), 24, device=s.device), bound=0)


def _pieces(s: _Subject) -> Iterator[Check]:
    documents = s.documents(19, 30, 4)
    tokens, positions = s.left(documents, 33)
    whole = s.model(tokens, positions, output_state=True)
    for lengths in ([1] * 33, [8, 8, 8, 9], _random_pieces(s, 33), _random_pieces(s, 33)):
        logits, state = _in_pieces(s, tokens, positions, lengths)
        name = f"pieces of {', '.join(map(str, lengths)) if len(set(lengths)) > 1 else lengths[0]}"
        yield s.same(6, name, _real(logits, positions), _real(whole.logits, positions))
        yield s.same(6, f"{name}: state", _recurrent(state), _recurrent(whole.state))
    prefilled = [s.model.prefill(tokens, positions, piece=piece).logits for piece in (1, 5, 8, 32, 33, 4096)]
    yield s.same(6, "prefill in pieces of 1, 5, 8, 32, 33, 4096", prefilled, [whole.logits[:, -1]] * 6)


def _steps(s: _Subject) -> Iterator[Check]:
    documents = s.documents(12, 12)
    tokens = torch.stack(documents)
    whole = s.model(tokens, output_state=True)
    logits, state = _in_pieces(s, tokens, None, [1] * 12)
    yield s.same(7, "steps from the first token", logits, whole.logits)
    yield s.same(7, "steps from the first token: state", _recurrent(state), _recurrent(whole.state))
    yield s.same_gradients(7, "steps from the first token: gradients", _loss(logits, documents), _loss(whole.logits, documents))


def _finished_rows(s: _Subject) -> Iterator[Check]:
    tokens = s.tokens(3, 14)
    state = s.model(tokens[:, :9], output_state=True).state
    running, finished = torch.tensor([0, 2], device=s.device), torch.tensor([1], device=s.device)
    mixed, kept = state, []
    for t in range(9, 14):
        where = torch.tensor([t + 1, 0, t + 1], device=s.device)
        output = s.model.step(tokens[:, t], mixed, where)
        mixed = output.state
        kept.append(output.logits[running])
    yield s.same(7, "a finished row beside running ones", torch.stack(kept, dim=1), s.logits(tokens[running])[:, 9:])
    now, before = mixed.select(finished), state.select(finished)
    yield s.same(7, "a finished row: its next token", s.model.step(tokens[1:2, 9], now).logits, s.logits(tokens[1:2, :10])[:, 9])
    yield s.same(7, "a finished row: its state", _recurrent(now), _recurrent(before), bound=0)


def _extreme_decays(s: _Subject) -> Iterator[Check]:
    tokens = s.tokens(2, 20)
    for factor in (10.0, -10.0):
        # Every gate saturates, one way and the other.
        for block in s.model.blocks:
            for parameter in block.mixer.parameters():
                parameter.data *= factor
        logits, state = _in_pieces(s, tokens, None, [1] * 20)
        whole = s.model(tokens, output_state=True)
        yield s.same(8, f"steps with the mixer's parameters times {factor:g}", logits, whole.logits)
        yield s.same(8, f"steps with the mixer's parameters times {factor:g}: state", _recurrent(state), _recurrent(whole.state))
        del s.model


def _packing(s: _Subject) -> Iterator[Check]:
    rows = [s.documents(1, 7, 8, 5), s.documents(16, 1, 4), s.documents(21)]
    flat = [document for row in rows for document in row]
    tokens, positions = s.place(rows, 21, torch.arange)
    output = s.model(tokens, positions, output_state=True)
    packed, alone = _split(output.logits, rows), s.alone(flat)
    yield s.same(9, "documents packed in a row", packed, alone)
    yield s.same_gradients(9, "documents packed in a row: gradients", _loss(packed, flat), _loss(alone, flat))
    for name, lengths in (("8, 8, 5", [8, 8, 5]), ("1", [1] * 21), ("random lengths", _random_pieces(s, 21))):
        logits, state = _in_pieces(s, tokens, positions, lengths)
        yield s.same(9, f"packed, in pieces of {name}", _split(logits, rows), alone)
        yield s.same(9, f"packed, in pieces of {name}: the step after", *_steps_after(s, state, rows))
    yield s.same(9, "packed: the step after", *_steps_after(s, output.state, rows))
    yield s.same(9, "packed, padding anywhere", *_packed_and_padded(s, rows, alone))


def _any_length(s: _Subject) -> Iterator[Check]:
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


def _initial_state(s: _Subject) -> Iterator[Check]:
    documents = s.documents(22, 22)
    tokens = torch.stack(documents)
    whole = s.logits(tokens)
    for lengths in ([11, 11], [1, 21], _random_pieces(s, 22)):
        logits, _ = _in_pieces(s, tokens, None, lengths)
        name = f"split into {', '.join(map(str, lengths))}"
        yield s.same(11, name, logits, whole)
        yield s.same_gradients(11, f"{name}: gradients", _loss(logits, documents), _loss(s.logits(tokens), documents))


def _low_precision(s: _Subject) -> Iterator[Check]:
    tokens = s.tokens(2, 64)
    full = s.model(tokens, output_state=True)
    wide = dict(s.model.named_parameters())
    low = s.copy().to(torch.bfloat16)
    sets_decay = _decay_parameters(s.model)
    narrowed = [name for name, parameter in low.named_parameters() if name in sets_decay and parameter.dtype == torch.bfloat16]
    yield Check(12, f"bfloat16 model: decay parameters below float32, of {len(sets_decay)}", len(narrowed), 0)
    float32 = {name: wide[name].float() for name in sets_decay}
    kept = dict(low.named_parameters())
    yield s.same(12, "bfloat16 model: decay parameters", [kept[name] for name in sets_decay], list(float32.values()), bound=0)
    output = low(tokens, output_state=True)
    yield _counted(12, "bfloat16 model: states below float32", _below_float32(low, output.state))
    yield _near(12, "bfloat16 model", output.logits, full.logits)
    step = [low.step(tokens[:, -1], low.prefill(tokens[:, :-1]).state).logits]
    yield _near(12, "bfloat16 model: a step", step, [full.logits[:, -1]])
    autocast = s.copy().float()
    with torch.autocast(torch.device(s.device).type, dtype=torch.bfloat16):
        output = autocast(tokens, output_state=True)
    output.logits.float().logsumexp(-1).sum().backward()
    yield _counted(12, "autocast: states below float32", _below_float32(autocast, output.state))
    yield _near(12, "autocast", output.logits, full.logits)
    yield _counted(12, "autocast: gradients not finite", _not_finite(p.grad for p in autocast.parameters()))


def _overflow(s: _Subject) -> Iterator[Check]:
    documents = s.documents(20, 20)
    tokens = torch.stack(documents)
    for what, value in (("the fastest decays", 8.0), ("no decay", -1e3)):
        model = s.copy()
        parameters = dict(model.named_parameters())
        for name in _decay_parameters(s.model):
            parameters[name].data.fill_(value)
        logits = model(tokens).logits
        _loss(logits, documents).backward()
        yield _counted(13, f"{what}: logits not finite", _not_finite([logits]))
        yield _counted(13, f"{what}: gradients not finite", _not_finite(p.grad for p in model.parameters()))


def _causality(s: _Subject) -> Iterator[Check]:
    tokens = s.tokens(1, 20)
    whole = s.logits(tokens)
    got, want = [], []
    for t in range(1, 20):
        changed = tokens.clone()
        changed[:, t:] = (changed[:, t:] + 1) % _VOCABULARY
        got.append(s.logits(changed)[:, :t])
        want.append(whole[:, :t])
    yield s.same(13, "later tokens don't change earlier logits", got, want)


def _weight_decay(s: _Subject) -> Iterator[Check]:
    model = s.copy()
    decayed = {id(p) for group in parameter_groups(model, 0.1) if group["weight_decay"] for p in group["params"]}
    grouped = [id(p) for group in parameter_groups(model, 0.1) for p in group["params"]]
    exempt = _decay_parameters(model)
    wrong = [n for n, p in model.named_parameters() if id(p) in decayed and (n in exempt or p.ndim < 2)]
    yield Check(14, "weight decay on decays, norms or biases: parameters", len(wrong), 0)
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    yield Check(14, "trained parameters in no group, or in two", abs(len(grouped) - len(trained)) + len(trained ^ set(grouped)), 0)


def _initial_values(s: _Subject) -> Iterator[Check]:
    built = build_model(s.config, s.seed)
    blank = build_model(s.config, s.seed + 1)
    for tensor in blank.state_dict().values():
        tensor.fill_(math.nan)
    initialise(blank, s.seed)
    yield s.same(15, "every parameter gets a value of its own", blank.state_dict().values(), built.state_dict().values(), bound=0)
    yield _counted(15, "initial values not finite", _not_finite(built.state_dict().values()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        write_checkpoint(path, s.model, s.seed + 1, {}, {})
        loaded = read_checkpoint(path).model(device=s.device).to(s.dtype)
    bound = 0 if s.dtype == torch.float32 else 1e-6  # a model is loaded in float32
    yield s.same(15, "values after loading a checkpoint", loaded.state_dict().values(), s.model.state_dict().values(), bound=bound)


def _one_head_and_layer(s: _Subject) -> Iterator[Check]:
    variant = s.config.post.variant if s.config.post else None
    one = _Subject(small_config(s.config.name, variant, one_head=True), s.dtype, s.seed, s.device)
    documents = one.documents(13, 13)
    tokens = torch.stack(documents)
    logits = one.logits(tokens)
    yield _counted(17, "one layer of one head: not finite", _not_finite([logits, *one._gradients(_loss(logits, documents))]))
    yield one.same(17, "one layer of one head: steps", _in_pieces(one, tokens, None, [1] * 13)[0], logits)
    yield _counted(17, "one layer of one head: initial values not finite", _not_finite(build_model(one.config, one.seed).state_dict().values()))


_CHECKS: dict[Callable[[_Subject], Iterator[Check]], int] = {
    _left_padding: 1,
    _batch_of_one: 2,
    _interior_padding: 3,
    _rows_have_their_own_positions: 4,
    _position_in_decode: 5,
    _pieces: 6,
    _steps: 7,
    _finished_rows: 7,
    _extreme_decays: 8,
    _packing: 9,
    _any_length: 10,
    _initial_state: 11,
    _low_precision: 12,
    _overflow: 13,
    _causality: 13,
    _weight_decay: 14,
    _initial_values: 15,
    _one_head_and_layer: 17,
}


def _in_pieces(
    s: _Subject, tokens: Tensor, positions: Tensor | None, lengths: list[int]
) -> tuple[Tensor, ModelState]:
    """Logits and the last state of a forward pass cut into pieces, the state carried along with its history."""
    state, parts = None, []
    pieces = zip(tokens.split(lengths, dim=1), positions.split(lengths, dim=1) if positions is not None else [None] * len(lengths), strict=True)
    for part, where in pieces:
        output = s.model(part, where, state, output_state=True)
        state = output.state
        parts.append(output.logits)
    assert state is not None
    return torch.cat(parts, dim=1), state


def _random_pieces(s: _Subject, length: int) -> list[int]:
    cuts = torch.randperm(length - 1, generator=s.draws)[:4].sort().values + 1
    edges = [0, *cuts.tolist(), length]
    return [int(after - before) for before, after in zip(edges, edges[1:], strict=False)]


def _steps_after(s: _Subject, state: ModelState, rows: list[list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Two steps from a packed state, beside the last document of each row read alone with these two tokens."""
    following = s.tokens(len(rows), 2)
    first = s.model.step(following[:, 0], state)
    second = s.model.step(following[:, 1], first.state)
    whole = [s.logits(torch.cat([row[-1], following[n]])[None])[0, -2:] for n, row in enumerate(rows)]
    return list(torch.stack([first.logits, second.logits], dim=1)), whole


def _packed_and_padded(s: _Subject, rows: list[list[Tensor]], alone: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    tokens, positions = s.place(rows, 30, lambda n: torch.randperm(30, generator=s.draws)[:n].sort().values)
    logits = _real(s.logits(tokens, positions), positions)
    return [part for row, of_row in zip(rows, logits, strict=True) for part in of_row.split([len(d) for d in row])], alone


def _real(logits: Tensor, positions: Tensor) -> list[Tensor]:
    return [row[where > 0] for row, where in zip(logits, positions, strict=True)]


def _split(logits: Tensor, rows: list[list[Tensor]]) -> list[Tensor]:
    return [part for n, row in enumerate(rows) for part in logits[n].split([len(document) for document in row])]


def _loss(logits: Iterable[Tensor], documents: Iterable[Tensor]) -> Tensor:
    """Cross-entropy of each document with itself, summed: a loss to which every token counts."""
    pairs = zip(logits, documents, strict=True)
    return torch.stack([F.cross_entropy(got, wanted, reduction="sum") for got, wanted in pairs]).sum()


def _decay_parameters(model: LanguageModel) -> list[str]:
    """The parameters on which the resting timescales depend, found by their gradient."""
    scales = [t for block in model.blocks if (t := block.mixer.timescales(5)) is not None]
    if not scales:
        return []
    named = dict(model.named_parameters())
    wanting = {name: p.requires_grad for name, p in named.items()}
    for parameter in named.values():
        parameter.requires_grad_(True)
    again = [t for block in model.blocks if (t := block.mixer.timescales(5)) is not None]
    found = torch.autograd.grad(torch.cat(again).log().sum(), list(named.values()), allow_unused=True)
    for name, parameter in named.items():
        parameter.requires_grad_(wanting[name])
    return [name for name, gradient in zip(named, found, strict=True) if gradient is not None]


def _recurrent(state: ModelState) -> list[Tensor]:
    """A state's tensors whose size doesn't depend on how many tokens were read, and in which way."""
    return [t for layer in state.layers for t in tensors(layer) if t.is_floating_point()]


def _below_float32(model: LanguageModel, state: ModelState) -> list[bool]:
    return [
        t.dtype not in (torch.float32, torch.float64)
        for block, layer in zip(model.blocks, state.layers, strict=True)
        if block.mixer.timescales(1) is not None
        for t in tensors(layer.mixer)
        if t.ndim >= 4
    ]


def _not_finite(values: Iterable[Tensor | None]) -> list[bool]:
    return [not bool(value.isfinite().all()) for value in values if value is not None]


def _counted(pitfall: int, name: str, wrong: list[bool]) -> Check:
    return Check(pitfall, f"{name}, of {len(wrong)}", sum(wrong), 0)


def _near(pitfall: int, name: str, got: Any, want: Any) -> Check:
    difference, scale = _largest(got, want)
    return Check(pitfall, f"{name}: logits beside full precision", difference, _BFLOAT16_BOUND * scale)


def _largest(got: Any, want: Any) -> tuple[float, float]:
    """The largest absolute difference, NaN if any is, and the largest wanted value."""
    if isinstance(got, Tensor):
        got, want = [got], [want]
    pairs = [(a.double(), b.double()) for a, b in zip(got, want, strict=True)]
    differences = [float((a - b).abs().amax()) if a.numel() else 0.0 for a, b in pairs]
    return _max(differences), _max(float(b.abs().amax()) for _, b in pairs if b.numel())


def _max(values: Iterable[float]) -> float:
    found = list(values)
    return math.nan if any(math.isnan(value) for value in found) else max(found, default=0.0)
