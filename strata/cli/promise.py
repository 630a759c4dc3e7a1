"""What was promised beside what came: memory after loading, and speed after an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strata.doctor.budgets import TIER_NAMES
from strata.doctor.expectation import Turn, expected_of_turn
from strata.doctor.plan import AllocationPlan, Tier
from strata.doctor.units import size
from strata.runtime.generation import GenerationStats
from strata.runtime.process_memory import MemoryReport

if TYPE_CHECKING:
    from rich.table import Table

    from strata.doctor.facts import Facts
    from strata.doctor.speed import Range
    from strata.gguf.model_facts import ModelFacts

WHOLE = "whole process"
BY_DRIVER = "VRAM, by the driver"


def memory_rows(plan: AllocationPlan, report: MemoryReport) -> list[dict[str, Any]]:
    """Return planned and taken bytes of each memory, and their difference.

    Of each tier by the allocator; of a GPU's memory by the driver too, context and kernels included, None where it does
    not say; of the process's RAM, page-locked or not, by the system.
    """
    numpy = plan.device.backend == "numpy"
    names = TIER_NAMES | ({Tier.VRAM: "RAM, the device's share"} if numpy else {})
    rows: list[tuple[str, int, int | None]] = [
        (names[each.tier], each.planned_bytes, each.allocated_bytes) for each in report.tiers if each.planned_bytes
    ]
    if plan.device.backend == "cuda":
        rows.append((BY_DRIVER, plan.planned_bytes(Tier.VRAM), report.vram_taken_bytes))
    rows.append((WHOLE, report.planned_bytes, report.actual_bytes))
    return [
        {
            "memory": name,
            "planned_bytes": planned,
            "taken_bytes": taken,
            "difference_bytes": None if taken is None else planned - taken,
        }
        for name, planned, taken in rows
    ]


def memory_table(rows: list[dict[str, Any]]) -> Table:
    """Lay the rows out for people."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column()
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    table.add_row("after loading", "planned", "taken", "difference", style="bold")
    for row in rows:
        figures = (row[key] for key in ("planned_bytes", "taken_bytes", "difference_bytes"))
        table.add_row(row["memory"], *("unknown" if each is None else size(each) for each in figures))
    return table


def expected(facts: Facts, model: ModelFacts, plan: AllocationPlan, stats: GenerationStats) -> tuple[Range, Range]:
    """Return the ranges in which decoding and reading the prompt should lie, in tokens/s, for what was asked."""
    turn = Turn(
        start=stats.reused_tokens,
        prompt=stats.prefill_tokens,
        answer=stats.decode_tokens,
        prefill_misses=stats.prefill_misses,
        decode_misses=stats.misses - stats.prefill_misses,
    )
    return expected_of_turn(facts, model, plan, turn)


def speed_document(stats: GenerationStats, ranges: tuple[Range | None, Range | None]) -> dict[str, Any]:
    """Return measured and expected speeds for --json, in tokens/s; None where nothing is expected."""
    decode, prefill = ranges
    return {
        "decode": {"measured": stats.decode_tokens_per_s, "expected": decode},
        "prefill": {"measured": stats.prefill_tokens_per_s, "expected": prefill},
    }


def range_text(speeds: Range) -> str:
    """Write a range: "11 to 22"."""
    slow, fast = (f"{each:,.0f}" if each >= 10 else f"{each:.1f}" for each in speeds)
    return f"{slow} to {fast}"
