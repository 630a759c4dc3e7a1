"""Plans for the GPU of this machine."""

from __future__ import annotations

from functools import cache
from typing import Any

from strata.doctor.facts import Facts
from strata.doctor.gather import GatherOptions, gather
from strata.doctor.plan import AllocationPlan, PlanOptions
from strata.doctor.planner import make_plan
from strata.gguf.model_facts import read_model_facts
from strata.gguf.reader import GGUFFile


@cache
def facts() -> Facts:
    return gather(GatherOptions())


def planned(file: GGUFFile, **options: Any) -> AllocationPlan:
    """A plan for the GPU."""
    plan = make_plan(facts(), read_model_facts(file), PlanOptions(device="cuda", **options))
    assert plan.feasible, plan.shortfall
    return plan
