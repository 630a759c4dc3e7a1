"""The codebooks of the IQ types as the kernels read them, made from gguf's tables so that there is one copy of them."""

from __future__ import annotations

import re

import gguf.quants
import numpy as np
from numpy.typing import NDArray

_MAGNITUDES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
_TERNARY = {"IQ1_S", "IQ1_M"}  # of one grid
_TERNARY_ORDER = (0, 1, 4, 5, 2, 3, 6, 7)  # columns of an entry, from its lowest bits on


def definitions(expression: str) -> str:
    """Return a ``#define`` for each grid of the types that `expression` names, as cuda/codebooks.cuh reads them."""
    named = set(re.findall(r"\w+", expression))
    lines = []
    for name in _MAGNITUDES:
        if name in named:
            entries = _grid(name).astype(np.uint8).view("<u4")
            values = ["{" + ",".join(f"{word}u" for word in entry) + "}" for entry in entries.tolist()]
            lines.append(f"#define {name}_GRID {','.join(values)}")
    if named & _TERNARY:
        digits = (_grid("IQ1_S") + 1).astype(np.uint16)[:, _TERNARY_ORDER]
        packed = (digits << np.arange(0, 16, 2, dtype=np.uint16)).sum(axis=1)
        lines.append(f"#define IQ1_GRID {','.join(map(str, packed.tolist()))}")
    return "\n".join(lines)


def _grid(name: str) -> NDArray[np.float32]:
    """Return the entries of a type's grid, one a row."""
    type_ = getattr(gguf.quants, name)
    type_.init_grid()
    grid: NDArray[np.float32] = np.asarray(type_.grid)
    return grid.reshape(type_.grid_shape)
