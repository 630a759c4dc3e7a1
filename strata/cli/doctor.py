"""`strata doctor`: what this machine can do, what stands in the way, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strata.cli.output import emit_json, out, say, stop
from strata.cli.preflight import make_or_load_plan, open_model, take_facts, with_last_run
from strata.errors import ExitCode, Undetermined

if TYPE_CHECKING:
    from strata.doctor.plan import PlanOptions


@dataclass(frozen=True)
class DoctorRequest:
    """The command line of `strata doctor`, but for what the planner reads."""

    model: str | None
    facts_file: Path | None
    save_facts: Path | None
    only: tuple[str, ...]
    skip: tuple[str, ...]
    strict: bool
    verbose: bool
    json: bool


def list_checks(*, json: bool) -> None:
    """Print every check's id and title."""
    from strata.doctor.catalogue import check_entries, check_list

    if json:
        emit_json(check_entries())
    else:
        out().print(check_list())


def explain_check(id: str, *, json: bool) -> None:
    """Print what one check looks at and what its failure means."""
    from strata.doctor.catalogue import check_entries, check_page

    if json:
        emit_json(check_entries(id)[0])
    else:
        out().print(check_page(id))


def examine(request: DoctorRequest, options: PlanOptions) -> None:
    """Carry out `strata doctor`; the verdict decides the exit code."""
    from strata.doctor.diagnose import diagnose
    from strata.doctor.report import TerminalReport

    opened = open_model(request.model, header_only=True) if request.model else None
    facts = take_facts(opened.file.path if opened else None, request.facts_file)
    if request.facts_file is None:
        facts = with_last_run(facts)
    if request.save_facts is not None:
        from strata.doctor.facts_io import write_facts
        from strata.doctor.redact import Redactor

        write_facts(Redactor().value(facts), request.save_facts)
        say(f"The facts are saved, names and serials replaced: {request.save_facts}")
    plan = None
    if opened:
        try:
            plan, _ = make_or_load_plan(opened.facts, facts, options)
        except Undetermined as error:  # the checks say what is unknown; the report is worth having without a plan
            say(f"No plan: {error}")
    report = diagnose(
        facts,
        model=opened.facts if opened else None,
        plan=plan,
        options=options,
        only=request.only,
        skip=request.skip,
        strict=request.strict,
    )
    if request.json:
        emit_json(report)
    else:
        out().print(TerminalReport(report, verbose=request.verbose))
    stop(ExitCode(report.verdict.exit_code))
