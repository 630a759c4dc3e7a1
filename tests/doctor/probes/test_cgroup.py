from __future__ import annotations

from pathlib import Path

import pytest

from strata.doctor.probes.cgroup import MemoryLimit, cpu_quota, find_hierarchy, memory_limit
from strata.doctor.probes.collect import Unknown
from tests.doctor.probes.machine_tree import lay

GIB = 1 << 30
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_UNLIMITED = str(0x7FFFFFFFFFFFF000)


def v2_group(limit: str, used: int, stat: str = "anon 5\n", high: str = "max") -> dict[str, str]:
    return {"memory.max": limit, "memory.high": high, "memory.current": str(used), "memory.stat": stat}


def v2_machine(root: Path, group: str, groups: dict[str, dict[str, str]], controllers: str = "cpu memory") -> Path:
    files = {
        "proc/self/cgroup": f"0::{group}\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/cgroup.controllers": controllers,
    }
    for name, values in groups.items():
        files |= {f"sys/fs/cgroup{name}/{file}": text for file, text in values.items()}
    return lay(root, files)


def test_v2_without_a_limit(tmp_path: Path) -> None:
    root = v2_machine(tmp_path, "/user.slice", {"/user.slice": v2_group("max", GIB)})
    hierarchy = find_hierarchy(root, "memory")
    assert hierarchy.version == 2
    with pytest.raises(Unknown, match=r"^no limit$"):
        memory_limit(hierarchy)


def test_v2_in_a_container_whose_group_is_the_mount(tmp_path: Path) -> None:
    stat = f"anon {GIB}\nfile {3 * GIB}\nshmem {GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}\n"
    root = v2_machine(tmp_path, "/", {"": v2_group(str(8 * GIB), 4 * GIB, stat)})
    assert memory_limit(find_hierarchy(root, "memory")) == MemoryLimit(8 * GIB, 4 * GIB, 3 * GIB // 2)


def test_v2_ancestor_with_the_least_room_binds(tmp_path: Path) -> None:
    groups = {
        "/pod": v2_group(str(16 * GIB), 15 * GIB),  # its other children use most of it
        "/pod/box": v2_group(str(8 * GIB), 2 * GIB),
        "/pod/box/job": v2_group("max", GIB),
    }
    root = v2_machine(tmp_path, "/pod/box/job", groups)
    assert memory_limit(find_hierarchy(root, "memory")) == MemoryLimit(16 * GIB, 15 * GIB, 0)


def test_v2_high_is_a_limit_too(tmp_path: Path) -> None:
    root = v2_machine(tmp_path, "/a", {"/a": v2_group(str(8 * GIB), GIB, high=str(6 * GIB))})
    assert memory_limit(find_hierarchy(root, "memory")).limit == 6 * GIB


def test_v1_group_named_by_the_host_and_mounted_as_the_root(tmp_path: Path) -> None:
    """Docker with version 1: /proc/self/cgroup has the host's name, the mount starts at the group itself."""
    root = lay(
        tmp_path,
        {
            "proc/self/cgroup": "11:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/docker/abc\n",
            "proc/self/mountinfo": (
                "40 30 0:40 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
                "41 30 0:41 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
            ),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(3 * GIB),
            "sys/fs/cgroup/memory/memory.stat": f"cache 9\ntotal_inactive_file {GIB}\ntotal_active_file 7\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
    )
    hierarchy = find_hierarchy(root, "memory")
    assert hierarchy.version == 1
    assert memory_limit(hierarchy) == MemoryLimit(4 * GIB, 3 * GIB, GIB + 7)
    assert cpu_quota(find_hierarchy(root, "cpu")) == 1.5


def test_v1_nested_limits_and_the_largest_number_as_none(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "4:memory:/outer/inner\n0::/\n",
        "proc/self/mountinfo": (
            "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        ),
    }
    for group, limit in (("", V1_UNLIMITED), ("/outer", str(2 * GIB)), ("/outer/inner", V1_UNLIMITED)):
        files |= {
            f"{base}{group}/memory.limit_in_bytes": limit,
            f"{base}{group}/memory.usage_in_bytes": str(GIB),
            f"{base}{group}/memory.stat": "total_rss 1\n",
        }
    assert memory_limit(find_hierarchy(lay(tmp_path, files), "memory")) == MemoryLimit(2 * GIB, GIB, 0)


def test_v2_group_outside_the_mounted_part_counts_as_the_mount(tmp_path: Path) -> None:
    root = v2_machine(tmp_path, "/../../other", {"": v2_group(str(GIB), 5)})
    assert memory_limit(find_hierarchy(root, "memory")).limit == GIB


def test_v2_cpu_quota_of_an_ancestor(tmp_path: Path) -> None:
    root = v2_machine(tmp_path, "/a/b", {"/a": {"cpu.max": "250000 100000\n"}, "/a/b": {"cpu.max": "max 100000\n"}})
    assert cpu_quota(find_hierarchy(root, "cpu")) == 2.5


def test_controller_that_is_not_mounted(tmp_path: Path) -> None:
    root = v2_machine(tmp_path, "/a", {"/a": {}}, controllers="cpuset")
    with pytest.raises(Unknown, match="memory controller"):
        find_hierarchy(root, "memory")
