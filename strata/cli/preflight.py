"""What comes before any work: the model's header, the machine's facts, and the plan made of both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strata.cli.progress import spinner, steps
from strata.errors import ModelFileError, PlanInfeasible, Undetermined, UsageError

if TYPE_CHECKING:
    from strata.doctor.facts import Facts
    from strata.doctor.plan import AllocationPlan, PlanOptions
    from strata.gguf.model_facts import ModelFacts
    from strata.gguf.reader import GGUFFile


@dataclass(frozen=True)
class OpenModel:
    """A model's file, open, and what its header says."""

    file: GGUFFile
    facts: ModelFacts


def open_model(model: str, *, header_only: bool = False) -> OpenModel:
    """Find MODEL (fetching it if need be) and read its header.

    Raises
    ------
    StrataError
        MODEL does not exist, cannot be fetched or is no sound GGUF file; `Undetermined` when its disk does not answer.
    """
    from strata.doctor.probes.file_answers import file_answers
    from strata.gguf.model_facts import read_model_facts
    from strata.gguf.reader import open_gguf
    from strata.sources.resolve import resolve

    if not file_answers(model):
        raise Undetermined(
            f"open model {model}",
            "the disk or network share that it lies on does not answer",
            "Look at it in another terminal, ls -l may hang as well; mount it anew, or copy the model to another disk",
        )
    with steps(aloud=True) as progress:
        path = resolve(model, progress=progress, header_only=header_only)
    try:
        file = open_gguf(path, header_only=header_only)
    except ModelFileError as error:
        if model != "demo":
            raise
        raise ModelFileError(error.asked, error.found, f"Delete {path}; the next run makes it anew") from None
    return OpenModel(file, read_model_facts(file))


def take_facts(model: Path | None, options: PlanOptions, recorded: Path | None = None) -> Facts:
    """Probe this machine, or read the facts that were recorded on another.

    Parameters
    ----------
    model : Path or None
        The file whose disk is measured.
    options : PlanOptions
        Those that the plan is made with: page-locking and copies are measured with the GPU that --gpu names.
    recorded : Path, optional
        Facts to read instead.
    """
    if recorded is not None:
        from strata.doctor.facts_io import read_facts

        return read_facts(recorded)
    from strata.doctor.gather import GatherOptions, GatherWatch, gather

    with spinner("checking the machine") as now:
        watch = GatherWatch(
            started=lambda groups, limit_s: now(f"checking the machine: {', '.join(groups)} (at most {limit_s:.0f} s)")
        )
        found = gather(GatherOptions(model=model, gpu=options.gpu), watch)
    from strata.cli.overhead import with_overheads

    return with_overheads(found)


def made_with(options: PlanOptions, saved: Path | None) -> PlanOptions:
    """Return the options that the plan to follow is made with: a saved plan's own, else those that were typed.

    Raises
    ------
    UsageError, PlanMismatch
        The saved plan cannot be read.
    """
    if saved is None:
        return options
    from strata.doctor.plan_io import load_plan

    return load_plan(saved).options


def with_last_run(facts: Facts) -> Facts:
    """Add what the logs of this machine say of the last run."""
    import msgspec

    from strata.doctor.last_run import read_last_run
    from strata.runtime.runlog import log_folder, run_logs

    return msgspec.structs.replace(facts, run=read_last_run(run_logs(log_folder())))


def make_or_load_plan(
    model: ModelFacts, facts: Facts, options: PlanOptions, saved: Path | None = None
) -> tuple[AllocationPlan, tuple[str, ...]]:
    """Plan, or take a saved plan that still holds on this machine.

    Returns
    -------
    plan : AllocationPlan
    notes : tuple of str
        What differs from when a saved plan was made.

    Raises
    ------
    UsageError
        The options ask for something else than the saved plan was made with.
    PlanMismatch
        The saved plan is for another model, device or schema, or the memory it rests on is not there.
    """
    if saved is None:
        from strata.doctor.planner import make_plan

        return make_plan(facts, model, options), ()
    from strata.doctor.plan_io import check_saved, load_plan

    plan = load_plan(saved)
    _refuse_other_options(options, plan, saved)
    return check_saved(plan, facts, model)


def plan_or_why_not(
    model: OpenModel | None, facts: Facts, options: PlanOptions
) -> tuple[AllocationPlan | None, Undetermined | None]:
    """Plan for a report, which is worth having without a plan too: then return why there is none.

    A GPU that was asked for has to be there, with a model or without.

    Raises
    ------
    StrataError
        The options are wrong: `UsageError` where --gpu names no GPU of this machine.
    """
    from strata.doctor.gpus import choose_gpu

    try:
        if options.device == "cuda" or (options.device == "auto" and options.gpu is not None):
            choose_gpu(facts, options.gpu)
        return (make_or_load_plan(model.facts, facts, options)[0] if model else None), None
    except Undetermined as error:
        return None, error


def with_notes(plan: AllocationPlan, notes: tuple[str, ...]) -> AllocationPlan:
    """Put notes before a plan's own."""
    import msgspec

    return msgspec.structs.replace(plan, notes=notes + plan.notes)


def _refuse_other_options(options: PlanOptions, plan: AllocationPlan, saved: Path) -> None:
    """Refuse options beside a saved plan that ask for something else than it was made with: it cannot follow both."""
    import msgspec

    usual = msgspec.structs.asdict(type(options)())
    made_with = msgspec.structs.asdict(plan.options)
    on = {"numpy": "cpu"}.get(plan.device.backend, plan.device.backend)
    came_out = {"max_context": plan.context, "prefill": plan.chunk, "kv": plan.kv, "device": on}
    came_out |= {"expert_cache": plan.experts.slots, "gpu": plan.device.id}
    for name, value in msgspec.structs.asdict(options).items():
        if value not in (usual[name], made_with[name], came_out.get(name, usual[name])):
            option = "--vram-reserve-mib" if name == "vram_reserve_bytes" else f"--{name.removesuffix('_bytes')}"
            raise UsageError(
                f"follow the plan {saved} with another {option.replace('_', '-')}",
                "a saved plan keeps to the options that it was made with",
                "Leave the option out, or make a new plan: strata plan MODEL ... -o FILE",
            )


def require_feasible(plan: AllocationPlan) -> None:
    """Refuse to go on with a plan that does not fit.

    Raises
    ------
    PlanInfeasible
        Its sentences are the plan's own: the line that does not fit, and the smallest changes.
    """
    if plan.feasible:
        return
    changes = [f"{c.option}: {c.sentence}" if c.option else c.sentence for c in plan.changes]
    raise PlanInfeasible(
        f"plan {plan.model.name}",
        plan.shortfall.sentence if plan.shortfall else "it does not fit",
        changes[0] if changes else "Use a smaller model",
    )
