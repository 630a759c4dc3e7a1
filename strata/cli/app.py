"""Every command, its options and its help. What a command does lives in the module of its name.

Annotations are evaluated here (no ``from __future__ import annotations``): typer reads them at run time. Modules
are imported inside the commands, so that ``strata --help`` stays quick.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strata.cli.help import Command, Group
from strata.cli.options import Json, Model, flag, size_option, with_plan_options
from strata.cli.output import boundary

if TYPE_CHECKING:
    from strata.doctor.plan import PlanOptions

app = typer.Typer(
    name="strata",
    cls=Group,
    help="Run Mixture-of-Experts models bigger than the graphics card, by a plan that is shown first.",
    epilog="Exit codes: 0 fine, 1 a check failed or no plan fits, 2 wrong use, 3 not determined, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(cls=Command)
@boundary
@with_plan_options
def run(
    model: Model,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="Answer this and end; '-' reads stdin.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message of the chat.")] = None,
    no_chat: Annotated[bool, flag("--no-chat", help="Continue the text as it is, without chat template.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, metavar="N", help="Most tokens of an answer.")
    ] = None,
    temp: Annotated[
        float, typer.Option("--temp", metavar="T", help="Temperature; 0 always takes the likeliest token.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option("--top-k", metavar="N", help="Sample among the N likeliest; 0 is no limit.")
    ] = 40,
    top_p: Annotated[
        float, typer.Option("--top-p", metavar="P", help="Sample among the likeliest that sum to P.")
    ] = 0.95,
    min_p: Annotated[
        float, typer.Option("--min-p", metavar="P", help="Leave out what is below P times the likeliest.")
    ] = 0.05,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Same seed, same answer. \\[default: random, and said]")
    ] = None,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="Follow a saved plan.")] = None,
    json: Json = False,
    *,
    options: "PlanOptions",
) -> None:
    """Check the machine, show the plan, load the model by it and answer.

    Without -p it is a chat; with text on stdin it answers that.

    [dim]strata run demo -p "What is the capital of France?"
    strata run model.gguf --vram-budget 8GiB --max-context 8192[/]
    """
    from strata.cli.run import RunRequest, run_model

    request = RunRequest(
        model=model,
        prompt=prompt,
        system=system,
        chat=not no_chat,
        max_tokens=max_tokens,
        temp=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        plan_file=plan,
        json=json,
    )
    run_model(request, options)


@app.command(cls=Command)
@boundary
@with_plan_options
def plan(
    model: Model,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Save the plan for `run --plan`.")
    ] = None,
    facts: Annotated[Path | None, typer.Option("--facts", metavar="FILE", help="Plan for a recorded machine.")] = None,
    ram: Annotated[
        int | None, size_option("--ram", "Plan for a machine with this much RAM and the card --gpu NAME.", "What if")
    ] = None,
    wsl2: Annotated[bool, flag("--wsl2", help="... under WSL2.", panel="What if")] = False,
    windows: Annotated[bool, flag("--windows", help="... under Windows.", panel="What if")] = False,
    json: Json = False,
    *,
    options: "PlanOptions",
) -> None:
    """Show what would be allocated, where, and why it fits, without loading anything.

    MODEL may be the first megabytes of a file. --gpu NAME with --ram asks for a machine that one does not have.

    [dim]strata plan model.gguf --max-context 16384 -o plan.json
    strata plan model.gguf --gpu "RTX 4090" --ram 64GiB --wsl2[/]
    """
    from strata.cli.plan import Imagined, show_plan

    imagined = None if ram is None else Imagined(ram, wsl2=wsl2, windows=windows)
    show_plan(model, options, output=output, facts_file=facts, imagined=imagined, json=json)


@app.command(cls=Command)
@boundary
@with_plan_options
def doctor(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Check what this model needs, too.")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="ID", help="Run this check only (repeatable).")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="ID", help="Leave this check out (repeatable).")
    ] = None,
    strict: Annotated[bool, flag("--strict", help="Exit with 1 on warnings, too.")] = False,
    facts: Annotated[Path | None, typer.Option("--facts", metavar="FILE", help="Judge a recorded machine.")] = None,
    save_facts: Annotated[
        Path | None, typer.Option("--save-facts", metavar="FILE", help="Record this machine.")
    ] = None,
    verbose: Annotated[bool, flag("-v", "--verbose", help="List every check with its evidence.")] = False,
    list_checks: Annotated[bool, flag("--list-checks", help="List the checks and end.")] = False,
    explain: Annotated[str | None, typer.Option("--explain", metavar="ID", help="Explain one check and end.")] = None,
    json: Json = False,
    *,
    options: "PlanOptions",
) -> None:
    """Check this machine, and whether MODEL fits on it; nothing is loaded.

    [dim]strata doctor
    strata doctor model.gguf --vram-budget 8GiB[/]
    """
    from strata.cli import doctor as command

    if list_checks:
        return command.list_checks(json=json)
    if explain:
        return command.explain_check(explain, json=json)
    request = command.DoctorRequest(
        model=model,
        facts_file=facts,
        save_facts=save_facts,
        only=tuple(only or ()),
        skip=tuple(skip or ()),
        strict=strict,
        verbose=verbose,
        json=json,
    )
    command.examine(request, options)


@app.command(cls=Command)
@boundary
@with_plan_options
def report(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="The model that it is about.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where to write it.")] = Path(),
    json: Json = False,
    *,
    options: "PlanOptions",
) -> None:
    """Write what a person needs to help: a text to paste and a .zip with facts, plan and logs, both redacted."""
    from strata.cli.report import write_report

    write_report(model, options, output, json=json)


@app.command(cls=Command)
@boundary
def explain(
    text: Annotated[str, typer.Argument(metavar="TEXT|LOG", help="An error text, a log file, or '-' for stdin.")],
    json: Json = False,
) -> None:
    """Say what an error of this or another engine really means, and what helps.

    [dim]strata explain "cannot pin 322 MiB: no CUDA-capable device is detected"[/]
    """
    from strata.cli.report import explain_text

    explain_text(text, json=json)


@app.command(cls=Command)
@boundary
def version() -> None:
    """Print Strata's version."""
    from strata import __version__

    typer.echo(f"strata {__version__}")
