"""Every block type as the device reads it, against the golden blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from strata.kernels.cuda_layout import LAYOUTS  # noqa: E402
from strata.kernels.cuda_ops import CudaOps, CudaWeight  # noqa: E402

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden"


def golden_blocks(type_: str, file: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the file's blocks of a type as stored and as float32, or None where it has none."""
    with np.load(GOLDEN / file) as golden:
        if type_ == "F32":
            return (golden["source"].view(np.uint8), golden["source"]) if "source" in golden else None
        return (golden[f"{type_}_raw"], golden[f"{type_}_f32"]) if f"{type_}_raw" in golden else None


@pytest.mark.parametrize("type_", LAYOUTS)
@pytest.mark.parametrize("file", ["quants.npz", "quants_bits.npz"])
def test_dequantises_golden_blocks(type_: str, file: str) -> None:
    found = golden_blocks(type_, file)
    if found is None:
        pytest.skip("no such blocks here")
    raw, expected = found
    ops = CudaOps({})
    data = cupy.full(raw.size, 0xAA, cupy.uint8)
    source = cupy.asarray(np.ascontiguousarray(raw).ravel())
    ops.to_planes(source.data.ptr, data, type_)
    out = cupy.full(expected.shape, cupy.nan, cupy.float32)
    ops.dequantise(CudaWeight(data, type_, *expected.shape), out)
    np.testing.assert_array_equal(cupy.asnumpy(out), expected)
