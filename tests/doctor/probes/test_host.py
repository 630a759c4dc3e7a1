from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from strata.doctor.facts import HostFacts
from strata.doctor.probes import host
from strata.doctor.probes.collect import Collector
from strata.doctor.probes.request import ProbeRequest
from tests.doctor.probes.machine_tree import lay

MIB = 1 << 20


def collect(root: Path, kernel: str = "6.8.0-45-generic", environment: dict[str, str] | None = None) -> HostFacts:
    found = Collector()
    host.collect_linux(found, root, environment or {}, kernel)
    return HostFacts(**found.fields())


def test_this_machine_agrees_with_psutil() -> None:
    (facts,) = host.probe(ProbeRequest())
    assert facts.ram_total_bytes == psutil.virtual_memory().total
    assert facts.ram_available_bytes == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    assert facts.swap_total_bytes == psutil.swap_memory().total
    assert facts.cpu_logical == psutil.cpu_count()
    assert facts.cpu_physical == psutil.cpu_count(logical=False)
    assert facts.cpu_usable == len(psutil.Process().cpu_affinity())
    assert facts.os == sys.platform
    assert facts.kernel == os.uname().release


def test_every_field_is_a_value_or_unknown_with_a_reason() -> None:
    (facts,) = host.probe(ProbeRequest())
    for name in HostFacts.__struct_fields__:
        if name not in ("unknown", "sources"):
            assert (getattr(facts, name) is None) == (name in facts.unknown), name
    assert all(facts.unknown.values())


def test_container_in_wsl_with_a_limit(tmp_path: Path) -> None:
    root = lay(
        tmp_path,
        {
            "dev/dxg": "",
            "dev/kmsg": "4,1,1,-;misc dxg: dxgk: dxgkio_make_resident: Ioctl failed: -12\n",
            ".dockerenv": "",
            "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.1 LTS"\n',
            "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 800 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n",
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: 12th Gen Intel(R)\nflags\t: avx2 fma hypervisor\n\n",
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
            "proc/sys/vm/overcommit_memory": "1\n",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
            "sys/fs/cgroup/memory.max": str(512 * MIB),
            "sys/fs/cgroup/memory.current": str(100 * MIB),
            "sys/fs/cgroup/memory.stat": f"inactive_file {10 * MIB}\nactive_file 0\n",
        },
    )
    facts = collect(root, "6.6.87.2-microsoft-standard-WSL2")
    assert (facts.wsl, facts.container, facts.os_release) == ("wsl2", "docker", "Ubuntu 24.04.1 LTS")
    assert (facts.cgroup_version, facts.cgroup_limit_bytes) == (2, 512 * MIB)
    assert (facts.cgroup_used_bytes, facts.cgroup_reclaimable_bytes) == (100 * MIB, 10 * MIB)
    assert (facts.swap_total_bytes, facts.overcommit_mode) == (0, 1)
    assert facts.unknown["cgroup_cpus"] == "no limit"
    assert facts.device_nodes["/dev/dxg"] is True
    assert facts.device_nodes["/dev/nvidia-uvm"] is False
    assert facts.kernel_log == ("misc dxg: dxgk: dxgkio_make_resident: Ioctl failed: -12",)
    assert facts.numa_nodes is None
    assert facts.unknown["numa_nodes"] == "this kernel shows no memory nodes"


def test_wsl1_has_no_available_memory_and_it_is_not_zero(tmp_path: Path) -> None:
    root = lay(tmp_path, {"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 10 kB\n", "proc/cpuinfo": "processor : 0\n"})
    facts = collect(root, "4.4.0-26100-Microsoft")
    assert facts.wsl == "wsl1"
    assert facts.ram_available_bytes is None
    assert facts.unknown["ram_available_bytes"] == "/proc/meminfo gives no MemAvailable"


def test_bare_root_makes_everything_unknown_and_nothing_zero(tmp_path: Path) -> None:
    facts = collect(lay(tmp_path, {"proc/cpuinfo": ""}))
    for name in ("ram_total_bytes", "swap_total_bytes", "cgroup_limit_bytes", "thp", "cpu_model", "kernel_log"):
        assert getattr(facts, name) is None
        assert facts.unknown[name]


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
from strata.doctor.gather import GatherOptions, gather
host = gather(GatherOptions(groups=("host",))).host.value
print(host.address_space_limit_bytes, host.address_space_used_bytes, psutil.Process().memory_info().vms)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce it")
def test_a_limit_on_address_space_is_that_of_the_process_that_asks() -> None:
    command = [sys.executable, "-c", "import psutil" + LIMITED, str(900 * MIB)]
    limit, used, vms = map(int, subprocess.run(command, capture_output=True, check=True, text=True).stdout.split())
    assert limit == 900 * MIB
    assert 0 < used < limit
    assert used == pytest.approx(vms, rel=0.5)  # not the child's, which ends


def test_no_limit_is_an_answer() -> None:
    (facts,) = host.probe(ProbeRequest())
    unlimited = facts.unknown.get("address_space_limit_bytes") == "no limit"
    assert unlimited == (facts.address_space_limit_bytes is None)


def test_windows_counts_the_processors_of_its_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: [0, 1, 2, 3])
    for count, usable in ((20, 4), (128, 128)):  # `start /affinity F`; with several groups no mask covers all of them
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert host.usable_processors() == usable


@pytest.mark.parametrize(("nice", "name"), [(0, "normal"), (10, "low"), (19, "low"), (-5, "high")])
def test_cpu_priority(nice: int, name: str) -> None:
    assert host.cpu_priority(nice) == name


GARBAGE = ("", "\x00\xff nonsense", "a:b:c:d\n" * 3, "-1", "99999999999999999999999 kB\n", "processor\t: \n\n\n")


@pytest.mark.parametrize("broken", ["gone", "folder", *GARBAGE])
def test_no_file_of_the_system_however_broken_hides_what_the_others_say(tmp_path: Path, broken: str) -> None:
    files = {
        "etc/os-release": 'PRETTY_NAME="Debian"\n',
        "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 800 kB\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU\nflags\t: avx2\n",
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
        "proc/sys/vm/overcommit_memory": "1\n",
        "proc/driver/nvidia/version": "NVRM version: 580.65.06\n",
        "dev/kmsg": "4,1,1,-;NVRM: loading\n",
        "sys/fs/cgroup/cgroup.controllers": "cpu memory",
        "sys/fs/cgroup/cpu.max": "max 100000\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 5 kB\nNode 0 MemFree: 5 kB\n",
        "sys/devices/system/node/node0/cpulist": "0-1",
        "sys/devices/system/cpu/cpu0/topology/thread_siblings_list": "0-1",
        "sys/devices/system/cpu/online": "0-1",
        "sys/devices/cpu/": "",
    }
    whole = collect(lay(tmp_path / "whole", files))
    for number, victim in enumerate(name for name in files if not name.endswith("/")):
        others = {name: text for name, text in files.items() if name != victim}
        replaced = {} if broken == "gone" else {victim + "/": ""} if broken == "folder" else {victim: broken}
        facts = collect(lay(tmp_path / str(number), others | replaced))
        changed = [
            name
            for name in HostFacts.__struct_fields__
            if name not in ("unknown", "sources") and getattr(facts, name) != getattr(whole, name)
        ]
        assert len(changed) <= 9, (victim, changed)  # at most what this file alone tells: nine fields of meminfo
