"""LAMBADA's passages (Paperno et al., arXiv 1606.06031): reading them, and what is context and what is target.

    openai     cased text, a JSON object a line:            {"text": "... I can make it there on my own, Shane"}
    standard   lower-cased, clitics split, a passage a line: ... i can make it there on my own , shane

The two have other words and other scores, so what looks like the other one is refused. A passage is split at its last
space: the target is " " + last word, the context all before it, and their tokens are those of lm-eval's
`lambada_openai`: white space at the context's end goes over to the target, and the target's tokens are those of the
whole passage beyond as many as the context alone has.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from decaybench.core.errors import UserError
from decaybench.core.hashing import digest
from decaybench.text.documents import HubRows, read_part
from decaybench.text.sources import EMPTY_DOCUMENTS, EMPTY_FILES, HUB, Part, Problems, Rules, Source, find_sources
from decaybench.text.tokenizers import Tokenizer

Variant = Literal["openai", "standard"]

# sha256 of the published test sets, as `Passages.sha256` counts it.
PUBLISHED: dict[Variant, str] = {
    "openai": "cb465e606267f25f32a0f984a427001f8ed7f7a6427e92f25a73c817b15db05d",
    "standard": "df81a660febdaf28d56bc74d323711682356661f6086c26c107310809cbe55f5",
}

_ROWS_AT_ONCE = 1 << 20  # characters
_LONGEST = 1 << 16  # characters of a passage; LAMBADA's have 1,000
_MOST = 1 << 28  # characters of all of them
_SHOWN = 60
_CASED = re.compile(r"[A-Z]")
_MOST_CASED = 0.01  # share of passages with a capital letter in `standard`, which has none


@dataclass(frozen=True)
class Passages:
    """The passages of a file or a data set.

    name: of the file or data set; texts: each with a space in it; sha256: over the texts in their order; problems: what
    was skipped or replaced, a line each.
    """

    name: str
    texts: tuple[str, ...]
    sha256: str
    problems: tuple[str, ...]


class Pair(NamedTuple):
    """A passage's tokens: what is read, and what is to be said after it, at least one."""

    context: list[int]
    target: list[int]


def read_passages(variant: Variant, file: str) -> Passages:
    """The passages of a file (.jsonl, .parquet: field `text`; .txt: a line each), or of hf://NAME:CONFIG:SPLIT.

    Skipped, and counted: broken rows, passages without a space, longer ones than 65,536 characters.
    Raises UserError where it can't be read, holds no passage, or those of the other variant; RunError where a package
    is missing or the hub can't be reached.
    """
    if file.startswith(HUB):
        return _read(variant, file)
    stamp = file_stamp(Path(file))
    if stamp is None:
        raise UserError(f"task.file: no file {file!r}; write the path of LAMBADA's passages, or {HUB}NAME:CONFIG:SPLIT")
    return _read(variant, file, stamp)


def file_stamp(path: Path) -> tuple[int, int] | None:
    """A file's size and when it was changed, by which another one of that name is told; None: there is no such file."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None
    return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def split_passage(text: str) -> tuple[str, str]:
    """(context, target): the target is the last space and the word after it."""
    context, _, word = text.rpartition(" ")
    return context, " " + word


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[Pair]:
    """The tokens of (context, target) texts. Raises UserError where the tokenizer has none for them."""
    moved = [_with_spaces_moved(context, target) for context, target in pairs]
    whole = tokenizer.encode_many([context + target for context, target in moved])
    contexts = tokenizer.encode_many([context for context, _ in moved])
    if not all(whole):
        raise UserError(f"task.tokenizer: {tokenizer.name} makes no token of {_shown(''.join(pairs[whole.index([])]))}")
    # A tokenizer may need no more tokens for the whole than for the context alone: then the last one is the target.
    return [
        Pair(context, ids[len(context) :]) if len(ids) > len(context) else Pair(ids[:-1], ids[-1:])
        for context, ids in zip(contexts, whole, strict=True)
    ]


def last_occurrence(context: str, target: str) -> int | None:
    """Where in the context the target's word stands last, as the place of its end; None: it doesn't.

    Whole words in any case, without the quotes and punctuation around the target.
    """
    word = _EDGES.sub("", target)
    if not word:
        return None
    ends = [found.end() for found in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", context, re.IGNORECASE)]
    return ends[-1] if ends else None


_EDGES = re.compile(r"^[\W_]+|[\W_]+$")


@lru_cache(maxsize=4)
def _read(variant: Variant, file: str, stamp: tuple[int, int] | None = None) -> Passages:
    """stamp: of a file, so that another one of that name is read again."""
    problems = Problems()
    kept: list[str] = []
    skipped: dict[str, tuple[int, str]] = {}
    total = 0
    for number, (text, whole) in enumerate(_texts(file, problems), start=1):
        reason = _unusable(text, whole)
        if reason:
            count, first = skipped.get(reason, (0, f"number {number}, {_shown(text)}"))
            skipped[reason] = (count + 1, first)
            continue
        total += len(text)
        if total > _MOST:
            raise UserError(
                f"task.file: {file} holds more than {_MOST >> 20} Mi characters: it is no file of LAMBADA's"
            )
        kept.append(text)
    found = [line for line in problems.lines() if EMPTY_DOCUMENTS not in line and EMPTY_FILES not in line]
    found += [f"{count:,} {reason} skipped; the first: {first}" for reason, (count, first) in skipped.items()]
    if not kept:
        raise UserError(f"task.file: {file} holds no passage" + (f" ({found[0]})" if found else ""))
    _check_variant(variant, file, kept)
    name = file if file.startswith(HUB) else Path(file).name
    return Passages(name, tuple(kept), digest(kept), tuple(f"{name}: {line}" for line in found))


def _texts(file: str, problems: Problems) -> Iterator[tuple[str, bool]]:
    """The texts of a file or data set, and whether each is whole."""
    rules = Rules(split_on="lines")
    for source in find_sources([file], rules, problems):
        pieces = _hub(source, rules, problems) if source.kind == "hub" else _file(source, rules, problems)
        yield from pieces


def _file(source: Source, rules: Rules, problems: Problems) -> Iterator[tuple[str, bool]]:
    stop = len(source.weights) if source.kind == "parquet" else source.size
    for piece in read_part(Part(0, source, 0, stop, stop), rules, problems):
        if piece.starts:  # the other pieces of a long one count once
            text = piece.text.rstrip()
            yield (text.lstrip() if source.kind == "text" else text), piece.ends


def _hub(source: Source, rules: Rules, problems: Problems) -> Iterator[tuple[str, bool]]:
    for stretch in HubRows(source, 0, rules).stretches(0, _ROWS_AT_ONCE):
        problems.merge(stretch.problems)
        yield from ((piece.text.rstrip(), True) for piece in stretch.pieces)


def _unusable(text: str, whole: bool) -> str | None:
    if not whole or len(text) > _LONGEST:
        return f"passages of more than {_LONGEST:,} characters"
    if not split_passage(text)[0].strip():
        return "passages without a space"
    return None


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")


def _check_variant(variant: Variant, file: str, texts: Iterable[str]) -> None:
    cased = [bool(_CASED.search(text)) for text in texts]
    share = sum(cased) / len(cased)
    if variant == "standard" and share > _MOST_CASED:
        raise UserError(
            f"task.file: {file} has capital letters in {share:.0%} of its passages, and LAMBADA `standard` has none: "
            "these are of `openai`"
        )
    if variant == "openai" and not share:
        raise UserError(
            f"task.file: {file} has no capital letter, and LAMBADA `openai` is cased: these are of `standard`"
        )


def _with_spaces_moved(context: str, target: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + target
