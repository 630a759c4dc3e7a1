"""From facts to the report document: run the checks and put the verdict before them."""

from __future__ import annotations

from collections.abc import Iterable

from strata.doctor.checks.machine import Machine
from strata.doctor.checks.registry import CATALOGUE, run_checks
from strata.doctor.facts import Facts, ProbeStatus
from strata.doctor.findings import Finding, Outcome, Report, Status, Verdict, exit_code
from strata.doctor.plan import AllocationPlan, PlanOptions
from strata.doctor.units import counted
from strata.errors import Undetermined
from strata.gguf.model_facts import ModelFacts

# Checks that say nothing of a run on the CPU, by how their ids begin.
OF_THE_GPU = (
    *("STR-DRV-", "STR-CUPY-", "STR-CUDA-", "STR-CTX-", "STR-GPU-", "STR-PIN-", "STR-VRAM-", "STR-PCIE-"),
    *("STR-WSL-ONE", "STR-WSL-GPU", "STR-WSL-LIBCUDA", "STR-WSL-PIN", "STR-WSL-VRAM", "STR-WSL-RESIDENT"),
    "STR-KERNEL-PIN",
)
OF_A_PROBE = "STR-PROBE-"


def diagnose(
    facts: Facts,
    *,
    model: ModelFacts | None = None,
    plan: AllocationPlan | None = None,
    options: PlanOptions | None = None,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    strict: bool = False,
    no_plan: Undetermined | None = None,
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
    no_plan : Undetermined, optional
        Why what was asked for cannot be planned; the machine is not called ready then.

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
        verdict=verdict(
            findings,
            plan,
            strict=strict,
            partial=bool(only),
            no_plan=no_plan,
            beside=_beside_the_point(machine, findings),
        ),
        findings=findings,
        facts=facts,
        plan=plan,
    )


def _beside_the_point(machine: Machine, findings: Iterable[Finding]) -> frozenset[str] | None:
    """Return the ids of what concerns the GPU alone where the CPU was asked for; None where it was not.

    A probe that hung or died is such a thing as long as what a plan for the CPU rests on was read.
    """
    if machine.options.device != "cpu":
        return None
    read = machine.facts.host.status is ProbeStatus.OK
    apart = (*OF_THE_GPU, OF_A_PROBE) if read else OF_THE_GPU
    return frozenset(f.id for f in findings if f.id.startswith(apart))


def verdict(
    findings: Iterable[Finding],
    plan: AllocationPlan | None = None,
    *,
    strict: bool = False,
    partial: bool = False,
    no_plan: Undetermined | None = None,
    beside: frozenset[str] | None = None,
) -> Verdict:
    """Return the first line of a report: the worst of `findings`, or what fits when there is nothing to say.

    A failure outweighs all else; then an unknown that readiness depends on, or a check that broke; then warnings.
    `partial` says that only some checks were asked for: what they leave open cannot be called ready.
    `no_plan` is why what was asked for cannot be planned. `beside`, given where the CPU was asked for, names what is
    told and does not decide.
    """
    told = tuple(findings)
    findings = tuple(f for f in told if f.id not in (beside or ()))
    failed = [f.what for f in findings if f.status is Status.FAIL]
    if plan and not plan.feasible and not failed:
        failed = [plan.shortfall.sentence if plan.shortfall else "The plan does not fit this machine."]
    unsure = [
        f.title
        for f in findings
        if f.status is Status.CRASHED or (f.status is Status.UNKNOWN and (partial or CATALOGUE[f.id].essential))
    ]
    warned = [f.what for f in findings if f.status is Status.WARN]
    where = " on the CPU (no NVIDIA GPU here)" if any(f.id == "STR-GPU-NONE" for f in told) else ""
    if beside is not None:
        where = " on the CPU, as asked"
    fits = f": {plan.model.name} fits with a context of {plan.context:,} tokens" if plan and plan.feasible else ""
    if failed:
        return _verdict(Outcome.NOT_READY, f"Not ready: {_first_of(failed, 'problem')}", strict)
    if no_plan:
        return _verdict(
            Outcome.UNDETERMINED,
            f"Could not be determined: {no_plan.asked}: {no_plan.found}. {no_plan.remedy}.",
            strict,
        )
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
