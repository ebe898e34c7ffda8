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
UInt64 = NDArray[np.uint64]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10
_BLOCK = 8192  # counters at a time: they stay in a core's cache


def philox4x32(counter: tuple[UInt32, UInt32, UInt32, UInt32], key: tuple[int, int]) -> UInt32:
    """One Philox4x32-10 block for each counter.

    counter: four uint32 arrays that broadcast against each other; key: two 32-bit words.
    Returns uint32 [..., 4].
    """
    words = np.broadcast_arrays(*counter)
    shape, size = words[0].shape, words[0].size
    flat = [word.reshape(-1) for word in words]
    out = np.empty((size, 4), dtype=np.uint32)
    for start in range(0, size, _BLOCK):
        _philox_block([word[start : start + _BLOCK].astype(np.uint64) for word in flat], key, out[start:])
    return out.reshape(*shape, 4)


def _philox_block(counter: list[UInt64], key: tuple[int, int], out: UInt32) -> None:
    """The words of one block's counters into the first rows of `out`. Works in place."""
    c0, c1, c2, c3 = counter
    product0, product1 = np.empty_like(c0), np.empty_like(c0)
    k0, k1 = key
    for _ in range(_ROUNDS):
        np.multiply(c0, _MULTIPLIERS[0], out=product0)
        np.multiply(c2, _MULTIPLIERS[1], out=product1)
        np.right_shift(product1, _SHIFT, out=c0)
        np.bitwise_xor(c0, c1, out=c0)
        np.bitwise_xor(c0, np.uint64(k0), out=c0)
        np.right_shift(product0, _SHIFT, out=c2)
        np.bitwise_xor(c2, c3, out=c2)
        np.bitwise_xor(c2, np.uint64(k1), out=c2)
        np.bitwise_and(product1, _LOW, out=c1)
        np.bitwise_and(product0, _LOW, out=c3)
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    for place, word in enumerate((c0, c1, c2, c3)):
        out[: len(word), place] = word


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
        return _order(self.bits(stream, n))

    def distinct(self, stream: int, n: int, bound: int) -> Int64:
        """n distinct integers of [0, bound) in random order, int64 [B, n]. Needs n <= bound.

        Floyd's algorithm (uniform over sets, n steps whatever the bound), then a random order.
        Uses `stream` and `stream + 1`.
        """
        steps = np.arange(bound - n, bound, dtype=np.int64)
        picks = self.integers(stream, n, steps[None, :] + 1)
        chosen = np.where(_taken(picks, bound - n), steps, picks)
        return np.take_along_axis(chosen, self.permutation(stream + 1, n), axis=1)

    def weighted(self, stream: int, n: int, weights: Float64) -> Int64:
        """n distinct places of 0..m-1 drawn one after the other in proportion to weights [m], int64 [B, n].

        The n smallest of independent exponential times with these rates, in their order, which has the law of
        drawing without replacement (Efraimidis and Spirakis, 2006). Needs n <= m.
        """
        times = -np.log(self.uniform(stream, len(weights))) / weights
        # A stable sort of all, not a partition: what a partition does with equal times differs between machines.
        return _order_of_times(times)[:, :n]


def _order(words: UInt32) -> Int64:
    """The places of each row's words [B, n] by size, equal ones as they stand: np.argsort(kind="stable"), but faster.

    Word and place together are one number, and no two are the same.
    """
    numbers = words.astype(np.uint64) << _SHIFT
    numbers |= np.arange(words.shape[1], dtype=np.uint64)
    numbers.sort(axis=1)
    return (numbers & _LOW).astype(np.int64)


def _order_of_times(times: Float64) -> Int64:
    """The places of each row's times [B, m], positive, by size, equal ones as they stand.

    As `_order`, with the last bits of a time's binary form in the place's favour; rows in which two times differ in
    these bits alone, hardly any, are sorted as they are.
    """
    m = times.shape[1]
    low = np.uint64((1 << max(1, (m - 1).bit_length())) - 1)
    numbers = times.view(np.uint64) & ~low
    numbers |= np.arange(m, dtype=np.uint64)
    numbers.sort(axis=1)
    order = (numbers & low).astype(np.int64)
    numbers &= ~low
    close = (numbers[:, 1:] == numbers[:, :-1]).any(axis=1)
    order[close] = np.argsort(times[close], axis=1, kind="stable")
    return order


def _taken(picks: Int64, first: int) -> NDArray[np.bool_]:
    """Of Floyd's picks [B, n] in [0, first + place], which were chosen at an earlier place, bool [B, n].

    A place takes its pick, or first + place where that was chosen before. So a pick was chosen before where an earlier
    pick is equal to it, or where it is the first + place of an earlier place that couldn't take its own pick.
    """
    order = _order(picks.astype(np.uint32)) if first + picks.shape[1] <= 2**32 else np.argsort(picks, 1, kind="stable")
    in_order = np.take_along_axis(picks, order, axis=1)
    again = np.zeros_like(picks, dtype=bool)
    np.put_along_axis(again, order[:, 1:], in_order[:, 1:] == in_order[:, :-1], axis=1)
    row, place = np.nonzero((picks >= first) & (picks < first + np.arange(picks.shape[1])))
    taken, before = again, picks[row, place] - first
    while True:  # as often as replaced picks follow one another, which is seldom more than twice
        more = taken[row, before] & ~taken[row, place]
        if not more.any():
            return taken
        taken[row[more], place[more]] = True
