"""Stored blocks back to float32, for every type that the gguf package can read."""

from __future__ import annotations

from functools import cache

import gguf
import gguf.quants
import numpy as np
from numpy.typing import NDArray

from strata.errors import UnsupportedModel

# Values dequantised at a time. The temporaries of the costliest type stay below the bound that the planner
# charges (`strata.gguf.footprint.DEQUANTISE_TEMPORARY_BYTES`), which a test measures for every type.
BLOCK_ELEMENTS = 1 << 16


@cache
def can_dequantise(type: str) -> bool:
    """Whether `dequantise` knows the tensor type of this name ("Q4_K", "F16", ...)."""
    kind = gguf.GGMLQuantizationType.__members__.get(type)
    if kind is None:
        return False
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def row_bytes(type: str, elements: int) -> int:
    """Stored bytes of a row of `elements` values of this type."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    return elements // block_elements * block_bytes


def dequantise(raw: NDArray[np.uint8], type: str, out: NDArray[np.float32]) -> None:
    """Dequantise whole blocks into a preallocated array.

    Parameters
    ----------
    raw : NDArray[np.uint8], any shape, C-contiguous
        The blocks as a GGUF file stores them.
    type : str
        Name of the tensor type.
    out : NDArray[np.float32], any shape, C-contiguous
        As many values as the blocks hold.

    Raises
    ------
    UnsupportedModel
        When the type is unknown to the gguf package.
    ValueError
        When `raw` does not hold exactly the values of `out`.
    """
    if not can_dequantise(type):
        raise UnsupportedModel("dequantise weights", f"type {type} is not implemented", "Take another quantisation")
    if raw.size != row_bytes(type, out.size):
        raise ValueError(f"{raw.size} bytes of {type} do not hold {out.size} values")
    kind = gguf.GGMLQuantizationType[type]
    source, target = raw.reshape(-1), out.reshape(-1)
    for start in range(0, target.size, BLOCK_ELEMENTS):
        stop = min(start + BLOCK_ELEMENTS, target.size)
        # One row a block: the package splits by rows, and its own pieces of 16 would be needlessly small.
        blocks = source[row_bytes(type, start) : row_bytes(type, stop)].reshape(1, -1)
        target[start:stop] = gguf.quants.dequantize(blocks, kind)[0]
