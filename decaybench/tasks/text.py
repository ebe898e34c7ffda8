"""Running text: windows of a folder of token shards (`bench data prepare`), to train language models on and to score.

A sample is a window of T tokens, and what is asked at each of them is the token that follows:

    tokens = ids[s : s + T]    labels = ids[s + 1 : s + T + 1]

Training sample i is the window at s = offset + T permuted(i mod n), of the n windows of epoch i // n: the offset, in
[0, T), and the permutation are drawn anew for each epoch, the latter as a Feistel network over the numbers of the
windows (Luby and Rackoff, 1988), so that no list of them is kept. Evaluation takes the windows of the validation
documents from s = 0, in an order drawn from the seed.

Positions start at 1 with the window, and with every separator in it: the separator ends a document for the token before
it, which has to foresee it, and for what follows it is the one token that says that a text begins. `reset: false` lets
positions run on through the window, as PoST's training does (arXiv 2604.07658).

With `mix`, a share of the training batches are needle-in-a-haystack passages (text.needles), one a row, with the
answers written out: a small model that never saw one can't be asked for one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from decaybench.core.config import Config
from decaybench.core.draws import philox4x32
from decaybench.core.errors import UserError
from decaybench.core.hashing import key64
from decaybench.core.names import unknown
from decaybench.core.scoring import Metric
from decaybench.tasks.base import (
    IGNORED,
    Batch,
    Cell,
    EvaluationConfig,
    MissingDataError,
    Shape,
    Split,
    Stage,
    Task,
    TaskConfig,
    without_repeats,
)
from decaybench.text.needles import NEW_TOKENS, VARIANTS, Needles
from decaybench.text.shards import TokenShards, read_manifest
from decaybench.text.tokenizers import Tokenizer

Int64 = NDArray[np.int64]

_ROUNDS = 6  # of the Feistel network
_OFFSET = _ROUNDS  # the draw after those of its rounds
_LOW = 0xFFFFFFFF
_LONG = 1 << 20  # tokens: room for the needles of every variant
_NO_DATA = "task.data is missing: name a folder made by `bench data prepare` (bench pretrain --data DIR)"
_VALUE = {"numbers": 7, "uuids": 36}  # characters of a needle's value; no token is shorter than one


class Mix(Config):
    """What else is trained on: passages of the task `niah-text`."""

    task: Literal["niah-text"] = Field(default="niah-text", description="what the passages are of")
    share: float = Field(gt=0, lt=1, description="share of the training batches that are passages")
    variants: tuple[str, ...] = Field(
        default=("single_1",), min_length=1, description=f"which needles, in turn: {', '.join(VARIANTS)}"
    )

    @field_validator("variants")
    @classmethod
    def _known(cls, variants: tuple[str, ...]) -> tuple[str, ...]:
        for variant in variants:
            if variant not in VARIANTS:
                raise ValueError(str(unknown("NIAH variant", variant, VARIANTS)))
        return without_repeats(variants)


def mix_of(text: str) -> dict[str, Any]:
    """`niah-text:0.2` as data of a `Mix`. Raises ValueError."""
    task, _, share = text.partition(":")
    try:
        return {"task": task.strip(), "share": float(share)}
    except ValueError:
        raise ValueError("write a task and its share of the batches, niah-text:0.2") from None


class TextShape(Shape):
    """A window of text, or a passage."""

    passage: bool | None = Field(default=None, description="whether samples are passages of the mix; none: windows")


class TextStage(Stage):
    """A stage whose samples are windows or passages."""

    shape: TextShape


class TextConfig(TaskConfig):
    """Running text's data, and how it is cut."""

    paths: ClassVar[frozenset[str]] = frozenset({"data"})
    found: ClassVar[frozenset[str]] = frozenset({"data_sha256", "tokenizer_sha256", "vocab_size"})

    name: Literal["text"] = "text"
    train_length: int = Field(default=1024, ge=2, le=2**31, description="tokens of a training window, the context")
    data: str | None = Field(default=None, description="folder of token shards, made by `bench data prepare`")
    data_sha256: str | None = Field(
        default=None, pattern="^[0-9a-f]{64}$", description="of its tokens; none: filled in from the folder"
    )
    tokenizer_sha256: str | None = Field(
        default=None, pattern="^[0-9a-f]{64}$", description="of its tokenizer; none: filled in from the folder"
    )
    vocab_size: int | None = Field(
        default=None, ge=2, description="ids of its tokenizer; none: filled in from the folder"
    )
    reset: bool = Field(default=True, description="whether positions start anew with each document of a window")
    mix: Mix | None = Field(default=None, description="share of other passages in training, niah-text:0.2; none: none")

    @field_validator("mix", mode="before")
    @classmethod
    def _from_text(cls, mix: Any) -> Any:
        """niah-text:0.2 as the command line has it."""
        return mix_of(mix) if isinstance(mix, str) else mix

    @model_validator(mode="before")
    @classmethod
    def _from_folder(cls, given: Any) -> Any:
        """Fill in what is told by the folder's manifest, once: what is there already is what the run was begun with."""
        if not isinstance(given, Mapping) or given.get("data_sha256") is not None or given.get("data") is None:
            return given
        manifest = read_manifest(Path(str(given["data"])))
        return {
            **given,
            "data_sha256": manifest.sha256,
            "tokenizer_sha256": manifest.tokenizer.sha256,
            "vocab_size": manifest.tokenizer.vocab_size,
        }


class TextEvaluation(EvaluationConfig):
    """What is asked: windows of the validation documents, of several lengths."""


class Text(Task[TextConfig, TextShape, TextEvaluation]):
    """The task. A sample is a window; see the module's docstring."""

    name: ClassVar[str] = "text"
    version: ClassVar[int] = 1
    metric: ClassVar[Metric] = "mean_accuracy"
    likelihood: ClassVar[bool] = True
    running_text: ClassVar[bool] = True
    plan: ClassVar[Literal["mastery", "mix"]] = "mix"

    @property
    def pads(self) -> bool:  # type: ignore[override]
        """Passages aren't as long as windows."""
        return self.config.mix is not None

    @property
    def vocab_size(self) -> int:
        """Raises UserError where there are no data to know it from."""
        if self.config.vocab_size is None:
            raise UserError(_NO_DATA)
        return self.config.vocab_size

    @property
    def tokenizer_sha256(self) -> str | None:
        """Of the tokenizer that the folder was made with."""
        return self.config.tokenizer_sha256

    def check(self, shape: TextShape) -> None:
        """Every length can be asked for; whether there is so much text is seen where the folder is opened."""

    def stages(self) -> Sequence[Stage]:
        length, mix = self.config.train_length, self.config.mix
        windows = TextStage(shape=TextShape(length=length), share=1.0 if mix is None else 1.0 - mix.share)
        if mix is None:
            return [windows]
        return [windows, TextStage(shape=TextShape(length=length, passage=True), share=mix.share)]

    def cells(self, evaluation: TextEvaluation, lengths: Sequence[int]) -> list[Cell]:
        return [Cell(TextShape(length=length), "validation", {}) for length in lengths]

    def ready(self, cells: Sequence[Cell], samples: int) -> None:
        for cell in cells:
            found = self._windows("test", cell.shape.length)
            if found < samples:
                raise UserError(
                    f"{self.config.data} has {found} validation windows of {cell.shape.length} tokens, fewer than "
                    f"evaluation.samples={samples}; ask for fewer or shorter ones, or prepare it with more validation"
                )
        if self.config.mix is not None:
            self._passages(np.arange(1), 0)

    def remarks(self, cells: Sequence[Cell]) -> list[str]:
        splits = self._shards("test").manifest.splits.items()
        return [f"{self.config.data}: {', '.join(f'{split.tokens:,} {name} tokens' for name, split in splits)}"]

    def byte_lengths(self) -> Int64:
        return self._byte_lengths

    def rules(self) -> dict[str, Any]:
        """What windows are a function of: models trained with another mix are asked the same."""
        known = self.config.identity()
        return {key: known[key] for key in ("data_sha256", "reset")}

    def batch(self, shape: TextShape, split: Split, seed: int, indices: Int64) -> Batch:
        """Raises MissingDataError where the folder isn't here, UserError where it has no such window."""
        if shape.passage:
            return self._passages(indices, seed)
        shards, T = self._shards(split), shape.length
        starts = self._starts(shape, split, seed, indices)
        ids = np.stack([shards.tokens(start, start + T + 1) for start in starts.tolist()]).astype(np.int64)
        return self._batch(ids[:, :-1], ids[:, 1:])

    def _starts(self, shape: TextShape, split: Split, seed: int, indices: Int64) -> Int64:
        """Where windows start, in tokens of the split."""
        T, key = shape.length, key64("windows", *self._origin(shape, split, seed))
        count, total = self._windows(split, T), len(self._shards(split))
        if not count:
            raise UserError(f"{self.config.data} has {total} {_place(split)} tokens, not enough for a window of {T}")
        epochs, places = np.divmod(indices, count)
        if split != "train":
            if epochs.any():
                raise UserError(f"{self.config.data} has {count} validation windows of {T} tokens, no {max(indices)}")
            return T * permuted(places, count, key)
        slack = min(T, total - T * count)  # windows and the label after the last fit behind every smaller offset
        words = _words(key, np.zeros_like(places), _OFFSET, epochs)
        offsets = (words.astype(np.uint64) * np.uint64(slack) >> np.uint64(32)).astype(np.int64)
        return offsets + T * permuted(places, count, key, epochs)

    def _windows(self, split: Split, length: int) -> int:
        """How many windows there are; in training in every epoch, whatever its offset."""
        total = len(self._shards(split))
        if split == "train":
            return max((total - length) // length, int(total > length))
        return (total - 1) // length

    def _batch(self, tokens: Int64, labels: Int64, lengths: Int64 | None = None) -> Batch:
        """tokens, labels: [B, T]; lengths: [B], how much of a row is real, all of it by default."""
        T = tokens.shape[1]
        columns = np.arange(T)
        starts = np.zeros_like(tokens)
        if self.config.reset:
            starts = np.maximum.accumulate(np.where(tokens == self._separator, columns, 0), axis=1)
        positions = columns - starts + 1
        if lengths is not None:
            padding = columns >= lengths[:, None]
            tokens, positions = np.where(padding, 0, tokens), np.where(padding, 0, positions)
            labels = np.where(padding, IGNORED, labels)
        return Batch(tokens, labels, np.zeros_like(tokens), positions=positions)

    def _passages(self, indices: Int64, seed: int) -> Batch:
        """A passage a row, as a document of its own: separator, prompt, answers, separator."""
        mix, T, separator = self.config.mix, self.config.train_length, self._separator
        assert mix is not None, "stages have passages only where there is a mix"
        key = key64("passages", seed)  # no evaluation has needles of such a seed
        ids, lengths = np.full((len(indices), T + 1), separator), np.zeros(len(indices), dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            number, place = divmod(index, len(mix.variants))
            sample = self._needles(mix.variants[place], key).sample(number)
            answer = self._tokenizer.encode(f" {', '.join(sample.answers)}.")
            lengths[row] = 1 + len(sample.tokens) + len(answer)
            ids[row, 1 : lengths[row]] = [*sample.tokens.tolist(), *answer]
        return self._batch(ids[:, :-1], ids[:, 1:], lengths)

    def _needles(self, variant: str, seed: int) -> Needles:
        known = (variant, seed)
        if known not in self._made:
            form, T = VARIANTS[variant], self.config.train_length
            # The separator; ", " or " " before each value, and "." at the end.
            rest = 1 + form.queries * form.values * (_VALUE[form.value] + 2)
            needed = Needles(variant, _LONG, self._tokenizer, seed=seed).smallest_length - NEW_TOKENS + rest
            if needed > T:
                raise UserError(
                    f"task.mix: with the tokenizer {self._tokenizer.name}, passages of {variant} take {needed} tokens, "
                    f"more than task.train_length={T}"
                )
            self._made[known] = Needles(variant, T - rest + NEW_TOKENS, self._tokenizer, seed=seed)
        return self._made[known]

    @cached_property
    def _made(self) -> dict[tuple[str, int], Needles]:
        return {}

    @cached_property
    def _byte_lengths(self) -> Int64:
        return self._tokenizer.byte_lengths()

    @cached_property
    def _separator(self) -> int:
        return self._shards("test").manifest.tokenizer.separator

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._shards("test").tokenizer()

    def _shards(self, split: Split) -> TokenShards:
        """The shards of a split; validation and test are the validation documents."""
        place = _place(split)
        if place not in self._opened:
            self._opened[place] = self._open(place)
        return self._opened[place]

    @cached_property
    def _opened(self) -> dict[str, TokenShards]:
        return {}

    def _open(self, place: str) -> TokenShards:
        config = self.config
        needs = f"{config.data or 'data'}, tokens of sha256 {(config.data_sha256 or '?')[:12]}"
        if config.data is None:
            raise MissingDataError(_NO_DATA, needs)
        try:
            shards = TokenShards(Path(config.data), place)
        except UserError as error:
            raise MissingDataError(f"task.data: {error}", needs) from None
        if shards.manifest.sha256 != config.data_sha256:
            raise MissingDataError(
                f"task.data={config.data} holds other tokens (sha256 {shards.manifest.sha256[:12]}) than "
                f"task.data_sha256={str(config.data_sha256)[:12]} says",
                needs,
            )
        return shards


def permuted(places: Int64, count: int, key: int, epochs: Int64 | int = 0) -> Int64:
    """Where a random order of 0..count-1 puts these places, [n]; another order for each key and epoch (scalar or [n]).

    A Feistel network over the next even number of bits, and where that leads out of the range, again.
    """
    half = max(1, -(-(count - 1).bit_length() // 2))
    mask = np.int64((1 << half) - 1)
    epochs = np.broadcast_to(np.asarray(epochs, dtype=np.int64), places.shape)
    found, outside = places.copy(), np.ones(len(places), dtype=bool)
    while outside.any():
        left, right = found[outside] >> half, found[outside] & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_words(key, right, number, epochs[outside]).astype(np.int64) & mask)
        found[outside] = left << half | right
        outside[outside] = found[outside] >= count
    return found


def _words(key: int, places: Int64, number: int, epochs: Int64) -> NDArray[np.uint32]:
    """A 32-bit word for each place of a round and an epoch, [n]."""
    counter = (places, np.full_like(places, number), epochs & _LOW, epochs >> 32)
    c0, c1, c2, c3 = (part.astype(np.uint32) for part in counter)
    return philox4x32((c0, c1, c2, c3), (key & _LOW, key >> 32))[..., 0]


def _place(split: Split) -> str:
    return "train" if split == "train" else "validation"
