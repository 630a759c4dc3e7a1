"""The NVIDIA driver: is it there, is it whole, is it new enough."""

from __future__ import annotations

from strata.doctor.checks.check import Result, check, fail, passed, warn
from strata.doctor.checks.machine import Machine, error_text
from strata.doctor.cuda_packages import CUDA12, OLDEST_DRIVER
from strata.doctor.facts import ProbeStatus
from strata.doctor.units import counted, version

INSTALL_DRIVER = (
    "install it from your distribution (Ubuntu: sudo ubuntu-drivers install; Fedora: sudo dnf install akmod-nvidia, of "
    "RPM Fusion; Arch: sudo pacman -S nvidia; Debian: sudo apt install nvidia-driver), then reboot"
)


def nvidia_present(m: Machine) -> bool:
    """Return whether the machine has an NVIDIA GPU, by whatever names one."""
    on_bus = any(a.vendor == "NVIDIA" for a in m.adapters.adapters)
    return on_bus or bool(m.nvml.gpus) or any(m.host.device_nodes.get(n) for n in ("/dev/nvidia0", "/dev/nvidiactl"))


def cupy_major(m: Machine) -> int | None:
    """Return the CUDA major version that the installed CuPy is built for; None when unknown or ambiguous."""
    majors = {int(name[9:11]) for name in m.cuda.cupy_packages if name in ("cupy-cuda12x", "cupy-cuda13x")}
    return majors.pop() if len(majors) == 1 else None


@check("STR-DRV-NONE", "NVIDIA driver", needs=("nvml.driver_version",))
def no_driver(m: Machine) -> Result | None:
    """The machine has an NVIDIA GPU but no NVIDIA driver answers: it is not installed, its kernel module is not loaded
    (after a kernel update, or refused by Secure Boot), or the open `nouveau` driver holds the card."""
    if m.nvml.driver_version is not None or m.facts.nvml.status is not ProbeStatus.UNSUPPORTED:
        return passed("The NVIDIA driver answers.", m.says("nvml.driver_version", f"driver {m.nvml.driver_version}"))
    if not nvidia_present(m):
        return None
    cards = [a for a in m.adapters.adapters if a.vendor == "NVIDIA"]
    return fail(
        "There is an NVIDIA GPU here, but no NVIDIA driver answers.",
        m.says("nvml.driver_version", m.reason("nvml")),
        *(
            m.says("adapters", f"{a.name or a.pci_id or 'NVIDIA GPU'}, kernel driver: {a.driver or 'none'}")
            for a in cards
        ),
        remedy=m.per_os(
            linux=f"If NVIDIA's driver is installed: sudo modprobe nvidia; else {INSTALL_DRIVER}",
            windows="Install the driver from https://www.nvidia.com/drivers and restart",
            wsl="Install the driver in Windows (not in WSL): https://www.nvidia.com/drivers; then: wsl --shutdown",
        ),
    )


@check("STR-GPU-NONE", "NVIDIA GPU", needs=("adapters.adapters",))
def no_gpu(m: Machine) -> Result | None:
    """Without an NVIDIA GPU Strata runs on the CPU with the numpy backend: the same plan and the same numbers, at
    what RAM and the processor give. That is no fault, only slower."""
    if nvidia_present(m) or m.facts.nvml.status is not ProbeStatus.UNSUPPORTED:
        return None
    others = ", ".join(a.name or a.vendor or "unnamed" for a in m.adapters.adapters)
    return passed(
        "No NVIDIA GPU here: Strata runs on the CPU with the numpy backend.",
        m.says("nvml", m.reason("nvml")),
        *([m.says("adapters", f"other display adapters: {others}")] if others else []),
    )


@check("STR-DRV-MISMATCH", "Driver library and kernel module", needs=("nvml.driver_version",), scope=("host.wsl",))
def mismatch(m: Machine) -> Result | None:
    """The driver was updated but its kernel module was not reloaded (NVML error 18, CUDA code 803), so library and
    module are of different versions. In WSL2 the two always differ in number; that is normal there."""
    if m.host.wsl != "none":
        return None
    module, library = m.host.nvidia_module_version, m.nvml.driver_version
    nvml = m.facts.nvml.error
    evidence = list(m.met(803))
    if nvml and nvml.code == 18:
        evidence.append(m.says("nvml", error_text(nvml)))
    if module and library and version(module) != version(library):
        evidence.append(m.says("host.nvidia_module_version", f"kernel module {module}, library {library}"))
    if not evidence:
        return passed("Driver library and kernel module are of one version.")
    return fail(
        f"The NVIDIA kernel module{f' ({module})' if module else ''} and the driver's library"
        f"{f' ({library})' if library else ''} are of different versions.",
        *evidence,
        remedy=m.per_os(
            linux="sudo reboot (or, with nothing using the GPU: sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia "
            "&& sudo modprobe nvidia)",
            windows="Restart Windows; if it comes back, install the driver anew: https://www.nvidia.com/drivers",
        ),
    )


@check("STR-DRV-OLD", "Driver new enough", needs=("nvml.driver_version", "cuda.cupy_packages"))
def too_old(m: Machine) -> Result | None:
    """CUDA 12 needs driver 525 or newer (528 on Windows), CUDA 13 needs 580. Below that every call fails with code 35,
    "CUDA driver version is insufficient", whatever the call was."""
    major, driver = cupy_major(m), version(m.nvml.driver_version)
    needed = OLDEST_DRIVER[major or 12][m.host.os == "windows"]  # below CUDA 12's, whatever CuPy there may be
    absent = m.facts.cuda.value is not None and not m.cuda.libcuda_candidates  # then code 35 is not about versions
    code = () if absent else m.met(35)
    supports = version(m.nvml.cuda_driver_version)
    too_low = bool(driver and driver < needed and m.host.wsl != "wsl2")  # WSL's number is not the driver's
    too_low = too_low or bool(supports and supports[0] < (major or 12))
    if not code and not too_low:
        return passed("The driver is new enough for the installed CuPy.")
    want = ".".join(map(str, needed)) if major or too_low else "580"
    can_12 = major == 13 and driver is not None and driver >= OLDEST_DRIVER[12][m.host.os == "windows"]
    packages = ", ".join(f"{n} {v}" for n, v in m.cuda.cupy_packages.items()) or "any CuPy that Strata can use"
    return fail(
        f"Driver {m.nvml.driver_version or '(version unknown)'} is too old for {packages}: it needs {want}.",
        m.says(
            "nvml.driver_version",
            f"driver {m.nvml.driver_version or '?'}, up to CUDA {m.nvml.cuda_driver_version or '?'}",
        ),
        m.says("cuda.cupy_packages", packages),
        *code,
        remedy=f"pip uninstall -y cupy-cuda13x, then: {CUDA12}; or a newer driver"
        if can_12
        else f"Install driver {want} or newer: "
        + m.per_os(
            linux=INSTALL_DRIVER,
            windows="https://www.nvidia.com/drivers",
            wsl="in Windows, https://www.nvidia.com/drivers",
        ),
    )


@check("STR-DRV-LIBCUDA", "CUDA driver library", needs=("cuda.libcuda_candidates",))
def no_libcuda(m: Machine) -> Result | None:
    """The driver is there but libcuda is not on the search path: a headless package without the compute library, or a
    container started without the driver's compute capability. CuPy reports it as "driver version is insufficient"."""
    if not m.nvml.gpus or not m.met(35) or m.cuda.libcuda_candidates or m.cuda.libcuda_loaded:
        return passed("libcuda is on the search path.")
    return fail(
        "The driver works, but its CUDA library (libcuda) is nowhere on the search path.",
        m.says("nvml.driver_version", f"driver {m.nvml.driver_version or '?'}, {counted(len(m.nvml.gpus), 'GPU')}"),
        m.says("cuda.libcuda_candidates", "no libcuda found"),
        remedy="In a container: docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ..."
        if m.host.container not in (None, "none")
        else m.per_os(
            linux="Install the driver's compute library, of exactly its version (Ubuntu: sudo apt install "
            f"libnvidia-compute-{(version(m.nvml.driver_version) or (580,))[0]}; Fedora: xorg-x11-drv-nvidia-cuda-libs;"
            " Debian: libcuda1; Arch: nvidia-utils)",
            windows="Install the driver anew: https://www.nvidia.com/drivers",
            wsl="In Windows: wsl --update; wsl --shutdown",
        ),
    )


@check("STR-DRV-LOST", "GPU still on the bus", needs=("host.kernel_log",))
def lost(m: Machine) -> Result | None:
    """The GPU fell off the bus (Xid 79, NVML error 15): power, riser or slot, overheating, or a failed sleep."""
    lines = [line for line in m.host.kernel_log or () if "fallen off the bus" in line.lower()]
    error = m.facts.nvml.error
    gone = error if error and error.code == 15 else None
    if not lines and not gone:
        return passed("No GPU was lost.")
    return fail(
        "A GPU fell off the bus; nothing on it works until a restart.",
        *(m.says("host.kernel_log", line) for line in lines[-1:]),
        *([m.says("nvml", error_text(gone))] if gone else []),
        remedy="Reboot; if it returns, check power connectors and riser; a lower power limit lowers the load: "
        + m.nvidia_smi("-pl WATTS"),
    )


@check("STR-DRV-NVML", "Driver management library", needs=("nvml.gpus",))
def nvml_failed(m: Machine) -> Result | None:
    """NVML is what nvidia-smi uses. When it fails while the GPU is there, free memory and the display are not known,
    and plans must rest on CUDA's word alone."""
    error = m.facts.nvml.error
    if m.facts.nvml.status is not ProbeStatus.FAILED or error is None or error.code in (15, 18):
        return passed("The driver's management library works.")
    return warn(
        "The driver's management library does not work: who uses the GPU is not known.",
        m.says("nvml", error_text(error)),
        remedy=m.per_os(
            linux="nvidia-smi; in a container: docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ...",
            windows="nvidia-smi; else install the driver anew",
        ),
    )
