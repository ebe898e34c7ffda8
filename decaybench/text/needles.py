"""RULER's eight needle-in-a-haystack variants as text (RULER, arXiv 2404.06654): samples and their score.

    prompt   A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you
             about the number afterwards.
             <haystack> One of the special magic numbers for brave-lantern is: 4081726. <haystack>
             What is the special magic number for brave-lantern mentioned in the provided text?
    prefix    The special magic number for brave-lantern mentioned in the provided text is
    answers  4081726

A model continues prompt + prefix with 128 new tokens, which count towards the length; the prompt, the needle's sentence
and its place are RULER's. A haystack has pieces: noise and needles lines, an essay words (fit=ruler) or sentences
(fit=exact). How many of them a sample gets is its fit:

    ruler    RULER's rule: once for all samples, the most with which a sample drawn for that fits; a sample that is
             too long loses increments of 500 words, or of 25 lines (5 at lengths below 4096), until it fits
    exact    for each sample the most whole sentences or lines that fit

Differences from RULER: keys and values are distinct and stand nowhere else in a prompt; the words are our own; a sample
that loses pieces keeps its keys; where it would try for ever, the length is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from decaybench.core.draws import Draws
from decaybench.core.errors import UserError
from decaybench.core.hashing import key64
from decaybench.core.names import unknown
from decaybench.text.haystacks import NOISE, Essay, builtin_essay
from decaybench.text.pieces import Hay, Sentences, Words
from decaybench.text.tokenizers import Tokenizer
from decaybench.text.words import ADJECTIVES, NOUNS

Name = Literal["words", "numbers", "uuids"]
Fit = Literal["exact", "ruler"]

NEW_TOKENS = 128
VERSION = 1  # goes up when any sample changes

_FITS = ("exact", "ruler")
_DEPTHS = tuple(round(100 * i / 39) for i in range(40))  # RULER's, in per cent of an essay's sentences
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_ATTEMPTS = 8  # to draw keys and values that the haystack doesn't hold already
_MOST_WORDS = len(ADJECTIVES) * len(NOUNS) // 2  # so that different ones are found soon
_KEY, _VALUE = "\1", "\2"  # stand for the longest key and value

# Streams of one attempt; distinct places take two.
_KEYS, _VALUES, _ORDER, _QUERIES, _PLACES, _STREAMS = 0, 1, 2, 3, 4, 8


@dataclass(frozen=True)
class Form:
    """What a variant hides and asks: `keys` keys with `values` values each, a needle a value; `queries` keys asked."""

    haystack: Literal["noise", "essay", "needles"]
    key: Name
    value: Name
    keys: int = 1
    values: int = 1
    queries: int = 1


VARIANTS: dict[str, Form] = {
    "single_1": Form("noise", "words", "numbers"),
    "single_2": Form("essay", "words", "numbers"),
    "single_3": Form("essay", "words", "uuids"),
    "multikey_1": Form("essay", "words", "numbers", keys=4),
    "multikey_2": Form("needles", "words", "numbers"),
    "multikey_3": Form("needles", "uuids", "uuids"),
    "multivalue": Form("essay", "words", "numbers", values=4),
    "multiquery": Form("essay", "words", "numbers", keys=4, queries=4),
}


@dataclass(frozen=True)
class Needle:
    """A needle and where it stands.

    sentences_before: of the context (an essay's sentences, else lines); tokens_before: of the prompt; depths: the
    share of the context's other sentences, or tokens, that stand before it, 0 to 1; distance: tokens from its end to
    the end of prompt and prefix. Tokens are exact where a tokenizer makes none across the ends of sentences, else to
    within those that it makes there.
    """

    key: str
    value: str
    asked: bool
    sentences_before: int
    tokens_before: int
    depth_in_sentences: float
    depth_in_tokens: float
    distance: int


@dataclass(frozen=True, eq=False)
class Sample:
    """One sample. A model continues prompt + prefix.

    keys: those asked, in the question's order; answers: their values, in that order; needles: all that were put into
    the haystack, in the order of the text; pieces: of haystack; tokens: uint32 [n], the ids of prompt + prefix;
    length: n and the new tokens.
    """

    prompt: str
    prefix: str
    keys: tuple[str, ...]
    answers: tuple[str, ...]
    needles: tuple[Needle, ...]
    pieces: int
    tokens: NDArray[np.uint32]
    length: int
    new_tokens: int = NEW_TOKENS


class Needles:
    """The samples of one variant at one length.

    A sample is a pure function of all that is given here and of its index and depth; keys and values depend on variant,
    seed and index only, so that lengths and depths are compared on the same needles. length: tokens, with the 128 new
    ones; before: how many of them stand before the prompt, and aren't of it; essay: the haystack of variants that have
    an essay (None: the built-in text), ignored by the others.
    Raises UserError for an unknown variant or fit, and for a length at which not every sample fits.
    """

    def __init__(
        self,
        variant: str,
        length: int,
        tokenizer: Tokenizer,
        *,
        seed: int = 0,
        essay: Essay | None = None,
        fit: Fit = "exact",
        before: int = 0,
    ) -> None:
        if variant not in VARIANTS:
            raise unknown("NIAH variant", variant, VARIANTS)
        if fit not in _FITS:
            raise unknown("fit", fit, _FITS)
        self.variant, self.length, self.seed, self.fit, self.before = variant, length, seed, fit, before
        self.form = VARIANTS[variant]
        self.essay = (essay or builtin_essay()) if self.form.haystack == "essay" else None
        self._tokenizer = tokenizer
        self._separator = "\n" if self.essay is None else " "
        self._besides = before + NEW_TOKENS
        self._room = length - self._besides
        self._header = _header(self.form)
        self._header_ids = tokenizer.encode(self._header)
        self._hay = None if self.form.haystack == "needles" else self._fixed_hay()
        self.smallest_length = self._find_smallest()
        if length < self.smallest_length:
            raise UserError(
                f"NIAH length={length} is too short for {variant} with fit={fit} and the tokenizer {tokenizer.name}: "
                f"the smallest length is {self.smallest_length}{self._advice()}"
            )
        probe = self._facts(Draws(key64("niah-text", VERSION, variant, seed, "probe"), np.array([0])))
        self._composable = self._is_composable(probe.hay)
        # RULER's number of pieces for all samples: the most with which one sample, drawn for that, fits.
        self._most_pieces = self._filled(probe, self._increment(length)).pieces if fit == "ruler" else None

    def sample(self, index: int, depth: float | None = None) -> Sample:
        """The sample of an index, >= 0.

        depth: of the needle asked first, 0 to 1: round(depth x the context's other sentences) stand before it. None:
        RULER's rule, which is one of 40 depths in an essay and any line but the end elsewhere. All other needles are
        placed by that rule. Raises UserError where the depth is none, or the essay holds the needles itself.
        """
        if depth is not None and not 0 <= depth <= 1:
            raise UserError(f"NIAH depth={depth} is not between 0, the haystack's start, and 1, its end")
        draws = Draws(key64("niah-text", VERSION, self.variant, self.seed), np.array([index]))
        for attempt in range(_ATTEMPTS):
            facts = self._facts(draws, attempt)
            draft = self._draft(facts, depth)
            if _stands_once(facts, draft.prompt, self.form.values):
                return self._finished(facts, draft)
        raise UserError("the haystack holds needles itself; name a text that isn't made of NIAH samples")

    def description(self) -> dict[str, Any]:
        """What samples depend on, beside index and depth, as JSON-able content for a record."""
        haystack: dict[str, Any] = {"kind": self.form.haystack}
        if self.essay:
            haystack |= {"name": self.essay.name, "sha256": self.essay.sha256}
        return {
            "variant": self.variant,
            "version": VERSION,
            "length": self.length,
            "new_tokens": NEW_TOKENS,
            "before": self.before,
            "seed": self.seed,
            "fit": self.fit,
            "form": asdict(self.form),
            "haystack": haystack,
            "tokenizer": {"name": self._tokenizer.name, "sha256": self._tokenizer.sha256},
        }

    def _facts(self, draws: Draws, attempt: int = 0) -> _Facts:
        form, base = self.form, _STREAMS * attempt
        needles = form.keys * form.values
        keys = _names(form.key, draws, base + _KEYS, form.keys)
        values = _names(form.value, draws, base + _VALUES, needles)
        asked = draws.permutation(base + _QUERIES, form.keys)[0, : form.queries].tolist()
        order = draws.permutation(base + _ORDER, needles)[0].tolist()
        answers = [values[i * form.values + j] for i in asked for j in range(form.values)]
        question, prefix = _question(form, [keys[i] for i in asked])
        planted = [(keys[i // form.values], values[i]) for i in order]
        texts = [_NEEDLE.format(kind=form.value, key=key, value=value) for key, value in planted]
        *needle_ids, question_ids = self._tokenizer.encode_many(
            [*(self._separator + text for text in texts), question + prefix]
        )
        hay = self._hay or self._drawn_hay(draws, base)
        return _Facts(
            draws=draws,
            base=base,
            keys=tuple(keys[i] for i in asked),
            answers=tuple(answers),
            planted=planted,
            first_asked=[value for _, value in planted].index(answers[0]),
            texts=texts,
            ids=needle_ids,
            question=question,
            prefix=prefix,
            question_ids=question_ids,
            fixed=len(self._header_ids) + sum(map(len, needle_ids)) + len(question_ids),
            hay=hay,
        )

    def _draft(self, facts: _Facts, depth: float | None) -> _Draft:
        if self._most_pieces is None:
            return self._filled(facts, 1, depth)
        pieces = self._most_pieces
        while True:
            draft = self._laid(facts, pieces, depth)
            if len(draft.tokens) <= self._room:
                return draft
            if pieces <= self._increment(self.length):
                raise self._too_long(draft)
            pieces -= self._increment(self.length)

    def _filled(self, facts: _Facts, least: int, depth: float | None = None) -> _Draft:
        """The draft with the most pieces that fits: found from sums of tokens, checked on the ids of the text.

        Where tokens reach over the ends of pieces, the sums are off by what the check shows, and it is tried again.
        """
        tried: dict[int, _Draft] = {}
        pieces = max(least, facts.hay.most(self._room - facts.fixed))
        while pieces not in tried:
            draft = tried[pieces] = self._laid(facts, pieces, depth)
            off = len(draft.tokens) - facts.fixed - facts.hay.tokens(pieces)
            pieces = max(least, facts.hay.most(self._room - facts.fixed - off))
        fitting = [pieces for pieces, draft in tried.items() if len(draft.tokens) <= self._room]
        if fitting:
            return tried[max(fitting)]
        for pieces in range(min(tried) - 1, least - 1, -1):
            draft = self._laid(facts, pieces, depth)
            if len(draft.tokens) <= self._room:
                return draft
        raise self._too_long(draft)

    def _laid(self, facts: _Facts, pieces: int, depth: float | None) -> _Draft:
        """The prompt with so many pieces of haystack."""
        sentences, sentence_ids = facts.hay.first(pieces)
        units: list[str] = []
        ids: list[list[int]] = []
        spots: list[int] = []
        last = 0
        # RULER joins the stretches between needles, empty ones too: that gives a space more, at depth 0 for example.
        empty = [""] if self.fit == "ruler" and self.essay else []
        places = self._places(facts, len(sentences), depth)
        for place, needle in [*places, (len(sentences), None)]:
            units += sentences[last:place] or empty
            ids += sentence_ids[last:place] or [self._tokenizer.encode(self._separator) for _ in empty]
            last = place
            if needle is not None:
                spots.append(len(units))
                units.append(facts.texts[needle])
                ids.append(facts.ids[needle])
        if self._separator != "\n":
            ids[0] = self._tokenizer.encode("\n" + units[0])
        prompt = f"{self._header}\n{self._separator.join(units)}{facts.question}"
        if self._composable and self._joins_hold(facts, units, ids, spots):
            tokens = np.fromiter(chain(self._header_ids, *ids, facts.question_ids), dtype=np.uint32)
        else:
            tokens = self._tokenizer.encode_arrays([prompt + facts.prefix])[0]
        return _Draft(prompt, pieces, tokens, units, [len(own) for own in ids], spots, places)

    def _joins_hold(self, facts: _Facts, units: list[str], ids: list[list[int]], spots: list[int]) -> bool:
        """Whether each needle with its neighbours, and the context's ends with what is around it, have their ids.

        With `_is_composable` for the rest of the haystack this is as good as encoding the whole text, and much faster.
        """
        windows = [(max(0, spot - 1), spot + 2) for spot in spots]
        texts = [self._context(units, start, stop) for start, stop in windows]
        wanted = [list(chain(*ids[start:stop])) for start, stop in windows]
        end = max(0, len(units) - 2)
        texts += [
            self._header + self._context(units, 0, 1),
            self._context(units, end, None) + facts.question + facts.prefix,
        ]
        wanted += [[*self._header_ids, *ids[0]], [*chain(*ids[end:]), *facts.question_ids]]
        return self._tokenizer.encode_many(texts) == wanted

    def _context(self, units: Sequence[str], start: int, stop: int | None) -> str:
        """Units start to stop, with what separates the first from the text before it."""
        return (self._separator if start else "\n") + self._separator.join(units[start:stop])

    def _is_composable(self, hay: Hay) -> bool:
        """Whether a haystack's sentences, tokenised one by one, have the ids of the whole."""
        texts, ids = hay.first(hay.most(self._room))
        return self._tokenizer.encode("".join(self._separator + text for text in texts)) == list(chain(*ids))

    def _places(self, facts: _Facts, sentences: int, depth: float | None) -> list[tuple[int, int]]:
        """(sentences of haystack before it, needle) for each needle, in the order of the text."""
        needles = list(range(len(facts.texts)))
        if depth is not None:
            needles.remove(facts.first_asked)
        stream = facts.base + _PLACES
        if self.essay:
            shares = sorted(_DEPTHS[i] for i in facts.draws.distinct(stream, len(needles), len(_DEPTHS))[0])
            places = [int(sentences * (share / 100)) for share in shares]
        else:
            places = sorted(facts.draws.distinct(stream, len(needles), sentences)[0].tolist())
        placed = list(zip(places, needles, strict=True))
        if depth is not None:
            before = round(depth * (sentences + len(placed)))
            needles_before = sum(place + i < before for i, place in enumerate(places))
            placed.insert(needles_before, (before - needles_before, facts.first_asked))
        return placed

    def _finished(self, facts: _Facts, draft: _Draft) -> Sample:
        ends = self._ends(facts, draft)
        sentences = len(draft.units) - draft.units.count("")
        context = ends[len(draft.units)] - len(self._header_ids)
        needles = []
        for order, ((place, planted), spot) in enumerate(zip(draft.places, draft.spots, strict=True)):
            key, value = facts.planted[planted]
            start, stop = ends[spot], ends[spot + 1]
            needle = Needle(
                key=key,
                value=value,
                asked=key in facts.keys,
                sentences_before=place + order,
                tokens_before=start,
                depth_in_sentences=(place + order) / (sentences - 1),
                depth_in_tokens=(start - len(self._header_ids)) / (context - (stop - start)),
                distance=len(draft.tokens) - stop,
            )
            needles.append(needle)
        return Sample(
            prompt=draft.prompt,
            prefix=facts.prefix,
            keys=facts.keys,
            answers=facts.answers,
            needles=tuple(needles),
            pieces=draft.pieces,
            tokens=draft.tokens,
            length=len(draft.tokens) + NEW_TOKENS,
        )

    def _ends(self, facts: _Facts, draft: _Draft) -> dict[int, int]:
        """Tokens of the prompt before and after each needle and before the question, by the units that stand there."""
        places = sorted({0, *draft.spots, *(spot + 1 for spot in draft.spots), len(draft.units)})
        sums = list(accumulate(draft.counts, initial=len(self._header_ids)))
        if sums[-1] + len(facts.question_ids) == len(draft.tokens):
            return {place: sums[place] for place in places}
        # Tokens reach over the ends of sentences: longer stretches are counted, which leaves at most their own ends.
        counts = self._counts([self._context(draft.units, start, stop) for start, stop in pairwise(places)])
        return dict(zip(places, accumulate(counts, initial=len(self._header_ids)), strict=True))

    def _fixed_hay(self) -> Hay:
        """The haystack that all samples share."""
        essay = self.essay
        if essay is None:
            return Sentences(self._tokenizer.encode_many, self._separator, lambda start, stop: [NOISE] * (stop - start))
        texts = essay.sentences
        sentences = Sentences(
            self._tokenizer.encode_many,
            self._separator,
            lambda start, stop: [texts[i % len(texts)] for i in range(start, stop)],
        )
        return Words(sentences) if self.fit == "ruler" else sentences

    def _drawn_hay(self, draws: Draws, base: int) -> Hay:
        """Needles of a sample's own, with other keys and values than those that it asks for."""
        form = self.form

        def lines(start: int, stop: int) -> list[str]:
            first = form.keys * form.values
            keys = _names(form.key, draws, base + _KEYS, first + stop)[first + start :]
            values = _names(form.value, draws, base + _VALUES, first + stop)[first + start :]
            return [
                _NEEDLE.format(kind=form.value, key=key, value=value) for key, value in zip(keys, values, strict=True)
            ]

        return Sentences(self._tokenizer.encode_many, self._separator, lines)

    def _increment(self, length: int) -> int:
        """RULER's step, and its smallest number of pieces."""
        if self.essay:
            return 500
        return 25 if length >= 4096 else 5

    def _find_smallest(self) -> int:
        """The smallest length at which every sample fits, whatever its keys and values."""
        if self.fit == "exact":
            return self._largest(1)
        smallest = self._largest(self._increment(self.length))
        if self._increment(smallest) == self._increment(self.length):
            return smallest
        return max(4096, self._largest(self._increment(4096)))

    def _largest(self, pieces: int) -> int:
        """The length of the longest sample with so many pieces."""
        form = self.form
        longest = {_KEY: self._longest(form.key), _VALUE: self._longest(form.value)}
        needle = self._separator + _NEEDLE.format(kind=form.value, key=_KEY, value=_VALUE)
        texts = [self._header, "".join(_question(form, [_KEY] * form.queries)), *[needle] * (form.keys * form.values)]
        hay = 0
        if self._hay is None:
            texts += [needle] * pieces
        else:
            hay = self._hay.tokens(pieces)
        if self.essay and self.fit == "ruler":
            hay += form.keys * form.values + 1  # a space for each stretch between needles that is empty
        marks = sum(text.count(mark) * tokens for mark, tokens in longest.items() for text in texts)
        rest = [part for text in texts for part in re.split(f" [{_KEY}{_VALUE}]", text)]
        return sum(self._counts(rest)) + marks + hay + self._besides

    def _longest(self, name: Name) -> int:
        """The most tokens that a key or value of this kind takes, with the space before it."""
        if name == "words":
            parts = [f" {word}" for word in ADJECTIVES], [f"-{word}" for word in NOUNS]
            return sum(max(self._counts(part)) for part in parts)
        return len(" 1234567" if name == "numbers" else " 12345678-1234-1234-1234-123456789012")

    def _advice(self) -> str:
        if self.fit == "exact":
            return ""
        pieces = "words" if self.essay else "lines"
        return f" (RULER's smallest haystack is {self._increment(self.length)} {pieces}; fit=exact takes less)"

    def _too_long(self, draft: _Draft) -> UserError:
        return UserError(
            f"NIAH length={self.length} is too short for a sample of {self.variant} with fit={self.fit}: it needs "
            f"{len(draft.tokens) + self._besides}"
        )

    def _counts(self, texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in self._tokenizer.encode_many(texts)]


def found_in(text: str, answers: Sequence[str]) -> tuple[bool, ...]:
    """Which of the answers stand in what a model wrote after prompt and prefix, in any case."""
    written = text.lower()
    return tuple(answer.lower() in written for answer in answers)


def string_match_all(text: str, answers: Sequence[str]) -> float:
    """RULER's score of what a model wrote: the share of the answers in it, 0..1 (RULER prints 100 times that)."""
    return sum(found_in(text, answers)) / len(answers)


@dataclass(frozen=True)
class _Facts:
    """What a sample hides and asks, before it has a haystack's length."""

    draws: Draws
    base: int  # of the attempt's streams
    keys: tuple[str, ...]
    answers: tuple[str, ...]
    planted: list[tuple[str, str]]  # key and value of each needle
    first_asked: int  # the needle with the first answer
    texts: list[str]
    ids: list[list[int]]  # of each needle, with what separates it
    question: str
    prefix: str
    question_ids: list[int]  # of question and prefix
    fixed: int  # tokens of all but the haystack
    hay: Hay


@dataclass(frozen=True)
class _Draft:
    """A sample with a number of pieces that may fit or not."""

    prompt: str
    pieces: int
    tokens: NDArray[np.uint32]
    units: list[str]  # sentences and needles as they stand
    counts: list[int]  # tokens of each unit with what separates it, counted apart
    spots: list[int]  # of the needles in units
    places: list[tuple[int, int]]


def _header(form: Form) -> str:
    if form.queries * form.values == 1:
        kind = form.value[:-1]
        start = f"A special magic {kind} is hidden within the following text."
    else:
        kind = form.value
        start = f"Some special magic {kind} are hidden within the following text."
    return f"{start} Make sure to memorize it. I will quiz you about the {kind} afterwards."


def _question(form: Form, keys: Sequence[str]) -> tuple[str, str]:
    """The question, with the newline before it, and the answer prefix."""
    asked = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + ", and " + keys[-1]
    if form.queries * form.values == 1:
        what, kind, are = "What is", form.value[:-1], "is"
    else:
        what, kind, are = "What are all", form.value, "are"
    subject = f"the special magic {kind} for {asked} mentioned in the provided text"
    return f"\n{what} {subject}?", f" The{subject[3:]} {are}"


def _stands_once(facts: _Facts, prompt: str, values: int) -> bool:
    """Whether a prompt holds each value once and each key asked in its own needles only."""
    return all(prompt.count(value) == 1 for _, value in facts.planted) and all(
        prompt.count(f" for {key} is: ") == values for key in facts.keys
    )


def _names(name: Name, draws: Draws, stream: int, n: int) -> list[str]:
    """The first n different keys or values of a stream."""
    drawn = n + 8
    while True:
        found = list(dict.fromkeys(_DRAWN[name](draws, stream, drawn)))
        if len(found) >= n:
            return found[:n]
        if name == "words" and n > _MOST_WORDS:
            raise UserError(f"NIAH: {n} needles need more keys than the {_MOST_WORDS} that there are; use multikey_3")
        drawn *= 2


def _words(draws: Draws, stream: int, n: int) -> list[str]:
    places = draws.integers(stream, n, len(ADJECTIVES) * len(NOUNS))[0].tolist()
    return [f"{ADJECTIVES[place // len(NOUNS)]}-{NOUNS[place % len(NOUNS)]}" for place in places]


def _numbers(draws: Draws, stream: int, n: int) -> list[str]:
    return [str(number) for number in (10**6 + draws.integers(stream, n, 9 * 10**6))[0].tolist()]


def _uuids(draws: Draws, stream: int, n: int) -> list[str]:
    """Of version 4: random but for six bits."""
    words = draws.bits(stream, 4 * n).reshape(n, 4).tolist()
    return [
        f"{a:08x}-{b >> 16:04x}-4{b & 0xFFF:03x}-{0x8000 | c >> 16 & 0x3FFF:04x}-{c & 0xFFFF:04x}{d:08x}"
        for a, b, c, d in words
    ]


_DRAWN: dict[Name, Callable[[Draws, int, int], list[str]]] = {"words": _words, "numbers": _numbers, "uuids": _uuids}
