"""Symptoms, after the checks of their causes: probes that hang or die, and faults in the kernel's log."""

from __future__ import annotations

import re

from strata.doctor.checks.check import Result, check, fail, passed, warn
from strata.doctor.checks.machine import GROUPS, WHERE, Machine
from strata.doctor.facts import ProbeStatus
from strata.doctor.units import counted

OF_A_PROGRAM = (13, 31, 43, 45)  # Xid numbers of faults that a program's kernel makes; they end with the program


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
        evidence += [m.says(group, line) for line in last_words(error.stderr if error and error.stderr else "")]
    return fail(
        f"The probe's process crashed: {', '.join(f'{g} ({WHERE[g]})' for g in dead)}.",
        *evidence,
        remedy=f"Reinstall the NVIDIA driver, and CuPy in a fresh environment: {m.pip_install()}",
    )


def last_words(stderr: str) -> list[str]:
    """Return what a crash says of itself: Python's fatal error and where it was, else the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    fatal = next((n for n, line in enumerate(lines) if line.startswith(("Fatal Python error", "Windows fatal"))), None)
    if fatal is None:
        return lines[-1:]
    return [lines[fatal], *[line for line in lines[fatal:] if line.startswith("File ")][:1]]


@check("STR-DRV-XID", "GPU faults in the kernel log", needs=("host.kernel_log",))
def xid(m: Machine) -> Result | None:
    """The driver writes an Xid line for every GPU fault. Those of a program (13, 31, 43, 45) are over when it ends;
    48, 63, 64, 92, 94, 95 are memory errors of the card, 74 is the link between cards, 62 and 119 the card's own
    controllers."""
    lines = [
        (line, found[1]) for line in m.host.kernel_log or () if (found := re.search(r"Xid .*?: (\d{1,4})\b", line))
    ]
    lasting = [line for line, number in lines if int(number) not in (*OF_A_PROGRAM, 79)]  # 79: STR-DRV-LOST
    latest = {number: line for line, number in lines if line in lasting}  # one of each kind
    if not lasting:
        return passed("The kernel's log shows no fault of a GPU itself.")
    return warn(
        f"The driver logged {counted(len(lasting), 'GPU fault')} since the system started.",
        *(m.says("host.kernel_log", line) for line in latest.values()),
        remedy="Look the number up: https://docs.nvidia.com/deploy/xid-errors; a reboot clears the GPU's state",
    )
