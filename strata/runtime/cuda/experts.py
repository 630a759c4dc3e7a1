"""Routed experts on the device: all of them in slots of their own, or in turns in as many slots as there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.doctor.plan import AllocationPlan, SlotClass
from strata.gguf.model_facts import ModelFacts
from strata.gguf.reader import GGUFFile
from strata.kernels.cuda_layout import row_bytes
from strata.kernels.cuda_ops import CudaOps, CudaSlots
from strata.kernels.ops import Array
from strata.runtime.cuda.device import CudaDevice
from strata.runtime.cuda.graph import Recorder
from strata.runtime.cuda.upload import Matrix, Uploader
from strata.runtime.expert_cache import CacheCounts, ExpertResidency
from strata.runtime.expert_store import StoredExpert
from strata.runtime.memory import PlannedMemory


class Pool:
    """The slots of one size class, as the plan has them.

    Parameters
    ----------
    memory : PlannedMemory
    planned : SlotClass
    facts : ModelFacts
    types : (str, str, str)
        Of gate, up and down.
    """

    def __init__(
        self, memory: PlannedMemory, planned: SlotClass, facts: ModelFacts, types: tuple[str, str, str]
    ) -> None:
        gate, up = (facts.expert_width * row_bytes(type_, facts.embedding) for type_ in types[:2])
        self.planned = planned
        self.count = planned.slots
        self._types = types
        self._sizes = (gate, up, facts.embedding * row_bytes(types[2], facts.expert_width))
        self._data = memory.array(
            planned.line, (planned.slots * planned.slot_bytes,), np.uint8, name=f"{planned.slots} expert slots"
        )

    def slots(self, first: int = 0) -> CudaSlots:
        """Return the pool as `CudaOps.experts_add` takes it, counted from slot `first` on."""
        gate, up, _ = self._sizes
        return CudaSlots(
            self._data[first * self.planned.slot_bytes :], self.planned.slot_bytes, 0, gate, gate + up, *self._types
        )

    def matrices(self, slot: int, stored: Sequence[NDArray[np.uint8]]) -> Iterator[Matrix]:
        """Yield an expert's matrices with their places in a slot."""
        start = slot * self.planned.slot_bytes
        for raw, size, type_ in zip(stored, self._sizes, self._types, strict=True):
            yield Matrix(raw, self._data[start : start + size], type_)
            start += size


def pools_of(memory: PlannedMemory, plan: AllocationPlan, facts: ModelFacts) -> tuple[Pool, ...]:
    """Take the pools of a plan."""
    types = {layer: c.types for c in facts.expert_classes for layer in c.layers}
    return tuple(Pool(memory, planned, facts, types[planned.layers[0]]) for planned in plan.experts.classes)


class ResidentExperts:
    """Every expert has a slot: an expert's number in its layer is its slot in the layer's part of the pool.

    Parameters
    ----------
    ops : CudaOps
    pools : sequence of Pool
    facts : ModelFacts

    Attributes
    ----------
    counts : CacheCounts
    seen : NDArray[np.bool_], shape (layers, experts)
        Which were asked for.
    """

    resident = True

    def __init__(self, ops: CudaOps, pools: Sequence[Pool], facts: ModelFacts) -> None:
        experts = facts.experts
        self.counts = CacheCounts()
        self.seen = np.zeros((facts.layers, experts), np.bool_)
        self._ops = ops
        self._experts = experts
        self._top_k = facts.top_k
        self._pools = {layer: (pool, at * experts) for pool in pools for at, layer in enumerate(pool.planned.layers)}
        self._slots = {layer: pool.slots(first) for layer, (pool, first) in self._pools.items()}

    def matrices(self, file: GGUFFile, tensors: Mapping[int, tuple[str, str, str]]) -> Iterator[Matrix]:
        """Yield every expert's matrices with their places."""
        for layer, names in tensors.items():
            raws = [file.raw(name).reshape(self._experts, -1) for name in names]
            pool, first = self._pools[layer]
            for expert in range(self._experts):
                yield from pool.matrices(first + expert, [raw[expert] for raw in raws])

    def add(self, layer: int, hidden: Array, ids: Array, weights: Array, residual: Array) -> None:
        """See `strata.runtime.models.Experts.add`."""
        self._ops.experts_add(hidden, self._slots[layer], ids, weights, residual)

    @property
    def slots(self) -> Mapping[int, CudaSlots]:
        """The part of a pool that each layer's experts have."""
        return self._slots

    def note_counts(self, counts: NDArray[np.int32]) -> None:
        """Count what a chunk of a prompt asked for: `counts` [layers, N] says by how many tokens."""
        layers = len(self._slots)
        self.counts.calls += layers
        self.counts.waves += layers
        self.counts.hits += int(np.count_nonzero(counts))
        self.seen |= counts > 0

    def note_step(self) -> None:
        """Count a step of one token, whose experts are not known here: they are not in `seen`."""
        layers = len(self._slots)
        self.counts.calls += layers
        self.counts.waves += layers
        self.counts.hits += layers * self._top_k

    def note(self, ids: NDArray[np.int32]) -> None:
        """Count what a call asked for: `ids` [layers, T, K]."""
        layers = len(ids)
        flat = ids.reshape(layers, -1)
        asked = flat.size if ids.shape[1] == 1 else sum(len(np.unique(row)) for row in flat)
        self.counts.calls += layers
        self.counts.waves += layers
        self.counts.hits += asked
        self.seen[np.arange(layers)[:, None], flat] = True


class CachedExperts:
    """Fewer slots than experts: after each router the host reads what is asked for and fills what is missing.

    Parameters
    ----------
    device : CudaDevice
    ops : CudaOps
    recorder : Recorder
    caches : sequence of (Pool, ExpertResidency)
        One per size class.
    buffers, host : mapping of str to Array
        Of `strata.gguf.cuda_footprint`: `workspace` and `host_io`.
    """

    resident = False

    def __init__(
        self,
        device: CudaDevice,
        ops: CudaOps,
        recorder: Recorder,
        caches: Sequence[tuple[Pool, ExpertResidency]],
        buffers: Mapping[str, Array],
        host: Mapping[str, NDArray[Any]],
    ) -> None:
        self._device = device
        self._ops = ops
        self._recorder = recorder
        self._caches = {layer: (pool.slots(), cache) for pool, cache in caches for layer in pool.planned.layers}
        self._ids, self._slots = buffers["ids"], buffers["slots"]
        self._host_ids, self._host_slots = host["ids"], host["slots"]
        self.seen = np.zeros((len(self._ids), caches[0][1].experts), np.bool_)

    @property
    def counts(self) -> CacheCounts:
        """Of all size classes."""
        total = CacheCounts()
        for cache in {id(cache): cache for _, cache in self._caches.values()}.values():
            total += cache.counts
        return total

    def add(self, layer: int, hidden: Array, ids: Array, weights: Array, residual: Array) -> None:
        """See `strata.runtime.models.Experts.add`."""
        tokens = len(hidden)
        self._recorder.host(partial(self._place, layer, tokens))
        self._ops.experts_add(hidden, self._caches[layer][0], self._slots[:tokens], weights, residual)

    def note_step(self) -> None:
        """There are no steps that the host does not see."""

    def note(self, ids: NDArray[np.int32]) -> None:
        """Note what a call asked for; the caches have counted it already."""
        self.seen[np.arange(len(ids))[:, None], ids.reshape(len(ids), -1)] = True

    def _place(self, layer: int, tokens: int) -> None:
        ids, slots = self._host_ids[layer, :tokens], self._host_slots[:tokens]
        self._device.to_host(ids, self._ids[layer, :tokens])
        self._device.wait()
        cache = self._caches[layer][1]
        if tokens == 1:  # whose experts differ
            slots[0] = cache.ready(layer, ids[0].astype(np.intp))
        else:
            experts, where = np.unique(ids, return_inverse=True)
            slots[:] = cache.ready(layer, experts.astype(np.intp))[where].reshape(slots.shape)
        self._device.to_device(self._slots, slots)


class PoolSlots:
    """Fills a pool's slots: this backend's `strata.runtime.slots.Slots`."""

    def __init__(self, device: CudaDevice, uploader: Uploader, pool: Pool) -> None:
        self.count = pool.count
        self._device = device
        self._uploader = uploader
        self._pool = pool

    def fill(self, slot: int, layer: int, stored: StoredExpert) -> None:
        """See `Slots.fill`. `stored` may be overwritten once this returns."""
        for matrix in self._pool.matrices(slot, stored):
            self._uploader.put(matrix)
        self._device.wait()


def largest_call(plan: AllocationPlan, facts: ModelFacts, most: int) -> int:
    """Return how many tokens a call can have so that all its experts have slots at once."""
    slots = min((c.slots for c in plan.experts.classes), default=0)
    if not facts.experts or slots >= facts.experts:
        return most
    return max(1, min(most, slots // facts.top_k))
