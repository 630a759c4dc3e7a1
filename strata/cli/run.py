"""`strata run`: check, plan, load by the plan, answer, and say what it took."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from strata.cli.output import err, say, unicode_ok, warn
from strata.cli.preflight import OpenModel, make_or_load_plan, open_model, require_feasible, take_facts
from strata.cli.progress import steps
from strata.errors import AllocationFailed, UsageError

if TYPE_CHECKING:
    from strata.doctor.facts import Facts
    from strata.doctor.plan import AllocationPlan, PlanOptions
    from strata.runtime.engine import Engine
    from strata.runtime.runlog import RunLog


@dataclass(frozen=True)
class RunRequest:
    """The command line of `strata run`, but for what the planner reads."""

    model: str
    prompt: str | None
    system: str | None
    chat: bool
    max_tokens: int | None
    temp: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    plan_file: Path | None
    json: bool


def run_model(request: RunRequest, options: PlanOptions) -> None:
    """Carry out `strata run`.

    Raises
    ------
    StrataError
        Whatever keeps it from answering; nothing stays allocated.
    """
    from strata.cli.conversation import Conversation
    from strata.cli.promise import expected
    from strata.cli.session import Session
    from strata.runtime.models import load_config
    from strata.runtime.runlog import RunLog, fingerprint, log_folder
    from strata.runtime.sampler import Sampler, SamplerOptions

    seed = secrets.randbits(32) if request.seed is None else request.seed
    sampler = Sampler(
        SamplerOptions(
            temperature=request.temp, top_k=request.top_k, top_p=request.top_p, min_p=request.min_p, seed=seed
        )
    )
    prompt = _prompt(request)
    model = open_model(request.model)
    with model.file, RunLog(log_folder(), warn=warn) as log:
        load_config(model.file)  # refuses what cannot run before anything is planned or loaded
        facts = take_facts(model.file.path)
        log.event("start", versions=_versions(), facts_sha256=fingerprint(facts))
        plan, notes = make_or_load_plan(model.facts, facts, options, request.plan_file)
        if not request.json:
            _show_preflight(facts, model, plan, options)
        _show_plan(plan, notes, quiet=request.json)
        require_feasible(plan)
        conversation = Conversation(model.file, chat=request.chat, system=request.system)
        with _load(model, plan, log) as engine:
            session = Session(
                engine,
                conversation,
                sampler,
                log,
                seed=seed,
                max_tokens=request.max_tokens,
                expect=partial(expected, facts, model.facts, engine.plan),
            )
            if prompt is None:
                session.chat()
            else:
                session.answer_once(prompt, json=request.json)


def _prompt(request: RunRequest) -> str | None:
    """Return the prompt of -p or stdin, or None when a person sits at the terminal."""
    text = request.prompt
    if text == "-" or (text is None and not sys.stdin.isatty()):
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise UsageError(
                "read the prompt from stdin", f"it is not UTF-8 ({error.reason})", "Give UTF-8 text"
            ) from None
    if text is not None and not text.strip():
        raise UsageError("answer a prompt", "the prompt is empty", 'Give one: -p "What is the capital of France?"')
    if text is None and request.json:
        raise UsageError("run --json", "a chat has no one JSON document", "Give a prompt with -p, or text on stdin")
    return text


def _versions() -> dict[str, str]:
    import platform

    import numpy

    from strata import __version__

    return {"strata": __version__, "python": platform.python_version(), "numpy": numpy.__version__}


def _show_preflight(facts: Facts, model: OpenModel, plan: AllocationPlan, options: PlanOptions) -> None:
    """Say what the checks have against this run, if anything."""
    from strata.doctor.diagnose import diagnose
    from strata.doctor.report import TerminalReport

    err().print(TerminalReport(diagnose(facts, model=model.facts, plan=plan, options=options), brief=True))


def _show_plan(plan: AllocationPlan, notes: tuple[str, ...], *, quiet: bool) -> None:
    from strata.doctor.plan_table import plan_table

    for note in notes:
        warn(note)
    if not quiet:
        err().print(plan_table(plan, unicode=unicode_ok(sys.stderr)))
        err().print()


def _load(model: OpenModel, plan: AllocationPlan, log: RunLog) -> Engine:
    """Load by the plan; when a memory refuses a line, plan once more with what it gave, and say so."""
    try:
        return _load_once(model, plan, log)
    except AllocationFailed as refusal:
        say(f"{refusal.asked}: {refusal.found}")
        say("Planning once more, with no more RAM than was granted.")
        granted = _granted_bytes(plan, refusal)
        log.event("replan", refused=refusal.line, ram_budget_bytes=granted)
    options = msgspec.structs.replace(plan.options, ram_budget_bytes=granted)
    plan, _ = make_or_load_plan(model.facts, take_facts(model.file.path), options)
    _show_plan(plan, (), quiet=False)
    require_feasible(plan)
    return _load_once(model, plan, log)


def _granted_bytes(plan: AllocationPlan, refusal: AllocationFailed) -> int:
    """Return the bytes of RAM that were granted before the refusal: the lines in front of the refused one."""
    from strata.doctor.plan import Tier

    lines = [line for line in plan.reservations if line.tier is not Tier.FILE]
    refused = next(index for index, line in enumerate(lines) if line.id == refusal.line)
    return sum(line.bytes for line in lines[:refused])


def _load_once(model: OpenModel, plan: AllocationPlan, log: RunLog) -> Engine:
    from strata.runtime.engine import Engine

    with steps() as progress:
        return Engine.load(
            model.file, plan, progress=lambda done, total: progress("loading", done, total), log=log.event
        )
