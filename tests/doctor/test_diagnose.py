"""The verdict, its exit code, and which checks run."""

import msgspec
import pytest

from strata.doctor.checks.check import check, passed
from strata.doctor.checks.machine import Machine
from strata.doctor.checks.registry import CATALOGUE, find_check, run_checks
from strata.doctor.diagnose import diagnose, verdict
from strata.doctor.facts import Probe, ProbeError, ProbeStatus
from strata.doctor.findings import Finding, Outcome, Status
from strata.errors import UsageError
from tests.doctor.machines import cases


def finding(status: Status, id: str = "STR-RAM-SWAP") -> Finding:
    return Finding(id=id, title="Title", status=status, what=f"What is {status}.")


@pytest.mark.parametrize(
    ("findings", "outcome", "code", "strict_code"),
    [
        ([], Outcome.READY, 0, 0),
        ([Status.PASS, Status.SKIPPED], Outcome.READY, 0, 0),
        ([Status.UNKNOWN], Outcome.READY, 0, 0),  # not an essential one
        ([Status.WARN, Status.PASS], Outcome.READY_WITH_WARNINGS, 0, 1),
        ([Status.CRASHED, Status.WARN], Outcome.UNDETERMINED, 3, 3),
        ([Status.CRASHED, Status.FAIL, Status.WARN], Outcome.NOT_READY, 1, 1),
    ],
)
def test_the_worst_finding_decides(findings: list[Status], outcome: Outcome, code: int, strict_code: int) -> None:
    made = [finding(status) for status in findings]
    assert (verdict(made).outcome, verdict(made).exit_code) == (outcome, code)
    assert verdict(made, strict=True).exit_code == strict_code


def test_an_essential_unknown_leaves_it_undetermined() -> None:
    assert find_check("STR-CTX-BROKEN").essential
    said = verdict([finding(Status.UNKNOWN, "STR-CTX-BROKEN")])
    assert (said.outcome, said.exit_code) == (Outcome.UNDETERMINED, 3)
    assert "Title" in said.sentence


def test_an_infeasible_plan_is_not_ready_even_when_its_check_was_left_out() -> None:
    plan = cases()["8gb-card-no-room"].machine().plan
    said = verdict([], plan)
    assert (said.outcome, said.exit_code) == (Outcome.NOT_READY, 1)
    assert "6.6 GiB of VRAM are missing" in said.sentence


def test_the_verdict_counts_what_else_there_is() -> None:
    said = verdict([finding(Status.FAIL)] * 3)
    assert said.sentence == "Not ready: What is fail. (and 2 more problems)"


def test_no_gpu_is_said_plainly() -> None:
    report = diagnose(cases()["cpu-only-container"].machine().facts)
    assert report.verdict.sentence == "Ready on the CPU (no NVIDIA GPU here)."
    assert report.verdict.exit_code == 0


def test_a_lost_cuda_probe_cannot_be_ready() -> None:
    facts = cases()["desktop-4070tis"].machine().facts
    facts = msgspec.structs.replace(facts, cuda=Probe(status=ProbeStatus.FAILED, error=ProbeError("no result")))
    assert diagnose(facts).verdict.exit_code == 3


def test_only_and_skip() -> None:
    machine = cases()["seed-000-budget-exhausted"].machine()
    assert [f.id for f in run_checks(machine, only=["str-wsl-pin"])] == ["STR-WSL-PIN"]
    skipped = {f.id: f.status for f in run_checks(machine, skip=["STR-WSL-PIN"])}
    assert skipped["STR-WSL-PIN"] is Status.SKIPPED
    assert len(skipped) > 40


@pytest.mark.parametrize(
    ("machine", "only", "sentence", "exit_code"),
    [
        ("h200-server", ["STR-DRV-OLD", "STR-WSL-DRIVE"], "Of the checks asked for: nothing is wrong.", 0),
        ("h200-server", ["STR-WSL-LIBCUDA"], "Of the checks asked for: none says anything here.", 0),
        ("dual-epyc-numa", ["STR-CPU-NUMA"], "Of the checks asked for: RAM is spread over 2 nodes", 0),
        ("seed-000-broken-context", ["STR-CUDA-HIDDEN"], "Could not be determined: CUDA_VISIBLE_DEVICES.", 3),
        ("two-cupys", ["STR-CUPY-TWO"], "Not ready: 2 CuPy packages", 1),
    ],
)
def test_some_checks_alone_never_make_a_machine_ready(
    machine: str, only: list[str], sentence: str, exit_code: int
) -> None:
    report = diagnose(cases()[machine].machine().facts, only=only)
    assert report.verdict.sentence.startswith(sentence)
    assert report.verdict.exit_code == exit_code
    assert {f.id for f in report.findings} == set(only)  # one that does not apply says so


def test_an_unknown_id_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="STR-WSL-PIN"):
        run_checks(cases()["h200-server"].machine(), only=["STR-WSL-PINS"])


def test_a_check_that_breaks_becomes_a_finding() -> None:
    @check("STR-TEST", "A broken check", needs=())
    def broken(m: Machine) -> None:
        raise ZeroDivisionError("by design")

    found = broken.run(cases()["h200-server"].machine())
    assert found
    assert found.status is Status.CRASHED
    assert "by design" in found.evidence[0].text


def test_a_pass_without_its_facts_is_unknown() -> None:
    case = cases()["h200-server"]
    looked = check("STR-TEST", "Looks", needs=("host.kernel",))(lambda m: passed("Fine."))
    statuses = []
    for changes in (
        {},
        {"host.value.kernel": None},
        {"host": {"status": "timed_out"}},
        {"host": {"status": "skipped"}},
    ):
        found = looked.run(case.machine(changes))
        statuses.append(found and found.status)
    assert statuses == [Status.PASS, Status.UNKNOWN, Status.UNKNOWN, Status.SKIPPED]
    assert looked.run(case.machine({"host": {"status": "unsupported"}})) is None


def test_every_check_is_explained() -> None:
    for entry in CATALOGUE.values():
        assert entry.id.startswith("STR-")
        assert len(entry.explanation) > 50, entry.id
    assert len(CATALOGUE) >= 45
