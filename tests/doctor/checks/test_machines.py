"""Every recorded machine is told what it should be, and every near miss is not."""

import pytest

from strata.doctor.checks.registry import CATALOGUE
from strata.doctor.checks.symptoms import last_words
from strata.doctor.findings import Status
from tests.doctor.machines import FIXTURES, PROBLEMS, Case, cases, findings_of

NEAR_MISSES = [(case, miss) for case in cases().values() for miss in case.expected.near_misses]


@pytest.mark.parametrize("case", cases().values(), ids=list(cases()))
def test_machine_is_told_what_it_should_be(case: Case) -> None:
    found = findings_of(case.machine())
    assert sorted(id for id, f in found.items() if f.status in PROBLEMS) == case.expected.finds
    assert [id for id in case.expected.passes if found[id].status is not Status.PASS] == []


@pytest.mark.parametrize(("case", "miss"), NEAR_MISSES, ids=[f"{c.name}-{m.check}" for c, m in NEAR_MISSES])
def test_near_miss_keeps_silent(case: Case, miss) -> None:
    assert miss.check in case.expected.finds + case.expected.passes
    assert 1 <= len(miss.changes) <= 3  # one fact may be recorded in two places
    found = findings_of(case.machine(miss.changes)).get(miss.check)
    assert found is None or found.status not in (*PROBLEMS, *([Status.PASS] if case.expected.passes else []))


def test_every_machine_is_in_the_table() -> None:
    assert {path.stem for path in (FIXTURES / "machines").glob("*.json")} == set(cases())
    assert len(cases()) >= 40


def test_every_check_has_a_machine_and_a_near_miss() -> None:
    shown = {id for case in cases().values() for id in case.expected.finds + case.expected.passes}
    assert shown == set(CATALOGUE)
    assert {miss.check for _, miss in NEAR_MISSES} == set(CATALOGUE)


def test_no_two_checks_are_triggered_by_the_same_facts() -> None:
    machines = [case.machine() for case in cases().values()]
    machines += [case.machine(miss.changes) for case, miss in NEAR_MISSES]
    triggered: dict[str, set[int]] = {id: set() for id in CATALOGUE}
    for number, machine in enumerate(machines):
        for id, finding in findings_of(machine).items():
            if finding.status in PROBLEMS or id == "STR-GPU-NONE":
                triggered[id].add(number)
    alike = [(a, b) for a in triggered for b in triggered if a < b and triggered[a] == triggered[b]]
    assert alike == []


def test_problems_say_what_to_do_and_where_it_was_seen() -> None:
    for case in cases().values():
        for finding in findings_of(case.machine()).values():
            if finding.status in (Status.WARN, Status.FAIL):
                assert finding.remedy, finding.id
                assert finding.evidence, finding.id
                assert all(e.text and e.source for e in finding.evidence), finding.id
                assert finding.what.endswith("."), finding.id


def test_seed_000_names_the_mismatch_and_both_versions() -> None:
    finding = findings_of(cases()["seed-000-broken-context"].machine())["STR-CTX-BROKEN"]
    for part in ("12.4", "615.78.05", "13.4"):
        assert part in finding.what
    assert any("cudaErrorNoDevice" in e.text for e in finding.evidence)


def test_seed_000_budget_names_the_bytes() -> None:
    finding = findings_of(cases()["seed-000-budget-exhausted"].machine())["STR-WSL-PIN"]
    assert "960 MiB" in finding.what
    assert any("cudaMalloc still works" in e.text for e in finding.evidence)


@pytest.mark.parametrize(
    ("name", "status", "parts"),
    [
        ("seed-002-no-desktop", Status.WARN, ("45 GiB", "12.79 GiB", "497 MiB", "15.64 GiB VRAM free")),
        ("seed-002-desktop-on-card", Status.PASS, ("46.88 GiB", "11.82 GiB", "14.64 GiB VRAM free")),
        ("seed-002-kv-window", Status.PASS, ("46.88 GiB", "10.84 GiB", "15.64 GiB VRAM free")),
    ],
)
def test_seed_002_explains_its_states_by_bytes(name: str, status: Status, parts: tuple[str, ...]) -> None:
    finding = findings_of(cases()[name].machine())["STR-PIN-COUPLED"]
    assert finding.status is status
    text = finding.what + " ".join(e.text for e in finding.evidence)
    assert [part for part in parts if part not in text] == []


def test_seed_002_says_what_the_desktop_takes() -> None:
    finding = findings_of(cases()["seed-002-desktop-on-card"].machine())["STR-VRAM-DISPLAY"]
    assert "1 GiB in use, 14.64 GiB free" in finding.evidence[0].text


@pytest.mark.parametrize(("held_mib", "told"), [(600, False), (4_000, False), (5_000, True)])
def test_what_others_hold_is_judged_by_the_size_of_the_card(held_mib: int, told: bool) -> None:
    """One idle context on a card of 140 GiB takes nothing that a plan would miss."""
    used = (615 + held_mib) << 20
    machine = cases()["h200-measured"].machine({"nvml.value.gpus.0.vram_used_bytes": used})
    assert ("STR-VRAM-OTHERS" in [id for id, f in findings_of(machine).items() if f.status in PROBLEMS]) == told


@pytest.mark.parametrize(
    ("nodes", "status"),
    [
        ([(0, 64, 60), (1, 64, 60)], Status.WARN),
        ([(0, None, 60), (1, None, 60)], Status.WARN),  # Windows gives what is free only
        ([(0, None, 60)], Status.PASS),
        ([(0, 64, 60), (1, 0, 0)], Status.PASS),  # processors only, as some accelerators have
        ([(0, 64, 60), (1, None, None)], Status.UNKNOWN),
    ],
)
def test_memory_nodes_as_each_system_shows_them(
    nodes: list[tuple[int, int | None, int | None]], status: Status
) -> None:
    listed = [{"node": node, "total_bytes": total, "free_bytes": free} for node, total, free in nodes]
    machine = cases()["h200-server"].machine({"host.value.numa_nodes": listed})
    assert findings_of(machine)["STR-CPU-NUMA"].status is status


def test_far_memory_is_no_matter_to_a_plan_that_keeps_every_expert_in_vram() -> None:
    numa = cases()["dual-epyc-numa"].document["host"]["value"]["numa_nodes"]
    case = cases()["8gb-card-no-room"]
    plan = case.machine().plan
    assert plan
    spread = case.machine({"host.value.numa_nodes": numa, "plan.feasible": True})
    assert findings_of(spread)["STR-CPU-NUMA"].status is Status.WARN
    total = {"host.value.numa_nodes": numa, "plan.feasible": True, "plan.experts.slots": plan.experts.total}
    assert findings_of(case.machine(total))["STR-CPU-NUMA"].status is Status.PASS


@pytest.mark.parametrize(
    ("rates", "status"),
    [
        ({"1": 14e9, "4": 52e9, "32": 41e9}, Status.WARN),
        ({"1": 14e9, "4": 52e9, "32": 50e9}, Status.PASS),  # within what varies between two runs
        ({"1": 14e9, "4": 52e9, "32": 68e9}, Status.PASS),
        ({"32": 68e9}, Status.UNKNOWN),  # nothing to compare with
        ({}, Status.UNKNOWN),
    ],
)
def test_efficiency_cores_are_judged_by_what_was_measured(rates: dict[str, float], status: Status) -> None:
    machine = cases()["hybrid-14900k"].machine({"speed.value.ram_read_bytes_per_s": rates})
    assert findings_of(machine)["STR-CPU-HYBRID"].status is status


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("", []),
        ("\n \n", []),
        ("loading\nterminate called\n", ["terminate called"]),
        (
            "noise\nFatal Python error: Segmentation fault\n\nCurrent thread 0x7f (most recent call first):\n"
            '  File "/x/cupy/__init__.py", line 2 in <module>\n  File "<frozen>", line 1 in run\n\n'
            "Extension modules: numpy, msgspec (total: 2)\n",
            ["Fatal Python error: Segmentation fault", 'File "/x/cupy/__init__.py", line 2 in <module>'],
        ),
    ],
)
def test_a_crash_is_told_in_its_own_words(stderr: str, words: list[str]) -> None:
    assert last_words(stderr) == words
