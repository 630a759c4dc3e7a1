"""Tests marked `gpu` run where CuPy sees a device; they share compiled kernels, which take longer than the tests."""

from __future__ import annotations

import pytest


def _devices() -> int:
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, no driver, no device: each comes as another class
        return 0


@pytest.fixture(autouse=True)
def _gpu(
    request: pytest.FixtureRequest,
    own_folders: None,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if request.node.get_closest_marker("gpu") is None:
        return
    if not _devices():
        pytest.skip("no CUDA device")
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path_factory.getbasetemp().parent / "shared-cache"))
