"""The system, its RAM and its processors."""

from __future__ import annotations

import math
import re

from strata.doctor.checks.check import Result, check, fail, passed, unknown, warn
from strata.doctor.checks.machine import Machine, error_text
from strata.doctor.units import GIB, KIB, counted, size, speed

SYSTEMS = {"darwin": "macOS"}
SWAPPING = 2 * GIB  # swap in use that says more than a few idle pages were put away
NO_MEMORY = 2  # cudaErrorMemoryAllocation
HELD_UP = 0.9  # of the best speed with fewer threads: less with all of them is no noise


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
        remedy="Install kernel 6.12 or newer (Ubuntu: sudo apt install linux-generic-hwe-24.04), then reboot",
    )


@check("STR-CPU-NUMA", "Memory of another socket", needs=("host.numa_nodes.total_bytes",))
def numa(m: Machine) -> Result | None:
    """Experts that lie on the other socket's memory are read through the link between sockets: 6.4 instead of 10.1
    tokens per second has been seen."""
    nodes = [node for node in m.host.numa_nodes or () if node.total_bytes]
    if len(nodes) < 2:
        return passed("All RAM is equally near.")
    near = {gpu.numa_node for gpu in m.nvml.gpus if gpu.numa_node is not None}
    home = f"; the GPU is on node {min(near)}" if len(near) == 1 else ""
    return warn(
        f"RAM is spread over {len(nodes)} nodes{home}; experts on a far node are read slower.",
        m.says("host.numa_nodes", ", ".join(f"node {n.node}: {size(n.total_bytes or 0)}" for n in nodes)),
        remedy="numactl --interleave=all strata run ...",
    )


@check("STR-CPU-ISA", "Vector instructions", needs=("host.cpu_flags",), scope=("host.machine",))
def instructions(m: Machine) -> Result | None:
    """Without AVX2 the CPU's matrix products are several times slower. In a virtual machine the flag is often merely
    not passed through."""
    if (m.host.machine or "").lower() not in ("x86_64", "amd64"):
        return None
    if m.host.cpu_flags is None or "avx2" in m.host.cpu_flags:
        return passed("The processor has AVX2.")
    return warn(
        "The processor, as this system sees it, has no AVX2: the CPU backend is several times slower.",
        m.says(
            "host.cpu_flags", f"{m.host.cpu_model or 'CPU'}: {' '.join(m.host.cpu_flags) or 'no vector extensions'}"
        ),
        remedy="In a virtual machine pass the host's processor through (QEMU: -cpu host; Proxmox: CPU type 'host'); "
        "processors from before 2013 have none",
    )


@check("STR-CPU-QUOTA", "Container CPU quota", needs=("host.cgroup_cpus", "host.cpu_logical"))
def cpu_quota(m: Machine) -> Result | None:
    """Under a CPU quota, threads beyond it only take turns: the whole group is paused in every period."""
    quota, cpus = m.host.cgroup_cpus, m.host.cpu_logical
    if quota is None or cpus is None or quota >= min(cpus, m.host.cpu_usable or cpus):
        return passed("No CPU quota below the processors it may use.")
    return warn(
        f"This process may use {quota:g} of {cpus} processors; more threads than that pause each other.",
        m.says("host.cgroup_cpus", f"CPU quota {quota:g}"),
        remedy=f"OMP_NUM_THREADS={max(int(quota), 1)} strata run ..., or a larger quota: docker run --cpus=N",
    )


@check("STR-CPU-PRIORITY", "Low priority", needs=("host.cpu_priority", "host.io_priority"))
def priority(m: Machine) -> Result | None:
    """A task started at low priority (a scheduled task on Windows, `nice`, `ionice -c3`) reads its model up to 24
    times slower than the same command in a terminal."""
    low = [
        m.says(f"host.{name}", f"{what} priority: low")
        for name, what, value in (
            ("cpu_priority", "CPU", m.host.cpu_priority),
            ("io_priority", "disk", m.host.io_priority),
        )
        if value == "low"
    ]
    if not low:
        return passed("Ordinary priority.")
    return warn(
        "This process runs at low priority: loading can be 20 times slower than in a terminal.",
        *low,
        remedy=m.per_os(
            linux="Start it without nice or ionice, or: sudo renice 0 -p PID; ionice -c2 -n4 -p PID",
            windows="In the Task Scheduler export the task, set <Priority>4</Priority> in the XML and import it",
        ),
    )


@check("STR-CPU-HYBRID", "Efficiency cores", needs=("host.cpu_efficiency", "host.cpu_performance"))
def hybrid(m: Machine) -> Result | None:
    """When performance and efficiency cores share a product, everyone waits for the slowest: 15 workers have been
    slower than 4. Most hybrid processors gain from all their cores all the same, so what decides is the speed at which
    RAM was read with few threads and with all."""
    slow, fast = m.host.cpu_efficiency, m.host.cpu_performance
    if not slow or not fast:
        return passed("All processor cores are alike.")
    kinds = m.says("host.cpu_efficiency", f"{m.host.cpu_model or 'CPU'}: {fast} performance, {slow} efficiency")
    if m.host.os == "darwin":
        return passed("macOS itself puts busy threads on performance cores.", kinds)
    rates = {n: rate for n, rate in m.speed.ram_read_bytes_per_s.items() if n > 0 and 0 < rate < math.inf}
    if len(rates) < 2:
        return unknown("Whether the efficiency cores hold up the others was not measured.", kinds)
    most, best = max(rates), max(rates, key=lambda n: (rates[n], -n))
    measured = m.says(
        "speed.ram_read_bytes_per_s",
        f"RAM is read at {speed(rates[most])} with {counted(most, 'thread')}, {speed(rates[best])} with {best}",
    )
    if rates[most] >= HELD_UP * rates[best]:
        return passed("Some cores are efficiency cores, and they do not hold up the others.", kinds, measured)
    return warn(
        f"{counted(most, 'thread')} read RAM slower than {best} do: efficiency cores hold up the others.",
        kinds,
        measured,
        remedy=m.per_os(
            linux=f"taskset -c 0-{fast - 1} strata run ..."
            if (m.host.machine or "x86_64").lower() in ("x86_64", "amd64")
            else "taskset -c LIST strata run ..., with the fast cores that this lists: lscpu -e=CPU,MAXMHZ",
            windows=f"start /affinity {(1 << min(fast, 64)) - 1:X} strata run ...",
        ),
    )
