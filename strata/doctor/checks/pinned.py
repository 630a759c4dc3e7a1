"""Page-locked host memory: how much is granted, and what a refusal really means."""

from __future__ import annotations

import re

from strata.doctor.checks.check import Result, check, fail, passed, unknown, warn
from strata.doctor.checks.machine import Machine, error_text
from strata.doctor.facts import PinnedFacts
from strata.doctor.findings import Evidence
from strata.doctor.units import GIB, size

LOCK_REMEDIES = {  # by VirtualLock's code
    87: "Nothing to set: the size is no multiple of a large page. Send us: strata report",
    1314: "secpol.msc: Local Policies, User Rights Assignment, 'Lock pages in memory': add yourself, sign in anew",
    1450: "Close other programs, or restart Windows: its pool of lockable memory is used up",
    1453: "Close other programs: the process may lock no more than its working set allows",
}
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


def malloc_works(m: Machine) -> bool | None:
    """Return whether device memory was granted after pinning; None when that was not tried."""
    if m.pinned is None or m.pinned.malloc_refusal:
        return False if m.pinned else None
    return m.pinned.malloc_after_refusal_ok


def budget_met(m: Machine) -> PinnedFacts | Result:
    """Return the facts when pinning was refused while device memory was still granted, else what that means."""
    if m.pinned and m.pinned.refusal and malloc_works(m) is False:
        return unknown(
            "Page-locking was refused, and device memory too: that is no limit of page-locked memory.",
            *budget_evidence(m),
        )
    if m.pinned is None or m.pinned.refusal is None:
        return passed("All page-locked memory that was asked for was granted.", *budget_evidence(m))
    if malloc_works(m) is None:
        return unknown("Page-locking was refused; whether device memory still works is not known.", *budget_evidence(m))
    return m.pinned


@check("STR-WSL-PIN", "Page-locked budget of WSL2", needs=COUNTS, scope=("host.wsl",))
def wsl_budget(m: Machine) -> Result | None:
    """WSL2's driver grants a small page-locked budget on most hosts (0.5 to 1 GiB), far more on some. The refusal
    comes with various codes (2, 1, 208, 100) and has nothing to do with free RAM. The embedding and the experts stay
    pageable, or mapped from the file; native Linux has no such budget."""
    if m.host.wsl != "wsl2":
        return None
    met = budget_met(m)
    if isinstance(met, Result):
        return met
    return warn(
        f"WSL2 grants {size(met.granted_bytes)} of page-locked memory here; what exceeds it stays pageable.",
        *budget_evidence(m),
        remedy=f"--pinned-budget {met.granted_bytes >> 20}MiB keeps inside it; native Linux has no such budget",
    )


@check("STR-PIN-LIMIT", "Page-locked budget", needs=COUNTS, scope=("host.os", "host.wsl"))
def linux_budget(m: Machine) -> Result | None:
    """On native Linux the driver pins what RAM allows. A refusal well below that comes from a container's or virtual
    machine's limit; RLIMIT_MEMLOCK has no say in it (it limits mlock, not cudaHostAlloc)."""
    if m.host.os != "linux" or m.host.wsl != "none":
        return None
    met = budget_met(m)
    if isinstance(met, Result):
        return met
    return warn(
        f"The driver stops at {size(met.granted_bytes)} of page-locked memory; what exceeds it stays pageable.",
        *budget_evidence(m),
        remedy=f"--pinned-budget {met.granted_bytes >> 20}MiB; look for a limit around it: "
        "cat /sys/fs/cgroup/memory.max, or the virtual machine's memory setting",
    )


@check("STR-PIN-HALF", "Windows' limit on page-locked memory", needs=COUNTS, scope=("host.os",))
def windows_half(m: Machine) -> Result | None:
    """Windows lets page-locked memory take at most about half of RAM (28 of 64 GiB in a bare process), and much less
    in a loaded one. Registering 13.8 GiB on a 32 GiB machine fails. Plans stay below it and pin the hottest experts."""
    if m.host.os != "windows":
        return None
    met = budget_met(m)
    if isinstance(met, Result):
        return met
    ram = m.host.ram_total_bytes
    share = f", {100 * met.granted_bytes // ram} % of {size(ram)} RAM" if ram else ""
    return warn(
        f"Windows locks no more than {size(met.granted_bytes)}{share}.",
        *budget_evidence(m),
        remedy=f"--pinned-budget {met.granted_bytes >> 20}MiB; more RAM raises the limit",
    )


@check("STR-PIN-LATCHED", "Refused pin reported later", needs=("run.vram_free_loaded_bytes",))
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
    return warn(
        f"The last run's out-of-memory is not its kernel's: {size(free or 0)} of VRAM were free.",
        m.says("run.refusal", error_text(error)),
        remedy="Send us the log: strata report. Until then run without page-locked memory: --pinned-budget 0",
    )


@check("STR-PIN-COUPLED", "Pinned memory and VRAM share a budget", needs=("pinned.granted_bytes",))
def coupled(m: Machine) -> Result | None:
    """Under WDDM, device memory has been refused after much host memory was page-locked, although the card had VRAM
    free; even more often on a card without a display, since then more is asked for. The cause is unproven (one shared
    budget, or the commit limit); what helps is certain: all device allocations first, pinning last."""
    if m.pinned is None or not m.pinned.granted_bytes:
        return passed("No memory was page-locked.")
    held = f"{size(m.pinned.granted_bytes)} page-locked, {size(m.pinned.ballast_bytes)} VRAM held"
    evidence = [
        m.says("pinned.granted_bytes", held),
        *(
            m.says("nvml.gpus", f"{n}: {size(g.vram_free_bytes)} VRAM free before")
            for n, g in m.gpus.items()
            if g.vram_free_bytes
        ),
    ]
    if malloc_works(m) is not False:
        return passed("Device memory was not refused after pinning.", *evidence)
    refused = m.pinned.malloc_refusal
    return warn(
        f"With {size(m.pinned.granted_bytes)} page-locked, device memory was refused although VRAM was free.",
        *([m.says("pinned.malloc_refusal", error_text(refused))] if refused else []),
        *evidence,
        remedy=f"--pinned-budget {m.pinned.granted_bytes * 4 // 5 >> 20}MiB (Strata pins last, after device memory)",
    )


@check("STR-PIN-CALL", "Size of one registration", needs=("run.refusal", "pinned.register_granted_bytes"))
def one_call(m: Machine) -> Result | None:
    """Registering a whole arena in one call is refused while slices of it succeed (2 GiB a call in loaded WDDM
    processes, 512 GiB on newer drivers). Strata registers in slices and says how many."""
    error, slices = m.last_run.refusal, m.pinned.register_granted_bytes if m.pinned else None
    if error is None:
        return None
    if "hostregister" not in (error.call or "").lower() or error.code == 1 or not slices:
        return passed("The last run's failed call was not a large registration.")
    return warn(
        f"One large registration was refused; slices of {size(slices)} are granted.",
        m.says("run.refusal", error_text(error)),
        m.says("pinned.register_granted_bytes", f"{size(slices)} registered in one call by the probe"),
        remedy=f"Plan anew: strata plan MODEL; plans register in slices of at most {size(slices)}",
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


@check("STR-PIN-ZERO", "Empty page-locked range", needs=("run.refusal",))
def zero_bytes(m: Machine) -> Result | None:
    """cudaHostRegister answers "invalid argument" (1) when it is given zero bytes. Nothing is wrong with the machine:
    whoever plans must not lock empty ranges."""
    error = m.last_run.refusal
    if error is None:
        return None
    call = error.call or ""
    if error.code != 1 or "host" not in call.lower() or not re.search(r"\(0(?:\.0+)? ?(?:[KMG]?i?B|bytes)?\)", call):
        return passed("The last run's failed call was not for an empty range.")
    return warn(
        "The last run page-locked an empty range.",
        m.says("run.refusal", error_text(error)),
        remedy="Send us: strata report. Until then: --pinned-budget 0",
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
        remedy=LOCK_REMEDIES.get(error.code or 0, LOCK_REMEDIES[1314])
        if m.host.os == "windows"
        else "ulimit -l unlimited (for good: 'USER - memlock unlimited' in /etc/security/limits.conf)",
    )
