"""`strata run`: check, plan, load by the plan, answer, and say what it took."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strata.cli.loading import load_engine, plan_to_run, show_plan, versions
from strata.cli.output import err, warn
from strata.cli.preflight import OpenModel, open_model, require_feasible, take_facts
from strata.errors import UsageError

if TYPE_CHECKING:
    from strata.doctor.facts import Facts
    from strata.doctor.plan import AllocationPlan, PlanOptions


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
        log.event("start", versions=versions(), facts_sha256=fingerprint(facts))
        plan, notes = plan_to_run(model, facts, options, request.plan_file)
        if not request.json:
            _show_preflight(facts, model, plan, options)
        show_plan(plan, notes, quiet=request.json)
        require_feasible(plan)
        conversation = Conversation(model.file, chat=request.chat, system=request.system)
        with load_engine(model, plan, options, log) as engine:
            session = Session(engine, conversation, sampler, log, seed=seed, max_tokens=request.max_tokens)
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


def _show_preflight(facts: Facts, model: OpenModel, plan: AllocationPlan, options: PlanOptions) -> None:
    """Say what the checks have against this run, if anything."""
    from strata.doctor.diagnose import diagnose
    from strata.doctor.report import TerminalReport

    err().print(TerminalReport(diagnose(facts, model=model.facts, plan=plan, options=options), brief=True))
