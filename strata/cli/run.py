"""`strata run`: check, plan, load by the plan, answer, and say what it took."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from strata.cli.fetch import PlannedRun, open_to_run, plan_run
from strata.cli.loading import load, show_plan
from strata.cli.output import err, say, stop, warn
from strata.cli.preflight import OpenModel, require_feasible, with_notes
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
    from strata.cli.simulated_run import load_simulated, simulated_log_folder
    from strata.runtime.models import load_config
    from strata.runtime.runlog import RunLog, log_folder
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

    def plan_it(model: OpenModel, log: RunLog | None = None) -> PlannedRun:
        load_config(model.file)  # refuses what cannot run before anything is planned or loaded
        Tokenizer.check(model.file.metadata)
        saved, machine, shrink = request.plan_file, request.simulate, request.shrink
        return plan_run(model, options, log, saved=saved, simulate=machine, shrink=shrink)

    model = open_to_run(request.model, plan_it, quiet=request.json)
    logs = log_folder() if request.simulate is None else simulated_log_folder()
    with model.file, RunLog(logs, warn=warn) as log:
        planned = plan_it(model, log)
        facts, simulated, plan = planned.facts, planned.simulated, planned.plan
        if simulated:
            plan = with_notes(plan, simulated.notes)
        for note in planned.notes:
            warn(note)
        if not request.json:
            _show_preflight(facts, None if simulated else model, plan, planned.options)
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
            loaded = load(model, plan, planned.options, log, quiet=request.json)
        with loaded as engine, overhead_noted(engine, facts):
            session = Session(
                engine,
                conversation,
                sampler,
                log,
                seed=seed,
                max_tokens=request.max_tokens,
                expect=None if simulated else partial(expected, facts, model.facts, engine.plan),
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
