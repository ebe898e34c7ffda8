"""What tasks on text share: the tokenizer that a configuration names, and the token that a row starts with."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from decaybench.core.errors import UserError
from decaybench.tasks.base import MissingDataError
from decaybench.text.lambada import file_stamp
from decaybench.text.tokenizers import Tokenizer, load_tokenizer


def _start(value: Any) -> Any:
    if value in ("none", "separator"):
        return value
    try:
        found = int(value)
    except (TypeError, ValueError):
        found = -1
    if isinstance(value, bool | float) or not 0 <= found < 2**31:
        raise ValueError("write none, separator (the tokenizer's end of a document), or the token's id")
    return found


Start = Annotated[int | str, BeforeValidator(_start)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def start_tokens(start: int | str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """What stands before a row: nothing, or one token."""
    if isinstance(start, int):
        return (start,)
    return () if start == "none" else (tokenizer.separator,)


def vocab_size(tokenizer: int | None, start: int | str) -> int:
    """Ids of a tokenizer and of the start token; tokenizer: its own, None where they aren't known."""
    return max(tokenizer or 0, start + 1 if isinstance(start, int) else 0)


def named_tokenizer(spec: str) -> Tokenizer:
    """`load_tokenizer`, once a file: one that was changed since is read again."""
    return _loaded(spec, file_stamp(Path(spec)) or file_stamp(Path(spec) / "tokenizer.json"))


def own_tokenizer(spec: str, sha256: str, load: Callable[[str], Tokenizer] = named_tokenizer) -> Tokenizer:
    """The tokenizer that a task reads by. Raises MissingDataError where it isn't here or has another sha256."""
    needs = f"the tokenizer {Path(spec).name} (sha256 {sha256[:12]}…)"
    try:
        found = load(spec)
    except UserError as error:
        raise MissingDataError(f"task.tokenizer: {error}", needs) from None
    if found.sha256 != sha256:
        what = f"task.tokenizer: {spec} has sha256 {found.sha256[:12]}…, but {sha256[:12]}… is wanted"
        raise MissingDataError(what, needs)
    return found


@lru_cache(maxsize=4)
def _loaded(spec: str, stamp: tuple[int, int] | None) -> Tokenizer:
    """stamp: of its file, so that another one of that name is read again."""
    return load_tokenizer(spec)
