"""What a check is, and how it is declared and run.

A check is a pure function from a `Machine` to a `Result`, or None where it does not apply. It says what it found;
`Check.run` adds what every check owes: a pass needs every fact in ``needs`` to be known, "does not apply" needs
every fact in ``scope`` to be known, and a check that raises becomes a finding like any other.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from strata.doctor.checks.machine import Machine
from strata.doctor.findings import Evidence, Finding, Status


@dataclass(frozen=True)
class Result:
    """What a check's function concluded; the check's id and title make it a finding."""

    status: Status
    what: str
    evidence: tuple[Evidence, ...] = ()
    remedy: str | None = None


def passed(what: str, *evidence: Evidence) -> Result:
    """Return that all is well; it becomes ``unknown`` when a needed fact is not known."""
    return Result(Status.PASS, what, evidence)


def warn(what: str, *evidence: Evidence, remedy: str) -> Result:
    """Return that it will work, but not as well as it could."""
    return Result(Status.WARN, what, evidence, remedy)


def fail(what: str, *evidence: Evidence, remedy: str) -> Result:
    """Return that it will not work as asked."""
    return Result(Status.FAIL, what, evidence, remedy)


def unknown(what: str, *evidence: Evidence) -> Result:
    """Return that the facts, though present, cannot be made sense of."""
    return Result(Status.UNKNOWN, what, evidence)


Body = Callable[[Machine], Result | None]


@dataclass(frozen=True)
class Check:
    """One entry of the catalogue.

    Attributes
    ----------
    needs : tuple of str
        Facts without which it cannot pass, as paths (``"nvml.gpus.display_active"``), or ``"model"``, ``"plan"``.
    scope : tuple of str
        Facts without which it cannot be said not to apply.
    essential : bool
        While it is unknown, the verdict is that readiness could not be determined.
    explanation : str
        What the failure looks like, what it is and what helps: the function's docstring.
    """

    id: str
    title: str
    needs: tuple[str, ...]
    scope: tuple[str, ...]
    essential: bool
    explanation: str
    body: Body

    def run(self, machine: Machine) -> Finding | None:
        """Return this check's finding on `machine`, or None where the check does not apply."""
        try:
            result = self._conclude(machine)
        except Exception as error:  # noqa: BLE001 - the boundary that keeps one broken check from hiding the others
            where = traceback.extract_tb(error.__traceback__)[-1]
            at = Evidence(text=f"{error!r} in {where.name}, line {where.lineno}", source="this check")
            result = Result(Status.CRASHED, "The check itself broke: a bug in Strata.", (at,), "Send us: strata report")
        if result is None:
            return None
        return Finding(
            id=self.id,
            title=self.title,
            status=result.status,
            what=result.what,
            evidence=result.evidence,
            remedy=result.remedy,
        )

    def _conclude(self, machine: Machine) -> Result | None:
        result = self.body(machine)
        if result is not None and result.status is not Status.PASS:
            return result
        gaps = [gap for path in (self.needs if result else self.scope) if (gap := machine.missing(path))]
        if not gaps:
            return result
        if any(gap.not_here for gap in gaps):
            return None
        why = tuple(Evidence(text=f"{gap.path}: {gap.reason}", source=machine.source(gap.path)) for gap in gaps)
        if all(gap.not_asked for gap in gaps):
            return Result(Status.SKIPPED, f"{gaps[0].reason}.", why)
        return Result(Status.UNKNOWN, "Cannot tell: what it rests on could not be read.", why)


def check(
    id: str, title: str, *, needs: tuple[str, ...], scope: tuple[str, ...] = (), essential: bool = False
) -> Callable[[Body], Check]:
    """Declare a check: the decorated function's docstring is its explanation."""

    def declare(body: Body) -> Check:
        return Check(id, title, needs, scope, essential, inspect.cleandoc(body.__doc__ or ""), body)

    return declare
