"""Blocks of memory that are counted, to see whether any is left."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.runtime.memory import HostBlock


class CountedBlock:
    """A HostBlock that keeps count of how many, and how many bytes, are alive."""

    alive = 0
    alive_bytes = 0

    def __init__(self, nbytes: int) -> None:
        self._block = HostBlock(nbytes)
        self._nbytes = nbytes
        CountedBlock.alive += 1
        CountedBlock.alive_bytes += nbytes

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return self._block.array(offset, shape, dtype)

    def release(self) -> None:
        CountedBlock.alive -= 1
        CountedBlock.alive_bytes -= self._nbytes
        self._block.release()
