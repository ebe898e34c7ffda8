"""Rows of tokens for an evaluation of task `lambada` (tasks/lambada.py): passages or stories among unrelated ones.

A row is what a model reads: a start token where one is asked for, the context, and the target but for its last token.
Label j of a target with m tokens stands m - j places before the row's end. Texts that stand beside one another are
tokenised apart, so that a passage keeps its tokens wherever it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, cycle
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decaybench.core.draws import Draws
from decaybench.core.errors import UserError
from decaybench.tasks.base import IGNORED, Batch
from decaybench.text.lambada import Passages, encode_pairs, last_occurrence, split_passage
from decaybench.text.stories import Story, StoryWriter
from decaybench.text.tokenizers import Tokenizer

Int64 = NDArray[np.int64]
Variant = Literal["plain", "before", "between"]

_BREAK = "\n\n"  # between passages

_OWN, _FIRST = 0, 1  # streams: a sample's story; the unrelated ones, or the order of unrelated passages
_AT_ONCE = 16  # unrelated stories of one stream


class Row(NamedTuple):
    """What is read before a target, the target (at least one token), and where in the context the answer's last token
    stands; None: nowhere.
    """

    context: list[int]
    target: list[int]
    written: int | None

    @property
    def length(self) -> int:
        """Tokens that are read: all but the target's last."""
        return len(self.context) + len(self.target) - 1

    def behind(self, before: list[int]) -> Row:
        """The row with `before` in front of it."""
        return Row(before + self.context, self.target, None if self.written is None else len(before) + self.written)


def evaluation_batch(rows: Sequence[Row], length: int) -> Batch:
    """The rows as a batch with as many columns as the longest has, padded behind.

    Raises UserError where that is more than `length`.
    """
    longest = max(row.length for row in rows)
    if longest > length:
        raise UserError(f"lambada length={length} is too short for one of its samples: it needs {longest}")
    tokens = np.zeros((len(rows), longest), dtype=np.int64)
    labels = np.full_like(tokens, IGNORED)
    distance, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    for number, row in enumerate(rows):
        n, m = row.length, len(row.target)
        tokens[number, :n] = row.context + row.target[:-1]
        labels[number, n - m : n] = row.target
        positions[number, :n] = np.arange(1, n + 1)
        if row.written is not None:
            distance[number, n - m : n] = max(1, n - 1 - row.written)
    return Batch(tokens, labels, distance, positions=positions)


class PassageRows:
    """Rows made of published passages. start: tokens before each row."""

    def __init__(self, passages: Passages, tokenizer: Tokenizer, start: Sequence[int]) -> None:
        self._texts, self._tokenizer, self._start = passages.texts, tokenizer, list(start)

    @cached_property
    def smallest(self) -> int:
        """The length at which every passage fits."""
        pairs = encode_pairs(self._tokenizer, [split_passage(text) for text in self._texts])
        return len(self._start) + max(len(pair.context) + len(pair.target) - 1 for pair in pairs)

    def rows(self, variant: Variant, length: int, key: int, indices: Int64) -> list[Row]:
        """The rows of passages `plain` or with others `before` them.

        Raises UserError where there are too few, or one is a single token, before which nothing is read.
        """
        split = [split_passage(self._texts[index]) for index in indices.tolist()]
        pairs = encode_pairs(self._tokenizer, split)
        plain = [Row(*pair, self._written(*texts)) for pair, texts in zip(pairs, split, strict=True)]
        alone = [index for index, row in zip(indices.tolist(), plain, strict=True) if not row.context]
        if alone and not self._start:
            raise UserError(
                f"task.start: passage {alone[0] + 1} has no token before its last word; name one to start with "
                "(--start separator)"
            )
        if variant == "plain":
            return [row.behind(self._start) for row in plain]
        orders = Draws(key, indices).permutation(_FIRST, len(self._texts))
        others = (
            self._others(order, index, target)
            for order, index, (_, target) in zip(orders, indices.tolist(), split, strict=True)
        )
        return [_filled(self._start, row, length, other) for row, other in zip(plain, others, strict=True)]

    @cached_property
    def _encoded(self) -> list[NDArray[np.uint32]]:
        return self._tokenizer.encode_arrays([text + _BREAK for text in self._texts])

    def _written(self, context: str, target: str) -> int | None:
        end = last_occurrence(context, target)
        return None if end is None else max(0, len(self._tokenizer.encode(context[:end])) - 1)

    def _others(self, order: Int64, own: int, target: str) -> Iterator[list[int]]:
        """The tokens of unrelated passages, over and over."""
        fitting = 0
        for number, index in enumerate(cycle(order.tolist())):
            if number == len(order) and not fitting:
                raise UserError(
                    f"evaluation.variants: before needs other passages, and of these {len(self._texts)} none goes "
                    f"with passage {own + 1} (all hold its last word)"
                )
            if index != own and last_occurrence(self._texts[index], target) is None:
                fitting += 1
                yield self._encoded[index].tolist()


class StoryRows:
    """Rows made of stories. start: tokens before each row."""

    def __init__(self, tokenizer: Tokenizer, start: Sequence[int]) -> None:
        self._tokenizer, self._start = tokenizer, list(start)
        self._smallest: dict[int, int] = {}

    def smallest(self, pairs: int) -> int:
        """The length at which every story of so many pairs fits, and a training text asks at least one of them."""
        if pairs not in self._smallest:
            told, ending = StoryWriter(pairs).longest(self._tokenizer)
            # Neither the full stop nor the token before it is read.
            self._smallest[pairs] = len(self._start) + told + ending - 2
        return self._smallest[pairs]

    def rows(self, variant: Variant, pairs: int, length: int, key: int, indices: Int64) -> list[Row]:
        """The rows of a variant; in one that is `between` an unrelated sentence more would be more than `length`."""
        writer = StoryWriter(pairs)
        stories = [writer.write(bits) for bits in Draws(key, indices).bits(_OWN, writer.draws).tolist()]
        plain = [self._plain(story) for story in stories]
        if variant == "plain":
            return [row.behind(self._start) for row in plain]
        others = [
            _others(writer, Draws(key, indices[number : number + 1]), story.words)
            for number, story in enumerate(stories)
        ]
        if variant == "before":
            return [
                _filled(self._start, row, length, (self._tokenizer.encode(story.whole + _BREAK) for story in other))
                for row, other in zip(plain, others, strict=True)
            ]
        return [
            self._between(story, row, length, other) for story, row, other in zip(stories, plain, others, strict=True)
        ]

    def _plain(self, story: Story) -> Row:
        pair = story.pairs[0]
        before = " ".join([*story.sentences[: pair.told], story.sentences[pair.told][: pair.end]])
        [(context, target)] = encode_pairs(self._tokenizer, [(f"{story.told} {story.ending}", f" {pair.value}")])
        return Row(context, target, len(self._tokenizer.encode(before)) - 1)

    def _between(self, story: Story, plain: Row, length: int, others: Iterable[Story]) -> Row:
        told, ending = self._tokenizer.encode_many([story.told, f" {story.ending}"])
        front = self._start + told
        room = length - len(front) - len(ending) - len(plain.target) + 1
        stretch: list[int] = []
        for sentence in chain.from_iterable(_sentences(other) for other in others):
            ids = self._tokenizer.encode(f" {sentence}")
            if len(stretch) + len(ids) > room:
                break
            stretch += ids
        assert plain.written is not None, "a story tells its answer"
        return Row(front + stretch + ending, plain.target, len(self._start) + plain.written)


def _filled(start: list[int], row: Row, length: int, others: Iterator[list[int]]) -> Row:
    """The row behind others, the nearest given first, of which the farthest is cut so that `length` tokens are read."""
    room = length - len(start) - row.length
    found: list[list[int]] = []
    size = 0
    while size < room:
        found.append(next(others))
        size += len(found[-1])
    before = list(chain(*reversed(found)))
    return row.behind(start + before[len(before) - max(0, room) :])


def _others(writer: StoryWriter, draws: Draws, without: frozenset[str]) -> Iterator[Story]:
    """Unrelated stories of one sample."""
    stream = _FIRST
    while True:
        bits = draws.bits(stream, _AT_ONCE * writer.draws)[0].tolist()
        for place in range(0, len(bits), writer.draws):
            yield writer.write(bits[place : place + writer.draws], without)
        stream += 1


def _sentences(story: Story) -> list[str]:
    return [*story.sentences, f"{story.ending} {story.pairs[0].value}."]
