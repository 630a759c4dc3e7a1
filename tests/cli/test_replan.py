"""What is planned after a refusal, from the plan and what the driver said alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from strata.cli.replan import other_ways, refusal
from strata.doctor.plan import AllocationPlan, PlanOptions, SharedBudget, Tier
from strata.errors import AllocationFailed
from strata.runtime.memory import MemoryRefused
from tests.runtime.plans import plan_of, reservation

MIB = 1 << 20
FULL = (2, "cudaErrorMemoryAllocation", "out of memory")
ODD = (100, "cudaErrorNoDevice", "no CUDA-capable device is detected")


def a_plan(*ram: Tier) -> AllocationPlan:
    plan = plan_of(
        reservation("context", 10 * MIB, Tier.VRAM),
        reservation("head", 20 * MIB, Tier.VRAM),
        reservation("expert_slots", 40 * MIB, Tier.VRAM),
        reservation("process", 5 * MIB),
        reservation("experts_pageable", 8 * MIB),
        reservation("embedding", 30 * MIB, Tier.PINNED),
        reservation("experts_pinned", 60 * MIB, Tier.PINNED),
    )
    shared = SharedBudget(name="RAM", tiers=ram, usable_bytes=1 << 40, reserve_bytes=0, formula="", source="")
    options = PlanOptions(device="simulated", vram_budget_bytes=100 * MIB)
    return msgspec.structs.replace(plan, options=options, shared=(shared,))


def failed(line: str, mib: int, cause: Exception) -> AllocationFailed:
    error = AllocationFailed("take", "refused", "", line=line, nbytes=mib * MIB)
    error.__cause__ = cause
    return error


def ways(line: str, mib: int, code: tuple[int, str, str], cpu: bool = True, **said: Any) -> list[PlanOptions]:
    cause = MemoryRefused("cudaMalloc", *code, **said)
    plan = a_plan(Tier.PINNED, Tier.PAGEABLE)
    return [way.options for way in other_ways(plan, failed(line, mib, cause), may_use_cpu=cpu)]


def test_what_the_driver_says_is_free_is_believed_when_it_is_less_than_was_asked() -> None:
    (way,) = ways("expert_slots", 40, FULL, free_bytes=7 * MIB)
    assert way.vram_budget_bytes == (10 + 20 + 7) * MIB
    (way,) = ways("expert_slots", 40, FULL, free_bytes=0)
    assert way.vram_budget_bytes == 30 * MIB


@pytest.mark.parametrize("free", [None, 40 * MIB, 99 * MIB])
def test_a_refusal_that_belies_the_driver_halves_the_line_first(free: int | None) -> None:
    budgets = [way.vram_budget_bytes for way in ways("expert_slots", 40, FULL, free_bytes=free)]
    assert budgets == [(30 + part) * MIB for part in (20, 30, 35)]


def test_ram_is_what_was_granted_in_all_that_lies_in_it() -> None:
    cause = MemoryRefused("malloc", 12, "ENOMEM", "Cannot allocate memory", free_bytes=3 * MIB)
    for ram, granted in (((Tier.PINNED, Tier.PAGEABLE), 5), ((Tier.VRAM, Tier.PINNED, Tier.PAGEABLE), 75)):
        (way,) = other_ways(a_plan(*ram), failed("experts_pageable", 8, cause), may_use_cpu=True)
        assert way.options.ram_budget_bytes == (granted + 3) * MIB


def test_page_locking_keeps_a_fifth_away_from_its_edge() -> None:
    (way,) = ways("experts_pinned", 60, FULL, granted_bytes=20 * MIB)
    assert way.pinned_budget_bytes == (30 + 20) * MIB * 4 // 5
    assert way.vram_budget_bytes == 100 * MIB


def test_page_locking_that_fails_with_another_code_is_left_alone() -> None:
    (way,) = ways("experts_pinned", 60, ODD, granted_bytes=20 * MIB)
    assert way.pinned_budget_bytes == 0


def test_an_odd_code_with_a_working_gpu_is_tried_again() -> None:
    (way,) = ways("head", 20, ODD)
    assert way == PlanOptions(device="simulated", vram_budget_bytes=100 * MIB, max_context=16, kv="f32")


def test_a_broken_gpu_is_done_without_unless_it_is_insisted_on() -> None:
    (way,) = ways("head", 20, ODD, broken=True)
    assert way == PlanOptions(device="cpu", max_context=16, kv="f32")
    assert ways("head", 20, ODD, cpu=False, broken=True) == []


def test_this_machine_s_own_ram_is_not_planned_around() -> None:
    error = failed("head", 20, OSError(12, "Cannot allocate memory"))
    assert list(other_ways(a_plan(), error, may_use_cpu=True)) == []
    assert "This machine itself refuses it" in refusal(a_plan(), error, wsl=False).found


def test_a_second_refusal_of_pins_names_the_option_that_does_without() -> None:
    error = failed("experts_pinned", 60, MemoryRefused("cudaHostRegister", *FULL))
    last = refusal(a_plan(), error, wsl=True, again=True)
    assert "--pinned-budget 0MiB" in last.remedy
    for words in ("experts_pinned", "(2 cudaErrorMemoryAllocation)", "WSL2", "second plan"):
        assert words in last.found
