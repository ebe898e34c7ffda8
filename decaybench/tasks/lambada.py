"""LAMBADA: is a passage's last word foreseen, alone and behind ever more unrelated text?

    passage      context + " " + last word; right where every token of the target is the model's first choice
    perplexity   exp(-mean over passages of the target's log-likelihood)

`openai` and `standard` are the published passages (text/lambada.py, arXiv 1606.06031), for evaluation only; `synthetic`
are built-in stories (text/stories.py), on which a small model can be trained. Variants of a cell:

    plain     the passage alone; rows differ in length, and the cell's is the longest possible
    before    unrelated passages before it, the first of them cut so that `length` tokens are read
    between   stories only: other stories between what is told and the last sentence, as many as fit

A passage's own tokens are the same at every length, and a longer row holds the unrelated passages of a shorter one and
more. None of them holds the passage's last word, or any key or value of a story's. Distance: from the last token of the
answer where it was told (in a published passage where it stands last, if it does) to where its last token is asked.

A model is trained on stories in a row, whose pairs are asked behind them (tasks/lambada_texts.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, model_validator

from decaybench.core.draws import Draws
from decaybench.core.errors import UserError
from decaybench.core.hashing import key64, without_absent
from decaybench.core.scoring import Metric
from decaybench.tasks.base import (
    Batch,
    Cell,
    EvaluationConfig,
    MissingDataError,
    Shape,
    Split,
    Stage,
    Task,
    TaskConfig,
    doubling_lengths,
    without_repeats,
)
from decaybench.tasks.lambada_rows import PassageRows, StoryRows, Variant, evaluation_batch
from decaybench.tasks.lambada_texts import TrainingTexts
from decaybench.tasks.reading import Sha256, Start, named_tokenizer, own_tokenizer, start_tokens, vocab_size
from decaybench.text.lambada import PUBLISHED, Passages, read_passages
from decaybench.text.stories import MOST_PAIRS, word_tokenizer
from decaybench.text.tokenizers import Tokenizer

Source = Literal["synthetic", "openai", "standard"]
Form = Literal["plain", "before", "between", "training"]

_OF_FILE = ("data_sha256", "passages", "longest")  # what is filled in of passages
_WORDS = "words"
_PAIRS = 4  # of an evaluated story
_EASY = 2  # pairs of a story in the first stages
_SHORTEST = 64  # tokens of a text in the first stage


class LambadaShape(Shape):
    """What one sample looks like."""

    form: Form = Field(description="a variant of the evaluation, or a training text")
    pairs: int | None = Field(
        default=None,
        ge=2,
        le=MOST_PAIRS,
        description="pairs in a story, in a training text at most; none: published passages have none",
    )


class LambadaStage(Stage):
    """One stage of a training plan on stories."""

    shape: LambadaShape


class LambadaConfig(TaskConfig):
    """Which passages, read by which tokenizer; the sha256 of both and the vocabulary's size are filled in."""

    paths: ClassVar[frozenset[str]] = frozenset({"file", "tokenizer"})
    found: ClassVar[frozenset[str]] = frozenset({*_OF_FILE, "tokenizer_sha256", "vocab_size"})

    name: Literal["lambada"] = "lambada"
    train_length: int = Field(default=128, ge=2, le=2**31, description="longest training length, tokens")
    source: Source = Field(
        default="synthetic",
        description="built-in stories (synthetic), or LAMBADA's passages: cased (openai) or lower-cased (standard)",
    )
    file: str | None = Field(
        default=None, description="the passages: .jsonl, .parquet, .txt, or hf://NAME:CONFIG:SPLIT; none: stories"
    )
    data_sha256: Sha256 | None = Field(default=None, description="sha256 of the passages in file; none: filled in")
    tokenizer: str | None = Field(
        default=None,
        description="words (the stories' own), bytes, a tokenizer.json or its folder, or an RWKV vocabulary file; "
        "none: words for stories, else bytes",
    )
    tokenizer_sha256: Sha256 | None = Field(default=None, description="sha256 of the tokenizer; none: filled in")
    vocab_size: int | None = Field(default=None, ge=2, le=2**31, description="the tokenizer's ids; none: filled in")
    passages: int | None = Field(default=None, ge=1, description="passages in file; none: filled in")
    longest: int | None = Field(
        default=None, ge=1, le=2**31, description="tokens of the longest passage in file; none: filled in"
    )
    start: Start = Field(
        default="none", description="token before each row: none, the tokenizer's separator, or an id (BOS, 0)"
    )
    pairs: int | None = Field(
        default=None,
        ge=2,
        le=MOST_PAIRS,
        description="pairs in an evaluated story, of which one is asked; none: 4",
    )
    stages: tuple[LambadaStage, ...] | None = Field(
        default=None, min_length=1, description="training plan on stories; none: a curriculum up to train_length"
    )

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, data: Any) -> Any:
        """What follows from the source, and from the files where they are here."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        synthetic = data.get("source", "synthetic") == "synthetic"
        if data.get("tokenizer") is None:
            data["tokenizer"] = _WORDS if synthetic else "bytes"
        if data.get("tokenizer_sha256") is None or data.get("vocab_size") is None:
            tokenizer = _tokenizer(str(data["tokenizer"]))
            data |= {"tokenizer_sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size}
        known = synthetic or all(data.get(key) is not None for key in _OF_FILE)
        variant = next((name for name in PUBLISHED if name == data.get("source")), None)
        if not known and variant and isinstance(data.get("file"), str):
            found = read_passages(variant, data["file"])
            longest = PassageRows(found, _tokenizer(str(data["tokenizer"])), ()).smallest
            data |= {"data_sha256": found.sha256, "passages": len(found.texts), "longest": longest}
        return data

    @model_validator(mode="after")
    def _fits_its_source(self) -> LambadaConfig:
        if self.source == "synthetic":
            given = next((key for key in ("file", *_OF_FILE) if getattr(self, key) is not None), None)
            if given:
                raise ValueError(f"{given} is for source openai or standard; synthetic stories are built in")
            return self
        if self.tokenizer_sha256 == word_tokenizer().sha256:
            raise ValueError(
                f"tokenizer=words knows the words of the stories only; source={self.source} takes the tokenizer of the "
                "model: bytes, or a path"
            )
        if any(getattr(self, key) is None for key in _OF_FILE):
            raise ValueError(
                f"source={self.source} needs file: the path of its passages, or hf://NAME:CONFIG:SPLIT of the hub"
            )
        if self.pairs is not None:
            raise ValueError("pairs is for source synthetic; with published passages leave it out (task.pairs=null)")
        return self

    @property
    def story_pairs(self) -> int | None:
        """Pairs in an evaluated story; None: published passages have none."""
        return (self.pairs or _PAIRS) if self.source == "synthetic" else None


class LambadaEvaluation(EvaluationConfig):
    """What is asked of a model."""

    variants: Annotated[tuple[Variant, ...], AfterValidator(without_repeats)] = Field(
        default=("plain", "before"),
        min_length=1,
        description="plain: passages alone; before: unrelated ones before them; between: within stories",
    )

    @property
    def ignored(self) -> dict[str, str]:
        """Lengths where passages are read alone."""
        return {} if {*self.variants} - {"plain"} else {"lengths": "variant plain reads each passage alone"}


class Lambada(Task[LambadaConfig, LambadaShape, LambadaEvaluation]):
    """LAMBADA's passages, or stories of its kind: 1 where all of the last word is foreseen."""

    name: ClassVar[str] = "lambada"
    version: ClassVar[int] = 1  # goes up when any sample changes
    metric: ClassVar[Metric] = "all_correct"
    likelihood: ClassVar[bool] = True

    @property
    def vocab_size(self) -> int:
        """Tokens are integers in [0, vocab_size)."""
        return vocab_size(self.config.vocab_size, self.config.start)

    @property
    def tokenizer_sha256(self) -> str | None:
        """Of task.tokenizer."""
        return self.config.tokenizer_sha256

    def token_classes(self) -> dict[str, range]:
        """With the stories' own tokenizer: names, and the things and places that can be an answer."""
        if self.config.tokenizer_sha256 != word_tokenizer().sha256:
            return {}
        ranges = word_tokenizer().ranges
        return {"name": ranges["names"], "value": range(ranges["things"].start, ranges["places"].stop)}

    def references(self, batch: Batch) -> dict[str, NDArray[np.float64]]:
        """Of stories: what a guess among the story's values gets right."""
        pairs = self.config.story_pairs
        return {} if pairs is None else {"guess": np.full(len(batch.tokens), 1 / pairs)}

    def evaluation_defaults(self) -> dict[str, Any]:
        """Stories in all variants. All passages, each alone: behind other text at all lengths they are fifty times as
        much to read.
        """
        if self.config.passages is None:
            return {"variants": list(get_args(Variant))}
        return {"samples": self.config.passages, "variants": ["plain"]}

    def remarks(self, cells: Sequence[Cell]) -> list[str]:
        """What was wrong with the file, and where its passages aren't the published test set."""
        if self.config.source == "synthetic":
            return []
        found = self._passages
        said = list(found.problems)
        if found.sha256 != PUBLISHED[self.config.source]:
            what = f"these {len(found.texts):,} passages aren't the published test set of LAMBADA {self.config.source}"
            said.append(what)
        if all(cell.variant == "plain" for cell in cells):
            said.append("each passage is read alone; --variants plain,before reads it behind unrelated ones too")
        return said

    def ready(self, cells: Sequence[Cell], samples: int) -> None:
        """Raises UserError where more passages are asked for than there are, MissingDataError where they or the
        tokenizer aren't here, or are others.
        """
        if self.config.passages is not None and samples > self.config.passages:
            raise UserError(f"evaluation.samples={samples} is more than there are passages: {self.config.passages}")
        self._tokenizer  # noqa: B018
        if self.config.source != "synthetic":
            self._passages  # noqa: B018

    def check(self, shape: LambadaShape) -> None:
        """Raises UserError where no sample of `shape` exists, or where one might be longer."""
        if (shape.pairs is not None) != (self.config.source == "synthetic"):
            raise UserError(f"lambada pairs={shape.pairs} doesn't go with source {self.config.source}")
        if shape.pairs is None and shape.form in ("between", "training"):
            raise UserError(
                f"evaluation.variants: {shape.form} is for stories (source synthetic); the passages of "
                f"{self.config.source} have plain and before"
            )
        smallest = self._smallest(shape.pairs)
        if shape.length < smallest:
            flag = "--train-length" if shape.form == "training" else "--eval-lengths"
            raise UserError(
                f"lambada length={shape.length} is too short for the longest sample of {shape.form}: the smallest "
                f"length is {smallest} ({flag})"
            )

    def stages(self) -> Sequence[LambadaStage]:
        """The configured plan, or a curriculum of growing lengths and numbers of pairs. Raises UserError for files."""
        if self.config.source != "synthetic":
            raise UserError(
                f"task.source={self.config.source} is for evaluation only: name a model by --checkpoint, or train on "
                "stories (source synthetic)"
            )
        stages = self.config.stages or self._curriculum()
        for stage in stages:
            self.check_length(stage)
            if stage.shape.form != "training":
                raise UserError(f"task.stages: form={stage.shape.form} is for evaluation; a stage has form=training")
            self.check(stage.shape)
        return stages

    def cells(self, evaluation: LambadaEvaluation, lengths: Sequence[int]) -> list[Cell]:
        """A cell for plain passages, and one for each length of the other variants."""
        cells, pairs = [], self.config.story_pairs
        for variant in evaluation.variants:
            for length in [self._smallest(pairs)] if variant == "plain" else lengths:
                shape = LambadaShape(length=length, form=variant, pairs=pairs)
                self.check(shape)
                cells.append(Cell(shape, variant, {}))
        return cells

    def batch(self, shape: LambadaShape, split: Split, seed: int, indices: NDArray[np.int64]) -> Batch:
        """The samples with these indices. Raises UserError where none of `shape` exists, MissingDataError."""
        if shape.form == "training":
            return super().batch(shape, split, seed, indices)
        self.check(shape)
        # Without the shape: a sample is the same passage at every length, with the same unrelated ones and more.
        key = key64(self.name, self.version, without_absent(self.rules()), split, seed)
        if shape.pairs is not None:
            rows = self._story_rows.rows(shape.form, shape.pairs, shape.length, key, indices)
        else:
            rows = self._passage_rows.rows(shape.form, shape.length, key, indices)
        return evaluation_batch(rows, shape.length)

    def _sample(self, shape: LambadaShape, draws: Draws) -> Batch:
        assert shape.pairs is not None, "checked"
        return TrainingTexts(self._tokenizer, self._start_tokens).batch(shape.pairs, shape.length, draws)

    def _smallest(self, pairs: int | None) -> int:
        if pairs is not None:
            return self._story_rows.smallest(pairs)
        return (self.config.start != "none") + (self.config.longest or 1)

    def _curriculum(self) -> tuple[LambadaStage, ...]:
        """Lengths 64, 128, ... up to train_length where stories of two pairs fit; then those of the evaluated ones."""
        T, pairs = self.config.train_length, self.config.story_pairs or _PAIRS
        lengths = [n for n in doubling_lengths(T) if n == T or n >= max(_SHORTEST, self._smallest(_EASY))]
        sizes = [(n, _EASY) for n in lengths] + [(n, pairs) for n in lengths[-1:]]
        return tuple(
            LambadaStage(shape=LambadaShape(length=length, form="training", pairs=count))
            for length, count in dict.fromkeys(sizes)
        )

    @cached_property
    def _story_rows(self) -> StoryRows:
        return StoryRows(self._tokenizer, self._start_tokens)

    @cached_property
    def _passage_rows(self) -> PassageRows:
        return PassageRows(self._passages, self._tokenizer, self._start_tokens)

    @cached_property
    def _start_tokens(self) -> tuple[int, ...]:
        return start_tokens(self.config.start, self._tokenizer)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return own_tokenizer(self.config.tokenizer or "", self.config.tokenizer_sha256 or "", _tokenizer)

    @cached_property
    def _passages(self) -> Passages:
        file, wanted = self.config.file, self.config.data_sha256 or ""
        needs = f"{Path(file or 'passages').name} (sha256 {wanted[:12]}…)"
        if file is None or self.config.source == "synthetic":
            raise MissingDataError("task.file is missing: where do the passages lie?", needs)
        try:
            found = read_passages(self.config.source, file)
        except UserError as error:
            raise MissingDataError(str(error), needs) from None
        if found.sha256 != wanted:
            what = f"task.file: the passages of {file} have sha256 {found.sha256[:12]}…, but {wanted[:12]}… is wanted"
            raise MissingDataError(what, needs)
        return found


def _tokenizer(spec: str) -> Tokenizer:
    return word_tokenizer() if spec == _WORDS else named_tokenizer(spec)
