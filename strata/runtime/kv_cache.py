"""The KV cache: keys and values of every position so far, in the plan's ``kv_cache`` line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strata.kernels.ops import KvLayer
from strata.runtime.memory import PlannedMemory

DTYPES = {"f16": np.float16, "f32": np.float32}


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one layer keeps of a position: `heads` keys of `key_length` and values of `value_length`."""

    heads: int
    key_length: int
    value_length: int


class KvCache:
    """Cells for `capacity` positions in every layer; the first `length` of them are filled.

    Parameters
    ----------
    memory : PlannedMemory
    line : str
        Id of the plan's line the cells are carved out of.
    shapes : sequence of KvShape
        One a layer.
    capacity : int
        Positions: the plan's context.
    kv : str
        "f16" or "f32".
    """

    def __init__(self, memory: PlannedMemory, line: str, shapes: Sequence[KvShape], *, capacity: int, kv: str) -> None:
        self.capacity = capacity
        self.length = 0
        self.layers = tuple(
            KvLayer(
                keys=memory.array(line, (capacity, s.heads, s.key_length), DTYPES[kv], name=f"keys of layer {i}"),
                values=memory.array(line, (capacity, s.heads, s.value_length), DTYPES[kv], name=f"values of layer {i}"),
            )
            for i, s in enumerate(shapes)
        )

    @property
    def left(self) -> int:
        """Positions that are still free."""
        return self.capacity - self.length

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on, so that a shared prefix can be continued another way."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot keep {length} of {self.length} positions")
        self.length = length
