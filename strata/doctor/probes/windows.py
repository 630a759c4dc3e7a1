"""What Windows says of its memory, page file, processors and libraries.

`System` asks the real one through ctypes and the registry; everything that makes facts of its answers takes a
`System`, so that recorded answers can be replayed on any machine.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from strata.doctor.facts import HostFacts, NumaNode
from strata.doctor.probes.collect import Collector, Unknown

_MEMORY_KEY = r"SYSTEM\CurrentControlSet\Control\Session Manager\Memory Management"
_VERSION_KEY = r"SOFTWARE\Microsoft\Windows NT\CurrentVersion"
_CPU_KEY = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
_FIRST_WINDOWS_11_BUILD = 22000  # its registry still says "Windows 10"
_PRIORITIES = {0x40: "low", 0x4000: "low", 0x20: "normal", 0x8000: "high", 0x80: "high", 0x100: "high"}
_IO_PRIORITIES = {0: "low", 1: "low", 2: "normal", 3: "high", 4: "high"}
_CPU_FEATURES = {38: "sse4_2", 39: "avx", 40: "avx2", 41: "avx512f"}  # PF_*_INSTRUCTIONS_AVAILABLE
_CORES, _NODES = 0, 1  # RelationProcessorCore, RelationNumaNode
_PROCESS_IO_PRIORITY = 33


class MemoryStatus(NamedTuple):
    """Bytes, as GlobalMemoryStatusEx gives them."""

    total: int
    available: int
    commit_limit: int
    commit_available: int


class Relation(NamedTuple):
    """A core or memory node: its efficiency class or node number, and its logical processors."""

    number: int
    processors: int


class _MemoryStatusEx(ctypes.Structure):
    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("commit_limit", ctypes.c_uint64),
        ("commit_available", ctypes.c_uint64),
        ("virtual_total", ctypes.c_uint64),
        ("virtual_available", ctypes.c_uint64),
        ("virtual_extended", ctypes.c_uint64),
    )


class System:
    """The Windows that this process runs on."""

    def __init__(self) -> None:
        self._kernel32 = ctypes.CDLL("kernel32", use_last_error=True)
        self._kernel32.GetCurrentProcess.restype = ctypes.c_void_p
        self._kernel32.GetLargePageMinimum.restype = ctypes.c_size_t

    def memory(self) -> MemoryStatus:
        """Return the memory and the commit charge."""
        status = _MemoryStatusEx(length=ctypes.sizeof(_MemoryStatusEx))
        self._check(self._kernel32.GlobalMemoryStatusEx(ctypes.byref(status)))
        return MemoryStatus(status.total, status.available, status.commit_limit, status.commit_available)

    def page_file_free_bytes(self) -> int:
        """Return how much of the page file is not in use, which Windows only tells as a performance counter."""
        import psutil

        return int(psutil.swap_memory().free)

    def registry(self, key: str, name: str) -> Any:
        """Return a value below HKEY_LOCAL_MACHINE."""
        winreg: Any = importlib.import_module("winreg")
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, key) as opened:
            return winreg.QueryValueEx(opened, name)[0]

    def version(self) -> str:
        """Return the kernel's version, such as ``10.0.26200``."""
        return platform.version()

    def large_page_bytes(self) -> int:
        """Return the size of a large page; 0 when the processor has none."""
        return int(self._kernel32.GetLargePageMinimum())

    def priority_class(self) -> int:
        """Return this process's priority class."""
        process = ctypes.c_void_p(self._kernel32.GetCurrentProcess())
        return int(self._check(self._kernel32.GetPriorityClass(process)))

    def io_priority(self) -> int:
        """Return this process's I/O priority."""
        value = ctypes.c_uint32()
        process = ctypes.c_void_p(self._kernel32.GetCurrentProcess())
        query = ctypes.CDLL("ntdll").NtQueryInformationProcess
        status = query(process, _PROCESS_IO_PRIORITY, ctypes.byref(value), ctypes.sizeof(value), None)
        if status != 0:
            raise Unknown(f"NtQueryInformationProcess returned 0x{status & 0xFFFFFFFF:08X}")
        return value.value

    def has_feature(self, number: int) -> bool:
        """Return whether the processor has a feature (PF_*)."""
        return bool(self._kernel32.IsProcessorFeaturePresent(number))

    def relations(self, kind: int) -> bytes:
        """Return the records of GetLogicalProcessorInformationEx for cores or memory nodes."""
        length = ctypes.c_uint32()
        self._kernel32.GetLogicalProcessorInformationEx(kind, None, ctypes.byref(length))
        buffer = ctypes.create_string_buffer(length.value)
        self._check(self._kernel32.GetLogicalProcessorInformationEx(kind, buffer, ctypes.byref(length)))
        return buffer.raw[: length.value]

    def node_free_bytes(self, node: int) -> int:
        """Return the free memory of a memory node."""
        free = ctypes.c_uint64()
        self._check(self._kernel32.GetNumaAvailableMemoryNodeEx(ctypes.c_uint16(node), ctypes.byref(free)))
        return free.value

    def _check(self, result: int) -> int:
        if not result:
            raise OSError(f"Windows error {ctypes.get_last_error()}")  # type: ignore[attr-defined]
        return result


def collect_host(found: Collector, system: System) -> None:
    """Collect the host's facts from `system`; those that only Linux has are unknown for that reason."""
    found.values |= {"os": "windows", "wsl": "none", "container": "none"}
    found.take("kernel", system.version)
    found.take("os_release", lambda: release_name(system), "registry, CurrentVersion")
    names = ("ram_total_bytes", "ram_available_bytes", "commit_limit_bytes", "commit_used_bytes", "swap_total_bytes")
    found.take_all(names, lambda: _memory(system.memory()), "GlobalMemoryStatusEx")
    found.take("swap_free_bytes", system.page_file_free_bytes, "page file's usage counter")
    found.take(
        "page_file_managed",
        lambda: page_file_managed(system.registry(_MEMORY_KEY, "PagingFiles")),
        "registry, PagingFiles",
    )
    found.take("huge_page_bytes", system.large_page_bytes, "GetLargePageMinimum")
    found.take("cpu_model", lambda: system.registry(_CPU_KEY, "ProcessorNameString").strip(), "registry")
    found.take("cpu_flags", lambda: tuple(sorted(name for n, name in _CPU_FEATURES.items() if system.has_feature(n))))
    found.take("cpu_physical", lambda: len(relations(system.relations(_CORES))), "GetLogicalProcessorInformationEx")
    kinds = ("cpu_performance", "cpu_efficiency")
    found.take_all(kinds, lambda: core_kinds(relations(system.relations(_CORES))), "GetLogicalProcessorInformationEx")
    found.take("numa_nodes", lambda: _numa_nodes(system), "GetLogicalProcessorInformationEx")
    found.take("cpu_priority", lambda: _PRIORITIES[system.priority_class()], "GetPriorityClass")
    found.take("io_priority", lambda: _IO_PRIORITIES[system.io_priority()], "NtQueryInformationProcess")
    for name in HostFacts.__struct_fields__:
        if name not in found.values and name not in ("unknown", "sources"):
            found.unknown.setdefault(name, "Windows has no such thing")


def _memory(status: MemoryStatus) -> tuple[int, int, int, int, int]:
    used = status.commit_limit - status.commit_available
    return status.total, status.available, status.commit_limit, used, max(status.commit_limit - status.total, 0)


def release_name(system: System) -> str:
    """Return the edition with its feature update and build."""
    name = str(system.registry(_VERSION_KEY, "ProductName"))
    build = int(system.registry(_VERSION_KEY, "CurrentBuildNumber"))
    if build >= _FIRST_WINDOWS_11_BUILD:
        name = name.replace("Windows 10", "Windows 11")
    return f"{name} {system.registry(_VERSION_KEY, 'DisplayVersion')} build {build}"


def page_file_managed(entries: list[str]) -> bool:
    """Return whether Windows sizes the page file itself.

    Parameters
    ----------
    entries : list of str
        The registry's ``PagingFiles``: ``?:\\pagefile.sys`` or sizes ``0 0`` leave the size to Windows, other
        sizes (MiB) fix it, and an empty list means that there is no page file.
    """
    return any(entry.startswith("?:") or entry.endswith(" 0 0") for entry in entries)


def relations(records: bytes) -> list[Relation]:
    """Decode SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX records of cores or memory nodes."""
    decoded = []
    while records:
        kind, size = struct.unpack_from("<II", records)
        number = records[9] if kind == _CORES else struct.unpack_from("<I", records, 8)[0]
        groups = max(struct.unpack_from("<H", records, 30)[0], 1)  # 0 in a node's record before Windows 11
        masks = (struct.unpack_from("<Q", records, 32 + 16 * group)[0] for group in range(groups))
        decoded.append(Relation(number, sum(mask.bit_count() for mask in masks)))
        records = records[size:]
    return decoded


def core_kinds(cores: list[Relation]) -> tuple[int, int]:
    """Return the logical processors on performance and on efficiency cores: the highest class performs best."""
    best = max(core.number for core in cores)
    fast = sum(core.processors for core in cores if core.number == best)
    return fast, sum(core.processors for core in cores) - fast


def _numa_nodes(system: System) -> tuple[NumaNode, ...]:
    return tuple(
        NumaNode(node=node.number, cpus=node.processors, free_bytes=system.node_free_bytes(node.number))
        for node in relations(system.relations(_NODES))
    )


def dll_folders(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield the folders in which a driver's DLL is looked for, in order."""
    windows = environment.get("SYSTEMROOT", r"C:\Windows")
    yield "System32", Path(windows) / "System32"
    for folder in environment.get("PATH", "").split(os.pathsep):
        if folder:
            yield "PATH", Path(folder)


def loaded_dll(name: str) -> str:
    """Return the path of a DLL that this process has loaded."""
    kernel32 = ctypes.CDLL("kernel32")
    kernel32.GetModuleHandleW.restype = ctypes.c_void_p
    handle = kernel32.GetModuleHandleW(ctypes.c_wchar_p(name))
    if not handle:
        raise Unknown(f"{name} is not loaded")
    path = ctypes.create_unicode_buffer(32768)
    kernel32.GetModuleFileNameW(ctypes.c_void_p(handle), path, len(path))
    return path.value
