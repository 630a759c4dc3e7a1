"""`strata run`: check, plan, load by the plan, answer, and say what it took."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strata.cli.output import err, stop, warn
from strata.cli.preflight import (
    OpenModel,
    make_or_load_plan,
    open_model,
    require_feasible,
    require_no_options,
    take_facts,
)
from strata.cli.prompt import check_prompt, read_prompt, room, typed_text
from strata.errors import ExitCode

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
    from strata.cli.loading import load, require_context, show_plan
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
    typed, system = typed_text("-p", request.prompt), typed_text("--system", request.system)
    check_prompt(typed, json=request.json)
    if request.plan_file is not None:
        require_no_options(options)
    model = open_model(request.model)
    with model.file, RunLog(log_folder(), warn=warn) as log:
        load_config(model.file)  # refuses what cannot run before anything is planned or loaded
        facts = take_facts(model.file.path)
        log.event("start", versions=_versions(), facts_sha256=fingerprint(facts))
        plan, notes = make_or_load_plan(model.facts, facts, options, request.plan_file)
        for note in notes:
            warn(note)
        if not request.json:
            _show_preflight(facts, model, plan, options)
            show_plan(plan)
        require_feasible(plan)
        require_context(plan)
        conversation = Conversation(model.file, chat=request.chat, system=system, room=room(plan, model.facts))
        prompt = read_prompt(typed)  # what stands against the run is said before stdin is waited for
        tokens = None if prompt is None else conversation.ask(prompt)
        with load(model, plan, log, quiet=request.json) as engine:
            session = Session(engine, conversation, sampler, log, seed=seed, max_tokens=request.max_tokens)
            if tokens is None:
                session.chat()
                code = ExitCode.OK
            else:
                code = session.answer_once(tokens, json=request.json)
    stop(code)  # out here: the log takes what ends it from within for an error


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
