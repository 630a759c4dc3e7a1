"""Page-locked host memory: how much is granted, and what a refusal really means."""

from __future__ import annotations

from strata.doctor.checks.check import Result, check, fail, passed, warn
from strata.doctor.checks.machine import Machine, error_text
from strata.doctor.findings import Evidence
from strata.doctor.plan import Tier
from strata.doctor.units import GIB, size

COUNTS = ("pinned.granted_bytes", "pinned.asked_bytes")


def budget_evidence(m: Machine) -> tuple[Evidence, ...]:
    """Return what was granted and how the first refusal was worded."""
    p = m.pinned
    if p is None:
        return ()
    lines = [m.says("pinned.granted_bytes", f"{size(p.granted_bytes)} of {size(p.asked_bytes)} granted")]
    if p.refusal:
        lines.append(m.says("pinned.refusal", error_text(p.refusal)))
    if p.malloc_after_refusal_ok:
        lines.append(m.says("pinned.malloc_after_refusal_ok", "cudaMalloc still works after the refusal"))
    return tuple(lines)


def budget_met(m: Machine) -> bool:
    """Return whether pinning was refused while device memory was still granted: a budget, not a broken context."""
    return bool(m.pinned and m.pinned.refusal and m.pinned.malloc_after_refusal_ok)


@check("STR-WSL-PIN", "Page-locked budget of WSL2", needs=COUNTS, scope=("host.wsl",))
def wsl_budget(m: Machine) -> Result | None:
    """WSL2's driver grants a small page-locked budget on most hosts (0.5 to 1 GiB), far more on some. The refusal
    comes with various codes (2, 1, 208, 100) and has nothing to do with free RAM. The embedding and the experts stay
    pageable, or mapped from the file; native Linux has no such budget."""
    if m.host.wsl != "wsl2":
        return None
    if not budget_met(m) or m.pinned is None:
        return passed("All page-locked memory that was asked for was granted.", *budget_evidence(m))
    return warn(
        f"WSL2 grants {size(m.pinned.granted_bytes)} of page-locked memory here; what exceeds it stays pageable.",
        *budget_evidence(m),
        remedy=f"--pinned-budget {m.pinned.granted_bytes >> 20}MiB keeps inside it; native Linux has no such budget",
    )


@check("STR-PIN-LIMIT", "Page-locked budget", needs=COUNTS, scope=("host.os", "host.wsl"))
def linux_budget(m: Machine) -> Result | None:
    """On native Linux the driver pins what RAM allows. A refusal well below that comes from a container's or virtual
    machine's limit; RLIMIT_MEMLOCK has no say in it (it limits mlock, not cudaHostAlloc)."""
    if m.host.os != "linux" or m.host.wsl == "wsl2":
        return None
    if not budget_met(m) or m.pinned is None:
        return passed("All page-locked memory that was asked for was granted.", *budget_evidence(m))
    return warn(
        f"The driver stops at {size(m.pinned.granted_bytes)} of page-locked memory; what exceeds it stays pageable.",
        *budget_evidence(m),
        remedy=f"--pinned-budget {m.pinned.granted_bytes >> 20}MiB; look for a limit around it: systemd-cgls, "
        "cat /sys/fs/cgroup/memory.max",
    )


@check("STR-PIN-HALF", "Windows' limit on page-locked memory", needs=COUNTS, scope=("host.os",))
def windows_half(m: Machine) -> Result | None:
    """Windows lets page-locked memory take at most about half of RAM (28 of 64 GiB in a bare process), and much less
    in a loaded one. Registering 13.8 GiB on a 32 GiB machine fails. Plans stay below it and pin the hottest experts."""
    if m.host.os != "windows":
        return None
    if not budget_met(m) or m.pinned is None:
        return passed("All page-locked memory that was asked for was granted.", *budget_evidence(m))
    ram = m.host.ram_total_bytes
    share = f", {100 * m.pinned.granted_bytes // ram} % of {size(ram)} RAM" if ram else ""
    return warn(
        f"Windows locks no more than {size(m.pinned.granted_bytes)}{share}.",
        *budget_evidence(m),
        remedy=f"--pinned-budget {m.pinned.granted_bytes >> 20}MiB; more RAM raises the limit",
    )


@check("STR-CTX-BROKEN", "Usable CUDA context", needs=("cuda.devices",), essential=True)
def broken_context(m: Machine) -> Result | None:
    """The first CUDA call of a process fails, whatever it is: a 322 MiB page-locked request with "no CUDA-capable
    device", then cudaMalloc too, while nvidia-smi and other programs see the GPU. That is not a pinning limit: this
    environment cannot make a context, because the CUDA runtime or toolkit it uses does not match the driver."""
    both_refused = bool(
        m.pinned and not m.pinned.granted_bytes and m.pinned.refusal and m.pinned.malloc_after_refusal_ok is False
    )
    unexplained = any(group == "cuda" and error.code == 100 for group, error in m.cuda_errors)
    hidden = m.cuda.visible_devices is not None or "CUDA_VISIBLE_DEVICES" in m.cuda.environment
    if not m.nvml.gpus or not (both_refused or (unexplained and not hidden)):
        return passed("A context can be made: device memory and page-locked memory are both granted.")
    seen = f"the driver sees {len(m.nvml.gpus)} GPU(s)"
    evidence = [
        m.says(
            "nvml.driver_version",
            f"driver {m.nvml.driver_version or '?'}, up to CUDA {m.nvml.cuda_driver_version or '?'}",
        ),
        m.says(
            "cuda.runtime_version", f"CUDA runtime {m.cuda.runtime_version or '?'}, NVRTC {m.cuda.nvrtc_version or '?'}"
        ),
        *(m.says(group, error_text(error)) for group, error in m.cuda_errors),
        m.says("cuda.libcuda_loaded", f"libcuda: {m.cuda.libcuda_loaded or 'not known'}"),
        m.says("cuda.devices", f"{len(m.cuda.devices)} CUDA device(s) here; {seen}"),
    ]
    if m.pinned and m.pinned.fresh_process_ok:
        evidence.append(m.says("pinned.fresh_process_ok", "the same request succeeds in a fresh process"))
    return fail(
        f"CUDA runtime {m.cuda.runtime_version or '?'} cannot use the GPU on driver {m.nvml.driver_version or '?'} "
        f"(CUDA {m.nvml.cuda_driver_version or '?'}), although {seen}.",
        *evidence,
        remedy=f"In a fresh environment: pip install 'strata[{m.cuda_extra()}]' "
        "(an own build: rebuild with the toolkit of the driver's CUDA version)",
    )


@check("STR-PIN-LATCHED", "Refused pin reported later", needs=("run.refusal",))
def latched(m: Machine) -> Result | None:
    """An unrelated kernel launch says "out of memory" with gigabytes free: a refused page-locking request left its
    error behind, and the next check picked it up. It has to be read away (cudaGetLastError) where it is handled."""
    error = m.last_run.refusal
    if error is None:
        return None
    free = m.last_run.vram_free_loaded_bytes
    launch = "launch" in (error.call or "").lower() or "kernel" in (error.call or "").lower()
    if error.code != 2 or not launch or (free or 0) < GIB:
        return passed("The last run's failed call failed by itself.")
    return fail(
        f"The last run's out-of-memory is not its kernel's: {size(free or 0)} of VRAM were free.",
        m.says("run.refusal", error_text(error)),
        remedy="Send us the log: strata report. Until then run without page-locked memory: --pinned-budget 0",
    )


@check("STR-PIN-COUPLED", "Pinned memory and VRAM share a budget", needs=("pinned.granted_bytes",))
def coupled(m: Machine) -> Result | None:
    """Under WDDM, device memory has been refused after much host memory was page-locked, although the card had VRAM
    free; even more often on a card without a display, since then more is asked for. The cause is unproven (one shared
    budget, or the commit limit); what helps is certain: all device allocations first, pinning last."""
    if m.pinned is None or not m.pinned.granted_bytes or m.pinned.malloc_after_refusal_ok is not False:
        return passed("Device memory is still granted after pinning.")
    free = [f"{name}: {size(gpu.vram_free_bytes)} VRAM free" for name, gpu in m.gpus.items() if gpu.vram_free_bytes]
    refused = m.pinned.malloc_refusal
    return warn(
        f"With {size(m.pinned.granted_bytes)} page-locked, device memory was refused although VRAM was free.",
        m.says(
            "pinned.granted_bytes",
            f"{size(m.pinned.granted_bytes)} page-locked, {size(m.pinned.ballast_bytes)} VRAM held",
        ),
        *([m.says("pinned.malloc_refusal", error_text(refused))] if refused else []),
        *(m.says("nvml.gpus", text) for text in free),
        remedy=f"--pinned-budget {m.pinned.granted_bytes * 4 // 5 >> 20}MiB (Strata pins last, after device memory)",
    )


@check("STR-PIN-CALL", "Size of one registration", needs=("pinned.register_granted_bytes",))
def one_call(m: Machine) -> Result | None:
    """Registering a whole arena in one call is refused while slices of it succeed (2 GiB a call in loaded WDDM
    processes, 512 GiB on newer drivers). Strata registers in slices and says how many."""
    p = m.pinned
    if p is None or p.register_refusal is None or not p.register_granted_bytes:
        return passed("Memory can be registered in the size that was tried.")
    return warn(
        f"One registration is refused beyond {size(p.register_granted_bytes)}; more slices are needed.",
        m.says("pinned.register_refusal", error_text(p.register_refusal)),
        remedy=f"Nothing to do: plans use slices of at most {size(p.largest_chunk_bytes)}",
    )


@check("STR-PIN-REGISTER", "Registration of ordinary memory", needs=("pinned.register_granted_bytes",))
def no_register(m: Machine) -> Result | None:
    """cudaHostRegister locks memory that already exists. Where it is refused altogether, page-locked memory must be
    allocated as such and filled by copying, which takes a second copy in RAM while loading."""
    p = m.pinned
    if p is None or p.register_refusal is None or p.register_granted_bytes or not p.granted_bytes:
        return passed("Memory that exists can be page-locked.")
    return warn(
        "Memory that exists cannot be page-locked here; loading copies once more.",
        m.says("pinned.register_refusal", error_text(p.register_refusal)),
        remedy=m.per_os(
            linux="Use a driver of branch 550 or newer",
            windows="Use a driver of branch 550 or newer",
            wsl="In Windows: wsl --update, and install the newest NVIDIA driver",
        ),
    )


@check("STR-PIN-VERIFY", "Page-locked memory holds its bytes", needs=("pinned.verified",))
def verified(m: Machine) -> Result | None:
    """Every granted chunk is written, copied to the device and read back. If that differs, nothing computed here can
    be trusted."""
    if m.pinned is None or m.pinned.verified is not False:
        return passed("What was written to page-locked memory came back from the GPU unchanged.")
    return fail(
        "Bytes copied from page-locked memory to the GPU and back came back changed.",
        *budget_evidence(m),
        remedy="Test RAM (memtest86+) and the GPU's slot and riser; plan without pinning: --pinned-budget 0",
    )


@check("STR-PIN-ZERO", "Empty page-locked range", needs=("plan",))
def zero_bytes(m: Machine) -> Result | None:
    """cudaHostRegister answers "invalid argument" for zero bytes. A plan must not hold an empty page-locked line."""
    empty = [r for r in m.plan.reservations if r.tier is Tier.PINNED and not r.bytes] if m.plan else []
    if not empty:
        return passed("No page-locked line of the plan is empty.")
    return fail(
        f"The plan would page-lock zero bytes for {empty[0].what}.",
        m.says("plan", f"{empty[0].id}: {empty[0].formula}"),
        remedy="Make the plan anew: strata plan MODEL -o plan.json",
    )


@check("STR-PIN-POOL", "More locked than planned", needs=("run.planned_pinned_bytes", "run.actual_pinned_bytes"))
def pool(m: Machine) -> Result | None:
    """11.3 GB planned and 16.6 GB locked: a pool rounded every request up to a power of two. Strata allocates exactly;
    another library in the process may not."""
    planned, actual = m.last_run.planned_pinned_bytes, m.last_run.actual_pinned_bytes
    if planned is None or actual is None or actual <= planned * 1.02:
        return passed("No more was page-locked than planned.")
    return warn(
        f"The last run locked {size(actual)} where {size(planned)} were planned.",
        m.says("run.actual_pinned_bytes", f"planned {size(planned)}, locked {size(actual)}"),
        remedy="Send us the log: strata report. Meanwhile: --pinned-budget "
        + f"{planned * planned // actual >> 20}MiB",
    )


@check("STR-PIN-LOCK", "Locking in RAM", needs=("run.refusal",))
def lock(m: Machine) -> Result | None:
    """Locking experts in RAM (VirtualLock, mlock) is optional. VirtualLock 87: the size is no multiple of the large
    page; 1314: the privilege is missing; 1450 and 1453: the pool or the process's quota is used up. On Linux
    RLIMIT_MEMLOCK limits mlock; it does not limit cudaHostAlloc or cudaHostRegister."""
    error = m.last_run.refusal
    if error is None:
        return None
    call = error.call or ""
    if "virtuallock" not in call.lower() and "mlock" not in call.lower():
        return passed("The last run's failed call was not one that locks memory in RAM.")
    limit = m.host.memlock_limit_bytes
    evidence = [m.says("run.refusal", error_text(error))]
    if limit is not None and m.host.os == "linux":
        evidence.append(m.says("host.memlock_limit_bytes", f"RLIMIT_MEMLOCK {size(limit)}"))
    return warn(
        "Locking memory in RAM was refused; that is optional and nothing else failed by it.",
        *evidence,
        remedy=m.per_os(
            linux="ulimit -l unlimited (for good: 'USER - memlock unlimited' in /etc/security/limits.conf)",
            windows="secpol.msc: Local Policies, User Rights Assignment, 'Lock pages in memory': add your user, "
            "then sign in anew",
        ),
    )
