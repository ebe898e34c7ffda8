"""Near-name hints: every unknown name is answered with the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from decaybench.core.errors import UserError


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when nothing is close."""
    choices = {candidate.lower(): candidate for candidate in known}
    found = difflib.get_close_matches(name.lower(), choices, n=1, cutoff=0.5)
    return choices[found[0]] if found else None


def unknown(what: str, name: str, known: Iterable[str]) -> UserError:
    """The error for an unknown name, e.g. `unknown model 'mamba3'; did you mean 'mamba2'?`."""
    known = sorted(known)
    hint = nearest(name, known)
    tail = f"did you mean {hint!r}?" if hint else f"known: {', '.join(known) or 'none'}"
    return UserError(f"unknown {what} {name!r}; {tail}")
