"""The memory and CPU limits of the control groups that hold this process, of version 1 and 2.

Limits nest: the one that binds is the ancestor with the least room, not the group that is nearest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from strata.doctor.probes.collect import Unknown

_V1_UNLIMITED = 1 << 62  # version 1 writes "no limit" as the largest multiple of a page
NO_LIMIT = "no limit"


class MemoryLimit(NamedTuple):
    """One group's memory, in bytes. It may still take ``limit - used + reclaimable``."""

    limit: int
    used: int
    reclaimable: int


@dataclass(frozen=True)
class Hierarchy:
    """The mount of one controller, and where in it this process is."""

    version: int
    mount: Path
    group: Path

    def groups(self) -> Iterator[Path]:
        """Yield this process's group and its ancestors, as far as they can be seen from here."""
        yield self.group
        for parent in self.group.parents:
            if not parent.is_relative_to(self.mount):
                return
            yield parent


def find_hierarchy(root: Path, controller: str) -> Hierarchy:
    """Return the hierarchy that has `controller` ("memory" or "cpu") for this process.

    Raises
    ------
    Unknown
        When no hierarchy with this controller is mounted.
    """
    groups: dict[str, str] = {}  # controller -> group; version 2 under ""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), group))
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        mounted_group, mount_point = before.split(" ")[3:5]
        mount = root / mount_point.lstrip("/")
        if kind == "cgroup" and controller in options.split(",") and controller in groups:
            return Hierarchy(1, mount, _inside(mount, mounted_group, groups[controller]))
        if kind == "cgroup2" and controller not in groups and "" in groups:
            group_path = _inside(mount, mounted_group, groups[""])
            if controller in _controllers(mount):
                return Hierarchy(2, mount, group_path)
    raise Unknown(f"no control group with a {controller} controller is mounted")


def _inside(mount: Path, mounted_group: str, group: str) -> Path:
    """Return the group's folder. In a container the mount often starts at the group itself, whatever its name."""
    relative = group.removeprefix(mounted_group.rstrip("/")) if group.startswith(mounted_group) else group
    path = mount / relative.lstrip("/")
    return path if path.is_dir() and ".." not in Path(relative).parts else mount


def _controllers(mount: Path) -> list[str]:
    return (mount / "cgroup.controllers").read_text().split()


def memory_limit(hierarchy: Hierarchy) -> MemoryLimit:
    """Return the limit that binds: that of the group or ancestor with the least room.

    Raises
    ------
    Unknown
        ``NO_LIMIT`` when none of them has one.
    """
    read = _memory_v1 if hierarchy.version == 1 else _memory_v2
    limits = [limit for group in hierarchy.groups() if (limit := read(group)) is not None]
    if not limits:
        raise Unknown(NO_LIMIT)
    return min(limits, key=lambda found: found.limit - found.used + found.reclaimable)


def _memory_v1(group: Path) -> MemoryLimit | None:
    limit = int((group / "memory.limit_in_bytes").read_text())
    if limit >= _V1_UNLIMITED:
        return None
    stat = _table(group / "memory.stat")
    cache = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
    used = int((group / "memory.usage_in_bytes").read_text())
    return MemoryLimit(limit, used, cache)


def _memory_v2(group: Path) -> MemoryLimit | None:
    limits = {}
    for name in ("memory.max", "memory.high"):  # above "high" a process is slowed to a crawl: as good as a limit
        file = group / name  # the top of the hierarchy has neither
        if file.is_file() and (text := file.read_text().strip()) != "max":
            limits[name] = int(text)
    if not limits:
        return None
    name = min(limits, key=lambda name: limits[name])
    stat = _table(group / "memory.stat")
    cache = stat.get("inactive_file", 0) + stat.get("active_file", 0)
    return MemoryLimit(limits[name], int((group / "memory.current").read_text()), cache)


def cpu_quota(hierarchy: Hierarchy) -> float:
    """Return how many processors' time the group may use: the smallest quota among it and its ancestors.

    Raises
    ------
    Unknown
        ``NO_LIMIT`` when none of them has a quota.
    """
    quotas = []
    for group in hierarchy.groups():
        if hierarchy.version == 1:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
            unlimited = quota == "-1"
        elif (group / "cpu.max").is_file():
            quota, period = (group / "cpu.max").read_text().split()
            unlimited = quota == "max"
        else:
            continue
        if not unlimited:
            quotas.append(int(quota) / int(period))
    if not quotas:
        raise Unknown(NO_LIMIT)
    return min(quotas)


def _table(file: Path) -> dict[str, int]:
    """Read a file of ``name number`` lines."""
    return {name: int(number) for name, number in (line.split() for line in file.read_text().splitlines())}
