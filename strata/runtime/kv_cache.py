"""The KV cache: keys and values of every position so far, and the tokens they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strata.kernels.ops import KvLayer
from strata.runtime.memory import PlannedMemory

LINE = "kv_cache"
DTYPES = {"f16": np.float16, "f32": np.float32}


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one layer keeps of a position: `heads` keys of `key_length` and values of `value_length`."""

    heads: int
    key_length: int
    value_length: int


class KvCache:
    """Cells for `capacity` positions in every layer.

    Parameters
    ----------
    memory : PlannedMemory
    shapes : sequence of KvShape
        One a layer.
    capacity : int
        Positions: the plan's context.
    kv : str
        "f16" or "f32".

    Attributes
    ----------
    layers : tuple of KvLayer
    tokens : list of int
        Whose cells are complete, from position 0. The one place that says how long the cache is: an interrupted
        forward pass has written cells, but added no tokens.
    """

    def __init__(self, memory: PlannedMemory, shapes: Sequence[KvShape], *, capacity: int, kv: str) -> None:
        self.capacity = capacity
        self.tokens: list[int] = []
        self.layers = tuple(
            KvLayer(
                keys=memory.array(LINE, (capacity, s.heads, s.key_length), DTYPES[kv], name=f"keys of layer {i}"),
                values=memory.array(LINE, (capacity, s.heads, s.value_length), DTYPES[kv], name=f"values of layer {i}"),
            )
            for i, s in enumerate(shapes)
        )

    @property
    def length(self) -> int:
        """Positions that are filled."""
        return len(self.tokens)

    @property
    def left(self) -> int:
        """Positions that are still free."""
        return self.capacity - len(self.tokens)

    def shared_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens of `tokens` the cache holds."""
        pairs = zip(self.tokens, tokens, strict=False)
        return next((i for i, (held, token) in enumerate(pairs) if held != token), min(self.length, len(tokens)))

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on."""
        del self.tokens[length:]
