"""What is particular to the Windows Subsystem for Linux."""

from __future__ import annotations

from strata.doctor.checks.check import Result, check, fail, passed, warn
from strata.doctor.checks.machine import Machine
from strata.doctor.units import GIB, counted, size

WINDOWS_LIBRARIES = "/usr/lib/wsl/"


def elsewhere(m: Machine) -> bool:
    """Return whether this is known not to be WSL2."""
    return m.host.wsl != "wsl2"


def foreign_libcuda(m: Machine) -> bool:
    """Return whether WSL2 uses a libcuda that is not the one from Windows."""
    offered = any(WINDOWS_LIBRARIES in file.path for file in m.cuda.libcuda_candidates)
    if not m.cuda.libcuda_candidates or (elsewhere(m) and not offered):
        return False
    first = m.cuda.libcuda_candidates[0]
    return WINDOWS_LIBRARIES not in (m.cuda.libcuda_loaded or first.target or first.path)


@check("STR-WSL-ONE", "WSL version", needs=(), scope=("host.wsl",))
def wsl_one(m: Machine) -> Result | None:
    """WSL1 translates system calls and has no GPU at all; only WSL2 runs CUDA."""
    if m.host.wsl == "wsl1":
        return fail(
            "This is WSL1, which has no GPU support.",
            m.says("host.wsl", f"kernel {m.host.kernel or 'unknown'}"),
            remedy="In Windows: wsl --set-version DISTRIBUTION 2",
        )
    return passed("WSL2.") if m.host.wsl == "wsl2" else None


@check("STR-WSL-GPU", "GPU in WSL2", needs=("host.wsl_signals",), scope=("host.wsl",))
def no_dxg(m: Machine) -> Result | None:
    """The GPU reaches WSL2 through /dev/dxg. Without it the Windows driver is too old or absent, GPU support is
    switched off, or a container was started without the device."""
    if elsewhere(m):
        return None
    if m.host.wsl_signals.get("/dev/dxg") is not False:
        return passed("The GPU's device /dev/dxg is there.")
    return fail(
        "WSL2 shows no GPU: /dev/dxg does not exist.",
        m.says("host.wsl_signals", "/dev/dxg is absent"),
        remedy="In a container: docker run --gpus all ...; else in Windows install the NVIDIA driver, remove "
        "gpuSupport=false from %USERPROFILE%\\.wslconfig, then: wsl --update; wsl --shutdown",
    )


@check("STR-WSL-LIBCUDA", "libcuda in WSL2", needs=("cuda.libcuda_candidates",), scope=("host.wsl",))
def shadowed_libcuda(m: Machine) -> Result | None:
    """In WSL2 libcuda comes from Windows and lies in /usr/lib/wsl/lib. A driver package of the distribution puts
    another one first on the search path, which finds no device (code 100)."""
    if elsewhere(m) or not m.cuda.libcuda_candidates:
        return None
    used = m.cuda.libcuda_loaded or m.cuda.libcuda_candidates[0].path
    if not foreign_libcuda(m):
        return passed("libcuda is the one from Windows.", m.says("cuda.libcuda_candidates", used))
    return fail(
        f"The libcuda used is {used}, not the one that Windows provides: it finds no GPU.",
        *(m.says("cuda.libcuda_candidates", f"{n}. {lib.path}") for n, lib in enumerate(m.cuda.libcuda_candidates, 1)),
        remedy="sudo apt remove --purge 'libnvidia-compute-*' 'nvidia-driver-*'; until then: "
        "LD_LIBRARY_PATH=/usr/lib/wsl/lib strata ...",
    )


@check("STR-WSL-VRAM", "More VRAM than RAM in WSL2", needs=("nvml.gpus.vram_total_bytes", "host.ram_total_bytes"))
def vram_beyond_ram(m: Machine) -> Result | None:
    """Windows backs a GPU's memory with its own. On a 96 GB card in a 64 GB machine an allocation has crashed the
    host and nvidia-smi shows ERR. Strata never fills VRAM to find its end, and caps the plan here."""
    ram = m.host.ram_total_bytes
    if elsewhere(m) or ram is None:
        return None
    big = {name: gpu.vram_total_bytes for name, gpu in m.gpus.items() if (gpu.vram_total_bytes or 0) > ram}
    if not big:
        return passed("RAM is larger than VRAM.")
    return warn(
        "A GPU has more memory than this system has RAM; filling it can crash Windows.",
        *(m.says("nvml.gpus", f"{name}: {size(total or 0)} VRAM") for name, total in big.items()),
        m.says("host.ram_total_bytes", f"RAM given to WSL2: {size(ram)}"),
        remedy=f"--vram-budget {ram // GIB}GiB; or more RAM: [wsl2] memory=... in %USERPROFILE%\\.wslconfig",
    )


@check("STR-WSL-RESIDENT", "Memory that Windows could not place", needs=("host.kernel_log",), scope=("host.wsl",))
def make_resident(m: Machine) -> Result | None:
    """`dxgkio_make_resident ... -12` in the kernel's log is a real refusal: Windows had no memory to make an allocation
    resident. The many `dxgkio_query_adapter_info ... -22` and `-2` lines beside it are harmless."""
    if elsewhere(m):
        return None
    lines = [line for line in m.host.kernel_log or () if "dxgkio_make_resident" in line and "-12" in line]
    if not lines:
        return passed("The kernel's log shows no refused allocation.")
    return warn(
        f"Windows refused {counted(len(lines), 'time')} to make GPU memory resident.",
        m.says("host.kernel_log", lines[-1]),
        remedy="Close GPU programs on Windows, or plan with less: --vram-budget SIZE",
    )


@check("STR-WSL-DRIVE", "Model on a Windows drive", needs=("disk.filesystem",), scope=("host.wsl",))
def windows_drive(m: Machine) -> Result | None:
    """Files under /mnt/c go through the 9p protocol: a fraction of the disk's speed, and a mapped file is not cached
    as well."""
    if elsewhere(m):
        return None
    if m.disk.filesystem not in ("9p", "v9fs", "drvfs"):
        return passed("The model lies on WSL's own disk.")
    return warn(
        "The model lies on a Windows drive; WSL2 reads that several times slower than its own disk.",
        m.says("disk.filesystem", f"{m.disk.path or 'the model'} on {m.disk.filesystem}"),
        remedy="Copy it: mkdir -p ~/models && cp MODEL ~/models/",
    )
