"""What the checks concluded, and the document that a report is, as frozen data with a JSON form.

A finding never rests on a guess: a fact that could not be read makes it ``unknown``, never ``pass`` or ``fail``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from strata.doctor.facts import Facts
from strata.doctor.plan import AllocationPlan
from strata.errors import ExitCode

SCHEMA_VERSION = 1


class Status(StrEnum):
    """How a check ended."""

    PASS = "pass"
    WARN = "warn"  # it will start, but slower or with less than the machine could give
    FAIL = "fail"  # it will not start, or not as asked
    UNKNOWN = "unknown"  # a fact it rests on could not be read
    SKIPPED = "skipped"  # not run, by choice, or for want of a model or a plan
    CRASHED = "crashed"  # the check itself broke: a bug of ours


class Evidence(msgspec.Struct, frozen=True):
    """One fact that a finding rests on, and where it was read."""

    text: str
    source: str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check concluded about one machine."""

    id: str  # stable, e.g. "STR-WSL-PIN"
    title: str
    status: Status
    what: str  # one sentence
    evidence: tuple[Evidence, ...] = ()
    remedy: str | None = None  # the exact command or setting; None when nothing is to be done


class Outcome(StrEnum):
    """The verdict in one word."""

    READY = "ready"
    READY_WITH_WARNINGS = "ready_with_warnings"
    NOT_READY = "not_ready"
    UNDETERMINED = "undetermined"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of every report."""

    outcome: Outcome
    sentence: str
    exit_code: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole document: what ``strata doctor --json`` prints and a bundle holds."""

    schema_version: int = SCHEMA_VERSION
    strata_version: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    facts: Facts
    plan: AllocationPlan | None = None


def report_schema() -> dict[str, Any]:
    """Return the JSON schema of `Report`, as published in docs/report.schema.json."""
    schema = msgspec.json.schema(Report)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Strata report", **schema}


def exit_code(outcome: Outcome, *, strict: bool = False) -> ExitCode:
    """Return the exit status for `outcome`; `strict` turns warnings into a failure."""
    match outcome:
        case Outcome.READY:
            return ExitCode.OK
        case Outcome.READY_WITH_WARNINGS:
            return ExitCode.FAILED if strict else ExitCode.OK
        case Outcome.NOT_READY:
            return ExitCode.FAILED
        case Outcome.UNDETERMINED:
            return ExitCode.UNDETERMINED
