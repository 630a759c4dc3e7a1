"""The catalogue: every check there is, in the order a report lists them, and how they are run."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from strata.doctor.checks import (
    context,
    cuda,
    cupy,
    disk,
    driver,
    gpu,
    host,
    last_run,
    model,
    pinned,
    processor,
    speed,
    symptoms,
    vram,
    wsl,
)
from strata.doctor.checks.check import Check
from strata.doctor.checks.machine import Machine
from strata.doctor.findings import Finding, Status
from strata.errors import UsageError

# What stops a start comes first, and causes before symptoms: the verdict names the first.
FAMILIES = (
    driver,
    wsl,
    gpu,
    cupy,
    context,
    cuda,
    symptoms,
    pinned,
    vram,
    last_run,
    model,
    host,
    processor,
    speed,
    disk,
)
CATALOGUE: dict[str, Check] = {
    entry.id: entry for family in FAMILIES for entry in vars(family).values() if isinstance(entry, Check)
}


def find_check(id: str) -> Check:
    """Return the check called `id`, in any case.

    Raises
    ------
    UsageError
        When there is no such check; it names the nearest ones.
    """
    found = CATALOGUE.get(id.strip().upper())
    if found:
        return found
    near = difflib.get_close_matches(id.upper(), CATALOGUE, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(f"find the check {id!r}", "no check has that id", f"{hint}strata doctor --list-checks shows all")


def run_checks(machine: Machine, *, only: Iterable[str] = (), skip: Iterable[str] = ()) -> tuple[Finding, ...]:
    """Run the catalogue over `machine`.

    Parameters
    ----------
    machine : Machine
        Facts, and the model, plan and options when there are any.
    only, skip : iterable of str
        Check ids: run none but these (one that does not apply is a ``skipped`` finding then); leave these out (each
        becomes a ``skipped`` finding).

    Raises
    ------
    UsageError
        When an id names no check.
    """
    left_out = {find_check(id).id for id in skip}
    asked_for = {find_check(id).id for id in only}
    findings = []
    for check in CATALOGUE.values():
        if check.id in left_out:
            findings.append(
                Finding(id=check.id, title=check.title, status=Status.SKIPPED, what="Left out, as asked with --skip.")
            )
        elif not asked_for or check.id in asked_for:
            finding = check.run(machine)
            if finding is None and asked_for:  # who asks for it by name wants an answer
                what = "It does not apply to this machine."
                finding = Finding(id=check.id, title=check.title, status=Status.SKIPPED, what=what)
            findings += [finding] if finding else []
    return tuple(findings)
