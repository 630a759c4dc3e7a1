"""Every routed expert in its stored, quantised form, in the tier the plan gave it.

Pinned slices hold the hottest experts (by layer order when nothing is known of their use), pageable RAM the
next, and the rest stays in the model file. What is not pinned goes through the staging ring, as a device needs
it to: so the way of a miss is the same on every backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata.doctor.plan import ExpertCachePlan, Tier
from strata.gguf.reader import GGUFFile
from strata.runtime.memory import PlannedMemory, Step

Bytes = NDArray[np.uint8]
Arrange = Callable[[int, int, Bytes, Bytes], None]  # layer, which matrix, as the file has it, where it is to be

PINNED_LINE = "experts_pinned"
PAGEABLE_LINE = "experts_pageable"
STAGING_LINE = "staging_ring"


class StoredExpert(NamedTuple):
    """One expert's matrices as stored, flat."""

    gate: Bytes
    up: Bytes
    down: Bytes


def as_stored(layer: int, part: int, raw: Bytes, out: Bytes) -> None:
    """Copy a matrix as it is: an `Arrange`."""
    out[:] = raw


class ExpertStore:
    """Where misses are filled from.

    Parameters
    ----------
    file : GGUFFile
    tensors : mapping of int to (str, str, str)
        Names of the gate, up and down tensors of each layer that has experts; the last (slowest) dimension
        counts the experts.
    experts : int
        Experts of a layer.
    plan : ExpertCachePlan
        How many go where.
    memory : PlannedMemory
    hottest : sequence of int, optional
        Keys (``layer * experts + expert``), the most used first.
    arrange : Arrange
        Brings a matrix into the order in which its bytes are kept.
    """

    def __init__(
        self,
        file: GGUFFile,
        tensors: Mapping[int, tuple[str, str, str]],
        experts: int,
        plan: ExpertCachePlan,
        memory: PlannedMemory,
        *,
        hottest: Sequence[int] | None = None,
        arrange: Arrange = as_stored,
    ) -> None:
        self.experts = experts
        self.fetched_bytes: Counter[Tier] = Counter()
        self._arrange = arrange
        self._files = {
            layer: StoredExpert(*(file.raw(name).reshape(experts, -1) for name in names))
            for layer, names in tensors.items()
        }
        order = hottest or [layer * experts + expert for layer in sorted(tensors) for expert in range(experts)]
        pinned, pageable = order[: plan.pinned], order[plan.pinned : plan.pinned + plan.pageable]
        self._held: dict[int, Bytes] = {}
        self._tier = dict.fromkeys(pinned, Tier.PINNED) | dict.fromkeys(pageable, Tier.PAGEABLE)
        self._carve(memory, PAGEABLE_LINE, pageable)
        self._memory = memory
        self._next = 0
        if len(self._tier) < len(order) or pageable:
            assert len(self.ring)  # before anything is page-locked
        self._carve(memory, PINNED_LINE, pinned)

    @cached_property
    def ring(self) -> Bytes:
        """The staging ring: a row for each expert that is on its way."""
        largest = max(self._nbytes(layer) for layer in self._files)
        entries = self._memory.left(STAGING_LINE) // largest
        ring: Bytes = self._memory.array(STAGING_LINE, (max(entries, 1), largest), np.uint8, name="staging ring")
        return ring

    @property
    def held_bytes(self) -> int:
        """Bytes that `load` copies into RAM."""
        return sum(held.nbytes for held in self._held.values())

    def load(self, step: Step, threads: int = 1) -> None:
        """Copy the pinned and pageable experts out of the file."""
        order = sorted(self._held.items())  # the file's
        if threads == 1:
            for key, held in order:
                self.copy(key, held)
                step(held.nbytes)
            return
        with ThreadPoolExecutor(threads, "read") as pool:
            try:
                for done in as_completed([pool.submit(self._copied, key, held) for key, held in order]):
                    step(done.result())
            finally:  # Ctrl-C: no thread may write into memory that is given back
                pool.shutdown(cancel_futures=True)

    def held(self, key: int) -> tuple[Bytes | None, Tier]:
        """Return where an expert is kept, None for the file, and the tier of that."""
        return self._held.get(key), self._tier.get(key, Tier.FILE)

    def fetch(self, layer: int, expert: int) -> tuple[StoredExpert, Tier]:
        """Return an expert as stored, and the tier it came from.

        The arrays may lie in the staging ring: they hold until the ring comes round, at the soonest by the next fetch.
        """
        key = layer * self.experts + expert
        tier = self._tier.get(key, Tier.FILE)
        nbytes = self._nbytes(layer)
        self.fetched_bytes[tier] += nbytes
        if tier is Tier.PINNED:
            return self._split(layer, self._held[key]), tier
        entry = self.ring[self._next, :nbytes]
        self._next = (self._next + 1) % len(self.ring)
        if tier is Tier.PAGEABLE:
            entry[:] = self._held[key]
        else:
            self.copy(key, entry)
        return self._split(layer, entry), tier

    def copy(self, key: int, out: Bytes) -> None:
        """Copy an expert out of the file to `out`, flat, as it is kept."""
        layer, expert = divmod(key, self.experts)
        for part, (place, matrix) in enumerate(zip(self._split(layer, out), self._files[layer], strict=True)):
            self._arrange(layer, part, matrix[expert], place)

    def _copied(self, key: int, out: Bytes) -> int:
        self.copy(key, out)
        return out.nbytes

    def _nbytes(self, layer: int) -> int:
        return sum(matrix.shape[1] for matrix in self._files[layer])

    def _carve(self, memory: PlannedMemory, line: str, keys: Sequence[int]) -> None:
        """Take one array for all `keys` and note each one's part of it."""
        if not keys:
            return
        sizes = [self._nbytes(key // self.experts) for key in keys]
        whole = memory.array(line, (sum(sizes),), np.uint8, name=f"{len(keys)} experts")
        ends = np.cumsum(sizes)
        for key, size, end in zip(keys, sizes, ends, strict=True):
            self._held[key] = whole[end - size : end]

    def _split(self, layer: int, flat: Bytes) -> StoredExpert:
        gate, up, _ = (matrix.shape[1] for matrix in self._files[layer])
        return StoredExpert(flat[:gate], flat[gate : gate + up], flat[gate + up :])
