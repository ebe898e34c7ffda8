"""Content hashes: the same content has the same hash on every machine and in every process."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def canonical_json(content: Any) -> str:
    """`content` as JSON with sorted keys and no spaces. Raises ValueError on NaN and infinities."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def without_absent(content: Any) -> Any:
    """`content` without the keys whose value is None, at every level.

    So an option that is added later, and is None where it doesn't apply, changes no hash that exists already.
    """
    if isinstance(content, dict):
        return {key: without_absent(value) for key, value in content.items() if value is not None}
    if isinstance(content, list | tuple):
        return [without_absent(value) for value in content]
    return content


def digest(content: Any) -> str:
    """The sha256 of `content`'s canonical JSON: 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """The sha256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def key64(*parts: Any) -> int:
    """A 64-bit key for counter-based draws, made from JSON-able parts."""
    return int(digest(list(parts))[:16], 16)
