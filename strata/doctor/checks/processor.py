"""The processors: their memory, instructions, quota, priority and kinds of cores."""

from __future__ import annotations

import math

from strata.doctor.checks.check import Result, check, passed, unknown, warn
from strata.doctor.checks.machine import Machine
from strata.doctor.plan import AllocationPlan
from strata.doctor.units import counted, size, speed

HELD_UP = 0.9  # of the best speed with fewer threads: less with all of them is no noise


@check("STR-CPU-NUMA", "Memory of another socket", needs=("host.numa_nodes",))
def numa(m: Machine) -> Result | None:
    """Experts that lie on the other socket's memory are read through the link between sockets: 6.4 instead of 10.1
    tokens per second has been seen. Where a plan keeps every expert in VRAM it is no matter."""
    sizes = {n.node: n.total_bytes if n.total_bytes is not None else n.free_bytes for n in m.host.numa_nodes or ()}
    nodes = {node: nbytes for node, nbytes in sizes.items() if nbytes}  # a node may have processors only
    if len(nodes) < 2:
        if len(sizes) > 1 and None in sizes.values():
            return unknown("How the RAM is spread over the nodes is not known.")
        return passed("All RAM is equally near.")
    says = m.says("host.numa_nodes", ", ".join(f"node {node}: {size(nbytes)}" for node, nbytes in nodes.items()))
    if m.plan and m.plan.feasible and m.plan.device.backend != "numpy" and all_in_vram(m.plan):
        return passed("RAM is spread over several nodes, and the plan keeps every expert in VRAM.", says)
    near = {gpu.numa_node for gpu in m.nvml.gpus if gpu.numa_node is not None}
    home = f"; the GPU is on node {min(near)}" if len(near) == 1 else ""
    return warn(
        f"RAM is spread over {len(nodes)} nodes{home}; experts on a far node are read slower.",
        says,
        remedy="numactl --interleave=all strata run ...",
    )


def all_in_vram(plan: AllocationPlan) -> bool:
    """Say whether no expert of a plan is read from RAM or from the file while it runs."""
    return plan.experts.slots >= plan.experts.total


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
    """Under a CPU quota, threads beyond it only take turns: the whole group is paused in every period. Strata starts no
    more threads than the quota has processors; the others stay idle."""
    quota, cpus = m.host.cgroup_cpus, m.host.cpu_logical
    if quota is None or cpus is None or quota >= min(cpus, m.host.cpu_usable or cpus):
        return passed("No CPU quota below the processors it may use.")
    return warn(
        f"This process may use {quota:g} of {cpus} processors, and computes with no more threads than that.",
        m.says("host.cgroup_cpus", f"CPU quota {quota:g}"),
        remedy="For more, start the container with: docker run --cpus=N (Kubernetes: resources.limits.cpu; systemd: "
        "CPUQuota=)",
    )


@check("STR-CPU-PRIORITY", "Low priority", needs=("host.cpu_priority", "host.io_priority"))
def priority(m: Machine) -> Result | None:
    """A task started at low priority (a scheduled task on Windows, `ionice -c3`) reads its model up to 24 times slower
    than the same command in a terminal. `nice` alone does not: it counts only while others want the processor."""
    low = [
        m.says(f"host.{name}", f"{what} priority: low")
        for name, what, value in (
            ("cpu_priority", "CPU", m.host.cpu_priority),
            ("io_priority", "disk", m.host.io_priority),
        )
        if value == "low" and (name == "io_priority" or m.host.os == "windows")
    ]
    if not low:
        return passed("Ordinary priority.")
    return warn(
        "This process runs at low priority: loading can be 20 times slower than in a terminal.",
        *low,
        remedy=m.per_os(
            linux="Start it without ionice, or: ionice -c2 -n4 -p PID",
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
