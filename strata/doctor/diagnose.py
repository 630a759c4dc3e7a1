"""From facts to the report document: run the checks and put the verdict before them."""

from __future__ import annotations

from collections.abc import Iterable

from strata.doctor.checks.machine import Machine
from strata.doctor.checks.registry import CATALOGUE, run_checks
from strata.doctor.facts import Facts
from strata.doctor.findings import Finding, Outcome, Report, Status, Verdict, exit_code
from strata.doctor.plan import AllocationPlan, PlanOptions
from strata.doctor.units import counted
from strata.gguf.model_facts import ModelFacts


def diagnose(
    facts: Facts,
    *,
    model: ModelFacts | None = None,
    plan: AllocationPlan | None = None,
    options: PlanOptions | None = None,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    strict: bool = False,
) -> Report:
    """Judge a machine, and a model's plan on it when there is one.

    Parameters
    ----------
    facts : Facts
        As gathered, or as replayed from a file.
    model, plan, options : optional
        The model's header, its plan, and what the person asked for; checks that need them are skipped without.
    only, skip : iterable of str
        Check ids to run exclusively, and to leave out.
    strict : bool
        Whether warnings make the exit code 1.

    Returns
    -------
    Report
        Its `verdict.exit_code` is what the program should end with.

    Raises
    ------
    UsageError
        When `only` or `skip` names no check.
    """
    machine = Machine(facts, model, plan, options or PlanOptions())
    only = tuple(only)
    findings = run_checks(machine, only=only, skip=skip)
    return Report(
        strata_version=facts.strata_version,
        verdict=verdict(findings, plan, strict=strict, partial=bool(only)),
        findings=findings,
        facts=facts,
        plan=plan,
    )


def verdict(
    findings: Iterable[Finding], plan: AllocationPlan | None = None, *, strict: bool = False, partial: bool = False
) -> Verdict:
    """Return the first line of a report: the worst of `findings`, or what fits when there is nothing to say.

    A failure outweighs all else; then an unknown that readiness depends on, or a check that broke; then warnings.
    `partial` says that only some checks were asked for: what they leave open cannot be called ready.
    """
    findings = tuple(findings)
    failed = [f.what for f in findings if f.status is Status.FAIL]
    if plan and not plan.feasible and not failed:
        failed = [plan.shortfall.sentence if plan.shortfall else "The plan does not fit this machine."]
    unsure = [
        f.title
        for f in findings
        if f.status is Status.CRASHED or (f.status is Status.UNKNOWN and (partial or CATALOGUE[f.id].essential))
    ]
    warned = [f.what for f in findings if f.status is Status.WARN]
    where = " on the CPU (no NVIDIA GPU here)" if any(f.id == "STR-GPU-NONE" for f in findings) else ""
    fits = f": {plan.model.name} fits with a context of {plan.context:,} tokens" if plan and plan.feasible else ""
    if failed:
        return _verdict(Outcome.NOT_READY, f"Not ready: {_first_of(failed, 'problem')}", strict)
    if unsure:
        return _verdict(Outcome.UNDETERMINED, f"Could not be determined: {', '.join(unsure)}.", strict)
    if partial:
        well = "nothing is wrong." if any(f.status is Status.PASS for f in findings) else "none says anything here."
        found = _first_of(warned, "warning") if warned else well
        outcome = Outcome.READY_WITH_WARNINGS if warned else Outcome.READY
        return _verdict(outcome, f"Of the checks asked for: {found}", strict)
    if warned:
        return _verdict(Outcome.READY_WITH_WARNINGS, f"Ready{where}{fits}, but: {_first_of(warned, 'warning')}", strict)
    return _verdict(Outcome.READY, f"Ready{where}{fits}.", strict)


def _verdict(outcome: Outcome, sentence: str, strict: bool) -> Verdict:
    return Verdict(outcome=outcome, sentence=sentence, exit_code=int(exit_code(outcome, strict=strict)))


def _first_of(sentences: list[str], noun: str) -> str:
    rest = len(sentences) - 1
    return sentences[0] + (f" (and {counted(rest, f'more {noun}')})" if rest else "")
