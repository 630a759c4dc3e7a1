"""Makes allocation plans: a pure function from facts, model and options.

Every rung of the ladders is filled up to the budgets and scored (see `candidates` and `speed`); the best score
wins. When not even the leanest rung fits, the plan says which line does not, and by how much, and `changes` looks
for the smallest change that would do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain

import msgspec

from strata import __version__
from strata.doctor.budgets import Bound
from strata.doctor.candidates import Backend, Candidate, candidates, leanest, topped_up
from strata.doctor.changes import smallest_changes
from strata.doctor.cuda_backend import CudaBackend
from strata.doctor.facts import Facts
from strata.doctor.gpus import gpus
from strata.doctor.ladders import about_windows, given_up
from strata.doctor.machines import smallest_machine
from strata.doctor.numpy_backend import NumpyBackend
from strata.doctor.plan import (
    AllocationPlan,
    ExpectedSpeed,
    ExpertCachePlan,
    ModelIdentity,
    PlanOptions,
    Reservation,
    Shortfall,
    Tier,
)
from strata.doctor.request import Request, resolve
from strata.doctor.simulated_backend import SIMULATED, SimulatedBackend
from strata.doctor.speed import Placement, expected_speed, turn_seconds
from strata.doctor.units import size
from strata.errors import UsageError
from strata.gguf.model_facts import ModelFacts

_ORDER = (Tier.VRAM, Tier.PAGEABLE, Tier.PINNED, Tier.FILE)  # device first, pinning last


@dataclass(frozen=True, slots=True)
class Problem:
    """What is asked, of which backend, within which bounds."""

    backend: Backend
    request: Request
    bounds: tuple[Bound, ...]

    @classmethod
    def of(cls, facts: Facts, model: ModelFacts, options: PlanOptions) -> Problem:
        """Pose the problem; raises what `make_plan` does."""
        return cls.on(backend_for(facts, model, options), model, options)

    @classmethod
    def on(cls, backend: Backend, model: ModelFacts, options: PlanOptions) -> Problem:
        """Pose the problem to a backend that was made with these options."""
        return cls(backend, request_for(backend, model, options), backend.limits.bounds())

    def least(self) -> Candidate:
        """The candidate that needs the least of every memory."""
        return leanest(self.backend, self.request, self.bounds)

    def best(self) -> tuple[float, Candidate]:
        """The best score and its candidate, the first of equals. Something fits: `least` did."""
        traffic = self.backend.traffic(self.request)
        found = candidates(self.backend, self.request, self.bounds)
        scored = ((turn_seconds(traffic, self.backend.speeds, c.placement), c) for c in found)
        first = next(scored)
        if self._nothing_given_up(first[1].placement):
            return first
        return min(chain((first,), scored), key=lambda pair: pair[0])

    def _nothing_given_up(self, where: Placement) -> bool:
        """Say whether no other candidate can be better: every expert has a slot, and every ladder is at its top."""
        top = self.request.chunks[0], *self.backend.host_choices[0], self.backend.experts.total
        return (where.chunk, where.embedding, where.staging, where.slots) == top


def backend_for(facts: Facts, model: ModelFacts, options: PlanOptions) -> Backend:
    """Return what the planner needs to know of the backend that the options name."""
    if options.device == "cuda" or (options.device == "auto" and (options.gpu is not None or _gpu_is_ready(facts))):
        return CudaBackend(facts, model, options)
    if options.device == SIMULATED:
        return SimulatedBackend(facts, model, options)
    return NumpyBackend(facts, model, options)


def _gpu_is_ready(facts: Facts) -> bool:
    """Say whether `--device auto` takes the GPU: CUDA sees one, and a kernel was compiled for it and ran right."""
    cuda = facts.cuda.value
    return cuda is not None and bool(cuda.devices) and bool(cuda.kernel_ok)


def request_for(backend: Backend, model: ModelFacts, options: PlanOptions) -> Request:
    """Return what the options ask of a backend."""
    return resolve(
        model,
        options,
        kv_types=backend.kv_types,
        chunks=backend.chunks,
        minimum=backend.minimum_slots,
        threads=backend.threads,
    )


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
    fits = partial(_fits, backend_for(facts, model, options), model)
    changes = smallest_changes(plan, partial(fits, facts))
    if not changes:
        changes = (smallest_machine(facts, options, fits, on_gpu=plan.device.backend != "numpy"),)
    return msgspec.structs.replace(plan, changes=changes)


def _fits(backend: Backend, model: ModelFacts, facts: Facts, options: PlanOptions) -> bool:
    """Say whether there is a plan: the leanest rung needs the least of every memory, so it decides.

    The device and the model are those of `backend`, so that what their lines take is not worked out again.
    """
    try:
        return Problem.on(backend.among(facts, options), model, options).least().fits
    except UsageError:
        return False


def _draft(facts: Facts, model: ModelFacts, options: PlanOptions) -> AllocationPlan:
    """Make a plan without looking for changes."""
    problem = Problem.of(facts, model, options)
    backend, request = problem.backend, problem.request
    least = problem.least()
    chosen = problem.best()[1] if least.fits else least
    where = topped_up(backend, problem.bounds, chosen) if least.fits else least.placement
    lines = chosen.fixed + backend.expert_lines(where.slots, where.pinned, where.pageable)
    total = backend.experts.total
    classes = backend.slot_classes(where.slots) if total else ()
    kv = next((line.bytes for line in lines if line.id == "kv_cache"), 0)
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
        threads=request.threads,
        experts=ExpertCachePlan(
            total=total,
            slots=where.slots,
            slot_bytes=max((c.slot_bytes for c in classes), default=0),
            minimum_slots=backend.minimum_slots,
            pinned=where.pinned,
            pageable=where.pageable,
            file=total - where.pinned - where.pageable,
            classes=classes,
        ),
        budgets=backend.limits.budgets,
        shared=backend.limits.shared,
        reservations=tuple(sorted(lines, key=lambda line: _ORDER.index(line.tier))),
        fallbacks=given_up(backend, request, chosen.fixed, where) if chosen.fits else (),
        notes=(
            *request.notes,
            *about_windows(model, request.context, where.chunk, kv),
            *backend.limits.notes,
            *backend.notes,
            *_about_auto(facts, options, backend),
        ),
        shortfall=None if chosen.fits else _shortfall(problem, lines),
        expected=_expected(problem, where) if chosen.fits else None,
    )


def _expected(problem: Problem, where: Placement) -> ExpectedSpeed | None:
    """Say how fast it would be; nothing of a simulated machine, whose memories are another's than its processor."""
    backend = problem.backend
    if backend.device.backend == SIMULATED:
        return None
    return expected_speed(backend.traffic(problem.request), backend.speeds, where)


def _about_auto(facts: Facts, options: PlanOptions, backend: Backend) -> tuple[str, ...]:
    """Say what `--device auto` passed over: it plans for what can run."""
    if options.device != "auto" or backend.device.backend != "numpy":
        return ()
    return tuple(
        f"{gpu.name} is not used: no kernel was seen to run on it (strata doctor says why); --device cuda plans for it."
        for gpu in gpus(facts)[:1]
    )


def _shortfall(problem: Problem, lines: tuple[Reservation, ...]) -> Shortfall:
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
