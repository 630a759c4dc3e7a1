"""`strata run`: check, plan, load by the plan, answer, and say what it took."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from strata.cli.loading import load, plan_to_run, show_plan
from strata.cli.output import err, say, stop, warn
from strata.cli.preflight import (
    OpenModel,
    made_with,
    open_model,
    require_feasible,
    take_facts,
    with_notes,
)
from strata.cli.prompt import check_prompt, read_prompt, room, typed_text
from strata.cli.ram_replan import require_context
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
    think: bool | None
    max_tokens: int | None
    temp: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    plan_file: Path | None
    json: bool
    simulate: Path | None = None  # recorded facts
    shrink: float | None = None


def run_model(request: RunRequest, options: PlanOptions) -> None:
    """Carry out `strata run`.

    Raises
    ------
    StrataError
        Whatever keeps it from answering; nothing stays allocated.
    """
    from strata.cli.conversation import Conversation
    from strata.cli.overhead import overhead_noted
    from strata.cli.promise import expected
    from strata.cli.session import Session
    from strata.cli.simulated_run import load_simulated, simulated_log_folder, simulated_machine
    from strata.doctor.versions import versions
    from strata.runtime.models import load_config
    from strata.runtime.runlog import RunLog, fingerprint, log_folder
    from strata.runtime.sampler import Sampler, SamplerOptions
    from strata.runtime.tokenizer import Tokenizer

    seed = secrets.randbits(32) if request.seed is None else request.seed
    sampler = Sampler(
        SamplerOptions(
            temperature=request.temp, top_k=request.top_k, top_p=request.top_p, min_p=request.min_p, seed=seed
        )
    )
    typed, system = typed_text("-p", request.prompt), typed_text("--system", request.system)
    check_prompt(typed, json=request.json)
    model = open_model(request.model)
    logs = log_folder() if request.simulate is None else simulated_log_folder()
    with model.file, RunLog(logs, warn=warn) as log:
        load_config(model.file)  # refuses what cannot run before anything is planned or loaded
        Tokenizer.check(model.file.metadata)
        simulated = simulated_machine(request.simulate, model, options, saved=request.plan_file, shrink=request.shrink)
        if simulated:
            facts, options = simulated.facts, simulated.options
        else:
            facts = take_facts(model.file.path, made_with(options, request.plan_file))
        log.event("start", versions=versions(), facts_sha256=fingerprint(facts))
        plan, notes = plan_to_run(model, facts, options, request.plan_file)
        if simulated:
            plan = with_notes(plan, simulated.notes)
        for note in notes:
            warn(note)
        if not request.json:
            _show_preflight(facts, None if simulated else model, plan, options)
            show_plan(plan)
        require_feasible(plan)
        require_context(plan)
        conversation = Conversation(
            model.file,
            chat=request.chat,
            system=system,
            room=room(plan, model.facts),
            think=request.think,
        )
        for doubt in conversation.tokenizer.doubts:
            warn(doubt)
        prompt = read_prompt(typed)  # what stands against the run is said before stdin is waited for
        tokens = None if prompt is None else conversation.ask(prompt)
        if simulated:
            loaded = load_simulated(model, plan, simulated, log, quiet=request.json)
        else:
            loaded = load(model, plan, options, log, quiet=request.json)
        with loaded as engine, overhead_noted(engine, facts):
            session = Session(
                engine,
                conversation,
                sampler,
                log,
                seed=seed,
                max_tokens=request.max_tokens,
                expect=partial(expected, facts, model.facts, engine.plan),
            )
            if tokens is None:
                session.chat()
                code = ExitCode.OK
            else:
                code = session.answer_once(tokens, json=request.json)
    stop(code)  # out here: the log takes what ends it from within for an error


def _show_preflight(facts: Facts, model: OpenModel | None, plan: AllocationPlan, options: PlanOptions) -> None:
    """Say what the checks have against this run, if anything; of a simulated machine, against the machine alone."""
    from strata.doctor.diagnose import diagnose
    from strata.doctor.report import TerminalReport

    if model is None:
        say("The machine as it was recorded:")
    report = diagnose(facts, model=model.facts, plan=plan, options=options) if model else diagnose(facts)
    err().print(TerminalReport(report, brief=True))
