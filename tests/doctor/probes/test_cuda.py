from __future__ import annotations

import builtins
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from strata.doctor.facts import CudaFacts, LibraryFile, ProbeStatus
from strata.doctor.probes.collect import Collector, Unknown
from strata.doctor.probes.cuda import (
    device_uuid,
    import_cupy,
    installed_versions,
    read_cuda,
    steering_variables,
)
from strata.doctor.probes.nvml_gauge import NvmlGauge
from strata.doctor.probes.request import ProbeStopped
from tests.doctor.probes.fake_cupy import MIB, CUDARuntimeError, FakeDriver, FakeRuntime, fake_cupy
from tests.doctor.probes.fake_nvml import GIB, FakeNvml, memory, rtx4090

UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"


class GrowingNvml(FakeNvml):
    """A card on which 300 MiB more are in use each time one asks."""

    def __init__(self, *cards: dict[str, Any]) -> None:
        super().__init__(*cards)
        self.asked = 0

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, Any]) -> Any:
        self.asked += 1
        return memory(24 * GIB, 23 * GIB - self.asked * 300 * MIB)


def read(cupy: Any, nvml: Any = None, found: Collector | None = None) -> list[CudaFacts]:
    gauge = NvmlGauge(nvml, "NVML does not start")
    return list(read_cuda(found or Collector(), cupy, gauge, FakeDriver))


def test_a_working_device() -> None:
    facts = read(fake_cupy(FakeRuntime()), GrowingNvml(rtx4090()))[-1]
    assert (facts.cupy_version, facts.runtime_version, facts.driver_version) == ("14.2.0", "13.2", "13.0")
    assert (facts.nvrtc_version, facts.nvrtc_max_arch) == ("13.0", 120)
    assert (facts.kernel_ok, facts.kernel_error) == (True, None)
    (device,) = facts.devices
    assert (device.uuid, device.nvml_index, device.compute_capability) == (UUID, 0, "8.9")
    assert device.context_bytes == 300 * MIB
    assert (device.vram_free_bytes, device.vram_total_bytes) == (1024 * MIB, 1024 * MIB)
    assert (device.integrated, device.attributes["CanMapHostMemory"]) == (False, 1)
    assert device.error is None


def test_versions_are_reported_before_the_first_device_is_touched() -> None:
    states = read(fake_cupy(FakeRuntime()))
    assert states[0].cupy_version == "14.2.0"
    assert states[0].devices == ()
    assert len(states) == 3


def test_without_nvml_the_context_is_unknown_and_not_zero() -> None:
    (device,) = read(fake_cupy(FakeRuntime()))[-1].devices
    assert device.nvml_index is None
    assert device.context_bytes is None
    assert device.unknown["nvml_index"] == "NVML does not start"
    assert device.unknown["context_bytes"] == "the device was not found in NVML"


def test_memory_that_others_free_meanwhile_leaves_the_context_unknown() -> None:
    (device,) = read(fake_cupy(FakeRuntime()), FakeNvml(rtx4090()))[-1].devices
    assert device.context_bytes is None
    assert "did not grow" in device.unknown["context_bytes"]


def test_slice_of_a_card_is_matched_by_its_bus() -> None:
    card = rtx4090(nvmlDeviceGetUUID="GPU-of-the-whole-card")
    (device,) = read(fake_cupy(FakeRuntime()), GrowingNvml(card))[-1].devices
    assert device.nvml_index == 0


def test_order_differs_between_cuda_and_nvml() -> None:
    other = rtx4090(nvmlDeviceGetUUID="GPU-other", nvmlDeviceGetPciInfo=SimpleNamespace(busId="00000000:02:00.0"))
    (device,) = read(fake_cupy(FakeRuntime()), GrowingNvml(other, rtx4090()))[-1].devices
    assert (device.ordinal, device.nvml_index) == (0, 1)


@pytest.mark.parametrize(
    ("code", "candidates", "status"),
    [
        (35, (), ProbeStatus.UNSUPPORTED),
        (35, (LibraryFile("/usr/lib/libcuda.so.1"),), ProbeStatus.FAILED),
        (100, (LibraryFile("/usr/lib/libcuda.so.1"),), ProbeStatus.FAILED),
        (999, (), ProbeStatus.FAILED),
    ],
)
def test_no_device_at_all(code: int, candidates: tuple[LibraryFile, ...], status: ProbeStatus) -> None:
    found = Collector()
    found.values["libcuda_candidates"] = candidates
    with pytest.raises(ProbeStopped) as stopped:
        read(fake_cupy(FakeRuntime(refuse={"getDeviceCount": code})), found=found)
    assert stopped.value.status is status
    assert (stopped.value.error.code, stopped.value.error.call) == (code, "cudaGetDeviceCount")
    assert stopped.value.error.name is not None


def test_busy_device_is_named_and_the_rest_is_kept() -> None:
    facts = read(fake_cupy(FakeRuntime(refuse={"setDevice": 46})))[-1]
    (device,) = facts.devices
    assert device.error is not None
    assert (device.error.code, device.error.name, device.error.call) == (
        46,
        "cudaErrorDevicesUnavailable",
        "cudaSetDevice(0)",
    )
    assert device.uuid == UUID
    assert facts.kernel_ok is False


@pytest.mark.parametrize("call", ["launch", "malloc", "memcpy"])
def test_kernel_that_does_not_run(call: str) -> None:
    facts = read(fake_cupy(FakeRuntime(refuse={call: 209})))[-1]
    assert facts.kernel_ok is False
    assert facts.kernel_error is not None
    assert facts.kernel_error.name == "cudaErrorNoKernelImageForDevice"
    assert facts.devices[0].error is None  # the device itself is usable


def test_kernel_with_a_wrong_result() -> None:
    facts = read(fake_cupy(FakeRuntime(), factor=2))[-1]
    assert facts.kernel_ok is False
    assert facts.kernel_error is not None
    assert "result is wrong" in facts.kernel_error.message


def test_missing_nvrtc_is_not_the_devices_fault() -> None:
    class DynamicLibNotFoundError(RuntimeError):
        pass

    facts = read(fake_cupy(FakeRuntime(), compile_error=DynamicLibNotFoundError("no libnvrtc.so.13")))[-1]
    assert facts.kernel_error is not None
    assert (facts.kernel_error.name, facts.kernel_error.call) == ("DynamicLibNotFoundError", "nvrtcCompileProgram")
    assert facts.devices[0].error is None


def test_every_device_is_tried_and_the_first_kernel_error_is_kept() -> None:
    class SecondIsBusy(FakeRuntime):
        devices = 3

        def setDevice(self, device: int) -> None:
            if device == 1:
                raise CUDARuntimeError(46)

    states = read(fake_cupy(SecondIsBusy()))
    assert [len(state.devices) for state in states] == [0, 0, 1, 2, 3]
    last = states[-1]
    assert [device.error is None for device in last.devices] == [True, False, True]
    assert last.kernel_ok is False
    assert last.kernel_error is not None
    assert last.kernel_error.code == 46


def test_uuid_with_zero_bytes_is_whole() -> None:
    assert device_uuid(FakeDriver(), 0) == UUID


def test_refused_uuid_is_unknown() -> None:
    class Refusing(FakeDriver):
        def cuDeviceGetUuid_v2(self, buffer: Any, device: Any) -> int:
            return 101

    with pytest.raises(Unknown, match="returned 101"):
        device_uuid(Refusing(), 0)


def block_cupy(monkeypatch: pytest.MonkeyPatch, failure: ImportError) -> None:
    original = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "cupy":
            raise failure
        return original(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)


@pytest.mark.parametrize(
    ("failure", "packages", "status", "message"),
    [
        (ModuleNotFoundError("No module", name="cupy"), {}, ProbeStatus.UNSUPPORTED, "CuPy is not installed"),
        (ModuleNotFoundError("No module", name="cupy"), {"cupy": "14"}, ProbeStatus.FAILED, "No module"),
        (ModuleNotFoundError("No module numpy", name="numpy"), {}, ProbeStatus.FAILED, "numpy"),
        (ImportError("libcublas.so.13: cannot open"), {"cupy-cuda13x": "14"}, ProbeStatus.FAILED, "libcublas"),
    ],
)
def test_cupy_that_does_not_import(
    monkeypatch: pytest.MonkeyPatch,
    failure: ImportError,
    packages: dict[str, str],
    status: ProbeStatus,
    message: str,
) -> None:
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")
    block_cupy(monkeypatch, failure)
    with pytest.raises(ProbeStopped, match=message) as stopped:
        import_cupy(packages)
    assert stopped.value.status is status
    assert stopped.value.error.call == "import cupy"


def test_cupy_for_rocm_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    runtime.is_hip = True
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(runtime))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")
    with pytest.raises(ProbeStopped, match="ROCm"):
        import_cupy({})


def test_installed_versions_of_what_is_there() -> None:
    assert installed_versions(("msgspec", "no-such-distribution")).keys() == {"msgspec"}


def test_steering_variables() -> None:
    environment = {
        "PATH": "x",
        "CUDA_VISIBLE_DEVICES": "",
        "LD_LIBRARY_PATH": "/a",
        "HOME": "/h",
        "CUPY_ACCELERATORS": "",
    }
    assert steering_variables(environment) == {
        "CUDA_VISIBLE_DEVICES": "",
        "CUPY_ACCELERATORS": "",
        "LD_LIBRARY_PATH": "/a",
    }
