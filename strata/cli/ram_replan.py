"""The one re-plan when this machine refuses RAM: with what it really grants."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from strata.cli.output import say
from strata.cli.preflight import OpenModel, take_facts
from strata.errors import AllocationFailed, PlanInfeasible

if TYPE_CHECKING:
    from strata.doctor.plan import AllocationPlan, PlanOptions, Reservation
    from strata.runtime.runlog import RunLog

_MIB = 1 << 20
# Of what the system would still map, what is left for that which no line is charged for: address space of thread
# stacks and of the allocator's arenas, which counts against `ulimit -v` although it takes no RAM.
_UNPLANNED_BYTES = 64 * _MIB

_RAISE = "Raise the limit on this process (ulimit -v, a container's) or free RAM"


def require_context(plan: AllocationPlan) -> None:
    """Refuse to go on where the plan's line for interpreter, libraries and tokenizer would be refused.

    Some of those libraries end the process when memory is refused, without a word on what was asked.

    Raises
    ------
    AllocationFailed
        The system grants less.
    """
    from strata.runtime.process_memory import anonymous_bytes, mappable_bytes

    line = plan.line("context" if plan.device.backend == "numpy" else "process")  # a GPU's context lies in VRAM
    needed = max(line.bytes - anonymous_bytes(), 0) if line else 0
    granted = mappable_bytes(needed)
    if line and granted + _MIB < needed:
        raise AllocationFailed(
            f'take {_mib(line.bytes)} of RAM for "{line.id}" ({line.what})',
            f"the system grants this process {granted // _MIB:,} MiB more, and {_mib(needed)} are still needed",
            _RAISE,
            line=line.id,
            nbytes=line.bytes,
        )


def plan_in_less_ram(model: OpenModel, plan: AllocationPlan, refusal: AllocationFailed, log: RunLog) -> AllocationPlan:
    """Make the second plan, with no more RAM than is granted, and say so.

    Parameters
    ----------
    model : OpenModel
    plan : AllocationPlan
        Whose line was refused; everything that was taken has been given back by now.
    refusal : AllocationFailed
    log : RunLog

    Raises
    ------
    PlanInfeasible
        What the system grants is too little for any plan.
    """
    granted = _granted_bytes(plan, refusal)
    say(f"{refusal.asked}: {refusal.found}")
    say(f"Planning once more, with the {granted // _MIB:,} MiB of RAM that the system grants.")
    log.event("replan", refused=refusal.line, ram_budget_bytes=granted)
    second = _plan_again(model, plan, granted)
    if not second.feasible:
        raise _too_little(refusal, second, granted) from None
    return second


def _granted_bytes(plan: AllocationPlan, refusal: AllocationFailed) -> int:
    """Return the RAM to plan with once more: what was granted, or what the system would grant now if that is more.

    Always less than the plan that was refused, and no more than its `--ram-budget`.
    """
    from strata.runtime.process_memory import anonymous_bytes, mappable_bytes

    planned = _ram_bytes(plan)
    now = anonymous_bytes() + mappable_bytes(planned) - _UNPLANNED_BYTES
    granted = max(now, sum(line.bytes for line in _granted_lines(plan, refusal)))
    return min(granted, planned - _MIB, plan.options.ram_budget_bytes or planned)


def _granted_lines(plan: AllocationPlan, refusal: AllocationFailed) -> list[Reservation]:
    """Return the lines in RAM that were taken before the refusal; memory for temporaries is asked for after all."""
    from strata.doctor.plan import Tier
    from strata.runtime.memory import TEMPORARIES_LINE

    lines = [line for line in plan.reservations if line.tier is not Tier.FILE]
    if refusal.line == TEMPORARIES_LINE:
        return [line for line in lines if line.id != refusal.line]
    return lines[: [line.id for line in lines].index(refusal.line)]


def _ram_bytes(plan: AllocationPlan) -> int:
    from strata.doctor.plan import Tier

    return sum(line.bytes for line in plan.reservations if line.tier is not Tier.FILE)


def _plan_again(model: OpenModel, plan: AllocationPlan, granted: int) -> AllocationPlan:
    """Plan what the first plan promised (a saved one's context and KV type, not today's options) in less RAM."""
    from strata.doctor.planner import make_plan

    options: PlanOptions = msgspec.structs.replace(
        plan.options, max_context=plan.context, kv=plan.kv, ram_budget_bytes=granted
    )
    second = make_plan(take_facts(model.file.path, options), model.facts, options)
    # More of a budget is no way out: the system refused what lies beyond it.
    changes = tuple(change for change in second.changes if "--ram-budget" not in change.option and change.option)
    return msgspec.structs.replace(second, changes=changes)


def _too_little(refusal: AllocationFailed, second: AllocationPlan, granted: int) -> PlanInfeasible:
    least, change = _ram_bytes(second), f"; or use {second.changes[0].option}" if second.changes else ""
    return PlanInfeasible(
        refusal.asked,
        f"{refusal.found}; {granted // _MIB:,} MiB are granted in all, and the smallest plan takes {_mib(least)}",
        f"{_RAISE}, {_mib(max(least - granted, _MIB))} are missing{change}",
    )


def _mib(nbytes: int) -> str:
    return f"{-(-nbytes // _MIB):,} MiB"
