"""What the host must know of the kernels: how each block type lies on the device, how a row of it is shared out among
lanes, and the sizes that their sources fix.

Blocks that are a multiple of 16 bytes lie as in the file. The others lie in planes, one field of all blocks of a
matrix after the other, so that every load is aligned and 16 bytes wide: the same bytes in another order.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ATTENTION_SPLITS = 32  # of the KV cache in attention (kSplits in cuda/attention.cu)
MOST_TOKENS = 8  # of a call through the decode kernels
PROMPT_TILE_ROWS = (32, 64)  # tokens of a tile of a prompt's products (BM in cuda/prompt_product.cu)
SAMPLE_STRETCH = 64  # logits that one maximum stands for in sampling (kStretch in cuda/sample.cu)
MOST_TOP_K = 64  # that a token is sampled from on the device (kMostKept there)


def partial_size(tokens: int, heads: int, value_length: int) -> int:
    """Return the floats of attention's scratch ``partial`` for calls of up to `tokens`."""
    return tokens * heads * ATTENTION_SPLITS * (value_length + 2)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A block type on the device.

    Attributes
    ----------
    columns, nbytes : int
        Of one block.
    unit : int
        Columns that a lane takes at once (``kUnit`` in cuda/blocks.cuh).
    depth : int
        Units of a row that a lane has in flight at most.
    planes : tuple of (offset, size)
        Fields of a block in the order of their planes; empty where blocks lie as in the file.
    """

    columns: int
    nbytes: int
    unit: int
    depth: int
    planes: tuple[tuple[int, int], ...] = ()


LAYOUTS = {
    "F32": BlockLayout(1, 4, 4, 4),
    "F16": BlockLayout(1, 2, 8, 4),
    "BF16": BlockLayout(1, 2, 8, 4),
    "Q8_0": BlockLayout(32, 34, 32, 2, ((2, 32), (0, 2))),
    "Q4_0": BlockLayout(32, 18, 32, 4, ((2, 16), (0, 2))),
    "Q4_1": BlockLayout(32, 20, 32, 4, ((4, 16), (0, 4))),
    "Q5_0": BlockLayout(32, 22, 32, 4, ((6, 16), (2, 4), (0, 2))),
    "Q5_1": BlockLayout(32, 24, 32, 4, ((8, 16), (4, 4), (0, 4))),
    "Q2_K": BlockLayout(256, 84, 64, 2, ((16, 64), (0, 16), (80, 4))),
    "Q3_K": BlockLayout(256, 110, 64, 2, ((32, 64), (0, 32), (96, 8), (104, 4), (108, 2))),
    "Q4_K": BlockLayout(256, 144, 64, 2),
    "Q5_K": BlockLayout(256, 176, 64, 1),
    "Q6_K": BlockLayout(256, 210, 64, 2, ((0, 128), (128, 64), (192, 16), (208, 2))),
    "IQ1_S": BlockLayout(256, 50, 64, 2, ((2, 32), (34, 16), (0, 2))),
    "IQ1_M": BlockLayout(256, 56, 64, 2, ((0, 32), (32, 16), (48, 8))),
    "IQ2_XXS": BlockLayout(256, 66, 64, 2, ((2, 64), (0, 2))),
    "IQ2_XS": BlockLayout(256, 74, 64, 2, ((2, 64), (66, 8), (0, 2))),
    "IQ2_S": BlockLayout(256, 82, 64, 2, ((2, 32), (34, 32), (66, 8), (74, 8), (0, 2))),
    "IQ3_XXS": BlockLayout(256, 98, 64, 2, ((2, 64), (66, 32), (0, 2))),
    "IQ3_S": BlockLayout(256, 110, 32, 4, ((2, 64), (74, 32), (66, 8), (106, 4), (0, 2))),
    "IQ4_NL": BlockLayout(32, 18, 32, 4, ((2, 16), (0, 2))),
    "IQ4_XS": BlockLayout(256, 136, 32, 4, ((8, 128), (0, 8))),
    "TQ1_0": BlockLayout(256, 54, 64, 1, ((0, 48), (48, 4), (52, 2))),
    "TQ2_0": BlockLayout(256, 66, 64, 2, ((0, 64), (64, 2))),
    "MXFP4": BlockLayout(32, 17, 32, 4, ((1, 16), (0, 1))),
    "NVFP4": BlockLayout(64, 36, 32, 4, ((4, 32), (0, 4))),
}


def lay_out(type_: str, raw: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Copy a matrix of the file, uint8 and flat, to `out` of the same size as it lies on the device."""
    layout = LAYOUTS[type_]
    blocks = raw.reshape(-1, layout.nbytes)
    start = 0
    for offset, size in layout.planes or ((0, layout.nbytes),):
        end = start + len(blocks) * size
        out[start:end].reshape(-1, size)[...] = blocks[:, offset : offset + size]
        start = end


@dataclass(frozen=True, slots=True)
class Tile:
    """How a team of warps reads rows: a function of their type and length alone, as a row's sum depends on it.

    Attributes
    ----------
    type : str
    warps : int
        Warps of a team, which share the units of its rows.
    depth : int
        Units of a row that a lane has in flight.
    whole : bool
        Whether these are all of the row's.
    """

    type: str
    warps: int
    depth: int
    whole: bool

    @classmethod
    def of(cls, type_: str, columns: int, most_warps: int = 16) -> Tile:
        """Return the tile for rows of `columns`: enough warps that each has few of the steps of four units."""
        layout = LAYOUTS[type_]
        steps = -(-columns // layout.unit // 4)
        depth = min(layout.depth, -(-steps // most_warps))
        warps = min(most_warps, -(-steps // depth))
        return cls(type_, warps, depth, steps <= warps * depth)

    def __str__(self) -> str:
        return f"Tile<{self.type},{self.warps},{self.depth},{str(self.whole).lower()}>"


# Shared memory that a block can ask for, bytes, by compute capability (CUDA C++ Programming Guide).
SHARED_MEMORY = {
    **dict.fromkeys(("7.5",), 64 << 10),
    **dict.fromkeys(("8.0", "8.7"), 163 << 10),
    **dict.fromkeys(("8.6", "8.9", "12.0", "12.1"), 99 << 10),
    **dict.fromkeys(("9.0", "10.0", "10.1", "10.3", "11.0"), 227 << 10),
}


def staged_bytes(columns: int, tokens: int) -> int:
    """Return the bytes of shared memory that the rows of `tokens` take in a block (``staged`` in cuda/gemv.cuh)."""
    padded = columns + columns // 128 * 36 + (columns & 64) // 4
    return 4 * tokens * (padded + 2 * -(-columns // 16))


def row_bytes(type_: str, columns: int) -> int:
    """Return the bytes of a row of `columns`."""
    layout = LAYOUTS[type_]
    return columns // layout.columns * layout.nbytes


class Sampling(ctypes.Structure):
    """How to choose a token; `top_k` is 1 for the likeliest. As `Sampling` in cuda/sample.cu."""

    _fields_ = (
        ("temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("log_min_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("top_k", ctypes.c_int),
        ("unused", ctypes.c_int),
    )


NOT_FINITE, TOO_MANY = -1, -2  # instead of a token: the best logit is no number, too many are equal for the kernel
