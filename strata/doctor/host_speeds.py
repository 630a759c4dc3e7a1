"""What the host side of a plan runs at: threads, RAM and the model file, as measured or as assumed."""

from __future__ import annotations

from strata.doctor.facts import Facts, HostFacts

_RAM_BYTES_PER_S = 20e9  # two memory channels of a desktop
_FILE_BYTES_PER_S = 0.5e9  # a SATA disk


MOST_THREADS = 4096  # more than any machine has cores


def host_threads(facts: Facts) -> tuple[int, tuple[str, ...]]:
    """Return how many threads compute, one a physical core and no more than this process may use, and notes."""
    host = facts.host.value or HostFacts()
    known = [n for n in (host.cpu_physical, host.cpu_usable, host.cpu_logical) if n]
    if host.cgroup_cpus:
        known.append(max(1, int(host.cgroup_cpus)))
    if not known:
        return 1, ("The number of cores is unknown: one thread computes.",)
    return min(*known, MOST_THREADS), ()


def ram_speed(facts: Facts) -> tuple[float, str]:
    """Return how fast RAM is read, in bytes per second, and how that is known."""
    measured = facts.speed.value
    if measured and measured.ram_read_bytes_per_s:
        ram = max(measured.ram_read_bytes_per_s.values())
        return ram, f"RAM reads at {ram / 1e9:.1f} GB/s, measured."
    return _RAM_BYTES_PER_S, f"RAM reads at {_RAM_BYTES_PER_S / 1e9:.0f} GB/s, assumed."


def file_speed(facts: Facts) -> tuple[float, str]:
    """Return how fast the model file is read, in bytes per second, and how that is known."""
    disk = facts.disk.value
    if disk and disk.read_bytes_per_s:
        return disk.read_bytes_per_s, f"The model file reads at {disk.read_bytes_per_s / 1e9:.2f} GB/s, measured."
    return _FILE_BYTES_PER_S, f"The model file reads at {_FILE_BYTES_PER_S / 1e9:.1f} GB/s, assumed."
