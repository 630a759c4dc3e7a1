"""The kernels' own sources, run on a CPU: what they compute, where no GPU is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.kernels.cuda_layout import LAYOUTS
from tests.kernels.host import COMPILER, kernels_on_host, on_host

pytestmark = pytest.mark.skipif(
    COMPILER is None or not sys.platform.startswith("linux"), reason="needs g++ and Linux's coroutines"
)
GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host-kernels")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Any]:
    with kernels_on_host(monkeypatch, folder) as cuda_ops:
        yield cuda_ops


def test_dequantises_golden_blocks_to_the_bit(cuda: Any) -> None:
    ops = cuda.CudaOps({})
    cases = []
    for file in ("quants.npz", "quants_bits.npz"):
        with np.load(GOLDEN / file) as golden:
            cases += [(t, golden[f"{t}_raw"], golden[f"{t}_f32"]) for t in LAYOUTS if f"{t}_raw" in golden]
    assert len({type_ for type_, *_ in cases}) > 20

    def run() -> list[Any]:
        outs = []
        for type_, raw, expected in cases:
            data, source = on_host(np.full(raw.size, 0xAA, np.uint8)), on_host(raw.ravel())
            ops.to_planes(source.ctypes.data, data, type_)
            outs.append(on_host(np.full(expected.shape, np.nan, np.float32)))
            ops.dequantise(cuda.CudaWeight(data, type_, *expected.shape), outs[-1])
        return outs

    ops.prepare(run)
    for (type_, _, expected), out in zip(cases, run(), strict=True):
        np.testing.assert_array_equal(np.asarray(out), expected, err_msg=type_)
