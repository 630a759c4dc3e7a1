"""Which expert leaves the cache when another needs its slot.

An expert is a key: ``layer * experts + expert``. A policy remembers every key it ever saw used, resident or
not, so an expert that comes back does not start from nothing.

Age is counted in calls of the expert's own layer, of which every token (or prompt chunk) makes one. A clock that all
layers share would make the early layers' experts look a whole sweep older than the late ones' by the end of each token,
although they are the next to be asked for.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.intp]


class EvictionPolicy(Protocol):
    """Worth of the experts, by their use."""

    def used(self, keys: Keys) -> None:
        """Note one call of a layer, which used each of `keys` (distinct, all of that layer) once."""

    def worth(self, keys: Keys) -> NDArray[np.float64]:
        """Return how much each key is worth keeping; the smallest leaves first."""


class LeastRecentlyUsed:
    """Keep what was used last, in calls of its own layer.

    Parameters
    ----------
    layers : int
        Of the model, those without experts included.
    experts : int
        Of each layer.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._experts = experts
        self._calls = np.zeros(layers, np.int64)  # of each layer
        self._last = np.zeros(layers * experts, np.int64)  # the call of its layer that used a key

    def used(self, keys: Keys) -> None:
        """See `EvictionPolicy`."""
        layer = keys[0] // self._experts
        self._calls[layer] += 1
        self._last[keys] = self._calls[layer]

    def age(self, keys: Keys) -> NDArray[np.int64]:
        """Return how many calls of its layer each key was not used in, since its last use."""
        age: NDArray[np.int64] = self._calls[keys // self._experts] - self._last[keys]
        return age

    def worth(self, keys: Keys) -> NDArray[np.float64]:
        """Return minus the age."""
        return -self.age(keys).astype(np.float64)


class FrequencyOverAge(LeastRecentlyUsed):
    """Keep what is used often, and forget it as it ages: uses divided by calls of its layer since the last use.

    Unlike recency alone this survives the sweep over the layers that every token makes: an expert used in
    half of all tokens outlives one that was merely used a layer ago.
    """

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__(layers, experts)
        self._uses = np.zeros(layers * experts, np.int64)

    def used(self, keys: Keys) -> None:
        """See `EvictionPolicy`."""
        super().used(keys)
        self._uses[keys] += 1

    def worth(self, keys: Keys) -> NDArray[np.float64]:
        """Return uses over age, in uses per call."""
        return self._uses[keys] / (self.age(keys) + 1)
