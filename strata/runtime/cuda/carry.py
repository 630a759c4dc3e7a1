"""Experts that the device cannot read by itself: several threads copy them to the staging ring, and on from there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from strata.doctor.plan import Tier
from strata.kernels.ops import Array
from strata.kernels.workers import WORTH_A_THREAD, Task, Workers
from strata.runtime.cuda.device import CudaDevice
from strata.runtime.expert_store import Bytes, ExpertStore

_PIECE = 512 << 10  # least bytes that a thread copies at once: the interpreter takes tens of microseconds between two
_PIECES = 2  # most for each thread, so that many experts are not cut small
_THREADS = 8  # most: more have been slower, as each has to wait for the interpreter


class Carrier:
    """Fills slots from pageable memory and from the file.

    NumPy lets go of the interpreter while it copies, so the threads run side by side; each sends on what it has copied
    while the others copy the next.

    Parameters
    ----------
    device : CudaDevice
    store : ExpertStore
        What it keeps lies as in a slot.
    threads : int
    """

    def __init__(self, device: CudaDevice, store: ExpertStore, threads: int) -> None:
        self._device = device
        self._store = store
        self._workers = Workers(min(threads, _THREADS))

    def carry(self, wanted: Sequence[tuple[int, Array]]) -> Counter[Tier]:
        """Fill the given places with the experts of the given keys, in order with the stream.

        Nothing that was sent from the ring before may still be on its way. Returns the bytes by where they came from.
        """
        carried: Counter[Tier] = Counter()
        ring = self._store.ring
        for start in range(0, len(wanted), len(ring)):
            if start:
                self._device.wait()
            tasks: list[Task] = []
            some = wanted[start : start + len(ring)]
            piece = max(_PIECE, sum(place.nbytes for _, place in some) // (_PIECES * self._workers.threads))
            for entry, (key, place) in zip(ring, some, strict=False):
                held, _ = self._store.held(key)  # what could not be page-locked lies in ordinary RAM
                tasks += self._tasks(key, held, entry[: place.nbytes], place, piece)
                carried[Tier.FILE if held is None else Tier.PAGEABLE] += place.nbytes
            self._workers.run(tasks, WORTH_A_THREAD)
        return carried

    def _tasks(self, key: int, held: Bytes | None, entry: Bytes, place: Array, most: int) -> Iterator[Task]:
        if held is None:
            yield partial(self._read, key, entry, place)
            return
        step = -(-len(entry) // -(-len(entry) // most))  # pieces of one size
        for start in range(0, len(entry), step):
            piece = slice(start, start + step)
            yield partial(self._copy, held[piece], entry[piece], place[piece])

    def _read(self, key: int, entry: Bytes, place: Array, worker: int) -> None:
        self._store.copy(key, entry)
        self._device.send(place, entry)

    def _copy(self, held: Bytes, entry: Bytes, place: Array, worker: int) -> None:
        np.copyto(entry, held)
        self._device.send(place, entry)
