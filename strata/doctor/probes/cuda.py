"""What a CuPy process can do here: versions, devices, what a context takes, and whether a kernel runs."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import msgspec

from strata.doctor.cuda_codes import cuda_error
from strata.doctor.facts import CudaDevice, CudaFacts, ProbeError, ProbeStatus
from strata.doctor.probes import libraries
from strata.doctor.probes.collect import Collector, Unknown
from strata.doctor.probes.nvml_gauge import NvmlGauge
from strata.doctor.probes.request import ProbeRequest, ProbeStopped

_CUPY_PACKAGES = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-5-0", "cupy-rocm-7-0")
_TOOLKIT_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cublas", "cuda-pathfinder")
_STEERING_PREFIXES = ("CUDA_", "CUPY_", "NVIDIA_")
_STEERING_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD")
_NO_DRIVER_CODES = (35, 100)  # insufficient driver, no device: what the runtime says when libcuda is missing
CAPABILITY_ATTRIBUTES = (75, 76)  # cudaDevAttrComputeCapabilityMajor and Minor, which CuPy has no names for
ATTRIBUTES = (
    "CanMapHostMemory",
    "HostRegisterSupported",
    "HostRegisterReadOnlySupported",
    "PageableMemoryAccess",
    "PageableMemoryAccessUsesHostPageTables",
    "CanUseHostPointerForRegisteredMem",
    "ConcurrentManagedAccess",
    "UnifiedAddressing",
    "Integrated",
    "AsyncEngineCount",
    "KernelExecTimeout",
    "MemoryPoolsSupported",
    "MultiProcessorCount",
    "MaxSharedMemoryPerBlockOptin",
    "L2CacheSize",
    "TccDriver",
)
_KERNEL = 'extern "C" __global__ void strata_probe(int *out) { out[threadIdx.x] = 3 * threadIdx.x + 1; }'
_THREADS = 32


def probe(request: ProbeRequest) -> Iterator[CudaFacts]:
    """Yield the software that is installed, then its versions, then each device as it is tried."""
    found = Collector()
    found.values["cupy_packages"] = installed_versions(_CUPY_PACKAGES)
    found.values["toolkit_packages"] = installed_versions(
        [name + suffix for name in _TOOLKIT_PACKAGES for suffix in ("", "-cu12", "-cu13")]
    )
    found.values["visible_devices"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    found.values["environment"] = steering_variables(os.environ)
    found.take("libcuda_candidates", libraries.search_cuda)
    found.take("libnvml_candidates", libraries.search_nvml)
    yield CudaFacts(**found.fields())
    cupy = import_cupy(found.values["cupy_packages"])
    with NvmlGauge.open(request.nvml_missing) as gauge:
        yield from read_cuda(found, cupy, gauge, driver_library)


def installed_versions(names: tuple[str, ...] | list[str]) -> dict[str, str]:
    """Return the version of each of the named distributions that is installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def steering_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that steer CUDA, CuPy or the search for their libraries."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_STEERING_PREFIXES) or name in _STEERING_NAMES
    }


def import_cupy(packages: Mapping[str, str]) -> Any:
    """Return the module cupy.

    Raises
    ------
    ProbeStopped
        ``UNSUPPORTED`` when it is not installed or not for CUDA, ``FAILED`` when it is there but broken.
    """
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"  # the kernel must be compiled now, not found in a cache
    try:
        import cupy
    except ImportError as failure:
        if not packages and isinstance(failure, ModuleNotFoundError) and failure.name == "cupy":
            raise ProbeStopped(
                ProbeStatus.UNSUPPORTED, ProbeError("CuPy is not installed", call="import cupy")
            ) from None
        raise ProbeStopped(ProbeStatus.FAILED, cuda_error(failure, "import cupy")) from failure
    if cupy.cuda.runtime.is_hip:
        raise ProbeStopped(ProbeStatus.UNSUPPORTED, ProbeError("this CuPy is built for AMD's ROCm, not for CUDA"))
    return cupy


def driver_library() -> ctypes.CDLL:
    """Return the driver's library, which CuPy has loaded already."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def read_cuda(found: Collector, cupy: Any, gauge: NvmlGauge, driver_library: Any) -> Iterator[CudaFacts]:
    """Yield what CuPy says, the facts in `found` included.

    Parameters
    ----------
    found : Collector
        What is known so far.
    cupy : module
        CuPy, or one that acts like it.
    gauge : NvmlGauge
        Sees a device's memory before this process has a context on it.
    driver_library : callable
        Returns the driver's library for ctypes.

    Raises
    ------
    ProbeStopped
        When CUDA shows no device at all.
    """
    runtime, nvrtc = cupy.cuda.runtime, cupy.cuda.nvrtc
    found.values["cupy_version"] = cupy.__version__
    found.take("runtime_version", lambda: _version(runtime.runtimeGetVersion()))
    found.take("driver_version", lambda: _driver_version(runtime.driverGetVersion()))
    found.take("nvrtc_version", lambda: "{}.{}".format(*nvrtc.getVersion()))
    found.take("nvrtc_max_arch", lambda: max(nvrtc.getSupportedArchs()))
    yield CudaFacts(**found.fields())
    failure = None
    count = 0
    try:
        count = runtime.getDeviceCount()
    except RuntimeError as refusal:
        failure = refusal
    windows = sys.platform == "win32"
    found.take("libcuda_loaded", lambda: libraries.loaded_file("nvcuda.dll" if windows else "libcuda.so"))
    found.take("libnvml_loaded", lambda: libraries.loaded_file("nvml.dll" if windows else "libnvidia-ml.so"))
    if failure is not None:
        yield CudaFacts(**found.fields())
        raise _no_devices(failure, found) from failure
    found.values["devices"] = ()
    for ordinal in range(count):
        yield CudaFacts(**found.fields())  # a crash on the next device must not lose this one
        device, kernel_error = _device(cupy, ordinal, gauge, driver_library)
        found.values["devices"] += (device,)
        found.values["kernel_error"] = found.values.get("kernel_error") or kernel_error
    if count:
        found.values["kernel_ok"] = found.values["kernel_error"] is None
    yield CudaFacts(**found.fields())


def _no_devices(failure: RuntimeError, found: Collector) -> ProbeStopped:
    error = cuda_error(failure, "cudaGetDeviceCount")
    if error.code in _NO_DRIVER_CODES and found.values.get("libcuda_candidates") == ():
        message = f"no NVIDIA driver library (libcuda) is installed; the runtime says: {error.message}"
        return ProbeStopped(ProbeStatus.UNSUPPORTED, msgspec.structs.replace(error, message=message))
    return ProbeStopped(ProbeStatus.FAILED, error)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _driver_version(number: int) -> str:
    if number == 0:
        raise Unknown("the runtime finds no driver")
    return _version(number)


def _device(cupy: Any, ordinal: int, gauge: NvmlGauge, driver_library: Any) -> tuple[CudaDevice, ProbeError | None]:
    """Return one device and, when no kernel could be run on it, why."""
    runtime = cupy.cuda.runtime
    found = Collector()
    found.take("name", lambda: runtime.getDeviceProperties(ordinal)["name"].decode())
    found.take("uuid", lambda: device_uuid(driver_library(), ordinal))
    found.take("compute_capability", lambda: _capability(runtime, ordinal))
    found.take("attributes", lambda: _attributes(runtime, ordinal))
    found.take("integrated", lambda: bool(found.values["attributes"]["Integrated"]))
    found.take("nvml_index", lambda: gauge.index(found.values.get("uuid"), runtime.deviceGetPCIBusId(ordinal)))
    nvml_index = found.values.get("nvml_index")
    before = Collector()
    before.take("used", lambda: gauge.used_bytes(nvml_index))
    try:
        call = f"cudaSetDevice({ordinal})"
        runtime.setDevice(ordinal)
        call = "cudaMemGetInfo"
        runtime.memGetInfo()
    except RuntimeError as failure:
        error = cuda_error(failure, call)
        return CudaDevice(ordinal=ordinal, error=error, **found.values, unknown=found.unknown), error
    module, kernel_error = _run_kernel(cupy)
    found.take_all(("vram_free_bytes", "vram_total_bytes"), runtime.memGetInfo)
    if "used" in before.values:
        found.take("context_bytes", lambda: _growth(before.values["used"], gauge.used_bytes(nvml_index)))
    else:
        found.unknown["context_bytes"] = before.unknown["used"]
    del module  # it had to stay loaded until its memory was counted
    return CudaDevice(ordinal=ordinal, **found.values, unknown=found.unknown), kernel_error


def device_uuid(library: Any, ordinal: int) -> str:
    """Return a device's UUID as NVML writes it.

    The driver is asked, because CuPy's device properties end a UUID at its first zero byte.
    """
    buffer = (ctypes.c_ubyte * 16)()
    device = ctypes.c_int()
    for function, arguments in (
        ("cuDeviceGet", (ctypes.byref(device), ordinal)),
        ("cuDeviceGetUuid_v2", (buffer, device)),  # version 2 gives a MIG slice its own
    ):
        status = getattr(library, function)(*arguments)
        if status != 0:
            raise Unknown(f"{function} returned {status}")
    text = bytes(buffer).hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _capability(runtime: Any, ordinal: int) -> str:
    major, minor = (runtime.deviceGetAttribute(number, ordinal) for number in CAPABILITY_ATTRIBUTES)
    return f"{major}.{minor}"


def _attributes(runtime: Any, ordinal: int) -> dict[str, int]:
    values = {}
    for name in ATTRIBUTES:
        number = getattr(runtime, f"cudaDevAttr{name}", None)  # an older CuPy may not know the attribute
        if number is not None:
            values[name] = int(runtime.deviceGetAttribute(number, ordinal))
    return values


def _growth(before: int, after: int) -> int:
    if after <= before:
        raise Unknown("the driver's count did not grow; another process may have freed memory meanwhile")
    return after - before


def _run_kernel(cupy: Any) -> tuple[Any, ProbeError | None]:
    """Compile a kernel for the current device, run it and check its result; return the module and what went wrong."""
    runtime = cupy.cuda.runtime
    result = (ctypes.c_int * _THREADS)()
    module, call = None, "nvrtcCompileProgram"
    try:
        module = cupy.RawModule(code=_KERNEL, backend="nvrtc")
        kernel = module.get_function("strata_probe")
        call = "cudaMalloc(128 bytes)"
        out = runtime.malloc(ctypes.sizeof(result))
        call = "cuLaunchKernel"
        kernel((1,), (_THREADS,), (cupy.uint64(out),))
        runtime.memcpy(ctypes.addressof(result), out, ctypes.sizeof(result), runtime.memcpyDeviceToHost)
        runtime.free(out)
    except Exception as failure:  # noqa: BLE001 - CuPy raises types of its own and of its loader here
        return module, cuda_error(failure, call)
    if list(result) != [3 * thread + 1 for thread in range(_THREADS)]:
        return module, ProbeError("the kernel ran, but its result is wrong", call=call)
    return module, None
