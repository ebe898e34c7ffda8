"""Haystacks without end, taken from their beginning in pieces that are tokenised once, sentence by sentence.

Every sentence is tokenised with the separator before it. Where a tokenizer makes no token across the ends of sentences,
their ids one after the other are those of the whole text; elsewhere they are near it, and who uses them checks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

Encode = Callable[[Sequence[str]], list[list[int]]]


class Hay(Protocol):
    """A haystack in pieces."""

    def most(self, tokens: int) -> int:
        """How many pieces together have at most so many tokens."""

    def tokens(self, pieces: int) -> int:
        """The tokens of the first pieces."""

    def first(self, pieces: int) -> tuple[list[str], list[list[int]]]:
        """The sentences of the first pieces, and the ids of each."""


class Sentences:
    """Pieces are sentences. encode: the ids of each text; take: the sentences [start, stop)."""

    def __init__(self, encode: Encode, separator: str, take: Callable[[int, int], list[str]]) -> None:
        self.encode, self.separator, self._take = encode, separator, take
        self._texts: list[str] = []
        self._ids: list[list[int]] = []
        self._ends = [0]

    def most(self, tokens: int) -> int:
        while (end := self._ends[-1]) <= tokens:
            # By the average so far and a little more, so that it is enough as a rule.
            self._extend((tokens - end) * len(self._texts) * 21 // (20 * max(1, end)))
        return bisect_right(self._ends, tokens) - 1

    def tokens(self, pieces: int) -> int:
        self._reach(pieces)
        return self._ends[pieces]

    def first(self, pieces: int) -> tuple[list[str], list[list[int]]]:
        self._reach(pieces)
        return self._texts[:pieces], self._ids[:pieces]

    def _reach(self, pieces: int) -> None:
        if pieces > len(self._texts):
            self._extend(pieces - len(self._texts))

    def _extend(self, more: int) -> None:
        start = len(self._texts)
        texts = self._take(start, start + max(16, more))
        ids = self.encode([self.separator + text for text in texts])
        self._ends += [self._ends[-1] + end for end in accumulate(map(len, ids))]
        self._texts += texts
        self._ids += ids


class Words:
    """Pieces are the words of sentences, so that the last sentence may be cut."""

    def __init__(self, sentences: Sentences) -> None:
        self._sentences = sentences
        self._ends = [0]  # in words

    def most(self, tokens: int) -> int:
        whole = self._sentences.most(tokens)
        left = tokens - self._sentences.tokens(whole)
        cut = self._sentences.first(whole + 1)[0][-1].split(" ")
        shorter = self._encode([" ".join(cut[: words + 1]) for words in range(len(cut) - 1)])
        self._reach_sentences(whole)
        return self._ends[whole] + sum(len(ids) <= left for ids in shorter)

    def tokens(self, pieces: int) -> int:
        return sum(map(len, self.first(pieces)[1]))

    def first(self, pieces: int) -> tuple[list[str], list[list[int]]]:
        while self._ends[-1] < pieces:
            self._reach_sentences(len(self._ends) + 63)
        whole = bisect_right(self._ends, pieces) - 1
        texts, ids = self._sentences.first(whole)
        left = pieces - self._ends[whole]
        if left:
            cut = " ".join(self._sentences.first(whole + 1)[0][-1].split(" ")[:left])
            return [*texts, cut], [*ids, *self._encode([cut])]
        return texts, ids

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._sentences.encode([self._sentences.separator + text for text in texts])

    def _reach_sentences(self, sentences: int) -> None:
        known = len(self._ends) - 1
        if sentences > known:
            texts = self._sentences.first(sentences)[0][known:]
            self._ends += [self._ends[-1] + end for end in accumulate(text.count(" ") + 1 for text in texts)]
