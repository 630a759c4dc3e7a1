"""Philox4x32-10: random numbers as a pure function of (counter, key), the same on every backend.

Source: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the
constants and test vectors are those of the authors' Random123.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)  # golden ratio, sqrt(3) - 1
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Four random words for each counter.

    Parameters
    ----------
    counter : NDArray[np.uint32], shape (..., 4)
    key : NDArray[np.uint32], shape (..., 2)
        Broadcast against the counters.

    Returns
    -------
    NDArray[np.uint32], shape (..., 4)
    """
    c0, c1, c2, c3 = np.moveaxis(counter.astype(np.uint64), -1, 0)
    k0, k1 = np.moveaxis(key.astype(np.uint64), -1, 0)
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _HALF) ^ c1 ^ k0, second & _LOW, (first >> _HALF) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def uniform(seed: int, position: int) -> float:
    """One draw from [0, 1) with 53 random bits, a function of (seed, position) alone.

    The key is `seed`, the counter is `position` (both 64 bits, low word first); the draw is the top 53 bits of the
    first two output words, times 2**-53.
    """
    counter = np.array([position & 0xFFFFFFFF, position >> 32, 0, 0], dtype=np.uint32)
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32)
    high, low = (int(word) for word in philox4x32(counter, key)[:2])
    return ((high << 32 | low) >> 11) * 2.0**-53
