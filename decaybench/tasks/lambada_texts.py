"""Training texts for task `lambada` (tasks/lambada.py): stories in a row, and their pairs asked behind them.

    told 1, told 2, asked of 1, asked of 2, told 3, asked of 1, asked of 3, asked of 2, ...

Each pair of a story is asked once behind it or behind one of the next stories; what is left of the length, where no
whole story fits, is filled with pairs asked again in other words. Only answers are labels: one question a text would
teach far too slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, cycle
from typing import NamedTuple

import numpy as np

from decaybench.core.draws import Draws
from decaybench.tasks.base import IGNORED, Batch
from decaybench.text.stories import MOST_WITHOUT, Story, StoryWriter
from decaybench.text.tokenizers import Tokenizer

_LAYOUT, _FIRST = 0, 1  # streams of a text: how it is laid out; its stories, one a stream
_AGAIN = 64  # draws for pairs that are asked again


class TrainingTexts:
    """Training texts made of stories. start: tokens before each text."""

    def __init__(self, tokenizer: Tokenizer, start: Sequence[int]) -> None:
        self._tokenizer, self._start = tokenizer, list(start)

    def batch(self, pairs: int, length: int, draws: Draws) -> Batch:
        """Texts of `length` tokens, of stories with 2 to `pairs` pairs each."""
        writers, window = [StoryWriter(n) for n in range(2, pairs + 1)], 1 + MOST_WITHOUT // pairs
        layouts = draws.bits(_LAYOUT, 2 * (length // 8 + pairs + _AGAIN)).tolist()
        texts = [_Text(length - len(self._start), window) for _ in layouts]
        stream = _FIRST
        while any(text.is_open for text in texts):
            for text, (size, *bits) in zip(texts, draws.bits(stream, 1 + writers[-1].draws).tolist(), strict=True):
                if text.is_open:
                    writer = writers[size * len(writers) >> 32]
                    text.add(self._told(writer.write(bits, text.taken)))
            stream += 1
        rows = [text.laid(layout) for text, layout in zip(texts, layouts, strict=True)]
        tokens, labels, distance = (np.array(part, dtype=np.int64) for part in zip(*rows, strict=True))
        front = np.tile(np.array(self._start, dtype=np.int64), (len(rows), 1))
        return Batch(
            tokens=np.concatenate([front, tokens], axis=1),
            labels=np.concatenate([np.full_like(front, IGNORED), labels], axis=1),
            distance=np.concatenate([np.zeros_like(front), distance], axis=1),
        )

    def _told(self, story: Story) -> _Told:
        ends = {pair.told: pair.end for pair in story.pairs}
        cuts = [ends.get(place, len(sentence)) for place, sentence in enumerate(story.sentences)]
        parts = [
            part
            for sentence, cut in zip(story.sentences, cuts, strict=True)
            for part in (f" {sentence[:cut]}", sentence[cut:])
        ]
        encoded = self._tokenizer.encode_many(parts)
        stops = list(accumulate(map(len, encoded)))
        asked = [self._asked(story, number, stops[2 * pair.told] - 1) for number, pair in enumerate(story.pairs)]
        return _Told(list(chain(*encoded)), [first for first, _ in asked], [other for _, other in asked], story.words)

    def _asked(self, story: Story, number: int, written: int) -> tuple[_Asked, _Asked]:
        """A pair asked in two wordings that no other pair of the story has."""
        pair, count = story.pairs[number], len(story.endings)
        words = [story.endings[place % count].format(pair.key) for place in (number, number + len(story.pairs))]
        *encoded, answer, stop = self._tokenizer.encode_many([*(f" {text}" for text in words), f" {pair.value}", "."])
        first, other = (_Asked(ids, answer, stop, written) for ids in encoded)
        return first, other


class _Asked(NamedTuple):
    """A pair that is asked: the last sentence's tokens, and where in the story's the answer's last token stands."""

    words: list[int]
    answer: list[int]
    stop: list[int]
    written: int

    @property
    def size(self) -> int:
        return len(self.words) + len(self.answer) + len(self.stop)


class _Told(NamedTuple):
    """A story of a training text: its tokens without the last sentence, and each pair asked, and asked again."""

    tokens: list[int]
    asked: list[_Asked]
    again: list[_Asked]
    words: frozenset[str]

    @property
    def size(self) -> int:
        """Tokens of the story with each pair asked once."""
        return len(self.tokens) + sum(asked.size for asked in self.asked)


class _Text:
    """A training text of `room` tokens.

    A pair is asked behind its story or one of the next `window` - 1, whose stories have other keys and values: what is
    asked is never told twice.
    """

    def __init__(self, room: int, window: int) -> None:
        self._room, self._window = room, window
        self._told: list[_Told] = []
        self._size = 0
        self.is_open = True

    @property
    def taken(self) -> frozenset[str]:
        """What the next story must not hold."""
        return frozenset().union(*(told.words for told in self._told[1 - self._window :]))

    def add(self, told: _Told) -> None:
        """Add a story where all of it fits; else, unless it would be the first, the text is full."""
        self._size += told.size
        self.is_open = self._size < self._room
        if self.is_open or not self._told:
            self._told.append(told)

    def laid(self, bits: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """The text's tokens, labels and distances, by uniform bits."""
        left = cycle(bits)
        count = len(self._told)
        behind: list[list[tuple[int, int, _Asked]]] = [[] for _ in self._told]  # (order, story, what is asked)
        for number, told in enumerate(self._told):
            for asked in told.asked:
                slot = number + (next(left) * min(self._window, count - number) >> 32)
                behind[slot].append((next(left), number, asked))
        row = _Laid()
        for told, questions in zip(self._told, behind, strict=True):
            row.tell(told)
            for _, number, asked in sorted(questions):
                row.ask(number, asked)
        while len(row.tokens) < self._room:
            number = count - 1 - (next(left) * min(self._window, count) >> 32)
            again = self._told[number].again
            row.ask(number, again[next(left) * len(again) >> 32])
        return row.tokens[: self._room], row.labels[: self._room], row.distance[: self._room]


class _Laid:
    """A training text as it is laid out, token by token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.labels: list[int] = []
        self.distance: list[int] = []
        self._starts: list[int] = []

    def tell(self, told: _Told) -> None:
        self._starts.append(len(self.tokens))
        self._add(told.tokens)

    def ask(self, number: int, asked: _Asked) -> None:
        """Ask a pair of story `number`."""
        self._add(asked.words)
        m = len(asked.answer)
        self._add([*asked.answer, *asked.stop])
        first = len(self.tokens) - m - len(asked.stop) - 1  # the place at which the answer's first token is said
        self.labels[first : first + m] = asked.answer
        away = first + m - 1 - self._starts[number] - asked.written
        self.distance[first : first + m] = [max(1, away)] * m

    def _add(self, ids: list[int]) -> None:
        self.tokens += ids
        self.labels += [IGNORED] * len(ids)
        self.distance += [0] * len(ids)
