"""CUDA: its compiler, its device nodes, and the codes that calls fail with."""

from __future__ import annotations

from strata.doctor.checks.check import Result, check, fail, passed, warn
from strata.doctor.checks.driver import cupy_major
from strata.doctor.checks.host import NO_MEMORY, address_space_is_short
from strata.doctor.checks.machine import Machine, error_text
from strata.doctor.cuda_causes import CUDA_CODES
from strata.doctor.units import version

STICKY = (214, 700, 702, 719)
CODES_WITH_A_CHECK = [
    code for code, known in CUDA_CODES.items() if (known.check or "").startswith(("STR-CUDA-", "STR-DRV-", "STR-CTX-"))
]


def newest_architecture(m: Machine) -> int:
    """Return the highest architecture among the GPUs (89 is sm_89); 0 when none is known."""
    capabilities = [d.compute_capability for d in m.cuda.devices] + [g.compute_capability for g in m.nvml.gpus]
    return max((v[0] * 10 + v[1] for text in capabilities if (v := version(text)) and len(v) == 2), default=0)


def architecture_refused(m: Machine) -> bool:
    """Say whether NVRTC refused to compile for the GPU's architecture."""
    return m.cuda.kernel_error is not None and "gpu-architecture" in m.cuda.kernel_error.message


@check("STR-CUDA-ARCH", "Compiler knows the GPU", needs=("cuda.nvrtc_max_arch", "cuda.devices.compute_capability"))
def no_architecture(m: Machine) -> Result | None:
    """Kernels are compiled for the GPU at hand. NVRTC before 12.8 cannot make sm_120 (RTX 50), which ends in "no kernel
    image is available" (209)."""
    best, code, wanted = m.cuda.nvrtc_max_arch, m.met(98, 209), newest_architecture(m)
    if not code and not architecture_refused(m) and not (best and wanted > best):
        return passed("The compiler makes code for every GPU here.")
    return fail(
        f"NVRTC {m.cuda.nvrtc_version or '?'} cannot compile for this GPU (sm_{wanted or '?'}).",
        m.says("cuda.nvrtc_version", f"NVRTC {m.cuda.nvrtc_version or '?'} makes up to sm_{best or '?'}"),
        *code,
        remedy='pip install -U "nvidia-cuda-nvrtc-cu12>=12.8"' if cupy_major(m) == 12 else m.pip_install("-U"),
    )


@check("STR-CUDA-PTX", "Compiler no newer than the driver", needs=("cuda.nvrtc_version", "nvml.cuda_driver_version"))
def newer_ptx(m: Machine) -> Result | None:
    """Intermediate code (PTX) from a compiler newer than the driver is refused with code 222. Programs compiled
    straight for the GPU run all the same, so the newer compiler alone is no fault."""
    code = m.met(218, 222)
    if not code:
        return passed("No intermediate code was refused.")
    nvrtc = "nvidia-cuda-nvrtc-cu12" if cupy_major(m) == 12 else "nvidia-cuda-nvrtc"
    limit = m.nvml.cuda_driver_version or "VERSION"
    return fail(
        f"The driver (CUDA {m.nvml.cuda_driver_version or '?'}) refuses what NVRTC {m.cuda.nvrtc_version or '?'} made.",
        *code,
        m.says(
            "nvml.cuda_driver_version",
            f"driver {m.nvml.driver_version or '?'}, up to CUDA {m.nvml.cuda_driver_version}",
        ),
        m.says("cuda.nvrtc_version", f"NVRTC {m.cuda.nvrtc_version or '?'}"),
        remedy=f'Update the driver, or use the compiler of its version: pip install "{nvrtc}<={limit}.999"',
    )


@check("STR-CUDA-BUSY", "GPU free to use", needs=("nvml.gpus.compute_mode",))
def busy(m: Machine) -> Result | None:
    """Code 46, "all CUDA-capable devices are busy or unavailable": another process holds a GPU in exclusive mode, the
    mode forbids computing, or without persistence the driver is just being torn down."""
    closed = {n: g for n, g in m.gpus.items() if g.compute_mode not in (None, "default")}
    taken = {n: g for n, g in closed.items() if g.compute_mode == "prohibited" or g.processes}
    code = m.met(46)
    if not code and not taken:
        return passed("No GPU is reserved for someone else.")
    holders = [
        f"{name}: held by {p.name or 'process'} (pid {p.pid})" for name, g in taken.items() for p in g.processes or ()
    ]
    return fail(
        "The GPU is reserved for another process." if holders else "The GPU is busy, or its mode forbids computing.",
        *code,
        *(m.says("nvml.gpus", f"{name}: compute mode {gpu.compute_mode}") for name, gpu in closed.items()),
        *(m.says("nvml.gpus", text) for text in holders),
        remedy=("Wait for it, or take another GPU: --gpu INDEX" if len(m.nvml.gpus) > 1 else "Wait for it")
        + f"; on a machine of your own: {m.nvidia_smi('-c DEFAULT')}",
    )


@check("STR-CUDA-FABRIC", "Fabric Manager", needs=("cuda.kernel_ok",))
def fabric(m: Machine) -> Result | None:
    """Servers whose GPUs are joined by NVSwitch need the Fabric Manager service; without it every call gives 802."""
    return _by_code(m, 802, remedy=m.per_os(linux=CUDA_CODES[802].remedy, windows="Restart Windows"))


@check("STR-CUDA-COMPAT", "Forward-compatibility library", needs=("cuda.kernel_ok",))
def compat(m: Machine) -> Result | None:
    """The cuda-compat package's libcuda works on data-centre cards only; on a GeForce every call gives 804."""
    return _by_code(
        m,
        804,
        remedy=m.per_os(
            linux="Take the compat folder off the path: unset LD_LIBRARY_PATH; and remove the package cuda-compat "
            "(Ubuntu, Debian: sudo apt remove 'cuda-compat-*'; Fedora: sudo dnf remove 'cuda-compat-*')",
            windows="Install the driver anew, which brings its own nvcuda.dll: https://www.nvidia.com/drivers",
        ),
    )


@check("STR-CUDA-FORK", "CUDA initialises", needs=("cuda.kernel_ok",))
def fork(m: Machine) -> Result | None:
    """Code 3, "initialization error". In a log it mostly means that CUDA was used after a fork, which it does not
    survive. Strata's own probes are processes of their own that never fork: where they meet it, the driver could not
    start."""
    own = [m.says(group, error_text(error)) for group, error in m.cuda_errors if error.code == 3 and group != "run"]
    if not own:
        return _by_code(m, 3)
    return fail(
        "The driver could not start CUDA (code 3), in a fresh process too.",
        *own,
        remedy=m.per_os(
            linux="sudo dmesg | grep -iE 'nvrm|xid' shows why; then reboot (a container: look on the host)",
            windows="Restart Windows; if it comes back, install the driver anew, 'clean installation' ticked",
            wsl="In Windows: wsl --shutdown, then start WSL again",
        ),
    )


@check("STR-DRV-UVM", "Unified memory device", needs=("host.device_nodes", "cuda.kernel_ok"), scope=("host.wsl",))
def uvm(m: Machine) -> Result | None:
    """CUDA needs /dev/nvidia-uvm. It is missing when the module nvidia_uvm is not loaded, and broken after some
    suspends: "unknown error" (999)."""
    absent = m.host.device_nodes.get("/dev/nvidia-uvm") is False and m.host.device_nodes.get("/dev/nvidiactl") is True
    code = m.met(304, 999)
    if not absent and not code:
        return passed("CUDA's device nodes are whole.") if m.nvml.gpus else None
    in_container = (
        "On the host: sudo nvidia-modprobe -u -c=0; then pass /dev/nvidia-uvm on (docker run --gpus all; LXC: "
        "lxc.mount.entry = /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file)"
    )
    return fail(
        "The device /dev/nvidia-uvm is missing." if absent else "The driver cannot start CUDA, as after a suspend.",
        *([m.says("host.device_nodes", "/dev/nvidia-uvm is absent")] if absent else []),
        *code,
        remedy=in_container
        if absent and m.host.container not in (None, "none")
        else "sudo nvidia-modprobe -u -c=0"
        if absent and m.host.os != "windows"
        else m.per_os(
            linux="sudo rmmod nvidia_uvm; sudo modprobe nvidia_uvm (or reboot)",
            windows="Restart Windows",
            wsl="In Windows: wsl --shutdown",
        ),
    )


@check("STR-CUDA-STICKY", "Fault inside a kernel", needs=("cuda.kernel_ok", "run.log"))
def sticky(m: Machine) -> Result | None:
    """After an illegal access (700) or its kind the context is lost: the error cannot be read away and every later
    call repeats it. The process has to end; a new one works, so after a run that ended this way it is a warning."""
    if any(error.code in STICKY for group, error in m.cuda_errors if group != "run"):
        reset = "Restart Windows; if it returns, the card needs service or the overclock undone"
        return _by_code(m, *STICKY, remedy=reset if m.host.os == "windows" else None)
    error = m.last_run.refusal
    if error is None or error.code not in STICKY:
        return passed("No kernel faulted.") if m.nvml.gpus else None
    known = CUDA_CODES[error.code]
    return warn(
        f"The last run ended with code {error.code}: {known.cause}.",
        m.says("run.refusal", error_text(error)),
        remedy=m.per_os(
            linux=known.remedy, windows=known.remedy.replace("sudo nvidia-smi --gpu-reset, or reboot", "Restart")
        ),
    )


@check("STR-CUDA-OTHER", "Other CUDA errors", needs=("cuda.kernel_ok",))
def other(m: Machine) -> Result | None:
    """A probe met a CUDA error that no other check explains."""
    cuda_s = [(g, e) for g, e in m.cuda_errors if (e.name or "").lower().startswith("cuda")]
    strange = [(group, error) for group, error in cuda_s if error.code not in CUDA_CODES]
    if not strange:
        return passed("No unexplained CUDA error.")
    return fail(
        "CUDA failed in a way that no check here explains.",
        *(m.says(group, error_text(error)) for group, error in strange),
        remedy="Send us: strata report",
    )


@check("STR-CUDA-KERNEL", "A kernel runs", needs=("cuda.kernel_ok",), essential=True)
def kernel(m: Machine) -> Result | None:
    """A one-line kernel is compiled, run and its result checked: the shortest proof that driver, runtime, compiler and
    GPU work together. Where it fails with a code that has a check of its own, that one says why."""
    error = m.cuda.kernel_error
    if m.cuda.kernel_ok is not False:
        return passed("A kernel was compiled and run, and its result is right.")
    if error and (error.code in CODES_WITH_A_CHECK or architecture_refused(m)):
        return None
    if error and error.code == NO_MEMORY and address_space_is_short(m):
        return None
    versions = m.says("cuda.kernel_ok", f"runtime {m.cuda.runtime_version or '?'}, NVRTC {m.cuda.nvrtc_version or '?'}")
    again = m.pip_install("--force-reinstall")
    return fail(
        f"A one-line kernel fails: {error.message}." if error else "A one-line kernel fails.",
        *([m.says("cuda.kernel_error", error_text(error))] if error else []),
        versions,
        remedy=f"{again}; if it returns: reboot, undo any overclock"
        if error and "wrong" not in error.message
        else f"Undo any overclock of the GPU and its memory, and reboot; if it returns: {again}",
    )


def _by_code(m: Machine, *codes: int, remedy: str | None = None) -> Result | None:
    """Judge by the codes alone, in the words of the table of codes."""
    met = m.met(*codes)
    if not met:
        return passed("No call failed this way.") if m.nvml.gpus else None
    code = next(error.code for _, error in m.cuda_errors if error.code in codes)
    known = CUDA_CODES[code or 0]
    return fail(f"CUDA fails with code {code}: {known.cause}.", *met, remedy=remedy or known.remedy)
