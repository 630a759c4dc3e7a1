"""Dense weights and head on the device, as stored, by the plan: room for them first, then their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from strata.gguf.reader import GGUFFile, TensorInfo
from strata.kernels.cuda_ops import CudaWeight
from strata.kernels.ops import Array, Weight
from strata.runtime.cuda.device import array_on
from strata.runtime.cuda.upload import Matrix
from strata.runtime.memory import PlannedMemory
from strata.runtime.models.common import EMBEDDING, HEAD, ROPE_FACTORS


class CudaWeights:
    """Everything but the routed experts and the embedding. The constructor takes the memory.

    Attributes
    ----------
    by_name : dict of str to CudaWeight or Array
        Matrices as stored, vectors as float32.
    stored_bytes : int
        Of all `matrices`.
    """

    def __init__(self, file: GGUFFile, memory: PlannedMemory) -> None:
        self._file = file
        left_out = (EMBEDDING, HEAD, ROPE_FACTORS)
        tensors = [(t, "dense") for name, t in file.tensors.items() if name not in left_out and "_exps." not in name]
        self._places: list[tuple[TensorInfo, Array]] = []
        self.by_name: dict[str, Weight] = {}
        for tensor, line in [*tensors, (file.tensors.get(HEAD, file.tensors[EMBEDDING]), "head")]:
            place = memory.array(line, (tensor.nbytes,), np.uint8, name=tensor.name)
            self._places.append((tensor, place))
            self.by_name[HEAD if line == "head" else tensor.name] = _weight(tensor, place)
        self.stored_bytes = sum(tensor.nbytes for tensor, _ in self._places)

    def matrices(self) -> Iterator[Matrix]:
        """Yield what is to be brought where."""
        for tensor, place in self._places:
            yield Matrix(self._file.raw(tensor.name), place, tensor.type.name)


def _weight(tensor: TensorInfo, place: Array) -> Weight:
    columns, rows = tensor.shape[0], math.prod(tensor.shape[1:])
    if len(tensor.shape) == 1:
        return array_on(place, (columns,), np.float32)
    return CudaWeight(place, tensor.type.name, rows, columns)
