"""The slots of ready experts: one seam for every backend, and the numpy backend's.

Ready slots are float32 there, so every expert of a model has the same size whatever its quantisation, and one pool
serves them all. A backend that keeps slots quantised needs a pool for each size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from strata.gguf.footprint import expert_slot_size
from strata.gguf.model_facts import ModelFacts
from strata.kernels.dequant import dequantise
from strata.kernels.numpy_weights import NumpySlots
from strata.runtime.expert_store import StoredExpert
from strata.runtime.memory import PlannedMemory

LINE = "expert_slots"


class Slots(Protocol):
    """A pool of ready experts."""

    count: int

    def fill(self, slot: int, layer: int, stored: StoredExpert) -> None:
        """Make an expert of `layer` ready in `slot`, in place of what was there."""


class HostSlots:
    """Dequantises into RAM.

    Parameters
    ----------
    memory : PlannedMemory
    facts : ModelFacts
    count : int
        Slots, as planned.
    """

    def __init__(self, memory: PlannedMemory, facts: ModelFacts, count: int) -> None:
        values = expert_slot_size(facts).bytes // 4
        slots = memory.array(LINE, (count, values), np.float32, name=f"{count} expert slots")
        self.count = count
        self.pool = NumpySlots.over(slots, facts.embedding, facts.expert_width)
        self._types: Mapping[int, tuple[str, str, str]] = {
            layer: size_class.types for size_class in facts.expert_classes for layer in size_class.layers
        }

    def fill(self, slot: int, layer: int, stored: StoredExpert) -> None:
        """See `Slots`."""
        gate_up, down = self.pool.gate_up[slot], self.pool.down[slot]
        gate, up = np.split(gate_up, 2)
        for raw, kind, out in zip(stored, self._types[layer], (gate, up, down), strict=True):
            dequantise(raw, kind, out)
