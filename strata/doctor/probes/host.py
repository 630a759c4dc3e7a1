"""The machine and its system: memory and its limits, processors, WSL, containers, what the kernel said."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from strata.doctor.facts import HostFacts
from strata.doctor.probes import cgroup, linux, wsl
from strata.doctor.probes.collect import Collector, Unknown
from strata.doctor.probes.kernel_log import kernel_log
from strata.doctor.probes.request import ProbeRequest

WINDOWS_GROUP = 64  # logical processors of one group, which is what an affinity mask covers
_CGROUP_MEMORY = ("cgroup_limit_bytes", "cgroup_used_bytes", "cgroup_reclaimable_bytes")


def probe(request: ProbeRequest) -> Iterator[HostFacts]:
    """Yield this machine's facts."""
    found = Collector()
    found.take("python", platform.python_version)
    found.take("machine", platform.machine)
    found.take("cpu_usable", usable_processors)
    found.take("cpu_logical", lambda: _known(os.cpu_count()))
    if sys.platform == "win32":
        from strata.doctor.probes import windows

        windows.collect_host(found, windows.System())
    elif sys.platform == "linux":
        collect_linux(found, Path("/"), os.environ, platform.release())
        found.take("memlock_limit_bytes", lambda: limit("RLIMIT_MEMLOCK"), "RLIMIT_MEMLOCK")
        found.take("address_space_limit_bytes", lambda: limit("RLIMIT_AS"), "RLIMIT_AS")
        asker = Path(f"/proc/{os.getppid()}")  # this child is gone when memory is taken
        found.take("address_space_used_bytes", lambda: linux.address_space(asker), "/proc/PID/statm of Strata itself")
        found.take("cpu_priority", lambda: cpu_priority(os.getpriority(os.PRIO_PROCESS, 0)), "nice")
        found.take("io_priority", io_priority, "ioprio_get")
    else:
        collect_other(found)
    yield HostFacts(**found.fields())


def collect_linux(found: Collector, root: Path, environment: Mapping[str, str], kernel: str) -> None:
    """Collect what Linux shows in files below `root`."""
    signals = wsl.wsl_signals(root, environment, kernel)
    found.values |= {"os": "linux", "kernel": kernel, "wsl_signals": signals, "wsl": wsl.wsl_version(signals, kernel)}
    found.values["device_nodes"] = linux.device_nodes(root)
    found.take("os_release", lambda: linux.release_name(root), "/etc/os-release")
    found.take("container", lambda: wsl.container_kind(root, environment))
    found.take("nvidia_module_version", lambda: linux.nvidia_module_version(root))
    found.take("kernel_log", lambda: kernel_log(root / "dev/kmsg"), "/dev/kmsg")
    _collect_memory(found, root)
    _collect_cgroup(found, root)
    _collect_processors(found, root)
    found.unknown["page_file_managed"] = "only Windows has a page file of this kind"


def _collect_memory(found: Collector, root: Path) -> None:
    try:
        table, missing = linux.meminfo(root), "/proc/meminfo gives no "
    except (OSError, ValueError) as failure:
        table, missing = {}, f"/proc/meminfo cannot be read ({failure}): no "
    for name, key in (
        ("ram_total_bytes", "MemTotal"),
        ("ram_available_bytes", "MemAvailable"),  # missing on WSL 1
        ("swap_total_bytes", "SwapTotal"),
        ("swap_free_bytes", "SwapFree"),
        ("commit_limit_bytes", "CommitLimit"),
        ("commit_used_bytes", "Committed_AS"),
        ("huge_page_bytes", "Hugepagesize"),
        ("huge_pages_total", "HugePages_Total"),
        ("huge_pages_free", "HugePages_Free"),
    ):
        if key in table:
            found.values[name] = table[key]
            found.sources[name] = f"/proc/meminfo {key}"
        else:
            found.unknown[name] = missing + key
    found.take("thp", lambda: linux.chosen(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    found.take("overcommit_mode", lambda: int((root / "proc/sys/vm/overcommit_memory").read_text()))
    found.take("numa_nodes", lambda: linux.numa_nodes(root), "/sys/devices/system/node")


def _collect_cgroup(found: Collector, root: Path) -> None:
    try:
        memory = cgroup.find_hierarchy(root, "memory")
    except (Unknown, OSError, ValueError) as reason:
        found.unknown.update(dict.fromkeys((*_CGROUP_MEMORY, "cgroup_version"), str(reason)))
    else:
        found.values["cgroup_version"] = memory.version
        found.take_all(_CGROUP_MEMORY, lambda: cgroup.memory_limit(memory))
    found.take("cgroup_cpus", lambda: cgroup.cpu_quota(cgroup.find_hierarchy(root, "cpu")))


def _collect_processors(found: Collector, root: Path) -> None:
    found.take("cpu_model", lambda: linux.cpu_model(linux.cpuinfo(root)), "/proc/cpuinfo")
    found.take("cpu_flags", lambda: linux.cpu_flags(linux.cpuinfo(root)), "/proc/cpuinfo")
    found.take("cpu_physical", lambda: linux.physical_cores(root), "/sys/devices/system/cpu")
    found.take_all(("cpu_performance", "cpu_efficiency"), lambda: linux.core_kinds(root), "/sys/devices")


def collect_other(found: Collector) -> None:
    """Collect what psutil knows of a system that has no module of its own here (macOS, BSD)."""
    import psutil

    found.values |= {"os": sys.platform, "kernel": platform.release(), "wsl": "none", "container": "none"}
    found.take("os_release", platform.platform)
    found.take("cpu_physical", lambda: _known(psutil.cpu_count(logical=False)), "psutil")
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    found.values |= {"ram_total_bytes": memory.total, "ram_available_bytes": memory.available}
    found.values |= {"swap_total_bytes": swap.total, "swap_free_bytes": swap.free}
    for name in HostFacts.__struct_fields__:
        if name not in found.values:
            found.unknown.setdefault(name, f"not read on {sys.platform}")


def usable_processors() -> int:
    """Return how many logical processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    count = _known(os.cpu_count())
    if sys.platform == "win32" and count <= WINDOWS_GROUP:  # what `start /affinity` set; with more groups it is unclear
        import psutil

        return min(count, len(psutil.Process().cpu_affinity()))
    return count


def limit(name: str) -> int:
    """Return one of this process's soft limits, such as ``RLIMIT_AS``, in bytes."""
    import resource

    soft, _ = resource.getrlimit(getattr(resource, name))
    if soft == resource.RLIM_INFINITY:
        raise Unknown(cgroup.NO_LIMIT)
    return int(soft)


def cpu_priority(nice: int) -> str:
    """Return the name of a Unix niceness."""
    return "normal" if nice == 0 else "low" if nice > 0 else "high"


def io_priority() -> str:
    """Return "low", "normal" or "high" for this process's I/O class."""
    import psutil

    try:
        priority = psutil.Process().ionice()
    except psutil.Error as failure:  # no /proc
        raise Unknown(str(failure)) from None
    if priority.ioclass == psutil.IOPRIO_CLASS_IDLE:
        return "low"
    if priority.ioclass == psutil.IOPRIO_CLASS_RT:
        return "high"
    return "normal"


def _known(value: int | None) -> int:
    if value is None:
        raise Unknown("the system does not say")
    return value
