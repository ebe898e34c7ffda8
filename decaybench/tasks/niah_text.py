"""Needle in a haystack (NIAH) on text, for language models: RULER's eight variants (arXiv 2404.06654).

A sample is the prompt of `text/needles.py`, behind a start token where one is asked for. The model continues it by at
most 128 tokens, greedily; a sample's score is the share of its answers that stand in what it wrote (RULER's
string_match_all, 0..1). It may end sooner: with the separator, or where all answers stand there already.

    length     start token, prompt and the 128 tokens, with fit=exact filled to within a sentence
    depth      of the needle asked first; a cell has the one asked for, in sentences, or RULER's own draw, and in its
               samples stands what was realised, in tokens
    distance   tokens from the end of a value's needle to the end of the prompt

For evaluation only. Keys and values depend on variant, seed and index alone: lengths, depths and fits are compared on
the same needles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

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
    Wanted,
    without_repeats,
)
from decaybench.tasks.reading import Sha256, Start, named_tokenizer, own_tokenizer, start_tokens, vocab_size
from decaybench.text.haystacks import Essay, builtin_essay, read_essay
from decaybench.text.lambada import file_stamp
from decaybench.text.needles import NEW_TOKENS, VARIANTS, VERSION, Fit, Needles, Sample, found_in
from decaybench.text.tokenizers import Tokenizer

Int64 = NDArray[np.int64]

_ALL = "all"


def _variant(name: str) -> str:
    if name not in VARIANTS:
        raise ValueError(str(unknown("NIAH variant", name, [*VARIANTS, _ALL])))
    return name


def _all_of(variants: Any) -> Any:
    return list(VARIANTS) if variants == _ALL or variants in ([_ALL], (_ALL,)) else variants


Variant = Annotated[str, AfterValidator(_variant)]


class NiahTextShape(Shape):
    """What one sample looks like."""

    variant: Variant = Field(description="RULER's name of what is hidden where, and asked")
    depth: float | None = Field(
        default=None, ge=0, le=1, description="depth of the needle asked first; none: RULER's draw"
    )


class NiahTextConfig(TaskConfig):
    """Which text hides the needles, read by which tokenizer; the sha256 of both are filled in."""

    paths: ClassVar[frozenset[str]] = frozenset({"tokenizer", "haystack"})
    found: ClassVar[frozenset[str]] = frozenset({"tokenizer_sha256", "vocab_size", "haystack_sha256"})

    name: Literal["niah-text"] = "niah-text"
    train_length: int = Field(default=1024, ge=2, le=2**31, description="the model's training length, tokens")
    tokenizer: str = Field(
        default="bytes", description="bytes, a tokenizer.json or its folder, or an RWKV vocabulary file"
    )
    tokenizer_sha256: Sha256 | None = Field(default=None, description="sha256 of the tokenizer; none: filled in")
    vocab_size: int | None = Field(default=None, ge=2, le=2**31, description="the tokenizer's ids; none: filled in")
    start: Start = Field(
        default="separator", description="token before each prompt: none, the tokenizer's separator, or an id (BOS, 0)"
    )
    haystack: str | None = Field(
        default=None,
        description="a text file, or a folder of .txt files, to hide needles in, in variants with an essay; none: the "
        "built-in text",
    )
    haystack_sha256: Sha256 | None = Field(
        default=None, description="sha256 of that text's sentences, of the built-in text's too; none: filled in"
    )
    fit: Fit = Field(
        default="exact",
        description="exact: as much haystack as fits; ruler: RULER's rule, by which some samples are far shorter",
    )

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, given: Any) -> Any:
        """What follows from the files, where they are here."""
        if not isinstance(given, Mapping):
            return given
        data = dict(given)
        if data.get("tokenizer_sha256") is None or data.get("vocab_size") is None:
            tokenizer = named_tokenizer(str(data.get("tokenizer") or "bytes"))
            data |= {"tokenizer_sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size}
        if data.get("haystack_sha256") is None:
            path = data.get("haystack")
            data["haystack_sha256"] = (builtin_essay() if path is None else _read_essay(str(path))).sha256
        return data


class NiahTextEvaluation(EvaluationConfig):
    """What is asked of a language model. RULER has 500 samples a cell."""

    variants: Annotated[
        tuple[Variant, ...], BeforeValidator(_all_of), AfterValidator(without_repeats), Field(min_length=1)
    ] = Field(default=("single_1",), description=f"{', '.join(VARIANTS)}; or all")
    depths: (
        Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], AfterValidator(without_repeats), Field(min_length=1)]
        | None
    ) = Field(
        default=None,
        description="depths of the needle asked first, 0 (the haystack's start) to 1, a cell each; none: RULER's draws",
    )


class NiahText(Task[NiahTextConfig, NiahTextShape, NiahTextEvaluation]):
    """NIAH on text: the share of a sample's answers that a model writes down."""

    name: ClassVar[str] = "niah-text"
    version: ClassVar[int] = VERSION
    metric: ClassVar[Metric] = "mean_accuracy"
    pads: ClassVar[bool] = True
    generates: ClassVar[bool] = True
    new_tokens: ClassVar[int] = NEW_TOKENS

    @property
    def vocab_size(self) -> int:
        """Tokens are integers in [0, vocab_size)."""
        return vocab_size(self.config.vocab_size, self.config.start)

    @property
    def tokenizer_sha256(self) -> str | None:
        """Of task.tokenizer."""
        return self.config.tokenizer_sha256

    def check(self, shape: NiahTextShape) -> None:
        """Raises UserError where not every sample fits, MissingDataError where a file is needed to know it."""
        self._needles(shape, 0)

    def stages(self) -> Sequence[Stage]:
        """Raises UserError: there are none."""
        raise UserError(
            "task niah-text is for evaluation only: name a model by --checkpoint, a run of `bench pretrain` for example"
        )

    def cells(self, evaluation: NiahTextEvaluation, lengths: Sequence[int]) -> list[Cell]:
        """A cell for each variant, length and depth asked for. Whether samples fit is seen by `ready`."""
        if self.config.haystack is not None and not any(map(_has_essay, evaluation.variants)):
            raise UserError(
                f"task.haystack={self.config.haystack} would be ignored: {', '.join(evaluation.variants)} hide no "
                f"needle in an essay; {', '.join(filter(_has_essay, VARIANTS))} do"
            )
        return [
            Cell(
                NiahTextShape(length=length, variant=variant, depth=depth),
                variant,
                {} if depth is None else {"depth": depth},
            )
            for variant in evaluation.variants
            for length in lengths
            for depth in evaluation.depths or (None,)
        ]

    def ready(self, cells: Sequence[Cell], samples: int) -> None:
        """Raises MissingDataError where tokenizer or haystack aren't here or are others, UserError on a length at which
        not every sample fits, with the smallest one.
        """
        for cell in cells:
            assert isinstance(cell.shape, NiahTextShape), "made by `cells`"
            self.check(cell.shape)

    def stop_ids(self) -> frozenset[int]:
        """The separator."""
        return frozenset({self._tokenizer.separator})

    def text_of(self, ids: Sequence[int]) -> str:
        """U+FFFD stands for bytes and ids that are no text; the separator has none."""
        return self._tokenizer.decode(ids)

    def found(self, text: str, answers: Sequence[str]) -> tuple[bool, ...]:
        """In any case, as in RULER."""
        return found_in(text, answers)

    def batch(self, shape: NiahTextShape, split: Split, seed: int, indices: Int64) -> Batch:
        """The samples with these indices, padded behind. Raises UserError where none of `shape` exists,
        MissingDataError.
        """
        needles = self._needles(shape, seed if split == "test" else key64("niah-text", split, seed))
        samples = [needles.sample(index, shape.depth) for index in indices.tolist()]
        start = self._start_tokens
        lengths = np.array([len(start) + len(sample.tokens) for sample in samples])
        columns = np.arange(lengths.max())
        tokens = np.zeros((len(samples), len(columns)), dtype=np.int64)
        for row, sample in enumerate(samples):
            tokens[row, : len(start)] = start
            tokens[row, len(start) : lengths[row]] = sample.tokens
        return Batch(
            tokens,
            np.full_like(tokens, IGNORED),
            np.zeros_like(tokens),
            {"depth": np.array([_depth(sample) for sample in samples])},
            np.where(columns < lengths[:, None], columns + 1, 0),
            tuple(_wanted(sample) for sample in samples),
        )

    def _origin(self, shape: NiahTextShape, split: Split, seed: int) -> list[Any]:
        name, version, rules, *rest = super()._origin(shape, split, seed)
        if not _has_essay(shape.variant):  # another haystack leaves these samples as they are
            rules = {key: rules[key] for key in rules if key != "haystack_sha256"}
        return [name, version, rules, *rest]

    def _needles(self, shape: NiahTextShape, seed: int) -> Needles:
        known = shape.variant, shape.length, seed
        if known not in self._made:
            self._made[known] = Needles(
                shape.variant,
                shape.length,
                self._tokenizer,
                seed=seed,
                essay=self._essay if _has_essay(shape.variant) else None,
                fit=self.config.fit,
                before=len(self._start_tokens),
            )
        return self._made[known]

    @cached_property
    def _made(self) -> dict[tuple[str, int, int], Needles]:
        return {}

    @cached_property
    def _start_tokens(self) -> tuple[int, ...]:
        return start_tokens(self.config.start, self._tokenizer)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return own_tokenizer(self.config.tokenizer, self.config.tokenizer_sha256 or "")

    @cached_property
    def _essay(self) -> Essay:
        path, wanted = self.config.haystack, self.config.haystack_sha256 or ""
        needs = f"the haystack {Path(path).name if path else 'built in'} (sha256 {wanted[:12]}…)"
        try:
            found = builtin_essay() if path is None else _read_essay(path)
        except UserError as error:
            raise MissingDataError(f"task.{error}", needs) from None
        if found.sha256 != wanted:
            what = f"task.haystack: {path or 'the built-in text'} has sha256 {found.sha256[:12]}…"
            raise MissingDataError(f"{what}, but {wanted[:12]}… is wanted", needs)
        return found


def _has_essay(variant: str) -> bool:
    return VARIANTS[variant].haystack == "essay"


def _wanted(sample: Sample) -> Wanted:
    distance = {needle.value: needle.distance for needle in sample.needles}
    return Wanted(sample.answers, tuple(distance[answer] for answer in sample.answers))


def _depth(sample: Sample) -> float:
    return next(needle.depth_in_tokens for needle in sample.needles if needle.value == sample.answers[0])


def _read_essay(path: str) -> Essay:
    """`read_essay`, once: files that were changed since are read again."""
    place = Path(path)
    files = sorted(place.glob("*.txt")) if place.is_dir() else [place]
    return _essay_of(path, tuple((file.name, file_stamp(file)) for file in files))


@lru_cache(maxsize=2)
def _essay_of(path: str, stamps: tuple[Any, ...]) -> Essay:
    """stamps: of its files, so that others of these names are read again."""
    return read_essay([Path(path)])
