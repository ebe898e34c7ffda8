"""The effective sample size of equal writes under given decays: what a filter's measured one is held against.

A head whose log decays are g_t and whose writes are all alike has

    S_t = e^{g_t} S_{t-1} + 1,   D_t = e^{2 g_t} D_{t-1} + 1,   n_t = S_t^2 / D_t   (models/addons/bft.py)

so that n_t = t without decay, a static decay of timescale tau saturates, n -> coth(1 / (2 tau)), nearly 2 tau, and
PoST's slowest head, g_t = -a / t, grows for ever, n / t -> (2 a + 1) / (a + 1)^2.
"""

from __future__ import annotations

from math import tanh

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


def sample_sizes(log_decay: Float64) -> Float64:
    """n of equal writes with these log decays [T, ...], by the module's recurrence; [T, ...]."""
    S = D = np.zeros(log_decay.shape[1:])
    found = np.empty_like(log_decay)
    for t, g in enumerate(log_decay):
        S, D = np.exp(g) * S + 1, np.exp(2 * g) * D + 1
        found[t] = S * S / D
    return found


def limit_of(timescale: float, taper: float, position: int) -> float:
    """What n tends to at `position` for a head whose timescale there is so long, tokens, and grows with t^taper.

    timescale: infinite where nothing decays, and then n is `position`.
    """
    if taper > 1 - 1e-3:
        a = position / timescale
        return position * (2 * a + 1) / (a + 1) ** 2
    rate = tanh(1 / timescale / 2)
    return 1 / rate if rate else float(position)
