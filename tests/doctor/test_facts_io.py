from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from strata.doctor.facts import Facts, HostFacts, Probe, ProbeError, ProbeStatus, SpeedFacts
from strata.doctor.facts_io import read_facts, write_facts
from strata.errors import UsageError

SKIPPED = Probe(status=ProbeStatus.SKIPPED, error=ProbeError("not asked for"))
FACTS = Facts(
    strata_version="1.2.3",
    taken_at="2026-01-02T03:04:05+00:00",
    host=Probe(status=ProbeStatus.OK, value=HostFacts(os="linux", unknown={"thp": "why"}), seconds=0.5),
    nvml=SKIPPED,
    cuda=SKIPPED,
    pinned=SKIPPED,
    disk=SKIPPED,
    speed=Probe(status=ProbeStatus.OK, value=SpeedFacts(ram_read_bytes_per_s={1: 1e10, 16: 5e10})),
)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    write_facts(FACTS, path)
    assert read_facts(path) == FACTS
    assert json.loads(path.read_text())["schema_version"] == 1


def test_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.mkdir()  # cannot be replaced by a file
    with pytest.raises(UsageError, match="write facts"):
        write_facts(FACTS, path)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UsageError, match="No such file"):
        write_facts(FACTS, tmp_path / "nowhere" / "facts.json")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "it is not JSON"),
        ("{", "it is not JSON"),
        ("[1]", "not a record of facts"),
        ("{}", "not a record of facts"),
        ('{"schema_version": 99}', "schema version 99, this Strata reads 1"),
        ('{"schema_version": 1}', "not a record of facts"),
        ('{"schema_version": 1, "host": {"status": "splendid"}}', "not a record of facts"),
        ('{"schema_version": 1, "host": ' + '{"value":' * 100_000, "recursion"),
        ("[" * 200_000, "not a record of facts"),
        ('{"schema_version": ' + "1" * 6000 + "}", "it is "),
    ],
)
def test_other_files_are_refused_with_the_reason(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "facts.json"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        read_facts(path)
    assert found in refused.value.found
    assert str(path) in refused.value.asked
    assert refused.value.remedy


@pytest.mark.parametrize("number", [10**400, -(10**30), 1 << 64])
def test_a_number_that_nothing_can_count_is_refused(tmp_path: Path, number: int) -> None:
    path = tmp_path / "facts.json"
    document = msgspec.to_builtins(FACTS, str_keys=True)
    document["host"]["value"]["numa_nodes"] = [{"node": 0, "total_bytes": number}]
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="more than 64 bits"):
        read_facts(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_facts(tmp_path / "none.json")


def test_a_file_without_end_is_refused(tmp_path: Path) -> None:
    endless = tmp_path / "facts.json"
    with endless.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(UsageError, match="larger than 16 MiB"):
        read_facts(endless)


@pytest.mark.parametrize(
    ("group", "field", "value"),
    [
        ("host", "ram_available_bytes", -1),
        ("host", "swap_free_bytes", -(1 << 62)),
        ("host", "cpu_physical", -8),
        ("speed", "device_copy_bytes_per_s", -0.5),
        ("speed", "ram_read_bytes_per_s", {"4": -1.0}),
    ],
)
def test_sizes_and_speeds_below_zero_are_refused(tmp_path: Path, group: str, field: str, value: object) -> None:
    path = tmp_path / "facts.json"
    write_facts(FACTS, path)
    document = json.loads(path.read_text())
    document[group]["value"][field] = value
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=f"{field} is -.*, less than 0"):
        read_facts(path)
