"""Options that several commands share, under the names people of this field know.

Annotations are evaluated here (no ``from __future__ import annotations``): typer reads them at run time.
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.cli.completion import complete_model
from strata.cli.output import fail
from strata.errors import UsageError

if TYPE_CHECKING:
    from strata.doctor.plan import PlanOptions

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", re.IGNORECASE)
_LARGEST = 1 << 60  # bytes: an EiB
_LONGEST_COUNT = 18  # digits: what fits into 64 bits


def shorten(text: str) -> str:
    """Quote what was typed, cut where it is endless."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


def parse_size(text: str) -> int:
    """Read a size such as ``8GiB``, ``8G``, ``512 MiB`` or ``8GB``.

    ``GiB`` and ``G`` are powers of two, ``GB`` powers of ten.

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    typer.BadParameter
        The text is no size, or a bare number (which could mean bytes as well as MiB).
    """
    match = _SIZE.fullmatch(text)
    if not match:
        raise typer.BadParameter(f"{shorten(text)} is not a size; write it like 8GiB or 512MiB")
    number, unit, suffix = match[1], match[2].lower(), (match[3] or "").lower()
    if not unit and not suffix:
        raise typer.BadParameter(f"{shorten(text)} has no unit; write it like 8GiB or 512MiB")
    scale = 1000 ** (_UNITS[unit] // 10) if suffix == "b" and unit else 1 << _UNITS[unit]
    nbytes = Decimal(number) * scale
    if nbytes > _LARGEST:
        raise typer.BadParameter(f"{shorten(text)} is more than any memory holds")
    return int(nbytes)


def parse_auto(text: str) -> int:
    """Read ``auto`` (as 0) or a positive whole number."""
    if text.strip().lower() == "auto":
        return 0
    if not text.isdecimal() or len(text) > _LONGEST_COUNT or int(text) < 1:
        raise typer.BadParameter(f"{shorten(text)} is neither 'auto' nor a whole number from 1")
    return int(text)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A .gguf file (the first of a split set), hf:owner/repo\\[/file], or 'demo'.",
        show_default=False,
        autocompletion=complete_model,
    ),
]
OptionalModel = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]", help="The model that it is about, as for `strata run`.", autocompletion=complete_model
    ),
]


def flag(*names: str, help: str, panel: str | None = None) -> Any:
    """Declare a switch."""
    return typer.Option(*names, help=help, rich_help_panel=panel)


Simulate = Annotated[
    Path | None,
    typer.Option(
        "--simulate",
        metavar="FACTS",
        help="Compute here, with the memory of a recorded machine, made small enough for MODEL.",
        rich_help_panel="What if",
    ),
]
Shrink = Annotated[
    float | None, typer.Option("--simulate-shrink", metavar="X", help="Divide its memories by X.", hidden=True)
]
Json = Annotated[bool, flag("--json", help="Print one JSON document on stdout and nothing else.")]


def size_option(name: str, help: str, panel: str = "Memory") -> Any:
    """Declare an option that takes a size."""
    return typer.Option(name, help=help, parser=parse_size, metavar="SIZE", rich_help_panel=panel)


def _auto(name: str, help: str) -> Any:
    return typer.Option(name, help=help, parser=parse_auto, metavar="auto|N", rich_help_panel="Memory")


def _memory(name: str, metavar: str, help: str, minimum: int | None = None) -> Any:
    return typer.Option(name, metavar=metavar, help=help, min=minimum, rich_help_panel="Memory")


_NOT_YET = {
    "--kv-resident": ("keep part of the KV cache in VRAM", "attention cannot read a KV cache from two memories yet"),
    "--spec": ("guess tokens ahead", "Strata has no speculative decoding yet"),
    "--mtp": ("guess tokens with the model's draft layers", "Strata cannot run draft layers yet"),
    "--vision": ("read images", "Strata reads text only, so far"),
}


def _not_yet(name: str) -> Any:
    """Declare an option of the field that does not exist yet: it is refused by name, with or without a value."""
    asked, found = _NOT_YET[name]

    def refuse(given: bool) -> bool:
        if given:  # called while the line is parsed, before a value could be taken for something else
            fail(UsageError(f"{asked} ({name})", found, f"Leave {name} out"), json="--json" in sys.argv)
        return given

    return typer.Option(name, is_eager=True, callback=refuse, hidden=True)


def _choice(name: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise UsageError(f"{name} {value}", f"it can be {', '.join(allowed)}", f"Choose one, e.g. {name} {allowed[0]}")


def plan_options(
    *,
    device: Annotated[str, _memory("--device", "auto|cpu|cuda", "Where to run.")] = "auto",
    gpu: Annotated[str | None, _memory("--gpu", "INDEX|UUID", "Which GPU, as nvidia-smi counts.")] = None,
    max_context: Annotated[
        int | None,
        _memory(
            "--max-context", "N", "Tokens of prompt and answer to make room for. \\[default: 4096 or the model's]", 1
        ),
    ] = None,
    kv: Annotated[
        str | None, _memory("--kv", "f16|int8|f32", "Type of the KV cache (GPU: f16, int8; CPU: f32, f16).")
    ] = None,
    vram_budget: Annotated[
        int | None,
        size_option("--vram-budget", "All that may be taken on the device (CPU: the share of RAM that plays it)."),
    ] = None,
    ram_budget: Annotated[int | None, size_option("--ram-budget", "All that may be taken in RAM.")] = None,
    pinned_budget: Annotated[int | None, size_option("--pinned-budget", "All that may be page-locked.")] = None,
    vram_reserve_mib: Annotated[
        int | None,
        _memory("--vram-reserve-mib", "N", "MiB of VRAM to leave free. \\[default: by the facts, 256 to 1280]", 0),
    ] = None,
    expert_cache: Annotated[int | None, _auto("--expert-cache", "Expert slots to keep ready.")] = None,
    prefill: Annotated[int | None, _auto("--prefill", "Tokens of the largest prompt chunk.")] = None,
    kv_resident: Annotated[bool, _not_yet("--kv-resident")] = False,
    spec: Annotated[bool, _not_yet("--spec")] = False,
    mtp: Annotated[bool, _not_yet("--mtp")] = False,
    vision: Annotated[bool, _not_yet("--vision")] = False,
) -> "PlanOptions":
    """Turn the command line's values into the planner's options.

    Raises
    ------
    UsageError
        A value that is none of those the option takes.
    """
    from strata.doctor.plan import PlanOptions

    _choice("--device", device, ("auto", "cpu", "cuda"))
    _choice("--kv", kv, ("f16", "f32", "int8"))
    if device == "cpu" and gpu is not None:
        raise UsageError(f"use --device cpu with --gpu {gpu}", "the CPU needs no GPU", "Leave one of the two out")
    if (vram_reserve_mib or 0) << 20 > _LARGEST:
        raise UsageError(f"leave {vram_reserve_mib} MiB free", "no device has as much", "Give a smaller number of MiB")
    return PlanOptions(
        device=device,
        gpu=gpu,
        max_context=max_context,
        kv=kv,
        vram_budget_bytes=vram_budget,
        ram_budget_bytes=ram_budget,
        pinned_budget_bytes=pinned_budget,
        vram_reserve_bytes=None if vram_reserve_mib is None else vram_reserve_mib << 20,
        expert_cache=expert_cache or None,  # 0 is how `parse_auto` says auto
        prefill=prefill or None,
    )


def with_plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every option of `plan_options`; it receives them as one argument called ``options``."""
    shared = inspect.signature(plan_options).parameters

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        options = plan_options(**{name: arguments.pop(name) for name in shared})
        command(options=options, **arguments)

    own = [p for p in inspect.signature(command).parameters.values() if p.name != "options"]
    # typer reads both of these; the annotations are real objects, since neither module postpones them
    run.__signature__ = inspect.Signature([*own, *shared.values()])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in [*own, *shared.values()]}
    return run
