"""`strata plan`: what would be allocated, where, and why it fits."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from strata.cli.output import emit_json, err, out, say, stop, unicode_ok
from strata.cli.preflight import OpenModel, make_or_load_plan, open_model, require_feasible, take_facts, with_notes
from strata.errors import ExitCode, ModelFileError, UnsupportedModel, UsageError

if TYPE_CHECKING:
    from strata.doctor.facts import Facts
    from strata.doctor.plan import AllocationPlan, PlanOptions

ENGINES = ("llama.cpp",)
_STDOUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
_EXAMPLE = 'Name a card and RAM: --gpu "RTX 4090" --ram 64GiB'


@dataclass(frozen=True)
class Imagined:
    """A machine that one does not have: its RAM in bytes and its system; its card is what --gpu names."""

    ram_bytes: int | None
    wsl2: bool
    windows: bool


def show_plan(
    model: str,
    options: PlanOptions,
    *,
    output: Path | None,
    facts_file: Path | None,
    imagined: Imagined | None,
    emit: str | None,
    json: bool,
    simulate: Path | None = None,
    shrink: float | None = None,
) -> None:
    """Plan MODEL and print the plan, or what another engine would be told; exit code 1 when it does not fit."""
    from strata.doctor.plan_table import plan_table

    if emit not in (None, *ENGINES):
        raise UsageError(f"say the plan for {emit} (--emit)", f"it can be {', '.join(ENGINES)}", f"Use {ENGINES[0]}")
    if output is not None and str(output) in _STDOUT:  # the one document that was asked for, and no table around it
        output, json = None, True
    opened = open_model(model, header_only=True)
    assumed: tuple[str, ...] = ()
    if simulate is not None:
        from strata.cli import simulation

        if facts_file is not None or imagined is not None:
            raise UsageError(
                "plan for a simulated machine (--simulate)",
                "--facts or --ram names another machine",
                "Leave one of the two out",
            )
        machine = simulation.simulate(simulate, opened.facts, options, shrink=shrink)
        facts, options, assumed = machine.facts, machine.options, machine.notes
    elif imagined is None:
        _refuse_card_alone(options)
        facts = take_facts(opened.file.path, options, facts_file)
    else:
        facts, assumed = _imagine(imagined, options, facts_file)
        options = msgspec.structs.replace(options, gpu=None, device="cuda")
    plan, _ = make_or_load_plan(opened.facts, facts, options)
    only = _plan_only(opened)
    plan = with_notes(plan, only + assumed)
    if output is not None:
        from strata.doctor.plan_io import save_plan

        save_plan(plan, output)
    if emit is not None:
        require_feasible(plan)
        _emit_llama_cpp(plan, opened, json=json)
    elif json:
        emit_json(plan)
    else:
        out().print(plan_table(plan, unicode=unicode_ok(sys.stdout), under=only))
    if output is not None:
        on = f" --simulate {simulate}" if simulate else ""
        way = f"strata run {model} --plan {output}{on}"
        if not plan.feasible:
            way = f"it does not fit, so nothing runs by it. It is in {output}"
        elif imagined is not None or facts_file is not None:
            way = f"it is for that machine, and {way} runs by it there alone"
        say(f"The plan is saved: {way}")
    stop(ExitCode.OK if plan.feasible else ExitCode.FAILED)


def _plan_only(model: OpenModel) -> tuple[str, ...]:
    """Say that a model can be planned for and not be run, where that is so."""
    from strata.runtime.models import load_config

    try:
        load_config(model.file)
    except (UnsupportedModel, ModelFileError) as error:
        return (f"Plan only, strata run refuses this model: {error.found}.",)
    return ()


def _emit_llama_cpp(plan: AllocationPlan, model: OpenModel, *, json: bool) -> None:
    """Print the command line alone on stdout, and to stderr what it should log and what it cannot say."""
    from strata.doctor.llama_cpp import llama_cpp
    from strata.doctor.plan_table import paragraph
    from strata.doctor.units import size

    said = llama_cpp(plan, model.facts, str(model.file.path))
    words = ("llama-server", *said.arguments)
    command = subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
    if json:
        emit_json({"schema_version": 1, "command": command, **msgspec.structs.asdict(said), "plan": plan})
        return
    sys.stdout.write(command + "\n")
    sys.stdout.flush()
    b = said.buffers
    logged = (("GPU model", b.device_model), ("host model", b.host_model), ("KV", b.kv), ("RS", b.state))
    sizes = tuple(f"{name} {size(nbytes)}" for name, nbytes in logged if nbytes)
    for title, sentences in (
        ("Buffer sizes that llama.cpp should log", (", ".join(sizes),)),
        ("What the flags cannot say", said.differences),
    ):
        err().print(*paragraph(title, sentences), sep="\n")


def _refuse_card_alone(options: PlanOptions) -> None:
    """Refuse the name of a card where an index or UUID is meant: a machine that is not here has RAM, too."""
    from strata.doctor.cards import known_card

    if options.gpu is not None and known_card(options.gpu):
        raise UsageError(f"plan for GPU {options.gpu} (--gpu)", "a card's name alone is no machine", _EXAMPLE)


def _imagine(machine: Imagined, options: PlanOptions, facts_file: Path | None) -> tuple[Facts, tuple[str, ...]]:
    from strata.doctor.cards import find_card
    from strata.doctor.what_if import what_if_facts

    asked = "plan for a machine that is not here"
    if machine.ram_bytes is None:
        raise UsageError(asked, "--wsl2 and --windows need its RAM and its card", _EXAMPLE)
    if facts_file is not None:
        raise UsageError(asked, "--facts names another machine", "Leave one of the two out")
    if machine.wsl2 and machine.windows:
        raise UsageError(asked, "it cannot run under --wsl2 and --windows at once", "Leave one of the two out")
    if options.gpu is None:
        raise UsageError(asked, "it needs a card", _EXAMPLE)
    system = "wsl2" if machine.wsl2 else "windows" if machine.windows else "linux"
    return what_if_facts(find_card(options.gpu), machine.ram_bytes, system=system)
