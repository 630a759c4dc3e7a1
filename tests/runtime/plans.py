"""Plans made by hand, for tests that need no model, and real ones for a small machine."""

from __future__ import annotations

from typing import Any

from strata.doctor.facts import Facts, HostFacts, Probe, ProbeStatus
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
from strata.doctor.planner import make_plan
from strata.gguf.model_facts import read_model_facts
from strata.gguf.reader import GGUFFile


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


def machine(ram_bytes: int = 4 << 30, threads: int = 2) -> Facts:
    """A machine of which only RAM and cores are known."""
    skipped: Probe[Any] = Probe(status=ProbeStatus.SKIPPED)
    host = HostFacts(os="linux", ram_available_bytes=ram_bytes, cpu_physical=threads)
    return Facts(
        host=Probe(status=ProbeStatus.OK, value=host), nvml=skipped, cuda=skipped, pinned=skipped, disk=skipped
    )


def planned(file: GGUFFile, *, threads: int = 2, **options: Any) -> AllocationPlan:
    """A real plan for a model on that machine."""
    return make_plan(machine(threads=threads), read_model_facts(file), PlanOptions(**options))
