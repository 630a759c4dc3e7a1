"""Loading on a simulated machine: by the plan; once refused, by one more that is said aloud, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from strata.cli.loading import load_on_device, load_once
from strata.cli.simulation import Simulated, simulate
from strata.doctor.plan_io import load_plan
from strata.doctor.planner import make_plan
from strata.doctor.simulated_backend import SIMULATED
from strata.errors import PlanMismatch
from strata.runtime.runlog import log_folder
from strata.runtime.simulated import SimulatedDevice

if TYPE_CHECKING:
    from strata.cli.preflight import OpenModel
    from strata.cli.replan import Retry
    from strata.doctor.facts import Facts
    from strata.doctor.plan import AllocationPlan, PlanOptions
    from strata.runtime.engine import Engine
    from strata.runtime.runlog import RunLog

_THREADS = 2  # of a run on the CPU that stands in for a recorded GPU: the facts tell of another processor
_AS_RECORDED = "RAM is what the recorded machine has: without its GPU, nothing is divided."


def simulated_log_folder() -> Path:
    """Return where the logs of simulated runs lie: apart, since they say nothing of this machine."""
    return log_folder() / "simulated"


def simulated_machine(
    facts: Path | None, model: OpenModel, options: PlanOptions, *, saved: Path | None, shrink: float | None
) -> Simulated | None:
    """Return the machine of --simulate, None without that option.

    Parameters
    ----------
    facts : Path or None
        What --simulate names.
    saved : Path or None
        A saved plan: the machine is as small as when it was made.
    shrink : float, optional
        What to divide its memories by.

    Raises
    ------
    PlanMismatch
        The saved plan is for a simulated machine and none is given, or the other way round.
    """
    if saved is not None:
        plan = load_plan(saved)
        _require_where(plan, simulated=facts is not None)
        shrink = plan.options.shrink
    return None if facts is None else simulate(facts, model.facts, options, shrink=shrink)


def load_simulated(
    model: OpenModel, plan: AllocationPlan, simulated: Simulated, log: RunLog, *, quiet: bool = False
) -> Engine:
    """Load by the plan; when a memory refuses a line, plan once more without what was refused.

    Parameters
    ----------
    quiet : bool
        Say that there is a second plan, and do not show it.

    Raises
    ------
    AllocationFailed
        It was refused again, or nothing can be planned without it. Nothing stays allocated.
    """
    device = SimulatedDevice(simulated.machine)
    on_device = {"take": device.take, "held": device.held_bytes}

    def plan_again(retry: Retry) -> AllocationPlan:
        if not retry.on_cpu:
            return make_plan(simulated.facts, model.facts, retry.options)
        second = make_plan(_on_this_cpu(simulated.facts), model.facts, retry.options)
        # It is computed here, so nothing is said of how fast it would be there.
        return msgspec.structs.replace(second, expected=None, notes=(*second.notes, _AS_RECORDED))

    return load_on_device(
        plan,
        log,
        lambda plan: load_once(model, plan, log, **(on_device if plan.device.backend == SIMULATED else {})),
        plan_again,
        wsl=bool(simulated.facts.host.value and simulated.facts.host.value.wsl == "wsl2"),
        may_use_cpu=simulated.may_use_cpu,
        quiet=quiet,
    )


def _require_where(plan: AllocationPlan, *, simulated: bool) -> None:
    """Refuse a saved plan for a simulated machine without that machine, and one for a real machine with one."""
    if plan.device.backend == SIMULATED and not simulated:
        raise PlanMismatch(
            f"follow the saved plan for {plan.model.name}",
            f"it is for {plan.device.name}",
            "Give the recorded facts too: --simulate FACTS",
        )
    if plan.device.backend != SIMULATED and simulated:
        raise PlanMismatch(
            f"follow the saved plan for {plan.model.name} on a simulated machine",
            f"it is for {plan.device.name}, not simulated",
            "Make one with strata plan MODEL --simulate FACTS -o FILE, or leave --simulate out",
        )


def _on_this_cpu(facts: Facts) -> Facts:
    """Return the facts with the processors that really compute."""
    host = facts.host
    if host.value is None:
        return facts
    value = msgspec.structs.replace(host.value, cpu_physical=_THREADS)
    return msgspec.structs.replace(facts, host=msgspec.structs.replace(host, value=value))
