"""What needles are hidden in: RULER's noise, a user's texts, or a built-in text.

Noise is one line of five short sentences, repeated (RULER, arXiv 2404.06654). An essay is a list of sentences that are
joined by single spaces and begin anew where they end: those of the user's files, in the order given, or the built-in
text, which is generated (never fetched) and always the same. Needles as haystack are drawn with each sample, in
`needles.py`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from decaybench.core.errors import UserError
from decaybench.text.generated import town_stories

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

_MOST_BYTES = 8 * 2**20  # of a user's text: some two million tokens
_MOST_UNREADABLE = 0.1  # share of the characters that aren't UTF-8 from which on a file is no text
_LONGEST_SENTENCE = 80  # words; a text without full stops is cut at that
_LONGEST_WORD = 400  # characters; a text without spaces is cut at that


@dataclass(frozen=True)
class Essay:
    """A text to hide needles in.

    name: what a reader knows it by; sentences: at least one, none of them empty or with a newline; sha256: of the
    sentences joined by single spaces, in UTF-8.
    """

    name: str
    sentences: tuple[str, ...]
    sha256: str


@cache
def builtin_essay() -> Essay:
    """The generated stories of `generated.py`, some 155,000 words."""
    return _essay("built-in", list(town_stories()))


def read_essay(paths: Sequence[Path]) -> Essay:
    """The sentences of text files, one file after the other; a folder stands for its .txt files by name.

    Of more than 8 MiB only the beginning is read. Bytes that aren't UTF-8 read as U+FFFD, control characters as spaces.
    Raises UserError where a file is missing, empty or no text.
    """
    files = [file for path in paths for file in _text_files(path)]
    if not files:
        raise UserError("haystack: no file is given")
    sentences: list[str] = []
    left = _MOST_BYTES
    for file in files:
        data = _beginning(file, left)
        sentences += _sentences_of(file, data)
        left -= len(data)
        if not left:
            break
    others = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return _essay(files[0].name + others, sentences)


def split_sentences(text: str) -> list[str]:
    """The sentences of a text; joined by single spaces they are the text again, its white space as single spaces.

    A sentence ends with `.`, `!`, `?` or `…` and the quotes and brackets after it, where white space and then anything
    but a small letter follows, unless the full stop is that of an abbreviation or of an initial. Sentences of more
    than 80 words are cut. Only words of more than 400 characters, as in scripts without spaces, don't come back whole:
    they are cut after the full stops of Chinese and Japanese, and at 400 characters.
    """
    words = [part for word in text.split() for part in _parts_of_word(word)]
    sentences, start = [], 0
    for place, word in enumerate(words, 1):
        if place == len(words) or place - start == _LONGEST_SENTENCE or _ends_sentence(word, words[place]):
            sentences.append(" ".join(words[start:place]))
            start = place
    return sentences


def _essay(name: str, sentences: Sequence[str]) -> Essay:
    return Essay(name, tuple(sentences), hashlib.sha256(" ".join(sentences).encode()).hexdigest())


def _text_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.glob("*.txt") if file.is_file())
    if not files:
        raise UserError(f"haystack: the folder {path} holds no .txt file; name files, or a folder with some")
    return files


def _beginning(file: Path, size: int) -> bytes:
    try:
        with open(file, "rb") as stream:
            return stream.read(size)
    except OSError as error:
        raise UserError(f"haystack: can't read {file}: {error.strerror}") from None


def _sentences_of(file: Path, data: bytes) -> list[str]:
    text = data.decode("utf-8-sig", errors="replace")
    unreadable = text.count("\ufffd") + text.count("\0")
    if unreadable > _MOST_UNREADABLE * len(text):
        raise UserError(f"haystack: {file} is no text in UTF-8: {unreadable} of {len(text)} characters can't be read")
    sentences = split_sentences(_CONTROL.sub(" ", text))
    if not sentences:
        raise UserError(f"haystack: {file} is empty; name a file with text")
    return sentences


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_OPENING = "\"'“‘«([{*_—-"
_FULL_STOP = re.compile(r"([.!?…。！？])[\"'”’»)\]}*_]*$")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)+")  # J., U.S., p.m.
_TITLES = """mr mrs ms messrs mme mlle dr prof rev hon st mt ft gen col maj capt lt sgt cpl adm gov sen rep pres sr esq
    vs viz cf ed eds"""
_COUNTS = """no nos vol vols fig figs eq eqs ch chap sec pp art approx ca jan feb mar apr jun jul aug sep sept oct nov
    dec"""
_BEFORE_NAMES, _BEFORE_NUMBERS = frozenset(_TITLES.split()), frozenset(_COUNTS.split())


def _ends_sentence(word: str, following: str) -> bool:
    stop = _FULL_STOP.search(word)
    first = following.lstrip(_OPENING)[:1]
    if stop is None or first.islower():
        return False
    if stop[1] != ".":
        return True
    bare = word[: stop.start()].lstrip(_OPENING).lower()
    if bare in _BEFORE_NAMES or (bare in _BEFORE_NUMBERS and first.isdigit()):
        return False
    # "It was I." is more frequent than "I. Newton".
    return bare == "i" or not _INITIALS.fullmatch(bare + ".")


def _parts_of_word(word: str) -> Iterator[str]:
    if len(word) <= _LONGEST_WORD:
        yield word
        return
    for part in re.split(r"(?<=[。！？])", word):
        for start in range(0, len(part), _LONGEST_WORD):
            yield part[start : start + _LONGEST_WORD]
