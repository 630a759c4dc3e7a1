"""`strata plan`: what would be allocated, where, and why it fits."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strata.cli.output import emit_json, out, say, stop, unicode_ok
from strata.cli.preflight import make_or_load_plan, open_model, take_facts
from strata.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from strata.doctor.facts import Facts
    from strata.doctor.plan import PlanOptions


@dataclass(frozen=True)
class Imagined:
    """A machine that one does not have: its RAM in bytes and its system; its card is what --gpu names."""

    ram_bytes: int
    wsl2: bool
    windows: bool


def show_plan(
    model: str,
    options: PlanOptions,
    *,
    output: Path | None,
    facts_file: Path | None,
    imagined: Imagined | None,
    json: bool,
) -> None:
    """Plan MODEL and print the plan; exit code 1 when it does not fit."""
    import msgspec

    from strata.doctor.plan_table import plan_table

    opened = open_model(model, header_only=True)
    assumed: tuple[str, ...] = ()
    if imagined is None:
        facts = take_facts(opened.file.path, facts_file, gpu=options.gpu)
    else:
        facts, assumed = _imagine(imagined, options, facts_file)
        options = msgspec.structs.replace(options, gpu=None, device="cuda")
    plan, _ = make_or_load_plan(opened.facts, facts, options)
    plan = msgspec.structs.replace(plan, notes=assumed + plan.notes)
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


def _imagine(machine: Imagined, options: PlanOptions, facts_file: Path | None) -> tuple[Facts, tuple[str, ...]]:
    from strata.doctor.cards import find_card
    from strata.doctor.what_if import what_if_facts

    asked = "plan for a machine with --ram"
    if facts_file is not None:
        raise UsageError(asked, "--facts names another machine", "Leave one of the two out")
    if machine.wsl2 and machine.windows:
        raise UsageError(asked, "it cannot run under --wsl2 and --windows at once", "Leave one of the two out")
    if options.gpu is None:
        raise UsageError(asked, "it needs a card", 'Name one: --gpu "RTX 4090"')
    system = "wsl2" if machine.wsl2 else "windows" if machine.windows else "linux"
    return what_if_facts(find_card(options.gpu), machine.ram_bytes, system=system)
