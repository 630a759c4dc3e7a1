"""Every command, its options and its help. What a command does lives in the module of its name.

Annotations are evaluated here (no ``from __future__ import annotations``): typer reads them at run time. Modules
are imported inside the commands, so that ``strata --help`` stays quick.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strata.cli.help import Command, Group
from strata.cli.options import Json, Model, OptionalModel, Shrink, Simulate, flag, size_option, with_plan_options
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
    think: Annotated[
        bool | None, flag("--think/--no-think", help="Have the model think before it answers, or not.")
    ] = None,
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
    simulate: Simulate = None,
    simulate_shrink: Shrink = None,
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
        think=think,
        max_tokens=max_tokens,
        temp=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        plan_file=plan,
        json=json,
        simulate=simulate,
        shrink=simulate_shrink,
    )
    run_model(request, options)


@app.command(cls=Command)
@boundary
@with_plan_options
def bench(
    model: Model,
    prompts: Annotated[
        str, typer.Option("-p", "--prompts", metavar="N,N", help="Lengths of prompts to measure; '' is none.")
    ] = "128,512",
    tokens: Annotated[
        int, typer.Option("-n", "--tokens", min=0, metavar="N", help="Steps to measure at each depth; 0 is none.")
    ] = 64,
    depths: Annotated[
        str, typer.Option("-d", "--depths", metavar="N,N", help="Tokens in front of the steps.")
    ] = "0,512",
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", min=1, metavar="N", help="How often, after one to warm up.")
    ] = 5,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Of the random tokens that are fed.")] = 0,
    json: Json = False,
    *,
    options: "PlanOptions",
) -> None:
    """Measure how fast prompts are read and tokens made; prints rows for a Markdown table.

    Tokens are random, so that every run touches the experts anew. Memory is compared with what the checks measured.

    [dim]strata bench demo
    strata bench model.gguf --device cuda -p 512,2048 -n 128 -d 0,4096 -r 5[/]
    """
    from strata.cli.bench import BenchRequest, bench_model

    bench_model(BenchRequest(model, prompts, tokens, depths, repetitions, seed, json), options)


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
    emit: Annotated[
        str | None, typer.Option("--emit", metavar="llama.cpp", help="Print the command line for another engine.")
    ] = None,
    simulate: Simulate = None,
    simulate_shrink: Shrink = None,
    json: Json = False,
    *,
    options: "PlanOptions",
) -> None:
    """Show what would be allocated, where, and why it fits, without loading anything.

    MODEL may be the first megabytes of a file; of hf:owner/repo, no more than those are fetched. --gpu NAME with
    --ram asks for a machine that one does not have.

    [dim]strata plan model.gguf --max-context 16384 -o plan.json
    strata plan model.gguf --gpu "RTX 4090" --ram 64GiB --wsl2
    strata plan model.gguf --emit llama.cpp[/]
    """
    from strata.cli.plan import Imagined, show_plan

    imagined = Imagined(ram, wsl2=wsl2, windows=windows) if ram is not None or wsl2 or windows else None
    show_plan(
        model,
        options,
        output=output,
        facts_file=facts,
        imagined=imagined,
        emit=emit,
        json=json,
        simulate=simulate,
        shrink=simulate_shrink,
    )


@app.command(cls=Command)
@boundary
@with_plan_options
def doctor(
    model: OptionalModel = None,
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
    deep: Annotated[
        bool, flag("--deep", help="Try how much MODEL could page-lock beside its VRAM; says first what it takes.")
    ] = False,
    list_checks: Annotated[bool, flag("--list-checks", help="List the checks and end.")] = False,
    explain: Annotated[str | None, typer.Option("--explain", metavar="ID", help="Explain one check and end.")] = None,
    json: Json = False,
    *,
    options: "PlanOptions",
) -> None:
    """Check this machine, and whether MODEL fits on it; nothing is loaded.

    It takes seconds; every probe has a time limit, so that it ends within three minutes whatever a driver does.

    [dim]strata doctor
    strata doctor model.gguf --vram-budget 8GiB
    strata doctor model.gguf --deep[/]
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
        deep=deep,
    )
    command.examine(request, options)


@app.command(cls=Command)
@boundary
@with_plan_options
def report(
    model: OptionalModel = None,
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
def version(
    verbose: Annotated[
        bool, flag("-v", "--verbose", help="Add Python, the system, libraries and the NVIDIA driver.")
    ] = False,
    json: Json = False,
) -> None:
    """Print Strata's version."""
    from strata.cli.version import show_version

    show_version(verbose=verbose, json=json)


cache = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(cache, name="cache", help="List or delete what Strata fetched or made and can fetch or make again.")


@cache.command("list", cls=Command)
@boundary
def cache_list(json: Json = False) -> None:
    """Show what is kept, how large, and where."""
    from strata.cli.cache import list_cache

    list_cache(json=json)


@cache.command("clear", cls=Command)
@boundary
def cache_clear(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Only this, as `strata cache list` names it, or a whole hf:owner/repo."),
    ] = None,
    yes: Annotated[bool, flag("-y", "--yes", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Delete what is kept. Files that Strata did not put there stay.

    [dim]strata cache clear hf:owner/repo[/]
    """
    from strata.cli.cache import clear_cache

    clear_cache(names or (), yes=yes, json=json)
