"""Fewer slots than experts: the device finds and fills them by itself, as long as it can read what is missing.

Where some experts lie in memory that the device cannot read, a step stops after each router for the host to bring them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.doctor.plan import Tier
from strata.gguf.model_facts import ModelFacts
from strata.gguf.reader import GGUFFile
from strata.kernels.cuda_ops import CudaOps
from strata.kernels.ops import Array
from strata.kernels.residency import COUNTS, EMPTY, Policy, Pool, Tables
from strata.runtime.cuda.carry import Carrier
from strata.runtime.cuda.device import CudaDevice
from strata.runtime.cuda.experts import SlotPool
from strata.runtime.cuda.graph import Recorder
from strata.runtime.cuda.upload import Matrix
from strata.runtime.expert_cache import CacheCounts
from strata.runtime.expert_store import ExpertStore
from strata.runtime.profile import hottest_first

_WORD = 16  # bytes of the widest copy


class CachedExperts:
    """Experts in turns in as many slots as there are.

    Parameters
    ----------
    device : CudaDevice
    ops : CudaOps
    recorder : Recorder
    pools : sequence of SlotPool
        One per size class.
    store : ExpertStore
        What it keeps lies as in a slot.
    facts : ModelFacts
    buffers, host : mapping of str to Array
        Of `strata.gguf.cuda_footprint`: `workspace` and `host_io`.
    policy : Policy
    threads : int
        That copy what the device cannot read.
    uses : NDArray[np.uint32], shape (layers, experts), optional
        Of earlier runs: the slots are given to the most used, whose bytes are those of `matrices`.

    Attributes
    ----------
    resident : bool
        Whether a step needs nothing of the host.
    seen : NDArray[np.bool_], shape (layers, experts)
        Which were asked for.
    """

    def __init__(
        self,
        device: CudaDevice,
        ops: CudaOps,
        recorder: Recorder,
        pools: Sequence[SlotPool],
        store: ExpertStore,
        facts: ModelFacts,
        buffers: Mapping[str, Array],
        host: Mapping[str, NDArray[Any]],
        policy: Policy,
        threads: int,
        uses: NDArray[np.uint32] | None = None,
    ) -> None:
        self._device, self._ops, self._recorder, self._store = device, ops, recorder, store
        self._layers = {layer: pool for pool in pools for layer in pool.planned.layers}
        sources = _sources(device, store, facts)
        self.resident = bool(sources[list(self._layers)].all())
        self._carrier = None if self.resident else Carrier(device, store, threads)
        self._slots = buffers["slots"]
        self._host_counts, self._host_wanted = host["counts"], host["wanted"]
        tables = {name: buffers[f"tables.{name}"] for name in ("slot_of", "use", "calls", "source", "counts", "wanted")}
        self._reads_wanted = self.resident or not device.address(host["wanted"])
        if not self._reads_wanted:  # the device writes it where the host reads it
            tables["wanted"] = device.mapped(host["wanted"])
        self._tables = Tables(**tables, experts=facts.experts, policy=policy)
        self._first = [first_in(pool, uses, facts.experts) for pool in pools]
        slot_of, owner_of = (np.full(sources.size, EMPTY, np.int32) for _ in range(2))
        start = 0
        for pool, keys in zip(pools, self._first, strict=True):
            slot_of[keys] = np.arange(len(keys))
            owner_of[start : start + len(keys)] = keys
            start += pool.planned.slots
        owners = buffers["tables.owner"]
        for table, values in ((tables["slot_of"], slot_of), (owners, owner_of), (tables["source"], sources)):
            device.to_device(table, values)
        if uses is not None:
            device.to_device(tables["use"], np.stack([np.zeros_like(uses), uses], axis=-1).reshape(-1, 2))
        device.wait()
        self._pools: dict[int, Pool] = {}
        for pool in pools:
            owner, owners = owners[: pool.planned.slots], owners[pool.planned.slots :]
            word = math.gcd(
                _WORD, pool.nbytes, int(np.bitwise_or.reduce(sources[list(pool.planned.layers)], axis=None))
            )
            made = Pool(owner, pool.data, pool.planned.slot_bytes, pool.nbytes, word)
            self._pools |= dict.fromkeys(pool.planned.layers, made)
        self._of_pool = {layer: pool.slots() for layer, pool in self._layers.items()}
        self.seen = np.zeros((facts.layers, facts.experts), np.bool_)
        self._latest, self._steps = np.zeros(COUNTS, np.uint64), 0
        self._carried: Counter[Tier] = Counter()
        self._before = CacheCounts()

    def add(self, layer: int, hidden: Array, ids: Array, weights: Array, residual: Array) -> None:
        """See `strata.runtime.models.Experts.add`."""
        slots = self._slots[: len(hidden)]
        self._ops.make_ready(self._tables, self._pools[layer], layer, ids, slots)
        if not self.resident:
            self._recorder.host(partial(self._bring, layer))
        readied = ids, self._tables.slot_of[layer * self._tables.experts :]
        self._ops.experts_add(hidden, self._of_pool[layer], slots, weights, residual, readied)

    @property
    def first_bytes(self) -> int:
        """Bytes of `matrices`."""
        return sum(len(keys) * self._layers[keys[0] // self._tables.experts].nbytes for keys in self._first if keys)

    def matrices(self, file: GGUFFile, tensors: Mapping[int, tuple[str, str, str]]) -> Iterator[Matrix]:
        """Yield the matrices of the experts that start in slots, with their places."""
        for keys in self._first:
            for slot, key in enumerate(keys):
                layer, expert = divmod(key, self._tables.experts)
                raws = [file.raw(name).reshape(self._tables.experts, -1)[expert] for name in tensors[layer]]
                yield from self._layers[layer].matrices(slot, raws)

    def uses(self) -> NDArray[np.uint32]:
        """See `strata.runtime.loader.CountsExperts`."""
        use = np.zeros((*self.seen.shape, 2), np.uint32)
        with self._device.errors("read how often experts were used"):
            self._device.to_host(use, self._tables.use)
            self._device.wait()
        return use[..., 1]

    @property
    def counts(self) -> CacheCounts:
        """As of the last step that the host has seen."""
        return self._all_counts() - self._before

    def forget(self) -> None:
        """Count from here on."""
        self._before = self._all_counts()

    def _all_counts(self) -> CacheCounts:
        hits, misses, evictions, filled = self._latest.tolist()
        calls = self._steps * len(self._layers)
        return CacheCounts(calls, calls, hits, misses, evictions, self._carried + Counter({Tier.PINNED: filled}))

    def copy_out(self, place: int) -> None:
        """See `strata.runtime.cuda.step.NotesExperts`."""
        self._device.to_host(self._host_counts[place], self._tables.counts)

    def note_step(self, place: int) -> None:
        """Take over what the device has counted."""
        self._latest[:] = self._host_counts[place]
        self._steps += 1

    def note(self, ids: NDArray[np.int32], place: int) -> None:
        """Note what a call asked for, too."""
        self.note_step(place)
        self.seen[np.arange(len(ids))[:, None], ids.reshape(len(ids), -1)] = True

    def _bring(self, layer: int) -> None:
        """Fill what the device could not."""
        if self._reads_wanted:
            self._device.to_host(self._host_wanted, self._tables.wanted)
        self._device.wait()
        count = int(self._host_wanted[0])
        if not count:
            return
        pool = self._layers[layer]
        pairs = self._host_wanted[1 : 1 + 2 * count].reshape(count, 2).tolist()
        assert self._carrier is not None
        self._carried += self._carrier.carry([(key, pool.place(slot)) for key, slot in pairs])


def first_in(pool: SlotPool, uses: NDArray[np.uint32] | None, experts: int) -> list[int]:
    """Return the keys that start in the slots 0, 1, ... of a pool: the most used; none where nothing is known."""
    if uses is None:
        return []
    keys = [layer * experts + expert for layer in pool.planned.layers for expert in range(experts)]
    return hottest_first(uses, keys)[: pool.planned.slots]


def _sources(device: CudaDevice, store: ExpertStore, facts: ModelFacts) -> NDArray[np.uint64]:
    """Return where the device reads each expert, [layers, experts]; 0 where it cannot."""
    sources = np.zeros((facts.layers, facts.experts), np.uint64)
    for key in range(sources.size):
        held, tier = store.held(key)
        if held is not None and tier is Tier.PINNED:
            sources.flat[key] = device.address(held)
    return sources
