"""Tokens that are chosen on the device, a few steps ahead of the host.

The device feeds each chosen token to the next step by itself. The host learns of them in order; when it wants none of
what follows (a stop token, Ctrl-C), what was computed ahead lies beyond the sequence and is overwritten.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from strata.gguf.cuda_footprint import CHOSEN
from strata.kernels.cuda_layout import MOST_TOP_K, Sampling
from strata.runtime.sampler import SamplerOptions


def sampling_of(options: SamplerOptions) -> NDArray[np.uint8] | None:
    """Return the bytes of a `Sampling`, or None for what only the host can do: sampling from all or very many."""
    if options.temperature == 0:
        sampling = Sampling(0.0, 1.0, -math.inf, options.seed, 1)
    elif 0 < options.top_k <= MOST_TOP_K:
        log_min_p = math.log(options.min_p) if options.min_p else -math.inf
        sampling = Sampling(options.temperature, options.top_p, log_min_p, options.seed, options.top_k)
    else:
        return None
    return np.frombuffer(bytes(sampling), np.uint8)


class RunsAhead(Protocol):
    """Runs steps whose tokens the device chooses."""

    def start(self, token: int, position: int, sampling: NDArray[np.uint8]) -> None:
        """Make `token` the next step's, at `position`."""

    def advance(self, slot: int) -> Any:
        """Launch a step; its token goes to `slot` of the host's ring. Return the event after it."""

    def chosen(self, slot: int, event: Any) -> int:
        """Wait for `event` and return the token in `slot`."""


class CudaChain:
    """Implements `strata.runtime.loader.Chain`.

    Parameters
    ----------
    steps : RunsAhead
    sampling : NDArray[np.uint8]
        See `sampling_of`.
    """

    def __init__(self, steps: RunsAhead, sampling: NDArray[np.uint8]) -> None:
        assert sampling.nbytes == ctypes.sizeof(Sampling)
        self._steps = steps
        self._sampling = sampling
        self._ahead: deque[tuple[int, Any]] = deque()  # slot and event of each step in flight
        self._expected: tuple[int, int] | None = None
        self._next_slot = 0

    def __call__(self, token: int, position: int, most: int) -> int | None:
        """See `Chain`."""
        if self._expected != (token, position):
            self._ahead.clear()
            self._steps.start(token, position, self._sampling)
        self._expected = None  # until this call has ended well
        while len(self._ahead) < min(CHOSEN, most):
            slot, self._next_slot = self._next_slot, (self._next_slot + 1) % CHOSEN
            self._ahead.append((slot, self._steps.advance(slot)))
        following = self._steps.chosen(*self._ahead.popleft())
        if following < 0:
            return None
        self._expected = following, position + 1
        return following
