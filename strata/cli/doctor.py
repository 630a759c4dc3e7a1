"""`strata doctor`: what this machine can do, what stands in the way, and what to do about it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.cli.output import emit_json, out, say, stop, unicode_ok
from strata.cli.preflight import OpenModel, open_model, plan_or_why_not, take_facts, with_last_run
from strata.cli.progress import steps
from strata.errors import ExitCode, Undetermined, UsageError

if TYPE_CHECKING:
    from strata.doctor.facts import Facts
    from strata.doctor.plan import AllocationPlan, PlanOptions


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
    deep: bool = False


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

    if request.deep:
        _require_what_deep_needs(request)
    opened = open_model(request.model, header_only=True) if request.model else None
    facts = take_facts(opened.file.path if opened else None, options, request.facts_file)
    measured = None
    if request.deep and opened:
        measured = _measure_deep(facts, opened, options)
    if measured:
        facts, options = measured
    if request.facts_file is None:
        facts = with_last_run(facts)
    if request.save_facts is not None:
        from strata.doctor.facts_io import write_facts
        from strata.doctor.redact import Redactor

        write_facts(Redactor().value(facts), request.save_facts)
        say(f"The facts are saved, names and serials replaced: {request.save_facts}")
    plan, no_plan = plan_or_why_not(opened, facts, options)
    report = diagnose(
        facts,
        model=opened.facts if opened else None,
        plan=plan,
        options=options,
        only=request.only,
        skip=request.skip,
        strict=request.strict,
        no_plan=no_plan,
    )
    if request.json:
        emit_json(report)
    else:
        out().print(TerminalReport(report, verbose=request.verbose))
        if measured and plan:
            from strata.doctor.plan_table import plan_table

            out().print()
            out().print(plan_table(plan, unicode=unicode_ok(sys.stdout)))
            _say_how_to_use(plan, request.model)
    stop(ExitCode(report.verdict.exit_code))


def _say_how_to_use(plan: AllocationPlan, model: str | None) -> None:
    """Say the option that makes a run page-lock what was measured: a run itself tries only a little."""
    from strata.doctor.plan import Tier

    locked = next((b.usable_bytes for b in plan.budgets if b.tier is Tier.PINNED), 0)
    if plan.feasible and locked >> 20:
        say(f"To run with what was measured: strata run {model} --pinned-budget {locked >> 20}MiB")


def _require_what_deep_needs(request: DoctorRequest) -> None:
    asked = "measure page-locked memory to a model's need (--deep)"
    if request.model is None:
        raise UsageError(asked, "no model is given, so there is no need to measure to", "strata doctor MODEL --deep")
    if request.facts_file is not None:
        raise UsageError(asked, "a recorded machine cannot be tried (--facts)", "Leave one of the two out")


def _measure_deep(facts: Facts, model: OpenModel, options: PlanOptions) -> tuple[Facts, PlanOptions] | None:
    """Try how much can be page-locked beside the plan's device memory; None, and said why, where that cannot be."""
    from strata.doctor.deep import deep_options, deep_probe, measure
    from strata.doctor.gather import GatherWatch

    try:
        probe = deep_probe(facts, model.facts, options)
    except Undetermined as error:
        say(f"--deep measured nothing: {error.found}. {error.remedy}.")
        return None
    say(probe.sentence)
    with steps() as progress:

        def show(group: str, known: Any) -> None:
            if group == "pinned":
                done = (known or {}).get("granted_bytes", 0)
                progress("page-locking" if known else "holding device memory", done, probe.pin_bytes)

        found = measure(facts, probe, GatherWatch(state=show))
    if found.pinned.value is None:
        why = found.pinned.error.message if found.pinned.error else found.pinned.status
        say(f"--deep measured nothing: {why}.")
        return None
    return found, deep_options(options)
