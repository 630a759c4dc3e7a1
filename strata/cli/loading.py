"""From a plan to a loaded model: shown, loaded with progress, and planned once more when a memory refuses a line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from strata.cli.output import err, unicode_ok, warn
from strata.cli.preflight import OpenModel, make_or_load_plan, take_facts
from strata.cli.progress import steps
from strata.errors import AllocationFailed

if TYPE_CHECKING:
    from strata.cli.replan import Retry
    from strata.doctor.facts import Facts
    from strata.doctor.plan import AllocationPlan, PlanOptions
    from strata.runtime.engine import Engine
    from strata.runtime.runlog import RunLog

LoadOnce = Callable[["AllocationPlan"], "Engine"]


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
    found = why_not(model.file, model.facts, plan.kv, _shared_memory(facts, plan))
    if found is None and plan.shortfall is not None:
        found = plan.shortfall.sentence.removesuffix(".")
    if found is None:
        return plan, notes
    on_cpu, _ = make_or_load_plan(model.facts, facts, msgspec.structs.replace(options, device="cpu"))
    return (on_cpu, (f"This runs on the CPU: {found}.",)) if on_cpu.feasible else (plan, notes)


def _shared_memory(facts: Facts, plan: AllocationPlan) -> int | None:
    """Return the shared memory of a block on the plan's GPU, where its compute capability is known."""
    from strata.doctor.gpus import gpus
    from strata.kernels.cuda_layout import SHARED_MEMORY

    for gpu in gpus(facts):
        if gpu.uuid == plan.device.id:
            known = (gpu.cuda and gpu.cuda.compute_capability) or (gpu.nvml and gpu.nvml.compute_capability)
            return SHARED_MEMORY.get(known or "")
    return None


def show_plan(plan: AllocationPlan) -> None:
    """Print a plan's table to stderr."""
    from strata.doctor.plan_table import plan_table

    err().print(plan_table(plan, unicode=unicode_ok(sys.stderr)))
    err().print()


def load(model: OpenModel, plan: AllocationPlan, options: PlanOptions, log: RunLog, *, quiet: bool) -> Engine:
    """Load by the plan; when a memory refuses a line, plan once more with what it grants, and say so.

    Parameters
    ----------
    model : OpenModel
    plan : AllocationPlan
        Feasible.
    options : PlanOptions
        As typed: whether the CPU may stand in for a GPU.
    log : RunLog
    quiet : bool
        Leave out the second plan's table.

    Raises
    ------
    PlanInfeasible
        What the system grants is too little for any plan.
    AllocationFailed
        The second plan was refused as well, or no other helps. Nothing stays allocated.
    """
    if plan.device.backend == "numpy":
        return _load_in_ram(model, plan, log, quiet=quiet)
    from strata.doctor.planner import make_plan
    from strata.runtime.wsl import under_wsl

    facts: list[Facts] = []  # as they are after the refusal, taken once

    def plan_again(retry: Retry) -> AllocationPlan:
        facts[:] = facts or [take_facts(model.file.path, retry.options)]
        return make_plan(facts[0], model.facts, retry.options)

    return load_on_device(
        plan,
        log,
        lambda plan: load_once(model, plan, log),
        plan_again,
        wsl=under_wsl(),
        may_use_cpu=options.device == "auto",
        quiet=quiet,
    )


def load_on_device(
    plan: AllocationPlan,
    log: RunLog,
    load_by: LoadOnce,
    plan_again: Callable[[Retry], AllocationPlan],
    *,
    wsl: bool,
    may_use_cpu: bool,
    quiet: bool,
) -> Engine:
    """Load by a plan for a device; when a memory refuses a line, plan once more without what was refused.

    Parameters
    ----------
    plan_again : callable
        Makes another plan, as a `Retry` asks.
    wsl : bool
        It runs under WSL2, to be said.
    quiet : bool
        Say that there is a second plan, and do not show it.

    Raises
    ------
    AllocationFailed
        It was refused again, or nothing can be planned without it. Nothing stays allocated.
    """
    from strata.cli.replan import other_ways, refusal, say_refused, told

    try:
        return load_by(plan)
    except AllocationFailed as error:
        first = error
    retry = second = None
    for retry in other_ways(plan, first, may_use_cpu=may_use_cpu):
        second = plan_again(retry)
        if second.feasible:
            break
    if retry is None or second is None or not second.feasible:
        raise refusal(plan, first, wsl=wsl, no_plan=second) from first
    say_refused(told(plan, first, wsl=wsl), retry.said)
    log.event("replan", refused=first.line, options=retry.options)
    if not quiet:
        show_plan(second)
    try:
        return load_by(second)
    except AllocationFailed as error:
        raise refusal(second, error, wsl=wsl, again=True) from error


def _load_in_ram(model: OpenModel, plan: AllocationPlan, log: RunLog, *, quiet: bool) -> Engine:
    from strata.cli.ram_replan import plan_in_less_ram

    try:
        return load_once(model, plan, log)
    except AllocationFailed as refusal:
        second = plan_in_less_ram(model, plan, refusal, log)
    if not quiet:
        show_plan(second)
    return load_once(model, second, log)


def load_once(model: OpenModel, plan: AllocationPlan, log: RunLog, **memory: Any) -> Engine:
    """Load by a plan and show how far it is; `memory` is what `Engine.load` takes of a simulated one."""
    from strata.runtime.engine import Engine
    from strata.runtime.profile import profile_file

    with steps() as progress:
        engine = Engine.load(
            model.file,
            plan,
            progress=lambda done, total: progress("loading", done, total),
            compiling=lambda done, total: progress(f"making kernels ready, {done} of {total}", None, None),
            log=log.event,
            profile=profile_file(plan.model.header_sha256),
            **memory,
        )
    for note in engine.notes:
        warn(note)
    return engine
