"""The driver's management library: what every GPU is, holds and does, seen before any context of ours exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from strata.doctor.facts import GpuProcess, NvmlFacts, NvmlGpu, ProbeError, ProbeStatus
from strata.doctor.probes import libraries
from strata.doctor.probes.collect import Collector, Unknown
from strata.doctor.probes.request import ProbeRequest, ProbeStopped

_LIBRARY_NOT_FOUND = 12  # NVML_ERROR_LIBRARY_NOT_FOUND
_LARGEST_BYTES = 1 << 46  # more memory than any card has: such a value is the library's way of having none
_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_DRIVER_MODELS = {0: "WDDM", 1: "TCC", 2: "MCDM"}
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_THROTTLE_BITS = (
    (0x001, "gpu_idle"),
    (0x002, "applications_clocks_setting"),
    (0x004, "sw_power_cap"),
    (0x008, "hw_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "sw_thermal_slowdown"),
    (0x040, "hw_thermal_slowdown"),
    (0x080, "hw_power_brake_slowdown"),
    (0x100, "display_clock_setting"),
)


def probe(request: ProbeRequest) -> Iterator[NvmlFacts]:
    """Yield the driver's facts, then the GPUs'."""
    import pynvml

    yield from read_nvml(pynvml, Path("/"), libraries.search_nvml)


def read_nvml(nvml: Any, root: Path, search: Callable[[], libraries.Candidates]) -> Iterator[NvmlFacts]:
    """Yield what `nvml` (the module pynvml, or one that acts like it) says.

    Raises
    ------
    ProbeStopped
        ``UNSUPPORTED`` where there is no NVML library, ``FAILED`` where it does not start.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as failure:
        raise _not_started(failure, search) from None
    found = Collector()
    found.take("driver_version", lambda: ask(nvml, "nvmlSystemGetDriverVersion"))
    found.take("cuda_driver_version", lambda: _cuda_version(ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")))
    yield NvmlFacts(**found.fields())
    found.take("gpus", lambda: tuple(_gpu(nvml, root, index) for index in range(ask(nvml, "nvmlDeviceGetCount"))))
    yield NvmlFacts(**found.fields())


def _not_started(failure: Any, search: Callable[[], libraries.Candidates]) -> ProbeStopped:
    error = ProbeError(message=str(failure), code=failure.value, name=type(failure).__name__, call="nvmlInit")
    if failure.value != _LIBRARY_NOT_FOUND:
        return ProbeStopped(ProbeStatus.FAILED, error)
    files = search()
    if files:
        why = f"{files[0].path} exists but could not be loaded: {libraries.why_not_loadable(files[0].path)}"
        return ProbeStopped(ProbeStatus.FAILED, msgspec.structs.replace(error, message=why))
    why = "no NVML library is installed, so there is no NVIDIA driver here"
    return ProbeStopped(ProbeStatus.UNSUPPORTED, msgspec.structs.replace(error, message=why))


def ask(nvml: Any, function: str, *arguments: Any, **options: Any) -> Any:
    """Call an NVML function.

    Raises
    ------
    Unknown
        With NVML's own words ("Not Supported", "Insufficient Permissions") when it refuses.
    """
    try:
        return getattr(nvml, function)(*arguments, **options)
    except nvml.NVMLError as failure:
        raise Unknown(f"{function}: {failure} (NVML {failure.value})") from None
    except AttributeError:
        raise Unknown(f"this nvidia-ml-py has no {function}") from None


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _within(value: float, low: float, high: float) -> Any:
    if not low <= value <= high:
        raise Unknown(f"absurd value {value}")
    return value


def _gpu(nvml: Any, root: Path, index: int) -> NvmlGpu:
    try:
        handle = ask(nvml, "nvmlDeviceGetHandleByIndex", index)
    except Unknown as reason:
        return NvmlGpu(index=index, unknown={"handle": str(reason)})

    def get(function: str, *arguments: Any) -> Any:
        return ask(nvml, function, handle, *arguments)

    def flag(function: str) -> Callable[[], bool]:
        return lambda: bool(get(function))

    found = Collector()
    found.take("name", lambda: get("nvmlDeviceGetName"))
    found.take("uuid", lambda: get("nvmlDeviceGetUUID"))
    found.take("pci_bus_id", lambda: bus_id(get("nvmlDeviceGetPciInfo")))
    found.take_all(
        ("vram_total_bytes", "vram_free_bytes", "vram_used_bytes"), lambda: _memory(get("nvmlDeviceGetMemoryInfo"))
    )
    found.take("vram_reserved_bytes", lambda: _reserved(nvml, handle))
    found.take("driver_model", lambda: _DRIVER_MODELS[get("nvmlDeviceGetCurrentDriverModel")])
    found.take("compute_capability", lambda: "{}.{}".format(*get("nvmlDeviceGetCudaComputeCapability")))
    found.take("compute_mode", lambda: _COMPUTE_MODES[get("nvmlDeviceGetComputeMode")])
    found.take("display_active", flag("nvmlDeviceGetDisplayActive"))
    found.take("display_mode", flag("nvmlDeviceGetDisplayMode"))
    found.take("persistence", flag("nvmlDeviceGetPersistenceMode"))
    found.take("ecc", flag("nvmlDeviceGetCurrentEccMode"))
    found.take("mig", lambda: bool(get("nvmlDeviceGetMigMode")[0]))
    found.take_all(("bar1_total_bytes", "bar1_free_bytes"), lambda: _bar1(get("nvmlDeviceGetBAR1MemoryInfo")))
    _collect_running(found, get)
    found.take("numa_node", lambda: _numa_node(root, found.values.get("pci_bus_id")))
    found.take("processes", lambda: _processes(nvml, handle))
    return NvmlGpu(index=index, **found.values, unknown=found.unknown)


def _collect_running(found: Collector, get: Callable[..., Any]) -> None:
    """Collect the link, the clocks and the power: what changes with the load."""

    def bounded(low: int, high: int, function: str, *arguments: Any) -> Callable[[], Any]:
        return lambda: _within(get(function, *arguments), low, high)

    def watts(function: str) -> Callable[[], float]:
        return lambda: _within(get(function), 0, 10_000_000) / 1000

    found.take("pcie_generation", bounded(1, 10, "nvmlDeviceGetCurrPcieLinkGeneration"))
    found.take("pcie_width", bounded(1, 32, "nvmlDeviceGetCurrPcieLinkWidth"))
    found.take("pcie_generation_max", bounded(1, 10, "nvmlDeviceGetMaxPcieLinkGeneration"))
    found.take("pcie_width_max", bounded(1, 32, "nvmlDeviceGetMaxPcieLinkWidth"))
    found.take("pcie_generation_gpu_max", bounded(1, 10, "nvmlDeviceGetGpuMaxPcieLinkGeneration"))
    found.take("sm_clock_mhz", bounded(0, 20_000, "nvmlDeviceGetClockInfo", _SM_CLOCK))
    found.take("sm_clock_max_mhz", bounded(1, 20_000, "nvmlDeviceGetMaxClockInfo", _SM_CLOCK))
    found.take("memory_clock_mhz", bounded(0, 50_000, "nvmlDeviceGetClockInfo", _MEMORY_CLOCK))
    found.take("memory_clock_max_mhz", bounded(1, 50_000, "nvmlDeviceGetMaxClockInfo", _MEMORY_CLOCK))
    found.take("temperature_c", bounded(0, 200, "nvmlDeviceGetTemperature", 0))
    found.take("power_w", watts("nvmlDeviceGetPowerUsage"))
    found.take("power_limit_w", watts("nvmlDeviceGetEnforcedPowerLimit"))
    found.take("power_limit_default_w", watts("nvmlDeviceGetPowerManagementDefaultLimit"))
    found.take("throttle_reasons", lambda: _throttle_reasons(get("nvmlDeviceGetCurrentClocksThrottleReasons")))


def bus_id(info: Any) -> str:
    """Return the bus id as Linux and Windows write it: NVML gives the domain eight digits."""
    text = info.busId.decode() if isinstance(info.busId, bytes) else info.busId
    domain, _, rest = str(text).lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _memory(info: Any) -> tuple[int, int, int]:
    total, free, used = int(info.total), int(info.free), int(info.used)
    if not 0 < total <= _LARGEST_BYTES or free > total or used > total:
        raise Unknown(f"absurd values: total {total}, free {free}, used {used}")
    return total, free, used


def _reserved(nvml: Any, handle: Any) -> int:
    version = getattr(nvml, "nvmlMemory_v2", None)
    if version is None:
        raise Unknown("this nvidia-ml-py has no memory info version 2")
    reserved = ask(nvml, "nvmlDeviceGetMemoryInfo", handle, version=version).reserved
    return int(_within(reserved, 0, _LARGEST_BYTES))


def _bar1(info: Any) -> tuple[int, int]:
    return int(_within(info.bar1Total, 1, _LARGEST_BYTES)), int(_within(info.bar1Free, 0, info.bar1Total))


def _throttle_reasons(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in _THROTTLE_BITS if bits & bit)


def _numa_node(root: Path, bus_id: str | None) -> int:
    if bus_id is None:
        raise Unknown("the bus id is unknown")
    node = int((root / "sys/bus/pci/devices" / bus_id / "numa_node").read_text())
    if node < 0:
        raise Unknown("the firmware gives no memory node for it")
    return node


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    """Return every process that uses the GPU; one that computes and draws is listed once."""
    kinds: dict[int, list[str]] = {}
    used: dict[int, int | None] = {}
    for kind, function in (
        ("compute", "nvmlDeviceGetComputeRunningProcesses"),
        ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
    ):
        for process in ask(nvml, function, handle):
            kinds.setdefault(process.pid, []).append(kind)
            known = process.usedGpuMemory is not None and process.usedGpuMemory <= _LARGEST_BYTES
            used[process.pid] = process.usedGpuMemory if known else used.get(process.pid)
    return tuple(GpuProcess(pid, _process_name(nvml, pid), used[pid], "+".join(kinds[pid])) for pid in sorted(kinds))


def _process_name(nvml: Any, pid: int) -> str | None:
    try:
        return str(ask(nvml, "nvmlSystemGetProcessName", pid)) or None
    except Unknown:
        return None  # a process of another user or outside this container; its number and bytes still count
