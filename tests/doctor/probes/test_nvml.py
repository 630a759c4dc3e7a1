from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strata.doctor.facts import GpuProcess, LibraryFile, NvmlFacts, NvmlGpu, ProbeStatus
from strata.doctor.probes.nvml import read_nvml
from strata.doctor.probes.request import ProbeStopped
from tests.doctor.probes.fake_nvml import (
    GIB,
    GPU_IS_LOST,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    NOT_SUPPORTED,
    FakeNvml,
    NVMLError,
    memory,
    rtx4090,
)
from tests.doctor.probes.machine_tree import lay


def read(nvml: FakeNvml, root: Path = Path("/nowhere")) -> NvmlFacts:
    return list(read_nvml(nvml, root, lambda: ()))[-1]


def gpu(root: Path = Path("/nowhere"), **changes: Any) -> NvmlGpu:
    return read(FakeNvml(rtx4090(**changes)), root).gpus[0]


def test_a_whole_card(tmp_path: Path) -> None:
    root = lay(tmp_path, {"sys/bus/pci/devices/0000:01:00.0/numa_node": "1\n"})
    facts = read(FakeNvml(rtx4090()), root)
    assert (facts.driver_version, facts.cuda_driver_version) == ("580.65.06", "13.0")
    card = facts.gpus[0]
    assert (card.name, card.pci_bus_id, card.compute_capability) == ("NVIDIA GeForce RTX 4090", "0000:01:00.0", "8.9")
    assert (card.vram_total_bytes, card.vram_free_bytes, card.vram_reserved_bytes) == (24 * GIB, 22 * GIB, GIB // 2)
    assert (card.display_active, card.persistence, card.compute_mode) == (True, False, "default")
    assert (card.pcie_generation, card.pcie_generation_max, card.pcie_width_max) == (1, 4, 16)
    assert (card.bar1_total_bytes, card.bar1_free_bytes) == (GIB // 4, GIB // 8)
    assert (card.power_w, card.power_limit_w, card.sm_clock_max_mhz) == (21.5, 450.0, 3105)
    assert card.throttle_reasons == ("gpu_idle", "sw_power_cap")
    assert card.numa_node == 1
    assert set(card.unknown) == {"driver_model", "ecc", "mig"}


def test_processes_once_each_and_unknown_bytes_not_zero() -> None:
    assert gpu().processes == (
        GpuProcess(3, None, None, "graphics"),
        GpuProcess(7, "/usr/bin/process7", GIB, "compute+graphics"),
    )


def test_process_bytes_that_mean_not_available() -> None:
    processes = [SimpleNamespace(pid=9, usedGpuMemory=0xFFFFFFFFFFFFFFFF)]
    card = gpu(nvmlDeviceGetComputeRunningProcesses=processes, nvmlDeviceGetGraphicsRunningProcesses=[])
    assert card.processes == (GpuProcess(9, "/usr/bin/process9", None, "compute"),)


@pytest.mark.parametrize(("model", "name"), [(0, "WDDM"), (1, "TCC"), (2, "MCDM")])
def test_driver_model_on_windows(model: int, name: str) -> None:
    assert gpu(nvmlDeviceGetCurrentDriverModel=model).driver_model == name


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"nvmlDeviceGetTemperature": NVMLError(NOT_SUPPORTED)}, "temperature_c", r"Not Supported \(NVML 3\)"),
        ({"nvmlDeviceGetMigMode": NVMLError(NO_PERMISSION)}, "mig", r"Insufficient Permissions \(NVML 4\)"),
        ({"nvmlDeviceGetMemoryInfo": NVMLError(NOT_SUPPORTED)}, "vram_free_bytes", "Not Supported"),
        ({"nvmlDeviceGetMemoryInfo": memory(0, 0)}, "vram_total_bytes", "absurd"),
        ({"nvmlDeviceGetMemoryInfo": memory(24 * GIB, 25 * GIB)}, "vram_free_bytes", "absurd"),
        ({"nvmlDeviceGetMemoryInfo": memory(1 << 63, 0)}, "vram_total_bytes", "absurd"),
        ({"nvmlDeviceGetCurrPcieLinkWidth": 0}, "pcie_width", "absurd value 0"),
        ({"nvmlDeviceGetCurrPcieLinkGeneration": 0xFFFFFFFF}, "pcie_generation", "absurd value 4294967295"),
        ({"nvmlDeviceGetPowerUsage": 0xFFFFFFFF}, "power_w", "absurd"),
        ({"nvmlDeviceGetComputeMode": 9}, "compute_mode", "KeyError"),
        ({"nvmlDeviceGetGpuMaxPcieLinkGeneration": AttributeError("x")}, "pcie_generation_gpu_max", "has no nvml"),
        ({"nvmlDeviceGetComputeRunningProcesses": NVMLError(NOT_SUPPORTED)}, "processes", "Not Supported"),
        ({}, "numa_node", "FileNotFoundError"),
    ],
)
def test_refused_and_absurd_values_are_unknown_with_the_reason(
    changes: dict[str, Any], field: str, reason: str
) -> None:
    card = gpu(**changes)
    assert getattr(card, field) is None
    assert re.search(reason, card.unknown[field])
    assert card.name is not None  # the rest went on


def test_numa_node_that_the_firmware_does_not_give(tmp_path: Path) -> None:
    card = gpu(lay(tmp_path, {"sys/bus/pci/devices/0000:01:00.0/numa_node": "-1\n"}))
    assert card.numa_node is None
    assert "firmware" in card.unknown["numa_node"]


def test_lost_card_does_not_hide_the_other() -> None:
    facts = read(FakeNvml({"handle": NVMLError(GPU_IS_LOST)}, rtx4090()))
    assert facts.gpus[0].unknown == {"handle": "nvmlDeviceGetHandleByIndex: GPU is lost (NVML 15)"}
    assert facts.gpus[1].index == 1
    assert facts.gpus[1].name is not None


def test_driver_is_reported_before_the_cards_are_asked() -> None:
    first, *_ = read_nvml(FakeNvml(rtx4090()), Path("/nowhere"), lambda: ())
    assert first == NvmlFacts(driver_version="580.65.06", cuda_driver_version="13.0")


@pytest.mark.parametrize(
    ("code", "files", "status", "message"),
    [
        (LIBRARY_NOT_FOUND, (), ProbeStatus.UNSUPPORTED, "no NVML library is installed"),
        (LIBRARY_NOT_FOUND, (LibraryFile("/no/libnvidia-ml.so.1"),), ProbeStatus.FAILED, "could not be loaded: .*/no/"),
        (9, (), ProbeStatus.FAILED, "code 9"),
        (18, (), ProbeStatus.FAILED, "code 18"),
    ],
)
def test_nvml_that_does_not_start(code: int, files: tuple[LibraryFile, ...], status: ProbeStatus, message: str) -> None:
    with pytest.raises(ProbeStopped, match=message) as stopped:
        list(read_nvml(FakeNvml(init_error=code), Path("/"), lambda: files))
    assert stopped.value.status is status
    assert (stopped.value.error.code, stopped.value.error.call) == (code, "nvmlInit")
