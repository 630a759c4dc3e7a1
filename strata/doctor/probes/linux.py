"""Reads Linux's /proc and /sys below a given root, so that any machine's can be replayed."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

from strata.doctor.facts import NumaNode
from strata.doctor.probes.collect import Unknown

# Instruction sets that decide which kernel of a library runs, and how fast.
_CPU_FLAGS = """
    sse4_2 avx avx2 fma f16c avx_vnni avx512f avx512bw avx512vl avx512_vnni avx512_bf16 avx512_fp16
    amx_tile amx_int8 amx_bf16 asimd asimdhp asimddp bf16 i8mm sve sve2 sme
"""
_DEVICE_NODES = ("dev/nvidiactl", "dev/nvidia0", "dev/nvidia-uvm", "dev/dxg")


def meminfo(root: Path) -> dict[str, int]:
    """Return /proc/meminfo, sizes in bytes and huge page counts as they are; empty where there is none."""
    file = root / "proc/meminfo"
    table = {}
    for line in file.read_text().splitlines() if file.is_file() else ():
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        table[name] = int(number) * (1024 if unit == "kB" else 1)
    return table


def address_space(process: Path) -> int:
    """Return the bytes of address space in use by the process with this folder in /proc, mapped files included."""
    return int((process / "statm").read_text().split()[0]) * mmap.PAGESIZE


def chosen(file: Path) -> str:
    """Return the bracketed word of a sysfs choice such as ``always [madvise] never``."""
    match = re.search(r"\[(\w+)\]", file.read_text())
    if match is None:
        raise Unknown(f"{file.name} shows no choice")
    return match[1]


def cpu_list(text: str) -> int:
    """Return how many processors a list such as ``0-7,16`` names."""
    total = 0
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            total += int(last or first) - int(first) + 1
    return total


def cpuinfo(root: Path) -> list[dict[str, str]]:
    """Return the blocks of /proc/cpuinfo, one per logical processor."""
    blocks = (root / "proc/cpuinfo").read_text().strip().split("\n\n")
    return [
        {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in block.splitlines())}
        for block in blocks
    ]


def cpu_model(blocks: list[dict[str, str]]) -> str:
    """Return the processor's marketing name."""
    for block in blocks:
        if "model name" in block:
            return block["model name"]
    raise Unknown("/proc/cpuinfo names no model (usual on ARM)")


def cpu_flags(blocks: list[dict[str, str]]) -> tuple[str, ...]:
    """Return the instruction sets that every processor has, of those that matter."""
    flags = [set((block.get("flags") or block.get("Features") or "").split()) for block in blocks]
    flags = [found for found in flags if found]
    if not flags:
        raise Unknown("/proc/cpuinfo lists no flags")
    return tuple(sorted(set(_CPU_FLAGS.split()).intersection(*flags)))


def physical_cores(root: Path) -> int:
    """Return how many cores there are, threads of one core counted once."""
    siblings = {
        file.read_text().strip()
        for file in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    }
    if not siblings:
        raise Unknown("/sys/devices/system/cpu shows no topology")
    return len(siblings)


def core_kinds(root: Path) -> tuple[int, int]:
    """Return the logical processors on performance and on efficiency cores.

    Intel's hybrid processors have a counter device for each kind; others have one for all. ARM gives each
    processor a capacity. A virtual machine often shows neither, and then the kinds cannot be known.
    """
    devices = root / "sys/devices"
    if (devices / "cpu_core/cpus").is_file():
        atom = devices / "cpu_atom/cpus"
        return cpu_list((devices / "cpu_core/cpus").read_text()), cpu_list(atom.read_text()) if atom.is_file() else 0
    capacities = [int(file.read_text()) for file in (devices / "system/cpu").glob("cpu[0-9]*/cpu_capacity")]
    if capacities:
        fast = sum(capacity == max(capacities) for capacity in capacities)
        return fast, len(capacities) - fast
    if (devices / "cpu").is_dir():
        return cpu_list((devices / "system/cpu/online").read_text()), 0
    raise Unknown("the system does not show whether all cores are alike (usual in virtual machines)")


def numa_nodes(root: Path) -> tuple[NumaNode, ...]:
    """Return the memory nodes."""
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        memory = {}
        for line in (folder / "meminfo").read_text().splitlines():
            _, _, name, kilobytes = line.split()[:4]
            memory[name] = int(kilobytes) * 1024
        cpus = cpu_list((folder / "cpulist").read_text())
        number = int(folder.name.removeprefix("node"))
        nodes.append(NumaNode(number, cpus, memory.get("MemTotal:"), memory.get("MemFree:")))
    if not nodes:
        raise Unknown("this kernel shows no memory nodes")
    return tuple(sorted(nodes, key=lambda node: node.node))


def release_name(root: Path) -> str:
    """Return the distribution's pretty name."""
    for line in (root / "etc/os-release").read_text().splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip("\"'")
    raise Unknown("/etc/os-release has no PRETTY_NAME")


def device_nodes(root: Path) -> dict[str, bool]:
    """Return the GPU drivers' device files, and whether each exists."""
    return {f"/{node}": (root / node).exists() for node in _DEVICE_NODES}


def nvidia_module_version(root: Path) -> str:
    """Return the version of the NVIDIA kernel module that is loaded."""
    for file in ("sys/module/nvidia/version", "proc/driver/nvidia/version"):
        if (root / file).is_file():
            match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)*)\b", (root / file).read_text())
            if match:
                return match[1]
    raise Unknown("no NVIDIA kernel module is loaded (in WSL there never is one)")
