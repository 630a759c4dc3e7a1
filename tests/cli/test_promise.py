"""Planned beside taken after loading: by the allocator, the driver and the system."""

from __future__ import annotations

import pytest
from rich.console import Console

from strata.cli.promise import BY_DRIVER, WHOLE, memory_rows, memory_table
from strata.doctor.plan import PlanOptions, Tier
from strata.doctor.planner import make_plan
from strata.runtime.process_memory import MemoryReport, TierMemory
from tests.doctor.machines_with_gpus import PINNED_45_GIB, gpu_machine
from tests.doctor.shapes import GIB, MIB, SMALL_MOE, machine

FACTS = gpu_machine(vram_total=24 * GIB, vram_free=23 * GIB, ram=64 * GIB, pinned=PINNED_45_GIB)
PLAN = make_plan(FACTS, SMALL_MOE, PlanOptions(device="cuda", expert_cache=100))
PLANNED = PLAN.planned_bytes(Tier.VRAM)


def report(taken: int | None) -> MemoryReport:
    tiers = tuple(
        TierMemory(tier, PLAN.planned_bytes(tier), PLAN.planned_bytes(tier) - MIB)
        for tier in (Tier.VRAM, Tier.PINNED, Tier.PAGEABLE)
    )
    return MemoryReport(
        tiers=tiers,
        planned_bytes=3 * GIB,
        allocated_bytes=2 * GIB,
        actual_bytes=2 * GIB + MIB,
        peak_bytes=2 * GIB + MIB,
        vram_taken_bytes=taken,
    )


def test_a_gpu_s_memory_is_counted_by_the_allocator_and_by_the_driver() -> None:
    rows = {row["memory"]: row for row in memory_rows(PLAN, report(PLANNED - 5 * MIB))}
    assert list(rows) == ["VRAM", "page-locked RAM", "pageable RAM", BY_DRIVER, WHOLE]
    assert rows["VRAM"]["difference_bytes"] == MIB
    assert rows[BY_DRIVER] == {
        "memory": BY_DRIVER,
        "planned_bytes": PLANNED,
        "taken_bytes": PLANNED - 5 * MIB,
        "difference_bytes": 5 * MIB,
    }
    assert rows[WHOLE]["taken_bytes"] == 2 * GIB + MIB


@pytest.mark.parametrize(("taken", "words"), [(None, "unknown"), (PLANNED + 2 * MIB, "-2 MiB")])
def test_a_driver_that_does_not_say_and_a_plan_that_was_exceeded_are_both_shown(taken: int | None, words: str) -> None:
    console = Console(width=80)
    with console.capture() as shown:
        console.print(memory_table(memory_rows(PLAN, report(taken))))
    line = next(line for line in shown.get().splitlines() if BY_DRIVER in line)
    assert words in line


def test_on_a_cpu_there_is_no_driver_to_ask() -> None:
    plan = make_plan(machine(8 * GIB), SMALL_MOE, PlanOptions())
    assert [row["memory"] for row in memory_rows(plan, report(None))][-1] == WHOLE
    assert all(row["memory"] != BY_DRIVER for row in memory_rows(plan, report(None)))
