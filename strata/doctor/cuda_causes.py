"""CUDA's error codes that people meet at start-up: name, string, and what each says in plain words.

Numbers, names and strings are those of cudaError_t (driver_types.h); the driver API has its own names for them.
"""

from __future__ import annotations

from typing import NamedTuple

from strata.doctor.cuda_packages import CUDA12, CUDA13


class CudaCode(NamedTuple):
    """One error code. `check` is the id of the check that looks for its cause in the facts."""

    name: str
    driver_name: str
    string: str
    check: str | None
    cause: str
    remedy: str


CUDA_CODES: dict[int, CudaCode] = {
    1: CudaCode(
        "cudaErrorInvalidValue",
        "CUDA_ERROR_INVALID_VALUE",
        "invalid argument",
        "STR-PIN-ZERO",
        "a call got a value it cannot take: often a range of zero bytes, or page-locked memory beyond WSL2's budget",
        "strata doctor; keep page-locked memory small: --pinned-budget 512MiB",
    ),
    2: CudaCode(
        "cudaErrorMemoryAllocation",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "out of memory",
        "STR-VRAM-OTHERS",
        "a memory was exhausted: VRAM, the page-locked budget (WSL2, Windows), or Windows' commit limit; the code does "
        "not say which",
        "strata doctor MODEL names the memory; then --vram-budget, --pinned-budget or a shorter --max-context",
    ),
    3: CudaCode(
        "cudaErrorInitializationError",
        "CUDA_ERROR_NOT_INITIALIZED",
        "initialization error",
        "STR-CUDA-FORK",
        "CUDA was used in a process forked after CUDA had started, or the driver could not start",
        "Start workers by 'spawn', not 'fork'; else reboot",
    ),
    35: CudaCode(
        "cudaErrorInsufficientDriver",
        "CUDA_ERROR_INSUFFICIENT_DRIVER",
        "CUDA driver version is insufficient for CUDA runtime version",
        "STR-DRV-OLD",
        "the driver is older than the CUDA runtime needs (CUDA 12: 525, CUDA 13: 580), or libcuda was not found at all",
        f"Install a newer driver, or CuPy for its CUDA: {CUDA12}",
    ),
    46: CudaCode(
        "cudaErrorDevicesUnavailable",
        "CUDA_ERROR_DEVICE_UNAVAILABLE",
        "all CUDA-capable devices are busy or unavailable",
        "STR-CUDA-BUSY",
        "another process has the GPU to itself (exclusive mode), or the driver is just starting or stopping it",
        "nvidia-smi shows who; sudo nvidia-smi -c DEFAULT; sudo nvidia-smi -pm 1",
    ),
    98: CudaCode(
        "cudaErrorInvalidDeviceFunction",
        "CUDA_ERROR_INVALID_DEVICE_FUNCTION",
        "invalid device function",
        "STR-CUDA-ARCH",
        "the program holds no code for this GPU's architecture",
        f"Install a build for this GPU: {CUDA13}",
    ),
    100: CudaCode(
        "cudaErrorNoDevice",
        "CUDA_ERROR_NO_DEVICE",
        "no CUDA-capable device is detected",
        "STR-CTX-BROKEN",
        "CUDA sees no GPU: CUDA_VISIBLE_DEVICES hides it, a wrong libcuda comes first (WSL2), or runtime and driver "
        "do not match; whichever call came first gets the blame, page-locking included",
        "strata doctor shows the variable, the libraries and both versions",
    ),
    101: CudaCode(
        "cudaErrorInvalidDevice",
        "CUDA_ERROR_INVALID_DEVICE",
        "invalid device ordinal",
        "STR-CUDA-HIDDEN",
        "a GPU was asked for by a number that CUDA does not have; it counts only the visible ones, from 0",
        "strata doctor lists the GPUs with both their numbers; --gpu INDEX or UUID",
    ),
    208: CudaCode(
        "cudaErrorAlreadyMapped",
        "CUDA_ERROR_ALREADY_MAPPED",
        "resource already mapped",
        "STR-WSL-PIN",
        "the memory is mapped already; in WSL2 this is one of the codes for an exhausted page-locked budget",
        "strata doctor measures the budget; --pinned-budget 512MiB",
    ),
    209: CudaCode(
        "cudaErrorNoKernelImageForDevice",
        "CUDA_ERROR_NO_BINARY_FOR_GPU",
        "no kernel image is available for execution on the device",
        "STR-CUDA-ARCH",
        "the program holds no code for this GPU's architecture; NVRTC before 12.8 cannot make sm_120 (RTX 50)",
        f'pip install -U "nvidia-cuda-nvrtc-cu12>=12.8", or with a driver from 580 on: {CUDA13}',
    ),
    214: CudaCode(
        "cudaErrorECCUncorrectable",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "uncorrectable ECC error encountered",
        "STR-CUDA-STICKY",
        "the GPU's memory has a fault",
        "sudo nvidia-smi --gpu-reset, or reboot; if it returns, the card needs service",
    ),
    218: CudaCode(
        "cudaErrorInvalidPtx",
        "CUDA_ERROR_INVALID_PTX",
        "a PTX JIT compilation failed",
        "STR-CUDA-PTX",
        "the driver could not compile the program's intermediate code",
        "Update the driver, or install CuPy for the driver's CUDA version",
    ),
    222: CudaCode(
        "cudaErrorUnsupportedPtxVersion",
        "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        "the provided PTX was compiled with an unsupported toolchain",
        "STR-CUDA-PTX",
        "the compiler that made the program is newer than the driver",
        "Update the driver to one that supports that CUDA version, or use an older toolkit",
    ),
    304: CudaCode(
        "cudaErrorOperatingSystem",
        "CUDA_ERROR_OPERATING_SYSTEM",
        "OS call failed or operation not supported on this OS",
        "STR-DRV-UVM",
        "the driver's call to the system failed, often for want of /dev/nvidia-uvm or by a container's limits",
        "sudo nvidia-modprobe -u -c=0",
    ),
    700: CudaCode(
        "cudaErrorIllegalAddress",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "an illegal memory access was encountered",
        "STR-CUDA-STICKY",
        "a kernel read or wrote outside its memory: a bug, or an unstable overclock; the process cannot go on",
        "End the process and start anew; if it is Strata's, send us: strata report",
    ),
    702: CudaCode(
        "cudaErrorLaunchTimeout",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "the launch timed out and was terminated",
        "STR-CUDA-STICKY",
        "the system's watchdog stopped a kernel on a GPU that drives a display",
        "Use a GPU without a display, or plug the monitor into the integrated GPU",
    ),
    712: CudaCode(
        "cudaErrorHostMemoryAlreadyRegistered",
        "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        "part or all of the requested memory range is already mapped",
        "STR-PIN-CALL",
        "the range was page-locked before",
        "Send us the log: strata report",
    ),
    719: CudaCode(
        "cudaErrorLaunchFailure",
        "CUDA_ERROR_LAUNCH_FAILED",
        "unspecified launch failure",
        "STR-CUDA-STICKY",
        "a kernel died on the GPU; the process cannot go on",
        "End the process and start anew; if it returns, send us: strata report",
    ),
    801: CudaCode(
        "cudaErrorNotSupported",
        "CUDA_ERROR_NOT_SUPPORTED",
        "operation not supported",
        "STR-PIN-REGISTER",
        "this system or GPU cannot do what was asked (under WSL2: registering memory with some flags)",
        "strata doctor shows what is supported here",
    ),
    802: CudaCode(
        "cudaErrorSystemNotReady",
        "CUDA_ERROR_SYSTEM_NOT_READY",
        "system not yet initialized",
        "STR-CUDA-FABRIC",
        "the Fabric Manager, which servers with NVSwitch need, is not running",
        "sudo systemctl enable --now nvidia-fabricmanager (of exactly the driver's version)",
    ),
    803: CudaCode(
        "cudaErrorSystemDriverMismatch",
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "system has unsupported display driver / cuda driver combination",
        "STR-DRV-MISMATCH",
        "libcuda and the kernel module are of different driver versions",
        "sudo reboot; in a container remove its own libcuda",
    ),
    804: CudaCode(
        "cudaErrorCompatNotSupportedOnDevice",
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "forward compatibility was attempted on non supported HW",
        "STR-CUDA-COMPAT",
        "NVIDIA's forward-compatibility libcuda is in use, which works on data-centre cards only",
        "Take the compat folder off the path: unset LD_LIBRARY_PATH; sudo apt remove 'cuda-compat-*'",
    ),
    999: CudaCode(
        "cudaErrorUnknown",
        "CUDA_ERROR_UNKNOWN",
        "unknown error",
        "STR-DRV-UVM",
        "the driver cannot start CUDA: after a suspend, or without /dev/nvidia-uvm",
        "sudo rmmod nvidia_uvm; sudo modprobe nvidia_uvm (or reboot)",
    ),
}
