"""What is to be done fits the system it is to be done on, and the driver and the GPU that are there."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from strata.doctor.checks.machine import Machine
from strata.doctor.cuda_packages import remedy_for
from strata.doctor.facts import Facts
from strata.doctor.findings import Finding, Status
from strata.doctor.plan import PlanOptions
from strata.doctor.summary import summary
from tests.doctor.machines import PROBLEMS, Case, cases, findings_of

OF_LINUX = re.compile(r"\bsudo\b|\bexport [A-Z]|\bunset\b|\bapt\b|\bdnf\b|\brmmod\b|\bmodprobe\b|/dev/|/etc/")


def problems(machine: Machine) -> list[Finding]:
    return [f for f in findings_of(machine).values() if f.status in PROBLEMS]


def on_windows(case: Case) -> Machine:
    return case.machine({"host.value.os": "windows", "host.value.wsl": "none", "host.value.container": "none"})


@pytest.mark.parametrize("case", [c for c in cases().values() if c.document["host"].get("value")], ids=lambda c: c.name)
def test_no_remedy_on_windows_is_one_of_linux(case: Case) -> None:
    for finding in problems(on_windows(case)):
        assert not OF_LINUX.search(finding.remedy or ""), finding


def test_a_remedy_on_linux_names_no_distribution_alone() -> None:
    for case in cases().values():
        for finding in problems(case.machine()):
            named = {name for name in ("Ubuntu", "Fedora", "Debian", "Arch") if name in (finding.remedy or "")}
            if re.search(r"ubuntu-drivers|\bapt\b", finding.remedy or "") and finding.id != "STR-WSL-LIBCUDA":
                assert len(named) > 1, finding


def test_a_power_limit_under_wsl_is_set_in_windows() -> None:
    remedy = findings_of(cases()["hot-laptop"].machine({"host.value.os": "linux", "host.value.wsl": "wsl2"}))
    assert "in Windows" in (remedy["STR-GPU-HOT"].remedy or "")
    assert "sudo" not in (remedy["STR-GPU-HOT"].remedy or "")


@pytest.mark.parametrize(
    ("cuda", "capability", "package", "driver"),
    [
        ((13, 0), (8, 9), "cupy-cuda13x", False),
        ((12, 4), (8, 9), "cupy-cuda12x", False),
        ((13, 0), (7, 5), "cupy-cuda13x", False),
        ((13, 0), (6, 1), "cupy-cuda12x", False),  # a GTX 1080 Ti on driver 580
        ((13, 0), (5, 2), "cupy-cuda12x", False),  # a GTX 980
        ((11, 4), (8, 6), "cupy-cuda13x", True),
        ((11, 4), (6, 1), "cupy-cuda12x", True),
        ((11, 4), (3, 5), "--device cpu", False),
        (None, None, "cupy-cuda13x", False),
    ],
)
def test_driver_and_gpu_decide_the_package(
    cuda: tuple[int, ...] | None, capability: tuple[int, ...] | None, package: str, driver: bool
) -> None:
    remedy = remedy_for(cuda, capability)
    assert package in remedy
    assert ("Install NVIDIA driver" in remedy) is driver


@pytest.mark.parametrize("capability", ["6.1", "5.2"])
def test_what_no_cupy_advises_is_not_refused_by_the_next_check(capability: str) -> None:
    gpu = {"nvml.value.gpus.0.compute_capability": capability, "nvml.value.cuda_driver_version": "13.0"}
    remedy = findings_of(cases()["no-cupy"].machine(gpu))["STR-CUPY-NONE"].remedy or ""
    assert "cupy-cuda12x" in remedy
    installed = {
        "cuda.value.cupy_packages": {"cupy-cuda12x": "14.2.0"},
        "nvml.value.gpus.0.compute_capability": capability,
    }
    assert findings_of(cases()["desktop-4070tis"].machine(installed))["STR-GPU-OLD"].status is Status.PASS


def test_a_driver_too_old_for_any_cupy_is_told_without_one() -> None:
    old = {"nvml.value.driver_version": "470.256.02", "nvml.value.cuda_driver_version": "11.4"}
    found = findings_of(cases()["no-cupy"].machine(old))
    assert found["STR-DRV-OLD"].status is Status.FAIL
    assert "525" in found["STR-DRV-OLD"].what
    assert "Install NVIDIA driver" in (found["STR-CUPY-NONE"].remedy or "")


@pytest.mark.parametrize(
    ("value", "hides"),
    [("0", False), ("0,1", False), ("GPU-", False), ("", True), ("-1", True), ("1", True), ("GPU-0", True)],
)
def test_only_a_list_that_names_no_gpu_hides_them(value: str, hides: bool) -> None:
    case = cases()["seed-000-broken-context"]
    uuid = case.document["nvml"]["value"]["gpus"][0]["uuid"]
    given = {"GPU-": uuid, "GPU-0": "GPU-00000000-0000-0000-0000-000000000000"}.get(value, value)
    found = findings_of(
        case.machine(
            {"cuda.value.visible_devices": given, "cuda.value.environment": {"CUDA_VISIBLE_DEVICES": given}},
        )
    )
    assert (found["STR-CTX-BROKEN"].status is Status.FAIL) is not hides
    assert (found["STR-CUDA-HIDDEN"].status is Status.FAIL) is hides


def test_a_context_that_one_process_lost_is_not_blamed_on_versions() -> None:
    found = findings_of(cases()["wsl2-5080-docker-context"].machine())
    broken = found["STR-CTX-BROKEN"]
    assert "fresh process" in broken.what
    assert "pip install" not in (broken.remedy or "")
    assert found["STR-WSL-PIN"].status is Status.UNKNOWN


def commit(changes: dict[str, Any], case: str = "win-small-page-file", plan: str | None = None) -> Status | None:
    machine = cases()[case].machine(changes)
    planned = plan and cases()[plan].machine().plan
    if planned:
        planned = msgspec.structs.replace(planned, feasible=True)
        machine = Machine(machine.facts, None, planned, machine.options)
    found = findings_of(machine).get("STR-WIN-COMMIT")
    return found and found.status


def test_the_page_file_is_judged_by_the_plan_where_there_is_one() -> None:
    planned = cases()["8gb-card-no-room"].machine().plan
    assert planned
    wanted = sum(line.bytes for line in planned.reservations if line.tier != "file")
    used = cases()["win-small-page-file"].document["host"]["value"]["commit_used_bytes"]
    assert commit({}) is Status.FAIL
    for more, status in ((0, Status.PASS), (-1, Status.FAIL)):
        assert commit({"host.value.commit_limit_bytes": used + wanted + more}, plan="8gb-card-no-room") is status


@pytest.mark.parametrize(
    ("os", "cpu", "disk", "warns"),
    [("linux", "low", "normal", False), ("linux", "low", "low", True), ("windows", "low", "normal", True)],
)
def test_nice_alone_slows_no_loading_on_linux(os: str, cpu: str, disk: str, warns: bool) -> None:
    changes = {"host.value.os": os, "host.value.cpu_priority": cpu, "host.value.io_priority": disk}
    found = findings_of(cases()["h200-server"].machine(changes))["STR-CPU-PRIORITY"]
    assert found.status is (Status.WARN if warns else Status.PASS)


def test_a_probe_of_our_own_is_not_said_to_have_forked() -> None:
    found = findings_of(cases()["forked-after-init"].machine())["STR-CUDA-FORK"]
    assert "fork" not in found.what + (found.remedy or "")


def facts_of_a_slice() -> Facts:
    free = (9 << 30) + (1 << 29)
    changes = {
        "cuda.value.devices.0.uuid": "MIG-5c3f7a0e-1111-5222-8333-444455556666",
        "cuda.value.devices.0.vram_total_bytes": free,
        "cuda.value.devices.0.vram_free_bytes": free,
    }
    return cases()["mig-a100"].machine(changes).facts


def test_a_mig_slice_is_not_compared_with_the_whole_card() -> None:
    facts = facts_of_a_slice()
    found = findings_of(Machine(facts))
    assert found["STR-VRAM-TRUTHS"].status is Status.UNKNOWN
    assert any("9.5 GiB" in e.text for e in found["STR-GPU-MIG"].evidence)
    assert any("9.5 GiB" in text for _, text in summary(facts))


def test_no_desktop_is_planned_for_on_a_mig_slice() -> None:
    from strata.doctor.cuda_budgets import vram_reserve
    from strata.doctor.gpus import choose_gpu

    facts = facts_of_a_slice()
    assert facts.host.value
    assert "desktop that" not in vram_reserve(facts.host.value, choose_gpu(facts, None), PlanOptions())[1]


def test_every_kind_of_fault_in_the_kernels_log_is_shown() -> None:
    evidence = findings_of(cases()["a100-memory-errors"].machine())["STR-DRV-XID"].evidence
    assert [re.search(r": (\d+),", e.text)[1] for e in evidence] == ["63", "94"]


def test_an_overclock_is_undone_before_anything_is_installed() -> None:
    remedy = findings_of(cases()["overclocked-wrong-result"].machine())["STR-CUDA-KERNEL"].remedy or ""
    assert 0 <= remedy.lower().find("overclock") < remedy.find("pip install")


def test_memory_that_is_ram_has_no_link() -> None:
    assert "Link" not in dict(summary(cases()["gb10-integrated"].machine().facts))
    assert "Link" in dict(summary(cases()["h200-measured"].machine().facts))


def test_another_gpu_is_offered_only_where_there_is_one() -> None:
    case = cases()["cluster-exclusive-busy"]
    gpus = case.document["nvml"]["value"]["gpus"]
    for listed, offered in ((gpus[:1], False), ([gpus[0], gpus[0]], True)):
        remedy = findings_of(case.machine({"nvml.value.gpus": listed}))["STR-CUDA-BUSY"].remedy or ""
        assert ("--gpu" in remedy) is offered


@pytest.mark.parametrize(
    ("backend", "tier", "advice"),
    [("cuda", "vram", "A card with more memory"), ("cuda", "pageable", "More RAM"), ("numpy", "vram", "More RAM")],
)
def test_more_of_the_memory_that_is_short_is_advised(backend: str, tier: str, advice: str) -> None:
    changes = {"plan.device.backend": backend, "plan.shortfall.tier": tier, "plan.changes": []}
    machine = cases()["8gb-card-no-room"].machine(changes)
    assert (findings_of(machine)["STR-PLAN-FIT"].remedy or "").startswith(advice)
