"""Makes allocation plans: a pure function from facts, model and options.

Every rung of the ladders is filled up to the budgets and scored (see `candidates` and `speed`); the best score
wins. When not even the leanest rung fits, the plan says which line does not, and by how much, and `changes` looks
for the smallest change that would do.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import partial

import msgspec

from strata import __version__
from strata.doctor.budgets import Bound, with_ram
from strata.doctor.candidates import Backend, Candidate, fill, leanest, rungs
from strata.doctor.changes import smallest_changes
from strata.doctor.facts import Facts
from strata.doctor.ladders import given_up
from strata.doctor.numpy_backend import NumpyBackend
from strata.doctor.plan import (
    AllocationPlan,
    Change,
    ExpertCachePlan,
    ModelIdentity,
    PlanOptions,
    Reservation,
    Shortfall,
    Tier,
)
from strata.doctor.request import Request, resolve
from strata.doctor.speed import expected_speed, turn_seconds
from strata.doctor.units import MIB, size
from strata.errors import UsageError
from strata.gguf.model_facts import ModelFacts

_ORDER = (Tier.VRAM, Tier.PAGEABLE, Tier.PINNED, Tier.FILE)  # device first, pinning last


@dataclass(frozen=True, slots=True)
class _Problem:
    backend: Backend
    request: Request
    bounds: tuple[Bound, ...]

    @classmethod
    def of(cls, facts: Facts, model: ModelFacts, options: PlanOptions) -> _Problem:
        backend = NumpyBackend(facts, model, options)
        request = resolve(model, options, backend.kv_types, backend.minimum_slots)
        return cls(backend, request, backend.limits.bounds())

    def least(self) -> Candidate:
        rung = leanest(self.backend, self.request)
        fixed = self.backend.fixed_lines(self.request, rung.chunk, rung.embedding)
        return fill(self.backend, self.request, self.bounds, rung, fixed)

    def best(self) -> Candidate:
        """The candidate with the best score, the first of equals. Something fits: `least` did."""
        traffic = self.backend.traffic(self.request)
        fixed: dict[tuple[int, Tier], tuple[Reservation, ...]] = {}
        best: tuple[float, Candidate] | None = None
        for rung in rungs(self.backend, self.request):
            key = rung.chunk, rung.embedding
            if key not in fixed:
                fixed[key] = self.backend.fixed_lines(self.request, *key)
            candidate = fill(self.backend, self.request, self.bounds, rung, fixed[key])
            if not candidate.fits:
                continue
            score = turn_seconds(traffic, self.backend.speeds, candidate.placement)
            if best is None or score < best[0]:
                best = score, candidate
        assert best is not None
        return best[1]


def make_plan(facts: Facts, model: ModelFacts, options: PlanOptions) -> AllocationPlan:
    """Plan what a model takes on a machine, byte by byte.

    Parameters
    ----------
    facts : Facts
    model : ModelFacts
    options : PlanOptions

    Returns
    -------
    AllocationPlan
        `feasible` says whether it fits; if not, `shortfall` says why and `changes` what would help. The same
        arguments always give the same plan, to the byte of its JSON.

    Raises
    ------
    UsageError
        Options contradict each other, the model or the backend.
    Undetermined
        A memory's size is unknown and no option gives it.
    """
    plan = _draft(facts, model, options)
    if plan.feasible:
        return plan
    changes = smallest_changes(plan, partial(_fits, facts, model)) or (_smallest_machine(facts, model, options),)
    return msgspec.structs.replace(plan, changes=changes)


def _fits(facts: Facts, model: ModelFacts, options: PlanOptions) -> bool:
    """Say whether there is a plan: the leanest rung needs the least of every memory, so it decides."""
    try:
        return _Problem.of(facts, model, options).least().fits
    except UsageError:
        return False


def _smallest_machine(facts: Facts, model: ModelFacts, options: PlanOptions) -> Change:
    """Say how much memory a machine needs for these options, budgets aside."""
    free = msgspec.structs.replace(options, ram_budget_bytes=None, vram_budget_bytes=None, pinned_budget_bytes=None)
    needed = MIB * bisect_left(range(1 << 24), True, key=lambda mib: _fits(with_ram(facts, mib * MIB), model, free))
    return Change(option="", sentence=f"A machine with {size(needed)} of available RAM is the smallest that would do.")


def _draft(facts: Facts, model: ModelFacts, options: PlanOptions) -> AllocationPlan:
    """Make a plan without looking for changes."""
    problem = _Problem.of(facts, model, options)
    backend, request = problem.backend, problem.request
    least = problem.least()
    chosen = problem.best() if least.fits else least
    where = chosen.placement
    lines = chosen.fixed + backend.expert_lines(where.slots, where.pinned, where.pageable)
    total = backend.experts.total
    return AllocationPlan(
        strata_version=__version__,
        model=ModelIdentity(
            name=model.name,
            architecture=model.architecture,
            header_sha256=model.header_sha256,
            file_bytes=model.file_bytes,
        ),
        device=backend.device,
        options=options,
        feasible=chosen.fits,
        context=request.context,
        chunk=where.chunk,
        kv=request.kv,
        threads=backend.threads,
        experts=ExpertCachePlan(
            total=total,
            slots=where.slots,
            slot_bytes=backend.slot_bytes(1) if total else 0,
            minimum_slots=backend.minimum_slots,
            pinned=where.pinned,
            pageable=where.pageable,
            file=total - where.pinned - where.pageable,
        ),
        budgets=backend.limits.budgets,
        shared=backend.limits.shared,
        reservations=tuple(sorted(lines, key=lambda line: _ORDER.index(line.tier))),
        fallbacks=given_up(backend, request, chosen) if chosen.fits else (),
        notes=request.notes + backend.limits.notes + backend.notes,
        shortfall=None if chosen.fits else _shortfall(problem, lines),
        expected=expected_speed(backend.traffic(request), backend.speeds, where) if chosen.fits else None,
    )


def _shortfall(problem: _Problem, lines: tuple[Reservation, ...]) -> Shortfall:
    """Name the first line that does not fit, and by how much all of them exceed the memory it belongs to."""
    used = dict.fromkeys(Tier, 0)
    for line in lines:
        before = dict(used)
        used[line.tier] += line.bytes
        broken = next((bound for bound in problem.bounds if bound.left(used) < 0), None)
        if broken is not None:
            break
    assert broken is not None
    everything = dict.fromkeys(Tier, 0)
    for each in lines:
        everything[each.tier] += each.bytes
    missing = -broken.left(everything)
    left = max(broken.left(before), 0)
    return Shortfall(
        line=line.id,
        tier=line.tier,
        device=line.device,
        missing_bytes=missing,
        sentence=(
            f'"{line.id}" ({line.what}) takes {size(line.bytes)} and {size(left)} of {broken.name} are left for it; '
            f"{size(missing)} are missing in all."
        ),
    )
