"""How the probes themselves fared: a probe that hangs or dies is a symptom, and never hides the rest."""

from __future__ import annotations

from strata.doctor.checks.check import Result, check, fail, passed
from strata.doctor.checks.machine import GROUPS, WHERE, Machine
from strata.doctor.facts import ProbeStatus


@check("STR-PROBE-HUNG", "Probes answer in time", needs=())
def hung(m: Machine) -> Result | None:
    """The driver is asked in a child process with a time limit. When `nvidia-smi` never returns either, the driver
    is wedged, often after a GPU fell off the bus or a suspend; only a restart cures that."""
    late = [group for group in GROUPS if m.facts_of(group).status is ProbeStatus.TIMED_OUT]
    if not late:
        return passed("Every probe answered in time.")
    return fail(
        f"No answer in time from: {', '.join(late)}.",
        *(m.says(g, m.reason(g)) for g in late),
        remedy=m.per_os(
            linux="sudo dmesg | grep -iE 'xid|nvrm' shows what the driver says; then reboot",
            windows="Restart Windows; if it comes back, install the NVIDIA driver anew, 'clean installation' ticked",
            wsl="In Windows: wsl --shutdown, then start WSL again; if it comes back, restart Windows",
        ),
    )


@check("STR-PROBE-CRASH", "Probes end by themselves", needs=())
def crashed(m: Machine) -> Result | None:
    """A probe's process died (a segmentation fault in `cuInit`, for example). Strata itself goes on, but the
    library that crashed a probe would crash a run as well: library and driver rarely belong together then."""
    dead = [group for group in GROUPS if m.facts_of(group).status is ProbeStatus.CRASHED]
    if not dead:
        return passed("No probe crashed.")
    evidence = []
    for group in dead:
        evidence.append(m.says(group, m.reason(group)))
        error = m.facts_of(group).error
        if error and error.stderr:
            evidence.append(
                m.says(group, error.stderr.strip().splitlines()[-1] if error.stderr.strip() else "no output")
            )
    return fail(
        f"The probe's process crashed: {', '.join(f'{g} ({WHERE[g]})' for g in dead)}.",
        *evidence,
        remedy="Reinstall the NVIDIA driver, and CuPy in a fresh environment: pip install 'strata[cuda13]'",
    )
