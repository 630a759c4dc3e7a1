"""What kernels and graphs take: noted by one run, charged by the next plan on the same machine, and by no other."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from strata.cli import overhead
from strata.cli.overhead import overhead_noted, with_overheads
from strata.doctor.facts import CudaDevice, Facts, Overhead
from strata.doctor.plan import PlanOptions, Tier
from strata.doctor.planner import make_plan
from strata.runtime.engine import Engine
from strata.runtime.process_memory import TierMemory
from tests.doctor.machines_with_gpus import gpu_machine
from tests.doctor.shapes import GIB, MIB, SMALL_MOE

CARD = CudaDevice(ordinal=0, uuid="GPU-0", name="A card", context_bytes=300 * MIB, vram_free_bytes=10 * GIB)
FACTS = gpu_machine(vram_total=12 * GIB, vram_free=11 * GIB, ram=16 * GIB, cuda=CARD)
OPTIONS = PlanOptions(device="cuda", max_context=256)


class FakeEngine:
    """An engine whose driver counts what it is told, in this order."""

    def __init__(self, *beside: int | None) -> None:
        self.plan = make_plan(FACTS, SMALL_MOE, OPTIONS)
        self._beside = list(beside)

    def memory_report(self) -> Any:
        beside, allocated = self._beside.pop(0), 5 * GIB
        taken = None if beside is None else beside + allocated + self.plan.line("context").bytes
        tiers = (TierMemory(Tier.VRAM, 6 * GIB, allocated), TierMemory(Tier.PINNED, GIB, GIB))
        return SimpleNamespace(vram_taken_bytes=taken, tiers=tiers)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


def run(*beside: int | None, facts: Facts = FACTS) -> None:
    with overhead_noted(cast("Engine", FakeEngine(*beside)), facts):
        pass


def noted(facts: Facts = FACTS) -> dict[str, Overhead]:
    return with_overheads(facts).cuda.value.devices[0].overheads


def test_the_next_plan_charges_what_a_run_took(cache: Path) -> None:
    run(80 * MIB, 170 * MIB)
    assert noted() == {SMALL_MOE.architecture: Overhead(modules_bytes=80 * MIB, graphs_bytes=90 * MIB)}
    plan = make_plan(with_overheads(FACTS), SMALL_MOE, OPTIONS)
    assert (plan.line("modules").bytes, plan.line("graphs").bytes) == (112 * MIB, 122 * MIB)  # and 32 MiB each
    assert "measured in the last run" in plan.line("modules").formula
    before = make_plan(FACTS, SMALL_MOE, OPTIONS)
    assert (before.line("modules").bytes, before.line("modules").formula) == (64 * MIB, "assumed")


@pytest.mark.parametrize("beside", [(-3 * MIB, 7 * MIB), (9 * MIB, 7 * MIB)])
def test_what_another_program_gave_back_meanwhile_is_no_overhead(beside: tuple[int, int]) -> None:
    run(*beside)
    assert noted() == {}


def test_the_last_run_counts(cache: Path) -> None:
    run(100 * MIB, 100 * MIB)
    run(90 * MIB, 90 * MIB)
    assert noted()[SMALL_MOE.architecture].modules_bytes == 90 * MIB
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("beside", [(None, 1), (1, None), (2 * GIB, 2 * GIB), (0, 3 * GIB)])
def test_what_the_driver_does_not_say_or_cannot_be_kernels_is_not_noted(beside: tuple[int | None, ...]) -> None:
    run(*beside)
    assert noted() == {}


def test_a_run_that_fails_notes_nothing() -> None:
    with pytest.raises(ZeroDivisionError), overhead_noted(cast("Engine", FakeEngine(1, 2)), FACTS):
        raise ZeroDivisionError
    assert noted() == {}


def test_another_card_driver_cupy_or_kernel_is_another_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    run(80 * MIB, 80 * MIB)
    replace = msgspec.structs.replace
    cuda, nvml = FACTS.cuda, FACTS.nvml
    for other in (
        replace(FACTS, cuda=replace(cuda, value=replace(cuda.value, cupy_version="99"))),
        replace(FACTS, cuda=replace(cuda, value=replace(cuda.value, devices=(replace(CARD, name="Another"),)))),
        replace(FACTS, nvml=replace(nvml, value=replace(nvml.value, driver_version="999.1"))),
    ):
        assert noted(other) == {}
    assert noted() != {}
    monkeypatch.setattr("strata.kernels.compile.sources_sha256", lambda: "other")
    assert noted() == {}


def test_a_file_that_is_none_of_ours_counts_as_absent(cache: Path) -> None:
    run(80 * MIB, 80 * MIB)
    (cache / "cut.overhead").write_bytes(b'{"card": "A')
    (cache / "other.overhead").write_bytes(b"[]")
    assert len(noted()) == 1


def test_a_cache_that_cannot_be_written_is_said_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "file"))
    said: list[str] = []
    monkeypatch.setattr(overhead, "warn", said.append)
    run(80 * MIB, 80 * MIB)
    assert "could not be noted" in said[0]


def test_facts_without_a_gpu_stay_as_they_are() -> None:
    plain = gpu_machine(vram_total=GIB, vram_free=GIB, ram=GIB)
    assert with_overheads(plain) is plain
