"""Plans made by hand, for tests that need no model."""

from __future__ import annotations

from strata.doctor.plan import (
    CPU,
    HOST,
    AllocationPlan,
    DeviceRef,
    ExpertCachePlan,
    ModelIdentity,
    PlanOptions,
    Reservation,
    Tier,
)


def reservation(line: str, nbytes: int, tier: Tier = Tier.PAGEABLE) -> Reservation:
    """A line of a plan."""
    device = CPU if tier is Tier.VRAM else HOST
    return Reservation(id=line, what=f"test {line}", tier=tier, device=device, bytes=nbytes, formula=str(nbytes))


def plan_of(*reservations: Reservation) -> AllocationPlan:
    """A plan of just these lines."""
    return AllocationPlan(
        strata_version="test",
        model=ModelIdentity(name="test", architecture="llama", header_sha256="", file_bytes=0),
        device=DeviceRef(backend="numpy", id=CPU, name="test"),
        options=PlanOptions(),
        feasible=True,
        context=16,
        chunk=8,
        kv="f32",
        experts=ExpertCachePlan(total=0, slots=0, slot_bytes=0, minimum_slots=0),
        budgets=(),
        reservations=reservations,
    )
