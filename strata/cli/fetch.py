"""A hub's model, to be run: planned by its header before its gigabytes are fetched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strata.cli.loading import plan_to_run, show_plan
from strata.cli.output import say
from strata.cli.preflight import OpenModel, made_with, open_model, require_feasible, take_facts

if TYPE_CHECKING:
    from strata.cli.simulation import Simulated
    from strata.doctor.facts import Facts
    from strata.doctor.plan import AllocationPlan, PlanOptions
    from strata.runtime.runlog import RunLog


@dataclass(frozen=True)
class PlannedRun:
    """A plan and what it rests on; `options` are those of a simulated machine where there is one."""

    facts: Facts
    options: PlanOptions
    simulated: Simulated | None
    plan: AllocationPlan
    notes: tuple[str, ...]


def plan_run(
    model: OpenModel,
    options: PlanOptions,
    log: RunLog | None = None,
    *,
    saved: Path | None = None,
    simulate: Path | None = None,
    shrink: float | None = None,
) -> PlannedRun:
    """Take the facts of this machine, or of the one to simulate, and plan by them.

    Parameters
    ----------
    model : OpenModel
        Its header is enough.
    options : PlanOptions
    log : RunLog, optional
        Begins with what the plan rests on.
    saved : Path, optional
        A saved plan.
    simulate : Path, optional
        Recorded facts.
    shrink : float, optional
        What to divide a simulated machine's memories by.

    Raises
    ------
    StrataError
        A saved plan is not for this.
    """
    from strata.cli.simulated_run import simulated_machine
    from strata.doctor.versions import versions
    from strata.runtime.runlog import fingerprint

    simulated = simulated_machine(simulate, model, options, saved=saved, shrink=shrink)
    if simulated:
        facts, options = simulated.facts, simulated.options
    else:
        facts = take_facts(model.file.path, made_with(options, saved))
    if log is not None:
        log.event("start", versions=versions(), facts_sha256=fingerprint(facts))
    return PlannedRun(facts, options, simulated, *plan_to_run(model, facts, options, saved))


def open_to_run(model: str, plan: Callable[[OpenModel], PlannedRun], *, quiet: bool) -> OpenModel:
    """Open MODEL; where it has to be fetched from a hub first, refuse it by its header before that.

    Parameters
    ----------
    model : str
    plan : callable
        Plans, and refuses what cannot be run.
    quiet : bool
        Leave out the table of a plan that does not fit.

    Raises
    ------
    StrataError
        As `open_model` and `plan` do; `PlanInfeasible` where it does not fit, and nothing but its header was fetched.
    """
    if not model.startswith("hf:"):
        return open_model(model)
    from strata.doctor.units import size
    from strata.gguf.reader import open_gguf
    from strata.sources.hub.model import is_header

    header = open_model(model, header_only=True)
    with header.file:
        path = header.file.path
        if not is_header(model, path):
            return OpenModel(open_gguf(path), header.facts)  # this time refused if it was cut short
        planned = plan(header)
        if not planned.plan.feasible and not quiet:
            show_plan(planned.plan)
        require_feasible(planned.plan)
    say(f"By its header, {header.facts.name} fits. Its {size(header.facts.file_bytes)} are fetched.")
    return open_model(model)
