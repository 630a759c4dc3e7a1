"""Blocks of memory that are counted, to see whether any is left."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.runtime.memory import HostBlock


class CountedBlock:
    """A HostBlock that keeps count of how many are alive."""

    alive = 0

    def __init__(self, nbytes: int) -> None:
        self._block = HostBlock(nbytes)
        CountedBlock.alive += 1

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return self._block.array(offset, shape, dtype)

    def release(self) -> None:
        CountedBlock.alive -= 1
        self._block.release()
