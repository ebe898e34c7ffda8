"""Counter-based draws: every number is a pure function of (key, index, stream, place).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), vectorised over samples
with NumPy. The 64-bit key names what is drawn (task, version, configuration, seed); the counter's first 64 bits are
the sample's index, the third word the place within a stream and the fourth the stream, so that a sample is the same
in whatever batch it is drawn, and no two quantities of a sample share a number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt32 = NDArray[np.uint32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10


def philox4x32(counter: tuple[UInt32, UInt32, UInt32, UInt32], key: tuple[int, int]) -> UInt32:
    """One Philox4x32-10 block for each counter.

    counter: four uint32 arrays that broadcast against each other; key: two 32-bit words.
    Returns uint32 [..., 4].
    """
    c0, c1, c2, c3 = (word.astype(np.uint64) for word in np.broadcast_arrays(*counter))
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


class Draws:
    """The draws of a block of samples under one key.

    key: 64-bit integer (`core.hashing.key64`); indices: int64 [B], the samples' indices, each >= 0.
    Each method takes a `stream`, a small integer: draws of different streams are independent, and asking twice for
    the same stream gives the same numbers.
    """

    def __init__(self, key: int, indices: Int64) -> None:
        self._key = (key & 0xFFFFFFFF, key >> 32)
        self._indices = np.asarray(indices, dtype=np.uint64)[:, None]

    def bits(self, stream: int, n: int) -> UInt32:
        """Uniform 32-bit words, uint32 [B, n]."""
        low = (self._indices & _LOW).astype(np.uint32)
        high = (self._indices >> _SHIFT).astype(np.uint32)
        blocks = -(-n // 4)
        places = np.arange(blocks, dtype=np.uint32)[None, :]
        words = philox4x32((low, high, places, np.array([[stream]], dtype=np.uint32)), self._key)
        return words.reshape(len(words), 4 * blocks)[:, :n]

    def integers(self, stream: int, n: int, bound: int | Int64) -> Int64:
        """Uniform integers in [0, bound), int64 [B, n]; `bound` may be an array that broadcasts to [B, n].

        Multiply and shift: the bias is at most bound / 2^32.
        """
        scaled = self.bits(stream, n).astype(np.uint64) * np.asarray(bound, dtype=np.uint64)
        return (scaled >> _SHIFT).astype(np.int64)

    def uniform(self, stream: int, n: int) -> Float64:
        """Uniform numbers in the open interval (0, 1), float64 [B, n]."""
        return (self.bits(stream, n).astype(np.float64) + 0.5) / 2.0**32

    def permutation(self, stream: int, n: int) -> Int64:
        """A random order of 0..n-1, int64 [B, n]."""
        return np.argsort(self.bits(stream, n), axis=1, kind="stable").astype(np.int64)

    def distinct(self, stream: int, n: int, bound: int) -> Int64:
        """n distinct integers of [0, bound) in random order, int64 [B, n]. Needs n <= bound.

        Floyd's algorithm (uniform over sets, n steps whatever the bound), then a random order.
        Uses `stream` and `stream + 1`.
        """
        steps = np.arange(bound - n, bound, dtype=np.int64)
        picks = self.integers(stream, n, steps[None, :] + 1)
        chosen = np.full_like(picks, -1)
        for place in range(n):
            taken = (chosen[:, :place] == picks[:, place : place + 1]).any(axis=1)
            chosen[:, place] = np.where(taken, steps[place], picks[:, place])
        return np.take_along_axis(chosen, self.permutation(stream + 1, n), axis=1)

    def weighted(self, stream: int, n: int, weights: Float64) -> Int64:
        """n distinct places of 0..m-1 drawn one after the other in proportion to weights [m], int64 [B, n].

        The n smallest of independent exponential times with these rates, in their order, which has the law of
        drawing without replacement (Efraimidis and Spirakis, 2006). Needs n <= m.
        """
        times = -np.log(self.uniform(stream, len(weights))) / weights
        # A stable sort of all, not a partition: what a partition does with equal times differs between machines.
        return np.argsort(times, axis=1, kind="stable")[:, :n].astype(np.int64)
