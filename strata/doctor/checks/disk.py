"""Where the model lies and how fast it can be read."""

from __future__ import annotations

from strata.doctor.checks.check import Result, check, passed, warn
from strata.doctor.checks.machine import Machine
from strata.doctor.units import GIB, size, speed

NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "sshfs", "fuse.sshfs", "davfs", "glusterfs", "ceph", "lustre")
SLOW = 0.6e9  # what a SATA solid-state disk gives at best; NVMe reads several times that
WORTH_SAYING_S = 5  # a model that is read in less is no reason to buy a disk


@check("STR-DISK-SLOW", "Reading the model", needs=("disk.read_bytes_per_s", "disk.read_was_cached"))
def slow(m: Machine) -> Result | None:
    """A load 24 times slower than it should be: a SATA or USB disk, an antivirus program reading along, a virtual disk
    that is throttled. Speeds from the page cache are RAM's and are not judged."""
    rate = m.disk.read_bytes_per_s
    if rate is None or m.disk.read_was_cached is not False or rate >= SLOW:
        return passed("The model can be read fast enough.")
    if m.disk.file_bytes is not None and m.disk.file_bytes / max(rate, 1) < WORTH_SAYING_S:
        return passed("The model is small enough to be read at once.")
    wait = f"; {size(m.disk.file_bytes)} take {m.disk.file_bytes / max(rate, 1):,.0f} s" if m.disk.file_bytes else ""
    return warn(
        f"The model is read at {speed(rate)}{wait}.",
        m.says(
            "disk.read_bytes_per_s", f"{speed(rate)} past the page cache, {m.disk.filesystem or 'file system unknown'}"
        ),
        *([m.says("disk.device", f"on {m.disk.device}")] if m.disk.device else []),
        remedy="Start it at ordinary priority first, then measure again"
        if "low" in (m.host.cpu_priority, m.host.io_priority)
        else m.per_os(
            linux="Move the model to an NVMe disk",
            windows="Move the model to an NVMe disk; exclude its folder in Windows Security, Virus protection settings",
        ),
    )


@check("STR-DISK-SPINNING", "Kind of disk", needs=("disk.rotational",))
def spinning(m: Machine) -> Result | None:
    """A rotational disk reads 0.1 to 0.2 GB/s in order and far less at random, which reading single experts is."""
    if not m.disk.rotational:
        return passed("The model does not lie on a rotational disk.")
    rate = m.disk.read_bytes_per_s
    return warn(
        "The model lies on a rotational disk: loading takes minutes, and experts left in the file are unusably slow.",
        m.says("disk.rotational", f"{m.disk.device or m.disk.mount or 'its disk'} is rotational"),
        *([m.says("disk.read_bytes_per_s", f"read at {speed(rate)}")] if rate else []),
        remedy="Move the model to a solid-state disk",
    )


@check("STR-DISK-NETWORK", "Model on this machine", needs=("disk.filesystem",))
def network(m: Machine) -> Result | None:
    """A model on a network share is read over the network again whenever an expert was dropped from RAM."""
    kind = (m.disk.filesystem or "").lower()
    remote = kind in NETWORK or (m.disk.device or "").startswith(("//", "\\\\"))
    if not remote:
        return passed("The model lies on a disk of this machine.")
    return warn(
        f"The model lies on a network share ({kind or 'network'}).",
        m.says("disk.filesystem", f"{m.disk.path or 'the model'} on {m.disk.device or kind}"),
        remedy="Copy it to a local disk first",
    )


@check("STR-DISK-SPACE", "Free disk space", needs=("disk.free_bytes",))
def space(m: Machine) -> Result | None:
    """With the disk full, nothing can be downloaded, compiled kernels are not kept, and a log ends in the middle."""
    free = m.disk.free_bytes
    if free is None or free >= GIB:
        return passed("There is free space on the disk.")
    return warn(
        f"Only {size(free)} are free on the disk.",
        m.says("disk.free_bytes", f"{m.disk.mount or m.disk.path or 'disk'}: {size(free)} free"),
        remedy="Make room; strata cache clear removes what Strata itself keeps",
    )
