"""The system, its RAM, and the limits on what a process may take of it."""

from __future__ import annotations

import re

from strata.doctor.checks.check import Result, check, fail, passed, warn
from strata.doctor.checks.machine import Machine, error_text
from strata.doctor.units import GIB, KIB, counted, size

SYSTEMS = {"darwin": "macOS"}
SWAPPING = 2 * GIB  # swap in use that says more than a few idle pages were put away
NO_MEMORY = 2  # cudaErrorMemoryAllocation


@check("STR-SYS-OS", "Operating system", needs=("host.os",))
def system(m: Machine) -> Result | None:
    """CUDA exists on Linux and Windows. On other systems Strata runs on the CPU, with the same plan and the same
    numbers, only slower; asking for the GPU there is a mistake."""
    evidence = m.says("host.os", f"{m.host.os_release or m.host.os}, kernel {m.host.kernel or 'unknown'}")
    if m.host.os not in (None, "linux", "windows") and m.options.device == "cuda":
        return fail(
            f"--device cuda was asked for, and CUDA does not exist on {SYSTEMS.get(m.host.os, m.host.os)}.",
            evidence,
            remedy="--device cpu, or a machine with Linux or Windows and an NVIDIA GPU",
        )
    return passed("A system that Strata knows.", evidence)


@check("STR-RAM-CGROUP", "Container memory limit", needs=("host.cgroup_limit_bytes", "host.ram_total_bytes"))
def container_limit(m: Machine) -> Result | None:
    """A process in a container is killed while loading although MemAvailable looks ample: the container's memory.max
    lies below the machine's RAM. Plans use min(MemAvailable, memory.max - memory.current + reclaimable)."""
    limit, total = m.host.cgroup_limit_bytes, m.host.ram_total_bytes
    if limit is None or total is None or limit >= total:
        return passed("No memory limit below the machine's RAM.")
    used = m.host.cgroup_used_bytes
    return warn(
        f"This process may use {size(limit)} of the machine's {size(total)} RAM; beyond that it is killed.",
        m.says("host.cgroup_limit_bytes", f"memory limit {size(limit)}" + (f", {size(used)} used" if used else "")),
        m.says("host.ram_total_bytes", f"RAM {size(total)}"),
        remedy="Plans respect the limit. For more, start the container with: docker run --memory=SIZE "
        "(Kubernetes: resources.limits.memory; systemd: MemoryMax=)",
    )


@check("STR-RAM-OOM", "Out-of-memory killer", needs=("host.kernel_log",))
def oom_killer(m: Machine) -> Result | None:
    """The kernel killed a process because memory ran out: inside a container's limit, or on the whole machine. What
    was killed shows nothing of it, it simply stops."""
    lines = [line for line in m.host.kernel_log or () if "out of memory: killed process" in line.lower()]
    if not lines:
        return passed("The kernel's log shows no process killed for want of memory.")
    return warn(
        f"The kernel killed a process for want of memory {counted(len(lines), 'time')} since it started.",
        m.says("host.kernel_log", lines[-1]),
        remedy="Close what is not needed, or plan with less: --ram-budget SIZE",
    )


@check("STR-RAM-SWAP", "Swapping", needs=("host.swap_total_bytes", "host.swap_free_bytes", "host.ram_available_bytes"))
def swapping(m: Machine) -> Result | None:
    """Experts that were paged out must be read back from the disk for every token that uses them: the disk light
    never stops and decode crawls."""
    total, free, available = m.host.swap_total_bytes, m.host.swap_free_bytes, m.host.ram_available_bytes
    if total is None or free is None or available is None:
        return passed("Swap is idle.")
    used = total - free
    evidence = (
        m.says("host.swap_free_bytes", f"{size(max(used, 0))} of {size(total)} swap in use"),
        m.says("host.ram_available_bytes", f"{size(available)} RAM available"),
    )
    if used >= SWAPPING and available < used:
        return warn(
            f"{size(used)} are swapped out and only {size(available)} of RAM are free to take them back.",
            *evidence,
            remedy="Close the programs that hold the memory, or plan with less: --ram-budget SIZE",
        )
    return passed("Swap is idle.", *evidence)


@check(
    "STR-RAM-HUGE",
    "Reserved huge pages",
    needs=("host.huge_pages_free", "host.huge_page_bytes", "host.ram_total_bytes"),
)
def huge_pages(m: Machine) -> Result | None:
    """Huge pages reserved at boot are taken out of ordinary memory whether or not anybody uses them."""
    free, page, total = m.host.huge_pages_free, m.host.huge_page_bytes, m.host.ram_total_bytes
    idle = (free or 0) * (page or 0)
    if total and idle > total // 20 and m.host.os != "windows":
        return warn(
            f"{size(idle)} of RAM are set aside as huge pages that nobody uses.",
            m.says("host.huge_pages_free", f"{free} free huge pages of {size(page or 0)}"),
            m.says("host.ram_total_bytes", f"RAM {size(total)}"),
            remedy="sudo sysctl vm.nr_hugepages=0",
        )
    return passed("No RAM is set aside as idle huge pages.")


@check("STR-RAM-OVERCOMMIT", "Strict overcommit", needs=("host.overcommit_mode",), scope=("host.os",))
def overcommit(m: Machine) -> Result | None:
    """With vm.overcommit_memory=2 every mapping is charged in full, CUDA's large address reservations too, so
    allocations fail with plenty of memory free."""
    if m.host.os not in (None, "linux"):
        return None
    if m.host.overcommit_mode != 2:
        return passed("The kernel does not charge memory that is only reserved.")
    limit, used = m.host.commit_limit_bytes, m.host.commit_used_bytes
    left = f", {size(max(limit - used, 0))} of {size(limit)} left" if limit is not None and used is not None else ""
    return warn(
        "The kernel charges reserved memory in full; CUDA reserves far more than it uses.",
        m.says("host.overcommit_mode", f"vm.overcommit_memory = 2{left}"),
        remedy="sudo sysctl vm.overcommit_memory=0",
    )


@check(
    "STR-RAM-ADDRESS",
    "Limit on address space",
    needs=("host.address_space_limit_bytes", "host.ram_available_bytes"),
)
def address_space(m: Machine) -> Result | None:
    """`ulimit -v` (RLIMIT_AS, which batch systems and login scripts set) bounds what a process may map, touched or not:
    the model file, every thread's stack, and the whole of RAM and VRAM, for which CUDA reserves addresses. Allocations
    are then refused with plenty of memory free. Plans keep to what is left."""
    limit, used = m.host.address_space_limit_bytes, m.host.address_space_used_bytes
    if limit is None:
        return passed("Nothing limits this process's address space.")
    in_use = f", {size(used)} in use" if used is not None else ""
    says = m.says("host.address_space_limit_bytes", f"ulimit -v {limit // KIB} ({size(limit)}){in_use}")
    if not address_space_is_short(m):
        return passed("The limit on this process's address space leaves room for all of its memory.", says)
    remedy = "ulimit -v unlimited (a batch system sets it by what a job asks for: SGE -l h_vmem=SIZE, PBS -l vmem=SIZE)"
    refused = [m.says(group, error_text(e)) for group, e in m.cuda_errors if (group, e.code) == ("cuda", NO_MEMORY)]
    if refused:
        what = f"CUDA reserves more addresses than the {size(limit)} that this process may have."
        return fail(what, says, *refused, remedy=remedy)
    return warn(
        f"This process may map only {size(max(limit - (used or 0), 0))} more; beyond that, free memory is refused.",
        says,
        m.says("host.ram_available_bytes", f"{size(m.host.ram_available_bytes or 0)} RAM available"),
        remedy=remedy,
    )


def address_space_is_short(m: Machine) -> bool:
    """Say whether a limit on address space bounds this process sooner than the RAM and VRAM it could use."""
    limit, available = m.host.address_space_limit_bytes, m.host.ram_available_bytes
    if limit is None or available is None:
        return False
    in_vram = sum(gpu.vram_total_bytes or 0 for gpu in m.nvml.gpus)
    return limit - (m.host.address_space_used_bytes or 0) < available + in_vram


@check("STR-KERNEL-PIN", "Kernel with a page-locking bug", needs=("host.kernel",), scope=("host.os",))
def kernel_611(m: Machine) -> Result | None:
    """On Linux 6.11 a refused page-locking request leaks: cudaMallocHost fails and the RAM is gone until a reboot.
    Strata does not try the pinned budget there and plans without pinning."""
    if m.host.os not in (None, "linux"):
        return None
    if not re.match(r"6\.11(\.|-|$)", m.host.kernel or ""):
        return passed("The kernel is not one known to leak page-locked memory.")
    return warn(
        "This kernel leaks memory when page-locking is refused; the pinned budget was not tried.",
        m.says("host.kernel", f"kernel {m.host.kernel}"),
        remedy="Install kernel 6.12 or newer (Ubuntu: sudo apt install linux-generic-hwe-24.04; Fedora, Arch: an "
        "ordinary update), then reboot",
    )
