"""What every feasible plan keeps, recomputed from its numbers alone: for tests, and for plans edited by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from strata.doctor.budgets import tier_names
from strata.doctor.host_speeds import MOST_THREADS
from strata.doctor.plan import AllocationPlan, Budget, SharedBudget, Tier
from strata.doctor.units import size


def broken(plan: AllocationPlan) -> tuple[str, ...]:
    """Return a sentence for everything in `plan` that does not hold; empty for a sound feasible plan."""
    return tuple(_broken(plan))


def _broken(plan: AllocationPlan) -> Iterator[str]:
    for id, times in Counter(line.id for line in plan.reservations).items():
        if times > 1:
            yield f'the line "{id}" occurs {times} times'
    for line in plan.reservations:
        if line.bytes < 0:
            yield f'the line "{line.id}" has {line.bytes} bytes'
    names = tier_names(plan)
    memories: tuple[Budget | SharedBudget, ...] = (*plan.budgets, *plan.shared)
    for memory in memories:
        if min(memory.usable_bytes, memory.reserve_bytes) < 0:
            name = names[memory.tier] if isinstance(memory, Budget) else memory.name
            yield f"{name} has {memory.usable_bytes} bytes of which {memory.reserve_bytes} are kept free"
    for budget in plan.budgets:
        over = plan.planned_bytes(budget.tier, budget.device) + budget.reserve_bytes - budget.usable_bytes
        if over > 0:
            yield f"{names[budget.tier]} is overfull by {size(over)}"
    for shared in plan.shared:
        taken = sum(plan.planned_bytes(tier) for tier in shared.tiers)
        if (over := taken + shared.reserve_bytes - shared.usable_bytes) > 0:
            yield f"{shared.name} is overfull by {size(over)}"
    known = {(budget.tier, budget.device) for budget in plan.budgets}
    for line in plan.reservations:
        if line.tier is not Tier.FILE and (line.tier, line.device) not in known:
            yield f'the line "{line.id}" lies in {names[line.tier]}, which has no budget'
    if not 1 <= plan.chunk <= plan.context:
        yield f"prompts of {plan.chunk} tokens at a time do not go with a context of {plan.context}"
    if not 1 <= plan.threads <= MOST_THREADS:
        yield f"{plan.threads} threads cannot compute"
    e = plan.experts
    if e.pinned + e.pageable + e.file != e.total or min(e.pinned, e.pageable, e.file) < 0:
        yield f"{e.pinned} + {e.pageable} + {e.file} experts by place are not {e.total} in all"
    if e.total and not e.minimum_slots <= e.slots <= e.total:
        yield f"{e.slots} expert slots are not between {e.minimum_slots} and {e.total}"
    if plan.feasible != (plan.shortfall is None):
        yield "it names a shortfall and calls itself feasible" if plan.feasible else "it is infeasible without a reason"
