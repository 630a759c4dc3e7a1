"""From a plan to a loaded model: shown, loaded with progress, and planned once more when a memory refuses a line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from strata.cli.output import err, say, unicode_ok, warn
from strata.cli.preflight import OpenModel, make_or_load_plan, require_feasible, take_facts
from strata.cli.progress import steps
from strata.errors import AllocationFailed

if TYPE_CHECKING:
    from strata.doctor.facts import Facts
    from strata.doctor.plan import AllocationPlan, PlanOptions
    from strata.runtime.engine import Engine
    from strata.runtime.runlog import RunLog


def versions() -> dict[str, str]:
    """Return the versions that a run's log begins with."""
    import platform
    from importlib import metadata

    import numpy

    from strata import __version__

    found = {"strata": __version__, "python": platform.python_version(), "numpy": numpy.__version__}
    for name in ("cupy-cuda12x", "cupy-cuda13x", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def plan_to_run(
    model: OpenModel, facts: Facts, options: PlanOptions, saved: Path | None = None
) -> tuple[AllocationPlan, tuple[str, ...]]:
    """Make or load a plan as `make_or_load_plan` does, for the CPU where the choice was left open and the GPU cannot.

    It cannot run what its kernels do not know, or what does not fit; a budget for VRAM is a choice of the GPU.

    Returns
    -------
    plan : AllocationPlan
    notes : tuple of str
    """
    from strata.runtime.cuda.support import why_not

    plan, notes = make_or_load_plan(model.facts, facts, options, saved)
    chosen = options.device, options.gpu, options.vram_budget_bytes, options.vram_reserve_bytes
    if saved is not None or plan.device.backend != "cuda" or chosen != ("auto", None, None, None):
        return plan, notes
    found = why_not(model.file, model.facts, plan.kv)
    if found is None and plan.shortfall is not None:
        found = plan.shortfall.sentence.removesuffix(".")
    if found is None:
        return plan, notes
    on_cpu, _ = make_or_load_plan(model.facts, facts, msgspec.structs.replace(options, device="cpu"))
    return (on_cpu, (f"This runs on the CPU: {found}.",)) if on_cpu.feasible else (plan, notes)


def show_plan(plan: AllocationPlan, notes: tuple[str, ...], *, quiet: bool) -> None:
    """Show a plan on stderr; `quiet` leaves all but the notes out."""
    from strata.doctor.plan_table import plan_table

    for note in notes:
        warn(note)
    if not quiet:
        err().print(plan_table(plan, unicode=unicode_ok(sys.stderr)))
        err().print()


def load_engine(model: OpenModel, plan: AllocationPlan, options: PlanOptions, log: RunLog) -> Engine:
    """Load by the plan; when a memory refuses a line, plan once more with what it gave, and say so."""
    try:
        return _load_once(model, plan, log)
    except AllocationFailed as refusal:
        say(f"{refusal.asked}: {refusal.found}")
        options, what = _with_what_was_granted(plan, options, refusal)
        say(f"Planning once more, with no more {what} than was granted.")
        budgets = {name: getattr(options, name) for name in ("vram_budget_bytes", "ram_budget_bytes")}
        log.event("replan", refused=refusal.line, **budgets, pinned_budget_bytes=options.pinned_budget_bytes)
    plan, _ = make_or_load_plan(model.facts, take_facts(model.file.path), options)
    show_plan(plan, (), quiet=False)
    require_feasible(plan)
    return _load_once(model, plan, log)


def _with_what_was_granted(
    plan: AllocationPlan, options: PlanOptions, refusal: AllocationFailed
) -> tuple[PlanOptions, str]:
    """Return the options with the refused memory's budget at what it granted, and its name.

    Granted are the lines of that memory in front of the refused one, and on a GPU what was free besides.
    """
    from strata.doctor.plan import Tier
    from strata.runtime.memory import MemoryRefused

    on_cpu = plan.device.backend == "numpy"
    lines = [line for line in plan.reservations if line.tier is not Tier.FILE]
    at = next(index for index, line in enumerate(lines) if line.id == refusal.line)
    tier = lines[at].tier
    options = msgspec.structs.replace(options, device="cpu" if on_cpu else "cuda")
    if on_cpu or tier is Tier.PAGEABLE:
        granted = sum(line.bytes for line in lines[:at] if on_cpu or line.tier is not Tier.VRAM)
        return msgspec.structs.replace(options, ram_budget_bytes=granted), "RAM"
    granted = sum(line.bytes for line in lines[:at] if line.tier is tier)
    if tier is Tier.PINNED:
        return msgspec.structs.replace(options, pinned_budget_bytes=granted), "page-locked memory"
    cause = refusal.__cause__
    granted += (cause.free_bytes or 0) if isinstance(cause, MemoryRefused) else 0
    return msgspec.structs.replace(options, vram_budget_bytes=granted), "VRAM"


def _load_once(model: OpenModel, plan: AllocationPlan, log: RunLog) -> Engine:
    from strata.runtime.engine import Engine

    with steps() as progress:
        return Engine.load(
            model.file,
            plan,
            progress=lambda done, total: progress("loading", done, total),
            compiling=lambda done, total: progress(f"making kernels ready, {done} of {total}", None, None),
            log=log.event,
        )
