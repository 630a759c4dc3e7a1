"""The plan as people see it."""

import io

import pytest
from rich.console import Console

from strata.doctor.plan import AllocationPlan, PlanOptions
from strata.doctor.plan_table import plan_table
from strata.doctor.planner import make_plan
from tests.doctor.machines_with_gpus import rtx_5060_ti_on_windows
from tests.doctor.shapes import DENSE, FLASH_NEXT, GIB, MIB, Q3_30B, SMALL_MOE, machine

PLANS = {
    "fits": make_plan(machine(48 * GIB, disk_bytes_per_s=5e6), Q3_30B, PlanOptions()),
    "dense": make_plan(machine(8 * GIB), DENSE, PlanOptions(vram_budget_bytes=4 * GIB)),
    "does not fit": make_plan(machine(744 * MIB), SMALL_MOE, PlanOptions(max_context=16_384)),
    "gpu": make_plan(rtx_5060_ti_on_windows(monitor_on_card=True), FLASH_NEXT, PlanOptions(device="cuda")),
}


def rendered(plan: AllocationPlan, width: int, *, unicode: bool) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(plan_table(plan, unicode=unicode))
    return out.getvalue()


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("width", [40, 63, 80, 120])
def test_a_plan_fits_the_terminal_and_shows_every_line(name, width):
    plan = PLANS[name]
    text = rendered(plan, width, unicode=True)
    assert max(map(len, text.splitlines())) <= width
    for line in plan.reservations:
        assert f"{line.id} " in text
        assert f"{line.bytes / MIB:,.1f}" in text


@pytest.mark.parametrize("name", PLANS)
def test_without_unicode_it_is_ascii(name):
    rendered(PLANS[name], 80, unicode=False).encode("ascii")


def test_the_verdict_comes_first():
    assert rendered(PLANS["fits"], 80, unicode=True).startswith("fits: Qwen3-30B-A3B on the CPU")
    assert rendered(PLANS["does not fit"], 80, unicode=True).startswith("does not fit: small-moe on the CPU")


def test_what_was_given_up_and_what_would_help_are_said():
    assert "Given up" in rendered(PLANS["fits"], 80, unicode=True)
    text = rendered(PLANS["does not fit"], 80, unicode=True)
    assert "--max-context" in text
    assert "too much" in text


def test_there_is_a_bar_for_every_memory_and_coupling():
    def bars(name: str) -> list[str]:
        lines = rendered(PLANS[name], 80, unicode=False).splitlines()
        return [line.split("[")[0].strip() for line in lines if "[#" in line]

    assert bars("fits") == ["RAM"]
    assert bars("dense") == ["--vram-budget", "RAM"]
    assert bars("gpu") == ["VRAM", "RAM", "VRAM + locked", "commit limit"]
