"""`strata plan`: what would be allocated, where, and why it fits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from strata.cli.output import emit_json, out, say, stop, unicode_ok
from strata.cli.preflight import make_or_load_plan, open_model, take_facts
from strata.errors import ExitCode

if TYPE_CHECKING:
    from strata.doctor.plan import PlanOptions


def show_plan(model: str, options: PlanOptions, *, output: Path | None, facts_file: Path | None, json: bool) -> None:
    """Plan MODEL and print the plan; exit code 1 when it does not fit."""
    from strata.doctor.plan_table import plan_table

    opened = open_model(model, header_only=True)
    facts = take_facts(opened.file.path, facts_file)
    plan, _ = make_or_load_plan(opened.facts, facts, options)
    if output is not None:
        from strata.doctor.plan_io import save_plan

        save_plan(plan, output)
    if json:
        emit_json(plan)
    else:
        out().print(plan_table(plan, unicode=unicode_ok(sys.stdout)))
    if output is not None:
        say(f"The plan is saved: strata run {model} --plan {output}")
    stop(ExitCode.OK if plan.feasible else ExitCode.FAILED)
