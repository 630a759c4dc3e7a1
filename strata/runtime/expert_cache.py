"""Ready experts in a planned number of slots.

A layer call names its experts; those in slots are hits, the others are filled from the store into the slots
that are worth least. The slots of a wave are held until the wave has run. A call with more distinct experts
than slots goes in waves, so one slot is enough for any model, and since each (token, rank) has a result row of
its own, neither the number of slots nor the order of the waves can change a bit of the answer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from strata.doctor.plan import Tier
from strata.kernels.ops import Array, ExpertWave, WaveOps
from strata.runtime.expert_store import ExpertStore
from strata.runtime.policies import EvictionPolicy, Keys
from strata.runtime.slots import HostSlots, Slots

EMPTY = -1
_ONLY: Keys = np.zeros(1, np.intp)  # the tokens of a call of one


@dataclass
class CacheCounts:
    """What the cache did. `filled_bytes` counts stored bytes by the tier they came from."""

    calls: int = 0
    waves: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    filled_bytes: Counter[Tier] = field(default_factory=Counter)

    @property
    def hit_rate(self) -> float | None:
        """Hits per expert asked for; None before the first."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None

    def __sub__(self, earlier: CacheCounts) -> CacheCounts:
        """Return what was done since `earlier`."""
        return CacheCounts(
            self.calls - earlier.calls,
            self.waves - earlier.waves,
            self.hits - earlier.hits,
            self.misses - earlier.misses,
            self.evictions - earlier.evictions,
            self.filled_bytes - earlier.filled_bytes,
        )

    def __add__(self, other: CacheCounts) -> CacheCounts:
        """Return what two caches did."""
        return CacheCounts(
            self.calls + other.calls,
            self.waves + other.waves,
            self.hits + other.hits,
            self.misses + other.misses,
            self.evictions + other.evictions,
            self.filled_bytes + other.filled_bytes,
        )

    def copy(self) -> CacheCounts:
        """Return the counts as they are now."""
        return self - CacheCounts()


class ExpertResidency:
    """Which expert lies in which slot, and what is filled when one is missing.

    Parameters
    ----------
    store : ExpertStore
    slots : Slots
    policy : EvictionPolicy
    layers : int
        Layers of the model, those without experts included.

    Attributes
    ----------
    experts : int
        Of a layer.
    counts : CacheCounts
    seen : NDArray[np.bool_]
        Which keys were ever asked for.
    """

    def __init__(self, store: ExpertStore, slots: Slots, policy: EvictionPolicy, *, layers: int) -> None:
        self.experts = store.experts
        self.counts = CacheCounts()
        self.seen = np.zeros(layers * store.experts, np.bool_)
        self._store = store
        self._slots = slots
        self._policy = policy
        # `_slot_of` is the truth. It is cleared first and set last, so that Ctrl-C at any point leaves no key that
        # names a slot without its expert; at worst `_key_in` remembers a key that has no slot, or another one.
        self._slot_of: Keys = np.full(layers * store.experts, EMPTY)
        self._key_in: Keys = np.full(slots.count, EMPTY)

    def uses(self) -> None:
        """See `strata.runtime.loader.CountsExperts`: a policy keeps its own counts."""

    def ready(self, layer: int, experts: Keys) -> Keys:
        """Return the slots of distinct `experts`, no more than there are slots, filling those that are missing."""
        keys, resident = self._ask(layer, experts)
        if not resident.all():
            self._make_ready(keys)
        self.counts.waves += 1
        return self._slot_of[keys]

    def _ask(self, layer: int, experts: Keys) -> tuple[Keys, NDArray[np.bool_]]:
        """Count a layer call; return its keys and which of them are in a slot."""
        keys = layer * self.experts + experts
        self._policy.used(keys)
        self.seen[keys] = True
        resident = self._slot_of[keys] != EMPTY
        hits = int(np.count_nonzero(resident))
        self.counts.calls += 1
        self.counts.hits += hits
        self.counts.misses += len(keys) - hits
        return keys, resident

    def _make_ready(self, keys: Keys) -> None:
        """Fill slots until all of `keys`, no more than there are slots, are in one."""
        missing = keys[self._slot_of[keys] == EMPTY]
        if not len(missing):
            return
        for key, slot in zip(missing.tolist(), self._victims(len(missing), keys).tolist(), strict=True):
            self._evict(slot)
            layer, expert = divmod(key, self.experts)
            stored, tier = self._store.fetch(layer, expert)
            self._slots.fill(slot, layer, stored)
            self._key_in[slot] = key
            self._slot_of[key] = slot
            self.counts.filled_bytes[tier] += sum(part.nbytes for part in stored)

    def _victims(self, count: int, held: Keys) -> Keys:
        """Choose slots to fill: empty ones first, then by worth; never one that the wave holds."""
        worth = np.full(self._slots.count, -np.inf)
        taken = self._key_in != EMPTY
        worth[taken] = self._policy.worth(self._key_in[taken])
        in_wave = self._slot_of[held]
        worth[in_wave[in_wave != EMPTY]] = np.inf
        return np.argsort(worth, kind="stable")[:count]

    def _evict(self, slot: int) -> None:
        key = self._key_in[slot]
        if key == EMPTY:
            return
        if self._slot_of[key] == slot:
            self._slot_of[key] = EMPTY
        self._key_in[slot] = EMPTY
        self.counts.evictions += 1


class ExpertCache(ExpertResidency):
    """Runs the routed experts of a layer, in waves where there are fewer slots than experts asked for.

    Parameters
    ----------
    store, slots, policy, layers
        See `ExpertResidency`.
    ops : WaveOps
    results : Array
        float32 [C, K, E]: a row for each (token, rank) of the largest call.
    """

    def __init__(
        self, store: ExpertStore, slots: HostSlots, policy: EvictionPolicy, *, layers: int, ops: WaveOps, results: Array
    ) -> None:
        super().__init__(store, slots, policy, layers=layers)
        self._pool = slots.pool
        self._ops = ops
        self._results = results

    def add(self, layer: int, hidden: Array, ids: Array, weights: Array, residual: Array) -> None:
        """See `strata.runtime.models.Experts.add`."""
        results = self._results[: len(ids)]
        self.run(layer, hidden, ids, results)
        self._ops.combine(results, weights, residual)

    def run(self, layer: int, hidden: Array, ids: Array, results: Array) -> None:
        """Run the experts that `ids` names on their tokens.

        Parameters
        ----------
        layer : int
        hidden : Array
            float32 [T, E].
        ids : Array
            int32 [T, K].
        results : Array
            float32 [T, K, E], one row per (token, rank); written.
        """
        experts, tokens, ranks = _by_expert(ids)
        keys, resident = self._ask(layer, experts)
        if resident.all():  # so they fit: nothing to fill, one wave
            self._run_wave(hidden, ExpertWave(self._slot_of[keys].tolist(), tokens, ranks), results)
            return
        order = np.argsort(~resident, kind="stable")  # hits first, before their slots are given away
        for start in range(0, len(order), self._slots.count):
            wave = order[start : start + self._slots.count]
            self._make_ready(keys[wave])
            ready = ExpertWave(
                slots=self._slot_of[keys[wave]].tolist(),
                tokens=[tokens[i] for i in wave],
                ranks=[ranks[i] for i in wave],
            )
            self._run_wave(hidden, ready, results)

    def _run_wave(self, hidden: Array, wave: ExpertWave, results: Array) -> None:
        self._ops.expert_ffn(hidden, self._pool, wave, results)
        self.counts.waves += 1


def _by_expert(ids: NDArray[np.int32]) -> tuple[Keys, list[Keys], list[Keys]]:
    """Group (token, rank) pairs by expert: the distinct experts, and the tokens and ranks that ask for each."""
    if len(ids) == 1:  # a decode step, where no two ranks ask for one expert: a tenth of the time below
        ranks = np.argsort(ids[0])
        return ids[0][ranks].astype(np.intp), [_ONLY] * len(ranks), list(ranks[:, None])
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    experts, starts = np.unique(flat[order], return_index=True)
    pairs = np.split(order, starts[1:])
    top_k = ids.shape[1]
    return experts.astype(np.intp), [pair // top_k for pair in pairs], [pair % top_k for pair in pairs]
