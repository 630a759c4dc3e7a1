"""What was found on this machine, as frozen data with a JSON form. Nothing here judges.

Three rules hold for every group:

* a value that could not be read is ``None``, and ``unknown[field]`` says why; unknown is never 0;
* ``sources[field]`` names where a value came from, where the group does not make that obvious;
* sizes are bytes (``*_bytes``), speeds bytes per second (``*_bytes_per_s``), times seconds (``*_s``).

Each group is gathered by one probe in a child process of its own; a `Probe` records how that went, so that
a hung or crashed probe is a fact like any other. A probe reports as it goes: one that failed, crashed or timed
out may still carry in `value` what it had found until then.
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
    value: T | None = None  # complete when the status is ok, else what was known when the probe ended
    error: ProbeError | None = None
    seconds: float | None = None


class NumaNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """One memory node and the processors next to it."""

    node: int
    cpus: int | None = None  # logical processors
    total_bytes: int | None = None
    free_bytes: int | None = None


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
    cgroup_cpus: float | None = None  # CPU quota in processors; None with a reason "no limit" when unlimited
    ram_total_bytes: int | None = None
    ram_available_bytes: int | None = None
    swap_total_bytes: int | None = None  # the page file on Windows
    swap_free_bytes: int | None = None
    page_file_managed: bool | None = None  # Windows sizes the page file itself
    commit_limit_bytes: int | None = None  # RAM + page file that may be promised; enforced on Windows
    commit_used_bytes: int | None = None
    overcommit_mode: int | None = None  # Linux vm.overcommit_memory: 0 heuristic, 1 always, 2 never
    memlock_limit_bytes: int | None = None  # RLIMIT_MEMLOCK; None with a reason "no limit" when unlimited
    address_space_limit_bytes: int | None = None  # RLIMIT_AS (`ulimit -v`); None as above
    address_space_used_bytes: int | None = None  # of the process that asks for these facts, mapped files included
    thp: str | None = None  # transparent huge pages: "always", "madvise", "never"
    huge_page_bytes: int | None = None  # size of a reserved huge page (or a Windows large page)
    huge_pages_total: int | None = None
    huge_pages_free: int | None = None
    numa_nodes: tuple[NumaNode, ...] | None = None
    cpu_model: str | None = None
    cpu_logical: int | None = None
    cpu_physical: int | None = None
    cpu_usable: int | None = None  # logical processors this process may run on
    cpu_performance: int | None = None  # logical processors on performance cores
    cpu_efficiency: int | None = None  # logical processors on efficiency cores; 0 when all cores are alike
    cpu_flags: tuple[str, ...] | None = None  # instruction sets that matter to kernels, by their Linux names
    cpu_priority: str | None = None  # this process's: "low", "normal", "high"
    io_priority: str | None = None
    device_nodes: dict[str, bool] = {}  # "/dev/nvidia-uvm" -> True: driver device files, and whether they exist
    nvidia_module_version: str | None = None  # the kernel module that is loaded, which may not match the library
    kernel_log: tuple[str, ...] | None = None  # lines of the GPU driver, WSL's dxgkrnl and the OOM killer, oldest first
    unknown: dict[str, str] = {}
    sources: dict[str, str] = {}


class GpuProcess(msgspec.Struct, frozen=True, omit_defaults=True):
    """Another process's use of a GPU, as NVML reports it."""

    pid: int
    name: str | None = None
    used_bytes: int | None = None  # None where the driver does not say (always so under WDDM)
    kind: str | None = None  # "compute", "graphics"


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
    compute_mode: str | None = None  # "default", "exclusive_process", "prohibited", "exclusive_thread"
    persistence: bool | None = None
    ecc: bool | None = None
    mig: bool | None = None
    bar1_total_bytes: int | None = None
    bar1_free_bytes: int | None = None
    pcie_generation: int | None = None  # now: idle links run slower than they can
    pcie_width: int | None = None  # lanes, now
    pcie_generation_max: int | None = None  # of card and slot together
    pcie_width_max: int | None = None
    pcie_generation_gpu_max: int | None = None  # of the card alone
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None  # "sw_power_cap", "hw_thermal_slowdown", "gpu_idle", ...
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    numa_node: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    unknown: dict[str, str] = {}


class NvmlFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The NVIDIA driver and its GPUs."""

    driver_version: str | None = None
    cuda_driver_version: str | None = None  # highest CUDA the driver supports, "13.0"
    gpus: tuple[NvmlGpu, ...] = ()
    unknown: dict[str, str] = {}
    sources: dict[str, str] = {}


class LibraryFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A shared library found on the search path."""

    path: str
    target: str | None = None  # the file that links lead to, when another
    version: str | None = None  # as the file's name says
    found_by: str | None = None  # "LD_LIBRARY_PATH", "ld.so.cache", "/usr/lib/wsl/lib", ...


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """VRAM that a run took beside its context and its own allocations, by the driver's count."""

    modules_bytes: int  # once every kernel was loaded
    graphs_bytes: int  # what came on top by the end: captured graphs, and what libraries keep


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
    nvml_index: int | None = None  # the same card in NVML's order, matched by UUID
    overheads: dict[
        str, Overhead
    ] = {}  # by model architecture: of the last run with this card, driver and these kernels
    attributes: dict[str, int] = {}  # by CUDA's names: "CanMapHostMemory", "PageableMemoryAccess", ...
    error: ProbeError | None = None  # why this device could not be used; the others may still work
    unknown: dict[str, str] = {}


class CudaFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a CuPy process can do here."""

    cupy_packages: dict[str, str] = {}  # distribution name -> version, every one that is installed
    cupy_version: str | None = None
    runtime_version: str | None = None  # "13.0"
    driver_version: str | None = None  # as cudaDriverGetVersion gives it
    nvrtc_version: str | None = None
    nvrtc_max_arch: int | None = None  # highest architecture it compiles for: 120 is sm_120
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES, None when unset
    environment: dict[str, str] = {}  # every variable set here that steers CUDA, CuPy or the search for libraries
    toolkit_packages: dict[str, str] = {}  # NVIDIA's own distributions (nvidia-cuda-nvrtc, ...) -> version
    libcuda_loaded: str | None = None  # the file mapped into the process
    libcuda_candidates: tuple[LibraryFile, ...] = ()  # in search order: the first one wins
    libnvml_loaded: str | None = None
    libnvml_candidates: tuple[LibraryFile, ...] = ()
    devices: tuple[CudaDevice, ...] = ()
    kernel_ok: bool | None = None  # on every device a one-line kernel was compiled, run and its result checked
    kernel_error: ProbeError | None = None  # what stopped the first one that failed
    unknown: dict[str, str] = {}
    sources: dict[str, str] = {}


class PinnedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How much page-locked host memory this system grants, by trying."""

    asked_bytes: int = 0  # where the probe would have stopped by itself
    granted_bytes: int = 0
    chunk_bytes: int = 0
    largest_chunk_bytes: int = 0  # no later pin may be larger than this
    ballast_bytes: int = 0  # device memory held while pinning
    ballast_resident_bytes: int | None = None  # of it, what the driver counts in VRAM after every byte was written
    device_uuid: str | None = None
    verified: bool | None = None  # every granted chunk was written, copied to the device and read back equal
    refusal: ProbeError | None = None  # the first refusal; None when everything asked for was granted
    register_granted_bytes: int | None = None  # how much of one chunk of ordinary memory cudaHostRegister locked
    register_refusal: ProbeError | None = None
    malloc_after_refusal_ok: bool | None = None  # tells a budget from a broken context
    malloc_refusal: ProbeError | None = None
    fresh_process_ok: bool | None = None  # a second process pinned, after both were refused in the first
    unknown: dict[str, str] = {}
    sources: dict[str, str] = {}


class DiskFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the model lies and how fast it can be read."""

    path: str | None = None
    file_bytes: int | None = None
    filesystem: str | None = None
    mount: str | None = None
    device: str | None = None  # as mounted: "/dev/nvme0n1p2", "C:\\", "//server/share"
    rotational: bool | None = None  # a spinning disk, as the kernel's queue says
    total_bytes: int | None = None
    free_bytes: int | None = None
    read_bytes_per_s: float | None = None  # past the page cache, where the system allows it
    read_was_cached: bool | None = None  # True when the file was in the page cache: then the speed is RAM's
    warm_read_bytes_per_s: float | None = None  # the same bytes again, from the page cache
    unknown: dict[str, str] = {}
    sources: dict[str, str] = {}


class DisplayAdapter(msgspec.Struct, frozen=True, omit_defaults=True):
    """A display controller of any maker, as the bus or Windows lists it."""

    vendor: str | None = None  # "NVIDIA", "AMD", "Intel", "Microsoft", ...
    name: str | None = None
    pci_bus_id: str | None = None  # "0000:01:00.0"
    pci_id: str | None = None  # vendor:device, "10de:2d04"
    driver: str | None = None  # kernel driver bound to it
    integrated: bool | None = None
    boot_display: bool | None = None  # the firmware's screen
    displays: int | None = None  # monitors connected (Linux) or desktops drawn (Windows) on it
    vram_total_bytes: int | None = None
    vram_used_bytes: int | None = None
    budget_bytes: int | None = None  # what WDDM lets one process use now
    unknown: dict[str, str] = {}


class AdapterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All display controllers of the machine, NVIDIA's included."""

    adapters: tuple[DisplayAdapter, ...] = ()
    unknown: dict[str, str] = {}
    sources: dict[str, str] = {}


class SpeedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How fast bytes move. Where a number depends on threads, it is given by thread count."""

    device_uuid: str | None = None
    h2d_pinned_bytes_per_s: float | None = None
    h2d_pageable_bytes_per_s: dict[int, float] = {}  # threads -> the driver's copy from pageable memory
    h2d_staged_bytes_per_s: dict[int, float] = {}  # threads -> copied by them to pinned staging, then to the device
    device_copy_bytes_per_s: float | None = None  # bytes copied; each is read and written once
    ram_read_bytes_per_s: dict[int, float] = {}  # threads -> read speed of a buffer beyond the caches
    pcie_generation_loaded: int | None = None  # of the link while it copied
    pcie_width_loaded: int | None = None
    unknown: dict[str, str] = {}
    sources: dict[str, str] = {}


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How the last run went, as its log says: some failures show only after the start."""

    log: str | None = None  # path
    error: str | None = None  # the line it ended with, when it ended badly
    refusal: ProbeError | None = None  # the call that failed
    refused_line: str | None = None  # the plan's line that call was for; None when it was for none
    planned_vram_bytes: int | None = None
    actual_vram_bytes: int | None = None
    planned_pinned_bytes: int | None = None
    actual_pinned_bytes: int | None = None
    vram_free_loaded_bytes: int | None = None  # after loading, as the driver's management library says
    decode_tokens_per_s: float | None = None
    usual_decode_tokens_per_s: float | None = None  # best of the earlier runs of the same model and options
    unknown: dict[str, str] = {}
    sources: dict[str, str] = {}


NOT_GATHERED = ProbeError(message="this group was not gathered")


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
    adapters: Probe[AdapterFacts] = Probe(status=ProbeStatus.SKIPPED, error=NOT_GATHERED)
    speed: Probe[SpeedFacts] = Probe(status=ProbeStatus.SKIPPED, error=NOT_GATHERED)
    run: Probe[RunFacts] = Probe(status=ProbeStatus.SKIPPED, error=NOT_GATHERED)
