"""Work cut into pieces whose temporaries stay in a core's cache, or in memory that was there before.

On a CPU a pass over more than the cache holds costs several times the arithmetic in it, and fresh memory costs again.
An op of many passes does them all on one piece before it turns to the next. A GPU has it the other way round: there
everything is one piece.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_CACHED = 2**17  # numbers in a temporary, for each thread: a few of them fit into a second-level cache


def pieces(count: int, size: int, device: torch.device, most: int | None = None) -> Iterator[slice]:
    """Slices that cover `count` rows in order, each row with temporaries of `size` numbers; a piece of them has at most
    `most` for each thread (None: what a cache holds), or is one row.
    """
    step = count
    if device.type == "cpu":
        step = (most or _CACHED) * torch.get_num_threads() // max(1, size)
    step = max(1, step)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
