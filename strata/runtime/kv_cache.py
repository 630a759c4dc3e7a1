"""The KV cache: keys and values of every position so far, and the tokens they belong to."""

from __future__ import annotations

from collections.abc import Sequence

from strata.gguf.footprint import BufferSpec
from strata.kernels.ops import KvLayer
from strata.runtime.memory import PlannedMemory

LINE = "kv_cache"


class KvCache:
    """Cells for `capacity` positions in every layer.

    Parameters
    ----------
    memory : PlannedMemory
    specs : sequence of tuple of BufferSpec
        The arrays of each layer's `KvLayer`, as `strata.gguf.footprint.kv_cache` lists them.
    capacity : int
        Positions: the plan's context.

    Attributes
    ----------
    layers : tuple of KvLayer
    tokens : list of int
        Whose cells are complete, from position 0. The one place that says how long the cache is: an interrupted
        forward pass has written cells, but added no tokens.
    """

    def __init__(self, memory: PlannedMemory, specs: Sequence[tuple[BufferSpec, ...]], *, capacity: int) -> None:
        self.capacity = capacity
        self.tokens: list[int] = []
        self.layers = tuple(KvLayer(*(memory.buffer(LINE, spec) for spec in layer)) for layer in specs)

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
