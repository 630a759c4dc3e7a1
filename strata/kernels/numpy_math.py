"""The small formulas that the numpy ops are made of. All float32, all into preallocated arrays."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]


def rms_norm(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """``out = x / sqrt(mean(x^2) + eps) * weight`` over the last axis; `out` may be `x`."""
    scale = np.matmul(x[..., None, :], x[..., None])[..., 0]
    scale /= x.shape[-1]
    scale += eps
    np.divide(x, np.sqrt(scale, out=scale), out=out)
    out *= weight


def product(x: Floats, weight: Floats, out: Floats) -> None:
    """``out = x @ weight.T``."""
    if len(x) == 1:
        vector_product(weight, x[0], out[0])
    else:
        np.matmul(x, weight.T, out=out)


def vector_product(weight: Floats, x: Floats, out: Floats) -> None:
    """``out[..., i] = weight[..., i, :] @ x``: one dot product for each row.

    That reads a weight in order at the speed of RAM. OpenBLAS's matrix-vector product takes several rows at a time
    and reaches half of it.
    """
    np.matmul(weight[..., None, :], x[..., None], out=out[..., None, None])


def gated(gate: Floats, up: Floats, out: Floats) -> None:
    """``out = silu(gate) * up`` with ``silu(g) = g / (1 + exp(-g))``."""
    np.negative(gate, out=out)
    with np.errstate(over="ignore"):  # exp(-g) = inf gives the right limit, -0
        np.exp(out, out=out)
    out += 1
    np.divide(gate, out, out=out)
    out *= up


def sigmoid(x: Floats) -> Floats:
    """Return ``1 / (1 + exp(-x))``: for a value a token, so it may allocate."""
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
        result = np.exp(-x)
    result += 1
    return np.reciprocal(result, out=result)
