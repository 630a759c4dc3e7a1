"""The definition of `CudaOps.make_ready`: which slots a call's experts get, and what is copied there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from strata.kernels.ops import Array
from strata.kernels.residency import EMPTY, Policy, Pool, Tables

Bytes = NDArray[np.uint8]


def worth(tables: Tables, keys: NDArray[np.int32], layer: int) -> NDArray[np.float32]:
    """Return float32: what each of `keys` is worth in a call of `layer` that has begun; see `Policy`."""
    layers = keys // tables.experts
    age: NDArray[np.float32] = (tables.calls[layers] + (layers == layer) - tables.use[keys, 0]).astype(np.float32)
    uses: NDArray[np.float32] = tables.use[keys, 1].astype(np.float32)
    if tables.policy is Policy.RECENCY:
        return -age
    return uses if tables.policy is Policy.PROFILE else np.divide(uses, age + np.float32(1), dtype=np.float32)


def make_ready(
    tables: Tables, pool: Pool, layer: int, ids: Array, slots: Array, read: Callable[[int, int], Bytes]
) -> None:
    """Give every expert that a call of `layer` asks for a slot, and fill those that had none.

    Parameters
    ----------
    tables : Tables
        Changed: what was used, who lies where, `counts` and `wanted`.
    pool : Pool
        With at least as many slots as different experts are asked for.
    layer : int
    ids : Array
        int32 [T, K]: the experts asked for, those of a token all different.
    slots : Array
        int32 [T, K], written: the slot of each.
    read : callable
        Returns the bytes at an address of `Tables.source`, of a given number.
    """
    asked = ids.reshape(-1)
    distinct = asked[np.sort(np.unique(asked, return_index=True)[1])]  # in the order they are asked for
    keys = layer * tables.experts + distinct
    tables.use[keys, 0] = tables.calls[layer] + 1
    if tables.policy is not Policy.PROFILE:
        tables.use[keys, 1] += 1
    missing = keys[tables.slot_of[keys] == EMPTY]
    tables.wanted[0] = 0
    evictions = filled = 0
    if len(missing):
        ranked = np.full(len(pool.owner), -np.inf, np.float32)
        taken = pool.owner != EMPTY
        ranked[taken] = worth(tables, pool.owner[taken], layer)
        present = tables.slot_of[keys]
        ranked[present[present != EMPTY]] = np.inf
        for key, slot in zip(missing.tolist(), np.argsort(ranked, kind="stable").tolist(), strict=False):
            if pool.owner[slot] != EMPTY:
                tables.slot_of[pool.owner[slot]] = EMPTY
                evictions += 1
            pool.owner[slot], tables.slot_of[key] = key, slot
            source = int(tables.source[key])
            if source:
                pool.data[slot * pool.stride : slot * pool.stride + pool.nbytes] = read(source, pool.nbytes)
                filled += 1
            else:
                at = 1 + 2 * int(tables.wanted[0])
                tables.wanted[at : at + 2] = key, slot
                tables.wanted[0] += 1
    tables.calls[layer] += 1
    done = (len(keys) - len(missing), len(missing), evictions, filled * pool.nbytes)
    tables.counts[...] += np.array(done, tables.counts.dtype)
    slots[...] = tables.slot_of[layer * tables.experts + ids]
