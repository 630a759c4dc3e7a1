"""The slots of experts on the device, and experts that each have a slot of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from strata.doctor.plan import AllocationPlan, SlotClass
from strata.gguf.model_facts import ModelFacts
from strata.gguf.reader import GGUFFile
from strata.kernels.cuda_layout import row_bytes
from strata.kernels.cuda_ops import CudaOps, CudaSlots
from strata.kernels.ops import Array
from strata.runtime.cuda.upload import Matrix
from strata.runtime.expert_cache import CacheCounts
from strata.runtime.memory import PlannedMemory


class SlotPool:
    """The slots of one size class, as the plan has them.

    Parameters
    ----------
    memory : PlannedMemory
    planned : SlotClass
    facts : ModelFacts
    types : (str, str, str)
        Of gate, up and down.

    Attributes
    ----------
    data : Array
        uint8, flat.
    nbytes : int
        Of an expert.
    """

    def __init__(
        self, memory: PlannedMemory, planned: SlotClass, facts: ModelFacts, types: tuple[str, str, str]
    ) -> None:
        gate, up = (facts.expert_width * row_bytes(type_, facts.embedding) for type_ in types[:2])
        self.planned = planned
        self.types = types
        self._sizes = (gate, up, facts.embedding * row_bytes(types[2], facts.expert_width))
        self.nbytes = sum(self._sizes)
        self.data = memory.array(
            planned.line, (planned.slots * planned.slot_bytes,), np.uint8, name=f"{planned.slots} expert slots"
        )

    def slots(self, first: int = 0) -> CudaSlots:
        """Return the pool as `CudaOps.experts_add` takes it, counted from slot `first` on."""
        gate, up, _ = self._sizes
        return CudaSlots(
            self.data[first * self.planned.slot_bytes :], self.planned.slot_bytes, 0, gate, gate + up, *self.types
        )

    def place(self, slot: int) -> Array:
        """Return where the bytes of the expert in a slot lie."""
        start = slot * self.planned.slot_bytes
        return self.data[start : start + self.nbytes]

    def matrices(self, slot: int, stored: Sequence[NDArray[np.uint8]]) -> Iterator[Matrix]:
        """Yield an expert's matrices with their places in a slot."""
        start = slot * self.planned.slot_bytes
        for raw, size, type_ in zip(stored, self._sizes, self.types, strict=True):
            yield Matrix(raw, self.data[start : start + size], type_)
            start += size


def pools_of(memory: PlannedMemory, plan: AllocationPlan, facts: ModelFacts) -> tuple[SlotPool, ...]:
    """Take the pools of a plan."""
    types = {layer: c.types for c in facts.expert_classes for layer in c.layers}
    return tuple(SlotPool(memory, planned, facts, types[planned.layers[0]]) for planned in plan.experts.classes)


class ResidentExperts:
    """Every expert has a slot: an expert's number in its layer is its slot in the layer's part of the pool.

    Parameters
    ----------
    ops : CudaOps
    pools : sequence of SlotPool
    facts : ModelFacts

    Attributes
    ----------
    counts : CacheCounts
    seen : NDArray[np.bool_], shape (layers, experts)
        Which were asked for.
    """

    resident = True

    def __init__(self, ops: CudaOps, pools: Sequence[SlotPool], facts: ModelFacts) -> None:
        experts = facts.experts
        self.counts = CacheCounts()
        self.seen = np.zeros((facts.layers, experts), np.bool_)
        self._ops = ops
        self._experts = experts
        self._each = tuple(pools)
        self._top_k = facts.top_k
        self._pools = {layer: (pool, at * experts) for pool in pools for at, layer in enumerate(pool.planned.layers)}
        self._slots = {layer: pool.slots(first) for layer, (pool, first) in self._pools.items()}

    @property
    def first_bytes(self) -> int:
        """Bytes of `matrices`."""
        return sum(len(pool.planned.layers) * self._experts * pool.nbytes for pool in self._each)

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

    def uses(self) -> None:
        """See `strata.runtime.loader.CountsExperts`: where all have slots, nothing needs to be known."""

    def forget(self) -> None:
        """Count from here on."""
        self.counts = CacheCounts()

    def copy_out(self, place: int) -> None:
        """See `strata.runtime.cuda.step.NotesExperts`: the device counts nothing."""

    def note_step(self, place: int) -> None:
        """Count a step of one token, whose experts are not known here: they are not in `seen`."""
        layers = len(self._slots)
        self.counts.calls += layers
        self.counts.waves += layers
        self.counts.hits += layers * self._top_k

    def note(self, ids: NDArray[np.int32], place: int) -> None:
        """Count what a call asked for: `ids` [layers, T, K]."""
        layers = len(ids)
        flat = ids.reshape(layers, -1)
        asked = flat.size if ids.shape[1] == 1 else sum(len(np.unique(row)) for row in flat)
        self.counts.calls += layers
        self.counts.waves += layers
        self.counts.hits += asked
        self.seen[np.arange(layers)[:, None], flat] = True


def largest_call(plan: AllocationPlan, facts: ModelFacts, most: int) -> int:
    """Return how many tokens a call can have so that all its experts have slots at once."""
    slots = min((c.slots for c in plan.experts.classes), default=0)
    if not facts.experts or slots >= facts.experts:
        return most
    return max(1, min(most, slots // facts.top_k))
