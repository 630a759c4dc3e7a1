from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from strata.doctor.probes.collect import Unknown
from strata.doctor.probes.nvml_gauge import NvmlGauge
from tests.doctor.probes.fake_nvml import GIB, FakeNvml, rtx4090

UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"


def test_index_by_uuid_then_by_bus() -> None:
    other = rtx4090(nvmlDeviceGetUUID="GPU-other", nvmlDeviceGetPciInfo=SimpleNamespace(busId="00000000:C1:00.0"))
    gauge = NvmlGauge(FakeNvml(other, rtx4090()))
    assert gauge.index(UUID, "0000:99:00.0") == 1
    assert gauge.index("MIG-slice", "0000:C1:00.0") == 0
    with pytest.raises(Unknown, match="GPU-none"):
        gauge.index("GPU-none", "0000:99:00.0")


def test_memory_and_link() -> None:
    gauge = NvmlGauge(FakeNvml(rtx4090()))
    assert gauge.used_bytes(0) == 24 * GIB - 22 * GIB - GIB // 2
    assert gauge.link(0) == (1, 16)
    with pytest.raises(Unknown, match="not found in NVML"):
        gauge.used_bytes(None)


def test_broken_nvml_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it would fail
    with NvmlGauge.open("it hangs") as gauge, pytest.raises(Unknown, match="it hangs"):
        gauge.used_bytes(0)


def test_nvml_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=9))  # type: ignore[arg-type]
    with NvmlGauge.open(None) as gauge, pytest.raises(Unknown, match=r"NVML does not start: .* 9"):
        gauge.index(UUID, "")
