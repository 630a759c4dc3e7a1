"""Windows' answers, recorded or built as its documentation lays them out, made into facts."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from strata.doctor.facts import HostFacts, NumaNode
from strata.doctor.probes.collect import Collector, Unknown
from strata.doctor.probes.windows import (
    MemoryStatus,
    Relation,
    collect_host,
    core_kinds,
    dll_folders,
    page_file_managed,
    relations,
)
from tests.doctor.machines import cases

GIB = 1 << 30


def core_record(efficiency: int, mask: int) -> bytes:
    """Return a PROCESSOR_RELATIONSHIP record of one group."""
    return struct.pack("<IIBB20xHQH6x", 0, 48, int(mask.bit_count() > 1), efficiency, 1, mask, 0)


def node_record(node: int, mask: int, group_count: int) -> bytes:
    """Return a NUMA_NODE_RELATIONSHIP record; its group count is 0 before Windows 11."""
    return struct.pack("<III18xHQH6x", 1, 48, node, group_count, mask, 0)


def i5_14600k() -> bytes:
    """Return the records of six performance cores with two threads and eight efficiency cores."""
    fast = (core_record(1, 0b11 << 2 * number) for number in range(6))
    slow = (core_record(0, 1 << 12 + number) for number in range(8))
    return b"".join((*fast, *slow))


class FakeSystem:
    """A PC with Windows 11, 64 GiB and a fixed page file of 8 GiB."""

    values: dict[str, Any] = {  # noqa: RUF012 - never changed
        "ProductName": "Windows 10 Pro",
        "CurrentBuildNumber": "26200",
        "DisplayVersion": "25H2",
        "PagingFiles": ["c:\\pagefile.sys 8192 8192"],
        "ProcessorNameString": "Intel(R) Core(TM) i5-14600K  ",
    }

    def memory(self) -> MemoryStatus:
        return MemoryStatus(64 * GIB, 40 * GIB, 72 * GIB, 30 * GIB)

    def page_file_free_bytes(self) -> int:
        return 6 * GIB

    def registry(self, key: str, name: str) -> Any:
        return self.values[name]

    def version(self) -> str:
        return "10.0.26200"

    def large_page_bytes(self) -> int:
        return 2 << 20

    def priority_class(self) -> int:
        return 0x4000

    def io_priority(self) -> int:
        return 1

    def has_feature(self, number: int) -> bool:
        return number in (38, 40)

    def relations(self, kind: int) -> bytes:
        return i5_14600k() if kind == 0 else node_record(0, (1 << 20) - 1, 0)

    def node_free_bytes(self, node: int) -> int:
        return 39 * GIB


def collect(system: FakeSystem) -> HostFacts:
    found = Collector()
    collect_host(found, system)  # type: ignore[arg-type]
    return HostFacts(**found.fields())


def test_a_whole_pc() -> None:
    facts = collect(FakeSystem())
    assert (facts.os, facts.os_release, facts.kernel) == ("windows", "Windows 11 Pro 25H2 build 26200", "10.0.26200")
    assert (facts.ram_total_bytes, facts.ram_available_bytes) == (64 * GIB, 40 * GIB)
    assert (facts.commit_limit_bytes, facts.commit_used_bytes, facts.swap_total_bytes) == (72 * GIB, 42 * GIB, 8 * GIB)
    assert facts.swap_free_bytes == 6 * GIB
    assert facts.page_file_managed is False
    assert (facts.cpu_physical, facts.cpu_performance, facts.cpu_efficiency) == (14, 12, 8)
    assert facts.cpu_model == "Intel(R) Core(TM) i5-14600K"
    assert facts.cpu_flags == ("avx2", "sse4_2")
    assert facts.numa_nodes == (NumaNode(0, 20, None, 39 * GIB),)
    assert (facts.cpu_priority, facts.io_priority, facts.huge_page_bytes) == ("low", "low", 2 << 20)
    assert facts.memlock_limit_bytes is None
    assert facts.unknown["memlock_limit_bytes"] == "Windows has no such thing"


def test_recorded_machines_with_windows_know_what_the_probes_give_and_nothing_else() -> None:
    given = collect(FakeSystem())
    before = {"python", "machine", "cpu_usable", "cpu_logical"}  # taken on every system alike
    never = set(given.unknown) - before
    machines = {n: c.machine().facts for n, c in cases().items() if c.document["host"]["value"]["os"] == "windows"}
    assert len(machines) >= 12
    for name, facts in machines.items():
        host = facts.host.value
        assert host
        known = {n for n in HostFacts.__struct_fields__ if getattr(host, n) not in (None, {}, ())}
        assert known & never == set(), name
        assert set(host.unknown) >= never, name
        assert all(node.total_bytes is None for node in host.numa_nodes or ()), name
        for adapter in facts.adapters.value.adapters if facts.adapters.value else ():
            assert (adapter.pci_bus_id, adapter.driver, adapter.boot_display) == (None, None, None), name


def test_refused_answers_are_unknown_and_the_rest_goes_on() -> None:
    class Refusing(FakeSystem):
        def memory(self) -> MemoryStatus:
            raise OSError("Windows error 5")

        def registry(self, key: str, name: str) -> Any:
            raise FileNotFoundError(2, "The system cannot find the file specified")

        def io_priority(self) -> int:
            raise Unknown("NtQueryInformationProcess returned 0xC0000022")

    facts = collect(Refusing())
    for name in ("ram_total_bytes", "commit_limit_bytes", "page_file_managed", "os_release", "io_priority"):
        assert getattr(facts, name) is None
        assert facts.unknown[name]
    assert facts.cpu_physical == 14


def test_windows_10_keeps_its_name() -> None:
    class Older(FakeSystem):
        values = FakeSystem.values | {"CurrentBuildNumber": "19045", "DisplayVersion": "22H2"}

    assert collect(Older()).os_release == "Windows 10 Pro 22H2 build 19045"


@pytest.mark.parametrize(
    ("entries", "managed"),
    [
        (["?:\\pagefile.sys"], True),
        (["c:\\pagefile.sys 0 0"], True),
        (["c:\\pagefile.sys 16384 16384"], False),
        (["c:\\pagefile.sys 1000 1000", "d:\\pagefile.sys 0 0"], True),
        ([], False),
    ],
)
def test_page_file(entries: list[str], managed: bool) -> None:
    assert page_file_managed(entries) is managed


def test_records_of_several_groups() -> None:
    first, second = (1 << 64) - 1, 0b1111
    record = struct.pack("<IIBB20xHQH6xQH6x", 0, 64, 0, 0, 2, first, 0, second, 1)
    assert relations(record + core_record(3, 1)) == [Relation(0, 68), Relation(3, 1)]


def test_cores_that_are_all_alike() -> None:
    assert core_kinds([Relation(0, 2)] * 8) == (16, 0)


def test_dll_folders_in_order() -> None:
    folders = [found_by for found_by, _ in dll_folders({"SYSTEMROOT": "W", "PATH": "a"})]
    assert folders == ["System32", "PATH"]
    assert next(iter(dll_folders({"SYSTEMROOT": "W"})))[1] == Path("W") / "System32"
