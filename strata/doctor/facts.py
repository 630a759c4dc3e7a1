"""What was found on this machine, as frozen data with a JSON form. Nothing here judges.

Three rules hold for every group:

* a value that could not be read is ``None``, and ``unknown[field]`` says why; unknown is never 0;
* ``sources[field]`` names where a value came from, where the group does not make that obvious;
* sizes are bytes (``*_bytes``), speeds bytes per second (``*_bytes_per_s``), times seconds (``*_s``).

Each group is gathered by one probe in a child process of its own; a `Probe` records how that went, so that
a hung or crashed probe is a fact like any other.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

SCHEMA_VERSION = 1


class ProbeStatus(StrEnum):
    """How a probe ended."""

    OK = "ok"
    UNSUPPORTED = "unsupported"  # the thing probed does not exist here (no NVIDIA driver, no CuPy): an answer
    FAILED = "failed"  # the probe got an error code or an exception
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"  # the child died by a signal, or ended without a result
    SKIPPED = "skipped"  # not run, by choice; `error.message` says whose


class ProbeError(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a probe, or one call in it, did not succeed."""

    message: str
    code: int | None = None  # numeric code as the library gave it (cudaError_t, nvmlReturn_t, errno, signal)
    name: str | None = None  # its symbolic name, e.g. "cudaErrorNoDevice"
    call: str | None = None  # the call that failed, e.g. "cudaHostAlloc(322 MiB)"
    stderr: str | None = None  # last lines of a crashed child


T = TypeVar("T")


class Probe(msgspec.Struct, Generic[T], frozen=True, omit_defaults=True):
    """The outcome of one probe group."""

    status: ProbeStatus
    value: T | None = None
    error: ProbeError | None = None
    seconds: float | None = None


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the system it runs."""

    os: str | None = None  # "linux", "windows", "darwin"
    os_release: str | None = None  # pretty name of the distribution or Windows build
    kernel: str | None = None
    machine: str | None = None  # "x86_64", "aarch64"
    python: str | None = None
    wsl: str | None = None  # "none", "wsl1", "wsl2"
    wsl_signals: dict[str, bool] = {}  # "/dev/dxg" -> True: each marker looked for, and whether it was there
    container: str | None = None  # "none", "docker", "podman", "kubernetes", ...
    cgroup_version: int | None = None
    cgroup_limit_bytes: int | None = None  # None with a reason "no limit" when unlimited
    cgroup_used_bytes: int | None = None
    cgroup_reclaimable_bytes: int | None = None  # page cache charged to the group that can be dropped
    ram_total_bytes: int | None = None
    ram_available_bytes: int | None = None
    swap_total_bytes: int | None = None
    swap_free_bytes: int | None = None
    memlock_limit_bytes: int | None = None
    cpu_model: str | None = None
    cpu_logical: int | None = None
    cpu_physical: int | None = None
    unknown: dict[str, str] = {}
    sources: dict[str, str] = {}


class GpuProcess(msgspec.Struct, frozen=True, omit_defaults=True):
    """Another process's use of a GPU, as NVML reports it."""

    pid: int
    name: str | None = None
    used_bytes: int | None = None


class NvmlGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as the driver's management library sees it."""

    index: int  # NVML's order: by PCI bus, unlike CUDA's
    name: str | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    vram_total_bytes: int | None = None
    vram_free_bytes: int | None = None
    vram_used_bytes: int | None = None
    vram_reserved_bytes: int | None = None  # kept by the driver itself; memory info v2 only
    display_active: bool | None = None  # a desktop is drawn on it
    display_mode: bool | None = None  # a monitor is plugged in; says nothing about use
    driver_model: str | None = None  # "WDDM", "MCDM", "TCC"; None off Windows
    compute_capability: str | None = None  # "8.9"
    processes: tuple[GpuProcess, ...] | None = None
    unknown: dict[str, str] = {}


class NvmlFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The NVIDIA driver and its GPUs."""

    driver_version: str | None = None
    cuda_driver_version: str | None = None  # highest CUDA the driver supports, "13.0"
    gpus: tuple[NvmlGpu, ...] = ()
    unknown: dict[str, str] = {}
    sources: dict[str, str] = {}


class CudaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One device as a CUDA process sees it."""

    ordinal: int  # CUDA's order: fastest first unless CUDA_DEVICE_ORDER says otherwise
    name: str | None = None
    uuid: str | None = None
    compute_capability: str | None = None
    vram_total_bytes: int | None = None
    vram_free_bytes: int | None = None  # after this probe's own context was made
    context_bytes: int | None = None  # what the context and a loaded module took from the device
    integrated: bool | None = None
    attributes: dict[str, int] = {}
    unknown: dict[str, str] = {}


class CudaFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a CuPy process can do here."""

    cupy_packages: dict[str, str] = {}  # distribution name -> version, every one that is installed
    cupy_version: str | None = None
    runtime_version: str | None = None  # "13.0"
    driver_version: str | None = None  # as cudaDriverGetVersion gives it
    nvrtc_version: str | None = None
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES, None when unset
    devices: tuple[CudaDevice, ...] = ()
    kernel_ok: bool | None = None  # a one-line kernel was compiled, run and its result checked
    unknown: dict[str, str] = {}
    sources: dict[str, str] = {}


class PinnedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How much page-locked host memory this system grants, by trying."""

    asked_bytes: int = 0  # where the probe would have stopped by itself
    granted_bytes: int = 0
    chunk_bytes: int = 0
    largest_chunk_bytes: int = 0  # no later pin may be larger than this
    ballast_bytes: int = 0  # device memory held while pinning
    refusal: ProbeError | None = None  # the first refusal; None when everything asked for was granted
    malloc_after_refusal_ok: bool | None = None  # tells a budget from a broken context
    unknown: dict[str, str] = {}
    sources: dict[str, str] = {}


class DiskFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the model lies and how fast it can be read."""

    path: str | None = None
    filesystem: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    read_bytes_per_s: float | None = None
    read_was_cached: bool | None = None  # True when the file was in the page cache: then the speed is RAM's
    unknown: dict[str, str] = {}
    sources: dict[str, str] = {}


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known of one machine at one moment."""

    schema_version: int = SCHEMA_VERSION
    strata_version: str = ""
    taken_at: str | None = None  # ISO 8601, UTC
    host: Probe[HostFacts]
    nvml: Probe[NvmlFacts]
    cuda: Probe[CudaFacts]
    pinned: Probe[PinnedFacts]
    disk: Probe[DiskFacts]
