"""Short stories whose last word can only be told from an earlier sentence, and the tokenizer of their few words.

    A boy took the kettle to the mill. The road was long. Someone left the lamp at the harbour. The harbour was empty.
    They found the kettle at the | mill

A story pairs each of some keys (people, or things) with a value of its own (a thing, or a place), a sentence a pair, in
random order; up to three other sentences stand among these. The last sentence, its ending, names one of the keys and
stops before the value that was told of it. Keys and values are drawn without replacement and independently of all
else; another sentence names nobody, or any of the keys or values. So neither the last sentence nor a value's place or
frequency says more than chance, one in the number of pairs; a test holds this.

In all sentences that tell or ask, a key stands at most three words before its value: within the reach of a usual short
convolution. With words between them as they come, a Mamba-2 of two layers stayed at chance for as many steps as it
learns these in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from decaybench.core.errors import UserError
from decaybench.core.hashing import digest
from decaybench.text.tokenizers import REPLACEMENT, Tokenizer

MOST_PAIRS = 12
MOST_WITHOUT = 32  # of each list of keys or values

_MOST_OTHERS = 3

T = TypeVar("T")


class Pair(NamedTuple):
    """A key, the value that is told of it, in which sentence (by its place), and where the value ends in that one."""

    key: str
    value: str
    told: int
    end: int


@dataclass(frozen=True)
class Story:
    """A story without its last sentence.

    sentences: each with its full stop; pairs: in random order, of which the first is the one to be asked; endings: how
    a pair can be asked, the wording of the first one first.
    """

    sentences: tuple[str, ...]
    pairs: tuple[Pair, ...]
    endings: tuple[str, ...]

    @property
    def words(self) -> frozenset[str]:
        """All keys and values."""
        return frozenset(word for pair in self.pairs for word in pair[:2])

    @property
    def told(self) -> str:
        """All but the last sentence."""
        return " ".join(self.sentences)

    @property
    def ending(self) -> str:
        """The last sentence up to its last word, `pairs[0].value`."""
        return self.endings[0].format(self.pairs[0].key)

    @property
    def whole(self) -> str:
        """The story with its last sentence, full stop and all."""
        return f"{self.told} {self.ending} {self.pairs[0].value}."


class StoryWriter:
    """Writes stories of `pairs` pairs (2 to 12), each from random words of its own. Raises UserError.

    draws: random words that a story takes at most.
    """

    def __init__(self, pairs: int) -> None:
        if not 2 <= pairs <= MOST_PAIRS:
            raise UserError(f"a story has 2 to {MOST_PAIRS} pairs, not {pairs}")
        self.pairs = pairs
        self.draws = 3 * pairs + 4 * _MOST_OTHERS + 4

    def write(self, bits: Sequence[int], without: AbstractSet[str] = frozenset()) -> Story:
        """The story that `bits` (uniform, 32 bits each, `draws` of them) stand for.

        without: keys and values that it must not hold; of no list more than half.
        """
        deck = _Deck(bits)
        kind = _KINDS[deck.below(len(_KINDS))]
        keys = deck.sample(kind.keys, self.pairs, without)
        values = deck.sample(kind.values, self.pairs, without)
        forms = [deck.pick(kind.tellings) for _ in keys]
        sentences = [form.format(key, value) for form, key, value in zip(forms, keys, values, strict=True)]
        told = list(range(self.pairs))  # where each pair's sentence stands
        for other in deck.sample(kind.others, deck.below(_MOST_OTHERS + 1)):
            place = deck.below(len(sentences) + 1)
            sentences.insert(place, other.format(deck.pick(keys), deck.pick(values)))
            told = [at + (at >= place) for at in told]
        pairs = tuple(
            Pair(key, value, at, len(form.partition("{1}")[0].format(key)) + len(value))
            for form, key, value, at in zip(forms, keys, values, told, strict=True)
        )
        first = deck.below(self.pairs)
        wording = deck.below(len(kind.endings))
        return Story(tuple(sentences), pairs[first:] + pairs[:first], kind.endings[wording:] + kind.endings[:wording])

    def longest(self, tokenizer: Tokenizer) -> tuple[int, int]:
        """The most tokens that a story without its last sentence has, and that a last sentence has."""
        told, others, endings = (
            max(_longest(tokenizer, kind, getattr(kind, part)) for kind in _KINDS)
            for part in ("tellings", "others", "endings")
        )
        return self.pairs * told + _MOST_OTHERS * others, endings


class WordTokenizer(Tokenizer):
    """One id for each word and each punctuation mark of the stories; 0 ends a document, 1 stands for any other word.

    words: by id. Ids of keys and values lie in ranges of their own (`ranges`): names, things, places.
    """

    name = "words"
    separator = 0

    def __init__(self) -> None:
        lists = {"names": NAMES, "things": THINGS, "places": PLACES}
        self.words = ("", REPLACEMENT, *_PUNCTUATION, *_plain_words(), *NAMES, *THINGS, *PLACES)
        self.vocab_size = len(self.words)
        self.sha256 = digest({"kind": "words", "words": list(self.words), "separator": 0})
        self._ids = {word: i for i, word in enumerate(self.words) if i > _UNKNOWN}
        self.ranges = {name: range(self._ids[words[0]], self._ids[words[-1]] + 1) for name, words in lists.items()}

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        ids = self._ids
        return [[ids.get(word, _UNKNOWN) for word in _WORD.findall(text)] for text in texts]

    def encode_bytes(self, data: bytes) -> list[int]:
        return self.encode(data.decode(errors="replace"))

    def byte_lengths(self) -> NDArray[np.int64]:
        spaces = [0] * (2 + len(_PUNCTUATION)) + [1] * (self.vocab_size - 2 - len(_PUNCTUATION))
        return np.array([len(word.encode()) + space for word, space in zip(self.words, spaces, strict=True)])

    def _text(self, ids: Sequence[int]) -> str:
        words = [self.words[i] for i in ids]
        return "".join(word if word in _PUNCTUATION or not n else f" {word}" for n, word in enumerate(words))


@cache
def word_tokenizer() -> WordTokenizer:
    """The tokenizer of the stories' words: there is only one."""
    return WordTokenizer()


class _Deck:
    """Random words, taken one after the other."""

    def __init__(self, bits: Sequence[int]) -> None:
        self._bits = iter(bits)

    def below(self, bound: int) -> int:
        return next(self._bits) * bound >> 32

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def sample(self, options: Sequence[T], n: int, without: AbstractSet[T] = frozenset()) -> list[T]:
        """n different options in random order."""
        left = [option for option in options if option not in without] if without else list(options)
        for place in range(n):
            other = place + self.below(len(left) - place)
            left[place], left[other] = left[other], left[place]
        return left[:n]


class _Kind(NamedTuple):
    """What pairs a story has: {0} is a key, {1} a value."""

    keys: tuple[str, ...]
    values: tuple[str, ...]
    tellings: tuple[str, ...]
    endings: tuple[str, ...]
    others: tuple[str, ...]


def _longest(tokenizer: Tokenizer, kind: _Kind, templates: Sequence[str]) -> int:
    """The most tokens of a sentence, each word counted by itself, and of an ending with a value and a full stop."""
    key, value = (max(map(len, tokenizer.encode_many([f" {word}" for word in words]))) for words in kind[:2])
    found = 0
    for template in templates:
        sentence = template if template.endswith(".") else template + " {1}."
        rest = tokenizer.encode_many([f" {part}" for part in re.sub(r"\{.\}", " ", sentence).split()])
        found = max(found, sum(map(len, rest)) + key * sentence.count("{0}") + value * sentence.count("{1}"))
    return found


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


def _plain_words() -> list[str]:
    """The words of the templates, sorted."""
    text = " ".join(template for kind in _KINDS for part in kind[2:] for template in part)
    return sorted({word for word in _WORD.findall(re.sub(r"\{.\}", "", text)) if word not in _PUNCTUATION})


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_UNKNOWN = 1
_PUNCTUATION = (".", ",")
_WORD = re.compile(r"[.,]|[^\s.,]+")

NAMES = _words("""
    Adam Agnes Alice Anna Anton Arthur Beth Bruno Carl Clara Daniel David Dora Edgar Edith Ella Emil Emma Eric Eva Felix
    Fiona Frank Fred Grace Greta Hanna Harold Helen Henry Hugo Ida Irene Ivan Jacob James Jane Joan John Julia Karen
    Laura Leo Lisa Louis Lucy Mabel Maria Martin Max Nina Nora Oliver Oscar Otto Paul Peter Rosa Ruth Sam Simon Sofia
    Thomas Vera
""")
THINGS = _words("""
    ball barrel bell blanket book bottle bowl box bread brush bucket button candle card chain chair clock coat coin comb
    cup doll drum fan flag flute fork glove hammer hat jar kettle key knife ladder lamp lantern letter lock map mask
    mirror nail needle net pen pillow pipe plate pot ribbon ring rope saddle scarf shoe spoon stamp stick sword table
    ticket violin whistle
""")
PLACES = _words("""
    abbey bakery bank barn beach bridge cabin camp castle cave cellar chapel church cottage dock factory farm ferry
    field forest fort fountain garden gate harbour hill hotel inn island kitchen lake library lighthouse market meadow
    mill mine museum orchard palace park pier pond port prison quarry river school shop square stable station street
    temple theatre tower tunnel valley village vineyard well workshop yard zoo
""")

_QUIET = _lines("""
    It rained all day.
    The road was long.
    Nobody spoke.
    Hours went by.
    That winter was cold.
    The wind came from the north.
    Then the bells rang.
    Supper was late again.
    It grew dark.
    The dogs would not stop barking.
    Some of it was luck.
    Nothing else happened that week.
""")

_PEOPLE_AND_THINGS = _Kind(
    keys=NAMES,
    values=THINGS,
    tellings=_lines("""
        {0} took the {1}.
        {0} carried the {1} home.
        {0} brought the {1} along.
        So {0} hid the {1} under the bed.
        On the stairs {0} found the {1}.
        For luck, {0} kept the {1}.
        The neighbours lent {0} the {1}.
        From the start {0} wanted the {1}.
        They gave {0} the {1}.
        In the end {0} chose the {1}.
    """),
    endings=_lines("""
        {0} still had the
        At the door {0} put down the
        When the light went out, {0} was holding the
        Before going to sleep, {0} looked for the
        Everyone asked {0} about the
        They all laughed when {0} dropped the
        In the morning {0} sold the
        Nothing could make {0} give away the
        A year later {0} remembered the
        Nobody but {0} cared for the
    """),
    others=(
        *_QUIET,
        *_lines("""
            {0} was tired.
            {0} said nothing.
            They waited for {0}.
            The {1} was old.
            Everyone admired the {1}.
            There had never been such a {1}.
        """),
    ),
)

_PEOPLE_AND_PLACES = _Kind(
    keys=NAMES,
    values=PLACES,
    tellings=_lines("""
        {0} reached the {1}.
        {0} owned the {1}.
        {0} painted the {1}.
        {0} cleaned the {1} every day.
        {0} guarded the {1} at night.
        At first {0} liked the {1}.
        By noon {0} saw the {1}.
        For years {0} rented the {1}.
        They showed {0} the {1}.
        An uncle left {0} the {1}.
    """),
    endings=_lines("""
        They found {0} at the
        Ask for {0} at the
        We saw {0} once near the
        Letters for {0} went to the
        The story of {0} began at the
        Not once did {0} leave the
        All day {0} talked about the
        In the morning {0} returned to the
        When the storm came, {0} ran to the
        A week later {0} wrote from the
    """),
    others=(
        *_QUIET,
        *_lines("""
            {0} was tired.
            {0} said nothing.
            They waited for {0}.
            The {1} was empty.
            Few people knew the {1}.
            There was a light near the {1}.
        """),
    ),
)

_THINGS_AND_PLACES = _Kind(
    keys=THINGS,
    values=PLACES,
    tellings=_lines("""
        They hid the {0} at the {1}.
        Someone left the {0} at the {1}.
        They carried the {0} to the {1}.
        There was a {0} at the {1}.
        We kept the {0} near the {1}.
        A thief stole the {0} from the {1}.
        A boy took the {0} to the {1}.
        Once I saw a {0} near the {1}.
        The {0} of the {1} was famous.
        Nobody asked for the {0} at the {1}.
    """),
    endings=_lines("""
        They found the {0} at the
        Send the {0} to the
        There is no other {0} at the
        Nobody has moved the {0} from the
        A year later the {0} was at the
        In the end the {0} returned to the
        Whoever wants the {0} asks at the
        She had last seen the {0} near the
        The police brought the {0} to the
        We heard of the {0} at the
    """),
    others=(
        *_QUIET,
        *_lines("""
            The {0} was heavy.
            Nobody looked at the {0}.
            It was a good {0}.
            The {1} was empty.
            Few people knew the {1}.
            There was a light near the {1}.
        """),
    ),
)

_KINDS = (_PEOPLE_AND_THINGS, _PEOPLE_AND_PLACES, _THINGS_AND_PLACES)
