"""Random calls of layers, and tables for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from strata.kernels.residency import COUNTS, EMPTY, MOST_ASKED, Policy, Pool, Tables

LAYERS, EXPERTS, TOP_K = 3, 16, 4
NBYTES, STRIDE = 96, 256


def calls(seed: int, count: int, tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield calls in the order of tokens: a layer, and int32 [T, K] of its experts, a few of them asked for often."""
    rng = np.random.default_rng(seed)
    liked = rng.dirichlet(np.full(EXPERTS, 0.5), LAYERS) + 1e-3
    for call in range(count):
        layer = call % LAYERS
        odds = liked[layer] / liked[layer].sum()
        ids = [rng.choice(EXPERTS, TOP_K, replace=False, p=odds) for _ in range(int(rng.integers(1, tokens + 1)))]
        yield layer, np.array(ids, np.int32)


def tables(
    policy: Policy, sources: np.ndarray, uses: np.ndarray | None, put: Callable[[Any], Any] = lambda array: array
) -> Tables:
    """Make empty tables; `put` brings an array to where they are to lie."""
    keys = LAYERS * EXPERTS
    use = np.zeros((keys, 2), np.uint32)
    if uses is not None:
        use[:, 1] = uses
    return Tables(
        slot_of=put(np.full(keys, EMPTY, np.int32)),
        use=put(use),
        calls=put(np.zeros(LAYERS, np.uint32)),
        source=put(sources),
        counts=put(np.zeros(COUNTS, np.uint64)),
        wanted=put(np.zeros(1 + 2 * MOST_ASKED, np.int32)),
        experts=EXPERTS,
        policy=policy,
    )


def pool(slots: int, put: Callable[[Any], Any] = lambda array: array, word: int = 16) -> Pool:
    """Make an empty pool."""
    owner = put(np.full(slots, EMPTY, np.int32))
    return Pool(owner, put(np.zeros(slots * STRIDE, np.uint8)), STRIDE, NBYTES, word)
