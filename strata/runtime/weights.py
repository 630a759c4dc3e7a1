"""Dense weights, head and embedding, by the plan: room for them first, then their bytes out of the file.

Dense weights and head are float32 in the device's memory. The embedding stays as stored: a token needs one row
of it. A tied head is therefore a second form of the same table, not a second name.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from strata.doctor.plan import AllocationPlan, Tier
from strata.gguf.reader import GGUFFile, TensorInfo
from strata.kernels.dequant import dequantise
from strata.kernels.numpy_weights import QuantRows
from strata.kernels.ops import Weight
from strata.runtime.memory import PlannedMemory, Step
from strata.runtime.models.common import EMBEDDING, HEAD

# Between two reports of progress, and two chances to be interrupted.
_STEP_ELEMENTS = 1 << 22
_STEP_BYTES = 16 << 20


class Weights:
    """Everything but the routed experts. The constructor takes the memory, `load` reads.

    Attributes
    ----------
    by_name : mapping of str to NDArray[np.float32] or QuantRows
        By tensor name: matrices float32 [out, in], the embedding as stored. A tied head is there under its own name.
    stored_bytes : int
        What `load` reads of the file.
    """

    def __init__(self, file: GGUFFile, plan: AllocationPlan, memory: PlannedMemory) -> None:
        self._file = file
        table = file.tensors[EMBEDDING]
        dense = [t for name, t in file.tensors.items() if name not in (EMBEDDING, HEAD) and "_exps." not in name]
        self._targets = [(t, _room(memory, "dense", t)) for t in dense]
        head = file.tensors.get(HEAD, table)
        self._targets.append((head, _room(memory, "head", head)))
        stored = file.raw(EMBEDDING).reshape(table.shape[1], -1)
        line = plan.line("embedding")
        self._rows = None
        if line is None or line.tier is not Tier.FILE:
            self._rows = memory.array("embedding", stored.shape, np.uint8, name=EMBEDDING)
        self.by_name: Mapping[str, Weight] = {t.name: array for t, array in self._targets} | {
            HEAD: self._targets[-1][1],
            EMBEDDING: QuantRows(stored if self._rows is None else self._rows, table.type.name),
        }
        self.stored_bytes = sum(tensor.nbytes for tensor, _ in self._targets)
        self.stored_bytes += 0 if self._rows is None else self._rows.nbytes

    def load(self, step: Step) -> None:
        """Read and dequantise, a few million values at a time."""
        for tensor, out in self._targets:
            self._dequantise(tensor, out.reshape(-1), step)
        if self._rows is not None:
            raw, out = self._file.raw(EMBEDDING), self._rows.reshape(-1)
            for start in range(0, len(raw), _STEP_BYTES):
                part = raw[start : start + _STEP_BYTES]
                out[start : start + len(part)] = part
                step(len(part))

    def _dequantise(self, tensor: TensorInfo, out: NDArray[np.float32], step: Step) -> None:
        raw = self._file.raw(tensor.name)
        kind = tensor.type
        blocks = max(_STEP_ELEMENTS // kind.block_elements, 1)
        for start in range(0, len(raw), blocks * kind.block_bytes):
            part = raw[start : start + blocks * kind.block_bytes]
            first = start // kind.block_bytes * kind.block_elements
            dequantise(part, kind.name, out[first : first + len(part) // kind.block_bytes * kind.block_elements])
            step(len(part))


def _room(memory: PlannedMemory, line: str, tensor: TensorInfo) -> NDArray[np.float32]:
    array: NDArray[np.float32] = memory.array(line, reversed(tensor.shape), np.float32, name=tensor.name)
    return array
