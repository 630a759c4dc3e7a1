from __future__ import annotations

from pathlib import Path

import pytest

from strata.doctor.facts import NumaNode
from strata.doctor.probes import linux
from strata.doctor.probes.collect import Unknown
from tests.doctor.probes.machine_tree import lay


@pytest.mark.parametrize(("text", "count"), [("0-7,16", 9), ("0", 1), ("0-3,8-11\n", 8), ("", 0), ("\n", 0)])
def test_cpu_list(text: str, count: int) -> None:
    assert linux.cpu_list(text) == count


def test_meminfo_scales_sizes_but_not_counts(tmp_path: Path) -> None:
    root = lay(tmp_path, {"proc/meminfo": "MemTotal:  24684092 kB\nHugePages_Total:  4\nHugepagesize:  2048 kB\n"})
    assert linux.meminfo(root) == {"MemTotal": 24684092 * 1024, "HugePages_Total": 4, "Hugepagesize": 2 << 20}
    assert linux.meminfo(tmp_path / "nowhere") == {}


def test_chosen_word(tmp_path: Path) -> None:
    root = lay(tmp_path, {"a": "always [madvise] never\n", "b": "nothing"})
    assert linux.chosen(root / "a") == "madvise"
    with pytest.raises(Unknown):
        linux.chosen(root / "b")


def test_core_kinds_of_an_intel_hybrid(tmp_path: Path) -> None:
    root = lay(tmp_path, {"sys/devices/cpu_core/cpus": "0-11\n", "sys/devices/cpu_atom/cpus": "12-19\n"})
    assert linux.core_kinds(root) == (12, 8)


def test_core_kinds_of_an_arm_with_capacities(tmp_path: Path) -> None:
    cpu = "sys/devices/system/cpu/cpu"
    root = lay(tmp_path, {f"{cpu}{n}/cpu_capacity": "1024" if n >= 4 else "446" for n in range(6)})
    assert linux.core_kinds(root) == (2, 4)


def test_core_kinds_when_all_are_alike(tmp_path: Path) -> None:
    root = lay(tmp_path, {"sys/devices/cpu/type": "4", "sys/devices/system/cpu/online": "0-31"})
    assert linux.core_kinds(root) == (32, 0)


def test_core_kinds_in_a_virtual_machine_are_unknown_not_alike(tmp_path: Path) -> None:
    with pytest.raises(Unknown, match="virtual machines"):
        linux.core_kinds(tmp_path)


def test_threads_of_one_core_count_once(tmp_path: Path) -> None:
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = lay(tmp_path, {topology.format(n): f"{n % 4},{n % 4 + 4}" for n in range(8)})
    assert linux.physical_cores(root) == 4


def test_numa_nodes_in_order(tmp_path: Path) -> None:
    node = "sys/devices/system/node/node"
    files = {}
    for number, cpus, total in ((1, "4-7", 100), (0, "0-3", 200), (2, "", 50)):
        files[f"{node}{number}/cpulist"] = cpus
        files[f"{node}{number}/meminfo"] = f"Node {number} MemTotal:  {total} kB\nNode {number} MemFree:  10 kB\n"
    assert linux.numa_nodes(lay(tmp_path, files)) == (
        NumaNode(0, 4, 200 * 1024, 10240),
        NumaNode(1, 4, 100 * 1024, 10240),
        NumaNode(2, 0, 50 * 1024, 10240),  # memory without processors, as on CXL and Grace machines
    )


def test_cpu_flags_are_those_of_every_processor() -> None:
    blocks = [{"flags": "fpu avx2 fma avx512f"}, {"flags": "fpu avx2 fma"}]
    assert linux.cpu_flags(blocks) == ("avx2", "fma")
    assert linux.cpu_flags([{"Features": "fp asimd i8mm"}]) == ("asimd", "i8mm")
    with pytest.raises(Unknown):
        linux.cpu_flags([{"processor": "0"}])


def test_cpu_model() -> None:
    assert linux.cpu_model([{"processor": "0"}, {"model name": "AMD Ryzen 9"}]) == "AMD Ryzen 9"
    with pytest.raises(Unknown, match="ARM"):
        linux.cpu_model([{"processor": "0", "CPU implementer": "0x41"}])


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("sys/module/nvidia/version", "580.65.06\n", "580.65.06"),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\nGCC version: 13.3.0",
            "570.133.20",
        ),
    ],
)
def test_kernel_module_version(tmp_path: Path, file: str, text: str, version: str) -> None:
    assert linux.nvidia_module_version(lay(tmp_path, {file: text})) == version


def test_no_kernel_module(tmp_path: Path) -> None:
    with pytest.raises(Unknown, match="WSL"):
        linux.nvidia_module_version(tmp_path)
