"""The tensor index of a GGUF header: what each tensor is, how large, and where its bytes lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

from strata.gguf.cursor import MAX_NAME_BYTES, Cursor
from strata.gguf.types import TensorType
from strata.gguf.wording import CONVERT_AGAIN, shown

MAX_TENSORS = 1 << 16  # the largest models have a few thousand
MAX_DIMENSIONS = 4
_INT64_MAX = (1 << 63) - 1
_WITHDRAWN_TYPES = frozenset({4, 5, 31, 32, 33, 36, 37, 38})  # Q4_2, Q4_3, and layouts interleaved for one CPU


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the index.

    Attributes
    ----------
    shape : tuple of int
        In ggml order, fastest dimension first: (in, out, expert). The NumPy shape is the reverse.
    offset : int
        Of the first byte in its shard's file.
    shard : int
        Index into `GGUFFile.paths`.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int
    shard: int
    elements: int


def read_tensors(cursor: Cursor, count: int, shard: int) -> list[TensorInfo]:
    """Read `count` entries; their offsets still count from the start of the data."""
    if count > MAX_TENSORS:
        cursor.fail(f"the header claims {count} tensors, more than {MAX_TENSORS}")
    return [_read_tensor(cursor, index, shard) for index in range(count)]


def _read_tensor(cursor: Cursor, index: int, shard: int) -> TensorInfo:
    name = cursor.string(f"the name of tensor {index}", MAX_NAME_BYTES)
    what = f"tensor {shown(name)}"
    dimensions = cursor.u32(what)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        cursor.fail(f"{what} has {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
    shape = tuple(cursor.u64(what) for _ in range(dimensions))
    elements = math.prod(shape)
    if not 0 < elements <= _INT64_MAX:
        cursor.fail(f"{what} has the impossible shape {shape}")
    number = cursor.u32(what)
    if number in _WITHDRAWN_TYPES:
        cursor.fail(f"{what} has type number {number}, which ggml has withdrawn", CONVERT_AGAIN)
    try:
        tensor_type = TensorType(number)
    except ValueError:
        cursor.fail(
            f"{what} has the unknown type number {number}",
            "The file is damaged, or its quantisation is newer than this Strata: update it, or take another file",
        )
    if shape[0] % tensor_type.block_elements:
        cursor.fail(f"{what} has rows of {shape[0]}, no multiple of {tensor_type.name}'s {tensor_type.block_elements}")
    nbytes = elements // tensor_type.block_elements * tensor_type.block_bytes
    return TensorInfo(name, shape, tensor_type, cursor.u64(what), nbytes, shard, elements)
