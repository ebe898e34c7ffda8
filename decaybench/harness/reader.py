"""A language model that is asked about text: how likely is a text after another, and what follows it.

    Continuation   log p(text | context), and whether each of its tokens is the model's first choice
    Document       log p(text) of all of it, whatever its length
    Prompt         what the model writes after a text, greedily, up to a stop string or a number of tokens

Context and continuation are tokenised as lm-eval does (text.lambada.encode_pairs). Nothing is cut: long texts are read
in pieces through the state. `start` stands before every row; a document, and a text after nothing, starts with the
separator where there is no other start, because a model foresees nothing before its first token.

Requests are answered longest first in batches of about the same length. The batches are a function of the requests and
of the settings, so that work taken up again computes what uninterrupted work does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from decaybench.core.errors import RunError, UserError
from decaybench.harness.generation import greedy
from decaybench.harness.training import matmul_dtype
from decaybench.models.checkpoints import Checkpoint
from decaybench.models.language_model import LanguageModel
from decaybench.tasks.base import IGNORED
from decaybench.tasks.reading import named_tokenizer, start_tokens, vocab_size
from decaybench.text.lambada import encode_pairs
from decaybench.text.tokenizers import Tokenizer, to_bytes

Ids = NDArray[np.uint32]

_PIECE = 4096  # tokens of a row that are read at once
_BLOCK = 1 << 20  # characters whose tokens are held at once


@dataclass(frozen=True)
class Continuation:
    """How likely is `text` after `context`?"""

    context: str
    text: str

    @property
    def size(self) -> int:
        """Characters."""
        return len(self.context) + len(self.text)

    @property
    def asks(self) -> bool:
        """Whether there is anything to foresee: white space at the context's end belongs to the text."""
        return bool(self.text) or self.context[-1:].isspace()


@dataclass(frozen=True)
class Document:
    """How likely is a text?"""

    text: str

    @property
    def size(self) -> int:
        """Characters."""
        return len(self.text)


@dataclass(frozen=True)
class Prompt:
    """What follows `text`: at most `new_tokens` tokens, and nothing from the first of the texts `until` on."""

    text: str
    until: tuple[str, ...]
    new_tokens: int

    @property
    def size(self) -> int:
        """Characters."""
        return len(self.text)


Request = Continuation | Document | Prompt


class Answer(NamedTuple):
    """tokens: that were read. log_likelihood (nats) and greedy (whether each token is the first choice): of a
    Continuation or Document; text: what was written after a Prompt.
    """

    tokens: int
    log_likelihood: float | None = None
    greedy: bool | None = None
    text: str | None = None


class _Row(NamedTuple):
    """What is read before a target, and the target: empty for a prompt."""

    context: Ids
    target: Ids

    @property
    def length(self) -> int:
        """Tokens that are read: all but the target's last."""
        return len(self.context) + max(0, len(self.target) - 1)


class Reader:
    """A model with its tokenizer.

    batch_tokens: rows times the longest of them, of a batch; batch_rows: most rows of one; start: none, separator or a
    token's id; dtype: of matrix products, float32 or bfloat16.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        device: str,
        batch_tokens: int = 16_384,
        batch_rows: int | None = None,
        start: int | str = "none",
        dtype: str = "float32",
    ) -> None:
        self.model, self.tokenizer, self.device, self.dtype = model.eval(), tokenizer, device, dtype
        self._batch_tokens, self._batch_rows = batch_tokens, batch_rows
        self._rows = _Rows(tokenizer, start)

    def answers(self, requests: Sequence[Request], known: Collection[int] = ()) -> Iterator[list[tuple[int, Answer]]]:
        """(index, answer) of the requests, a batch at a time; of those `known` only where a batch holds others too.

        Raises RunError where the model gives no number.
        """
        for writes in (False, True):
            own = [index for index, asked in enumerate(requests) if isinstance(asked, Prompt) == writes]
            for block in _blocks(sorted(own, key=lambda index: (-requests[index].size, index)), requests):
                if all(index in known for index in block):
                    continue
                rows = dict(zip(block, self._rows([requests[index] for index in block]), strict=True))
                for batch in self._batches(rows):
                    if not all(index in known for index in batch):
                        answers = self._answer([requests[index] for index in batch], [rows[index] for index in batch])
                        yield list(zip(batch, answers, strict=True))

    def _batches(self, rows: dict[int, _Row]) -> Iterator[list[int]]:
        batch: list[int] = []
        longest = 0
        for index in sorted(rows, key=lambda index: (-rows[index].length, index)):
            full = (len(batch) + 1) * longest > self._batch_tokens or len(batch) == self._batch_rows
            if batch and full:
                yield batch
                batch = []
            longest = longest if batch else rows[index].length
            batch.append(index)
        if batch:
            yield batch

    def _answer(self, requests: Sequence[Request], rows: Sequence[_Row]) -> list[Answer]:
        prompts = [asked for asked in requests if isinstance(asked, Prompt)]
        with matmul_dtype(self.dtype, self.device):
            return self._written(prompts, rows) if prompts else self._scored(rows)

    @torch.no_grad()
    def _scored(self, rows: Sequence[_Row]) -> list[Answer]:
        """Log-likelihoods of targets, piece by piece: memory depends on a piece, not on the rows."""
        nats = torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        wrong = torch.zeros(len(rows), dtype=torch.long, device=self.device)
        state = None
        longest = max(row.length for row in rows)
        for start in range(0, longest, _PIECE):
            columns = range(start, min(start + _PIECE, longest))
            tokens, labels, positions = (torch.from_numpy(part).to(self.device) for part in _piece(rows, columns))
            more = columns.stop < longest
            scores = self.model.score(tokens, labels, positions, state, output_state=more)
            asked, state = labels != IGNORED, scores.state
            row = asked.nonzero()[:, 0]
            nats.index_add_(0, row, scores.nats.double())
            wrong.index_add_(0, row, (scores.first != labels[asked]).long())
        answers = []
        for row_, lost, missed in zip(rows, nats.tolist(), wrong.tolist(), strict=True):
            if not isfinite(lost):
                raise RunError(f"the model's log-likelihood of a text is {-lost}, not a number")
            answers.append(Answer(row_.length, min(0.0, -lost), missed == 0))
        return answers

    def _written(self, prompts: Sequence[Prompt], rows: Sequence[_Row]) -> list[Answer]:
        ended = [_Ended(prompt.until, self.tokenizer.decode) for prompt in prompts]
        found = greedy(
            self.model,
            [row.context.astype(np.int64) for row in rows],
            [prompt.new_tokens for prompt in prompts],
            device=self.device,
            stop_ids=frozenset({self.tokenizer.separator}),
            finished=lambda row, ids: ended[row](ids),
        )
        return [
            Answer(row.length, text=before_stops(self.tokenizer.decode(ids), prompt.until))
            for prompt, row, ids in zip(prompts, rows, found, strict=True)
        ]


def tokens_read(requests: Sequence[Request], tokenizer: Tokenizer, start: int | str) -> list[int]:
    """The tokens that are read for each request."""
    rows = _Rows(tokenizer, start)
    blocks = _blocks(range(len(requests)), requests)
    return [row.length for block in blocks for row in rows([requests[index] for index in block])]


def tokenizer_of(checkpoint: Checkpoint, spec: str | None, start: int | str = "none") -> Tokenizer:
    """The tokenizer that a checkpoint's model is asked by; spec: as the user names it, None: nothing was said.

    Raises UserError where it isn't known, or isn't the one that the model was trained with, or has more ids.
    """
    learned = checkpoint.facts.get("tokenizer_sha256")
    if learned is None and spec is None:
        raise UserError(
            f"checkpoint {checkpoint.folder} doesn't say what it reads text by (a model of bench mqar or niah reads "
            "none): name its tokenizer by --tokenizer"
        )
    tokenizer = named_tokenizer(spec or "bytes")
    if learned is not None and learned != tokenizer.sha256:
        raise UserError(
            f"checkpoint {checkpoint.folder} was trained with another tokenizer (sha256 {str(learned)[:12]}…) than "
            f"{spec or 'bytes'} ({tokenizer.sha256[:12]}…): name its own by --tokenizer"
        )
    wanted, has = vocab_size(tokenizer.vocab_size, start), checkpoint.config.vocab_size
    if has < wanted:
        raise UserError(
            f"checkpoint {checkpoint.folder} has a vocabulary of {has} tokens; tokenizer {tokenizer.name} with start "
            f"{start} needs {wanted}"
        )
    return tokenizer


def before_stops(text: str, until: Sequence[str]) -> str:
    """`text` up to the first of the stop strings."""
    ends = [place for stop in until if stop and (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


class _Rows:
    """Makes requests into rows."""

    def __init__(self, tokenizer: Tokenizer, start: int | str) -> None:
        self._tokenizer, self._start = tokenizer, list(start_tokens(start, tokenizer))
        self._first = self._start or [tokenizer.separator]

    def __call__(self, requests: Sequence[Request]) -> list[_Row]:
        asked = [(found.context, found.text) for found in requests if isinstance(found, Continuation) and found.asks]
        others = [found.text for found in requests if not isinstance(found, Continuation)]
        pairs, texts = iter(encode_pairs(self._tokenizer, asked)), iter(self._tokenizer.encode_arrays(others))
        rows = []
        for found in requests:
            if isinstance(found, Document):
                rows.append(_row(self._first, next(texts)))
            elif isinstance(found, Prompt):
                rows.append(_row(self._before(next(texts)), []))
            elif found.asks:
                context, target = next(pairs)
                rows.append(_row(self._before(context), target))
            else:
                rows.append(_row(self._before(self._tokenizer.encode(found.context)), []))
        return rows

    def _before(self, context: Sequence[int] | Ids) -> list[int]:
        """A context with what it starts with."""
        return [*self._start, *context] if len(context) else self._first


class _Ended:
    """Whether a stop string stands in what was written, also across the borders of tokens.

    Only as many of the last tokens are decoded as a stop string can have, a token being a byte at least; what is seen
    there is looked up in all of them. A stop string that a tokenizer hides from this costs time alone: it is cut off.
    """

    def __init__(self, until: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._until, self._decode = [stop for stop in until if stop], decode
        self._most = 2 + max((len(to_bytes(stop)) for stop in self._until), default=0)

    def __call__(self, ids: list[int]) -> bool:
        return bool(self._until) and self._in(ids[-self._most :]) and self._in(ids)

    def _in(self, ids: list[int]) -> bool:
        text = self._decode(ids)
        return any(stop in text for stop in self._until)


def _row(context: Sequence[int] | Ids, target: Sequence[int] | Ids) -> _Row:
    return _Row(np.asarray(context, dtype=np.uint32), np.asarray(target, dtype=np.uint32))


def _blocks(order: Sequence[int], requests: Sequence[Request]) -> Iterator[list[int]]:
    """Indices in their order, as many at a time as have few enough characters."""
    block: list[int] = []
    size = 0
    for index in order:
        if block and size + requests[index].size > _BLOCK:
            yield block
            block, size = [], 0
        block.append(index)
        size += requests[index].size
    if block:
        yield block


def _piece(rows: Sequence[_Row], columns: range) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """These columns of the rows: tokens, labels and positions, int64 [B, columns]."""
    tokens = np.zeros((len(rows), len(columns)), dtype=np.int64)
    labels, positions = np.full_like(tokens, IGNORED), np.zeros_like(tokens)
    for number, row in enumerate(rows):
        stop = min(columns.stop, row.length)
        for array, values, begin in (
            (tokens, row.context, 0),
            (tokens, row.target[:-1], len(row.context)),
            (labels, row.target, len(row.context) - 1),
        ):
            first, last = max(columns.start, begin), min(stop, begin + len(values))
            if first < last:
                array[number, first - columns.start : last - columns.start] = values[first - begin : last - begin]
        if columns.start < stop:
            positions[number, : stop - columns.start] = np.arange(columns.start + 1, stop + 1)
    return tokens, labels, positions
