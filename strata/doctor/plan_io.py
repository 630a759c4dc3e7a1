"""Saved plans: written whole or not at all, read with plain words for what is wrong, checked before followed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from strata import __version__
from strata.doctor.budgets import tier_names
from strata.doctor.candidates import Backend, HostChoice
from strata.doctor.facts import Facts
from strata.doctor.facts_io import LARGEST, require_sane
from strata.doctor.files import write_files
from strata.doctor.invariants import broken
from strata.doctor.plan import SCHEMA_VERSION, AllocationPlan, Reservation, Tier
from strata.doctor.planner import backend_for
from strata.doctor.request import Request
from strata.doctor.units import size
from strata.errors import PlanMismatch, UsageError
from strata.gguf.model_facts import ModelFacts

_AGAIN = "Make a new plan: strata plan MODEL -o FILE"


def save_plan(plan: AllocationPlan, path: Path) -> None:
    """Write a plan as indented JSON; a file that was there is replaced only by a complete one.

    Raises
    ------
    StrataError
        The path cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(plan), indent=2)
    write_files(
        {path: text + b"\n"}, f"save the plan as {path}", "Give a path in a folder that exists and can be written"
    )


def load_plan(path: Path) -> AllocationPlan:
    """Read a saved plan.

    Raises
    ------
    UsageError
        There is no such file, or it cannot be read.
    PlanMismatch
        The file holds no plan, or one of another schema.
    """
    asked = f"read the plan {path}"
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
    except OSError as error:
        raise UsageError(
            asked, error.strerror or str(error), "Give the path of a file that strata plan -o wrote"
        ) from error
    if len(text) > LARGEST:
        raise PlanMismatch(asked, f"the file is no plan: it is larger than {LARGEST >> 20} MiB", _AGAIN)
    try:
        version = msgspec.json.decode(text, type=_Versioned).schema_version
    except (msgspec.DecodeError, RecursionError) as error:
        raise PlanMismatch(asked, f"the file is no plan: {error}", _AGAIN) from error
    if version != SCHEMA_VERSION:
        raise PlanMismatch(
            asked, f"it has schema {version}, and this is Strata {__version__} with schema {SCHEMA_VERSION}", _AGAIN
        )
    try:
        plan = msgspec.json.decode(text, type=AllocationPlan)
        require_sane(msgspec.to_builtins(plan))
        return plan
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PlanMismatch(asked, f"a field is wrong: {error}", f"Correct it, or make a new one. {_AGAIN}") from error


def _contradiction(plan: AllocationPlan, backend: Backend) -> str | None:
    """Say what this plan chose that cannot be chosen for this model here, if anything."""
    if plan.experts.total != backend.experts.total:
        return f"it counts {plan.experts.total} experts, and the model has {backend.experts.total}"
    if plan.experts.minimum_slots != backend.minimum_slots:
        return f"its fewest expert slots are {plan.experts.minimum_slots}, and {backend.minimum_slots} are needed"
    return None if plan.kv in backend.kv_types else f"the KV cache cannot be {plan.kv} here"


def _needed(plan: AllocationPlan, backend: Backend) -> tuple[Reservation, ...]:
    """Return the lines that the runtime takes by this plan's choices, as large as they are here and now."""
    lie = {line.id: line.tier for line in plan.reservations}
    leanest = backend.host_choices[-1]
    staging = lie.get("staging_ring", lie.get("host_io", leanest.staging))  # a model that fits has no ring
    host = HostChoice(lie.get("embedding", leanest.embedding), staging)
    request = Request(
        context=plan.context,
        kv=plan.kv,
        chunks=(plan.chunk,),
        slots=plan.experts.slots,
        threads=plan.threads,
    )
    e = plan.experts
    fixed = backend.fixed_lines(request, plan.chunk, host)
    return fixed + backend.expert_lines(e.slots, e.pinned, e.pageable)


def _too_small(plan: AllocationPlan, lines: tuple[Reservation, ...]) -> Iterator[str]:
    """Say which lines hold less than the runtime takes, or lie elsewhere."""
    names = tier_names(plan)
    for needed in lines:
        line = plan.line(needed.id)
        if line is not None and line.tier is not needed.tier:
            yield f'"{needed.id}" belongs into the tier "{needed.tier}" and the plan has it in "{line.tier}"'
        elif line is None or line.bytes < needed.bytes:
            needs = size(needed.bytes)
            has = "no such line" if line is None else size(line.bytes)
            if line is not None and has == needs:
                needs, has = f"{needed.bytes:,} bytes", f"{line.bytes:,}"
            yield f'"{needed.id}" needs {needs} of {names[needed.tier]} and the plan has {has}'
    taken = {line.id for line in lines}
    for line in plan.reservations:
        if line.id not in taken:
            yield f'nothing takes its line "{line.id}"'


class _Versioned(msgspec.Struct):
    schema_version: int


def _as_measured(plan: AllocationPlan, needed: tuple[Reservation, ...], backend: Backend) -> AllocationPlan:
    """Charge what the facts say now for lines that the runtime does not take itself, such as the CUDA context."""
    now = {line.id: line for line in needed if line.id in backend.measured_lines}
    lines = tuple(
        msgspec.structs.replace(line, bytes=now[line.id].bytes, formula=now[line.id].formula)
        if line.id in now and line.bytes < now[line.id].bytes
        else line
        for line in plan.reservations
    )
    if lines == plan.reservations:
        return plan
    limits = backend.limits
    return msgspec.structs.replace(plan, reservations=lines, budgets=limits.budgets, shared=limits.shared)


def _other_slots(plan: AllocationPlan, backend: Backend) -> str | None:
    """Say whether the slots are shared out among the sizes of experts otherwise than the runtime knows them."""
    classes = backend.slot_classes(plan.experts.slots) if plan.experts.total else ()
    if plan.experts.classes == classes:
        return None
    return f"it shares its {plan.experts.slots} expert slots out otherwise than the runtime does"


def check_saved(plan: AllocationPlan, facts: Facts, model: ModelFacts) -> tuple[AllocationPlan, tuple[str, ...]]:
    """Check a saved plan against this machine and model before it is followed.

    Parameters
    ----------
    plan : AllocationPlan
        From `load_plan`; it may have been edited by hand.
    facts : Facts
        Of this machine, now.
    model : ModelFacts
        Of the file that is to be loaded.

    Returns
    -------
    plan : AllocationPlan
        The one to follow: the same, but for measured lines that have grown since and still fit.
    notes : tuple of str
        What has changed and does not matter, as sentences.

    Raises
    ------
    PlanMismatch
        The plan is for another model or device, does not add up, reserves less than the runtime takes, or needs
        memory that is not there now.
    """
    asked = f"follow the saved plan for {plan.model.name}"
    if plan.model.header_sha256 != model.header_sha256:
        raise PlanMismatch(asked, f"it was made for another file than {model.path} (their headers differ)", _AGAIN)
    if not plan.feasible:
        raise PlanMismatch(asked, "it says itself that it does not fit", _AGAIN)
    if faults := broken(plan):
        raise PlanMismatch(asked, f"it does not add up: {'; '.join(faults)}", _AGAIN)
    backend = backend_for(facts, model, plan.options)
    device = backend.device
    if (device.backend, device.id) != (plan.device.backend, plan.device.id):
        planned, here = (f"{each.name} ({each.backend}, {each.id})" for each in (plan.device, device))
        raise PlanMismatch(asked, f"it is for {planned}, and here is {here}", _AGAIN)
    if contradiction := _contradiction(plan, backend):
        raise PlanMismatch(asked, contradiction, _AGAIN)
    needed = _needed(plan, backend)
    followed = _as_measured(plan, needed, backend)
    if wrong := next(_too_small(followed, needed), None) or _other_slots(plan, backend):
        raise PlanMismatch(asked, wrong, _AGAIN)
    grown = [(old, new) for old, new in zip(plan.reservations, followed.reservations, strict=True) if old != new]
    plan = followed
    used = {tier: plan.planned_bytes(tier) for tier in Tier}
    for bound in backend.limits.bounds():
        if (over := -bound.left(used)) > 0:
            found = f"{size(over)} of {bound.name} that it needs are not free now"
            raise PlanMismatch(asked, found, f"Close other programs. {_AGAIN}")
    notes = list(backend.limits.notes)
    notes += [
        f"{new.what[0].upper()}{new.what[1:]} took {size(old.bytes)} when the plan was made, and {size(new.bytes)} now."
        for old, new in grown
    ]
    if plan.strata_version != __version__:
        notes.append(f"The plan was made by Strata {plan.strata_version}; this is {__version__}.")
    if plan.device.name != device.name:
        notes.append(f"The plan calls the device {plan.device.name}; it is {device.name} now.")
    return plan, tuple(notes)
