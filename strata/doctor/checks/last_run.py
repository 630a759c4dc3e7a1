"""What the last run's log says of memory that its plan had and the system refused."""

from __future__ import annotations

from strata.doctor.checks.check import Result, check, passed, warn
from strata.doctor.checks.machine import Machine, error_text

OTHER_CHECKS = ("register", "lock")  # in the name of a call that has a check of its own


@check("STR-RUN-REFUSED", "Memory refused in the last run", needs=("run.refusal",))
def refused(m: Machine) -> Result | None:
    """The plan fitted and the system refused one of its lines all the same: another program took the memory between
    plan and load, or a limit applies that nobody reports (page-locked memory, the commit limit of Windows)."""
    error, line = m.last_run.refusal, m.last_run.refused_line
    if error is None:
        return None
    call = (error.call or "").lower()
    if line is None or any(word in call for word in OTHER_CHECKS):
        return passed("No line of the last run's plan was refused for want of memory.")
    if "hostalloc" in call or "mallochost" in call:
        memory = "page-locked memory"
        remedy = "strata doctor MODEL --deep measures what is granted; --pinned-budget 0 needs none"
    elif "malloc" in call:
        memory = "VRAM"
        remedy = "Run it again: it plans on what is free now; if it comes back, keep more free: --vram-reserve-mib 1024"
    else:
        memory, remedy = "RAM", "Close other programs, or plan with less: --ram-budget SIZE"
    return warn(
        f'The last run was refused {memory} that its plan had for "{line}".',
        m.says("run.refusal", error_text(error)),
        remedy=remedy,
    )
