"""Where the model file lies: its file system, its disk, the room that is left, and how fast it reads."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from strata.doctor.facts import DiskFacts, ProbeError, ProbeStatus
from strata.doctor.probes.collect import Collector, Unknown
from strata.doctor.probes.file_speed import collect_speed
from strata.doctor.probes.request import ProbeRequest, ProbeStopped

# Disks that a hypervisor makes up, WSL2's among them, call themselves spinning whatever they lie on.
VIRTUAL = re.compile(r"/virtio\d|/vbd-\d")
VIRTUAL_VENDORS = ("Msft", "QEMU", "VMware", "VBOX")


def probe(request: ProbeRequest) -> Iterator[DiskFacts]:
    """Yield where the file lies, then how fast it reads."""
    if request.model is None:
        raise ProbeStopped(ProbeStatus.SKIPPED, ProbeError("no model was given"))
    yield from read_disk(Path(request.model), Path("/"))


def read_disk(path: Path, root: Path) -> Iterator[DiskFacts]:
    """Yield the facts of the file at `path`; the system's files are below `root`."""
    try:
        size = path.stat().st_size
    except OSError as failure:
        error = ProbeError(f"{path} cannot be read: {failure.strerror}", failure.errno, call="stat")
        raise ProbeStopped(ProbeStatus.FAILED, error) from None
    found = Collector()
    found.values |= {"path": str(path), "file_bytes": size}
    found.take_all(("total_bytes", "free_bytes"), lambda: shutil.disk_usage(path)[::2])
    if sys.platform == "win32":
        from strata.doctor.probes import windows_files

        found.take_all(("mount", "device", "filesystem"), lambda: windows_files.volume(path))
        found.take("rotational", lambda: windows_files.is_rotational(path))
    else:
        found.take_all(("mount", "device", "filesystem"), lambda: mount_of(path, root))
        found.take("rotational", lambda: is_rotational(path.stat().st_dev, root))
    yield DiskFacts(**found.fields())
    collect_speed(found, path, size)
    yield DiskFacts(**found.fields())


def mount_of(path: Path, root: Path) -> tuple[str, str, str]:
    """Return the mount point, device and file system that hold `path`, from /proc/self/mountinfo."""
    real = path.resolve()
    best: tuple[str, str, str] | None = None
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount = _unescaped(before.split(" ")[4])
        filesystem, device = after.split(" ")[:2]
        if real.is_relative_to(mount) and (best is None or len(mount) >= len(best[0])):
            best = mount, _unescaped(device), filesystem
    if best is None:
        raise Unknown("no mount holds the path")
    return best


def _unescaped(text: str) -> str:
    """Return a name of mountinfo as it is: there blanks and backslashes are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def is_rotational(device: int, root: Path) -> bool:
    """Return whether the kernel calls the disk with this device number a spinning one."""
    folder = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    if not folder.exists():
        raise Unknown("the file system is not on a block device of its own (overlay, btrfs, network)")
    place = folder.resolve()
    disk = next((each for each in (place, place.parent) if (each / "queue").is_dir()), None)  # a partition's disk
    if disk is None:
        raise Unknown("the block device shows no queue")
    vendor = disk / "device" / "vendor"
    if VIRTUAL.search(str(place)) or (vendor.is_file() and vendor.read_text().strip() in VIRTUAL_VENDORS):
        raise Unknown("a virtual disk does not know what it lies on")
    return (disk / "queue" / "rotational").read_text().strip() == "1"
