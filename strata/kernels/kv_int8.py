"""The int8 KV cache, by definition: a head's columns in groups, a group as codes and one f16 scale.

The scale is the largest magnitude over 127, rounded to f16; a code is the value over that rounded scale, to the nearest
whole number. So a value is off by half a scale at most, 1/254 of its group's largest (and 2^-11 of that more for the
largest itself, whose code must not exceed 127). What is not finite makes its scale, and so its group, not finite.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata.kernels.numpy_math import Floats

GROUP = 64  # columns of a group; what is left of a head is one of its own

Codes = NDArray[np.int8]
Scales = NDArray[np.float16]


def scales_of(columns: int) -> int:
    """Return how many scales a head of `columns` has."""
    return -(-columns // GROUP)


def quantise(x: Floats, codes: Codes, scales: Scales) -> None:
    """Write `x` [T, G, D], which is spent, as `codes` [T, G, D] and `scales` [T, G, `scales_of` (D)]."""
    with np.errstate(all="ignore"):  # infinities and NaN go into the scales
        for i in range(scales.shape[-1]):
            columns = np.s_[..., i * GROUP : (i + 1) * GROUP]
            part = x[columns]
            most = np.maximum(part.max(axis=-1), -part.min(axis=-1))
            scales[..., i] = most / np.float32(127)
            scale = scales[..., i, None].astype(np.float32)
            np.divide(part, np.where(scale > 0, scale, np.float32(np.inf)), out=part)
            np.clip(np.rint(part, out=part), -127, 127, out=part)
            codes[columns] = part


def dequantise_cells(codes: Codes, scales: Scales, out: Floats) -> None:
    """Write cells [S, G, D] as float32: a code times its group's scale, which is exact."""
    np.copyto(out, codes)
    with np.errstate(invalid="ignore"):
        for i in range(scales.shape[-1]):
            out[..., i * GROUP : (i + 1) * GROUP] *= scales[..., i, None]
