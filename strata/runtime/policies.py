"""Which expert leaves the cache when another needs its slot.

An expert is a key: ``layer * experts + expert``. A policy remembers every key it ever saw used, resident or
not, so an expert that comes back does not start from nothing.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.intp]


class EvictionPolicy(Protocol):
    """Worth of the experts, by their use."""

    def used(self, keys: Keys) -> None:
        """Note one layer call, which used each of `keys` (distinct) once."""

    def worth(self, keys: Keys) -> NDArray[np.float64]:
        """Return how much each key is worth keeping; the smallest leaves first."""


class LeastRecentlyUsed:
    """Keep what was used last. `keys` is the number of experts in the model."""

    def __init__(self, keys: int) -> None:
        self._now = 0
        self._last = np.zeros(keys, np.int64)

    def used(self, keys: Keys) -> None:
        """See `EvictionPolicy`."""
        self._now += 1
        self._last[keys] = self._now

    def worth(self, keys: Keys) -> NDArray[np.float64]:
        """Return the call each key was last used in."""
        return self._last[keys].astype(np.float64)


class FrequencyOverAge:
    """Keep what is used often, and forget it as it ages: uses divided by calls since the last use.

    Unlike recency alone this survives the sweep over the layers that every token makes: an expert used in
    half of all tokens outlives one that was merely used a layer ago.
    """

    def __init__(self, keys: int) -> None:
        self._now = 0
        self._last = np.zeros(keys, np.int64)
        self._uses = np.zeros(keys, np.int64)

    def used(self, keys: Keys) -> None:
        """See `EvictionPolicy`."""
        self._now += 1
        self._last[keys] = self._now
        self._uses[keys] += 1

    def worth(self, keys: Keys) -> NDArray[np.float64]:
        """Return uses over age, in uses per call."""
        return self._uses[keys] / (self._now - self._last[keys] + 1)
